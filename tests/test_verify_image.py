"""verify-image: each lie of an image is found, told from what does not apply."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
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
    "touch": "!denied",
}


@dataclass
class PaperProbe(verify_image.Probe):
    """Answers commands by their beginning from a table; `!` is exit code 1."""

    answers: dict[str, str] = field(default_factory=dict)

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
    return PaperProbe(engine, image, facts, "c", answers or {})


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


def test_the_findings_have_the_shape_that_is_published() -> None:
    schema = pidispatch.output_schema("verify-image")
    finding = verify_image._found("pi", verify_image.check_pi, probe())
    assert finding == pidispatch.Finding("pi", "ok", pidispatch.PI_VERSION)
    rows = [{"name": "pi", "state": "fine", "text": ""}]
    assert not Draft202012Validator(schema).is_valid(rows)
