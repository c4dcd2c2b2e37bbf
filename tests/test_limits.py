"""Section limits: scopes and pause windows, refused whole or taken whole."""

from __future__ import annotations

import json
import re
import sqlite3
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from conftest import FakeClock, Maker
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import pidispatch
from pidispatch import Faults, Limits, LimitsFile, PauseWindow, ScopeRow, Settings

SPOON: dict[str, Any] = {"scope": "github:octo/spoon", "day": 3}
NIGHT: dict[str, Any] = {"scope": "*", "from": "22:00", "to": "06:00"}


def text(scopes: Any = (), pauses: Any = (), **more: Any) -> bytes:
    return json.dumps({"scopes": scopes, "pauseWindows": pauses, **more}).encode()


def load(*args: Any, **more: Any) -> Limits:
    return pidispatch.load_limits(text(*args, **more), "limits.json", "Europe/Berlin")


def faults(*args: Any, **more: Any) -> tuple[str, ...]:
    with pytest.raises(Faults) as told:
        load(*args, **more)
    assert told.value.exit_code == 2
    return told.value.faults


# -- loading --------------------------------------------------------------------


def test_a_good_file_becomes_typed_values_and_takes_the_settings_zone() -> None:
    row = {**SPOON, "week": 9, "month": 20, "concurrent": 1}
    days = {**NIGHT, "tz": "UTC", "days": ["sat", "sun"]}
    made = load([row], [NIGHT, days], **{"$schema": "./limits.schema.json"})
    assert made.scopes == (
        ScopeRow(scope="github:octo/spoon", day=3, week=9, month=20, concurrent=1),
    )
    assert [window.tz for window in made.pauses] == ["Europe/Berlin", "UTC"]
    assert (made.pauses[0].begins, made.pauses[0].ends) == ("22:00", "06:00")
    assert made.pauses[1].days == ("sat", "sun")
    assert load() == pidispatch.NO_LIMITS
    again = msgspec.json.decode(msgspec.json.encode(made), type=Limits)
    assert again == made, "status reads it back from the store"


BAD: list[tuple[Any, Any, str]] = [
    ([{"day": 1}], [], r"scopes\[0\]\.scope: \(absent\) is required"),
    ([{"scope": "*"}], [], r"scopes\[0\]: .*limits nothing: give it day"),
    ([{**SPOON, "day": 0}], [], r"scopes\[0\]\.day: 0 must be a whole number, 1"),
    ([{**SPOON, "day": True}], [], r"scopes\[0\]\.day: true must be"),
    ([{**SPOON, "day": "3"}], [], r'scopes\[0\]\.day: "3" must be'),
    ([{**SPOON, "day": 1.5}], [], r"scopes\[0\]\.day: 1\.5 must be"),
    ([{**SPOON, "daily": 3}], [], r"scopes\[0\]\.daily: 3 .*did you mean day\?"),
    ([{**SPOON, "concurent": 3}], [], r"did you mean concurrent\?"),
    ([{**SPOON, "model": "x"}], [], r"model: .* known: scope, day, week"),
    ([SPOON, SPOON], [], r"scopes\[1\]: .* repeats scopes\[0\]; keep one"),
    (
        [SPOON, {"scope": "github:Octo/SPOON", "week": 3}],
        [],
        r"scopes\[1\]: .* repeats scopes\[0\]",
    ),
    ([7], [], r"scopes\[0\]: 7 must be an object with scope, day"),
    ("x", [], r'scopes: "x" must be an array of scope rows; \[\] is'),
    ([], {}, r"pauseWindows: \{\} must be an array of pause windows"),
    ([], [{**NIGHT, "from": "7:00"}], r'\.from: "7:00" must be a time as HH:MM'),
    ([], [{**NIGHT, "from": "24:00"}], r'\.from: "24:00" must be a time'),
    ([], [{**NIGHT, "to": "24:01"}], r"\.to: .* at most 24:00"),
    ([], [{**NIGHT, "to": "22:00"}], r"\.to: .*00:00 to 24:00"),
    ([], [{"scope": "*", "from": "22:00"}], r"\.to: \(absent\) is required"),
    ([], [{**NIGHT, "tz": "europe/berlin"}], r"\.tz: .*exact spelling"),
    ([], [{**NIGHT, "days": []}], r"\.days: \[\] must be a non-empty array"),
    ([], [{**NIGHT, "days": ["Mon"]}], r'\.days\[0\]: "Mon" must be one of mon'),
    ([], [{**NIGHT, "days": ["mon", "mon"]}], r'\.days: .* names "mon" twice'),
    ([], [{**NIGHT, "dates": ["2026-02-30"]}], r"names a day that is none: 2026-02-30"),
    ([], [{**NIGHT, "dates": ["24.12."]}], r"\.dates\[0\]: .*YYYY-MM-DD"),
    (
        [],
        [{**NIGHT, "dates": ["2026-12-24"], "days": ["mon"]}],
        r"\.dates: .*may not stand beside days",
    ),
    ([], [NIGHT, NIGHT], r"pauseWindows\[1\]: .* repeats pauseWindows\[0\]"),
]


@pytest.mark.parametrize(("scopes", "pauses", "words"), BAD)
def test_every_fault_is_named_by_its_path_value_and_fix(
    scopes: Any, pauses: Any, words: str
) -> None:
    [fault] = faults(scopes, pauses)
    assert re.search(words, fault), fault


def test_all_faults_of_a_file_are_told_in_one_pass() -> None:
    told = faults([{**SPOON, "day": -1}, {"scope": "x"}], [{"to": "1"}], limits=[])
    paths = [fault.partition(": ")[0] for fault in told]
    assert paths == [
        "limits",
        "scopes[0].day",
        "scopes[1].scope",
        "pauseWindows[0].scope",
        "pauseWindows[0].from",
        "pauseWindows[0].to",
    ]


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[]", b'{"scopes": []}', b"null"])
def test_what_is_no_limits_file_is_a_fault_and_no_traceback(raw: bytes) -> None:
    with pytest.raises(Faults):
        pidispatch.load_limits(raw, "limits.json")


def test_a_key_that_stands_twice_is_refused_with_its_line() -> None:
    raw = b'{"scopes": [{"scope": "*",\n "day": 1, "day": 100}], "pauseWindows": []}'
    with pytest.raises(Faults, match=r"line 2, column 12: scopes\[0\]\.day: duplicate"):
        pidispatch.load_limits(raw, "limits.json")


@pytest.mark.parametrize(
    "scope",
    [
        *("octo/spoon", "github:", "github:octo", "github:*", "github:/x", "GitHub"),
        *("github:octo/sp*", "github:*/spoon", "githib:octo/spoon", "local:/srv", ""),
        *("/srv/notes/", "srv", "github:octo/spoon/", "* ", "github:octo/ spoon"),
        *("github:octo/spoon\n", "~/notes", 7),
    ],
)
def test_a_scope_that_could_match_nothing_is_refused(scope: object) -> None:
    [fault] = faults([{"scope": scope, "day": 1}])
    assert "github:octo/spoon" in fault, "the fault shows how it is written"


# -- scopes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "places"),
    [
        ("*", ["github:octo/spoon", "gitlab:a/b/c", "local:/srv/[notes]"]),
        ("github", ["github:octo/spoon"]),
        ("local", ["local:/srv/[notes]"]),
        ("github:octo/*", ["github:octo/spoon"]),
        ("github:Octo/Spoon", ["github:octo/spoon"]),
        ("gitlab:a/*", ["gitlab:a/b/c"]),
        ("gitlab:a/b/*", ["gitlab:a/b/c"]),
        ("gitlab:a/b", []),
        ("github:octo/spo", []),
        ("github:oct/*", []),
        ("/srv/[notes]", ["local:/srv/[notes]"]),
        ("/srv", []),
        ("/srv/notes", []),
        ("/srv/n", []),
    ],
)
def test_a_scope_holds_what_it_says_and_nothing_else(
    scope: str, places: list[str]
) -> None:
    all_places = ("github:octo/spoon", "gitlab:a/b/c", "local:/srv/[notes]")
    [row] = load([{"scope": scope, "day": 1}]).scopes
    assert [p for p in all_places if pidispatch.in_scope(row.pattern, p)] == places


@given(st.text(r"/a[]*?-!^\ü", min_size=1), st.text(r"/a[]*?-!^\ü"))
def test_python_and_sqlite_match_a_folder_alike_and_only_itself(
    one: str, other: str
) -> None:
    """The ledger counts with GLOB what the ladder matched without it."""
    scope = "/" + one.strip("/")
    pattern = pidispatch.scope_pattern(scope)
    db = sqlite3.connect(":memory:")
    for path in (scope, "/" + other.strip("/")):
        place = "local:" + pidispatch.os.path.normpath(path)
        globbed = bool(db.execute("SELECT ? GLOB ?", (place, pattern)).fetchone()[0])
        same = pidispatch.scope_pattern(path) == pattern
        assert pidispatch.in_scope(pattern, place) == globbed == same
    db.close()


def test_a_job_has_one_place_whatever_the_case_or_the_path(maker: Maker) -> None:
    [job] = maker.jobs(maker.event(repo="Octo/Spoon"))
    assert job.place == "github:octo/spoon"
    run = msgspec.structs.replace(job.run, kind="local", folder="/srv/x/../notes/")
    local = msgspec.structs.replace(job, kind="local", run=run)
    assert local.place == "local:/srv/notes"


# -- pause windows ------------------------------------------------------------------


def at(moment: str, zone: str = "Europe/Berlin", fold: int = 0) -> float:
    when = datetime.fromisoformat(moment).replace(tzinfo=ZoneInfo(zone), fold=fold)
    return when.timestamp()


def window(begins: str, ends: str, tz: str = "Europe/Berlin", **on: Any) -> PauseWindow:
    return PauseWindow(scope="*", begins=begins, ends=ends, tz=tz, **on)


#: The window, a moment, and until when it holds then (None: it does not).
MOMENTS: list[tuple[PauseWindow, str, str | None]] = [
    (window("08:00", "17:30"), "2026-06-10T07:59:59", None),
    (window("08:00", "17:30"), "2026-06-10T08:00:00", "2026-06-10T17:30:00"),
    (window("08:00", "17:30"), "2026-06-10T17:29:59", "2026-06-10T17:30:00"),
    (window("08:00", "17:30"), "2026-06-10T17:30:00", None),
    (window("00:00", "24:00"), "2026-06-10T23:59:59", "2026-06-11T00:00:00"),
    (window("22:00", "06:00"), "2026-06-10T21:59:59", None),
    (window("22:00", "06:00"), "2026-06-30T22:00:00", "2026-07-01T06:00:00"),
    (window("22:00", "06:00"), "2026-12-31T23:59:59", "2027-01-01T06:00:00"),
    (window("22:00", "06:00"), "2027-01-01T00:00:00", "2027-01-01T06:00:00"),
    (window("22:00", "06:00"), "2026-06-11T06:00:00", None),
    # 12 June 2026 is a Friday: the night belongs to the day it begins on
    (window("22:00", "06:00", days=("fri",)), "2026-06-12T05:00:00", None),
    (
        window("22:00", "06:00", days=("fri",)),
        "2026-06-13T05:00:00",
        "2026-06-13T06:00:00",
    ),
    (window("22:00", "06:00", days=("fri",)), "2026-06-13T22:00:00", None),
    (window("00:00", "24:00", dates=("2026-12-24",)), "2026-12-23T23:59:59", None),
    (
        window("00:00", "24:00", dates=("2026-12-24",)),
        "2026-12-24T00:00:00",
        "2026-12-25T00:00:00",
    ),
    (window("00:00", "24:00", dates=("2026-12-24",)), "2026-12-25T00:00:00", None),
    # clocks go forward at 02:00 on 29 March, back at 03:00 on 25 October
    (window("22:00", "06:00"), "2026-03-28T23:00:00", "2026-03-29T06:00:00"),
    (window("02:00", "03:00"), "2026-03-29T01:59:59", None),
    (window("02:00", "03:00"), "2026-03-29T03:00:00", None),
    (window("22:00", "06:00"), "2026-10-24T23:00:00", "2026-10-25T06:00:00"),
    (window("01:00", "02:30"), "2026-10-25T02:29:59", "2026-10-25T02:30:00"),
    (window("00:00", "24:00"), "2026-10-25T00:00:00", "2026-10-26T00:00:00"),
]


@pytest.mark.parametrize(("pause", "moment", "ends"), MOMENTS)
def test_a_pause_holds_from_its_first_second_to_its_last(
    pause: PauseWindow, moment: str, ends: str | None
) -> None:
    assert pause.until(at(moment)) == (at(ends) if ends else None)


def test_an_hour_that_comes_twice_is_paused_twice() -> None:
    pause = window("02:00", "02:30")
    first, second = (at("2026-10-25T02:10:00", fold=fold) for fold in (0, 1))
    assert second - first == 3600
    assert pause.until(first) == at("2026-10-25T02:30:00")
    assert pause.until(at("2026-10-25T02:40:00")) is None
    assert pause.until(second) == at("2026-10-25T02:30:00", fold=1)


def test_a_zone_of_its_own_decides_and_the_latest_end_counts() -> None:
    tokyo = window("00:00", "06:00", "Asia/Tokyo")
    assert tokyo.until(at("2026-06-10T15:00:00", "UTC")) == at(
        "2026-06-10T21:00:00", "UTC"
    )
    both = Limits((), (window("08:00", "12:00"), window("09:00", "17:00")))
    assert both.paused(at("2026-06-10T10:00:00")) == {"*": at("2026-06-10T17:00:00")}
    assert both.paused(at("2026-06-10T18:00:00")) == {}


# -- the file of a running service ----------------------------------------------------


def test_only_a_file_that_nobody_named_may_be_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert LimitsFile(Settings()).value == pidispatch.NO_LIMITS
    assert pidispatch.read_limits(Settings()) == pidispatch.NO_LIMITS
    named = Settings(limits_file=tmp_path / "l.json")
    for read in (LimitsFile, pidispatch.read_limits):
        with pytest.raises(Faults, match=r"l\.json: cannot be read"):
            read(named)
    Path("limits.json").symlink_to("nowhere")  # it is there, and not to be had
    for read in (LimitsFile, pidispatch.read_limits):
        with pytest.raises(Faults, match=r"limits\.json: cannot be read"):
            read(Settings())


@pytest.mark.parametrize("bad", [b"", b"{", text([{"scope": "x"}]), None])
def test_a_bad_edit_keeps_the_last_good_limits_and_a_bad_start_is_refused(
    tmp_path: Path, bad: bytes | None
) -> None:
    """T49."""
    path = tmp_path / "limits.json"
    path.write_bytes(text([SPOON]))
    settings = Settings(limits_file=path, timezone="Europe/Berlin")
    made = LimitsFile(settings)
    told: list[str | None] = []
    made.watch(told.append)
    made.stop()
    if bad is None:
        path.unlink()
    else:
        path.write_bytes(bad)
    made.refresh()
    assert made.value == load([SPOON])
    assert made.problem and str(path) in made.problem
    with pytest.raises(Faults):
        LimitsFile(settings)
    path.write_bytes(text([SPOON], [NIGHT]))
    made.refresh()
    assert (made.value, made.problem) == (load([SPOON], [NIGHT]), None)
    assert [bool(word) for word in told] == [False, True, False]


def test_a_saved_file_is_taken_by_the_watcher(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    path.write_bytes(text())
    made = LimitsFile(Settings(limits_file=path))
    made.LOOK_ANYWAY = 100
    taken = pidispatch.threading.Event()
    made.watch(lambda problem: taken.set() if made.value.scopes else None)
    path.with_name("new").write_bytes(text([SPOON]))
    path.with_name("new").replace(path)
    assert taken.wait(5)
    made.stop()


def test_the_schema_takes_good_files_and_refuses_wrong_ones() -> None:
    schema = pidispatch.limits_schema()
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    good = {"scopes": [SPOON], "pauseWindows": [{**NIGHT, "days": ["mon"]}]}
    assert validator.is_valid(good)
    assert not validator.is_valid({**good, "limits": []})
    assert not validator.is_valid({**good, "scopes": [{"scope": "octo/spoon"}]})
    assert not validator.is_valid({**good, "pauseWindows": [{**NIGHT, "to": "25:00"}]})


def test_a_paused_scope_starts_nothing_and_costs_nothing_and_the_rest_goes_on(
    store: pidispatch.Store, maker: Maker, clock: FakeClock
) -> None:
    clock.now = at("2026-06-10T23:00:00")
    pause = msgspec.structs.replace(window("22:00", "06:00"), scope="github:octo/*")
    limits = Limits((), (pause,))
    maker.admit(store, 2, delivery="held")
    assert store.claim(limits) is None
    maker.admit(store, delivery="free", repo="other/fork")
    free = store.claim(limits)
    assert free and free.job.id == "gh-free"
    status = store.status(pidispatch.Caps(9, None, None, "UTC", limits=limits), clock())
    ends = at("2026-06-11T06:00:00")
    assert status.holds == [pidispatch.Hold("github:octo/*", "pause-window", ends, 2)]
    told = pidispatch.status_text(status)
    assert "github:octo/*: paused until 2026-06-11T04:00:00.000Z; 2 wait" in told
    assert status.used == 0
    clock.now = ends
    first = store.claim(limits)
    assert first and (first.job.id, first.attempt, first.deferrals) == (
        "gh-held-r1",
        0,
        0,
    )
