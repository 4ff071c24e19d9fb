"""Decides before a model is loaded whether it keeps the rows of a layout apart: a tiny model of its architecture is asked, and its configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysvc import hub
from raysvc.actors.model.load_model import read_config
from raysvc.actors.model.shared_scaling import SharedScaling, shared_scaling
from raysvc.actors.model.tiny_vision import NAME as TINY_VISION
from raysvc.errors import ConfigError

if TYPE_CHECKING:
    from raysvc.actors.model.row_isolation import Proof

# no causal model looks to the right, and rows of one line of `stream` may see each other
NOT_ASKED = ("padded_right", "stream")


def layout_proof(model: str, layout: str) -> Proof | None:
    """Returns what the tiny model says, on a CPU; None where nobody can say before the model is loaded, or there is nothing to ask.

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


def scaling_of(model: str) -> SharedScaling | None:
    """Returns how the model scales positions by the longest row of a micro-batch; None if it does not, or if that
    cannot be told here.
    """
    if model in ("tiny", TINY_VISION) or _says_no_scaling(model):
        return None
    config = _config_of(model)
    return None if config is None else shared_scaling(config)


def _says_no_scaling(model: str) -> bool:
    """Returns whether the file says so without `transformers`, whose import takes a second."""
    try:
        text = (Path(model).expanduser() / "config.json").read_text()
    except (OSError, ValueError):
        return False
    return not any(kind in text for kind in ("longrope", "dynamic"))


def _config_of(model: str) -> Any:
    """None where this machine does not see it, or cannot read it; a worker says why."""
    folder = os.path.expanduser(model)
    if os.path.isabs(folder) and not os.path.isdir(folder):
        return None
    try:
        with hub.answering():
            return read_config(model)
    except ConfigError:
        return None
