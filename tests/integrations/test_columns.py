"""Columns of an entry in the batches of Hugging Face's and TRL's own trainers; oracle: the rows of the source file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysvc.errors import ConfigError
from raysvc.job.config import JobConfig
from raysvc.job.job_file import load_job

from .stream_client import StreamClient, arguments, tiny_lm

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries
CARRY = {
    "domain": {},
    "experts": {"dtype": "uint8", "per": "token", "shape": [3, 2], "pad": 255},
    "gate": {"dtype": "bfloat16", "per": "token"},
    "emb": {"dtype": "float32", "shape": [4]},
    "teacher_ids": {"dtype": "int32", "per": "token", "shape": [2], "pad": -1, "align": "next_token"},
}


def source_rows() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    rows = []
    for n in range(12):
        length = int(rng.integers(3, 9))
        rows.append(
            {
                "input_ids": rng.integers(3, 50, length).tolist(),
                "loss_mask": [0] + [1] * (length - 1),
                "domain": ["math", "code, and more"][n % 2],
                "experts": rng.integers(0, 200, (length, 3, 2)).tolist(),
                "gate": (rng.integers(0, 100, length) / 4).tolist(),
                "emb": (rng.integers(0, 100, 4) / 8).tolist(),
                "teacher_ids": rng.integers(0, 50, (length - 1, 2)).tolist(),
            }
        )
    return rows


def job_of(folder: Path, tokenizer: str, **plan: Any) -> JobConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in source_rows()))
    return load_job(
        {
            "source": {"path": str(path), "format": "pretokenized", "carry": CARRY},
            "tokenizer": tokenizer,
            "cache": {"root": str(folder / "cache")},
            "plan": {"batch_size": 6, **plan},
        }
    )


def check(seen: list[dict[str, Any]], packed: bool = False) -> None:
    """Every row once, each value at its token and the pad elsewhere."""
    torch, rows, found = pytest.importorskip("torch"), source_rows(), []
    for batch in seen:
        assert batch["gate"].dtype == torch.bfloat16
        assert batch["experts"].dtype == torch.uint8
        cells = {name: batch[name].flatten(0, 1) for name in ("experts", "gate", "teacher_ids")}
        width, used, start = batch["input_ids"].shape[1], torch.zeros(batch["input_ids"].numel()).bool(), 0
        for line, number in enumerate(batch["row_ids"].tolist()):
            truth = rows[number]
            length = len(truth["input_ids"])
            start = start if packed else line * width
            here = slice(start, start + length)
            assert batch["input_ids"].flatten()[here].tolist() == truth["input_ids"]
            assert cells["experts"][here].tolist() == truth["experts"]
            assert cells["gate"][here].float().tolist() == truth["gate"]
            assert cells["teacher_ids"][here].tolist() == [[-1, -1], *truth["teacher_ids"]]
            assert batch["emb"][line].tolist() == truth["emb"]
            assert batch["domain"][line] == truth["domain"]
            used[here] = True
            start += length
            found.append(number)
        assert bool((cells["experts"][~used] == 255).all())
        assert bool((cells["teacher_ids"][~used] == -1).all())
    assert sorted(found) == list(range(len(rows)))


def watching(host: type, columns: tuple[str, ...]) -> tuple[type, list[dict[str, Any]]]:
    """The trainer with a loss that takes the columns out of its inputs, as a user's does; and what came in."""
    seen: list[dict[str, Any]] = []

    class Watching(host):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: dict[str, Any], *others: Any, **more: Any) -> Any:
            seen.append(dict(inputs))
            for name in columns:
                del inputs[name]
            return super().compute_loss(model, inputs, *others, **more)

    return Watching, seen


@pytest.mark.parametrize(
    "plan",
    [{"layout": "padded_right", "micro_batch_size": 2}, {"layout": "packed", "micro_batch_tokens": 64}],
    ids=["padded", "packed"],
)
@pytest.mark.parametrize("host", ["Trainer", "SFTTrainer"])
def test_declared_columns_reach_the_loss_of_a_trainer_behind_a_server(
    host: str, plan: dict[str, Any], tmp_path: Path, sample: dict[str, str]
) -> None:
    pytest.importorskip("accelerate")
    import transformers

    from raysvc.integrations.transformers import FromServer

    config, mixin, more = transformers.TrainingArguments, FromServer, {}
    base: Any = transformers.Trainer
    if host == "SFTTrainer":
        trl = pytest.importorskip("trl")
        from raysvc.integrations.trl_server import TrlFromServer

        config, base, mixin = trl.SFTConfig, trl.SFTTrainer, TrlFromServer
        more = {"processing_class": transformers.AutoTokenizer.from_pretrained(sample["tokenizer"])}
    columns = (*CARRY, "row_ids")
    watched, seen = watching(base, columns)
    kind = type(
        "Mine", (mixin, watched), {"client": StreamClient(job_of(tmp_path, sample["tokenizer"], **plan))}
    )
    kind.columns = columns  # type: ignore[attr-defined]
    trainer = kind(model=tiny_lm(), args=config(**arguments(tmp_path / "out"), bf16=False), **more)
    trainer.train()
    assert trainer.state.global_step == 2
    check(seen, packed=plan["layout"] == "packed")


def test_a_column_that_the_shards_lack_is_named(tmp_path: Path, sample: dict[str, str]) -> None:
    pytest.importorskip("accelerate")
    from raysvc.integrations.transformers import declared

    micro = next(StreamClient(job_of(tmp_path, sample["tokenizer"])).micro_batches())
    with pytest.raises(ConfigError, match="names 'expert', which the shards do not have"):
        declared(micro, ["expert"])


def test_columns_of_an_entry_reach_the_loss_of_an_sft_trainer(tmp_path: Path, sample: dict[str, str]) -> None:
    trl = pytest.importorskip("trl")
    from transformers import AutoTokenizer

    import raysvc
    from raysvc.integrations.trl import WithColumns, labelled

    entry = raysvc.tokenize(job_of(tmp_path, sample["tokenizer"]))
    watched, seen = watching(trl.SFTTrainer, (*CARRY, "row_ids"))
    collate = trl.trainer.sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0, pad_to_multiple_of=4)
    args = trl.SFTConfig(
        **arguments(tmp_path / "out"), bf16=False, per_device_train_batch_size=4,
        dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False, dataloader_num_workers=0,
    )  # fmt: skip
    trainer = watched(
        model=tiny_lm(), args=args, processing_class=AutoTokenizer.from_pretrained(sample["tokenizer"]),
        train_dataset=labelled(entry.uri, row_ids=True),
        data_collator=WithNumbers(WithColumns(collate, entry.uri, list(CARRY))),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 3
    check(seen)
    with pytest.raises(ConfigError, match="the entry has no 'expert'"):
        WithColumns(collate, entry.uri, ["expert"])


class WithNumbers:
    """A collator that also tells which rows it was given."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        return {**self.collate(rows), "row_ids": torch.tensor([row["row_id"] for row in rows])}


def test_a_collator_with_columns_can_be_sent_to_another_process(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    trl = pytest.importorskip("trl")
    import pickle

    import raysvc
    from raysvc.integrations.trl import WithColumns, labelled

    entry = raysvc.tokenize(job_of(tmp_path, sample["tokenizer"]))
    collate = trl.trainer.sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0)
    sent = pickle.loads(pickle.dumps(WithColumns(collate, entry.uri, ["experts", "domain"])))
    batch = sent([labelled(entry.uri, row_ids=True)[3]])
    assert batch["experts"][0].tolist() == source_rows()[3]["experts"]
    assert batch["domain"] == [source_rows()[3]["domain"]]


def test_columns_that_a_model_computed_go_with_the_rows_of_their_base(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    trl = pytest.importorskip("trl")
    import raysvc
    from raysvc.integrations.trl import WithColumns, labelled

    entry = raysvc.enrich(job_of(tmp_path, sample["tokenizer"]), enrich={"ref_logprobs": {"model": "tiny"}})
    collate = trl.trainer.sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0)
    rows = labelled(entry.uri, row_ids=True)
    batch = WithColumns(collate, entry.uri, ["ref_logprobs", "domain"])([rows[1], rows[3]])
    for line, row in enumerate((1, 3)):
        values = entry.row(row)["ref_logprobs"]
        assert any(values)
        assert batch["ref_logprobs"][line, : len(values)].tolist() == values
        assert not batch["ref_logprobs"][line, len(values) :].any()
