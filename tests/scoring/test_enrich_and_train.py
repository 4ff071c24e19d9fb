"""From rows to a trained model with columns that were computed: the losses are those of models in the loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raysvc
from raysvc.builds.job_plan import plan_of
from raysvc.job.config import JobConfig
from raysvc.job.job_file import load_job

pytestmark = [pytest.mark.ray, pytest.mark.slow]
BETA, RATE = 0.5, 3e-3


def job_of(tmp_path: Path, sample: dict[str, str], rows: list[dict[str, Any]], **sections: Any) -> JobConfig:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = {
        "learning_rate": RATE,
        "run_dir": str(tmp_path / "run"),
        "cpus_per_worker": 0,
        **sections.pop("trainer"),
    }
    return load_job(
        {
            "source": {"path": str(tmp_path / "rows.jsonl")},
            "tokenizer": sample["tokenizer"],
            "cache": {"root": str(tmp_path / "cache")},
            "plan": {"batch_size": 8, "epochs": 3, "layout": "packed"},
            "server": {"name": f"enrich-{trainer['objective']}", "num_cpus": 0},
            "trainer": trainer,
            **sections,
        }
    )


def losses_of(tmp_path: Path) -> list[float]:
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def tiny(job: JobConfig, entry: raysvc.CacheEntry) -> Any:
    from raysvc.actors.model.load_model import tiny_model

    torch.manual_seed(job.trainer.seed)
    return tiny_model(int(entry.report["vocab_size"]))


def logprobs(lm: Any, row: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """[targets, V] of a row, and its targets."""
    ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"]).bool()
    places = torch.nonzero(mask[1:])[:, 0]
    return lm(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)[places], ids[1:][places]


def steps_of(job: JobConfig, entry: raysvc.CacheEntry) -> list[np.ndarray]:
    plan = plan_of(job, entry)
    return [plan.step(step, 1).mini_batches[0].row_ids for step in range(plan.schedule.num_steps)]


def trained(job: JobConfig, lm: Any, steps: list[Any], loss: Any) -> list[float]:
    """Losses of a plain loop with the trainer's optimizer."""
    optimizer = torch.optim.AdamW(lm.parameters(), lr=RATE, weight_decay=0.0)
    out = []
    for rows in steps:
        total = loss(lm, rows)
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        out.append(float(total.detach()))
    return out


def test_dpo_learns_as_with_a_frozen_copy_in_the_loop(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    rows = [
        {"prompt": f"{n} is:\n", "chosen": f"{2 * n} yes.", "rejected": "never " * (n % 3 + 1)}
        for n in range(32)
    ]
    job = job_of(tmp_path, sample, rows, trainer={"objective": "dpo", "beta": BETA, "dp_size": 2})
    raysvc.train(job)
    found = losses_of(tmp_path)
    assert found[0] == pytest.approx(np.log(2), abs=1e-5)  # the model is its own reference
    assert found[-1] < found[0] / 2

    base = raysvc.tokenize(job)
    frozen = tiny(job, base).eval()

    def dpo(lm: Any, row_ids: Any) -> torch.Tensor:
        scores = []
        for row in row_ids.tolist():
            own, ids = logprobs(lm, base.row(row))
            with torch.no_grad():
                reference, _ = logprobs(frozen, base.row(row))
            scores.append((own - reference).gather(-1, ids[:, None]).sum())
        return torch.stack(
            [
                -torch.nn.functional.logsigmoid(BETA * (c - r))
                for c, r in zip(scores[0::2], scores[1::2], strict=True)
            ]
        ).mean()

    expected = trained(job, tiny(job, base), steps_of(job, raysvc.enrich(job)), dpo)
    assert found == pytest.approx(expected, rel=2e-3, abs=1e-5)


def test_a_student_learns_as_with_its_teacher_in_the_loop(
    tmp_path: Path, sample: dict[str, str], ray_session: None
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    rows = [{"prompt": f"{n} is:\n", "completion": f"{2 * n} yes, and {n}."} for n in range(32)]
    torch.manual_seed(7)
    teacher = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=48, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2
        )
    ).eval()
    teacher.lm_head.weight.data *= 40  # sure of itself
    teacher.save_pretrained(tmp_path / "teacher")
    enrich = {"teacher": {"model": str(tmp_path / "teacher"), "top_k": 16}}
    trainer = {"objective": "distill", "temperature": 2.0, "dp_size": 2}
    job = job_of(tmp_path, sample, rows, trainer=trainer, enrich=enrich)
    raysvc.train(job)
    found = losses_of(tmp_path)
    assert found[-1] < 0.8 * found[0]

    base = raysvc.tokenize(job)

    def distill(lm: Any, row_ids: Any) -> torch.Tensor:
        parts, count = [], 0
        for row in row_ids.tolist():
            own, _ = logprobs(lm, base.row(row))
            with torch.no_grad():
                best = logprobs(teacher, base.row(row))[0].topk(16)
            sure = (best.values / 2).log_softmax(-1)
            student = (own / 2).log_softmax(-1).gather(-1, best.indices)
            parts.append(4 * (sure.exp() * (sure - student)).sum())
            count += len(own)
        return torch.stack(parts).sum() / count

    expected = trained(job, tiny(job, base), steps_of(job, raysvc.enrich(job)), distill)
    assert found == pytest.approx(expected, rel=2e-3)
