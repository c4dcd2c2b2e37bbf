"""The module can be walked: its sections in order, nothing used before it stands."""

from __future__ import annotations

import ast
import re
import statistics
import symtable
from collections.abc import Iterator
from functools import cache

import pytest
from conftest import ROOT

SOURCE = (ROOT / "pidispatch.py").read_text("utf-8")
BANNER = "# " + "=" * 77
FunctionDef = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree() -> ast.Module:
    return ast.parse(SOURCE)


@cache
def sections() -> dict[str, int]:
    """The first line of each section, by its banner."""
    lines = SOURCE.split("\n")
    return {
        lines[n].removeprefix("# "): n + 1
        for n in range(1, len(lines))
        if lines[n - 1] == BANNER and re.fullmatch("# [a-z]+", lines[n])
    }


def section_of(line: int) -> str:
    above = [name for name, first in sections().items() if first <= line]
    return above[-1] if above else "head"


def bound(node: ast.stmt) -> Iterator[str]:
    """The module-level names that a statement makes."""
    if isinstance(node, FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    yield name.id


def definitions() -> Iterator[tuple[str, int]]:
    for node in tree().body:
        for name in bound(node):
            yield name, node.lineno


def test_the_docstring_maps_the_sections_in_their_order() -> None:
    docstring = ast.get_docstring(tree()) or ""
    mapped = re.findall(r"^    ([a-z]+) {2,}", docstring, re.M)
    assert mapped == list(sections())
    assert len(mapped) == 15


def test_every_section_opens_with_what_it_is_for() -> None:
    lines = SOURCE.split("\n")
    for name, first in sections().items():
        assert lines[first] == "#", name
        assert re.match("# [A-Z]", lines[first + 1]), name


def test_no_name_is_defined_twice() -> None:
    seen: dict[str, int] = {}
    for name, line in definitions():
        assert name not in seen, f"{name}: lines {seen[name]} and {line}"
        seen[name] = line
    for node in tree().body:
        if isinstance(node, ast.ClassDef):
            names = [n for part in node.body for n in bound(part)]
            assert len(names) == len(set(names)), node.name


@pytest.mark.parametrize(
    "file", ["pidispatch.py", "verify_image.py", "image/runner.py", "image/gate.py"]
)
def test_functions_are_short(file: str) -> None:
    """None above 60 lines that is not a table; the usual one a few lines long."""
    parsed = ast.parse((ROOT / file).read_text("utf-8"))
    sizes = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(parsed)
        if isinstance(node, FunctionDef)
    }
    assert {name: n for name, n in sizes.items() if n > 60} == {}
    assert statistics.median(sizes.values()) < 15


def global_names(table: symtable.SymbolTable) -> Iterator[tuple[str, int]]:
    """Names that a scope and those inside it look up in the module."""
    for symbol in table.get_symbols():
        if symbol.is_referenced() and symbol.is_global():
            yield symbol.get_name(), table.get_lineno()
    for inner in table.get_children():
        yield from global_names(inner)


#: Uses of a name from a section below, with the reason for each.
FORWARD: dict[tuple[str, str], str] = {}


def test_a_section_uses_only_what_stands_above_it() -> None:
    order = list(sections())
    where = {name: section_of(line) for name, line in definitions()}
    found = {
        (section_of(line), name)
        for scope in symtable.symtable(SOURCE, "pidispatch.py", "exec").get_children()
        for name, line in global_names(scope)
        if where.get(name, "head") in order
        and section_of(line) in order
        and order.index(where[name]) > order.index(section_of(line))
    }
    assert found == set(FORWARD)


def test_nothing_is_used_at_import_before_it_is_defined() -> None:
    """Decorators, defaults, bases, tables: what runs while the module is read."""
    lines = dict(definitions())

    def at_import(node: ast.AST) -> Iterator[ast.Name]:
        if isinstance(node, ast.Lambda):
            return
        parts: list[ast.AST | None]
        if isinstance(node, FunctionDef):
            parts = [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.value]
        else:
            parts = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node
        for part in parts:
            if part is not None:
                yield from at_import(part)

    early = [
        (name.id, name.lineno)
        for node in tree().body
        for name in at_import(node)
        if name.lineno < lines.get(name.id, 0)
    ]
    assert early == []


#: What each of these sections must not know (00-map), by the modules it imports
#: and the sections it uses.
IGNORANT = {
    "identity": ("sqlite3", "requests", "docker", "socket", "subprocess"),
    "triggers": ("sqlite3", "requests", "docker", "socket"),
    "limits": ("sqlite3", "requests", "docker", "socket"),
    "store": ("requests", "docker", "socket"),
    "prompts": ("sqlite3", "requests", "docker", "socket"),
    "box": ("sqlite3",),
    "publish": ("sqlite3", "docker"),
    "intake": ("docker",),
    "cli": ("sqlite3", "requests", "docker", "socket"),
}


def test_sections_import_nothing_that_they_should_not_know() -> None:
    for node in ast.walk(tree()):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            section = section_of(node.lineno)
            for name in names:
                assert name.split(".")[0] not in IGNORANT.get(section, ()), (
                    f"{section} imports {name} in line {node.lineno}"
                )


def test_the_demo_is_imported_by_its_command_alone() -> None:
    imports = [
        node.lineno
        for node in ast.walk(tree())
        if isinstance(node, ast.Import)
        and any(alias.name == "pidispatch_demo" for alias in node.names)
    ]
    demo = next(
        node
        for node in tree().body
        if isinstance(node, FunctionDef) and node.name == "demo"
    )
    assert all(demo.lineno < line <= (demo.end_lineno or 0) for line in imports)
    assert len(imports) == 1


@pytest.mark.parametrize("file", ["runner.py", "gate.py"])
def test_what_runs_in_the_box_needs_only_the_standard_library(file: str) -> None:
    import sys

    parsed = ast.parse((ROOT / "image" / file).read_text("utf-8"))
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            assert name.split(".")[0] in sys.stdlib_module_names, name
