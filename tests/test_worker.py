"""The commands around the queue: a worker apart, a replay, the hook on failure."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from conftest import ROOT, FakeClock, Maker, record_of
from world import DIALECTS, KEY, SECRET, TOKEN, World, say, solve
from world import world as make_world

import pidispatch
import pidispatch_demo as demo

CAPS = pidispatch.Caps(25, None, None, "UTC")


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """GitHub's world, or another forge's by its kind."""
    with make_world(tmp_path, kind=getattr(request, "param", "github")) as made:
        yield made


each_forge = pytest.mark.parametrize("world", DIALECTS, indirect=True)


def worker_of(world: World, triggers: Path | None = None) -> pidispatch.Worker:
    engine = demo.ProcessEngine(world.root / "boxes")
    return pidispatch.Worker(world.settings, triggers, engine=engine)


# -- worker and serve -----------------------------------------------------------


class Running:
    """A command of ours as a process; ends with the test."""

    def __init__(self, root: Path, *arguments: str, **environ: str) -> None:
        values = {"PI_DB": str(root / "q.db"), "PI_STATE_DIR": str(root / "state")}
        values |= {"PI_BIND": "127.0.0.1", "PI_PORT": "0", "WEBHOOK_SECRET": "s"}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "pidispatch.py"), *arguments],
            cwd=root,
            stderr=subprocess.PIPE,
            env={**os.environ, **values, **environ},
            text=True,
        )
        self.told: list[str] = []

    def ready(self, words: str) -> None:
        """Reads until a line begins so; fails when the process ends before."""
        assert self.process.stderr
        for line in self.process.stderr:
            self.told.append(line)
            if line.startswith(words):
                return
        raise AssertionError(self.told)

    def ended(self) -> int:
        assert self.process.stderr
        self.told += self.process.stderr.readlines()
        return self.process.wait(30)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            assert self.ended() == 0, self.told
        assert self.process.stderr
        self.process.stderr.close()


@pytest.fixture
def place(tmp_path: Path, docker_client: Any) -> Path:
    (tmp_path / "triggers.json").write_text('{"triggers": [{"on": 1}]}')
    return tmp_path


@pytest.mark.docker
def test_a_worker_starts_on_a_file_that_serve_refuses_unless_it_is_told_to_read_it(
    place: Path,
) -> None:
    with Running(place, "serve") as refused:
        assert refused.ended() == 2
        assert "triggers[0].on" in "".join(refused.told)
    with Running(place, "worker") as worker:
        worker.ready("working on")
    events = [json.loads(line) for line in worker.told if line.startswith("{")]
    off = [event for event in events if event["event"] == "cron-off"]
    assert [event["what"] for event in off] == ["PI_TRIGGERS_FILE is not set"]
    with Running(place, "worker", PI_TRIGGERS_FILE="triggers.json") as told:
        assert told.ended() == 2
        assert "triggers[0].on" in "".join(told.told)


STORM = """
import random, signal, pidispatch
for _ in range(400):
    until_told = pidispatch.end_asked()
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 1e-4))
    until_told()
"""


def test_a_signal_at_any_moment_of_a_wait_ends_it() -> None:
    """A worker that was told to end right after its start never did."""
    command = [sys.executable, "-c", STORM]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.docker
def test_one_file_has_one_worker_and_any_number_of_receivers(place: Path) -> None:
    (place / "triggers.json").write_text('{"triggers": []}')
    with Running(place, "worker") as worker:
        worker.ready("working on")
        for command in ("worker", "serve"):
            with Running(place, command) as second:
                assert second.ended() == 2
                assert "another worker holds" in "".join(second.told)
        with Running(place, "serve", "--no-worker") as receiver:
            receiver.ready("listening on")


def test_a_worker_apart_runs_what_a_receiver_takes(world: World) -> None:
    service = pidispatch.Service(
        world.settings,
        world.root / "triggers.json",
        engine=demo.ProcessEngine(world.root / "boxes"),
    )
    service.start(worker=False)
    world.service = service
    jobs = world.label()
    worker = worker_of(world)
    worker.start()
    try:
        rows = world.wait(jobs)
    finally:
        worker.stop(end_jobs=True)
    assert [row.state for row in rows] == ["completed"]
    assert "pi/issue-7" in world.pulls()


def test_a_worker_apart_fires_cron_only_with_a_file_and_follows_it(
    world: World,
) -> None:
    on = {"type": "cron", "id": "n", "pattern": "* * * * * *"}
    folder = world.root / "notes"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git/HEAD").write_text("ref: refs/heads/main\n")
    run = {"kind": "local", "flow": "no-such", "folder": str(folder), "task": "x"}
    world.rules()
    path = world.root / "triggers.json"
    worker = worker_of(world, path)
    worker.start()
    try:
        world.rules({"on": on, "run": run})
        world.wait_for(lambda: worker.store.runs(9), 15)
    finally:
        worker.stop()
    worker = worker_of(world)
    before = len(worker.store.runs(99))
    worker.start()
    time.sleep(0.05)
    worker.cron.turn()
    assert len(worker.store.runs(99)) == before
    worker.stop()


# -- replay ---------------------------------------------------------------------


def replay(world: World, job: str) -> str:
    outside = pidispatch.Outside(world.settings.db)
    return pidispatch.replay_by_hand(world.settings, outside, job)


@each_forge
def test_a_completed_job_is_made_again_twice_from_the_item_as_it_reads_now(
    world: World,
) -> None:
    world.rules({"instructions": "Keep it short."})
    world.start()
    (job,) = world.label()
    world.wait([job])
    world.repo.issues[7].title = "Bend it more"
    world.repo.issues[7].body = "canary of the new text"
    world.repo.open_pull("other", title="Not it", body="Not it.", files={"x": "1"})
    again = replay(world, job)
    assert again == f"{job}-again1"
    world.wait([again])
    assert world.record(again).outcome == "completed"
    asked = json.dumps(world.model.log[-1].body)
    assert "canary of the new text" in asked and "Keep it short." in asked
    assert sorted(world.pulls()) == ["other", "pi/issue-7"], "its own is used again"
    second = replay(world, again)
    assert second == f"{job}-again2", "a replay's replays count on"
    world.wait([second])
    assert replay(world, job) == f"{job}-again3"


@each_forge
def test_a_job_on_a_request_is_made_again_from_the_request_as_it_reads_now(
    world: World,
) -> None:
    pull = world.repo.open_pull("topic", title="Bend", files={"spoon.txt": "bent\n"})
    run = {"kind": world.forge.kind, "flow": "review", **world.forge.run_fields}
    world.rules({"on": {"type": "comment", "phrase": "@pi"}, "run": run})
    world.model.set_scripts(solve(say()))
    world.start()
    (job,) = world.remark(pull.number, "@pi look", "remark", request=True)
    world.wait([job])
    pull.title, pull.body = "Bend it more", "canary of the new text"
    again = replay(world, job)
    [run_] = world.wait([again])
    assert (run_.state, run_.reason) == ("completed", None)
    assert run_.target == world.store.run(job)[0].target
    asked = json.dumps(world.model.log[-1].body)
    assert "canary of the new text" in asked and "Bend it more" in asked
    told = world.repo.comments_on(pull.number, request=True)
    assert len(told) == 3, "the person's word, and a report of each run"


def test_a_refused_and_a_cancelled_job_are_made_again(world: World) -> None:
    world.rules({"image": "no-such:image"})
    engine = demo.ProcessEngine(world.root / "boxes")
    known, absent = engine.image, ["no-such:image"]
    engine.image = lambda tag: None if tag in absent else known(tag)  # type: ignore[method-assign]
    service = pidispatch.Service(
        world.settings, world.root / "triggers.json", engine=engine
    )
    service.start()
    world.service = service
    (refused,) = world.label()
    assert world.wait([refused])[0].reason == "job-image-missing"
    absent.clear()
    again = replay(world, refused)
    assert world.wait([again])[0].state == "completed"

    world.store.set_flag("paused", "1")
    number = world.repo.add_issue(8, "Other", "Text").number
    (queued,) = world.label(number)
    with pytest.raises(pidispatch.ConfigError, match="has not ended"):
        replay(world, queued)
    pidispatch.Outside(world.settings.db).cancel(queued)
    world.store.set_flag("paused", None)
    assert world.wait([queued])[0].reason == "operator-cancel"
    assert world.wait([replay(world, queued)])[0].state == "completed"


def test_a_replica_is_made_again_alone_on_its_own_branch(world: World) -> None:
    world.rules({"replicas": 2})
    world.start()
    one, two = world.label()
    world.wait([one, two])
    again = replay(world, two)
    assert again == f"{two}-again1"
    world.wait([again])
    record = world.record(again)
    assert (record.outcome, record.replica, record.replicas) == ("completed", 2, 2)
    assert world.pulls()["pi/issue-7-r2"].title == "[r2/2] Bend the spoon"
    assert len(world.store.runs(9)) == 3, "its sibling is left alone"


def test_a_replay_takes_a_slot_no_window_and_none_of_the_hours_deliveries(
    store: pidispatch.Store, maker: Maker, clock: FakeClock
) -> None:
    maker.admit(store)
    taken = store.claim()
    assert taken
    store.start(taken, CAPS)
    store.finish(taken, record_of(taken), None)
    outside = pidispatch.Outside(store.path, clock)
    job = msgspec.structs.replace(
        outside.replayable(taken.job.id), target=taken.job.target
    )
    for k in (1, 2, 3):
        assert outside.replay(job) == f"{job.id}-again{k}"
        again = store.claim()
        assert again
        assert store.start(again, CAPS) is None
        assert store.set_base(again.job.set, f"{k}" * 40, None)
        assert store.base_of(again.job.set)[0] == f"{k}" * 40, "its attempts share it"
        store.finish(again, record_of(again), None)
    assert store.status(CAPS, clock()).used == 4
    clock.pass_(700)
    delivery = maker.delivery()
    assert store.admit(delivery, maker.jobs(delivery.event), 2).status == "queued"


def test_an_id_that_looks_like_a_replay_cannot_take_its_name() -> None:
    assert pidispatch.job_id("github", "x-again1").startswith("gh-h")
    assert pidispatch.again_id("gh-x", 1) == "gh-x-again1"


def test_what_cannot_be_made_again_is_said(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start()
    (job,) = world.label()
    world.wait([job])
    del world.repo.issues[7]
    with pytest.raises(pidispatch.Rejected, match="HTTP 404"):
        replay(world, job)
    monkeypatch.setattr(pidispatch, "settings_of", lambda db=None: world.settings)
    told = CliRunner().invoke(pidispatch.main, ["replay", job])
    assert told.exit_code == 1 and "cannot read the item: HTTP 404" in told.stderr
    unknown = CliRunner().invoke(pidispatch.main, ["replay", "gh-none"])
    assert unknown.exit_code == 2 and "no job gh-none" in unknown.stderr
    world.change(webhook_secret=())
    unserved = CliRunner().invoke(pidispatch.main, ["replay", job])
    assert unserved.exit_code == 2 and "WEBHOOK_SECRET" in unserved.stderr


def test_a_local_job_has_no_item_to_read_again(
    store: pidispatch.Store, clock: FakeClock
) -> None:
    run = pidispatch.Run(kind="local", flow="task", folder="/srv/x", task="t")
    store.admit_local(pidispatch.local_job(run, clock()))
    taken = store.claim()
    assert taken
    store.start(taken, CAPS)
    store.finish(taken, record_of(taken), None)
    with pytest.raises(pidispatch.ConfigError, match="ran in a folder"):
        pidispatch.Outside(store.path, clock).replayable(taken.job.id)


# -- the hook on failure --------------------------------------------------------


def hook(place: Path, *lines: str) -> Path:
    path = place / "hook"
    path.write_text("\n".join(["#!/bin/sh", f"cd {place}", *lines, ""]))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def failed(job: str = "gh-1", reason: str | None = "timeout") -> pidispatch.Record:
    target = pidispatch.Job(
        id=job,
        set=job,
        kind="github",
        repo="octo/spoon",
        target=pidispatch.Target("issue", 7),
        flow="fix-issue",
        dedup="x",
        run=pidispatch.Run(kind="github", flow="fix-issue"),
        trigger=pidispatch.Trigger(
            event="e", delivery="d", sender="1", index=0, type="label", by="l"
        ),
    )
    claimed = pidispatch.Claimed(target, "c", 0, 0.0)
    return record_of(claimed, outcome="policy", reason=reason)


@pytest.mark.parametrize(
    "job", ["gh-1", "gh-$(touch owned)", "gh-a b;`touch owned`'\"", "gh-\n-x", "gh-*"]
)
def test_the_hook_gets_id_outcome_and_reason_as_they_are(
    tmp_path: Path, job: str
) -> None:
    path = hook(tmp_path, 'printf "%s|" "$@" >got')
    pidispatch.call_hook(path, failed(job))
    assert (tmp_path / "got").read_text() == f"{job}|policy|timeout|"
    assert not (tmp_path / "owned").exists()


def test_a_hook_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    path = hook(tmp_path, "sleep 60 &", "echo $! >child", "trap '' TERM", "sleep 60")
    began = time.monotonic()
    pidispatch.call_hook(path, failed(), seconds=0.5)
    assert time.monotonic() - began < 5
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and alive(child):
        time.sleep(0.02)
    assert not alive(child)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_the_hooks_time_is_ten_seconds() -> None:
    assert pidispatch.HOOK_SECONDS == 10


@pytest.mark.parametrize("kind", ["absent", "a directory", "not executable", "exit 3"])
def test_a_hook_that_fails_is_only_logged(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = hook(tmp_path, "exit 3")
    if kind == "absent":
        path = tmp_path / "none"
    elif kind == "a directory":
        path = tmp_path
    elif kind == "not executable":
        path.chmod(0o644)
    pidispatch.log.propagate = True
    pidispatch.call_hook(path, failed())
    assert "hook-failed" in caplog.text


def test_the_hook_knows_no_secret_and_no_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GITHUB_PAT", "ANTHROPIC_API_KEY", "AWS_SECRET", "PI_DB"):
        monkeypatch.setenv(name, "canary-secret")
    path = hook(tmp_path, "env >got", "readlink /proc/$$/fd/0 >>got")
    pidispatch.call_hook(path, failed())
    text = (tmp_path / "got").read_text()
    names = {line.partition("=")[0] for line in text.splitlines() if "=" in line}
    assert "canary" not in text
    # the last three are the shell's own
    assert names <= {*pidispatch.HOOK_INHERITS, "PWD", "SHLVL", "_", "OLDPWD"}
    assert text.endswith("/dev/null\n")


def test_the_hook_is_called_once_for_each_end_short_of_completion(
    world: World, tmp_path: Path
) -> None:
    path = hook(tmp_path, 'echo "$@" >>calls')
    world.change(on_failure=path)
    world.start()
    (good,) = world.label()
    world.wait([good])
    world.rules({"flow": "no-such-flow"})
    world.service.triggers.refresh()  # type: ignore[union-attr]
    number = world.repo.add_issue(8, "Other", "Text").number
    (bad,) = world.label(number)
    world.wait([bad])
    calls = tmp_path / "calls"
    world.wait_for(calls.exists)
    world.stop()
    assert calls.read_text() == f"{bad} policy flow-not-found\n"
    for secret in (SECRET, TOKEN, KEY):
        assert secret not in calls.read_text()


def test_doctor_says_when_the_hook_cannot_be_started(tmp_path: Path) -> None:
    checks: list[pidispatch.Check] = []
    pidispatch._check_hook(pidispatch.Settings(on_failure=tmp_path / "no"), checks)
    assert [check.state for check in checks] == ["fail"]
    good = pidispatch.Settings(on_failure=hook(tmp_path, "exit 0"))
    pidispatch._check_hook(good, checks)
    assert len(checks) == 1
