"""Drives pi once inside a job's box and packs what came of it.

What enters is /job: a prompt and a packed clone, read-only. What leaves is
/outbox/branch.bundle, whatever the agent wrote beside it, JSON lines on stdout and an
exit code. The last line is the exit event; it is telemetry, the code classifies.
Standard library only.

Sections, each using only what stands above it:

    vocabulary    codes, reasons, limits, places, the verdict
    inputs        /job/job.json and the files beside it, checked before any spending
    git           git that obeys nobody's configuration
    workspace     the packed clone becomes /workspace
    gate          waiting for the way out
    tally         what pi reports: turns, usage, the last stop reason
    agent         the pi process, from its start to its end
    classify      how a run that ended by itself is judged
    result        commits and leftovers become one bundle
    run           all of it in order
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import enum
import json
import os
import re
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, TypeVar

# ======================================================================================
# vocabulary
# ======================================================================================
# What the rest of the file speaks in. A verdict is an exit code and a reason:
# 0 done · 1 infra, may be tried again · 2 policy, determinate · 143 stopped by TERM.

POLICY, INFRA, TERMINATED = 2, 1, 128 + signal.SIGTERM

RULES_SENTINEL = "pidispatch-hard-rules-v1"
RESULT_REF = "refs/pidispatch/result"
REQUEST_REF = "refs/pidispatch/request"
REQUEST_BRANCH = "base"  # the local branch when the target is a review request

GATE_WAIT = 30.0  # seconds; the gate is started before the box
PI_GRACE = 2.0  # seconds between TERM and KILL for pi
SETTLED_GRACE = 10.0  # seconds pi may take to leave once it has settled
TERM_BUDGET = 8.0  # seconds after TERM; the engine kills after 10
COLLECT_BUDGET = 60.0  # seconds for the result when nobody is waiting to kill
TICK = 0.2  # seconds between looks at the clock and at pi

STREAM_LINE_MAX = 4 << 20  # bytes of one pi event worth reading
OUT_MAX = 1 << 20  # bytes forwarded to stdout, the exit line apart
TEXT_MAX = 500  # characters of any message passed on
STDERR_KEPT = 8192  # bytes of pi's stderr kept for the verdict

LEFTOVER_FILE_MAX = 50 << 20  # bytes; forges refuse files of 100 MB
LEFTOVER_TOTAL_MAX = 200 << 20  # bytes of untracked files kept in all
SMALL_FILE = 8 << 20  # bytes read from a file the agent may have written
SESSION_MAX = 8 << 20  # bytes of a session worth handing out; the host takes no more

SHA = re.compile(r"[0-9a-f]{40}")


class Refused(Exception):
    """The job cannot be done as asked; trying again would change nothing."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Trouble(Exception):
    """The machinery failed, not the job."""


class Stopped(Exception):
    """TERM came before pi was started."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    code: int
    reason: str | None
    message: str | None = None


@dataclasses.dataclass(frozen=True)
class Places:
    job: Path
    workspace: Path
    outbox: Path
    rules: Path
    home: Path
    pi: tuple[str, ...]

    @property
    def hard_rules(self) -> Path:
        return self.rules / "HARD_RULES.md"

    @property
    def fork_join(self) -> Path:
        return self.rules / "fork-join" / "src" / "index.ts"

    @property
    def session(self) -> Path:
        """Where pi keeps the session of a run that has one."""
        return self.home / ".pi" / "session.jsonl"

    @property
    def keep(self) -> Path:
        """Where the pristine index and pack index wait for the end of the run."""
        return self.home / ".pidispatch"


class Stop:
    """Remembers when TERM came. `wake` becomes readable at that moment."""

    def __init__(self) -> None:
        self.at: float | None = None
        self.wake, self._write = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self._write, False)

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self.request)
        signal.signal(signal.SIGINT, self.request)

    def request(self, *_: object) -> None:
        if self.at is None:
            self.at = time.monotonic()
            os.write(self._write, b"!")


@dataclasses.dataclass
class Limit:
    """A point in monotonic time that TERM may draw nearer."""

    until: float
    stop: Stop

    def left(self) -> float:
        until = self.until
        if self.stop.at is not None:
            until = min(until, self.stop.at + TERM_BUDGET)
        return until - time.monotonic()

    def share(self, part: float) -> Limit:
        """The first `part` (0 to 1) of the time left."""
        return Limit(time.monotonic() + self.left() * part, self.stop)


def complain(text: str) -> None:
    print(f"runner: {text}"[: 4 * TEXT_MAX], file=sys.stderr, flush=True)


# ======================================================================================
# inputs
# ======================================================================================
# Everything is checked before the first model call; each fault names the field or the
# file and ends the run with exit 2.

T = TypeVar("T")

JOB_KEYS = (
    *("version", "jobId", "attempt", "target", "base", "branch", "requestRef"),
    *("requestSha", "flow", "provider", "model", "gate", "models", "maxTurns"),
    *("maxTokens", "deadline", "excludeTools", "forkJoin", "publish", "session", "git"),
)


@dataclasses.dataclass(frozen=True)
class Forge:
    """Where an agent that publishes for itself pushes to, and what it needs for it.

    The environment holds the token by the names that the forge's CLI reads, and by
    those below for git.
    """

    url: str
    environment: Mapping[str, str] = dataclasses.field(repr=False)

    @property
    def root(self) -> str:
        parts = urllib.parse.urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"


USERNAME, PASSWORD = "PI_GIT_USERNAME", "PI_GIT_PASSWORD"


@dataclasses.dataclass(frozen=True)
class Job:
    """job.json, version 1. `branch` is the local one.

    `deadline` is in monotonic time, because somebody may set the clock.
    """

    job_id: str
    target: str
    base: str
    branch: str
    request_sha: str | None
    flow: str | None
    provider: str
    model: str
    gate: str
    token: str
    models: Mapping[str, object]
    max_turns: int
    deadline: float
    exclude_tools: tuple[str, ...]
    fork_join: bool
    session: str | None  # "new", "resumed", or none is kept
    name: str
    email: str
    forge: Forge | None = None

    @property
    def in_place(self) -> bool:
        """A local job works in its owner's folder: nothing to unpack or to bundle."""
        return self.target == "local"


def policy(message: str) -> Refused:
    return Refused("runner-policy", message)


def _node(source: object, path: str) -> object:
    for key in path.split("."):
        source = source.get(key) if isinstance(source, dict) else None
    return source


def _value(source: object, path: str, kind: type[T]) -> T:
    value = _node(source, path)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise policy(f"job.json: {path} must be {kind.__name__}")
    return value


def _text(source: object, path: str, pattern: str = r"[^\x00-\x1f]+") -> str:
    value = _value(source, path, str)
    if not re.fullmatch(pattern, value):
        raise policy(f"job.json: {path} is not well formed")
    return value


def _number(source: object, path: str) -> int:
    value = _value(source, path, int)
    if value < 1:
        raise policy(f"job.json: {path} must be at least 1")
    return value


def _branch(source: object, target: str) -> str:
    if target == "issue":
        return _text(source, "branch", r"(?!-)[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
    if _node(source, "branch") is not None:
        raise policy("job.json: branch is for issues only")
    return REQUEST_BRANCH


def _request_sha(source: object, target: str) -> str | None:
    if _node(source, "requestRef") is None and _node(source, "requestSha") is None:
        return None
    if target != "pull_request" or _node(source, "requestRef") != REQUEST_REF:
        raise policy(f"job.json: requestRef is not {REQUEST_REF} of a pull_request")
    return _text(source, "requestSha", SHA.pattern)


def _tools(source: object) -> tuple[str, ...]:
    tools = _value(source, "excludeTools", list)
    for tool in tools:
        if not isinstance(tool, str) or not re.fullmatch(r"[A-Za-z0-9_.*-]+", tool):
            raise policy("job.json: excludeTools must hold tool names")
    return tuple(tools)


def _session(source: object) -> str | None:
    if _node(source, "session") is None:
        return None
    return _text(source, "session", "new|resumed")


def _flow(source: object, target: str) -> str | None:
    if target == "local" and _node(source, "flow") is None:
        return None
    return _text(source, "flow", r"(?!\.)[A-Za-z0-9._-]+")


def _forge(source: object) -> Forge | None:
    """Only with publish=agent; the host gives no forge when it publishes itself."""
    if _value(source, "publish", str) != "agent":
        return None
    url = _text(source, "forge.url", r"https?://[^\s@\"\\]+")
    environment = _value(source, "forge.environment", dict)
    for name in (USERNAME, PASSWORD, *environment):
        _text(environment, name)
    return Forge(url, environment)


def _load(path: Path) -> dict[str, object]:
    try:
        source = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise policy(f"{path.name}: {error}") from None
    if not isinstance(source, dict):
        raise policy(f"{path.name}: not a JSON object")
    return source


def read_job(path: Path) -> Job:
    """Decode job.json. Raises Refused for anything it does not understand."""
    source = _load(path)
    if _node(source, "version") != 1:
        raise policy("job.json: version must be 1")
    for key in JOB_KEYS:
        if key not in source:
            raise policy(f"job.json: no {key}")
    target = _text(source, "target.type", "issue|pull_request|local")
    return Job(
        job_id=_text(source, "jobId"),
        target=target,
        base="" if target == "local" else _text(source, "base", SHA.pattern),
        branch=_branch(source, target),
        request_sha=_request_sha(source, target),
        flow=_flow(source, target),
        provider=_text(source, "provider"),
        model=_text(source, "model"),
        gate=_text(source, "gate.url", r"http://[^/\s]+/?"),
        token=_text(source, "gate.token"),
        models=_value(source, "models", dict),
        max_turns=_number(source, "maxTurns"),
        deadline=_number(source, "deadline") - time.time() + time.monotonic(),
        exclude_tools=_tools(source),
        fork_join=_value(source, "forkJoin", bool),
        session=_session(source),
        name=_text(source, "git.name"),
        email=_text(source, "git.email"),
        forge=_forge(source),
    )


def _ids(models: object) -> set[object]:
    found = models if isinstance(models, list) else []
    return {_node(model, "id") for model in found}


def check_model(job: Job, catalogue: Path) -> None:
    """Refuse a model that neither the job's list nor the image's catalogue knows.

    pi would take it as a custom id and let the provider refuse it. Where there is no
    catalogue at all (outside an image), a provider without a list is believed.
    """
    providers = _value(job.models, "providers", dict)
    if job.provider not in providers:
        raise policy(f"job.json: models has no provider {job.provider}")
    known = _ids(_node(providers[job.provider], "models"))
    if catalogue.exists():
        known |= _ids(_node(_load(catalogue).get(job.provider), "models"))
    elif not known:
        return
    if job.model not in known:
        raise Refused("model-unknown", f"{job.provider} has no model {job.model}")


def _readable(path: Path) -> None:
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise policy(f"{path.name}: {error.strerror}") from None


def _writable(directory: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise policy(f"{directory} is not writable: {error.strerror}") from None


def _check_clone(places: Places) -> None:
    _readable(places.job / "base.pack")
    _readable(places.job / "shallow")
    if any(places.workspace.iterdir()):
        raise policy(f"{places.workspace} is not empty")


def _check_rules(rules: Path) -> None:
    _readable(rules)
    if RULES_SENTINEL not in rules.read_text("utf-8", "replace"):
        raise policy(f"{rules.name} has no line {RULES_SENTINEL}")


def check_files(job: Job, places: Places) -> None:
    """Every file the run will need is there, and every place it will write to."""
    _readable(places.job / "prompt.md")
    _load(places.job / "event.json")
    for directory in (places.home, places.workspace, places.outbox):
        _writable(directory)
    if not job.in_place:
        _check_clone(places)
    if job.flow and not (places.job / "skill" / job.flow / "SKILL.md").is_file():
        raise Refused("flow-not-found", f"skill/{job.flow} has no SKILL.md")
    if job.session == "resumed":
        _readable(places.job / "session.jsonl")
    _check_rules(places.hard_rules)


def read_inputs(places: Places) -> Job:
    """The job, with all that it names found in place. Raises Refused."""
    job = read_job(places.job / "job.json")
    check_files(job, places)
    check_model(job, places.rules / "models.json")
    if time.monotonic() >= job.deadline:
        raise Refused("timeout", "the deadline had passed before the start")
    return job


# ======================================================================================
# git
# ======================================================================================
# Git with an environment of its own: no system, user or repository configuration but
# what this file wrote, so that nothing an agent left behind can steer or stop it.


# The box does not outlive its machine; waiting for the disk would only cost time.
NO_FSYNC = {
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "core.fsync",
    "GIT_CONFIG_VALUE_0": "none",
}


class GitFailed(Exception):
    """A git command failed or ran out of time."""


@dataclasses.dataclass(frozen=True)
class Git:
    directory: Path
    work_tree: Path
    limit: Limit
    index: Path | None = None
    identity: tuple[str, str] = ("pidispatch", "pidispatch@localhost")

    def _environment(self) -> dict[str, str]:
        name, email = self.identity
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.directory),
            "LC_ALL": "C",
            "GIT_DIR": str(self.directory),
            "GIT_WORK_TREE": str(self.work_tree),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            **NO_FSYNC,
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_AUTHOR_NAME": name,
            "GIT_AUTHOR_EMAIL": email,
            "GIT_COMMITTER_NAME": name,
            "GIT_COMMITTER_EMAIL": email,
        }
        if self.index is not None:
            environment["GIT_INDEX_FILE"] = str(self.index)
        return environment

    def run(
        self,
        *arguments: str,
        data: bytes | None = None,
        source: BinaryIO | None = None,
        target: BinaryIO | None = None,
        accept: Iterable[int] = (0,),
    ) -> bytes:
        """Its stdout, unless `target` takes that. Raises GitFailed."""
        process = subprocess.Popen(
            ("git", *arguments),
            stdin=source or (subprocess.DEVNULL if data is None else subprocess.PIPE),
            stdout=target or subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment(),
            cwd=self.work_tree,
        )
        with process:
            output, errors = self._finish(process, data)
        if process.returncode not in accept:
            said = errors.decode("utf-8", "replace").strip()
            raise GitFailed(f"git {arguments[0]}: {process.returncode} {said}")
        return output or b""

    def _finish(
        self, process: subprocess.Popen[bytes], data: bytes | None
    ) -> tuple[bytes, bytes]:
        # In short waits, because TERM may draw the limit nearer meanwhile.
        while (left := self.limit.left()) > 0:
            try:
                return process.communicate(data, timeout=min(left, TICK))
            except subprocess.TimeoutExpired:
                data = None
        process.kill()
        raise GitFailed(f"{process.args!r}: out of time")

    def line(self, *arguments: str, data: bytes | None = None) -> str:
        return self.run(*arguments, data=data).decode("utf-8", "replace").strip()

    def names(self, *arguments: str) -> list[bytes]:
        """The NUL-separated names a command prints."""
        return [name for name in self.run(*arguments).split(b"\0") if name]

    def commit_id(self, name: str | None) -> str | None:
        """The commit a name stands for, or None where its object is not there."""
        if name is None:
            return None
        spec = f"{name}^{{commit}}"
        return (
            self.run("rev-parse", "--quiet", "--verify", spec, accept=(0, 1, 128))
            .decode()
            .strip()
            or None
        )

    def tree_id(self, commit: str) -> str:
        return self.line("rev-parse", "--verify", f"{commit}^{{tree}}")

    def is_ancestor(self, older: str, newer: str) -> bool:
        """Whether the commit id `older` is `newer` or reachable from it."""
        found = self.run("merge-base", older, newer, accept=(0, 1))
        return found.decode().strip() == older


# ======================================================================================
# workspace
# ======================================================================================
# No transport and no ownership check: the pack is indexed where it is to be used. The
# fresh index is kept aside, so that the end of the run knows which files are untouched
# without reading them.


def check_out(job: Job, places: Places, limit: Limit) -> None:
    """Make /workspace a clone at the base, on exactly one branch.

    Raises Refused when the pack does not hold what job.json names.
    """
    dot_git = places.workspace / ".git"
    git = Git(dot_git, places.workspace, limit)
    try:
        git.run("init", "--quiet", "--template=", f"--initial-branch={job.branch}")
        pack = _unpack(git, places.job)
        git.run("checkout", "--quiet", "-B", job.branch, job.base)
        if job.request_sha is not None:
            git.run("update-ref", REQUEST_REF, f"{job.request_sha}^{{commit}}")
        if job.forge is not None:
            git.run("remote", "add", "origin", job.forge.url)
    except GitFailed as error:
        raise policy(f"base.pack: {error}") from None
    (dot_git / "info").mkdir(exist_ok=True)
    places.keep.mkdir(parents=True, exist_ok=True)
    shutil.copy2(dot_git / "index", places.keep / "index")
    shutil.copy2(pack.with_suffix(".idx"), places.keep / "base.idx")


def _unpack(git: Git, job: Path) -> Path:
    with (job / "base.pack").open("rb") as source:
        said = git.run("index-pack", "--stdin", source=source)
    if shallow := (job / "shallow").read_bytes():
        (git.directory / "shallow").write_bytes(shallow)
    name = said.decode().split()[-1]
    return git.directory / "objects" / "pack" / f"pack-{name}.pack"


AGENT_GIT = """\
[user]
\tname = {name}
\temail = {email}
[init]
\tdefaultBranch = main
[safe]
\tdirectory = *
[advice]
\tdetachedHead = false
[gc]
\tauto = 0
[maintenance]
\tauto = false
"""

# Git asks this for the forge's credential, and for no other host's. It reads the
# environment, so that the token is in no file, URL or argument (printf is the shell's).
CREDENTIAL_GIT = """\
[credential {root}]
\thelper = {helper}
"""
CREDENTIAL_HELPER = (
    '!f() { test "$1" = get && printf "username=%s\\npassword=%s\\n"'
    f' "${USERNAME}" "${PASSWORD}"; }}; f'
)

PI_SETTINGS = {
    "quietStartup": True,
    "enableInstallTelemetry": False,
    "defaultProjectTrust": "never",
    "cacheWarming": "off",
}


def write_home(job: Job, places: Places) -> None:
    """Git's identity for the agent, and pi's directory with the gate as provider."""
    # Git's own quoting is JSON's, once control characters are out of the question.
    name, email = (
        json.dumps(text, ensure_ascii=False) for text in (job.name, job.email)
    )
    config = AGENT_GIT.format(name=name, email=email)
    if job.forge is not None:
        root, helper = json.dumps(job.forge.root), json.dumps(CREDENTIAL_HELPER)
        config += CREDENTIAL_GIT.format(root=root, helper=helper)
    (places.home / ".gitconfig").write_text(config, "utf-8")
    directory = agent_directory(places)
    directory.mkdir(parents=True, exist_ok=True)
    for file, content in (("models", job.models), ("settings", PI_SETTINGS)):
        path = directory / f"{file}.json"
        path.touch(0o600)
        path.write_text(json.dumps(content))
    if job.session == "resumed":
        shutil.copyfile(places.job / "session.jsonl", places.session)


def agent_directory(places: Places) -> Path:
    return places.home / ".pi" / "agent"


# ======================================================================================
# gate
# ======================================================================================


def _healthy(host: str, port: int) -> bool:
    # By hand: http.client would double the time until pi is started.
    request = f"GET /healthz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    try:
        with socket.create_connection((host, port), timeout=1) as connection:
            connection.sendall(request.encode())
            return connection.recv(64).split(b" ")[1:2] == [b"200"]
    except OSError:
        return False


def wait_for_gate(url: str, limit: Limit) -> None:
    """Return as soon as the gate answers. Raises Trouble when it does not in time."""
    parts = urllib.parse.urlsplit(url)
    while not _healthy(parts.hostname or "", parts.port or 80):
        if limit.stop.at is not None:
            raise Stopped
        if limit.left() <= 0:
            raise Trouble(f"the gate at {url} does not answer")
        time.sleep(0.05)


# ======================================================================================
# tally
# ======================================================================================
# pi's events, read for what the verdict and the record need. Shapes: pi's docs/json.md.


@dataclasses.dataclass
class Usage:
    """Tokens, and cost in USD. The total is the sum of the four counts."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    cost: float = 0.0

    def add(self, usage: object) -> None:
        self.input += _count(usage, "input")
        self.output += _count(usage, "output")
        self.cache_read += _count(usage, "cacheRead")
        self.cache_write += _count(usage, "cacheWrite")
        cost = _node(usage, "cost.total")
        self.cost += cost if isinstance(cost, int | float) else 0.0

    @property
    def total(self) -> int:
        return self.input + self.output + self.cache_read + self.cache_write

    def record(self) -> dict[str, object]:
        return {
            "input": self.input,
            "output": self.output,
            "cacheRead": self.cache_read,
            "cacheWrite": self.cache_write,
            "total": self.total,
            "cost": round(self.cost, 6),
        }


def _count(usage: object, key: str) -> int:
    value = _node(usage, key)
    return value if isinstance(value, int) and value > 0 else 0


def _words(node: object, path: str) -> str | None:
    value = _node(node, path)
    return value[:TEXT_MAX] if isinstance(value, str) else None


@dataclasses.dataclass
class Tally:
    """What the root session did. `usage` holds the forks' share, `forks` only that."""

    turns: int = 0
    usage: Usage = dataclasses.field(default_factory=Usage)
    forks: Usage = dataclasses.field(default_factory=Usage)
    fork_count: int = 0
    stop_reason: str | None = None
    error: str = ""
    retrying: bool = False
    settled_at: float | None = None  # monotonic

    def note(self, event: object) -> dict[str, object] | None:
        """Count one event of pi; return the line it is worth on stdout, if any."""
        kind = _words(event, "type")
        if kind == "auto_retry_start":
            self.retrying = True
        reader = READERS.get(kind or "")
        line = reader(self, event) if reader else None
        return None if line is None else {"event": kind, **line}


def _turn_start(tally: Tally, _: object) -> dict[str, object]:
    # pi tries a failed call again in a new turn, which did no work yet.
    tally.turns += 0 if tally.retrying else 1
    tally.retrying = False
    return {"turn": tally.turns}


def _message_end(tally: Tally, event: object) -> dict[str, object] | None:
    message = _node(event, "message")
    if _node(message, "role") != "assistant":
        return None
    own = Usage()
    own.add(_node(message, "usage"))
    tally.usage.add(_node(message, "usage"))
    tally.stop_reason = _words(message, "stopReason")
    tally.error = _words(message, "errorMessage") or ""
    error = {"error": tally.error} if tally.error else {}
    return {"stopReason": tally.stop_reason, "usage": own.record(), **error}


def _tool_start(_: Tally, event: object) -> dict[str, object]:
    return {"name": _words(event, "toolName")}


def _tool_end(tally: Tally, event: object) -> dict[str, object]:
    # A tool that spent tokens says so in its result; fork_join is the one that does.
    usage = _node(event, "result.usage")
    tally.usage.add(usage)
    tally.forks.add(usage)
    if _node(event, "toolName") == "fork_join":
        forks = _node(event, "result.details.forks")
        tally.fork_count += len(forks) if isinstance(forks, list) else 0
    name, failed = _words(event, "toolName"), _node(event, "isError") is True
    return {"name": name, "isError": failed}


def _settled(tally: Tally, event: object) -> dict[str, object]:
    tally.settled_at = time.monotonic()
    return {"aborted": _node(event, "aborted") is True}


READERS: dict[str, Callable[[Tally, object], dict[str, object] | None]] = {
    "turn_start": _turn_start,
    "message_end": _message_end,
    "tool_execution_start": _tool_start,
    "tool_execution_end": _tool_end,
    "agent_settled": _settled,
}

KIND = re.compile(rb'\{\s*"type"\s*:\s*"(\w+)"')
WORTH_PARSING = {kind.encode() for kind in (*READERS, "auto_retry_start")}


class Lines:
    """Complete lines out of a byte stream, split on LF only; monsters are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        *complete, rest = (self._rest + data).split(b"\n")
        for line in complete:
            if not self._skipping:
                yield line
            self._skipping = False
        if len(rest) > STREAM_LINE_MAX:
            self._skipping, rest = True, b""
        self._rest = rest


def parse_event(line: bytes) -> object:
    """The event, or None for one that nobody reads and for what is not JSON."""
    kind = KIND.match(line)
    if kind is None or kind[1] not in WORTH_PARSING:
        return None
    try:
        return json.loads(line)
    except ValueError:
        return None


class Out:
    """The runner's own stdout: JSON lines without secrets, bounded in all."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = OUT_MAX
        self.secrets: tuple[str, ...] = ()

    def clean(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text

    def event(self, line: Mapping[str, object]) -> None:
        data = self._encode(line)
        self._left -= len(data)
        if self._left >= 0:
            self._write(data)

    def last(self, line: Mapping[str, object]) -> None:
        self._write(self._encode(line))

    def _encode(self, line: Mapping[str, object]) -> bytes:
        return self.clean(json.dumps(line, separators=(",", ":"))).encode() + b"\n"

    def _write(self, data: bytes) -> None:
        # A reader that went away is no reason to lose the agent's work.
        with contextlib.suppress(OSError, ValueError):
            self._file.write(data)
            self._file.flush()


# ======================================================================================
# agent
# ======================================================================================
# pi and everything it starts. The runner makes itself the reaper of orphans, so that
# no process of the agent still writes while the result is gathered.

PR_SET_CHILD_SUBREAPER = 36


class Ending(enum.Enum):
    """Why pi is no longer running."""

    ITSELF = enum.auto()
    TERM = enum.auto()
    TURNS = enum.auto()
    DEADLINE = enum.auto()


def pi_command(job: Job, places: Places) -> list[str]:
    command = [*places.pi, "-p", "--mode", "json", "--no-approve", "--no-extensions"]
    if job.fork_join and places.fork_join.is_file():
        command += ["-e", str(places.fork_join)]
    command += ["--no-skills"]
    if job.flow:
        command += ["--skill", str(places.job / "skill" / job.flow)]
    command += ["--append-system-prompt", str(places.hard_rules)]
    command += ["--session", str(places.session)] if job.session else ["--no-session"]
    command += ["--model", f"{job.provider}/{job.model}"]
    if job.exclude_tools:
        command += ["--exclude-tools", ",".join(job.exclude_tools)]
    return command


def pi_environment(job: Job, places: Places) -> dict[str, str]:
    """The box's own closed environment and what pi needs on top."""
    return {
        **os.environ,
        "HOME": str(places.home),
        "PI_CODING_AGENT_DIR": str(agent_directory(places)),
        "PI_JOB_ID": job.job_id,
        "PI_OFFLINE": "1",
        "PI_SKIP_VERSION_CHECK": "1",
        "PI_TELEMETRY": "0",
        **({"GIT_TERMINAL_PROMPT": "0", **job.forge.environment} if job.forge else {}),
    }


def adopt_orphans() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        complain("cannot adopt orphans of the agent")


def children() -> set[int]:
    """Process ids whose parent is this process."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = entry.read_text("utf-8", "replace").rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.add(int(entry.parent.name))
    return found


class Agent:
    """The pi process. `stderr` is the end of what it wrote there."""

    def __init__(self, job: Job, places: Places) -> None:
        self._spared = children()
        self.stderr = b""
        with (places.job / "prompt.md").open("rb") as prompt:
            try:
                self._process = subprocess.Popen(
                    pi_command(job, places),
                    stdin=prompt,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd=places.workspace,
                    env=pi_environment(job, places),
                    start_new_session=True,
                )
            except OSError as error:
                raise Trouble(f"pi cannot be started: {error}") from None
        self._lines = Lines()
        self._open = selectors.DefaultSelector()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._open.register(pipe, selectors.EVENT_READ)

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def watch(self, wake: int) -> None:
        self._open.register(wake, selectors.EVENT_READ, "wake")

    def read(self, timeout: float) -> list[bytes] | None:
        """Lines of stdout that came within `timeout` seconds; None at the end."""
        if all(key.data == "wake" for key in self._open.get_map().values()):
            return None
        ready = self._open.select(timeout)
        if not ready and self.returncode is not None:
            return None  # a survivor may hold the pipe open for ever
        lines: list[bytes] = []
        for key, _ in ready:
            if key.data == "wake":
                self._open.unregister(key.fd)
            else:
                lines += self._take(key.fileobj, key.fd)
        return lines

    def _take(self, pipe: object, fd: int) -> Iterable[bytes]:
        data = os.read(fd, 1 << 16)
        if not data:
            self._open.unregister(fd)
        elif pipe is self._process.stdout:
            return self._lines.feed(data)
        else:
            self.stderr = (self.stderr + data)[-STDERR_KEPT:]
        return ()

    def bury_orphans(self) -> None:
        """Reap the ended orphans; as zombies they would eat the process limit."""
        for pid in children() - self._spared - {self._process.pid}:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def stop(self) -> Iterator[bytes]:
        """Send TERM, and give pi its grace to end its tools; what it still says.

        It is read meanwhile: a pi that waits for a full pipe would never end.
        """
        self._process.terminate()
        until = time.monotonic() + PI_GRACE
        while time.monotonic() < until and (lines := self.read(0.05)) is not None:
            yield from lines

    def silence(self) -> None:
        """Kill pi's group and every orphan, until nothing of the agent runs."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for _ in range(100):
            orphans = children() - self._spared
            if not orphans:
                break
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def close(self) -> None:
        self._open.close()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def reason_to_stop(job: Job, tally: Tally, stop: Stop) -> Ending | None:
    if stop.at is not None:
        return Ending.TERM
    if tally.turns > job.max_turns:
        return Ending.TURNS
    if tally.settled_at and time.monotonic() - tally.settled_at > SETTLED_GRACE:
        return Ending.ITSELF  # done, but something holds it: not the turn's business
    if time.monotonic() >= job.deadline:
        return Ending.DEADLINE
    return None


def follow(agent: Agent, job: Job, tally: Tally, out: Out, stop: Stop) -> Ending:
    """Forward and count events until pi ends or has to be stopped."""
    agent.watch(stop.wake)
    buried = time.monotonic()
    while (lines := agent.read(TICK)) is not None:
        for line in lines:
            forward(line, tally, out)
            if tally.turns > job.max_turns:
                break
        if ending := reason_to_stop(job, tally, stop):
            return ending
        if time.monotonic() - buried > 1:
            agent.bury_orphans()
            buried = time.monotonic()
    return Ending.ITSELF


def forward(line: bytes, tally: Tally, out: Out) -> None:
    if (event := tally.note(parse_event(line))) is not None:
        out.event(event)


# ======================================================================================
# classify
# ======================================================================================
# pi's JSON mode exits 0 whatever the provider said, so the last assistant message
# decides. What another attempt would meet again is policy (2); the rest is infra (1).
#
#     TERM                            143
#     one turn too many               2 turn-budget
#     the deadline                    2 timeout
#     stop                            0
#     length                          2 runner-policy (it would be cut off again)
#     error                           by ERRORS, then STATUSES, else 1 infra
#     aborted, toolUse, no message    1 infra (pi was killed or crashed at work)
#     pi knew no such model           2 model-unknown
#     a faulty input                  2 as named there, before pi is started
#     gate or pi cannot be reached    1 infra

STATUS = re.compile(r'^(?:\D{0,60}\()?(\d{3})\b|"code": ?"?(\d{3})\b')

# The first row whose pattern occurs in the error message wins.
ERRORS: tuple[tuple[str, str], ...] = (
    (r"pidispatch_budget", "token-budget"),
    (r"pidispatch_model|model_not_found", "model-unknown"),
    (
        r"model\b.{0,120}(not found|not exist)|not_found_error.{0,40}model",
        "model-unknown",
    ),
    (r"pidispatch_", "runner-policy"),
    (r"invalid_api_key|API_KEY_INVALID|authentication_error", "provider-auth-refused"),
    (r"permission_error|PERMISSION_DENIED|UNAUTHENTICATED", "provider-auth-refused"),
    (r"insufficient_quota|credit balance|billing", "provider-auth-refused"),
    (r"finish_reason: content_filter|refus", "runner-policy"),
)

# Where no row matches, the HTTP status decides; one that is not here is worth a retry.
STATUSES: dict[int, str] = {
    **dict.fromkeys((401, 402, 403), "provider-auth-refused"),
    404: "model-unknown",
    **dict.fromkeys((400, 405, 406, 410, 411, 413, 414, 415, 422), "runner-policy"),
}


def judge_error(message: str) -> Verdict:
    """An assistant message that ended in an error, by what the provider said."""
    for pattern, reason in ERRORS:
        if re.search(pattern, message, re.IGNORECASE | re.DOTALL):
            return Verdict(POLICY, reason, message)
    found = STATUS.search(message)
    determinate = STATUSES.get(int(found[1] or found[2])) if found else None
    if determinate is None:
        return Verdict(INFRA, "infra", message)
    return Verdict(POLICY, determinate, message)


def judge_exit(returncode: int, stderr: str) -> Verdict:
    """pi ended without a last word: it crashed, was killed or never began."""
    if re.search(r"Model .{1,200} not found\. Use", stderr):
        return Verdict(POLICY, "model-unknown", stderr)
    return Verdict(INFRA, "infra", f"pi ended with {returncode}: {stderr}".strip())


def judge(tally: Tally, returncode: int, stderr: str) -> Verdict:
    """A run that pi ended by itself."""
    if tally.stop_reason == "stop":
        return Verdict(0, None)
    if tally.stop_reason == "length":
        return Verdict(POLICY, "runner-policy", "the last reply hit the output limit")
    if tally.stop_reason == "error":
        return judge_error(tally.error)
    return judge_exit(returncode, stderr)


STOPPED: dict[Ending, Verdict] = {
    Ending.TERM: Verdict(TERMINATED, None, "stopped by TERM"),
    Ending.TURNS: Verdict(POLICY, "turn-budget", "the turns are used up"),
    Ending.DEADLINE: Verdict(POLICY, "timeout", "the deadline has passed"),
}


def drive(job: Job, places: Places, tally: Tally, out: Out, stop: Stop) -> Verdict:
    """Run pi to its end, whoever brings it about. Raises Trouble if it cannot start."""
    adopt_orphans()
    agent = Agent(job, places)
    try:
        ending = follow(agent, job, tally, out, stop)
        if ending is not Ending.ITSELF:
            for line in agent.stop():
                forward(line, tally, out)
        agent.silence()
        if ending is Ending.TURNS:
            tally.turns = job.max_turns  # the one too many was never worked
        if ending in STOPPED:
            return STOPPED[ending]
        stderr = agent.stderr.decode("utf-8", "replace").strip()
        return judge(tally, agent.returncode or 0, stderr[-TEXT_MAX:])
    finally:
        agent.silence()
        agent.close()


# ======================================================================================
# result
# ======================================================================================
# Git never runs inside the agent's .git: its configuration, hooks, index and refs may
# be anything. The result is built in a repository of the runner's own, which borrows
# the agent's objects and reads two of its refs as plain text.

CLEAN_CONFIG = """\
[core]
\trepositoryFormatVersion = 0
\tbare = false
\tcommitGraph = false
\tmultiPackIndex = false
\thooksPath = /dev/null
\tattributesFile = /dev/null
\texcludesFile = /dev/null
[gc]
\tauto = 0
"""


def _small(path: Path) -> str:
    """A regular file's text, or nothing: the agent may have put anything there."""
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size <= SMALL_FILE:
            return path.read_text("utf-8", "replace")
    return ""


@dataclasses.dataclass(frozen=True)
class AgentGit:
    """The agent's repository as files: its directory, and the one worktrees share."""

    directory: Path
    common: Path

    @classmethod
    def of(cls, workspace: Path) -> AgentGit:
        directory = workspace / ".git"
        pointer = _small(directory)  # a file, as in worktrees and submodules
        if pointer.startswith("gitdir:"):
            directory = workspace / pointer[7:].strip()
        common = directory / (_small(directory / "commondir").strip() or ".")
        return cls(directory, common)

    def objects(self) -> Path | None:
        with contextlib.suppress(OSError):
            if (self.common / "objects").is_dir():
                return self.common / "objects"
        return None

    def ref(self, name: str, depth: int = 5) -> str | None:
        """The object id a ref holds, without asking git."""
        for directory in (self.directory, self.common):
            text = _small(directory / name).strip()
            if text.startswith("ref:") and depth:
                return self.ref(text[4:].strip(), depth - 1)
            if SHA.fullmatch(text):
                return text
        return self._packed().get(name)

    def _packed(self) -> dict[str, str]:
        rows = (
            row.split(" ") for row in _small(self.common / "packed-refs").split("\n")
        )
        return {
            row[1]: row[0] for row in rows if len(row) == 2 and SHA.fullmatch(row[0])
        }


def open_result(job: Job, places: Places, scratch: Path, limit: Limit) -> Git:
    """A fresh repository that sees the base and whatever objects the agent made."""
    directory = scratch / "repository"
    theirs = AgentGit.of(places.workspace)
    for part in ("objects/pack", "objects/info", "refs", "info"):
        (directory / part).mkdir(parents=True)
    (directory / "HEAD").write_text("ref: refs/heads/none\n")
    (directory / "config").write_text(CLEAN_CONFIG)
    (directory / "shallow").write_bytes((places.job / "shallow").read_bytes())
    (directory / "info" / "exclude").write_text(
        _small(theirs.common / "info" / "exclude")
    )
    if (objects := theirs.objects()) is not None:
        (directory / "objects" / "info" / "alternates").write_text(f"{objects}\n")
    identity = (job.name, job.email)
    git = Git(directory, places.workspace, limit, scratch / "index", identity)
    _lend_base(git, job, places)
    return git


def _lend_base(git: Git, job: Job, places: Places) -> None:
    """The base comes from /job's pack, never from what the agent may have broken."""
    pack = git.directory / "objects" / "pack" / "pack-base.pack"
    pack.symlink_to(places.job.resolve() / "base.pack")
    with contextlib.suppress(OSError):
        shutil.copy(places.keep / "base.idx", pack.with_suffix(".idx"))
    if git.commit_id(job.base) is None:
        pack.with_suffix(".idx").unlink(missing_ok=True)
        git.run("index-pack", str(pack))


@dataclasses.dataclass
class Leftovers:
    """A work tree as git would store it, and what was left out of it and why."""

    tree: str
    omitted: list[str]


def _load_index(git: Git, places: Places, commit: str) -> None:
    """The commit's index, with the stat data of files untouched since the check-out."""
    assert git.index is not None
    try:
        shutil.copy2(places.keep / "index", git.index)
        git.run("read-tree", "-m", commit)
    except (OSError, GitFailed):
        git.index.unlink(missing_ok=True)
        git.run("read-tree", commit)


def _changes(git: Git) -> tuple[list[bytes], list[bytes]]:
    """Tracked paths that differ from the index: changed ones and removed ones."""
    fields = git.names("diff-files", "-z", "--name-status", "--ignore-submodules=all")
    pairs = list(zip(fields[::2], fields[1::2], strict=False))
    removed = [path for status, path in pairs if status == b"D"]
    return [path for status, path in pairs if status != b"D"], removed


def _sparse(git: Git, workspace: Path) -> set[bytes]:
    """Paths the agent's own index marks as absent on purpose (a sparse check-out)."""
    index = AgentGit.of(workspace).directory / "index"
    if not _small(AgentGit.of(workspace).directory / "info" / "sparse-checkout"):
        return set()
    try:
        rows = dataclasses.replace(git, index=index).names("ls-files", "-z", "-t")
    except GitFailed:
        return set()
    return {row[2:] for row in rows if row.startswith(b"S ")}


def _untracked(git: Git, omitted: list[str], prefix: bytes = b"") -> list[bytes]:
    """Paths git does not know yet. A nested repository counts as plain files, unless
    it is a clone of something: then it is nobody's work of this run."""
    paths = []
    for path in git.names("ls-files", "-z", "--others", "--exclude-standard"):
        if not path.endswith(b"/"):
            paths.append(prefix + path)
            continue
        inner = git.work_tree / os.fsdecode(path)
        if "[remote " in _small(AgentGit.of(inner).common / "config"):
            omitted.append(f"{os.fsdecode(prefix + path)} (a clone)")
            continue
        nothing = git.directory / "no-index"
        nested = dataclasses.replace(git, work_tree=inner, index=nothing)
        try:
            paths += _untracked(nested, omitted, prefix + path)
        except (GitFailed, OSError):
            omitted.append(f"{os.fsdecode(prefix + path)} (unreadable)")
    return paths


def _size(file: Path) -> int | None:
    """Bytes git would have to store, None for what it could not read."""
    with contextlib.suppress(OSError):
        if file.is_symlink() or os.access(file, os.R_OK):
            return file.lstat().st_size
    return None


def _keepable(git: Git, paths: list[bytes], omitted: list[str]) -> Iterator[bytes]:
    """Those that are small enough and readable, the smallest first."""
    sized = [(_size(git.work_tree / os.fsdecode(path)), path) for path in paths]
    total = 0
    for size, path in sorted(sized, key=lambda pair: pair[0] or 0):
        total += size or 0
        if size is None:
            omitted.append(f"{os.fsdecode(path)} (unreadable)")
        elif size > LEFTOVER_FILE_MAX or total > LEFTOVER_TOTAL_MAX:
            omitted.append(f"{os.fsdecode(path)} ({size >> 20} MiB)")
        else:
            yield path


def _update_index(git: Git, paths: Iterable[bytes], *mode: str) -> None:
    # Every file counts as big, for those go into one pack: ten thousand new files are
    # three times as fast as with an object file each.
    command = ("-c", "core.bigFileThreshold=1", "update-index", *mode, "-z", "--stdin")
    if data := b"".join(path + b"\0" for path in paths):
        git.run(*command, data=data)


def stage(git: Git, places: Places, commit: str) -> Leftovers:
    """The work tree as a tree object, seen from `commit`."""
    _load_index(git, places, commit)
    omitted: list[str] = []
    changed, removed = _changes(git)
    absent = _sparse(git, places.workspace) if removed else set()
    _update_index(git, (p for p in removed if p not in absent), "--force-remove")
    add = [*changed, *_untracked(git, omitted)]
    _update_index(git, _keepable(git, add, omitted), "--add", "--remove", "--replace")
    return Leftovers(git.line("write-tree"), omitted)


def commit_tree(git: Git, tree: str, parent: str, message: str) -> str:
    return git.line("commit-tree", tree, "-p", parent, "-F", "-", data=message.encode())


def leftover_message(job: Job, omitted: list[str]) -> str:
    lines = [
        "Keep work that was not committed",
        "",
        f"The run {job.job_id} ended with these changes uncommitted; they are",
        "stored here as they were found, apart from the agent's own commits.",
    ]
    if omitted:
        lines += ["", "Left out:", *(f"- {name}" for name in omitted[:20])]
        lines += ["- …"] if len(omitted) > 20 else []
    return "\n".join(lines) + "\n"


def choose_tip(git: Git, job: Job, branch: str | None, head: str | None) -> str:
    """The branch the prompt named; HEAD where that is further, or all there is.

    What came with the job, or lies before it, is nobody's work.
    """
    given = [commit for commit in (job.base, job.request_sha) if commit is not None]
    tips = [
        tip
        for tip in (branch, head)
        if tip is not None and not any(git.is_ancestor(tip, old) for old in given)
    ]
    if not tips:
        return job.base
    return tips[-1] if git.is_ancestor(tips[0], tips[-1]) else tips[0]


def _add_leftovers(git: Git, job: Job, places: Places, tip: str, head: str) -> str:
    """`tip`, with what the work tree holds beyond `head` as one commit on top."""
    left = stage(git, places, head)
    if left.tree in (git.tree_id(head), git.line("mktree", data=b"")):
        return tip  # an emptied work tree is a broken one, not somebody's work
    message = leftover_message(job, left.omitted)
    work = commit_tree(git, left.tree, head, message)
    if head == tip:
        return work
    # HEAD was elsewhere: carry the changes over; conflicts stay marked in the files.
    merged = git.run(
        *("merge-tree", "--write-tree", "--allow-unrelated-histories", tip, work),
        accept=(0, 1),
    )
    return commit_tree(git, merged.decode().split()[0], tip, message)


def replant(git: Git, job: Job, tip: str) -> str:
    """A result that lost the base, as one commit on the base with the same tree."""
    tree = git.tree_id(tip)
    if tree == git.tree_id(job.base):
        return job.base
    said = git.line("log", "-1", "--format=%B", tip) or "Work of the run"
    note = "The history did not descend from the base, so it is one commit here."
    return commit_tree(git, tree, job.base, f"{said}\n\n{note}\n")


def history_and_leftovers(git: Git, job: Job, places: Places) -> str:
    theirs = AgentGit.of(places.workspace)
    head = git.commit_id(theirs.ref("HEAD"))
    branch = git.commit_id(theirs.ref(f"refs/heads/{job.branch}"))
    tip = choose_tip(git, job, branch, head)
    return _add_leftovers(git, job, places, tip, head or tip)


def work_tree_only(git: Git, job: Job, places: Places) -> str:
    # Without the agent's objects: a broken one would pass for the file it should hold.
    (git.directory / "objects" / "info" / "alternates").unlink(missing_ok=True)
    return _add_leftovers(git, job, places, job.base, job.base)


def history_only(git: Git, job: Job, places: Places) -> str:
    theirs = AgentGit.of(places.workspace)
    branch = git.commit_id(theirs.ref(f"refs/heads/{job.branch}"))
    return choose_tip(git, job, branch, git.commit_id(theirs.ref("HEAD")))


# Each with the share of the remaining time it may use. Later ones save less.
ATTEMPTS: tuple[tuple[Callable[[Git, Job, Places], str], float], ...] = (
    (history_and_leftovers, 0.6),
    (work_tree_only, 0.5),
    (history_only, 1.0),
)


def write_bundle(git: Git, job: Job, result: str, target: Path) -> int:
    """A v2 bundle with one ref and the base as its one prerequisite; its commits.

    git's own `bundle create` would list further prerequisites after a merge.
    """
    header = f"# v2 git bundle\n-{job.base} base\n{result} {RESULT_REF}\n\n"
    revisions = f"{result}\n^{job.base}\n"
    bundle = git.directory / "bundle"
    command = ("pack-objects", "--revs", "--thin", "--delta-base-offset", "--stdout")
    with bundle.open("wb") as file:
        file.write(header.encode())
        file.flush()
        git.run(*command, "--quiet", data=revisions.encode(), target=file)
    bundle.replace(target)
    known = [f"^{commit}" for commit in (job.base, job.request_sha) if commit]
    return int(git.line("rev-list", "--count", result, *known))


def attempt_bundle(
    way: Callable[[Git, Job, Places], str], git: Git, job: Job, places: Places
) -> int:
    result = way(git, job, places)
    if not git.is_ancestor(job.base, result):
        result = replant(git, job, result)
    if result == job.base:
        return 0
    return write_bundle(git, job, result, places.outbox / "branch.bundle")


def collect(job: Job, places: Places, limit: Limit) -> int:
    """Write the bundle, if there is anything to write; return its commits.

    Raises Trouble when the work could not be saved in any way.
    """
    with contextlib.suppress(OSError):
        places.outbox.chmod(0o755)
    _clear(places.outbox / "branch.bundle")
    last: Exception | None = None
    for way, share in ATTEMPTS:
        try:
            with tempfile.TemporaryDirectory(
                dir=places.outbox, prefix=".result-", ignore_cleanup_errors=True
            ) as name:
                git = open_result(job, places, Path(name), limit.share(share))
                return attempt_bundle(way, git, job, places)
        except Exception as error:  # the next way may still save the work
            complain(f"{way.__name__}: {type(error).__name__}: {error}")
            last = error
    raise Trouble(f"the work could not be bundled: {last}")


def _clear(path: Path) -> None:
    """A name in the outbox belongs to the runner, whatever the agent put there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def hand_out_session(job: Job, places: Places) -> None:
    """Put pi's session beside the bundle, if the run had one that can be read."""
    target = places.outbox / "session.jsonl"
    if job.session is None:
        return
    _clear(target)
    with contextlib.suppress(OSError):
        found = os.open(places.session, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(found, "rb") as source:
            content = source.read(SESSION_MAX + 1)
        if len(content) <= SESSION_MAX:
            target.write_bytes(content)


# ======================================================================================
# run
# ======================================================================================


def prepare(job: Job, places: Places, stop: Stop) -> None:
    limit = Limit(job.deadline, stop)
    if not job.in_place:
        check_out(job, places, limit)
    write_home(job, places)
    gate_until = min(job.deadline, time.monotonic() + GATE_WAIT)
    wait_for_gate(job.gate, Limit(gate_until, stop))
    if stop.at is not None:
        raise Stopped


def work(job: Job, places: Places, tally: Tally, out: Out, stop: Stop) -> Exit:
    """Prepare, drive, collect. The work is collected however the drive ended."""
    prepare(job, places, stop)
    try:
        verdict = drive(job, places, tally, out, stop)
    except Trouble:
        raise
    except Exception as error:
        verdict = unforeseen(error)
    commits = 0
    if not job.in_place:
        limit = Limit(time.monotonic() + COLLECT_BUDGET, stop)
        try:
            commits = collect(job, places, limit)
        except Trouble as error:
            verdict = lost(verdict, error)
    if verdict.code == 0:
        hand_out_session(job, places)
    return Exit(verdict, commits)


def unforeseen(error: Exception) -> Verdict:
    traceback.print_exception(error)
    return Verdict(INFRA, "infra", f"{type(error).__name__}: {error}")


def lost(verdict: Verdict, error: Trouble) -> Verdict:
    """Success without its result is none; any other verdict stands."""
    complain(str(error))
    return Verdict(INFRA, "infra", str(error)) if verdict.code == 0 else verdict


@dataclasses.dataclass(frozen=True)
class Exit:
    verdict: Verdict
    commits: int = 0

    def line(self, tally: Tally) -> dict[str, object]:
        forks = {
            "count": tally.fork_count,
            "tokens": tally.forks.total,
            "cost": round(tally.forks.cost, 6),
        }
        return {
            "event": "exit",
            "code": self.verdict.code,
            "reason": self.verdict.reason,
            "message": (self.verdict.message or "")[:TEXT_MAX] or None,
            "turns": tally.turns,
            "usage": tally.usage.record(),
            "forks": forks,
            "commits": self.commits,
        }


def attempt(places: Places, tally: Tally, out: Out, stop: Stop) -> Exit:
    try:
        job = read_inputs(places)
        out.secrets = (job.token,)
        if job.forge is not None:
            out.secrets += (job.forge.environment[PASSWORD],)
        return work(job, places, tally, out, stop)
    except Refused as error:
        return Exit(Verdict(POLICY, error.reason, str(error)))
    except (Trouble, GitFailed) as error:
        return Exit(Verdict(INFRA, "infra", str(error)))
    except Stopped:
        return Exit(STOPPED[Ending.TERM])


def run(places: Places, out: Out, stop: Stop) -> int:
    """One job from its inputs to its exit line. Never raises; returns the exit code."""
    tally = Tally()
    try:
        ended = attempt(places, tally, out, stop)
    except Exception as error:
        ended = Exit(unforeseen(error))
    if stop.at is not None:
        ended = Exit(STOPPED[Ending.TERM], ended.commits)
    out.last(ended.line(tally))
    return ended.verdict.code


def parse_arguments(arguments: list[str] | None = None) -> Places:
    parser = argparse.ArgumentParser(description="Drive pi through one job.")
    home = os.environ.get("HOME", "/home/pi")
    for name, default in (
        ("--job", "/job"),
        ("--workspace", "/workspace"),
        ("--outbox", "/outbox"),
        ("--rules", "/opt/pi-dispatch"),
        ("--home", home),
    ):
        parser.add_argument(name, type=Path, default=Path(default), metavar="DIR")
    parser.add_argument("--pi", type=shlex.split, default="pi", metavar="COMMAND")
    given = parser.parse_args(arguments)
    return Places(
        job=given.job.absolute(),
        workspace=given.workspace.absolute(),
        outbox=given.outbox.absolute(),
        rules=given.rules.absolute(),
        home=given.home.absolute(),
        pi=tuple(given.pi),
    )


def main() -> int:
    places = parse_arguments()
    stop = Stop()
    stop.install()
    return run(places, Out(sys.stdout.buffer), stop)


if __name__ == "__main__":
    sys.exit(main())
