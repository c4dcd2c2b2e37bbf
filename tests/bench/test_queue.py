"""How many jobs a second are durably put into the queue and taken out of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import peers
import pytest
import queues
import servers
from conftest import ROOT
from table import Table

pytestmark = pytest.mark.bench

SHORT, LONG = 80, 1500
BULLMQ = "BullMQ"
#: What a peer does of ours; the table says so beside its name.
WORDS = {
    "huey": "huey, no dedup",
    "litequeue": "litequeue, no dedup",
    "sqlite3": "bare sqlite3",
    BULLMQ: BULLMQ,
}


class Bench:
    """Runs each queue in a fresh process on a fresh file."""

    def __init__(self, root: Path, redis: int) -> None:
        self.root, self.redis, self.turn = root, redis, 0
        self.jobs = root / "jobs.json"
        jobs = [queues.Peer().item(number) for number in range(LONG + 50)]
        self.jobs.write_text(json.dumps(jobs))
        path = (ROOT, peers.python())
        self.environ = {**os.environ, "PYTHONPATH": ":".join(map(str, path))}

    def __call__(self, kind: str, workers: int, count: int) -> dict[str, float]:
        self.turn += 1
        folder = self.root / f"{self.turn}-{kind}"
        folder.mkdir()
        size = (str(workers), str(count))
        if kind == BULLMQ:
            script = str(peers.node() / "queue.mjs")
            where = (str(self.redis), folder.name)
            command = ("node", script, *where, *size, str(self.jobs))
        else:
            command = (sys.executable, queues.__file__, kind, str(folder), *size)
        ran = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        answer: dict[str, float] = json.loads(ran.stdout)
        return answer


@pytest.mark.timeout(3600)
def test_the_queue_is_quicker_than_the_peers(
    tmp_path: Path, pairs: int, table: Table
) -> None:
    """From 16 threads (BullMQ: 16 commands on their way), and from one."""
    count = SHORT if pairs < 5 else LONG
    seen: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    with servers.redis(tmp_path) as redis:
        bench = Bench(tmp_path, redis)
        for _ in range(min(max(pairs // 2, 2), 7)):
            for workers in (16, 1):
                for kind in (*queues.KINDS, BULLMQ):
                    some = count if workers > 1 else count // 3
                    for act, rate in bench(kind, workers, some).items():
                        seen[kind, workers, act].append(rate)
    report(table, seen)


def report(table: Table, seen: dict[tuple[str, int, str], list[float]]) -> None:
    wanted = {(BULLMQ, 16, "put"): (1.5, 0.4), ("huey", 16, "take"): (1.0, 0.5)}
    wanted["huey", 1, "take"] = (1.0, 0.3)
    acts = {"put": "enqueue", "take": "claim"}
    for act in acts:
        for workers in (16, 1):
            ours = seen["pidispatch", workers, act]
            for peer, words in WORDS.items():
                name = f"(b) {acts[act]}, {workers} at once / {words}"
                theirs = seen[peer, workers, act]
                if (peer, workers, act) in wanted:
                    bounds = wanted[peer, workers, act]
                    table.at_least(*bounds, name, ours, theirs, unit="/s")
                else:
                    table.show(name, ours, theirs, unit="/s")
