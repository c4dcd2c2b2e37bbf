"""The gate as meter and brake, in whole runs: its figures against the model's own log.

Real gate, real pi and its forks, in containers; the model is the fake one, whose log is
the truth that every figure is held against.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_main_path import boxed, total, world
from world import COMMIT, World, bash, say, solve

import pidispatch
import pidispatch_demo as demo

__all__ = ["boxed", "world"]  # fixtures of another file

KINDS = ("input", "output", "cacheRead", "cacheWrite")
PRICES = {"input": 3, "output": 15, "cacheRead": 0.3, "cacheWrite": 3.75}

#: A call that does not stream, made by the box itself as anything in it may.
PLAIN = """python3 -c '
import json, urllib.request as u
job = json.load(open("/job/job.json"))
provider = job["models"]["providers"]["fake"]
steps = [{"text": "plain", "usage": {"input": 31, "cacheRead": 32, "cacheWrite": 33}}]
said = [{"role": "user", "content": "plain @@" + json.dumps(steps)}]
body = {"model": "fake-1", "messages": said, "max_tokens": 9}
path = {"openai-completions": "/chat/completions", "anthropic-messages": "/v1/messages"}
headers = {"x-api-key": provider["apiKey"], "content-type": "application/json"}
url = provider["baseUrl"] + path[provider["api"]]
print(u.urlopen(u.Request(url, json.dumps(body).encode(), headers)).status)
'"""


def speak(world: World, style: str) -> None:
    """Let the world's provider be one of this style."""
    old = world.settings.providers["fake"]
    if style == "anthropic-messages":
        url = old.base_url.removesuffix("/v1")
        old = pidispatch.Provider(
            "fake", url, style, "FAKE_KEY", "x-api-key", "", old.models
        )
    world.change(providers={"fake": old})


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What gates wrote, as the host read it at the end of each run."""
    found: list[dict[str, Any]] = []
    read = pidispatch.DockerBox._meter

    def reading(self: pidispatch.DockerBox) -> list[str]:
        text = read(self)
        found.extend(json.loads(line) for line in text)
        return text

    monkeypatch.setattr(pidispatch.DockerBox, "_meter", reading)
    yield found


def figures(usage: Any) -> tuple[int, ...]:
    return tuple(getattr(usage, kind) for kind in KINDS)


@pytest.mark.docker
@pytest.mark.parametrize("style", ["openai-completions", "anthropic-messages"])
def test_the_gates_count_is_the_models_own_to_the_token(
    boxed: World, lines: list[dict[str, Any]], style: str
) -> None:
    """Streaming and not, cache reads and writes apart, four forks of two turns."""
    speak(boxed, style)
    fork = [
        bash("true", usage={"input": 11, "cacheRead": 12, "cacheWrite": 13}),
        say("Result: looked.", usage={"cacheRead": 5_000}),
    ]
    tasks = [{"id": n, "task": f"Look at {n}. @@{json.dumps(fork)}"} for n in "abcd"]
    call = {"tools": [{"name": "fork_join", "args": {"tasks": tasks}}]}
    cached = {"usage": {"cacheRead": 700, "cacheWrite": 70}}
    boxed.model.set_scripts(solve({**call, **cached}, bash(PLAIN), bash(COMMIT), say()))
    boxed.start()
    [run] = boxed.wait(boxed.label(), 120)
    assert run.state == "completed"
    calls = boxed.model.log
    assert {it.style for it in calls} == {style}
    assert len(calls) == 4 + 4 * 2 + 1
    assert sorted(bool(it.body.get("stream")) for it in calls) == [False] + [True] * 12
    booked = [line for line in lines if line["event"] == "call"]
    said = [tuple(line[kind] for kind in KINDS) for line in booked]
    assert sorted(said) == sorted(figures(it.usage) for it in calls)
    assert not any(line["estimated"] for line in booked)

    record = boxed.record(run.id)
    assert record.tokens
    sums = tuple(sum(column) for column in zip(*said, strict=True))
    assert figures(record.tokens) == sums
    assert record.tokens.total == sum(map(total, calls)) == booked[-1]["sum"]["total"]
    cost = sum(n * PRICES[kind] for n, kind in zip(sums, KINDS, strict=True)) / 1e6
    assert record.tokens.cost == pytest.approx(cost, abs=1e-8)
    forked = [it for it in calls if "Look at" in last_user(it)]
    assert record.forks
    assert (record.forks.count, record.forks.tokens) == (4, sum(map(total, forked)))


def last_user(call: demo.ModelCall) -> str:
    users = [it for it in call.body["messages"] if it["role"] == "user"]
    asked = [it for it in users if "tool_result" not in json.dumps(it["content"])]
    return json.dumps(asked[-1]["content"])


HUNDRED = {"usage": {"input": 60, "output": 10, "cacheRead": 20, "cacheWrite": 10}}


@pytest.mark.docker
def test_a_budget_stops_the_run_at_the_first_call_after_it_is_spent(
    boxed: World,
) -> None:
    boxed.rules({"maxTokens": 250})
    boxed.model.set_scripts(solve(*[bash("true", **HUNDRED)] * 9, say()))
    boxed.start()
    [run] = boxed.wait(boxed.label())
    assert (run.state, run.reason) == ("policy", "token-budget")
    assert len(boxed.model.log) == 3, "the third began with 200 spent, the fourth never"
    tokens = boxed.record(run.id).tokens
    assert tokens
    assert tokens.total == 300
    assert any("token-budget" in text for text in boxed.comments())


@pytest.mark.docker
def test_calls_of_forks_that_are_in_flight_are_all_that_a_budget_is_overshot_by(
    boxed: World,
) -> None:
    """The brake is tested before a call; a call that was let through is finished."""
    boxed.rules({"maxTokens": 150})
    fork = json.dumps([bash("true", delay=2, **HUNDRED), bash("true", **HUNDRED)])
    tasks = [{"id": name, "task": f"Look. @@{fork}"} for name in "abcd"]
    call = {"tools": [{"name": "fork_join", "args": {"tasks": tasks}}]}
    boxed.model.set_scripts(solve({**call, **HUNDRED}, *[bash("true", **HUNDRED)] * 5))
    boxed.start()
    [run] = boxed.wait(boxed.label())
    assert (run.state, run.reason) == ("policy", "token-budget")
    tokens = boxed.record(run.id).tokens
    assert tokens
    assert tokens.total == sum(map(total, boxed.model.log))
    assert tokens.total - 100 * boxed.model.max_inflight < 150 <= tokens.total
    assert boxed.model.max_inflight > 1


def test_a_model_without_a_price_is_recorded_without_a_cost_and_said_so(
    world: World,
) -> None:
    provider = world.settings.providers["fake"]
    row = {key: value for key, value in provider.models[0].items() if key != "cost"}
    unpriced = msgspec.structs.replace(provider, models=(row,))
    world.change(providers={"fake": unpriced})
    world.start()
    [run] = world.wait(world.label())
    record = world.record(run.id)
    assert record.tokens
    assert record.tokens.total == sum(map(total, world.model.log))
    assert record.tokens.cost is None
    detail = pidispatch.RunDetail(run, record, [])
    assert "cost          not known" in pidispatch.run_detail(detail)


def test_a_price_that_leaves_out_a_kind_is_a_price(
    world: World, tmp_path: Path
) -> None:
    """pi takes a kind that is not named as free; the gate must not end over it."""
    provider = world.settings.providers["fake"]
    row = {**provider.models[0], "cost": {"input": 1_000_000, "output": 0}}
    world.change(providers={"fake": msgspec.structs.replace(provider, models=(row,))})
    world.start()
    [run] = world.wait(world.label())
    tokens = world.record(run.id).tokens
    assert tokens
    assert tokens.cost == tokens.input
