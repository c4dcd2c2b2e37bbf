"""Local jobs: a folder of the operator's, in place, by hand and by the clock.

Tests marked `docker` run real pi in a real box with the folder bound in.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from conftest import FakeClock, record_of
from jsonschema import Draft202012Validator
from world import CANARIES, World, bash, say, solve
from world import world as make_world

import pidispatch
import pidispatch_demo as demo

OWNER = 4321  # of the folder, when we may give it away
WORK = bash(
    "echo better >> spoon.txt; printf 'Bent it.\\n' > ${PI_OUTBOX:-/outbox}/comment.md"
)


def git(folder: Path, *arguments: str) -> str:
    config = (
        "-c",
        "user.name=op",
        "-c",
        "user.email=op@host",
        "-c",
        "safe.directory=*",
    )
    done = subprocess.run(
        ["git", *config, *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull},
    )
    return done.stdout.strip()


def give_away(folder: Path) -> Path:
    """Root's folders are refused: make it an ordinary user's."""
    if os.getuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.lchown(path, OWNER, OWNER)
    return folder


def make_folder(place: Path) -> Path:
    """A small work tree with one commit."""
    place.mkdir(parents=True)
    git(place, "init", "-q", "-b", "main")
    (place / "spoon.txt").write_text("straight\n")
    git(place, "add", ".")
    git(place, "commit", "-qm", "First")
    return give_away(place)


def snapshot(folder: Path) -> dict[str, bytes]:
    """All of .git that says anything: configuration, hooks, refs; not the index."""
    files = (p for p in (folder / ".git").rglob("*") if p.is_file())
    return {str(p): p.read_bytes() for p in files if p.name != "index"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == os.getuid() and above.name.startswith(
            ("pytest", "test")
        ):
            above.chmod(0o755)  # pytest's are 0700, and a box is another user
    return make_folder(tmp_path / "notes")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with make_world(tmp_path) as made:
        made.model.set_scripts(solve(WORK, say()))
        yield made


@pytest.fixture
def boxed(tmp_path: Path, docker_client: Any, job_image: str) -> Iterator[World]:
    with make_world(tmp_path, docker_client) as made:
        made.change(job_image=job_image, gate_image=job_image)
        made.model.set_scripts(solve(WORK, say()))
        yield made


def rule(folder: Path, **run: Any) -> pidispatch.Run:
    values = {"folder": str(folder), "task": "Bend the spoon.", "flow": "task", **run}
    return pidispatch.Run(kind="local", **values)


def admit(world: World, folder: Path, **run: Any) -> str:
    job = pidispatch.local_job(rule(folder, **run), time.time())
    return world.store.admit_local(job)[0]


def run_here(world: World, folder: Path, **run: Any) -> pidispatch.LocalRun:
    engine = None if world.docker else demo.ProcessEngine(world.root / "boxes")
    job = pidispatch.local_job(rule(folder, **run), time.time())
    return pidispatch.LocalRun(world.settings, job, engine=engine)


# -- end to end -----------------------------------------------------------------


def assert_done_in_place(world: World, folder: Path, record: pidispatch.Record) -> None:
    assert (record.outcome, record.reason, record.exitCode) == ("completed", None, 0)
    assert (record.kind, record.target, record.flow) == ("local", "local:notes", "task")
    assert record.budgetReserved and record.tokens and record.tokens.total
    assert not record.bundle
    assert (folder / "spoon.txt").read_text() == "straight\nbetter\n"
    assert git(folder, "status", "--porcelain") == "M spoon.txt"
    assert pidispatch.answer_of(world.settings, record.jobId) == "Bent it.\n"
    asked = {request.path for request in world.forge.requests()}
    assert asked <= {"/api/v3/user"}, "no forge was asked for anything"
    assert world.repo.branches.keys() == {"main"}
    everything = (world.root / "pidispatch.db").read_bytes()
    assert str(folder).encode() not in msgspec.json.encode(record)
    for canary in CANARIES:
        assert canary.encode() not in everything


def test_a_local_job_edits_the_folder_in_place_and_nothing_else(
    world: World, folder: Path
) -> None:
    before = snapshot(folder)
    local = run_here(world, folder)
    record = local.wait()
    assert local.here, "no worker ran, so it ran here"
    local.close()
    assert_done_in_place(world, folder, record)
    assert snapshot(folder) == before, "no commit, no bundle, no configuration"
    assert record.triggerIndex is None and record.triggerType is None


@pytest.mark.docker
def test_a_local_job_runs_in_a_real_box_as_the_folders_owner(
    boxed: World, folder: Path
) -> None:
    look = bash(
        "id -u > who.txt; id -g >> who.txt; cat /proc/self/mountinfo > /tmp/m;"
        " grep -c ' /workspace ' /tmp/m >> who.txt;"
        " git log --oneline | wc -l >> who.txt;"
        " curl -s -m 2 http://1.1.1.1 >/dev/null || echo cut >> who.txt"
    )
    boxed.model.set_scripts(solve(look, WORK, say()))
    before = snapshot(folder)
    local = run_here(boxed, folder)
    seen: list[dict[str, Any]] = []

    def tell(row: pidispatch.RunRow) -> None:
        if row.state == "running" and not seen:
            seen.extend(boxed_containers(boxed, local))

    record = local.wait(tell)
    instance = local.store.instance()
    local.close()
    owner = folder.stat()
    who = (folder / "who.txt").read_text().split()
    assert who == [str(owner.st_uid), str(owner.st_gid), "1", "1", "cut"]
    (folder / "who.txt").unlink()
    assert_done_in_place(boxed, folder, record)
    assert snapshot(folder) == before
    assert (folder / "spoon.txt").stat().st_uid == owner.st_uid

    container = seen[0]
    binds = [m for m in container["Mounts"] if m["Type"] == "bind"]
    assert [(m["Source"], m["Destination"]) for m in binds] == [
        (str(folder), "/workspace")
    ], "the one bind mount"
    assert container["Config"]["User"] == f"{owner.st_uid}:{owner.st_gid}"
    assert container["HostConfig"]["CapDrop"] == ["ALL"]
    assert container["HostConfig"]["ReadonlyRootfs"]
    filters = {"label": f"{pidispatch.LABEL}instance={instance}"}
    assert boxed.docker.containers(all=True, filters=filters) == []
    assert not boxed.docker.volumes(filters=filters)["Volumes"]


def boxed_containers(world: World, local: pidispatch.LocalRun) -> list[dict[str, Any]]:
    instance = local.store.instance()
    labels = [f"{pidispatch.LABEL}instance={instance}", f"{pidispatch.LABEL}role=job"]
    rows = world.docker.containers(filters={"label": labels})
    return [world.docker.inspect_container(row["Id"]) for row in rows]


@pytest.mark.docker
def test_a_cron_rule_runs_its_folder_in_a_real_box_and_keeps_two_apart(
    boxed: World, folder: Path
) -> None:
    """Two rules of one folder, due together: one waits for the other."""
    slow = bash("echo began >> log.txt; sleep 1; echo ended >> log.txt")
    boxed.model.set_scripts(solve(slow, say()))
    on = {"type": "cron", "pattern": "* * * * * *"}
    run = {"kind": "local", "flow": "task", "folder": str(folder), "task": "x"}
    run["allowDirty"] = True
    boxed.rules(
        {"on": {**on, "id": "one"}, "run": run},
        {"on": {**on, "id": "two"}, "run": run},
    )
    boxed.start()
    boxed.wait_for(lambda: len(ended(boxed)) >= 2, 60)
    boxed.store.set_flag("paused", "1")
    boxed.wait_for(lambda: not open_jobs(boxed), 60)
    lines = (folder / "log.txt").read_text().split()
    assert lines == ["began", "ended"] * (len(lines) // 2), "never two at once"
    names = {run_.id.rpartition("-")[0] for run_ in ended(boxed)}
    assert names == {"cron-one", "cron-two"}


def ended(world: World) -> list[pidispatch.RunRow]:
    return [row for row in world.store.runs(99) if row.state == "completed"]


def open_jobs(world: World) -> list[pidispatch.RunRow]:
    states = ("claimed", "starting", "running")
    return [row for row in world.store.runs(99) if row.state in states]


# -- what refuses, and costs nothing --------------------------------------------


def assert_refused(world: World, record: pidispatch.Record, reason: str) -> None:
    assert (record.outcome, record.reason) == ("policy", reason)
    assert record.startedAt is None and not record.budgetReserved
    assert world.model.log == []


@pytest.mark.parametrize(
    "dirt", ["changed", "untracked", "staged", "deleted", "no commit"]
)
def test_a_dirty_tree_is_refused_recorded_and_nothing_is_spent(
    world: World, folder: Path, dirt: str
) -> None:
    if dirt == "changed":
        (folder / "spoon.txt").write_text("mine!\n")
    elif dirt == "untracked":
        (folder / "new.txt").write_text("mine\n")
    elif dirt == "staged":
        (folder / "spoon.txt").write_text("mine!\n")
        git(folder, "add", "spoon.txt")
    elif dirt == "deleted":
        (folder / "spoon.txt").unlink()
    else:
        shutil.rmtree(folder / ".git")
        git(folder, "init", "-q")
    give_away(folder)
    local = run_here(world, folder)
    record = local.wait()
    used = local.store.status(pidispatch.Caps.of(world.settings), time.time()).used
    local.close()
    assert_refused(world, record, "dirty-tree")
    assert used == 0

    allowed = run_here(world, folder, allowDirty=True)
    assert allowed.job == f"{local.job}-again1", "the refused one does not stand for it"
    assert allowed.wait().outcome == "completed"
    allowed.close()


@pytest.mark.parametrize(
    "kind", ["ignored", "touched", "worktree", "packed", "detached"]
)
def test_a_clean_tree_is_clean_in_every_form(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "ignored":
        (folder / ".git/info").mkdir(exist_ok=True)
        (folder / ".git/info/exclude").write_text("*.o\n")
        (folder / "a.o").write_text("x")
    elif kind == "touched":
        os.utime(folder / "spoon.txt", (1, 1))
    elif kind == "worktree":
        git(folder, "worktree", "add", "-q", str(tmp_path / "other"))
        folder = give_away(tmp_path / "other")
    elif kind == "packed":
        git(folder, "gc", "-q")
        git(folder, "pack-refs", "--all")
    else:
        git(folder, "checkout", "-q", "--detach")
    give_away(folder)
    found = look(folder, tmp_path)
    assert found.changes == 0
    (folder / "spoon.txt").write_text("mine!\n")
    assert look(folder, tmp_path).changes == 1


def look(folder: Path, root: Path, flow: str = "task") -> pidispatch.Tree:
    mirrors = pidispatch.Mirrors(root / "state" / "mirrors")
    return pidispatch.look_at_folder(mirrors.git, folder, flow)


HOSTILE = (
    '[core]\n\tfsmonitor = "touch {mark}; false"\n\tsshCommand = touch {mark}\n'
    '\thooksPath = {hooks}\n[filter "x"]\n\tclean = touch {mark}; cat\n'
    "\tprocess = touch {mark}\n\trequired = true\n"
    '[diff "x"]\n\ttextconv = touch {mark}; cat\n\tcommand = touch {mark}\n'
    '[alias]\n\tstatus = !touch {mark}\n[remote "origin"]\n\tpromisor = true\n'
    "\turl = ext::touch {mark}\n[extensions]\n\tpartialClone = origin\n"
    "[include]\n\tpath = {include}\n"
)


def test_nothing_that_an_earlier_box_wrote_runs_on_the_host(
    folder: Path, tmp_path: Path
) -> None:
    """Hooks, filters, monitors and helpers of the folder's own configuration."""
    mark, hooks = tmp_path / "owned", tmp_path / "hooks"
    hooks.mkdir()
    # a submodule and a nested repository, which will have the same configuration
    for name in ("sub", "nested"):
        make_folder(folder / name)
    head = (folder / "sub/.git/refs/heads/main").read_text().strip()
    git(folder, "update-index", "--add", "--cacheinfo", f"160000,{head},sub")
    for name in ("post-index-change", "reference-transaction", "fsmonitor-watchman"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {mark}\n")
        (hooks / name).chmod(0o755)
        (folder / ".git/hooks").mkdir(exist_ok=True)
        shutil.copy(hooks / name, folder / ".git/hooks" / name)
    include = tmp_path / "more"
    include.write_text(f"[core]\n\tfsmonitor = touch {mark}\n")
    text = HOSTILE.format(mark=mark, hooks=hooks, include=include)
    for place in (folder, folder / "sub", folder / "nested"):
        (place / ".git/config").write_text(text)
        (place / ".gitattributes").write_text("* filter=x diff=x\n")
        (place / "spoon.txt").write_text("changed so that it must be read\n")
    give_away(folder)
    assert look(folder, tmp_path).changes >= 3
    assert not mark.exists()
    subprocess.run(
        ["git", "-c", "safe.directory=*", "status"], cwd=folder, capture_output=True
    )
    assert mark.exists(), "the trap is one: git by itself walks into it"


def make_tree(folder: Path, rows: str) -> str:
    config = ["-c", "safe.directory=*"]
    made = subprocess.run(
        ["git", *config, "mktree"],
        cwd=folder,
        check=True,
        capture_output=True,
        input=rows.encode(),
    )
    return made.stdout.decode().strip()


def tree_bomb(folder: Path) -> str:
    """A tree of 10^12 files in thirteen objects."""
    blob = git(folder, "hash-object", "-w", "spoon.txt")
    tree = make_tree(folder, f"100644 blob {blob}\tSKILL.md\n")
    for _ in range(12):
        rows = (f"040000 tree {tree}\t{name}\n" for name in "abcdefghij")
        tree = make_tree(folder, "".join(rows))
    return tree


@pytest.mark.parametrize("at", [".pi/skills/task", "elsewhere"])
def test_a_tree_that_unfolds_without_end_is_refused_in_bounds(
    folder: Path, tmp_path: Path, at: str
) -> None:
    """It would fill the memory of the process that serves."""
    tree = tree_bomb(folder)
    for name in reversed(at.split("/")):
        tree = make_tree(folder, f"040000 tree {tree}\t{name}\n")
    commit = git(folder, "commit-tree", "-m", "x", tree)
    git(folder, "update-ref", "HEAD", commit)
    give_away(folder)
    mirrors = pidispatch.Mirrors(
        tmp_path / "mirrors", bounds=pidispatch.Bounds(check=20, cpu=2)
    )
    began = time.monotonic()
    with pytest.raises(pidispatch.Refused) as refused:
        pidispatch.look_at_folder(mirrors.git, folder, "task")
    reason = "flow-not-found" if at.startswith(".pi") else "folder-unusable"
    assert refused.value.reason == reason
    assert time.monotonic() - began < 20
    assert not [*(tmp_path / "mirrors").glob("folder-*")]


@pytest.mark.parametrize("name", [".git", ".git/index", ".git/config", ".git/HEAD"])
def test_a_huge_file_that_an_earlier_box_left_is_not_read_whole(
    folder: Path, tmp_path: Path, name: str
) -> None:
    """A sparse one costs the box nothing; what copies or reads it dies of it."""
    if name == ".git":
        shutil.rmtree(folder / ".git")
    (folder / name).touch()
    os.truncate(folder / name, 1 << 42)
    if name == ".git":
        assert pidispatch.folder_fault(str(folder))
    elif name == ".git/index":
        with pytest.raises(pidispatch.Refused) as refused:
            look(folder, tmp_path)
        assert refused.value.reason == "folder-unusable"
    else:
        assert look(folder, tmp_path).path == folder
    kept = sum(p.lstat().st_size for p in (tmp_path / "state").rglob("*"))
    assert kept < 1 << 20


def test_links_that_an_earlier_box_left_are_not_followed_for_the_skill(
    folder: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "SKILL.md").write_text("canary")
    (folder / ".pi/skills").mkdir(parents=True)
    (folder / ".pi/skills/task").symlink_to(secret)
    assert look(give_away(folder), tmp_path).skill is None
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "A link")
    assert look(give_away(folder), tmp_path).skill is None


def test_the_folders_own_flow_is_that_of_its_commit(
    folder: Path, tmp_path: Path
) -> None:
    skill = folder / ".pi/skills/tidy/SKILL.md"
    skill.parent.mkdir(parents=True)
    skill.write_text("committed")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "A flow")
    skill.write_text("edited")
    found = look(give_away(folder), tmp_path, "tidy")
    assert (found.skill, found.changes) == ({"SKILL.md": b"committed"}, 1)


OWN_FILES = {
    "db": "pi.db",
    "state_dir": "state",
    "triggers_file": "rules.json",
    "limits_file": "caps.json",
    "settings_file": "overlay.json",
    "providers_file": "models.json",
    "sessions_dir": "sessions",
    "on_failure": "hook.sh",
    "github_app_key": "app.pem",
}


@pytest.mark.parametrize("linked", [False, True], ids=["inside", "through a link"])
@pytest.mark.parametrize("field", OWN_FILES)
def test_a_folder_that_holds_what_steers_us_is_given_to_no_box(
    world: World, folder: Path, field: str, linked: bool
) -> None:
    """A box could read the secrets there, or name a program for the host to run."""
    outside = world.root / "link"
    outside.symlink_to(folder)
    place = (outside if linked else folder) / OWN_FILES[field]
    settings = msgspec.structs.replace(world.settings, **{field: place})
    fault = pidispatch.own_file_fault(settings, folder)
    assert fault and place.name in fault
    assert pidispatch.own_file_fault(world.settings, folder) is None


def test_a_cron_rules_folder_that_holds_what_steers_us_is_refused(
    world: World, folder: Path
) -> None:
    """Also by a worker, which has its settings from elsewhere."""
    world.change(on_failure=folder / "hook.sh", sessions_dir=folder / "sessions")
    local = run_here(world, folder)
    assert_refused(world, local.wait(), "folder-unusable")
    local.close()


def test_a_path_setting_that_is_added_later_is_watched_as_well() -> None:
    fields = pidispatch.Settings.__annotations__.items()
    assert {name for name, kind in fields if "Path" in str(kind)} == set(OWN_FILES)


@pytest.mark.parametrize("at", [".", "sub"])
def test_a_strangers_dotenv_runs_nothing_when_its_folder_is_worked_in(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """`cd FOLDER; pidispatch run .` would begin with that folder's own settings."""
    mark, hook = tmp_path / "owned", folder / "hook.sh"
    hook.write_text(f"#!/bin/sh\ntouch {mark}\n")
    hook.chmod(0o755)
    (folder / "sub").mkdir()
    (folder / at / ".env").write_text(f"PI_ON_FAILURE={hook}\n")
    monkeypatch.chdir(folder / at)
    monkeypatch.setenv("PI_DB", str(tmp_path / "pi.db"))
    monkeypatch.setenv("PI_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    told = CliRunner().invoke(pidispatch.main, ["run", str(folder), "--task", "x"])
    assert told.exit_code == 2 and "is steered" in told.output
    assert not mark.exists() and not (tmp_path / "pi.db").exists()


def test_a_projects_own_dotenv_is_no_matter(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / ".env").write_text("DATABASE_URL=x\n")
    assert pidispatch.own_file_fault(world.settings, folder) is None
    (folder / ".env").write_text("WEBHOOK_SECRET=x\n")
    assert pidispatch.own_file_fault(world.settings, folder)


def test_an_unknown_flow_is_refused_before_spending(world: World, folder: Path) -> None:
    local = run_here(world, folder, flow="no-such-flow")
    record = local.wait()
    local.close()
    assert_refused(world, record, "flow-not-found")


def test_a_folder_of_root_or_one_that_is_gone_is_refused(
    world: World, folder: Path
) -> None:
    if os.getuid() == 0:
        os.chown(folder, 0, 0)
        local = run_here(world, folder)
        assert_refused(world, local.wait(), "folder-unusable")
        local.close()
    gone = run_here(world, folder, task="another")
    shutil.rmtree(folder)
    assert_refused(world, gone.wait(), "folder-unusable")
    gone.close()


def test_a_remote_engine_is_refused_by_name(world: World, folder: Path) -> None:
    engine = demo.ProcessEngine(world.root / "boxes")
    engine.local = False
    job = pidispatch.local_job(rule(folder), time.time())
    local = pidispatch.LocalRun(world.settings, job, engine=engine)
    assert_refused(world, local.wait(), "local-needs-local-engine")
    local.close()


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("unix:///var/run/docker.sock", True),
        ("tcp://127.0.0.1:2375", False),
        ("tcp://engine.example:2376", False),
    ],
)
def test_an_engine_behind_a_socket_of_this_machine_is_a_local_one(
    monkeypatch: pytest.MonkeyPatch, host: str, local: bool
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    assert pidispatch.DockerEngine(pidispatch.Settings(), "x").local is local


@pytest.mark.docker
def test_an_engine_that_does_not_have_the_folder_refuses_and_keeps_the_slot(
    boxed: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket may lead to another machine: the folder is asked for, never made."""
    real = pidispatch.look_at_folder

    def elsewhere(*given: Any) -> pidispatch.Tree:
        place = folder.parent / "not-in-the-engine"
        return msgspec.structs.replace(real(*given), path=place)

    monkeypatch.setattr(pidispatch, "look_at_folder", elsewhere)
    local = run_here(boxed, folder)
    record = local.wait()
    used = local.store.status(pidispatch.Caps.of(boxed.settings), time.time()).used
    local.close()
    assert_refused(boxed, record, "local-needs-local-engine")
    assert used == 0
    assert not (folder.parent / "not-in-the-engine").exists()


def test_the_caps_hold_for_a_local_job(world: World, folder: Path) -> None:
    world.change(daily_cap=1)
    first = run_here(world, folder)
    assert first.wait().outcome == "completed"
    first.close()
    second = run_here(world, folder, task="more", allowDirty=True)
    record = second.wait()
    second.close()
    assert (record.outcome, record.reason) == ("policy", "over-budget")


def test_a_rules_default_of_publish_agent_is_no_matter_to_a_folder(
    world: World, folder: Path
) -> None:
    world.change(publish="agent")
    local = run_here(world, folder)
    assert local.wait().outcome == "completed"
    local.close()


# -- one at a time --------------------------------------------------------------


def test_two_jobs_of_one_folder_run_one_after_another(
    world: World, folder: Path
) -> None:
    slow = bash("echo began >> log.txt; sleep 0.4; echo ended >> log.txt")
    world.model.set_scripts(solve(slow, say()))
    world.rules()
    world.start()
    other = make_folder(world.root / "other")
    jobs = [
        admit(world, folder, task=t, allowDirty=True) for t in ("one", "two", "three")
    ]
    jobs.append(admit(world, other, allowDirty=True))
    rows = world.wait(jobs)
    assert [row.state for row in rows] == ["completed"] * 4
    assert (folder / "log.txt").read_text().split() == ["began", "ended"] * 3
    records = [world.record(job) for job in jobs]
    assert all(r.attempt == 1 for r in records), "waiting uses no attempt"
    assert records[3].startedAt and records[2].startedAt
    assert records[3].startedAt < records[2].startedAt, "another folder does not wait"


def test_a_folder_is_held_through_a_retrys_wait_and_by_its_real_name(
    store: pidispatch.Store, clock: FakeClock, tmp_path: Path
) -> None:
    place = tmp_path / "real"
    place.mkdir()
    (tmp_path / "link").symlink_to(place)
    first = pidispatch.local_job(rule(place, task="one"), clock())
    second = pidispatch.local_job(rule(tmp_path / "link", task="two"), clock())
    for job in (first, second):
        assert store.admit_local(job) == (job.id, True)
    held = store.claim()
    assert held and held.job.id == first.id
    assert store.claim() is None
    assert store.holder(second.id) == first.id
    assert store.start(held, pidispatch.Caps(9, None, None, "UTC")) is None
    store.retry(held, clock() + 60)
    assert store.claim() is None, "its tree is half edited"
    clock.pass_(60)
    again = store.claim()
    assert again and again.job.id == first.id
    store.finish(again, record_of(again), None)
    last = store.claim()
    assert last and last.job.id == second.id


@pytest.mark.parametrize("outer_first", [True, False])
def test_a_folder_within_another_is_not_worked_in_beside_it(
    store: pidispatch.Store, clock: FakeClock, tmp_path: Path, outer_first: bool
) -> None:
    """The box of the one could write, or replace by a link, the folder of the other."""
    places = [tmp_path / "notes", tmp_path / "notes" / "sub"]
    beside = tmp_path / "notes-too"
    places = places if outer_first else places[::-1]
    first, second, third = (
        pidispatch.local_job(rule(place), clock()) for place in (*places, beside)
    )
    for job in (first, second, third):
        store.admit_local(job)
    held = store.claim()
    assert held and held.job.id == first.id
    other = store.claim()
    assert other and other.job.id == third.id, "its name only begins alike"
    assert store.claim() is None
    assert store.holder(second.id) == first.id
    store.finish(held, record_of(held), None)
    last = store.claim()
    assert last and last.job.id == second.id


def test_a_retry_takes_its_own_half_done_work_for_no_dirt(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pidispatch, "RETRY_SECONDS", 0)
    world.model.set_scripts(solve(WORK, say(), bash("echo rest >> spoon.txt"), say()))
    real = demo.ProcessBox.collect
    codes = iter((1, 0))

    def collect(box: Any, into: Path) -> pidispatch.BoxExit:
        return msgspec.structs.replace(real(box, into), code=next(codes))

    monkeypatch.setattr(demo.ProcessBox, "collect", collect)
    local = run_here(world, folder)
    record = local.wait()
    local.close()
    assert (record.outcome, record.attempt) == ("completed", 2)


def test_the_same_words_in_the_same_minute_are_one_run(
    store: pidispatch.Store, clock: FakeClock, tmp_path: Path
) -> None:
    job = pidispatch.local_job(rule(tmp_path), clock())
    assert store.admit_local(job) == (job.id, True)
    assert store.admit_local(job) == (job.id, False)
    taken = store.claim()
    assert taken
    store.start(taken, pidispatch.Caps(9, None, None, "UTC"))
    store.finish(taken, record_of(taken), None)
    assert store.admit_local(job) == (job.id, False), "it was paid for"
    later = pidispatch.local_job(rule(tmp_path), clock() + 60)
    assert later.id != job.id and store.admit_local(later)[1]


def test_what_is_kept_of_a_local_job_has_no_path_and_no_task(
    store: pidispatch.Store, clock: FakeClock, tmp_path: Path
) -> None:
    place = tmp_path / "canary-parent" / "notes"
    store.admit_local(pidispatch.local_job(rule(place, task="canary-task"), clock()))
    taken = store.claim()
    assert taken
    store.start(taken, pidispatch.Caps(9, None, None, "UTC"))
    store.finish(taken, record_of(taken), None)
    kept = store._rows("SELECT payload FROM jobs")[0][0]
    assert "canary" not in kept and "notes" in kept


# -- a worker beside it ---------------------------------------------------------


def test_with_a_worker_the_run_is_left_to_it(world: World, folder: Path) -> None:
    world.rules()
    world.start()
    local = run_here(world, folder)
    record = local.wait()
    assert not local.here
    local.close()
    assert_done_in_place(world, folder, record)


def test_a_worker_that_leaves_does_not_leave_the_run_waiting(
    world: World, folder: Path
) -> None:
    """Also true of another `run`, which holds the file and works on its own alone."""
    other = pidispatch.worker_lock(world.settings.db)
    local = run_here(world, folder)
    done: list[pidispatch.Record] = []
    waiting = threading.Thread(target=lambda: done.append(local.wait()))
    waiting.start()
    time.sleep(0.05)
    assert not local.here
    other.close()
    waiting.join(30)
    assert done and done[0].outcome == "completed" and local.here
    local.close()


def test_a_run_here_touches_no_other_job_of_the_queue(
    world: World, folder: Path
) -> None:
    world.rules()
    world.start()
    world.stop()
    store = pidispatch.Store(world.settings.db)
    other = pidispatch.local_job(rule(folder, task="later"), time.time())
    store.admit_local(other)
    store.close()
    local = run_here(world, folder)
    assert local.wait().outcome == "completed"
    assert local.store.run(other.id)[0].state == "queued"
    local.close()


@pytest.mark.parametrize("state", ["claimed", "running", "waits for its retry"])
def test_a_folder_that_a_dead_worker_held_is_said_and_not_waited_for(
    world: World, folder: Path, state: str
) -> None:
    store = pidispatch.Store(world.settings.db)
    first = pidispatch.local_job(rule(folder, task="first"), time.time())
    store.admit_local(first)
    claimed = store.claim()
    assert claimed
    if state != "claimed":
        store.start(claimed, pidispatch.Caps.of(world.settings))
        store.running(claimed)
    if state.startswith("waits"):
        store.retry(claimed, time.time() + pidispatch.RETRY_SECONDS)
    store.close()
    local = run_here(world, folder)
    with pytest.raises(pidispatch.ConfigError, match=f"{first.id} has the folder"):
        local.wait()
    local.close()


def test_an_engine_that_is_away_ends_a_run_here_at_once(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    job = pidispatch.local_job(rule(folder), time.time())
    local = pidispatch.LocalRun(world.settings, job)
    record = local.wait()
    local.close()
    assert (record.outcome, record.reason) == ("failed", "infra")


# -- the command ----------------------------------------------------------------


def cli(world: World, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> Result:
    engine = demo.ProcessEngine(world.root / "boxes")
    monkeypatch.setattr(pidispatch, "settings_of", lambda db=None: world.settings)
    monkeypatch.setattr(pidispatch, "DockerEngine", lambda *_: engine)
    return CliRunner().invoke(pidispatch.main, ["run", *arguments])


def test_run_says_how_it_ended_and_exits_by_it(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = cli(world, str(folder), "--task", "Bend.", monkeypatch=monkeypatch)
    assert done.exit_code == 0, done.output
    first, _, answer = done.stdout.partition("\n")
    assert first.startswith("local-") and ": completed, " in first
    assert answer == "\nBent it.\n"

    dirty = cli(world, str(folder), "--task", "More.", monkeypatch=monkeypatch)
    assert dirty.exit_code == 2
    assert "policy (dirty-tree)" in dirty.stdout and "--force" in dirty.stdout

    world.model.set_scripts(solve(say()))
    more = ("--task", "More.", "--force", "--json")
    forced = cli(world, str(folder), *more, monkeypatch=monkeypatch)
    record = json.loads(forced.stdout)
    Draft202012Validator(pidispatch.output_schema("run")).validate(record)
    assert (record["outcome"], forced.exit_code) == ("completed", 0)
    again = cli(world, str(folder), *more, monkeypatch=monkeypatch)
    if json.loads(again.stdout)["jobId"] == record["jobId"]:  # still that minute
        assert "in this very minute before" in again.stderr
        assert json.loads(again.stdout) == record


def test_a_run_without_an_engine_is_trouble_of_the_machine(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    monkeypatch.setattr(pidispatch, "settings_of", lambda db=None: world.settings)
    told = CliRunner().invoke(pidispatch.main, ["run", str(folder), "--task", "x"])
    assert told.exit_code == 1
    assert "failed (infra)" in told.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("/no/such/place", "--task", "x"), "is not a directory here"),
        (("{root}", "--task", "x"), "not the top of a git work tree"),
        (("{folder}", "--task", " "), "must say what to do"),
        (("{folder}", "--task", "x", "--flow", "../x"), "must name a flow"),
        (("{folder}",), "--task"),
    ],
)
def test_a_mistake_of_run_is_told_and_nothing_is_queued(
    world: World,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    filled = [a.format(root=world.root, folder=folder) for a in arguments]
    told = cli(world, *filled, monkeypatch=monkeypatch)
    assert told.exit_code == 2 and words in told.output
    assert not world.settings.db.exists()


def test_a_paused_queue_takes_no_run(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = pidispatch.Store(world.settings.db)
    store.set_flag("paused", "1")
    told = cli(world, str(folder), "--task", "x", monkeypatch=monkeypatch)
    assert told.exit_code == 2 and "pidispatch resume" in told.output
    assert store.runs(9) == []
    store.close()


def test_an_interrupt_cancels_a_run_here(world: World, folder: Path) -> None:
    world.model.set_scripts(solve(bash("sleep 30"), say()))
    local = run_here(world, folder)
    real, calls = local.wait, iter((True,))

    def wait(tell: Any = None) -> pidispatch.Record:
        if next(calls, False):
            local._take()
            while local.store.run(local.job)[0].state != "running":
                time.sleep(0.02)
            raise KeyboardInterrupt
        return real()

    local.wait = wait  # type: ignore[method-assign]
    record = pidispatch._attended(local)
    local.close()
    assert (record.outcome, record.reason) == ("policy", "operator-cancel")
