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
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import click
import msgspec

if TYPE_CHECKING:
    import sqlite3

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
