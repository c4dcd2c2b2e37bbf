"""Section store: durable, one writer, all or none, and fenced."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import msgspec
import pytest
from conftest import FakeClock, Maker, record_of

import pidispatch
from pidispatch import Caps, Store

CAPS = Caps(25, None, None, "UTC")


def claimed(store: Store) -> pidispatch.Claimed:
    found = store.claim()
    assert found is not None
    return found


def reason(over: pidispatch.Over | None) -> str | None:
    return over.reason if over else None


# -- admission ----------------------------------------------------------------


def test_a_delivery_becomes_one_job_and_a_set_becomes_all_its_jobs(
    store: Store, maker: Maker
) -> None:
    plain = maker.admit(store, delivery="a")
    assert plain == ("queued", ("gh-a",))
    replicated = maker.admit(
        store, 2, delivery="b", target=pidispatch.Target("issue", 8)
    )
    assert replicated == ("queued", ("gh-b-r1", "gh-b-r2"))


def test_the_same_delivery_again_is_a_duplicate_also_after_the_job_and_a_restart(
    tmp_path: Path, clock: FakeClock, maker: Maker
) -> None:
    """T01: a redelivered GUID never starts a second paid run."""
    path = tmp_path / "q.db"
    store = Store(path, clock)
    maker.admit(store, delivery="a")
    job = claimed(store)
    assert store.start(job, CAPS) is None
    store.finish(job, record_of(job), None)
    store.close()
    clock.pass_(20 * 86_400)
    store = Store(path, clock)
    assert maker.admit(store, delivery="a").status == "duplicate"
    assert store.claim() is None
    assert store.status(CAPS, clock()).counts["duplicate"] == 1
    store.close()


#: Those with a row for every job of a month.
LARGE = re.compile(
    "SCAN (deliveries|jobs|other|runs|windows|ledger|comments)"
    "(?! USING (COVERING )?INDEX "
    "(jobs_queued|jobs_cancelled|jobs_open))"
)


def test_what_the_service_does_all_the_time_reads_no_whole_table(
    store: Store, maker: Maker
) -> None:
    """A month may have a million jobs, and the writer holds up every delivery."""
    asked: list[str] = []
    for connection in (store._read, store._connection):
        connection.set_trace_callback(asked.append)
    scope = pidispatch.ScopeRow(scope="github:octo/*", concurrent=9)
    maker.history(store)
    store.seen("github", "gh-a", "x")
    job = store.claim(pidispatch.Limits((scope,)))
    assert job
    store.start(job, CAPS)
    store.release(job)
    store.requeue(job)
    store.base_of(job.job.set)
    store.note_ending("github:octo/spoon", 12, "merged", store.clock())
    for look in (
        store.due_notices,
        store.due_siblings,
        store.due_limited,
        store.unfinished,
        store.open_jobs,
        store.sweep,
        lambda: store.due_pending(store.clock()),
        lambda: store.holder(job.job.id),
        lambda: store.own_tips(job.job),
        lambda: store.cancelled(job.job.id),
        lambda: store.run(job.job.id),
    ):
        look()
    for connection in (store._read, store._connection):
        connection.set_trace_callback(None)
    verbs = ("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")
    statements = {sql for sql in asked if sql.lstrip().startswith(verbs)}
    assert len(statements) > 30
    found = {
        row["detail"]: sql
        for sql in statements
        for row in store._rows(f"EXPLAIN QUERY PLAN {sql}")
        if LARGE.match(row["detail"])
    }
    assert found == {}


def test_a_long_queue_costs_a_paused_worker_nothing(store: Store, maker: Maker) -> None:
    """It looks at the queue at every delivery, also at those that only wait."""

    def steps() -> int:
        counted = 0

        def count() -> None:
            nonlocal counted
            counted += 1

        store._read.set_progress_handler(count, 1)
        assert store.claim() is None
        store._read.set_progress_handler(None, 1)
        return counted

    store.pause()
    maker.admit(store, target=pidispatch.Target("issue", 1))
    short = steps()
    for number in range(2, 50):
        maker.admit(store, target=pidispatch.Target("issue", number))
    assert steps() == short > 0


def test_one_signed_body_under_a_new_id_is_a_duplicate(
    store: Store, maker: Maker
) -> None:
    assert maker.admit(store, delivery="a", body="same").status == "queued"
    assert store.seen("github", "gh-b", "same")
    assert maker.admit(store, delivery="b", body="same").status == "duplicate"


def test_another_delivery_of_the_same_work_coalesces_for_ten_minutes(
    store: Store, maker: Maker, clock: FakeClock
) -> None:
    """T18: a burst of labelled events is one job."""
    assert maker.admit(store).status == "queued"
    clock.pass_(599)
    assert maker.admit(store).status == "coalesced"
    clock.pass_(61)
    assert maker.admit(store).status == "queued"


def test_the_window_compares_the_events_own_times(
    store: Store, maker: Maker, clock: FakeClock
) -> None:
    event_time = clock() - 30
    assert maker.admit(store, when=event_time).status == "queued"
    clock.pass_(7_200)
    late = maker.admit(store, when=event_time)
    assert late.status == "coalesced", "one event reported late is still one event"
    assert maker.admit(store, when=clock() + 9_999).status == "queued"


def test_each_replica_coalesces_with_itself_and_the_set_is_all_or_none(
    store: Store, maker: Maker
) -> None:
    assert maker.admit(store, 2).status == "queued"
    assert maker.admit(store, 2).status == "coalesced"
    assert maker.admit(store, 3).status == "coalesced"
    assert maker.admit(store).status == "queued", "a plain key is another key"
    assert len(store.runs(9)) == 3


def test_flows_and_targets_have_windows_of_their_own(
    store: Store, maker: Maker
) -> None:
    event = maker.delivery()
    assert store.admit(event, maker.jobs(event.event)).status == "queued"
    event = maker.delivery()
    review = maker.jobs(event.event, flow="review")
    assert store.admit(event, review).status == "queued"
    other = pidispatch.Target("issue", 8)
    assert maker.admit(store, target=other).status == "queued"


def test_a_target_gets_so_many_deliveries_an_hour_and_a_set_counts_once(
    store: Store, maker: Maker, clock: FakeClock
) -> None:
    for _ in range(2):
        delivery = maker.delivery()
        jobs = maker.jobs(delivery.event, 3)
        assert store.admit(delivery, jobs, hourly=2).status == "queued"
        clock.pass_(601)
    delivery = maker.delivery()
    jobs = maker.jobs(delivery.event, 3)
    assert store.admit(delivery, jobs, hourly=2).status == "rate-limited"
    clock.pass_(2_400)
    delivery = maker.delivery()
    jobs = maker.jobs(delivery.event, 3)
    assert store.admit(delivery, jobs, hourly=2).status == "queued"


def test_a_thousand_redeliveries_at_once_make_one_row(
    store: Store, maker: Maker
) -> None:
    delivery = maker.delivery("storm")
    jobs = maker.jobs(delivery.event, 2)
    answers: list[str] = []

    def send() -> None:
        answers.extend(store.admit(delivery, jobs).status for _ in range(125))

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers.count("queued") == 1
    assert answers.count("duplicate") == 999


def test_a_parked_delivery_waits_survives_and_is_admitted_once(
    tmp_path: Path, clock: FakeClock, maker: Maker
) -> None:
    store = Store(tmp_path / "q.db", clock)
    delivery, rule = maker.delivery("p"), maker.rule(2)
    match = pidispatch.Match(rule, "fix-issue", "pi:urgent")
    assert store.park(delivery, match)
    assert not store.park(delivery, match)
    assert store.seen("github", "gh-p", "other")
    store.close()
    store = Store(tmp_path / "q.db", clock)
    assert store.due_pending(clock()) == [(delivery, match, 0)]
    store.postpone("gh-p", clock() + 5)
    assert store.due_pending(clock()) == []
    clock.pass_(5)
    [(_, _, attempts)] = store.due_pending(clock())
    assert attempts == 1
    jobs = pidispatch.fan_out(match, delivery.event)
    assert store.admit(delivery, jobs).status == "queued"
    assert store.due_pending(clock()) == []
    assert store.admit(delivery, jobs).status == "duplicate"
    store.close()


def test_a_dropped_delivery_leaves_a_count_and_may_come_again(
    store: Store, maker: Maker
) -> None:
    delivery = maker.delivery("p")
    match = pidispatch.Match(maker.rule(), "fix-issue", "x")
    store.park(delivery, match)
    store.settle("gh-p", "not-allowed")
    assert not store.seen("github", "gh-p", delivery.body_sha)
    assert store.status(CAPS, 0).counts["not-allowed"] == 1


# -- claims and caps ----------------------------------------------------------


def test_jobs_are_claimed_in_order_once_and_not_before_their_time(
    store: Store, maker: Maker, clock: FakeClock
) -> None:
    maker.admit(store, 2, delivery="a")
    first, second = claimed(store), claimed(store)
    assert (first.job.replica, second.job.replica) == (1, 2)
    assert store.claim() is None
    store.defer(first, clock() + 60)
    assert store.claim() is None
    clock.pass_(60)
    again = claimed(store)
    assert again.job.id == first.job.id
    assert (again.attempt, again.deferrals) == (0, 1)


def test_nothing_is_claimed_while_paused(store: Store, maker: Maker) -> None:
    maker.admit(store)
    store.set_flag("paused", "1")
    assert store.claim() is None
    store.set_flag("paused", None)
    assert store.claim() is not None


def test_a_late_write_of_an_older_claim_changes_nothing(
    store: Store, maker: Maker, clock: FakeClock
) -> None:
    """T35: a settle under a lost claim is refused."""
    maker.admit(store)
    old = claimed(store)
    store.defer(old, clock())
    new = claimed(store)
    for late in (
        lambda: store.start(old, CAPS),
        lambda: store.defer(old, 0),
        lambda: store.finish(old, record_of(old), None),
    ):
        with pytest.raises(pidispatch.Fenced):
            late()
    assert store.start(new, CAPS) is None


def test_one_slot_and_two_replicas_is_one_run_and_one_refusal_by_name(
    store: Store, maker: Maker
) -> None:
    """T51."""
    maker.admit(store, 2)
    caps = Caps(1, None, None, "UTC")
    first, second = claimed(store), claimed(store)
    assert store.start(first, caps) is None
    assert reason(store.peek_caps(caps, second.job.place)) == "over-budget"
    assert reason(store.start(second, caps)) == "over-budget"
    refused = record_of(second, outcome="policy", reason="over-budget")
    store.refuse(second, refused, None)
    _, record, _ = store.run(second.job.id)
    assert record is not None
    assert record.reason == "over-budget"
    assert store.status(caps, store.clock()).used == 1


def test_ten_deliveries_of_a_doubled_rule_use_twenty_slots(
    store: Store, maker: Maker, clock: FakeClock
) -> None:
    for number in range(10):
        maker.admit(store, 2, target=pidispatch.Target("issue", number + 1))
    for _ in range(20):
        assert store.start(claimed(store), CAPS) is None
    assert store.status(CAPS, clock()).used == 20


@pytest.mark.parametrize("span", ["day", "week", "month"])
def test_every_window_caps(
    store: Store, maker: Maker, span: str, clock: FakeClock
) -> None:
    caps = msgspec.structs.replace(Caps(None, None, None, "UTC"), **{span: 1})
    maker.admit(store, 2)
    assert store.start(claimed(store), caps) is None
    assert reason(store.start(claimed(store), caps)) == "over-budget"
    assert store.status(caps, clock()).used == 1


def test_a_clock_that_steps_back_refills_nothing(
    store: Store, maker: Maker, clock: FakeClock
) -> None:
    maker.admit(store, 2)
    caps = Caps(1, None, None, "UTC")
    assert store.start(claimed(store), caps) is None
    clock.pass_(-2 * 86_400)
    assert reason(store.start(claimed(store), caps)) == "over-budget"


@pytest.mark.parametrize(
    ("now", "span", "start"),
    [
        ("2026-06-10T23:59:59", "day", "2026-06-10T00:00:00"),
        ("2026-06-11T00:00:00", "day", "2026-06-11T00:00:00"),
        ("2026-03-29T12:00:00", "day", "2026-03-29T00:00:00"),
        ("2026-10-25T23:59:59", "day", "2026-10-25T00:00:00"),
        ("2026-06-14T23:59:59", "week", "2026-06-08T00:00:00"),
        ("2026-06-15T00:00:00", "week", "2026-06-15T00:00:00"),
        ("2026-10-31T23:59:59", "month", "2026-10-01T00:00:00"),
    ],
)
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
def test_windows_begin_at_the_zones_own_midnight(
    now: str, span: str, start: str, zone: str
) -> None:
    """T51: 23:59:59, 00:00, week and month ends, and clock-change days."""
    tz = ZoneInfo(zone)
    seconds = datetime.fromisoformat(now).replace(tzinfo=tz).timestamp()
    expected = datetime.fromisoformat(start).replace(tzinfo=tz).timestamp()
    assert pidispatch.window_of(seconds, zone, span)[0] == expected  # type: ignore[arg-type]


def test_a_container_that_never_started_gives_slot_and_attempt_back(
    store: Store, maker: Maker, clock: FakeClock
) -> None:
    maker.admit(store)
    job = claimed(store)
    store.start(job, CAPS)
    store.release(job)
    assert store.status(CAPS, clock()).used == 0
    assert store.start(job, CAPS) is None
    assert store.status(CAPS, clock()).used == 1


def test_a_retry_keeps_its_slot_and_reserves_another(
    store: Store, maker: Maker, clock: FakeClock
) -> None:
    maker.admit(store)
    job = claimed(store)
    store.start(job, CAPS)
    store.running(job)
    store.retry(job, clock() + 60)
    clock.pass_(60)
    again = claimed(store)
    assert again.attempt == 1
    assert store.start(again, CAPS) is None
    assert store.status(CAPS, clock()).used == 2


def test_after_a_crash_a_reserved_job_is_requeued_without_its_slot(
    tmp_path: Path, clock: FakeClock, maker: Maker
) -> None:
    store = Store(tmp_path / "q.db", clock)
    maker.admit(store, 2)
    store.start(claimed(store), CAPS)
    claimed(store)
    store.close()
    store = Store(tmp_path / "q.db", clock)
    left = store.unfinished()
    assert [state for _, state, _ in left] == ["starting", "claimed"]
    for job, _, _ in left:
        store.requeue(job)
    assert store.status(CAPS, clock()).used == 0
    assert {claimed(store).attempt, claimed(store).attempt} == {0}
    store.close()


def test_the_sets_first_base_stands_for_every_sibling(
    store: Store, maker: Maker
) -> None:
    maker.admit(store, 2, delivery="a")
    assert store.base_of("gh-a") == (None, None)
    first = store.set_base("gh-a", "b" * 40, "c" * 40)
    second = store.set_base("gh-a", "d" * 40, None)
    assert first == second
    assert store.base_of("gh-a") == ("b" * 40, "c" * 40)
    assert store.set_base("gh-none", "e" * 40, None) is None


# -- the end of a job ---------------------------------------------------------


def test_a_refused_job_frees_its_window_and_uses_nothing(
    store: Store, maker: Maker, clock: FakeClock
) -> None:
    maker.admit(store)
    job = claimed(store)
    store.refuse(job, record_of(job, outcome="policy", reason="x"), None)
    assert store.status(CAPS, clock()).used == 0
    assert maker.admit(store).status == "queued"


def test_what_is_to_be_published_is_kept_until_it_is_told(
    store: Store, maker: Maker, clock: FakeClock
) -> None:
    maker.admit(store)
    job = claimed(store)
    store.start(job, CAPS)
    work = pidispatch.Workspace("b" * 40, "main", None, None)
    store.keep_work(job, work)
    notice = pidispatch.Notice("result")
    store.finish(job, record_of(job), notice)
    assert store.notice(job.job.id) == (job.job.without_text(), work, notice, 0)
    store.postpone_notice(job.job.id, clock() + 5)
    assert store.due_notices() == []
    clock.pass_(5)
    assert [row[3] for row in store.due_notices()] == [1]
    request = pidispatch.Request(3, "http://forge/pull/3")
    store.published(job.job.id, request, "branch-moved")
    run, record, _ = store.run(job.job.id)
    assert record is not None
    assert (run.request, record.reason) == (request, "branch-moved")
    assert store.due_notices() == []


def test_payload_text_is_erased_when_the_job_cannot_run_any_more(
    store: Store, maker: Maker
) -> None:
    title = pidispatch.Target("issue", 7, "canary-title", "canary-body")
    maker.admit(store, target=title)
    job = claimed(store)
    store.start(job, CAPS)
    store.finish(job, record_of(job), None)
    store.close()
    dump = "\n".join(sqlite3.connect(store.path).iterdump())
    assert "canary" not in dump


def test_ids_and_records_are_forgotten_31_days_after_the_end(
    store: Store, maker: Maker, clock: FakeClock
) -> None:
    maker.admit(store, delivery="a", body="x")
    job = claimed(store)
    store.start(job, CAPS)
    clock.pass_(86_400)
    store.finish(job, record_of(job), None)
    clock.pass_(30.9 * 86_400)
    store.sweep()
    assert store.seen("github", "gh-a", "x")
    clock.pass_(0.2 * 86_400)
    store.sweep()
    assert not store.seen("github", "gh-a", "x")
    assert store.runs(9) == []


def test_records_hold_no_text_and_all_keys_in_their_order() -> None:
    keys = (
        "jobId kind target flow queuedAt startedAt endedAt outcome reason exitCode "
        "turns tokens forks provider model budgetReserved attempt replica replicas "
        "triggerIndex triggerType session bundle host picked"
    )
    assert list(pidispatch.Record.__struct_fields__) == keys.split()


# -- the file -----------------------------------------------------------------


def test_a_group_is_one_commit_with_its_effects_after_it(
    store: Store, maker: Maker
) -> None:
    seen: list[int] = []
    with store.group():
        for name in "ab":
            target = pidispatch.Target("issue", ord(name))
            assert maker.admit(store, delivery=name, target=target).status == "queued"
        assert maker.admit(store, delivery="a").status == "duplicate", "it sees its own"
        store.then(lambda: seen.append(len(other_looks(store))))
        assert other_looks(store) == []
        assert not store.work.is_set()
    assert seen == [2]
    assert store.work.is_set()


def other_looks(store: Store) -> list[str]:
    """What another thread sees."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: sorted(store.open_jobs())).result()


def test_a_group_that_looks_at_nothing_waits_for_nobody(store: Store) -> None:
    """T08: a flood of forged deliveries keeps no writer, and no writer keeps it."""
    with store._turn, ThreadPoolExecutor(1) as pool:

        def look_at_nothing() -> None:
            with store.group():
                pass

        pool.submit(look_at_nothing).result(5)


def test_nothing_of_a_group_with_a_bad_write_is_done(
    store: Store, maker: Maker
) -> None:
    """T35: not even the good writes before it, or after it."""
    with pytest.raises(pidispatch.InfraError), store.group():
        maker.admit(store, delivery="good")
        with contextlib.suppress(pidispatch.InfraError):
            store._write(lambda db: db.execute("INSERT INTO jobs (id) VALUES ('half')"))
        with contextlib.suppress(pidispatch.InfraError):
            maker.admit(store, delivery="late")
    assert other_looks(store) == []
    assert not store.work.is_set()
    assert maker.admit(store, delivery="good").status == "queued"


def test_an_error_inside_a_group_undoes_it_and_lets_others_write(
    store: Store, maker: Maker
) -> None:
    with pytest.raises(ZeroDivisionError), store.group():
        maker.admit(store, delivery="good")
        raise ZeroDivisionError
    with ThreadPoolExecutor(1) as pool:
        pool.submit(store.pause).result(5)
    assert other_looks(store) == []


def test_a_rollback_that_fails_keeps_nobody_from_writing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T37: a disk that went away may let us do nothing at all."""

    class Gone:
        in_transaction = True

        def execute(self, sql: str, *_: object) -> None:
            raise sqlite3.OperationalError("disk I/O error")

    real = store._connection
    with monkeypatch.context() as patch:
        patch.setattr(store, "_connection", Gone())
        with pytest.raises(pidispatch.InfraError, match="disk I/O"):
            store.pause()
        with pytest.raises(pidispatch.InfraError, match="disk I/O"), store.group():
            store.pause()
    assert store._connection is real
    store.pause()
    assert store.flag("paused")


def test_writers_share_a_commit_and_a_bad_write_spoils_only_itself(
    store: Store,
) -> None:
    results: list[object] = []

    def good(i: int) -> None:
        results.append(store._write(lambda db: i))

    def bad() -> None:
        with pytest.raises(pidispatch.InfraError, match="could not be written"):
            store._write(lambda db: db.execute("nonsense"))
        results.append("bad")

    threads = [threading.Thread(target=good, args=(i,)) for i in range(8)]
    threads.append(threading.Thread(target=bad))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 9


def test_producers_claimers_and_readers_never_meet_a_locked_database(
    store: Store, maker: Maker
) -> None:
    """T32, a short version: no OperationalError under mixed load."""
    errors: list[BaseException] = []
    deliveries = [
        maker.delivery(target=pidispatch.Target("issue", n + 1)) for n in range(160)
    ]

    def guard(work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)

    def produce(part: int) -> None:
        for delivery in deliveries[part::4]:
            store.admit(delivery, maker.jobs(delivery.event))

    def claim() -> None:
        for _ in range(60):
            job = store.claim()
            if job:
                store.start(job, Caps(None, None, None, "UTC"))

    def look() -> None:
        reader = pidispatch.Reader(store.path)
        for _ in range(60):
            reader.runs(50)
            reader.status(CAPS, 0)

    work = [lambda part=part: produce(part) for part in range(4)]
    threads = [
        threading.Thread(target=guard, args=(do,))
        for do in (*work, claim, claim, look, look)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(store.runs(999)) == 160


def test_the_database_is_private_and_durable(store: Store) -> None:
    for suffix in ("", "-wal", "-shm"):  # the log holds the same texts
        beside = store.path.with_name(store.path.name + suffix)
        assert beside.stat().st_mode & 0o077 == 0, beside
    pragma = store._write(lambda db: db.execute("PRAGMA synchronous").fetchone()[0])
    assert pragma == 2
    assert store._rows("PRAGMA journal_mode")[0][0] == "wal"


# -- a file that is not to be touched -------------------------------------------


def folder(path: Path) -> dict[str, bytes]:
    """Every file beside that one, with its content."""
    return {entry.name: entry.read_bytes() for entry in path.parent.iterdir()}


@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_a_file_of_a_newer_version_is_refused_and_left_alone(
    tmp_path: Path, clock: FakeClock, journal: str
) -> None:
    """Byte for byte, and with nothing beside it."""
    path = tmp_path / "q.db"
    Store(path, clock).close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at)"
            " VALUES ('pidispatch', '999-future', 'now')"
        )
        db.commit()
        db.execute(f"PRAGMA journal_mode = {journal}")
    before = folder(path)
    with pytest.raises(pidispatch.ConfigError, match="newer"):
        Store(path, clock)
    assert folder(path) == before
    assert list(before) == ["q.db"]


def test_a_newer_file_that_was_left_in_a_crash_keeps_its_log(
    tmp_path: Path, clock: FakeClock
) -> None:
    path, copy = tmp_path / "a" / "q.db", tmp_path / "b" / "q.db"
    store = Store(path, clock)
    store._write(
        lambda db: db.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at)"
            " VALUES ('pidispatch', '999-future', 'now')"
        )
    )
    copy.parent.mkdir()
    for name in ("q.db", "q.db-wal"):
        copy.with_name(name).write_bytes(path.with_name(name).read_bytes())
    store.close()
    before = folder(copy)
    with pytest.raises(pidispatch.ConfigError, match="newer"):
        Store(copy, clock)
    after = folder(copy)
    assert {name: after[name] for name in before} == before


def spoilt(whole: bytes, how: str) -> bytes:
    middle = len(whole) // 2 // 4096 * 4096
    return {
        "no database": b"this is no database, and it is long enough to look like one",
        "its head overwritten": os.urandom(100) + whole[100:],
        "a page of its middle overwritten": whole[:middle]
        + b"\xaa" * 4096
        + whole[middle + 4096 :],
        "cut off": whole[:middle],
        "cut off within a page": whole[: middle + 100],
    }[how]


@pytest.mark.parametrize(
    "how",
    [
        "no database",
        "its head overwritten",
        "a page of its middle overwritten",
        "cut off",
        "cut off within a page",
    ],
)
def test_a_damaged_file_is_refused_by_name_and_left_alone(
    tmp_path: Path, clock: FakeClock, maker: Maker, how: str
) -> None:
    path = tmp_path / "q.db"
    store = Store(path, clock)
    for number in range(60):
        maker.admit(store, target=pidispatch.Target("issue", number + 1))
    store.close()
    path.write_bytes(spoilt(path.read_bytes(), how))
    before = folder(path)
    with pytest.raises(pidispatch.ConfigError, match=re.escape(str(path))) as caught:
        Store(path, clock)
    assert "backup" in str(caught.value.fix)
    assert folder(path) == before


def test_the_look_for_damage_is_bounded_and_says_when_it_saw_not_all(
    tmp_path: Path,
    clock: FakeClock,
    maker: Maker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "q.db"
    store = Store(path, clock)
    maker.admit(store)
    store.close()
    damage = pidispatch._damage

    def slow(connection: sqlite3.Connection) -> str | None:
        connection.set_progress_handler(lambda: time.sleep(0.001), 1)
        return damage(connection)

    monkeypatch.setattr(pidispatch, "_damage", slow)
    monkeypatch.setattr(pidispatch, "CHECK_SECONDS", 0.01)
    caplog.set_level("INFO", "pidispatch")
    Store(path, clock).close()
    assert "database-not-all-checked" in caplog.text


def test_an_empty_file_becomes_a_database(tmp_path: Path, clock: FakeClock) -> None:
    (tmp_path / "q.db").touch()
    Store(tmp_path / "q.db", clock).close()


def test_reading_a_missing_file_names_it_and_the_fix(tmp_path: Path) -> None:
    with pytest.raises(pidispatch.ConfigError, match=r"none\.db") as caught:
        pidispatch.Reader(tmp_path / "none.db").runs(1)
    assert caught.value.fix
    assert not (tmp_path / "none.db").exists()


def test_a_second_worker_on_the_same_file_is_refused(tmp_path: Path) -> None:
    held = pidispatch.lock_file(tmp_path / "q.worker.lock")
    with pytest.raises(pidispatch.ConfigError, match="another worker"):
        pidispatch.lock_file(tmp_path / "q.worker.lock")
    held.close()
    pidispatch.lock_file(tmp_path / "q.worker.lock").close()


# -- another process on the same file -------------------------------------------


def test_pause_and_resume_come_from_another_process_and_survive_restarts(
    tmp_path: Path, clock: FakeClock, maker: Maker
) -> None:
    store = Store(tmp_path / "q.db", clock)
    maker.admit(store)
    outside = pidispatch.Outside(store.path, clock)
    outside.pause()
    assert store.claim() is None
    store.close()
    store = Store(tmp_path / "q.db", clock)
    assert store.claim() is None
    assert store.status(CAPS, clock()).paused
    outside.resume()
    assert store.claim() is not None
    store.close()


def test_cancel_says_what_it_found_and_leaves_the_sibling(
    store: Store, maker: Maker, clock: FakeClock
) -> None:
    maker.admit(store, 2, delivery="a")
    outside = pidispatch.Outside(store.path, clock)
    assert outside.cancel("gh-a-r1") == "queued"
    assert store.cancelled("gh-a-r1")
    assert not store.cancelled("gh-a-r2")
    job = claimed(store)
    store.finish(job, record_of(job), None)
    with pytest.raises(pidispatch.ConfigError, match="already ended: completed"):
        outside.cancel(job.job.id)
    with pytest.raises(pidispatch.ConfigError, match="no job"):
        outside.cancel("gh-none")


def test_another_process_never_checkpoints_and_makes_no_file(
    store: Store, tmp_path: Path
) -> None:
    outside = pidispatch.Outside(store.path)
    pragma = "PRAGMA wal_autocheckpoint"
    assert outside._write(lambda db: db.execute(pragma).fetchone()[0]) == 0
    with pytest.raises(pidispatch.ConfigError):
        pidispatch.Outside(tmp_path / "none.db").pause()
    assert not (tmp_path / "none.db").exists()


def test_what_is_kept_of_an_ended_job_has_no_text_and_can_be_published_again(
    store: Store, maker: Maker, clock: FakeClock
) -> None:
    maker.admit(store, target=pidispatch.Target("issue", 7, "canary", "canary"))
    job = claimed(store)
    store.start(job, CAPS)
    store.keep_work(job, pidispatch.Workspace("b" * 40, "main"))
    store.finish(job, record_of(job), None)
    kept, work, record = pidispatch.Outside(store.path, clock).kept(job.job.id)
    assert kept.target == pidispatch.Target("issue", 7)
    assert (kept.branch, work.base) == ("pi/issue-7", "b" * 40)
    assert record.jobId == kept.id


def test_a_second_worker_is_refused_by_whatever_name_it_calls_the_file(
    tmp_path: Path,
) -> None:
    """T35: two workers would sweep each other's containers."""
    pidispatch.Store(tmp_path / "real.db").close()
    (tmp_path / "link.db").symlink_to(tmp_path / "real.db")
    held = pidispatch.worker_lock(tmp_path / "real.db")
    with pytest.raises(pidispatch.ConfigError, match="another worker"):
        pidispatch.worker_lock(tmp_path / "link.db")
    held.close()


def test_every_state_in_the_sql_stands_in_the_vocabulary() -> None:
    source = Path(pidispatch.__file__).read_text()
    found = re.findall(r"\bstate\s*(?:=|<>|IN)\s*((?:\('[^)]*'\))|'[a-z]+')", source)
    written = {word for text in found for word in re.findall("[a-z]+", text)}
    known = {*pidispatch.JOB_STATES, *pidispatch.DELIVERY_STATES}
    known |= set(pidispatch.LEDGER_STATES)
    assert len(written) > 6
    assert written <= known, written - known


# -- a clock that is set ----------------------------------------------------------

HOUR, DAY = 3_600.0, 86_400.0
back = pytest.mark.parametrize("step", [HOUR, DAY], ids=["an hour", "a day"])


@back
def test_nothing_waits_for_a_clock_that_was_set_back_to_be_there_again(
    store: Store, maker: Maker, clock: FakeClock, step: float
) -> None:
    """Jobs, tellings and deliveries whose next try was noted before the step."""
    maker.admit(store)
    job = claimed(store)
    store.defer(job, clock() + 60)
    maker.admit(store, target=pidispatch.Target("issue", 8))
    told = claimed(store)
    store.refuse(told, record_of(told), pidispatch.Notice("refused", "no", "m"))
    store.postpone_notice(told.job.id, clock() + 900)
    waiting = maker.delivery("d")
    match = pidispatch.Match(maker.rule(), "fix-issue", "pi:urgent")
    assert store.park(waiting, match)
    store.postpone(waiting.id, clock() + 300)
    limited = maker.delivery("l", target=pidispatch.Target("issue", 9))
    jobs = maker.jobs(limited.event)
    store._write(lambda db: pidispatch._put_limited(db, jobs[0], clock()))
    store.postpone_limited(limited.id, clock() + 900)
    for due in (store.due_notices, store.due_limited):
        assert due() == []
    assert store.claim() is None and store.due_pending(clock()) == []
    clock.pass_(-step)
    assert claimed(store).job.id == job.job.id
    assert [job.id for job, *_ in store.due_notices()] == [told.job.id]
    assert [job.set for job, _ in store.due_limited()] == [limited.id]
    assert [row[0].id for row in store.due_pending(clock())] == [waiting.id]


def test_no_try_is_put_off_longer_than_a_set_clock_can_be_told_by() -> None:
    waits = (
        pidispatch.RETRY_SECONDS,
        pidispatch.DEFER_MAX_SECONDS,
        pidispatch.PUBLISH_WAIT_MAX,
        pidispatch.Inbox.BACKOFF_LIMIT,
    )
    assert max(waits) <= pidispatch.WAIT_MAX


@back
def test_a_target_is_not_limited_by_deliveries_of_a_clock_that_was_ahead(
    store: Store, maker: Maker, clock: FakeClock, step: float
) -> None:
    first = maker.delivery()
    assert store.admit(first, maker.jobs(first.event), 1).status == "queued"
    clock.pass_(-step - 1)
    second = maker.delivery()
    assert store.admit(second, maker.jobs(second.event), 1).status == "queued"
    third = maker.delivery(target=pidispatch.Target("issue", 7), when=clock() - 900)
    assert store.admit(third, maker.jobs(third.event), 1).status == "rate-limited"


@back
def test_a_poll_finds_the_event_of_a_webhook_that_came_before_the_clock_was_set(
    store: Store, maker: Maker, clock: FakeClock, step: float
) -> None:
    """T17: one event is one run, whatever our clock says."""
    at = clock() - 5
    assert maker.admit(store, delivery="webhook", when=at).status == "queued"
    clock.pass_(-step)
    polled = f"{pidispatch.POLLED}1"
    assert maker.admit(store, delivery=polled, when=at).status == "coalesced"


# -- files of earlier versions (tests/versions) -----------------------------------

VERSIONS = sorted((Path(__file__).parent / "versions").glob("*.sql"))


def file_of(path: Path, version: int) -> Path:
    """A database as that many migrations left it, with rows of its time.

    From text that no later change of the code changes: the first is what the store
    that had one migration wrote, each other its migration and rows it made possible.
    """
    with contextlib.closing(sqlite3.connect(path)) as db:
        for script in VERSIONS[:version]:
            db.executescript(script.read_text())
    return path


def test_there_is_a_file_of_every_version() -> None:
    names = [path.stem.partition("-")[2] for path in VERSIONS]
    assert names == [name[4:] for name, _ in pidispatch._MIGRATIONS]


@pytest.mark.parametrize("version", range(1, len(VERSIONS) + 1))
def test_a_file_of_an_earlier_version_opens_keeps_its_rows_and_works(
    tmp_path: Path, clock: FakeClock, maker: Maker, version: int
) -> None:
    """The queue of one version is the queue of the next."""
    path = file_of(tmp_path / "q.db", version)
    store = Store(path, clock)
    rows = {run.id: (run.state, run.reason) for run in store.runs(9)}
    assert rows == {
        "gh-later": ("queued", None),
        "gh-no": ("policy", "job-image-missing"),
        "gh-set-r2": ("running", None),
        "gh-set-r1": ("completed", None),
    }
    run, record, [sibling] = store.run("gh-set-r1")
    assert record and record.tokens and record.tokens.total == 10
    assert run.request and run.request.number == 12 and sibling.id == "gh-set-r2"
    assert len(store.records(9)) == 2 and store.picks().sets == 1
    status = store.status(CAPS, clock())
    assert (status.used, status.pending) == (2, 1)
    assert store.seen("github", "gh-set", "none"), "no delivery runs twice"
    maker.count = 99  # bodies of their own
    assert maker.admit(store, 2).status == "coalesced", "nor within its window"
    [(waiting, _, _)] = store.due_pending(clock())
    assert waiting.id == "gh-waiting"
    [(running, state, _)] = store.unfinished()
    assert (running.job.id, state) == ("gh-set-r2", "running")
    store.finish(running, record_of(running), pidispatch.Notice("result"))
    assert store.own_tips(running.job) == frozenset()
    assert store.note_ending("github:octo/spoon", 12, "merged", clock())
    job = claimed(store)
    assert job.job.target.body == "It's text; with a semicolon"
    assert store.start(job, CAPS) is None
    store.running(job)
    store.finish(job, record_of(job), None)
    assert store.run("gh-later")[0].state == "completed"
    store.sweep()
    store.close()
    assert pidispatch.Reader(path).integrity() == "ok"


def test_versions_lead_to_the_same_database(tmp_path: Path, clock: FakeClock) -> None:
    def schema(version: int) -> list[tuple[str, str]]:
        path = file_of(tmp_path / f"{version}.db", version)
        Store(path, clock).close()
        with contextlib.closing(sqlite3.connect(path)) as db:
            sql = "SELECT name, sql FROM sqlite_master ORDER BY name"
            return db.execute(sql).fetchall()

    last = schema(len(VERSIONS))
    assert all(schema(version) == last for version in range(1, len(VERSIONS)))
    Store(tmp_path / "new.db", clock).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "new.db")) as db:
        new = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    assert new == {name for name, _ in last}
