"""Whether the queue stays as quick with a month of jobs behind it."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import history
import pytest
import queues
from table import Table

import pidispatch

pytestmark = pytest.mark.bench

SHORT, LONG = (1_000, 20_000), (10_000, 100_000, 1_000_000)
#: How often each is done in a round.
TIMES = 20


class Month:
    """A queue with `count` jobs behind it, and what is timed on it."""

    def __init__(self, folder: Path, count: int) -> None:
        folder.mkdir()
        history.write(folder / queues.OURS, count)
        self.folder, self.queue = folder, queues.Pidispatch(folder)
        self.store, self.count = self.queue.store, count
        self.numbers = itertools.count(history.FIRST + count + 1)
        scope = pidispatch.ScopeRow(scope="github:octo/*", concurrent=100_000)
        self.limits = pidispatch.Limits((scope,))
        self.caps = pidispatch.Caps(25, None, None, "UTC")
        self.panel = self._panel()

    def _panel(self) -> pidispatch.Panel:
        settings = pidispatch.Settings(
            db=self.store.path, state_dir=self.folder, panel_port=0
        )
        path = self.folder / "triggers.json"
        on = {"type": "label", "any": ["pi:fix"]}
        rule = {"on": on, "run": {"kind": "github", "flow": "fix-issue"}}
        path.write_text(json.dumps({"triggers": [rule]}))
        triggers = pidispatch.TriggersFile(path, {"github"})
        return pidispatch.Panel(settings, self.store, triggers, cast(Any, None))

    def close(self) -> None:
        self.panel.stop()
        self.store.close()

    def acts(self) -> dict[str, Callable[[], object]]:
        fresh = [self.queue.item(n) for n in itertools.islice(self.numbers, TIMES)]
        known = [self.queue.item(history.FIRST + n + 1) for n in range(TIMES)]
        new, again = iter(fresh), iter(known)
        return {
            "admit a new one": lambda: self.put(next(new), "queued"),
            "admit a duplicate": lambda: self.put(next(again), "duplicate"),
            "claim": lambda: self.claim(pidispatch.NO_LIMITS),
            "claim, limited scope": lambda: self.claim(self.limits),
            "runs": lambda: self.store.runs(50),
            "status": lambda: self.store.status(self.caps, time.time()),
            "panel's home": lambda: self.panel.home(cast(Any, None)),
        }

    def claim(self, limits: pidispatch.Limits) -> None:
        assert self.store.claim(limits)

    def put(self, item: Any, wanted: str) -> None:
        assert self.store.admit(*item).status == wanted


def milliseconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1000


def one_round(months: list[Month]) -> dict[tuple[str, int], float]:
    """Milliseconds of each act by the size: the median of some, file after file."""
    acts = {month.count: month.acts() for month in months}
    took: dict[tuple[str, int], list[float]] = defaultdict(list)
    for name in ACTS:
        for turn in range(FEW.get(name, TIMES)):
            # another one first each time: what follows one of its own kind is quicker
            for at in range(len(months)):
                count = months[(turn + at) % len(months)].count
                took[name, count].append(milliseconds(acts[count][name]))
    return {key: statistics.median(all_) for key, all_ in took.items()}


#: Each claim takes one of the new ones; the last two read every job of a window.
FEW = {"claim": 9, "claim, limited scope": 9, "status": 3, "panel's home": 3}
WANTED = ("admit a new one", "admit a duplicate", "claim", "claim, limited scope")
ACTS = (*WANTED, "runs", "status", "panel's home")


@pytest.fixture
def months(tmp_path: Path, pairs: int) -> Iterator[list[Month]]:
    with contextlib.ExitStack() as stack:
        made = []
        for count in SHORT if pairs < 5 else LONG:
            made.append(Month(tmp_path / str(count), count))
            stack.callback(made[-1].close)
        yield made


@pytest.mark.timeout(3600)
def test_claims_and_admissions_are_as_quick_after_a_full_month(
    months: list[Month], pairs: int, table: Table
) -> None:
    """The largest file against the smallest, in turns; with and without fsync."""
    rounds = min(max(pairs // 2, 2), 7)
    for words, level in (("", "FULL"), (", no fsync", "OFF")):
        seen: dict[tuple[str, int], list[float]] = defaultdict(list)
        for month in months:
            month.store._connection.execute(f"PRAGMA synchronous = {level}")
        one_round(months)  # warm
        for _ in range(rounds):
            for key, ms in one_round(months).items():
                seen[key].append(ms)
        report(table, words, seen, [month.count for month in months])


def report(
    table: Table,
    words: str,
    seen: dict[tuple[str, int], list[float]],
    counts: list[int],
) -> None:
    for name in ACTS:
        for count in counts[1:]:
            ours, peer = seen[name, count], seen[name, counts[0]]
            said = f"(c) {name}{words}, {count:,} jobs behind / {counts[0]:,}"
            if name in WANTED and count == counts[-1] and not words:
                table.at_most(1.5, 5, said, ours, peer, unit="ms")
            elif name in WANTED or not words:
                table.show(said, ours, peer, unit="ms")
