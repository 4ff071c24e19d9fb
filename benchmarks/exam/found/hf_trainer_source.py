"""HF's Trainer resumes on a source that has one row more without a word, and mixes the orders of the two sources.

The order of 204 rows is another one than that of 203, and the trained batches are skipped by their number.
"""

import tempfile
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

seen: list[int] = []


class Watched(Trainer):
    def training_step(self, model: Any, inputs: Any, *others: Any, **more: Any) -> Any:
        seen.extend(inputs["row"].tolist())
        return super().training_step(model, inputs, *others, **more)

    def compute_loss(self, model: Any, inputs: Any, *others: Any, **more: Any) -> Any:
        return model(inputs["row"].float()[:, None]).mean() * 0


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_save = control.should_training_stop = state.global_step == 17


def train(rows: int, folder: str, resume: bool) -> None:
    args = TrainingArguments(folder, per_device_train_batch_size=4, num_train_epochs=1, seed=7, use_cpu=True, save_strategy="no",
                             report_to="none", disable_tqdm=True, remove_unused_columns=False)  # fmt: skip
    data = [{"row": row} for row in range(rows)]
    stops = [] if resume else [Stop()]
    trainer = Watched(torch.nn.Linear(1, 1), args, train_dataset=data, callbacks=stops,
                      data_collator=lambda some: {"row": torch.tensor([one["row"] for one in some])})  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)


with tempfile.TemporaryDirectory() as folder:
    train(203, folder, resume=False)
    train(204, folder, resume=True)
again = len(seen) - len(set(seen))
lost = len(set(range(203)) - set(seen))
print(f"of one epoch of 203 rows {again} were trained twice and {lost} never, and nothing was said")
assert again > 0
assert lost > 0
