"""The fakes are faithful: real clients (git, PyGithub, gh, pi) cannot tell."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import jwt
import pytest
import requests
from conftest import IMAGE, ROOT, lacking
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from github import Auth, Github, GithubException, GithubIntegration
from github.Repository import Repository

import pidispatch_demo as demo
from pidispatch_demo import App, FakeGitHub, FakeModel, Repo, Token

WRITER, READER, OTHER = "ghp_writer", "ghp_reader", "ghp_elsewhere"
NO_WORKFLOWS = "ghp_without_workflows"
APP_ID, INSTALLATION = 41, 4141
DEMO = ROOT / "pidispatch_demo.py"


# --- a forge and its clients -------------------------------------------------


@pytest.fixture(scope="session")
def app_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def private_pem(key: rsa.RSAPrivateKey) -> str:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption()).decode()


def public_pem(key: rsa.RSAPrivateKey) -> str:
    encoding = serialization.Encoding.PEM
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(encoding, form).decode()


@pytest.fixture
def forge(app_key: rsa.RSAPrivateKey) -> Iterator[FakeGitHub]:
    most = {n: v for n, v in demo.ALL_PERMISSIONS.items() if n != "workflows"}
    tokens = [
        Token(WRITER, "octo", "writer"),
        Token(READER, "reader", "reader", permissions=demo.READ_PERMISSIONS),
        Token(OTHER, "else", "elsewhere", repositories=frozenset({"octo/other"})),
        Token(NO_WORKFLOWS, "octo", "no-workflows", permissions=most),
    ]
    repos = frozenset({"octo/hello", "octo/other"})
    app = App(APP_ID, "pi-app", INSTALLATION, repos, public_key=public_pem(app_key))
    with FakeGitHub(tokens, app) as running:
        yield running


@pytest.fixture
def repo(forge: FakeGitHub) -> Repo:
    forge.create_repo("octo/other")
    return forge.create_repo(
        "octo/hello",
        {"README.md": "# Hello\n", "run.sh": "#!/bin/sh\n"},
        private=True,
        issues={7: {"title": "It breaks", "body": "Look", "labels": ["bug"]}},
        collaborators={"wendy": "write", "maud": "maintain", "tim": "triage"},
    )


class Git:
    """Real git with credentials from an askpass program, in a folder of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.work = folder / "work"
        self.origin = f"{url}/octo/hello.git"
        self.askpass = folder / "askpass"
        self.askpass.write_text('#!/bin/sh\nprintf "%s\\n" "$ASKPASS_TOKEN"\n')
        self.askpass.chmod(0o755)

    def __call__(
        self, *arguments: str, token: str = WRITER
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.work.parent),
            "GIT_ASKPASS": str(self.askpass),
            "ASKPASS_TOKEN": token,
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_AUTHOR_NAME": "A",
            "GIT_AUTHOR_EMAIL": "a@example.test",
            "GIT_COMMITTER_NAME": "A",
            "GIT_COMMITTER_EMAIL": "a@example.test",
        }
        folder = self.work if self.work.is_dir() else self.work.parent
        return subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        """Commit files on a new branch off main and return the commit's id."""
        self("checkout", "-q", "-B", branch, "origin/main")
        for name, content in files.items():
            path = self.work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        self("add", "--all")
        self("commit", "-q", "-m", "Work")
        return self("rev-parse", "HEAD").stdout.strip()


@pytest.fixture
def git(tmp_path: Path, forge: FakeGitHub, repo: Repo) -> Git:
    client = Git(tmp_path, forge.url)
    cloned = client("clone", "-q", client.origin, "work")
    assert cloned.returncode == 0, cloned.stderr
    return client


def api(
    forge: FakeGitHub,
    method: str,
    path: str,
    token: str | None = WRITER,
    body: object = None,
    **headers: str,
) -> requests.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if token:
        named["Authorization"] = f"Bearer {token}"
    url = forge.url + path
    return requests.request(method, url, json=body, headers=named, timeout=10)


def pygithub(forge: FakeGitHub, prefix: str = "", token: str = WRITER) -> Github:
    return Github(
        base_url=forge.url + prefix,
        auth=Auth.Token(token),
        seconds_between_requests=None,
        seconds_between_writes=None,
        retry=None,
    )


# --- git ---------------------------------------------------------------------


def test_a_clone_asks_for_a_credential_and_shows_nothing_without_one(
    tmp_path: Path, forge: FakeGitHub, repo: Repo
) -> None:
    client = Git(tmp_path, forge.url)
    refused = client("clone", client.origin, "work", token="")
    assert refused.returncode == 128
    assert "Authentication failed" in refused.stderr
    answer = requests.get(client.origin + "/info/refs?service=git-upload-pack")
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"].startswith("Basic ")
    assert not (tmp_path / "work").exists()


def test_a_token_for_another_repository_finds_no_private_one(
    tmp_path: Path, forge: FakeGitHub, repo: Repo
) -> None:
    client = Git(tmp_path, forge.url)
    refused = client("clone", client.origin, "work", token=OTHER)
    assert "not found" in refused.stderr


def test_a_push_moves_the_branch_and_the_head_of_its_pull_request(
    git: Git, repo: Repo
) -> None:
    first = git.commit("pi/issue-7-r1", {"a.txt": b"one"})
    assert git("push", "origin", "HEAD").returncode == 0
    pull = repo.open_pull("pi/issue-7-r1")
    second = git.commit("pi/issue-7-r1", {"a.txt": b"two"})
    lease = f"--force-with-lease=pi/issue-7-r1:{first}"
    assert git("push", lease, "origin", "HEAD").returncode == 0
    assert repo.branch("pi/issue-7-r1") == second == pull.head_sha
    assert repo.refs[f"refs/pull/{pull.number}/head"] == second
    git("fetch", "-q", "origin", f"refs/pull/{pull.number}/head")
    assert git("rev-parse", "FETCH_HEAD").stdout.strip() == second


def test_a_stale_lease_is_refused_and_the_same_push_again_is_not(
    git: Git, repo: Repo
) -> None:
    """T48: the fake keeps what publishing relies on."""
    git.commit("pi/issue-7", {"a.txt": b"one"})
    absent = "--force-with-lease=pi/issue-7:"
    assert git("push", absent, "origin", "HEAD").returncode == 0
    assert git("push", absent, "origin", "HEAD").returncode == 0
    theirs = repo.commit("pi/issue-7", {"b.txt": "theirs"})
    git.commit("pi/issue-7", {"a.txt": b"two"})
    refused = git("push", absent, "origin", "HEAD")
    assert "stale info" in refused.stderr
    assert repo.branch("pi/issue-7") == theirs


def test_deleting_a_branch_closes_its_pull_request(git: Git, repo: Repo) -> None:
    git.commit("topic", {"a.txt": b"one"})
    git("push", "origin", "HEAD")
    pull = repo.open_pull("topic")
    assert git("push", "origin", ":topic").returncode == 0
    assert (pull.state, repo.branch("topic")) == ("closed", None)


def test_a_read_token_cannot_push(git: Git, repo: Repo) -> None:
    git.commit("topic", {"a.txt": b"one"})
    refused = git("push", "origin", "HEAD", token=READER)
    assert "Permission to octo/hello.git denied to reader." in refused.stderr
    assert "error: 403" in refused.stderr
    assert repo.branch("topic") is None


@pytest.mark.parametrize(
    ("rule", "code", "reason"),
    [
        ("branch-protection", "GH006", "protected branch hook declined"),
        ("ruleset", "GH013", "push declined due to repository rule violations"),
    ],
)
def test_a_protected_branch_refuses_a_push_in_githubs_words(
    git: Git, repo: Repo, rule: Any, code: str, reason: str
) -> None:
    repo.protect("rel/*", by=rule)
    made = git.commit("topic", {"a.txt": b"one"})
    pushed = git("push", "origin", "HEAD:rel/1", "HEAD:topic")
    assert f"error: {code}: " in pushed.stderr
    assert f"HEAD -> rel/1 ({reason})" in pushed.stderr
    assert repo.branch("rel/1") is None
    assert repo.branch("topic") == made
    repo.unprotect("rel/*")
    assert git("push", "origin", "HEAD:rel/1").returncode == 0


def test_a_workflow_file_needs_the_workflows_permission(git: Git, repo: Repo) -> None:
    git.commit("topic", {".github/workflows/ci.yml": b"on: push\n"})
    refused = git("push", "origin", "HEAD", token=NO_WORKFLOWS)
    assert (
        "(refusing to allow a Personal Access Token to create or update workflow "
        "`.github/workflows/ci.yml` without `workflow` scope)" in refused.stderr
    )
    assert git("push", "origin", "HEAD").returncode == 0
    git.commit("plain", {"a.txt": b"one"})
    assert git("push", "origin", "HEAD", token=NO_WORKFLOWS).returncode == 0


def test_pull_request_refs_are_readable_and_not_writable(git: Git, repo: Repo) -> None:
    pull = repo.open_pull("patch", files={"b.txt": "b"}, fork_owner="stranger")
    ref = f"refs/pull/{pull.number}/head"
    assert pull.head_sha in git("ls-remote", "origin", ref).stdout
    assert repo.branch("patch") is None
    refused = git("push", "--force", "origin", f"HEAD:{ref}")
    assert "hidden ref" in refused.stderr


def test_a_large_chunked_push_and_a_gzipped_fetch_arrive_whole(
    git: Git, repo: Repo, forge: FakeGitHub
) -> None:
    noise = os.urandom(300_000)
    git.commit("big", {"noise.bin": noise})
    pushed = git("-c", "http.postBuffer=65536", "push", "origin", "HEAD")
    assert pushed.returncode == 0, pushed.stderr
    repo.commit("big", {"more.txt": "more"})
    for number in range(40):
        git("commit", "-q", "--allow-empty", "-m", f"local {number}")
    traced = git("-c", "http.postBuffer=65536", "fetch", "origin", "big")
    assert traced.returncode == 0
    blob = git("show", "FETCH_HEAD:more.txt")
    assert blob.stdout == "more"
    kept = subprocess.run(
        ["git", "show", "big:noise.bin"], cwd=repo.git.path, capture_output=True
    )
    assert kept.stdout == noise


def test_bodies_are_undone_of_gzip_and_chunks() -> None:
    import gzip

    with FakeModel() as model:
        body = gzip.compress(json.dumps(openai_request("hello")).encode())
        pieces = (body[at : at + 7] for at in range(0, len(body), 7))
        url = f"{model.url}/v1/chat/completions"
        answer = requests.post(url, pieces, headers={"Content-Encoding": "gzip"})
        assert answer.json()["choices"][0]["message"]["content"] == "ok"


# --- REST with PyGithub ------------------------------------------------------


@pytest.fixture(params=["", "/api/v3"])
def hub(request: pytest.FixtureRequest, forge: FakeGitHub, repo: Repo) -> Repository:
    return pygithub(forge, request.param).get_repo("octo/hello")


def test_pygithub_reads_what_is_there(hub: Repository, repo: Repo) -> None:
    repo.protect("main")
    repo.commit("pi/issue-7", {"a.txt": "a"})
    assert (hub.id, hub.private, hub.default_branch) == (repo.id, True, "main")
    assert {b.name: b.protected for b in hub.get_branches()} == {
        "main": True,
        "pi/issue-7": False,
    }
    tip = repo.branch("pi/issue-7")
    assert hub.get_branch("pi/issue-7").commit.sha == tip
    assert hub.get_git_ref("heads/pi/issue-7").object.sha == tip
    issue = hub.get_issue(7)
    assert (issue.title, issue.body, issue.user.login) == ("It breaks", "Look", "octo")
    assert [label.name for label in issue.get_labels()] == ["bug"]


def test_pygithub_reads_what_happened(hub: Repository, repo: Repo) -> None:
    """What polling asks for: events, comments, requests, reviews, pushes."""
    demo.labeled_payload(repo, 7, "pi:fix", "octo")
    demo.item_payload(repo, 7, "closed", "octo")
    newest, oldest = hub.get_issues_events()
    assert (newest.event, oldest.event) == ("closed", "labeled")
    assert (oldest.label.name, oldest.actor.login) == ("pi:fix", "octo")
    assert (oldest.issue.number, newest.issue.state) == (7, "closed")
    first = repo.add_comment(7, "one", "octo")
    second = repo.add_comment(7, "two", "octo")
    first.created_at = first.updated_at = second.created_at - 100
    down: Any = {"sort": "created", "direction": "desc"}
    assert [c.body for c in hub.get_issues_comments(**down)] == ["two", "one"]
    since = datetime.fromtimestamp(second.created_at - 50, UTC)
    found = hub.get_issues_comments(since=since, **down)
    assert [(c.body, c.issue_url[-9:]) for c in found] == [("two", "/issues/7")]
    pull = repo.open_pull("topic", files={"a": "b"})
    demo.review_payload(repo, pull.number, "changes_requested", "No", "octo")
    (review,) = hub.get_pull(pull.number).get_reviews()
    assert (review.state, review.body) == ("CHANGES_REQUESTED", "No")
    assert (review.user.login, review.commit_id) == ("octo", pull.head_sha)
    before, after = pull.head_sha, repo.commit("topic", {"a": "c"})
    listed = hub.get_pulls(state="all", sort="updated", direction="desc")
    assert [(p.number, p.head.sha) for p in listed] == [(pull.number, after)]
    path = f"{hub.url}/activity"
    _, rows = hub._requester.requestJsonAndCheck("GET", path, {"ref": "topic"})
    assert [(row["before"], row["after"]) for row in rows] == [(before, after)]
    assert [row["activity_type"] for row in rows] == ["push"]


def test_pygithub_opens_finds_edits_and_closes_a_request(
    hub: Repository, repo: Repo
) -> None:
    repo.commit("pi/issue-7-r1", {"a.txt": "one\ntwo\n"})
    made = hub.create_pull(base="main", head="pi/issue-7-r1", title="A", body="B")
    assert made.number == 8
    assert (made.commits, made.additions, made.changed_files) == (1, 2, 1)
    assert made.head.sha == repo.branch("pi/issue-7-r1")
    assert [p.number for p in hub.get_pulls(head="octo:pi/issue-7-r1")] == [8]
    assert not list(hub.get_pulls(head="octo:pi/issue-7-r2"))
    made.edit(title="[r1/2] A", state="closed")
    assert repo.pulls[8].title == "[r1/2] A"
    assert not list(hub.get_pulls(state="open"))
    again = hub.create_pull(base="main", head="pi/issue-7-r1", title="A", body="B")
    assert again.number == 9


@pytest.mark.parametrize(
    ("head", "base", "said"),
    [
        ("taken", "main", "A pull request already exists for octo:taken."),
        ("same", "main", "No commits between main and same"),
        ("orphan", "main", "no history in common with main"),
        ("absent", "main", "'field': 'head'"),
        ("taken", "absent", "'field': 'base'"),
        ("wendy:taken", "main", "'field': 'head'"),
    ],
)
def test_an_impossible_request_is_a_422_with_githubs_reason(
    hub: Repository, repo: Repo, head: str, base: str, said: str
) -> None:
    repo.commit("taken", {"a.txt": "a"})
    repo.open_pull("taken")
    tip = repo.branch("main")
    assert tip
    repo.git.git("update-ref", "refs/heads/same", tip)
    repo.git.commit("refs/heads/orphan", {"o": "o"}, "Orphan", None, 1)
    with pytest.raises(GithubException) as caught:
        hub.create_pull(base=base, head=head, title="A", body="B")
    assert caught.value.status == 422
    assert said in str(caught.value.data)


def test_comments_come_in_pages(hub: Repository, repo: Repo) -> None:
    for number in range(65):
        repo.add_comment(7, f"comment {number}", "wendy")
    comments = hub.get_issue(7).get_comments()
    assert comments.totalCount == 65
    assert [c.body for c in comments] == [f"comment {n}" for n in range(65)]


def test_a_comment_is_written_in_the_tokens_name(hub: Repository, repo: Repo) -> None:
    made = hub.get_issue(7).create_comment("Done.")
    kept = repo.comments_on(7)[-1]
    assert (made.id, made.body, made.user.login) == (kept.id, "Done.", "octo")


@pytest.mark.parametrize(
    ("login", "permission"),
    [
        ("octo", "admin"),
        ("wendy", "write"),
        ("maud", "write"),
        ("tim", "read"),
        ("reader", "none"),
    ],
)
def test_permissions_are_told_as_github_folds_them(
    hub: Repository, repo: Repo, login: str, permission: str
) -> None:
    repo.accounts.user(login)
    assert hub.get_collaborator_permission(login) == permission


def test_an_app_mints_a_token_that_reaches_only_its_repositories(
    forge: FakeGitHub, repo: Repo, app_key: rsa.RSAPrivateKey, tmp_path: Path
) -> None:
    auth = Auth.AppAuth(APP_ID, private_pem(app_key))
    integration = GithubIntegration(auth=auth, base_url=forge.url)
    assert integration.get_repo_installation("octo", "hello").id == INSTALLATION
    everywhere = integration.get_access_token(INSTALLATION)
    hub = pygithub(forge, token=everywhere.token).get_repo("octo/hello")
    hub.get_issue(7).create_comment("From the app")
    assert repo.comments[-1].user == "pi-app[bot]"
    forge.create_repo("octo/secret", private=True)
    one = mint(forge, app_key, {"repositories": ["other"]}).json()
    assert [r["full_name"] for r in one["repositories"]] == ["octo/other"]
    assert api(forge, "GET", "/repos/octo/other", one["token"]).status_code == 200
    assert api(forge, "GET", "/repos/octo/hello", one["token"]).status_code == 404
    client = Git(tmp_path, forge.url)
    refused = client("clone", client.origin, "work", token=one["token"])
    assert "not found" in refused.stderr


def app_jwt(key: rsa.RSAPrivateKey, **claims: object) -> str:
    now = int(time.time())
    base = {"iss": str(APP_ID), "iat": now - 30, "exp": now + 300}
    return jwt.encode(base | claims, private_pem(key), "RS256")


def mint(
    forge: FakeGitHub, key: rsa.RSAPrivateKey, body: object = None, **claims: object
) -> requests.Response:
    path = f"/app/installations/{INSTALLATION}/access_tokens"
    return api(forge, "POST", path, app_jwt(key, **claims), body)


def test_a_minted_token_has_only_the_permissions_asked_for(
    forge: FakeGitHub, repo: Repo, app_key: rsa.RSAPrivateKey
) -> None:
    minted = mint(forge, app_key, {"permissions": {"contents": "read"}}).json()
    token = minted["token"]
    assert api(forge, "GET", "/repos/octo/hello/branches", token).status_code == 200
    refused = api(forge, "GET", "/repos/octo/hello/pulls", token)
    assert refused.status_code == 403
    assert refused.json()["message"] == "Resource not accessible by integration"
    too_much = mint(forge, app_key, {"permissions": {"secrets": "write"}})
    assert too_much.status_code == 422


def test_an_app_jwt_must_be_signed_by_the_app_and_short_lived(
    forge: FakeGitHub, repo: Repo, app_key: rsa.RSAPrivateKey
) -> None:
    stranger = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    assert mint(forge, stranger).status_code == 401
    assert mint(forge, app_key, exp=int(time.time()) + 3600).status_code == 401
    assert mint(forge, app_key, exp=int(time.time()) - 5).status_code == 401
    assert mint(forge, app_key, iss="9").status_code == 401
    assert api(forge, "GET", "/app", "ghp_not_a_jwt").status_code == 401
    assert api(forge, "GET", "/app", app_jwt(app_key)).json()["id"] == APP_ID
    assert not forge.data.minted


def test_a_minted_token_ends_after_an_hour(app_key: rsa.RSAPrivateKey) -> None:
    now = [time.time()]
    app = App(APP_ID, "pi-app", INSTALLATION, frozenset({"octo/hello"}))
    with FakeGitHub(app=app, clock=lambda: now[0]) as forge:
        forge.create_repo("octo/hello", private=True)
        token = mint(forge, app_key).json()["token"]
        assert api(forge, "GET", "/repos/octo/hello", token).status_code == 200
        now[0] += 3600
        assert api(forge, "GET", "/repos/octo/hello", token).status_code == 401


# --- gh ----------------------------------------------------------------------


@pytest.fixture
def gh(tmp_path: Path, forge: FakeGitHub, repo: Repo) -> Callable[..., str]:
    """`gh api`, which speaks plain HTTP only to github.localhost, by a proxy."""
    if shutil.which("gh") is None:
        lacking("GitHub's command line (gh) is not installed")
    environment = {
        "PATH": os.environ["PATH"],
        "GH_HOST": "github.localhost",
        "GH_TOKEN": WRITER,
        "GH_CONFIG_DIR": str(tmp_path),
        "http_proxy": forge.url,
    }

    def run(*arguments: str) -> str:
        done = subprocess.run(
            ["gh", "api", *arguments], env=environment, capture_output=True, text=True
        )
        return (done.stdout or done.stderr).strip()

    return run


def test_gh_reads_comments_and_opens_a_request(
    gh: Callable[..., str], repo: Repo
) -> None:
    assert gh("user", "--jq", ".login") == "octo"
    assert gh("repos/octo/hello", "--jq", ".id") == str(repo.id)
    repo.commit("pi/issue-7", {"a.txt": "a"})
    fields = ("-f", "title=T", "-f", "head=pi/issue-7", "-f", "base=main")
    assert gh("repos/octo/hello/pulls", *fields, "--jq", ".number") == "8"
    again = gh("repos/octo/hello/pulls", *fields)
    assert "A pull request already exists for octo:pi/issue-7." in again
    for number in range(33):
        repo.add_comment(7, f"c{number}", "octo")
    listed = gh("--paginate", "repos/octo/hello/issues/7/comments", "--jq", ".[].body")
    assert listed.split() == [f"c{number}" for number in range(33)]
    assert "Not Found" in gh("repos/octo/absent", "--jq", ".message")


# --- what every request meets ------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "token", "status"),
    [
        ("GET", "/repos/octo/hello", None, 401),
        ("GET", "/repos/octo/hello", "ghp_wrong", 401),
        ("GET", "/repos/octo/hello", OTHER, 404),
        ("GET", "/repos/octo/absent", WRITER, 404),
        ("GET", "/repos/octo/hello/issues/99", WRITER, 404),
        ("GET", "/repos/octo/hello/branches/absent", WRITER, 404),
        ("GET", "/repos/octo/hello/nothing", WRITER, 404),
        ("POST", "/repos/octo/hello/issues/7/comments", READER, 403),
        ("POST", "/repos/octo/hello/pulls", READER, 403),
        ("GET", "/repos/octo/hello/collaborators/wendy/permission", READER, 403),
        ("PUT", "/repos/octo/hello/pulls/8/merge", WRITER, 404),
        ("POST", "/repos/octo/hello/issues/7/comments", WRITER, 422),
        ("GET", "/api/v3/repos/octo/hello", READER, 200),
    ],
)
def test_refusals_have_githubs_status(
    forge: FakeGitHub,
    repo: Repo,
    method: str,
    path: str,
    token: str | None,
    status: int,
) -> None:
    repo.add_collaborator("wendy", "write")
    assert api(forge, method, path, token).status_code == status
    assert forge.log[-1][1:4] == (method, path, status)
    assert not repo.comments


def test_an_etag_answers_304_and_costs_nothing(forge: FakeGitHub, repo: Repo) -> None:
    path = "/repos/octo/hello/issues/7"
    first = api(forge, "GET", path)
    again = api(forge, "GET", path, If_None_Match=first.headers["ETag"])
    assert (again.status_code, again.content) == (304, b"")
    left = "X-RateLimit-Remaining"
    assert again.headers[left] == first.headers[left] == "4999"
    repo.issues[7].labels.append("new")
    assert (
        api(forge, "GET", path, If_None_Match=first.headers["ETag"]).status_code == 200
    )


def test_a_spent_rate_limit_is_a_403_until_the_hour_ends(
    forge: FakeGitHub, repo: Repo
) -> None:
    forge.data.rate_limit = 2
    answers = [api(forge, "GET", "/user") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 403]
    assert answers[2].headers["X-RateLimit-Remaining"] == "0"
    assert api(forge, "GET", "/rate_limit").json()["rate"]["remaining"] == 0


def test_ordered_faults_come_before_or_after_the_effect(
    forge: FakeGitHub, repo: Repo
) -> None:
    path, body = "/repos/octo/hello/issues/7/comments", {"body": "x"}
    forge.fail_next("POST", "/comments$", status=502, times=2, headers={"X-A": "b"})
    first = api(forge, "POST", path, body=body)
    assert (first.status_code, first.headers["X-A"]) == (502, "b")
    assert api(forge, "GET", path).status_code == 200
    assert api(forge, "POST", path, body=body).status_code == 502
    assert not repo.comments
    forge.fail_next("POST", "/comments$", status=0, moment="after")
    with pytest.raises(requests.ConnectionError):
        api(forge, "POST", path, body=body)
    assert len(repo.comments) == 1
    assert api(forge, "POST", path, body=body).status_code == 201


def test_an_ordered_delay_outlasts_a_client_and_ends_with_the_server(
    forge: FakeGitHub, repo: Repo
) -> None:
    forge.fail_next("GET", "/user", status=None, delay=60)
    with pytest.raises(requests.ReadTimeout):
        requests.get(f"{forge.url}/user", timeout=0.05)
    began = time.monotonic()
    forge.stop()
    assert time.monotonic() - began < 2


def test_a_stopped_server_answers_no_kept_connection(forge: FakeGitHub) -> None:
    with requests.Session() as session:
        session.get(f"{forge.url}/healthz", timeout=5)
        forge.stop()
        with pytest.raises(requests.ConnectionError):
            session.get(f"{forge.url}/healthz", timeout=5)


def test_the_log_names_tokens_and_never_shows_one(
    git: Git, forge: FakeGitHub, repo: Repo
) -> None:
    """T46."""
    api(forge, "GET", "/user", READER)
    assert [row.token for row in forge.requests("GET", "^/user$")] == ["reader"]
    clones = forge.requests("POST", "git-upload-pack$")
    assert {row.token for row in clones} == {"writer"}
    assert WRITER not in repr(forge.log) + repr(forge.data.tokens.values())


def test_replicas_that_open_requests_at_once_get_numbers_of_their_own(
    forge: FakeGitHub, repo: Repo
) -> None:
    for index in (1, 2, 3):
        repo.commit(f"pi/issue-7-r{index}", {"a.txt": str(index)})

    def publish(index: int) -> None:
        body = {"head": f"pi/issue-7-r{index}", "base": "main", "title": "T"}
        api(forge, "POST", "/repos/octo/hello/pulls", body=body)

    threads = [threading.Thread(target=publish, args=(i,)) for i in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(repo.pulls) == [8, 9, 10]
    assert len({pull.head for pull in repo.pulls.values()}) == 3


# --- deliveries --------------------------------------------------------------


@pytest.mark.parametrize("form", [False, True])
def test_a_delivery_is_signed_over_its_very_bytes(repo: Repo, form: bool) -> None:
    """T04: emoji, umlauts and CRLF included."""
    repo.issues[7].body = "Grüße 🎉 <!-- $(x) -->\r\n"
    payload = demo.labeled_payload(repo, 7, "pi:urgent", "wendy")
    headers, body = demo.signed_delivery("issues", payload, "s3cret", "guid-1", form)
    mac = hmac.new(b"s3cret", body, hashlib.sha256).hexdigest()
    assert headers["X-Hub-Signature-256"] == f"sha256={mac}"
    assert headers["X-GitHub-Event"] == "issues"
    assert headers["X-GitHub-Delivery"] == "guid-1"
    text = parse_qs(body.decode())["payload"][0] if form else body.decode()
    assert json.loads(text) == payload
    assert ("x-www-form-urlencoded" in headers["Content-Type"]) is form


def test_a_payload_says_what_happened_and_the_forge_agrees(
    forge: FakeGitHub, repo: Repo
) -> None:
    payload = demo.labeled_payload(repo, 7, "pi:urgent", "wendy")
    assert payload["label"]["name"] == "pi:urgent"
    assert [lb["name"] for lb in payload["issue"]["labels"]] == ["bug", "pi:urgent"]
    assert payload["sender"]["login"] == "wendy"
    shown = api(forge, "GET", "/repos/octo/hello/issues/7").json()
    assert shown["labels"] == payload["issue"]["labels"]
    assert shown["id"] == payload["issue"]["id"]
    said = demo.comment_payload(repo, 7, "@pi go", "tim")
    assert said["comment"]["author_association"] == "COLLABORATOR"
    assert repo.comments_on(7)[-1].body == "@pi go"


def test_a_request_from_a_fork_shows_two_repositories(repo: Repo) -> None:
    pull = repo.open_pull("patch", files={"b": "b"}, fork_owner="stranger")
    payload = demo.pull_request_payload(repo, pull.number, "opened", "stranger")
    head, base = payload["pull_request"]["head"], payload["pull_request"]["base"]
    assert head["repo"]["id"] != base["repo"]["id"]
    assert head["label"] == "stranger:patch"
    assert payload["pull_request"]["author_association"] == "NONE"
    said = demo.comment_payload(repo, pull.number, "hm", "wendy")
    assert "pull_request" in said["issue"]


def _unlike(real: object, ours: object, path: str = "") -> Iterator[str]:
    """The paths where two payloads hold values of different JSON types."""
    if isinstance(real, dict) and isinstance(ours, dict):
        for key in real.keys() & ours.keys():
            yield from _unlike(real[key], ours[key], f"{path}.{key}")
    elif isinstance(real, list) and isinstance(ours, list):
        for one, other in zip(real[:1], ours[:1], strict=False):
            yield from _unlike(one, other, f"{path}[]")
    elif real is not None and ours is not None and type(real) is not type(ours):
        yield f"{path}: {type(real).__name__} {type(ours).__name__}"


OURS: dict[str, Callable[[Repo], dict[str, Any]]] = {
    "issues.labeled.json": lambda r: demo.labeled_payload(r, 7, "bug", "octo"),
    "issue_comment.created.json": lambda r: demo.comment_payload(r, 7, "x", "octo"),
    "issue_comment.created.on_pr.owner.json": lambda r: demo.comment_payload(
        r, 8, "x", "octo"
    ),
    "pull_request.opened.json": lambda r: demo.pull_request_payload(
        r, 8, "opened", "octo"
    ),
    "pull_request.labeled.json": lambda r: demo.pull_request_payload(
        r, 8, "labeled", "octo", "bug"
    ),
    "pull_request_review.submitted.approved_from_fork.json": lambda r: (
        demo.review_payload(r, 8, "approved", "fine", "octo")
    ),
}
READ_BY_RECEIVERS = {
    "repository": {"id", "full_name", "private", "default_branch", "owner"},
    "sender": {"login", "id", "type"},
    "label": {"name", "id"},
    "issue": {"number", "title", "body", "labels", "state", "author_association"},
    "comment": {"id", "body", "user", "author_association", "created_at"},
    "review": {"id", "body", "user", "state", "author_association", "commit_id"},
    "pull_request": {"number", "title", "body", "head", "base", "author_association"},
}


@pytest.mark.parametrize("name", sorted(OURS))
def test_payloads_have_the_shape_of_real_ones(
    repo: Repo, payloads: Path, name: str
) -> None:
    repo.open_pull("topic", files={"a.txt": "a"})
    real = json.loads((payloads / "github" / name).read_text())
    ours = OURS[name](repo)
    assert not list(_unlike(real, ours))
    assert real.keys() - ours.keys() <= {"organization", "installation"}
    for part, fields in READ_BY_RECEIVERS.items():
        assert part not in real or not (fields & real[part].keys()) - ours[part].keys()


# --- the fake model ----------------------------------------------------------

KEY = "sk-real"
BASH = {"text": "On it.", "tools": [{"name": "bash", "args": {"command": "ls -l"}}]}


def openai_request(text: str, *answers: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    messages += [{"role": "assistant", "content": a} for a in answers]
    return {"model": "fake-1", "messages": messages, **fields}


def anthropic_request(text: str, *answers: str, **fields: Any) -> dict[str, Any]:
    body = openai_request(text, **fields)
    for number, answer in enumerate(answers):
        use = {"type": "tool_use", "id": f"t{number}", "name": "bash", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": answer}
        body["messages"].append({"role": "assistant", "content": [use]})
        body["messages"].append({"role": "user", "content": [result]})
    return body


def ask(model: FakeModel, style: str, body: object, key: str = KEY) -> Any:
    path, headers = {
        "openai": ("/v1/chat/completions", {"Authorization": f"Bearer {key}"}),
        "anthropic": ("/v1/messages?beta=true", {"x-api-key": key}),
    }[style]
    return requests.post(
        model.url + path, json=body, headers=headers, timeout=10, stream=True
    )


def events(answer: requests.Response) -> list[Any]:
    """The data of server-sent events; the end mark as text."""
    lines = [x.removeprefix("data: ") for x in answer.text.splitlines()]
    rows = [x for x in lines if x and not x.startswith("event: ")]
    return [x if x == "[DONE]" else json.loads(x) for x in rows]


@pytest.fixture
def model() -> Iterator[FakeModel]:
    with FakeModel(key=KEY) as running:
        yield running


REQUESTS = {"openai": openai_request, "anthropic": anthropic_request}
STYLES = pytest.mark.parametrize("style", ["openai", "anthropic"])


def test_openai_streams_text_thinking_tools_and_usage(model: FakeModel) -> None:
    step = BASH | {"thinking": "hm", "usage": {"input": 9, "output": 4, "cacheRead": 5}}
    model.set_scripts([{"match": "fix it", "steps": [step]}])
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = ask(model, "openai", openai_request("please fix it", **options))
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    chunks = events(answer)
    assert chunks[-1] == "[DONE]"
    usage = chunks[-2]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (14, 4)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 5
    deltas = [c["choices"][0] for c in chunks[:-2]]
    text = "".join(d["delta"].get("content") or "" for d in deltas)
    arguments = "".join(
        call["function"]["arguments"]
        for d in deltas
        for call in d["delta"].get("tool_calls", [])
    )
    assert (text, json.loads(arguments)) == ("On it.", {"command": "ls -l"})
    assert deltas[-1]["finish_reason"] == "tool_calls"


def test_openai_sends_usage_in_a_stream_only_when_asked(model: FakeModel) -> None:
    chunks = events(ask(model, "openai", openai_request("x", stream=True)))
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_anthropic_streams_blocks_in_order(model: FakeModel) -> None:
    step = BASH | {
        "thinking": "hm",
        "usage": {"input": 9, "output": 4, "cacheWrite": 2},
    }
    model.set_scripts([{"match": "fix it", "steps": [step]}])
    body = anthropic_request("please fix it", stream=True)
    got = events(ask(model, "anthropic", body))
    assert [e["type"] for e in got if "block" not in e["type"]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    starts = [e["content_block"]["type"] for e in got if "content_block" in e]
    assert starts == ["thinking", "text", "tool_use"]
    usage = got[0]["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_creation_input_tokens"]) == (9, 2)
    assert got[-2]["usage"]["output_tokens"] == 4
    assert got[-2]["delta"]["stop_reason"] == "tool_use"
    parts = "".join(
        e["delta"].get("partial_json", "") for e in got if "index" in e and "delta" in e
    )
    assert json.loads(parts) == {"command": "ls -l"}


def test_both_styles_answer_whole(model: FakeModel) -> None:
    model.set_scripts([{"match": "", "steps": [BASH]}])
    openai = ask(model, "openai", openai_request("x")).json()
    call = openai["choices"][0]["message"]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"command": "ls -l"}
    anthropic = ask(model, "anthropic", anthropic_request("x")).json()
    assert [b["type"] for b in anthropic["content"]] == ["text", "tool_use"]
    assert anthropic["content"][1]["input"] == {"command": "ls -l"}
    assert anthropic["stop_reason"] == "tool_use"


@STYLES
def test_the_step_follows_from_the_answers_since_the_last_user_text(
    model: FakeModel, style: str
) -> None:
    steps = [{"text": "one"}, {"text": "two"}]
    model.set_scripts([{"match": "fix", "steps": steps}])
    make = REQUESTS[style]
    said = [ask(model, style, make("fix", *["a"] * n)).text for n in (0, 1, 1, 2)]
    found = [[w for w in ("one", "two", "has ended") if w in text] for text in said]
    assert found == [["one"], ["two"], ["two"], ["has ended"]]
    later = make("hello", "a", "a")
    later["messages"].append({"role": "user", "content": "now fix it"})
    assert "one" in ask(model, style, later).text


@STYLES
def test_the_last_script_of_the_last_user_text_wins(
    model: FakeModel, style: str
) -> None:
    model.set_scripts([{"match": "", "steps": [{"text": "from the list"}]}])
    fork = {"name": "fork_join", "args": {"task": '@@[{"text": "for the fork"}]'}}
    script = json.dumps([{"text": 'from the text [x] " @@[ ', "tools": [fork]}])
    said = f'@@[{{"text": "first"}}] Do @@[broken and @@{script}\n```'
    answer = ask(model, style, REQUESTS[style](said))
    assert "from the text" in answer.text
    assert "fork_join" in answer.text


@STYLES
def test_a_wrong_key_is_refused_in_the_styles_own_shape(
    model: FakeModel, style: str
) -> None:
    answer = ask(model, style, REQUESTS[style]("x"), key="job-token")
    assert answer.status_code == 401
    error = answer.json()["error"]
    shape = {"openai": ("code", "invalid_api_key")}
    field, value = shape.get(style, ("type", "authentication_error"))
    assert error[field] == value
    assert (model.log[-1].key, model.log[-1].status) == ("job-token", 401)


@STYLES
def test_scripted_errors_have_their_status_or_break_the_stream(
    model: FakeModel, style: str
) -> None:
    steps = [{"status": 429, "error": "slow down"}, {"text": "ab", "error": "broke"}]
    model.set_scripts([{"match": "", "steps": steps}])
    make = REQUESTS[style]
    limited = ask(model, style, make("x", stream=True))
    assert (limited.status_code, "slow down" in limited.text) == (429, True)
    broken = events(ask(model, style, make("x", "a", stream=True)))
    assert broken[-1]["error"]["message"] == "broke"


@STYLES
def test_usage_is_counted_from_bytes_the_same_way_each_time(
    model: FakeModel, style: str
) -> None:
    model.set_scripts([{"match": "", "steps": [{"text": "12345"}]}])
    for _ in range(2):
        ask(model, style, REQUESTS[style]("x"))
    first, second = model.log
    assert first.usage and first.usage == second.usage
    assert first.usage.output == 2
    size = len(json.dumps(first.body).encode())
    assert first.usage.input == -(-size // 4)


@STYLES
def test_a_hanging_answer_ends_when_the_client_leaves(
    model: FakeModel, style: str
) -> None:
    model.set_scripts([{"match": "", "steps": [{"text": "so far", "hang": True}]}])
    answer = ask(model, style, REQUESTS[style]("x", stream=True))
    for line in answer.iter_lines():
        if b"so far" in line:
            break
    answer.close()
    until(lambda: model.log[0].gone)


def test_the_log_counts_answers_in_flight(model: FakeModel) -> None:
    model.set_scripts([{"match": "", "steps": [{"hang": True}]}])
    body = openai_request("x", stream=True)
    hanging = [ask(model, "openai", body) for _ in range(3)]
    assert [row.inflight for row in model.log] == [1, 2, 3]
    assert model.max_inflight == 3
    for answer in hanging:
        answer.close()
    until(lambda: all(row.gone for row in model.log))
    model.set_scripts([])
    until(lambda: ask(model, "openai", body).ok and model.log[-1].inflight == 1)


def until(condition: Callable[[], bool]) -> None:
    """Wait, at most five seconds, for something that is about to happen."""
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_chunks_come_with_their_delay(model: FakeModel) -> None:
    step = {"text": "x" * 64, "chunkDelay": 0.03}
    model.set_scripts([{"match": "", "steps": [step]}])
    answer = ask(model, "openai", openai_request("x", stream=True))
    times = [time.monotonic() for line in answer.iter_lines() if b"xxx" in line]
    assert len(times) == 4
    assert times[-1] - times[0] > 0.06


def test_scripts_and_log_travel_over_the_control_paths(model: FakeModel) -> None:
    control = f"{model.url}/control"
    scripts = [{"match": "", "steps": [{"text": "steered"}]}]
    assert requests.post(f"{control}/scripts", json=scripts).ok
    assert "steered" in ask(model, "openai", openai_request("x")).text
    row = requests.get(f"{control}/log").json()[0]
    assert row["style"] == "openai-completions"
    assert row["key"] == KEY
    assert "authorization" in row["headers"] and KEY not in row["headers"]
    assert {"t", "path", "body", "usage", "status", "inflight"} <= row.keys()


@pytest.mark.parametrize(
    "step", [{"txt": "x"}, "text", {"usage": {"inputs": 1}}, {"tools": [{"args": {}}]}]
)
def test_a_script_field_that_would_do_nothing_is_refused(
    model: FakeModel, step: object
) -> None:
    scripts = [{"match": "", "steps": [step]}]
    answer = requests.post(f"{model.url}/control/scripts", json=scripts)
    assert answer.status_code == 400
    with pytest.raises((ValueError, KeyError)):
        FakeModel(scripts)


def test_the_models_are_listed_for_the_right_key(model: FakeModel) -> None:
    url = f"{model.url}/v1/models"
    assert requests.get(url).status_code == 401
    rows = requests.get(url, headers={"x-api-key": KEY, "anthropic-version": "1"})
    assert [row["id"] for row in rows.json()["data"]] == ["fake-1"]


# --- the scripted agent ------------------------------------------------------


class AgentRun:
    """The agent in a process of its own, started with the flags pi gets."""

    def __init__(self, folder: Path, url: str, key: str = KEY) -> None:
        provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": key}
        (folder / "models.json").write_text(json.dumps({"providers": {"p": provider}}))
        (folder / "rules.md").write_text("RULES OF THE HOUSE")
        flags = "agent -p --mode json --no-approve --no-extensions --no-skills"
        flags += " --skill skill/fix --append-system-prompt rules.md --no-session"
        flags += " --model p/fake-1 -e fork-join --exclude-tools grep,find"
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(DEMO), *flags.split()],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "PI_CODING_AGENT_DIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def talk(self, prompt: str) -> list[Any]:
        output, _ = self.process.communicate(prompt, timeout=30)
        return [json.loads(line) for line in output.splitlines()]


def test_the_agent_runs_bash_and_prints_pis_events(
    tmp_path: Path, model: FakeModel
) -> None:
    tool = {"name": "bash", "args": {"command": "echo hi | tee out.txt; exit 3"}}
    first = {"tools": [tool], "usage": {"input": 7, "output": 3, "cacheRead": 2}}
    model.set_scripts([{"match": "RULES OF", "steps": [first, {"text": "Bye."}]}])
    run = AgentRun(tmp_path, model.url)
    got = run.talk("Fix it\n")
    assert run.process.returncode == 0
    assert [e["type"] for e in got] == [
        *("session", "agent_start", "turn_start", "message_end"),
        *("tool_execution_start", "tool_execution_end", "turn_end"),
        *("turn_start", "message_end", "agent_settled"),
    ]
    assert got[3]["message"]["stopReason"] == "toolUse"
    usage = got[3]["message"]["usage"]
    assert (usage["input"], usage["cacheRead"], usage["totalTokens"]) == (7, 2, 12)
    assert got[5]["isError"] is True
    assert got[8]["message"]["stopReason"] == "stop"
    assert (tmp_path / "out.txt").read_text() == "hi\n"
    assert model.log[1].body["messages"][-1]["content"] == "hi\n"


def test_a_refusing_provider_ends_the_agent_with_a_stop_reason(
    tmp_path: Path, model: FakeModel
) -> None:
    run = AgentRun(tmp_path, model.url, key="wrong")
    message = run.talk("Fix it")[-2]["message"]
    assert run.process.returncode == 0
    assert message["stopReason"] == "error"
    assert message["errorMessage"].startswith("401: ")


def test_a_terminated_agent_takes_its_command_along(
    tmp_path: Path, model: FakeModel
) -> None:
    command = "echo $$ > pid; sleep 60"
    tools = [{"name": "bash", "args": {"command": command}}]
    model.set_scripts([{"match": "", "steps": [{"tools": tools}]}])
    run = AgentRun(tmp_path, model.url)
    assert run.process.stdin and run.process.stdout
    run.process.stdin.close()
    while "tool_execution_start" not in run.process.stdout.readline():
        pass
    pid = tmp_path / "pid"
    until(lambda: pid.exists() and pid.read_text().strip() != "")
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(timeout=10) == 143
    run.process.stdout.close()
    until(lambda: not _alive(int(pid.read_text())))


def _alive(pid: int) -> bool:
    """Whether a process still runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in ("Z", "X")


# --- as programs, in containers, with the real pi ----------------------------


@pytest.mark.parametrize("command", ["forge", "model"])
def test_each_fake_runs_alone_with_its_secret_on_stdin(command: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(DEMO), command, "--secret", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout
    process.stdin.write("the-secret\n")
    process.stdin.flush()
    url = f"http://127.0.0.1:{json.loads(process.stdout.readline())['listening']}"
    assert requests.get(f"{url}/healthz", timeout=5).text == "ok\n"
    path = "/user" if command == "forge" else "/v1/models"
    right = {"Authorization": "Bearer the-secret"}
    assert requests.get(url + path, headers=right, timeout=5).status_code == 200
    assert requests.get(url + path, timeout=5).status_code == 401
    process.terminate()
    assert process.wait(timeout=10) == 0
    process.stdin.close()
    process.stdout.close()


@pytest.fixture
def service(docker_services: Any) -> Callable[[str, int], str]:
    """The address of a compose service, once it answers.

    No health check of the engine's: it would start a Python each second, for ever.
    """

    def address(name: str, port: int) -> str:
        url = f"http://127.0.0.1:{docker_services.port_for(name, port)}"
        docker_services.wait_until_responsive(lambda: answers(url), 30, 0.1)
        return url

    return address


def answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/healthz", timeout=5).ok
    except requests.ConnectionError:
        return False


@pytest.mark.docker
def test_the_forge_in_a_container_takes_a_repository_and_a_push(
    service: Callable[[str, int], str], tmp_path: Path
) -> None:
    url = service("forge", 8090)
    shape = {
        "full_name": "octo/hello",
        "files": {"a.txt": "a\n"},
        "private": True,
        "issues": {"7": {"title": "T"}},
        "protected": ["main"],
    }
    assert requests.post(f"{url}/control/repos", json=shape).ok
    happening = {"event": "issues", "repo": "octo/hello", "number": 7}
    happening |= {"action": "labeled", "label": "pi:urgent", "sender": "octo"}
    payload = requests.post(f"{url}/control/payload", json=happening).json()
    assert payload["label"]["name"] == "pi:urgent"
    secret = "ghp_for_the_compose_forge"
    client = Git(tmp_path, url)
    client("clone", client.origin, "work", token=secret)
    made = client.commit("topic", {"b.txt": b"b"})
    pushed = client("push", "origin", "HEAD:topic", "HEAD:main", token=secret)
    assert "(protected branch hook declined)" in pushed.stderr
    state = requests.get(f"{url}/control/state").json()["octo/hello"]
    assert state["refs"]["refs/heads/topic"] == made
    assert state["issues"][0]["labels"] == ["pi:urgent"]


@pytest.mark.docker
@STYLES
def test_the_real_pi_runs_a_bash_call_from_the_scripted_model(
    service: Callable[[str, int], str], docker_compose_project_name: str, style: str
) -> None:
    url = service("model", 8091)
    tool = {"name": "bash", "args": {"command": "echo from-$((40+2))"}}
    steps = [{"thinking": "hm", "text": "On it.", "tools": [tool]}, {"text": "Bye."}]
    prompt = f"Please run it. @@{json.dumps(steps)}"
    got = _pi(f"{docker_compose_project_name}_fakes", style, prompt)
    ended = [e for e in got if e["type"] == "tool_execution_end"]
    assert [e["result"]["content"][0]["text"] for e in ended] == ["from-42\n"]
    messages = [e["message"] for e in got if e["type"] == "message_end"]
    answers = [m for m in messages if m["role"] == "assistant"]
    assert [m["stopReason"] for m in answers] == ["toolUse", "stop"]
    seen = requests.get(f"{url}/control/log").json()[-2:]
    assert [row["status"] for row in seen] == [200, 200]
    for message, row in zip(answers, seen, strict=True):
        counted = ("input", "output", "cacheRead", "cacheWrite")
        assert {n: message["usage"][n] for n in counted} == row["usage"]


PI_APIS = {
    "openai": ("openai-completions", "http://model:8091/v1"),
    "anthropic": ("anthropic-messages", "http://model:8091"),
}


def _pi(network: str, style: str, prompt: str) -> list[Any]:
    """Run the image's pi once against the model service; its events."""
    api_name, base_url = PI_APIS[style]
    fake = {"id": "fake-1", "contextWindow": 200_000, "maxTokens": 8000}
    fake |= {"reasoning": True}
    provider = {"baseUrl": base_url, "api": api_name, "models": [fake]}
    provider["apiKey"] = "sk-for-the-compose-model"
    models = json.dumps({"providers": {"p": provider}})
    script = 'mkdir -p "$PI_CODING_AGENT_DIR" && cd /tmp && '
    script += 'printf %s "$MODELS" > "$PI_CODING_AGENT_DIR/models.json" && '
    script += "exec pi -p --mode json --no-session --no-approve --no-extensions"
    script += " --no-skills --model p/fake-1"
    command = ["docker", "run", "--rm", "-i", "--network", network]
    for name, value in {
        "MODELS": models,
        "PI_CODING_AGENT_DIR": "/tmp/agent",
        "PI_OFFLINE": "1",
        "PI_TELEMETRY": "0",
    }.items():
        command += ["-e", f"{name}={value}"]
    command += ["--entrypoint", "bash", IMAGE, "-c", script]
    done = subprocess.run(command, input=prompt, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
