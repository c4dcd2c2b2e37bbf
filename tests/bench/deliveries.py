"""A delivery as large and as full of links as GitHub's own."""

from __future__ import annotations

from typing import Any

import load
from servers import LABEL

import pidispatch_demo as demo

#: What a real `issues.labeled` has, bytes.
SIZE = 13_800
#: The links of a user and of a repository, as GitHub writes them.
_USER = (  # noqa: SIM905 - a table of words reads better
    "followers following{/other_user} gists{/gist_id} starred{/owner}{/repo} "
    "subscriptions orgs repos events{/privacy} received_events"
).split()
_REPO = (  # noqa: SIM905
    "forks keys{/key_id} collaborators{/collaborator} teams hooks "
    "issue_events{/number} events assignees{/user} branches{/branch} tags "
    "git_blobs{/sha} git_tags{/sha} git_refs{/sha} trees{/sha} statuses/{sha} "
    "languages stargazers contributors subscribers subscription commits{/sha} "
    "git_commits{/sha} comments{/number} issue_comment{/number} contents/{+path} "
    "compare/{base}...{head} merges archive/{archive_format}{/ref} downloads "
    "issues{/number} pulls{/number} milestones{/number} notifications{?since,all} "
    "labels{/name} releases{/id} deployments"
).split()
_PROSE = (
    "When the kettle is set on the hob the spoon beside it should lie bent, so that "
    "it holds tea. It stays straight: nothing in the log, exit status 0.\n\n"
    "```\n$ spoon --check /dev/tty\nspoon: straight (expected: bent)\n```\n\n"
)


def labeled_body(repo: demo.Repo) -> bytes:
    """The compact JSON of an issue's label, SIZE bytes, with load.NUMBER in it."""
    number = int(load.NUMBER)
    repo.add_issue(number, title="The spoon stays straight", body="")
    payload = demo.labeled_payload(repo, number, LABEL, "maintainer")
    base = payload["repository"]["url"]
    payload["repository"] |= _links(base, _REPO)
    for user in (payload["sender"], payload["issue"]["user"]):
        user |= _links(user["url"], _USER)
    payload["repository"]["owner"] |= _links(payload["sender"]["url"], _USER)
    urls = ("laugh", "hooray", "confused", "heart", "rocket", "eyes", "+1", "-1")
    payload["issue"]["reactions"] = {"total_count": 0, **dict.fromkeys(urls, 0)}
    lacks = SIZE - len(_encoded(payload))
    prose = (_PROSE * (lacks // len(_PROSE) + 1)).replace("\n", "  ")
    payload["issue"]["body"] = prose[:lacks]
    return _encoded(payload)


def _links(base: str, words: list[str]) -> dict[str, str]:
    names = (word.partition("{")[0].rstrip("/") for word in words)
    return {f"{n}_url": f"{base}/{w}" for n, w in zip(names, words, strict=True)}


def _encoded(payload: dict[str, Any]) -> bytes:
    _, body = demo.signed_delivery("issues", payload, "", "")
    return body
