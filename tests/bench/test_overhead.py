"""What pidispatch adds to bare engine calls, and what its start costs.

`pytest -m bench tests/bench -s` prints the figures. Everything is compared within one
run, in pairs, because absolute times of a shared machine drift by half.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import IMAGE
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
    tmp_path: Path, docker_client: Any, pairs: int, monkeypatch: pytest.MonkeyPatch
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
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        print(
            f"\n202 to container start, {pairs} pairs: "
            f"pidispatch {statistics.median(ours) * 1000:.0f} ms, "
            f"bare {statistics.median(theirs) * 1000:.0f} ms, "
            f"median ratio {statistics.median(ratios):.2f}"
        )
        assert statistics.median(ratios) < 3


def note_starts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the moment the engine's start call returned, by job."""
    world.starts = {}
    start = pidispatch.DockerBox.start

    def noted(self: pidispatch.DockerBox, inputs: Any) -> None:
        start(self, inputs)
        world.starts[self.job] = time.time()

    monkeypatch.setattr(pidispatch.DockerBox, "start", noted)


def test_help_is_quick(
    pairs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pidispatch --help` against `import click`, in pairs."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))

    def seconds(*command: str) -> float:
        root = Path(pidispatch.__file__).parent
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=root)
        return time.perf_counter() - began

    program = "import sys; sys.argv = ['pidispatch', '--help']; import pidispatch; "
    program += "pidispatch.main()"  # as the console script does: byte code is cached
    for warm in (program, "import click"):
        seconds(sys.executable, "-c", warm)
    ratios, ours = [], []
    for _ in range(max(pairs, 5)):
        click = seconds(sys.executable, "-c", "import click")
        mine = seconds(sys.executable, "-c", program)
        ours.append(mine)
        ratios.append(mine / click)
    print(
        f"\n--help {statistics.median(ours) * 1000:.0f} ms, "
        f"{statistics.median(ratios):.2f} x import click"
    )
    assert statistics.median(ratios) < 4
