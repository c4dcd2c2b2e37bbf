"""Section `intake`, the poller: what happened starts what a delivery would start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import requests
from conftest import FakeClock, raw_answer, record_of
from hypothesis import given, settings
from hypothesis import strategies as st
from world import world as whole_world

import pidispatch
import pidispatch_demo as demo
from pidispatch import (
    DAY,
    Faults,
    GitHub,
    Inbox,
    InfraError,
    Intake,
    Poller,
    Settings,
    Store,
    TriggersFile,
)

SECRET = "s3cret"
TOKEN = "t0ken"
REPO = "octo/lamp"


def rule(on: dict[str, Any], **run: Any) -> dict[str, Any]:
    return {"on": on, "run": {"kind": "github", "flow": "fix-issue"} | run}


RULES = [
    rule({"type": "label", "any": ["pi:fix"]}),
    rule({"type": "label", "any": ["pi:urgent"]}, replicas=2),
    rule({"type": "comment", "phrase": "@pi"}),
    rule({"type": "issue", "action": ["closed"]}, flow="review"),
    rule({"type": "pull_request", "action": ["opened", "synchronize"]}, flow="review"),
    rule(
        {
            "type": "pull_request",
            "action": ["review_submitted"],
            "reviewState": ["changes_requested"],
        }
    ),
    rule({"type": "pull_request", "action": ["labeled"], "any": ["pi:look"]}),
    rule({"type": "pull_request", "action": ["closed"]}, flow="retro"),
]


class Room:
    """A polled repository on the fake GitHub, an intake on a real store, a clock."""

    def __init__(self, root: Path, session: requests.Session | None = None) -> None:
        self.clock = FakeClock()
        tokens = [demo.Token(TOKEN, "pi-bot")]
        self.fake = demo.FakeGitHub(tokens, root=root / "forge", clock=self.clock)
        self.fake.start()
        self.repo = self.fake.create_repo(REPO, issues={7: {"title": "Crash"}})
        self.repo.add_collaborator("maintainer", "write")
        self.repo.accounts.user("stranger")
        self.root, self.session = root, session
        (root / "triggers.json").write_text(json.dumps({"triggers": RULES}))
        self.sent = 0
        self.open()

    def open(self, *, hourly: int = 0, name: str = REPO) -> None:
        """Start, also again on the same file."""
        self.settings = Settings(
            webhook_secret=(SECRET,),
            github_pat=TOKEN,
            github_api_url=self.fake.url,
            poll_repos=(name,),
        )
        self.store = Store(self.root / "queue.db", self.clock)
        session = self.session or requests.Session()
        self.forge = GitHub(self.settings, session, self.clock)
        forges: dict[str, pidispatch.Forge] = {"github": self.forge}
        triggers = TriggersFile(self.root / "triggers.json", forges)
        self.intake = Intake(forges, triggers, self.store, hourly, self.clock)
        self.intake.own["github"] = str(self.repo.accounts.user("pi-bot").id)
        self.inbox = Inbox(self.intake)
        repos = pidispatch.polled_of(self.settings)
        self.poller = Poller(self.intake, repos, self.settings.poll_interval)

    def close(self) -> None:
        self.store.close()

    def poll(self, after: float = 60.0) -> None:
        """Some time later, look; and ask about whoever has to be asked about."""
        self.clock.pass_(after)
        self.poller.turn()
        self.resolve()

    def resolve(self) -> None:
        for delivery, match, attempts in self.store.due_pending(self.clock()):
            self.inbox._busy[delivery.id] = "github"
            self.inbox._resolve(delivery, match, attempts)

    def deliver(self, event: str, payload: dict[str, Any]) -> str:
        """The webhook of something; what was answered."""
        self.sent += 1
        guid = f"guid-{self.sent}"
        headers, body = demo.signed_delivery(event, payload, SECRET, guid)
        lower = {name.lower(): value for name, value in headers.items()}
        answer = self.intake.receive("github", lower, body)
        self.resolve()
        return str(answer.payload["status"])

    def label(self, name: str = "pi:fix", n: int = 7, by: str = "maintainer") -> Any:
        return demo.labeled_payload(self.repo, n, name, by)

    def jobs(self) -> list[pidispatch.Job]:
        sql = "SELECT payload FROM jobs ORDER BY seq"
        rows = self.store._rows(sql)
        return [msgspec.json.decode(row[0], type=pidispatch.Job) for row in rows]

    def made(self) -> list[str]:
        """What the jobs are for, in the order they were made."""
        return [f"{job.title} {job.flow} by {job.trigger.type}" for job in self.jobs()]

    def counts(self) -> dict[str, int]:
        return self.status().counts

    def status(self) -> pidispatch.Status:
        caps = pidispatch.Caps(None, None, None, "UTC")
        return self.store.status(caps, self.clock())

    def trouble(self) -> str | None:
        return self.status().polls[0].trouble


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    made = Room(tmp_path)
    yield made
    made.close()
    made.fake.stop()


# -- what a poll starts -------------------------------------------------------


def test_a_first_poll_replays_nothing_and_the_next_label_starts_work(
    room: Room,
) -> None:
    """T17."""
    room.label()
    demo.comment_payload(room.repo, 7, "@pi go", "maintainer")
    pull = room.repo.open_pull("topic", files={"a": "b"})
    demo.review_payload(room.repo, pull.number, "changes_requested", "no", "maintainer")
    room.poll(1)
    room.poll()
    assert (room.made(), room.counts()) == ([], {})
    room.label("pi:urgent")
    room.poll()
    event = room.repo.events[-1].id
    ids = [job.id for job in room.jobs()]
    assert ids == [f"gh-poll-e{event}-r1", f"gh-poll-e{event}-r2"]
    assert {job.title for job in room.jobs()} == {"octo/lamp#7"}


def test_an_empty_repository_is_followed_from_its_first_event(room: Room) -> None:
    room.poll()
    room.label()
    room.poll()
    assert len(room.jobs()) == 1


def happen(room: Room) -> list[tuple[str, dict[str, Any]]]:
    """One of everything that rules know, some time apart, as webhooks tell it."""
    repo, told = room.repo, []

    def tell(event: str, payload: dict[str, Any]) -> None:
        told.append((event, payload))
        room.clock.pass_(10)

    def pull(head: str) -> int:
        made = repo.open_pull(head, files={head: "1"}, user="maintainer")
        opened = demo.pull_request_payload(repo, made.number, "opened", "maintainer")
        tell("pull_request", opened)
        return made.number

    repo.add_issue(8)
    other = pull("other")  # 9
    tell("issues", room.label("pi:urgent"))
    for number in (7, other):
        said = demo.comment_payload(repo, number, "@pi go on", "maintainer")
        tell("issue_comment", said)
    tell("issues", demo.item_payload(repo, 8, "closed", "maintainer"))
    topic = pull("topic")  # 10
    review = demo.review_payload(repo, topic, "changes_requested", "No", "maintainer")
    tell("pull_request_review", review)
    # of the same flow as the review, and within its window
    tell("pull_request", demo.labeled_payload(repo, topic, "pi:look", "maintainer"))
    third = pull("third")  # 11
    room.clock.pass_(700)
    repo.commit("third", {"third": "2"}, user="maintainer")
    pushed = demo.pull_request_payload(repo, third, "synchronize", "maintainer")
    tell("pull_request", pushed)
    tell("pull_request", demo.item_payload(repo, other, "closed", "maintainer"))
    return told


#: The jobs of all that, however it becomes known.
ALL = {
    "octo/lamp#7 fix-issue by label": 2,
    "octo/lamp#7 fix-issue by comment": 1,
    "octo/lamp#8 review by issue": 1,
    "octo/lamp#9 review by pull_request": 1,
    "octo/lamp#9 fix-issue by comment": 1,
    "octo/lamp#9 retro by pull_request": 1,
    "octo/lamp#10 review by pull_request": 1,
    "octo/lamp#10 fix-issue by pull_request": 1,
    "octo/lamp#11 review by pull_request": 2,
}


def tally(room: Room) -> dict[str, int]:
    made = room.made()
    return {name: made.count(name) for name in made}


def test_an_hour_without_a_receiver_is_made_up_for(room: Room) -> None:
    """T17: labels, comments, closes, requests, reviews, pushes; each is one set."""
    room.poll()
    room.close()
    happen(room)
    room.clock.pass_(3600)
    room.open()
    room.poll()
    assert tally(room) == ALL
    room.poll()
    assert tally(room) == ALL


@pytest.mark.parametrize("late", [1, 3600])
@pytest.mark.parametrize("first", ["webhook", "poll"])
def test_a_poll_and_a_webhook_of_one_event_make_one_set(
    room: Room, first: str, late: float
) -> None:
    """T17: whichever comes first, and however late the other is."""
    room.poll()
    told = happen(room)
    for way in (first, {"poll": "webhook", "webhook": "poll"}[first]):
        if way == "poll":
            room.poll()
        for event, payload in told if way == "webhook" else ():
            answer = room.deliver(event, payload)
            assert answer in ("queued", "pending", "coalesced")
        assert tally(room) == ALL
        room.clock.pass_(late)


@pytest.mark.parametrize("half", [0, 1])
def test_of_deliveries_half_lost_the_other_half_is_found(room: Room, half: int) -> None:
    """T17."""
    room.poll()
    for event, payload in happen(room)[half::2]:
        room.deliver(event, payload)
    room.poll(3600)
    assert tally(room) == ALL


@pytest.mark.parametrize("first", ["webhook", "poll"])
def test_a_refused_event_is_refused_once_and_a_new_one_is_taken(
    room: Room, first: str
) -> None:
    """A refusal frees the window for the next event, not for the same one again."""
    room.poll()
    payload = room.label("pi:urgent")
    for way in (first, {"poll": "webhook", "webhook": "poll"}[first]):
        if way == "poll":
            room.poll(3600)
        else:
            room.deliver("issues", payload)
        while claimed := room.store.claim():
            record = record_of(claimed, outcome="policy", reason="job-image-missing")
            room.store.refuse(claimed, record, None)
    assert len(room.jobs()) == 2
    assert room.counts() == {"queued": 1, "coalesced": 1}
    room.label("pi:urgent")
    room.poll()
    assert room.counts() == {"queued": 2, "coalesced": 1}


def test_a_restart_goes_on_where_it_was(room: Room) -> None:
    room.poll()
    room.label()
    room.poll()
    room.close()
    room.open()
    room.label("pi:fix", n=room.repo.add_issue().number)
    room.poll()
    assert len(room.jobs()) == 2
    assert room.counts() == {"queued": 2}


def test_after_three_days_without_a_look_it_starts_from_now(room: Room) -> None:
    room.poll()
    room.label()
    room.poll(4 * DAY)
    assert room.jobs() == []
    room.label("pi:urgent")
    room.poll()
    assert len(room.jobs()) == 2


def test_events_of_one_second_and_late_ones_are_all_found_once(room: Room) -> None:
    numbers = [room.repo.add_issue().number for _ in range(6)]
    room.label(n=numbers[0])
    room.poll(0)
    for n in numbers[1:4]:
        room.label(n=n)
    room.poll(0)
    assert len(room.jobs()) == 0  # not due yet
    room.poll()
    assert len(room.jobs()) == 3
    room.label(n=numbers[4])
    room.repo.events[-1].created_at -= 100  # the list shows it late
    room.poll()
    assert len(room.jobs()) == 4
    room.poll()
    assert room.counts() == {"queued": 4}


def test_a_repository_is_named_as_deliveries_name_it(room: Room) -> None:
    room.close()
    room.open(name="Octo/Lamp")
    room.fake.data.repos["Octo/Lamp"] = room.repo  # GitHub's paths ignore case
    room.poll()
    payload = room.label()
    room.poll()
    assert [job.repo for job in room.jobs()] == [REPO]
    assert room.deliver("issues", payload) == "coalesced"


def test_more_than_a_page_is_read(room: Room) -> None:
    room.poll()
    numbers = [room.repo.add_issue().number for _ in range(230)]
    for n in numbers:
        room.label(n=n)
    room.poll()
    assert len(room.jobs()) == 230


def test_a_list_without_end_is_cut_and_said(
    room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    room.poll()
    room.forge.poll_pages = 2
    for _ in range(250):
        room.label(n=room.repo.add_issue().number)
    with caplog.at_level("WARNING", "pidispatch"):
        room.poll()
    assert len(room.jobs()) == 200
    assert "poll-cut-short" in caplog.messages


# -- who acted, and what counts -----------------------------------------------


def test_a_label_taken_off_again_does_not_fire(room: Room) -> None:
    room.poll()
    room.label()
    demo.item_payload(room.repo, 7, "unlabeled", "maintainer", "pi:fix")
    room.poll()
    assert (room.made(), room.counts()) == ([], {"no-allowlisted-label": 1})


def test_an_edited_comment_does_not_fire(room: Room) -> None:
    """T23: neither an old one nor one edited before it was seen."""
    old = room.repo.add_comment(7, "hello", "maintainer")
    room.poll()
    new = room.repo.add_comment(7, "hello", "maintainer")
    room.clock.pass_(30)
    for comment in (old, new):
        comment.body, comment.updated_at = "@pi go", room.clock()
    room.poll()
    assert (room.made(), room.counts()) == ([], {"action-not-actionable": 1})


def test_a_comment_job_has_its_issues_text_and_only_matches_cost_a_request(
    room: Room,
) -> None:
    room.poll()
    room.repo.add_comment(7, "hello", "maintainer")
    room.repo.add_comment(7, "@pi go", "maintainer")
    room.poll()
    assert [job.target.title for job in room.jobs()] == ["Crash"]
    assert len(room.fake.requests("GET", "/issues/7$")) == 1


def test_a_comment_whose_issue_is_gone_is_dropped(room: Room) -> None:
    room.poll()
    room.repo.add_comment(7, "@pi go", "maintainer")
    del room.repo.issues[7]
    room.poll()
    assert (room.made(), room.counts()) == ([], {"missing-number": 1})


def test_our_own_events_start_nothing(room: Room) -> None:
    """T21."""
    room.poll()
    room.label(by="pi-bot")
    demo.comment_payload(room.repo, 7, "@pi again", "pi-bot")
    room.poll()
    assert (room.made(), room.counts()) == ([], {"self": 2})


def stranger_in_the_window(room: Room) -> None:
    demo.comment_payload(room.repo, 7, "@pi mine", "stranger")
    room.clock.pass_(5)
    demo.comment_payload(room.repo, 7, "@pi ours", "maintainer")


def reviewer_of(room: Room, author: str, reviewer: str) -> None:
    pull = room.repo.open_pull("topic", files={"a": "b"}, user=author)
    demo.review_payload(room.repo, pull.number, "changes_requested", "No", reviewer)


def closer_of(room: Room, author: str, closer: str) -> None:
    room.repo.add_issue(8, user=author)
    demo.item_payload(room.repo, 8, "closed", closer)


def pushed_by(room: Room, pusher: str) -> None:
    pull = room.repo.open_pull("topic", files={"a": "1"}, user="stranger")
    room.clock.pass_(700)
    room.repo.commit("topic", {"a": "2"}, user=pusher)
    assert room.repo.activity[-1].after == pull.head_sha


def form_label(room: Room) -> None:
    room.repo.add_issue(8, user="stranger", labels=["pi:fix"])
    room.repo.add_event(8, "labeled", "stranger", "pi:fix")


#: What happens; who is judged; the jobs.
PEOPLE: dict[str, tuple[Any, list[str]]] = {
    "a stranger's comment swallows no maintainer's": (
        stranger_in_the_window,
        ["octo/lamp#7 fix-issue by comment"],
    ),
    "a maintainer reviews a stranger's request": (
        lambda room: reviewer_of(room, "stranger", "maintainer"),
        ["octo/lamp#8 fix-issue by pull_request"],
    ),
    "a stranger reviews a maintainer's request": (
        lambda room: reviewer_of(room, "maintainer", "stranger"),
        ["octo/lamp#8 review by pull_request"],  # its opening, by the maintainer
    ),
    "a maintainer closes a stranger's issue": (
        lambda room: closer_of(room, "stranger", "maintainer"),
        ["octo/lamp#8 review by issue"],
    ),
    "a stranger closes a maintainer's issue": (
        lambda room: closer_of(room, "maintainer", "stranger"),
        [],
    ),
    "a maintainer pushes to a stranger's request": (
        lambda room: pushed_by(room, "maintainer"),
        ["octo/lamp#8 review by pull_request"],
    ),
    "a stranger pushes": (lambda room: pushed_by(room, "stranger"), []),
    "an issue form labels in the reporter's name": (form_label, []),
    "[bot] in a name helps nobody": (
        lambda room: demo.comment_payload(room.repo, 7, "@pi", "x[bot]", "NONE"),
        [],
    ),
}


@pytest.mark.parametrize("case", PEOPLE)
def test_whoever_acted_is_judged(room: Room, case: str) -> None:
    """T24."""
    room.poll()
    happens, wanted = PEOPLE[case]
    happens(room)
    room.poll()
    assert room.made() == wanted


def test_a_push_to_a_fork_is_read_from_the_fork(room: Room) -> None:
    fork = room.fake.create_repo("maintainer/lamp")
    pull = room.repo.open_pull("patch", fork_owner="maintainer", files={"a": "1"})
    room.poll()
    room.clock.pass_(700)
    pull.updated_at = room.clock()
    fork.add_activity("refs/heads/patch", pull.head_sha, "b" * 40, "maintainer")
    room.poll()
    assert [(job.head, job.trigger.action) for job in room.jobs()] == [
        ("b" * 40, "synchronize")
    ]


def test_while_it_cannot_be_told_who_asked_a_polled_event_waits(room: Room) -> None:
    """T24."""
    room.poll()
    closer_of(room, "stranger", "maintainer")
    room.fake.fail_next("GET", "/permission", status=500)
    room.poll()
    assert (room.made(), room.status().pending) == ([], 1)
    room.poll()
    assert len(room.made()) == 1


# -- courtesy -----------------------------------------------------------------


def test_what_did_not_change_costs_nothing(room: Room) -> None:
    room.label()
    room.poll()
    room.poll()
    used = room.fake.data.rate_used[TOKEN]
    room.fake.log.clear()
    room.poll()
    assert {row.status for row in room.fake.log} == {304}
    assert room.fake.data.rate_used[TOKEN] == used


WAITS: dict[str, tuple[int | None, dict[str, str], float]] = {
    "nothing said": (None, {}, 60),
    "a poll interval": (429, {"X-Poll-Interval": "300"}, 300),
    "a shorter interval than ours": (429, {"X-Poll-Interval": "5"}, 60),
    "retry after": (403, {"Retry-After": "200"}, 200),
    "a limit without a word": (429, {}, 60),
    "the hour is used up": (403, {"X-RateLimit-Remaining": "0"}, -1),
    "nonsense": (429, {"Retry-After": "soon", "X-Poll-Interval": "-3"}, 60),
    "for ever": (429, {"Retry-After": "99999999999"}, 3600),
}


@pytest.mark.parametrize("case", WAITS)
def test_it_waits_as_long_as_it_is_asked_to(room: Room, case: str) -> None:
    room.poll()
    status, headers, wait = WAITS[case]
    if wait < 0:  # until the hour is over, by GitHub's own word
        reset = int(room.clock()) + 1000
        headers = headers | {"X-RateLimit-Reset": str(reset), "X-RateLimit-Limit": "60"}
        wait = reset - room.clock() - 60
    if status:
        room.fake.fail_next("GET", "/issues/events", status=status, headers=headers)
    room.poll()
    room.fake.log.clear()
    room.poll(wait - 1)
    assert room.fake.log == []
    room.poll(1)
    assert room.fake.log != []
    assert room.trouble() is None


def test_the_last_tenth_of_the_hours_requests_is_left_to_the_jobs(room: Room) -> None:
    room.fake.data.rate_limit = 20
    for _ in range(30):
        room.label(n=room.repo.add_issue().number)
        room.poll()
    assert room.fake.data.rate_used[TOKEN] == 18
    assert room.trouble() is None


# -- trouble ------------------------------------------------------------------


def test_one_stream_that_fails_holds_up_no_other_and_is_said(room: Room) -> None:
    room.poll()
    fault = room.fake.fail_next("GET", "/issues/comments", status=500, times=99)
    room.repo.add_comment(7, "@pi go", "maintainer")
    room.label("pi:urgent")
    room.poll()
    assert [job.trigger.type for job in room.jobs()] == ["label", "label"]
    assert room.trouble() == "github: cannot poll: HTTP 500"
    assert "octo/lamp" in pidispatch.status_text(room.status())
    assert "HTTP 500" in pidispatch.status_text(room.status())
    fault.times = 0
    room.clock.pass_(900)
    room.poll()
    assert room.trouble() is None
    assert [job.trigger.type for job in room.jobs()][2:] == ["comment"]
    assert room.counts() == {"queued": 2}


def test_an_issue_that_cannot_be_read_makes_its_comment_wait(room: Room) -> None:
    room.poll()
    room.repo.add_comment(7, "@pi go", "maintainer")
    room.fake.fail_next("GET", "/issues/7$", status=502)
    room.poll()
    assert (room.made(), room.status().pending, room.trouble()) == ([], 1, None)
    room.poll()
    assert [job.target.title for job in room.jobs()] == ["Crash"]


def test_what_fails_half_way_goes_on_from_there(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full for a moment loses no event, and none is judged twice."""
    room.poll()
    numbers = [room.repo.add_issue().number for _ in range(3)]
    room.label("question", numbers[0])
    room.label("pi:fix", numbers[1])
    room.label("pi:fix", numbers[2])
    admit, asked = room.store.admit, iter([True, False])

    def full(*given: Any) -> pidispatch.Admission:
        if next(asked):
            return admit(*given)
        raise InfraError("disk full")

    monkeypatch.setattr(room.store, "admit", full)
    room.poll()
    assert room.counts() == {"no-allowlisted-label": 1, "queued": 1}
    assert room.trouble() == "disk full"
    monkeypatch.undo()
    room.poll()
    assert room.counts() == {"no-allowlisted-label": 1, "queued": 2}


@pytest.mark.parametrize(
    ("status", "says"), [(404, "HTTP 404"), (301, "HTTP 301"), (401, "HTTP 401")]
)
def test_a_repository_that_cannot_be_read_is_said(
    room: Room, status: int, says: str
) -> None:
    room.fake.fail_next("GET", "/repos/octo/lamp$", status=status, times=3)
    room.poll()
    assert says in (room.trouble() or "")
    assert room.fake.requests("GET", "/issues/events") == []


def test_without_a_token_polling_says_so(room: Room) -> None:
    room.forge.settings = msgspec.structs.replace(room.settings, github_pat=None)
    room.poll()
    assert "no token" in (room.trouble() or "")


class Canned(requests.Session):
    """Answers every request with one body, whatever was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.body: bytes = b"[]"
        self.headers_: dict[str, str] = {}
        self.asked = 0

    def request(self, *_: Any, **__: Any) -> requests.Response:
        self.asked += 1
        answer = requests.Response()
        answer.status_code = 200
        answer.raw = raw_answer(self.body)
        answer.headers.update(self.headers_)
        return answer


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    *(
                        "id",
                        "number",
                        "event",
                        "actor",
                        "user",
                        "label",
                        "issue",
                        "body",
                    ),
                    *(
                        "created_at",
                        "updated_at",
                        "submitted_at",
                        "timestamp",
                        "labels",
                    ),
                    *("state", "head", "repo", "full_name", "ref", "after", "login"),
                    *("issue_url", "html_url", "activity_type", "pull_request"),
                    "author_association",
                ]
            )
            | st.text(max_size=3),
            inner
            | st.sampled_from(
                [
                    "labeled",
                    "closed",
                    "2027-01-15T08:00:01Z",
                    "octo/lamp",
                    "open",
                    "@pi",
                ]
            ),
            max_size=8,
        )
    ),
    max_leaves=25,
)


@pytest.fixture(scope="module")
def odd_room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    made = Room(tmp_path_factory.mktemp("odd"), Canned())
    made.poller._names = dict.fromkeys(made.poller.repos, REPO)
    yield made
    made.close()
    made.fake.stop()


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(ODD, max_size=5) | ODD, header=st.text(max_size=8))
def test_odd_answers_start_nothing_and_break_nothing(
    odd_room: Room, rows: Any, header: str
) -> None:
    canned = cast(Canned, odd_room.session)
    canned.body = json.dumps(rows).encode()
    canned.headers_ = {"ETag": header, "Retry-After": header}
    canned.asked = 0
    odd_room.clock.pass_(3600)
    odd_room.poller.turn()
    assert canned.asked < 100
    assert odd_room.poller._thread.is_alive() is False
    assert all(job.trigger.index in range(len(RULES)) for job in odd_room.jobs())


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"null", b"{}", b"[" * 9999])
def test_what_is_no_list_is_trouble_and_moves_no_cursor(
    odd_room: Room, body: bytes
) -> None:
    canned = cast(Canned, odd_room.session)
    canned.headers_ = {}
    before = odd_room.store._rows("SELECT cursor FROM poll_cursors ORDER BY stream")
    canned.body = body
    odd_room.clock.pass_(3600)
    odd_room.poller.turn()
    assert "odd body" in (odd_room.trouble() or "")
    after = odd_room.store._rows("SELECT cursor FROM poll_cursors ORDER BY stream")
    assert [tuple(row) for row in after] == [tuple(row) for row in before]


def test_an_endless_full_page_ends(odd_room: Room) -> None:
    canned = cast(Canned, odd_room.session)
    row = {"id": 1, "created_at": "2099-01-01T00:00:00Z", "number": 1}
    canned.body = json.dumps([row | {"updated_at": row["created_at"]}] * 100).encode()
    canned.asked = 0
    odd_room.forge.poll_pages = 3
    odd_room.clock.pass_(3600)
    odd_room.poller.turn()
    assert canned.asked < 5000


def test_a_time_far_ahead_hides_nothing_that_comes_later(room: Room) -> None:
    room.poll()
    room.label(n=room.repo.add_issue().number)
    room.repo.events[-1].created_at += 400 * DAY
    room.poll()
    room.label()
    room.poll()
    room.poll()
    assert len(room.jobs()) == 2


# -- the whole, and its settings ----------------------------------------------


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("gitlab:group/app",), "gitlab cannot be polled: what happens there"),
        (("nowhere:a/b",), "nowhere cannot be polled"),
        (("group/sub/app",), 'group/sub/app: "group/sub/app" is not owner/name'),
        (("a/..",), "is not owner/name"),
    ],
)
def test_what_cannot_be_polled_is_refused_with_its_reason(
    names: tuple[str, ...], says: str
) -> None:
    for refuse in (pidispatch.polled_of, pidispatch.forges_of):
        with pytest.raises(Faults) as refusal:
            refuse(Settings(poll_repos=names))
        assert says in str(refusal.value.message)
        assert "github" in str(refusal.value.fix)


def test_only_classes_with_streams_can_be_polled() -> None:
    for kind, forge in pidispatch._FORGE_CLASSES.items():
        named = Settings(poll_repos=(f"{kind}:owner/name",))
        if forge.streams:
            assert pidispatch.polled_of(named) == ((kind, "owner/name"),)
        else:
            with pytest.raises(Faults, match="cannot be polled"):
                pidispatch.polled_of(named)


@pytest.mark.parametrize("text", ["", "lamp", "octo/", "a b/c", "https://x/a/b"])
def test_a_repository_that_is_none_is_named_at_start(text: str) -> None:
    environ = {"POLL_REPOS": text, "POLL_INTERVAL_SECONDS": "29"}
    with pytest.raises(Faults) as refusal:
        pidispatch.load_settings(environ, None)
    assert len(refusal.value.faults) == 2
    assert "at least 30" in refusal.value.message


def test_repositories_are_read_from_the_environment_and_the_command_line() -> None:
    environ = {"POLL_REPOS": "octo/lamp, octo/spoon"}
    read = pidispatch.load_settings(environ, None)
    assert read.poll_repos == ("octo/lamp", "octo/spoon")
    assert (read.poll_interval, Settings().poll_interval) == (60, 60)
    named = pidispatch.polling(read, ["a/b", "c/d,e/f"])
    assert named.poll_repos == ("a/b", "c/d", "e/f")
    assert pidispatch.polling(read, []) is read
    with pytest.raises(pidispatch.ConfigError, match="--poll"):
        pidispatch.polling(read, ["nothing"])


def test_without_a_public_url_a_polled_label_becomes_two_requests(
    tmp_path: Path,
) -> None:
    """The whole service, with no webhook secret and so with no webhook."""
    with whole_world(tmp_path) as world:
        world.rules({"replicas": 2})
        world.change(webhook_secret=(), poll_repos=("octo/spoon",))
        service = world.start()
        answer = requests.post(
            f"http://127.0.0.1:{service.edge.port}/github", b"{}", timeout=5
        )
        assert answer.status_code == 404
        world.wait_for(lambda: world.store.polls())
        demo.labeled_payload(world.repo, 7, "pi:urgent", "maintainer")
        service.poller._asked.clear()
        jobs = world.wait_for(lambda: [run.id for run in world.store.runs(9)])
        rows = world.wait(jobs)
        assert [row.state for row in rows] == ["completed", "completed"]
        assert sorted(world.pulls()) == ["pi/issue-7-r1", "pi/issue-7-r2"]
        assert world.store.polls()[0].trouble is None


def test_a_repository_that_is_not_polled_any_more_is_not_shown(room: Room) -> None:
    room.poll()
    assert [poll.repo for poll in room.store.polls()] == [REPO]
    Poller(room.intake, (), 60).start()
    assert room.store.polls() == ()


def test_the_doctor_reads_each_polled_repository(room: Room) -> None:
    found: list[pidispatch.Check] = []
    session = requests.Session()
    kept = pidispatch._check_polls(room.settings, found, session)
    assert kept is room.settings
    assert [(check.state, check.found) for check in found] == [
        ("ok", "octo/lamp: can be read")
    ]
    other = msgspec.structs.replace(room.settings, poll_repos=("octo/none",))
    pidispatch._check_polls(other, found, session)
    assert (found[1].state, "HTTP 404" in found[1].found) == ("fail", True)
    bad = msgspec.structs.replace(room.settings, poll_repos=("gitlab:a/b",))
    assert pidispatch._check_polls(bad, found, session).poll_repos == ()
    assert found[2].state == "fail"
