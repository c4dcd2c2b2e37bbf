"""Section surfaces: what people read is true, complete, and never acts on them."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import threading
import time
import unicodedata
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from conftest import FakeClock, Maker
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import pidispatch
from pidispatch import On, Rule, Run

# -- text from outside --------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("a\r\nb\tc\0", "a␍␊b␉c␀"),
        ("\x9b31m", "�31m"),  # the one-byte form of ESC [
        ("\x7f", "�"),
        ("abc\u202egpj.exe", "abc�gpj.exe"),
        ("\u2066\u200f\u061c\u200b\ufeff\u2028", "�" * 6),
        ("\U000e0041", "�"),  # a tag character
        ("\ud800", "�"),
        ("naïve 日本語 👩\u200d💻 é", "naïve 日本語 👩\u200d💻 é"),
    ],
)
def test_text_that_a_terminal_would_obey_is_shown_instead(
    text: str, shown: str
) -> None:
    assert pidispatch.plain_text(text) == shown


@settings(max_examples=50)
@given(st.text(st.characters()))
def test_no_text_at_all_moves_a_terminal(text: str) -> None:
    shown = pidispatch.plain_text(text)
    assert len(shown) == len(text)
    shown.encode()  # no lone surrogate is left
    hidden = {c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")}
    assert hidden <= {"\u200c", "\u200d"}


def test_a_table_keeps_one_line_a_row_and_no_trailing_blanks() -> None:
    text = pidispatch.table(("A", "B"), [("x\ny", 1), ("longer", "")])
    assert text == "A       B\nx␊y     1\nlonger"


def test_a_problem_is_one_line_a_fault_and_one_fix() -> None:
    faults = pidispatch.Faults("f.json", ["a \x1b[2J", "b"], "edit it")
    assert pidispatch.problem_text(faults).split("\n") == [
        "pidispatch: f.json: a ␛[2J",
        "pidispatch: f.json: b",
        "  fix: edit it",
    ]


# -- the log ------------------------------------------------------------------


def log_line(
    message: str, *, plain: bool, secret: str = "canary-1", **fields: Any
) -> str:
    record = logging.LogRecord("pidispatch", 20, "", 0, message, (), None)
    record.fields = fields
    try:
        raise ValueError("inside")
    except ValueError:
        if fields.pop("fails", False):
            record.exc_info = sys.exc_info()
    redactor = pidispatch.Redactor([secret])
    return pidispatch.LogFormat(redactor, plain=plain).format(record)


def test_a_log_line_for_machines_is_one_json_object() -> None:
    line = log_line("job-claimed", plain=False, job="gh-1", kept=0, why=None)
    assert "\n" not in line
    assert json.loads(line) | {"t": ""} == {
        "t": "",
        "level": "info",
        "event": "job-claimed",
        "job": "gh-1",
        "kept": 0,
    }
    trace = json.loads(log_line("x", plain=False, fails=True))["traceback"]
    assert "ValueError: inside" in trace


def test_a_log_line_on_a_terminal_cannot_be_forged() -> None:
    line = log_line("trouble", plain=True, why="a\n12:00:00 paid \x1b[2J")
    assert "\n" not in line
    assert "\x1b" not in line
    assert line.endswith("trouble why=a␊12:00:00 paid ␛[2J")
    assert log_line("x", plain=True, fails=True).endswith("\nValueError: inside")


def test_no_spelling_of_a_secret_reaches_the_log() -> None:
    """T46: raw, URL-encoded, basic credentials, shell-quoted, JSON-escaped."""
    import base64
    import shlex
    from urllib.parse import quote

    secret = 'c4n"ary/ $ecret'
    basic = base64.b64encode(f"x-access-token:{secret}".encode()).decode()
    for plain in (True, False):
        for text in (secret, quote(secret, safe=""), basic, shlex.quote(secret)):
            line = log_line("push", plain=plain, secret=secret, url=f"https://{text}@h")
            assert "ecret" not in line, text
            assert basic not in line
            assert "***" in line


# -- runs ---------------------------------------------------------------------


def test_the_list_of_runs_says_which_replica_each_one_is(
    store: pidispatch.Store, maker: Maker
) -> None:
    maker.history(store)
    heads, *rows = pidispatch.runs_table(store.runs(9)).split("\n")
    assert heads.split()[:4] == ["JOB", "TARGET", "FLOW", "REPLICA"]
    cells = [row.split()[:7] for row in rows]
    assert cells == [
        ["gh-later", "octo/spoon#9", "fix-issue", "-", "queued", "-", "-"],
        ["gh-no", "octo/spoon#8", "fix-issue", "-", "policy", "job-image-missing", "-"],
        ["gh-set-r2", "octo/spoon#7", "fix-issue", "r2/2", "running", "-", "-"],
        ["gh-set-r1", "octo/spoon#7", "fix-issue", "r1/2", "completed", "-", "10"],
    ]


def test_one_run_names_its_siblings_by_job_id_and_links_their_requests(
    store: pidispatch.Store, maker: Maker
) -> None:
    maker.history(store)
    second = pidispatch.run_detail(pidispatch.RunDetail(*store.run("gh-set-r2")))
    link = "https://host/octo/spoon/pull/12"
    assert f"sibling r1/2  gh-set-r1  completed  {link}" in second
    first = pidispatch.run_detail(pidispatch.RunDetail(*store.run("gh-set-r1")))
    assert "sibling r2/2  gh-set-r2  running  no request yet" in first
    assert f"request       {link}" in first
    for name in pidispatch.Record.__struct_fields__:
        assert f"\n{name}" in first, "the record is shown whole"


def test_status_says_what_waits_what_was_spent_and_what_is_wrong(
    store: pidispatch.Store, maker: Maker, clock: FakeClock
) -> None:
    maker.history(store)
    store.set_flag("triggers-problem", "t.json: one\nt.json: two")
    store.set_flag("paused", "1")
    status = store.status(pidispatch.Caps(25, None, None, "UTC"), clock())
    text = pidispatch.status_text(status)
    assert "jobs: 2 done, 1 queued, 1 running" in text
    assert "today: 2 of 25 slots used" in text
    assert "PAUSED" in text
    assert text.endswith("triggers file: t.json: one\ntriggers file: t.json: two")


# -- long work ------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_work_says_on_a_terminal_how_long_it_goes_on() -> None:
    terminal, steps = Terminal(), iter(["r1 queued and waiting", "r1 \x1b[31mred"])
    said, asked = threading.Event(), []

    def text() -> str:
        asked.append(1)
        if len(asked) > 2:
            said.set()
        return next(steps, "last")

    with pidispatch.underway(text, 0.001, terminal):
        assert said.wait(5)
    shown = terminal.getvalue()
    assert shown.startswith("\rr1 queued and waiting, 0 s")
    assert "\x1b" not in shown and "\n" not in shown, "no colour, one line"
    lines = shown.split("\r")
    assert len(lines[2]) >= len(lines[1]), "a shorter text hides the longer one"
    assert lines[-1] == "" and lines[-2].strip() == "", "and it goes away"


def test_where_no_terminal_is_long_work_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stream, term in ((io.StringIO(), "xterm"), (Terminal(), "dumb")):
        monkeypatch.setenv("TERM", term)
        with pidispatch.underway(lambda: "x", 0.001, stream):
            time.sleep(0.02)
        assert stream.getvalue() == ""


# -- rules --------------------------------------------------------------------


def rule(on: dict[str, Any], **run: Any) -> Rule:
    values = {"kind": "github", "flow": "fix-issue", **run}
    return Rule(3, msgspec.convert(on, On), msgspec.convert(values, Run))


LABEL = {"type": "label", "any": ["pi:urgent"]}
COMMENT = {"type": "comment", "phrase": "@pi"}


def test_a_replicated_rule_shows_its_multiplier_beside_the_trust_model() -> None:
    text = pidispatch.rule_detail(rule(LABEL, replicas=3))
    for words in (
        "[x3] each delivery makes 3 jobs",
        "3 slots",
        "3 times the tokens",
        "opens 3 pull requests",
        "no replica's end cancels a sibling; a person compares and picks",
        "trust: started only on the word of someone the forge lets steer it",
        "only the caps bound them",
    ):
        assert words in text
    assert "[x3]" in pidispatch.rules_table([rule(LABEL, replicas=3)])
    assert "multiplier" not in pidispatch.rule_detail(rule(LABEL))
    assert "[x" not in pidispatch.rules_table([rule(LABEL)])


@pytest.mark.parametrize("kind", pidispatch.FORGES)
def test_a_replicated_rule_says_what_is_true_of_its_forge(kind: str) -> None:
    """What replicas open by its noun, the shared head, whose token a box holds."""
    row = pidispatch.FORGES[kind]

    def shown(on: dict[str, Any], **run: Any) -> str:
        return pidispatch.rule_detail(rule(on, kind=kind, replicas=2, **run))

    made = f"opens 2 {row.request_noun}s"
    comments = f"comments 2 times on the {row.request_noun}"
    request = {"type": "pull_request", "action": [row.pr_actions[1]]}
    label, comment = shown(LABEL), shown(COMMENT)
    assert made in label and comments not in label
    assert made in comment and comments in comment
    assert made not in shown(request) and comments in shown(request)
    for text in (label, comment, shown(request)):
        assert "token into the box" not in text
        assert "operator token" not in text
        assert "share one head branch" not in text

    for on in (LABEL, COMMENT, request):
        text = shown(on, publish="agent")
        assert "puts the forge token into the box" in text
        assert ("all replicas share one head branch" in text) is (on is not LABEL)
        app = "without a GitHub App all replicas hold one operator token"
        assert (f"note: {app}" in text) is (kind == "github")
        everywhere = "the token is the operator's own, for every project"
        for words in (everywhere, "all replicas hold one operator token"):
            assert (f"note: {words}" in text) is (kind != "github")


def shown_by_command(tmp_path: Path, **run: Any) -> str:
    """What `triggers show` prints of a comment rule."""
    path = tmp_path / "triggers.json"
    values = {"kind": "github", "flow": "review", **run}
    path.write_text(json.dumps({"triggers": [{"on": COMMENT, "run": values}]}))
    done = CliRunner().invoke(pidispatch.main, ["triggers", "show", "0", str(path)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("kind", ["github", "gitlab", "forgejo", "azure"])
def test_showing_a_replicated_comment_rule_says_what_it_costs_and_risks(
    kind: str, tmp_path: Path
) -> None:
    """The multiplier always; a request's hazard and the credential as they apply."""
    more = {"repository": "spoon"} if kind == "azure" else {}
    hazard, token = "all replicas share one head branch", "replicas hold one operator"
    plain = shown_by_command(tmp_path, kind=kind, **more)
    assert not any(text in plain for text in ("multiplier", hazard, token))
    host = shown_by_command(tmp_path, kind=kind, replicas=2, **more)
    assert "multiplier: [x2] each delivery makes 2 jobs" in host
    assert "on a request no replica pushes anything" in host
    assert hazard not in host and token not in host
    agent = shown_by_command(tmp_path, kind=kind, replicas=3, publish="agent", **more)
    assert "multiplier: [x3]" in agent and hazard in agent and token in agent
    assert ("without a GitHub App" in agent) is (kind == "github")
    assert "no replica pushes" not in agent


def test_a_rule_that_says_nothing_is_shown_as_the_setting_makes_it() -> None:
    agent = pidispatch.Settings(publish="agent")
    words = "puts the forge token into the box"
    shown = pidispatch.in_force(rule(LABEL), agent)
    assert words in pidispatch.rule_detail(shown)
    for own in (rule(LABEL, publish="host"), rule(LABEL, kind="local")):
        assert words not in pidispatch.rule_detail(pidispatch.in_force(own, agent))
    plain = pidispatch.in_force(rule(LABEL), pidispatch.Settings())
    assert words not in pidispatch.rule_detail(plain)


class _Images:
    """An engine that has one image."""

    def __init__(self, **labels: str) -> None:
        self.settings = pidispatch.Settings()
        labels = {pidispatch.LABEL + name: text for name, text in labels.items()}
        self.made = pidispatch.Image("pi-job:latest", "sha256:1", labels, 1001, 1001)

    def image(self, tag: str) -> pidispatch.Image:
        return self.made


@pytest.mark.parametrize(
    ("forges", "state"), [(None, "fail"), ("gitlab", "fail"), ("github", "warn")]
)
def test_the_doctor_says_when_an_agent_would_have_no_cli(
    forges: str | None, state: str
) -> None:
    engine = _Images(capabilities="gate", **({"forges": forges} if forges else {}))
    checks: list[pidispatch.Check] = []
    rules = [rule(LABEL, publish="agent"), rule(LABEL)]
    pidispatch._check_images(engine, rules, checks)  # type: ignore[arg-type]
    [found] = [check for check in checks if "publish: agent" in check.found]
    assert found.state == state


def test_a_cron_rule_tells_whose_word_starts_it_and_what_it_touches() -> None:
    found = rule({"type": "cron", "id": "n", "pattern": "* * * * *"}, kind="local")
    text = pidispatch.rule_detail(found)
    assert "this machine's clock" in text and "edits your own folder in place" in text
    assert "the forge lets steer" not in text


def test_every_setting_is_read_by_something() -> None:
    """A setting that silently did nothing would be a promise nobody keeps."""
    source = Path(pidispatch.__file__).read_text("utf-8")
    below = source.partition("\ndef with_overlay(")[2]
    read = set(re.findall(r"settings\.([a-z_]+)\b", below))
    read |= {"egress", "providers_file", "webhook_secret"}  # read by another way
    unread = set(pidispatch.SETTINGS) - read
    assert unread == set(), "let something read it, or remove it"


# -- schemas ------------------------------------------------------------------


@pytest.mark.parametrize("command", pidispatch.OUTPUTS)
def test_every_json_output_has_a_valid_schema_that_refuses_another_shape(
    command: str,
) -> None:
    schema = pidispatch.output_schema(command)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    others: tuple[object, ...] = ({}, [{}], None, "text")
    for wrong in others:
        assert not validator.is_valid(wrong)


def test_a_records_schema_requires_every_key_of_the_contract() -> None:
    definitions = pidispatch.output_schema("runs")["$defs"]
    keys = list(pidispatch.Record.__struct_fields__)
    assert definitions["Record"]["required"] == keys
    assert list(definitions["Record"]["properties"]) == keys
