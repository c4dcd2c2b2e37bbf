"""Section surfaces, the panel: its pages over HTTP, in Chromium, and under attack."""

from __future__ import annotations

import http.client
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import msgspec
import pytest
from conftest import Maker
from world import World, bash, say, world

import pidispatch

PATHS = ("/", "/runs", "/triggers", "/triggers/0", "/runs/{job}", "/compare/{job}")
HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202eevil\x07"'


class Browser:
    """A bare HTTP client of a panel: what it sends is what the test says."""

    def __init__(self, port: int) -> None:
        self.port, self.host = port, f"127.0.0.1:{port}"
        self.cookie = ""

    def ask(
        self, method: str, path: str, body: str = "", **headers: str
    ) -> tuple[int, str, http.client.HTTPMessage]:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        given = {"Host": self.host} | headers
        if self.cookie:
            given["Cookie"] = self.cookie
        if method == "POST":
            given.setdefault("Content-Type", "application/x-www-form-urlencoded")
            given.setdefault("Origin", f"http://{self.host}")
        try:
            client.request(method, path, body or None, given)
            answer = client.getresponse()
            return answer.status, answer.read().decode(), answer.headers
        finally:
            client.close()

    def get(self, path: str) -> str:
        status, text, _ = self.ask("GET", path)
        assert status == 200, (path, status, text)
        return text

    def csrf(self) -> str:
        found = re.search(r'name="csrf" value="([0-9a-f]+)"', self.get("/"))
        assert found
        return found[1]

    def press(self, path: str, **fields: str) -> int:
        form = {"csrf": fields.pop("csrf", None) or self.csrf(), **fields}
        return self.ask("POST", path, urlencode(form))[0]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        made.rules({"replicas": 2})
        yield made


def panel_of(here: World) -> Browser:
    service = here.service or here.start()
    return Browser(service.panel.port)


def wrote(here: World, text: str = HOSTILE) -> str:
    """A script of the agent that puts that text wherever it can."""
    (here.root / "text").write_text(text)
    return f"cp '{here.root}/text' hostile.txt && git add -A && git commit -qm x"


def ended_set(here: World) -> list[str]:
    command = f"{wrote(here)} && printf 'T\\n\\nB\\n' > $PI_OUTBOX/review-request.md"
    here.model.set_scripts([{"match": "", "steps": [bash(command), say()]}])
    jobs = here.label()
    here.wait(jobs)
    return jobs


# -- what the pages say -------------------------------------------------------


def test_every_page_shows_a_set_and_names_its_siblings(here: World) -> None:
    browser = panel_of(here)
    jobs = ended_set(here)
    home = browser.get("/")
    assert "[x2]" in home and "r1/2" in home and "r2/2" in home
    assert "2 of 25" in home, "each replica took a slot of the day's cap"
    detail = browser.get(f"/runs/{jobs[0]}")
    assert (
        f'href="/runs/{jobs[1]}"' in detail and f'href="/compare/{jobs[0]}"' in detail
    )
    for name in msgspec.structs.fields(pidispatch.Record):
        assert f"<dt>{name.name}</dt>" in detail
    compared = browser.get(f"/compare/{jobs[0]}")
    assert "hostile.txt" in compared and "tests touched" in compared
    rule = browser.get("/triggers/0")
    assert "takes 2 slots" in rule and "trust" in rule
    for path in ("/runs/gh-none", "/triggers/7", "/compare/gh-none", "/nowhere"):
        status, text, _ = browser.ask("GET", path)
        assert status == 404 and "<h1>" in text


def test_a_run_can_be_held_and_cancelled_and_says_so(here: World) -> None:
    browser = panel_of(here)
    assert browser.press("/pause") == 303
    assert "<h1>Paused</h1>" in browser.get("/")
    jobs = here.label()
    assert browser.press(f"/runs/{jobs[0]}/cancel") == 303
    here.wait_for(lambda: here.store.run(jobs[0])[0].state == "policy")
    assert "operator-cancel" in browser.get(f"/runs/{jobs[0]}")
    assert here.store.run(jobs[1])[0].state == "queued", "its sibling goes on"
    assert browser.press("/resume") == 303
    here.wait(jobs[1:])
    status, text, _ = browser.ask(
        "POST", f"/runs/{jobs[1]}/cancel", urlencode({"csrf": browser.csrf()})
    )
    assert status == 404 and "already ended" in text


def test_a_bad_edit_of_the_triggers_is_shown_until_it_is_mended(here: World) -> None:
    browser = panel_of(here)
    good = (here.root / "triggers.json").read_text()
    (here.root / "triggers.json").write_text('{"triggers": [{}]}')
    here.wait_for(lambda: "not in force" in browser.get("/"))
    assert "[x2]" in browser.get("/triggers"), "the last good rules stand"
    (here.root / "triggers.json").write_text(good)
    here.wait_for(lambda: "not in force" not in browser.get("/triggers"))


# -- who may ------------------------------------------------------------------


def test_text_from_outside_is_inert_on_every_page(here: World) -> None:
    browser = panel_of(here)
    jobs = ended_set(here)
    record = here.record(jobs[0])
    spoiled = msgspec.structs.replace(record, reason=HOSTILE, model=HOSTILE)
    with sqlite3.connect(here.settings.db) as db:
        db.execute(
            "UPDATE runs SET record = ?, request = ? WHERE job_id = ?",
            (
                msgspec.json.encode(spoiled).decode(),
                '{"number": 1, "url": "javascript:alert(3)", "title": "<b>"}',
                jobs[0],
            ),
        )
    for path in PATHS:
        text = browser.get(path.format(job=jobs[0]))
        assert "<script>" not in text and "<img" not in text
        assert not re.search(r"href=\"(?!/|https?:|#|data:,)", text)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", text)
    assert "&lt;script&gt;" in browser.get(f"/compare/{jobs[0]}")


@pytest.mark.parametrize(
    ("path", "headers", "csrf", "status"),
    [
        ("/pause", {"Origin": "http://evil.example"}, None, 403),
        ("/pause", {"Origin": "null"}, None, 403),
        ("/pause", {"Host": "evil.example"}, None, 403),
        (
            "/pause",
            {"Host": "evil.example", "Origin": "http://evil.example"},
            None,
            403,
        ),
        ("/pause", {"Host": "127.0.0.1.evil.example"}, None, 403),
        ("/pause", {}, "0" * 32, 403),
        ("/pause", {}, "", 403),
        ("/pause", {"Content-Type": "text/plain"}, None, 415),
        ("/runs/x/cancel", {"Origin": "http://evil.example"}, None, 403),
    ],
)
def test_an_action_from_anywhere_else_is_refused(
    here: World, path: str, headers: dict[str, str], csrf: str | None, status: int
) -> None:
    browser = panel_of(here)
    form = urlencode({"csrf": browser.csrf() if csrf is None else csrf})
    assert browser.ask("POST", path, form, **headers)[0] == status
    assert here.store.flag("paused") is None


def test_a_form_of_too_many_fields_is_refused_and_no_fault(
    here: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Anyone's page can send one, and each would write a traceback to the log."""
    panel = panel_of(here)
    many = "&".join(f"a{i}=1" for i in range(99))
    assert panel.ask("POST", "/pause", many)[0] == 403
    assert panel.ask("GET", f"/runs?{many}")[0] == 200
    assert "panel-request-failed" not in caplog.text


def test_an_action_is_no_page_and_a_page_no_action(here: World) -> None:
    browser = panel_of(here)
    for path in ("/pause", "/resume", "/runs/x/cancel", "/logout"):
        status, _, headers = browser.ask("GET", path)
        assert (status, headers["Allow"]) == (405, "POST")
    assert browser.ask("POST", "/", urlencode({"csrf": browser.csrf()}))[0] == 405
    assert browser.ask("GET", "/", Host="evil.example")[0] == 403
    assert browser.ask("GET", "/static/../pidispatch.py")[0] == 404
    assert browser.ask("GET", "/static/base.html.j2")[0] == 404


def test_every_answer_says_what_a_browser_may_do_with_it(here: World) -> None:
    browser = panel_of(here)
    for path in ("/", "/static/panel.css", "/nowhere"):
        headers = browser.ask("GET", path)[2]
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"


def test_open_to_others_without_a_token_it_does_not_start(here: World) -> None:
    for address in ("0.0.0.0", "::", "192.0.2.7", "panel.example"):
        here.change(panel_bind=address)
        with pytest.raises(pidispatch.ConfigError, match="open on"):
            here.start()
    here.change(panel_bind="127.0.0.1")


def test_with_a_token_nothing_is_seen_before_it_is_given(here: World) -> None:
    here.change(panel_bind="0.0.0.0", panel_token="canary-panel-token")
    browser = panel_of(here)
    for path in ("/", "/runs", "/triggers", "/runs/x", "/compare/x"):
        status, text, headers = browser.ask("GET", path)
        assert (status, headers["Location"], text) == (303, "/login", "")
    status, text, _ = browser.ask("GET", "/login")
    csrf = re.search(r'name="csrf" value="([0-9a-f]+)"', text)
    assert csrf
    for token in ("", "wrong", "canary-panel-toke", "é"):
        form = urlencode({"csrf": csrf[1], "token": token})
        status, text, headers = browser.ask("POST", "/login", form)
        assert status == 403 and "Set-Cookie" not in headers
    form = urlencode({"csrf": csrf[1], "token": "canary-panel-token"})
    status, _, headers = browser.ask("POST", "/login", form)
    cookie = headers["Set-Cookie"]
    assert status == 303 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert "canary" not in cookie
    browser.cookie = cookie.partition(";")[0]
    assert "canary" not in browser.get("/")
    assert browser.press("/pause") == 303
    browser.cookie = browser.cookie[:-1] + "0g"
    assert browser.ask("GET", "/")[0] == 303
    browser.cookie = ""
    form = urlencode({"csrf": csrf[1]})
    assert browser.ask("POST", "/resume", form)[2]["Location"] == "/login"
    assert here.store.flag("paused") is not None


# -- how fast -----------------------------------------------------------------


def filled(here: World, maker: Maker, count: int) -> str:
    """A history of `count` ended runs; the id of the newest."""
    here.start()
    (plain,) = maker.jobs(maker.event())
    template = pidispatch.Record(
        jobId="x", kind="github", target="octo/spoon#7", flow="fix-issue",
        queuedAt="2026-01-01T00:00:00.000Z", startedAt="2026-01-01T00:00:01.000Z",
        endedAt="2026-01-01T00:01:00.000Z", outcome="completed", reason=None,
        exitCode=0, turns=3, tokens=pidispatch.Tokens(total=100), forks=None,
        provider="fake", model="fake-1", budgetReserved=True, attempt=1, replica=None,
        replicas=None, triggerIndex=0, triggerType="label", session=None, bundle=False,
        host="here", picked=None,
    )  # fmt: skip
    now = time.time()
    payload = msgspec.json.encode(plain).decode()
    record = msgspec.json.encode(template).decode()
    with sqlite3.connect(here.settings.db) as db:
        ids = [f"gh-old-{n}" for n in range(count)]
        db.executemany(
            """INSERT INTO jobs (id, set_id, state, payload, queued_at, ended_at)
               VALUES (?, ?, 'done', ?, ?, ?)""",
            ((i, i, payload, now - count + n, now) for n, i in enumerate(ids)),
        )
        db.executemany(
            "INSERT INTO runs (job_id, set_id, ended_at, record) VALUES (?, ?, ?, ?)",
            ((i, i, now - count + n, record.replace('"x"', f'"{i}"'))
             for n, i in enumerate(ids)),
        )  # fmt: skip
        db.executemany(
            """INSERT INTO ledger (job_id, attempt, reserved_at, state, tokens)
               VALUES (?, 1, ?, 'kept', 100)""",
            ((i, now - 20 * (count - n)) for n, i in enumerate(ids)),
        )
    return ids[-1]


def test_with_a_hundred_thousand_runs_every_page_comes_at_once(
    here: World, maker: Maker
) -> None:
    newest = filled(here, maker, 100_000)
    browser = panel_of(here)
    pages = ("/", "/runs", f"/runs?before={newest}", f"/runs/{newest}", "/triggers")
    for path in pages:
        browser.get(path)
        taken = []
        for _ in range(5):
            begun = time.perf_counter()
            browser.get(path)
            taken.append(time.perf_counter() - begun)
        assert min(taken) < 0.3, (path, taken)  # the machine may be at other work


def test_an_hour_of_looking_holds_no_reader_open(here: World) -> None:
    """A page each two seconds; meanwhile writes go on and the log stays short."""
    browser = panel_of(here)
    for n in range(1_800):
        if n % 6 == 0:
            browser.get("/")
        for _ in range(3):
            here.store.count("duplicate")
    wal = Path(f"{here.settings.db}-wal")
    assert wal.stat().st_size < 16 * 1024 * 1024
    with sqlite3.connect(here.settings.db) as db:
        busy, _, _ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    assert busy == 0, "no reader keeps the log from being emptied"
    assert wal.stat().st_size == 0


def test_a_rules_page_says_what_an_agent_that_publishes_gives_up(here: World) -> None:
    here.change(publish="agent")
    page = panel_of(here).get("/triggers/0")
    assert "puts the forge token into the box" in page
    assert "without a GitHub App all replicas hold one operator token" in page
