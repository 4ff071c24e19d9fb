"""TRL's `GRPOTrainer` on an entry of prompts; oracle: the raw prompts, in the plan's order, taken and trained by TRL alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raysvc.errors import ConfigError, StateMismatch
from raysvc.job.config import JobConfig
from raysvc.job.job_file import load_job

from .stream_client import StreamClient, arguments, tiny_lm
from .test_trl_pairs import TURNS, tokenizer_of, trl_classes

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries
NUM_PROMPTS, EACH = 11, 4
Raw = list[dict[str, Any]]
HOSTS = {"grpo": "GRPO", "rloo": "RLOO"}
FACTS = ("loss", "reward", "grad_norm", "entropy", "completions/mean_length", "learning_rate", "epoch")
# forwards of a generation batch, optimizer steps it is trained in: one; three of two forwards; one and a half
SPLITS = {
    "plain": {},
    "reused": {"steps_per_generation": 2, "num_iterations": 3, "gradient_accumulation_steps": 2},
    "across": {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of a tiny model, several threads wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def raw_prompts() -> Raw:
    rng, rows = np.random.default_rng(1), []
    words = ["Ada", "Bo", "apples", "books", "cups", "12", "34", "sunny", "Oslo", "Lima"]
    for n in range(NUM_PROMPTS):
        text = " ".join(rng.choice(words, rng.integers(2, 9)))
        talk = [{"role": "user", "content": text}]
        if n % 3 == 0:
            talk = [{"role": "system", "content": "Be brief."}, *talk]
        rows.append({"prompt": talk, "wanted": n, "topic": f"topic {n % 2}"})
    return rows


def options_of(split: str) -> dict[str, Any]:
    """Two prompts a generation batch, whatever it is split into."""
    rows = 2 * EACH // SPLITS[split].get("steps_per_generation", 1)
    if split == "across":  # three forwards of four rows: three prompts a generation batch
        rows = 4
    return {"per_device_train_batch_size": rows, "num_generations": EACH, **SPLITS[split]}


def prompts_of_batch(split: str) -> int:
    return 3 if split == "across" else 2


def job_of(folder: Path, raw: Raw, tokenizer: str, **plan: Any) -> JobConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in raw))
    defaults = {"batch_size": 2, "seed": 3, "layout": "padded_left", "tail": "drop", "epochs": 2}
    return load_job(
        {
            "source": {"path": str(path), "format": "prompt", "carry": ["wanted", "topic"]},
            "tokenizer": {"name": tokenizer, "chat_template": TURNS},
            "cache": {"root": str(folder / "cache")},
            "plan": {**defaults, **plan},
        }
    )


def even_ids(completion_ids: Any, wanted: Any, topic: Any, **others: Any) -> list[float]:
    """More for tokens that are even, by what the row says."""
    return [
        float(np.mean([token % 2 == number % 2 for token in ids])) + 0.1 * (name == "topic 1")
        for ids, number, name in zip(completion_ids, wanted, topic, strict=True)
    ]


def watched(base: type[Any], seen: list[list[list[int]]], seeded: bool) -> type[Any]:
    """Notes the ids of the prompts that are generated for."""
    from transformers import set_seed

    class Watched(base):  # type: ignore[misc,valid-type]
        def _generate_single_turn(self, prompt_ids: Any, *others: Any, **more: Any) -> Any:
            if not seen and seeded:
                set_seed(0)  # a DataLoader has drawn a number of its own
            seen.append([list(ids) for ids in prompt_ids])
            return super()._generate_single_turn(prompt_ids, *others, **more)

    return Watched


def config_of(host: str, folder: Path, split: str, **options: Any) -> Any:
    known = {
        **arguments(folder),
        "bf16": False,
        "max_completion_length": 5,
        "learning_rate": 1e-2,
        "beta": 0.0,
    }
    return trl_classes(HOSTS[host])[1](**{**known, **options_of(split), **options})


def behind_server(
    host: str,
    folder: Path,
    client: StreamClient,
    tokenizer: Any,
    split: str = "plain",
    seeded: bool = False,
    **options: Any,
) -> tuple[Any, list[list[list[int]]]]:
    """The trainer on a server's stream, and the prompts it generates for."""
    from raysvc.integrations.trl_prompts import PromptsFromServer

    seen: list[list[list[int]]] = []
    kind = type(
        "Mine", (PromptsFromServer, watched(trl_classes(HOSTS[host])[0], seen, seeded)), {"client": client}
    )
    args = config_of(host, folder, split, **options)
    return kind(model=tiny_lm(), reward_funcs=even_ids, processing_class=tokenizer, args=args), seen


def trl_alone(
    host: str, folder: Path, raw: Raw, tokenizer: Any, split: str, **options: Any
) -> tuple[Any, list[list[list[int]]]]:
    """TRL's own trainer of raw prompts, in the order they come in."""
    from datasets import Dataset

    seen: list[list[list[int]]] = []
    args = config_of(host, folder / "alone", split, shuffle_dataset=False, **options)
    trainer = watched(trl_classes(HOSTS[host])[0], seen, seeded=True)(
        model=tiny_lm(), reward_funcs=even_ids, processing_class=tokenizer, args=args,
        train_dataset=Dataset.from_list(raw),
    )  # fmt: skip
    return trainer, seen


def order_of(client: StreamClient) -> list[int]:
    """Source rows in the order of the plan."""
    from raysvc.builds.job_plan import plan_of

    plan = plan_of(client.job, client.entry)
    origin = client.entry.table()["source_row"].to_numpy()
    steps = range(plan.schedule.num_steps)
    return [
        int(origin[row]) for step in steps for mini in plan.step(step, 1).mini_batches for row in mini.row_ids
    ]


def facts(trainer: Any) -> list[list[float]]:
    return [[line.get(name, 0.0) for name in FACTS] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize(
    ("host", "split"),
    [
        pytest.param("grpo", "plain", marks=pytest.mark.slow),
        pytest.param("grpo", "reused", marks=pytest.mark.slow),
        ("grpo", "across"),
        ("rloo", "reused"),
    ],
)
def test_trl_generates_for_the_prompts_that_it_would_have_taken_itself_and_trains_the_same(
    host: str, split: str, tmp_path: Path, sample: dict[str, str]
) -> None:
    raw, tokenizer = raw_prompts(), tokenizer_of(sample["tokenizer"])
    client = StreamClient(job_of(tmp_path, raw, sample["tokenizer"], batch_size=prompts_of_batch(split)))
    trainer, seen = behind_server(host, tmp_path, client, tokenizer, split, seeded=True)
    trainer.train()
    order = order_of(client)
    alone, theirs = trl_alone(host, tmp_path, [raw[number] for number in order], tokenizer, split)
    alone.train()
    assert len(order) == 2 * (NUM_PROMPTS // prompts_of_batch(split) * prompts_of_batch(split))
    assert order != sorted(order), "an order of its own"
    assert seen == theirs
    ours, expected = facts(trainer), facts(alone)
    assert len(ours) == len(expected) == alone.state.max_steps
    for one, other in zip(ours, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-7)
    assert np.ptp([line[1] for line in ours]) > 0.1, "rewards differ"
    assert client.next_step == client.schedule.num_steps, "every generation batch is committed"


@pytest.mark.parametrize(
    ("split", "stop"),
    [
        pytest.param("plain", 2, marks=pytest.mark.slow),
        pytest.param("plain", 4, marks=pytest.mark.slow),
        ("reused", 2),
        pytest.param("reused", 4, marks=pytest.mark.slow),
        pytest.param("across", 2, marks=pytest.mark.slow),
        ("across", 4),
    ],
)
def test_a_run_that_was_stopped_anywhere_goes_on_with_its_prompts_and_losses(
    split: str, stop: int, tmp_path: Path, sample: dict[str, str]
) -> None:
    raw, tokenizer = raw_prompts(), tokenizer_of(sample["tokenizer"])
    job = job_of(tmp_path, raw, sample["tokenizer"], batch_size=prompts_of_batch(split))
    saving = {"save_strategy": "steps", "save_steps": stop}
    whole, seen = behind_server(
        "grpo", tmp_path / "whole", StreamClient(job), tokenizer, split, save_strategy="no"
    )
    whole.train()
    first, before = behind_server(
        "grpo", tmp_path / "halves", StreamClient(job), tokenizer, split, max_steps=stop, **saving
    )
    first.train()
    client = StreamClient(job)
    second, after = behind_server("grpo", tmp_path / "halves", client, tokenizer, split, **saving)
    second.train(resume_from_checkpoint=True)
    assert before + after == seen, "each generation batch is generated once"
    assert facts(second) == facts(whole)
    assert client.next_step == client.schedule.num_steps


def test_completions_of_a_round_are_not_taken_over_by_other_ranks_or_batch_sizes(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    raw, tokenizer = raw_prompts(), tokenizer_of(sample["tokenizer"])
    job = job_of(tmp_path, raw, sample["tokenizer"])
    saving = {"save_strategy": "steps", "save_steps": 2}
    first, _ = behind_server("grpo", tmp_path, StreamClient(job), tokenizer, "reused", max_steps=2, **saving)
    first.train()
    more = {"gradient_accumulation_steps": 4, "steps_per_generation": 4, "per_device_train_batch_size": 2}
    for split, options, what in (
        ("reused", {**more, "num_iterations": 3}, "of 6 forwards, and one has 12 now"),
        ("plain", {}, "of 6 forwards, and one has 1 now"),
        ("reused", {**more, "num_iterations": 6, "steps_per_generation": 1, "per_device_train_batch_size": 8,
                    "gradient_accumulation_steps": 1}, "this rank's completions are not in it"),
    ):  # fmt: skip
        second, _ = behind_server("grpo", tmp_path, StreamClient(job), tokenizer, split, **options)
        with pytest.raises(StateMismatch, match=what):
            second.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("plan", "options", "what"),
    [
        ({"batch_size": 4}, {}, r"plan.batch_size: is 4, and TRL generates for 2 prompts at once"),
        ({"tail": "pad"}, {}, "plan.tail: is pad, which leaves 1 prompts to the last generation batch"),
        ({"update_epochs": 2}, {}, "plan.update_epochs: .* use 1, and num_iterations"),
        ({"layout": "packed"}, {}, "plan.layout: is packed"),
        ({}, {"num_train_epochs": 2}, "num_train_epochs: .* use 1, and plan.epochs"),
        ({}, {"dataloader_num_workers": 1}, "dataloader_num_workers: .* use look_ahead_steps"),
        ({}, {"shuffle_dataset": False}, "shuffle_dataset: .* use plan.shuffle"),
    ],
)
def test_what_would_give_other_prompts_than_the_plan_is_refused_by_name(
    plan: dict[str, Any], options: dict[str, Any], what: str, tmp_path: Path, sample: dict[str, str]
) -> None:
    client = StreamClient(job_of(tmp_path, raw_prompts(), sample["tokenizer"], **plan))
    trainer, seen = behind_server("grpo", tmp_path, client, tokenizer_of(sample["tokenizer"]), **options)
    with pytest.raises(ConfigError, match=what):
        trainer.train()
    assert not seen


def test_what_renders_prompts_itself_is_refused_by_name(tmp_path: Path, sample: dict[str, str]) -> None:
    from raysvc.integrations.trl_prompts import PromptsFromServer

    kind = type("Mine", (PromptsFromServer, trl.GRPOTrainer), {"client": None})
    for name in ("tools", "environment_factory", "rollout_func"):
        with pytest.raises(ConfigError, match=f"{name}: renders prompts itself"):
            kind(model=None, **{name: [print]})


def test_rows_that_have_an_answer_are_no_prompts(tmp_path: Path, sample: dict[str, str]) -> None:
    raw = [{**row, "prompt": "a b", "completion": "c d"} for row in raw_prompts()]
    job = job_of(tmp_path, raw, sample["tokenizer"])
    job = job.model_copy(update={"source": job.source.model_copy(update={"format": "prompt_completion"})})
    trainer, _ = behind_server("grpo", tmp_path, StreamClient(job), tokenizer_of(sample["tokenizer"]))
    with pytest.raises(ConfigError, match=r"use source\.format: prompt"):
        trainer.train()


def test_the_rewards_get_messages_where_prompt_of_gives_messages(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    from raysvc.integrations.trl_prompts import PromptsFromServer

    told: list[Any] = []

    def noted(prompts: Any, completions: Any, topic: Any, **others: Any) -> list[float]:
        told.extend(zip(prompts, completions, topic, strict=True))
        return [float(len(str(one)) % 3) for one in completions]

    class Mine(PromptsFromServer, trl.GRPOTrainer):  # type: ignore[misc,name-defined]
        client = StreamClient(job_of(tmp_path, raw_prompts(), sample["tokenizer"], epochs=1))

        def prompt_of(self, ids: list[int], columns: dict[str, Any]) -> Any:
            return [{"role": "user", "content": f"about {columns['topic']}"}]

    tokenizer = tokenizer_of(sample["tokenizer"])
    args = config_of("grpo", tmp_path, "plain", max_steps=2)
    Mine(model=tiny_lm(), reward_funcs=noted, processing_class=tokenizer, args=args).train()
    assert len(told) == 2 * 2 * EACH
    for prompt, completion, topic in told:
        assert prompt == [{"role": "user", "content": f"about {topic}"}]
        assert completion[0]["role"] == "assistant"


def test_a_second_train_of_the_same_trainer_begins_again_at_step_0(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    client = StreamClient(job_of(tmp_path, raw_prompts(), sample["tokenizer"], epochs=1))
    trainer, seen = behind_server("grpo", tmp_path, client, tokenizer_of(sample["tokenizer"]), max_steps=3)
    trainer.train()
    assert client.next_step == 3
    trainer.train()
    assert client.next_step == 3
    assert seen[:3] == seen[3:]


def test_two_ranks_take_the_rows_that_trl_and_accelerate_would_deal_to_them(
    tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: TRL's sampler, cut by accelerate's; three prompts of four completions, so one lies on both ranks."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler
    from trl.trainer.utils import RepeatSampler

    from raysvc.integrations.trl_prompts import prompts_of

    job = job_of(tmp_path, raw_prompts(), sample["tokenizer"], batch_size=3)
    clients = [StreamClient(job, rank, 2) for rank in (0, 1)]
    order = order_of(clients[0])
    sampler = RepeatSampler(order, mini_repeat_count=EACH, batch_size=3, repeat_count=1, shuffle=False)
    steps = zip(clients[0].steps(), clients[1].steps(), strict=True)
    both = [[row for step in pair for row in prompts_of(step)] for pair in steps]
    assert {len(prompts_of(step)) for client in clients for step in client.steps()} == {1, 2}, "by cost"
    for rank, client in enumerate(clients):
        trainer, _ = behind_server(
            "grpo", tmp_path, client, tokenizer_of(sample["tokenizer"]), per_device_train_batch_size=3 * EACH
        )
        trainer.accelerator = SimpleNamespace(num_processes=2, process_index=rank)
        theirs = BatchSamplerShard(BatchSampler(sampler, 6, drop_last=False), 2, rank)
        for step, expected in zip(client.steps(), theirs, strict=True):
            monkeypatch.setattr("accelerate.utils.gather_object", lambda own, step=step: both[step.index])
            assert [row["wanted"] for row in trainer._rows_of(step)] == [order[place] for place in expected]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_of_accelerate_generate_for_the_prompts_that_trl_would_take_and_train_the_same(
    ray_session: None, tmp_path: Path, sample: dict[str, str]
) -> None:
    """Both runs in the same two processes; a prompt of each generation batch lies on both ranks."""
    import os
    import subprocess

    import ray

    import raysvc

    from .test_accelerate import TWO

    raw = raw_prompts()
    job = job_of(tmp_path, raw, sample["tokenizer"], batch_size=3)
    (tmp_path / "in_order.json").write_text(json.dumps([raw[row] for row in order_of(StreamClient(job))]))
    server = raysvc.serve(job, name="grpo-ranks", detached=False)
    arguments = [
        server.name,
        ray.get_runtime_context().gcs_address,
        "one",
        str(tmp_path),
        sample["tokenizer"],
    ]
    done = subprocess.run(
        [*TWO, "--module", "tests.integrations.grpo_ranks", *arguments],
        cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert not done.returncode, done.stderr[-3000:]
    made = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1)]
    for rank in made:
        (ours, seen), (theirs, their_seen) = rank["ours"], rank["theirs"]
        assert seen == their_seen
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        assert rank["left"] == 0
    assert len(made[0]["ours"][0]) == 6
    assert made[0]["ours"][1] != made[1]["ours"][1]
