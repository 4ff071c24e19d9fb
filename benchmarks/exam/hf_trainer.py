"""transformers' Trainer over a list of rows, resumed from its own checkpoint. `hf_trainer_ignore` and `trl_sft` build on it."""

from __future__ import annotations

import importlib.metadata
import os
import queue
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epochs import ids, numbers
from words import long_number, parts_of, tokenizer, unpad

VERSION = f"transformers {importlib.metadata.version('transformers')}"
PROMISE = "resume_from_checkpoint: skips the epochs and batches that were trained, so that training goes on where it left off"
SETTINGS = "train(resume_from_checkpoint=…), ignore_data_skip=False; ranks as torchrun starts them"
NOT_OFFERED = {
    "packed": "a batch is what the collator makes of its rows; packing is TRL's",
    "mixture": "several data sets are mixed by `datasets`, before a trainer gets them",
}
IMPORTS = ("torch", "accelerate", "transformers.trainer")


class Loader:
    """Trains in a thread that waits until the next batch is asked for; a batch is given when its step and its checkpoint are done."""

    def __init__(self, rows: Path, o: dict[str, Any], **more: Any) -> None:
        if o["world_size"] > 1:
            os.environ.update(RANK=str(o["rank"]), LOCAL_RANK=str(o["rank"]), WORLD_SIZE=str(o["world_size"]))
        self.folder = (
            rows.parent / f"trainer-{os.getpid() if o['world_size'] == 1 else os.environ['MASTER_PORT']}"
        )
        self.done: queue.Queue[list[int] | BaseException | None] = queue.Queue()
        self.asked, self.checkpoint, self.trained = threading.Semaphore(0), None, []
        self.save_at: int | None = None
        self.options = o
        self.trainer = self.make(rows, {
            "output_dir": str(self.folder), "per_device_train_batch_size": o["batch_size"], "num_train_epochs": o["epochs"],
            "seed": o["seed"], "data_seed": o["seed"], "dataloader_num_workers": o["workers"], "save_strategy": "no",
            "report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no", **more,
        })  # fmt: skip
        self.trainer.add_callback(saver(self))

    def make(self, rows: Path, options: dict[str, Any]) -> Any:
        import torch
        from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

        loader, with_ids, is_long = self, self.options.get("ids", False), self.options.get("long", False)

        class Watched(Trainer):
            def training_step(self, model: Any, inputs: Any, *others: Any, **more: Any) -> Any:
                if is_long:
                    loader.step([*map(long_number, inputs["input_ids"])])
                else:
                    loader.step(unpad(inputs) if with_ids else inputs["row"].tolist())
                return super().training_step(model, inputs, *others, **more)

            def compute_loss(self, model: Any, inputs: Any, *others: Any, **more: Any) -> Any:
                numbers = inputs["row"] if "row" in inputs else inputs["input_ids"][:, 1]
                return model(numbers.float()[:, None]).mean() * 0

        args = TrainingArguments(**options, remove_unused_columns=False)
        if is_long:
            return Watched(torch.nn.Linear(1, 1), args, train_dataset=mapped(rows))
        data = [{"row": number} for number in numbers(rows)]
        collate = lambda some: {"row": torch.tensor([one["row"] for one in some])}  # noqa: E731
        if with_ids:
            data = [{"input_ids": row} for row in ids(rows)]
            collate = DataCollatorWithPadding(tokenizer())
        return Watched(torch.nn.Linear(1, 1), args, train_dataset=data, data_collator=collate)

    def step(self, rows: list[int]) -> None:
        """The step before is done, with its checkpoint; the next one begins when it is asked for."""
        if self.trained:
            self.done.put(self.trained)
            self.asked.acquire()
        self.trained = rows

    def batches(self) -> Iterator[list[int]]:
        def train() -> None:
            try:
                self.trainer.train(resume_from_checkpoint=self.checkpoint)
                if self.trained:
                    self.done.put(self.trained)
                self.done.put(None)
            except BaseException as error:  # noqa: BLE001 - it is raised again where batches are asked for
                self.done.put(error)

        threading.Thread(target=train, daemon=True).start()
        while (batch := self.done.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            yield batch
            self.asked.release()

    def save(self) -> Any:
        from torch import distributed

        if distributed.is_initialized():
            distributed.barrier()  # a checkpoint is written by all ranks
        newest = max(self.folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        kept = self.folder.with_name(f"{self.folder.name}-kept-{os.getpid()}")
        shutil.copytree(newest, kept)
        return str(kept)

    def load(self, state: Any) -> None:
        self.checkpoint = state


def mapped(rows: Path) -> Any:
    """Rows of a stream as a data set in a file that is mapped into memory, as its documentation says."""
    from datasets import load_dataset

    folder = str(rows.parent / "hf")
    data = load_dataset("parquet", data_files=parts_of(rows), split="train", cache_dir=folder)
    return data.select_columns(["input_ids"]).with_format("torch")


def saver(loader: Loader) -> Any:
    """A callback that has the Trainer save after the batch that is asked for."""
    from transformers import TrainerCallback

    class Saver(TrainerCallback):
        begin = None

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.begin = state.global_step - 1 if self.begin is None else self.begin
            control.should_save = state.global_step - self.begin == loader.save_at

    return Saver()


def open_loader(rows: Path, **options: Any) -> Loader:
    return Loader(rows, options)
