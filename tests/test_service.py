"""What keeps pidispatch running and its queue safe: units, the backup, completion."""

from __future__ import annotations

import os
import plistlib
import shlex
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import ROOT, FakeClock, Maker
from hypothesis import given
from hypothesis import strategies as st

import pidispatch


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> pidispatch.Store:
    made = pidispatch.Store(tmp_path / "pidispatch.db", clock)
    yield made
    made.close()


# -- units --------------------------------------------------------------------


def test_the_systemd_unit_starts_this_program_here_and_never_again_on_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    printed = CliRunner().invoke(pidispatch.main, ["service", "--for", "systemd"])
    lines = dict(
        line.split("=", 1) for line in printed.output.split("\n") if "=" in line
    )
    assert lines["RestartPreventExitStatus"] == "2"
    assert lines["Restart"] == "on-failure"
    assert lines["WorkingDirectory"] == str(tmp_path)
    assert shlex.split(lines["ExecStart"])[-1] == "serve"
    assert Path(shlex.split(lines["ExecStart"])[0]).is_absolute()
    for word in ("created", "kept   "):
        done = CliRunner().invoke(
            pidispatch.main, ["service", "--for", "systemd", "--install"]
        )
        assert done.output.startswith(word) and "systemctl --user" in done.output
    unit = tmp_path / "home/.config/systemd/user/pidispatch.service"
    assert unit.read_text() == printed.output


@given(st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1))
def test_a_path_means_itself_to_systemd(word: str) -> None:
    """Its own expansions are undone here as systemd.service(5) describes them."""
    quoted = pidispatch._unit_word(word)
    assert quoted[0] == quoted[-1] == '"'
    inner, plain, at = quoted[1:-1], "", 0
    while at < len(inner):
        pair = inner[at : at + 2]
        assert inner[at] != '"', "the quote would end here"
        if inner[at] in "\\%$":
            assert pair in ('\\"', "\\\\", "%%", "$$"), "an expansion would start here"
            at += 1
        plain += inner[at]
        at += 1
    assert plain == word


FAKE_SERVE = """\
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
code = sys.argv[1]
signal.pause() if code == "wait" else sys.exit(int(code))
"""


@pytest.mark.parametrize(("code", "told"), [("0", 0), ("1", 1), ("2", 0)])
def test_launchd_sees_a_wrong_configuration_as_an_end(code: str, told: int) -> None:
    """It knows only success and failure, and starts again what failed."""
    unit = pidispatch.launchd_agent([sys.executable, "-c", FAKE_SERVE, code], Path("/"))
    content = plistlib.loads(unit.text.encode())
    assert content["KeepAlive"] == {"SuccessfulExit": False}
    done = subprocess.run(content["ProgramArguments"], timeout=20, check=False)
    assert done.returncode == told


def test_launchd_stops_it_cleanly() -> None:
    unit = pidispatch.launchd_agent(
        [sys.executable, "-c", FAKE_SERVE, "wait"], Path("/")
    )
    argv = plistlib.loads(unit.text.encode())["ProgramArguments"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as running:
        assert running.stdout and running.stdout.readline() == b"up\n"
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0


# -- the backup ---------------------------------------------------------------


def test_a_backup_is_whole_private_and_taken_while_others_write(
    store: pidispatch.Store, maker: Maker, tmp_path: Path
) -> None:
    maker.history(store)
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            store.count("duplicate")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        copy = tmp_path / "copy.db"
        result = CliRunner().invoke(
            pidispatch.main, ["backup", str(copy), "--db", str(store.path)]
        )
        assert result.exit_code == 0, result.output
    finally:
        done.set()
        writer.join()
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert {row.id for row in pidispatch.Reader(copy).runs(9)} == {
        row.id for row in store.runs(9)
    }
    assert pidispatch.Reader(copy).integrity() == "ok"
    pidispatch.Store(copy).close()  # it can be gone on with
    assert {path.name for path in tmp_path.iterdir() if "part" in path.name} == set()


def test_a_backup_overwrites_nothing_and_leaves_nothing_half_written(
    store: pidispatch.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.write_text("mine")
    argv = ["--db", str(store.path)]
    for target in (there, tmp_path, tmp_path / "none" / "copy"):
        result = CliRunner().invoke(pidispatch.main, ["backup", str(target), *argv])
        assert result.exit_code == 2 and "name a new file" in result.output
    assert there.read_text() == "mine"
    before = {path.name for path in tmp_path.iterdir()}
    none = tmp_path / "none.db"
    result = CliRunner().invoke(
        pidispatch.main, ["backup", str(tmp_path / "new"), "--db", str(none)]
    )
    assert result.exit_code == 2
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_database_that_is_no_database_is_not_backed_up(tmp_path: Path) -> None:
    bad = tmp_path / "bad.db"
    bad.write_bytes(b"not a database" * 400)
    result = CliRunner().invoke(
        pidispatch.main, ["backup", str(tmp_path / "new"), "--db", str(bad)]
    )
    assert result.exit_code in (1, 2) and "Traceback" not in result.output
    assert not (tmp_path / "new").exists()
    with pytest.raises(sqlite3.DatabaseError):
        sqlite3.connect(bad).execute("SELECT 1 FROM jobs")


# -- completion ---------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_complete(shell: str) -> None:
    result = CliRunner().invoke(
        pidispatch.main,
        env={"_PIDISPATCH_COMPLETE": f"{shell}_source"},
        prog_name="pidispatch",
    )
    assert result.exit_code == 0 and "pidispatch" in result.output


def test_job_ids_are_completed_from_the_queue(
    store: pidispatch.Store, maker: Maker
) -> None:
    maker.history(store)
    environ = {
        **os.environ,
        "PI_DB": str(store.path),
        "_PIDISPATCH_COMPLETE": "bash_complete",
        "COMP_WORDS": "pidispatch show gh-set",
        "COMP_CWORD": "2",
    }
    program = "import pidispatch; pidispatch.main(prog_name='pidispatch')"
    argv = [sys.executable, "-c", program]
    done = subprocess.run(
        argv, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["plain,gh-set-r2", "plain,gh-set-r1"]
    environ["PI_DB"] = "/nonexistent/none.db"
    done = subprocess.run(
        argv, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("", "")
