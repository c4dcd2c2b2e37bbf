"""How many deliveries a second are acknowledged, and how long each waits.

Ours is on the disk when it is acknowledged, and so is BullMQ's job on a Redis with
`appendfsync always`; Debian's `webhook` keeps nothing and starts a process.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deliveries
import pytest
import servers
from table import Table

pytestmark = [pytest.mark.bench, pytest.mark.docker]

CONNECTIONS = 16
#: Deliveries of a round, for each server; and those before the first.
SHORT, LONG, WARM = 400, 4000, 100
FIRST = 1_000_001
#: The peers: how each is started, its words, the throughput wanted against it.
PEERS: dict[str, tuple[Callable[..., AbstractContextManager[Any]], str, float]] = {
    "bullmq": (servers.bullmq, "Node, octokit, BullMQ (fsync always)", 1.3),
    "webhook": (servers.webhook, "Debian's webhook (keeps nothing)", 2.0),
}


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[int(len(values) * part)]


@dataclass
class Seen:
    """What the rounds of one server came to: acks a second, milliseconds."""

    rate: list[float] = field(default_factory=list)
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)

    def add(self, answer: Any) -> None:
        took = [seconds * 1000 for seconds in answer["took"]]
        self.rate.append(len(took) / answer["seconds"])
        self.p50.append(percentile(took, 0.5))
        self.p99.append(percentile(took, 0.99))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("peer", PEERS)
def test_acknowledgements_are_quicker_than_the_peers(
    peer: str, tmp_path: Path, pairs: int, table: Table
) -> None:
    """Rounds of deliveries, one server after the other, the same bytes for each."""
    count = SHORT if pairs < 5 else LONG
    rounds = max(pairs // 2, 2)
    with contextlib.ExitStack() as stack:
        forge, repo = stack.enter_context(servers.fake_forge())
        loader = servers.Loader(tmp_path, deliveries.labeled_body(repo))
        stack.callback(loader.close)
        start = PEERS[peer][0]
        crowd = [
            stack.enter_context(server)
            for server in (
                servers.pidispatch_serve(tmp_path, forge),
                start(tmp_path),
                servers.ceiling(tmp_path),
            )
        ]
        for server in crowd:
            loader(server.port, FIRST, WARM, CONNECTIONS)
            server.settle()
        seen = [Seen() for _ in crowd]
        for turn in range(rounds):
            first = FIRST + WARM + turn * count
            for server, its in zip(crowd, seen, strict=True):
                answer = loader(server.port, first, count, CONNECTIONS)
                server.settle()
                assert answer["answers"] == {server.word: count}, server.name
                its.add(answer)
        kept = [server.kept() for server in crowd if server.kept]
        assert set(kept) == {WARM + count * rounds}, kept
    report(table, peer, *seen)


def report(table: Table, peer: str, ours: Seen, theirs: Seen, ceiling: Seen) -> None:
    _, words, more = PEERS[peer]
    name = f"(a) acks, {CONNECTIONS} connections / {words}"
    table.at_least(more, 0.1, name, ours.rate, theirs.rate, unit="/s")
    table.show(f"(a) their p50 / {words}", ours.p50, theirs.p50, unit="ms")
    table.at_most(0.8, 15, f"(a) their p99 / {words}", ours.p99, theirs.p99, unit="ms")
    reached = statistics.median(ceiling.rate)
    table.note(f"(a) the load, on a server that does nothing: {reached:,.0f}/s")
