"""Section `forges`: bytes to an Event, who asked, and what GitHub's API is told."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import json
import os
import stat
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests
from conftest import raw_answer
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import pidispatch
import pidispatch_demo as demo
from pidispatch import (
    Actor,
    ConfigError,
    Event,
    GitHub,
    InfraError,
    Malformed,
    Refused,
    Rejected,
    Settings,
    Target,
    Unauthorized,
)

SECRET = "it's a secret"
PAYLOADS = Path(
    os.environ.get("PIDISPATCH_PAYLOADS")
    or Path(__file__).parent.parent.parent / "shared" / "payloads"
)
FORM = "application/x-www-form-urlencoded"


def manifest() -> list[dict[str, Any]]:
    file = PAYLOADS / "manifest.json"
    rows = json.loads(file.read_bytes()) if file.is_file() else []
    return [row for row in rows if row["forge"] == "github"]


def github(session: requests.Session | None = None, **fields: Any) -> GitHub:
    fields.setdefault("webhook_secret", (SECRET,))
    return GitHub(Settings(**fields), session or requests.Session())


def mac(body: bytes, secret: str = SECRET) -> str:
    return "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


def headers(event: str = "issues", **more: str) -> dict[str, str]:
    named = {key.replace("_", "-"): value for key, value in more.items()}
    known = {"x-github-event": event, "x-github-delivery": "d-1"}
    return known | {"content-type": "application/json"} | named


def labeled(**changes: Any) -> dict[str, Any]:
    """An `issues` `labeled` payload; a change None removes the key."""
    shape = {
        "action": "labeled",
        "label": {"name": "pi:fix"},
        "issue": {
            "number": 7,
            "title": "Crash",
            "body": "It crashes.",
            "user": {"id": 20, "login": "reporter"},
            "labels": [{"name": "bug"}, {"name": "pi:fix"}],
            "author_association": "NONE",
            "updated_at": "2026-01-02T03:04:05Z",
        },
        "repository": {"id": 5, "full_name": "octo/lamp"},
        "sender": {"id": 10, "login": "maintainer"},
    }
    shape.update(changes)
    return {key: value for key, value in shape.items() if value is not None}


def parse(shape: object, event: str = "issues", **more: str) -> Event:
    return github().parse(headers(event, **more), json.dumps(shape).encode())


# -- verify -------------------------------------------------------------------

ODD_BODY = '{ "title" :\t"ça va 🎉 \\u00e7 \\ud83c\\udf89",\r\n"n":1.0 }\r\n'.encode()


def test_the_signature_is_over_the_raw_bytes_whatever_they_look_like() -> None:
    """T04: odd spacing, emoji, escapes and CRLF would not survive a re-dump."""
    github().verify({"x-hub-signature-256": mac(ODD_BODY)}, ODD_BODY)
    again = json.dumps(json.loads(ODD_BODY)).encode()
    with pytest.raises(Unauthorized):
        github().verify({"x-hub-signature-256": mac(ODD_BODY)}, again)


def test_any_of_several_secrets_holds_so_that_one_can_be_rotated() -> None:
    forge = github(webhook_secret=("old", "new"))
    for secret in ("old", "new"):
        forge.verify({"x-hub-signature-256": mac(b"x", secret)}, b"x")
    with pytest.raises(Unauthorized):
        forge.verify({"x-hub-signature-256": mac(b"x", "older")}, b"x")


def test_hex_may_be_upper_case() -> None:
    scheme, _, digits = mac(b"x").partition("=")
    github().verify({"x-hub-signature-256": f"{scheme}={digits.upper()}"}, b"x")


GOOD = mac(b"x")
BAD_SIGNATURES = {
    "missing": None,
    "empty": "",
    "no scheme": GOOD.removeprefix("sha256="),
    "sha1 scheme": "sha1=" + hmac.new(SECRET.encode(), b"x", "sha1").hexdigest(),
    "sha1 name, 256 digits": GOOD.replace("sha256", "sha1"),
    "truncated": GOOD[:-1],
    "longer": GOOD + "0",
    "spaces": f" {GOOD}",
    "twice": f"{GOOD}, {GOOD}",
    "non-ascii": "sha256=" + "ß" * 64,
    "full-width digits": "sha256=" + "\uff11" * 64,
    "non-hex": "sha256=" + "g" * 64,
    "surrogate": "sha256=\udcff",
    "other body": mac(b"y"),
}


@pytest.mark.parametrize("name", BAD_SIGNATURES)
def test_a_signature_that_is_not_exactly_right_is_refused(name: str) -> None:
    value = BAD_SIGNATURES[name]
    sent = {} if value is None else {"x-hub-signature-256": value}
    with pytest.raises(Unauthorized):
        github().verify(sent, b"x")


def test_sha1_is_never_accepted_beside_a_missing_or_wrong_256() -> None:
    old = "sha1=" + hmac.new(SECRET.encode(), b"x", "sha1").hexdigest()
    for more in ({}, {"x-hub-signature-256": mac(b"y")}):
        with pytest.raises(Unauthorized):
            github().verify({"x-hub-signature": old, **more}, b"x")


def test_without_a_secret_nothing_verifies_and_nothing_is_served() -> None:
    """T05: an unset secret is never 'no check'."""
    with pytest.raises(Unauthorized):
        github(webhook_secret=()).verify({"x-hub-signature-256": mac(b"x", "")}, b"x")
    assert pidispatch.forges_of(Settings()) == {}
    served = pidispatch.forges_of(Settings(webhook_secret=("s",)))
    assert list(served) == ["github"]


@given(st.text(), st.binary(max_size=40))
def test_no_text_in_the_signature_header_breaks_verifying(
    text: str, body: bytes
) -> None:
    with pytest.raises(Unauthorized):
        github().verify({"x-hub-signature-256": text}, body)


# -- parse --------------------------------------------------------------------


def test_a_labelled_issue_becomes_an_event_with_the_label_that_was_added() -> None:
    event = parse(labeled())
    assert event == Event(
        forge="github",
        delivery="d-1",
        name="issues",
        kind="label",
        action="labeled",
        repo="octo/lamp",
        repo_id="5",
        target=Target("issue", 7, "Crash", "It crashes."),
        actor=Actor("10", "maintainer"),
        author=Actor("20", "reporter"),
        association="NONE",
        labels=("bug", "pi:fix"),
        added=("pi:fix",),
        when=1767323045.0,
    )


def test_the_added_label_counts_even_if_the_set_does_not_show_it_yet() -> None:
    shape = labeled()
    shape["issue"]["labels"] = [{"name": "bug"}]
    assert parse(shape).labels == ("bug", "pi:fix")


KINDS = [
    ("issues", "labeled", "label"),
    ("issues", "opened", "label"),
    ("issues", "reopened", "label"),
    ("issues", "closed", "issue"),
]


@pytest.mark.parametrize(("event", "action", "kind"), KINDS)
def test_the_served_issue_actions_name_the_trigger_they_may_fire(
    event: str, action: str, kind: str
) -> None:
    parsed = parse(labeled(action=action), event)
    assert (parsed.kind, parsed.action, parsed.fault) == (kind, action, None)
    assert parsed.added == (("pi:fix",) if action == "labeled" else ())


@pytest.mark.parametrize(
    ("event", "action", "fault"),
    [
        ("issues", "unlabeled", "action-not-actionable"),
        ("issues", "edited", "action-not-actionable"),
        ("issues", "transferred", "action-not-actionable"),
        ("issues", "", "action-not-actionable"),
        ("issues", 3, "action-not-actionable"),
        ("issue_comment", "edited", "action-not-actionable"),
        ("pull_request", "converted_to_draft", "action-not-actionable"),
        ("pull_request_review", "dismissed", "action-not-actionable"),
        ("ping", None, "unhandled-event"),
        ("label", "created", "unhandled-event"),
        ("pull_request_review_comment", "created", "unhandled-event"),
        ("Issues", "labeled", "unhandled-event"),
    ],
)
def test_what_starts_nothing_says_why(event: str, action: Any, fault: str) -> None:
    parsed = parse(labeled(action=action), event)
    assert (parsed.kind, parsed.fault) == (None, fault)


@pytest.mark.parametrize(
    "name",
    [
        None,
        "",
        7,
        "lamp",
        "a/b/c",
        "/lamp",
        "octo/",
        "octo/..",
        "./lamp",
        "octo/la mp",
        "octo/lamp\n",
        "octo/\uff4camp",
        "octo/" + "x" * 101,
        ["octo/lamp"],
    ],
)
def test_a_repository_is_two_safe_segments_or_none(name: Any) -> None:
    parsed = parse(labeled(repository={"full_name": name}))
    assert (parsed.repo, parsed.fault) == (None, "no-repository")


@pytest.mark.parametrize("name", ["a.b/c_d", "octo/.github", "x/..y", "A-1/b.git"])
def test_odd_but_safe_repositories_are_taken(name: str) -> None:
    assert parse(labeled(repository={"full_name": name})).repo == name


@pytest.mark.parametrize(
    "number",
    [None, 0, -1, 2**53 + 1, 10**30, 1.0, 7.5, "7", True, [7], {"n": 7}],
)
def test_a_number_below_one_or_above_2_to_the_53_is_missing(number: Any) -> None:
    shape = labeled()
    shape["issue"]["number"] = number
    parsed = parse(shape)
    assert (parsed.target, parsed.fault) == (None, "missing-number")


def test_the_largest_number_is_taken() -> None:
    shape = labeled()
    shape["issue"]["number"] = 2**53
    target = parse(shape).target
    assert target is not None
    assert target.number == 2**53


@pytest.mark.parametrize(
    "sender",
    [
        None,
        "octocat",
        3,
        [],
        {"login": "x"},
        {"id": "10"},
        {"id": True},
        {"id": 0},
        {"id": 1.5},
        {"id": None},
        {"id": {"id": 1}},
    ],
)
def test_an_actor_id_of_a_wrong_type_is_missing(sender: Any) -> None:
    parsed = parse(labeled(sender=sender))
    assert parsed.actor is None
    assert parsed.fault is None


def test_wrong_types_anywhere_are_missing_fields_and_no_error() -> None:
    shape = labeled(issue={"number": 7, "title": 3, "body": [], "labels": "bug"})
    assert parse(shape).target == Target("issue", 7)
    shape["issue"] = {"number": 7, "labels": [None, 3, {"name": 5}, {"name": "a"}, []]}
    assert parse(shape).labels == ("a", "pi:fix")
    odds: tuple[Any, ...] = ("x", 1, [], True)
    for odd in odds:
        assert parse(labeled(issue=odd)).fault == "missing-number"


def test_the_body_is_data_and_arrives_untouched() -> None:
    """T28: quotes, NUL, shell and template syntax, a 64 kB title."""
    text = "$(rm -rf /) `id` \"' {{ x }} {% y %} \x00 \u202e " + "🎉" * 16_000
    shape = labeled()
    shape["issue"] |= {"title": text, "body": text}
    target = parse(shape).target
    assert target is not None
    assert (target.title, target.body) == (text, text)


def comment(**changes: Any) -> dict[str, Any]:
    said = {
        "id": 900,
        "body": "@pi fix this",
        "user": {"id": 10, "login": "maintainer"},
        "author_association": "MEMBER",
    }
    return labeled(action="created", label=None, comment=said | changes)


def test_a_comment_on_an_issue_and_on_a_pull_request_differ_by_target() -> None:
    shape = comment()
    event = parse(shape, "issue_comment")
    assert (event.kind, event.comment, event.comment_id) == (
        "comment",
        "@pi fix this",
        "900",
    )
    assert event.association == "MEMBER"
    assert event.author == Actor("10", "maintainer")
    assert event.target
    assert event.target.type == "issue"
    shape["issue"]["pull_request"] = {"url": "…"}
    event = parse(shape, "issue_comment")
    assert event.target
    assert event.target.type == "pull_request"


def test_an_issues_event_of_a_pull_request_fires_nothing() -> None:
    shape = labeled()
    shape["issue"]["pull_request"] = {"url": "…"}
    event = parse(shape)
    assert (event.kind, event.fault) == (None, "action-not-actionable")


def pull(action: str, **changes: Any) -> dict[str, Any]:
    shape = labeled(action=action)
    item = shape.pop("issue") | {"head": {"sha": "ab" * 20, "ref": "topic"}} | changes
    return shape | {"pull_request": item}


@pytest.mark.parametrize(
    "action", ["labeled", "opened", "synchronize", "reopened", "closed"]
)
def test_pull_request_actions_carry_the_head_commit(action: str) -> None:
    event = parse(pull(action), "pull_request")
    assert (event.kind, event.action, event.fault) == ("pull_request", action, None)
    assert event.head == "ab" * 20
    assert event.target
    assert event.target.type == "pull_request"


@pytest.mark.parametrize("head", [None, {"sha": "main"}, {"sha": 5}, "x", {}])
def test_a_head_that_is_no_commit_is_left_out(head: Any) -> None:
    assert parse(pull("opened", head=head), "pull_request").head is None


def test_a_review_is_judged_by_its_reviewer() -> None:
    said = {
        "id": 3,
        "state": "CHANGES_REQUESTED",
        "body": None,
        "user": {"id": 10, "login": "maintainer"},
        "author_association": "COLLABORATOR",
    }
    event = parse(pull("submitted") | {"review": said}, "pull_request_review")
    assert (event.action, event.review_state) == (
        "review_submitted",
        "changes_requested",
    )
    assert event.review == ""
    assert event.association == "COLLABORATOR"
    assert event.author == Actor("10", "maintainer")
    assert event.comment is None


@pytest.mark.parametrize(
    "when", [None, "", "0001-01-01T00:00:00Z", "soon", "2026-01-02", 5, "9" * 50]
)
def test_a_time_that_is_none_is_left_out(when: Any) -> None:
    shape = labeled()
    shape["issue"]["updated_at"] = when
    assert parse(shape).when is None


def test_a_form_body_carries_the_same_event_as_json() -> None:
    """The form is what GitHub's page offers first; its raw bytes are signed."""
    shape = labeled()
    shape["issue"]["title"] = "50% + ça & 🎉 = ?"
    told, body = demo.signed_delivery("issues", shape, SECRET, "d-1", form=True)
    sent = {name.lower(): value for name, value in told.items()}
    github().verify(sent, body)
    assert github().parse(sent, body) == parse(shape)


@pytest.mark.parametrize(
    "body", [b"", b"payload", b"x=1", b"payload={}&payload={}", b"payload=%ff", b"{}"]
)
def test_a_form_without_exactly_one_payload_is_malformed(body: bytes) -> None:
    with pytest.raises(Malformed):
        github().parse(headers(content_type=FORM), body)


MALFORMED = {
    "empty": b"",
    "a list": b"[]",
    "null": b"null",
    "a string": b'"x"',
    "cut off": b'{"action":"labe',
    "trailing": b"{} x",
    "NaN": b'{"x": NaN}',
    "Infinity": b'{"issue": {"number": Infinity}}',
    "single quotes": b"{'a': 1}",
    "invalid UTF-8 in a field we read": b'{"action": "\xff"}',
    "invalid UTF-8 in a field we skip": b'{"x": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "deep, in a field we skip": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep, in a field we read": b'{"action":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"issue":' * 50_000 + b"1" + b"}" * 50_000,
    "unclosed depth": b"[" * 1_000_000,
}


@pytest.mark.parametrize("name", MALFORMED)
def test_bytes_that_are_not_our_json_are_malformed(name: str) -> None:
    with pytest.raises(Malformed):
        github().parse(headers(), MALFORMED[name])


def test_a_byte_order_mark_is_tolerated_and_a_repeated_key_counts_last() -> None:
    body = json.dumps(labeled()).encode()
    assert github().parse(headers(), b"\xef\xbb\xbf" + body) == parse(labeled())
    twice = body[:-1] + b', "sender": {"id": 1, "id": 77}}'
    assert github().parse(headers(), twice).actor == Actor("77")


@pytest.mark.parametrize("missing", ["x-github-event", "x-github-delivery"])
@pytest.mark.parametrize("value", [None, "", "  "])
def test_event_and_delivery_headers_are_required(
    missing: str, value: str | None
) -> None:
    sent = headers()
    del sent[missing]
    if value is not None:
        sent[missing] = value
    with pytest.raises(Malformed):
        github().parse(sent, b"{}")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "action",
                    "issue",
                    "pull_request",
                    "comment",
                    "review",
                    "label",
                    "repository",
                    "sender",
                    "id",
                    "login",
                    "number",
                    "title",
                    "body",
                    "user",
                    "labels",
                    "name",
                    "full_name",
                    "state",
                    "updated_at",
                    "author_association",
                    "head",
                    "sha",
                ]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=25,
)
EVENTS = ("issues", "issue_comment", "pull_request", "pull_request_review", "ping")


@settings(max_examples=200, deadline=None)
@given(JSON, st.sampled_from(EVENTS), st.booleans())
def test_any_json_parses_to_a_sound_event_or_is_malformed(
    shape: object, name: str, ascii_only: bool
) -> None:
    body = json.dumps(shape, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        event = github().parse(headers(name), body)
    except Malformed:
        return
    assert event.fault is None or event.fault in pidispatch.DROP_REASONS
    if event.fault is None:
        assert event.kind and event.repo and event.target
        assert event.target.number >= 1


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_spoilt_delivery_never_verifies_and_never_breaks_the_parser(
    data: st.DataObject,
) -> None:
    body = json.dumps(labeled(), ensure_ascii=False).encode()
    at = data.draw(st.integers(0, len(body) - 1))
    cut = data.draw(st.integers(0, 4))
    spoilt = body[:at] + data.draw(st.binary(max_size=4)) + body[at + cut :]
    if spoilt == body:
        return
    with pytest.raises(Unauthorized):
        github().verify({"x-hub-signature-256": mac(body)}, spoilt)
    for media in ("application/json", FORM):
        try:
            github().parse(headers(content_type=media), spoilt)
        except Malformed:
            continue


# -- real payloads ------------------------------------------------------------


@pytest.mark.skipif(not manifest(), reason="the stored real payloads are not here")
@pytest.mark.parametrize("row", manifest(), ids=lambda row: row["file"])
def test_real_payloads_are_read_as_the_manifest_says(row: dict[str, Any]) -> None:
    body = (PAYLOADS / row["file"]).read_bytes()
    event = github().parse(headers(row["event"]), body)
    known = row["expect"]
    assert event.repo == known.get("repo")
    assert event.repo_id == (str(known["repo_id"]) if "repo_id" in known else None)
    assert (event.actor and event.actor.login) == known.get("actor")
    assert (event.actor and event.actor.id) == str(known["actor_id"])
    number = event.target.number if event.target else None
    assert number == known.get("number")
    if event.target:
        wanted = "pull_request" if known["is_pr"] else "issue"
        assert event.target.type == wanted
        assert event.target.title == known["title"]
        assert event.target.body == known.get("body", "")
    if event.added:
        assert event.added == (known["label_event"],)
    assert set(event.labels) == set(known["labels_now"])
    assert event.head == known.get("head_sha")
    said = event.review if event.review is not None else event.comment
    assert said == known.get("comment")
    assert event.association == known.get("association")
    ignored = row["kind"] in ("ignore", "ping")
    assert (event.fault is not None) == ignored
    assert github().event_of(body) == row["event"] or ignored


# -- who asked ----------------------------------------------------------------


OTHER = Actor("20")
MAINTAINER = Actor("10", "maintainer")


def acted(
    action: str, association: str | None, author: Actor | None = MAINTAINER
) -> Event:
    return Event(
        forge="github",
        delivery="d",
        name="issue_comment",
        kind="comment",
        action=action,
        repo="octo/lamp",
        target=Target("issue", 7),
        actor=MAINTAINER,
        author=author,
        association=association,
    )


@pytest.mark.parametrize("association", ["OWNER", "MEMBER", "COLLABORATOR"])
@pytest.mark.parametrize(
    "action", ["created", "opened", "synchronize", "reopened", "review_submitted"]
)
def test_the_association_of_whoever_acted_lets_work_start(
    action: str, association: str
) -> None:
    assert github().authority(acted(action, association)) == "allowed"
    asking = github(github_authority="api")
    assert asking.authority(acted(action, association)) == "ask"


@pytest.mark.parametrize(
    "association",
    ["NONE", "CONTRIBUTOR", "FIRST_TIMER", "MANNEQUIN", "owner", "OWNER "],
)
def test_any_other_association_is_a_final_no(association: str) -> None:
    """T24: nobody without a say starts a run."""
    for source in ("payload", "api"):
        forge = github(github_authority=source)
        assert forge.authority(acted("created", association)) == "denied"


@pytest.mark.parametrize("action", ["created", "opened", "synchronize", "reopened"])
def test_another_persons_association_decides_nothing(action: str) -> None:
    for association in ("OWNER", "NONE"):
        assert github().authority(acted(action, association, OTHER)) == "ask"
    assert github().authority(acted(action, "OWNER", None)) == "ask"
    assert github().authority(acted(action, None)) == "ask"


def test_only_those_who_may_label_can_so_the_payload_decides() -> None:
    for source in ("payload", "api"):
        forge = github(github_authority=source)
        assert forge.authority(acted("labeled", "NONE", OTHER)) == "allowed"
        # T24: an issue form labels in the reporter's own name
        assert forge.authority(acted("labeled", "NONE")) == "ask"
        assert forge.authority(acted("labeled", "OWNER")) == "allowed"


def test_closing_is_always_asked_because_authors_may_close_their_own() -> None:
    assert github().authority(acted("closed", "OWNER")) == "ask"


# -- the API ------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[demo.FakeGitHub]:
    tokens = [demo.Token("t0ken", "pi-bot")]
    with demo.FakeGitHub(tokens, root=tmp_path / "forge") as forge:
        repo = forge.create_repo("octo/lamp", issues={7: {"title": "Crash"}})
        repo.add_collaborator("maintainer", "write")
        yield forge


def client(fake: demo.FakeGitHub, **fields: Any) -> GitHub:
    fields.setdefault("github_pat", "t0ken")
    return github(github_api_url=fake.url, **fields)


def asker(fake: demo.FakeGitHub, login: str) -> Event:
    event = acted("created", None)
    user = fake.data.accounts.user(login)
    return replace(event, actor=Actor(str(user.id), login))


@pytest.mark.parametrize(
    ("role", "may"),
    [
        ("admin", True),
        ("maintain", True),
        ("write", True),
        ("triage", False),
        ("read", False),
        ("none", False),
    ],
)
def test_write_access_and_nothing_less_may_start_work(
    fake: demo.FakeGitHub, role: str, may: bool
) -> None:
    fake.repos["octo/lamp"].add_collaborator("somebody", role)
    assert client(fake).ask(asker(fake, "somebody")) is may


def test_somebody_the_forge_does_not_know_may_not(fake: demo.FakeGitHub) -> None:
    event = replace(acted("created", None), actor=Actor("1", "nobody[bot]"))
    assert client(fake).ask(event) is False
    assert fake.requests("GET", r"/collaborators/nobody(%5B|\[)bot(%5D|\])/permission")


def test_a_login_that_passed_to_another_account_proves_nothing(
    fake: demo.FakeGitHub,
) -> None:
    event = asker(fake, "maintainer")
    assert client(fake).ask(event) is True
    former = replace(event, actor=Actor("3", "maintainer"))
    assert client(fake).ask(former) is False


@pytest.mark.parametrize("status", [0, 301, 302, 401, 403, 418, 429, 500, 503])
def test_what_cannot_be_told_is_no_answer(fake: demo.FakeGitHub, status: int) -> None:
    """T24: an unknown permission is retried, never guessed."""
    fake.fail_next("GET", "/permission", status=status)
    with pytest.raises(InfraError) as told:
        client(fake).ask(asker(fake, "maintainer"))
    assert "maintainer" not in told.value.message
    assert client(fake).ask(asker(fake, "maintainer")) is True


@pytest.fixture(params=["drips", "floods", "inflates"])
def endless(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server whose every answer has no end."""
    import gzip

    done = threading.Event()
    packed = request.param == "inflates"
    piece = {"drips": b" ", "floods": b" " * 65_536}.get(request.param, b"")
    piece = piece or gzip.compress(b" " * 1_000_000)

    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 40))
            if packed:
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            with contextlib.suppress(OSError):
                while not done.wait(0.02 if len(piece) == 1 else 0):
                    self.wfile.write(piece)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    done.set()
    server.shutdown()
    server.server_close()


def test_an_answer_without_end_is_no_answer_and_ends(
    endless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte may come in time; the poller and the inbox would wait for ever."""
    monkeypatch.setattr(pidispatch, "API_SECONDS", 0.3)
    monkeypatch.setattr(pidispatch, "API_BYTES", 4_000_000)
    forge = GitHub(Settings(github_api_url=endless, github_pat="t"), requests.Session())
    began = time.monotonic()
    with pytest.raises(InfraError, match="without end"):
        forge.default_branch("octo/spoon")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("kind", ["github", "gitlab", "forgejo"])
def test_a_list_that_always_has_a_next_page_ends(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pidispatch, "API_PAGES", 5)
    pages = itertools.count()

    class Pages(requests.Session):
        def request(self, *_: Any, **__: Any) -> requests.Response:
            rows = [{"id": next(pages), "body": "", "user": None} for _ in range(100)]
            answer = requests.Response()
            answer.status_code, answer.raw = 200, raw_answer(json.dumps(rows).encode())
            return answer

    given = {"github_pat": "t", "gitlab_token": "t", "forgejo_token": "t"}
    settings = Settings(**given, forgejo_url="https://f.example")
    forge = pidispatch._FORGE_CLASSES[kind](settings, Pages())
    read: Any = forge._rows if isinstance(forge, pidispatch.Forgejo) else forge._pages
    place = ("/x", "o/r") if kind == "forgejo" else ("/x", "t")
    with pytest.raises(InfraError, match="without end"):
        list(read("read", list[dict[str, Any]], *place))


class Canned(requests.Session):
    """A session that answers with fixed bytes, and remembers what it was asked."""

    def __init__(self, status: int, body: bytes, **said: str) -> None:
        super().__init__()
        self.status, self.body, self.said = status, body, said
        self.asked: dict[str, Any] = {}

    def request(  # type: ignore[override]
        self, method: str, url: str, **more: Any
    ) -> requests.Response:
        self.asked = {"method": method, "url": url, **more}
        answer = requests.Response()
        answer.status_code = self.status
        answer.raw = raw_answer(self.body)
        answer.headers.update({k.replace("_", "-"): v for k, v in self.said.items()})
        return answer


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"permission": 3}',
        b'{"permission": null}',
        b"\xff",
        b"[" * 100000,
    ],
)
def test_an_odd_body_is_no_answer_either(body: bytes) -> None:
    forge = github(Canned(200, body), github_pat="t")
    with pytest.raises(InfraError):
        forge.ask(acted("created", None))


def test_calls_have_timeouts_and_follow_no_redirect_with_a_token() -> None:
    session = Canned(302, b"", location="https://elsewhere.example/")
    forge = github(session, github_pat="t")
    with pytest.raises(Rejected):
        forge.default_branch("octo/lamp")
    assert session.asked["allow_redirects"] is False
    assert session.asked["timeout"] == pidispatch.API_TIMEOUT


def test_a_netrc_entry_does_not_replace_the_token(
    fake: demo.FakeGitHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login other password wrong\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    assert client(fake).default_branch("octo/lamp") == "main"


@pytest.mark.parametrize(
    ("status", "said", "body", "passes"),
    [
        (403, {"retry_after": "60"}, b"{}", True),
        (403, {"x_ratelimit_remaining": "0"}, b"{}", True),
        (403, {}, b'{"message": "API rate limit exceeded for user"}', True),
        (403, {}, b'{"message": "Resource not accessible"}', False),
        (429, {}, b"{}", True),
        (502, {}, b"", True),
        (404, {}, b"{}", False),
        (422, {}, b"{}", False),
    ],
)
def test_rate_limits_may_pass_and_other_refusals_stand(
    status: int, said: Mapping[str, str], body: bytes, passes: bool
) -> None:
    forge = github(Canned(status, body, **said), github_pat="t")
    with pytest.raises(InfraError if passes else Rejected):
        forge.default_branch("octo/lamp")


def test_a_dead_api_is_infrastructure(unused_port: int) -> None:
    forge = github(github_pat="t", github_api_url=f"http://127.0.0.1:{unused_port}")
    with pytest.raises(InfraError):
        forge.default_branch("octo/lamp")


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def test_our_own_id_is_asked_once(fake: demo.FakeGitHub) -> None:
    """T21: what makes an event our own is the token's account."""
    forge = client(fake)
    wanted = str(fake.data.accounts.user("pi-bot").id)
    assert [forge.own_id(), forge.own_id()] == [wanted, wanted]
    assert len(fake.requests("GET", "^/user$")) == 1


def test_without_a_token_there_is_no_identity_of_ours(fake: demo.FakeGitHub) -> None:
    assert client(fake, github_pat=None).own_id() is None
    assert fake.requests() == []


def test_an_identity_that_cannot_be_read_is_asked_again(fake: demo.FakeGitHub) -> None:
    forge = client(fake)
    for status in (500, 401):
        fake.fail_next("GET", "^/user$", status=status)
        with pytest.raises(InfraError):
            forge.own_id()
    assert forge.own_id() is not None


# -- credentials --------------------------------------------------------------


def test_a_personal_token_is_the_credential_and_no_token_is_a_refusal() -> None:
    made = github(github_pat="t0ken").credential("octo/lamp")
    assert (made.username, made.password) == ("x-access-token", "t0ken")
    with pytest.raises(Refused) as told:
        github().credential("octo/lamp")
    assert told.value.reason == "forge-token-unavailable"
    assert told.value.reason in pidispatch.REFUSALS
    assert "GITHUB_PAT" in str(told.value.fix)


def fake_gh(folder: Path, script: str) -> None:
    tool = folder / "gh"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


def test_gh_gives_its_token_for_the_host_and_is_not_run_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gh(tmp_path, f'echo "$@" >> {tmp_path}/calls; echo gho_x')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    forge = github(github_auth_source="gh", github_api_url="https://git.corp/api/v3")
    assert {forge.credential("a/b").password for _ in range(3)} == {"gho_x"}
    calls = (tmp_path / "calls").read_text()
    assert calls == "auth token --hostname git.corp\n"


# -- publish: agent -----------------------------------------------------------


def test_only_what_refuses_a_direct_push_protects_a_branch(
    fake: demo.FakeGitHub,
) -> None:
    """`protected` is true for any ruleset, also one about branch names alone."""
    forge, repo = client(fake), fake.repos["octo/lamp"]
    assert not forge.protected("octo/lamp", "main")
    repo.rules.append("branch_name_pattern")
    assert not forge.protected("octo/lamp", "main")
    repo.protect("main", by="ruleset")
    assert forge.protected("octo/lamp", "main")
    repo.unprotect("main")
    repo.protect("main")
    assert forge.protected("octo/lamp", "main")
    repo.rules.clear()
    assert forge.protected("octo/lamp", "main")


@pytest.mark.parametrize("status", [403, 404, 500, 429])
def test_a_protection_that_the_api_does_not_tell_is_infrastructure(
    fake: demo.FakeGitHub, status: int
) -> None:
    for path in ("/rules/branches/", "/branches/main$"):
        fake.fail_next("GET", path, status=status)
        with pytest.raises(InfraError):
            client(fake).protected("octo/lamp", "main")


def test_a_box_is_given_the_token_by_the_names_that_gh_reads() -> None:
    plain = github(github_pat="t0ken").agent_environment("octo/lamp")
    assert plain["GH_TOKEN"] == plain[pidispatch.GIT_PASSWORD] == "t0ken"
    assert "GH_HOST" not in plain
    api = "https://git.corp:8443/api/v3"
    server = github(github_pat="t0ken", github_api_url=api)
    found = server.agent_environment("octo/lamp")
    assert found["GH_HOST"] == "git.corp:8443"
    assert found["GH_ENTERPRISE_TOKEN"] == "t0ken"
    with pytest.raises(Refused):
        github().agent_environment("octo/lamp")


@pytest.mark.parametrize("script", ["exit 1", "true", None])
def test_a_gh_that_is_absent_or_logged_out_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    if script:
        fake_gh(tmp_path, script)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match="gh"):
        github(github_auth_source="gh").credential("a/b")


def test_a_gh_that_hangs_is_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(argv: list[str], **_: Any) -> None:
        raise subprocess.TimeoutExpired(argv, 10)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(InfraError):
        github(github_auth_source="gh").credential("a/b")


@pytest.fixture(scope="session")
def pem(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An App's key file and its public half."""
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, 2048)
    private = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    public = key.public_key().public_bytes(
        s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo
    )
    file = tmp_path_factory.mktemp("app") / "app.pem"
    file.write_bytes(private)
    return file, public.decode()


class Now:
    def __init__(self) -> None:
        self.time = 1_700_000_000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def app(pem: tuple[Path, str], tmp_path: Path) -> Iterator[tuple[demo.FakeGitHub, Now]]:
    reach = frozenset({"octo/lamp", "octo/other"})
    made = demo.App(12, "pi-app", 99, reach, public_key=pem[1])
    now = Now()
    with demo.FakeGitHub(app=made, root=tmp_path / "forge", clock=now) as forge:
        for name in (*reach, "octo/third"):
            forge.create_repo(name, issues={7: {"title": "Crash"}})
        forge.data.accounts.user("pi-app[bot]")
        yield forge, now


def app_client(app: tuple[demo.FakeGitHub, Now], key: Path, **more: Any) -> GitHub:
    fields: dict[str, Any] = {
        "webhook_secret": (SECRET,),
        "github_auth_source": "app",
        "github_app_id": "12",
        "github_app_key": key,
        "github_api_url": app[0].url,
    }
    settings = Settings(**(fields | more))
    return GitHub(settings, requests.Session(), clock=app[1])


def test_an_app_mints_a_token_for_one_repository(
    app: tuple[demo.FakeGitHub, Now], pem: tuple[Path, str]
) -> None:
    forge = app_client(app, pem[0])
    first, second = forge.credential("octo/lamp"), forge.credential("octo/lamp")
    assert first.password != second.password
    assert [t.repositories for t in app[0].data.minted] == [
        frozenset({"octo/lamp"})
    ] * 2


def test_an_apps_token_for_a_box_may_do_the_least_in_one_repository(
    app: tuple[demo.FakeGitHub, Now], pem: tuple[Path, str]
) -> None:
    forge = app_client(app, pem[0])
    found = forge.agent_environment("octo/lamp")
    [made] = app[0].data.minted
    assert found["GH_TOKEN"] == found[pidispatch.GIT_PASSWORD] == made.value
    assert made.repositories == {"octo/lamp"}
    write = dict.fromkeys(("contents", "issues", "pull_requests"), "write")
    assert made.permissions == {**write, "metadata": "read"}
    assert forge.agent_environment("octo/lamp") != found, "each job has its own"


def test_our_own_calls_reuse_an_apps_token_until_it_is_nearly_over(
    app: tuple[demo.FakeGitHub, Now], pem: tuple[Path, str]
) -> None:
    forge = app_client(app, pem[0])
    forge.default_branch("octo/lamp")
    app[1].time += 3_000
    forge.default_branch("octo/lamp")
    assert len(app[0].data.minted) == 1
    app[1].time += 400
    forge.default_branch("octo/lamp")
    assert len(app[0].data.minted) == 2
    forge.default_branch("octo/other")
    assert app[0].data.minted[-1].repositories == frozenset({"octo/other"})


def test_an_app_acts_as_its_bot_user(
    app: tuple[demo.FakeGitHub, Now], pem: tuple[Path, str]
) -> None:
    forge = app_client(app, pem[0], github_app_installation="99")
    assert forge.own_id() == str(app[0].data.accounts.user("pi-app[bot]").id)


def test_an_app_that_cannot_be_used_is_a_refusal(
    app: tuple[demo.FakeGitHub, Now], pem: tuple[Path, str], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("not a key")
    for forge in (
        app_client(app, bad),
        app_client(app, tmp_path / "absent.pem"),
        app_client(app, pem[0], github_app_id=None),
        app_client(app, pem[0], github_app_id="13"),
    ):
        with pytest.raises(Refused) as told:
            forge.credential("octo/lamp")
        assert told.value.reason == "forge-token-unavailable"
    with pytest.raises(Refused):
        app_client(app, pem[0]).credential("octo/third")


def test_an_app_api_that_is_down_is_infrastructure(
    app: tuple[demo.FakeGitHub, Now], pem: tuple[Path, str]
) -> None:
    app[0].fail_next("POST", "access_tokens", status=502)
    with pytest.raises(InfraError):
        app_client(app, pem[0]).credential("octo/lamp")


def test_a_credential_does_not_show_its_token() -> None:
    assert "t0ken" not in repr(github(github_pat="t0ken").credential("octo/lamp"))


# -- the repository and its requests ------------------------------------------


@pytest.mark.parametrize(
    ("api", "url"),
    [
        ("https://api.github.com", "https://github.com/a/b.git"),
        ("https://git.corp/api/v3", "https://git.corp/a/b.git"),
        ("http://127.0.0.1:8081", "http://127.0.0.1:8081/a/b.git"),
        ("http://127.0.0.1:8081/api/v3", "http://127.0.0.1:8081/a/b.git"),
        ("https://git.corp:8443/odd/path", "https://git.corp:8443/a/b.git"),
    ],
)
def test_the_clone_url_follows_from_the_api(api: str, url: str) -> None:
    assert github(github_api_url=api).clone_url("a/b") == url


def test_a_comment_is_posted_once_and_found_on_any_page(fake: demo.FakeGitHub) -> None:
    repo, target = fake.repos["octo/lamp"], Target("issue", 7)
    for n in range(pidispatch.PAGE_SIZE + 20):
        repo.add_comment(7, f"chatter {n}", "somebody")
    for _ in range(2):
        client(fake).comment("octo/lamp", target, "Done.", "<!-- job gh-1 end -->")
    client(fake).comment("octo/lamp", target, "Also.", "<!-- job gh-2 end -->")
    ours = [c.body for c in repo.comments_on(7) if c.user == "pi-bot"]
    assert ours == [
        "Done.\n\n<!-- job gh-1 end -->",
        "Also.\n\n<!-- job gh-2 end -->",
    ]


def test_a_comment_whose_answer_was_lost_is_not_posted_again(
    fake: demo.FakeGitHub,
) -> None:
    fake.fail_next("POST", "/comments", status=502, moment="after")
    target, text = Target("issue", 7), "Done. <!-- m -->"
    with pytest.raises(InfraError):
        client(fake).comment("octo/lamp", target, text, "<!-- m -->")
    client(fake).comment("octo/lamp", target, text, "<!-- m -->")
    assert [c.body for c in fake.repos["octo/lamp"].comments_on(7)] == [text]


def test_a_strangers_copy_of_our_marker_does_not_silence_us(
    fake: demo.FakeGitHub,
) -> None:
    repo = fake.repos["octo/lamp"]
    repo.add_comment(7, "hush <!-- m -->", "somebody")
    client(fake).comment("octo/lamp", Target("issue", 7), "Done.", "<!-- m -->")
    assert [c.user for c in repo.comments_on(7)] == ["somebody", "pi-bot"]


def open_one(fake: demo.FakeGitHub, head: str = "pi/issue-7") -> pidispatch.Request:
    repo = fake.repos["octo/lamp"]
    if repo.branch(head) is None:
        repo.commit(head, {"fix.txt": head}, "Fix")
    return client(fake).open_request("octo/lamp", head, "main", "Fix it", "Body")


def test_a_request_is_opened_found_and_retitled(fake: demo.FakeGitHub) -> None:
    made = open_one(fake)
    assert made.title == "Fix it"
    assert made.url.endswith(f"/octo/lamp/pull/{made.number}")
    forge = client(fake)
    assert forge.find_request("octo/lamp", "pi/issue-7") == made
    forge.retitle_request("octo/lamp", made.number, "[r1/2] Fix it")
    found = forge.find_request("octo/lamp", "pi/issue-7")
    assert found and found.title == "[r1/2] Fix it"


def test_opening_again_gives_the_one_that_is_open(fake: demo.FakeGitHub) -> None:
    assert open_one(fake) == open_one(fake)
    assert len(fake.repos["octo/lamp"].pulls) == 1


def test_a_replicas_request_is_never_taken_for_its_siblings(
    fake: demo.FakeGitHub,
) -> None:
    open_one(fake, "pi/issue-7-r1")
    forge = client(fake)
    assert forge.find_request("octo/lamp", "pi/issue-7-r2") is None
    assert forge.find_request("octo/lamp", "pi/issue-7") is None


def test_a_forks_branch_of_the_same_name_is_not_ours(fake: demo.FakeGitHub) -> None:
    fake.repos["octo/lamp"].open_pull(
        "pi/issue-7", fork_owner="stranger", files={"x": "y"}
    )
    assert client(fake).find_request("octo/lamp", "pi/issue-7") is None


def test_rows_that_the_filter_let_through_are_compared_all_the_same() -> None:
    row = {
        "number": 3,
        "html_url": "u",
        "head": {"ref": "other", "repo": {"full_name": "octo/lamp"}},
    }
    forge = github(Canned(200, json.dumps([row]).encode()), github_pat="t")
    assert forge.find_request("octo/lamp", "pi/issue-7") is None
    row["head"] = {"ref": "pi/issue-7", "repo": None}
    forge = github(Canned(200, json.dumps([row]).encode()), github_pat="t")
    assert forge.find_request("octo/lamp", "pi/issue-7") is None


def test_a_closed_request_is_left_alone_and_a_new_one_is_opened(
    fake: demo.FakeGitHub,
) -> None:
    first = open_one(fake)
    repo = fake.repos["octo/lamp"]
    repo.close(repo.pulls[first.number])
    assert client(fake).find_request("octo/lamp", "pi/issue-7") is None
    assert open_one(fake).number != first.number


def test_a_request_that_cannot_be_opened_says_so(fake: demo.FakeGitHub) -> None:
    with pytest.raises(Rejected) as told:
        client(fake).open_request("octo/lamp", "no-such-branch", "main", "T", "B")
    assert told.value.status == 422


# -- stored deliveries without headers ----------------------------------------


def test_a_trial_takes_the_event_from_header_option_body_then_name(
    tmp_path: Path,
) -> None:
    forge = pidispatch.trial_forge("github", None)
    file = tmp_path / "issues.labeled.json"
    file.write_text(json.dumps(comment()))

    def told(*lines: str, event: str | None = None) -> str:
        return pidispatch.trial_headers(forge, file, lines, event)["x-github-event"]

    assert told("X-GitHub-Event: ping", event="issues") == "ping"
    assert told(event="pull_request") == "pull_request"
    assert told() == "issue_comment"
    file.write_text("{}")
    assert told() == "issues"


def test_a_trial_without_a_delivery_id_is_a_dry_run(tmp_path: Path) -> None:
    forge = pidispatch.trial_forge("github", SECRET)
    file = tmp_path / "x.json"
    body = json.dumps(labeled()).encode()
    file.write_bytes(body)
    sent = pidispatch.trial_headers(forge, file, [], None)
    assert forge.parse(sent, body).delivery == "dry-run"
    forge.verify({"x-hub-signature-256": mac(body)}, body)


def test_a_trial_names_what_it_cannot_use(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="githib"):
        pidispatch.trial_forge("githib", None)
    forge = pidispatch.trial_forge("github", None)
    with pytest.raises(ConfigError, match="no colon"):
        pidispatch.trial_headers(forge, tmp_path / "x", ["no colon"], "issues")


def test_a_forge_is_one_class_and_one_row() -> None:
    """No forge's name stands in a condition outside its class."""
    text = Path(pidispatch.__file__).read_text("utf-8")
    start = text.index("\n# forges\n")
    section = text[start : text.index("\n# store\n", start)]
    outside = section[: section.index("class GitHub(")]
    assert '== "github"' not in outside
    assert set(pidispatch._FORGE_CLASSES) <= set(pidispatch.FORGES)
    for kind, made in pidispatch._FORGE_CLASSES.items():
        assert made.kind == kind
        names = set(Settings.__struct_fields__)
        assert made.secret_field in names
