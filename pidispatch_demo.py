"""Stand-ins for a forge, a model and an agent, so that pidispatch runs with no account.

FakeGitHub answers the part of GitHub's REST API that pidispatch uses and serves real
git repositories over smart HTTP; FakeModel speaks two model APIs from scripts; the
scripted agent takes pi's place where there is no container engine. The demo and the
tests use the same ones. Standard library only (and git), so that each also runs alone
in a plain container: ``python3 pidispatch_demo.py forge|model --host H --port P``.

Sections: http · git · forge state · forge shapes · deliveries · forge API · forge ·
azure · model scripts · model styles · model · agent · commands · demo.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import contextlib
import fnmatch
import functools
import gzip
import hashlib
import hmac
import itertools
import json
import math
import os
import re
import secrets
import select
import shlex
import shutil
import signal
import socket
import socketserver
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http.client import responses
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    BinaryIO,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    cast,
)

if TYPE_CHECKING:
    import pidispatch

# ---------------------------------------------------------------------------
# http
#
# One small HTTP/1.1 server for both fakes: it reads a whole request (length or
# chunked, gzip undone), asks one function for the reply and writes that. It knows
# nothing of forges or models, and injects the faults that a test ordered.
# ---------------------------------------------------------------------------

Json = dict[str, Any]
#: This very file; inside a one-file binary the module itself is compiled.
_OWN_FILE = Path(__file__).resolve().with_suffix(".py")
_CONTROL = "/control/"


@dataclass(frozen=True)
class Request:
    """One request, its body already undone of transfer and content encodings."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    connection: socket.socket

    @property
    def query_string(self) -> str:
        """The query as it goes into a CGI variable."""
        return urllib.parse.urlencode(self.query)

    def json(self) -> Json:
        """The body as an object; an empty body is an empty one.

        Raises ValueError for anything that is not a JSON object."""
        value = json.loads(self.body or b"{}")
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return value

    def client_left(self) -> bool:
        """Whether the other side has closed its connection."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        with contextlib.suppress(OSError):
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        return True


@dataclass
class Reply:
    """An answer: a body, or a stream that is sent chunk by chunk.

    Status 0 closes the connection without a word. ``done`` is called once the last
    byte is out or the client has gone."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    stream: Generator[bytes, None, None] | None = None
    done: Callable[[], None] = lambda: None


def json_reply(status: int, value: object, **headers: str) -> Reply:
    """A JSON answer; header names are written with underscores."""
    fields = {name.replace("_", "-"): text for name, text in headers.items()}
    fields.setdefault("Content-Type", "application/json; charset=utf-8")
    return Reply(status, json.dumps(value).encode(), fields)


class _Connection(BaseHTTPRequestHandler):
    """Speaks HTTP on one connection for a `_Server`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 65536
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.open_sockets.add(self.connection)

    def finish(self) -> None:
        self.server.open_sockets.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def handle_expect_100(self) -> bool:
        going_on = super().handle_expect_100()
        self.wfile.flush()
        return going_on

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the fakes keep their own log."""

    def answer(self) -> None:
        request = self._request()
        reply = self.server.respond(request)
        try:
            self._send(reply)
        finally:
            if reply.stream is not None:
                reply.stream.close()
            reply.done()

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = answer
    do_OPTIONS = answer

    def _request(self) -> Request:
        # A client that uses us as a proxy sends the whole URL (`gh` does so here).
        url = urllib.parse.urlsplit(self.path)
        return Request(
            method=self.command,
            path=url.path or "/",
            query=dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True)),
            headers={name.lower(): text for name, text in self.headers.items()},
            body=self._body(),
            connection=self.connection,
        )

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            body = b"".join(self._chunks())
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        gzipped = "gzip" in self.headers.get("Content-Encoding", "")
        return gzip.decompress(body) if gzipped else body

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass

    def _send(self, reply: Reply) -> None:
        if not reply.status:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response_only(reply.status)
        self.send_header("Date", self.date_time_string(self.server.clock()))
        for name, text in reply.headers.items():
            self.send_header(name, text)
        if reply.stream is not None:
            self._send_stream(reply.stream)
            return
        if reply.status not in (204, 304):
            self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD" and reply.status not in (204, 304):
            self.wfile.write(reply.body)
        self.wfile.flush()

    def _send_stream(self, stream: Iterable[bytes]) -> None:
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        for chunk in stream:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        respond: Callable[[Request], Reply],
        clock: Callable[[], float],
        tls: ssl.SSLContext | None,
    ) -> None:
        self.respond = respond
        self.clock = clock
        self.open_sockets: set[socket.socket] = set()
        super().__init__(address, _Connection)
        if tls:  # shaken hands with in the connection's own thread
            self.socket = tls.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )

    def server_bind(self) -> None:
        # HTTPServer's own asks the name service for the host's name: seconds, offline.
        socketserver.TCPServer.server_bind(self)

    def hang_up(self) -> None:
        """Close what keep-alive holds open: a stopped server answers nothing."""
        for connection in list(self.open_sockets):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@dataclass
class Fault:
    """Trouble ordered by a test for the next requests that match."""

    method: str
    path: re.Pattern[str]
    status: int | None
    times: int
    delay: float
    headers: dict[str, str]
    message: str
    moment: Literal["before", "after"]

    def hits(self, request: Request) -> bool:
        """Whether this fault is for that request and not used up."""
        return (
            self.times > 0
            and self.method in ("*", request.method)
            and self.path.search(request.path) is not None
        )


class FakeServer:
    """What both fakes share: a port, a thread, ordered faults, an end.

    A context manager: inside it the server listens on ``url``, https with ``tls``."""

    def __init__(
        self,
        host: str,
        port: int,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.clock = clock
        self.scheme = "https" if tls else "http"
        self.stopping = threading.Event()
        self.lock = threading.RLock()
        self._faults: list[Fault] = []
        # not the clock itself: a test may set another
        clocked = (self._respond, lambda: self.clock(), tls)
        self._server = _Server((host, port), *clocked)
        self.host = host
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )

    @property
    def url(self) -> str:
        """Where it listens, without a trailing slash."""
        shown = "127.0.0.1" if self.host in ("", "0.0.0.0") else self.host
        return f"{self.scheme}://{shown}:{self.port}"

    def start(self) -> Self:
        """Listen, in a thread of its own."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop listening, hang up on every client, end every delay."""
        self.stopping.set()
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.hang_up()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def fail_next(
        self,
        method: str,
        path_regex: str,
        status: int | None = 500,
        times: int = 1,
        delay: float = 0.0,
        headers: Mapping[str, str] | None = None,
        message: str = "",
        moment: Literal["before", "after"] = "before",
    ) -> Fault:
        """Spoil the next ``times`` requests of that method (``*``: any) and path.

        ``status`` None only delays by ``delay`` seconds; 0 drops the connection.
        ``moment`` "after" lets the request take effect and then loses its answer.
        Setting ``times`` of the returned fault to 0 ends it."""
        fault = Fault(
            method=method,
            path=re.compile(path_regex),
            status=status,
            times=times,
            delay=delay,
            headers=dict(headers or {}),
            message=message or responses.get(status or 0, "fault"),
            moment=moment,
        )
        with self.lock:
            self._faults.append(fault)
        return fault

    def answer(self, request: Request) -> Reply:
        """What the fake itself says; each fake brings its own."""
        raise NotImplementedError

    def control(self, what: str, value: Any) -> object:
        """Do ``what`` a test asks for at /control/: its JSON in, the answer's out.

        LookupError, TypeError and ValueError become a 400."""
        raise NotImplementedError

    def error_reply(self, request: Request, status: int, message: str) -> Reply:
        """An error in the shape the imitated service gives it."""
        raise NotImplementedError

    def note(self, request: Request, reply: Reply) -> None:
        """Called once for each request, after its reply is known."""

    def _respond(self, request: Request) -> Reply:
        if request.path == "/healthz":
            return Reply(200, b"ok\n", {"Content-Type": "text/plain"})
        if request.path.startswith(_CONTROL):
            return self._control(request)
        fault = self._take_fault(request)
        reply = self._spoil(request, fault) if fault else self.answer(request)
        self.note(request, reply)
        return reply

    def _control(self, request: Request) -> Reply:
        what = f"{request.method} {request.path.removeprefix(_CONTROL)}"
        try:
            value = json.loads(request.body or b"null")
            with self.lock:
                if what == "POST faults":
                    self.fail_next(**value)
                    return json_reply(200, None)
                return json_reply(200, self.control(what, value))
        except (LookupError, TypeError, ValueError) as error:
            return json_reply(400, {"message": repr(error)})

    def _take_fault(self, request: Request) -> Fault | None:
        with self.lock:
            for fault in self._faults:
                if fault.hits(request):
                    fault.times -= 1
                    return fault
        return None

    def _spoil(self, request: Request, fault: Fault) -> Reply:
        self.stopping.wait(fault.delay)
        if fault.status is None:
            return self.answer(request)
        if fault.moment == "after":
            self.answer(request).done()
        if not fault.status:
            return Reply(0)
        reply = self.error_reply(request, fault.status, fault.message)
        reply.headers.update(fault.headers)
        return reply


# ---------------------------------------------------------------------------
# git
#
# Bare repositories with real commits, and git's own CGI program to serve them. The
# push hook is this file again; it gives the reasons that GitHub gives.
# ---------------------------------------------------------------------------

_GIT_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "LC_ALL": "C",
    "HOME": os.devnull,
}
_REPOSITORY_CONFIG = """
[receive]
\thideRefs = refs/pull
\tautogc = false
[uploadpack]
\tallowFilter = true
\tallowAnySHA1InWant = true
[gc]
\tauto = 0
"""
_PROTECTED_FILE = "protected-branches"
_SCOPE_VARIABLE = "PIDISPATCH_FAKE_TOKEN_SCOPE"
_PUSH_REFUSALS = {
    "branch-protection": (
        "protected branch hook declined",
        "error: GH006: Protected branch update failed for {ref}.\n"
        "error: Changes must be made through a pull request.\n",
    ),
    "ruleset": (
        "push declined due to repository rule violations",
        "error: GH013: Repository rule violations found for {ref}.\n"
        "\n- Changes must be made through a pull request.\n\n",
    ),
}
_WORKFLOW_REFUSALS = {
    "pat": "refusing to allow a Personal Access Token to create or update workflow "
    "`{file}` without `workflow` scope",
    "installation": "refusing to allow a GitHub App to create or update workflow "
    "`{file}` without `workflows` permission",
}


def _git_environment(**more: str) -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), **_GIT_ENVIRONMENT, **more}


@functools.cache
def _http_backend() -> str:
    folder = subprocess.run(
        ["git", "--exec-path"], check=True, capture_output=True, text=True
    )
    return str(Path(folder.stdout.strip()) / "git-http-backend")


class GitRepository:
    """One bare repository on disk."""

    def __init__(self, path: Path, default_branch: str) -> None:
        self.path = path
        path.mkdir(parents=True)
        self.git("init", "--quiet", "--template=", "-b", default_branch)
        with (path / "config").open("a") as config:
            config.write(_REPOSITORY_CONFIG)
        hook = path / "hooks" / "proc-receive"
        hook.parent.mkdir()
        hook.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{_OWN_FILE}" hook\n')
        hook.chmod(0o755)

    def git(self, *arguments: str, stdin: bytes = b"") -> str:
        """Run git in the repository and return what it printed, stripped.

        Raises subprocess.CalledProcessError when git fails."""
        done = subprocess.run(
            ["git", "--bare", *arguments],
            cwd=self.path,
            env=_git_environment(),
            input=stdin,
            check=True,
            capture_output=True,
        )
        return done.stdout.decode(errors="replace").strip()

    def refs(self) -> dict[str, str]:
        """Every reference with the id of its object."""
        listed = self.git("for-each-ref", "--format=%(refname) %(objectname)")
        return dict(line.split(" ", 1) for line in listed.splitlines())

    def sha(self, revision: str) -> str | None:
        """The commit that a reference or id names, or None."""
        try:
            return self.git("rev-parse", "--verify", "-q", f"{revision}^{{commit}}")
        except subprocess.CalledProcessError:
            return None

    def related(self, one: str, other: str) -> bool:
        """Whether two commits have an ancestor in common."""
        try:
            return bool(self.git("merge-base", one, other))
        except subprocess.CalledProcessError:
            return False

    def count(self, base: str, head: str) -> int:
        """How many commits ``head`` has beyond ``base``."""
        return int(self.git("rev-list", "--count", f"{base}..{head}"))

    def lines_changed(self, base: str, head: str) -> list[tuple[int, int]]:
        """Added and deleted lines of each changed file since the common ancestor."""
        stat = self.git("diff", "--numstat", f"{base}...{head}").splitlines()
        rows = [line.split("\t")[:2] for line in stat]
        return [(int(a), int(d)) if a != "-" else (0, 0) for a, d in rows]

    def show(self, revision: str, file: str) -> str:
        """The text of a file at a revision."""
        return self.git("show", f"{revision}:{file}")

    def commit(
        self,
        ref: str,
        files: Mapping[str, str | bytes | None],
        message: str,
        parent: str | None,
        when: int,
    ) -> str:
        """Commit ``files`` (None deletes) onto ``ref`` and return the new id."""
        start = f"from {parent}\n" if parent else ""
        stream = [
            f"commit {ref}\ncommitter Octo Fake <octo@example.test> {when} +0000\n"
            f"data {len(message.encode())}\n{message}\n{start}".encode()
        ]
        for name, content in files.items():
            stream.append(_fast_import_file(name, content))
        self.git("fast-import", "--quiet", "--force", stdin=b"".join(stream))
        made = self.sha(ref)
        assert made is not None
        return made


def _fast_import_file(name: str, content: str | bytes | None) -> bytes:
    quoted = json.dumps(name, ensure_ascii=False)
    if content is None:
        return f"D {quoted}\n".encode()
    data = content.encode() if isinstance(content, str) else content
    mode = "100755" if data.startswith(b"#!") else "100644"
    return f"M {mode} inline {quoted}\ndata {len(data)}\n".encode() + data + b"\n"


def serve_git(
    path: Path, operation: str, request: Request, user: str, scope: str
) -> Reply:
    """Answer one smart HTTP request of a repository with `git http-backend`.

    ``user`` lets pushes in; ``scope`` is what the push hook gets to know of the
    credential: its kind and its workflows permission. Empty leaves the hook out."""
    hooked = {
        _SCOPE_VARIABLE: scope,
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "receive.procReceiveRefs",
        "GIT_CONFIG_VALUE_0": "refs/heads",
    }
    environment = _git_environment(
        **(hooked if scope else {}),
        GIT_PROJECT_ROOT=str(path),
        GIT_HTTP_EXPORT_ALL="1",
        PATH_INFO=f"/{operation}",
        QUERY_STRING=request.query_string,
        REQUEST_METHOD=request.method,
        CONTENT_TYPE=request.headers.get("content-type", ""),
        CONTENT_LENGTH=str(len(request.body)),
        GIT_PROTOCOL=request.headers.get("git-protocol", ""),
        REMOTE_USER=user,
        REMOTE_ADDR="127.0.0.1",
    )
    done = subprocess.run(
        [_http_backend()], env=environment, input=request.body, capture_output=True
    )
    return _cgi_reply(done.stdout)


def _cgi_reply(output: bytes) -> Reply:
    head, _, body = output.partition(b"\r\n\r\n")
    lines = [line.split(": ", 1) for line in head.decode().split("\r\n") if line]
    headers = dict(lines)
    status = int(headers.pop("Status", "200").split()[0])
    return Reply(status if lines else 500, body, headers)


def _packet(line: str) -> bytes:
    return f"{len(line.encode()) + 4:04x}{line}".encode()


def _packets(stream: BinaryIO) -> list[str]:
    """The lines up to the next flush packet (gitprotocol-common(5))."""
    lines = []
    while size := int(stream.read(4) or b"0", 16):
        lines.append(stream.read(size - 4).decode().rstrip("\n"))
    return lines


def push_hook() -> int:
    """Git's proc-receive hook (githooks(5)): whether each pushed branch may move."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    _packets(source)
    sink.write(_packet("version=1") + b"0000")
    sink.flush()
    for command in _packets(source):
        old, new, ref = command.split(" ", 2)
        reason = _push_refusal(old, new, ref)
        verdict = _packet(f"ng {ref} {reason}") if reason else _packet(f"ok {ref}")
        sink.write(verdict if reason else verdict + _packet("option fall-through"))
    sink.write(b"0000")
    sink.flush()
    return 0


def _push_refusal(old: str, new: str, ref: str) -> str | None:
    """GitHub's reason against this change of a branch; None lets it pass."""
    branch = ref.removeprefix("refs/heads/")
    for line in Path(_PROTECTED_FILE).read_text().splitlines():
        kind, pattern = line.split(" ", 1)
        if fnmatch.fnmatchcase(branch, pattern):
            reason, text = _PUSH_REFUSALS[kind]
            sys.stderr.write(text.format(ref=ref))
            return reason
    token_kind, workflows = os.environ[_SCOPE_VARIABLE].split(" ", 1)
    if workflows != "write" and new.strip("0"):
        touched = _new_workflow(new)
        if touched:
            return _WORKFLOW_REFUSALS[token_kind].format(file=touched)
    return None


def _new_workflow(new: str) -> str | None:
    command = "git log --format= --name-only NEW --not --all -- .github/workflows"
    listed = subprocess.run(
        [new if word == "NEW" else word for word in command.split()],
        check=True,
        capture_output=True,
        text=True,
    )
    return next(iter(listed.stdout.split("\n")), "") or None


# ---------------------------------------------------------------------------
# forge state
#
# What a forge knows: people, tokens, repositories, issues, pull requests, comments.
# Plain records that a test may read and change. Git is asked for every git fact.
# ---------------------------------------------------------------------------

ALL_PERMISSIONS: Mapping[str, str] = {
    "metadata": "read",
    "contents": "write",
    "issues": "write",
    "pull_requests": "write",
    "workflows": "write",
    "administration": "read",
}
READ_PERMISSIONS: Mapping[str, str] = {
    "metadata": "read",
    "contents": "read",
    "issues": "read",
    "pull_requests": "read",
}


@dataclass(frozen=True)
class User:
    """An account; ``kind`` is User, Bot or Organization."""

    login: str
    id: int
    kind: str = "User"


@dataclass(frozen=True)
class Token:
    """A credential the forge takes.

    ``repositories`` None reaches every repository; ``expires`` is unix seconds."""

    value: str = field(repr=False)
    login: str
    name: str = ""
    kind: Literal["pat", "installation"] = "pat"
    repositories: frozenset[str] | None = None
    permissions: Mapping[str, str] = field(
        default_factory=lambda: dict(ALL_PERMISSIONS)
    )
    expires: float | None = None

    def reaches(self, full_name: str) -> bool:
        """Whether the token was given for that repository."""
        return self.repositories is None or full_name in self.repositories

    def may(self, permission: str, level: str) -> bool:
        """Whether the token holds a permission at ``level`` (read or write)."""
        held = self.permissions.get(permission)
        return held == "write" or held == level


@dataclass(frozen=True)
class App:
    """A GitHub App and its one installation.

    ``public_key`` is PEM; with it (and PyJWT) the App's JWTs are verified."""

    id: int
    slug: str
    installation_id: int
    repositories: frozenset[str]
    permissions: Mapping[str, str] = field(
        default_factory=lambda: dict(ALL_PERMISSIONS)
    )
    public_key: str | None = None

    @property
    def login(self) -> str:
        """The name under which the App comments."""
        return f"{self.slug}[bot]"


class Accounts:
    """The people a forge knows, and the source of its ids and times."""

    def __init__(self, clock: Callable[[], float], root: Path, base: str) -> None:
        self.clock = clock
        self.root = root
        self.base = base
        self._ids = itertools.count(100_001)
        self.users: dict[str, User] = {}

    def new_id(self) -> int:
        """A number that nothing else on this forge has."""
        return next(self._ids)

    def user(self, login: str) -> User:
        """The account of that name, made when it is new."""
        if login not in self.users:
            kind = "Bot" if login.endswith("[bot]") else "User"
            self.users[login] = User(login, self.new_id(), kind)
        return self.users[login]


@dataclass
class Comment:
    """A conversation comment on an issue or, with ``request``, a pull request."""

    id: int
    number: int
    user: str
    body: str
    created_at: float
    updated_at: float
    request: bool = False


@dataclass(frozen=True)
class LabelMoment:
    """A label that was put on an item, or taken off."""

    id: int
    number: int
    label: str
    added: bool
    user: str
    at: float


@dataclass
class IssueEvent:
    """Something somebody did to an issue or pull request: labeled, closed …"""

    id: int
    number: int
    event: str
    actor: str
    created_at: float
    label: str | None = None


@dataclass
class Review:
    """A review that was submitted; ``state`` is in the API's capitals."""

    id: int
    number: int
    user: str
    state: str
    body: str | None
    commit_id: str
    submitted_at: float
    association: str | None = None


@dataclass
class Activity:
    """A push to a branch, as the repository's activity lists it."""

    id: int
    ref: str
    before: str
    after: str
    actor: str
    timestamp: float
    activity_type: str = "push"


@dataclass
class Issue:
    """An issue; ``labels`` are names in the order they were put on."""

    id: int
    number: int
    title: str
    body: str | None
    user: str
    created_at: float
    updated_at: float
    labels: list[str] = field(default_factory=list)
    state: str = "open"
    closed_at: float | None = None
    confidential: bool = False


@dataclass
class Pull(Issue):
    """A pull request. ``head_owner`` differs from the repository's for a fork, and
    is empty when that was deleted."""

    head: str = ""
    head_owner: str = ""
    head_sha: str = ""
    base: str = ""
    draft: bool = False
    merged: bool = False


class Repo:
    """A repository of the fake: records beside a real bare git repository.

    ``request_ref`` is where a request's head is; with ``apart`` requests are
    numbered apart from issues."""

    def __init__(
        self,
        accounts: Accounts,
        full_name: str,
        default_branch: str,
        private: bool,
        request_ref: str = "refs/pull/{n}/head",
        apart: bool = False,
    ) -> None:
        self.accounts = accounts
        self.full_name = full_name
        self.request_ref = request_ref
        self.apart = apart
        self.owner, _, self.name = full_name.rpartition("/")
        self.id = accounts.new_id()
        self.default_branch = default_branch
        self.private = private
        self.created_at = accounts.clock()
        self.issues: dict[int, Issue] = {}
        self.pulls: dict[int, Pull] = {}
        self.comments: list[Comment] = []
        self.label_moments: list[LabelMoment] = []
        self.events: list[IssueEvent] = []
        self.reviews: list[Review] = []
        self.activity: list[Activity] = []
        self.collaborators: dict[str, str] = {self.owner: "admin"}
        self.protected: dict[str, str] = {}
        self.may_push: set[str] = set()
        self.deleted_forks: set[str] = set()
        self.rules: list[str] = []  # of a ruleset for all branches; they refuse nothing
        path = accounts.root / self.owner / f"{self.name}.git"
        self.git = GitRepository(path, default_branch)
        self._write_protection()

    @property
    def refs(self) -> dict[str, str]:
        """Every reference with its commit, pull request heads included."""
        return self.git.refs()

    @property
    def branches(self) -> dict[str, str]:
        """Every branch with its commit."""
        prefix = "refs/heads/"
        found = self.refs.items()
        return {r.removeprefix(prefix): s for r, s in found if r.startswith(prefix)}

    def branch(self, name: str) -> str | None:
        """The commit at the tip of a branch, or None."""
        return self.git.sha(f"refs/heads/{name}")

    def item(self, number: int, request: bool | None = None) -> Issue | None:
        """The issue or pull request of that number; ``request`` says which."""
        if request is not None:
            return self.pulls.get(number) if request else self.issues.get(number)
        return self.issues.get(number) or self.pulls.get(number)

    def next_number(self, request: bool = False) -> int:
        """The next of the one sequence, or of the issues' or the requests' own."""
        numbers = [*self.issues, *self.pulls]
        if self.apart:
            numbers = list(self.pulls if request else self.issues)
        return max([0, *numbers]) + 1

    def is_protected(self, branch: str) -> bool:
        """Whether a rule refuses pushes to that branch."""
        return self.protection_of(branch) is not None

    def rule_of(self, branch: str) -> str | None:
        """The rule, a name or a glob, that protects the branch."""
        found = (r for r in self.protected if fnmatch.fnmatchcase(branch, r))
        return next(found, None)

    def protection_of(self, branch: str) -> str | None:
        """The kind of the rule that refuses pushes to that branch."""
        kinds = (k for b, k in self.protected.items() if fnmatch.fnmatchcase(branch, b))
        return next(kinds, None)

    def rules_for(self, branch: str) -> list[str]:
        """The types of the rulesets' rules that apply to that branch."""
        refuses = ["pull_request"] if self.protection_of(branch) == "ruleset" else []
        return [*refuses, *self.rules]

    def protect(
        self,
        branch: str,
        by: Literal["branch-protection", "ruleset"] = "branch-protection",
    ) -> None:
        """Refuse pushes to ``branch`` (a name or a glob) from now on."""
        self.protected[branch] = by
        self._write_protection()

    def unprotect(self, branch: str) -> None:
        """Let pushes to ``branch`` through again."""
        del self.protected[branch]
        self._write_protection()

    def _write_protection(self) -> None:
        rows = "".join(f"{kind} {name}\n" for name, kind in self.protected.items())
        (self.git.path / _PROTECTED_FILE).write_text(rows)

    def commit(
        self,
        branch: str,
        files: Mapping[str, str | bytes | None],
        message: str = "Change files",
        start: str | None = None,
        user: str | None = None,
    ) -> str:
        """Commit onto a branch (made at ``start``, else the default branch).

        ``user`` is who pushed it, the owner unless said."""
        origin = start or f"refs/heads/{self.default_branch}"
        parent = self.branch(branch) or self.git.sha(origin)
        when = int(self.accounts.clock())
        made = self.git.commit(f"refs/heads/{branch}", files, message, parent, when)
        self.sync_pulls(user)
        return made

    def delete_branch(self, branch: str) -> None:
        """Delete a branch; its open pull requests close, as on GitHub."""
        self.git.git("update-ref", "-d", f"refs/heads/{branch}")
        self.sync_pulls()

    def add_issue(
        self,
        number: int | None = None,
        title: str = "An issue",
        body: str | None = "",
        user: str | None = None,
        labels: Sequence[str] = (),
        state: str = "open",
        confidential: bool = False,
    ) -> Issue:
        """File an issue under a given or the next number."""
        now = self.accounts.clock()
        issue = Issue(
            id=self.accounts.new_id(),
            number=number or self.next_number(),
            title=title,
            body=body,
            user=self.accounts.user(user or self.owner).login,
            created_at=now,
            updated_at=now,
            labels=list(labels),
            state=state,
            confidential=confidential,
        )
        self.issues[issue.number] = issue
        return issue

    def set_labels(self, number: int, labels: Sequence[str], user: str) -> Issue:
        """Give an item other labels; each that came or went leaves its moment."""
        item, now = _known(self, number), self.accounts.clock()
        login = self.accounts.user(user).login
        for name in (*item.labels, *labels):
            added = name in labels
            if added != (name in item.labels):
                row = (self.accounts.new_id(), number, name, added, login, now)
                self.label_moments.append(LabelMoment(*row))
        item.labels, item.updated_at = list(dict.fromkeys(labels)), now
        return item

    def add_collaborator(self, login: str, permission: str) -> None:
        """Give someone admin, maintain, write, triage or read (or none)."""
        self.accounts.user(login)
        self.collaborators[login] = permission

    def association(self, login: str) -> str:
        """GitHub's author_association of somebody in this repository."""
        if login == self.owner:
            return "OWNER"
        held = self.collaborators.get(login, "none")
        return "NONE" if held == "none" else "COLLABORATOR"

    def add_comment(
        self, number: int, body: str, user: str, request: bool | None = None
    ) -> Comment:
        """Comment on an issue or pull request."""
        now = self.accounts.clock()
        login = self.accounts.user(user).login
        request = number not in self.issues if request is None else request
        made = (self.accounts.new_id(), number, login, body, now, now, request)
        self.comments.append(Comment(*made))
        return self.comments[-1]

    def add_event(
        self, number: int, event: str, actor: str, label: str | None = None
    ) -> IssueEvent:
        """Note what somebody did to an issue or pull request."""
        now = self.accounts.clock()
        login = self.accounts.user(actor).login
        noted = IssueEvent(self.accounts.new_id(), number, event, login, now, label)
        self.events.append(noted)
        return noted

    def add_review(
        self,
        number: int,
        state: str,
        body: str | None,
        user: str,
        association: str | None = None,
    ) -> Review:
        """Review a pull request."""
        pull, now = self.pulls[number], self.accounts.clock()
        pull.updated_at = now
        review = Review(
            id=self.accounts.new_id(),
            number=number,
            user=self.accounts.user(user).login,
            state=state.upper(),
            body=body,
            commit_id=pull.head_sha,
            submitted_at=now,
            association=association,
        )
        self.reviews.append(review)
        return review

    def add_activity(self, ref: str, before: str, after: str, actor: str) -> Activity:
        """Note a push."""
        now = self.accounts.clock()
        login = self.accounts.user(actor).login
        noted = Activity(self.accounts.new_id(), ref, before, after, login, now)
        self.activity.append(noted)
        return noted

    def comments_on(self, number: int, request: bool | None = None) -> list[Comment]:
        """The conversation of one issue or pull request, oldest first."""
        request = number not in self.issues if request is None else request
        return [c for c in self.comments if (c.number, c.request) == (number, request)]

    def open_pull(
        self,
        head: str,
        title: str = "A pull request",
        body: str | None = "",
        base: str | None = None,
        user: str | None = None,
        files: Mapping[str, str | bytes | None] | None = None,
        fork_owner: str | None = None,
        labels: Sequence[str] = (),
        draft: bool = False,
    ) -> Pull:
        """Open a pull request; with ``files`` they are committed to its head first.

        With ``fork_owner`` the commit exists only under refs/pull/N/head here, as the
        branch is in somebody's fork."""
        now = self.accounts.clock()
        pull = Pull(
            id=self.accounts.new_id(),
            number=self.next_number(request=True),
            title=title,
            body=body,
            user=self.accounts.user(user or fork_owner or self.owner).login,
            created_at=now,
            updated_at=now,
            labels=list(labels),
            head=head,
            head_owner=fork_owner or self.owner,
            base=base or self.default_branch,
            draft=draft,
        )
        self._fill_head(pull, files)
        self.pulls[pull.number] = pull
        self.sync_pulls()
        return pull

    def _fill_head(
        self, pull: Pull, files: Mapping[str, str | bytes | None] | None
    ) -> None:
        if pull.head_owner != self.owner:
            parent = self.branch(pull.base)
            ref = self.request_ref.format(n=pull.number)
            when = int(pull.created_at)
            message = f"Work of {pull.head_owner}"
            pull.head_sha = self.git.commit(ref, files or {}, message, parent, when)
        elif files is not None:
            self.commit(pull.head, files, f"Work for {pull.title}")
        elif self.branch(pull.head) is None:
            raise ValueError(f"{self.full_name} has no branch {pull.head}")

    def sync_pulls(self, pusher: str | None = None) -> None:
        """Bring refs/pull/N/head of open requests to where their branches are."""
        branches = self.branches
        for pull in self.pulls.values():
            if pull.state != "open" or pull.head_owner != self.owner:
                continue
            tip = branches.get(pull.head)
            if tip is None:
                self.close(pull)
            elif tip != pull.head_sha:
                if pull.head_sha:
                    ref, actor = f"refs/heads/{pull.head}", pusher or self.owner
                    self.add_activity(ref, pull.head_sha, tip, actor)
                    pull.updated_at = self.accounts.clock()
                pull.head_sha = tip
                self.git.git("update-ref", self.request_ref.format(n=pull.number), tip)

    def close(self, item: Issue, by: str | None = None) -> None:
        """Close an issue or pull request."""
        item.state = "closed"
        item.closed_at = item.updated_at = self.accounts.clock()
        self.add_event(item.number, "closed", by or self.owner)


# ---------------------------------------------------------------------------
# forge shapes
#
# JSON as GitHub's REST API and its webhooks give it: the fields that clients read,
# under GitHub's names. ``base`` is the API's root as the client addressed it.
# ---------------------------------------------------------------------------


def iso_time(seconds: float) -> str:
    """A time as GitHub writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _iso_or_none(seconds: float | None) -> str | None:
    return None if seconds is None else iso_time(seconds)


def _node_id(kind: str, number: int) -> str:
    return base64.b64encode(f"{kind}:{number}".encode()).decode()


def _site(base: str) -> str:
    """Where the pages for people are, given where the API is."""
    return base.removesuffix("/api/v3").replace("://api.", "://", 1)


def user_json(base: str, user: User) -> Json:
    """An account."""
    url = f"{base}/users/{user.login}"
    site = _site(base)
    return {
        "login": user.login,
        "id": user.id,
        "node_id": _node_id("User", user.id),
        "avatar_url": f"{site}/avatars/u/{user.id}",
        "gravatar_id": "",
        "url": url,
        "html_url": f"{site}/{user.login}",
        "repos_url": f"{url}/repos",
        "events_url": f"{url}/events{{/privacy}}",
        "type": user.kind,
        "site_admin": False,
    }


def repo_json(base: str, repo: Repo) -> Json:
    """A repository."""
    url = f"{base}/repos/{repo.full_name}"
    html_url = f"{_site(base)}/{repo.full_name}"
    return {
        "id": repo.id,
        "node_id": _node_id("Repository", repo.id),
        "name": repo.name,
        "full_name": repo.full_name,
        "private": repo.private,
        "visibility": "private" if repo.private else "public",
        "owner": user_json(base, repo.accounts.user(repo.owner)),
        "html_url": html_url,
        "description": None,
        "fork": False,
        "url": url,
        "branches_url": f"{url}/branches{{/branch}}",
        "collaborators_url": f"{url}/collaborators{{/collaborator}}",
        "issues_url": f"{url}/issues{{/number}}",
        "pulls_url": f"{url}/pulls{{/number}}",
        "clone_url": f"{html_url}.git",
        "created_at": iso_time(repo.created_at),
        "updated_at": iso_time(repo.created_at),
        "pushed_at": iso_time(repo.created_at),
        "default_branch": repo.default_branch,
        "has_issues": True,
        "archived": False,
        "disabled": False,
        "open_issues_count": sum(i.state == "open" for i in repo.issues.values()),
        "topics": [],
        "language": None,
        "license": None,
    }


def label_json(base: str, repo: Repo, name: str) -> Json:
    """A label; its id follows from its name."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return {
        "id": number,
        "node_id": _node_id("Label", number),
        "url": f"{base}/repos/{repo.full_name}/labels/{urllib.parse.quote(name)}",
        "name": name,
        "color": f"{number & 0xFFFFFF:06x}",
        "default": False,
        "description": None,
    }


def _item_json(base: str, repo: Repo, item: Issue) -> Json:
    """What an issue and a pull request have in common."""
    kind = "pull" if isinstance(item, Pull) else "issues"
    site = _site(base)
    issue_url = f"{base}/repos/{repo.full_name}/issues/{item.number}"
    return {
        "id": item.id,
        "node_id": _node_id("Issue", item.id),
        "number": item.number,
        "title": item.title,
        "body": item.body,
        "user": user_json(base, repo.accounts.user(item.user)),
        "labels": [label_json(base, repo, name) for name in item.labels],
        "state": item.state,
        "locked": False,
        "assignee": None,
        "assignees": [],
        "milestone": None,
        "html_url": f"{site}/{repo.full_name}/{kind}/{item.number}",
        "comments_url": f"{issue_url}/comments",
        "comments": len(repo.comments_on(item.number)),
        "created_at": iso_time(item.created_at),
        "updated_at": iso_time(item.updated_at),
        "closed_at": _iso_or_none(item.closed_at),
        "author_association": repo.association(item.user),
        "active_lock_reason": None,
    }


def issue_json(base: str, repo: Repo, item: Issue) -> Json:
    """An issue, or a pull request seen as one (then it has ``pull_request``)."""
    url = f"{base}/repos/{repo.full_name}"
    shape = _item_json(base, repo, item)
    shape["url"] = f"{url}/issues/{item.number}"
    shape["repository_url"] = url
    shape["labels_url"] = f"{shape['url']}/labels{{/name}}"
    shape["events_url"] = f"{shape['url']}/events"
    if isinstance(item, Pull):
        shape["draft"] = item.draft
        shape["pull_request"] = {
            "url": f"{url}/pulls/{item.number}",
            "html_url": shape["html_url"],
            "diff_url": f"{shape['html_url']}.diff",
            "patch_url": f"{shape['html_url']}.patch",
            "merged_at": _iso_or_none(item.closed_at) if item.merged else None,
        }
    return shape


def pull_json(base: str, repo: Repo, pull: Pull) -> Json:
    """A pull request as lists and webhooks give it."""
    url = f"{base}/repos/{repo.full_name}/pulls/{pull.number}"
    shape = _item_json(base, repo, pull)
    return shape | {
        "url": url,
        "node_id": _node_id("PullRequest", pull.id),
        "diff_url": f"{shape['html_url']}.diff",
        "patch_url": f"{shape['html_url']}.patch",
        "issue_url": f"{base}/repos/{repo.full_name}/issues/{pull.number}",
        "commits_url": f"{url}/commits",
        "draft": pull.draft,
        "merged_at": _iso_or_none(pull.closed_at) if pull.merged else None,
        "merge_commit_sha": None,
        "requested_reviewers": [],
        "requested_teams": [],
        "head": _pull_side(base, repo, pull.head_owner, pull.head, pull.head_sha),
        "base": _pull_side(base, repo, repo.owner, pull.base, _base_sha(repo, pull)),
        "auto_merge": None,
        "_links": {"self": {"href": url}, "html": {"href": shape["html_url"]}},
    }


def _base_sha(repo: Repo, pull: Pull) -> str:
    return repo.branch(pull.base) or ""


def _pull_side(base: str, repo: Repo, owner: str, branch: str, sha: str) -> Json:
    shape = repo_json(base, repo)
    user = repo.accounts.user(owner)
    if owner != repo.owner:
        # A fork is a repository of its own: another id, another name.
        fork = f"{owner}/{repo.name}"
        shape |= {"id": repo.id + 500_000, "full_name": fork, "fork": True}
        shape["owner"] = user_json(base, user)
    return {
        "label": f"{owner}:{branch}",
        "ref": branch,
        "sha": sha,
        "user": user_json(base, user),
        "repo": shape,
    }


def pull_detail_json(base: str, repo: Repo, pull: Pull) -> Json:
    """A single pull request, with the figures that git knows of it."""
    merge_base = _base_sha(repo, pull)
    changed = repo.git.lines_changed(merge_base, pull.head_sha)
    return pull_json(base, repo, pull) | {
        "merged": pull.merged,
        "mergeable": None,
        "mergeable_state": "unknown",
        "merged_by": None,
        "comments": len(repo.comments_on(pull.number)),
        "review_comments": 0,
        "maintainer_can_modify": False,
        "commits": repo.git.count(merge_base, pull.head_sha),
        "additions": sum(added for added, _ in changed),
        "deletions": sum(deleted for _, deleted in changed),
        "changed_files": len(changed),
    }


def comment_json(base: str, repo: Repo, comment: Comment) -> Json:
    """A conversation comment."""
    url = f"{base}/repos/{repo.full_name}/issues"
    item = repo.item(comment.number)
    kind = "pull" if isinstance(item, Pull) else "issues"
    site = f"{_site(base)}/{repo.full_name}"
    return {
        "id": comment.id,
        "node_id": _node_id("IssueComment", comment.id),
        "url": f"{url}/comments/{comment.id}",
        "html_url": f"{site}/{kind}/{comment.number}#issuecomment-{comment.id}",
        "issue_url": f"{url}/{comment.number}",
        "user": user_json(base, repo.accounts.user(comment.user)),
        "body": comment.body,
        "created_at": iso_time(comment.created_at),
        "updated_at": iso_time(comment.updated_at),
        "author_association": repo.association(comment.user),
        "performed_via_github_app": None,
    }


def event_json(base: str, repo: Repo, event: IssueEvent) -> Json:
    """An issue event; its issue is as it stands now."""
    shape: Json = {
        "id": event.id,
        "node_id": _node_id("IssueEvent", event.id),
        "url": f"{base}/repos/{repo.full_name}/issues/events/{event.id}",
        "actor": user_json(base, repo.accounts.user(event.actor)),
        "event": event.event,
        "commit_id": None,
        "commit_url": None,
        "created_at": iso_time(event.created_at),
        "performed_via_github_app": None,
        "issue": issue_json(base, repo, _known(repo, event.number)),
    }
    if event.label is not None:
        label = label_json(base, repo, event.label)
        shape["label"] = {"name": label["name"], "color": label["color"]}
    return shape


def review_json(base: str, repo: Repo, review: Review) -> Json:
    """A review as the API lists it."""
    url = f"{base}/repos/{repo.full_name}/pulls/{review.number}"
    page = f"{_site(base)}/{repo.full_name}/pull/{review.number}"
    html_url = f"{page}#pullrequestreview-{review.id}"
    return {
        "id": review.id,
        "node_id": _node_id("PullRequestReview", review.id),
        "user": user_json(base, repo.accounts.user(review.user)),
        "body": review.body,
        "state": review.state,
        "html_url": html_url,
        "pull_request_url": url,
        "author_association": review.association or repo.association(review.user),
        "_links": {"html": {"href": html_url}, "pull_request": {"href": url}},
        "submitted_at": iso_time(review.submitted_at),
        "commit_id": review.commit_id,
    }


def activity_json(base: str, repo: Repo, noted: Activity) -> Json:
    """A row of a repository's activity."""
    return {
        "id": noted.id,
        "node_id": _node_id("Push", noted.id),
        "before": noted.before,
        "after": noted.after,
        "ref": noted.ref,
        "timestamp": iso_time(noted.timestamp),
        "activity_type": noted.activity_type,
        "actor": user_json(base, repo.accounts.user(noted.actor)),
    }


def branch_json(base: str, repo: Repo, name: str, sha: str) -> Json:
    """A branch."""
    url = f"{base}/repos/{repo.full_name}"
    return {
        "name": name,
        "commit": {"sha": sha, "url": f"{url}/commits/{sha}"},
        "protected": repo.is_protected(name) or bool(repo.rules_for(name)),
        "protection": {"enabled": repo.protection_of(name) == "branch-protection"},
        "protection_url": f"{url}/branches/{name}/protection",
    }


# ---------------------------------------------------------------------------
# deliveries
#
# Webhooks as GitHub sends them: the payload of something that happened on the fake,
# and the signed bytes (docs.github.com, "Webhook events and payloads", "Validating
# webhook deliveries"). A builder makes the thing happen on the fake as well.
# ---------------------------------------------------------------------------


def signed_delivery(
    event: str, payload: Json, secret: str, guid: str, form: bool = False
) -> tuple[dict[str, str], bytes]:
    """Headers and body of a delivery; ``form`` sends it as a form, and signs that."""
    text = json.dumps(payload, separators=(",", ":"), ensure_ascii=False)
    body = text.encode()
    kind = "application/json"
    if form:
        body = urllib.parse.urlencode({"payload": text}).encode()
        kind = "application/x-www-form-urlencoded"
    headers = {
        "Content-Type": kind,
        "User-Agent": "GitHub-Hookshot/0000000",
        "X-GitHub-Event": event,
        "X-GitHub-Delivery": guid,
        "X-GitHub-Hook-ID": "100000001",
        "X-GitHub-Hook-Installation-Target-Type": "repository",
        "X-Hub-Signature": "sha1=" + _mac(secret, body, "sha1"),
        "X-Hub-Signature-256": "sha256=" + _mac(secret, body, "sha256"),
    }
    return headers, body


def _mac(secret: str, body: bytes, algorithm: str) -> str:
    return hmac.new(secret.encode(), body, algorithm).hexdigest()


def _payload(repo: Repo, action: str, sender: str, base: str) -> Json:
    return {
        "action": action,
        "repository": repo_json(base, repo),
        "sender": user_json(base, repo.accounts.user(sender)),
    }


def _known(repo: Repo, number: int) -> Issue:
    item = repo.item(number)
    if item is None:
        raise ValueError(f"{repo.full_name} has no #{number}")
    return item


def item_payload(
    repo: Repo, number: int, action: str, sender: str, label: str | None = None
) -> Json:
    """An `issues` delivery, or `pull_request` when the number is one.

    ``labeled`` and ``unlabeled`` change the labels, ``closed`` and ``reopened`` the
    state; a pull request's ``synchronize`` needs a commit made before."""
    item = _known(repo, number)
    item.updated_at = repo.accounts.clock()
    if action == "labeled" and label and label not in item.labels:
        item.labels.append(label)
    if action == "unlabeled" and label in item.labels:
        item.labels.remove(label)
    if action in ("closed", "reopened"):
        item.state = "closed" if action == "closed" else "open"
        item.closed_at = item.updated_at if action == "closed" else None
    if action in ("labeled", "unlabeled", "closed", "reopened"):
        repo.add_event(number, action, sender, label)
    base = repo.accounts.base
    payload = _payload(repo, action, sender, base)
    if isinstance(item, Pull):
        payload["number"] = number
        payload["pull_request"] = pull_detail_json(base, repo, item)
    else:
        payload["issue"] = issue_json(base, repo, item)
    if label is not None:
        payload["label"] = label_json(base, repo, label)
    return payload


def labeled_payload(repo: Repo, number: int, label: str, sender: str) -> Json:
    """Somebody puts a label on an issue or pull request."""
    return item_payload(repo, number, "labeled", sender, label)


def pull_request_payload(
    repo: Repo, number: int, action: str, sender: str, label: str | None = None
) -> Json:
    """A `pull_request` delivery (opened, synchronize, labeled, closed …)."""
    if number not in repo.pulls:
        raise ValueError(f"{repo.full_name}#{number} is no pull request")
    return item_payload(repo, number, action, sender, label)


def comment_payload(
    repo: Repo,
    number: int,
    body: str,
    sender: str,
    association: str | None = None,
    action: str = "created",
) -> Json:
    """An `issue_comment` delivery; the comment is on the issue from then on."""
    item = _known(repo, number)
    base = repo.accounts.base
    comment = repo.add_comment(number, body, sender)
    item.updated_at = comment.created_at
    payload = _payload(repo, action, sender, base)
    payload["issue"] = issue_json(base, repo, item)
    payload["comment"] = comment_json(base, repo, comment)
    if association is not None:
        payload["comment"]["author_association"] = association
    return payload


def review_payload(
    repo: Repo,
    number: int,
    state: str,
    body: str | None,
    sender: str,
    association: str | None = None,
) -> Json:
    """A `pull_request_review` submitted: approved, changes_requested, commented."""
    pull, base = repo.pulls[number], repo.accounts.base
    review = repo.add_review(number, state, body, sender, association)
    shape = review_json(base, repo, review)
    del shape["_links"]
    payload = _payload(repo, "submitted", sender, base)
    payload["pull_request"] = pull_json(base, repo, pull)
    payload["review"] = shape | {"state": state}
    return payload


PAYLOADS: Mapping[str, Callable[..., Json]] = {
    "issues": item_payload,
    "pull_request": pull_request_payload,
    "issue_comment": comment_payload,
    "pull_request_review": review_payload,
}


# ---------------------------------------------------------------------------
# forge API
#
# One function a route; the table they register in says which permission each needs.
# A function gets a `Call` that is already authenticated and returns a reply or raises
# `Refused` with GitHub's own status and words (docs.github.com/rest).
# ---------------------------------------------------------------------------

_DOCUMENTATION = "https://docs.github.com/rest"
_TITLE_MAX = 256
_BODY_MAX = 65_536
_TOKEN_LIFE = 3600
_JWT_LIFE_MAX = 600
_PERMISSION_OF_ROLE = {"maintain": "write", "triage": "read"}
_INACCESSIBLE = {
    "pat": "Resource not accessible by personal access token",
    "installation": "Resource not accessible by integration",
}


class Refused(Exception):
    """An error answer of the API."""

    def __init__(
        self, status: int, message: str, errors: Sequence[Mapping[str, str]] = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.errors = errors


def _invalid(resource: str, **error: str) -> Refused:
    return Refused(422, "Validation Failed", [{"resource": resource, **error}])


class ForgeData:
    """Everything a forge holds, in one place that tests may look into."""

    def __init__(self, accounts: Accounts, tokens: Iterable[Token], app: App | None):
        self.accounts = accounts
        self.app = app
        self.tokens = {token.value: token for token in tokens}
        self.minted: list[Token] = []
        self.repos: dict[str, Repo] = {}
        self.rate_limit = 5000
        self.rate_used: dict[str, int] = {}

    def token(self, value: str) -> Token | None:
        """The credential of that value while it is valid."""
        found = self.tokens.get(value)
        if found and (found.expires or math.inf) <= self.accounts.clock():
            return None
        return found

    def repo(self, full_name: str, token: Token) -> Repo | None:
        """A repository as far as that token may know of it."""
        found = self.repos.get(full_name)
        if found and (token.reaches(full_name) or not found.private):
            return found
        return None

    def mint(
        self, repositories: frozenset[str], permissions: Mapping[str, str]
    ) -> Json:
        """Make an installation token, valid for an hour, and return its JSON."""
        assert self.app is not None
        expires = self.accounts.clock() + _TOKEN_LIFE
        value = "ghs_" + secrets.token_hex(18)
        name = f"installation-{len(self.minted) + 1}"
        token = Token(
            value=value,
            login=self.app.login,
            name=name,
            kind="installation",
            repositories=repositories,
            permissions=permissions,
            expires=expires,
        )
        self.minted.append(token)
        self.tokens[value] = token
        return {
            "token": value,
            "expires_at": iso_time(expires),
            "permissions": dict(permissions),
            "repository_selection": "selected",
        }


@dataclass(frozen=True)
class Call:
    """One authenticated API request. ``token`` is None where an App's JWT came."""

    data: ForgeData
    request: Request
    base: str
    token: Token | None
    args: Mapping[str, str]
    full_name: str | None = None

    @property
    def caller(self) -> str:
        """The login in whose name the request acts."""
        assert self.token is not None
        return self.token.login

    @functools.cached_property
    def repo(self) -> Repo:
        """The repository of the path; 404 when it does not exist for this token."""
        assert self.token is not None and self.full_name is not None
        found = self.data.repo(self.full_name, self.token)
        if found is None:
            raise Refused(404, "Not Found")
        return found

    def item(self) -> Issue:
        """The issue or pull request of the path."""
        found = self.repo.item(int(self.args["number"]))
        if found is None:
            raise Refused(404, "Not Found")
        return found

    def pull(self) -> Pull:
        """The pull request of the path."""
        found = self.repo.pulls.get(int(self.args["number"]))
        if found is None:
            raise Refused(404, "Not Found")
        return found

    def body(self) -> Json:
        """The request's JSON object."""
        try:
            return self.request.json()
        except ValueError:
            raise Refused(400, "Problems parsing JSON") from None

    def text(self, shape: Json, name: str, limit: int, resource: str) -> str | None:
        """An optional text field of a body, within GitHub's length for it."""
        value = shape.get(name)
        if value is not None and not isinstance(value, str):
            raise Refused(422, f"Invalid request.\n\nFor '{name}', wrong type.")
        if value is not None and len(value) > limit:
            message = f"{name} is too long (maximum is {limit} characters)"
            raise _invalid(resource, code="custom", field=name, message=message)
        return value


class Route(NamedTuple):
    """A row of the table: ``needs`` is ``permission:level``, ``app`` or nothing."""

    method: str
    path: re.Pattern[str]
    needs: str
    function: Callable[[Call], Reply]


class Routes(list[Route]):
    """One forge's API; called, it registers the function that follows."""

    def __call__(
        self, method: str, path: str, needs: str = ""
    ) -> Callable[[Callable[[Call], Reply]], Callable[[Call], Reply]]:
        """Register for a path; ``{x}`` is a segment, ``{x+}`` the rest, ``{x:p}`` of
        a pattern."""
        pattern = re.sub(r"\{(\w+)\+\}", r"(?P<\1>.+)", path)
        pattern = re.sub(r"\{(\w+):([^{}]+)\}", r"(?P<\1>\2)", pattern)
        pattern = re.sub(r"\{number\}", r"(?P<number>[0-9]+)", pattern)
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern)

        def register(function: Callable[[Call], Reply]) -> Callable[[Call], Reply]:
            self.append(Route(method, re.compile(pattern), needs, function))
            return function

        return register

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        """The row of a request and the arguments in its path; raises 404."""
        for row in self:
            match = row.path.fullmatch(path)
            if match and row.method == method:
                args = match.groupdict()
                return row, {n: urllib.parse.unquote(v) for n, v in args.items()}
        raise Refused(404, "Not Found")


GITHUB = Routes()


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else default


def paginated(call: Call, rows: Sequence[Json]) -> Reply:
    """One page of a list with GitHub's Link header (30 a page, at most 100)."""
    query = call.request.query
    size = max(1, min(100, _number(query, "per_page", 30)))
    page = max(1, _number(query, "page", 1))
    last = max(1, math.ceil(len(rows) / size))
    targets = {"prev": page - 1, "next": page + 1, "last": last, "first": 1}
    if page == 1:
        del targets["prev"], targets["first"]
    if page >= last:
        del targets["next"], targets["last"]
    url = call.base + call.request.path.removeprefix("/api/v3")
    links = [
        f'<{url}?{urllib.parse.urlencode({**query, "page": number})}>; rel="{name}"'
        for name, number in targets.items()
    ]
    reply = json_reply(200, rows[(page - 1) * size : page * size])
    if links:
        reply.headers["Link"] = ", ".join(links)
    return reply


@GITHUB("GET", "/user")
def get_user(call: Call) -> Reply:
    if call.token and call.token.kind == "installation":
        raise Refused(403, _INACCESSIBLE["installation"])
    return json_reply(200, user_json(call.base, call.data.accounts.user(call.caller)))


@GITHUB("GET", "/users/{login}")
def get_users(call: Call) -> Reply:
    user = call.data.accounts.users.get(call.args["login"])
    if user is None:
        raise Refused(404, "Not Found")
    return json_reply(200, user_json(call.base, user))


@GITHUB("GET", "/rate_limit")
def get_rate_limit(call: Call) -> Reply:
    assert call.token is not None
    used = call.data.rate_used.get(call.token.value, 0)
    core = {
        "limit": call.data.rate_limit,
        "used": used,
        "remaining": max(0, call.data.rate_limit - used),
        "reset": _rate_reset(call.data),
        "resource": "core",
    }
    return json_reply(200, {"resources": {"core": core}, "rate": core})


def _rate_reset(data: ForgeData) -> int:
    return (int(data.accounts.clock()) // 3600 + 1) * 3600


@GITHUB("GET", "/repos/{owner}/{name}", "metadata:read")
def get_repo(call: Call) -> Reply:
    assert call.token is not None
    write = call.token.may("contents", "write")
    shape = repo_json(call.base, call.repo)
    shape["permissions"] = {"admin": False, "push": write, "pull": True}
    return json_reply(200, shape)


@GITHUB("GET", "/repos/{owner}/{name}/branches", "contents:read")
def get_branches(call: Call) -> Reply:
    only = call.request.query.get("protected")
    rows = [
        branch_json(call.base, call.repo, name, sha)
        for name, sha in call.repo.branches.items()
        if only in (None, str(call.repo.is_protected(name)).lower())
    ]
    return paginated(call, rows)


@GITHUB("GET", "/repos/{owner}/{name}/branches/{branch+}", "contents:read")
def get_branch(call: Call) -> Reply:
    name = call.args["branch"]
    sha = call.repo.branch(name)
    if sha is None:
        raise Refused(404, "Branch not found")
    return json_reply(200, branch_json(call.base, call.repo, name, sha))


@GITHUB("GET", "/repos/{owner}/{name}/rules/branches/{branch+}", "metadata:read")
def get_rules(call: Call) -> Reply:
    found = call.repo.rules_for(call.args["branch"])
    source = {"ruleset_source_type": "Repository", "ruleset_id": 1}
    return paginated(call, [{"type": rule, **source} for rule in found])


@GITHUB("GET", "/repos/{owner}/{name}/git/ref/{ref+}", "contents:read")
def get_ref(call: Call) -> Reply:
    ref = f"refs/{call.args['ref']}"
    sha = call.repo.refs.get(ref)
    if sha is None:
        raise Refused(404, "Not Found")
    url = f"{call.base}/repos/{call.repo.full_name}/git"
    target = {"sha": sha, "type": "commit", "url": f"{url}/commits/{sha}"}
    shape = {"ref": ref, "node_id": ref, "url": f"{url}/{ref}", "object": target}
    return json_reply(200, shape)


@GITHUB("GET", "/repos/{owner}/{name}/issues/{number}", "issues|pull_requests:read")
def get_issue(call: Call) -> Reply:
    return json_reply(200, issue_json(call.base, call.repo, call.item()))


@GITHUB(
    "GET", "/repos/{owner}/{name}/issues/{number}/labels", "issues|pull_requests:read"
)
def get_labels(call: Call) -> Reply:
    names = call.item().labels
    return paginated(call, [label_json(call.base, call.repo, n) for n in names])


@GITHUB(
    "GET", "/repos/{owner}/{name}/issues/{number}/comments", "issues|pull_requests:read"
)
def get_comments(call: Call) -> Reply:
    comments = call.repo.comments_on(call.item().number)
    return paginated(call, [comment_json(call.base, call.repo, c) for c in comments])


@GITHUB(
    "POST",
    "/repos/{owner}/{name}/issues/{number}/comments",
    "issues|pull_requests:write",
)
def post_comment(call: Call) -> Reply:
    item = call.item()
    body = call.text(call.body(), "body", _BODY_MAX, "IssueComment")
    if not body or not body.strip():
        raise _invalid("IssueComment", code="missing_field", field="body")
    comment = call.repo.add_comment(item.number, body, call.caller)
    item.updated_at = comment.created_at
    shape = comment_json(call.base, call.repo, comment)
    return json_reply(201, shape, Location=str(shape["url"]))


@GITHUB("GET", "/repos/{owner}/{name}/issues/events", "issues:read")
def get_issue_events(call: Call) -> Reply:
    """Newest first, and with no other choice."""
    events = sorted(call.repo.events, key=lambda event: -event.id)
    return paginated(call, [event_json(call.base, call.repo, e) for e in events])


@GITHUB("GET", "/repos/{owner}/{name}/issues/comments", "issues|pull_requests:read")
def get_all_comments(call: Call) -> Reply:
    """By id unless ``sort`` says else; ``since`` is about the last change."""
    query = call.request.query
    since = query.get("since", "")
    rows = [c for c in call.repo.comments if iso_time(c.updated_at) >= since]
    by = query.get("sort")
    if by in ("created", "updated"):
        down = query.get("direction", "desc") == "desc"
        rows.sort(key=lambda c: (getattr(c, f"{by}_at"), c.id), reverse=down)
    return paginated(call, [comment_json(call.base, call.repo, c) for c in rows])


@GITHUB("GET", "/repos/{owner}/{name}/pulls/{number}/reviews", "pull_requests:read")
def get_reviews(call: Call) -> Reply:
    number = call.pull().number
    rows = [review for review in call.repo.reviews if review.number == number]
    return paginated(call, [review_json(call.base, call.repo, r) for r in rows])


@GITHUB("GET", "/repos/{owner}/{name}/activity", "contents:read")
def get_activity(call: Call) -> Reply:
    """Newest first; the pages of the real one are found by its Link header."""
    ref = call.request.query.get("ref", "")
    full = ref if not ref or ref.startswith("refs/") else f"refs/heads/{ref}"
    rows = [noted for noted in call.repo.activity if full in ("", noted.ref)]
    rows.reverse()
    size = max(1, min(100, _number(call.request.query, "per_page", 30)))
    shapes = [activity_json(call.base, call.repo, noted) for noted in rows[:size]]
    return json_reply(200, shapes)


@GITHUB("GET", "/repos/{owner}/{name}/pulls", "pull_requests:read")
def get_pulls(call: Call) -> Reply:
    query = call.request.query
    by = "updated_at" if query.get("sort") == "updated" else "created_at"
    pulls = sorted(
        call.repo.pulls.values(), key=lambda p: (getattr(p, by), p.number), reverse=True
    )
    down = "asc" if by == "updated_at" else "desc"
    if query.get("direction", down) == "asc":
        pulls.reverse()
    rows = [pull for pull in pulls if _pull_selected(pull, query)]
    return paginated(call, [pull_json(call.base, call.repo, pull) for pull in rows])


def _pull_selected(pull: Pull, query: Mapping[str, str]) -> bool:
    head = query.get("head", "")
    # GitHub ignores a head without an owner instead of refusing it.
    if ":" in head and head != f"{pull.head_owner}:{pull.head}":
        return False
    if query.get("base", pull.base) != pull.base:
        return False
    return query.get("state", "open") in ("all", pull.state)


@GITHUB("POST", "/repos/{owner}/{name}/pulls", "pull_requests:write")
def post_pull(call: Call) -> Reply:
    shape = call.body()
    for name in ("head", "base"):
        if not isinstance(shape.get(name), str):
            raise Refused(422, f'Invalid request.\n\n"{name}" wasn\'t supplied.')
    title = call.text(shape, "title", _TITLE_MAX, "PullRequest")
    body = call.text(shape, "body", _BODY_MAX, "PullRequest")
    if not title or not title.strip():
        raise _invalid("PullRequest", code="missing_field", field="title")
    head = _checked_head(call.repo, str(shape["head"]), str(shape["base"]))
    pull = call.repo.open_pull(
        head=head,
        title=title,
        body=body,
        base=str(shape["base"]),
        user=call.caller,
        draft=bool(shape.get("draft")),
    )
    made = pull_detail_json(call.base, call.repo, pull)
    return json_reply(201, made, Location=str(made["url"]))


def _checked_head(repo: Repo, head: str, base: str) -> str:
    """The branch that may be requested onto ``base``, or GitHub's reason against."""
    owner, _, branch = head.rpartition(":")
    tip, target = repo.branch(branch), repo.branch(base)
    if tip is None or owner not in ("", repo.owner):
        raise _invalid("PullRequest", field="head", code="invalid")
    if target is None:
        raise _invalid("PullRequest", field="base", code="invalid")
    problem = ""
    if any(
        (p.head, p.head_owner, p.base, p.state) == (branch, repo.owner, base, "open")
        for p in repo.pulls.values()
    ):
        problem = f"A pull request already exists for {repo.owner}:{branch}."
    elif not repo.git.related(target, tip):
        problem = f"The {branch} branch has no history in common with {base}"
    elif not repo.git.count(target, tip):
        problem = f"No commits between {base} and {branch}"
    if problem:
        raise _invalid("PullRequest", code="custom", message=problem)
    return branch


@GITHUB("GET", "/repos/{owner}/{name}/pulls/{number}", "pull_requests:read")
def get_pull(call: Call) -> Reply:
    return json_reply(200, pull_detail_json(call.base, call.repo, call.pull()))


@GITHUB("PATCH", "/repos/{owner}/{name}/pulls/{number}", "pull_requests:write")
def patch_pull(call: Call) -> Reply:
    pull, shape = call.pull(), call.body()
    title = call.text(shape, "title", _TITLE_MAX, "PullRequest")
    body = call.text(shape, "body", _BODY_MAX, "PullRequest")
    state = shape.get("state", pull.state)
    if state == "open" and call.repo.branch(pull.head) is None:
        message = "state cannot be changed. The head branch was deleted."
        raise _invalid("PullRequest", code="custom", field="state", message=message)
    pull.title = title or pull.title
    pull.body = body if "body" in shape else pull.body
    pull.updated_at = call.data.accounts.clock()
    if state == "closed" and pull.state == "open":
        call.repo.close(pull, call.caller)
    if state == "open" and pull.state == "closed":
        call.repo.add_event(pull.number, "reopened", call.caller)
    pull.state = state
    call.repo.sync_pulls()
    return json_reply(200, pull_detail_json(call.base, call.repo, pull))


@GITHUB(
    "GET", "/repos/{owner}/{name}/collaborators/{login}/permission", "metadata:read"
)
def get_permission(call: Call) -> Reply:
    assert call.token is not None
    if not call.token.may("contents", "write"):
        raise Refused(403, "Must have push access to view collaborator permission.")
    user = call.data.accounts.users.get(call.args["login"])
    if user is None:
        raise Refused(404, "Not Found")
    nothing = "none" if call.repo.private else "read"
    role = call.repo.collaborators.get(user.login, nothing)
    shape = {
        "permission": _PERMISSION_OF_ROLE.get(role, role),
        "role_name": role,
        "user": user_json(call.base, user),
    }
    return json_reply(200, shape)


@GITHUB("GET", "/app", "app")
def get_app(call: Call) -> Reply:
    app = _app(call)
    shape = {
        "id": app.id,
        "slug": app.slug,
        "name": app.slug,
        "node_id": _node_id("Integration", app.id),
        "permissions": dict(app.permissions),
        "events": ["issues", "issue_comment", "pull_request"],
    }
    return json_reply(200, shape)


@GITHUB("GET", "/repos/{owner}/{name}/installation", "app")
def get_installation(call: Call) -> Reply:
    app = _app(call)
    if f"{call.args['owner']}/{call.args['name']}" not in app.repositories:
        raise Refused(404, "Not Found")
    owner = call.data.accounts.user(call.args["owner"])
    shape = {
        "id": app.installation_id,
        "account": user_json(call.base, owner),
        "app_id": app.id,
        "app_slug": app.slug,
        "repository_selection": "selected",
        "permissions": dict(app.permissions),
        "access_tokens_url": f"{call.base}/app/installations/"
        f"{app.installation_id}/access_tokens",
    }
    return json_reply(200, shape)


@GITHUB("POST", "/app/installations/{number}/access_tokens", "app")
def post_access_token(call: Call) -> Reply:
    app = _app(call)
    if int(call.args["number"]) != app.installation_id:
        raise Refused(404, "Not Found")
    shape = call.body()
    wanted = _wanted_repositories(call, app, shape)
    permissions = dict(shape.get("permissions") or app.permissions)
    for name, level in permissions.items():
        if app.permissions.get(name) not in (level, "write"):
            raise Refused(
                422, "The permissions requested are not granted to this installation."
            )
    minted = call.data.mint(wanted, {"metadata": "read", **permissions})
    repos = [call.data.repos[name] for name in sorted(wanted & call.data.repos.keys())]
    minted["repositories"] = [repo_json(call.base, repo) for repo in repos]
    return json_reply(201, minted)


def _wanted_repositories(call: Call, app: App, shape: Json) -> frozenset[str]:
    """The repositories a token is asked for, by name or id; all when none is named."""
    names, ids = shape.get("repositories"), shape.get("repository_ids")
    if names is None and ids is None:
        return app.repositories
    reachable = [r for n, r in call.data.repos.items() if n in app.repositories]
    chosen = [r for r in reachable if r.name in (names or ()) or r.id in (ids or ())]
    if len(chosen) != len(names or ()) + len(ids or ()):
        raise Refused(
            422,
            "There is at least one repository that does not exist or is not "
            "accessible to the parent installation.",
        )
    return frozenset(repo.full_name for repo in chosen)


def _app(call: Call) -> App:
    assert call.data.app is not None
    return call.data.app


def check_app_jwt(text: str, app: App, now: float) -> None:
    """Take an App's JWT, or raise Refused(401) with GitHub's words.

    The signature is tested when the App has a public key and PyJWT is there."""
    try:
        header, claims, _ = text.split(".")
        algorithm = _jwt_part(header)["alg"]
        issuer, issued, expires = (_jwt_part(claims)[k] for k in ("iss", "iat", "exp"))
    except (ValueError, KeyError):
        raise Refused(401, "A JSON web token could not be decoded") from None
    if algorithm != "RS256" or not _signed_by(text, app):
        raise Refused(401, "A JSON web token could not be decoded")
    if str(issuer) != str(app.id):
        raise Refused(401, "Integration not found")
    if expires <= now or issued > now + 60:
        raise Refused(401, "'Expiration time' claim ('exp') must be in the future")
    if expires - now > _JWT_LIFE_MAX:
        raise Refused(401, "'Expiration time' claim ('exp') is too far in the future")


def _jwt_part(part: str) -> Json:
    value = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _signed_by(text: str, app: App) -> bool:
    if app.public_key is None:
        return True
    try:
        import jwt
    except ImportError:
        return True
    try:
        jwt.decode(text, app.public_key, ["RS256"], options={"verify_exp": False})
    except jwt.InvalidTokenError:
        return False
    return True


# ---------------------------------------------------------------------------
# forge
#
# The server: who asks, whether they may, which route; git beside the API; the log.
# It behaves like an instance in private mode: nothing is shown without a credential.
# ---------------------------------------------------------------------------


class Logged(NamedTuple):
    """One request: when, what, how it ended, and with which token (its name)."""

    t: float
    method: str
    path: str
    status: int
    token: str | None


class FakeForge(FakeServer):
    """A forge on a local port, API and git, for the repositories it is given.

    What it holds is in ``data`` and the `Repo` objects; ``log`` has every request.
    A dialect names its routes, the paths of its API and of git, and its errors."""

    kind: ClassVar[str]
    routes: ClassVar[Routes]
    api_prefixes: ClassVar[tuple[str, ...]]
    git_path: ClassVar[re.Pattern[str]]
    realm: ClassVar[str]
    data_type: ClassVar[type[ForgeData]] = ForgeData
    #: What a rule about issues must say besides, to serve the repository `spoon`.
    run_fields: ClassVar[Mapping[str, str]] = {}
    request_ref: ClassVar[str] = "refs/pull/{n}/head"
    apart: ClassVar[bool] = False

    def __init__(
        self,
        tokens: Iterable[Token] = (),
        app: App | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        root: Path | None = None,
        clock: Callable[[], float] = time.time,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(host, port, clock, tls)
        self._own_root = None if root else tempfile.mkdtemp(prefix="fake-forge-")
        self.root = root or Path(str(self._own_root))
        accounts = Accounts(clock, self.root, self.url)
        self.data = self.data_type(accounts, tokens, app)
        self.log: list[Logged] = []

    def stop(self) -> None:
        """Stop, and remove the repositories when their place was our own choice."""
        super().stop()
        if self._own_root:
            shutil.rmtree(self._own_root, ignore_errors=True)

    @property
    def repos(self) -> dict[str, Repo]:
        """The repositories by full name."""
        return self.data.repos

    def create_repo(
        self,
        full_name: str,
        files: Mapping[str, str | bytes | None] | None = None,
        default_branch: str = "main",
        private: bool = False,
        issues: Mapping[int, Mapping[str, Any]] | None = None,
        collaborators: Mapping[str, str] | None = None,
        protected: Sequence[str] = (),
    ) -> Repo:
        """Make a repository with one commit of ``files`` and these issues.

        ``issues`` maps a number to the keyword arguments of `Repo.add_issue`,
        ``collaborators`` a login to its permission."""
        like = (self.request_ref, self.apart)
        repo = Repo(self.data.accounts, full_name, default_branch, private, *like)
        self.data.repos[full_name] = repo
        repo.commit(default_branch, files or {"README.md": "# Sample\n"}, "Begin")
        for number, fields in (issues or {}).items():
            repo.add_issue(number, **fields)
        for login, permission in (collaborators or {}).items():
            repo.add_collaborator(login, permission)
        for branch in protected:
            repo.protect(branch)
        return repo

    def requests(self, method: str = "*", path_regex: str = "") -> list[Logged]:
        """The logged requests of a method whose path matches."""
        return [
            row
            for row in self.log
            if method in ("*", row.method) and re.search(path_regex, row.path)
        ]

    def answer(self, request: Request) -> Reply:
        """Route to git or the API."""
        git = self.git_path.fullmatch(request.path)
        return self._git(request, git) if git else self._api(request)

    def error_reply(self, request: Request, status: int, message: str) -> Reply:
        """An ordered fault in the forge's shape."""
        return self.refused(Refused(status, message))

    def credential(self, request: Request) -> str:
        """The token a request came with, else nothing."""
        return _credential(request)

    def repo_name(self, args: Mapping[str, str]) -> str | None:
        """The repository that a path names: an API's or git's."""
        return f"{args['owner']}/{args['name']}" if "owner" in args else None

    def refused(self, refusal: Refused) -> Reply:
        """An error in the forge's own shape."""
        raise NotImplementedError

    def admit(self, call: Call, needs: str) -> None:
        """Raise unless the credential of the call holds and covers ``needs``."""
        raise NotImplementedError

    def sent(self, token: Token | None, reply: Reply) -> Reply:
        """An answer of the API with what the forge puts on every one."""
        return reply

    def delivery_id(self, guid: str) -> str:
        """The delivery's id as a receiver reads it."""
        return guid

    def label(
        self, repo: Repo, number: int, label: str, login: str, secret: str, guid: str
    ) -> tuple[dict[str, str], bytes]:
        """Put a label on an issue as ``login``; the delivery that tells of it."""
        raise NotImplementedError

    def end(
        self, repo: Repo, number: int, how: str, login: str, secret: str, guid: str
    ) -> tuple[dict[str, str], bytes]:
        """A request is ``merged``, ``closed`` or ``reopened``; the delivery of it."""
        raise NotImplementedError

    def remark(
        self,
        repo: Repo,
        number: int,
        text: str,
        login: str,
        secret: str,
        guid: str,
        request: bool = False,
    ) -> tuple[dict[str, str], bytes]:
        """Comment on an issue or, with ``request``, on a review request."""
        raise NotImplementedError

    def note(self, request: Request, reply: Reply) -> None:
        """Write the log line; a token appears by its name only."""
        token = self.data.tokens.get(self.credential(request))
        name = (token.name or token.login) if token else None
        row = Logged(self.clock(), request.method, request.path, reply.status, name)
        self.log.append(row)

    def _git(self, request: Request, match: re.Match[str]) -> Reply:
        token = self.data.token(self.credential(request))
        if token is None:
            challenge = {"WWW-Authenticate": f'Basic realm="{self.realm}"'}
            return Reply(401, b"Repository not found.\n", challenge)
        args = {n: urllib.parse.unquote(v or "") for n, v in match.groupdict().items()}
        full_name = self.repo_name(args) or ""
        repo = self.data.repo(full_name, token)
        plain = {"Content-Type": "text/plain; charset=UTF-8"}
        if repo is None:
            return Reply(404, b"Repository not found.\n", plain)
        service = request.query.get("service", match["operation"])
        writes = service == "git-receive-pack"
        level = "write" if writes else "read"
        if not token.may("contents", level) or (
            writes and not token.reaches(full_name)
        ):
            text = f"Permission to {full_name}.git denied to {token.login}.\n"
            return Reply(403, text.encode(), plain)
        # The hook costs a Python start: it runs only where it could refuse.
        hooked = repo.protected or not token.may("workflows", "write")
        scope = f"{token.kind} {token.permissions.get('workflows')}" if hooked else ""
        operation = match["operation"]
        reply = serve_git(repo.git.path, operation, request, token.login, scope)
        if operation == "git-receive-pack":
            with self.lock:
                repo.sync_pulls(token.login)
        return reply

    def _api(self, request: Request) -> Reply:
        token = self.data.token(self.credential(request))
        with self.lock:
            try:
                reply = _with_etag(request, self._called(request, token))
            except Refused as refusal:
                reply = self.refused(refusal)
            return self.sent(token, reply)

    def _called(self, request: Request, token: Token | None) -> Reply:
        inside = (p for p in self.api_prefixes if request.path.startswith(p + "/"))
        prefix = next(inside, None)
        if prefix is None:
            raise Refused(404, "Not Found")
        row, args = self.routes.find(request.method, request.path.removeprefix(prefix))
        host = request.headers.get("host", f"{self.host}:{self.port}")
        base, name = f"{self.scheme}://{host}{prefix}", self.repo_name(args)
        call = Call(self.data, request, base, token, args, name)
        self.admit(call, row.needs)
        return row.function(call)

    def control(self, what: str, value: Any) -> object:
        """How a forge in a container is steered and looked into."""
        if what == "GET log":
            return [row._asdict() for row in self.log]
        if what == "GET state":
            return {name: _state(repo) for name, repo in self.repos.items()}
        if what == "POST repos":
            issues = {int(n): i for n, i in value.pop("issues", {}).items()}
            return repo_json(self.url, self.create_repo(**value, issues=issues))
        if what == "POST payload":
            builder, repo = PAYLOADS[value.pop("event")], self.repos[value.pop("repo")]
            return builder(repo, **value)
        raise LookupError(what)


class FakeGitHub(FakeForge):
    """A GitHub: REST at the root and under /api/v3, git at /{owner}/{repo}.git."""

    kind = "github"
    routes = GITHUB
    api_prefixes = ("/api/v3", "")
    git_path = re.compile(
        r"/(?P<owner>[^/]+)/(?P<name>[^/]+?)(\.git)?"
        r"/(?P<operation>info/refs|git-upload-pack|git-receive-pack)"
    )
    realm = "GitHub"

    def label(
        self, repo: Repo, number: int, label: str, login: str, secret: str, guid: str
    ) -> tuple[dict[str, str], bytes]:
        """An ``issues`` delivery, action ``labeled``."""
        payload = labeled_payload(repo, number, label, login)
        return signed_delivery("issues", payload, secret, guid)

    def end(
        self, repo: Repo, number: int, how: str, login: str, secret: str, guid: str
    ) -> tuple[dict[str, str], bytes]:
        """A ``pull_request`` delivery; a merge is a ``closed`` that says so."""
        repo.pulls[number].merged = how == "merged"
        action = how.replace("merged", "closed")
        payload = pull_request_payload(repo, number, action, login)
        return signed_delivery("pull_request", payload, secret, guid)

    def remark(
        self,
        repo: Repo,
        number: int,
        text: str,
        login: str,
        secret: str,
        guid: str,
        request: bool = False,
    ) -> tuple[dict[str, str], bytes]:
        """An ``issue_comment`` delivery: a pull request is an issue as well."""
        payload = comment_payload(repo, number, text, login)
        return signed_delivery("issue_comment", payload, secret, guid)

    def refused(self, refusal: Refused) -> Reply:
        """An error in GitHub's shape."""
        shape: Json = {"message": refusal.message}
        if refusal.errors:
            shape["errors"] = list(refusal.errors)
        shape |= {"documentation_url": _DOCUMENTATION, "status": str(refusal.status)}
        return json_reply(refusal.status, shape)

    def admit(self, call: Call, needs: str) -> None:
        """Raise 401 without a valid token, 403 when its hour is used up, and what
        `_check_permission` says."""
        if needs == "app":
            self._check_app(call.request)
            return
        if call.token is None:
            given = _credential(call.request)
            anonymous = "Must authenticate to access this API."
            raise Refused(401, "Bad credentials" if given else anonymous)
        used = self.data.rate_used.get(call.token.value, 0)
        if used >= self.data.rate_limit and call.request.path != "/rate_limit":
            number = self.data.accounts.user(call.token.login).id
            raise Refused(403, f"API rate limit exceeded for user ID {number}.")
        if call.full_name:
            _check_permission(call, call.token, needs)

    def _check_app(self, request: Request) -> None:
        if self.data.app is None:
            raise Refused(404, "Not Found")
        check_app_jwt(_credential(request), self.data.app, self.clock())

    def sent(self, token: Token | None, reply: Reply) -> Reply:
        """Count a request against its token's hour; a 304 is free (as on GitHub)."""
        key = token.value if token else "app"
        free = reply.status == 304
        used = self.data.rate_used.get(key, 0) + (0 if free else 1)
        self.data.rate_used[key] = used
        used = min(used, self.data.rate_limit)
        reply.headers |= {
            "X-RateLimit-Limit": str(self.data.rate_limit),
            "X-RateLimit-Remaining": str(self.data.rate_limit - used),
            "X-RateLimit-Used": str(used),
            "X-RateLimit-Reset": str(_rate_reset(self.data)),
            "X-RateLimit-Resource": "core",
            "X-GitHub-Media-Type": "github.v3; format=json",
        }
        if token and token.kind == "pat":
            reply.headers["X-OAuth-Scopes"] = "repo, workflow"
        return reply


GITLAB = Routes()
_ACCESS_LEVELS = {"admin": 50, "maintain": 40, "write": 30, "triage": 15, "read": 10}
_DRAFT = re.compile(r"(?i)\s*(\[draft\]|\(draft\)|draft:)")
_QUICK_ACTION = re.compile(r"(?m)^/(?P<name>close|merge|label)\b *(?P<rest>.*)$\n?")


def gitlab_time(seconds: float) -> str:
    """A time as GitLab's webhooks mostly write it."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def gitlab_user_json(base: str, user: User) -> Json:
    """An account."""
    shape = {"id": user.id, "username": user.login, "name": user.login}
    site = base.removesuffix("/api/v4")
    return shape | {"state": "active", "web_url": f"{site}/{user.login}"}


def gitlab_project_json(base: str, repo: Repo) -> Json:
    """A project."""
    site = base.removesuffix("/api/v4")
    return {
        "id": repo.id,
        "name": repo.name,
        "path": repo.name,
        "path_with_namespace": repo.full_name,
        "default_branch": repo.default_branch,
        "visibility": "private" if repo.private else "public",
        "http_url_to_repo": f"{site}/{repo.full_name}.git",
        "web_url": f"{site}/{repo.full_name}",
        "created_at": iso_time(repo.created_at),
    }


def gitlab_item_json(base: str, repo: Repo, item: Issue) -> Json:
    """An issue or a merge request, as the API gives it."""
    site = f"{base.removesuffix('/api/v4')}/{repo.full_name}"
    request = isinstance(item, Pull)
    kind = "merge_requests" if request else "issues"
    state = {"open": "opened"}.get(item.state, item.state)
    shape = {
        "id": item.id,
        "iid": item.number,
        "project_id": repo.id,
        "title": item.title,
        "description": item.body,
        "state": state,
        "labels": list(item.labels),
        "author": gitlab_user_json(base, repo.accounts.user(item.user)),
        "created_at": iso_time(item.created_at),
        "updated_at": iso_time(item.updated_at),
        "closed_at": _iso_or_none(item.closed_at),
        "user_notes_count": len(repo.comments_on(item.number, request)),
        "web_url": f"{site}/-/{kind}/{item.number}",
    }
    if not isinstance(item, Pull):
        return shape | {"confidential": item.confidential, "issue_type": "issue"}
    if item.merged:
        shape["state"] = "merged"
    return shape | _merge_request_part(repo, item)


def _source_id(repo: Repo, pull: Pull) -> int | None:
    """The project of the head: this one, a fork, or none when that is deleted."""
    if pull.head_owner in (repo.owner, ""):
        return repo.id if pull.head_owner else None
    return repo.id + 500_000


def _merge_request_part(repo: Repo, pull: Pull) -> Json:
    draft = bool(_DRAFT.match(pull.title))
    return {
        "source_branch": pull.head,
        "target_branch": pull.base,
        "source_project_id": _source_id(repo, pull),
        "target_project_id": repo.id,
        "draft": draft,
        "work_in_progress": draft,
        "sha": pull.head_sha,
        "merge_status": "checking",
    }


def gitlab_note_json(base: str, repo: Repo, comment: Comment) -> Json:
    """A note of the conversation."""
    return {
        "id": comment.id,
        "body": comment.body,
        "author": gitlab_user_json(base, repo.accounts.user(comment.user)),
        "created_at": iso_time(comment.created_at),
        "updated_at": iso_time(comment.updated_at),
        "system": False,
        "noteable_iid": comment.number,
        "noteable_type": "MergeRequest" if comment.request else "Issue",
        "internal": False,
    }


def _gitlab_label(name: str) -> Json:
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return {"id": number, "title": name, "type": "ProjectLabel"}


def _gitlab_payload(repo: Repo, kind: str, sender: str) -> Json:
    base = f"{repo.accounts.base}/api/v4"
    user = gitlab_user_json(base, repo.accounts.user(sender))
    user |= {"email": "[REDACTED]"}
    project = gitlab_project_json(base, repo)
    return {
        "object_kind": kind,
        "event_type": kind,
        "user": user,
        "project": project,
        "repository": {"name": repo.name, "homepage": project["web_url"]},
    }


def _gitlab_attributes(repo: Repo, item: Issue) -> Json:
    """An issue or merge request, as a webhook gives it."""
    shape = gitlab_item_json(f"{repo.accounts.base}/api/v4", repo, item)
    shape |= {"author_id": shape.pop("author")["id"], "url": shape.pop("web_url")}
    shape["labels"] = [_gitlab_label(name) for name in item.labels]
    for name in ("created_at", "updated_at"):
        shape[name] = gitlab_time(getattr(item, name))
    if isinstance(item, Pull):
        path = f"{item.head_owner}/{repo.name}"
        shape["source"] = {"path_with_namespace": path} if item.head_owner else None
        shape["target"] = {"path_with_namespace": repo.full_name}
        shape["last_commit"] = {"id": item.head_sha}
    return shape


def gitlab_payload(
    repo: Repo,
    number: int,
    action: str,
    sender: str,
    label: str | None = None,
    request: bool = False,
    **changes: Any,
) -> Json:
    """An ``issue`` delivery or, with ``request``, a ``merge_request`` one.

    With ``label`` that label is put on; ``close`` and ``reopen`` change the state.
    ``changes`` are the changed fields of an ``update``."""
    item = repo.item(number, request)
    if item is None:
        raise ValueError(f"{repo.full_name} has no such item: {number}")
    item.updated_at = repo.accounts.clock()
    before = [_gitlab_label(name) for name in item.labels]
    if label is not None and label not in item.labels:
        item.labels.append(label)
        now = [_gitlab_label(name) for name in item.labels]
        changes = {"labels": {"previous": before, "current": now}, **changes}
    if action in ("close", "merge", "reopen"):
        item.state = "open" if action == "reopen" else "closed"
    payload = _gitlab_payload(repo, "merge_request" if request else "issue", sender)
    payload["object_attributes"] = _gitlab_attributes(repo, item) | {"action": action}
    payload["labels"] = [_gitlab_label(name) for name in item.labels]
    payload["changes"] = changes
    return payload


def gitlab_note_payload(
    repo: Repo,
    number: int,
    body: str,
    sender: str,
    request: bool = False,
    internal: bool = False,
) -> Json:
    """A ``note`` delivery; the note is there from then on."""
    item = repo.item(number, request)
    if item is None:
        raise ValueError(f"{repo.full_name} has no such item: {number}")
    comment = repo.add_comment(number, body, sender, request)
    payload = _gitlab_payload(repo, "note", sender)
    kind = "merge_request" if request else "issue"
    payload[kind] = _gitlab_attributes(repo, item)
    payload["object_attributes"] = {
        "id": comment.id,
        "note": body,
        "noteable_type": "MergeRequest" if request else "Issue",
        "noteable_id": item.id,
        "author_id": payload["user"]["id"],
        "created_at": gitlab_time(comment.created_at),
        "updated_at": gitlab_time(comment.updated_at),
        "system": False,
        "internal": internal,
        "action": "create",
    }
    if internal:
        payload["event_type"] = "confidential_note"
    return payload


def gitlab_delivery(
    payload: Json, secret: str, guid: str, when: float | None = None
) -> tuple[dict[str, str], bytes]:
    """Headers and body of a delivery: signed at ``when`` (unix seconds) by a signing
    token, else with the secret token in plain (19.0 and 17.4)."""
    body = json.dumps(payload, separators=(",", ":"), ensure_ascii=False).encode()
    kind = str(payload.get("event_type", payload["object_kind"]))
    hidden = "Confidential " if kind.startswith("confidential") else ""
    name = kind.removeprefix("confidential_").replace("work_item", "issue")
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "GitLab/19.1.0",
        "X-Gitlab-Event": f"{hidden}{name.replace('_', ' ').title()} Hook",
        "X-Gitlab-Event-UUID": secrets.token_hex(16),
        "Idempotency-Key": guid,
        "webhook-id": guid,
        "webhook-timestamp": str(int(time.time() if when is None else when)),
    }
    if not secret.startswith("whsec_"):
        return headers | {"X-Gitlab-Token": secret}, body
    key = base64.b64decode(secret.removeprefix("whsec_"))
    text = f"{guid}.{headers['webhook-timestamp']}.".encode() + body
    mac = hmac.new(key, text, "sha256").digest()
    return headers | {"webhook-signature": f"v1,{base64.b64encode(mac).decode()}"}, body


def gitlab_page(call: Call, rows: Sequence[Json]) -> Reply:
    """One page of a list with GitLab's headers (20 a page, at most 100)."""
    query = call.request.query
    size = max(1, min(100, _number(query, "per_page", 20)))
    page = max(1, _number(query, "page", 1))
    more = len(rows) > page * size
    reply = json_reply(200, rows[(page - 1) * size : page * size])
    following = {"X-Per-Page": str(size), "X-Page": str(page), "X-Next-Page": ""}
    if more:
        url = call.base + call.request.path.removeprefix("/api/v4")
        asked = urllib.parse.urlencode({**query, "page": page + 1})
        following |= {"X-Next-Page": str(page + 1)}
        following |= {"Link": f'<{url}?{asked}>; rel="next"'}
    reply.headers |= following
    return reply


@GITLAB("GET", "/user")
def gitlab_user(call: Call) -> Reply:
    user = call.data.accounts.user(call.caller)
    return json_reply(200, gitlab_user_json(call.base, user))


@GITLAB("GET", "/projects/{project}", "metadata:read")
def gitlab_project(call: Call) -> Reply:
    return json_reply(200, gitlab_project_json(call.base, call.repo))


@GITLAB("GET", "/projects/{project}/members/all/{number}", "metadata:read")
def gitlab_member(call: Call) -> Reply:
    number, people = int(call.args["number"]), call.data.accounts.users.values()
    user = next((user for user in people if user.id == number), None)
    role = call.repo.collaborators.get(user.login, "none") if user else "none"
    if user is None or role not in _ACCESS_LEVELS:
        raise Refused(404, "404 Not found")
    level = {"access_level": _ACCESS_LEVELS[role], "membership_state": "active"}
    return json_reply(200, gitlab_user_json(call.base, user) | level)


@GITLAB("GET", "/projects/{project}/repository/branches/{branch}", "contents:read")
def gitlab_branch(call: Call) -> Reply:
    name = call.args["branch"]
    sha = call.repo.branch(name)
    if sha is None:
        raise Refused(404, "404 Branch Not Found")
    protected = call.repo.is_protected(name)
    shape = {"name": name, "commit": {"id": sha}, "protected": protected}
    shape |= {"developers_can_push": False, "can_push": not protected}
    return json_reply(200, shape | {"default": name == call.repo.default_branch})


def _gitlab_item(call: Call) -> Issue:
    request = {"merge_requests": True, "issues": False}.get(call.args["kind"])
    found = call.repo.item(int(call.args["number"]), request)
    if found is None or request is None:
        raise Refused(404, "404 Not found")
    return found


@GITLAB("GET", "/projects/{project}/{kind}/{number}", "issues|pull_requests:read")
def gitlab_item(call: Call) -> Reply:
    return json_reply(200, gitlab_item_json(call.base, call.repo, _gitlab_item(call)))


@GITLAB("GET", "/projects/{project}/{kind}/{number}/notes", "issues:read")
def gitlab_notes(call: Call) -> Reply:
    item = _gitlab_item(call)
    notes = call.repo.comments_on(item.number, isinstance(item, Pull))
    rows = [gitlab_note_json(call.base, call.repo, note) for note in reversed(notes)]
    return gitlab_page(call, rows)


@GITLAB("POST", "/projects/{project}/{kind}/{number}/notes", "issues:write")
def gitlab_post_note(call: Call) -> Reply:
    item = _gitlab_item(call)
    text = call.body().get("body")
    if not isinstance(text, str) or not text.strip():
        raise Refused(400, "400 Bad request - Note can't be blank")
    left = _obey(item, text)
    if not left.strip():
        return json_reply(202, {"commands_changes": {}, "summary": ["Applied."]})
    note = call.repo.add_comment(item.number, left, call.caller, isinstance(item, Pull))
    return json_reply(201, gitlab_note_json(call.base, call.repo, note))


def _obey(item: Issue, text: str) -> str:
    """Do what the quick actions in a text say; the text without them."""
    for action in _QUICK_ACTION.finditer(text):
        if action["name"] == "merge" and isinstance(item, Pull):
            item.merged, item.state = True, "closed"
        elif action["name"] == "close":
            item.state = "closed"
        elif action["name"] == "label":
            item.labels.append(action["rest"].lstrip("~"))
    return _QUICK_ACTION.sub("", text)


@GITLAB("GET", "/projects/{project}/merge_requests", "pull_requests:read")
def gitlab_merge_requests(call: Call) -> Reply:
    query = call.request.query
    state = {"opened": "open"}.get(query.get("state", "all"), query.get("state", "all"))
    rows = [
        gitlab_item_json(call.base, call.repo, pull)
        for pull in sorted(call.repo.pulls.values(), key=lambda p: -p.number)
        if state in ("all", pull.state)
        and query.get("source_branch", pull.head) == pull.head
    ]
    return gitlab_page(call, rows)


@GITLAB("POST", "/projects/{project}/merge_requests", "pull_requests:write")
def gitlab_post_merge_request(call: Call) -> Reply:
    shape, repo = call.body(), call.repo
    head, base = str(shape.get("source_branch")), str(shape.get("target_branch"))
    for pull in repo.pulls.values():
        same = (pull.head, pull.head_owner, pull.base) == (head, repo.owner, base)
        if same and pull.state == "open":
            text = "Another open merge request already exists for this source branch"
            raise Refused(409, f"{text}: !{pull.number}")
    if repo.branch(head) is None or repo.branch(base) is None:
        raise Refused(400, "Source or target branch does not exist")
    title = str(shape.get("title") or "")
    if not title.strip() or len(title) > 255:
        raise Refused(400, "title is missing or too long (maximum is 255 characters)")
    made = repo.open_pull(head, title, shape.get("description"), base, call.caller)
    made.body = _obey(made, made.body or "")
    return json_reply(201, gitlab_item_json(call.base, repo, made))


@GITLAB("PUT", "/projects/{project}/merge_requests/{number}", "pull_requests:write")
def gitlab_put_merge_request(call: Call) -> Reply:
    pull, shape = call.pull(), call.body()
    pull.title = shape.get("title") or pull.title
    if shape.get("state_event") == "close":
        call.repo.close(pull)
    return json_reply(200, gitlab_item_json(call.base, call.repo, pull))


class FakeGitLab(FakeForge):
    """A GitLab: REST under /api/v4, git at /{group}/…/{project}.git."""

    kind = "gitlab"
    routes = GITLAB
    api_prefixes = ("/api/v4",)
    git_path = re.compile(
        r"/(?P<project>.+?)(\.git)?"
        r"/(?P<operation>info/refs|git-upload-pack|git-receive-pack)"
    )
    realm = "GitLab"
    request_ref = "refs/merge-requests/{n}/head"
    apart = True

    def credential(self, request: Request) -> str:
        """A PRIVATE-TOKEN header, else as everywhere."""
        return request.headers.get("private-token") or super().credential(request)

    def repo_name(self, args: Mapping[str, str]) -> str | None:
        """A path with namespace, or a project's id."""
        project = args.get("project")
        by_id = {str(repo.id): name for name, repo in self.repos.items()}
        return by_id.get(project or "", project)

    def refused(self, refusal: Refused) -> Reply:
        """An error in GitLab's shape."""
        return json_reply(refusal.status, {"message": refusal.message})

    def admit(self, call: Call, needs: str) -> None:
        """Raise 401 without a valid token, 404 out of sight, 403 without the right."""
        if call.token is None:
            raise Refused(401, "401 Unauthorized")
        if call.full_name is None:
            return
        if self.data.repo(call.full_name, call.token) is None:
            raise Refused(404, "404 Project Not Found")
        names, _, level = needs.partition(":")
        if not any(call.token.may(name, level) for name in names.split("|")):
            raise Refused(403, "403 Forbidden")

    def label(
        self, repo: Repo, number: int, label: str, login: str, secret: str, guid: str
    ) -> tuple[dict[str, str], bytes]:
        """An ``issue`` delivery, action ``update``, with the label in ``changes``."""
        payload = gitlab_payload(repo, number, "update", login, label)
        return gitlab_delivery(payload, secret, guid, self.clock())

    def end(
        self, repo: Repo, number: int, how: str, login: str, secret: str, guid: str
    ) -> tuple[dict[str, str], bytes]:
        """A ``merge_request`` delivery: ``merge``, ``close`` or ``reopen``."""
        action = {"merged": "merge", "closed": "close", "reopened": "reopen"}[how]
        repo.pulls[number].merged = how == "merged"
        payload = gitlab_payload(repo, number, action, login, request=True)
        return gitlab_delivery(payload, secret, guid, self.clock())

    def remark(
        self,
        repo: Repo,
        number: int,
        text: str,
        login: str,
        secret: str,
        guid: str,
        request: bool = False,
    ) -> tuple[dict[str, str], bytes]:
        """A ``note`` delivery."""
        payload = gitlab_note_payload(repo, number, text, login, request)
        return gitlab_delivery(payload, secret, guid)


def _state(repo: Repo) -> Json:
    return {
        "refs": repo.refs,
        "issues": [asdict(issue) for issue in repo.issues.values()],
        "pulls": [asdict(pull) for pull in repo.pulls.values()],
        "comments": [asdict(comment) for comment in repo.comments],
    }


def _credential(request: Request) -> str:
    """The token of a Bearer, ``token`` or Basic header (then: the password)."""
    scheme, _, rest = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() in ("bearer", "token"):
        return rest.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        pair = base64.b64decode(rest.strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return pair.partition(":")[2]


def _check_permission(call: Call, token: Token, needs: str) -> None:
    """Raise 404 for a repository out of sight, 403 for a permission not held."""
    repo = call.repo
    names, _, level = needs.partition(":")
    held = any(token.may(name, level) for name in names.split("|"))
    if not held or (level == "write" and not token.reaches(repo.full_name)):
        raise Refused(403, _INACCESSIBLE[token.kind])


def _with_etag(request: Request, reply: Reply) -> Reply:
    if request.method != "GET" or reply.status != 200:
        return reply
    tag = f'W/"{hashlib.sha256(reply.body).hexdigest()}"'
    reply.headers["ETag"] = tag
    if tag in request.headers.get("if-none-match", ""):
        reply.status, reply.body = 304, b""
    return reply


# ---------------------------------------------------------------------------
# Forgejo
#
# The dialect of Forgejo and Gitea: shapes, deliveries, API (sources of both,
# `services/convert`, `services/webhook`, `routers/api/v1/repo`). Kept are the ways in
# which it is not GitHub: comments come all at once, a page holds what the server says,
# only a repository's administrator learns permissions, `pull_request` is null on an
# issue, a second request is a 409, a change answers 201.
# ---------------------------------------------------------------------------

FORGEJO = Routes()
_FORGEJO_PAGE_MAX = 50
_NEVER = "0001-01-01T00:00:00Z"
_FORGEJO_ROLES = {"maintain": "write", "triage": "read"}


def forgejo_user(base: str, user: User) -> Json:
    """An account: nothing tells a bot."""
    return {
        "id": user.id,
        "login": user.login,
        "login_name": "",
        "full_name": "",
        "email": f"{user.login}@noreply.example",
        "avatar_url": f"{_forgejo_site(base)}/avatars/{user.id}",
        "is_admin": False,
        "last_login": _NEVER,
        "created": _NEVER,
        "username": user.login,
    }


def _forgejo_site(base: str) -> str:
    return base.removesuffix("/api/v1")


def forgejo_repo(base: str, repo: Repo) -> Json:
    """A repository; ``permissions`` are the asker's, or somebody else's."""
    page = f"{_forgejo_site(base)}/{repo.full_name}"
    return {
        "id": repo.id,
        "owner": forgejo_user(base, repo.accounts.user(repo.owner)),
        "name": repo.name,
        "full_name": repo.full_name,
        "description": "",
        "empty": False,
        "private": repo.private,
        "fork": False,
        "parent": None,
        "html_url": page,
        "clone_url": f"{page}.git",
        "default_branch": repo.default_branch,
        "archived": False,
        "created_at": iso_time(repo.created_at),
        "updated_at": iso_time(repo.created_at),
        "permissions": {"admin": True, "push": True, "pull": True},
    }


def forgejo_label(base: str, repo: Repo, name: str) -> Json:
    """A label."""
    shape = label_json(base, repo, name)
    return {n: shape[n] for n in ("id", "name", "color", "url")} | {"description": ""}


def _forgejo_item(base: str, repo: Repo, item: Issue) -> Json:
    kind = "pulls" if isinstance(item, Pull) else "issues"
    return {
        "id": item.id,
        "url": f"{base}/repos/{repo.full_name}/{kind}/{item.number}",
        "number": item.number,
        "user": forgejo_user(base, repo.accounts.user(item.user)),
        "title": item.title,
        "body": item.body or "",
        "labels": [forgejo_label(base, repo, name) for name in item.labels],
        "milestone": None,
        "assignee": None,
        "assignees": None,
        "state": item.state,
        "is_locked": False,
        "comments": len(repo.comments_on(item.number)),
        "html_url": f"{_forgejo_site(base)}/{repo.full_name}/{kind}/{item.number}",
        "created_at": iso_time(item.created_at),
        "updated_at": iso_time(item.updated_at),
        "closed_at": _iso_or_none(item.closed_at),
        "due_date": None,
    }


def forgejo_issue(base: str, repo: Repo, item: Issue) -> Json:
    """An issue, or a pull request seen as one."""
    request = isinstance(item, Pull) and {"merged": item.merged, "merged_at": None}
    where = {"id": repo.id, "name": repo.name, "owner": repo.owner}
    return _forgejo_item(base, repo, item) | {
        "repository": where | {"full_name": repo.full_name},
        "pull_request": request or None,
    }


def forgejo_pull(base: str, repo: Repo, pull: Pull) -> Json:
    """A pull request; ``head.repo`` is null once a fork was deleted."""
    head = _forgejo_side(base, repo, pull.head_owner, pull.head, pull.head_sha)
    target = _base_sha(repo, pull)
    return _forgejo_item(base, repo, pull) | {
        "draft": pull.draft,
        "mergeable": True,
        "merged": pull.merged,
        "merged_at": _iso_or_none(pull.closed_at) if pull.merged else None,
        "merge_commit_sha": None,
        "merged_by": None,
        "requested_reviewers": None,
        "merge_base": target,
        "head": head,
        "base": _forgejo_side(base, repo, repo.owner, pull.base, target),
    }


def _forgejo_side(base: str, repo: Repo, owner: str, branch: str, sha: str) -> Json:
    shape: Json | None = forgejo_repo(base, repo)
    number = repo.id
    if owner != repo.owner and shape:
        number += 500_000
        shape |= {"id": number, "full_name": f"{owner}/{repo.name}", "fork": True}
        if owner in repo.deleted_forks:
            shape, branch = None, "unknown repository"
    return {
        "label": branch,
        "ref": branch,
        "sha": sha,
        "repo_id": number,
        "repo": shape,
    }


def forgejo_comment(base: str, repo: Repo, comment: Comment) -> Json:
    """A comment; of two addresses one is empty."""
    item = repo.item(comment.number)
    kind = "pulls" if isinstance(item, Pull) else "issues"
    page = f"{_forgejo_site(base)}/{repo.full_name}/{kind}/{comment.number}"
    return {
        "id": comment.id,
        "html_url": f"{page}#issuecomment-{comment.id}",
        "pull_request_url": page if kind == "pulls" else "",
        "issue_url": page if kind == "issues" else "",
        "user": forgejo_user(base, repo.accounts.user(comment.user)),
        "body": comment.body,
        "created_at": iso_time(comment.created_at),
        "updated_at": iso_time(comment.updated_at),
    }


def forgejo_delivery(
    event: str,
    payload: Json,
    secret: str,
    guid: str,
    form: bool = False,
    brands: Sequence[str] = ("Forgejo", "Gitea", "Gogs"),
) -> tuple[dict[str, str], bytes]:
    """Headers and body; the JSON is signed, also inside a form, and every brand's
    headers are sent, GitHub's among them. Gitea's ``brands`` lack Forgejo."""
    text = json.dumps(payload, indent=2, ensure_ascii=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    body, kind = text.encode(), "application/json"
    hexes = {name: _mac(secret, body, name) if secret else "" for name in _MACS}
    if form:
        body = urllib.parse.urlencode({"payload": text}).encode()
        kind = "application/x-www-form-urlencoded"
    headers = {"Content-Type": kind, "User-Agent": "Go-http-client/1.1"}
    for brand in (*brands, "GitHub"):
        headers |= {
            f"X-{brand}-Event": event,
            f"X-{brand}-Event-Type": event,
            f"X-{brand}-Delivery": guid,
        }
    headers |= {f"X-{brand}-Signature": hexes["sha256"] for brand in brands}
    headers["X-Hub-Signature"] = "sha1=" + hexes["sha1"]
    headers["X-Hub-Signature-256"] = "sha256=" + hexes["sha256"]
    return headers, body


_MACS = ("sha1", "sha256")


def forgejo_payload(
    repo: Repo,
    number: int,
    action: str,
    sender: str,
    labels: Sequence[str] | None = None,
    told: bool = False,
) -> Json:
    """An `issues` delivery, or `pull_request` when the number is one.

    ``label_updated`` gives the item ``labels`` and says nothing of what changed
    unless ``told``, as Gitea does since 1.25; ``label_cleared`` takes all off and
    lists them still."""
    item, base = _known(repo, number), f"{repo.accounts.base}/api/v1"
    item.updated_at = repo.accounts.clock()
    before = list(item.labels)
    if labels is not None:
        repo.set_labels(number, labels, sender)
    if action in ("closed", "reopened"):
        item.state = "closed" if action == "closed" else "open"
        item.closed_at = item.updated_at if action == "closed" else None
    payload = _forgejo_envelope(repo, action, sender)
    payload["number"] = number
    is_pull = isinstance(item, Pull)
    shape = forgejo_pull if is_pull else forgejo_issue
    made = payload["pull_request" if is_pull else "issue"] = shape(
        base,
        repo,
        item,  # type: ignore[arg-type]
    )
    if action == "label_cleared":
        made["labels"] = [forgejo_label(base, repo, name) for name in before]
        repo.set_labels(number, (), sender)
    if told:
        came = [forgejo_label(base, repo, n) for n in item.labels if n not in before]
        went = [forgejo_label(base, repo, n) for n in before if n not in item.labels]
        payload["changes"] = {
            "added_labels": came or None,
            "removed_labels": went or None,
        }
    return payload


def _forgejo_envelope(repo: Repo, action: str, sender: str) -> Json:
    base = f"{repo.accounts.base}/api/v1"
    return {
        "action": action,
        "repository": forgejo_repo(base, repo),
        "sender": forgejo_user(base, repo.accounts.user(sender)),
    }


def forgejo_comment_payload(
    repo: Repo, number: int, body: str, sender: str, action: str = "created"
) -> Json:
    """An `issue_comment` delivery; the comment is there from then on."""
    item, base = _known(repo, number), f"{repo.accounts.base}/api/v1"
    comment = repo.add_comment(number, body, sender)
    item.updated_at = comment.created_at
    payload = _forgejo_envelope(repo, action, sender)
    payload["issue"] = forgejo_issue(base, repo, item)
    payload["comment"] = forgejo_comment(base, repo, comment)
    payload["is_pull"] = isinstance(item, Pull)
    if isinstance(item, Pull):
        payload["pull_request"] = forgejo_pull(base, repo, item)
    return payload


def forgejo_review_payload(
    repo: Repo, number: int, verdict: str, body: str, sender: str
) -> Json:
    """A review (approved, rejected, comment); the event is `pull_request_<verdict>`."""
    payload = _forgejo_envelope(repo, "reviewed", sender)
    base = f"{repo.accounts.base}/api/v1"
    payload["number"] = number
    payload["pull_request"] = forgejo_pull(base, repo, repo.pulls[number])
    payload["requested_reviewer"] = payload["sender"]
    payload["review"] = {"type": f"pull_request_review_{verdict}", "content": body}
    return payload


def forgejo_rows(call: Call, rows: Sequence[Json]) -> Reply:
    """One page; how many rows that are is the server's decision in the end."""
    query = call.request.query
    size = min(_FORGEJO_PAGE_MAX, _number(query, "limit", 30))
    page = max(1, _number(query, "page", 1))
    return json_reply(
        200,
        rows[(page - 1) * size : page * size],
        **{"X-Total-Count": str(len(rows))},
    )


@FORGEJO("GET", "/version")
def forgejo_version(call: Call) -> Reply:
    return json_reply(200, {"version": "13.0.0+gitea-1.22.0"})


@FORGEJO("GET", "/user")
def forgejo_get_user(call: Call) -> Reply:
    user = call.data.accounts.user(call.caller)
    return json_reply(200, forgejo_user(call.base, user))


@FORGEJO("GET", "/repos/{owner}/{name}", "metadata:read")
def forgejo_get_repo(call: Call) -> Reply:
    return json_reply(200, forgejo_repo(call.base, call.repo))


@FORGEJO("GET", "/repos/{owner}/{name}/branches/{branch+}", "contents:read")
def forgejo_get_branch(call: Call) -> Reply:
    name = call.args["branch"]
    sha, ruled = call.repo.branch(name), call.repo.is_protected(name)
    if sha is None:
        raise Refused(404, "The target couldn't be found.")
    shape = {
        "name": name,
        "commit": {"id": sha, "message": ""},
        "protected": ruled,
        "required_approvals": 0,
        "enable_status_check": False,
        "status_check_contexts": [],
        "user_can_push": not ruled or call.caller in call.repo.may_push,
        "user_can_merge": True,
        "effective_branch_protection_name": call.repo.rule_of(name) or "",
    }
    return json_reply(200, shape)


@FORGEJO("GET", "/repos/{owner}/{name}/issues/{number}", "issues:read")
def forgejo_get_issue(call: Call) -> Reply:
    return json_reply(200, forgejo_issue(call.base, call.repo, call.item()))


@FORGEJO("GET", "/repos/{owner}/{name}/issues/{number}/comments", "issues:read")
def forgejo_get_comments(call: Call) -> Reply:
    """All at once: this list knows no pages."""
    found = call.repo.comments_on(call.item().number)
    return json_reply(200, [forgejo_comment(call.base, call.repo, c) for c in found])


@FORGEJO("POST", "/repos/{owner}/{name}/issues/{number}/comments", "issues:write")
def forgejo_post_comment(call: Call) -> Reply:
    item = call.item()
    body = call.text(call.body(), "body", 2**24, "Comment")
    if not body:
        raise Refused(422, "[Body]: Required")
    comment = call.repo.add_comment(item.number, body, call.caller)
    item.updated_at = comment.created_at
    return json_reply(201, forgejo_comment(call.base, call.repo, comment))


@FORGEJO("GET", "/repos/{owner}/{name}/issues/{number}/timeline", "issues:read")
def forgejo_get_timeline(call: Call) -> Reply:
    """Comments and labels that came or went, oldest first."""
    number, repo = call.item().number, call.repo
    rows: list[tuple[float, Json]] = [
        (c.created_at, forgejo_comment(call.base, repo, c) | {"type": "comment"})
        for c in repo.comments_on(number)
    ]
    for moment in repo.label_moments:
        if moment.number == number:
            shape = {
                "id": moment.id,
                "type": "label",
                "user": forgejo_user(call.base, repo.accounts.user(moment.user)),
                "body": "1" if moment.added else "",
                "created_at": iso_time(moment.at),
                "updated_at": iso_time(moment.at),
                "label": forgejo_label(call.base, repo, moment.label),
            }
            rows.append((moment.at, shape))
    since = call.request.query.get("since", "")
    found = [row for at, row in sorted(rows, key=_first) if iso_time(at) >= since]
    return forgejo_rows(call, found)


def _first(pair: tuple[float, Json]) -> float:
    return pair[0]


@FORGEJO("POST", "/repos/{owner}/{name}/issues/{number}/labels", "issues:write")
def forgejo_add_labels(call: Call) -> Reply:
    """Labels by name (newer servers) are added."""
    item, names = call.item(), [str(n) for n in call.body().get("labels", ())]
    call.repo.set_labels(item.number, [*item.labels, *names], call.caller)
    found = [forgejo_label(call.base, call.repo, name) for name in item.labels]
    return json_reply(200, found)


@FORGEJO("GET", "/repos/{owner}/{name}/pulls", "pull_requests:read")
def forgejo_get_pulls(call: Call) -> Reply:
    state = call.request.query.get("state", "open")
    found = sorted(call.repo.pulls.values(), key=lambda pull: -pull.number)
    rows = [p for p in found if state in ("all", p.state)]
    return forgejo_rows(call, [forgejo_pull(call.base, call.repo, p) for p in rows])


@FORGEJO("POST", "/repos/{owner}/{name}/pulls", "pull_requests:write")
def forgejo_post_pull(call: Call) -> Reply:
    shape, repo = call.body(), call.repo
    title = call.text(shape, "title", 255, "PullRequest")
    head, base = str(shape.get("head")), str(shape.get("base"))
    if not title:
        raise Refused(422, "[Title]: Required")
    if repo.branch(head) is None or repo.branch(base) is None:
        raise Refused(404, "The target couldn't be found.")
    standing = [(p.head, p.head_owner, p.base, p.state) for p in repo.pulls.values()]
    if (head, repo.owner, base, "open") in standing:
        raise Refused(409, "pull request already exists for these targets")
    body = call.text(shape, "body", 2**24, "PullRequest")
    pull = repo.open_pull(head, title, body, base, user=call.caller)
    return json_reply(201, forgejo_pull(call.base, repo, pull))


@FORGEJO("GET", "/repos/{owner}/{name}/pulls/{number}", "pull_requests:read")
def forgejo_get_pull(call: Call) -> Reply:
    return json_reply(200, forgejo_pull(call.base, call.repo, call.pull()))


@FORGEJO("PATCH", "/repos/{owner}/{name}/pulls/{number}", "pull_requests:write")
def forgejo_patch_pull(call: Call) -> Reply:
    pull, shape = call.pull(), call.body()
    pull.title = call.text(shape, "title", 255, "PullRequest") or pull.title
    pull.updated_at = call.data.accounts.clock()
    if shape.get("state") == "closed":
        call.repo.close(pull)
    return json_reply(201, forgejo_pull(call.base, call.repo, pull))


@FORGEJO(
    "GET", "/repos/{owner}/{name}/collaborators/{login}/permission", "metadata:read"
)
def forgejo_get_permission(call: Call) -> Reply:
    repo, login = call.repo, call.args["login"]
    if login != call.caller and repo.collaborators.get(call.caller) != "admin":
        raise Refused(403, "Only admins can query all permissions")
    user = call.data.accounts.users.get(login)
    if user is None:
        raise Refused(404, f"user does not exist [uid: 0, name: {login}]")
    role = repo.collaborators.get(login, "none" if repo.private else "read")
    held = "owner" if login == repo.owner else _FORGEJO_ROLES.get(role, role)
    shape = {
        "permission": held,
        "role_name": held,
        "user": forgejo_user(call.base, user),
    }
    return json_reply(200, shape)


class FakeForgejo(FakeForge):
    """A Forgejo at the root and, the same one, under the sub-path /forge."""

    kind = "forgejo"
    routes = FORGEJO
    api_prefixes = ("/api/v1", "/forge/api/v1")
    git_path = re.compile(
        r"(/forge)?/(?P<owner>[^/]+)/(?P<name>[^/]+?)(\.git)?"
        r"/(?P<operation>info/refs|git-upload-pack|git-receive-pack)"
    )
    realm = "Gitea"

    def create_repo(self, full_name: str, *rest: Any, **fields: Any) -> Repo:
        """As on any forge; whoever holds a token of this forge administers it, as
        the account that asks for permissions must."""
        repo = super().create_repo(full_name, *rest, **fields)
        for token in self.data.tokens.values():
            repo.collaborators.setdefault(token.login, "admin")
        return repo

    def label(
        self, repo: Repo, number: int, label: str, login: str, secret: str, guid: str
    ) -> tuple[dict[str, str], bytes]:
        """An ``issues`` delivery, action ``label_updated``."""
        labels = [*_known(repo, number).labels, label]
        payload = forgejo_payload(repo, number, "label_updated", login, labels)
        return forgejo_delivery("issues", payload, secret, guid)

    def end(
        self, repo: Repo, number: int, how: str, login: str, secret: str, guid: str
    ) -> tuple[dict[str, str], bytes]:
        """A ``pull_request`` delivery; a merge is a ``closed`` that says so."""
        repo.pulls[number].merged = how == "merged"
        action = how.replace("merged", "closed")
        payload = forgejo_payload(repo, number, action, login)
        return forgejo_delivery("pull_request", payload, secret, guid)

    def remark(
        self,
        repo: Repo,
        number: int,
        text: str,
        login: str,
        secret: str,
        guid: str,
        request: bool = False,
    ) -> tuple[dict[str, str], bytes]:
        """An ``issue_comment`` delivery, of a request too."""
        payload = forgejo_comment_payload(repo, number, text, login)
        return forgejo_delivery("issue_comment", payload, secret, guid)

    def refused(self, refusal: Refused) -> Reply:
        """An error in Forgejo's shape."""
        shape = {"message": refusal.message, "url": f"{self.url}/api/swagger"}
        return json_reply(refusal.status, shape)

    def admit(self, call: Call, needs: str) -> None:
        """Raise 401 without a valid token, 403 or 404 as `_check_permission` says."""
        if call.token is None:
            raise Refused(401, "invalid username, password or token")
        if call.full_name:
            _check_permission(call, call.token, needs)


# ---------------------------------------------------------------------------
# azure
#
# Azure DevOps over the same state: a repository's owner is its project, its issues
# are the project's work items, labels are tags. What differs from GitHub stands here:
# routes, shapes, deliveries, who is a member (learn.microsoft.com, "REST API").
# ---------------------------------------------------------------------------

AZURE = Routes()
_AZURE_SUBSCRIPTION = "5f0c11e1-0000-4000-8000-00000000a5e1"
#: Resource areas with an address of their own, as the location service tells them.
AZURE_AREAS = {
    "bb1e7ec9-e901-4b68-999a-de7012b920f8": "graph",
    "8a3d49b8-91f0-46ef-b33d-dda338c25db3": "ims",
}
#: Where the organisation itself is the address.
AZURE_HOME_AREAS = (
    "4e080c62-fa21-4fbc-8fef-2a10a2b38049",
    "5264459e-e5e0-4bd8-b118-0985e68a4ec5",
    "79134c72-4a58-4b42-976c-04e7115f32bf",
)
_GIT_TEMPLATE = "{project}/_apis/{area}/repositories/{repositoryId}"
_PULL_TEMPLATE = _GIT_TEMPLATE + "/pullRequests/{pullRequestId}"
#: Location id, area, resource, route template: how its clients find a call.
AZURE_LOCATIONS = (
    (
        "e81700f7-3be2-46de-8624-2eb35882fcaa",
        "Location",
        "resourceAreas",
        "_apis/{resource}",
    ),
    (
        "00d9565f-ed9c-4a06-9a50-00e7896ccab4",
        "Location",
        "connectionData",
        "_apis/{resource}",
    ),
    (
        "603fe2ac-9723-48b9-88ad-09305aa6c6e1",
        "core",
        "projects",
        "_apis/{resource}/{*projectId}",
    ),
    ("225f7195-f9c7-4d14-ab28-a83f7ff77e1f", "git", "repositories", _GIT_TEMPLATE),
    ("9946fd70-0d40-406e-b686-b4744cbbcc37", "git", "pullRequests", _PULL_TEMPLATE),
    (
        "d43911ee-6958-46b0-a42b-8445b8a0d004",
        "git",
        "iterations",
        _PULL_TEMPLATE + "/iterations/{iterationId}",
    ),
    (
        "ab6e2e5d-a0b7-4153-b64a-a4efe0d49449",
        "git",
        "threads",
        _PULL_TEMPLATE + "/threads/{threadId}",
    ),
    (
        "2c420070-a0a2-49cc-9639-c9f271c5ff07",
        "git",
        "configurations",
        "{project}/_apis/{area}/policy/{resource}",
    ),
    (
        "72c7ddf8-2cdc-4f60-90cd-ab71c14a399b",
        "wit",
        "workItems",
        "{project}/_apis/{area}/{resource}/{id}",
    ),
    (
        "a00c85a5-80fa-4565-99c3-bcd2181434bb",
        "wit",
        "revisions",
        "{project}/_apis/{area}/workItems/{id}/revisions/{revisionNumber}",
    ),
    (
        "608aac0a-32e1-4493-a863-b9cf4566d257",
        "wit",
        "comments",
        "{project}/_apis/{area}/workItems/{workItemId}/comments",
    ),
    (
        "048aee0a-7072-4cde-ab73-7af77b1e0b4e",
        "Graph",
        "Descriptors",
        "_apis/{area}/{resource}/{storageKey}",
    ),
    (
        "ebbe6af8-0b91-4c13-8cf1-777c14858188",
        "Graph",
        "Groups",
        "_apis/{area}/{resource}/{groupDescriptor}",
    ),
    (
        "e34b6394-6b30-4435-94a9-409a5eef3e31",
        "Graph",
        "Memberships",
        "_apis/{area}/{resource}/{subjectDescriptor}",
    ),
    (
        "28010c54-d0c0-4c89-a5b0-1c9e188b9fb7",
        "IMS",
        "Identities",
        "_apis/{resource}/{identityId}",
    ),
)
#: The groups of a project that a permission of the fake puts somebody into.
_AZURE_GROUPS = {
    "admin": "Project Administrators",
    "write": "Contributors",
    "team": "The Team",
    "read": "Readers",
    "directory": "Contributors",
}


def azure_guid(kind: str, name: str) -> str:
    """The id of a project, repository or person."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{kind}:{name}"))


def _azure_name(kind: str, name: str) -> str:
    """A descriptor: the kind and the name, encoded."""
    return f"{kind}." + base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def _azure_named(descriptor: str) -> tuple[str, str]:
    kind, _, text = descriptor.partition(".")
    return kind, base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()


def azure_user(login: str) -> Json:
    """An identity reference."""
    return {
        "displayName": login.title(),
        "id": azure_guid("user", login),
        "uniqueName": f"{login}@example.com",
        "descriptor": _azure_name("aad", login),
    }


def azure_time(seconds: float) -> str:
    """A time with the seven digits that Azure writes."""
    return iso_time(seconds).replace("Z", f".{int(seconds % 1 * 1e7):07}Z")


def azure_repository(base: str, repo: Repo) -> Json:
    project = azure_guid("project", repo.owner)
    number = azure_guid("repository", repo.full_name)
    return {
        "id": number,
        "name": repo.name,
        "url": f"{base}/{project}/_apis/git/repositories/{number}",
        "project": {"id": project, "name": repo.owner, "state": "wellFormed"},
        "defaultBranch": f"refs/heads/{repo.default_branch}",
        "remoteUrl": f"{base}/{urllib.parse.quote(f'{repo.owner}/_git/{repo.name}')}",
    }


def azure_pull(base: str, repo: Repo, pull: Pull) -> Json:
    """A pull request; a fork's names the repository its branch is in."""
    states = {"open": "active", "closed": "completed" if pull.merged else "abandoned"}
    shape = {
        "repository": azure_repository(base, repo),
        "pullRequestId": pull.number,
        "status": states[pull.state],
        "createdBy": azure_user(pull.user),
        "creationDate": azure_time(pull.created_at),
        "title": pull.title,
        "sourceRefName": f"refs/heads/{pull.head}",
        "targetRefName": f"refs/heads/{pull.base}",
        "isDraft": pull.draft,
        "lastMergeSourceCommit": {"commitId": pull.head_sha},
    }
    if pull.body:
        shape["description"] = pull.body
    if pull.head_owner != repo.owner:
        fork = {"id": azure_guid("repository", pull.head_owner), "name": repo.name}
        shape["forkSource"] = {"name": shape["sourceRefName"], "repository": fork}
    return shape


def azure_fields(repo: Repo, issue: Issue, changed_by: object) -> Json:
    fields = {
        "System.TeamProject": repo.owner,
        "System.WorkItemType": "Bug",
        "System.State": "New",
        "System.Title": issue.title,
        "System.CreatedDate": azure_time(issue.created_at),
        "System.ChangedDate": azure_time(issue.updated_at),
        "System.ChangedBy": changed_by,
    }
    if issue.body:
        fields["System.Description"] = issue.body
    if issue.labels:
        fields["System.Tags"] = "; ".join(issue.labels)
    return fields


def azure_clean(html: str) -> str:
    """What is left of a comment's HTML once the server has stored it."""
    html = re.sub(r"(?s)<!--.*?-->", "", html)
    return re.sub(r"\s(?:style|class|on\w+)=(\"[^\"]*\"|'[^']*')", "", html)


def azure_delivery(
    payload: Json, secret: str, header: str | None = None
) -> tuple[dict[str, str], bytes]:
    """Headers and body of a delivery; ``secret`` is ``user:password``, or the
    password alone, or what a named header brings."""
    pair = secret if ":" in secret else f":{secret}"
    basic = "Basic " + base64.b64encode(pair.encode()).decode()
    headers = {
        "Content-Type": "application/json; charset=utf-8",
        "User-Agent": "VSServices/19.0",
        "X-VSS-SubscriptionId": _AZURE_SUBSCRIPTION,
        header or "Authorization": secret if header else basic,
    }
    return headers, json.dumps(payload, ensure_ascii=False).encode()


def _azure_rows(rows: Sequence[Json], **headers: str) -> Reply:
    return json_reply(200, {"count": len(rows), "value": list(rows)}, **headers)


def _azure_data(call: Call) -> AzureData:
    assert isinstance(call.data, AzureData)
    return call.data


class AzureData(ForgeData):
    """What an organisation has beyond repositories: revisions, pushers, groups."""

    #: A server of one's own has no Graph and no service at another address.
    own_server = False

    def __init__(self, accounts: Accounts, tokens: Iterable[Token], app: App | None):
        super().__init__(accounts, tokens, app)
        self.revisions: dict[int, list[str]] = {}
        self.pushers: dict[int, list[str]] = {}

    def inside(self, project: str) -> list[Repo]:
        """The repositories of a project, given by name or id."""
        found = [
            repo
            for repo in self.repos.values()
            if project in (repo.owner, azure_guid("project", repo.owner))
        ]
        if not found:
            raise Refused(404, f"TF200016: The project does not exist: {project}")
        return found

    def work_item(self, project: str, number: int) -> tuple[Repo, Issue]:
        """A work item of the project, wherever the fake keeps it."""
        for repo in self.inside(project):
            if number in repo.issues:
                return repo, repo.issues[number]
        raise Refused(404, f"TF401232: Work item {number} does not exist, or you do …")

    def revise(self, issue: Issue, login: str) -> int:
        """Another revision of a work item; its number."""
        made = self.revisions.setdefault(issue.number, [issue.user])
        made.append(login)
        issue.updated_at = self.accounts.clock()
        return len(made)

    def groups_of(self, login: str) -> list[tuple[str, str, str]]:
        """Project, group and permission of somebody, for each project once."""
        found = {}
        for repo in self.repos.values():
            permission = repo.collaborators.get(login, "none")
            if permission in _AZURE_GROUPS:
                group = _AZURE_GROUPS[permission]
                found[repo.owner] = (repo.owner, group, permission)
        return list(found.values())


@AZURE("OPTIONS", "/_apis")
def azure_locations(call: Call) -> Reply:
    rows = [
        {
            "id": number,
            "area": area,
            "resourceName": resource,
            "routeTemplate": template,
            "resourceVersion": 1,
            "minVersion": "1.0",
            "maxVersion": "7.1",
            "releasedVersion": "7.0",
        }
        for number, area, resource, template in AZURE_LOCATIONS
    ]
    return _azure_rows(rows)


@AZURE("GET", "/_apis/resourceAreas")
def azure_areas(call: Call) -> Reply:
    if _azure_data(call).own_server:
        return json_reply(200, {"count": 0, "value": None})
    root, _, organisation = call.base.rpartition("/")
    beside = f"{root.removesuffix('/vssps')}/vssps/{organisation}/"
    rows = [
        {"id": number, "name": name, "locationUrl": beside}
        for number, name in AZURE_AREAS.items()
    ]
    home = call.base + "/"
    rows += [{"id": n, "name": "home", "locationUrl": home} for n in AZURE_HOME_AREAS]
    return _azure_rows(rows)


@AZURE("GET", "/_apis/connectionData")
def azure_connection(call: Call) -> Reply:
    user = azure_user(call.caller)
    shown = {"id": user["id"], "providerDisplayName": user["displayName"]}
    return json_reply(200, {"authenticatedUser": shown, "authorizedUser": shown})


@AZURE("GET", "/_apis/projects/{project}")
def azure_project(call: Call) -> Reply:
    owner = _azure_data(call).inside(call.args["project"])[0].owner
    number = azure_guid("project", owner)
    return json_reply(200, {"id": number, "name": owner, "state": "wellFormed"})


# -- graph and identities


def _azure_graph(call: Call) -> AzureData:
    data = _azure_data(call)
    if data.own_server:
        raise Refused(404, "The controller for path '/_apis/graph' was not found")
    return data


@AZURE("GET", "/_apis/{graph:[Gg]raph}/{what:[Dd]escriptors}/{key}")
def azure_descriptor(call: Call) -> Reply:
    data, key = _azure_graph(call), call.args["key"]
    for login in data.accounts.users:
        if azure_guid("user", login) == key:
            return json_reply(200, {"value": _azure_name("aad", login)})
    for repo in data.repos.values():
        if azure_guid("project", repo.owner) == key:
            return json_reply(200, {"value": _azure_name("scp", repo.owner)})
    raise Refused(404, f"VS403369: no subject has the storage key {key}")


@AZURE("GET", "/_apis/{graph:[Gg]raph}/{what:[Gg]roups}")
def azure_groups(call: Call) -> Reply:
    """One group a page: a list of groups is continued by a header."""
    _azure_graph(call)
    project = _azure_named(call.request.query["scopeDescriptor"])[1]
    names = [*dict.fromkeys(_AZURE_GROUPS.values()), "Project Valid Users"]
    at = int(call.request.query.get("continuationToken", "0"))
    name = names[at]
    row = {
        "subjectKind": "group",
        "descriptor": _azure_name("vssgp", f"{project}/{name}"),
        "displayName": name,
        "principalName": f"[{project}]\\{name}",
    }
    more = {"X_MS_ContinuationToken": str(at + 1)} if at + 1 < len(names) else {}
    return _azure_rows([row], **more)


@AZURE("GET", "/_apis/{graph:[Gg]raph}/{what:[Mm]emberships}/{subject}")
def azure_memberships(call: Call) -> Reply:
    data = _azure_graph(call)
    kind, name = _azure_named(call.args["subject"])
    if kind == "aad":
        shown = [g for g in data.groups_of(name) if g[2] != "directory"]
        up = [f"{project}/{group}" for project, group, _ in shown]
    else:
        project, _, group = name.partition("/")
        above = {"The Team": "Contributors", "Project Valid Users": ""}
        over = above.get(group, "Project Valid Users")
        up = [f"{project}/{over}"] if over else []
    rows = [
        {
            "containerDescriptor": _azure_name("vssgp", container),
            "memberDescriptor": call.args["subject"],
        }
        for container in up
    ]
    return _azure_rows(rows)


@AZURE("GET", "/_apis/{what:[Ii]dentities}")
def azure_identities(call: Call) -> Reply:
    """By storage key with all groups above, or groups by their descriptors."""
    query, data = call.request.query, _azure_data(call)
    prefix = "Microsoft.TeamFoundation.Identity;"
    if "identityIds" in query:
        found = (
            u
            for u in data.accounts.users
            if azure_guid("user", u) == query["identityIds"]
        )
        login = next(found, None)
        if login is None:
            return _azure_rows([cast(Json, None)])
        above = []
        for project, group, _ in data.groups_of(login):
            names = {group, "Project Valid Users"}
            names |= {"Contributors"} if group == "The Team" else set()
            above += [f"{prefix}{project}/{name}" for name in sorted(names)]
        shown = above if query.get("queryMembership") == "Expanded" else []
        return _azure_rows([{"id": query["identityIds"], "memberOf": shown}])
    rows = []
    for descriptor in query["descriptors"].split(","):
        project, _, name = descriptor.removeprefix(prefix).partition("/")
        domain = f"vstfs:///Classification/TeamProject/{azure_guid('project', project)}"
        special = {"Project Valid Users": "EveryoneApplicationGroup"}
        facts = {"Account": name, "Domain": domain, "SchemaClassName": "Group"}
        facts["SpecialType"] = special.get(name, "Generic")
        typed = {k: {"$type": "System.String", "$value": v} for k, v in facts.items()}
        rows.append({"descriptor": descriptor, "properties": typed})
    return _azure_rows(rows)


# -- git


_AZURE_REPO = "/{owner}/_apis/git/repositories/{name}"
_AZURE_PULLS = _AZURE_REPO + "/{what:pull[Rr]equests}"


@AZURE("GET", _AZURE_REPO, "contents:read")
def azure_get_repository(call: Call) -> Reply:
    return json_reply(200, azure_repository(call.base, call.repo))


@AZURE("GET", _AZURE_PULLS, "pull_requests:read")
def azure_get_pulls(call: Call) -> Reply:
    query = call.request.query
    source = query.get("searchCriteria.sourceRefName")
    status = query.get("searchCriteria.status", "active")
    rows = [azure_pull(call.base, call.repo, p) for p in call.repo.pulls.values()]
    found = [
        row
        for row in rows
        if status in ("all", row["status"]) and source in (None, row["sourceRefName"])
    ]
    return _azure_rows(found[: int(query.get("$top", "101"))])


@AZURE("POST", _AZURE_PULLS, "pull_requests:write")
def azure_post_pull(call: Call) -> Reply:
    shape, repo = call.body(), call.repo
    refs = [str(shape.get(f"{side}RefName", "")) for side in ("source", "target")]
    head, base = (ref.removeprefix("refs/heads/") for ref in refs)
    if any(not ref.startswith("refs/heads/") for ref in refs):
        raise Refused(400, "TF401027: The ref name is not valid.")
    if repo.branch(head) is None or repo.branch(base) is None:
        raise Refused(404, f"TF401398: The ref {refs[0]} does not exist.")
    if len(str(shape.get("description", ""))) > 4_000:
        raise Refused(400, "The description is longer than 4000 characters.")
    if not 1 <= len(str(shape.get("title", ""))) <= 400:
        raise Refused(400, "The title is invalid.")
    twins = [(p.head, p.base, p.state) for p in repo.pulls.values()]
    if (head, base, "open") in twins:
        raise Refused(409, "TF401179: An active pull request already exists.")
    title, body = shape["title"], shape.get("description")
    pull = repo.open_pull(head, title, body, base, call.caller)
    return json_reply(201, azure_pull(call.base, repo, pull))


@AZURE("GET", _AZURE_PULLS + "/{number}", "pull_requests:read")
def azure_get_pull(call: Call) -> Reply:
    return json_reply(200, azure_pull(call.base, call.repo, call.pull()))


@AZURE("PATCH", _AZURE_PULLS + "/{number}", "pull_requests:write")
def azure_patch_pull(call: Call) -> Reply:
    pull = call.pull()
    pull.title = str(call.body().get("title", pull.title))
    return json_reply(200, azure_pull(call.base, call.repo, pull))


@AZURE("GET", _AZURE_PULLS + "/{number}/iterations", "pull_requests:read")
def azure_iterations(call: Call) -> Reply:
    pull = call.pull()
    pushers = _azure_data(call).pushers.get(pull.number, [pull.user])
    rows = [
        {"id": number, "author": azure_user(login), "reason": "push"}
        for number, login in enumerate(pushers, 1)
    ]
    return _azure_rows(rows)


def _azure_thread(comment: Comment) -> Json:
    shown = {
        "id": 1,
        "parentCommentId": 0,
        "author": azure_user(comment.user),
        "content": comment.body,
        "publishedDate": azure_time(comment.created_at),
        "commentType": "text",
    }
    return {"id": comment.id, "comments": [shown], "status": "closed"}


@AZURE("GET", _AZURE_PULLS + "/{number}/threads", "pull_requests:read")
def azure_get_threads(call: Call) -> Reply:
    comments = call.repo.comments_on(call.pull().number)
    return _azure_rows([_azure_thread(comment) for comment in comments])


@AZURE("POST", _AZURE_PULLS + "/{number}/threads", "pull_requests:write")
def azure_post_thread(call: Call) -> Reply:
    [first] = call.body()["comments"]
    if not str(first.get("content", "")).strip():
        raise Refused(400, "The comment has no content.")
    comment = call.repo.add_comment(call.pull().number, first["content"], call.caller)
    return json_reply(200, _azure_thread(comment))


@AZURE("GET", "/{project}/_apis/git/policy/configurations")
def azure_policies(call: Call) -> Reply:
    query = call.request.query
    rows = [policy_row("2e26e725-8201-4edd-8bf5-978563c34a80")]
    for repo in _azure_data(call).inside(call.args["project"]):
        branch = query.get("refName", "").removeprefix("refs/heads/")
        mine = azure_guid("repository", repo.full_name) == query.get("repositoryId")
        if mine and repo.is_protected(branch):
            rows.append(policy_row("fa4e907d-c16b-4a4c-9dfa-4906e5d171dd"))
    return _azure_rows(rows)


def policy_row(kind: str, enabled: bool = True, blocking: bool = True) -> Json:
    """A policy configuration of a type; the first one above bounds file sizes."""
    return {"type": {"id": kind}, "isEnabled": enabled, "isBlocking": blocking}


# -- work items


_AZURE_ITEM = "/{project}/_apis/wit/work{what:[Ii]}tems/{number}"


def _azure_item(call: Call) -> tuple[Repo, Issue]:
    return _azure_data(call).work_item(call.args["project"], int(call.args["number"]))


@AZURE("GET", _AZURE_ITEM)
def azure_get_item(call: Call) -> Reply:
    repo, issue = _azure_item(call)
    fields = azure_fields(repo, issue, azure_user(issue.user))
    return json_reply(200, {"id": issue.number, "rev": 1, "fields": fields})


@AZURE("GET", _AZURE_ITEM + "/revisions/{rev}")
def azure_get_revision(call: Call) -> Reply:
    repo, issue = _azure_item(call)
    logins = _azure_data(call).revisions.get(issue.number, [issue.user])
    rev = int(call.args["rev"])
    if not 1 <= rev <= len(logins):
        raise Refused(404, "TF26198: The work item does not have that revision.")
    fields = azure_fields(repo, issue, azure_user(logins[rev - 1]))
    return json_reply(200, {"id": issue.number, "rev": rev, "fields": fields})


def _azure_note(comment: Comment) -> Json:
    return {
        "id": comment.id,
        "workItemId": comment.number,
        "version": 1,
        "text": comment.body,
        "createdBy": azure_user(comment.user),
        "createdDate": azure_time(comment.created_at),
    }


@AZURE("GET", _AZURE_ITEM + "/comments")
def azure_get_notes(call: Call) -> Reply:
    """Pages of at most two hundred; the token of the next is in the body."""
    repo, issue = _azure_item(call)
    query = call.request.query
    rows = [_azure_note(c) for c in repo.comments_on(issue.number)]
    if query.get("order", "desc") == "desc":
        rows.reverse()
    at, size = int(query.get("continuationToken", "0")), int(query.get("$top", "200"))
    shape: Json = {"totalCount": len(rows), "comments": rows[at : at + size]}
    if at + size < len(rows):
        shape["continuationToken"] = str(at + size)
    return json_reply(200, shape)


@AZURE("POST", _AZURE_ITEM + "/comments")
def azure_post_note(call: Call) -> Reply:
    repo, issue = _azure_item(call)
    text = call.body().get("text")
    if not isinstance(text, str) or not text.strip():
        raise Refused(400, "The comment's text is missing.")
    comment = repo.add_comment(issue.number, azure_clean(text), call.caller)
    _azure_data(call).revise(issue, call.caller)
    return json_reply(200, _azure_note(comment))


class FakeAzure(FakeForge):
    """An organisation ``fabrikam``; with ``own_server`` like Azure DevOps Server.

    Its people have the permissions of `Repo.add_collaborator`, and two more:
    ``team``, in a group that is in Contributors, and ``directory``, known to be in
    Contributors by the identity service alone."""

    kind = "azure"
    routes = AZURE
    data_type = AzureData
    run_fields: ClassVar[Mapping[str, str]] = {"repository": "spoon"}
    api_prefixes = ("/vssps/fabrikam", "/fabrikam")
    git_path = re.compile(
        r"/fabrikam/(?P<owner>[^/]+)/_git/(?P<name>[^/]+?)"
        r"/(?P<operation>info/refs|git-upload-pack|git-receive-pack)"
    )
    realm = "Azure DevOps"
    request_ref = "refs/pull/{n}/merge"
    apart = True
    data: AzureData

    def repo_name(self, args: Mapping[str, str]) -> str | None:
        """Project and repository, each given by name or by id."""
        if "owner" not in args:
            return None
        for repo in self.repos.values():
            owners = (repo.owner, azure_guid("project", repo.owner))
            names = (repo.name, azure_guid("repository", repo.full_name))
            if args["owner"] in owners and args["name"] in names:
                return repo.full_name
        return f"{args['owner']}/{args['name']}"

    def refused(self, refusal: Refused) -> Reply:
        """An error in Azure's shape; 203 is its page to sign in."""
        if refusal.status == 203:
            page = b"<!DOCTYPE html><title>Azure DevOps Services | Sign In</title>"
            return Reply(203, page, {"Content-Type": "text/html; charset=utf-8"})
        shape = {"$id": "1", "innerException": None, "message": refusal.message}
        return json_reply(refusal.status, shape | {"errorCode": 0, "eventId": 3000})

    def admit(self, call: Call, needs: str) -> None:
        """Nobody without a token: 401 for a program, a page for a browser."""
        if call.token is None:
            suppress = call.request.headers.get("x-tfs-fedauthredirect") == "Suppress"
            raise Refused(401 if suppress else 203, "TF400813: not authorized")
        if call.full_name:
            _check_permission(call, call.token, needs)

    # -- deliveries

    def _sent(self, event: str, resource: Json, version: str = "1.0") -> Json:
        number = self.data.accounts.new_id()
        return {
            "subscriptionId": _AZURE_SUBSCRIPTION,
            "notificationId": number,
            "id": azure_guid("event", str(number)),
            "eventType": event,
            "publisherId": "tfs",
            "resource": resource,
            "resourceVersion": version,
            "createdDate": azure_time(self.clock()),
        }

    def delivery_id(self, guid: str) -> str:
        return f"{_AZURE_SUBSCRIPTION}.1.{guid}"

    def label(
        self, repo: Repo, number: int, label: str, login: str, secret: str, guid: str
    ) -> tuple[dict[str, str], bytes]:
        """A ``workitem.updated`` whose tags have one more."""
        payload = self.tagged(repo, number, label, login)
        payload |= {"id": guid, "notificationId": 1}
        return azure_delivery(payload, secret)

    def end(
        self, repo: Repo, number: int, how: str, login: str, secret: str, guid: str
    ) -> tuple[dict[str, str], bytes]:
        """A ``git.pullrequest.updated`` with the status that it has now."""
        pull = repo.pulls[number]
        pull.merged = how == "merged"
        pull.state = "open" if how == "reopened" else "closed"
        payload = self.requested(repo, number, "updated")
        return azure_delivery(payload | {"id": guid, "notificationId": 1}, secret)

    def remark(
        self,
        repo: Repo,
        number: int,
        text: str,
        login: str,
        secret: str,
        guid: str,
        request: bool = False,
    ) -> tuple[dict[str, str], bytes]:
        """A ``workitem.commented`` delivery, or a pull request's."""
        told = self.said if request else self.remarked
        payload = told(repo, number, text, login)
        return azure_delivery(payload | {"id": guid, "notificationId": 1}, secret)

    def tagged(self, repo: Repo, number: int, tag: str, login: str) -> Json:
        """Somebody puts a tag on a work item."""
        issue = repo.issues[number]
        old = "; ".join(issue.labels)
        if tag not in issue.labels:
            issue.labels.append(tag)
        rev = self.data.revise(issue, login)
        user = azure_user(login)
        shown = f"{user['displayName']} <{user['uniqueName']}>"
        change = {"newValue": "; ".join(issue.labels)}
        if old:
            change["oldValue"] = old
        resource = {
            "id": rev + 100,
            "workItemId": number,
            "rev": rev,
            "revisedBy": user,
            "revisedDate": "9999-01-01T00:00:00Z",
            "fields": {"System.Tags": change, "System.Rev": {"newValue": rev}},
            "revision": {
                "id": number,
                "rev": rev,
                "fields": azure_fields(repo, issue, shown),
            },
        }
        return self._sent("workitem.updated", resource)

    def remarked(self, repo: Repo, number: int, html: str, login: str) -> Json:
        """Somebody comments on a work item; only name and mail tell who."""
        issue = repo.issues[number]
        comment = repo.add_comment(number, html, login)
        rev = self.data.revise(issue, login)
        user = azure_user(login)
        shown = f"{user['displayName']} <{user['uniqueName']}>"
        fields = azure_fields(repo, issue, shown) | {"System.History": html}
        version = {"commentId": comment.id, "version": 1}
        resource = {"id": number, "rev": rev, "fields": fields}
        resource["commentVersionRef"] = version
        return self._sent("workitem.commented", resource)

    def requested(self, repo: Repo, number: int, event: str = "created") -> Json:
        """A request was created or updated; nobody is named."""
        shape = azure_pull(f"{self.url}/fabrikam", repo, repo.pulls[number])
        return self._sent(f"git.pullrequest.{event}", shape)

    def said(
        self, repo: Repo, number: int, text: str, login: str, version: str = "2.0"
    ) -> Json:
        """Somebody comments on a request, as either resource version tells it."""
        comment = repo.add_comment(number, text, login)
        pull = azure_pull(f"{self.url}/fabrikam", repo, repo.pulls[number])
        where = pull["repository"]["url"]
        when = azure_time(comment.created_at)
        shape = {
            "id": 1,
            "author": azure_user(login),
            "content": text,
            "publishedDate": when,
            "lastUpdatedDate": when,
            "lastContentUpdatedDate": when,
            "commentType": "text",
            "_links": {
                "repository": {"href": where},
                "threads": {
                    "href": f"{where}/pullRequests/{number}/threads/{comment.id}"
                },
            },
        }
        whole = {"comment": shape, "pullRequest": pull} if version == "2.0" else shape
        name = "ms.vss-code.git-pullrequest-comment-event"
        return self._sent(name, whole, version)


# ---------------------------------------------------------------------------
# model scripts
#
# What the fake model says next is one pure function of the request: a script found by
# a text in it (or written into the last user message), and the step that the number of
# answers since that message points to. Nothing is remembered between requests.
# ---------------------------------------------------------------------------

_INLINE = "@@["


@dataclass(frozen=True)
class Tokens:
    """A usage figure; ``input`` excludes what the cache gave or took."""

    input: int = 0
    output: int = 0
    cacheRead: int = 0
    cacheWrite: int = 0


@dataclass(frozen=True)
class ToolCall:
    """A tool the scripted model wants to run."""

    name: str
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """One scripted answer. Times are seconds.

    ``status`` answers with that HTTP error; ``error`` alone breaks the stream off with
    one. ``stop`` is stop, length or toolUse (or a style's own word). ``hang`` sends the
    text and then nothing more until the client leaves."""

    text: str = ""
    thinking: str = ""
    tools: tuple[ToolCall, ...] = ()
    delay: float = 0.0
    status: int = 200
    error: str = ""
    stop: str = ""
    usage: Mapping[str, int] = field(default_factory=dict)
    hang: bool = False
    chunkDelay: float = 0.0

    @property
    def stop_reason(self) -> str:
        """Why this answer ends, in our words."""
        return self.stop or ("toolUse" if self.tools else "stop")


@dataclass(frozen=True)
class Script:
    """Steps for every conversation whose text holds ``match``."""

    match: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Conversation:
    """What both styles' requests come down to.

    ``text`` is every string of the request; ``answers`` counts assistant messages,
    ``answered`` those after the last user text."""

    model: str
    text: str
    last_user: str
    answers: int
    answered: int
    stream: bool
    usage_wanted: bool


def parse_step(value: object) -> Step:
    """A step from JSON. Raises ValueError for a field that would do nothing."""
    if not isinstance(value, dict):
        raise ValueError("a step is an object")
    fields = dict(value)
    tools = tuple(
        ToolCall(t["name"], t.get("args", {})) for t in fields.pop("tools", [])
    )
    try:
        Tokens(**fields.get("usage", {}))
        return Step(tools=tools, **fields)
    except TypeError as error:
        raise ValueError(str(error)) from None


def parse_scripts(values: Iterable[object]) -> tuple[Script, ...]:
    """Scripts from JSON: ``[{"match": text, "steps": [step, …]}, …]``."""
    scripts = []
    for value in values:
        if not isinstance(value, dict) or value.keys() != {"match", "steps"}:
            raise ValueError("a script has match and steps")
        steps = tuple(parse_step(step) for step in value["steps"])
        scripts.append(Script(str(value["match"]), steps))
    return tuple(scripts)


def inline_steps(text: str) -> tuple[Step, ...] | None:
    """The script written into a text as ``@@[…]``: the last one that is JSON.

    A script inside another one's strings, for a fork to come, is not looked at."""
    steps, at = None, text.find(_INLINE)
    while at >= 0:
        end = at + len(_INLINE)
        with contextlib.suppress(ValueError):
            steps, end = json.JSONDecoder().raw_decode(text, end - 1)
        at = text.find(_INLINE, end)
    return None if steps is None else tuple(map(parse_step, steps))


def decide(conversation: Conversation, scripts: Sequence[Script]) -> Step:
    """The next answer: the inline script, else the first that matches, else "ok"."""
    steps = inline_steps(conversation.last_user)
    if steps is None:
        matching = (s.steps for s in scripts if s.match in conversation.text)
        steps = next(matching, (Step(text="ok"),))
    if conversation.answered < len(steps):
        return steps[conversation.answered]
    return Step(text="The script has ended.")


def count_tokens(step: Step, body: bytes) -> Tokens:
    """Usage of an answer: a token for four bytes, unless the script says another."""
    said = step.text + step.thinking
    said += "".join(t.name + json.dumps(t.args) for t in step.tools)
    counted = {
        "input": math.ceil(len(body) / 4),
        "output": math.ceil(len(said.encode()) / 4),
    }
    return Tokens(**(counted | dict(step.usage)))


# ---------------------------------------------------------------------------
# model styles
#
# The two wire formats: how a request is read, and how an answer is written whole or as
# server-sent events. Each is a class of its own with the same four functions.
# ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A decided answer on its way out."""

    step: Step
    usage: Tokens
    conversation: Conversation
    id: int
    created: int

    def call_id(self, prefix: str, index: int) -> str:
        """An id for a tool call that is unique in its conversation."""
        return f"{prefix}_{self.conversation.answers}_{index}"


def _pieces(text: str) -> Iterator[str]:
    """A text in a few parts, as a model would stream it."""
    size = max(16, math.ceil(len(text) / 40))
    return (text[at : at + size] for at in range(0, len(text), size))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(map(_strings, value.values()))
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(_strings, value))


def _user_text(message: Json) -> str:
    """The text of a message if a user wrote it, and no tool result, else nothing."""
    content = message.get("content")
    if message.get("role") != "user" or content is None:
        return ""
    if isinstance(content, str):
        return content
    if any(part.get("type") == "tool_result" for part in content):
        return ""
    return "\n".join(p["text"] for p in content if p.get("type") == "text")


def _conversation(shape: Json, usage_wanted: bool) -> Conversation:
    messages = shape["messages"]
    asked = [i for i, m in enumerate(messages) if _user_text(m)]
    last = asked[-1] if asked else -1
    roles = [message.get("role") for message in messages]
    parts = [shape.get("system"), messages]
    return Conversation(
        model=str(shape["model"]),
        text="\n".join(_strings(parts)),
        last_user=_user_text(messages[last]) if asked else "",
        answers=roles.count("assistant"),
        answered=roles[last + 1 :].count("assistant"),
        stream=bool(shape.get("stream")),
        usage_wanted=usage_wanted,
    )


class OpenAIStyle:
    """openai-completions: POST /v1/chat/completions."""

    name = "openai-completions"
    path = "/v1/chat/completions"
    _STOPS = {"toolUse": "tool_calls"}
    _ERRORS = {400: "invalid_request_error", 401: "invalid_request_error"}

    def read(self, shape: Json) -> Conversation:
        """The conversation of a request. Raises KeyError for a missing field."""
        options = shape.get("stream_options") or {}
        return _conversation(shape, bool(options.get("include_usage")))

    def key(self, headers: Mapping[str, str]) -> str:
        """The API key as this style sends it."""
        return headers.get("authorization", "").removeprefix("Bearer ")

    def error(self, status: int, message: str) -> Json:
        """An error body."""
        kind = self._ERRORS.get(status, "server_error")
        code = "invalid_api_key" if status == 401 else None
        error = {"message": message, "type": kind, "param": None, "code": code}
        return {"error": error}

    def whole(self, answer: Answer) -> Json:
        """The answer as one object."""
        message: Json = {"role": "assistant", "content": answer.step.text or None}
        if answer.step.thinking:
            message["reasoning_content"] = answer.step.thinking
        if answer.step.tools:
            message["tool_calls"] = [
                self._tool(answer, n, json.dumps(t.args))
                for n, t in enumerate(answer.step.tools)
            ]
        return self._shape(answer, "chat.completion") | {
            "choices": [self._choice(answer, "message", message, self._stop(answer))],
            "usage": self._usage(answer.usage),
        }

    def events(self, answer: Answer) -> Iterator[bytes]:
        """The answer as server-sent events, without its end."""
        yield self._delta(answer, {"role": "assistant", "content": ""})
        for piece in _pieces(answer.step.thinking):
            yield self._delta(answer, {"reasoning_content": piece})
        for piece in _pieces(answer.step.text):
            yield self._delta(answer, {"content": piece})
        for number, tool in enumerate(answer.step.tools):
            first = {"index": number, **self._tool(answer, number, "")}
            yield self._delta(answer, {"tool_calls": [first]})
            for piece in _pieces(json.dumps(tool.args)):
                part = {"index": number, "function": {"arguments": piece}}
                yield self._delta(answer, {"tool_calls": [part]})

    def end(self, answer: Answer) -> Iterator[bytes]:
        """The last events: why it stopped, usage when it was asked for, the end."""
        yield self._delta(answer, {}, self._stop(answer))
        if answer.conversation.usage_wanted:
            shape = self._shape(answer, "chat.completion.chunk")
            usage = self._usage(answer.usage)
            yield self._event(shape | {"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def broken(self, message: str) -> bytes:
        """The event of an error in mid-stream."""
        return self._event(self.error(500, message))

    def _stop(self, answer: Answer) -> str:
        return self._STOPS.get(answer.step.stop_reason, answer.step.stop_reason)

    def _shape(self, answer: Answer, kind: str) -> Json:
        return {
            "id": f"chatcmpl-{answer.id}",
            "object": kind,
            "created": answer.created,
            "model": answer.conversation.model,
        }

    def _choice(self, answer: Answer, key: str, part: Json, stop: str | None) -> Json:
        return {"index": 0, key: part, "finish_reason": stop, "logprobs": None}

    def _tool(self, answer: Answer, number: int, arguments: str) -> Json:
        name = answer.step.tools[number].name
        return {
            "id": answer.call_id("call", number),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _usage(self, usage: Tokens) -> Json:
        # prompt_tokens includes the cached ones; cache_write_tokens is OpenRouter's.
        prompt = usage.input + usage.cacheRead + usage.cacheWrite
        return {
            "prompt_tokens": prompt,
            "completion_tokens": usage.output,
            "total_tokens": prompt + usage.output,
            "prompt_tokens_details": {
                "cached_tokens": usage.cacheRead,
                "cache_write_tokens": usage.cacheWrite,
            },
        }

    def _delta(self, answer: Answer, delta: Json, stop: str | None = None) -> bytes:
        shape = self._shape(answer, "chat.completion.chunk")
        return self._event(
            shape | {"choices": [self._choice(answer, "delta", delta, stop)]}
        )

    def _event(self, shape: Json) -> bytes:
        return f"data: {json.dumps(shape)}\n\n".encode()


class AnthropicStyle:
    """anthropic-messages: POST /v1/messages."""

    name = "anthropic-messages"
    path = "/v1/messages"
    _STOPS = {"stop": "end_turn", "length": "max_tokens", "toolUse": "tool_use"}
    _ERRORS = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
        529: "overloaded_error",
    }

    def read(self, shape: Json) -> Conversation:
        """The conversation of a request. Raises KeyError for a missing field."""
        return _conversation(shape, usage_wanted=True)

    def key(self, headers: Mapping[str, str]) -> str:
        """The API key as this style sends it."""
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        return headers.get("x-api-key", bearer)

    def error(self, status: int, message: str) -> Json:
        """An error body."""
        kind = self._ERRORS.get(status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def whole(self, answer: Answer) -> Json:
        """The answer as one object."""
        shape = self._message(answer)
        shape["content"] = [
            block | part
            for block, key, text in self._blocks(answer)
            for part in [{key: json.loads(text) if key == "input" else text}]
        ]
        shape["stop_reason"] = self._stop(answer)
        shape["usage"]["output_tokens"] = answer.usage.output
        return shape

    def events(self, answer: Answer) -> Iterator[bytes]:
        """The answer as server-sent events, without its end."""
        yield self._event({"type": "message_start", "message": self._message(answer)})
        for index, (block, key, text) in enumerate(self._blocks(answer)):
            yield from self._block_events(index, block, key, text)

    def end(self, answer: Answer) -> Iterator[bytes]:
        """The last events: why it stopped, the output's usage, the end."""
        delta = {"stop_reason": self._stop(answer), "stop_sequence": None}
        usage = {"output_tokens": answer.usage.output}
        yield self._event({"type": "message_delta", "delta": delta, "usage": usage})
        yield self._event({"type": "message_stop"})

    def broken(self, message: str) -> bytes:
        """The event of an error in mid-stream."""
        return self._event(self.error(529, message))

    def _stop(self, answer: Answer) -> str:
        return self._STOPS.get(answer.step.stop_reason, answer.step.stop_reason)

    def _message(self, answer: Answer) -> Json:
        return {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "model": answer.conversation.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": answer.usage.input,
                "cache_creation_input_tokens": answer.usage.cacheWrite,
                "cache_read_input_tokens": answer.usage.cacheRead,
                "output_tokens": 1,
            },
        }

    def _blocks(self, answer: Answer) -> Iterator[tuple[Json, str, str]]:
        """Each content block: its frame, the key of its content, the content."""
        step = answer.step
        if step.thinking:
            yield (
                {"type": "thinking", "signature": "c2lnbmVk"},
                "thinking",
                step.thinking,
            )
        if step.text:
            yield {"type": "text"}, "text", step.text
        for number, tool in enumerate(step.tools):
            call = answer.call_id("toolu", number)
            block = {"type": "tool_use", "id": call, "name": tool.name}
            yield block, "input", json.dumps(tool.args)

    def _block_events(
        self, index: int, block: Json, key: str, text: str
    ) -> Iterator[bytes]:
        signature = block.get("signature")
        start = block | {key: {} if key == "input" else ""}
        if signature:
            start["signature"] = ""
        yield self._event(
            {"type": "content_block_start", "index": index, "content_block": start}
        )
        kind, part = f"{key}_delta", key
        if key == "input":
            kind, part = "input_json_delta", "partial_json"
        for piece in _pieces(text):
            yield self._block_delta(index, {"type": kind, part: piece})
        if signature:
            delta = {"type": "signature_delta", "signature": signature}
            yield self._block_delta(index, delta)
        yield self._event({"type": "content_block_stop", "index": index})

    def _block_delta(self, index: int, delta: Json) -> bytes:
        return self._event(
            {"type": "content_block_delta", "index": index, "delta": delta}
        )

    def _event(self, shape: Json) -> bytes:
        return f"event: {shape['type']}\ndata: {json.dumps(shape)}\n\n".encode()


Style = OpenAIStyle | AnthropicStyle
STYLES: tuple[Style, ...] = (OpenAIStyle(), AnthropicStyle())


# ---------------------------------------------------------------------------
# model
#
# The server: key, script, log. A query after the path is tolerated, as clients send
# `?beta=true`.
# ---------------------------------------------------------------------------


@dataclass
class ModelCall:
    """One logged request; ``headers`` are names only, ``key`` the key that came.

    ``inflight`` counts the requests being answered when it came, itself included;
    ``status`` is 0 until it is decided; ``gone`` says that the client left early."""

    t: float
    style: str
    path: str
    headers: list[str]
    key: str
    body: Any
    inflight: int
    usage: Tokens | None = None
    status: int = 0
    gone: bool = False


class FakeModel(FakeServer):
    """A model provider on a local port that answers from scripts, in both styles.

    ``key`` None takes any key. ``log`` has every completion request."""

    def __init__(
        self,
        scripts: Iterable[object] = (),
        key: str | None = None,
        models: Sequence[str] = ("fake-1",),
        host: str = "127.0.0.1",
        port: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(host, port, clock)
        self.scripts = parse_scripts(scripts)
        self.key = key
        self.models = list(models)
        self.log: list[ModelCall] = []
        self._inflight = 0
        self._ids = itertools.count(1)

    @property
    def max_inflight(self) -> int:
        """The most requests that were being answered at one time."""
        return max((row.inflight for row in self.log), default=0)

    def set_scripts(self, scripts: Iterable[object]) -> None:
        """Replace the scripts. Raises ValueError when one is malformed."""
        self.scripts = parse_scripts(scripts)

    def answer(self, request: Request) -> Reply:
        """Route to completions or the model list."""
        if request.method == "GET" and request.path == "/v1/models":
            return self._list_models(request)
        for style in STYLES:
            if request.method == "POST" and request.path == style.path:
                return self._complete(style, request)
        return self.error_reply(request, 404, f"no route {request.path}")

    def error_reply(self, request: Request, status: int, message: str) -> Reply:
        """An error in the style that the request is of."""
        return json_reply(status, _style_of(request).error(status, message))

    def _key_wrong(self, request: Request) -> bool:
        if self.key is None:
            return False
        seen = _style_of(request).key(request.headers)
        return not hmac.compare_digest(seen.encode(), self.key.encode())

    def _list_models(self, request: Request) -> Reply:
        if self._key_wrong(request):
            return self.error_reply(request, 401, "invalid API key")
        rows = [{"id": m, "object": "model", "type": "model"} for m in self.models]
        return json_reply(200, {"object": "list", "data": rows, "has_more": False})

    def _complete(self, style: Style, request: Request) -> Reply:
        row = self._begin(style, request)
        reply = self._decided(style, request, row)
        row.status = reply.status
        reply.done = self._end_of_call
        return reply

    def _begin(self, style: Style, request: Request) -> ModelCall:
        with self.lock:
            self._inflight += 1
            row = ModelCall(
                t=self.clock(),
                style=style.name,
                path=request.path,
                headers=sorted(request.headers),
                key=style.key(request.headers),
                body=_json_or_text(request.body),
                inflight=self._inflight,
            )
            self.log.append(row)
        return row

    def _end_of_call(self) -> None:
        with self.lock:
            self._inflight -= 1

    def _decided(self, style: Style, request: Request, row: ModelCall) -> Reply:
        if self._key_wrong(request):
            return self.error_reply(request, 401, "invalid API key")
        try:
            conversation = style.read(request.json())
            step = decide(conversation, self.scripts)
        except (ValueError, KeyError, TypeError) as error:
            return self.error_reply(request, 400, f"unreadable request: {error!r}")
        self.stopping.wait(step.delay)
        if step.status != 200:
            message = step.error or responses.get(step.status, "scripted error")
            return self.error_reply(request, step.status, message)
        row.usage = count_tokens(step, request.body)
        number, now = next(self._ids), int(self.clock())
        answer = Answer(step, row.usage, conversation, number, now)
        if conversation.stream:
            headers = {"Content-Type": "text/event-stream; charset=utf-8"}
            stream = self._stream(style, answer, request, row)
            return Reply(200, headers=headers, stream=stream)
        return self._whole(style, answer, request, row)

    def _whole(
        self, style: Style, answer: Answer, request: Request, row: ModelCall
    ) -> Reply:
        if answer.step.hang:
            self._hang(request, row)
            return Reply(0)
        if answer.step.error:
            return self.error_reply(request, 500, answer.step.error)
        return json_reply(200, style.whole(answer))

    def _stream(
        self, style: Style, answer: Answer, request: Request, row: ModelCall
    ) -> Generator[bytes, None, None]:
        try:
            for event in style.events(answer):
                yield event
                self.stopping.wait(answer.step.chunkDelay)
            if answer.step.hang:
                self._hang(request, row)
            elif answer.step.error:
                yield style.broken(answer.step.error)
            else:
                yield from style.end(answer)
        except GeneratorExit:
            row.gone = True
            raise

    def _hang(self, request: Request, row: ModelCall) -> None:
        while not (self.stopping.wait(0.02) or row.gone):
            row.gone = request.client_left()

    def control(self, what: str, value: Any) -> object:
        """How a model in a container is steered and looked into."""
        if what == "GET log":
            return [asdict(row) for row in self.log]
        if what != "POST scripts":
            raise LookupError(what)
        self.set_scripts(value)
        return None


def _style_of(request: Request) -> Style:
    """Anthropic's where its path or version header is seen, else OpenAI's."""
    anthropic = request.path == AnthropicStyle.path
    return STYLES[anthropic or "anthropic-version" in request.headers]


def _json_or_text(body: bytes) -> object:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


# ---------------------------------------------------------------------------
# agent
#
# What stands in for pi where there is no container engine.
# ---------------------------------------------------------------------------

_BASH_TIMEOUT = 60.0


@dataclass
class ScriptedAgent:
    """A tiny stand-in for pi. It is ours, and only the demo and tests start it.

    It runs nothing but scripts that we wrote: the model it talks to is the fake one.
    It takes the flags that the runner gives pi, reads the prompt from stdin and
    models.json from $PI_CODING_AGENT_DIR, speaks openai-completions, runs the tool
    ``bash``, and prints pi's JSON-mode events. A provider's error ends the transcript
    with stop reason "error" and exit code 0, as pi's does."""

    model: str
    base_url: str
    api_key: str
    messages: list[Json]

    def run(self) -> int:
        """Talk until the model asks for no more tools; 0, as pi in JSON mode."""
        _emit("session", version=3, id=secrets.token_hex(8), cwd=str(Path.cwd()))
        _emit("agent_start")
        while self._turn():
            _emit("turn_end")
        _emit("agent_settled", aborted=False)
        return 0

    def _turn(self) -> bool:
        """One request and its tool calls; whether another turn is due."""
        _emit("turn_start")
        try:
            reply = self._ask()
        except urllib.error.HTTPError as error:
            _emit_failure(f"{error.code}: {error.read().decode(errors='replace')}")
            return False
        except (OSError, ValueError) as error:
            _emit_failure(str(error))
            return False
        choice = reply["choices"][0]
        self.messages.append(choice["message"])
        _emit("message_end", message=_pi_message(choice, reply["usage"]))
        calls = choice["message"].get("tool_calls", [])
        for call in calls:
            self._run_tool(call["id"], **call["function"])
        return bool(calls)

    def _ask(self) -> Json:
        body = {"model": self.model, "messages": self.messages}
        headers = {"Authorization": f"Bearer {self.api_key}"}
        url = f"{self.base_url}/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(request) as answer:
            return dict(json.load(answer))

    def _run_tool(self, number: str, name: str, arguments: str) -> None:
        args, tool = json.loads(arguments), {"toolCallId": number, "toolName": name}
        _emit("tool_execution_start", **tool, args=args)
        text, failed = _bash(args) if name == "bash" else (f"no tool {name}", True)
        result = {"content": [{"type": "text", "text": text}]}
        _emit("tool_execution_end", **tool, result=result, isError=failed)
        self.messages.append({"role": "tool", "tool_call_id": number, "content": text})


def _emit(kind: str, **fields: object) -> None:
    print(json.dumps({"type": kind, **fields}), flush=True)


def _emit_failure(text: str) -> None:
    message = {"role": "assistant", "content": [], "stopReason": "error"}
    _emit("message_end", message=message | {"errorMessage": text})


def _pi_message(choice: Json, usage: Json) -> Json:
    """An assistant message as pi shows it, from an OpenAI choice."""
    cache = usage["prompt_tokens_details"]
    read, write = cache["cached_tokens"], cache["cache_write_tokens"]
    stop = choice["finish_reason"]
    return {
        "role": "assistant",
        "content": [{"type": "text", "text": choice["message"]["content"] or ""}],
        "usage": {
            "input": usage["prompt_tokens"] - read - write,
            "output": usage["completion_tokens"],
            "cacheRead": read,
            "cacheWrite": write,
            "totalTokens": usage["total_tokens"],
        },
        "stopReason": "toolUse" if stop == "tool_calls" else stop,
    }


_TERM = (signal.SIGTERM,)


def _bash(args: Json) -> tuple[str, bool]:
    """Run a command line that one of our scripts gave: its output, and if it failed."""
    # held back until we know the child: a TERM in between would leave it behind
    signal.pthread_sigmask(signal.SIG_BLOCK, _TERM)
    process = subprocess.Popen(
        ["bash", "-c", args["command"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERM),
    )
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERM)
        output, _ = process.communicate(timeout=args.get("timeout", _BASH_TIMEOUT))
        return output.decode(errors="replace") or "(no output)", process.returncode != 0
    except subprocess.TimeoutExpired:
        return "Command timed out", True
    finally:
        # Whatever ends us (SIGTERM included) takes the command's children along.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def agent_main(options: argparse.Namespace) -> int:
    """Start the agent from pi's command line."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    models = Path(os.environ["PI_CODING_AGENT_DIR"], "models.json")
    name, _, model = options.model.partition("/")
    provider = json.loads(models.read_text())["providers"][name]
    system = [_text_or_file(value) for value in options.append_system_prompt]
    messages = [
        {"role": "system", "content": "\n\n".join(system)},
        {"role": "user", "content": sys.stdin.read()},
    ]
    url = provider["baseUrl"].rstrip("/")
    return ScriptedAgent(model, url, provider["apiKey"], messages).run()


def _text_or_file(value: str) -> str:
    """What pi makes of a prompt flag: the file of that name, else the text itself."""
    with contextlib.suppress(OSError, ValueError):
        return Path(value).read_text()
    return value


# ---------------------------------------------------------------------------
# commands
#
# `forge` and `model` run one fake as a server until a signal; `agent` takes pi's
# flags; `hook` is git's. The only secret is never an argument's value: it comes from
# the environment or, with ``--secret -``, as the first line of stdin.
# ---------------------------------------------------------------------------

_SECRET_VARIABLE = "PIDISPATCH_DEMO_SECRET"


def _serve(fake: FakeServer) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), fake:
        print(json.dumps({"listening": fake.port}), flush=True)
        while True:  # a signal right before a wait does not end it
            time.sleep(1)
    return 0


def _secret(options: argparse.Namespace) -> str | None:
    if options.secret == "-":
        return sys.stdin.readline().strip()
    return os.environ.get(_SECRET_VARIABLE)


def forge_main(options: argparse.Namespace) -> int:
    """Serve a FakeGitHub; repositories are made through POST /control/repos."""
    secret = _secret(options)
    tokens = [Token(secret, options.login, name="operator")] if secret else []
    return _serve(FakeGitHub(tokens, host=options.host, port=options.port))


def model_main(options: argparse.Namespace) -> int:
    """Serve a FakeModel; scripts come from a file or through POST /control/scripts."""
    scripts = json.loads(options.scripts.read_text()) if options.scripts else ()
    secret = _secret(options)
    return _serve(FakeModel(scripts, secret, host=options.host, port=options.port))


def _server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--secret", choices=["-", "env"], default="env")


def _agent_arguments(parser: argparse.ArgumentParser) -> None:
    """The two flags of pi that matter here; the others are taken and without effect."""
    parser.add_argument("--model", required=True)
    parser.add_argument("--append-system-prompt", action="append", default=[])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of the fakes."""
    parser = argparse.ArgumentParser(prog="pidispatch_demo")
    commands = parser.add_subparsers(required=True)
    forge = commands.add_parser("forge", help="serve the fake GitHub")
    _server_arguments(forge)
    forge.add_argument("--login", default="operator")
    forge.set_defaults(run=forge_main)
    model = commands.add_parser("model", help="serve the fake model provider")
    _server_arguments(model)
    model.add_argument("--scripts", type=Path)
    model.set_defaults(run=model_main)
    # No abbreviations: `--mode` would be taken for the start of `--model`.
    agent = commands.add_parser(
        "agent", help="stand in for pi (pi's flags)", allow_abbrev=False
    )
    _agent_arguments(agent)
    agent.set_defaults(run=agent_main)
    hook = commands.add_parser("hook", help="git's proc-receive hook")
    hook.set_defaults(run=lambda options: push_hook())
    options, unknown = parser.parse_known_args(arguments)
    # pi keeps flags that it does not know for its extensions; a server does not.
    if unknown and options.run is not agent_main:
        parser.error(f"unknown: {' '.join(unknown)}")
    return int(options.run(options))


# ---------------------------------------------------------------------------
# demo
#
# The orchestration behind `pidispatch demo`, built on everything above: the real
# service, one signed delivery, two replicas. With a container engine and the job
# image the boxes are real; else our scripted agent runs as a plain process.
# ---------------------------------------------------------------------------

_DEMO_REPO = "demo/greeter"
_DEMO_KEY = "demo-model-key"
_DEMO_TOKEN = "demo-forge-token"
_DEMO_SECRET = "demo-webhook-secret"
_DEMO_MODEL = "demo/fake-1"
_DEMO_SECONDS = 55.0
_MODEL_PORT = 8080
_GATE_IN_BOX = b"http://gate:8080"
_HOST_FROM_GATE = b"host.docker.internal"

_GREETER = """\
def greet(name):
    return "Hello, " + name.strip() + "!"
"""

_GREETER_TEST = """\
from greeter import greet


def test_a_name_is_greeted():
    assert greet("Ada") == "Hello, Ada!"
"""

_ISSUE = {
    "title": "greet() fails when nobody is named",
    "body": "`greet(None)` raises AttributeError. It should greet the world.",
}

#: What the scripted model does on each replica's branch: two honest solutions.
_SOLUTIONS = {
    1: (
        "Greet the world when no name is given",
        "def greet(name=None):\n"
        '    return "Hello, " + (name or "world").strip() + "!"\n',
    ),
    2: (
        "Handle a missing name before greeting",
        "def greet(name=None):\n    if not name or not name.strip():\n"
        '        name = "world"\n    return f"Hello, {name.strip()}!"\n',
    ),
}


def _solve(replica: int) -> Json:
    """The script of one replica: edit, commit, write the request, say so."""
    title, code = _SOLUTIONS[replica]
    marker = f"[r{replica}/2] "
    command = (
        f"cat > greeter.py <<'EOF'\n{code}EOF\n"
        f"git commit -qam '{title}'\n"
        f"printf '%s\\n\\n%s\\n' '{marker}{title}' 'Fixes the missing name.' "
        "> ${PI_OUTBOX:-/outbox}/review-request.md\n"
        f"printf '%s\\n' 'Done: {title}.' > ${{PI_OUTBOX:-/outbox}}/comment.md"
    )
    return {
        "match": f"checked out as pi/issue-7-r{replica}",
        "steps": [
            {"tools": [{"name": "bash", "args": {"command": command}}]},
            {"text": f"Done: {title}."},
        ],
    }


class ProcessBox:
    """A box without an engine: our gate and runner as processes of this user.

    Only the demo uses it, and the agent in it is ours: nothing is isolated."""

    def __init__(self, spec: pidispatch.BoxSpec, root: Path) -> None:
        self.spec, self.root = spec, root
        for name in ("job", "workspace", "outbox", "home"):
            (root / name).mkdir(parents=True)
        self._gate_log = (root / "gate.log").open("w+")
        line = spec.gate_line.replace(_HOST_FROM_GATE, b"127.0.0.1")
        image = Path(str(pidispatch_module().resource("image")))
        self._image = image
        self._gate = subprocess.Popen(
            [
                sys.executable,
                "-I",
                str(image / "gate.py"),
                "--host",
                "127.0.0.1",
                "--port",
                "0",
            ],
            stdin=subprocess.PIPE,
            stdout=self._gate_log,
        )
        assert self._gate.stdin
        self._gate.stdin.write(line + b"\n")
        self._gate.stdin.flush()

    def _gate_port(self) -> int:
        """The port from the gate's first line, once it is written."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            first = (self.root / "gate.log").read_text().partition("\n")
            if first[1]:
                return int(json.loads(first[0])["port"])
            time.sleep(0.02)
        raise RuntimeError("the gate did not start")

    def start(self, inputs: Mapping[str, bytes | Path]) -> None:
        """Lay out /job under our own root and start the runner."""
        here = f"http://127.0.0.1:{self._gate_port()}".encode()
        for name, content in inputs.items():
            path = self.root / "job" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            data = content if isinstance(content, bytes) else content.read_bytes()
            if name == "job.json":
                data = data.replace(_GATE_IN_BOX, here)
                data = data.replace(_HOST_FROM_GATE, b"127.0.0.1")
            path.write_bytes(data)
        rules = self.root / "rules"
        rules.mkdir()
        (rules / "HARD_RULES.md").write_text(pidispatch_module().hard_rules())
        self._log = (self.root / "runner.log").open("w")
        self._runner = subprocess.Popen(
            self._command(), env=self._environment(), stdout=self._log
        )

    def started(self) -> bool:
        return hasattr(self, "_runner")

    def _command(self) -> list[str]:
        agent = f"{shlex.quote(sys.executable)} -I {shlex.quote(str(_OWN_FILE))} agent"
        command = [sys.executable, "-I", str(self._image / "runner.py"), "--pi", agent]
        places = {n: self.root / n for n in ("job", "outbox", "home", "rules")}
        places["workspace"] = self.spec.folder or self.root / "workspace"
        for name, place in places.items():
            command += [f"--{name}", str(place)]
        return command

    def _environment(self) -> dict[str, str]:
        home = str(self.root / "home")
        return {
            **self.spec.environment,
            "HOME": home,
            "PATH": os.environ.get("PATH", os.defpath),
            "PI_CODING_AGENT_DIR": f"{home}/.pi/agent",
            "PI_OUTBOX": str(self.root / "outbox"),
        }

    def wait(self, seconds: int) -> bool:
        """Whether the runner ended within that time."""
        try:
            self._runner.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def tend(self) -> bool:
        """Whether the gate's process runs; it is not started again here."""
        return self._gate.poll() is None

    def stop(self) -> None:
        """TERM, ten seconds, KILL."""
        self._runner.terminate()
        if not self.wait(10):
            self._runner.kill()
            self._runner.wait()

    def collect(self, into: Path) -> pidispatch.BoxExit:
        """What the engine's box reads from containers, read from files."""
        module = pidispatch_module()
        outbox = self.root / "outbox"
        gate_lines = (self.root / "gate.log").read_text().splitlines()
        tokens, forks, spent = module.meter_of(gate_lines)
        bundle = outbox / "branch.bundle"
        if bundle.is_file():
            module.write_private(into / bundle.name, bundle.read_bytes())
        texts = [
            (outbox / name).read_text() if (outbox / name).is_file() else None
            for name in ("review-request.md", "comment.md")
        ]
        ended: pidispatch.BoxExit = module.BoxExit(
            code=self._runner.returncode,
            result=module.result_of((self.root / "runner.log").read_text().split("\n")),
            tokens=tokens,
            metered=bool(gate_lines),
            forks=forks,
            budget_spent=spent,
            bundle=into / bundle.name if bundle.is_file() else None,
            review_request=texts[0],
            comment=texts[1],
        )
        return ended

    def transcript(self) -> bytes | None:
        """None: the scripted agent keeps no session."""
        return None

    def given(self) -> bytes | None:
        """The job.json that was put in."""
        return (self.root / "job" / "job.json").read_bytes()

    def log(self) -> bytes:
        """The runner's stdout."""
        return (self.root / "runner.log").read_bytes()

    def remove(self) -> None:
        """End the gate and remove the files."""
        self._gate.terminate()
        self._gate.wait()
        for stream in (self._gate.stdin, self._gate_log, getattr(self, "_log", None)):
            if stream:
                stream.close()
        shutil.rmtree(self.root, ignore_errors=True)


class ProcessEngine:
    """An engine without containers: every image exists and claims the demo's needs."""

    local = True

    def __init__(self, root: Path) -> None:
        self.root = root

    def answer(self) -> None:
        """Its boxes are processes: there is nobody to ask."""

    def image(self, tag: str) -> pidispatch.Image | None:
        module = pidispatch_module()
        labels = {module.LABEL + "capabilities": "replicas,gate"}
        image: pidispatch.Image = module.Image(
            tag, tag, labels, os.getuid(), os.getgid()
        )
        return image

    def catalogue(self, image: pidispatch.Image) -> Mapping[str, Any]:
        return {}

    def open(self, spec: pidispatch.BoxSpec) -> pidispatch.Box:
        return ProcessBox(spec, self.root / f"{spec.job}.{spec.attempt}")

    def adopt(self, job: str) -> pidispatch.Box | None:
        return None

    def sweep(self, keep: frozenset[str], before: float) -> int:
        return 0

    def isolates(self, proven: str | None) -> str | None:
        """Its boxes are plain processes, and the demo says so: nothing to prove."""
        return "process"

    def disk(self) -> Path | None:
        """Its boxes are folders beside the state, which is watched."""
        return None

    def tail(self, job: str, lines: int) -> list[str]:
        logs = sorted(self.root.glob(f"{job}.*/runner.log"))
        text = logs[-1].read_text("utf-8", "replace") if logs else ""
        return text.splitlines()[-lines:]


def pidispatch_module() -> Any:
    """The tool itself, imported late: the fakes also run where it is not installed."""
    import pidispatch

    return pidispatch


def run_demo(as_json: bool = False) -> int:
    """The whole path on fakes; prints both diffs, or JSON. 0 when all completed."""
    began = time.monotonic()
    module = pidispatch_module()
    module.git_version()  # both fakes and the publishing need it: say so at once
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pi-demo-")))
        forge = stack.enter_context(FakeGitHub([Token(_DEMO_TOKEN, "operator")]))
        repo = forge.create_repo(
            _DEMO_REPO,
            {"greeter.py": _GREETER, "test_greeter.py": _GREETER_TEST},
            issues={7: _ISSUE},
        )
        repo.add_collaborator("maintainer", "write")
        settings = _demo_settings(module, root, forge)
        engine, settings = _demo_engine(module, settings, root, stack)
        box = "docker" if isinstance(engine, module.DockerEngine) else "process"
        if not as_json:
            print(_DEMO_BOX[box])
        jobs = _demo_run(module, settings, engine, forge, repo, stack)
        seconds = round(time.monotonic() - began, 1)
        report = module.DemoReport(box, jobs, seconds)
        module.emit(report, lambda: _demo_text(jobs, repo, seconds), as_json)
    return 0 if all(job.outcome == "completed" for job in jobs) else 1


_DEMO_BOX = {
    "docker": "box: docker (real containers and real pi; the model is scripted)",
    "process": "box: process (no engine or no job image: our scripted agent runs as "
    "a plain process, without isolation)",
}


def _demo_settings(module: Any, root: Path, forge: FakeGitHub) -> Any:
    rules = [
        {
            "on": {"type": "label", "any": ["pi:urgent"]},
            "run": {"kind": "github", "flow": "fix-issue", "replicas": 2},
        }
    ]
    path = root / "triggers.json"
    path.write_text(json.dumps({"triggers": rules}))
    image = os.environ.get("PI_JOB_IMAGE", "pi-job:latest")
    return module.Settings(
        db=root / "pidispatch.db",
        state_dir=root / "state",
        triggers_file=path,
        job_image=image,
        gate_image=image,
        bind="127.0.0.1",
        port=0,
        panel_port=0,
        webhook_secret=(_DEMO_SECRET,),
        github_pat=_DEMO_TOKEN,
        github_api_url=f"{forge.url}/api/v3",
        provider="demo",
        model="fake-1",
        keys={"demo": _DEMO_KEY},
    )


def _with_model(module: Any, settings: Any, url: str, **more: Any) -> Any:
    row = {"id": "fake-1", "contextWindow": 200_000, "maxTokens": 8_000}
    row |= {"cost": {"input": 3, "output": 15, "cacheRead": 0.3, "cacheWrite": 3.75}}
    provider = module.Provider(
        "demo", f"{url}/v1", "openai-completions", "DEMO_KEY", models=(row,)
    )
    return module.msgspec.structs.replace(
        settings, providers={"demo": provider}, **more
    )


def _demo_engine(
    module: Any, settings: Any, root: Path, stack: contextlib.ExitStack
) -> tuple[Any, Any]:
    """A Docker engine with the job image and a model container, else processes."""
    scripts = [_solve(1), _solve(2)]
    # an instance of its own, which the service's sweep at its start does not touch
    engine = module.DockerEngine(settings, "demo-" + secrets.token_hex(4))
    try:
        image = engine.image(settings.job_image)
    except module.PidispatchError:
        image = None
    if image is None or not {"gate", "replicas"} <= image.capabilities:
        model = stack.enter_context(FakeModel(scripts, key=_DEMO_KEY))
        settings = _with_model(module, settings, model.url)
        return ProcessEngine(root / "boxes"), settings
    name = "pi-demo-model-" + secrets.token_hex(4)
    stack.callback(engine.sweep, frozenset())
    _start_model_container(engine, image, name, scripts)
    url = f"http://{name}:{_MODEL_PORT}"
    settings = _with_model(module, settings, url, gate_network=name)
    return module.DockerEngine(settings, engine.instance + "-jobs"), settings


def _start_model_container(
    engine: Any, image: Any, name: str, scripts: Sequence[Json]
) -> None:
    """The fake model in a container of its own, on a network for gates only."""
    labels = engine.labels("demo-model", 0, "demo")
    engine.create_job_network(name, labels)
    api = engine.api
    files = {
        "demo.py": _OWN_FILE.read_bytes(),
        "scripts.json": json.dumps(scripts).encode(),
    }
    api.create_container(
        image.id,
        name=name,
        entrypoint=["python3", "/job/demo.py", "model", "--secret", "env"],
        command=[
            "--host",
            "0.0.0.0",
            "--port",
            str(_MODEL_PORT),
            "--scripts",
            "/job/scripts.json",
        ],
        environment={_SECRET_VARIABLE: _DEMO_KEY},
        labels=labels,
        volumes=["/job"],
        host_config=api.create_host_config(network_mode=name, init=True),
    )
    with pidispatch_module().tar_of(files) as tar:
        api.put_archive(name, "/job", tar)
    api.start(name)


def _demo_run(
    module: Any,
    settings: Any,
    engine: Any,
    forge: FakeGitHub,
    repo: Repo,
    stack: contextlib.ExitStack,
) -> list[pidispatch.DemoJob]:
    """Serve, send the one delivery, and wait until both replicas are published."""
    service = module.Service(settings, settings.triggers_file, engine=engine)
    service.start()
    stack.callback(service.stop, end_jobs=True)
    payload = labeled_payload(repo, 7, "pi:urgent", "maintainer")
    guid = "demo-" + secrets.token_hex(6)
    headers, body = signed_delivery("issues", payload, _DEMO_SECRET, guid)
    url = f"http://127.0.0.1:{service.edge.port}/github"
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        ids = json.load(answer)["jobs"]
    return [_demo_job(module, run) for run in _demo_ends(module, service.store, ids)]


def _demo_ends(module: Any, store: Any, ids: Sequence[str]) -> list[pidispatch.RunRow]:
    """Wait for the replicas; on a terminal, say what each is at."""
    deadline = time.monotonic() + _DEMO_SECONDS

    def look() -> list[pidispatch.RunRow]:
        return [store.run(job)[0] for job in ids]

    def said() -> str:
        return "; ".join(f"r{run.replica} {run.state}" for run in look())

    with module.underway(said):
        while time.monotonic() < deadline:
            runs = look()
            if all(run.state in ("completed", "policy", "failed") for run in runs):
                return runs
            time.sleep(0.1)
    return look()


def _demo_job(module: Any, run: pidispatch.RunRow) -> pidispatch.DemoJob:
    link = run.request and module.DemoLink(run.request.title, run.request.url)
    job: pidispatch.DemoJob = module.DemoJob(
        id=run.id,
        replica=run.replica,
        replicas=run.replicas,
        outcome=run.state,
        reason=run.reason,
        branch=module.branch_name(7, run.replica),
        request=link,
    )
    return job


def _demo_text(jobs: Sequence[pidispatch.DemoJob], repo: Repo, seconds: float) -> str:
    lines = [f"one delivery, {len(jobs)} replicas, {seconds} s\n"]
    for job in jobs:
        lines.append(f"{job.id}: {job.outcome} {job.reason or ''}".rstrip())
        if job.request:
            lines.append(f"  review request: {job.request.title}\n")
            spread = f"{repo.default_branch}...{job.branch}"
            lines.append(repo.git.git("diff", spread) + "\n")
    lines.append("A person compares, picks one, and merges it. pidispatch never does.")
    lines.append("Next, in a folder for your own settings: pidispatch init")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
