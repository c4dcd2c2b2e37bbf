"""The documents say what the code does; what can be generated is, and is compared.

`UPDATE_GOLDEN=1 pytest tests/test_docs.py` (or `just docs`) writes anew what stands
between `<!-- generated: name -->` and `<!-- end -->`, and docs/schemas/.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from conftest import ROOT
from jsonschema import Draft202012Validator

import pidispatch
import verify_image

UPDATE = os.environ.get("UPDATE_GOLDEN") == "1"
README = ROOT / "README.md"
PAGES = (
    README,
    *(ROOT / name for name in ("SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
)


def commands(
    group: click.Group = pidispatch.main, path: str = ""
) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by its full name."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        else:
            yield path + name, command


COMMANDS = dict(commands())


def options(command: click.Command) -> list[click.Option]:
    return [item for item in command.params if isinstance(item, click.Option)]


# -- what is generated --------------------------------------------------------


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def commands_table() -> str:
    rows = []
    for name, command in COMMANDS.items():
        places = [
            item.make_metavar(click.Context(command))
            for item in command.params
            if isinstance(item, click.Argument)
        ]
        flags = ", ".join(f"`{max(o.opts, key=len)}`" for o in options(command))
        does = " ".join((command.help or "").split()).rstrip(".")
        usage = " ".join([name, *places]).replace("|", "\\|")
        rows.append((f"`{usage}`", does, flags))
    return markdown_table(("command", "does", "options"), rows)


def flags_of(variable: str) -> str:
    """The options that stand for a variable: their help names it."""
    found = {
        max(option.opts, key=len)
        for command in COMMANDS.values()
        for option in options(command)
        if f"({variable})" in (option.help or "")
    }
    return ", ".join(f"`{flag}`" for flag in sorted(found))


def default_of(name: str) -> str:
    value = getattr(pidispatch.Settings(), name)
    if name in ("db", "state_dir"):
        below = value.relative_to(pidispatch._data_dir())
        return f"`<user data dir>/pidispatch/{below}`"
    if value is None or value == ():
        return "unset"
    return f"`{int(value) if value is False else value}`"


def settings_table() -> str:
    rows = []
    for name, row in pidispatch.SETTINGS.items():
        flags = flags_of(row.variable)
        rows.append((f"`{row.variable}`", flags, default_of(name), row.doc))
    return markdown_table(("variable", "flag", "default", "meaning"), rows)


def providers_table() -> str:
    rows = [
        (f"`{row.name}`", f"`{row.key_variable}`", row.base_url, row.style)
        for row in pidispatch.PROVIDERS.values()
    ]
    return markdown_table(("provider", "key variable", "address", "style"), rows)


def overlay_list() -> str:
    return "\n".join(f"* `{name}`" for name in pidispatch.OVERLAY_FIELDS)


def checks_table() -> str:
    rows = [(f"`{name}`", what) for name, what, _ in verify_image.CHECKS]
    return markdown_table(("check", "the image must"), rows)


def capabilities_list() -> str:
    return ", ".join(f"`{name}`" for name in verify_image.CAPABILITIES)


#: Page, name of the generated part, and what writes it.
GENERATED: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("README.md", "commands", commands_table),
    ("docs/settings.md", "settings", settings_table),
    ("docs/settings.md", "providers", providers_table),
    ("docs/settings.md", "overlay", overlay_list),
    ("docs/job-image.md", "checks", checks_table),
    ("docs/job-image.md", "capabilities", capabilities_list),
)


@pytest.mark.parametrize(("page", "name", "make"), GENERATED)
def test_generated_parts_are_what_the_code_says(
    page: str, name: str, make: Callable[[], str]
) -> None:
    path = ROOT / page
    begin, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
    before, mark, rest = path.read_text("utf-8").partition(begin)
    assert mark, f"{page} has no part {name}"
    found, mark, after = rest.partition(end)
    assert mark, f"the part {name} of {page} has no end"
    if UPDATE:
        path.write_text(f"{before}{begin}{make()}\n{end}{after}", "utf-8")
    else:
        assert found == make() + "\n", "run `just docs`"


def schema_file(command: str) -> str:
    """`runs --picks` is in runs-picks.json."""
    return re.sub("[ -]+", "-", command)


@pytest.mark.parametrize("command", pidispatch.OUTPUTS)
def test_each_json_output_has_its_schema_in_the_package(command: str) -> None:
    named = COMMANDS[command.partition(" --")[0]]
    assert "--json" in {flag for o in options(named) for flag in o.opts}
    name = schema_file(command) + ".json"
    text = json.dumps(pidispatch.output_schema(command), indent=2) + "\n"
    if UPDATE:
        (ROOT / "docs/schemas").mkdir(exist_ok=True)
        (ROOT / "docs/schemas" / name).write_text(text, "utf-8")
    assert pidispatch.resource("docs", "schemas", name).read_text("utf-8") == text


def test_every_command_that_prints_json_has_a_schema_and_no_file_is_left_over() -> None:
    printing = {
        name
        for name, command in COMMANDS.items()
        if any("--json" in option.opts for option in options(command))
    }
    assert printing == {name.partition(" --")[0] for name in pidispatch.OUTPUTS}
    files = {path.stem for path in (ROOT / "docs/schemas").iterdir()}
    assert files == set(map(schema_file, pidispatch.OUTPUTS))


# -- what is written by hand --------------------------------------------------


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a page in that language, also those of list items."""
    fence = re.compile(rf"^( *)```{language}\n(.*?)^ *```", re.M | re.S)
    found = fence.findall(path.read_text("utf-8"))
    return [re.sub(f"^{indent}", "", block, flags=re.M) for indent, block in found]


SHELL = [
    (page.name, line)
    for page in PAGES
    for block in blocks(page, "sh")
    for line in re.split(r"\n|&& ", block)
    if line.startswith("pidispatch ")
]


@pytest.mark.parametrize(("page", "line"), SHELL)
def test_every_command_line_of_the_documents_can_be_typed(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    command: click.Command = pidispatch.main
    while isinstance(command, click.Group):
        name = words.pop(0)
        assert name in command.commands, f"{page}: no command {name}"
        command = command.commands[name]
    command.make_context(command.name, words)


def test_every_command_that_any_text_names_exists() -> None:
    known = {name.split(" ")[0] for name in COMMANDS} | {"--version"}
    texts = [
        *PAGES,
        ROOT / "pidispatch.py",
        ROOT / "verify_image.py",
        ROOT / "Justfile",
    ]
    texts += sorted((ROOT / "templates").rglob("*.j2"))
    named = {
        word
        for path in texts
        for word in re.findall(r"`pidispatch ([a-z-]+)", path.read_text("utf-8"))
    }
    assert named <= known


#: Options of other programs that the pages speak of.
FOREIGN = {
    "--bench-json",
    "--force-with-lease",
    "--internal",
    "--list",
    "--no-install-recommends",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_long_option_of_the_documents_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    text = re.sub(r"<!--|-->|^\|( ---)+.*", "", text, flags=re.M)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    known = {flag for c in COMMANDS.values() for o in options(c) for flag in o.opts}
    assert named - known - {"--version", "--help"} <= FOREIGN


def test_the_two_commands_of_a_newcomer_stand_first() -> None:
    first = blocks(README, "sh")[0].split("\n")
    assert first[:2] == [
        "pip install . && pidispatch demo",
        "pip install '.[test]' && pytest",
    ]


JSON = [(page.name, block) for page in PAGES for block in blocks(page, "json")]


def as_rules(value: Mapping[str, Any]) -> None:
    whole = value if "triggers" in value else {"triggers": [value]}
    Draft202012Validator(pidispatch.triggers_schema()).validate(whole)
    assert pidispatch.load_triggers(json.dumps(whole).encode(), "page")


@pytest.mark.parametrize(("page", "block"), JSON)
def test_every_json_example_is_accepted_by_what_it_is_an_example_of(
    page: str, block: str, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"  # the folder that an example names
    (notes / ".git").mkdir(parents=True)
    (notes / ".git/HEAD").write_text("ref: refs/heads/main\n")
    value = json.loads(block.replace("/home/me/notes", str(notes)))
    path = tmp_path / "example.json"
    path.write_text(block)
    if "triggers" in value or "on" in value:
        as_rules(value)
    elif "scopes" in value:
        Draft202012Validator(pidispatch.limits_schema()).validate(value)
        assert pidispatch.load_limits(block.encode(), page) != pidispatch.NO_LIMITS
    elif "providers" in value:
        pidispatch.load_settings({"PI_PROVIDERS_FILE": str(path)}, None)
    else:
        settings = pidispatch.load_settings({"PI_SETTINGS_FILE": str(path)}, None)
        assert pidispatch.with_overlay(settings) != settings


def test_the_readme_shows_the_smallest_replica_rule() -> None:
    example = {
        "on": {"type": "label", "any": ["pi:urgent"]},
        "run": {"kind": "github", "flow": "fix-issue", "replicas": 2},
    }
    assert example in [json.loads(block) for block in blocks(README, "json")]


def test_every_dependency_is_in_the_readme_with_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extra = project["optional-dependencies"]["github-app"]
    names = {re.split(r"[>=\[]", d)[0] for d in (*project["dependencies"], *extra)}
    section = README.read_text("utf-8").partition("## Dependencies")[2]
    section = section.partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w.-]+)` \| (.{20,}) \|$", section, re.M))
    assert set(rows) == names


def test_every_variable_that_a_page_names_is_a_setting() -> None:
    known = {row.variable for row in pidispatch.SETTINGS.values()}
    ours = re.compile(r"\b(?:PI|GITHUB|WEBHOOK|POLL|PANEL)_[A-Z_]+\b")
    inside = {"PI_VERSION"}  # a build argument of the image
    for page in PAGES:
        named = set(ours.findall(page.read_text("utf-8")))
        assert named - known <= inside, page.name


def test_every_test_that_a_page_cites_exists() -> None:
    source = "".join(path.read_text("utf-8") for path in (ROOT / "tests").glob("*.py"))
    defined = set(re.findall(r"def (test_\w+)\(", source))
    for page in PAGES:
        cited = re.findall(r"`(test_\w+)`", page.read_text("utf-8"))
        assert set(cited) <= defined, page.name
    assert len(re.findall(r"`test_", (ROOT / "docs/replicas.md").read_text())) > 15


def test_links_between_the_documents_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8")):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_exit_codes_of_the_readme_are_those_of_the_errors() -> None:
    text = README.read_text("utf-8").partition("## Exit codes")[2]
    assert re.findall(r"^\| (\d) \|", text.partition("\n## ")[0], re.M) == [
        "0",
        "1",
        "2",
    ]
    assert pidispatch.InfraError.exit_code == 1
    assert pidispatch.ConfigError.exit_code == 2


def test_the_readme_says_that_jobs_can_fork_since_the_image_declares_it() -> None:
    label = re.search(
        r"^ARG CAPABILITIES=(.*)$", (ROOT / "image/Dockerfile").read_text(), re.M
    )
    assert label
    assert "forkJoin" in label[1]
    assert "The job image brings `fork_join`" in README.read_text("utf-8")


def test_the_changelog_has_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"## [{pidispatch.__version__}]" in text


def test_the_justfile_is_the_table_of_contents() -> None:
    text = (ROOT / "Justfile").read_text("utf-8")
    recipes = set(re.findall(r"^([a-z]+)(?: [^:]*)?:", text, re.M))
    assert {"test", "lint", "types", "image", "demo", "bench", "docs"} <= recipes
