"""What is installed works alone: the wheel holds all it needs, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from jsonschema import Draft202012Validator

import pidispatch

#: The README says so; a wheel that outgrows it has taken something in by mistake.
WHEEL_BYTES = 400_000
NOT_SHIPPED = {"node_modules", "__pycache__", "test", "package-lock.json"}
NOT_SHIPPED |= {"run-tests.sh", "tsconfig.json"}


def run(*argv: str | Path, **options: Any) -> str:
    done: subprocess.CompletedProcess[str] = subprocess.run(
        argv, capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the wheel is made from, beside things that work leaves behind."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, copy)
    ignored = shutil.ignore_patterns("node_modules", "__pycache__")
    for name in ("templates", "image", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for litter in ("image/__pycache__/gate.pyc", "image/fork-join/node_modules/x.js"):
        (copy / litter).parent.mkdir(parents=True, exist_ok=True)
        (copy / litter).write_text("litter")
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel; its checkout is gone once it is built."""
    out = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "wheel",
        "-d",
        out,
        cwd=checkout,
    )
    shutil.rmtree(checkout)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds what pip installs of it; dependencies stay outside."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    pip += ["--disable-pip-version-check", "--no-compile", "--target"]
    run(*pip, target, wheel)
    return target


def python(place: Path, cwd: Path, *arguments: str, **environ: str) -> str:
    """A process that sees what is installed in `place`, and never the checkout."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(place),
        "PYTHONSAFEPATH": "1",
        "DOCKER_HOST": "unix:///nonexistent",
        "XDG_DATA_HOME": str(cwd),
        **environ,
    }
    return run(sys.executable, *arguments, cwd=cwd, env=environ)


def test_the_wheel_holds_what_is_needed_and_no_litter(wheel: Path) -> None:
    assert wheel.stat().st_size < WHEEL_BYTES
    assert f"smaller than {WHEEL_BYTES // 1000} kB" in (ROOT / "README.md").read_text(
        "utf-8"
    )
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {"pidispatch.py", "pidispatch_demo.py", "verify_image.py"}
    for folder in ("templates", "image", "docs/schemas"):
        wanted |= {
            f"pidispatch_data/{path.relative_to(ROOT)}"
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and not NOT_SHIPPED & set(path.parts)
        }
    assert {name for name in names if ".dist-info/" not in name} == wanted


RESOURCES = """
import json, sys, pidispatch
from pathlib import Path
place = Path(pidispatch.__file__).parent
with open(sys.argv[1]) as file:
    wanted = json.load(file)
for name in wanted:
    path = pidispatch.resource(*name.split("/"))
    assert path.is_relative_to(place), path
    assert path.read_bytes(), path
assert pidispatch.HARD_RULES_SENTINEL in pidispatch.hard_rules()
folder = Path(sys.argv[2])
pidispatch.image_context(folder, None)
print(json.dumps([str(place), sorted(p.name for p in folder.iterdir())]))
"""


def test_templates_image_context_and_schemas_are_read_from_the_wheel(
    installed: Path, tmp_path: Path
) -> None:
    wanted = [
        str(path.relative_to(ROOT))
        for folder in ("templates", "docs/schemas")
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    ]
    names = ("Dockerfile", "runner.py", "gate.py", "offline-base.sh")
    listed = tmp_path / "wanted.json"
    listed.write_text(json.dumps([*wanted, *(f"image/{name}" for name in names)]))
    context = tmp_path / "context"
    said = python(installed, tmp_path, "-c", RESOURCES, str(listed), str(context))
    place, found = json.loads(said)
    assert place == str(installed)
    assert {"HARD_RULES.md", *names} <= set(found)


def test_the_demo_runs_from_the_wheel_without_a_checkout(
    installed: Path, tmp_path: Path
) -> None:
    command = ["-c", "import pidispatch; pidispatch.main()", "demo", "--json"]
    report = json.loads(python(installed, tmp_path, *command))
    Draft202012Validator(pidispatch.output_schema("demo")).validate(report)
    assert report["box"] == "process"
    assert report["seconds"] < 60
    for i, job in enumerate(report["jobs"], start=1):
        assert (job["replica"], job["replicas"]) == (i, 2)
        assert (job["outcome"], job["branch"]) == ("completed", f"pi/issue-7-r{i}")
        assert job["request"]["title"].startswith(f"[r{i}/2] ")
    first, second = report["jobs"]
    assert first["request"] != second["request"]


WITHOUT_DEMO = """
import importlib.util, sys
if importlib.util.find_spec("pidispatch_demo"):  # of another installation
    sys.modules["pidispatch_demo"] = None
import click, pidispatch
from click.testing import CliRunner

def walk(group, path=()):
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from walk(command, (*path, name))
        else:
            yield (*path, name)

def go(code, *line):
    result = CliRunner().invoke(pidispatch.main, line, catch_exceptions=False)
    assert result.exit_code == code, (line, result.output)
    return result.output

for path in walk(pidispatch.main):
    go(0, *path, "--help")
go(0, "init")
go(0, "triggers", "check")
go(0, "triggers", "list", "--json")
go(0, "triggers", "show", "1")
go(0, "triggers", "schema")
pidispatch.Store(pidispatch.load_settings().db).close()
go(0, "runs")
go(0, "status", "--json")
go(0, "pause")
go(0, "resume")
go(2, "show", "gh-x")
go(2, "logs", "gh-x")
go(1, "doctor")
go(1, "verify-image", "pi-job")
go(1, "build-image")
go(2, "serve", "--triggers", "none.json")
for name in pidispatch.OUTPUTS:
    pidispatch.output_schema(name)
assert "pidispatch_demo is not installed" in go(2, "demo")
assert sys.modules.get("pidispatch_demo") is None
"""


def test_everything_but_the_demo_works_when_its_module_is_deleted(
    installed: Path, tmp_path: Path
) -> None:
    place, work = tmp_path / "place", tmp_path / "work"
    shutil.copytree(installed, place)
    (place / "pidispatch_demo.py").unlink()
    work.mkdir()
    environ = {"PI_BIND": "127.0.0.1", "PI_PORT": "0", "PI_PANEL_PORT": "0"}
    python(place, work, "-c", WITHOUT_DEMO, **environ)
