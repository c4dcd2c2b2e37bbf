"""Section cli: every command by its real entry, its exit code and its words."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import click
import pytest
from click.testing import CliRunner, Result
from conftest import PAYLOADS, ROOT, Maker
from jsonschema import Draft202012Validator

import pidispatch
import pidispatch_demo as demo
import verify_image

RULES: list[dict[str, Any]] = [
    {
        "on": {"type": "label", "any": ["pi:urgent"]},
        "run": {"kind": "github", "flow": "fix-issue", "replicas": 2},
    }
]
NO_ENGINE = "unix:///nonexistent/docker.sock"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, no data of the user's, and no engine."""
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("DOCKER_HOST", NO_ENGINE)
    (place / "triggers.json").write_text(json.dumps({"triggers": RULES}))
    return place


def cli(*arguments: str, **environ: str) -> Result:
    """One command in this process; a traceback fails the test."""
    result = CliRunner().invoke(
        pidispatch.main, arguments, env=environ, catch_exceptions=False
    )
    assert "\x1b" not in result.output, "no colour when it is no terminal"
    return result


def printed(command: str, *arguments: str, **environ: str) -> Any:
    """The JSON a command prints, which its schema allows."""
    result = cli(*command.split(), *arguments, "--json", **environ)
    value = json.loads(result.stdout)
    Draft202012Validator(pidispatch.output_schema(command)).validate(value)
    return value


@pytest.fixture
def queue(store: pidispatch.Store, maker: Maker) -> str:
    """The path of a database with some history."""
    maker.history(store)
    return str(store.path)


def commands(group: click.Group = pidispatch.main, *path: str) -> Iterator[list[str]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield [*path, name]


# -- help ---------------------------------------------------------------------


@pytest.mark.parametrize("path", [*commands()], ids=" ".join)
def test_every_command_explains_itself_and_each_of_its_options(path: list[str]) -> None:
    result = cli(*path, "--help")
    assert result.exit_code == 0
    command: Any = pidispatch.main
    for name in path:
        command = command.commands[name]
    options = [p for p in command.params if isinstance(p, click.Option)]
    assert all(option.help for option in options)
    assert command.help and len(result.output.splitlines()) > 4


def test_the_list_of_commands_fits_its_lines() -> None:
    result = cli("--help")
    assert result.exit_code == 0
    assert "..." not in result.output.partition("Commands:")[2]
    assert pidispatch.__version__ in cli("--version").output


# -- a user's mistakes --------------------------------------------------------


@pytest.fixture
def clutter(folder: Path) -> Path:
    """Files that are not what a command wants."""
    (folder / "dir").mkdir()
    (folder / "garbage").write_bytes(bytes(range(256)) * 8)
    (folder / "bad.json").write_text('{"triggers": [')
    (folder / "wrong.json").write_text('{"triggers": [{"on": {}, "run": {"x": 1}}]}')
    (folder / "empty").write_text("")
    (folder / "ok.json").write_text('{"action": "labeled"}')
    locked = folder / "locked"
    locked.write_text("{}")
    locked.chmod(0)
    if os.access(locked, os.R_OK):  # root reads everything but this
        locked.unlink()
        locked.symlink_to("/proc/self/mem")
    return folder


MISTAKES: list[tuple[str, dict[str, str], int, str]] = [
    ("nonsense", {}, 2, "No such command"),
    ("runs --nonsense", {}, 2, "No such option"),
    ("triggers", {}, 2, "Usage"),
    # rules that cannot be read
    ("triggers check missing.json", {}, 2, "missing.json: cannot be read"),
    ("triggers check dir", {}, 2, "dir: cannot be read"),
    ("triggers check locked", {}, 2, "locked: cannot be read"),
    ("triggers check garbage", {}, 2, "not UTF-8"),
    ("triggers check bad.json", {}, 2, "bad.json: line 1, column 15"),
    ("triggers check empty", {}, 2, "empty: line 1"),
    ("triggers check wrong.json", {}, 2, "triggers[0].run.x"),
    ("triggers list missing.json", {}, 2, "init"),
    ("triggers list", {"PI_TRIGGERS_FILE": "wrong.json"}, 2, "triggers[0].on"),
    ("triggers show 1", {}, 2, "it has 1, counted from 0"),
    ("triggers show -- -1", {}, 2, "counted from 0"),
    ("triggers show first", {}, 2, "not a valid integer"),
    # deliveries that cannot be judged
    ("triggers try github missing", {}, 2, "missing: No such file"),
    ("triggers try github dir", {}, 2, "dir: Is a directory"),
    ("triggers try github locked", {}, 2, "locked: "),
    ("triggers try github garbage", {}, 2, "not the JSON we expect"),
    ("triggers try github empty", {}, 2, "not the JSON we expect"),
    ("triggers try github ok.json missing.json", {}, 2, "cannot be read"),
    ("triggers try github ok.json --header nocolon", {}, 2, "is no header"),
    ("triggers try github ok.json --header :x", {}, 2, "is no header"),
    ("triggers try github ok.json --secret s", {}, 2, "X-Hub-Signature-256"),
    ("triggers try svn ok.json", {}, 2, "is not one of"),
    # a database that is not there, or is none
    ("runs", {}, 2, "start `pidispatch serve` once"),
    ("runs --db dir", {}, 2, "cannot be read"),
    ("runs --db garbage", {}, 2, "not a database"),
    ("runs --db empty", {}, 2, "no such table"),
    ("runs --limit 0", {}, 2, "0 is not in the range"),
    ("show gh-x --db missing.db", {}, 2, "cannot be read"),
    ("logs gh-x", {}, 2, "cannot be read"),
    ("status --db garbage", {}, 2, "not a database"),
    ("pause --db missing.db", {}, 2, "cannot be read"),
    ("resume --db dir", {}, 2, "cannot be read"),
    ("cancel gh-x --db garbage", {}, 2, "not a database"),
    ("publish gh-x", {}, 2, "cannot be read"),
    ("publish", {}, 2, "Missing argument"),
    # settings
    ("status", {"PI_CONCURRENCY": "x", "PI_PORT": "65536"}, 2, 'PI_PORT="65536"'),
    ("runs", {"PI_NETWORK_POOL": "10.0.0.0/28"}, 2, "two /28 or more"),
    ("runs", {"PI_TIMEZONE": "../etc"}, 2, "IANA"),
    ("runs", {"PI_PROVIDERS_FILE": "garbage"}, 2, "PI_PROVIDERS_FILE"),
    ("serve", {"GITHUB_PAT": ""}, 2, "remove the variable"),
    # a service that cannot start
    ("serve --triggers missing.json", {}, 2, "cannot be read"),
    ("serve", {}, 2, "set WEBHOOK_SECRET"),
    ("serve --db dir", {"WEBHOOK_SECRET": "s"}, 2, "cannot be opened"),
    ("serve --db garbage", {"WEBHOOK_SECRET": "s"}, 2, "cannot be opened"),
    ("serve", {"WEBHOOK_SECRET": "s", "PI_BIND": "192.0.2.1"}, 2, "cannot listen"),
    (
        "serve",
        {"WEBHOOK_SECRET": "s", "PI_PORT": "0", "PI_PANEL_BIND": "0.0.0.0"},
        2,
        "set PANEL_TOKEN",
    ),
    # the engine
    ("verify-image pi-job", {}, 1, "start the Docker Engine"),
    ("verify-image pi-job", {"DOCKER_HOST": "tcp://h:99999"}, 1, "DOCKER_HOST"),
    ("verify-image", {}, 2, "Missing argument"),
    ("build-image", {}, 1, "start the Docker Engine"),
    ("build-image --ca missing", {}, 2, "does not exist"),
    ("build-image --ca dir", {}, 2, "is a directory"),
    # folders
    ("init empty", {}, 2, "name a folder"),
    ("init empty/sub", {}, 2, "name a folder"),
]


@pytest.mark.usefixtures("clutter")
@pytest.mark.parametrize(
    ("line", "environ", "code", "words"), MISTAKES, ids=[m[0] for m in MISTAKES]
)
def test_a_mistake_is_a_line_and_a_fix_never_a_traceback(
    line: str, environ: dict[str, str], code: int, words: str
) -> None:
    result = cli(*line.split(), **environ)
    assert result.exit_code == code
    assert words in result.output
    assert result.stdout == "", "what is wrong goes to stderr"
    told = result.output
    assert "  fix: " in told or "Usage: " in told
    assert len(told.splitlines()) <= 6 or "Commands:" in told


def test_every_wrong_setting_is_named_at_once_on_a_line_of_its_own() -> None:
    result = cli("status", PI_CONCURRENCY="x", PI_DAILY_CAP="0")
    assert re.findall(r"^pidispatch: settings: (\w+)=", result.stderr, re.M) == [
        "PI_CONCURRENCY",
        "PI_DAILY_CAP",
    ]


def test_a_dotenv_that_is_no_text_is_a_wrong_setting(folder: Path) -> None:
    (folder / ".env").write_bytes(b"PI_PORT=\xff\xfe")
    result = cli("status")
    assert result.exit_code == 2
    assert ".env cannot be read" in result.output


def test_serve_without_an_engine_says_so_and_takes_deliveries_meanwhile(
    folder: Path,
) -> None:
    environ = {
        "DOCKER_HOST": NO_ENGINE,
        "WEBHOOK_SECRET": "s",
        "PI_PORT": "0",
        "PI_PANEL_PORT": "0",
        "XDG_DATA_HOME": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    program = (sys.executable, "-c", "import pidispatch; pidispatch.main()", "serve")
    with subprocess.Popen(
        program, env=environ, cwd=folder, stderr=subprocess.PIPE, text=True
    ) as serve:
        assert serve.stderr
        told = next(line for line in serve.stderr if "not-reconciled" in line)
        assert "start the Docker Engine" in told
        assert serve.poll() is None
        serve.terminate()
        assert "Traceback" not in serve.stderr.read()
    assert serve.returncode == 0


def test_a_port_in_use_is_named(folder: Path) -> None:
    with contextlib.closing(_listener()) as taken:
        port = str(taken.getsockname()[1])
        environ = {"WEBHOOK_SECRET": "s", "PI_BIND": "127.0.0.1", "PI_PORT": port}
        result = cli("serve", **environ)
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}: " in result.output


def _listener() -> Any:
    import socket

    return socket.create_server(("127.0.0.1", 0))


def test_a_damaged_database_is_said_and_not_a_traceback(queue: str) -> None:
    import sqlite3

    with contextlib.closing(sqlite3.connect(queue)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path = Path(queue)
    size = path.stat().st_size
    with path.open("r+b") as file:
        for page in range(4096, size, 4096):
            file.seek(page)
            file.write(b"\xff" * 512)
    for command in (["runs"], ["show", "gh-set-r1"], ["status"]):
        result = cli(*command, "--db", queue)
        assert result.exit_code in (1, 2), command
        assert "malformed" in result.output
    assert any(
        check["name"] == "store" and check["state"] == "fail"
        for check in printed("doctor", "--db", queue)
    )


# -- the process itself -------------------------------------------------------


def process(*arguments: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """The module run as a program, as a person without an install does."""
    argv = [sys.executable, str(ROOT / "pidispatch.py"), *arguments]
    return subprocess.run(argv, capture_output=True, env={**os.environ, **environ})


def test_the_program_tells_mistakes_on_stderr_and_by_its_exit_code() -> None:
    done = process("verify-image", "pi-job")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"pidispatch: no Docker Engine answers")
    assert b"Traceback" not in done.stderr


def test_a_terminal_without_our_marks_still_gets_the_words() -> None:
    done = process("doctor", PYTHONIOENCODING="latin-1", NO_COLOR="1")
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert rb"\u2717 engine: no Docker Engine answers" in done.stdout
    assert b"\x1b" not in done.stdout


def test_verify_image_alone_says_how_it_is_used(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert verify_image.main([]) == 2
    assert verify_image.main(["--help"]) == 2
    assert verify_image.main(["pi-job"]) == 1
    assert "usage: verify_image.py TAG" in capsys.readouterr().err


def test_serve_answers_says_what_it_cannot_do_and_ends_on_a_signal(
    folder: Path,
) -> None:
    """T37 aside: SIGTERM is a clean end, not a failure for a service manager."""
    environ = {
        "WEBHOOK_SECRET": "canary-secret",
        "PI_BIND": "127.0.0.1",
        "PI_PORT": "0",
        "PI_PANEL_PORT": "0",
    }
    (folder / ".git").mkdir()
    (folder / ".git/HEAD").write_text("ref: refs/heads/main\n")
    rule = {
        "on": {"type": "cron", "id": "n", "pattern": "0 3 * * *"},
        "run": {"kind": "local", "flow": "task", "folder": str(folder), "task": "x"},
    }
    (folder / "triggers.json").write_text(json.dumps({"triggers": [rule]}))
    argv = [sys.executable, str(ROOT / "pidispatch.py"), "serve", "--no-worker"]
    with subprocess.Popen(
        argv, stderr=subprocess.PIPE, env={**os.environ, **environ}, text=True
    ) as serving:
        assert serving.stderr
        told = []
        for line in serving.stderr:
            told.append(line)
            if line.startswith("listening on "):
                break
        port = told[-1].strip().rpartition(":")[2]
        url = f"http://127.0.0.1:{port}/healthz"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.status == 200
        serving.send_signal(signal.SIGTERM)
        told += serving.stderr.readlines()
        assert serving.wait(20) == 0, told
    events = [json.loads(line) for line in told if line.startswith("{")]
    off = [event for event in events if event["event"] == "cron-off"]
    assert [event["what"] for event in off] == ["cron rules fire in the worker"]
    assert "canary-secret" not in "".join(told)


# -- init ---------------------------------------------------------------------


def test_init_writes_what_the_loader_and_the_schema_accept(folder: Path) -> None:
    result = cli("init", "new/place")
    place = folder / "new/place"
    assert result.exit_code == 0
    assert "next, in new/place:" in result.output
    assert (place / ".env").stat().st_mode & 0o777 == 0o600
    rules = json.loads((place / "triggers.json").read_text())
    schema = json.loads((place / "triggers.schema.json").read_text())
    assert schema == json.loads(cli("triggers", "schema").output)
    assert rules["$schema"] == "./triggers.schema.json"
    Draft202012Validator(schema).validate(rules)
    assert cli("triggers", "check", str(place / "triggers.json")).exit_code == 0
    secret = pidispatch.load_settings({}, place / ".env").webhook_secret
    assert [len(part) for part in secret] == [64]
    limits = json.loads((place / "limits.json").read_text())
    schema = json.loads((place / "limits.schema.json").read_text())
    assert schema == json.loads(cli("limits", "schema").output)
    assert limits["$schema"] == "./limits.schema.json"
    Draft202012Validator(schema).validate(limits)
    checked = cli("limits", "check", str(place / "limits.json"))
    assert checked.output.endswith("limits.json: 0 scopes, 0 pause windows, no fault\n")


@pytest.mark.parametrize("forge", pidispatch.FORGES)
def test_init_for_a_forge_needs_its_blanks_filled_and_nothing_else(
    forge: str, folder: Path
) -> None:
    result = cli("init", "place", "--forge", forge)
    assert result.exit_code == 0
    assert f"https://<your host>/{forge}" in result.output
    place = folder / "place"
    assert cli("triggers", "check", str(place / "triggers.json")).exit_code == 0
    text = (place / ".env").read_text()
    pidispatch.load_settings({}, place / ".env")  # as it is, it is no fault
    blanks = re.findall(r"^#([A-Z_]+)=", text, re.M)
    blanks.remove("ANTHROPIC_API_KEY")
    for name in blanks:
        assert name in result.output, "the steps name every blank"
    text = re.sub(
        r"^#([A-Z_]+_URL)=$", r"\1=https://forge.example.org", text, flags=re.M
    )
    text = re.sub(r"^#([A-Z_]+)=$", r"\1=filled-in", text, flags=re.M)
    text = re.sub(r"^#([A-Z_]+=.)", r"\1", text, flags=re.M)
    (place / ".env").write_text(text)
    settings = pidispatch.load_settings({}, place / ".env")
    assert settings.keys == {"anthropic": "filled-in"}
    assert list(pidispatch.forges_of(settings)) == [forge]
    pidispatch.TriggersFile(place / "triggers.json", [forge], settings.providers)


def test_limits_check_names_every_fault_and_exits_two(folder: Path) -> None:
    (folder / "limits.json").write_text('{"scopes": [{"scope": "x", "dya": 1}]}')
    result = cli("limits", "check")
    assert result.exit_code == 2
    for words in ("pauseWindows: (absent)", "scopes[0].scope", "did you mean day?"):
        assert words in result.output


def test_init_never_overwrites_and_never_follows_a_link(folder: Path) -> None:
    (folder / "triggers.json").write_text("mine")
    (folder / "limits.json").symlink_to(folder / "elsewhere")
    assert cli("init").exit_code == 0
    before = (folder / ".env").read_text()
    result = cli("init")
    assert result.output.count("kept ") == 5
    assert (folder / ".env").read_text() == before
    assert (folder / "triggers.json").read_text() == "mine"
    assert not (folder / "elsewhere").exists()


# -- triggers -----------------------------------------------------------------


def test_triggers_list_marks_a_replicated_rule() -> None:
    assert re.search(r"fix-issue +\[x2\]$", cli("triggers", "list").output, re.M)
    (only,) = printed("triggers list")
    assert only == {"index": 0, **RULES[0]}


def test_triggers_show_prints_one_rule() -> None:
    assert "[x2] each delivery makes 2 jobs" in cli("triggers", "show", "0").output
    assert printed("triggers show", "0") == {"index": 0, **RULES[0]}


def test_triggers_check_counts_the_rules() -> None:
    result = cli("triggers", "check")
    assert (result.exit_code, result.output) == (
        0,
        "triggers.json: 1 rules, no fault\n",
    )


def test_texts_of_a_rule_and_of_its_faults_are_inert(folder: Path) -> None:
    """ANSI, bidi and line breaks from a file cannot act on a terminal."""
    nasty = "\u202epi\x1b[2J\x9b1m\n"
    entry = {"on": {"type": "label", "any": [nasty]}, "run": RULES[0]["run"]}
    path = folder / "triggers.json"
    path.write_text(json.dumps({"triggers": [entry]}))
    for line in ("triggers list", "triggers show 0", "triggers list --json"):
        result = cli(*line.split())
        assert result.exit_code == 0
        assert not set("\x1b\x9b\u202e") & set(result.output)
    entry["on"]["any"] = [nasty, nasty]
    entry["run"] = {**RULES[0]["run"], nasty: nasty}
    path.write_text(json.dumps({"triggers": [entry]}))
    result = cli("triggers", "check")
    assert result.exit_code == 2
    assert not set("\x1b\x9b\u202e") & set(result.output)


def delivery(folder: Path, **changes: Any) -> str:
    """A stored `labeled` delivery of a fictional repository."""
    body = {
        "action": "labeled",
        "label": {"name": "pi:urgent"},
        "issue": {"number": 7, "labels": [], "user": {"id": 5, "login": "a"}},
        "repository": {"id": 1, "full_name": "octo/spoon"},
        "sender": {"id": 42, "login": "octocat"},
        **changes,
    }
    path = folder / "issues.labeled.json"
    path.write_text(json.dumps(body))
    return str(path)


def test_triggers_try_tells_the_whole_set_with_every_name(folder: Path) -> None:
    path = delivery(folder)
    trial = printed("triggers try", "github", path, "--header", "X-GitHub-Delivery: g")
    jobs = trial.pop("jobs")
    assert trial == {
        "event": "issues.labeled",
        "delivery": "g",
        "repo": "octo/spoon",
        "target": {"type": "issue", "number": 7},
        "actor": "42",
        "authority": "payload",
        "rule": 0,
        "reason": None,
    }
    assert jobs == [
        {
            "id": f"gh-g-r{i}",
            "dedup": f"octo/spoon#7:fix-issue:r{i}",
            "branch": f"pi/issue-7-r{i}",
            "container": f"pi-job-gh-g-r{i}",
            "replica": i,
            "replicas": 2,
            "title_marker": f"[r{i}/2] ",
        }
        for i in (1, 2)
    ]
    text = cli("triggers", "try", "github", path).output
    assert "gh-dry-run-r2: branch pi/issue-7-r2, title begins '[r2/2] '" in text


def test_triggers_try_says_why_a_delivery_starts_nothing(folder: Path) -> None:
    other = delivery(folder, label={"name": "bug"})
    assert printed("triggers try", "github", other)["reason"] == "no-allowlisted-label"
    nobody = delivery(folder, sender={"login": "x"})
    assert printed("triggers try", "github", nobody)["reason"] == "missing-sender-id"
    result = cli("triggers", "try", "github", other)
    assert result.exit_code == 0
    assert "starts nothing: " in result.output


def test_triggers_try_checks_a_signature_only_with_a_secret(folder: Path) -> None:
    body = Path(delivery(folder)).read_bytes()
    headers, signed = demo.signed_delivery("issues", json.loads(body), "s", "guid")
    path = folder / "signed"
    path.write_bytes(signed)
    lines = [word for k, v in headers.items() for word in ("--header", f"{k}: {v}")]
    arguments = ["triggers", "try", "github", "signed", *lines, "--secret"]
    assert cli(*arguments, "s").exit_code == 0
    assert cli(*arguments, "other").exit_code == 2


#: Of each forge: its request actions, and those of its labels that a rule names.
WANTED = {
    "github": ("opened", "synchronize", "reopened", "review_submitted"),
    "forgejo": ("opened", "synchronized", "reopened"),
}
NAMED = {"forgejo": ("bug",)}


def manifest() -> list[dict[str, Any]]:
    try:
        rows = json.loads((PAYLOADS / "manifest.json").read_text("utf-8"))
    except OSError:
        return []
    return [row for row in rows if row["forge"] in WANTED]


@pytest.fixture(scope="module")
def one_rule_a_type(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A file for each forge, with one rule of each type."""
    root = tmp_path_factory.mktemp("rules")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    local = {"kind": "local", "flow": "tidy", "folder": str(root), "task": "tidy"}
    labels = [row["expect"].get("label_event") for row in manifest()]
    names = sorted({label for label in labels if label})
    files = {}
    for kind, actions in WANTED.items():
        forge = {"kind": kind, "flow": "review"}
        named = [*NAMED.get(kind, names)] or ["x"]
        close = pidispatch.FORGES[kind].close_word
        rules = [
            {"on": {"type": "label", "any": named}, "run": forge},
            {"on": {"type": "comment", "phrase": "@pi"}, "run": forge},
            {"on": {"type": "pull_request", "action": actions}, "run": forge},
            {"on": {"type": "issue", "action": [close]}, "run": forge},
            {"on": {"type": "cron", "id": "c", "pattern": "0 3 * * *"}, "run": local},
        ]
        path = root / f"{kind}.json"
        path.write_text(json.dumps({"triggers": rules}))
        files[kind] = str(path)
    return files


#: What each kind of payload must come to, as far as the kind decides it.
RULE_OF_KIND = {
    "github": {
        "issue_labelled": 0,
        "pr_opened": 2,
        "pr_reopened": 2,
        "pr_review": 2,
    },
    "forgejo": {"issue_labelled": 0, "pr_opened": 2, "pr_updated": 2},
}
SILENT = ("ignore", "ping", "issue_opened", "issue_reopened")


@pytest.mark.skipif(not manifest(), reason="the stored real payloads are not here")
@pytest.mark.parametrize("row", manifest(), ids=lambda row: row["file"])
def test_try_agrees_with_what_real_payloads_should_be_seen_as(
    row: dict[str, Any], one_rule_a_type: dict[str, str]
) -> None:
    forge, path = row["forge"], str(PAYLOADS / row["file"])
    event, rules = ["--event", row["event"]], RULE_OF_KIND[row["forge"]]
    trial = printed("triggers try", forge, path, one_rule_a_type[forge], *event)
    expect = row["expect"]
    number = expect.get("number")
    kind = "pull_request" if expect.get("is_pr") else "issue"
    words = (row["event"], expect.get("action"))
    assert trial["event"] == ".".join(word for word in words if word)
    assert trial["repo"] == expect.get("repo")
    assert trial["actor"] == str(expect["actor_id"])
    assert trial["target"] == (number and {"type": kind, "number": number})
    assert (trial["rule"] is None) or row["kind"] in rules
    if row["kind"] in SILENT:
        assert trial["rule"] is None
        assert trial["reason"] in pidispatch.DROP_REASONS
        assert trial["jobs"] == []
    else:
        assert trial["rule"] == rules.get(row["kind"])
        assert trial["authority"] != "payload" or forge == "github"


# -- runs, show, logs, status -------------------------------------------------


def test_runs_lists_and_exports_the_records(queue: str) -> None:
    text = cli("runs", "--db", queue).output
    assert re.search(r"^gh-set-r1 .* r1/2 +completed", text, re.M)
    records = printed("runs", "--db", queue)
    assert [record["jobId"] for record in records] == ["gh-no", "gh-set-r1"]
    keys = list(pidispatch.Record.__struct_fields__)
    assert all(list(record) == keys for record in records), "the order is the contract"
    assert len(printed("runs", "--db", queue, "--limit", "1")) == 1


def test_records_hold_no_text_of_the_issue_and_no_branch(queue: str) -> None:
    exported = json.dumps(printed("runs", "--db", queue))
    for text in ("A title", "A body", "octocat", "pi:urgent", "pi/issue"):
        assert text not in exported


def test_show_names_the_siblings(queue: str) -> None:
    shown = printed("show", "gh-set-r1", "--db", queue)
    assert shown["run"]["request"]["number"] == 12
    assert shown["record"]["replica"] == 1
    assert [run["id"] for run in shown["siblings"]] == ["gh-set-r2"]
    assert printed("show", "gh-set-r2", "--db", queue)["record"] is None
    assert "sibling r1/2  gh-set-r1" in cli("show", "gh-set-r2", "--db", queue).output


def test_an_unknown_job_is_a_mistake_with_a_hint(queue: str) -> None:
    for command in ("show", "logs"):
        result = cli(command, "gh-nothing\x1b[2J", "--db", queue)
        assert result.exit_code == 2
        assert "no job gh-nothing␛[2J is known" in result.output
        assert "pidispatch runs" in result.output


def test_status_counts_what_is_open_and_what_was_spent(queue: str) -> None:
    status = printed("status", "--db", queue)
    assert status["jobs"] == {"done": 2, "queued": 1, "running": 1}
    assert status["counts"] == {"queued": 3}
    assert status["daily_cap"] == 25
    assert "jobs: 2 done, 1 queued, 1 running" in cli("status", "--db", queue).output


def test_logs_of_an_ended_job_are_shown_when_they_were_kept(
    queue: str, folder: Path
) -> None:
    for job in ("gh-set-r1", "gh-later"):
        result = cli("logs", job, "--db", queue)
        assert result.exit_code == 2
        assert f"no log of {job} is kept" in result.output
        assert "PI_CAPTURE_JOB_LOGS=1" in result.output
    kept = folder / "state/logs/pi-job-gh-set-r1.log"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b'{"event":"turn_start"}\n\x1b]0;evil\x07\xff\n')
    result = cli("logs", "gh-set-r1", "--db", queue, PI_STATE_DIR="state")
    assert result.output == '{"event":"turn_start"}\n␛]0;evil␇�\n'


def test_logs_of_a_running_job_need_the_engine(queue: str) -> None:
    result = cli("logs", "gh-set-r2", "--db", queue)
    assert result.exit_code == 1
    assert "no Docker Engine answers" in result.output


# -- pause, resume, cancel, publish -------------------------------------------


def test_pause_holds_the_queue_until_resume(
    queue: str, store: pidispatch.Store
) -> None:
    assert cli("pause", "--db", queue).exit_code == 0
    assert cli("pause", "--db", queue).exit_code == 0, "twice is once"
    assert store.claim() is None
    assert "PAUSED" in cli("status", "--db", queue).output
    assert cli("resume", "--db", queue).exit_code == 0
    assert store.claim() is not None


def test_cancel_says_truthfully_what_had_happened(
    queue: str, store: pidispatch.Store
) -> None:
    for job, words in (
        ("gh-later", "it had not started and will not"),
        ("gh-set-r2", "its container is being stopped; what it used is paid for"),
    ):
        result = cli("cancel", job, "--db", queue)
        assert (result.exit_code, result.output) == (0, f"{job}: {words}\n")
        assert store.cancelled(job)
    assert not store.cancelled("gh-set-r1"), "its sibling goes on"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("cancel gh-set-r1", "gh-set-r1 has already ended: completed"),
        ("cancel gh-none", "no job gh-none is known"),
        ("publish gh-none", "no job gh-none is known"),
        ("publish gh-later", "gh-later has nothing to publish"),
        ("publish gh-no --to x", "gh-no has nothing to publish"),
    ],
)
def test_what_cannot_be_cancelled_or_published_is_said(
    line: str, words: str, queue: str
) -> None:
    result = cli(*line.split(), "--db", queue)
    assert result.exit_code == 2
    assert f"pidispatch: {words}" in result.output
    assert "  fix: " in result.output


def test_a_write_that_the_file_does_not_take_is_an_error_of_the_machine(
    queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sqlite3

    def refuse(db: sqlite3.Connection, *_: Any) -> None:
        db.execute("PRAGMA query_only = ON")
        db.execute("DELETE FROM flags")

    monkeypatch.setattr(pidispatch, "_set_flag", refuse)
    result = cli("pause", "--db", queue)
    assert result.exit_code == 1
    assert "could not be written: attempt to write a readonly database" in result.output


# -- an engine of paper, and a doctor who looks at it --------------------------


class PaperEngine(ThreadingHTTPServer):
    """As much of the Docker API as doctor and logs ask for. `images` maps a tag to
    its labels; `log` is what a container printed; `broken` fails every request, and
    `hangs` keeps it waiting; `rows` are the containers, `subnets` those of its
    networks, `outer` the gates'."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _PaperPage)
        claims = {pidispatch.LABEL + "capabilities": "replicas,gate"}
        self.images: dict[str, dict[str, str]] = {"pi-job:latest": claims}
        self.log = b""
        self.broken = self.hangs = False
        self.rows: list[dict[str, Any]] = []
        self.subnets: list[str] = []
        self.outer = "10.213.4.0/22"
        self.seen = SOUND

    def containers(self, query: str) -> list[dict[str, Any]]:
        """Those that have every label a filter names."""
        wanted = json.loads(parse_qs(query)["filters"][0])["label"]
        labels = [dict([label.split("=", 1)]) for label in wanted]
        return [
            r
            for r in self.rows
            if all(x.items() <= r["Labels"].items() for x in labels)
        ]

    def networks(self) -> Iterator[dict[str, Any]]:
        for name, subnet in (
            *((f"net-{subnet}", subnet) for subnet in self.subnets),
            (pidispatch.OUTER_NETWORK, self.outer),
        ):
            role = (
                {pidispatch.LABEL + "role": "outer"} if subnet == self.outer else None
            )
            ipam = {"Config": [{"Subnet": subnet}]}
            yield {"Name": name, "Id": name, "Labels": role, "IPAM": ipam}

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str) -> tuple[int, bytes]:
        """The status and the body of a GET."""
        path, _, query = path.partition("?")
        if path.endswith("/version"):
            facts: Any = {"Version": "99", "ApiVersion": "1.41"}
            return 200, json.dumps(facts).encode()
        if self.broken:
            return 500, b'{"message": "no space left"}'
        if path.endswith("/containers/json"):
            return 200, json.dumps(self.containers(query)).encode()
        if path.endswith("/networks"):
            return 200, json.dumps([*self.networks()]).encode()
        if path.endswith("/volumes"):
            return 200, b'{"Volumes": null}'
        found = re.search(r"/images/(.+)/json$", path)
        if found and found[1] in self.images:
            labels = self.images[found[1]]
            facts = {"Id": "sha256:1", "Config": {"User": "1001", "Labels": labels}}
            return 200, json.dumps(facts).encode()
        if "/containers/pi-job-gh-set-r2/" in path:
            frame = struct.pack(">BxxxL", 1, len(self.log)) + self.log
            body = b'{"Config": {"Tty": false}}' if path.endswith("/json") else frame
            return 200, body
        return 404, b'{"message": "No such image: x"}'


class _PaperPage(BaseHTTPRequestHandler):
    server: PaperEngine

    def do_GET(self) -> None:
        if self.server.hangs:
            time.sleep(3)
        status, body = self.server.answer(self.path)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_DELETE(self) -> None:
        path = self.path.partition("?")[0]
        self.server.rows[:] = [r for r in self.server.rows if r["Id"] not in path]
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Silence."""


#: What a canary sees where all is right; a real engine has its own test.
SOUND = pidispatch.Canary(
    (),
    True,
    {"anthropic": pidispatch.Heard(200)},
    {pidispatch._OUTSIDE: pidispatch.Heard(403)},
)


class Room(NamedTuple):
    """What `shutil.disk_usage` says."""

    total: int
    used: int
    free: int


@pytest.fixture
def paper() -> Iterator[PaperEngine]:
    with PaperEngine() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def forge() -> Iterator[demo.FakeGitHub]:
    with demo.FakeGitHub([demo.Token("canary-token", "operator")]) as running:
        yield running


@pytest.fixture
def well(
    paper: PaperEngine, forge: demo.FakeGitHub, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """The environment of a machine on which nothing is wrong."""
    monkeypatch.setattr(pidispatch, "canary", lambda *_: paper.seen)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Room(2**40, 0, 2**40))
    return {
        "DOCKER_HOST": paper.url,
        "WEBHOOK_SECRET": "canary-secret",
        "GITHUB_PAT": "canary-token",
        "GITHUB_API_URL": f"{forge.url}/api/v3",
        "ANTHROPIC_API_KEY": "canary-key",
    }


def test_logs_shows_what_a_box_says_and_lets_none_of_it_act(
    paper: PaperEngine, queue: str
) -> None:
    paper.log = b'{"event":"turn_start"}\n\x1b[2J\x9b\xff \xe2\x80\xae evil\n'
    result = cli("logs", "gh-set-r2", "--db", queue, DOCKER_HOST=paper.url)
    assert result.exit_code == 0
    assert result.output.splitlines() == ['{"event":"turn_start"}', "␛[2J�� � evil"]


def test_doctor_finds_nothing_wrong_on_a_machine_that_is_ready(
    well: dict[str, str], queue: str, store: pidispatch.Store
) -> None:
    store.clock = time.time
    store.beat()
    result = cli("doctor", "--db", queue, **well)
    assert result.exit_code == 0, result.output
    assert "✗" not in result.output
    assert "⚠" not in result.output
    assert "1 trigger sets replicas: triggers[0] burns 2 slots a delivery" in (
        result.output
    )
    assert f"{pidispatch.LABEL}" not in result.output
    assert "canary" not in result.output


GITLAB = {"on": RULES[0]["on"], "run": {"kind": "gitlab", "flow": "fix-issue"}}
RUN = {"kind": "github", "flow": "fix-issue"}

#: One thing wrong, then doctor's line about it. ✗ is exit 1, ⚠ alone is exit 0.
FAULTS: list[tuple[str, dict[str, str | None], str]] = [
    ("no engine", {"DOCKER_HOST": NO_ENGINE}, "✗ engine: no Docker Engine answers"),
    ("odd engine", {"DOCKER_HOST": "tcp://h:99999"}, "✗ engine: no Docker Engine"),
    ("broken engine", {}, "✗ engine: the engine could not inspect"),
    ("no git", {"PATH": "/nonexistent"}, "✗ git: git does not run"),
    ("no image", {"PI_JOB_IMAGE": "none:1"}, "✗ job image: none:1 is not on this"),
    ("old image", {"PI_JOB_IMAGE": "old:1"}, "✗ job image: old:1: pi unknown; no cap"),
    ("no gate", {"PI_GATE_IMAGE": "old:1"}, "✗ gate image: old:1 is not here or has"),
    ("no rules", {"PI_TRIGGERS_FILE": "none"}, "✗ triggers: none: cannot be read"),
    ("bad rules", {}, "✗ triggers: triggers.json: line 1, column 1: not JSON"),
    ("no rule", {}, "⚠ triggers: 0 rules"),
    ("other forge", {}, "✗ gitlab: rules name gitlab, which is not served"),
    ("no CLI", {}, "✗ job image: publish: agent on github with pi-job:latest"),
    ("no sessions", {}, "✗ sessions: triggers[1]: `resume` without PI_SESSIONS_DIR"),
    ("no secret", {"WEBHOOK_SECRET": None}, "✗ forges: no forge is served"),
    ("no token", {"GITHUB_PAT": None}, "✗ github: deliveries are taken, but there is"),
    ("wrong token", {"GITHUB_PAT": "x"}, "✗ github: github: cannot read our own"),
    ("no API", {"GITHUB_API_URL": "http://127.0.0.1:9"}, "✗ github: github: cannot"),
    ("no key", {"ANTHROPIC_API_KEY": None}, "✗ provider: anthropic has no key"),
    ("no provider", {"PI_PROVIDER": "acme"}, "✗ provider: acme is unknown"),
    ("open network", {"PI_EGRESS": "0"}, "⚠ egress: PI_EGRESS=0: JOBS ARE NOT"),
    ("few slots", {"PI_CONCURRENCY": "1"}, "⚠ concurrency: PI_CONCURRENCY=1 is below"),
    ("small cap", {"PI_DAILY_CAP": "1"}, "✗ caps: PI_DAILY_CAP=1 cannot hold a set"),
    ("weak cap", {"PI_DAILY_TOKEN_CAP": "9"}, "⚠ caps: PI_DAILY_TOKEN_CAP without"),
    (
        "void cap",
        {"PI_DAILY_TOKEN_CAP": "9", "PI_MAX_TOKENS": "10"},
        "✗ caps: PI_MAX_TOKENS is more than PI_DAILY_TOKEN_CAP",
    ),
    ("void hold", {"PI_SOFT_HOLD_PCT": "3"}, "✗ caps: PI_SOFT_HOLD_PCT of a cap is"),
    ("no limits", {"PI_LIMITS_FILE": "none.json"}, "✗ limits: none.json: cannot be"),
    (
        "bad overlay",
        {"PI_SETTINGS_FILE": "triggers.json"},
        "✗ overlay: triggers.json: ",
    ),
    ("no hook", {"PI_ON_FAILURE": "x"}, "✗ hook: PI_ON_FAILURE: x is no program"),
    ("bad setting", {"PI_PORT": "x"}, '✗ settings: settings: PI_PORT="x"'),
    ("bad database", {"PI_DB": "triggers.json"}, "✗ store: triggers.json: the data"),
    ("open secrets", {}, "⚠ modes: .env can be read by others"),
]


def spoil(name: str, folder: Path, paper: PaperEngine) -> None:
    """The faults that are not in the environment."""
    rules: dict[str, Any] = {
        "no rule": [],
        "other forge": [*RULES, GITLAB],
        "no CLI": [*RULES, {**RULES[0], "run": {**RUN, "publish": "agent"}}],
        "no sessions": [*RULES, {**RULES[0], "run": {**RUN, "resume": True}}],
    }
    if name in rules:
        (folder / "triggers.json").write_text(json.dumps({"triggers": rules[name]}))
    if name == "bad rules":
        (folder / "triggers.json").write_text("triggers:")
    if name == "open secrets":
        (folder / ".env").touch(0o644)
    paper.broken = name == "broken engine"
    paper.images["old:1"] = {}


@pytest.mark.parametrize(
    ("name", "environ", "line"), FAULTS, ids=[fault[0] for fault in FAULTS]
)
def test_doctor_names_a_single_fault_and_its_fix(
    name: str,
    environ: dict[str, str | None],
    line: str,
    well: dict[str, str],
    folder: Path,
    paper: PaperEngine,
) -> None:
    spoil(name, folder, paper)
    changed = {k: v for k, v in {**well, **environ}.items() if v is not None}
    result = cli("doctor", **changed)
    lines = result.output.splitlines()
    found = [i for i, text in enumerate(lines) if text.startswith(line)]
    assert found, result.output
    assert lines[found[0] + 1].startswith("    fix: ")
    assert result.exit_code == (1 if "✗" in result.output else 0)
    assert ("✗" in result.output) == line.startswith("✗"), "and nothing else is wrong"
    for check in printed("doctor", **changed):
        assert check["state"] == "ok" or check["fix"]


# -- demo and the image -------------------------------------------------------


def test_demo_fails_as_a_program_when_a_replica_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "run_demo", lambda as_json: 1)
    assert cli("demo").exit_code == 1


def test_demo_needs_git_and_says_so() -> None:
    result = cli("demo", PATH="/nonexistent")
    assert result.exit_code == 2
    assert "fix: install git" in result.output


def test_build_image_sends_the_whole_context_and_reports_the_engines_no(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Builder:
        """Takes the context and answers like an engine whose base is missing."""

        sent: dict[str, Any] = {}

        def build(self, path: str, **options: Any) -> Iterator[dict[str, Any]]:
            names = {str(p.relative_to(path)) for p in Path(path).rglob("*")}
            self.sent.update(options, names=names)
            yield {"stream": "Step 1/9 : \x1b[1mFROM x\n"}
            yield {"error": "manifest unknown\n"}

    monkeypatch.setattr(pidispatch.DockerEngine, "api", Builder())
    result = cli("build-image", "--tag", "mine:1", "--base", "b:1")
    assert result.exit_code == 1
    assert "the image was not built: manifest unknown" in result.output
    assert "build-image --offline" in result.output
    sent = Builder.sent
    assert sent["tag"] == "mine:1"
    pinned = {"PI_VERSION": pidispatch.PI_VERSION, "BASE_IMAGE": "b:1"}
    assert sent["buildargs"] == pinned
    assert {"Dockerfile", "runner.py", "gate.py", "HARD_RULES.md"} <= sent["names"]


def test_verify_image_of_an_absent_image_is_a_lie_in_both_forms(
    paper: PaperEngine,
) -> None:
    for tag in ("none:1", "\x1b[2J"):
        text = cli("verify-image", tag, DOCKER_HOST=paper.url)
        assert text.exit_code == 1
        said = f"{pidispatch.plain_text(tag)} is not on this machine"
        assert text.output == f"✗ present: {said}\n"
        (finding,) = printed("verify-image", tag, DOCKER_HOST=paper.url)
        assert (finding["name"], finding["state"]) == ("present", "lie")
