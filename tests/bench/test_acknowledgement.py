"""How many deliveries a second are acknowledged, and how long each waits.

Ours is on the disk when it is acknowledged, and so is BullMQ's job on a Redis with
`appendfsync always`; Debian's `webhook` keeps nothing and starts a process.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deliveries
import pytest
import servers
from table import Table

pytestmark = [pytest.mark.bench, pytest.mark.docker]

CONNECTIONS = 16
#: Deliveries of a round, for each server.
SHORT, LONG = 400, 4000
FIRST = 1_000_001


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[tuple[Any, list[servers.Server]]]:
    """The load and the servers, ours first."""
    with contextlib.ExitStack() as stack:
        forge, repo = stack.enter_context(servers.fake_forge())
        loader = servers.Loader(tmp_path, deliveries.labeled_body(repo))
        stack.callback(loader.close)
        yield (
            loader,
            [
                stack.enter_context(servers.pidispatch_serve(tmp_path, forge)),
                stack.enter_context(servers.bullmq(tmp_path)),
                stack.enter_context(servers.webhook(tmp_path)),
                stack.enter_context(servers.ceiling(tmp_path)),
            ],
        )


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[int(len(values) * part)] * 1000


@pytest.mark.timeout(1800)
def test_acknowledgements_are_quicker_than_the_peers(
    crowd: Any, pairs: int, table: Table
) -> None:
    """Rounds of deliveries, one server after the other, the same bytes for each."""
    loader, all_of_them = crowd
    count = SHORT if pairs < 5 else LONG
    seen: dict[str, dict[str, list[float]]] = {
        server.name: {"rate": [], "p50": [], "p99": []} for server in all_of_them
    }
    for server in all_of_them:  # warm: caches, compilers, first connections
        loader(server.port, FIRST, 100, CONNECTIONS)
        server.settle()
    for turn in range(max(pairs // 2, 2)):
        first = FIRST + 100 + turn * count
        for server in all_of_them:
            answer = loader(server.port, first, count, CONNECTIONS)
            server.settle()
            assert set(answer["answers"]) <= {"200", "202"}, (server.name, answer)
            seen[server.name]["rate"].append(count / answer["seconds"])
            seen[server.name]["p50"].append(percentile(answer["took"], 0.5))
            seen[server.name]["p99"].append(percentile(answer["took"], 0.99))
    wanted = 100 + count * max(pairs // 2, 2)
    kept = {server.name: server.kept() for server in all_of_them}
    assert kept["pidispatch"] == kept["bullmq"] == wanted, kept
    report(table, seen)


def report(table: Table, seen: dict[str, dict[str, list[float]]]) -> None:
    ours, rate = seen["pidispatch"], "acks/s, 16 connections"
    for peer, more, gross in (("bullmq", 1.3, 0.3), ("webhook", 2.0, 0.3)):
        theirs = seen[peer]
        name = {"bullmq": "Node, octokit, BullMQ"}.get(peer, peer)
        table.at_least(
            more, gross, f"(a) {rate} / {name}", ours["rate"], theirs["rate"], unit="/s"
        )
        table.show(f"(a) p50 / {name}", ours["p50"], theirs["p50"], unit="ms")
        table.at_most(
            0.8, 3, f"(a) p99 / {name}", ours["p99"], theirs["p99"], unit="ms"
        )
    reached = statistics.median(seen["ceiling"]["rate"])
    table.note(
        f"(a) the load alone, against a server that does nothing: {reached:,.0f}/s"
    )
