"""CONTRIBUTING.md is true: a fifth forge, added as it says, makes a job."""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import requests
from conftest import ROOT
from test_docs import blocks

PAGE = ROOT / "CONTRIBUTING.md"


def put(source: str, block: str, anchor: str) -> str:
    """The block, indented like the line that it is put before."""
    assert source.count(anchor) == 1, anchor
    line = next(line for line in source.split("\n") if anchor in line)
    indent = line[: len(line) - len(line.lstrip())]
    start = source.index(line)
    return source[:start] + textwrap.indent(block, indent) + source[start:]


@pytest.fixture
def pond(tmp_path: Path) -> Iterator[ModuleType]:
    """The module with the forge of the page in it."""
    row, setting, forge = blocks(PAGE, "python")
    source = (ROOT / "pidispatch.py").read_text("utf-8")
    source = source.replace('"azure"]\n', '"azure", "pond"]\n', 1)
    first = source.index("ForgeRow(\n", source.index("FORGES: dict"))
    source = source[:first] + row.rstrip() + "," + source[first:]
    source = put(source, setting, "providers: Mapping[str, Provider] = msgspec.field(")
    source = put(
        source, forge + "\n\n", "_FORGE_CLASSES: dict[str, type[ApiForge]] = {"
    )
    source = source.replace(
        "_FORGE_CLASSES: dict[str, type[ApiForge]] = {",
        '_FORGE_CLASSES: dict[str, type[ApiForge]] = {"pond": Pond, ',
    )
    path = tmp_path / "pidispatch_pond.py"
    path.write_text(source, "utf-8")
    (tmp_path / "templates").symlink_to(ROOT / "templates")
    spec = importlib.util.spec_from_file_location("pidispatch_pond", path)
    assert spec and spec.loader
    made = sys.modules["pidispatch_pond"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    yield made
    del sys.modules["pidispatch_pond"]


def test_a_fifth_forge_is_what_contributing_says(
    pond: ModuleType, tmp_path: Path
) -> None:
    """From the page to a job, over HTTP; nothing but the page was added."""
    on = {"type": "label", "any": ["pi:urgent"]}
    run = {"kind": "pond", "flow": "fix-issue", "replicas": 2}
    (tmp_path / "triggers.json").write_text(
        json.dumps({"triggers": [{"on": on, "run": run}]})
    )
    settings = pond.load_settings({"POND_WEBHOOK_SECRET": "s3cret"}, None)
    forges = pond.forges_of(settings)
    assert list(forges) == ["pond"]
    store = pond.Store(tmp_path / "queue.db")
    triggers = pond.TriggersFile(tmp_path / "triggers.json", forges)
    intake = pond.Intake(forges, triggers, store, 0)
    intake.own["pond"] = "1"
    edge = pond.Edge(intake, "127.0.0.1", 0)
    edge.start()

    def send(guid: str, secret: str = "s3cret", **changes: Any) -> tuple[int, Any]:
        shape = {"action": "labeled", "repo": "octo/lamp", "number": 7, "who": 5}
        shape |= {"label": "pi:urgent", "writes": True, "title": guid} | changes
        body = json.dumps(shape).encode()
        headers = {
            "Content-Type": "application/json",
            "X-Pond-Event": "issue",
            "X-Pond-Delivery": guid,
            "X-Pond-Signature": hmac.new(
                secret.encode(), body, hashlib.sha256
            ).hexdigest(),
        }
        url = f"http://127.0.0.1:{edge.port}/pond"
        answer = requests.post(url, body, headers=headers, timeout=5)
        return answer.status_code, answer.json()

    try:
        wanted = {"status": "queued", "jobs": ["po-d-1-r1", "po-d-1-r2"]}
        assert send("d-1") == (202, wanted)
        assert send("d-1") == (200, {"status": "duplicate"})
        assert send("d-2") == (200, {"status": "coalesced"})
        assert send("d-3", "guess")[0] == 401
        ignored = {"status": "ignored", "reason": "no-allowlisted-label"}
        assert send("d-4", label="bug") == (200, ignored)
        assert send("d-5", number=8, writes=False) == (202, {"status": "pending"})
        assert send("d-6", number=9, who=1)[1]["reason"] == "self"
        with pytest.raises(pond.Faults, match="pond cannot be polled"):
            pond.polled_of(pond.Settings(poll_repos=("pond:octo/lamp",)))
    finally:
        edge.stop(patience=0.5)
        store.close()


def test_a_fifth_forge_takes_less_than_a_page() -> None:
    """What it takes is code of less than a page, sixty lines."""
    assert sum(block.count("\n") for block in blocks(PAGE, "python")) < 65


def test_the_page_names_what_there_is() -> None:
    text = PAGE.read_text("utf-8")
    for name in ("tests/edge.py", "tests/test_edge.py", "tests/test_structure.py"):
        assert name in text
        assert (ROOT / name).is_file()
