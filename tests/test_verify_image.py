"""verify-image: each lie of an image is found, told from what does not apply."""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from conftest import JOB_IMAGE
from jsonschema import Draft202012Validator

import pidispatch
import verify_image

RULES = pidispatch.hard_rules()
FORK_JOIN = f"python3 -c {verify_image._FORK_JOIN_PROBE}"
EXCLUDE = f"python3 -c {verify_image._EXCLUDE_PROBE}"
HONEST: dict[str, str] = {
    "pi --version": pidispatch.PI_VERSION,
    f"cat {verify_image.RULES_PATH}": RULES,
    "cat /proc/self/status": "Name:\tcat\nCapEff:\t0000000000000000\n",
    "find /opt/pi-dispatch": "",
    "for f in": "",
    FORK_JOIN: "read bash fork_join",
    EXCLUDE: "read write",
    "python3 -c": "200\n401",
    "touch /outbox": "",
    "touch": "!denied",
}


#: What a runner prints last when a job ends well.
LAST = '{"event":"exit","code":0,"reason":null,"turns":2,"commits":1}'
RAN = verify_image.Ran(0, ["{}", LAST], b"bundle")


@dataclass
class PaperProbe(verify_image.Probe):
    """Answers commands by their beginning from a table; `!` is exit code 1."""

    answers: dict[str, str] = field(default_factory=dict)
    ran: verify_image.Ran = RAN

    def job(self, inputs: Mapping[str, bytes | Path], serving: str) -> verify_image.Ran:
        return self.ran

    def run(self, *command: str, user: str = "") -> tuple[int, str]:
        line = " ".join(command).removeprefix("sh -c ")
        for start, answer in (*self.answers.items(), *HONEST.items()):
            if line.startswith(start):
                return int(answer.startswith("!")), answer
        return 0, ""


def probe(
    answers: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
    **config: Any,
) -> PaperProbe:
    named = {"pi-version": pidispatch.PI_VERSION, "capabilities": "replicas gate"}
    given = {pidispatch.LABEL + k: v for k, v in {**named, **(labels or {})}.items()}
    image = pidispatch.Image("t:1", "sha256:1", given, 1001, 1001)
    facts = {"Config": {"Entrypoint": verify_image.RUNNER, "User": "1001", **config}}
    engine = cast(pidispatch.DockerEngine, None)
    return PaperProbe(engine, image, facts, "c", answers=answers or {})


def after(*ran: Any) -> PaperProbe:
    """An image that is honest until it runs a job."""
    made = probe()
    made.ran = verify_image.Ran(*ran)
    return made


def states(made: PaperProbe) -> dict[str, str]:
    return {
        name: verify_image._found(name, check, made).state
        for name, _, check in verify_image.CHECKS
    }


def test_an_honest_image_has_no_lie_and_what_it_does_not_claim_is_a_note() -> None:
    found = states(probe())
    assert {name for name, state in found.items() if state == "lie"} == set()
    assert {n for n, s in found.items() if s == "note"} == {
        "forkJoin",
        "excludeTools",
        "forges",
    }
    assert states(probe(labels={"capabilities": ""}))["capabilities"] == "note"


ALL = {"capabilities": "replicas,gate,forkJoin,excludeTools"}
LIES: list[tuple[str, PaperProbe]] = [
    ("entrypoint", probe(Entrypoint=["sh"])),
    ("pi", probe({"pi --version": "0.74.0"})),
    ("pi", probe({"pi --version": "!not found"})),
    ("tools", probe({"rg": "!not found"})),
    ("user", probe(User="0")),
    ("user", probe(User="")),
    ("user", probe(User="pi")),
    ("owner", probe({"for f in": "/opt/pi-dispatch/runner.py"})),
    ("owner", probe({"find /opt/pi-dispatch": "/opt/pi-dispatch/gate.py"})),
    ("powers", probe({"cat /proc/self/status": "CapEff:\t00000000a80425fb\n"})),
    ("root", probe({"touch /opt": "made"})),
    ("directories", probe({"mkdir -p": "!denied"})),
    ("directories", probe({"touch /outbox": "!denied"})),
    ("rules", probe({f"cat {verify_image.RULES_PATH}": "be nice"})),
    ("rules", probe({f"cat {verify_image.RULES_PATH}": "!no such file"})),
    ("capabilities", probe(labels={"capabilities": "replicas,telepathy"})),
    ("gate", probe({"python3 -c": "200\nopen"})),
    ("gate", probe({"python3 -c": "!no gate"})),
    ("forkJoin", probe({"test -f": "!"}, ALL)),
    ("forkJoin", probe({FORK_JOIN: "read bash"}, ALL)),
    ("excludeTools", probe({EXCLUDE: "read bash"}, ALL)),
    ("excludeTools", probe({EXCLUDE: ""}, ALL)),
    ("excludeTools", probe({EXCLUDE: "!no runner"}, ALL)),
    ("forges", probe({"gh": "!not found"}, {"forges": "github"})),
    ("forges", probe(labels={"forges": "sourceforge"})),
    ("run", after(0, [], b"bundle")),
    ("run", after(1, ["Traceback"], None)),
    ("run", after(0, [LAST], None)),
    ("run", after(2, [LAST.replace("0,", "2,", 1)], None)),
]


@pytest.mark.parametrize(("name", "made"), LIES, ids=[lie[0] for lie in LIES])
def test_an_image_broken_in_one_way_lies_about_that_alone(
    name: str, made: PaperProbe
) -> None:
    found = states(made)
    assert found.pop(name) == "lie"
    # an image without rules has no rules that leave the branch to the prompt
    also = {"replicas"} if name == "rules" else set()
    assert {other for other, state in found.items() if state == "lie"} == also


@pytest.mark.parametrize(
    "rules",
    [
        "Push to pi/issue-<n> and nowhere else.",
        RULES.replace("the branch that the prompt names", "pi/issue-7"),
        RULES + "\n6. Your branch is pi/issue-{n}.",
        RULES.replace(verify_image.REPLICAS_PHRASE, "your branch"),
    ],
)
def test_a_claim_of_replicas_over_rules_that_fix_the_branch_is_a_lie(
    rules: str,
) -> None:
    """Two replicas would push to one branch, and nothing would say so."""
    answers = {f"cat {verify_image.RULES_PATH}": rules}
    made = probe(answers)
    assert states(made)["replicas"] == "lie"
    assert states(probe(answers, {"capabilities": "gate"}))["replicas"] == "note"


def test_a_pack_made_by_hand_is_one_that_git_takes(tmp_path: Path) -> None:
    base, pack = verify_image.tiny_pack()
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    index = [*git, "index-pack", "--stdin", "--strict"]
    subprocess.run(index, input=pack, check=True, stdout=subprocess.DEVNULL)
    shown = subprocess.run(
        [*git, "log", "--format=%H %s", base], capture_output=True, check=True
    )
    assert shown.stdout.decode() == f"{base} Base\n"
    subprocess.run([*git, "fsck", "--strict"], check=True, stderr=subprocess.DEVNULL)


def test_the_findings_have_the_shape_that_is_published() -> None:
    schema = pidispatch.output_schema("verify-image")
    finding = verify_image._found("pi", verify_image.check_pi, probe())
    assert finding == pidispatch.Finding("pi", "ok", pidispatch.PI_VERSION)
    rows = [{"name": "pi", "state": "fine", "text": ""}]
    assert not Draft202012Validator(schema).is_valid(rows)


# -- real images, each broken in one way -----------------------------------------

HOME = "/opt/pi-dispatch"


def label(**labels: str) -> str:
    pairs = (f'{pidispatch.LABEL}{k}="{v}"' for k, v in labels.items())
    return "LABEL " + " ".join(pairs).replace("pi_version", "pi-version")


#: What one layer breaks, the check that names it, and a word of what it says.
BROKEN: dict[str, tuple[str, str, str]] = {
    "replicas over rules that name a branch": (
        f"RUN echo 'Push to pi/issue-<n> only.' >> {HOME}/HARD_RULES.md",
        "replicas",
        "hard-code the branch `pi/issue-<n>`",
    ),
    "forkJoin without the extension": (
        f"RUN rm -r {HOME}/fork-join",
        "forkJoin",
        "the extension is missing",
    ),
    "a root user": ("USER 0", "user", "USER is 0"),
    "guardrails that the job may write": (
        f"RUN chmod -R a+w {HOME}",
        "owner",
        f"could change {HOME}",
    ),
    "another pi": (label(pi_version="1.5.9"), "pi", "its label says 1.5.9"),
    "no rg": ("RUN rm /usr/bin/rg", "tools", "`rg` is missing"),
    "another entrypoint": ('ENTRYPOINT ["bash"]', "entrypoint", "not the runner"),
    "no gate": (f"RUN rm {HOME}/gate.py", "gate", "the gate does not start"),
    "an unknown capability": (
        label(capabilities="replicas,gate,telepathy"),
        "capabilities",
        "unknown capabilities: telepathy",
    ),
    "a CLI that is named and absent": (
        label(forges="forgejo"),
        "forges",
        "`tea` is absent",
    ),
    "a runner that says nothing at its end": (
        f"RUN sed -i 's/out.last(.*)/pass/' {HOME}/runner.py",
        "run",
        "without its result line",
    ),
}


@contextlib.contextmanager
def broken(client: Any, layer: str) -> Iterator[str]:
    """The tag of the job image with one more layer; removed afterwards."""
    tag = f"pidispatch-test/verify:{pidispatch.random_hex(6)}"
    user = "" if layer.startswith("USER") else "\nUSER 1001:1001"
    text = f"FROM {JOB_IMAGE}\nUSER root\n{layer}{user}\n"
    built = client.build(fileobj=io.BytesIO(text.encode()), tag=tag, forcerm=True)
    said = b"".join(built)
    assert b"errorDetail" not in said, said
    try:
        yield tag
    finally:
        client.remove_image(tag, force=True)


@pytest.mark.docker
def test_the_image_that_we_build_holds_every_claim_it_makes() -> None:
    found = {finding.name: finding for finding in verify_image.findings(JOB_IMAGE)}
    assert [f for f in found.values() if f.state == "lie"] == []
    assert list(found) == ["present", *(name for name, _, _ in verify_image.CHECKS)]
    assert {"replicas", "gate", "forkJoin", "run"} <= {
        name for name, finding in found.items() if finding.state == "ok"
    }
    assert found["run"].text == "2 turns, a commit, a bundle and the result line"


@pytest.mark.docker
@pytest.mark.parametrize("name", BROKEN)
def test_verify_image_fails_on_an_image_broken_in_one_way_and_names_the_lie(
    name: str, docker_client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    layer, check, said = BROKEN[name]
    with broken(docker_client, layer) as tag:
        assert verify_image.run(tag) == 1
    printed = capsys.readouterr().out.splitlines()
    marks = {line[2:].partition(":")[0]: line for line in printed}
    assert list(marks) == ["present", *(row[0] for row in verify_image.CHECKS)]
    lies = [line for line in printed if line.startswith("✗")]
    assert [line.partition(":")[0] for line in lies] == [f"✗ {check}"]
    assert said in lies[0]
    filters = {"label": f"{pidispatch.LABEL}instance=verify-image"}
    rows = docker_client.containers(all=True, filters=filters)
    assert [row for row in rows if row["Image"] == tag] == []
