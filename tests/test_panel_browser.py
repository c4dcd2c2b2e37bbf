"""The panel in a real Chromium: what a person sees, reaches and presses."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import ROOT, Maker, lacking
from test_panel import HOSTILE, ended_set, filled
from world import World, bash, say, world

import pidispatch

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SIZES = {390: 844, 1280: 800}
SCHEMES = ("light", "dark")
#: Where the README's pictures go when they are asked for.
PICTURES = ROOT / "docs" / "images" if os.environ.get("UPDATE_PICTURES") else None


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        lacking("no Chromium: install the package `chromium`")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        made.rules({"replicas": 2})
        yield made


class Visit:
    """One visitor of a panel: a page of a size and a scheme, and its complaints."""

    def __init__(self, browser: Browser, here: World, width: int, scheme: str) -> None:
        service = here.service or here.start()
        self.url = f"http://127.0.0.1:{service.panel.port}"
        size: Any = {"width": width, "height": SIZES[width]}
        scheme_: Any = scheme
        self.page = browser.new_page(viewport=size, color_scheme=scheme_)
        self.complaints: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))

    def _hear(self, said: Any) -> None:
        if "404 (not-found)" not in said.text:  # of a page that says so itself
            self.complaints.append(said.text)

    def go(self, path: str) -> Page:
        self.page.goto(self.url + path)
        return self.page

    def is_sound(self) -> None:
        """No complaint, nothing wider than the screen, nothing axe objects to."""
        from axe_playwright_python.sync_playwright import Axe

        assert self.complaints == []
        width = self.page.evaluate("document.documentElement.scrollWidth")
        size = self.page.viewport_size
        assert size and width <= size["width"], "the page itself scrolls sideways"
        found = Axe().run(self.page)
        assert found.violations_count == 0, found.generate_report()

    def picture(self, name: str) -> None:
        if PICTURES:
            PICTURES.mkdir(parents=True, exist_ok=True)
            whole = name.startswith("compare")
            self.page.screenshot(path=PICTURES / f"{name}.png", full_page=whole)


@pytest.fixture
def visit(chromium: Browser, here: World) -> Iterator[Any]:
    open_: list[Visit] = []

    def make(width: int = 1280, scheme: str = "light") -> Visit:
        open_.append(Visit(chromium, here, width, scheme))
        return open_[-1]

    yield make
    for one in open_:
        one.page.close()


def look_everywhere(visit: Any, paths: Sequence[str]) -> None:
    for width in SIZES:
        for scheme in SCHEMES:
            one = visit(width, scheme)
            for path in paths:
                one.go(path)
                one.is_sound()
            one.page.close()


def test_with_no_run_every_page_is_sound_in_both_schemes_and_sizes(
    here: World, visit: Any
) -> None:
    look_everywhere(
        visit,
        ("/", "/runs", "/triggers", "/triggers/0", "/runs/gh-none"),
    )


def test_with_one_set_every_page_is_sound_in_both_schemes_and_sizes(
    here: World, visit: Any
) -> None:
    here.change(capture_logs=True)
    here.start()
    job = ended_set(here)[0]
    look_everywhere(visit, ("/", f"/runs/{job}", f"/compare/{job}"))


def test_with_five_hundred_runs_the_lists_are_sound(
    here: World, visit: Any, maker: Maker
) -> None:
    newest = filled(here, maker, 500)
    look_everywhere(visit, ("/", "/runs", f"/runs/{newest}"))
    page = visit().go("/runs")
    assert page.locator("tbody tr").count() == pidispatch.PANEL_ROWS
    page.get_by_role("link", name="Older").click()
    assert page.locator("tbody tr").count() == pidispatch.PANEL_ROWS
    assert newest not in page.content()


def test_a_running_job_comes_up_by_itself_and_can_be_cancelled(
    here: World, visit: Any
) -> None:
    here.rules({})
    here.start()
    one = visit()
    page = one.go("/")
    here.model.set_scripts([{"match": "", "steps": [bash("sleep 60"), say()]}])
    (job,) = here.label()
    link = page.get_by_role("link", name=job).first
    link.wait_for(timeout=15_000)  # no reload: the page did it
    page.get_by_text("running").first.wait_for(timeout=30_000)
    link.click()
    page.locator("pre.log").wait_for(timeout=30_000)
    page.get_by_role("button", name=f"Cancel {job}").click()
    page.get_by_text("operator-cancel").first.wait_for(timeout=30_000)
    assert page.get_by_role("button", name=f"Cancel {job}").count() == 0
    assert one.complaints == []


def test_the_keyboard_alone_pauses_and_resumes(here: World, visit: Any) -> None:
    page = visit().go("/")
    for press in ("Start no more jobs", "Start jobs again"):
        for _ in range(40):
            page.keyboard.press("Tab")
            now = page.evaluate("document.activeElement.getAttribute('aria-label')")
            if now == press:
                break
        else:
            raise AssertionError(f"{press} is out of the keyboard's reach")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", "the focus can be seen"
        page.keyboard.press("Enter")
        title = "Paused" if press.startswith("Start no") else "Running"
        page.get_by_role("heading", name=title, exact=True).wait_for()
    page.keyboard.press("Tab")
    skip = page.evaluate("document.activeElement.textContent")
    assert skip == "Skip to the content", "the first stop leads past the navigation"


def test_an_update_keeps_the_focus_where_it_was(here: World, visit: Any) -> None:
    page = visit().go("/")
    page.get_by_role("link", name="0", exact=True).focus()
    here.label()
    page.locator("caption", has_text="The latest runs").wait_for(timeout=15_000)
    assert page.evaluate("document.activeElement.textContent") == "0"


def test_hostile_text_runs_nothing(here: World, visit: Any) -> None:
    here.change(capture_logs=True)
    here.start()
    jobs = ended_set(here)
    one = visit()
    for path in ("/", f"/runs/{jobs[0]}", f"/compare/{jobs[0]}"):
        page = one.go(path)
        assert one.complaints == []
    shown = page.locator("main").inner_text()
    assert "<script>alert(1)</script>" in shown, "it is shown, as text"
    assert HOSTILE not in shown, "without its control characters"


def test_without_a_script_every_page_still_works(here: World, chromium: Any) -> None:
    here.start()
    jobs = ended_set(here)
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    assert here.service
    page.goto(f"http://127.0.0.1:{here.service.panel.port}/")
    page.get_by_role("button", name="Start no more jobs").click()
    assert page.get_by_role("heading", name="Paused").count() == 1
    page.get_by_role("link", name=jobs[0]).first.click()
    assert page.get_by_role("link", name="Compare the set").count() == 1
    context.close()


STRAIGHT = "def bend(spoon):\n    return spoon\n"
FIXES = (
    (
        "def bend(spoon):\n    if not spoon:\n        raise ValueError('no spoon')\n"
        "    return spoon.bent()\n",
        "def test_bend():\n    assert bend(Spoon()).is_bent\n",
    ),
    ("def bend(spoon):\n    return spoon.bent() if spoon else None\n", ""),
)


def test_the_pictures_show_a_set_worth_comparing(here: World, visit: Any) -> None:
    """And with UPDATE_PICTURES=1 they are taken, for the README."""
    here.repo.commit("main", {"spoon.py": STRAIGHT}, "Add the spoon")
    here.start()
    scripts = []
    for i, (code, test) in enumerate(FIXES, 1):
        (here.root / f"code{i}").write_text(code)
        (here.root / f"test{i}").write_text(test)
        command = (
            f"cp {here.root}/code{i} spoon.py && mkdir -p tests && "
            f"{{ [ ! -s {here.root}/test{i} ] || "
            f"cp {here.root}/test{i} tests/test_spoon.py; }} && "
            "git add -A && git commit -qm 'Bend the spoon' && "
            "printf 'Bend the spoon\\n\\nIt was straight.\\n' "
            "> $PI_OUTBOX/review-request.md"
        )
        steps = [bash(command), say()]
        scripts.append({"match": f"replica {i} of 2", "steps": steps})
    here.model.set_scripts(scripts)
    jobs = here.label()
    here.wait(jobs)
    for name, path in (("panel", "/"), ("compare", f"/compare/{jobs[0]}")):
        for scheme in SCHEMES:
            one = visit(1280, scheme)
            page = one.go(path)
            assert page.get_by_text("r2/2").count()
            one.picture(f"{name}-{scheme}")
