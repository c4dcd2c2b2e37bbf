"""The runner: its inputs, its verdicts, and the work it saves from a hostile .git.

pi is played by a script that emits the events of pi 1.6.0; git is real.
"""

from __future__ import annotations

import ast
import dataclasses
import http.server
import importlib.util
import io
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUNNER = ROOT / "image" / "runner.py"
TOKEN = "box-token-4f1c"
BRANCH = "pi/issue-7-r2"


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


runner = load(RUNNER, "pidispatch_runner")

# --------------------------------------------------------------------------------------
# a stand-in for pi

PI = r"""
import json, os, subprocess, sys, time, signal
steps, seen = json.load(open(sys.argv[1])), sys.argv[2]
json.dump({"argv": sys.argv[3:], "prompt": sys.stdin.buffer.read().decode(),
           "env": dict(os.environ), "cwd": os.getcwd()}, open(seen, "w"))
def say(**event):
    sys.stdout.write(json.dumps(event, separators=(",", ":")) + "\n")
    sys.stdout.flush()
COST = {"input": 0.1, "output": 0.2, "cacheRead": 0, "cacheWrite": 0, "total": 0.3}
USAGE = {"input": 60, "output": 10, "cacheRead": 40, "cacheWrite": 5,
         "totalTokens": 115, "cost": COST}
def message(stop, **more):
    return {"role": "assistant", "content": [{"type": "text", "text": "secret words"}],
            "usage": USAGE, "stopReason": stop, **more}
say(type="session", version=3, id="s", cwd=os.getcwd())
say(type="agent_start")
for step in steps:
    kind, value = next(iter(step.items()))
    if kind == "turn":
        say(type="turn_start")
        say(type="message_end", message={"role": "user", "content": "words"})
        more = {k: v for k, v in step.items() if k != "turn"}
        say(type="message_end", message=message(value, **more))
        say(type="turn_end", message=message(value))
    elif kind == "sh":
        say(type="tool_execution_start", toolName="bash", args={"command": value})
        run = subprocess.run(["bash", "-c", value], stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE)
        if run.returncode and not step.get("may_fail"):
            sys.stderr.write("script failed: %s\n%s" % (value, run.stderr.decode()))
            sys.exit(70)
        say(type="tool_execution_end", toolName="bash", isError=False,
            result={"content": [{"type": "text", "text": "secret words"}]})
    elif kind == "event":
        say(**value)
    elif kind == "write":
        sys.stdout.write(value); sys.stdout.flush()
    elif kind == "stderr":
        sys.stderr.write(value); sys.stderr.flush()
    elif kind == "ignore_term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif kind == "slow_goodbye":
        def goodbye(*_, gone=value):
            for _ in range(200):
                os.write(1, b'{"type":"message_update"}\n' * 100)
            open(gone, "w").close()
            os._exit(143)
        signal.signal(signal.SIGTERM, goodbye)
    elif kind == "ready":
        open(value, "w").close()
    elif kind == "hang":
        time.sleep(value)
    elif kind == "exit":
        sys.exit(value)
say(type="agent_settled", aborted=False)
"""

DONE = {"turn": "stop"}


def sh(command: str) -> dict[str, Any]:
    return {"sh": command}


def git(*arguments: str, cwd: Path, data: bytes | None = None) -> str:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(cwd),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "Dev",
        "GIT_AUTHOR_EMAIL": "dev@example.com",
        "GIT_COMMITTER_NAME": "Dev",
        "GIT_COMMITTER_EMAIL": "dev@example.com",
    }
    return (
        subprocess.run(
            ["git", *arguments],
            cwd=cwd,
            env=environment,
            input=data,
            check=True,
            capture_output=True,
        )
        .stdout.decode(errors="surrogateescape")
        .strip()
    )


@dataclasses.dataclass(frozen=True)
class Upstream:
    """A repository with a history, a base on main and a request beside it."""

    path: Path
    base: str
    request: str

    def pack(self, *tips: str, shallow: str = "") -> bytes:
        lines = [f"--shallow {shallow}"] if shallow else []
        data = "\n".join([*lines, *tips, ""]).encode()
        return subprocess.run(
            ["git", "pack-objects", "--revs", "--stdout", "-q"],
            cwd=self.path,
            input=data,
            check=True,
            capture_output=True,
        ).stdout


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Upstream:
    path = tmp_path_factory.mktemp("upstream")
    git("init", "-q", "-b", "main", ".", cwd=path)
    (path / "lib").mkdir()
    for number in range(4):
        (path / "lib" / f"part{number}.py").write_text(f"VALUE = {number}\n" * 20)
        (path / "README").write_text(f"version {number}\n")
        git("add", "-A", cwd=path)
        git("commit", "-q", "-m", f"Version {number}", cwd=path)
    (path / ".gitignore").write_text("*.log\nbuild/\n")
    git("add", "-A", cwd=path)
    git("commit", "-q", "-m", "Ignore logs", cwd=path)
    base = git("rev-parse", "HEAD", cwd=path)
    git("checkout", "-q", "-b", "request", "HEAD~1", cwd=path)
    (path / "feature.py").write_text("FEATURE = 1\n")
    git("add", "-A", cwd=path)
    git("commit", "-q", "-m", "A request", cwd=path)
    return Upstream(path, base, git("rev-parse", "HEAD", cwd=path))


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def gate() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@dataclasses.dataclass
class Ended:
    code: int
    lines: list[dict[str, Any]]
    raw: str

    @property
    def exit(self) -> dict[str, Any]:
        return self.lines[-1]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == kind]


class Box:
    """Everything the dispatcher lays out for one job, on this machine."""

    def __init__(self, path: Path, upstream: Upstream, gate: str) -> None:
        self.path = path
        self.upstream = upstream
        for name in ("job", "workspace", "outbox", "rules", "home"):
            (path / name).mkdir()
            setattr(self, name, path / name)
        self.job: Path
        self.workspace: Path
        self.outbox: Path
        self.rules: Path
        self.home: Path
        self.settings = self._settings(gate)
        skill = self.job / "skill" / "fix-issue"
        skill.mkdir(parents=True)
        (skill / "SKILL.md").write_text(
            "---\nname: fix-issue\ndescription: Fix it\n---\n"
        )
        (self.job / "prompt.md").write_text("Do the thing.\n")
        (self.job / "event.json").write_text("{}")
        (self.job / "base.pack").write_bytes(upstream.pack(upstream.base))
        (self.job / "shallow").write_bytes(b"")
        (self.rules / "HARD_RULES.md").write_text("pidispatch-hard-rules-v1\n")
        (path / "pi.py").write_text(PI)
        self.script(DONE)

    def _settings(self, gate: str) -> dict[str, Any]:
        provider = {
            "baseUrl": f"{gate}/api.example.com/v1",
            "api": "openai-completions",
            "apiKey": TOKEN,
            "models": [{"id": "small-1"}],
        }
        return {
            "version": 1,
            "jobId": "gh-1-r2",
            "attempt": 1,
            "target": {"type": "issue", "number": 7},
            "base": self.upstream.base,
            "branch": BRANCH,
            "requestRef": None,
            "requestSha": None,
            "flow": "fix-issue",
            "provider": "example",
            "model": "small-1",
            "gate": {"url": gate, "token": TOKEN},
            "models": {"providers": {"example": provider}},
            "maxTurns": 5,
            "maxTokens": None,
            "deadline": int(time.time()) + 600,
            "excludeTools": [],
            "forkJoin": True,
            "publish": "host",
            "session": None,
            "git": {"name": "Pi Bot", "email": "bot@example.com"},
        }

    def script(self, *steps: dict[str, Any]) -> None:
        (self.path / "steps.json").write_text(json.dumps(steps))

    def on_request(self) -> None:
        up = self.upstream
        (self.job / "base.pack").write_bytes(up.pack(up.base, up.request))
        self.settings.update(
            target={"type": "pull_request", "number": 9},
            branch=None,
            requestRef="refs/pidispatch/request",
            requestSha=up.request,
        )

    @property
    def pi(self) -> str:
        parts = ("pi.py", "steps.json", "seen.json")
        return shlex.join(
            [sys.executable, "-I", "-S", *(str(self.path / name) for name in parts)]
        )

    @property
    def arguments(self) -> list[str]:
        names = ("job", "workspace", "outbox", "rules", "home")
        pairs = [(f"--{name}", str(self.path / name)) for name in names]
        return [word for pair in pairs for word in pair] + ["--pi", self.pi]

    def lay_out(self) -> None:
        (self.job / "job.json").write_text(json.dumps(self.settings))

    def run(self, stop: Any = None) -> Ended:
        self.lay_out()
        out = io.BytesIO()
        places = runner.parse_arguments(self.arguments)
        code = runner.run(places, runner.Out(out), stop or runner.Stop())
        raw = out.getvalue().decode()
        return Ended(code, [json.loads(line) for line in raw.splitlines()], raw)

    def start(self) -> subprocess.Popen[bytes]:
        self.lay_out()
        return subprocess.Popen(
            [sys.executable, "-I", str(RUNNER), *self.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def finish(self, process: subprocess.Popen[bytes]) -> Ended:
        raw = process.communicate(timeout=30)[0].decode()
        lines = [json.loads(line) for line in raw.splitlines()]
        return Ended(process.returncode, lines, raw)

    def seen(self) -> dict[str, Any]:
        seen: dict[str, Any] = json.loads((self.path / "seen.json").read_text())
        return seen

    def started(self) -> bool:
        return (self.path / "seen.json").exists()

    def result(self) -> Result:
        return Result(self)

    def ref(self, name: str) -> str:
        return git("rev-parse", name, cwd=self.workspace)


class Result:
    """The bundle as the host takes it in: header, strict pack, descent."""

    def __init__(self, box: Box) -> None:
        bundle = (box.outbox / "branch.bundle").read_bytes()
        header, _, pack = bundle.partition(b"\n\n")
        version, prerequisite, ref = header.decode().split("\n")
        assert version == "# v2 git bundle"
        assert prerequisite.split()[0] == f"-{box.upstream.base}"
        self.tip, name = ref.split()
        assert name == "refs/pidispatch/result"
        self.repository = box.path / "quarantine"
        subprocess.run(
            ["git", "clone", "-q", "--bare", str(box.upstream.path), self.repository],
            check=True,
        )
        arguments = ("index-pack", "--stdin", "--fix-thin", "--strict")
        git(*arguments, cwd=self.repository, data=pack)
        assert self.git("merge-base", box.upstream.base, self.tip) == box.upstream.base
        self.git("fsck", "--connectivity-only", self.tip)
        self._base = box.upstream.base

    def git(self, *arguments: str) -> str:
        return git(*arguments, cwd=self.repository)

    @property
    def subjects(self) -> list[str]:
        log = self.git("log", "--format=%s", "--reverse", f"{self._base}..{self.tip}")
        return log.splitlines()

    @property
    def changed(self) -> list[str]:
        return self.git("diff", "--name-only", self._base, self.tip).splitlines()

    def text(self, path: str) -> str:
        return self.git("show", f"{self.tip}:{path}")

    @property
    def message(self) -> str:
        return self.git("log", "-1", "--format=%B", self.tip)


@pytest.fixture
def box(tmp_path: Path, upstream: Upstream, gate: str) -> Box:
    return Box(tmp_path, upstream, gate)


# --------------------------------------------------------------------------------------
# inputs


def setting(path: str, value: object) -> Callable[[Box], None]:
    def change(box: Box) -> None:
        node = box.settings
        *parents, last = path.split(".")
        for key in parents:
            node = node[key]
        node[last] = value

    return change


def removed(path: str) -> Callable[[Box], None]:
    return lambda box: (box.path / path).unlink()


def written(path: str, content: str) -> Callable[[Box], None]:
    def change(box: Box) -> None:
        (box.path / path).write_text(content)

    return change


POLICY_FAULTS = [
    (setting("version", 2), "version must be 1"),
    (lambda box: box.settings.pop("maxTokens"), "no maxTokens"),
    (setting("base", "main"), "base is not well formed"),
    (setting("base", "0" * 40), "base.pack"),
    (setting("branch", None), "branch must be str"),
    (setting("branch", "-x"), "branch is not well formed"),
    (setting("branch", "a..b"), "base.pack: git init"),
    (setting("target.type", "tag"), "target.type"),
    (setting("target", "issue"), "target.type must be str"),
    (setting("requestRef", "refs/heads/x"), "requestRef"),
    (setting("flow", "../fix-issue"), "flow is not well formed"),
    (setting("provider", "other"), "no provider other"),
    (setting("models", []), "models must be dict"),
    (setting("gate.url", "https://gate"), "gate.url"),
    (setting("gate.token", 7), "gate.token must be str"),
    (setting("maxTurns", 0), "maxTurns must be at least 1"),
    (setting("maxTurns", True), "maxTurns must be int"),
    (setting("deadline", "soon"), "deadline must be int"),
    (setting("excludeTools", ["bash, edit"]), "excludeTools"),
    (setting("forkJoin", "yes"), "forkJoin must be bool"),
    (setting("session", {"key": "x"}), "session"),
    (setting("git.name", "a\nb"), "git.name"),
    (removed("job/prompt.md"), "prompt.md: No such file"),
    (removed("job/event.json"), "event.json"),
    (removed("job/base.pack"), "base.pack: No such file"),
    (removed("job/shallow"), "shallow: No such file"),
    (removed("rules/HARD_RULES.md"), "HARD_RULES.md: No such file"),
    (written("job/event.json", "[1]"), "event.json: not a JSON object"),
    (written("job/base.pack", "PACK?"), "base.pack: git index-pack"),
    (written("rules/HARD_RULES.md", "Be nice.\n"), "pidispatch-hard-rules-v1"),
    (written("workspace/README", "here"), "workspace is not empty"),
    (lambda box: box.outbox.rmdir(), "outbox is not writable"),
]


@pytest.mark.parametrize(("fault", "words"), POLICY_FAULTS, ids=lambda v: str(v)[:40])
def test_a_faulty_input_is_named_before_pi_is_started(
    box: Box, fault: Callable[[Box], None], words: str
) -> None:
    fault(box)
    ended = box.run()
    assert (ended.code, ended.exit["reason"]) == (2, "runner-policy")
    assert words in ended.exit["message"]
    assert not box.started()


def test_a_job_json_that_is_not_json_is_a_fault(box: Box) -> None:
    box.lay_out()
    (box.job / "job.json").write_text("{")
    with pytest.raises(runner.Refused, match=r"job\.json: Expecting"):
        runner.read_inputs(runner.parse_arguments(box.arguments))


def test_a_flow_without_a_skill_is_flow_not_found(box: Box) -> None:
    box.settings["flow"] = "review"
    ended = box.run()
    assert (ended.code, ended.exit["reason"]) == (2, "flow-not-found")
    assert not box.started()


def test_a_model_in_neither_list_is_model_unknown_before_any_call(box: Box) -> None:
    catalogue = {"example": {"baseUrl": "x", "models": [{"id": "built-in-1"}]}}
    (box.rules / "models.json").write_text(json.dumps(catalogue))
    box.settings["model"] = "small-2"
    ended = box.run()
    assert (ended.code, ended.exit["reason"]) == (2, "model-unknown")
    assert not box.started()


def test_a_model_of_the_catalogue_needs_no_entry_in_the_job(box: Box) -> None:
    catalogue = {"example": {"baseUrl": "x", "models": [{"id": "built-in-1"}]}}
    (box.rules / "models.json").write_text(json.dumps(catalogue))
    box.settings["model"] = "built-in-1"
    del box.settings["models"]["providers"]["example"]["models"]
    assert box.run().code == 0


def test_a_deadline_in_the_past_is_a_timeout_without_a_call(box: Box) -> None:
    box.settings["deadline"] = int(time.time()) - 1
    ended = box.run()
    assert (ended.code, ended.exit["reason"]) == (2, "timeout")
    assert not box.started()


def test_a_gate_that_does_not_answer_is_infra(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "GATE_WAIT", 0.1)
    box.settings["gate"]["url"] = "http://127.0.0.1:9"
    ended = box.run()
    assert (ended.code, ended.exit["reason"]) == (1, "infra")
    assert "gate" in ended.exit["message"]
    assert not box.started()


def test_a_missing_pi_is_infra(box: Box) -> None:
    box.lay_out()
    places = runner.parse_arguments([*box.arguments, "--pi", "/nowhere/pi"])
    out = io.BytesIO()
    assert runner.run(places, runner.Out(out), runner.Stop()) == 1
    assert "pi cannot be started" in out.getvalue().decode()


# --------------------------------------------------------------------------------------
# workspace and pi's command


def test_an_issue_gets_exactly_its_branch_at_the_base(box: Box) -> None:
    assert box.run().code == 0
    refs = git("for-each-ref", "--format=%(refname)", cwd=box.workspace)
    assert refs == f"refs/heads/{BRANCH}"
    assert box.ref("HEAD") == box.upstream.base
    assert git("symbolic-ref", "HEAD", cwd=box.workspace) == f"refs/heads/{BRANCH}"
    assert git("status", "--porcelain", cwd=box.workspace) == ""
    assert (box.workspace / "README").read_text() == "version 3\n"


def test_a_request_gets_the_base_and_its_head_as_a_ref(box: Box) -> None:
    box.on_request()
    assert box.run().code == 0
    assert box.ref("HEAD") == box.upstream.base
    assert box.ref("refs/pidispatch/request") == box.upstream.request
    assert not (box.workspace / "feature.py").exists()


def test_a_shallow_pack_can_be_worked_in_and_bundled(box: Box) -> None:
    parent = git("rev-parse", f"{box.upstream.base}~1", cwd=box.upstream.path)
    pack = box.upstream.pack(box.upstream.base, shallow=parent)
    (box.job / "base.pack").write_bytes(pack)
    (box.job / "shallow").write_text(parent + "\n")
    box.script(sh("echo new > new.txt && git add . && git commit -m New"), DONE)
    assert box.run().exit["commits"] == 1
    assert git("rev-list", "--count", "HEAD~1", cwd=box.workspace) == "2"
    assert box.result().changed == ["new.txt"]


def test_the_agent_commits_under_the_given_identity(box: Box) -> None:
    box.settings["git"]["name"] = 'Pi "the \\Bot" Ünal; #1'
    box.script(sh("echo x > x && git add x && git commit -m X"), DONE)
    box.run()
    result = box.result()
    said = result.git("log", "-1", "--format=%an <%ae>", result.tip)
    assert said == 'Pi "the \\Bot" Ünal; #1 <bot@example.com>'


def test_pi_is_called_with_the_rules_the_skill_and_no_project_resources(
    box: Box,
) -> None:
    box.settings["excludeTools"] = ["write", "edit"]
    box.run()
    argv = box.seen()["argv"]
    assert argv[:5] == ["-p", "--mode", "json", "--no-approve", "--no-extensions"]
    options = dict(itertools.pairwise(argv))
    assert options["--skill"] == str(box.job / "skill" / "fix-issue")
    assert options["--append-system-prompt"] == str(box.rules / "HARD_RULES.md")
    assert options["--model"] == "example/small-1"
    assert options["--exclude-tools"] == "write,edit"
    assert {"--no-skills", "--no-session"} <= set(argv)
    assert "-e" not in argv


@pytest.mark.parametrize("given", ["new", "resumed"])
def test_a_session_comes_in_grows_and_goes_out(box: Box, given: str) -> None:
    box.settings["session"] = given
    (box.job / "session.jsonl").write_text("earlier\n")
    box.script(sh("echo now >> ~/.pi/session.jsonl"), DONE)
    assert box.run().code == 0
    options = dict(itertools.pairwise(box.seen()["argv"]))
    assert options["--session"] == str(box.home / ".pi" / "session.jsonl")
    assert "--no-session" not in box.seen()["argv"]
    out = (box.outbox / "session.jsonl").read_text()
    assert out == ("earlier\n" if given == "resumed" else "") + "now\n"


@pytest.mark.parametrize(
    "command",
    [
        "ln -s /etc/passwd ~/.pi/session.jsonl",
        "mkdir ~/.pi/session.jsonl",
        "truncate -s 9M ~/.pi/session.jsonl",
        "true",
    ],
)
def test_a_session_that_is_no_file_of_a_sane_size_stays_in_the_box(
    box: Box, command: str
) -> None:
    box.settings["session"] = "new"
    box.script(sh(f"mkdir {box.outbox}/session.jsonl; {command}"), DONE)
    assert box.run().code == 0
    assert not (box.outbox / "session.jsonl").exists()


def test_only_a_run_that_succeeds_hands_out_its_session(box: Box) -> None:
    box.settings["session"] = "new"
    box.script(sh("echo x > ~/.pi/session.jsonl"), {"turn": "length"})
    assert box.run().code == 2
    assert not (box.outbox / "session.jsonl").exists()


def test_a_session_that_is_to_be_resumed_must_be_there(box: Box) -> None:
    box.settings["session"] = "resumed"
    ended = box.run()
    assert ended.code == 2
    assert "session.jsonl" in ended.exit["message"]


@pytest.mark.parametrize("wanted", [True, False])
def test_fork_join_is_loaded_when_asked_for_and_there(box: Box, wanted: bool) -> None:
    extension = box.rules / "fork-join" / "src" / "index.ts"
    extension.parent.mkdir(parents=True)
    extension.write_text("")
    box.settings["forkJoin"] = wanted
    box.run()
    assert (str(extension) in box.seen()["argv"]) is wanted


def test_pi_finds_the_gate_in_its_agent_directory(box: Box) -> None:
    box.run()
    environment = box.seen()["env"]
    agent = Path(environment["PI_CODING_AGENT_DIR"])
    assert json.loads((agent / "models.json").read_text()) == box.settings["models"]
    assert (agent / "models.json").stat().st_mode & 0o777 == 0o600
    assert environment["HOME"] == str(box.home)
    assert environment["PI_JOB_ID"] == "gh-1-r2"
    assert (environment["PI_OFFLINE"], environment["PI_TELEMETRY"]) == ("1", "0")
    assert box.seen()["cwd"] == str(box.workspace)


def test_a_long_prompt_with_a_leading_at_sign_arrives_byte_for_byte(box: Box) -> None:
    prompt = "@/etc/passwd $(id) `x` \"' " + "é" * 100_000 + "\n"
    (box.job / "prompt.md").write_text(prompt)
    assert box.run().code == 0
    assert box.seen()["prompt"] == prompt


def test_a_local_job_works_in_place_and_leaves_no_bundle(box: Box) -> None:
    box.settings.update(target={"type": "local", "number": None}, base=None)
    box.settings.update(branch=None, flow=None)
    (box.workspace / "mine.txt").write_text("mine\n")
    box.script(sh("echo more >> mine.txt"), DONE)
    ended = box.run()
    assert (ended.code, ended.exit["commits"]) == (0, 0)
    assert (box.workspace / "mine.txt").read_text() == "mine\nmore\n"
    assert list(box.outbox.iterdir()) == []
    assert "--skill" not in box.seen()["argv"]


# --------------------------------------------------------------------------------------
# events


def test_events_are_reduced_and_carry_no_words_of_the_agent(box: Box) -> None:
    box.script({"turn": "toolUse"}, sh("true"), DONE)
    ended = box.run()
    kinds = [line["event"] for line in ended.lines]
    assert kinds == [
        "turn_start",
        "message_end",
        "tool_execution_start",
        "tool_execution_end",
        "turn_start",
        "message_end",
        "agent_settled",
        "exit",
    ]
    assert ended.events("tool_execution_end") == [
        {"event": "tool_execution_end", "name": "bash", "isError": False}
    ]
    assert "words" not in ended.raw


def test_the_exit_line_sums_turns_and_usage(box: Box) -> None:
    box.script({"turn": "toolUse"}, DONE)
    line = box.run().exit
    assert line["turns"] == 2
    assert line["usage"] == {
        "input": 120,
        "output": 20,
        "cacheRead": 80,
        "cacheWrite": 10,
        "total": 230,
        "cost": 0.6,
    }
    assert (line["code"], line["reason"], line["message"]) == (0, None, None)


def test_the_forks_share_is_counted_within_the_usage_and_apart(box: Box) -> None:
    usage = {"input": 7, "output": 3, "cacheRead": 90, "cacheWrite": 0}
    result = {
        "usage": {**usage, "cost": {"total": 0.25}},
        "details": {"forks": [{"id": "a"}, {"id": "b"}]},
    }
    event = {"type": "tool_execution_end", "toolName": "fork_join", "result": result}
    box.script({"turn": "toolUse"}, {"event": event}, DONE)
    line = box.run().exit
    assert line["forks"] == {"count": 2, "tokens": 100, "cost": 0.25}
    assert line["usage"]["total"] == 2 * 115 + 100


def test_the_token_never_reaches_stdout(box: Box) -> None:
    box.script({"turn": "error", "errorMessage": f"500: bad token {TOKEN}"})
    ended = box.run()
    assert "bad token ***" in ended.exit["message"]
    assert TOKEN not in ended.raw


def test_a_monstrous_event_and_a_flood_are_bounded(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "STREAM_LINE_MAX", 100_000)
    monkeypatch.setattr(runner, "OUT_MAX", 2_000)
    monster = '{"type":"message_end","message":"' + "x" * 300_000 + '"}\n'
    flood = [{"event": {"type": "tool_execution_start", "toolName": "n" * 9_000}}] * 9
    box.script({"write": monster}, {"write": "not json\n"}, *flood, DONE)
    ended = box.run()
    assert ended.code == 0
    assert ended.exit["turns"] == 1
    assert len(ended.raw) < 3_000


def test_lines_are_split_on_line_feeds_only() -> None:
    lines = runner.Lines()
    text = "a\u2028b\x85c\r\n".encode()
    assert list(lines.feed(text[:3])) == []
    assert list(lines.feed(text[3:] + b"tail")) == [text[:-1]]


# --------------------------------------------------------------------------------------
# budgets and verdicts


def test_the_turn_after_the_last_allowed_one_stops_pi(box: Box) -> None:
    box.settings["maxTurns"] = 2
    work = sh("echo kept > kept.txt")
    after = {"hang": 30}
    box.script({"turn": "toolUse"}, work, {"turn": "toolUse"}, {"turn": "x"}, after)
    ended = box.run()
    assert (ended.code, ended.exit["reason"]) == (2, "turn-budget")
    assert ended.exit["turns"] == 2
    assert box.result().text("kept.txt") == "kept"


def test_a_retried_call_is_not_another_turn(box: Box) -> None:
    box.settings["maxTurns"] = 1
    failed = {"turn": "error", "errorMessage": "500: again"}
    retry = {"event": {"type": "auto_retry_start", "attempt": 1}}
    box.script(failed, retry, failed, retry, DONE)
    ended = box.run()
    assert (ended.code, ended.exit["turns"]) == (0, 1)


def test_the_deadline_holds_inside_the_box_and_saves_the_work(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = box.path / "ready"
    box.script(sh("echo late > late.txt"), {"ready": str(ready)}, {"hang": 60})
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 3600 * ready.exists())
    ended = box.run()
    assert (ended.code, ended.exit["reason"]) == (2, "timeout")
    assert box.result().text("late.txt") == "late"


def test_a_clock_that_is_set_moves_no_deadline(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = box.path / "ready"
    box.script({"ready": str(ready)}, sh("sleep 1; echo done > done.txt"), DONE)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 86_400 * ready.exists())
    assert box.run().code == 0
    assert box.result().text("done.txt") == "done"


VERDICTS = [
    ("401: no", 2, "provider-auth-refused"),
    ("403 {}", 2, "provider-auth-refused"),
    ("openai API error (401): {}", 2, "provider-auth-refused"),
    ("402: pay", 2, "provider-auth-refused"),
    ('{"error":{"code":403,"status":"PERMISSION_DENIED"}}', 2, "provider-auth-refused"),
    ('{"error":{"status":"INVALID","reason":"API_KEY_INVALID"}}', 2, None),
    ('429: {"code":"insufficient_quota"}', 2, "provider-auth-refused"),
    ('403: {"type":"pidispatch_budget","message":"spent"}', 2, "token-budget"),
    ('403: {"type":"pidispatch_refused"}', 2, "runner-policy"),
    ('404: {"code":"model_not_found"}', 2, "model-unknown"),
    ('404 {"error":{"type":"not_found_error","message":"model: x"}}', 2, None),
    ("404: nothing here", 2, "model-unknown"),
    ("400: context too long", 2, "runner-policy"),
    ("Provider finish_reason: content_filter", 2, "runner-policy"),
    ("429: slow down", 1, "infra"),
    ("500: boom", 1, "infra"),
    ("529 overloaded", 1, "infra"),
    ("Connection error.: other side closed", 1, "infra"),
    ("", 1, "infra"),
]


@pytest.mark.parametrize(("message", "code", "reason"), VERDICTS)
def test_a_provider_error_is_policy_only_when_it_would_come_again(
    message: str, code: int, reason: str | None
) -> None:
    verdict = runner.judge_error(message)
    assert verdict.code == code
    assert reason in (None, verdict.reason)


def test_every_reason_of_the_tables_is_one_the_host_knows() -> None:
    known = {"token-budget", "provider-auth-refused", "model-unknown", "runner-policy"}
    reasons = {reason for _, reason in runner.ERRORS} | set(runner.STATUSES.values())
    assert reasons == known


@pytest.mark.parametrize(
    ("steps", "code", "reason"),
    [
        ([DONE], 0, None),
        ([{"turn": "length"}], 2, "runner-policy"),
        ([{"turn": "error", "errorMessage": "401: no"}], 2, "provider-auth-refused"),
        ([{"turn": "aborted"}], 1, "infra"),
        ([{"turn": "toolUse"}, {"exit": 1}], 1, "infra"),
        ([{"exit": 0}], 1, "infra"),
        ([{"stderr": "Error: Cannot find module\n"}, {"exit": 1}], 1, "infra"),
        ([{"stderr": 'Error: Model "a/b" not found. Use --list-models'}], 2, None),
        ([DONE, {"exit": 3}], 0, None),
        ([{"turn": "error", "errorMessage": "500: x"}, DONE], 0, None),
    ],
)
def test_the_last_stop_reason_decides_and_not_pis_exit_code(
    box: Box, steps: list[dict[str, Any]], code: int, reason: str | None
) -> None:
    box.script(*steps)
    ended = box.run()
    assert ended.code == ended.exit["code"] == code
    assert reason in (None, ended.exit["reason"])


def test_a_pi_that_settled_but_does_not_leave_is_not_waited_for(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SETTLED_GRACE", 0.05)
    box.script(DONE, {"event": {"type": "agent_settled"}}, {"hang": 60})
    assert box.run().code == 0


def test_what_pi_said_on_stderr_is_in_the_message(box: Box) -> None:
    box.script({"stderr": "Error: Cannot find module 'x'\n"}, {"exit": 1})
    assert "Cannot find module 'x'" in box.run().exit["message"]


def test_work_is_bundled_whatever_the_verdict(box: Box) -> None:
    box.script(sh("echo x > x.txt"), {"turn": "error", "errorMessage": "401: no"})
    ended = box.run()
    assert (ended.code, ended.exit["commits"]) == (2, 1)
    assert box.result().changed == ["x.txt"]


@pytest.mark.parametrize("place", ["prepare", "follow", "collect"])
def test_an_unforeseen_fault_is_infra_with_an_exit_line(
    box: Box,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(runner, place, broken)
    ended = box.run()
    assert (ended.code, ended.exit["message"]) == (1, "RuntimeError: unforeseen")
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_while_pi_runs_ends_pi_and_saves_its_work(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = box.path / "ready"

    def broken(*_: object) -> None:
        wait_for(ready)
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(runner, "follow", broken)
    box.script(sh(LEFT), {"ready": str(ready)}, {"hang": 60})
    assert box.run().code == 1
    assert box.result().changed == ["left.txt"]


def test_a_pi_that_talks_while_it_is_stopped_is_read_to_its_end(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PI_GRACE", 20.0)
    box.settings["maxTurns"] = 1
    gone = box.path / "gone"
    goodbye = {"slow_goodbye": str(gone)}
    box.script(goodbye, {"turn": "toolUse"}, {"turn": "toolUse"}, {"hang": 60})
    assert box.run().exit["reason"] == "turn-budget"
    assert gone.exists()


# --------------------------------------------------------------------------------------
# TERM


def wait_for(path: Path) -> None:
    until = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < until, f"{path} never came"
        time.sleep(0.01)


def term_when_ready(box: Box, *steps: dict[str, Any]) -> tuple[Ended, float]:
    ready = box.path / "ready"
    box.script(*steps, {"ready": str(ready)}, {"hang": 60})
    process = box.start()
    wait_for(ready)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    return box.finish(process), time.monotonic() - began


def test_term_saves_committed_and_uncommitted_work_in_time(box: Box) -> None:
    commit = sh("echo one > one.txt && git add one.txt && git commit -m One")
    ended, seconds = term_when_ready(
        box, {"turn": "toolUse"}, commit, sh("echo two > two.txt")
    )
    assert (ended.code, ended.exit["code"]) == (143, 143)
    assert ended.exit["commits"] == 2
    assert box.result().subjects == ["One", "Keep work that was not committed"]
    assert seconds < runner.TERM_BUDGET


def test_a_pi_that_ignores_term_is_killed_and_its_work_saved(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PI_GRACE", 0.1)
    ready = box.path / "ready"
    box.script(
        {"ignore_term": True},
        sh("echo a > a.txt"),
        {"ready": str(ready)},
        {"hang": 60},
    )
    stop = runner.Stop()
    term = threading.Thread(target=lambda: (wait_for(ready), stop.request()))
    term.start()
    ended = box.run(stop)
    term.join()
    assert ended.code == 143
    assert box.result().changed == ["a.txt"]
    assert time.monotonic() - stop.at < runner.TERM_BUDGET


def test_term_before_pi_starts_ends_at_once(box: Box) -> None:
    box.settings["gate"]["url"] = "http://127.0.0.1:9"
    process = box.start()
    wait_for(box.home / ".pi" / "agent" / "settings.json")
    process.send_signal(signal.SIGTERM)
    ended = box.finish(process)
    assert (ended.code, ended.exit["code"]) == (143, 143)
    assert not box.started()


def test_term_while_the_result_is_gathered_still_exits_143(box: Box) -> None:
    stop = runner.Stop()
    stop.request()
    places = runner.parse_arguments(box.arguments)
    box.script(sh("echo a > a.txt"), DONE)
    limit = runner.Limit(time.monotonic() + 60, stop)
    assert limit.left() <= runner.TERM_BUDGET
    box.lay_out()
    assert runner.run(places, runner.Out(io.BytesIO()), stop) == 143


def test_a_process_the_agent_left_behind_is_gone_before_the_result(box: Box) -> None:
    pid_file = box.path / "pid"
    loop = f"echo $$ > {pid_file}; while :; do date >> noise.txt; sleep 0.01; done"
    left = sh(f"setsid bash -c '{loop}' >/dev/null 2>&1 </dev/null & disown")
    wait = sh(f"while [ ! -s {pid_file} ]; do sleep 0.01; done")
    box.script(left, wait, DONE)
    process = box.start()
    ended = box.finish(process)
    assert ended.code == 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


# --------------------------------------------------------------------------------------
# the result


def test_nothing_done_is_no_bundle(box: Box) -> None:
    ended = box.run()
    assert (ended.code, ended.exit["commits"]) == (0, 0)
    assert list(box.outbox.iterdir()) == []


def test_ignored_files_are_no_work(box: Box) -> None:
    box.script(sh("mkdir build && echo x > build/x && echo x > run.log"), DONE)
    assert box.run().exit["commits"] == 0


def test_commits_keep_their_history_and_need_no_extra_one(box: Box) -> None:
    step = "echo {0} > {0}.txt && git add . && git commit -m Add-{0}"
    box.script(sh(step.format("a")), sh(step.format("b")), DONE)
    assert box.run().exit["commits"] == 2
    result = box.result()
    assert result.subjects == ["Add-a", "Add-b"]
    assert result.tip == box.ref(BRANCH)
    git("bundle", "verify", str(box.outbox / "branch.bundle"), cwd=result.repository)


def test_leftovers_become_one_commit_that_says_so(box: Box) -> None:
    box.script(
        sh("echo a > a && git add a && git commit -m A"),
        sh("echo more >> README; rm lib/part0.py"),
        sh("mkdir -p new/deep; echo n > new/deep/n"),
        sh("chmod +x lib/part1.py; ln -s README link"),
        DONE,
    )
    box.run()
    result = box.result()
    assert result.subjects == ["A", "Keep work that was not committed"]
    assert "gh-1-r2" in result.message
    assert set(result.changed) == {
        *("README", "a", "lib/part0.py", "lib/part1.py", "link", "new/deep/n")
    }
    modes = result.git("ls-tree", result.tip, "link", "lib/part1.py")
    assert "120000" in modes and "100755" in modes


def test_files_of_the_agent_beside_the_bundle_stay_as_they_are(box: Box) -> None:
    comment = sh(f"echo hello > {box.outbox}/comment.md")
    box.script(comment, sh("echo x > x"), DONE)
    box.run()
    names = sorted(path.name for path in box.outbox.iterdir())
    assert names == ["branch.bundle", "comment.md"]


@pytest.mark.parametrize(
    "plant", ["mkdir -p {0}/sub", "echo fake > {0}", "ln -s /etc/hostname {0}"]
)
def test_whatever_the_agent_put_at_the_bundles_name_is_replaced(
    box: Box, plant: str
) -> None:
    box.script(sh(plant.format(box.outbox / "branch.bundle")), sh("echo x > x"), DONE)
    box.run()
    assert box.result().changed == ["x"]


def test_a_planted_bundle_does_not_survive_an_empty_run(box: Box) -> None:
    box.script(sh(f"echo fake > {box.outbox}/branch.bundle"), DONE)
    box.run()
    assert list(box.outbox.iterdir()) == []


COMMIT = "echo done > done.txt && git add done.txt && git commit -m Done"
LEFT = "echo left > left.txt"
BOTH = ["Done", "Keep work that was not committed"]
ONE = ["Keep work that was not committed"]

# What the agent does after a commit and one uncommitted file, the subjects the result
# must then have. Each of these lost all the work with a naive runner.
HOSTILE = {
    "gpgsign": ("git config commit.gpgsign true; git config gpg.program false", BOTH),
    "hooks": (
        "mkdir -p .git/hooks; for h in pre-commit commit-msg post-index-change; do "
        "printf '#!/bin/sh\\nexit 1' > .git/hooks/$h; chmod +x .git/hooks/$h; done",
        BOTH,
    ),
    "hooks path": ("git config core.hooksPath /bin", BOTH),
    "fsmonitor": ("git config core.fsmonitor /bin/false", BOTH),
    "branch deleted": (f"git checkout --detach; git branch -D {BRANCH}", BOTH),
    "branch renamed": ("git branch -m elsewhere", BOTH),
    "work on another branch": ("git checkout -b other", BOTH),
    "detached": ("git checkout --detach", BOTH),
    "git removed": ("rm -rf .git", ONE),
    "git is a file": ("rm -rf .git; echo nonsense > .git", ONE),
    "git is an empty file": ("rm -rf .git; : > .git", ONE),
    "git is a long file": ("rm -rf .git; yes x | head -c 90000 > .git", ONE),
    "git file with a long pointer": (
        "rm -rf .git; (printf 'gitdir: '; yes x | tr -d '\\n' | head -c 9000) > .git",
        ONE,
    ),
    "git points elsewhere": ("mv .git ../moved; echo 'gitdir: ../moved' > .git", BOTH),
    "git is a link": ("mv .git ../moved; ln -s ../moved .git", BOTH),
    "git is a dangling link": ("rm -rf .git; ln -s /nowhere .git", ONE),
    "git is a link to itself": ("rm -rf .git; ln -s .git .git", ONE),
    "git is a pipe": ("rm -rf .git; mkfifo .git", ONE),
    "git is empty": ("rm -rf .git; mkdir .git", ONE),
    "objects removed": ("rm -rf .git/objects", ONE),
    "objects emptied": ("find .git/objects -type f -delete", ONE),
    "loose objects corrupt": (
        "find .git/objects/?? -type f -exec sh -c 'chmod u+w $1; echo x > $1' - {} \\;",
        ONE,
    ),
    "index locked": ("touch .git/index.lock", BOTH),
    "refs locked": (f"touch .git/HEAD.lock .git/refs/heads/{BRANCH}.lock", BOTH),
    "index corrupt": ("echo x > .git/index", BOTH),
    "index removed": ("rm .git/index", BOTH),
    "config corrupt": ("echo '[broken' > .git/config", BOTH),
    "config is a directory": ("rm .git/config; mkdir .git/config", BOTH),
    "include in config": ("git config include.path /nowhere/config", BOTH),
    "worktree elsewhere": ("mkdir ../else; git config core.worktree ../../else", BOTH),
    "bare": ("git config core.bare true", BOTH),
    "unknown extension": (
        "git config core.repositoryformatversion 1; git config extensions.odd true",
        BOTH,
    ),
    "alternates": ("echo /nowhere/objects > .git/objects/info/alternates", BOTH),
    "alternates to itself": ("echo . > .git/objects/info/alternates", BOTH),
    "refs packed": ("git pack-refs --all; git gc -q --prune=now", BOTH),
    "shallow damaged": ("echo nonsense > .git/shallow", BOTH),
    "replaced objects": ("git replace HEAD HEAD~1", BOTH),
    "grafts": ("git rev-parse HEAD > .git/info/grafts", BOTH),
    "commit graph damaged": (
        "mkdir -p .git/objects/info; echo x > .git/objects/info/commit-graph",
        BOTH,
    ),
    "assumed unchanged": ("git update-index --assume-unchanged README", BOTH),
    "name list of git": ("git config user.email ''; git config user.name ''", BOTH),
    "eol": ("git config core.autocrlf true; git config core.safecrlf true", BOTH),
    "case folded": ("git config core.ignorecase true", BOTH),
    "file modes off": ("git config core.fileMode false", BOTH),
    "everything excluded by user": (
        "mkdir -p ~/.config/git; echo '*' > ~/.config/git/ignore",
        BOTH,
    ),
}


@pytest.mark.parametrize(("deed", "subjects"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_git_directory_loses_no_work(
    box: Box, deed: str, subjects: list[str]
) -> None:
    box.script(sh(COMMIT), sh(LEFT), sh(deed), DONE)
    ended = box.run()
    assert ended.code == 0
    result = box.result()
    assert result.subjects == subjects
    assert ended.exit["commits"] == len(subjects)
    assert (result.text("done.txt"), result.text("left.txt")) == ("done", "left")
    assert set(result.changed) == {"done.txt", "left.txt"}


@pytest.mark.parametrize("key", ["clean", "process"])
def test_a_filter_of_the_agents_config_is_not_run(box: Box, key: str) -> None:
    mark = box.path / "filter-ran"
    box.script(
        sh(f"git config filter.x.{key} 'touch {mark}; false'"),
        sh("git config filter.x.required true; echo '*.txt filter=x' > .gitattributes"),
        sh("mkdir -p .git/info; echo '* filter=x' > .git/info/attributes"),
        sh(LEFT),
        DONE,
    )
    assert box.run().code == 0
    assert box.result().text("left.txt") == "left"
    assert not mark.exists()


def test_no_program_named_in_the_agents_config_is_run(box: Box) -> None:
    mark = box.path / "ran"
    program = box.path / "program"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    keys = ("core.fsmonitor", "core.sshCommand", "core.pager", "gpg.program")
    keys = (*keys, "diff.external", "core.editor", "core.askPass")
    setup = "; ".join(f"git config {key} {program}" for key in keys)
    box.script(sh(LEFT), sh(f"{setup}; git config commit.gpgsign true"), DONE)
    box.run()
    assert box.result().changed == ["left.txt"]
    assert not mark.exists()


def test_an_amended_base_is_one_commit_on_the_base(box: Box) -> None:
    box.script(sh(f"{LEFT}; git add .; git commit --amend -m Amended"), DONE)
    assert box.run().exit["commits"] == 1
    result = box.result()
    assert result.subjects == ["Amended"]
    assert result.changed == ["left.txt"]
    assert "did not descend" in result.message


def on_forge(box: Box, url: str = "https://forge.example:8443/o/r.git") -> None:
    environment = {"PI_GIT_USERNAME": "x-access-token", "PI_GIT_PASSWORD": "t0k%en"}
    environment |= {"GH_TOKEN": "t0k%en", "GH_HOST": "forge.example:8443"}
    box.settings["publish"] = "agent"
    box.settings["forge"] = {"url": url, "environment": environment}


FILL = """ask() {{ printf 'protocol=https\nhost=%s\n\n' $1 | git credential fill; }}
ask forge.example:8443 > {0}/ours; ask elsewhere.example > {0}/theirs 2>&1 || true"""


def test_an_agents_git_finds_the_credential_for_the_forge_and_for_no_other_host(
    box: Box,
) -> None:
    on_forge(box)
    box.script(sh(FILL.format(box.path)), sh(LEFT), DONE)
    ended = box.run()
    assert ended.code == 0
    ours = (box.path / "ours").read_text()
    assert "username=x-access-token\npassword=t0k%en\n" in ours
    assert "password" not in (box.path / "theirs").read_text()
    remotes = git("remote", "-v", cwd=box.workspace).split("\n")
    assert all("https://forge.example:8443/o/r.git (" in line for line in remotes)
    seen = box.seen()["env"]
    assert (seen["GH_TOKEN"], seen["GIT_TERMINAL_PROMPT"]) == ("t0k%en", "0")
    places = [*(box.workspace / ".git").rglob("*"), *box.home.rglob("*")]
    for path in places:
        assert not path.is_file() or b"t0k%en" not in path.read_bytes(), path
    assert "t0k%en" not in json.dumps(box.seen()["argv"])


def test_the_runner_never_says_the_forges_token(box: Box) -> None:
    on_forge(box)
    box.script({"turn": "error", "errorMessage": "400 the t0k%en t0k%en"}, DONE)
    assert "t0k%en" not in box.run().raw


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("forge", None),
        ("forge.url", "https://user:secret@forge.example/o/r.git"),
        ("forge.url", "ext::sh -c x"),
        ("forge.environment", {"PI_GIT_USERNAME": "x"}),
        ("forge.environment", {"PI_GIT_USERNAME": "x", "PI_GIT_PASSWORD": "a\nb"}),
    ],
)
def test_a_job_that_publishes_itself_must_know_where_and_as_whom(
    box: Box, field: str, value: Any
) -> None:
    on_forge(box)
    outer, _, inner = field.partition(".")
    if inner:
        box.settings[outer][inner] = value
    else:
        box.settings[outer] = value
    ended = box.run()
    assert (ended.code, ended.exit["reason"]) == (2, "runner-policy")
    assert not box.started()


def test_a_rebuilt_repository_is_one_commit_on_the_base(box: Box) -> None:
    again = "rm -rf .git && git init -q && git add -A && git commit -q -m Again"
    box.script(sh(LEFT), sh(again), DONE)
    assert box.run().exit["commits"] == 1
    result = box.result()
    assert (result.subjects, result.changed) == (["Again"], ["left.txt"])


def test_a_reworded_base_without_changes_is_nothing(box: Box) -> None:
    box.script(sh("git commit --amend -m Reworded"), DONE)
    assert box.run().exit["commits"] == 0


def test_history_reset_below_the_base_keeps_the_tree(box: Box) -> None:
    box.script(sh("git reset --hard HEAD~2"), sh(COMMIT), DONE)
    box.run()
    result = box.result()
    assert result.subjects == ["Done"]
    assert {"README", "done.txt"} <= set(result.changed) | {"README"}
    assert ".gitignore" in result.changed


def test_going_back_to_the_base_to_look_does_not_undo_the_branch(box: Box) -> None:
    box.script(sh(COMMIT), sh(f"git checkout {box.upstream.base}"), DONE)
    box.run()
    result = box.result()
    assert (result.subjects, result.changed) == (["Done"], ["done.txt"])


def test_changes_made_beside_the_branch_are_carried_onto_it(box: Box) -> None:
    back = f"git checkout -q {box.upstream.base}"
    box.script(sh(COMMIT), sh(back), sh("echo more >> lib/part2.py"), DONE)
    box.run()
    result = box.result()
    assert result.subjects == BOTH
    assert set(result.changed) == {"done.txt", "lib/part2.py"}


def test_conflicting_changes_beside_the_branch_stay_marked_in_the_file(
    box: Box,
) -> None:
    box.script(
        sh("echo branch > README; git commit -am Branch"),
        sh(f"git checkout -q {box.upstream.base}; echo beside > README"),
        DONE,
    )
    box.run()
    text = box.result().text("README")
    assert "branch" in text and "beside" in text and "<<<<<<<" in text


def test_a_merge_left_in_progress_is_kept_with_its_marks(box: Box) -> None:
    box.script(
        sh("git checkout -q -b side; echo side > README; git commit -qam Side"),
        sh(f"git checkout -q {BRANCH}; echo mine > README; git commit -qam Mine"),
        {"sh": "git merge side", "may_fail": True},
        DONE,
    )
    box.run()
    result = box.result()
    assert result.subjects == ["Mine", "Keep work that was not committed"]
    assert "<<<<<<<" in result.text("README")


def test_a_finished_merge_has_the_base_as_its_only_prerequisite(box: Box) -> None:
    box.script(
        sh("git checkout -q -b side HEAD~2; echo s > side.txt; git add side.txt"),
        sh("git commit -qm Side"),
        sh(f"git checkout -q {BRANCH}; git merge -q --no-edit side"),
        DONE,
    )
    box.run()
    result = box.result()
    assert result.changed == ["side.txt"]
    assert len(result.subjects) == 2


def test_a_rebase_left_in_progress_keeps_the_finished_branch(box: Box) -> None:
    box.script(
        sh("git checkout -q -b side; echo side > README; git commit -qam Side"),
        sh(f"git checkout -q {BRANCH}; echo mine > README; git commit -qam Mine"),
        {"sh": "git rebase side", "may_fail": True},
        DONE,
    )
    box.run()
    assert "Mine" in box.result().subjects


def test_a_repository_made_inside_the_workspace_is_kept_as_files(box: Box) -> None:
    box.script(
        sh("mkdir app && cd app && git init -q && echo a > a.txt && echo b > b.log"),
        sh("mkdir app/inner && cd app/inner && git init -q && echo c > c.txt"),
        sh("cd app && echo '*.log' > .gitignore && git add . && git commit -qm Inner"),
        DONE,
    )
    box.run()
    assert set(box.result().changed) == {
        *("app/.gitignore", "app/a.txt", "app/inner/c.txt")
    }


def test_a_repository_made_in_a_tracked_directory_is_kept_as_files(box: Box) -> None:
    box.script(
        sh("cd lib && git init -q && echo n > new.py && echo m > part0.py"), DONE
    )
    box.run()
    assert set(box.result().changed) == {"lib/new.py", "lib/part0.py"}


def test_a_clone_inside_the_workspace_is_left_out_and_named(box: Box) -> None:
    box.script(sh(f"git clone -q {box.upstream.path} vendored"), sh(LEFT), DONE)
    box.run()
    result = box.result()
    assert result.changed == ["left.txt"]
    assert "vendored/ (a clone)" in result.message


def test_a_submodule_entry_the_agent_committed_passes_through(box: Box) -> None:
    box.script(
        sh("git init -q sub && cd sub && git commit -q --allow-empty -m Empty"),
        sh("git add sub && git commit -q -m Sub"),
        sh("rm -rf sub/.git"),
        sh(LEFT),
        DONE,
    )
    box.run()
    result = box.result()
    assert result.subjects == ["Sub", "Keep work that was not committed"]
    assert result.text("left.txt") == "left"


def test_files_too_large_to_publish_are_left_out_and_named(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LEFTOVER_FILE_MAX", 1 << 20)
    monkeypatch.setattr(runner, "LEFTOVER_TOTAL_MAX", 3 << 19)
    box.script(
        sh("truncate -s 3M huge.bin; truncate -s 1M a.bin b.bin"), sh(LEFT), DONE
    )
    box.run()
    result = box.result()
    assert set(result.changed) == {"a.bin", "left.txt"}
    assert "huge.bin (3 MiB)" in result.message
    assert "b.bin (1 MiB)" in result.message


def test_odd_names_and_kinds_of_files_do_not_stop_the_rest(box: Box) -> None:
    names = r"printf x > $'a\nb' ; printf x > $'caf\xe9' ; printf x > --dash"
    box.script(
        sh(names),
        sh(
            "mkfifo pipe; python3 -c 'import socket; "
            'socket.socket(socket.AF_UNIX).bind("sock")\''
        ),
        sh("rm -rf lib && ln -s . lib; rm README && mkdir README && echo d > README/d"),
        sh("mkdir -p deep/.git2; echo x > deep/.git2/x; printf x > 'back\\slash'"),
        DONE,
    )
    assert box.run().code == 0
    result = box.result()
    names_kept = result.git("ls-tree", "-r", "-z", "--name-only", result.tip).split(
        "\0"
    )
    assert {"a\nb", "--dash", "README/d", "lib", "deep/.git2/x"} <= set(names_kept)


def test_an_unreadable_file_does_not_stop_the_rest(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As root nothing is unreadable; what access() says is what is tested here.
    access = os.access
    monkeypatch.setattr(
        os,
        "access",
        lambda path, mode: "closed" not in str(path) and access(path, mode),
    )
    box.script(sh("echo x > closed"), sh(LEFT), DONE)
    box.run()
    result = box.result()
    assert result.changed == ["left.txt"]
    assert "closed (unreadable)" in result.message


def test_a_sparse_check_out_is_not_taken_for_deletions(box: Box) -> None:
    box.script(sh("git sparse-checkout set --no-cone /README"), sh(LEFT), DONE)
    box.run()
    assert not (box.workspace / "lib").exists()
    assert box.result().changed == ["left.txt"]


def test_an_emptied_workspace_is_not_taken_for_work(box: Box) -> None:
    box.script(sh("find . -mindepth 1 -delete"), DONE)
    ended = box.run()
    assert (ended.code, ended.exit["commits"]) == (0, 0)


def test_a_lost_home_costs_time_but_no_work(box: Box) -> None:
    box.script(sh(COMMIT), sh(LEFT), sh("rm -rf ~/.pidispatch"), DONE)
    box.run()
    assert box.result().subjects == BOTH


def test_a_damaged_kept_index_is_replaced(box: Box) -> None:
    damage = "for f in ~/.pidispatch/*; do chmod u+w $f; echo x > $f; done"
    box.script(sh(COMMIT), sh(LEFT), sh(damage), DONE)
    box.run()
    assert box.result().subjects == BOTH


def test_success_whose_work_cannot_be_saved_is_infra(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> str:
        raise runner.GitFailed("no")

    monkeypatch.setattr(runner, "ATTEMPTS", ((fails, 1.0),))
    box.script(sh(LEFT), DONE)
    ended = box.run()
    assert (ended.code, ended.exit["reason"]) == (1, "infra")


def test_no_time_for_leftovers_still_bundles_the_commits(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_: object) -> None:
        raise runner.GitFailed("out of time")

    monkeypatch.setattr(runner, "stage", slow)
    box.script(sh(COMMIT), sh(LEFT), DONE)
    assert box.run().code == 0
    assert box.result().subjects == ["Done"]


def test_git_is_stopped_when_its_time_is_over(tmp_path: Path) -> None:
    limit = runner.Limit(time.monotonic() + 0.05, runner.Stop())
    git("init", "-q", ".", cwd=tmp_path)
    slow = runner.Git(tmp_path / ".git", tmp_path, limit)
    with pytest.raises(runner.GitFailed, match="out of time"):
        slow.run("-c", "alias.wait=!sleep 30", "wait")


# --------------------------------------------------------------------------------------
# the result of a request


def test_looking_at_the_request_is_no_work(box: Box) -> None:
    box.on_request()
    box.script(sh("git checkout -q refs/pidispatch/request"), DONE)
    assert box.run().exit["commits"] == 0
    assert list(box.outbox.iterdir()) == []


def test_a_commit_on_the_requests_head_is_one_commit_on_the_base(box: Box) -> None:
    box.on_request()
    box.script(sh("git checkout -q refs/pidispatch/request"), sh(COMMIT), DONE)
    assert box.run().exit["commits"] == 1
    assert {"feature.py", "done.txt"} <= set(box.result().changed)


def test_changes_in_the_requests_tree_are_kept(box: Box) -> None:
    box.on_request()
    look = "git checkout -q refs/pidispatch/request"
    box.script(sh(look), sh(LEFT), DONE)
    assert box.run().exit["commits"] == 1
    assert set(box.result().changed) == {"feature.py", "left.txt"}


def test_a_commit_on_the_default_branch_of_a_request_is_counted(box: Box) -> None:
    box.on_request()
    box.script(sh(COMMIT), DONE)
    assert box.run().exit["commits"] == 1
    assert box.result().changed == ["done.txt"]


# --------------------------------------------------------------------------------------
# the file itself


def test_the_runner_needs_nothing_but_the_standard_library() -> None:
    tree = ast.parse(RUNNER.read_text())
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert names <= set(sys.stdlib_module_names)


def test_no_function_is_longer_than_sixty_lines() -> None:
    tree = ast.parse(RUNNER.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name


def test_the_sections_of_the_file_are_those_its_docstring_lists() -> None:
    text = RUNNER.read_text()
    banners = re.findall(r"^# =+\n# (\w+)\n# =+$", text, re.MULTILINE)
    listed = re.findall(r"^    (\w+)  ", runner.__doc__ or "", re.MULTILINE)
    assert banners == listed
