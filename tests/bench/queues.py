"""One queue of the queue bench, in a process of its own.

`queues.py KIND FOLDER WORKERS COUNT` puts COUNT jobs into a new queue from WORKERS
threads (the receiver: so many in a transaction) and takes them again, every write
on the disk before the next, and prints how many a second it did. What is put is
built before the clock starts.
"""

from __future__ import annotations

import collections
import contextlib
import json
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

PATIENCE = 60.0
OURS = "ours.db"
BODY = "When the kettle is set on the hob the spoon beside it should lie bent. " * 14


class Queue(Protocol):
    def item(self, number: int) -> Any: ...
    def put(self, item: Any) -> bool:
        """False for one it already has."""
        ...

    def take(self) -> Any: ...


class Pidispatch:
    """The store as the receiver and the workers use it."""

    def __init__(self, folder: Path) -> None:
        import pidispatch

        self.module, self.store = pidispatch, pidispatch.Store(folder / OURS)

    def item(self, number: int) -> Any:
        job = job_of(number)
        event = self.module.Event(
            forge="github",
            delivery=str(number),
            name="issues.labeled",
            kind="label",
            action="labeled",
            repo=job.repo,
            target=job.target,
            actor=self.module.Actor("42", "octocat"),
            labels=("pi:fix",),
            added=("pi:fix",),
        )
        delivery = self.module.Delivery(
            id=job.set, event=event, body_sha=f"{number:064x}", received=time.time()
        )
        return delivery, (job,)

    def put(self, item: Any) -> bool:
        return bool(self.store.admit(*item).status == "queued")

    def take(self) -> Any:
        return self.store.claim()


class Receiver(Pidispatch):
    """As the receiver does it: those that came meanwhile are one transaction."""

    def put_all(self, items: Sequence[Any]) -> bool:
        with self.store.group():
            return all(self.put(item) for item in items)


def job_of(number: int) -> Any:
    import pidispatch

    on = pidispatch.On(type="label", any=("pi:fix",))
    rule = pidispatch.Rule(0, on, pidispatch.Run(kind="github", flow="fix-issue"))
    event = pidispatch.Event(
        forge="github",
        delivery=str(number),
        name="issues.labeled",
        kind="label",
        action="labeled",
        repo="octo/spoon",
        target=pidispatch.Target("issue", number, "The spoon stays straight", BODY),
        actor=pidispatch.Actor("42", "octocat"),
    )
    [job] = pidispatch.fan_out(pidispatch.Match(rule, "fix-issue", "pi:fix"), event)
    return job


class Peer:
    """Others get our job's own JSON to keep, by its id."""

    def item(self, number: int) -> Any:
        import msgspec

        job = job_of(number)
        return job.id, msgspec.json.encode(job).decode()


class Huey(Peer):
    """It tells no duplicates."""

    def __init__(self, folder: Path) -> None:
        from huey import SqliteHuey

        self.huey = SqliteHuey(
            filename=str(folder / "huey.db"), fsync=True, timeout=PATIENCE
        )
        self.task = self.huey.task()(lambda payload: None)

    def put(self, item: Any) -> bool:
        return bool(self.task(item[1]))

    def take(self) -> Any:
        return self.huey.dequeue()


class PerThread(Peer):
    """A connection for each thread."""

    def __init__(self, folder: Path) -> None:
        self.file, self._own = folder / "queue.db", threading.local()
        self.connect()

    def connect(self) -> Any:
        raise NotImplementedError

    @property
    def own(self) -> Any:
        if not hasattr(self._own, "made"):
            self._own.made = self.connect()
        return self._own.made


class Litequeue(PerThread):
    """It tells no duplicates; made as durable as the others."""

    def connect(self) -> Any:
        from litequeue import LiteQueue

        queue = LiteQueue(self.file, timeout=PATIENCE)
        queue.conn.execute("PRAGMA synchronous = FULL")
        return queue

    def put(self, item: Any) -> bool:
        return bool(self.own.put(item[1]))

    def take(self) -> Any:
        return self.own.pop()


class Sqlite(PerThread):
    """What SQLite itself does: a transaction for each, a key that is unique."""

    def connect(self) -> Any:
        db = sqlite3.connect(self.file, isolation_level=None, timeout=PATIENCE)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(
            """CREATE TABLE IF NOT EXISTS jobs (seq INTEGER PRIMARY KEY,
               id TEXT UNIQUE, payload TEXT, state TEXT) STRICT"""
        )
        db.execute(
            """CREATE INDEX IF NOT EXISTS queued ON jobs (seq)
               WHERE state = 'queued'"""
        )
        return db

    @contextlib.contextmanager
    def transaction(self) -> Any:
        self.own.execute("BEGIN IMMEDIATE")
        yield self.own
        self.own.execute("COMMIT")

    def put(self, item: Any) -> bool:
        sql = "INSERT OR IGNORE INTO jobs (id, payload, state) VALUES (?, ?, 'queued')"
        with self.transaction() as db:
            return bool(db.execute(sql, item).rowcount == 1)

    def take(self) -> Any:
        sql = """UPDATE jobs SET state = 'claimed' WHERE seq = (SELECT seq FROM jobs
                 WHERE state = 'queued' ORDER BY seq LIMIT 1) RETURNING payload"""
        with self.transaction() as db:
            return db.execute(sql).fetchall()[0]


KINDS: dict[str, tuple[Callable[[Path], Queue], bool]] = {
    "pidispatch": (Pidispatch, True),
    "receiver": (Receiver, True),
    "huey": (Huey, False),
    "litequeue": (Litequeue, False),
    "sqlite3": (Sqlite, True),
}


def rate(do: Callable[[Any], object], items: Sequence[Any], workers: int) -> float:
    """How often a second, when so many threads do it at once."""
    waiting, failed = collections.deque(items), []

    def work() -> None:
        with contextlib.suppress(IndexError):
            while True:
                item = waiting.popleft()
                if not do(item):
                    failed.append(item)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    assert not failed, failed[0]
    return len(items) / seconds


def put_rate(queue: Queue, items: Sequence[Any], workers: int) -> float:
    if not isinstance(queue, Receiver):
        return rate(queue.put, items, workers)
    groups = [items[i : i + workers] for i in range(0, len(items), workers)]
    return rate(queue.put_all, groups, 1) * len(items) / len(groups)


def warming(count: int) -> int:
    """How many come before the clock starts: caches fill, compilers compile."""
    return 16 + count // 10


def main(kind: str, folder: str, workers: int, count: int) -> None:
    make, dedups = KINDS[kind]
    queue = make(Path(folder))
    warm = warming(count)
    items = [queue.item(number) for number in range(warm + count)]
    put_rate(queue, items[:warm], workers)
    put = put_rate(queue, items[warm:], workers)
    assert queue.put(items[0]) is not dedups, "a duplicate is told where it says so"
    rate(lambda _: queue.take(), range(warm), workers)
    take = rate(lambda _: queue.take(), range(count), workers)
    print(json.dumps({"put": put, "take": take}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
