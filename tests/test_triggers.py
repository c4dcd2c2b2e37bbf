"""Loading triggers.json: what is taken, every refusal, the schema."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import pidispatch
from pidispatch import (
    FORGES,
    REPLICAS_MAX,
    REVIEW_STATES,
    TOOLS,
    Faults,
    On,
    Rule,
    Run,
    load_triggers,
    read_triggers,
    triggers_schema,
)

SOURCE = "triggers.json"
LABEL = {"type": "label", "any": ["pi:urgent"]}
COMMENT = {"type": "comment", "phrase": "@pi"}
CRON = {"type": "cron", "id": "nightly", "pattern": "0 3 * * MON-FRI"}
GITHUB = {"kind": "github", "flow": "fix-issue"}
GITLAB = {"kind": "gitlab", "flow": "fix-issue"}
FORGEJO = {"kind": "forgejo", "flow": "fix-issue"}
AZURE = {"kind": "azure", "flow": "fix-issue"}
SHOP = AZURE | {"repository": "Web Shop"}
MODELS = ["anthropic/claude-sonnet-4-5", "openrouter/qwen/qwen3-coder:free"]


def entry(on: Any = LABEL, run: Any = GITHUB, **more: Any) -> dict[str, Any]:
    return {"on": on, "run": run, **more}


def request(*actions: Any, **more: Any) -> dict[str, Any]:
    return {"type": "pull_request", "action": list(actions), **more}


def local(folder: Path | str, **more: Any) -> dict[str, Any]:
    run = {"kind": "local", "flow": "review", "folder": str(folder), "task": "Look."}
    return run | more


def on(**fields: Any) -> dict[str, Any]:
    return entry(LABEL | fields)


def run(**fields: Any) -> dict[str, Any]:
    return entry(run=GITHUB | fields)


def cron(**fields: Any) -> dict[str, Any]:
    return entry(CRON | fields, local("/nowhere/at/all"))


def comment(phrase: Any) -> dict[str, Any]:
    return entry({"type": "comment", "phrase": phrase})


def here(**fields: Any) -> dict[str, Any]:
    return entry(CRON, local("/nowhere/at/all", **fields))


def written(*entries: Any, **more: Any) -> bytes:
    return json.dumps({"triggers": list(entries), **more}).encode()


def loaded(*entries: Any) -> tuple[Rule, ...]:
    return load_triggers(written(*entries), SOURCE)


def faults_of(text: bytes | str) -> tuple[str, ...]:
    raw = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(Faults) as caught:
        load_triggers(raw, SOURCE)
    assert caught.value.exit_code == 2
    return caught.value.faults


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The top of a git work tree, as far as its `.git` tells."""
    top = tmp_path / "project"
    (top / ".git").mkdir(parents=True)
    (top / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    return top


# -- what is taken ------------------------------------------------------------

VALID: dict[str, dict[str, Any]] = {
    "the smallest rule": entry(),
    "the replica rule of the documentation": run(replicas=2),
    "any, all and none": on(any=["a", "b"], all=["c"], none=["d"]),
    "all alone": entry({"type": "label", "all": ["a"]}),
    "an empty any beside all": on(any=[], all=["a"]),
    "a label named twice": on(any=["a", "a"]),
    "match present": on(match="present"),
    "match added, stated": on(match="added"),
    "a comment": entry(COMMENT),
    "a phrase of two words": comment("hey pi"),
    "a slash command": comment("/pi"),
    "a comment on azure": entry(COMMENT, SHOP),
    "a label on azure": entry(run=SHOP),
    "github's request actions": entry(
        request("labeled", "opened", "synchronize", "reopened", any=["review"])
    ),
    "gitlab's request actions": entry(
        request("open", "update", "reopen", "approved", any=["a"], match="present"),
        GITLAB,
    ),
    "forgejo's request actions": entry(
        request("label_updated", "opened", "synchronized", "reopened", all=["a"]),
        FORGEJO,
    ),
    "azure's request actions": entry(request("created", "updated"), AZURE),
    "a predicate of none on a request": entry(request("opened", none=["wip"])),
    "review states": entry(
        request("review_submitted", reviewState=["approved", "changes_requested"])
    ),
    "a request's close": entry(request("closed")),
    "one request's close": entry(request("closed", number=7)),
    "one gitlab request's close": entry(request("close", number=7), GITLAB),
    "an issue's close": entry({"type": "issue", "action": ["closed"]}),
    "one gitlab issue's close": entry(
        {"type": "issue", "action": ["close"], "number": 2**53}, GITLAB
    ),
    "every run field of a forge rule": run(
        replicas=3,
        replicaModels=[*MODELS, MODELS[0]],
        image="registry.example:5000/team/pi-job:2",
        instructions="ü" * 2_000,
        resume=False,
        publish="agent",
        maxTurns=1,
        maxTokens=2_000_000,
        excludeTools=list(TOOLS),
        forkJoin=True,
    ),
    "a model of its own": run(provider="openrouter", model="qwen/qwen3-coder:free"),
    "resume alone": run(resume=True, publish="host"),
    "replicas on a comment rule": entry(COMMENT, GITHUB | {"replicas": 2}),
    "replicas on a request rule": entry(request("created"), AZURE | {"replicas": 3}),
    "the longest flow": run(flow="a" * 64),
    "the shortest flow": run(flow="0"),
}


@pytest.mark.parametrize("name", VALID)
def test_a_right_rule_is_loaded_with_its_own_words(name: str) -> None:
    (rule,) = loaded(VALID[name])
    assert rule.index == 0
    for part, model in (("on", rule.on), ("run", rule.run)):
        for key, value in VALID[name][part].items():
            stated = tuple(value) if isinstance(value, list) else value
            assert getattr(model, key) == stated


@pytest.mark.parametrize("pattern", ["* * * * *", "0 0 3 * * MON#1", "*/5 8-17 L * *"])
def test_a_cron_rule_is_loaded(folder: Path, pattern: str) -> None:
    when = CRON | {"pattern": pattern, "tz": "Europe/Berlin"}
    (rule,) = loaded(entry(when, local(folder, allowDirty=True, resume=False)))
    assert (rule.on.id, rule.on.pattern) == ("nightly", pattern)
    assert rule.on.tz == "Europe/Berlin"
    assert rule.run.folder == str(folder) and rule.run.allowDirty


def test_a_linked_work_tree_is_a_folder_too(folder: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / ".git").write_text(f"gitdir: {folder}/.git/worktrees/linked\n")
    assert loaded(entry(CRON, local(linked)))


def test_the_index_counts_every_entry(folder: Path) -> None:
    rules = loaded(entry(CRON, local(folder)), entry(), entry(COMMENT))
    types = [(rule.index, rule.on.type) for rule in rules]
    assert types == [(0, "cron"), (1, "label"), (2, "comment")]


def test_absent_replicas_leave_no_trace() -> None:
    (rule,) = loaded(entry())
    assert msgspec.to_builtins(rule.run) == GITHUB


def test_no_rules_and_a_schema_reference_are_legal() -> None:
    assert load_triggers(written(**{"$schema": "./s.json"}), SOURCE) == ()


def test_a_byte_order_mark_is_tolerated() -> None:
    assert load_triggers(b"\xef\xbb\xbf" + written(entry()), SOURCE) == loaded(entry())


def test_one_comment_rule_for_each_forge_is_fine() -> None:
    assert loaded(entry(COMMENT), entry(COMMENT, GITLAB), entry(COMMENT, SHOP))


# -- what is refused ----------------------------------------------------------

RANGE = ("2 to 3", "1 is a field that does nothing", "queue")
OPERATOR = ("local", "operator's own folder", "one tree")

#: (what is wrong, the entry, the path of its fault, words of the fault)
REFUSED: tuple[tuple[str, Any, str, tuple[str, ...]], ...] = (
    ("an entry that is no object", 5, "", ("5", "must be an object")),
    ("an entry without on", {"run": GITHUB}, ".on", ("absent", "must be an object")),
    ("an entry without run", {"on": LABEL}, ".run", ("absent", "must be an object")),
    ("on is no object", entry([]), ".on", ("[]", "must be an object")),
    ("run is no object", entry(run="github"), ".run", ('"github"', "object")),
    ("a stray key", entry(runs=1), ".runs", ("not a field of a rule", "run?")),
    ("a run field beside run", entry(replicas=2), ".replicas", ("under `run`",)),
    ("a run field in on", on(replicas=2), ".on.replicas", ("2", "under `run`")),
    ("an on field in run", run(phrase="x"), ".run.phrase", ("under `on`",)),
    ("a typo", run(replcas=2), ".run.replcas", ("2", "did you mean replicas?")),
    ("other case", run(Replicas=2), ".run.Replicas", ("did you mean replicas?",)),
    ("snake case", run(max_turns=2), ".run.max_turns", ("did you mean maxTurns?",)),
    ("a typo in on", on(mach="added"), ".on.mach", ("did you mean match?",)),
    ("an unknown key", run(zzz=[]), ".run.zzz", ("[]", "known: kind, flow")),
    ("an odd key", run(**{"a b\n": 1}), '.run["a b\\n"]', ("not a field",)),
    ("a reference in a rule", on(**{"$schema": ""}), ".on.$schema", ("not a field",)),
    # on.type and run.kind
    ("no type", entry({"any": ["a"]}), ".on.type", ("absent", "required")),
    ("a wrong type", on(type="Label"), ".on.type", ('"Label"', "cron, label")),
    ("a null type", on(type=None), ".on.type", ("null", "cron, label")),
    ("a type that is a list", on(type=[]), ".on.type", ("[]", "cron, label")),
    ("no kind", entry(run={"flow": "a"}), ".run.kind", ("absent", "required")),
    ("a wrong kind", run(kind="gitea"), ".run.kind", ('"gitea"', "forgejo, azure")),
    ("cron on a forge", entry(CRON), ".run.kind", ('"github"', "local")),
    ("a label on local", entry(run=local("/x")), ".run.kind", ("only with cron",)),
    # cron
    ("no cron id", entry({"type": "cron"}), ".on.id", ("absent", "required")),
    ("no cron pattern", entry({"type": "cron"}), ".on.pattern", ("required",)),
    ("a cron id with a colon", cron(id="a:b"), ".on.id", ('"a:b"', "letters")),
    ("a cron id with a newline", cron(id="a\n"), ".on.id", ('"a\\n"', "letters")),
    ("an empty cron id", cron(id=""), ".on.id", ('""', "letters")),
    ("four cron fields", cron(pattern="* * * *"), ".on.pattern", ("5 or 6",)),
    ("seven cron fields", cron(pattern="* " * 6 + "*"), ".on.pattern", ("5 or 6",)),
    ("cron out of range", cron(pattern="60 * * * *"), ".on.pattern", ("minute",)),
    ("cron in small letters", cron(pattern="0 0 * * mon"), ".on.pattern", ("MON",)),
    ("cron and a newline", cron(pattern="0 0 * * *\n"), ".on.pattern", ("5 or 6",)),
    ("cron on 30 February", cron(pattern="0 0 30 2 *"), ".on.pattern", ("day",)),
    ("a word for cron", cron(pattern="@daily"), ".on.pattern", ("5 or 6",)),
    ("a long field", cron(pattern="9" * 9_999 + " * * * *"), ".on.pattern", ("…",)),
    ("an unknown zone", cron(tz="Mars/Base"), ".on.tz", ('"Mars/Base"', "IANA")),
    ("a zone in small letters", cron(tz="europe/berlin"), ".on.tz", ("exact",)),
    ("a zone with a newline", cron(tz="UTC\n"), ".on.tz", ("IANA",)),
    ("a zone that climbs", cron(tz="../UTC"), ".on.tz", ("IANA",)),
    ("the machine's own zone", cron(tz="localtime"), ".on.tz", ("IANA",)),
    ("an over-long zone", cron(tz="A/" * 9_999), ".on.tz", ("IANA", "…")),
    ("a zone that is a number", cron(tz=1), ".on.tz", ("1", "IANA")),
    # label
    ("no selector", entry({"type": "label"}), ".on.any", ("any or all",)),
    ("empty selectors", on(any=[], all=[]), ".on.any", ("[]", "any or all")),
    ("none alone", entry({"type": "label", "none": ["a"]}), ".on.any", ("any or all",)),
    ("a label that is no list", on(any="pi"), ".on.any", ('"pi"', "array")),
    ("a null selector", on(all=None), ".on.all", ("null", "array")),
    ("an empty label", on(any=["a", ""]), ".on.any[1]", ('""', "label name")),
    ("a blank label", on(none=[" \t"]), ".on.none[0]", ('" \\t"', "label name")),
    ("a number as label", on(all=[7]), ".on.all[0]", ("7", "label name")),
    ("a label wanted and not", on(none=["pi:urgent"]), ".on.none[0]", ("never fire",)),
    ("so in all", on(all=["b"], none=["a", "b"]), ".on.none[1]", ("never fire",)),
    (
        "a tag wanted and not, in another case",
        entry(LABEL | {"none": ["PI:Urgent"]}, SHOP),
        ".on.none[0]",
        ("never fire",),
    ),
    ("a wrong match", on(match="all"), ".on.match", ('"all"', "added", "present")),
    ("a phrase on a label rule", on(phrase="x"), ".on.phrase", ("comment", "label")),
    ("an action on a label rule", on(action=["x"]), ".on.action", ("pull_request",)),
    ("a cron id on a label rule", on(id="x"), ".on.id", ("cron", "label")),
    # comment
    ("no phrase", entry({"type": "comment"}), ".on.phrase", ("absent", "required")),
    ("an empty phrase", comment(""), ".on.phrase", ('""', "phrase")),
    ("a spaced phrase", comment(" x"), ".on.phrase", ('" x"', "spaces")),
    ("a phrase of two lines", comment("x\ny"), ".on.phrase", ("one line",)),
    ("a phrase that is code", comment("`x`"), ".on.phrase", ("markup",)),
    ("a phrase that is a list", comment(["x"]), ".on.phrase", ('["x"]', "phrase")),
    ("an invisible character", comment("p\u200bi"), ".on.phrase", ("\\u200b",)),
    ("labels on comments", entry(COMMENT | {"any": ["a"]}), ".on.any", ("comment",)),
    # pull_request and issue
    ("no action", entry({"type": "pull_request"}), ".on.action", ("required",)),
    ("empty actions", entry(request()), ".on.action", ("[]", "non-empty")),
    ("an action twice", entry(request("opened", "opened")), ".on.action", ("twice",)),
    ("another's action", entry(request("open")), ".on.action[0]", ("synchronize",)),
    ("an action that is no word", entry(request(1)), ".on.action[0]", ("1",)),
    (
        "github's word on forgejo",
        entry(request("opened", "labeled"), FORGEJO),
        ".on.action[1]",
        ("label_updated", "forgejo"),
    ),
    (
        "a close word on azure",
        entry(request("closed"), AZURE),
        ".on.action[0]",
        ("created, updated",),
    ),
    ("labeled without labels", entry(request("labeled")), ".on.any", ("labeled",)),
    (
        "label_updated with none alone",
        entry(request("label_updated", none=["a"]), FORGEJO),
        ".on.any",
        ("label_updated",),
    ),
    (
        "labels on azure's requests",
        entry(request("created", any=["a"]), AZURE),
        ".on.any",
        ("azure",),
    ),
    (
        "present on azure's requests",
        entry(request("created", match="present"), AZURE),
        ".on.match",
        ("does nothing",),
    ),
    (
        "present without labels",
        entry(request("opened", match="present")),
        ".on.match",
        ("does nothing",),
    ),
    ("close in company", entry(request("closed", "opened")), ".on.action", ("alone",)),
    ("close and labels", entry(request("closed", any=["a"])), ".on.any", ("close",)),
    ("close and none", entry(request("closed", none=["a"])), ".on.none", ("close",)),
    ("number, no close", entry(request("opened", number=7)), ".on.number", ("close",)),
    ("number zero", entry(request("closed", number=0)), ".on.number", ("1 or more",)),
    ("number true", entry(request("closed", number=True)), ".on.number", ("true",)),
    ("number 7.0", entry(request("closed", number=7.0)), ".on.number", ("7.0",)),
    ("number as text", entry(request("closed", number="7")), ".on.number", ('"7"',)),
    (
        "a number that no forge has",
        entry(request("closed", number=2**53 + 1)),
        ".on.number",
        ("whole number",),
    ),
    (
        "states without a review",
        entry(request("opened", reviewState=["approved"])),
        ".on.reviewState",
        ("review_submitted",),
    ),
    (
        "states on another forge",
        entry(request("review_submitted", reviewState=["approved"]), GITLAB),
        ".on.reviewState",
        ("github",),
    ),
    (
        "an unknown state",
        entry(request("review_submitted", reviewState=["dismissed"])),
        ".on.reviewState[0]",
        ('"dismissed"', "changes_requested"),
    ),
    (
        "no states",
        entry(request("review_submitted", reviewState=[])),
        ".on.reviewState",
        ("non-empty",),
    ),
    (
        "a state twice",
        entry(request("review_submitted", reviewState=["approved", "approved"])),
        ".on.reviewState",
        ("twice",),
    ),
    (
        "an issue's other action",
        entry({"type": "issue", "action": ["opened"]}),
        ".on.action[0]",
        ("closed",),
    ),
    (
        "an issue rule with labels",
        entry({"type": "issue", "action": ["closed"], "any": ["a"]}),
        ".on.any",
        ("issue",),
    ),
    (
        "an issue rule on azure",
        entry({"type": "issue", "action": ["closed"]}, AZURE),
        ".on.type",
        ("azure",),
    ),
    # run
    ("no flow", entry(run={"kind": "github"}), ".run.flow", ("absent", "required")),
    ("an upper-case flow", run(flow="Fix"), ".run.flow", ('"Fix"', "a-z")),
    ("a flow with a newline", run(flow="fix\n"), ".run.flow", ('"fix\\n"', "a-z")),
    ("a flow that ends in a dash", run(flow="fix-"), ".run.flow", ("both ends",)),
    ("a flow too long", run(flow="a" * 65), ".run.flow", ("64",)),
    ("a flow that climbs", run(flow="../x"), ".run.flow", ("a-z",)),
    ("a flow that is null", run(flow=None), ".run.flow", ("null",)),
    ("replicas 1", run(replicas=1), ".run.replicas", ("1", *RANGE)),
    ("replicas 0", run(replicas=0), ".run.replicas", ("0", *RANGE)),
    ("replicas -2", run(replicas=-2), ".run.replicas", ("-2", *RANGE)),
    ("replicas 4", run(replicas=4), ".run.replicas", ("4", *RANGE)),
    ("replicas true", run(replicas=True), ".run.replicas", ("true", *RANGE)),
    ("replicas 2.0", run(replicas=2.0), ".run.replicas", ("2.0", *RANGE)),
    ("replicas as text", run(replicas="2"), ".run.replicas", ('"2"', *RANGE)),
    ("replicas null", run(replicas=None), ".run.replicas", ("null", *RANGE)),
    ("replicas in a list", run(replicas=[2]), ".run.replicas", ("[2]", *RANGE)),
    ("replicas beyond int64", run(replicas=10**30), ".run.replicas", RANGE),
    (
        "replicas and resume",
        run(replicas=2, resume=True),
        ".run.replicas",
        ("2", "resume", "one lineage"),
    ),
    (
        "wrong replicas and resume: the range first",
        run(replicas=4, resume=True),
        ".run.replicas",
        RANGE,
    ),
    ("replicas on local", here(replicas=2), ".run.replicas", OPERATOR),
    (
        "wrong replicas on local: the kind first",
        here(replicas="4", resume=True),
        ".run.replicas",
        OPERATOR,
    ),
    (
        "models without replicas",
        run(replicaModels=MODELS),
        ".run.replicaModels",
        ("run.replicas",),
    ),
    (
        "too few models",
        run(replicas=3, replicaModels=MODELS),
        ".run.replicaModels",
        ("exactly 3",),
    ),
    (
        "too many models",
        run(replicas=2, replicaModels=[*MODELS, "a/b"]),
        ".run.replicaModels",
        ("exactly 2",),
    ),
    (
        "a model without provider",
        run(replicas=2, replicaModels=["a/b", "claude"]),
        ".run.replicaModels[1]",
        ('"claude"', "provider/model"),
    ),
    ("models on local", here(replicaModels=MODELS), ".run.replicaModels", ("local",)),
    (
        "a model beside the replicas' models",
        run(replicas=2, replicaModels=MODELS, model="x"),
        ".run.model",
        ("does nothing",),
    ),
    ("an empty image", run(image=""), ".run.image", ('""', "image")),
    ("a spaced image", run(image=" a"), ".run.image", ('" a"', "spaces")),
    ("an image and a newline", run(image="a\n"), ".run.image", ("spaces",)),
    ("an image that is an option", run(image="--rm"), ".run.image", ("'-'",)),
    ("blank instructions", run(instructions=" \n"), ".run.instructions", ("blank",)),
    (
        "instructions too long",
        run(instructions="ü" * 2_001),
        ".run.instructions",
        ("2,000", "…"),
    ),
    (
        "instructions on local",
        here(instructions="a"),
        ".run.instructions",
        ("local", "run.task"),
    ),
    ("resume as text", run(resume="yes"), ".run.resume", ('"yes"', "true or false")),
    ("resume 1", run(resume=1), ".run.resume", ("1", "true or false")),
    ("resume on cron", here(resume=True), ".run.resume", ("cron",)),
    ("publish to nobody", run(publish="box"), ".run.publish", ("host", "agent")),
    ("publish on local", here(publish="host"), ".run.publish", ("local",)),
    ("a repository elsewhere", run(repository="x"), ".run.repository", ("azure",)),
    ("azure labels, no repository", entry(run=AZURE), ".run.repository", ("required",)),
    (
        "azure comments, no repository",
        entry(COMMENT, AZURE),
        ".run.repository",
        ("absent", "required"),
    ),
    (
        "a repository on azure's requests",
        entry(request("created"), SHOP),
        ".run.repository",
        ("label and comment",),
    ),
    (
        "a repository path",
        entry(run=AZURE | {"repository": "a/b"}),
        ".run.repository",
        ("'/'",),
    ),
    (
        "a repository that climbs",
        entry(run=AZURE | {"repository": ".."}),
        ".run.repository",
        ('".."',),
    ),
    (
        "a spaced repository",
        entry(run=AZURE | {"repository": "a "}),
        ".run.repository",
        ('"a "', "spaces"),
    ),
    ("no folder", entry(CRON, {"kind": "local"}), ".run.folder", ("required",)),
    ("no task", entry(CRON, {"kind": "local"}), ".run.task", ("required",)),
    ("an empty task", here(task=""), ".run.task", ('""', "what to do")),
    ("a blank task", here(task="\n"), ".run.task", ("what to do",)),
    ("a folder on a forge", run(folder="/x"), ".run.folder", ("local", "github")),
    ("a task on a forge", run(task="x"), ".run.task", ("local", "github")),
    ("allowDirty on a forge", run(allowDirty=False), ".run.allowDirty", ("local",)),
    ("allowDirty 1", here(allowDirty=1), ".run.allowDirty", ("1", "true or false")),
    ("a relative folder", entry(CRON, local("x")), ".run.folder", ("absolute",)),
    ("a home folder", entry(CRON, local("~/x")), ".run.folder", ("absolute",)),
    ("no such folder", here(), ".run.folder", ("/nowhere", "directory")),
    ("no work tree", entry(CRON, local("/")), ".run.folder", ("git work tree",)),
    ("a folder with NUL", entry(CRON, local("/a\0")), ".run.folder", ("\\u0000",)),
    (
        "an over-long folder",
        entry(CRON, local("/" + "a" * 9_999)),
        ".run.folder",
        ("…",),
    ),
    ("a spaced provider", run(provider="a b"), ".run.provider", ("provider's name",)),
    ("an empty model", run(model=""), ".run.model", ("model's name",)),
    ("maxTurns 0", run(maxTurns=0), ".run.maxTurns", ("0", "1 or more")),
    ("maxTurns true", run(maxTurns=True), ".run.maxTurns", ("true", "1 or more")),
    ("maxTokens 1.5", run(maxTokens=1.5), ".run.maxTokens", ("1.5", "whole")),
    ("maxTokens beyond int64", run(maxTokens=10**30), ".run.maxTokens", ("whole",)),
    ("no tools excluded", run(excludeTools=[]), ".run.excludeTools", ("non-empty",)),
    ("a tool twice", run(excludeTools=["ls", "ls"]), ".run.excludeTools", ("twice",)),
    ("an unknown tool", run(excludeTools=["rm"]), ".run.excludeTools[0]", ("bash",)),
    ("a tool in text", run(excludeTools="bash"), ".run.excludeTools", ("array",)),
    ("forkJoin null", run(forkJoin=None), ".run.forkJoin", ("null", "true or false")),
)


@pytest.mark.parametrize(
    ("wrong", "path", "words"),
    [row[1:] for row in REFUSED],
    ids=[row[0] for row in REFUSED],
)
def test_a_wrong_rule_is_refused_with_path_value_and_reason(
    wrong: Any, path: str, words: tuple[str, ...]
) -> None:
    faults = faults_of(written(entry(), entry(), entry(), wrong))
    ours = [fault for fault in faults if fault.startswith(f"triggers[3]{path}: ")]
    assert len(ours) == 1, faults
    for word in words:
        assert word in ours[0]


FOREIGN = (
    *("backend", "command", "disarmed", "github", "maxCostUsd", "models", "noTools"),
    *("once", "packages", "secrets", "secretsProfile", "skillsDir", "tools", "waitFor"),
)


@pytest.mark.parametrize("field", FOREIGN)
@pytest.mark.parametrize("place", ["on", "run"])
def test_a_field_of_the_source_system_is_named_as_such(field: str, place: str) -> None:
    wrong = entry()
    wrong[place] = wrong[place] | {field: True}
    (fault,) = faults_of(written(wrong))
    assert fault.startswith(
        f"triggers[0].{place}.{field}: true is the field {field} of"
    )
    assert "source system" in fault and "does not have" in fault


def test_another_spelling_of_a_foreign_field_is_recognised() -> None:
    (fault,) = faults_of(written(run(wait_for=[])))
    assert "is the field waitFor of the source system" in fault


def test_all_faults_of_a_file_are_reported_in_one_pass() -> None:
    faults = faults_of(
        written(
            run(replicas=4, flow="Bad", zzz=1),
            entry(),
            entry({"type": "label", "any": ["", 1]}, {"kind": "github"}),
            extra=1,
        )
    )
    assert [fault.partition(": ")[0] for fault in faults] == [
        "extra",
        "triggers[0].run.zzz",
        "triggers[0].run.flow",
        "triggers[0].run.replicas",
        "triggers[2].on.any[0]",
        "triggers[2].on.any[1]",
        "triggers[2].run.flow",
    ]


def test_the_message_names_the_file_before_every_fault() -> None:
    with pytest.raises(Faults) as caught:
        loaded(run(replicas=1, flow="Bad"))
    lines = caught.value.message.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("triggers.json: triggers[0].run.") for line in lines)


def test_a_second_comment_rule_of_a_forge_is_refused() -> None:
    (fault,) = faults_of(written(entry(COMMENT), entry(), entry(COMMENT)))
    assert fault.startswith('triggers[2].on.phrase: "@pi" ')
    assert "github" in fault and "triggers[0]" in fault


def test_a_second_cron_rule_of_one_id_is_refused(folder: Path) -> None:
    twice = [entry(CRON, local(folder))] * 2
    (fault,) = faults_of(written(*twice))
    assert fault.startswith('triggers[1].on.id: "nightly" ')
    assert "triggers[0]" in fault


def test_a_folder_below_the_top_of_a_work_tree_is_refused(folder: Path) -> None:
    (folder / "src").mkdir()
    (fault,) = faults_of(written(entry(CRON, local(folder / "src"))))
    assert "top of a git work tree" in fault


def test_replicas_max_is_a_literal_that_no_setting_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PI_CONCURRENCY", "9")
    assert REPLICAS_MAX == 3
    assert "2 to 3" in faults_of(written(run(replicas=4)))[0]


# -- the file as a whole ------------------------------------------------------

FILE = (
    '{"triggers":[{"on":{"type":"label","any":["a"]},'
    '"run":{"kind":"github","flow":"a"%s}}]}'
)
AFTER = FILE.index("%s") + 1

#: (what is wrong, the text, the beginning of its one fault, words of it)
BROKEN: tuple[tuple[str, str | bytes, str, tuple[str, ...]], ...] = (
    ("nothing", "", "line 1, column 1: ", ("not JSON",)),
    ("a lone comma", '{\n  "triggers": [,]}', "line 2, column 16: ", ("not JSON",)),
    ("more behind it", "{}\n{}", "line 2, column 1: ", ("Extra data",)),
    ("a cut file", '{"triggers": [\n', "line 2, column 1: ", ("not JSON",)),
    ("a comment", "// x\n{}", "line 1, column 1: ", ("not JSON",)),
    ("latin-1", '{"ä": 1}'.encode("latin-1"), "line 1, column 3: ", ("UTF-8",)),
    ("a stray byte", '{"ü":\n"é'.encode() + b"\xe9", "line 2, column 3: ", ("UTF-8",)),
    ("UTF-16", "{}".encode("utf-16"), "line 1, column 1: ", ("UTF-8",)),
    ("two marks", b"\xef\xbb\xbf" * 2 + b"{}", "line 1, column 1: ", ("not JSON",)),
    ("deep arrays", '{"triggers":' + "[" * 100_000, "line 1, column 76: ", ("nested",)),
    ("deep objects", '{"a":' * 9_999, "line 1, column 321: ", ("nested",)),
    (
        "a duplicate key",
        FILE % ',\n "flow":"b"',
        'line 2, column 2: triggers[0].run.flow: duplicate key "flow"',
        ("line 1, column 72", "keep one"),
    ),
    (
        "a duplicate that is escaped",
        FILE % ',"\\u0066low":"b"',
        f'line 1, column {AFTER + 1}: triggers[0].run.flow: duplicate key "flow"',
        (),
    ),
    (
        "a duplicate at the top",
        '{"triggers":[],\n"triggers":[]}',
        'line 2, column 1: triggers: duplicate key "triggers"',
        (),
    ),
    (
        "NaN",
        FILE % ',"maxTurns":NaN',
        f"line 1, column {AFTER + 12}: triggers[0].run.maxTurns: NaN is not",
        (),
    ),
    (
        "-Infinity in a list",
        FILE % ',"excludeTools":["ls",-Infinity]',
        f"line 1, column {AFTER + 22}: triggers[0].run.excludeTools[1]: -Infinity",
        ("finite",),
    ),
    (
        "1e999",
        FILE % ',"maxTokens":1e999',
        f"line 1, column {AFTER + 13}: triggers[0].run.maxTokens: 1e999 is not",
        (),
    ),
    (
        "half a pair",
        FILE % ',"model":"\\ud83d"',
        f"line 1, column {AFTER + 9}: triggers[0].run.model: ",
        ("surrogate",),
    ),
    ("an array", "[]", "the file: [] must be an object", ("triggers",)),
    ("null", "null", "the file: null must be an object", ()),
    ("no triggers", "{}", "triggers: (absent) must be an array", ()),
    ("triggers as object", '{"triggers":{}}', "triggers: {} must be an array", ()),
    ("a near key", '{"triggers":[],"$shema":""}', '$shema: "" is not', ("$schema?",)),
    ("a schema 1", '{"triggers":[],"$schema":1}', "$schema: 1 must be a string", ()),
)


@pytest.mark.parametrize(
    ("text", "start", "words"), [r[1:] for r in BROKEN], ids=[r[0] for r in BROKEN]
)
def test_a_broken_file_is_refused_with_line_and_column(
    text: str | bytes, start: str, words: tuple[str, ...]
) -> None:
    faults = faults_of(text)
    assert len(faults) == 1, faults
    assert faults[0].startswith(start), faults
    for word in words:
        assert word in faults[0]


def test_every_duplicate_and_every_other_fault_is_reported_together() -> None:
    faults = faults_of(FILE % ',"flow":"b","kind":"github","replicas":4')
    assert [fault.split(": ")[1] for fault in faults[:2]] == [
        "triggers[0].run.flow",
        "triggers[0].run.kind",
    ]
    assert faults[2].startswith("triggers[0].run.replicas: 4 ") and len(faults) == 3


def test_digits_without_end_are_a_fault_and_not_a_traceback() -> None:
    (fault,) = faults_of(FILE % f',"maxTokens":{"9" * 100_000}')
    assert fault.startswith("triggers[0].run.maxTokens: 999") and len(fault) < 300


def test_a_fault_shows_control_characters_escaped() -> None:
    (fault,) = faults_of(written(run(image="a\x1b[31m\u202eb ")))
    assert "\\u001b[31m\\u202e" in fault and fault.isprintable()


def test_a_file_that_is_absent_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(Faults) as caught:
        read_triggers(tmp_path / "none.json")
    assert str(tmp_path / "none.json") in caught.value.message
    assert "No such file" in caught.value.message


def test_a_directory_in_place_of_the_file_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(Faults, match="cannot be read"):
        read_triggers(tmp_path)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "triggers.json"
    path.write_bytes(written(entry()))
    assert read_triggers(path) == loaded(entry())


# -- the schema ---------------------------------------------------------------


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = triggers_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", VALID)
def test_the_schema_takes_every_right_rule(
    validator: jsonschema.Draft202012Validator, name: str
) -> None:
    validator.validate({"$schema": "x", "triggers": [VALID[name]]})


def test_the_schema_takes_a_cron_rule(
    validator: jsonschema.Draft202012Validator, folder: Path
) -> None:
    when = CRON | {"tz": "UTC"}
    validator.validate({"triggers": [entry(when, local(folder, allowDirty=False))]})


@pytest.mark.parametrize(
    "wrong", [run(replicas=4), run(zzz=1), on(match="x"), entry(extra=1), {"on": LABEL}]
)
def test_the_schema_refuses_what_an_editor_can_know(
    validator: jsonschema.Draft202012Validator, wrong: Any
) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({"triggers": [wrong]})


def test_rows_models_and_schema_name_the_same_fields() -> None:
    items = triggers_schema()["properties"]["triggers"]["items"]["properties"]
    assert tuple(items["on"]["properties"]) == On.__struct_fields__
    assert tuple(items["run"]["properties"]) == Run.__struct_fields__


def test_the_schema_is_json_and_says_what_each_field_is() -> None:
    items = json.loads(json.dumps(triggers_schema()))["properties"]["triggers"]["items"]
    for part in items["properties"].values():
        assert all(field["description"] for field in part["properties"].values())


# -- properties ---------------------------------------------------------------

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

names = st.text(min_size=1, max_size=8).filter(str.strip)
flows = st.from_regex(r"[a-z0-9]([a-z0-9_-]{0,5}[a-z0-9])?", fullmatch=True)
counts = st.integers(1, 2**53)
options = st.fixed_dictionaries(
    {},
    optional={
        "replicas": st.integers(2, REPLICAS_MAX),
        "instructions": names,
        "publish": st.sampled_from(["host", "agent"]),
        "maxTurns": counts,
        "maxTokens": counts,
        "excludeTools": st.lists(st.sampled_from(TOOLS), min_size=1, unique=True),
        "forkJoin": st.booleans(),
    },
)


@st.composite
def valid_entries(draw: st.DrawFn) -> dict[str, Any]:
    row = FORGES[draw(st.sampled_from(sorted(FORGES)))]
    types = ["label", "pull_request"] + ["issue", "close"] * bool(row.close_word)
    kind = draw(st.sampled_from(types))
    labels = st.lists(names, min_size=1, max_size=3)
    selector = {draw(st.sampled_from(["any", "all"])): draw(labels)}
    started = {"kind": row.kind, "flow": draw(flows)} | draw(options)
    if kind == "label":
        shop = {"repository": "shop"} if row.kind == "azure" else {}
        return entry({"type": "label"} | selector, started | shop)
    if kind == "pull_request":
        words = [word for word in row.pr_actions if word != row.close_word]
        actions = draw(st.lists(st.sampled_from(words), min_size=1, unique=True))
        return entry(
            request(*actions) | ({} if row.kind == "azure" else selector), started
        )
    closes = {"action": [row.close_word], "number": draw(counts)}
    name = "issue" if kind == "issue" else "pull_request"
    return entry({"type": name} | closes, started)


def dumped(rules: tuple[Rule, ...]) -> bytes:
    return msgspec.json.encode(
        {"triggers": [{"on": rule.on, "run": rule.run} for rule in rules]}
    )


@patient
@given(st.lists(valid_entries(), max_size=4))
def test_a_valid_file_survives_being_written_out_again(entries: list[Any]) -> None:
    text = written(*entries)
    rules = load_triggers(text, SOURCE)
    jsonschema.validate(json.loads(text), triggers_schema())
    assert load_triggers(dumped(rules), SOURCE) == rules
    assert [json.loads(msgspec.json.encode(rule.run)) for rule in rules] == [
        made["run"] for made in entries
    ]


def loads_or_faults(text: bytes) -> None:
    try:
        load_triggers(text, SOURCE)
    except Faults as caught:
        assert caught.faults
        assert all(fault.isprintable() for fault in caught.faults)


@patient
@given(st.binary(max_size=200))
@example(b'{"triggers":[{"on":{"type":"cron","pattern":"\\u0000"}}]}')
@example(b'{"a":"\\ud800","\\ud800":1}')
def test_any_bytes_load_or_are_faults(text: bytes) -> None:
    loads_or_faults(text)


keys = st.sampled_from(
    [*On.__struct_fields__, *Run.__struct_fields__, *FOREIGN, "on", "run", "x", ""]
)
words = st.sampled_from(
    [
        *("local", "cron", "label", "comment", "pull_request", "issue", "closed"),
        *("opened", "labeled", "* * * * *", "UTC", "/", "\x00"),
        *FORGES,
        *REVIEW_STATES,
        *TOOLS,
    ]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | words,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=8,
)


def likely(fields: tuple[str, ...], governor: str) -> st.SearchStrategy[dict[str, Any]]:
    optional = {name: words | values for name in fields if name != governor}
    return st.fixed_dictionaries({governor: words | values}, optional=optional)


near = st.fixed_dictionaries(
    {
        "on": likely(On.__struct_fields__, "type"),
        "run": likely(Run.__struct_fields__, "kind"),
    }
)


@patient
@given(st.lists(near, max_size=2))
def test_any_values_in_known_fields_load_or_are_faults(entries: list[Any]) -> None:
    loads_or_faults(written(*entries))


@patient
@given(values)
def test_any_json_loads_or_is_faults(value: Any) -> None:
    loads_or_faults(json.dumps(value).encode())


@patient
@given(st.text(alphabet=' {}[]:,"\\au0e1.-\n', max_size=60))
def test_any_scrap_of_json_loads_or_is_faults(text: str) -> None:
    loads_or_faults(text.encode())


@patient
@given(st.integers() | st.floats() | st.text() | st.none() | st.booleans())
@example(2)
@example(3)
def test_only_two_and_three_are_replicas(value: Any) -> None:
    text = written(run(replicas=value))
    if type(value) is int and value in (2, 3):
        assert load_triggers(text, SOURCE)[0].run.replicas == value
    else:
        assert any("run.replicas" in fault for fault in faults_of(text))


def test_importing_the_module_loads_no_heavy_library() -> None:
    heavy = ("markdown_it", "cronsim", "difflib", "docker", "jinja2")
    code = f"import pidispatch, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(pidispatch.__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
