"""Matching: which rule an event fires, on what word, or why none does."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from pidispatch import (
    DROP_REASONS,
    FORGES,
    Drop,
    Event,
    Match,
    On,
    Rule,
    Run,
    Target,
    match_event,
)

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def rules(*pairs: tuple[On, Run]) -> tuple[Rule, ...]:
    return tuple(Rule(i, on, run) for i, (on, run) in enumerate(pairs))


def run(kind: str = "github", flow: str = "fix-issue", **more: Any) -> Run:
    return Run(kind=kind, flow=flow, **more)


def labels(*any_: str, **more: Any) -> On:
    return On(type="label", any=any_, **more)


def request(*actions: str, **more: Any) -> On:
    return On(type="pull_request", action=actions, **more)


def closes(word: str = "closed", number: int | None = None) -> On:
    return On(type="issue", action=(word,), number=number)


def event(kind: Any, action: str | None, forge: Any = "github", **more: Any) -> Event:
    """An event as a forge's parser would hand it over; target #7."""
    on_request = kind == "pull_request"
    target = Target("pull_request" if on_request else "issue", 7)
    given: dict[str, Any] = {"target": target, "repo": "octo/shop"} | more
    return Event(forge=forge, delivery="d", name="e", kind=kind, action=action, **given)


def labelled(*names: str, added: tuple[str, ...] | None = (), **more: Any) -> Event:
    action = more.pop("action", "labeled")
    return event("label", action, labels=names, added=added, **more)


def outcome(found: Match | Drop) -> int | str:
    """The index of the rule that matched, or the reason why none did."""
    return found.reason if isinstance(found, Drop) else found.rule.index


def judged(on: On, seen: Event) -> int | str:
    return outcome(match_event(rules((on, run(seen.forge))), seen))


# -- labels -------------------------------------------------------------------


def test_a_rule_fires_on_the_label_that_was_added() -> None:
    found = match_event(
        rules((labels("pi"), run())), labelled("bug", "pi", added=("pi",))
    )
    assert found == Match(Rule(0, labels("pi"), run()), "fix-issue", "pi")


#: (the rule's any, all, none; the item's labels; the added ones; outcome)
PREDICATES: tuple[tuple[str, On, tuple[str, ...], tuple[str, ...], int | str], ...] = (
    ("any: one of two", labels("a", "b"), ("b",), ("b",), 0),
    ("any: none there", labels("a", "b"), ("c",), ("c",), "no-allowlisted-label"),
    ("any: there before", labels("a"), ("a", "c"), ("c",), "label-not-added"),
    ("all: the last one", On(type="label", all=("a", "b")), ("a", "b"), ("b",), 0),
    (
        "all: one missing",
        On(type="label", all=("a", "b")),
        ("a",),
        ("a",),
        "no-allowlisted-label",
    ),
    ("both: any there, all added", labels("a", all=("b",)), ("a", "b"), ("b",), 0),
    ("none: absent", labels("a", none=("x",)), ("a",), ("a",), 0),
    (
        "none: present",
        labels("a", none=("x",)),
        ("a", "x"),
        ("a",),
        "no-allowlisted-label",
    ),
    ("case counts", labels("A"), ("a",), ("a",), "no-allowlisted-label"),
    ("no part of a name", labels("pi"), ("pi:x",), ("pi:x",), "no-allowlisted-label"),
    ("the added label is of the set", labels("a"), (), ("a",), 0),
)


@pytest.mark.parametrize(
    ("on", "present", "added", "expected"),
    [row[1:] for row in PREDICATES],
    ids=[row[0] for row in PREDICATES],
)
def test_the_predicate_holds_on_the_set_and_names_what_was_added(
    on: On, present: tuple[str, ...], added: tuple[str, ...], expected: int | str
) -> None:
    assert judged(on, labelled(*present, added=added)) == expected


def test_the_first_rule_in_file_order_wins() -> None:
    two = rules((labels("a"), run(flow="one")), (labels("a", "b"), run(flow="two")))
    assert outcome(match_event(two, labelled("a", "b", added=("b",)))) == 1
    found = match_event(two, labelled("a", added=("a",)))
    assert isinstance(found, Match) and (found.rule.index, found.flow) == (0, "one")


def test_only_rules_of_the_events_own_forge_count() -> None:
    two = rules((labels("a"), run("gitlab")), (labels("a"), run("forgejo")))
    seen = labelled("a", added=("a",), forge="forgejo", action="label_updated")
    assert outcome(match_event(two, seen)) == 1
    assert outcome(match_event(two, labelled("a", added=("a",)))) == (
        "no-allowlisted-label"
    )


def test_six_labels_in_one_second_fire_a_rule_once_t18() -> None:
    names = ("a", "b", "c", "pi", "e", "f")
    deliveries = [labelled(*names, added=(name,)) for name in names]
    fired = [judged(labels("pi"), seen) for seen in deliveries]
    assert fired.count(0) == 1
    assert set(fired) == {0, "label-not-added"}


def test_a_label_that_comes_last_of_all_fires_once_whatever_the_order() -> None:
    both = On(type="label", all=("a", "b"))
    assert judged(both, labelled("b", added=("b",))) == "no-allowlisted-label"
    assert judged(both, labelled("b", "a", added=("a",))) == 0


#: (forge, action, labels, added, outcome by default, outcome with `present`)
ACTIONS: tuple[tuple[Any, str, tuple[str, ...], Any, int | str, Any], ...] = (
    ("github", "labeled", ("a",), ("a",), 0, 0),
    ("github", "labeled", ("a", "z"), ("z",), "label-not-added", 0),
    ("github", "opened", ("a",), (), "label-not-added", 0),
    ("github", "opened", ("a",), None, "label-not-added", 0),
    ("github", "reopened", ("a",), (), "label-not-added", 0),
    ("github", "unlabeled", ("a",), (), "action-not-actionable", None),
    ("github", "edited", ("a",), (), "action-not-actionable", None),
    ("github", "transferred", ("a",), (), "action-not-actionable", None),
    ("gitlab", "open", ("a",), (), 0, 0),
    ("gitlab", "open", ("a",), None, 0, 0),
    ("gitlab", "update", ("a",), ("a",), 0, 0),
    ("gitlab", "update", ("a", "z"), ("z",), "label-not-added", 0),
    ("gitlab", "update", ("a",), (), "label-not-added", "label-not-added"),
    ("gitlab", "reopen", ("a",), ("a",), "label-not-added", 0),
    ("forgejo", "opened", ("a",), (), 0, 0),
    ("forgejo", "label_updated", ("a",), ("a",), 0, 0),
    ("forgejo", "label_updated", ("a",), None, 0, 0),
    ("forgejo", "label_updated", ("a",), (), "label-not-added", "label-not-added"),
    ("forgejo", "reopened", ("a",), None, "label-not-added", 0),
    ("forgejo", "label_cleared", ("a",), None, "action-not-actionable", None),
    ("forgejo", "assigned", ("a",), None, "action-not-actionable", None),
    ("azure", "created", ("a",), (), 0, 0),
    ("azure", "updated", ("a",), ("a",), 0, 0),
    ("azure", "updated", ("a",), (), "label-not-added", "label-not-added"),
    ("azure", "deleted", ("a",), (), "action-not-actionable", None),
)


@pytest.mark.parametrize(
    ("forge", "action", "present", "added", "default", "with_present"), ACTIONS
)
def test_a_label_rule_knows_the_forges_actions_t14(
    forge: Any,
    action: str,
    present: tuple[str, ...],
    added: Any,
    default: int | str,
    with_present: int | str | None,
) -> None:
    seen = labelled(*present, added=added, forge=forge, action=action)
    assert judged(labels("a"), seen) == default
    wanted = default if with_present is None else with_present
    assert judged(labels("a", match="present"), seen) == wanted


def test_a_label_given_at_creation_fires_once_on_forgejo_t14() -> None:
    opened = labelled("pi", added=None, forge="forgejo", action="opened")
    updated = labelled("pi", "z", added=("z",), forge="forgejo", action="label_updated")
    cleared = labelled("pi", added=None, forge="forgejo", action="label_cleared")
    fired = [judged(labels("pi"), seen) for seen in (opened, updated, cleared)]
    assert fired == [0, "label-not-added", "action-not-actionable"]


def test_azures_tags_ignore_case_and_others_do_not() -> None:
    on = labels("PI:Urgent", none=("WIP",))
    tags = {"forge": "azure", "action": "updated"}
    assert judged(on, labelled("pi:urgent", added=("pi:urgent",), **tags)) == 0
    held = labelled("pi:urgent", "wip", added=("pi:urgent",), **tags)
    assert judged(on, held) == "no-allowlisted-label"
    assert judged(on, labelled("pi:urgent", added=("pi:urgent",))) == (
        "no-allowlisted-label"
    )


def test_the_nearest_miss_of_several_rules_is_reported() -> None:
    two = rules((labels("a"), run()), (labels("nowhere"), run()))
    assert outcome(match_event(two, labelled("a", added=("z",)))) == "label-not-added"
    assert outcome(match_event(two[::-1], labelled("a", added=("z",)))) == (
        "label-not-added"
    )


# -- requests -----------------------------------------------------------------

#: (name, the rule, forge, action, more of the event, outcome)
REQUESTS: tuple[tuple[str, On, Any, str, dict[str, Any], int | str], ...] = (
    ("an action", request("opened"), "github", "opened", {}, 0),
    (
        "another action",
        request("opened"),
        "github",
        "synchronize",
        {},
        "no-matching-pr-trigger",
    ),
    (
        "an action nobody knows",
        request("opened"),
        "github",
        "edited",
        {},
        "action-not-actionable",
    ),
    (
        "labels of an opened request count as added",
        request("opened", any=("a",)),
        "github",
        "opened",
        {"labels": ("a",), "added": ()},
        0,
    ),
    (
        "opened without the label",
        request("opened", any=("a",)),
        "github",
        "opened",
        {"labels": ("b",)},
        "no-matching-pr-trigger",
    ),
    (
        "opened and held back",
        request("opened", none=("wip",)),
        "github",
        "opened",
        {"labels": ("wip",)},
        "no-matching-pr-trigger",
    ),
    (
        "the label of labeled",
        request("labeled", any=("a",)),
        "github",
        "labeled",
        {"labels": ("a",), "added": ("a",)},
        0,
    ),
    (
        "another label of labeled",
        request("labeled", any=("a",)),
        "github",
        "labeled",
        {"labels": ("a", "b"), "added": ("b",)},
        "label-not-added",
    ),
    (
        "labeled with none of them",
        request("labeled", any=("a",)),
        "github",
        "labeled",
        {"labels": ("b",), "added": ("b",)},
        "no-matching-pr-trigger",
    ),
    (
        "another label with match present",
        request("labeled", any=("a",), match="present"),
        "github",
        "labeled",
        {"labels": ("a", "b"), "added": ("b",)},
        0,
    ),
    (
        "new commits test the present set",
        request("synchronize", any=("a",)),
        "github",
        "synchronize",
        {"labels": ("a",), "added": ()},
        0,
    ),
    (
        "new commits without the label",
        request("synchronize", all=("a",)),
        "github",
        "synchronize",
        {},
        "no-matching-pr-trigger",
    ),
    (
        "label_updated by memory",
        request("label_updated", any=("a",)),
        "forgejo",
        "label_updated",
        {"labels": ("a", "b"), "added": ("b",)},
        "label-not-added",
    ),
    (
        "label_updated without memory",
        request("label_updated", any=("a",)),
        "forgejo",
        "label_updated",
        {"labels": ("a", "b"), "added": None},
        0,
    ),
    (
        "gitlab's update by a label",
        request("update", any=("a",)),
        "gitlab",
        "update",
        {"labels": ("a",), "added": ("a",)},
        0,
    ),
    (
        "gitlab's update of something else",
        request("update", any=("a",)),
        "gitlab",
        "update",
        {"labels": ("a",), "added": ()},
        "label-not-added",
    ),
    (
        "gitlab's update with match present",
        request("update", any=("a",), match="present"),
        "gitlab",
        "update",
        {"labels": ("a",), "added": ()},
        0,
    ),
    ("gitlab's update bare", request("update"), "gitlab", "update", {"added": ()}, 0),
    (
        "gitlab's update held back",
        request("update", none=("wip",)),
        "gitlab",
        "update",
        {"labels": ("wip",), "added": ()},
        "no-matching-pr-trigger",
    ),
    (
        "gitlab's merge",
        request("close"),
        "gitlab",
        "merge",
        {},
        "action-not-actionable",
    ),
    ("gitlab's approval", request("approved"), "gitlab", "approved", {}, 0),
    ("azure", request("created", "updated"), "azure", "updated", {}, 0),
    (
        "azure's merge attempt",
        request("updated"),
        "azure",
        "merged",
        {},
        "action-not-actionable",
    ),
    (
        "a review of any state",
        request("review_submitted"),
        "github",
        "review_submitted",
        {"review_state": "approved"},
        0,
    ),
    (
        "a review of the state",
        request("review_submitted", reviewState=("changes_requested", "commented")),
        "github",
        "review_submitted",
        {"review_state": "commented", "review": "Please …"},
        0,
    ),
    (
        "a review of another state",
        request("review_submitted", reviewState=("changes_requested",)),
        "github",
        "review_submitted",
        {"review_state": "approved"},
        "review-state-not-matched",
    ),
    (
        "a review without state",
        request("review_submitted", reviewState=("approved",)),
        "github",
        "review_submitted",
        {},
        "review-state-not-matched",
    ),
    (
        "line comments alone",
        request("review_submitted"),
        "github",
        "review_submitted",
        {"review_state": "commented", "review": " \n"},
        "no-review-body",
    ),
    (
        "a null body",
        request("review_submitted", reviewState=("commented",)),
        "github",
        "review_submitted",
        {"review_state": "commented", "review": None},
        "no-review-body",
    ),
    (
        "an approval needs no body",
        request("review_submitted"),
        "github",
        "review_submitted",
        {"review_state": "approved", "review": None},
        0,
    ),
    (
        "a review nobody waits for",
        request("opened"),
        "github",
        "review_submitted",
        {"review_state": "commented"},
        "no-matching-pr-trigger",
    ),
    ("a close", request("closed"), "github", "closed", {}, 0),
    ("its close", request("closed", number=7), "forgejo", "closed", {}, 0),
    (
        "another's close",
        request("close", number=8),
        "gitlab",
        "close",
        {},
        "no-matching-close-trigger",
    ),
    (
        "a close nobody waits for",
        request("opened"),
        "github",
        "closed",
        {},
        "no-matching-close-trigger",
    ),
)


@pytest.mark.parametrize(
    ("on", "forge", "action", "more", "expected"),
    [row[1:] for row in REQUESTS],
    ids=[row[0] for row in REQUESTS],
)
def test_a_request_rule_fires_on_its_actions(
    on: On, forge: Any, action: str, more: dict[str, Any], expected: int | str
) -> None:
    assert judged(on, event("pull_request", action, forge, **more)) == expected


def test_what_made_a_request_rule_match_is_told() -> None:
    mine = rules((request("opened", "labeled", any=("a",)), run()))
    opened = event("pull_request", "opened", labels=("a",))
    labeled = event("pull_request", "labeled", labels=("a",), added=("a",))
    found = [match_event(mine, seen) for seen in (opened, labeled)]
    assert [m.by for m in found if isinstance(m, Match)] == ["opened", "a"]


def test_the_nearest_miss_of_a_review_is_reported() -> None:
    mine = rules(
        (request("review_submitted"), run()),
        (request("review_submitted", reviewState=("approved",)), run()),
        (request("opened"), run()),
    )
    seen = event("pull_request", "review_submitted", review_state="commented")
    for order in (mine, mine[::-1]):
        assert outcome(match_event(order, seen)) == "no-review-body"


# -- closes and the rest ------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "forge", "action", "expected"),
    [
        (closes(), "github", "closed", 0),
        (closes(number=7), "forgejo", "closed", 0),
        (closes("close", 7), "gitlab", "close", 0),
        (closes(number=8), "github", "closed", "no-matching-close-trigger"),
        (labels("a"), "github", "closed", "no-matching-close-trigger"),
        (request("closed"), "github", "closed", "no-matching-close-trigger"),
        (closes(), "github", "deleted", "action-not-actionable"),
        (closes(), "azure", None, "action-not-actionable"),
    ],
)
def test_an_issue_rule_fires_on_the_close(
    on: On, forge: Any, action: str | None, expected: int | str
) -> None:
    assert judged(on, event("issue", action, forge)) == expected


def test_an_issue_rule_is_blind_to_requests() -> None:
    seen = event("pull_request", "closed")
    assert judged(closes(), seen) == "no-matching-close-trigger"


def test_a_label_rule_is_blind_to_requests() -> None:
    seen = event("pull_request", "labeled", labels=("a",), added=("a",))
    assert judged(labels("a"), seen) == "no-matching-pr-trigger"


def test_a_fault_of_the_parser_comes_before_every_match() -> None:
    seen = labelled("a", added=("a",), fault="confidential")
    assert judged(labels("a"), seen) == "confidential"


def test_an_event_that_is_not_served_is_unhandled() -> None:
    assert judged(labels("a"), event(None, "created")) == "unhandled-event"


@pytest.mark.parametrize(
    ("kind", "action", "reason"),
    [
        ("label", "labeled", "no-allowlisted-label"),
        ("comment", "created", "no-trigger-phrase"),
        ("pull_request", "opened", "no-matching-pr-trigger"),
        ("pull_request", "closed", "no-matching-close-trigger"),
        ("issue", "closed", "no-matching-close-trigger"),
    ],
)
def test_without_rules_each_kind_has_its_reason(
    kind: Any, action: str, reason: str
) -> None:
    assert outcome(match_event((), event(kind, action))) == reason


# -- comments -----------------------------------------------------------------


def flow_of(text: str | None, phrase: str = "@pi", **more: Any) -> str | None:
    """The flow that a comment starts, fix-issue if its word names no other."""
    mine = rules(
        (On(type="comment", phrase=phrase), run(more.get("forge", "github"))),
        (request("opened"), run("gitlab", "review")),
        (labels("a"), run(flow="deep-review")),
        (On(type="cron"), Run(kind="local", flow="tidy")),
    )
    action = more.pop("action", "created")
    found = match_event(mine, event("comment", action, comment=text, **more))
    if isinstance(found, Drop):
        assert found.reason == "no-trigger-phrase"
        return None
    assert (found.rule.index, found.by) == (0, phrase)
    return found.flow


@pytest.mark.parametrize(
    "text",
    [
        "@pi",
        "please @pi do",
        "(@pi)",
        "[@pi]",
        '"@pi"',
        "@pi.",
        "@pi...",
        "@pi, please",
        "@pi: now",
        "@pi!",
        "@pi?",
        "@pi\u2019 he said",
        "“@pi”",
        "—@pi—",
        "**@pi** please",
        "@**pi**",
        "*please* @pi",
        "# @pi",
        "- @pi",
        "1. first\n2. @pi",
        "> quoted\n\n@pi",
        "```\ncode\n```\n@pi",
        "`code` @pi",
        "[@pi](https://example.com)",
        "a\nb @pi\nc",
        "<b>@pi</b>",
        "<code>x</code> @pi",
        "see https://example.com @pi",
        "x@pi @pi",
        "@p\u200bi",
        "\u2060@pi\ufeff",
        "\r\n@pi\r\n",
        "&#64;pi",
        "@p&#105;",
        "🎉@pi🎉",
        "@pi/ @pi",
    ],
)
def test_a_phrase_that_stands_alone_fires_t23(text: str) -> None:
    assert flow_of(text) == "fix-issue"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "pi",
        "@Pi",
        "@PI",
        "@pis",
        "@pi2",
        "@pi_x",
        "@pi-x",
        "@pi/x",
        "@pi@x",
        "@pi.dev",
        "@pi's",
        "@pi\u2019s",
        "@piß",
        "@piж",
        "@pi\u0301",
        "@pi\u0335",
        "x@pi",
        "1@pi",
        "ж@pi",
        "@@pi",
        "/@pi",
        "_@pi",
        "-@pi",
        ".@pi",
        "\\\\@pi",
        "\\@pi",
        "@pi\\_x",
        "> @pi",
        "> a\n@pi",
        "- > @pi",
        "`@pi`",
        "``a @pi``",
        "```\n@pi\n```",
        "~~~\n@pi",
        "    @pi",
        "- a\n\n      @pi",
        "[a](@pi)",
        '[a](x "@pi")',
        "[a]: x '@pi'",
        "![@pi](x)",
        "<https://example.com/?@pi>",
        "<tel:1?a=@pi>",
        "https://example.com/?to=@pi",
        "www.example.com/?@pi",
        "<!-- @pi -->",
        "<!--\n\n@pi\n\n-->",
        "<div>@pi</div>",
        '<a title="@pi">x</a>',
        "<code>@pi</code>",
        "a <pre>@pi</pre>",
        "<blockquote>\n\n@pi\n\n</blockquote>",
        "| a |\n|---|\n| @pi |",
        "@pi\u200bx",
        "@pi&#8203;x",
    ],
)
def test_a_phrase_inside_something_else_does_not_fire_t23(text: str | None) -> None:
    assert flow_of(text) is None


@pytest.mark.parametrize(
    ("text", "flow"),
    [
        ("@pi review", "review"),
        ("@pi   review, please", "review"),
        ("@pi\treview.", "review"),
        ("@pi: review!", "review"),
        ("(@pi) review?", "review"),
        ("**@pi** review", "review"),
        ("@pi **review**", "review"),
        ("@pi [review](x)", "review"),
        ("@pi\u00a0review", "review"),
        ("x@pi tidy, @pi review", "review"),
        ("> @pi tidy\n\n@pi review", "review"),
        ("@pi re\u200bview", "review"),
        ("@pi deep\\-review", "deep-review"),
        ("@pi review @pi fix-issue", "review"),
        ("@pi\nreview", "fix-issue"),
        ("@pi  \nreview", "fix-issue"),
        ("@pi\n\nreview", "fix-issue"),
        ("@pi please review", "fix-issue"),
        ("@pi Review", "fix-issue"),
        ("@pi reviews", "fix-issue"),
        ("@pi (review)", "fix-issue"),
        ("@pi `review`", "fix-issue"),
        ("@pi `x` review", "fix-issue"),
        ("@pi tidy", "fix-issue"),
        ("@pi, @pi review", "fix-issue"),
    ],
)
def test_the_word_after_the_first_mention_chooses_the_flow(
    text: str, flow: str
) -> None:
    assert flow_of(text) == flow


def test_only_the_flow_changes_with_the_word() -> None:
    mine = rules(
        (On(type="comment", phrase="/pi"), run(replicas=2, image="big")),
        (labels("a"), run(flow="review", image="small")),
    )
    found = match_event(mine, event("comment", "created", comment="/pi review"))
    assert isinstance(found, Match) and found.flow == "review"
    assert found.rule.run == run(replicas=2, image="big")


@pytest.mark.parametrize(
    ("phrase", "text", "fires"),
    [
        ("/pi", "/pi", True),
        ("/pi", "a/pi", False),
        ("/pi", "https://x.org/pi", False),
        ("hey pi", "hey pi!", True),
        ("hey pi", "hey\npi", False),
        ("pi_go", "pi\\_go", True),
        ("pi_go", "pi_gone", False),
        ("pi!", "pi!", True),
        ("$(pi)", "$(pi)", True),
        (".*", "anything", False),
        ("grüße", "gru\u0308ße", True),
        ("🤖", "go 🤖 go", True),
        ("aa", "aaa aa", True),
        ("@pi @pi", "x@pi @pi @pi", True),
    ],
)
def test_a_phrase_is_taken_literally(phrase: str, text: str, fires: bool) -> None:
    assert (flow_of(text, phrase) is not None) is fires


@pytest.mark.parametrize(
    ("text", "flow"),
    [
        ("<div>@pi review</div>", "review"),
        ("<div>@pi<br>review</div>", "fix-issue"),
        ("<p>@pi\nreview</p>", "review"),
        ("<p>Hi</p><p>@pi&nbsp;review</p>", "review"),
        ('<a href="#" data-vss-mention="v">@pi</a> review', "review"),
        ("a&lt;@pi", "fix-issue"),
        ("@p&#8203;i", "fix-issue"),
        ("<code>@pi</code>", None),
        ("<pre><b>@pi</b></pre>", None),
        ("<blockquote><div>@pi</div></blockquote>", None),
        ("<blockquote>a</blockquote>@pi", "fix-issue"),
        ("<!-- @pi -->", None),
        ('<img alt="@pi">', None),
        ("<b>x</b>@pi", None),
        ("</code>@pi", "fix-issue"),
        ("`@pi`", "fix-issue"),
    ],
)
def test_azures_work_items_are_read_as_html(text: str, flow: str | None) -> None:
    assert flow_of(text, forge="azure", action="commented", markup="html") == flow


def test_azures_request_comments_are_read_as_markdown() -> None:
    on_request: dict[str, Any] = {"forge": "azure"}
    on_request["target"] = Target("pull_request", 7)
    assert flow_of("**@pi** review", **on_request) == "review"
    assert flow_of("`@pi`", **on_request) is None


@pytest.mark.parametrize(
    ("forge", "action"),
    [
        ("github", "edited"),
        ("github", "deleted"),
        ("github", None),
        ("gitlab", "update"),
        ("forgejo", "edited"),
    ],
)
def test_an_edited_comment_does_not_fire_t23(forge: Any, action: str | None) -> None:
    seen = event("comment", action, forge, comment="@pi")
    assert judged(On(type="comment", phrase="@pi"), seen) == "action-not-actionable"


@pytest.mark.parametrize(
    ("forge", "action"),
    [
        ("github", "created"),
        ("gitlab", "create"),
        ("gitlab", None),
        ("forgejo", "created"),
        ("azure", "commented"),
        ("azure", None),
    ],
)
def test_a_new_comment_fires_on_every_forge(forge: Any, action: str | None) -> None:
    assert flow_of("@pi", forge=forge, action=action) == "fix-issue"


def test_a_comment_on_a_request_fires_the_same_rule() -> None:
    assert flow_of("@pi review", target=Target("pull_request", 7)) == "review"


def test_no_more_than_githubs_longest_comment_is_read() -> None:
    assert flow_of("a\n\n" * 21_844 + "@pi") == "fix-issue"
    assert flow_of("a\n\n" * 21_846 + "@pi") is None


def test_of_an_endless_paragraph_only_the_beginning_is_read() -> None:
    assert flow_of("a " * 8_190 + "@pi") == "fix-issue"
    assert flow_of("a " * 8_192 + "@pi") is None


# -- properties ---------------------------------------------------------------

few = st.sampled_from(["a", "b", "c", "A", "B"])
sets = st.lists(few, max_size=3).map(tuple)
scraps = st.text(alphabet="@pi \n\\`*_[]()<>!/&#;-.'~|:a\u200b\u0301é", max_size=40)


@st.composite
def any_rule(draw: st.DrawFn) -> tuple[On, Run]:
    kind = draw(st.sampled_from(sorted(FORGES)))
    actions = st.sampled_from([*FORGES[kind].pr_actions, "closed", "x"])
    on = On(
        type=draw(st.sampled_from(["label", "comment", "pull_request", "issue"])),
        any=draw(sets),
        all=draw(sets),
        none=draw(sets),
        match=draw(st.sampled_from(["added", "present"])),
        phrase=draw(st.sampled_from(["@pi", "a", "*", "\\"])),
        action=tuple(draw(st.lists(actions, max_size=2))),
        reviewState=draw(st.sampled_from([(), ("approved",)])),
        number=draw(st.sampled_from([None, 7, 8])),
    )
    return on, run(kind)


@st.composite
def any_event(draw: st.DrawFn) -> Event:
    forge = draw(st.sampled_from(sorted(FORGES)))
    words = {word for row in FORGES.values() for word in row.pr_actions}
    return event(
        draw(st.sampled_from([None, "label", "comment", "pull_request", "issue"])),
        draw(st.none() | st.sampled_from(sorted(words)) | st.text(max_size=3)),
        forge,
        labels=draw(sets),
        added=draw(st.none() | sets),
        comment=draw(st.none() | scraps | st.text()),
        review_state=draw(st.none() | st.sampled_from(["approved", "commented"])),
        review=draw(st.none() | st.text(max_size=2)),
        target=draw(st.none() | st.just(Target("issue", 7))),
        fault=draw(st.none() | st.sampled_from(DROP_REASONS)),
    )


@patient
@given(st.lists(any_rule(), max_size=4), any_event())
def test_any_event_is_judged_and_never_by_another_forges_rule(
    pairs: list[tuple[On, Run]], seen: Event
) -> None:
    found = match_event(rules(*pairs), seen)
    if isinstance(found, Drop):
        assert found.reason in DROP_REASONS
        return
    assert found.rule.run.kind == seen.forge and found.rule.on.type == seen.kind
    assert not seen.fault
    first = [match_event((rule,), seen) for rule in rules(*pairs)[: found.rule.index]]
    assert all(isinstance(earlier, Drop) for earlier in first)


@patient
@given(sets, sets, sets, sets, sets)
def test_a_label_rule_fires_only_on_a_named_label_that_was_added(
    any_: tuple[str, ...],
    all_: tuple[str, ...],
    none: tuple[str, ...],
    present: tuple[str, ...],
    added: tuple[str, ...],
) -> None:
    on = On(type="label", any=any_, all=all_, none=none)
    now = {*present, *added}
    holds = (not any_ or bool(now & {*any_})) and {*all_} <= now and not now & {*none}
    named = bool({*added} & {*any_, *all_})
    fired = judged(on, labelled(*present, added=added)) == 0
    assert fired is (holds and named)


@patient
@given(scraps | st.text())
@example("![@pi")
@example("<![x]]>@pi")
@example("\x00@pi")
def test_any_comment_is_read_without_error(text: str) -> None:
    for forge in FORGES:
        flow_of(text, forge=forge, action="create" if forge == "gitlab" else "created")


@patient
@given(scraps | st.text())
def test_a_comment_fires_nothing_when_all_of_it_is_quoted_or_code(text: str) -> None:
    lines = text.splitlines()
    assert flow_of("".join(f"> {line}\n" for line in lines)) is None
    assert flow_of("".join(f"\t{line}\n" for line in lines)) is None
    assume("~~~" not in text)
    assert flow_of(f"~~~~\n{text}\n~~~~\n") is None


@patient
@given(st.characters(), st.characters())
def test_a_letter_or_digit_beside_the_phrase_keeps_it_from_firing(
    before: str, after: str
) -> None:
    for character, text in ((before, f"x {before}@pi"), (after, f"x @pi{after} y")):
        if character.isalnum() and unicodedata.category(character) != "Cf":
            assert flow_of(text) is None
    for space in (" ", "\n", "\u3000"):
        assert flow_of(f"x{space}@pi{space}y") == "fix-issue"
