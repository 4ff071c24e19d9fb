"""From raw rows to the gradient: pairs and taught rows go through source, cache, `enrich`, plan and shards to the shipped
worker; oracle: one process that has `transformers`' own ids of the raw rows, and every model in the loop, in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raysvc
from raysvc.actors.server.entry_stream import EntryStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import SourceSpec
from raysvc.actors.worker.losses import DistillLoss
from raysvc.actors.worker.row_losses import PairLoss, RewardLoss
from raysvc.actors.worker.torch_worker import CausalLMWorker
from raysvc.builds.job_plan import plan_config
from raysvc.builds.mixed_job import mixture_spec
from raysvc.collate.shard import Shard
from raysvc.job.config import JobConfig
from raysvc.job.job_file import load_job
from raysvc.row_batch import RowBatch

from . import pair_reference
from .ranks import DoubleWorker, Ranks, gradients_of, tiny_spec
from .reference import distance

VOCAB, K, BETA = 512, 8, 0.4
EXACT = 1e-5  # columns that were computed have float32
PLANS: dict[str, dict[str, Any]] = {
    "packed": {"layout": "packed", "micro_batch_tokens": 160, "align": 4},
    "rows": {"layout": "padded_right", "micro_batch_size": 2},
}
PAIR_LOSSES = [
    (PairLoss("sigmoid", BETA), pair_reference.sigmoid(BETA)),
    (PairLoss("ipo", BETA), pair_reference.ipo(BETA)),
    (PairLoss("simpo", 2.0, margin=0.5), pair_reference.simpo(2.0, 0.5)),
    (PairLoss("orpo", BETA), pair_reference.orpo(BETA)),
]
NUM_ROWS = 6
CASES = [("packed", 1), ("packed", 2), ("rows", 2)]  # layout, ranks
Grads = tuple[dict[str, np.ndarray], float]


def words(number: int, count: int) -> str:
    rng = np.random.default_rng(number)
    return " ".join(rng.choice(["Ada", "apples", "12", "sunny", "Oslo", "cups"], count))


def raw_pairs() -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": words(n, n + 1)}],
            "chosen": [{"role": "assistant", "content": words(10 + n, 7 - n)}],
            "rejected": [{"role": "assistant", "content": words(20 + n, 2 + n % 3)}],
            "margin": n / 8,
        }
        for n in range(NUM_ROWS)
    ]


def raw_taught() -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": words(n, n + 1)}],
            "completion": [{"role": "assistant", "content": words(10 + n, 7 - n)}],
            "domain": "code" if n % 3 == 0 else "math",
            "heat": 0.5 + n,
        }
        for n in range(NUM_ROWS)
    ]


def save_teacher(folder: Path, seed: int) -> str:
    """A small Llama that is sure of itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(seed)
    lm = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes))
    lm.lm_head.weight.data *= 40
    lm.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: save_teacher(folder / name, seed) for seed, name in enumerate(["math", "code"], 5)}


def in_float64(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def student(role: str = "policy") -> Any:
    torch.manual_seed(0)
    spec = tiny_spec(role=role, vocab_size=VOCAB)
    return CausalLMWorker(0, 1, "cpu", spec.model_dump_json()).load_lm().double().eval()


def ids_and_mask(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """What `transformers` makes of a conversation, and which of it the assistant wrote."""
    made = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return made["input_ids"], made["assistant_masks"]


def logprobs_of(lm: Any, ids: list[int]) -> torch.Tensor:
    """[L - 1, V] of the tokens behind the first."""
    return lm(input_ids=torch.tensor(ids)[None], use_cache=False).logits[0, :-1].log_softmax(-1)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def shards_of(job: JobConfig, entry: raysvc.CacheEntry, layout: str, dp_size: int) -> tuple[Shard, ...]:
    """All rows in one mini-batch, as a server makes it."""
    planned = job.model_copy(
        update={"plan": job.plan.model_copy(update={**PLANS[layout], "shuffle": "none"})}
    )
    recipe = Recipe(plan_config(planned, entry), 0)
    sources = [SourceSpec(uri=one.uri) for one in entry.entries]
    stream = EntryStream(sources, {}, recipe, mixture_spec(planned, entry.entries))
    _, shards = stream.make(0, (dp_size,))
    found = sorted(row for shard in shards for row in shard.row_ids.tolist() if row >= 0)
    assert found == entry.row_ids().tolist()
    return shards


def check(found: list[Any], expected: list[Grads], what: str) -> None:
    for number, (grads, loss) in enumerate(expected):
        assert sum(rank[number][1]["loss"] for rank in found) == pytest.approx(loss, rel=EXACT), what
        for rank in found:
            assert distance(rank[number][0], grads) < EXACT, (what, number)


def one_process(
    shards_of_ranks: tuple[Shard, ...], losses: list[Any], role: Any = "policy"
) -> list[list[Grads]]:
    """The shards of all ranks, one after the other."""
    worker = DoubleWorker(0, 1, "cpu", tiny_spec(role=role, vocab_size=VOCAB).model_dump_json())
    worker.setup("")
    return [gradients_of(worker, list(shards_of_ranks), losses)]


@pytest.fixture(scope="module")
def pairs(
    tmp_path_factory: pytest.TempPathFactory, sample: dict[str, str], others: dict[str, str]
) -> tuple[JobConfig, raysvc.CacheEntry]:
    """Pairs with the log-probabilities of a reference, computed by `enrich`."""
    folder = tmp_path_factory.mktemp("pairs")
    job = load_job(
        {
            "source": {"path": write(folder / "rows.jsonl", raw_pairs()), "carry": {"margin": {"dtype": "float32"}}},
            "tokenizer": sample["tokenizer"],
            "cache": {"root": str(folder / "cache")},
            "plan": {"batch_size": NUM_ROWS},
            "enrich": {"ref_logprobs": {"model": others["math"]}},
        }
    )  # fmt: skip
    return job, raysvc.enrich(job)


@pytest.fixture(scope="module")
def of_raw_pairs(sample: dict[str, str], others: dict[str, str]) -> tuple[list[Grads], list[Grads]]:
    """Gradients of the losses of pairs, and of a reward model, without anything of the project."""
    from transformers import AutoTokenizer

    tokenizer, reference = AutoTokenizer.from_pretrained(sample["tokenizer"]), in_float64(others["math"])
    ids, masks, known, margin = [], [], [], []
    for row in raw_pairs():
        for name in ("chosen", "rejected"):
            own, mask = ids_and_mask(tokenizer, row["prompt"] + row[name])
            with torch.no_grad():
                labels = torch.tensor(own)[1:, None]
                said = logprobs_of(reference, own).gather(-1, labels)[:, 0].tolist()
            ids.append(own)
            masks.append(mask)
            known.append([0.0, *said])
            margin.append(row["margin"])
    offsets = np.cumsum([0, *map(len, ids)])
    flat = {"input_ids": np.concatenate(ids), "loss_mask": np.concatenate(masks), "ref_logprobs": np.concatenate(known)}  # fmt: skip
    rows = RowBatch(np.arange(len(ids)), offsets, flat, {"margin": np.array(margin)})
    found = []
    for _, formula in PAIR_LOSSES:
        lm = student()
        found.append(pair_reference.gradient(lm, formula(pair_reference.scores(lm, rows), rows)))
    critic = student("critic")
    rewards = pair_reference.gradient(critic, pair_reference.reward(critic, rows, 0.1))
    return found, [rewards]


REWARD = RewardLoss(margins=True, center=0.1)


@pytest.mark.parametrize(("layout", "dp_size"), CASES)
def test_raw_pairs_have_the_gradients_of_one_process(
    layout: str, dp_size: int, pairs: Any, of_raw_pairs: Any
) -> None:
    shards = shards_of(*pairs, layout, dp_size)
    check(one_process(shards, [loss for loss, _ in PAIR_LOSSES]), of_raw_pairs[0], layout)
    check(one_process(shards, [REWARD], "critic"), of_raw_pairs[1], f"rewards, {layout}")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_of_packed_pairs_have_them_too(
    ranks: Ranks, strategy: Any, pairs: Any, of_raw_pairs: Any
) -> None:
    shards = shards_of(*pairs, "packed", 2)
    losses = [loss for loss, _ in PAIR_LOSSES]
    spec = tiny_spec(strategy=strategy, vocab_size=VOCAB)
    check(ranks.run(spec, gradients_of, [([one], losses) for one in shards]), of_raw_pairs[0], strategy)
    spec = spec.model_copy(update={"role": "critic"})
    check(ranks.run(spec, gradients_of, [([one], [REWARD]) for one in shards]), of_raw_pairs[1], strategy)


def taught(folder: Path, tokenizer: str, models: dict[str, str], by: str) -> JobConfig:
    """Rows whose teacher is that of their domain: in one source, or of a mixture with a source for each."""
    carry = {"domain": {}, "heat": {"dtype": "float32"}}
    files = {
        name: {"path": write(folder / f"{name}.jsonl", [row for row in raw_taught() if row["domain"] == name]), "carry": carry}
        for name in models
    }  # fmt: skip
    mixture = {"sources": {name: {"source": source, "epochs": 1} for name, source in files.items()}}
    one = {"path": write(folder / "rows.jsonl", raw_taught()), "carry": carry}
    return load_job(
        {
            **({"mixture": mixture} if by == "source" else {"source": one}),
            "tokenizer": tokenizer,
            "cache": {"root": str(folder / "cache")},
            "plan": {"batch_size": NUM_ROWS},
            "enrich": {"teacher": {"by": by, "models": models, "top_k": K}},
        }
    )


def of_raw_rows(tokenizer: Any, models: dict[str, str], by_row: bool) -> Grads:
    """KL of the K likeliest entries of each row's own teacher, over the whole vocabulary of the student."""
    lm, teachers = student(), {name: in_float64(folder) for name, folder in models.items()}
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in raw_taught():
        ids, mask = ids_and_mask(tokenizer, row["prompt"] + row["completion"])
        heat = row["heat"] if by_row else 2.0
        with torch.no_grad():
            best = logprobs_of(teachers[row["domain"]], ids).topk(K)
        own = (logprobs_of(lm, ids) / heat).log_softmax(-1)
        for token in np.flatnonzero(mask).tolist():
            sure = torch.softmax(best.values[token - 1] / heat, 0)
            total = total + heat**2 * (sure * (sure.log() - own[token - 1][best.indices[token - 1]])).sum()
            count += 1
    (total / count).backward()
    grads = {f"lm.{name}": weight.grad.numpy().copy() for name, weight in lm.named_parameters()}
    return grads, float(total.detach() / count)


@pytest.mark.parametrize("by", ["domain", "source"])
def test_rows_of_several_teachers_have_the_gradient_of_a_dense_kl(
    tmp_path: Path, sample: dict[str, str], others: dict[str, str], by: str
) -> None:
    from transformers import AutoTokenizer

    job = taught(tmp_path, sample["tokenizer"], others, by)
    entry, tokenizer = raysvc.enrich(job), AutoTokenizer.from_pretrained(sample["tokenizer"])
    expected = [of_raw_rows(tokenizer, others, by_row) for by_row in (False, True)]
    losses = [DistillLoss(temperature=2.0), DistillLoss(temperature_column="heat")]
    for layout, dp_size in CASES:
        found = one_process(shards_of(job, entry, layout, dp_size), losses)
        check(found, expected, f"{layout} on {dp_size}")
