"""Many jobs, one after another and at once: what they leave is nothing.

A few by default; issue-sized with `--jobs 100 --at-once 40`, which `just many` does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest
from test_outcomes import BEGIN, END, HELLO, build_image, said
from world import World
from world import world as make_world

import pidispatch

pytestmark = pytest.mark.docker

IMAGE = f"pidispatch-test/many:{pidispatch.random_hex(4)}"
UNTIL_GO = "echo ready; until [ -e /tmp/go ]; do sleep 0.2; done"


@pytest.fixture
def many(tmp_path: Path, docker_client: Any, job_image: str) -> Iterator[World]:
    build_image(docker_client, IMAGE, job_image)
    with make_world(tmp_path, docker_client) as world:
        world.change(
            job_image=IMAGE, gate_image=job_image, daily_cap=1_000, job_memory="64m"
        )
        yield world
        world.stop(end_jobs=True)
        store = pidispatch.Store(world.settings.db)
        pidispatch.DockerEngine(world.settings, store.instance()).sweep(frozenset())
        store.close()
    docker_client.remove_image(IMAGE, force=True)


def rule(world: World, program: str) -> None:
    world.rules({"instructions": f"{BEGIN}\n{program}; {said(0)}\n{END}"})


def label_new(world: World, number: int) -> str:
    world.repo.add_issue(number, title=f"job {number}")
    [job] = world.label(number)
    return job


def footprint(world: World) -> dict[str, int]:
    """Descriptors, threads, MiB and files of ours, beside what a job is to leave."""
    assert world.nothing_left()
    state = world.settings.state_dir
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    kept = state / "bundles"
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - no Path's
        "threads": threading.active_count(),
        "MiB": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
        "files": sum(
            len(files)
            for folder, _, files in os.walk(state)
            if kept not in (Path(folder), *Path(folder).parents)
        ),
    }


def test_jobs_one_after_another_leave_nothing(
    many: World, request: pytest.FixtureRequest
) -> None:
    """Issue 7, show 7."""
    count = int(request.config.getoption("--jobs"))
    many.change(concurrency=1)
    rule(many, HELLO)
    many.start()
    for number in range(100, 104):  # what is made once is made
        many.wait([label_new(many, number)], 120)
    before, began = footprint(many), time.monotonic()
    for number in range(200, 200 + count):
        [row] = many.wait([label_new(many, number)], 120)
        assert row.state == "completed"
    after = footprint(many)
    print(f"{count} jobs in {time.monotonic() - began:.0f} s: {before} -> {after}")
    for what, most in {"descriptors": 6, "threads": 2, "files": 0, "MiB": 8}.items():
        assert after[what] <= before[what] + most, what
    kept = list((many.settings.state_dir / "bundles").rglob("comment.md"))
    assert len(kept) == count + 4, "and of each job its comment"


def test_jobs_at_once_have_networks_of_their_own_and_leave_none(
    many: World, request: pytest.FixtureRequest
) -> None:
    """Issue 7, show 7."""
    count = int(request.config.getoption("--at-once"))
    many.change(concurrency=count)
    rule(many, UNTIL_GO)
    many.start()
    began = time.monotonic()
    jobs = [label_new(many, number) for number in range(100, 100 + count)]

    def run() -> bool:
        return {many.store.run(job)[0].state for job in jobs} == {"running"}

    many.wait_for(run, 280)
    print(f"{count} at once after {time.monotonic() - began:.0f} s")
    addresses = {
        network["IPAddress"]
        for box in many.containers()
        for network in box["NetworkSettings"]["Networks"].values()
    }
    assert len(addresses) == count
    many.go(*many.containers())
    assert {row.state for row in many.wait(jobs, 300)} == {"completed"}
    assert many.nothing_left()


def test_forty_networks_of_jobs_are_had_at_once(many: World) -> None:
    many.start()
    assert many.service
    engine: Any = many.service.engine
    free = engine.free_subnets()
    names = [f"many-{number}" for number in range(40)]
    made = {
        engine.create_job_network(
            pidispatch.network_name(name), engine.labels(name, 1, "network")
        )
        for name in names
    }
    assert len(made) == 40 and free - engine.free_subnets() >= 40
    assert engine.sweep(frozenset()) >= 40
    assert many.nothing_left()


@pytest.fixture
def no_way_out(docker_client: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """There is no common network of gates yet; the real one may be in use."""
    name = f"many-out-{pidispatch.random_hex(4)}"
    monkeypatch.setattr(pidispatch, "OUTER_NETWORK", name)
    yield
    for network in docker_client.networks(names=[name]):
        docker_client.remove_network(network["Id"])


def outer(engine: pidispatch.DockerEngine) -> IPv4Network:
    [row] = engine.api.networks(ids=[engine.outer_network()])
    [subnet] = pidispatch._subnets_of(row)
    return subnet


@pytest.mark.usefixtures("no_way_out")
@pytest.mark.parametrize(
    ("pool", "bits"),
    [
        ("10.221.0.0/16", 22),
        ("10.221.80.0/20", 24),
        ("10.221.80.0/24", 28),
        ("10.221.80.0/27", 28),
    ],
)
def test_the_way_out_has_an_address_for_each_jobs_gate(pool: str, bits: int) -> None:
    """One of sixteen addresses let 13 jobs run and kept a fourteenth in retries."""
    settings = pidispatch.Settings(network_pool=pool)
    engine = pidispatch.DockerEngine(settings, "x")
    free, room = engine.free_subnets(), engine.job_room()
    assert outer(engine).prefixlen == bits
    jobs = min(free - (1 << (28 - bits)), (1 << (32 - bits)) - 3)
    assert engine.job_room() == room == jobs


@pytest.mark.usefixtures("no_way_out")
def test_a_way_out_that_does_not_fit_stays_and_is_told(docker_client: Any) -> None:
    """An earlier version's, or of another pool: gates of others may stand in it. One
    that somebody made by hand is as they want it."""

    def engine(pool: str) -> pidispatch.DockerEngine:
        return pidispatch.DockerEngine(pidispatch.Settings(network_pool=pool), "x")

    small = "10.221.112.0/28"
    ipam = pidispatch._ipam(IPv4Network(small))
    ours = {pidispatch.LABEL + "role": "outer"}
    docker_client.create_network(pidispatch.OUTER_NETWORK, ipam=ipam, labels=ours)
    for pool in ("10.221.0.0/16", "10.222.0.0/24"):
        assert str(outer(engine(pool))) == str(engine(pool).misfit()) == small
    assert engine("10.221.112.0/24").misfit() is None
    docker_client.remove_network(pidispatch.OUTER_NETWORK)
    docker_client.create_network(pidispatch.OUTER_NETWORK, ipam=ipam)
    assert str(outer(engine("10.221.0.0/16"))) == small
    assert engine("10.221.0.0/16").misfit() is None


def test_a_leftover_that_the_engine_keeps_holds_up_no_other(
    many: World, job_image: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody looked into a job's network with a container of theirs: the engine does
    not remove that, and every start of ours waited for it, for ever."""
    store = pidispatch.Store(many.settings.db)
    engine = pidispatch.DockerEngine(many.settings, store.instance())
    store.close()
    for job in ("kept", "gone"):
        engine.create_job_network(
            pidispatch.network_name(job), engine.labels(job, 1, "network")
        )
        engine.api.create_volume(f"many-{job}", labels=engine.labels(job, 1, "volume"))
    host = many.docker.create_host_config(network_mode=pidispatch.network_name("kept"))
    guest = many.docker.create_container(
        job_image, entrypoint=["sleep", "60"], host_config=host
    )
    many.docker.start(guest)
    try:
        assert engine.sweep(frozenset()) == 1
        assert caplog.text.count("not-removed") == 1
        rule(many, HELLO)
        many.start()
        assert many.wait([label_new(many, 100)])[0].state == "completed"
        left = [pidispatch.network_name("kept")]
        many.wait_for(lambda: many.left_in_engine() == left)
    finally:
        many.docker.remove_container(guest, force=True)
    assert engine.sweep(frozenset()) == 1
    assert many.nothing_left()
