"""What pidispatch adds to the bare engine calls of a job."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from conftest import IMAGE
from table import Table
from world import World, bash, say, solve
from world import world as make_world

import pidispatch

pytestmark = pytest.mark.bench


def until_started(world: World, number: int) -> float:
    """Seconds from the 202 to the start of the job's container, as the engine says."""
    world.repo.add_issue(number, title=f"Bend {number}")
    jobs = world.label(number)
    began = time.time()
    world.wait(jobs, 120)
    started = world.starts[jobs[0]]
    return started - began


def bare(world: World, name: str) -> float:
    """The same engine objects and volumes, made with the SDK and nothing else."""
    engine = world.service.engine  # type: ignore[union-attr]
    assert isinstance(engine, pidispatch.DockerEngine)
    image = engine.image(IMAGE)
    assert image
    spec = pidispatch.BoxSpec(
        job=name,
        attempt=1,
        image=image,
        gate_image=image,
        gate_line=b"{}",
        environment={},
        loopback=True,
    )
    files = {"job.json": b"{}", "base.pack": b"x" * 4096}
    began = time.time()
    box = plain_box(engine, spec)
    with pidispatch.tar_of(files) as tar:
        engine.api.put_archive(box.name, "/job", tar)
    engine.api.start(box.name)
    took = time.time() - began
    engine.remove_job(name)
    return took


def plain_box(
    engine: pidispatch.DockerEngine, spec: pidispatch.BoxSpec
) -> pidispatch.DockerBox:
    """Network, gate, job container: one call after another."""
    box = pidispatch.DockerBox(engine, spec.job, spec.attempt)
    box.spec, box.outer = spec, engine.outer_network()
    labels = engine.labels(spec.job, spec.attempt, "network")
    box.subnet = engine.create_job_network(pidispatch.network_name(spec.job), labels)
    box.start_gate()
    box._create_job()
    return box


@pytest.mark.docker
def test_the_way_to_a_started_container_costs_little_more_than_the_engine(
    tmp_path: Path,
    docker_client: Any,
    pairs: int,
    table: Table,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """202 to start against the bare objects: median of pairs, one job at a time."""
    with make_world(tmp_path, docker_client) as world:
        world.change(
            job_image=IMAGE,
            gate_image=IMAGE,
            daily_cap=1000,
            concurrency=1,
            target_hourly=0,
        )
        world.model.set_scripts(solve(bash("true"), say()))
        note_starts(world, monkeypatch)
        world.start()
        until_started(world, 1000)  # the mirror's first fetch is no overhead of a job
        ours, theirs = [], []
        for pair in range(pairs):
            theirs.append(bare(world, f"bench-{pair}"))
            ours.append(until_started(world, 1001 + pair))
        name = "(d) 202 to the container's start / bare SDK calls"
        table.at_most(1.15, 3, name, ours, theirs, unit="s")


def note_starts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the moment the engine's start call returned, by job."""
    world.starts = {}
    start = pidispatch.DockerBox.start

    def noted(self: pidispatch.DockerBox, inputs: Any) -> None:
        start(self, inputs)
        world.starts[self.job] = time.time()

    monkeypatch.setattr(pidispatch.DockerBox, "start", noted)
