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
    forges       verify, parse, who asks, comment, review request; one class each
    store        all SQL, one writer
    prompts      the Jinja environment; prompt, HARD_RULES, comments
    box          Docker: network, gate, container, wait, stop, reap
    publish      host-side git: mirrors, packs, bundles, pushes, requests
    dispatch     the ladder before spending; one job from claim to record
    intake       the HTTP edge, the inbox, the triggers watcher
    surfaces     tables, run detail, doctor
    cli          click commands: parsing and calling, nothing else
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
)

import click
import msgspec

if TYPE_CHECKING:
    import sqlite3

    from markdown_it import MarkdownIt
    from markdown_it.token import Token

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
MAX_BODY_BYTES = 25 * 1024 * 1024
MAX_NUMBER = 2**53

TargetType = Literal["issue", "pull_request"]
ForgeKind = Literal["github", "gitlab", "forgejo", "azure"]


@dataclass(frozen=True)
class ForgeRow:
    """What differs between forges as data; behaviour is in section `forges`."""

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
        ),
    )
}

REVIEW_STATES = ("approved", "changes_requested", "commented")
TOOLS = ("read", "bash", "edit", "write", "grep", "find", "ls")
SHIPPED_FLOWS = ("fix-issue", "review")

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
    "sha-gone",
    "flow-not-found",
    "daily-token-cap",
    "scope-cap",
    "over-budget",
    "soft-hold",
    "dirty-tree",
    "local-needs-local-engine",
)

Outcome = Literal["completed", "policy", "failed"]

#: The life of a job row. `starting` is entered by the transaction that reserves
#: the caps; `publishing` means paid for, recorded, and not yet published.
STATES = (
    "queued",
    "claimed",
    "starting",
    "running",
    "publishing",
    "done",
)


@dataclass(frozen=True)
class Provider:
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

#: Wall-clock seconds since the epoch; passed in so that tests own the time.
Clock = Callable[[], float]


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

    def __init__(self, source: str, faults: Sequence[str]) -> None:
        self.source = source
        self.faults = tuple(faults)
        super().__init__("\n".join(f"{source}: {fault}" for fault in faults))


class InfraError(PidispatchError):
    """Engine, network or forge trouble that may pass: worth a retry."""


class Refused(PidispatchError):
    """A determinate no: recorded, commented once, never retried."""

    def __init__(self, reason: str, message: str, fix: str | None = None) -> None:
        super().__init__(message, fix)
        self.reason = reason


# =============================================================================
# settings
#
# One typed, frozen object. Each field carries its variable, its parser and its
# sentence for docs/settings.md. The real environment wins over `.env` in the
# working directory; every wrong value is named in one go.
# =============================================================================


def _integer(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"0|[1-9][0-9]{0,15}", text.strip()):
            raise ValueError("must be a whole number in plain digits")
        if int(text) < minimum:
            raise ValueError(f"must be at least {minimum}")
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


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word for word in re.split(r"[,\s]+", text) if word)
    if not words:
        raise ValueError("is empty; remove the variable to leave it unset")
    return words


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
    except (ValueError, OSError) as error:
        raise ValueError("must be an IANA time zone such as Europe/Berlin") from error
    return text


def _memory(text: str) -> str:
    if not re.fullmatch(r"[1-9][0-9]*[kmg]?", text.strip()):
        raise ValueError("must be a size such as 512m or 4g")
    return text.strip()


def _data_dir() -> Path:
    import platformdirs

    return Path(platformdirs.user_data_dir("pidispatch", appauthor=False))


def _setting(variable: str, parse: Callable[[str], Any], default: Any, doc: str) -> Any:
    metadata = {"variable": variable, "parse": parse, "doc": doc}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything an operator can set. Names of variables are in the metadata."""

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
        "PI_LIMITS_FILE", _path, None, "Scope caps and pause windows."
    )
    settings_file: Path | None = _setting(
        "PI_SETTINGS_FILE", _path, None, "JSON overlay, read again before every job."
    )
    providers_file: Path | None = _setting(
        "PI_PROVIDERS_FILE", _path, None, "More model providers, also local ones."
    )
    sessions_dir: Path | None = _setting(
        "PI_SESSIONS_DIR", _path, None, "Transcripts of rules with `resume`."
    )
    bind: str = _setting(
        "PI_BIND", _text, "0.0.0.0", "Address of the webhook receiver."
    )
    port: int = _setting("PI_PORT", _integer(0), 3000, "Port of the webhook receiver.")
    panel_bind: str = _setting(
        "PI_PANEL_BIND", _text, "127.0.0.1", "Address of the panel."
    )
    panel_port: int = _setting("PI_PANEL_PORT", _integer(0), 3001, "Port of the panel.")
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
        _text,
        "10.213.0.0/16",
        "Range the jobs' /28 networks come from.",
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
        "PI_SOFT_HOLD_PCT", _integer(1), None, "Hold new jobs at this share of a cap."
    )
    daily_token_cap: int | None = _setting(
        "PI_DAILY_TOKEN_CAP", _integer(1), None, "Tokens a day."
    )
    timezone: str = _setting("PI_TIMEZONE", _zone, "UTC", "Zone of the caps' windows.")
    target_hourly: int = _setting(
        "PI_TARGET_HOURLY",
        _integer(0),
        6,
        "Deliveries an hour for one target; 0 is off.",
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
        "PI_ON_FAILURE", _path, None, "Program called with job id, outcome, reason."
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
    providers: Mapping[str, Provider] = field(default_factory=lambda: dict(PROVIDERS))
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def isolated(self) -> bool:
        """Whether job networks are cut off; only exactly `0` opens them."""
        return self.egress != "0"


def load_settings(
    environ: Mapping[str, str] | None = None, dotenv: Path | None = Path(".env")
) -> Settings:
    """Read every setting; the environment wins over `dotenv` (may be absent).

    Raises `Faults` that names every wrong variable at once.
    """
    from dotenv import dotenv_values

    kept = dotenv_values(dotenv) if dotenv and dotenv.is_file() else {}
    values: dict[str, str] = {k: v for k, v in kept.items() if v is not None}
    values.update(os.environ if environ is None else environ)
    faults: list[str] = []
    parsed = _parse_fields(values, faults)
    if "providers_file" in parsed:
        parsed["providers"] = _load_providers(parsed["providers_file"], faults)
    providers: Mapping[str, Provider] = parsed.get("providers", PROVIDERS)
    parsed["keys"] = {
        name: values[row.key_variable].strip()
        for name, row in providers.items()
        if values.get(row.key_variable, "").strip()
    }
    if faults:
        raise Faults("settings", faults)
    return Settings(**parsed)


def _parse_fields(values: Mapping[str, str], faults: list[str]) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for item in dataclasses.fields(Settings):
        variable = item.metadata.get("variable")
        if variable is None or variable not in values:
            continue
        try:
            parsed[item.name] = item.metadata["parse"](values[variable])
        except ValueError as error:
            shown = "…" if _is_secret(variable) else json.dumps(values[variable])
            faults.append(f"{variable}={shown} {error}")
    return parsed


def _is_secret(variable: str) -> bool:
    return bool(re.search(r"SECRET|TOKEN|PAT$|_KEY", variable))


_PROVIDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


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
        tuple(row.get("models", ())),
    )


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
    return dataclasses.replace(settings, **changes)


def _overlaid(name: str, value: Any) -> Any:
    item = next(f for f in dataclasses.fields(Settings) if f.name == name)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{name}: {json.dumps(value)} must be a number or a string")
    try:
        return item.metadata["parse"](str(value))
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
    return Path(str(files("pidispatch_data"))).joinpath(*parts)


# =============================================================================
# identity
#
# Pure functions from numbers and ids to names. The only place where a replica
# index is turned into a name, and nothing but an index ever is: no text from an
# issue reaches a branch, a container or a file name.
# =============================================================================

_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_CONTAINER_MAX = 128


def _digest(text: str, length: int = 32) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def delivery_name(delivery: str) -> str:
    """The delivery id as it stands in names: itself when safe, else a hash.

    An id that ends like a replica suffix is hashed too, so that `x-r1` and
    replica 1 of `x` can never share a name.
    """
    if _SAFE_ID.fullmatch(delivery) and not re.search(r"-r[0-9]+$", delivery):
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


def target_name(kind: str, repo: str, target_type: str, number: int) -> str:
    """`owner/repo#7`; `!` where requests are numbered apart from issues."""
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


def local_id(folder: str, flow: str | None, task: str, minute: str) -> str:
    parts = "\0".join((folder, flow or "", task, minute))
    return "local-" + _digest(parts, 16)


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
#: The same for a paragraph, where a parser's time can grow with the square.
_PARAGRAPH_MAX = 16_384
#: Stands in a line for what is not prose (code, image, address), so that its
#: neighbours do not meet.
_GAP = "\ufffc"
#: Stands before a character that was escaped; a format character, so that no
#: comment can bring its own.
_ESCAPE = "\ufff9"
_ADDRESS = re.compile(r"(?:[a-z][a-z0-9+.-]{0,31}://|www\.)\S+", re.I)
_TAG = re.compile(r"<!--.*?(?:-->|\Z)|<(/?)([a-z][a-z0-9-]*)[^<>]*>", re.I | re.S)
_SET_APART = frozenset(("blockquote", "code", "pre", "script", "style"))
_BREAKS = re.compile(r"br|div|h[1-6]|li|ol|p|table|t[dhr]|ul", re.I)


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


@functools.cache
def _markdown() -> MarkdownIt:
    """CommonMark with tables; lines are parsed only where they may matter."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark").enable("table").disable(["inline", "text_join"])


def _markdown_prose(text: str, needle: str) -> Iterator[str]:
    """The paragraphs, headings and list items that may hold `needle`."""
    env: dict[str, Any] = {}
    quotes = depth = 0
    opened = ""
    for token in _markdown().parse(text, env):
        if token.type == "html_block":
            depth = functools.reduce(_set_apart, _TAG.finditer(token.content), depth)
        elif token.type in ("blockquote_open", "blockquote_close"):
            quotes += token.nesting
        elif (
            opened in ("paragraph_open", "heading_open")
            and quotes + depth == 0
            and (needle in token.content or "&" in token.content)
        ):
            yield _line_prose(token.content[:_PARAGRAPH_MAX], env)
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
_Line = Annotated[str, msgspec.Meta(pattern="^" + _LINE)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]
_Labels = tuple[_Text, ...]


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


def _folder_fault(folder: str) -> str | None:
    """Why a folder is not the top of a git work tree (its `.git` decides)."""
    path = Path(folder)
    if not path.is_absolute():
        return "must be an absolute path"
    try:
        if not path.is_dir():
            return "is not a directory here"
        git = path / ".git"
        linked = git.is_file() and git.read_bytes()[:8] == b"gitdir: "
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
        _Text, "must be an absolute path", ("local",), True, fault=_folder_fault
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

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},:]|[^\s\[\]{},:"]+', re.DOTALL)
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
    for token in _TOKEN.finditer(text):
        depth += (token[0] in ("[", "{")) - (token[0] in ("]", "}"))
        if depth > _DEPTH_MAX:
            raise json.JSONDecodeError(
                f"nested deeper than {_DEPTH_MAX}", text, token.start()
            )


@dataclass
class _Frame:
    """An open array or object: its path, the keys met (None in an array)."""

    path: str
    keys: dict[str, int] | None = None
    key: str | int | None = None


def _scan(text: str) -> Iterator[str]:
    """What `json.loads` lets pass in a valid text, each with its position."""
    frames = [_Frame("")]
    for token in _TOKEN.finditer(text):
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


@dataclass(frozen=True)
class _Place:
    """A value of the file, its path, and the list that its faults go to."""

    path: str
    value: Any
    faults: list[str]

    def at(self, *keys: str | int) -> _Place:
        """What stands below; its value is UNSET where nothing does."""
        path, value = self.path, self.value
        for key in keys:
            path = _child(path, key)
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                value = msgspec.UNSET
        return _Place(path, value, self.faults)

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
                self.at(key).refuse(_unknown(key, tuple(fields), name))
        return True


def _folded(name: str) -> str:
    return re.sub(r"[\W_]", "", name.casefold())


def _unknown(key: str, fields: Sequence[str], name: str) -> str:
    """What to say of a key that the object does not know."""
    import difflib

    home = next((n for n, rows in (("on", _ON), ("run", _RUN)) if key in rows), None)
    known = {_folded(word): word for word in (*_FOREIGN, *fields)}
    close = difflib.get_close_matches(_folded(key)[:64], known, 1, 0.65)
    nearest = known[close[0]] if close else None
    if home and key not in _FOREIGN:
        return f"is not a field of {name}; {key} belongs under `{home}`"
    if nearest in _FOREIGN and (key == nearest or nearest not in fields):
        return (
            f"is the field {nearest} of the source system (pi-dispatch), which"
            f" pidispatch does not have: {_FOREIGN[nearest]}"
        )
    hint = f"did you mean {nearest}?" if nearest else f"known: {', '.join(fields)}"
    return f"is not a field of {name}; {hint}"


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
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
    def words(self) -> tuple[str, ...]:
        """The actions that the type knows on this forge."""
        row = FORGES.get(self.kind or "")
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
        return self.type == "pull_request" and (self.kind == "azure" or self.closes)

    def has(self, path: str) -> bool:
        return self.place.at(*path.split(".")).value is not msgspec.UNSET


def _strange_actions(entry: _Entry) -> list[int]:
    words = entry.words
    return [i for i, word in enumerate(entry.actions) if words and word not in words]


def _label_fold(kind: str | None) -> Callable[[str], str]:
    """How label names compare: exactly, except that Azure ignores case."""
    return str.casefold if kind == "azure" else str


def _contradictions(entry: _Entry) -> list[int]:
    fold = _label_fold(entry.kind)
    named = {fold(n) for key in ("any", "all") for n in entry.on.get(key, ())}
    return [i for i, n in enumerate(entry.on.get("none", ())) if fold(n) in named]


def _miscounted(entry: _Entry) -> bool:
    models, wanted = entry.run.get("replicaModels"), entry.run.get("replicas")
    return models is not None and wanted is not None and len(models) != wanted


def _work_items(entry: _Entry) -> bool:
    return entry.kind == "azure" and entry.type in ("label", "comment")


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
        lambda e: e.type == "issue" and e.kind == "azure",
        "is not served on azure, where work items have no close event",
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
            and (e.kind != "github" or "review_submitted" not in e.actions)
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


def _entries(root: _Place) -> list[_Entry]:
    if not root.only(("$schema", "triggers"), "the file"):
        return []
    listed, reference = root.at("triggers"), root.at("$schema")
    if not isinstance(reference.value, str | msgspec.UnsetType):
        reference.refuse("must be a string")
    if not isinstance(listed.value, list):
        listed.refuse("must be an array of rules; [] is an empty one")
        return []
    entries = [_entry(listed.at(i)) for i in range(len(listed.value))]
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


def load_triggers(text: bytes, source: str) -> tuple[Rule, ...]:
    """Validate a whole triggers file; raises `Faults` naming every fault.

    A fault reads `triggers[3].run.replicas: 4 must be …`: the field's path
    with the rule's index, its value as JSON, why it is refused, what to do.
    Faults of the file as a whole begin with their line and column.
    """
    faults: list[str] = []
    root = _Place("", _parse(text, faults), faults)
    entries = _entries(root) if root.value is not msgspec.UNSET else []
    if faults:
        raise Faults(source, faults)
    return tuple(
        Rule(i, msgspec.convert(entry.on, On), msgspec.convert(entry.run, Run))
        for i, entry in enumerate(entries)
    )


def read_triggers(path: Path) -> tuple[Rule, ...]:
    """`load_triggers` of a file; one that cannot be read is a fault as well."""
    try:
        text = path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Faults(str(path), [f"cannot be read: {why}"]) from error
    return load_triggers(text, str(path))


def triggers_schema() -> dict[str, Any]:
    """The JSON Schema of triggers.json, from the rows that validate it.

    It takes every valid file and some more: rules between fields are ours.
    """
    rule = _object({"on": _rows_schema(_ON), "run": _rows_schema(_RUN)}, ("on", "run"))
    listed = {"type": "array", "items": rule}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pidispatch triggers",
        **_object({"$schema": {"type": "string"}, "triggers": listed}, ("triggers",)),
    }


def _object(properties: dict[str, Any], required: Sequence[str]) -> dict[str, Any]:
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
    return _object(properties, required)


# -- matching an event to a rule ----------------------------------------------

#: What counts as added by the actions that a label rule knows: everything the
#: item carries, what the event says was added, or nothing. GitHub's `opened`
#: is silent because a `labeled` follows for each label.
_LABEL_ACTIONS: dict[str, dict[str | None, Literal["all", "added", "nothing"]]] = {
    "github": {"labeled": "added", "opened": "nothing", "reopened": "nothing"},
    "gitlab": {"open": "all", "update": "added", "reopen": "nothing"},
    "forgejo": {"opened": "all", "label_updated": "added", "reopened": "nothing"},
    "azure": {"created": "all", "updated": "added"},
}

#: A newly created comment in the forge's words; Azure has none, its parser
#: tells new from edited. GitLab before 16.11 sends no action with a note.
_COMMENT_ACTIONS: dict[str, tuple[str | None, ...]] = {
    "github": ("created",),
    "gitlab": ("create", None),
    "forgejo": ("created",),
}

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


def _actionable(event: Event) -> bool:
    """Whether some rule type of the forge knows the event's action."""
    row = FORGES[event.forge]
    if event.kind == "label":
        return event.action in _LABEL_ACTIONS[event.forge]
    if event.kind == "comment":
        known = _COMMENT_ACTIONS.get(event.forge)
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
    mode = _LABEL_ACTIONS[event.forge].get(event.action)
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
    labelling = _LABEL_ACTIONS[event.forge].get(event.action) == "added"
    if labelling and on.match == "added" and (on.any or on.all):
        found = _judge_labels(rule, event)
        return _far(event) if found == Drop("no-allowlisted-label") else found
    return event.action if _holds(on, event) else _far(event)


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
    work_item = event.forge == "azure" and event.target and event.target.type == "issue"
    for rule in mine:
        phrase = rule.on.phrase or ""
        word = _mentioned(
            phrase, event.comment or "", "html" if work_item else "markdown"
        )
        if word is not None:
            flows = {r.run.flow for r in rules if r.run.kind != "local"}
            return Match(rule, word if word in flows else rule.run.flow, phrase)
    return Drop("no-trigger-phrase")


# -- the jobs of a match ------------------------------------------------------


class Trigger(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a job exists: the event, who acted (an id), the rule and its match."""

    event: str
    action: str | None = None
    delivery: str
    sender: str
    index: int
    type: str
    by: str


class Job(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run to be made: the queue's payload, also read by prompts and box.

    `set` is the id shared by the replicas of one delivery. `replica` and
    `replicas` are absent, not null, on a plain job.
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
    def title(self) -> str:
        """`owner/repo#7`, as records and logs name the target."""
        return target_name(self.kind, self.repo, self.target.type, self.target.number)


def fan_out(match: Match, event: Event) -> tuple[Job, ...]:
    """The jobs of one allowed delivery: one, or one for each replica."""
    assert event.target and event.repo and event.actor
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
        comment=event.comment,
        review=event.review,
    )
    if n is None:
        return (plain,)
    return tuple(_replica(plain, event, i, n) for i in range(1, n + 1))


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
# forges
#
# One small class a forge: verify bytes, parse to an Event, who is asking,
# comment, find or open a review request. Knows nothing of the queue.
# =============================================================================


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


class Forge(Protocol):
    """What the rest of pidispatch asks of a forge."""

    kind: ForgeKind

    def verify(self, headers: Mapping[str, str], body: bytes) -> None: ...

    def parse(self, headers: Mapping[str, str], body: bytes) -> Event: ...

    def authority(self, event: Event) -> Literal["allowed", "denied", "ask"]: ...

    def ask(self, event: Event) -> bool: ...

    def own_id(self) -> str | None: ...

    def credential(self, repo: str) -> Credential: ...

    def clone_url(self, repo: str) -> str: ...

    def default_branch(self, repo: str) -> str: ...

    def comment(self, repo: str, target: Target, text: str, marker: str) -> None: ...

    def find_request(self, repo: str, head: str) -> Request | None: ...

    def open_request(
        self, repo: str, head: str, base: str, title: str, body: str
    ) -> Request: ...

    def retitle_request(self, repo: str, number: int, title: str) -> None: ...


# =============================================================================
# store
# =============================================================================

# =============================================================================
# prompts
# =============================================================================

# =============================================================================
# box
# =============================================================================

# =============================================================================
# publish
#
# Host-side git and review requests: one bare mirror a repository, the packed
# clone for the box, and the way out of what the box made. Host git never runs
# inside anything a box wrote. Knows nothing of Docker.
# =============================================================================

# =============================================================================
# dispatch
# =============================================================================

# =============================================================================
# intake
#
# The HTTP edge, the inbox that resolves who asked, and the watcher of the
# triggers file. Knows nothing of Docker.
# =============================================================================

# =============================================================================
# surfaces
# =============================================================================

# =============================================================================
# cli
# =============================================================================


@click.group()
@click.version_option(__version__)
def main() -> None:
    """The queue, the budget and the box for the Pi coding agent."""


if __name__ == "__main__":
    main()
