"""Tells what has become of a group, and which groups a step may be waiting for. Pure: no disk, the clock is an argument."""

from __future__ import annotations

from collections.abc import Container

from raysvc.actors.rollouts.group_pool import Key, Pool
from raysvc.rl.prompt_state import LOST, AwaitedPrompt, PromptState


def state_of(
    pool: Pool,
    key: Key,
    frontier: int,
    now_s: float,
    *,
    gone: Container[Key],
    dropped: Container[Key],
) -> PromptState:
    """Say where a prompt stands.

    Args:
        frontier: steps below are committed.
        gone: groups in no step that will never be in one.
        dropped: those of them that a filter threw away.
    """
    if (lost := _lost(pool, key, gone, dropped)) is not None:
        return PromptState(lost)
    uid, version, step = key[0], pool.versions.get(key), pool.step_of.get(key)
    owner = pool.reserved.get(uid) if version is None else pool.owners.get(key)
    held_s = now_s - pool.since.get(uid, now_s)
    if version is None:
        return PromptState("unknown") if owner is None else PromptState("reserved", owner, held_s)
    if key in pool.waiting:
        return PromptState("open" if owner else "waiting", owner, held_s, None, version)
    if step is not None:
        return PromptState("trained" if step < frontier else "planned", None, None, step, version)
    return PromptState("ready", None, None, None, version)


def _lost(pool: Pool, key: Key, gone: Container[Key], dropped: Container[Key]) -> str | None:
    if key in pool.quarantined:
        return "quarantined"
    if key in pool.forgotten:
        return "forgotten"
    if key in gone:
        return "dropped" if key in dropped else "evicted"
    return None


def verdict(state: PromptState) -> str:
    """Returns what a producer hears of a group that was put before."""
    return state.state if state.state in LOST else "known"


def under_way(pool: Pool, now_s: float) -> tuple[AwaitedPrompt, ...]:
    """Prompts that are reserved, open or waiting for late columns, the oldest first."""
    found = [(uid, "reserved", owner) for uid, owner in pool.reserved.items()]
    for key in pool.waiting:
        owner = pool.owners.get(key)
        found.append((key[0], "open" if owner else "waiting", owner or ""))
    aged = [
        AwaitedPrompt(uid, state, owner, now_s - pool.since.get(uid, now_s)) for uid, state, owner in found
    ]
    return tuple(sorted(aged, key=lambda each: -each.held_s))
