"""What is assumed of Ray: how it tells whether a node could hold something, and which nodes a selector means."""

from __future__ import annotations

import time
from typing import Any


def said_of(need: dict[str, float], selector: dict[str, str]) -> str:
    """State of a placement group, once Ray has looked at it."""
    from ray.util import placement_group, placement_group_table, remove_placement_group

    group = placement_group([need], bundle_label_selector=[selector])
    try:
        facts: dict[str, Any] = {}
        until = time.monotonic() + 60
        while time.monotonic() < until:
            facts = placement_group_table(group)
            if facts["state"] == "CREATED" or facts["stats"]["scheduling_state"] not in ("QUEUED", "UNKNOWN"):
                break
            time.sleep(0.005)
        return "CREATED" if facts["state"] == "CREATED" else str(facts["stats"]["scheduling_state"])
    finally:
        remove_placement_group(group)


def test_a_placement_group_tells_what_no_node_can_ever_hold_from_what_none_holds_now(
    ray_session: None,
) -> None:
    """`placement_group_table` of Ray tells INFEASIBLE from NO_RESOURCES, by resources and by labels."""
    import ray
    from ray.util import placement_group, remove_placement_group

    node = ray.nodes()[0]["NodeID"]
    assert said_of({"memory": 1.0}, {"ray.io/node-id": node}) == "CREATED"
    assert said_of({"CPU": 1000.0}, {}) == "INFEASIBLE"
    assert said_of({"memory": 1.0}, {"zone": "mars"}) == "INFEASIBLE"
    total = ray.nodes()[0]["Resources"]["CPU"]
    all_of_it = placement_group([{"CPU": total}])
    ray.get(all_of_it.ready(), timeout=100)
    try:
        assert said_of({"CPU": total}, {"ray.io/node-id": node}) == "NO_RESOURCES"
    finally:
        remove_placement_group(all_of_it)


def test_every_node_has_its_id_among_its_labels(ray_session: None) -> None:
    """`ray.nodes` shows labels, and `ray.io/node-id` is one of each node."""
    import ray

    assert [node["Labels"]["ray.io/node-id"] for node in ray.nodes()] == [
        node["NodeID"] for node in ray.nodes()
    ]


def test_a_handle_by_name_is_equal_to_the_one_that_keeps_the_actor_alive_and_keeps_nothing_alive(
    ray_session: None,
) -> None:
    """So who serves a running name again in the same process gets the first handle (`raysvc.actors.launch`)."""
    import ray

    class Idle:
        def ping(self) -> int:
            return 1

    def by_name() -> Any:
        return ray.get_actor("assumed", namespace="assumptions")

    actor = ray.remote(Idle).options(name="assumed", namespace="assumptions", num_cpus=0)
    owned = actor.remote()
    assert ray.get(owned.ping.remote()) == 1
    named = by_name()
    assert named == owned
    del owned
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            by_name()
        except ValueError:
            return
        time.sleep(0.05)
    raise AssertionError("it lives, though only a handle by name is left")
