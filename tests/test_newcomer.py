"""A newcomer's way, with the README in hand: init, .env, doctor, serve, a delivery."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import IMAGE, ROOT
from test_docs import SHELL
from world import KEY, REPO, TOKEN, bash, bridge_address, say

import pidispatch_demo as demo

pytestmark = pytest.mark.docker


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


class Newcomer:
    """Types commands in a folder of their own; nothing of the machine is set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            "HOME": str(folder / "home"),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
        }

    def command(self, line: str | list[str]) -> list[str]:
        words = line.split() if isinstance(line, str) else line
        assert words[0] == "pidispatch"
        return [sys.executable, "-m", "pidispatch", *words[1:]]

    def types(self, line: str | list[str], code: int = 0) -> str:
        done = subprocess.run(
            self.command(line),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        said = done.stdout + done.stderr
        assert done.returncode == code, said
        assert "Traceback" not in said
        return said

    @contextlib.contextmanager
    def serves(self, port: int) -> Iterator[None]:
        with (self.folder / "serve.log").open("w") as log:
            serve = subprocess.Popen(
                self.command("pidispatch serve --stop-jobs"),
                cwd=self.folder,
                env=self.environment,
                stderr=log,
            )
            try:
                self.until(lambda: answers(f"http://127.0.0.1:{port}/healthz"))
                yield
            finally:
                serve.terminate()
                assert serve.wait(30) == 0

    def until(self, ready: Any, seconds: float = 90) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := ready():
                return found
            time.sleep(0.05)
        raise AssertionError((self.folder / "serve.log").read_text())


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def scripts() -> list[dict[str, object]]:
    def solve(index: int) -> dict[str, object]:
        command = (
            f"echo {index} >> spoon.txt && git commit -qam 'Bend the spoon' && "
            "printf 'Bend the spoon\\n\\nDone.\\n' > /outbox/review-request.md"
        )
        match = f"checked out as pi/issue-7-r{index}"
        return {"match": match, "steps": [bash(command), say()]}

    return [solve(1), solve(2)]


def test_from_init_to_two_pull_requests_that_a_person_can_compare(
    tmp_path: Path, docker_client: Any
) -> None:
    with contextlib.ExitStack() as stack:
        tokens = [demo.Token(TOKEN, "operator", name="operator")]
        forge = stack.enter_context(demo.FakeGitHub(tokens))
        host = bridge_address(docker_client)
        model = stack.enter_context(demo.FakeModel(scripts(), key=KEY, host=host))
        repo = forge.create_repo(
            REPO,
            {"spoon.txt": "straight\n"},
            issues={7: {"title": "Bend it", "body": "The spoon is straight."}},
        )
        repo.add_collaborator("maintainer", "write")
        person = Newcomer(tmp_path)

        steps = person.types("pidispatch init")
        named = re.findall(r"^  \d\. (pidispatch [a-z-]+)", steps, re.M)
        assert named == [
            "pidispatch build-image",
            "pidispatch doctor",
            "pidispatch serve",
        ]
        before = person.types("pidispatch doctor", code=1)
        for words in ("set GITHUB_PAT", "set ANTHROPIC_API_KEY"):
            assert words in before, "doctor says what is missing"

        port, panel = free_port(), free_port()
        fill_in(person, forge, model, port, panel)
        assert "2 rules, no fault" in person.types("pidispatch triggers check")
        assert "[x2]" in person.types("pidispatch triggers list")
        ready = person.types("pidispatch doctor")
        assert "✗" not in ready and ready.rstrip().endswith("\nready")

        with person.serves(port):
            payload = demo.labeled_payload(repo, 7, "pi:urgent", "maintainer")
            secret = re.search(
                r"^WEBHOOK_SECRET=(\w+)$", (tmp_path / ".env").read_text(), re.M
            )
            assert secret
            headers, body = demo.signed_delivery("issues", payload, secret[1], "first")
            url = f"http://127.0.0.1:{port}/github"
            with urllib.request.urlopen(
                urllib.request.Request(url, body, headers), timeout=10
            ) as answer:
                jobs = json.load(answer)["jobs"]
            assert jobs == ["gh-first-r1", "gh-first-r2"]

            def pulls() -> bool:
                return len(repo.pulls) == 2

            person.until(pulls)
            person.until(
                lambda: person.types("pidispatch runs").count("completed") == 2
            )
            assert answers(f"http://127.0.0.1:{panel}/compare/{jobs[0]}")
            type_what_the_readme_says(person, jobs[0], body)
            person.until(
                lambda: (
                    "completed" in person.types("pidispatch show gh-first-r1-again1")
                )
            )
        assert sorted(pull.title for pull in repo.pulls.values()) == [
            "[r1/2] Bend the spoon",
            "[r2/2] Bend the spoon",
        ]
        shown = person.types(f"pidispatch show {jobs[0]}")
        assert jobs[1] in shown and "/pull/" in shown
        compared = person.types(f"pidispatch compare {jobs[0]}")
        assert "-1" in compared and "+2" in compared, "the diff between siblings"
        assert "0 of 1 sets" in person.types("pidispatch runs --picks")


#: Lines of the README whose exit code is not 0 for a job that has ended, or beside a
#: worker that runs.
ENDS = {"cancel": 2, "worker": 2}
#: Lines that other tests type: these go on, or take another folder or image.
ELSEWHERE = {"demo", "run", "build-image", "verify-image", "serve", "init", "doctor"}


def type_what_the_readme_says(person: Newcomer, job: str, body: bytes) -> None:
    """Every other command line of the README, with this job's id."""
    (person.folder / "delivery.json").write_bytes(body)
    lines = [line for page, line in SHELL if page == "README.md"]
    words = [shlex.split(line, comments=True) for line in lines]
    assert {line[1] for line in words} >= ELSEWHERE
    for _, command, *more in words:
        if command not in ELSEWHERE:
            given = [re.sub(r"^gh-[0-9a-f]+-r1$", job, word) for word in more]
            person.types(["pidispatch", command, *given], code=ENDS.get(command, 0))


def fill_in(
    person: Newcomer, forge: demo.FakeGitHub, model: demo.FakeModel, port: int,
    panel: int,
) -> None:  # fmt: skip
    """What the steps asked for, in .env; the model is one of the person's own."""
    row = {"id": "fake-1", "contextWindow": 200_000, "maxTokens": 8_000}
    provider = {
        "baseUrl": f"http://127.0.0.1:{model.port}/v1",
        "style": "openai-completions",
        "keyVariable": "OWN_KEY",
        "models": [row],
    }
    (person.folder / "providers.json").write_text(
        json.dumps({"providers": {"own": provider}})
    )
    with (person.folder / ".env").open("a") as env:
        env.write(
            f"GITHUB_PAT={TOKEN}\nGITHUB_API_URL={forge.url}/api/v3\n"
            f"PI_PROVIDERS_FILE=providers.json\nPI_PROVIDER=own\nPI_MODEL=fake-1\n"
            f"OWN_KEY={KEY}\nPI_PORT={port}\nPI_PANEL_PORT={panel}\n"
            f"PI_BIND=127.0.0.1\nPI_CAPTURE_JOB_LOGS=1\nPI_JOB_IMAGE={IMAGE}\nPI_GATE_IMAGE={IMAGE}\n"
        )
