"""The built job image: what it is, and real pi driven by the runner inside it.

The model is a script in a sibling container on an internal network of the test's own;
nothing here reaches any other address.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_runner import TOKEN, Box, Ended, Result, Upstream, upstream

pytestmark = pytest.mark.docker
__all__ = ["upstream"]  # a fixture of the runner's tests

LABEL = {"dev.pi-dispatch.test": "image"}

MODEL = r"""
import http.server, json, sys
STEPS = json.loads(sys.argv[1])
class Model(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def reply(self, status, kind, body):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.reply(200, "text/plain", b"ok")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        messages = body.get("messages") or []
        keys = [self.headers.get(k) or "" for k in ("authorization", "x-api-key")]
        print(json.dumps({"path": self.path, "keys": keys, "body": body}), flush=True)
        done = sum(message["role"] == "assistant" for message in messages)
        step = STEPS[min(done, len(STEPS) - 1)]
        if "status" in step:
            error = json.dumps(step["body"]).encode()
            return self.reply(step["status"], "application/json", error)
        calls = [{"index": 0, "id": "call_%d" % done, "type": "function",
                  "function": {"name": "bash", "arguments": json.dumps({"command": c})}}
                 for c in step.get("bash", [])]
        finish = "tool_calls" if calls else step.get("finish", "stop")
        delta = {"role": "assistant", "content": "All done.", "tool_calls": calls}
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        def chunk(choices, **more):
            head = {"id": "x", "object": "chat.completion.chunk", "model": "small-1"}
            return b"data: %s\n\n" % json.dumps(
                {**head, "choices": choices, **more}).encode()
        stream = chunk([{"index": 0, "delta": delta, "finish_reason": None}])
        stream += chunk([{"index": 0, "delta": {}, "finish_reason": finish}])
        stream += chunk([], usage=usage) + b"data: [DONE]\n\n"
        self.reply(200, "text/event-stream", stream)
http.server.ThreadingHTTPServer(("0.0.0.0", 8080), Model).serve_forever()
"""


def missing(what: str) -> None:
    if os.environ.get("PIDISPATCH_REQUIRE_DOCKER") == "1":
        pytest.fail(f"{what}, and PIDISPATCH_REQUIRE_DOCKER=1")
    pytest.skip(what)


@pytest.fixture(scope="module")
def docker_client() -> Iterator[Any]:
    docker = pytest.importorskip("docker")
    client = None
    try:
        client = docker.from_env(timeout=60)
        client.ping()
    except docker.errors.DockerException:
        missing("no Docker Engine answers")
    yield client
    client.close()


@pytest.fixture(scope="module")
def job_image(docker_client: Any) -> Any:
    import docker

    tag = os.environ.get("PI_JOB_IMAGE", "pi-job:latest")
    try:
        return docker_client.images.get(tag)
    except docker.errors.ImageNotFound:
        return missing(f"no image {tag}: build it first")


@pytest.fixture(scope="module")
def network(docker_client: Any) -> Iterator[Any]:
    import docker

    subnet = f"10.{200 + secrets.randbelow(40)}.{secrets.randbelow(256)}.0/28"
    pool = docker.types.IPAMPool(subnet=subnet)
    network = docker_client.networks.create(
        f"pidispatch-test-image-{secrets.token_hex(4)}",
        internal=True,
        labels=LABEL,
        ipam=docker.types.IPAMConfig(pool_configs=[pool]),
    )
    yield network
    network.remove()


# --------------------------------------------------------------------------------------
# facts

HARDENED: dict[str, Any] = {
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges"],
    "read_only": True,
    "init": True,
    "labels": LABEL,
    "pids_limit": 512,
    "mem_limit": "2g",
    "tmpfs": {
        "/tmp": "exec,nosuid,nodev,size=256m",
        "/home/pi": "exec,nosuid,nodev,size=256m,uid=1001,gid=1001,mode=0700",
    },
}


@pytest.fixture(scope="module")
def shell(docker_client: Any, job_image: Any) -> Any:
    def run(command: str) -> str:
        """A command's output, run with a job's restrictions and without network."""
        container = docker_client.containers.create(
            job_image.id,
            ["-c", command],
            entrypoint="bash",
            network_mode="none",
            **HARDENED,
        )
        try:
            container.start()
            container.wait(timeout=60)
            return str(container.logs().decode().strip())
        finally:
            container.remove(force=True, v=True)

    return run


def test_the_image_declares_its_user_entrypoint_and_labels(job_image: Any) -> None:
    config = job_image.attrs["Config"]
    assert config["User"] == "1001:1001"
    assert config["Entrypoint"] == ["python3", "-I", "/opt/pi-dispatch/runner.py"]
    assert not config["Cmd"]
    assert not config.get("Volumes"), "an unlabelled volume for every container"
    assert config["WorkingDir"] == "/workspace"
    labels = config["Labels"]
    assert labels["dev.pi-dispatch.pi-version"] == "1.6.0"
    assert {"replicas", "gate"} <= set(
        labels["dev.pi-dispatch.capabilities"].split(",")
    )
    assert "dev.pi-dispatch.forges" not in labels


def test_no_secret_or_proxy_is_left_in_the_images_environment(job_image: Any) -> None:
    names = {entry.split("=")[0] for entry in job_image.attrs["Config"]["Env"]}
    assert names <= {"PATH", "HOME", "NODE_VERSION", "YARN_VERSION"}


def test_pi_is_the_version_the_label_says(shell: Any, job_image: Any) -> None:
    version = job_image.labels["dev.pi-dispatch.pi-version"]
    assert shell("pi --version") == version


@pytest.mark.parametrize("tool", ["git", "rg", "fd", "fdfind", "python3", "node", "ps"])
def test_a_tool_the_agent_works_with_is_there(shell: Any, tool: str) -> None:
    assert shell(f"{tool} --version")


def test_node_is_new_enough_for_pi(shell: Any) -> None:
    version = tuple(
        int(part) for part in shell("node -p process.versions.node").split(".")
    )
    assert version >= (22, 19)


def test_directories_belong_to_those_who_write_them(shell: Any) -> None:
    said = shell("stat -c '%n %u:%g %a' /job /workspace /outbox /opt/pi-dispatch")
    assert said.splitlines() == [
        "/job 0:0 755",
        "/workspace 1001:1001 755",
        "/outbox 1001:1001 1777",
        "/opt/pi-dispatch 0:0 755",
    ]


def test_the_dispatchers_files_are_roots_and_not_writable(shell: Any) -> None:
    found = shell("find /opt -perm /022 -not -type l -o -not -user 0 -not -type l")
    assert found == ""
    names = set(shell("ls /opt/pi-dispatch").split())
    assert {"HARD_RULES.md", "runner.py", "gate.py", "models.json"} <= names
    assert names <= {
        "HARD_RULES.md",
        "runner.py",
        "gate.py",
        "models.json",
        "fork-join",
    }


def test_the_certificates_of_the_build_are_not_in_the_image(shell: Any) -> None:
    found = "find / -xdev -name 'build-ca*' -o -path /context -prune -print 2>/dev/null"
    assert shell(f"{found}; true") == ""


def test_the_job_user_has_no_privileges(shell: Any) -> None:
    assert shell("id -u; id -g; grep CapEff /proc/self/status").split() == [
        *("1001", "1001", "CapEff:", "0000000000000000")
    ]


def test_the_hard_rules_are_rendered_and_name_no_branch(shell: Any) -> None:
    rules = shell("cat /opt/pi-dispatch/HARD_RULES.md")
    assert "pidispatch-hard-rules-v1" in rules.splitlines()
    assert "only the branch that the prompt names" in rules
    assert [line[:2] for line in rules.splitlines() if line[:1].isdigit()] == [
        *("1.", "2.", "3.", "4.", "5.")
    ]
    assert "{" not in rules and "pi/" not in rules


def test_the_catalogue_has_the_shape_the_host_reads(
    docker_client: Any, job_image: Any
) -> None:
    container = docker_client.containers.create(job_image.id, labels=LABEL)
    try:
        chunks, _ = container.get_archive("/opt/pi-dispatch/models.json")
        data = io.BytesIO(b"".join(chunks))
    finally:
        container.remove(force=True, v=True)
    with tarfile.open(fileobj=data) as archive:
        file = archive.extractfile("models.json")
        assert file is not None
        catalogue = json.load(file)
    served = ("anthropic", "openai", "google", "openrouter", "mistral", "groq")
    for provider in (*served, "xai", "deepseek"):
        entry = catalogue[provider]
        assert entry["baseUrl"].startswith("https://")
        for model in entry["models"]:
            keys = {"id", "api", "contextWindow", "maxTokens", "cost"}
            assert keys <= set(model) <= {*keys, "baseUrl"}
            prices = {"input", "output", "cacheRead", "cacheWrite"}
            assert set(model["cost"]) == prices


# --------------------------------------------------------------------------------------
# a run


def tar_of(directory: Path) -> bytes:
    """/job as the host packs it: root's, read-only."""

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.mode = 0o755 if member.isdir() else 0o444
        return member

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.add(directory, arcname=".", filter=owned)
    return data.getvalue()


class Run:
    """One job in a real container, with a scripted model where the gate would be."""

    def __init__(self, client: Any, image: Any, network: Any, box: Box) -> None:
        self._client, self._image, self._network = client, image, network
        self.box = box
        self._containers: list[Any] = []

    def start(self, *steps: dict[str, Any]) -> Any:
        self._model = self._create(
            entrypoint=["python3", "-I", "-c", MODEL, json.dumps(steps)]
        )
        self._network.disconnect(self._model)
        self._network.connect(self._model, aliases=["gate"])
        self._model.start()
        self.box.lay_out()
        job = self._create()
        job.put_archive("/job", tar_of(self.box.job))
        job.start()
        return job

    def _create(self, **more: Any) -> Any:
        from docker.types import Mount

        paths = ("/job", "/workspace", "/outbox")
        container = self._client.containers.create(
            self._image.id,
            network=self._network.id,
            mounts=[Mount(path, None, labels=LABEL) for path in paths],
            **HARDENED,
            **more,
        )
        self._containers.append(container)
        return container

    def finish(self, job: Any) -> Ended:
        code = job.wait(timeout=60)["StatusCode"]
        raw = job.logs(stderr=False).decode()
        lines = [json.loads(line) for line in raw.splitlines()]
        chunks, _ = job.get_archive("/outbox")
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
            archive.extractall(self.box.path, filter="data")
        return Ended(code, lines, raw)

    def run(self, *steps: dict[str, Any]) -> Ended:
        return self.finish(self.start(*steps))

    def requests(self) -> list[dict[str, Any]]:
        logs = self._model.logs(stderr=False)
        return [json.loads(line) for line in logs.decode().splitlines()]

    def close(self) -> None:
        for container in self._containers:
            container.remove(force=True, v=True)


@pytest.fixture
def job(
    docker_client: Any, job_image: Any, network: Any, tmp_path: Path, upstream: Upstream
) -> Iterator[Run]:
    run = Run(
        docker_client, job_image, network, Box(tmp_path, upstream, "http://gate:8080")
    )
    yield run
    run.close()


COMMIT = {"bash": ["echo done > done.txt && git add done.txt && git commit -qm Done"]}
DONE: dict[str, Any] = {}


def prompt_of(request: dict[str, Any]) -> tuple[str, str]:
    """The system and the user text of a request, as the model got them."""
    texts = {}
    for message in request["body"]["messages"]:
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content or [])
        texts.setdefault(message["role"], content)
    return texts["system"], texts["user"]


def test_real_pi_commits_through_its_bash_tool_and_the_bundle_comes_out(
    job: Run,
) -> None:
    ended = job.run(COMMIT, DONE)
    assert (ended.code, ended.exit["reason"]) == (0, None)
    assert (ended.exit["turns"], ended.exit["commits"]) == (2, 1)
    assert ended.exit["usage"]["total"] == 220
    kinds = [line["event"] for line in ended.lines]
    assert kinds.count("turn_start") == 2
    assert kinds[-2:] == ["agent_settled", "exit"]
    result = Result(job.box)
    assert (result.subjects, result.text("done.txt")) == (["Done"], "done")


def test_the_model_is_told_the_hard_rules_the_skill_and_the_prompt(job: Run) -> None:
    (job.box.job / "prompt.md").write_text("@/etc/hostname " + "long " * 40_000)
    assert job.run(DONE).code == 0
    (request,) = job.requests()
    assert request["path"] == "/api.example.com/v1/chat/completions"
    assert request["keys"][0] == f"Bearer {TOKEN}"
    system, user = prompt_of(request)
    assert "pidispatch-hard-rules-v1" in system
    assert "/job/skill/fix-issue/SKILL.md" in system
    assert user.startswith("@/etc/hostname long long")
    assert len(user) > 200_000


def test_an_excluded_tool_is_not_offered_to_the_model(job: Run) -> None:
    job.box.settings["excludeTools"] = ["write", "edit"]
    assert job.run(DONE).code == 0
    (request,) = job.requests()
    tools = {tool["function"]["name"] for tool in request["body"]["tools"]}
    assert tools - {"fork_join"} == {"read", "bash"}


def test_fork_join_is_offered_exactly_where_the_image_ships_it(
    job: Run, shell: Any
) -> None:
    shipped = shell("ls /opt/pi-dispatch | grep -x fork-join; true") == "fork-join"
    assert job.run(DONE).code == 0
    (request,) = job.requests()
    tools = {tool["function"]["name"] for tool in request["body"]["tools"]}
    assert ("fork_join" in tools) is shipped


def test_a_model_that_never_ends_is_stopped_by_the_turn_budget(job: Run) -> None:
    job.box.settings["maxTurns"] = 2
    ended = job.run({"bash": ["date >> dates.txt"]})
    assert (ended.code, ended.exit["reason"]) == (2, "turn-budget")
    assert ended.exit["turns"] == 2
    assert Result(job.box).changed == ["dates.txt"]


def test_a_stop_saves_the_work_of_a_running_tool(job: Run) -> None:
    busy = job.start(COMMIT, {"bash": ["echo left > left.txt; sleep 300"]})
    for line in busy.logs(stream=True, follow=True, stderr=False):
        if line.count(b"tool_execution_start") and job.requests()[1:]:
            break
    busy.stop(timeout=10)
    ended = job.finish(busy)
    assert (ended.code, ended.exit["code"]) == (143, 143)
    assert Result(job.box).subjects[0] == "Done"


def style(job: Run, api: str) -> None:
    provider = job.box.settings["models"]["providers"]["example"]
    provider.update(api=api, baseUrl="http://gate:8080/api.example.com")


STYLES = [
    "anthropic-messages",
    "openai-completions",
    "openai-responses",
    "google-generative-ai",
    "mistral-conversations",
]


@pytest.mark.parametrize("api", STYLES)
def test_the_gates_budget_refusal_is_seen_in_every_style(job: Run, api: str) -> None:
    style(job, api)
    error = {"type": "pidispatch_budget", "message": "no: budget"}
    ended = job.run({"status": 403, "body": {"type": "error", "error": error}})
    assert (ended.code, ended.exit["reason"]) == (2, "token-budget")


def test_a_refused_key_is_seen_without_a_status_in_the_message(job: Run) -> None:
    style(job, "google-generative-ai")
    error = {"code": 401, "type": "authentication_error", "message": "no such key"}
    ended = job.run({"status": 401, "body": {"type": "error", "error": error}})
    assert (ended.code, ended.exit["reason"]) == (2, "provider-auth-refused")


def test_a_cut_off_reply_is_no_success(job: Run) -> None:
    ended = job.run({"finish": "length"})
    assert (ended.code, ended.exit["reason"]) == (2, "runner-policy")


def test_a_dishonest_workspace_does_not_stop_the_result_in_the_box(job: Run) -> None:
    deeds = "git config commit.gpgsign true; rm -rf .git/objects; chmod 000 README"
    ended = job.run({"bash": [f"echo left > left.txt; {deeds}"]}, DONE)
    assert ended.code == 0
    result = Result(job.box)
    assert result.changed == ["left.txt"]
