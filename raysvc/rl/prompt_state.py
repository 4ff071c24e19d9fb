"""Says where a prompt stands with a rollout server."""

from __future__ import annotations

from typing import NamedTuple

LOST = ("evicted", "dropped", "quarantined")  # put once, and never trained under that attempt


class PromptState(NamedTuple):
    """Says what has become of a prompt, under one attempt.

    Attributes:
        state: `unknown`: not reserved and not put. `reserved`: a producer works on it. `open`: more rows will be put.
            `waiting`: for late columns. `ready`: for a step. `planned`: in a step that is not committed. `trained`: in one
            that is. `evicted`, `dropped`, `quarantined`: put, and never trained; `forgotten`: its step was forgotten.
        owner: the producer of one that is reserved or open.
        held_s: seconds since it was reserved, or since its first row, or since the server started; None: neither.
        step: of one that is planned or trained.
        weight_version: of the weights that sampled it; None before it is put.
    """

    state: str
    owner: str | None = None
    held_s: float | None = None
    step: int | None = None
    weight_version: int | None = None


class AwaitedPrompt(NamedTuple):
    """A prompt that a step may be waiting for.

    Attributes:
        uid: of the prompt.
        state: `reserved`, `open` or `waiting`.
        owner: its producer; "": nobody in particular.
        held_s: for how long.
    """

    uid: str
    state: str
    owner: str
    held_s: float
