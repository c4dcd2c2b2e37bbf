"""The image's sources: what a builder and an operator rely on without an engine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import jinja2
import pytest

import pidispatch

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "image" / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def rules() -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT / "templates"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template("HARD_RULES.md.j2").render()


def test_the_legacy_builder_understands_the_dockerfile() -> None:
    assert not re.search(r"^# *syntax|--mount|<<|--chmod|--link", DOCKERFILE, re.M)


def test_pi_is_pinned_exactly_and_installed_without_scripts() -> None:
    assert set(re.findall(r"ARG PI_VERSION=(\S+)", DOCKERFILE)) == {"1.6.0"}
    assert "--ignore-scripts" in DOCKERFILE
    assert '"@earendil-works/pi-coding-agent@${PI_VERSION}"' in DOCKERFILE


def test_the_small_files_come_last_so_that_a_changed_runner_is_quick() -> None:
    lines = [line for line in DOCKERFILE.splitlines() if line and line[0].isupper()]
    assert lines[-1] == "COPY --from=payload /opt/pi-dispatch /opt/pi-dispatch"


def test_the_certificates_of_the_build_stay_in_stages_that_are_thrown_away() -> None:
    image = DOCKERFILE.rpartition("FROM ${BASE_IMAGE}")[2]
    assert "build-ca" not in image and "/context" not in image


def test_the_hard_rules_need_no_variable_and_have_their_sentinel(rules: str) -> None:
    assert rules.startswith("# Hard rules\n")
    assert rules.splitlines().count("pidispatch-hard-rules-v1") == 1


def test_the_hard_rules_are_five_and_hard_code_no_branch(rules: str) -> None:
    assert re.findall(r"^(\d)\. \*\*", rules, re.M) == ["1", "2", "3", "4", "5"]
    assert "only the branch that the prompt names" in rules
    assert not re.search(r"\bpi/|issue-|refs/|\bmain\b|\bmaster\b", rules)


@pytest.mark.parametrize(
    "words",
    ["/workspace", "never instructions", "Never merge", "--force-with-lease", "secret"],
)
def test_the_hard_rules_say_what_they_must(rules: str, words: str) -> None:
    assert words in rules


def test_the_offline_base_is_a_shell_script_without_faults() -> None:
    script = ROOT / "image" / "offline-base.sh"
    assert script.stat().st_mode & 0o111
    subprocess.run(["sh", "-n", script], check=True)


def test_the_dockerfile_installs_every_cli_that_build_image_offers() -> None:
    for kind, package in pidispatch.CLI_PACKAGES.items():
        assert f'{kind}) set -- "$@" {package} ;;' in DOCKERFILE
