"""A Docker Engine that is stopped, or killed, and started again under a running job.

Never in the default run: it starts a daemon of its own (as root) with a copy of the job
image. `pytest -m engine tests/test_engine_restart.py`
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import FakeClock
from test_faults import PAID, Shaky, Told, rule
from test_outcomes import booked, build_image, said
from world import world as make_world

import pidispatch

pytestmark = [pytest.mark.engine, pytest.mark.docker, pytest.mark.timeout(600)]

IMAGE = "pidispatch-test/restart:latest"
#: A box that a TERM ends as the runner would be ended by it.
HOLDS = f"""{PAID}; echo ready; trap "{said(143)}" TERM
until [ -e /tmp/go ]; do sleep 0.05; done; {said(0)}"""
BRIDGE, ADDRESS = "pidispatch-own", "10.199.0.1/24"


@dataclass
class Daemon:
    """A dockerd of our own, beside the machine's."""

    root: Path
    live_restore: bool
    process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"unix://{self.root}/docker.sock"

    def start(self) -> None:
        places = {
            "--data-root": self.root / "data",
            "--exec-root": self.root / "exec",
            "--pidfile": self.root / "docker.pid",
            "--host": self.host,
            "--bridge": BRIDGE,
        }
        options = [str(word) for pair in places.items() for word in pair]
        if self.live_restore:
            options.append("--live-restore")
        with (self.root / "dockerd.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["dockerd", *options], stdout=log, stderr=log, start_new_session=True
            )
        self.client()

    def client(self) -> Any:
        """Its API, once it answers."""
        import docker

        deadline = time.monotonic() + 60
        while True:
            try:
                return docker.APIClient(base_url=self.host, timeout=60)
            except docker.errors.DockerException:
                assert time.monotonic() < deadline
                time.sleep(0.2)

    def end(self, number: int) -> None:
        assert self.process
        self.process.send_signal(number)
        self.process.wait(60)
        # a killed one leaves these, and whom they name may be anybody now; its
        # containerd dies with it, the containers' own processes need not
        time.sleep(1)
        for left in ("docker.pid", "exec/containerd/containerd.pid"):
            (self.root / left).unlink(missing_ok=True)


def bridges() -> set[str]:
    return {place.name for place in Path("/sys/class/net").glob("br-*")}


def remove_bridge(name: str) -> None:
    """An engine that was killed leaves it, and rules that name it."""
    subprocess.run(["ip", "link", "del", name], check=True)
    for table in ("nat", "filter"):
        command = ["iptables", "-w", "-t", table]
        listed = subprocess.run(
            [*command, "-S"], check=True, capture_output=True, text=True
        )
        for line in listed.stdout.splitlines():
            if name in line.split():
                words = line.replace("-A", "-D", 1).split()
                subprocess.run([*command, *words], check=True)


@pytest.fixture(params=[False, True], ids=["containers stop", "live-restore"])
def daemon(request: pytest.FixtureRequest, docker_client: Any) -> Iterator[Daemon]:
    # a short path: a socket's name has 108 characters
    root = Path(f"/tmp/pidispatch-{os.getpid()}-{request.param:d}")
    root.mkdir()
    before = bridges()
    subprocess.run(["ip", "link", "add", BRIDGE, "type", "bridge"], check=True)
    subprocess.run(["ip", "addr", "add", ADDRESS, "dev", BRIDGE], check=True)
    subprocess.run(["ip", "link", "set", BRIDGE, "up"], check=True)
    made = Daemon(root, request.param)
    try:
        made.start()
        client = made.client()
        client.load_image(docker_client.get_image("pi-job:latest"))
        build_image(client, IMAGE, "pi-job:latest")
        yield made
    finally:
        if made.process and made.process.poll() is None:
            made.end(signal.SIGTERM)
        for name in (BRIDGE, *(bridges() - before)):
            remove_bridge(name)
        mounts = Path("/proc/mounts").read_text().split()
        for place in sorted(
            (m for m in mounts if m.startswith(f"{root}/")), reverse=True
        ):
            subprocess.run(["umount", "-l", place], check=True)
        shutil.rmtree(root)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_engine_that_is_started_again_under_a_job_is_paid_for_once(
    daemon: Daemon, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T37: with live-restore the job goes on, else its end is recorded."""
    monkeypatch.setenv("DOCKER_HOST", daemon.host)
    monkeypatch.setattr("test_faults.PROGRAMS", [HOLDS])
    clock, told = FakeClock(), Told()
    monkeypatch.setattr(pidispatch.log, "level", 20)
    pidispatch.log.addHandler(told)
    with make_world(tmp_path, daemon.client(), clock) as world:
        world.change(job_image=IMAGE, gate_image="pi-job:latest")
        world.rules(rule(0, HOLDS))
        world.start()
        shaky = Shaky(world, clock, None, told)  # type: ignore[arg-type]
        run = shaky.begin(HOLDS)
        run.ready()
        daemon.end(number)
        world.wait_for(lambda: "waiting-for-machine" in told.of(), 60)
        daemon.start()
        world.docker = daemon.client()
        if daemon.live_restore:
            with contextlib.suppress(Exception):
                shaky.go(run)
        world.wait([run.job], 120)
        assert [state for state, _ in booked(run)] == ["kept"]
        assert shaky.calls(run) == 1
        end = world.record(run.job)
        if daemon.live_restore:
            assert end.outcome == "completed"
        else:
            assert end.outcome == "failed"
        assert end.tokens
        assert "machine-is-back" in told.of()
        later = shaky.begin(HOLDS)
        later.ready()
        shaky.go(later)
        world.wait([later.job], 120)
        assert world.record(later.job).outcome == "completed"
        assert world.nothing_left()
