"""Where memory is: what a call needs is there, nothing of a neighbour is, and no move is asked for twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.actors.dispatch.residency import BOTH, NEEDS, Move, Part, Residency

NAMES = ("policy", "ref", "critic", "alone")
COLOCATED = [{"policy", "ref", "critic"}]


def apply(devices: dict[str, set[Part]], moves: list[Move]) -> None:
    """Do the moves; each has to change something, and there is room for one group."""
    for group, part, on_device in moves:
        if on_device:
            assert part not in devices[group], "a redundant move to the device"
            assert not any(devices[other] for other in NAMES[:3] if other != group), "no room"
            devices[group].add(part)
        else:
            assert part in devices[group], "a redundant move to the host"
            devices[group].discard(part)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(["init", *NEEDS])), min_size=1, max_size=30)
)
def test_any_series_of_calls_finds_its_memory_and_makes_no_redundant_move(
    calls: list[tuple[str, str]],
) -> None:
    memory = Residency(COLOCATED)
    devices: dict[str, set[Part]] = {name: set() for name in NAMES}
    built: set[str] = set()
    for group, call in calls:
        if call == "init" or group not in built:
            apply(devices, memory.before_init(group))
            devices[group] = set(BOTH)
            memory.built(group)
            built.add(group)
            continue
        moves = memory.moves(group, call)
        apply(devices, moves)
        assert devices[group] >= set(NEEDS[call])
        assert memory.moves(group, call) == []
        if NEEDS[call] and group != "alone":
            assert not any(devices[other] for other in NAMES[:3] if other != group)
        assert {name: set(memory.on_device(name)) for name in built} == {
            name: devices[name] for name in built
        }
    assert devices["alone"] in (set(), set(BOTH))


def test_an_rl_step_of_two_colocated_groups_moves_what_it_must() -> None:
    memory = Residency([{"policy", "ref"}])
    memory.built("ref")
    assert memory.before_init("policy") == [Move("ref", "optimizer", False), Move("ref", "model", False)]
    memory.built("policy")
    moves = []
    for group, call in [
        ("policy", "forward"),
        ("ref", "forward"),
        ("policy", "forward_backward"),
        ("policy", "forward_backward"),
        ("policy", "optim_step"),
        ("policy", "set_lr"),
        ("policy", "save_checkpoint"),
    ]:
        moves.append(memory.moves(group, call))
    assert moves == [
        [],
        [Move("policy", "optimizer", False), Move("policy", "model", False), Move("ref", "model", True)],
        [Move("ref", "model", False), Move("policy", "model", True)],
        [],
        [Move("policy", "optimizer", True)],
        [],
        [],
    ]


def test_after_a_failure_a_call_moves_again_what_it_needs() -> None:
    memory = Residency([{"policy", "ref"}])
    memory.built("policy")
    memory.forget("policy")
    assert memory.moves("policy", "forward") == [Move("policy", "model", True)]
    assert memory.moves("policy", "forward") == []
