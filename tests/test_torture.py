"""Kill -9 at random instants under load, and nothing is lost, doubled or left.

`serve` runs as its users run it, on the real engine with real pi; deliveries come all
the while. `just torture` does 200 rounds; the default run does a few. A failing round
is repeated with `--seed`, which it prints.
"""

from __future__ import annotations

import collections
import json
import random
import threading
import time

import pytest
from serving import Serving

import pidispatch

#: The states between a delivery and its end.
OPEN = set(pidispatch.JOB_STATES) - {"done"}


@pytest.mark.docker
@pytest.mark.timeout(7200)
def test_kills_at_random_instants_lose_nothing_and_double_nothing(
    serving: Serving, request: pytest.FixtureRequest
) -> None:
    """T01, T35, T37, T39; 30-jobs: recovery."""
    rounds = int(request.config.getoption("--rounds"))
    seed = request.config.getoption("--seed") or random.randrange(10**9)
    print(f"repeat with: pytest tests/test_torture.py --rounds {rounds} --seed {seed}")
    chance = random.Random(int(seed))
    threading.Thread(target=serving.watch, daemon=True).start()
    load = threading.Thread(target=serving.load, args=(random.Random(chance.random()),))
    load.start()
    for _ in range(rounds):
        serving.start()
        if chance.random() < 0.7:  # else also while it begins
            serving.until_it_listens()
        time.sleep(chance.choice((0.3, 1.0, 3.0, 8.0)) * chance.random())
        serving.kill()
    serving.start()  # and then in peace
    while len(serving.acknowledged) < min(rounds, 5):
        time.sleep(0.05)
    serving.stopping.set()
    load.join(60)
    settle(serving)
    serving.end()
    judge(serving)
    starts = sum(serving.started.values())
    print(f"{rounds} kills, {len(serving.acknowledged)} deliveries, {starts} starts")
    print(f"jobs at the kills: {dict(serving.caught)}")
    assert starts >= min(rounds, 5), "there was something to lose"
    assert rounds < 100 or set(serving.caught) == OPEN, "each step was interrupted"


def settle(serving: Serving) -> None:
    """Wait for the end of all; three minutes without any change are too long."""
    for remaining in (serving.unended, serving.left):
        seen, since = remaining(), time.monotonic()
        while seen:
            time.sleep(0.2)
            if (now := remaining()) != seen:
                seen, since = now, time.monotonic()
            assert time.monotonic() < since + 180, seen


def judge(serving: Serving) -> None:
    """Every invariant of one whole run; `serve` is down."""
    jobs = {
        str(row[0]): json.loads(row[1])
        for row in serving.rows("SELECT job_id, record FROM runs")
    }
    for guid, ids in serving.acknowledged.items():
        assert set(ids) <= set(jobs), f"acknowledged and lost: {guid}"
        assert any(job.startswith(f"gh-{guid}") for job in jobs), guid
    ends = collections.Counter((r["outcome"], r["reason"]) for r in jobs.values())
    assert set(ends) <= {("completed", None)}, ends
    twice = {job: n for job, n in serving.started.items() if n > 1}
    assert not twice, f"containers of one job started more than once: {twice}"
    assert set(jobs) <= set(serving.started)
    again = {k: n for k, n in serving.first_calls().items() if n > 1}
    assert not again, f"the model was asked to begin more than once: {again}"
    kept = serving.rows("SELECT job_id, count(*) FROM ledger WHERE state = 'kept' "
                        "GROUP BY job_id")  # fmt: skip
    assert dict(kept) == dict.fromkeys(jobs, 1), "one slot a job, once"
    assert serving.rows("SELECT 1 FROM ledger WHERE state = 'reserved'") == []
    heads = collections.Counter(pull.head for pull in serving.repo.pulls.values())
    branches = {
        pidispatch.branch_name(int(r["target"].partition("#")[2]), r["replica"])
        for r in jobs.values()
    }
    assert dict(heads) == dict.fromkeys(branches, 1), "one request for each branch"
    said = collections.Counter(
        job
        for comment in serving.repo.comments
        for job in jobs
        if pidispatch.comment_marker(job, "result") in comment.body
    )
    assert dict(said) == dict.fromkeys(jobs, 1), "one comment for each job"
    assert serving.left() == []
    assert "Traceback" not in (serving.root / "serve.log").read_text("utf-8", "replace")
