"""doctor: what a canary, a clock, a disk, a worker and a file mode say; and --fix."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import test_cli
import world
from conftest import JOB_IMAGE, ROOT
from test_cli import PaperEngine, Room, cli, printed

import pidispatch
import pidispatch_demo as demo
from pidispatch import Canary, Check, DockerEngine, Heard

__all__ = ["folder", "forge", "paper", "queue", "well"]  # fixtures of test_cli
folder, forge, paper = test_cli.folder, test_cli.forge, test_cli.paper
queue, well = test_cli.queue, test_cli.well


def line_of(checks: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(check for check in checks if check["name"] == name)


# -- a machine with one fault ---------------------------------------------------


def test_doctor_of_a_machine_with_nothing_configured_says_what_comes_first(
    folder: Path,
) -> None:
    """No engine, no forge, no key, no rules: each by its own line, and exit 1."""
    (folder / "triggers.json").unlink()
    assert cli("doctor").exit_code == 1
    checks = printed("doctor")
    failed = {c["name"] for c in checks if c["state"] == "fail"}
    assert failed == {"engine", "forges", "provider", "triggers"}
    assert all(c["fix"] for c in checks if c["state"] != "ok")


def canary(**seen: Any) -> Callable[[PaperEngine], None]:
    def spoil(paper: PaperEngine) -> None:
        paper.seen = msgspec.structs.replace(paper.seen, **seen)

    return spoil


def full(paper: PaperEngine) -> None:
    paper.subnets = ["10.0.0.0/8"]


def nearly_full(paper: PaperEngine) -> None:
    paper.subnets = [f"10.213.{n}.0/22" for n in (0, *range(8, 128, 4))]
    paper.subnets += ["10.213.128.0/18", "10.213.192.0/19"]
    paper.subnets += [f"10.213.{n}.0/24" for n in range(224, 255)]
    paper.subnets += [f"10.213.255.{n}/28" for n in range(0, 224, 16)]


def narrow(paper: PaperEngine) -> None:
    """Networks enough, but the gates share one that had a few addresses only."""
    paper.outer = "10.213.4.0/28"


def elsewhere(paper: PaperEngine) -> None:
    paper.outer = "10.217.4.0/22"


def old_row(job: str, instance: str = "doctor") -> dict[str, Any]:
    labels = {"instance": instance, "job": job}
    named = {pidispatch.LABEL + name: value for name, value in labels.items()}
    return {"Id": job, "Created": time.time() - 7200, "Labels": named}


def leftover(paper: PaperEngine) -> None:
    paper.rows = [old_row("canary-1", "doctor")]


MODEL = "anthropic"
OUTSIDE = pidispatch._OUTSIDE
SPOILT: list[tuple[str, Callable[[PaperEngine], None], str]] = [
    ("host", canary(host=("10.0.0.1",)), "✗ isolation: this engine does not keep"),
    ("no gate", canary(gate=False), "✗ gate: it started and did not answer"),
    (
        "open gate",
        canary(hosts={OUTSIDE: Heard(200)}),
        f"✗ gate: starts; {OUTSIDE}, which is not listed, is NOT refused",
    ),
    (
        "closed host",
        canary(hosts={OUTSIDE: Heard(403), "a.example:443": Heard(502, True)}),
        "⚠ egress: a.example:443 is listed and does not open (HTTP 502)",
    ),
    (
        "no model",
        canary(models={MODEL: Heard(502, True)}),
        "✗ model: anthropic does not answer through the gate",
    ),
    (
        "no answer",
        canary(models={MODEL: Heard(0)}),
        "✗ model: anthropic does not answer through the gate",
    ),
    ("wrong key", canary(models={MODEL: Heard(401)}), "✗ model: anthropic through"),
    ("busy model", canary(models={MODEL: Heard(529)}), "⚠ model: anthropic through"),
    ("pool full", full, "✗ address pool: 10.213.0.0/16 has room for 0 jobs"),
    ("pool small", nearly_full, "⚠ address pool: 10.213.0.0/16 has room for 2 jobs"),
    ("way out small", narrow, "⚠ address pool: pi-dispatch-out, which gates share, is"),
    ("way out elsewhere", elsewhere, "⚠ address pool: pi-dispatch-out, which gates"),
    ("leftover", leftover, "⚠ stale containers: of jobs that are over: canary-1"),
]


@pytest.mark.parametrize(
    ("spoil", "line"), [row[1:] for row in SPOILT], ids=[row[0] for row in SPOILT]
)
def test_one_fault_of_the_engine_is_one_line_with_one_fix(
    spoil: Callable[[PaperEngine], None],
    line: str,
    well: dict[str, str],
    paper: PaperEngine,
) -> None:
    spoil(paper)
    the_only_fault(line, cli("doctor", **well))


def the_only_fault(line: str, result: Any) -> None:
    """`line` and a fix stand there, nothing else is wrong, the exit code says it."""
    lines = result.output.splitlines()
    wrong = [text for text in lines if text[0] in "✗⚠"]
    assert [text[: len(line)] for text in wrong] == [line], result.output
    assert lines[lines.index(wrong[0]) + 1].startswith("    fix: ")
    assert result.exit_code == int(line.startswith("✗"))


@pytest.mark.parametrize(
    ("seconds", "mark", "side"),
    [
        (3600, "✗", "behind"),
        (-3600, "✗", "ahead of"),
        (90, "⚠", "behind"),
        (0, "✓", "the forge"),
    ],
)
def test_our_clock_is_compared_with_the_one_in_the_forges_answer(
    seconds: int,
    mark: str,
    side: str,
    well: dict[str, str],
    forge: demo.FakeGitHub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token of an App and a signed time both need the forge's own hour."""
    monkeypatch.setattr(forge, "clock", lambda: time.time() + seconds)
    result = cli("doctor", **well)
    [said] = [line for line in result.output.splitlines() if " clock: " in line]
    assert said.startswith(f"{mark} clock: ")
    assert said.endswith(f" s {side} the forge" if seconds else " the forge")
    if seconds:
        the_only_fault(said, result)


def test_a_clock_that_cannot_be_compared_is_said_so(folder: Path) -> None:
    line = line_of(printed("doctor"), "clock")
    assert line["found"] == "not compared: no forge's API answered with its time"


@pytest.mark.parametrize(
    ("free", "line"),
    [
        (2**29, "✗ disk: 512 MiB free for the database, PI_STATE_DIR"),
        (2**31, "⚠ disk: 2.0 GiB free for the database, PI_STATE_DIR"),
    ],
)
def test_a_disk_that_runs_full_is_said_before_a_job_finds_out(
    free: int, line: str, well: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Room(2**40, 2**40, free))
    the_only_fault(line, cli("doctor", **well))


def test_a_log_of_the_database_that_grew_is_said(
    well: dict[str, str],
    queue: str,
    store: pidispatch.Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beat(store)
    monkeypatch.setattr(pidispatch, "WAL_MOST", 0)
    result = cli("doctor", "--db", queue, **well)
    the_only_fault(f"⚠ wal: {queue}-wal has grown to ", result)


def beat(store: pidispatch.Store) -> None:
    """A heartbeat of now, by the machine's own time."""
    store.clock = time.time
    store.beat()


def test_doctor_tells_a_working_worker_from_jobs_that_wait_for_one(
    well: dict[str, str], queue: str, store: pidispatch.Store
) -> None:
    line = "⚠ worker: none works on this database, and 2 jobs are open"
    the_only_fault(line, cli("doctor", "--db", queue, **well))
    store.clock = lambda: time.time() - 600
    store.beat()
    line = "⚠ worker: none works on this database; the last was seen at "
    the_only_fault(line, cli("doctor", "--db", queue, **well))
    beat(store)
    result = cli("doctor", "--db", queue, **well)
    assert result.exit_code == 0
    assert "✓ worker: works; seen 0 s ago" in result.output


# -- --fix ----------------------------------------------------------------------


def open_all(paths: list[Path]) -> None:
    for path in paths:
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_fix_closes_the_files_that_hold_secrets_and_nothing_else(
    well: dict[str, str], folder: Path, queue: str, store: pidispatch.Store
) -> None:
    beat(store)
    state = folder / "state"
    state.mkdir()
    (folder / ".env").touch()
    ours = [folder / ".env", Path(queue), Path(f"{queue}-wal"), Path(f"{queue}-shm")]
    others = [folder / "triggers.json", state / "mirrors", folder]
    (state / "mirrors").mkdir()
    open_all([*ours, state, *others])
    given = ("doctor", "--db", queue)
    environ = {**well, "PI_STATE_DIR": str(state)}
    before = cli(*given, **environ)
    assert before.output.count("⚠ modes: ") == len(ours) + 1
    after = cli(*given, "--fix", **environ)
    for path in (Path(".env"), *ours[1:]):
        assert f"✓ fixed: chmod 600 {path}\n" in after.output
    assert f"✓ fixed: chmod 700 {state}\n" in after.output
    assert after.output.count("fixed") == len(ours) + 1
    assert [p.stat().st_mode & 0o777 for p in (*ours, state)] == [0o600] * 4 + [0o700]
    assert [p.stat().st_mode & 0o777 for p in others] == [0o644, 0o755, 0o755]
    assert "⚠" not in after.output
    assert "fixed" not in cli(*given, "--fix", **environ).output


def test_fix_removes_containers_of_ended_jobs_and_leaves_every_other(
    well: dict[str, str], paper: PaperEngine, queue: str, store: pidispatch.Store
) -> None:
    """Those of open jobs, of other databases, and of this very moment stay."""
    beat(store)
    own = store.instance()
    young = {**old_row("canary-2"), "Created": time.time()}
    stay = [
        old_row("gh-set-r2", own),  # its row says running: the next start adopts it
        old_row("gh-later", "another"),
        young,
    ]
    gone = [old_row("gh-no", own), old_row("unknown", own), old_row("canary-1")]
    gone.append(old_row("verify-image", "verify-image"))
    paper.rows = [*stay, *gone]
    given = ("doctor", "--db", queue)
    line = "⚠ stale containers: of jobs that are over: gh-no, unknown, canary-1, verify"
    the_only_fault(line, cli(*given, **well))
    assert paper.rows == [*stay, *gone], "only --fix removes"
    result = cli(*given, "--fix", **well)
    for row in gone:
        assert f"✓ fixed: removed the containers of {row['Id']}\n" in result.output
    assert paper.rows == stay
    assert "✓ stale containers: none" in result.output


def test_what_fix_could_not_do_is_a_failure_that_is_said(
    well: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / ".env").touch(0o644)

    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    result = cli("doctor", "--fix", **well)
    assert result.exit_code == 1
    assert "✗ fixed: chmod 600 .env: Operation not permitted" in result.output


# -- the canary on a real engine --------------------------------------------------


def test_the_canary_knows_where_each_style_lists_its_models() -> None:
    sys.path.insert(0, str(ROOT / "image"))
    import gate

    lists = {name: style.models for name, style in gate.STYLES.items()}
    assert lists == pidispatch.MODEL_LISTS


#: The machine's engine; `folder` hides it from every other test here.
DOCKER_HOST = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")


@pytest.fixture
def real(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[world.World]:
    monkeypatch.setenv("DOCKER_HOST", DOCKER_HOST)
    import docker

    client = docker.from_env(use_context=False, timeout=60).api
    with world.world(tmp_path, client) as made:
        made.change(job_image=JOB_IMAGE, gate_image=JOB_IMAGE)
        yield made


def ours(client: Any, instance: str = "doctor") -> list[str]:
    """Names of the objects that checks left in the engine."""
    filters = {"label": f"{pidispatch.LABEL}instance={instance}"}
    rows = [*client.containers(all=True, filters=filters)]
    rows += client.networks(filters=filters)
    rows += client.volumes(filters=filters)["Volumes"] or ()
    return [str(row.get("Names") or row["Name"]) for row in rows]


@contextlib.contextmanager
def listener(host: str) -> Iterator[int]:
    with socket.create_server((host, 0)) as server:
        yield int(server.getsockname()[1])


@pytest.mark.docker
def test_a_canary_shows_a_listed_host_open_and_another_closed_through_a_real_gate(
    real: world.World,
) -> None:
    """And the model answers, the host does not, and nothing is left in the engine."""
    host = world.bridge_address(real.docker)
    with listener(host) as listed, listener(host) as other:
        real.change(egress_allow=(f"{host}:{listed}",))
        checks = pidispatch.doctor(real.settings, real.root / "triggers.json")
        engine = DockerEngine(real.settings, "doctor")
        provider = real.settings.providers["fake"]
        errand = pidispatch._errand(real.settings, [provider])
        hosts = (f"{host}:{listed}", f"{host}:{other}")
        errand = msgspec.structs.replace(errand, hosts=hosts)
        image = engine.image(JOB_IMAGE)
        assert image
        seen = pidispatch.canary(engine, image, errand)
    assert {check.state for check in checks} == {"ok"}, checks
    found = [check.found for check in checks]
    assert f"{host}:{listed} is open through the gate" in found
    assert f"starts; {OUTSIDE}, which is not listed, is refused" in found
    assert "fake answers through the gate" in found
    assert "a box does not reach the engine's host" in found
    assert seen.hosts == {hosts[0]: Heard(200), hosts[1]: Heard(403)}
    assert real.model.log == [], "nothing is spent on a look"
    assert ours(real.docker) == []


@pytest.mark.docker
def test_a_wrong_key_and_a_silent_model_are_told_apart_through_a_real_gate(
    real: world.World,
) -> None:
    fake = real.settings.providers["fake"]
    silent = msgspec.structs.replace(
        fake, name="silent", base_url="http://127.0.0.1:9/v1"
    )
    real.change(
        providers={"fake": fake, "silent": silent},
        keys={"fake": "wrong", "silent": "x"},
    )
    real.rules({}, {"provider": "silent", "model": "m"})
    checks = pidispatch.doctor(real.settings, real.root / "triggers.json")
    wrong = {check.found: check.fix for check in checks if check.state != "ok"}
    key, no_answer = wrong
    assert key == "fake through the gate: HTTP 401: it refuses the key"
    assert wrong[key] == "set FAKE_KEY to a key that it takes"
    assert no_answer.startswith("silent does not answer through the gate; a server")
    assert "127.0.0.1" in no_answer
    assert ours(real.docker) == []


def test_an_engine_that_hangs_is_not_waited_for_to_know_that_it_does(
    paper: PaperEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that is told to end would wait for that answer too."""
    monkeypatch.setenv("DOCKER_HOST", paper.url)
    monkeypatch.setattr(pidispatch, "ANSWER_SECONDS", 0.2)
    engine = DockerEngine(pidispatch.Settings(), "x")
    assert engine.api.timeout == pidispatch.ENGINE_SECONDS
    paper.hangs, began = True, time.monotonic()
    with pytest.raises(pidispatch.InfraError, match="timed out"):
        engine.answer()
    assert time.monotonic() - began < 1.5
    assert engine.api.timeout == pidispatch.ENGINE_SECONDS


def test_a_way_out_that_is_of_no_fit_hides_no_lack_of_room(
    well: dict[str, str], paper: PaperEngine
) -> None:
    narrow(paper)
    full(paper)
    said = cli("doctor", **well)
    assert "⚠ address pool: pi-dispatch-out, which gates share" in said.output
    assert "✗ address pool: 10.213.0.0/16 has room for 0 jobs" in said.output
    assert said.exit_code == 1


class Leaking(DockerEngine):
    """An engine that ignores inhibit_ipv4, as Podman's socket does: real networks."""

    def create_job_network(self, name: str, labels: Any) -> Any:
        return self._create_network(
            name, self._subnets(), internal=True, labels=dict(labels)
        )[1]


@pytest.mark.docker
def test_the_canary_sees_an_engine_that_leaves_its_host_within_reach(
    real: world.World,
) -> None:
    """40-box: `internal` alone does not keep a box from the host's listeners."""
    leaking = Leaking(real.settings, "doctor")
    assert leaking.isolates(None) is None
    sound = DockerEngine(real.settings, "doctor")
    proven = sound.isolates(None)
    assert proven
    assert leaking.isolates(proven) == proven, "a proved engine is not looked at again"
    assert leaking.isolates("another engine") is None
    assert ours(real.docker) == []


@pytest.mark.docker
def test_serve_refuses_jobs_on_an_engine_that_leaves_the_host_within_reach(
    real: world.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found at the start, by a real box; the job's issue is told, nothing is spent."""
    monkeypatch.setattr(world.World, "proven", None)
    monkeypatch.setattr(DockerEngine, "create_job_network", Leaking.create_job_network)
    real.start()
    [row] = real.wait(real.label())
    assert (row.state, row.reason) == ("policy", "engine-not-isolating")
    assert real.model.log == []
    real.wait_for(lambda: any("inhibit_ipv4" in text for text in real.comments()))
    assert real.nothing_left()


@pytest.mark.docker
def test_a_real_job_is_stopped_before_the_disk_is_full_and_its_work_is_kept(
    real: world.World,
) -> None:
    """30-jobs: `disk-low`, decided by us, with the same ten seconds as every stop."""
    real.model.set_scripts(world.solve(world.bash("sleep 30"), world.say()))
    service = real.start()
    [job] = real.label()
    real.wait_for(lambda: real.containers() and real.model.log)
    dispatcher = service.workers.dispatcher
    assert dispatcher.engine.disk() or not DOCKER_HOST.startswith("unix:")
    dispatcher.free = lambda path: pidispatch.DISK_STOP - 1
    [row] = real.wait([job])
    assert (row.state, row.reason) == ("policy", "disk-low")
    record = real.record(job)
    assert record.budgetReserved, "it ran: its slot is spent"
    dispatcher.free = pidispatch.free_bytes
    assert real.nothing_left()


@pytest.mark.docker
def test_fix_removes_a_real_container_of_a_job_that_is_over_with_its_network(
    real: world.World,
) -> None:
    """A killed process leaves them; the volumes and the network go along."""
    with contextlib.closing(pidispatch.Store(real.settings.db)) as store:
        instance = store.instance()
    engine = DockerEngine(real.settings, instance)
    image = engine.image(JOB_IMAGE)
    assert image
    spec = pidispatch.BoxSpec(
        job="gh-over",
        attempt=1,
        image=image,
        gate_image=image,
        gate_line=b"",
        environment={},
        command=("true",),
    )
    pidispatch.DockerBox.opened(engine, spec).start({})
    assert len(ours(real.docker, instance)) == 5  # box, network, three volumes
    now = time.time()
    assert pidispatch.mend(real.settings, now) == []
    done = pidispatch.mend(real.settings, now + pidispatch.STALE_SECONDS + 60)
    assert Check("fixed", "ok", "removed the containers of gh-over") in done
    assert ours(real.docker, instance) == []


def test_a_provider_of_a_replicas_model_is_looked_at_as_well() -> None:
    on = pidispatch.On(type="label", any=("x",))
    run = pidispatch.Run(
        kind="github", flow="f", replicas=2, replicaModels=("openai/a", "google/b")
    )
    names = pidispatch.providers_of(
        pidispatch.Settings(), [pidispatch.Rule(0, on, run)]
    )
    assert names == ["anthropic", "google", "openai"]


def test_a_canary_that_says_nothing_is_a_failure_of_its_own_line(
    well: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object) -> Canary:
        raise pidispatch.InfraError("a box said nothing within 12 s")

    monkeypatch.setattr(pidispatch, "canary", silent)
    the_only_fault("✗ canary: a box said nothing", cli("doctor", **well))
