"""The one-file binary, from an empty environment. Not in the default run: it is built.

`just binary` builds dist/pidispatch; PIDISPATCH_BINARY names one that is built already.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from conftest import IMAGE, ROOT

pytestmark = pytest.mark.binary

#: Where an engine never listens.
NO_ENGINE = "unix:///nonexistent"


@pytest.fixture(scope="session")
def binary() -> Path:
    built = os.environ.get("PIDISPATCH_BINARY")
    if built:
        return Path(built).absolute()
    subprocess.run([str(ROOT / ".ci/binary")], check=True)
    return ROOT / "dist/pidispatch"


def run(
    binary: Path, folder: Path, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Its words and what it says, with no environment but what is given."""
    return subprocess.run(
        [str(binary), *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_it_is_one_file_of_moderate_size_and_starts_soon(
    binary: Path, tmp_path: Path
) -> None:
    assert 1_000_000 < binary.stat().st_size < 16_000_000
    taken = []
    for _ in range(3):
        begun = time.perf_counter()
        assert "pidispatch" in run(binary, tmp_path, "--version").stdout
        taken.append(time.perf_counter() - begun)
    assert min(taken) < 2, taken


def test_the_demo_runs_without_an_engine(binary: Path, tmp_path: Path) -> None:
    """Its gate, its runner, the agent and git's hooks are the binary as well."""
    done = run(binary, tmp_path, "demo", "--json", DOCKER_HOST=NO_ENGINE)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["box"] == "process"
    assert [job["outcome"] for job in report["jobs"]] == ["completed", "completed"]
    assert report["seconds"] < 60


@pytest.mark.docker
def test_the_demo_runs_in_real_containers(binary: Path, tmp_path: Path) -> None:
    done = run(binary, tmp_path, "demo", "--json", PI_JOB_IMAGE=IMAGE)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["box"] == "docker"
    assert [job["outcome"] for job in report["jobs"]] == ["completed", "completed"]


@pytest.mark.docker
def test_it_checks_an_image(binary: Path, tmp_path: Path) -> None:
    done = run(binary, tmp_path, "verify-image", IMAGE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_init_and_doctor_need_nothing_beside_it(binary: Path, tmp_path: Path) -> None:
    began = run(binary, tmp_path, "init")
    assert began.returncode == 0, began.stderr
    assert (tmp_path / "triggers.json").is_file()
    home = {"HOME": str(tmp_path), "DOCKER_HOST": NO_ENGINE}
    done = run(binary, tmp_path, "doctor", "--json", **home)
    assert done.returncode == 1, done.stderr
    states = {row["name"]: row["state"] for row in json.loads(done.stdout)}
    assert states["engine"] == "fail" and states["triggers"] == "ok"


def test_it_brings_its_time_zones(binary: Path, tmp_path: Path) -> None:
    (tmp_path / "triggers.json").write_text('{"triggers": []}')
    none = {"PYTHONTZPATH": "", "PI_TIMEZONE": "Europe/Berlin"}
    done = run(binary, tmp_path, "triggers", "check", **none)
    assert done.returncode == 0, done.stderr
    none["PI_TIMEZONE"] = "Europe/Nowhere"
    assert run(binary, tmp_path, "triggers", "check", **none).returncode == 2


def test_a_service_unit_names_the_binary(binary: Path, tmp_path: Path) -> None:
    done = run(binary, tmp_path, "service", "--for", "systemd", HOME=str(tmp_path))
    assert f"ExecStart={binary.absolute()} serve" in done.stdout.replace('"', "")
