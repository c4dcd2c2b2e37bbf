"""The money: what is reserved, kept and given back, by whom, and in which window."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from conftest import ROOT, FakeClock, Maker, record_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import pidispatch
from pidispatch import Caps, Limits, Over, ScopeRow, Store, Tokens

NONE = Caps(None, None, None, "UTC")


def caps_of(**fields: Any) -> Caps:
    return msgspec.structs.replace(NONE, **fields)


def scoped(**row: Any) -> Limits:
    return Limits((ScopeRow(**{"scope": "github:octo/*", **row}),))


def claimed(store: Store, limits: Limits = pidispatch.NO_LIMITS) -> pidispatch.Claimed:
    found = store.claim(limits)
    assert found is not None
    return found


def word(over: Over | None) -> str | None:
    return over.reason if over else None


def used(store: Store, caps: Caps, cap: str) -> int:
    return next(
        m.used for m in store.meters(caps, store.clock()) if m.cap.startswith(cap)
    )


def tokens_used(store: Store) -> int:
    return used(store, NONE, "PI_DAILY_TOKEN_CAP")


def issues(store: Store, maker: Maker, n: int) -> None:
    for number in range(n):
        maker.admit(store, target=pidispatch.Target("issue", number + 1))


# -- many at once ------------------------------------------------------------------

#: What other processes do meanwhile, again and again.
OTHERS = {
    "pause": "outside.pause(); outside.resume()",
    "cancel": "[outside.cancel(run.id) for run in outside.runs(2)]",
    "list": "outside.runs(99); outside.status(caps, 0)",
}
_OTHER = """
import pathlib, sys, time
sys.path.insert(0, {root!r})
import pidispatch
outside = pidispatch.Outside(pathlib.Path({db!r}))
caps = pidispatch.Caps(1, 1, 1, "UTC")
print("up", flush=True)
while not pathlib.Path({stop!r}).exists():
    {what}
    time.sleep(0.002)
"""


@contextmanager
def others_at_work(db: Path) -> Iterator[None]:
    stop = db.with_name("stop")
    with ExitStack() as stack:
        children = []
        for what in OTHERS.values():
            script = _OTHER.format(
                root=str(ROOT), db=str(db), stop=str(stop), what=what
            )
            argv = [sys.executable, "-c", script]
            child = subprocess.Popen(argv, stdout=subprocess.PIPE)
            children.append(stack.enter_context(child))
        for child in children:
            assert child.stdout and child.stdout.readline() == b"up\n"
        try:
            yield
        finally:
            stop.touch()
        assert [child.wait(30) for child in children] == [0] * len(children)


def race(n: int, run: Callable[[], None]) -> None:
    threads = [threading.Thread(target=run) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


#: A cap with room for five, what each job reserves of tokens, the refusal.
FIVE: dict[str, tuple[Caps, int | None, str]] = {
    "day": (caps_of(day=5), None, "over-budget"),
    "week": (caps_of(week=5), None, "over-budget"),
    "month": (caps_of(month=5), None, "over-budget"),
    "scope": (caps_of(limits=scoped(day=5)), None, "scope-cap"),
    "tokens": (caps_of(tokens=5_999), 1_000, "daily-token-cap"),
    "hold": (caps_of(day=11, hold_pct=50), None, "soft-hold"),
}


@pytest.mark.parametrize("cap", FIVE)
def test_twenty_claims_race_for_five_slots_among_other_processes(
    tmp_path: Path, maker: Maker, cap: str
) -> None:
    """T51: threads of one worker, while others pause, cancel and list."""
    caps, tokens, refusal = FIVE[cap]
    store = Store(tmp_path / "q.db")
    maker.clock.now = store.clock()
    issues(store, maker, 20)
    answers: list[str | None] = []
    gun = threading.Barrier(20)

    def one() -> None:
        mine = None
        while mine is None:  # another process has just paused
            mine = store.claim()
        gun.wait(30)
        answers.append(word(store.start(mine, caps, tokens)))

    with others_at_work(store.path):
        race(20, one)
    assert sorted(answers, key=str) == sorted([None] * 5 + [refusal] * 15, key=str)
    assert used(store, caps, "PI_DAILY_CAP") == 5, "a refused job uses nothing"
    assert tokens_used(store) == 5 * (tokens or 0)
    store.close()


def test_twenty_claims_race_for_a_scope_that_takes_five_at_once(
    store: Store, maker: Maker
) -> None:
    """T51: those over it stay queued, and one follows each that ends."""
    limits = scoped(concurrent=5)
    issues(store, maker, 20)
    found: list[pidispatch.Claimed | None] = []
    race(20, lambda: found.append(store.claim(limits)))
    at_work = [job for job in found if job]
    assert len(at_work) == 5
    caps = caps_of(limits=limits)
    for job in at_work:
        assert store.start(job, caps) is None
    assert store.claim(limits) is None
    status = store.status(caps, store.clock())
    assert status.holds == [pidispatch.Hold("github:octo/*", "concurrent", None, 15)]
    assert "as many at work as may be; 15 wait" in pidispatch.status_text(status)
    maker.admit(store, repo="other/free")
    assert claimed(store, limits).job.repo == "other/free", "others pass"
    store.finish(at_work[0], record_of(at_work[0]), None)
    assert claimed(store, limits).job.target.number == 6, "in its turn"
    assert store.claim(limits) is None


def test_a_scope_counts_what_is_its_own_and_names_itself(
    store: Store, maker: Maker
) -> None:
    caps = caps_of(limits=scoped(scope="github:octo/spoon", day=1))
    maker.admit(store, repo="octo/fork")
    maker.admit(store, 2, repo="Octo/Spoon")
    other, first, second = (claimed(store) for _ in range(3))
    assert store.start(other, caps) is None
    assert store.start(first, caps) is None
    over = store.start(second, caps)
    assert over and over.reason == "scope-cap"
    assert over.meter.cap == "day of the scope github:octo/spoon in limits.json"
    assert (over.meter.used, over.meter.limit) == (1, 1)
    assert store.peek_caps(caps, second.job.place) == over
    assert store.peek_caps(caps, other.job.place) is None


def test_the_ladder_asks_tokens_then_scopes_then_the_whole_then_holds(
    store: Store, maker: Maker
) -> None:
    full = Caps(1, 1, 1, "UTC", 50, 1, scoped(day=1))
    maker.admit(store)
    store.start(claimed(store), NONE, 1)
    asked = []
    for lifted in (
        {"tokens": None},
        {"limits": scoped(day=2)},
        {"day": 2},
        {"week": 2},
    ):
        over = store.peek_caps(full, "github:octo/spoon", 1)
        assert over
        asked.append((over.reason, over.meter.span))
        full = msgspec.structs.replace(full, **lifted)
    over = store.peek_caps(
        msgspec.structs.replace(full, month=None), "github:octo/x", 1
    )
    assert over and over.reason == "soft-hold", "a hold never hides a spent cap"
    assert asked == [
        ("daily-token-cap", "day"),
        ("scope-cap", "day"),
        ("over-budget", "day"),
        ("over-budget", "week"),
    ]


# -- tokens ------------------------------------------------------------------------


def test_reserved_tokens_are_replaced_by_the_gates_figure(
    store: Store, maker: Maker
) -> None:
    issues(store, maker, 4)
    caps = caps_of(tokens=3_000)
    jobs = [claimed(store) for _ in range(4)]
    ended, idle, lost, never = jobs
    for job in jobs[:3]:
        assert store.start(job, caps, 1_000) is None
        store.running(job)
    assert word(store.start(never, caps, 1_000)) == "daily-token-cap"
    assert tokens_used(store) == 3_000
    store.finish(ended, record_of(ended, tokens=Tokens(total=120)), None)
    assert tokens_used(store) == 2_120
    store.finish(idle, record_of(idle, tokens=None), None, Tokens())
    assert tokens_used(store) == 1_120, "a run without a call has used none"
    store.finish(lost, record_of(lost, tokens=None), None)
    assert tokens_used(store) == 1_120, "what nobody can count stays reserved"
    assert store.start(never, caps, 1_000) is None
    store.release(never)
    assert tokens_used(store) == 1_120, "a container that never started used none"


def test_each_attempt_is_booked_by_itself(
    store: Store, maker: Maker, clock: FakeClock
) -> None:
    maker.admit(store)
    first = claimed(store)
    store.start(first, NONE, 1_000)
    store.running(first)
    store.retry(first, clock(), Tokens(total=300))
    second = claimed(store)
    assert store.start(second, NONE, 1_000) is None
    assert tokens_used(store) == 1_300
    store.finish(second, record_of(second, tokens=Tokens(total=1_500)), None)
    assert tokens_used(store) == 1_800, "calls in flight may pass a job's budget"


def test_a_job_without_a_budget_starts_while_a_token_is_left(
    store: Store, maker: Maker
) -> None:
    caps = caps_of(tokens=100)
    issues(store, maker, 3)
    first, second, third = (claimed(store) for _ in range(3))
    assert store.start(first, caps) is None
    assert store.start(second, caps) is None, "nothing is reserved"
    store.finish(first, record_of(first, tokens=Tokens(total=100)), None)
    assert word(store.start(third, caps)) == "daily-token-cap"


# -- crashes -----------------------------------------------------------------------


def test_a_kill_after_the_reservation_neither_leaks_nor_refunds_twice(
    tmp_path: Path, maker: Maker, clock: FakeClock
) -> None:
    """T51, with a real process that dies at once."""
    store = Store(tmp_path / "q.db", clock)
    maker.admit(store, 2)
    store.close()
    script = f"""
import os, pathlib, sys
sys.path.insert(0, {str(ROOT)!r})
import pidispatch
store = pidispatch.Store(pathlib.Path({str(store.path)!r}), lambda: {clock()})
caps = pidispatch.Caps(2, None, None, "UTC")
first, second = store.claim(), store.claim()
assert store.start(first, caps, 700) is None and store.start(second, caps, 700) is None
store.running(second)
os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60)
    assert done.returncode == 9
    for _ in range(2):  # the next start, and one more that finds nothing to do
        store = Store(tmp_path / "q.db", clock)
        for job, state, _ in store.unfinished():
            if state == "running":
                store.finish(job, record_of(job, tokens=None), None)
            else:
                store.requeue(job)
        assert used(store, NONE, "PI_DAILY_CAP") == 1
        assert tokens_used(store) == 700, "of a run that nobody saw the end of"
        again = store.claim()
        store.close()
    assert again and again.attempt == 0


class Ledger(RuleBasedStateMachine):
    """Any order of reserve, crash, release, retry and keep, against a plain model.

    The model knows for each job what it holds: tokens reserved while it is at
    work, and the figures of the attempts that were kept.
    """

    SLOTS, TOKENS, BUDGET = 3, 2_500, 1_000

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = FakeClock()
        self.maker = Maker(self.clock)
        self.caps = caps_of(day=self.SLOTS, tokens=self.TOKENS)
        self.store = Store(Path(self.folder.name) / "q.db", self.clock)
        self.kept: list[int] = []
        self.claims: list[pidispatch.Claimed] = []
        self.starting: list[pidispatch.Claimed] = []
        self.running: list[pidispatch.Claimed] = []
        self.over: list[pidispatch.Claimed] = []

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @property
    def held(self) -> int:
        return len(self.starting) + len(self.running)

    @rule()
    def claim(self) -> None:
        target = pidispatch.Target("issue", self.maker.count + 1)
        self.maker.admit(self.store, target=target)
        self.claims.append(claimed(self.store))

    @rule()
    def reserve(self) -> None:
        if not self.claims:
            self.claim()
        job = self.claims.pop()
        slots = len(self.kept) + self.held < self.SLOTS
        spent = sum(self.kept) + self.BUDGET * (self.held + 1)
        over = self.store.start(job, self.caps, self.BUDGET)
        expected = None if slots else "over-budget"
        assert word(over) == ("daily-token-cap" if spent > self.TOKENS else expected)
        if over:
            refused = record_of(job, outcome="policy", reason=over.reason, tokens=None)
            self.store.refuse(job, refused, None)
        else:
            self.starting.append(job)

    @precondition(lambda self: self.starting)
    @rule()
    def run(self) -> None:
        job = self.starting.pop()
        self.store.running(job)
        self.running.append(job)

    @precondition(lambda self: self.starting or self.running)
    @rule()
    def release(self) -> None:
        """Also of a container that started with nothing to run in it (exit 127)."""
        job = (self.starting or self.running).pop()
        self.store.release(job)
        self.claims.append(job)

    @precondition(lambda self: self.running)
    @rule(figure=st.none() | st.integers(0, 2_000))
    def end(self, figure: int | None) -> None:
        job = self.running.pop()
        tokens = None if figure is None else Tokens(total=figure)
        self.store.finish(job, record_of(job, tokens=tokens), None)
        self.kept.append(self.BUDGET if figure is None else figure)
        self.over.append(job)

    @precondition(lambda self: self.running)
    @rule(figure=st.integers(0, 2_000))
    def retry(self, figure: int) -> None:
        job = self.running.pop()
        self.store.retry(job, self.clock(), Tokens(total=figure))
        self.kept.append(figure)
        self.over.append(job)

    @rule()
    def crash(self) -> None:
        """Nothing in hand survives; the next start reconciles by the rows alone."""
        self.store.close()
        self.store = Store(self.store.path, self.clock)
        for job, state, _ in self.store.unfinished():
            if state == "running":
                self.store.finish(job, record_of(job, tokens=None), None)
            else:
                self.store.requeue(job)
        self.kept += [self.BUDGET] * len(self.running)
        self.claims, self.starting, self.running = [], [], []

    @precondition(lambda self: self.over)
    @rule()
    def late_writes(self) -> None:
        """T51: what is over cannot be given back, whoever tries."""
        for late in (self.store.release, self.store.running):
            with pytest.raises(pidispatch.Fenced):
                late(self.over[-1])

    @invariant()
    def the_ledger_is_the_model(self) -> None:
        slots = used(self.store, self.caps, "PI_DAILY_CAP")
        assert slots == len(self.kept) + self.held <= self.SLOTS
        assert tokens_used(self.store) == sum(self.kept) + self.BUDGET * self.held


TestLedger = Ledger.TestCase
TestLedger.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


# -- windows -----------------------------------------------------------------------

#: A window of each kind by its first and last second and the first of the next,
#: in the zone's wall clock: plain ends, and both days on which clocks change.
WINDOWS: list[tuple[str, str, str, str, str]] = [
    ("day", "UTC", "2026-06-10", "2026-06-10", "2026-06-11"),
    ("day", "Europe/Berlin", "2026-03-29", "2026-03-29", "2026-03-30"),
    ("day", "Europe/Berlin", "2026-10-25", "2026-10-25", "2026-10-26"),
    ("day", "America/New_York", "2026-03-08", "2026-03-08", "2026-03-09"),
    ("day", "America/New_York", "2026-11-01", "2026-11-01", "2026-11-02"),
    ("day", "Asia/Kathmandu", "2026-12-31", "2026-12-31", "2027-01-01"),
    ("week", "UTC", "2026-06-08", "2026-06-14", "2026-06-15"),
    ("week", "Europe/Berlin", "2026-03-23", "2026-03-29", "2026-03-30"),
    ("week", "Europe/Berlin", "2026-12-28", "2027-01-03", "2027-01-04"),
    ("month", "UTC", "2026-02-01", "2026-02-28", "2026-03-01"),
    ("month", "Europe/Berlin", "2026-10-01", "2026-10-31", "2026-11-01"),
    ("month", "America/New_York", "2026-12-01", "2026-12-31", "2027-01-01"),
]


@pytest.mark.parametrize(
    ("span", "zone", "first", "last", "following", "cap"),
    [
        (*row, cap)
        for row in WINDOWS
        for cap in ("global", "scope", "tokens")
        if cap != "tokens" or row[0] == "day"  # tokens have no other window
    ],
)
def test_a_window_is_one_from_its_first_second_to_2359_59(
    store: Store,
    maker: Maker,
    clock: FakeClock,
    span: str,
    zone: str,
    first: str,
    last: str,
    following: str,
    cap: str,
) -> None:
    """T51."""

    def at(day: str, hour: str) -> float:
        when = datetime.fromisoformat(f"{day}T{hour}").replace(tzinfo=ZoneInfo(zone))
        return when.timestamp()

    tokens = 10 if cap == "tokens" else None
    span_caps = {
        "global": caps_of(**{span: 1}),
        "scope": caps_of(limits=scoped(**{span: 1})),
        "tokens": caps_of(tokens=19),
    }[cap]
    caps = msgspec.structs.replace(span_caps, zone=zone)
    clock.now = at(first, "00:00:00")
    issues(store, maker, 3)
    one, two, three = (claimed(store) for _ in range(3))
    assert store.start(one, caps, tokens) is None
    clock.now = at(last, "23:59:59")
    over = store.start(two, caps, tokens)
    assert over and over.meter.ends == at(following, "00:00:00")
    clock.now = at(following, "00:00:00")
    assert store.start(two, caps, tokens) is None
    clock.pass_(-1)  # a clock that steps back over the end refills nothing
    assert store.start(three, caps, tokens)
    clock.pass_(-86_400)
    assert store.start(three, caps, tokens)


ZONES = sorted(pidispatch._zones())


@given(st.sampled_from(ZONES), st.floats(0, 4e9), st.sampled_from(pidispatch.SPANS))
@settings(deadline=None)
def test_every_moment_of_every_zone_lies_in_one_window_and_windows_abut(
    zone: str, now: float, span: pidispatch.Span
) -> None:
    """Also where midnight is left out or comes twice."""
    start, end = pidispatch.window_of(now, zone, span)
    assert start <= now < end
    assert pidispatch.window_of(start, zone, span) == (start, end)
    assert pidispatch.window_of(end, zone, span)[0] == end


def test_the_first_hour_of_a_month_with_a_clock_change_still_counts_in_its_last(
    store: Store, maker: Maker, clock: FakeClock
) -> None:
    """October has 31 days and an hour in Europe; ids are kept 31 days."""
    zone = ZoneInfo("Europe/Berlin")
    caps = Caps(None, None, 1, "Europe/Berlin")
    clock.now = datetime(2026, 10, 1, 0, 10, tzinfo=zone).timestamp()
    maker.admit(store)
    job = claimed(store)
    assert store.start(job, caps) is None
    store.finish(job, record_of(job), None)
    clock.now = datetime(2026, 10, 31, 23, 50, tzinfo=zone).timestamp()
    store.sweep()
    assert word(store.peek_caps(caps, job.job.place)) == "over-budget"


# -- what is said -------------------------------------------------------------------


def test_status_shows_every_window_the_tokens_the_scopes_and_what_is_spent(
    store: Store, maker: Maker, clock: FakeClock
) -> None:
    clock.now = datetime(2026, 6, 10, 12, tzinfo=UTC).timestamp()
    caps = Caps(2, 9, None, "UTC", 10, 5_000, scoped(scope="github", day=1))
    maker.admit(store)
    assert store.start(claimed(store), NONE, 1_000) is None
    store.set_limits(caps.limits, "limits.json: scopes[0]: worse")
    assert store.limits() == caps.limits
    lines = pidispatch.status_text(store.status(caps, clock())).split("\n")
    end = "2026-06-11T00:00:00.000Z"
    for line in (
        "today: 1000 of 5000 tokens used (PI_DAILY_TOKEN_CAP)",
        "today: 1 of 1 slots used (day of the scope github in limits.json);"
        f" SPENT until {end}",
        f"today: 1 of 2 slots used (PI_DAILY_CAP); HELD from 0 on until {end}",
        "this week: 1 of 9 slots used (PI_WEEKLY_CAP); HELD from 0 on until"
        " 2026-06-15T00:00:00.000Z",
        "this month: 1 slots used (no PI_MONTHLY_CAP)",
        "limits file: limits.json: scopes[0]: worse",
    ):
        assert line in lines, (line, lines)


def test_a_file_of_the_first_schema_gets_the_places_of_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maker: Maker, clock: FakeClock
) -> None:
    path = tmp_path / "q.db"
    with monkeypatch.context() as patch:
        patch.setattr(pidispatch, "_MIGRATIONS", pidispatch._MIGRATIONS[:1])
        Store(path, clock).close()
    [job] = maker.jobs(maker.event(repo="Octo/Spoon"))
    db = sqlite3.connect(path)
    payload = msgspec.json.encode(job).decode()
    insert = "INSERT INTO jobs (id, set_id, state, payload, queued_at)"
    db.execute(f"{insert} VALUES (?, 's', 'queued', ?, 0)", (job.id, payload))
    insert = "INSERT INTO ledger (job_id, attempt, reserved_at, state)"
    for name in (job.id, "forgotten"):
        db.execute(f"{insert} VALUES (?, 1, ?, 'kept')", (name, clock()))
    db.commit()
    db.close()
    store = Store(path, clock)
    caps = Caps(9, None, None, "UTC", limits=scoped(day=9))
    assert used(store, caps, "PI_DAILY_CAP") == 2, "also one whose job is gone"
    assert used(store, caps, "day of the scope") == 1
    assert store.claim(scoped(concurrent=1)) is not None
    assert store.status(caps, clock()).holds == []
    store.close()
