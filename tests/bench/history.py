"""A queue's file with a month behind it, written by SQL in bulk."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

import load
import msgspec
import queues
from conftest import record_of

import pidispatch

NUMBER = load.NUMBER.decode()
#: The jobs' numbers begin behind it.
FIRST = 1_000_000
#: Seconds over which the jobs are spread: what the retention keeps.
MONTH = pidispatch.RETENTION_SECONDS - pidispatch.DAY
#: One job of each number, from its delivery to its request, at `n.at`.
_BEHIND = """WITH RECURSIVE
    i (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM i WHERE i < :count),
    n (n, at) AS MATERIALIZED (SELECT CAST(:first + i AS TEXT),
                  :now - :month + i * (:month / :count) FROM i)
    INSERT INTO {into} FROM n"""
_TABLES = (
    """deliveries (id, kind, state, body_sha, received_at, event_at, target, base)
       SELECT replace(:id, :number, n), 'github', 'admitted', hex(randomblob(32)), at,
       at, replace(:target, :number, n), hex(randomblob(20))""",
    """jobs (id, set_id, state, payload, attempt, queued_at, started_at, ended_at,
             scope)
       SELECT replace(:id, :number, n), replace(:id, :number, n), 'done',
       replace(:payload, :number, n), 1, at, at + 2, at + 300, :scope""",
    """windows (kind, key, opened_at, job_id)
       SELECT 'github', replace(:dedup, :number, n), at, replace(:id, :number, n)""",
    """ledger (job_id, attempt, reserved_at, state, tokens, cost, scope)
       SELECT replace(:id, :number, n), 1, at, 'kept', 120000, 0.41, :scope""",
    """runs (job_id, set_id, ended_at, record, request, request_key)
       SELECT replace(:id, :number, n), replace(:id, :number, n), at + 300,
       replace(:record, :number, n), json_object('number', n + 0, 'url',
       'https://forge.example/octo/spoon/pull/' || n, 'title', 'Bend the spoon'),
       :scope || '!' || (n + 0)""",
    """pushes (kind, target, replica, tip, at)
       SELECT 'github', replace(:target, :number, n), NULL, hex(randomblob(20)), at""",
    """comments (kind, target, comment, at)
       SELECT 'github', replace(:target, :number, n), n, at""",
)


def write(path: Path, count: int) -> None:
    """A new file with `count` jobs that ended within the retention."""
    pidispatch.Store(path).close()
    job = queues.job_of(int(NUMBER))
    record = record_of(pidispatch.Claimed(job, "", 1, 0.0))
    values = {
        "count": count,
        "first": FIRST,
        "now": time.time() - 3600,
        "month": MONTH,
        "number": NUMBER,
        "id": job.id,
        "target": job.title,
        "dedup": job.dedup,
        "scope": job.place,
        "payload": msgspec.json.encode(job.without_text()).decode(),
        "record": msgspec.json.encode(record).decode(),
    }
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = OFF")
        for table in _TABLES:
            db.execute(_BEHIND.format(into=table), values)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
