"""Section surfaces: a replica set side by side, from what is kept of its runs."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator
from world import KEY, World, bash, say, world

import pidispatch

REQUEST = "printf 'Bend it\\n\\nDone.\\n' > ${PI_OUTBOX:-/outbox}/review-request.md"


def replica(index: int, *commands: str) -> dict[str, object]:
    """What the model does in the run whose prompt says it is that replica."""
    command = " && ".join([*commands, REQUEST])
    return {"match": f"replica {index} of 2", "steps": [bash(command), say()]}


@pytest.fixture
def made(tmp_path: Path) -> World:
    with world(tmp_path) as here:
        here.rules({"replicas": 2})
        here.model.set_scripts(
            [
                replica(
                    1,
                    "echo bent > spoon.txt",
                    "mkdir tests && echo ok > tests/test_spoon.py",
                    "git add -A && git commit -qm Bend",
                ),
                replica(
                    2,
                    "echo curved > spoon.txt",
                    "printf '\\033[31m\\0' > blob",
                    "git add -A && git commit -qm Curve",
                ),
            ]
        )
        here.start()
        yield here


def compared(here: World, job: str) -> pidispatch.Comparison:
    reader = pidispatch.Reader(here.settings.db)
    return pidispatch.compare_runs(here.settings, reader, job)


def test_a_set_is_compared_after_its_boxes_are_gone(made: World) -> None:
    jobs = made.label()
    made.wait(jobs)
    made.stop()
    made.forge.stop()  # nothing of the forge is needed any more
    found = compared(made, jobs[1])
    assert [run.job for run in found.runs] == jobs, "in order, whichever was named"
    one, two = (run.change for run in found.runs)
    assert one and two
    files = {file.path: (file.added, file.removed, file.test) for file in one.files}
    assert files == {"spoon.txt": (1, 1, False), "tests/test_spoon.py": (1, 0, True)}
    blob = next(file for file in two.files if file.path == "blob")
    assert (blob.added, blob.removed) == (None, None), "binary files have no lines"
    assert "+bent" in one.diff.text and "+curved" in two.diff.text
    (pair,) = found.between
    assert (pair.old, pair.new) == tuple(jobs)
    assert "-bent" in pair.diff.text and "+curved" in pair.diff.text
    for run in found.runs:
        assert run.turns and run.tokens and run.seconds and run.request
        assert run.model == "fake/fake-1"


def test_the_command_prints_the_set_and_its_json_keeps_its_schema(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = made.label()
    made.wait(jobs)
    monkeypatch.setattr(pidispatch, "settings_of", lambda db: made.settings)
    text = CliRunner().invoke(pidispatch.main, ["compare", jobs[0], "--diff", "all"])
    assert text.exit_code == 0, text.output
    rows = {line[:15].strip(): line[15:].split() for line in text.output.splitlines()}
    assert rows["tests touched"] == ["1", "0"]
    assert rows["files"] == ["2", "2"]
    assert "== r1/2 against its base" in text.output
    assert f"== from {jobs[0]} to {jobs[1]}" in text.output
    assert "\x1b" not in text.output and "\0" not in text.output
    told = CliRunner().invoke(pidispatch.main, ["compare", jobs[0], "--json"])
    shape = pidispatch.output_schema("compare")
    Draft202012Validator(shape).validate(json.loads(told.output))


def test_each_replica_runs_on_its_model_and_the_set_is_compared(made: World) -> None:
    """replicaModels, on two providers: in the box, the record, both comparisons."""
    fake = made.settings.providers["fake"]
    row = dict(fake.models[0])
    other = msgspec.structs.replace(fake, name="other", models=(row | {"id": "b/2"},))
    made.stop()
    made.change(
        providers={"fake": fake, "other": other}, keys={"fake": KEY} | {"other": KEY}
    )
    models = ["fake/fake-1", "other/b/2"]
    made.rules({"replicas": 2, "replicaModels": models})
    service = made.start()
    jobs = made.label()
    made.wait(jobs)
    records = [made.record(job) for job in jobs]
    assert [record.outcome for record in records] == ["completed"] * 2
    assert [(r.provider, r.model) for r in records] == [
        ("fake", "fake-1"),
        ("other", "b/2"),
    ]
    asked = {call.body["model"] for call in made.model.log}
    assert asked == {"fake-1", "b/2"}, "the model was asked by the name it was given"
    found = compared(made, jobs[0])
    assert [run.model for run in found.runs] == models
    assert {n: c for n, *c in pidispatch.comparison_rows(found)}["model"] == models
    page = (
        urllib.request.urlopen(
            f"http://127.0.0.1:{service.panel.port}/compare/{jobs[1]}", timeout=10
        )
        .read()
        .decode()
    )
    cells = re.search(r'<th scope="row">model</th>(.*?)</tr>', page)
    assert cells and re.findall(r"<td>(.*?)</td>", cells[1]) == models
    assert [pick.name for pick in made.store.picks().models] == models


@pytest.mark.parametrize(
    ("run", "why"),
    [
        ({"replicas": 2, "replicaModels": ["fake/a", "nobody/b"]},
         r'replicaModels\[1\]: "nobody/b" names no provider that is known: .*fake'),
        ({"replicas": 2, "replicaModels": ["fake/a"]}, "exactly 2 models"),
        ({"replicas": 3, "replicaModels": ["fake/a", "fake/b"]}, "exactly 3 models"),
        ({"replicaModels": ["fake/a", "fake/b"]}, "does nothing without run.replicas"),
    ],
)  # fmt: skip
def test_models_that_fit_no_set_are_refused_at_load_and_a_reload_keeps_the_rules(
    made: World, run: dict[str, Any], why: str
) -> None:
    kept = made.service.triggers.rules  # type: ignore[union-attr]
    made.rules(run)
    made.wait_for(lambda: made.service.triggers.problem)  # type: ignore[union-attr]
    assert re.search(why, made.service.triggers.problem)  # type: ignore[union-attr,arg-type]
    assert made.service.triggers.rules == kept  # type: ignore[union-attr]
    made.stop()
    with pytest.raises(pidispatch.Faults, match=why):
        made.start()


@pytest.mark.parametrize("command", ["check", "list", "show 0"])
def test_the_commands_know_the_providers_of_the_settings(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules, providers = tmp_path / "triggers.json", tmp_path / "providers.json"
    run = {"kind": "github", "flow": "fix-issue", "replicas": 2}
    run["replicaModels"] = ["anthropic/a", "mine/b"]
    on = {"type": "label", "any": ["x"]}
    rules.write_text(json.dumps({"triggers": [{"on": on, "run": run}]}))
    words = ["triggers", *command.split(), str(rules)]
    refused = CliRunner().invoke(pidispatch.main, words)
    assert refused.exit_code == 2 and "PI_PROVIDERS_FILE" in refused.output
    row = {"baseUrl": "http://127.0.0.1:1/v1", "style": "openai-completions"}
    row["keyVariable"] = "MINE_KEY"
    providers.write_text(json.dumps({"providers": {"mine": row}}))
    monkeypatch.setenv("PI_PROVIDERS_FILE", str(providers))
    assert CliRunner().invoke(pidispatch.main, words).exit_code == 0


def test_a_sibling_without_a_result_says_why_and_hides_nothing(made: World) -> None:
    jobs = made.label()
    made.wait(jobs)
    shutil.rmtree(pidispatch.kept_path(made.settings, jobs[0]))
    found = compared(made, jobs[0])
    assert found.runs[0].change is None
    assert "kept" in (found.runs[0].note or "")
    assert found.runs[1].change is not None
    assert found.between == []


def test_a_base_that_the_mirror_lost_is_fetched_again(made: World) -> None:
    jobs = made.label()
    made.wait(jobs)
    for mirror in (made.settings.state_dir / "mirrors").glob("*.git"):
        shutil.rmtree(mirror)
    assert all(run.change for run in compared(made, jobs[0]).runs)


def test_a_spoiled_bundle_is_a_note_and_not_an_end(made: World) -> None:
    jobs = made.label()
    made.wait(jobs)
    bundle = pidispatch.kept_path(made.settings, jobs[1]) / "branch.bundle"
    bundle.write_bytes(bundle.read_bytes()[:-40])
    found = compared(made, jobs[0])
    assert found.runs[0].change and found.runs[1].change is None
    assert found.runs[1].note


@pytest.mark.parametrize("at", ["its change", "between them"])
def test_a_result_that_is_too_much_to_show_hides_no_sibling(
    made: World, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """A bundle of a few kB may hold gigabytes of one letter: git is stopped."""
    jobs = made.label()
    made.wait(jobs)
    name = {"its change": "change_of", "between them": "diff_between"}[at]
    real, bad = getattr(pidispatch, name), b"curved\n"

    def bounded(*results: Any) -> Any:
        for result in results:
            if isinstance(result, pidispatch.Quarantine) and (
                result.call("show", f"{result.tip}:spoon.txt").out == bad
            ):
                raise pidispatch.BundleRefused("too-large")
        return real(*results)

    monkeypatch.setattr(pidispatch, name, bounded)
    found = compared(made, jobs[0])
    one, two = found.runs
    assert one.change and one.note is None
    assert found.between == []
    if at == "its change":
        assert two.change is None and two.note and "too-large" in two.note
    else:
        assert two.change


def test_an_unknown_job_is_one_line(made: World) -> None:
    with pytest.raises(pidispatch.ConfigError, match="no job"):
        compared(made, "gh-none")


@pytest.mark.parametrize(
    ("path", "test"),
    [
        ("tests/spoon.py", True),
        ("src/test_spoon.py", True),
        ("src/spoon_test.go", True),
        ("web/spoon.test.ts", True),
        ("web/spoon.spec.tsx", True),
        ("app/__tests__/spoon.js", True),
        ("java/SpoonTest.java", True),
        ("src/contest.py", False),
        ("src/attest.go", False),
        ("latest.txt", False),
        ("docs/testing.md", False),
    ],
)
def test_a_test_is_known_by_its_path(path: str, test: bool) -> None:
    (row,) = pidispatch.changed_files(f"1\t0\t{path}\0")
    assert row.test is test


def test_a_long_diff_is_cut_and_says_so(made: World) -> None:
    made.model.set_scripts(
        [replica(i, "seq 200000 > spoon.txt && git commit -qam Much") for i in (1, 2)]
    )
    jobs = made.label()
    made.wait(jobs)
    change = compared(made, jobs[0]).runs[0].change
    assert change and change.diff.truncated
    assert len(change.diff.text) <= pidispatch.DIFF_BYTES
    assert sum(file.added or 0 for file in change.files) == 200_000
