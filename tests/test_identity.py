"""Section identity: names from numbers and ids, and nothing else."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pidispatch

GUID = "72d3162e-cc78-11e3-81ab-4c9367dc0958"
DOCKER_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{1,127}")


def test_a_plain_job_has_no_suffix_anywhere() -> None:
    assert pidispatch.job_id("github", GUID) == f"gh-{GUID}"
    assert pidispatch.branch_name(7) == "pi/issue-7"
    assert pidispatch.dedup_key("o/r#7", "fix-issue") == "o/r#7:fix-issue"
    assert pidispatch.title_marker(None, None) == ""
    assert pidispatch.container_name(f"gh-{GUID}") == f"pi-job-gh-{GUID}"


@pytest.mark.parametrize("i", [1, 2, 3])
def test_every_replica_is_suffixed_alike_and_none_is_the_original(i: int) -> None:
    assert pidispatch.job_id("github", GUID, i) == f"gh-{GUID}-r{i}"
    assert pidispatch.branch_name(7, i) == f"pi/issue-7-r{i}"
    assert pidispatch.dedup_key("o/r#7", "fix-issue", i) == f"o/r#7:fix-issue:r{i}"
    assert pidispatch.title_marker(i, 3) == f"[r{i}/3] "


@pytest.mark.parametrize(
    ("kind", "prefix", "issue", "request_"),
    [
        ("github", "gh-", "o/r#7", "o/r#7"),
        ("gitlab", "gl-", "o/r#7", "o/r!7"),
        ("forgejo", "fj-", "o/r#7", "o/r#7"),
        ("azure", "az-", "o/r#7", "o/r!7"),
    ],
)
def test_requests_that_are_numbered_apart_have_a_separator_of_their_own(
    kind: str, prefix: str, issue: str, request_: str
) -> None:
    assert pidispatch.job_id(kind, "d").startswith(prefix)
    assert pidispatch.target_name(kind, "o/r", "issue", 7) == issue
    assert pidispatch.target_name(kind, "o/r", "pull_request", 7) == request_


@pytest.mark.parametrize("bad", [0, 4, -1, True, False])
def test_an_impossible_replica_index_is_an_error_not_a_name(bad: int) -> None:
    with pytest.raises(ValueError, match="replica"):
        pidispatch.job_id("github", GUID, bad)
    with pytest.raises(ValueError, match="replica"):
        pidispatch.branch_name(7, bad)


@pytest.mark.parametrize("bad", [0, -1, True, 2**53 + 1])
def test_an_impossible_number_never_becomes_a_branch(bad: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        pidispatch.branch_name(bad)


def test_a_delivery_that_looks_like_a_replica_cannot_take_its_name() -> None:
    forged = pidispatch.job_id("github", "abc-r1")
    assert forged != pidispatch.job_id("github", "abc", 1)
    assert re.fullmatch(r"gh-h[0-9a-f]{32}", forged)


@given(st.text(max_size=200), st.sampled_from([None, 1, 2, 3]))
def test_any_delivery_id_becomes_a_name_that_docker_accepts(
    delivery: str, replica: int | None
) -> None:
    """T30: safe alphabets whatever the forge sends."""
    job = pidispatch.job_id("azure", delivery, replica)
    for name in (
        pidispatch.container_name(job),
        pidispatch.network_name(job),
        pidispatch.gate_name(job),
    ):
        assert DOCKER_NAME.fullmatch(name)


@given(
    st.tuples(st.text(max_size=80), st.sampled_from([None, 1, 2, 3])),
    st.tuples(st.text(max_size=80), st.sampled_from([None, 1, 2, 3])),
)
def test_two_different_jobs_never_share_an_id(
    one: tuple[str, int | None], other: tuple[str, int | None]
) -> None:
    ids = {pidispatch.job_id("github", *one), pidispatch.job_id("github", *other)}
    assert len(ids) == len({one, other})


@pytest.mark.parametrize(
    "repo", ["a.b/c_d", "group/sub/deep/repo", "My Project/My Repo", "ä/ö", "x" * 300]
)
def test_odd_repositories_get_mirror_names_that_are_safe_and_unique(repo: str) -> None:
    """T30."""
    name = pidispatch.mirror_name("gitlab", repo)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name)
    assert name != pidispatch.mirror_name("gitlab", repo + "/")
    assert name != pidispatch.mirror_name("github", repo)


def test_siblings_are_the_other_indices_of_the_set() -> None:
    assert pidispatch.siblings(2, 3) == (1, 3)
    assert pidispatch.siblings(None, None) == ()


def test_a_long_cron_id_still_makes_a_container_name_that_fits() -> None:
    job = pidispatch.cron_id("n" * 200, 1_800_000_000)
    assert len(pidispatch.gate_name(job)) <= 128


def test_the_session_key_knows_no_replica() -> None:
    key = pidispatch.session_key("github", "o/r", "pi/issue-7")
    assert re.fullmatch(r"[0-9a-f]{32}", key)
    assert key != pidispatch.session_key("gitlab", "o/r", "pi/issue-7")
