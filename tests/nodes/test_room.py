"""Room by resources and labels: decided with Ray's own answers, told in one line."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from raysvc.errors import ConfigError
from raysvc.nodes import room
from raysvc.nodes.room import RoomWatch, living_nodes, no_room, nodes_with, refuse_what_never_fits


def node(name: str, labels: dict[str, str], **resources: float) -> dict[str, Any]:
    return {
        "NodeID": name,
        "Alive": True,
        "NodeManagerAddress": name,
        "Labels": labels,
        "Resources": {"CPU": 2.0, **resources},
    }


@pytest.fixture
def zones(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """Three nodes in two zones; Ray's answers are those of a selector of one value. What Ray was asked."""
    nodes = [node("a1", {"zone": "a"}), node("a2", {"zone": "a"}), node("b1", {"zone": "b"}, GPU=1.0)]
    zone_of = {one["NodeID"]: one["Labels"]["zone"] for one in nodes}
    asked: list[list[dict[str, str]]] = []

    def feasible(need: dict[str, float], selectors: list[dict[str, str]]) -> list[bool]:
        asked.append(selectors)
        return [zone_of[one[room.NODE_ID]] == one["zone"] for one in selectors]

    monkeypatch.setattr(room, "living_nodes", lambda: nodes)
    monkeypatch.setattr(room, "feasible", feasible)
    return asked


def test_ray_is_asked_once_for_nodes_of_the_same_labels(zones: list[list[dict[str, str]]]) -> None:
    fit = nodes_with({"zone": "a"}, room.living_nodes())
    assert [one["NodeID"] for one in fit] == ["a1", "a2"]
    assert [[one[room.NODE_ID] for one in each] for each in zones] == [["a1", "b1"]]


def test_labels_and_amounts_that_no_node_has_are_named(zones: Any) -> None:
    assert no_room([{"CPU": 1}], {"zone": "mars"}) == "no node has zone=mars; nodes have zone=a, zone=b"
    assert no_room([{"CPU": 2}] * 3) is None
    assert no_room([{"GPU": 1}], {"zone": "a"}) == "needs 1 GPU, they have 0, counting nodes with zone=a"
    assert no_room([{"GPU": 1}], {"zone": "b"}) is None
    with pytest.raises(ConfigError, match=r"workers: no node has zone=mars.*wait_for_nodes"):
        refuse_what_never_fits("workers", [{"CPU": 1}], False, {"zone": "mars"})


def test_a_wait_says_again_what_it_lacks_and_what_was_asked_for(
    zones: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(room, "SAY_EVERY_S", 0.0)
    said: list[str] = []
    there: list[set[str]] = []
    seen = lambda nodes: there.append(set(nodes))  # noqa: E731
    watch = RoomWatch("workers", {"CPU": 1}, {"zone": "mars"}, said.append, seen)
    watch.check()
    watch.check()

    def logged() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.name == room.__name__]

    assert len(logged()) == 1, "the log says it less often"
    monkeypatch.setattr(room, "LOG_EVERY_S", 0.0)
    watch.check()
    text = "no node has zone=mars; nodes have zone=a, zone=b (asked for 1 CPU with zone=mars)"
    assert said == [f"waiting for more nodes: {text}"] * 3
    assert [message.endswith(text) for message in logged()] == [True, True]
    nodes = [*room.living_nodes(), node("m", {"zone": "mars"})]
    monkeypatch.setattr(room, "living_nodes", lambda: nodes)
    monkeypatch.setattr(
        room, "feasible", lambda need, selectors: [one[room.NODE_ID] == "m" for one in selectors]
    )
    for _ in range(3):
        watch.check()
    assert (len(said), there) == (3, [set()]), "the places are tried once, when a node has come"
    before = {one["NodeID"] for one in nodes}
    nodes.append(node("late", {"zone": "mars"}))
    monkeypatch.setattr(room, "no_room", lambda bundles, selector: None)
    for _ in range(3):
        watch.check()
    assert (len(said), there) == (3, [set(), before]), "and once on those that come later"
    nodes.pop()
    watch.check()
    assert len(there) == 2, "a node that goes is no news"
    missing = iter(["needs 1 CPU, the cluster has 0", "needs 1 CPU, the cluster has 0", None])
    monkeypatch.setattr(room, "no_room", lambda bundles, selector: next(missing))
    nodes.pop()
    for _ in range(4):
        watch.check()
    assert (
        said[3:]
        == ["waiting for more nodes: needs 1 CPU, the cluster has 0 (asked for 1 CPU with zone=mars)"] * 2
    ), "unless it leaves no room"
    assert len(there) == 2


def test_a_node_of_ray_is_asked_by_its_own_labels(ray_session: None) -> None:
    nodes = living_nodes()
    assert nodes_with({"nowhere": "!x"}, nodes) == nodes, "a node without the label is not x"
    assert nodes_with({"nowhere": "x"}, nodes) == []
    assert nodes_with({"nowhere": "in(x, y)"}, nodes) == []
    assert nodes_with({"nowhere": "!in(x, y)"}, nodes) == nodes
    assert room.has_free(nodes[0]["NodeID"], {"CPU": 1.0}, 5.0)
    assert not room.has_free(nodes[0]["NodeID"], {"CPU": 1000.0}, 0.1)
