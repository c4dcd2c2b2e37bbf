"""Section `forges`, GitLab: bytes to an Event, who asked, what its API is told, and
the whole way from a delivery to a merge request."""

from __future__ import annotations

import base64
import hmac
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from conftest import raw_answer
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from msgspec.structs import replace
from world import SECRET as WORLD_SECRET
from world import TOKEN, World, bash, say, solve
from world import world as make_world

import pidispatch
import pidispatch_demo as demo
from pidispatch import (
    Actor,
    Event,
    Faults,
    GitLab,
    InfraError,
    Malformed,
    Refused,
    Rejected,
    Settings,
    Target,
    Unauthorized,
)

NOW = 1_790_000_000.0
KEY = bytes(range(32))
SIGNING = "whsec_" + base64.b64encode(KEY).decode()
PLAIN = "it's a secret ß"
PAYLOADS = Path(
    os.environ.get("PIDISPATCH_PAYLOADS")
    or Path(__file__).parent.parent.parent / "shared" / "payloads"
)
REPO = "group/sub/lamp"


def gitlab(session: requests.Session | None = None, **fields: Any) -> GitLab:
    """A GitLab in token mode, unless the fields say otherwise."""
    fields.setdefault("gitlab_webhook_mode", "token")
    fields.setdefault("gitlab_webhook_secret", (PLAIN,))
    return GitLab(Settings(**fields), session or requests.Session(), lambda: NOW)


def signing(*secrets: str) -> GitLab:
    return gitlab(
        gitlab_webhook_mode="signature", gitlab_webhook_secret=secrets or (SIGNING,)
    )


def signed(body: bytes, **changes: str) -> dict[str, str]:
    """The headers of a signed delivery; a change is made after signing."""
    sent = {"webhook-id": "d-1", "webhook-timestamp": str(int(NOW))}
    sent |= {k.replace("_", "-"): v for k, v in changes.items() if k == "at"}
    if "at" in sent:
        sent["webhook-timestamp"] = sent.pop("at")
    text = f"{sent['webhook-id']}.{sent['webhook-timestamp']}.".encode() + body
    mac = base64.b64encode(hmac.digest(KEY, text, "sha256")).decode()
    more = {k.replace("_", "-"): v for k, v in changes.items() if k != "at"}
    return sent | {"webhook-signature": f"v1,{mac}"} | more


def headers(hook: str = "Issue Hook", **more: str) -> dict[str, str]:
    known = {"x-gitlab-event": hook, "idempotency-key": "d-1"}
    return known | {key.replace("_", "-"): value for key, value in more.items()}


def parse(shape: object, hook: str = "Issue Hook", **more: str) -> Event:
    return gitlab().parse(headers(hook, **more), json.dumps(shape).encode())


def issue(action: str = "update", **attributes: Any) -> dict[str, Any]:
    """An `issue` payload in which the label pi:fix joins bug."""
    bug, fix = {"id": 1, "title": "bug"}, {"id": 2, "title": "pi:fix"}
    item = {
        "id": 900,
        "iid": 7,
        "title": "Crash",
        "description": "It crashes.",
        "author_id": 20,
        "action": action,
        "confidential": False,
        "updated_at": "2026-01-02 03:04:05 UTC",
    }
    return {
        "object_kind": "issue",
        "event_type": "issue",
        "user": {"id": 10, "username": "maintainer"},
        "project": {"id": 5, "path_with_namespace": REPO},
        "object_attributes": item | attributes,
        "labels": [bug, fix],
        "changes": {"labels": {"previous": [bug], "current": [bug, fix]}},
    }


def merge(action: str = "open", **attributes: Any) -> dict[str, Any]:
    shape = issue(action, **attributes) | {"object_kind": "merge_request"}
    shape["object_attributes"].setdefault("last_commit", {"id": "ab" * 20})
    del shape["object_attributes"]["confidential"]
    return shape


def note(on: str = "Issue", **attributes: Any) -> dict[str, Any]:
    shape = issue() | {"object_kind": "note", "event_type": "note"}
    item = shape.pop("object_attributes") | {"last_commit": {"id": "ab" * 20}}
    del item["action"], shape["changes"], shape["labels"]
    shape["merge_request" if on == "MergeRequest" else "issue"] = item
    said = {"id": 901, "note": "@pi fix", "noteable_type": on, "author_id": 10}
    return shape | {"object_attributes": said | attributes}


# -- verify -------------------------------------------------------------------

ODD_BODY = '{ "title" :\t"ça va 🎉 \\u00e7",\r\n"n":1.0 }\r\n'.encode()


def test_the_signature_is_over_id_time_and_the_raw_bytes() -> None:
    """T04: odd spacing, emoji, escapes and CRLF would not survive a re-dump."""
    signing().verify(signed(ODD_BODY), ODD_BODY)
    again = json.dumps(json.loads(ODD_BODY)).encode()
    with pytest.raises(Unauthorized):
        signing().verify(signed(ODD_BODY), again)


def test_any_of_several_secrets_holds_so_that_one_can_be_rotated() -> None:
    other = "whsec_" + base64.b64encode(b"another key").decode()
    signing(other, SIGNING).verify(signed(b"x"), b"x")
    two = signed(b"x")["webhook-signature"]
    signing().verify(signed(b"x", webhook_signature=f"v1,AAAA {two} v2,x"), b"x")
    forge = gitlab(gitlab_webhook_secret=("old", "new"))
    for secret in ("old", "new"):
        forge.verify({"x-gitlab-token": secret}, b"x")
    for bad in ("older", "", "old,new", "ne"):
        with pytest.raises(Unauthorized):
            forge.verify({"x-gitlab-token": bad}, b"x")


def test_a_plain_token_may_be_any_text() -> None:
    """The edge reads headers as latin-1; the token was sent as UTF-8."""
    gitlab().verify({"x-gitlab-token": PLAIN.encode().decode("latin-1")}, b"x")


FORGED = {
    "no signature": {"webhook_signature": ""},
    "no version": {"webhook_signature": signed(b"x")["webhook-signature"][3:]},
    "another version": {
        "webhook_signature": "v2" + signed(b"x")["webhook-signature"][2:]
    },
    "cut": {"webhook_signature": signed(b"x")["webhook-signature"][:-2]},
    "non-ascii": {"webhook_signature": "v1,ß\udcff"},
    "another id": {"webhook_id": "d-2"},
    "no id": {"webhook_id": ""},
    "another time": {"webhook_timestamp": str(int(NOW) + 1)},
    "no time": {"webhook_timestamp": ""},
    "odd time": {"webhook_timestamp": "\uff11" * 10},
    "huge time": {"webhook_timestamp": "9" * 5000},
    "negative time": {"webhook_timestamp": "-1"},
    "stale": {"at": str(int(NOW) - 301)},
    "ahead": {"at": str(int(NOW) + 301)},
}


@pytest.mark.parametrize("name", FORGED)
def test_a_signature_that_is_not_exactly_right_is_refused(name: str) -> None:
    with pytest.raises(Unauthorized):
        signing().verify(signed(b"x", **FORGED[name]), b"x")


@pytest.mark.parametrize("seconds", [-300, 0, 300])
def test_a_signed_time_may_be_five_minutes_off(seconds: int) -> None:
    signing().verify(signed(b"x", at=str(int(NOW) + seconds)), b"x")


def test_only_the_declared_mode_is_accepted() -> None:
    """A hook may carry both; the plain token never stands in for a signature."""
    both = signed(b"x") | {"x-gitlab-token": PLAIN}
    with pytest.raises(Unauthorized):
        signing().verify(both | {"webhook-signature": ""}, b"x")
    with pytest.raises(Unauthorized):
        gitlab(gitlab_webhook_secret=(SIGNING,)).verify(signed(b"x"), b"x")
    signing(SIGNING).verify(both, b"x")
    gitlab().verify({"x-gitlab-token": PLAIN.encode().decode("latin-1")}, b"x")


@pytest.mark.parametrize("secret", ["whsec_", "whsec_***", PLAIN, ""])
def test_what_is_no_signing_token_signs_nothing(secret: str) -> None:
    """T05: an empty key would be a signature that anybody can make."""
    mac = hmac.digest(b"", b"d-1." + str(int(NOW)).encode() + b".x", "sha256")
    given = "v1," + base64.b64encode(mac).decode()
    with pytest.raises(Unauthorized):
        signing(secret).verify(signed(b"x", webhook_signature=given), b"x")


def test_without_a_secret_or_a_mode_nothing_verifies_and_nothing_is_served() -> None:
    """T05."""
    for fields in ({"gitlab_webhook_secret": ()}, {"gitlab_webhook_mode": None}):
        for sent in ({}, {"x-gitlab-token": ""}, {"x-gitlab-token": PLAIN}):
            with pytest.raises(Unauthorized):
                gitlab(**fields).verify(sent, b"x")
    assert "gitlab" not in pidispatch.forges_of(Settings(gitlab_token="t"))


@given(st.text(), st.text(), st.binary(max_size=40))
def test_no_text_in_a_header_breaks_verifying(one: str, two: str, body: bytes) -> None:
    for forge in (signing(), gitlab()):
        with pytest.raises(Unauthorized):
            sent = {"webhook-signature": one, "webhook-id": two, "x-gitlab-token": one}
            forge.verify(sent | {"webhook-timestamp": str(int(NOW))}, body)


ALL = {
    "GITLAB_WEBHOOK_SECRET": SIGNING,
    "GITLAB_WEBHOOK_MODE": "signature",
    "GITLAB_TOKEN": "t",
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"GITLAB_WEBHOOK_MODE": None}, ["without GITLAB_WEBHOOK_MODE"]),
        ({"GITLAB_TOKEN": None}, ["without GITLAB_TOKEN"]),
        (
            {"GITLAB_WEBHOOK_MODE": None, "GITLAB_TOKEN": None},
            ["without GITLAB_WEBHOOK_MODE", "without GITLAB_TOKEN"],
        ),
        ({"GITLAB_WEBHOOK_MODE": "both"}, ["must be one of signature, token"]),
        ({"GITLAB_WEBHOOK_SECRET": "plain"}, ["must be signing tokens"]),
        ({"GITLAB_WEBHOOK_SECRET": f"{SIGNING},whsec_"}, ["must be signing tokens"]),
        ({"GITLAB_WEBHOOK_SECRET": " , "}, ["is empty"]),
        ({"GITLAB_URL": "gitlab.corp"}, ["GITLAB_URL"]),
    ],
)
def test_settings_that_cannot_serve_gitlab_refuse_to_start(
    changes: dict[str, str | None], words: list[str]
) -> None:
    values = {k: v for k, v in {**ALL, **changes}.items() if v is not None}
    with pytest.raises(Faults) as told:
        pidispatch.load_settings(values, None)
    assert len(told.value.faults) == len(words)
    for word, fault in zip(words, told.value.faults, strict=True):
        assert word in fault
        assert "plain" not in fault
    assert pidispatch.load_settings(ALL, None).gitlab_webhook_secret == (SIGNING,)
    plain = {**ALL, "GITLAB_WEBHOOK_MODE": "token", "GITLAB_WEBHOOK_SECRET": "p"}
    assert pidispatch.load_settings(plain, None).gitlab_webhook_mode == "token"


# -- parse --------------------------------------------------------------------


def test_a_labelled_issue_becomes_an_event_with_the_label_that_was_added() -> None:
    assert parse(issue()) == Event(
        forge="gitlab",
        delivery="d-1",
        name="issue",
        kind="label",
        action="update",
        repo=REPO,
        repo_id="5",
        target=Target("issue", 7, "Crash", "It crashes."),
        actor=Actor("10", "maintainer"),
        author=Actor("20"),
        labels=("bug", "pi:fix"),
        added=("pi:fix",),
        when=1767323045.0,
    )


def test_labels_are_told_apart_by_id_and_only_on_update() -> None:
    """A renamed label was not added; other actions carry a stale diff."""
    shape = issue()
    shape["changes"]["labels"]["previous"].append({"id": 2, "title": "old name"})
    assert parse(shape).added == ()
    for action in ("open", "close", "reopen"):
        assert parse(issue(action)).added == ()
    assert parse(merge("update")).added == ("pi:fix",)


KINDS = [
    ("issue", "open", "label"),
    ("issue", "update", "label"),
    ("issue", "reopen", "label"),
    ("issue", "close", "issue"),
    ("work_item", "update", "label"),
    ("work_item", "close", "issue"),
    ("merge_request", "open", "pull_request"),
    ("merge_request", "update", "pull_request"),
    ("merge_request", "reopen", "pull_request"),
    ("merge_request", "approved", "pull_request"),
    ("merge_request", "close", "pull_request"),
]


@pytest.mark.parametrize(("name", "action", "kind"), KINDS)
def test_the_served_actions_name_the_trigger_they_may_fire(
    name: str, action: str, kind: str
) -> None:
    event = parse(issue(action) | {"object_kind": name})
    assert (event.kind, event.action, event.fault) == (kind, action, None)
    assert event.target
    wanted = "pull_request" if name == "merge_request" else "issue"
    assert event.target.type == wanted


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        (merge("merge"), "action-not-actionable"),
        (merge("approval"), "action-not-actionable"),
        (merge("unapproved"), "action-not-actionable"),
        (merge(""), "action-not-actionable"),
        (issue("destroy"), "action-not-actionable"),
        (issue(action=5), "action-not-actionable"),  # type: ignore[arg-type]
        (note(action="update"), "action-not-actionable"),
        (note(action=5), "action-not-actionable"),
        (note(action=""), "action-not-actionable"),
        (note(system=True), "action-not-actionable"),
        (note("Commit"), "unhandled-event"),
        (note("Snippet"), "unhandled-event"),
        (note("Epic"), "unhandled-event"),
        (note(noteable_type=["Issue"]), "unhandled-event"),
        (issue() | {"object_kind": "push"}, "unhandled-event"),
        (issue() | {"object_kind": None}, "unhandled-event"),
        (issue() | {"object_kind": "work_item", "project": None}, "unhandled-event"),
        (issue() | {"project": None}, "no-repository"),
        (issue(iid=None), "missing-number"),
        (note("MergeRequest") | {"merge_request": None}, "missing-number"),
        ({}, "unhandled-event"),
    ],
)
def test_what_starts_nothing_says_why(shape: dict[str, Any], fault: str) -> None:
    assert parse(shape).fault == fault


def test_an_instances_own_hook_is_not_served() -> None:
    assert parse(issue(), "System Hook").fault == "unhandled-event"


@pytest.mark.parametrize(
    ("shape", "hook"),
    [
        (issue(confidential=True), "Issue Hook"),
        (issue(confidential="yes"), "Issue Hook"),
        (issue(confidential=None), "Confidential Issue Hook"),
        (issue("close", confidential=True), "Issue Hook"),
        (issue("destroy", confidential=True), "Issue Hook"),
        (issue(confidential=True) | {"object_kind": "work_item"}, "Issue Hook"),
        (issue() | {"event_type": "confidential_issue"}, "Issue Hook"),
        (note() | {"event_type": "confidential_note"}, "Note Hook"),
        (note(internal=True), "Note Hook"),
        (note(confidential=True), "Note Hook"),
        (note() | {"issue": issue(confidential=True)["object_attributes"]}, "Note"),
        (note("MergeRequest", internal=True), "Note Hook"),
        (note("MergeRequest"), "Confidential Note Hook"),
    ],
)
def test_what_is_confidential_never_becomes_a_job(
    shape: dict[str, Any], hook: str
) -> None:
    """Its output would be public; also in private projects."""
    assert parse(shape, hook).fault == "confidential"


@pytest.mark.parametrize("on", ["Issue", "WorkItem", "MergeRequest"])
def test_a_note_is_about_what_it_stands_on(on: str) -> None:
    """Before 16.11 notes came without an action; only new ones were sent."""
    for action in ({}, {"action": "create"}):
        event = parse(note(on, **action), "Note Hook")
        assert (event.kind, event.comment, event.comment_id) == (
            "comment",
            "@pi fix",
            "901",
        )
        assert event.fault is None
        assert event.target
        request = on == "MergeRequest"
        assert event.target.type == ("pull_request" if request else "issue")
        assert event.head == "ab" * 20
        assert event.labels == ()


@pytest.mark.parametrize(
    "name",
    [None, 7, "lamp", "/lamp", "a//b", "a/", "a/..", "./b", "a/b c", "a/b\n", ["a/b"]],
)
def test_a_project_is_two_or_more_safe_segments_or_none(name: Any) -> None:
    event = parse(issue() | {"project": {"path_with_namespace": name}})
    assert (event.repo, event.fault) == (None, "no-repository")


@pytest.mark.parametrize("name", ["a/b", "a/b/c", "a.b/c_d/e-f/g", "1/2/3/4/5/6/7"])
def test_subgroups_are_part_of_the_name_and_of_every_key(name: str) -> None:
    """T30."""
    event = parse(issue() | {"project": {"path_with_namespace": name}})
    rules = [_rule(replicas=2)]
    [one, two] = pidispatch.fan_out(matched(rules, event), event)
    assert one.dedup == f"{name}#7:fix-issue:r1"
    assert two.branch == "pi/issue-7-r2"
    assert gitlab().clone_url(name) == f"https://gitlab.com/{name}.git"
    mirror = pidispatch.mirror_name("gitlab", name)
    assert "/" not in mirror
    assert len(mirror) < 128


def _rule(**run: Any) -> pidispatch.Rule:
    return rule({"type": "label", "any": ["pi:fix"]}, **run)


def rule(on: dict[str, Any], **run: Any) -> pidispatch.Rule:
    entry = {"on": on, "run": {"kind": "gitlab", "flow": "fix-issue", **run}}
    text = json.dumps({"triggers": [entry]}).encode()
    return pidispatch.load_triggers(text, "t.json")[0]


def matched(rules: list[pidispatch.Rule], event: Event) -> pidispatch.Match:
    found = pidispatch.match_event(rules, event)
    assert isinstance(found, pidispatch.Match)
    return found


def test_an_issue_and_a_merge_request_of_one_number_are_two_targets() -> None:
    rules = [rule({"type": "comment", "phrase": "@pi"}, flow="review", replicas=2)]
    keys = []
    for on in ("Issue", "MergeRequest"):
        event = parse(note(on), "Note Hook")
        jobs = pidispatch.fan_out(matched(rules, event), event)
        keys += [job.dedup for job in jobs]
    assert keys == [
        f"{REPO}{sep}7:fix-issue:r{i}".replace("fix-issue", "review")
        for sep in "#!"
        for i in (1, 2)
    ]


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("2025-07-30 00:40:00 UTC", 1753836000.0),
        ("2013-12-03T17:15:43Z", 1386090943.0),
        ("2026-05-28T06:14:44.830Z", 1779948884.83),
        ("2015-05-17", None),
        (" UTC", None),
        ("0001-01-01 00:00:00 UTC", None),
        (None, None),
        (5, None),
    ],
)
def test_times_come_in_two_formats(text: Any, when: float | None) -> None:
    assert parse(issue(updated_at=text)).when == when


@pytest.mark.parametrize(
    "user", [None, "x", {"username": "x"}, {"id": "10"}, {"id": True}, {"id": 0}, []]
)
def test_an_actor_id_of_a_wrong_type_is_missing(user: Any) -> None:
    event = parse(issue() | {"user": user})
    assert (event.actor, event.fault) == (None, None)


IDLE: list[tuple[dict[str, Any] | None, dict[str, Any], bool]] = [
    ({}, {}, True),
    ({"title": {}}, {}, True),
    ({"reviewers": {}}, {}, True),
    ({"labels": {"previous": [{"id": 1, "title": "a"}], "current": []}}, {}, True),
    ({"labels": {"previous": [], "current": [{"id": 1, "title": "a"}]}}, {}, False),
    ({"draft": {"previous": True, "current": False}}, {}, False),
    ({"title": {}}, {"oldrev": "ab" * 20}, False),
    (None, {}, False),
]


@pytest.mark.parametrize(("changes", "attributes", "idle"), IDLE)
def test_an_update_of_something_else_than_work_fires_no_request_rule(
    changes: dict[str, Any] | None, attributes: dict[str, Any], idle: bool
) -> None:
    """A push, a draft, a label count; a title, a reviewer, a date do not."""
    shape = merge("update", **attributes) | {"labels": [], "changes": changes}
    event = parse(shape, "Merge Request Hook")
    assert (event.fault, event.inert) == (None, idle)
    rules = [rule({"type": "pull_request", "action": ["update"]}, flow="review")]
    found = pidispatch.match_event(rules, event)
    assert isinstance(found, pidispatch.Drop) == idle
    if idle:
        assert found == pidispatch.Drop("no-matching-pr-trigger")


def test_an_id_is_the_signed_one_in_signature_mode() -> None:
    body = json.dumps(issue()).encode()
    sent = headers(webhook_id="w-1")
    assert signing().parse(sent, body).delivery == "w-1"
    assert gitlab().parse(sent, body).delivery == "d-1"


@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_delivery_without_an_id_names_the_version_that_sends_one(
    value: str | None,
) -> None:
    for forge, name in ((gitlab(), "idempotency-key"), (signing(), "webhook-id")):
        sent = headers(webhook_id="w-1")
        del sent[name]
        if value is not None:
            sent[name] = value
        with pytest.raises(Malformed) as told:
            forge.parse(sent, b"{}")
        assert told.value.fix == "GitLab sends it since 17.4"
    with pytest.raises(Malformed):
        gitlab().parse({"idempotency-key": "d-1"}, b"{}")


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b'{"x": NaN}', b'"\xff"'])
def test_bytes_that_are_not_our_json_are_malformed(body: bytes) -> None:
    with pytest.raises(Malformed):
        gitlab().parse(headers(), body)


WORDS = [
    *("object_kind", "event_type", "user", "project", "object_attributes", "labels"),
    *("changes", "issue", "merge_request", "id", "iid", "username", "title", "note"),
    *("path_with_namespace", "description", "action", "author_id", "confidential"),
    *("internal", "system", "noteable_type", "oldrev", "updated_at", "last_commit"),
    *("previous", "current", "draft"),
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["issue", "note", "merge_request", "open", "update", "Issue"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(WORDS), inner, max_size=6)
    ),
    max_leaves=25,
)


@examples(max_examples=300, deadline=None)
@given(JSON, st.sampled_from(WORDS), st.booleans())
def test_any_json_parses_to_a_sound_event_or_is_malformed(
    odd: object, where: str, inside: bool
) -> None:
    shape: Any = issue()
    if inside:
        shape["object_attributes"][where] = odd
    for body in (shape | {where: odd}, odd):
        try:
            raw = json.dumps(body).encode("utf-8", "surrogatepass")
            event = gitlab().parse(headers(), raw)
        except Malformed:
            continue
        assert event.fault is None or event.fault in pidispatch.DROP_REASONS
        if event.fault is None:
            assert event.kind
            assert event.repo
            assert event.target
            assert event.target.number >= 1


# -- real payloads ------------------------------------------------------------


def manifest() -> list[dict[str, Any]]:
    file = PAYLOADS / "manifest.json"
    rows = json.loads(file.read_bytes()) if file.is_file() else []
    return [row for row in rows if row["forge"] == "gitlab"]


@pytest.mark.skipif(not manifest(), reason="the stored real payloads are not here")
@pytest.mark.parametrize("row", manifest(), ids=lambda row: row["file"])
def test_real_payloads_are_read_as_the_manifest_says(row: dict[str, Any]) -> None:
    body = (PAYLOADS / row["file"]).read_bytes()
    event = gitlab().parse(headers(row["event"]), body)
    known = row["expect"]
    assert event.repo == known.get("repo")
    assert event.repo_id == (str(known["repo_id"]) if "repo_id" in known else None)
    wanted = str(known["actor_id"]) if "actor_id" in known else None
    assert (event.actor and event.actor.id) == wanted
    if wanted:
        assert event.actor == Actor(wanted, known["actor"])
    if event.fault not in ("unhandled-event", "action-not-actionable"):
        assert event.target
        assert event.target.number == known["number"]
        kind = "pull_request" if known["is_pr"] else "issue"
        assert event.target.type == kind
        texts = (known["title"], known.get("body", ""))
        assert (event.target.title, event.target.body) == texts
    assert set(event.labels) == set(known["labels_now"])
    if event.action == "update":
        assert set(event.added or ()) == set(known["labels_added"])
    assert event.head == known.get("head_sha")
    assert event.comment == known.get("comment")
    assert (event.fault == "confidential") == known["confidential"]
    header_only = row["file"] == "gitlab/issue.open.confidential.json"
    told = None if event.fault == "unhandled-event" else row["event"]
    if (
        not header_only
        and row["file"] != "gitlab/work_item.update.epic_no_project.json"
    ):
        assert gitlab().event_of(body) in (told, row["event"])


#: The trigger that a receiver should see, and the rule of `BROAD` that it fires.
SEEN = {
    "issue_opened": "no-allowlisted-label",
    "issue_closed": 1,
    "comment_issue": 2,
    "comment_pr": 2,
    "pr_opened": 3,
    "pr_updated": 3,
    "pr_reopened": 3,
    "pr_closed": 4,
    "ignore_or_issue_opened": "no-allowlisted-label",
    "issue_opened_confidential": "confidential",
    "comment_issue_confidential": "confidential",
}


@pytest.mark.skipif(not manifest(), reason="the stored real payloads are not here")
@pytest.mark.parametrize("row", manifest(), ids=lambda row: row["file"])
def test_a_trial_agrees_with_the_manifest_on_every_real_payload(
    row: dict[str, Any],
) -> None:
    known = row["expect"]
    word = (known.get("comment") or "nothing").split()[0].rstrip(".,?!")
    on = [
        {"type": "label", "any": [*known["labels_now"], "pi:none"]},
        {"type": "issue", "action": ["close"]},
        {"type": "comment", "phrase": word},
        {"type": "pull_request", "action": ["open", "update", "reopen", "approved"]},
        {"type": "pull_request", "action": ["close"]},
    ]
    run = {"kind": "gitlab", "flow": "review", "replicas": 2}
    text = json.dumps({"triggers": [{"on": o, "run": run} for o in on]}).encode()
    trial = pidispatch.try_delivery(
        pidispatch.load_triggers(text, "t.json"),
        "gitlab",
        PAYLOADS / row["file"],
        [f"X-Gitlab-Event: {row['event']}"],
        None,
        None,
    )
    wanted = SEEN.get(row["kind"])
    if not isinstance(wanted, int):
        assert (trial.rule, trial.jobs) == (None, ())
        assert trial.reason in pidispatch.DROP_REASONS
        assert wanted in (None, trial.reason)
        return
    assert trial.rule == wanted
    if "actor_id" not in known:
        assert (trial.reason, trial.jobs) == ("missing-sender-id", ())
        return
    assert (trial.reason, trial.authority, len(trial.jobs)) == (None, "api", 2)
    assert trial.actor == str(known["actor_id"])
    separator = "!" if known["is_pr"] else "#"
    for i, job in enumerate(trial.jobs, 1):
        assert job.id == f"gl-dry-run-r{i}"
        target = f"{known['repo']}{separator}{known['number']}"
        assert job.dedup == f"{target}:review:r{i}"
        assert (job.branch is None) == known["is_pr"]


def test_a_trial_takes_either_kind_of_secret(tmp_path: Path) -> None:
    file = tmp_path / "issue.update.json"
    file.write_text(json.dumps(issue()))
    rules = [_rule()]
    for secret in (SIGNING, "plain"):
        sent, body = demo.gitlab_delivery(issue(), secret, "guid-1")
        file.write_bytes(body)
        lines = [f"{name}: {value}" for name, value in sent.items()]
        trial = pidispatch.try_delivery(rules, "gitlab", file, lines, None, secret)
        assert (trial.event, trial.delivery) == ("issue.update", "guid-1")
        assert trial.rule == 0
        with pytest.raises(pidispatch.ConfigError):
            wrong = [line for line in lines if "signature" not in line.lower()]
            wrong = [line for line in wrong if "token" not in line.lower()]
            pidispatch.try_delivery(rules, "gitlab", file, wrong, None, secret)


# -- who asked ----------------------------------------------------------------


def test_no_payload_of_gitlab_says_who_may() -> None:
    for shape in (issue(), issue("close"), merge("approved"), note()):
        assert gitlab().authority(parse(shape)) == "ask"


# -- the API ------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[demo.FakeGitLab]:
    tokens = [demo.Token("t0ken", "pi-bot")]
    with demo.FakeGitLab(tokens, root=tmp_path / "forge") as forge:
        repo = forge.create_repo(REPO, issues={7: {"title": "Crash"}})
        repo.add_collaborator("maintainer", "write")
        yield forge


def client(fake: demo.FakeGitLab, **fields: Any) -> GitLab:
    fields.setdefault("gitlab_token", "t0ken")
    return gitlab(gitlab_url=fake.url, **fields)


def asker(fake: demo.FakeGitLab, login: str) -> Event:
    user = fake.data.accounts.user(login)
    return replace(parse(issue()), actor=Actor(str(user.id), login))


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
def test_developers_and_above_may_start_work(
    fake: demo.FakeGitLab, role: str, may: bool
) -> None:
    """T24."""
    for name in ("somebody", "some[bot]"):
        fake.repos[REPO].add_collaborator(name, role)
        assert client(fake).ask(asker(fake, name)) is may
    assert client(fake).ask(asker(fake, "stranger[bot]")) is False


def test_a_project_that_the_token_cannot_see_is_no_answer(
    fake: demo.FakeGitLab,
) -> None:
    """GitLab's 404 means both: no member, and no such project for you."""
    gone = replace(asker(fake, "maintainer"), repo="group/gone")
    with pytest.raises(InfraError):
        client(fake).ask(gone)


@pytest.mark.parametrize("status", [0, 301, 302, 401, 403, 418, 429, 500, 503])
def test_what_cannot_be_told_is_no_answer(fake: demo.FakeGitLab, status: int) -> None:
    """T24: an unknown permission is retried, never guessed."""
    fake.fail_next("GET", "/members/", status=status)
    with pytest.raises(InfraError) as told:
        client(fake).ask(asker(fake, "maintainer"))
    assert "maintainer" not in told.value.message
    assert client(fake).ask(asker(fake, "maintainer")) is True
    fake.fail_next("GET", "/projects/[^/]*$", status=status)
    with pytest.raises(InfraError):
        client(fake).ask(asker(fake, "stranger"))


class Canned(requests.Session):
    """A session that answers every request with the same bytes."""

    def __init__(self, status: int, body: object) -> None:
        super().__init__()
        self.status = status
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.asked: dict[str, Any] = {}

    def request(  # type: ignore[override]
        self, method: str, url: str, **more: Any
    ) -> requests.Response:
        self.asked = {"method": method, "url": url, **more}
        answer = requests.Response()
        answer.status_code, answer.raw = self.status, raw_answer(self.body)
        return answer


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        [],
        {},
        {"id": 10},
        {"id": 10, "access_level": "40"},
        {"id": 10, "access_level": None},
        {"id": 10, "access_level": True},
        b"[" * 100_000,
    ],
)
def test_an_odd_body_is_no_answer_either(body: object) -> None:
    with pytest.raises(InfraError):
        gitlab(Canned(200, body), gitlab_token="t").ask(parse(issue()))


def test_a_member_who_waits_for_approval_or_is_another_may_not() -> None:
    good = {"id": 10, "access_level": 40}
    for change, may in (
        ({}, True),
        ({"membership_state": "active"}, True),
        ({"membership_state": "awaiting"}, False),
        ({"id": 11}, False),
        ({"access_level": 29}, False),
    ):
        forge = gitlab(Canned(200, {**good, **change}), gitlab_token="t")
        assert forge.ask(parse(issue())) is may


def test_calls_name_the_project_in_one_segment_and_follow_no_redirect() -> None:
    session = Canned(200, {"id": 10, "access_level": 40})
    gitlab(session, gitlab_token="t", gitlab_url="https://git.corp/lab").ask(
        parse(issue())
    )
    root = "https://git.corp/lab/api/v4"
    assert session.asked["url"] == f"{root}/projects/group%2Fsub%2Flamp/members/all/10"
    assert session.asked["allow_redirects"] is False
    assert session.asked["timeout"] == pidispatch.API_TIMEOUT


def test_who_we_are_is_the_tokens_account(fake: demo.FakeGitLab) -> None:
    """T21."""
    wanted = str(fake.data.accounts.user("pi-bot").id)
    forge = client(fake)
    assert [forge.own_id(), forge.own_id()] == [wanted, wanted]
    assert len(fake.requests("GET", "/user$")) == 1
    assert client(fake, gitlab_token=None).own_id() is None
    with pytest.raises(InfraError):
        client(fake, gitlab_token="wrong").own_id()
    with pytest.raises(InfraError):
        client(fake, gitlab_token=None).ask(asker(fake, "maintainer"))


def test_git_and_an_agent_get_the_token_by_gitlabs_names() -> None:
    forge = gitlab(gitlab_token="t0ken", gitlab_url="https://git.corp")
    made = forge.credential(REPO)
    assert (made.username, made.password) == ("oauth2", "t0ken")
    environment = forge.agent_environment(REPO)
    assert environment["GITLAB_TOKEN"] == "t0ken"
    assert environment["GITLAB_HOST"] == "https://git.corp"
    for ask in (gitlab().credential, gitlab().agent_environment):
        with pytest.raises(Refused) as told:
            ask(REPO)
        assert told.value.reason == "forge-token-unavailable"
        assert "GITLAB_TOKEN" in str(told.value.fix)


# -- notes and merge requests ---------------------------------------------------


@pytest.mark.parametrize("kind", ["issue", "pull_request"])
def test_a_note_is_posted_once_and_found_on_any_page(
    fake: demo.FakeGitLab, kind: Any
) -> None:
    repo, forge = fake.repos[REPO], client(fake)
    for number in range(1, 8):
        repo.open_pull(f"b{number}", files={f"{number}": "x"})
    request = kind == "pull_request"
    target = Target(kind, 7)
    for _ in range(2):
        forge.comment(REPO, target, "Done.", "<!-- m -->")
        for n in range(pidispatch.PAGE_SIZE):
            repo.add_comment(7, f"chatter {n}", "somebody", request)
    ours = [c.body for c in repo.comments_on(7, request) if c.user == "pi-bot"]
    assert ours == ["Done.\n\n<!-- m -->"]
    assert repo.comments_on(7, not request) == [], "the other kind of 7 is not told"
    repo.add_comment(7, "hush <!-- n -->", "somebody", request)
    forge.comment(REPO, target, "Also.", "<!-- n -->")
    assert repo.comments_on(7, request)[-1].user == "pi-bot"


def test_a_note_whose_answer_was_lost_is_not_posted_again(
    fake: demo.FakeGitLab,
) -> None:
    fake.fail_next("POST", "/notes", status=502, moment="after")
    target, text = Target("issue", 7), "Done. <!-- m -->"
    with pytest.raises(InfraError):
        client(fake).comment(REPO, target, text, "<!-- m -->")
    client(fake).comment(REPO, target, text, "<!-- m -->")
    assert [c.body for c in fake.repos[REPO].comments_on(7)] == [text]


HOSTILE = (
    "Done.\n/merge\n  /close\n/label ~pi:urgent\n/usr/bin/true is fine\na /merge\n"
)


def test_quick_actions_that_an_agent_writes_are_shown_and_not_obeyed(
    fake: demo.FakeGitLab,
) -> None:
    """pidispatch never merges: GitLab would obey such a line under our token."""
    repo = fake.repos[REPO]
    repo.commit("pi/issue-7", {"fix.txt": "x"}, "Fix")
    forge = client(fake)
    made = forge.open_request(REPO, "pi/issue-7", "main", "Fix", HOSTILE)
    pull = repo.pulls[made.number]
    forge.comment(REPO, Target("pull_request", made.number), HOSTILE, "<!-- m -->")
    assert (pull.state, pull.merged, pull.labels) == ("open", False, [])
    [said] = repo.comments_on(made.number, request=True)
    for text in (pull.body or "", said.body):
        assert "\n\\/merge\n" in text
        assert "\n  \\/close\n" in text
        assert "\n/usr/bin/true is fine\na /merge" in text
    plain = "POST", f"{forge.api}/projects/{repo.id}/merge_requests/{made.number}/notes"
    bearer = {"Authorization": "Bearer t0ken"}
    requests.request(*plain, json={"body": "/merge"}, headers=bearer, timeout=5)
    assert pull.merged, "the fake does obey one that is not ours"


@pytest.mark.parametrize(
    "line", ["/merge", "/MERGE now", "\r/merge", "/mer\rge", " \t/merge", "/a-b_c x"]
)
def test_no_spelling_of_a_quick_action_gets_through(line: str) -> None:
    for text in (line, f"x\n{line}\ny", f"```\n{line}\n```"):
        left = pidispatch._unobeyed(text)
        assert not any(row.lstrip().startswith("/") for row in left.split("\n"))
    for kept in ("/usr/bin/x", "a /merge", "\\/merge", "/", "/ merge", "//x", "/1"):
        assert pidispatch._unobeyed(kept) == kept


def open_one(fake: demo.FakeGitLab, head: str = "pi/issue-7") -> pidispatch.Request:
    repo = fake.repos[REPO]
    if repo.branch(head) is None:
        repo.commit(head, {"fix.txt": head}, "Fix")
    return client(fake).open_request(REPO, head, "main", "Fix it", "Body")


def test_a_request_is_opened_found_again_and_retitled(fake: demo.FakeGitLab) -> None:
    made = open_one(fake)
    assert made == open_one(fake), "GitLab's 409 means that it is there"
    assert made.url.endswith(f"/{REPO}/-/merge_requests/{made.number}")
    forge = client(fake)
    assert forge.find_request(REPO, "pi/issue-7") == made
    forge.retitle_request(REPO, made.number, "[r1/2] Fix it")
    found = forge.find_request(REPO, "pi/issue-7")
    assert found
    assert found.title == "[r1/2] Fix it"
    for other in ("pi/issue-7-r1", "pi/issue", "pi/issue-70"):
        assert forge.find_request(REPO, other) is None
    repo = fake.repos[REPO]
    repo.close(repo.pulls[made.number])
    assert forge.find_request(REPO, "pi/issue-7") is None
    assert open_one(fake).number != made.number


@pytest.mark.parametrize("draft", ["Draft: ", "draft:", "[Draft] ", "(DRAFT) "])
def test_a_draft_stays_a_draft_under_our_marker(
    fake: demo.FakeGitLab, draft: str
) -> None:
    """Its prefix is a state that a person set; the marker goes behind it."""
    made, forge, pulls = open_one(fake), client(fake), fake.repos[REPO].pulls
    pulls[made.number].title = f"{draft}[r1/2] Fix it"
    found = forge.find_request(REPO, "pi/issue-7")
    assert found
    assert found.title == "[r1/2] Fix it"
    pulls[made.number].title = f"{draft}Fix it"
    forge.retitle_request(REPO, made.number, "[r1/2] Fix it")
    assert pulls[made.number].title == f"{draft}[r1/2] Fix it"
    assert demo.gitlab_item_json("", fake.repos[REPO], pulls[made.number])["draft"]
    pulls[made.number].title = "No Draft: here"
    again = forge.find_request(REPO, "pi/issue-7")
    assert again
    assert again.title == "No Draft: here"


def test_forks_with_our_branchs_name_never_hide_our_request(
    fake: demo.FakeGitLab,
) -> None:
    repo = fake.repos[REPO]
    made = open_one(fake)
    for n in range(pidispatch.PAGE_SIZE + 5):
        pull = replace_pull(repo.pulls[made.number], 100 + n)
        repo.pulls[pull.number] = pull
    deleted = replace_pull(repo.pulls[made.number], 900, owner="")
    repo.pulls[900] = deleted
    found = client(fake).find_request(REPO, "pi/issue-7")
    assert found == made
    del repo.pulls[made.number]
    assert client(fake).find_request(REPO, "pi/issue-7") is None


def replace_pull(pull: demo.Pull, number: int, owner: str = "stranger") -> demo.Pull:
    import dataclasses

    return dataclasses.replace(pull, number=number, head_owner=owner, id=number)


def test_rows_that_the_filter_let_through_are_compared_all_the_same() -> None:
    row = {
        "iid": 3,
        "web_url": "u",
        "source_branch": "other",
        "source_project_id": 5,
        "target_project_id": 5,
    }
    for change in (
        {},
        {"source_branch": "pi/issue-7", "source_project_id": 6},
        {"source_branch": "pi/issue-7", "source_project_id": None},
        {
            "source_branch": "pi/issue-7",
            "source_project_id": None,
            "target_project_id": None,
        },
    ):
        forge = gitlab(Canned(200, [row | change]), gitlab_token="t")
        assert forge.find_request(REPO, "pi/issue-7") is None


def test_a_request_that_cannot_be_opened_says_so(fake: demo.FakeGitLab) -> None:
    with pytest.raises(Rejected) as told:
        client(fake).open_request(REPO, "no-such-branch", "main", "T", "B")
    assert told.value.status == 400


def test_an_item_is_read_again_unless_it_became_confidential(
    fake: demo.FakeGitLab,
) -> None:
    repo, forge = fake.repos[REPO], client(fake)
    repo.issues[7].body = None
    assert forge.item(REPO, Target("issue", 7, "old")) == Target("issue", 7, "Crash")
    made = open_one(fake)
    target = Target("pull_request", made.number)
    assert forge.item(REPO, target) == replace_target(target, "Fix it", "Body")
    repo.issues[7].confidential = True
    with pytest.raises(Rejected, match="confidential"):
        forge.item(REPO, Target("issue", 7))


def replace_target(target: Target, title: str, body: str) -> Target:
    return replace(target, title=title, body=body)


def test_a_branch_is_protected_when_our_own_token_cannot_push_to_it(
    fake: demo.FakeGitLab,
) -> None:
    repo, forge = fake.repos[REPO], client(fake)
    assert forge.protected(REPO, "main") is False
    repo.protect("ma*")
    assert forge.protected(REPO, "main") is True, "a wildcard protects as well"
    repo.commit("a/b", {"x": "y"})
    assert forge.protected(REPO, "a/b") is False
    maintainer = {"protected": True, "can_push": True}
    loose = gitlab(Canned(200, maintainer), gitlab_token="t")
    assert loose.protected(REPO, "main") is False
    with pytest.raises(InfraError):
        forge.protected(REPO, "absent")
    for answer in (Canned(403, {}), Canned(200, {"protected": True}), Canned(500, {})):
        with pytest.raises(InfraError):
            gitlab(answer, gitlab_token="t").protected(REPO, "main")


# -- the fake is like the real one ----------------------------------------------


def test_gitlabs_own_client_reads_and_writes_the_fake(fake: demo.FakeGitLab) -> None:
    """python-gitlab, for the calls we use: what it expects is what we are given."""
    import gitlab as real

    repo = fake.repos[REPO]
    repo.protect("main")
    lab = real.Gitlab(fake.url, private_token="t0ken")
    lab.auth()
    assert lab.user.username == "pi-bot"
    project = lab.projects.get(REPO)
    assert (project.id, project.default_branch) == (repo.id, "main")
    user = fake.data.accounts.users["maintainer"]
    assert project.members_all.get(user.id).access_level == 30
    with pytest.raises(real.exceptions.GitlabGetError) as told:
        project.members_all.get(1)
    assert told.value.response_code == 404
    assert project.branches.get("main").protected
    issue_ = project.issues.get(7)
    assert (issue_.title, issue_.state) == ("Crash", "opened")
    for n in range(25):
        issue_.notes.create({"body": f"note {n}"})
    assert len(issue_.notes.list(get_all=True)) == 25

    repo.commit("pi/issue-7", {"fix.txt": "x"}, "Fix")
    asked = {"source_branch": "pi/issue-7", "target_branch": "main", "title": "Fix"}
    made = project.mergerequests.create(asked)
    assert made.source_project_id == made.target_project_id == project.id
    with pytest.raises(real.exceptions.GitlabCreateError) as twice:
        project.mergerequests.create(asked)
    assert twice.value.response_code == 409
    made.title = "Draft: Fix"
    made.save()
    only = {"state": "opened", "source_branch": "pi/issue-7", "get_all": True}
    [row] = project.mergerequests.list(**only)
    assert (row.iid, row.title, row.draft) == (made.iid, "Draft: Fix", True)
    made.notes.create({"body": "looked at"})
    assert [c.body for c in repo.comments_on(1, request=True)] == ["looked at"]
    with pytest.raises(real.exceptions.GitlabAuthenticationError):
        real.Gitlab(fake.url, private_token="wrong").auth()


# -- from a delivery to a merge request ------------------------------------------


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with make_world(tmp_path, kind="gitlab") as made:
        yield made


def send(
    world: World, payload: dict[str, Any], guid: str | None = None
) -> tuple[int, dict[str, Any]]:
    world.sent += 1
    guid = guid or f"{world.name}-{world.sent}"
    return world.send(*demo.gitlab_delivery(payload, WORLD_SECRET, guid))


def test_an_urgent_label_makes_two_branches_and_two_merge_requests(
    world: World,
) -> None:
    world.rules({"replicas": 2})
    world.start()
    jobs = world.label(guid="one")
    assert jobs == ["gl-one-r1", "gl-one-r2"]
    assert [run.state for run in world.wait(jobs)] == ["completed", "completed"]
    pulls = world.pulls()
    assert sorted(pulls) == ["pi/issue-7-r1", "pi/issue-7-r2"]
    for i in (1, 2):
        pull = pulls[f"pi/issue-7-r{i}"]
        assert pull.title == f"[r{i}/2] Bend the spoon"
        assert f"compare with `pi/issue-7-r{3 - i}`" in (pull.body or "")
    assert {world.record(job).target for job in jobs} == {"octo/spoon#7"}
    assert len(world.comments()) == 2
    assert all("/-/merge_requests/" in text for text in world.comments())
    prompts = json.dumps([call.body for call in world.model.log])
    assert "merge request" in prompts
    assert "pull request" not in prompts

    payload = demo.gitlab_payload(world.repo, 7, "update", "maintainer")
    payload["labels"] = [{"id": 9, "title": "pi:urgent"}]
    payload["changes"] = {"labels": {"previous": [], "current": payload["labels"]}}
    again = (200, {"status": "duplicate"})
    assert send(world, payload, "one") == again
    status, _ = send(world, payload, "two")
    assert status == 202
    world.wait_for(lambda: world.store.status(caps(world), 0).pending == 0)
    assert len(world.store.runs(99)) == 2, "each replica coalesced with itself"
    assert send(world, payload, "other-id-same-body")[1]["status"] == "pending"


def caps(world: World) -> pidispatch.Caps:
    return pidispatch.Caps.of(world.settings)


def test_our_own_notes_and_labels_start_nothing(world: World) -> None:
    """T21."""
    on = {"type": "comment", "phrase": "@pi"}
    world.rules({"on": on, "run": {"kind": "gitlab", "flow": "fix-issue"}})
    world.start()
    note_ = demo.gitlab_note_payload(world.repo, 7, "@pi go", "operator")
    assert send(world, note_) == (200, {"status": "ignored", "reason": "self"})


def test_confidential_items_and_internal_notes_are_dropped(world: World) -> None:
    on = {"type": "comment", "phrase": "@pi"}
    world.rules({}, {"on": on, "run": {"kind": "gitlab", "flow": "fix-issue"}})
    world.start()
    world.repo.issues[7].confidential = True
    hidden = demo.gitlab_payload(world.repo, 7, "update", "maintainer", "pi:urgent")
    internal = demo.gitlab_note_payload(
        world.repo, 7, "@pi go", "maintainer", internal=True
    )
    for payload in (hidden, internal):
        answer = send(world, payload)
        assert answer == (200, {"status": "ignored", "reason": "confidential"})


FORK: list[tuple[str | None, str]] = [
    (None, "a branch of ours"),
    ("somebody", "a fork"),
    ("", "a fork that was deleted"),
]


@pytest.mark.parametrize(("owner", "what"), FORK, ids=[row[1] for row in FORK])
def test_replicas_on_a_merge_request_comment_twice_and_push_nothing(
    world: World, owner: str | None, what: str
) -> None:
    world.repo.add_issue(1, title="Not the request", labels=["x"])
    pull = world.repo.open_pull(
        "topic", title="Bend", files={"spoon.txt": "bent\n"}, fork_owner=owner or None
    )
    if owner == "":
        pull.head_owner = ""
    on = {"type": "comment", "phrase": "@pi"}
    run = {"kind": "gitlab", "flow": "review", "replicas": 2}
    world.rules({"on": on, "run": run})
    look = (
        "git diff --stat HEAD refs/pidispatch/request "
        "> ${PI_OUTBOX:-/outbox}/comment.md"
    )
    change = "echo x > x && git add x && git commit -qm x"
    world.model.set_scripts(solve(bash(look), bash(change), say()))
    world.start()
    before = dict(world.repo.refs)
    note_ = demo.gitlab_note_payload(
        world.repo, pull.number, "@pi please review", "maintainer", request=True
    )
    assert send(world, note_, "one")[0] == 202
    jobs = world.wait_for(lambda: len(j := world.jobs_of("one")) == 2 and j)
    assert [run.state for run in world.wait(jobs)] == ["completed", "completed"]
    texts = [c.body for c in world.repo.comments_on(pull.number, request=True)]
    for i in (1, 2):
        [mine] = [text for text in texts if f"Replica {i} of 2" in text]
        assert "spoon.txt" in mine
        assert "pidispatch publish" in mine
    assert world.repo.comments_on(1, request=False) == []
    assert {world.record(job).target for job in jobs} == {"octo/spoon!1"}
    assert world.repo.refs == before, "nothing is pushed to a person's branch"
    assert [p.title for p in world.repo.pulls.values()] == ["Bend"]


@pytest.mark.parametrize("action", ["approved", "close"])
def test_a_review_and_a_close_start_what_their_rules_say(
    world: World, action: str
) -> None:
    pull = world.repo.open_pull("topic", files={"spoon.txt": "bent\n"})
    on = {"type": "pull_request", "action": [action]}
    world.rules({"on": on, "run": {"kind": "gitlab", "flow": "review"}})
    world.model.set_scripts(solve(say()))
    world.start()
    payload = demo.gitlab_payload(
        world.repo, pull.number, action, "maintainer", request=True
    )
    assert send(world, payload, "one")[0] == 202
    [job] = world.wait_for(lambda: world.jobs_of("one"))
    assert world.wait([job])[0].state == "completed"
    assert len(world.repo.comments_on(pull.number, request=True)) == 1


def test_a_draft_that_a_person_made_keeps_its_state_through_a_second_run(
    world: World,
) -> None:
    world.rules({"replicas": 2})
    world.start()
    world.wait(world.label())
    for pull in world.pulls().values():
        pull.title = f"Draft: {pull.title}"
    titles = sorted(p.title for p in world.pulls().values())
    for job in [row.id for row in world.store.runs(9)]:
        outside = pidispatch.Outside(world.settings.db)
        pidispatch.publish_by_hand(world.settings, outside, job, None)
    assert sorted(p.title for p in world.pulls().values()) == titles


# -- doctor ----------------------------------------------------------------------


def test_doctor_tests_the_token_and_says_how_a_hook_is_switched_on_again(
    fake: demo.FakeGitLab,
) -> None:
    """T10."""

    def check(**fields: Any) -> pidispatch.Check:
        checks: list[pidispatch.Check] = []
        served = {"gitlab_url": fake.url, "gitlab_webhook_secret": ("s",), **fields}
        session = requests.Session()
        pidispatch._check_forges(Settings(**served), (_rule(),), checks, session)
        [found] = checks
        return found

    good = check(gitlab_token="t0ken")
    assert (good.name, good.state) == ("gitlab", "ok")
    assert "switch it on again with Settings, Webhooks, Test" in good.found
    none, wrong = check(gitlab_token=None), check(gitlab_token="wrong")
    assert (none.state, wrong.state) == ("fail", "fail")
    assert "GITLAB_TOKEN" in str(none.fix)


# -- the answers of the edge -------------------------------------------------------


CREDENTIALS: list[tuple[str, dict[str, str | None], int]] = [
    ("right", {}, 202),
    ("wrong", {"X-Gitlab-Token": "wrong"}, 401),
    ("missing", {"X-Gitlab-Token": None}, 401),
    ("empty", {"X-Gitlab-Token": ""}, 401),
    ("no id", {"Idempotency-Key": None}, 400),
    ("no event", {"X-Gitlab-Event": None}, 400),
    ("no id and wrong", {"Idempotency-Key": None, "X-Gitlab-Token": "x"}, 401),
    ("text", {"Content-Type": "text/plain"}, 415),
]


def changed(
    sent: tuple[dict[str, str], bytes], changes: dict[str, str | None]
) -> tuple[dict[str, str], bytes]:
    merged = {**sent[0], **changes}
    return {k: v for k, v in merged.items() if v is not None}, sent[1]


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with make_world(tmp_path_factory.mktemp("edge"), kind="gitlab") as made:
        made.change(concurrency=1)
        made.start()
        yield made


@pytest.mark.parametrize(
    ("name", "changes", "status"), CREDENTIALS, ids=[row[0] for row in CREDENTIALS]
)
def test_the_edge_answers_exactly_in_token_mode(
    edge: World, name: str, changes: dict[str, str | None], status: int
) -> None:
    number = edge.repo.add_issue().number
    payload = demo.gitlab_payload(
        edge.repo, number, "update", "maintainer", "pi:urgent"
    )
    delivery = demo.gitlab_delivery(payload, WORLD_SECRET, f"guid-{name}")
    found, answer = edge.send(*changed(delivery, changes))
    assert found == status
    if name == "no id":
        assert answer["fix"] == "GitLab sends it since 17.4"


def test_what_is_understood_and_not_for_us_never_costs_the_hook(edge: World) -> None:
    """T10: GitLab switches a hook off on 4xx and 5xx; doctor says how to mend it."""
    quiet = [
        issue("update"),
        issue() | {"object_kind": "push"},
        issue() | {"user": {"id": 4}},
        issue() | {"project": None},
        merge("merge"),
        note("Commit"),
        {},
        {"object_kind": "issue", "object_attributes": [], "labels": 5, "user": "x"},
    ]
    for payload in quiet:
        payload.setdefault("object_kind", "x")
        status, answer = send(edge, payload)
        assert (status, answer["status"]) == (200, "ignored"), payload
    assert "switches a hook off" in GitLab.outage_hint
    assert "Test" in GitLab.outage_hint


SIGNED: list[tuple[str, dict[str, str | None], int, int]] = [
    ("right", {}, 0, 202),
    ("stale", {}, -301, 401),
    ("ahead", {}, 301, 401),
    ("no signature but the token", {"webhook-signature": None}, 0, 401),
    ("another id", {"webhook-id": "forged"}, 0, 401),
    ("no id", {"webhook-id": None}, 0, 401),
]


def test_the_edge_answers_exactly_in_signature_mode(tmp_path: Path, clock: Any) -> None:
    with make_world(tmp_path, clock=clock, kind="gitlab") as world:
        both = (SIGNING, "whsec_" + base64.b64encode(b"next").decode())
        world.change(gitlab_webhook_mode="signature", gitlab_webhook_secret=both)
        world.start()
        for name, changes, late, status in SIGNED:
            number = world.repo.add_issue().number
            payload = demo.gitlab_payload(
                world.repo, number, "update", "maintainer", "pi:urgent"
            )
            when = clock() + late
            headers_, body = demo.gitlab_delivery(payload, SIGNING, f"g-{name}", when)
            headers_["X-Gitlab-Token"] = SIGNING
            found, _ = world.send(*changed((headers_, body), changes))
            assert found == status, name
            if status == 401:
                good = demo.gitlab_delivery(payload, both[1], f"g-{name}", clock())
                assert world.send(good[0], good[1] + b" ")[0] == 401, "tampered"
                assert world.send(*good)[0] == 202, "the real id was not burned"


def test_tokens_of_the_world_never_reach_a_comment_or_a_record(world: World) -> None:
    world.start()
    jobs = world.label()
    world.wait(jobs)
    texts = [
        *world.comments(),
        json.dumps(pidispatch.msgspec.to_builtins(world.record(jobs[0]))),
    ]
    assert not any(TOKEN in text or WORLD_SECRET in text for text in texts)
    assert set(pidispatch.secrets_of(world.settings)) >= {TOKEN, WORLD_SECRET}
