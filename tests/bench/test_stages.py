"""Where the time of one acknowledgement goes: its stages, each by itself.

In this process and without sockets, so that nothing else counts. It says why (a) is
what it is: one thread of Python does all of it, and SQLite's share has no peer's.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import deliveries
import load
import pytest
import servers
from table import Table
from test_acknowledgement import FIRST
from world import SECRET

import pidispatch
from pidispatch import Answer, Asked, Edge, Intake, Reply

pytestmark = pytest.mark.bench

TOGETHER = 16
QUEUED = Reply.of(Answer(202, {"status": "queued", "jobs": ["a"]}))


class Mute:
    """A transport that goes nowhere."""

    def set_write_buffer_limits(self, high: int) -> None: ...
    def is_reading(self) -> bool:
        return True

    def write(self, data: bytes) -> None: ...


class Deaf(Edge):
    """Reads requests and answers all of them the same."""

    def start(self) -> None:
        self.asked: list[Asked] = []
        self.due: list[pidispatch._Conversation] = []
        self._ticking = True  # nobody is late here

    def take(self, conversation: pidispatch._Conversation, asked: Asked) -> None:
        self.asked.append(asked)
        self.due.append(conversation)

    def read(self, requests: Sequence[bytes]) -> None:
        """On one connection, which stays."""
        talk = pidispatch._Conversation(self)
        talk.connection_made(Mute())
        for request in requests:
            talk.data_received(request)
            self.due.pop().go_on(QUEUED)


def spent(do: Callable[[Any], object], items: Iterable[Any]) -> float:
    """Microseconds of CPU for each."""
    waiting = list(items)
    began = time.process_time()
    for item in waiting:
        do(item)
    return (time.process_time() - began) / len(waiting) * 1e6


def admitted(
    store: pidispatch.Store, work: Sequence[tuple[pidispatch.Delivery, Any]]
) -> tuple[float, float, float]:
    """CPU of the statements and of the commits, and how long these took."""
    statements = commits = waited = 0.0
    for at in range(0, len(work), TOGETHER):
        with store.group():
            began = time.process_time()
            for delivery, jobs in work[at : at + TOGETHER]:
                assert store.admit(delivery, jobs).status == "queued"
            statements += (ended := time.process_time()) - began
            begun = time.perf_counter()
        commits += time.process_time() - ended
        waited += time.perf_counter() - begun
    each = 1e6 / len(work)
    return statements * each, commits * each, waited * each


def test_where_the_time_of_an_acknowledgement_goes(
    tmp_path: Path, pairs: int, table: Table
) -> None:
    count = 320 if pairs < 5 else 3_200
    rule = {"type": "label", "any": [servers.LABEL]}
    file = tmp_path / "triggers.json"
    run = {"kind": "github", "flow": "fix-issue"}
    file.write_text(json.dumps({"triggers": [{"on": rule, "run": run}]}))
    given = {"WEBHOOK_SECRET": SECRET, "GITHUB_PAT": "x"}
    settings = pidispatch.load_settings(given, None)
    store = pidispatch.Store(tmp_path / "q.db")
    forges = pidispatch.forges_of(settings)
    rules = pidispatch.TriggersFile(file, forges)
    edge = Deaf(Intake(forges, rules, store, 0), "127.0.0.1", 0)
    edge.start()
    with servers.fake_forge() as (_, repo):
        body = deliveries.labeled_body(repo)
    requests = load.requests(body, SECRET.encode(), FIRST, count)
    forge, took = forges["github"], {}
    took["HTTP"] = spent(edge.read, [requests]) / count
    assert len(edge.asked) == count
    took["verify"] = spent(lambda a: forge.verify(a.headers, a.body), edge.asked)
    events = [forge.parse(asked.headers, asked.body) for asked in edge.asked]
    took["parse"] = spent(lambda a: forge.parse(a.headers, a.body), edge.asked)
    match = pidispatch.judge(rules.rules, events[0], "1")
    assert isinstance(match, pidispatch.Match)
    took["match"] = spent(
        lambda event: (
            pidispatch.judge(rules.rules, event, "1"),
            pidispatch.fan_out(match, event),
        ),
        events,
    )
    shas = [hashlib.sha256(asked.body).hexdigest() for asked in edge.asked]
    work = [
        (
            pidispatch.Delivery(
                id=pidispatch.set_id(event.forge, event.delivery),
                event=event,
                body_sha=sha,
                received=time.time(),
            ),
            pidispatch.fan_out(match, event),
        )
        for event, sha in zip(events, shas, strict=True)
    ]
    took["SQL"], took["COMMIT"], waited = admitted(store, work)
    edge.stop()
    store.close()
    said = ", ".join(f"{stage} {micros:.0f}" for stage, micros in took.items())
    table.note(
        f"(a) one acknowledgement without sockets, us of CPU: {said} "
        f"({waited:.0f} by the wall, {TOGETHER} in a commit)"
    )
    assert all(micros > 0 for micros in took.values())
