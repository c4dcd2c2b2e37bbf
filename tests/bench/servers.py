"""The servers of the acknowledgement bench: ours, and its peers under the same load."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import load
import peers
from conftest import IMAGE, ROOT
from world import REPO, SECRET, TOKEN

import pidispatch
import pidispatch_demo as demo

LABEL = "pi:fix"
#: What the console script does: a module's byte code is cached, a script's never.
INSTALLED = "import pidispatch; pidispatch.main()"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def process(
    log: Path, command: Sequence[object], environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program whose words go to a file, ended by TERM."""
    with log.open("ab") as words:
        started = subprocess.Popen(
            [str(word) for word in command],
            cwd=log.parent,
            env=environ,
            stdout=words,
            stderr=words,
        )
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(60)


def until_listening(port: int, of: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and of.poll() is None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port)),
        ):
            return
        time.sleep(0.02)
    raise AssertionError(f"nothing listens on {port}: {log.read_text('utf-8')[-2000:]}")


@dataclass
class Server:
    """One to send to: what it says to a new delivery, and how many it has kept."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    word: str = "202 queued"
    kept: Callable[[], int] | None = None

    def settle(self) -> None:
        """Wait for what it still runs after its answers: the next one's turn comes."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        while any(task.read_text().strip() for task in tasks.glob("*/children")):
            time.sleep(0.05)


@contextlib.contextmanager
def started(
    name: str,
    root: Path,
    command: Callable[[int], Sequence[object]],
    environ: Mapping[str, str] | None = None,
    **server: Any,
) -> Iterator[Server]:
    port, log = free_port(), root / f"{name}.log"
    with process(log, command(port), environ) as running:
        until_listening(port, running, log)
        yield Server(name, port, running, **server)


# -- ours ----------------------------------------------------------------------


def serve_environ(root: Path, forge: demo.FakeForge, port: int) -> dict[str, str]:
    """What `serve` needs to receive for the repository, and its files."""
    rule = {
        "on": {"type": "label", "any": [LABEL]},
        "run": {"kind": "github", "flow": "fix-issue"},
    }
    (root / "triggers.json").write_text(json.dumps({"triggers": [rule]}))
    own = {name: os.environ.get(name, "") for name in ("PATH", "HOME", "DOCKER_HOST")}
    return {name: value for name, value in own.items() if value} | {
        "WEBHOOK_SECRET": SECRET,
        "GITHUB_PAT": TOKEN,
        "GITHUB_API_URL": f"{forge.url}/api/v3",
        "PI_DB": str(root / "pidispatch.db"),
        "PI_STATE_DIR": str(root / "state"),
        "PI_TRIGGERS_FILE": str(root / "triggers.json"),
        "PI_BIND": "127.0.0.1",
        "PI_PORT": str(port),
        "PI_PANEL_PORT": "0",
        "PI_JOB_IMAGE": IMAGE,
        "PI_GATE_IMAGE": IMAGE,
        "PYTHONPATH": str(ROOT),
        "PYTHONPYCACHEPREFIX": str(peers.cache() / "bytecode"),
    }


@contextlib.contextmanager
def pidispatch_serve(
    root: Path, forge: demo.FakeForge, *, paused: bool = True, **environ: str
) -> Iterator[Server]:
    """`pidispatch serve`; paused, so that its jobs stay where they are put."""
    db = root / "pidispatch.db"
    store = pidispatch.Store(db)
    if paused:
        store.pause()
    store.close()

    def kept() -> int:
        return sum(pidispatch.Reader(db).status(NO_CAPS, time.time()).jobs.values())

    port = free_port()
    command = [sys.executable, "-c", INSTALLED, "serve"]
    settings = serve_environ(root, forge, port) | environ
    # an install has compiled it; doing that leaves half as much again resident
    compile_first = [sys.executable, "-c", "import pidispatch"]
    subprocess.run(compile_first, env=settings, check=True)
    log = root / "serve.log"
    with process(log, command, settings) as running:
        until_listening(port, running, log)
        until_proven(pidispatch.Reader(db))
        yield Server("pidispatch", port, running, kept=kept)


def until_proven(reader: pidispatch.Reader) -> None:
    """At its first start it looks with a container whether the engine isolates."""
    deadline = time.monotonic() + 60
    while reader.flag("isolation") is None:
        assert time.monotonic() < deadline, "the engine was not proved to isolate"
        time.sleep(0.05)


NO_CAPS = pidispatch.Caps(None, None, None, "UTC")


@contextlib.contextmanager
def fake_forge() -> Iterator[tuple[demo.FakeForge, demo.Repo]]:
    token = demo.Token(TOKEN, "operator", name="operator")
    with demo.FakeGitHub([token]) as forge:
        repo = forge.create_repo(REPO, {"spoon.txt": "straight\n"})
        repo.add_collaborator("maintainer", "write")
        forge.data.rate_limit = 10**6  # no measurement of GitHub's 5000 an hour
        yield forge, repo


# -- the peers -------------------------------------------------------------------


@contextlib.contextmanager
def webhook(root: Path) -> Iterator[Server]:
    """Debian's `webhook`: checks the signature and runs a command with the payload."""
    check = {
        "type": "payload-hmac-sha256",
        "secret": SECRET,
        "parameter": {"source": "header", "name": "X-Hub-Signature-256"},
    }
    hook = {
        "id": "github",
        "execute-command": "/bin/true",
        "pass-arguments-to-command": [{"source": "entire-payload"}],
        "trigger-rule": {"match": check},
    }
    (root / "hooks.json").write_text(json.dumps([hook]))
    program = peers.debian() / "usr/bin/webhook"

    def command(port: int) -> Sequence[object]:
        where = ("-ip", "127.0.0.1", "-port", port, "-urlprefix", "")
        return (program, "-hooks", root / "hooks.json", *where)

    with started("webhook", root, command, word="200") as server:
        yield server


@contextlib.contextmanager
def redis(root: Path) -> Iterator[int]:
    """A Redis that answers when the write is on the disk; its port."""
    folder = root / "redis"
    folder.mkdir()
    program = peers.debian() / "usr/bin/redis-server"
    durable = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")

    def command(port: int) -> Sequence[object]:
        where = ("--bind", "127.0.0.1", "--port", port, "--dir", folder)
        return (program, *where, *durable)

    with started("redis", root, command, peers.debian_environ()) as server:
        yield server.port


@contextlib.contextmanager
def bullmq(root: Path) -> Iterator[Server]:
    """Node's http, @octokit/webhooks, and BullMQ on such a Redis."""
    with redis(root) as at:

        def command(port: int) -> Sequence[object]:
            return ("node", peers.node() / "receiver.mjs", port, at, SECRET)

        def kept() -> int:
            return int(redis_answer(at, "LLEN bull:bench:wait"))

        with started("bullmq", root, command, kept=kept) as server:
            yield server


def redis_answer(port: int, command: str) -> str:
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(f"{command}\r\n".encode())
        return line.recv(100).decode().lstrip(":").strip()


@contextlib.contextmanager
def ceiling(root: Path) -> Iterator[Server]:
    """One that only answers: what the load itself can reach on this machine."""

    def command(port: int) -> Sequence[object]:
        return (sys.executable, load.__file__, "ceiling", port)

    with started("ceiling", root, command, word="202") as server:
        yield server


# -- the load ---------------------------------------------------------------------


class Loader:
    """The load generator's process."""

    def __init__(self, root: Path, body: bytes) -> None:
        file = root / "body.json"
        file.write_bytes(body)
        self.process = subprocess.Popen(
            [sys.executable, load.__file__, "send", str(file), SECRET],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, port: int, first: int, count: int, connections: int) -> Any:
        assert self.process.stdin and self.process.stdout
        names = ("port", "first", "count", "connections")
        asked = dict(zip(names, (port, first, count, connections), strict=True))
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, "the load generator ended: see its words above"
        return json.loads(answer)

    def close(self) -> None:
        self.process.communicate()
