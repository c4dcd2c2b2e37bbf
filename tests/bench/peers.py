"""The peers we measure ourselves against, fetched into a cache and started from it.

Nothing of them is a dependency of the product, and nothing is installed in the
system: Debian's packages are unpacked, npm's and Python's go into folders.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from conftest import lacking

HERE = Path(__file__).parent
#: redis-server's libraries are unpacked beside it.
DEBIAN = (
    "webhook",
    "redis-server",
    "redis-tools",
    "libatomic1",
    "libjemalloc2",
    "liblzf1",
)
#: The newest that Debian 12's Node (18) runs.
NODE = ("bullmq@6.7.0", "ioredis@5.11.1", "@octokit/webhooks@13.9.1")
PYTHON = ("huey==3.5.4", "litequeue==0.9")


def cache() -> Path:
    named = os.environ.get("PIDISPATCH_BENCH_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else home / "pidispatch-bench"


def _fetched(name: str, wanted: tuple[str, ...], fetch: Callable[[Path], None]) -> Path:
    """A folder of the cache, filled once for this list of what is wanted."""
    folder = cache() / name
    mark = folder / "fetched"
    if not mark.exists() or mark.read_text() != "\n".join(wanted):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            fetch(folder)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or ""
            lacking(f"the peers {', '.join(wanted)} cannot be had: {error}\n{said}")
        mark.write_text("\n".join(wanted))
    return folder


def _run(*command: str, cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)


def _unpack(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        try:
            _run("apt-get", "-q", "download", *DEBIAN, cwd=Path(work))
        except subprocess.CalledProcessError:  # an image without package lists
            _run("apt-get", "-q", "update", cwd=Path(work))
            _run("apt-get", "-q", "download", *DEBIAN, cwd=Path(work))
        for package in Path(work).glob("*.deb"):
            _run("dpkg", "-x", str(package), str(folder), cwd=folder)


@functools.cache
def debian() -> Path:
    """The root under which Debian's packages are unpacked."""
    return _fetched("debian", DEBIAN, _unpack)


@functools.cache
def node() -> Path:
    """A folder in which our scripts find the packages of NODE."""
    quiet = ("--no-audit", "--no-fund", "--ignore-scripts")
    folder = _fetched("node", NODE, lambda at: _run("npm", "i", *quiet, *NODE, cwd=at))
    for script in HERE.glob("*.mjs"):
        shutil.copy(script, folder)
    return folder


@functools.cache
def python() -> Path:
    """A folder for the path of a Python that wants PYTHON."""
    pip = (sys.executable, "-m", "pip", "-q", "install", "--target", ".")
    return _fetched("python", PYTHON, lambda at: _run(*pip, *PYTHON, cwd=at))


def debian_environ() -> dict[str, str]:
    """The environment in which unpacked programs find their libraries."""
    libraries = debian().glob("usr/lib/*-linux-gnu")
    path = ":".join(map(str, libraries))
    return {**os.environ, "LD_LIBRARY_PATH": path}
