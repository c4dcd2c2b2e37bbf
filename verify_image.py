"""Is a job image what its labels claim? The checks behind `verify-image TAG`.

Every check runs in a real container under the job's own flags and without any
network. All are printed; the exit code is 0, 1 for the first lie found, 2 for
wrong usage. docs/job-image.md is generated from the table CHECKS.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pidispatch
from pidispatch import Finding

#: Capabilities that a label may claim, and what backs each.
CAPABILITIES = ("replicas", "gate", "forkJoin", "excludeTools")

REPLICAS_PHRASE = "only the branch that the prompt names"
RUNNER = ["python3", "-I", "/opt/pi-dispatch/runner.py"]
RULES_PATH = "/opt/pi-dispatch/HARD_RULES.md"


class Lie(Exception):
    """The image is not what it says; the text says how, and the fix."""


class Skip(Exception):
    """The check does not apply to this image; the text says why."""


def create(
    engine: pidispatch.DockerEngine,
    image: pidispatch.Image,
    network: str,
    instead: Sequence[str] = (),
) -> str:
    """A container under the job's flags; `instead` replaces the entrypoint."""
    api = engine.api
    options = pidispatch.job_options(engine.settings, image, engine.cpus)
    made: dict[str, str] = api.create_container(
        image.id,
        list(instead[1:]) or None,
        entrypoint=list(instead[:1]) or None,
        labels=engine.labels("verify-image", 0, "verify"),
        user=f"{image.uid}:{image.gid}",
        environment={"HOME": "/home/pi", "PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
        volumes=["/job", "/workspace", "/outbox"],
        host_config=api.create_host_config(network_mode=network, **options),
        use_config_proxy=False,
    )
    return made["Id"]


class Ran(NamedTuple):
    """How a job's container ended, what it printed, the bundle it left."""

    code: int
    lines: list[str]
    bundle: bytes | None


@dataclass
class Probe:
    """A container of the image, idle, under the job's flags, with no network."""

    engine: pidispatch.DockerEngine
    image: pidispatch.Image
    facts: dict[str, Any]
    container: str

    def run(self, *command: str, user: str = "") -> tuple[int, str]:
        """Exit code and output of one command inside."""
        api = self.engine.api
        made = api.exec_create(self.container, list(command), user=user)
        output: bytes = api.exec_start(made["Id"])
        code: int = api.exec_inspect(made["Id"])["ExitCode"]
        return code, output.decode("utf-8", "replace").strip()

    def must(self, *command: str, why: str) -> str:
        code, output = self.run(*command)
        if code:
            raise Lie(f"{why} (`{' '.join(command)}` exits {code}: {output[:200]})")
        return output

    def job(self, inputs: Mapping[str, bytes | Path], serving: str) -> Ran:
        """One job by the image's own entrypoint, with `serving` beside it as its gate.

        It shares the probe's network, which is loopback alone.
        """
        api = self.engine.api
        script = api.exec_create(self.container, ["python3", "-c", serving])
        api.exec_start(script["Id"], detach=True)  # the runner waits for it
        made = create(self.engine, self.image, f"container:{self.container}")
        try:
            with pidispatch.tar_of(inputs) as tar:
                api.put_archive(made, "/job", tar)
            api.start(made)
            code = api.wait(made, timeout=RUN_SECONDS + 30)["StatusCode"]
            lines = api.logs(made, stderr=False).decode("utf-8", "replace")
            bundle = self.engine.read_file(made, "/outbox/branch.bundle", 2**20)
            return Ran(code, lines.splitlines(), bundle)
        finally:
            api.remove_container(made, force=True, v=True)

    @property
    def rules(self) -> str:
        return self.must("cat", RULES_PATH, why=f"{RULES_PATH} is missing")


def check_entrypoint(probe: Probe) -> str:
    entry = probe.facts["Config"].get("Entrypoint") or []
    if entry != RUNNER:
        raise Lie(f"the entrypoint is {entry}, not the runner {RUNNER}")
    return " ".join(entry)


def check_pi(probe: Probe) -> str:
    claimed = probe.image.labels.get(pidispatch.LABEL + "pi-version")
    version = probe.must("pi", "--version", why="pi does not run")
    if version != claimed:
        raise Lie(f"pi is {version}, its label says {claimed or 'nothing'}")
    return version


def check_tools(probe: Probe) -> str:
    for tool in ("node", "git", "rg", "fd", "python3"):
        probe.must(tool, "--version", why=f"`{tool}` is missing")
    return "node git rg fd python3"


def check_user(probe: Probe) -> str:
    user = str(probe.facts["Config"].get("User") or "")
    if not re.fullmatch(r"[1-9]\d*(:\d+)?", user):
        raise Lie(f"USER is {user or 'unset (root)'}; it must be a number, not 0")
    return user


def check_guardrails_owned(probe: Probe) -> str:
    script = (
        "for f in /opt/pi-dispatch /opt/pi-dispatch/*; do test -w $f && echo $f; done"
    )
    _, writable = probe.run("sh", "-c", script)
    owners = probe.must(
        "find",
        "/opt/pi-dispatch",
        "(",
        "!",
        "-user",
        "0",
        "-o",
        "-perm",
        "/022",
        ")",
        why="/opt/pi-dispatch is missing",
    )
    if writable or owners:
        raise Lie(f"the job's user could change {writable or owners}")
    return "/opt/pi-dispatch belongs to root"


def check_powers(probe: Probe) -> str:
    status = probe.must("cat", "/proc/self/status", why="no /proc")
    powers = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    if not powers or int(powers[1], 16):
        raise Lie("a process in the box has capabilities")
    return "CapEff 0"


def check_read_only(probe: Probe) -> str:
    for path in ("/", "/opt", "/usr/local/bin"):
        if probe.run("touch", f"{path}/.probe")[0] == 0:
            raise Lie(f"{path} can be written")
    return "the root is read-only"


def check_agent_dir(probe: Probe) -> str:
    probe.must(
        "sh",
        "-c",
        "mkdir -p ~/.pi/agent && touch ~/.pi/agent/.probe /workspace/.probe"
        " /outbox/.probe /tmp/.probe",
        why="the agent's directories cannot be written",
    )
    if probe.run("touch", "/outbox/.other", user="4321:4321")[0]:
        raise Lie("a local job, which has its folder's owner, could not write /outbox")
    return "agent dir, /workspace, /outbox, /tmp"


def check_rules(probe: Probe) -> str:
    if pidispatch.HARD_RULES_SENTINEL not in probe.rules:
        raise Lie(f"{RULES_PATH} lacks the line {pidispatch.HARD_RULES_SENTINEL}")
    return pidispatch.HARD_RULES_SENTINEL


def check_known(probe: Probe) -> str:
    unknown = probe.image.capabilities - set(CAPABILITIES)
    if unknown:
        raise Lie(
            f"the label claims unknown capabilities: {', '.join(sorted(unknown))}"
        )
    if not probe.image.capabilities:
        raise Skip("the image declares no capabilities, so it is given none")
    return ", ".join(sorted(probe.image.capabilities))


def claimed(probe: Probe, capability: str) -> None:
    if capability not in probe.image.capabilities:
        raise Skip("not claimed")


def check_replicas(probe: Probe) -> str:
    """The rules must leave the branch to the prompt and name none themselves."""
    claimed(probe, "replicas")
    text = " ".join(probe.rules.split())
    if REPLICAS_PHRASE not in text:
        raise Lie(f"replicas is claimed, but the rules do not say `{REPLICAS_PHRASE}`")
    named = re.search(r"\bpi/[A-Za-z<{$*]\S*", text)
    if named:
        raise Lie(
            f"replicas is claimed, but the rules hard-code the branch `{named[0]}`: "
            "every replica would write there"
        )
    return "the branch is the one the prompt names"


_GATE_PROBE = """
import json, subprocess, sys, urllib.error, urllib.request
gate = subprocess.Popen(
    [sys.executable, "-I", "/opt/pi-dispatch/gate.py", "--host", "127.0.0.1"]
    + ["--port", "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
line = {"token": "t", "providers": {}, "allow": [], "models": [], "prices": {},
    "budget": None, "spent": 0}
gate.stdin.write(json.dumps(line) + "\\n"); gate.stdin.flush()
port = json.loads(gate.stdout.readline())["port"]
url = f"http://127.0.0.1:{port}"
print(urllib.request.urlopen(url + "/healthz", timeout=5).status)
try:
    urllib.request.urlopen(url + "/example.invalid/v1/models", timeout=5)
    print("open")
except urllib.error.HTTPError as error:
    print(error.code)
gate.kill()
"""


def check_gate(probe: Probe) -> str:
    claimed(probe, "gate")
    output = probe.must("python3", "-c", _GATE_PROBE, why="the gate does not start")
    health, refusal = output.split()
    if health != "200" or refusal not in ("401", "403"):
        raise Lie(f"the gate answers {health} and {refusal}: it does not refuse")
    return "answers, and refuses a stranger"


#: A provider, and a gate, of a few lines on loopback; `told` prints the names of the
#: tools that pi declared to it.
_PROVIDER = """
import http.server, json, os, pathlib, subprocess, threading, time
asked = []
class Provider(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(400)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *args):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Provider)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
row = {"baseUrl": url + "/v1", "apiKey": "x",
    "api": "openai-completions", "models": [{"id": "m"}]}
models = {"providers": {"probe": row}}
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 60}
def told():
    print(*(tool["function"]["name"] for tool in asked[0]["tools"]) if asked else [])
"""

#: Runs the image's pi with the extension.
_FORK_JOIN_PROBE = (
    _PROVIDER
    + """
agent = os.path.expanduser("~/.pi/probe")
os.makedirs(agent, exist_ok=True)
with open(agent + "/models.json", "w") as file:
    json.dump(models, file)
command = ["pi", "-p", "--mode", "json", "--no-session", "--no-approve",
    "--no-extensions", "-e", "/opt/pi-dispatch/fork-join/src/index.ts"]
subprocess.run([*command, "--model", "probe/m"], input=b"hi", **quiet,
    env={**os.environ, "PI_CODING_AGENT_DIR": agent})
told()
"""
)

#: Runs a job that excludes a tool through the image's own runner; the provider's
#: refusal ends it.
_EXCLUDE_PROBE = (
    _PROVIDER
    + """
root = pathlib.Path("/tmp/probe-exclude")
places = {n: root / n for n in ("job", "workspace", "outbox", "home")}
for place in places.values():
    place.mkdir(parents=True)
job = {"version": 1, "jobId": "probe", "attempt": 1, "base": None, "branch": None,
    "target": {"type": "local", "number": 0}, "requestRef": None, "requestSha": None,
    "flow": None, "provider": "probe", "model": "m", "models": models,
    "gate": {"url": url, "token": "x"}, "maxTurns": 1, "maxTokens": None,
    "deadline": int(time.time()) + 60, "excludeTools": ["bash", "edit"],
    "forkJoin": False, "publish": "host", "session": None,
    "git": {"name": "probe", "email": "probe@localhost"}}
(places["job"] / "job.json").write_text(json.dumps(job))
(places["job"] / "event.json").write_text("{}")
(places["job"] / "prompt.md").write_text("hi")
command = ["python3", "-I", "/opt/pi-dispatch/runner.py"]
for name, place in places.items():
    command += ["--" + name, str(place)]
subprocess.run(command, **quiet)
told()
"""
)


def check_fork_join(probe: Probe) -> str:
    claimed(probe, "forkJoin")
    probe.must(
        "test",
        "-f",
        "/opt/pi-dispatch/fork-join/src/index.ts",
        why="forkJoin is claimed, but the extension is missing",
    )
    tools = probe.must("python3", "-c", _FORK_JOIN_PROBE, why="pi does not run")
    if "fork_join" not in tools.split():
        raise Lie("forkJoin is claimed, but pi does not register fork_join from it")
    return "pi loads the extension and registers fork_join"


def check_exclude_tools(probe: Probe) -> str:
    """The runner must pass the list on, and pi must then offer none of it."""
    claimed(probe, "excludeTools")
    output = probe.must("python3", "-c", _EXCLUDE_PROBE, why="the runner does not run")
    offered = set(output.split())
    if "read" not in offered:
        raise Lie("excludeTools is claimed, but the runner brings pi to no model call")
    if left := offered & {"bash", "edit"}:
        named = ", ".join(sorted(left))
        raise Lie(f"excludeTools is claimed, but {named} is offered although excluded")
    return "what is excluded is not offered to the model"


def check_forges(probe: Probe) -> str:
    if probe.image.forges is None:
        raise Skip("no forges label: every forge is allowed")
    for kind in sorted(probe.image.forges):
        row = pidispatch.FORGES.get(kind)
        if row is None:
            raise Lie(f"the forges label names `{kind}`, which is no forge")
        probe.must(
            row.cli, "--version", why=f"{kind} is named, but `{row.cli}` is absent"
        )
    return ", ".join(sorted(probe.image.forges))


RUN_SECONDS = 60
_GATE_PORT = 8099
_TOKEN = "probe-token"

#: A gate and its model: first the agent is told to commit a file, then it is done.
_SCRIPTED = """
import http.server, json
class Model(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        first = all(said["role"] != "assistant" for said in asked["messages"])
        command = "echo done > probe && git add probe && git commit -qm probe"
        call = {"index": 0, "id": "call_0", "type": "function", "function":
            {"name": "bash", "arguments": json.dumps({"command": command})}}
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        delta = {"role": "assistant", "content": "Done.", "tool_calls": [call] * first}
        self.tell([{"index": 0, "delta": delta, "finish_reason": None}])
        finish = "tool_calls" if first else "stop"
        self.tell([{"index": 0, "delta": {}, "finish_reason": finish}])
        usage = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
        self.tell([], usage=usage)
        self.wfile.write(b"data: [DONE]\\n\\n")
    def tell(self, choices, **more):
        head = {"id": "x", "object": "chat.completion.chunk", "model": "m"}
        line = json.dumps({**head, "choices": choices, **more})
        self.wfile.write(f"data: {line}\\n\\n".encode())
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Model).serve_forever()
""".replace("PORT", str(_GATE_PORT))


def tiny_pack() -> tuple[str, bytes]:
    """A commit of one empty tree: its id, and a git pack (version 2) that holds both.

    Made by hand, so that the check needs no git on this side.
    """
    tree = hashlib.sha1(b"tree 0\0").hexdigest()
    person = "probe <probe@localhost> 1700000000 +0000"
    commit = f"tree {tree}\nauthor {person}\ncommitter {person}\n\nBase\n".encode()
    pack = struct.pack(">4sII", b"PACK", 2, 2)
    for kind, content in ((1, commit), (2, b"")):
        size = len(content)
        first = kind << 4 | size & 15
        more = bytes([first | 0x80, size >> 4]) if size > 15 else bytes([first])
        pack += more + zlib.compress(content)
    name = hashlib.sha1(f"commit {len(commit)}\0".encode() + commit).hexdigest()
    return name, pack + hashlib.sha1(pack).digest()


def scripted_job(now: float) -> dict[str, bytes | Path]:
    """The inputs of a job on an issue whose model is `_SCRIPTED`."""
    base, pack = tiny_pack()
    url = f"http://127.0.0.1:{_GATE_PORT}"
    style = {"api": "openai-completions", "models": [{"id": "m"}]}
    row = {"baseUrl": f"{url}/v1", "apiKey": _TOKEN, **style}
    job = {
        "version": pidispatch.JOB_FILE_VERSION,
        "jobId": "verify-image",
        "attempt": 1,
        "target": {"type": "issue", "number": 1},
        "base": base,
        "branch": "pi/probe",
        "requestRef": None,
        "requestSha": None,
        "flow": "probe",
        "provider": "probe",
        "model": "m",
        "gate": {"url": url, "token": _TOKEN},
        "models": {"providers": {"probe": row}},
        "maxTurns": 5,
        "maxTokens": None,
        "deadline": int(now) + RUN_SECONDS,
        "excludeTools": [],
        "forkJoin": False,
        "publish": "host",
        "session": None,
        "git": {"name": "probe", "email": "probe@localhost"},
    }
    return {
        "job.json": json.dumps(job).encode(),
        "prompt.md": b"Commit a file.\n",
        "event.json": b"{}",
        "skill/probe/SKILL.md": b"---\nname: probe\ndescription: A probe.\n---\n",
        "base.pack": pack,
        "shallow": b"",
    }


def check_run(probe: Probe) -> str:
    """A job from its inputs to its bundle and its result line, and no network."""
    ran = probe.job(scripted_job(time.time()), _SCRIPTED)
    result = pidispatch.result_of(ran.lines)
    if result is None:
        last = (ran.lines or ["nothing"])[-1]
        raise Lie(f"a job exits {ran.code} without its result line: {last[:200]}")
    if ran.code or result.code or not ran.bundle:
        why = result.reason or "no bundle"
        raise Lie(f"a job of two scripted turns exits {ran.code}: {why}")
    return f"{result.turns} turns, a commit, a bundle and the result line"


#: Name, what an image author must do, and the check.
CHECKS: tuple[tuple[str, str, Callable[[Probe], str]], ...] = (
    ("entrypoint", "ENTRYPOINT is the runner, exactly", check_entrypoint),
    ("pi", "`pi --version` equals the pi-version label", check_pi),
    ("tools", "node, git, rg, fd and python3 are on PATH", check_tools),
    ("user", "USER is numeric and not root", check_user),
    ("owner", "/opt/pi-dispatch belongs to root, read-only", check_guardrails_owned),
    ("powers", "a process has no capability", check_powers),
    ("root", "nothing needs a writable root", check_read_only),
    (
        "directories",
        "home, workspace, tmp are writable, outbox for any user",
        check_agent_dir,
    ),
    ("rules", "HARD_RULES.md carries the sentinel", check_rules),
    ("capabilities", "only known capabilities are claimed", check_known),
    ("replicas", "the rules leave the branch to the prompt", check_replicas),
    ("gate", "the gate answers and refuses", check_gate),
    ("forkJoin", "pi registers fork_join from the extension", check_fork_join),
    ("excludeTools", "excluded tools are not offered", check_exclude_tools),
    ("forges", "the CLI of each named forge is there", check_forges),
    ("run", "a scripted job ends with a bundle and its result line", check_run),
)


@contextlib.contextmanager
def probing(engine: pidispatch.DockerEngine, tag: str) -> Iterator[Probe | None]:
    """An idle container of the image; None when there is no such image."""
    image = engine.image(tag)
    if image is None:
        yield None
        return
    made = create(engine, image, "none", ["sleep", "600"])
    try:
        engine.api.start(made)
        facts = engine.api.inspect_image(tag)  # type: ignore[no-untyped-call]
        yield Probe(engine, image, facts, made)
    finally:
        engine.api.remove_container(made, force=True, v=True)


def findings(tag: str) -> Iterator[Finding]:
    """Every check's finding; after a lie the rest is still looked at."""
    engine = pidispatch.DockerEngine(pidispatch.Settings(), "verify-image")
    with probing(engine, tag) as probe:
        if probe is None:
            yield Finding("present", "lie", f"{tag} is not on this machine")
            return
        yield Finding("present", "ok", probe.image.id)
        lied = False
        for name, _, check in CHECKS:
            if lied and name in SLOW:
                yield Finding(name, "note", "not tried: this image lies already")
                continue
            finding = _found(name, check, probe)
            lied |= finding.state == "lie"
            yield finding


#: Checks that start pi; an image that has lied is not worth their seconds.
SLOW = ("forkJoin", "excludeTools", "run")


def _found(name: str, check: Callable[[Probe], str], probe: Probe) -> Finding:
    try:
        return Finding(name, "ok", check(probe))
    except Skip as skip:
        return Finding(name, "note", str(skip))
    except Lie as lie:
        return Finding(name, "lie", str(lie))


_MARKS = {"ok": "✓", "note": "-", "lie": "✗"}


def run(tag: str, *, as_json: bool = False) -> int:
    """Print every finding; 1 if any is a lie."""
    found: list[Finding] = []
    for finding in findings(tag):
        found.append(finding)
        if not as_json:
            text = pidispatch.plain_text(finding.text)
            print(f"{_MARKS[finding.state]} {finding.name}: {text}", flush=True)
    if as_json:
        pidispatch.emit_json(found)
    return 1 if any(f.state == "lie" for f in found) else 0


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: verify_image.py TAG", file=sys.stderr)
        return 2
    try:
        return run(arguments[0])
    except pidispatch.PidispatchError as error:
        print(pidispatch.problem_text(error), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
