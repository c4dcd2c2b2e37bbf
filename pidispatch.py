"""pidispatch: the queue, the budget and the box for the Pi coding agent.

A forge sends a webhook, triggers.json says whether it starts work, a durable
SQLite queue holds the work, each job runs Pi once in a locked-down throw-away
container, and a branch, a review request and a run record come out. A person
decides what is merged; pidispatch never merges.

The map, bottom-up; a section uses only what stands above it:

    vocabulary   forge table, reasons, outcomes, states, defaults
    errors       PidispatchError and its few kinds, each with an exit code
    settings     one typed object from the environment, .env and the overlay
    identity     job ids, keys, branches, container names; pure functions
    triggers     typed rules, refusals, JSON Schema, matching an event
    limits       typed scope caps and pause windows, refusals, JSON Schema
    forges       verify, parse, who asks, comment, review request; one class each
    store        all SQL, one writer
    prompts      the Jinja environment; prompt, HARD_RULES, comments
    box          Docker: network, gate, container, wait, stop, reap
    publish      host-side git: mirrors, packs, bundles, pushes, requests
    dispatch     the ladder before spending; one job from claim to record
    intake       the HTTP edge, the inbox, the poller, the watchers of files
    surfaces     tables, run detail, the panel, the comparison, doctor
    cli          click commands: parsing and calling, nothing else
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path, PurePosixPath
from typing import (
    IO,
    TYPE_CHECKING,
    Annotated,
    Any,
    BinaryIO,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
    cast,
)

import click
import msgspec

if TYPE_CHECKING:
    import sqlite3
    import subprocess
    from datetime import date
    from ipaddress import IPv4Network

    import docker
    import requests
    import sqlite_utils
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

# All that is made while this loads is kept: to look through it for garbage, dozens of
# times, was a fifth of a command's start. The last lines switch it on again.
gc.disable()

T = TypeVar("T")

__version__ = "0.1.0"

# =============================================================================
# vocabulary
#
# Fixed words and tables. Every reason, outcome and state that a user, a record
# or a log line can show stands here once; every forge and provider is one row.
# Knows nothing of the rest of the module.
# =============================================================================

#: The most replicas one rule may ask for. A literal, not a reading of
#: PI_CONCURRENCY: its default is 3, and a fourth replica would queue behind the
#: other three instead of racing them.
REPLICAS_MAX = 3

PI_VERSION = "1.6.0"
OFFLINE_BASE = "pidispatch/base:offline"
LABEL = "dev.pi-dispatch."
OUTER_NETWORK = "pi-dispatch-out"
GATE_PORT = 8080
RESULT_REF = "refs/pidispatch/result"
REQUEST_REF = "refs/pidispatch/request"
HARD_RULES_SENTINEL = "pidispatch-hard-rules-v1"

DAY = 86_400.0
RETENTION_SECONDS = 31 * DAY
WINDOW_SECONDS = 600.0
JOB_SECONDS = 1_800
#: How the ids of polled events begin.
POLLED = "poll-"
#: Lists of a forge may show things late and out of order, by so many seconds.
POLL_OVERLAP = 120.0
#: What happened while nobody looked for longer than this is not made up for:
#: as long as GitHub keeps the deliveries of a webhook.
POLL_GAP = 3 * DAY
#: Nothing that is tried again waits longer, in seconds: a time further ahead was noted
#: while the clock was ahead of what it is now, and is due.
WAIT_MAX = 900.0
MAX_BODY_BYTES = 25 * 1024 * 1024
MAX_NUMBER = 2**53

TargetType = Literal["issue", "pull_request", "local"]
ForgeKind = Literal["github", "gitlab", "forgejo", "azure"]
#: What people make of a review request, and what an event may say of it.
Picked = Literal["merged", "closed"]
Ending = Literal["merged", "closed", "reopened"]


class ForgeRow(msgspec.Struct, frozen=True):
    """What differs between forges as data; behaviour is in section `forges`.

    `label_actions` says what counts as added by the actions that a label rule
    knows: everything the item carries, what the event says was added, or nothing.
    `comment_actions` are the words for a newly created comment; None where the
    parser alone can tell.
    """

    kind: ForgeKind
    prefix: str
    request_separator: str
    request_noun: str
    issue_noun: str
    pr_actions: tuple[str, ...]
    label_action: str | None
    close_word: str | None
    request_ref: str | None
    cli: str
    secret_variable: str
    label_actions: Mapping[str | None, Literal["all", "added", "nothing"]]
    comment_actions: tuple[str | None, ...] | None
    #: A ref that reaches a request's head also when its branch is a fork's.
    merge_ref: str | None = None
    #: Issues are work items: of a project and in no repository, tagged whatever the
    #: case, while requests carry no labels.
    work_items: bool = False
    #: Whether there are tokens for one job and one repository alone.
    job_tokens: bool = False
    #: Characters that we may put into a request's description: GitHub takes 65,536,
    #: Azure 4,000.
    request_chars: int = 60_000


FORGES: dict[str, ForgeRow] = {
    row.kind: row
    for row in (
        ForgeRow(
            "github",
            "gh-",
            "#",
            "pull request",
            "issue",
            (
                "labeled",
                "opened",
                "synchronize",
                "reopened",
                "review_submitted",
                "closed",
            ),
            "labeled",
            "closed",
            "refs/pull/{n}/head",
            "gh",
            "WEBHOOK_SECRET",
            # `opened` is silent, because a `labeled` follows for each label
            {"labeled": "added", "opened": "nothing", "reopened": "nothing"},
            ("created",),
            job_tokens=True,
        ),
        ForgeRow(
            "gitlab",
            "gl-",
            "!",
            "merge request",
            "issue",
            ("open", "update", "reopen", "approved", "close"),
            None,
            "close",
            "refs/merge-requests/{n}/head",
            "glab",
            "GITLAB_WEBHOOK_SECRET",
            {"open": "all", "update": "added", "reopen": "nothing"},
            ("create", None),  # before 16.11 a note has no action
        ),
        ForgeRow(
            "forgejo",
            "fj-",
            "#",
            "pull request",
            "issue",
            ("label_updated", "opened", "synchronized", "reopened", "closed"),
            "label_updated",
            "closed",
            "refs/pull/{n}/head",
            "tea",
            "FORGEJO_WEBHOOK_SECRET",
            {"opened": "all", "label_updated": "added", "reopened": "nothing"},
            ("created",),
        ),
        ForgeRow(
            "azure",
            "az-",
            "!",
            "pull request",
            "work item",
            ("created", "updated"),
            None,
            None,
            None,
            "az",
            "AZURE_WEBHOOK_SECRET",
            {"created": "all", "updated": "added"},
            None,
            "refs/pull/{n}/merge",
            work_items=True,
            request_chars=3_000,
        ),
    )
}

REVIEW_STATES = ("approved", "changes_requested", "commented")
TOOLS = ("read", "bash", "edit", "write", "grep", "find", "ls")
SHIPPED_FLOWS = ("fix-issue", "review", "task")
#: The kind of a job that works in a folder of the operator's; it has no forge.
LOCAL = "local"

#: Why a delivery that was understood starts nothing (20-deliveries).
DROP_REASONS = (
    "missing-sender-id",
    "self",
    "not-allowed",
    "authority-unknown",
    "unhandled-event",
    "no-allowlisted-label",
    "label-not-added",
    "no-trigger-phrase",
    "no-matching-pr-trigger",
    "review-state-not-matched",
    "no-review-body",
    "no-matching-close-trigger",
    "action-not-actionable",
    "no-repository",
    "missing-number",
    "confidential",
    "rate-limited",
)

#: Why a job was refused before it could spend anything (30-jobs, the ladder).
REFUSALS = (
    "settings-overlay-invalid",
    "job-image-missing",
    "job-image-forge-unsupported",
    "job-image-replicas-unsupported",
    "job-image-exclude-tools-unsupported",
    "provider-unconfigured",
    "model-unknown",
    "gate-image-missing",
    "sessions-dir-unset",
    "forge-token-unavailable",
    "unprotected-branch",
    "forge-out-of-reach",
    "sha-gone",
    "flow-not-found",
    "daily-token-cap",
    "scope-cap",
    "over-budget",
    "soft-hold",
    "dirty-tree",
    "folder-unusable",
    "local-needs-local-engine",
    "engine-not-isolating",
    "repository-unavailable",
)

#: What an agent that publishes for itself may leave undone, or do beside it.
AGENT_FAULTS = ("pushed-elsewhere", "not-pushed", "request-missing")

#: Why a finished run's result was not published: of the result, of the push, of
#: the forge's API.
PUBLISH_REFUSALS = (
    "bundle-refused",
    "branch-moved",
    "push-refused",
    "workflow-permission",
    "request-refused",
    "comment-refused",
    "repository-unavailable",
    *AGENT_FAULTS,
)

#: What the runner may name as the reason of its exit code 2.
POLICY_REASONS = (
    "turn-budget",
    "token-budget",
    "provider-auth-refused",
    "model-unknown",
    "flow-not-found",
    "runner-policy",
    "timeout",
)

#: How a run that had started may end short of completion (30-jobs, outcome).
END_REASONS = (
    *POLICY_REASONS,
    "no-result",
    "infra",
    "gate-lost",
    "operator-cancel",
    "shutdown",
    "oom-killed",
    "disk-low",
    "outbox-refused",
    "unexpected-exit",
    "lost",
    "internal-error",
)

#: Why a rule's `resume` began anew, or what it said was not kept (40-box, sessions).
SESSION_REASONS = (
    "absent",
    "retried",
    "too-old",
    "too-large",
    "pi-version-changed",
    "publish-changed",
    "unreadable",
    "not-kept",
    "replaced",
)

Outcome = Literal["completed", "policy", "failed"]


#: The life of a job row. `starting` is entered by the transaction that reserves
#: the caps; `publishing` means paid for, recorded, and not yet published.
JOB_STATES = ("queued", "claimed", "starting", "running", "publishing", "done")
#: Those of a job that can still be cancelled.
OPEN_STATES = JOB_STATES[:4]
DELIVERY_STATES = ("pending", "admitted")
LEDGER_STATES = ("reserved", "kept", "released")


class Provider(msgspec.Struct, frozen=True):
    """A model provider: where it is and how it takes its key.

    `style` is the wire format that the gate meters; the image's catalogue may
    name another one for a single model.
    """

    name: str
    base_url: str
    style: str
    key_variable: str
    auth_header: str = "authorization"
    auth_prefix: str = "Bearer "
    models: tuple[Mapping[str, Any], ...] = ()


PROVIDERS: dict[str, Provider] = {
    row.name: row
    for row in (
        Provider(
            "anthropic",
            "https://api.anthropic.com",
            "anthropic-messages",
            "ANTHROPIC_API_KEY",
            "x-api-key",
            "",
        ),
        Provider(
            "openai", "https://api.openai.com/v1", "openai-responses", "OPENAI_API_KEY"
        ),
        Provider(
            "google",
            "https://generativelanguage.googleapis.com/v1beta",
            "google-generative-ai",
            "GEMINI_API_KEY",
            "x-goog-api-key",
            "",
        ),
        Provider(
            "openrouter",
            "https://openrouter.ai/api/v1",
            "openai-completions",
            "OPENROUTER_API_KEY",
        ),
        Provider(
            "mistral",
            "https://api.mistral.ai",
            "mistral-conversations",
            "MISTRAL_API_KEY",
        ),
        Provider(
            "groq",
            "https://api.groq.com/openai/v1",
            "openai-completions",
            "GROQ_API_KEY",
        ),
        Provider("xai", "https://api.x.ai/v1", "openai-completions", "XAI_API_KEY"),
        Provider(
            "deepseek",
            "https://api.deepseek.com",
            "openai-completions",
            "DEEPSEEK_API_KEY",
        ),
    )
}

STYLES = (
    "anthropic-messages",
    "openai-completions",
    "openai-responses",
    "google-generative-ai",
    "mistral-conversations",
)

log = logging.getLogger("pidispatch")


def random_hex(size: int) -> str:
    """`size` random bytes fit for secrets, as hex; `secrets` itself imports slowly."""
    return os.urandom(size).hex()


#: Wall-clock seconds since the epoch; passed in so that tests own the time.
Clock = Callable[[], float]


class _LazyPattern:
    """Compiled when it is first used: all of them are a tenth of a command's start."""

    def __init__(self, text: str, flags: int) -> None:
        self.text, self.flags = text, flags

    def __getattr__(self, name: str) -> Any:
        compiled = re.compile(self.text, self.flags)
        for method in ("fullmatch", "match", "search", "sub", "finditer", "pattern"):
            setattr(self, method, getattr(compiled, method))
        return getattr(compiled, name)


def _pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    return cast("re.Pattern[str]", _LazyPattern(text, flags))


# =============================================================================
# errors
#
# What a user can cause or must be told. Each kind carries the exit code of the
# process and, where there is one, the fix; the CLI prints both on one line.
# =============================================================================


class PidispatchError(Exception):
    """Anything we tell a user about; `fix` says what to do, if we know."""

    exit_code = 1

    def __init__(self, message: str, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix


class ConfigError(PidispatchError):
    """The operator's own configuration is wrong (exit 2, never retried)."""

    exit_code = 2


class Faults(ConfigError):
    """Every fault of one file or of the environment, found in one pass."""

    def __init__(
        self, source: str, faults: Sequence[str], fix: str | None = None
    ) -> None:
        self.source = source
        self.faults = tuple(faults)
        message = "\n".join(f"{source}: {fault}" for fault in faults)
        super().__init__(message, fix or f"correct {source}")


class InfraError(PidispatchError):
    """Engine, network or forge trouble that may pass: worth a retry."""


class Refused(PidispatchError):
    """A determinate no: recorded, commented once, never retried."""

    def __init__(self, reason: str, message: str, fix: str | None = None) -> None:
        super().__init__(message, fix)
        self.reason = reason


#: Tokens that jobs at work hold, each with its spellings. By its job: replicas may
#: hold one and the same, and the first to end leaves it to the others.
_LIVE_SECRETS: dict[object, tuple[str, ...]] = {}


def spellings_of(secret: str) -> Iterator[str]:
    """Raw, URL-encoded, JSON-escaped, shell-quoted, and as basic credentials."""
    import base64
    import shlex
    from urllib.parse import quote

    yield secret
    yield quote(secret, safe="")
    yield json.dumps(secret)[1:-1]
    yield shlex.quote(secret)
    for user in ("", "x-access-token", "oauth2"):
        yield base64.b64encode(f"{user}:{secret}".encode()).decode()
    yield base64.b64encode(secret.encode()).decode().rstrip("=")


@contextlib.contextmanager
def live_secrets() -> Iterator[Callable[[str], None]]:
    """Gives a function that names a secret; all it named are known until the end."""
    named: list[object] = []

    def name(secret: str) -> None:
        named.append(object())
        found = sorted(set(spellings_of(secret)), key=len, reverse=True)
        _LIVE_SECRETS[named[-1]] = tuple(found)

    try:
        yield name
    finally:
        for key in named:
            del _LIVE_SECRETS[key]


def without_live_secrets(text: str) -> str:
    """The text without any token that a running job holds."""
    for spellings in list(_LIVE_SECRETS.values()):
        for spelling in spellings:
            text = text.replace(spelling, "***")
    return text


def log_event(event: str, level: int = logging.INFO, **fields: object) -> None:
    """One log line: a fixed event name, then ids, numbers and fixed words.

    An `error` is shown with its traceback unless it is one of ours.
    """
    error = fields.get("error")
    trace = error if isinstance(error, Exception) else None
    ours = isinstance(error, PidispatchError)
    log.log(level, event, exc_info=None if ours else trace, extra={"fields": fields})


# =============================================================================
# settings
#
# One typed, frozen object. Each field carries its variable, its parser and its
# sentence for docs/settings.md. The real environment wins over `.env` in the
# working directory; every wrong value is named in one go.
# =============================================================================


def _integer(minimum: int, maximum: int = 10**16) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"0|[1-9][0-9]{0,15}", text.strip()):
            raise ValueError("must be a whole number in plain digits")
        if int(text) < minimum:
            raise ValueError(f"must be at least {minimum}")
        if int(text) > maximum:
            raise ValueError(f"must be at most {maximum}")
        return int(text)

    return parse


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty; remove the variable to leave it unset")
    return text.strip()


def _path(text: str) -> Path:
    return Path(_text(text)).expanduser()


def _url(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", text.strip()):
        raise ValueError("must be an http(s) URL without credentials or query")
    return text.strip().rstrip("/")


def _header_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9-]+", text.strip()):
        raise ValueError("must be the name of a header, such as X-Webhook-Secret")
    return text.strip()


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word for word in re.split(r"[,\s]+", text) if word)
    if not words:
        raise ValueError("is empty; remove the variable to leave it unset")
    return words


def _repos(text: str) -> tuple[str, ...]:
    repos = tuple(dict.fromkeys(_words(text)))
    for repo in repos:
        if not re.fullmatch(r"([a-z]+:)?[^\s/:]+(/[^\s/:]+)+", repo):
            raise ValueError(f"must be owner/name, comma separated; not {repo}")
    return repos


def _secrets(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if not parts:
        raise ValueError("is empty; an unset secret is never 'no check'")
    return parts


def _choice(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip() not in words:
            raise ValueError("must be one of " + ", ".join(words))
        return text.strip()

    return parse


def _switch(text: str) -> bool:
    if text.strip() not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return text.strip() == "1"


def _zone(text: str) -> str:
    from zoneinfo import ZoneInfo

    try:
        ZoneInfo(text)
    except (ValueError, OSError, KeyError) as error:
        raise ValueError("must be an IANA time zone such as Europe/Berlin") from error
    return text


def _memory(text: str) -> str:
    if not re.fullmatch(r"[1-9][0-9]*[kmg]?", text.strip()):
        raise ValueError("must be a size such as 512m or 4g")
    return text.strip()


def _pool(text: str) -> str:
    from ipaddress import IPv4Network

    try:
        if IPv4Network(text.strip()).prefixlen > 27:
            raise ValueError("must hold two /28 or more: a job's and the gates'")
    except ValueError as error:
        raise ValueError(f"must be an IPv4 range such as 10.213.0.0/16: {error}") from (
            error
        )
    return text.strip()


def _data_dir() -> Path:
    import platformdirs

    return Path(platformdirs.user_data_dir("pidispatch", appauthor=False))


class SettingRow(NamedTuple):
    """How one field of Settings is set: its variable, its parser, its meaning."""

    variable: str
    parse: Callable[[str], Any]
    doc: str


_ROWS: list[SettingRow] = []


def _setting(variable: str, parse: Callable[[str], Any], default: Any, doc: str) -> Any:
    """A field's default; its row is kept in the order of the fields."""
    _ROWS.append(SettingRow(variable, parse, doc))
    if callable(default):
        return msgspec.field(default_factory=default)
    return msgspec.field(default=default)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an operator can set; SETTINGS has the variable of each field."""

    db: Path = _setting(
        "PI_DB",
        _path,
        lambda: _data_dir() / "pidispatch.db",
        "The queue: one SQLite file.",
    )
    state_dir: Path = _setting(
        "PI_STATE_DIR",
        _path,
        lambda: _data_dir() / "state",
        "Mirrors, kept bundles and captured logs; created 0700.",
    )
    triggers_file: Path | None = _setting(
        "PI_TRIGGERS_FILE",
        _path,
        None,
        "The rules; `serve` falls back to ./triggers.json.",
    )
    limits_file: Path | None = _setting(
        "PI_LIMITS_FILE",
        _path,
        None,
        "Scope caps and pause windows; `serve` falls back to ./limits.json, if there.",
    )
    settings_file: Path | None = _setting(
        "PI_SETTINGS_FILE", _path, None, "JSON overlay, read again before every job."
    )
    providers_file: Path | None = _setting(
        "PI_PROVIDERS_FILE", _path, None, "More model providers, also local ones."
    )
    sessions_dir: Path | None = _setting(
        "PI_SESSIONS_DIR",
        _path,
        None,
        "Transcripts of rules with `resume`; one folder a lineage, 0700.",
    )
    bind: str = _setting(
        "PI_BIND", _text, "0.0.0.0", "Address of the webhook receiver."
    )
    port: int = _setting(
        "PI_PORT", _integer(0, 65_535), 3000, "Port of the webhook receiver."
    )
    panel_bind: str = _setting(
        "PI_PANEL_BIND", _text, "127.0.0.1", "Address of the panel."
    )
    panel_port: int = _setting(
        "PI_PANEL_PORT", _integer(0, 65_535), 3001, "Port of the panel."
    )
    panel_token: str | None = _setting(
        "PANEL_TOKEN", _text, None, "Needed when the panel is bound elsewhere."
    )
    concurrency: int = _setting(
        "PI_CONCURRENCY", _integer(1), 3, "Jobs that run at once."
    )
    job_image: str = _setting(
        "PI_JOB_IMAGE", _text, "pi-job:latest", "Image of a job whose rule names none."
    )
    gate_image: str = _setting(
        "PI_GATE_IMAGE",
        _text,
        "pi-job:latest",
        "Image the gate runs from; never the trigger's.",
    )
    gate_network: str | None = _setting(
        "PI_GATE_NETWORK",
        _text,
        None,
        "One more engine network for the gate, to reach a model server in a container.",
    )
    job_memory: str = _setting(
        "PI_JOB_MEMORY", _memory, "4g", "Memory of a job; no swap."
    )
    job_cpus: int = _setting("PI_JOB_CPUS", _integer(1), 2, "CPUs of a job.")
    network_pool: str = _setting(
        "PI_NETWORK_POOL",
        _pool,
        "10.213.0.0/16",
        "Range of the jobs' /28 networks and of the one that their gates share.",
    )
    egress: str = _setting(
        "PI_EGRESS", _text, "1", "Exactly `0` removes the job network's isolation."
    )
    egress_allow: tuple[str, ...] = _setting(
        "PI_EGRESS_ALLOW", _words, (), "Hosts (host or host:port) a job may reach."
    )
    models_allow: tuple[str, ...] = _setting(
        "PI_MODELS_ALLOW", _words, (), "More provider/model names a job may call."
    )
    provider: str = _setting("PI_PROVIDER", _text, "anthropic", "Model provider.")
    model: str = _setting("PI_MODEL", _text, "claude-sonnet-4-5", "Model.")
    max_turns: int = _setting("PI_MAX_TURNS", _integer(1), 30, "Turns of one job.")
    max_tokens: int | None = _setting(
        "PI_MAX_TOKENS", _integer(1), None, "Tokens of one job, forks included."
    )
    clone_depth: int = _setting(
        "PI_CLONE_DEPTH", _integer(2), 50, "Commits of history in the packed clone."
    )
    daily_cap: int = _setting("PI_DAILY_CAP", _integer(1), 25, "Jobs a day.")
    weekly_cap: int | None = _setting(
        "PI_WEEKLY_CAP", _integer(1), None, "Jobs a week."
    )
    monthly_cap: int | None = _setting(
        "PI_MONTHLY_CAP", _integer(1), None, "Jobs a month."
    )
    soft_hold_pct: int | None = _setting(
        "PI_SOFT_HOLD_PCT",
        _integer(1, 99),
        None,
        "Refuse new jobs from this share of a job cap on, in percent.",
    )
    daily_token_cap: int | None = _setting(
        "PI_DAILY_TOKEN_CAP",
        _integer(1),
        None,
        "Tokens a day; a job that starts reserves its PI_MAX_TOKENS.",
    )
    timezone: str = _setting("PI_TIMEZONE", _zone, "UTC", "Zone of the caps' windows.")
    target_hourly: int = _setting(
        "PI_TARGET_HOURLY",
        _integer(0),
        6,
        "Deliveries an hour for one target; 0 is off.",
    )
    poll_repos: tuple[str, ...] = _setting(
        "POLL_REPOS", _repos, (), "Repositories to poll, owner/name, comma separated."
    )
    poll_interval: int = _setting(
        "POLL_INTERVAL_SECONDS",
        _integer(30, 86_400),
        60,
        "Seconds between two looks at a repository; GitHub may ask for more.",
    )
    publish: str = _setting(
        "PI_PUBLISH",
        _choice("host", "agent"),
        "host",
        "Who pushes, when a rule is silent.",
    )
    github_authority: str = _setting(
        "PI_GITHUB_AUTHORITY",
        _choice("payload", "api"),
        "payload",
        "Believe GitHub's association, or ask its API as well.",
    )
    capture_logs: bool = _setting(
        "PI_CAPTURE_JOB_LOGS", _switch, False, "Keep each job's event log."
    )
    log_retention_days: int = _setting(
        "PI_LOG_RETENTION_DAYS", _integer(0), 30, "Days captured logs are kept."
    )
    on_failure: Path | None = _setting(
        "PI_ON_FAILURE",
        _path,
        None,
        "Program called with job id, outcome and reason of a run that did not "
        "complete; 10 seconds, no shell, nothing of our environment but PATH and HOME.",
    )
    webhook_secret: tuple[str, ...] = _setting(
        "WEBHOOK_SECRET", _secrets, (), "GitHub's webhook secrets, comma separated."
    )
    github_auth_source: str = _setting(
        "GITHUB_AUTH_SOURCE",
        _choice("pat", "app", "gh"),
        "pat",
        "Where GitHub's token comes from.",
    )
    github_pat: str | None = _setting(
        "GITHUB_PAT", _text, None, "Personal access token."
    )
    github_app_id: str | None = _setting("GITHUB_APP_ID", _text, None, "App id.")
    github_app_key: Path | None = _setting(
        "GITHUB_APP_PRIVATE_KEY_FILE", _path, None, "App's private key (PEM)."
    )
    github_app_installation: str | None = _setting(
        "GITHUB_APP_INSTALLATION_ID",
        _text,
        None,
        "Installation; looked up per repository when unset.",
    )
    github_api_url: str = _setting(
        "GITHUB_API_URL", _url, "https://api.github.com", "GitHub's API."
    )
    gitlab_url: str = _setting(
        "GITLAB_URL", _url, "https://gitlab.com", "The GitLab instance."
    )
    gitlab_token: str | None = _setting(
        "GITLAB_TOKEN", _text, None, "GitLab token with the scope `api`."
    )
    gitlab_webhook_mode: str | None = _setting(
        "GITLAB_WEBHOOK_MODE",
        _choice("signature", "token"),
        None,
        "The one credential that is accepted; needed with the secret.",
    )
    gitlab_webhook_secret: tuple[str, ...] = _setting(
        "GITLAB_WEBHOOK_SECRET",
        _secrets,
        (),
        "Signing tokens (`whsec_…`) or secret tokens, comma separated.",
    )
    forgejo_url: str | None = _setting(
        "FORGEJO_URL", _url, None, "Forgejo's or Gitea's address, sub-path included."
    )
    forgejo_token: str | None = _setting(
        "FORGEJO_TOKEN", _text, None, "Access token of an account of ours there."
    )
    forgejo_bot_id: int | None = _setting(
        "FORGEJO_BOT_ID", _integer(1), None, "That account's id; asked when unset."
    )
    forgejo_webhook_secret: tuple[str, ...] = _setting(
        "FORGEJO_WEBHOOK_SECRET",
        _secrets,
        (),
        "Forgejo's webhook secrets, comma separated.",
    )
    azure_org_url: str | None = _setting(
        "AZURE_ORG_URL",
        _url,
        None,
        "Azure DevOps organisation, or a server's collection.",
    )
    azure_token: str | None = _setting(
        "AZURE_TOKEN", _text, None, "Personal access token there."
    )
    azure_webhook_mode: str = _setting(
        "AZURE_WEBHOOK_MODE",
        _choice("basic", "header"),
        "basic",
        "Where Azure's deliveries bring the secret: basic authentication, or a header.",
    )
    azure_webhook_secret: tuple[str, ...] = _setting(
        "AZURE_WEBHOOK_SECRET",
        _secrets,
        (),
        "Azure's webhook secrets, comma separated; in basic mode `user:password`, "
        "or a password for any user.",
    )
    azure_webhook_header: str | None = _setting(
        "AZURE_WEBHOOK_HEADER",
        _header_name,
        None,
        "The header that brings the secret in header mode.",
    )
    providers: Mapping[str, Provider] = msgspec.field(
        default_factory=lambda: dict(PROVIDERS)
    )
    keys: Mapping[str, str] = msgspec.field(default_factory=dict)

    def __repr__(self) -> str:
        return "Settings(…)"

    @property
    def isolated(self) -> bool:
        """Whether job networks are cut off; only exactly `0` opens them."""
        return self.egress != "0"


#: Every setting by its field, in the order of docs/settings.md.
SETTINGS: Mapping[str, SettingRow] = dict(
    zip(Settings.__struct_fields__, _ROWS, strict=False)  # the last two have none
)


#: A forge that is to be served with the first needs the others as well.
_TOGETHER = (
    ("GITLAB_WEBHOOK_SECRET", "GITLAB_WEBHOOK_MODE", "GITLAB_TOKEN"),
    ("FORGEJO_WEBHOOK_SECRET", "FORGEJO_URL", "FORGEJO_TOKEN"),
    ("AZURE_WEBHOOK_SECRET", "AZURE_ORG_URL", "AZURE_TOKEN"),
)


def signing_key(secret: str) -> bytes | None:
    """The key in a signing token, `whsec_` and base64; None when it is not one."""
    import base64

    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except ValueError:
        return None
    return key if key and secret.startswith("whsec_") else None


#: What each setting allows and two of them together do not.
_CONTRADICTIONS: tuple[tuple[Callable[[Mapping[str, Any]], bool], str], ...] = (
    (
        lambda parsed: (
            parsed.get("gitlab_webhook_mode") == "signature"
            and not all(map(signing_key, parsed.get("gitlab_webhook_secret", ())))
        ),
        "GITLAB_WEBHOOK_SECRET=… must be signing tokens, `whsec_` and base64, with "
        "GITLAB_WEBHOOK_MODE=signature",
    ),
    (
        lambda parsed: (
            parsed.get("azure_webhook_mode") == "header"
            and "azure_webhook_header" not in parsed
        ),
        "AZURE_WEBHOOK_MODE=header needs AZURE_WEBHOOK_HEADER",
    ),
)


def load_settings(
    environ: Mapping[str, str] | None = None, dotenv: Path | None = Path(".env")
) -> Settings:
    """Read every setting; the environment wins over `dotenv` (may be absent).

    Raises `Faults` that names every wrong variable at once.
    """
    faults: list[str] = []
    values = _dotenv(dotenv, faults) if dotenv and dotenv.is_file() else {}
    values.update(os.environ if environ is None else environ)
    parsed = _parse_fields(values, faults)
    faults += [
        f"{first} is of no use without {other}"
        for first, *others in _TOGETHER
        for other in others
        if first in values and other not in values
    ]
    faults += [fault for holds, fault in _CONTRADICTIONS if holds(parsed)]
    if "providers_file" in parsed:
        parsed["providers"] = _load_providers(parsed["providers_file"], faults)
    providers: Mapping[str, Provider] = parsed.get("providers", PROVIDERS)
    parsed["keys"] = {
        name: values[row.key_variable].strip()
        for name, row in providers.items()
        if values.get(row.key_variable, "").strip()
    }
    if faults:
        raise Faults("settings", faults, "correct the environment or .env")
    return Settings(**parsed)


def steering(settings: Settings) -> Iterator[Path]:
    """The files that say what we do, hold our secrets, or are our memory.

    Whoever can write one of them needs no box. A `.env` of the working directory
    that names nothing of ours, such as a project's own, is not among them.
    """
    paths = (getattr(settings, name) for name in SETTINGS)
    yield from (path.absolute() for path in paths if isinstance(path, Path))
    defaults = (Path("triggers.json"), Path("limits.json"))
    yield from (path.absolute() for path in defaults if os.path.lexists(path))
    dotenv = Path(".env")
    ours = {row.variable for row in SETTINGS.values()}
    ours |= {row.key_variable for row in settings.providers.values()}
    if dotenv.is_file() and ours & _dotenv(dotenv, []).keys():
        yield dotenv.absolute()


def _dotenv(path: Path, faults: list[str]) -> dict[str, str]:
    from dotenv import dotenv_values

    try:
        kept = dotenv_values(path)
    except (OSError, UnicodeError) as error:
        faults.append(f"{path} cannot be read: {type(error).__name__}")
        return {}
    return {name: value for name, value in kept.items() if value is not None}


def _parse_fields(values: Mapping[str, str], faults: list[str]) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for name, row in SETTINGS.items():
        if row.variable not in values:
            continue
        text = values[row.variable]
        try:
            parsed[name] = row.parse(text)
        except ValueError as error:
            shown = "…" if _is_secret(row.variable) else json.dumps(text)
            faults.append(f"{row.variable}={shown} {error}")
    return parsed


def _is_secret(variable: str) -> bool:
    return bool(re.search(r"SECRET|TOKEN|PAT$|_KEY", variable))


_PROVIDER_NAME = _pattern(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _load_providers(path: Path, faults: list[str]) -> dict[str, Provider]:
    """The built-in providers and those of PI_PROVIDERS_FILE.

    The file is `{"providers": {name: {"baseUrl", "style", "keyVariable",
    "authHeader"?, "authPrefix"?, "models"?}}}`.
    """
    providers = dict(PROVIDERS)
    try:
        rows = json.loads(path.read_text("utf-8"))["providers"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        faults.append(f"PI_PROVIDERS_FILE {path}: {type(error).__name__}: {error}")
        return providers
    for name, row in rows:
        try:
            providers[name] = _provider(name, row)
        except (ValueError, KeyError, TypeError) as error:
            faults.append(f"PI_PROVIDERS_FILE {path}: providers.{name}: {error}")
    return providers


def _provider(name: str, row: Any) -> Provider:
    known = {"baseUrl", "style", "keyVariable", "authHeader", "authPrefix", "models"}
    if not _PROVIDER_NAME.fullmatch(name):
        raise ValueError("the name must be letters, digits, '.', '_' or '-'")
    if not isinstance(row, dict) or set(row) - known:
        raise ValueError("allowed fields are " + ", ".join(sorted(known)))
    for key in ("baseUrl", "style", "keyVariable"):
        if not isinstance(row.get(key), str):
            raise ValueError(f"{key} is required, a string")
    if row["style"] not in STYLES:
        raise ValueError("style must be one of " + ", ".join(STYLES))
    anthropic = row["style"] == "anthropic-messages"
    return Provider(
        name,
        _url(row["baseUrl"]),
        row["style"],
        row["keyVariable"],
        row.get("authHeader", "x-api-key" if anthropic else "authorization"),
        row.get("authPrefix", "" if anthropic else "Bearer "),
        tuple(_model_row(model) for model in row.get("models", ())),
    )


def _model_row(row: Any) -> Mapping[str, Any]:
    """One of pi's model rows; a wrong price would otherwise end the gate."""
    if not isinstance(row, dict) or not isinstance(row.get("id"), str):
        raise ValueError("models: each is an object with an id")
    cost: Any = row.get("cost", {})
    prices: list[Any] = list(cost.values()) if isinstance(cost, dict) else [None]
    if not all(type(price) in (int, float) and 0 <= price < 1e9 for price in prices):
        raise ValueError(f"models: the cost of {row['id']} must hold prices, from 0")
    return row


#: What the overlay may change, by its name in the file.
OVERLAY_FIELDS = (
    "provider",
    "model",
    "max_turns",
    "max_tokens",
    "daily_cap",
    "weekly_cap",
    "monthly_cap",
    "soft_hold_pct",
    "daily_token_cap",
)


def with_overlay(settings: Settings) -> Settings:
    """The settings of one job: PI_SETTINGS_FILE read now and laid over.

    Raises `Refused("settings-overlay-invalid")`; an absent file is no overlay.
    """
    path = settings.settings_file
    if path is None or not path.exists():
        return settings
    try:
        values = json.loads(path.read_text("utf-8"))
        if not isinstance(values, dict) or set(values) - set(OVERLAY_FIELDS):
            raise ValueError("allowed fields are " + ", ".join(OVERLAY_FIELDS))
        changes = {name: _overlaid(name, value) for name, value in values.items()}
    except (OSError, ValueError) as error:
        raise Refused("settings-overlay-invalid", f"{path}: {error}") from error
    return msgspec.structs.replace(settings, **changes)


def _overlaid(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{name}: {json.dumps(value)} must be a number or a string")
    try:
        return SETTINGS[name].parse(str(value))
    except ValueError as error:
        raise ValueError(f"{name}: {json.dumps(value)} {error}") from error


def resource(*parts: str) -> Path:
    """A packaged file or directory: templates/… or image/….

    In a checkout they stand beside this module; a wheel or a one-file binary
    carries them in the package `pidispatch_data`.
    """
    from importlib.resources import files

    beside = Path(__file__).parent
    if (beside / "templates").is_dir():
        return beside.joinpath(*parts)
    found = files("pidispatch_data")
    for part in parts:  # one by one: the package is a namespace, no directory itself
        found = found / part
    return Path(str(found))


# =============================================================================
# identity
#
# Pure functions from numbers and ids to names. The only place where a replica
# index is turned into a name, and nothing but an index ever is: no text from an
# issue reaches a branch, a container or a file name.
# =============================================================================

_SAFE_ID = _pattern(r"[A-Za-z0-9._-]{1,64}")
_CONTAINER_MAX = 128


def _digest(text: str, length: int = 32) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:length]


def delivery_name(delivery: str) -> str:
    """The delivery id as it stands in names: itself when safe, else a hash.

    An id that ends like a suffix of ours is hashed too, so that `x-r1` and
    replica 1 of `x`, or `x-again1` and a replay of `x`, never share a name.
    """
    suffixed = re.search(r"-(?:r|again)[0-9]+$", delivery)
    if _SAFE_ID.fullmatch(delivery) and not suffixed:
        return delivery
    return "h" + _digest(delivery)


def set_id(kind: str, delivery: str) -> str:
    """The id of the delivery's whole set; equal to the job id of a plain job."""
    return FORGES[kind].prefix + delivery_name(delivery)


def _suffix(replica: int | None) -> str:
    if replica is None:
        return ""
    if isinstance(replica, bool) or not 1 <= replica <= REPLICAS_MAX:
        raise ValueError(f"replica index {replica!r} is not 1..{REPLICAS_MAX}")
    return f"r{replica}"


def job_id(kind: str, delivery: str, replica: int | None = None) -> str:
    suffix = _suffix(replica)
    return set_id(kind, delivery) + (f"-{suffix}" if suffix else "")


def again_id(job: str, k: int) -> str:
    """The id of a job's k-th replay; a replay's own replays count on."""
    return f"{re.sub(r'-again[0-9]+$', '', job)}-again{k}"


def local_id(folder: Path, flow: str, task: str, minute: int) -> str:
    """One run of a folder; the same words in the same minute are the same run."""
    return "local-" + _digest("\0".join((str(folder), flow, task, str(minute))), 16)


def target_name(kind: str, repo: str, target_type: str, number: int) -> str:
    """`owner/repo#7`; `!` where requests are numbered apart from issues.

    A local job's is `local:<name of the folder>`.
    """
    if kind == LOCAL:
        return f"{LOCAL}:{repo}"
    request = target_type == "pull_request"
    separator = FORGES[kind].request_separator if request else "#"
    return f"{repo}{separator}{number}"


def dedup_key(target: str, flow: str, replica: int | None = None) -> str:
    """The semantic key: a replica coalesces with itself, never with a sibling."""
    suffix = _suffix(replica)
    return f"{target}:{flow}" + (f":{suffix}" if suffix else "")


def branch_name(number: int, replica: int | None = None) -> str:
    suffix = _suffix(replica)
    if isinstance(number, bool) or not 1 <= number <= MAX_NUMBER:
        raise ValueError("an issue number must be a positive integer")
    return f"pi/issue-{number}" + (f"-{suffix}" if suffix else "")


def title_marker(replica: int | None, replicas: int | None) -> str:
    return f"[r{replica}/{replicas}] " if replica is not None else ""


def siblings(replica: int | None, replicas: int | None) -> tuple[int, ...]:
    """The other indices of the set, ascending; none for a plain job."""
    return tuple(i for i in range(1, (replicas or 0) + 1) if i != replica)


def request_key(place: str, number: int) -> str:
    """A review request among all of them; `place` is the repository's, one spelling."""
    return f"{place}!{number}"


def label_digest(name: str) -> str:
    """What is remembered of a label: enough to know it again."""
    return _digest(name, 16)


def comment_marker(name: str, kind: str) -> str:
    """The hidden last line of a comment, by which it is found and never repeated."""
    return f"<!-- pidispatch:{name}:{kind} -->"


def container_name(job: str) -> str:
    name = f"pi-job-{job}"
    if len(name) + len("-gate") <= _CONTAINER_MAX:
        return name
    return f"pi-job-h{_digest(job)}"


def network_name(job: str) -> str:
    return container_name(job) + "-net"


def gate_name(job: str) -> str:
    return container_name(job) + "-gate"


def mirror_name(kind: str, repo: str) -> str:
    """A file name for the repository's mirror: readable, unique, short."""
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", repo)[:60]
    return f"{kind}-{readable}-{_digest(f'{kind} {repo}', 12)}.git"


def cron_id(name: str, scheduled: int) -> str:
    return f"cron-{name}-{scheduled}"


def session_key(kind: str, repo: str, ref: str) -> str:
    """The store key of a resumed lineage; takes no replica, on purpose."""
    return _digest("\0".join((kind, repo, ref)))


# =============================================================================
# triggers
#
# The rules: typed models, every refusal at load, the JSON Schema, and matching
# an event to a rule. Knows nothing of SQL, HTTP or Docker.
# =============================================================================


class Target(msgspec.Struct, frozen=True, omit_defaults=True):
    """The issue, work item or request a delivery is about."""

    type: TargetType
    number: int
    title: str = ""
    body: str = ""


class Actor(msgspec.Struct, frozen=True):
    """Who did it. `id` as text; the login never leaves the process's memory."""

    id: str
    login: str = ""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One delivery, parsed and whitelisted; forges differ no more above this.

    `kind` is the trigger type that may fire: label, comment, pull_request,
    issue, or None for an event that we do not serve. `action` is the forge's
    own word. `labels` is the item's present set including what was added;
    `added` the labels added by this very event (None: not known). `fault` is a
    drop reason found while parsing. `when` is the item's own time, if given.
    `incomplete`: the forge's API must tell the rest before this can be judged.
    `markup` is the language of `comment`. `head_ref` is the full name of the
    request's source branch where the forge has no ref of the request itself, and
    `rev` the item's revision that the event made.
    `inert`: a request's update that changed neither its commits, nor that it is a
    draft, nor added a label.
    `remember`: the labels the item has from now on, of a forge that does not say
    what an event added.
    `ending`: what became of the review request that it is about.
    """

    forge: ForgeKind
    delivery: str
    name: str
    kind: Literal["label", "comment", "pull_request", "issue"] | None
    action: str | None = None
    repo: str | None = None
    repo_id: str | None = None
    target: Target | None = None
    actor: Actor | None = None
    author: Actor | None = None
    association: str | None = None
    labels: tuple[str, ...] = ()
    added: tuple[str, ...] | None = None
    comment: str | None = None
    comment_id: str | None = None
    review_state: str | None = None
    review: str | None = None
    head: str | None = None
    when: float | None = None
    fault: str | None = None
    incomplete: bool = False
    markup: Literal["html", "markdown"] = "markdown"
    head_ref: str | None = None
    rev: int | None = None
    inert: bool = False
    remember: tuple[str, ...] | None = None
    ending: Ending | None = None


class On(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When a rule fires; which fields may stand depends on `type`."""

    type: Literal["cron", "label", "comment", "pull_request", "issue"]
    id: str | None = None
    pattern: str | None = None
    tz: str | None = None
    any: tuple[str, ...] = ()
    all: tuple[str, ...] = ()
    none: tuple[str, ...] = ()
    match: Literal["added", "present"] = "added"
    phrase: str | None = None
    action: tuple[str, ...] = ()
    reviewState: tuple[str, ...] = ()
    number: int | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rule starts; unset fields stay absent when written out."""

    kind: str
    flow: str
    replicas: int | None = None
    replicaModels: tuple[str, ...] | None = None
    image: str | None = None
    instructions: str | None = None
    resume: bool | None = None
    publish: Literal["host", "agent"] | None = None
    repository: str | None = None
    folder: str | None = None
    task: str | None = None
    allowDirty: bool | None = None
    provider: str | None = None
    model: str | None = None
    maxTurns: int | None = None
    maxTokens: int | None = None
    excludeTools: tuple[str, ...] | None = None
    forkJoin: bool | None = None


class Rule(msgspec.Struct, frozen=True):
    """One entry of triggers.json; its identity is its 0-based index."""

    index: int
    on: On
    run: Run


class Match(msgspec.Struct, frozen=True):
    """An event that a rule wants: the rule, the flow, and what matched.

    `by` is the label, the phrase or the action that made it match.
    """

    rule: Rule
    flow: str
    by: str


class Drop(msgspec.Struct, frozen=True):
    """An event that starts nothing, and why (one of DROP_REASONS)."""

    reason: str


# -- what of a comment is prose, and whether a phrase stands in it ------------

#: GitHub's own limit of a comment. Of a longer one only this much is read, so
#: that the time a stranger's comment can take stays bounded.
_COMMENT_MAX = 65_536
#: The same for the paragraphs with the phrase, where a parser's time can grow with
#: the square: of all of them together.
_PARAGRAPHS_MAX = 16_384
#: Stands in a line for what is not prose (code, image, address), so that its
#: neighbours do not meet.
_GAP = "\ufffc"
#: Stands before a character that was escaped; a format character, so that no
#: comment can bring its own.
_ESCAPE = "\ufff9"
_ADDRESS = _pattern(r"(?:[a-z][a-z0-9+.-]{0,31}://|www\.)\S+", re.I)
_TAG = _pattern(r"<!--.*?(?:-->|\Z)|<(/?)([a-z][a-z0-9-]*)[^<>]*>", re.I | re.S)
_SET_APART = frozenset(("blockquote", "code", "pre", "script", "style"))
_BREAKS = _pattern(r"br|div|h[1-6]|li|ol|p|table|t[dhr]|ul", re.I)


def _without_format(text: str) -> str:
    """The text without zero-width characters, accents composed."""
    import unicodedata

    if text.isascii():
        return text
    hidden = {ord(c): None for c in set(text) if unicodedata.category(c) == "Cf"}
    return unicodedata.normalize("NFC", text.translate(hidden))


def _set_apart(depth: int, tag: re.Match[str]) -> int:
    """How many quoting or code elements are open after this tag."""
    if (tag[2] or "").lower() not in _SET_APART:
        return depth
    return max(0, depth - 1) if tag[1] else depth + 1


def _html_prose(text: str) -> Iterator[str]:
    """The lines of a work item's comment, which Azure sends as HTML."""
    from html import unescape

    depth = last = 0
    parts: list[str] = []
    for tag in _TAG.finditer(text + "<br>"):
        shown = _without_format(unescape(text[last : tag.start()]))
        shown = re.sub(r"[\r\n]", " ", shown)
        parts.append(_GAP if depth and shown else shown)
        parts.append("\n" if _BREAKS.fullmatch(tag[2] or "") else "")
        depth, last = _set_apart(depth, tag), tag.end()
    yield "".join(parts)


def html_text(text: str) -> str:
    """The text of an item's HTML as a person sees it, for the prompt."""
    from html import unescape

    seen = re.sub(r"(?is)<(script|style)\b.*?(?:</\1\s*>|\Z)", "", text) + "<br>"
    parts, last = [""], 0
    for tag in _TAG.finditer(seen):
        piece = unescape(seen[last : tag.start()]).replace("\xa0", " ")
        begins = parts[-1].endswith("\n")
        if not (begins and piece.isspace() and "\n" in piece):
            parts += filter(None, [piece])
        begins = parts[-1].endswith("\n")
        name = (tag[2] or "").lower()
        if name == "br" or (_BREAKS.fullmatch(name) and not begins):
            parts.append("\n")
        last = tag.end()
    return "".join(parts).replace("\r\n", "\n").strip()


@functools.cache
def _markdown() -> MarkdownIt:
    """CommonMark with tables; lines are parsed only where they may matter."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark").enable("table").disable(["inline", "text_join"])


def _markdown_prose(text: str, needle: str) -> Iterator[str]:
    """The paragraphs, headings and list items that may hold `needle`."""
    env: dict[str, Any] = {}
    quotes = depth = 0
    room = _PARAGRAPHS_MAX
    opened = ""
    for token in _markdown().parse(text, env):
        if token.type == "html_block":
            depth = functools.reduce(_set_apart, _TAG.finditer(token.content), depth)
        elif token.type in ("blockquote_open", "blockquote_close"):
            quotes += token.nesting
        elif (
            opened in ("paragraph_open", "heading_open")
            and quotes + depth == 0
            and room > 0
            and (needle in token.content or "&" in token.content)
        ):
            yield _line_prose(token.content[:room], env)
            room -= len(token.content)
        opened = token.type


def _line_prose(content: str, env: dict[str, Any]) -> str:
    tokens: list[Token] = []
    _markdown().inline.parse(content, _markdown(), env, tokens)
    parts, depth = [], 0
    for token in tokens:
        if token.type == "html_inline":
            depth = functools.reduce(_set_apart, _TAG.finditer(token.content), depth)
        elif token.markup == "autolink":
            depth += token.nesting
        else:
            parts.append(_GAP if depth else _plain(token))
    return "".join(parts)


def _plain(token: Token) -> str:
    if token.type in ("text", "text_special"):
        escaped = _ESCAPE if token.info == "escape" else ""
        return escaped + _without_format(token.content)
    if token.type in ("softbreak", "hardbreak"):
        return "\n"
    return _GAP if token.type in ("code_inline", "image") else ""


def _joins(character: str, signs: str) -> bool:
    """Whether a neighbour makes the phrase part of a longer word or handle."""
    import unicodedata

    if not character:
        return False
    letter = character.isalnum() or unicodedata.category(character)[0] == "M"
    return letter or character in signs


def _stands_alone(text: str, start: int, end: int) -> bool:
    after = text[end:].removeprefix(_ESCAPE)[:2]
    if _joins(text[max(start - 1, 0) : start], "_@\\/.-" + _ESCAPE):
        return False
    if after[:1] in (".", "'", "\u2019"):
        return not _joins(after[1:], "")
    return not _joins(after[:1], "_-/@")


def _word_after(phrase: str, prose: Iterable[str]) -> str | None:
    """The word after the first mention of `phrase`, "" if none follows.

    None when the phrase stands nowhere as a token of its own.
    """
    spelled = f"{_ESCAPE}?".join(map(re.escape, _without_format(phrase)))
    for text in prose:
        plain = _ADDRESS.sub(_GAP, text)
        for found in re.finditer(f"(?=({spelled}))", plain):
            if _stands_alone(plain, *found.span(1)):
                return _next_word(plain[found.end(1) :].replace(_ESCAPE, ""))
    return None


def _next_word(rest: str) -> str:
    found = re.match(r"\S*[^\S\n]+(\S+)", rest)
    word = found[1] if found else ""
    return word.rstrip("".join(c for c in word if not c.isalnum()))


def _mentioned(
    phrase: str, comment: str, form: Literal["html", "markdown"]
) -> str | None:
    """`_word_after` for a comment as the forge sent it."""
    text = _without_format(comment[:_COMMENT_MAX])
    if form == "html":
        return _word_after(phrase, _html_prose(text))
    needle = max(re.findall(r"[^\W_]+", _without_format(phrase)), key=len, default="")
    if needle not in text and "&" not in text:
        return None
    return _word_after(phrase, _markdown_prose(text, needle))


# -- the rows: every field, where it may stand, its type and its rule ---------

_KINDS = ("local", *FORGES)
_TYPES = ("cron", "label", "comment", "pull_request", "issue")
_VISIBLE = r"[^\s\x00-\x1f\x7f]"
_LINE = rf"{_VISIBLE}(?:[^\x00-\x1f\x7f]*{_VISIBLE})?$(?!\n)"
#: The same under a type checker's blind eye: they take values of tables here.
_literal: Any = Literal
_tuple: Any = tuple
_annotated: Any = Annotated

_Text = Annotated[str, msgspec.Meta(pattern=r"\S")]
_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]


def _matching(pattern: str) -> Any:
    """A string type; `$(?!\\n)` is an end that no newline slips behind."""
    return _annotated[str, msgspec.Meta(pattern=pattern)]


def _several(kind: Any) -> Any:
    unique = msgspec.Meta(min_length=1, extra_json_schema={"uniqueItems": True})
    return _annotated[_tuple[kind, ...], unique]


def _repeats(values: Sequence[str]) -> str | None:
    again = next((v for i, v in enumerate(values) if v in values[:i]), None)
    return None if again is None else f"names {json.dumps(again)} twice"


def _cron_fault(pattern: str) -> str | None:
    from datetime import UTC, datetime

    from cronsim import CronSim, CronSimError

    try:
        next(CronSim(pattern, datetime(2025, 1, 1, tzinfo=UTC)))
    except StopIteration:
        return "names a time that never comes"
    except (CronSimError, ValueError) as error:
        return f"is not a cron pattern: {error}"
    return None


@functools.cache
def _zones() -> frozenset[str]:
    from zoneinfo import available_timezones

    return frozenset(available_timezones() - {"localtime"}) | {"UTC"}


def _zone_fault(name: str) -> str | None:
    if name in _zones():
        return None
    return "is not an IANA time zone in its exact spelling, such as Europe/Berlin"


def _phrase_fault(phrase: str) -> str | None:
    if phrase != _without_format(phrase):
        return "holds invisible or uncomposed characters and could never be found"
    if _mentioned(phrase, f"x {phrase}", "markdown") is None:
        return "could never fire: a comment with it is read as markup, not as text"
    return None


def folder_fault(folder: str) -> str | None:
    """Why a folder is not the top of a git work tree (its `.git` decides)."""
    path = Path(folder)
    if not path.is_absolute():
        return "must be an absolute path"
    try:
        if not path.is_dir():
            return "is not a directory here"
        git = path / ".git"
        if git.is_file():
            with git.open("rb") as file:  # a box may have left a huge one
                linked = file.read(8) == b"gitdir: "
        else:
            linked = False
        if linked or (git / "HEAD").is_file():
            return None
    except (OSError, ValueError) as error:
        return f"cannot be read: {type(error).__name__}"
    return "is not the top of a git work tree; run `git init` there or name its top"


class _Row(NamedTuple):
    """One field: its type, what a wrong value is told, and where it may stand.

    `where` lists trigger types (for `on`) or kinds (for `run`), empty is
    everywhere; `elsewhere` says why not there. `required` holds wherever the
    field may stand. `each` is told to a wrong item of an array. `fault` looks
    at a value of the right type.
    """

    kind: Any
    why: str
    where: tuple[str, ...] = ()
    required: bool = False
    each: str = ""
    elsewhere: str = ""
    fault: Callable[[Any], str | None] = lambda value: None


_LABELLED = ("label", "pull_request")
_ACTED = ("pull_request", "issue")
_FORGE_KINDS = tuple(FORGES)
_LABELS = _tuple[_Text, ...], "must be an array of label names", _LABELLED
_SWITCH = bool, "must be true or false"
_COUNTED = _Count, "must be a whole number, 1 or more"


def _out_of(words: Sequence[str]) -> tuple[Any, str]:
    return _literal[tuple(words)], f"must be one of {', '.join(words)}"


def _some_of(words: Sequence[str]) -> tuple[Any, str]:
    return (
        _several(_literal[tuple(words)]),
        f"must be a non-empty array out of {', '.join(words)}",
    )


_ON: dict[str, _Row] = {
    "type": _Row(*_out_of(_TYPES), required=True),
    "id": _Row(
        _matching(r"^[A-Za-z0-9._-]+$(?!\n)"),
        "must be letters, digits, '.', '_' or '-'",
        ("cron",),
        required=True,
    ),
    "pattern": _Row(
        _matching(r"^[0-9A-Z*,/#-]+(?: +[0-9A-Z*,/#-]+){4,5}$(?!\n)"),
        "must be a cron pattern of 5 or 6 fields, names such as MON in capitals",
        ("cron",),
        required=True,
        fault=_cron_fault,
    ),
    "tz": _Row(str, "must be an IANA time zone", ("cron",), fault=_zone_fault),
    "any": _Row(*_LABELS, each="must be a label name"),
    "all": _Row(*_LABELS, each="must be a label name"),
    "none": _Row(*_LABELS, each="must be a label name"),
    "match": _Row(*_out_of(("added", "present")), _LABELLED),
    "phrase": _Row(
        _matching("^" + _LINE),
        "must be a phrase on one line without spaces around it",
        ("comment",),
        required=True,
        fault=_phrase_fault,
    ),
    "action": _Row(
        _several(str),
        "must be a non-empty array of actions",
        _ACTED,
        required=True,
        each="must be an action's name",
        fault=_repeats,
    ),
    "reviewState": _Row(
        *_some_of(REVIEW_STATES),
        ("pull_request",),
        each=f"must be one of {', '.join(REVIEW_STATES)}",
        fault=_repeats,
    ),
    "number": _Row(*_COUNTED, _ACTED),
}

_RUN: dict[str, _Row] = {
    "kind": _Row(*_out_of(_KINDS), required=True),
    "flow": _Row(
        _matching(r"^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$(?!\n)"),
        "must name a flow: 1 to 64 of a-z, 0-9, '_', '-', no sign at both ends",
        required=True,
    ),
    "replicas": _Row(
        Annotated[int, msgspec.Meta(ge=2, le=REPLICAS_MAX)],
        f"must be a whole number from 2 to {REPLICAS_MAX}: 1 is a field that does"
        " nothing, and one more than the default three slots would queue instead of"
        " racing; remove the field for a single run",
        _FORGE_KINDS,
        elsewhere="a local run edits the operator's own folder in place, and two"
        " replicas would edit one tree",
    ),
    "replicaModels": _Row(
        _tuple[_matching(rf"^{_PROVIDER_NAME.pattern}/{_VISIBLE}+$(?!\n)"), ...],
        "must be an array of provider/model, one for each replica",
        _FORGE_KINDS,
        each="must be provider/model",
    ),
    "image": _Row(
        _matching("^(?!-)" + _LINE),
        "must be an image reference: no spaces around it, not starting with '-'",
    ),
    "instructions": _Row(
        Annotated[str, msgspec.Meta(pattern=r"\S", max_length=2_000)],
        "must be 1 to 2,000 characters that are not all blank",
        _FORGE_KINDS,
        elsewhere="say it in run.task",
    ),
    "resume": _Row(*_SWITCH),
    "publish": _Row(*_out_of(("host", "agent")), _FORGE_KINDS),
    "repository": _Row(
        _matching(rf"^(?!\.\.?$)(?!.*/){_LINE}"),
        "must be a repository's name, without '/' and without spaces around it",
    ),
    "folder": _Row(
        _Text, "must be an absolute path", ("local",), True, fault=folder_fault
    ),
    "task": _Row(_Text, "must say what to do", ("local",), True),
    "allowDirty": _Row(*_SWITCH, ("local",)),
    "provider": _Row(
        _matching(rf"^{_PROVIDER_NAME.pattern}$(?!\n)"),
        "must be a provider's name: letters, digits, '.', '_' or '-'",
    ),
    "model": _Row(
        _matching(rf"^{_VISIBLE}+$(?!\n)"), "must be a model's name, without spaces"
    ),
    "maxTurns": _Row(*_COUNTED),
    "maxTokens": _Row(*_COUNTED),
    "excludeTools": _Row(
        *_some_of(TOOLS), each=f"must be one of {', '.join(TOOLS)}", fault=_repeats
    ),
    "forkJoin": _Row(*_SWITCH),
}

#: Fields of pi-dispatch, the system whose file format this one follows, that
#: have no counterpart here, and what to do instead.
_FOREIGN = {
    "backend": "every job runs in the local Docker Engine",
    "command": "name a skill with run.flow",
    "disarmed": "remove the rule",
    "github": "a local job gets no forge token",
    "maxCostUsd": "set run.maxTokens",
    "models": "set run.provider and run.model, or run.replicaModels",
    "noTools": "set run.excludeTools",
    "once": "remove the rule when it has done its work",
    "packages": "bake what a job needs into its image (run.image)",
    "secrets": "the box gets no secrets",
    "secretsProfile": "the box gets no secrets",
    "skillsDir": "skills come from .pi/skills of the serviced repository",
    "tools": "set run.excludeTools",
    "waitFor": "a rule starts work at once; `pidispatch pause` holds the queue",
}


# -- the file: positions, duplicates, what JSON does not allow ----------------

_JSON_TOKEN = _pattern(
    r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},:]|[^\s\[\]{},:"]+', re.DOTALL
)
_DEPTH_MAX = 64


def _child(path: str, key: str | int | None) -> str:
    """`triggers[3].run` style; keys that are no plain name are quoted."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    if key is None or not re.fullmatch(r"[A-Za-z_$][A-Za-z0-9_$-]{0,63}", key):
        return path if key is None else f"{path}[{_shown(key)}]"
    return f"{path}.{key}" if path else key


def _shown(value: Any) -> str:
    """A value as JSON, cut where a fault would become unreadable."""
    if value is msgspec.UNSET:
        return "(absent)"
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:119] + "…"


def _position(text: str, offset: int) -> str:
    line = text.count("\n", 0, offset) + 1
    return f"line {line}, column {offset - text.rfind(chr(10), 0, offset)}"


def _parse(raw: bytes, faults: list[str]) -> Any:
    """The file's value, or UNSET when it is not JSON at all."""
    body = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        text = body.decode()
        _refuse_depth(text)
        # Digits beyond these are out of any field's range either way, and
        # Python refuses to convert thousands of them.
        value = json.loads(text, parse_int=lambda digits: int(digits[:400]))
    except UnicodeDecodeError as error:
        before = body[: error.start].decode()
        faults.append(f"{_position(before, len(before))}: not UTF-8 text")
        return msgspec.UNSET
    except json.JSONDecodeError as error:
        faults.append(f"{_position(text, error.pos)}: not JSON: {error.msg}")
        return msgspec.UNSET
    faults.extend(_scan(text))
    return value


def _refuse_depth(text: str) -> None:
    depth = 0
    for token in _JSON_TOKEN.finditer(text):
        depth += (token[0] in ("[", "{")) - (token[0] in ("]", "}"))
        if depth > _DEPTH_MAX:
            raise json.JSONDecodeError(
                f"nested deeper than {_DEPTH_MAX}", text, token.start()
            )


class _Frame(msgspec.Struct):
    """An open array or object: its path, the keys met (None in an array)."""

    path: str
    keys: dict[str, int] | None = None
    key: str | int | None = None


def _scan(text: str) -> Iterator[str]:
    """What `json.loads` lets pass in a valid text, each with its position."""
    frames = [_Frame("")]
    for token in _JSON_TOKEN.finditer(text):
        word, top = token[0], frames[-1]
        if word in ("]", "}"):
            frames.pop()
        elif word == ",":
            top.key = top.key + 1 if isinstance(top.key, int) else None
        elif top.keys is not None and top.key is None:
            top.key = json.loads(word)
            yield from _key_faults(text, token.start(), top)
        elif word in ("[", "{"):
            here = _child(top.path, top.key)
            frames.append(_Frame(here, {}) if word == "{" else _Frame(here, key=0))
        elif word != ":" and (fault := _scalar_fault(word)):
            where = f"{_position(text, token.start())}: {_child(top.path, top.key)}"
            yield f"{where}: {word[:120]} {fault}"


def _key_faults(text: str, offset: int, frame: _Frame) -> Iterator[str]:
    assert frame.keys is not None and isinstance(frame.key, str)
    where = f"{_position(text, offset)}: {_child(frame.path, frame.key)}"
    first = frame.keys.setdefault(frame.key, offset)
    if first != offset:
        at = _position(text, first)
        yield f"{where}: duplicate key {_shown(frame.key)} (first at {at}); keep one"
    if _scalar_fault(json.dumps(frame.key)):
        yield f"{where}: half a surrogate pair is not text"


def _scalar_fault(word: str) -> str | None:
    if word[0] == '"':
        broken = "\\u" in word and re.search("[\ud800-\udfff]", json.loads(word))
        return "half a surrogate pair is not text" if broken else None
    if word in ("true", "false", "null") or word.lstrip("-").isdigit():
        return None
    return None if _finite(float(word)) else "is not a finite number"


def _finite(number: float) -> bool:
    return abs(number) < float("inf")


# -- an entry: its fields one by one, then the rules between them -------------


class _Place(msgspec.Struct, frozen=True):
    """A value of the file, its path, and the list that its faults go to.

    `strange` says what is told of a key that does not belong there.
    """

    path: str
    value: Any
    faults: list[str]
    strange: Callable[[str, Sequence[str], str], str]

    def at(self, *keys: str | int) -> _Place:
        """What stands below; its value is UNSET where nothing does."""
        path, value = self.path, self.value
        for key in keys:
            path = _child(path, key)
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                value = msgspec.UNSET
        return _Place(path, value, self.faults, self.strange)

    def refuse(self, why: str) -> None:
        if isinstance(self.value, float) and not _finite(self.value):
            return  # the scan has named it, with its line
        self.faults.append(f"{self.path or 'the file'}: {_shown(self.value)} {why}")

    def only(self, fields: Iterable[str], name: str) -> bool:
        """Whether this is an object; refuses every field it may not have."""
        if not isinstance(self.value, dict):
            self.refuse(f"must be an object with {', '.join(fields)}")
            return False
        for key in self.value:
            if key not in fields:
                self.at(key).refuse(self.strange(key, tuple(fields), name))
        return True


def _folded(name: str) -> str:
    return re.sub(r"[\W_]", "", name.casefold())


def _nearest(key: str, words: Iterable[str]) -> str | None:
    import difflib

    known = {_folded(word): word for word in words}
    close = difflib.get_close_matches(_folded(key)[:64], known, 1, 0.65)
    return known[close[0]] if close else None


def _unknown(key: str, fields: Sequence[str], name: str) -> str:
    """What to say of a key that the object does not know."""
    nearest = _nearest(key, fields)
    hint = f"did you mean {nearest}?" if nearest else f"known: {', '.join(fields)}"
    return f"is not a field of {name}; {hint}"


def _unknown_of_rule(key: str, fields: Sequence[str], name: str) -> str:
    """The same in a rule, where it may be at home elsewhere or in another system."""
    home = next((n for n, rows in (("on", _ON), ("run", _RUN)) if key in rows), None)
    nearest = _nearest(key, (*_FOREIGN, *fields))
    if home and key not in _FOREIGN:
        return f"is not a field of {name}; {key} belongs under `{home}`"
    if nearest in _FOREIGN and (key == nearest or nearest not in fields):
        return (
            f"is the field {nearest} of the source system (pi-dispatch), which"
            f" pidispatch does not have: {_FOREIGN[nearest]}"
        )
    return _unknown(key, fields, name)


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError):  # half a surrogate pair
        return False
    return True


def _right(place: _Place, row: _Row) -> bool:
    """Whether a field's own type and rule hold; refuses item by item."""
    if _fits(place.value, row.kind):
        if fault := row.fault(place.value):
            place.refuse(fault)
        return fault is None
    items = place.value if isinstance(place.value, list) and row.each else []
    wrong = [i for i, item in enumerate(items) if not _fits([item], row.kind)]
    for i in wrong:
        place.at(i).refuse(row.each)
    if not wrong:
        place.refuse(row.why)
    return False


def _fields(place: _Place, rows: Mapping[str, _Row], by: str) -> dict[str, Any]:
    """The right fields of `on` or `run`; `by` is the field that governs."""
    name = f"`{place.path.rpartition('.')[2]}`"
    if not place.only(rows, name):
        return {}
    governor = place.at(by).value
    governor = governor if _fits(governor, rows[by].kind) else None
    right = {}
    for key, row in rows.items():
        field = place.at(key)
        allowed = governor in row.where if row.where and governor else True
        if field.value is msgspec.UNSET:
            if row.required and allowed and (governor or not row.where):
                field.refuse(f"is required: it {row.why}")
        elif not allowed:
            field.refuse(
                f"goes only with {by} {', '.join(row.where)}, not with {governor}"
                + (f": {row.elsewhere}" if row.elsewhere else "")
            )
        elif _right(field, row):
            right[key] = field.value
    return right


class _Entry(NamedTuple):
    """One entry under check: where it stands and the fields that are right."""

    place: _Place
    on: dict[str, Any]
    run: dict[str, Any]

    @property
    def type(self) -> str | None:
        return self.on.get("type")

    @property
    def kind(self) -> str | None:
        return self.run.get("kind")

    @property
    def actions(self) -> Sequence[str]:
        return tuple(self.on.get("action", ()))

    @property
    def row(self) -> ForgeRow | None:
        return FORGES.get(self.kind or "")

    @property
    def work_items(self) -> bool:
        return self.row is not None and self.row.work_items

    @property
    def words(self) -> tuple[str, ...]:
        """The actions that the type knows on this forge."""
        row = self.row
        if row is None or self.type not in _ACTED:
            return ()
        return row.pr_actions if self.type == "pull_request" else (str(row.close_word),)

    @property
    def closes(self) -> bool:
        return bool({"closed", "close"} & {*self.actions})

    @property
    def resumes(self) -> bool:
        return bool(self.run.get("resume"))

    @property
    def named(self) -> bool:
        """Whether any or all is there, right or wrong, and not empty."""
        return any(
            self.place.at("on", key).value not in ([], msgspec.UNSET)
            for key in ("any", "all")
        )

    @property
    def bare(self) -> bool:
        """Whether its type is pull_request and it may carry no labels."""
        return self.type == "pull_request" and (self.work_items or self.closes)

    def has(self, path: str) -> bool:
        return self.place.at(*path.split(".")).value is not msgspec.UNSET


def _strange_actions(entry: _Entry) -> list[int]:
    words = entry.words
    return [i for i, word in enumerate(entry.actions) if words and word not in words]


def _label_fold(kind: str | None) -> Callable[[str], str]:
    """How label names compare: exactly, except that tags ignore case."""
    row = FORGES.get(kind or "")
    return str.casefold if row and row.work_items else str


def _contradictions(entry: _Entry) -> list[int]:
    fold = _label_fold(entry.kind)
    named = {fold(n) for key in ("any", "all") for n in entry.on.get(key, ())}
    return [i for i, n in enumerate(entry.on.get("none", ())) if fold(n) in named]


def _miscounted(entry: _Entry) -> bool:
    models, wanted = entry.run.get("replicaModels"), entry.run.get("replicas")
    return models is not None and wanted is not None and len(models) != wanted


def _work_items(entry: _Entry) -> bool:
    return entry.work_items and entry.type in ("label", "comment")


_BARE = "may not stand here: azure's requests and close rules take no labels"
_OVERRULED = "does nothing beside run.replicaModels, which names every model"

#: The rules between fields, asked of every entry after its fields: the path
#: that is refused, when (a list: at which items), and why.
_RULES: tuple[tuple[str, Callable[[_Entry], bool | list[int]], str], ...] = (
    (
        "run.kind",
        lambda e: e.type == "cron" and e.kind in FORGES,
        "must be local: cron goes only with it",
    ),
    (
        "run.kind",
        lambda e: e.kind == "local" and e.type not in ("cron", None),
        "goes only with cron: any other rule needs the kind of its forge",
    ),
    (
        "on.type",
        lambda e: e.type == "issue" and e.work_items,
        "is not served on {kind}, where work items have no close event",
    ),
    ("on.action", _strange_actions, "must be an action of {kind}: {words}"),
    (
        "on.action",
        lambda e: e.closes and len(e.actions) > 1,
        "must hold a close word alone; other actions need a rule of their own",
    ),
    (
        "on.number",
        lambda e: e.has("on.number") and bool(e.actions) and not e.closes,
        "goes only with a close action",
    ),
    (
        "on.any",
        lambda e: e.type == "label" and not e.named,
        "is required: any or all must name a label that fires the rule",
    ),
    (
        "on.any",
        lambda e: bool({"labeled", "label_updated"} & {*e.actions}) and not e.named,
        "is required: labeled and label_updated need a label in any or all",
    ),
    (
        "on.match",
        lambda e: e.on.get("match") == "present" and not e.named,
        "does nothing without a label in any or all",
    ),
    ("on.any", lambda e: e.bare and e.has("on.any"), _BARE),
    ("on.all", lambda e: e.bare and e.has("on.all"), _BARE),
    ("on.none", lambda e: e.bare and e.has("on.none"), _BARE),
    (
        "on.none",
        _contradictions,
        "is in any or all as well: the rule could never fire on it",
    ),
    (
        "on.reviewState",
        lambda e: (
            "reviewState" in e.on
            and "review_submitted" not in {*e.actions} & {*e.words}
        ),
        "goes only with github and the action review_submitted",
    ),
    (
        "run.replicas",
        lambda e: e.resumes and "replicas" in e.run,
        "may not stand beside resume: a resumed run continues one lineage, replicas"
        " would fork it and share its transcript and lock",
    ),
    (
        "run.replicaModels",
        lambda e: "replicaModels" in e.run and not e.has("run.replicas"),
        "does nothing without run.replicas",
    ),
    (
        "run.replicaModels",
        _miscounted,
        "must name exactly {replicas} models, one for each replica",
    ),
    (
        "run.provider",
        lambda e: "replicaModels" in e.run and e.has("run.provider"),
        _OVERRULED,
    ),
    (
        "run.model",
        lambda e: "replicaModels" in e.run and e.has("run.model"),
        _OVERRULED,
    ),
    (
        "run.resume",
        lambda e: e.resumes and (e.type == "cron" or e.kind == "local"),
        "may not be true on a cron rule: a local run keeps no session",
    ),
    (
        "run.repository",
        lambda e: _work_items(e) and not e.has("run.repository"),
        "is required: a work item belongs to no repository of its own",
    ),
    (
        "run.repository",
        lambda e: e.has("run.repository") and bool(e.type) and not _work_items(e),
        "goes only with azure's label and comment rules",
    ),
)


def _entry(place: _Place) -> _Entry:
    if not place.only(("on", "run"), "a rule"):
        return _Entry(place, {}, {})
    on = _fields(place.at("on"), _ON, "type")
    entry = _Entry(place, on, _fields(place.at("run"), _RUN, "kind"))
    facts = {"kind": entry.kind, "words": ", ".join(entry.words)} | entry.run
    for path, wrong, why in _RULES:
        found, at = wrong(entry), place.at(*path.split("."))
        items = [at.at(i) for i in found] if isinstance(found, list) else [at] * found
        for item in items:
            item.refuse(why.format_map(facts))
    return entry


def _listed(root: _Place, key: str, what: str) -> list[_Place]:
    """The items of an array of the file; refuses what is none."""
    listed = root.at(key)
    if not isinstance(listed.value, list):
        listed.refuse(f"must be an array of {what}; [] is an empty one")
        return []
    return [listed.at(i) for i in range(len(listed.value))]


def _check_reference(root: _Place) -> None:
    reference = root.at("$schema")
    if not isinstance(reference.value, str | msgspec.UnsetType):
        reference.refuse("must be a string")


def _entries(root: _Place) -> list[_Entry]:
    if not root.only(("$schema", "triggers"), "the file"):
        return []
    _check_reference(root)
    entries = [_entry(place) for place in _listed(root, "triggers", "rules")]
    _refuse_twins(entries, "cron", lambda entry: entry.on.get("id"), "id")
    _refuse_twins(entries, "comment", lambda entry: entry.kind, "phrase")
    return entries


def _refuse_twins(
    entries: Sequence[_Entry],
    kind: str,
    identity: Callable[[_Entry], str | None],
    field: str,
) -> None:
    """Refuse a rule of a type whose identity an earlier one has taken."""
    first: dict[str, str] = {}
    for entry in entries:
        name = identity(entry) if entry.type == kind else None
        if name is not None and name in first:
            entry.place.at("on", field).refuse(
                f"is a second {kind} rule for {name}; {first[name]} is the first"
            )
        elif name is not None:
            first[name] = entry.place.path


def load_triggers(
    text: bytes, source: str, providers: Collection[str] | None = None
) -> tuple[Rule, ...]:
    """Validate a whole triggers file; raises `Faults` naming every fault.

    `providers` are those that replicaModels may name; None: any.

    A fault reads `triggers[3].run.replicas: 4 must be …`: the field's path
    with the rule's index, its value as JSON, why it is refused, what to do.
    Faults of the file as a whole begin with their line and column.
    """
    faults: list[str] = []
    root = _Place("", _parse(text, faults), faults, _unknown_of_rule)
    entries = _entries(root) if root.value is not msgspec.UNSET else []
    if providers is not None:
        _refuse_strangers(entries, providers)
    if faults:
        raise Faults(source, faults)
    return tuple(
        Rule(i, msgspec.convert(entry.on, On), msgspec.convert(entry.run, Run))
        for i, entry in enumerate(entries)
    )


def _refuse_strangers(entries: Sequence[_Entry], providers: Collection[str]) -> None:
    """A set that lacks a model would be paid for and could not be compared."""
    for entry in entries:
        for i, model in enumerate(entry.run.get("replicaModels", ())):
            if model.partition("/")[0] not in providers:
                entry.place.at("run", "replicaModels", i).refuse(
                    f"names no provider that is known: {', '.join(sorted(providers))};"
                    " describe another in PI_PROVIDERS_FILE"
                )


_NO_RULES_FIX = "name another file, or let `pidispatch init` write an example"


def read_triggers(
    path: Path, providers: Collection[str] | None = None
) -> tuple[Rule, ...]:
    """`load_triggers` of a file; one that cannot be read is a fault as well."""
    try:
        text = path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Faults(str(path), [f"cannot be read: {why}"], _NO_RULES_FIX) from error
    return load_triggers(text, str(path), providers)


def triggers_schema() -> dict[str, Any]:
    """The JSON Schema of triggers.json, from the rows that validate it.

    It takes every valid file and some more: rules between fields are ours.
    """
    rule = _as_object(
        {"on": _rows_schema(_ON), "run": _rows_schema(_RUN)}, ("on", "run")
    )
    return _file_schema("triggers", {"triggers": rule})


def _file_schema(title: str, lists: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a file that is an object of arrays, by their items' schemas."""
    arrays = {name: {"type": "array", "items": item} for name, item in lists.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"pidispatch {title}",
        **_as_object({"$schema": {"type": "string"}, **arrays}, tuple(lists)),
    }


def _as_object(properties: dict[str, Any], required: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _rows_schema(rows: Mapping[str, _Row]) -> dict[str, Any]:
    properties = {}
    for name, row in rows.items():
        only = f" (only with {', '.join(row.where)})" if row.where else ""
        said = {"description": row.why + only}
        properties[name] = said | msgspec.json.schema(row.kind)
    required = [name for name, row in rows.items() if row.required and not row.where]
    return _as_object(properties, required)


# -- matching an event to a rule ----------------------------------------------

#: From far to near: of several rules that did not match, the reason of the one
#: that came nearest is reported.
_NEARNESS = (
    "no-allowlisted-label",
    "no-matching-pr-trigger",
    "no-matching-close-trigger",
    "review-state-not-matched",
    "no-review-body",
    "label-not-added",
)


def match_event(rules: Sequence[Rule], event: Event) -> Match | Drop:
    """The first rule of the event's forge that matches, or why none does.

    Who asked is not looked at: that comes after a match.
    """
    if event.fault or event.kind is None:
        return Drop(event.fault or "unhandled-event")
    if not _actionable(event):
        return Drop("action-not-actionable")
    mine = [r for r in rules if (r.run.kind, r.on.type) == (event.forge, event.kind)]
    if event.kind == "comment":
        return _match_comment(mine, rules, event)
    nearest = _far(event)
    for rule in mine:
        found = _JUDGES[event.kind](rule, event)
        if not isinstance(found, Drop):
            return Match(rule, rule.run.flow, found)
        nearest = max(nearest, found, key=lambda drop: _NEARNESS.index(drop.reason))
    return nearest


def wants_added(event: Event) -> bool:
    """Whether the labels that the event added decide, and are not known."""
    mode = FORGES[event.forge].label_actions.get(event.action)
    return event.added is None and mode == "added"


def _actionable(event: Event) -> bool:
    """Whether some rule type of the forge knows the event's action."""
    row = FORGES[event.forge]
    if event.kind == "label":
        return event.action in row.label_actions
    if event.kind == "comment":
        known = row.comment_actions
        return known is None or event.action in known
    if event.kind == "issue":
        return event.action is not None and event.action == row.close_word
    return event.action in row.pr_actions


def _far(event: Event) -> Drop:
    """The reason when no rule came near."""
    if event.kind == "label":
        return Drop("no-allowlisted-label")
    if event.action == FORGES[event.forge].close_word:
        return Drop("no-matching-close-trigger")
    return Drop("no-matching-pr-trigger")


def _present(event: Event) -> set[str]:
    """The item's labels as they compare, those just added included."""
    return {*map(_label_fold(event.forge), (*event.labels, *(event.added or ())))}


def _holds(on: On, event: Event) -> bool:
    """The predicate over the present labels; an absent selector is true."""
    present, fold = _present(event), _label_fold(event.forge)
    return (
        (not on.any or any(fold(name) in present for name in on.any))
        and all(fold(name) in present for name in on.all)
        and not any(fold(name) in present for name in on.none)
    )


def _judge_labels(rule: Rule, event: Event) -> str | Drop:
    """The label that fires the rule: named by it and, by default, just added."""
    on, fold = rule.on, _label_fold(event.forge)
    if not _holds(on, event):
        return Drop("no-allowlisted-label")
    mode = FORGES[event.forge].label_actions.get(event.action)
    # What was added is not always told (None): then the whole set counts.
    told = _present(event) if event.added is None else {*map(fold, event.added)}
    counts = _present(event) if mode == "all" else told if mode == "added" else set()
    if on.match == "present" and (mode != "added" or told):
        counts = _present(event)
    named = next((name for name in (*on.any, *on.all) if fold(name) in counts), None)
    return Drop("label-not-added") if named is None else named


def _judge_request(rule: Rule, event: Event) -> str | Drop:
    on, row = rule.on, FORGES[event.forge]
    if event.action is None or event.action not in on.action:
        return _far(event)
    if event.action == row.close_word:
        return _judge_close(rule, event)
    if event.action == "review_submitted":
        if on.reviewState and event.review_state not in on.reviewState:
            return Drop("review-state-not-matched")
        if event.review_state == "commented" and not (event.review or "").strip():
            return Drop("no-review-body")
    labelling = FORGES[event.forge].label_actions.get(event.action) == "added"
    if labelling and on.match == "added" and (on.any or on.all):
        found = _judge_labels(rule, event)
        return _far(event) if found == Drop("no-allowlisted-label") else found
    return event.action if _holds(on, event) and not event.inert else _far(event)


def _judge_close(rule: Rule, event: Event) -> str | Drop:
    number = event.target.number if event.target else None
    if event.action in rule.on.action and rule.on.number in (None, number):
        return str(event.action)
    return _far(event)


_JUDGES: dict[str, Callable[[Rule, Event], str | Drop]] = {
    "label": _judge_labels,
    "pull_request": _judge_request,
    "issue": _judge_close,
}


def _match_comment(
    mine: Sequence[Rule], rules: Sequence[Rule], event: Event
) -> Match | Drop:
    """The phrase in the comment; the word after it may choose the flow."""
    for rule in mine:
        phrase = rule.on.phrase or ""
        word = _mentioned(phrase, event.comment or "", event.markup)
        if word is not None:
            flows = {r.run.flow for r in rules if r.run.kind != "local"}
            return Match(rule, word if word in flows else rule.run.flow, phrase)
    return Drop("no-trigger-phrase")


# -- the jobs of a match ------------------------------------------------------


class Trigger(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a job exists: the event, who acted (an id), the rule and its match.

    A run that an operator asked for has no rule: `index` and `type` are None.
    """

    event: str
    action: str | None = None
    delivery: str
    sender: str
    index: int | None
    type: str | None
    by: str


def forge_place(kind: str, repo: str) -> str:
    """A repository as scopes of limits.json match it: one spelling a place."""
    return f"{kind}:{repo.casefold()}"


class Job(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run to be made: the queue's payload, also read by prompts and box.

    `set` is the id shared by the replicas of one delivery. `replica` and
    `replicas` are absent, not null, on a plain job. A local job's `repo` is the
    name of its folder, and `run.folder` and `run.task` say the rest.
    """

    id: str
    set: str
    kind: str
    repo: str
    target: Target
    flow: str
    dedup: str
    run: Run
    trigger: Trigger
    head: str | None = None
    head_ref: str | None = None
    comment: str | None = None
    review: str | None = None
    replica: int | None = None
    replicas: int | None = None

    @property
    def branch(self) -> str | None:
        """The one branch the job may write; a request target has none."""
        if self.target.type != "issue":
            return None
        return branch_name(self.target.number, self.replica)

    @property
    def local(self) -> bool:
        """Whether it works in place in a folder: no forge, no branch, no request."""
        return self.kind == LOCAL

    @property
    def title(self) -> str:
        """`owner/repo#7`, as records and logs name the target."""
        return target_name(self.kind, self.repo, self.target.type, self.target.number)

    @property
    def place(self) -> str:
        """Where it works: a forge's repository, or the folder of a local run."""
        if self.local:
            return f"local:{os.path.normpath(self.run.folder or '')}"
        return forge_place(self.kind, self.repo)

    def without_text(self) -> Job:
        """What is kept of a job that can run no more: numbers, ids, its rule.

        The rule's own instructions stay, for a replay; the item's text does not,
        nor do a folder and its task.
        """
        return msgspec.structs.replace(
            self,
            target=Target(self.target.type, self.target.number),
            run=msgspec.structs.replace(self.run, folder=None, task=None),
            head_ref=None,
            comment=None,
            review=None,
        )


def placed(match: Match, event: Event) -> Event:
    """The event in its repository: a work item has only a project, and the rule
    names the repository that serves it."""
    repository = match.rule.run.repository
    if repository is None or event.target is None or event.target.type != "issue":
        return event
    return msgspec.structs.replace(event, repo=f"{event.repo}/{repository}")


def fan_out(match: Match, event: Event) -> tuple[Job, ...]:
    """The jobs of one allowed delivery: one, or one for each replica."""
    event = placed(match, event)
    assert event.target and event.repo and event.actor
    html = event.markup == "html" and event.comment is not None
    n = match.rule.run.replicas
    plain = Job(
        id=job_id(event.forge, event.delivery),
        set=set_id(event.forge, event.delivery),
        kind=event.forge,
        repo=event.repo,
        target=event.target,
        flow=match.flow,
        dedup=_key_of(event, match.flow),
        run=match.rule.run,
        trigger=Trigger(
            event=event.name,
            action=event.action,
            delivery=event.delivery,
            sender=event.actor.id,
            index=match.rule.index,
            type=match.rule.on.type,
            by=match.by,
        ),
        head=event.head,
        head_ref=event.head_ref,
        comment=html_text(event.comment or "") if html else event.comment,
        review=event.review,
    )
    if n is None:
        return (plain,)
    return tuple(_replica(plain, event, i, n) for i in range(1, n + 1))


def cron_job(rule: Rule, scheduled: int) -> Job:
    """The one job of a cron rule's due time, unix seconds; never replicas."""
    name = cron_id(str(rule.on.id), scheduled)
    trigger = Trigger(
        event="cron",
        delivery=name,
        sender="",
        index=rule.index,
        type=rule.on.type,
        by=str(rule.on.id),
    )
    return _local_job(name, rule.run, trigger)


def local_job(run: Run, now: float) -> Job:
    """The job of one `pidispatch run`, asked for at `now` (seconds)."""
    assert run.folder and run.task
    name = local_id(Path(run.folder), run.flow, run.task, int(now // 60))
    trigger = Trigger(
        event="run", delivery=name, sender="", index=None, type=None, by=""
    )
    return _local_job(name, run, trigger)


def _local_job(name: str, run: Run, trigger: Trigger) -> Job:
    """The folder is named as the system resolves it: one tree, one name."""
    folder = Path(str(run.folder)).resolve()
    return Job(
        id=name,
        set=name,
        kind=LOCAL,
        repo=folder.name,
        target=Target("local", 0),
        flow=run.flow,
        dedup=dedup_key(name, run.flow),
        run=msgspec.structs.replace(run, folder=str(folder)),
        trigger=trigger,
    )


def _key_of(event: Event, flow: str, replica: int | None = None) -> str:
    assert event.target and event.repo
    target = target_name(
        event.forge, event.repo, event.target.type, event.target.number
    )
    return dedup_key(target, flow, replica)


def _replica(plain: Job, event: Event, i: int, n: int) -> Job:
    return msgspec.structs.replace(
        plain,
        id=job_id(event.forge, event.delivery, i),
        dedup=_key_of(event, plain.flow, i),
        replica=i,
        replicas=n,
    )


# =============================================================================
# limits
#
# What each scope may use, and when nothing of it may start: limits.json as typed
# values, every refusal at load, its JSON Schema, and which pauses hold at a time.
# Built on the rows and places of the section above; knows nothing of the queue.
# =============================================================================

Span = Literal["day", "week", "month"]
SPANS: tuple[Span, ...] = ("day", "week", "month")
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


def scope_pattern(scope: str) -> str:
    """A scope as a glob over `Job.place`; forges ignore the case of names."""
    if scope == "*":
        return scope
    if scope in _KINDS:
        return f"{scope}:*"
    if scope.startswith("/"):
        return "local:" + re.sub(r"([*?[])", r"[\1]", os.path.normpath(scope))
    name, every = scope.casefold(), scope.endswith("/*")
    plain = re.sub(r"([*?[])", r"[\1]", name.removesuffix("*") if every else name)
    return plain + "*" * every


def in_scope(pattern: str, place: str) -> bool:
    """What SQLite's GLOB says of the two, without asking it."""
    from fnmatch import fnmatchcase

    return fnmatchcase(place, pattern)


class ScopeRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one scope may use: jobs a window, and jobs at once."""

    scope: str
    day: int | None = None
    week: int | None = None
    month: int | None = None
    concurrent: int | None = None

    @property
    def pattern(self) -> str:
        return scope_pattern(self.scope)


class PauseWindow(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={"begins": "from", "ends": "to"},
):
    """Wall-clock times of `tz` between which nothing of the scope starts.

    `begins` and `ends` are HH:MM; an end that is not later lies on the next day.
    `days` and `dates` are those on which it begins; neither means every day.
    """

    scope: str
    begins: str
    ends: str
    tz: str
    days: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()

    @property
    def pattern(self) -> str:
        return scope_pattern(self.scope)

    def until(self, now: float) -> float | None:
        """When it ends, seconds, if it holds at `now`; None if it does not.

        What the clock on the wall shows decides: an hour that comes twice is
        paused twice, one that is left out is not.
        """
        from datetime import datetime, timedelta
        from zoneinfo import ZoneInfo

        local = datetime.fromtimestamp(now, ZoneInfo(self.tz))
        shown, over_night = local.strftime("%H:%M"), self.ends <= self.begins
        since = local.date() - timedelta(days=over_night and shown < self.ends)
        first = self.begins <= shown if since == local.date() else True
        last = shown < self.ends or (over_night and since == local.date())
        if not (first and last and self._begins_on(since)):
            return None
        ends = datetime.combine(since + timedelta(days=over_night), datetime.min.time())
        hours, minutes = map(int, self.ends.split(":"))
        ends += timedelta(hours=hours, minutes=minutes)
        wall = [ends.replace(tzinfo=local.tzinfo, fold=fold) for fold in (0, 1)]
        return min(t for t in (w.timestamp() for w in wall) if t > now)

    def _begins_on(self, day: date) -> bool:
        if self.dates:
            return day.isoformat() in self.dates
        return not self.days or _DAYS[day.weekday()] in self.days


class Limits(msgspec.Struct, frozen=True):
    """All of limits.json."""

    scopes: tuple[ScopeRow, ...] = ()
    pauses: tuple[PauseWindow, ...] = ()

    def paused(self, now: float) -> dict[str, float]:
        """The scopes in which nothing starts now, each with its latest end."""
        ends: dict[str, float] = {}
        for window in self.pauses:
            until = window.until(now)
            if until is not None:
                ends[window.scope] = max(until, ends.get(window.scope, 0))
        return ends


NO_LIMITS = Limits()

_SEGMENT_OF_SCOPE = r"[^/*\x00-\x20\x7f](?:[^/*\x00-\x1f\x7f]*[^/*\x00-\x20\x7f])?"
_SCOPE = _Row(
    _matching(
        rf"^(?:\*|{'|'.join(_KINDS)}|/(?:[^\x00-\x1f\x7f]*[^/\x00-\x20\x7f])?"
        rf"|(?:{'|'.join(FORGES)}):(?:{_SEGMENT_OF_SCOPE}/)+(?:\*|{_SEGMENT_OF_SCOPE}))"
        r"$(?!\n)"
    ),
    f"must be * for everything, a kind ({', '.join(_KINDS)}), a forge's owner "
    "(github:octo/*), a forge's repository (github:octo/spoon), or the absolute "
    "path of a local job's folder, without a slash at its end",
    required=True,
)
_JOBS = _Row(*_COUNTED)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"


def _date_fault(days: Sequence[str]) -> str | None:
    from datetime import date

    for day in days:
        try:
            date.fromisoformat(day)
        except ValueError:
            return f"names a day that is none: {day}"
    return _repeats(days)


_SCOPE_ROW: dict[str, _Row] = {
    "scope": _SCOPE,
    **dict.fromkeys((*SPANS, "concurrent"), _JOBS),
}
_PAUSE: dict[str, _Row] = {
    "scope": _SCOPE,
    "from": _Row(
        _matching(rf"^{_TIME}$(?!\n)"), "must be a time as HH:MM", required=True
    ),
    "to": _Row(
        _matching(rf"^(?:{_TIME}|24:00)$(?!\n)"),
        "must be a time as HH:MM, at most 24:00",
        required=True,
    ),
    "tz": _Row(
        str, "must be an IANA time zone; PI_TIMEZONE without it", fault=_zone_fault
    ),
    "days": _Row(
        *_some_of(_DAYS), each=f"must be one of {', '.join(_DAYS)}", fault=_repeats
    ),
    "dates": _Row(
        _several(_matching(r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$(?!\n)")),
        "must be a non-empty array of dates as YYYY-MM-DD",
        each="must be a date as YYYY-MM-DD",
        fault=_date_fault,
    ),
}


class _LimitRule(NamedTuple):
    """A rule between the fields of an item as written: which is refused, and why."""

    field: str
    wrong: Callable[[Mapping[str, Any]], bool]
    why: str


_SCOPE_RULES = (
    _LimitRule(
        "",
        lambda row: not set(row) - {"scope"},
        "limits nothing: give it day, week, month or concurrent",
    ),
)
_PAUSE_RULES = (
    _LimitRule(
        "to",
        lambda row: row.get("from") is not None and row.get("from") == row.get("to"),
        "is the same as from; a whole day is 00:00 to 24:00",
    ),
    _LimitRule(
        "dates",
        lambda row: "days" in row and "dates" in row,
        "may not stand beside days: use a window for each",
    ),
)


def _limit_items(
    places: Sequence[_Place],
    rows: Mapping[str, _Row],
    rules: Sequence[_LimitRule],
    identity: Callable[[Mapping[str, Any]], object],
) -> list[dict[str, Any]]:
    """The right fields of each item; refuses one that an earlier one repeats."""
    first: dict[object, str] = {}
    items = []
    for place in places:
        item = _fields(place, rows, "scope")
        wrong = [rule for rule in rules if "scope" in item and rule.wrong(place.value)]
        for rule in wrong:
            place.at(*[rule.field] * bool(rule.field)).refuse(rule.why)
        name = identity(item) if "scope" in item else place.path
        if first.setdefault(name, place.path) != place.path:
            place.refuse(f"repeats {first[name]}; keep one")
        items.append(item)
    return items


def load_limits(text: bytes, source: str, zone: str = "UTC") -> Limits:
    """Validate a whole limits file; raises `Faults` naming every fault.

    `zone` is that of pause windows that name none. Faults read as those of
    `load_triggers` do.
    """
    faults: list[str] = []
    root = _Place("", _parse(text, faults), faults, _unknown)
    scopes, pauses = _limit_lists(root) if root.value is not msgspec.UNSET else ([], [])
    if faults:
        raise Faults(source, faults)
    return Limits(
        msgspec.convert(scopes, tuple[ScopeRow, ...]),
        msgspec.convert([{"tz": zone, **row} for row in pauses], _PauseWindows),
    )


_PauseWindows = tuple[PauseWindow, ...]


def _limit_lists(root: _Place) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if not root.only(("$schema", "scopes", "pauseWindows"), "the file"):
        return [], []
    _check_reference(root)
    return (
        _limit_items(
            _listed(root, "scopes", "scope rows"),
            _SCOPE_ROW,
            _SCOPE_RULES,
            lambda row: scope_pattern(row.get("scope", "")),
        ),
        _limit_items(
            _listed(root, "pauseWindows", "pause windows"),
            _PAUSE,
            _PAUSE_RULES,
            lambda row: json.dumps(row, sort_keys=True),
        ),
    )


_NO_LIMITS_FIX = "name another file, or let `pidispatch init` write an empty one"


def read_limits(settings: Settings, named: Path | None = None) -> Limits:
    """The limits of the file that `serve` takes; without any there are none.

    Only ./limits.json may be absent: a file that is named must be there. Raises
    `Faults`.
    """
    path = limits_path(settings, named)
    if path == LIMITS_DEFAULT and not os.path.lexists(path):
        return NO_LIMITS
    try:
        text = path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Faults(str(path), [f"cannot be read: {why}"], _NO_LIMITS_FIX) from error
    return load_limits(text, str(path), settings.timezone)


LIMITS_DEFAULT = Path("limits.json")


def limits_path(settings: Settings, named: Path | None = None) -> Path:
    """The limits' file: named, PI_LIMITS_FILE, else ./limits.json."""
    return named or settings.limits_file or LIMITS_DEFAULT


def limits_schema() -> dict[str, Any]:
    """The JSON Schema of limits.json, from the rows that validate it."""
    items = {"scopes": _rows_schema(_SCOPE_ROW), "pauseWindows": _rows_schema(_PAUSE)}
    return _file_schema("limits", items)


# =============================================================================
# forges
#
# One small class a forge: verify bytes, parse to an Event, who is asking,
# comment, find or open a review request. Knows nothing of the queue.
# =============================================================================


class Unauthorized(PidispatchError):
    """A delivery without a valid credential; nothing in it was read."""


class Malformed(PidispatchError):
    """A delivery whose credential holds and whose bytes cannot be understood."""


class Rejected(PidispatchError):
    """A forge's API said a determinate no; `status` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Credential(msgspec.Struct, frozen=True):
    """A forge token as git needs it; `repr` never shows it."""

    username: str
    password: str

    def __repr__(self) -> str:
        return "Credential(…)"


class Request(msgspec.Struct, frozen=True):
    """A review request: its number, its page, whether we just opened it."""

    number: int
    url: str
    title: str = ""


class News(msgspec.Struct, frozen=True):
    """What one look at a stream brought; without events also when it is unchanged.

    Each event has its own time, and a delivery id that stays the same for ever.
    `newest` is how far the list went, `etag` the list's, and `wait` the seconds
    that the forge wants to be left alone.
    """

    events: tuple[Event, ...] = ()
    newest: float | None = None
    etag: str | None = None
    wait: float = 0.0


class Throttled(InfraError):
    """The forge answers no more for `wait` seconds."""

    def __init__(self, message: str, wait: float) -> None:
        super().__init__(message)
        self.wait = wait


class Forge(Protocol):
    """What the rest of pidispatch asks of a forge.

    Header names are in lower case. `verify` raises Unauthorized, `parse`
    Malformed; whatever talks to the API raises InfraError when it could not
    tell, Rejected or Refused on a determinate no. `own_id` is None when there
    is no identity of ours because no token is configured. `complete` fills in
    what an `incomplete` event left to the API; `signed` are the bytes that the
    credential vouches for.
    """

    kind: ForgeKind
    #: The streams of events that can be polled; of most forges there are none.
    streams: ClassVar[tuple[str, ...]] = ()
    #: Where its deliveries are taken beside `/<kind>`.
    aliases: ClassVar[tuple[str, ...]] = ()

    @property
    def hooked(self) -> bool:
        """Whether it may deliver webhooks here: it has a secret."""

    #: The root of its API, without a trailing slash.
    api: str

    def verify(self, headers: Mapping[str, str], body: bytes) -> None: ...

    def parse(self, headers: Mapping[str, str], body: bytes) -> Event: ...

    def authority(self, event: Event) -> Literal["allowed", "denied", "ask"]: ...

    def signed(self, headers: Mapping[str, str], body: bytes) -> bytes: ...

    def complete(self, event: Event) -> Event: ...

    def ask(self, event: Event) -> bool: ...

    def own_id(self) -> str | None: ...

    def repository(self, name: str) -> str:
        """The repository's name as deliveries spell it."""

    def poll(
        self, repo: str, stream: str, since: float | None, etag: str | None
    ) -> News:
        """What happened since then; None: since just before the newest that did."""

    def credential(self, repo: str) -> Credential: ...

    def clone_url(self, repo: str) -> str: ...

    def default_branch(self, repo: str) -> str: ...

    def item(self, repo: str, target: Target) -> Target: ...

    def comment(self, repo: str, target: Target, text: str, marker: str) -> None: ...

    def find_request(self, repo: str, head: str) -> Request | None: ...

    def open_request(
        self, repo: str, head: str, base: str, title: str, body: str
    ) -> Request: ...

    def retitle_request(self, repo: str, number: int, title: str) -> None: ...

    def protected(self, repo: str, branch: str) -> bool:
        """Whether protection refuses direct pushes to that branch.

        Raises `InfraError` when it cannot be told.
        """
        ...

    def agent_environment(self, repo: str) -> dict[str, str]:
        """What the forge's CLI and git in a box need, with publish=agent.

        The token and the host by the forge's own names. A forge that gives the
        box another token than `credential` names it for git as `GIT_PASSWORD` too.
        """
        ...


FORM_TYPE = "application/x-www-form-urlencoded"

#: By these names git in a box finds the credential of the forge.
GIT_USERNAME, GIT_PASSWORD = "PI_GIT_USERNAME", "PI_GIT_PASSWORD"

#: Seconds to connect to a forge's API, and between two reads of its answer.
API_TIMEOUT = (5.0, 10.0)
#: Bounds of one whole answer, and of a list: a timeout of reads ends neither a
#: forge that sends a byte every nine seconds nor one that always has a next page.
API_SECONDS, API_BYTES, API_PAGES = 60.0, 64 * 1024 * 1024, 1_000
PAGE_SIZE = 100

#: JSON that is not an object: a field of a wrong type is a missing field, and
#: never an error that a forge would count against the hook.
_Odd = str | int | float | bool | list[Any] | None


def _shaped(kind: type[T], value: object) -> T:
    """`value` if it has the promised shape, else an object with every field unset."""
    return value if isinstance(value, kind) else kind()


def _str(value: object) -> str:
    return value if isinstance(value, str) else ""


def _id(value: object) -> str | None:
    number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if number and cast(int, value) >= 1 else None


def _number(value: object) -> int | None:
    text = _id(value)
    return int(text) if text and int(text) <= MAX_NUMBER else None


def _time(value: object) -> float | None:
    """Seconds since the epoch of an ISO time with a zone; sentinels are None."""
    from datetime import datetime

    try:
        moment = datetime.fromisoformat(_str(value))
        real = moment.tzinfo and 1970 < moment.year < 9999
        return moment.timestamp() if real else None
    except (ValueError, OverflowError):
        return None


def _seconds(text: str | None, otherwise: float = 0.0) -> float:
    """A header's whole number; anything else tells nothing."""
    told = text is not None and re.fullmatch("[0-9]{1,12}", text)
    return float(told[0]) if told else otherwise


_SEGMENT = _pattern(r"(?!\.\.?$)[A-Za-z0-9._-]{1,100}")
_SHA = _pattern(r"[0-9a-f]{40}([0-9a-f]{24})?")


def _owner_and_name(value: object) -> str | None:
    """`owner/name` when it is exactly two safe path segments."""
    parts = _str(value).split("/")
    safe = len(parts) == 2 and all(_SEGMENT.fullmatch(part) for part in parts)
    return "/".join(parts) if safe else None


#: So many bytes of a large body are unpacked at a time.
_PIECE = 65_536


def _form_payload(body: bytes) -> bytes:
    """The JSON in the one field `payload` of a url-encoded form."""
    fields = re.finditer(rb"(?:^|&)payload=([^&]*)", body)
    found = list(itertools.islice(fields, 2))
    if len(found) != 1:
        raise Malformed("the form has no single field 'payload'")
    if re.search(rb"%(?![0-9A-Fa-f]{2})", found[0][1]):
        raise Malformed("the form has a broken escape")
    return b"".join(_unquoted(found[0][1].replace(b"+", b" ")))


def _unquoted(text: bytes) -> Iterator[bytes]:
    """A form's text, whose escapes are whole, as it was before.

    A stranger may send it, and urllib takes 4 s and 2 GB for 25 MiB of escapes:
    they are read as quoted-printable, which differs in its `=`, and by pieces.
    """
    from binascii import a2b_qp

    at = 0
    while at < len(text):
        end = at + _PIECE
        cut = text.rfind(b"%", end - 2, end)  # no escape is parted
        end = end if cut < 0 else cut
        yield a2b_qp(text[at:end].replace(b"=", b"=3D").replace(b"%", b"="))
        at = end


def _check_utf8(body: bytes) -> None:
    """By pieces of whole characters: one text can take four times the body."""
    at = 0
    while at < len(body):
        end = at + _PIECE
        while (
            at + _PIECE - end < 3
            and body[end : end + 1] >= b"\x80"
            and body[end] < 0xC0
        ):
            end -= 1
        body[at:end].decode()
        at = end


def _decode(kind: type[T], body: bytes) -> T:
    """A typed struct that names the fields we need: decoding is the whitelist."""
    try:
        _check_utf8(body)
        return msgspec.json.decode(body.removeprefix(b"\xef\xbb\xbf"), type=kind)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not the JSON we expect: {type(error).__name__}") from error


def _mac_holds(keys: Sequence[str], given: str, body: bytes) -> bool:
    """Whether hex `given` is the HMAC-SHA256 of `body` under any of the keys.

    Every key is tried, on bytes: `compare_digest` raises on non-ASCII text.
    """
    import hmac

    if not re.fullmatch(r"[0-9A-Fa-f]{64}", given, re.ASCII):
        return False
    mac = bytes.fromhex(given)
    held = False
    for key in keys:
        made = hmac.digest(key.encode(), body, "sha256")
        held |= hmac.compare_digest(mac, made)
    return held


def _bearer(
    token: str | None,
) -> Callable[[requests.PreparedRequest], requests.PreparedRequest]:
    """Sets the token last: else requests lets a ~/.netrc entry replace it."""

    def sign(request: requests.PreparedRequest) -> requests.PreparedRequest:
        if token is not None:
            request.headers["Authorization"] = f"Bearer {token}"
        return request

    return sign


class ApiForge(Forge):
    """What forges share: one session, and answers sorted into kinds of error."""

    #: The field of Settings that holds the webhook's secrets.
    secret_field: ClassVar[str]
    #: The headers that name the event and the delivery; None: the body does.
    event_header: ClassVar[str | None]
    delivery_header: ClassVar[str | None]
    #: What doctor says when there is no token, and of missed deliveries.
    token_fix: ClassVar[str]
    outage_hint: ClassVar[str]
    api_headers: ClassVar[Mapping[str, str]] = {}
    #: Which trigger type a served action may fire, by event.
    served: ClassVar[Mapping[str, Mapping[str, str]]]
    #: Why a forge without streams has none.
    unpolled: ClassVar[str] = "what happens there is known from its webhooks alone"

    def __init__(
        self, settings: Settings, session: requests.Session, clock: Clock = time.time
    ) -> None:
        self.settings = settings
        self.session = session
        self.clock = clock
        self._own: str | None = None

    @classmethod
    def secrets(cls, settings: Settings) -> tuple[str, ...]:
        """The webhook's secrets; a forge without any is not served."""
        return cast(tuple[str, ...], getattr(settings, cls.secret_field))

    @property
    def hooked(self) -> bool:
        return bool(self.secrets(self.settings))

    @classmethod
    def trial_settings(cls, secret: str | None) -> dict[str, Any]:
        """The settings that check a stored delivery against one secret, if any."""
        return {cls.secret_field: (secret,) if secret else ()}

    def json_of(self, headers: Mapping[str, str], body: bytes) -> bytes:
        """The JSON of a delivery, taken out of its form if it came in one."""
        media = headers.get("content-type", "").partition(";")[0].strip().lower()
        return _form_payload(body) if media == FORM_TYPE else body

    def signed(self, headers: Mapping[str, str], body: bytes) -> bytes:
        """The raw body, whatever its encoding."""
        return body

    def event_of(self, body: bytes) -> str | None:
        """The event of a stored body without headers, if its fields tell."""
        raise NotImplementedError

    def complete(self, event: Event) -> Event:
        """Nothing to ask: all of this forge's events are complete."""
        return event

    def repository(self, name: str) -> str:
        """Only of a forge with `streams`, and so is `poll`."""
        raise NotImplementedError

    def poll(
        self, repo: str, stream: str, since: float | None, etag: str | None
    ) -> News:
        raise NotImplementedError

    def own_id(self) -> str | None:
        if self._own is None:
            try:
                self._own = self._who_we_are()
            except Rejected as error:
                raise InfraError(error.message) from error
        return self._own

    def _who_we_are(self) -> str | None:
        raise NotImplementedError

    def _limited(self, response: requests.Response) -> bool:
        return response.status_code == 429

    def _call(
        self,
        what: str,
        answer: type[T],
        method: str,
        path: str,
        token: str | None,
        body: object = None,
        **params: str | int,
    ) -> T:
        """One API request, read as `answer`; `what` says it in a message.

        Never redirected: a token must not follow a Location. Raises InfraError
        (network, 5xx, rate limit, an odd body) or Rejected.
        """
        response = self._request(what, method, path, token, params, body)
        return self._read(what, answer, response)

    def _sign(self, token: str | None) -> Callable[..., requests.PreparedRequest]:
        return _bearer(token)

    def _request(
        self,
        what: str,
        method: str,
        path: str,
        token: str | None,
        params: Mapping[str, str | int],
        body: object = None,
        etag: str | None = None,
    ) -> requests.Response:
        """The bare answer; with an `etag` it may be 304, unchanged since then. A
        `path` may be a whole URL of the same forge."""
        import requests
        import urllib3

        unchanged = {"If-None-Match": etag} if etag else {}
        try:
            response = self.session.request(
                method,
                path if "://" in path else self.api + path,
                params=dict(params),
                json=body,
                headers={**self.api_headers, **unchanged},
                auth=self._sign(token),
                timeout=API_TIMEOUT,
                allow_redirects=False,
                stream=True,
            )
            return self._whole(what, response)
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            kind = type(error).__name__
            raise InfraError(f"{self.kind}: cannot {what}: {kind}") from error

    def _whole(self, what: str, response: requests.Response) -> requests.Response:
        """The answer with its body read, in bounds of time and size."""
        end, taken = time.monotonic() + API_SECONDS, bytearray()
        # as it comes: `read` waits for all of it, and urllib3 1 has nothing else
        read = getattr(response.raw, "read1", response.raw.read)
        while chunk := read(65_536, decode_content=True):
            taken += chunk
            if len(taken) > API_BYTES or time.monotonic() > end:
                response.close()
                raise InfraError(f"{self.kind}: cannot {what}: an answer without end")
        response._content = bytes(taken)
        return response

    def _read(self, what: str, answer: type[T], response: requests.Response) -> T:
        status = response.status_code
        said = f"{self.kind}: cannot {what}: HTTP {status}"
        if status >= 500 or self._limited(response):
            raise InfraError(said)
        if not 200 <= status < 300:
            raise Rejected(said, status)
        try:
            return msgspec.json.decode(response.content, type=answer)
        except (ValueError, RecursionError) as error:
            raise InfraError(f"{said}, with an odd body") from error

    def _pages(
        self,
        what: str,
        answer: type[list[T]],
        path: str,
        token: str | None,
        **only: str,
    ) -> Iterator[T]:
        """Every row of a list, page by page; `only` are the query's filters."""
        for page in range(1, API_PAGES + 1):
            bounds = {"per_page": PAGE_SIZE, "page": page}
            rows = self._call(what, answer, "GET", path, token, **bounds, **only)
            yield from rows
            if len(rows) < PAGE_SIZE:
                return
        raise InfraError(f"{self.kind}: cannot {what}: a list without end")


def _quoted(segment: str) -> str:
    from urllib.parse import quote

    return quote(segment, safe="")


def _no_token(why: str, fix: str) -> Refused:
    return Refused("forge-token-unavailable", why, fix)


class _GitHubUser(msgspec.Struct):
    id: Any = None
    login: Any = None


class _GitHubLabel(msgspec.Struct):
    name: Any = None


_LabelRows = (
    list[_GitHubLabel | _Odd] | dict[str, Any] | str | int | float | bool | None
)


class _GitHubRepository(msgspec.Struct):
    id: Any = None
    full_name: Any = None


class _GitHubHead(msgspec.Struct):
    sha: Any = None
    ref: Any = None
    repo: _GitHubRepository | _Odd = None


class _GitHubItem(msgspec.Struct):
    """An issue, a pull request, a comment or a review: what we read of any."""

    id: Any = None
    number: Any = None
    title: Any = None
    body: Any = None
    state: Any = None
    updated_at: Any = None
    author_association: Any = None
    user: _GitHubUser | _Odd = None
    labels: _LabelRows = None
    pull_request: Any = None
    merged: Any = None
    head: _GitHubHead | _Odd = None


class _GitHubRow(_GitHubItem):
    """A row of what is polled: any of an issue's events, a comment, a pull
    request, a review, or a push."""

    event: Any = None
    actor: _GitHubUser | _Odd = None
    label: _GitHubLabel | _Odd = None
    issue: _GitHubItem | _Odd = None
    issue_url: Any = None
    html_url: Any = None
    activity_type: Any = None
    after: Any = None
    created_at: Any = None
    submitted_at: Any = None
    timestamp: Any = None


class _GitHubDelivery(msgspec.Struct):
    action: Any = None
    issue: _GitHubItem | _Odd = None
    pull_request: _GitHubItem | _Odd = None
    comment: _GitHubItem | _Odd = None
    review: _GitHubItem | _Odd = None
    label: _GitHubLabel | _Odd = None
    repository: _GitHubRepository | _Odd = None
    sender: _GitHubUser | _Odd = None


class _GitHubAccount(msgspec.Struct):
    id: int


class _GitHubPermission(msgspec.Struct):
    permission: str
    user: _GitHubAccount | None = None


class _GitHubApp(msgspec.Struct):
    slug: str


class _GitHubToken(msgspec.Struct):
    token: str
    expires_at: str


class _GitHubDefault(msgspec.Struct):
    default_branch: str


class _GitHubClassic(msgspec.Struct):
    enabled: bool = False


class _GitHubProtection(msgspec.Struct):
    """A branch: `protected` is true for any rule, `protection` is the classic one."""

    protected: bool
    protection: _GitHubClassic | None = None


class _GitHubRule(msgspec.Struct):
    type: str


class _GitHubNote(msgspec.Struct):
    body: str | None = None
    user: _GitHubAccount | None = None


class _GitHubBranch(msgspec.Struct):
    ref: str
    repo: _GitHubRepository | None = None


class _GitHubPull(msgspec.Struct):
    number: int
    html_url: str
    title: str = ""
    head: _GitHubBranch | None = None


#: The least an installation token can hold.
_READ = {"metadata": "read"}
#: What an installation token in a box may do, and nothing else of what the App may.
_BOX_MAY = {
    "contents": "write",
    "issues": "write",
    "pull_requests": "write",
    "metadata": "read",
}
#: Rules of a ruleset that refuse a direct push; the others only ask more of it.
_NO_DIRECT_PUSH = ("pull_request", "update", "merge_queue")


def _actor(user: object) -> Actor | None:
    found = _shaped(_GitHubUser, user)
    number = _id(found.id)
    return Actor(number, _str(found.login)) if number else None


def _pull_ending(name: str, action: str | None, item: _GitHubItem) -> Ending | None:
    """What a delivery says became of its pull request. In a row of an issue's events
    the issue tells when its request was merged."""
    if name != "pull_request":
        return None
    if action in ("closed", "merged"):
        part = item.pull_request if isinstance(item.pull_request, dict) else {}
        merged = item.merged is True or _time(part.get("merged_at")) is not None
        return "merged" if merged or action == "merged" else "closed"
    return "reopened" if action == "reopened" else None


def _is_said(notes: Iterable[_GitHubNote], marker: str, own: str | None) -> bool:
    """Whether one of them is ours and holds the marker."""
    return any(
        marker in (note.body or "")
        for note in notes
        if note.user is None or own is None or str(note.user.id) == own
    )


def _label_names(*labels: object) -> tuple[str, ...]:
    names = (_str(_shaped(_GitHubLabel, label).name) for label in labels)
    return tuple(dict.fromkeys(name for name in names if name))


class PullForge(ApiForge):
    """REST as GitHub has it and as Gitea took it over."""

    #: The status of a pull request that is refused because it stands already.
    taken: ClassVar[int]

    def _fault(
        self, name: str, kind: str | None, repo: str | None, target: Target | None
    ) -> str | None:
        if name not in self.served:
            return "unhandled-event"
        if kind is None:
            return "action-not-actionable"
        if repo is None:
            return "no-repository"
        return None if target else "missing-number"

    def _token(self, repo: str) -> str:
        """The token of our own API calls. Raises Refused when there is none."""
        raise NotImplementedError

    def _notes(self, path: str, token: str) -> Iterable[_GitHubNote]:
        """Every comment of an issue or request."""
        raise NotImplementedError

    def _holds(self, event: Event, *permissions: str) -> bool:
        """Whether the actor has one of them. A login that has since passed to
        another account answers for that account, so its id must be the actor's."""
        if event.repo is None or event.actor is None or not event.actor.login:
            return False
        what, login = "read a permission", _quoted(event.actor.login)
        path = f"/repos/{event.repo}/collaborators/{login}/permission"
        try:
            token = self._token(event.repo)
            found = self._call(what, _GitHubPermission, "GET", path, token)
        except Rejected as error:
            if error.status == 404:
                return False
            raise InfraError(error.message, "may the token read it?") from error
        except Refused as error:
            raise InfraError(error.message, error.fix) from error
        same = found.user is None or str(found.user.id) == event.actor.id
        return same and found.permission in permissions

    def default_branch(self, repo: str) -> str:
        what, path, token = "read the repository", f"/repos/{repo}", self._token(repo)
        return self._call(what, _GitHubDefault, "GET", path, token).default_branch

    def comment(self, repo: str, target: Target, text: str, marker: str) -> None:
        """Post once: a comment of ours that holds the marker is the same one."""
        path = f"/repos/{repo}/issues/{target.number}/comments"
        token, own = self._token(repo), self.own_id()
        if not _is_said(self._notes(path, token), marker, own):
            said = text if marker in text else f"{text}\n\n{marker}"
            self._call("comment", _GitHubNote, "POST", path, token, {"body": said})

    def open_request(
        self, repo: str, head: str, base: str, title: str, body: str
    ) -> Request:
        what, path = "open the pull request", f"/repos/{repo}/pulls"
        asked = {"title": title, "head": head, "base": base, "body": body}
        try:
            row = self._call(what, _GitHubPull, "POST", path, self._token(repo), asked)
        except Rejected as error:
            stands = error.status == self.taken
            found = self.find_request(repo, head) if stands else None
            if found is None:
                raise
            return found
        return Request(row.number, row.html_url, row.title)

    def retitle_request(self, repo: str, number: int, title: str) -> None:
        what, path = "retitle the pull request", f"/repos/{repo}/pulls/{number}"
        asked = {"title": title}
        self._call(what, _GitHubPull, "PATCH", path, self._token(repo), asked)


class GitHub(PullForge):
    """github.com and GitHub Enterprise Server.

    Facts: docs.github.com "Webhook events and payloads", "Validating webhook
    deliveries", REST "Collaborators", "Pulls", "Issues", "Apps".
    """

    kind: ForgeKind = "github"
    taken = 422
    secret_field = "webhook_secret"
    event_header = "x-github-event"
    delivery_header = "x-github-delivery"
    token_fix = "set GITHUB_PAT; see the README"
    outage_hint = "redeliver missed ones there, GitHub never does so by itself"
    api_headers = {
        "Accept": "application/vnd.github+json",
        "X-GitHub-Api-Version": "2022-11-28",
        "User-Agent": f"pidispatch/{__version__}",
    }
    #: `opened` and `reopened` of an issue are for rules that match the labels present.
    served = {
        "issues": {
            "labeled": "label",
            "opened": "label",
            "reopened": "label",
            "closed": "issue",
        },
        "issue_comment": {"created": "comment"},
        "pull_request": dict.fromkeys(
            ("labeled", "opened", "synchronize", "reopened", "closed"), "pull_request"
        ),
        "pull_request_review": {"submitted": "pull_request"},
    }
    #: Author associations whose word starts work.
    steers = ("OWNER", "MEMBER", "COLLABORATOR")
    streams = ("events", "comments", "pulls")
    aliases = ("/",)
    #: The most pages that one look at a list reads.
    poll_pages = 50
    #: The share of the hour's requests that polling leaves to the jobs.
    reserve = 0.1

    def __init__(
        self, settings: Settings, session: requests.Session, clock: Clock = time.time
    ) -> None:
        super().__init__(settings, session, clock)
        self.api = settings.github_api_url
        self._tokens: dict[str, tuple[str, float]] = {}

    # --- a delivery

    def verify(self, headers: Mapping[str, str], body: bytes) -> None:
        scheme, _, mac = headers.get("x-hub-signature-256", "").partition("=")
        if scheme != "sha256" or not _mac_holds(
            self.settings.webhook_secret, mac, body
        ):
            raise Unauthorized("github: X-Hub-Signature-256 does not hold")

    def parse(self, headers: Mapping[str, str], body: bytes) -> Event:
        name = headers.get(self.event_header, "").strip()
        delivery = headers.get(self.delivery_header, "").strip()
        if not name or not delivery:
            raise Malformed("X-GitHub-Event and X-GitHub-Delivery are required")
        sent = _decode(_GitHubDelivery, self.json_of(headers, body))
        return self._event(name, delivery, sent)

    def event_of(self, body: bytes) -> str | None:
        sent = _decode(_GitHubDelivery, body)
        names = {
            "pull_request_review": sent.review,
            "issue_comment": sent.comment and sent.issue,
            "pull_request": sent.pull_request and not sent.comment,
            "issues": sent.issue,
        }
        return next((name for name, there in names.items() if there), None)

    def _event(self, name: str, delivery: str, sent: _GitHubDelivery) -> Event:
        item = _shaped(_GitHubItem, sent.issue or sent.pull_request)
        comment = _shaped(_GitHubItem, sent.comment)
        review = _shaped(_GitHubItem, sent.review)
        said = _shaped(_GitHubItem, sent.comment or sent.review or item)
        repository = _shaped(_GitHubRepository, sent.repository)
        repo, target = _owner_and_name(repository.full_name), self._target(sent, item)
        action = _str(sent.action) or None
        kind = self.served.get(name, {}).get(action or "")
        if name == "pull_request_review" and kind:
            action = "review_submitted"
        if name == "issues" and target and target.type == "pull_request":
            kind = None
        added = _label_names(sent.label) if action == "labeled" else ()
        present = item.labels if isinstance(item.labels, list) else []
        sha = _str(_shaped(_GitHubHead, item.head).sha)
        return Event(
            forge="github",
            delivery=delivery,
            name=name,
            kind=cast(Any, kind),
            action=action,
            repo=repo,
            repo_id=_id(repository.id),
            target=target,
            actor=_actor(sent.sender),
            author=_actor(said.user),
            association=_str(said.author_association) or None,
            labels=tuple(dict.fromkeys((*_label_names(*present), *added))),
            added=added,
            comment=_str(comment.body) if sent.comment else None,
            comment_id=_id(comment.id),
            review_state=_str(review.state).lower() or None,
            review=_str(review.body) if sent.review else None,
            head=sha if _SHA.fullmatch(sha) else None,
            when=_time(item.updated_at),
            fault=self._fault(name, kind, repo, target),
            ending=_pull_ending(name, action, item),
        )

    @staticmethod
    def _target(sent: _GitHubDelivery, item: _GitHubItem) -> Target | None:
        number = _number(item.number)
        if number is None:
            return None
        request = not sent.issue or item.pull_request is not None
        kind: TargetType = "pull_request" if request else "issue"
        return Target(kind, number, _str(item.title), _str(item.body))

    # --- polling: rows of the API as the deliveries they would have been

    def repository(self, name: str) -> str:
        what, path, token = "read the repository", f"/repos/{name}", self._token(name)
        found = self._call(what, _GitHubRepository, "GET", path, token)
        repo = _owner_and_name(found.full_name)
        if repo is None or repo.lower() != name.lower():
            raise InfraError(f"github: cannot {what} {name}: it has another name")
        return repo

    def poll(
        self, repo: str, stream: str, since: float | None, etag: str | None
    ) -> News:
        look = {
            "events": self._poll_events,
            "comments": self._poll_comments,
            "pulls": self._poll_pulls,
        }
        return look[stream](repo, since, etag)

    def _poll_events(self, repo: str, since: float | None, etag: str | None) -> News:
        """Labels, closes, reopenings, of issues and of pull requests alike."""
        path = f"/repos/{repo}/issues/events"
        rows, news = self._recent(repo, path, "created_at", since, etag, {})
        found = [self._happened(repo, row) for row in rows]
        return msgspec.structs.replace(news, events=tuple(filter(None, found)))

    def _happened(self, repo: str, row: _GitHubRow) -> Event | None:
        """A label that has been taken off since then is not added any more."""
        item, action = _shaped(_GitHubItem, row.issue), _str(row.event)
        pull = item.pull_request is not None
        name = "pull_request" if pull else "issues"
        if action not in self.served[name] and not (pull and action == "merged"):
            return None
        sent = _GitHubDelivery(
            action=action,
            issue=None if pull else item,
            pull_request=item if pull else None,
            label=row.label,
            sender=row.actor,
        )
        event = self._polled(repo, name, f"e{_id(row.id)}", row.created_at, sent)
        present = item.labels if isinstance(item.labels, list) else []
        held = _label_names(*present)
        added = tuple(name for name in event.added or () if name in held)
        return msgspec.structs.replace(event, labels=held, added=added)

    def _poll_comments(self, repo: str, since: float | None, etag: str | None) -> News:
        """New comments; one that was edited before it was seen is not new."""
        path = f"/repos/{repo}/issues/comments"
        order = {"sort": "created", "direction": "desc"}
        if since is not None:
            when = time.gmtime(max(since, 0.0))
            order["since"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", when)
        rows, news = self._recent(repo, path, "created_at", since, etag, order)
        events = tuple(self._said(repo, row) for row in rows)
        return msgspec.structs.replace(news, events=events)

    def _said(self, repo: str, row: _GitHubRow) -> Event:
        number = _str(row.issue_url).rpartition("/")[2]
        on_pull = "/pull/" in _str(row.html_url)
        item = _GitHubItem(
            number=int(number) if re.fullmatch("[0-9]{1,16}", number) else None,
            pull_request=True if on_pull else None,
        )
        edited = (_time(row.updated_at) or 0.0) - (_time(row.created_at) or 0.0) > 2
        action = "edited" if edited else "created"
        sent = _GitHubDelivery(action=action, issue=item, comment=row, sender=row.user)
        named = ("issue_comment", f"c{_id(row.id)}", row.created_at, sent)
        return msgspec.structs.replace(self._polled(repo, *named), incomplete=True)

    def _poll_pulls(self, repo: str, since: float | None, etag: str | None) -> News:
        """New pull requests; and of those that changed, reviews and the last push."""
        path = f"/repos/{repo}/pulls"
        order = {"state": "all", "sort": "updated", "direction": "desc"}
        rows, news = self._recent(repo, path, "updated_at", since, etag, order)
        events: list[Event] = []
        for row in rows:
            opened = _GitHubDelivery(action="opened", pull_request=row, sender=row.user)
            named = ("pull_request", f"p{_id(row.id)}", row.created_at, opened)
            events.append(self._polled(repo, *named))
            events += self._reviews(repo, row)
            events += self._pushes(repo, row)
        seen = tuple(event for event in events if event.when is not None)
        return msgspec.structs.replace(news, events=seen)

    def _reviews(self, repo: str, pull: _GitHubRow) -> Iterator[Event]:
        path = f"/repos/{repo}/pulls/{_number(pull.number)}/reviews"
        rows = self._pages(
            "read the reviews", list[_GitHubRow | _Odd], path, self._token(repo)
        )
        most = self.poll_pages * PAGE_SIZE
        for row in map(
            functools.partial(_shaped, _GitHubRow), itertools.islice(rows, most)
        ):
            sent = _GitHubDelivery(
                action="submitted", pull_request=pull, review=row, sender=row.user
            )
            named = ("pull_request_review", f"v{_id(row.id)}", row.submitted_at, sent)
            yield self._polled(repo, *named)

    def _pushes(self, repo: str, pull: _GitHubRow) -> Iterator[Event]:
        """The last push to its branch and who made it, as the activity of the
        repository it came from tells; nothing when that may not be read."""
        head = _shaped(_GitHubHead, pull.head)
        home = _owner_and_name(_shaped(_GitHubRepository, head.repo).full_name)
        if home is None or not _str(head.ref) or pull.state != "open":
            return
        what, path = "read the pushes", f"/repos/{home}/activity"
        branch, token = f"refs/heads/{_str(head.ref)}", self._token(repo)
        try:
            rows = self._call(
                what, list[_GitHubRow | _Odd], "GET", path, token, ref=branch
            )
        except Rejected:
            return
        for row in (_shaped(_GitHubRow, row) for row in rows):
            if row.activity_type in ("push", "force_push"):
                pushed = msgspec.structs.replace(pull, head=_GitHubHead(row.after))
                sent = _GitHubDelivery(
                    action="synchronize", pull_request=pushed, sender=row.actor
                )
                named = ("pull_request", f"s{_id(row.id)}", row.timestamp, sent)
                yield self._polled(repo, *named)
                return

    def _polled(
        self, repo: str, name: str, key: str, at: object, sent: _GitHubDelivery
    ) -> Event:
        sent.repository = _GitHubRepository(full_name=repo)
        event = self._event(name, POLLED + key, sent)
        return msgspec.structs.replace(event, when=_time(at))

    def complete(self, event: Event) -> Event:
        """A polled comment does not show its issue, which may be gone by now."""
        assert event.repo and event.target
        path = f"/repos/{event.repo}/issues/{event.target.number}"
        token, item = self._token(event.repo), _GitHubItem()
        try:
            item = self._call("read the issue", _GitHubItem, "GET", path, token)
        except Rejected as error:
            if error.status not in (404, 410):
                raise
        found = self._target(_GitHubDelivery(issue=item), item)
        known = found is not None and found.number == event.target.number
        fault = None if known else "missing-number"
        return msgspec.structs.replace(
            event, target=found, fault=fault, incomplete=False
        )

    def _recent(
        self,
        repo: str,
        path: str,
        by: str,
        since: float | None,
        etag: str | None,
        order: Mapping[str, str],
    ) -> tuple[list[_GitHubRow], News]:
        """The rows of a list, newest first, back to `since`; rows without a time
        are none. The first page tells whether anything changed."""
        rows: list[_GitHubRow] = []
        newest, tag, wait, token = None, None, 0.0, self._token(repo)
        for page in range(1, self.poll_pages + 1):
            place: dict[str, str | int] = {"per_page": PAGE_SIZE, "page": page, **order}
            known = etag if page == 1 else None
            answer = self._request("poll", "GET", path, token, place, etag=known)
            wait = max(wait, self._asked(answer))
            if answer.status_code == 304:
                return [], News(etag=etag, wait=wait)
            if self._limited(answer):
                raise Throttled(f"github: {path}: rate limit", max(wait, 60.0))
            found = self._read("poll", list[_GitHubRow | _Odd], answer)
            timed = [
                (at, row)
                for row in found
                if isinstance(row, _GitHubRow)
                and (at := _time(getattr(row, by))) is not None
            ]
            if page == 1:
                tag = answer.headers.get("ETag")
                newest = max((at for at, _ in timed), default=None)
            if since is None and newest is not None:
                since = min(newest, self.clock()) - POLL_OVERLAP
            rows += [row for at, row in timed if at >= (since or 0.0)]
            if len(found) < PAGE_SIZE or any(at < (since or 0.0) for at, _ in timed):
                break
        else:
            log_event("poll-cut-short", logging.WARNING, repo=repo, rows=len(rows))
        return rows, News(newest=newest, etag=tag, wait=wait)

    def _asked(self, answer: requests.Response) -> float:
        """Seconds it asks us to wait, an hour at most (docs: "Best practices for
        using the REST API", "Rate limits for the REST API")."""
        given = answer.headers
        asked = [
            _seconds(given.get(name)) for name in ("retry-after", "x-poll-interval")
        ]
        left, limit, reset = (
            _seconds(given.get(f"x-ratelimit-{name}"), -1.0)
            for name in ("remaining", "limit", "reset")
        )
        if 0 <= left <= limit * self.reserve:
            asked.append(reset - self.clock())
        return min(max(asked), 3600.0)

    # --- who asked

    def authority(self, event: Event) -> Literal["allowed", "denied", "ask"]:
        """`association` belongs to the author, so it decides only for them.

        Only collaborators label, but an issue form puts its own labels on in the
        reporter's name: a label of an author who does not steer is asked about.
        """
        acted = event.actor and event.author and event.actor.id == event.author.id
        if event.action == "labeled":
            stranger = acted and event.association not in self.steers
            return "ask" if stranger else "allowed"
        if event.action == "closed" or not acted or event.association is None:
            return "ask"
        if event.association not in self.steers:
            return "denied"
        return "ask" if self.settings.github_authority == "api" else "allowed"

    def ask(self, event: Event) -> bool:
        return self._holds(event, "admin", "write")

    def _who_we_are(self) -> str | None:
        what = "read our own account"
        if self.settings.github_auth_source == "app":
            return self._bot_id(what)
        try:
            token = self._token("")
        except Refused:
            return None
        return str(self._call(what, _GitHubAccount, "GET", "/user", token).id)

    def _bot_id(self, what: str) -> str | None:
        """An App acts as the user `<slug>[bot]`; its id is not the App's."""
        try:
            ticket = self._app_jwt()
        except Refused:
            return None
        slug = self._call(what, _GitHubApp, "GET", "/app", ticket).slug
        path = "/users/" + _quoted(f"{slug}[bot]")
        number, token = self.settings.github_app_installation, None
        if number is not None:
            # a server in private mode shows nobody to a caller without a token
            token = self._installation_token(number, {"permissions": _READ}).token
        return str(self._call(what, _GitHubAccount, "GET", path, token).id)

    # --- credentials

    def credential(self, repo: str) -> Credential:
        """A token for git and, with publish=agent, the box: an App's is always
        minted afresh, for this repository alone and with its whole hour."""
        if self.settings.github_auth_source == "app":
            return Credential("x-access-token", self._mint(repo)[0])
        return Credential("x-access-token", self._token(repo))

    def _token(self, repo: str) -> str:
        """The token of our own API calls. Raises Refused when there is none."""
        source = self.settings.github_auth_source
        if source == "pat":
            if self.settings.github_pat is None:
                raise _no_token("GitHub has no token", "set GITHUB_PAT")
            return self.settings.github_pat
        key = repo if source == "app" else ""
        token, until = self._tokens.get(key, ("", 0.0))
        # one with more than its hour left was kept before the clock was set back
        if not 0 < until - self.clock() <= 3600:
            token, until = self._mint(repo) if source == "app" else self._gh_token()
            self._tokens[key] = (token, until)
        return token

    def _gh_token(self) -> tuple[str, float]:
        import subprocess

        host = self.clone_url("").split("/")[2]
        argv = ["gh", "auth", "token", "--hostname", host]
        try:
            done = subprocess.run(argv, capture_output=True, timeout=10, check=True)
        except subprocess.TimeoutExpired as error:
            raise InfraError("`gh auth token` did not answer") from error
        except (OSError, subprocess.CalledProcessError) as error:
            raise _no_token("`gh` has no token", f"gh auth login -h {host}") from error
        token = done.stdout.decode("ascii", "replace").strip()
        if not token:
            raise _no_token("`gh` has no token", f"gh auth login -h {host}")
        return token, self.clock() + 300

    def agent_environment(self, repo: str) -> dict[str, str]:
        """GH_TOKEN, and GH_HOST where that is not github.com (`gh help environment`).

        An App's token is minted for this repository with the least permissions; a
        personal one is the operator's own.
        """
        minted = self.settings.github_auth_source == "app"
        token = self._mint(repo, _BOX_MAY)[0] if minted else self._token(repo)
        host = self.clone_url(repo).split("/")[2]
        found = {"GH_TOKEN": token, "GH_NO_UPDATE_NOTIFIER": "1", GIT_PASSWORD: token}
        if host != "github.com":
            found |= {"GH_HOST": host, "GH_ENTERPRISE_TOKEN": token}
        return found

    def _mint(
        self, repo: str, permissions: Mapping[str, str] | None = None
    ) -> tuple[str, float]:
        """An installation token for one repository, and when to stop using it."""
        number = self.settings.github_app_installation
        try:
            if number is None:
                what, path = "find the installation", f"/repos/{repo}/installation"
                ticket = self._app_jwt()
                found = self._call(what, _GitHubAccount, "GET", path, ticket)
                number = str(found.id)
            only: dict[str, Any] = {"repositories": [repo.rpartition("/")[2]]}
            if permissions:
                only["permissions"] = permissions
            made = self._installation_token(number, only)
        except Rejected as error:
            raise _no_token(error.message, "install the App there") from error
        return made.token, (_time(made.expires_at) or 0.0) - 300

    def _installation_token(self, number: str, bounds: object) -> _GitHubToken:
        path = f"/app/installations/{_quoted(number)}/access_tokens"
        ticket = self._app_jwt()
        return self._call("mint a token", _GitHubToken, "POST", path, ticket, bounds)

    def _app_jwt(self) -> str:
        """The App's own ticket: at most ten minutes, dated back a minute for
        clocks that differ (docs: "Generating a JSON Web Token")."""
        app, key = self.settings.github_app_id, self.settings.github_app_key
        if app is None or key is None:
            fix = "set GITHUB_APP_ID and GITHUB_APP_PRIVATE_KEY_FILE"
            raise _no_token("the GitHub App is not configured", fix)
        try:
            import jwt
        except ImportError as error:
            fix = "pip install 'pidispatch[github-app]'"
            raise _no_token("PyJWT is not installed", fix) from error
        now = int(self.clock())
        claims = {"iat": now - 60, "exp": now + 540, "iss": app}
        try:
            return jwt.encode(claims, key.read_bytes(), algorithm="RS256")
        except (OSError, ValueError, TypeError, jwt.PyJWTError) as error:
            why = f"GITHUB_APP_PRIVATE_KEY_FILE: {type(error).__name__}"
            raise _no_token(why, "point it at the App's PEM file") from error

    def _limited(self, response: requests.Response) -> bool:
        """Secondary limits come as 403 (docs: "Rate limits for the REST API")."""
        spent = (
            "retry-after" in response.headers
            or response.headers.get("x-ratelimit-remaining") == "0"
            or b"rate limit" in response.content
        )
        return super()._limited(response) or (response.status_code == 403 and spent)

    # --- the repository and its requests

    def clone_url(self, repo: str) -> str:
        root = self.api.removesuffix("/api/v3")
        if root == "https://api.github.com":
            root = "https://github.com"
        scheme, _, rest = root.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}/{repo}.git"

    def item(self, repo: str, target: Target) -> Target:
        """The issue or pull request as it reads now: the issues API has both."""
        what, path = "read the item", f"/repos/{repo}/issues/{target.number}"
        found = self._call(what, _GitHubItem, "GET", path, self._token(repo))
        title, body = _str(found.title), _str(found.body)
        return Target(target.type, target.number, title, body)

    def _notes(self, path: str, token: str) -> Iterable[_GitHubNote]:
        return self._pages("read the comments", list[_GitHubNote], path, token)

    def protected(self, repo: str, branch: str) -> bool:
        """Classic protection is taken at its word; of rulesets only rules that
        refuse a push count, for `protected` is true for any rule whatever (REST
        "Get a branch", "Get rules for a branch")."""
        what, name, token = "read the protection", _quoted(branch), self._token(repo)
        try:
            path = f"/repos/{repo}/rules/branches/{name}"
            found = [*self._pages(what, list[_GitHubRule], path, token)]
            path = f"/repos/{repo}/branches/{name}"
            row = self._call(what, _GitHubProtection, "GET", path, token)
        except Rejected as error:
            raise InfraError(error.message, "may the token read the branch?") from error
        classic = row.protected and not found
        classic = classic or (row.protection is not None and row.protection.enabled)
        return classic or any(rule.type in _NO_DIRECT_PUSH for rule in found)

    def find_request(self, repo: str, head: str) -> Request | None:
        """The open pull request of exactly this branch of this repository.

        GitHub drops a `head` filter it cannot read, so each row is compared.
        """
        rows = self._call(
            "look for the pull request",
            list[_GitHubPull],
            "GET",
            f"/repos/{repo}/pulls",
            self._token(repo),
            state="open",
            head=f"{repo.partition('/')[0]}:{head}",
            per_page=PAGE_SIZE,
        )
        for row in rows:
            if row.head and row.head.ref == head and _same_repo(row.head.repo, repo):
                return Request(row.number, row.html_url, row.title)
        return None


class _ForgejoReview(msgspec.Struct):
    type: Any = None
    content: Any = None


class _ForgejoChanges(msgspec.Struct):
    """What Gitea says of a label change since 1.25; Forgejo says nothing."""

    added_labels: _LabelRows = None
    removed_labels: _LabelRows = None


class _ForgejoDelivery(msgspec.Struct):
    """Items, people and repositories have the shape of GitHub's."""

    action: Any = None
    issue: _GitHubItem | _Odd = None
    pull_request: _GitHubItem | _Odd = None
    is_pull: Any = None
    comment: _GitHubItem | _Odd = None
    review: _ForgejoReview | _Odd = None
    changes: _ForgejoChanges | _Odd = None
    repository: _GitHubRepository | _Odd = None
    sender: _GitHubUser | _Odd = None


class _ForgejoIssue(msgspec.Struct):
    title: str
    body: str | None = None


class _ForgejoBranch(msgspec.Struct):
    protected: bool
    user_can_push: bool


class _ForgejoMoment(msgspec.Struct):
    """A row of an issue's timeline; `body` of a label's row is "1" when it came."""

    type: str | int
    created_at: str
    body: str | None = None
    label: _GitHubLabel | None = None


class Forgejo(PullForge):
    """Forgejo and Gitea, codeberg.org among them.

    Facts: the sources of both (`services/webhook`, `services/convert`,
    `routers/api/v1/repo`) and forgejo.org/docs, "Webhooks", "API usage".
    """

    kind: ForgeKind = "forgejo"
    taken = 409
    token_fix = "set FORGEJO_TOKEN; see the README"
    outage_hint = (
        "replay missed ones from the webhook's page, nothing does so by itself"
    )
    secret_field = "forgejo_webhook_secret"
    event_header = "x-forgejo-event"
    delivery_header = "x-forgejo-delivery"
    api_headers = {
        "Accept": "application/json",
        "User-Agent": f"pidispatch/{__version__}",
    }
    #: `pull_request_comment` and its like are reviews; no rule can name them.
    served = {
        "issues": {
            "label_updated": "label",
            "opened": "label",
            "reopened": "label",
            "closed": "issue",
        },
        "issue_comment": {"created": "comment"},
        "pull_request": dict.fromkeys(
            ("label_updated", "opened", "synchronized", "reopened", "closed"),
            "pull_request",
        ),
    }
    #: Each signature that may stand in a delivery, and what stands before its hex.
    signatures = (
        ("x-forgejo-signature", ""),
        ("x-gitea-signature", ""),
        ("x-hub-signature-256", "sha256="),
    )
    #: Rows asked for at once: what a server gives at most, unless its operator
    #: says otherwise (MAX_RESPONSE_ITEMS).
    page = 50
    #: Seconds between a label's row in the timeline and its issue's new time.
    slack = 2.0

    def __init__(
        self, settings: Settings, session: requests.Session, clock: Clock = time.time
    ) -> None:
        super().__init__(settings, session, clock)
        self.url = settings.forgejo_url or ""
        self.api = f"{self.url}/api/v1"

    # --- a delivery

    def signed(self, headers: Mapping[str, str], body: bytes) -> bytes:
        """The JSON, also of a form: the same JSON in another form is no other."""
        return self.json_of(headers, body)

    def verify(self, headers: Mapping[str, str], body: bytes) -> None:
        """All signatures that are there must hold, one at least; empty ones, as
        of a webhook without a secret, never do."""
        try:
            text = self.signed(headers, body)
        except Malformed as error:
            raise Unauthorized("forgejo: a form without what is signed") from error
        keys = self.settings.forgejo_webhook_secret
        held = [
            headers[name].startswith(scheme)
            and _mac_holds(keys, headers[name].removeprefix(scheme), text)
            for name, scheme in self.signatures
            if name in headers
        ]
        if not held or not all(held):
            raise Unauthorized("forgejo: a signature does not hold")

    def parse(self, headers: Mapping[str, str], body: bytes) -> Event:
        """Gitea sends X-Gitea-* alone, Forgejo both with one value; the X-GitHub-*
        that both send as well are nobody's here."""
        name, delivery = (
            headers.get(f"x-gitea-{word}", headers.get(f"x-forgejo-{word}", "")).strip()
            for word in ("event", "delivery")
        )
        if not name or not delivery:
            raise Malformed("X-Forgejo-Event and X-Forgejo-Delivery are required")
        sent = _decode(_ForgejoDelivery, self.json_of(headers, body))
        return self._event(name, delivery, sent)

    def event_of(self, body: bytes) -> str | None:
        sent = _decode(_ForgejoDelivery, body)
        verdict = _str(_shaped(_ForgejoReview, sent.review).type)
        names = {
            verdict.replace("_review", ""): verdict,
            "issue_comment": sent.comment and sent.issue,
            "pull_request": sent.pull_request and not sent.comment,
            "issues": sent.issue,
        }
        return next((name for name, there in names.items() if there), None)

    def _event(self, name: str, delivery: str, sent: _ForgejoDelivery) -> Event:
        item = _shaped(_GitHubItem, sent.issue or sent.pull_request)
        comment = _shaped(_GitHubItem, sent.comment)
        review = _shaped(_ForgejoReview, sent.review)
        repository = _shaped(_GitHubRepository, sent.repository)
        repo, target = _owner_and_name(repository.full_name), self._target(sent, item)
        action = _str(sent.action) or None
        kind = self.served.get(name, {}).get(action or "")
        if name == "issues" and target and target.type == "pull_request":
            kind = None
        added = _forgejo_added(sent.changes) if action == "label_updated" else None
        present = item.labels if isinstance(item.labels, list) else None
        # `label_cleared` still lists what it cleared
        listed = () if action == "label_cleared" else _label_names(*(present or ()))
        labels = tuple(dict.fromkeys((*listed, *(added or ()))))
        request = sent.pull_request if target and sent.pull_request else item
        sha = _str(_shaped(_GitHubHead, _shaped(_GitHubItem, request).head).sha)
        known = present is not None and repo is not None and target is not None
        return Event(
            forge="forgejo",
            delivery=delivery,
            name=name,
            kind=cast(Any, kind),
            action=action,
            repo=repo,
            repo_id=_id(repository.id),
            target=target,
            actor=_actor(sent.sender),
            author=_actor(comment.user if sent.comment else item.user),
            labels=labels,
            added=added,
            comment=_str(comment.body) if sent.comment else None,
            comment_id=_id(comment.id),
            review=_str(review.content) if sent.review else None,
            head=sha if _SHA.fullmatch(sha) else None,
            when=_time(item.updated_at),
            fault=self._fault(name, kind, repo, target),
            remember=labels if known else None,
            ending=_pull_ending(name, action, item),
        )

    @staticmethod
    def _target(sent: _ForgejoDelivery, item: _GitHubItem) -> Target | None:
        """`is_pull` is younger than many servers; `pull_request` of an issue is
        always there, and null for an issue."""
        number = _number(item.number)
        if number is None:
            return None
        marked = sent.is_pull is True or item.pull_request is not None
        kind: TargetType = "pull_request" if marked or not sent.issue else "issue"
        return Target(kind, number, _str(item.title), _str(item.body))

    def complete(self, event: Event) -> Event:
        """What the event added, by the issue's timeline. Where that does not tell,
        nothing is known to have been there before: the whole set counts."""
        try:
            added = self._added(event)
        except (InfraError, Rejected, Refused) as error:
            log_event("label-history-unknown", logging.WARNING, error=error)
            added = None
        return msgspec.structs.replace(event, added=added, incomplete=False)

    def _added(self, event: Event) -> tuple[str, ...] | None:
        """The labels put on at the event's time; None when none came or went then."""
        assert event.repo and event.target
        path = f"/repos/{event.repo}/issues/{event.target.number}/timeline"
        since = {}
        if event.when is not None:
            moment = time.gmtime(event.when - self.slack)
            since["since"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", moment)
        what, answer = "read the timeline", list[_ForgejoMoment | None]
        rows = self._rows(what, answer, path, event.repo, **since)
        moments = [
            (_time(row.created_at) or 0.0, _str(row.label.name), row.body == "1")
            for row in rows
            if row and row.label and row.type in ("label", 7)
        ]
        at = event.when or max((when for when, _, _ in moments), default=0.0)
        near = [moment for moment in moments if abs(moment[0] - at) <= self.slack]
        came = {name for _, name, added in near if added}
        return tuple(n for n in event.labels if n in came) if near else None

    # --- who asked

    def authority(self, event: Event) -> Literal["allowed", "denied", "ask"]:
        """No payload tells: its `permissions` are sometimes another person's."""
        return "ask"

    def ask(self, event: Event) -> bool:
        """Only an administrator of the repository may ask for others."""
        return self._holds(event, "owner", "admin", "write")

    def _who_we_are(self) -> str | None:
        """FORGEJO_BOT_ID spares the token a scope, and not the look whether it holds:
        the server refuses a bad one also where none is needed."""
        try:
            token = self._token("")
        except Refused:
            return None
        given, what = self.settings.forgejo_bot_id, "read our own account"
        if given is not None:
            self._call(what, dict[str, Any], "GET", "/version", token)
            return str(given)
        return str(self._call(what, _GitHubAccount, "GET", "/user", token).id)

    # --- credentials

    def credential(self, repo: str) -> Credential:
        """Git takes a token as the password of anybody."""
        return Credential("oauth2", self._token(repo))

    def _token(self, repo: str) -> str:
        if self.settings.forgejo_token is None:
            raise _no_token("Forgejo has no token", "set FORGEJO_TOKEN")
        return self.settings.forgejo_token

    def agent_environment(self, repo: str) -> dict[str, str]:
        """Server and token by the names that tea, Gitea's own tools and forgejo-cli
        know. The token is the operator's own: there is no other."""
        token = self._token(repo)
        return {
            "GITEA_SERVER_URL": self.url,
            "GITEA_SERVER_TOKEN": token,
            "FORGEJO_URL": self.url,
            "FORGEJO_TOKEN": token,
        }

    # --- the repository and its requests

    def _rows(
        self, what: str, answer: type[list[T]], path: str, repo: str, **params: str
    ) -> Iterator[T]:
        """Page by page until one is empty, for a server may give fewer than asked;
        one that gives the same page again knows no pages."""
        before: list[T] = []
        for page in range(1, API_PAGES + 1):
            asked: dict[str, Any] = {**params, "limit": self.page, "page": page}
            rows = self._call(what, answer, "GET", path, self._token(repo), **asked)
            if not rows or rows == before:
                return
            yield from rows
            before = rows
        raise InfraError(f"{self.kind}: cannot {what}: a list without end")

    def clone_url(self, repo: str) -> str:
        return f"{self.url}/{repo}.git"

    def item(self, repo: str, target: Target) -> Target:
        """Title and body as they are now; a request is an issue as well."""
        what, path = "read the issue", f"/repos/{repo}/issues/{target.number}"
        row = self._call(what, _ForgejoIssue, "GET", path, self._token(repo))
        return Target(target.type, target.number, row.title, row.body or "")

    def protected(self, repo: str, branch: str) -> bool:
        """Whether a rule covers the branch, by its name or a pattern, and keeps our
        account from pushing. The server applies its own patterns."""
        from urllib.parse import quote

        path = f"/repos/{repo}/branches/{quote(branch)}"
        try:
            what, token = "read the protection", self._token(repo)
            row = self._call(what, _ForgejoBranch, "GET", path, token)
        except Rejected as error:
            raise InfraError(error.message, "may the token read the branch?") from error
        return row.protected and not row.user_can_push

    def _notes(self, path: str, token: str) -> Iterable[_GitHubNote]:
        """All at once: this list knows no pages."""
        what = "read the comments"
        return self._call(what, list[_GitHubNote], "GET", path, token)

    def find_request(self, repo: str, head: str) -> Request | None:
        """The open pull request of exactly this branch of this repository; the
        list has no filter for it."""
        what, path = "look for the pull request", f"/repos/{repo}/pulls"
        for row in self._rows(what, list[_GitHubPull], path, repo, state="open"):
            if row.head and row.head.ref == head and _same_repo(row.head.repo, repo):
                return Request(row.number, row.html_url, row.title)
        return None


def _forgejo_added(changes: object) -> tuple[str, ...] | None:
    """The labels that a change names as added; None when it names none at all."""
    told = _shaped(_ForgejoChanges, changes)
    lists = (told.added_labels, told.removed_labels)
    added, removed = (row if isinstance(row, list) else [] for row in lists)
    return _label_names(*added) if added or removed else None


def _same_repo(found: _GitHubRepository | None, repo: str) -> bool:
    return found is not None and _str(found.full_name).lower() == repo.lower()


class _GitLabUser(msgspec.Struct):
    id: Any = None
    username: Any = None


class _GitLabLabel(msgspec.Struct):
    id: Any = None
    title: Any = None


_GitLabLabels = list[_GitLabLabel | _Odd] | str | int | float | bool | None


class _GitLabChange(msgspec.Struct):
    previous: _GitLabLabels = None
    current: _GitLabLabels = None


class _GitLabChanges(msgspec.Struct):
    labels: _GitLabChange | _Odd = None
    draft: Any = None
    work_in_progress: Any = None


class _GitLabCommit(msgspec.Struct):
    id: Any = None


class _GitLabItem(msgspec.Struct):
    """An issue, a work item, a merge request or a note: what we read of any."""

    id: Any = None
    iid: Any = None
    title: Any = None
    description: Any = None
    action: Any = None
    author_id: Any = None
    confidential: Any = None
    internal: Any = None
    system: Any = None
    note: Any = None
    noteable_type: Any = None
    oldrev: Any = None
    updated_at: Any = None
    labels: _GitLabLabels = None
    last_commit: _GitLabCommit | _Odd = None


class _GitLabProject(msgspec.Struct):
    id: Any = None
    path_with_namespace: Any = None


class _GitLabDelivery(msgspec.Struct):
    object_kind: Any = None
    event_type: Any = None
    user: _GitLabUser | _Odd = None
    project: _GitLabProject | _Odd = None
    object_attributes: _GitLabItem | _Odd = None
    labels: _GitLabLabels = None
    changes: _GitLabChanges | _Odd = None
    issue: _GitLabItem | _Odd = None
    merge_request: _GitLabItem | _Odd = None


class _GitLabId(msgspec.Struct):
    id: int


class _GitLabMember(msgspec.Struct):
    id: int
    access_level: int
    membership_state: str = "active"


class _GitLabDefault(msgspec.Struct):
    default_branch: str


class _GitLabBranch(msgspec.Struct):
    """`can_push` is about the token that asks."""

    protected: bool
    can_push: bool


class _GitLabNote(msgspec.Struct):
    body: str | None = None
    author: _GitLabId | None = None


class _GitLabText(msgspec.Struct):
    title: str
    description: str | None = None
    confidential: bool = False


class _GitLabRequest(msgspec.Struct):
    iid: int
    web_url: str
    title: str = ""
    source_branch: str = ""
    source_project_id: int | None = None
    target_project_id: int | None = None


#: Seconds that a signed delivery may be off our clock (standardwebhooks.com).
SIGNED_SECONDS = 300
#: The least access level that may push: Developer (REST "Members").
_DEVELOPER = 30
_GITLAB_ISSUE = dict.fromkeys(("open", "update", "reopen"), "label") | {
    "close": "issue"
}
#: What makes a merge request a draft, before any other word of its title.
_DRAFT = _pattern(r"\A(?:\s*(?:\[draft\]|\(draft\)|draft:))+\s*", re.IGNORECASE)
#: A line that GitLab would obey ("Quick actions"): a name, then its arguments.
_QUICK_ACTION = _pattern(r"^(\s*)/(?=[A-Za-z][\w-]*(?:\s|$))", re.MULTILINE)


def _path_of(value: object) -> str | None:
    """`group/…/name` when it is two or more safe path segments."""
    parts = _str(value).split("/")
    safe = len(parts) > 1 and all(_SEGMENT.fullmatch(part) for part in parts)
    return "/".join(parts) if safe else None


def _label_ids(labels: object) -> dict[str, str]:
    """Titles by id. Labels are compared by id, for a title may be changed."""
    rows = labels if isinstance(labels, list) else []
    found = {_id(row.id): _str(row.title) for row in rows if type(row) is _GitLabLabel}
    return {number: title for number, title in found.items() if number and title}


def _unobeyed(text: str) -> str:
    """Text in which GitLab finds no quick action: `/merge` is only shown.

    It looks after it has dropped every carriage return, so we drop them first.
    """
    return _QUICK_ACTION.sub(r"\1\\/", text.replace("\r", ""))


class GitLab(ApiForge):
    """gitlab.com and self-managed GitLab, 17.4 or newer.

    Facts: docs.gitlab.com "Webhooks", "Webhook events", REST "Members",
    "Merge requests", "Notes", "Branches", "Quick actions".
    """

    kind: ForgeKind = "gitlab"
    secret_field = "gitlab_webhook_secret"
    event_header = "x-gitlab-event"
    delivery_header = "idempotency-key"
    token_fix = "set GITLAB_TOKEN; see the README"
    outage_hint = (
        "GitLab switches a hook off after failures: switch it on again with Settings, "
        "Webhooks, Test, and resend missed deliveries there"
    )
    api_headers = {"User-Agent": f"pidispatch/{__version__}"}
    #: Which trigger type a served action may fire. A note had no action before
    #: 16.11, when only new ones were sent.
    served: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "issue": _GITLAB_ISSUE,
        "work_item": _GITLAB_ISSUE,
        "merge_request": dict.fromkeys(FORGES["gitlab"].pr_actions, "pull_request"),
        "note": {"create": "comment", "": "comment"},
    }
    #: What a note may be on that is served, by `noteable_type`.
    noted: ClassVar[Mapping[str, TargetType]] = {
        "Issue": "issue",
        "WorkItem": "issue",
        "MergeRequest": "pull_request",
    }
    endings: ClassVar[Mapping[str, Ending]] = {
        "merge": "merged",
        "close": "closed",
        "reopen": "reopened",
    }
    hooks: ClassVar[Mapping[str, str]] = {
        "issue": "Issue Hook",
        "work_item": "Issue Hook",
        "merge_request": "Merge Request Hook",
        "note": "Note Hook",
    }

    def __init__(
        self, settings: Settings, session: requests.Session, clock: Clock = time.time
    ) -> None:
        super().__init__(settings, session, clock)
        self.api = f"{settings.gitlab_url}/api/v4"

    @classmethod
    def trial_settings(cls, secret: str | None) -> dict[str, Any]:
        signing = secret is not None and signing_key(secret) is not None
        mode = "signature" if signing else "token"
        return {**super().trial_settings(secret), "gitlab_webhook_mode": mode}

    # --- a delivery

    def verify(self, headers: Mapping[str, str], body: bytes) -> None:
        """Only the declared mode holds: a hook may carry both credentials, and
        the plain token says nothing of the body."""
        checks = {"signature": self._signed, "token": self._bears_token}
        check = checks.get(self.settings.gitlab_webhook_mode or "")
        if check is None or not check(headers, body):
            mode = self.settings.gitlab_webhook_mode or "GITLAB_WEBHOOK_MODE"
            raise Unauthorized(f"gitlab: the {mode} does not hold, or is stale")

    def _signed(self, headers: Mapping[str, str], body: bytes) -> bool:
        """`webhook-signature`: one or more `v1,` + base64 over id.time.body."""
        import base64
        import hmac

        name, stamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp")
        if not name or not re.fullmatch("[0-9]{1,12}", stamp or ""):
            return False
        if abs(self.clock() - int(stamp or 0)) > SIGNED_SECONDS:
            return False
        signed = f"{name}.{stamp}.".encode("latin-1", "backslashreplace") + body
        given = _header_bytes(headers.get("webhook-signature", "")).split(b" ")
        held = False
        for key in filter(None, map(signing_key, self.settings.gitlab_webhook_secret)):
            made = b"v1," + base64.b64encode(hmac.digest(key, signed, "sha256"))
            for mac in given:
                held |= hmac.compare_digest(mac, made)
        return held

    def _bears_token(self, headers: Mapping[str, str], body: bytes) -> bool:
        """`X-Gitlab-Token`, compared by digest: its length tells nothing."""
        import hashlib
        import hmac

        given = hashlib.sha256(_header_bytes(headers.get("x-gitlab-token", "")))
        held = False
        for secret in self.settings.gitlab_webhook_secret:
            made = hashlib.sha256(secret.encode())
            held |= hmac.compare_digest(given.digest(), made.digest())
        return held

    def parse(self, headers: Mapping[str, str], body: bytes) -> Event:
        hook = headers.get(self.event_header, "").strip()
        signed = self.settings.gitlab_webhook_mode == "signature"
        named = "webhook-id" if signed else self.delivery_header
        delivery = headers.get(named, "").strip()
        if not hook:
            raise Malformed("X-Gitlab-Event is required")
        if not delivery:
            raise Malformed(f"{named} is required", "GitLab sends it since 17.4")
        return self._event(hook, delivery, _decode(_GitLabDelivery, body))

    def event_of(self, body: bytes) -> str | None:
        sent = _decode(_GitLabDelivery, body)
        hook = self.hooks.get(_str(sent.object_kind))
        secret = _str(sent.event_type).startswith("confidential")
        return f"Confidential {hook}" if hook and secret else hook

    def _event(self, hook: str, delivery: str, sent: _GitLabDelivery) -> Event:
        told = _shaped(_GitLabItem, sent.object_attributes)
        name, item = _str(sent.object_kind) or hook, self._item(sent, told)
        # a word of another type is no absent word
        action = "" if told.action is None else _str(told.action) or "?"
        kind = self.served.get(name, {}).get(action)
        if kind == "comment" and told.system is True:
            kind = None
        repo = _path_of(_shaped(_GitLabProject, sent.project).path_with_namespace)
        target = self._target(name, told, item)
        added = self._added(sent) if action == "update" else ()
        present = sent.labels if isinstance(sent.labels, list) else item.labels
        sha = _str(_shaped(_GitLabCommit, item.last_commit).id)
        return Event(
            forge="gitlab",
            delivery=delivery,
            name=name,
            kind=cast(Any, kind),
            action=action or None,
            repo=repo,
            repo_id=_id(_shaped(_GitLabProject, sent.project).id),
            target=target,
            actor=self._actor(sent.user),
            author=Actor(number) if (number := _id(told.author_id)) else None,
            labels=tuple(dict.fromkeys((*_label_ids(present).values(), *added))),
            added=added,
            comment=_str(told.note) if name == "note" else None,
            comment_id=_id(told.id) if name == "note" else None,
            head=sha if _SHA.fullmatch(sha) else None,
            when=self._moment(told.updated_at),
            fault=self._fault(hook, sent, kind, repo, target),
            inert=action == "update" and not added and self._inert(sent, told),
            ending=self.endings.get(action) if name == "merge_request" else None,
        )

    @staticmethod
    def _item(sent: _GitLabDelivery, told: _GitLabItem) -> _GitLabItem:
        """What the event is about; a note is on something."""
        if sent.object_kind != "note":
            return told
        request = told.noteable_type == "MergeRequest"
        return _shaped(_GitLabItem, sent.merge_request if request else sent.issue)

    def _target(self, name: str, told: _GitLabItem, item: _GitLabItem) -> Target | None:
        number = _number(item.iid)
        if number is None:
            return None
        kind: TargetType = "pull_request" if name == "merge_request" else "issue"
        if name == "note":
            kind = self.noted.get(_str(told.noteable_type), kind)
        return Target(kind, number, _str(item.title), _str(item.description))

    @staticmethod
    def _actor(user: object) -> Actor | None:
        found = _shaped(_GitLabUser, user)
        number = _id(found.id)
        return Actor(number, _str(found.username)) if number else None

    @staticmethod
    def _added(sent: _GitLabDelivery) -> tuple[str, ...]:
        """The labels of `changes` that are new; other actions carry stale ones."""
        change = _shaped(_GitLabChange, _shaped(_GitLabChanges, sent.changes).labels)
        before = _label_ids(change.previous)
        now = _label_ids(change.current)
        return tuple(title for number, title in now.items() if number not in before)

    @staticmethod
    def _inert(sent: _GitLabDelivery, told: _GitLabItem) -> bool:
        """An `update` of a title, a reviewer, a date: no word of ours stands for it.
        Without `changes` (a template of the hook's owner) nothing can be told."""
        changes = sent.changes
        if sent.object_kind != "merge_request" or type(changes) is not _GitLabChanges:
            return False
        draft = changes.draft is not None or changes.work_in_progress is not None
        return not draft and not _str(told.oldrev)

    @staticmethod
    def _moment(value: object) -> float | None:
        """Either of GitLab's formats: ISO, or `2025-07-30 00:40:00 UTC`."""
        text = _str(value)
        return _time(text.removesuffix(" UTC") + "+00:00" * text.endswith(" UTC"))

    def _fault(
        self,
        hook: str,
        sent: _GitLabDelivery,
        kind: str | None,
        repo: str | None,
        target: Target | None,
    ) -> str | None:
        if not self._is_served(hook, sent):
            return "unhandled-event"
        if self._confidential(hook, sent):
            return "confidential"
        if kind is None:
            return "action-not-actionable"
        if repo is None:
            return "no-repository"
        return None if target else "missing-number"

    def _is_served(self, hook: str, sent: _GitLabDelivery) -> bool:
        """An instance's own hooks, a group's epics and notes on code are not."""
        name = _str(sent.object_kind)
        told = _shaped(_GitLabItem, sent.object_attributes)
        epic = name == "work_item" and sent.project is None
        elsewhere = name == "note" and _str(told.noteable_type) not in self.noted
        system = hook.lower() == "system hook"
        return name in self.served and not (epic or elsewhere or system)

    @staticmethod
    def _confidential(hook: str, sent: _GitLabDelivery) -> bool:
        """Said by the header alone on old issues, by `event_type` on an internal
        note of a public issue. Whatever is not plainly false counts."""
        told = _shaped(_GitLabItem, sent.object_attributes)
        about = _shaped(_GitLabItem, sent.issue)
        marks = (told.confidential, told.internal, about.confidential)
        words = (hook.lower(), _str(sent.event_type).lower())
        return any(mark not in (None, False) for mark in marks) or any(
            word.startswith("confidential") for word in words
        )

    # --- who asked

    def authority(self, event: Event) -> Literal["allowed", "denied", "ask"]:
        """No payload says who may; anybody may close or label their own issue."""
        return "ask"

    def ask(self, event: Event) -> bool:
        """Whether the actor is a member who may push, by whatever way (REST
        "Members": inherited and invited ones are in `all`)."""
        if event.repo is None or event.actor is None:
            return False
        try:
            return self._may_push(event.repo, event.actor.id)
        except (Rejected, Refused) as error:
            raise InfraError(error.message, error.fix) from error

    def _may_push(self, repo: str, user: str) -> bool:
        path, token = f"{self._project(repo)}/members/all/{user}", self._token()
        try:
            found = self._call("read a member", _GitLabMember, "GET", path, token)
        except Rejected as error:
            if error.status != 404:
                raise
            # a project that the token cannot see is a 404 too, and no answer
            self._call("read the project", _GitLabId, "GET", self._project(repo), token)
            return False
        active = found.membership_state == "active" and str(found.id) == user
        return active and found.access_level >= _DEVELOPER

    def _who_we_are(self) -> str | None:
        if self.settings.gitlab_token is None:
            return None
        what, token = "read our own account", self.settings.gitlab_token
        return str(self._call(what, _GitLabId, "GET", "/user", token).id)

    # --- credentials

    def credential(self, repo: str) -> Credential:
        return Credential("oauth2", self._token())

    def agent_environment(self, repo: str) -> dict[str, str]:
        """What `glab` reads (`glab help`, "Environment variables")."""
        return {
            "GITLAB_TOKEN": self._token(),
            "GITLAB_HOST": self.settings.gitlab_url,
            "GLAB_CHECK_UPDATE": "false",
            "GLAB_SEND_TELEMETRY": "false",
        }

    def _token(self) -> str:
        if self.settings.gitlab_token is None:
            raise _no_token("GitLab has no token", "set GITLAB_TOKEN")
        return self.settings.gitlab_token

    # --- the repository and its requests

    def _project(self, repo: str) -> str:
        return f"/projects/{_quoted(repo)}"

    def _at(self, repo: str, target: Target) -> str:
        kinds = {"issue": "issues", "pull_request": "merge_requests"}
        return f"{self._project(repo)}/{kinds[target.type]}/{target.number}"

    def clone_url(self, repo: str) -> str:
        return f"{self.settings.gitlab_url}/{repo}.git"

    def default_branch(self, repo: str) -> str:
        what, path = "read the project", self._project(repo)
        row = self._call(what, _GitLabDefault, "GET", path, self._token())
        return row.default_branch

    def protected(self, repo: str, branch: str) -> bool:
        """Asked of the branch, so that a wildcard, or a group's rule, counts; a rule
        that lets our own token push protects nothing from it."""
        what = "read the branch"
        path = f"{self._project(repo)}/repository/branches/{_quoted(branch)}"
        try:
            row = self._call(what, _GitLabBranch, "GET", path, self._token())
        except Rejected as error:
            raise InfraError(error.message, "may the token read the branch?") from error
        return row.protected and not row.can_push

    def item(self, repo: str, target: Target) -> Target:
        what, path = "read the item", self._at(repo, target)
        row = self._call(what, _GitLabText, "GET", path, self._token())
        if row.confidential:
            raise Rejected("gitlab: the item is confidential now", 403)
        return Target(target.type, target.number, row.title, row.description or "")

    def comment(self, repo: str, target: Target, text: str, marker: str) -> None:
        """Post once: a note of ours that holds the marker is the same one."""
        path, token, own = (
            f"{self._at(repo, target)}/notes",
            self._token(),
            self.own_id(),
        )
        for note in self._pages("read the notes", list[_GitLabNote], path, token):
            ours = note.author is None or own is None or str(note.author.id) == own
            if ours and marker in (note.body or ""):
                return
        said = text if marker in text else f"{text}\n\n{marker}"
        body = {"body": _unobeyed(said)}
        self._call("comment", _GitLabNote, "POST", path, token, body)

    def find_request(self, repo: str, head: str) -> Request | None:
        """The open merge request of exactly this branch of this project. A fork may
        have a branch of the same name, so each row is compared."""
        path, what = f"{self._project(repo)}/merge_requests", "look for the request"
        only = {"state": "opened", "source_branch": head}
        rows = self._pages(what, list[_GitLabRequest], path, self._token(), **only)
        for row in rows:
            home = row.source_project_id == row.target_project_id
            if row.source_branch == head and home and row.target_project_id:
                return self._as_request(row)
        return None

    def open_request(
        self, repo: str, head: str, base: str, title: str, body: str
    ) -> Request:
        what, path = "open the merge request", f"{self._project(repo)}/merge_requests"
        asked = {"source_branch": head, "target_branch": base, "title": title}
        asked["description"] = _unobeyed(body)
        try:
            row = self._call(what, _GitLabRequest, "POST", path, self._token(), asked)
        except Rejected as error:
            found = self.find_request(repo, head) if error.status == 409 else None
            if found is None:
                raise
            return found
        return self._as_request(row)

    @staticmethod
    def _as_request(row: _GitLabRequest) -> Request:
        """Without the title's draft prefix: that is a state, and not ours to end."""
        return Request(row.iid, row.web_url, _DRAFT.sub("", row.title, count=1))

    def retitle_request(self, repo: str, number: int, title: str) -> None:
        """A draft stays one: its prefix goes before our marker."""
        path, token = f"{self._project(repo)}/merge_requests/{number}", self._token()
        now = self._call("read the request", _GitLabText, "GET", path, token).title
        draft = _DRAFT.match(now)
        asked = {"title": (draft.group() if draft else "") + title}
        what = "retitle the merge request"
        self._call(what, _GitLabRequest, "PUT", path, token, asked)


def _header_bytes(text: str) -> bytes:
    """A header as it was sent: the edge reads headers as latin-1."""
    return text.encode("latin-1", "backslashreplace")


class _AzureUser(msgspec.Struct):
    id: Any = None
    displayName: Any = None
    uniqueName: Any = None


class _AzureProject(msgspec.Struct):
    id: Any = None
    name: Any = None


class _AzureRepository(msgspec.Struct):
    id: Any = None
    name: Any = None
    project: _AzureProject | _Odd = None


class _AzureCommit(msgspec.Struct):
    commitId: Any = None


class _AzurePull(msgspec.Struct):
    pullRequestId: Any = None
    status: Any = None
    title: Any = None
    description: Any = None
    sourceRefName: Any = None
    creationDate: Any = None
    createdBy: _AzureUser | _Odd = None
    repository: _AzureRepository | _Odd = None
    lastMergeSourceCommit: _AzureCommit | _Odd = None
    forkSource: Any = None


class _AzureLink(msgspec.Struct):
    href: Any = None


class _AzureLinks(msgspec.Struct):
    self_: _AzureLink | _Odd = msgspec.field(default=None, name="self")
    repository: _AzureLink | _Odd = None
    threads: _AzureLink | _Odd = None


class _AzureComment(msgspec.Struct):
    """A comment on a request: inside a resource 2.0, and all of a resource 1.0."""

    id: Any = None
    author: _AzureUser | _Odd = None
    content: Any = None
    commentType: Any = None
    isDeleted: Any = None
    publishedDate: Any = None
    lastUpdatedDate: Any = None
    lastContentUpdatedDate: Any = None
    links: _AzureLinks | _Odd = msgspec.field(default=None, name="_links")
    comment: _AzureComment | _Odd = None
    pullRequest: _AzurePull | _Odd = None


class _AzureVersion(msgspec.Struct):
    commentId: Any = None
    version: Any = None
    isDeleted: Any = None


class _AzureFields(msgspec.Struct):
    """Fields of a work item: values, or in an update's diff old and new ones."""

    project: Any = msgspec.field(default=None, name="System.TeamProject")
    title: Any = msgspec.field(default=None, name="System.Title")
    description: Any = msgspec.field(default=None, name="System.Description")
    steps: Any = msgspec.field(default=None, name="Microsoft.VSTS.TCM.ReproSteps")
    tags: Any = msgspec.field(default=None, name="System.Tags")
    history: Any = msgspec.field(default=None, name="System.History")
    changer: Any = msgspec.field(default=None, name="System.ChangedBy")
    changed: Any = msgspec.field(default=None, name="System.ChangedDate")

    def body(self) -> str:
        """A bug has its steps in the description's place."""
        return html_text(_str(self.description) or _str(self.steps))


class _AzureWorkItem(msgspec.Struct):
    """A work item, a revision of it, or an update that holds its revision."""

    id: Any = None
    workItemId: Any = None
    rev: Any = None
    revisedBy: _AzureUser | _Odd = None
    fields: _AzureFields | _Odd = None
    revision: _AzureWorkItem | _Odd = None
    commentVersionRef: _AzureVersion | _Odd = None


class _AzureContainers(msgspec.Struct):
    project: _AzureProject | _Odd = None


class _AzureDelivery(msgspec.Struct):
    id: Any = None
    subscriptionId: Any = None
    notificationId: Any = None
    eventType: Any = None
    createdDate: Any = None
    resource: msgspec.Raw = msgspec.Raw(b"null")
    resourceContainers: _AzureContainers | _Odd = None


class _AzureRows(msgspec.Struct, Generic[T]):
    """A list as the API wraps it; a server of one's own may leave it out."""

    value: list[T] | None = None


class _AzureArea(msgspec.Struct):
    id: str
    locationUrl: str


class _AzureConnection(msgspec.Struct):
    authenticatedUser: _AzureUser


class _AzureValue(msgspec.Struct):
    value: str


class _AzureGroup(msgspec.Struct):
    descriptor: str
    displayName: str = ""


class _AzureMembership(msgspec.Struct):
    containerDescriptor: str


class _AzureIdentity(msgspec.Struct):
    memberOf: list[str] | None = None
    properties: dict[str, Any] = {}

    def property(self, name: str) -> str:
        value = self.properties.get(name)
        return _str(value.get("$value") if isinstance(value, dict) else value)


class _AzureIteration(msgspec.Struct):
    id: int
    author: _AzureUser | _Odd = None


class _AzureDefault(msgspec.Struct):
    id: str
    defaultBranch: str | None = None


class _AzureRequest(msgspec.Struct):
    pullRequestId: int
    title: str = ""
    sourceRefName: str = ""
    forkSource: Any = None


class _AzureNote(msgspec.Struct):
    """A comment of ours or of others, on a request or on a work item."""

    id: int | None = None
    content: str | None = None
    text: str | None = None
    author: _AzureUser | None = None
    createdBy: _AzureUser | None = None
    isDeleted: bool = False


class _AzureThread(msgspec.Struct):
    comments: list[_AzureNote] | None = None


class _AzureNotes(msgspec.Struct):
    comments: list[_AzureNote] = []
    continuationToken: str | None = None


class _AzurePolicyType(msgspec.Struct):
    id: str


class _AzurePolicy(msgspec.Struct):
    type: _AzurePolicyType
    isEnabled: bool = False
    isBlocking: bool = False
    isDeleted: bool = False


_GUID = _pattern(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.I)
_AZURE_ID = _pattern(r"[A-Za-z0-9_-]{1,128}")
#: Names of projects and repositories (learn.microsoft.com, "Naming restrictions").
_AZURE_NAME = _pattern(r"(?![_. ])[^/\\:~&%;@'\"?<>|#$*{},+=\[\]]{1,64}(?<![. ])")
_AZURE_REF = _pattern(r"refs/heads/(?!-)[^\x00-\x20\x7f~^:?*\[\\]{1,244}")
_AZURE_PULL = _pattern(
    r"(?:/(?P<project>[^/]+))?/_apis/git/repositories/(?P<repo>[^/?#]+)"
    r"(?:/pullRequests/(?P<number>[0-9]{1,16})(?:/threads/(?P<thread>[0-9]{1,16}))?)?",
    re.I,
)
#: The zero GUID, and who nobody is: a token that does not hold may be taken for him.
_NOBODY = tuple(re.sub("x", c, "x" * 8 + "-xxxx" * 3 + "-" + "x" * 12) for c in "0a")
#: An address in HTML that no link holds; those of our comments would be dead text.
_BARE_URL = _pattern(r"(?<=[\s>])(?<!\">)https?://[^\s<]+(?<![.,;:!?)])")
#: Branch policies that let a branch change through a request only (learn.microsoft.com,
#: "Policy types"); those on file sizes or names do not.
_AZURE_PROTECTION = frozenset(
    (
        "fa4e907d-c16b-4a4c-9dfa-4906e5d171dd",  # reviewers, so many
        "fd2167ab-b0be-447a-8ec8-39368250530e",  # reviewers, by name
        "40e92b44-2fe1-4dd6-b3d8-74a9c21d0c6e",  # linked work items
        "c6a1889d-b943-4856-b76f-9e46bb6b0df2",  # resolved comments
        "0609b952-1397-4640-95ec-e00a01b2c241",  # build
        "cbdc66da-9728-4af8-aada-9a5a32e4a226",  # status
        "fa4e907d-c16b-4a4c-9dfa-4916e5d171ab",  # merge strategy
    )
)


def _guid(value: object) -> str | None:
    text = _str(value).lower()
    known = _GUID.fullmatch(text) and text not in _NOBODY
    return text if known else None


def _azure_name(value: object) -> str | None:
    """A project's or repository's name that is safe as a path segment."""
    text = _str(value)
    return text if _AZURE_NAME.fullmatch(text) and text.isprintable() else None


def _azure_actor(user: object) -> Actor | None:
    found = _shaped(_AzureUser, user)
    number = _guid(found.id)
    return Actor(number, _str(found.uniqueName)) if number else None


def _azure_changer(value: object) -> Actor | None:
    """Who a work item's `System.ChangedBy` names.

    Newer versions give an identity; older ones `Name <mail>`, of which only what
    stands in the trailing brackets counts. The id of such an actor is no GUID: it
    is unproven until the API has told the identity behind it.
    """
    if isinstance(value, dict):
        number = _guid(value.get("id"))
        return Actor(number, _str(value.get("uniqueName"))) if number else None
    text = _str(value).strip()
    mail = re.search(r"<([^<>]+)>\Z", text)
    unproven = f"unproven-{_digest(text, 16)}"
    return Actor(unproven, mail[1].strip() if mail else "") if text else None


def _azure_tags(value: object) -> tuple[str, ...]:
    """`"a; b"` as names; the first spelling of those that differ in case."""
    found: dict[str, str] = {}
    for name in map(str.strip, _str(value).split(";")):
        found.setdefault(name.casefold(), name)
    return tuple(filter(None, found.values()))


def _azure_ref(value: object) -> str | None:
    """A branch's full name, fit to be asked for (git-check-ref-format(1))."""
    text = _str(value)
    odd = re.search(r"\.\.|//|@\{|/\.|\.lock(?:/|\Z)|[./]\Z", text)
    return text if _AZURE_REF.fullmatch(text) and not odd else None


class Azure(ApiForge):
    """dev.azure.com, and Azure DevOps Server from 2019 Update 1 on.

    Facts: learn.microsoft.com "Service hooks events", "Web Hooks", and the REST
    pages of Git, Work Item Tracking, Graph, Identities, Policy, version 5.1.
    """

    kind: ForgeKind = "azure"
    secret_field = "azure_webhook_secret"
    event_header = None
    delivery_header = None
    token_fix = "set AZURE_TOKEN; see the README"
    outage_hint = (
        "a subscription that failed too often is off until it is enabled again"
    )
    api_headers = {
        "Accept": "application/json",
        "User-Agent": f"pidispatch/{__version__}",
        "X-TFS-FedAuthRedirect": "Suppress",
    }
    version = "5.1"
    #: Event, the rules' word for it, and the type of rule that it may fire.
    events: ClassVar[Mapping[str, tuple[str, str | None, str]]] = {
        "workitem.created": ("workitem", "created", "label"),
        "workitem.updated": ("workitem", "updated", "label"),
        "workitem.commented": ("workitem", "commented", "comment"),
        "git.pullrequest.created": ("git.pullrequest", "created", "pull_request"),
        "git.pullrequest.updated": ("git.pullrequest", "updated", "pull_request"),
        "ms.vss-code.git-pullrequest-comment-event": (
            "ms.vss-code.git-pullrequest-comment-event",
            None,
            "comment",
        ),
    }
    #: What an update's status makes of the request; an active one may always have been.
    endings: ClassVar[Mapping[str, Ending]] = {
        "completed": "merged",
        "abandoned": "closed",
        "active": "reopened",
    }
    #: Services with an address of their own (azure-devops-python-api, resource areas).
    graph_area = "bb1e7ec9-e901-4b68-999a-de7012b920f8"
    identity_area = "8a3d49b8-91f0-46ef-b33d-dda338c25db3"
    #: Project groups that do not let anybody steer; the second holds everyone.
    onlookers = frozenset(("readers", "project valid users"))
    #: The most pages of a list, groups of a person, and descriptors in one question.
    pages, walk, together = 20, 200, 20

    def __init__(
        self, settings: Settings, session: requests.Session, clock: Clock = time.time
    ) -> None:
        super().__init__(settings, session, clock)
        self.api = settings.azure_org_url or ""
        self._areas: dict[str, str] | None = None

    # --- a delivery

    def verify(self, headers: Mapping[str, str], body: bytes) -> None:
        """Azure signs nothing: the secret itself comes along."""
        import hmac

        basic = self.settings.azure_webhook_mode == "basic"
        given = self._basic(headers) if basic else self._named(headers)
        held = False
        for secret in self.settings.azure_webhook_secret:
            known, said = secret.encode(), given
            if basic and ":" not in secret:
                said = given.partition(b":")[2]
            held |= hmac.compare_digest(known, said)
        if not held or not given:
            raise Unauthorized("azure: the credential does not hold")

    @staticmethod
    def _basic(headers: Mapping[str, str]) -> bytes:
        """`user:password` of the Authorization header; nothing if there is none."""
        import base64

        scheme, _, pair = headers.get("authorization", "").partition(" ")
        try:
            decoded = base64.b64decode(pair.strip().encode("ascii"), validate=True)
        except ValueError:
            return b""
        return decoded if scheme.lower() == "basic" and b":" in decoded else b""

    def _named(self, headers: Mapping[str, str]) -> bytes:
        name = (self.settings.azure_webhook_header or "").lower()
        # http.server reads header bytes as latin-1
        return headers.get(name, "").encode("latin-1", "replace") if name else b""

    def parse(self, headers: Mapping[str, str], body: bytes) -> Event:
        sent = _decode(_AzureDelivery, body)
        ids = (sent.subscriptionId, sent.notificationId, sent.id)
        texts = filter(str.strip, (_id(part) or _str(part) for part in ids))
        # an odd part still tells deliveries apart, and must not look like two
        safe = (t if _AZURE_ID.fullmatch(t) else f"h{_digest(t)}" for t in texts)
        delivery = ".".join(safe)
        if not delivery:
            raise Malformed("no subscriptionId, notificationId or id")
        known = self.events.get(_str(sent.eventType))
        name, action, kind = known or (_str(sent.eventType), None, None)
        event = Event(
            forge="azure",
            delivery=delivery,
            name=name,
            action=action,
            kind=cast(Any, kind),
            fault=None if known else "unhandled-event",
            when=_time(sent.createdDate),
        )
        if name.startswith("workitem"):
            event = self._work_item(event, sent)
        elif name.startswith("git.pullrequest") or kind == "comment":
            event = self._on_request(event, sent)
        if event.fault or (event.repo and event.target):
            return event
        lacks = "missing-number" if event.repo else "no-repository"
        return msgspec.structs.replace(event, fault=lacks)

    @staticmethod
    def _resource(kind: type[T], sent: _AzureDelivery) -> T:
        return _shaped(kind, _decode(cast(type[T], kind | _Odd), bytes(sent.resource)))

    def _work_item(self, event: Event, sent: _AzureDelivery) -> Event:
        """A work item has a project and no repository: a rule names that."""
        item = self._resource(_AzureWorkItem, sent)
        now = item
        if event.action == "updated":
            now = _shaped(_AzureWorkItem, item.revision)
        fields = _shaped(_AzureFields, now.fields)
        number = _number(item.workItemId) or _number(now.id)
        actor = _azure_actor(item.revisedBy) or _azure_changer(fields.changer)
        rev = _number(now.rev) or _number(item.rev)
        tags, added = _azure_tags(fields.tags), self._added(item)
        event = msgspec.structs.replace(
            event,
            repo=_azure_name(fields.project),
            repo_id=_guid(self._project(sent)),
            target=Target("issue", number, _str(fields.title), fields.body())
            if number
            else None,
            actor=actor,
            labels=_azure_tags(";".join((*tags, *added))),
            added=None if event.action == "created" else added,
            rev=rev,
            when=_time(fields.changed) or event.when,
            incomplete=bool(actor and not _guid(actor.id) and actor.login and rev),
        )
        return self._remark(event, item, fields) if event.kind == "comment" else event

    @staticmethod
    def _project(sent: _AzureDelivery) -> object:
        containers = _shaped(_AzureContainers, sent.resourceContainers)
        return _shaped(_AzureProject, containers.project).id

    @staticmethod
    def _added(item: _AzureWorkItem) -> tuple[str, ...]:
        """The tags an update added; none where it did not change the tags."""
        change = _shaped(_AzureFields, item.fields).tags
        if not isinstance(change, dict):
            return ()
        before = {name.casefold() for name in _azure_tags(change.get("oldValue"))}
        now = _azure_tags(change.get("newValue"))
        return tuple(name for name in now if name.casefold() not in before)

    @staticmethod
    def _remark(event: Event, item: _AzureWorkItem, fields: _AzureFields) -> Event:
        """A comment on a work item is HTML."""
        version = _shaped(_AzureVersion, item.commentVersionRef)
        again = version.isDeleted is True or (_number(version.version) or 1) > 1
        return msgspec.structs.replace(
            event,
            comment=_str(fields.history),
            comment_id=_id(version.commentId),
            markup="html",
            fault="action-not-actionable" if again else event.fault,
        )

    def _on_request(self, event: Event, sent: _AzureDelivery) -> Event:
        if event.kind == "comment":
            return self._said(event, sent)
        pull = self._resource(_AzurePull, sent)
        event = self._about(event, pull)
        if event.action is None:
            return event
        if event.action == "created":
            when = _time(pull.creationDate) or event.when
            return msgspec.structs.replace(event, actor=event.author, when=when)
        # an update is anything, votes too, and names nobody: the author stands in
        # until the API has told who pushed
        over = None if pull.status in ("active", None) else "action-not-actionable"
        return msgspec.structs.replace(
            event,
            actor=event.author,
            fault=over,
            incomplete=over is None,
            ending=self.endings.get(_str(pull.status)),
        )

    @staticmethod
    def _about(event: Event, pull: _AzurePull) -> Event:
        """The event with what a pull request object tells."""
        repository = _shaped(_AzureRepository, pull.repository)
        project = _azure_name(_shaped(_AzureProject, repository.project).name)
        name, number = _azure_name(repository.name), _number(pull.pullRequestId)
        title, body = _str(pull.title), _str(pull.description)
        sha = _str(_shaped(_AzureCommit, pull.lastMergeSourceCommit).commitId)
        return msgspec.structs.replace(
            event,
            repo=f"{project}/{name}" if project and name else None,
            repo_id=_guid(repository.id),
            target=Target("pull_request", number, title, body) if number else None,
            author=_azure_actor(pull.createdBy),
            head=sha if _SHA.fullmatch(sha) else None,
            # the branch of a fork is not in this repository
            head_ref=None if pull.forkSource else _azure_ref(pull.sourceRefName),
        )

    def _said(self, event: Event, sent: _AzureDelivery) -> Event:
        """A comment on a request; resource 1.0 has it without the request."""
        resource = self._resource(_AzureComment, sent)
        said = resource
        if resource.comment is not None:
            said = _shaped(_AzureComment, resource.comment)
        where = self._place(said)
        thread, number = where.get("thread"), _id(said.id)
        event = msgspec.structs.replace(
            event,
            actor=_azure_actor(said.author),
            comment=_str(said.content),
            comment_id=f"{thread}.{number}" if thread and number else None,
            when=_time(said.publishedDate) or event.when,
            fault=None if self._is_new(said) else "action-not-actionable",
        )
        if resource.pullRequest is not None:
            return self._about(event, _shaped(_AzurePull, resource.pullRequest))
        return self._linked(event, where, self._project(sent))

    @staticmethod
    def _is_new(said: _AzureComment) -> bool:
        """Whether the comment was just written: its content is as old as itself.

        Created, edited and deleted ones come as the same event. Two seconds are for
        dates taken one after the other; of two dates the earlier one decides.
        """
        told = (said.lastContentUpdatedDate, said.lastUpdatedDate)
        dates = [when for when in map(_time, told) if when is not None]
        born = _time(said.publishedDate)
        fresh = born is not None and bool(dates) and min(dates) - born <= 2
        return fresh and said.isDeleted is not True and said.commentType != "system"

    @staticmethod
    def _place(said: _AzureComment) -> dict[str, str]:
        """What the comment's links tell: project, repo, number, thread."""
        links = _shaped(_AzureLinks, said.links)
        told: dict[str, str] = {}
        for link in (links.repository, links.self_, links.threads):
            found = _AZURE_PULL.search(_str(_shaped(_AzureLink, link).href))
            if found:
                told |= {k: v for k, v in found.groupdict().items() if v}
        return told

    @staticmethod
    def _linked(event: Event, where: Mapping[str, str], project: object) -> Event:
        """The request that only links name, by GUIDs that the API takes for names."""
        scope = _guid(where.get("project")) or _guid(project)
        repo, number = _guid(where.get("repo")), int(where.get("number", 0))
        if not (scope and repo and 1 <= number <= MAX_NUMBER):
            fault = event.fault or "missing-number"
            return msgspec.structs.replace(event, fault=fault)
        return msgspec.structs.replace(
            event,
            repo=f"{scope}/{repo}",
            repo_id=repo,
            target=Target("pull_request", number),
            incomplete=event.fault is None,
        )

    # --- the API

    def _sign(self, token: str | None) -> Callable[..., requests.PreparedRequest]:
        """Basic authentication with the token as the password and no user."""
        from requests.auth import HTTPBasicAuth

        return HTTPBasicAuth("", token or "")

    def _token(self) -> str:
        if self.settings.azure_token is None:
            raise _no_token("Azure DevOps has no token", "set AZURE_TOKEN")
        return self.settings.azure_token

    def _ask(
        self,
        what: str,
        answer: type[T],
        path: str,
        method: str = "GET",
        body: object = None,
        preview: str = "",
        **params: str | int,
    ) -> T:
        """One call as ourselves; `preview` is the suffix of an unfinished API."""
        params["api-version"] = self.version + preview
        return self._call(what, answer, method, path, self._token(), body, **params)

    def _read(self, what: str, answer: type[T], response: requests.Response) -> T:
        """A token that does not hold may be answered 203 with a page to sign in."""
        page = response.headers.get("content-type", "").startswith("text/html")
        if response.status_code == 203 or (response.status_code == 200 and page):
            said = f"{self.kind}: cannot {what}: the token was not accepted"
            raise Rejected(said, 401)
        return super()._read(what, answer, response)

    def _rows(
        self,
        what: str,
        row: type[T],
        path: str,
        preview: str = "",
        **params: str | int,
    ) -> Iterator[T]:
        """Every row of a list that is continued by a header."""
        params["api-version"] = self.version + preview
        for _ in range(self.pages):
            response = self._request(what, "GET", path, self._token(), params)
            answer: Any = _AzureRows[row]  # type: ignore[valid-type]
            yield from self._read(what, answer, response).value or ()
            more = response.headers.get("x-ms-continuationtoken")
            if not more:
                return
            params["continuationToken"] = more
        raise InfraError(f"{self.kind}: cannot {what}: more than {self.pages} pages")

    def _area(self, area: str) -> str | None:
        """Where a service is; None on a server, which has everything at one place."""
        if self._areas is None:
            what, path = "find the services", "/_apis/resourceAreas"
            rows = self._rows(what, _AzureArea, path, "-preview.1")
            found = {row.id.lower(): row.locationUrl.rstrip("/") for row in rows}
            scheme = self.api.partition("://")[0]
            if any(url.partition("://")[0] != scheme for url in found.values()):
                raise InfraError(f"azure: cannot {what}: one is not at {scheme}")
            self._areas = found
        return self._areas.get(area)

    @contextlib.contextmanager
    def _could_not_tell(self) -> Iterator[None]:
        """A no that is not about the question asked is no answer to it."""
        try:
            yield
        except (Rejected, Refused) as error:
            raise InfraError(error.message, error.fix) from error

    # --- who asked

    def complete(self, event: Event) -> Event:
        event = msgspec.structs.replace(event, incomplete=False)
        with self._could_not_tell():
            if event.rev is not None:
                return self._revised(event)
            if event.kind == "comment":
                return self._about(event, self._pull(event))
            return self._pushed(event)

    def _revised(self, event: Event) -> Event:
        """The identity behind `Name <mail>`: the API names the revision's author.

        It must have that very mail; whatever stands in a display name is nothing.
        """
        assert event.repo and event.target and event.actor
        what, project = "read the revision", _quoted(event.repo)
        number = event.target.number
        path = f"/{project}/_apis/wit/workItems/{number}/revisions/{event.rev}"
        found = self._ask(what, _AzureWorkItem, path)
        told = _azure_changer(_shaped(_AzureFields, found.fields).changer)
        if told is None or told.login.casefold() != event.actor.login.casefold():
            return event
        return msgspec.structs.replace(event, actor=told)

    def _pull(self, event: Event) -> _AzurePull:
        assert event.repo and event.target
        what, path = "read the pull request", self._pulls(event.repo)
        return self._ask(what, _AzurePull, f"{path}/{event.target.number}")

    def _pushed(self, event: Event) -> Event:
        """An update's actor is who pushed last, else whose request it is."""
        assert event.repo and event.target
        path = f"{self._pulls(event.repo)}/{event.target.number}/iterations"
        rows = list(self._rows("read the iterations", _AzureIteration, path))
        newest = max(rows, key=lambda row: row.id, default=None)
        actor = _azure_actor(newest.author) if newest else None
        return msgspec.structs.replace(event, actor=actor or event.author)

    def authority(self, event: Event) -> Literal["allowed", "denied", "ask"]:
        """A bare display name proves nothing; a GUID is asked about."""
        return "ask" if event.actor and _guid(event.actor.id) else "denied"

    def ask(self, event: Event) -> bool:
        """Whether the actor is a member of the project, onlookers aside.

        Graph shows a directory group's members only where they were listed by
        name; the identity service, the only one a server has, knows all groups.
        """
        if event.repo is None or event.actor is None:
            return False
        project = event.repo.partition("/")[0]
        what, path = "read the project", f"/_apis/projects/{_quoted(project)}"
        with self._could_not_tell():
            scope = _guid(self._ask(what, _AzureProject, path).id)
            if scope is None:
                raise InfraError(f"azure: cannot {what}: it has no id")
            graph = self._area(self.graph_area)
            if graph and self._in_graph(graph, scope, event.actor.id):
                return True
            return self._in_identities(scope, event.actor.id)

    def _in_graph(self, graph: str, scope: str, actor: str) -> bool:
        """Walk up from the actor through groups to one of the project's."""
        at, want = self._descriptor(graph, actor), self._descriptor(graph, scope)
        if at is None or want is None:
            return False
        what, path = "read the project's groups", f"{graph}/_apis/graph/groups"
        asked: dict[str, Any] = {"scopeDescriptor": want}
        rows = list(self._rows(what, _AzureGroup, path, "-preview.1", **asked))
        barred = {g.descriptor for g in rows if g.displayName.lower() in self.onlookers}
        ours, seen, todo = {g.descriptor for g in rows} - barred, barred, [at]
        while todo:
            path = f"{graph}/_apis/graph/memberships/{_quoted(todo.pop())}"
            up = self._rows(
                "read the memberships", _AzureMembership, path, "-preview.1"
            )
            new = {row.containerDescriptor for row in up} - seen
            if new & ours:
                return True
            seen, todo = seen | new, [*todo, *new]
            if len(seen) > self.walk:
                raise InfraError("azure: too many groups to tell a membership")
        return False

    def _descriptor(self, graph: str, guid: str) -> str | None:
        path = f"{graph}/_apis/graph/descriptors/{guid}"
        try:
            what = "find the descriptor"
            return self._ask(what, _AzureValue, path, preview="-preview.1").value
        except Rejected as error:
            if error.status == 404:
                return None
            raise

    def _in_identities(self, scope: str, actor: str) -> bool:
        """Whether a group of the project is among all those the actor is in."""
        who = {"identityIds": actor, "queryMembership": "Expanded"}
        above = [g for row in self._identities(**who) for g in row.memberOf or ()]
        domain = f"vstfs:///classification/teamproject/{scope}"
        for first in range(0, len(above), self.together):
            some = ",".join(above[first : first + self.together])
            for group in self._identities(descriptors=some):
                inside = group.property("Domain").lower() == domain
                everyone = group.property("SpecialType") == "EveryoneApplicationGroup"
                onlooks = group.property("Account").lower() in self.onlookers
                if inside and not everyone and not onlooks:
                    return True
        return False

    def _identities(self, **which: str) -> list[_AzureIdentity]:
        base = self._area(self.identity_area) or self.api
        answer = _AzureRows[_AzureIdentity | None]
        found = self._ask(
            "read identities", answer, f"{base}/_apis/identities", **which
        )
        return [row for row in found.value or () if row]

    def _who_we_are(self) -> str | None:
        if self.settings.azure_token is None:
            return None
        what, path = "read our own account", "/_apis/connectionData"
        found = self._ask(what, _AzureConnection, path, preview="-preview")
        own = _guid(found.authenticatedUser.id)
        if own is None:
            raise InfraError(f"azure: cannot {what}: the token was not accepted")
        return own

    # --- the repository and its requests

    def credential(self, repo: str) -> Credential:
        """The operator's token; git sends no password without a user."""
        return Credential("oauth2", self._token())

    def agent_environment(self, repo: str) -> dict[str, str]:
        """What `az` with its devops extension reads."""
        token = self._token()
        return {"AZURE_DEVOPS_EXT_PAT": token, "AZURE_DEVOPS_ORG_URL": self.api}

    def clone_url(self, repo: str) -> str:
        project, _, name = repo.partition("/")
        return f"{self.api}/{_quoted(project)}/_git/{_quoted(name)}"

    @staticmethod
    def _repository(repo: str) -> str:
        project, _, name = repo.partition("/")
        return f"/{_quoted(project)}/_apis/git/repositories/{_quoted(name)}"

    def _pulls(self, repo: str) -> str:
        return self._repository(repo) + "/pullrequests"

    def default_branch(self, repo: str) -> str:
        what = "read the repository"
        found = self._ask(what, _AzureDefault, self._repository(repo)).defaultBranch
        if found is None:
            raise Rejected(f"azure: cannot {what}: it has no branch", 404)
        return found.removeprefix("refs/heads/")

    def protected(self, repo: str, branch: str) -> bool:
        """Whether a branch policy makes everyone go through a request.

        Who may bypass policies is not told to anybody else.
        """
        project = _quoted(repo.partition("/")[0])
        path = f"/{project}/_apis/git/policy/configurations"
        with self._could_not_tell():
            what = "read the repository"
            number = self._ask(what, _AzureDefault, self._repository(repo)).id
            asked: dict[str, Any] = {"repositoryId": number}
            asked["refName"] = f"refs/heads/{branch}"
            what, preview = "read the branch policies", "-preview.1"
            return any(
                row.isEnabled and row.isBlocking and not row.isDeleted
                for row in self._rows(what, _AzurePolicy, path, preview, **asked)
                if row.type.id.lower() in _AZURE_PROTECTION
            )

    def item(self, repo: str, target: Target) -> Target:
        if target.type == "pull_request":
            what, path = "read the pull request", self._pulls(repo)
            pull = self._ask(what, _AzurePull, f"{path}/{target.number}")
            title, body = _str(pull.title), _str(pull.description)
        else:
            path = f"{self._items(repo)}/{target.number}"
            found = self._ask("read the work item", _AzureWorkItem, path)
            fields = _shaped(_AzureFields, found.fields)
            title, body = _str(fields.title), fields.body()
        return msgspec.structs.replace(target, title=title, body=body)

    @staticmethod
    def _items(repo: str) -> str:
        return f"/{_quoted(repo.partition('/')[0])}/_apis/wit/workItems"

    def comment(self, repo: str, target: Target, text: str, marker: str) -> None:
        if target.type == "pull_request":
            path = f"{self._pulls(repo)}/{target.number}/threads"
            self._comment_request(path, text, marker)
        else:
            path = f"{self._items(repo)}/{target.number}/comments"
            self._comment_item(path, text, marker)

    def _ours(self, user: _AzureUser | None) -> bool:
        own = self.own_id()
        return user is None or own is None or _guid(user.id) == own

    def _comment_request(self, path: str, text: str, marker: str) -> None:
        """One closed thread: an open one may keep the request from completing."""
        for thread in self._rows("read the comments", _AzureThread, path):
            for note in thread.comments or ():
                if self._ours(note.author) and marker in (note.content or ""):
                    return
        said = text if marker in text else f"{text}\n\n{marker}"
        first = {"parentCommentId": 0, "content": said, "commentType": "text"}
        asked = {"comments": [first], "status": "closed"}
        self._ask("comment", _AzureThread, path, "POST", asked)

    def _comment_item(self, path: str, text: str, marker: str) -> None:
        """A work item's comments are HTML, and hidden comments in it do not last.

        So the marker is the last line's text, where no agent's text can stand.
        """
        mark = marker.strip("<!-> ")
        for note in self._notes(path):
            said = html_text(note.text or "")
            if self._ours(note.createdBy) and said.endswith(mark):
                return
        from markdown_it import MarkdownIt

        plain = text.replace(marker, "").rstrip()
        shown = MarkdownIt("commonmark", {"html": False}).enable("table").render(plain)
        shown = _BARE_URL.sub(r'<a href="\g<0>">\g<0></a>', shown)
        shown += f'<div style="display:none">{mark}</div>'
        asked = {"text": shown}
        self._ask("comment", _AzureNote, path, "POST", asked, "-preview.3")

    def _notes(self, path: str) -> Iterator[_AzureNote]:
        asked: dict[str, Any] = {"$top": PAGE_SIZE, "order": "desc"}
        for _ in range(self.pages):
            what, preview = "read the comments", "-preview.3"
            page = self._ask(what, _AzureNotes, path, preview=preview, **asked)
            yield from page.comments
            if not page.continuationToken:
                return
            asked["continuationToken"] = page.continuationToken

    def find_request(self, repo: str, head: str) -> Request | None:
        """The active pull request of exactly this branch of this repository."""
        ref = f"refs/heads/{head}"
        asked: dict[str, Any] = {"searchCriteria.status": "active"}
        asked |= {"searchCriteria.sourceRefName": ref, "$top": PAGE_SIZE}
        what = "look for the pull request"
        for row in self._rows(what, _AzureRequest, self._pulls(repo), **asked):
            if row.sourceRefName == ref and not row.forkSource:
                return self._as_request(repo, row)
        return None

    def _as_request(self, repo: str, row: _AzureRequest) -> Request:
        url = f"{self.clone_url(repo)}/pullrequest/{row.pullRequestId}"
        return Request(row.pullRequestId, url, row.title)

    def open_request(
        self, repo: str, head: str, base: str, title: str, body: str
    ) -> Request:
        what = "open the pull request"
        asked = {"title": title, "description": body[:4_000]}
        asked["sourceRefName"] = f"refs/heads/{head}"
        asked["targetRefName"] = f"refs/heads/{base}"
        try:
            row = self._ask(what, _AzureRequest, self._pulls(repo), "POST", asked)
        except Rejected as error:
            found = self.find_request(repo, head) if error.status == 409 else None
            if found is None:
                raise
            return found
        return self._as_request(repo, row)

    def retitle_request(self, repo: str, number: int, title: str) -> None:
        what, path = "retitle the pull request", f"{self._pulls(repo)}/{number}"
        self._ask(what, _AzureRequest, path, "PATCH", {"title": title})


_FORGE_CLASSES: dict[str, type[ApiForge]] = {
    "github": GitHub,
    "gitlab": GitLab,
    "forgejo": Forgejo,
    "azure": Azure,
}


class Polled(NamedTuple):
    """A repository that is asked what happened."""

    kind: str
    repo: str


def polled_of(settings: Settings) -> tuple[Polled, ...]:
    """The repositories of POLL_REPOS; `kind:` may stand before one. Raises Faults."""
    able = [kind for kind, forge in _FORGE_CLASSES.items() if forge.streams]
    found, faults = [], []
    for name in settings.poll_repos:
        prefix, _, repo = name.rpartition(":")
        kind = prefix or able[0]
        forge = _FORGE_CLASSES.get(kind)
        if forge is None or not forge.streams:
            why = forge.unpolled if forge else ApiForge.unpolled
            faults.append(f"{name}: {kind} cannot be polled: {why}")
        elif _owner_and_name(repo) is None:
            faults.append(f"{name}: {json.dumps(repo)} is not owner/name")
        found.append(Polled(kind, repo))
    if faults:
        fix = f"name repositories of {', '.join(able)}, each as owner/name"
        raise Faults("POLL_REPOS", faults, fix)
    return tuple(found)


def forges_of(
    settings: Settings,
    session: requests.Session | None = None,
    clock: Clock = time.time,
) -> dict[str, Forge]:
    """The served forges: those with a webhook secret, or a repository to poll.

    An unset secret never means no check: without one no delivery is taken.
    """
    import requests

    session = session or requests.Session()
    polled = {repo.kind for repo in polled_of(settings)}
    return {
        kind: forge(settings, session, clock)
        for kind, forge in _FORGE_CLASSES.items()
        if forge.secrets(settings) or kind in polled
    }


def trial_forge(kind: str, secret: str | None) -> ApiForge:
    """A forge that judges stored deliveries; it has no token and asks no API."""
    import requests

    made = _FORGE_CLASSES.get(kind)
    if made is None:
        known = ", ".join(_FORGE_CLASSES)
        raise ConfigError(f"no forge {json.dumps(kind)}", f"name one of: {known}")
    given = made.trial_settings(secret)
    return made(msgspec.structs.replace(Settings(), **given), requests.Session())


def trial_headers(
    forge: ApiForge, path: Path, headers: Sequence[str], event: str | None
) -> dict[str, str]:
    """`Name: value` lines as headers, with the event and the delivery filled in.

    The event is, in this order, its header, `event`, what the body tells, the
    first part of the file's name; a forge that names both in the body needs
    none of that. Raises ConfigError, OSError or Malformed.
    """
    given: dict[str, str] = {}
    for line in headers:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise ConfigError(f"{json.dumps(line)} is no header", "write 'Name: value'")
        given[name.strip().lower()] = value.strip()
    if forge.event_header and forge.event_header not in given:
        told = event or forge.event_of(forge.json_of(given, path.read_bytes()))
        given[forge.event_header] = told or path.name.partition(".")[0]
    if forge.delivery_header:
        given.setdefault(forge.delivery_header, "dry-run")
    return given


# =============================================================================
# store
#
# One SQLite file and all SQL. In the worker's process every write passes through
# one thread that lets waiting writers share a commit; readers use connections of
# their own and never hold a cursor open. Knows nothing of HTTP or Docker.
# =============================================================================


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A verified delivery on its way into the queue.

    `id` is the set's id; `body_sha` the sha256 (hex) of the raw body, the second
    dedup key: one signed body cannot be replayed under new ids. `received` is
    the arrival, seconds.
    """

    id: str
    event: Event
    body_sha: str
    received: float

    @property
    def target(self) -> str:
        """`owner/repo#7`; the event must have a repository and a number."""
        event = self.event
        assert event.repo and event.target
        kind, number = event.target.type, event.target.number
        return target_name(event.forge, event.repo, kind, number)

    @property
    def when(self) -> float:
        """The event's own time; arrival when it has none or lies in the future.

        A poll's may lie ahead: of a clock that was set back since its webhook came.
        """
        own = self.event.when
        ahead = 2 * DAY if self.event.delivery.startswith(POLLED) else 0.0
        if own is None or own > self.received + ahead:
            return self.received
        return own


class Admission(NamedTuple):
    """What became of a delivery in the one transaction that judged it."""

    status: Literal["queued", "duplicate", "coalesced", "rate-limited"]
    jobs: tuple[str, ...] = ()


class Cursor(msgspec.Struct, frozen=True):
    """How far a polled stream is known. `seen` are ids of what happened since just
    before `at`, with their times; `asked` is when it was last looked at. Seconds."""

    at: float
    seen: dict[str, float]
    asked: float


class Cap(msgspec.Struct, frozen=True, kw_only=True):
    """One cap of one window. `scope` is a glob over `Job.place`.

    `name` is where the operator set it; None is no cap. From `hold` on new jobs
    are refused although the cap is not reached.
    """

    name: str
    reason: str
    scope: str
    span: Span
    limit: int | None
    unit: Literal["jobs", "tokens"] = "jobs"
    hold: int | None = None


class Caps(msgspec.Struct, frozen=True):
    """The caps of one start; None is no cap. Windows are in `zone`.

    `hold_pct` is PI_SOFT_HOLD_PCT and `tokens` PI_DAILY_TOKEN_CAP.
    """

    day: int | None
    week: int | None
    month: int | None
    zone: str
    hold_pct: int | None = None
    tokens: int | None = None
    limits: Limits = NO_LIMITS

    @classmethod
    def of(cls, settings: Settings, limits: Limits = NO_LIMITS) -> Caps:
        return cls(
            settings.daily_cap,
            settings.weekly_cap,
            settings.monthly_cap,
            settings.timezone,
            settings.soft_hold_pct,
            settings.daily_token_cap,
            limits,
        )

    @property
    def rows(self) -> Iterator[Cap]:
        """Every cap, in the order in which the ladder asks them."""
        yield Cap(
            name="PI_DAILY_TOKEN_CAP",
            reason="daily-token-cap",
            scope="*",
            span="day",
            limit=self.tokens,
            unit="tokens",
        )
        for row in self.limits.scopes:
            for span in SPANS:
                if getattr(row, span) is not None:
                    yield Cap(
                        name=f"{span} of the scope {row.scope} in limits.json",
                        reason="scope-cap",
                        scope=row.pattern,
                        span=span,
                        limit=getattr(row, span),
                    )
        for word, span in (("DAILY", "day"), ("WEEKLY", "week"), ("MONTHLY", "month")):
            limit = getattr(self, span)
            hold = limit * self.hold_pct // 100 if limit and self.hold_pct else None
            yield Cap(
                name=f"PI_{word}_CAP",
                reason="over-budget",
                scope="*",
                span=span,
                limit=limit,
                hold=hold,
            )


class Meter(msgspec.Struct, frozen=True):
    """A cap and what is used of it in the window that stands at present.

    `ends` is the window's end, seconds. From `hold` on new jobs are refused as
    `soft-hold`.
    """

    cap: str
    unit: Literal["jobs", "tokens"]
    span: Span
    used: int
    limit: int | None
    hold: int | None
    ends: float


class Over(NamedTuple):
    """Why a start is refused: the reason, the cap, and what was asked of it."""

    reason: str
    meter: Meter
    asked: int


class Claimed(msgspec.Struct, frozen=True):
    """A job in a worker's hands. Every later write names the claim token."""

    job: Job
    claim: str
    attempt: int
    queued_at: float
    deferrals: int = 0


class SessionNote(msgspec.Struct, frozen=True):
    """Whether a run continued an earlier one, and if not, why (SESSION_REASONS)."""

    resumed: bool
    reason: str | None = None


class Lineage(msgspec.Struct, frozen=True):
    """How a resumed rule's run began, under which pi; `seen` tells the stored file
    from another."""

    note: SessionNote
    seen: str
    pi: str


class Workspace(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the host knows of a job's workspace, kept for its publishing."""

    base: str
    default_branch: str
    lease: str | None = None
    request_sha: str | None = None
    lineage: Lineage | None = None
    publish: Literal["host", "agent"] = "host"


class Notice(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is still to be told to the forge about a job that has ended.

    `result` publishes the box's outcome; any other kind is one comment.
    """

    kind: str
    text: str = ""
    marker: str = ""
    commits: int = 0


class Tokens(msgspec.Struct, frozen=True):
    """Tokens by the gate's count; `cost` in USD, None when a price is unknown."""

    input: int = 0
    output: int = 0
    cacheRead: int = 0
    cacheWrite: int = 0
    total: int = 0
    cost: float | None = None


class Forks(msgspec.Struct, frozen=True):
    count: int = 0
    tokens: int = 0
    cost: float | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The run record. Key order is the contract and every key is present.

    Integers, ids and fixed words only: no title, body, login, label, branch
    name or path ever enters (00-map, principle 11). `picked` is what people made
    of its review request, once they have.
    """

    jobId: str
    kind: str
    target: str
    flow: str
    queuedAt: str
    startedAt: str | None
    endedAt: str
    outcome: Outcome
    reason: str | None
    exitCode: int | None
    turns: int | None
    tokens: Tokens | None
    forks: Forks | None
    provider: str | None
    model: str | None
    budgetReserved: bool
    attempt: int
    replica: int | None
    replicas: int | None
    triggerIndex: int | None
    triggerType: str | None
    session: SessionNote | None
    bundle: bool
    host: str
    picked: Picked | None


_SCHEMA_1 = """
CREATE TABLE deliveries (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, state TEXT NOT NULL,
    body_sha TEXT NOT NULL, received_at REAL NOT NULL, event_at REAL NOT NULL,
    target TEXT NOT NULL, pending TEXT, attempts INTEGER NOT NULL DEFAULT 0,
    next_at REAL, base TEXT, request_sha TEXT
) STRICT;
CREATE UNIQUE INDEX deliveries_body ON deliveries (kind, body_sha);
CREATE INDEX deliveries_target ON deliveries (target, received_at);
CREATE INDEX deliveries_pending ON deliveries (next_at) WHERE state = 'pending';
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    set_id TEXT NOT NULL, state TEXT NOT NULL, payload TEXT, claim TEXT,
    attempt INTEGER NOT NULL DEFAULT 0, deferrals INTEGER NOT NULL DEFAULT 0,
    not_before REAL NOT NULL DEFAULT 0, queued_at REAL NOT NULL, started_at REAL,
    ended_at REAL, work TEXT, notice TEXT, publish_tries INTEGER NOT NULL DEFAULT 0,
    cancel TEXT
) STRICT;
CREATE INDEX jobs_queued ON jobs (seq) WHERE state = 'queued';
CREATE INDEX jobs_open ON jobs (state) WHERE state <> 'done';
CREATE INDEX jobs_set ON jobs (set_id);
CREATE INDEX jobs_ended ON jobs (ended_at) WHERE state = 'done';
CREATE TABLE windows (
    kind TEXT NOT NULL, key TEXT NOT NULL, opened_at REAL NOT NULL,
    job_id TEXT NOT NULL
) STRICT;
CREATE INDEX windows_key ON windows (kind, key, opened_at);
CREATE INDEX windows_job ON windows (job_id);
CREATE TABLE ledger (
    id INTEGER PRIMARY KEY, job_id TEXT NOT NULL, attempt INTEGER NOT NULL,
    reserved_at REAL NOT NULL, state TEXT NOT NULL, tokens_reserved INTEGER,
    tokens INTEGER, cost REAL, scope TEXT
) STRICT;
CREATE INDEX ledger_job ON ledger (job_id);
CREATE INDEX ledger_time ON ledger (reserved_at);
CREATE TABLE runs (
    job_id TEXT PRIMARY KEY, set_id TEXT NOT NULL, ended_at REAL NOT NULL,
    record TEXT NOT NULL, request TEXT
) STRICT;
CREATE INDEX runs_ended ON runs (ended_at);
CREATE TABLE pushes (
    kind TEXT NOT NULL, target TEXT NOT NULL, replica INTEGER, tip TEXT NOT NULL,
    at REAL NOT NULL
) STRICT;
CREATE INDEX pushes_target ON pushes (kind, target);
CREATE TABLE label_memory (
    kind TEXT NOT NULL, target TEXT NOT NULL, labels TEXT NOT NULL,
    seen_at REAL NOT NULL, PRIMARY KEY (kind, target)
) STRICT;
CREATE TABLE flags (name TEXT PRIMARY KEY, value TEXT NOT NULL, at REAL NOT NULL)
    STRICT;
CREATE TABLE counters (name TEXT PRIMARY KEY, n INTEGER NOT NULL) STRICT;
CREATE TABLE poll_cursors (
    repo TEXT NOT NULL, stream TEXT NOT NULL, cursor TEXT, etag TEXT,
    PRIMARY KEY (repo, stream)
) STRICT;
"""

#: Comments on targets whose deliveries were dropped, one for each hour; and windows
#: that a refused job left, which hold for its own event alone.
_SCHEMA_LIMITED = """
CREATE TABLE limited (
    set_id TEXT PRIMARY KEY, kind TEXT NOT NULL, target TEXT NOT NULL, at REAL NOT NULL,
    payload TEXT, tries INTEGER NOT NULL DEFAULT 0, not_before REAL NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX limited_target ON limited (target, at);
ALTER TABLE windows ADD COLUMN freed INTEGER NOT NULL DEFAULT 0;
"""

#: Where a job works (`Job.place`), for the scopes of limits.json: `ledger.scope`
#: was there and empty, a queued job needs it to be held back.
_SCHEMA_CAPS = """
ALTER TABLE jobs ADD COLUMN scope TEXT;
UPDATE jobs SET scope = json_extract(payload, '$.kind') || ':'
    || lower(json_extract(payload, '$.repo'));
UPDATE ledger SET scope = (SELECT scope FROM jobs WHERE jobs.id = ledger.job_id);
"""

#: Comments that started work: a forge that words an edit as it words a new comment
#: must not start it again.
_SCHEMA_COMMENTS = """
CREATE TABLE comments (
    kind TEXT NOT NULL, target TEXT NOT NULL, comment TEXT NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (kind, target, comment)
) STRICT;
CREATE INDEX comments_at ON comments (at);
"""

#: `seen_at` is the latest due time of a cron rule that was dealt with, for the
#: `schedule` it had then. A local job looks for others in its place.
_SCHEMA_SCHEDULE = """
CREATE TABLE cron (
    id TEXT PRIMARY KEY, schedule TEXT NOT NULL, seen_at REAL NOT NULL
) STRICT;
CREATE INDEX jobs_scope ON jobs (scope);
"""

#: What people make of the requests we opened: `request_key` finds the runs (a later
#: set and a replay go on in a request), `ended_when` is the newest event's time; and
#: the siblings' requests that are still to be told of one.
_SCHEMA_PICKS = """
ALTER TABLE runs ADD COLUMN request_key TEXT;
ALTER TABLE runs ADD COLUMN ended_when REAL NOT NULL DEFAULT 0;
UPDATE runs SET record = json_set(record, '$.picked', NULL);
UPDATE runs SET request_key = (SELECT scope FROM jobs WHERE jobs.id = runs.job_id)
    || '!' || json_extract(request, '$.number') WHERE request IS NOT NULL;
CREATE INDEX runs_request ON runs (request_key) WHERE request_key IS NOT NULL;
CREATE INDEX runs_set ON runs (set_id);
CREATE TABLE sibling_notices (
    job_id TEXT NOT NULL, about TEXT NOT NULL, at INTEGER NOT NULL,
    tries INTEGER NOT NULL DEFAULT 0, not_before REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (job_id, about, at)
) STRICT;
"""

#: A long queue of which nothing may start is looked at whenever something is queued:
#: without the rows themselves, which hold the texts.
_SCHEMA_WAITING = """
DROP INDEX jobs_queued;
CREATE INDEX jobs_queued ON jobs (seq, not_before, scope, cancel)
    WHERE state = 'queued';
CREATE INDEX jobs_cancelled ON jobs (seq) WHERE state = 'queued' AND cancel IS NOT NULL;
"""

#: What waits is read for each forge by itself, however much waits for another.
_SCHEMA_PENDING = """
DROP INDEX deliveries_pending;
CREATE INDEX deliveries_pending ON deliveries (kind, next_at) WHERE state = 'pending';
"""

#: Names of the migrations this version knows, oldest first; a file that has
#: another one was written by a newer pidispatch and is left alone.
_MIGRATIONS: tuple[tuple[str, str], ...] = (
    ("001-first", _SCHEMA_1),
    ("002-caps", _SCHEMA_CAPS),
    ("002-limited", _SCHEMA_LIMITED),
    ("002-comments", _SCHEMA_COMMENTS),
    ("003-schedule", _SCHEMA_SCHEDULE),
    ("003-picks", _SCHEMA_PICKS),
    ("004-waiting", _SCHEMA_WAITING),
    ("005-pending", _SCHEMA_PENDING),
)


#: How long a start looks for damage, in seconds: a file of a million jobs takes more.
CHECK_SECONDS = 2.0


def _look_over(path: Path) -> None:
    """Refuse a file that is damaged or too new before anything of it is touched.

    Without a log beside it nobody has it open, so it is read as it lies on the disk;
    with one read-only. Neither leaves a trace. Raises `ConfigError`, `sqlite3.Error`.
    """
    import sqlite3

    if not path.exists() or not path.stat().st_size:
        return
    how = "mode=ro" if _suffixed(path, "-wal").exists() else "immutable=1"
    name = f"file:{_quote_path(path)}?{how}"
    with contextlib.closing(
        sqlite3.connect(name, uri=True, check_same_thread=False)
    ) as connection:
        _refuse_newer(connection, path)
        fault = _damage(connection)
    if fault is None:
        log_event("database-not-all-checked", db=path, seconds=CHECK_SECONDS)
    elif fault != "ok":
        raise ConfigError(
            f"the database {path} is damaged: {fault}",
            "restore a backup of it, or name another file with --db",
        )


def _refuse_newer(connection: sqlite3.Connection, path: Path) -> None:
    sql = "SELECT 1 FROM sqlite_master WHERE name = '_sqlite_migrations'"
    if not connection.execute(sql).fetchall():
        return
    sql = "SELECT name FROM _sqlite_migrations WHERE migration_set = 'pidispatch'"
    applied = {row[0] for row in connection.execute(sql).fetchall()}
    if unknown := applied - set(dict(_MIGRATIONS)):
        raise ConfigError(
            f"{path} was written by a newer pidispatch ({', '.join(sorted(unknown))})",
            "install that version, or name another file with --db",
        )


def _damage(connection: sqlite3.Connection) -> str | None:
    """`ok`, SQLite's first complaint, or None when the time was over before."""
    import sqlite3

    over = threading.Timer(CHECK_SECONDS, connection.interrupt)
    over.start()
    try:
        return str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
    except sqlite3.OperationalError as error:
        if str(error) != "interrupted":
            raise
        return None
    finally:
        over.cancel()
        over.join()


def _migrate(connection: sqlite3.Connection) -> None:
    import sqlite_utils

    migrations = sqlite_utils.Migrations("pidispatch")
    for name, script in _MIGRATIONS:
        migrations(name=name)(_script(script))
    database = sqlite_utils.Database(connection)
    if migrations.pending(database):
        migrations.apply(database)


def _script(script: str) -> Callable[[sqlite_utils.Database], None]:
    def run(database: sqlite_utils.Database) -> None:
        # executescript would commit the migration's transaction: one by one instead
        for statement in script.split(";"):
            if statement.strip():
                database.execute(statement)

    return run


def _connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    import sqlite3

    name = f"file:{_quote_path(path)}" + ("?mode=ro" if read_only else "")
    connection = sqlite3.connect(
        name, uri=True, isolation_level=None, check_same_thread=False, timeout=10
    )
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA foreign_keys = ON")
    if not read_only:
        connection.execute("PRAGMA synchronous = FULL")
    return connection


def _suffixed(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _quote_path(path: Path) -> str:
    from urllib.parse import quote

    return quote(str(path.absolute()))


class _Ask(NamedTuple):
    """A write that waits for its commit: what to do and where the answer goes."""

    do: Callable[[sqlite3.Connection], Any]
    answer: list[Any]


class _Group(msgspec.Struct):
    """A transaction of one thread: begun at its first look, broken by any fault.

    `then` is what is to be done when it is durable.
    """

    begun: bool = False
    broken: bool = False
    then: list[Callable[[], object]] = []


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job as lists show it, open or ended. `at` is its latest time, seconds."""

    id: str
    set: str
    target: str
    flow: str
    state: str
    reason: str | None
    replica: int | None
    replicas: int | None
    tokens: int | None
    at: float
    request: Request | None
    picked: Picked | None = None


class Pick(msgspec.Struct, frozen=True):
    """How a replica index or a model fared: the sets it ran in, and its requests that
    people merged or closed."""

    name: str
    sets: int
    merged: int
    closed: int


class Picks(msgspec.Struct, frozen=True):
    """What people chose among the sets on record; `sets` had a run that ended,
    `decided` of them a request that was merged."""

    sets: int
    decided: int
    replicas: list[Pick]
    models: list[Pick]


class SiblingNotice(msgspec.Struct, frozen=True):
    """To be said on `job`'s open request: that of its sibling `about` has ended,
    `at` by the event's own time, milliseconds."""

    job: Job
    request: Request
    about: RunRow
    at: int
    tries: int


class PollState(msgspec.Struct, frozen=True):
    """A polled repository: when it was last asked, and what went wrong then."""

    repo: str
    at: float
    trouble: str | None


class Hold(msgspec.Struct, frozen=True):
    """A scope in which nothing starts now, and the jobs that wait for it.

    `until` is the end of its pause window, seconds; None is a scope at its
    `concurrent`, which ends with one of its jobs.
    """

    scope: str
    why: Literal["pause-window", "concurrent"]
    until: float | None
    waiting: int


class Status(msgspec.Struct, frozen=True):
    """The queue at a glance. `used` are today's slots of the daily cap.

    `problem` is of the triggers file, `limits_problem` of the limits file; the
    last good content of either stays in force. While there is an `engine_problem`
    no job starts; those in hand wait.
    """

    jobs: dict[str, int]
    used: int
    daily_cap: int | None
    pending: int
    counts: dict[str, int]
    paused: bool
    heartbeat: float | None
    problem: str | None
    limits_problem: str | None
    engine_problem: str | None
    meters: list[Meter]
    holds: list[Hold]
    polls: tuple[PollState, ...] = ()


class Reader:
    """Read-only looks at the file, one connection a thread, no cursor kept."""

    #: What a file is that cannot be read: a wrong one, or one that may come back.
    unreadable: ClassVar[type[PidispatchError]] = ConfigError

    def __init__(self, path: Path) -> None:
        self.path = path
        self._readers = threading.local()

    @property
    def _read(self) -> sqlite3.Connection:
        import sqlite3

        connection: sqlite3.Connection | None = getattr(self._readers, "db", None)
        if connection is None:
            try:
                connection = _connect(self.path, read_only=True)
                connection.execute("SELECT 1 FROM jobs LIMIT 1")
                self._readers.db = connection
            except sqlite3.Error as error:
                raise self.unreadable(
                    f"the database {self.path} cannot be read: {error}",
                    "start `pidispatch serve` once, or name the file with --db",
                ) from error
        return connection

    def _rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        return self._ask(lambda db: db.execute(sql, values).fetchall())

    def _ask(self, do: Callable[[sqlite3.Connection], T]) -> T:
        """A look at the file. Raises `InfraError` when it cannot be had."""
        import sqlite3

        try:
            return do(self._read)
        except sqlite3.Error as error:
            raise InfraError(
                f"the database {self.path} could not be read: {error}",
                "see `pidispatch doctor`",
            ) from error

    def flag(self, name: str) -> str | None:
        rows = self._rows("SELECT value FROM flags WHERE name = ?", name)
        return rows[0][0] if rows else None

    def request_of(self, job: str) -> Request | None:
        """What an earlier try at telling of a job opened; None once it is told."""
        sql = """SELECT request FROM runs JOIN jobs ON jobs.id = runs.job_id
                 WHERE runs.job_id = ? AND state = 'publishing' AND request <> ''"""
        rows = self._rows(sql, job)
        return msgspec.json.decode(rows[0][0], type=Request) if rows else None

    def open_jobs(self) -> frozenset[str]:
        """Ids of the jobs that have not ended, or whose end is not published."""
        rows = self._rows("SELECT id FROM jobs WHERE state <> 'done'")
        return frozenset(row[0] for row in rows)

    def integrity(self) -> str:
        """`ok`, or SQLite's first complaint."""
        answer: str = self._rows("PRAGMA quick_check(1)")[0][0]
        return answer

    def backup(self, target: Path) -> None:
        """Copy the database to a new private file while others go on using it.

        Raises `ConfigError` when the file is there or cannot be written.
        """
        import sqlite3

        part = target.with_name(f"{target.name}.{random_hex(4)}.part")
        try:
            for path in (target, part):  # the one holds the name, the other fills up
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            try:
                with contextlib.closing(sqlite3.connect(part)) as copy:
                    self._read.backup(copy)
                    fault = copy.execute("PRAGMA quick_check(1)").fetchone()[0]
                    copy.execute("PRAGMA journal_mode = DELETE")
                if fault != "ok":
                    raise InfraError(f"the copy is damaged: {fault}", "try again")
                part.replace(target)
            except BaseException:
                part.unlink(missing_ok=True)
                target.unlink(missing_ok=True)
                raise
        except (OSError, sqlite3.Error) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"{target}: {why}", "name a new file") from error

    def runs(self, limit: int, before: str | None = None) -> list[RunRow]:
        """Jobs, newest first, open ones included; older than the job `before`."""
        sql = f"""{_RUNS} WHERE jobs.seq < coalesce(
                  (SELECT seq FROM jobs WHERE id = ?), 9223372036854775807)
                  ORDER BY jobs.seq DESC LIMIT ?"""
        return [_run_row(row) for row in self._rows(sql, before, limit)]

    def records(self, limit: int) -> list[Record]:
        sql = "SELECT record FROM runs ORDER BY ended_at DESC, job_id LIMIT ?"
        rows = self._rows(sql, limit)
        return [msgspec.json.decode(row["record"], type=Record) for row in rows]

    def picks(self) -> Picks:
        """What people chose, by replica index and by model."""
        found: dict[str, list[Pick]] = {"all": [], "replica": [], "model": []}
        for part, *row in self._rows(_PICKS):
            found[part].append(Pick(*row))
        (total,) = found["all"]
        return Picks(total.sets, total.merged, found["replica"], found["model"])

    def run(self, job: str) -> tuple[RunRow, Record | None, list[RunRow]]:
        """One job, its record if it ended, and its siblings. Raises ConfigError."""
        rows = self._rows(f"{_RUNS} WHERE jobs.id = ?", job)
        if not rows:
            raise ConfigError(f"no job {job} is known", "see `pidispatch runs`")
        found = _run_row(rows[0])
        text = rows[0]["record"]
        record = msgspec.json.decode(text, type=Record) if text else None
        sql = f"{_RUNS} WHERE jobs.set_id = ? AND jobs.id <> ? ORDER BY jobs.seq"
        others = [_run_row(row) for row in self._rows(sql, found.set, job)]
        return found, record, others

    def kept(self, job: str) -> tuple[Job, Workspace, Record]:
        """What is needed to publish a job again. Raises `ConfigError`."""
        _, record, _ = self.run(job)
        sql = "SELECT payload, work FROM jobs WHERE id = ?"
        row = self._rows(sql, job)[0]
        if record is None or row["work"] is None or not row["payload"]:
            raise ConfigError(f"{job} has nothing to publish", "see `pidispatch runs`")
        return (
            msgspec.json.decode(row["payload"], type=Job),
            msgspec.json.decode(row["work"], type=Workspace),
            record,
        )

    def own_tips(self, job: Job) -> frozenset[str]:
        """The commits we ever pushed to the job's branch; others are not ours."""
        sql = """SELECT tip FROM pushes WHERE kind = ? AND target = ?
                 AND replica IS ?"""
        rows = self._rows(sql, job.kind, job.title, job.replica)
        return frozenset(row[0] for row in rows)

    def labels_before(self, delivery: Delivery) -> tuple[frozenset[str], float] | None:
        """The digests of the labels that its item had, and when; None: not known."""
        sql = "SELECT labels, seen_at FROM label_memory WHERE kind = ? AND target = ?"
        rows = self._rows(sql, delivery.event.forge, delivery.target)
        if not rows:
            return None
        return frozenset(json.loads(rows[0]["labels"])), rows[0]["seen_at"]

    def limits(self) -> Limits:
        """What the worker has of limits.json, also after a bad edit."""
        kept = self.flag("limits")
        return msgspec.json.decode(kept, type=Limits) if kept else NO_LIMITS

    def meters(self, caps: Caps, now: float) -> list[Meter]:
        """What is used of every cap, and of windows that have none."""
        return self._ask(lambda db: [_meter(db, c, caps.zone, now) for c in caps.rows])

    def tokens_used(self, caps: Caps, now: float) -> int:
        """Tokens that the present day has used or reserved."""
        since, _ = window_of(now, caps.zone, "day")
        return self._ask(lambda db: _tokens_used(db, "*", since))

    def status(self, caps: Caps, now: float) -> Status:
        # two counts, because each has an index of its own and the table is wide
        unended = """SELECT state, count(*) FROM jobs WHERE state <> 'done'
                     GROUP BY state"""
        ended = "SELECT 'done', count(*) FROM jobs WHERE state = 'done'"
        states = [row for row in (*self._rows(unended), *self._rows(ended)) if row[1]]
        beat = self._rows("SELECT at FROM flags WHERE name = 'heartbeat'")
        sql = "SELECT count(*) FROM deliveries WHERE state = 'pending'"
        meters = self.meters(caps, now)
        return Status(
            jobs={row[0]: row[1] for row in states},
            used=next(m.used for m in meters if m.cap == "PI_DAILY_CAP"),
            daily_cap=caps.day,
            pending=self._rows(sql)[0][0],
            counts={r["name"]: r["n"] for r in self._rows("SELECT * FROM counters")},
            paused=self.flag("paused") is not None,
            heartbeat=beat[0][0] if beat else None,
            problem=self.flag("triggers-problem"),
            limits_problem=self.flag("limits-problem"),
            engine_problem=self.flag("engine-problem"),
            meters=meters,
            holds=self._ask(lambda db: _holds_of(db, caps.limits, now)),
            polls=self.polls(),
        )

    def polls(self) -> tuple[PollState, ...]:
        sql = """SELECT substr(name, 6) AS repo, value, at FROM flags
                 WHERE name LIKE 'poll:%' ORDER BY name"""
        return tuple(
            PollState(row["repo"], row["at"], row["value"] or None)
            for row in self._rows(sql)
        )


_PICKS = """WITH chosen AS (
        SELECT set_id, json_extract(record, '$.picked') AS picked,
        'r' || json_extract(record, '$.replica') AS replica,
        json_extract(record, '$.provider') || '/' || json_extract(record, '$.model')
        AS model FROM runs WHERE json_extract(record, '$.replicas') > 1
        AND set_id <> job_id)  -- a replay is no set
    SELECT 'all', '', count(DISTINCT set_id),
        count(DISTINCT CASE WHEN picked = 'merged' THEN set_id END), 0 FROM chosen
    UNION ALL
    SELECT 'replica', replica, count(DISTINCT set_id),
        count(nullif(picked, 'closed')), count(nullif(picked, 'merged'))
        FROM chosen GROUP BY replica
    UNION ALL
    SELECT 'model', model, count(DISTINCT set_id),
        count(nullif(picked, 'closed')), count(nullif(picked, 'merged'))
        FROM chosen WHERE model IS NOT NULL GROUP BY model"""

_RUNS = """SELECT jobs.id, jobs.set_id, jobs.state, jobs.payload, jobs.queued_at,
           jobs.ended_at, runs.record, runs.request
           FROM jobs LEFT JOIN runs ON runs.job_id = jobs.id"""


def _run_row(row: sqlite3.Row) -> RunRow:
    request = row["request"]
    link = msgspec.json.decode(request, type=Request) if request else None
    if row["record"]:
        record = msgspec.json.decode(row["record"], type=Record)
        state = record.outcome if row["state"] == "done" else row["state"]
        return RunRow(
            id=row["id"],
            set=row["set_id"],
            target=record.target,
            flow=record.flow,
            state=state,
            reason=record.reason,
            replica=record.replica,
            replicas=record.replicas,
            tokens=record.tokens.total if record.tokens else None,
            at=row["ended_at"],
            request=link,
            picked=record.picked,
        )
    job = msgspec.json.decode(row["payload"], type=Job)
    return RunRow(
        id=job.id,
        set=job.set,
        target=job.title,
        flow=job.flow,
        state=row["state"],
        reason=None,
        replica=job.replica,
        replicas=job.replicas,
        tokens=None,
        at=row["queued_at"],
        request=None,
    )


class Controls(Reader):
    """What a person may ask of the queue, from any process that can write."""

    clock: Clock

    def _write(self, do: Callable[[sqlite3.Connection], T]) -> T:
        """Run `do` in a transaction of its own or of a group."""
        raise NotImplementedError

    def pushed(self, job: Job, tip: str) -> None:
        """Remember that we put this commit on the job's branch."""
        self._write(lambda db: _pushed(db, job, tip, self.clock()))

    def opened(self, job: str, request: Request) -> None:
        """Remember the request of a job that is still to be told of."""
        self._write(lambda db: _opened(db, job, request))

    def pause(self) -> None:
        self._write(lambda db: _set_flag(db, "paused", "1", self.clock()))

    def resume(self) -> None:
        self._write(lambda db: _set_flag(db, "paused", None, self.clock()))

    def cancel(self, job: str) -> str:
        """Ask for a job's end; returns the state it was found in.

        A job that has ended is a ConfigError that says how.
        """
        run, _, _ = self.run(job)
        if run.state not in OPEN_STATES:
            why = f"{job} has already ended: {run.state}"
            raise ConfigError(why, f"see `pidispatch show {job}`")
        sql = "UPDATE jobs SET cancel = 'operator-cancel' WHERE id = ?"
        self._write(lambda db: db.execute(sql, (job,)))
        return run.state


class Store(Controls):
    """The queue. One instance a process; `writes` serialises its writers.

    Raises `ConfigError` for a file that is damaged or too new, `InfraError` when
    a write cannot be made durable (disk full, read-only disk), or nothing be read.
    """

    unreadable = InfraError

    def __init__(self, path: Path, clock: Clock = time.time) -> None:
        super().__init__(path)
        from collections import deque

        self.clock = clock
        self.work = threading.Event()
        self._asks: deque[_Ask] = deque()
        self._turn = threading.Lock()
        self._mine = threading.local()
        self._closed = self._took = False
        self._connection = self._open()

    def _open(self) -> sqlite3.Connection:
        import sqlite3

        try:
            _look_over(self.path)
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.touch(0o600)  # its log gets the mode the file is born with
            connection = _connect(self.path)
            connection.execute("PRAGMA journal_mode = WAL")
            _migrate(connection)
            self.path.chmod(0o600)
            return connection
        except (sqlite3.DatabaseError, OSError) as error:
            raise ConfigError(
                f"the database {self.path} cannot be opened: {error}",
                "check the path and its permissions, or restore a backup",
            ) from error

    def never_checkpoint(self) -> None:
        """Leave the log to the worker's process, which alone may checkpoint."""
        self._connection.execute("PRAGMA wal_autocheckpoint = 0")

    def close(self) -> None:
        with self._turn:
            self._closed = True
            self._connection.close()

    # -- the one writer ------------------------------------------------------

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """What this thread reads and writes inside is one transaction.

        It is durable at the end, or nothing of it was done: `InfraError`. From
        its first look at the file on, other writers wait.
        """
        if self._group:
            yield
            return
        group = self._mine.group = _Group()
        try:
            yield
            if group.begun or group.broken:
                self._grouped(lambda db: db.execute("COMMIT"), group)
        finally:
            self._mine.group = None
            if group.begun:
                self._roll_back()
                self._turn.release()
        for effect in group.then:
            effect()

    @property
    def _group(self) -> _Group | None:
        return getattr(self._mine, "group", None)

    def _grouped(self, do: Callable[[sqlite3.Connection], T], group: _Group) -> T:
        import sqlite3

        if group.broken:  # the transaction may be gone: nothing more is written
            raise InfraError("another write of the group failed")
        try:
            if not group.begun:
                self._take_turn()
                group.begun = True
                self._connection.execute("BEGIN IMMEDIATE")
            return do(self._connection)
        except BaseException as error:
            group.broken = True
            if isinstance(error, sqlite3.Error):
                raise _unwritten(error) from error
            raise

    def _roll_back(self) -> None:
        """End what is left of a transaction; a disk that is gone may not let us."""
        import sqlite3

        with contextlib.suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _take_turn(self) -> None:
        self._turn.acquire()
        if self._closed:
            self._turn.release()
            raise InfraError("the store is closed")

    def then(self, effect: Callable[[], object]) -> None:
        """Do it when what was written so far is durable."""
        if group := self._group:
            group.then.append(effect)
        else:
            effect()

    def _ask(self, do: Callable[[sqlite3.Connection], T]) -> T:
        """A look at the file; inside a group, at what the group has made of it."""
        group = self._group
        return self._grouped(do, group) if group else super()._ask(do)

    def _write(self, do: Callable[[sqlite3.Connection], T]) -> T:
        """Whoever has the turn commits what the others wait for as well."""
        import sqlite3

        if group := self._group:
            return self._grouped(do, group)
        ask = _Ask(do, [])
        self._asks.append(ask)
        self._take_turn()
        try:
            if not ask.answer:
                self._commit([self._asks.popleft() for _ in range(len(self._asks))])
        finally:
            self._turn.release()
        answer = ask.answer[0]
        if isinstance(answer, sqlite3.Error):
            raise _unwritten(answer) from answer
        if isinstance(answer, BaseException):
            raise answer
        return cast(T, answer)

    def _commit(self, asks: list[_Ask]) -> None:
        """One transaction for all that wait.

        When one of them fails all are done again, each in a savepoint of its own:
        savepoints for everything would double the writer's work.
        """
        import sqlite3

        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                for ask in asks:
                    ask.answer[:] = [ask.do(connection)]
            except Exception:  # told to its caller below
                connection.execute("ROLLBACK")
                connection.execute("BEGIN IMMEDIATE")
                for ask in asks:
                    ask.answer[:] = [_in_savepoint(connection, ask.do)]
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            for ask in asks:
                ask.answer[:] = [error]

    # -- deliveries ----------------------------------------------------------

    def seen(self, kind: str, delivery: str, body_sha: str) -> bool:
        """Whether this id, or this very body, already made jobs or waits."""
        # both sides of OR need an index, or every row is read
        sql = """SELECT 1 FROM deliveries WHERE id = ? OR (kind = ? AND body_sha = ?)
                 LIMIT 1"""
        return bool(self._rows(sql, delivery, kind, body_sha))

    def admit(
        self, delivery: Delivery, jobs: Sequence[Job], hourly: int = 0
    ) -> Admission:
        """Queue a delivery's jobs, all or none, in one transaction.

        `hourly` is the most deliveries an hour for one target; 0 is no limit.
        """
        admission = self._write(lambda db: _admit(db, delivery, jobs, hourly))
        if admission.status == "queued":
            self.then(self.work.set)
        return admission

    def park(self, delivery: Delivery, match: Match) -> bool:
        """Keep a delivery until it is known who asked; False for a duplicate.

        Its labels are remembered now, not when it is admitted: by then they may
        be others.
        """
        event = msgspec.structs.replace(delivery.event, remember=None)
        waiting = msgspec.structs.replace(delivery, event=event)
        pending = msgspec.json.encode((waiting, match)).decode()
        return self._write(lambda db: _park(db, delivery, pending))

    def due_pending(self, now: float) -> list[tuple[Delivery, Match, int]]:
        """The next fifty of each forge: one that hangs hides no other's."""
        found = []
        for row in itertools.chain.from_iterable(
            self._rows(_DUE_PENDING, kind, now, WAIT_MAX) for kind in FORGES
        ):
            delivery, match = msgspec.json.decode(
                row["pending"], type=tuple[Delivery, Match]
            )
            found.append((delivery, match, row["attempts"]))
        return found

    def postpone(self, delivery: str, until: float) -> None:
        sql = """UPDATE deliveries SET next_at = ?, attempts = attempts + 1
                 WHERE id = ? AND state = 'pending'"""
        self._write(lambda db: db.execute(sql, (until, delivery)))

    def settle(self, delivery: str, reason: str | None) -> None:
        """Forget a pending delivery that was dropped; it may be redelivered."""
        sql = "DELETE FROM deliveries WHERE id = ? AND state = 'pending'"

        def do(db: sqlite3.Connection) -> None:
            db.execute(sql, (delivery,))
            if reason:
                _count(db, reason)

        self._write(do)

    def count(self, word: str) -> None:
        """Add one to a counter."""
        self._write(lambda db: _count(db, word))

    def drop(self, delivery: Delivery, reason: str) -> None:
        """Count a dropped delivery, its only trace beside the labels it told of."""

        def do(db: sqlite3.Connection) -> None:
            _remember(db, delivery)
            _count(db, reason)

        self._write(do)

    def set_base(self, set_id: str, base: str, request: str | None) -> Workspace | None:
        """The set's commits: the first caller's stand, every later one gets them.

        None when the set is unknown (local jobs have none).
        """
        sql = """UPDATE deliveries SET request_sha = CASE WHEN base IS NULL
                 THEN ? ELSE request_sha END, base = COALESCE(base, ?)
                 WHERE id = ? RETURNING base, request_sha"""

        def do(db: sqlite3.Connection) -> Workspace | None:
            rows = db.execute(sql, (request, base, set_id)).fetchall()
            return Workspace(rows[0][0], "", None, rows[0][1]) if rows else None

        return self._write(do)

    def base_of(self, set_id: str) -> tuple[str | None, str | None]:
        rows = self._rows(
            "SELECT base, request_sha FROM deliveries WHERE id = ?", set_id
        )
        return (rows[0][0], rows[0][1]) if rows else (None, None)

    # -- jobs ----------------------------------------------------------------

    def claim(
        self, limits: Limits = NO_LIMITS, only: str | None = None
    ) -> Claimed | None:
        """Take the oldest job that may run now, or None. Takes no budget.

        A job in a pause window, or whose scope has as many at work as it may
        have at once, or whose folder another job has in hand, stays queued: it
        waits at no cost and keeps its turn. `only` names the one job wanted.
        """
        now = self.clock()
        if not self._took:  # where one was taken there may well be another
            held = self._ask(lambda db: _held(db, limits, now))
            if not self._rows(_READY, now, held, WAIT_MAX):
                return None
        claimed = self._write(lambda db: _claim(db, _held(db, limits, now), now, only))
        self._took = claimed is not None
        return claimed

    def holder(self, job: str) -> str | None:
        """The job that has in hand the folder which this one waits for, if any."""
        sql = f"""SELECT other.id FROM jobs JOIN jobs AS other ON {_HOLDS_FOLDER}
                  WHERE jobs.id = ? LIMIT 1"""
        rows = self._rows(sql, job)
        return rows[0][0] if rows else None

    def admit_local(self, job: Job) -> tuple[str, bool]:
        """Queue a run of a folder; the id it has, and whether it is a new one.

        One asked for twice in a minute is one run, unless the first was refused
        before it cost anything: then it is asked again, as `<id>-again<k>`.
        """
        answer = self._write(lambda db: _admit_local(db, job, self.clock()))
        self.then(self.work.set)
        return answer

    def schedules(self, wanted: Mapping[str, str]) -> dict[str, float]:
        """The due times last dealt with, by cron id, for the rules now in force.

        A rule that is new, or has another schedule than before, begins now; one
        that is gone is forgotten. A memory of more than a day ahead is a wrong
        clock's and begins now as well.
        """
        now = self.clock()
        return self._write(lambda db: _schedules(db, wanted, now))

    def fire(self, cron: str, due: float, job: Job) -> bool:
        """Queue a cron rule's job and remember its due time, in one transaction.

        False when nothing was queued: that time was dealt with before, or a run
        of the same rule still waits and does for both.
        """
        now = self.clock()
        fired = self._write(lambda db: _fire(db, cron, due, job, now))
        if fired:
            self.then(self.work.set)
        return fired

    def defer(self, claimed: Claimed, until: float) -> None:
        """Put a job back with a time; costs nothing and uses no attempt."""
        sql = """UPDATE jobs SET state = 'queued', claim = NULL, not_before = ?,
                 deferrals = deferrals + 1 WHERE id = ? AND claim = ?"""
        self._fenced(sql, (until, claimed.job.id, claimed.claim))

    def keep_work(self, claimed: Claimed, work: Workspace) -> None:
        sql = "UPDATE jobs SET work = ? WHERE id = ? AND claim = ?"
        text = msgspec.json.encode(work).decode()
        self._fenced(sql, (text, claimed.job.id, claimed.claim))

    def peek_caps(
        self, caps: Caps, place: str, tokens: int | None = None
    ) -> Over | None:
        """The cap that would refuse a start there now; reserves nothing."""
        now = self.clock()
        return self._ask(lambda db: _over(db, caps, place, tokens, now))

    def start(
        self, claimed: Claimed, caps: Caps, tokens: int | None = None
    ) -> Over | None:
        """Reserve the caps and mark the job starting, in one transaction.

        `tokens` is the job's own budget, which is reserved of the day's; a job
        without one reserves none. Returns the cap that is spent; nothing is
        written then.
        """
        now = self.clock()
        return self._write(lambda db: _start(db, claimed, caps, tokens, now))

    def running(self, claimed: Claimed) -> None:
        sql = """UPDATE jobs SET state = 'running' WHERE id = ? AND claim = ?
                 AND state IN ('starting', 'running')"""
        self._fenced(sql, (claimed.job.id, claimed.claim))

    def retry(
        self, claimed: Claimed, until: float, tokens: Tokens | None = None
    ) -> None:
        """Queue another attempt of a job that ran; its slot stays used.

        `tokens` is the gate's figure of this attempt.
        """

        def do(db: sqlite3.Connection) -> None:
            _book(db, claimed, tokens)
            sql = """UPDATE jobs SET state = 'queued', claim = NULL, not_before = ?
                     WHERE id = ? AND claim = ?"""
            _one(db, sql, (until, claimed.job.id, claimed.claim))

        self._write(do)

    def finish(
        self,
        claimed: Claimed,
        record: Record,
        notice: Notice | None,
        tokens: Tokens | None = None,
    ) -> None:
        """Commit the record and the ledger; publish next, or done.

        `tokens` is the gate's figure where the record has none: a run without a
        call. Without any figure the reservation stands.
        """
        now = self.clock()

        def do(db: sqlite3.Connection) -> None:
            _book(db, claimed, record.tokens or tokens)
            _finish(db, claimed, record, notice, now)

        self._write(do)

    def refuse(self, claimed: Claimed, record: Record, notice: Notice | None) -> None:
        """Record a job that never got a container, and free its window."""
        now = self.clock()

        def do(db: sqlite3.Connection) -> None:
            sql = "UPDATE windows SET freed = 1 WHERE job_id = ?"
            db.execute(sql, (claimed.job.id,))
            _unbook(db, claimed)
            _finish(db, claimed, record, notice, now)

        self._write(do)

    def due_notices(self) -> list[tuple[Job, Workspace | None, Notice, int]]:
        """Jobs that are over but not yet told to the forge, and tries so far."""
        sql = """SELECT payload, work, notice, publish_tries FROM jobs
                 WHERE state = 'publishing' AND state <> 'done'
                 AND (not_before <= ?1 OR not_before > ?1 + ?2) ORDER BY seq LIMIT 20"""
        rows = self._rows(sql, self.clock(), WAIT_MAX)
        return [_notice_of(row) for row in rows]

    def notice(self, job: str) -> tuple[Job, Workspace | None, Notice, int] | None:
        sql = """SELECT payload, work, notice, publish_tries FROM jobs
                 WHERE state = 'publishing' AND id = ?"""
        rows = self._rows(sql, job)
        return _notice_of(rows[0]) if rows else None

    def postpone_notice(self, job: str, until: float) -> None:
        sql = """UPDATE jobs SET not_before = ?, publish_tries = publish_tries + 1
                 WHERE id = ? AND state = 'publishing'"""
        self._write(lambda db: db.execute(sql, (until, job)))

    def published(
        self, job: str, request: Request | None, reason: str | None = None
    ) -> None:
        """The job is told: keep the request's link."""
        self._write(lambda db: _published(db, job, request, reason))

    def work_of(self, job: str) -> Workspace | None:
        """What the host keeps of an unfinished job's workspace, once prepared."""
        rows = self._rows("SELECT work FROM jobs WHERE id = ? AND work <> ''", job)
        if not rows:
            return None
        return msgspec.json.decode(rows[0]["work"], type=Workspace)

    def due_limited(self) -> list[tuple[Job, int]]:
        """Dropped deliveries to comment on, each as its first job, and tries so far."""
        sql = """SELECT payload, tries FROM limited WHERE payload IS NOT NULL
                 AND (not_before <= ?1 OR not_before > ?1 + ?2)
                 ORDER BY at LIMIT 20"""
        return [
            (msgspec.json.decode(row["payload"], type=Job), row["tries"])
            for row in self._rows(sql, self.clock(), WAIT_MAX)
        ]

    def postpone_limited(self, set_id: str, until: float) -> None:
        sql = "UPDATE limited SET not_before = ?, tries = tries + 1 WHERE set_id = ?"
        self._write(lambda db: db.execute(sql, (until, set_id)))

    def limited_told(self, set_id: str) -> None:
        sql = "UPDATE limited SET payload = NULL WHERE set_id = ?"
        self._write(lambda db: db.execute(sql, (set_id,)))

    # -- what people pick ------------------------------------------------------

    def note_ending(self, place: str, number: int, ending: Ending, at: float) -> bool:
        """Note what became of a request that a run of ours opened, and queue the words
        for its siblings' requests. False: not ours, or known."""
        key = request_key(place, number)
        if not self._rows(_RUNS_OF_REQUEST, key):  # most requests are people's
            return False
        return self._write(lambda db: _note_ending(db, key, ending, at))

    def due_siblings(self) -> list[SiblingNotice]:
        """What is to be said on the open requests of siblings."""
        sql = """SELECT sibling_notices.*, jobs.payload, runs.request
                 FROM sibling_notices JOIN jobs ON jobs.id = job_id
                 JOIN runs USING (job_id)
                 WHERE sibling_notices.not_before <= ?1
                 OR sibling_notices.not_before > ?1 + ?2 LIMIT 20"""
        return [
            SiblingNotice(
                msgspec.json.decode(row["payload"], type=Job),
                msgspec.json.decode(row["request"], type=Request),
                self.run(row["about"])[0],
                row["at"],
                row["tries"],
            )
            for row in self._rows(sql, self.clock(), WAIT_MAX)
        ]

    def postpone_sibling(self, notice: SiblingNotice, until: float) -> None:
        sql = """UPDATE sibling_notices SET not_before = ?, tries = tries + 1
                 WHERE job_id = ? AND about = ? AND at = ?"""
        values = (until, notice.job.id, notice.about.id, notice.at)
        self._write(lambda db: db.execute(sql, values))

    def sibling_told(self, notice: SiblingNotice) -> None:
        sql = """DELETE FROM sibling_notices
                 WHERE job_id = ? AND about = ? AND at = ?"""
        values = (notice.job.id, notice.about.id, notice.at)
        self._write(lambda db: db.execute(sql, values))

    def cancelled(self, job: str) -> bool:
        return bool(self._rows("SELECT 1 FROM jobs WHERE id = ? AND cancel <> ''", job))

    def unfinished(self) -> list[tuple[Claimed, str, float | None]]:
        """Jobs a worker had in hand, their states and starts, for the reconcile."""
        sql = """SELECT payload, claim, attempt - (state <> 'claimed') AS attempt,
                 queued_at, deferrals, state, started_at FROM jobs
                 WHERE state IN ('claimed', 'starting', 'running')
                 AND state <> 'done' ORDER BY seq"""
        return [
            (_claimed_of(row), row["state"], row["started_at"])
            for row in self._rows(sql)
        ]

    def release(self, claimed: Claimed) -> None:
        """The container never started: give the slot and the attempt back."""

        def do(db: sqlite3.Connection) -> None:
            _unbook(db, claimed)
            sql = """UPDATE jobs SET state = 'claimed', attempt = attempt - 1,
                     started_at = NULL
                     WHERE id = ? AND claim = ? AND state IN ('starting', 'running')"""
            _one(db, sql, (claimed.job.id, claimed.claim))

        self._write(do)

    def requeue(self, claimed: Claimed) -> None:
        """Back to the queue after a crash before the container: slot released."""

        def do(db: sqlite3.Connection) -> None:
            _unbook(db, claimed)
            sql = """UPDATE jobs SET state = 'queued', claim = NULL, started_at = NULL,
                     attempt = attempt - (state = 'starting') WHERE id = ?"""
            db.execute(sql, (claimed.job.id,))

        self._write(do)

    def _fenced(self, sql: str, values: tuple[Any, ...]) -> None:
        self._write(lambda db: _one(db, sql, values))

    # -- polling ---------------------------------------------------------------

    def cursor(self, repo: str, stream: str) -> tuple[Cursor | None, str | None]:
        """How far the stream is known, and the list's ETag then."""
        sql = "SELECT cursor, etag FROM poll_cursors WHERE repo = ? AND stream = ?"
        rows = self._rows(sql, repo, stream)
        if not rows:
            return None, None
        return msgspec.json.decode(rows[0]["cursor"], type=Cursor), rows[0]["etag"]

    def keep_cursor(
        self, repo: str, stream: str, cursor: Cursor, etag: str | None
    ) -> None:
        text = msgspec.json.encode(cursor).decode()
        sql = "INSERT OR REPLACE INTO poll_cursors VALUES (?, ?, ?, ?)"
        self._write(lambda db: db.execute(sql, (repo, stream, text, etag)))

    def forget_polls(self) -> None:
        """Leave no word of repositories that are not polled any more."""
        sql = "DELETE FROM flags WHERE name LIKE 'poll:%'"
        self._write(lambda db: db.execute(sql))

    # -- flags and retention --------------------------------------------------

    def instance(self) -> str:
        """The random name of this file's engine objects, made once."""
        known = self.flag("instance")
        if known is None:
            known = random_hex(6)
            self.set_flag("instance", known)
        return known

    def set_flag(self, name: str, value: str | None) -> None:
        now = self.clock()
        self._write(lambda db: _set_flag(db, name, value, now))
        self.then(self.work.set)

    def set_limits(self, limits: Limits, problem: str | None) -> None:
        """Show `status` the limits in force and what is wrong with their file."""
        now, kept = self.clock(), msgspec.json.encode(limits).decode()

        def do(db: sqlite3.Connection) -> None:
            _set_flag(db, "limits", kept, now)
            _set_flag(db, "limits-problem", problem, now)

        self._write(do)
        self.then(self.work.set)

    def beat(self) -> None:
        """The heartbeat of a running worker, for `status` and doctor."""
        now = self.clock()
        self._write(lambda db: _set_flag(db, "heartbeat", str(os.getpid()), now))

    def sweep(self) -> None:
        """Forget what is older than the retention, counted from a job's end."""
        before = self.clock() - RETENTION_SECONDS
        self._write(lambda db: _forget(db, before))


class Outside(Controls):
    """What another process than the worker may change: one transaction each.

    It never checkpoints: SQLite below 3.51.3 may lose pages of the log when two
    connections do, so only the worker's does.
    """

    def __init__(self, path: Path, clock: Clock = time.time) -> None:
        super().__init__(path)
        self.clock = clock

    def _write(self, do: Callable[[sqlite3.Connection], T]) -> T:
        import sqlite3

        self.integrity()  # refuses a file that is absent or not ours
        try:
            with contextlib.closing(_connect(self.path)) as connection:
                connection.execute("PRAGMA wal_autocheckpoint = 0")
                connection.execute("BEGIN IMMEDIATE")
                answer = do(connection)
                connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise InfraError(
                f"the database {self.path} could not be written: {error}",
                "see `pidispatch doctor`",
            ) from error
        return answer

    def replayable(self, job: str) -> Job:
        """A job that has ended and can be made again. Raises `ConfigError`."""
        _, record, _ = self.run(job)
        sql = "SELECT payload FROM jobs WHERE id = ?"
        found = msgspec.json.decode(self._rows(sql, job)[0][0], type=Job)
        if record is None:
            why = f"{job} has not ended"
            raise ConfigError(why, f"wait, or end it: `pidispatch cancel {job}`")
        if found.local:
            why = f"{job} ran in a folder; there is no item to read again"
            raise ConfigError(why, "pidispatch run FOLDER --task …")
        return found

    def replay(self, job: Job) -> str:
        """Queue the job once more, outside its window; returns its new id."""
        return self._write(lambda db: _replay(db, job, self.clock()))

    def published(self, job: str, request: Request | None) -> None:
        self._write(lambda db: _published(db, job, request, None))


_DUE_PENDING = """SELECT pending, attempts FROM deliveries
    WHERE state = 'pending' AND kind = ?1 AND (next_at <= ?2 OR next_at > ?2 + ?3)
    ORDER BY next_at LIMIT 50"""


def _replay(db: sqlite3.Connection, job: Job, now: float) -> str:
    """Its delivery row keeps the commits that its attempts share, as any set's.

    No target stands in it: an operator's replay is no delivery of the hour.
    """
    again = _again(db, job)
    sql = """INSERT INTO deliveries (id, kind, state, body_sha, received_at, event_at,
             target) VALUES (?1, ?2, 'admitted', ?1, ?3, ?3, '')"""
    db.execute(sql, (again.id, again.kind, now))
    _queue_job(db, again, now)
    return again.id


def _unwritten(error: sqlite3.Error) -> InfraError:
    why = f"the database could not be written: {error}"
    return InfraError(why, "see `pidispatch doctor`")


def _in_savepoint(
    connection: sqlite3.Connection, do: Callable[[sqlite3.Connection], Any]
) -> Any:
    connection.execute("SAVEPOINT one")
    try:
        answer = do(connection)
    except Exception as error:
        # the caller gets the error; the others' writes of this commit stand
        connection.execute("ROLLBACK TO one")
        answer = error
    connection.execute("RELEASE one")
    return answer


class Fenced(PidispatchError):
    """A late write under a claim that is no longer held; it changed nothing."""


def _one(db: sqlite3.Connection, sql: str, values: tuple[Any, ...]) -> None:
    if db.execute(sql, values).rowcount != 1:
        raise Fenced("the claim on this job was lost")


def _count(db: sqlite3.Connection, word: str) -> None:
    sql = """INSERT INTO counters (name, n) VALUES (?, 1)
             ON CONFLICT (name) DO UPDATE SET n = n + 1"""
    db.execute(sql, (word,))


def _admit(
    db: sqlite3.Connection, delivery: Delivery, jobs: Sequence[Job], hourly: int
) -> Admission:
    _remember(db, delivery)
    admission = _judged(db, delivery, jobs, hourly)
    _count(db, admission.status)
    return admission


def _judged(
    db: sqlite3.Connection, delivery: Delivery, jobs: Sequence[Job], hourly: int
) -> Admission:
    if _known(db, delivery):
        return Admission("duplicate")
    if any(_window_holds(db, job, delivery.when) for job in jobs):
        return Admission("coalesced")
    target = jobs[0].title
    if _acted_on(db, delivery.event, target):
        return Admission("duplicate")
    if hourly and _recent(db, jobs[0], delivery.received) >= hourly:
        _put_limited(db, jobs[0], delivery.received)
        return Admission("rate-limited")
    _put_delivery(db, delivery, target, "admitted", None)
    _remember_comment(db, delivery, target)
    for job in jobs:
        _put_job(db, job, delivery.when, delivery.received)
    return Admission("queued", tuple(job.id for job in jobs))


def _known(db: sqlite3.Connection, delivery: Delivery) -> bool:
    """Admitted before? A pending row of this very id is about to become that."""
    sql = """SELECT 1 FROM deliveries WHERE kind = ?1 AND
             ((id = ?2 AND state = 'admitted') OR (body_sha = ?3 AND id <> ?2))"""
    values = (delivery.event.forge, delivery.id, delivery.body_sha)
    return db.execute(sql, values).fetchone() is not None


def _acted_on(db: sqlite3.Connection, event: Event, target: str) -> bool:
    if event.comment_id is None:
        return False
    sql = "SELECT 1 FROM comments WHERE kind = ? AND target = ? AND comment = ?"
    values = (event.forge, target, event.comment_id)
    return db.execute(sql, values).fetchone() is not None


def _remember_comment(db: sqlite3.Connection, delivery: Delivery, target: str) -> None:
    event = delivery.event
    if event.comment_id is not None:
        values = (event.forge, target, event.comment_id, delivery.received)
        db.execute("INSERT OR IGNORE INTO comments VALUES (?, ?, ?, ?)", values)


def _window_holds(db: sqlite3.Connection, job: Job, when: float) -> bool:
    """Whether an admitted event of this key lies within ten minutes of `when`.

    Both ways, because a late poll or redelivery brings an older event's time. A
    window that a refused job freed holds for that very event still: it comes again
    when a webhook brought it and a poll finds it, or the other way round.
    """
    sql = """SELECT 1 FROM windows WHERE kind = ?1 AND key = ?2
             AND opened_at > ?3 - ?4 AND opened_at < ?3 + ?4 AND (NOT freed OR
             (abs(opened_at - ?3) <= 2 AND (instr(job_id, ?5) > 0) <> ?6))"""
    polled = job.trigger.delivery.startswith(POLLED)
    values = (job.kind, job.dedup, when, WINDOW_SECONDS, f"-{POLLED}", polled)
    return db.execute(sql, values).fetchone() is not None


def _recent(db: sqlite3.Connection, job: Job, now: float) -> int:
    # not those of a clock that was ahead: they would count until it is there again
    sql = """SELECT count(*) FROM deliveries WHERE target = ? AND kind = ?
             AND received_at BETWEEN ? AND ? AND state = 'admitted'"""
    values = (job.title, job.kind, now - 3600, now + 3600)
    n: int = db.execute(sql, values).fetchone()[0]
    return n


def _put_limited(db: sqlite3.Connection, job: Job, now: float) -> None:
    """Say on the target that it is limited, unless that was said within the hour."""
    sql = """INSERT OR IGNORE INTO limited (set_id, kind, target, at, payload)
             SELECT ?1, ?2, ?3, ?4, ?5 WHERE NOT EXISTS (SELECT 1 FROM limited
             WHERE target = ?3 AND kind = ?2 AND at BETWEEN ?4 - 3600 AND ?4 + 3600)"""
    payload = msgspec.json.encode(job.without_text()).decode()
    db.execute(sql, (job.set, job.kind, job.title, now, payload))


def _put_delivery(
    db: sqlite3.Connection,
    delivery: Delivery,
    target: str,
    state: str,
    pending: str | None,
) -> None:
    sql = """INSERT OR REPLACE INTO deliveries (id, kind, state, body_sha,
             received_at, event_at, target, pending, next_at)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"""
    values = (
        delivery.id,
        delivery.event.forge,
        state,
        delivery.body_sha,
        delivery.received,
        delivery.when,
        target,
        pending,
        delivery.received if pending else None,
    )
    db.execute(sql, values)


def _queue_job(db: sqlite3.Connection, job: Job, now: float) -> None:
    payload = msgspec.json.encode(job).decode()
    db.execute(
        """INSERT INTO jobs (id, set_id, state, payload, queued_at, scope)
           VALUES (?, ?, 'queued', ?, ?, ?)""",
        (job.id, job.set, payload, now, job.place),
    )


def _put_job(db: sqlite3.Connection, job: Job, when: float, now: float) -> None:
    _queue_job(db, job, now)
    db.execute(
        "INSERT INTO windows (kind, key, opened_at, job_id) VALUES (?, ?, ?, ?)",
        (job.kind, job.dedup, when, job.id),
    )


def _park(db: sqlite3.Connection, delivery: Delivery, pending: str) -> bool:
    sql = "SELECT 1 FROM deliveries WHERE kind = ? AND (id = ? OR body_sha = ?)"
    values = (delivery.event.forge, delivery.id, delivery.body_sha)
    if db.execute(sql, values).fetchone():
        return False
    _remember(db, delivery)
    _put_delivery(db, delivery, delivery.target, "pending", pending)
    return True


def _remember(db: sqlite3.Connection, delivery: Delivery) -> None:
    """Keep what labels the item has, unless a newer event has told."""
    if delivery.event.remember is None:
        return
    sql = """INSERT INTO label_memory (kind, target, labels, seen_at)
             VALUES (?, ?, ?, ?) ON CONFLICT (kind, target) DO UPDATE
             SET labels = excluded.labels, seen_at = excluded.seen_at
             WHERE excluded.seen_at >= label_memory.seen_at"""
    labels = json.dumps([label_digest(name) for name in delivery.event.remember])
    values = (delivery.event.forge, delivery.target, labels, delivery.when)
    db.execute(sql, values)


#: A cancelled job is taken at once, to be recorded, though nothing else starts. Each
#: scope is asked once, not each job; the plus keeps to the index of the queued.
_READY = """SELECT 1 WHERE EXISTS (
        SELECT 1 FROM jobs WHERE state = 'queued' AND cancel IS NOT NULL)
    OR NOT EXISTS (SELECT 1 FROM flags WHERE name = 'paused') AND EXISTS (
        SELECT 1 FROM jobs WHERE state = 'queued'
        AND (not_before <= ?1 OR not_before > ?1 + ?3)
        AND COALESCE(scope, '') NOT IN (
            SELECT waiting.scope FROM json_each(?2) AS held JOIN (
                SELECT DISTINCT +scope AS scope FROM jobs WHERE state = 'queued'
            ) AS waiting ON waiting.scope GLOB held.value))"""


def _held(db: sqlite3.Connection, limits: Limits, now: float) -> str:
    """The scopes in which nothing may start now: a JSON array of their globs."""
    held = [scope_pattern(scope) for scope in limits.paused(now)]
    held += [row.pattern for row in _full(db, limits)]
    return json.dumps(held)


def _full(db: sqlite3.Connection, limits: Limits) -> Iterator[ScopeRow]:
    """The scopes that have as many jobs at work as they may have at once."""
    sql = """SELECT count(*) FROM jobs WHERE scope GLOB ?
             AND state IN ('claimed', 'starting', 'running') AND state <> 'done'"""
    for row in limits.scopes:
        if row.concurrent is not None:
            at_work: int = db.execute(sql, (row.pattern,)).fetchone()[0]
            if at_work >= row.concurrent:
                yield row


def _holds_of(db: sqlite3.Connection, limits: Limits, now: float) -> list[Hold]:
    def waiting(scope: str) -> int:
        sql = "SELECT count(*) FROM jobs WHERE state = 'queued' AND scope GLOB ?"
        n: int = db.execute(sql, (scope_pattern(scope),)).fetchone()[0]
        return n

    return [
        *(
            Hold(scope, "pause-window", until, waiting(scope))
            for scope, until in limits.paused(now).items()
        ),
        *(
            Hold(row.scope, "concurrent", None, waiting(row.scope))
            for row in _full(db, limits)
        ),
    ]


#: The job `other` has the folder of `jobs` in hand, or one in it, or one around it.
_HOLDS_FOLDER = """other.state <> 'done' AND other.seq <> jobs.seq
    AND (instr(rtrim(jobs.scope, '/') || '/', rtrim(other.scope, '/') || '/') = 1
         OR instr(rtrim(other.scope, '/') || '/', rtrim(jobs.scope, '/') || '/') = 1)
    AND (other.state IN ('claimed', 'starting', 'running')
         OR other.state = 'queued' AND other.attempt > 0)"""


def _claim(
    db: sqlite3.Connection, held: str, now: float, only: str | None
) -> Claimed | None:
    """A folder is one job's from its claim to its record, a retry's wait included."""
    sql = f"""UPDATE jobs SET state = 'claimed', claim = ?1
             WHERE seq = (SELECT seq FROM jobs WHERE state = 'queued'
                 AND (?4 IS NULL OR id = ?4) AND (
                 cancel IS NOT NULL OR (
                     (not_before <= ?2 OR not_before > ?2 + ?5)
                     AND NOT EXISTS (SELECT 1 FROM json_each(?3) AS held
                                     WHERE jobs.scope GLOB held.value)
                     AND NOT EXISTS (SELECT 1 FROM flags WHERE name = 'paused')
                     AND NOT (scope GLOB 'local:*' AND EXISTS (
                         SELECT 1 FROM jobs AS other WHERE {_HOLDS_FOLDER}))))
                 ORDER BY seq LIMIT 1)
             RETURNING payload, claim, attempt, queued_at, deferrals"""
    values = (random_hex(8), now, held, only, WAIT_MAX)
    rows = db.execute(sql, values).fetchall()
    return _claimed_of(rows[0]) if rows else None


def _admit_local(db: sqlite3.Connection, job: Job, now: float) -> tuple[str, bool]:
    sql = """SELECT jobs.id, runs.record FROM jobs LEFT JOIN runs
             ON runs.job_id = jobs.id WHERE jobs.id = ? OR jobs.id LIKE ? || '-again%'
             ORDER BY jobs.seq DESC LIMIT 1"""
    last = db.execute(sql, (job.id, job.id)).fetchone()
    if last is None:
        _queue_job(db, job, now)
        return job.id, True
    record = (
        msgspec.json.decode(last["record"], type=Record) if last["record"] else None
    )
    if record is None or record.budgetReserved:
        return str(last["id"]), False
    again = _again(db, job)
    _queue_job(db, again, now)
    return again.id, True


def _again(db: sqlite3.Connection, job: Job) -> Job:
    """The job under the first free id of a replay; it is a set of its own."""
    for k in itertools.count(1):
        name = again_id(job.id, k)
        if not db.execute("SELECT 1 FROM jobs WHERE id = ?", (name,)).fetchone():
            return msgspec.structs.replace(job, id=name, set=name)
    raise AssertionError("unreachable")


def _schedules(
    db: sqlite3.Connection, wanted: Mapping[str, str], now: float
) -> dict[str, float]:
    kept = {row["id"]: row for row in db.execute("SELECT * FROM cron").fetchall()}
    for name in kept.keys() - wanted.keys():
        db.execute("DELETE FROM cron WHERE id = ?", (name,))
    seen: dict[str, float] = {}
    for name, schedule in wanted.items():
        row = kept.get(name)
        if row and row["schedule"] == schedule and row["seen_at"] <= now + DAY:
            seen[name] = row["seen_at"]
            continue
        db.execute(
            "INSERT OR REPLACE INTO cron (id, schedule, seen_at) VALUES (?, ?, ?)",
            (name, schedule, now),
        )
        seen[name] = now
    return seen


def _fire(db: sqlite3.Connection, cron: str, due: float, job: Job, now: float) -> bool:
    sql = "UPDATE cron SET seen_at = ? WHERE id = ? AND seen_at < ?"
    if db.execute(sql, (due, cron, due)).rowcount != 1:
        return False
    # by the index of what waits: its texts, of thousands perhaps, are not read
    sql = """SELECT 1 FROM jobs WHERE id = ?1 UNION ALL
             SELECT 1 FROM jobs WHERE state = 'queued' AND +scope GLOB 'local:*'
             AND attempt = 0 AND json_extract(payload, '$.trigger.type') = 'cron'
             AND json_extract(payload, '$.trigger.by') = ?2 LIMIT 1"""
    if db.execute(sql, (job.id, cron)).fetchone():
        _count(db, "coalesced")
        return False
    _queue_job(db, job, now)
    _count(db, "queued")
    return True


def _claimed_of(row: sqlite3.Row) -> Claimed:
    job = msgspec.json.decode(row["payload"], type=Job)
    return Claimed(
        job, row["claim"] or "", row["attempt"], row["queued_at"], row["deferrals"]
    )


def window_of(now: float, zone: str, span: Span) -> tuple[float, float]:
    """When the cap's present window began and when it ends, epoch seconds.

    Weeks start on Monday. Wall-clock midnight in `zone`, so that a day with a
    clock change has 23 or 25 hours.
    """
    from datetime import datetime, timedelta
    from zoneinfo import ZoneInfo

    local = datetime.fromtimestamp(now, ZoneInfo(zone))
    start = local.replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    days = 1
    if span == "week":
        start, days = start - timedelta(days=start.weekday()), 7
    elif span == "month":
        start = start.replace(day=1)
        days = ((start + timedelta(days=31)).replace(day=1) - start).days
    return start.timestamp(), (start + timedelta(days=days)).timestamp()


def _meter(db: sqlite3.Connection, cap: Cap, zone: str, now: float) -> Meter:
    since, ends = window_of(now, zone, cap.span)
    used = _USED[cap.unit](db, cap.scope, since)
    return Meter(cap.name, cap.unit, cap.span, used, cap.limit, cap.hold, ends)


def _slots_used(db: sqlite3.Connection, scope: str, since: float) -> int:
    """Slots taken since then; rows of a stepped-back clock's future count too."""
    sql = """SELECT count(*) FROM ledger WHERE reserved_at >= ?
             AND state <> 'released' AND COALESCE(scope, '') GLOB ?"""
    n: int = db.execute(sql, (since, scope)).fetchone()[0]
    return n


def _tokens_used(db: sqlite3.Connection, scope: str, since: float) -> int:
    """The gate's figures since then, and the reservations that have none yet."""
    sql = """SELECT COALESCE(sum(COALESCE(tokens, tokens_reserved)), 0) FROM ledger
             WHERE reserved_at >= ? AND state <> 'released'
             AND COALESCE(scope, '') GLOB ?"""
    n: int = db.execute(sql, (since, scope)).fetchone()[0]
    return n


_USED: Mapping[str, Callable[[sqlite3.Connection, str, float], int]] = {
    "jobs": _slots_used,
    "tokens": _tokens_used,
}


def _over(
    db: sqlite3.Connection, caps: Caps, place: str, tokens: int | None, now: float
) -> Over | None:
    """The first cap that one more job there would exceed; holds come last."""
    held = None
    for cap in caps.rows:
        if cap.limit is None or not in_scope(cap.scope, place):
            continue
        meter = _meter(db, cap, caps.zone, now)
        asked = (tokens or 1) if cap.unit == "tokens" else 1
        if meter.used + asked > cap.limit:
            return Over(cap.reason, meter, asked)
        if held is None and cap.hold is not None and meter.used + asked > cap.hold:
            held = Over("soft-hold", meter, asked)
    return held


def _start(
    db: sqlite3.Connection,
    claimed: Claimed,
    caps: Caps,
    tokens: int | None,
    now: float,
) -> Over | None:
    job = claimed.job
    over = _over(db, caps, job.place, tokens, now)
    if over:
        return over
    sql = """UPDATE jobs SET state = 'starting', attempt = attempt + 1, started_at = ?
             WHERE id = ? AND claim = ? AND state = 'claimed'"""
    _one(db, sql, (now, job.id, claimed.claim))
    db.execute(
        """INSERT INTO ledger (job_id, attempt, reserved_at, state, tokens_reserved,
           scope) VALUES (?, ?, ?, 'reserved', ?, ?)""",
        (job.id, claimed.attempt + 1, now, tokens, job.place),
    )
    return None


def _book(db: sqlite3.Connection, claimed: Claimed, tokens: Tokens | None) -> None:
    """Keep the present attempt's reservation, with the gate's own figures."""
    sql = """UPDATE ledger SET state = 'kept', tokens = ?, cost = ?
             WHERE job_id = ? AND state = 'reserved'"""
    total = tokens.total if tokens else None
    cost = tokens.cost if tokens else None
    db.execute(sql, (total, cost, claimed.job.id))


def _unbook(db: sqlite3.Connection, claimed: Claimed) -> None:
    sql = """UPDATE ledger SET state = 'released'
             WHERE job_id = ? AND state = 'reserved'"""
    db.execute(sql, (claimed.job.id,))


def _finish(
    db: sqlite3.Connection,
    claimed: Claimed,
    record: Record,
    notice: Notice | None,
    now: float,
) -> None:
    state = "publishing" if notice else "done"
    text = msgspec.json.encode(notice).decode() if notice else None
    payload = msgspec.json.encode(claimed.job.without_text()).decode()
    # the claim ends here: no later write of this attempt can queue the job again
    sql = """UPDATE jobs SET state = ?, notice = ?, ended_at = ?, not_before = 0,
             payload = ?, claim = NULL WHERE id = ? AND claim = ?"""
    values = (state, text, now, payload, claimed.job.id, claimed.claim)
    _one(db, sql, values)
    db.execute(
        """INSERT OR REPLACE INTO runs (job_id, set_id, ended_at, record)
           VALUES (?, ?, ?, ?)""",
        (claimed.job.id, claimed.job.set, now, msgspec.json.encode(record).decode()),
    )


def _notice_of(row: sqlite3.Row) -> tuple[Job, Workspace | None, Notice, int]:
    work = msgspec.json.decode(row["work"], type=Workspace) if row["work"] else None
    return (
        msgspec.json.decode(row["payload"], type=Job),
        work,
        msgspec.json.decode(row["notice"], type=Notice),
        row["publish_tries"],
    )


def _pushed(db: sqlite3.Connection, job: Job, tip: str, at: float) -> None:
    sql = "INSERT INTO pushes (kind, target, replica, tip, at) VALUES (?, ?, ?, ?, ?)"
    db.execute(sql, (job.kind, job.title, job.replica, tip, at))


def _published(
    db: sqlite3.Connection, job: str, request: Request | None, reason: str | None
) -> None:
    db.execute(
        "UPDATE jobs SET state = 'done', notice = NULL WHERE id = ?",
        (job,),
    )
    if reason:
        sql = (
            "UPDATE runs SET record = json_set(record, '$.reason', ?) WHERE job_id = ?"
        )
        db.execute(sql, (reason, job))
    if request:
        _opened(db, job, request)
    db.execute(_SIBLING_NOTICES, {"tell": job, "of": None})


def _opened(db: sqlite3.Connection, job: str, request: Request) -> None:
    link = msgspec.json.encode(request).decode()
    db.execute("UPDATE runs SET request = ? WHERE job_id = ?", (link, job))
    place = db.execute("SELECT scope FROM jobs WHERE id = ?", (job,)).fetchone()[0]
    _open_again(db, job, request_key(place, request.number))


def _open_again(db: sqlite3.Connection, job: str, key: str) -> None:
    """The run's request by which endings find it; what became of another before it
    says nothing of this one."""
    sql = """UPDATE runs SET record = json_set(record, '$.picked', NULL),
             ended_when = 0 WHERE job_id = ? AND request_key <> ?"""
    db.execute(sql, (job, key))
    db.execute("UPDATE runs SET request_key = ? WHERE job_id = ?", (key, job))


#: Tells the open requests of siblings of each that has ended: those of the runs with
#: the request `of`, or that of the run `tell`, which opened after others had ended.
_SIBLING_NOTICES = """INSERT OR IGNORE INTO sibling_notices (job_id, about, at)
    SELECT told.job_id, ended.job_id, CAST(round(ended.ended_when * 1000) AS INTEGER)
    FROM runs AS ended JOIN runs AS told
    ON told.set_id = ended.set_id AND told.job_id <> ended.job_id
    WHERE ended.set_id IN (SELECT set_id FROM runs WHERE request_key = :of
                           UNION SELECT set_id FROM runs WHERE job_id = :tell)
    AND (ended.request_key = :of OR told.job_id = :tell)
    AND told.request_key <> ended.request_key
    AND json_extract(ended.record, '$.picked') IS NOT NULL
    AND json_extract(told.record, '$.picked') IS NULL"""

_RUNS_OF_REQUEST = """SELECT job_id, json_extract(record, '$.picked') AS picked,
    ended_when FROM runs WHERE request_key = ?"""


def _note_ending(db: sqlite3.Connection, key: str, ending: Ending, at: float) -> bool:
    noted = [
        _note_of_run(db, run, ending, at)
        for run in db.execute(_RUNS_OF_REQUEST, (key,)).fetchall()
    ]
    if any(noted):
        db.execute(_SIBLING_NOTICES, {"of": key, "tell": None})
    return any(noted)


def _note_of_run(
    db: sqlite3.Connection, run: sqlite3.Row, ending: Ending, at: float
) -> bool:
    """A merge is final. Else the newest event counts, however late it comes.

    Forges tell whole seconds: what comes later of one second is taken as later.
    """
    picked = None if ending == "reopened" else ending
    late = picked != "merged" and at < int(run["ended_when"])
    if late or run["picked"] == "merged":
        return False
    job = run["job_id"]
    if run["picked"] == picked:
        sql = "UPDATE runs SET ended_when = max(ended_when, ?) WHERE job_id = ?"
        db.execute(sql, (at if picked is None else 0, job))
        return False
    db.execute("DELETE FROM sibling_notices WHERE about = ?", (job,))
    sql = """UPDATE runs SET record = json_set(record, '$.picked', ?), ended_when = ?
             WHERE job_id = ?"""
    db.execute(sql, (picked, max(at, run["ended_when"] + 0.001), job))
    return True


def _set_flag(db: sqlite3.Connection, name: str, value: str | None, at: float) -> None:
    if value is None:
        db.execute("DELETE FROM flags WHERE name = ?", (name,))
    else:
        db.execute("INSERT OR REPLACE INTO flags VALUES (?, ?, ?)", (name, value, at))


#: A set's delivery goes with the last of its jobs.
_DELETE_DELIVERY = """DELETE FROM deliveries WHERE id = ? AND state = 'admitted'
    AND NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.set_id = deliveries.id)"""


def _forget(db: sqlite3.Connection, before: float) -> None:
    # by job: their own times have no index, and the writer must not read all of them
    sql = """DELETE FROM jobs WHERE state = 'done' AND ended_at < ?
             RETURNING id, set_id"""
    gone = db.execute(sql, (before,)).fetchall()
    windows = "DELETE FROM windows WHERE job_id = ?"
    db.executemany(windows, [(row["id"],) for row in gone])
    db.executemany(_DELETE_DELIVERY, [(row["set_id"],) for row in gone])
    sql = """DELETE FROM runs WHERE ended_at < ? AND NOT EXISTS (
                 SELECT 1 FROM jobs WHERE id = job_id AND state <> 'done')"""
    db.execute(sql, (before,))
    db.execute("DELETE FROM comments WHERE at < ?", (before,))
    db.execute("DELETE FROM limited WHERE at < ?", (before,))
    db.execute(
        """DELETE FROM sibling_notices WHERE job_id NOT IN (SELECT id FROM jobs)
           OR about NOT IN (SELECT id FROM jobs)"""
    )
    # a month of 31 days may have an hour more, and its cap counts all of it
    db.execute("DELETE FROM ledger WHERE reserved_at < ?", (before - DAY,))
    db.execute("DELETE FROM label_memory WHERE seen_at < ?", (before,))


# =============================================================================
# prompts
#
# The Jinja environment and everything written for a reader: the agent's prompt,
# HARD_RULES, comments. Text from a forge is always a variable, never a template.
# Knows the typed values above and nothing of how they travel.
# =============================================================================


def fence(text: str) -> str:
    """Text inside a backtick fence that the text itself cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}text\n{text}\n{ticks}"


@functools.cache
def _environment() -> Any:
    from jinja2 import FileSystemLoader, StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(
        loader=FileSystemLoader(str(resource("templates"))),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # Markdown for an agent and for comments, not HTML
    )
    environment.filters["fence"] = fence
    return environment


def render(name: str, **values: Any) -> str:
    """One template of templates/ with its values; an unknown name is an error."""
    text: str = _environment().get_template(name).render(values)
    return text


def hard_rules() -> str:
    """HARD_RULES.md: byte-identical for every job of a build."""
    return render("HARD_RULES.md.j2", sentinel=HARD_RULES_SENTINEL)


def prompt_text(job: Job, publish: str) -> str:
    """The user turn of a job; forge text stands only in the data region below."""
    if job.local:
        return render("prompt-local.md.j2", job=job)
    return _prompt("prompt.md.j2", job, publish)


def resumed_prompt(job: Job, publish: str) -> str:
    """The user turn that continues an earlier run's conversation: short, and enough
    to go by where that conversation does not tell."""
    return _prompt("prompt-resumed.md.j2", job, publish)


def _prompt(template: str, job: Job, publish: str) -> str:
    return render(
        template,
        job=job,
        forge=FORGES[job.kind],
        publish=publish,
        branch=job.branch,
        marker=title_marker(job.replica, job.replicas),
        sibling_branches=sibling_branches(job),
    )


def sibling_branches(job: Job) -> tuple[str, ...]:
    """The branches of the other replicas; empty for a plain job or a request."""
    if job.target.type != "issue":
        return ()
    indices = siblings(job.replica, job.replicas)
    return tuple(branch_name(job.target.number, i) for i in indices)


def event_json(job: Job) -> bytes:
    """What the agent may read about the event; no replica fact, image or secret."""
    if job.local:
        told = {"event": job.trigger.event, "folder": job.repo, "task": job.run.task}
        return json.dumps(told, ensure_ascii=False, indent=2).encode() + b"\n"
    event: dict[str, Any] = {
        "event": job.trigger.event,
        "action": job.trigger.action,
        "delivery": job.trigger.delivery,
        "repository": job.repo,
        "item": msgspec.to_builtins(job.target),
        "sender": {"id": job.trigger.sender},
        "rule": {"index": job.trigger.index, "type": job.trigger.type},
    }
    if job.comment is not None:
        event["comment"] = {"body": job.comment}
    if job.review is not None:
        event["review"] = {"body": job.review}
    return json.dumps(event, ensure_ascii=False, indent=2).encode() + b"\n"


def shipped_skill(flow: str) -> dict[str, bytes] | None:
    """Our own flow of that name, for repositories that have none."""
    folder = resource("templates", "flows", flow)
    if flow not in SHIPPED_FLOWS or not folder.is_dir():
        return None
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# =============================================================================
# box
#
# The engine: one internal network, one gate and one job container a job, all of
# them labelled and none of them trusted. What goes in is a tar of inputs and one
# line for the gate; what comes out is an exit code, the gate's meter and three
# files. Knows nothing of forges or SQL.
# =============================================================================

CATALOGUE_PATH = "/opt/pi-dispatch/models.json"
GATE_MEMORY = "256m"
STOP_GRACE_SECONDS = 10
#: How long any answer of the engine may take.
ENGINE_SECONDS = 60
#: And how long its answer to being asked whether it is there: who stops us waits too.
ANSWER_SECONDS = 5
BUNDLE_MAX_BYTES = 256 * 1024 * 1024
TEXT_MAX_BYTES = 64 * 1024
SESSION_MAX_BYTES = 8 * 1024 * 1024
TRANSCRIPT_FILE = "session.jsonl"
LOG_MAX_BYTES = 5 * 1024 * 1024
_SUBNET_BITS = 28
#: The network, the broadcast and the bridge itself have addresses that no gate gets.
_NO_GATES = 3


class Image(msgspec.Struct, frozen=True):
    """What an image says of itself. `catalogue` maps provider to its models."""

    tag: str
    id: str
    labels: Mapping[str, str]
    uid: int
    gid: int

    @property
    def forges(self) -> frozenset[str] | None:
        """The forges label: an exclusion list; None (absent) allows every forge."""
        label = self.labels.get(LABEL + "forges")
        return None if label is None else _tokens(label)

    @property
    def capabilities(self) -> frozenset[str]:
        """The capabilities label: an inclusion list; absent or blank is nothing."""
        return _tokens(self.labels.get(LABEL + "capabilities", ""))


def _tokens(label: str) -> frozenset[str]:
    return frozenset(word for word in re.split(r"[,\s]+", label) if word)


class BoxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that the three engine objects of one attempt are made from.

    `folder` is a local job's own: it becomes /workspace, the one bind mount there
    is, and `image` then carries the folder owner's uid and gid.
    """

    job: str
    attempt: int
    image: Image
    gate_image: Image
    gate_line: bytes  # none: no gate is started
    environment: Mapping[str, str]
    loopback: bool = False
    folder: Path | None = None
    command: tuple[str, ...] = ()  # runs instead of the image's entrypoint


#: A count that a box may state: SQLite and JSON readers can hold it.
_BoxCount = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Result(msgspec.Struct, frozen=True):
    """The runner's last line. Telemetry only; the exit code classifies."""

    code: int
    reason: str | None = None
    turns: _BoxCount | None = None
    commits: _BoxCount = 0


class BoxExit(msgspec.Struct, frozen=True, kw_only=True):
    """What a box left behind. `tokens` and `forks` are the gate's own count.

    `code` is None when the container is gone and nobody can say how it ended.
    `metered` is whether the gate's log was there: without a call in it the count
    is zero, and without it nobody knows.
    """

    code: int | None
    oom: bool = False
    result: Result | None = None
    tokens: Tokens | None = None
    metered: bool = False
    forks: Forks | None = None
    budget_spent: bool = False
    bundle: Path | None = None
    review_request: str | None = None
    comment: str | None = None
    outbox_refused: bool = False

    @property
    def bill(self) -> Tokens | None:
        """What the day's tokens are charged; None lets the reservation stand."""
        return self.tokens or (Tokens() if self.metered else None)


class Box(Protocol):
    """One attempt's engine objects, from the opened network to their removal."""

    def start(self, inputs: Mapping[str, bytes | Path]) -> None: ...

    def started(self) -> bool: ...

    def wait(self, seconds: int) -> bool: ...

    def tend(self) -> bool: ...

    def stop(self) -> None: ...

    def collect(self, into: Path) -> BoxExit: ...

    def transcript(self) -> bytes | None: ...

    def given(self) -> bytes | None: ...

    def log(self) -> bytes: ...

    def remove(self) -> None: ...


class Engine(Protocol):
    """What dispatch asks of the engine; the demo brings one without Docker."""

    def answer(self) -> None: ...

    @property
    def local(self) -> bool: ...

    def image(self, tag: str) -> Image | None: ...

    def catalogue(self, image: Image) -> Mapping[str, Any]: ...

    def open(self, spec: BoxSpec) -> Box: ...

    def adopt(self, job: str) -> Box | None: ...

    def sweep(self, keep: frozenset[str], before: float) -> int: ...

    def tail(self, job: str, lines: int) -> list[str]: ...

    def isolates(self, proven: str | None) -> str | None: ...

    def disk(self) -> Path | None: ...


class _ForkSum(msgspec.Struct, frozen=True):
    total: _BoxCount
    cost: float | None = None


class _GateSum(msgspec.Struct, frozen=True):
    """The running totals in a gate's line about a call."""

    input: _BoxCount
    output: _BoxCount
    cacheRead: _BoxCount
    cacheWrite: _BoxCount
    total: _BoxCount
    forks: dict[str, _ForkSum]
    cost: float | None = None


def meter_of(lines: Iterable[str]) -> tuple[Tokens | None, Forks | None, bool]:
    """The gate's running totals, its forks, and whether the budget was spent.

    Totals run within one life of the gate, so only a life's last call counts and
    a rotated log loses nothing; a gate that was started again adds its own.
    """
    lives: list[_GateSum | None] = [None]
    spent = False
    for line in lines:
        event = _json_line(line)
        if event.get("event") == "listening":
            lives.append(None)
        if event.get("event") == "call":
            with contextlib.suppress(msgspec.ValidationError):  # as a torn line
                lives[-1] = msgspec.convert(event.get("sum"), _GateSum)
        spent = spent or (
            event.get("event") == "refused" and event.get("reason") == "budget"
        )
    totals = [life for life in lives if life]
    if not totals:
        return None, None, spent
    return _tokens_of(totals), _forks_of(totals), spent


def _tokens_of(totals: Sequence[_GateSum]) -> Tokens:
    counts = ("input", "output", "cacheRead", "cacheWrite", "total")
    sums = {name: sum(getattr(it, name) for it in totals) for name in counts}
    return Tokens(**sums, cost=_cost_of(totals))


def _forks_of(totals: Sequence[_GateSum]) -> Forks:
    rows = [row for life in totals for row in life.forks.values()]
    return Forks(len(rows), sum(row.total for row in rows), _cost_of(rows))


def _cost_of(rows: Sequence[_GateSum | _ForkSum]) -> float | None:
    """The sum, None when any of it had no price: never too low."""
    known = [row.cost for row in rows if row.cost is not None]
    return sum(known) if known and len(known) == len(rows) else None


def result_of(lines: Sequence[str]) -> Result | None:
    """The runner's exit line: the last line that is one, or None."""
    for line in reversed(lines):
        event = _json_line(line)
        if event.get("event") == "exit":
            try:
                return msgspec.convert(event, Result)
            except msgspec.ValidationError:
                return None
    return None


def _json_line(line: str) -> dict[str, Any]:
    """The object in a line, or an empty one. `json` would let pass what no record
    can hold: NaN, and half a surrogate pair."""
    try:
        value = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def tar_of(files: Mapping[str, bytes | Path]) -> IO[bytes]:
    """A tar of root-owned 0444 files (and their directories), spooled to disk."""
    import io
    import tarfile
    import tempfile

    spool: IO[bytes] = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - the caller's
        max_size=32 * 1024 * 1024
    )
    with tarfile.open(fileobj=spool, mode="w") as tar:
        for folder in sorted({str(p) for name in files for p in _folders(name)}):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.mode = 0o444
            if isinstance(content, bytes):
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
            else:
                entry.size = content.stat().st_size
                with content.open("rb") as source:
                    tar.addfile(entry, source)
    spool.seek(0)
    return spool


def _folders(name: str) -> Iterator[PurePosixPath]:
    return (p for p in PurePosixPath(name).parents if str(p) != ".")


@contextlib.contextmanager
def engine_answers() -> Iterator[None]:
    """Turns the SDK's many ways of saying that the engine is away into one."""
    import docker
    import requests

    try:
        yield
    except (
        docker.errors.DockerException,
        requests.exceptions.RequestException,
        OSError,
    ) as error:
        raise InfraError(f"the engine does not answer: {error}") from error


class DockerEngine:
    """The Docker Engine named by DOCKER_HOST, else the local socket.

    One SDK client a thread (a requests session promises no thread-safety).
    `instance` labels all that is ours, so that two databases on one engine never
    touch each other's objects.
    """

    def __init__(self, settings: Settings, instance: str) -> None:
        self.settings, self.instance = settings, instance
        self._local = threading.local()
        self._catalogues: dict[str, Mapping[str, Any]] = {}
        self._cpus: int | None = None
        self._disk: Path | None = None
        self._next_subnet = int(random_hex(3), 16)  # addresses into the pool

    @property
    def api(self) -> docker.APIClient:
        """This thread's client. Raises `InfraError` when no engine answers."""
        import docker

        client: docker.APIClient | None = getattr(self._local, "api", None)
        if client is None:
            try:
                # use_context: never a remote engine that only the CLI was told of
                client = docker.from_env(use_context=False, timeout=ENGINE_SECONDS).api
            except (docker.errors.DockerException, OSError, ValueError) as error:
                raise InfraError(
                    f"no Docker Engine answers: {error}",
                    "start the Docker Engine, or correct DOCKER_HOST",
                ) from error
            self._local.api = client
        return client

    def hang_up(self) -> None:
        """Close the client of a thread that ends: its sockets lie in a cycle, and would
        stay open until the collector comes by."""
        if client := getattr(self._local, "api", None):
            client.close()
            del self._local.api

    @property
    def endpoint(self) -> str:
        """Where the engine is asked; contexts of the CLI count for nothing."""
        return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"

    def answer(self) -> None:
        """Raises `InfraError` when it does not, within `ANSWER_SECONDS`."""
        with engine_answers(), self._patience(ANSWER_SECONDS):
            self.api.ping()

    @contextlib.contextmanager
    def _patience(self, seconds: int) -> Iterator[None]:
        """This thread waits that long for an answer."""
        usual, self.api.timeout = self.api.timeout, seconds
        try:
            yield
        finally:
            self.api.timeout = usual

    @property
    def local(self) -> bool:
        """Whether it is reached by a socket of this machine, so that it may see the
        same folders; over TCP or ssh it is another one for all we know."""
        return self.endpoint.startswith(_LOCAL_ENGINES)

    @property
    def cpus(self) -> int:
        if self._cpus is None:
            engine = int(self.api.info().get("NCPU") or 1)
            self._cpus = min(self.settings.job_cpus, engine)
        return self._cpus

    def labels(self, job: str, attempt: int, role: str) -> dict[str, str]:
        return {
            LABEL + "instance": self.instance,
            LABEL + "job": job,
            LABEL + "attempt": str(attempt),
            LABEL + "role": role,
        }

    def image(self, tag: str) -> Image | None:
        """The local image of that tag, or None; nothing is ever pulled."""
        import docker

        try:
            facts = self.api.inspect_image(tag)  # type: ignore[no-untyped-call]
        except docker.errors.ImageNotFound:
            return None
        except (docker.errors.DockerException, OSError) as error:
            raise InfraError(
                f"the engine could not inspect {tag}: {error}",
                "check the image's name and the engine",
            ) from error
        config = facts.get("Config") or {}
        uid, _, gid = str(config.get("User") or "").partition(":")
        labels = config.get("Labels") or {}
        kept = uid.isdigit() and int(uid) > 0  # never root
        user = int(uid) if kept else 1001
        return Image(
            tag, facts["Id"], labels, user, int(gid) if kept and gid.isdigit() else user
        )

    def catalogue(self, image: Image) -> Mapping[str, Any]:
        """Pi's models and prices as the image exports them; read once an image.

        Read from a container that is created and never started.
        """
        if image.id not in self._catalogues:
            with engine_answers():
                self._catalogues[image.id] = self._read_catalogue(image)
        return self._catalogues[image.id]

    def _read_catalogue(self, image: Image) -> Mapping[str, Any]:
        labels = self.labels("catalogue", 0, "catalogue")
        made = self.api.create_container(image.id, labels=labels, network_disabled=True)
        try:
            content = self.read_file(made["Id"], CATALOGUE_PATH, 16 * 1024 * 1024)
            catalogue = json.loads(content or b"{}")
        except (Refused, ValueError):
            catalogue = {}  # an image without a catalogue knows no models
        finally:
            self.api.remove_container(made["Id"], force=True, v=True)
        return catalogue if isinstance(catalogue, dict) else {}

    def read_file(self, container: str, path: str, limit: int) -> bytes | None:
        """One regular file of a container, at most `limit` bytes; None if absent.

        Raises `Refused("outbox-refused")` for a link, a directory or more bytes:
        the engine archives a link as itself, so nothing is ever followed.
        """
        import docker

        try:
            stream, facts = self.api.get_archive(container, path)
        except docker.errors.NotFound:
            return None
        name = path.rsplit("/", 1)[-1]
        with contextlib.closing(stream):
            if facts.get("size", 0) > limit or facts.get("linkTarget"):
                raise Refused("outbox-refused", f"{name} is a link or too large")
            content = _untar_one(stream, limit)
        if content is None:
            raise Refused("outbox-refused", f"{name} is not a regular file")
        return content

    def open(self, spec: BoxSpec) -> Box:
        return DockerBox.opened(self, spec)

    def adopt(self, job: str) -> Box | None:
        """The box of a job that an earlier process started, if it still exists."""
        found = self._list({"job": job, "role": "job"})
        if not found:
            return None
        attempt = int(found[0]["Labels"].get(LABEL + "attempt", "1"))
        box = DockerBox(self, job, attempt)
        return box if box.started() else None

    def _list(self, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        wanted = {"instance": self.instance, **labels}
        filters = {"label": [f"{LABEL}{k}={v}" for k, v in wanted.items()]}
        found: list[dict[str, Any]] = self.api.containers(all=True, filters=filters)
        return found

    def sweep(self, keep: frozenset[str], before: float = float("inf")) -> int:
        """Remove this instance's objects of jobs that are not in `keep`, if one of a
        job's was made before that time, seconds; returns how many jobs."""
        filters = {"label": f"{LABEL}instance={self.instance}"}
        with engine_answers():
            rows = (
                *self.api.containers(all=True, filters=filters),
                *self.api.networks(filters=filters),
                *(self.api.volumes(filters=filters)["Volumes"] or ()),
            )
            old = (row for row in rows if _made_at(row) < before)
            stale = {(r.get("Labels") or {}).get(LABEL + "job", "") for r in old} - keep
            return sum(map(self._gone, stale))

    def _gone(self, job: str) -> bool:
        """Whether nothing is left of it; what the engine keeps holds up no other."""
        import docker

        try:
            self.remove_job(job)
        except docker.errors.APIError as error:
            log_event("not-removed", logging.WARNING, job=job, error=str(error))
            return False
        return True

    def stale(self, keep: frozenset[str], before: float) -> list[str]:
        """Jobs not in `keep` that have a container from before that time, seconds."""
        old = (row for row in self._list({}) if row["Created"] < before)
        return sorted({row["Labels"].get(LABEL + "job", "") for row in old} - keep)

    def isolates(self, proven: str | None) -> str | None:
        """What proves that no box reaches the engine's host; None: one does.

        One look an engine and version is enough: `proven` is what an earlier call
        returned. Raises `InfraError` when it could not be seen.
        """
        with engine_answers():
            facts = self.api.info()
        this = f"{facts.get('ID')} {facts.get('ServerVersion')}"
        if this == proven:
            return this
        image = self.image(self.settings.gate_image)
        if image is None:
            raise InfraError("there is no gate image to look at the engine with")
        return None if canary(self, image).host else this

    def disk(self) -> Path | None:
        """Where the engine keeps volumes and logs, if that is a disk of this machine.

        Neither has a quota, so a job can fill it.
        """
        if self._disk is None:
            with engine_answers():
                self._disk = Path(self.api.info().get("DockerRootDir") or "/nowhere")
        here = self.endpoint.startswith("unix:") and self._disk.is_dir()
        return self._disk if here else None

    def host_addresses(self, subnet: IPv4Network) -> list[str]:
        """Where a container may find the engine's host: its bridge, the usual one."""
        import docker

        rows: list[Mapping[str, str]] = []
        with contextlib.suppress(docker.errors.NotFound):  # Podman has none
            rows = self.api.inspect_network("bridge")["IPAM"]["Config"]
        known = [row["Gateway"] for row in rows if row.get("Gateway")]
        return [str(subnet[1]), *known]

    def remove_job(self, job: str) -> None:
        """Remove every container, network and volume of one job; idempotent.

        When the engine refuses to remove one, its error is raised after the others.
        """
        import docker

        refused: Exception | None = None
        for remove in self._removals(job):
            try:
                remove()
            except docker.errors.NotFound:
                pass
            except docker.errors.APIError as error:
                refused = error
        if refused:
            raise refused

    def _removals(self, job: str) -> Iterator[Callable[[], object]]:
        """In the order in which the engine lets go of them."""
        labels = [f"{LABEL}instance={self.instance}", f"{LABEL}job={job}"]
        filters, api = {"label": labels}, self.api
        for row in api.containers(all=True, filters=filters):
            yield functools.partial(api.remove_container, row["Id"], force=True, v=True)
        for network in api.networks(filters=filters):
            yield functools.partial(api.remove_network, network["Id"])
        for volume in api.volumes(filters=filters)["Volumes"] or ():
            yield functools.partial(api.remove_volume, volume["Name"], force=True)

    def outer_network(self) -> str:
        """The id of the gates' way out; icc off, else gates could reach another.

        By id: an engine lets two processes create one name at the same moment.
        """
        with _OUTER_LOCK:
            found = self._outer_networks()
            return str(found[0]["Id"]) if found else self._create_outer()

    def _outer_networks(self) -> list[dict[str, Any]]:
        found = self.api.networks(names=[OUTER_NETWORK])
        exact = [row for row in found if row["Name"] == OUTER_NETWORK]
        return sorted(exact, key=lambda row: str(row["Id"]))

    def misfit(self) -> IPv4Network | None:
        """Where gates share a network that an earlier version or another
        PI_NETWORK_POOL left, which may be too small. In use it cannot be removed."""
        pool = self._pool
        for row in self._outer_networks()[:1]:
            for subnet in _subnets_of(row):
                ours = (row.get("Labels") or {}).get(LABEL + "role") == "outer"
                wide = subnet.prefixlen <= _outer_bits(pool)
                if ours and not (wide and subnet.subnet_of(pool)):
                    return subnet
        return None

    def _create_outer(self) -> str:
        sizes = range(_outer_bits(self._pool), _SUBNET_BITS + 1)
        made, _ = self._create_network(
            OUTER_NETWORK,
            itertools.chain.from_iterable(map(self._subnets, sizes)),
            options={"com.docker.network.bridge.enable_icc": "false"},
            labels={LABEL + "role": "outer"},
        )
        return str(made["Id"])

    def log_lines(
        self, container: str, *, follow: bool, tail: int | None = None
    ) -> Iterator[str]:
        """The stdout of a running box, line by line; `tail` lines of it, or all."""
        import docker

        try:
            stream = self.api.logs(
                container,
                stderr=False,
                stream=True,
                follow=follow,
                tail="all" if tail is None else tail,
            )
        except docker.errors.NotFound as error:
            raise InfraError(f"{container} is gone", "see `pidispatch show`") from error
        rest = b""
        for chunk in stream:  # chunks are not lines
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in lines)
        if rest:
            yield rest.decode("utf-8", "replace")

    def tail(self, job: str, lines: int) -> list[str]:
        """The newest lines of a running box, none when it is not there."""
        container = container_name(job)
        try:
            return [*self.log_lines(container, follow=False, tail=lines)]
        except InfraError:
            return []

    @property
    def _pool(self) -> IPv4Network:
        from ipaddress import IPv4Network

        return IPv4Network(self.settings.network_pool)

    def _subnets(self, bits: int = _SUBNET_BITS) -> Iterator[IPv4Network]:
        """Those of PI_NETWORK_POOL, from the next on, that seem to be free."""
        from ipaddress import IPv4Network

        pool, taken, size = self._pool, self._taken(), 1 << (32 - bits)
        for _ in range(pool.num_addresses // size):
            self._next_subnet = (self._next_subnet // size + 1) * size
            self._next_subnet %= pool.num_addresses
            address = int(pool.network_address) + self._next_subnet
            subnet = IPv4Network((address, bits))
            if not any(map(subnet.overlaps, taken)):
                yield subnet

    def _taken(self) -> list[IPv4Network]:
        """What the engine's networks hold of the pool, and what the machine routes
        elsewhere, of which the engine knows nothing."""
        from ipaddress import collapse_addresses

        found = set(routes_within(self._pool)) if self.local else set()
        for row in self.api.networks():
            found.update(_subnets_of(row))
        return [net for net in collapse_addresses(found) if net.overlaps(self._pool)]

    def job_room(self) -> int:
        """How many jobs PI_NETWORK_POOL has room for at a time: beside what the
        engine's networks and routes hold, a /28 for each, and an address for its
        gate on the way out."""
        outer, free = self._outer_networks(), self.free_subnets()
        if outer:
            gates = max(map(_addresses, _subnets_of(outer[0])), default=free)
        else:  # it will be made
            bits = _outer_bits(self._pool)
            free, gates = free - (1 << (_SUBNET_BITS - bits)), 1 << (32 - bits)
        return max(0, min(free, gates - _NO_GATES))

    def free_subnets(self) -> int:
        """How many /28s of PI_NETWORK_POOL the engine's networks and routes leave."""
        pool, size = self._pool, 1 << (32 - _SUBNET_BITS)
        taken = sum(
            max(1, min(other, pool, key=_addresses).num_addresses // size)
            for other in self._taken()
        )
        return max(0, pool.num_addresses // size - taken)

    def create_job_network(self, name: str, labels: Mapping[str, str]) -> IPv4Network:
        """The job's own network; isolated from the host unless PI_EGRESS=0.

        `internal` alone leaves host services reachable through the bridge's
        address; inhibit_ipv4 takes that address away.
        """
        options = {"com.docker.network.bridge.inhibit_ipv4": "true"}
        made, subnet = self._create_network(
            name,
            self._subnets(),
            internal=self.settings.isolated,
            options=options if self.settings.isolated else {},
            labels=dict(labels),
        )
        if "inhibit_ipv4" in str(made.get("Warning") or ""):
            self.api.remove_network(made["Id"])
            raise Refused("engine-not-isolating", *NOT_ISOLATING)
        return subnet

    def _create_network(
        self, name: str, subnets: Iterable[IPv4Network], **how: Any
    ) -> tuple[dict[str, Any], IPv4Network]:
        """What the engine answers, and the first of those subnets that was free."""
        import docker

        for subnet in subnets:
            try:
                made = self.api.create_network(
                    name,
                    driver="bridge",
                    check_duplicate=True,
                    ipam=_ipam(subnet),
                    **how,
                )
            except docker.errors.APIError as error:
                if "overlap" not in str(error).lower():
                    raise
            else:
                return made, subnet
        raise InfraError("no free /28 in PI_NETWORK_POOL", "name a larger range")


#: The IPv4 routes of a Linux machine (proc(5)): hexadecimal in its own byte order.
ROUTES = Path("/proc/net/route")


def routes_within(pool: IPv4Network) -> Iterator[IPv4Network]:
    """Parts of a range that this machine routes somewhere, if it tells.

    A box there never reaches its gate: the bridges of an engine that was killed
    stay, and so do its rules that rewrite what comes from them. A route for all of
    the range, a VPN's perhaps, leaves no choice and does no harm.
    """
    from ipaddress import IPv4Network

    with contextlib.suppress(OSError):
        for line in ROUTES.read_text("utf-8", "replace").splitlines()[1:]:
            address, mask = (
                int.from_bytes(int(word, 16).to_bytes(4, sys.byteorder), "big")
                for word in (line.split()[1], line.split()[7])
            )
            route = IPv4Network((address, mask.bit_count()))
            if route != pool and route.subnet_of(pool):
                yield route


#: How the address of an engine on this machine begins.
_LOCAL_ENGINES = ("unix:", "http+unix:", "npipe:")
#: What is wrong with an engine that leaves its host reachable, and what to do.
NOT_ISOLATING = (
    "this engine does not keep a job from its host's own services: it ignores the "
    "network option inhibit_ipv4",
    "use a Docker Engine that knows it, or accept it with PI_EGRESS=0",
)

#: One creation at a time in this process.
_OUTER_LOCK = threading.Lock()


def _addresses(network: IPv4Network) -> int:
    return network.num_addresses


def _outer_bits(pool: IPv4Network) -> int:
    """Of the gates' way out: an address for each /28 of the pool, as far as a Linux
    bridge has ports (1023, BR_MAX_PORTS)."""
    return min(_SUBNET_BITS, max(22, pool.prefixlen + 4))


def _subnets_of(network: Mapping[str, Any]) -> Iterator[IPv4Network]:
    """The IPv4 ranges of a listed network."""
    from ipaddress import IPv4Network

    for config in (network.get("IPAM") or {}).get("Config") or ():
        if ":" not in (config.get("Subnet") or ":"):  # IPv6, or none
            yield IPv4Network(config["Subnet"], strict=False)


def _made_at(row: Mapping[str, Any]) -> float:
    """When a listed container, network or volume was made, seconds."""
    from datetime import datetime

    made = row.get("Created") or row.get("CreatedAt") or 0
    if isinstance(made, str):
        return datetime.fromisoformat(made).timestamp()
    return float(made)


def _ipam(subnet: IPv4Network) -> Any:
    from docker.types import IPAMConfig, IPAMPool

    return IPAMConfig(pool_configs=[IPAMPool(subnet=str(subnet))])


def _untar_one(stream: Iterable[bytes], limit: int) -> bytes | None:
    """The content of the one regular file of a tar stream, else None."""
    import io
    import tarfile

    spool = io.BytesIO()
    for chunk in stream:
        spool.write(chunk)
        if spool.tell() > limit + 64 * 1024:
            return None
    spool.seek(0)
    try:
        with tarfile.open(fileobj=spool) as tar:
            entry = tar.next()
            if entry is None or not entry.isreg() or entry.size > limit:
                return None
            source = tar.extractfile(entry)
            return source.read() if source else None
    except tarfile.TarError:
        return None


class DockerBox:
    """One attempt on a Docker Engine. The gate starts while the host prepares."""

    def __init__(self, engine: DockerEngine, job: str, attempt: int) -> None:
        self.engine, self.job, self.attempt = engine, job, attempt
        self.name, self.gate = container_name(job), gate_name(job)
        self._gate_thread: threading.Thread | None = None
        self._gate_error: Exception | None = None
        self._restarted = False
        self.spec: BoxSpec | None = None

    @classmethod
    def opened(cls, engine: DockerEngine, spec: BoxSpec) -> DockerBox:
        """Create the network, and the gate in a thread beside what comes next."""
        import docker

        box = cls(engine, spec.job, spec.attempt)
        box.spec = spec
        with engine_answers():
            if spec.attempt > 1:
                engine.remove_job(spec.job)  # what the earlier attempt left
            try:
                box._open_network()
            except docker.errors.APIError as error:
                if error.status_code != 409:
                    raise
                engine.remove_job(spec.job)  # ours, if it is ours; never another's
                box._open_network()
        if spec.gate_line:
            box._gate_thread = threading.Thread(target=box._open_gate, daemon=True)
            box._gate_thread.start()
        return box

    def _open_network(self) -> None:
        self.outer = self.engine.outer_network()
        labels = self.engine.labels(self.job, self.attempt, "network")
        self.subnet = self.engine.create_job_network(network_name(self.job), labels)

    subnet: IPv4Network
    outer: str

    @property
    def gate_address(self) -> str:
        return str(self.subnet[2])

    def _open_gate(self) -> None:
        try:
            self.start_gate()
        except Exception as error:  # raised again in the job's own thread
            self._gate_error = error
        finally:
            self.engine.hang_up()

    def start_gate(self) -> None:
        """Create on the outer network, connect to the job's, start, say the line.

        The outer network comes first: it must own the default route.
        """
        assert self.spec
        api, spec, network = self.engine.api, self.spec, network_name(self.job)
        api.create_container(
            spec.gate_image.id,
            name=self.gate,
            entrypoint=["python3", "-I", "/opt/pi-dispatch/gate.py"],
            command=["--host", "0.0.0.0", "--port", str(GATE_PORT)],
            user=f"{spec.gate_image.uid}:{spec.gate_image.gid}",
            stdin_open=True,
            labels=self.engine.labels(self.job, self.attempt, "gate"),
            use_config_proxy=False,
            host_config=self._gate_host_config(),
            environment={"PYTHONUNBUFFERED": "1"},
        )
        address = self.gate_address
        api.connect_container_to_network(
            self.gate, network, ipv4_address=address, aliases=["gate"]
        )
        if self.engine.settings.gate_network:
            api.connect_container_to_network(
                self.gate, self.engine.settings.gate_network
            )
        self._speak(spec.gate_line)

    def _speak(self, line: bytes) -> None:
        """Start the gate; attached before, so that the line is what it reads first."""
        api = self.engine.api
        socket = api.attach_socket(self.gate, {"stdin": 1, "stream": 1})
        try:
            api.start(self.gate)
            _send(socket, line + b"\n")
        finally:
            # the SDK hangs the answer to the socket, which alone closes both
            getattr(socket, "_response", socket).close()

    def tend(self) -> bool:
        """Whether the gate stands; one that died is started again, once.

        It is told what was spent before. An adopted box knows no line to say, so
        there a dead gate is lost at once.
        """
        with engine_answers():
            if self._running(self.gate):
                return True
            if self.spec is None or self._restarted:
                return False
            self._restarted = True
            tokens, _, _ = meter_of(self._lines(self.gate, "all"))
            terms = json.loads(self.spec.gate_line)
            terms["spent"] = tokens.total if tokens else 0
            self._speak(json.dumps(terms).encode())
        log_event("gate-restarted", logging.WARNING, job=self.job)
        return True

    def _running(self, container: str) -> bool:
        import docker

        try:
            return bool(
                self.engine.api.inspect_container(container)["State"]["Running"]
            )
        except docker.errors.NotFound:
            return False

    def _gate_host_config(self) -> Any:
        assert self.spec
        hosts = {"host.docker.internal": "host-gateway"} if self.spec.loopback else None
        return self.engine.api.create_host_config(
            network_mode=self.outer,
            sysctls={"net.ipv4.ip_forward": "0"},
            extra_hosts=hosts,
            pids_limit=64,
            mem_limit=GATE_MEMORY,
            memswap_limit=GATE_MEMORY,
            **_HARDENING,
        )

    def start(self, inputs: Mapping[str, bytes | Path]) -> None:
        """Create the job container, put its inputs in, wait for the gate, start."""
        api = self.engine.api
        self._create_job()
        with tar_of(inputs) as tar:
            api.put_archive(self.name, "/job", tar)
        if self._gate_thread:
            self._gate_thread.join()
        if self._gate_error:
            raise InfraError(f"the gate did not start: {self._gate_error}")
        api.start(self.name)

    def started(self) -> bool:
        """Whether the job container ever ran. One that did not is removed, so that it
        never will: a start whose answer was lost may still be under way.

        Not by force: the engine refuses that for a container that runs after all. A
        stranger's container that has the name is none of ours.
        """
        import docker

        with engine_answers():
            ours = self.engine._list({"job": self.job, "role": "job"})
            state = self._state() if ours else None
            if state is None or not state["StartedAt"].startswith(_NEVER):
                return state is not None
            with contextlib.suppress(docker.errors.NotFound):
                self.engine.api.remove_container(self.name, v=True)
        return False

    def _create_job(self) -> None:
        """Raises `Refused` when the engine does not see the job's folder."""
        import docker

        try:
            self._create_container()
        except docker.errors.APIError as error:
            if self.spec and self.spec.folder and "bind source path" in str(error):
                raise Refused(*NOT_THIS_ENGINE) from error
            raise

    def _create_container(self) -> None:
        assert self.spec
        api, network = self.engine.api, network_name(self.job)
        role = "canary" if self.spec.command else "job"
        endpoint = api.create_endpoint_config(ipv4_address=str(self.subnet[3]))
        api.create_container(
            self.spec.image.id,
            list(self.spec.command[1:]) or None,
            entrypoint=list(self.spec.command[:1]) or None,
            name=self.name,
            labels=self.engine.labels(self.job, self.attempt, role),
            environment=dict(self.spec.environment),
            user=f"{self.spec.image.uid}:{self.spec.image.gid}",
            use_config_proxy=False,
            host_config=self._job_host_config(),
            networking_config=api.create_networking_config(
                cast(Any, {network: endpoint})  # the stub names the wrong type
            ),
        )

    def _job_host_config(self) -> Any:
        assert self.spec
        options = job_options(self.engine.settings, self.spec.image, self.engine.cpus)
        return self.engine.api.create_host_config(
            network_mode=network_name(self.job),
            extra_hosts={"gate": self.gate_address},
            dns_opt=["timeout:1", "attempts:1"],
            mounts=self._mounts(),
            **options,
        )

    def _mounts(self) -> list[Any]:
        """Anonymous volumes, named by Mounts because `volumes=` cannot label.

        A local job's /workspace is its folder. As a Mount, so that an engine which
        does not have it says so instead of making an empty one.
        """
        from docker.types import Mount

        assert self.spec
        labels = self.engine.labels(self.job, self.attempt, "volume")
        mounts = {
            path: Mount(path, None, type="volume", labels=labels)
            for path in ("/job", "/workspace", "/outbox")
        }
        if self.spec.folder:
            source = str(self.spec.folder)
            mounts["/workspace"] = Mount("/workspace", source, type="bind")
        return list(mounts.values())

    def wait(self, seconds: int) -> bool:
        """Whether the job container ended, or is gone, within that time."""
        import docker
        import requests

        with engine_answers():
            try:
                self.engine.api.wait(self.name, timeout=seconds)
            except docker.errors.NotFound:
                return True
            except (
                requests.exceptions.ConnectionError,
                requests.exceptions.ReadTimeout,
            ):
                state = self._state()
                return state is None or not state["Running"]
        return True

    def _state(self) -> dict[str, Any] | None:
        """The job container's state as the engine tells it; None when it is gone."""
        import docker

        try:
            state: dict[str, Any] = self.engine.api.inspect_container(self.name)[
                "State"
            ]
        except docker.errors.NotFound:
            return None
        return state

    def stop(self) -> None:
        """TERM, ten seconds, KILL, and look that it is gone."""
        import docker

        with engine_answers(), contextlib.suppress(docker.errors.NotFound):
            self.engine.api.stop(self.name, timeout=STOP_GRACE_SECONDS)
            if not self.wait(1):
                self.engine.api.kill(self.name)
                if not self.wait(STOP_GRACE_SECONDS):
                    raise InfraError(f"{self.name} does not stop")

    def collect(self, into: Path) -> BoxExit:
        """Read the exit, the meter and the outbox; `into` gets the bundle.

        An outbox entry that is not a plain file of a sane size spoils the outbox,
        never the meter: what was paid is counted whatever the box did.
        """
        with engine_answers():
            state = self._state()
            lines = self._meter()
            tokens, forks, spent = meter_of(lines or ())
            ended = BoxExit(
                code=state["ExitCode"] if state else None,
                oom=bool(state and state.get("OOMKilled") and state["ExitCode"]),
                result=result_of(self._lines(self.name)),
                tokens=tokens,
                metered=lines is not None,
                forks=forks,
                budget_spent=spent,
            )
            try:
                outbox = self._outbox(into) if state else {}
            except Refused as refusal:
                log_event(
                    "outbox-refused", logging.WARNING, job=self.job, error=refusal
                )
                outbox = {"outbox_refused": True}
        return msgspec.structs.replace(ended, **outbox)

    def _outbox(self, into: Path) -> dict[str, Any]:
        bundle = self._read("branch.bundle", BUNDLE_MAX_BYTES)
        path = into / "branch.bundle"
        if bundle is not None:
            write_private(path, bundle)
        texts = {
            name: content.decode("utf-8", "replace") if content is not None else None
            for name in ("review-request", "comment")
            for content in (self._read(f"{name}.md", TEXT_MAX_BYTES),)
        }
        return {
            "bundle": path if bundle is not None else None,
            "review_request": texts["review-request"],
            "comment": texts["comment"],
        }

    def transcript(self) -> bytes | None:
        """The session as the runner left it; None without one that can be read."""
        with engine_answers():
            try:
                return self._read(TRANSCRIPT_FILE, SESSION_MAX_BYTES)
            except Refused:
                return None

    def given(self) -> bytes | None:
        """The job.json that was put in, which a box cannot change."""
        with engine_answers(), contextlib.suppress(Refused):
            return self.engine.read_file(self.name, "/job/job.json", SESSION_MAX_BYTES)
        return None

    def _read(self, name: str, limit: int) -> bytes | None:
        return self.engine.read_file(self.name, f"/outbox/{name}", limit)

    def _meter(self) -> list[str] | None:
        """All that the gate wrote; it books its calls in flight as it is stopped.

        None when the gate is gone. Nothing written is a count as well: a gate says
        that it listens before it takes a call.
        """
        import docker

        try:
            self.engine.api.stop(self.gate, timeout=STOP_GRACE_SECONDS)
        except docker.errors.NotFound:
            return None
        return self._lines(self.gate, "all")

    def _lines(self, container: str, tail: int | Literal["all"] = 2000) -> list[str]:
        import docker

        try:
            text: bytes = self.engine.api.logs(container, stderr=False, tail=tail)
        except docker.errors.NotFound:
            return []
        return text.decode("utf-8", "replace").splitlines()

    def log(self) -> bytes:
        """All that the job wrote to its stdout, as far as the engine kept it."""
        import docker

        text = b""  # of a container that is gone
        with engine_answers(), contextlib.suppress(docker.errors.NotFound):
            text = self.engine.api.logs(self.name, stderr=False)
        return text

    def remove(self) -> None:
        if self._gate_thread:
            self._gate_thread.join()
        self.engine.remove_job(self.job)


#: How the engine writes the start of a container that had none.
_NEVER = "0001-"
#: Reason, message and fix when a folder cannot be bound into a box.
NOT_THIS_ENGINE = (
    "local-needs-local-engine",
    "the engine does not see this machine's folders",
    "use an engine of this machine (unset DOCKER_HOST), or share the folder with it",
)

#: What holds for the job and for the gate alike (40-box).
_HARDENING: dict[str, Any] = {
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges"],
    "read_only": True,
    "init": True,
    "ipc_mode": "private",
    "log_config": {"Type": "json-file", "Config": {"max-size": "5m", "max-file": "2"}},
}


def job_options(settings: Settings, image: Image, cpus: int) -> dict[str, Any]:
    """What every job container runs under; `verify-image` uses the same."""
    return {
        "pids_limit": 512,
        "mem_limit": settings.job_memory,
        "memswap_limit": settings.job_memory,
        "nano_cpus": cpus * 1_000_000_000,
        "shm_size": "256m",
        "tmpfs": _tmpfs(image),
        **_HARDENING,
    }


def _tmpfs(image: Image) -> dict[str, str]:
    home = f"rw,exec,nosuid,nodev,size=1g,mode=0700,uid={image.uid},gid={image.gid}"
    return {"/tmp": "rw,exec,nosuid,nodev,size=1g,mode=1777", "/home/pi": home}


def _send(socket: Any, data: bytes) -> None:
    # the SDK wraps a raw socket on unix, and gives the raw one over TLS
    raw = getattr(socket, "_sock", socket)
    raw.sendall(data)


#: Runs where a job would run and prints what it could reach. A host that refuses a
#: connection has answered; one whose firewall drops it still tells its hardware
#: address.
_PROBE = """
import http.client, json, socket, time
from concurrent.futures import ThreadPoolExecutor
asked = json.load(open("/job/asked.json"))
def answers(address):
    try:
        socket.create_connection((address, 9), 2).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return True
def neighbours():
    with open("/proc/net/arp") as table:
        rows = [line.split() for line in list(table)[1:]]
    return {row[0] for row in rows if int(row[2], 16) & 2}
def ask(method, target, seconds=4):
    gate = http.client.HTTPConnection("gate", 8080, timeout=seconds)
    headers = {"authorization": "Bearer " + asked["token"]}
    headers["anthropic-version"] = "2023-06-01"
    try:
        gate.request(method, target, headers=headers)
        answer = gate.getresponse()
        body = b"" if method == "CONNECT" else answer.read(65536)
        return {"status": answer.status, "ours": b'"pidispatch_' in body}
    except (OSError, http.client.HTTPException):
        return {"status": 0, "ours": False}
def ready():
    end = time.monotonic() + 4
    while time.monotonic() < end:
        if ask("GET", "/healthz", 1)["status"]:
            return True
        time.sleep(0.1)
    return False
def each(method, targets):
    with ThreadPoolExecutor(8) as pool:
        said = pool.map(lambda target: ask(method, target), targets.values())
        return dict(zip(targets, said))
with ThreadPoolExecutor(8) as pool:
    said = list(pool.map(answers, asked["addresses"]))
near = neighbours()
seen = {"host": [a for a, yes in zip(asked["addresses"], said) if yes or a in near]}
if asked["token"]:
    seen["gate"] = ready()
if seen.get("gate"):
    seen["models"] = each("GET", asked["models"])
    seen["hosts"] = each("CONNECT", {name: name for name in asked["hosts"]})
print(json.dumps(seen))
"""

CANARY_SECONDS = 12


class Heard(msgspec.Struct, frozen=True):
    """An answer of the gate: HTTP status, 0 for none; and whether it is its own."""

    status: int
    ours: bool = False


class Canary(msgspec.Struct, frozen=True):
    """What a box of ours could reach; `gate` is None when none was asked for.

    `host` has the addresses of the engine's host that answered it; `models` and
    `hosts` what the gate said of each provider's model list and of each CONNECT.
    """

    host: tuple[str, ...] = ()
    gate: bool | None = None
    models: Mapping[str, Heard] = {}
    hosts: Mapping[str, Heard] = {}


class Errand(msgspec.Struct, frozen=True):
    """What a canary asks the gate for: paths of model lists by provider, `host:port`s.

    `line` is what the gate itself is told; `token` what the canary shows it.
    """

    line: bytes = b""
    token: str = ""
    models: Mapping[str, str] = {}
    hosts: tuple[str, ...] = ()
    loopback: bool = False


def canary(engine: DockerEngine, image: Image, errand: Errand | None = None) -> Canary:
    """Start a box as a job's, with a probe in it; tell what that saw. Leaves nothing.

    Raises `InfraError` when it could not start or said nothing in time.
    """
    errand = errand or Errand()
    spec = BoxSpec(
        job=f"canary-{random_hex(4)}",
        attempt=1,
        image=image,
        gate_image=image,
        gate_line=errand.line,
        environment={},
        loopback=errand.loopback,
        command=("python3", "-I", "/job/probe.py"),
    )
    with engine_answers():
        box = DockerBox.opened(engine, spec)
        try:
            return _look(box, errand)
        finally:
            box.remove()


def _look(box: DockerBox, errand: Errand) -> Canary:
    asked = {
        "addresses": box.engine.host_addresses(box.subnet),
        "token": errand.token,
        "models": errand.models,
        "hosts": errand.hosts,
    }
    script, given = _PROBE.encode(), json.dumps(asked).encode()
    box.start({"probe.py": script, "asked.json": given})
    box.wait(CANARY_SECONDS)
    try:
        return msgspec.json.decode(box.log(), type=Canary)
    except ValueError as error:
        raise InfraError(f"a box said nothing within {CANARY_SECONDS} s") from error


def make_durable(folder: Path) -> None:
    """The files of a folder, and it itself, are there after a power cut."""
    import errno

    for path in (*folder.iterdir(), folder, folder.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            cannot = error.errno in (errno.EINVAL, errno.ENOTSUP)
            if not (cannot and path.is_dir()):  # a file system that has no such thing
                raise
        finally:
            os.close(descriptor)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only we can read (0600), in a directory that exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as sink:
        sink.write(content)


# =============================================================================
# publish
#
# Host-side git and review requests: one bare mirror a repository, the packed
# clone for the box, and the way out of what the box made. Host git never runs
# inside anything a box wrote. Knows nothing of Docker.
# =============================================================================

#: The largest result we take from a box; forges refuse single files over 100 MB.
BUNDLE_BYTES = 256 * 1024 * 1024
SKILL_FILES = 256
SKILL_BYTES = 8 * 1024 * 1024
SKILL_FILE_BYTES = 1024 * 1024
SKILL_LIST_BYTES = 1024 * 1024
_SKILL_TOO_LARGE = "has more than 256 files or 8 MiB"
#: Of a folder's git: its index, its configuration, what `git status` may list. A
#: box may have written all of it.
INDEX_BYTES = 1024 * 1024 * 1024
CONFIG_BYTES = 1024 * 1024
STATUS_BYTES = 16 * 1024 * 1024
#: Titles: GitLab and Forgejo store 255 characters, GitHub 256, Azure 400.
TITLE_CHARS = 255
#: Comments: GitHub takes 65,536 characters.
BODY_CHARS = 60_000
#: Packs a mirror may hold before they are rolled into fewer.
MIRROR_PACKS = 40
TOLD_CHARS = 1_000

#: What host git always runs with. No configuration of the machine, of its user or
#: of a repository takes part: whatever could run a program or send a credential
#: elsewhere is off. A fetch appears in one pack, so that a killed one leaves no
#: commit without its trees.
GIT_CONFIG = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "credential.helper": "",
    "http.followRedirects": "false",
    "http.lowSpeedLimit": "1",
    "http.lowSpeedTime": "120",
    "fetch.unpackLimit": "1",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "transfer.credentialsInUrl": "die",
    "submodule.recurse": "false",
}

#: What host git inherits: where programs are, the way out, whom TLS trusts.
GIT_INHERITS = _pattern(
    r"PATH|(?:https?|all|no)_proxy|(?:HTTPS|ALL|NO)_PROXY"
    r"|SSL_CERT_(?:FILE|DIR)|GIT_SSL_CAINFO"
)

#: Answers git's two questions, and only for the host the secret belongs to: a
#: proxy or another host that asks gets nothing.
ASKPASS = """#!/bin/sh
read -r host <"$PIDISPATCH_ASKPASS/host" || exit 1
case $1 in
"Username for '"*"://$host': ") exec cat "$PIDISPATCH_ASKPASS/username" ;;
"Password for '"*"@$host': ") exec cat "$PIDISPATCH_ASKPASS/password" ;;
esac
exit 1
"""

#: What a failure means by git's English words, the first found deciding; None,
#: and whatever is not listed, may pass (network, 5xx, 429).
_REMOTE_FAULTS: tuple[tuple[str, str | None], ...] = (
    (r"rate limit|returned error: (?:408|429|5\d\d)", None),
    (r"Authentication failed|could not read (?:User|Pass)", "forge-token-unavailable"),
    (r"returned error: 40[13]\b", "forge-token-unavailable"),
    (r"returned error: (?:3|4)\d\d", "repository-unavailable"),
    (r"^fatal: repository .* not found", "repository-unavailable"),
)
_PUSH_FAULTS: tuple[tuple[str, str | None], ...] = (
    (r"^!\t\S+\t\[rejected\]", "branch-moved"),
    (r"refusing to allow .* workflow", "workflow-permission"),
    (r"^!\t\S+\t\[remote rejected\] \((?:cannot lock|failed to up|internal)", None),
    (r"^!\t\S+\t\[remote |returned error: 4(?:03|13)| not found$", "push-refused"),
    *_REMOTE_FAULTS,
)
_FIXES = {
    "forge-token-unavailable": "check the forge token and what it may read",
    "repository-unavailable": "check the repository's name; was it moved or deleted?",
}

#: Control characters except tab and line feed, and those that reorder text.
_UNSEEN = _pattern(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
    "\ud800-\udfff]"
)


class Bounds(msgspec.Struct, frozen=True):
    """Seconds one git command may take; `cpu` is processor time over a bundle.

    A 0.6 MB bundle may hold a 600 MB file, so bytes alone bound nothing.
    """

    look: float = 60
    fetch: float = 1_800
    push: float = 600
    local: float = 300
    check: float = 120
    cpu: int = 60


class TimedOut(InfraError):
    """A git command that was stopped at its time bound."""


class BundleRefused(Refused):
    """A result that host git will not touch; `detail` is one fixed word."""

    def __init__(self, detail: str, told: str = "") -> None:
        self.detail = detail
        text = f"the result was refused: {detail}" + (f" ({told})" if told else "")
        super().__init__("bundle-refused", text)


class Done(NamedTuple):
    """How a git command ended; a negative code is the signal that ended it."""

    code: int
    out: bytes
    err: str


class Seen(NamedTuple):
    """What one look at a remote showed: the ref HEAD names, and commits by ref."""

    head: str | None
    refs: Mapping[str, str]


class Remote(msgspec.Struct, frozen=True):
    """A repository on a forge: where, and as whom; the URL holds no secret."""

    url: str
    credential: Credential

    @classmethod
    def of(cls, forge: Forge, repo: str) -> Remote:
        return cls(forge.clone_url(repo), forge.credential(repo))

    def host(self, protocols: Sequence[str]) -> str:
        """Host and port as git words them in its questions.

        Raises `ConfigError` for what is not a plain URL of `protocols`.
        """
        from urllib.parse import urlsplit

        parts = urlsplit(self.url)
        odd = re.search(r"[\s\x00-\x1f\x7f'\"\\]", self.url) or "@" in parts.netloc
        if parts.scheme not in protocols or odd:
            raise ConfigError("a clone URL must be plain http(s), without credentials")
        return parts.netloc

    def redact(self, text: str) -> str:
        """What git said, fit to be shown: the token in no form, capped."""
        import base64
        from urllib.parse import quote

        user, secret = self.credential.username, self.credential.password
        basic = base64.b64encode(f"{user}:{secret}".encode()).decode()
        text = _UNSEEN.sub("", text)
        for form in filter(None, (secret, quote(secret, safe=""), basic)):
            text = text.replace(form, "…")
        return _told(re.sub(r"(?<=://)[^\s@]*@", "", text))


def _told(text: str) -> str:
    """git's words without control characters and hints, capped."""
    lines = (line.strip(" ") for line in _UNSEEN.sub("", text).splitlines())
    kept = [line for line in lines if line and not line.startswith("hint:")]
    return "\n".join(kept)[:TOLD_CHARS]


def _fault(
    said: str, doing: str, table: tuple[tuple[str, str | None], ...]
) -> PidispatchError:
    """The error of a failed talk with a remote; `said` is already redacted."""
    flags = re.IGNORECASE | re.MULTILINE
    reasons = (reason for pattern, reason in table if re.search(pattern, said, flags))
    reason, message = next(reasons, None), f"{doing} failed: {said or 'no word of git'}"
    if reason is None:
        return InfraError(message)
    return Refused(reason, message, _FIXES.get(reason))


class Git(msgspec.Struct, frozen=True):
    """Runs git in a closed environment; `private` is a 0700 directory of ours.

    A token reaches git only through a file in a directory that lives as long as
    the command: never by argument, URL or environment.
    """

    private: Path
    protocols: tuple[str, ...] = ("http", "https")
    bounds: Bounds = Bounds()

    def environment(self, at: Path | None, secret: Path | None) -> dict[str, str]:
        """The whole environment of a git command; holds no token."""
        config = {
            f"GIT_CONFIG_{part}_{i}": text
            for i, pair in enumerate(GIT_CONFIG.items())
            for part, text in zip(("KEY", "VALUE"), pair, strict=True)
        }
        return {
            **{k: v for k, v in os.environ.items() if GIT_INHERITS.fullmatch(k)},
            **config,
            **({"GIT_DIR": str(at)} if at else {}),
            **({"PIDISPATCH_ASKPASS": str(secret)} if secret else {}),
            "GIT_ASKPASS": str(self.private / "askpass"),
            "GIT_CONFIG_COUNT": str(len(GIT_CONFIG)),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ALLOW_PROTOCOL": ":".join(self.protocols),
            "GIT_CEILING_DIRECTORIES": str(self.private.parent),
            "HOME": str(self.private),
            "LC_ALL": "C",
        }

    def call(
        self,
        *arguments: str,
        at: Path | None = None,
        feed: bytes | int = b"",
        sink: int | None = None,
        seconds: float | None = None,
        secret: Path | None = None,
        before: Callable[[], None] | None = None,
    ) -> Done:
        """Run one command to its end and say how it went.

        `at` is the repository; `feed` the input, bytes or an open file; `sink` a
        file for the output; `secret` a directory that askpass reads; `before`
        runs in the child. Raises `TimedOut`, and `InfraError` without git.
        """
        import subprocess

        try:
            child = subprocess.Popen(
                ["git", *arguments],
                cwd=self.private,
                env=self.environment(at, secret),
                stdin=feed if isinstance(feed, int) else subprocess.PIPE,
                stdout=subprocess.PIPE if sink is None else sink,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=before,
            )
        except OSError as error:
            raise InfraError(f"git did not start: {error}", "install git") from error
        given = None if isinstance(feed, int) else feed
        try:
            out, err = child.communicate(given, seconds or self.bounds.local)
        except subprocess.TimeoutExpired as error:
            raise TimedOut(f"git {arguments[0]} took too long") from error
        finally:
            _end(child)
        return Done(child.returncode, out or b"", err.decode("utf-8", "replace"))

    def talk(
        self, remote: Remote, *arguments: str, seconds: float, at: Path | None = None
    ) -> Done:
        """A command that talks to `remote`; its messages come back redacted."""
        with self._secret(remote) as secret:
            done = self.call(*arguments, at=at, seconds=seconds, secret=secret)
        return done._replace(err=remote.redact(done.err))

    @contextlib.contextmanager
    def _secret(self, remote: Remote) -> Iterator[Path]:
        import shutil
        import tempfile

        host, credential = remote.host(self.protocols), remote.credential
        if re.search(r"[\r\n\0]", credential.username + credential.password):
            raise ConfigError("a forge token holds a line break")
        folder = Path(tempfile.mkdtemp(prefix="askpass-", dir=self.private))
        try:
            write_private(folder / "host", f"{host}\n".encode())
            write_private(folder / "username", credential.username.encode())
            write_private(folder / "password", credential.password.encode())
            yield folder
        finally:
            shutil.rmtree(folder)

    def look(self, remote: Remote, *names: str) -> Seen:
        """Read the named refs, or all, in one request; absent ones are left out."""
        command = ("ls-remote", "--symref", "--quiet", "--", remote.url, *names)
        done = self.talk(remote, *command, seconds=self.bounds.look)
        if done.code:
            raise _fault(done.err, "reading the repository", _REMOTE_FAULTS)
        head, refs = None, {}
        for line in done.out.decode("utf-8", "replace").splitlines():
            value, _, name = line.partition("\t")
            if name == "HEAD" and value.startswith("ref: refs/heads/"):
                head = value.removeprefix("ref: ")
            elif (not names or name in names) and re.fullmatch(r"[0-9a-f]{40}", value):
                refs[name] = value
        return Seen(head, refs)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill what still runs of git and its transport, which is another process."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def _limits(cpu: int, size: int = 4 * BUNDLE_BYTES) -> Callable[[], None]:
    """Bounds set in a child that reads what a box made, before it starts; `size` is of
    each file that it writes, bytes."""
    import resource

    wanted = {
        resource.RLIMIT_CPU: cpu,
        resource.RLIMIT_FSIZE: size,
        resource.RLIMIT_DATA: 2**31,
        resource.RLIMIT_CORE: 0,
    }

    def apply() -> None:
        for what, value in wanted.items():
            most = resource.getrlimit(what)[1]
            soft = value if most == resource.RLIM_INFINITY else min(value, most)
            resource.setrlimit(what, (soft, most))

    return apply


class Repository(msgspec.Struct, frozen=True):
    """A bare repository of ours and the git that works on it."""

    git: Git
    path: Path

    def call(self, *arguments: str, **how: Any) -> Done:
        return self.git.call(*arguments, at=self.path, **how)

    def run(self, *arguments: str, **how: Any) -> bytes:
        """The output of a local command; raises `InfraError` when it fails."""
        done = self.call(*arguments, **how)
        if done.code:
            raise InfraError(f"git {arguments[0]} failed: {_told(done.err)}")
        return done.out

    def bounded(self, *arguments: str, limit: int) -> bytes | None:
        """The output of a command over what a stranger made: a few kB of trees may
        name more files than there is memory. None: more than `limit` bytes, or more
        work than it is worth."""
        import tempfile

        bounds = self.git.bounds
        how = {"seconds": bounds.check, "before": _limits(bounds.cpu, limit)}
        with tempfile.TemporaryFile(dir=self.git.private) as sink:
            try:
                done = self.call(*arguments, sink=sink.fileno(), **how)
            except TimedOut:
                return None
            if done.code < 0 or "ut of memory" in done.err:
                return None
            if done.code:
                raise InfraError(f"git {arguments[0]} failed: {_told(done.err)}")
            sink.seek(0)
            return sink.read()

    def create(self) -> None:
        self.path.mkdir(mode=0o700, exist_ok=True)
        self.run("init", "--bare", "--quiet", "--template=")


class Mirror(Repository, frozen=True):
    """The host's bare copy of one repository; nothing from a box enters it."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the mirror alone, among threads and processes; create it first.

        Every opening of the file is a lock of its own, so one lock serves both.
        Lock files found inside belong to a git that was killed.
        """
        import fcntl

        with self.path.with_suffix(".lock").open("ab") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            if not (self.path / "HEAD").exists():
                self.create()
            refs = self.path / "refs"
            for stale in (*self.path.glob("*.lock"), *refs.rglob("*.lock")):
                stale.unlink(missing_ok=True)
            yield

    def has(self, commit: str) -> bool:
        """Whether the commit is here with everything it reaches."""
        known = ("--not", "--all")
        done = self.call("rev-list", "--objects", "--quiet", commit, *known)
        return done.code == 0

    def obtain(
        self, remote: Remote, commits: Sequence[str], refs: Sequence[str]
    ) -> None:
        """Fetch what is missing: by id, else by the refs that may reach it.

        Raises `Refused("sha-gone")` when the remote has a commit no more. Call
        it with the mirror locked.
        """
        missing = [commit for commit in commits if not self.has(commit)]
        if not missing:
            return
        begun = time.monotonic()
        log_event("mirror-fetching", mirror=self.path.name)
        if not self._fetch(remote, missing):
            self._fetch(remote, refs)
            if not all(map(self.has, missing)):
                raise Refused("sha-gone", "the forge no longer has the job's commit")
        took = round(time.monotonic() - begun, 1)
        log_event("mirror-fetched", mirror=self.path.name, seconds=took)
        if len([*self.path.glob("objects/pack/*.pack")]) > MIRROR_PACKS:
            self.run("repack", "-d", "--geometric=2", "--quiet")

    def _fetch(self, remote: Remote, wants: Sequence[str]) -> bool:
        """False when the remote does not give one of `wants`; writes no ref."""
        options = ("--quiet", "--no-tags", "--no-write-fetch-head")
        command = ("fetch", *options, "--no-recurse-submodules", "--", remote.url)
        bound = self.git.bounds.fetch
        done = self.git.talk(remote, *command, *wants, seconds=bound, at=self.path)
        if done.code == 0:
            return True
        if re.search(r"not our ref|unadvertised object|remote ref", done.err):
            return False
        raise _fault(done.err, "fetching", _REMOTE_FAULTS)

    def hold(self, job: str, base: str, request: str | None) -> None:
        """Keep a job's commits until `release`; the default ref speeds fetches."""
        name = _ref_part(job)
        lines = [f"update refs/pidispatch/default {base}"]
        lines.append(f"update refs/pidispatch/base/{name} {base}")
        if request is not None:
            lines.append(f"update refs/pidispatch/request/{name} {request}")
        self.run("update-ref", "--stdin", feed="\n".join([*lines, ""]).encode())

    def release(self, job: str) -> None:
        for kind in ("base", "request"):
            self.run("update-ref", "-d", f"refs/pidispatch/{kind}/{_ref_part(job)}")


def _ref_part(job: str) -> str:
    """A job id as a part of a ref; git forbids some that are fine elsewhere."""
    odd = re.search(r"\.\.|\.$|\.lock$|^\.|[^A-Za-z0-9._-]", job)
    return "h" + _digest(job) if odd else job


class Prepared(msgspec.Struct, frozen=True):
    """What a box is given of a repository, and what the way out needs to know.

    `base` is the commit the job starts from, `lease` the job branch's commit on
    the forge just now (None: there is none), `request_sha` a request's head.
    `pack` and `shallow` make the box's clone; `skill` maps the relative paths of
    the flow's files to their content, None when the repository has none.
    """

    base: str
    default_branch: str
    lease: str | None
    request_sha: str | None
    pack: Path
    shallow: bytes
    skill: Mapping[str, bytes] | None


class Mirrors:
    """The mirrors of all repositories served, under one private directory."""

    def __init__(
        self,
        root: Path,
        protocols: tuple[str, ...] = ("http", "https"),
        bounds: Bounds | None = None,
    ) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)
        self.root = root.resolve()
        self.git = Git(self.root, protocols, bounds or Bounds())
        _install_askpass(self.root)
        _sweep(self.root)

    def of(self, kind: str, repo: str) -> Mirror:
        return Mirror(self.git, self.root / mirror_name(kind, repo))

    def prepare(
        self,
        remote: Remote,
        job: Job,
        into: Path,
        base: str | None = None,
        request: str | None = None,
        depth: int = 50,
    ) -> Prepared:
        """Read the repository for a job and write its clone to `into`/base.pack.

        `base` and `request` are the commits stored for the job's set, None for
        its first. Raises `Refused` (sha-gone, flow-not-found, a remote's no) or
        `InfraError`.
        """
        mirror = self.of(job.kind, job.repo)
        branch = f"refs/heads/{job.branch}" if job.branch else None
        asked, beside = request_ref(job), merge_ref(job)
        seen = self.git.look(remote, *filter(None, ("HEAD", branch, asked, beside)))
        if seen.head is None or "HEAD" not in seen.refs:
            raise Refused(
                "repository-unavailable", "the repository has no commit to read"
            )
        base = base or seen.refs["HEAD"]
        if job.target.type == "pull_request":
            request = request or (seen.refs.get(asked) if asked else job.head)
            if request is None:
                raise Refused("sha-gone", "the request's head is gone")
        tips = [base, *filter(None, [request])]
        with mirror.locked():
            spare = [ref for ref in (asked, beside) if ref in seen.refs]
            mirror.obtain(remote, tips, [seen.head, *filter(None, spare)])
            mirror.hold(job.id, base, request)
        return Prepared(
            base=base,
            default_branch=seen.head.removeprefix("refs/heads/"),
            lease=seen.refs.get(branch) if branch else None,
            request_sha=request,
            pack=into / "base.pack",
            shallow=write_pack(mirror, into / "base.pack", tips, depth),
            skill=read_skill(mirror, base, job.flow),
        )

    def restore(
        self, remote: Remote, job: Job, work: Work, more: Sequence[str] = ()
    ) -> Mirror:
        """The job's mirror with its base in it, fetched again if need be.

        `more` are commits that the forge showed just now; one that is gone since
        is `InfraError`: look again.
        """
        mirror = self.of(job.kind, job.repo)
        with mirror.locked():
            mirror.obtain(remote, [work.base], [f"refs/heads/{work.default_branch}"])
            for commit in more:
                try:
                    mirror.obtain(remote, [commit], [])
                except Refused as error:
                    raise InfraError("the repository changed meanwhile") from error
        return mirror

    def release(self, job: Job) -> None:
        """Let go of what was kept for a job that is published or swept."""
        mirror = self.of(job.kind, job.repo)
        if mirror.path.exists():
            with mirror.locked():
                mirror.release(job.id)


def request_ref(job: Job) -> str | None:
    """The forge's ref of a request's head, else its branch; None if that is a
    fork's, where only the commit's id is known."""
    ref = FORGES[job.kind].request_ref
    if job.target.type != "pull_request" or ref is None:
        return job.head_ref
    return ref.format(n=job.target.number)


def merge_ref(job: Job) -> str | None:
    """The request's merge, where the forge makes one and has no ref of the head."""
    ref = FORGES[job.kind].merge_ref
    return ref.format(n=job.target.number) if ref and not job.branch else None


def _install_askpass(root: Path) -> None:
    """Write the script once: one written just before use may be "busy"."""
    script = root / "askpass"
    if script.exists() and script.read_text("utf-8") == ASKPASS:
        return
    fresh = root / f"askpass.{random_hex(8)}"
    write_private(fresh, ASKPASS.encode())
    fresh.chmod(0o700)
    fresh.replace(script)


def _sweep(root: Path) -> None:
    """Remove what a killed process left: far older than any command may run."""
    import shutil

    for kind in ("askpass", "quarantine", "folder"):
        for left in root.glob(f"{kind}-*"):
            with contextlib.suppress(FileNotFoundError):  # another process's, at work
                if time.time() - left.stat().st_mtime > DAY:
                    shutil.rmtree(left, ignore_errors=True)


def write_pack(mirror: Mirror, path: Path, tips: Sequence[str], depth: int) -> bytes:
    """Pack what `tips` reach within `depth` commits; returns git's shallow file.

    Nothing else of the mirror is in it: a sibling's work stays unseen.
    """
    edge = _shallow_edge(mirror, tips, depth)
    lines = [*(f"--shallow {commit}" for commit in edge), *tips, ""]
    options = ("--revs", "--shallow", "--stdout", "--quiet", "--no-use-bitmap-index")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as sink:
        feed = "\n".join(lines).encode()
        mirror.run("pack-objects", *options, feed=feed, sink=sink.fileno())
    return "".join(f"{commit}\n" for commit in edge).encode()


def _shallow_edge(mirror: Mirror, tips: Sequence[str], depth: int) -> list[str]:
    """The commits at `depth` (tips are 1) whose parents are left out."""
    count = 512
    while True:
        listed = mirror.run("rev-list", "--parents", f"--max-count={count}", *tips)
        rows = (line.split() for line in listed.decode().splitlines())
        parents = {row[0]: row[1:] for row in rows}
        try:
            return _level(parents, tips, depth)
        except KeyError:
            count *= 4


def _level(
    parents: Mapping[str, Sequence[str]], tips: Sequence[str], depth: int
) -> list[str]:
    """Raises `KeyError` when a commit above the edge is not in `parents`."""
    level, above = set(tips), set[str]()
    for _ in range(depth - 1):
        above |= level
        level = {parent for commit in level for parent in parents[commit]} - above
    return sorted(commit for commit in level if parents[commit])


def read_skill(mirror: Repository, base: str, flow: str) -> dict[str, bytes] | None:
    """The regular files of `.pi/skills/<flow>` at `base`, None when it has none.

    Raises `Refused("flow-not-found")` when they are too many, too large, or
    named so that no file can be made of them.
    """
    folder = f".pi/skills/{flow}/"
    command = ("ls-tree", "-r", "-z", "--long", "--full-tree", base, folder)
    listed = mirror.bounded(*command, limit=SKILL_LIST_BYTES)
    if listed is None:
        raise _skill_refused(flow, _SKILL_TOO_LARGE)
    blobs: dict[str, bytes] = {}
    total = 0
    for entry in filter(None, listed.split(b"\0")):
        about, _, path = entry.partition(b"\t")
        mode, _, blob, size = about.split()
        if mode not in (b"100644", b"100755"):
            continue
        name = os.fsdecode(path).removeprefix(folder)
        total += int(size)
        if len(blobs) == SKILL_FILES or total > SKILL_BYTES:
            raise _skill_refused(flow, _SKILL_TOO_LARGE)
        if int(size) > SKILL_FILE_BYTES:
            raise _skill_refused(flow, "has a file of more than 1 MiB")
        if not _safe_path(name):
            raise _skill_refused(flow, "has a file whose name cannot be used")
        blobs[name] = blob
    return dict(zip(blobs, _contents(mirror, [*blobs.values()]), strict=True)) or None


def _skill_refused(flow: str, why: str) -> Refused:
    return Refused("flow-not-found", f"the repository's .pi/skills/{flow} {why}")


def _safe_path(name: str) -> bool:
    parts = name.split("/")
    plain = name.isprintable() and "\\" not in name
    return plain and not any(part in ("", ".", "..") for part in parts)


def _contents(mirror: Repository, blobs: Sequence[bytes]) -> Iterator[bytes]:
    output = mirror.run("cat-file", "--batch", feed=b"\n".join([*blobs, b""]))
    at = 0
    for _ in blobs:
        end = output.index(b"\n", at)
        size = int(output[at:end].split()[2])
        yield output[end + 1 : end + 1 + size]
        at = end + 1 + size + 1


# -- an operator's folder -------------------------------------------------------


class Tree(msgspec.Struct, frozen=True):
    """A local job's folder as it is found: whose it is, what is not committed.

    `changes` counts what `git status` would list; `skill` is as in `Prepared`.
    """

    path: Path
    uid: int
    gid: int
    changes: int
    skill: Mapping[str, bytes] | None


#: Of a folder's own configuration only what changes how files compare.
_FOLDER_CONFIG = _pattern(
    r"core\.(?:autocrlf|checkstat|eol|filemode|ignorecase|precomposeunicode"
    r"|symlinks|trustctime)"
)


def look_at_folder(git: Git, folder: Path, flow: str) -> Tree:
    """What a local job will find in `folder`, the top of a git work tree.

    An earlier job's box may have written all that is in it, its `.git` as well.
    So git runs in a private repository beside it, which borrows the objects and a
    copy of the index, and takes no program, filter or hook from its
    configuration. Raises `Refused("folder-unusable")`, or `InfraError`.
    """
    import tempfile

    fault = folder_fault(str(folder))
    if fault:
        raise Refused("folder-unusable", f"the folder {fault}", "name another folder")
    about = folder.stat()
    if about.st_uid == 0:
        fix = "give it to an ordinary user: chown -R USER FOLDER"
        raise Refused("folder-unusable", "root owns it; a box never is root", fix)
    with tempfile.TemporaryDirectory(prefix="folder-", dir=git.private) as name:
        beside = _beside(git, folder, Path(name))
        head = _head_of(folder)
        skill = read_skill(beside, head, flow) if head else None
        return Tree(
            path=folder,
            uid=about.st_uid,
            gid=about.st_gid or about.st_uid,
            changes=_changes(beside, folder, head),
            skill=skill,
        )


def own_file_fault(settings: Settings, folder: Path) -> str | None:
    """Why no box may have the folder: it could read our secrets, or write what we
    obey. By a file's name and by what that leads to, for a link can be replaced."""
    for path in steering(settings):
        if any(place.is_relative_to(folder) for place in (path, path.resolve())):
            return f"holds {path.name}, by which pidispatch itself is steered"
    return None


OWN_FILES_FIX = "keep pidispatch's own files elsewhere, and start it from there"


def _git_dirs(folder: Path) -> tuple[Path, Path]:
    """The folder's own git directory, and the one that its worktrees share."""
    own = folder / ".git"
    if own.is_file():
        own = folder / _small(own).removeprefix("gitdir:").strip()
    return own, own / (_small(own / "commondir").strip() or ".")


def _small(path: Path) -> str:
    """The text of a regular file, no more than a megabyte; else nothing."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return file.read(1 << 20).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _head_of(folder: Path) -> str | None:
    """The commit that is checked out; None when there is none yet."""
    own, common = _git_dirs(folder)
    text = _small(own / "HEAD").strip()
    name = text.removeprefix("ref:").strip()
    if name != text:
        if not re.fullmatch(r"refs/[^\0]+", name) or ".." in name:
            return None
        packed = re.search(
            rf"^([0-9a-f]+) {re.escape(name)}$", _small(common / "packed-refs"), re.M
        )
        text = _small(common / name).strip() or (packed[1] if packed else "")
    return text if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text) else None


def _beside(git: Git, folder: Path, place: Path) -> Repository:
    """A bare repository of ours that reads the folder's objects and nothing else."""
    import shutil

    own, common = _git_dirs(folder)
    kind = "sha256" if len(_head_of(folder) or "") == 64 else "sha1"
    made = Repository(git, place)
    made.run("init", "--bare", "--quiet", "--template=", f"--object-format={kind}")
    info = place / "objects" / "info"
    info.mkdir(exist_ok=True)
    (info / "alternates").write_text(f"{(common / 'objects').resolve()}\n", "utf-8")
    (place / "info").mkdir(exist_ok=True)
    (place / "info" / "exclude").write_text(_small(common / "info" / "exclude"))
    indices = [own / "index", *own.glob("sharedindex.*")]
    indices = [index for index in indices if index.is_file()]
    if sum(index.stat().st_size for index in indices) > INDEX_BYTES:
        raise Refused("folder-unusable", "its git index is too large to be looked at")
    for index in indices:
        shutil.copyfile(index, place / index.name)
    made.run("config", "core.bare", "false")
    theirs = common / "config"
    if theirs.is_file() and theirs.stat().st_size <= CONFIG_BYTES:
        listed = git.call("config", "--file", str(theirs), "--null", "--list").out
        for entry in filter(None, listed.decode("utf-8", "replace").split("\0")):
            key, _, value = entry.partition("\n")
            if _FOLDER_CONFIG.fullmatch(key):
                made.run("config", key, value)
    return made


def _changes(beside: Repository, folder: Path, head: str | None) -> int:
    """How many paths differ from the commit, untracked ones included."""
    if head:
        beside.run("update-ref", "--no-deref", "HEAD", head)
    listed = beside.bounded(
        *("--no-optional-locks", "-C", str(folder), f"--work-tree={folder}"),
        *("status", "--porcelain", "-z", "--no-renames", "--untracked-files=normal"),
        "--ignore-submodules=dirty",
        limit=STATUS_BYTES,
    )
    if listed is None:
        raise Refused("folder-unusable", "git status has too much to tell of it")
    return sum(1 for entry in listed.split(b"\0") if entry)


class Quarantine(Repository, frozen=True):
    """A throw-away repository with a box's checked result; close it after use.

    `tip` descends from the job's base by `commits` commits and is complete.
    """

    tip: str
    commits: int = 0

    def new(self, tip: str, known: Sequence[str]) -> list[str]:
        """The commits of `tip` that none of `known` has; absent ones have none."""
        here = [
            c for c in known if self.call("cat-file", "-e", f"{c}^{{commit}}").code == 0
        ]
        walk = ("rev-list", tip, *(f"^{commit}" for commit in here))
        return self.run(*walk).decode().split()

    def __enter__(self) -> Quarantine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        import shutil

        shutil.rmtree(self.path, ignore_errors=True)

    def call(self, *arguments: str, **how: Any) -> Done:
        """As everywhere, but bounded in time, processor, memory and disk."""
        bounds = self.git.bounds
        limits = _limits(bounds.cpu)
        try:
            done = super().call(*arguments, seconds=bounds.check, before=limits, **how)
        except TimedOut as error:
            raise BundleRefused("too-slow") from error
        if done.code in (-signal.SIGXCPU, -signal.SIGKILL):
            raise BundleRefused("too-slow")
        if done.code == -signal.SIGXFSZ:
            raise BundleRefused("too-large")
        return done

    def text(self, *arguments: str, limit: int) -> tuple[str, bool]:
        """At most `limit` bytes of a command's output; True when there was more."""
        import tempfile

        with tempfile.TemporaryFile(dir=self.path) as sink:
            done = self.call(*arguments, sink=sink.fileno())
            if done.code:
                raise InfraError(f"git {arguments[0]} failed: {_told(done.err)}")
            sink.seek(0)
            found = sink.read(limit + 1)
        return found[:limit].decode("utf-8", "replace"), len(found) > limit


def check_bundle(
    mirror: Mirror, bundle: Path, base: str, *, limit: int = BUNDLE_BYTES
) -> Quarantine:
    """Take a box's bundle (at most `limit` bytes) into a quarantine beside `mirror`.

    The header is read by us and the pack by `index-pack --strict`, because git
    2.39 applies fetch.fsckObjects to no bundle. Raises `BundleRefused`.
    """
    import tempfile

    with _open_bundle(bundle, limit) as source, contextlib.ExitStack() as undo:
        tip, prerequisites = _bundle_header(source)
        _check_prerequisites(mirror, prerequisites, base)
        os.lseek(source.fileno(), source.tell(), os.SEEK_SET)
        folder = tempfile.mkdtemp(prefix="quarantine-", dir=mirror.path.parent)
        quarantine = Quarantine(mirror.git, Path(folder), tip)
        undo.callback(quarantine.close)
        quarantine.create()
        alternates = quarantine.path / "objects" / "info" / "alternates"
        alternates.parent.mkdir(exist_ok=True)
        alternates.write_text(f"{mirror.path / 'objects'}\n", "utf-8")
        _index(quarantine, source.fileno(), limit)
        commits = _check_tip(quarantine, base)
        undo.pop_all()
    return msgspec.structs.replace(quarantine, commits=commits)


def _open_bundle(bundle: Path, limit: int) -> BinaryIO:
    """Open a regular file of bounded size; never follows a link, never waits."""
    import stat

    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        source = os.fdopen(os.open(bundle, flags), "rb")
    except OSError as error:
        raise BundleRefused("bad-header", "it cannot be opened") from error
    about = os.fstat(source.fileno())
    if stat.S_ISREG(about.st_mode) and about.st_size <= limit:
        return source
    source.close()
    raise BundleRefused("too-large" if stat.S_ISREG(about.st_mode) else "bad-header")


def _bundle_header(source: BinaryIO) -> tuple[str, list[str]]:
    """The tip and the prerequisites; leaves `source` at the pack."""
    if source.readline(64) != b"# v2 git bundle\n":
        raise BundleRefused("bad-header")
    prerequisites: list[str] = []
    refs: list[tuple[str, bytes]] = []
    while (line := source.readline(65_536)) != b"\n":
        needed = re.fullmatch(rb"-([0-9a-f]{40})(?: [^\n\0]*)?\n", line)
        offered = re.fullmatch(rb"([0-9a-f]{40}) ([^\n\0]+)\n", line)
        if needed and not refs:
            prerequisites.append(needed[1].decode())
        elif offered:
            refs.append((offered[1].decode(), offered[2]))
        else:
            raise BundleRefused("bad-header")
        if len(prerequisites) + len(refs) > 64:
            raise BundleRefused("bad-header")
    if [name for _, name in refs] != [RESULT_REF.encode()]:
        raise BundleRefused("wrong-ref")
    return refs[0][0], prerequisites


def _check_prerequisites(mirror: Mirror, needed: Sequence[str], base: str) -> None:
    """A result builds on its base, or by a merge on what the base reaches."""
    if not needed or set(needed) == {base}:
        return
    done = mirror.call("rev-list", "--max-count=1", *needed, "--not", base)
    if done.code or done.out:
        raise BundleRefused("bad-prerequisite")


def _index(quarantine: Quarantine, pack: int, limit: int) -> None:
    """Unpack and examine every object of the pack that the open file is at."""
    options = ("--stdin", "--fix-thin", "--strict", "--threads=1")
    most = f"--max-input-size={limit}"
    done = quarantine.call("index-pack", *options, most, feed=pack)
    if done.code == 0:
        return
    if "exceeds maximum allowed size" in done.err:
        raise BundleRefused("too-large")
    if "did not receive expected object" in done.err:
        raise BundleRefused("not-connected")
    raise BundleRefused("bad-object", _told(done.err))


def _check_tip(quarantine: Quarantine, base: str) -> int:
    """How many commits the tip adds to `base`, once it is proved complete."""
    tip = quarantine.tip
    kind = quarantine.call("cat-file", "-t", tip)
    if kind.code:
        raise BundleRefused("not-connected")
    if kind.out != b"commit\n":
        raise BundleRefused("bad-object", "the tip is not a commit")
    if quarantine.call("merge-base", "--is-ancestor", base, tip).code:
        raise BundleRefused("not-descended")
    walk = ("rev-list", "--objects", "--quiet", tip, "--not", base)
    if quarantine.call(*walk).code:
        raise BundleRefused("not-connected")
    return int(quarantine.run("rev-list", "--count", f"{base}..{tip}"))


def push(
    quarantine: Quarantine,
    remote: Remote,
    branch: str,
    lease: str | None,
    ours: Iterable[str] = (),
) -> None:
    """Make `branch` on the forge the quarantine's tip, if nobody moved it.

    `lease` is the branch's commit when the job was prepared (None: absent); it
    is replaced only when the tip contains it or it is one of `ours`, the commits
    this instance pushed there. A branch that was deleted since is made anew. The
    same push again is harmless. Raises `Refused` (branch-moved, push-refused,
    workflow-permission) or `InfraError`.
    """
    ref, tip, git = f"refs/heads/{branch}", quarantine.tip, quarantine.git
    present = git.look(remote, ref).refs.get(ref)
    if present == tip:
        return
    if present is None:
        lease = None
    if present != lease or not _replaceable(quarantine, lease, ours):
        raise Refused("branch-moved", f"{branch} was changed by someone else")
    options = ("--porcelain", "--no-progress", "--no-verify", "--no-follow-tags")
    expected = f"--force-with-lease={ref}:{lease or ''}"
    command = ("push", *options, "--recurse-submodules=no", expected, "--", remote.url)
    at, bound = quarantine.path, git.bounds.push
    done = git.talk(remote, *command, f"{tip}:{ref}", seconds=bound, at=at)
    if done.code:
        told = remote.redact(done.out.decode("utf-8", "replace"))
        raise _fault(f"{done.err}\n{told}", f"pushing {branch}", _PUSH_FAULTS)


def _replaceable(
    quarantine: Quarantine, lease: str | None, ours: Iterable[str]
) -> bool:
    if lease is None or lease in ours:
        return True
    check = ("merge-base", "--is-ancestor", lease, quarantine.tip)
    return quarantine.call(*check).code == 0


class Work(msgspec.Struct, frozen=True):
    """What a finished job left: files of its outbox and the facts it started from.

    `base`, `lease`, `default_branch` and `request_sha` come from `Prepared`;
    `commits` is the runner's count; `ours` are the commits this instance pushed to
    the job's branch before, and `request` is what an earlier try at publishing opened.
    """

    bundle: Path | None
    review_request: str | None
    comment: str | None
    base: str
    lease: str | None
    default_branch: str
    commits: int
    ours: frozenset[str] = frozenset()
    request_sha: str | None = None
    request: Request | None = None


class Published(msgspec.Struct, frozen=True):
    """What stands on the forge: the branch's commit and its request, if any.

    `faults` are those of AGENT_FAULTS that an agent left behind, or the reason why
    nobody can tell.
    """

    tip: str | None = None
    request: Request | None = None
    faults: tuple[str, ...] = ()


def publish_job(
    forge: Forge,
    mirrors: Mirrors,
    job: Job,
    work: Work,
    pushed: Callable[[str], None] | None = None,
    opened: Callable[[Request], None] | None = None,
) -> Published:
    """Put a finished job's work on the forge; safe to repeat at any time.

    An issue's job gets its branch, one request and one comment, a request's job
    only the comment. `pushed` is told the commit as soon as it is on the forge, and
    `opened` the request: a person may merge or close it before the comment is said.
    A determinate refusal is commented once and raised again; `InfraError` means:
    try later.
    """
    if job.target.type == "pull_request":
        _say(forge, job, work, "review", commits=work.commits if work.bundle else 0)
        return Published()
    if work.request:
        _say(forge, job, work, "result", request=work.request)
        return Published(None, work.request)
    try:
        tip = _push_result(forge, mirrors, job, work)
        if tip and pushed:
            pushed(tip)
        request = _one_request(forge, job, work) if tip else None
        if request and opened:
            opened(request)
    except Refused as refusal:
        with contextlib.suppress(Refused):
            _say(forge, job, work, "refused", refusal=refusal)
        raise
    _say(forge, job, work, "result", request=request)
    return Published(tip, request)


def publish_to(
    forge: Forge, mirrors: Mirrors, job: Job, work: Work, branch: str
) -> str | None:
    """Push a kept result to a new branch the operator names; returns its commit."""
    if mirrors.git.call("check-ref-format", f"refs/heads/{branch}").code:
        why = f"{json.dumps(branch)} is no branch name"
        raise ConfigError(why, "name a new branch, such as rescue/one")
    if work.bundle is None:
        return None
    remote = Remote.of(forge, job.repo)
    mirror = mirrors.restore(remote, job, work)
    with check_bundle(mirror, work.bundle, work.base) as quarantine:
        push(quarantine, remote, branch, None)
    return quarantine.tip


def review_agent(forge: Forge, mirrors: Mirrors, job: Job, work: Work) -> Published:
    """What an agent that publishes for itself has made of its work.

    Nothing is pushed and nothing of the agent's is posted again: the request of
    exactly the job's branch is found and gets its marker, and what the box
    committed is looked for on the forge. Safe to repeat. Raises `Refused` or
    `InfraError`.
    """
    request = work.request or _agents_request(forge, job)
    try:
        landed = _landed(forge, mirrors, job, work)
    except BundleRefused as refusal:  # nobody can say what of it was pushed
        return Published(None, request, (refusal.reason,))
    faults = {
        "pushed-elsewhere": landed.strays > 0,
        "not-pushed": landed.missing > 0,
        "request-missing": landed.pushed and bool(job.branch) and request is None,
    }
    found = tuple(fault for fault in AGENT_FAULTS if faults[fault])
    return Published(landed.tip, request, found)


def tell_faults(forge: Forge, job: Job, work: Work, published: Published) -> str | None:
    """Say once what an agent left undone; the fault that is recorded, if any."""
    if not published.faults:
        return None
    _say(forge, job, work, "agent", faults=published.faults)
    return published.faults[0]


class Landed(NamedTuple):
    """A box's commits on the forge: the tip of where they belong, if it is one of
    them; whether any is there; how many are not, and refs elsewhere that hold one."""

    tip: str | None
    pushed: bool
    missing: int
    strays: int


def _agents_request(forge: Forge, job: Job) -> Request | None:
    if job.branch is None:
        return None
    try:
        found = forge.find_request(job.repo, job.branch)
        return found and _with_marker(forge, job, found)
    except Rejected as error:
        raise Refused("request-refused", error.message, error.fix) from error


def _landed(forge: Forge, mirrors: Mirrors, job: Job, work: Work) -> Landed:
    """Compare a box's bundle with the forge's refs.

    Commits belong on the job's branch or the request's head; where a forge has no
    ref of that (Azure), on any branch.
    """
    if work.bundle is None:
        return Landed(None, False, 0, 0)
    remote = Remote.of(forge, job.repo)
    refs = {
        name: commit
        for name, commit in mirrors.git.look(remote).refs.items()
        if not name.endswith("^{}")
    }
    home = f"refs/heads/{job.branch}" if job.branch else request_ref(job)
    tip = refs.get(home) if home else None
    branches = {n: c for n, c in refs.items() if n.startswith("refs/heads/")}
    homes = {tip} if tip else set() if home else {*branches.values()}
    mirror = mirrors.restore(remote, job, work, sorted(homes))
    old = [work.base, *filter(None, [work.request_sha])]
    with check_bundle(mirror, work.bundle, work.base) as quarantine:
        made = {*quarantine.new(quarantine.tip, old)}
        missing = quarantine.new(quarantine.tip, [*old, *homes])
    tags = {n: c for n, c in refs.items() if n.startswith("refs/tags/")}
    strays = [
        name
        for name, commit in {**(branches if home else {}), **tags}.items()
        if commit in made and commit != tip
    ]
    mine = tip if tip in made else None
    return Landed(mine, len(missing) < len(made), len(missing), len(strays))


#: Bytes of a diff that are shown, and of a list of changed files that are read.
DIFF_BYTES = 256 * 1024
FILES_BYTES = 1024 * 1024

_DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")

#: What makes a file a test by its path: a folder's name, or its own.
_TEST_PATH = _pattern(
    r"(^|/)(tests?|specs?|__tests__|testdata)/|(^|/)(test|spec)_[^/]*$"
    r"|[._-](test|tests|spec)\.[^/.]+$|(^|/)conftest\.py$|Tests?\.[^/.]+$"
)


class FileChange(msgspec.Struct, frozen=True):
    """One changed file; a binary one has no count of lines."""

    path: str
    added: int | None
    removed: int | None
    test: bool


class Diff(msgspec.Struct, frozen=True):
    """A unified diff, `truncated` after `DIFF_BYTES`."""

    text: str
    truncated: bool


class Change(msgspec.Struct, frozen=True):
    """What a result changed: its commits, its files, its diff against its start."""

    commits: int
    files: tuple[FileChange, ...]
    diff: Diff


def changed_files(listed: str) -> Iterator[FileChange]:
    """The rows of `git diff --numstat -z`; a last one that was cut is left out."""
    for row in listed.split("\0")[:-1]:
        added, removed, path = row.split("\t", 2)
        plus, minus = (None if n == "-" else int(n) for n in (added, removed))
        yield FileChange(path, plus, minus, _TEST_PATH.search(path) is not None)


def change_of(result: Quarantine, start: str) -> Change:
    """What a result changed since `start`, a commit it descends from."""
    listed, _ = result.text(
        *_DIFF, "--numstat", "-z", start, result.tip, limit=FILES_BYTES
    )
    files = tuple(changed_files(listed))
    return Change(result.commits, files, diff_of(result, start, result.tip))


def diff_of(result: Quarantine, old: str, new: str) -> Diff:
    return Diff(*result.text(*_DIFF, old, new, limit=DIFF_BYTES))


def diff_between(one: Quarantine, other: Quarantine) -> Diff:
    """How the second result differs from the first, read as one repository."""
    info = one.path / "objects" / "info" / "alternates"
    with info.open("a", encoding="utf-8") as alternates:
        alternates.write(f"{other.path / 'objects'}\n")
    return diff_of(one, one.tip, other.tip)


def _push_result(forge: Forge, mirrors: Mirrors, job: Job, work: Work) -> str | None:
    """The commit now on the job's branch, None when the job changed nothing."""
    if job.branch is None or work.bundle is None:
        return None
    if job.branch == work.default_branch:
        raise Refused("push-refused", f"{job.branch} is the default branch")
    remote = Remote.of(forge, job.repo)
    mirror = mirrors.restore(remote, job, work)
    with check_bundle(mirror, work.bundle, work.base) as quarantine:
        if not quarantine.commits:
            return None
        push(quarantine, remote, job.branch, work.lease, work.ours)
    return quarantine.tip


def _one_request(forge: Forge, job: Job, work: Work) -> Request:
    """The open request of exactly the job's branch, opened if there is none."""
    assert job.branch
    first, _, rest = clean_text(work.review_request or "").partition("\n")
    try:
        found = forge.find_request(job.repo, job.branch)
        if found is None:
            title, body = request_title(job, first), _request_body(job, rest)
            into = work.default_branch
            return forge.open_request(job.repo, job.branch, into, title, body)
        return _with_marker(forge, job, found)
    except Rejected as error:
        raise Refused("request-refused", error.message, error.fix) from error


def _with_marker(forge: Forge, job: Job, found: Request) -> Request:
    """The request under this job's marker, whatever it was titled."""
    if _is_marked(job, found.title):
        return found
    title = request_title(job, found.title)
    forge.retitle_request(job.repo, found.number, title)
    return msgspec.structs.replace(found, title=title)


_HIDDEN_MARKER = _pattern(r"<!--(?=\s*pidispatch)", re.IGNORECASE)
_TITLE_MARKER = _pattern(r"\[\s*r\s*\d+\s*/\s*\d+\s*\]", re.IGNORECASE)


def clean_text(text: str, most: int = BODY_CHARS) -> str:
    """An agent's Markdown, fit to post: capped, no hidden marker of ours.

    A comment that it leaves open is closed, or it would hide what we add below.
    """
    text = _UNSEEN.sub("", text.replace("\r\n", "\n").replace("\r", "\n")).strip()
    text = _HIDDEN_MARKER.sub("&lt;!--", text)
    if len(text) > most:
        text = f"{text[:most].rstrip()}\n\n(cut at {most:,} characters)"
    if text.rfind("<!--") > text.rfind("-->"):
        text += "\n-->"
    return text


def request_title(job: Job, written: str) -> str:
    """The request's title: ours is the marker, the rest is the agent's one line.

    Markers that the agent wrote are removed; an empty line becomes flow and
    number, never text of the issue.
    """
    title = _plain_line(written[: 4 * TITLE_CHARS])  # time grows with the square
    while (without := _TITLE_MARKER.sub("", title).strip()) != title:
        title = without
    title = " ".join(re.sub(r"^#{1,6}(?: |$)", "", title).split())
    if not title:
        title = f"{job.flow}: {FORGES[job.kind].issue_noun} #{job.target.number}"
    return (title_marker(job.replica, job.replicas) + title)[:TITLE_CHARS].rstrip()


def _plain_line(text: str) -> str:
    """One line without control, format or separator characters."""
    import unicodedata

    hidden = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    spaced = " ".join(text.split())
    return "".join(c for c in spaced if unicodedata.category(c) not in hidden)


def _is_marked(job: Job, title: str) -> bool:
    """Whether the title bears this replica's marker and no other."""
    marker = title_marker(job.replica, job.replicas)
    rest = title.removeprefix(marker)
    return title.startswith(marker) and not (marker and _TITLE_MARKER.search(rest))


def _request_body(job: Job, written: str) -> str:
    body = clean_text(written, FORGES[job.kind].request_chars)
    others = sibling_branches(job)
    return render("request-body.md.j2", job=job, body=body, siblings=others)


def _say(forge: Forge, job: Job, work: Work, kind: str, **values: object) -> None:
    """Post one comment of a kind; the hidden marker, its last line, makes it one."""
    marker = comment_marker(job.id, kind)
    shown = {"comment": clean_text(work.comment or ""), "marker": marker, **values}
    noun = FORGES[job.kind].request_noun
    text = render(f"comment-{kind}.md.j2", job=job, noun=noun, **shown)
    try:
        forge.comment(job.repo, job.target, text, marker)
    except Rejected as error:
        raise Refused("comment-refused", error.message, error.fix) from error


# =============================================================================
# dispatch
#
# One job from claim to record: the ladder before anything can be spent, the box,
# the verdict, the way out. The worker pool and the start's reconciliation stand
# at the end. Knows nothing of HTTP servers.
# =============================================================================

RETRY_SECONDS = 60
MAX_ATTEMPTS = 2
DEFER_SECONDS = 60
DEFER_MAX_SECONDS = 600
#: Free bytes below which no job starts, and below which the newest one is stopped:
#: a host that is full loses the others' results, and its own services.
DISK_FLOOR, DISK_STOP = 1 * 2**30, 256 * 2**20
#: Each beat is a durable write, so it is rare.
HEARTBEAT_SECONDS = 15.0
#: The least between two looks of a worker that finds nothing to do: a flood of
#: deliveries that start nothing would be looked at one by one.
BREATH_SECONDS = 0.02
#: How often it is said that an engine or a disk is still away, in seconds.
TOLD_EVERY = 60
SWEEP_SECONDS = 3_600.0
#: A container this old belongs to no check and to no record that is being written.
STALE_SECONDS = 900
#: Deferrals that together wait for a day: 15 minutes in the first four, then ten
#: minutes each. Counted, because a job may have waited for days by a pause alone.
DEFERRALS_MAX = 5 + int((DAY - 900) // DEFER_MAX_SECONDS)
PUBLISH_WAIT_MAX = 900
AGENT_DIR = "/home/pi/.pi/agent"
JOB_FILE_VERSION = 1
SESSION_AGE_MAX = 14 * DAY


class Verdict(NamedTuple):
    """What an ended box means for its job."""

    outcome: Literal["completed", "policy", "failed", "retry", "unstarted"]
    reason: str | None


#: The codes of an engine, or of its init, that found nothing to run.
NEVER_STARTED = (125, 126, 127)


def verdict_of(ended: BoxExit, stopped: str | None) -> Verdict:
    """Classify by our own stop, then the gate, the engine and the exit code.

    The runner's line never classifies; it only names the reason of exit 2, and
    its presence tells a finished run from one that was cut off.
    """
    if stopped == "gate-lost":
        return Verdict("retry", "gate-lost")
    if stopped:
        return Verdict("failed" if stopped == "shutdown" else "policy", stopped)
    if ended.budget_spent:
        return Verdict("policy", "token-budget")
    if ended.oom:
        return Verdict("policy", "oom-killed")
    if ended.outbox_refused:
        return Verdict("policy", "outbox-refused")
    if ended.code is None:
        return Verdict("failed", "lost")
    if ended.code == 0:
        done = ended.result is not None and ended.result.code == 0
        return Verdict("completed", None) if done else Verdict("failed", "no-result")
    if ended.code == 1:
        return Verdict("retry", "infra")
    if ended.code in NEVER_STARTED and ended.result is None and ended.tokens is None:
        return Verdict("unstarted", None)  # else the agent ran, and ended like that
    if ended.code == 2:
        reason = ended.result.reason if ended.result else None
        known = reason if reason in POLICY_REASONS else "runner-policy"
        return Verdict("policy", known)
    return Verdict("failed", "unexpected-exit")


class Attempt(msgspec.Struct):
    """What one attempt learns on its way up the ladder; filled gate by gate.

    `left` is what the day's tokens had left when they were looked at. `began` is the
    start by the clock that nobody sets, which the deadline goes by.
    """

    claimed: Claimed
    settings: Settings
    token: str
    image: Image | None = None
    gate_image: Image | None = None
    provider: Provider | None = None
    catalogue: Mapping[str, Any] = msgspec.field(default_factory=dict)
    remote: Remote | None = None
    box: Box | None = None
    prepared: Prepared | None = None
    tree: Tree | None = None
    skill: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    lineage: Lineage | None = None
    transcript: bytes = b""
    started_at: float | None = None
    began: float = 0.0
    left: int | None = None
    #: With publish=agent: the forge's hosts, what its CLI and git read, and who
    #: has to know which of it is secret.
    reach: tuple[str, ...] = ()
    forge_environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    name_secret: Callable[[str], None] = lambda secret: None

    @property
    def job(self) -> Job:
        return self.claimed.job

    @property
    def model_name(self) -> str:
        """`provider/model` of this job: its replica's, its rule's, the settings'."""
        run, replica = self.job.run, self.job.replica
        if run.replicaModels and replica is not None:
            return run.replicaModels[replica - 1]
        provider = run.provider or self.settings.provider
        return f"{provider}/{run.model or self.settings.model}"

    @property
    def max_tokens(self) -> int | None:
        """The job's own budget of tokens: its rule's, else the settings'."""
        return self.job.run.maxTokens or self.settings.max_tokens

    @property
    def publish(self) -> Literal["host", "agent"]:
        """Who pushes; of a local job nobody does."""
        if self.job.local:
            return "host"
        return self.job.run.publish or cast(Any, self.settings.publish)

    @property
    def allow(self) -> tuple[str, ...]:
        """What the gate lets this job connect to beside the model."""
        return tuple(dict.fromkeys((*self.settings.egress_allow, *self.reach)))

    @property
    def secrets(self) -> tuple[str, ...]:
        """What the box was told, and the host's own; the longest first, because
        one may hold another."""
        forge = self.remote.credential.password if self.remote else ""
        given = self.forge_environment.get(GIT_PASSWORD, "")
        return tuple(sorted(filter(None, (self.token, forge, given)), key=len))[::-1]


def gate_url(base_url: str) -> str:
    """Where the box finds a provider: its real host and path behind the gate."""
    return f"http://gate:{GATE_PORT}/{base_url.split('://', 1)[1]}"


_LOOPBACK = _pattern(r"://(localhost|127\.\d+\.\d+\.\d+|\[::1\])(?=[:/]|$)")


def outside_url(base_url: str) -> str:
    """The URL as the gate must call it: a loopback name means the engine's host."""
    return _LOOPBACK.sub("://host.docker.internal", base_url)


def known_model(
    provider: Provider, catalogue: Mapping[str, Any], model: str
) -> Mapping[str, Any] | None:
    """The model's row: the operator's own, else the image's. None: unknown."""
    rows = [*provider.models, *catalogue.get(provider.name, {}).get("models", ())]
    return next((row for row in rows if row.get("id") == model), None)


def models_json(provider: Provider, token: str) -> dict[str, Any]:
    """Pi's models.json: the provider behind the gate, with the job's token."""
    row: dict[str, Any] = {
        "baseUrl": gate_url(outside_url(provider.base_url)),
        "apiKey": token,
    }
    if provider.models:
        row["api"] = provider.style
        row["models"] = list(provider.models)
    return {"providers": {provider.name: row}}


def gate_line(attempt: Attempt) -> bytes:
    """The one line the gate reads: token, keys, allowlists, prices, budget."""
    settings = attempt.settings
    names = (attempt.model_name, *settings.models_allow)
    providers: dict[str, Any] = {}
    prices: dict[str, Any] = {}
    for name in names:
        kind, _, model = name.partition("/")
        provider = settings.providers.get(kind)
        if provider is None or kind not in settings.keys:
            continue
        row = known_model(provider, attempt.catalogue, model) or {}
        providers.setdefault(kind, _gate_provider(provider, row, settings.keys[kind]))
        if row.get("cost"):
            prices[name] = dict.fromkeys(_PRICES, 0) | row["cost"]
    line = {
        "token": attempt.token,
        "providers": providers,
        "allow": list(attempt.allow),
        "models": list(names),
        "prices": prices,
        # a job without a budget of its own may at most use what the day has left
        "budget": attempt.max_tokens or attempt.left,
        "spent": 0,
    }
    return json.dumps(line).encode()


#: Kinds of tokens that have a price; pi takes one that a model leaves out as 0.
_PRICES = ("input", "output", "cacheRead", "cacheWrite")


def _gate_provider(
    provider: Provider, row: Mapping[str, Any], key: str
) -> dict[str, str]:
    return {
        "baseUrl": outside_url(provider.base_url),
        "style": row.get("api", provider.style),
        "authHeader": provider.auth_header,
        "authPrefix": provider.auth_prefix,
        "key": key,
    }


def box_environment(attempt: Attempt) -> dict[str, str]:
    """The closed map of the job's environment. No secret ever stands in it.

    With publish=agent the forge's token is in job.json, and the runner gives it to
    the agent: so it is in no container's configuration.
    """
    provider, _, model = attempt.model_name.partition("/")
    values = {
        "HOME": "/home/pi",
        "PI_CODING_AGENT_DIR": AGENT_DIR,
        "PI_JOB_ID": attempt.job.id,
        "PI_MODEL": model,
        "PI_OFFLINE": "1",
        "PI_PROVIDER": provider,
        "PI_SKIP_VERSION_CHECK": "1",
        "PI_TELEMETRY": "0",
    }
    if attempt.allow:
        values |= _PROXY_VARIABLES
    return values


_PROXY = f"http://gate:{GATE_PORT}"
_PROXY_VARIABLES = {
    "HTTP_PROXY": _PROXY,
    "HTTPS_PROXY": _PROXY,
    "NODE_USE_ENV_PROXY": "1",
    "NO_PROXY": "gate,localhost,127.0.0.1",
    "http_proxy": _PROXY,
    "https_proxy": _PROXY,
    "no_proxy": "gate,localhost,127.0.0.1",
}


def job_file(attempt: Attempt, deadline: float) -> bytes:
    """/job/job.json (45-box-contracts, Inputs).

    The runner works in place when the target is local: no base, no branch.
    """
    job, prepared = attempt.job, attempt.prepared
    assert (prepared or attempt.tree) and attempt.provider and attempt.image
    request = prepared.request_sha if prepared else None
    run, settings = job.run, attempt.settings
    _, _, model = attempt.model_name.partition("/")
    file = {
        "version": JOB_FILE_VERSION,
        "jobId": job.id,
        "attempt": attempt.claimed.attempt + 1,
        "target": {"type": job.target.type, "number": job.target.number or None},
        "base": prepared.base if prepared else None,
        "branch": job.branch,
        "requestRef": REQUEST_REF if request else None,
        "requestSha": request,
        "flow": job.flow,
        "provider": attempt.provider.name,
        "model": model,
        "gate": {"url": _PROXY, "token": attempt.token},
        "models": models_json(attempt.provider, attempt.token),
        "maxTurns": run.maxTurns or settings.max_turns,
        "maxTokens": attempt.max_tokens,
        "deadline": int(deadline),
        "excludeTools": list(run.excludeTools or ()),
        "forkJoin": run.forkJoin is not False
        and "forkJoin" in attempt.image.capabilities,
        "publish": attempt.publish,
        "session": _session_word(attempt.lineage),
        "git": {"name": "pidispatch", "email": "pidispatch@localhost"},
        **_forge_part(attempt),
    }
    return json.dumps(file, indent=1).encode()


def _forge_part(attempt: Attempt) -> dict[str, Any]:
    """What an agent needs to publish for itself; nothing when the host does."""
    if attempt.publish == "host":
        return {}
    assert attempt.remote
    environment = dict(attempt.forge_environment)
    return {"forge": {"url": attempt.remote.url, "environment": environment}}


def box_inputs(attempt: Attempt, deadline: float) -> dict[str, bytes | Path]:
    """Everything that goes into /job."""
    job, prepared = attempt.job, attempt.prepared
    prompt = resumed_prompt if attempt.transcript else prompt_text
    inputs: dict[str, bytes | Path] = {
        "job.json": job_file(attempt, deadline),
        "prompt.md": prompt(job, attempt.publish).encode(),
        "event.json": event_json(job),
    }
    if prepared:
        inputs |= {"base.pack": prepared.pack, "shallow": prepared.shallow}
    for name, content in attempt.skill.items():
        inputs[f"skill/{job.flow}/{name}"] = content
    if attempt.transcript:
        inputs[TRANSCRIPT_FILE] = attempt.transcript
    return inputs


def _session_word(lineage: Lineage | None) -> str | None:
    """What the runner does: keep no session, begin one, continue the one it gets."""
    if lineage is None:
        return None
    return "resumed" if lineage.note.resumed else "new"


# -- sessions ------------------------------------------------------------------
#
# The transcript of a rule with `resume`, one file a lineage. It comes from a box,
# so it is data of an agent that may have been talked into anything: a bounded
# regular file, of which only the conversation is kept.


class Stamp(msgspec.Struct, frozen=True):
    """Ours, in the first line of a kept transcript: by what and when it was kept."""

    pi: str
    publish: str
    saved: float


class Unreadable(Exception):
    """Not a transcript of pi's, or none that may be continued."""


#: Whose words of a transcript are kept. A system message is not among them: pi
#: would send it on, and what an injected run wrote would stand above the rules.
_ROLES = ("user", "assistant", "toolResult")
#: Of a compaction, all but the system message that pi also puts there.
_COMPACTION = (
    *("type", "id", "parentId", "timestamp"),
    *("summary", "firstKeptEntryId", "tokensBefore"),
)


def clean_transcript(content: bytes, stamp: Stamp) -> bytes:
    """The conversation of a session file, under a header of ours, and nothing else.

    System messages, tool loadouts, models, settings and other extensions' entries
    are left out; pi adds its own for the run at hand. Raises `Unreadable`.
    """
    entries = [_session_line(line) for line in content.split(b"\n") if line.strip()]
    if not entries or entries[0].get("type") != "session":
        raise Unreadable("no header")
    kept = list(_conversation(entries[1:]))
    if not kept:
        raise Unreadable("no conversation")
    head = _session_head(entries[0])
    head["pidispatch"] = msgspec.to_builtins(stamp)
    lines = (json.dumps(it, separators=(",", ":")) for it in (head, *kept))
    return "".join(f"{line}\n" for line in lines).encode()


def _session_line(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise Unreadable("a line is not JSON") from None
    if not isinstance(found, dict):
        raise Unreadable("a line is not an object")
    return found


def _session_head(found: Mapping[str, Any]) -> dict[str, Any]:
    """Pi works where the header says, so the folder is ours to say."""
    name = found.get("id")
    if found.get("version") != 3 or not isinstance(name, str):
        raise Unreadable("another format")
    if not re.fullmatch(r"[0-9A-Za-z-]{1,64}", name):
        raise Unreadable("an odd id")
    time_ = str(found.get("timestamp"))[:40]
    head = {"type": "session", "version": 3, "id": name, "timestamp": time_}
    return {**head, "cwd": "/workspace"}


def _conversation(entries: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The entries that are kept, each hung where its nearest kept ancestor is."""
    up: dict[str, str | None] = {}  # of each entry, the kept one that stands for it

    def stand_in(name: object) -> str | None:
        return up.get(name) if isinstance(name, str) else None

    for entry in entries:
        name, parent = entry.get("id"), stand_in(entry.get("parentId"))
        if not isinstance(name, str) or name in up:
            raise Unreadable("an entry without an id of its own")
        kept = _kept_entry(entry)
        up[name] = parent if kept is None else name
        if kept is None:
            continue
        if "firstKeptEntryId" in kept:
            kept["firstKeptEntryId"] = stand_in(kept["firstKeptEntryId"]) or name
        yield {**kept, "parentId": parent}


def _kept_entry(entry: dict[str, Any]) -> dict[str, Any] | None:
    if entry.get("type") == "compaction":
        return {key: entry[key] for key in _COMPACTION if key in entry}
    message = entry.get("message")
    if entry.get("type") != "message" or not isinstance(message, dict):
        return None
    spoken = isinstance(message.get("content"), str | list)
    return entry if spoken and message.get("role") in _ROLES else None


def session_ref(job: Job) -> str:
    """What a lineage is about: the issue's branch or the request, never a replica."""
    number = job.target.number
    if job.target.type == "issue":
        return branch_name(number)
    return request_ref(job) or f"request/{number}"


class Lineages(msgspec.Struct, frozen=True):
    """PI_SESSIONS_DIR: `<key>/current.jsonl`, read before a run, replaced after it."""

    root: Path

    def folder(self, job: Job) -> Path:
        return self.root / session_key(job.kind, job.repo, session_ref(job))

    def load(self, job: Job, now: Stamp) -> tuple[Lineage, bytes]:
        """How this run begins, and the transcript it continues (b"" when it is new).

        Whatever is wrong with a stored one is a cold start, with its reason.
        """
        path = self.folder(job) / "current.jsonl"
        try:
            reason, content = _stored(path, now)
        except (OSError, Unreadable) as error:
            log_event("session-unreadable", logging.WARNING, job=job.id, error=error)
            reason, content = "unreadable", b""
        note = SessionNote(reason is None, reason)
        return Lineage(note, _seen(path), now.pi), content

    def keep(self, job: Job, seen: str, content: bytes, now: Stamp) -> str | None:
        """Replace the stored transcript by a run's; the reason when it was not.

        Only what `load` saw is replaced: of two runs the first to end wins.
        """
        folder = self.folder(job)
        try:
            kept = clean_transcript(content, now)
            if len(kept) > SESSION_MAX_BYTES:
                return "too-large"
            for made in (self.root, folder):
                made.mkdir(parents=True, exist_ok=True, mode=0o700)
            with lock_file(folder / "lock"):
                path = folder / "current.jsonl"
                if _seen(path) != seen:
                    return "replaced"
                write_private(folder / "next.jsonl", kept)
                (folder / "next.jsonl").replace(path)
        except (OSError, Unreadable) as error:
            log_event("session-not-kept", logging.WARNING, job=job.id, error=error)
            return "not-kept"
        except ConfigError:  # another run's lock
            return "replaced"
        return None

    def forget(self, job: Job, seen: str) -> None:
        """Remove the stored transcript, if it is still what `load` saw."""
        folder = self.folder(job)
        with contextlib.suppress(OSError, ConfigError), lock_file(folder / "lock"):
            if _seen(folder / "current.jsonl") == seen:
                (folder / "current.jsonl").unlink()

    def sweep(self, before: float) -> None:
        """Remove transcripts that are too old to be continued, and nothing else."""
        for path in self.root.glob("*/current.jsonl"):
            if re.fullmatch("[0-9a-f]{32}", path.parent.name) and (
                path.lstat().st_mtime < before
            ):
                for name in ("current.jsonl", "next.jsonl", "lock"):
                    (path.parent / name).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # what is not ours stays
                    path.parent.rmdir()


def _seen(path: Path) -> str:
    """Tells one stored file from the next without reading it; "" for none."""
    try:
        facts = path.lstat()
    except OSError:
        return ""
    return f"{facts.st_ino}-{facts.st_mtime_ns}-{facts.st_size}"


def _stored(path: Path, now: Stamp) -> tuple[str | None, bytes]:
    """A transcript that may be continued, or the reason why it may not."""
    import stat

    try:
        facts = path.lstat()
    except FileNotFoundError:
        return "absent", b""
    if not stat.S_ISREG(facts.st_mode):
        return "unreadable", b""
    if facts.st_size > SESSION_MAX_BYTES:
        return "too-large", b""
    content = path.read_bytes()
    try:
        head = _session_line(content.partition(b"\n")[0])
        stamp = msgspec.convert(head.get("pidispatch"), Stamp)
    except msgspec.ValidationError:
        raise Unreadable("no stamp of ours") from None
    if now.saved - stamp.saved > SESSION_AGE_MAX:
        return "too-old", b""
    if not now.pi or stamp.pi != now.pi:
        return "pi-version-changed", b""
    if stamp.publish != now.publish:  # a token may stand in what that agent saw
        return "publish-changed", b""
    return None, clean_transcript(content, stamp)


def free_bytes(path: Path) -> int:
    """Free on the file system of `path`, or of its first parent that exists."""
    import shutil

    absolute = path.absolute()
    there = next(p for p in (absolute, *absolute.parents) if p.exists())
    return shutil.disk_usage(there).free


class Leaving(Exception):
    """We are stopping; the container goes on and the next start adopts it."""


class Dispatcher:
    """Takes one claimed job to its record. Everything it needs is passed in."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        engine: Engine,
        forges: Mapping[str, Forge],
        *,
        clock: Clock = time.time,
        steady: Clock = time.monotonic,
        new_token: Callable[[], str] = lambda: random_hex(32),
        limits: Callable[[], Limits] = lambda: NO_LIMITS,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        self.settings, self.store, self.engine = settings, store, engine
        self.forges, self.clock, self.new_token = forges, clock, new_token
        self.steady, self.limits, self.free = steady, limits, free
        #: Jobs from their claim, or adoption, to the end of their attempt.
        self.in_hand: set[str] = set()
        self._attended: dict[str, float] = {}
        self.mirrors = Mirrors(settings.state_dir / "mirrors")
        #: How often a job is put back for trouble that may pass.
        self.deferrals_max = DEFERRALS_MAX
        self.leaving = threading.Event()
        self.stop_jobs = threading.Event()
        self._telling = threading.Lock()
        self._noticing = threading.Lock()
        self._told: set[str] = set()
        self._looking = threading.Lock()
        self._isolates = False

    # -- the ladder: its order is the contract (30-jobs) ---------------------

    def climb(self, attempt: Attempt) -> None:
        """Every gate in order; the first that refuses raises `Refused`.

        Up to and including the capabilities nothing is minted, cloned or
        reserved. The box's network and gate open before the workspace, because
        starting them takes as long as the clone.
        """
        passed = "forge" if attempt.job.local else "local"
        for gate in LADDER:
            if gate.serves != passed:
                gate.check(self, attempt)

    def check_overlay(self, attempt: Attempt) -> None:
        attempt.settings = with_overlay(self.settings)

    def check_image(self, attempt: Attempt) -> None:
        tag = attempt.job.run.image or attempt.settings.job_image
        attempt.image = self.engine.image(tag)
        if attempt.image is None:
            raise Refused(
                "job-image-missing",
                f"the job image `{tag}` is not on this machine",
                "build it (`pidispatch build-image`) or correct the rule's `image`",
            )

    def check_forges(self, attempt: Attempt) -> None:
        assert attempt.image
        allowed = attempt.image.forges
        if allowed is None and attempt.publish == "agent":
            raise Refused(
                "job-image-forge-unsupported",
                f"the job image `{attempt.image.tag}` does not say which forges it "
                "has a CLI for, and with `publish: agent` the agent needs one",
                f"rebuild it with the forge's CLI and the label `{LABEL}forges` "
                f"naming it (`pidispatch build-image --forges {attempt.job.kind}`)",
            )
        if allowed is not None and attempt.job.kind not in allowed:
            listed = ", ".join(sorted(allowed)) or "none"
            raise Refused(
                "job-image-forge-unsupported",
                f"the job image `{attempt.image.tag}` supports these forges only: "
                f"{listed}",
                f"rebuild it with the label `{LABEL}forges` naming this forge",
            )

    def check_capabilities(self, attempt: Attempt) -> None:
        assert attempt.image
        needs = []
        if attempt.job.replica is not None:
            needs.append(("replicas", "job-image-replicas-unsupported"))
        if attempt.job.run.excludeTools:
            needs.append(("excludeTools", "job-image-exclude-tools-unsupported"))
        for token, reason in needs:
            if token not in attempt.image.capabilities:
                raise Refused(reason, *_undeclared(attempt.image, token))

    def check_provider(self, attempt: Attempt) -> None:
        assert attempt.image
        name, _, model = attempt.model_name.partition("/")
        provider = attempt.settings.providers.get(name)
        if provider is None or name not in attempt.settings.keys:
            variable = provider.key_variable if provider else "PI_PROVIDERS_FILE"
            raise Refused(
                "provider-unconfigured",
                f"the model provider `{name}` is not configured",
                f"set {variable}",
            )
        attempt.provider = provider
        attempt.catalogue = self.engine.catalogue(attempt.image)
        rows = attempt.catalogue.get(name) or provider.models
        if rows and not known_model(provider, attempt.catalogue, model):
            raise Refused(
                "model-unknown",
                f"the job image knows no model `{model}` of `{name}`",
                "name one that `pi --list-models` shows",
            )

    def check_gate_image(self, attempt: Attempt) -> None:
        tag = attempt.settings.gate_image
        attempt.gate_image = self.engine.image(tag)
        if attempt.gate_image is None or (
            "gate" not in attempt.gate_image.capabilities
        ):
            raise Refused(
                "gate-image-missing",
                f"the gate's image `{tag}` is not here or has no gate",
                "build it: `pidispatch build-image`",
            )

    def check_isolation(self, attempt: Attempt) -> None:
        self.prove_isolation(attempt.settings)

    def prove_isolation(self, settings: Settings) -> None:
        """A box must not reach the engine's host, unless the operator said PI_EGRESS=0.

        Looked at once an engine; a good answer is kept in the store. Raises `Refused`,
        or `InfraError` when it could not be seen.
        """
        with self._looking:
            if self._isolates or not settings.isolated:
                return
            known = self.store.flag("isolation")
            proven = self.engine.isolates(known)
            if proven is None:
                raise Refused("engine-not-isolating", *NOT_ISOLATING)
            if proven != known:
                self.store.set_flag("isolation", proven)
            self._isolates = True

    def check_caps(self, attempt: Attempt) -> None:
        """A look only: a job that cannot start must mint and clone nothing."""
        caps = Caps.of(attempt.settings, self.limits())
        over = self.store.peek_caps(caps, attempt.job.place, attempt.max_tokens)
        if over:
            raise _over_cap(over, caps.zone)
        if caps.tokens is not None:
            attempt.left = caps.tokens - self.store.tokens_used(caps, self.clock())

    def check_folder(self, attempt: Attempt) -> None:
        """A local job's own workspace: within the engine's reach, whole and clean.

        A retry finds what its first attempt left, so only that one is asked.
        """
        job = attempt.job
        if not self.engine.local:
            raise Refused(*NOT_THIS_ENGINE)
        folder = Path(str(job.run.folder))
        if fault := own_file_fault(attempt.settings, folder):
            raise Refused("folder-unusable", f"the folder {fault}", OWN_FILES_FIX)
        tree = look_at_folder(self.mirrors.git, folder, job.flow)
        if tree.changes and not (job.run.allowDirty or attempt.claimed.attempt):
            raise Refused(
                "dirty-tree",
                f"the folder has uncommitted changes ({tree.changes})",
                "commit or stash them, or allow them: `--force`, or `allowDirty`",
            )
        attempt.tree = tree

    def load_session(self, attempt: Attempt) -> None:
        """A rule with `resume` continues its lineage, or begins it for a reason.

        A second attempt begins anew: the transcript may be what ended the first.
        """
        if not attempt.job.run.resume:
            return
        lineages = self._lineages(attempt)
        if lineages is None:
            raise Refused(
                "sessions-dir-unset",
                "the rule says `resume`, and no folder for transcripts is set",
                "set PI_SESSIONS_DIR, or remove `resume` from the rule",
            )
        if attempt.job.replica is not None:
            return  # no rule says both; should a job do, it leaves the store alone
        assert attempt.image
        pi = attempt.image.labels.get(LABEL + "pi-version", "")
        now = Stamp(pi, attempt.publish, self.clock())
        lineage, content = lineages.load(attempt.job, now)
        if content and attempt.claimed.attempt:
            note = SessionNote(False, "retried")
            lineage, content = Lineage(note, lineage.seen, pi), b""
        attempt.lineage, attempt.transcript = lineage, content

    def _lineages(self, attempt: Attempt) -> Lineages | None:
        root = attempt.settings.sessions_dir
        return Lineages(root) if root else None

    def keep_session(self, attempt: Attempt) -> None:
        """Keep a finished run's transcript; what comes between is in the record."""
        lineage, lineages = attempt.lineage, self._lineages(attempt)
        if lineage is None or lineages is None:
            return
        assert attempt.box
        content = self._patiently(attempt.box.transcript)
        reason: str | None = "not-kept"
        if content is not None:
            for secret in attempt.secrets:
                content = content.replace(secret.encode(), b"***")
            stamp = Stamp(lineage.pi, attempt.publish, self.clock())
            reason = lineages.keep(attempt.job, lineage.seen, content, stamp)
        if reason is not None:
            note = SessionNote(lineage.note.resumed, reason)
            attempt.lineage = Lineage(note, lineage.seen, lineage.pi)

    def drop_session(self, attempt: Attempt) -> None:
        """A provider may take no conversation as the stored one is: what a box made of
        it, or its length. The next run begins anew instead of failing as this one."""
        lineage, lineages = attempt.lineage, self._lineages(attempt)
        if lineage and lineages and lineage.note.resumed:
            lineages.forget(attempt.job, lineage.seen)

    def check_protection(self, attempt: Attempt) -> None:
        """With a token in the box only protection keeps the default branch whole.

        Asked with the host's own token; the job's is taken after this.
        """
        if attempt.publish != "agent":
            return
        forge, repo = self.forge(attempt.job), attempt.job.repo
        attempt.reach = _within_reach(forge, repo)
        try:
            protected = forge.protected(repo, forge.default_branch(repo))
        except Rejected as error:
            raise _no_access(error) from error
        if not protected:
            raise Refused(
                "unprotected-branch",
                "the default branch takes direct pushes, and with `publish: agent` "
                "whatever runs in the box holds a token that may push",
                "protect it so that direct pushes are refused, or use `publish: host`",
            )

    def take_token(self, attempt: Attempt) -> None:
        forge, repo = self.forge(attempt.job), attempt.job.repo
        attempt.remote = Remote.of(forge, repo)
        if attempt.publish == "agent":
            credential = attempt.remote.credential
            found = {GIT_USERNAME: credential.username}
            found[GIT_PASSWORD] = credential.password
            found |= forge.agent_environment(repo)
            attempt.name_secret(found[GIT_PASSWORD])
            attempt.name_secret(credential.password)
            attempt.forge_environment = found

    def forge(self, job: Job) -> Forge:
        forge = self.forges.get(job.kind)
        if forge is None:
            variable = FORGES[job.kind].secret_variable
            raise Refused(
                "forge-token-unavailable",
                f"{job.kind} is not served",
                f"set {variable}",
            )
        return forge

    def open_box(self, attempt: Attempt) -> None:
        assert attempt.image and attempt.gate_image and attempt.provider
        local = outside_url(attempt.provider.base_url) != attempt.provider.base_url
        image, tree = attempt.image, attempt.tree
        if tree:
            image = msgspec.structs.replace(image, uid=tree.uid, gid=tree.gid)
        attempt.box = self.engine.open(
            BoxSpec(
                job=attempt.job.id,
                attempt=attempt.claimed.attempt + 1,
                image=image,
                gate_image=attempt.gate_image,
                gate_line=gate_line(attempt),
                environment=box_environment(attempt),
                loopback=local,
                folder=tree.path if tree else None,
            )
        )

    def prepare(self, attempt: Attempt) -> None:
        """The workspace: every replica and every retry starts at one commit."""
        job = attempt.job
        known = self.store.base_of(job.set)
        prepared = self._prepare(attempt, *known)
        agreed = self.store.set_base(job.set, prepared.base, prepared.request_sha)
        if agreed and (agreed.base, agreed.request_sha) != (
            prepared.base,
            prepared.request_sha,
        ):
            prepared = self._prepare(attempt, agreed.base, agreed.request_sha)
        attempt.prepared = prepared
        self.store.keep_work(
            attempt.claimed,
            Workspace(
                prepared.base,
                prepared.default_branch,
                prepared.lease,
                prepared.request_sha,
                attempt.lineage,
                attempt.publish,
            ),
        )

    def _prepare(
        self, attempt: Attempt, base: str | None, request: str | None
    ) -> Prepared:
        job, remote = attempt.job, attempt.remote
        assert remote
        return self.mirrors.prepare(
            remote,
            job,
            self.kept_dir(job),
            base,
            request,
            attempt.settings.clone_depth,
        )

    def find_skill(self, attempt: Attempt) -> None:
        found = attempt.prepared or attempt.tree
        skill = (found and found.skill) or shipped_skill(attempt.job.flow)
        if not skill:
            where = "HEAD" if attempt.job.local else "its default branch"
            raise Refused(
                "flow-not-found",
                f"the repository has no flow `{attempt.job.flow}`",
                f"add `.pi/skills/{attempt.job.flow}/SKILL.md` to {where}",
            )
        attempt.skill = skill

    def reserve(self, attempt: Attempt) -> None:
        caps = Caps.of(attempt.settings, self.limits())
        over = self.store.start(attempt.claimed, caps, attempt.max_tokens)
        if over:
            raise _over_cap(over, caps.zone)
        attempt.started_at, attempt.began = self.clock(), self.steady()

    # -- one job -------------------------------------------------------------

    def run(self, claimed: Claimed) -> None:
        """The whole of one attempt. Never raises; every end is recorded."""
        attempt = Attempt(claimed, self.settings, self.new_token())
        _event("job-claimed", claimed.job)
        with live_secrets() as attempt.name_secret:
            self._run(attempt)

    def _run(self, attempt: Attempt) -> None:
        claimed = attempt.claimed
        try:
            self._attempt(attempt)
        except Leaving:
            _event("job-left-running", claimed.job)
        except Fenced:
            _event("job-claim-lost", claimed.job)
        except Exception as error:
            log_event(
                "job-failed-inside", logging.ERROR, job=claimed.job.id, error=error
            )
            self._give_up(attempt, "internal-error")
        finally:
            self.in_hand.discard(claimed.job.id)
            if attempt.prepared:  # the box has its copy
                attempt.prepared.pack.unlink(missing_ok=True)

    def _attempt(self, attempt: Attempt) -> None:
        try:
            if self.store.cancelled(attempt.job.id):
                raise Refused("operator-cancel", "an operator cancelled it")
            self.climb(attempt)
            self._start(attempt)
        except Refused as refusal:
            self._refuse(attempt, refusal)
        except (InfraError, OSError) as error:
            self._again(attempt, error)
        else:
            self._see_through(attempt)

    def _see_through(self, attempt: Attempt) -> None:
        """Attend the box and settle; the newest of these goes when the disk fills."""
        assert attempt.started_at is not None
        self._attended[attempt.job.id] = attempt.started_at
        try:
            self._settle(attempt, self._attend(attempt))
        finally:
            self._attended.pop(attempt.job.id, None)

    def room(self) -> int:
        """Free bytes where jobs write: the database, our files, the engine's own."""
        places = (self.settings.db, self.settings.state_dir, self.engine.disk())
        return min(self.free(place) for place in places if place)

    def adopt(self, claimed: Claimed, box: Box, started_at: float) -> None:
        """Take over a container that an earlier process started."""
        settings = self.settings
        with contextlib.suppress(Refused, OSError):  # for the record; it runs already
            settings = with_overlay(settings)
        attempt = Attempt(claimed, settings, "", box=box, started_at=started_at)
        attempt.began = self.steady() - max(0.0, self.clock() - started_at)
        _event("job-adopted", claimed.job)
        with live_secrets() as attempt.name_secret:
            self._adopt(attempt)

    def _adopt(self, attempt: Attempt) -> None:
        claimed = attempt.claimed
        try:
            self._recall(attempt)
            self._see_through(attempt)
        except (Leaving, Fenced):
            return
        except Exception as error:
            log_event(
                "job-failed-inside", logging.ERROR, job=claimed.job.id, error=error
            )
            self._give_up(attempt, "internal-error")
        finally:
            self.in_hand.discard(claimed.job.id)

    def _recall(self, attempt: Attempt) -> None:
        """What an earlier process knew of an adopted run: its lineage, who pushes,
        and the secrets that its box holds, which only the box has kept."""
        assert attempt.box
        work = self._patiently(lambda: self.store.work_of(attempt.job.id))
        if work:
            attempt.lineage = work.lineage
            attempt.settings = msgspec.structs.replace(
                attempt.settings, publish=work.publish
            )
        given = _json_line((self._patiently(attempt.box.given) or b"").decode())
        attempt.token = given.get("gate", {}).get("token", "")
        attempt.forge_environment = given.get("forge", {}).get("environment", {})
        if secret := attempt.forge_environment.get(GIT_PASSWORD):
            attempt.name_secret(secret)

    def _start(self, attempt: Attempt) -> None:
        assert attempt.box and attempt.started_at is not None
        try:
            inputs = box_inputs(attempt, attempt.started_at + JOB_SECONDS)
        except Exception:
            self._hand_back(attempt)
            raise
        try:
            attempt.box.start(inputs)
        except Refused:
            self._hand_back(attempt)
            raise
        except Exception as error:
            if not self._patiently(attempt.box.started):
                self._hand_back(attempt)
                raise InfraError(f"the container did not start: {error}") from error
            word, level = "job-start-unanswered", logging.WARNING
            _event(word, attempt.job, level=level, error=error)
        self._patiently(lambda: self.store.running(attempt.claimed))
        _event("job-started", attempt.job)

    def _hand_back(self, attempt: Attempt) -> None:
        """Nothing ran: the slot and the reserved tokens go back."""
        self._patiently(lambda: self.store.release(attempt.claimed))
        attempt.started_at = None

    def _attend(self, attempt: Attempt) -> str | None:
        """Wait for the end; returns the reason if it was we who ended it."""
        box = attempt.box
        assert box and attempt.started_at is not None
        while not self._patiently(lambda: box.wait(1)):
            reason = self._patiently(lambda: self._stop_reason(attempt))
            if reason is None and not self._patiently(box.tend):
                reason = "gate-lost"
            if reason:
                self._patiently(box.stop)
                return reason
        return None

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Ask an engine, a database or a disk that may be away; the run is paid for.

        Raises `Leaving` when we stop before it answers: the next start asks.
        """
        for tries in itertools.count():
            try:
                answer = ask()
            except (InfraError, OSError) as error:
                if tries % TOLD_EVERY == 0:
                    log_event("waiting-for-machine", logging.WARNING, error=error)
                if self.leaving.wait(1.0):
                    raise Leaving from error
            else:
                if tries:
                    log_event("machine-is-back", tries=tries)
                return answer
        raise AssertionError("unreachable")

    def _stop_reason(self, attempt: Attempt) -> str | None:
        assert attempt.started_at is not None
        if self.stop_jobs.is_set():
            return "shutdown"
        if self.leaving.is_set():
            raise Leaving
        if self.store.cancelled(attempt.job.id):
            return "operator-cancel"
        if self.steady() - attempt.began >= JOB_SECONDS + STOP_GRACE_SECONDS:
            return "timeout"
        # a copy: other workers' jobs come and go; of one moment's, the last by name
        ages = [(at, job) for job, at in list(self._attended.items())]
        newest = (attempt.started_at, attempt.job.id) >= max(ages, default=(0.0, ""))
        if newest and self.room() < DISK_STOP:
            return "disk-low"
        return None

    def _settle(self, attempt: Attempt, stopped: str | None) -> None:
        """Collect what the box left, judge it, record it, then clean and publish."""
        ended = self._patiently(lambda: self._collect(attempt))
        verdict = verdict_of(ended, stopped)
        if verdict.outcome == "unstarted":
            self._hand_back(attempt)
            self._again(attempt, InfraError(f"nothing to run: exit {ended.code}"))
            return
        if verdict.outcome == "retry" and attempt.claimed.attempt + 1 < MAX_ATTEMPTS:
            forget_kept(self.kept_dir(attempt.job))  # the last attempt wins
            until = self.clock() + RETRY_SECONDS
            retry = functools.partial(self.store.retry, attempt.claimed, until)
            self._patiently(lambda: retry(ended.bill))
            _event("job-retry", attempt.job, verdict.reason, logging.WARNING)
            self._remove(attempt)
            return
        if verdict.outcome == "retry":
            verdict = Verdict("failed", verdict.reason)
        if verdict.outcome == "completed":
            self.keep_session(attempt)
        elif verdict.reason == "runner-policy":
            self.drop_session(attempt)
        self._finish(attempt, verdict, ended)

    def _collect(self, attempt: Attempt) -> BoxExit:
        assert attempt.box
        kept = self.kept_dir(attempt.job)
        ended = attempt.box.collect(kept)
        if attempt.settings.capture_logs:
            self._keep_log(attempt.job, attempt.box)
        keep_texts(kept, ended)
        make_durable(kept)  # the box has the only other copy, and goes next
        if attempt.job.local and ended.bundle:  # its work is in the folder
            ended.bundle.unlink()
            ended = msgspec.structs.replace(ended, bundle=None)
        return ended

    def _keep_log(self, job: Job, box: Box) -> None:
        """The box's own lines, its newest LOG_MAX_BYTES; cut where it says so (T45)."""
        folder = self.settings.state_dir / "logs"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        told = without_live_secrets(box.log().decode("utf-8", "surrogateescape"))
        text = told.encode("utf-8", "surrogateescape")
        if len(text) > LOG_MAX_BYTES:
            text = b"[earlier lines were cut]\n" + text[-LOG_MAX_BYTES:]
        write_private(folder / f"{container_name(job.id)}.log", text)

    def _finish(
        self, attempt: Attempt, verdict: Verdict, ended: BoxExit | None
    ) -> None:
        assert verdict.outcome != "retry" and verdict.outcome != "unstarted"
        record = self.record(attempt, verdict.outcome, verdict.reason, ended)
        notice = _end_notice(attempt.job, record, ended)
        bill = ended.bill if ended else None
        finish = functools.partial(self.store.finish, attempt.claimed, record)
        self._patiently(lambda: finish(notice, bill))
        _event("job-ended", attempt.job, verdict.reason or verdict.outcome)
        self._remove(attempt)
        self.publish(attempt.job.id)
        call_hook(self.settings.on_failure, record)

    def _refuse(self, attempt: Attempt, refusal: Refused) -> None:
        job = attempt.job
        self._remove(attempt)
        record = self.record(attempt, "policy", refusal.reason, None)
        notice = None if job.local else _refusal_notice(job, refusal)
        self._patiently(lambda: self.store.refuse(attempt.claimed, record, notice))
        # a local job has nowhere to comment: the log says what a comment would
        why, level = (refusal.message, logging.WARNING) if job.local else (None, 20)
        _event("job-refused", job, refusal.reason, level, why=why)
        self.publish(job.id)
        call_hook(self.settings.on_failure, record)

    def _again(self, attempt: Attempt, error: Exception) -> None:
        """Trouble that may pass. Before the container it costs nothing."""
        _event("job-trouble", attempt.job, level=logging.WARNING, error=error)
        now = self.clock()
        self._remove(attempt)
        if attempt.claimed.deferrals >= self.deferrals_max:
            self._give_up(attempt, "infra")
            return
        wait = min(DEFER_SECONDS * 2**attempt.claimed.deferrals, DEFER_MAX_SECONDS)
        self._patiently(lambda: self.store.defer(attempt.claimed, now + wait))

    def _give_up(self, attempt: Attempt, reason: str) -> None:
        try:
            self._finish(attempt, Verdict("failed", reason), None)
        except Exception as error:
            log_event(
                "job-not-recorded", logging.ERROR, job=attempt.job.id, error=error
            )

    def _remove(self, attempt: Attempt) -> None:
        """Take the engine objects away; what is left over is swept at the start."""
        if attempt.box is None:
            return
        try:
            attempt.box.remove()
        except Exception as error:
            log_event("box-not-removed", logging.ERROR, job=attempt.job.id, error=error)

    def record(
        self,
        attempt: Attempt,
        outcome: Outcome,
        reason: str | None,
        ended: BoxExit | None,
    ) -> Record:
        job, claimed = attempt.job, attempt.claimed
        provider, _, model = attempt.model_name.partition("/")
        result = ended.result if ended else None
        return Record(
            jobId=job.id,
            kind=job.kind,
            target=job.title,
            flow=job.flow,
            queuedAt=iso(claimed.queued_at),
            startedAt=iso(attempt.started_at) if attempt.started_at else None,
            endedAt=iso(self.clock()),
            outcome=outcome,
            reason=reason,
            exitCode=ended.code if ended else None,
            turns=result.turns if result else None,
            tokens=ended.tokens if ended else None,
            forks=ended.forks if ended else None,
            provider=provider,
            model=model,
            budgetReserved=attempt.started_at is not None or claimed.attempt > 0,
            attempt=claimed.attempt + (attempt.started_at is not None),
            replica=job.replica,
            replicas=job.replicas,
            triggerIndex=job.trigger.index,
            triggerType=job.trigger.type,
            session=attempt.lineage.note if attempt.lineage else None,
            bundle=bool(ended and ended.bundle),
            host=_host_name(),
            picked=None,
        )

    # -- the way out ---------------------------------------------------------

    def kept_dir(self, job: Job) -> Path:
        """Where a job's bundle and texts are kept until the retention ends."""
        folder = kept_path(self.settings, job.id)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder

    def publish(self, job_id: str) -> None:
        """Tell the forge about a job that is over; safe to repeat at any time."""
        with self._telling:
            if job_id in self._told:
                return  # another thread of ours is at it
            self._told.add(job_id)
        try:
            self._publish(job_id)
        except (
            Exception
        ) as error:  # one telling's edge: the record stands, others go on
            log_event("publish-trouble", logging.ERROR, job=job_id, error=error)
            with contextlib.suppress(PidispatchError):
                self.store.postpone_notice(job_id, self.clock() + PUBLISH_WAIT_MAX)
        finally:
            self._told.discard(job_id)

    def _publish(self, job_id: str) -> None:
        found = self.store.notice(job_id)
        if found is None:
            return
        job, workspace, notice, tries = found
        try:
            request, reason = self._tell(job, workspace, notice)
        except (InfraError, OSError) as error:
            wait = min(5 * 2 ** min(tries, 16), PUBLISH_WAIT_MAX)
            _event("publish-retry", job, level=logging.WARNING, wait=wait, error=error)
            self.store.postpone_notice(job.id, self.clock() + wait)
            return
        except Refused as refusal:
            request, reason = None, refusal.reason
        except Rejected as error:
            _event("comment-refused", job, level=logging.WARNING, error=error)
            request, reason = None, None
        self.store.published(job.id, request, reason)
        with contextlib.suppress(InfraError):
            self.mirrors.release(job)
        _event("job-published", job, reason)

    def _tell(
        self, job: Job, workspace: Workspace | None, notice: Notice
    ) -> tuple[Request | None, str | None]:
        forge = self.forge(job)
        if notice.kind != "result":
            with self._noticing:  # replicas share one comment: look and post as one
                forge.comment(job.repo, job.target, notice.text, notice.marker)
        if workspace is None or notice.kind == "refused":
            return None, None
        ours = self.store.own_tips(job)
        known = self.store.request_of(job.id)
        work = kept_work(self.kept_dir(job), workspace, ours, notice.commits, known)
        if workspace.publish == "agent":
            return self._tell_agents(job, work, notice)
        if notice.kind != "result":
            return None, None
        published = publish_job(
            forge,
            self.mirrors,
            job,
            work,
            lambda tip: self.store.pushed(job, tip),
            lambda request: self.store.opened(job.id, request),
        )
        return published.request, None

    def _tell_agents(
        self, job: Job, work: Work, notice: Notice
    ) -> tuple[Request | None, str | None]:
        """The agent has published; a run that failed has had its comment."""
        forge = self.forge(job)
        found = review_agent(forge, self.mirrors, job, work)
        if found.tip and found.tip not in work.ours:
            self.store.pushed(job, found.tip)
        if found.request:
            self.store.opened(job.id, found.request)
        if notice.kind != "result":
            return found.request, None
        return found.request, tell_faults(forge, job, work, found)

    def publish_due(self) -> None:
        for job, _, _, _ in self.store.due_notices():
            self.publish(job.id)
        for job, tries in self.store.due_limited():
            self._tell_limited(job, tries)
        for sibling in self.store.due_siblings():
            self._tell_sibling(sibling)

    def _tell_limited(self, job: Job, tries: int) -> None:
        """Say once that a target had its hour's deliveries; what is down is retried."""
        limit = self.settings.target_hourly
        message = (
            f"{job.title} has had its {limit} deliveries of this hour, and further "
            "ones are dropped until it is over; this is said once"
        )
        fix = "act again then, or raise `PI_TARGET_HOURLY`"
        notice = _refusal_notice(job, Refused("rate-limited", message, fix))

        def later(until: float) -> None:
            self.store.postpone_limited(job.set, until)

        if self._told_now(job, lambda: self._tell(job, None, notice), tries, later):
            self.store.limited_told(job.set)

    def _tell_sibling(self, told: SiblingNotice) -> None:
        """Say on a request that is still open what became of its sibling's."""

        def tell() -> None:
            job, forge = told.job, self.forge(told.job)
            assert job.branch
            found = forge.find_request(job.repo, job.branch)
            if found and found.number == told.request.number:
                marker = sibling_marker(told)
                text = sibling_text(told, marker)
                target = Target("pull_request", found.number)
                forge.comment(job.repo, target, text, marker)

        def later(until: float) -> None:
            self.store.postpone_sibling(told, until)

        if self._told_now(told.job, tell, told.tries, later):
            self.store.sibling_told(told)

    def _told_now(
        self,
        job: Job,
        tell: Callable[[], object],
        tries: int,
        later: Callable[[float], None],
    ) -> bool:
        """Whether it is told, or never can be; what is down is tried again later."""
        try:
            tell()
        except (Refused, Rejected) as error:
            _event("comment-refused", job, level=logging.WARNING, error=error)
        except Exception as error:  # one telling's edge: others go on
            wait = min(5 * 2 ** min(tries, 16), PUBLISH_WAIT_MAX)
            _event("publish-retry", job, level=logging.WARNING, wait=wait, error=error)
            later(self.clock() + wait)
            return False
        return True

    # -- the start, and every hour -------------------------------------------

    def reconcile(
        self, before: float = float("inf")
    ) -> list[tuple[Claimed, Box, float]]:
        """Rows against containers, both ways; returns what is to be adopted.

        Jobs in hand are left alone; nothing may be claimed meanwhile. Objects of no
        open job go when they were made before that time: a check's own are younger.
        """
        hands = frozenset(self.in_hand)  # before the rows, for those that end just now
        adopted: list[tuple[Claimed, Box, float]] = []
        for claimed, state, started_at in self.store.unfinished():
            if claimed.job.id in hands:
                continue
            box = self.engine.adopt(claimed.job.id) if state != "claimed" else None
            if box is not None and started_at is not None:
                self.store.running(claimed)
                adopted.append((claimed, box, started_at))
            elif state == "running":
                lost = Attempt(claimed, self.settings, "", started_at=started_at)
                self._give_up(lost, "lost")
            else:
                self.store.requeue(claimed)
                _event("job-requeued", claimed.job)
        keep = frozenset(claimed.job.id for claimed, _, _ in adopted)
        swept = self.engine.sweep(keep | hands, before)
        if adopted or swept:
            log_event("reconciled", adopted=len(adopted), swept=swept)
        self.in_hand |= keep
        return adopted


class Gate(NamedTuple):
    """One rung: what it checks, the reasons it may refuse for, what is said then.

    `serves` are the jobs it is there for: a local one has no forge to be asked.
    """

    name: str
    check: Callable[[Dispatcher, Attempt], None]
    reasons: tuple[str, ...] = ()
    comment: str = "comment-not-started.md.j2"
    serves: Literal["all", "forge", "local"] = "all"


_CAPS = ("daily-token-cap", "scope-cap", "over-budget", "soft-hold")
_OVER_CAP = "comment-over-cap.md.j2"

#: The gates in their order, by the name a reader looks for.
LADDER: tuple[Gate, ...] = (
    Gate("overlay", Dispatcher.check_overlay, ("settings-overlay-invalid",)),
    Gate("image", Dispatcher.check_image, ("job-image-missing",)),
    Gate(
        "forges",
        Dispatcher.check_forges,
        ("job-image-forge-unsupported",),
        serves="forge",
    ),
    Gate(
        "capabilities",
        Dispatcher.check_capabilities,
        ("job-image-replicas-unsupported", "job-image-exclude-tools-unsupported"),
    ),
    Gate(
        "provider",
        Dispatcher.check_provider,
        ("provider-unconfigured", "model-unknown"),
    ),
    Gate("gate image", Dispatcher.check_gate_image, ("gate-image-missing",)),
    Gate("isolation", Dispatcher.check_isolation, ("engine-not-isolating",)),
    Gate("caps, a look", Dispatcher.check_caps, _CAPS, _OVER_CAP),
    Gate("session", Dispatcher.load_session, ("sessions-dir-unset",)),
    Gate(
        "folder",
        Dispatcher.check_folder,
        ("local-needs-local-engine", "folder-unusable", "dirty-tree", "flow-not-found"),
        serves="local",
    ),
    Gate(
        "protection",
        Dispatcher.check_protection,
        (
            "forge-out-of-reach",
            "forge-token-unavailable",
            "repository-unavailable",
            "unprotected-branch",
        ),
        serves="forge",
    ),
    Gate(
        "token",
        Dispatcher.take_token,
        ("forge-token-unavailable",),
        serves="forge",
    ),
    Gate("box", Dispatcher.open_box),
    Gate(
        "workspace",
        Dispatcher.prepare,
        ("sha-gone", "flow-not-found", "repository-unavailable"),
        serves="forge",
    ),
    Gate("flow", Dispatcher.find_skill, ("flow-not-found",)),
    Gate("caps, reserved", Dispatcher.reserve, _CAPS, _OVER_CAP),
)
_COMMENTS = {reason: gate.comment for gate in LADDER for reason in gate.reasons}


def _over_cap(over: Over, zone: str) -> Refused:
    """A spent cap as people are told of it: which, how much, and until when."""
    meter, cap = over.meter, f"`{over.meter.cap}`"
    asks = f"; this job reserves {over.asked}" * (meter.unit == "tokens")
    if over.reason == "soft-hold":
        asks += f", and PI_SOFT_HOLD_PCT holds from {meter.hold} on"
        cap += " or PI_SOFT_HOLD_PCT"
    return Refused(
        over.reason,
        f"`{meter.cap}` is {meter.limit} {meter.unit} a {meter.span}: {meter.used} are "
        f"used{asks}. This {meter.span} ({zone}) ends at {iso(meter.ends)}",
        f"start it again after that, or raise {cap}",
    )


def _undeclared(image: Image, token: str) -> tuple[str, str]:
    listed = ", ".join(sorted(image.capabilities))
    says = f"declares {listed}" if listed else "declares no capabilities"
    return (
        f"the job image `{image.tag}` {says}, and this job needs `{token}`",
        f"rebuild it so that its label `{LABEL}capabilities` lists `{token}` "
        "(`pidispatch build-image`), then check it with `pidispatch verify-image`",
    )


def _within_reach(forge: Forge, repo: str) -> tuple[str, ...]:
    """Host and port of the forge's git and API, as the gate lists them.

    A box reaches them by CONNECT alone, so they must be https and not loopback.
    """
    found = []
    for url in (forge.clone_url(repo), forge.api):
        scheme, _, rest = url.partition("://")
        if scheme != "https" or outside_url(url) != url:
            raise Refused(
                "forge-out-of-reach",
                "a box cannot reach the forge where the host does",
                "serve it over https under a name that is not loopback, or use "
                "`publish: host`",
            )
        found.append(rest.partition("/")[0])
    return tuple(dict.fromkeys(found))


def _no_access(error: Rejected) -> Refused:
    reason = "repository-unavailable"
    if error.status in (401, 403):
        reason = "forge-token-unavailable"
    return Refused(reason, error.message, _FIXES[reason])


def _refusal_notice(job: Job, refusal: Refused) -> Notice:
    """One comment for a set, whichever of its replicas was refused first."""
    marker = comment_marker(job.set, refusal.reason)
    text = render(
        _COMMENTS.get(refusal.reason, "comment-not-started.md.j2"),
        job=job,
        reason=refusal.reason,
        message=refusal.message,
        fix=refusal.fix,
        marker=marker,
    )
    return Notice("refused", text, marker)


def sibling_marker(told: SiblingNotice) -> str:
    """By the request that ended, not the run: a later set may have the same ones."""
    assert told.about.request
    number = told.about.request.number
    return comment_marker(f"request-{number}", f"ended-{told.at}")


def sibling_text(told: SiblingNotice, marker: str) -> str:
    """The comment on a request whose sibling's was merged or closed."""
    noun = FORGES[told.job.kind].request_noun
    return render("comment-sibling.md.j2", told=told, noun=noun, marker=marker)


def _end_notice(job: Job, record: Record, ended: BoxExit | None) -> Notice | None:
    """What the forge is told of a job that had started; a local one has none."""
    if job.local:
        return None
    if record.outcome == "completed":
        result = ended.result if ended else None
        return Notice("result", commits=result.commits if result else 0)
    marker = comment_marker(job.id, "ended")
    text = render("comment-ended.md.j2", job=job, record=record, marker=marker)
    return Notice("ended", text, marker)


HOOK_SECONDS = 10.0
#: All that a hook is given of our environment: no setting, so no secret.
HOOK_INHERITS = ("PATH", "HOME", "LANG", "LC_ALL", "TZ")


def call_hook(
    program: Path | None, record: Record, seconds: float = HOOK_SECONDS
) -> None:
    """Tell PI_ON_FAILURE of a job that did not complete; its failure is only logged.

    `program jobId outcome reason`, run without a shell and ended with all that it
    started once its time is over.
    """
    import subprocess

    if program is None or record.outcome == "completed":
        return
    given = {name: os.environ[name] for name in HOOK_INHERITS if name in os.environ}
    try:
        child = subprocess.Popen(
            [str(program), record.jobId, record.outcome, record.reason or ""],
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        log_event("hook-failed", logging.WARNING, job=record.jobId, error=error)
        return
    try:
        code: int | str = child.wait(seconds)
    except subprocess.TimeoutExpired:
        code = "timeout"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if code:
        log_event("hook-failed", logging.WARNING, job=record.jobId, code=code)


KEPT_FILES = ("branch.bundle", "review-request.md", "comment.md")


def forget_kept(folder: Path) -> None:
    for name in KEPT_FILES:
        (folder / name).unlink(missing_ok=True)


def keep_texts(folder: Path, ended: BoxExit) -> None:
    for name, text in zip(
        KEPT_FILES[1:], (ended.review_request, ended.comment), strict=True
    ):
        if text is not None:
            write_private(folder / name, without_live_secrets(text).encode())


def kept_path(settings: Settings, job: str) -> Path:
    return settings.state_dir / "bundles" / container_name(job)


def kept_work(
    folder: Path,
    workspace: Workspace,
    ours: frozenset[str],
    commits: int = 0,
    request: Request | None = None,
) -> Work:
    """What a box left, from the files that are kept of it."""
    bundle = folder / "branch.bundle"
    return Work(
        bundle=bundle if bundle.is_file() else None,
        review_request=_kept_text(folder, "review-request.md"),
        comment=_kept_text(folder, "comment.md"),
        base=workspace.base,
        lease=workspace.lease,
        default_branch=workspace.default_branch,
        commits=commits,
        ours=ours,
        request_sha=workspace.request_sha,
        request=request,
    )


def publish_by_hand(
    settings: Settings, outside: Outside, job_id: str, branch: str | None
) -> str:
    """Publish a kept result again, or push it to `branch`; says what was done.

    Raises `ConfigError` when nothing is kept or the forge is not served, and what
    publishing raises.
    """
    job, workspace, _ = outside.kept(job_id)
    forge = _served(settings, job)
    ours, known = outside.own_tips(job), outside.request_of(job_id)
    work = kept_work(kept_path(settings, job_id), workspace, ours, request=known)
    if work.bundle is None:
        raise ConfigError(f"no commits of {job_id} are kept", "see `pidispatch show`")
    mirrors = Mirrors(settings.state_dir / "mirrors")
    if branch is not None:
        tip = publish_to(forge, mirrors, job, work, branch)
        return f"pushed {tip} to {branch}"
    published = publish_job(
        forge,
        mirrors,
        job,
        work,
        lambda tip: outside.pushed(job, tip),
        lambda request: outside.opened(job_id, request),
    )
    outside.published(job_id, published.request)
    return published.request.url if published.request else "nothing to publish"


def open_kept(settings: Settings, reader: Reader, job_id: str) -> Quarantine:
    """A kept result in a quarantine of its own; close it after use.

    The forge is asked only for a base that the mirror has lost. Raises
    `ConfigError` when nothing is kept, `BundleRefused` and what fetching raises.
    """
    job, workspace, _ = reader.kept(job_id)
    work = kept_work(kept_path(settings, job_id), workspace, frozenset())
    if work.bundle is None:
        raise ConfigError(f"no commits of {job_id} are kept", "see `pidispatch show`")
    mirrors = Mirrors(settings.state_dir / "mirrors")
    mirror = mirrors.of(job.kind, job.repo)
    if not (mirror.path.exists() and mirror.has(work.base)):
        mirror = mirrors.restore(Remote.of(_served(settings, job), job.repo), job, work)
    return check_bundle(mirror, work.bundle, work.base)


def _served(settings: Settings, job: Job) -> Forge:
    forge = forges_of(settings).get(job.kind)
    if forge is None:
        variable = FORGES[job.kind].secret_variable
        raise ConfigError(f"{job.kind} is not served", f"set {variable}")
    return forge


def replay_by_hand(settings: Settings, outside: Outside, job_id: str) -> str:
    """Make an ended job once more from its item as it reads now; the new job's id.

    Raises `ConfigError` when it cannot be made again or its forge is not served,
    and what the forge raises.
    """
    job = outside.replayable(job_id)
    target = _served(settings, job).item(job.repo, job.target)
    return outside.replay(msgspec.structs.replace(job, target=target))


def _kept_text(folder: Path, name: str) -> str | None:
    path = folder / name
    return path.read_text("utf-8") if path.is_file() else None


def iso(seconds: float) -> str:
    """UTC, to the millisecond, as records show times."""
    from datetime import UTC, datetime

    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


@functools.cache
def _host_name() -> str:
    import platform

    return platform.node()


def _event(
    name: str,
    job: Job,
    reason: str | None = None,
    level: int = logging.INFO,
    **more: Any,
) -> None:
    log_event(name, level, job=job.id, target=job.title, reason=reason, **more)


class Workers:
    """The pool: PI_CONCURRENCY threads that claim and run, one janitor, and one that
    holds the engine to the rows."""

    def __init__(self, dispatcher: Dispatcher, store: Store, concurrency: int) -> None:
        self.dispatcher, self.store = dispatcher, store
        self._adopted: list[tuple[Claimed, Box, float]] = []
        self._claiming, self._idle = threading.Lock(), threading.Lock()
        self._reconciled = threading.Event()
        self._stopping = threading.Event()
        self._was_full = False
        #: What `status` shows of the engine; a process before us may have left more.
        self._engine_problem: str | None = ""
        self._threads = [
            threading.Thread(target=self._work, name=f"worker-{i}", daemon=True)
            for i in range(1, concurrency + 1)
        ]
        self._threads += [
            threading.Thread(target=self._tidy, name="janitor", daemon=True),
            threading.Thread(target=self._mind_engine, name="engine", daemon=True),
        ]

    def start(self) -> None:
        """Take this file for ourselves; nothing is claimed before the reconcile.

        An engine that is away is waited for: deliveries are taken meanwhile. Raises
        `ConfigError` when another worker has the file.
        """
        self._lock = worker_lock(self.store.path)
        for thread in self._threads:
            thread.start()

    def stop(self, *, end_jobs: bool = False) -> None:
        """Claim nothing more; containers go on unless `end_jobs`."""
        if end_jobs:
            self.dispatcher.stop_jobs.set()
        self.dispatcher.leaving.set()
        self._stopping.set()
        self._reconciled.set()
        self.store.work.set()
        for thread in self._threads:
            thread.join(timeout=60)
        self._show_engine(None)  # nobody looks at it now
        self._lock.close()

    def _work(self) -> None:
        self._reconciled.wait()
        while not self._stopping.is_set():
            try:
                if not self._one():
                    self._listen()
            except Exception as error:  # the loop's edge: it outlives its troubles
                log_event("worker-trouble", logging.ERROR, error=error)
                self._stopping.wait(1.0)
        while self.dispatcher.stop_jobs.is_set() and self._adopt():
            pass  # those that nobody has attended yet are to end as well

    def _listen(self) -> None:
        """Until there may be work. One idle worker does; the others for its turn."""
        with self._idle:
            if not self._stopping.wait(BREATH_SECONDS):
                self.store.work.wait(1.0)
                self.store.work.clear()

    def _one(self) -> bool:
        if self._adopt():
            return True
        if self._full():
            return False
        with self._claiming:
            claimed = self.store.claim(self.dispatcher.limits())
            if claimed is None:
                return False
            self.dispatcher.in_hand.add(claimed.job.id)
        self.store.work.set()  # for the next worker, should there be more
        self.dispatcher.run(claimed)
        return True

    def _adopt(self) -> bool:
        """Follow a run that waits for it; whether there was one."""
        try:
            adopted = self._adopted.pop()
        except IndexError:
            return False
        self.store.work.set()  # for the next worker, should there be more
        self.dispatcher.adopt(*adopted)
        return True

    def _full(self) -> bool:
        """Whether the disk is too full for one more job; said when that changes."""
        free = self.dispatcher.room()
        full = free < DISK_FLOOR
        if full != self._was_full:
            self._was_full = full
            level = logging.ERROR if full else logging.INFO
            log_event("disk-low" if full else "disk-has-room", level, free=free)
        return full

    def _mind_engine(self) -> None:
        """Reconcile before anything is claimed and each hour; look often at it."""
        tries = 0
        while not self._reconcile(quiet=tries % TOLD_EVERY > 0):
            tries += 1
            if self._stopping.wait(1.0):
                return
        self._reconciled.set()
        try:
            self.dispatcher.prove_isolation(self.dispatcher.settings)
        except Exception as error:  # each job will look again and be refused
            log_event("isolation-not-proved", logging.ERROR, error=error)
        reconciled = self.dispatcher.steady()
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            self._look()
            if self.dispatcher.steady() - reconciled >= SWEEP_SECONDS:
                reconciled = self.dispatcher.steady()
                self._reconcile(time.time() - STALE_SECONDS)

    def _look(self) -> None:
        was_away = self._engine_problem
        try:
            self.dispatcher.engine.answer()
        except Exception as error:  # the loop's edge: it looks again
            if not was_away:
                log_event("engine-away", logging.ERROR, error=error)
            self._show_engine(error)
        else:
            if was_away:
                log_event("engine-is-back")
            self._show_engine(None)

    def _show_engine(self, problem: Exception | None) -> None:
        told = str(problem) if problem else None
        if told != self._engine_problem:
            with contextlib.suppress(InfraError):  # the next look shows it
                self.store.set_flag("engine-problem", told)
                self._engine_problem = told

    def _reconcile(self, before: float = float("inf"), quiet: bool = False) -> bool:
        """Whether rows and engine agree now."""
        try:
            with self._claiming:
                self._adopted += self.dispatcher.reconcile(before)
        except Exception as error:  # the loop's edge: it is tried again
            if not quiet:
                fix = getattr(error, "fix", None)  # no job starts until then
                log_event("not-reconciled", logging.ERROR, error=error, fix=fix)
            if not self._reconciled.is_set():
                self._show_engine(error)
            return False
        self._show_engine(None)
        self.store.work.set()
        return True

    def _tidy(self) -> None:
        """Publish what is due, show that we live, sweep hourly."""
        beaten = swept = -SWEEP_SECONDS
        while not self._stopping.wait(1.0):
            now = time.monotonic()
            try:
                self.dispatcher.publish_due()
                if now - beaten > HEARTBEAT_SECONDS:
                    beaten = now
                    self.store.beat()
                if now - swept > SWEEP_SECONDS:
                    swept = now
                    self.store.sweep()
                    keep = self.store.open_jobs()  # the end of some is not published
                    sweep_files(self.dispatcher.settings, time.time(), keep)
            except Exception as error:
                log_event("janitor-trouble", logging.ERROR, error=error)


def cron_ticks(on: On, after: float) -> Iterator[float]:
    """The due times of a cron rule after a moment, ascending, unix seconds.

    Each is given once: a time that a clock change skips comes at the first moment
    behind the gap, one that it repeats comes the first time only (as Debian's cron
    does for patterns of a fixed hour).
    """
    from datetime import datetime
    from zoneinfo import ZoneInfo

    from cronsim import CronSim

    begin = datetime.fromtimestamp(after, ZoneInfo(on.tz or "UTC"))
    last = after
    for tick in CronSim(str(on.pattern), begin):
        if tick.timestamp() > last:
            last = tick.timestamp()
            yield last


def last_due(on: On, after: float, until: float) -> float | None:
    """The latest due time after `after` and not after `until`.

    Looked for in growing spans back from `until`, because of a rule that fires
    every second a month may have been missed.
    """
    span = 60.0
    while True:
        begin = max(after, until - span)
        due = list(itertools.takewhile(lambda t: t <= until, cron_ticks(on, begin)))
        if due or begin == after:
            return due[-1] if due else None
        span *= 8


class Cron:
    """Fires cron rules: one job for a due time, and one for all that were missed.

    `rules` is asked at every turn, so an edited file counts at once. What was dealt
    with is remembered in the store: neither a restart nor a clock that steps back
    fires anything twice.
    """

    TICK = 0.5

    def __init__(
        self,
        store: Store,
        rules: Callable[[], Sequence[Rule]],
        clock: Clock = time.time,
    ) -> None:
        self.store, self.rules, self.clock = store, rules, clock
        self._seen: dict[str, float] = {}
        self._next: dict[str, float] = {}
        self._known: Sequence[Rule] | None = None
        self._turned = float("-inf")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cron", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def _run(self) -> None:
        while not self._stopping.wait(self.TICK):
            try:
                self.turn()
            except Exception as error:  # the loop's edge
                log_event("cron-trouble", logging.ERROR, error=error)

    def turn(self) -> None:
        """Fire what is due now."""
        now, rules = self.clock(), self.rules()
        if rules is not self._known or now < self._turned - DAY:
            self._learn(rules)
        self._turned = now
        for rule in rules:
            name = rule.on.id
            if name is not None and now >= self._next[name]:
                try:
                    self._fire(rule, name, now)
                except Exception as error:  # one rule's edge: the others are due too
                    log_event("cron-trouble", logging.ERROR, rule=name, error=error)

    def _learn(self, rules: Sequence[Rule]) -> None:
        crons = {str(r.on.id): r.on for r in rules if r.on.type == "cron"}
        wanted = {name: f"{on.tz or 'UTC'} {on.pattern}" for name, on in crons.items()}
        self._seen = self.store.schedules(wanted)
        self._next = {
            name: self._after(crons[name], self._seen[name]) for name in crons
        }
        self._known = rules

    @staticmethod
    def _after(on: On, moment: float) -> float:
        return next(cron_ticks(on, moment), float("inf"))

    def _fire(self, rule: Rule, name: str, now: float) -> None:
        due = last_due(rule.on, self._seen[name], now)
        if due is not None:
            job = cron_job(rule, int(due))
            fired = self.store.fire(name, due, job)
            _event("cron-fired" if fired else "cron-coalesced", job)
            self._seen[name] = due
        self._next[name] = self._after(rule.on, self._seen[name])


def sweep_files(settings: Settings, now: float, keep: Iterable[str] = ()) -> None:
    """Remove kept bundles past the retention and captured logs past theirs, but
    nothing of the jobs in `keep`.

    `now` is the machine's own time, which is what the files carry.
    """
    import shutil

    ages = (
        ("bundles", RETENTION_SECONDS),
        ("logs", settings.log_retention_days * DAY or float("inf")),
    )
    kept = frozenset(map(container_name, keep))
    for name, age in ages:
        folder = settings.state_dir / name
        for entry in folder.iterdir() if folder.is_dir() else ():
            if entry.name.removesuffix(".log") in kept:
                continue
            if entry.stat().st_mtime < now - age:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    if settings.sessions_dir:
        Lineages(settings.sessions_dir).sweep(now - SESSION_AGE_MAX)
    _sweep(settings.state_dir / "mirrors")  # a killed git leaves its token behind


def worker_lock(db: Path) -> IO[str]:
    """The file's one worker, by whatever name or link the file was given."""
    return lock_file(db.resolve().with_suffix(".worker.lock"))


def lock_file(path: Path) -> IO[str]:
    """An exclusive lock held until the file is closed or we die."""
    import fcntl

    held = path.open("w")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        held.close()
        raise ConfigError(
            f"another worker holds {path}", "stop it, or name another file with --db"
        ) from error
    return held


# =============================================================================
# intake
#
# The HTTP edge, the inbox that resolves who asked, the poller, and the watchers of
# the triggers and limits files. Knows nothing of Docker.
# =============================================================================


class WatchedFile(Generic[T]):
    """What a file says, read again whenever its content changes.

    `value` is always the last valid content and `problem` says what is wrong
    with the present one. The constructor raises `Faults` for a file that is
    absent or bad; `empty` is the value of one that may be absent at the start.
    """

    #: What the log calls it.
    name: ClassVar[str]
    #: Milliseconds without a change before the file is read: editors and
    #: deployments save in several steps.
    QUIET = 150
    #: Milliseconds after which it is read without any notice: a link that leads
    #: elsewhere, and what happens between two watches, give none.
    LOOK_ANYWAY = 2_000
    #: Milliseconds between looks for a file that is not there, or not for us.
    ABSENT = 500

    def __init__(self, path: Path, empty: T | None = None) -> None:
        self.path = path
        self.problem: str | None = None
        self._tell: Callable[[str | None], None] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow_on, name=self.name)
        self._thread.daemon = True
        self._content = self._read()
        absent = self._content is None and not os.path.lexists(path)
        self.value: T = (
            empty if absent and empty is not None else self._load(self._content)
        )

    def parse(self, content: bytes, source: str) -> T:
        """The value of a content. Raises `Faults`."""
        raise NotImplementedError

    def watch(self, tell: Callable[[str | None], None] | None = None) -> None:
        """Follow the file; `tell` gets its problem, now and whenever it changes."""
        self._tell = tell
        if tell:
            tell(self.problem)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def _read(self) -> bytes | None:
        try:
            return self.path.read_bytes()
        except OSError:
            return None

    def _load(self, content: bytes | None) -> T:
        source = str(self.path)
        if content is None:
            fix = "name another file, or let `pidispatch init` write an example"
            raise Faults(source, ["cannot be read"], fix)
        return self.parse(content, source)

    def refresh(self) -> bool:
        """Read the file; take valid new content, keep the last good otherwise.

        Returns whether it had changed.
        """
        content = self._read()
        if content == self._content:
            return False
        self._content = content
        try:
            self.value, self.problem = self._load(content), None
            log_event(f"{self.name}-reloaded")
        except PidispatchError as error:
            self.problem = error.message
            log_event(f"{self.name}-invalid", logging.ERROR, why=error)
        if self._tell:
            self._tell(self.problem)
        return True

    def _follow_on(self) -> None:
        while not self._stop.is_set():
            try:
                self.refresh()
                self._follow()
            except Exception as error:
                wait = self.ABSENT
                there = not isinstance(error, FileNotFoundError)
                if there and self._read() is not None:  # else its problem says so
                    wait = self.LOOK_ANYWAY
                    log_event(f"{self.name}-watch-failed", logging.ERROR, error=error)
                self._stop.wait(wait / 1000)

    def _follow(self) -> None:
        """Until its next change. A watch on a file dies with it, so each is for one.

        Not its directory: where the database is as well, each of its writes would
        be told, twenty for a delivery.
        """
        from watchfiles import watch

        for noticed in watch(
            self.path,
            watch_filter=None,
            step=self.QUIET,
            rust_timeout=self.LOOK_ANYWAY,
            yield_on_timeout=True,
            recursive=False,
            stop_event=self._stop,
            raise_interrupt=False,
        ):
            if self.refresh() or noticed:
                return


class TriggersFile(WatchedFile[tuple[Rule, ...]]):
    """The rules in force. One that names a forge that is not served is a fault, and
    so is a replica's model of a provider that is not among `providers`."""

    name = "triggers"

    def __init__(
        self,
        path: Path,
        served: Iterable[str],
        providers: Collection[str] | None = None,
    ) -> None:
        self.served, self.providers = frozenset(served), providers
        super().__init__(path)

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self.value

    def parse(self, content: bytes, source: str) -> tuple[Rule, ...]:
        rules = load_triggers(content, source, self.providers)
        faults = [
            f"triggers[{rule.index}].run.kind: {json.dumps(rule.run.kind)} is not "
            f"served: set {FORGES[rule.run.kind].secret_variable}"
            for rule in rules
            if rule.run.kind in FORGES and rule.run.kind not in self.served
        ]
        if faults:
            raise Faults(source, faults)
        return rules


class LimitsFile(WatchedFile[Limits]):
    """The limits in force. Only ./limits.json, which nobody named, may be absent."""

    name = "limits"

    def __init__(self, settings: Settings) -> None:
        self.zone = settings.timezone
        empty = None if settings.limits_file else NO_LIMITS
        super().__init__(limits_path(settings), empty)

    def parse(self, content: bytes, source: str) -> Limits:
        return load_limits(content, source, self.zone)


def judge(rules: Sequence[Rule], event: Event, own: str | None) -> Match | Drop:
    """What an event would start if its actor may: match first, then `self`."""
    found = match_event(rules, event)
    if isinstance(found, Drop) or event.incomplete:
        return found
    if event.actor is None:
        return Drop("missing-sender-id")
    return Drop("self") if event.actor.id == own else found


class Answer(NamedTuple):
    """What a delivery is answered with: an HTTP status and a JSON object."""

    status: int
    payload: Mapping[str, object]


#: The fixed word of each status; never text from a request.
STATUS_WORDS = {
    200: "ok",
    202: "accepted",
    303: "see-other",
    400: "malformed",
    401: "unauthorized",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    408: "timeout",
    411: "length-required",
    413: "too-large",
    414: "line-too-long",
    415: "unsupported-type",
    431: "headers-too-large",
    501: "unknown-method",
    503: "unavailable",
    505: "unsupported-version",
}


def _refusal(status: int, fix: str | None = None) -> Answer:
    """An error's answer; `fix` is a fixed sentence of ours, never a delivery's."""
    told = {"status": "error", "reason": STATUS_WORDS[status]}
    return Answer(status, told | ({"fix": fix} if fix else {}))


class Intake:
    """From one request's bytes to rows on disk, or the reason there are none."""

    def __init__(
        self,
        forges: Mapping[str, Forge],
        triggers: TriggersFile,
        store: Store,
        hourly: int,
        clock: Clock = time.time,
    ) -> None:
        self.forges = forges
        self.triggers = triggers
        self.store = store
        self.hourly = hourly
        self.clock = clock
        #: Our identity on each forge that has told it; None: we have none there.
        self.own: dict[str, str | None] = {}
        #: Rung when something was parked.
        self.bell = threading.Event()

    def receive(self, kind: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Verify, parse, match, `self`, authority, one transaction, answer.

        Header names are in lower case. Nothing here waits for a forge's API.
        """
        import hashlib

        forge = self.forges.get(kind)
        if forge is None:
            return _refusal(404)
        try:
            forge.verify(headers, body)
            event = forge.parse(headers, body)
            signed = forge.signed(headers, body)
            return self.take(event, hashlib.sha256(signed).hexdigest())
        except Unauthorized:
            log_event("delivery-unauthorized", logging.WARNING, forge=kind)
            return _refusal(401)
        except Malformed as error:
            log_event("delivery-malformed", logging.WARNING, forge=kind, error=error)
            return _refusal(400, error.fix)
        except InfraError as error:
            log_event("delivery-not-stored", logging.ERROR, forge=kind, error=error)
            return _refusal(503)

    def take(self, event: Event, body_sha: str) -> Answer:
        """Judge an event that is known to be genuine. May raise InfraError."""
        delivery = Delivery(
            id=set_id(event.forge, event.delivery),
            event=event,
            body_sha=body_sha,
            received=self.clock(),
        )
        self._note_ending(delivery)
        if event.remember is None:
            return self._decide(delivery)
        with self.store.group():  # each is compared with the one before
            return self._decide(self._compared(delivery))

    def _note_ending(self, delivery: Delivery) -> None:
        """What people made of a request of ours is noted whether or not a rule wants
        the event, and changes nothing of what becomes of the delivery."""
        event = delivery.event
        if event.ending and event.repo and event.target:
            place = forge_place(event.forge, event.repo)
            number, at = event.target.number, delivery.when
            if self.store.note_ending(place, number, event.ending, at):
                log_event("request-ended", request=number, became=event.ending)

    def _compared(self, delivery: Delivery) -> Delivery:
        """The delivery with the labels it added to those its item had before.

        The forge's API must tell when that is not known: nothing was seen of the
        item yet, something newer was, or this very event may have been (one that
        was dropped is judged afresh when it comes again).
        """
        event = delivery.event
        if not wants_added(event):
            return delivery
        before = self.store.labels_before(delivery)
        labels, seen_at = before or (frozenset(), float("inf"))
        added = tuple(n for n in event.labels if label_digest(n) not in labels)
        told = delivery.when > seen_at or (delivery.when == seen_at and added)
        found = {"added": added} if told else {"incomplete": True}
        event = msgspec.structs.replace(event, **cast(Any, found))
        return msgspec.structs.replace(delivery, event=event)

    def _decide(self, delivery: Delivery) -> Answer:
        event = delivery.event
        if event.fault is not None:
            return self._dropped(delivery, event.fault)
        found = judge(self.triggers.rules, event, self.own.get(event.forge))
        if isinstance(found, Drop):
            return self._unwanted(delivery, found.reason)
        if event.incomplete:
            return self._park(delivery, found)
        word = self.forges[event.forge].authority(event)
        if word == "denied":
            return self._unwanted(delivery, "not-allowed")
        if word == "ask" or event.forge not in self.own:
            return self._park(delivery, found)
        return self._admit(delivery, found)

    def _unwanted(self, delivery: Delivery, reason: str) -> Answer:
        """Not for us, unless it once was: the rules have changed since."""
        kind = delivery.event.forge
        if self.store.seen(kind, delivery.id, delivery.body_sha):
            return self._known("duplicate")
        return self._dropped(delivery, reason)

    def _park(self, delivery: Delivery, match: Match) -> Answer:
        if not self.store.park(delivery, match):
            return self._known("duplicate")
        self.store.then(self.bell.set)
        return Answer(202, {"status": "pending"})

    def _admit(self, delivery: Delivery, match: Match) -> Answer:
        jobs = fan_out(match, delivery.event)
        status, ids = self.store.admit(delivery, jobs, self.hourly)
        if status == "queued":
            return Answer(202, {"status": status, "jobs": ids})
        if status == "rate-limited":
            return Answer(200, {"status": "ignored", "reason": status})
        return Answer(200, {"status": status})

    def _known(self, status: str) -> Answer:
        self._count(status, lambda: self.store.count(status))
        return Answer(200, {"status": status})

    def _dropped(self, delivery: Delivery, reason: str) -> Answer:
        """Always 2xx: GitLab switches a hook off for good on 4xx answers."""
        self._count(reason, lambda: self.store.drop(delivery, reason))
        return Answer(200, {"status": "ignored", "reason": reason})

    def _count(self, word: str, write: Callable[[], None]) -> None:
        """A lost count is no reason to make a forge send again."""
        try:
            write()
        except InfraError as error:
            log_event("count-lost", logging.ERROR, word=word, error=error)


class Inbox:
    """Resolves pending deliveries: who asked, and may they?

    A few at a time for each forge, so that one forge that hangs holds up no
    other. What cannot be told is tried again after 1 s, doubling to 5 minutes,
    and dropped `authority-unknown` after a day.
    """

    TICK = 0.5
    AT_ONCE = 4
    TRIES_MIN = 10
    BACKOFF_LIMIT = 300.0

    def __init__(self, intake: Intake) -> None:
        self.intake = intake
        self.forges = intake.forges
        self.store = intake.store
        self.clock = intake.clock
        self.bell = intake.bell
        self._busy: dict[str, str] = {}
        self._troubled: set[str] = set()
        self._recovered: set[str] = set()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)

    def start(self, patience: float = 2.0) -> None:
        """Begin; waits up to `patience` seconds to learn who we are.

        Until a forge has said so, its deliveries wait in the inbox: nobody can
        tell whether they are our own.
        """
        learners = [
            threading.Thread(target=self._learn_quietly, args=(forge,), daemon=True)
            for forge in self.forges.values()
        ]
        for learner in learners:
            learner.start()
        end = time.monotonic() + patience
        for learner in learners:
            learner.join(max(0.0, end - time.monotonic()))
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self.bell.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def _learn(self, forge: Forge) -> str | None:
        self.intake.own[forge.kind] = own = forge.own_id()
        return own

    def _learn_quietly(self, forge: Forge) -> None:
        try:
            self._learn(forge)
        except PidispatchError as error:
            log_event(
                "identity-unknown", logging.WARNING, forge=forge.kind, error=error
            )

    def _run(self) -> None:
        while not self._stopped:
            self.bell.wait(self.TICK)
            self.bell.clear()
            try:
                self.turn()
            except Exception as error:
                log_event("inbox-failed", logging.ERROR, error=error)

    def turn(self) -> None:
        """Start resolving whatever is due and fits."""
        # one that ends while we read is in the rows as it was: it is skipped too
        held = frozenset(self._busy)
        for delivery, match, attempts in self._due():
            kind = delivery.event.forge
            full = list(self._busy.values()).count(kind) >= self.AT_ONCE
            if full or delivery.id in held or self._stopped:
                continue
            given = (delivery, match, attempts)
            resolver = threading.Thread(target=self._resolve, args=given, daemon=True)
            self._busy[delivery.id] = kind
            try:
                resolver.start()
            except RuntimeError:  # no thread to be had now
                del self._busy[delivery.id]
                raise

    def _due(self) -> list[tuple[Delivery, Match, int]]:
        """What is due; and, once a forge answers again, all that waits for it."""
        now = self.clock()
        due = self.store.due_pending(now)
        for kind in tuple(self._recovered):
            early = self.store.due_pending(now + self.BACKOFF_LIMIT)
            waiting = [row for row in early if row[0].event.forge == kind]
            due = due + [row for row in waiting if row not in due]
            if all(row[0].id in self._busy for row in waiting):
                self._recovered.discard(kind)
        return due

    def _resolve(self, delivery: Delivery, match: Match, attempts: int) -> None:
        kind = delivery.event.forge
        try:
            self.store.settle(delivery.id, self._verdict(delivery, match))
            if kind in self._troubled:
                self._troubled.discard(kind)
                self._recovered.add(kind)
        except Exception as error:
            self._try_later(delivery, attempts, error)
        finally:
            self._busy.pop(delivery.id, None)
            self.bell.set()

    def _verdict(self, delivery: Delivery, match: Match) -> str | None:
        """Admit the delivery (None), or say the reason it is dropped for."""
        event = delivery.event
        forge = self.forges.get(event.forge)
        if forge is None:
            raise InfraError(f"{event.forge} is not served any more")
        own = self._learn(forge)
        if event.incomplete:  # no rule could be told apart before
            event = forge.complete(event)
            delivery = msgspec.structs.replace(delivery, event=event)
            found = judge(self.intake.triggers.rules, event, own)
            if isinstance(found, Drop):
                return found.reason
            match = found
        if event.actor is None:
            return "missing-sender-id"
        if event.actor.id == own:
            return "self"
        word = forge.authority(event)
        if word == "denied" or (word == "ask" and not forge.ask(event)):
            return "not-allowed"
        self.store.admit(delivery, fan_out(match, event), self.intake.hourly)
        return None

    def _try_later(self, delivery: Delivery, attempts: int, error: Exception) -> None:
        kind, now = delivery.event.forge, self.clock()
        self._troubled.add(kind)
        self._recovered.discard(kind)
        log_event(
            "authority-unknown", logging.WARNING, delivery=delivery.id, error=error
        )
        try:
            # a day of sleep alone is no day of trying
            if now - delivery.received >= DAY and attempts >= self.TRIES_MIN:
                self.store.settle(delivery.id, "authority-unknown")
            else:
                delay = min(2.0 ** min(attempts, 16), self.BACKOFF_LIMIT)
                self.store.postpone(delivery.id, now + delay)
        except PidispatchError as trouble:
            log_event(
                "inbox-failed", logging.ERROR, delivery=delivery.id, error=trouble
            )


class Poller:
    """Asks forges what happened, and takes it as if it had been delivered.

    A first look takes nothing: work starts from what happens after it. The ids and
    times of events make a later webhook of one, or a second look, start nothing
    twice. What could not be read is asked again from where it was left.
    """

    TICK = 1.0
    #: Ids that a cursor holds at most.
    SEEN = 10_000

    def __init__(
        self, intake: Intake, repos: Sequence[Polled], interval: float
    ) -> None:
        self.intake = intake
        self.store, self.clock = intake.store, intake.clock
        self.repos, self.interval = repos, interval
        self._asked: dict[Polled, tuple[float, float]] = {}
        self._names: dict[Polled, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)

    def start(self) -> None:
        self.store.forget_polls()
        if self.repos:
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.turn()
            except Exception as error:
                log_event("poller-failed", logging.ERROR, error=error)
            self._stop.wait(self.TICK)

    def turn(self) -> None:
        """Look at every repository that is due."""
        for polled in self.repos:
            asked, wait = self._asked.get(polled, (0.0, 0.0))
            # before it was asked: the clock was set back
            waits = 0 <= self.clock() - asked < wait
            if not waits and not self._stop.is_set():
                wait, trouble = self._look(polled)
                self._asked[polled] = (self.clock(), max(self.interval, wait))
                self.store.set_flag(f"poll:{polled.repo}", trouble)

    def _look(self, polled: Polled) -> tuple[float, str]:
        """Every stream of one repository: seconds to wait then, and what is wrong."""
        forge, wait, trouble = self.intake.forges[polled.kind], 0.0, ""
        for stream in forge.streams:
            try:
                wait = max(wait, self._follow(forge, self._name(polled), stream))
            except Throttled as error:
                return max(wait, error.wait), error.message
            except Exception as error:  # the loop's edge: others go on
                known = isinstance(error, PidispatchError)
                trouble = str(error) if known else f"internal error: {error!r}"
                level = logging.WARNING if known else logging.ERROR
                said = {"repo": polled.repo, "stream": stream, "error": trouble}
                log_event("poll-failed", level, **said)
        return wait, trouble

    def _name(self, polled: Polled) -> str:
        if polled not in self._names:
            forge = self.intake.forges[polled.kind]
            self._names[polled] = forge.repository(polled.repo)
        return self._names[polled]

    def _follow(self, forge: Forge, repo: str, stream: str) -> float:
        """Take what is new in one stream; returns the seconds to wait."""
        key = f"{forge.kind}:{repo}"
        cursor, etag = self.store.cursor(key, stream)
        if cursor and self.clock() - cursor.asked > POLL_GAP:
            log_event("poll-gap", logging.WARNING, repo=repo, stream=stream)
            cursor, etag = None, None
        since = cursor.at - POLL_OVERLAP if cursor else None
        news = forge.poll(repo, stream, since, etag)
        done = dict(cursor.seen) if cursor else {}
        fresh = self._fresh(news, since, done)
        try:
            for event in fresh:
                if cursor:
                    self._take(event)
                done[event.delivery] = event.when or 0.0
        except Exception:
            if cursor:
                left = msgspec.structs.replace(cursor, seen=done)
                self.store.keep_cursor(key, stream, left, None)
            raise
        now = self.clock()
        at = max(cursor.at if cursor else 0.0, min(news.newest or 0.0, now))
        self.store.keep_cursor(
            key, stream, Cursor(at, self._kept(done, at), now), news.etag
        )
        return news.wait

    @staticmethod
    def _fresh(
        news: News, since: float | None, done: Mapping[str, float]
    ) -> list[Event]:
        """What is not older than the cursor and was not there before, oldest first.

        Lists are newest first, and those of one second in that order as well.
        """
        found = {event.delivery: event for event in reversed(news.events)}
        new = [
            event
            for event in found.values()
            if event.delivery not in done and (event.when or 0.0) >= (since or 0.0)
        ]
        return sorted(new, key=lambda event: event.when or 0.0)

    def _kept(self, done: Mapping[str, float], at: float) -> dict[str, float]:
        recent = [(key, t) for key, t in done.items() if t >= at - POLL_OVERLAP]
        return dict(sorted(recent, key=lambda pair: pair[1])[-self.SEEN :])

    def _take(self, event: Event) -> None:
        import hashlib

        name = f"{event.forge} {event.repo} {event.delivery}"
        answer = self.intake.take(event, hashlib.sha256(name.encode()).hexdigest())
        become = answer.payload.get("reason") or answer.payload["status"]
        log_event("polled", delivery=event.delivery, became=become)


class EdgeLimits(msgspec.Struct, frozen=True):
    """Bounds of a server; seconds are totals by the wall clock."""

    connections: int = 512
    threads: int = 16
    backlog: int = 256
    line: int = 8_192
    head: int = 32_768
    headers: int = 100
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    send_seconds: float = 10.0
    linger_seconds: float = 2.0
    #: Bodies above this are never judged where all others wait: a comment can be
    #: made to take half a second.
    quick: int = 40_960
    #: Bodies above `large` bytes are held by at most `larges` connections at once.
    large: int = 1024 * 1024
    larges: int = 8
    #: How often the deadlines are looked at.
    tick: float = 0.1


_METHODS = _pattern("GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS|TRACE|CONNECT")
_TOKEN = _pattern(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_REQUEST_LINE = _pattern(r"[!-~]+ [!-~]+ HTTP/[0-9]\.[0-9]\r\n")
_HEADER_LINE = _pattern(rf"({_TOKEN.pattern}):([\t -~\x80-\xff]*)\r\n")
#: Headers that decide something, and so may stand only once.
_ONCE = _pattern(
    r"signature|token|delivery|event|^(content-(length|type)|transfer-encoding|"
    r"authorization|expect|host|webhook-id|webhook-timestamp|idempotency-key)$"
)
#: What is read ahead of a request that is being answered.
_READ_AHEAD = 65_536


class Asked(NamedTuple):
    """One HTTP request: header names in lower case, the target as it came."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes


class Reply(NamedTuple):
    """What goes back: a status, a body of that media type, more headers."""

    status: int
    body: bytes
    media: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, answer: Answer) -> Reply:
        return cls(answer.status, msgspec.json.encode(answer.payload))


class HttpServer:
    """An HTTP/1.1 server with everything bounded; a kind of it says what it serves.

    One thread moves the bytes of all connections (asyncio's loop), so that a slow
    client holds a socket and nothing else. `methods` names what a path takes
    (nothing: 404), `answer` answers one request that came whole, in a thread of a
    small pool; `media_types` are the bodies it reads.
    """

    name: ClassVar[str]
    media_types: ClassVar[tuple[str, ...]] = (FORM_TYPE,)
    most: ClassVar[int] = 65_536

    def methods(self, path: str) -> tuple[str, ...]:
        raise NotImplementedError

    def answer(self, asked: Asked) -> Reply:
        raise NotImplementedError

    def __init__(self, host: str, port: int, limits: EdgeLimits | None = None) -> None:
        import socket
        from concurrent.futures import ThreadPoolExecutor

        self.limits = limits or EdgeLimits()
        self.closing = False
        self.open: set[_Conversation] = set()
        #: Those whose (next) request has not come whole; the one that has been so
        #: for longest first.
        self.waiting: dict[_Conversation, None] = {}
        #: How many hold a large body.
        self.larges = 0
        self._ticking = False
        self.pool = ThreadPoolExecutor(self.limits.threads, self.name)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server(
            (host, port), family=family, backlog=self.limits.backlog
        )
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        import asyncio
        from concurrent.futures import Future

        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(self._failed)
        self._opened: Future[None] = Future()
        self._thread.start()
        if self._opened.exception():  # before there is a server it cannot be stopped
            self._thread.join()
        self._opened.result()

    def _run(self) -> None:
        # to asyncio the backlog is also how often it tries, and fails, before it waits
        opening = self.loop.create_server(
            lambda: _Conversation(self), sock=self._socket, backlog=1
        )
        try:
            self._server = self.loop.run_until_complete(opening)
            self._socket.listen(self.limits.backlog)
        except BaseException as error:  # raised again where it was started
            self.loop.close()
            self._opened.set_exception(error)
            return
        self._opened.set_result(None)
        self.loop.run_forever()
        self.loop.close()

    def stop(self, patience: float = 5.0) -> None:
        """Accept no more; let requests in progress end, up to `patience` seconds."""
        import asyncio

        if self._thread.is_alive():
            ending = self._end(patience)
            asyncio.run_coroutine_threadsafe(ending, self.loop).result()
            self.pool.shutdown()  # while there is a loop that takes its replies
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(5)
        self._socket.close()

    async def _end(self, patience: float) -> None:
        import asyncio

        self.closing = True
        self._server.close()
        for conversation in tuple(self.waiting):
            if not conversation.buffer:
                conversation.hang_up()
        end = time.monotonic() + patience
        while self.open and time.monotonic() < end:
            await asyncio.sleep(0.01)
        for conversation in tuple(self.open):
            conversation.transport.abort()
        await asyncio.sleep(0)

    def _failed(self, _: Any, context: Mapping[str, Any]) -> None:
        """What the loop itself met: no descriptor left for a connection, a bug."""
        error = context.get("exception") or context["message"]
        if not self.closing:
            log_event(f"{self.name}-failed", logging.ERROR, error=error)

    def _tick(self) -> None:
        now = time.monotonic()
        for conversation in tuple(self.open):
            conversation.look(now)
        self._ticking = False
        self._keep_ticking()

    def _keep_ticking(self) -> None:
        """One tick at a time, while there is a connection to look at."""
        if self.open and not self._ticking:
            self._ticking = True
            self.loop.call_later(self.limits.tick, self._tick)

    def joined(self, conversation: _Conversation) -> None:
        """Over the limit the one that has longest sent no whole request gives way."""
        self.open.add(conversation)
        self._keep_ticking()
        self.waiting[conversation] = None
        if len(self.open) > self.limits.connections:
            slowest = next(iter(self.waiting))
            del self.waiting[slowest]  # the next one's turn is another's
            slowest.hang_up()

    def left(self, conversation: _Conversation) -> None:
        self.open.discard(conversation)
        self.waiting.pop(conversation, None)

    def take(self, conversation: _Conversation, asked: Asked) -> None:
        """Have the request answered; `conversation.go_on` gets the reply."""
        answering = self.loop.run_in_executor(self.pool, self.reply, asked)
        answering.add_done_callback(lambda done: conversation.go_on(done.result()))

    def reply(self, asked: Asked) -> Reply:
        try:
            return self.answer(asked)
        except Exception as error:
            name = f"{self.name}-request-failed"
            log_event(name, logging.ERROR, path=asked.path, error=error)
            return Reply.of(_refusal(503))


class Edge(HttpServer):
    """The public receiver of deliveries.

    What has come meanwhile is answered together, after one commit for all: the
    rate is not bound by a wait for the disk, or a change of threads, for each.
    """

    name = "edge"
    media_types = ("application/json", FORM_TYPE)
    most = MAX_BODY_BYTES

    def __init__(
        self, intake: Intake, host: str, port: int, limits: EdgeLimits | None = None
    ) -> None:
        self.intake = intake
        #: Whose deliveries a path takes; the health check takes nobody's.
        hooked = [kind for kind, forge in intake.forges.items() if forge.hooked]
        self.routes = {f"/{kind}": kind for kind in hooked} | {"/healthz": ""}
        self.routes |= {f"{path}/": kind for path, kind in self.routes.items()}
        self.routes |= {path: k for k in hooked for path in intake.forges[k].aliases}
        self._taken: list[tuple[_Conversation, Asked]] = []
        super().__init__(host, port, limits)

    def start(self) -> None:
        # each of a delivery's dozen turns would wait 5 ms for a page of the panel
        sys.setswitchinterval(0.0005)
        super().start()

    def methods(self, path: str) -> tuple[str, ...]:
        kind = self.routes.get(path)
        if kind is None:
            return ()
        return ("POST",) if kind else ("GET",)

    def answer(self, asked: Asked) -> Reply:
        kind = self.routes[asked.path]
        if not kind:
            return Reply.of(Answer(200, {"status": "ok"}))
        return Reply.of(self.intake.receive(kind, asked.headers, asked.body))

    def take(self, conversation: _Conversation, asked: Asked) -> None:
        if len(asked.body) > self.limits.quick:
            super().take(conversation, asked)
            return
        if not self._taken:
            self.loop.call_soon(self._answer_taken)
        self._taken.append((conversation, asked))

    def _answer_taken(self) -> None:
        taken, self._taken = self._taken, []
        asked = [one for _, one in taken]
        try:
            with self.intake.store.group():
                replies = [self.reply(one) for one in asked]
        except InfraError:  # nothing of it was done: each by itself
            replies = [self.reply(one) for one in asked]
        for (conversation, _), reply in zip(taken, replies, strict=True):
            conversation.go_on(reply)


class _Stop(Exception):
    """The request ends here, with this status, and so does its connection."""


def _demand(holds: object, status: int) -> None:
    if not holds:
        raise _Stop(status)


if TYPE_CHECKING:
    from asyncio import Protocol as AsyncioProtocol
    from asyncio import Transport

    #: A part of a conversation: it yields while it waits for what `_wait` names.
    _Part = Generator[None, Any, T]
else:  # as slow to import as all else here
    AsyncioProtocol = object


class _Conversation(AsyncioProtocol):
    """One connection: a strict parse and plain answers.

    `_script` is the conversation from its first byte to its last. `go_on` resumes
    it when there is what it waits for: bytes, a reply, room to send, or its turn
    for a large body; `look` when it has waited too long. (The library's parser
    folds `//`, mends broken headers and knows another order of faults. It reads
    headers as a mail: a second of CPU for 32 kB of `multipart` made for it.)
    """

    transport: Transport

    def __init__(self, server: HttpServer) -> None:
        self.server, self.limits = server, server.limits
        self.buffer = bytearray()
        self.eof = self.full = False
        self.close_after = True
        self.waits: Literal["bytes", "reply", "room", "turn"] = "bytes"
        self.deadline = float("inf")
        self._script = self._converse()

    # -- what the loop tells ---------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(0)  # told of every byte that waits
        self.server.joined(self)
        self.go_on()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.waits == "bytes":
            self.go_on()
        elif len(self.buffer) > _READ_AHEAD:
            self.transport.pause_reading()

    def eof_received(self) -> bool:
        self.eof = True
        if self.waits == "bytes":
            self.go_on()
        return True  # it can still be answered

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        if self.waits == "room":
            self.go_on()

    def connection_lost(self, _: Exception | None) -> None:
        self.server.left(self)
        self._script.close()

    # -- how it goes on --------------------------------------------------------

    def go_on(self, reply: Reply | None = None, *, late: bool = False) -> None:
        try:
            self._script.throw(_Stop(408)) if late else self._script.send(reply)
        except StopIteration:
            self.deadline = float("inf")
            self.transport.close()
        except Exception as error:
            self.deadline = float("inf")
            if not isinstance(error, OSError):  # the client is gone
                log_event(f"{self.server.name}-failed", logging.ERROR, error=error)
            self.transport.abort()

    def look(self, now: float) -> None:
        """See to it that it does not wait for ever."""
        if now > self.deadline:
            self.go_on(late=True)
        elif self.waits == "turn":
            self.go_on()

    def within(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds

    def hang_up(self) -> None:
        """Receive no more: what it has just sent is still answered."""
        with contextlib.suppress(OSError):
            self.transport.get_extra_info("socket").shutdown(0)

    def _wait(self, what: Literal["bytes", "reply", "room", "turn"]) -> _Part[Any]:
        """Until there is that. Raises `_Stop` when the deadline passes first."""
        self.waits = what
        if what == "bytes" and not self.transport.is_reading():
            self.transport.resume_reading()
        found = yield
        return found

    def _converse(self) -> _Part[None]:
        try:
            self.within(self.limits.head_seconds)
            yield from self._request()
            while not self.close_after and (yield from self._comes()):
                self.within(self.limits.head_seconds)
                yield from self._request()
        except _Stop as stop:
            yield from self._send(Reply.of(_refusal(*stop.args)))
        # closing at once would reset the connection, and take the answer away from
        # a client that is still sending: read on for a moment
        self.server.waiting[self] = None
        self.transport.write_eof()
        self.within(self.limits.linger_seconds)
        with contextlib.suppress(_Stop):
            while not self.eof:
                self.buffer.clear()
                yield from self._wait("bytes")

    def _comes(self) -> _Part[bool]:
        """Whether another request comes."""
        self.within(self.limits.head_seconds)
        self.server.waiting[self] = None
        with contextlib.suppress(_Stop):
            while not (self.buffer or self.eof or self.server.closing):
                yield from self._wait("bytes")
        return bool(self.buffer) and not self.server.closing

    def _line(self, most: int) -> _Part[bytes]:
        """Up to a line feed, the end of all, or `most` bytes."""
        seen = 0
        while (end := self.buffer.find(b"\n", seen, most) + 1) == 0:
            seen = len(self.buffer)
            if self.eof or seen >= most:
                end = min(seen, most)
                break
            yield from self._wait("bytes")
        line = bytes(self.buffer[:end])
        del self.buffer[:end]
        return line

    # -- one request -------------------------------------------------------------

    def _request(self) -> _Part[None]:
        """Read line, headers and body by their strict forms; send the answer."""
        first = yield from self._line(65_537)
        if first == b"\r\n":  # one is forgiven (RFC 9112, 2.2)
            first = yield from self._line(65_537)
        line = first.decode("latin-1")
        self._check_line(line)
        self.fields = yield from self._headers()
        _demand(self.methods, 404)
        asked = self.fields.get("connection", "").lower()
        self.close_after = line.endswith("/1.0\r\n") or "close" in asked
        if self.command == "GET":
            # a body is not read
            bodied = {"content-length", "transfer-encoding"} & self.fields.keys()
            self.close_after |= bool(bodied)
            yield from self._answer(b"")
        else:
            yield from self._post()

    def _check_line(self, line: str) -> None:
        """Find the route, or the first fault in the fixed order."""
        self.command, _, rest = line.partition(" ")
        self.path, _, self.query = rest.partition(" ")[0].partition("?")
        self.methods = self.server.methods(self.path)
        self.allow = self.methods or ("GET", "POST")
        long = len(line) > self.limits.line
        _demand(_TOKEN.fullmatch(self.command), 400)
        _demand(_METHODS.fullmatch(self.command), 501)
        _demand(self.command in self.allow, 405)
        _demand(_REQUEST_LINE.fullmatch(line), 414 if long else 400)
        _demand(" HTTP/1." in line, 505)
        _demand(not long, 414)

    def _headers(self) -> _Part[dict[str, str]]:
        """The headers by lower-case name; of one that repeats, the last."""
        headers: dict[str, str] = {}
        room = self.limits.head
        for _ in range(self.limits.headers + 1):
            line = yield from self._line(room)
            if line == b"\r\n":
                return headers
            found = _HEADER_LINE.fullmatch(line.decode("latin-1"))
            if found is None:
                raise _Stop(431 if len(line) == room else 400)
            room -= len(line)
            name = found[1].lower()
            _demand(name not in headers or not _ONCE.search(name), 400)
            headers[name] = found[2].strip(" \t")
        raise _Stop(431)

    def _post(self) -> _Part[None]:
        given = self.fields.get("content-length", "")
        media = self.fields.get("content-type", "").partition(";")[0].strip().lower()
        _demand("content-length" in self.fields, 411)
        _demand("transfer-encoding" not in self.fields, 411)
        _demand(re.fullmatch("[0-9]+", given), 400)
        _demand(len(given) < 19 and int(given) <= self.server.most, 413)
        _demand(media in self.server.media_types, 415)
        length = int(given)
        self.within(self.limits.body_seconds)
        if length <= self.limits.large:
            return (yield from self._with_body(length))
        yield from self._turn()
        try:
            yield from self._with_body(length)
        finally:
            self.server.larges -= 1

    def _turn(self) -> _Part[None]:
        """Be one of the few that hold a large body; the others wait unread."""
        while self.server.larges >= self.limits.larges:
            self.transport.pause_reading()
            try:
                yield from self._wait("turn")
            except _Stop:
                raise _Stop(503) from None
        self.server.larges += 1

    def _with_body(self, length: int) -> _Part[None]:
        if "expect" in self.fields:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while len(self.buffer) < length:
            _demand(not self.eof, 400)
            yield from self._wait("bytes")
        body = bytes(self.buffer[:length])
        del self.buffer[:length]
        yield from self._answer(body)

    def _answer(self, body: bytes) -> _Part[None]:
        asked = Asked(self.command, self.path, self.query, self.fields, body)
        self.deadline = float("inf")
        self.server.waiting.pop(self, None)
        self.server.take(self, asked)
        reply = yield from self._wait("reply")
        yield from self._send(reply)

    def _send(self, reply: Reply) -> _Part[None]:
        """In one write: the parts of an answer cost 40 ms of delayed ACK."""
        self.close_after |= reply.status >= 400 or self.server.closing
        lines = [
            f"HTTP/1.1 {reply.status} {STATUS_WORDS[reply.status]}",
            f"Content-Type: {reply.media}",
            f"Content-Length: {len(reply.body)}",
            *(f"{name}: {value}" for name, value in reply.headers),
        ]
        if self.close_after:
            lines.append("Connection: close")
        if reply.status == 405:
            lines.append(f"Allow: {', '.join(self.allow)}")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        self.transport.write(head + reply.body)
        self.within(self.limits.send_seconds)
        try:
            while self.full:
                yield from self._wait("room")
        except _Stop:  # it does not read
            self.eof = self.close_after = True
            self.transport.abort()


# =============================================================================
# surfaces
#
# What people look at: tables, one run, one rule, the doctor, the log; and the
# service that ties the sections together. Reads only, but for the service.
# =============================================================================


class Redactor(logging.Filter):
    """The last step of every log line: no known secret leaves, in any spelling."""

    def __init__(self, secrets_: Iterable[str]) -> None:
        super().__init__()
        self.spellings = sorted(
            {
                s
                for secret in secrets_
                if len(secret) >= 6
                for s in spellings_of(secret)
            },
            key=len,
            reverse=True,
        )

    def redact(self, text: str) -> str:
        for spelling in self.spellings:
            text = text.replace(spelling, "***")
        return without_live_secrets(text)


def secrets_of(settings: Settings) -> Iterator[str]:
    yield from settings.keys.values()
    for name, row in SETTINGS.items():
        value = getattr(settings, name)
        if _is_secret(row.variable) and isinstance(value, str | tuple):
            yield from (value,) if isinstance(value, str) else value


class LogFormat(logging.Formatter):
    """One line an event: JSON for machines, plain words on a terminal."""

    def __init__(self, redactor: Redactor, *, plain: bool) -> None:
        super().__init__()
        self.redactor, self.plain = redactor, plain

    def format(self, record: logging.LogRecord) -> str:
        given = getattr(record, "fields", {}).items()
        fields = {k: v for k, v in given if v not in (None, "")}
        event = record.getMessage()
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if self.plain:
            pairs = "".join(f" {k}={v}" for k, v in fields.items())
            first = f"{time.strftime('%H:%M:%S')} {event}{pairs}"
            lines = [first, *trace.split("\n")] if trace else [first]
            line = "\n".join(map(plain_text, lines))
        else:
            head = {"t": iso(record.created), "level": record.levelname.lower()}
            more = {"traceback": trace} if trace else {}
            line = json.dumps({**head, "event": event, **fields, **more}, default=str)
        return self.redactor.redact(line)


def set_up_logging(settings: Settings) -> None:
    handler = logging.StreamHandler(sys.stderr)
    redactor = Redactor(secrets_of(settings))
    handler.setFormatter(LogFormat(redactor, plain=sys.stderr.isatty()))
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False


class Worker:
    """Workers alone on one file, beside a `serve --no-worker` or after one.

    `triggers` None: cron is off, and a file that `serve` refuses is never read.
    """

    def __init__(
        self,
        settings: Settings,
        triggers: Path | None,
        *,
        engine: Engine | None = None,
        clock: Clock = time.time,
        steady: Clock = time.monotonic,
    ) -> None:
        self.settings = settings
        self.forges = forges_of(settings, clock=clock)
        self.triggers = (
            TriggersFile(triggers, self.forges, settings.providers)
            if triggers
            else None
        )
        self.limits = LimitsFile(settings)
        self.store = Store(settings.db, clock)
        self.engine = engine or DockerEngine(settings, self.store.instance())
        dispatcher = Dispatcher(
            settings,
            self.store,
            self.engine,
            self.forges,
            clock=clock,
            steady=steady,
            limits=lambda: self.limits.value,
        )
        self.workers = Workers(dispatcher, self.store, settings.concurrency)
        self.cron = Cron(self.store, self._rules, clock)
        self._works = False

    def _rules(self) -> Sequence[Rule]:
        return self.triggers.rules if self.triggers else ()

    def start(self, *, worker: bool = True) -> None:
        """Raises `ConfigError` when another worker has the file."""
        if worker:
            self.workers.start()
            self._works = True
            self.limits.watch(
                lambda problem: self.store.set_limits(self.limits.value, problem)
            )
        else:
            self.store.never_checkpoint()
        if self.triggers:
            self.triggers.watch(
                lambda problem: self.store.set_flag("triggers-problem", problem)
            )
            if worker:
                self.cron.start()

    def stop(self, *, end_jobs: bool = False) -> None:
        if self.triggers:
            self.triggers.stop()
        self.limits.stop()
        if self._works:
            self.cron.stop()
            self.workers.stop(end_jobs=end_jobs)
        self.store.close()


# -- one run of a folder --------------------------------------------------------


class LocalRun:
    """One `pidispatch run`, from its row to its record.

    A worker that runs takes it. Without one it is run here, under the worker's
    lock, and nothing else of the queue is; so a worker that leaves, and another
    `run`, are no end of it either.
    """

    TICK = 0.2

    def __init__(
        self, settings: Settings, job: Job, *, engine: Engine | None = None
    ) -> None:
        self.settings, self.engine = settings, engine
        self.limits = LimitsFile(settings)
        self.store = Store(settings.db)
        self.store.never_checkpoint()
        if self.store.flag("paused"):
            raise ConfigError("pidispatch is paused", "pidispatch resume")
        self.job, self.new = self.store.admit_local(job)
        self._thread: threading.Thread | None = None
        self._lock: IO[str] | None = None

    def wait(self, tell: Callable[[RunRow], None] = lambda row: None) -> Record:
        """The record, once it is there; `tell` gets the row while it is not.

        An interrupt cancels what runs here, and leaves what a worker runs to it.
        """
        while True:
            row, record, _ = self.store.run(self.job)
            tell(row)
            if record is not None:
                return record
            if row.state == "queued":
                self._take()
            time.sleep(self.TICK)

    @property
    def here(self) -> bool:
        """Whether this process runs it."""
        return self._lock is not None

    def cancel(self) -> None:
        self.store.cancel(self.job)

    def close(self) -> None:
        """Lets go of the file. A run of ours goes on in its container if it must,
        and the next worker adopts it."""
        if self._lock:
            self.dispatcher.leaving.set()
        if self._thread:
            self._thread.join(60)
        if self._lock:
            self._lock.close()
        self.store.close()

    def _take(self) -> None:
        """Run it here when nobody else holds the file; at most one thread at it."""
        if self._thread and self._thread.is_alive():
            return
        if self._lock is None:
            try:
                self._lock = worker_lock(self.store.path)
            except ConfigError:
                return
            engine = self.engine or DockerEngine(self.settings, self.store.instance())
            self.dispatcher = Dispatcher(
                self.settings, self.store, engine, {}, limits=lambda: self.limits.value
            )
            self.dispatcher.deferrals_max = 0  # who waits is told at once
        claimed = self.store.claim(self.limits.value, self.job)
        if claimed:
            run = self.dispatcher.run
            self._thread = threading.Thread(target=run, args=(claimed,), daemon=True)
            self._thread.start()
        elif holder := self.store.holder(self.job):
            self.cancel()
            why = f"{holder} has the folder, and the worker that ran it is gone"
            raise ConfigError(why, "start `pidispatch worker`, which collects it")


def answer_of(settings: Settings, job: str) -> str | None:
    """What a run's agent said to the operator, if it wrote anything."""
    return _kept_text(kept_path(settings, job), "comment.md")


# -- tables -------------------------------------------------------------------


def plain_text(value: object) -> str:
    """Text for a terminal: what it would obey, not show, becomes a symbol."""
    text = str(value)
    return text if text.isprintable() else "".join(map(_visible, text))


#: Controls, format characters (bidi, zero width), lone surrogates, line breaks.
_INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_JOINERS = "\u200c\u200d"  # of Persian words and of emoji; they move nothing


def _visible(character: str) -> str:
    import unicodedata

    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if unicodedata.category(character) in _INVISIBLE and character not in _JOINERS:
        return "\N{REPLACEMENT CHARACTER}"
    return character


@contextlib.contextmanager
def underway(
    text: Callable[[], str], every: float = 0.5, terminal: IO[str] | None = None
) -> Iterator[None]:
    """A line on the terminal that says how long work goes on, gone at its end.

    Nothing is written where stderr is no terminal, or one that cannot go back.
    """
    stream = terminal or sys.stderr
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    done, begun, width = threading.Event(), time.monotonic(), 0

    def show() -> None:
        nonlocal width
        while not done.wait(every):
            said = f"{plain_text(text())}, {time.monotonic() - begun:.0f} s"[:78]
            stream.write("\r" + said.ljust(width))
            stream.flush()
            width = len(said)

    shower = threading.Thread(target=show, daemon=True)
    shower.start()
    try:
        yield
    finally:
        done.set()
        shower.join()
        stream.write("\r" + " " * width + "\r")
        stream.flush()


def problem_text(error: PidispatchError) -> str:
    """A line for each thing that is wrong, and one that says what to do."""
    lines = [f"pidispatch: {plain_text(line)}" for line in error.message.split("\n")]
    if error.fix:
        lines.append(f"  fix: {plain_text(error.fix)}")
    return "\n".join(lines)


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; no line has trailing blanks."""
    cells = [list(heads), *([plain_text(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def replica_badge(replica: int | None, replicas: int | None) -> str:
    return f"r{replica}/{replicas}" if replica else "-"


def runs_table(runs: Sequence[RunRow]) -> str:
    heads = ("JOB", "TARGET", "FLOW", "REPLICA", "STATE", "REASON", "TOKENS", "WHEN")
    return table(heads, [_run_cells(run) for run in runs])


def _run_cells(run: RunRow) -> tuple[object, ...]:
    return (
        run.id,
        run.target,
        run.flow,
        replica_badge(run.replica, run.replicas),
        run.state,
        run.picked or run.reason or "-",
        run.tokens if run.tokens is not None else "-",
        iso(run.at)[:16].replace("T", " "),
    )


def picks_text(picks: Picks) -> str:
    """Two tables: which replica people merged, and which model's."""
    lines = [f"{picks.decided} of {picks.sets} sets have a request that was merged"]
    for head, rows in (("REPLICA", picks.replicas), ("MODEL", picks.models)):
        cells = [(row.name, row.sets, row.merged, row.closed) for row in rows]
        lines += ["", table((head, "SETS", "MERGED", "CLOSED"), cells)]
    return "\n".join(lines)


class RunDetail(msgspec.Struct, frozen=True):
    """One job: its row, its record once it has ended, its siblings' rows."""

    run: RunRow
    record: Record | None
    siblings: list[RunRow]


#: The exit code of `run` for each outcome: a policy end is the operator's to mend.
RUN_EXITS: Mapping[str, int] = {"completed": 0, "failed": 1, "policy": 2}
_RUN_FIXES = {
    "dirty-tree": "commit or stash your changes, or allow them with --force",
    "operator-cancel": "it was cancelled; what it had done is in the folder",
}


def local_run(
    settings: Settings, folder: Path, task: str, flow: str, force: bool
) -> Run:
    """The rule of one `run`, by the same checks as a cron rule's fields.

    The folder may be a stranger's, and its `.env` be the one we were started with:
    then nothing that this one says is done, not even PI_ON_FAILURE.
    """
    place = folder.expanduser().resolve()
    given: dict[str, Any] = {"folder": str(place), "task": task, "flow": flow}
    for name, value in given.items():
        row = _RUN[name]
        fault = row.why if not _fits(value, row.kind) else row.fault(value)
        if fault:
            shown = json.dumps(str(value)[:80])
            raise ConfigError(f"{name} {shown} {fault}", "see `pidispatch run --help`")
    if fault := own_file_fault(settings, place):
        raise ConfigError(f"{plain_text(place)} {fault}", OWN_FILES_FIX)
    return Run(kind=LOCAL, allowDirty=force or None, **given)


def ended_text(record: Record, answer: str | None) -> str:
    """How a local run ended, and its agent's own words."""
    spent = f", {record.tokens.total:,} tokens" if record.tokens else ""
    reason = f" ({record.reason})" if record.reason else ""
    lines = [f"{record.jobId}: {record.outcome}{reason}{spent}"]
    if fix := _RUN_FIXES.get(record.reason or ""):
        lines.append(f"  fix: {fix}")
    lines += ["", *answer.rstrip().split("\n")] if answer else []
    return "\n".join(plain_text(line) for line in lines)


def run_detail(detail: RunDetail) -> str:
    """Everything of one run, then its siblings by job id with their requests."""
    run = detail.run
    lines = [f"{'state':14}{run.state}"]
    if detail.record:
        for name, value in msgspec.to_builtins(detail.record).items():
            shown = "-" if value is None else json_or_text(value)
            lines.append(f"{name:14}{shown}")
        lines += _unpriced(detail.record)
    if run.request:
        lines.append(f"{'request':14}{run.request.url}")
    for other in detail.siblings:
        badge = replica_badge(other.replica, other.replicas)
        link = other.request.url if other.request else "no request yet"
        said = f"{other.picked}  {link}" if other.picked else link
        lines.append(f"{'sibling ' + badge:14}{other.id}  {other.state}  {said}")
    return "\n".join(plain_text(line) for line in lines)


def _unpriced(record: Record) -> list[str]:
    """Says that a cost is missing because nobody knows the model's price."""
    if record.tokens is None or record.tokens.cost is not None:
        return []
    return [f"{'cost':14}not known: not every call's model has a price"]


def json_or_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# -- a set side by side -------------------------------------------------------


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a set; what is not known, or not yet, is null.

    `seconds` is its time in the box, `model` its provider/model, `note` why it
    has no change to show.
    """

    job: str
    replica: int | None
    replicas: int | None
    state: str
    reason: str | None
    model: str | None = None
    turns: int | None = None
    tokens: int | None = None
    cost: float | None = None
    seconds: float | None = None
    request: Request | None = None
    change: Change | None = None
    note: str | None = None
    picked: Picked | None = None


class Between(msgspec.Struct, frozen=True):
    """How the run `new` differs from its sibling `old`, by job ids."""

    old: str
    new: str
    diff: Diff


class Comparison(msgspec.Struct, frozen=True):
    """The runs of one delivery, unranked: a person picks."""

    target: str
    flow: str
    runs: list[Compared]
    between: list[Between]


def compare_runs(settings: Settings, reader: Reader, job: str) -> Comparison:
    """A job and its siblings, from the kept bundles. Raises `ConfigError`."""
    run, _, siblings = reader.run(job)
    rows = sorted([run, *siblings], key=lambda row: row.replica or 0)
    with contextlib.ExitStack() as stack:
        opened: dict[str, Quarantine] = {}
        notes: dict[str, str] = {}
        for row in rows:
            try:
                result = stack.enter_context(open_kept(settings, reader, row.id))
                opened[row.id] = result
            except PidispatchError as error:
                notes[row.id] = error.message
        runs = [
            _compared(reader, row, opened.get(row.id), notes.get(row.id))
            for row in rows
        ]
        shown = [run.job for run in runs if run.change]
        between = []
        for a, b in itertools.combinations(shown, 2):
            with contextlib.suppress(BundleRefused):  # too much, each by itself is not
                between.append(Between(a, b, diff_between(opened[a], opened[b])))
    return Comparison(run.target, run.flow, runs, between)


def _compared(
    reader: Reader, row: RunRow, result: Quarantine | None, note: str | None
) -> Compared:
    _, record, _ = reader.run(row.id)
    change = None
    if result is not None:
        _, workspace, _ = reader.kept(row.id)
        try:
            change = change_of(result, _start_of(result, workspace))
        except BundleRefused as error:  # a few kB may hold more than can be shown
            note = error.message
    return Compared(
        job=row.id,
        replica=row.replica,
        replicas=row.replicas,
        state=row.state,
        reason=row.reason,
        model=f"{record.provider}/{record.model}" if record else None,
        turns=record.turns if record else None,
        tokens=row.tokens,
        cost=record.tokens.cost if record and record.tokens else None,
        seconds=seconds_of(record) if record else None,
        request=row.request,
        change=change,
        note=note,
        picked=row.picked,
    )


def _start_of(result: Quarantine, workspace: Workspace) -> str:
    """The base, or a request's head where the run built upon that."""
    head = workspace.request_sha
    if head and not result.call("merge-base", "--is-ancestor", head, result.tip).code:
        return head
    return workspace.base


def seconds_of(record: Record) -> float | None:
    from datetime import datetime

    if record.startedAt is None:
        return None
    ended = datetime.fromisoformat(record.endedAt)
    return (ended - datetime.fromisoformat(record.startedAt)).total_seconds()


def _files(run: Compared) -> tuple[FileChange, ...]:
    return run.change.files if run.change else ()


#: The rows of the comparison: a name, and what it reads of a run.
COMPARED: tuple[tuple[str, Callable[[Compared], object]], ...] = (
    ("job", lambda run: run.job),
    ("state", lambda run: run.state),
    ("reason", lambda run: run.reason),
    ("model", lambda run: run.model),
    ("commits", lambda run: run.change and run.change.commits),
    ("files", lambda run: run.change and len(_files(run))),
    ("lines +", lambda run: run.change and sum(f.added or 0 for f in _files(run))),
    ("lines -", lambda run: run.change and sum(f.removed or 0 for f in _files(run))),
    ("tests touched", lambda run: run.change and sum(f.test for f in _files(run))),
    ("turns", lambda run: run.turns),
    ("tokens", lambda run: run.tokens),
    ("cost, USD", lambda run: run.cost and f"{run.cost:.4f}"),
    ("seconds", lambda run: run.seconds and f"{run.seconds:.1f}"),
    ("request", lambda run: run.request and run.request.url),
    ("picked", lambda run: run.picked),
    ("note", lambda run: run.note),
)


def comparison_rows(found: Comparison) -> list[tuple[str, ...]]:
    """A name and a cell for each run; a row that no run fills is left out."""
    rows = [(name, [read(run) for run in found.runs]) for name, read in COMPARED]
    return [
        (name, *("-" if cell is None else str(cell) for cell in cells))
        for name, cells in rows
        if any(cell is not None for cell in cells)
    ]


def comparison_text(found: Comparison, diffs: str) -> str:
    """The set as a table, then the diffs that `diffs` names (all, base, …)."""
    badges = [replica_badge(run.replica, run.replicas) for run in found.runs]
    lines = [f"{found.target} {found.flow}", ""]
    lines.append(table(("", *badges), comparison_rows(found)))
    if diffs in ("all", "base"):
        for run, badge in zip(found.runs, badges, strict=True):
            if run.change:
                lines += _titled(f"{badge} against its base", run.change.diff)
    if diffs in ("all", "siblings"):
        for pair in found.between:
            lines += _titled(f"from {pair.old} to {pair.new}", pair.diff)
    return "\n".join(lines)


def _titled(title: str, diff: Diff) -> list[str]:
    shown = [plain_text(line.expandtabs(4)) for line in diff.text.splitlines()]
    cut = [f"(cut after {DIFF_BYTES // 1024} KiB)"] if diff.truncated else []
    return ["", f"== {title}", *(shown or ["no difference"]), *cut]


# -- rules --------------------------------------------------------------------


def rule_badge(rule: Rule) -> str:
    return f"[x{rule.run.replicas}]" if rule.run.replicas else ""


def rule_when(rule: Rule) -> str:
    """What makes a rule fire, in a few words."""
    on = rule.on
    if on.type == "cron":
        return f"{on.id} {on.pattern} {on.tz or 'UTC'}"
    if on.type == "comment":
        return json.dumps(on.phrase, ensure_ascii=False)
    parts = list(on.action)
    for name, words in (("any", on.any), ("all", on.all), ("none", on.none)):
        if words:
            parts.append(f"{name} {json.dumps(list(words), ensure_ascii=False)}")
    if on.reviewState:
        parts.append("/".join(on.reviewState))
    if on.number:
        parts.append(f"number {on.number}")
    return " ".join(parts)


def rules_table(rules: Sequence[Rule]) -> str:
    heads = ("#", "FORGE", "TYPE", "WHEN", "FLOW", "")
    rows = [
        (r.index, r.run.kind, r.on.type, rule_when(r), r.run.flow, rule_badge(r))
        for r in rules
    ]
    return table(heads, rows)


def _job_tokens(rule: Rule) -> bool:
    return rule.run.kind in FORGES and FORGES[rule.run.kind].job_tokens


#: Lines of SECURITY.md's "not defended" that `triggers show` repeats, each with
#: the test that tells whether it applies to a rule.
_RULE_WARNINGS: tuple[tuple[Callable[[Rule], bool], str], ...] = (
    (
        lambda rule: rule.run.replicas is not None,
        "replicas multiply slots and tokens; only the caps bound them",
    ),
    (
        lambda rule: (
            rule.run.replicas is not None
            and rule.on.type in ("pull_request", "comment")
            and rule.run.publish == "agent"
        ),
        "on a request all replicas share one head branch, and nothing bounds what "
        "they push (open question)",
    ),
    (
        lambda rule: (
            rule.run.replicas is not None
            and rule.on.type in ("pull_request", "comment")
            and rule.run.publish != "agent"
        ),
        "on a request no replica pushes anything: each leaves a comment of its own",
    ),
    (
        lambda rule: rule.run.publish == "agent",
        "publish: agent puts the forge token into the box: whatever runs there may use "
        "it as far as the token and the forge's protection let it, and no quarantine "
        "looks at what is pushed",
    ),
    (
        lambda rule: rule.run.publish == "agent",
        "the title's marker is put right, and a push to another branch noticed, only "
        "after the run",
    ),
    (
        lambda rule: rule.run.publish == "agent" and _job_tokens(rule),
        "unless a GitHub App mints the token (GITHUB_AUTH_SOURCE=app), it is the "
        "operator's own, for all that it reaches",
    ),
    (
        lambda rule: rule.run.publish == "agent" and not _job_tokens(rule),
        "the token is the operator's own, for every project that it reaches",
    ),
    (
        lambda rule: (
            rule.run.publish == "agent"
            and rule.run.replicas is not None
            and _job_tokens(rule)
        ),
        "without a GitHub App all replicas hold one operator token",
    ),
    (
        lambda rule: (
            rule.run.publish == "agent"
            and rule.run.replicas is not None
            and not _job_tokens(rule)
        ),
        "all replicas hold one operator token",
    ),
    (
        lambda rule: rule.run.kind == LOCAL,
        "it edits your own folder in place, its .git too; nothing undoes that",
    ),
    (
        lambda rule: rule.run.resume is True,
        "resume hands on what the run before saw and said: an injected one can "
        "shape the next",
    ),
    (lambda rule: True, "the model provider sees the code"),
)


def in_force(rule: Rule, settings: Settings) -> Rule:
    """The rule with what the settings say where it says nothing (PI_PUBLISH)."""
    run = rule.run
    if run.kind not in FORGES or run.publish or settings.publish == "host":
        return rule
    run = msgspec.structs.replace(run, publish=cast(Any, settings.publish))
    return msgspec.structs.replace(rule, run=run)


#: Whose word starts a rule's jobs: of a forge's rule, of a cron rule.
_TRUST = (
    "started only on the word of someone the forge lets steer it",
    "started by this machine's clock, one run a due time",
)


def _multiplied(rule: Rule, n: int) -> str:
    """What n replicas leave on the forge; on a request they open no other one."""
    noun = FORGES[rule.run.kind].request_noun
    reports = f"comments {n} times on the {noun}"
    opens = f"opens {n} {noun}s"
    mixed = f"{opens}; on a {noun} it {reports} instead"
    return {"pull_request": reports, "comment": mixed}.get(rule.on.type, opens)


def rule_detail(rule: Rule) -> str:
    """One rule: when, what it starts, its multiplier and the trust model."""
    lines = [
        f"trigger {rule.index}: {rule.on.type} {rule_when(rule)}",
        f"starts: {json.dumps(msgspec.to_builtins(rule.run), ensure_ascii=False)}",
    ]
    n = rule.run.replicas
    if n:
        lines += [
            f"multiplier: [x{n}] each delivery makes {n} jobs, takes {n} slots of the "
            f"caps, costs about {n} times the tokens and {_multiplied(rule, n)}",
            "no replica's end cancels a sibling; a person compares and picks",
        ]
    lines.append(f"trust: {_TRUST[rule.on.type == 'cron']}")
    lines += [f"note: {text}" for applies, text in _RULE_WARNINGS if applies(rule)]
    return "\n".join(plain_text(line) for line in lines)


# -- trying a delivery --------------------------------------------------------


class TrialJob(msgspec.Struct, frozen=True):
    id: str
    dedup: str
    branch: str | None
    container: str
    replica: int | None
    replicas: int | None
    title_marker: str | None


class TrialTarget(msgspec.Struct, frozen=True):
    type: str
    number: int


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What a delivery would do and why; absent things are null."""

    event: str
    delivery: str
    repo: str | None
    target: TrialTarget | None
    actor: str | None
    authority: Literal["payload", "api", "none"]
    rule: int | None
    reason: str | None
    jobs: tuple[TrialJob, ...]


def try_delivery(
    rules: Sequence[Rule],
    kind: str,
    path: Path,
    headers: Sequence[str],
    event: str | None,
    secret: str | None,
) -> Trial:
    """Judge a stored delivery as the receiver would, touching nothing.

    Raises `ConfigError` for a file or header that cannot be used.
    """
    forge = trial_forge(kind, secret)
    try:
        body = path.read_bytes()
        given = trial_headers(forge, path, headers, event)
        if secret is not None:
            forge.verify(given, body)
        parsed = forge.parse(given, body)
    except (OSError, Unauthorized, Malformed) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: {why}", "give a delivery's raw body") from error
    return _judge(rules, forge, parsed)


def _judge(rules: Sequence[Rule], forge: Forge, event: Event) -> Trial:
    found = match_event(rules, event)
    reason = found.reason if isinstance(found, Drop) else None
    told, event = event, placed(found, event) if isinstance(found, Match) else event
    authority: Literal["payload", "api", "none"] = "none"
    if isinstance(found, Match) and event.actor is None:
        reason = "missing-sender-id"
    elif isinstance(found, Match):
        says = forge.authority(event)
        authority = "api" if says == "ask" else "payload"
        reason = "not-allowed" if says == "denied" else None
    jobs = fan_out(found, told) if isinstance(found, Match) and not reason else ()
    target = event.target
    return Trial(
        event=_event_and_action(event),
        delivery=event.delivery,
        repo=event.repo,
        target=TrialTarget(target.type, target.number) if target else None,
        actor=event.actor.id if event.actor else None,
        authority=authority,
        rule=found.rule.index if isinstance(found, Match) else None,
        reason=reason,
        jobs=tuple(_trial_job(job) for job in jobs),
    )


def _event_and_action(event: Event) -> str:
    """`issues.labeled`; the rules' word for a review repeats its event's name."""
    action = event.action or ""
    if action == "review_submitted":
        action = "submitted"
    return f"{event.name}.{action}".rstrip(".")


def _trial_job(job: Job) -> TrialJob:
    return TrialJob(
        job.id,
        job.dedup,
        job.branch,
        container_name(job.id),
        job.replica,
        job.replicas,
        title_marker(job.replica, job.replicas) if job.branch else None,
    )


def trial_text(trial: Trial) -> str:
    target = trial.target
    what = f"{target.type} {target.number}" if target else "no target"
    lines = [f"{trial.event} on {trial.repo or '-'}, {what}"]
    if trial.reason:
        lines.append(f"starts nothing: {trial.reason}")
    else:
        lines.append(f"rule {trial.rule}; who asked is known from: {trial.authority}")
    for job in trial.jobs:
        marker = f", title begins {job.title_marker!r}" if job.title_marker else ""
        lines.append(f"  {job.id}: branch {job.branch or '-'}{marker}")
        lines.append(f"    container {job.container}, key {job.dedup}")
    return "\n".join(plain_text(line) for line in lines)


def status_text(status: Status) -> str:
    open_jobs = ", ".join(f"{n} {state}" for state, n in sorted(status.jobs.items()))
    beat = iso(status.heartbeat) if status.heartbeat else "never"
    lines = [
        f"jobs: {open_jobs or 'none'}",
        *map(meter_text, status.meters),
        *map(hold_text, status.holds),
        f"deliveries waiting for an answer about who asked: {status.pending}",
        f"worker's last heartbeat: {beat}{'; PAUSED' if status.paused else ''}",
    ]
    lines += [f"  {word}: {n}" for word, n in sorted(status.counts.items())]
    lines += [
        f"polled {poll.repo}: {iso(poll.at)}, {poll.trouble or 'fine'}"
        for poll in status.polls
    ]
    for name, told in (
        ("triggers", status.problem),
        ("limits", status.limits_problem),
    ):
        lines += [f"{name} file: {line}" for line in (told or "").split("\n") if line]
    if status.engine_problem:
        lines.append(f"no job starts: {status.engine_problem}")
    return "\n".join(plain_text(line) for line in lines)


_THIS = {"day": "today", "week": "this week", "month": "this month"}


def meter_text(meter: Meter) -> str:
    """`today: 2 of 25 slots used (PI_DAILY_CAP)`, and whether new jobs are held."""
    what = "slots" if meter.unit == "jobs" else "tokens"
    of = f" of {meter.limit}" if meter.limit is not None else ""
    state = ""
    if meter.limit is not None and meter.used >= meter.limit:
        state = f"; SPENT until {iso(meter.ends)}"
    elif meter.hold is not None and meter.used >= meter.hold:
        state = f"; HELD from {meter.hold} on until {iso(meter.ends)}"
    named = meter.cap if meter.limit is not None else f"no {meter.cap}"
    return f"{_THIS[meter.span]}: {meter.used}{of} {what} used ({named}){state}"


def hold_text(hold: Hold) -> str:
    why = (
        f"paused until {iso(hold.until)}" if hold.until else "as many at work as may be"
    )
    return f"{hold.scope}: {why}; {hold.waiting} wait"


# -- doctor -------------------------------------------------------------------


class Check(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of doctor: ok, warn or fail, what was found, and the fix."""

    name: str
    state: Literal["ok", "warn", "fail"]
    found: str
    fix: str | None = None


_MARKS = {"ok": "✓", "warn": "⚠", "fail": "✗"}


def checks_text(checks: Sequence[Check]) -> str:
    lines = []
    for check in checks:
        lines.append(f"{_MARKS[check.state]} {check.name}: {check.found}")
        if check.fix and check.state != "ok":
            lines.append(f"    fix: {check.fix}")
    wrong = sum(check.state == "fail" for check in checks)
    lines.append(f"not ready: {wrong} to mend" if wrong else "ready")
    return "\n".join(plain_text(line) for line in lines)


def fault_checks(name: str, faults: Faults) -> list[Check]:
    """A failed check for each fault of a file or of the environment."""
    return [
        Check(name, "fail", f"{faults.source}: {fault}", faults.fix)
        for fault in faults.faults
    ]


def doctor(settings: Settings, triggers: Path, clock: Clock = time.time) -> list[Check]:
    """Every check, in the order a newcomer would meet the faults."""
    import requests

    checks: list[Check] = []
    session, offsets = requests.Session(), list[float]()
    session.hooks["response"] = [lambda r, **_: offsets.extend(_offset(r, clock()))]
    rules = _check_triggers(settings, triggers, checks)
    _check_replicas(settings, rules, checks)
    _check_caps(settings, checks)
    _check_sessions(settings, rules, checks)
    _check_git(checks)
    _check_engine(settings, rules, checks, clock())
    settings = _check_polls(settings, checks, session)
    _check_forges(settings, rules, checks, session)
    _check_clock(offsets, checks)
    _check_provider_keys(settings, rules, checks)
    _check_egress(settings, checks)
    _check_hook(settings, checks)
    _check_store(settings, checks)
    _check_service(settings, clock(), checks)
    _check_disk(settings, checks)
    _check_modes(settings, checks)
    return checks


def _check_triggers(
    settings: Settings, path: Path, checks: list[Check]
) -> tuple[Rule, ...]:
    try:
        rules = read_triggers(path, settings.providers)
    except Faults as faults:
        checks += fault_checks("triggers", faults)
        return ()
    state: Literal["ok", "warn"] = "ok" if rules else "warn"
    found = f"{len(rules)} rules in {path}"
    checks.append(Check("triggers", state, found, "add a rule; see the README"))
    return rules


def _check_replicas(
    settings: Settings, rules: Sequence[Rule], checks: list[Check]
) -> None:
    """How many rules multiply, what one delivery burns, and whether they race."""
    sets = [(rule.index, rule.run.replicas) for rule in rules if rule.run.replicas]
    if not sets:
        checks.append(Check("replicas", "ok", "no trigger sets replicas"))
        return
    burns = ", ".join(f"triggers[{i}] burns {n} slots a delivery" for i, n in sets)
    noun = "trigger sets" if len(sets) == 1 else "triggers set"
    checks.append(Check("replicas", "ok", f"{len(sets)} {noun} replicas: {burns}"))
    largest = max(n for _, n in sets if n)
    if settings.concurrency < largest:
        found = f"PI_CONCURRENCY={settings.concurrency} is below a set of {largest}"
        fix = f"set PI_CONCURRENCY={largest}, or accept that replicas run in turn"
        checks.append(Check("concurrency", "warn", found, fix))
    if settings.daily_cap < largest:
        found = f"PI_DAILY_CAP={settings.daily_cap} cannot hold a set of {largest}"
        checks.append(Check("caps", "fail", found, f"set it to at least {largest}"))


def _check_sessions(
    settings: Settings, rules: Sequence[Rule], checks: list[Check]
) -> None:
    """Rules with `resume` need a folder, which holds what people and agents wrote."""
    resumed = [f"triggers[{rule.index}]" for rule in rules if rule.run.resume]
    if not resumed:
        return
    if settings.sessions_dir is None:
        found = f"{', '.join(resumed)}: `resume` without PI_SESSIONS_DIR"
        fix = "set PI_SESSIONS_DIR, or remove `resume`"
        checks.append(Check("sessions", "fail", found, fix))
    else:
        found = f"{settings.sessions_dir} keeps the transcripts of {', '.join(resumed)}"
        checks.append(Check("sessions", "ok", found))


def _check_caps(settings: Settings, checks: list[Check]) -> None:
    """The limits file, and caps that could not do what they were set for."""
    try:
        limits = read_limits(settings)
    except Faults as faults:
        checks += fault_checks("limits", faults)
        limits = NO_LIMITS
    else:
        rows, pauses = len(limits.scopes), len(limits.pauses)
        found = f"{rows} scopes and {pauses} pause windows in {limits_path(settings)}"
        checks.append(Check("limits", "ok", found))
    try:
        settings = with_overlay(settings)
    except Refused as refusal:
        fix = "correct it; until then every job is refused"
        checks.append(Check("overlay", "fail", refusal.message, fix))
    caps = Caps.of(settings, limits)
    limited = ", ".join(f"{c.name}={c.limit}" for c in caps.rows if c.limit is not None)
    checks.append(Check("caps", "ok", limited))
    for wrong, state, found, fix in _CAP_FAULTS:
        if wrong(settings, caps):
            checks.append(Check("caps", state, found, fix))


#: When a cap is set so that it cannot do its work, what is found, and the fix.
_CAP_FAULTS: tuple[
    tuple[Callable[[Settings, Caps], bool], Literal["warn", "fail"], str, str], ...
] = (
    (
        lambda settings, caps: any(cap.hold == 0 for cap in caps.rows),
        "fail",
        "PI_SOFT_HOLD_PCT of a cap is less than one job: nothing can start",
        "raise PI_SOFT_HOLD_PCT or the cap",
    ),
    (
        lambda settings, caps: (
            caps.tokens is not None and (settings.max_tokens or 0) > caps.tokens
        ),
        "fail",
        "PI_MAX_TOKENS is more than PI_DAILY_TOKEN_CAP: nothing can start",
        "lower PI_MAX_TOKENS or raise PI_DAILY_TOKEN_CAP",
    ),
    (
        lambda settings, caps: caps.tokens is not None and settings.max_tokens is None,
        "warn",
        "PI_DAILY_TOKEN_CAP without PI_MAX_TOKENS: a job reserves no tokens, and "
        "those that run at once may together pass the cap",
        "set PI_MAX_TOKENS",
    ),
)


def git_version() -> str:
    """The host's own git, such as `2.39.5`. Raises `ConfigError` when it has none."""
    import subprocess

    try:
        argv = ["git", "--version"]
        done = subprocess.run(argv, capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError("git does not run on this machine", "install git") from error
    return done.stdout.decode("utf-8", "replace").strip().removeprefix("git version ")


def _check_git(checks: list[Check]) -> None:
    try:
        checks.append(Check("git", "ok", git_version()))
    except ConfigError as error:
        checks.append(Check("git", "fail", error.message, error.fix))


def _check_engine(
    settings: Settings, rules: Sequence[Rule], checks: list[Check], now: float
) -> None:
    engine = DockerEngine(settings, _instance(settings))
    try:
        version = engine.api.version()
    except InfraError as error:
        checks.append(Check("engine", "fail", error.message, error.fix))
        return
    where = f"{engine.endpoint}: Docker {version['Version']}"
    checks.append(Check("engine", "ok", f"{where}, API {version['ApiVersion']}"))
    for name, look in (
        ("engine", lambda: _check_images(engine, rules, checks)),
        ("address pool", lambda: _check_pool(engine, checks)),
        ("canary", lambda: _check_canary(engine, rules, checks)),
        ("stale containers", lambda: _check_stale(settings, now, checks)),
    ):
        _looked(name, look, checks)


def _looked(name: str, look: Callable[[], None], checks: list[Check]) -> None:
    """A look at the engine; what goes wrong with it is that check's failure."""
    try:
        with engine_answers():
            look()
    except (InfraError, Refused) as error:
        fix = error.fix or "see the engine's own log"
        checks.append(Check(name, "fail", error.message, fix))


def _instance(settings: Settings) -> str:
    """What labels our objects: the database's own name, else the doctor's."""
    found = None
    if settings.db.exists():
        with contextlib.suppress(PidispatchError):
            found = Reader(settings.db).flag("instance")
    return found or "doctor"


def _check_images(
    engine: DockerEngine, rules: Sequence[Rule], checks: list[Check]
) -> None:
    """Every image that a rule or a setting names, and the gate's."""
    usual = engine.settings.job_image
    replicated = {r.run.image or usual for r in rules if r.run.replicas}
    for tag in sorted({usual, *(r.run.image for r in rules if r.run.image)}):
        _check_image(engine, tag, tag in replicated, checks)
    _check_gate_image(engine, engine.settings.gate_image, checks)
    agents = (in_force(rule, engine.settings).run for rule in rules)
    for tag, kind in sorted(
        {(run.image or usual, run.kind) for run in agents if run.publish == "agent"}
    ):
        _check_cli(engine, tag, kind, checks)


def _check_cli(engine: DockerEngine, tag: str, kind: str, checks: list[Check]) -> None:
    """With publish: agent the image must name the forge whose CLI it has."""
    image = engine.image(tag)
    if image is None:
        return  # said already
    found = f"publish: agent on {kind} with {tag}"
    if kind in (image.forges or ()):
        text = f"{found}: the box holds the forge's token"
        fix = "see `pidispatch triggers show` for what that gives up"
        checks.append(Check("job image", "warn", text, fix))
    else:
        text = f"{found}: its label {LABEL}forges does not name {kind}"
        fix = f"pidispatch build-image --forges {kind}; such jobs are refused"
        checks.append(Check("job image", "fail", text, fix))


def _check_image(
    engine: DockerEngine, tag: str, replicated: bool, checks: list[Check]
) -> None:
    image = engine.image(tag)
    if image is None:
        fix = "pidispatch build-image"
        checks.append(Check("job image", "fail", f"{tag} is not on this machine", fix))
        return
    listed = ", ".join(sorted(image.capabilities)) or "no capabilities"
    version = image.labels.get(LABEL + "pi-version", "unknown")
    found = f"{tag}: pi {version}; {listed}"
    if replicated and "replicas" not in image.capabilities:
        fix = "rebuild it with `pidispatch build-image`; replica jobs are refused"
        checks.append(Check("job image", "fail", found, fix))
    else:
        checks.append(Check("job image", "ok", found))


def _check_gate_image(engine: DockerEngine, tag: str, checks: list[Check]) -> None:
    image = engine.image(tag)
    if image is None or "gate" not in image.capabilities:
        found = f"{tag} is not here or has no gate"
        checks.append(Check("gate image", "fail", found, "pidispatch build-image"))
    else:
        checks.append(Check("gate image", "ok", tag))


def _check_pool(engine: DockerEngine, checks: list[Check]) -> None:
    if outer := engine.misfit():
        found = (
            f"{OUTER_NETWORK}, which gates share, is {outer}: of another pool or size"
        )
        fix = f"when no job runs: docker network rm {OUTER_NETWORK}; it is made anew"
        checks.append(Check("address pool", "warn", found, fix))
    free = engine.job_room()
    pool, jobs = engine.settings.network_pool, engine.settings.concurrency
    state: Literal["ok", "warn", "fail"] = "ok" if free >= jobs else "warn"
    found = f"{pool} has room for {free} jobs at a time"
    fix = "name a larger or another range in PI_NETWORK_POOL"
    checks.append(Check("address pool", state if free else "fail", found, fix))


#: A name that no list holds and no resolver knows.
_OUTSIDE = "not-listed.pidispatch.invalid:443"
#: Where a style's list of models stands below its base URL (gate.py, STYLES).
MODEL_LISTS = {
    "anthropic-messages": "/v1/models",
    "mistral-conversations": "/v1/models",
    "openai-completions": "/models",
    "openai-responses": "/models",
    "google-generative-ai": "/models",
}


def _check_canary(
    engine: DockerEngine, rules: Sequence[Rule], checks: list[Check]
) -> None:
    """A real box and a real gate: what is closed, what is open, what answers."""
    image = engine.image(engine.settings.gate_image)
    if image is None or "gate" not in image.capabilities:
        return  # said by the line about the gate's image
    settings = engine.settings
    names = [n for n in providers_of(settings, rules) if n in settings.keys]
    providers = [settings.providers[n] for n in names if n in settings.providers]
    seen = canary(engine, image, _errand(settings, providers))
    if settings.isolated:
        checks.append(_host_check(seen))
    if not seen.gate:
        found = "it started and did not answer a box"
        checks.append(Check("gate", "fail", found, "pidispatch build-image"))
        return
    checks += _outside_checks(seen.hosts)
    checks += (_model_check(p, seen.models.get(p.name, Heard(0))) for p in providers)


def _errand(settings: Settings, providers: Sequence[Provider]) -> Errand:
    token = random_hex(32)
    line = {
        "token": token,
        "providers": {
            p.name: _gate_provider(p, {}, settings.keys[p.name]) for p in providers
        },
        "allow": list(settings.egress_allow),
        "models": [],
        "prices": {},
        "budget": None,
        "spent": 0,
    }
    outside = {p.name: outside_url(p.base_url) for p in providers}
    return Errand(
        line=json.dumps(line).encode(),
        token=token,
        models={
            p.name: "/" + outside[p.name].split("://", 1)[1] + MODEL_LISTS[p.style]
            for p in providers
        },
        hosts=(_OUTSIDE, *map(_with_port, settings.egress_allow[:_HOSTS_TRIED])),
        loopback=any(outside[p.name] != p.base_url for p in providers),
    )


_HOSTS_TRIED = 7


def _with_port(host: str) -> str:
    return host if re.search(r":\d+$", host) else f"{host}:443"


def _host_check(seen: Canary) -> Check:
    if not seen.host:
        found = "a box does not reach the engine's host"
        return Check("isolation", "ok", found)
    found, fix = NOT_ISOLATING
    at = ", ".join(seen.host)
    return Check("isolation", "fail", f"{found}; a box reached {at}", fix)


def _outside_checks(hosts: Mapping[str, Heard]) -> Iterator[Check]:
    for name, heard in hosts.items():
        if name == _OUTSIDE:
            found = f"starts; {name}, which is not listed, is"
            if heard.status == 403:
                yield Check("gate", "ok", f"{found} refused")
            else:
                fix = "pidispatch build-image, then pidispatch verify-image"
                yield Check("gate", "fail", f"{found} NOT refused", fix)
        elif heard.status == 200:
            yield Check("egress", "ok", f"{name} is open through the gate")
        else:
            found = f"{name} is listed and does not open (HTTP {heard.status})"
            fix = "correct PI_EGRESS_ALLOW, or see that the host is up"
            yield Check("egress", "warn", found, fix)


def _model_check(provider: Provider, heard: Heard) -> Check:
    """Whether the model's endpoint answers through the gate, and takes the key."""
    said = f"{provider.name} through the gate: HTTP {heard.status}"
    if heard.ours or not heard.status:
        found = f"{provider.name} does not answer through the gate"
        fix = f"see whether {provider.base_url} answers on the engine's host"
        if outside_url(provider.base_url) != provider.base_url:
            found += "; a server that is bound to 127.0.0.1 is out of its reach"
            fix = "let the model server listen on the engine's bridge, or on 0.0.0.0"
        return Check("model", "fail", found, fix)
    if heard.status in (401, 403):
        fix = f"set {provider.key_variable} to a key that it takes"
        return Check("model", "fail", f"{said}: it refuses the key", fix)
    if heard.status == 429 or heard.status >= 500:
        return Check("model", "warn", said, "try again later")
    return Check("model", "ok", f"{provider.name} answers through the gate")


def _stale(settings: Settings, now: float) -> Iterator[tuple[DockerEngine, str]]:
    """Jobs that are over and still have a container; those of killed checks too."""
    before = now - STALE_SECONDS
    keep = frozenset[str]()
    if (own := _instance(settings)) != "doctor":
        keep = Reader(settings.db).open_jobs()
    for instance in {own: keep, "doctor": keep, "verify-image": keep}:
        engine = DockerEngine(settings, instance)
        yield from ((engine, job) for job in engine.stale(keep, before))


def _check_stale(settings: Settings, now: float, checks: list[Check]) -> None:
    jobs = [job for _, job in _stale(settings, now)]
    if jobs:
        found = f"of jobs that are over: {', '.join(jobs)}"
        fix = "pidispatch doctor --fix removes them"
        checks.append(Check("stale containers", "warn", found, fix))
    else:
        checks.append(Check("stale containers", "ok", "none"))


def _offset(answer: requests.Response, now: float) -> Iterator[float]:
    """Seconds that our clock is ahead of the one that stamped the answer."""
    from email.utils import parsedate_to_datetime

    with contextlib.suppress(ValueError):
        yield now - parsedate_to_datetime(answer.headers.get("Date", "")).timestamp()


def _check_clock(offsets: Sequence[float], checks: list[Check]) -> None:
    """Tokens, windows and signed times of deliveries need the forge's time."""
    if not offsets:
        found = "not compared: no forge's API answered with its time"
        checks.append(Check("clock", "ok", found))
        return
    offset = min(offsets, key=abs)
    found = f"{abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} the forge"
    off: Literal["ok", "warn", "fail"] = "fail" if abs(offset) > 300 else "warn"
    state = "ok" if abs(offset) < 30 else off
    checks.append(Check("clock", state, found, "set the machine's clock (NTP)"))


def _check_forges(
    settings: Settings,
    rules: Sequence[Rule],
    checks: list[Check],
    session: requests.Session,
) -> None:
    served = forges_of(settings, session)
    for kind in sorted({r.run.kind for r in rules if r.run.kind in FORGES}):
        if kind not in served:
            found = f"rules name {kind}, which is not served"
            fix = f"set {FORGES[kind].secret_variable}"
            checks.append(Check(kind, "fail", found, fix))
    for kind, forge in served.items():
        try:
            own = forge.own_id()
        except PidispatchError as error:
            fix = error.fix or "check the token and the API's address"
            checks.append(Check(kind, "fail", error.message, fix))
            continue
        if own is None:
            found = "deliveries are taken, but there is no token to answer with"
            fix = _FORGE_CLASSES[kind].token_fix
            checks.append(Check(kind, "fail", found, fix))
            continue
        hint = _FORGE_CLASSES[kind].outage_hint
        checks.append(Check(kind, "ok", f"served; token works (id {own}); {hint}"))
    if not served and rules and all(rule.run.kind == LOCAL for rule in rules):
        checks.append(Check("forges", "ok", "no rule needs one"))
    elif not served:
        found = "no forge is served"
        names = " or ".join(FORGES[kind].secret_variable for kind in _FORGE_CLASSES)
        fix = f"set {names}, and what the README says of that forge"
        checks.append(Check("forges", "fail", found, fix))


def _check_polls(
    settings: Settings, checks: list[Check], session: requests.Session
) -> Settings:
    """Whether each repository can be read; returns settings without wrong ones."""
    try:
        repos, served = polled_of(settings), forges_of(settings, session)
    except Faults as faults:
        checks.extend(fault_checks("polling", faults))
        return msgspec.structs.replace(settings, poll_repos=())
    for kind, name in repos:
        try:
            found = f"{served[kind].repository(name)}: can be read"
            checks.append(Check("polling", "ok", found))
        except PidispatchError as error:
            fix = error.fix or "check the name, and that the token may read it"
            checks.append(Check("polling", "fail", f"{name}: {error.message}", fix))
    return settings


def providers_of(settings: Settings, rules: Sequence[Rule]) -> list[str]:
    """Names of the providers that the settings and the rules ask for."""
    asked = {settings.provider}
    for run in (rule.run for rule in rules):
        asked |= {run.provider or settings.provider}
        asked |= {model.partition("/")[0] for model in run.replicaModels or ()}
    return sorted(asked)


def _check_provider_keys(
    settings: Settings, rules: Sequence[Rule], checks: list[Check]
) -> None:
    for name in providers_of(settings, rules):
        provider = settings.providers.get(name)
        if provider is None:
            fix = "add it to PI_PROVIDERS_FILE"
            checks.append(Check("provider", "fail", f"{name} is unknown", fix))
        elif name not in settings.keys:
            fix = f"set {provider.key_variable}"
            checks.append(Check("provider", "fail", f"{name} has no key", fix))
        else:
            checks.append(Check("provider", "ok", f"{name}: key set"))


def _check_egress(settings: Settings, checks: list[Check]) -> None:
    if settings.isolated:
        hosts = ", ".join(settings.egress_allow) or "nothing but the model"
        checks.append(Check("egress", "ok", f"isolated; a job reaches {hosts}"))
    else:
        found = "PI_EGRESS=0: JOBS ARE NOT ISOLATED FROM THE NETWORK"
        checks.append(Check("egress", "warn", found, "remove PI_EGRESS"))


def _check_hook(settings: Settings, checks: list[Check]) -> None:
    import shutil

    hook = settings.on_failure
    if hook is not None and shutil.which(hook) is None:
        found = f"PI_ON_FAILURE: {hook} is no program that can be started"
        checks.append(Check("hook", "fail", found, "chmod +x it, or correct the path"))


def _check_store(settings: Settings, checks: list[Check]) -> None:
    import sqlite3

    if not settings.db.exists():
        found = f"{settings.db} is made by the first `pidispatch serve`"
        checks.append(Check("store", "ok", found))
        return
    try:
        answer = Reader(settings.db).integrity()
    except (sqlite3.Error, PidispatchError) as error:
        answer = str(error)
    if answer == "ok":
        checks.append(Check("store", "ok", f"{settings.db} is sound"))
    else:
        fix = "restore a copy of the file, or name another with --db"
        checks.append(Check("store", "fail", f"{settings.db}: {answer}", fix))
    if sqlite3.sqlite_version_info < (3, 51, 3):
        found = f"SQLite {sqlite3.sqlite_version}: only one process may checkpoint"
        checks.append(Check("sqlite", "ok", f"{found}, and only the worker does"))
    wal = _suffixed(settings.db, "-wal")
    size = wal.stat().st_size if wal.exists() else 0
    if size > WAL_MOST:
        found = f"{wal} has grown to {_bytes(size)}"
        fix = "end what reads the database for long; a restarted `serve` shortens it"
        checks.append(Check("wal", "warn", found, fix))


#: Many times what the worker's own checkpoints (1,000 pages) leave there.
WAL_MOST = 64 * 1024 * 1024


def _bytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _check_service(settings: Settings, now: float, checks: list[Check]) -> None:
    """Whether a worker lives, by its heartbeat; and what waits for one."""
    try:
        status = Reader(settings.db).status(Caps(1, None, None, "UTC"), now)
    except (PidispatchError, msgspec.MsgspecError):
        return  # absent or damaged: said by the line about the store
    age = None if status.heartbeat is None else now - status.heartbeat
    waiting = sum(status.jobs.get(state, 0) for state in OPEN_STATES)
    if age is not None and age < 4 * HEARTBEAT_SECONDS:
        checks.append(Check("worker", "ok", f"works; seen {age:.0f} s ago"))
        return
    found = "none works on this database"
    if status.heartbeat is not None:
        found += f"; the last was seen at {iso(status.heartbeat)}"
    if waiting:
        found += f", and {waiting} jobs are open"
    state: Literal["ok", "warn"] = "warn" if waiting else "ok"
    checks.append(Check("worker", state, found, "start `pidispatch serve`"))


#: Free bytes from which on there is nothing to say.
DISK_PLENTY = 5 * 2**30


def _check_disk(settings: Settings, checks: list[Check]) -> None:
    """Room for the database, our files and the engine's; one line a file system."""
    places = {"the database": settings.db, "PI_STATE_DIR": settings.state_dir}
    with contextlib.suppress(InfraError):
        engine = DockerEngine(settings, "doctor").disk()
        places |= {"the engine": engine} if engine else {}
    rooms: dict[int, list[str]] = {}
    for name, path in places.items():
        rooms.setdefault(free_bytes(path) // 2**20, []).append(name)
    for free, names in rooms.items():
        low: Literal["warn", "fail"] = "fail" if free < DISK_FLOOR / 2**20 else "warn"
        state = "ok" if free >= DISK_PLENTY / 2**20 else low
        found = f"{_bytes(free * 2**20)} free for {', '.join(names)}"
        floor = _bytes(DISK_FLOOR)
        fix = f"make room (`docker system df`): below {floor} no job starts"
        checks.append(Check("disk", state, found, fix))


def open_to_others(settings: Settings) -> list[Path]:
    """Our files and directories that hold secrets and that others may use."""
    db, files = settings.db, [Path(".env"), settings.db, settings.state_dir]
    files += [_suffixed(db, "-wal"), _suffixed(db, "-shm")]
    return [p for p in files if p.exists() and p.stat().st_mode & 0o077]


def _closed(path: Path) -> int:
    return path.stat().st_mode & 0o700


def _check_modes(settings: Settings, checks: list[Check]) -> None:
    for path in open_to_others(settings):
        found = f"{path} can be read by others"
        checks.append(Check("modes", "warn", found, f"chmod {_closed(path):o} {path}"))


def mend(settings: Settings, now: float) -> list[Check]:
    """What `doctor --fix` may do: file modes, containers of ours that are over."""
    done: list[Check] = []
    for path in open_to_others(settings):
        mode = _closed(path)
        try:
            path.chmod(mode)
            done.append(Check("fixed", "ok", f"chmod {mode:o} {path}"))
        except OSError as error:
            found = f"chmod {mode:o} {path}: {error.strerror}"
            done.append(Check("fixed", "fail", found, "do it as the file's owner"))
    _looked("fixed", lambda: _remove_stale(settings, now, done), done)
    return done


def _remove_stale(settings: Settings, now: float, done: list[Check]) -> None:
    for engine, job in list(_stale(settings, now)):
        engine.remove_job(job)
        done.append(Check("fixed", "ok", f"removed the containers of {job}"))


# -- what --json prints -------------------------------------------------------


class DemoLink(msgspec.Struct, frozen=True):
    title: str
    url: str


class DemoJob(msgspec.Struct, frozen=True):
    """One replica's end; `outcome` is a state while it has not ended."""

    id: str
    replica: int | None
    replicas: int | None
    outcome: str
    reason: str | None
    branch: str
    request: DemoLink | None


class DemoReport(msgspec.Struct, frozen=True):
    """What the demo did: in real containers or in plain processes."""

    box: Literal["docker", "process"]
    jobs: list[DemoJob]
    seconds: float


class Finding(msgspec.Struct, frozen=True):
    """One check of verify-image: it holds, does not apply, or the image lies."""

    name: str
    state: Literal["ok", "note", "lie"]
    text: str


#: The type behind each command's --json.
OUTPUTS: Mapping[str, Any] = {
    "triggers list": list[Rule],
    "triggers show": Rule,
    "triggers try": Trial,
    "runs": list[Record],
    "runs --picks": Picks,
    "show": RunDetail,
    "compare": Comparison,
    "status": Status,
    "run": Record,
    "doctor": list[Check],
    "verify-image": list[Finding],
    "demo": DemoReport,
}


def output_schema(command: str) -> dict[str, Any]:
    """The JSON Schema of what `command --json` prints.

    Every key of a type stands, null when unknown, unless its type leaves out
    what is unset (rules and checks); keys may be added by later versions.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"pidispatch {command} --json",
        **msgspec.json.schema(OUTPUTS[command]),
    }


# -- a service manager's unit -------------------------------------------------


class Unit(NamedTuple):
    """A service manager's file: where it belongs, what it says, what starts it."""

    path: Path
    text: str
    start: str


def systemd_unit(program: Sequence[str], folder: Path) -> Unit:
    """A user unit for systemd, started in `folder`, where .env and the rules are."""
    text = render(
        "pidispatch.service.j2",
        command=" ".join(map(_unit_word, program)),
        folder=str(folder).replace("%", "%%"),
    )
    path = Path.home() / ".config/systemd/user/pidispatch.service"
    return Unit(path, text, "systemctl --user enable --now pidispatch")


def _unit_word(word: str) -> str:
    """One argument as systemd reads it: quoted, and free of its expansions."""
    for special, plain in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(special, plain)
    return f'"{word}"'


#: launchd knows only success and failure: a wrong configuration ends as success.
_LAUNCHD_SHELL = """\
"$@" & pid=$!
trap 'kill -TERM "$pid"' TERM
wait "$pid"; code=$?
trap - TERM
[ "$code" -lt 128 ] || { wait "$pid"; code=$?; }
[ "$code" -ne 2 ] || exit 0
exit "$code"
"""


def launchd_agent(program: Sequence[str], folder: Path) -> Unit:
    """A user agent for launchd."""
    import plistlib

    label = "dev.pi-dispatch.serve"
    logs = str(Path.home() / "Library/Logs/pidispatch.log")
    content = {
        "Label": label,
        "ProgramArguments": ["/bin/sh", "-c", _LAUNCHD_SHELL, "sh", *program],
        "WorkingDirectory": str(folder),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 5,
        "ExitTimeOut": 75,
        "StandardErrorPath": logs,
    }
    path = Path.home() / f"Library/LaunchAgents/{label}.plist"
    start = f"launchctl bootstrap gui/$(id -u) {path}"
    return Unit(path, plistlib.dumps(content).decode(), start)


UNITS: Mapping[str, Callable[[Sequence[str], Path], Unit]] = {
    "systemd": systemd_unit,
    "launchd": launchd_agent,
}


def serve_command() -> list[str]:
    """How this very program is started again, by absolute paths."""
    import shutil

    own = shutil.which(sys.argv[0])
    if getattr(sys, "frozen", False):
        return [sys.executable, "serve"]
    if own and not own.endswith(".py"):
        return [str(Path(own).absolute()), "serve"]
    return [sys.executable, str(Path(__file__).absolute()), "serve"]


# -- the image ----------------------------------------------------------------


#: The forges whose CLI Debian has, so that the Dockerfile can install it (FORGES).
CLI_PACKAGES = {"github": "gh", "gitlab": "glab"}


def image_context(folder: Path, ca: Path | None) -> None:
    """Lay out the build context: image/, the rendered HARD_RULES, a CA bundle."""
    import shutil

    shutil.copytree(
        resource("image"),
        folder,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("node_modules", "__pycache__", "test*"),
    )
    (folder / "HARD_RULES.md").write_text(hard_rules(), "utf-8")
    if ca:
        shutil.copyfile(ca, folder / "build-ca.crt")


def _build_lines(
    engine: DockerEngine,
    folder: str,
    tag: str,
    arguments: dict[str, str],
    labels: dict[str, str],
) -> Iterator[dict[str, Any]]:
    import docker

    try:
        yield from engine.api.build(
            path=folder,
            tag=tag,
            buildargs=arguments,
            labels=labels,
            rm=True,
            decode=True,
        )
    except (docker.errors.DockerException, OSError) as error:
        raise InfraError(f"the engine could not build {tag}: {error}") from error


def build_image(
    engine: DockerEngine,
    tag: str,
    base: str | None,
    ca: Path | None,
    forges: Sequence[str] = (),
) -> Iterator[str]:
    """Build the job image; yields the engine's lines. Raises `InfraError`.

    With `forges` it gets their CLIs and says so; without, no label excludes any.
    """
    import tempfile

    arguments = {"PI_VERSION": PI_VERSION}
    labels: dict[str, str] = {}
    if forges:
        arguments["FORGES"] = labels[LABEL + "forges"] = " ".join(forges)
    if base:
        arguments["BASE_IMAGE"] = base
    with tempfile.TemporaryDirectory() as name:
        image_context(Path(name), ca)
        for line in _build_lines(engine, name, tag, arguments, labels):
            if "error" in line:
                raise InfraError(
                    f"the image was not built: {line['error'].strip()}",
                    "without a registry: `pidispatch build-image --offline`",
                )
            if line.get("stream", "").strip():
                yield line["stream"].rstrip()


# -- the panel ----------------------------------------------------------------

#: Rows of a list, and lines of a log, that one page shows.
PANEL_ROWS = 50
PANEL_LINES = 200
#: Bytes of a kept log that are read for its last lines.
PANEL_LOG_BYTES = 64 * 1024
_MEDIA = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
_JOB_ID = "[A-Za-z0-9._-]{1,128}"
#: Nothing but its own stylesheet, script and forms (CSP level 3).
_PANEL_HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    # not "no-referrer": it would make the Origin of our own forms "null"
    ("Referrer-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)


@functools.cache
def _pages() -> Any:
    """The environment of the panel's pages; every value is escaped on its way."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def shown(value: object) -> object:
        return value if isinstance(value, Markup) else plain_text(value)

    environment = Environment(
        loader=FileSystemLoader(str(resource("templates", "panel"))),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
        finalize=shown,
    )
    environment.filters |= {"iso": iso, "link": _web_link, "diff": _diff_lines}
    environment.globals |= {
        "badge": replica_badge,
        "when": rule_when,
        "meter_text": meter_text,
        "hold_text": hold_text,
    }
    return environment


def _web_link(url: str) -> str | None:
    """An address that may be followed: a forge's answer could name a script."""
    return url if re.match(r"https?://", url) else None


#: What a line of a diff is, by how it begins.
_DIFF_KINDS = (
    ("diff ", "file"),
    ("+++", "file"),
    ("---", "file"),
    ("@@", "hunk"),
    ("+", "add"),
    ("-", "del"),
)


def _diff_lines(diff: Diff) -> Iterator[tuple[str, str]]:
    """Each line with its kind."""
    for line in diff.text.splitlines():
        kind = next((kind for start, kind in _DIFF_KINDS if line.startswith(start)), "")
        yield kind, line.expandtabs(4)


class Panel(HttpServer):
    """The pages for the operator: what runs, what it cost, how to stop it.

    Nothing on it edits triggers. Raises `ConfigError` when it would be open to
    more than this machine without a token.
    """

    name = "panel"

    def __init__(
        self, settings: Settings, store: Store, triggers: TriggersFile, engine: Engine
    ) -> None:
        from ipaddress import ip_address

        self.settings, self.store = settings, store
        self.triggers, self.engine = triggers, engine
        self.csrf = random_hex(16)
        host = settings.panel_bind
        with contextlib.suppress(ValueError):
            host = host if not ip_address(host).is_loopback else "localhost"
        if host != "localhost" and not settings.panel_token:
            raise ConfigError(
                f"the panel would be open on {settings.panel_bind} to anyone",
                "set PANEL_TOKEN, or leave PI_PANEL_BIND at 127.0.0.1",
            )
        self._guessing = threading.Lock()
        self._compared: dict[str, tuple[object, Comparison]] = {}
        bounds = EdgeLimits(connections=64)
        super().__init__(settings.panel_bind, settings.panel_port, bounds)

    # --- who may

    def methods(self, path: str) -> tuple[str, ...]:
        page = any(re.fullmatch(pattern, path) for pattern, _ in PAGES)
        action = any(re.fullmatch(pattern, path) for pattern, _ in ACTIONS)
        return ("GET",) * (page or not action) + ("POST",) * action

    def answer(self, asked: Asked) -> Reply:
        """A page, what an action leads to, or why not. Every answer is guarded."""
        try:
            made = self._checked(asked)
        except ConfigError as error:
            made = self.page("problem", 404, error=error)
        except InfraError as error:
            made = self.page("problem", 503, error=error)
        return made._replace(headers=(*made.headers, *_PANEL_HEADERS))

    def _checked(self, asked: Asked) -> Reply:
        if not self._host_is_ours(asked.headers):
            # else a name of another's choice could lead a browser to our address
            return Reply.of(_refusal(403))
        if asked.method == "POST" and not self._is_ours(asked):
            return Reply.of(_refusal(403))
        open_to_all = asked.path == "/login" or asked.path.startswith("/static/")
        if not open_to_all and not self._known(asked.headers):
            return _see("/login")
        return self._routed(asked, PAGES if asked.method == "GET" else ACTIONS)

    def _host_is_ours(self, headers: Mapping[str, str]) -> bool:
        """A panel with a token may have any name: its cookie goes to that alone."""
        host = headers.get("host", "")
        name = re.sub(r":[0-9]+$", "", host).lower()
        return name in _LOOPBACK_NAMES or bool(host and self.settings.panel_token)

    def _is_ours(self, asked: Asked) -> bool:
        """Whether an action comes from a page of ours, and by a person there."""
        import hmac

        host = asked.headers.get("host", "")
        origin = asked.headers.get("origin", "")
        token = _form(asked.body).get("csrf", "").encode()
        same = origin in (f"http://{host}", f"https://{host}")
        return same and hmac.compare_digest(token, self.csrf.encode())

    def _known(self, headers: Mapping[str, str]) -> bool:
        import hmac

        if not self.settings.panel_token:
            return True
        cookies = re.split("; *", headers.get("cookie", ""))
        given = dict(cookie.partition("=")[::2] for cookie in cookies)
        return hmac.compare_digest(
            given.get("pidispatch", "").encode(), self._ticket().encode()
        )

    def _ticket(self) -> str:
        """What the cookie holds: proof of the token, and not the token."""
        import hmac

        key = (self.settings.panel_token or "").encode()
        return hmac.digest(key, b"the panel of pidispatch", "sha256").hex()

    def _routed(
        self, asked: Asked, table: Sequence[tuple[str, Callable[..., Reply]]]
    ) -> Reply:
        for pattern, function in table:
            if found := re.fullmatch(pattern, asked.path):
                return function(self, asked, *found.groups())
        raise ConfigError("there is no such page", "start from the home page")

    # --- pages

    def page(self, name: str, code: int = 200, **values: Any) -> Reply:
        """One template of templates/panel with what every page shows."""
        text = (
            _pages()
            .get_template(f"{name}.html.j2")
            .render(
                csrf=self.csrf,
                version=__version__,
                paused=self.store.flag("paused") is not None,
                locked=bool(self.settings.panel_token),
                open_egress=not self.settings.isolated,
                **values,
            )
        )
        return Reply(code, text.encode(), "text/html; charset=utf-8")

    def home(self, _: Asked) -> Reply:
        caps = Caps.of(self.settings, self.store.limits())
        status = self.store.status(caps, self.store.clock())
        recent = self.store.runs(200)
        return self.page(
            "home",
            status=status,
            rules=self.triggers.rules,
            open_runs=[run for run in recent if run.state in OPEN_STATES],
            failed=[run for run in recent if run.state in ("failed", "policy")][:10],
            runs=recent[:20],
            now=self.store.clock(),
        )

    def rules(self, _: Asked) -> Reply:
        return self.page(
            "triggers", rules=self.triggers.rules, problem=self.triggers.problem
        )

    def rule(self, _: Asked, index: str) -> Reply:
        rules = self.triggers.rules
        if int(index) >= len(rules):
            raise ConfigError(f"no trigger {index}", "see the list of triggers")
        rule = in_force(rules[int(index)], self.settings)
        facts = [line.partition(": ")[::2] for line in rule_detail(rule).split("\n")]
        return self.page("trigger", rule=rule, facts=facts[1:])

    def run_list(self, asked: Asked) -> Reply:
        before = _form(asked.query.encode()).get("before")
        runs = self.store.runs(PANEL_ROWS + 1, before)
        older = runs[PANEL_ROWS - 1].id if len(runs) > PANEL_ROWS else None
        return self.page("runs", runs=runs[:PANEL_ROWS], older=older, before=before)

    def run(self, _: Asked, job: str) -> Reply:
        run, record, siblings = self.store.run(job)
        fields = msgspec.to_builtins(record) if record else {}
        facts = [(name, json_or_text(value)) for name, value in fields.items()]
        return self.page(
            "run",
            run=run,
            facts=[(name, "-" if value == "null" else value) for name, value in facts],
            siblings=siblings,
            log=self._log(run),
            is_open=run.state in OPEN_STATES,
        )

    def _log(self, run: RunRow) -> list[str]:
        if run.state in ("starting", "running"):
            return self.engine.tail(run.id, PANEL_LINES)
        kept = self.settings.state_dir / "logs" / f"{container_name(run.id)}.log"
        if not kept.is_file():
            return []
        with kept.open("rb") as log_file:
            log_file.seek(max(0, kept.stat().st_size - PANEL_LOG_BYTES))
            lines = log_file.read().decode("utf-8", "replace").splitlines()
        return lines[-PANEL_LINES:]

    def comparison(self, _: Asked, job: str) -> Reply:
        """Compared anew only when a run of the set has come to another end."""
        run, _record, siblings = self.store.run(job)
        rows = [run, *siblings]
        key = tuple(
            sorted((row.id, row.state, row.at, row.request, row.picked) for row in rows)
        )
        seen = self._compared.get(run.set)
        if seen is None or seen[0] != key:
            seen = (key, compare_runs(self.settings, self.store, job))
            self._compared = {run.set: seen}
        found = seen[1]
        return self.page(
            "compare", found=found, rows=comparison_rows(found), job=run.id
        )

    def asset(self, _: Asked, name: str) -> Reply:
        body = resource("templates", "panel", name).read_bytes()
        return Reply(200, body, f"{_MEDIA[name.rpartition('.')[2]]}; charset=utf-8")

    # --- actions

    def pause(self, _: Asked) -> Reply:
        self.store.pause()
        return _see("/")

    def resume(self, _: Asked) -> Reply:
        self.store.resume()
        self.store.work.set()
        return _see("/")

    def cancel(self, _: Asked, job: str) -> Reply:
        self.store.cancel(job)
        self.store.work.set()
        return _see(f"/runs/{job}")

    def log_in_page(self, _: Asked) -> Reply:
        return self.page("login", wrong=False)

    def log_in(self, asked: Asked) -> Reply:
        import hmac

        given = _form(asked.body).get("token", "").encode()
        token = (self.settings.panel_token or "").encode()
        if not token or not hmac.compare_digest(given, token):
            with self._guessing:  # one wrong guess at a time, and slowly
                time.sleep(0.2)
            return self.page("login", 403, wrong=True)
        cookie = f"pidispatch={self._ticket()}; HttpOnly; SameSite=Strict; Path=/"
        return _see("/", ("Set-Cookie", cookie))

    def log_out(self, _: Asked) -> Reply:
        gone = "pidispatch=; Max-Age=0; HttpOnly; SameSite=Strict; Path=/"
        return _see("/login", ("Set-Cookie", gone))


def _see(path: str, *headers: tuple[str, str]) -> Reply:
    return Reply(303, b"", headers=(("Location", path), *headers))


def _form(form: bytes) -> dict[str, str]:
    from urllib.parse import parse_qsl

    try:
        return dict(parse_qsl(form.decode("utf-8", "replace"), max_num_fields=16))
    except ValueError:  # too many: none of ours, and read before anyone is known
        return {}


PAGES: tuple[tuple[str, Callable[..., Reply]], ...] = (
    ("/", Panel.home),
    ("/triggers", Panel.rules),
    ("/triggers/([0-9]{1,6})", Panel.rule),
    ("/runs", Panel.run_list),
    (f"/runs/({_JOB_ID})", Panel.run),
    (f"/compare/({_JOB_ID})", Panel.comparison),
    ("/login", Panel.log_in_page),
    (r"/static/(panel\.(?:css|js|svg))", Panel.asset),
)

ACTIONS: tuple[tuple[str, Callable[..., Reply]], ...] = (
    ("/pause", Panel.pause),
    ("/resume", Panel.resume),
    (f"/runs/({_JOB_ID})/cancel", Panel.cancel),
    ("/login", Panel.log_in),
    ("/logout", Panel.log_out),
)


# -- the service --------------------------------------------------------------


class Service(Worker):
    """A running pidispatch: the receiver, with workers of its own or without."""

    triggers: TriggersFile

    def __init__(
        self,
        settings: Settings,
        triggers: Path,
        *,
        engine: Engine | None = None,
        clock: Clock = time.time,
        steady: Clock = time.monotonic,
    ) -> None:
        super().__init__(settings, triggers, engine=engine, clock=clock, steady=steady)
        self.intake = Intake(
            forges=self.forges,
            triggers=self.triggers,
            store=self.store,
            hourly=settings.target_hourly,
            clock=clock,
        )
        self.inbox = Inbox(self.intake)
        self.poller = Poller(self.intake, polled_of(settings), settings.poll_interval)
        self.edge = _receiver(self.intake, settings)
        self.panel = _panel(settings, self.store, self.triggers, self.engine)

    def start(self, *, worker: bool = True) -> None:
        _return_large_blocks()
        super().start(worker=worker)
        self.inbox.start()
        self.poller.start()
        self.edge.start()
        self.panel.start()
        log_event("serving", port=self.edge.port, panel=self.panel.port)

    def stop(self, *, end_jobs: bool = False) -> None:
        self.edge.stop()
        self.panel.stop(patience=1.0)
        self.poller.stop()
        self.inbox.stop()
        super().stop(end_jobs=end_jobs)


def _return_large_blocks() -> None:
    """A large body goes back to the system when it is done with.

    glibc else keeps blocks of that size, in a heap of every few threads, once one
    was freed: 500 MB for good after a burst of bodies of 25 MiB.
    """
    import ctypes

    threshold = -3  # M_MMAP_THRESHOLD; to set it also stops its growth
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another library
        ctypes.CDLL(None).mallopt(threshold, 1024 * 1024)


def _receiver(intake: Intake, settings: Settings) -> Edge:
    """The receiver. Raises `ConfigError` when its address cannot be had."""
    try:
        return Edge(intake, settings.bind, settings.port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {settings.bind}:{settings.port}: {error.strerror}",
            "set PI_BIND and PI_PORT to an address of this machine that is free",
        ) from error


def _panel(
    settings: Settings, store: Store, triggers: TriggersFile, engine: Engine
) -> Panel:
    """The panel. Raises `ConfigError` when its address cannot be had."""
    try:
        return Panel(settings, store, triggers, engine)
    except OSError as error:
        raise ConfigError(
            f"the panel cannot listen on {settings.panel_bind}:{settings.panel_port}: "
            f"{error.strerror}",
            "set PI_PANEL_BIND and PI_PANEL_PORT to an address that is free",
        ) from error


# =============================================================================
# cli
#
# Commands of click: parsing and calling. A user's mistake is one line and a fix,
# never a traceback.
# =============================================================================


class Commands(click.Group):
    """A group whose commands report our errors in one line, with their exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # a terminal may lack our ✓
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except PidispatchError as error:
            click.echo(problem_text(error), err=True)
            ctx.exit(error.exit_code)


def settings_of(db: Path | None = None) -> Settings:
    settings = load_settings()
    return msgspec.structs.replace(settings, db=db) if db else settings


def polling(settings: Settings, repos: Sequence[str]) -> Settings:
    """The settings with the repositories that the command line names."""
    if not repos:
        return settings
    try:
        parsed = SETTINGS["poll_repos"].parse(",".join(repos))
    except ValueError as error:
        raise ConfigError(f"--poll {error}", "write --poll owner/name") from error
    return msgspec.structs.replace(settings, poll_repos=parsed)


def triggers_path(settings: Settings, named: Path | None = None) -> Path:
    """The file `serve` takes: named, PI_TRIGGERS_FILE, else ./triggers.json."""
    return named or settings.triggers_file or Path("triggers.json")


def emit_json(value: Any) -> None:
    """Print typed JSON; in ASCII, so that no text in it can act on a terminal."""
    click.echo(json.dumps(msgspec.to_builtins(value), indent=2))


def emit(value: Any, text: Callable[[], str], as_json: bool) -> None:
    """Print a value: as JSON, or the text for a person."""
    if as_json:
        emit_json(value)
    else:
        click.echo(text())


_path_type = click.Path(path_type=Path)


def _complete_jobs(_: click.Context, __: Any, begun: str) -> list[str]:
    """Ids of the newest jobs for a shell that asks; nothing is better than noise."""
    try:
        rows = Reader(settings_of().db).runs(50)
    except PidispatchError:
        return []
    return [row.id for row in rows if row.id.startswith(begun)]


job_argument = click.argument("job", shell_complete=_complete_jobs)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
db_option = click.option("--db", type=_path_type, help="The queue's file (PI_DB).")
file_argument = click.argument("file", type=_path_type, required=False)
triggers_option = click.option(
    "--triggers",
    "triggers_file",
    type=_path_type,
    help="The rules' file (PI_TRIGGERS_FILE).",
)


@click.group(cls=Commands)
@click.version_option(__version__)
def main() -> None:
    """The queue, the budget and the box for the Pi coding agent."""


@main.command()
@db_option
@triggers_option
@click.option("--no-worker", is_flag=True, help="Receive only; run no jobs.")
@click.option("--stop-jobs", is_flag=True, help="On exit, end running jobs as well.")
@click.option("--poll", multiple=True, help="A repository to poll (POLL_REPOS).")
def serve(
    db: Path | None,
    triggers_file: Path | None,
    no_worker: bool,
    stop_jobs: bool,
    poll: tuple[str, ...],
) -> None:
    """Receive deliveries and run jobs until stopped."""
    settings = polling(settings_of(db), poll)
    if triggers_file:
        settings = msgspec.structs.replace(settings, triggers_file=triggers_file)
    set_up_logging(settings)
    service = Service(settings, triggers_path(settings))
    until_told = end_asked()
    service.start(worker=not no_worker)
    crons = [r for r in service.triggers.rules if r.on.type == "cron"]
    if crons and no_worker:
        log_event("cron-off", logging.WARNING, what="cron rules fire in the worker")
    click.echo(f"listening on {settings.bind}:{service.edge.port}", err=True)
    click.echo(f"panel on http://{settings.panel_bind}:{service.panel.port}/", err=True)
    gc.freeze()  # all that waits would wait 40 ms for each look through what is loaded
    until_told()
    service.stop(end_jobs=stop_jobs)


@main.command()
@db_option
@click.option("--stop-jobs", is_flag=True, help="On exit, end running jobs as well.")
def worker(db: Path | None, stop_jobs: bool) -> None:
    """Run jobs only. Cron needs PI_TRIGGERS_FILE; unset, no rules are read."""
    settings = settings_of(db)
    set_up_logging(settings)
    labour = Worker(settings, settings.triggers_file)
    until_told = end_asked()
    labour.start()
    if settings.triggers_file is None:
        log_event("cron-off", logging.WARNING, what="PI_TRIGGERS_FILE is not set")
    click.echo(f"working on {plain_text(settings.db)}", err=True)
    until_told()
    labour.stop(end_jobs=stop_jobs)


@main.command("run")
@click.argument("folder", type=_path_type)
@click.option("--task", required=True, help="What to do, in words.")
@click.option("--flow", default="task", show_default=True, help="The skill to follow.")
@click.option("--force", is_flag=True, help="Run although there are changes.")
@db_option
@json_option
def run_command(
    folder: Path, task: str, flow: str, force: bool, db: Path | None, as_json: bool
) -> None:
    """Run Pi once in a folder of yours, in place. Exit 0 only when it completed."""
    settings = settings_of(db)
    set_up_logging(settings)
    log.setLevel(logging.WARNING)
    job = local_job(local_run(settings, folder, task, flow, force), time.time())
    local = LocalRun(settings, job)
    if not local.new:
        click.echo(f"{local.job}: asked for in this very minute before", err=True)
    try:
        record = _attended(local)
    finally:
        local.close()
    answer = answer_of(settings, local.job)
    emit(record, lambda: ended_text(record, answer), as_json)
    sys.exit(RUN_EXITS[record.outcome])


def _attended(local: LocalRun) -> Record:
    """Wait for the end; on a terminal, say what happens meanwhile."""
    said: list[str] = []

    def tell(row: RunRow) -> None:
        if sys.stderr.isatty() and said[-1:] != [row.state]:
            said.append(row.state)
            click.echo(f"{row.id}: {row.state}", err=True)

    try:
        return local.wait(tell)
    except KeyboardInterrupt:
        if not local.here:
            fix = (
                f"see `pidispatch show {local.job}`, or `pidispatch cancel {local.job}`"
            )
            raise InfraError(f"{local.job} goes on in the worker", fix) from None
        local.cancel()
        return local.wait(tell)


def end_asked() -> Callable[[], object]:
    """What waits until we are told to end; told while we still start, it does not.

    No Event: a handler that sets one waits for ever for the lock that the thread it
    interrupts may hold, and a signal right before a wait does not end it. The byte
    that Python's own handler writes is there whenever it is read.
    """
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return lambda: os.read(told, 1)


class Beginning(NamedTuple):
    """What `init` writes into .env and into each rule for a forge, and how its
    webhook is set up."""

    env: str
    events: str
    run: Mapping[str, str] = {}


#: A line that begins with # waits for its value; the secret is there already.
_BEGINNINGS: Mapping[str, Beginning] = {
    "github": Beginning(
        """\
WEBHOOK_SECRET={secret}
# A token that may push branches and open pull requests.
#GITHUB_PAT=
""",
        "content type application/json; events Issues, Issue comments, Pull requests, "
        "Pull request reviews",
    ),
    "gitlab": Beginning(
        """\
#GITLAB_WEBHOOK_SECRET={secret}
# What the secret is: a secret token (token), or a signing token (signature).
#GITLAB_WEBHOOK_MODE=token
# A token of the role Developer with the scope api.
#GITLAB_TOKEN=
# A server of your own: GITLAB_URL=https://…
""",
        "events Issues, Comments, Merge requests",
    ),
    "forgejo": Beginning(
        """\
#FORGEJO_WEBHOOK_SECRET={secret}
# Your server, its sub-path included.
#FORGEJO_URL=
# A token with read:user, write:issue, write:repository, of an administrator.
#FORGEJO_TOKEN=
""",
        "method POST; events Issues, Issue comments, Pull requests, with labels",
    ),
    "azure": Beginning(
        """\
# A user name and a password, as typed into the subscription.
#AZURE_WEBHOOK_SECRET=pidispatch:{secret}
# https://dev.azure.com/<organisation>, or a server's collection.
#AZURE_ORG_URL=
# A token for Code and Work Items, reading Graph, Identity, Project and Team.
#AZURE_TOKEN=
""",
        "one Web Hooks subscription for each event of work items and pull requests",
        {"repository": "my-repository"},
    ),
}

_ENV_HEAD = """\
# Settings of pidispatch; `pidispatch doctor` checks them. Keep this file private.
# The webhook's secret, as typed into the forge. Without one nothing is served.
"""
_ENV_TAIL = """\
# The model provider's key.
#ANTHROPIC_API_KEY=
"""

_LIMITS_TEMPLATE = """\
{
  "$schema": "./limits.schema.json",
  "scopes": [],
  "pauseWindows": []
}
"""

_TRIGGERS_TEMPLATE = """\
{
  "$schema": "./triggers.schema.json",
  "triggers": [
    {
      "on": { "type": "label", "any": ["pi:fix"] },
      "run": { KIND, "flow": "fix-issue" }
    },
    {
      "on": { "type": "label", "any": ["pi:urgent"] },
      "run": { KIND, "flow": "fix-issue", "replicas": 2 }
    }
  ]
}
"""


def _next_steps(forge: str, folder: Path) -> str:
    begin = _BEGINNINGS[forge]
    waiting = ", ".join(re.findall(r"^#(\w+)=", begin.env, re.M))
    inside = "" if folder == Path() else f", in {plain_text(folder)}"
    return f"""\
next{inside}:
  1. .env: fill in {waiting}
     and the model provider's key; a line that begins with # does nothing
  2. {forge}: add a webhook to https://<your host>/{forge}, with the secret of .env;
     {begin.events}
  3. pidispatch build-image       (the job image; once, a few minutes)
  4. pidispatch doctor            (until no line is marked ✗)
  5. pidispatch serve"""


@main.command()
@click.argument("folder", type=_path_type, default=".")
@click.option(
    "--forge",
    type=click.Choice(list(_BEGINNINGS)),
    default="github",
    show_default=True,
    help="Whose deliveries it is to take.",
)
def init(folder: Path, forge: str) -> None:
    """Write .env, triggers.json and limits.json. Nothing is ever overwritten."""
    rules, limits = (
        json.dumps(schema, indent=2) + "\n"
        for schema in (triggers_schema(), limits_schema())
    )
    begin = _BEGINNINGS[forge]
    env = begin.env.format(secret=random_hex(32))
    kind = json.dumps({"kind": forge, **begin.run})[1:-1]
    files = (
        (".env", _ENV_HEAD + env + _ENV_TAIL, 0o600),
        ("triggers.json", _TRIGGERS_TEMPLATE.replace("KIND", kind), 0o644),
        ("triggers.schema.json", rules, 0o644),
        ("limits.json", _LIMITS_TEMPLATE, 0o644),
        ("limits.schema.json", limits, 0o644),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text, mode in files:
            done = _create(folder / name, text, mode)
            click.echo(f"{done} {plain_text(folder / name)}")
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
        raise ConfigError(why, "name a folder that you may write to") from error
    click.echo(_next_steps(forge, folder))


def _create(path: Path, text: str, mode: int) -> str:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        return "kept   "
    with os.fdopen(descriptor, "w", encoding="utf-8") as sink:
        sink.write(text)
    return "created"


@main.command()
@json_option
def demo(as_json: bool) -> None:
    """See the whole path without credentials. One issue, two replicas, two diffs."""
    try:
        import pidispatch_demo
    except ImportError as error:
        fix = "reinstall pidispatch"
        raise ConfigError("pidispatch_demo is not installed", fix) from error
    sys.exit(pidispatch_demo.run_demo(as_json=as_json))


@main.group()
def triggers() -> None:
    """Look at the rules; they are changed by editing the file."""


@triggers.command("list")
@file_argument
@json_option
def triggers_list(file: Path | None, as_json: bool) -> None:
    """One line a rule, `[x2]` where it makes replicas."""
    settings = load_settings()
    rules = read_triggers(triggers_path(settings, file), settings.providers)
    emit(rules, lambda: rules_table(rules), as_json)


@triggers.command("show")
@click.argument("index", type=int)
@file_argument
@json_option
def triggers_show(index: int, file: Path | None, as_json: bool) -> None:
    """One rule, its multiplier and what it trusts."""
    settings = load_settings()
    path = triggers_path(settings, file)
    rules = read_triggers(path, settings.providers)
    if not 0 <= index < len(rules):
        raise ConfigError(
            f"{path} has no trigger {index}", f"it has {len(rules)}, counted from 0"
        )
    shown = in_force(rules[index], settings)
    emit(rules[index], lambda: rule_detail(shown), as_json)


@triggers.command("check")
@file_argument
def triggers_check(file: Path | None) -> None:
    """Validate the file without starting anything; exit 0 or 2."""
    settings = load_settings()
    path = triggers_path(settings, file)
    rules = read_triggers(path, settings.providers)
    click.echo(f"{plain_text(path)}: {len(rules)} rules, no fault")


@triggers.command("schema")
def triggers_schema_command() -> None:
    """The JSON Schema of triggers.json, for an editor."""
    click.echo(json.dumps(triggers_schema(), indent=2))


@triggers.command("try")
@click.argument("forge", type=click.Choice(sorted(FORGES)))
@click.argument("delivery", type=_path_type)
@file_argument
@click.option("--header", "headers", multiple=True, help="'Name: value'; repeatable.")
@click.option("--event", help="The event's name, when no header says it.")
@click.option("--secret", help="Check the signature with this secret.")
@json_option
def triggers_try(
    forge: str,
    delivery: Path,
    file: Path | None,
    headers: tuple[str, ...],
    event: str | None,
    secret: str | None,
    as_json: bool,
) -> None:
    """What would this delivery do, and why? No store and no API is touched."""
    settings = load_settings()
    rules = read_triggers(triggers_path(settings, file), settings.providers)
    trial = try_delivery(rules, forge, delivery, headers, event, secret)
    emit(trial, lambda: trial_text(trial), as_json)


@main.group()
def limits() -> None:
    """Look at scope caps and pause windows."""


@limits.command("check")
@file_argument
def limits_check(file: Path | None) -> None:
    """Validate the file without starting anything; exit 0 or 2."""
    settings = load_settings()
    path, found = limits_path(settings, file), read_limits(settings, file)
    n, m = len(found.scopes), len(found.pauses)
    click.echo(f"{plain_text(path)}: {n} scopes, {m} pause windows, no fault")


@limits.command("schema")
def limits_schema_command() -> None:
    """The JSON Schema of limits.json, for an editor."""
    click.echo(json.dumps(limits_schema(), indent=2))


@main.command()
@db_option
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="How many.",
)
@click.option("--picks", is_flag=True, help="Which replica and model people merged.")
@json_option
def runs(db: Path | None, limit: int, picks: bool, as_json: bool) -> None:
    """Jobs, newest first. --json exports the records of those that ended."""
    reader = Reader(settings_of(db).db)
    if picks:
        chosen = reader.picks()
        emit(chosen, lambda: picks_text(chosen), as_json)
    elif as_json:
        emit_json(reader.records(limit))
    else:
        click.echo(runs_table(reader.runs(limit)))


@main.command()
@job_argument
@db_option
@json_option
def show(job: str, db: Path | None, as_json: bool) -> None:
    """One run, its record and request, its siblings by job id."""
    detail = RunDetail(*Reader(settings_of(db).db).run(job))
    emit(detail, lambda: run_detail(detail), as_json)


@main.command()
@job_argument
@click.option(
    "--diff",
    "diffs",
    type=click.Choice(("siblings", "base", "all", "none")),
    default="siblings",
    show_default=True,
    help="Which diffs to print.",
)
@db_option
@json_option
def compare(job: str, diffs: str, db: Path | None, as_json: bool) -> None:
    """The runs of a set side by side, from what is kept of them. No ranking."""
    settings = settings_of(db)
    with underway(lambda: f"reading the runs of {job}"):
        found = compare_runs(settings, Reader(settings.db), job)
    emit(found, lambda: comparison_text(found, diffs), as_json)


@main.command()
@job_argument
@db_option
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
def logs(job: str, db: Path | None, follow: bool) -> None:
    """What a job's box says, or the log that was kept of it."""
    settings = settings_of(db)
    reader = Reader(settings.db)
    run, _, _ = reader.run(job)
    kept = settings.state_dir / "logs" / f"{container_name(job)}.log"
    if run.state in ("starting", "running"):
        engine = DockerEngine(settings, reader.flag("instance") or "")
        lines = engine.log_lines(container_name(job), follow=follow)
    elif kept.is_file():
        lines = iter(kept.read_text("utf-8", "replace").rstrip("\n").split("\n"))
    else:
        fix = "set PI_CAPTURE_JOB_LOGS=1 for later jobs"
        raise ConfigError(f"no log of {job} is kept", fix)
    for line in lines:
        click.echo(plain_text(line))


@main.command()
@db_option
@json_option
def status(db: Path | None, as_json: bool) -> None:
    """The queue, the caps, holds, deliveries by end."""
    settings = settings_of(db)
    with contextlib.suppress(Refused):  # doctor and every refused job say why
        settings = with_overlay(settings)
    reader = Reader(settings.db)
    state = reader.status(Caps.of(settings, reader.limits()), time.time())
    emit(state, lambda: status_text(state), as_json)


@main.command()
@db_option
def pause(db: Path | None) -> None:
    """Start no more jobs until `resume`. Running ones go on; a restart keeps it."""
    Outside(settings_of(db).db).pause()
    click.echo("paused: deliveries are still taken, no job starts")


@main.command()
@db_option
def resume(db: Path | None) -> None:
    """Start jobs again after `pause`."""
    Outside(settings_of(db).db).resume()
    click.echo("resumed")


_CANCELLED = {
    "queued": "it had not started and will not",
    "claimed": "it was about to start and is stopped before or right after that",
    "starting": "its container is being started and is stopped right after",
    "running": "its container is being stopped; what it used is paid for",
}


@main.command()
@job_argument
@db_option
def cancel(job: str, db: Path | None) -> None:
    """End one job; its siblings go on."""
    state = Outside(settings_of(db).db).cancel(job)
    click.echo(f"{job}: {_CANCELLED[state]}")


@main.command()
@job_argument
@click.option("--to", "branch", help="Push to this new branch instead.")
@db_option
def publish(job: str, branch: str | None, db: Path | None) -> None:
    """Publish a kept result again."""
    settings = settings_of(db)
    with underway(lambda: f"publishing {job}"):
        done = publish_by_hand(settings, Outside(settings.db), job, branch)
    click.echo(plain_text(done))


@main.command()
@click.argument("job")
@db_option
def replay(job: str, db: Path | None) -> None:
    """Make an ended job once more, from its item as it reads now."""
    settings = settings_of(db)
    click.echo(replay_by_hand(settings, Outside(settings.db), job))


@main.command()
@click.argument("file", type=_path_type)
@db_option
def backup(file: Path, db: Path | None) -> None:
    """Copy the queue to a new file, also while it is in use."""
    Reader(settings_of(db).db).backup(file)
    click.echo(f"copied to {plain_text(file)}")


@main.command()
@click.option(
    "--for",
    "manager",
    type=click.Choice(tuple(UNITS)),
    default="launchd" if sys.platform == "darwin" else "systemd",
    show_default=True,
    help="Which service manager.",
)
@click.option("--install", is_flag=True, help="Write it to its place; never over one.")
def service(manager: str, install: bool) -> None:
    """Print a unit that runs `serve` in this folder. Exit code 2 does not restart."""
    unit = UNITS[manager](serve_command(), Path.cwd())
    if not install:
        click.echo(unit.text, nl=False)
        return
    try:
        unit.path.parent.mkdir(parents=True, exist_ok=True)
        done = _create(unit.path, unit.text, 0o600)
    except OSError as error:
        why = f"{unit.path}: {error.strerror}"
        raise ConfigError(why, "print it without --install") from error
    click.echo(f"{done} {plain_text(unit.path)}\nnext: {unit.start}")


@main.command("doctor")
@triggers_option
@db_option
@click.option(
    "--fix", is_flag=True, help="First mend file modes, remove stale containers."
)
@json_option
def doctor_command(
    triggers_file: Path | None, db: Path | None, fix: bool, as_json: bool
) -> None:
    """Check what a run needs. Exit 1 when something is broken."""
    try:
        settings = settings_of(db)
    except Faults as faults:
        checks = fault_checks("settings", faults)
    else:
        checks = mend(settings, time.time()) if fix else []
        checks += doctor(settings, triggers_path(settings, triggers_file))
    emit(checks, lambda: checks_text(checks), as_json)
    if any(check.state == "fail" for check in checks):
        sys.exit(1)


@main.command("build-image")
@click.option("--tag", help="Tag of the result (PI_JOB_IMAGE).")
@click.option("--base", help="Base image with Node 22.19 or newer and npm.")
@click.option("--offline", is_flag=True, help="Make the base locally, no registry.")
@click.option(
    "--ca",
    type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
    help="CA bundle that the build must trust.",
)
@click.option(
    "--forges",
    type=click.Choice(list(CLI_PACKAGES)),
    multiple=True,
    help="Forge whose CLI goes in, for publish: agent; the image then serves no "
    "other. May be repeated.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print the tag only.")
def build_image_command(
    tag: str | None,
    base: str | None,
    offline: bool,
    ca: Path | None,
    forges: tuple[str, ...],
    quiet: bool,
) -> None:
    """Build the job image."""
    import subprocess

    settings = load_settings()
    if offline:
        base = base or OFFLINE_BASE
        script = ["sh", str(resource("image", "offline-base.sh")), base]
        if subprocess.run(script).returncode:
            raise InfraError("the offline base was not made", "see its output above")
    name = tag or settings.job_image
    engine = DockerEngine(settings, "build")
    step = f"building {name}"
    with underway(lambda: step) if quiet else contextlib.nullcontext():
        for line in build_image(engine, name, base, ca, forges):
            if line.startswith("Step "):
                step = f"building {name}: {line}"
            if not quiet:
                click.echo(plain_text(line))
    click.echo(name)


@main.command("verify-image")
@click.argument("tag")
@json_option
def verify_image_command(tag: str, as_json: bool) -> None:
    """Check an image against its labels. Exit 1 when one of them lies."""
    import verify_image

    sys.exit(verify_image.run(tag, as_json=as_json))


gc.freeze()
gc.enable()

if __name__ == "__main__":
    # verify_image and the demo import this module by name: it must be this one
    sys.modules["pidispatch"] = sys.modules["__main__"]
    main()
