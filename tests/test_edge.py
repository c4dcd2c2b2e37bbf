"""The edge as a whole, of every forge that is served: what comes in, who may, how soon.

The rows are in edge.py; a class in `_FORGE_CLASSES` without one fails here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from edge import (
    BOT,
    DOORS,
    JSON_TYPE,
    SERVED,
    STAGES,
    Door,
    Headers,
    Rules,
    rules_of,
    stage,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import pidispatch
from pidispatch import FORM_TYPE, Edge, Inbox, Intake, Poller, Store, TriggersFile

PAYLOADS = Path(
    os.environ.get("PIDISPATCH_PAYLOADS")
    or Path(__file__).parent.parent.parent / "shared" / "payloads"
)


def manifest() -> list[dict[str, Any]]:
    file = PAYLOADS / "manifest.json"
    return json.loads(file.read_bytes()) if file.is_file() else []


def until(holds: Any, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(holds())


class Errors(logging.Handler):
    """Everything that was logged as an error of ours."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", {})
        self.found.append(f"{record.getMessage()} {fields} {record.exc_info}")


class House:
    """The real server of some forges, over a real store."""

    def __init__(
        self, root: Path, forges: dict[str, pidispatch.Forge], rules: Rules
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        (root / "triggers.json").write_text(json.dumps({"triggers": rules}))
        self.store = Store(root / "queue.db")
        triggers = TriggersFile(root / "triggers.json", forges)
        self.intake = Intake(forges, triggers, self.store, 0)
        self.inbox = Inbox(self.intake)
        self.edge = Edge(self.intake, "127.0.0.1", 0)
        self.session = requests.Session()
        self.errors = Errors()

    def __enter__(self) -> House:
        pidispatch.log.addHandler(self.errors)
        self.edge.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()
        self.inbox.stop()
        self.edge.stop(patience=0.5)
        self.store.close()
        pidispatch.log.removeHandler(self.errors)

    def post(
        self, path: str, headers: Headers, body: bytes
    ) -> tuple[int, dict[str, Any]]:
        url = f"http://127.0.0.1:{self.edge.port}/{path}"
        typed = {"Content-Type": JSON_TYPE} | headers
        answer = self.session.post(url, body, headers=typed, timeout=10)
        return answer.status_code, answer.json()

    def jobs(self) -> list[str]:
        return [run.id for run in self.store.runs(999)]

    def forget_windows(self) -> None:
        self.store._write(lambda db: db.execute("DELETE FROM windows"))

    def pending(self) -> int:
        caps = pidispatch.Caps(None, None, None, "UTC")
        return self.store.status(caps, 0).pending


@contextlib.contextmanager
def house(door: Door, root: Path, rules: Rules | None = None) -> Iterator[House]:
    forges = door.forges()
    rules = rules_of(door.kind) if rules is None else rules
    with House(root, forges, rules) as made:
        made.intake.own = dict.fromkeys(forges, "nobody")
        yield made


def test_every_served_forge_has_its_row() -> None:
    assert {door.kind for door in SERVED} == set(pidispatch._FORGE_CLASSES)
    assert len({door.name for door in DOORS}) == len(DOORS)
    for door in SERVED:
        assert list(door.forges()) == [door.kind]


# -- every stored real delivery, over HTTP ----------------------------------------


@pytest.fixture(scope="module")
def houses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, House]]:
    """One server for each way in, and one without rules."""
    with contextlib.ExitStack() as stack:
        root = tmp_path_factory.mktemp("houses")
        made = {}
        for door in SERVED:
            made[door.name] = stack.enter_context(house(door, root / door.name))
            bare = house(door, root / f"{door.name}-bare", [])
            made[f"{door.name} without rules"] = stack.enter_context(bare)
        yield made


DELIVERIES = [
    pytest.param(door, row, form, id=f"{door.name}-{row['file']}-{form}")
    for door in SERVED
    for row in manifest()
    for form in (["json", "form"] if door.form else ["json"])
    if row["forge"] == door.kind
]


def packed(
    door: Door, row: dict[str, Any], form: str, guid: str, spoil: bytes = b""
) -> tuple[bytes, bytes, Headers]:
    """The bytes to send, the bytes to sign, and the type they have."""
    body = (PAYLOADS / row["file"]).read_bytes().removeprefix(b"\xef\xbb\xbf")
    body = door.freshen(body, guid).rstrip()
    if form == "form":
        spoil += b"  "  # another body than the JSON: the same one is a replay
    body = body[:-1] + spoil + body[-1:]
    if form == "json":
        return body, body, {"Content-Type": JSON_TYPE}
    assert door.form
    return *door.form(body), {"Content-Type": FORM_TYPE}


@pytest.mark.skipif(not manifest(), reason="the stored real payloads are not here")
@pytest.mark.parametrize(("door", "row", "form"), DELIVERIES)
def test_real_deliveries_get_exact_statuses(
    houses: dict[str, House], door: Door, row: dict[str, Any], form: str
) -> None:
    """T04, T05, T10: right, wrong, missing, tampered, stale; as JSON and as a form."""
    at, guid = houses[door.name], f"{row['file']} {form}"
    at.forget_windows()  # the samples share their targets and times
    before = at.jobs()
    body, signed, sent = packed(door, row, form, guid)
    now = time.time()
    right = sent | door.sign(row, signed, door.secret, guid, now)
    wrong = sent | door.sign(row, signed, door.wrong, guid, now)
    empty = right | dict.fromkeys(door.credentials, "")
    missing = {k: v for k, v in right.items() if k not in door.credentials}
    bad = [(wrong, body), (missing, body), (empty, body)]
    if door.covers_body:
        bad += [(right, packed(door, row, form, guid, b" ")[0]), (right, body[:-1])]
    if door.lives:
        for age in (-400, 400):
            old = door.sign(row, signed, door.secret, guid, now + age)
            bad.append((sent | old, body))
    unsafe = {"status": "error", "reason": "unauthorized"}
    for headers, data in bad:
        assert at.post(door.kind, headers, data) == (401, unsafe)
    assert (at.jobs(), at.errors.found) == (before, [])

    status, answer = at.post(door.kind, right, body)
    assert (status, answer["status"]) == door.expected(row)
    if answer["status"] == "ignored":
        assert answer["reason"] in pidispatch.DROP_REASONS
    again = at.post(door.kind, right, body)
    if status == 202:
        assert again == (200, {"status": "duplicate"})
    else:
        assert again == (status, answer)

    status, answer = houses[f"{door.name} without rules"].post(door.kind, right, body)
    assert (status, answer["status"]) == (200, "ignored")
    assert answer["reason"] in pidispatch.DROP_REASONS
    assert at.errors.found == []


@pytest.mark.parametrize("door", SERVED, ids=lambda door: door.name)
def test_another_forges_door_takes_nothing(
    houses: dict[str, House], door: Door
) -> None:
    """The path chooses the forge, never a header; what is not served is no 401."""
    row = {"event": "ping"}
    headers = door.sign(row, b"{}", door.secret, "d", time.time())
    for kind in ({*pidispatch.FORGES} - {door.kind}) | {"nowhere"}:
        status, answer = houses[door.name].post(kind, headers, b"{}")
        assert (status, answer["reason"]) == (404, "not-found")


# -- whatever comes in ------------------------------------------------------------

LABEL, PHRASE = "only-this-label", "@only-this-phrase"
TEXT = st.text(max_size=12) | st.sampled_from(
    [
        *("labeled", "opened", "created", "closed", "update", "open", "close", "note"),
        *("issue", "merge_request", "label_updated", "submitted", "workitem.updated"),
        *("octo/lamp", "bug; x", "2026-01-02T03:04:05Z", "COLLABORATOR", "OWNER"),
    ]
)
SCALAR = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
KEYS = st.text(max_size=6) | st.sampled_from(
    [
        *("action", "issue", "pull_request", "comment", "review", "label", "labels"),
        *("repository", "sender", "number", "id", "full_name", "name", "user", "body"),
        *("object_kind", "object_attributes", "project", "changes", "iid", "title"),
        *("path_with_namespace", "labels", "current", "previous", "noteable_type"),
        *("resource", "eventType", "resourceContainers", "fields", "revision"),
        *("System.Tags", "newValue", "oldValue", "workItemId", "createdBy", "head"),
        *("updated_at", "author_association", "merge_request", "state", "is_pull"),
    ]
)
VALUE = st.recursive(
    SCALAR,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=7)
    ),
    max_leaves=30,
)
OBJECT = st.dictionaries(KEYS, VALUE, max_size=8)
EVENTS = st.sampled_from(
    [
        *("issues", "issue_comment", "pull_request", "pull_request_review", "ping"),
        *("Issue Hook", "Note Hook", "Merge Request Hook", "Confidential Issue Hook"),
        *("pull_request_comment", "pull_request_approved", "workitem.created", "x"),
    ]
)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, House]]:
    """Rules that nothing below can match: its label and phrase are in no strategy."""
    with contextlib.ExitStack() as stack:
        root = tmp_path_factory.mktemp("strict")
        made = {}
        for door in SERVED:
            rules = [
                rule
                for rule in rules_of(door.kind, LABEL, PHRASE)
                if rule["on"]["type"] in ("label", "comment")
            ]
            name = door.name
            made[name] = stack.enter_context(house(door, root / name, rules))
        yield made


@settings(max_examples=80, deadline=None)
@given(shape=OBJECT, event=EVENTS, n=st.integers(0, 2**32), data=st.data())
def test_no_object_on_any_route_breaks_anything_or_starts_a_job(
    strict: dict[str, House], shape: dict[str, Any], event: str, n: int, data: Any
) -> None:
    door = data.draw(st.sampled_from(SERVED))
    body = json.dumps(shape, ensure_ascii=data.draw(st.booleans())).encode(
        "utf-8", "surrogatepass"
    )
    if door.form and data.draw(st.booleans()):
        body, signed = door.form(body)
        sent = {"Content-Type": FORM_TYPE}
    else:
        signed, sent = body, {"Content-Type": JSON_TYPE}
    headers = sent | door.sign({"event": event}, signed, door.secret, f"{n}", now())
    status, answer = strict[door.name].post(door.kind, headers, body)
    assert status in (200, 400), answer
    assert answer["status"] in ("ignored", "error")
    assert strict[door.name].errors.found == []
    assert strict[door.name].jobs() == []


def now() -> float:
    return time.time()


SPOILT = st.lists(
    st.tuples(st.integers(0, 400), VALUE | st.just("gone")), min_size=1, max_size=6
)


def spoil(value: Any, changes: dict[int, Any], at: list[int]) -> Any:
    """The same shape, with some of its parts replaced or taken out."""
    at[0] += 1
    if at[0] in changes:
        return changes[at[0]]
    if isinstance(value, dict):
        return {key: spoil(part, changes, at) for key, part in value.items()}
    if isinstance(value, list):
        return [spoil(part, changes, at) for part in value]
    return value


REAL = [row for row in manifest() if row["forge"] in pidispatch._FORGE_CLASSES]


@pytest.mark.skipif(not REAL, reason="the stored real payloads are not here")
@settings(max_examples=80, deadline=None)
@given(changes=SPOILT, pick=st.integers(0, 10**6), n=st.integers(0, 2**32))
def test_a_real_delivery_with_spoilt_parts_breaks_nothing(
    strict: dict[str, House], changes: list[tuple[int, Any]], pick: int, n: int
) -> None:
    row = REAL[pick % len(REAL)]
    doors = [door for door in SERVED if door.kind == row["forge"]]
    door = doors[pick % len(doors)]
    shape = json.loads((PAYLOADS / row["file"]).read_bytes())
    body = json.dumps(spoil(shape, dict(changes), [-1])).encode()
    headers = door.sign(row, body, door.secret, f"{n}", now())
    status, answer = strict[door.name].post(door.kind, headers, body)
    assert status in (200, 400), answer
    assert strict[door.name].errors.found == []
    assert strict[door.name].jobs() == []


# -- names ------------------------------------------------------------------------

DOCKER_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{1,127}")
BRANCH = re.compile(r"pi/issue-[1-9][0-9]{0,15}(-r[1-3])?")
FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
WORD = st.text(min_size=1, max_size=90)


def event_of(
    kind: str, repo: str, title: str, label: str, delivery: str, number: int
) -> pidispatch.Event:
    return pidispatch.Event(
        forge=kind,  # type: ignore[arg-type]
        delivery=delivery,
        name="issues",
        kind="label",
        action="labeled",
        repo=repo,
        target=pidispatch.Target("issue", number, title, title),
        actor=pidispatch.Actor("1", title),
        labels=(label,),
        added=(label,),
    )


@settings(deadline=None)
@given(
    kind=st.sampled_from(sorted(pidispatch.FORGES)),
    one=st.tuples(WORD, WORD, WORD, WORD, st.integers(1, 2**53)),
    other=st.tuples(WORD, WORD, WORD, WORD, st.integers(1, 2**53)),
    replicas=st.sampled_from([None, 2, 3]),
)
def test_whatever_things_are_called_names_stay_safe_unique_and_short(
    kind: str,
    one: tuple[str, str, str, str, int],
    other: tuple[str, str, str, str, int],
    replicas: int | None,
) -> None:
    """T28, T30: a repository, title or label in any script reaches no name."""
    run = pidispatch.Run(kind=kind, flow="fix-issue", replicas=replicas)
    engine: dict[str, object] = {}
    mirrors: dict[str, str] = {}
    for repo, title, label, delivery, number in {one, other}:
        event = event_of(kind, repo, title, label, delivery, number)
        on = pidispatch.On(type="label", any=(label,))
        match = pidispatch.Match(pidispatch.Rule(0, on, run), "fix-issue", label)
        mirror = pidispatch.mirror_name(kind, repo)
        assert FILE_NAME.fullmatch(mirror)
        assert mirrors.setdefault(mirror, repo) == repo
        for job in pidispatch.fan_out(match, event):
            assert job.branch and BRANCH.fullmatch(job.branch)
            for name in (
                pidispatch.container_name(job.id),
                pidispatch.network_name(job.id),
                pidispatch.gate_name(job.id),
            ):
                assert DOCKER_NAME.fullmatch(name)
                # a delivery id is one delivery: the two may share it
                owner = (delivery, job.replica)
                assert engine.setdefault(name, owner) == owner


# -- who may ----------------------------------------------------------------------


class Play:
    """A stage with our server before it."""

    def __init__(self, kind: str, root: Path, stack: contextlib.ExitStack) -> None:
        self.kind = kind
        self.stage = stack.enter_context(stage(kind, root / "stage"))
        forges = pidispatch.forges_of(
            pidispatch.load_settings(self.stage.environ, None)
        )
        self.house = stack.enter_context(House(root, forges, self.stage.rules))
        self.house.inbox.TICK = 0.02
        self.house.inbox.start()
        assert self.house.intake.own == {kind: self.stage.own}
        self.sent = 0

    def act(self, what: str, who: str, author: str = "stranger") -> dict[str, Any]:
        self.sent += 1
        headers, body = self.stage.acts[what](who, author, f"d-{self.sent}")
        status, answer = self.house.post(self.kind, headers, body)
        assert status in (200, 202)
        return answer

    def settled(self, seconds: float = 5) -> list[str]:
        """The jobs, when nothing waits any more."""
        assert until(lambda: self.house.pending() == 0, seconds)
        return self.house.jobs()

    def counts(self) -> dict[str, int]:
        caps = pidispatch.Caps(None, None, None, "UTC")
        return self.house.store.status(caps, 0).counts


@pytest.fixture(params=STAGES)
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Play]:
    with contextlib.ExitStack() as stack:
        yield Play(request.param, tmp_path, stack)


def test_every_served_forge_has_its_stage() -> None:
    assert set(STAGES) == set(pidispatch._FORGE_CLASSES)


ACTS = [(kind, act) for kind, row in STAGES.items() for act in row.acts]


@pytest.mark.parametrize(("play", "act"), ACTS, indirect=["play"])
def test_who_may_steer_starts_work_and_a_stranger_does_not(
    play: Play, act: str
) -> None:
    """T24. Both ways round: the actor decides, whoever wrote what is acted on."""
    assert play.act(act, "maintainer", author="stranger")["status"] != "ignored"
    assert len(play.settled()) == 1
    # who is no collaborator labels an item of their own at most, by its form
    play.act(act, "stranger", author="stranger" if act == "label" else "maintainer")
    assert len(play.settled()) == 1
    assert play.counts()["not-allowed"] == 1


UNCLEAR: dict[str, dict[str, Any]] = {
    "it does not answer": {"status": None, "delay": 3.0},
    "it hangs up": {"status": 0},
    "500": {"status": 500},
    "403": {"status": 403},
    "429": {"status": 429},
    "an odd 200": {"status": 200, "message": "surprise"},
}


@pytest.mark.parametrize("case", UNCLEAR)
@pytest.mark.parametrize("who", ["maintainer", "stranger"])
def test_what_cannot_be_told_waits_and_is_decided_when_it_can(
    play: Play, case: str, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T24: pending is not allowed and not denied."""
    monkeypatch.setattr(pidispatch, "API_TIMEOUT", (0.3, 0.3))
    asks = STAGES[play.kind].asks
    act = "close" if "close" in play.stage.acts else "label"
    fault = play.stage.fake.fail_next("*", asks, times=99, **UNCLEAR[case])
    assert play.act(act, who)["status"] == "pending"
    assert until(lambda: fault.times < 99)
    assert (play.house.pending(), play.house.jobs()) == (1, [])
    fault.times = 0
    assert len(play.settled(10)) == (1 if who == "maintainer" else 0)
    assert play.counts().get("not-allowed", 0) == (0 if who == "maintainer" else 1)


def test_a_stranger_in_the_window_swallows_nothing(play: Play) -> None:
    """T24: only who may opens a window."""
    play.act("comment", "stranger")
    assert play.settled() == []
    play.act("comment", "maintainer")
    assert len(play.settled()) == 1
    play.act("comment", "maintainer")
    assert len(play.settled()) == 1
    assert play.counts()["coalesced"] == 1


def test_a_name_that_looks_like_an_app_gains_nothing(play: Play) -> None:
    for act in set(play.stage.acts) - {"label"}:
        play.act(act, BOT)
        assert play.settled() == []


# -- how soon ---------------------------------------------------------------------


def test_an_api_that_hangs_delays_no_acknowledgement(tmp_path: Path) -> None:
    """T07: beside a server whose API is well, in turns, and with a poller that hangs.

    The ratio of the medians is of one run, so a busy machine is busy for both.
    """
    with contextlib.ExitStack() as stack:
        well, hung = (
            Play("github", tmp_path / name, stack) for name in ("well", "hung")
        )
        for play in (well, hung):
            forges = play.house.intake.forges
            assert forges["github"].streams
            repos = (pidispatch.Polled("github", "octo/lamp"),)
            poller = Poller(play.house.intake, repos, 30)
            poller.TICK = 0.05
            stack.callback(poller._stop.set)
            if play is hung:
                play.stage.fake.fail_next("*", ".", status=None, times=9999, delay=30)
            poller.start()
        took: dict[Play, list[float]] = {well: [], hung: []}
        for n in range(120):
            for play in (well, hung):
                act = ("close", "comment", "label")[n % 3]
                headers, body = play.stage.acts[act]("maintainer", "stranger", f"d-{n}")
                began = time.perf_counter()
                status, _ = play.house.post("github", headers, body)
                took[play].append(time.perf_counter() - began)
                assert status in (200, 202)
        assert hung.house.pending() == 40
        ratio = statistics.median(took[hung]) / statistics.median(took[well])
        slowest = sorted(took[hung])[-2]  # the 99th of a hundred
        assert ratio < 2, ratio
        assert slowest < 1, slowest
        assert any(t.name == "poller" for t in threading.enumerate())
