"""Section `intake`: the HTTP edge, one delivery's judgement, the inbox, the watcher."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import json
import logging
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import requests
import watchfiles
from hypothesis import given, settings
from hypothesis import strategies as st

import pidispatch
import pidispatch_demo as demo
from pidispatch import (
    DAY,
    MAX_BODY_BYTES,
    Actor,
    Answer,
    Delivery,
    Edge,
    EdgeLimits,
    Event,
    Faults,
    Forge,
    GitHub,
    Inbox,
    InfraError,
    Intake,
    Match,
    Settings,
    Store,
    Target,
    TriggersFile,
)

SECRET = "s3cret"
OWN = "4242"


def until(holds: Callable[[], object], seconds: float = 20.0) -> bool:
    """Wait until something holds, looking often."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.01)
    return bool(holds())


# -- a small world ------------------------------------------------------------


def rule(on: dict[str, Any], kind: str = "github", **run: Any) -> dict[str, Any]:
    return {"on": on, "run": {"kind": kind, "flow": "fix-issue"} | run}


RULES = [
    rule({"type": "label", "any": ["pi:fix", "bug"]}),
    rule({"type": "label", "any": ["pi:urgent"]}, replicas=2),
    rule({"type": "comment", "phrase": "@pi"}),
    rule({"type": "pull_request", "action": ["opened", "synchronize"]}, flow="review"),
    rule({"type": "issue", "action": ["closed"]}, flow="review"),
]


def write_rules(path: Path, rules: Sequence[object] = RULES) -> bytes:
    content = json.dumps({"triggers": rules}).encode()
    path.write_bytes(content)
    return content


class Now:
    """A clock that stands still until it is told."""

    def __init__(self, at: float = 1_767_323_100.0) -> None:
        self.time = at

    def __call__(self) -> float:
        return self.time


class NoApi(requests.Session):
    """A session for what may not wait for a forge: using it is a failure."""

    def request(self, *_: Any, **__: Any) -> requests.Response:
        raise AssertionError("a delivery asked the API")


class World:
    """An intake on a real store, with GitHub served and our identity known."""

    def __init__(self, folder: Path, hourly: int = 0, **fields: Any) -> None:
        self.now = Now()
        self.file = folder / "triggers.json"
        if not self.file.exists():
            write_rules(self.file)
        self.store = Store(folder / "queue.db", self.now)
        fields.setdefault("webhook_secret", (SECRET,))
        fields.setdefault("github_pat", "t0ken")
        forges: dict[str, Forge] = {"github": GitHub(Settings(**fields), NoApi())}
        self.triggers = TriggersFile(self.file, forges)
        self.intake = Intake(forges, self.triggers, self.store, hourly, self.now)
        self.intake.own["github"] = OWN

    def send(self, shape: object, event: str = "issues", guid: str = "d-1") -> Answer:
        headers, body = demo.signed_delivery(
            event, cast(dict[str, Any], shape), SECRET, guid
        )
        lower = {name.lower(): value for name, value in headers.items()}
        return self.intake.receive("github", lower, body)

    def counts(self) -> dict[str, int]:
        return self.store.status(pidispatch.Caps(None, None, None, "UTC"), 0).counts

    def jobs(self) -> list[str]:
        return [run.id for run in reversed(self.store.runs(100))]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.store.close()


def issue(
    action: str = "labeled", label: str | None = "pi:fix", **changes: Any
) -> dict[str, Any]:
    item = {
        "number": 7,
        "title": "Crash",
        "body": "It crashes.",
        "user": {"id": 20, "login": "reporter"},
        "labels": [{"name": label}] if label else [],
        "author_association": "NONE",
    }
    shape = {
        "action": action,
        "issue": item | changes,
        "repository": {"id": 5, "full_name": "octo/lamp"},
        "sender": {"id": 10, "login": "maintainer"},
    }
    return shape | ({"label": {"name": label}} if label else {})


def comment(text: str = "@pi", association: str = "OWNER") -> dict[str, Any]:
    said = {
        "id": 9,
        "body": text,
        "user": {"id": 10, "login": "maintainer"},
        "author_association": association,
    }
    return issue("created", None) | {"comment": said}


# -- one delivery -------------------------------------------------------------


def test_a_matching_delivery_is_queued_and_on_disk(
    world: World, tmp_path: Path
) -> None:
    answer = world.send(issue())
    assert answer == (202, {"status": "queued", "jobs": ("gh-d-1",)})
    other = pidispatch.Reader(tmp_path / "queue.db")
    assert [run.id for run in other.runs(5)] == ["gh-d-1"]


def test_a_rule_with_replicas_mints_the_whole_set(world: World) -> None:
    answer = world.send(issue(label="pi:urgent"))
    assert answer.payload["jobs"] == ("gh-d-1-r1", "gh-d-1-r2")
    assert world.jobs() == ["gh-d-1-r1", "gh-d-1-r2"]


def test_a_delivery_sent_again_is_a_duplicate_also_after_a_restart(
    tmp_path: Path,
) -> None:
    """T01."""
    first = World(tmp_path)
    assert first.send(issue()).status == 202
    first.store.close()
    second = World(tmp_path)
    assert second.send(issue()) == (200, {"status": "duplicate"})
    assert second.jobs() == ["gh-d-1"]
    assert second.counts()["duplicate"] == 1
    second.store.close()


def test_a_signed_body_cannot_be_replayed_under_another_id(world: World) -> None:
    assert world.send(issue(), guid="d-1").status == 202
    assert world.send(issue(), guid="d-2") == (200, {"status": "duplicate"})


def test_a_duplicate_stays_one_when_the_rules_have_changed(world: World) -> None:
    world.send(issue())
    write_rules(world.file, [])
    world.triggers.refresh()
    assert world.send(issue()) == (200, {"status": "duplicate"})


def test_a_second_event_within_the_window_coalesces(world: World) -> None:
    """T18: six labels in one second are one job for each matching rule."""
    assert world.send(issue(), guid="d-1").status == 202
    again = world.send(issue(label="bug", title="edited"), guid="d-2")
    assert again == (200, {"status": "coalesced"})
    assert world.jobs() == ["gh-d-1"]


IGNORED = [
    ("ping", {"zen": "…"}, "unhandled-event"),
    ("issues", issue("edited"), "action-not-actionable"),
    ("issues", issue("unlabeled"), "action-not-actionable"),
    ("issues", issue(label="question"), "no-allowlisted-label"),
    ("issues", issue() | {"repository": None}, "no-repository"),
    ("issues", issue(number=0), "missing-number"),
    ("issues", issue() | {"sender": {"login": "x"}}, "missing-sender-id"),
    ("issues", issue() | {"sender": {"id": int(OWN)}}, "self"),
    ("issue_comment", comment("hello"), "no-trigger-phrase"),
    ("issue_comment", comment(association="NONE"), "not-allowed"),
    ("issue_comment", comment(association="CONTRIBUTOR"), "not-allowed"),
]


@pytest.mark.parametrize(("event", "shape", "reason"), IGNORED)
def test_what_is_not_for_us_is_answered_200_with_its_reason(
    world: World, event: str, shape: object, reason: str
) -> None:
    """T10, T21, T24: a forge must never count these against the hook."""
    answer = world.send(shape, event)
    assert answer == (200, {"status": "ignored", "reason": reason})
    assert reason in pidispatch.DROP_REASONS
    assert world.counts() == {reason: 1}
    assert world.jobs() == []


def test_the_first_reason_in_order_is_told(world: World) -> None:
    """Match first, then the sender's id, then `self`, then authority."""
    mine = {"sender": {"id": int(OWN)}}
    assert world.send(issue(label="x") | mine).payload["reason"] == (
        "no-allowlisted-label"
    )
    said = comment(association="NONE") | mine
    assert world.send(said, "issue_comment").payload["reason"] == "self"


def test_a_dropped_delivery_leaves_no_memory_and_is_judged_afresh(
    world: World,
) -> None:
    shape = issue(label="later")
    assert world.send(shape).payload["reason"] == "no-allowlisted-label"
    write_rules(world.file, [rule({"type": "label", "any": ["later"]})])
    world.triggers.refresh()
    assert world.send(shape) == (202, {"status": "queued", "jobs": ("gh-d-1",)})


def test_a_forged_request_burns_no_id(world: World) -> None:
    headers, body = demo.signed_delivery("issues", issue(), "guess", "d-1")
    lower = {name.lower(): value for name, value in headers.items()}
    answer = world.intake.receive("github", lower, body)
    assert answer == (401, {"status": "error", "reason": "unauthorized"})
    assert world.send(issue()).status == 202


def test_what_needs_the_api_is_parked_and_never_waits_for_it(world: World) -> None:
    """T07, T24: closing decides by API; the session here fails when used."""
    answer = world.send(issue("closed", None))
    assert answer == (202, {"status": "pending"})
    assert world.send(issue("closed", None)) == (200, {"status": "duplicate"})
    due = world.store.due_pending(world.now())
    assert [(d.id, m.flow, n) for d, m, n in due] == [("gh-d-1", "review", 0)]


def test_until_we_know_who_we_are_a_delivery_waits(world: World) -> None:
    world.intake.own.clear()
    assert world.send(issue()) == (202, {"status": "pending"})


def test_without_an_identity_of_ours_nothing_is_our_own(world: World) -> None:
    world.intake.own["github"] = None
    assert world.send(issue()).payload["status"] == "queued"


def test_a_target_gets_so_many_deliveries_an_hour(tmp_path: Path) -> None:
    """The loop guard: a set counts once and is admitted whole or not at all."""
    world = World(tmp_path, hourly=1)
    assert world.send(issue(label="pi:urgent")).status == 202
    world.now.time += 700
    answer = world.send(issue(label="pi:urgent", title="again"), guid="d-2")
    assert answer == (200, {"status": "ignored", "reason": "rate-limited"})
    assert len(world.jobs()) == 2
    assert world.counts()["rate-limited"] == 1
    world.store.close()


def test_a_malformed_body_is_400_and_an_unserved_forge_404(world: World) -> None:
    body = b"{"
    signed = {"x-hub-signature-256": mac(body)}
    assert world.intake.receive("github", signed, body).status == 400
    assert world.intake.receive("gitlab", signed, body).status == 404


class BrokenStore(Store):
    """A disk that is full: every write fails."""

    def _write(self, do: Callable[[Any], Any]) -> Any:
        raise InfraError("disk full")


def test_a_store_that_cannot_write_is_503_for_work_only(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store.close()
    world.intake.store = BrokenStore(tmp_path / "queue.db", world.now)
    assert world.send(issue()).status == 503
    assert world.send(issue("closed", None)).status == 503
    assert world.send({}, "ping") == (
        200,
        {"status": "ignored", "reason": "unhandled-event"},
    )


def mac(body: bytes, secret: str = SECRET) -> str:
    return "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


# -- the edge -----------------------------------------------------------------

QUICK = EdgeLimits(head_seconds=0.3, body_seconds=0.3, linger_seconds=0.2)


@contextlib.contextmanager
def serving(intake: Intake, limits: EdgeLimits | None = None) -> Iterator[Edge]:
    edge = Edge(intake, "127.0.0.1", 0, limits)
    edge.start()
    try:
        yield edge
    finally:
        edge.stop(patience=0.5)


@pytest.fixture
def edge(world: World) -> Iterator[Edge]:
    with serving(world.intake) as made:
        yield made


def test_a_server_can_be_stopped_the_moment_it_was_started(world: World) -> None:
    for _ in range(50):
        with serving(world.intake) as made:
            pass
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", made.port), 1).close()


def test_a_server_that_cannot_open_says_so_at_once(world: World) -> None:
    class Late(Edge):
        """Its thread takes a moment to end."""

        def _run(self) -> None:
            super()._run()
            time.sleep(0.05)

    made = Late(world.intake, "127.0.0.1", 0)
    made._socket.close()  # as if the system had taken it
    with pytest.raises(OSError, match="Bad file descriptor"):
        made.start()
    made.stop()


class Raw:
    """A client that sends exactly the given bytes and reads what comes."""

    def __init__(self, edge: Edge) -> None:
        self.sock = socket.create_connection(("127.0.0.1", edge.port), timeout=10)
        self.file = self.sock.makefile("rb")

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def answer(self) -> tuple[int, dict[str, str], dict[str, Any]]:
        status = int(self.file.readline().split(b" ")[1])
        headers: dict[str, str] = {}
        while line := self.file.readline().strip():
            name, _, value = line.partition(b": ")
            headers[name.decode().lower()] = value.decode()
        body = json.loads(self.file.read(int(headers["content-length"])))
        return status, headers, body

    def ended(self) -> bool:
        """Whether the other side has closed, with nothing more to read."""
        return self.file.read(1) == b""


def ask(edge: Edge, data: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    with Raw(edge) as raw:
        raw.send(data)
        return raw.answer()


def post(
    body: bytes = b"{}",
    path: str = "/github",
    event: str = "ping",
    guid: str = "d-1",
    **headers: str | None,
) -> bytes:
    """A signed request; a header None is left out."""
    fields: dict[str, str | None] = {
        "Host": "pi.example",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "X-GitHub-Event": event,
        "X-GitHub-Delivery": guid,
        "X-Hub-Signature-256": mac(body),
    }
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in fields.items() if value is not None]
    head = "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""])
    return head.encode("latin-1") + body


@pytest.mark.parametrize("path", ["/github", "/", "/github/", "/?x=1", "/github/?a=/"])
def test_a_delivery_is_taken_at_these_paths(edge: Edge, path: str) -> None:
    status, _, body = ask(edge, post(path=path))
    assert (status, body) == (200, {"status": "ignored", "reason": "unhandled-event"})


@pytest.mark.parametrize(
    "path",
    [
        "//",
        "//github",
        "/github//",
        "/GitHub",
        "/git%68ub",
        "/github%2f",
        "/github/x",
        "/./github",
        "/github#",
        "http://pi.example/github",
        "*",
        "github",
        "?",
        "/gitlab",
        "/forgejo",
        "/azure",
        "/metrics",
    ],
)
def test_any_other_path_is_404_also_with_a_bad_credential(
    edge: Edge, path: str
) -> None:
    for secret in (SECRET, "wrong"):
        request = post(path=path, X_Hub_Signature_256=mac(b"{}", secret))
        status, _, body = ask(edge, request)
        assert (status, body["reason"]) == (404, "not-found")


def test_health_is_told_without_a_credential(edge: Edge) -> None:
    for path in (b"/healthz", b"/healthz/", b"/healthz?probe=1"):
        status, headers, body = ask(edge, b"GET " + path + b" HTTP/1.1\r\n\r\n")
        assert (status, body) == (200, {"status": "ok"})
        assert "connection" not in headers


def request(line: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([line, *headers, b"", b""])


POST = b"POST /github HTTP/1.1"
LONG = b"x" * 9_000
STATUSES = {
    "no method": (request(b" / HTTP/1.1"), 400),
    "one word": (request(b"POST"), 400),
    "two words": (request(b"POST /github"), 400),
    "four words": (request(b"POST /github x HTTP/1.1"), 400),
    "tab": (request(b"POST\t/github\tHTTP/1.1"), 400),
    "lower-case version": (request(b"POST /github http/1.1"), 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n", 400),
    "bare line feed": (b"GET /healthz HTTP/1.1\n\n", 400),
    "unknown method": (request(b"BREW /github HTTP/1.1"), 501),
    "lower-case method": (request(b"post /github HTTP/1.1"), 501),
    "PUT": (request(b"PUT /github HTTP/1.1"), 405),
    "DELETE elsewhere": (request(b"DELETE /nowhere HTTP/1.1"), 405),
    "CONNECT": (request(b"CONNECT a:443 HTTP/1.1"), 405),
    "GET of a hook": (request(b"GET /github HTTP/1.1"), 405),
    "GET of the root": (request(b"GET / HTTP/1.1"), 405),
    "POST of health": (request(b"POST /healthz HTTP/1.1"), 405),
    "GET elsewhere": (request(b"GET /nowhere HTTP/1.1"), 404),
    "HTTP/2": (request(b"POST /github HTTP/2.0"), 505),
    "HTTP/0.9": (request(b"POST /github HTTP/0.9"), 505),
    "long line": (request(b"POST /github?" + LONG + b" HTTP/1.1"), 414),
    "one long header": (request(POST, b"X: " + LONG * 4), 431),
    "much header": (
        request(POST, *[b"X-%d: " % n + b"y" * 900 for n in range(40)]),
        431,
    ),
    "many headers": (request(POST, *[b"X-%d: y" % n for n in range(101)]), 431),
    "no colon": (request(POST, b"Host"), 400),
    "space before colon": (request(POST, b"Host : a"), 400),
    "folded header": (request(POST, b"Host: a", b" b"), 400),
    "empty header name": (request(POST, b": a"), 400),
    "NUL in a header": (request(POST, b"X: a\0b"), 400),
    "bare CR in a header": (request(POST, b"X: a\rb: c"), 400),
    "no length": (request(POST), 411),
    "chunked": (request(POST, b"Transfer-Encoding: chunked"), 411),
    "chunked and a length": (
        request(POST, b"Transfer-Encoding: chunked", b"Content-Length: 2"),
        411,
    ),
    "negative length": (request(POST, b"Content-Length: -1"), 400),
    "signed length": (request(POST, b"Content-Length: +2"), 400),
    "hex length": (request(POST, b"Content-Length: 0x2"), 400),
    "empty length": (request(POST, b"Content-Length:"), 400),
    "list of lengths": (request(POST, b"Content-Length: 2, 2"), 400),
    "superscript length": (request(POST, b"Content-Length: \xb2"), 400),
    "underscored length": (request(POST, b"Content-Length: 1_0"), 400),
    "two lengths": (request(POST, b"Content-Length: 2", b"Content-Length: 2"), 400),
    "two lengths in two cases": (
        request(POST, b"Content-Length: 2", b"content-length: 3"),
        400,
    ),
    "one byte too many": (
        request(POST, b"Content-Length: %d" % (MAX_BODY_BYTES + 1)),
        413,
    ),
    "length of many digits": (request(POST, b"Content-Length: " + b"9" * 5_000), 413),
    "no type": (request(POST, b"Content-Length: 2"), 415),
    "other type": (request(POST, b"Content-Length: 2", b"Content-Type: text/xml"), 415),
    "no credential": (post(X_Hub_Signature_256=None), 401),
    "old credential only": (
        post(X_Hub_Signature_256=None, X_Hub_Signature="sha1=" + "0" * 40),
        401,
    ),
    "malformed": (post(b"{"), 400),
    "empty body": (post(b""), 400),
    "invalid UTF-8": (post(b'{"x": "\xff"}'), 400),
    "deep": (post(b"[" * 200_000), 400),
    "no event": (post(X_GitHub_Event=None), 400),
    "no delivery id": (post(X_GitHub_Delivery=None), 400),
}


@pytest.mark.parametrize("name", STATUSES)
def test_what_is_wrong_has_its_status_and_ends_the_connection(
    edge: Edge, name: str
) -> None:
    data, wanted = STATUSES[name]
    with Raw(edge) as raw:
        raw.send(data)
        status, headers, body = raw.answer()
        assert status == wanted
        word = pidispatch.STATUS_WORDS[wanted]
        assert body == {"status": "error", "reason": word}
        assert headers["connection"] == "close"
        assert raw.ended()
    assert ("allow" in headers) == (wanted == 405)
    assert not {"server", "date"} & headers.keys()


ORDERED = [
    (b"BREW /github HTTP/9.9", [b"Content-Length: -1"], 501),
    (b"GET /github HTTP/9.9", [b"Content-Length: -1"], 405),
    (b"POST /github HTTP/2.0", [b"bad header"], 505),
    (b"BREW /" + LONG + b" HTTP/1.1", [], 501),
    (b"PUT /" + LONG + b" HTTP/1.1", [], 405),
    (b"BREW /" + LONG * 9, [], 501),
    (b"GET /github?" + LONG * 9, [], 405),
    (b"POST /github?" + LONG * 9, [], 414),
    (b"POST /github?" + LONG + b" HTTP/2.0", [], 505),
    (b"POST /nowhere?" + LONG + b" HTTP/1.1", [b"bad header"], 414),
    (b"POST /github HTTP/1.1", [b"X: " + LONG * 4, b"Content-Length: -1"], 431),
    (b"POST /github HTTP/1.1", [b"Content-Type: text/xml"], 411),
    (
        b"POST /github HTTP/1.1",
        [b"Content-Type: text/xml", b"Content-Length: 99999999"],
        413,
    ),
    (b"POST /github HTTP/1.1", [b"Content-Type: text/xml", b"Content-Length: 1"], 415),
    (b"POST /nowhere HTTP/1.1", [b"Content-Type: text/xml"], 404),
]


@pytest.mark.parametrize(("line", "headers", "wanted"), ORDERED)
def test_of_several_faults_the_first_in_the_fixed_order_is_told(
    edge: Edge, line: bytes, headers: list[bytes], wanted: int
) -> None:
    assert ask(edge, request(line, *headers))[0] == wanted


@pytest.mark.parametrize(
    "name",
    [
        "X-Hub-Signature-256",
        "X-Hub-Signature",
        "X-GitHub-Event",
        "X-GitHub-Delivery",
        "Content-Type",
        "Transfer-Encoding",
        "Authorization",
        "X-Gitlab-Token",
    ],
)
def test_a_header_that_decides_may_stand_once(edge: Edge, name: str) -> None:
    good = post().split(b"\r\n", 1)
    line = f"{name}: {mac(b'{}')}\r\n{name.lower()}: {mac(b'{}')}\r\n".encode()
    keep = [row for row in good[1].split(b"\r\n") if not row.startswith(name.encode())]
    data = good[0] + b"\r\n" + line + b"\r\n".join(keep)
    assert ask(edge, data)[0] == 400


def test_harmless_headers_may_repeat_and_latin_1_passes(edge: Edge) -> None:
    data = post().replace(
        b"Host:", b"Via: a\r\nVia: b\r\nX-Odd: caf\xe9 \xff\r\nHost:", 1
    )
    assert ask(edge, data)[0] == 200


def test_headers_made_to_be_slow_cost_no_time(edge: Edge) -> None:
    """Read as a mail, this one takes a second of CPU."""
    kind = b'Content-Type: multipart/x; a="' + b";" * 32_000
    began = time.process_time()
    assert ask(edge, request(POST, b"Content-Length: 2", kind))[0] == 415
    assert time.process_time() - began < 0.3


@pytest.mark.parametrize("size", [10, 60, 200, -1])
def test_a_request_that_breaks_off_is_400(edge: Edge, size: int) -> None:
    with Raw(edge) as raw:
        raw.send(post()[:size])
        raw.sock.shutdown(socket.SHUT_WR)
        assert raw.answer()[0] == 400
        assert raw.ended()


def test_types_ignore_case_and_parameters(edge: Edge) -> None:
    kind = "Application/JSON; charset=utf-8"
    assert ask(edge, post(Content_Type=kind))[0] == 200


def test_a_connection_is_kept_and_an_old_one_is_not(edge: Edge) -> None:
    with Raw(edge) as raw:
        for n in range(3):
            raw.send(post(guid=f"d-{n}"))
            status, headers, _ = raw.answer()
            assert (status, headers.get("connection")) == (200, None)
        raw.send(post(Connection="close"))
        assert raw.answer()[1]["connection"] == "close"
        assert raw.ended()
    old = post().replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    assert ask(edge, old)[1]["connection"] == "close"


def test_pipelined_requests_are_answered_in_turn(edge: Edge, world: World) -> None:
    first = post(json.dumps(issue()).encode(), event="issues", guid="p-1")
    health = b"GET /healthz HTTP/1.1\r\n\r\n"
    with Raw(edge) as raw:
        raw.send(first + b"\r\n" + health + post() + post(b"{") + health)
        assert [raw.answer()[0] for _ in range(4)] == [202, 200, 200, 400]
        assert raw.ended()
    assert world.jobs() == ["gh-p-1"]


def test_a_get_with_a_body_cannot_smuggle_a_request(edge: Edge) -> None:
    inner = post()
    head = b"GET /healthz HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(inner)
    with Raw(edge) as raw:
        raw.send(head + inner)
        status, headers, _ = raw.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert raw.ended()


def test_a_client_that_waits_for_100_gets_it_and_a_refusal_comes_first(
    edge: Edge,
) -> None:
    data = post(Expect="100-continue")
    head, _, body = data.partition(b"\r\n\r\n")
    with Raw(edge) as raw:
        raw.send(head + b"\r\n\r\n")
        assert raw.file.readline() == b"HTTP/1.1 100 Continue\r\n"
        assert raw.file.readline() == b"\r\n"
        raw.send(body)
        assert raw.answer()[0] == 200
    big = request(POST, b"Content-Length: 99999999", b"Expect: 100-continue")
    assert ask(edge, big)[0] == 413


def test_a_body_of_24_9_mib_is_taken(edge: Edge) -> None:
    """T08."""
    body = b'{"x": "' + b"y" * int(24.9 * 1024 * 1024) + b'"}'
    status, _, said = ask(edge, post(body))
    assert (status, said["reason"]) == (200, "unhandled-event")


def test_a_body_too_large_is_refused_unread_and_the_sender_hears_it(
    edge: Edge,
) -> None:
    """T08: by Content-Length, also to a client that sends it all the same."""
    body = b"x" * (MAX_BODY_BYTES + 1)
    client = http.client.HTTPConnection("127.0.0.1", edge.port, timeout=10)
    client.request("POST", "/github", body, {"Content-Type": "application/json"})
    assert client.getresponse().status == 413
    client.close()


def dribble(raw: Raw, data: bytes) -> None:
    """One byte every 20 ms until an answer comes: no single read waits long."""
    for byte in data:
        raw.send(bytes([byte]))
        if select.select([raw.sock], [], [], 0.02)[0]:
            return


@pytest.mark.parametrize("part", ["line", "headers", "body"])
def test_one_byte_at_a_time_does_not_outlast_the_total_deadline(
    world: World, part: str
) -> None:
    starts = {
        "line": (b"", b"POST /" + b"x" * 500),
        "headers": (POST + b"\r\n", b"X: " + b"y" * 500),
        "body": (
            request(POST, b"Content-Type: application/json", b"Content-Length: 500"),
            b"{" * 500,
        ),
    }
    with serving(world.intake, QUICK) as edge, Raw(edge) as raw:
        began = time.monotonic()
        raw.send(starts[part][0])
        dribble(raw, starts[part][1])
        status, _, body = raw.answer()
        assert (status, body["reason"]) == (408, "timeout")
        assert time.monotonic() - began < 2


def test_a_silent_connection_ends_and_a_kept_one_without_a_word(world: World) -> None:
    with serving(world.intake, QUICK) as edge, Raw(edge) as idle, Raw(edge) as kept:
        kept.send(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert kept.answer()[0] == 200
        assert kept.ended()
        assert idle.answer()[0] == 408
        assert idle.ended()


def test_slow_connections_give_way_when_there_are_too_many(world: World) -> None:
    """And take no thread at all."""
    with (
        serving(world.intake, EdgeLimits(connections=3)) as edge,
        contextlib.ExitStack() as stack,
    ):
        threads = threading.active_count()
        slow = [stack.enter_context(Raw(edge)) for _ in range(6)]
        began = time.monotonic()
        for raw in slow:
            raw.send(b"POST /gith")
        assert until(lambda: len(edge.open) <= 3)
        assert time.monotonic() - began < 5, "long before their time is over"
        assert threading.active_count() == threads
        assert ask(edge, post())[0] == 200


def test_the_connection_that_was_idle_longest_gives_way_first(world: World) -> None:
    health = b"GET /healthz HTTP/1.1\r\n\r\n"
    with (
        serving(world.intake, EdgeLimits(connections=3)) as edge,
        contextlib.ExitStack() as s,
    ):
        kept = [s.enter_context(Raw(edge)) for _ in range(3)]
        for n in (1, 0, 2):
            kept[n].send(health)
            assert kept[n].answer()[0] == 200
        assert ask(edge, post())[0] == 200
        assert kept[1].ended()
        for n in (0, 2):
            kept[n].send(health)
            assert kept[n].answer()[0] == 200


def test_a_client_that_does_not_read_is_let_go(world: World) -> None:
    limits = EdgeLimits(send_seconds=0.2, linger_seconds=0.1)
    with serving(world.intake, limits) as edge, Raw(edge) as deaf:
        deaf.sock.settimeout(0.1)
        with contextlib.suppress(OSError):
            while True:
                deaf.send(b"GET /healthz HTTP/1.1\r\n\r\n" * 1_000)
        assert until(lambda: not edge.open)
        assert ask(edge, post())[0] == 200


def test_a_client_that_resets_at_any_point_is_no_fault_of_ours(
    edge: Edge, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pidispatch"), "propagate", True)
    reset = struct.pack("ii", 1, 0)
    for data in (b"", b"POST /git", b"BREW\r\n", post()[:-1], post(), post() * 9):
        for _ in range(20):
            with Raw(edge) as raw:
                raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                raw.send(data)
    assert until(lambda: not edge.open)
    assert ask(edge, post())[0] == 200
    assert not caplog.records


def test_connections_that_come_and_go_leave_one_tick(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each look at the deadlines would be done as often as there were clients."""
    ticks: list[float] = []
    look = pidispatch._Conversation.look

    def counted(self: pidispatch._Conversation, now: float) -> None:
        ticks.append(now)
        look(self, now)

    monkeypatch.setattr(pidispatch._Conversation, "look", counted)
    with Raw(edge):
        assert until(lambda: edge.open)
    for _ in range(50):
        assert until(lambda: not edge.open)
        with Raw(edge):
            assert until(lambda: edge.open)
    assert until(lambda: not edge.open)
    with Raw(edge):
        assert until(lambda: edge.open)
        ticks.clear()
        time.sleep(1)
        assert len(ticks) < 15


def test_few_large_bodies_are_held_at_once(world: World) -> None:
    limits = EdgeLimits(large=10, larges=1, body_seconds=0.3)
    head = request(POST, b"Content-Type: application/json", b"Content-Length: 50")
    with serving(world.intake, limits) as edge, Raw(edge) as slow:
        slow.send(head)
        assert until(lambda: edge.larges == 1)
        assert ask(edge, post())[0] == 200
        assert slow.answer()[0] == 408
        assert ask(edge, post(b"[" * 50))[0] == 400


def test_ending_lets_a_request_in_progress_finish(world: World) -> None:
    edge = Edge(world.intake, "127.0.0.1", 0)
    edge.start()
    data = post(json.dumps(issue()).encode(), event="issues")
    with Raw(edge) as idle, Raw(edge) as busy:
        idle.send(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert idle.answer()[0] == 200
        busy.send(data[:-5])
        assert until(lambda: any(one.buffer for one in edge.open))
        ending = threading.Thread(target=edge.stop)
        ending.start()
        assert idle.ended()
        busy.send(data[-5:])
        status, headers, _ = busy.answer()
        assert (status, headers["connection"]) == (202, "close")
        ending.join(5)
        assert not ending.is_alive()
    with pytest.raises(OSError, match="refused"):
        Raw(edge)


def test_a_failing_accept_is_logged_and_tried_again(
    edge: Edge, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pidispatch"), "propagate", True)
    health = b"GET /healthz HTTP/1.1\r\n\r\n"
    with Raw(edge) as raw, monkeypatch.context() as full:
        raw.send(health)
        assert raw.answer()[0] == 200

        def accept(_: socket.socket) -> object:
            raise OSError(24, "too many open files")

        full.setattr(socket.socket, "accept", accept)
        raw.send(health)
        late = Raw(edge)
        assert until(
            lambda: any(r.getMessage() == "edge-failed" for r in caplog.records)
        )
        assert raw.answer()[0] == 200
    with late:
        late.send(post())
        assert late.answer()[0] == 200


def test_the_servers_library_is_imported_only_with_an_edge() -> None:
    """It takes as long to import as all else."""
    code = "import sys, pidispatch; sys.exit('asyncio' in sys.modules)"
    root = Path(pidispatch.__file__).parent
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


class Faulty(Intake):
    def receive(self, kind: str, headers: Mapping[str, str], body: bytes) -> Answer:
        raise ZeroDivisionError


def test_a_fault_of_ours_is_503_and_logged(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pidispatch"), "propagate", True)
    faulty = Faulty(world.intake.forges, world.triggers, world.store, 0)
    with serving(faulty) as edge:
        assert ask(edge, post())[0] == 503
    assert any(record.exc_info for record in caplog.records)


class OneSocket:
    """A transport that remembers its writes."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def is_reading(self) -> bool:
        return True

    def write_eof(self, *_: object) -> None:
        pass

    set_write_buffer_limits = pause_reading = write_eof


def converse(edge: Edge, chunks: Sequence[bytes]) -> list[bytes]:
    """What is written to a client that sends these and then no more."""
    sock = OneSocket()
    spoken = pidispatch._Conversation(edge)

    def talk() -> None:
        spoken.connection_made(sock)
        for chunk in filter(None, chunks):
            spoken.data_received(chunk)
        spoken.eof_received()

    edge.loop.call_soon_threadsafe(talk)
    assert sock.closed.wait(10)
    edge.loop.call_soon_threadsafe(spoken.connection_lost, None)
    return sock.writes


def test_each_answer_is_one_write(edge: Edge) -> None:
    """Apart, the parts of an answer cost a delayed ACK of 40 ms."""
    writes = converse(edge, [post(), post(), post(b"{")])
    assert [w.split(b"\r\n")[0] for w in writes] == [
        b"HTTP/1.1 200 ok",
        b"HTTP/1.1 200 ok",
        b"HTTP/1.1 400 malformed",
    ]


def test_how_bytes_are_cut_does_not_matter(edge: Edge) -> None:
    data = post() + post(b"{")
    whole = converse(edge, [data])
    assert converse(edge, [data[n : n + 1] for n in range(len(data))]) == whole
    assert len(whole) == 2


PIECES = st.sampled_from(
    [
        post(),
        post(b"{"),
        POST,
        b"GET /healthz HTTP/1.1",
        b"HTTP/1.",
        b"Content-Length: ",
        b"Content-Type: application/json",
        b"Transfer-Encoding: chunked",
        b"X-Hub-Signature-256: ",
        *(b"\r\n", b"\r\n\r\n", b"\n", b" ", b":", b"5", b"-", b"\0"),
    ]
)


@pytest.fixture(scope="module")
def shared_edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    world = World(tmp_path_factory.mktemp("edge"))
    with serving(world.intake) as edge:
        yield edge
    world.store.close()


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(PIECES | st.binary(max_size=20), max_size=12))
def test_no_bytes_get_anything_but_a_fixed_answer(
    shared_edge: Edge, pieces: list[bytes]
) -> None:
    writes = converse(shared_edge, pieces)
    for n, write in enumerate(writes):
        head, _, body = write.partition(b"\r\n\r\n")
        status = int(head.split(b" ")[1])
        if status == 100:
            continue
        assert status in pidispatch.STATUS_WORDS
        assert b"Content-Length: %d" % len(body) in head
        assert json.loads(body)["status"] in ("ok", "ignored", "duplicate", "error")
        assert status < 400 or n == len(writes) - 1


# -- the inbox ----------------------------------------------------------------


class StubForge:
    """A forge whose answers about people a test decides."""

    def __init__(self, kind: str = "github") -> None:
        self.kind = cast(pidispatch.ForgeKind, kind)
        self.me: str | None = OWN
        self.says: bool | Exception = True
        self.word: str = "ask"
        self.asked: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def own_id(self) -> str | None:
        return self.me

    def authority(self, event: Event) -> str:
        return self.word

    def ask(self, event: Event) -> bool:
        self.asked.append(event.delivery)
        self.gate.wait(5)
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


class Post:
    """An inbox over stub forges, and a way to park deliveries in it."""

    def __init__(self, folder: Path, *kinds: str) -> None:
        self.now = Now()
        self.store = Store(folder / "queue.db", self.now)
        self.stubs = {kind: StubForge(kind) for kind in kinds or ("github",)}
        self.forge = next(iter(self.stubs.values()))
        file = folder / "triggers.json"
        write_rules(file)
        forges = cast(dict[str, Forge], self.stubs)
        self.intake = Intake(
            forges, TriggersFile(file, pidispatch.FORGES), self.store, 0, self.now
        )
        self.inbox = Inbox(self.intake)
        self.inbox.TICK = 0.02

    def park(
        self, delivery: str = "d-1", kind: str = "github", actor: str = "10", n: int = 7
    ) -> None:
        event = Event(
            forge=cast(pidispatch.ForgeKind, kind),
            delivery=delivery,
            name="issues",
            kind="issue",
            action="closed",
            repo="octo/lamp",
            target=Target("issue", n),
            actor=Actor(actor, "maintainer"),
        )
        on = pidispatch.On(type="issue", action=("closed",))
        run = pidispatch.Run(kind=kind, flow="review", replicas=2)
        match = Match(pidispatch.Rule(0, on, run), "review", "closed")
        made = Delivery(
            id=pidispatch.set_id(kind, delivery),
            event=event,
            body_sha=delivery,
            received=self.now(),
        )
        assert self.store.park(made, match)
        self.intake.bell.set()

    def pending(self) -> int:
        return self.status().pending

    def counts(self) -> dict[str, int]:
        return self.status().counts

    def status(self) -> pidispatch.Status:
        caps = pidispatch.Caps(None, None, None, "UTC")
        return self.store.status(caps, self.now())

    def jobs(self) -> list[str]:
        return sorted(run.id for run in self.store.runs(100))


@pytest.fixture
def post_room(tmp_path: Path) -> Iterator[Post]:
    made = Post(tmp_path, "github", "gitlab")
    yield made
    for stub in made.stubs.values():
        stub.gate.set()
    made.inbox.stop()
    assert until(lambda: not made.inbox._busy)
    made.store.close()


def test_a_parked_delivery_of_somebody_who_may_becomes_its_whole_set(
    post_room: Post,
) -> None:
    post_room.inbox.start()
    post_room.park()
    assert until(lambda: post_room.jobs() == ["gh-d-1-r1", "gh-d-1-r2"], 2)
    assert until(lambda: post_room.pending() == 0)
    assert post_room.forge.asked == ["d-1"]


def test_a_parked_delivery_of_somebody_who_may_not_is_dropped_for_good(
    post_room: Post,
) -> None:
    """T24."""
    post_room.forge.says = False
    post_room.inbox.start()
    post_room.park()
    assert until(lambda: post_room.pending() == 0, 2)
    assert post_room.jobs() == []
    assert post_room.counts() == {"not-allowed": 1}


def test_our_own_event_is_dropped_before_anyone_is_asked(post_room: Post) -> None:
    """T21."""
    post_room.inbox.start()
    post_room.park(actor=OWN)
    assert until(lambda: post_room.pending() == 0, 2)
    assert post_room.counts() == {"self": 1}
    assert post_room.forge.asked == []


def test_the_payloads_word_counts_once_we_know_who_we_are(post_room: Post) -> None:
    post_room.forge.word = "allowed"
    post_room.inbox.start()
    post_room.park("d-1")
    post_room.forge.word = "denied"
    assert until(lambda: post_room.pending() == 0, 2)
    assert post_room.forge.asked == []


def test_what_cannot_be_told_is_tried_again_later_and_later(post_room: Post) -> None:
    """T24: 1 s, doubling to 5 minutes; nothing runs meanwhile."""
    post_room.forge.says = InfraError("503")
    post_room.park()
    inbox, now = post_room.inbox, post_room.now
    for delay in (1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300):
        tries = len(post_room.forge.asked)
        inbox.turn()
        assert until(lambda: not inbox._busy)
        assert len(post_room.forge.asked) == tries + 1
        now.time += delay - 0.5
        inbox.turn()
        assert not inbox._busy
        now.time += 0.5
    assert post_room.jobs() == []
    assert post_room.pending() == 1
    post_room.forge.says = True
    inbox.turn()
    assert until(lambda: post_room.jobs() == ["gh-d-1-r1", "gh-d-1-r2"])


def test_after_a_day_of_trying_it_is_dropped_as_unknown(post_room: Post) -> None:
    post_room.forge.says = InfraError("503")
    post_room.park()
    post_room.now.time += DAY  # asleep, say: there was no trying yet
    for _ in range(Inbox.TRIES_MIN):
        post_room.inbox.turn()
        assert until(lambda: not post_room.inbox._busy)
        assert post_room.pending() == 1
        post_room.now.time += Inbox.BACKOFF_LIMIT
    post_room.inbox.turn()
    assert until(lambda: post_room.pending() == 0)
    assert post_room.counts() == {"authority-unknown": 1}
    assert post_room.jobs() == []


def test_a_fault_of_ours_is_no_answer_either(post_room: Post) -> None:
    post_room.forge.says = ZeroDivisionError()
    post_room.park()
    post_room.inbox.turn()
    assert until(lambda: not post_room.inbox._busy)
    assert (post_room.pending(), post_room.jobs()) == (1, [])


def test_one_forge_that_hangs_holds_up_no_other(post_room: Post) -> None:
    hung, well = post_room.stubs["github"], post_room.stubs["gitlab"]
    hung.gate.clear()
    for n in range(60):
        post_room.park(f"h-{n}", n=n + 1)
        post_room.now.time += 0.01
    post_room.park("w-1", "gitlab")
    post_room.inbox.start()
    assert until(lambda: post_room.jobs() == ["gl-w-1-r1", "gl-w-1-r2"], 2)
    assert len(hung.asked) == Inbox.AT_ONCE
    assert well.asked == ["w-1"]


def test_a_machine_that_gives_no_thread_leaves_a_delivery_for_later(
    post_room: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for one in work, and so never looked at again."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    post_room.park()
    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(threading.Thread, "start", refuse)
        post_room.inbox.turn()
    post_room.inbox.turn()
    assert until(lambda: post_room.pending() == 0)


def test_a_delivery_is_never_resolved_twice_at_once(post_room: Post) -> None:
    post_room.forge.gate.clear()
    post_room.park()
    for _ in range(5):
        post_room.inbox.turn()
    assert until(lambda: post_room.forge.asked == ["d-1"])
    post_room.forge.gate.set()
    assert until(lambda: post_room.pending() == 0)
    assert post_room.forge.asked == ["d-1"]


def test_when_a_forge_answers_again_all_that_waits_for_it_is_resolved(
    post_room: Post,
) -> None:
    post_room.forge.says = InfraError("down")
    for n in range(Inbox.AT_ONCE):
        post_room.park(f"d-{n}", n=n + 1)
    inbox = post_room.inbox
    for _ in range(4):
        inbox.turn()
        assert until(lambda: not inbox._busy)
        post_room.now.time += 4
    assert post_room.store.due_pending(post_room.now()) == []
    post_room.forge.says = True
    post_room.park("new", n=99)
    inbox.start()
    assert until(lambda: post_room.pending() == 0, 2)
    assert len(post_room.jobs()) == 2 * Inbox.AT_ONCE + 2


def test_starting_learns_who_we_are_but_does_not_wait_long(post_room: Post) -> None:
    post_room.inbox.start()
    assert post_room.intake.own == {"github": OWN, "gitlab": OWN}


def test_a_forge_that_does_not_say_who_we_are_is_asked_again_when_needed(
    post_room: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down() -> str | None:
        raise InfraError("down")

    monkeypatch.setattr(post_room.forge, "own_id", down)
    post_room.inbox.start()
    assert post_room.intake.own == {"gitlab": OWN}
    monkeypatch.undo()
    post_room.park(actor="10")
    assert until(lambda: len(post_room.jobs()) == 2, 2)
    assert post_room.intake.own["github"] == OWN


def test_a_pending_delivery_survives_a_restart_and_keeps_its_rule(
    tmp_path: Path,
) -> None:
    first = Post(tmp_path)
    first.park()
    first.store.close()
    write_rules(tmp_path / "triggers.json", [])
    second = Post(tmp_path)
    write_rules(tmp_path / "triggers.json", [])
    second.inbox.start()
    assert until(lambda: second.jobs() == ["gh-d-1-r1", "gh-d-1-r2"], 2)
    second.inbox.stop()
    second.store.close()


def test_github_is_asked_and_the_set_is_queued_within_two_seconds(
    tmp_path: Path,
) -> None:
    """The whole way over HTTP, against a GitHub that first fails."""
    with demo.FakeGitHub([demo.Token("t0ken", "pi-bot")], root=tmp_path / "f") as fake:
        repo = fake.create_repo("octo/lamp", issues={7: {"title": "Crash"}})
        repo.add_collaborator("maintainer", "write")
        write_rules(tmp_path / "triggers.json")
        store = Store(tmp_path / "queue.db")
        fields = {"github_pat": "t0ken", "github_api_url": fake.url}
        forges = pidispatch.forges_of(
            Settings(webhook_secret=(SECRET,), **cast(Any, fields))
        )
        triggers = TriggersFile(tmp_path / "triggers.json", forges)
        intake = Intake(forges, triggers, store, 0)
        inbox = Inbox(intake)
        inbox.start()
        with serving(intake) as edge:
            fake.fail_next("GET", "/permission", status=503)
            for login, guid in (("maintainer", "d-1"), ("stranger", "d-2")):
                shape = demo.item_payload(repo, 7, "closed", login)
                headers, body = demo.signed_delivery("issues", shape, SECRET, guid)
                url = f"http://127.0.0.1:{edge.port}/"
                answer = requests.post(url, body, headers=headers, timeout=5)
                assert (answer.status_code, answer.json()) == (
                    202,
                    {"status": "pending"},
                )
            assert until(lambda: [r.id for r in store.runs(9)] == ["gh-d-1"], 3)
            assert until(lambda: not store.due_pending(time.time() + 600))
        inbox.stop()
        store.close()


# -- the triggers file --------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "conf" / "triggers.json"
    path.parent.mkdir()
    write_rules(path, [])
    return path


@pytest.fixture
def watched(file: Path) -> Iterator[TriggersFile]:
    made = TriggersFile(file, ["github"])
    made.watch()
    yield made
    made.stop()


def label(made: TriggersFile) -> str:
    return made.rules[0].on.any[0] if made.rules else ""


def content(name: str) -> bytes:
    shape = {"triggers": [rule({"type": "label", "any": [name]})]}
    return json.dumps(shape).encode()


def save_like_vim(file: Path, data: bytes) -> None:
    """The old file is moved away, a new one is written, the backup goes."""
    backup = file.with_name(file.name + "~")
    file.rename(backup)
    time.sleep(0.01)
    file.write_bytes(data)
    backup.unlink()


def save_by_replace(file: Path, data: bytes) -> None:
    other = file.with_name(".tmp-save")
    other.write_bytes(data)
    other.replace(file)


def save_in_two_steps(file: Path, data: bytes) -> None:
    """Truncate, then write 300 ms later."""
    with file.open("wb") as out:
        for _ in range(6):
            time.sleep(0.05)
        out.write(data)


def save_after_delete(file: Path, data: bytes) -> None:
    file.unlink()
    for _ in range(6):
        time.sleep(0.05)
    file.write_bytes(data)


SAVES = [save_like_vim, save_by_replace, save_in_two_steps, save_after_delete]


@pytest.mark.parametrize("save", SAVES)
def test_every_kind_of_save_ends_on_the_newest_content(
    watched: TriggersFile, save: Callable[[Path, bytes], None]
) -> None:
    """T49."""
    times = 10 if save is save_like_vim else 3
    for n in range(times):
        save(watched.path, content(f"v{n}"))
        assert until(lambda n=n: label(watched) == f"v{n}")  # type: ignore[misc]
    assert until(lambda: watched.problem is None)


def test_a_change_is_noticed_and_what_happens_beside_it_is_not(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is often in the same folder, with twenty writes for a delivery."""
    made = TriggersFile(file, ["github"])
    made.LOOK_ANYWAY = 60_000
    reads: list[int] = []
    read = made._read
    monkeypatch.setattr(made, "_read", lambda: reads.append(1) or read())
    made.watch()
    for n in range(20):  # what was written before the watch was up is not told
        save_by_replace(file, content(f"v{n}"))
        if until(lambda n=n: label(made) == f"v{n}", 0.5):  # type: ignore[misc]
            break
    assert label(made) == f"v{n}"
    before = len(reads)
    for n in range(40):
        if n % 4 == 0:  # each after a time that is quiet enough for a look
            file.with_name("queue.db-wal").write_bytes(b"page" * n)
        time.sleep(0.05)
    assert len(reads) <= before + 3, "what the change itself brought"
    made.stop()


def to_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def folder_is_a_file(file: Path) -> None:
    file.unlink()
    file.parent.rmdir()
    file.parent.touch()


def closed(file: Path) -> None:
    file.chmod(0)


@pytest.mark.parametrize("spoil", [Path.unlink, to_itself, folder_is_a_file, closed])
def test_a_file_that_cannot_be_read_is_looked_for_without_a_word(
    spoil: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its problem is shown; a line in the log every other second says no more."""
    file = tmp_path / "conf" / "triggers.json"
    file.parent.mkdir()
    file.write_bytes(content("v0"))
    tries: list[object] = []
    real = watchfiles.watch

    def watch(path: Path, **how: Any) -> Iterator[set[object]]:
        tries.append(path)
        if not file.is_file():
            yield from real(path, **how)
        raise PermissionError(path)

    monkeypatch.setattr(watchfiles, "watch", watch)
    made = TriggersFile(file, ["github"])
    spoil(file)
    if spoil is closed:  # who runs as root reads it all the same
        monkeypatch.setattr(made, "_read", lambda: None)
    made.ABSENT = 10
    made.watch()
    assert until(lambda: len(tries) > 2)
    made.stop()
    assert made.problem
    assert "watch-failed" not in caplog.text


def test_a_swap_of_the_data_link_is_followed(tmp_path: Path) -> None:
    """T49: how a cluster mounts configuration: file -> ..data -> dated folder."""
    conf = tmp_path / "conf"
    for n in range(4):
        (conf / f"..v{n}").mkdir(parents=True)
        (conf / f"..v{n}" / "triggers.json").write_bytes(content(f"v{n}"))
    (conf / "..data").symlink_to("..v0")
    file = conf / "triggers.json"
    file.symlink_to("..data/triggers.json")
    made = TriggersFile(file, ["github"])
    made.watch()
    for n in range(1, 4):
        (conf / "..tmp").symlink_to(f"..v{n}")
        (conf / "..tmp").replace(conf / "..data")
        assert until(lambda n=n: label(made) == f"v{n}")  # type: ignore[misc]
    made.stop()


def test_changes_without_any_notice_are_found_all_the_same(tmp_path: Path) -> None:
    """A link into another directory, or a directory made anew."""
    real = tmp_path / "elsewhere"
    real.mkdir()
    (real / "t.json").write_bytes(content("v0"))
    file = tmp_path / "conf" / "triggers.json"
    file.parent.mkdir()
    file.symlink_to(real / "t.json")
    made = TriggersFile(file, ["github"])
    made.LOOK_ANYWAY = 100
    made.watch()
    (real / "t.json").write_bytes(content("v1"))
    assert until(lambda: label(made) == "v1")
    file.unlink()
    file.parent.rmdir()
    assert until(lambda: made.problem is not None)
    file.parent.mkdir()
    file.write_bytes(content("v2"))
    assert until(lambda: label(made) == "v2")
    made.stop()


BAD = [
    b"",
    b"{",
    b'{"triggers": [{"on": {}}]}',
    b"\xff\xfe",
    content("x").replace(b'"flow"', b'"flwo"'),
]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_edit_keeps_the_last_good_rules_and_says_what_is_wrong(
    file: Path, bad: bytes
) -> None:
    made = TriggersFile(file, ["github"])
    told: list[str | None] = []
    made.watch(told.append)
    made.stop()
    save_by_replace(file, content("good"))
    made.refresh()
    file.write_bytes(bad)
    made.refresh()
    assert label(made) == "good"
    assert made.problem
    assert str(file) in made.problem
    file.write_bytes(content("good"))
    made.refresh()
    assert label(made) == "good"
    assert made.problem is None
    assert [bool(word) for word in told] == [False, False, True, False]


def test_an_absent_file_keeps_the_last_good_rules(file: Path) -> None:
    file.write_bytes(content("good"))
    made = TriggersFile(file, ["github"])
    file.unlink()
    made.refresh()
    assert label(made) == "good"
    assert made.problem
    assert "cannot be read" in made.problem


def test_a_reload_that_names_an_unserved_forge_keeps_the_last_good(file: Path) -> None:
    file.write_bytes(content("good"))
    made = TriggersFile(file, ["github"])
    rules = [rule({"type": "label", "any": ["x"]}, "gitlab")]
    write_rules(file, rules)
    made.refresh()
    assert label(made) == "good"
    assert made.problem
    assert "GITLAB_WEBHOOK_SECRET" in made.problem


@pytest.mark.parametrize("bad", [None, *BAD])
def test_a_file_that_is_bad_or_absent_refuses_to_start(
    file: Path, bad: bytes | None
) -> None:
    if bad is None:
        file.unlink()
    else:
        file.write_bytes(bad)
    with pytest.raises(Faults) as told:
        TriggersFile(file, ["github"])
    assert told.value.exit_code == 2
    assert str(file) in told.value.message


def test_a_rule_for_an_unserved_forge_refuses_to_start_and_names_the_variable(
    file: Path,
) -> None:
    rules = [
        rule({"type": "label", "any": ["x"]}),
        rule({"type": "label", "any": ["x"]}, "gitlab"),
        rule({"type": "label", "any": ["x"]}, "forgejo"),
    ]
    write_rules(file, rules)
    with pytest.raises(Faults) as told:
        TriggersFile(file, [])
    assert [text.split(":")[0] for text in told.value.faults] == [
        "triggers[0].run.kind",
        "triggers[1].run.kind",
        "triggers[2].run.kind",
    ]
    for name in ("WEBHOOK_SECRET", "GITLAB_WEBHOOK_SECRET", "FORGEJO_WEBHOOK_SECRET"):
        assert f"set {name}" in told.value.message
