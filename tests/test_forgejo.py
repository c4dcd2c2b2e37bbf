"""Forgejo and Gitea: what they sign and say, who may, and which label was added."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import requests
from conftest import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_forges import EVENTS, JSON, MALFORMED, Canned
from world import REPO, SECRET, TOKEN, World
from world import world as make_world

import pidispatch
import pidispatch_demo as demo
from pidispatch import (
    Actor,
    ConfigError,
    Event,
    Forgejo,
    InfraError,
    Malformed,
    Rejected,
    Settings,
    Target,
    Unauthorized,
)

PAYLOADS = Path(
    os.environ.get("PIDISPATCH_PAYLOADS")
    or Path(__file__).parent.parent.parent / "shared" / "payloads"
)
FORM = "application/x-www-form-urlencoded"
URGENT = "pi:urgent"
SIGNATURES = ("x-forgejo-signature", "x-gitea-signature", "x-hub-signature-256")


def forgejo(session: requests.Session | None = None, **fields: Any) -> Forgejo:
    fields.setdefault("forgejo_webhook_secret", (SECRET,))
    fields.setdefault("forgejo_url", "https://forge.example")
    return Forgejo(Settings(**fields), session or requests.Session())


def mac(body: bytes, secret: str = SECRET) -> str:
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


def signature(name: str, body: bytes, secret: str = SECRET) -> dict[str, str]:
    return {name: "sha256=" * name.startswith("x-hub") + mac(body, secret)}


def headers(event: str = "issues", **more: str) -> dict[str, str]:
    named = {key.replace("_", "-"): value for key, value in more.items()}
    known = {"x-forgejo-event": event, "x-forgejo-delivery": "d-1"}
    return known | {"content-type": "application/json"} | named


def issue(action: str = "label_updated", **changes: Any) -> dict[str, Any]:
    """An `issues` payload; a change None removes the key."""
    shape = {
        "action": action,
        "number": 7,
        "issue": {
            "number": 7,
            "title": "Crash",
            "body": "It crashes.",
            "user": {"id": 20, "login": "reporter"},
            "labels": [{"name": "bug"}, {"name": "pi:fix"}],
            "pull_request": None,
            "updated_at": "2026-01-02T04:04:05+01:00",
            "closed_at": None,
        },
        "repository": {
            "id": 5,
            "full_name": "octo/lamp",
            "permissions": {"admin": True, "push": True},
        },
        "sender": {"id": 10, "login": "maintainer"},
    }
    shape.update(changes)
    return {key: value for key, value in shape.items() if value is not None}


def pull(action: str, **changes: Any) -> dict[str, Any]:
    shape = issue(action)
    head = {"ref": "topic", "sha": "ab" * 20, "repo": {"full_name": "octo/lamp"}}
    item = shape.pop("issue") | {"head": head}
    del item["pull_request"]
    return shape | {"pull_request": item | changes}


def parse(shape: object, event: str = "issues", **more: str) -> Event:
    return forgejo().parse(headers(event, **more), json.dumps(shape).encode())


# -- verify -------------------------------------------------------------------


@pytest.mark.parametrize("name", SIGNATURES)
def test_any_one_of_the_three_signatures_holds_in_its_own_form(name: str) -> None:
    """T13: bare hex in two headers, `sha256=` before it in the third."""
    body = '{ "title" :\t"ça \\u003cb\\u003e 🎉",\r\n"n":1.0 }\r\n'.encode()
    forgejo().verify(headers() | signature(name, body), body)
    [(_, good)] = signature(name, body).items()
    bare, _, digits = good.rpartition("=")
    other = digits if bare else f"sha256={digits}"
    for wrong in ("", "sha256=", other, good[:-1], f"{good}0", f" {good}", "ß" * 64):
        with pytest.raises(Unauthorized):
            forgejo().verify(headers() | {name: wrong}, body)
    forgejo().verify({name: good.replace(digits, digits.upper())}, body)
    with pytest.raises(Unauthorized):
        forgejo().verify(headers() | {name: good}, body + b" ")


def test_of_several_signatures_all_must_hold() -> None:
    body = b"{}"
    every: dict[str, str] = {}
    for name in SIGNATURES:
        every |= signature(name, body)
    forgejo().verify(every, body)
    for name in SIGNATURES:
        for wrong in ("", mac(b"other"), "sha256=" + mac(b"other")):
            with pytest.raises(Unauthorized):
                forgejo().verify(every | {name: wrong}, body)


def test_an_empty_signature_never_holds_whatever_the_secret() -> None:
    """T05: a webhook without a secret signs with nothing."""
    told, body = demo.forgejo_delivery("issues", issue(), "", "g")
    sent = {name.lower(): value for name, value in told.items()}
    assert sent["x-forgejo-signature"] == ""
    for secrets in ((), ("",), (SECRET,)):
        with pytest.raises(Unauthorized):
            forgejo(forgejo_webhook_secret=secrets).verify(sent, body)
    unset = signature("x-forgejo-signature", b"{}", "")
    with pytest.raises(Unauthorized):
        forgejo(forgejo_webhook_secret=()).verify(unset, b"{}")
    assert pidispatch.forges_of(Settings(forgejo_url="https://x.example")) == {}


@pytest.mark.parametrize(
    "name",
    ["x-gogs-signature", "x-hub-signature", "x-github-signature", "authorization"],
)
def test_no_other_header_is_a_credential(name: str) -> None:
    body = b"{}"
    sha1 = "sha1=" + hmac.new(SECRET.encode(), body, "sha1").hexdigest()
    for value in (mac(body), "sha256=" + mac(body), sha1):
        with pytest.raises(Unauthorized):
            forgejo().verify({name: value}, body)


def test_any_of_several_secrets_holds_so_that_one_can_be_rotated() -> None:
    forge = forgejo(forgejo_webhook_secret=("old", "new"))
    for secret in ("old", "new"):
        forge.verify(signature("x-gitea-signature", b"x", secret), b"x")
    with pytest.raises(Unauthorized):
        forge.verify(signature("x-gitea-signature", b"x", "older"), b"x")


def test_a_form_is_signed_over_the_json_inside_it() -> None:
    shape = issue()
    shape["issue"]["title"] = "50% + ça & 🎉 = ?"
    told, body = demo.forgejo_delivery("issues", shape, SECRET, "d-1", form=True)
    sent = {name.lower(): value for name, value in told.items()}
    forge = forgejo()
    forge.verify(sent, body)
    assert forge.parse(sent, body) == parse(shape)
    over_the_form = {name: signature(name, body)[name] for name in SIGNATURES}
    with pytest.raises(Unauthorized):
        forge.verify(sent | over_the_form, body)
    for broken in (b"", b"x=1", body + b"&" + body, b"{}"):
        with pytest.raises(Unauthorized):
            forge.verify(sent, broken)


def test_one_json_in_another_form_is_the_same_signed_delivery() -> None:
    """The signature does not cover the form, so the form must not make it new."""
    told, body = demo.forgejo_delivery("issues", issue(), SECRET, "g", form=True)
    sent = {name.lower(): value for name, value in told.items()}
    text = urllib.parse.parse_qs(body.decode())["payload"][0].encode()
    other = b"more=1&payload=" + b"".join(b"%%%02x" % byte for byte in text)
    forge = forgejo()
    forge.verify(sent, other)
    plain = sent | {"content-type": "application/json"}
    forge.verify(plain, text)
    signed = [forge.signed(sent, body), forge.signed(sent, other)]
    assert [*signed, forge.signed(plain, text)] == [text] * 3


@given(st.text(), st.sampled_from(SIGNATURES), st.binary(max_size=40))
def test_no_text_in_a_signature_header_breaks_verifying(
    text: str, name: str, body: bytes
) -> None:
    for media in ("application/json", FORM):
        with pytest.raises(Unauthorized):
            forgejo().verify({"content-type": media, name: text}, body)


# -- parse --------------------------------------------------------------------


def test_a_label_event_tells_the_set_and_not_what_was_added() -> None:
    event = parse(issue())
    assert event == Event(
        forge="forgejo",
        delivery="d-1",
        name="issues",
        kind="label",
        action="label_updated",
        repo="octo/lamp",
        repo_id="5",
        target=Target("issue", 7, "Crash", "It crashes."),
        actor=Actor("10", "maintainer"),
        author=Actor("20", "reporter"),
        labels=("bug", "pi:fix"),
        added=None,
        when=1767323045.0,
        remember=("bug", "pi:fix"),
    )


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ({"added_labels": [{"name": "pi:fix"}], "removed_labels": None}, ("pi:fix",)),
        ({"added_labels": None, "removed_labels": [{"name": "x"}]}, ()),
        ({"added_labels": None, "removed_labels": None}, None),
        ({"added_labels": [], "removed_labels": []}, None),
        ({"added_labels": "pi:fix"}, None),
        ({"title": {"from": "x"}}, None),
        ([], None),
        (3, None),
    ],
)
def test_newer_giteas_that_tell_what_was_added_are_believed(
    changes: Any, added: tuple[str, ...] | None
) -> None:
    assert parse(issue(changes=changes)).added == added
    assert parse(issue("opened", changes=changes)).added is None


def test_a_cleared_set_is_empty_although_it_is_still_listed() -> None:
    event = parse(issue("label_cleared"))
    assert (event.kind, event.fault) == (None, "action-not-actionable")
    assert (event.labels, event.remember) == ((), ())


@pytest.mark.parametrize(
    ("event", "action", "kind"),
    [
        ("issues", "opened", "label"),
        ("issues", "reopened", "label"),
        ("issues", "closed", "issue"),
        ("issue_comment", "created", "comment"),
        *(
            ("pull_request", action, "pull_request")
            for action in pidispatch.FORGES["forgejo"].pr_actions
        ),
    ],
)
def test_the_served_actions_name_the_trigger_they_may_fire(
    event: str, action: str, kind: str
) -> None:
    shape = pull(action) if event == "pull_request" else issue(action)
    parsed = parse(shape, event)
    assert (parsed.kind, parsed.action, parsed.fault) == (kind, action, None)


@pytest.mark.parametrize(
    ("event", "action", "fault"),
    [
        ("issues", "labeled", "action-not-actionable"),
        ("issues", "assigned", "action-not-actionable"),
        ("issues", "edited", "action-not-actionable"),
        ("issue_comment", "edited", "action-not-actionable"),
        ("pull_request", "synchronize", "action-not-actionable"),
        ("pull_request_approved", "reviewed", "unhandled-event"),
        ("pull_request_rejected", "reviewed", "unhandled-event"),
        ("pull_request_comment", "reviewed", "unhandled-event"),
        ("pull_request_comment", "created", "unhandled-event"),
        ("push", None, "unhandled-event"),
        ("action_run_failure", None, "unhandled-event"),
    ],
)
def test_what_starts_nothing_says_why(event: str, action: Any, fault: str) -> None:
    parsed = parse(issue(action), event)
    assert (parsed.kind, parsed.fault) == (None, fault)
    assert parsed.remember == ("bug", "pi:fix"), "its labels are remembered"


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"is_pull": True}, "pull_request"),
        ({"is_pull": False}, "issue"),
        ({}, "issue"),
        ({"item": {"pull_request": {"merged": False}}}, "pull_request"),
        ({"is_pull": "true"}, "issue"),
    ],
)
def test_a_comment_on_a_request_is_told_by_is_pull_or_an_object(
    more: dict[str, Any], wanted: str
) -> None:
    shape = issue("created", comment={"id": 9, "body": "@pi", "user": {"id": 10}})
    shape["issue"] |= more.pop("item", {})
    event = parse(shape | more, "issue_comment")
    assert event.target
    assert (event.kind, event.target.type) == ("comment", wanted)
    assert (event.comment, event.comment_id, event.author) == ("@pi", "9", Actor("10"))


def test_an_issues_event_of_a_request_fires_nothing() -> None:
    shape = issue()
    shape["issue"]["pull_request"] = {"merged": False}
    assert parse(shape).fault == "action-not-actionable"


def test_a_deleted_fork_leaves_the_commit() -> None:
    head = {"ref": "unknown repository", "sha": "cd" * 20, "repo": None, "repo_id": 0}
    event = parse(pull("opened", head=head), "pull_request")
    assert (event.fault, event.head) == (None, "cd" * 20)
    assert event.target and event.target.type == "pull_request"


@pytest.mark.parametrize("when", ["0001-01-01T00:00:00Z", "", None, "soon", 7])
def test_a_time_that_is_never_is_left_out(when: Any) -> None:
    shape = issue()
    shape["issue"]["updated_at"] = when
    assert parse(shape).when is None


def test_giteas_headers_will_do_and_githubs_beside_them_decide_nothing() -> None:
    body = json.dumps(issue()).encode()
    gitea = {"x-gitea-event": "issues", "x-gitea-delivery": "d-1"}
    github = {"x-github-event": "push", "x-github-delivery": "d-2"}
    assert forgejo().parse(gitea | github, body) == parse(issue())
    for lone in (github, {"x-gitea-event": "issues"}, {"x-forgejo-delivery": "d"}, {}):
        with pytest.raises(Malformed):
            forgejo().parse(lone, body)


@pytest.mark.parametrize("sender", [None, {"login": "x"}, {"id": -2}, {"id": "10"}, 3])
def test_an_actor_without_a_real_id_is_missing(sender: Any) -> None:
    """Forgejo's own actors, such as its Actions, have ids below one."""
    assert parse(issue(sender=sender)).actor is None


@pytest.mark.parametrize("labels", [None, "bug", 3, {}, [None, 3, {"name": 5}]])
def test_an_odd_set_of_labels_is_no_error_and_only_a_list_is_remembered(
    labels: Any,
) -> None:
    shape = issue()
    shape["issue"]["labels"] = labels
    event = parse(shape)
    assert event.labels == ()
    assert event.remember == (() if isinstance(labels, list) else None)


@pytest.mark.parametrize("name", MALFORMED)
def test_bytes_that_are_not_our_json_are_malformed(name: str) -> None:
    with pytest.raises(Malformed):
        forgejo().parse(headers(), MALFORMED[name])


@settings(max_examples=200, deadline=None)
@given(JSON, st.sampled_from((*EVENTS, "pull_request_approved")), st.booleans())
def test_any_json_parses_to_a_sound_event_or_is_malformed(
    shape: object, name: str, form: bool
) -> None:
    body = json.dumps(shape).encode()
    media = FORM if form else "application/json"
    if form:
        body = urllib.parse.urlencode({"payload": body.decode()}).encode()
    try:
        event = forgejo().parse(headers(name, content_type=media), body)
    except Malformed:
        return
    assert event.fault is None or event.fault in pidispatch.DROP_REASONS
    if event.fault is None or event.remember is not None:
        assert event.repo and event.target and event.target.number >= 1


# -- real payloads ------------------------------------------------------------


def manifest() -> list[dict[str, Any]]:
    file = PAYLOADS / "manifest.json"
    rows = json.loads(file.read_bytes()) if file.is_file() else []
    return [row for row in rows if row["forge"] == "forgejo"]


@pytest.mark.skipif(not manifest(), reason="the stored real payloads are not here")
@pytest.mark.parametrize("row", manifest(), ids=lambda row: row["file"])
def test_real_payloads_are_read_as_the_manifest_says(row: dict[str, Any]) -> None:
    body = (PAYLOADS / row["file"]).read_bytes()
    event = forgejo().parse(headers(row["event"]), body)
    known = row["expect"]
    assert event.repo == known["repo"]
    assert event.repo_id == str(known["repo_id"])
    assert event.actor == Actor(str(known["actor_id"]), known["actor"])
    wanted = "pull_request" if known["is_pr"] else "issue"
    number, title, text = known["number"], known["title"], known["body"]
    assert event.target == Target(cast(Any, wanted), number, title, text)
    assert event.labels == tuple(known["labels_now"])
    assert event.added is None
    assert event.head == known.get("head_sha")
    said = event.review if event.review is not None else event.comment
    assert said == known.get("comment")
    silent = row["kind"] in ("ignore", "pr_review")
    assert (event.fault is not None) == silent
    assert forgejo().event_of(body) == row["event"]


# -- settings, surfaces -------------------------------------------------------


def test_the_secret_needs_address_and_token_and_every_fault_is_named() -> None:
    wrong = {"FORGEJO_WEBHOOK_SECRET": "s", "FORGEJO_BOT_ID": "0"}
    with pytest.raises(ConfigError) as told:
        pidispatch.load_settings(wrong, None)
    for name in ("FORGEJO_URL", "FORGEJO_TOKEN", "FORGEJO_BOT_ID"):
        assert name in str(told.value)
    made = pidispatch.load_settings(
        {
            "FORGEJO_URL": "https://host.example/git/",
            "FORGEJO_WEBHOOK_SECRET": "one,two",
            "FORGEJO_TOKEN": "canary",
            "FORGEJO_BOT_ID": "7",
        },
        None,
    )
    assert list(pidispatch.forges_of(made)) == ["forgejo"]
    assert {"one", "two", "canary"} <= set(pidispatch.secrets_of(made))
    assert made.forgejo_bot_id == 7


@pytest.mark.parametrize("root", ["https://forge.example", "http://h:3000/git/x"])
def test_the_api_and_the_clone_url_follow_from_the_address(root: str) -> None:
    forge = forgejo(Canned(200, b'{"default_branch": "main"}'), forgejo_url=root)
    assert forge.clone_url("octo/lamp") == f"{root}/octo/lamp.git"
    assert forge.api == f"{root}/api/v1"


# -- the API ------------------------------------------------------------------


@pytest.fixture
def fake() -> Iterator[demo.FakeForgejo]:
    tokens = [
        demo.Token(TOKEN, "pi-bot", name="bot"),
        demo.Token("other", "somebody", name="other"),
    ]
    with demo.FakeForgejo(tokens) as running:
        repo = running.create_repo("octo/lamp", issues={7: {"title": "Crash"}})
        repo.collaborators["somebody"] = "write"
        yield running


def client(fake: demo.FakeForgejo, path: str = "", **fields: Any) -> Forgejo:
    fields.setdefault("forgejo_token", TOKEN)
    return forgejo(forgejo_url=fake.url + path, **fields)


def asker(fake: demo.FakeForgejo, login: str) -> Event:
    number = str(fake.data.accounts.user(login).id)
    return replace(parse(issue()), actor=Actor(number, login))


@pytest.mark.parametrize(
    ("role", "may"),
    [
        ("admin", True),
        ("write", True),
        ("read", False),
        ("none", False),
        ("triage", False),
    ],
)
def test_write_access_and_nothing_less_may_start_work(
    fake: demo.FakeForgejo, role: str, may: bool
) -> None:
    fake.repos["octo/lamp"].add_collaborator("someone", role)
    assert client(fake).ask(asker(fake, "someone")) is may


def test_the_owner_may_and_a_name_that_ends_in_bot_gains_nothing(
    fake: demo.FakeForgejo,
) -> None:
    """T24; and who is not there at all may not."""
    assert client(fake).ask(asker(fake, "octo")) is True
    assert client(fake).ask(asker(fake, "nice[bot]")) is False
    unknown = replace(parse(issue()), actor=Actor("5", "nobody/../octo"))
    assert client(fake).ask(unknown) is False
    assert client(fake).authority(unknown) == "ask"


def test_a_login_that_passed_to_another_account_proves_nothing(
    fake: demo.FakeForgejo,
) -> None:
    former = replace(asker(fake, "octo"), actor=Actor("3", "octo"))
    assert client(fake).ask(former) is False


@pytest.mark.parametrize("status", [0, 301, 401, 403, 429, 500, 503])
def test_what_cannot_be_told_is_no_answer(fake: demo.FakeForgejo, status: int) -> None:
    fake.fail_next("GET", "/permission", status=status)
    with pytest.raises(InfraError) as told:
        client(fake).ask(asker(fake, "octo"))
    assert "octo" not in told.value.message
    assert client(fake).ask(asker(fake, "octo")) is True


def test_a_token_that_does_not_administer_the_repository_cannot_tell(
    fake: demo.FakeForgejo,
) -> None:
    with pytest.raises(InfraError, match="403"):
        client(fake, forgejo_token="other").ask(asker(fake, "octo"))
    with pytest.raises(InfraError, match="no token"):
        client(fake, forgejo_token=None).ask(asker(fake, "octo"))


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b"{}", b'{"permission": null}', b"\xff"]
)
def test_an_odd_body_is_no_answer_either(body: bytes) -> None:
    event = parse(issue())
    with pytest.raises(InfraError):
        forgejo(Canned(200, body), forgejo_token="t").ask(event)


def test_our_own_id_is_asked_once_or_set(fake: demo.FakeForgejo) -> None:
    """T21: what makes an event our own is the token's account."""
    forge = client(fake)
    wanted = str(fake.data.accounts.user("pi-bot").id)
    assert [forge.own_id(), forge.own_id()] == [wanted, wanted]
    assert len(fake.requests("GET", "/user$")) == 1
    assert client(fake, forgejo_bot_id=12).own_id() == "12"
    assert client(fake, forgejo_token=None).own_id() is None
    assert len(fake.requests("GET", "/user$")) == 1


@pytest.mark.parametrize("path", ["", "/forge"])
def test_a_request_is_opened_found_and_retitled_also_under_a_sub_path(
    fake: demo.FakeForgejo, path: str
) -> None:
    forge, repo = client(fake, path), fake.repos["octo/lamp"]
    for i in (1, 11):
        repo.commit(f"pi/issue-7-r{i}", {"x": str(i)})
    made = forge.open_request("octo/lamp", "pi/issue-7-r1", "main", "One", "Text")
    assert forge.find_request("octo/lamp", "pi/issue-7-r1") == made
    assert forge.find_request("octo/lamp", "pi/issue-7-r11") is None
    again = forge.open_request("octo/lamp", "pi/issue-7-r1", "main", "One", "Text")
    assert again == made, "a 409 is the request that stands"
    forge.retitle_request("octo/lamp", made.number, "[r1/2] One")
    assert repo.pulls[made.number].title == "[r1/2] One"
    repo.close(repo.pulls[made.number])
    assert forge.find_request("octo/lamp", "pi/issue-7-r1") is None
    with pytest.raises(Rejected):
        forge.open_request("octo/lamp", "nowhere", "main", "One", "")


def test_a_request_is_found_on_any_page_whatever_a_page_holds(
    fake: demo.FakeForgejo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator may let the server give fewer rows than are asked for."""
    monkeypatch.setattr(demo, "_FORGEJO_PAGE_MAX", 3)
    repo = fake.repos["octo/lamp"]
    repo.commit("pi/issue-7", {"x": "1"})
    forge = client(fake)
    made = forge.open_request("octo/lamp", "pi/issue-7", "main", "One", "")
    for n in range(7):
        repo.open_pull(f"topic-{n}", files={"y": str(n)})
    repo.open_pull("pi/issue-7", fork_owner="stranger", files={"z": "1"})
    assert forge.find_request("octo/lamp", "pi/issue-7") == made
    assert forge.find_request("octo/lamp", "absent") is None


def test_a_server_that_knows_no_pages_is_read_once_and_no_more() -> None:
    row = b'[{"number": 1, "html_url": "u", "head": {"ref": "x", "repo": null}}]'
    forge = forgejo(Canned(200, row), forgejo_token="t")
    assert forge.find_request("octo/lamp", "pi/issue-7") is None


def test_a_comment_is_posted_once_among_many(fake: demo.FakeForgejo) -> None:
    repo, forge, target = fake.repos["octo/lamp"], client(fake), Target("issue", 7)
    for n in range(120):
        repo.add_comment(7, f"{n}", "someone")
    repo.add_comment(7, "<!-- mark -->", "someone")
    for _ in range(2):
        forge.comment("octo/lamp", target, "Hello.", "<!-- mark -->")
    ours = [c for c in repo.comments_on(7) if c.user == "pi-bot"]
    assert [c.body for c in ours] == ["Hello.\n\n<!-- mark -->"]


def test_item_default_branch_credential_and_environment(fake: demo.FakeForgejo) -> None:
    forge, repo = client(fake), fake.repos["octo/lamp"]
    repo.issues[7].title, repo.issues[7].body = "New", None
    assert forge.item("octo/lamp", Target("issue", 7)) == Target("issue", 7, "New")
    assert forge.default_branch("octo/lamp") == "main"
    assert forge.credential("octo/lamp").password == TOKEN
    given = forge.agent_environment("octo/lamp")
    assert given["GITEA_SERVER_URL"] == given["FORGEJO_URL"] == fake.url
    assert given["GITEA_SERVER_TOKEN"] == given["FORGEJO_TOKEN"] == TOKEN
    for ask in (forge.item, forge.default_branch, forge.protected):
        arguments = {"item": (Target("issue", 7),), "protected": ("main",)}
        fake.fail_next("GET", "/repos/", status=503)
        with pytest.raises(InfraError):
            ask("octo/lamp", *arguments.get(ask.__name__, ()))  # type: ignore[operator]


def test_a_branch_is_protected_by_name_or_pattern_when_we_may_not_push(
    fake: demo.FakeForgejo,
) -> None:
    forge, repo = client(fake), fake.repos["octo/lamp"]
    repo.commit("release/1.0", {"x": "1"})
    assert not forge.protected("octo/lamp", "main")
    repo.protect("main")
    repo.protect("release/*")
    assert forge.protected("octo/lamp", "main")
    assert forge.protected("octo/lamp", "release/1.0")
    repo.may_push.add("pi-bot")
    assert not forge.protected("octo/lamp", "main"), "the rule lets our token push"
    for gone in ("absent", "release/2.0"):
        with pytest.raises(InfraError):
            forge.protected("octo/lamp", gone)
    with pytest.raises(InfraError):
        forgejo(Canned(200, b"{}"), forgejo_token="t").protected("octo/lamp", "main")


def test_a_real_client_finds_the_fake_faithful(fake: demo.FakeForgejo) -> None:
    """The calls we make, made by pyforgejo."""
    import pyforgejo

    api = pyforgejo.PyforgejoApi(base_url=f"{fake.url}/api/v1", api_key=TOKEN)
    repo = fake.repos["octo/lamp"]
    repo.commit("topic", {"x": "1"})
    assert api.user.get_current().login == "pi-bot"
    at = {"owner": "octo", "repo": "lamp"}
    assert api.repository.repo_get(**at).default_branch == "main"
    branch = api.repository.repo_get_branch(**at, branch="topic")
    assert (branch.protected, branch.user_can_push) == (False, True)
    held = api.repository.repo_get_repo_permissions(**at, collaborator="octo")
    assert (held.permission, held.user.login) == ("owner", "octo")
    made = api.repository.repo_create_pull_request(
        **at, title="One", head="topic", base="main", body="Text"
    )
    assert (made.head.ref, made.head.repo.full_name) == ("topic", "octo/lamp")
    api.repository.repo_edit_pull_request(**at, index=made.number, title="Two")
    listed = api.repository.repo_list_pull_requests(**at, state="open")
    assert [row.title for row in listed] == ["Two"]
    assert api.issue.get_issue(**at, index=7).pull_request is None
    api.issue.create_comment(**at, index=7, body="Hello.")
    assert [c.body for c in api.issue.get_comments(**at, index=7)] == ["Hello."]
    api.issue.add_label(**at, index=7, labels=["pi:urgent"])
    rows = api.issue.get_comments_and_timeline(**at, index=7)
    assert [(row.type, row.body) for row in rows] == [
        ("comment", "Hello."),
        ("label", "1"),
    ]
    assert rows[1].label.name == "pi:urgent"


# -- which label was added ----------------------------------------------------


def added(fake: demo.FakeForgejo, *labels: str, when: float | None = 0.0) -> Any:
    """What the timeline tells of an event at `when` (0: now)."""
    at = fake.clock() if when == 0.0 else when
    event = replace(parse(issue()), labels=labels, when=at, incomplete=True)
    found = client(fake).complete(event)
    assert not found.incomplete
    return found.added


def test_the_timeline_tells_what_an_event_added() -> None:
    now = FakeClock()
    with demo.FakeForgejo([demo.Token(TOKEN, "pi-bot")], clock=now) as fake:
        repo = fake.create_repo("octo/lamp", issues={7: {}})
        repo.set_labels(7, ["old"], "someone")
        now.pass_(60)
        repo.set_labels(7, ["old", "new", "gone"], "someone")
        assert added(fake, "old", "new") == ("new",)
        assert added(fake, "old", "new", when=None) == ("new",)
        then = now()
        now.pass_(60)
        repo.set_labels(7, ["old"], "someone")
        assert added(fake, "old") == (), "only one went"
        assert added(fake, "old", "new", when=then) == ("new",)
        assert added(fake, "old", when=then + 30) is None, "nothing happened then"
        for n in range(130):
            repo.add_comment(7, str(n), "someone")
        now.pass_(60)
        repo.set_labels(7, ["old", "late"], "someone")
        assert added(fake, "old", "late", when=None) == ("late",)


@pytest.mark.parametrize("status", [0, 301, 403, 404, 500])
def test_without_a_timeline_the_whole_set_counts(
    fake: demo.FakeForgejo, status: int
) -> None:
    fake.fail_next("GET", "/timeline", status=status)
    assert added(fake, "a", "b") is None


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[null]", b"[]", b'[{"type": "label"}]', b"[[]]", b"null"]
)
def test_an_odd_timeline_is_none(body: bytes) -> None:
    event = replace(parse(issue()), incomplete=True)
    found = forgejo(Canned(200, body), forgejo_token="t").complete(event)
    assert (found.added, found.incomplete) == (None, False)


# -- the whole way ------------------------------------------------------------


class Post:
    """Sends the fake's deliveries to a world and waits until they are judged."""

    def __init__(self, world: World, clock: FakeClock) -> None:
        self.world, self.clock = world, clock

    def __call__(
        self, payload: Mapping[str, Any], event: str = "issues", guid: str | None = None
    ) -> str:
        """The end of a delivery: a status, or the reason it was dropped for."""
        world = self.world
        world.sent += 1
        guid = guid or f"{world.name}-{world.sent}"
        told = demo.forgejo_delivery(event, dict(payload), SECRET, guid)
        before = self.counts()
        status, answer = world.send(*told)
        assert status in (200, 202)
        if answer["status"] != "pending":
            return str(answer.get("reason") or answer["status"])
        world.wait_for(lambda: self.counts() != before)
        [word] = [w for w, n in self.counts().items() if n != before.get(w)]
        return word

    def counts(self) -> dict[str, int]:
        caps = pidispatch.Caps(None, None, None, "UTC")
        return self.world.store.status(caps, 0).counts

    def label(self, *labels: str, number: int = 7, by: str = "maintainer") -> str:
        self.clock.pass_(5)
        repo = self.world.repo
        payload = demo.forgejo_payload(repo, number, "label_updated", by, labels)
        return self(payload)


@pytest.fixture
def post(tmp_path: Path) -> Iterator[Post]:
    """A running service whose jobs wait; time passes only when a test says so."""
    clock = FakeClock()
    with make_world(tmp_path, clock=clock, kind="forgejo") as world:
        world.forge.data.accounts.clock = clock
        world.forge.clock = clock
        world.change(target_hourly=0)
        world.start()
        world.store.set_flag("paused", "1")
        yield Post(world, clock)


def later(post: Post) -> None:
    """After the window of what was admitted."""
    post.clock.pass_(11 * 60)


def test_a_label_fires_when_it_comes_and_not_when_another_does(post: Post) -> None:
    assert post.label("bug") == "no-allowlisted-label"
    assert post.label("bug", "pi:urgent") == "queued"
    later(post)
    assert post.label("bug", "pi:urgent", "more") == "label-not-added"
    assert post.label("pi:urgent") == "label-not-added"
    assert post.label() == "no-allowlisted-label"
    assert post.label("pi:urgent") == "queued"
    assert post.world.forge.requests("GET", "/timeline") == []


def test_a_label_at_creation_fires_once_and_a_later_event_does_not_t14(
    post: Post,
) -> None:
    repo = post.world.repo
    repo.add_issue(8, labels=["pi:urgent"])
    assert post(demo.forgejo_payload(repo, 8, "opened", "maintainer")) == "queued"
    assert post.label("pi:urgent", "more", number=8) == "label-not-added"
    assert post.label("more", number=8) == "no-allowlisted-label"
    assert post.label("pi:urgent", "more", number=8) == "coalesced"


def test_cleared_labels_never_fire_and_count_as_gone_t14(post: Post) -> None:
    assert post.label("pi:urgent") == "queued"
    later(post)
    repo = post.world.repo
    cleared = demo.forgejo_payload(repo, 7, "label_cleared", "maintainer")
    assert [row["name"] for row in cleared["issue"]["labels"]] == ["pi:urgent"]
    assert post(cleared) == "action-not-actionable"
    assert post.label("pi:urgent") == "queued"


def test_an_unknown_past_is_asked_of_the_timeline(post: Post) -> None:
    repo = post.world.repo
    repo.set_labels(7, ["pi:urgent"], "maintainer")  # nobody told us
    post.clock.pass_(60)
    assert post.label("pi:urgent", "bug") == "label-not-added"
    asked = len(post.world.forge.requests("GET", "/timeline"))
    assert post.label("bug") == "no-allowlisted-label"
    assert post.label("bug", "pi:urgent") == "queued", "now the past is known"
    assert len(post.world.forge.requests("GET", "/timeline")) == asked


def test_a_timeline_that_fails_lets_the_whole_set_count(post: Post) -> None:
    repo = post.world.repo
    repo.set_labels(7, ["pi:urgent"], "maintainer")
    post.clock.pass_(60)
    post.world.forge.fail_next("GET", "/timeline", status=500, times=9)
    assert post.label("pi:urgent", "bug") == "queued"


def test_what_newer_giteas_tell_needs_no_memory(post: Post) -> None:
    repo = post.world.repo
    repo.set_labels(7, ["pi:urgent"], "maintainer")
    make = demo.forgejo_payload
    more = make(repo, 7, "label_updated", "maintainer", ["pi:urgent", "x"], told=True)
    assert post(more) == "label-not-added"
    less = make(repo, 7, "label_updated", "maintainer", ["x"], told=True)
    assert post(less) == "no-allowlisted-label"
    again = make(repo, 7, "label_updated", "maintainer", ["x", "pi:urgent"], told=True)
    assert post(again) == "queued"
    assert post.world.forge.requests("GET", "/timeline") == []


def test_a_dropped_delivery_is_judged_afresh_when_it_comes_again(post: Post) -> None:
    """It left its labels in the memory, so the timeline must tell what it added."""
    assert post.label("x") == "no-allowlisted-label"
    post.clock.pass_(60)
    world = post.world
    world.rules({"on": {"type": "label", "any": ["other"]}, "run": flow("review")})
    world.service.triggers.refresh()  # type: ignore[union-attr]
    repo = world.repo
    labels = ["x", "pi:urgent"]
    payload = demo.forgejo_payload(repo, 7, "label_updated", "maintainer", labels)
    assert post(payload, guid="again") == "no-allowlisted-label"
    world.rules({})
    world.service.triggers.refresh()  # type: ignore[union-attr]
    post.clock.pass_(60)
    assert post(payload, guid="again") == "queued"
    assert post(payload, guid="again") == "duplicate"
    assert post(payload, guid="other-id-same-body") == "duplicate"
    assert len(world.store.runs(9)) == 1


def test_an_old_event_that_comes_late_neither_fires_for_others_nor_rewrites(
    post: Post,
) -> None:
    repo, make = post.world.repo, demo.forgejo_payload
    assert post.label("x") == "no-allowlisted-label"
    post.clock.pass_(10)
    first = make(repo, 7, "label_updated", "maintainer", ["x", "pi:urgent"])
    post.clock.pass_(10)
    second = make(repo, 7, "label_updated", "maintainer", ["x", "pi:urgent", "y"])
    assert post(second) == "queued", "the set that is known shows both as new"
    assert post(first) == "coalesced"
    later(post)
    assert post.label("x", "pi:urgent", "y", "z") == "label-not-added"


def test_six_labels_in_one_second_are_one_job_for_each_rule_they_fire_t18(
    post: Post,
) -> None:
    post.world.rules({}, {"on": {"type": "label", "any": ["b"]}, "run": flow("review")})
    post.world.service.triggers.refresh()  # type: ignore[union-attr]
    assert post.label("z") == "no-allowlisted-label"
    post.clock.pass_(5)
    names, ends = ["z"], []
    for name in ("pi:urgent", "a", "b", "c", "d", "e"):
        names.append(name)
        repo = post.world.repo
        ends.append(post(demo.forgejo_payload(repo, 7, "label_updated", "octo", names)))
    assert ends.count("queued") == 2
    assert len(post.world.store.runs(9)) == 2
    assert {run.flow for run in post.world.store.runs(9)} == {"fix-issue", "review"}


def flow(name: str, **more: Any) -> dict[str, Any]:
    return {"kind": "forgejo", "flow": name, **more}


def test_memory_and_admission_are_one_transaction(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash between them would lose the label, or fire it twice."""
    assert post.label("x") == "no-allowlisted-label"
    post.clock.pass_(60)
    repo, world = post.world.repo, post.world
    labels = ["x", "pi:urgent"]
    payload = demo.forgejo_payload(repo, 7, "label_updated", "maintainer", labels)

    def killed(*_: Any) -> None:
        raise InfraError("killed here")

    told = demo.forgejo_delivery("issues", payload, SECRET, "crash")
    for part in ("_put_delivery", "_remember"):
        with monkeypatch.context() as broken:
            broken.setattr(pidispatch, part, killed)
            assert world.send(*told)[0] == 503
        assert world.store.runs(9) == []
    assert post(payload, guid="crash") == "queued"
    assert world.forge.requests("GET", "/timeline") == [], "the memory was as before"
    later(post)
    assert post.label("x", "pi:urgent", "y") == "label-not-added"


def test_what_is_remembered_of_a_label_is_not_its_name(post: Post) -> None:
    assert post.label("canary-label-name") == "no-allowlisted-label"
    path = post.world.settings.db
    for file in path.parent.glob(path.name + "*"):
        assert b"canary-label-name" not in file.read_bytes()


def test_labels_of_comments_and_reviews_are_remembered_too(post: Post) -> None:
    repo = post.world.repo
    repo.commit("topic", {"x": "1"})
    pull = repo.open_pull("topic")
    repo.set_labels(pull.number, ["pi:urgent"], "maintainer")
    review = demo.forgejo_review_payload(repo, pull.number, "approved", "", "octo")
    assert post(review, "pull_request_approved") == "unhandled-event"
    repo.set_labels(7, ["pi:urgent"], "maintainer")
    comment = demo.forgejo_comment_payload(repo, 7, "hello", "stranger")
    assert post(comment, "issue_comment") == "no-trigger-phrase"
    assert post.label("pi:urgent", "x") == "label-not-added"
    on_request = {
        "on": {
            "type": "pull_request",
            "action": ["label_updated"],
            "any": ["pi:urgent"],
        },
        "run": flow("review"),
    }
    post.world.rules(on_request)
    post.world.service.triggers.refresh()  # type: ignore[union-attr]
    post.clock.pass_(5)
    make = demo.forgejo_payload
    more = make(repo, pull.number, "label_updated", "octo", ["pi:urgent", "x"])
    assert post(more, "pull_request") == "label-not-added"
    assert post.world.forge.requests("GET", "/timeline") == []


def test_events_of_one_item_that_arrive_at_once_fire_each_label_once(
    post: Post,
) -> None:
    """Whatever their order, none is lost and none is counted twice."""
    names = [f"l{n}" for n in range(8)]
    rules = [
        {"on": {"type": "label", "any": [name]}, "run": flow(name)} for name in names
    ]
    post.world.rules(*rules)
    post.world.service.triggers.refresh()  # type: ignore[union-attr]
    repo, make, told = post.world.repo, demo.forgejo_payload, []
    assert post.label("x") == "no-allowlisted-label"
    for n, name in enumerate(names):
        post.clock.pass_(3)
        repo.add_issue(100 + n)
        repo.set_labels(100 + n, [], "maintainer")
        unseen = make(repo, 100 + n, "label_updated", "maintainer", [name])
        again = make(repo, 100 + n, "label_updated", "maintainer", [name, "more"])
        told += [(unseen, f"a{n}"), (again, f"b{n}")]
    threads = [
        threading.Thread(
            target=lambda p=payload, g=guid: post.world.send(  # type: ignore[misc]
                *demo.forgejo_delivery("issues", p, SECRET, g)
            )
        )
        for payload, guid in told
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store, caps = post.world.store, pidispatch.Caps(None, None, None, "UTC")
    post.world.wait_for(lambda: store.status(caps, 0).pending == 0)
    assert sorted(run.flow for run in store.runs(99)) == names


def test_a_set_is_admitted_once_and_anew_after_its_window(post: Post) -> None:
    """T01: redelivered and coalesced as a whole, for each replica by itself."""
    post.world.rules({"replicas": 2})
    post.world.service.triggers.refresh()  # type: ignore[union-attr]
    repo = post.world.repo
    payload = demo.forgejo_payload(
        repo, 7, "label_updated", "maintainer", ["pi:urgent"]
    )
    assert post(payload, guid="one") == "queued"
    assert post(payload, guid="one") == "duplicate"
    assert post.label() == "no-allowlisted-label"
    assert post.label("pi:urgent") == "coalesced"
    assert post.label() == "no-allowlisted-label"
    later(post)
    assert post.label("pi:urgent") == "queued"
    jobs = [run.id for run in post.world.store.runs(9)]
    assert sorted(jobs)[-2:] == ["fj-one-r1", "fj-one-r2"]
    assert len(jobs) == 4


@pytest.mark.parametrize("path", ["", "/forge"])
def test_doctor_says_whether_the_token_works(fake: demo.FakeForgejo, path: str) -> None:
    fields: dict[str, Any] = {
        "forgejo_webhook_secret": ("s",),
        "forgejo_url": fake.url + path,
    }

    def found(**more: Any) -> pidispatch.Check:
        checks: list[pidispatch.Check] = []
        session = requests.Session()
        pidispatch._check_forges(Settings(**fields, **more), (), checks, session)
        [check] = checks
        return check

    good = found(forgejo_token=TOKEN)
    assert (good.name, good.state) == ("forgejo", "ok")
    assert "replay" in good.found
    assert "id 7" in found(forgejo_token=TOKEN, forgejo_bot_id=7).found
    wrong = {"forgejo_token": "wrong"}
    for more in (wrong, wrong | {"forgejo_bot_id": 7}, {}, {"forgejo_bot_id": 7}):
        bad = found(**more)
        assert bad.state == "fail"
        assert bad.fix


# -- who asked, the whole way -------------------------------------------------


def test_our_own_label_starts_nothing_t21(post: Post) -> None:
    assert post.label("x") == "no-allowlisted-label"
    assert post.label("x", "pi:urgent", by="operator") == "self"


def test_the_edge_answers_each_credential_and_encoding_exactly(post: Post) -> None:
    world, repo = post.world, post.world.repo
    payload = demo.forgejo_payload(repo, 7, "label_updated", "maintainer", ["x"])
    make = demo.forgejo_delivery
    good, body = make("issues", payload, SECRET, "g")
    bare = {n: v for n, v in good.items() if "ignature" not in n}
    ignored = (200, {"status": "ignored", "reason": "no-allowlisted-label"})
    refused = (401, {"status": "error", "reason": "unauthorized"})
    malformed = (400, {"status": "error", "reason": "malformed"})
    assert world.send(good, body) == ignored
    assert world.send(*make("issues", payload, SECRET, "g", form=True)) == ignored
    assert (
        world.send(*make("issues", payload, SECRET, "g", brands=("Gitea",))) == ignored
    )
    assert world.send(*make("issues", payload, "wrong", "g")) == refused
    assert world.send(*make("issues", payload, "", "g")) == refused
    assert world.send(*make("issues", payload, "wrong", "g", form=True)) == refused
    assert world.send(bare, body) == refused
    assert world.send(good, body[:-1] + b" }") == refused
    nameless = {n: v for n, v in good.items() if "Event" not in n or "GitHub" in n}
    assert world.send(nameless, body) == malformed
    told, odd = make("issues", {}, SECRET, "g")
    assert world.send(told, odd)[1]["reason"] == "action-not-actionable"


def test_a_request_gets_comments_and_no_push_also_from_a_deleted_fork(
    post: Post,
) -> None:
    """No branch, no marker in a title, "replica i of n" in what is said."""
    world = post.world
    world.rules(
        {
            "on": {"type": "comment", "phrase": "@pi"},
            "run": flow("review", replicas=2),
        }
    )
    world.service.triggers.refresh()  # type: ignore[union-attr]
    repo = world.repo
    pull = repo.open_pull("topic", fork_owner="gone", files={"x": "1"})
    repo.deleted_forks.add("gone")
    before = dict(repo.branches)
    payload = demo.forgejo_comment_payload(repo, pull.number, "@pi", "maintainer")
    assert payload["pull_request"]["head"]["repo"] is None
    assert post(payload, "issue_comment", guid="fork") == "queued"
    jobs = world.jobs_of("fork")
    assert jobs == ["fj-fork-r1", "fj-fork-r2"]
    key = f"{REPO}#{pull.number}"
    assert [world.store.run(job)[0].target for job in jobs] == [key, key]
    world.store.set_flag("paused", None)
    assert [run.state for run in world.wait(jobs)] == ["completed", "completed"]
    texts = world.wait_for(
        lambda: len(t := world.comments(pull.number)) == 3 and sorted(t)
    )
    assert [text for text in texts if "eplica 1 of 2" in text]
    assert [text for text in texts if "eplica 2 of 2" in text]
    assert (pull.title, repo.branches) == ("A pull request", before)


def test_an_urgent_label_gives_two_branches_and_two_marked_requests(
    tmp_path: Path,
) -> None:
    """Also under a sub-path; once more is nothing new."""
    with make_world(tmp_path, kind="forgejo") as world:
        world.change(forgejo_url=f"{world.forge.url}/forge")
        world.rules({"replicas": 2})
        world.start()
        jobs = world.label(guid="one")
        assert jobs == ["fj-one-r1", "fj-one-r2"]
        assert [run.state for run in world.wait(jobs)] == ["completed"] * 2
        world.wait_for(lambda: len(world.comments()) == 2)
        pulls = world.pulls()
        assert sorted(pulls) == ["pi/issue-7-r1", "pi/issue-7-r2"]
        for i in (1, 2):
            assert pulls[f"pi/issue-7-r{i}"].title == f"[r{i}/2] Bend the spoon"
            assert f"{REPO}#7" == world.record(jobs[i - 1]).target
        assert all("/pulls/" in text for text in world.comments())
        requests_made = world.forge.requests()
        assert all(row.path.startswith("/forge/") for row in requests_made)
