"""publish: agent: real boxes that push and open requests themselves, over TLS.

The forge listens on the engine's bridge with a certificate of a CA made for the run;
host and box trust it, and the gate lists its host and port for these jobs alone. One
row of FORGES a forge: how to serve its fake, and what the agent runs there. Where the
image has the forge's real CLI it is used, else a stand-in of the same name.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import shutil
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import JOB_IMAGE
from test_main_path import assert_refused_before_anything
from world import KEY, SECRET, TOKEN, WAIT, World, bash, bridge_address, say, solve
from world import world as make_world

import pidispatch
import pidispatch_demo as demo

#: The image that the test's own is made from; with `gh` in it, gh is what runs.
BASE = os.environ.get("PI_AGENT_IMAGE", JOB_IMAGE)
pytestmark = pytest.mark.docker


# -- TLS, with a CA of this run ---------------------------------------------------


class Authority(NamedTuple):
    """A CA's certificate, and what a server at the bridge's address presents."""

    ca: Path
    server: ssl.SSLContext


def certificate(name: str, issuer: Any, key: Any, signed_by: Any, *more: Any) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )
    for extension in more:
        made = made.add_extension(extension, critical=True)
    return made.sign(signed_by, hashes.SHA256())


@pytest.fixture(scope="session")
def authority(
    tmp_path_factory: pytest.TempPathFactory, docker_client: Any
) -> Authority:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = tmp_path_factory.mktemp("ca")
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    is_ca = x509.BasicConstraints(ca=True, path_length=None)
    ca = certificate("run's own CA", None, ca_key, ca_key, is_ca)
    address = x509.IPAddress(ipaddress.ip_address(bridge_address(docker_client)))
    names = x509.SubjectAlternativeName([address])
    leaf = certificate("forge", ca.subject, key, ca_key, names)
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(ca.public_bytes(pem))
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.pem").write_bytes(private + leaf.public_bytes(pem))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    return Authority(folder / "ca.crt", context)


AGENT_IMAGE = f"""
FROM {BASE}
USER root
COPY ca.crt /usr/local/share/ca-certificates/run.crt
COPY forge_cli.py /usr/local/bin/forge_cli
RUN update-ca-certificates && chmod 755 /usr/local/bin/forge_cli \\
    && for name in gh glab tea az; do command -v $name \\
        || ln -s forge_cli /usr/local/bin/$name; done
LABEL {pidispatch.LABEL}forges="github gitlab forgejo azure"
USER 1001:1001
"""


@pytest.fixture(scope="session")
def agent_image(
    authority: Authority, docker_client: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The job image that trusts the run's CA, and has a CLI for every forge."""
    folder = tmp_path_factory.mktemp("agent-image")
    shutil.copy(authority.ca, folder / "ca.crt")
    shutil.copy(Path(__file__).with_name("forge_cli.py"), folder)
    (folder / "Dockerfile").write_text(AGENT_IMAGE)
    tag = f"pidispatch-test/agent:{os.getpid()}"
    lines = list(docker_client.build(path=str(folder), tag=tag, rm=True, decode=True))
    assert not [line for line in lines if "error" in line], lines
    yield tag
    docker_client.remove_image(tag, force=True)


# -- the forges -------------------------------------------------------------------


class ForgeCase(NamedTuple):
    """What differs for these tests from forge to forge.

    `publish` is what an agent runs: it pushes its branch, opens a request unless
    there is one, titled `$title`, and comments `$said` on the issue. `comment` only
    comments `$said` on the request `$number`. `$branch` and `$i` (the replica) are
    set.
    """

    kind: str
    publish: str
    comment: str


GH_COMMENT = (
    'gh api repos/octo/spoon/issues/$number/comments -f body="$said" >/dev/null'
)
GH_PUBLISH = f"""
git push -q --force-with-lease=$branch:$expected origin $branch
open=$(gh api "repos/octo/spoon/pulls?state=open&head=octo:$branch")
test "$open" != "[]" || gh api repos/octo/spoon/pulls -f title="$title" \\
    -f head=$branch -f base=main -f body="Bent by hand." >/dev/null
{GH_COMMENT}
"""


GL = "glab api projects/octo%2Fspoon"
GL_COMMENT = f'{GL}/merge_requests/$number/notes -f body="$said" >/dev/null'
GL_PUBLISH = f"""
git push -q --force-with-lease=$branch:$expected origin $branch
open=$({GL}"/merge_requests?state=opened&source_branch=$branch")
test "$open" != "[]" || {GL}/merge_requests -f title="$title" \\
    -f source_branch=$branch -f target_branch=main -f description="By hand." >/dev/null
{GL}/issues/7/notes -f body="$said" >/dev/null
"""


FJ = "tea api repos/octo/spoon"
FJ_COMMENT = f'{FJ}/issues/$number/comments -f body="$said" >/dev/null'
#: The list has no filter: the branch is matched exactly, `-r1` is not `-r12`.
FJ_PUBLISH = f"""
git push -q --force-with-lease=$branch:$expected origin $branch
{FJ}"/pulls?state=open&limit=50" | grep -qF '"ref": "'$branch'"' \\
    || {FJ}/pulls -f title="$title" -f head=$branch -f base=main \\
        -f body="Bent by hand." >/dev/null
{FJ_COMMENT}
"""


AZ = "az api fabrikam/octo/_apis"
AZ_PULLS = f"{AZ}/git/repositories/spoon/pullrequests"
AZ_COMMENT = f"""
{AZ_PULLS}/$number/threads -F comments="[{{\\"content\\": \\"$said\\"}}]" >/dev/null
"""
AZ_PUBLISH = f"""
git push -q --force-with-lease=$branch:$expected origin $branch
ref=refs/heads/$branch
{AZ_PULLS}"?searchCriteria.sourceRefName=$ref" | grep -qF '"count": 1' \\
    || {AZ_PULLS} -f title="$title" -f description="Bent by hand." \\
        -f sourceRefName=$ref -f targetRefName=refs/heads/main >/dev/null
{AZ}/wit/workItems/7/comments -f text="$said" >/dev/null
"""


FORGES = [
    ForgeCase("github", GH_PUBLISH, GH_COMMENT),
    ForgeCase("gitlab", GL_PUBLISH, GL_COMMENT),
    ForgeCase("forgejo", FJ_PUBLISH, FJ_COMMENT),
    ForgeCase("azure", AZ_PUBLISH, AZ_COMMENT),
]

SET = """set -e; i=${PI_JOB_ID##*-r}; branch=$(git branch --show-current); number=7
expected=$(git ls-remote origin refs/heads/$branch | cut -f1)
said="replica $i of 2 bent it"; title="Bend the spoon"
"""
CHANGE = "echo better $PI_JOB_ID >> spoon.txt; git commit -qam 'Bend the spoon'"


@pytest.fixture(params=FORGES, ids=[case.kind for case in FORGES])
def case(request: pytest.FixtureRequest) -> ForgeCase:
    found: ForgeCase = request.param
    return found


Open = Callable[..., World]


@pytest.fixture
def opened(
    case: ForgeCase,
    tmp_path: Path,
    authority: Authority,
    agent_image: str,
    docker_client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Open]:
    """Makes the test's world; `app` and settings go to the forge and the service."""
    for name in ("REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO"):
        monkeypatch.setenv(name, str(authority.ca))
    stack = []

    def make(app: demo.App | None = None, **settings: Any) -> World:
        host, tls = bridge_address(docker_client), authority.server

        def serve(dialect: Any, tokens: list[demo.Token]) -> demo.FakeForge:
            made: demo.FakeForge = dialect(tokens, app=app, host=host, tls=tls)
            return made

        context = make_world(tmp_path, docker_client, kind=case.kind, serve=serve)
        made = context.__enter__()
        stack.append((context, made))
        made.change(job_image=agent_image, gate_image=JOB_IMAGE)
        made.change(**settings)
        made.repo.protect("main")
        return made

    yield make
    for context, made in stack:
        made.stop()
        store = pidispatch.Store(made.settings.db)
        pidispatch.DockerEngine(made.settings, store.instance()).sweep(frozenset())
        store.close()
        context.__exit__(None, None, None)


def pushes(world: World) -> list[str | None]:
    """The names of the tokens that pushed, in order; refused ones count."""
    rows = world.forge.requests("POST", r"git-receive-pack$")
    return [row.token for row in rows]


# -- two branches, two requests, told once ----------------------------------


def test_two_replicas_push_and_open_requests_themselves_and_the_host_marks_them(
    opened: Open, case: ForgeCase
) -> None:
    """Redelivery and coalescing hold per replica as they do otherwise."""
    world = opened(capture_logs=True)
    world.rules({"kind": case.kind, "publish": "agent", "replicas": 2})
    # the first forgets its marker, the second bears it as the prompt says
    title = 'test $i = 1 || title="[r$i/2] Bend the spoon"'
    script = "\n".join((SET, title, CHANGE, case.publish))
    world.model.set_scripts(solve(bash(script), bash(WAIT), say()))
    world.start()
    jobs = world.label(guid="one")
    both = world.wait_for(lambda: len(c := world.containers()) == 2 and c, 60)
    gates = world.wait_for(lambda: len(c := world.containers("gate")) == 2 and c)
    world.go(*both)
    inspected = json.dumps([*both, *gates])
    runs = world.wait(jobs)
    assert [(run.state, run.reason) for run in runs] == [("completed", None)] * 2

    pulls = world.pulls()
    assert sorted(pulls) == ["pi/issue-7-r1", "pi/issue-7-r2"]
    for i in (1, 2):
        assert pulls[f"pi/issue-7-r{i}"].title == f"[r{i}/2] Bend the spoon"
    tips = {world.repo.branch(f"pi/issue-7-r{i}") for i in (1, 2)}
    assert len(tips - {None}) == 2
    for run in runs:
        assert run.request
        assert run.request.number == pulls[f"pi/issue-7-r{run.replica}"].number
        assert run.request.title.startswith(f"[r{run.replica}/2] ")
        record = world.record(run.id)
        assert (record.target, record.replica) == ("octo/spoon#7", run.replica)
    asked = json.dumps(world.model.log[0].body)
    row = pidispatch.FORGES[case.kind]
    assert row.request_noun in asked and row.issue_noun in asked and row.cli in asked
    said = sorted(text for text in world.comments())
    assert said == [f"replica {i} of 2 bent it" for i in (1, 2)], "nothing twice"
    assert len(pushes(world)) == 2, "one push a box, none by the host"
    assert TOKEN not in inspected
    assert KEY not in inspected
    logs = [path.read_bytes() for path in (world.settings.state_dir / "logs").iterdir()]
    assert len(logs) == 2
    assert not any(TOKEN.encode() in log for log in logs)

    again = world.forge.label(world.repo, 7, "pi:urgent", "maintainer", SECRET, "one")
    assert world.send(*again) == (200, {"status": "duplicate"})
    caps = pidispatch.Caps.of(world.settings)
    world.repo.issues[7].labels.clear()
    world.send(*world.forge.label(world.repo, 7, "x", "maintainer", SECRET, "off"))
    more = world.forge.label(world.repo, 7, "pi:urgent", "maintainer", SECRET, "two")
    assert world.send(*more)[1]["status"] in ("coalesced", "pending")
    world.wait_for(lambda: world.store.status(caps, 0).counts.get("coalesced"))
    assert len(world.store.runs(9)) == 2
    assert world.nothing_left()


def test_a_plain_job_uses_the_request_that_is_open_and_leaves_no_trace_of_the_token(
    opened: Open, case: ForgeCase
) -> None:
    world = opened()
    world.repo.commit("pi/issue-7", {"spoon.txt": "bent\n"}, "Before")
    before = world.repo.open_pull("pi/issue-7", title="Bend the spoon")
    world.rules({"kind": case.kind, "publish": "agent"})
    start = "git fetch -q origin pi/issue-7 && git reset -q --hard FETCH_HEAD"
    leaks = (
        "cat .git/config ~/.gitconfig; git remote -v;"
        " for p in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $p; done"
    )
    shown = f"({leaks}) > /tmp/shown; ! grep -F $PI_GIT_PASSWORD /tmp/shown"
    hidden = f"{shown} && ! grep -rF $PI_GIT_PASSWORD ~ .git"
    script = "\n".join((SET, start, CHANGE, case.publish, hidden, "touch /tmp/hidden"))
    tell = 'test -e /tmp/hidden && git push -q origin HEAD:main; echo "main: $?"'
    world.model.set_scripts(solve(bash(script), bash(tell), say()))
    world.start()
    main = world.repo.branch("main")
    [run] = world.wait(world.label())
    told = json.dumps(world.model.log[-1].body["messages"])
    assert (run.state, run.reason) == ("completed", None)
    assert run.request
    assert run.request.number == before.number
    assert list(world.repo.pulls) == [before.number]
    assert "main: 1" in told, "nothing was found, and protection refused the push"
    assert world.repo.branch("main") == main
    assert len(world.comments()) == 1


# -- a request's head, shared ------------------------------------------------

ENTER = """
git fetch -q origin topic; git rev-parse FETCH_HEAD > /tmp/old
git checkout -q --detach FETCH_HEAD
echo "from replica $i" >> spoon.txt; git commit -qam "Replica $i"
"""
RACE = f"""
{WAIT}
pushed=0; lease=--force-with-lease=topic:$(cat /tmp/old)
git push -q $lease origin HEAD:topic || pushed=$?
said="replica $i of 2: push ended $pushed"
"""


def test_two_runs_race_on_one_request_and_the_loser_is_reported_not_lost(
    opened: Open, case: ForgeCase
) -> None:
    """T48: no branch, no marker, nothing forced; the refused work is kept."""
    world = opened()
    world.repo.commit("topic", {"spoon.txt": "bent\n"}, "Bend")
    pull = world.repo.open_pull("topic", title="Bend", body="Please look.")
    first = world.repo.branch("topic")
    branches = set(world.repo.branches)
    run = {"kind": case.kind, "flow": "fix-issue", **world.forge.run_fields}
    run |= {"publish": "agent", "replicas": 2}
    world.rules({"on": {"type": "comment", "phrase": "@pi"}, "run": run})
    script = "\n".join((SET, f"number={pull.number}", RACE, case.comment))
    world.model.set_scripts(solve(bash(SET + ENTER), bash(script), say()))
    world.start()
    jobs = world.remark(pull.number, "@pi fix it", "remark", request=True)
    world.wait_for(lambda: len(world.model.log) == 4, 90)  # both stand at the line
    both = world.containers()
    assert len(both) == 2
    world.go(*both)
    runs = world.wait(jobs)
    between = pidispatch.FORGES[case.kind].request_separator
    assert {run.target for run in runs} == {f"octo/spoon{between}{pull.number}"}
    assert [run.state for run in runs] == ["completed"] * 2
    [won] = [run for run in runs if run.reason is None]
    [lost] = [run for run in runs if run.reason == "not-pushed"]

    assert set(world.repo.branches) == branches, "no branch of their own"
    assert world.repo.pulls[pull.number].title == "Bend", "no marker"
    tip = world.repo.branch("topic")
    log = world.repo.git.git("log", "--format=%s", f"{first}..{tip}").split("\n")
    assert [line for line in log if line] == [f"Replica {won.replica}"]
    texts = [said.body for said in world.repo.comments_on(pull.number, True)]
    assert f"replica {won.replica} of 2: push ended 0" in texts
    assert f"replica {lost.replica} of 2: push ended 1" in texts
    [report] = [text for text in texts if "not-pushed" in text]
    assert f"Replica {lost.replica} of 2." in report
    assert f"pidispatch publish {lost.id} --to BRANCH" in report
    assert len(texts) == 4, "the person, two agents, one report"
    assert world.record(lost.id).bundle
    outside = pidispatch.Outside(world.settings.db)
    pidispatch.publish_by_hand(world.settings, outside, lost.id, "rescued")
    rescued = world.repo.git.show("rescued", "spoon.txt")
    assert f"from replica {lost.replica}" in rescued


# -- before anything is spent --------------------------------------------------------


def test_an_unprotected_default_branch_refuses_before_anything_is_cloned(
    opened: Open, case: ForgeCase
) -> None:
    world = opened()
    world.repo.unprotect("main")
    world.rules({"kind": case.kind, "publish": "agent", "replicas": 2})
    world.start()
    assert_refused_before_anything(world, world.label(), "unprotected-branch")
    [comment] = world.comments()
    assert "protect it" in comment


def test_an_image_that_names_no_forge_is_refused(
    opened: Open, case: ForgeCase, job_image: str
) -> None:
    """Absent, the label lets every forge in; an agent's CLI has to be named."""
    world = opened(job_image=job_image)
    world.rules({"kind": case.kind, "publish": "agent"})
    world.start()
    reason = "job-image-forge-unsupported"
    assert_refused_before_anything(world, world.label(), reason)


def test_the_label_of_an_agents_image_is_no_lie(agent_image: str) -> None:
    import verify_image

    found = {each.name: each for each in verify_image.findings(agent_image)}
    assert found["forges"].state == "ok"
    assert not [each for each in found.values() if each.state == "lie"]


# -- a run that fails, and one that is adopted ----------------------------------------


def test_a_failed_runs_request_is_still_found_and_marked_and_told_once(
    opened: Open, case: ForgeCase
) -> None:
    world = opened(max_turns=1)
    world.rules({"kind": case.kind, "publish": "agent", "replicas": 2})
    script = "\n".join((SET, CHANGE, case.publish))
    world.model.set_scripts(solve(bash(script), bash("true"), say()))
    world.start()
    runs = world.wait(world.label())
    assert {(run.state, run.reason) for run in runs} == {("policy", "turn-budget")}
    for run in runs:
        assert run.request
        assert run.request.title == f"[r{run.replica}/2] Bend the spoon"
    ended = [text for text in world.comments() if "turn-budget" in text]
    assert len(ended) == 2
    assert len(world.comments()) == 4


def test_an_adopted_agents_work_is_not_published_by_the_host(
    opened: Open, case: ForgeCase
) -> None:
    """The mode is the job's own: the setting that gave it may have changed since."""
    world = opened(publish="agent")
    world.rules({"kind": case.kind})
    script = "\n".join((SET, CHANGE, case.publish))
    world.model.set_scripts(solve(bash(WAIT), bash(script), say()))
    world.start()
    jobs = world.label()
    world.wait_for(lambda: world.model.log)
    [box] = world.containers()
    world.stop(end_jobs=False)
    world.change(publish="host")
    world.start()
    world.go(box)
    [run] = world.wait(jobs)
    assert (run.state, run.reason) == ("completed", None)
    assert run.request
    assert run.request.title == "Bend the spoon"
    assert len(pushes(world)) == 1
    assert len(world.comments()) == 1
    assert world.nothing_left()


# -- GitHub Apps ----------------------------------------------------------------------


@pytest.mark.parametrize("case", FORGES[:1], indirect=True, ids=["github"])
def test_an_apps_box_gets_a_token_for_this_repository_and_no_other_power(
    opened: Open, tmp_path: Path, case: ForgeCase
) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = tmp_path / "app.pem"
    encoding = serialization.Encoding.PEM
    form = serialization.PrivateFormat.PKCS8
    pem.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
    reach = frozenset({"octo/spoon", "octo/other"})
    public = key.public_key().public_bytes(
        encoding, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    app = demo.App(12, "pi-app", 99, reach, public_key=public.decode())
    world = opened(
        app=app,
        github_auth_source="app",
        github_app_id="12",
        github_app_installation="99",
        github_app_key=pem,
        github_pat=None,
    )
    world.forge.create_repo("octo/other")
    world.forge.data.accounts.user("pi-app[bot]")
    world.rules({"publish": "agent"})
    script = "\n".join((SET, CHANGE, case.publish))
    world.model.set_scripts(solve(bash(script), say()))
    world.start()
    [run] = world.wait(world.label())
    assert (run.state, run.reason) == ("completed", None)
    assert run.request
    [name] = pushes(world)
    [token] = [made for made in world.forge.data.minted if made.name == name]
    assert token.repositories == {"octo/spoon"}
    assert token.permissions == {
        "contents": "write",
        "issues": "write",
        "pull_requests": "write",
        "metadata": "read",
    }
    fetched = world.forge.requests("POST", "git-upload-pack$")[0].token
    assert fetched != name, "the host's own git has another"
