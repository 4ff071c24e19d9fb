"""verl's prompts as its PPO trainer reads them: RLHFDataset, its sampler, StatefulDataLoader, and its way to resume."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from prompt_rows import NOT_OFFERED as NOT_OFFERED
from prompt_rows import Prompts
from words import tokenizer

VERSION = f"verl {importlib.metadata.version('verl')}"
PROMISE = "supports resuming from checkpoints: the loader's state is saved beside the weights and restored"
SETTINGS = "RLHFDataset(filter_overlong_prompts=False), create_rl_sampler(shuffle, seed), StatefulDataLoader(drop_last=True), as ray_trainer does"
IMPORTS = ("torch", "verl.utils.dataset.rl_dataset", "verl.trainer.ppo.utils")


class Loader(Prompts):
    """At the end of an epoch no state is restored."""

    def made(self, file: Path, o: dict[str, Any]) -> Any:
        from omegaconf import OmegaConf
        from torchdata.stateful_dataloader import StatefulDataLoader
        from verl.trainer.ppo.utils import create_rl_sampler
        from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

        config = OmegaConf.create(
            {"shuffle": o["shuffle"], "seed": o["seed"], "filter_overlong_prompts": False, "cache_dir": str(file.parent / "verl")}
        )  # fmt: skip
        data = RLHFDataset(str(file), tokenizer(), config)
        return StatefulDataLoader(
            data, batch_size=o["batch_size"], num_workers=o["workers"], drop_last=True, collate_fn=collate_fn,
            sampler=create_rl_sampler(config, data),
        )  # fmt: skip

    def texts(self, batch: Any) -> list[str]:
        return [messages[0]["content"] for messages in batch["raw_prompt"]]

    def load(self, state: Any) -> None:
        self.steps = state["steps"]
        if self.steps % len(self.loader):
            self.loader.load_state_dict(state["loader"])


def open_loader(rows: Path, **options: Any) -> Loader:
    return Loader(rows, options)
