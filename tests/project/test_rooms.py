"""Rooms a newcomer can read: no circles, no name for two things, no crowded folder, and a map that is true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from .test_layout import ROOT, code_files, imports_of


def module_of(path: Path) -> str:
    relative = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    name = relative if relative.startswith("raysvc") else f"raysvc.{relative}"
    return name.removesuffix(".__init__")


def import_graph() -> dict[str, set[str]]:
    """Module -> modules of ours that it imports anywhere: lazily or for types alone counts too."""
    modules = {module_of(path): path for path in code_files()}
    return {
        name: {other for other in imports_of(path) if other in modules and other not in (name, "raysvc")}
        for name, path in modules.items()
    }


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that reach each other (Tarjan 1972, by removing what has no way on)."""
    left = {name: set(targets) for name, targets in graph.items()}
    while True:
        ends = {name for name, targets in left.items() if not targets & set(left)}
        starts = set(left) - {target for targets in left.values() for target in targets}
        if not ends | starts:
            return [sorted(left)] if left else []
        left = {name: targets for name, targets in left.items() if name not in ends | starts}


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert circles(import_graph()) == []


def test_no_module_name_and_no_public_class_name_stands_for_two_things() -> None:
    modules: dict[str, list[str]] = {}
    classes: dict[str, list[str]] = {}
    for path in code_files():
        if path.stem != "__init__" and path.parent.name != "cli":  # a command may be named like what it calls
            modules.setdefault(path.stem, []).append(module_of(path))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.setdefault(node.name, []).append(module_of(path))
    assert {name: found for name, found in modules.items() if len(found) > 1} == {}
    assert {name: found for name, found in classes.items() if len(found) > 1} == {}


def test_no_folder_holds_more_files_than_one_reads_at_a_glance() -> None:
    folders: dict[str, int] = {}
    for path in code_files():
        if path.stem != "__init__":
            folder = path.parent.relative_to(ROOT).as_posix()
            folders[folder] = folders.get(folder, 0) + 1
    assert {folder: count for folder, count in folders.items() if count > 16 and folder != "raysvc/cli"} == {}
    assert folders["raysvc"] <= 12


BELOW = {  # room of the picture -> what it may import, as the picture says
    "COMMANDS": {"RUNS", "SERVICE", "PIPELINES", "ACTORS", "CORE"},
    "RUNS": {"SERVICE", "PIPELINES", "ACTORS", "CORE"},
    "SERVICE": {"PIPELINES", "ACTORS", "CORE"},
    "PIPELINES": {"CORE"},
    "ACTORS": {"CORE"},
    "CORE": set(),
}


def picture() -> dict[str, str]:
    """Module or folder -> its room, as docs/architecture.md draws it."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    drawn, rooms, room = page.split("```text\n")[1].split("```")[0], {}, ""
    for line in drawn.splitlines():
        left = re.split(r"  imports|  each imports", line)[0]
        for word in re.findall(r"[A-Za-z_.]+", left):
            if word.isupper():
                room = word
            else:
                assert word not in rooms, f"{word} is drawn twice"
                rooms[word] = room
    return rooms


def test_the_picture_of_the_rooms_has_every_module_and_every_arrow() -> None:
    rooms, graph, arrows = picture(), import_graph(), set()

    def room_of(module: str) -> str:
        name = module.removeprefix("raysvc").removeprefix(".")
        while name and name not in rooms:
            name = name.rpartition(".")[0]
        return rooms[name] if name else "COMMANDS"  # the package itself names what users call

    for module, targets in graph.items():
        for target in targets:
            here, there = room_of(module), room_of(target)
            assert here == there or there in BELOW[here], f"{module} imports {target}"
            arrows.add((here, there))
    assert set(rooms.values()) == BELOW.keys()
    assert {(here, there) for here, below in BELOW.items() for there in below} <= arrows, (
        "an arrow without an import"
    )
    drawn_alone = [
        name for name in rooms if not any(f"{one}.".startswith(f"raysvc.{name}.") for one in graph)
    ]
    assert not drawn_alone, "the picture has what is not there"
    top = {one.split(".")[1] for one in graph if "." in one} - {name.split(".")[0] for name in rooms}
    assert not top, "the picture lacks a module"


@pytest.mark.parametrize("page", ["docs/architecture.md", "AGENTS.md"])
def test_every_file_that_a_map_names_exists(page: str) -> None:
    named = re.findall(r"`((?:raysvc|actors|pipelines|tests|docs)/[\w/.]+)`", (ROOT / page).read_text())
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_command_of_agents_md_is_one_that_ci_runs() -> None:
    commands = re.findall(r"^\$ make ([\w-]+)", (ROOT / "AGENTS.md").read_text(), re.MULTILINE)
    ci = (ROOT / ".ci" / "run").read_text()
    assert commands
    assert [name for name in commands if f"make {name}" not in ci] == []


def raises_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the body raises something of its own; functions inside it do not count."""
    left: list[ast.AST] = list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        if isinstance(node, ast.Raise) and node.exc is not None:
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            left += ast.iter_child_nodes(node)
    return False


def test_a_public_function_that_raises_says_so() -> None:
    silent = []
    for path in code_files():
        if path.parent.name == "cli":  # its docstrings are help pages
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                text = (ast.get_docstring(node) or "").lower()
                if raises_in(node) and "raise" not in text:
                    silent.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert silent == []


def kinds_of(*roots: str) -> set[str]:
    """The classes of these names, and all that derive from them."""
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for path in code_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    found = set(roots)
    while more := {name for name, its in bases.items() if its & found} - found:
        found |= more
    return found


def asked_for(tree: ast.AST, kinds: set[str]) -> list[str]:
    """Kinds that `isinstance` or a `case` asks for."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "isinstance"]
    asked = [call.args[1] for call in calls] + [
        n.cls for n in ast.walk(tree) if isinstance(n, ast.MatchClass)
    ]
    names = [one for node in asked for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute)]
    return [name for one in names if (name := ast.unparse(one).rpartition(".")[2]) in kinds]


def test_kinds_of_entries_and_of_orders_are_asked_for_only_where_an_entry_is_opened() -> None:
    specs = ("GrowingSpec", "FollowedSpec", "AddedSpec")
    kinds = kinds_of("Entry", "GroupOrder", "HeldRows", "SlicedRows", "WindowedSource", *specs)
    assert {"FollowedEntry", "AddedEntry", "Mixture", "WindowOrder"} <= kinds
    assert asked_for(ast.parse("isinstance(a, (x.Entry, int))\nmatch a:\n case Mixture(): 1"), kinds) == [
        "Entry",
        "Mixture",
    ]
    found = {
        module_of(path): names
        for path in code_files()
        if (names := asked_for(ast.parse(path.read_text()), kinds))
    }
    assert found == {"raysvc.cache.growing.coming_entry": ["AddedSpec", "FollowedSpec"]}
