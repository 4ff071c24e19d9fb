"""Looks at `trainer.model` before anything is built for it."""

from __future__ import annotations

import os

from raysvc import hub
from raysvc.errors import ConfigError


def check_model(name: str) -> None:
    """Refuse a hub name or a relative folder that is no model; absolute folders may be of the workers' nodes alone.

    Raises:
        ConfigError: it cannot be loaded.
    """
    if name == "tiny" or os.path.isabs(os.path.expanduser(name)):
        return
    from transformers import AutoConfig

    try:
        with hub.answering():
            AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        what = f"{name!r} cannot be loaded ({str(error).strip().splitlines()[0]})"
        remedy = "give tiny, a folder with config.json, or a hub name that this machine can reach"
        raise ConfigError("trainer.model", what, remedy) from None
