"""Every way a run can end (30-jobs, outcome), each made by a real container.

One service runs all rows at once; a box does what its rule's instructions say, and
some rows have something done to their box from outside. What is then on record, on
the forge, in the ledger and in the engine is asserted row by row.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from conftest import FakeClock
from test_main_path import build
from world import World
from world import world as make_world

import pidispatch

pytestmark = pytest.mark.docker

#: The job image with another program; of a name of its own in each run of the tests.
IMAGE = f"pidispatch-test/outcomes:{pidispatch.random_hex(4)}"

#: The box's program: what its prompt says between two lines.
BEGIN, END = "begin of box", "end of box"
PROGRAM = f"""eval "$(sed -n '/^{BEGIN}/,/^{END}/p' /job/prompt.md | sed '1d; $d')\""""

#: One call of the model through the gate, which the real runner would have awaited.
CALL = """python3 -c '
import json, time, urllib.request as u
job = json.load(open("/job/job.json"))
end = time.time() + 30
while time.time() < end:
    try:
        u.urlopen(job["gate"]["url"] + "/healthz").read()
        break
    except OSError:
        time.sleep(0.1)
provider = job["models"]["providers"]["fake"]
said = [{"role": "user", "content": "hi"}]
body = json.dumps({"model": "fake-1", "messages": said}).encode()
headers = {"authorization": "Bearer " + provider["apiKey"]}
u.urlopen(u.Request(provider["baseUrl"] + "/chat/completions", body, headers)).read()
'"""
FOR_EVER = "echo ready; while :; do sleep 0.1; done"
HELLO = "echo Hello > /outbox/comment.md"


def said(code: int, reason: str | None = None) -> str:
    """The runner's last line, and its exit."""
    line = {"event": "exit", "code": code, "reason": reason, "turns": 3, "commits": 0}
    return f"echo '{json.dumps(line)}'; exit {code}"


@dataclass
class Run:
    """One row while it runs."""

    world: World
    clock: FakeClock
    row: Row
    job: str = ""
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def box(self) -> str:
        return pidispatch.container_name(self.job)

    @property
    def row_(self) -> pidispatch.RunRow:
        return self.world.store.run(self.job)[0]

    def ready(self) -> None:
        """The box runs its loop."""
        self.world.wait_for(lambda: b"ready" in self.logs(), 300)

    def logs(self) -> bytes:
        with contextlib.suppress(Exception):
            return bytes(self.world.docker.logs(self.box))
        return b""

    def running(self, name: str) -> bool:
        with contextlib.suppress(Exception):
            state = self.world.docker.inspect_container(name)["State"]
            return bool(state["Running"])
        return False


Act = Callable[[Run], None]


@dataclass(frozen=True)
class Row:
    """What a box does, what is done to it, and what must then be true."""

    box: str
    outcome: str
    reason: str | None
    code: int | None = None
    ledger: tuple[str, ...] = ("kept",)
    comment: str = ""
    act: Act | None = None
    run: dict[str, Any] = field(default_factory=dict)
    tokens: bool = False
    turns: int | None = None
    session: pidispatch.SessionNote | None = None


# -- what is done to a box -----------------------------------------------------------


def cancel(run: Run) -> None:
    run.ready()
    run.notes["limits"] = run.world.docker.inspect_container(run.box)["HostConfig"]
    asked = time.monotonic()
    pidispatch.Outside(run.world.settings.db, run.clock).cancel(run.job)
    run.world.wait_for(lambda: not run.running(run.box), 60)
    run.notes["seconds"] = time.monotonic() - asked


def remove_under_it(run: Run) -> None:
    run.ready()
    run.world.docker.remove_container(run.box, force=True)


def kill_the_gate_each_time(run: Run) -> None:
    while run.row_.state not in ("completed", "policy", "failed"):
        if run.running(run.box) and run.running(f"{run.box}-gate"):
            with contextlib.suppress(Exception):
                run.world.docker.kill(f"{run.box}-gate")
        time.sleep(0.05)


def wait_for_a_retry(run: Run) -> None:
    run.world.wait_for(lambda: is_waiting(run), 300)


def free_the_name(run: Run) -> None:
    wait_for_a_retry(run)
    run.world.docker.remove_container(run.box, force=True)


def mend_the_image(run: Run) -> None:
    wait_for_a_retry(run)
    build_image(run.world.docker, run.row.run["image"], run.world.settings.job_image)


#: Boxes that end by themselves, or by what is done to them, at any time.
ROWS: dict[str, Row] = {
    "exit 0 with the line": Row(
        f"{HELLO}; {said(0)}", "completed", None, 0, comment="Hello", turns=3
    ),
    **{
        f"a transcript that is {what}": Row(
            f"{HELLO}; {command} /outbox/session.jsonl; {said(0)}",
            "completed",
            None,
            0,
            comment="Hello",
            run={"resume": True},
            turns=3,
            session=pidispatch.SessionNote(False, "not-kept"),
        )
        for what, command in {
            "a link": "ln -s /etc/passwd",
            "a folder": "mkdir",
            "a pipe": "mkfifo",
            "too large": "truncate -s 9M",
            "nonsense": "cp /etc/passwd",
        }.items()
    },
    "exit 0 without the line": Row("exit 0", "failed", "no-result", 0),
    "exit 0 after a line of 2": Row(
        f"({said(2, 'turn-budget')}); exit 0", "failed", "no-result", 0, turns=3
    ),
    "exit 2 without a line": Row("exit 2", "policy", "runner-policy", 2),
    "exit 2 of a made-up reason": Row(
        said(2, "because"), "policy", "runner-policy", 2, turns=3
    ),
    **{
        f"exit 2, {reason}": Row(said(2, reason), "policy", reason, 2, turns=3)
        for reason in pidispatch.POLICY_REASONS
    },
    "another code": Row(said(3), "failed", "unexpected-exit", 3, turns=3),
    "127 of an agent that ran": Row(
        f"{CALL}; exit 127", "failed", "unexpected-exit", 127, tokens=True
    ),
    "out of memory": Row(
        "python3 -c 'x = bytearray(1 << 30)'; exit 137", "policy", "oom-killed", 137
    ),
    "a budget spent, whatever the box says": Row(
        f"{CALL}; {CALL}; {said(0)}",
        "policy",
        "token-budget",
        0,
        run={"maxTokens": 5},
        tokens=True,
        turns=3,
    ),
    "cancelled": Row(
        f"trap 'echo Bye > /outbox/comment.md; exit 143' TERM; {FOR_EVER}",
        "policy",
        "operator-cancel",
        143,
        act=cancel,
    ),
    "cancelled, and deaf to TERM": Row(
        f"trap '' TERM; {FOR_EVER}", "policy", "operator-cancel", 137, act=cancel
    ),
}

TWICE = ("kept", "kept")
AGAIN = ("released", "kept")
#: Those that are tried again after 60 s.
RETRIED: dict[str, Row] = {
    "exit 1 twice": Row("exit 1", "failed", "infra", 1, TWICE, act=wait_for_a_retry),
    "exit 1 once": Row(
        "grep -q '\"attempt\": 1' /job/job.json && exit 1; " + HELLO + f"; {said(0)}",
        "completed",
        None,
        0,
        TWICE,
        "Hello",
        wait_for_a_retry,
        turns=3,
    ),
    "no gate twice": Row(
        FOR_EVER, "failed", "gate-lost", 143, TWICE, act=kill_the_gate_each_time
    ),
    "create failed": Row(
        f"{HELLO}; {said(0)}",
        "completed",
        None,
        0,
        AGAIN,
        "Hello",
        free_the_name,
        turns=3,
    ),
    "no such program (127)": Row(
        f"{HELLO}; {said(0)}",
        "completed",
        None,
        0,
        AGAIN,
        "Hello",
        mend_the_image,
        {"image": f"{IMAGE}-127"},
        turns=3,
    ),
    "no program at all (126)": Row(
        f"{HELLO}; {said(0)}",
        "completed",
        None,
        0,
        AGAIN,
        "Hello",
        mend_the_image,
        {"image": f"{IMAGE}-126"},
        turns=3,
    ),
}

#: One after another, because they concern the service's clock or its life.
LAST: dict[str, Row] = {
    "past its time": Row(FOR_EVER, "policy", "timeout", 143),
    "gone while we were away": Row(FOR_EVER, "failed", "lost"),
    "shut down": Row(FOR_EVER, "failed", "shutdown", 143),
}
ALL = {**ROWS, **RETRIED, **LAST}
ENTRY = {"127": '["/no/such/program"]', "126": '["/etc/hostname"]'}


def build_image(client: Any, tag: str, job_image: str, entry: str = "") -> None:
    program = entry or json.dumps(["sh", "-c", PROGRAM])
    build(client, f"FROM {job_image}\nENTRYPOINT {program}", tag)


def ledger(run: Run) -> tuple[str, ...]:
    """The states of the job's slots, settled ones alone, oldest first."""
    return tuple(state for state, _ in booked(run) if state != "reserved")


def booked(run: Run) -> list[tuple[str, int | None]]:
    uri = f"file:{run.world.settings.db}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
        sql = "SELECT state, tokens FROM ledger WHERE job_id = ? ORDER BY id"
        return db.execute(sql, (run.job,)).fetchall()


# -- all of it, once -------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, docker_client: Any, job_image: str
) -> Iterator[dict[str, Run]]:
    root, clock = tmp_path_factory.mktemp("outcomes"), FakeClock()
    with contextlib.ExitStack() as stack:
        for name, entry in {"": "", **ENTRY}.items():
            tag = f"{IMAGE}-{name}" if name else IMAGE
            build_image(docker_client, tag, job_image, entry)
            stack.callback(docker_client.remove_image, tag, force=True)
        world = stack.enter_context(make_world(root, docker_client, clock))
        world.change(
            job_image=IMAGE,
            gate_image=job_image,
            concurrency=6,
            daily_cap=1_000,
            job_memory="64m",
            sessions_dir=root / "sessions",
        )
        stack.callback(sweep, world)
        yield ended(world, clock)


def sweep(world: World) -> None:
    """Whatever a failure left running."""
    world.stop()
    store = pidispatch.Store(world.settings.db)
    pidispatch.DockerEngine(world.settings, store.instance()).sweep(frozenset())
    store.close()


def ended(world: World, clock: FakeClock) -> dict[str, Run]:
    made = {name: Run(world, clock, row) for name, row in ALL.items()}
    lay_out(world, made)
    world.start()
    begin(world, {name: made[name] for name in (*RETRIED, *ROWS)})
    with acting(made):
        for name in RETRIED:
            world.wait_for(lambda name=name: is_waiting(made[name]), 300)
        clock.pass_(pidispatch.RETRY_SECONDS)
        world.wait([made[name].job for name in (*ROWS, *RETRIED)], 300)
    last(world, clock, made)
    return made


def lay_out(world: World, made: dict[str, Run]) -> None:
    rules = []
    for number, (name, run) in enumerate(made.items(), 100):
        world.repo.add_issue(number, title=name)
        rules.append(
            {
                "on": {"type": "label", "any": [f"row-{number}"]},
                "run": {
                    "kind": "github",
                    "flow": "fix-issue",
                    "instructions": f"{BEGIN}\n{run.row.box}\n{END}",
                    **run.row.run,
                },
            }
        )
        run.notes["number"] = number
    world.rules(*rules)


def begin(world: World, runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        guid = f"{world.name}-{run.notes['number']}"
        run.job = f"gh-{guid}"
        if name == "create failed":  # somebody else's container has the name
            made = world.docker.create_container(
                world.settings.job_image, name=run.box, entrypoint=["true"]
            )
            assert made["Id"]
        number = run.notes["number"]
        assert world.label(number, guid, f"row-{number}") == [run.job]


@contextlib.contextmanager
def acting(made: dict[str, Run]) -> Iterator[None]:
    """Everything that is done from outside, at the same time."""
    failures: list[BaseException] = []

    def act(run: Run, what: Act) -> None:
        try:
            what(run)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=act, args=(run, run.row.act), daemon=True)
        for run in made.values()
        if run.row.act
    ]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(60)
    assert not failures, failures


def is_waiting(run: Run) -> bool:
    return run.row_.state == "queued" and bool(ledger(run))


def last(world: World, clock: FakeClock, made: dict[str, Run]) -> None:
    late, gone, shut = (made[name] for name in LAST)
    begin(world, {"late": late})
    late.ready()
    clock.pass_(pidispatch.JOB_SECONDS + pidispatch.STOP_GRACE_SECONDS)
    world.wait([late.job], 300)
    begin(world, {"gone": gone})
    gone.ready()
    world.stop(end_jobs=False)
    assert gone.running(gone.box), "it goes on without us"
    remove_under_it(gone)
    world.start()
    world.wait([gone.job], 300)
    begin(world, {"shut": shut})
    shut.ready()
    world.stop(end_jobs=True)
    world.start()
    world.wait([shut.job], 300)


# -- what must then be true ---------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_the_record_says_how_it_ended(runs: dict[str, Run], name: str) -> None:
    run, row = runs[name], ALL[name]
    record = run.world.record(run.job)
    assert (record.outcome, record.reason) == (row.outcome, row.reason)
    assert record.exitCode == row.code
    assert record.turns == row.turns
    assert record.session == row.session
    assert record.budgetReserved
    assert record.attempt == row.ledger.count("kept")
    assert (record.tokens is not None) is row.tokens
    assert record.endedAt >= (record.startedAt or "") >= record.queuedAt


@pytest.mark.parametrize("name", ALL)
def test_the_ledger_keeps_what_ran_and_gives_back_what_did_not(
    runs: dict[str, Run], name: str
) -> None:
    run, row = runs[name], ALL[name]
    assert tuple(state for state, _ in booked(run)) == row.ledger
    record = run.world.record(run.job)
    total = record.tokens.total if record.tokens else 0
    uncounted = row.reason == "lost"  # its gate went with it: a reservation stands
    assert booked(run)[-1][1] == (None if uncounted else total)


@pytest.mark.parametrize("name", ALL)
def test_the_issue_is_told_once(runs: dict[str, Run], name: str) -> None:
    run, row = runs[name], ALL[name]
    [comment] = run.world.comments(run.notes["number"])
    assert (row.comment or f"**{row.reason}**") in comment


def test_nothing_is_left_in_the_engine(runs: dict[str, Run]) -> None:
    world = runs["shut down"].world
    assert world.nothing_left()
    assert world.pulls() == {}
    assert not (world.root / "sessions").exists(), "no transcript was fit to be kept"


def test_a_box_that_ignores_term_is_gone_in_fifteen_seconds(
    runs: dict[str, Run],
) -> None:
    """T42."""
    assert 9 < runs["cancelled, and deaf to TERM"].notes["seconds"] < 15


def test_a_cancelled_box_is_told_first_and_may_tidy_up(runs: dict[str, Run]) -> None:
    """T44: what it wrote after TERM is kept, and published by nobody."""
    run = runs["cancelled"]
    assert run.notes["seconds"] < 9
    kept = pidispatch.kept_path(run.world.settings, run.job)
    assert (kept / "comment.md").read_text() == "Bye\n"


def test_a_boxs_log_is_bounded_by_the_engine(runs: dict[str, Run]) -> None:
    """T45."""
    config = runs["cancelled"].notes["limits"]["LogConfig"]
    assert config == {
        "Type": "json-file",
        "Config": {"max-size": "5m", "max-file": "2"},
    }


def test_every_reason_of_an_ended_run_is_here() -> None:
    """But for those that other files drive with a box, or that need a fault of ours."""
    elsewhere = {"outbox-refused", "internal-error", "disk-low"}
    assert {row.reason for row in ALL.values()} - {None} == (
        set(pidispatch.END_REASONS) - elsewhere
    )
