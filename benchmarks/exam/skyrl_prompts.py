"""SkyRL's prompts as its trainer reads them: PromptDataset and build_dataloader."""

from __future__ import annotations

import importlib.metadata
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typing_extensions
from prompt_rows import NOT_OFFERED as NOT_OFFERED
from prompt_rows import TEMPLATE, Prompts
from skyrl_rollouts import Learner
from words import tokenizer

typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # pydantic asks for it before Python 3.12

VERSION = f"skyrl {importlib.metadata.version('skyrl')}"
PROMISE = "resumes from the latest checkpoint: the data loader's state is saved in it and loaded"
SETTINGS = "PromptDataset, build_dataloader (shuffle, drop_last, a seeded generator), load_state_dict, as its trainer does"
OFFERS = ("rollouts",)
IMPORTS = ("torch", "skyrl.train.utils.trainer_utils")


class Loader(Prompts):
    def made(self, file: Path, o: dict[str, Any]) -> Any:
        from skyrl.train.dataset import PromptDataset
        from skyrl.train.utils.trainer_utils import build_dataloader

        words = tokenizer()
        words.chat_template = TEMPLATE
        data = PromptDataset(str(file), words, 100, num_workers=1)
        workers = SimpleNamespace(num_workers=o["workers"], persistent_workers=False)
        trainer = SimpleNamespace(train_batch_size=o["batch_size"], seed=o["seed"], epochs=o["epochs"])
        return build_dataloader(
            SimpleNamespace(trainer=trainer, data=SimpleNamespace(dataloader=workers)), data
        )

    def texts(self, batch: Any) -> list[str]:
        return [one["prompt"][0]["content"] for one in batch]


def open_loader(rows: Path, **options: Any) -> Loader | Learner:
    if options.get("rollouts"):
        return Learner(rows, options)
    return Loader(rows, options)
