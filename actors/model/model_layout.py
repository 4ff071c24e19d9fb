"""Whether a model keeps the rows of a layout apart, before it is loaded: a tiny model of its architecture is asked."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from raysvc import hub
from raysvc.actors.model.tiny_vision import NAME as TINY_VISION

if TYPE_CHECKING:
    from raysvc.actors.model.row_isolation import Proof

# no causal model looks to the right, and rows of one line of `stream` may see each other
NOT_ASKED = ("padded_right", "stream")


def layout_proof(model: str, layout: str) -> Proof | None:
    """What the tiny model says, on a CPU; None where nobody can say before the model is loaded, or there is nothing to ask.

    Args:
        model: `tiny`, `tiny-vision`, a folder, or a hub name.
        layout: of the plan.
    """
    if layout in NOT_ASKED or model in ("tiny", TINY_VISION):
        return None
    config = _config_of(model)
    if config is None:
        return None
    import torch

    from raysvc.actors.model.row_isolation import logits_of, prove
    from raysvc.actors.model.tiny_twin import tiny_twin

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other after each of thousands of tiny operations
    try:
        twin = tiny_twin(config)
        return None if twin is None else prove(logits_of(twin), twin, layout)
    finally:
        torch.set_num_threads(threads)


def _config_of(model: str) -> Any:
    """None where this machine does not see it; the workers may."""
    from transformers import AutoConfig

    folder = os.path.expanduser(model)
    if os.path.isabs(folder) and not os.path.isdir(folder):
        return None
    try:
        with hub.answering():
            return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError):
        return None
