"""A model as `transformers` reads it: from live ranks, or from a checkpoint without any rank.

Always true:
- weights keep their dtype, and names are those of the model inside of `TokenModel`;
- tied weights are written once;
- reading a checkpoint needs neither Ray, a process group nor the hub: the checkpoint holds the model's `config.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysvc.errors import StateMismatch

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
INSIDE = "lm."  # where TokenModel keeps it
VALUES = "score"  # head of a critic


def save_config(model: torch.nn.Module, folder: Path) -> None:
    """Write the configuration of the model inside of a (spread) `TokenModel`."""
    from raysvc.actors.model.tiny_lm import TinyLM

    lm: Any = getattr(model, "module", model).lm
    if isinstance(lm, TinyLM):
        lm.save_config(folder)
        return
    lm.config.save_pretrained(folder)
    if lm.can_generate():
        lm.generation_config.save_pretrained(folder)


def save_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a whole model; `weights` as `checkpoint.full_weights` gives them."""
    from raysvc.actors.model.tiny_lm import TinyLM

    lm: Any = getattr(model, "module", model).lm
    if isinstance(lm, TinyLM):
        with _disk_failures():
            lm.save_pretrained(folder, _own_names(weights))
        return
    with _no_bars():
        lm.save_pretrained(folder, state_dict=_own_names(weights))


def export_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Write what a checkpoint of any number of ranks holds.

    Raises:
        StateMismatch: the checkpoint has no configuration of a model, or weights of another one.
        CheckpointDamaged: a file of it is not what was written.
    """
    import torch
    from transformers import AutoConfig, AutoModelForTokenClassification, GenerationConfig

    from raysvc.actors.model.load_model import auto_class

    weights = _own_names(read_weights(checkpoint))
    if not (checkpoint / CONFIG).exists():
        remedy = "export a checkpoint that raysvc train wrote"
        raise StateMismatch(str(checkpoint), f"holds no {CONFIG} of a model", remedy)
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(checkpoint)
        kind = AutoModelForTokenClassification if f"{VALUES}.weight" in weights else auto_class(config)
        lm = kind.from_config(config)
    found = lm.load_state_dict(weights, strict=False, assign=True)
    lm.tie_weights()
    empty = sorted(name for name, value in lm.named_parameters() if value.is_meta)
    if empty or found.unexpected_keys:
        differ = ", ".join([*empty, *found.unexpected_keys][:3])
        raise StateMismatch(str(checkpoint), f"its weights are not of its {CONFIG}: {differ}", "train again")
    if (checkpoint / "generation_config.json").exists():
        lm.generation_config = GenerationConfig.from_pretrained(checkpoint)
    with _no_bars():
        lm.save_pretrained(folder)


@contextmanager
def _disk_failures() -> Iterator[None]:
    """Returns what `safetensors` says of a full disk is an OSError."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without the progress bars of `transformers`, which it writes to files and logs too."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with _disk_failures():
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The whole model of a checkpoint in host memory, put together from the shares of all ranks.

    Raises:
        CheckpointDamaged: a file that holds a part of it, or its configuration, is not what was written.
    """
    from raysvc.actors.model.saved_state import SavedState

    with SavedState(checkpoint) as saved:
        return {name: saved.whole("model", name) for name in saved.names("model")}


def _own_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(INSIDE): weight for name, weight in weights.items()}
