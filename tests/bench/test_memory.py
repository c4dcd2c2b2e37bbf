"""Resident memory of `serve`: idle, and after many jobs went through it.

The jobs are refused, for an image that is not there: each is received, stored,
claimed, judged, recorded and told to the forge, and none costs a container.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import deliveries
import pytest
import servers
from table import Table

import pidispatch

pytestmark = [pytest.mark.bench, pytest.mark.docker]

SHORT, LONG = 200, 10_000
#: Deliveries on their way at once.
BATCH, CONNECTIONS = 200, 16


def megabytes(process: int, file: str, name: str) -> float:
    text = Path(f"/proc/{process}/{file}").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    assert found
    return int(found[1]) / 1024


@pytest.mark.timeout(3600)
def test_memory_is_small_and_does_not_grow(
    tmp_path: Path, pairs: int, table: Table
) -> None:
    count = SHORT if pairs < 5 else LONG
    with servers.fake_forge() as (forge, repo):
        loader = servers.Loader(tmp_path, deliveries.labeled_body(repo))
        absent = {"PI_JOB_IMAGE": "pi-job:absent", "PI_TARGET_HOURLY": "0"}
        with servers.pidispatch_serve(tmp_path, forge, paused=False, **absent) as serve:
            time.sleep(3)
            measure(table, serve, "idle", 60, 90)
            for first in range(1_000_001, 1_000_001 + count, BATCH):
                for number in range(first, first + BATCH):
                    repo.add_issue(number, title="The spoon stays straight")
                loader(serve.port, first, BATCH, CONNECTIONS)
                ended(tmp_path, first - 1_000_000 + BATCH - 1)
            measure(table, serve, f"after {count:,} refused jobs", 90, 150)
        loader.close()


def measure(
    table: Table, serve: servers.Server, when: str, wanted: float, gross: float
) -> None:
    pid = serve.process.pid
    pss = megabytes(pid, "smaps_rollup", "Pss")
    resident = megabytes(pid, "status", "VmRSS")
    name = f"(f) serve {when}, resident (PSS {pss:.1f} MB)"
    table.limit(wanted, gross, name, resident, "MB")


def ended(root: Path, count: int) -> None:
    """Wait until so many jobs are recorded and told."""
    deadline = time.monotonic() + 120
    reader = pidispatch.Reader(root / "pidispatch.db")
    while True:
        found = reader.status(servers.NO_CAPS, time.time()).jobs
        if found.get("done") == count:
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
