"""How many jobs a second are durably put into the queue and taken out of it."""

from __future__ import annotations

import contextlib
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

SHORT, LONG = 48, 1500
BULLMQ = "BullMQ"
#: What a peer does of ours; the table says so beside its name.
WORDS = {
    "huey": "huey, no dedup",
    "litequeue": "litequeue, no dedup",
    "sqlite3": "bare sqlite3",
    BULLMQ: "BullMQ, by jobId (fsync always)",
    "pidispatch": "ours from threads",
}
#: Beside one event loop stands ours: what came meanwhile is put in together.
RECEIVER = {BULLMQ, "pidispatch"}


class Bench:
    """Runs each queue in a fresh process on a fresh file."""

    def __init__(self, root: Path, redis: int) -> None:
        self.root, self.redis, self.turn = root, redis, 0
        self.jobs = root / "jobs.json"
        jobs = [queues.Peer().item(number) for number in range(2 * LONG)]
        self.jobs.write_text(json.dumps(jobs))
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT)}

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
            if kind in ("huey", "litequeue"):
                self.environ["PYTHONPATH"] = f"{ROOT}:{peers.python()}"
        ran = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        answer: dict[str, float] = json.loads(ran.stdout)
        return answer


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("peer", WORDS)
def test_the_queue_is_quicker_than_the_peers(
    peer: str, tmp_path: Path, pairs: int, table: Table
) -> None:
    """From 16 threads (BullMQ: 16 commands on their way), and from one."""
    own = "receiver" if peer in RECEIVER else "pidispatch"
    count = SHORT if pairs < 5 else LONG
    seen: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(servers.redis(tmp_path)) if peer == BULLMQ else 0
        bench = Bench(tmp_path, redis)
        for _ in range(min(max(pairs // 2, 2), 5)):
            for workers in (16, 1):
                for kind in (own, peer):
                    some = count if workers > 1 else count // 3
                    for act, rate in bench(kind, workers, some).items():
                        seen[kind, workers, act].append(rate)
    report(table, own, peer, seen)


#: How much quicker we want to be, and what is a regression for sure.
WANTED = {
    (BULLMQ, 16, "put"): (1.5, 0.1),
    ("huey", 16, "take"): (1.0, 0.1),
    ("huey", 1, "take"): (1.0, 0.1),
}


def report(
    table: Table, own: str, peer: str, seen: dict[tuple[str, int, str], list[float]]
) -> None:
    for act, word in (("put", "enqueue"), ("take", "claim")):
        for workers in (16, 1):
            ours, theirs = (seen[kind, workers, act] for kind in (own, peer))
            name = f"(b) {word}, {workers} at once / {WORDS[peer]}"
            if bounds := WANTED.get((peer, workers, act)):
                table.at_least(*bounds, name, ours, theirs, unit="/s")
            else:
                table.show(name, ours, theirs, unit="/s")
