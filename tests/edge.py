"""Each forge at our door: how it is served, and how it signs what it sends.

A row here is what the tests of the whole edge need of a forge. A forge that is served
and has no row fails them, so that none is forgotten.
"""

from __future__ import annotations

import base64
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


@dataclass(frozen=True)
class Door:
    """One way in which a forge proves who it is.

    `environ` serves it. `covers_body` is whether the credential is about the bytes,
    `form` makes a form's bytes and those that are signed, `lives` is whether an old
    delivery is refused, `freshen` gives a body its own delivery id. `expected` is the
    exact answer to a stored real delivery under `RULES`, where a forge gives it.
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
    expected: Callable[[Mapping[str, Any]], tuple[int, str]] | None = None

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


@dataclass
class Stage:
    """A fake forge with a maintainer and a stranger, and what they do there.

    Each of `acts` makes it happen and returns the delivery's headers and body: who
    acts, who wrote the item, a delivery id. `asks` matches the API's paths that tell
    who may; `bot` is a name that would like to be taken for an App.
    """

    fake: demo.FakeServer
    environ: Mapping[str, str]
    own: str
    asks: str
    acts: Mapping[str, Callable[[str, str, str], tuple[Headers, bytes]]]
    rules: Rules
    bot: str = "helper[bot]"


def github_stage(root: Path) -> Iterator[Stage]:
    tokens = [demo.Token("t0ken", "pi-bot")]
    with demo.FakeGitHub(tokens, root=root / "forge") as fake:
        repo = fake.create_repo("octo/lamp")
        repo.add_collaborator("maintainer", "write")
        for login in ("stranger", "helper[bot]"):
            repo.accounts.user(login)

        def signed(event: str, shape: Any, guid: str) -> tuple[Headers, bytes]:
            return demo.signed_delivery(event, shape, "s3cret", guid)

        def comments(who: str, author: str, guid: str) -> tuple[Headers, bytes]:
            issue = repo.issues.get(1) or repo.add_issue(1, user=author)
            said = demo.comment_payload(repo, issue.number, f"@pi {guid}", who)
            return signed("issue_comment", said, guid)

        def closes(who: str, author: str, guid: str) -> tuple[Headers, bytes]:
            issue = repo.add_issue(user=author, title=guid)
            shape = demo.item_payload(repo, issue.number, "closed", who)
            return signed("issues", shape, guid)

        def labels(who: str, author: str, guid: str) -> tuple[Headers, bytes]:
            issue = repo.add_issue(user=author, title=guid)
            shape = demo.labeled_payload(repo, issue.number, "bug", who)
            return signed("issues", shape, guid)

        def reviews(who: str, author: str, guid: str) -> tuple[Headers, bytes]:
            pull = repo.open_pull(f"b-{guid}", files={guid: "1"}, user=author)
            shape = demo.review_payload(repo, pull.number, "approved", guid, who)
            return signed("pull_request_review", shape, guid)

        acts = {
            "comment": comments,
            "close": closes,
            "label": labels,
            "review": reviews,
        }
        environ = {
            "WEBHOOK_SECRET": "s3cret",
            "GITHUB_PAT": "t0ken",
            "GITHUB_API_URL": fake.url,
        }
        review = {"type": "pull_request", "action": ["review_submitted"]}
        rules = [
            *rules_of("github"),
            {"on": review, "run": {"kind": "github", "flow": "review"}},
        ]
        own = str(repo.accounts.user("pi-bot").id)
        yield Stage(fake, environ, own, "/permission$", acts, rules)


#: A forge's people, by its kind; a forge without a row is tested in its own file.
STAGES: dict[str, Callable[[Path], Iterator[Stage]]] = {"github": github_stage}
