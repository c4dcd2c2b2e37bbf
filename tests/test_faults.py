"""The engine, the clock, the disk and our own process fail under the real service.

The engine is the real one behind a relay, or a private daemon that is restarted; boxes
are real containers with a program of a few lines. Whatever happens, a job that ran is
paid for once and ends on record, one that did not run costs nothing, nothing is left
behind, and the log says what was done.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import FakeClock
from relay import Fault, Relay
from serving import Serving
from test_cli import cli, printed
from test_outcomes import (
    BEGIN,
    CALL,
    END,
    FOR_EVER,
    HELLO,
    Row,
    Run,
    booked,
    build_image,
    said,
)
from test_torture import judge, settle
from test_worker import Running
from world import COMMIT, World, bash, say
from world import world as make_world

import pidispatch

pytestmark = pytest.mark.docker

IMAGE = f"pidispatch-test/faults:{pidispatch.random_hex(4)}"
#: One call that the model's log can tell from another job's.
PAID = CALL.replace('"hi"', 'job["jobId"]')
DONE = f"{PAID}; {HELLO}; {said(0)}"
#: Runs until a file is there, so that a test decides when a box ends.
UNTIL_GO = f"{PAID}; echo ready; until [ -e /tmp/go ]; do sleep 0.05; done; {said(0)}"


@pytest.fixture(scope="module")
def image(docker_client: Any, job_image: str) -> Iterator[str]:
    build_image(docker_client, IMAGE, job_image)
    yield IMAGE
    docker_client.remove_image(IMAGE, force=True)


@dataclass
class Told(logging.Handler):
    """What was logged: the event's name and the job it was of."""

    events: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __hash__(self) -> int:
        return id(self)

    def emit(self, record: logging.LogRecord) -> None:
        job = str(getattr(record, "fields", {}).get("job", ""))
        self.events.append((record.getMessage(), job))

    def of(self, job: str = "") -> list[str]:
        return [name for name, about in self.events if about == job]


@dataclass
class Shaky:
    """A world whose engine stands behind a relay."""

    world: World
    clock: FakeClock
    relay: Relay
    told: Told
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(100, 999)))

    def begin(self, program: str) -> Run:
        """Label an issue whose rule runs that program; one of `rules`."""
        row = Row(program, "", None)
        number = next(self.numbers)
        run = Run(self.world, self.clock, row, notes={"number": number})
        self.world.repo.add_issue(number, title=f"row {number}")
        guid = f"{self.world.name}-{number}"
        run.job = f"gh-{guid}"
        label = f"program-{PROGRAMS.index(program)}"
        assert self.world.label(number, guid, label) == [run.job]
        return run

    def calls(self, run: Run) -> int:
        """How often the model was called by that job."""
        bodies = [str(call.body) for call in tuple(self.world.model.log)]
        return sum(run.job in body for body in bodies)

    def queue_is_due(self) -> None:
        self.clock.pass_(pidispatch.RETRY_SECONDS)
        self.world.store.work.set()

    def go(self, run: Run) -> None:
        made = self.world.docker.exec_create(run.box, ["touch", "/tmp/go"])
        self.world.docker.exec_start(made["Id"])


#: Seconds that a busy machine may take.
PATIENCE = 150
PROGRAMS = [DONE, UNTIL_GO, FOR_EVER]


def rule(number: int, program: str) -> dict[str, Any]:
    return {
        "on": {"type": "label", "any": [f"program-{number}"]},
        "run": {
            "kind": "github",
            "flow": "fix-issue",
            "instructions": f"{BEGIN}\n{program}\n{END}",
        },
    }


@contextlib.contextmanager
def shaky_world(
    root: Path, client: Any, job_image: str, patch: pytest.MonkeyPatch
) -> Iterator[Shaky]:
    clock, told = FakeClock(), Told()
    relay = Relay(root / "engine.sock")
    patch.setenv("DOCKER_HOST", f"unix://{relay.path}")
    patch.setattr(pidispatch.log, "level", logging.INFO)
    pidispatch.log.addHandler(told)
    with make_world(root, client, clock) as world:
        world.change(
            job_image=IMAGE, gate_image=job_image, concurrency=4, daily_cap=1_000
        )
        world.rules(*(rule(n, program) for n, program in enumerate(PROGRAMS)))
        yield Shaky(world, clock, relay, told)
        relay.flowing.set()
        relay.let_go.set()
        relay.judge = lambda line: None
        world.stop(end_jobs=True)
        store = pidispatch.Store(world.settings.db)
        patch.delenv("DOCKER_HOST")
        pidispatch.DockerEngine(world.settings, store.instance()).sweep(frozenset())
        store.close()
    pidispatch.log.removeHandler(told)


# -- one answer of the engine is lost, cut or late -------------------------------------


@dataclass(frozen=True)
class Loss:
    """Which request of a job goes wrong how, and what its slots are then.

    `{box}` in the request is the job's container. It goes wrong so many `times`, which
    `log` then says.
    """

    request: str
    fault: str
    slots: tuple[str, ...]
    log: str | None
    times: int = 1

    def names(self, run: Run, line: str) -> bool:
        wanted = self.request.format(box=run.box, job=run.job)
        return re.match(wanted, line) is not None


ONCE, AGAIN = ("kept",), ("released", "kept")
LOSSES: dict[str, Loss] = {
    "the start is lost": Loss(
        "POST .*/containers/{box}/start", "lost", ONCE, "job-start-unanswered"
    ),
    "the start comes late": Loss(
        "POST .*/containers/{box}/start", "held", AGAIN, "job-trouble"
    ),
    "the create is lost": Loss(
        "POST .*/containers/create.*name={box}$", "lost", AGAIN, "job-trouble"
    ),
    "the inputs are lost": Loss(
        "PUT .*/containers/{box}/archive", "lost", AGAIN, "job-trouble"
    ),
    "the gate's start is lost": Loss(
        "POST .*/containers/{box}-gate/start", "lost", AGAIN, "job-trouble"
    ),
    "waiting is cut": Loss("POST .*/containers/{box}/wait", "cut", ONCE, None),
    "the state is cut": Loss(
        "GET .*/containers/{box}/json", "cut", ONCE, "waiting-for-machine", 2
    ),
    "the meter is cut": Loss(
        "GET .*/containers/{box}-gate/logs", "cut", ONCE, "waiting-for-machine", 2
    ),
    "the outbox is cut": Loss(
        "GET .*/containers/{box}/archive.*comment", "cut", ONCE, "waiting-for-machine"
    ),
    "the removal is lost": Loss(
        "GET .*/containers/json.*{job}", "lost", ONCE, "box-not-removed"
    ),
}


@dataclass
class Losing:
    """Gives each request of the table its fault, as often as the table says."""

    runs: dict[str, Run] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)

    def __call__(self, line: str) -> Fault:
        for name, run in tuple(self.runs.items()):
            if self.left[name] and LOSSES[name].names(run, line):
                self.left[name] -= 1
                return LOSSES[name].fault
        return None


@pytest.fixture(scope="module")
def lost(
    tmp_path_factory: pytest.TempPathFactory,
    docker_client: Any,
    job_image: str,
    image: str,
) -> Iterator[tuple[Shaky, dict[str, Run]]]:
    """Every row of the table at once; nothing is awaited that a fault could hold up."""
    root = tmp_path_factory.mktemp("lost")
    with (
        pytest.MonkeyPatch.context() as patch,
        shaky_world(root, docker_client, job_image, patch) as shaky,
    ):
        shaky.world.start()
        shaky.relay.judge = losing = Losing(
            left={n: r.times for n, r in LOSSES.items()}
        )
        shaky.world.store.set_flag("paused", "1")  # a job's name comes with its row
        losing.runs = {name: shaky.begin(DONE) for name in LOSSES}
        shaky.world.store.set_flag("paused", None)
        runs = losing.runs.values()
        shaky.world.wait_for(lambda: all(is_over(run) for run in runs), PATIENCE)
        shaky.relay.let_go.set()
        shaky.queue_is_due()
        shaky.world.wait([run.job for run in runs], PATIENCE)
        assert shaky.world.service
        in_hand = shaky.world.service.workers.dispatcher.in_hand
        shaky.world.wait_for(lambda: not in_hand, PATIENCE)
        assert losing.left == dict.fromkeys(LOSSES, 0), "each fault happened"
        yield shaky, losing.runs


def is_over(run: Run) -> bool:
    """Ended, or handed back and waiting for another try."""
    states = [state for state, _ in booked(run)]
    return bool(states) and "reserved" not in states


@pytest.mark.parametrize("name", LOSSES)
def test_a_job_is_paid_for_once_whatever_answer_of_the_engine_is_lost(
    lost: tuple[Shaky, dict[str, Run]], name: str
) -> None:
    """T35: only what never started is tried again."""
    shaky, runs = lost
    run, loss = runs[name], LOSSES[name]
    record = shaky.world.record(run.job)
    assert (record.outcome, record.reason) == ("completed", None)
    assert tuple(state for state, _ in booked(run)) == loss.slots
    assert record.tokens and record.tokens.total
    assert shaky.calls(run) == 1
    assert len(shaky.world.comments(run.notes["number"])) == 1


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.log])
def test_what_was_done_about_a_lost_answer_is_in_the_log(
    lost: tuple[Shaky, dict[str, Run]], name: str
) -> None:
    shaky, runs = lost
    loss = LOSSES[name]
    job = "" if loss.log == "waiting-for-machine" else runs[name].job
    assert loss.log in shaky.told.of(job)


def test_the_hourly_look_removes_what_a_lost_answer_left(
    lost: tuple[Shaky, dict[str, Run]],
) -> None:
    """T39; and touches neither what is unlabelled nor another instance's."""
    shaky, runs = lost
    world = shaky.world
    leftover = runs["the removal is lost"]
    assert any(leftover.box in name for name in world.left_in_engine())
    assert world.service
    with strangers(world.docker) as names:
        world.service.workers._reconcile(time.time() + 60)
        left = world.docker.volumes(filters={"name": "pi-job-stranger"})["Volumes"]
        assert sorted(volume["Name"] for volume in left) == names
        assert len(world.docker.networks(names=["pi-job-stranger"])) == len(names)
    assert world.left_in_engine() == []
    assert "reconciled" in shaky.told.of()


@contextlib.contextmanager
def strangers(docker: Any) -> Iterator[list[str]]:
    """Volumes and networks named as ours are: one without a label, one of another."""
    name, made = "pi-job-stranger", []
    other = {f"{pidispatch.LABEL}{what}": "another" for what in ("instance", "job")}
    try:
        for n, labels in enumerate(({}, other)):
            made.append(docker.create_volume(f"{name}-{n}", labels=labels)["Name"])
            docker.create_network(f"{name}-{n}", labels=labels)
        yield made
    finally:
        for each in made:
            docker.remove_volume(each)
            docker.remove_network(each)


# -- the engine hangs, refuses, is away ---------------------------------------------


@pytest.fixture
def shaky(
    tmp_path: Path,
    docker_client: Any,
    job_image: str,
    image: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Shaky]:
    with shaky_world(tmp_path, docker_client, job_image, monkeypatch) as made:
        yield made


def engine_problem(world: World) -> str:
    status = printed("status", PI_DB=str(world.settings.db))
    return str(status["engine_problem"] or "")


def doctor(world: World) -> list[dict[str, Any]]:
    environ = {"PI_DB": str(world.settings.db), "PI_STATE_DIR": str(world.root / "s")}
    told = cli("doctor", "--json", WEBHOOK_SECRET="s", **environ)
    assert told.exit_code == 1
    checks: list[dict[str, Any]] = json.loads(told.stdout)
    return checks


@pytest.mark.parametrize("how", ["hangs", "is away"])
def test_an_engine_that_goes_and_comes_back_loses_no_running_job(
    shaky: Shaky, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T37; what is delivered meanwhile is taken, and runs afterwards."""
    world, relay = shaky.world, shaky.relay
    monkeypatch.setattr(pidispatch, "ENGINE_SECONDS", 10)
    monkeypatch.setattr(pidispatch, "HEARTBEAT_SECONDS", 0.5)
    world.start()
    running = shaky.begin(UNTIL_GO)
    running.ready()
    relay.flowing.clear() if how == "hangs" else relay.leave()
    late = shaky.begin(DONE)
    world.wait_for(lambda: "job-trouble" in shaky.told.of(late.job), PATIENCE)
    shaky.go(running)
    if how == "is away":
        world.wait_for(lambda: "waiting-for-machine" in shaky.told.of(), PATIENCE)
    assert running.row_.state == "running"
    world.wait_for(lambda: engine_problem(world), PATIENCE)
    assert "the engine does not answer" in engine_problem(world)
    [check] = [check for check in doctor(world) if check["name"] == "engine"]
    assert check["state"] == "fail" and check["fix"]
    assert "no Docker Engine answers" in check["found"]
    relay.flowing.set() if how == "hangs" else relay.arrive()
    shaky.queue_is_due()
    world.wait([running.job, late.job], PATIENCE)
    world.wait_for(lambda: not engine_problem(world), PATIENCE)
    for run in (running, late):
        assert world.record(run.job).outcome == "completed"
        assert [state for state, _ in booked(run)] == ["kept"]
        assert shaky.calls(run) == 1
    assert world.nothing_left()
    if how == "is away":
        assert "machine-is-back" in shaky.told.of()


def test_a_service_that_starts_before_its_engine_takes_deliveries_and_adopts(
    shaky: Shaky,
) -> None:
    """T37: a machine's boot keeps no order."""
    world, relay = shaky.world, shaky.relay
    world.start()
    running = shaky.begin(UNTIL_GO)
    gone = shaky.begin(FOR_EVER)
    for run in (running, gone):
        run.ready()
    world.stop(end_jobs=False)
    relay.leave()
    world.docker.remove_container(gone.box, force=True)
    world.start()
    late = shaky.begin(DONE)
    world.wait_for(lambda: "not-reconciled" in shaky.told.of())
    assert late.row_.state == "queued"
    assert running.row_.state == "running"
    relay.arrive()
    shaky.go(running)
    rows = world.wait([running.job, gone.job, late.job], PATIENCE)
    ends = [(row.state, row.reason) for row in rows]
    assert ends == [("completed", None), ("failed", "lost"), ("completed", None)]
    assert [booked(run)[-1][0] for run in (running, gone, late)] == ["kept"] * 3
    assert shaky.calls(running) == shaky.calls(late) == 1
    assert world.nothing_left()
    assert "job-adopted" in shaky.told.of(running.job)


# -- the clock is set, the machine sleeps --------------------------------------------


def put_off(shaky: Shaky) -> Run:
    """A job that waits because its container could not be created."""
    shaky.relay.judge = lambda line: "lost" if "/containers/create" in line else None
    run = shaky.begin(DONE)
    shaky.world.wait_for(lambda: "job-trouble" in shaky.told.of(run.job), PATIENCE)
    shaky.world.wait_for(lambda: run.row_.state == "queued", PATIENCE)
    shaky.relay.judge = lambda line: None
    return run


def test_a_clock_that_is_set_while_a_job_runs_ends_nothing_and_doubles_nothing(
    shaky: Shaky,
) -> None:
    """T35. A step ahead is also what a machine that slept sees: its own time stood."""
    world = shaky.world
    world.steady = time.monotonic
    world.start()
    running = shaky.begin(UNTIL_GO)
    running.ready()
    runs = [running]
    for hours in (1, 24, -1, -24):
        late = put_off(shaky)  # by a minute of the clock before the step
        shaky.clock.pass_(hours * 3600)
        world.store.work.set()
        world.wait([late.job], PATIENCE)
        runs.append(late)
    assert running.row_.state == "running", "its time is not over"
    shaky.go(running)
    world.wait([running.job], PATIENCE)
    for run in runs:
        assert world.record(run.job).outcome == "completed"
        assert booked(run)[-1][0] == "kept"
        assert shaky.calls(run) == 1
    assert world.nothing_left()


# -- our own process is stopped ------------------------------------------------------


@pytest.fixture
def slow(serving: Serving) -> Serving:
    """Jobs of a few seconds, of which the engine's own events are noted."""
    steps = [bash(f"sleep 3; {COMMIT}"), say()]
    serving.model.set_scripts([{"match": "", "steps": steps}])
    threading.Thread(target=serving.watch, daemon=True).start()
    return serving


def runs_now(serving: Serving) -> bool:
    if not serving.db.exists():
        return False
    return bool(serving.rows("SELECT 1 FROM jobs WHERE state = 'running'"))


def until(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_process_that_is_stopped_and_goes_on_starts_no_second_container(
    slow: Serving, request: pytest.FixtureRequest
) -> None:
    """T35: the job ends meanwhile, and another worker is refused all the time."""
    slow.start()
    slow.deliver("pi:fix")
    until(lambda: runs_now(slow))
    slow.signal(signal.SIGSTOP)
    with Running(slow.root, "worker", PI_DB=str(slow.db)) as second:
        assert second.ended() == 2
        assert "another worker holds" in "".join(second.told)
    time.sleep(float(request.config.getoption("--stopped")))
    slow.signal(signal.SIGCONT)
    slow.deliver("pi:fix")
    settle(slow)
    assert slow.end() == 0
    judge(slow)


def test_a_term_leaves_containers_to_the_next_start_and_stop_jobs_ends_them(
    slow: Serving,
) -> None:
    """T37; 30-jobs, recovery."""
    slow.start()
    slow.deliver("pi:fix")
    until(lambda: runs_now(slow))
    assert slow.end() == 0
    assert runs_now(slow) and slow.left(), "it goes on without us"
    slow.start()
    settle(slow)
    assert slow.end() == 0
    judge(slow)
    assert "job-adopted" in (slow.root / "serve.log").read_text()
    slow.start("--stop-jobs")
    slow.deliver("pi:fix")
    until(lambda: runs_now(slow))
    assert slow.end() == 0
    assert slow.left() == []
    ends = slow.rows("SELECT json_extract(record, '$.reason') FROM runs ORDER BY rowid")
    assert ends[-1] == ("shutdown",)
    assert slow.rows("SELECT DISTINCT state FROM ledger") == [("kept",)]
