"""Section dispatch: the ladder's order, the verdicts, retries and recovery.

The engine here is a stand-in that records what it was asked; the real one is driven
by test_main_path.py.
"""

from __future__ import annotations

import ast
import errno
import itertools
import json
import os
import sqlite3
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import docker
import msgspec
import pytest
from conftest import FakeClock, Maker, record_of
from hypothesis import given
from hypothesis import strategies as st
from world import World, world

import pidispatch
import pidispatch_demo as demo
from pidispatch import BoxExit, Refused, Result

CAPS = pidispatch.Caps(25, None, None, "UTC")


# -- the verdict ----------------------------------------------------------------

DONE = Result(0, None, 3, 1)
PAID = pidispatch.Tokens(1, 1, 0, 0, 2, 0.1)


@pytest.mark.parametrize(
    ("ended", "stopped", "verdict"),
    [
        (BoxExit(code=0, result=DONE), None, ("completed", None)),
        (BoxExit(code=0), None, ("failed", "no-result")),
        (BoxExit(code=0, result=Result(2, "x")), None, ("failed", "no-result")),
        (BoxExit(code=1), None, ("retry", "infra")),
        (BoxExit(code=1, result=DONE), None, ("retry", "infra")),
        (
            BoxExit(code=2, result=Result(2, "turn-budget")),
            None,
            ("policy", "turn-budget"),
        ),
        (
            BoxExit(code=2, result=Result(2, "made up")),
            None,
            ("policy", "runner-policy"),
        ),
        (BoxExit(code=2), None, ("policy", "runner-policy")),
        (BoxExit(code=137, oom=True), None, ("policy", "oom-killed")),
        (BoxExit(code=137), None, ("failed", "unexpected-exit")),
        (BoxExit(code=None), None, ("failed", "lost")),
        (BoxExit(code=143), None, ("failed", "unexpected-exit")),
        (BoxExit(code=127), None, ("unstarted", None)),
        (BoxExit(code=126), None, ("unstarted", None)),
        (BoxExit(code=125), None, ("unstarted", None)),
        (BoxExit(code=127, result=DONE), None, ("failed", "unexpected-exit")),
        (BoxExit(code=127, tokens=PAID), None, ("failed", "unexpected-exit")),
        (
            BoxExit(code=0, result=DONE, budget_spent=True),
            None,
            ("policy", "token-budget"),
        ),
        (BoxExit(code=1, budget_spent=True), None, ("policy", "token-budget")),
        (BoxExit(code=0, result=DONE), "timeout", ("policy", "timeout")),
        (BoxExit(code=143), "gate-lost", ("retry", "gate-lost")),
        (BoxExit(code=143), "operator-cancel", ("policy", "operator-cancel")),
        (BoxExit(code=137), "shutdown", ("failed", "shutdown")),
        (
            BoxExit(code=0, result=DONE, outbox_refused=True),
            None,
            ("policy", "outbox-refused"),
        ),
    ],
)
def test_a_box_is_judged_by_our_stop_the_gate_the_engine_then_its_code(
    ended: BoxExit, stopped: str | None, verdict: tuple[str, str | None]
) -> None:
    assert pidispatch.verdict_of(ended, stopped) == verdict


@given(
    st.integers(0, 255),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, "timeout", "operator-cancel", "shutdown"]),
)
def test_only_exit_one_is_ever_retried(
    code: int, oom: bool, spent: bool, stopped: str | None
) -> None:
    """A determinate answer is never paid for twice."""
    ended = BoxExit(code=code, oom=oom, budget_spent=spent)
    verdict = pidispatch.verdict_of(ended, stopped)
    if verdict.outcome == "retry":
        assert (code, oom, spent, stopped) == (1, False, False, None)


# -- the gate's meter and the runner's line ---------------------------------------


def call(n: int, total: int, **forks: Any) -> str:
    figures = {"input": total, "output": 0, "cacheRead": 0, "cacheWrite": 0}
    running = {"calls": n, **figures, "total": total, "cost": 0.5, "forks": forks}
    return json.dumps({"event": "call", "n": n, "sum": running})


def test_the_last_running_total_counts_and_noise_is_no_matter() -> None:
    lines = ["", "noise", "[1]", call(1, 10), "{", call(2, 25), "null"]
    tokens, forks, spent = pidispatch.meter_of(lines)
    assert tokens == pidispatch.Tokens(25, 0, 0, 0, 25, 0.5)
    assert forks == pidispatch.Forks(0, 0, None)
    assert not spent


def test_forks_are_summed_and_a_spent_budget_is_seen() -> None:
    rows = {"c/a": {"total": 5, "cost": 0.1}, "c/b": {"total": 7, "cost": 0.0}}
    refused = json.dumps({"event": "refused", "reason": "budget"})
    tokens, forks, spent = pidispatch.meter_of([call(1, 12, **rows), refused])
    assert tokens
    assert forks == pidispatch.Forks(2, 12, 0.1)
    assert spent


def test_a_cost_without_one_of_its_prices_is_no_cost_rather_than_too_low() -> None:
    rows = {"c/a": {"total": 5, "cost": 0.1}, "c/b": {"total": 7, "cost": None}}
    _, forks, _ = pidispatch.meter_of([call(1, 12, **rows)])
    assert forks == pidispatch.Forks(2, 12, None)
    free = {"c/a": {"total": 5, "cost": 0.0}}
    assert pidispatch.meter_of([call(1, 5, **free)])[1] == pidispatch.Forks(1, 5, 0.0)


def test_a_gate_that_was_started_again_adds_to_its_first_life() -> None:
    listening = json.dumps({"event": "listening", "port": 8080})
    fork = {"c/a": {"total": 5, "cost": 0.1}}
    lines = [listening, call(1, 10), call(2, 25, **fork)]
    lines += [listening, call(1, 7, **fork), "noise"]
    tokens, forks, _ = pidispatch.meter_of(lines)
    assert tokens == pidispatch.Tokens(32, 0, 0, 0, 32, 1.0)
    assert forks == pidispatch.Forks(2, 10, 0.2)


def test_no_call_is_no_figure_rather_than_zero() -> None:
    assert pidispatch.meter_of(['{"event":"listening","port":1}']) == (
        None,
        None,
        False,
    )


def test_the_runners_last_exit_line_counts_and_a_wrong_one_is_none() -> None:
    lines = ['{"event":"exit","code":1}', '{"event":"exit","code":0,"turns":2}', "x"]
    assert pidispatch.result_of(lines) == Result(0, None, 2, 0)
    assert pidispatch.result_of(['{"event":"exit","code":"zero"}']) is None
    assert pidispatch.result_of([]) is None


# -- what the gate is told ---------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "outside"),
    [
        ("http://localhost:11434/v1", "http://host.docker.internal:11434/v1"),
        ("http://127.0.0.1/v1", "http://host.docker.internal/v1"),
        ("http://[::1]:80/v1", "http://host.docker.internal:80/v1"),
        ("http://localhost.example/v1", "http://localhost.example/v1"),
        ("https://api.example.com/v1", "https://api.example.com/v1"),
    ],
)
def test_a_loopback_provider_means_the_engines_host(url: str, outside: str) -> None:
    assert pidispatch.outside_url(url) == outside
    assert pidispatch.gate_url(outside) == "http://gate:8080/" + outside.split("//")[1]


# -- a stand-in engine --------------------------------------------------------------


@dataclass
class FakeBox:
    """A box that ends as it was told to."""

    engine: FakeEngine
    spec: pidispatch.BoxSpec

    def start(self, inputs: Mapping[str, bytes | Path]) -> None:
        self.engine.log.append("start")
        if self.engine.start_error:
            raise self.engine.start_error
        self.engine.inputs.append(dict(inputs))

    def started(self) -> bool:
        if self.engine.unknown:
            raise self.engine.unknown.pop()
        return self.engine.started

    def wait(self, seconds: int) -> bool:
        self.engine.waited()
        return self.engine.ends.is_set()

    def tend(self) -> bool:
        return self.engine.gate_stands

    def stop(self) -> None:
        self.engine.log.append("stop")

    def collect(self, into: Path) -> BoxExit:
        return self.engine.exits.pop(0)

    def transcript(self) -> bytes | None:
        return self.engine.transcript

    def given(self) -> bytes | None:
        found: bytes = self.engine.inputs[-1]["job.json"]
        return found

    def log(self) -> bytes:
        return b"line\n" * 3

    def remove(self) -> None:
        self.engine.log.append("remove")


@dataclass
class FakeEngine:
    """Images by tag, exits in order, and a log of what was asked."""

    images: dict[str, pidispatch.Image]
    exits: list[BoxExit] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    running: dict[str, FakeBox] = field(default_factory=dict)
    start_error: Exception | None = None
    #: What the engine says of a start that failed, and how often it does not say.
    started: bool = False
    unknown: list[Exception] = field(default_factory=list)
    ends: threading.Event = field(default_factory=threading.Event)
    models: dict[str, Any] = field(default_factory=dict)
    gate_stands: bool = True
    local: bool = True
    isolation: str | None = "proved"
    looks: int = 0
    transcript: bytes | None = None
    waited: Callable[[], object] = lambda: None

    away: Exception | None = None

    def answer(self) -> None:
        if self.away:
            raise self.away

    def image(self, tag: str) -> pidispatch.Image | None:
        return self.images.get(tag)

    def catalogue(self, image: pidispatch.Image) -> Mapping[str, Any]:
        return self.models

    def open(self, spec: pidispatch.BoxSpec) -> FakeBox:
        self.log.append("open")
        return FakeBox(self, spec)

    def adopt(self, job: str) -> pidispatch.Box | None:
        return self.running.get(job)

    def isolates(self, proven: str | None) -> str | None:
        self.looks += proven is None or proven != self.isolation
        return self.isolation

    def disk(self) -> Path | None:
        return None

    def sweep(self, keep: frozenset[str], before: float) -> int:
        self.log.append(f"sweep {sorted(keep)}")
        return 0


class FakeForge:
    """A forge that notes what it was told."""

    kind: pidispatch.ForgeKind = "github"

    def __init__(self) -> None:
        self.comments: list[tuple[str, str]] = []
        self.token_error: Exception | None = None
        self.asked = 0
        self.url = "https://forge.example"
        self.is_protected: bool | None = True
        self.no: Exception | None = None
        self.token = "y-token"

    def credential(self, repo: str) -> pidispatch.Credential:
        self.asked += 1
        if self.token_error:
            raise self.token_error
        return pidispatch.Credential("x", self.token)

    @property
    def api(self) -> str:
        return "https://api.forge.example/v1"

    def clone_url(self, repo: str) -> str:
        return f"{self.url}/{repo}.git"

    def default_branch(self, repo: str) -> str:
        if self.no:
            raise self.no
        return "main"

    def protected(self, repo: str, branch: str) -> bool:
        assert branch == "main"
        if self.is_protected is None:
            raise pidispatch.InfraError("could not tell")
        return self.is_protected

    def agent_environment(self, repo: str) -> dict[str, str]:
        return {"FORGE_TOKEN": self.token}

    def comment(
        self, repo: str, target: pidispatch.Target, text: str, marker: str
    ) -> None:
        if marker not in [seen for seen, _ in self.comments]:
            self.comments.append((marker, text))


def image(capabilities: str = "replicas,gate", **labels: str) -> pidispatch.Image:
    values = {pidispatch.LABEL + "capabilities": capabilities}
    values |= {pidispatch.LABEL + k: v for k, v in labels.items()}
    return pidispatch.Image("pi-job:latest", "sha256:1", values, 1001, 1001)


@dataclass
class Bench:
    """A dispatcher with stand-ins around it and a real store inside."""

    dispatcher: pidispatch.Dispatcher
    store: pidispatch.Store
    engine: FakeEngine
    forge: FakeForge
    maker: Maker
    clock: FakeClock

    def run(self, replicas: int | None = None, **run: Any) -> list[pidispatch.RunRow]:
        delivery = self.maker.delivery()
        self.store.admit(delivery, self.maker.jobs(delivery.event, replicas, **run))
        return self.work()

    def work(self) -> list[pidispatch.RunRow]:
        while claimed := self.store.claim():
            self.dispatcher.run(claimed)
        return self.store.runs(9)

    def change(self, **settings: Any) -> None:
        old = self.dispatcher.settings
        self.dispatcher.settings = msgspec.structs.replace(old, **settings)

    def used(self) -> int:
        return self.store.status(CAPS, self.clock()).used

    def tokens(self) -> int:
        return self.store.tokens_used(CAPS, self.clock())


@pytest.fixture
def bench(
    tmp_path: Path,
    store: pidispatch.Store,
    clock: FakeClock,
    maker: Maker,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Bench]:
    engine = FakeEngine({"pi-job:latest": image()})
    engine.ends.set()
    forge = FakeForge()
    settings = pidispatch.Settings(
        state_dir=tmp_path / "state", keys={"anthropic": "key"}, model="m"
    )
    dispatcher = pidispatch.Dispatcher(
        settings,
        store,
        engine,
        {"github": forge},  # type: ignore[dict-item]
        clock=clock,
        steady=clock,
        new_token=lambda: "token",
    )

    def prepared(*args: Any) -> pidispatch.Prepared:
        engine.log.append("prepare")
        pack = tmp_path / "base.pack"
        pack.write_bytes(b"")
        return pidispatch.Prepared(
            "b" * 40, "main", None, None, pack, b"", {"SKILL.md": b"x"}
        )

    monkeypatch.setattr(dispatcher.mirrors, "prepare", prepared)
    monkeypatch.setattr(dispatcher.mirrors, "release", lambda job: None)
    monkeypatch.setattr(
        pidispatch, "publish_job", lambda *args: pidispatch.Published(None, None)
    )
    yield Bench(dispatcher, store, engine, forge, maker, clock)


PUBLISH = pidispatch.publish_job
OK = BoxExit(code=0, result=DONE, tokens=pidispatch.Tokens(1, 1, 0, 0, 2, 0.1))


def test_a_job_climbs_runs_is_recorded_and_removed(bench: Bench) -> None:
    bench.engine.exits.append(OK)
    [run] = bench.run()
    assert (run.state, run.tokens) == ("completed", 2)
    assert bench.engine.log == ["open", "prepare", "start", "remove"]
    assert bench.used() == 1
    assert sorted(bench.engine.inputs[0]) == [
        "base.pack",
        "event.json",
        "job.json",
        "prompt.md",
        "shallow",
        "skill/fix-issue/SKILL.md",
    ]


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("absent", {"image": "none:x"}, {}, "job-image-missing"),
    ("forges", {}, {"image": image(forges="gitlab")}, "job-image-forge-unsupported"),
    ("no forges", {}, {"image": image(forges="")}, "job-image-forge-unsupported"),
    ("bare", {"replicas": 2}, {"image": image("")}, "job-image-replicas-unsupported"),
    (
        "gate only",
        {"replicas": 2},
        {"image": image("gate")},
        "job-image-replicas-unsupported",
    ),
    (
        "tools",
        {"excludeTools": ("bash",)},
        {},
        "job-image-exclude-tools-unsupported",
    ),
    ("provider", {"provider": "nobody"}, {}, "provider-unconfigured"),
    ("key", {"provider": "openai"}, {}, "provider-unconfigured"),
    ("resume", {"resume": True}, {}, "sessions-dir-unset"),
    ("agent", {"publish": "agent"}, {}, "job-image-forge-unsupported"),
    (
        "agent, open branch",
        {"publish": "agent"},
        {"image": image(forges="github"), "protected": False},
        "unprotected-branch",
    ),
    (
        "agent, http",
        {"publish": "agent"},
        {"image": image(forges="github"), "url": "http://forge"},
        "forge-out-of-reach",
    ),
    (
        "agent, loopback",
        {"publish": "agent"},
        {"image": image(forges="github"), "url": "https://localhost:8443"},
        "forge-out-of-reach",
    ),
    (
        "agent, no repository",
        {"publish": "agent"},
        {"image": image(forges="github"), "no": pidispatch.Rejected("404", 404)},
        "repository-unavailable",
    ),
    (
        "agent, bad token",
        {"publish": "agent"},
        {"image": image(forges="github"), "no": pidispatch.Rejected("401", 401)},
        "forge-token-unavailable",
    ),
    (
        "model",
        {"model": "x"},
        {"models": {"anthropic": {"models": [{"id": "m"}]}}},
        "model-unknown",
    ),
]


@pytest.mark.parametrize(
    ("run", "world", "reason"),
    [row[1:] for row in REFUSED],
    ids=[row[0] for row in REFUSED],
)
def test_a_refusal_costs_nothing_and_is_said_once(
    bench: Bench, run: dict[str, Any], world: dict[str, Any], reason: str
) -> None:
    if "image" in world:
        bench.engine.images["pi-job:latest"] = world["image"]
    bench.engine.models = world.get("models", {})
    bench.forge.url = world.get("url", bench.forge.url)
    bench.forge.is_protected = world.get("protected", True)
    bench.forge.no = world.get("no")
    rows = bench.run(**run)
    assert {(row.state, row.reason) for row in rows} == {("policy", reason)}
    assert bench.engine.log == []
    assert bench.forge.asked == 0, "no token is taken"
    assert bench.used() == 0
    assert len(bench.forge.comments) == 1, "one comment for the whole set"
    marker, text = bench.forge.comments[0]
    assert reason in text
    assert text.endswith(marker + "\n")
    assert bench.store.claim() is None


def test_a_gate_image_without_a_gate_is_refused(bench: Bench) -> None:
    bench.dispatcher.settings = msgspec.structs.replace(
        bench.dispatcher.settings, gate_image="other"
    )
    bench.engine.images["other"] = image("replicas")
    [run] = bench.run()
    assert run.reason == "gate-image-missing"
    assert bench.engine.log == []


def test_a_spent_cap_is_seen_before_anything_is_minted(bench: Bench) -> None:
    bench.dispatcher.settings = msgspec.structs.replace(
        bench.dispatcher.settings, daily_cap=1
    )
    bench.engine.exits.append(OK)
    rows = bench.run(2)
    assert [(r.state, r.reason) for r in reversed(rows)] == [
        ("completed", None),
        ("policy", "over-budget"),
    ]
    assert bench.engine.log.count("open") == 1
    assert bench.used() == 1


def test_a_cap_spent_meanwhile_refuses_at_the_reservation_and_removes_the_box(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.store, "peek_caps", lambda *asked: None)
    bench.dispatcher.settings = msgspec.structs.replace(
        bench.dispatcher.settings, daily_cap=1
    )
    bench.engine.exits.append(OK)
    rows = bench.run(2)
    assert rows[0].reason == "over-budget"
    assert bench.engine.log[-1] == "remove"
    assert bench.engine.log.count("start") == 1


@dataclass
class Scene:
    """How a gate comes to refuse a set of two: what is spoiled, what the rule says."""

    spoil: Callable[[Bench, pytest.MonkeyPatch], object] = lambda bench, patch: None
    run: dict[str, Any] = field(default_factory=dict)
    before: bool = False

    @classmethod
    def cap(cls, *, before: bool = False, limits: Any = None, **settings: Any) -> Scene:
        """A cap; `before` is whether a slot is used by an earlier job."""

        def spoil(bench: Bench, patch: pytest.MonkeyPatch) -> None:
            bench.change(**settings)
            if limits:
                bench.dispatcher.limits = lambda: limits

        return cls(spoil, before=before)


def images(value: pidispatch.Image | None) -> Scene:
    def spoil(bench: Bench, patch: pytest.MonkeyPatch) -> None:
        bench.engine.images = {"pi-job:latest": value} if value else {}

    return Scene(spoil)


def raising(name: str, error: Exception) -> Scene:
    def broken(*args: object) -> pidispatch.Prepared:
        raise error

    return Scene(
        lambda bench, patch: patch.setattr(bench.dispatcher.mirrors, name, broken)
    )


def no_skill(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    whole = bench.dispatcher.mirrors.prepare

    def bare(*args: Any) -> pidispatch.Prepared:
        return msgspec.structs.replace(whole(*args), skill=None)

    patch.setattr(bench.dispatcher.mirrors, "prepare", bare)


def no_models(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    bench.engine.models = {"anthropic": {"models": [{"id": "other"}]}}


def no_token(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    bench.forge.token_error = pidispatch.Refused("forge-token-unavailable", "no token")


def agents(**forge: Any) -> Scene:
    """A rule with publish: agent on a forge like that."""

    def spoil(bench: Bench, patch: pytest.MonkeyPatch) -> None:
        bench.engine.images["pi-job:latest"] = image(forges="github")
        for name, value in forge.items():
            setattr(bench.forge, name, value)

    return Scene(spoil, {"publish": "agent"})


OF_SPOON = pidispatch.ScopeRow(scope="github:octo/spoon", day=1)
CAP_SCENES = {
    "daily-token-cap": Scene.cap(daily_token_cap=9, max_tokens=10),
    "scope-cap": Scene.cap(before=True, limits=pidispatch.Limits((OF_SPOON,))),
    "over-budget": Scene.cap(before=True, daily_cap=1),
    "soft-hold": Scene.cap(before=True, daily_cap=2, soft_hold_pct=50),
}
#: Every reason of every gate, and how it comes about.
SCENES: dict[str, dict[str, Scene]] = {
    "overlay": {"settings-overlay-invalid": Scene.cap(settings_file=Path(__file__))},
    "image": {"job-image-missing": images(None)},
    "forges": {"job-image-forge-unsupported": images(image(forges="gitlab"))},
    "capabilities": {
        "job-image-replicas-unsupported": images(image("gate")),
        "job-image-exclude-tools-unsupported": Scene(run={"excludeTools": ("bash",)}),
    },
    "provider": {
        "provider-unconfigured": Scene(run={"provider": "nobody"}),
        "model-unknown": Scene(no_models),
    },
    "gate image": {"gate-image-missing": Scene.cap(gate_image="other")},
    "isolation": {
        "engine-not-isolating": Scene(
            lambda bench, patch: patch.setattr(bench.engine, "isolation", None)
        )
    },
    "caps, a look": CAP_SCENES,
    "session": {"sessions-dir-unset": Scene(run={"resume": True})},
    "protection": {
        "forge-out-of-reach": agents(url="http://forge.example"),
        "forge-token-unavailable": agents(no=pidispatch.Rejected("no", 401)),
        "repository-unavailable": agents(no=pidispatch.Rejected("no", 404)),
        "unprotected-branch": agents(is_protected=False),
    },
    "token": {"forge-token-unavailable": Scene(no_token)},
    "box": {},
    "workspace": {
        reason: raising("prepare", pidispatch.Refused(reason, "it is so"))
        for reason in ("sha-gone", "flow-not-found", "repository-unavailable")
    },
    "flow": {"flow-not-found": Scene(no_skill, {"flow": "none"})},
    "caps, reserved": CAP_SCENES,
}


#: The gates of a forge's job; test_local.py has the one that is a folder's.
FORGE_LADDER = [gate for gate in pidispatch.LADDER if gate.serves != "local"]


def test_every_reason_of_every_gate_has_its_scene() -> None:
    assert {name: sorted(scenes) for name, scenes in SCENES.items()} == {
        gate.name: sorted(gate.reasons) for gate in FORGE_LADDER
    }


@pytest.mark.parametrize(
    ("gate", "reason"),
    [(gate, reason) for gate in FORGE_LADDER for reason in gate.reasons],
    ids=lambda part: part if isinstance(part, str) else part.name,
)
def test_a_gates_refusal_is_recorded_said_once_for_the_set_and_never_retried(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    gate: pidispatch.Gate,
    reason: str,
) -> None:
    """T51: and it uses no slot and no token, and starts no container."""
    scene = SCENES[gate.name][reason]
    if scene.before:
        bench.engine.exits.append(OK)
        bench.run()
        bench.clock.pass_(pidispatch.WINDOW_SECONDS)
    used, asked = bench.used(), bench.forge.asked
    bench.engine.log.clear()
    if gate.name == "caps, reserved":
        monkeypatch.setattr(bench.store, "peek_caps", lambda *asked: None)
    scene.spoil(bench, monkeypatch)
    rows = bench.run(2, **scene.run)[:2]
    assert {(row.state, row.reason) for row in rows} == {("policy", reason)}
    for row in rows:
        record = bench.store.run(row.id)[1]
        assert record
        assert (record.reason, record.budgetReserved, record.attempt) == (
            reason,
            False,
            0,
        )
    [(marker, text)] = bench.forge.comments
    assert reason in text
    assert text.endswith(marker + "\n")
    assert "start" not in bench.engine.log
    assert bench.used() == used
    assert bench.tokens() == 2 * used
    names = [row.name for row in pidispatch.LADDER]
    if names.index(gate.name) < names.index("token"):
        assert bench.engine.log == [], "nothing is opened or cloned"
        assert bench.forge.asked == asked, "no token is minted"
    bench.clock.pass_(40 * pidispatch.DAY)
    assert bench.store.claim() is None


def test_a_spent_cap_is_told_by_its_name_its_value_and_its_windows_end(
    bench: Bench,
) -> None:
    told: list[str] = []
    for scene in CAP_SCENES.values():
        bench.change(max_tokens=None, daily_token_cap=None, soft_hold_pct=None)
        bench.change(daily_cap=25)
        bench.dispatcher.limits = lambda: pidispatch.NO_LIMITS
        if bench.used() < scene.before:
            bench.engine.exits.append(OK)
            bench.run()
        bench.clock.pass_(pidispatch.WINDOW_SECONDS)
        scene.spoil(bench, pytest.MonkeyPatch())
        bench.run()
        told.append(bench.forge.comments[-1][1])
    end = "This day (UTC) ends at 2027-01-16T00:00:00.000Z"
    assert all(end in text and "not tried again by itself" in text for text in told)
    tokens, scope, day, hold = told
    assert "`PI_DAILY_TOKEN_CAP` is 9 tokens a day: 0 are used; this job" in tokens
    assert "reserves 10" in tokens
    named = "`day of the scope github:octo/spoon in limits.json` is 1 jobs a day: 1 are"
    assert named in scope
    assert "`PI_DAILY_CAP` is 1 jobs a day: 1 are used." in day
    assert "2 jobs a day: 1 are used, and PI_SOFT_HOLD_PCT holds from 1 on" in hold


def test_twenty_workers_race_for_five_slots_and_each_refusal_is_said(
    bench: Bench,
) -> None:
    """T51: whole jobs, from claim to record."""
    bench.change(daily_cap=5)
    bench.engine.exits += [OK] * 20
    for number in range(20):
        target = pidispatch.Target("issue", number + 1)
        bench.maker.admit(bench.store, target=target)
    gun = threading.Barrier(20)

    def work() -> None:
        claimed = bench.store.claim()
        assert claimed
        gun.wait(30)
        bench.dispatcher.run(claimed)

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    ends = [(run.state, run.reason) for run in bench.store.runs(99)]
    assert ends.count(("completed", None)) == 5
    assert ends.count(("policy", "over-budget")) == 15
    assert bench.engine.log.count("start") == 5
    assert bench.used() == 5
    assert len(bench.forge.comments) == 15


def test_a_worker_leaves_a_paused_scope_alone_and_takes_it_up_again(
    bench: Bench,
) -> None:
    pause = {"begins": "00:00", "ends": "24:00", "tz": "UTC"}
    window = pidispatch.PauseWindow(scope="github", **pause)
    bench.dispatcher.limits = lambda: pidispatch.Limits((), (window,))
    workers = pidispatch.Workers(bench.dispatcher, bench.store, 1)
    bench.engine.exits.append(OK)
    bench.maker.admit(bench.store)
    assert not workers._one()
    bench.dispatcher.limits = lambda: pidispatch.NO_LIMITS  # an edit of the file
    assert workers._one()
    [run] = bench.store.runs(9)
    assert run.state == "completed"


def test_a_job_without_a_budget_gets_what_the_day_has_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[dict[str, Any]] = []
    whole = pidispatch.gate_line

    def seen(attempt: pidispatch.Attempt) -> bytes:
        lines.append(json.loads(whole(attempt)))
        return whole(attempt)

    monkeypatch.setattr(pidispatch, "gate_line", seen)
    bench.engine.exits += [OK] * 3
    bench.run()
    for more in ({"daily_token_cap": 100}, {"max_tokens": 7}):
        bench.clock.pass_(pidispatch.WINDOW_SECONDS)
        bench.change(**more)
        bench.run()
    assert [line["budget"] for line in lines] == [None, 98, 7]


def test_a_run_that_made_no_call_frees_the_tokens_it_had_reserved(
    bench: Bench,
) -> None:
    bench.change(max_tokens=1_000)
    unseen = BoxExit(code=2, result=Result(2, "flow-not-found"))
    bench.engine.exits += [msgspec.structs.replace(unseen, metered=True), unseen]
    bench.run()
    assert bench.tokens() == 0
    bench.clock.pass_(pidispatch.WINDOW_SECONDS)
    bench.run()
    assert bench.tokens() == 1_000, "no meter, no figure: the reservation stands"


@pytest.mark.parametrize(
    "broken", ["prompt_text", "event_json", "job_file", "box_inputs"]
)
def test_a_bug_after_the_reservation_gives_slot_and_tokens_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """T51: no container started, so nothing was spent."""

    def bug(*args: object) -> object:
        raise ZeroDivisionError

    monkeypatch.setattr(pidispatch, broken, bug)
    bench.change(max_tokens=1_000)
    [run] = bench.run()
    assert (run.state, run.reason) == ("failed", "internal-error")
    record = bench.store.run(run.id)[1]
    assert record
    assert (record.budgetReserved, record.startedAt) == (False, None)
    assert (bench.used(), bench.tokens()) == (0, 0)
    assert bench.engine.log[-1] == "remove"
    assert bench.store.claim() is None


@pytest.mark.parametrize("error", [pidispatch.Refused("x", "y"), OSError("gone")])
def test_whatever_keeps_a_container_from_starting_gives_its_slot_back(
    bench: Bench, error: Exception
) -> None:
    bench.engine.start_error = error
    bench.run()
    assert bench.used() == 0


@pytest.mark.parametrize("place", ["_over", "_start", "_tokens_used"])
def test_a_database_that_fails_at_the_caps_defers_the_job_and_costs_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def broken(*args: object) -> object:
        raise sqlite3.OperationalError("disk I/O error")

    bench.change(daily_token_cap=100)
    with monkeypatch.context() as patch:
        patch.setattr(pidispatch, place, broken)
        [run] = bench.run()
    assert run.state == "queued"
    assert bench.used() == 0
    bench.clock.pass_(61)
    bench.engine.exits.append(OK)
    [run] = bench.work()
    assert run.state == "completed"
    assert bench.used() == 1


def test_an_overlay_is_read_for_every_job(bench: Bench, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.json"
    bench.change(settings_file=overlay)
    overlay.write_text('{"model": "other"}')
    bench.engine.exits.append(OK)
    bench.run()
    assert json.loads(bench.engine.inputs[0]["job.json"])["model"] == "other"
    overlay.write_text("nonsense")
    bench.clock.pass_(pidispatch.WINDOW_SECONDS)
    rows = bench.run()
    assert rows[0].reason == "settings-overlay-invalid"


def test_trouble_before_the_container_is_deferred_and_costs_no_attempt(
    bench: Bench,
) -> None:
    bench.forge.token_error = pidispatch.InfraError("the forge is away")
    [run] = bench.run()
    assert run.state == "queued"
    assert bench.used() == 0
    bench.forge.token_error = None
    bench.engine.exits.append(OK)
    bench.clock.pass_(61)
    [run] = bench.work()
    assert run.state == "completed"
    record = bench.store.run(run.id)[1]
    assert record
    assert record.attempt == 1


def test_a_container_that_does_not_start_gives_its_slot_back(bench: Bench) -> None:
    bench.engine.start_error = OSError("no such runtime")
    [run] = bench.run()
    assert run.state == "queued"
    assert bench.used() == 0
    assert bench.engine.log[-1] == "remove"


def test_a_start_whose_answer_was_lost_is_paid_for_once(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """T35: the engine is asked before anything is said to have never started."""
    bench.engine.start_error = OSError("read timed out")
    bench.engine.started = True
    bench.engine.unknown = [pidispatch.InfraError("away")] * 3
    bench.engine.exits.append(OK)
    monkeypatch.setattr(bench.dispatcher.leaving, "wait", lambda seconds: False)
    [run] = bench.run()
    assert run.state == "completed"
    assert (bench.used(), bench.engine.log.count("start")) == (1, 1)
    assert "job-start-unanswered" in caplog.text
    assert caplog.text.count("waiting-for-machine") == 1, "not once a second"


def test_an_adopted_job_that_vanishes_before_its_record_never_runs_again(
    bench: Bench,
) -> None:
    """T37: its row says from the adoption on that it runs."""
    bench.maker.admit(bench.store)
    claimed = bench.store.claim()
    assert claimed
    bench.store.start(claimed, CAPS)
    box = FakeBox(bench.engine, None)  # type: ignore[arg-type]
    bench.engine.running[claimed.job.id] = box
    assert bench.dispatcher.reconcile()
    bench.dispatcher.in_hand.clear()  # and we are killed again
    bench.engine.running.clear()
    assert bench.dispatcher.reconcile() == []
    [run] = bench.store.runs(9)
    assert (run.state, run.reason) == ("failed", "lost")
    assert bench.used() == 1


def test_a_reconcile_beside_work_leaves_jobs_in_hand_alone(bench: Bench) -> None:
    bench.maker.admit(bench.store, 2)
    hand, other = bench.store.claim(), bench.store.claim()
    assert hand and other
    for claimed in (hand, other):
        bench.store.start(claimed, CAPS)
        bench.store.running(claimed)
    bench.dispatcher.in_hand.add(hand.job.id)
    assert bench.dispatcher.reconcile() == []
    ends = {run.id: (run.state, run.reason) for run in bench.store.runs(9)}
    assert ends[hand.job.id] == ("running", None)
    assert ends[other.job.id] == ("failed", "lost")
    assert bench.engine.log == [f"sweep {[hand.job.id]}"]


def test_an_engine_that_is_away_at_the_start_is_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is claimed before rows and engine agree; deliveries are taken."""
    pool = pidispatch.Workers(bench.dispatcher, bench.store, 1)
    away = [pidispatch.InfraError("no engine")] * 3
    reconcile = bench.dispatcher.reconcile

    def shaky(before: float) -> Any:
        assert not pool._reconciled.is_set()
        if away:
            raise away.pop()
        return reconcile(before)

    monkeypatch.setattr(bench.dispatcher, "reconcile", shaky)
    waits = iter([False, False, False, True])
    monkeypatch.setattr(pool._stopping, "wait", lambda seconds: next(waits))
    pool._mind_engine()
    assert pool._reconciled.is_set()
    assert caplog.text.count("not-reconciled") == 1


def test_rows_and_engine_are_compared_every_hour(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T39; what is young may be a check's own."""
    pool = pidispatch.Workers(bench.dispatcher, bench.store, 1)
    before: list[float] = []
    hours = 2

    def wait(seconds: float) -> bool:
        bench.clock.pass_(seconds)
        return bench.clock() > begun + hours * 3_600

    monkeypatch.setattr(pool._stopping, "wait", wait)
    monkeypatch.setattr(
        bench.dispatcher, "reconcile", lambda until: before.append(until) or []
    )
    begun = bench.clock()
    pool._mind_engine()
    first, *hourly = before
    assert first == float("inf") and len(hourly) == hours
    young = time.time() - pidispatch.STALE_SECONDS
    assert all(abs(until - young) < 60 for until in hourly)


def test_infra_is_retried_once_after_a_minute_and_keeps_both_slots(
    bench: Bench,
) -> None:
    bench.engine.exits += [BoxExit(code=1), BoxExit(code=1)]
    [run] = bench.run()
    assert run.state == "queued"
    assert bench.store.claim() is None
    bench.clock.pass_(60)
    [run] = bench.work()
    assert (run.state, run.reason) == ("failed", "infra")
    assert bench.used() == 2
    record = bench.store.run(run.id)[1]
    assert record
    assert record.attempt == 2
    [(_, text)] = bench.forge.comments
    assert "infra" in text


def test_a_run_past_its_time_is_stopped_and_said_so(bench: Bench) -> None:
    """T42."""
    bench.engine.ends.clear()
    bench.engine.exits.append(BoxExit(code=143))
    stop = bench.dispatcher._stop_reason

    def later(attempt: pidispatch.Attempt) -> str | None:
        bench.clock.pass_(pidispatch.JOB_SECONDS)
        return stop(attempt)

    bench.dispatcher._stop_reason = later  # type: ignore[method-assign]
    [run] = bench.run()
    assert (run.state, run.reason) == ("policy", "timeout")
    assert bench.engine.log[-2:] == ["stop", "remove"]


def test_a_cancelled_run_is_stopped_and_its_sibling_goes_on(bench: Bench) -> None:
    """T44."""
    delivery = bench.maker.delivery()
    bench.store.admit(delivery, bench.maker.jobs(delivery.event, 2))
    bench.engine.ends.clear()
    bench.engine.exits += [BoxExit(code=143), OK]
    first = bench.store.claim()
    assert first
    outside = pidispatch.Outside(bench.store.path, bench.clock)
    bench.engine.waited = lambda: outside.cancel(first.job.id)
    bench.dispatcher.run(first)
    bench.engine.waited = lambda: None
    bench.engine.ends.set()
    rows = bench.work()
    assert [(r.state, r.reason) for r in reversed(rows)] == [
        ("policy", "operator-cancel"),
        ("completed", None),
    ]


def test_leaving_keeps_the_container_and_the_next_start_adopts_it(
    bench: Bench,
) -> None:
    """T37."""
    bench.engine.ends.clear()
    bench.dispatcher.leaving.set()
    [run] = bench.run()
    assert run.state == "running"
    assert "remove" not in bench.engine.log
    box = FakeBox(bench.engine, None)  # type: ignore[arg-type]
    bench.engine.running[run.id] = box
    bench.dispatcher.leaving.clear()
    bench.engine.ends.set()
    bench.engine.exits.append(OK)
    [adopted] = bench.dispatcher.reconcile()
    bench.dispatcher.adopt(*adopted)
    [run] = bench.store.runs(9)
    assert run.state == "completed"
    assert bench.used() == 1, "nothing is paid twice"


def test_a_running_job_without_a_container_is_lost_and_keeps_its_slot(
    bench: Bench,
) -> None:
    bench.engine.ends.clear()
    bench.dispatcher.leaving.set()
    bench.run()
    bench.dispatcher.leaving.clear()
    assert bench.dispatcher.reconcile() == []
    [run] = bench.store.runs(9)
    assert (run.state, run.reason) == ("failed", "lost")
    assert bench.used() == 1


def test_what_never_started_is_queued_again_and_leftovers_are_swept(
    bench: Bench,
) -> None:
    """T37, T39."""
    delivery = bench.maker.delivery()
    bench.store.admit(delivery, bench.maker.jobs(delivery.event, 2))
    first, second = bench.store.claim(), bench.store.claim()
    assert first and second
    bench.store.start(second, CAPS)
    assert bench.dispatcher.reconcile() == []
    assert [run.state for run in bench.store.runs(9)] == ["queued", "queued"]
    assert bench.used() == 0
    assert bench.engine.log == ["sweep []"]


def test_a_bug_of_ours_is_recorded_and_does_not_stop_the_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(attempt: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(pidispatch, "gate_line", broken)
    [run] = bench.run()
    assert (run.state, run.reason) == ("failed", "internal-error")


def test_publishing_is_tried_again_with_growing_waits_and_the_agent_is_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []

    def away(*args: object) -> pidispatch.Published:
        tries.append(bench.clock())
        raise pidispatch.InfraError("502")

    monkeypatch.setattr(pidispatch, "publish_job", away)
    bench.engine.exits.append(OK)
    [run] = bench.run()
    assert run.state == "publishing"
    for _ in range(40):
        bench.clock.pass_(1)
        bench.dispatcher.publish_due()
    waits = [b - a for a, b in itertools.pairwise(tries)]
    assert waits == [5, 10, 20]
    request = pidispatch.Request(1, "http://x/1", "t")
    monkeypatch.setattr(
        pidispatch, "publish_job", lambda *args: pidispatch.Published(None, request)
    )
    bench.clock.pass_(60)
    bench.dispatcher.publish_due()
    [run] = bench.store.runs(9)
    assert (run.state, run.request) == ("completed", request)
    assert bench.engine.log.count("start") == 1


def test_a_determinate_no_of_the_forge_ends_publishing_by_name(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(*args: object) -> pidispatch.Published:
        raise Refused("branch-moved", "someone pushed")

    monkeypatch.setattr(pidispatch, "publish_job", moved)
    bench.engine.exits.append(OK)
    [run] = bench.run()
    assert (run.state, run.reason) == ("completed", "branch-moved")
    assert bench.store.due_notices() == []


def test_each_replica_may_run_on_its_own_model(bench: Bench) -> None:
    bench.engine.exits += [OK, OK]
    bench.run(2, replicaModels=("anthropic/one", "anthropic/two"))
    models = [json.loads(i["job.json"])["model"] for i in bench.engine.inputs]
    assert models == ["one", "two"]


def test_every_gate_of_the_ladder_stands_in_its_order() -> None:
    assert [gate.name for gate in pidispatch.LADDER] == [
        "overlay",
        "image",
        "forges",
        "capabilities",
        "provider",
        "gate image",
        "isolation",
        "caps, a look",
        "session",
        "folder",
        "protection",
        "token",
        "box",
        "workspace",
        "flow",
        "caps, reserved",
    ]
    apart = {gate.name: gate.serves for gate in pidispatch.LADDER}
    assert {name for name, jobs in apart.items() if jobs == "local"} == {"folder"}
    assert {name for name, jobs in apart.items() if jobs == "forge"} == {
        "forges",
        "protection",
        "token",
        "workspace",
    }


def test_the_engine_is_looked_at_once_and_again_only_when_it_is_another(
    bench: Bench,
) -> None:
    """40-box: the host-reach canary runs once an engine; the answer is kept."""
    settings = bench.dispatcher.settings
    bench.dispatcher.prove_isolation(settings)
    bench.dispatcher.prove_isolation(settings)
    assert (bench.engine.looks, bench.store.flag("isolation")) == (1, "proved")
    bench.dispatcher._isolates = False  # as after a restart
    bench.dispatcher.prove_isolation(settings)
    assert bench.engine.looks == 1
    bench.dispatcher._isolates = False
    bench.engine.isolation = "another"
    bench.dispatcher.prove_isolation(settings)
    assert (bench.engine.looks, bench.store.flag("isolation")) == (2, "another")


def test_an_engine_that_leaves_the_host_reachable_runs_only_with_egress_open(
    bench: Bench,
) -> None:
    bench.engine.isolation = None
    [row] = bench.run()
    assert (row.state, row.reason) == ("policy", "engine-not-isolating")
    assert bench.store.flag("isolation") is None, "a bad answer is asked for again"
    bench.change(egress="0")
    bench.clock.pass_(pidispatch.WINDOW_SECONDS)
    bench.engine.exits.append(OK)
    newest, _ = bench.run()
    assert newest.state == "completed"


def test_no_job_starts_on_a_disk_that_is_nearly_full_and_all_do_when_there_is_room(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """30-jobs: volumes have no quota, so free disk is watched; a job only waits."""
    free = pidispatch.DISK_FLOOR - 1
    bench.dispatcher.free = lambda path: free
    pool = pidispatch.Workers(bench.dispatcher, bench.store, 1)
    bench.maker.admit(bench.store)
    assert not pool._one()
    assert not pool._one()
    assert [row.state for row in bench.store.runs(9)] == ["queued"]
    assert caplog.text.count("disk-low") == 1, "said once"
    free = pidispatch.DISK_FLOOR
    bench.engine.exits.append(OK)
    assert pool._one()
    assert [row.state for row in bench.store.runs(9)] == ["completed"]


def test_the_newest_job_is_stopped_before_the_disk_is_full_and_older_ones_go_on(
    bench: Bench,
) -> None:
    bench.dispatcher.free = lambda path: pidispatch.DISK_STOP - 1
    bench.maker.admit(bench.store, 2)
    one, two = bench.store.claim(), bench.store.claim()
    assert one and two
    old, new = (
        pidispatch.Attempt(
            claimed, bench.dispatcher.settings, "", started_at=at, began=at
        )
        for claimed, at in ((one, bench.clock() - 9), (two, bench.clock()))
    )
    for attempt in (old, new):
        bench.dispatcher._attended[attempt.job.id] = attempt.started_at or 0.0
    assert bench.dispatcher._stop_reason(old) is None
    assert bench.dispatcher._stop_reason(new) == "disk-low"
    bench.dispatcher.free = lambda path: pidispatch.DISK_STOP
    assert bench.dispatcher._stop_reason(new) is None


def test_the_start_of_a_worker_says_that_the_engine_does_not_isolate(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.engine.isolation = None
    pool = pidispatch.Workers(bench.dispatcher, bench.store, 1)
    pool._stopping.set()
    pool._mind_engine()
    assert "isolation-not-proved" in caplog.text
    assert bench.engine.looks == 1


def test_status_shows_an_engine_that_is_away_until_it_is_back(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """T37: nothing starts, and who looks is told why."""

    def shown() -> str | None:
        status = bench.store.status(pidispatch.Caps(None, None, None, "UTC"), 0)
        line = f"no job starts: {status.engine_problem}"
        assert (line in pidispatch.status_text(status)) == bool(status.engine_problem)
        return status.engine_problem

    bench.store.set_flag("engine-problem", "a process before us left this")
    pool = pidispatch.Workers(bench.dispatcher, bench.store, 1)
    pool._look()
    assert shown() is None
    bench.engine.away = pidispatch.InfraError("the engine does not answer: gone")
    for _ in range(3):
        pool._look()
        assert shown() == "the engine does not answer: gone"
    bench.engine.away = None
    pool._look()
    assert shown() is None
    assert caplog.text.count("engine-away") == 1


def test_runs_that_are_adopted_are_all_followed_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker listens: it wakes the next, else each run waits for a second."""
    followed, enough = [], threading.Event()

    def adopt(number: int) -> None:
        followed.append(number)
        if len(followed) == 4:
            enough.set()
        enough.wait(20)

    monkeypatch.setattr(bench.dispatcher, "adopt", adopt)
    pool = pidispatch.Workers(bench.dispatcher, bench.store, 4)
    pool.start()
    try:
        assert pool._reconciled.wait(5)
        time.sleep(1.2)  # all look once and find nothing
        began = time.monotonic()
        pool._adopted += [(number,) for number in range(4)]
        bench.store.work.set()
        assert enough.wait(5)
        assert time.monotonic() - began < 1.5, "not one a second"
    finally:
        enough.set()
        pool.stop()


def test_a_worker_that_ends_takes_back_what_it_said_of_the_engine(
    bench: Bench,
) -> None:
    bench.engine.away = pidispatch.InfraError("the engine does not answer: gone")
    pool = pidispatch.Workers(bench.dispatcher, bench.store, 1)
    pool.start()
    assert pool._reconciled.wait(5)
    pool._look()
    assert bench.store.flag("engine-problem")
    pool.stop()
    assert bench.store.flag("engine-problem") is None


def test_what_keeps_jobs_from_starting_is_shown_and_nothing_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first comparison holds all back; while a later one fails, jobs start. An
    engine that answers nonsense ends no loop."""

    def nonsense(*_: Any) -> Any:
        raise ValueError("nonsense")

    monkeypatch.setattr(bench.dispatcher, "reconcile", nonsense)
    pool = pidispatch.Workers(bench.dispatcher, bench.store, 1)
    assert not pool._reconcile()
    assert bench.store.flag("engine-problem") == "nonsense"
    pool._reconciled.set()
    pool._look()
    assert bench.store.flag("engine-problem") is None
    assert not pool._reconcile()
    assert bench.store.flag("engine-problem") is None
    monkeypatch.setattr(bench.engine, "answer", nonsense)
    pool._look()
    assert bench.store.flag("engine-problem") == "nonsense"


def test_an_engine_that_is_away_is_waited_for_and_the_run_is_not_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.engine.exits.append(OK)
    away = [pidispatch.InfraError("restarting")] * 2
    wait = FakeBox.wait

    def shaky(self: FakeBox, seconds: int) -> bool:
        if away:
            raise away.pop()
        return wait(self, seconds)

    monkeypatch.setattr(FakeBox, "wait", shaky)
    monkeypatch.setattr(bench.dispatcher.leaving, "wait", lambda seconds: False)
    [run] = bench.run()
    assert run.state == "completed"
    assert bench.used() == 1


def test_a_captured_log_is_private_capped_and_says_that_it_was_cut(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T45."""
    bench.dispatcher.settings = msgspec.structs.replace(
        bench.dispatcher.settings, capture_logs=True
    )
    monkeypatch.setattr(pidispatch, "LOG_MAX_BYTES", 7)
    bench.engine.exits.append(OK)
    [run] = bench.run()
    folder = bench.dispatcher.settings.state_dir / "logs"
    [path] = folder.iterdir()
    assert path.name == f"{pidispatch.container_name(run.id)}.log"
    assert path.read_bytes() == b"[earlier lines were cut]\ne\nline\n"
    assert path.stat().st_mode & 0o077 == 0


def agent(bench: Bench, monkeypatch: pytest.MonkeyPatch, *faults: str) -> None:
    """The bench for publish: agent, with what a look at the forge will find."""
    bench.engine.images["pi-job:latest"] = image(forges="github")
    link = pidispatch.Request(12, "https://forge.example/octo/spoon/pull/12", "Bend")
    found = pidispatch.Published("c" * 40, link, faults)
    monkeypatch.setattr(pidispatch, "review_agent", lambda *args: found)


def test_an_agents_job_gets_the_token_and_the_forges_hosts_and_no_others_do(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent(bench, monkeypatch)
    bench.engine.exits += [OK, OK]
    specs: list[pidispatch.BoxSpec] = []
    opened = bench.engine.open
    monkeypatch.setattr(
        bench.engine, "open", lambda spec: specs.append(spec) or opened(spec)
    )
    bench.run(publish="agent")
    bench.clock.pass_(3_600)
    bench.run()
    theirs, plain = specs
    hosts = ["forge.example", "api.forge.example"]
    assert json.loads(theirs.gate_line)["allow"] == hosts
    assert json.loads(plain.gate_line)["allow"] == []
    assert theirs.environment["https_proxy"] == theirs.environment["HTTPS_PROXY"]
    assert "https_proxy" not in plain.environment
    files = [json.loads(each["job.json"]) for each in bench.engine.inputs]
    assert files[0]["forge"] == {
        "url": "https://forge.example/octo/spoon.git",
        "environment": {
            "PI_GIT_USERNAME": "x",
            "PI_GIT_PASSWORD": "y-token",
            "FORGE_TOKEN": "y-token",
        },
    }
    assert "forge" not in files[1]
    for spec in specs:
        assert "y-token" not in json.dumps(dict(spec.environment))
        assert b"y-token" not in spec.gate_line


def test_a_protection_that_cannot_be_told_is_asked_again(bench: Bench) -> None:
    bench.engine.images["pi-job:latest"] = image(forges="github")
    bench.forge.is_protected = None
    [run] = bench.run(publish="agent")
    assert (run.state, bench.forge.asked) == ("queued", 0)
    bench.forge.is_protected = True
    bench.clock.pass_(61)
    bench.engine.exits.append(OK)
    bench.work()
    assert bench.forge.asked == 1


def test_what_an_agent_left_undone_is_recorded_and_told_once_and_never_twice(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent(bench, monkeypatch, "not-pushed", "request-missing")
    bench.engine.exits.append(OK)
    [run] = bench.run(publish="agent")
    assert (run.state, run.reason) == ("completed", "not-pushed")
    assert run.request
    [(_, text)] = bench.forge.comments
    assert f"pidispatch publish {run.id} --to BRANCH" in text
    assert "no pull request was opened" in text
    assert bench.store.own_tips(job_of(bench, run.id)) == {"c" * 40}


def test_a_finished_agents_run_gets_no_comment_of_ours(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent(bench, monkeypatch)
    bench.engine.exits.append(OK)
    [run] = bench.run(publish="agent")
    assert (run.state, run.reason) == ("completed", None)
    assert bench.forge.comments == []


def test_an_agents_token_is_in_no_text_or_log_that_is_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """T46: raw, URL-encoded and as basic credentials."""
    token = bench.forge.token = "s3cret/t+ken value"
    spelt = list(pidispatch.spellings_of(token))
    agent(bench, monkeypatch, "not-pushed")
    bench.change(capture_logs=True)
    said = " ".join(spelt)
    monkeypatch.setattr(FakeBox, "log", lambda self: said.encode() + b" \xff")
    bench.engine.exits.append(msgspec.structs.replace(OK, comment=said))
    formatter = pidispatch.LogFormat(pidispatch.Redactor([]), plain=False)
    lines: list[str] = []

    def start(self: FakeBox, inputs: object) -> None:
        pidispatch.log_event("test", error=said)
        lines.append(formatter.format(caplog.records[-1]))

    monkeypatch.setattr(FakeBox, "start", start)
    with caplog.at_level("INFO", "pidispatch"):
        bench.run(publish="agent")
    state = bench.dispatcher.settings.state_dir
    kept = [path.read_bytes() for path in state.rglob("*") if path.is_file()]
    [(_, comment)] = bench.forge.comments
    for spelling in spelt:
        assert spelling not in comment
        assert spelling not in lines[0]
        assert not any(spelling.encode() in content for content in kept)
    assert pidispatch.without_live_secrets(said) == said, "forgotten with the job"


def test_a_token_that_two_jobs_hold_is_hidden_until_the_last_of_them_ends() -> None:
    """Replicas with one operator's token: the first to end is not the last."""
    with pidispatch.live_secrets() as one:
        one("s3cret-token")
        with pidispatch.live_secrets() as other:
            other("s3cret-token")
            other("s3cret-token")
        assert pidispatch.without_live_secrets("a s3cret-token b") == "a *** b"
    assert pidispatch.without_live_secrets("a s3cret-token b") == "a s3cret-token b"


def test_a_token_in_the_box_of_an_adopted_job_is_kept_nowhere(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """T46: also what an earlier process gave it, a token of an app included, and
    when PI_PUBLISH says another mode by now."""
    from test_sessions import HEAD, SPOKEN, jsonl, message

    token = bench.forge.token = "s3cret-token"
    agent(bench, monkeypatch)
    bench.change(capture_logs=True, sessions_dir=tmp_path / "s", publish="agent")
    delivery = bench.maker.delivery()
    jobs = bench.maker.jobs(delivery.event, None, resume=True)
    bench.store.admit(delivery, jobs)
    claimed = bench.store.claim()
    assert claimed
    attempt = pidispatch.Attempt(claimed, bench.dispatcher.settings, "job-token")
    bench.dispatcher.climb(attempt)
    bench.dispatcher._start(attempt)
    assert attempt.box
    bench.engine.running[claimed.job.id] = attempt.box  # type: ignore[assignment]
    bench.change(publish="host")
    bench.forge.token = "another"
    said = f"{token} job-token"
    monkeypatch.setattr(FakeBox, "log", lambda self: token.encode())
    told = message("e", "d", "toolResult", said)
    bench.engine.transcript = jsonl(HEAD, *SPOKEN, told)
    bench.engine.exits.append(msgspec.structs.replace(OK, comment=token))
    [(again, found, at)] = bench.dispatcher.reconcile()
    bench.dispatcher.adopt(again, found, at)
    [path] = (tmp_path / "s").glob("*/current.jsonl")
    stamp = json.loads(path.read_text().partition("\n")[0])["pidispatch"]
    assert stamp["publish"] == "agent"
    state = bench.dispatcher.settings.state_dir
    files = [path, *(each for each in state.rglob("*") if each.is_file())]
    assert {"comment.md", "current.jsonl"} < {each.name for each in files}
    for content in (each.read_bytes() for each in files):
        assert token.encode() not in content
        assert b"job-token" not in content


def job_of(bench: Bench, job: str) -> pidispatch.Job:
    outside = pidispatch.Outside(bench.store.path)
    return outside.kept(job)[0]


def test_every_reason_that_is_written_stands_in_the_vocabulary() -> None:
    """A record holds fixed words only: no reason is made up along the way."""
    known = {*pidispatch.REFUSALS, *pidispatch.PUBLISH_REFUSALS}
    known |= {*pidispatch.END_REASONS, *pidispatch.DROP_REASONS}
    known |= {*pidispatch.SESSION_REASONS}
    written = set()
    for node in ast.walk(ast.parse(Path(pidispatch.__file__).read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        places = {"Refused": 0, "Drop": 0, "Verdict": 1, "SessionNote": 1}
        place = places.get(node.func.id)
        if place is None or len(node.args) <= place:
            continue
        word = node.args[place]
        if isinstance(word, ast.Constant) and word.value:
            written.add(word.value)
    assert len(written) > 20
    assert written <= known, written - known


def test_a_queued_job_that_was_cancelled_starts_nothing(bench: Bench) -> None:
    delivery = bench.maker.delivery("a")
    bench.store.admit(delivery, bench.maker.jobs(delivery.event))
    pidispatch.Outside(bench.store.path, bench.clock).cancel("gh-a")
    [run] = bench.work()
    assert (run.state, run.reason) == ("policy", "operator-cancel")
    assert bench.engine.log == []
    assert bench.used() == 0


# -- trouble that must not be paid for twice ------------------------------------------


class Trouble:
    """Raises once (or `times`) when called, then is what it stands before."""

    def __init__(self, real: Callable[..., Any], error: Exception, times: int) -> None:
        self.real, self.error, self.times = real, error, times

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.times:
            self.times -= 1
            raise self.error
        return self.real(*args, **named)


def trouble(
    patch: pytest.MonkeyPatch, of: object, name: str, error: Exception, times: int = 1
) -> None:
    patch.setattr(of, name, Trouble(getattr(of, name), error, times))


DISK_FULL = pidispatch.InfraError("database or disk is full")


@pytest.mark.parametrize("step", ["notice", "published"])
def test_a_database_that_fails_after_the_record_never_runs_the_job_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """T01: the record is committed, so what follows may only publish."""
    trouble(monkeypatch, bench.store, step, DISK_FULL)
    bench.engine.exits.append(OK)
    [run] = bench.run()
    assert run.state == "publishing"
    bench.clock.pass_(1_000)
    bench.dispatcher.publish_due()
    [run] = bench.work()
    assert run.state == "completed"
    assert bench.engine.log.count("start") == 1


def test_no_write_under_a_claim_counts_once_its_record_is_committed(
    bench: Bench,
) -> None:
    bench.engine.exits.append(OK)
    delivery = bench.maker.delivery()
    bench.store.admit(delivery, bench.maker.jobs(delivery.event))
    claimed = bench.store.claim()
    assert claimed
    bench.dispatcher.run(claimed)
    with pytest.raises(pidispatch.Fenced):
        bench.store.defer(claimed, 0)


def test_a_result_that_trips_publishing_stays_completed_and_blocks_no_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def publish(*args: Any) -> pidispatch.Published:
        if not told:
            told.append("tripped")
            raise ZeroDivisionError
        told.append(args[2].id)
        return pidispatch.Published(None, None)

    monkeypatch.setattr(pidispatch, "publish_job", publish)
    bench.engine.exits += [OK, OK]
    bench.run(2)
    states = [run.state for run in bench.store.runs(9)]
    assert sorted(states) == ["completed", "publishing"]
    bench.clock.pass_(1_000)
    bench.dispatcher.publish_due()
    assert [run.state for run in bench.store.runs(9)] == ["completed"] * 2
    assert len(told) == 3


def test_a_full_disk_while_publishing_is_tried_again_like_any_trouble(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(28, "No space left on device")
    trouble(monkeypatch, pidispatch, "publish_job", error)
    bench.engine.exits.append(OK)
    [run] = bench.run()
    assert run.state == "publishing"
    bench.clock.pass_(5)
    bench.dispatcher.publish_due()
    assert bench.store.runs(9)[0].state == "completed"


@pytest.mark.parametrize("step", ["running", "cancelled", "finish"])
def test_a_database_that_is_away_while_a_box_runs_is_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A run that is under way is paid for: it is never dropped and started again."""
    delivery = bench.maker.delivery()
    bench.store.admit(delivery, bench.maker.jobs(delivery.event))
    claimed = bench.store.claim()
    assert claimed
    bench.engine.exits.append(OK)
    if step == "cancelled":  # asked once before the ladder: fail the second time
        bench.engine.ends.clear()
        calls = itertools.count(1)
        real = bench.store.cancelled

        def cancelled(job: str) -> bool:
            if next(calls) == 2:
                bench.engine.ends.set()
                raise DISK_FULL
            return real(job)

        monkeypatch.setattr(bench.store, "cancelled", cancelled)
    else:
        trouble(monkeypatch, bench.store, step, DISK_FULL, 2)
    monkeypatch.setattr(bench.dispatcher.leaving, "wait", lambda seconds: False)
    bench.dispatcher.run(claimed)
    [run] = bench.store.runs(9)
    assert run.state == "completed"
    assert bench.engine.log.count("start") == 1
    assert bench.used() == 1


@pytest.mark.parametrize(
    "step", ["release", "refuse", "defer"], ids=lambda step: f"in {step}"
)
def test_a_job_is_not_left_claimed_by_a_database_that_was_away(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """T37: nothing looks at a claimed job again before the next start."""
    if step == "refuse":
        bench.engine.images.clear()
    else:
        bench.engine.start_error = OSError("no such runtime")
    trouble(monkeypatch, bench.store, step, DISK_FULL)
    monkeypatch.setattr(bench.dispatcher.leaving, "wait", lambda seconds: False)
    [run] = bench.run()
    assert run.state == ("policy" if step == "refuse" else "queued")
    assert bench.used() == 0


def test_a_full_disk_before_the_container_is_deferred(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(28, "No space left on device")
    trouble(monkeypatch, bench.dispatcher.mirrors, "prepare", error)
    bench.engine.exits.append(OK)
    [run] = bench.run()
    assert (run.state, bench.used()) == ("queued", 0)
    bench.clock.pass_(61)
    [run] = bench.work()
    assert run.state == "completed"


def test_a_full_disk_while_collecting_is_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(28, "No space left on device")
    bench.engine.exits += [OK, OK]  # the outbox is simply read again
    trouble(monkeypatch, pidispatch, "keep_texts", error)
    monkeypatch.setattr(bench.dispatcher.leaving, "wait", lambda seconds: False)
    [run] = bench.run()
    assert run.state == "completed"


def test_a_retry_publishes_nothing_that_the_first_attempt_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last attempt wins, also when it changed nothing."""
    work: list[pidispatch.Work] = []

    def publish(*args: Any) -> pidispatch.Published:
        work.append(args[3])
        return pidispatch.Published(None, None)

    monkeypatch.setattr(pidispatch, "publish_job", publish)
    collect = FakeBox.collect

    def left(self: FakeBox, into: Path) -> BoxExit:
        ended = collect(self, into)
        if ended.code == 1:
            (into / "branch.bundle").write_bytes(b"half of it")
        return ended

    monkeypatch.setattr(FakeBox, "collect", left)
    bench.engine.exits += [BoxExit(code=1, comment="half", review_request="half"), OK]
    bench.run()
    bench.clock.pass_(60)
    bench.work()
    [only] = work
    assert (only.bundle, only.comment, only.review_request) == (None, None, None)


class StubApi:
    """As much of the engine's API as one test needs; notes what was asked."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any, **named: Any) -> Any:
            self.asked.append((name, args, named))
            answer = self.answers[name]
            if isinstance(answer, Exception):
                raise answer
            return answer(*args, **named) if callable(answer) else answer

        return ask


def engine_on(api: StubApi) -> pidispatch.DockerEngine:
    engine = pidispatch.DockerEngine(pidispatch.Settings(), "test")
    engine._local.api = api
    return engine


NEVER, ONCE = "0001-01-01T00:00:00Z", "2026-01-01T00:00:00.1Z"


@pytest.mark.parametrize(("started", "adopted"), [(NEVER, False), (ONCE, True)])
def test_a_container_that_was_made_but_never_started_is_not_adopted(
    started: str, adopted: bool
) -> None:
    """T37: a crash between create and start loses no job and keeps no slot. It is
    removed: the start may still be on its way to the engine."""
    row = {"Labels": {pidispatch.LABEL + "attempt": "1"}}
    state = {"State": {"StartedAt": started}}
    api = StubApi(containers=[row], inspect_container=state, remove_container=None)
    assert (engine_on(api).adopt("gh-a") is not None) == adopted
    removals = [named for name, _, named in api.asked if name == "remove_container"]
    assert removals == ([] if adopted else [{"v": True}]), "and never by force"


def test_a_container_that_starts_while_it_is_removed_is_asked_after_again() -> None:
    import docker
    import requests

    answer = requests.Response()
    answer.status_code = 409
    busy = docker.errors.APIError("it is running", answer)
    state = {"State": {"StartedAt": NEVER}}
    api = StubApi(containers=[{}], inspect_container=state, remove_container=busy)
    with pytest.raises(pidispatch.InfraError):
        pidispatch.DockerBox(engine_on(api), "gh-a", 1).started()


@pytest.mark.parametrize("started", [NEVER, ONCE])
def test_a_strangers_container_with_the_name_is_neither_ours_nor_removed(
    started: str,
) -> None:
    """T39: found by labels, never by name."""
    state = {"State": {"StartedAt": started}}
    api = StubApi(containers=[], inspect_container=state, remove_container=None)
    assert not pidispatch.DockerBox(engine_on(api), "gh-a", 1).started()
    assert "remove_container" not in [name for name, _, _ in api.asked]


def test_the_log_of_a_container_that_is_gone_is_empty_and_holds_up_no_worker() -> None:
    import docker

    engine = engine_on(StubApi(logs=docker.errors.NotFound("gone")))
    assert pidispatch.DockerBox(engine, "gh-a", 1).log() == b""


def test_a_hostile_line_of_the_box_spoils_neither_meter_nor_record() -> None:
    """Whatever it prints, the record and its figures are readable afterwards."""
    deep = "[" * 100_000
    assert pidispatch.result_of([deep]) is None
    assert pidispatch.meter_of([call(1, 10), deep])[0] == pidispatch.Tokens(
        10, 0, 0, 0, 10, 0.5
    )
    huge = '{"event":"exit","code":0,"turns":' + "9" * 4_000 + "}"
    assert pidispatch.result_of([huge]) is None
    assert pidispatch.result_of(['{"event":"exit","code":0,"commits":-1}']) is None


def test_refused_calls_cannot_push_the_meter_out_of_sight(tmp_path: Path) -> None:
    """The gate writes up to 5,000 lines of refusals beside its meter."""
    noise = [json.dumps({"event": "refused", "reason": "path", "host": None})] * 5_000
    lines = {"gate": [call(1, 10), *noise], "job": []}

    def logs(name: str, **how: Any) -> bytes:
        tail = how.get("tail", "all")
        kept = lines["gate" if name.endswith("-gate") else "job"]
        return "\n".join(kept if tail == "all" else kept[-tail:]).encode()

    state = {"State": {"ExitCode": 0, "OOMKilled": False}}
    import docker

    api = StubApi(
        logs=logs,
        stop=None,
        inspect_container=state,
        get_archive=docker.errors.NotFound("none"),
    )
    ended = pidispatch.DockerBox(engine_on(api), "gh-a", 1).collect(tmp_path)
    assert ended.tokens
    assert ended.tokens.total == 10
    names = [(name, *args) for name, args, _ in api.asked]
    gate = pidispatch.gate_name("gh-a")
    assert names.index(("stop", gate)) < names.index(("logs", gate)), (
        "the gate books calls in flight when it ends, so it ends before it is read"
    )


def test_an_engine_that_fails_once_does_not_empty_the_catalogue_for_good() -> None:
    import docker

    api = StubApi(
        create_container={"Id": "c"},
        get_archive=docker.errors.APIError("500"),
        remove_container=None,
    )
    engine = engine_on(api)
    with pytest.raises(pidispatch.InfraError):
        engine.catalogue(image())
    api.answers["get_archive"] = docker.errors.NotFound("none")
    assert engine.catalogue(image()) == {}


@pytest.mark.parametrize("user", ["0", "0:0", "00", "root", ""])
def test_an_image_of_root_never_runs_as_root(user: str) -> None:
    facts = {"Id": "sha256:1", "Config": {"User": user, "Labels": None}}
    found = engine_on(StubApi(inspect_image=facts)).image("mine:latest")
    assert found
    assert found.uid == 1001
    assert found.gid == 1001


def test_a_job_that_waited_through_a_long_pause_still_gets_its_day_of_trying(
    bench: Bench,
) -> None:
    """A day of trouble ends a job; a weekend of being paused does not."""
    delivery = bench.maker.delivery()
    bench.store.admit(delivery, bench.maker.jobs(delivery.event))
    bench.clock.pass_(3 * pidispatch.DAY)
    bench.forge.token_error = pidispatch.InfraError("the forge is away")
    [run] = bench.work()
    assert run.state == "queued"
    since = bench.clock()
    while run.state == "queued":
        sql = "SELECT min(not_before) FROM jobs WHERE state = 'queued'"
        due = bench.store._rows(sql)[0][0]
        assert due
        bench.clock.now = due
        [run] = bench.work()
    assert (run.state, run.reason) == ("failed", "infra")
    assert 0 <= bench.clock() - since - pidispatch.DAY < 600


@pytest.mark.parametrize("how", ["cancelled", "refused", "given up"])
def test_a_record_says_of_a_second_attempt_that_the_first_was_paid(
    bench: Bench, how: str
) -> None:
    """The ledger keeps that slot, whatever becomes of the retry."""
    bench.engine.exits.append(BoxExit(code=1, result=None, tokens=None))
    [run] = bench.run()
    assert (run.state, bench.used()) == ("queued", 1)
    bench.clock.pass_(pidispatch.RETRY_SECONDS)
    if how == "cancelled":
        bench.store.cancel(run.id)
    elif how == "refused":
        bench.change(keys={})
    else:
        bench.forge.token_error = pidispatch.InfraError("away")
        bench.dispatcher.deferrals_max = 0
    bench.work()
    _, record, _ = bench.store.run(run.id)
    assert record
    assert (record.budgetReserved, record.attempt, record.startedAt) == (True, 1, None)
    assert bench.used() == 1


def test_what_another_process_removes_while_we_look_is_no_trouble(
    tmp_path: Path,
) -> None:
    """`compare` beside a worker: git's own folders come and go."""
    root = tmp_path / "mirrors"
    root.mkdir()
    for kind in ("askpass", "quarantine", "folder"):
        (root / f"{kind}-gone").symlink_to(tmp_path / "nowhere")
        (root / f"{kind}-old").mkdir()
        os.utime(root / f"{kind}-old", (1, 1))
    pidispatch.Mirrors(root)
    assert not [*root.glob("*-old")]


def test_a_token_left_by_a_killed_git_is_swept_while_we_run(tmp_path: Path) -> None:
    """Its folder is young when the next start looks, which may be the last one."""
    settings = pidispatch.Settings(state_dir=tmp_path)
    left = tmp_path / "mirrors" / "askpass-killed"
    fresh = tmp_path / "mirrors" / "askpass-in-use"
    for folder in (left, fresh):
        folder.mkdir(parents=True)
        (folder / "password").write_text("canary")
    old = time.time() - pidispatch.DAY - 60
    os.utime(left, (old, old))
    pidispatch.sweep_files(settings, time.time())
    assert (left.exists(), fresh.exists()) == (False, True)


@pytest.mark.parametrize(("days", "kept"), [(7, ["new"]), (0, ["new", "old"])])
def test_captured_logs_are_swept_by_age_unless_that_is_off(
    tmp_path: Path, days: int, kept: list[str]
) -> None:
    """T45."""
    folder = tmp_path / "logs"
    folder.mkdir()
    now = time.time()
    for name, age in (("old", 8), ("new", 6)):
        (folder / name).write_text("line\n")
        os.utime(folder / name, (now - age * pidispatch.DAY,) * 2)
    settings = pidispatch.Settings(state_dir=tmp_path, log_retention_days=days)
    pidispatch.sweep_files(settings, now)
    assert sorted(path.name for path in folder.iterdir()) == kept


def test_a_run_whose_gate_is_lost_is_stopped_and_retried_once(bench: Bench) -> None:
    bench.engine.ends.clear()
    bench.engine.gate_stands = False
    bench.engine.exits += [BoxExit(code=143), BoxExit(code=143)]
    [run] = bench.run()
    assert run.state == "queued"
    assert bench.engine.log[-2:] == ["stop", "remove"]
    bench.clock.pass_(60)
    [run] = bench.work()
    assert (run.state, run.reason) == ("failed", "gate-lost")
    assert bench.used() == 2


def test_a_limited_target_is_told_once_an_hour_however_often_telling_fails(
    tmp_path: Path,
) -> None:
    """The loop guard: dropped whole, said once, and taken again after the hour."""
    clock = FakeClock()
    with world(tmp_path, clock=clock) as w:
        on = {"type": "comment", "phrase": "@pi"}
        w.rules(
            {"replicas": 2}, {"on": on, "run": {"kind": "github", "flow": "review"}}
        )
        w.change(target_hourly=1)
        w.repo.accounts.clock = clock
        w.start()

        def ask(text: str) -> str:
            payload = demo.comment_payload(w.repo, 7, f"@pi {text}", "maintainer")
            answer = w.post("issue_comment", payload)[1]
            return str(answer.get("reason") or answer["status"])

        def said() -> list[str]:
            return [text for text in w.comments() if "**rate-limited**" in text]

        w.wait(w.label())
        posts = "/issues/7/comments"
        w.forge.fail_next("POST", posts, status=503, times=2)
        w.forge.fail_next("POST", posts, status=502, moment="after")
        assert [ask(str(n)) for n in range(3)] == ["rate-limited"] * 3
        for tries in range(1, 4):
            w.wait_for(lambda n=tries: waiting(w) == [n])
            clock.pass_(pidispatch.PUBLISH_WAIT_MAX)
        w.wait_for(lambda: waiting(w) == [])
        assert len(said()) == 1
        assert "octo/spoon#7 has had its 1 deliveries" in said()[0]
        assert len(w.store.runs(9)) == 2
        clock.pass_(3600)
        assert ask("again") == "queued"
        clock.pass_(pidispatch.WINDOW_SECONDS)
        assert ask("and again") == "rate-limited"
        w.wait_for(lambda: len(said()) == 2)
        w.wait([run.id for run in w.store.runs(1)])


def waiting(w: World) -> list[int]:
    """How often each comment that is still to be made was tried."""
    rows = w.store._rows("SELECT tries FROM limited WHERE payload IS NOT NULL")
    return [row["tries"] for row in rows]


def test_a_limit_is_of_one_forges_target_alone(
    store: pidispatch.Store, maker: Maker
) -> None:
    for kind, wanted in (("github", "queued"), ("forgejo", "queued")):
        delivery = maker.delivery(forge=kind)
        rule = maker.rule(kind=kind)
        match = pidispatch.Match(rule, rule.run.flow, "pi:urgent")
        jobs = pidispatch.fan_out(match, delivery.event)
        assert store.admit(delivery, jobs, 1).status == wanted
    assert store.due_limited() == []


def test_a_comment_that_the_forge_refuses_is_not_tried_for_ever(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        w.change(target_hourly=1)
        w.start()
        w.wait(w.label())
        w.forge.fail_next("POST", "/issues/7/comments", status=410, times=9)
        on = {"type": "comment", "phrase": "@pi"}
        w.rules({"on": on, "run": {"kind": "github", "flow": "review"}})
        w.wait_for(lambda: w.service and w.service.triggers.rules[0].on.phrase)
        said = demo.comment_payload(w.repo, 7, "@pi", "maintainer")
        assert w.post("issue_comment", said)[1]["reason"] == "rate-limited"
        w.wait_for(lambda: waiting(w) == [])
        assert not [text for text in w.comments() if "rate-limited" in text]


class PaperNetworks:
    """Of the Docker API what draws a subnet: every one made is refused."""

    def __init__(self) -> None:
        self.held: list[dict[str, Any]] = []
        self.tried = 0

    def networks(self, names: Sequence[str] = ()) -> list[dict[str, Any]]:
        return [] if names else self.held

    def create_network(self, *_: Any, **__: Any) -> None:
        self.tried += 1
        raise docker.errors.APIError("Pool overlaps with other one on this space")


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch) -> PaperNetworks:
    made = PaperNetworks()
    monkeypatch.setattr(pidispatch.DockerEngine, "api", made)
    return made


def test_a_subnet_that_another_network_holds_is_not_tried(
    papers: PaperNetworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that covers the pool was asked about 4,096 times, and 130,048 for a /12."""
    monkeypatch.setattr(pidispatch, "ROUTES", tmp_path / "none")
    pool = "10.213.0.0/16"
    engine = pidispatch.DockerEngine(pidispatch.Settings(network_pool=pool), "x")
    for config in (
        None,
        [],
        [{"Subnet": ""}, {}, {"Subnet": "fd00::/8"}, {"Subnet": "192.0.2.1/24"}],
    ):
        papers.held += [{"IPAM": {"Config": config}}, {"IPAM": None}, {}]
    assert engine.free_subnets() == 4096
    for subnet in ("10.213.0.0/17", "10.213.64.0/18", "10.213.1.16/28"):
        papers.held.append({"IPAM": {"Config": [{"Subnet": subnet}]}})
    assert engine.free_subnets() == 2048, "what lies in another counts once"
    assert len({*engine._subnets()}) == 2048
    papers.held.append({"IPAM": {"Config": [{"Subnet": "10.0.0.1/8"}]}})
    for make in (engine.outer_network, lambda: engine.create_job_network("x", {})):
        with pytest.raises(pidispatch.InfraError, match="no free /28"):
            make()
    assert (papers.tried, engine.free_subnets(), engine.job_room()) == (0, 0, 0)


@pytest.mark.usefixtures("papers")
def test_a_subnet_that_the_machine_routes_elsewhere_is_given_to_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine was killed and left its bridges: a box there never saw its gate."""

    def routes(*networks: str) -> None:
        def word(address: IPv4Address) -> str:
            return f"{int.from_bytes(address.packed, sys.byteorder):08X}"

        lines = [
            f"café0\t{word(net.network_address)}\t00000000\t0001\t0\t0\t0\t"
            f"{word(net.netmask)}\t0\t0\t0"
            for net in map(IPv4Network, networks)
        ]
        monkeypatch.setattr(pidispatch, "ROUTES", tmp_path / "route")
        pidispatch.ROUTES.write_text("\n".join(["Iface\tDestination", *lines, ""]))

    monkeypatch.delenv("DOCKER_HOST", raising=False)
    pool = "10.213.77.0/26"
    engine = pidispatch.DockerEngine(pidispatch.Settings(network_pool=pool), "x")

    def drawn() -> set[str]:
        return {str(subnet) for _ in range(3) for subnet in engine._subnets()}

    routes("0.0.0.0/0", "10.0.0.0/8", pool, "10.214.0.0/28")
    assert len(drawn()) == 4, "what takes in the whole pool leaves no choice"
    routes("10.213.77.0/27", "10.213.77.50/32", "192.0.2.0/24")
    assert drawn() == {"10.213.77.32/28"}
    routes("10.213.77.0/27", "10.213.77.32/27")
    with pytest.raises(pidispatch.InfraError, match="no free /28"):
        engine._create_network("x", engine._subnets())
    pidispatch.ROUTES.unlink()
    assert len(drawn()) == 4, "a machine that does not tell"
    routes("10.213.77.0/27", "10.213.77.32/27")
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.9:2375")
    assert len(drawn()) == 4, "our routes are not that machine's"


# -- one trouble stays one trouble -----------------------------------------------------


def adopted(bench: Bench) -> tuple[pidispatch.Claimed, Any, float]:
    """A run that an earlier process started, found again."""
    bench.maker.admit(bench.store)
    claimed = bench.store.claim()
    assert claimed
    bench.store.start(claimed, CAPS)
    bench.store.keep_work(claimed, pidispatch.Workspace("b" * 40, "main"))
    bench.store.running(claimed)
    bench.engine.inputs.append({"job.json": b"{}"})
    bench.engine.running[claimed.job.id] = FakeBox(bench.engine, None)  # type: ignore[arg-type]
    [found] = bench.dispatcher.reconcile()
    return found


@pytest.mark.parametrize("what", ["read", "open", "overlay"])
def test_an_adopted_run_outlives_a_look_that_fails(
    bench: Bench, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is paid for: a disk that errs once must not end it as an internal error."""
    bench.engine.exits.append(OK)
    run = adopted(bench)
    monkeypatch.setattr(bench.dispatcher.leaving, "wait", lambda seconds: False)
    fails = [sqlite3.OperationalError("disk I/O error")]
    connect, with_overlay = pidispatch._connect, pidispatch.with_overlay

    def shaky(path: Path, **how: Any) -> sqlite3.Connection:
        if fails:
            raise fails.pop()
        return connect(path, **how)

    if what == "read":
        work_of = bench.store.work_of

        def once(job: str) -> Any:
            if fails:
                raise pidispatch._unwritten(fails.pop())
            return work_of(job)

        monkeypatch.setattr(bench.store, "work_of", once)
    elif what == "open":
        monkeypatch.setattr(pidispatch, "_connect", shaky)
        bench.store._readers = threading.local()
    else:

        def closed(settings: Any) -> Any:
            fails.clear()
            with_overlay(settings)
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(pidispatch, "with_overlay", closed)
    bench.dispatcher.adopt(*run)
    [row] = bench.store.runs(9)
    assert (row.state, row.reason, fails) == ("completed", None, [])
    assert not bench.dispatcher.in_hand


def with_bundle(box: FakeBox, into: Path) -> BoxExit:
    """A box's end with everything that is kept of one."""
    pidispatch.write_private(into / "branch.bundle", b"all of it")
    return msgspec.structs.replace(
        OK, bundle=into / "branch.bundle", review_request="Title", comment="Said"
    )


def test_what_a_box_left_is_on_disk_before_the_box_goes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after that would take the only copy of a result that is paid for."""
    work = bench.dispatcher.settings.state_dir / "bundles"

    def synced(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        bench.engine.log.append(f"sync {path.relative_to(work)}")

    monkeypatch.setattr(FakeBox, "collect", with_bundle)
    monkeypatch.setattr(os, "fsync", synced)
    [run] = bench.run()
    folder = pidispatch.container_name(run.id)
    log = bench.engine.log
    written = {f"sync {folder}/{name}" for name in pidispatch.KEPT_FILES}
    assert {*log[log.index("start") + 1 : -1]} == {
        *written,
        f"sync {folder}",
        "sync .",
    }
    assert log[-1] == "remove"


@pytest.mark.parametrize("hand", [False, True])
@pytest.mark.parametrize("error", [pidispatch.InfraError("502"), RuntimeError("bug")])
def test_a_request_that_was_closed_before_its_comment_is_not_opened_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception, hand: bool
) -> None:
    """The comment failed after the request was opened; a person was quicker than
    the next try, and what they did with it is known."""
    bench.engine.exits.append(OK)
    monkeypatch.setattr(FakeBox, "collect", with_bundle)
    monkeypatch.setattr(pidispatch, "publish_job", PUBLISH)
    monkeypatch.setattr(pidispatch, "_push_result", lambda *_: "c" * 40)
    opened: list[str] = []
    errors = [error]
    say = FakeForge.comment

    def find_request(forge: FakeForge, repo: str, branch: str) -> None:
        """None is open: the first is not yet there, then it is closed."""

    def open_request(
        forge: FakeForge, repo: str, branch: str, into: str, title: str, body: str
    ) -> pidispatch.Request:
        opened.append(branch)
        return pidispatch.Request(99 + len(opened), "https://forge.example/r", title)

    def comment(forge: FakeForge, *said: Any) -> None:
        if errors:
            raise errors.pop()
        say(forge, *said)

    for stand_in in (find_request, open_request, comment):
        monkeypatch.setattr(FakeForge, stand_in.__name__, stand_in, raising=False)
    [run] = bench.run()
    assert run.state == "publishing"
    assert len(opened) == 1
    told = bench.store.notice(run.id)
    assert told
    assert bench.store.note_ending(told[0].place, 100, "merged", bench.clock())
    bench.clock.pass_(pidispatch.PUBLISH_WAIT_MAX + 1)
    if hand:
        monkeypatch.setattr(pidispatch, "_served", lambda *_: bench.forge)
        outside = pidispatch.Outside(bench.store.path, bench.clock)
        pidispatch.publish_by_hand(bench.dispatcher.settings, outside, run.id, None)
    else:
        bench.dispatcher.publish_due()
    [run] = bench.store.runs(9)
    assert (run.state, len(opened), run.picked) == ("completed", 1, "merged")
    assert run.request and run.request.number == 100
    assert [
        text for _, text in bench.forge.comments if "https://forge.example/r" in text
    ]


def test_a_folder_that_no_file_system_can_flush_ends_no_run_late(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some shared folders of virtual machines answer EINVAL for a directory."""

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(
        bench.dispatcher.leaving, "wait", lambda _: pytest.fail("waits")
    )
    bench.engine.exits.append(OK)
    assert [run.state for run in bench.run()] == ["completed"]


def test_files_and_record_of_an_end_that_is_not_published_outlive_the_retention(
    bench: Bench,
) -> None:
    """The machine was off for longer; the forge is still to be told."""
    claimed, _, _ = adopted(bench)
    kept = bench.dispatcher.kept_dir(claimed.job)
    bench.store.finish(claimed, record_of(claimed), pidispatch.Notice("result"))
    age = pidispatch.RETENTION_SECONDS + 60
    bench.clock.pass_(age)
    now = time.time() + age
    bench.store.sweep()
    pidispatch.sweep_files(bench.dispatcher.settings, now, bench.store.open_jobs())
    assert kept.exists()
    assert bench.store.run(claimed.job.id)[1]
    bench.store.published(claimed.job.id, None)
    bench.store.sweep()
    pidispatch.sweep_files(bench.dispatcher.settings, now, bench.store.open_jobs())
    assert not kept.exists()
    assert bench.store.runs(9) == []


def test_ending_all_jobs_ends_those_too_that_no_worker_has_got_to(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More were running than PI_CONCURRENCY is now."""
    ended: list[int] = []
    attended = threading.Event()

    def adopt(number: int) -> None:
        attended.set()
        assert bench.dispatcher.stop_jobs.wait(5)
        ended.append(number)

    monkeypatch.setattr(bench.dispatcher, "adopt", adopt)
    pool = pidispatch.Workers(bench.dispatcher, bench.store, 1)
    pool._adopted += [(number,) for number in range(3)]  # type: ignore[list-item, misc]
    bench.maker.admit(bench.store)
    pool.start()
    assert attended.wait(5)
    pool.stop(end_jobs=True)
    assert sorted(ended) == [0, 1, 2]
    assert bench.store.claim(), "and nothing new was begun"
