"""The database's disk runs full, turns read-only or fails under the real service.

Each is a file system of the test's own, so this needs root: a small one in memory, and
one in a file that ext4 is told to give up, as it does by itself after an I/O error.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import lacking
from world import SECRET, World
from world import world as make_world

import pidispatch


@dataclass
class Disk:
    """A mounted file system of a few MiB."""

    place: Path

    @property
    def filler(self) -> Path:
        return self.place / "filler"

    def fill(self) -> None:
        """Leave not one byte."""
        with self.filler.open("ab", buffering=0) as sink:
            for size in (65536, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        sink.write(b"x" * size)

    def run(self, *command: object) -> None:
        subprocess.run([str(word) for word in command], check=True)


def mounted(place: Path, *command: object) -> None:
    place.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", *(str(word) for word in command), str(place)], capture_output=True
    )
    if done.returncode:
        lacking(f"no file system can be mounted: {done.stderr.decode().strip()}")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Disk]:
    """2 MiB in memory."""
    place = tmp_path / "small"
    mounted(place, "-t", "tmpfs", "-o", "size=2m", "none")
    yield Disk(place)
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[Disk]:
    """16 MiB of ext4 in a file."""
    image, place = tmp_path / "image", tmp_path / "failing"
    with image.open("wb") as sink:
        sink.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    mounted(place, "-o", "loop", image)
    yield Disk(place)
    subprocess.run(["umount", "-l", str(place)], check=True)


@contextlib.contextmanager
def world_on(disk: Disk, root: Path) -> Iterator[World]:
    with make_world(root) as world:
        world.change(db=disk.place / "pidispatch.db")
        begin(world)
        yield world


def begin(world: World) -> None:
    """A few MiB are below the floor at which no job starts; that is not the matter."""
    service = world.start()
    service.workers.dispatcher.free = lambda place: pidispatch.DISK_FLOOR


def deliver(world: World, number: int) -> int:
    """Label that issue, new to the forge or not; the answer's status."""
    if number not in world.repo.issues:
        world.repo.add_issue(number, title="t" * 200, body="b" * 20_000)
    labelled = world.forge.label(
        world.repo, number, "pi:urgent", "maintainer", SECRET, f"{world.name}-{number}"
    )
    return world.send(*labelled)[0]


def deliver_until(world: World, status: int, numbers: Iterator[int]) -> list[int]:
    """Deliver until the edge says so; the numbers that were acknowledged before."""
    taken = []
    for number in numbers:
        if (said := deliver(world, number)) == status:
            return taken
        assert said == 202
        taken.append(number)
    raise AssertionError(f"never {status}")


def known(world: World) -> set[str]:
    """The ids on file, read by nobody of ours."""
    with contextlib.closing(sqlite3.connect(world.settings.db)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return {row[0] for row in db.execute("SELECT id FROM deliveries")}


def ids(world: World, numbers: list[int]) -> set[str]:
    return {f"gh-{world.name}-{number}" for number in numbers}


def test_a_full_disk_answers_503_loses_nothing_and_recovers_by_itself(
    small: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with world_on(small, tmp_path) as world:
        world.store.pause()
        small.fill()
        numbers = iter(range(100, 400))
        taken = deliver_until(world, 503, numbers)
        refused = 100 + len(taken)
        assert deliver(world, refused) == 503, "and goes on saying so"
        assert len(world.store.runs(999)) == len(taken), "while it can be read"
        assert "delivery-not-stored" in caplog.text
        small.filler.unlink()
        assert deliver(world, refused) == 202, "the same delivery, sent again"
        taken.append(refused)
        world.store.resume()
        rows = world.wait(sorted(ids(world, taken)), 120)
        assert {row.state for row in rows} == {"completed"}
        world.stop()
        assert known(world) == ids(world, taken)


def test_a_job_that_ends_on_a_full_disk_waits_for_room_and_is_recorded_once(
    small: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with world_on(small, tmp_path) as world:
        caplog.set_level("INFO", "pidispatch")
        store = world.store
        finish = store.finish
        filled = iter([True])

        def when_full(*args: object) -> None:
            if next(filled, False):
                small.fill()
                deliver_until(world, 503, iter(range(100, 400)))
            finish(*args)  # type: ignore[arg-type]

        store.finish = when_full  # type: ignore[method-assign]
        [job] = world.label()
        world.wait_for(lambda: "waiting-for-machine" in caplog.text)
        assert store.run(job)[0].state == "running"
        small.filler.unlink()
        [row] = world.wait([job])
        assert (row.state, row.tokens is not None) == ("completed", True)
        assert len(world.pulls()) == 1
        assert "machine-is-back" in caplog.text


def test_a_disk_that_turns_read_only_answers_503_and_keeps_what_was_said(
    failing: Disk, tmp_path: Path
) -> None:
    with world_on(failing, tmp_path) as world:
        world.store.pause()
        taken = [100, 101]
        assert [deliver(world, number) for number in taken] == [202, 202]
        failing.run("mount", "-o", "remount,abort", failing.place)
        assert deliver(world, 102) == 503
        assert len(world.store.runs(9)) == 2, "what is there can be read"
        world.stop()
        after = tmp_path / "after"  # as a crash would leave the disk
        shutil.copyfile(tmp_path / "image", after)
        failing.run("umount", "-l", failing.place)
        mounted(failing.place, "-o", "loop", after)
        begin(world)
        assert deliver(world, 102) == 202
        world.store.resume()
        rows = world.wait(sorted(ids(world, [*taken, 102])))
        assert {row.state for row in rows} == {"completed"}
        world.stop()
        assert known(world) == ids(world, [*taken, 102])


def test_a_start_on_a_read_only_disk_is_refused_by_name(
    failing: Disk, tmp_path: Path
) -> None:
    path = failing.place / "pidispatch.db"
    pidispatch.Store(path).close()
    before = path.read_bytes()
    failing.run("mount", "-o", "remount,ro", failing.place)
    with pytest.raises(pidispatch.ConfigError, match=str(path)) as caught:
        pidispatch.Store(path)
    assert caught.value.fix
    assert path.read_bytes() == before
    assert {entry.name for entry in failing.place.iterdir()} == {
        "lost+found",
        path.name,
    }
