"""From a signed delivery to two review requests, on real parts.

Tests marked `docker` use the real engine, the real job image and real pi with a
scripted model. The others run the same service with the demo's plain processes.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import FakeClock
from world import (
    CANARIES,
    COMMIT,
    DIALECTS,
    SECRET,
    WAIT,
    World,
    bash,
    bridge_address,
    say,
    solve,
)
from world import world as make_world

import pidispatch
import pidispatch_demo as demo


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with make_world(tmp_path) as made:
        yield made


@pytest.fixture
def boxed(
    request: pytest.FixtureRequest, tmp_path: Path, docker_client: Any, job_image: str
) -> Iterator[World]:
    """GitHub's world on the real engine, or another forge's by its kind."""
    kind = getattr(request, "param", "github")
    with make_world(tmp_path, docker_client, kind=kind) as made:
        made.change(job_image=job_image, gate_image=job_image)
        yield made
        made.stop()
        if made.service is None:
            store = pidispatch.Store(made.settings.db)
            engine = pidispatch.DockerEngine(made.settings, store.instance())
            engine.sweep(frozenset())
            store.close()


# -- show 1: the source document's example -------------------------------------


def real_labelled(payloads: Path, world: World) -> tuple[dict[str, Any], int]:
    """GitHub's own `labeled` delivery, about a repository that the fake has."""
    payload = json.loads((payloads / "github/issues.labeled.json").read_bytes())
    payload["label"]["name"] = "pi:urgent"
    payload["issue"]["labels"] = [payload["label"]]
    number = payload["issue"]["number"]
    world.repo = world.forge.create_repo(
        payload["repository"]["full_name"],
        {"spoon.txt": "straight\n"},
        issues={number: {"title": payload["issue"]["title"]}},
    )
    return payload, number


def label_once(world: World, payloads: Path, guid: str) -> tuple[list[str], int]:
    """One labelling: the jobs it became, and the issue's number."""
    if world.forge.kind != "github":
        return world.label(7, guid), 7
    payload, number = real_labelled(payloads, world)
    status, answer = world.post("issues", payload, guid)
    assert (status, answer["status"]) == (202, "queued")
    return answer["jobs"], number


@pytest.mark.docker
@pytest.mark.parametrize("boxed", DIALECTS, indirect=True)
def test_one_real_delivery_makes_two_boxes_two_branches_and_two_requests(
    boxed: World, payloads: Path
) -> None:
    boxed.rules({"replicas": 2})
    boxed.model.set_scripts(solve(bash(WAIT), bash(COMMIT), say()))
    boxed.start()
    guid = str(uuid.uuid4())
    made, n = label_once(boxed, payloads, guid)
    delivery = boxed.forge.delivery_id(guid)
    set_ = pidispatch.set_id(boxed.forge.kind, delivery)
    jobs = [f"{set_}-r1", f"{set_}-r2"]
    assert made == jobs

    both = boxed.wait_for(lambda: len(c := boxed.containers()) == 2 and c, 60)
    boxed.go(*both)
    assert sorted(c["Name"] for c in both) == [f"/pi-job-{job}" for job in jobs]
    for container in both:
        assert list(container["NetworkSettings"]["Networks"]) == [
            container["Name"][1:] + "-net"
        ]

    runs = boxed.wait(jobs)
    assert [run.state for run in runs] == ["completed", "completed"]
    pulls = boxed.pulls()
    assert sorted(pulls) == [f"pi/issue-{n}-r1", f"pi/issue-{n}-r2"]
    for i in (1, 2):
        assert pulls[f"pi/issue-{n}-r{i}"].title == f"[r{i}/2] Bend the spoon"
    records = [boxed.record(job) for job in jobs]
    assert [(r.replica, r.replicas) for r in records] == [(1, 2), (2, 2)]
    assert all(r.tokens and r.tokens.total and r.tokens.cost for r in records)
    status_ = boxed.store.status(pidispatch.Caps.of(boxed.settings), time.time())
    assert status_.used == 2
    assert boxed.nothing_left()
    assert most_at_once(boxed, 2) == 2, "they ran at the same time"


# -- show 2: again, coalesced, later -------------------------------------------


def test_the_same_work_again_runs_only_when_it_is_new(
    tmp_path: Path, clock: FakeClock
) -> None:
    """T01, T18: duplicates for ever, coalesced for ten minutes, then anew."""
    with make_world(tmp_path, clock=clock) as world:
        world.rules({"replicas": 2})
        world.start()
        payload = labelled_at(world, clock)
        _, answer = world.post("issues", payload, "one")
        world.wait(answer["jobs"])
        again = (200, {"status": "duplicate"})
        assert world.post("issues", payload, "one") == again
        world.stop()
        world.start()
        assert world.post("issues", payload, "one") == again
        assert world.post("issues", payload, "other-id-same-body") == again

        clock.pass_(60)
        coalesced = world.post("issues", labelled_at(world, clock), "two")
        assert coalesced == (200, {"status": "coalesced"})
        assert len(world.store.runs(99)) == 2

        clock.pass_(11 * 60)
        status, answer = world.post("issues", labelled_at(world, clock), "three")
        assert (status, answer["jobs"]) == (202, ["gh-three-r1", "gh-three-r2"])
        runs = world.wait(answer["jobs"])
        assert [run.state for run in runs] == ["completed", "completed"]
        assert len(world.repo.pulls) == 2, "the open requests are used again"


def labelled_at(world: World, clock: FakeClock) -> dict[str, Any]:
    payload = demo.labeled_payload(world.repo, 7, "pi:urgent", "maintainer")
    payload["issue"]["updated_at"] = demo.iso_time(clock())
    return payload


# -- show 3: without replicas, nothing of the feature is seen -------------------


@pytest.mark.docker
def test_a_plain_rule_makes_one_plain_job(boxed: World) -> None:
    boxed.start()
    jobs = boxed.label(guid=boxed.name)
    assert jobs == [f"gh-{boxed.name}"]
    boxed.wait(jobs)
    [pull] = boxed.repo.pulls.values()
    assert (pull.head, pull.title) == ("pi/issue-7", "Bend the spoon")
    record = boxed.record(jobs[0])
    assert (record.replica, record.replicas) == (None, None)
    assert record.outcome == "completed"
    assert boxed.nothing_left()


# -- show 5: images that do not say they can -----------------------------------


@pytest.fixture(scope="module")
def relabelled(docker_client: Any, job_image: str) -> Iterator[Any]:
    """Makes the job image anew with other labels; removes them at the end."""
    made: list[str] = []

    def make(name: str, **labels: str) -> str:
        lines = [f"FROM {job_image}"]
        lines += [f'LABEL {pidispatch.LABEL}{k}="{v}"' for k, v in labels.items()]
        tag = f"pidispatch-test/{name}:relabelled"
        build(docker_client, "\n".join(lines), tag)
        made.append(tag)
        return tag

    yield make
    for tag in made:
        docker_client.remove_image(tag, force=True)


def build(client: Any, dockerfile: str, tag: str) -> None:
    import io

    lines = client.build(
        fileobj=io.BytesIO(dockerfile.encode()), tag=tag, rm=True, decode=True
    )
    errors = [line["error"] for line in lines if "error" in line]
    assert not errors, errors


def assert_refused_before_anything(world: World, jobs: list[str], reason: str) -> None:
    """Nothing minted, cloned or reserved; one comment for the set; no retry."""
    runs = world.wait(jobs)
    assert [(run.state, run.reason) for run in runs] == [("policy", reason)] * len(jobs)
    assert world.forge.requests(path_regex=r"\.git/") == []
    assert world.forge.requests(path_regex="access_tokens") == []
    caps = pidispatch.Caps.of(world.settings)
    assert world.store.status(caps, time.time()).used == 0
    assert world.model.log == []
    assert world.nothing_left()
    assert not any(world.record(job).budgetReserved for job in jobs)
    time.sleep(0.05)
    assert world.store.claim() is None, "it is not tried again"


@pytest.mark.docker
@pytest.mark.parametrize("capabilities", ["", "gate"])
def test_an_image_that_does_not_declare_replicas_is_refused_before_spending(
    boxed: World, relabelled: Any, capabilities: str
) -> None:
    tag = relabelled("bare" + capabilities, capabilities=capabilities)
    boxed.rules({"replicas": 2, "image": tag})
    boxed.start()
    jobs = boxed.label()
    assert_refused_before_anything(boxed, jobs, "job-image-replicas-unsupported")
    [comment] = boxed.comments()
    assert tag in comment
    assert (capabilities or "no capabilities") in comment
    assert "pidispatch build-image" in comment
    again = boxed.label(guid="after-the-fix")
    assert len(again) == 2, "a refused job does not hold its window"


@pytest.mark.docker
def test_an_image_without_this_forge_is_refused(boxed: World, relabelled: Any) -> None:
    tag = relabelled("gitlab-only", forges="gitlab", capabilities="replicas,gate")
    boxed.rules({"image": tag})
    boxed.start()
    assert_refused_before_anything(boxed, boxed.label(), "job-image-forge-unsupported")


@pytest.mark.docker
def test_an_absent_image_is_refused_and_never_pulled(boxed: World) -> None:
    boxed.rules({"image": "pidispatch-test/none:here"})
    boxed.start()
    assert_refused_before_anything(boxed, boxed.label(), "job-image-missing")
    [comment] = boxed.comments()
    assert "pidispatch-test/none:here" in comment


@pytest.mark.docker
def test_an_image_that_declares_nothing_still_runs_plain_jobs(
    boxed: World, relabelled: Any
) -> None:
    boxed.rules({"image": relabelled("plain", capabilities="")})
    boxed.start()
    [run] = boxed.wait(boxed.label())
    assert run.state == "completed"


# -- show 6: what the box cannot reach and cannot know --------------------------

_PROBE = """
import json, os, socket, sys
found = {"uid": os.getuid(), "env": dict(os.environ)}
status = open("/proc/self/status").read()
for name in ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp"):
    found[name] = status.split(name + ":")[1].split()[0]
found["cmdlines"] = [open(f"/proc/{p}/cmdline").read() for p in os.listdir("/proc")
                     if p.isdigit()]
for path in ("/", "/etc", "/opt/pi-dispatch", "/job"):
    try:
        open(path + "/.probe", "w")
        found["writable"] = path
    except OSError:
        pass
def reach(host, port):
    try:
        socket.create_connection((host, port), timeout=3).close()
        return "open"
    except OSError as error:
        return type(error).__name__
found["reach"] = {f"{h}:{p}": reach(h, p) for h, p in json.loads(sys.argv[1])}
import urllib.request, urllib.error
def ask(path, token):
    request = urllib.request.Request("http://gate:8080" + path, b"{}",
        {"Authorization": "Bearer " + token, "Content-Type": "application/json"})
    try:
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=5).status
    except urllib.error.HTTPError as error:
        return error.code
found["wrong token"] = ask(sys.argv[2], "wrong")
open("/outbox/comment.md", "w").write(json.dumps(found))
"""


@pytest.mark.docker
def test_the_box_reaches_nothing_but_its_gate_and_knows_no_secret(
    boxed: World, docker_client: Any
) -> None:
    """T53: no credential beyond the job's own, no way out but the model."""
    boxed.rules({"replicas": 2})
    boxed.start()
    port = int(boxed.model.url.rsplit(":", 1)[1])
    host = bridge_address(docker_client)
    edge = boxed.service.edge.port  # type: ignore[union-attr]
    path = f"/host.docker.internal:{port}/v1/chat/completions"
    boxed.model.set_scripts(solve(bash(WAIT), say()))
    jobs = boxed.label()
    one, other = boxed.wait_for(lambda: len(c := boxed.containers()) == 2 and c)
    gates = boxed.wait_for(lambda: len(c := boxed.containers("gate")) == 2 and c)
    [address] = [n["IPAddress"] for n in other["NetworkSettings"]["Networks"].values()]
    subnet = address.rsplit(".", 1)[0]
    last = int(address.rsplit(".", 1)[1])
    targets = [
        [host, port],
        [host, edge],
        [address, 22],
        [f"{subnet}.{last - 1}", pidispatch.GATE_PORT],
        ["example.invalid", 443],
        ["host.docker.internal", port],
    ]
    probe = docker_client.exec_create(
        one["Id"], ["python3", "-c", _PROBE, json.dumps(targets), path]
    )
    assert docker_client.exec_start(probe["Id"]) == b""
    inspected = json.dumps([one, other, *gates])
    logs = b"".join(docker_client.logs(c["Id"]) for c in (one, other, *gates))
    tops = json.dumps([docker_client.top(c["Id"]) for c in (one, other, *gates)])
    boxed.go(one, other)
    boxed.wait(jobs)

    owner = one["Config"]["Labels"][pidispatch.LABEL + "job"]
    text = next(c for c in boxed.comments() if '"uid"' in c)
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert owner in jobs
    assert found["uid"] == 1001
    assert int(found["CapEff"], 16) == int(found["CapBnd"], 16) == 0
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
    assert "writable" not in found
    assert "open" not in found["reach"].values(), found["reach"]
    assert found["wrong token"] in (401, 403)
    assert_no_canary(boxed, jobs, inspected, logs.decode(), tops, json.dumps(found))
    assert one["HostConfig"]["ReadonlyRootfs"]
    assert one["HostConfig"]["Binds"] is None


def assert_no_canary(world: World, jobs: list[str], *texts: str) -> None:
    """No secret in what the engine shows, nor in what we keep."""
    own = Path("/proc/self/cmdline").read_bytes()
    files = [
        path.read_bytes()
        for path in (world.root).rglob("*")
        if path.is_file() and path.stat().st_size < 10_000_000
    ]
    records = [
        json.dumps(pidispatch.msgspec.to_builtins(world.record(j))) for j in jobs
    ]
    haystacks = [*(t.encode() for t in (*texts, *records)), own, *files]
    for canary in CANARIES:
        for hay in haystacks:
            assert canary.encode() not in hay
        for comment in world.comments():
            assert canary not in comment
        for call in world.model.log:
            assert canary not in json.dumps(call.body)


# -- show 7: a hostile outbox ---------------------------------------------------


@pytest.mark.docker
@pytest.mark.parametrize(
    "command",
    [
        "ln -s /opt/pi-dispatch/HARD_RULES.md /outbox/comment.md",
        "mkdir /outbox/comment.md",
        "head -c 200000 /dev/zero > /outbox/review-request.md",
        "mkfifo /outbox/comment.md",
    ],
)
def test_an_outbox_entry_that_is_no_plain_file_is_refused_and_recorded(
    boxed: World, command: str
) -> None:
    boxed.model.set_scripts(
        solve(bash(COMMIT), bash(f"rm -f /outbox/* ; {command}"), say())
    )
    boxed.start()
    [run] = boxed.wait(boxed.label())
    assert (run.state, run.reason) == ("policy", "outbox-refused")
    assert boxed.record(run.id).tokens, "what was paid is counted all the same"
    assert boxed.pulls() == {}
    assert not any("five rules" in c or "Hard rules" in c for c in boxed.comments())
    assert boxed.nothing_left()


@pytest.mark.docker
@pytest.mark.parametrize(
    "command",
    [
        "git config commit.gpgsign true; git config user.signingkey x",
        "printf '#!/bin/sh\\nexit 1\\n' > .git/hooks/pre-commit; chmod +x .git/hooks/*",
        "git config core.fsmonitor /bin/false",
        "git checkout -q --detach; git branch -D pi/issue-7",
        "rm -rf .git",
        "git commit -q --amend -m rewritten",
    ],
)
def test_work_comes_out_of_a_hostile_git_state(boxed: World, command: str) -> None:
    boxed.model.set_scripts(solve(bash("echo work > work.txt"), bash(command), say()))
    boxed.start()
    [run] = boxed.wait(boxed.label())
    assert run.state == "completed"
    assert boxed.repo.git.show("pi/issue-7", "work.txt") == "work"


# -- show 8: nothing left behind -------------------------------------------------


@pytest.mark.docker
def test_nothing_is_left_after_failure_and_timeout(
    boxed: World, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T42: a job past its time is stopped, killed, recorded and removed."""
    monkeypatch.setattr(pidispatch, "STOP_GRACE_SECONDS", 1)
    boxed.model.set_scripts(solve({"status": 400, "error": "nonsense"}))
    boxed.start()
    [failed] = boxed.wait(boxed.label())
    assert failed.state in ("policy", "failed")
    assert boxed.nothing_left()

    boxed.model.set_scripts(solve(bash("trap '' TERM; sleep 300")))
    slow = boxed.repo.add_issue(8, title="slow")
    jobs = boxed.label(slow.number)
    boxed.wait_for(lambda: boxed.containers())
    boxed.wait_for(lambda: boxed.model.log[-1].body and len(boxed.model.log) > 1)
    monkeypatch.setattr(pidispatch, "JOB_SECONDS", -1)
    [timed] = boxed.wait(jobs)
    assert (timed.state, timed.reason) == ("policy", "timeout")
    assert boxed.nothing_left()
    caps = pidispatch.Caps.of(boxed.settings)
    assert boxed.store.status(caps, time.time()).used == 2, "both were started"


# -- show 10: one slot, three replicas -------------------------------------------


@pytest.mark.docker
def test_with_one_slot_three_replicas_run_one_after_another(boxed: World) -> None:
    """Show 11 too: r2 and r3 see nothing of r1, and all start from one commit."""
    boxed.rules({"replicas": 3})
    boxed.change(concurrency=1)
    look = (
        "git cat-file --batch-all-objects --batch-check='%(objectname)' "
        "> /outbox/comment.md; git for-each-ref >> /outbox/comment.md; "
        "echo base $(git rev-parse HEAD) >> /outbox/comment.md"
    )
    boxed.model.set_scripts(solve(bash(look), bash(COMMIT), say()))
    boxed.start()
    jobs = boxed.label()
    runs = boxed.wait(jobs, 90)
    assert [run.state for run in runs] == ["completed"] * 3
    pulls = boxed.pulls()
    assert sorted(pulls) == [f"pi/issue-7-r{i}" for i in (1, 2, 3)]
    assert boxed.nothing_left()
    assert most_at_once(boxed, 3) == 1

    tips = {i: boxed.repo.branch(f"pi/issue-7-r{i}") for i in (1, 2, 3)}
    seen = {
        i: next(c for c in boxed.comments() if f"Replica {i} of 3" in c) for i in tips
    }
    for i, text in seen.items():
        for other, tip in tips.items():
            assert tip
            if other != i:
                assert tip not in text
                assert f"-r{other}" not in text
    bases = {re.search(r"base ([0-9a-f]{40})", text)[1] for text in seen.values()}  # type: ignore[index]
    assert len(bases) == 1


def most_at_once(world: World, lived: int) -> int:
    """How many of a world's containers, all gone by now, ever ran together."""
    lives = world.lives.values()
    assert len(lives) == lived
    assert all(began < ended for began, ended in lives)
    return max(sum(b <= began < e for b, e in lives) for began, _ in lives)


# -- a gate that dies ------------------------------------------------------------


@pytest.mark.docker
def test_a_gate_that_dies_is_started_again_once_and_the_meter_goes_on(
    boxed: World, docker_client: Any
) -> None:
    boxed.model.set_scripts(solve(bash(WAIT), bash(COMMIT), say()))
    boxed.start()
    jobs = boxed.label()
    boxed.wait_for(lambda: boxed.model.log)
    [gate] = boxed.containers("gate")
    docker_client.kill(gate["Id"])
    boxed.wait_for(lambda: boxed.containers("gate"))
    boxed.go(*boxed.containers())
    [run] = boxed.wait(jobs)
    assert run.state == "completed"
    tokens = boxed.record(run.id).tokens
    assert tokens
    assert tokens.total == sum(total(call) for call in boxed.model.log)
    assert boxed.nothing_left()


# -- request targets --------------------------------------------------------------


@pytest.mark.docker
def test_replicas_on_a_request_comment_twice_and_push_nothing(boxed: World) -> None:
    boxed.repo.commit("topic", {"spoon.txt": "bent\n"}, "Bend")
    pull = boxed.repo.open_pull("topic", title="Bend", body="Please look.")
    boxed.rules(
        {
            "on": {"type": "comment", "phrase": "@pi"},
            "run": {"kind": "github", "flow": "review", "replicas": 2},
        }
    )
    look = "git diff --stat HEAD refs/pidispatch/request > /outbox/comment.md"
    boxed.model.set_scripts(
        solve(bash(look), bash("echo x > x; git add x; git commit -qm x"), say())
    )
    boxed.start()
    before = dict(boxed.repo.branches)
    payload = demo.comment_payload(
        boxed.repo, pull.number, "@pi please review", "maintainer", "COLLABORATOR"
    )
    status, answer = boxed.post("issue_comment", payload)
    assert status == 202, answer
    runs = boxed.wait(answer["jobs"])
    assert [run.state for run in runs] == ["completed", "completed"]
    texts = boxed.comments(pull.number)
    for i in (1, 2):
        [mine] = [text for text in texts if f"eplica {i} of 2" in text]
        assert "spoon.txt" in mine
        assert "pidispatch publish" in mine
    assert boxed.repo.branches == before


# -- the way in, without an engine ------------------------------------------------


def test_one_slot_left_and_two_replicas_is_one_run_and_one_named_refusal(
    world: World,
) -> None:
    """T51."""
    world.rules({"replicas": 2})
    world.change(daily_cap=1, concurrency=1)
    world.start()
    runs = world.wait(world.label())
    assert sorted((run.state, run.reason) for run in runs) == [
        ("completed", None),
        ("policy", "over-budget"),
    ]
    assert len(world.pulls()) == 1
    assert any("over-budget" in text for text in world.comments())


def test_a_finished_runs_branch_is_published_even_if_the_first_try_fails(
    world: World,
) -> None:
    world.start()
    world.forge.fail_next("POST", r"/pulls$", status=502)
    jobs = world.label()
    world.wait_for(lambda: world.store.run(jobs[0])[0].state == "publishing")
    [run] = world.wait(jobs)
    assert run.state == "completed"
    assert len(world.pulls()) == 1
    assert len(world.model.log) == 2, "the agent ran once"


def test_a_strangers_label_event_with_a_wrong_signature_starts_nothing(
    world: World,
) -> None:
    world.start()
    payload = demo.labeled_payload(world.repo, 7, "pi:urgent", "maintainer")
    headers, body = demo.signed_delivery("issues", payload, "wrong", "guid-x")
    status, _ = world.send(headers, body)
    assert status == 401
    headers, body = demo.signed_delivery("issues", payload, SECRET, "guid-x")
    assert world.send(headers, body)[0] == 202, "the real one was not burned"


def test_a_branch_that_someone_moved_is_left_alone_and_published_by_hand_later(
    world: World,
) -> None:
    """T48: nobody's commits are overwritten; the paid work is kept."""
    world.repo.commit("pi/issue-7", {"mine.txt": "a person's\n"}, "Mine")
    theirs = world.repo.branch("pi/issue-7")
    world.start()
    jobs = world.label()
    [run] = world.wait(jobs)
    assert (run.state, run.reason) == ("completed", "branch-moved")
    assert world.repo.branch("pi/issue-7") == theirs
    [comment] = [c for c in world.comments() if "branch-moved" in c]
    assert f"pidispatch publish {jobs[0]}" in comment
    calls = len(world.model.log)

    outside = pidispatch.Outside(world.settings.db)
    by_hand = (world.settings, outside, jobs[0])
    said = pidispatch.publish_by_hand(*by_hand, "pi/rescued")
    assert world.repo.branch("pi/rescued") in said
    with pytest.raises(pidispatch.Refused, match="pi/issue-7"):
        pidispatch.publish_by_hand(*by_hand, None)
    world.repo.delete_branch("pi/issue-7")
    url = pidispatch.publish_by_hand(*by_hand, None)
    assert world.store.run(jobs[0])[0].request.url == url  # type: ignore[union-attr]
    assert list(world.pulls()) == ["pi/issue-7"]
    assert len(world.model.log) == calls, "the agent did not run again"


# -- forks inside a run --------------------------------------------------------------


@pytest.mark.docker
def test_an_agent_forks_three_ways_and_the_record_equals_the_gates_count(
    boxed: World,
) -> None:
    """fork_join in a dispatched job: metered by the gate, bound by HARD_RULES."""
    report = '@@[{"text": "Result: looked."}]'
    tasks = [{"id": name, "task": f"Look at {name}. {report}"} for name in "abc"]
    fork = {"tools": [{"name": "fork_join", "args": {"tasks": tasks}}]}
    boxed.model.set_scripts(solve(fork, bash(COMMIT), say()))
    boxed.start()
    jobs = boxed.label()
    boxed.wait_for(lambda: boxed.containers("gate"))
    [run] = boxed.wait(jobs)
    assert run.state == "completed"
    record = boxed.record(run.id)
    calls = boxed.model.log
    forked = [
        call for call in calls if "Look at" in json.dumps(call.body["messages"][-1])
    ]
    assert len(forked) == 3
    assert len(calls) == 6
    assert record.tokens
    assert record.tokens.total == sum(total(call) for call in calls)
    assert record.forks
    assert (record.forks.count, record.forks.tokens) == (3, sum(map(total, forked)))
    assert record.forks.cost
    for call in forked:
        text = json.dumps(call.body["messages"])
        assert pidispatch.HARD_RULES_SENTINEL in text, "the rules bind every fork"
        assert text.count("Look at") == 1, "no fork sees a sibling's task"


#: A call that is still in flight when the box ends; its words stand in no other one.
IN_FLIGHT = """cat > /tmp/call.py <<'END'
import json, urllib.request
job = json.load(open("/job/job.json"))
base = job["models"]["providers"]["fake"]["baseUrl"]
said = [{"role": "user", "content": "slo" + "w one " * 100}]
body = json.dumps({"model": "fake-1", "messages": said}).encode()
headers = {"authorization": "Bearer " + job["gate"]["token"]}
headers["content-type"] = "application/json"
call = urllib.request.Request(base + "/chat/completions", body, headers)
urllib.request.urlopen(call)
END
setsid python3 /tmp/call.py >/dev/null 2>&1 & sleep 1"""


@pytest.mark.docker
def test_a_call_in_flight_when_the_box_ends_is_in_its_record(boxed: World) -> None:
    """The gate has paid for it, whether or not the box waits for the answer."""
    slow = {"match": "slow one", "steps": [say("late", delay=60)]}
    boxed.model.set_scripts([slow, *solve(bash(IN_FLIGHT), say())])
    boxed.start()
    [run] = boxed.wait(boxed.label())
    assert run.state == "completed"
    answered = [call for call in boxed.model.log if call.usage]
    record = boxed.record(run.id)
    assert record.tokens
    assert record.tokens.total > sum(total(call) for call in answered) + 100


@pytest.mark.docker
def test_a_write_forks_branch_stays_in_the_box(boxed: World) -> None:
    """What a fork committed is the parent's to take; it is published by nobody."""
    steps = [bash("echo forked > fork.txt"), {"text": "Result: written."}]
    task = {"id": "w", "task": f"Write it. @@{json.dumps(steps)}", "write": True}
    fork = {"tools": [{"name": "fork_join", "args": {"tasks": [task]}}]}
    boxed.model.set_scripts(solve(fork, bash(COMMIT), say()))
    boxed.start()
    [run] = boxed.wait(boxed.label())
    assert run.state == "completed"
    told = json.dumps(boxed.model.log[-1].body["messages"])
    assert "Branch: pi-fork/" in told, "the fork kept its work on a branch"
    assert sorted(boxed.repo.branches) == ["main", "pi/issue-7"]
    objects = boxed.repo.git.git("cat-file", "--batch-all-objects", "--batch-check")
    blobs = [line.split()[0] for line in objects.splitlines() if " blob " in line]
    texts = [boxed.repo.git.git("cat-file", "blob", blob) for blob in blobs]
    assert not any("forked" in text for text in texts)


def total(call: demo.ModelCall) -> int:
    """The tokens of one call by the model's own log."""
    usage = call.usage
    return usage.input + usage.output + usage.cacheRead + usage.cacheWrite


# -- a bundle that is not what it says ----------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "detail"),
    [
        (
            lambda data: data.replace(b"refs/pidispatch/result", b"refs/heads/main"),
            "wrong-ref",
        ),
        (lambda data: data[: len(data) // 2], "bad-object"),
        (lambda data: b"#!/bin/sh\ntouch /tmp/executed\n", "bad-header"),
    ],
)
def test_a_hostile_bundle_is_refused_recorded_and_pushed_nowhere(
    world: World, monkeypatch: pytest.MonkeyPatch, spoil: Any, detail: str
) -> None:
    collect = demo.ProcessBox.collect

    def spoiled(self: demo.ProcessBox, into: Path) -> pidispatch.BoxExit:
        ended = collect(self, into)
        assert ended.bundle
        ended.bundle.write_bytes(spoil(ended.bundle.read_bytes()))
        return ended

    monkeypatch.setattr(demo.ProcessBox, "collect", spoiled)
    world.start()
    before = dict(world.repo.branches)
    [run] = world.wait(world.label())
    assert (run.state, run.reason) == ("completed", "bundle-refused")
    assert world.record(run.id).reason == "bundle-refused"
    assert world.repo.branches == before
    assert world.pulls() == {}
    [comment] = [text for text in world.comments() if "bundle-refused" in text]
    assert detail in comment
