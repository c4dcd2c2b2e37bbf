"""A whole pidispatch on the fakes: one repository, one forge, one model, one service.

`World` runs the real service against FakeGitHub and FakeModel, with the real engine
or with the demo's processes, and gives the tests eyes on both sides.
"""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import msgspec

import pidispatch
import pidispatch_demo as demo

SECRET = "canary-webhook-secret"
TOKEN = "canary-forge-token"
KEY = "canary-model-key"
CANARIES = (SECRET, TOKEN, KEY)
REPO = "octo/spoon"
ENDED = ("completed", "policy", "failed")


def bash(command: str, **step: Any) -> dict[str, Any]:
    """A scripted step in which the agent runs one command."""
    return {"tools": [{"name": "bash", "args": {"command": command}}], **step}


def say(text: str = "Done.", **step: Any) -> dict[str, Any]:
    return {"text": text, **step}


COMMIT = (
    "echo better >> spoon.txt && git commit -qam 'Bend the spoon' && "
    "printf 'Bend the spoon\\n\\nIt was straight.\\n' "
    "> ${PI_OUTBOX:-/outbox}/review-request.md"
)


#: A step that stands still until `World.go` lets it on.
WAIT = "until [ -e /tmp/go ]; do sleep 0.05; done"


def solve(*steps: dict[str, Any]) -> list[dict[str, Any]]:
    """One script for every conversation of the repository."""
    return [{"match": "", "steps": list(steps or (bash(COMMIT), say()))}]


def bridge_address(client: Any) -> str:
    """The host's address on the engine's default bridge."""
    ipam = client.inspect_network("bridge")["IPAM"]["Config"][0]
    return str(ipam.get("Gateway") or ipam["Subnet"].rsplit(".", 1)[0] + ".1")


@dataclass
class World:
    """Everything of one test; `start` brings the service up, also again."""

    root: Path
    forge: demo.FakeForge
    model: demo.FakeModel
    repo: demo.Repo
    settings: pidispatch.Settings
    docker: Any = None
    clock: Any = time.time
    #: What nobody sets; a clock of the test's own is both unless it says otherwise.
    steady: Any = None
    service: pidispatch.Service | None = None
    sent: int = field(default=0)
    name: str = field(default_factory=lambda: pidispatch.random_hex(4))
    starts: dict[str, float] = field(default_factory=dict)
    #: When the engine started and ended each removed container of a job, by its id.
    lives: dict[str, tuple[datetime, datetime]] = field(default_factory=dict)
    #: What the first world's own look at the engine proved, for those after it.
    proven: ClassVar[str | None] = None

    def rules(self, *rules: dict[str, Any]) -> None:
        """Write the triggers file: each rule is a `run`, on the label pi:urgent."""
        entries = [
            rule
            if "on" in rule
            else {
                "on": {"type": "label", "any": ["pi:urgent"]},
                "run": {
                    "kind": self.forge.kind,
                    "flow": "fix-issue",
                    **self.forge.run_fields,
                    **rule,
                },
            }
            for rule in rules
        ]
        path = self.root / "triggers.json"
        path.write_text(json.dumps({"triggers": entries}))

    def change(self, **settings: Any) -> None:
        self.settings = msgspec.structs.replace(self.settings, **settings)

    def start(self) -> pidispatch.Service:
        engine = None if self.docker else demo.ProcessEngine(self.root / "boxes")
        service = pidispatch.Service(
            self.settings,
            self.root / "triggers.json",
            engine=engine,
            clock=self.clock,
            steady=self.steady
            or (time.monotonic if self.clock is time.time else self.clock),
        )
        if self.docker:
            self._note_lives(service.engine)
            if World.proven:
                service.store.set_flag("isolation", World.proven)
        service.start()
        self.service = service
        return service

    def stop(self, *, end_jobs: bool = True) -> None:
        if self.service:
            if self.docker:
                World.proven = self.store.flag("isolation")
            self.service.stop(end_jobs=end_jobs)
            self.service = None

    def _note_lives(self, engine: Any) -> None:
        """Asks the engine right before removing: its events it soon forgets."""
        remove = engine.remove_job

        def noted(job: str) -> None:
            for row in engine._list({"job": job, "role": "job"}):
                state = engine.api.inspect_container(row["Id"])["State"]
                began, ended = (
                    datetime.fromisoformat(state[f"{name}At"])
                    for name in ("Started", "Finished")
                )
                self.lives[row["Id"]] = (began, ended)
            remove(job)

        engine.remove_job = noted

    @property
    def store(self) -> pidispatch.Store:
        assert self.service
        return self.service.store

    @property
    def instance(self) -> str:
        return self.store.instance()

    # -- deliveries ----------------------------------------------------------

    def post(
        self, event: str, payload: dict[str, Any], guid: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Send one signed delivery; status and answer."""
        self.sent += 1
        guid = guid or f"{self.name}-{self.sent}"
        headers, body = demo.signed_delivery(event, payload, SECRET, guid)
        return self.send(headers, body)

    def send(self, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
        assert self.service
        url = f"http://127.0.0.1:{self.service.edge.port}/{self.forge.kind}"
        request = urllib.request.Request(url, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def label(
        self, number: int = 7, guid: str | None = None, label: str = "pi:urgent"
    ) -> list[str]:
        """A maintainer labels an issue; the ids of the queued jobs."""
        self.sent += 1
        guid = guid or f"{self.name}-{self.sent}"
        delivery = self.forge.label(
            self.repo, number, label, "maintainer", SECRET, guid
        )
        status, answer = self.send(*delivery)
        if (status, answer["status"]) == (202, "pending"):
            return self.wait_for(lambda: self.jobs_of(str(guid)))
        assert (status, answer["status"]) == (202, "queued"), answer
        return list(answer["jobs"])

    def remark(
        self, number: int, text: str, guid: str, request: bool = False
    ) -> list[str]:
        """A maintainer comments; the ids of the jobs it became."""
        who = ("maintainer", SECRET, guid)
        status, _ = self.send(
            *self.forge.remark(self.repo, number, text, *who, request)
        )
        assert status == 202
        return list(self.wait_for(lambda: self.jobs_of(guid)))

    def jobs_of(self, guid: str) -> list[str]:
        """The ids of the jobs that a delivery became, in their order."""
        made = pidispatch.set_id(self.forge.kind, self.forge.delivery_id(guid))
        return sorted(r.id for r in self.store.runs(100) if r.id.startswith(made))

    # -- ends ----------------------------------------------------------------

    def wait(self, jobs: Sequence[str], seconds: float = 60) -> list[pidispatch.RunRow]:
        """The rows of the jobs when all have ended and been told to the forge."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            rows = [self.store.run(job)[0] for job in jobs]
            if all(row.state in ENDED for row in rows):
                return rows
            time.sleep(0.05)
        raise AssertionError(f"not ended after {seconds} s: {rows}")

    def record(self, job: str) -> pidispatch.Record:
        record = self.store.run(job)[1]
        assert record
        return record

    def comments(self, number: int = 7) -> list[str]:
        return [comment.body for comment in self.repo.comments_on(number)]

    def pulls(self) -> dict[str, demo.Pull]:
        """Open review requests by their head branch."""
        return {
            pull.head: pull for pull in self.repo.pulls.values() if pull.state == "open"
        }

    # -- the engine ----------------------------------------------------------

    def left_in_engine(self) -> list[str]:
        """Names of all objects of this instance that the engine still has."""
        filters = {"label": f"{pidispatch.LABEL}instance={self.instance}"}
        rows = [
            *self.docker.containers(all=True, filters=filters),
            *self.docker.networks(filters=filters),
            *(self.docker.volumes(filters=filters)["Volumes"] or ()),
        ]
        return [str(row.get("Names") or row.get("Name")) for row in rows]

    def nothing_left(self) -> bool:
        """Objects go right after the record is committed: look for a moment."""
        self.wait_for(lambda: self.left_in_engine() == [])
        return True

    def containers(self, role: str = "job") -> list[dict[str, Any]]:
        """The running containers of a role, inspected."""
        labels = [
            f"{pidispatch.LABEL}instance={self.instance}",
            f"{pidispatch.LABEL}role={role}",
        ]
        rows = self.docker.containers(filters={"label": labels})
        return [self.docker.inspect_container(row["Id"]) for row in rows]

    def execute(self, box: dict[str, Any], command: str) -> bool:
        """Run a command in a container; whether it ended well."""
        made = self.docker.exec_create(box["Id"], ["sh", "-c", command])
        self.docker.exec_start(made["Id"])
        return bool(self.docker.exec_inspect(made["Id"])["ExitCode"] == 0)

    def go(self, *boxes: dict[str, Any]) -> None:
        """Let the steps that `WAIT` go on."""
        for box in boxes:
            assert self.execute(box, "touch /tmp/go")

    def wait_for(self, what: Any, seconds: float = 30) -> Any:
        """The first truthy answer of `what`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = what()
            if found:
                return found
            time.sleep(0.02)
        raise AssertionError(f"{what} stayed empty for {seconds} s")


#: Each forge's fake, and the settings that lead to it.
DIALECTS: dict[str, tuple[type[demo.FakeForge], Callable[[str], dict[str, Any]]]] = {
    "github": (
        demo.FakeGitHub,
        lambda url: {
            "webhook_secret": (SECRET,),
            "github_pat": TOKEN,
            "github_api_url": f"{url}/api/v3",
        },
    ),
    "gitlab": (
        demo.FakeGitLab,
        lambda url: {
            "gitlab_webhook_mode": "token",
            "gitlab_webhook_secret": (SECRET,),
            "gitlab_token": TOKEN,
            "gitlab_url": url,
        },
    ),
    "forgejo": (
        demo.FakeForgejo,
        lambda url: {
            "forgejo_webhook_secret": (SECRET,),
            "forgejo_token": TOKEN,
            "forgejo_url": url,
        },
    ),
    "azure": (
        demo.FakeAzure,
        lambda url: {
            "azure_webhook_secret": (SECRET,),
            "azure_token": TOKEN,
            "azure_org_url": f"{url}/fabrikam",
        },
    ),
}


@contextlib.contextmanager
def world(
    root: Path,
    docker: Any = None,
    clock: Any = time.time,
    kind: str = "github",
    serve: Any = None,
) -> Iterator[World]:
    """A world of one forge; with `docker` (a low-level client) on the real engine.

    `serve` makes the fake from its dialect and tokens otherwise than by default."""
    dialect, settings_of = DIALECTS[kind]
    with contextlib.ExitStack() as stack:
        tokens = [demo.Token(TOKEN, "operator", name="operator")]
        made_forge = serve(dialect, tokens) if serve else dialect(tokens)
        forge = stack.enter_context(made_forge)
        host = bridge_address(docker) if docker else "127.0.0.1"
        model = stack.enter_context(demo.FakeModel(solve(), key=KEY, host=host))
        repo = forge.create_repo(
            REPO,
            {"spoon.txt": "straight\n", "AGENTS.md": "Be brief.\n"},
            issues={7: {"title": "Bend it", "body": "The spoon is straight."}},
        )
        repo.add_collaborator("maintainer", "write")
        settings = _settings(root, model, settings_of(forge.url))
        made = World(root, forge, model, repo, settings, docker)
        made.clock = clock
        made.rules({})
        stack.callback(made.stop)
        yield made


def _settings(
    root: Path, model: demo.FakeModel, forge: dict[str, Any]
) -> pidispatch.Settings:
    row = {"id": "fake-1", "contextWindow": 200_000, "maxTokens": 8_000}
    row |= {"cost": {"input": 3, "output": 15, "cacheRead": 0.3, "cacheWrite": 3.75}}
    port = model.url.rsplit(":", 1)[1]
    # the operator names loopback; the gate is told the engine's host instead
    provider = pidispatch.Provider(
        "fake",
        f"http://127.0.0.1:{port}/v1",
        "openai-completions",
        "FAKE_KEY",
        models=(row,),
    )
    return pidispatch.Settings(
        db=root / "pidispatch.db",
        state_dir=root / "state",
        bind="127.0.0.1",
        port=0,
        panel_port=0,
        provider="fake",
        model="fake-1",
        providers={"fake": provider},
        keys={"fake": KEY},
        **forge,
    )
