"""What a job trains fits its rows, or the job is refused before a worker starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import raysvc
from raysvc.actors.worker.row_losses import PairLoss, RewardLoss
from raysvc.errors import ConfigError
from raysvc.job.job_file import load_job
from raysvc.training.objective import objective_of

PAIR = {"prompt": "2 + 2 = ", "chosen": "yes.", "rejected": "never."}
PLAIN = {"prompt": "2 + 2 = ", "completion": "yes."}
LABEL = {**PLAIN, "label": True}
STEPS = {"prompt": "2 + 2 = ", "completions": ["add them", "4"], "labels": [True, False]}


def entry_of(tmp_path: Path, sample: dict[str, str], row: dict[str, Any], **more: Any) -> Any:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "prompt": f"{n} is:\n"}) + "\n" for n in range(4)))
    job = load_job(
        {
            "source": {"path": str(path), **more.pop("source", {})},
            "tokenizer": sample["tokenizer"],
            "cache": {"root": str(tmp_path / "cache")},
            **more,
        }
    )
    return job, raysvc.tokenize(job)


def test_a_rejected_answer_is_never_an_example(tmp_path: Path, sample: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="these are preference: half of them are not; use one of dpo, ipo"):
        objective_of(*entry_of(tmp_path, sample, PAIR))


def test_a_bad_row_with_a_label_is_never_an_example(tmp_path: Path, sample: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="these are kto: half of them are not; use one of kto"):
        objective_of(*entry_of(tmp_path, sample, LABEL))


def test_a_wrong_step_is_never_an_example(tmp_path: Path, sample: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="to be learned is the labels of their steps; use one of process"):
        objective_of(*entry_of(tmp_path, sample, STEPS))


@pytest.mark.parametrize(
    ("objective", "row", "what"),
    [
        ("simpo", PLAIN, "needs preference rows, and these are prompt_completion"),
        ("kto", PAIR, "needs kto rows, and these are preference"),
        ("process", PAIR, "needs stepwise rows, and these are preference"),
        ("dpo", PAIR, "needs a column 'ref_logprobs'"),
        ("distill", PLAIN, "needs a column 'teacher_ids'"),
    ],
)
def test_an_objective_names_what_the_rows_lack(
    tmp_path: Path, sample: dict[str, str], objective: str, row: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        objective_of(*entry_of(tmp_path, sample, row, trainer={"objective": objective}))


def test_pairs_and_margins_give_their_losses(tmp_path: Path, sample: dict[str, str]) -> None:
    trainer = {"objective": "simpo", "beta": 2.0, "margin": 0.5}
    assert objective_of(*entry_of(tmp_path, sample, PAIR, trainer=trainer)) == PairLoss("simpo", 2.0, 0.5)
    carry = {"source": {"carry": {"margin": {"dtype": "float32"}}}, "trainer": {"objective": "reward"}}
    found = objective_of(*entry_of(tmp_path, sample, {**PAIR, "margin": 1.5}, **carry))
    assert found == RewardLoss(margins=True)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("objective", ["simpo", "reward", "process"])
def test_a_run_of_pairs_or_steps_learns_to_tell_them_apart(
    ray_session: None, tmp_path: Path, sample: dict[str, str], objective: str
) -> None:
    from raysvc.training.train import train

    job, _ = entry_of(
        tmp_path, sample, STEPS if objective == "process" else PAIR, plan={"batch_size": 4, "epochs": 30, "layout": "packed"},
        trainer={"objective": objective, "dp_size": 2, "beta": 2.0, "learning_rate": 1e-2,
                 "run_dir": str(tmp_path / "run"), "cpus_per_worker": 0},
        server={"name": f"pairs-{objective}", "num_cpus": 0},
        evals={"same": {"source": {"path": str(tmp_path / "rows.jsonl")}, "batch_size": 3}},
    )  # fmt: skip
    summary = train(job).metrics
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] / 2
    same = summary["evals"]["same"]
    assert same["loss"] == pytest.approx(losses[-1], rel=0.2), "of the same rows, one step later"
    assert same["rewards/accuracies" if objective == "simpo" else "accuracy"] == 1.0
