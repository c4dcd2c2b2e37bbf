"""Each forge at our door: how it is served, and how it signs what it sends.

A row here is what the tests of the whole edge need of a forge. A forge that is served
and has no row fails them, so that none is forgotten.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pidispatch
import pidispatch_demo as demo

Headers = dict[str, str]
#: Entries of a triggers file.
Rules = list[dict[str, Any]]
#: Signs a body: the manifest's row, the bytes, a secret, a delivery id, the time.
Signer = Callable[[Mapping[str, Any], bytes, str, str, float], Headers]

JSON_TYPE = "application/json"


def asks_or_ignores(row: Mapping[str, Any]) -> tuple[int, str]:
    """A forge whose payloads never say who may: what fires a rule is asked about."""
    kind, known = row["kind"], row["expect"]
    fires = (
        kind in ("pr_opened", "pr_updated")
        or (kind == "issue_labelled" and "bug" in known["labels_now"])
        or (kind == "issue_closed" and "actor_id" in known)
    )
    return (202, "pending") if fires else (200, "ignored")


@dataclass(frozen=True)
class Door:
    """One way in which a forge proves who it is.

    `environ` serves it. `covers_body` is whether the credential is about the bytes,
    `form` makes a form's bytes and those that are signed, `lives` is whether an old
    delivery is refused, `freshen` gives a body its own delivery id. `expected` is the
    exact answer to a stored real delivery under `rules_of`.
    """

    kind: str
    mode: str
    environ: Mapping[str, str]
    secret: str
    wrong: str
    sign: Signer
    credentials: tuple[str, ...]
    covers_body: bool = True
    form: Callable[[bytes], tuple[bytes, bytes]] | None = None
    lives: bool = False
    freshen: Callable[[bytes, str], bytes] = lambda body, guid: body
    expected: Callable[[Mapping[str, Any]], tuple[int, str]] = asks_or_ignores

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.mode}"

    def forges(self) -> dict[str, pidispatch.Forge]:
        return pidispatch.forges_of(pidispatch.load_settings(self.environ, None))


def hexmac(secret: str, body: bytes) -> str:
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


def as_form(body: bytes) -> bytes:
    return urllib.parse.urlencode({"payload": body}).encode()


# -- github ---------------------------------------------------------------------


def github_signs(
    row: Mapping[str, Any], body: bytes, secret: str, guid: str, now: float
) -> Headers:
    return {
        "X-GitHub-Event": str(row["event"]),
        "X-GitHub-Delivery": guid,
        "X-Hub-Signature-256": "sha256=" + hexmac(secret, body),
    }


def github_answers(row: Mapping[str, Any]) -> tuple[int, str]:
    kind, known = row["kind"], row["expect"]
    if kind == "issue_labelled" and known["label_event"] == "bug":
        return 202, "queued"
    if kind == "issue_closed":
        return 202, "pending"
    if kind in ("pr_opened", "pr_updated"):
        return 202, "queued"
    return 200, "ignored"


# -- gitlab ---------------------------------------------------------------------


def gitlab_names(row: Mapping[str, Any], guid: str) -> Headers:
    return {
        "X-Gitlab-Event": str(row["event"]),
        "Idempotency-Key": guid,
        "webhook-id": guid,
    }


def gitlab_signs(
    row: Mapping[str, Any], body: bytes, secret: str, guid: str, now: float
) -> Headers:
    key = base64.b64decode(secret.removeprefix("whsec_"))
    at = str(int(now))
    signed = f"{guid}.{at}.".encode() + body
    mac = base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
    sent = {"webhook-timestamp": at, "webhook-signature": f"v1,{mac}"}
    return gitlab_names(row, guid) | sent


def gitlab_tells(
    row: Mapping[str, Any], body: bytes, secret: str, guid: str, now: float
) -> Headers:
    return gitlab_names(row, guid) | {"X-Gitlab-Token": secret}


def whsec(seed: bytes) -> str:
    return "whsec_" + base64.b64encode(seed * 8).decode()


# -- forgejo --------------------------------------------------------------------


def forgejo_signs(
    row: Mapping[str, Any], body: bytes, secret: str, guid: str, now: float
) -> Headers:
    event, mac = str(row["event"]), hexmac(secret, body)
    return {
        "X-Forgejo-Event": event,
        "X-Forgejo-Event-Type": str(row.get("event_type") or event),
        "X-Forgejo-Delivery": guid,
        "X-Forgejo-Signature": mac,
        "X-Gitea-Event": event,
        "X-Gitea-Delivery": guid,
        "X-Gitea-Signature": mac,
        "X-GitHub-Event": event,
        "X-GitHub-Delivery": guid,
        "X-Hub-Signature-256": f"sha256={mac}",
    }


# -- azure ----------------------------------------------------------------------


def azure_basic(
    row: Mapping[str, Any], body: bytes, secret: str, guid: str, now: float
) -> Headers:
    return {"Authorization": "Basic " + base64.b64encode(secret.encode()).decode()}


def azure_header(
    row: Mapping[str, Any], body: bytes, secret: str, guid: str, now: float
) -> Headers:
    return {"X-Our-Secret": secret}


def azure_freshen(body: bytes, guid: str) -> bytes:
    """Microsoft's samples share their ids."""
    shape = json.loads(body)
    return json.dumps(shape | {"id": guid, "notificationId": 1}).encode()


_GITLAB = {"GITLAB_URL": "http://127.0.0.1:9", "GITLAB_TOKEN": "t0ken"}
_FORGEJO = {"FORGEJO_URL": "http://127.0.0.1:9", "FORGEJO_TOKEN": "t0ken"}
_AZURE = {"AZURE_ORG_URL": "http://127.0.0.1:9/org", "AZURE_TOKEN": "t0ken"}

DOORS = (
    Door(
        kind="github",
        mode="hmac",
        environ={"WEBHOOK_SECRET": "s3cret", "GITHUB_PAT": "t0ken"},
        secret="s3cret",
        wrong="guess",
        sign=github_signs,
        credentials=("X-Hub-Signature-256",),
        form=lambda body: (as_form(body), as_form(body)),
        expected=github_answers,
    ),
    Door(
        kind="gitlab",
        mode="signature",
        environ=_GITLAB
        | {
            "GITLAB_WEBHOOK_MODE": "signature",
            "GITLAB_WEBHOOK_SECRET": whsec(b"1234"),
        },
        secret=whsec(b"1234"),
        wrong=whsec(b"4321"),
        sign=gitlab_signs,
        credentials=("webhook-signature",),
        lives=True,
    ),
    Door(
        kind="gitlab",
        mode="token",
        environ=_GITLAB
        | {"GITLAB_WEBHOOK_MODE": "token", "GITLAB_WEBHOOK_SECRET": "s3cret"},
        secret="s3cret",
        wrong="guess",
        sign=gitlab_tells,
        credentials=("X-Gitlab-Token",),
        covers_body=False,
    ),
    Door(
        kind="forgejo",
        mode="hmac",
        environ=_FORGEJO | {"FORGEJO_WEBHOOK_SECRET": "s3cret"},
        secret="s3cret",
        wrong="guess",
        sign=forgejo_signs,
        credentials=("X-Forgejo-Signature", "X-Gitea-Signature", "X-Hub-Signature-256"),
        form=lambda body: (as_form(body), body),
    ),
    Door(
        kind="azure",
        mode="basic",
        environ=_AZURE
        | {"AZURE_WEBHOOK_MODE": "basic", "AZURE_WEBHOOK_SECRET": "user:s3cret"},
        secret="user:s3cret",
        wrong="user:guess",
        sign=azure_basic,
        credentials=("Authorization",),
        covers_body=False,
        freshen=azure_freshen,
    ),
    Door(
        kind="azure",
        mode="header",
        environ=_AZURE
        | {
            "AZURE_WEBHOOK_MODE": "header",
            "AZURE_WEBHOOK_HEADER": "X-Our-Secret",
            "AZURE_WEBHOOK_SECRET": "s3cret",
        },
        secret="s3cret",
        wrong="guess",
        sign=azure_header,
        credentials=("X-Our-Secret",),
        covers_body=False,
        freshen=azure_freshen,
    ),
)

#: The doors of the forges that this version serves.
SERVED = tuple(door for door in DOORS if door.kind in pidispatch._FORGE_CLASSES)


def rules_of(
    kind: str, label: str = "bug", phrase: str = "@pi"
) -> list[dict[str, Any]]:
    """A rule of every type that the forge has."""
    row = pidispatch.FORGES[kind]
    opened = [a for a in row.pr_actions if a not in (row.label_action, row.close_word)]
    opened = [action for action in opened if action != "review_submitted"]
    on: Rules = [
        {"type": "label", "any": [label]},
        {"type": "comment", "phrase": phrase},
        {"type": "pull_request", "action": opened[:2]},
    ]
    if row.close_word:
        on.append({"type": "issue", "action": [row.close_word]})
    run = {"kind": kind, "flow": "review"}
    # a work item names no repository: its rules do
    mapped = run | {"repository": "lamp"}
    homeless = row.issue_noun == "work item"
    return [
        {"on": o, "run": mapped if homeless and o["type"] != "pull_request" else run}
        for o in on
    ]


# -- a forge with people ----------------------------------------------------------

Delivery = tuple[Headers, bytes]
#: Somebody does something to an item: repository, number, who, the delivery's id.
Act = Callable[[demo.Repo, int, str, str], Delivery]
BOT = "helper[bot]"


def github_closes(repo: demo.Repo, number: int, who: str, guid: str) -> Delivery:
    shape = demo.item_payload(repo, number, "closed", who)
    return demo.signed_delivery("issues", shape, "s3cret", guid)


def github_reviews(repo: demo.Repo, number: int, who: str, guid: str) -> Delivery:
    shape = demo.review_payload(repo, number, "approved", guid, who)
    return demo.signed_delivery("pull_request_review", shape, "s3cret", guid)


def gitlab_closes(repo: demo.Repo, number: int, who: str, guid: str) -> Delivery:
    shape = demo.gitlab_payload(repo, number, "close", who)
    return demo.gitlab_delivery(shape, "s3cret", guid)


def gitlab_approves(repo: demo.Repo, number: int, who: str, guid: str) -> Delivery:
    shape = demo.gitlab_payload(repo, number, "approved", who, request=True)
    return demo.gitlab_delivery(shape, "s3cret", guid)


def forgejo_closes(repo: demo.Repo, number: int, who: str, guid: str) -> Delivery:
    shape = demo.forgejo_payload(repo, number, "closed", who)
    return demo.forgejo_delivery("issues", shape, "s3cret", guid)


def number_of(repo: demo.Repo, login: str) -> str:
    return str(repo.accounts.user(login).id)


@dataclass(frozen=True)
class Row:
    """A forge with people: its fake, its door and where that finds the API.

    `asks` matches the API's paths that tell who may; `own` gives somebody's id.
    `closes` and `reviews` are there where a rule can name them, by the action's word.
    """

    fake: type[demo.FakeForge]
    door: str
    variable: str
    asks: str
    path: str = ""
    own: Callable[[demo.Repo, str], str] = number_of
    closes: Act | None = None
    reviews: Act | None = None
    reviewed: str | None = None

    @property
    def acts(self) -> tuple[str, ...]:
        more = {"close": self.closes, "review": self.reviews}
        return ("comment", "label", *(name for name, act in more.items() if act))


STAGES = {
    "github": Row(
        demo.FakeGitHub,
        "github-hmac",
        "GITHUB_API_URL",
        "/permission$",
        closes=github_closes,
        reviews=github_reviews,
        reviewed="review_submitted",
    ),
    "gitlab": Row(
        demo.FakeGitLab,
        "gitlab-token",
        "GITLAB_URL",
        "/members/",
        closes=gitlab_closes,
        reviews=gitlab_approves,
        reviewed="approved",
    ),
    "forgejo": Row(
        demo.FakeForgejo,
        "forgejo-hmac",
        "FORGEJO_URL",
        "/permission$",
        closes=forgejo_closes,
    ),
    "azure": Row(
        demo.FakeAzure,
        "azure-basic",
        "AZURE_ORG_URL",
        "/projects/",
        path="/fabrikam",
        own=lambda repo, login: demo.azure_guid("user", login),
    ),
}


@dataclass
class Stage:
    """A fake forge with a maintainer and a stranger, and what they do there.

    Each of `acts` makes it happen and returns the delivery's headers and body: who
    acts, who wrote the item, a delivery id.
    """

    fake: demo.FakeForge
    environ: Mapping[str, str]
    own: str
    acts: Mapping[str, Callable[[str, str, str], Delivery]]
    rules: Rules


@contextlib.contextmanager
def stage(kind: str, root: Path) -> Iterator[Stage]:
    row = STAGES[kind]
    [door] = [door for door in DOORS if door.name == row.door]
    with row.fake([demo.Token("t0ken", "pi-bot")], root=root / "forge") as fake:
        repo = fake.create_repo("octo/lamp")
        repo.add_collaborator("maintainer", "write")
        for login in ("stranger", BOT):
            repo.accounts.user(login)

        def issue(who: str, author: str, guid: str) -> int:
            return repo.add_issue(user=author, title=guid).number

        def comment(who: str, author: str, guid: str) -> Delivery:
            number = 1 if 1 in repo.issues else issue(who, author, guid)
            return fake.remark(repo, number, f"@pi {guid}", who, door.secret, guid)

        def label(who: str, author: str, guid: str) -> Delivery:
            number = issue(who, author, guid)
            return fake.label(repo, number, "bug", who, door.secret, guid)

        def close(who: str, author: str, guid: str) -> Delivery:
            assert row.closes
            return row.closes(repo, issue(who, author, guid), who, guid)

        def review(who: str, author: str, guid: str) -> Delivery:
            assert row.reviews
            pull = repo.open_pull(f"b-{guid}", files={guid: "1"}, user=author)
            return row.reviews(repo, pull.number, who, guid)

        known = {"comment": comment, "label": label, "close": close, "review": review}
        rules = rules_of(kind)
        if row.reviewed:
            on = {"type": "pull_request", "action": [row.reviewed]}
            rules.append({"on": on, "run": {"kind": kind, "flow": "review"}})
        environ = {**door.environ, row.variable: fake.url + row.path}
        acts = {name: known[name] for name in row.acts}
        yield Stage(fake, environ, row.own(repo, "pi-bot"), acts, rules)
