"""verl's own dataset factory, sampler and collator on prompts that a raysvc job orders; oracle: verl's `RLHFDataset` of the same files.

Runs where verl is installed: `pip install --no-deps verl tensordict==0.10.0 omegaconf codetiming pyvers torchdata`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from raysvc.errors import ConfigError, StateMismatch

from .test_trl_pairs import TURNS, tokenizer_of
from .test_trl_prompts import raw_prompts

pytest.importorskip("verl", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries


def config_of(
    folder: Path, sample: dict[str, str], plan: dict[str, Any] | None = None, **options: Any
) -> Any:
    """verl's `data` section, over two files of prompts."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from omegaconf import OmegaConf

    rows = [
        {"prompt": row["prompt"], "data_source": row["topic"], "reward_model": {"style": "rule", "ground_truth": str(row["wanted"])},
         "extra_info": {"index": row["wanted"], "split": "train"}}
        for row in raw_prompts()
    ]  # fmt: skip
    files = [folder / "a.parquet", folder / "b.parquet"]
    for file, part in zip(files, (rows[:7], rows[7:]), strict=True):
        pq.write_table(pa.Table.from_pylist(part), file)
    job = {
        "source": {"path": "overridden", "format": "prompt"},
        "tokenizer": {"name": sample["tokenizer"], "chat_template": TURNS},
        "cache": {"root": str(folder / "cache")},
        "plan": {"batch_size": 3, "epochs": 2, "seed": 3, "tail": "drop", **(plan or {})},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    section = {
        "train_files": [str(file) for file in files], "val_files": [str(files[0])], "train_batch_size": 3, "shuffle": False,
        "cache_dir": str(folder / "verl"), "filter_overlong_prompts": False, "raysvc_job": str(folder / "job.yaml"),
        "custom_cls": {"path": "pkg://raysvc.integrations.verl", "name": "PlannedPrompts"},
    }  # fmt: skip
    return OmegaConf.create({**section, **options})


def dataset_of(config: Any, sample: dict[str, str], stock: bool = False) -> Any:
    from verl.trainer.ppo.utils import create_rl_dataset

    config = config.copy()
    if stock:
        config.custom_cls.path = None
    return create_rl_dataset(config.train_files, config, tokenizer_of(sample["tokenizer"], TURNS), None)


def loader_of(config: Any, sample: dict[str, str], num_workers: int = 0) -> Any:
    """As verl's trainer makes it."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.trainer.ppo.utils import create_rl_sampler
    from verl.utils.dataset.rl_dataset import collate_fn

    dataset = dataset_of(config, sample)
    return StatefulDataLoader(
        dataset=dataset, batch_size=config.train_batch_size, num_workers=num_workers, drop_last=True,
        collate_fn=collate_fn, sampler=create_rl_sampler(config, dataset),
    )  # fmt: skip


def plain(batch: dict[str, Any]) -> str:
    return json.dumps({name: values.tolist() for name, values in batch.items()})


def steps_of_plan(dataset: Any) -> Iterator[list[int]]:
    for step in range(dataset._schedule.num_steps):
        rows = [row for mini in dataset._plan.step(step, 1).mini_batches for row in mini.row_ids.tolist()]
        yield [int(dataset._origin[row]) for row in rows]


def test_verl_gets_its_own_rows_in_the_order_of_the_plan(tmp_path: Path, sample: dict[str, str]) -> None:
    from verl.utils.dataset.rl_dataset import collate_fn

    config = config_of(tmp_path, sample)
    loader, stock = loader_of(config, sample), dataset_of(config, sample, stock=True)
    steps = list(steps_of_plan(loader.dataset))
    assert len(loader) == len(steps) == 6
    epoch = [row for step in steps[:3] for row in step]
    assert epoch != sorted(epoch), "an order of its own"
    assert len(set(epoch)) == 9, "no row twice in an epoch"
    for batch, rows in zip(loader, steps, strict=True):
        assert plain(batch) == plain(collate_fn([stock[row] for row in rows]))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_verls_loader_goes_on_from_its_state(
    num_workers: int, tmp_path: Path, sample: dict[str, str]
) -> None:
    config = config_of(tmp_path, sample)
    whole = loader_of(config, sample, num_workers)
    items = iter(whole)
    for _ in range(2):
        next(items)
    state = whole.state_dict()
    left = [plain(batch) for batch in items]
    fresh = loader_of(config, sample, num_workers)
    fresh.load_state_dict(state)
    assert [plain(batch) for batch in fresh] == left
    assert len(left) == 4
    other = loader_of(config_of(tmp_path, sample, {"seed": 4}), sample, 0)
    if not num_workers:
        other.load_state_dict(state)
        with pytest.raises(StateMismatch, match="seed"):
            next(iter(other))


def test_validation_rows_are_verls_own(tmp_path: Path, sample: dict[str, str]) -> None:
    from verl.trainer.ppo.utils import create_rl_dataset

    config = config_of(tmp_path, sample)
    rows = create_rl_dataset(config.val_files, config, tokenizer_of(sample["tokenizer"], TURNS), None)
    assert [rows[number]["index"] for number in range(len(rows))] == list(range(7))


@pytest.mark.parametrize(
    ("plan", "options", "what"),
    [
        ({}, {"shuffle": True}, r"data\.shuffle: .* use False, and plan\.shuffle"),
        ({}, {"raysvc_job": None}, r"data\.raysvc_job: is not there"),
        ({}, {"train_batch_size": 4}, r"plan\.batch_size: is 3, and verl takes 4 prompts a step"),
        ({}, {"gen_batch_size": 6}, r"plan\.batch_size: is 3, and verl takes 6 prompts a step"),
        ({"tail": "pad"}, {}, r"plan\.tail: is pad, and verl drops the last rows"),
    ],
)
def test_options_that_would_change_rows_or_order_are_refused_by_name(
    plan: dict[str, Any], options: dict[str, Any], what: str, tmp_path: Path, sample: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match=what):
        dataset_of(config_of(tmp_path, sample, plan, **options), sample)


def test_a_prompt_that_verl_would_render_to_other_ids_is_refused(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    from verl.trainer.ppo.utils import create_rl_dataset

    config = config_of(tmp_path, sample)
    other = tokenizer_of(sample["tokenizer"], TURNS.replace("assistant", "user"))
    rows = create_rl_dataset(config.train_files, config, other, None)
    with pytest.raises(ConfigError, match="other ids than verl would make"):
        rows[0]
