"""The reference trainer is behind a wall: nothing of the service imports it, and who attaches loads none of it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAINER = ("raysvc.training", "raysvc.actors.worker", "raysvc.actors.model", "raysvc.actors.dispatch")
SERVICE = (
    "actors/server",
    "actors/rollouts",
    "actors/launch.py",
    "actors/placement.py",
    "pipelines",
    *(f"raysvc/{room}" for room in ("cache", "chat", "client", "collate", "feedback", "job", "media")),
    *(f"raysvc/{room}" for room in ("plan", "rl", "trackers")),
)
ATTACHED = {  # room -> modules of ours that a trainer loads before it calls `attach`; all of the room where it is "*"
    "": "errors metrics ragged redact row_ids team",
    "actors": "server server.spec versions",
    "cache": "growing growing.coming",
    "client": "*",
    "collate": "info shard",
    "feedback": "driver_feedback request",
    "job": "*",
    "media": "processor_spec",
    "nodes": "objects",
    "plan": "fact_table schedule",
    "trackers": "stalls",
}
UPPER = {"cache": ("media",), "feedback": ("client",)}  # room -> rooms that it imports nothing of


def files_of(place: str) -> list[Path]:
    found = ROOT / place
    return [found] if found.is_file() else sorted(found.rglob("*.py"))


def imported_by(path: Path) -> set[str]:
    """Modules that a file imports anywhere, also inside functions, and for types."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def of_the_trainer(names: set[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(tuple(f"{one}." for one in TRAINER)))


def loaded_after(code: str) -> set[str]:
    """All modules that a fresh process has loaded after it ran `code`."""
    program = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("place", SERVICE)
def test_no_file_of_the_service_names_a_module_of_the_trainer(place: str) -> None:
    files = files_of(place)
    assert files
    assert {path.name: of_the_trainer(imported_by(path)) for path in files} == {
        path.name: [] for path in files
    }


def test_the_service_loads_without_the_trainer() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for place in SERVICE
        for path in files_of(place)
        if path.stem != "__init__"
    ]
    names = [name if name.startswith("raysvc.") else f"raysvc.{name}" for name in modules]
    own = [
        name for name in names if not name.startswith("raysvc.trackers.")
    ]  # these load a tracker's library
    loaded = loaded_after(f"import importlib\nfor name in {own!r}: importlib.import_module(name)")
    assert set(own) <= loaded
    assert of_the_trainer(loaded) == []


def test_who_attaches_loads_the_modules_that_are_listed_and_neither_ray_nor_torch() -> None:
    loaded = loaded_after("import raysvc; raysvc.attach")
    found: dict[str, set[str]] = {}
    for name in (one.removeprefix("raysvc.") for one in loaded if one.startswith("raysvc.")):
        is_room = (ROOT / "raysvc" / name.partition(".")[0]).is_dir()
        room, _, module = name.partition(".") if is_room else ("", "", name)
        found.setdefault(room, set()).update([module] if module else [])
    assert found.keys() == ATTACHED.keys()
    for room, modules in found.items():
        assert ATTACHED[room] == "*" or modules == set(ATTACHED[room].split()), room
    assert not loaded & {"ray", "torch", "transformers", "datasets"}


@pytest.mark.parametrize("room", UPPER)
def test_a_lower_room_is_handed_what_it_needs_of_an_upper_one(room: str) -> None:
    upper = tuple(f"raysvc.{one}" for one in UPPER[room])
    files = files_of(f"raysvc/{room}")
    assert files
    assert {
        path.name: names
        for path in files
        if (names := [one for one in imported_by(path) if one.startswith(upper)])
    } == {}


KINDS_OF_ENTRIES = {"Entry", "GrowingEntry", "FollowedEntry", "Rows"}
KINDS_OF_ORDERS = {
    "Mixture",
    "Order",
    "WindowOrder",
    "FollowedOrder",
    "CustomOrder",
    "HeldRows",
    "SlicedRows",
    "WindowedSource",
}


def test_nobody_asks_an_entry_or_an_order_for_its_class() -> None:
    """What all of them answer is a method; a test of the class is a second path."""
    of_entries, of_orders = [], []
    for path in [one for room in ("raysvc", "actors", "pipelines") for one in files_of(room)]:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "isinstance"
            ):
                asked = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                of_entries += [f"{path}:{node.lineno}"] * bool(asked & KINDS_OF_ENTRIES)
                of_orders += [f"{path}:{node.lineno}"] * bool(asked & KINDS_OF_ORDERS)
    assert of_entries == []
    assert of_orders == []
