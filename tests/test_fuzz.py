"""A short run of the fuzzer, the same on every machine, and all it ever found."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import fuzz
import pytest
from fuzz import Case, Findings, Fuzzer, Mutator, Targets, run
from hypothesis import given
from hypothesis import strategies as st

import pidispatch

SEED, CASES = 7, 5_000


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzer]:
    root = tmp_path_factory.mktemp("fuzz")
    targets = Targets(root)
    found = fuzz.seeds(root)
    yield Fuzzer(targets, Findings(root / "findings"), Mutator(found))
    targets.close()


def test_every_seed_is_taken_and_every_target_has_one(fuzzer: Fuzzer) -> None:
    for case in fuzzer.mutator.seeds:
        assert Case.decode(case.encode()) == case
        run(fuzzer.targets, case)
    assert {case.words[0] for case in fuzzer.mutator.seeds} == {*fuzz.TARGETS}
    boxes = {case.words[1] for case in fuzzer.mutator.seeds if case.words[0] == "box"}
    assert boxes == {*fuzz.READERS}


def test_nothing_that_others_send_does_more_than_be_refused(fuzzer: Fuzzer) -> None:
    rng = random.Random(SEED)
    for _ in range(CASES):
        fuzzer.one(fuzzer.mutator(fuzzer.mutator.any(rng), rng).encode())
    assert fuzzer.findings.seen == {}


def test_the_fuzzer_finds_what_is_wrong(
    fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def read(body: bytes) -> None:
        json.loads(body.decode("utf-8", "replace").split("\n")[0] or "{}")

    monkeypatch.setitem(fuzz.READERS, "result", read)  # type: ignore[arg-type]
    seeds = [case for case in fuzzer.mutator.seeds if case.words == ("box", "result")]
    finder = Fuzzer(fuzzer.targets, Findings(tmp_path), Mutator(seeds))
    rng = random.Random(SEED)
    for _ in range(200):
        finder.one(finder.mutator(rng.choice(seeds), rng).encode())
    assert any("JSONDecodeError" in kind for kind in finder.findings.seen)
    kept = next(tmp_path.glob("*.case"))
    with pytest.raises(ValueError, match=r"\w"):
        run(fuzzer.targets, Case.decode(kept.read_bytes()))


# -- what it found ----------------------------------------------------------------


def gate_call(**changes: Any) -> str:
    counts = dict.fromkeys(("input", "output", "cacheRead", "cacheWrite", "total"), 5)
    return json.dumps({"event": "call", "sum": counts | {"forks": {}} | changes})


ODD_SUMS = [
    {"output": None},
    {"total": [5]},
    {"total": 2**70},
    {"total": -1},
    {"input": 1.5},
    {"cost": "0.5"},
    {"cost": float("nan")},
    {"forks": "x"},
    {"forks": {"a": True}},
    {"forks": {"a": {"cost": 1}}},
    {"forks": {"a": {"total": [1], "cost": 1}}},
]


@pytest.mark.parametrize("odd", ODD_SUMS, ids=repr)
def test_a_gates_line_that_no_record_can_hold_counts_as_a_torn_one(odd: Any) -> None:
    counted = pidispatch.meter_of([gate_call(), gate_call(**odd)])
    assert counted == pidispatch.meter_of([gate_call()])
    assert pidispatch.meter_of([gate_call(**odd)]) == (None, None, False)


def test_half_a_surrogate_pair_from_a_box_is_no_result() -> None:
    """It could be read, and then not be written into the record."""
    line = '{"event": "exit", "code": 2, "reason": "\\ud800"}'
    assert pidispatch.result_of([line]) is None
    assert pidispatch.result_of(['{"event": "exit", "code": 2}', line])


HALVES = [
    {"triggers": [{"on": {"type": "comment", "phrase": "\ud800"}, "run": "x"}]},
    {"triggers": [{"on": {"type": "label"}, "run": {"kind": "\ud800", "flow": "x"}}]},
    {"triggers": [{"\udfff": 1}]},
    {"scopes": [{"scope": "\ud800\ud800"}]},
    {"pauseWindows": [{"scope": "*", "tz": "\ud800", "days": ["\ud800"]}]},
]


@pytest.mark.parametrize("shape", HALVES, ids=ascii)
def test_half_a_surrogate_pair_in_a_file_is_a_fault_at_its_place(shape: Any) -> None:
    load: Any = (
        pidispatch.load_triggers if "triggers" in shape else pidispatch.load_limits
    )
    with pytest.raises(pidispatch.Faults) as told:
        load(json.dumps(shape).encode(), "the file")
    assert any("half a surrogate pair is not text" in it for it in told.value.faults)
    told.value.message.encode()


def test_many_slow_paragraphs_are_read_no_further_than_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four of `![` took 2.5 s of the request; time grows with a paragraph's square."""
    read: list[int] = []
    prose = pidispatch._line_prose

    def counted(content: str, env: dict[str, Any]) -> str:
        read.append(len(content))
        return prose(content, env)

    monkeypatch.setattr(pidispatch, "_line_prose", counted)
    paragraph = ("@pi_x " + "![" * 16_384)[: pidispatch._PARAGRAPHS_MAX - 4]
    fuzz.READERS["markdown"]("\n\n".join([paragraph] * 4).encode())
    assert len(read) == 2
    assert sum(read) == pidispatch._PARAGRAPHS_MAX


def test_markers_within_markers_take_no_time(fuzzer: Fuzzer) -> None:
    """One pass for each: 60,000 characters from a box took 10 s."""
    rule = fuzzer.targets.rules["github"][0]
    event = pidispatch.Event(
        forge="github",
        delivery="d",
        name="issues",
        kind="label",
        repo="octo/lamp",
        target=pidispatch.Target("issue", 7),
        actor=pidispatch.Actor("1"),
    )
    job = pidispatch.fan_out(pidispatch.Match(rule, rule.run.flow, "bug"), event)[0]
    begun = time.process_time()
    title = pidispatch.request_title(job, "[r1/" * 10_000 + "2]" * 10_000)
    assert time.process_time() - begun < 1
    assert title.startswith("[r1/2] ") and title.count("[r1/2]") == 1


FORM = st.lists(
    st.sampled_from(
        [b"%41", b"%3D", b"%25", b"%0d%0A", b"=", b"+", b"a", b"\r\n", b"\n"]
    )
    | st.binary(min_size=1, max_size=3).filter(lambda it: not {*it} & {*b"%&"}),
    max_size=40,
).map(b"".join)


@given(text=FORM, size=st.sampled_from([3, 4, 5, 8, 9, 64]))
def test_a_form_is_unpacked_by_pieces_as_it_is_at_once(text: bytes, size: int) -> None:
    whole = unquote_to_bytes(text.replace(b"+", b" "))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pidispatch, "_PIECE", size)
        assert pidispatch._form_payload(b"a=b&payload=" + text) == whole


@pytest.mark.parametrize("text", [b"%", b"%4", b"%%41", b"%4x", b"a%zz"])
def test_a_form_with_a_broken_escape_is_malformed(text: bytes) -> None:
    with pytest.raises(pidispatch.Malformed):
        pidispatch._form_payload(b"payload=" + text)


@given(
    text=st.text(max_size=30),
    odd=st.binary(max_size=3),
    at=st.integers(0, 90),
    size=st.sampled_from([4, 5, 7, 64]),
)
def test_utf8_is_checked_by_pieces_as_it_is_at_once(
    text: str, odd: bytes, at: int, size: int
) -> None:
    body = text.encode("utf-8", "replace")
    body = body[:at] + odd + body[at:]
    valid = body.decode("utf-8", "replace").encode() == body
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pidispatch, "_PIECE", size)
        if valid:
            pidispatch._check_utf8(body)
        else:
            with pytest.raises(UnicodeDecodeError):
                pidispatch._check_utf8(body)
