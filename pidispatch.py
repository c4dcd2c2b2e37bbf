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

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal, NamedTuple, Protocol

import click
import msgspec

if TYPE_CHECKING:
    import sqlite3
    import subprocess

    import jinja2

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


def load_triggers(text: bytes, source: str) -> tuple[Rule, ...]:
    """Validate a whole triggers file; raises `Faults` naming every fault."""
    raise NotImplementedError


def triggers_schema() -> dict[str, Any]:
    """The JSON Schema of triggers.json, from the models that validate it."""
    raise NotImplementedError


def match_event(rules: Sequence[Rule], event: Event) -> Match | Drop:
    """The first rule of the event's forge that matches, or why none does."""
    raise NotImplementedError


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
#
# The Jinja environment: every text we write is a template, and text from
# outside is only ever a variable of one.
# =============================================================================


@functools.cache
def _templates() -> jinja2.Environment:
    from jinja2 import FileSystemLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(
        loader=FileSystemLoader(resource("templates")),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )


def render(name: str, **values: object) -> str:
    """One of our templates with `values`; text in a value is never a template."""
    return _templates().get_template(name).render(**values)


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

#: Refusals of the way out (45-box-contracts, "The result"), and of a repository
#: that is gone, moved, empty or not readable as we need it.
PUBLISH_REFUSALS = (
    "bundle-refused",
    "branch-moved",
    "push-refused",
    "workflow-permission",
    "repository-unavailable",
)

#: The largest result we take from a box; forges refuse single files over 100 MB.
BUNDLE_BYTES = 256 * 1024 * 1024
SKILL_FILES = 256
SKILL_BYTES = 8 * 1024 * 1024
SKILL_FILE_BYTES = 1024 * 1024
#: Titles: GitLab and Forgejo store 255 characters, GitHub 256, Azure 400.
TITLE_CHARS = 255
#: Bodies: GitHub takes 65,536 characters; Azure 4,000 in a request's description.
BODY_CHARS = 60_000
REQUEST_CHARS = {"azure": 3_000}
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
GIT_INHERITS = re.compile(
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
    (
        r"^fatal: repository .* not found|redirect(?:ion|ed)?\b[^/]*$",
        "repository-unavailable",
    ),
)
_PUSH_FAULTS: tuple[tuple[str, str | None], ...] = (
    (r"^!\t\S+\t\[rejected\]", "branch-moved"),
    (r"refusing to allow .* workflow", "workflow-permission"),
    (
        r"^!\t\S+\t\[remote rejected\] \((?:cannot lock|failed to update)"
        r"|internal (?:server )?error|unable to create temporary",
        None,
    ),
    (r"^!\t\S+\t\[remote |returned error: 40[34]", "push-refused"),
    *_REMOTE_FAULTS,
)
_FIXES = {
    "forge-token-unavailable": "check the forge token and what it may read",
    "repository-unavailable": "check the repository's name; was it moved or deleted?",
}

#: Control characters except tab and line feed, and those that reorder text.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
    "\ud800-\udfff]"
)


@dataclass(frozen=True)
class Bounds:
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


@dataclass(frozen=True)
class Remote:
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
    return (
        Refused(reason, message, _FIXES.get(reason)) if reason else InfraError(message)
    )


@dataclass(frozen=True)
class Git:
    """Runs git in a closed environment; `private` is a 0700 directory of ours.

    A token reaches git only through a file in a directory that lives as long as
    the command: never by argument, URL or environment.
    """

    private: Path
    protocols: tuple[str, ...] = ("http", "https")
    bounds: Bounds = Bounds()

    def environment(self) -> dict[str, str]:
        """The whole environment of a git command; holds no token."""
        config = {
            f"GIT_CONFIG_{part}_{i}": text
            for i, pair in enumerate(GIT_CONFIG.items())
            for part, text in zip(("KEY", "VALUE"), pair, strict=True)
        }
        return {
            **{k: v for k, v in os.environ.items() if GIT_INHERITS.fullmatch(k)},
            **config,
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
        feed: bytes | int = b"",
        sink: int | None = None,
        seconds: float | None = None,
        secret: Path | None = None,
        before: Callable[[], None] | None = None,
    ) -> Done:
        """Run one command to its end and say how it went.

        `feed` is its input, bytes or an open file; `sink` a file for its output;
        `secret` a directory that askpass reads; `before` runs in the child.
        Raises `TimedOut`, and `InfraError` when git cannot be started.
        """
        import subprocess

        asked = {"GIT_ASKPASS": str(self.private / "askpass")} if secret else {}
        with contextlib.ExitStack() as ending:
            try:
                child = subprocess.Popen(
                    ["git", *arguments],
                    cwd=self.private,
                    env={
                        **self.environment(),
                        **asked,
                        "PIDISPATCH_ASKPASS": f"{secret}",
                    },
                    stdin=feed if isinstance(feed, int) else subprocess.PIPE,
                    stdout=subprocess.PIPE if sink is None else sink,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    preexec_fn=before,
                )
                ending.callback(_end, child)
                given = None if isinstance(feed, int) else feed
                out, err = child.communicate(given, seconds or self.bounds.local)
            except subprocess.TimeoutExpired as error:
                raise TimedOut(f"git {arguments[0]} took too long") from error
            except OSError as error:
                raise InfraError(
                    f"git did not start: {error}", "install git"
                ) from error
        return Done(child.returncode, out or b"", err.decode("utf-8", "replace"))

    def talk(self, remote: Remote, *arguments: str, seconds: float) -> Done:
        """A command that talks to `remote`; its messages come back redacted."""
        with self._secret(remote) as secret:
            done = self.call(*arguments, seconds=seconds, secret=secret)
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
            _write_private(folder / "host", f"{host}\n")
            _write_private(folder / "username", credential.username)
            _write_private(folder / "password", credential.password)
            yield folder
        finally:
            shutil.rmtree(folder)

    def look(self, remote: Remote, *names: str) -> Seen:
        """Read the named refs in one request; absent ones are left out."""
        command = ("ls-remote", "--symref", "--quiet", "--", remote.url, *names)
        done = self.talk(remote, *command, seconds=self.bounds.look)
        if done.code:
            raise _fault(done.err, "reading the repository", _REMOTE_FAULTS)
        lines = done.out.decode("utf-8", "replace").splitlines()
        pairs = [(name, value) for value, _, name in (x.partition("\t") for x in lines)]
        heads = (
            v for n, v in pairs if n == "HEAD" and v.startswith("ref: refs/heads/")
        )
        refs = {n: v for n, v in pairs if n in names and _OBJECT_ID.fullmatch(v)}
        return Seen(next(heads, "").removeprefix("ref: ") or None, refs)


_OBJECT_ID = re.compile(r"[0-9a-f]{40}")


class Seen(NamedTuple):
    """What one look at a remote showed: the ref HEAD names, and commits by ref."""

    head: str | None
    refs: Mapping[str, str]


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill what still runs of git and its transport, which is another process."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def _write_private(path: Path, content: str, mode: int = 0o600) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, mode), "w", encoding="utf-8") as sink:
        sink.write(content)


@dataclass(frozen=True)
class Repository:
    """A bare repository of ours and the git that works on it."""

    git: Git
    path: Path

    def call(self, *arguments: str, **how: Any) -> Done:
        return self.git.call(f"--git-dir={self.path}", *arguments, **how)

    def run(self, *arguments: str, **how: Any) -> bytes:
        """The output of a local command; raises `InfraError` when it fails."""
        done = self.call(*arguments, **how)
        if done.code:
            raise InfraError(f"git {arguments[0]} failed: {_told(done.err)}")
        return done.out

    def talk(self, remote: Remote, *arguments: str, seconds: float) -> Done:
        at = f"--git-dir={self.path}"
        return self.git.talk(remote, at, *arguments, seconds=seconds)

    def create(self) -> None:
        self.path.mkdir(mode=0o700, exist_ok=True)
        self.run("init", "--bare", "--quiet", "--template=", str(self.path))


@dataclass(frozen=True)
class Mirror(Repository):
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
        if not self._fetch(remote, missing):
            self._fetch(remote, refs)
            if not all(map(self.has, missing)):
                raise Refused("sha-gone", "the forge no longer has the job's commit")
        if len([*self.path.glob("objects/pack/*.pack")]) > MIRROR_PACKS:
            self.run("repack", "-d", "--geometric=2", "--quiet")

    def _fetch(self, remote: Remote, wants: Sequence[str]) -> bool:
        """False when the remote does not give one of `wants`; writes no ref."""
        options = ("--quiet", "--no-tags", "--no-write-fetch-head")
        command = ("fetch", *options, "--no-recurse-submodules", "--", remote.url)
        done = self.talk(remote, *command, *wants, seconds=self.git.bounds.fetch)
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


@dataclass(frozen=True)
class Prepared:
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
        bounds: Bounds = Bounds(),
    ) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)
        self.root = root.resolve()
        self.git = Git(self.root, protocols, bounds)
        _install_askpass(self.root)
        _sweep(self.root)

    def of(self, kind: str, repo: str) -> Mirror:
        return Mirror(self.git, self.root / mirror_name(kind, repo))

    def prepare(
        self,
        forge: Forge,
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
        mirror, remote = self.of(job.kind, job.repo), Remote.of(forge, job.repo)
        branch = f"refs/heads/{job.branch}" if job.branch else None
        asked = request_ref(job)
        seen = self.git.look(remote, *filter(None, ("HEAD", branch, asked)))
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
            mirror.obtain(remote, tips, [seen.head, *filter(None, [asked])])
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

    def restore(self, remote: Remote, job: Job, work: Work) -> Mirror:
        """The job's mirror with its base in it, fetched again if need be."""
        mirror = self.of(job.kind, job.repo)
        with mirror.locked():
            mirror.obtain(remote, [work.base], [f"refs/heads/{work.default_branch}"])
        return mirror

    def release(self, job: Job) -> None:
        """Let go of what was kept for a job that is published or swept."""
        mirror = self.of(job.kind, job.repo)
        if mirror.path.exists():
            with mirror.locked():
                mirror.release(job.id)


def request_ref(job: Job) -> str | None:
    """The forge's ref of a request's head; Azure has none, its id must do."""
    ref = FORGES[job.kind].request_ref
    if job.target.type != "pull_request" or ref is None:
        return None
    return ref.format(n=job.target.number)


def _install_askpass(root: Path) -> None:
    """Write the script once: one written just before use may be "busy"."""
    script = root / "askpass"
    if script.exists() and script.read_text("utf-8") == ASKPASS:
        return
    fresh = root / f"askpass.{secrets.token_hex(8)}"
    _write_private(fresh, ASKPASS, 0o700)
    fresh.replace(script)


def _sweep(root: Path) -> None:
    """Remove what a killed process left: far older than any command may run."""
    import shutil

    for left in (*root.glob("askpass-*"), *root.glob("quarantine-*")):
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


def read_skill(mirror: Mirror, base: str, flow: str) -> dict[str, bytes] | None:
    """The regular files of `.pi/skills/<flow>` at `base`, None when it has none.

    Raises `Refused("flow-not-found")` when they are too many, too large, or
    named so that no file can be made of them.
    """
    folder = f".pi/skills/{flow}/"
    listed = mirror.run("ls-tree", "-r", "-z", "--long", "--full-tree", base, folder)
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
            raise _skill_refused(flow, "has more than 256 files or 8 MiB")
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


def _contents(mirror: Mirror, blobs: Sequence[bytes]) -> Iterator[bytes]:
    output = mirror.run("cat-file", "--batch", feed=b"\n".join([*blobs, b""]))
    at = 0
    for _ in blobs:
        end = output.index(b"\n", at)
        size = int(output[at:end].split()[2])
        yield output[end + 1 : end + 1 + size]
        at = end + 1 + size + 1


@dataclass(frozen=True)
class Quarantine(Repository):
    """A throw-away repository with a box's checked result; close it after use.

    `tip` descends from the job's base by `commits` commits and is complete.
    """

    tip: str
    commits: int = 0

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


def _limits(cpu: int) -> Callable[[], None]:
    """Bounds set in a child that reads what a box made, before it starts."""
    import resource

    wanted = {
        resource.RLIMIT_CPU: cpu,
        resource.RLIMIT_FSIZE: 4 * BUNDLE_BYTES,
        resource.RLIMIT_DATA: 2**31,
        resource.RLIMIT_CORE: 0,
    }

    def apply() -> None:
        for what, value in wanted.items():
            most = resource.getrlimit(what)[1]
            soft = value if most == resource.RLIM_INFINITY else min(value, most)
            resource.setrlimit(what, (soft, most))

    return apply


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
    return dataclasses.replace(quarantine, commits=commits)


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
    this instance pushed there. The same push again is harmless. Raises
    `Refused` (branch-moved, push-refused, workflow-permission) or `InfraError`.
    """
    ref, tip, git = f"refs/heads/{branch}", quarantine.tip, quarantine.git
    present = git.look(remote, ref).refs.get(ref)
    if present == tip:
        return
    if present != lease or not _replaceable(quarantine, lease, ours):
        raise Refused("branch-moved", f"{branch} was changed by someone else")
    options = ("--porcelain", "--no-progress", "--no-verify", "--no-follow-tags")
    expected = f"--force-with-lease={ref}:{lease or ''}"
    command = ("push", *options, "--recurse-submodules=no", expected, "--", remote.url)
    done = quarantine.talk(remote, *command, f"{tip}:{ref}", seconds=git.bounds.push)
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


@dataclass(frozen=True)
class Work:
    """What a finished job left: files of its outbox and the facts it started from.

    `base`, `lease` and `default_branch` come from `Prepared`; `commits` is the
    runner's count; `ours` are the commits this instance pushed to the job's
    branch before.
    """

    bundle: Path | None
    review_request: str | None
    comment: str | None
    base: str
    lease: str | None
    default_branch: str
    commits: int
    ours: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Published:
    """What stands on the forge: the branch's commit and its request, if any."""

    tip: str | None = None
    request: Request | None = None


def publish_job(forge: Forge, mirrors: Mirrors, job: Job, work: Work) -> Published:
    """Put a finished job's work on the forge; safe to repeat at any time.

    An issue's job gets its branch, one request and one comment, a request's job
    only the comment. A determinate refusal is commented once and raised again;
    `InfraError` means: try later.
    """
    if job.target.type == "pull_request":
        _say(forge, job, work, "review", commits=work.commits if work.bundle else 0)
        return Published()
    try:
        published = _publish_branch(forge, mirrors, job, work)
    except Refused as refusal:
        if refusal.reason in PUBLISH_REFUSALS:
            _say(forge, job, work, "refused", refusal=refusal)
        raise
    _say(forge, job, work, "result", request=published.request)
    return published


def publish_to(
    forge: Forge, mirrors: Mirrors, job: Job, work: Work, branch: str
) -> str | None:
    """Push a kept result to a new branch the operator names; returns its commit."""
    if mirrors.git.call("check-ref-format", f"refs/heads/{branch}").code:
        raise ConfigError(f"{json.dumps(branch)} is no branch name")
    if work.bundle is None:
        return None
    remote = Remote.of(forge, job.repo)
    mirror = mirrors.restore(remote, job, work)
    with check_bundle(mirror, work.bundle, work.base) as quarantine:
        push(quarantine, remote, branch, None)
    return quarantine.tip


def _publish_branch(forge: Forge, mirrors: Mirrors, job: Job, work: Work) -> Published:
    branch = job.branch
    if branch is None or work.bundle is None:
        return Published()
    if branch == work.default_branch:
        raise Refused("push-refused", f"{branch} is the default branch")
    remote = Remote.of(forge, job.repo)
    mirror = mirrors.restore(remote, job, work)
    with check_bundle(mirror, work.bundle, work.base) as quarantine:
        if not quarantine.commits:
            return Published()
        push(quarantine, remote, branch, work.lease, work.ours)
    return Published(quarantine.tip, _one_request(forge, job, work, branch))


def _one_request(forge: Forge, job: Job, work: Work, branch: str) -> Request:
    """The open request of exactly this branch, opened if there is none."""
    found = forge.find_request(job.repo, branch)
    if found is None:
        first, _, rest = clean_text(work.review_request or "").partition("\n")
        title, body = request_title(job, first), _request_body(job, rest)
        return forge.open_request(job.repo, branch, work.default_branch, title, body)
    if _is_marked(job, found.title):
        return found
    title = request_title(job, found.title)
    forge.retitle_request(job.repo, found.number, title)
    return msgspec.structs.replace(found, title=title)


_HIDDEN_MARKER = re.compile(r"<!--(?=\s*pidispatch)", re.IGNORECASE)
_TITLE_MARKER = re.compile(r"\[\s*r\s*\d+\s*/\s*\d+\s*\]", re.IGNORECASE)


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
    title = _plain_line(written)
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
    others = siblings(job.replica, job.replicas)
    branches = [branch_name(job.target.number, index) for index in others]
    body = clean_text(written, REQUEST_CHARS.get(job.kind, BODY_CHARS))
    return render("request-body.md.j2", job=job, body=body, siblings=branches)


def _say(forge: Forge, job: Job, work: Work, kind: str, **values: object) -> None:
    """Post one comment of a kind; the hidden marker, its last line, makes it one."""
    marker = f"<!-- pidispatch:{job.id}:{kind} -->"
    shown = {"comment": clean_text(work.comment or ""), "marker": marker, **values}
    noun = FORGES[job.kind].request_noun
    text = render(f"comment-{kind}.md.j2", job=job, noun=noun, **shown)
    forge.comment(job.repo, job.target, text, marker)


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
