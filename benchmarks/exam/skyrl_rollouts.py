"""SkyRL's fully asynchronous trainer with its generators, buffer and staleness manager; weights and answers are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prompt_rows import GENERATORS, TEMPLATE, prompts, sampling_s
from words import ids_of, number_of, tokenizer


class Sampler:
    """Stands for the engine: two answers to each prompt."""

    def __init__(self) -> None:
        self.sampled: list[int] = []

    async def generate(self, given: Any, disable_tqdm: bool = True) -> dict[str, Any]:
        row = number_of(ids_of(given["prompts"][0][0]["content"]))
        await asyncio.sleep(sampling_s(row))
        self.sampled.append(row)
        return {"rewards": [0.0, 1.0], "loss_masks": [[1], [1]]}


class Learner:
    """Runs the data side of `FullyAsyncRayPPOTrainer.train`, in its order; `sampled` are the prompts that were answered."""

    def __init__(self, rows: Path, o: dict[str, Any]) -> None:
        from skyrl.train.config import SkyRLTrainConfig
        from skyrl.train.dataset import PromptDataset
        from skyrl.train.fully_async_trainer import (
            FullyAsyncRayPPOTrainer,
            _AsyncDataloader,
            _AsyncStalenessManager,
        )

        words = tokenizer()
        words.chat_template = TEMPLATE
        self.epochs, self.sampler = o["epochs"], Sampler()
        self.trainer = trainer = object.__new__(FullyAsyncRayPPOTrainer)
        trainer.cfg = cfg = SkyRLTrainConfig()
        cfg.trainer.train_batch_size = cfg.trainer.policy_mini_batch_size = o["batch_size"]
        cfg.trainer.seed, cfg.trainer.epochs, cfg.generator.n_samples_per_prompt = o["seed"], o["epochs"], 2
        cfg.data.dataloader.num_workers = 0
        trainer.train_dataset = PromptDataset(str(prompts(rows)), words, 100, num_workers=1)
        trainer.generator, trainer.mini_batch_size, trainer.max_staleness_steps = (
            self.sampler,
            o["batch_size"],
            1,
        )
        trainer._build_train_dataloader_and_compute_training_steps()
        trainer.sample_full_batch, trainer.all_timings, trainer.global_step = False, {}, 1
        trainer.async_train_dataloader = _AsyncDataloader(trainer.train_dataloader, o["batch_size"])
        trainer._staleness_manager = _AsyncStalenessManager(GENERATORS, o["batch_size"], 1)

    @property
    def sampled(self) -> list[int]:
        return self.sampler.sampled

    def batches(self) -> Iterator[list[int]]:
        loop = asyncio.new_event_loop()
        steps = self.steps()
        while True:
            try:
                yield loop.run_until_complete(anext(steps))
            except StopAsyncIteration:
                return

    async def steps(self) -> Any:
        trainer, loader, manager = (
            self.trainer,
            self.trainer.async_train_dataloader,
            self.trainer._staleness_manager,
        )
        for epoch in range((trainer.global_step - 1) // trainer.num_steps_per_epoch, self.epochs):
            buffer: Any = asyncio.Queue(maxsize=2 * trainer.mini_batch_size)
            tasks = [
                asyncio.create_task(trainer._run_generate_for_a_group_loop(buffer)) for _ in range(GENERATORS)
            ]
            for _ in range(trainer.global_step, (1 + epoch) * trainer.num_steps_per_epoch + 1):
                groups, _, _ = await trainer._collect_generation_mini_batch(buffer, asyncio.Event())
                await loader.mark_consumed_uids([group.uid for group in groups])
                trainer.global_step += 1
                yield [number_of(ids_of(group.prompts[0][0]["content"])) for group in groups]
                await manager.notify_capacity_change(trainer.global_step)
            await asyncio.gather(*tasks)
            await loader.reset_at_epoch_end()
            await manager.validate_state_at_epoch_end(trainer.global_step)

    def save(self) -> Any:
        """Returns what its checkpoint says."""
        return {
            "global_step": self.trainer.global_step - 1,
            "consumed_uids": self.trainer.async_train_dataloader.get_consumed_uids_list(),
        }

    def load(self, state: Any) -> None:
        self.trainer.global_step = state["global_step"] + 1
        self.trainer.async_train_dataloader.load_state_from_checkpoint(set(state["consumed_uids"]))
        self.trainer._staleness_manager.load_state_from_checkpoint(self.trainer.global_step)
