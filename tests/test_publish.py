"""Section publish: mirrors, packs, bundles, pushes and review requests.

Real git talks real smart HTTP to `git http-backend` behind a small server with
Basic authentication; only the forge's API is a double.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pidispatch as pd

TOKEN = "ghp_canary/+ß0123456789"
USER = "x-access-token"


# -----------------------------------------------------------------------------
# A git server, a box and a forge
# -----------------------------------------------------------------------------


def run_git(*arguments: str, at: Path, feed: bytes = b"", index: str = "") -> str:
    """git as an ordinary user would run it, cut off from the machine's settings."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(at),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_AUTHOR_DATE": "1700000000 +0000",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@example.org",
        "GIT_COMMITTER_DATE": "1700000000 +0000",
    }
    if index:
        environment["GIT_INDEX_FILE"] = index
    done = subprocess.run(
        ["git", *arguments], cwd=at, env=environment, input=feed, capture_output=True
    )
    assert done.returncode == 0, (arguments, done.stderr.decode())
    return done.stdout.decode().strip()


def new_repository(path: Path) -> Path:
    path.mkdir(parents=True)
    run_git("init", "--bare", "--quiet", "--initial-branch=main", ".", at=path)
    return path


Files = Mapping[str, str | bytes | tuple[str, str]]


def commit(at: Path, parents: list[str], files: Files, message: str = "work") -> str:
    """A commit made by plumbing; a tuple is (mode, content or object id)."""
    index = str(at / f"index-{threading.get_ident()}")
    Path(index).unlink(missing_ok=True)
    if parents:
        run_git("read-tree", parents[0], at=at, index=index)
    for name, value in files.items():
        mode, content = value if isinstance(value, tuple) else ("100644", value)
        if mode == "160000":
            blob = str(content)
        else:
            raw = content.encode() if isinstance(content, str) else content
            blob = run_git("hash-object", "-w", "--stdin", at=at, feed=raw)
        entry = f"{mode},{blob},{name}"
        run_git("update-index", "--add", "--cacheinfo", entry, at=at, index=index)
    tree = run_git("write-tree", at=at, index=index)
    flags = [word for parent in parents for word in ("-p", parent)]
    return run_git("commit-tree", tree, *flags, "-m", message, at=at)


def chain(at: Path, length: int, parent: str | None = None) -> str:
    """`length` commits in a row, made by one process."""
    lines = []
    for i in range(length):
        lines.append("commit refs/heads/chain\n")
        lines.append(f"committer a <a@example.org> {1_700_000_000 + i} +0000\n")
        lines.append(f"data 1\n{i % 10}\n")
        if i == 0 and parent:
            lines.append(f"from {parent}\n")
        lines.append(f"M 100644 inline count\ndata {len(str(i))}\n{i}\n")
    run_git("fast-import", "--quiet", "--force", at=at, feed="".join(lines).encode())
    return run_git("rev-parse", "refs/heads/chain", at=at)


def point(at: Path, ref: str, value: str) -> None:
    run_git("update-ref", ref, value, at=at)


Fault = Callable[["Handler"], bool]


class Handler(BaseHTTPRequestHandler):
    """One request: authentication, an injected fault, then git http-backend."""

    protocol_version = "HTTP/1.1"
    server: GitServer
    lost = False

    def do_GET(self) -> None:
        self.answer(b"")

    def do_POST(self) -> None:
        self.answer(self.body())

    def log_message(self, format: str, *args: object) -> None:
        pass

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", "0")))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def reply(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        if self.lost:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer(self, body: bytes) -> None:
        given = self.headers.get("Authorization")
        self.server.seen.append((self.command, self.path, given))
        if any(fault(self) for fault in self.server.faults):
            return
        if given != self.server.basic:
            self.reply(401, {"WWW-Authenticate": 'Basic realm="git"'}, b"")
            return
        self.backend(body)

    def backend(self, body: bytes) -> None:
        path, _, query = self.path.partition("?")
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_PROJECT_ROOT": str(self.server.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "REMOTE_USER": "tester",
            "REQUEST_METHOD": self.command,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
        }
        if self.server.protocol_v2:
            environment["GIT_PROTOCOL"] = self.headers.get("Git-Protocol", "")
        done = subprocess.run(
            ["git", "http-backend"], env=environment, input=body, capture_output=True
        )
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        status = int(headers.pop("Status", "200").split()[0])
        if self.server.cut and len(content) > self.server.cut:
            content = content[: self.server.cut]
        self.reply(status, headers, content)


class GitServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.token = TOKEN
        self.protocol_v2 = True
        self.cut: int | None = None
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str, str | None]] = []

    @property
    def basic(self) -> str:
        pair = f"{USER}:{self.token}".encode()
        return f"Basic {base64.b64encode(pair).decode()}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def asked(self, word: str) -> int:
        """How many authorised requests had `word` in their path."""
        return sum(1 for _, path, known in self.seen if known and word in path)


def serve(root: Path) -> Iterator[GitServer]:
    server = GitServer(root)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GitServer]:
    yield from serve(tmp_path / "forge")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = new_repository(tmp_path_factory.mktemp("template") / "r.git")
    run_git("config", "http.receivepack", "true", at=path)
    first = commit(path, [], {"README": "one\n"}, "first")
    point(path, "refs/heads/main", commit(path, [first], {"code": "a\n" * 50}))
    return path


@pytest.fixture
def origin(server: GitServer, template: Path) -> Path:
    """The forge's repository o/r: two commits on main."""
    return Path(shutil.copytree(template, server.root / "o" / "r.git"))


@pytest.fixture
def mirrors(tmp_path: Path) -> pd.Mirrors:
    return pd.Mirrors(tmp_path / "mirrors")


@dataclass
class MemoryForge:
    """The forge's API in memory; its git is the server's."""

    url: str
    kind: pd.ForgeKind = "github"
    token: str = TOKEN
    comments: list[str] = field(default_factory=list)
    targets: list[pd.Target] = field(default_factory=list)
    requests: dict[int, tuple[str, str, pd.Request]] = field(default_factory=dict)
    bodies: dict[int, str] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    fail: list[Exception] = field(default_factory=list)

    def _trouble(self) -> None:
        if self.fail:
            raise self.fail.pop(0)

    def verify(self, headers: Mapping[str, str], body: bytes) -> None:
        raise NotImplementedError

    def parse(self, headers: Mapping[str, str], body: bytes) -> pd.Event:
        raise NotImplementedError

    def authority(self, event: pd.Event) -> Literal["allowed", "denied", "ask"]:
        raise NotImplementedError

    def ask(self, event: pd.Event) -> bool:
        raise NotImplementedError

    def own_id(self) -> str | None:
        return None

    def credential(self, repo: str) -> pd.Credential:
        return pd.Credential(USER, self.token)

    def clone_url(self, repo: str) -> str:
        return f"{self.url}/{repo}.git"

    def default_branch(self, repo: str) -> str:
        raise AssertionError("one ls-remote says it")

    def comment(self, repo: str, target: pd.Target, text: str, marker: str) -> None:
        self._trouble()
        assert text.rstrip().endswith(marker)
        if not any(marker in comment for comment in self.comments):
            self.comments.append(text)
            self.targets.append(target)

    def find_request(self, repo: str, head: str) -> pd.Request | None:
        self._trouble()
        for number, (of, _, request) in self.requests.items():
            if of == head and number not in self.closed:
                return request
        return None

    def open_request(
        self, repo: str, head: str, base: str, title: str, body: str
    ) -> pd.Request:
        self._trouble()
        number = 100 + len(self.requests)
        request = pd.Request(number, f"{self.url}/{repo}/pull/{number}", title)
        self.requests[number] = (head, base, request)
        self.bodies[number] = body
        return request

    def retitle_request(self, repo: str, number: int, title: str) -> None:
        head, base, request = self.requests[number]
        changed = pd.Request(number, request.url, title)
        self.requests[number] = (head, base, changed)

    @property
    def titles(self) -> list[str]:
        return [request.title for _, _, request in self.requests.values()]


@pytest.fixture
def forge(server: GitServer) -> MemoryForge:
    return MemoryForge(server.url)


def make_job(
    replica: int | None = None,
    replicas: int | None = None,
    target: pd.TargetType = "issue",
    delivery: str = "d1",
    kind: pd.ForgeKind = "github",
    head: str | None = None,
    head_ref: str | None = None,
) -> pd.Job:
    return pd.Job(
        id=pd.job_id(kind, delivery, replica),
        set=pd.set_id(kind, delivery),
        kind=kind,
        repo="o/r",
        target=pd.Target(target, 7, title="The issue's own words", body="secret plan"),
        flow="fix-issue",
        dedup=pd.dedup_key("o/r#7", "fix-issue", replica),
        run=pd.Run(kind=kind, flow="fix-issue"),
        trigger=pd.Trigger(
            event="issues", delivery=delivery, sender="1", index=0, type="label", by="x"
        ),
        head=head,
        head_ref=head_ref,
        replica=replica,
        replicas=replicas,
    )


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Where a box's files are put on the host."""
    path = tmp_path / "outside"
    path.mkdir()
    return path


class Box:
    """What happens in the container: the packed clone, commits, a bundle."""

    def __init__(self, path: Path, prepared: pd.Prepared) -> None:
        self.path, self.base = new_repository(path), prepared.base
        pack = prepared.pack.read_bytes()
        (path / "shallow").write_bytes(prepared.shallow)
        run_git("index-pack", "--stdin", "--strict", at=path, feed=pack)
        point(path, "refs/heads/main", prepared.base)

    def bundle(self, tip: str, *options: str) -> Path:
        point(self.path, pd.RESULT_REF, tip)
        target = self.path.with_suffix(".bundle")
        what = options or (f"{self.base}..{pd.RESULT_REF}",)
        run_git("bundle", "create", "--quiet", str(target), *what, at=self.path)
        return target


def objects(at: Path) -> set[str]:
    form = "--batch-check=%(objectname)"
    return set(run_git("cat-file", form, "--batch-all-objects", at=at).split())


def packed(prepared: pd.Prepared, tmp_path: Path) -> set[str]:
    """The objects of a prepared pack, read by a repository of its own."""
    at = new_repository(tmp_path / f"unpacked-{prepared.pack.parent.name}")
    run_git("index-pack", "--stdin", at=at, feed=prepared.pack.read_bytes())
    return objects(at)


@dataclass
class Bench:
    """Everything one end-to-end test needs."""

    forge: MemoryForge
    mirrors: pd.Mirrors
    origin: Path
    outside: Path

    @property
    def remote(self) -> pd.Remote:
        return pd.Remote.of(self.forge, "o/r")

    def prepare(
        self, job: pd.Job, base: str | None = None, request: str | None = None
    ) -> pd.Prepared:
        into = self.outside / job.id
        into.mkdir(exist_ok=True)
        return self.mirrors.prepare(self.remote, job, into, base, request)

    def box(self, job: pd.Job, prepared: pd.Prepared) -> Box:
        return Box(self.outside / f"box-{job.id}", prepared)

    def work(
        self,
        job: pd.Job,
        files: Files | None = None,
        review_request: str | None = "A fix\n\nIt fixes.",
        comment: str | None = "Done.",
    ) -> pd.Work:
        """Prepare, let a box commit once, and hand over what it left."""
        prepared = self.prepare(job)
        box = self.box(job, prepared)
        tip = commit(box.path, [prepared.base], files or {"fix": job.id})
        return pd.Work(
            bundle=box.bundle(tip),
            review_request=review_request,
            comment=comment,
            base=prepared.base,
            lease=prepared.lease,
            default_branch=prepared.default_branch,
            commits=1,
        )

    def publish(self, job: pd.Job, work: pd.Work) -> pd.Published:
        return pd.publish_job(self.forge, self.mirrors, job, work)

    def tip(self, branch: str) -> str | None:
        ref = f"refs/heads/{branch}"
        listed = run_git("for-each-ref", "--format=%(objectname)", ref, at=self.origin)
        return listed or None


@pytest.fixture
def bench(
    forge: MemoryForge, mirrors: pd.Mirrors, origin: Path, outside: Path
) -> Bench:
    return Bench(forge, mirrors, origin, outside)


# -----------------------------------------------------------------------------
# Preparing
# -----------------------------------------------------------------------------


def test_a_job_gets_the_default_branch_its_tip_and_an_absent_lease(
    bench: Bench,
) -> None:
    prepared = bench.prepare(make_job())
    assert prepared.base == bench.tip("main")
    assert prepared.default_branch == "main"
    assert prepared.lease is None
    assert prepared.request_sha is None
    assert prepared.skill is None
    assert prepared.shallow == b""


def test_the_job_branchs_present_tip_is_the_lease(bench: Bench) -> None:
    point(bench.origin, "refs/heads/pi/issue-7-r2", str(bench.tip("main")))
    one, two = make_job(1, 2), make_job(2, 2)
    assert bench.prepare(one).lease is None
    assert bench.prepare(two).lease == bench.tip("main")


def test_a_ref_that_only_ends_like_the_branch_is_not_its_lease(bench: Bench) -> None:
    main = str(bench.tip("main"))
    point(bench.origin, "refs/heads/x/refs/heads/pi/issue-7", main)
    assert bench.prepare(make_job()).lease is None


def test_an_unreplicated_second_job_fetches_nothing(
    bench: Bench, server: GitServer
) -> None:
    bench.prepare(make_job())
    server.seen.clear()
    bench.prepare(make_job(delivery="d2"))
    # One ls-remote in protocol v2: the advertisement, then the list of refs.
    assert server.asked("info/refs") == 1
    assert server.asked("git-upload-pack") == 2


def test_a_second_fetch_brings_only_what_is_new(bench: Bench) -> None:
    bench.prepare(make_job())
    known = objects(bench.mirrors.of("github", "o/r").path)
    tip = commit(bench.origin, [str(bench.tip("main"))], {"more": "1"})
    point(bench.origin, "refs/heads/main", tip)
    packs = set(bench.mirrors.root.glob("*/objects/pack/*.pack"))
    bench.prepare(make_job(delivery="d2"))
    (new,) = set(bench.mirrors.root.glob("*/objects/pack/*.pack")) - packs
    held = run_git("verify-pack", "-v", str(new.with_suffix(".idx")), at=bench.origin)
    ids = set(re.findall(r"^([0-9a-f]{40}) ", held, re.M))
    assert tip in ids
    assert not ids & known


def test_siblings_start_from_the_sets_base_after_the_branch_moved(
    bench: Bench,
) -> None:
    first = bench.prepare(make_job(1, 2))
    tip = commit(bench.origin, [first.base], {"more": "1"})
    point(bench.origin, "refs/heads/main", tip)
    second = bench.prepare(make_job(2, 2), base=first.base)
    assert second.base == first.base
    assert second.pack.read_bytes() == first.pack.read_bytes()
    assert bench.prepare(make_job(delivery="d2")).base == tip


@pytest.mark.parametrize("version", [0, 2])
def test_a_stored_base_is_fetched_by_id_or_through_its_branch(
    bench: Bench, server: GitServer, version: int
) -> None:
    old = str(bench.tip("main"))
    point(bench.origin, "refs/heads/main", commit(bench.origin, [old], {"new": "1"}))
    server.protocol_v2 = version == 2
    assert bench.prepare(make_job(), base=old).base == old


@pytest.mark.parametrize("version", [0, 2])
def test_a_base_the_forge_no_longer_has_is_sha_gone(
    bench: Bench, server: GitServer, version: int
) -> None:
    server.protocol_v2 = version == 2
    with pytest.raises(pd.Refused) as caught:
        bench.prepare(make_job(), base="1" * 40)
    assert caught.value.reason == "sha-gone"


def test_a_base_already_held_survives_a_forced_push_on_the_forge(
    bench: Bench,
) -> None:
    first = bench.prepare(make_job(1, 2))
    other = commit(bench.origin, [], {"rewritten": "1"})
    point(bench.origin, "refs/heads/main", other)
    run_git("gc", "--quiet", "--prune=now", at=bench.origin)
    assert bench.prepare(make_job(2, 2), base=first.base).base == first.base


def test_an_empty_repository_is_refused_by_name(
    bench: Bench, server: GitServer
) -> None:
    point(bench.origin, "refs/heads/kept", str(bench.tip("main")))
    run_git("update-ref", "-d", "refs/heads/main", at=bench.origin)
    with pytest.raises(pd.Refused) as caught:
        bench.prepare(make_job())
    assert caught.value.reason == "repository-unavailable"


def request_of(bench: Bench) -> str:
    """A request 7 from a fork, whose branch is not in the repository."""
    main = str(bench.tip("main"))
    head = commit(bench.origin, [main], {"theirs": "1"})
    point(bench.origin, "refs/pull/7/head", head)
    return head


def test_a_request_job_gets_the_requests_head_and_no_lease(bench: Bench) -> None:
    head = request_of(bench)
    job = make_job(target="pull_request")
    prepared = bench.prepare(job)
    assert prepared.request_sha == head
    assert prepared.base == bench.tip("main")
    assert prepared.lease is None
    box = bench.box(job, prepared)
    assert run_git("rev-list", "--count", head, at=box.path) == "3"


def test_a_stored_request_head_wins_over_a_newer_one(bench: Bench) -> None:
    head = request_of(bench)
    point(bench.origin, "refs/pull/7/head", commit(bench.origin, [head], {"n": "1"}))
    job = make_job(target="pull_request")
    assert bench.prepare(job, request=head).request_sha == head


def test_a_request_whose_ref_is_gone_is_sha_gone(bench: Bench) -> None:
    with pytest.raises(pd.Refused) as caught:
        bench.prepare(make_job(target="pull_request"))
    assert caught.value.reason == "sha-gone"


def test_an_azure_request_is_found_by_the_events_commit(bench: Bench) -> None:
    head = request_of(bench)
    job = make_job(target="pull_request", kind="azure", head=head)
    assert bench.prepare(job).request_sha == head


def test_a_request_without_a_ref_of_its_own_is_read_at_its_source_branch(
    bench: Bench,
) -> None:
    old = request_of(bench)
    point(bench.origin, "refs/heads/topic", commit(bench.origin, [old], {"n": "1"}))
    ref = "refs/heads/topic"
    job = make_job(target="pull_request", kind="azure", head=old, head_ref=ref)
    tip = run_git("rev-parse", ref, at=bench.origin).strip()
    assert bench.prepare(job).request_sha == tip
    run_git("update-ref", "-d", ref, at=bench.origin)
    with pytest.raises(pd.Refused) as caught:
        bench.prepare(job)
    assert caught.value.reason == "sha-gone"


def test_a_forks_commit_is_reached_by_the_requests_merge(bench: Bench) -> None:
    """Where the forge gives no commit by its bare id."""
    run_git("config", "uploadpack.allowAnySHA1InWant", "false", at=bench.origin)
    head = commit(bench.origin, [], {"fork": "1"})
    point(bench.origin, "refs/pull/7/merge", commit(bench.origin, [head], {"m": "1"}))
    job = make_job(target="pull_request", kind="azure", head=head)
    assert bench.prepare(job).request_sha == head


def test_commits_are_kept_until_the_job_is_released(bench: Bench) -> None:
    request_of(bench)
    job = make_job(target="pull_request")
    bench.prepare(job)
    mirror = bench.mirrors.of("github", "o/r").path
    names = run_git("for-each-ref", "--format=%(refname)", at=mirror).split()
    assert names == [
        f"refs/pidispatch/base/{job.id}",
        "refs/pidispatch/default",
        f"refs/pidispatch/request/{job.id}",
    ]
    bench.mirrors.release(job)
    bench.mirrors.release(job)
    names = run_git("for-each-ref", "--format=%(refname)", at=mirror).split()
    assert names == ["refs/pidispatch/default"]


def test_releasing_a_job_of_an_unknown_repository_is_nothing(
    mirrors: pd.Mirrors,
) -> None:
    mirrors.release(make_job())
    assert not list(mirrors.root.glob("*.git"))


@pytest.mark.parametrize("delivery", ["a..b", "a.lock", "a.", "x-r1", "é", "a" * 64])
def test_any_delivery_id_makes_a_ref_that_git_takes(
    bench: Bench, delivery: str
) -> None:
    job = make_job(delivery=delivery)
    bench.prepare(job)
    bench.mirrors.release(job)


def test_the_pack_of_a_long_history_is_cut_at_its_depth(bench: Bench) -> None:
    point(bench.origin, "refs/heads/main", chain(bench.origin, 60))
    job = make_job()
    prepared = bench.prepare(job)
    box = bench.box(job, prepared)
    assert run_git("rev-list", "--count", "main", at=box.path) == "50"
    run_git("fsck", "--strict", "--full", at=box.path)
    cut = run_git("rev-list", "--max-parents=0", "main", at=box.path)
    assert prepared.shallow.decode() == f"{cut}\n"


def test_the_cut_goes_by_distance_through_merges(bench: Bench, tmp_path: Path) -> None:
    origin = bench.origin
    side = chain(origin, 80)
    short = commit(origin, [str(bench.tip("main"))], {"s": "1"})
    point(origin, "refs/heads/main", commit(origin, [short, side], {"m": "1"}))
    prepared = bench.prepare(make_job())
    clone = tmp_path / "reference"
    source = f"file://{origin}"
    options = ("--quiet", "--bare", "--single-branch", "--depth=50")
    run_git("clone", *options, source, str(clone), at=tmp_path)
    assert packed(prepared, tmp_path) == objects(clone)
    assert sorted(prepared.shallow.split()) == sorted(
        (clone / "shallow").read_bytes().split()
    )


def tangle(at: Path, seed: int, size: int = 40) -> str:
    """A random history with many merges; its last commit reaches most of it."""
    chance = random.Random(seed)
    lines = []
    for i in range(size):
        lines.append(f"commit refs/heads/c{i}\nmark :{i + 1}\n")
        lines.append(f"committer a <a@example.org> {1_700_000_000 + i} +0000\n")
        lines.append("data 0\n")
        near = range(max(1, i - 3), i + 1)
        parents = chance.sample(near, min(i, chance.choice((1, 1, 2, 3))))
        for j, parent in enumerate(parents):
            lines.append(f"{'merge' if j else 'from'} :{parent}\n")
        lines.append(f"M 100644 inline f{i % 5}\ndata {len(str(i))}\n{i}\n")
    run_git("fast-import", "--quiet", at=at, feed="".join(lines).encode())
    return run_git("rev-parse", f"refs/heads/c{size - 1}", at=at)


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_any_history_is_cut_as_a_shallow_clone_cuts_it(
    bench: Bench, tmp_path: Path, depth: int
) -> None:
    point(bench.origin, "refs/heads/main", tangle(bench.origin, seed=depth))
    clone, source = tmp_path / "reference", f"file://{bench.origin}"
    options = ("--quiet", "--bare", "--single-branch", f"--depth={depth}")
    run_git("clone", *options, source, str(clone), at=tmp_path)
    into = bench.outside / "made"
    into.mkdir()
    made = bench.mirrors.prepare(bench.remote, make_job(), into, depth=depth)
    assert packed(made, tmp_path) == objects(clone)
    edge = (clone / "shallow").read_bytes()
    assert sorted(made.shallow.split()) == sorted(edge.split())


def test_a_siblings_pushed_work_is_never_in_the_pack(
    bench: Bench, tmp_path: Path
) -> None:
    """A replica cannot see a sibling's work, whatever the mirror holds."""
    one, two = make_job(1, 2), make_job(2, 2)
    work = bench.work(one, {"code": "a\n" * 50 + "the sibling's answer\n"})
    published = bench.publish(one, work)
    mirror = bench.mirrors.of("github", "o/r").path
    source = f"file://{bench.origin}"
    run_git("fetch", "--quiet", source, "+refs/heads/*:refs/heads/*", at=mirror)
    run_git("repack", "-a", "-d", "-q", "--window=50", at=mirror)
    assert published.tip in objects(mirror)
    prepared = bench.prepare(two, base=work.base)
    reached = run_git("rev-list", "--objects", work.base, at=bench.origin)
    assert packed(prepared, tmp_path) == {
        line.split()[0] for line in reached.splitlines()
    }


def test_mirror_and_pack_are_private(bench: Bench) -> None:
    prepared = bench.prepare(make_job())
    mirror = bench.mirrors.of("github", "o/r").path
    assert bench.mirrors.root.stat().st_mode & 0o777 == 0o700
    assert mirror.stat().st_mode & 0o777 == 0o700
    assert prepared.pack.stat().st_mode & 0o777 == 0o600


def test_a_lock_left_by_a_killed_git_does_not_stop_the_next_job(bench: Bench) -> None:
    bench.prepare(make_job())
    mirror = bench.mirrors.of("github", "o/r").path
    (mirror / "packed-refs.lock").touch()
    (mirror / "refs/pidispatch/default.lock").touch()
    bench.prepare(make_job(delivery="d2"))


def test_a_mirror_held_by_another_process_is_waited_for(bench: Bench) -> None:
    lock = bench.mirrors.of("github", "o/r").path.with_suffix(".lock")
    script = "import fcntl,sys; f=open(sys.argv[1],'ab'); fcntl.flock(f,2); print()"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{script}; sys.stdout.flush(); sys.stdin.read()", lock],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin and holder.stdout and holder.stdout.readline()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(bench.prepare, make_job())
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        assert not list(bench.mirrors.root.glob("*.git"))
        holder.stdin.close()
        assert waiting.result(60).base == bench.tip("main")
    holder.wait()
    holder.stdout.close()


def test_a_fetch_that_breaks_off_leaves_nothing_that_looks_complete(
    bench: Bench, server: GitServer
) -> None:
    point(bench.origin, "refs/heads/main", chain(bench.origin, 60))
    server.cut = 2_000
    with pytest.raises(pd.InfraError):
        bench.prepare(make_job())
    mirror = bench.mirrors.of("github", "o/r")
    assert not mirror.has(str(bench.tip("main")))
    server.cut = None
    assert bench.prepare(make_job()).base == bench.tip("main")


def test_many_packs_are_rolled_up_without_losing_a_commit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd, "MIRROR_PACKS", 2)
    bases = []
    for i in range(5):
        bases.append(bench.prepare(make_job(delivery=f"d{i}")).base)
        point(
            bench.origin,
            "refs/heads/main",
            commit(bench.origin, bases[-1:], {"i": str(i)}),
        )
    mirror = bench.mirrors.of("github", "o/r")
    assert all(mirror.has(base) for base in bases)
    assert len(list(mirror.path.glob("objects/pack/*.pack"))) <= 3


def test_eight_threads_prepare_one_repository_at_once(
    bench: Bench, server: GitServer
) -> None:
    jobs = [make_job(delivery=f"d{i}") for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        prepared = list(pool.map(bench.prepare, jobs))
    assert {one.base for one in prepared} == {bench.tip("main")}
    assert len({one.pack.read_bytes() for one in prepared}) == 1
    # Eight looks of two requests, and one fetch.
    assert server.asked("/git-upload-pack") <= 8 + 2
    mirror = bench.mirrors.of("github", "o/r").path
    listed = run_git("for-each-ref", "refs/pidispatch/base", at=mirror)
    assert len(listed.splitlines()) == 8


# -----------------------------------------------------------------------------
# The flow's skill
# -----------------------------------------------------------------------------


def with_skill(bench: Bench, files: Files) -> None:
    inside = {f".pi/skills/fix-issue/{name}": value for name, value in files.items()}
    tip = commit(bench.origin, [str(bench.tip("main"))], inside)
    point(bench.origin, "refs/heads/main", tip)


def test_the_skill_is_the_regular_files_at_the_base(bench: Bench) -> None:
    with_skill(
        bench,
        {
            "SKILL.md": "do\n",
            "bin/run": ("100755", "#!/bin/sh\n"),
            "data": bytes(range(256)),
            "empty": "",
            "link": ("120000", "/etc/passwd"),
            "module": ("160000", "1" * 40),
        },
    )
    assert bench.prepare(make_job()).skill == {
        "SKILL.md": b"do\n",
        "bin/run": b"#!/bin/sh\n",
        "data": bytes(range(256)),
        "empty": b"",
    }


def test_the_skill_of_a_request_is_the_default_branchs(bench: Bench) -> None:
    with_skill(bench, {"SKILL.md": "ours\n"})
    theirs = {".pi/skills/fix-issue/SKILL.md": "theirs\n"}
    head = commit(bench.origin, [str(bench.tip("main"))], theirs)
    point(bench.origin, "refs/pull/7/head", head)
    prepared = bench.prepare(make_job(target="pull_request"))
    assert prepared.skill == {"SKILL.md": b"ours\n"}


def test_a_linked_skill_folder_is_no_skill(bench: Bench) -> None:
    link: Files = {".pi/skills/fix-issue": ("120000", "../../etc")}
    tip = commit(bench.origin, [str(bench.tip("main"))], link)
    point(bench.origin, "refs/heads/main", tip)
    assert bench.prepare(make_job()).skill is None


def test_another_flow_whose_name_begins_alike_is_not_taken(bench: Bench) -> None:
    other = {".pi/skills/fix-issue-2/SKILL.md": "x"}
    tip = commit(bench.origin, [str(bench.tip("main"))], other)
    point(bench.origin, "refs/heads/main", tip)
    assert bench.prepare(make_job()).skill is None


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"SKILL.md": b"x" * (1024 * 1024 + 1)}, "1 MiB"),
        ({f"f{i}": b"x" * 1024 * 1024 for i in range(9)}, "8 MiB"),
        ({"a\\b": "x"}, "name"),
        ({"a\nb": "x"}, "name"),
    ],
)
def test_a_skill_that_cannot_be_taken_is_flow_not_found(
    bench: Bench, files: Files, why: str
) -> None:
    with_skill(bench, files)
    with pytest.raises(pd.Refused, match=why) as caught:
        bench.prepare(make_job())
    assert caught.value.reason == "flow-not-found"


def test_a_skill_of_257_files_is_flow_not_found(bench: Bench) -> None:
    main = bench.tip("main")
    lines = ["commit refs/heads/main\ncommitter a <a@example.org> 1 +0000\ndata 0\n"]
    lines.append(f"from {main}\n")
    for i in range(257):
        lines.append(f"M 100644 inline .pi/skills/fix-issue/{i}\ndata 1\nx\n")
    run_git("fast-import", "--quiet", at=bench.origin, feed="".join(lines).encode())
    with pytest.raises(pd.Refused, match="256 files"):
        bench.prepare(make_job())


# -----------------------------------------------------------------------------
# Talking to a remote
# -----------------------------------------------------------------------------


def status(
    code: int, times: int = 99, headers: Mapping[str, str] | None = None
) -> Fault:
    left = [times]

    def fault(handler: Handler) -> bool:
        if left[0] <= 0 or "Authorization" not in handler.headers:
            return False
        left[0] -= 1
        handler.reply(code, headers or {}, b"")
        return True

    return fault


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
def test_a_status_that_may_pass_is_worth_a_retry(
    bench: Bench, server: GitServer, code: int
) -> None:
    server.faults.append(status(code, times=1))
    with pytest.raises(pd.InfraError):
        bench.prepare(make_job())
    bench.prepare(make_job())


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (403, "forge-token-unavailable"),
        (404, "repository-unavailable"),
        (410, "repository-unavailable"),
    ],
)
def test_a_determinate_status_is_refused(
    bench: Bench, server: GitServer, code: int, reason: str
) -> None:
    server.faults.append(status(code))
    with pytest.raises(pd.Refused) as caught:
        bench.prepare(make_job())
    assert caught.value.reason == reason


def test_a_wrong_token_is_refused_and_shown_nowhere(bench: Bench) -> None:
    bench.forge.token = "ghp_another-secret"
    with pytest.raises(pd.Refused) as caught:
        bench.prepare(make_job())
    assert caught.value.reason == "forge-token-unavailable"
    assert "another-secret" not in repr(caught.value) + caught.value.message


def test_a_redirect_is_not_followed(
    bench: Bench, server: GitServer, tmp_path: Path
) -> None:
    for other in serve(tmp_path / "other"):
        where = {"Location": f"{other.url}/o/r.git/info/refs?service=git-upload-pack"}
        server.faults.append(status(302, headers=where))
        with pytest.raises(pd.Refused) as caught:
            bench.prepare(make_job())
        assert caught.value.reason == "repository-unavailable", caught.value
        assert "302" in caught.value.message, caught.value
        assert other.seen == []


def test_a_server_that_is_not_there_is_worth_a_retry(bench: Bench) -> None:
    bench.forge.url = "http://127.0.0.1:1"
    with pytest.raises(pd.InfraError):
        bench.prepare(make_job())


def test_a_silent_server_is_left_after_the_bound_with_no_git_left_behind(
    bench: Bench, server: GitServer
) -> None:
    gone = threading.Event()
    ended: list[bool] = []

    def hang(handler: Handler) -> bool:
        ended.append(gone.wait(20))
        return True

    server.faults.append(hang)
    bounds = pd.Bounds(look=0.3)
    mirrors = pd.Mirrors(bench.mirrors.root, bounds=bounds)
    with pytest.raises(pd.TimedOut):
        mirrors.prepare(bench.remote, make_job(), bench.outside)
    assert processes_of(mirrors.root) == []
    assert ended == [], "git was waited for"
    gone.set()


@pytest.mark.parametrize(
    "url",
    [
        "https://user:ghp_x@forge.example/o/r.git",
        "ssh://forge.example/o/r.git",
        "ext::sh -c touch% /tmp/pwned",
        "file:///etc",
        "/etc",
        "--upload-pack=touch",
        "https://forge.example/o/r.git\nx",
    ],
)
def test_a_url_that_is_not_plain_http_is_refused_before_git_runs(
    mirrors: pd.Mirrors, url: str
) -> None:
    with pytest.raises(pd.ConfigError) as caught:
        mirrors.git.look(pd.Remote(url, pd.Credential(USER, TOKEN)), "HEAD")
    assert "ghp_x" not in caught.value.message


def test_git_itself_refuses_other_transports(mirrors: pd.Mirrors, origin: Path) -> None:
    for url in (f"file://{origin}", "ext::true"):
        done = mirrors.git.call("ls-remote", url)
        assert done.code and "not allowed" in done.err


def test_the_token_is_given_to_no_other_host(
    bench: Bench, server: GitServer, mirrors: pd.Mirrors
) -> None:
    other = pd.Remote("http://forge.example/o/r.git", pd.Credential(USER, TOKEN))
    command = ("ls-remote", f"{server.url}/o/r.git")
    done = mirrors.git.talk(other, *command, seconds=20)
    assert done.code
    assert server.seen and not any(known for _, _, known in server.seen)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Username for 'https://forge.example:8443': ", USER),
        (f"Password for 'https://{USER}@forge.example:8443': ", TOKEN),
        ("Username for 'https://forge.example': ", ""),
        ("Username for 'https://forge.example:8443.evil.example': ", ""),
        ("Username for 'http://proxy.example:3128': ", ""),
        ("Password for 'http://user@proxy.example:3128': ", ""),
        (f"Password for 'https://{USER}@xforge.example:8443': ", ""),
        ("Enter passphrase for key: ", ""),
        ("*", ""),
    ],
)
def test_the_secret_answers_only_its_own_hosts_two_questions(
    mirrors: pd.Mirrors, question: str, answer: str
) -> None:
    url = "https://forge.example:8443/o/r.git"
    remote = pd.Remote(url, pd.Credential(USER, TOKEN))
    with mirrors.git._secret(remote) as folder:
        environment = {"PATH": os.environ["PATH"], "PIDISPATCH_ASKPASS": str(folder)}
        command = [str(mirrors.root / "askpass"), question]
        done = subprocess.run(command, env=environment, capture_output=True)
    assert done.stdout.decode() == answer
    assert (done.returncode == 0) == bool(answer)


def test_no_setting_of_the_machine_or_the_user_reaches_git(
    bench: Bench, server: GitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    ran = tmp_path / "ran"
    (home / ".gitconfig").write_text(
        f'[credential]\n\thelper = "!touch {ran}"\n'
        f'[core]\n\tfsmonitor = "touch {ran}"\n\thooksPath = {home}\n'
        '[url "http://127.0.0.1:1/"]\n\tinsteadOf = http://127.0.0.1\n'
    )
    (home / ".netrc").write_text("machine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "x")
    monkeypatch.setenv("GIT_SSH_COMMAND", f"touch {ran}")
    monkeypatch.setenv("GIT_TRACE", str(ran))
    mirrors = pd.Mirrors(tmp_path / "fresh")
    mirrors.prepare(bench.remote, make_job(), bench.outside)
    assert not ran.exists()
    assert {given for _, _, given in server.seen} == {None, server.basic}


def processes_of(root: Path) -> list[str]:
    """Arguments and environment of every git that works under `root` right now."""
    told = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            raw = (process / "cmdline").read_bytes()
            raw += b"\n" + (process / "environ").read_bytes()
        except OSError:
            continue
        text = raw.replace(b"\0", b" ").decode("utf-8", "surrogateescape")
        if f"HOME={root} " in text:
            told.append(text)
    return told


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_the_token_is_in_no_argument_and_no_environment_while_git_runs(
    bench: Bench, server: GitServer
) -> None:
    """T46: seen from inside the server, so that git is surely running."""
    told: list[str] = []
    modes: set[int] = set()

    def spy(handler: Handler) -> bool:
        told.extend(processes_of(bench.mirrors.root))
        for folder in bench.mirrors.root.glob("askpass-*"):
            modes.add(folder.stat().st_mode & 0o777)
            modes.update(f.stat().st_mode & 0o777 for f in folder.iterdir())
        return False

    server.faults.append(spy)
    job = make_job()
    bench.publish(job, bench.work(job))
    everything = "\n".join(told)
    assert "git-remote-http" in everything and " push " in everything
    assert "PIDISPATCH_ASKPASS=" in everything
    for form in (
        TOKEN,
        "canary",
        base64.b64encode(f"{USER}:{TOKEN}".encode()).decode(),
    ):
        assert form not in everything
    assert modes == {0o700, 0o600}
    assert not list(bench.mirrors.root.glob("askpass-*"))
    kept = [p for p in bench.mirrors.root.rglob("*") if p.is_file()]
    assert not any(b"canary" in path.read_bytes() for path in kept)


@pytest.mark.parametrize(
    "form",
    [
        TOKEN,
        "ghp_canary%2F%2B%C3%9F0123456789",
        base64.b64encode(f"{USER}:{TOKEN}".encode()).decode(),
        f"https://{USER}:{TOKEN}@forge.example/o/r",
        "https://someone:else@forge.example/o/r",
        "https://someone:el/else@forge.example/o/r",
        TOKEN[:8] + "\x00" + TOKEN[8:],
    ],
)
def test_what_git_says_is_redacted_and_capped(form: str) -> None:
    remote = pd.Remote("https://forge.example/o/r", pd.Credential(USER, TOKEN))
    text = remote.redact(f"fatal: {form} \x1b[31m\n" + "x" * 5_000)
    assert form not in text and "canary" not in text and "else" not in text
    assert TOKEN not in text
    assert "\x1b" not in text
    assert len(text) <= pd.TOLD_CHARS


# -----------------------------------------------------------------------------
# Hostile bundles
# -----------------------------------------------------------------------------


@dataclass
class Hostile:
    """A repository to make any object in, and bundles by hand."""

    bench: Bench
    at: Path
    base: str
    mirror: pd.Mirror

    def raw(self, kind: str, content: bytes) -> str:
        options = ("--literally", "-w", "--stdin", "-t", kind)
        return run_git("hash-object", *options, at=self.at, feed=content)

    def commit_of(self, tree: str, parent: str | None = None) -> str:
        flags = ("-p", parent or self.base)
        return run_git("commit-tree", tree, *flags, "-m", "x", at=self.at)

    def pack(self, *names: str) -> bytes:
        feed = "".join(f"{name}\n" for name in names).encode()
        done = subprocess.run(
            ["git", "pack-objects", "--stdout", "--quiet"],
            cwd=self.at,
            input=feed,
            capture_output=True,
            check=True,
        )
        return done.stdout

    def bundle(
        self,
        tip: str,
        pack: bytes,
        prerequisites: tuple[str, ...] | None = None,
        refs: tuple[str, ...] = (pd.RESULT_REF,),
        version: str = "# v2 git bundle",
    ) -> Path:
        needs = (self.base,) if prerequisites is None else prerequisites
        lines = [version, *(f"-{n}" for n in needs), *(f"{tip} {r}" for r in refs)]
        path = self.at.parent / "hostile.bundle"
        path.write_bytes("\n".join([*lines, "", ""]).encode() + pack)
        return path

    def refused(self, bundle: Path, limit: int = pd.BUNDLE_BYTES) -> str:
        """The detail word; and nothing may be left of it anywhere."""
        before = objects(self.mirror.path)
        with pytest.raises(pd.BundleRefused) as caught:
            pd.check_bundle(self.mirror, bundle, self.base, limit=limit)
        assert caught.value.reason == "bundle-refused"
        assert caught.value.detail in caught.value.message
        assert objects(self.mirror.path) == before
        assert not list(self.mirror.path.parent.glob("quarantine-*"))
        return caught.value.detail


@pytest.fixture
def hostile(bench: Bench) -> Hostile:
    job = make_job()
    prepared = bench.prepare(job)
    box = bench.box(job, prepared)
    return Hostile(bench, box.path, prepared.base, bench.mirrors.of("github", "o/r"))


def honest(hostile: Hostile) -> tuple[str, bytes]:
    tip = commit(hostile.at, [hostile.base], {"fix": "1"})
    listed = run_git("rev-list", "--objects", f"{hostile.base}..{tip}", at=hostile.at)
    return tip, hostile.pack(*(line.split()[0] for line in listed.splitlines()))


def test_an_honest_bundle_passes_and_stays_out_of_the_mirror(
    hostile: Hostile,
) -> None:
    tip, pack = honest(hostile)
    before = objects(hostile.mirror.path)
    bundle = hostile.bundle(tip, pack)
    with pd.check_bundle(hostile.mirror, bundle, hostile.base) as quarantine:
        assert (quarantine.tip, quarantine.commits) == (tip, 1)
        assert quarantine.path.stat().st_mode & 0o777 == 0o700
        assert tip not in objects(hostile.mirror.path)
    assert objects(hostile.mirror.path) == before
    assert not quarantine.path.exists()


def test_a_whole_history_without_prerequisite_passes(hostile: Hostile) -> None:
    tip, _ = honest(hostile)
    listed = run_git("rev-list", "--objects", tip, at=hostile.at)
    pack = hostile.pack(*(line.split()[0] for line in listed.splitlines()))
    bundle = hostile.bundle(tip, pack, prerequisites=())
    with pd.check_bundle(hostile.mirror, bundle, hostile.base) as quarantine:
        assert quarantine.commits == 1


def test_a_merge_with_an_older_commit_passes_with_both_prerequisites(
    hostile: Hostile,
) -> None:
    older = run_git("rev-parse", f"{hostile.base}~1", at=hostile.at)
    side = commit(hostile.at, [older], {"side": "1"})
    tip = commit(hostile.at, [hostile.base, side], {"side": "1"})
    point(hostile.at, pd.RESULT_REF, tip)
    bundle = hostile.at.parent / "merge.bundle"
    what = f"{hostile.base}..{pd.RESULT_REF}"
    run_git("bundle", "create", "-q", str(bundle), what, at=hostile.at)
    assert f"-{older}".encode() in bundle.read_bytes()
    with pd.check_bundle(hostile.mirror, bundle, hostile.base) as quarantine:
        assert quarantine.commits == 2


@pytest.mark.parametrize(
    "refs",
    [
        (),
        ("refs/heads/main",),
        ("HEAD",),
        (pd.RESULT_REF, "refs/heads/main"),
        (pd.RESULT_REF, pd.RESULT_REF),
        (pd.RESULT_REF + " x",),
    ],
)
def test_any_but_the_one_agreed_ref_is_refused(
    hostile: Hostile, refs: tuple[str, ...]
) -> None:
    tip, pack = honest(hostile)
    assert hostile.refused(hostile.bundle(tip, pack, refs=refs)) == "wrong-ref"


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"PACK",
        b"# v3 git bundle\n@object-format=sha1\n",
        b"# v2 git bundle\n",
        b"# v2 git bundle\nnonsense\n\n",
        b"# v2 git bundle\n" + b"-" + b"1" * 39 + b"\n\n",
        b"# v2 git bundle\n" + (b"-" + b"1" * 40 + b"\n") * 65 + b"\n",
        b"# v2 git bundle\n-" + b"1" * 40 + b" " + b"x" * 70_000 + b"\n\n",
        b"# v2 git bundle\r\n",
    ],
)
def test_a_header_that_is_not_version_two_is_refused(
    hostile: Hostile, start: bytes
) -> None:
    path = hostile.at.parent / "header.bundle"
    path.write_bytes(start)
    assert hostile.refused(path) == "bad-header"


HEADER_PARTS = [
    b"# v2 git bundle\n",
    b"# v3 git bundle\n",
    b"-" + b"1" * 40 + b"\n",
    b"-" + b"2" * 40 + b" subject\n",
    b"3" * 40 + b" " + pd.RESULT_REF.encode() + b"\n",
    b"4" * 40 + b" refs/heads/main\n",
    b"\n",
    b"PACK",
    b"\0",
]


@given(st.lists(st.sampled_from(HEADER_PARTS) | st.binary(max_size=9), max_size=8))
def test_only_a_well_formed_header_is_read(parts: list[bytes]) -> None:
    text = b"".join(parts)
    form = rb"# v2 git bundle\n(-\w{40}( [^\n\0]*)?\n)*(\w{40}) (\S+)\n\n"
    expected = re.match(form, text)
    source = io.BytesIO(text)
    try:
        tip, _ = pd._bundle_header(source)
    except pd.BundleRefused as error:
        assert error.detail in ("bad-header", "wrong-ref")
        assert not expected or expected[4] != pd.RESULT_REF.encode()
    else:
        assert expected and expected[3].decode() == tip
        assert source.tell() == expected.end()


@pytest.mark.parametrize("needed", ["1" * 40, "unrelated"])
def test_a_prerequisite_outside_the_base_is_refused(
    hostile: Hostile, needed: str
) -> None:
    tip, pack = honest(hostile)
    if needed == "unrelated":
        needed = commit(hostile.mirror.path, [], {"other": "1"})
    bundle = hostile.bundle(tip, pack, (hostile.base, needed))
    assert hostile.refused(bundle) == "bad-prerequisite"


def test_a_bundle_over_the_limit_is_not_even_read(hostile: Hostile) -> None:
    path = hostile.at.parent / "huge.bundle"
    with path.open("wb") as sink:
        sink.truncate(2**40)
    assert hostile.refused(path) == "too-large"


def test_a_linked_bundle_is_not_followed(hostile: Hostile) -> None:
    link = hostile.at.parent / "link.bundle"
    link.symlink_to(hostile.bundle(*honest(hostile)))
    assert hostile.refused(link) == "bad-header"


def test_a_pipe_in_place_of_a_bundle_does_not_hang(hostile: Hostile) -> None:
    pipe = hostile.at.parent / "pipe.bundle"
    os.mkfifo(pipe)
    assert hostile.refused(pipe) == "bad-header"


def tree_entry(mode: str, name: bytes, blob: str) -> bytes:
    return mode.encode() + b" " + name + b"\0" + bytes.fromhex(blob)


def no_email(hostile: Hostile) -> list[str]:
    tree = run_git("rev-parse", f"{hostile.base}^{{tree}}", at=hostile.at)
    text = f"tree {tree}\nparent {hostile.base}\nauthor a 1 +0000\n"
    return [hostile.raw("commit", f"{text}committer a 1 +0000\n\nx\n".encode())]


def named(name: bytes, content: bytes = b"x") -> Callable[[Hostile], list[str]]:
    def make(hostile: Hostile) -> list[str]:
        blob = hostile.raw("blob", content)
        tree = hostile.raw("tree", tree_entry("100644", name, blob))
        return [hostile.commit_of(tree), tree, blob]

    return make


def modules(text: bytes) -> Callable[[Hostile], list[str]]:
    return named(b".gitmodules", text)


def linked_modules(hostile: Hostile) -> list[str]:
    blob = hostile.raw("blob", b"/etc/passwd")
    tree = hostile.raw("tree", tree_entry("120000", b".gitmodules", blob))
    return [hostile.commit_of(tree), tree, blob]


BAD_OBJECTS = {
    "a commit without e-mail": no_email,
    "a tree with .git": named(b".git"),
    "hostile .gitmodules": modules(b'[submodule "x"]\n\tpath = x\n\turl = -u./run\n'),
    "a submodule that climbs": modules(b'[submodule "../../x"]\n\turl = https://x/y\n'),
    "a linked .gitmodules": linked_modules,
    ".git as HFS folds it": named(".g\u200cit".encode()),
    ".git as NTFS folds it": named(b"git~1"),
    ".GIT": named(b".GIT"),
    "a tree with ..": named(b".."),
}


@pytest.mark.parametrize("make", BAD_OBJECTS.values(), ids=BAD_OBJECTS)
def test_a_bad_object_is_refused(
    hostile: Hostile, make: Callable[[Hostile], list[str]]
) -> None:
    tip, *rest = make(hostile)
    bundle = hostile.bundle(tip, hostile.pack(tip, *rest))
    assert hostile.refused(bundle) == "bad-object"


@pytest.mark.parametrize("what", list(BAD_OBJECTS)[:3])
def test_fsck_of_a_fetch_alone_would_have_let_it_in(
    hostile: Hostile, what: str
) -> None:
    """The premise of checking packs ourselves, with git 2.39's behaviour."""
    tip, *rest = BAD_OBJECTS[what](hostile)
    bundle = hostile.bundle(tip, hostile.pack(tip, *rest))
    scratch = hostile.at.parent / "scratch"
    source = str(hostile.bench.origin)
    run_git("clone", "-q", "--bare", source, str(scratch), at=hostile.at)
    command = ["git", "-c", "fetch.fsckObjects=true", "fetch", "-q", str(bundle)]
    fetched = subprocess.run(
        [*command, f"{pd.RESULT_REF}:refs/heads/in"], cwd=scratch, capture_output=True
    )
    if b"fsck" in fetched.stderr:
        pytest.skip("this git examines bundles by itself")
    assert tip in objects(scratch)


def test_a_truncated_pack_is_refused(hostile: Hostile) -> None:
    tip, pack = honest(hostile)
    for cut in (0, 5, 40, len(pack) - 1):
        assert hostile.refused(hostile.bundle(tip, pack[:cut])) == "bad-object"


def test_a_pack_with_one_flipped_bit_is_refused(hostile: Hostile) -> None:
    tip, pack = honest(hostile)
    broken = bytearray(pack)
    broken[len(pack) // 2] ^= 1
    assert hostile.refused(hostile.bundle(tip, bytes(broken))) == "bad-object"


def test_a_tip_unrelated_to_the_base_is_refused(hostile: Hostile) -> None:
    root = commit(hostile.at, [], {"fix": "1"})
    listed = run_git("rev-list", "--objects", root, at=hostile.at)
    pack = hostile.pack(*(line.split()[0] for line in listed.splitlines()))
    assert hostile.refused(hostile.bundle(root, pack)) == "not-descended"


def test_an_amended_base_is_refused(hostile: Hostile) -> None:
    older = run_git("rev-parse", f"{hostile.base}~1", at=hostile.at)
    tip = commit(hostile.at, [older], {"fix": "1"})
    listed = run_git("rev-list", "--objects", f"{older}..{tip}", at=hostile.at)
    pack = hostile.pack(*(line.split()[0] for line in listed.splitlines()))
    assert hostile.refused(hostile.bundle(tip, pack)) == "not-descended"


@pytest.mark.parametrize("missing", ["blob", "tree", "commit", "tip"])
def test_a_tip_that_is_not_complete_is_refused(hostile: Hostile, missing: str) -> None:
    middle = commit(hostile.at, [hostile.base], {"new": "1"})
    tip = commit(hostile.at, [middle], {"newer": "2"})
    parts = {
        "blob": run_git("rev-parse", f"{tip}:newer", at=hostile.at),
        "tree": run_git("rev-parse", f"{tip}^{{tree}}", at=hostile.at),
        "commit": middle,
        "tip": tip,
    }
    listed = run_git("rev-list", "--objects", f"{hostile.base}..{tip}", at=hostile.at)
    names = [line.split()[0] for line in listed.splitlines()]
    pack = hostile.pack(*(name for name in names if name != parts[missing]))
    assert hostile.refused(hostile.bundle(tip, pack)) == "not-connected"


@pytest.mark.parametrize("kind", ["tag", "tree", "blob"])
def test_a_tip_that_is_no_commit_is_refused(hostile: Hostile, kind: str) -> None:
    tip, pack = honest(hostile)
    names = {
        "tree": run_git("rev-parse", f"{tip}^{{tree}}", at=hostile.at),
        "blob": run_git("rev-parse", f"{tip}:fix", at=hostile.at),
    }
    if kind == "tag":
        text = f"object {tip}\ntype commit\ntag x\ntagger a <a@b> 1 +0000\n\nx\n"
        names["tag"] = hostile.raw("tag", text.encode())
        listed = run_git(
            "rev-list", "--objects", f"{hostile.base}..{tip}", at=hostile.at
        )
        objects_of = [line.split()[0] for line in listed.splitlines()]
        pack = hostile.pack(names["tag"], *objects_of)
    assert hostile.refused(hostile.bundle(names[kind], pack)) == "bad-object"


def zeros(gibibytes: int) -> bytes:
    """A pack of one blob of zeros, built without making the zeros twice."""
    chunk = bytes(2**20)
    compress = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = compress.compress(chunk) + compress.flush(zlib.Z_FULL_FLUSH)
    adler, count = 1, gibibytes * 1024
    for _ in range(count):
        adler = zlib.adler32(chunk, adler)
    stream = b"\x78\x9c" + block * count + compress.flush() + struct.pack(">I", adler)
    size, head = count * 2**20, bytearray()
    byte = (3 << 4) | (size & 15)
    size >>= 4
    while size:
        head.append(byte | 0x80)
        byte, size = size & 0x7F, size >> 7
    head.append(byte)
    pack = b"PACK" + struct.pack(">II", 2, 1) + bytes(head) + stream
    return pack + hashlib.sha1(pack).digest()


@pytest.mark.parametrize("bounds", [pd.Bounds(check=0.3), pd.Bounds(cpu=1)])
def test_a_small_bundle_of_a_huge_file_is_bounded_in_time(
    hostile: Hostile, bounds: pd.Bounds
) -> None:
    tip, _ = honest(hostile)
    bundle = hostile.bundle(tip, zeros(1))
    assert bundle.stat().st_size < 8 * 2**20
    git = msgspec.structs.replace(hostile.mirror.git, bounds=bounds)
    hostile.mirror = pd.Mirror(git, hostile.mirror.path)
    assert hostile.refused(bundle) == "too-slow"


# -----------------------------------------------------------------------------
# Pushing
# -----------------------------------------------------------------------------


def test_a_result_is_pushed_to_its_branch_and_nothing_else(bench: Bench) -> None:
    job = make_job()
    published = bench.publish(job, bench.work(job))
    names = run_git("for-each-ref", "--format=%(refname)", at=bench.origin).split()
    assert names == ["refs/heads/main", "refs/heads/pi/issue-7"]
    assert bench.tip("pi/issue-7") == published.tip


def test_two_replicas_publish_at_once_to_their_own_branches(bench: Bench) -> None:
    jobs = [make_job(1, 2), make_job(2, 2)]
    works = [bench.work(job) for job in jobs]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(bench.publish, jobs, works))
    assert bench.tip("pi/issue-7-r1") == done[0].tip
    assert bench.tip("pi/issue-7-r2") == done[1].tip
    assert done[0].tip != done[1].tip
    assert sorted(bench.forge.titles) == ["[r1/2] A fix", "[r2/2] A fix"]
    assert len(bench.forge.comments) == 2


def test_the_same_push_again_after_a_crash_is_harmless(
    bench: Bench, server: GitServer
) -> None:
    """T48: a crash between the push and the record."""
    job = make_job(1, 2)
    work = bench.work(job)
    bench.forge.fail.append(pd.InfraError("killed here"))
    with pytest.raises(pd.InfraError):
        bench.publish(job, work)
    pushed = bench.tip("pi/issue-7-r1")
    server.seen.clear()
    published = bench.publish(job, work)
    assert published.tip == pushed
    assert server.asked("receive-pack") == 0
    assert bench.forge.titles == ["[r1/2] A fix"]


def test_a_connection_lost_after_the_push_is_worth_a_retry_that_finds_it_done(
    bench: Bench, server: GitServer
) -> None:
    job = make_job()
    work = bench.work(job)

    def lose(handler: Handler) -> bool:
        if handler.command == "POST" and "receive-pack" in handler.path:
            handler.lost = True
        return False

    server.faults.append(lose)
    with pytest.raises(pd.InfraError):
        bench.publish(job, work)
    server.faults.clear()
    assert bench.publish(job, work).tip == bench.tip("pi/issue-7")


def test_a_branch_a_human_moved_meanwhile_is_left_alone(bench: Bench) -> None:
    job = make_job()
    work = bench.work(job)
    theirs = commit(bench.origin, [work.base], {"human": "1"})
    point(bench.origin, "refs/heads/pi/issue-7", theirs)
    for _ in range(2):
        with pytest.raises(pd.Refused) as caught:
            bench.publish(job, work)
        assert caught.value.reason == "branch-moved"
    assert bench.tip("pi/issue-7") == theirs
    assert bench.forge.requests == {}
    (comment,) = bench.forge.comments
    assert "branch-moved" in comment and f"pidispatch publish {job.id}" in comment


def test_a_branch_moved_between_the_look_and_the_push_is_left_alone(
    bench: Bench, server: GitServer
) -> None:
    job = make_job()
    work = bench.work(job)
    theirs = commit(bench.origin, [work.base], {"human": "1"})

    def race(handler: Handler) -> bool:
        if "service=git-receive-pack" in handler.path:
            point(bench.origin, "refs/heads/pi/issue-7", theirs)
        return False

    server.faults.append(race)
    with pytest.raises(pd.Refused) as caught:
        bench.publish(job, work)
    assert caught.value.reason == "branch-moved"
    assert bench.tip("pi/issue-7") == theirs


def test_a_branch_that_was_there_with_foreign_commits_is_left_alone(
    bench: Bench,
) -> None:
    theirs = commit(bench.origin, [str(bench.tip("main"))], {"human": "1"})
    point(bench.origin, "refs/heads/pi/issue-7", theirs)
    job = make_job()
    work = bench.work(job)
    assert work.lease == theirs
    with pytest.raises(pd.Refused) as caught:
        bench.publish(job, work)
    assert caught.value.reason == "branch-moved"
    assert bench.tip("pi/issue-7") == theirs


def test_a_rerun_replaces_what_this_instance_pushed_before(bench: Bench) -> None:
    """T48: a rerun is not rejected because its branch exists."""
    first = make_job()
    before = bench.publish(first, bench.work(first)).tip
    again = make_job(delivery="d2")
    work = bench.work(again, {"fix": "better"})
    assert work.lease == before and before is not None
    work = msgspec.structs.replace(work, ours=frozenset({before}))
    published = bench.publish(again, work)
    assert bench.tip("pi/issue-7") == published.tip != before
    assert len(bench.forge.requests) == 1


def test_a_branch_whose_commits_the_base_has_is_replaced(bench: Bench) -> None:
    point(bench.origin, "refs/heads/pi/issue-7", f"{bench.tip('main')}~1")
    job = make_job()
    assert bench.publish(job, bench.work(job)).tip == bench.tip("pi/issue-7")


def hook(bench: Bench, name: str, script: str) -> None:
    path = bench.origin / "hooks" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_hook_that_declines_refuses_the_push_and_its_words_are_told(
    bench: Bench,
) -> None:
    words = "GH006: Protected branch update failed; internal server error.txt"
    hook(bench, "pre-receive", f"echo '{words}'; exit 1")
    job = make_job()
    work = bench.work(job)
    with pytest.raises(pd.Refused) as caught:
        bench.publish(job, work)
    assert caught.value.reason == "push-refused"
    assert words in caught.value.message
    assert bench.tip("pi/issue-7") is None


def line(text: str) -> bytes:
    return f"{len(text.encode()) + 4:04x}{text}".encode()


def refusing(reason: str) -> Fault:
    """A forge's own refusal of the ref, as the protocol carries it."""

    def fault(handler: Handler) -> bool:
        if handler.command != "POST" or "receive-pack" not in handler.path:
            return False
        ref = "refs/heads/pi/issue-7"
        report = line("unpack ok\n") + line(f"ng {ref} {reason}\n") + b"0000"
        band = f"{len(report) + 5:04x}\x01".encode() + report + b"0000"
        kind = {"Content-Type": "application/x-git-receive-pack-result"}
        handler.reply(200, kind, band)
        return True

    return fault


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("protected branch hook declined", "push-refused"),
        ("push declined due to repository rule violations", "push-refused"),
        ("TF402455: Pushes to this branch are not permitted", "push-refused"),
        ("unpacker error", "push-refused"),
        (
            "refusing to allow a Personal Access Token to create or update workflow"
            " `.github/workflows/x.yml` without `workflow` scope",
            "workflow-permission",
        ),
        (
            "refusing to allow a GitHub App to create or update workflow"
            " `.github/workflows/x.yml` without `workflows` permission",
            "workflow-permission",
        ),
        ("failed to update ref", None),
        ("cannot lock ref 'refs/heads/pi/issue-7'", None),
        ("Internal Server Error", None),
    ],
)
def test_a_forges_refusal_of_the_branch_is_named_or_tried_again(
    bench: Bench, server: GitServer, said: str, reason: str | None
) -> None:
    job = make_job()
    work = bench.work(job)
    server.faults.append(refusing(said))
    with pytest.raises(pd.Refused if reason else pd.InfraError) as caught:
        bench.publish(job, work)
    assert getattr(caught.value, "reason", None) == reason
    assert said in str(caught.value) and "canary" not in str(caught.value)
    assert len(bench.forge.comments) == (1 if reason else 0)


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_push_that_may_pass_is_worth_a_retry_and_says_nothing_yet(
    bench: Bench, server: GitServer, code: int
) -> None:
    job = make_job()
    work = bench.work(job)

    def busy(handler: Handler) -> bool:
        return "receive-pack" in handler.path and status(code)(handler)

    server.faults.append(busy)
    with pytest.raises(pd.InfraError):
        bench.publish(job, work)
    assert bench.forge.comments == []


@pytest.mark.parametrize("code", [403, 404, 413])
def test_a_status_that_forbids_the_push_is_push_refused(
    bench: Bench, server: GitServer, code: int
) -> None:
    job = make_job()
    work = bench.work(job)
    server.faults.append(
        lambda handler: "receive-pack" in handler.path and status(code)(handler)
    )
    with pytest.raises(pd.Refused) as caught:
        bench.publish(job, work)
    assert caught.value.reason == "push-refused"


def test_a_ref_the_server_could_not_lock_is_worth_a_retry(bench: Bench) -> None:
    job = make_job()
    work = bench.work(job)
    lock = bench.origin / "refs/heads/pi/issue-7.lock"
    lock.parent.mkdir()
    lock.touch()
    with pytest.raises(pd.InfraError):
        bench.publish(job, work)
    lock.unlink()
    assert bench.publish(job, work).tip == bench.tip("pi/issue-7")


def test_a_job_whose_branch_is_the_default_branch_pushes_nothing(
    bench: Bench,
) -> None:
    """pidispatch never merges, not even into a branch that has its job's name."""
    point(bench.origin, "refs/heads/pi/issue-7", str(bench.tip("main")))
    run_git("symbolic-ref", "HEAD", "refs/heads/pi/issue-7", at=bench.origin)
    job = make_job()
    work = bench.work(job)
    with pytest.raises(pd.Refused) as caught:
        bench.publish(job, work)
    assert caught.value.reason == "push-refused"
    assert bench.tip("pi/issue-7") == bench.tip("main")


def test_publishing_works_after_the_mirror_was_lost(
    bench: Bench, tmp_path: Path
) -> None:
    job = make_job()
    work = bench.work(job)
    point(
        bench.origin, "refs/heads/main", commit(bench.origin, [work.base], {"n": "1"})
    )
    fresh = pd.Mirrors(tmp_path / "fresh")
    assert pd.publish_job(bench.forge, fresh, job, work).tip == bench.tip("pi/issue-7")


def test_a_refused_bundle_is_told_once_and_nothing_is_pushed(bench: Bench) -> None:
    job = make_job()
    work = bench.work(job)
    assert work.bundle
    work.bundle.write_bytes(b"nonsense")
    with pytest.raises(pd.BundleRefused):
        bench.publish(job, work)
    (comment,) = bench.forge.comments
    assert "bad-header" in comment
    assert bench.tip("pi/issue-7") is None


def test_a_kept_result_is_pushed_to_a_branch_the_operator_names(
    bench: Bench,
) -> None:
    request_of(bench)
    job = make_job(target="pull_request")
    work = bench.work(job)
    bench.publish(job, work)
    tip = pd.publish_to(bench.forge, bench.mirrors, job, work, "mine/fix")
    assert tip is not None and bench.tip("mine/fix") == tip
    with pytest.raises(pd.Refused, match="main"):
        pd.publish_to(bench.forge, bench.mirrors, job, work, "main")
    for bad in ("a..b", "-x y", "", "a\nb"):
        with pytest.raises(pd.ConfigError):
            pd.publish_to(bench.forge, bench.mirrors, job, work, bad)


# -----------------------------------------------------------------------------
# Requests and comments
# -----------------------------------------------------------------------------


def test_the_request_has_the_marker_the_text_and_the_provenance(bench: Bench) -> None:
    job = make_job(1, 3)
    published = bench.publish(job, bench.work(job))
    assert published.request
    ((head, base, request),) = bench.forge.requests.values()
    assert (head, base) == ("pi/issue-7-r1", "main")
    assert request.title == "[r1/3] A fix"
    body = bench.forge.bodies[request.number]
    assert body.startswith("It fixes.\n\n---\n")
    last = body.rstrip().splitlines()[-1]
    assert job.id in last and "Replica 1 of 3" in last
    assert "`pi/issue-7-r2`, `pi/issue-7-r3`" in last
    (comment,) = bench.forge.comments
    marker = f"<!-- pidispatch:{job.id}:result -->"
    result = f"The result is in {request.url}."
    assert comment == f"Replica 1 of 3.\n{result}\n\nDone.\n\n{marker}\n"


def test_a_plain_job_speaks_of_no_replica(bench: Bench) -> None:
    job = make_job()
    bench.publish(job, bench.work(job))
    assert bench.forge.titles == ["A fix"]
    text = "".join([*bench.forge.bodies.values(), *bench.forge.comments]).lower()
    assert "replica" not in text and "compare" not in text


def test_publishing_again_changes_nothing_on_the_forge(bench: Bench) -> None:
    job = make_job(2, 2)
    work = bench.work(job)
    first = bench.publish(job, work)
    for _ in range(3):
        assert bench.publish(job, work) == first
    assert len(bench.forge.requests) == len(bench.forge.comments) == 1


@pytest.mark.parametrize("calls", range(3))
def test_a_crash_at_any_call_to_the_forge_ends_with_one_of_each(
    bench: Bench, calls: int
) -> None:
    job = make_job(1, 2)
    work = bench.work(job)
    real = bench.forge.find_request, bench.forge.open_request, bench.forge.comment
    names = ("find_request", "open_request", "comment")

    def crash(*_: object) -> None:
        raise pd.InfraError("killed here")

    setattr(bench.forge, names[calls], crash)
    with pytest.raises(pd.InfraError):
        bench.publish(job, work)
    setattr(bench.forge, names[calls], real[calls])
    bench.publish(job, work)
    assert len(bench.forge.requests) == len(bench.forge.comments) == 1


def test_a_closed_request_is_left_alone_and_a_new_one_opened(bench: Bench) -> None:
    job = make_job()
    work = bench.work(job)
    bench.publish(job, work)
    bench.forge.closed.add(100)
    published = bench.publish(job, work)
    assert published.request and published.request.number == 101


@pytest.mark.parametrize(
    ("present", "after"),
    [
        ("Better words", "[r1/2] Better words"),
        ("[r2/2] Better words", "[r1/2] Better words"),
        ("[r1/2] [r2/2] Better words", "[r1/2] Better words"),
        ("[r1/2] A  human's   words", "[r1/2] A  human's   words"),
    ],
)
def test_a_reused_request_gets_its_marker_back_and_keeps_its_words(
    bench: Bench, present: str, after: str
) -> None:
    job = make_job(1, 2)
    work = bench.work(job)
    bench.publish(job, work)
    bench.forge.retitle_request("o/r", 100, present)
    published = bench.publish(job, work)
    assert bench.forge.titles == [after]
    assert published.request and published.request.title == after


def test_nothing_changed_makes_no_request_and_still_says_the_comment(
    bench: Bench,
) -> None:
    job = make_job(1, 2)
    prepared = bench.prepare(job)
    work = pd.Work(
        None, "T\n\nB", "I could not.", prepared.base, None, "main", commits=0
    )
    assert bench.publish(job, work) == pd.Published()
    assert bench.forge.requests == {}
    (comment,) = bench.forge.comments
    assert "changed nothing" in comment and "I could not." in comment
    assert "Replica 1 of 2" in comment


@pytest.mark.parametrize("replica", [None, 1])
def test_a_request_target_is_only_commented_and_tells_of_kept_commits(
    bench: Bench, server: GitServer, replica: int | None
) -> None:
    request_of(bench)
    job = make_job(replica, replica and 2, target="pull_request")
    work = bench.work(job)
    server.seen.clear()
    assert bench.publish(job, work) == pd.Published()
    assert bench.publish(job, work) == pd.Published()
    assert server.seen == [] and bench.forge.requests == {}
    (comment,) = bench.forge.comments
    assert bench.forge.targets == [job.target]
    assert "1 commit, kept" in comment
    assert f"`pidispatch publish {job.id} --to BRANCH`" in comment
    assert ("Replica 1 of 2" in comment) == (replica == 1)


@pytest.mark.parametrize(
    ("commits", "said"), [(0, None), (1, "1 commit,"), (2, "2 commits,")]
)
def test_the_comment_counts_kept_commits(
    forge: MemoryForge, mirrors: pd.Mirrors, commits: int, said: str | None
) -> None:
    job = make_job(target="pull_request")
    work = pd.Work(Path("kept"), None, None, "1" * 40, None, "main", commits)
    pd.publish_job(forge, mirrors, job, work)
    (comment,) = forge.comments
    assert (said or "without a comment") in comment
    assert ("kept" in comment) == (commits > 0)


def rejected() -> pd.Rejected:
    return pd.Rejected("the forge said no", 422)


def test_a_request_the_forge_refuses_is_told_once_and_the_branch_stays(
    bench: Bench,
) -> None:
    job = make_job()
    work = bench.work(job)
    tips: list[str] = []
    bench.forge.fail.append(rejected())
    with pytest.raises(pd.Refused) as caught:
        pd.publish_job(bench.forge, bench.mirrors, job, work, tips.append)
    assert caught.value.reason == "request-refused"
    assert tips == [bench.tip("pi/issue-7")]
    (comment,) = bench.forge.comments
    assert "request-refused" in comment and "Done." in comment


def test_a_comment_the_forge_refuses_leaves_the_request(bench: Bench) -> None:
    job = make_job()
    work = bench.work(job)

    def locked(*_: object) -> None:
        raise rejected()

    setattr(bench.forge, "comment", locked)  # noqa: B010
    with pytest.raises(pd.Refused) as caught:
        bench.publish(job, work)
    assert caught.value.reason == "comment-refused"
    assert bench.forge.titles == ["A fix"]


def test_the_first_refusal_is_named_when_its_comment_is_refused_too(
    bench: Bench,
) -> None:
    job = make_job()
    work = bench.work(job)
    bench.forge.token = "revoked"
    bench.forge.fail.append(rejected())
    with pytest.raises(pd.Refused) as caught:
        bench.publish(job, work)
    assert caught.value.reason == "forge-token-unavailable"
    assert bench.forge.comments == []


def test_the_pushed_commit_is_told_before_anything_else_can_fail(
    bench: Bench,
) -> None:
    job = make_job()
    work = bench.work(job)
    tips: list[str] = []
    bench.forge.fail.append(pd.InfraError("killed here"))
    for _ in range(2):
        with contextlib.suppress(pd.InfraError):
            pd.publish_job(bench.forge, bench.mirrors, job, work, tips.append)
    assert tips == [bench.tip("pi/issue-7")] * 2


REFUSED = ["bundle-refused", "branch-moved", "push-refused", "workflow-permission"]


@pytest.mark.parametrize("reason", [*REFUSED, "request-refused", "sha-gone"])
@pytest.mark.parametrize("replica", [None, 2])
def test_the_comment_of_a_refusal_says_why_and_what_to_do(
    forge: MemoryForge, reason: str, replica: int | None
) -> None:
    job = make_job(replica, replica)
    work = pd.Work(None, None, "Agent's words.", "1" * 40, None, "main", 1)
    refusal = pd.Refused(reason, "x")
    if reason == "bundle-refused":
        refusal = pd.BundleRefused("bad-object", "x")
    pd._say(forge, job, work, "refused", refusal=refusal)
    (comment,) = forge.comments
    first, second, third, *rest = comment.splitlines()[1 if replica else 0 :]
    assert comment.startswith("Replica 2 of 2.\n") == (replica is not None)
    assert f"(`{reason}`):" in first and second.endswith(".")
    assert third == f"The result is kept; `pidispatch publish {job.id}` tries again."
    marker = f"<!-- pidispatch:{job.id}:refused -->"
    assert rest == ["", "Agent's words.", "", marker]


def test_a_job_cannot_take_a_siblings_comment_marker(bench: Bench) -> None:
    one, two = make_job(1, 2), make_job(2, 2)
    stolen = f"<!-- pidispatch:{two.id}:result -->"
    bench.publish(one, bench.work(one, comment=f"x {stolen} <!-\x00- pidispatch:y -->"))
    bench.publish(two, bench.work(two))
    assert len(bench.forge.comments) == 2
    assert stolen not in bench.forge.comments[0]


def test_mentions_and_markdown_are_left_alone(bench: Bench) -> None:
    job = make_job()
    comment = "Hi @someone, see #3\n\n```\n{{ 7 * 7 }} {% raw %} <b> & \t\n```"
    bench.publish(job, bench.work(job, comment=comment))
    assert comment in bench.forge.comments[0]


def test_a_comment_left_open_does_not_hide_the_provenance(bench: Bench) -> None:
    job = make_job(1, 2)
    bench.publish(job, bench.work(job, review_request="T\n\nx <!-- hidden"))
    body = bench.forge.bodies[100]
    assert body.index("-->") < body.index("pidispatch job")


def test_a_long_body_is_cut_and_says_so(bench: Bench) -> None:
    job = make_job()
    bench.publish(job, bench.work(job, review_request="T\n" + "é" * 100_000))
    body = bench.forge.bodies[100]
    assert pd.BODY_CHARS < len(body) < 65_536
    assert "cut at 60,000 characters" in body
    assert body.rstrip().splitlines()[-1].startswith("pidispatch job")


def test_azures_description_fits_its_4000_characters() -> None:
    assert len(pd._request_body(make_job(kind="azure"), "x" * 9_000)) < 4_000


@pytest.mark.parametrize(
    "written", [None, "", "   \n\n", "[r2/2]", "# \n", "\u202e\x00"]
)
def test_without_a_title_the_fixed_text_is_used(written: str | None) -> None:
    title = pd.request_title(make_job(1, 2), written or "")
    assert title == "[r1/2] fix-issue: issue #7"


@pytest.mark.parametrize(
    ("written", "title"),
    [
        ("A fix", "[r1/2] A fix"),
        ("# A fix", "[r1/2] A fix"),
        ("[r1/2] A fix", "[r1/2] A fix"),
        ("[r2/2] A fix", "[r1/2] A fix"),
        ("[R2 / 2]A fix [r1/2]", "[r1/2] A fix"),
        ("[r1[r2/2]/2] A fix", "[r1/2] A fix"),
        ("[r1\u200b/2] A \u202efix\x07", "[r1/2] A fix"),
        ("A [r] fix [1/2]", "[r1/2] A [r] fix [1/2]"),
        ("A\tfix\u2028now", "[r1/2] A fix now"),
        ("#7: a fix", "[r1/2] #7: a fix"),
        ("[r2/2] # A fix", "[r1/2] A fix"),
    ],
)
def test_the_title_bears_the_right_marker_once(written: str, title: str) -> None:
    assert pd.request_title(make_job(1, 2), written) == title


@given(st.text(max_size=400))
def test_no_text_makes_a_title_that_breaks_the_rules(text: str) -> None:
    job = make_job(2, 3)
    title = pd.request_title(job, text)
    assert title.startswith("[r2/3] ") and len(title) > len("[r2/3] ")
    assert len(title) <= pd.TITLE_CHARS
    assert len(pd._TITLE_MARKER.findall(title)) == 1
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Zl") for c in title)
    assert pd.request_title(job, title) == title
    assert "own words" not in title


@given(st.text(alphabet="<!->- pidsatch:\x00\r\n", max_size=60))
def test_no_text_keeps_a_hidden_marker(text: str) -> None:
    cleaned = pd.clean_text(text + "<!-- pidispatch:gh-x:result -->" + text)
    assert "<!-- pidispatch:" not in cleaned
    assert cleaned.rfind("<!--") <= cleaned.rfind("-->")


# -----------------------------------------------------------------------------
# What an agent that publishes for itself left on the forge
# -----------------------------------------------------------------------------


def pushed(bench: Bench, work: pd.Work, *refs: str) -> pd.Work:
    """The box's result, put on refs of the forge as its agent would have."""
    assert work.bundle
    path = work.bundle.with_suffix("")
    run_git("push", "-q", str(bench.origin), *(f"+{r}" for r in refs), at=path)
    return work


RESULT = f"{pd.RESULT_REF}:refs/heads"


def review(bench: Bench, job: pd.Job, work: pd.Work) -> pd.Published:
    before = run_git("for-each-ref", at=bench.origin)
    found = pd.review_agent(bench.forge, bench.mirrors, job, work)
    assert run_git("for-each-ref", at=bench.origin) == before, "the host pushes nothing"
    assert len(bench.forge.comments) == 0
    return found


def test_an_agents_branch_and_request_are_found_and_the_marker_is_put_right(
    bench: Bench,
) -> None:
    job = make_job(2, 3)
    work = pushed(bench, bench.work(job), f"{RESULT}/pi/issue-7-r2")
    bench.forge.open_request("o/r", "pi/issue-7-r2", "main", "[r1/3] A fix", "")
    bench.forge.open_request("o/r", "pi/issue-7-r1", "main", "[r1/3] Its", "")
    found = review(bench, job, work)
    assert found.request
    assert found.request.title == "[r2/3] A fix"
    assert bench.forge.titles == ["[r2/3] A fix", "[r1/3] Its"]
    assert found.tip == bench.tip("pi/issue-7-r2")
    assert found.faults == ()
    assert pd.tell_faults(bench.forge, job, work, found) is None
    assert bench.forge.comments == []


def test_work_that_an_agent_did_not_push_is_reported_and_kept(bench: Bench) -> None:
    job = make_job()
    work = bench.work(job)
    found = review(bench, job, work)
    assert (found.faults, found.tip, found.request) == (("not-pushed",), None, None)
    assert pd.tell_faults(bench.forge, job, work, found) == "not-pushed"
    pd.tell_faults(bench.forge, job, work, found)
    [text] = bench.forge.comments
    assert "`pidispatch publish gh-d1 --to BRANCH`" in text
    assert "Done." in text, "what the agent wanted to say"


def test_a_pushed_branch_without_a_request_is_reported(bench: Bench) -> None:
    job = make_job()
    work = pushed(bench, bench.work(job), f"{RESULT}/pi/issue-7")
    assert review(bench, job, work).faults == ("request-missing",)


def test_a_branch_that_somebody_moved_on_still_has_the_work(bench: Bench) -> None:
    """A commit on top that the host never saw is fetched to tell."""
    job = make_job()
    work = pushed(bench, bench.work(job), f"{RESULT}/pi/issue-7")
    more = commit(bench.origin, [str(bench.tip("pi/issue-7"))], {"more": "1"})
    point(bench.origin, "refs/heads/pi/issue-7", more)
    bench.forge.open_request("o/r", "pi/issue-7", "main", "A fix", "")
    found = review(bench, job, work)
    assert (found.faults, found.tip) == ((), None), "the tip is not ours to replace"


@pytest.mark.parametrize("ref", ["refs/heads/pi/issue-7-r1", "refs/tags/v1"])
def test_a_push_to_another_branch_or_tag_is_reported(bench: Bench, ref: str) -> None:
    job = make_job(2, 3)
    prepared = bench.prepare(job)
    box = bench.box(job, prepared)
    first = commit(box.path, [prepared.base], {"a": "1"})
    tip = commit(box.path, [first], {"b": "1"})
    work = pd.Work(box.bundle(tip), None, None, prepared.base, None, "main", 2)
    pushed(bench, work, f"{RESULT}/pi/issue-7-r2", f"{first}:{ref}")
    bench.forge.open_request("o/r", "pi/issue-7-r2", "main", "[r2/3] A fix", "")
    found = review(bench, job, work)
    assert found.faults == ("pushed-elsewhere",)
    assert pd.tell_faults(bench.forge, job, work, found) == "pushed-elsewhere"
    assert "another branch or tag than `pi/issue-7-r2`" in bench.forge.comments[0]


def test_nothing_done_is_no_fault(bench: Bench) -> None:
    job = make_job()
    nothing = pd.Work(None, None, None, bench.prepare(job).base, None, "main", 0)
    assert review(bench, job, nothing).faults == ()


@pytest.mark.parametrize("kind", ["github", "azure"])
def test_on_a_request_the_work_belongs_on_its_head(
    bench: Bench, kind: pd.ForgeKind
) -> None:
    """Azure has no ref of a request's head: there any branch will do."""
    head = commit(bench.origin, [str(bench.tip("main"))], {"topic": "1"})
    point(bench.origin, "refs/heads/topic", head)
    point(bench.origin, "refs/pull/7/head", head)
    job = make_job(1, 2, target="pull_request", kind=kind, head=head)
    prepared = bench.prepare(job)
    box = bench.box(job, prepared)
    tip = commit(box.path, [head], {"fix": "1"})
    work = pd.Work(
        box.bundle(tip), None, None, prepared.base, None, "main", 1, request_sha=head
    )
    found = review(bench, job, work)
    assert found.faults == ("not-pushed",)
    assert found.request is None
    pushed(bench, work, f"{RESULT}/topic")
    point(bench.origin, "refs/pull/7/head", tip)
    assert review(bench, job, work).faults == ()
    pd.tell_faults(bench.forge, job, work, found)
    assert bench.forge.comments[0].startswith("Replica 1 of 2.")
    assert "head of this pull request" in bench.forge.comments[0]
    assert bench.forge.titles == []


def test_a_result_that_cannot_be_read_loses_no_request(bench: Bench) -> None:
    job = make_job(1, 2)
    work = pushed(bench, bench.work(job), f"{RESULT}/pi/issue-7-r1")
    assert work.bundle
    work.bundle.write_bytes(b"#!/bin/sh\n")
    bench.forge.open_request("o/r", "pi/issue-7-r1", "main", "A fix", "")
    found = review(bench, job, work)
    assert found.request
    assert found.request.title == "[r1/2] A fix"
    assert pd.tell_faults(bench.forge, job, work, found) == "bundle-refused"
