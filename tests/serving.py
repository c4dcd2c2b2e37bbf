"""`pidispatch serve` as a process of its own, in a world that outlives it."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conftest import IMAGE, ROOT
from world import COMMIT, KEY, REPO, SECRET, TOKEN, bash, bridge_address, say

import pidispatch
import pidispatch_demo as demo

RULES = [
    {
        "on": {"type": "label", "any": ["pi:urgent"]},
        "run": {"kind": "github", "flow": "fix-issue", "replicas": 2},
    },
    {
        "on": {"type": "label", "any": ["pi:fix"]},
        "run": {"kind": "github", "flow": "fix-issue"},
    },
]
#: Issues start here, so that a number in a prompt is nothing else.
FIRST = 1001


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Serving:
    """`pidispatch serve` as a process, and the world around it that stays."""

    root: Path
    forge: demo.FakeGitHub
    model: demo.FakeModel
    repo: demo.Repo
    docker: Any
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    #: Jobs by the delivery that was acknowledged as queued.
    acknowledged: dict[str, list[str]] = field(default_factory=dict)
    started: collections.Counter[str] = field(default_factory=collections.Counter)
    #: Where jobs were when the service was killed, by state.
    caught: collections.Counter[str] = field(default_factory=collections.Counter)
    number: int = FIRST
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def db(self) -> Path:
        return self.root / "pidispatch.db"

    def environ(self) -> dict[str, str]:
        kept = {
            name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ
        }
        return kept | {
            "DOCKER_HOST": os.environ.get("DOCKER_HOST", ""),
            "WEBHOOK_SECRET": SECRET,
            "GITHUB_PAT": TOKEN,
            "GITHUB_API_URL": f"{self.forge.url}/api/v3",
            "PI_DB": str(self.db),
            "PI_STATE_DIR": str(self.root / "state"),
            "PI_TRIGGERS_FILE": str(self.root / "triggers.json"),
            "PI_PROVIDERS_FILE": str(self.root / "providers.json"),
            "PI_PROVIDER": "fake",
            "PI_MODEL": "fake-1",
            "FAKE_KEY": KEY,
            "PI_BIND": "127.0.0.1",
            "PI_PORT": str(self.port),
            "PI_PANEL_PORT": "0",
            "PI_JOB_IMAGE": IMAGE,
            "PI_GATE_IMAGE": IMAGE,
            "PI_DAILY_CAP": "100000",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def start(self, *options: str) -> None:
        environ = {name: value for name, value in self.environ().items() if value}
        with (self.root / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "pidispatch.py"), "serve", *options],
                cwd=self.root,
                env=environ,
                stderr=log,
                stdout=log,
            )

    def until_it_listens(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                return socket.create_connection(("127.0.0.1", self.port)).close()
            time.sleep(0.02)
        raise AssertionError("serve does not listen: see serve.log")

    def kill(self) -> None:
        assert self.process
        assert self.process.poll() is None, "serve ended by itself: see serve.log"
        self.process.kill()
        self.process.wait(10)
        with contextlib.suppress(sqlite3.OperationalError):  # before its first table
            self.caught.update(state for _, state in self.unended())

    def signal(self, number: int) -> None:
        assert self.process
        self.process.send_signal(number)

    def end(self) -> int:
        assert self.process
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        return self.process.wait(60)

    # -- load ----------------------------------------------------------------

    def deliver(self, label: str) -> None:
        """One delivery, sent again until it is acknowledged, as forges should."""
        number, self.number = self.number, self.number + 1
        self.repo.add_issue(number, title=f"Bend spoon {number}", body="Straight.")
        guid = f"torture-{number}"
        payload = demo.labeled_payload(self.repo, number, label, "maintainer")
        headers, body = demo.signed_delivery("issues", payload, SECRET, guid)
        url = f"http://127.0.0.1:{self.port}/github"
        while not self.stopping.is_set():
            with contextlib.suppress(OSError):  # also HTTPError: 503 while it starts
                request = urllib.request.Request(url, body, headers)
                with urllib.request.urlopen(request, timeout=10) as answer:
                    said = json.load(answer)
                if said["status"] == "queued":
                    self.acknowledged[guid] = said["jobs"]
                    return
                if (
                    said["status"] == "duplicate"
                ):  # stored, and killed before it said so
                    self.acknowledged[guid] = []
                    return
                assert said["status"] == "pending", said
            time.sleep(0.05)

    def load(self, chance: random.Random) -> None:
        while not self.stopping.is_set():
            self.deliver(chance.choice(("pi:urgent", "pi:fix", "pi:fix")))
            self.stopping.wait(chance.uniform(0.5, 2.5))

    # -- what happened -------------------------------------------------------

    def watch(self) -> None:
        """Count the starts of job containers, by job, from the engine's own events."""
        role = f"{pidispatch.LABEL}role=job"
        filters = {"type": "container", "event": "start", "label": role}
        for event in self.docker.events(filters=filters, decode=True):
            labels = event["Actor"]["Attributes"]
            self.started[labels[f"{pidispatch.LABEL}job"]] += 1

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self.db)) as db:
            return db.execute(sql).fetchall()

    def unended(self) -> list[tuple[Any, ...]]:
        return self.rows("SELECT id, state FROM jobs WHERE state <> 'done'")

    def first_calls(self) -> collections.Counter[tuple[int, str]]:
        """How often the model was asked to begin a job, by issue and replica."""
        found: collections.Counter[tuple[int, str]] = collections.Counter()
        for call in tuple(self.model.log):
            messages = (call.body or {}).get("messages", ())
            if any(message.get("role") == "assistant" for message in messages):
                continue
            text = json.dumps(messages)
            number = re.search(rf"{REPO}#(\d+)", text) or re.search(
                r"issue-(\d+)", text
            )
            replica = re.search(r"replica (\d) of 2", text)
            if number:
                found[int(number[1]), replica[1] if replica else ""] += 1
        return found

    def left(self) -> list[str]:
        [(instance,)] = self.rows("SELECT value FROM flags WHERE name = 'instance'")
        filters = {"label": f"{pidispatch.LABEL}instance={instance}"}
        return [
            str(row.get("Names") or row.get("Name"))
            for row in (
                *self.docker.containers(all=True, filters=filters),
                *self.docker.networks(filters=filters),
                *(self.docker.volumes(filters=filters)["Volumes"] or ()),
            )
        ]


@contextlib.contextmanager
def served(root: Path, docker_client: Any) -> Iterator[Serving]:
    """A forge, a model and a folder for `Serving`; what still runs is ended."""
    with contextlib.ExitStack() as stack:
        token = demo.Token(TOKEN, "operator", name="operator")
        forge = stack.enter_context(demo.FakeGitHub([token]))
        scripts = [{"match": "", "steps": [bash(f"sleep 0.5; {COMMIT}"), say()]}]
        host = bridge_address(docker_client)
        model = stack.enter_context(demo.FakeModel(scripts, key=KEY, host=host))
        repo = forge.create_repo(REPO, {"spoon.txt": "straight\n"})
        repo.add_collaborator("maintainer", "write")
        (root / "triggers.json").write_text(json.dumps({"triggers": RULES}))
        row = {"id": "fake-1", "contextWindow": 200_000, "maxTokens": 8_000}
        provider = {
            "baseUrl": f"http://127.0.0.1:{model.url.rsplit(':', 1)[1]}/v1",
            "style": "openai-completions",
            "keyVariable": "FAKE_KEY",
            "models": [row],
        }
        providers = {"providers": {"fake": provider}}
        (root / "providers.json").write_text(json.dumps(providers))
        made = Serving(root, forge, model, repo, docker_client)
        yield made
        made.stopping.set()
        if made.process and made.process.poll() is None:
            made.end()
