"""Cron: what is due when, and that each due time starts one run and no more."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import FakeClock, record_of
from hypothesis import given, settings
from hypothesis import strategies as st

import pidispatch
from pidispatch import On, Rule, Run

BERLIN = "Europe/Berlin"
CAPS = pidispatch.Caps(25, None, None, "UTC")


def at(text: str) -> float:
    """UTC, such as `2026-03-29 01:00`, as unix seconds."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def cron(pattern: str, tz: str | None = None, name: str = "tidy", **run: Any) -> Rule:
    on = On(type="cron", id=name, pattern=pattern, tz=tz)
    given = {"folder": "/srv/notes", "task": "Tidy up.", "flow": "task", **run}
    return Rule(0, on, Run(kind="local", **given))


class Bench:
    """A Cron on a real store, whose rules and time a test owns."""

    def __init__(self, store: pidispatch.Store, clock: FakeClock) -> None:
        self.store, self.clock = store, clock
        self.rules: tuple[Rule, ...] = ()
        self.again()

    def again(self) -> None:
        """As after a restart: nothing but the store remembers."""
        self.cron = pidispatch.Cron(self.store, lambda: self.rules, self.clock)

    def begin(self, when: str, *rules: Rule) -> None:
        self.clock.now, self.rules = at(when), rules
        self.cron.turn()

    def until(self, when: str, step: float = 600) -> list[str]:
        """Turn every `step` seconds; the due times that were fired, in UTC."""
        while self.clock.now < at(when):
            self.clock.pass_(step)
            self.cron.turn()
            self.work()
        return self.fired()

    def work(self) -> None:
        """Jobs end at once, so that none waits."""
        while claimed := self.store.claim():
            assert (
                self.store.start(claimed, pidispatch.Caps(None, None, None, "UTC"))
                is None
            )
            self.store.finish(claimed, record_of(claimed), None)

    def fired(self) -> list[str]:
        times = (int(run.id.rpartition("-")[2]) for run in self.store.runs(999))
        return sorted(f"{datetime.fromtimestamp(t, UTC):%m-%d %H:%M}" for t in times)


@pytest.fixture
def bench(store: pidispatch.Store, clock: FakeClock) -> Bench:
    return Bench(store, clock)


def test_a_rule_that_cannot_be_fired_holds_up_no_other(bench: Bench) -> None:
    bad = cron("* * * * *", name="bad", folder="\0")
    bench.begin("2026-03-01 00:00", bad, cron("* * * * *"))
    assert bench.until("2026-03-01 00:02", 60) == ["03-01 00:01", "03-01 00:02"]


# -- show 6: clock changes, missed ticks, no replicas ---------------------------


@pytest.mark.parametrize(
    ("begin", "end", "due"),
    [
        # clocks go forward at 02:00 on 29 March: 02:30 does not exist, 03:00 does
        ("2026-03-28 12:00", "2026-03-30 12:00", ["03-29 01:00", "03-30 00:30"]),
        # clocks go back at 03:00 on 25 October: 02:30 comes twice
        ("2026-10-24 12:00", "2026-10-26 12:00", ["10-25 00:30", "10-26 01:30"]),
    ],
)
@pytest.mark.parametrize("step", [37, 600, 5400])
def test_half_past_two_daily_fires_once_on_each_clock_change_day(
    bench: Bench, begin: str, end: str, due: list[str], step: float
) -> None:
    bench.begin(begin, cron("30 2 * * *", BERLIN))
    assert bench.until(end, step) == due


def test_it_fires_once_also_when_every_turn_is_a_restart(bench: Bench) -> None:
    bench.begin("2026-10-24 23:00", cron("30 2 * * *", BERLIN))
    while bench.clock.now < at("2026-10-25 04:00"):
        bench.clock.pass_(300)
        bench.again()
        bench.cron.turn()
        bench.work()
    assert bench.fired() == ["10-25 00:30"]


def test_ten_missed_ticks_make_one_run(bench: Bench) -> None:
    bench.begin("2026-01-05 00:00", cron("0 * * * *"))
    bench.again()
    bench.clock.now = at("2026-01-05 10:30")
    bench.cron.turn()
    bench.cron.turn()
    assert bench.fired() == ["01-05 10:00"], "the latest of the ten"
    bench.work()
    assert bench.until("2026-01-05 11:10") == ["01-05 10:00", "01-05 11:00"]


def test_a_month_of_missed_seconds_is_one_run_and_no_long_search(bench: Bench) -> None:
    bench.begin("2026-01-01 00:00", cron("* * * * * *"))
    bench.clock.now = at("2026-01-31 00:00:05")
    bench.cron.turn()
    assert [run.id for run in bench.store.runs(9)] == [
        f"cron-tidy-{int(at('2026-01-31 00:00:05'))}"
    ]


def test_a_cron_rule_never_makes_replicas(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").write_text("ref: refs/heads/main\n")
    run = {"kind": "local", "flow": "task", "folder": str(tmp_path), "task": "x"}
    on = {"type": "cron", "id": "n", "pattern": "0 3 * * *"}
    for n in (1, 2, 3, "2", True):
        text = pidispatch.json.dumps(
            {"triggers": [{"on": on, "run": {**run, "replicas": n}}]}
        )
        with pytest.raises(pidispatch.Faults, match="two replicas would edit one tree"):
            pidispatch.load_triggers(text.encode(), "f")
    # not even a rule that got past the loader
    job = pidispatch.cron_job(cron("0 3 * * *", replicas=3), 1_800_000_000)
    assert (job.id, job.set) == ("cron-tidy-1800000000", "cron-tidy-1800000000")
    assert job.replica is None and job.replicas is None and job.branch is None
    bench.begin("2026-01-05 00:00", cron("0 3 * * *", replicas=3))
    assert bench.until("2026-01-06 00:00") == ["01-05 03:00"]


# -- what is remembered ---------------------------------------------------------


def test_a_new_rule_begins_now_and_owes_nothing(bench: Bench) -> None:
    bench.begin("2026-01-05 12:00", cron("0 3 * * *"))
    assert bench.fired() == []
    assert bench.until("2026-01-06 02:50") == []
    assert bench.until("2026-01-06 03:10") == ["01-06 03:00"]


def test_a_clock_that_steps_back_fires_nothing_again(bench: Bench) -> None:
    bench.begin("2026-01-05 09:30", cron("0 * * * *"))
    assert bench.until("2026-01-05 12:10") == [f"01-05 {h}:00" for h in (10, 11, 12)]
    bench.clock.now = at("2026-01-05 08:30")
    assert bench.until("2026-01-05 12:50") == [f"01-05 {h}:00" for h in (10, 11, 12)]
    assert bench.until("2026-01-05 13:10")[-1] == "01-05 13:00"


def test_a_clock_that_was_years_ahead_does_not_silence_a_rule(bench: Bench) -> None:
    bench.begin("2026-01-05 09:30", cron("0 * * * *"))
    bench.until("2026-01-05 10:10")
    bench.clock.now = at("2031-01-05 10:30")
    bench.cron.turn()
    bench.work()
    bench.clock.now = at("2026-01-05 10:20")
    assert "01-05 11:00" in bench.until("2026-01-05 11:10")
    assert bench.fired().count("01-05 10:00") == 2, "those of 2026 and of 2031"


def test_an_edited_file_changes_the_schedule_at_once(bench: Bench) -> None:
    bench.begin("2026-01-05 09:30", cron("0 * * * *"))
    bench.clock.now = at("2026-01-05 11:59")  # two missed, then the edit
    bench.rules = (cron("15 * * * *"), cron("20 * * * *", name="other"))
    bench.cron.turn()
    assert bench.fired() == [], "another schedule owes nothing of the old one"
    assert bench.until("2026-01-05 12:30") == ["01-05 12:15", "01-05 12:20"]
    bench.rules = ()
    assert bench.until("2026-01-05 15:00") == ["01-05 12:15", "01-05 12:20"]


def test_an_edit_of_the_task_alone_keeps_what_is_owed(bench: Bench) -> None:
    bench.begin("2026-01-05 09:30", cron("0 * * * *"))
    bench.clock.now = at("2026-01-05 10:30")
    bench.rules = (cron("0 * * * *", task="Tidy more."),)
    bench.cron.turn()
    assert bench.fired() == ["01-05 10:00"]


def test_a_tick_while_the_last_run_still_waits_adds_none(bench: Bench) -> None:
    """A paused night makes one run, not eight of the same."""
    bench.begin("2026-01-05 00:30", cron("0 * * * *"))
    bench.store.set_flag("paused", "1")
    assert bench.until("2026-01-05 08:10") == ["01-05 01:00"]
    bench.store.set_flag("paused", None)
    bench.work()
    assert bench.until("2026-01-05 09:10") == ["01-05 01:00", "01-05 09:00"]


def test_two_workers_threads_fire_a_due_time_once(bench: Bench) -> None:
    rule = cron("0 * * * *")
    bench.begin("2026-01-05 00:30", rule)
    due = at("2026-01-05 01:00")
    job = pidispatch.cron_job(rule, int(due))
    assert [bench.store.fire("tidy", due, job) for _ in range(3)] == [
        True,
        False,
        False,
    ]
    assert bench.store.fire("gone", due, job) is False, "its rule was removed meanwhile"


def test_a_due_time_is_recorded_with_its_rule(bench: Bench) -> None:
    bench.begin("2026-01-05 00:30", cron("0 1 * * *"))
    bench.clock.now = at("2026-01-05 01:00")
    bench.cron.turn()
    claimed = bench.store.claim()
    assert claimed
    job = claimed.job
    assert (job.title, job.flow, job.kind) == ("local:notes", "task", "local")
    assert (job.trigger.index, job.trigger.type, job.trigger.by) == (0, "cron", "tidy")


# -- properties -----------------------------------------------------------------


def dense(on: On, begin: float, end: float) -> list[float]:
    return list(takewhile_until(pidispatch.cron_ticks(on, begin), end))


def takewhile_until(ticks: Iterator[float], end: float) -> Iterator[float]:
    for tick in ticks:
        if tick > end:
            return
        yield tick


PATTERNS = (
    "30 2 * * *",
    "0,30 2 * * *",
    "*/10 * * * *",
    "15 1-3 * * *",
    "0 */2 * * *",
    "59 23 * * SUN",
    "5 30 2 * * *",
)
ZONES = (BERLIN, "America/New_York", "Australia/Lord_Howe", "UTC", "Asia/Kolkata")
DAYS = (
    "2026-03-08",
    "2026-03-29",
    "2026-04-05",
    "2026-10-04",
    "2026-10-25",
    "2026-11-01",
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(PATTERNS),
    st.sampled_from(ZONES),
    st.sampled_from(DAYS),
    st.lists(st.integers(1, 20_000), min_size=1, max_size=12),
)
def test_whenever_it_is_looked_nothing_fires_twice_and_nothing_recent_is_missed(
    pattern: str, zone: str, day: str, waits: list[int]
) -> None:
    """Looks at any moments around a clock change take the last due time of each."""
    on = On(type="cron", id="x", pattern=pattern, tz=zone)
    begin = at(f"{day} 00:00") - 43_200
    now = seen = begin
    every = dense(on, begin, begin + sum(waits))
    fired: list[float] = []
    for wait in waits:
        since, now = now, now + wait
        due = pidispatch.last_due(on, seen, now)
        expected = [t for t in every if since < t <= now]
        assert due == (expected[-1] if expected else None)
        if due is not None:
            fired.append(due)
            seen = due
    assert fired == sorted(set(fired))
