"""Section `forges`, Azure DevOps: deliveries, who asked, and what its API is told."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import requests
from conftest import FakeClock, raw_answer
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from world import SECRET, TOKEN, World, bash, say, solve
from world import world as make_world

import pidispatch
import pidispatch_demo as demo
from pidispatch import (
    Actor,
    Azure,
    Event,
    Faults,
    InfraError,
    Malformed,
    Refused,
    Rejected,
    Settings,
    Target,
    Unauthorized,
)

PAYLOADS = Path(
    os.environ.get("PIDISPATCH_PAYLOADS")
    or Path(__file__).parent.parent.parent / "shared" / "payloads"
)
SAID = "ms.vss-code.git-pullrequest-comment-event"
PERSON = "11111111-2222-4333-8444-555555555555"
OTHER = "99999999-2222-4333-8444-555555555555"


def manifest() -> list[dict[str, Any]]:
    file = PAYLOADS / "manifest.json"
    rows = json.loads(file.read_bytes()) if file.is_file() else []
    return [row for row in rows if row["forge"] == "azure"]


def azure(**fields: Any) -> Azure:
    fields.setdefault("azure_webhook_secret", (SECRET,))
    fields.setdefault("azure_org_url", "https://dev.azure.com/fabrikam")
    return Azure(Settings(**fields), requests.Session())


def delivery(event: str, resource: object, **more: Any) -> dict[str, Any]:
    shape = {
        "subscriptionId": "sub",
        "notificationId": 7,
        "id": "event",
        "eventType": event,
        "resource": resource,
        "createdDate": "2026-01-02T03:04:05.1234567Z",
    } | more
    return {key: value for key, value in shape.items() if value is not None}


def parse(shape: object) -> Event:
    return azure().parse({}, json.dumps(shape).encode())


def fields(**more: Any) -> dict[str, Any]:
    known = {
        "System.TeamProject": "My Project",
        "System.Title": "Crash",
        "System.ChangedBy": "Ada <ada@example.com>",
        "System.ChangedDate": "2026-01-02T03:04:05.123Z",
    }
    return known | {f"System.{name}": value for name, value in more.items()}


def updated(change: object, now: str | None = None, **more: Any) -> dict[str, Any]:
    """A `workitem.updated`; `change` is the tags' old and new value."""
    tags = {} if now is None else {"Tags": now}
    resource = {
        "id": 42,
        "workItemId": 9,
        "rev": 3,
        "revisedBy": {"id": PERSON, "uniqueName": "ada@example.com"},
        "fields": {} if change is None else {"System.Tags": change},
        "revision": {"id": 9, "rev": 3, "fields": fields(**tags)},
    } | more
    return delivery("workitem.updated", resource)


def item(event: str = "workitem.created", rev: int | None = 1, **more: Any) -> Any:
    return delivery(event, {"id": 9, "rev": rev, "fields": fields(**more)})


# -- settings -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"AZURE_ORG_URL": None}, "AZURE_WEBHOOK_SECRET .* without AZURE_ORG_URL"),
        ({"AZURE_TOKEN": None}, "AZURE_WEBHOOK_SECRET .* without AZURE_TOKEN"),
        ({"AZURE_WEBHOOK_MODE": "header"}, "needs AZURE_WEBHOOK_HEADER"),
        ({"AZURE_WEBHOOK_MODE": "token"}, "AZURE_WEBHOOK_MODE"),
        ({"AZURE_WEBHOOK_HEADER": "x y"}, "AZURE_WEBHOOK_HEADER"),
        ({"AZURE_ORG_URL": "dev.azure.com/x"}, "AZURE_ORG_URL"),
    ],
)
def test_settings_that_serve_nothing_together_are_named(
    more: dict[str, str | None], words: str
) -> None:
    given = {"AZURE_ORG_URL": "https://x/y", "AZURE_WEBHOOK_SECRET": "s"}
    given |= {"AZURE_TOKEN": "t"} | more
    environ = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(Faults, match=words):
        pidispatch.load_settings(environ, None)


def test_azure_is_served_when_its_secret_is_set() -> None:
    """T05: an unset secret is never 'no check'."""
    served = pidispatch.forges_of(Settings(azure_webhook_secret=("s",)))
    assert list(served) == ["azure"]
    with pytest.raises(Unauthorized):
        azure(azure_webhook_secret=()).verify(basic(""), b"")


# -- verify -------------------------------------------------------------------


def basic(pair: str) -> dict[str, str]:
    coded = base64.b64encode(pair.encode()).decode()
    return {"authorization": f"Basic {coded}"}


@pytest.mark.parametrize(
    ("secret", "pair", "holds"),
    [
        ("hook:pässword", "hook:pässword", True),
        ("hook:pass", "hook:passx", False),
        ("hook:pass", "other:pass", False),
        ("hook:pass", ":pass", False),
        ("pass", "anyone:pass", True),
        ("pass", ":pass", True),
        ("pass", "pass", False),
        ("pass", "pass:", False),
        ("a:b:c", "a:b:c", True),
    ],
)
def test_basic_credentials_must_be_the_secret(
    secret: str, pair: str, holds: bool
) -> None:
    forge = azure(azure_webhook_secret=("old:one", secret))
    if holds:
        forge.verify(basic(pair), b"x")
    else:
        with pytest.raises(Unauthorized):
            forge.verify(basic(pair), b"x")


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "Basic",
        "Basic ",
        "Basic !!!",
        "Basic ß",
        "Bearer " + base64.b64encode(f":{SECRET}".encode()).decode(),
        f"Basic :{SECRET}",
        f"Basic {SECRET}",
        "Basic " + base64.b64encode(b"\xff\xfe:\xff").decode(),
    ],
)
def test_a_header_that_is_no_basic_credential_is_refused(value: str | None) -> None:
    sent = {} if value is None else {"authorization": value}
    with pytest.raises(Unauthorized):
        azure().verify(sent, b"x")


def test_in_header_mode_only_the_named_header_counts() -> None:
    forge = azure(azure_webhook_mode="header", azure_webhook_header="X-Hook")
    forge.verify({"x-hook": SECRET}, b"x")
    bad: tuple[dict[str, str], ...] = (
        {},
        basic(f":{SECRET}"),
        {"x-hook": ""},
        {"x-hook": SECRET + " "},
        {"x-hook": "\u1234"},
        {"x-other": SECRET},
    )
    for sent in bad:
        with pytest.raises(Unauthorized):
            forge.verify(sent, b"x")
    with pytest.raises(Unauthorized):
        azure().verify({"x-hook": SECRET}, b"x")


@given(st.text())
def test_no_text_in_a_header_breaks_verifying(text: str) -> None:
    for mode in ("basic", "header"):
        forge = azure(azure_webhook_mode=mode, azure_webhook_header="X-Hook")
        with pytest.raises(Unauthorized):
            forge.verify({"authorization": text, "x-hook": "x" + text}, b"x")


# -- parse: work items ---------------------------------------------------------


def test_a_tagged_work_item_becomes_an_event_with_the_tag_that_was_added() -> None:
    change = {"oldValue": "bug", "newValue": "bug; pi:urgent"}
    assert parse(updated(change, "bug; pi:urgent")) == Event(
        forge="azure",
        delivery="sub.7.event",
        name="workitem",
        kind="label",
        action="updated",
        repo="My Project",
        target=Target("issue", 9, "Crash"),
        actor=Actor(PERSON, "ada@example.com"),
        labels=("bug", "pi:urgent"),
        added=("pi:urgent",),
        rev=3,
        when=1767323045.123,
    )


@pytest.mark.parametrize(
    ("change", "now", "added"),
    [
        ({"newValue": "a"}, "a", ("a",)),
        ({"oldValue": "", "newValue": "a; b"}, "a; b", ("a", "b")),
        ({"oldValue": "A", "newValue": "a;  B ;"}, "a; B", ("B",)),
        ({"oldValue": "a; b", "newValue": "a"}, "a", ()),
        ({"oldValue": "a"}, None, ()),
        ({"newValue": "a"}, None, ("a",)),
        (None, "a", ()),
        ("a", "a", ()),
        ({"newValue": ["a"]}, "a", ()),
    ],
)
def test_tags_are_compared_without_case_and_only_a_change_adds(
    change: object, now: str | None, added: tuple[str, ...]
) -> None:
    """The tags that are there although none changed are no labelling."""
    event = parse(updated(change, now))
    assert (event.added, event.fault) == (added, None)
    assert set(added) <= set(event.labels)


def test_on_a_created_work_item_all_tags_count() -> None:
    event = parse(item(Tags="a; pi:urgent"))
    assert (event.kind, event.action, event.added) == ("label", "created", None)
    rules = [label_rule()]
    assert isinstance(pidispatch.match_event(rules, event), pidispatch.Match)


def label_rule(**more: Any) -> pidispatch.Rule:
    on = pidispatch.On(type="label", any=("PI:urgent",))
    run = pidispatch.Run(kind="azure", flow="fix-issue", repository="A Repo", **more)
    return pidispatch.Rule(0, on, run)


def test_the_matched_rule_names_the_repository_in_jobs_and_keys() -> None:
    """T30: "My Project" stays inside every alphabet."""
    event = parse(updated({"newValue": "pi:urgent"}, "pi:urgent"))
    found = pidispatch.match_event([label_rule(replicas=2)], event)
    assert isinstance(found, pidispatch.Match)
    one, two = pidispatch.fan_out(found, event)
    assert one.repo == "My Project/A Repo"
    assert one.dedup == "My Project/A Repo#9:fix-issue:r1"
    assert (one.id, two.id) == ("az-sub.7.event-r1", "az-sub.7.event-r2")
    assert (one.branch, two.branch) == ("pi/issue-9-r1", "pi/issue-9-r2")
    name = pidispatch.mirror_name("azure", one.repo)
    assert name.startswith("azure-My_Project_A_Repo-")
    url = "https://dev.azure.com/fabrikam/My%20Project/_git/A%20Repo"
    assert azure().clone_url(one.repo) == url


@pytest.mark.parametrize(
    ("ids", "delivery_id"),
    [
        ({}, "sub.7.event"),
        ({"subscriptionId": None}, "7.event"),
        ({"subscriptionId": None, "notificationId": None}, "event"),
        ({"id": None}, "sub.7"),
        ({"id": ["x"], "notificationId": True}, "sub"),
        ({"notificationId": "8"}, "sub.8.event"),
        ({"id": "a b"}, f"sub.7.h{pidispatch._digest('a b')}"),
        ({"id": "a.b"}, f"sub.7.h{pidispatch._digest('a.b')}"),
        ({"id": " ", "subscriptionId": 0, "notificationId": 1.5}, None),
    ],
)
def test_the_delivery_is_known_by_its_ids_together(
    ids: dict[str, Any], delivery_id: str | None
) -> None:
    shape = item() | ids
    shape = {key: value for key, value in shape.items() if value is not None}
    if delivery_id is None:
        with pytest.raises(Malformed):
            parse(shape)
    else:
        assert parse(shape).delivery == delivery_id


@pytest.mark.parametrize(
    ("resource", "number"),
    [
        ({"workItemId": 9}, 9),
        ({"workItemId": 0}, 9),
        ({"workItemId": None}, 9),
        ({"workItemId": "9", "revision": {"fields": fields()}}, None),
        ({"workItemId": True, "revision": {"id": -1, "fields": fields()}}, None),
    ],
)
def test_an_updates_own_id_is_never_taken_for_the_work_items(
    resource: dict[str, Any], number: int | None
) -> None:
    event = parse(updated(None, **resource))
    assert (event.target and event.target.number) == number
    assert event.fault == (None if number else "missing-number")


@pytest.mark.parametrize(
    "name",
    [None, 3, "", "a/b", "..", ".x", "_x", "x.", "a\nb", "a:b", "a\u202eb", "x" * 65],
)
def test_a_project_that_is_no_safe_name_is_no_repository(name: Any) -> None:
    assert parse(item(TeamProject=name)).fault == "no-repository"


def test_html_becomes_text_and_a_bugs_steps_stand_for_its_description() -> None:
    html = (
        "<div>One &lt;b&gt; &amp;&nbsp;two</div><ul><li>x</li><li>y</li></ul>"
        "<style>p {}</style><!-- hidden --><p>code:</p><pre>if x:\n\n    y</pre>"
    )
    target = parse(item(Description=html)).target
    assert target
    assert target.body == "One <b> & two\nx\ny\ncode:\nif x:\n\n    y"
    shape = item()
    shape["resource"]["fields"]["Microsoft.VSTS.TCM.ReproSteps"] = "<p>Press.</p>"
    told = parse(shape).target
    assert told
    assert told.body == "Press."


def test_hostile_text_arrives_as_data() -> None:
    """T28, T53: quotes, shell and template syntax, a 64 kB title."""
    text = "$(rm -rf /) `id` \"' {{ x }} {% y %} \x00 \u202e " + "🎉" * 16_000
    target = parse(item(Title=text, Description=text.replace("<", ""))).target
    assert target
    assert target.title == text
    assert "{{ x }}" in target.body


def test_the_prompt_gets_a_comments_text_and_the_phrase_is_read_in_html() -> None:
    html = "<div>@pi please</div><blockquote>@pi not</blockquote>"
    event = parse(item("workitem.commented", History=html))
    assert (event.comment, event.markup) == (html, "html")
    rule = pidispatch.Rule(
        0,
        pidispatch.On(type="comment", phrase="@pi"),
        pidispatch.Run(kind="azure", flow="review", repository="r"),
    )
    found = pidispatch.match_event([rule], event)
    assert isinstance(found, pidispatch.Match)
    [job] = pidispatch.fan_out(found, event)
    assert job.comment == "@pi please\n@pi not"
    quoted = replace(event, comment="<blockquote>@pi</blockquote>")
    assert pidispatch.match_event([rule], quoted) == pidispatch.Drop(
        "no-trigger-phrase"
    )


@pytest.mark.parametrize(
    ("version", "fault"),
    [
        ({"commentId": 5, "version": 1}, None),
        ({"commentId": 5}, None),
        (None, None),
        ({"commentId": 5, "version": 2}, "action-not-actionable"),
        ({"commentId": 5, "isDeleted": True}, "action-not-actionable"),
    ],
)
def test_an_edited_or_deleted_remark_starts_nothing(
    version: Any, fault: str | None
) -> None:
    shape = item("workitem.commented", History="@pi")
    shape["resource"]["commentVersionRef"] = version
    event = parse(shape)
    assert (event.fault, event.comment_id) == (fault, "5" if version else None)


# -- parse: requests -----------------------------------------------------------


def pull(**more: Any) -> dict[str, Any]:
    return {
        "repository": {"name": "A Repo", "project": {"name": "My Project"}},
        "pullRequestId": 4,
        "status": "active",
        "createdBy": {"id": PERSON, "uniqueName": "ada@example.com"},
        "creationDate": "2026-01-02T03:04:05Z",
        "title": "Bend",
        "description": "Please.",
        "sourceRefName": "refs/heads/topic",
        "lastMergeSourceCommit": {"commitId": "a" * 40},
    } | more


def test_a_created_requests_actor_is_who_created_it() -> None:
    event = parse(delivery("git.pullrequest.created", pull()))
    assert (event.kind, event.action, event.incomplete) == (
        "pull_request",
        "created",
        False,
    )
    assert event.repo == "My Project/A Repo"
    assert event.target == Target("pull_request", 4, "Bend", "Please.")
    assert event.actor == Actor(PERSON, "ada@example.com")
    assert (event.head, event.head_ref) == ("a" * 40, "refs/heads/topic")


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        ("active", None),
        ("completed", "action-not-actionable"),
        ("abandoned", "action-not-actionable"),
    ],
)
def test_only_an_open_requests_update_may_start_work(
    status: str, fault: str | None
) -> None:
    event = parse(delivery("git.pullrequest.updated", pull(status=status)))
    assert (event.fault, event.incomplete) == (fault, fault is None)


@pytest.mark.parametrize(
    "ref",
    [
        None,
        3,
        "topic",
        "refs/tags/x",
        "refs/heads/-x",
        "refs/heads/a b",
        "refs/heads/a..b",
        "refs/heads/*",
        "refs/heads/a.lock",
        "refs/heads/a\nb",
        "refs/heads/a/",
    ],
)
def test_a_source_branch_that_git_would_not_take_is_not_asked_for(ref: Any) -> None:
    event = parse(delivery("git.pullrequest.created", pull(sourceRefName=ref)))
    assert (event.head_ref, event.fault) == (None, None)


def test_a_forks_branch_is_not_looked_for_in_this_repository() -> None:
    fork = {"forkSource": {"repository": {"id": OTHER}}}
    event = parse(delivery("git.pullrequest.created", pull(**fork)))
    assert (event.head, event.head_ref) == ("a" * 40, None)


REPO_URL = f"https://x/{OTHER}/_apis/git/repositories/{PERSON}"


def comment(**more: Any) -> dict[str, Any]:
    return {
        "id": 2,
        "author": {"id": PERSON, "uniqueName": "ada@example.com"},
        "content": "@pi review",
        "publishedDate": "2026-01-02T03:04:05.5Z",
        "lastUpdatedDate": "2026-01-02T03:04:06Z",
        "lastContentUpdatedDate": "2026-01-02T03:04:06Z",
        "_links": {
            "repository": {"href": REPO_URL},
            "threads": {"href": f"{REPO_URL}/pullRequests/4/threads/8"},
        },
    } | more


def test_a_comment_on_a_request_brings_the_request() -> None:
    event = parse(delivery(SAID, {"comment": comment(), "pullRequest": pull()}))
    assert (event.kind, event.markup, event.fault) == ("comment", "markdown", None)
    assert event.repo == "My Project/A Repo"
    assert event.target == Target("pull_request", 4, "Bend", "Please.")
    assert event.actor == Actor(PERSON, "ada@example.com")
    assert (event.comment, event.comment_id) == ("@pi review", "8.2")
    assert event.incomplete is False


@pytest.mark.parametrize(
    ("more", "new"),
    [
        ({}, True),
        ({"lastContentUpdatedDate": "2026-01-02T03:04:07.5Z"}, True),
        ({"lastUpdatedDate": "2026-02-02T03:04:05Z"}, True),
        (
            {
                "lastUpdatedDate": "2026-01-02T03:04:08Z",
                "lastContentUpdatedDate": "2026-01-02T03:04:08Z",
            },
            False,
        ),
        ({"isDeleted": True}, False),
        ({"commentType": "system"}, False),
        ({"publishedDate": "0001-01-01T00:00:00Z"}, False),
        ({"lastUpdatedDate": None, "lastContentUpdatedDate": None}, False),
        ({"lastUpdatedDate": "9999-01-01T00:00:00Z"}, True),
    ],
)
def test_a_comment_is_new_when_its_content_is_as_old_as_itself(
    more: dict[str, Any], new: bool
) -> None:
    """T23: edits do not fire."""
    event = parse(delivery(SAID, {"comment": comment(**more), "pullRequest": pull()}))
    assert (event.fault is None) is new


def test_the_first_resource_version_tells_request_and_repository_by_links() -> None:
    event = parse(delivery(SAID, comment(), resourceVersion="1.0"))
    assert event.repo == f"{OTHER}/{PERSON}"
    assert (event.target, event.fault) == (Target("pull_request", 4), None)
    assert event.incomplete is True


@pytest.mark.parametrize(
    "links",
    [
        None,
        "x",
        {},
        {"self": {"href": "https://x"}},
        {"repository": {"href": REPO_URL}},
        {"threads": {"href": f"{REPO_URL}/pullRequests/0/threads/8"}},
        {"threads": {"href": f"{REPO_URL}/pullRequests/{'9' * 16}/threads/8"}},
        {"threads": {"href": "/p/_apis/git/repositories/name/pullRequests/4"}},
        {"threads": {"href": ["x"]}},
    ],
)
def test_links_that_tell_too_little_are_a_missing_number(links: Any) -> None:
    event = parse(delivery(SAID, comment(_links=links)))
    assert event.fault == "missing-number"


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        ("build.complete", "unhandled-event"),
        ("workitem.deleted", "unhandled-event"),
        ("workitem.restored", "unhandled-event"),
        ("git.push", "unhandled-event"),
        ("git.pullrequest.merged", "unhandled-event"),
        ("WorkItem.Updated", "unhandled-event"),
        (None, "unhandled-event"),
        (3, "unhandled-event"),
    ],
)
def test_what_starts_nothing_says_why(event: Any, fault: str) -> None:
    assert parse(delivery(event, {})).fault == fault


def test_a_minimal_delivery_says_what_it_lacks() -> None:
    for event in Azure.events:
        for resource in (None, {}, [], "x", {"id": 1}):
            lacks = parse(delivery(event, resource)).fault
            assert lacks in ("no-repository", "missing-number", "action-not-actionable")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "id",
                    "rev",
                    "workItemId",
                    "fields",
                    "revision",
                    "revisedBy",
                    "System.Tags",
                    "System.TeamProject",
                    "System.ChangedBy",
                    "newValue",
                    "oldValue",
                    "comment",
                    "content",
                    "publishedDate",
                    "_links",
                    "threads",
                    "href",
                    "pullRequest",
                    "pullRequestId",
                    "repository",
                    "project",
                    "name",
                    "createdBy",
                    "sourceRefName",
                ]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=25,
)


@settings(max_examples=150, deadline=None)
@given(JSON, st.sampled_from([*Azure.events, "x"]), JSON)
def test_any_json_parses_to_a_sound_event_or_is_malformed(
    resource: object, name: str, containers: object
) -> None:
    shape = delivery(name, resource, resourceContainers=containers)
    body = json.dumps(shape).encode()
    try:
        event = azure().parse({}, body)
    except Malformed:  # NaN
        return
    assert event.fault is None or event.fault in pidispatch.DROP_REASONS
    if event.fault is None:
        assert event.kind and event.repo and event.target
        assert event.target.number >= 1
    again = msgspec.json.decode(msgspec.json.encode(event), type=Event)
    assert again == event


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_bytes_that_are_no_delivery_are_malformed(body: bytes) -> None:
    with pytest.raises(Malformed):
        azure().parse({}, body)


# -- real payloads ------------------------------------------------------------

FIRES = {"pr_opened": 2, "pr_updated": 2}


@pytest.mark.skipif(not manifest(), reason="the stored real payloads are not here")
@pytest.mark.parametrize("row", manifest(), ids=lambda row: row["file"])
def test_try_agrees_with_what_real_payloads_should_be_seen_as(
    row: dict[str, Any],
) -> None:
    run: dict[str, Any] = {"kind": "azure", "flow": "review"}
    mine = run | {"repository": "shop"}
    shape = [
        {"on": {"type": "label", "any": ["x"]}, "run": mine},
        {"on": {"type": "comment", "phrase": "my comment"}, "run": mine},
        {"on": {"type": "pull_request", "action": ["created", "updated"]}, "run": run},
    ]
    rules = pidispatch.load_triggers(json.dumps({"triggers": shape}).encode(), "x")
    path = PAYLOADS / row["file"]
    expect = row["expect"]
    trial = pidispatch.try_delivery(rules, "azure", path, (), None, None)
    assert trial.event == (row["event"] or "")
    assert trial.repo == expect.get("repo")
    kind = "pull_request" if expect.get("is_pr") else "issue"
    number = expect.get("number")
    assert trial.target == (number and pidispatch.TrialTarget(kind, number))
    if "actor_id" in expect:
        assert trial.actor == expect["actor_id"]
    fires = FIRES | {"comment_pr": 1}
    assert trial.rule == fires.get(row["kind"])
    assert (trial.reason is None) == (row["kind"] in fires)
    event = azure().parse({}, path.read_bytes())
    assert event.head in (expect.get("head_sha"), None)
    if event.target and event.target.type == "pull_request":
        assert (event.target.title, event.target.body) == (
            expect["title"],
            expect["body"],
        )
        assert (event.head, event.head_ref) == (expect["head_sha"], expect["head_ref"])
    assert (event.comment or None) == expect.get("comment")
    assert expect.get("delivery", "") in event.delivery


# -- who asked ----------------------------------------------------------------


@pytest.fixture(params=["services", "server"])
def fake(request: pytest.FixtureRequest) -> Iterator[demo.FakeAzure]:
    with demo.FakeAzure([demo.Token(TOKEN, "operator", name="operator")]) as made:
        made.data.own_server = request.param == "server"
        people = {"ada": "write", "bob": "read", "eve": "none"}
        made.create_repo(
            "My Project/A Repo",
            {"spoon.txt": "straight\n"},
            issues={9: {"title": "Crash", "body": "<p>It crashes.</p>"}},
            collaborators=people
            | {"amy": "admin", "tom": "team", "dee": "directory", "x[bot]": "none"},
        )
        made.create_repo("Other/Repo", collaborators={"eve": "write"})
        yield made


def client(fake: demo.FakeAzure, **more: Any) -> Azure:
    more.setdefault("azure_token", TOKEN)
    return azure(azure_org_url=f"{fake.url}/fabrikam", **more)


def by(login: str, **more: Any) -> Event:
    event = parse(item("workitem.commented", History="@pi"))
    actor = Actor(demo.azure_guid("user", login), f"{login}@example.com")
    return replace(event, actor=actor, incomplete=False, **more)


@pytest.mark.parametrize(
    ("login", "may"),
    [
        ("ada", True),
        ("amy", True),
        ("tom", True),
        ("dee", True),
        ("bob", False),
        ("eve", False),
        ("x[bot]", False),
        ("nobody", False),
    ],
)
def test_members_of_the_project_and_nobody_else_may_start_work(
    fake: demo.FakeAzure, login: str, may: bool
) -> None:
    """T24: also through a group, and a directory's; readers only look on."""
    forge = client(fake)
    assert forge.authority(by(login)) == "ask"
    assert forge.ask(by(login)) is may
    assert forge.ask(by(login, repo="My Project/A Repo")) is may


@pytest.mark.parametrize("path", ["projects", "resourceAreas", "(?i)identities"])
def test_what_cannot_be_told_is_no_answer(fake: demo.FakeAzure, path: str) -> None:
    """203 is Azure's page to sign in."""
    for status in (0, 203, 302, 401, 403, 404, 418, 429, 500, 503):
        fake.fail_next("GET", path, status)
        with pytest.raises(InfraError):
            client(fake).ask(by("bob"))


@pytest.mark.parametrize(
    "path", ["graph/descriptors", "graph/groups", "graph/memberships"]
)
def test_a_graph_that_fails_is_no_answer_either(path: str) -> None:
    with demo.FakeAzure([demo.Token(TOKEN, "operator")]) as fake:
        fake.create_repo("My Project/A Repo", collaborators={"ada": "write"})
        fake.fail_next("GET", path, 403)
        with pytest.raises(InfraError):
            client(fake).ask(by("ada"))


def test_without_a_token_nobody_can_be_asked_about(fake: demo.FakeAzure) -> None:
    forge = client(fake, azure_token=None)
    assert forge.own_id() is None
    with pytest.raises(InfraError, match="no token"):
        forge.ask(by("ada"))


TRICKS = [
    "Ada",
    "x <ada@example.com",
    "ada@example.com",
    "<>",
    "x <ada@example.com> y",
    "x <ada@example.com> <eve@example.com>",
]


@pytest.mark.parametrize("name", [*TRICKS, "x <ada@example.com>"])
def test_a_display_name_that_looks_like_an_owner_gains_nothing(
    fake: demo.FakeAzure, name: str
) -> None:
    """Whoever wrote the revision is told by the API, whatever the text says."""
    repo = fake.repos["My Project/A Repo"]
    payload = fake.remarked(repo, 9, "@pi", "eve")
    payload["resource"]["fields"]["System.ChangedBy"] = name
    forge = client(fake)
    event = parse(payload)
    if event.incomplete:
        event = forge.complete(event)
    assert forge.authority(event) == "denied" or forge.ask(event) is False


def test_name_and_mail_are_completed_to_the_identity_of_the_revision(
    fake: demo.FakeAzure,
) -> None:
    repo = fake.repos["My Project/A Repo"]
    event = parse(fake.remarked(repo, 9, "@pi", "ada"))
    assert event.incomplete
    assert event.actor
    assert event.actor.id.startswith("unproven-")
    done = client(fake).complete(event)
    ada = Actor(demo.azure_guid("user", "ada"), "ada@example.com")
    assert (done.actor, done.incomplete) == (ada, False)


def test_a_bare_name_is_not_allowed_and_no_name_is_missing() -> None:
    bare = parse(item(ChangedBy="Ada"))
    assert (bare.incomplete, azure().authority(bare)) == (False, "denied")
    for nobody in (None, "", 3, [], {}, {"id": "0" * 8 + "-0000" * 3 + "-" + "0" * 12}):
        assert parse(item(ChangedBy=nobody)).actor is None
    identity = {"id": PERSON.upper(), "uniqueName": "ada@example.com"}
    assert parse(item(ChangedBy=identity)).actor == Actor(PERSON, "ada@example.com")


def test_an_updates_actor_is_who_pushed_last_else_the_author(
    fake: demo.FakeAzure,
) -> None:
    repo = fake.repos["My Project/A Repo"]
    repo.commit("topic", {"spoon.txt": "bent\n"})
    made = repo.open_pull("topic", user="eve")
    event = parse(fake.requested(repo, made.number, "updated"))
    forge = client(fake)
    for pushers, last in (
        (["eve", "ada"], "ada"),
        (["ada", "eve"], "eve"),
        ([], "eve"),
    ):
        fake.data.pushers[made.number] = pushers
        done = forge.complete(event)
        assert done.actor
        assert done.actor.id == demo.azure_guid("user", last)
    fake.fail_next("GET", "iterations", 404)
    with pytest.raises(InfraError):
        forge.complete(event)


def test_a_comment_without_its_request_is_completed_by_the_api(
    fake: demo.FakeAzure,
) -> None:
    repo = fake.repos["My Project/A Repo"]
    repo.commit("topic", {"spoon.txt": "bent\n"})
    made = repo.open_pull("topic", title="Bend", body="Please.", user="eve")
    event = parse(fake.said(repo, made.number, "@pi", "ada", "1.0"))
    done = client(fake).complete(event)
    assert done.repo == "My Project/A Repo"
    assert done.target == Target("pull_request", made.number, "Bend", "Please.")
    assert done.head_ref == "refs/heads/topic"
    assert done.actor
    assert done.actor.id == demo.azure_guid("user", "ada")


def test_our_own_id_is_asked_once_and_nobody_is_no_identity(
    fake: demo.FakeAzure,
) -> None:
    forge = client(fake)
    assert forge.own_id() == forge.own_id() == demo.azure_guid("user", "operator")
    assert len(fake.requests("GET", "connectionData")) == 1
    with pytest.raises(InfraError):
        client(fake, azure_token="wrong").own_id()


class Canned(requests.Session):
    """Answers everything with one body, and keeps what was asked."""

    def __init__(self, body: bytes, kind: str = "application/json") -> None:
        super().__init__()
        self.body, self.kind = body, kind
        self.asked: list[dict[str, Any]] = []

    def request(self, *args: Any, **more: Any) -> requests.Response:
        self.asked.append(more)
        response = requests.Response()
        response.status_code, response.raw = 200, raw_answer(self.body)
        response.headers["content-type"] = self.kind
        return response


ANONYMOUS = b'{"authenticatedUser": {"id": "%s"}}' % (
    b"aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa"
)


@pytest.mark.parametrize("body", [ANONYMOUS, b"{}", b"[]", b"<html>", b""])
def test_an_odd_answer_is_no_identity(body: bytes) -> None:
    forge = Azure(Settings(azure_org_url="https://x/y", azure_token="t"), Canned(body))
    with pytest.raises(InfraError):
        forge.own_id()


def test_the_token_goes_as_a_password_without_a_user_and_nowhere_else() -> None:
    session = Canned(b"<html>", "text/html")
    forge = Azure(Settings(azure_org_url="https://x/y", azure_token="t"), session)
    with pytest.raises(Rejected) as told:
        forge.default_branch("p/r")
    assert told.value.status == 401
    [asked] = session.asked
    assert asked["allow_redirects"] is False
    assert asked["timeout"] == pidispatch.API_TIMEOUT
    signed = asked["auth"](requests.Request("GET", "https://x").prepare())
    assert signed.headers["Authorization"] == "Basic OnQ="
    areas = b'{"value": [{"id": "%s", "locationUrl": "http://plain/"}]}'
    session = Canned(areas % Azure.graph_area.encode())
    forge = Azure(Settings(azure_org_url="https://x/y", azure_token="t"), session)
    with pytest.raises(InfraError, match="https"):
        forge._area(Azure.graph_area)


# -- the repository and its requests --------------------------------------------

ITEM = Target("issue", 9)
SPACED = "My Project/A Repo"
MARK = "<!-- pidispatch:az-x-r1:result -->"


def test_a_remark_is_posted_once_and_found_on_any_page(fake: demo.FakeAzure) -> None:
    repo, forge = fake.repos[SPACED], client(fake)
    text = (
        f"Done: <b>x</b> & [y](https://e.org), see https://e.org/a?b=1&c=2.\n\n{MARK}"
    )
    forge.comment(SPACED, ITEM, text, MARK)
    for number in range(pidispatch.PAGE_SIZE + 5):
        repo.add_comment(9, f"<p>{number}</p>", "ada")
    forge.comment(SPACED, ITEM, text, MARK)
    [ours] = [c.body for c in repo.comments if c.user == "operator"]
    assert ours == (
        '<p>Done: &lt;b&gt;x&lt;/b&gt; &amp; <a href="https://e.org">y</a>, see '
        '<a href="https://e.org/a?b=1&amp;c=2">https://e.org/a?b=1&amp;c=2</a>.</p>\n'
        "<div>pidispatch:az-x-r1:result</div>"
    )


def test_no_text_of_an_agent_or_stranger_silences_a_sibling(
    fake: demo.FakeAzure,
) -> None:
    repo, forge = fake.repos[SPACED], client(fake)
    mark = "pidispatch:az-x-r1:result"
    forge.comment(
        SPACED, ITEM, f"{mark}\n\n{mark}", "<!-- pidispatch:az-x-r2:result -->"
    )
    repo.add_comment(9, f"<div>{mark}</div>", "eve")
    forge.comment(SPACED, ITEM, f"Mine.\n\n{MARK}", MARK)
    assert len([c for c in repo.comments if c.user == "operator"]) == 2


def test_a_lost_answer_makes_no_second_comment(fake: demo.FakeAzure) -> None:
    repo, forge = fake.repos[SPACED], client(fake)
    repo.commit("topic", {"spoon.txt": "bent\n"})
    number = repo.open_pull("topic").number
    for target in (ITEM, Target("pull_request", number)):
        fake.fail_next("POST", "comments|threads", 502, moment="after")
        with pytest.raises(InfraError):
            forge.comment(SPACED, target, f"Hi\n\n{MARK}", MARK)
        forge.comment(SPACED, target, f"Hi\n\n{MARK}", MARK)
        assert len(repo.comments_on(target.number)) == 1


def test_a_request_gets_a_closed_thread_in_markdown(fake: demo.FakeAzure) -> None:
    repo, forge = fake.repos[SPACED], client(fake)
    repo.commit("topic", {"spoon.txt": "bent\n"})
    target = Target("pull_request", repo.open_pull("topic").number)
    forge.comment(SPACED, target, f"**Good**\n\n{MARK}", MARK)
    forge.comment(SPACED, target, f"**Good**\n\n{MARK}", MARK)
    [note] = repo.comments_on(target.number)
    assert note.body == f"**Good**\n\n{MARK}"


def test_a_request_is_opened_found_and_retitled(fake: demo.FakeAzure) -> None:
    repo, forge = fake.repos[SPACED], client(fake)
    for i in (1, 2):
        repo.commit(f"pi/issue-9-r{i}", {"spoon.txt": f"bent {i}\n"})
    assert forge.find_request(SPACED, "pi/issue-9-r1") is None
    made = forge.open_request(SPACED, "pi/issue-9-r1", "main", "One", "x" * 4_000)
    assert made.url == f"{forge.clone_url(SPACED)}/pullrequest/{made.number}"
    assert forge.find_request(SPACED, "pi/issue-9-r1") == made
    assert forge.find_request(SPACED, "pi/issue-9") is None
    assert forge.find_request(SPACED, "pi/issue-9-r2") is None
    again = forge.open_request(SPACED, "pi/issue-9-r1", "main", "Two", "")
    assert again == made, "409: there is one already"
    forge.retitle_request(SPACED, made.number, "[r1/2] One")
    assert repo.pulls[made.number].title == "[r1/2] One"
    repo.close(repo.pulls[made.number])
    assert forge.find_request(SPACED, "pi/issue-9-r1") is None
    new = forge.open_request(SPACED, "pi/issue-9-r1", "main", "Three", "")
    assert new.number != made.number


def test_a_forks_branch_of_the_same_name_is_not_ours(fake: demo.FakeAzure) -> None:
    repo = fake.repos[SPACED]
    repo.open_pull("pi/issue-9", files={"x": "y\n"}, fork_owner="eve")
    assert client(fake).find_request(SPACED, "pi/issue-9") is None


def test_a_request_that_cannot_be_opened_says_so(fake: demo.FakeAzure) -> None:
    with pytest.raises(Rejected) as told:
        client(fake).open_request(SPACED, "none", "main", "x", "")
    assert told.value.status == 404


def test_title_and_body_are_read_again(fake: demo.FakeAzure) -> None:
    repo, forge = fake.repos[SPACED], client(fake)
    told = forge.item(SPACED, ITEM)
    assert told == Target("issue", 9, "Crash", "It crashes.")
    repo.commit("topic", {"spoon.txt": "bent\n"})
    number = repo.open_pull("topic", title="Bend", body="Please.").number
    request = Target("pull_request", number)
    assert forge.item(SPACED, request) == replace(request, title="Bend", body="Please.")


def test_a_branch_policy_protects_and_a_bound_on_files_does_not(
    fake: demo.FakeAzure,
) -> None:
    repo, forge = fake.repos[SPACED], client(fake)
    assert forge.default_branch(SPACED) == "main"
    assert forge.protected(SPACED, "main") is False
    repo.protect("main")
    assert forge.protected(SPACED, "main") is True
    assert forge.protected(SPACED, "topic") is False
    fake.fail_next("GET", "policy", 403)
    with pytest.raises(InfraError):
        forge.protected(SPACED, "main")


@pytest.mark.parametrize("more", [{"isEnabled": False}, {"isBlocking": False}])
def test_a_policy_that_is_off_or_only_advises_protects_nothing(more: Any) -> None:
    row = demo.policy_row("fa4e907d-c16b-4a4c-9dfa-4906e5d171dd") | more
    body = json.dumps({"id": "x", "value": [row]}).encode()
    forge = Azure(Settings(azure_org_url="https://x/y", azure_token="t"), Canned(body))
    assert forge.protected("p/r", "main") is False


def test_the_credential_has_a_user_for_git_and_the_clis_variables() -> None:
    forge = azure(azure_token="t0ken")
    assert forge.credential("p/r").password == "t0ken"
    assert forge.credential("p/r").username, "git sends no password without one"
    assert forge.agent_environment("p/r") == {
        "AZURE_DEVOPS_EXT_PAT": "t0ken",
        "AZURE_DEVOPS_ORG_URL": "https://dev.azure.com/fabrikam",
    }
    with pytest.raises(Refused) as told:
        azure().credential("p/r")
    assert told.value.reason == "forge-token-unavailable"


def test_the_log_shows_neither_token_nor_secret() -> None:
    known = list(pidispatch.secrets_of(Settings(azure_webhook_secret=("hook:s3cret",))))
    assert "hook:s3cret" in known
    known = list(pidispatch.secrets_of(Settings(azure_token="t0ken-1")))
    shown = pidispatch.Redactor(known).redact
    for user in ("", "oauth2"):
        coded = base64.b64encode(f"{user}:t0ken-1".encode()).decode()
        assert shown(f"x {coded} t0ken-1") == "x *** ***"


# -- the fake is like the real one: Microsoft's client drives it ------------------


def test_microsofts_own_client_drives_the_fake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AZURE_DEVOPS_CACHE_DIR", str(tmp_path))
    from azure.devops import connection as devops
    from azure.devops.v7_1.git import models as git_models
    from azure.devops.v7_1.work_item_tracking import models as item_models
    from msrest.authentication import BasicAuthentication

    with demo.FakeAzure([demo.Token(TOKEN, "operator")]) as fake:
        repo = fake.create_repo(
            "octo/spoon", issues={7: {"title": "Bend", "labels": ["a", "b"]}}
        )
        repo.add_collaborator("ada", "write")
        repo.commit("topic", {"spoon.txt": "bent\n"})
        creds = BasicAuthentication("", TOKEN)
        joined = devops.Connection(f"{fake.url}/fabrikam", creds)
        clients = joined.clients_v7_1
        who = clients.get_location_client().get_connection_data().authenticated_user
        assert who.id == demo.azure_guid("user", "operator")
        git, graph = clients.get_git_client(), clients.get_graph_client()
        found = git.get_repository("spoon", "octo")
        assert found.default_branch == "refs/heads/main"
        asked = git_models.GitPullRequest(
            title="T",
            description="D",
            source_ref_name="refs/heads/topic",
            target_ref_name="refs/heads/main",
        )
        made = git.create_pull_request(asked, found.id, "octo")
        search = git_models.GitPullRequestSearchCriteria(
            source_ref_name="refs/heads/topic", status="active"
        )
        [listed] = git.get_pull_requests("spoon", search, "octo")
        assert listed.pull_request_id == made.pull_request_id
        note = git_models.Comment(content="Hi", comment_type="text")
        thread = git_models.GitPullRequestCommentThread(comments=[note])
        git.create_thread(thread, "spoon", made.pull_request_id, "octo")
        [back] = git.get_threads("spoon", made.pull_request_id, "octo")
        assert back.comments[0].content == "Hi"
        [step] = git.get_pull_request_iterations("spoon", made.pull_request_id, "octo")
        assert step.author.unique_name == "operator@example.com"
        items = clients.get_work_item_tracking_client()
        assert items.get_work_item(7, "octo").fields["System.Tags"] == "a; b"
        told = items.get_revision(7, 1, "octo").fields["System.ChangedBy"]
        assert told["uniqueName"] == "octo@example.com"
        items.add_comment(item_models.CommentCreate(text="<b>x</b>"), "octo", 7)
        assert items.get_comments("octo", 7).comments[0].text == "<b>x</b>"
        subject = graph.get_descriptor(demo.azure_guid("user", "ada")).value
        project = graph.get_descriptor(demo.azure_guid("project", "octo")).value
        [up] = graph.list_memberships(subject)
        groups = graph.list_groups(scope_descriptor=project)
        assert groups.continuation_token
        assert up.container_descriptor.startswith("vssgp.")
        someone = clients.get_identity_client().read_identities(
            identity_ids=demo.azure_guid("user", "ada"), query_membership="Expanded"
        )
        assert len(someone[0].member_of) == 2


# -- end to end ------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with make_world(tmp_path, kind="azure") as made:
        yield made


def forge_of(world: World) -> demo.FakeAzure:
    return cast(demo.FakeAzure, world.forge)


def send(world: World, payload: dict[str, Any], secret: str = SECRET) -> Any:
    return world.send(*demo.azure_delivery(payload, secret))


def pending(world: World, payload: dict[str, Any], n: int = 1) -> list[str]:
    """Send what has to be asked about; the ids of the jobs it became."""
    before = {run.id for run in world.store.runs(100)}
    assert send(world, payload) == (202, {"status": "pending"})
    world.wait_for(lambda: len(world.store.runs(100)) >= len(before) + n)
    return sorted(run.id for run in world.store.runs(100) if run.id not in before)


def dropped(world: World, payload: dict[str, Any], reason: str) -> None:
    """Send what ends in a counted drop and no job."""
    caps = pidispatch.Caps.of(world.settings)

    def count() -> int:
        return world.store.status(caps, 0).counts.get(reason, 0)

    before, runs = count(), len(world.store.runs(100))
    status, answer = send(world, payload)
    assert status in (200, 202), answer
    world.wait_for(lambda: count() > before)
    assert len(world.store.runs(100)) == runs


def test_an_urgent_tag_makes_two_branches_two_requests_and_markers(
    world: World,
) -> None:
    world.rules({"replicas": 2})
    world.start()
    payload = forge_of(world).tagged(world.repo, 7, "pi:urgent", "maintainer")
    jobs = pending(world, payload, 2)
    runs = world.wait(jobs)
    assert [(run.state, run.target) for run in runs] == [
        ("completed", "octo/spoon#7")
    ] * 2
    pulls = world.pulls()
    assert sorted(pulls) == ["pi/issue-7-r1", "pi/issue-7-r2"]
    for i in (1, 2):
        assert pulls[f"pi/issue-7-r{i}"].title == f"[r{i}/2] Bend the spoon"
        record = world.record(jobs[i - 1])
        assert (record.replica, record.replicas) == (i, 2)
        assert record.target == "octo/spoon#7"
    texts = world.comments()
    assert len(texts) == 2
    assert all("/_git/spoon/pullrequest/" in text for text in texts)
    assert send(world, payload) == (200, {"status": "duplicate"})
    payload |= {"notificationId": 99}
    assert send(world, payload)[1]["status"] == "pending"
    caps = pidispatch.Caps.of(world.settings)
    world.wait_for(lambda: world.store.status(caps, 0).counts.get("coalesced"))
    assert len(world.store.runs(100)) == 2


def test_a_tag_of_ours_or_a_strangers_or_a_readers_starts_nothing(
    world: World,
) -> None:
    """T21, T24."""
    world.repo.add_collaborator("operator", "write")
    world.repo.add_collaborator("reader", "read")
    world.start()
    forge = forge_of(world)
    for login, reason in (
        ("operator", "self"),
        ("stranger", "not-allowed"),
        ("reader", "not-allowed"),
        ("owner[bot]", "not-allowed"),
    ):
        world.repo.accounts.user(login)
        world.repo.issues[7].labels.clear()
        dropped(world, forge.tagged(world.repo, 7, "pi:urgent", login), reason)


PHRASE = {
    "on": {"type": "comment", "phrase": "@pi"},
    "run": {"kind": "azure", "flow": "review", "repository": "spoon", "replicas": 2},
}


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("fork", [None, "stranger"])
def test_replicas_on_a_request_comment_twice_and_push_nothing(
    world: World, version: str, fork: str | None
) -> None:
    """A fork's head is reached by the request's merge; its repository may be gone."""
    world.repo.accounts.user("stranger")
    if fork is None:
        world.repo.commit("topic", {"spoon.txt": "bent\n"}, "Bend")
    pull_ = world.repo.open_pull(
        "topic",
        title="Bend",
        files={"spoon.txt": "bent\n"} if fork else None,
        fork_owner=fork,
    )
    world.rules(PHRASE)
    outbox = "${PI_OUTBOX:-/outbox}"
    look = f"git diff --stat HEAD refs/pidispatch/request > {outbox}/comment.md"
    world.model.set_scripts(
        solve(bash(look), bash("echo x > x; git add x; git commit -qm x"), say())
    )
    world.start()
    before = dict(world.repo.branches)
    payload = forge_of(world).said(
        world.repo, pull_.number, "@pi review", "maintainer", version
    )
    jobs = pending(world, payload, 2)
    runs = world.wait(jobs)
    assert [(run.state, run.target) for run in runs] == [
        ("completed", f"octo/spoon!{pull_.number}")
    ] * 2
    texts = world.comments(pull_.number)
    for i in (1, 2):
        [mine] = [text for text in texts if f"eplica {i} of 2" in text]
        assert "spoon.txt" in mine
        assert f"<!-- pidispatch:{jobs[i - 1]}:review -->" in mine.splitlines()[-1]
    assert world.repo.branches == before
    assert [p.title for p in world.repo.pulls.values()] == ["Bend"]


def test_a_request_whose_branch_is_gone_is_refused(world: World) -> None:
    world.repo.commit("topic", {"spoon.txt": "bent\n"}, "Bend")
    number = world.repo.open_pull("topic").number
    world.rules({"on": {"type": "pull_request", "action": ["created"]}})
    path = world.root / "triggers.json"
    shape = json.loads(path.read_text())
    shape["triggers"][0]["run"] = {"kind": "azure", "flow": "review"}
    path.write_text(json.dumps(shape))
    world.repo.pulls[number].user = "maintainer"
    payload = forge_of(world).requested(world.repo, number)
    world.repo.git.git("update-ref", "-d", "refs/heads/topic")
    world.start()
    [run] = world.wait(pending(world, payload))
    assert (run.state, run.reason) == ("policy", "sha-gone")


def test_an_update_is_judged_by_who_pushed_last(world: World) -> None:
    world.repo.accounts.user("stranger")
    world.repo.commit("topic", {"spoon.txt": "bent\n"}, "Bend")
    number = world.repo.open_pull("topic", user="maintainer").number
    run = {"kind": "azure", "flow": "review"}
    rule = {"on": {"type": "pull_request", "action": ["updated"]}, "run": run}
    world.rules(rule)
    world.start()
    forge = forge_of(world)
    forge.data.pushers[number] = ["maintainer", "stranger"]
    dropped(world, forge.requested(world.repo, number, "updated"), "not-allowed")
    forge.data.pushers[number] = ["stranger", "operator"]
    dropped(world, forge.requested(world.repo, number, "updated"), "self")
    forge.data.pushers[number] = ["stranger", "maintainer"]
    [job] = world.wait(pending(world, forge.requested(world.repo, number, "updated")))
    assert job.target == f"octo/spoon!{number}"


def test_a_comment_that_started_work_starts_none_again(
    tmp_path: Path, clock: FakeClock
) -> None:
    """An edit within two seconds looks new; after the window the memory holds."""
    with make_world(tmp_path, clock=clock, kind="azure") as world:
        world.rules(PHRASE)
        world.start()
        forge = forge_of(world)
        payload = forge.remarked(world.repo, 7, "<p>@pi</p>", "maintainer")
        world.wait(pending(world, payload, 2))
        world.stop()
        world.start()
        clock.pass_(11 * 60)
        when = demo.azure_time(clock())
        payload["resource"]["fields"]["System.ChangedDate"] = when
        dropped(world, payload | {"notificationId": 5}, "duplicate")


def test_names_with_spaces_go_all_the_way(tmp_path: Path) -> None:
    """T30."""
    with make_world(tmp_path, kind="azure") as world:
        world.repo = world.forge.create_repo(
            SPACED, {"spoon.txt": "straight\n"}, issues={9: {"title": "Bend"}}
        )
        world.repo.add_collaborator("maintainer", "team")
        world.rules({"repository": "A Repo"})
        world.start()
        payload = forge_of(world).tagged(world.repo, 9, "PI:URGENT", "maintainer")
        [run] = world.wait(pending(world, payload))
        assert (run.state, run.target) == ("completed", f"{SPACED}#9")
        [made] = world.repo.pulls.values()
        assert made.head == "pi/issue-9"


def test_the_edge_answers_exact_statuses(world: World) -> None:
    world.start()
    payload = forge_of(world).tagged(world.repo, 7, "pi:urgent", "stranger")
    headers, body = demo.azure_delivery(payload, SECRET)
    bare = {k: v for k, v in headers.items() if k != "Authorization"}
    for sent in (bare, demo.azure_delivery(payload, "wrong")[0]):
        assert world.send(sent, body)[0] == 401
    assert world.store.runs(10) == []
    form = headers | {"Content-Type": "application/x-www-form-urlencoded"}
    assert world.send(form, b"payload=x")[0] == 400
    assert world.send(headers, b"{}")[0] == 400
    assert world.send(headers, body[:-1])[0] == 400
    assert world.send(headers, body)[1] == {"status": "pending"}
    quiet = payload | {"eventType": "git.push", "id": "x"}
    assert send(world, quiet) == (
        200,
        {"status": "ignored", "reason": "unhandled-event"},
    )
