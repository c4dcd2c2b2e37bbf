"""The receiver, the panel, claims and a cron in one process, for the load tests.

`load_service.py serve FOLDER` prints the ports of both doors and goes on until TERM.
What a job would cost between its claim and its record is left out: no engine, no
forge. `load_service.py look PANEL FOLDER` is what a person has open meanwhile.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conftest import record_of
from world import SECRET, TOKEN

import pidispatch
from pidispatch import Caps

CRONS = 20
#: Claims that are run to their records, each second.
CLAIMS = 30


def work(store: pidispatch.Store, stopping: threading.Event) -> None:
    """Claim, start, run, record."""
    caps = Caps(None, None, None, "UTC")
    while not stopping.wait(1 / CLAIMS):
        claimed = store.claim()
        if claimed and store.start(claimed, caps) is None:
            store.running(claimed)
            store.finish(claimed, record_of(claimed), None)


def rules(root: Path) -> Iterator[dict[str, Any]]:
    """A label, and as many crons that all fire with the minute."""
    on, run = {"type": "label", "any": ["pi:fix"]}, {"flow": "fix-issue"}
    yield {"on": on, "run": run | {"kind": "github"}}
    for n in range(CRONS):
        folder = root / f"folder-{n}"
        subprocess.run(["git", "init", "-q", folder], check=True)
        on = {"type": "cron", "id": f"minutely-{n}", "pattern": "* * * * *"}
        own = {"kind": "local", "folder": str(folder), "task": "Tidy."}
        yield {"on": on, "run": run | own}


def serve(root: Path) -> None:
    rows = list(rules(root))
    (root / "triggers.json").write_text(json.dumps({"triggers": rows}))
    environ = {
        "WEBHOOK_SECRET": SECRET,
        "GITHUB_PAT": TOKEN,
        "PI_DB": str(root / "pidispatch.db"),
        "PI_STATE_DIR": str(root / "state"),
        "PI_PANEL_PORT": "0",
    }
    settings = pidispatch.load_settings(environ, None)
    pidispatch.set_up_logging(settings)
    store = pidispatch.Store(settings.db)
    forges = pidispatch.forges_of(settings)
    triggers = pidispatch.TriggersFile(root / "triggers.json", forges)
    intake = pidispatch.Intake(forges, triggers, store, settings.target_hourly)
    intake.own["github"] = "1"  # there is no forge to ask
    edge = pidispatch.Edge(intake, "127.0.0.1", 0)
    engine = pidispatch.DockerEngine(settings, "load")
    panel = pidispatch.Panel(settings, store, triggers, engine)
    cron = pidispatch.Cron(store, lambda: triggers.rules)
    stopping = threading.Event()
    working = threading.Thread(target=work, args=(store, stopping))
    for part in (edge, panel, cron, working):
        part.start()
    print(json.dumps([edge.port, panel.port]), flush=True)
    signal.sigwait({signal.SIGTERM})
    stopping.set()
    working.join()
    for ended in (cron, edge, panel):
        ended.stop()
    store.close()


def look(panel: int, root: Path) -> None:
    """The panel's pages, and `status` in a shell, again and again."""
    caps = Caps(25, None, None, "UTC")
    reader = pidispatch.Reader(root / "pidispatch.db")
    while True:
        for page in ("/", "/runs", "/triggers"):
            url = f"http://127.0.0.1:{panel}{page}"
            assert urllib.request.urlopen(url, timeout=30).status == 200
        reader.status(caps, time.time())
        time.sleep(0.2)


if __name__ == "__main__":
    if sys.argv[1] == "look":
        look(int(sys.argv[2]), Path(sys.argv[3]))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    serve(Path(sys.argv[2]))
