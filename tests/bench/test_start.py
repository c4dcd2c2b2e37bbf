"""What the start of a command costs, against a bare `import click`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Maker
from table import Table

import pidispatch

pytestmark = pytest.mark.bench


@pytest.fixture
def seconds(tmp_path: Path) -> Callable[..., float]:
    """Seconds of a Python program, with the byte code cached as an install has it."""
    environ = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)

    def run(program: str) -> float:
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=Path(pidispatch.__file__).parent,
            env=environ,
        )
        return time.perf_counter() - began

    return run


def command(*words: object) -> str:
    """What the console script does."""
    given = ["pidispatch", *map(str, words)]
    return f"import sys; sys.argv = {given!r}; import pidispatch; pidispatch.main()"


def test_commands_start_quickly(
    store: pidispatch.Store,
    maker: Maker,
    seconds: Callable[..., float],
    pairs: int,
    table: Table,
) -> None:
    maker.history(store)
    programs = {
        "import click": "import click",
        "--help": command("--help"),
        "runs": command("runs", "--db", store.path),
    }
    for program in programs.values():
        seconds(program)
    rounds = [
        {name: seconds(program) for name, program in programs.items()}
        for _ in range(max(pairs, 5))
    ]
    for name, wanted, gross in (("--help", 2.0, 4), ("runs", 3.0, 6)):
        ours, click = ([took[n] for took in rounds] for n in (name, "import click"))
        said = f"(e) pidispatch {name} / import click"
        table.at_most(wanted, gross, said, ours, click, unit="s")
