"""Fuzzing of all that reads what others send: deliveries, files, HTTP, boxes.

A case is a text like an HTTP request: a line of words, of which the first names the
target, header lines, an empty line and the body. `TARGETS` says what may come of one;
anything else that is raised, or more than a second of CPU a MiB, is a finding.
test_fuzz.py runs a few thousand cases and every former finding; `just fuzz` is
fuzz_long.py, which goes on for an hour.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import logging
import random
import re
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring, encode_basestring_ascii
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from edge import BOT, JSON_TYPE, SERVED, STAGES, Door, rules_of, stage

import pidispatch
import pidispatch_demo as demo
from pidispatch import (
    FORM_TYPE,
    Asked,
    Edge,
    EdgeLimits,
    Faults,
    Intake,
    Malformed,
    Match,
    Panel,
    Settings,
    Store,
    TriggersFile,
    Unauthorized,
)

#: Of mutated cases, unless told otherwise.
MOST = 64 * 1024
#: Seconds that any case may take, on a busy machine and with coverage counted.
SLACK = 2.0


class Case(NamedTuple):
    """What one target is given."""

    words: tuple[str, ...]
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    def encode(self) -> bytes:
        lines = [" ".join(self.words), *(f"{k}: {v}" for k, v in self.headers)]
        return "\n".join([*lines, "", ""]).encode("latin-1", "replace") + self.body

    @classmethod
    def decode(cls, data: bytes) -> Case:
        head, _, body = data.partition(b"\n\n")
        first, *rest = head.decode("latin-1").split("\n")
        pairs = [line.partition(": ")[::2] for line in rest]
        return cls(tuple(first.split()), tuple((k, v) for k, v in pairs), body)


# -- targets --------------------------------------------------------------------


class Steps:
    """A clock that leaps over every window."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class Silent:
    """The part of an engine that a panel asks."""

    def tail(self, job: str, lines: int) -> list[str]:
        return []


class Heard(logging.Handler):
    """Faults of ours, which a server logs and answers 503."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", {})
        error = fields.get("error")
        told = traceback.format_exception(error) if error is not None else []
        self.found.append(f"{record.getMessage()} {fields} {''.join(told)}")


QUICK = EdgeLimits(
    threads=8, head_seconds=2.0, body_seconds=2.0, linger_seconds=1.0, send_seconds=5.0
)
STATUS = re.compile(rb"HTTP/1\.1 ([1-5][0-9][0-9]) (?:[a-z-]+|Continue)\r\n")


@dataclass
class Targets:
    """Everything that is fuzzed, set up once."""

    root: Path
    heard: Heard = field(default_factory=Heard)
    taken: int = 0

    def __post_init__(self) -> None:
        self.clock = Steps()
        self.doors = {door.name: door for door in SERVED}
        self.forges = {name: door.forges() for name, door in self.doors.items()}
        self.rules = {kind: self._rules(kind) for kind in pidispatch._FORGE_CLASSES}
        self.closing = contextlib.ExitStack()
        self.intakes: dict[str, Intake] = {}
        self._open_store()
        pidispatch.log.addHandler(self.heard)
        pidispatch.log.propagate = False
        self.edge = Edge(self.intakes["github-hmac"], "127.0.0.1", 0, QUICK)
        self.panel = self._panel()
        for server in (self.edge, self.panel):
            server.start()

    def close(self) -> None:
        for server in (self.edge, self.panel):
            server.stop(0.5)
        self.closing.close()
        pidispatch.log.removeHandler(self.heard)

    @staticmethod
    def _rules(kind: str) -> tuple[pidispatch.Rule, ...]:
        rules = rules_of(kind)
        rules[0]["run"] = rules[0]["run"] | {"replicas": 2}
        text = json.dumps({"triggers": rules}).encode()
        return pidispatch.load_triggers(text, "triggers.json")

    def _open_store(self) -> None:
        self.closing.close()
        self.taken = 0
        folder = self.closing.enter_context(
            tempfile.TemporaryDirectory(dir=self.root, ignore_cleanup_errors=True)
        )
        self.store = Store(Path(folder) / "queue.db", self.clock)
        self.closing.callback(self.store.close)
        for name, door in self.doors.items():
            file = self.root / f"{name}.json"
            file.write_text(json.dumps({"triggers": rules_of(door.kind)}))
            forges = self.forges[name]
            triggers = TriggersFile(file, forges)
            intake = Intake(forges, triggers, self.store, 0, self.clock)
            intake.own = dict.fromkeys(forges, "nobody")
            self.intakes[name] = intake

    def _panel(self) -> Panel:
        store = Store(self.root / "panel.db", self.clock)
        triggers = self.intakes["github-hmac"].triggers
        settings = Settings(panel_port=0)
        return Panel(settings, store, triggers, Silent())  # type: ignore[arg-type]

    # --- (a) deliveries

    def sent(self, case: Case) -> tuple[Door, dict[str, str], bytes]:
        """The door, and the request as it would be signed by the forge."""
        door = self.doors[case.words[1]]
        form = door.form if "form" in case.words else None
        body, signed = form(case.body) if form else (case.body, case.body)
        given = dict(case.headers)
        row = {"event": given.pop("event", ""), "event_type": given.pop("type", "")}
        guid = given.pop("guid", "g")
        headers = {"Content-Type": FORM_TYPE if form else JSON_TYPE}
        headers |= door.sign(row, signed, door.secret, guid, time.time())
        lower = {name.lower(): value for name, value in headers.items()}
        return door, lower | given, body

    def judged(self, case: Case) -> None:
        """Verify, parse, match and fan out, without a store."""
        door, headers, body = self.sent(case)
        forge = self.forges[door.name][door.kind]
        try:
            forge.verify(headers, body)
            event = forge.parse(headers, body)
            forge.signed(headers, body)
        except (Unauthorized, Malformed):
            return
        assert event.fault is None or event.fault in pidispatch.DROP_REASONS
        found = pidispatch.judge(self.rules[door.kind], event, "nobody")
        if isinstance(found, Match) and event.fault is None and not event.incomplete:
            assert forge.authority(event) in ("allowed", "denied", "ask")
            for job in pidispatch.fan_out(found, event):
                self._job(job)

    def _job(self, job: pidispatch.Job) -> None:
        """What is made of a job before its box is there."""
        name = pidispatch.container_name(job.id)
        assert re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{1,127}", name)
        if job.branch is not None:
            assert re.fullmatch(r"pi/issue-[1-9][0-9]{0,15}(-r[1-3])?", job.branch)
        pidispatch.prompt_text(job, "host")
        json.loads(pidispatch.event_json(job))

    def delivery(self, case: Case) -> None:
        """All of a delivery, down to rows on disk."""
        self.clock.now += 700
        self.taken += 1
        if self.taken > 2_000:
            self._open_store()
            self.edge.intake = self.intakes["github-hmac"]
        door, headers, body = self.sent(case)
        answer = self.intakes[door.name].receive(door.kind, headers, body)
        assert answer.status in (200, 202, 400, 401), answer
        assert pidispatch.Reply.of(answer).body
        if answer.status == 202:
            while claimed := self.store.claim():
                self._job(claimed.job)
            for row in self.store.due_pending(self.clock.now):
                self.store.settle(row[0].id, "not-allowed")

    # --- (b) files of the operator

    def triggers(self, case: Case) -> None:
        with contextlib.suppress(Faults):
            pidispatch.load_triggers(case.body, "triggers.json", ["acme"])

    def limits(self, case: Case) -> None:
        with contextlib.suppress(Faults):
            pidispatch.load_limits(case.body, "limits.json")

    # --- (c) HTTP

    def http(self, case: Case) -> None:
        """Any bytes get well-formed answers of known statuses."""
        for _status, media, body in converse(self.edge.port, case.body):
            assert media == "application/json"
            json.loads(body)

    def panel_http(self, case: Case) -> None:
        host = f"127.0.0.1:{self.panel.port}".encode()
        data = case.body.replace(b"{host}", host)
        data = data.replace(b"{csrf}", self.panel.csrf.encode())
        converse(self.panel.port, data)

    def panel_form(self, case: Case) -> None:
        """A path, a query and a form that are let in."""
        host = f"127.0.0.1:{self.panel.port}"
        query, _, form = case.body.partition(b"\n")
        path = case.words[2] if len(case.words) > 2 else "/"
        method = case.words[1]
        if method not in self.panel.methods(path):
            return
        form = form.replace(b"{csrf}", self.panel.csrf.encode())
        given = {"host": host, "origin": f"http://{host}"} | dict(case.headers)
        asked = Asked(method, path, query.decode("latin-1"), given, form)
        reply = self.panel.answer(asked)
        assert reply.status in (200, 303, 403, 404), reply

    # --- (d) what comes out of boxes and of comments

    def box(self, case: Case) -> None:
        READERS[case.words[1]](case.body)

    def __call__(self, case: Case) -> None:
        self.heard.found.clear()
        if case.words and case.words[0] in TARGETS:
            TARGETS[case.words[0]](self, case)
        assert not self.heard.found, self.heard.found


TARGETS: Mapping[str, Callable[[Targets, Case], None]] = {
    "judged": Targets.judged,
    "delivery": Targets.delivery,
    "triggers": Targets.triggers,
    "limits": Targets.limits,
    "http": Targets.http,
    "panel-http": Targets.panel_http,
    "panel-form": Targets.panel_form,
    "box": Targets.box,
}


def _text(body: bytes) -> str:
    return body.decode("utf-8", "replace")


def _read_bundle(body: bytes) -> None:
    with contextlib.suppress(pidispatch.BundleRefused):
        tip, needed = pidispatch._bundle_header(io.BytesIO(body))
        assert all(re.fullmatch("[0-9a-f]{40}", name) for name in (tip, *needed))


def _read_transcript(body: bytes) -> None:
    stamp = pidispatch.Stamp("1", "host", 0.0)
    with contextlib.suppress(pidispatch.Unreadable):
        cleaned = pidispatch.clean_transcript(body, stamp)
        again = pidispatch.clean_transcript(cleaned, stamp)
        once, twice = (
            list(map(json.loads, it.splitlines())) for it in (cleaned, again)
        )
        assert once == twice, "cleaning is done once and for all"


def _read_text(body: bytes) -> None:
    made = pidispatch.clean_text(_text(body), 2_000)
    assert "<!-- pidispatch" not in made
    made.encode()


def _read_result(body: bytes) -> None:
    result = pidispatch.result_of(_text(body).split("\n"))
    assert msgspec_holds(result)


def _read_meter(body: bytes) -> None:
    tokens, forks, _spent = pidispatch.meter_of(_text(body).split("\n"))
    assert msgspec_holds(tokens) and msgspec_holds(forks)


def msgspec_holds(value: object) -> bool:
    """Whether a record with this in it can be read back from the store."""
    text = msgspec.json.encode(value)
    return value is None or msgspec.json.decode(text, type=type(value)) == value


def _read_files(body: bytes) -> None:
    """Paths are a box's; the numbers before them are git's."""
    names = _text(body).split("\0")
    listed = "".join(f"{n}\t-\t{name}\0" for n, name in enumerate(names))
    assert [row.path for row in pidispatch.changed_files(listed)] == names
    list(pidispatch.changed_files(listed[: len(listed) // 2]))


def _read_markdown(body: bytes) -> None:
    pidispatch._mentioned("@pi", _text(body), "markdown")


def _read_html(body: bytes) -> None:
    pidispatch._mentioned("@pi", _text(body), "html")
    pidispatch.html_text(_text(body))


READERS: Mapping[str, Callable[[bytes], None]] = {
    "result": _read_result,
    "meter": _read_meter,
    "files": _read_files,
    "text": _read_text,
    "transcript": _read_transcript,
    "bundle": _read_bundle,
    "markdown": _read_markdown,
    "html": _read_html,
}


def converse(port: int, data: bytes) -> list[tuple[int, str, bytes]]:
    """Send, end our side, and read every answer: status, media type, body."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        with sock.makefile("rb") as file:
            answers = list(_answers(file))
    assert answers or data in (b"", b"\r\n"), "no answer at all"
    return answers


def _answers(file: io.BufferedReader) -> Iterator[tuple[int, str, bytes]]:
    while line := file.readline():
        told = STATUS.fullmatch(line)
        assert told, line
        headers: dict[bytes, bytes] = {}
        while (head := file.readline()) != b"\r\n":
            assert head.endswith(b"\r\n"), head
            name, _, value = head[:-2].partition(b": ")
            headers[name.lower()] = value
        status = int(told[1])
        if status == 100:
            continue
        assert status in pidispatch.STATUS_WORDS and status != 503, line
        body = file.read(int(headers[b"content-length"]))
        assert len(body) == int(headers[b"content-length"])
        yield status, headers[b"content-type"].decode(), body


# -- seeds ------------------------------------------------------------------------


def seeds(root: Path, real: Path | None = None) -> list[Case]:
    """Valid cases of every target; `real` is a folder of real deliveries."""
    found = [*_deliveries(root), *(_real(real) if real else ())]
    judged = [case._replace(words=("judged", *case.words[1:])) for case in found]
    return [*judged, *found, *_files(), *_requests(), *_box()]


def _deliveries(root: Path) -> Iterator[Case]:
    for kind in STAGES:
        with stage(kind, root / kind) as played:
            acted = [
                act("maintainer", "maintainer", f"guid-{name}")
                for name, act in played.acts.items()
            ]
            repo = played.fake.repos["octo/lamp"]
            acted += _requests_of(kind, played.fake, repo)
        for headers, body in acted:
            lower = {name.lower(): value for name, value in headers.items()}
            yield from _at_doors(kind, lower, body)


def _requests_of(
    kind: str, fake: demo.FakeForge, repo: demo.Repo
) -> list[tuple[dict[str, str], bytes]]:
    """Deliveries of review requests, and what `Stage` has no act for."""
    head = f"b-{kind}"
    number = repo.open_pull(head, files={"f": "1"}, user="maintainer").number
    text = "@pi review\n\n> quoted `code` <b>html</b> &amp; ünicode 🏳️\u200d🌈"
    if kind == "github":
        opened = demo.pull_request_payload(repo, number, "opened", "maintainer")
        more = demo.comment_payload(repo, number, text, BOT)
        return [
            demo.signed_delivery("pull_request", opened, "s3cret", "g-pr"),
            demo.signed_delivery("issue_comment", more, "s3cret", "g-note"),
        ]
    if kind == "gitlab":
        opened = demo.gitlab_payload(repo, number, "open", "maintainer", request=True)
        more = demo.gitlab_note_payload(repo, number, text, BOT, request=True)
        return [demo.gitlab_delivery(it, "s3cret", "g-pr") for it in (opened, more)]
    if kind == "forgejo":
        opened = demo.forgejo_payload(repo, number, "opened", "maintainer")
        more = demo.forgejo_comment_payload(repo, number, text, BOT)
        told = demo.forgejo_review_payload(repo, number, "approved", text, BOT)
        return [
            demo.forgejo_delivery("pull_request", opened, "s3cret", "g-pr"),
            demo.forgejo_delivery("issue_comment", more, "s3cret", "g-note"),
            demo.forgejo_delivery("pull_request_approved", told, "s3cret", "g-ok"),
        ]
    shape = {
        "subscriptionId": demo.azure_guid("subscription", "x"),
        "notificationId": 3,
        "id": demo.azure_guid("event", "x"),
        "eventType": "git.pullrequest.created",
        "resource": demo.azure_pull(fake.url, repo, repo.pulls[number]),
        "createdDate": "2026-01-02T03:04:05.5Z",
    }
    updated = shape | {"eventType": "git.pullrequest.updated"}
    return [demo.azure_delivery(it, "user:s3cret") for it in (shape, updated)]


def _at_doors(kind: str, headers: Mapping[str, str], body: bytes) -> Iterator[Case]:
    event = next((v for k, v in headers.items() if k.endswith("-event")), "")
    guid = next((v for k, v in headers.items() if k.endswith("-delivery")), "")
    given = (("event", event), ("guid", guid or headers.get("webhook-id", "g")))
    for door in SERVED:
        if door.kind == kind:
            yield Case(("delivery", door.name), given, body)
            if door.form:
                yield Case(("delivery", door.name, "form"), given, body)


def _real(folder: Path) -> Iterator[Case]:
    for row in json.loads((folder / "manifest.json").read_bytes()):
        body = (folder / row["file"]).read_bytes()
        event, type_ = str(row.get("event", "")), str(row.get("event_type") or "")
        for door in SERVED:
            if door.kind == row["forge"] and len(body) < MOST // 4:
                given = (("event", event), ("type", type_), ("guid", row["file"]))
                yield Case(("delivery", door.name), given, body)


def _files() -> Iterator[Case]:
    for kind in pidispatch._FORGE_CLASSES:
        text = json.dumps({"triggers": rules_of(kind)}, indent=1)
        yield Case(("triggers",), (), text.encode())
    every = {name: _example(row) for name, row in pidispatch._RUN.items()}
    ons = {name: _example(row) for name, row in pidispatch._ON.items()}
    run = {"kind": "github", "flow": "fix-issue"}
    cron = {"type": "cron", "id": "a", "pattern": "0 3 * * 1-5", "tz": "Europe/Berlin"}
    local = {"kind": "local", "flow": "tidy", "folder": "/srv/x", "task": "Tidy."}
    label = {"type": "label", "any": ["a"], "none": ["b"], "match": "present"}
    rules = [
        {"on": label, "run": run | {"replicas": 3, "replicaModels": ["acme/a"] * 3}},
        {"on": cron, "run": local | {"allowDirty": True}},
        {"on": {"type": "comment", "phrase": "@pi"}, "run": run | {"resume": True}},
        {"on": ons, "run": every},
    ]
    yield Case(("triggers",), (), json.dumps({"triggers": rules}, indent=1).encode())
    scopes = [{"scope": "github:octo/*", "day": 3, "week": 9, "concurrent": 1}]
    night = {"scope": "*", "from": "22:00", "to": "06:00", "tz": "UTC", "days": ["sat"]}
    text = json.dumps({"scopes": scopes, "pauseWindows": [night]})
    yield Case(("limits",), (), text.encode())


def _example(row: Any) -> Any:
    return {str: "x", int: 2, bool: True}.get(row.kind, ["x"])


def _requests() -> Iterator[Case]:
    body = b'{"zen":"x"}'
    door = next(door for door in SERVED if door.name == "github-hmac")
    signed = door.sign({"event": "ping"}, body, door.secret, "g", 0.0)
    named = signed | {"Content-Type": JSON_TYPE, "Content-Length": str(len(body))}
    lines = [f"{name}: {value}" for name, value in named.items()]
    head = "\r\n".join(["POST /github HTTP/1.1", "Host: pi.example", *lines, "", ""])
    post = head.encode() + body
    health = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
    chunked = post.replace(b"Host: ", b"Transfer-Encoding: chunked\r\nHost: ")
    for data in (post, health, post + health + post, chunked):
        yield Case(("http",), (), data)
    expect = post.replace(b"Host: ", b"Expect: 100-continue\r\nHost: ")
    yield Case(("http",), (), expect)
    top = b"Host: {host}\r\nCookie: pidispatch=x; a=b\r\n"
    for path in (b"/", b"/runs?before=gh-1", b"/triggers/0", b"/runs/gh-1", b"/login"):
        yield Case(
            ("panel-http",), (), b"GET " + path + b" HTTP/1.1\r\n" + top + b"\r\n"
        )
    form = b"csrf={csrf}&token=x"
    filled = form.replace(b"{csrf}", b"0" * 32)
    length = f"Content-Length: {len(filled)}\r\nContent-Type: {FORM_TYPE}\r\n\r\n"
    for path in (b"/pause", b"/resume", b"/runs/gh-1/cancel", b"/logout"):
        start = b"POST " + path + b" HTTP/1.1\r\nOrigin: http://{host}\r\n"
        yield Case(("panel-http",), (), start + top + length.encode() + form)
        yield Case(("panel-form", "POST", path.decode()), (), b"\n" + form)
    for path in ("/", "/runs", "/runs/gh-1", "/triggers/0", "/compare/gh-1"):
        yield Case(("panel-form", "GET", path), (("cookie", "pidispatch=x"),), b"a=b\n")
    yield Case(("panel-form", "GET", "/runs"), (), b"before=gh-1&x=%ff%00\n")


def _box() -> Iterator[Case]:
    def box(name: str, *lines: object) -> Case:
        text = "\n".join(it if isinstance(it, str) else json.dumps(it) for it in lines)
        return Case(("box", name), (), text.encode())

    counts = dict.fromkeys(("input", "output", "cacheRead", "cacheWrite", "total"), 5)
    spent = counts | {"cost": 0.25, "forks": {"a": {"total": 3, "cost": 0.5}}}
    call = {"event": "call", "sum": spent}
    yield box("result", {"event": "start"}, {"event": "exit", "code": 0, "turns": 3})
    yield box("result", {"event": "exit", "code": 2, "reason": "turn-budget"}, "x")
    yield box("meter", {"event": "listening"}, call, {"event": "listening"}, call)
    yield box("meter", call, {"event": "refused", "reason": "budget"})
    yield box("files", "src/a b.py\0tests/test_ü.py\0\t\0=>\0a\tb\nc")
    yield box("text", "Title\r\n\r\nBody <!-- pidispatch:gh-1 -->\n<!-- open\x1b[31m")
    sha, old = "a" * 40, "b" * 40
    header = f"# v2 git bundle\n-{old} text\n{sha} {pidispatch.RESULT_REF}\n\nPACK"
    yield box("bundle", header)
    session = {"type": "session", "version": 3, "id": "a-1", "timestamp": "2026"}
    said = {"role": "user", "content": [{"type": "text", "text": "hi"}], "timestamp": 1}
    first = {"type": "message", "id": "m1", "parentId": None, "timestamp": "x"}
    second = first | {"id": "m2", "parentId": "m1", "message": said | {"role": "x"}}
    third = {"type": "compaction", "id": "c", "parentId": "m2", "summary": "s"}
    third |= {"timestamp": "x", "firstKeptEntryId": "m2", "tokensBefore": 3}
    yield box("transcript", session, first | {"message": said}, second, third)
    note = "Hi\n\n> @pi no\n\n- item `@pi` <code>@pi</code>\n\n| a |\n|---|\n| @pi go |"
    yield box(
        "markdown", note, "```", "@pi", "```", "[@pi](x) \\@pi &#64;pi **@pi** ok"
    )
    yield box("html", "<div>@pi <b>go</b><blockquote>@pi</blockquote>&#64;pi<!-- x -->")


# -- mutation ---------------------------------------------------------------------


class Raw(bytes):
    """JSON, or something like it, as it is to be written."""


class Pairs(list[Any]):
    """An object as its pairs, so that a key may stand twice."""


SNIPPETS = (
    *("@pi", "@pi review", "`", "```\n", "~~~\n", "> ", "<!--", "-->", "<blockquote>"),
    *("</blockquote>", "<pre>", "</code>", "&#64;pi", "&amp;", "&#x110000;", "&#0;"),
    *("[a](", "![", "](<", "**", "__", "*_", "\\", "|", "|-|\n", "* ", "1. ", "    "),
    *("\t", "\n", "\n\n", "\r", "\r\n", "<", "<a ", "<a b='", "<br>", "<x:y>", "www."),
    *("https://", "\0", "\x1b[31m", "\u200b", "\u202e", "\ufeff", "\ufff9", "\ufffc"),
    *("\ud800", "\udfff", "\U0010ffff", "İ", "ß", "ﬁ", "\u0301", "\u2028", "🏳️\u200d🌈"),
    *("[r1/2] ", "$(id)", "'; DROP TABLE jobs;--", "../..", "%00", "%", "[bot]", "/"),
    *("2026-01-02T03:04:05Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59.9999999Z"),
    *("2026-01-02T03:04:05+25:00", "1970-01-01T00:00:00-23:59", "2026-W01-1T00:00Z"),
    *("octo/lamp", "refs/heads/x", "a" * 40, "bug", "bug; x", "OWNER", "labeled"),
    *("٣", "²", "१२", "1_0", " 1", "+1", "x" * 300, "\u0130\u0307", "ᾳ", "e\u0301" * 9),
)
ODD = tuple(
    Raw(text)
    for text in (
        *(b"null", b"true", b"false", b"0", b"-0", b"-1", b"1.5", b"1e5", b"1e999"),
        *(b"-1e999", b"1e-999", b"NaN", b"Infinity", b"-Infinity", b"01", b"0x1"),
        *(b"9007199254740991", b"9007199254740993", b"9223372036854775807"),
        *(b"9223372036854775808", b"18446744073709551616", b"-9223372036854775809"),
        *(b"9" * 400, b"9" * 5_000, b"1." + b"3" * 400, b"1e" + b"9" * 30),
        *(b'""', b"{}", b"[]", b"[[]]", b"[null]", b"[{}]", b'{"":null}', b'"\\u0000"'),
        *(b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\ud83d\\ude00"', b'"\xff"', b'"\\x"'),
        *(b'"\xed\xa0\x80"', b'"\xc0\xaf"', b'"\xf4\x90\x80\x80"', b'"\n"', b"'a'"),
        *(b"[" * 300 + b"]" * 300, b"[" * 9_000, b'{"a":' * 300 + b"1" + b"}" * 300),
        *(b'{"a":' * 5_000, b"[" * 20_000 + b"]" * 20_000, b'"' + b"a" * 9_000 + b'"'),
    )
)
LINES = (
    *(b"Content-Length: 0", b"Content-Length: -1", b"Content-Length: +5"),
    *(b"Content-Length: 5, 5", b"Content-Length: 0x5", b"Content-Length: 1_1"),
    *(b"Content-Length: \xd9\xa3", b"Content-Length: " + b"9" * 30, b"Content-Length:"),
    *(b"Content-Length : 5", b"Content-Length: 5 ", b"Content-Length: 00000011"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", b"TE: trailers"),
    *(b"Transfer-Encoding:\x0bchunked", b"Transfer-Encoding: chunked, identity"),
    *(b"Connection: close", b"Connection: keep-alive, upgrade", b"Upgrade: h2c"),
    *(b"Expect: 100-continue", b"Expect: 999", b" folded", b"\tfolded", b"no colon"),
    *(b": empty", b"X: \0", b"X: \xff", b"X:y", b"X\xff: y", b"A" * 9_000, b"", b"\r"),
    *(b"Host: a", b"Content-Type: " + FORM_TYPE.encode(), b"Content-Type: text/html"),
    *(b"Cookie: " + b"a=b; " * 900, b"Cookie: =;=;;", b"Origin: null", b"Host: [::1"),
    *(
        b"PRI * HTTP/2.0",
        b"GET /healthz HTTP/1.0",
        b"GET /healthz",
        b"OPTIONS * HTTP/1.1",
    ),
    *(b"GET http://a/healthz HTTP/1.1", b"HEAD /healthz HTTP/1.1", b"0\r\n\r\n"),
)
ENCODINGS = ("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "latin-1", "utf-7")


class Mutator:
    """Makes of one case another: structurally where it is JSON, else by bytes."""

    def __init__(self, seeds: Sequence[Case]) -> None:
        self.seeds = seeds
        self.keys, self.values = self._pools(seeds)

    @staticmethod
    def _pools(seeds: Sequence[Case]) -> tuple[list[str], list[Raw]]:
        """The keys and the values that occur: each may turn up elsewhere."""
        keys: dict[str, None] = {}
        values: dict[Raw, None] = {}
        for text in (
            text for case in seeds for text in (case.body, *case.body.split(b"\n"))
        ):
            with contextlib.suppress(ValueError):
                for holder, at in slots(parsed(text)):
                    if isinstance(holder, Pairs):
                        keys[holder[at][0]] = None
                    values[Raw(written(value_at(holder, at), True))] = None
        return list(keys), list(values)

    def any(self, rng: random.Random) -> Case:
        """Each target as often as the next, however many seeds it has."""
        word = rng.choice(sorted({case.words[0] for case in self.seeds}))
        return rng.choice([case for case in self.seeds if case.words[0] == word])

    def __call__(self, case: Case, rng: random.Random, most: int = MOST) -> Case:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            case = self._once(case, rng)
        return case._replace(body=case.body[:most])

    def _once(self, case: Case, rng: random.Random) -> Case:
        if rng.random() < 0.02:
            alike = [it for it in self.seeds if it.words[0] == case.words[0]]
            return rng.choice(alike or self.seeds)
        if case.headers and rng.random() < 0.15:
            return case._replace(headers=self._headers(case.headers, rng))
        return case._replace(body=self._body(case, rng))

    def _body(self, case: Case, rng: random.Random) -> bytes:
        body = case.body
        if case.words[0] in ("http", "panel-http") and rng.random() < 0.7:
            return self._request(case, rng)
        if rng.random() < 0.8:
            lines = body.split(b"\n") if case.words[0] == "box" else [body]
            at = rng.randrange(len(lines))
            with contextlib.suppress(ValueError, RecursionError):
                lines[at] = self._json(lines[at], rng)
                return b"\n".join(lines)
        if rng.random() < 0.5:
            text = body.decode("utf-8", "surrogateescape")
            text = self.text(text, rng)
            return text.encode("utf-8", "surrogatepass" if _lone(text) else "replace")
        return self._bytes(body, rng)

    # --- JSON

    def _json(self, body: bytes, rng: random.Random) -> bytes:
        root = [parsed(body)]
        self._structure(*rng.choice(list(slots(root))), rng)
        made = written(root[0] if root else Raw(b""), rng.random() < 0.3)
        if rng.random() < 0.03:
            return made.decode("utf-8", "replace").encode(
                rng.choice(ENCODINGS), "replace"
            )
        if rng.random() < 0.05:
            return rng.choice((b"\xef\xbb\xbf", b" ", b"\0", b"[")) + made
        return made + (rng.choice((b"x", b"\0", b"{}")) if rng.random() < 0.03 else b"")

    def _structure(self, holder: Any, at: int, rng: random.Random) -> None:
        value = value_at(holder, at)
        kind = rng.randrange(11)
        if kind < 3 and isinstance(value, str):
            put(holder, at, self.text(value, rng))
        elif kind < 4:
            put(holder, at, rng.choice(ODD))
        elif kind < 5:
            put(holder, at, rng.choice(self.values))
        elif kind < 6:
            del holder[at]
        elif kind < 7:
            times = rng.choice((1, 1, 1, 2, 20, 400))
            holder[at:at] = [holder[at]] * (times if len(holder) < 9_000 else 1)
            if isinstance(holder, Pairs) and rng.random() < 0.5:
                put(holder, at, rng.choice(ODD))
        elif kind < 8 and isinstance(holder, Pairs):
            holder[at] = (rng.choice(self.keys), value)
        elif kind < 9:
            put(holder, at, rng.choice(([value], Pairs([("a", value)]), [value] * 9)))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            put(holder, at, rng.choice((-value, value + 1, value * 2**40, str(value))))
        else:
            other = rng.randrange(len(holder))
            holder[at], holder[other] = holder[other], holder[at]

    def text(self, text: str, rng: random.Random) -> str:
        at = rng.randrange(len(text) + 1)
        end = min(len(text), at + rng.choice((1, 2, 8, 40)))
        kind = rng.randrange(6)
        if kind < 3:
            made = "".join(
                rng.choice(SNIPPETS) for _ in range(rng.choice((1, 1, 2, 4)))
            )
            if rng.random() < 0.1:
                made *= min(rng.choice((9, 200, 5_000, 30_000)), 60_000 // len(made))
            return text[:at] + made + text[end if rng.random() < 0.3 else at :]
        if kind < 4:
            part = text[at:end] or "x"
            return text[:at] + part * rng.choice((2, 9, 100, 3_000)) + text[end:]
        if kind < 5:
            return text[:at] + text[end:]
        sign = chr(rng.choice((rng.randrange(128), rng.randrange(0x11_0000))))
        return text[:at] + sign + text[at:]

    # --- bytes

    def _bytes(self, body: bytes, rng: random.Random) -> bytes:
        at = rng.randrange(len(body) + 1)
        end = min(len(body), at + rng.choice((1, 1, 4, 30, 300)))
        kind = rng.randrange(6)
        if kind == 0:
            return body[:at] + rng.randbytes(end - at) + body[end:]
        if kind == 1:
            return body[:at] + body[end:]
        if kind == 2:
            return body[:end] + body[at:end] * rng.choice((1, 9, 300)) + body[end:]
        if kind == 3:
            return body[:at]
        if kind == 4:
            odd = rng.choice((*ODD, *LINES))
            return body[:at] + odd + body[at:]
        other = rng.choice(self.seeds).body
        return body[:at] + other[rng.randrange(len(other) + 1) :]

    def _request(self, case: Case, rng: random.Random) -> bytes:
        lines = case.body.split(b"\r\n")
        at = rng.randrange(len(lines))
        kind = rng.randrange(7)
        if kind == 0:
            lines.insert(at, rng.choice(LINES))
        elif kind == 1:
            lines[at] = rng.choice(LINES)
        elif kind == 2:
            lines[at:at] = [lines[at]] * rng.choice((1, 2, 120))
        elif kind == 3:
            del lines[at]
        elif kind == 4:
            lines[at] = self._bytes(lines[at], rng)
        elif kind == 5:
            ends = (b"\r\n", b"\r\n", b"\n", b"\r", b"\r\r\n", b"\0\r\n")
            return b"".join(line + rng.choice(ends) for line in lines)
        else:
            alike = [it.body for it in self.seeds if it.words == case.words]
            return case.body + rng.choice(alike or [b"\r\n"])
        return b"\r\n".join(lines)

    def _headers(
        self, headers: tuple[tuple[str, str], ...], rng: random.Random
    ) -> tuple[tuple[str, str], ...]:
        """Values as the server lets them through."""
        made = list(headers)
        at = rng.randrange(len(made))
        kind = rng.randrange(4)
        name, value = made[at]
        if kind == 0:
            made[at] = (name, self.text(value, rng))
        elif kind == 1:
            del made[at]
        elif kind == 2:
            made[at] = (name, rng.choice((*SNIPPETS, "9" * 30, "", "\xb2")))
        else:
            media = ("text/json", FORM_TYPE, "application/json; charset=utf-16")
            signs = ("", "x", "sha256=", "v1,", "v1,AA== v1,AA==", "Basic ", "Basic é")
            odd = rng.choice(
                (*media, *signs, base64.b64encode(rng.randbytes(9)).decode())
            )
            made.append((rng.choice(HEADERS), odd))
        clean = [(k, re.sub(r"[^\t -~\x80-\xff]", "?", v)[:8_000]) for k, v in made]
        return tuple((k, v.strip(" \t")) for k, v in clean)


HEADERS = tuple(
    sorted(
        {"content-type", "webhook-id", "webhook-timestamp", "idempotency-key", "guid"}
        | {"x-gitlab-event", "x-forgejo-event", "x-forgejo-event-type", "authorization"}
        | {"x-gitea-event", "x-gitea-delivery", "x-forgejo-delivery", "x-github-event"}
        | {name.lower() for door in SERVED for name in door.credentials}
    )
)


def _lone(text: str) -> bool:
    return re.search("[\ud800-\udfff]", text) is not None


def parsed(body: bytes) -> Any:
    return json.loads(body, object_pairs_hook=Pairs)


def slots(root: Any) -> Iterator[tuple[Any, int]]:
    """Every place that a value stands in: its list or object, and where there."""
    waiting = [root]
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, list):
            for at in range(len(holder)):
                yield holder, at
                waiting.append(value_at(holder, at))


def value_at(holder: Any, at: int) -> Any:
    return holder[at][1] if isinstance(holder, Pairs) else holder[at]


def put(holder: Any, at: int, value: Any) -> None:
    holder[at] = (holder[at][0], value) if isinstance(holder, Pairs) else value


def written(value: Any, escaped: bool) -> bytes:
    if isinstance(value, Raw):
        return value
    if isinstance(value, Pairs):
        pairs = (written(k, escaped) + b":" + written(v, escaped) for k, v in value)
        return b"{" + b",".join(pairs) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(written(it, escaped) for it in value) + b"]"
    if isinstance(value, str):
        quote = encode_basestring_ascii if escaped else encode_basestring
        return quote(value).encode("utf-8", "surrogatepass")
    return json.dumps(value).encode()


# -- running ----------------------------------------------------------------------


class Slow(Exception):
    """A case took more time than its length allows."""


def run(targets: Targets, case: Case) -> None:
    """One case: raises whatever it should not have."""
    begun = time.process_time()
    targets(case)
    spent = time.process_time() - begun
    if spent > SLACK + len(case.body) / 2**20:
        raise Slow(f"{spent:.2f} s for {len(case.body)} bytes")


class Findings:
    """Cases that ended wrongly, one file for each way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.seen: dict[str, int] = {}

    def note(self, case: Case, error: BaseException) -> None:
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        where = [f"{Path(f.filename).name}:{f.lineno}" for f in frames]
        said = str(error) if isinstance(error, AssertionError) else ""
        said = re.sub(r"\d+", "", said)[-200:]
        key = " ".join((*case.words[:2], type(error).__name__, *where, said))
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.seen[key] > 1:
            return
        name = hashlib.sha256(case.encode()).hexdigest()[:12]
        (self.folder / f"{name}.case").write_bytes(case.encode())
        told = "".join(traceback.format_exception(error))[-3_000:]
        (self.folder / f"{name}.txt").write_text(f"{key}\n{told}", errors="replace")
        print(f"finding {name}: {key}\n{told}", file=sys.stderr, flush=True)


@dataclass
class Fuzzer:
    """Runs cases, counts them and keeps what is found."""

    targets: Targets
    findings: Findings
    mutator: Mutator
    begun: float = field(default_factory=time.monotonic)
    told: float = 0.0
    count: int = 0

    def one(self, data: bytes) -> None:
        case = Case.decode(data)
        self.count += 1
        try:
            run(self.targets, case)
        except Exception as error:
            self.findings.note(case, error)
        if time.monotonic() - self.told > 60:
            self.told = time.monotonic()
            self.tell()

    def mutate(self, data: bytes, most: int, seed: int) -> bytes:
        case = Case.decode(data)
        if not case.words or case.words[0] not in TARGETS:
            case = random.Random(seed).choice(self.mutator.seeds)
        return self.mutator(case, random.Random(seed)).encode()[:most]

    def tell(self) -> None:
        spent = time.monotonic() - self.begun
        rate = self.count / max(spent, 0.001)
        found = sum(self.findings.seen.values())
        print(
            f"fuzz: {self.count} cases in {spent:.0f} s ({rate:.0f}/s), "
            f"{len(self.findings.seen)} kinds of finding, {found} in all",
            file=sys.stderr,
            flush=True,
        )
