"""SkyRL's own code beside our batches; run by test_skyrl.py in an environment that has SkyRL. Prints JSON.

    python skyrl_peer.py rl|sft|packed SEEDS

Every case makes random rows, gives them to SkyRL's collation and to ours, hands both through its `MeshDispatch`, its iterators and
its losses, and compares tensors row by row and losses over all ranks.
"""

from __future__ import annotations

import json
import pickle
import sys
import typing
from types import SimpleNamespace
from typing import Any

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc]  # what SkyRL needs on Python 3.11

import numpy as np  # noqa: E402
import torch  # noqa: E402
from loguru import logger  # noqa: E402
from skyrl.backends.skyrl_train.distributed import dispatch as their_dispatch  # noqa: E402
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch  # noqa: E402
from skyrl.backends.skyrl_train.utils.ppo_utils import (  # noqa: E402
    PolicyLossRegistry,
    apply_loss_reduction_to_advantages_minibatch,
)
from skyrl.backends.skyrl_train.workers.worker_utils import BatchIterator, TokenBasedBatchIterator  # noqa: E402
from skyrl.train.config.config import AlgorithmConfig  # noqa: E402
from skyrl.train.dataset.collators import DefaultCollator, PackedDataCollator  # noqa: E402
from skyrl.train.dataset.preprocess import (  # noqa: E402
    compute_prompt_boundaries,
    convert_prompts_responses_to_batch_tensors,
)

from raysvc.collate.collate import CollateSpec  # noqa: E402
from raysvc.integrations.skyrl import BatchRules  # noqa: E402
from raysvc.integrations.skyrl_rules import REDUCTIONS  # noqa: E402
from raysvc.job.config import PlanConfig  # noqa: E402
from raysvc.plan.plan import Plan  # noqa: E402
from raysvc.row_batch import RowBatch  # noqa: E402

logger.remove()
PAD = 99
MAX_SEQ_LEN = 23
TOKENIZER = SimpleNamespace(pad_token_id=PAD)
PER_TOKEN = (
    "rewards",
    "rollout_logprobs",
    "action_log_probs",
    "base_action_log_probs",
    "advantages",
    "returns",
)


def random_rows(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Rows of some prompts, each with the columns of its response; masks may begin, end or be all 0."""
    rows = []
    for prompt in range(int(rng.integers(2, 7))):
        for _ in range(int(rng.integers(1, 4))):
            before, after = int(rng.integers(1, 9)), int(rng.integers(1, 10))
            row: dict[str, Any] = {"uid": f"p{prompt}", "prompt": rng.integers(0, 90, before).tolist()}
            row["response"] = rng.integers(0, 90, after).tolist()
            mask = rng.random(after) < rng.choice([0.0, 0.5, 1.0], p=[0.1, 0.6, 0.3])
            mask[: int(rng.integers(0, 3))] = False
            row["mask"] = mask.astype(int).tolist()
            row |= {name: rng.normal(size=after).astype(np.float32).tolist() for name in PER_TOKEN}
            row["experts"] = rng.integers(0, 200, (before + after, 2, 3)).tolist()
            rows.append(row)
    return rows


def our_batches(
    rows: list[dict[str, Any]],
    rng: np.random.Generator,
    dp_size: int,
    plan: dict[str, Any],
    rules: BatchRules = BatchRules(),
) -> tuple[list[TrainingInputBatch], bool]:
    """Batches of one mini-batch of all rows, as a worker opens them, and whether the plan has ranks with different numbers of
    rows; what stands at prompts must not matter."""
    lengths = [len(row["prompt"]) + len(row["response"]) for row in rows]
    tokens: dict[str, Any] = {
        "input_ids": np.concatenate([row["prompt"] + row["response"] for row in rows]).astype(np.int32),
        "loss_mask": np.concatenate([[0] * len(row["prompt"]) + row["mask"] for row in rows]).astype(
            np.uint8
        ),
    }
    for name in PER_TOKEN if "rewards" in rows[0] else ():
        parts = [np.append(rng.normal(size=len(row["prompt"])), row[name]) for row in rows]
        tokens[
            {"action_log_probs": "old_logprobs", "base_action_log_probs": "ref_logprobs"}.get(name, name)
        ] = np.concatenate(parts).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    per_row = {"prompt_tokens": np.array([len(row["prompt"]) for row in rows], np.int32)}
    batch = RowBatch(np.arange(len(rows)), offsets, tokens, per_row if "rewards" in rows[0] else {})
    uids = [row["uid"] for row in rows]
    config = PlanConfig(batch_size=len(set(uids)), shuffle="none", columns=("input_ids", "loss_mask"), **plan)
    [mini] = Plan(config, np.array(lengths, np.int32), uids=uids).step(0, dp_size).mini_batches
    index = np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in mini.row_ids.tolist()])
    taken = RowBatch(
        mini.row_ids,
        np.concatenate([[0], np.cumsum(np.array(lengths)[mini.row_ids])]).astype(np.int64),
        {name: values[index] for name, values in tokens.items()},
        {name: values[mini.row_ids] for name, values in batch.rows.items()},
    )
    names = (*tokens, *batch.rows, "labels")
    made = rules.collate(
        taken, mini, CollateSpec(step=0, mini_index=0, layout=config.layout, pad_token_id=PAD, columns=names, align=config.align)
    )  # fmt: skip
    uneven = len({len(rank.rows) for rank in mini.ranks}) > 1
    return [put(shard.to_wire()) for shard in made], uneven


def staged(batch: TrainingInputBatch, dp_size: int) -> list[TrainingInputBatch]:
    """What SkyRL's own `stage_chunks` puts into the object store, one per rank."""
    boundaries = [(0, len(batch["sequences"]))]
    [chunks] = their_dispatch.MeshDispatch.stage_chunks(dp_size, batch, boundaries)
    return chunks


def put(batch: Any) -> Any:
    """Instead of Ray's: through pickle and back."""
    return pickle.loads(pickle.dumps(batch, protocol=5))


def logprobs_of(sequences: torch.Tensor, attention: torch.Tensor, width: int) -> torch.Tensor:
    """[B, width], made-up log-probabilities of the last tokens, each a function of the row up to it."""
    cells = (sequences * attention).double()
    return (-0.2 - ((cells.cumsum(1) * 0.37 + cells) % 1.7)).float()[:, -width:]


def total_loss(chunks: list[TrainingInputBatch], loss: str, micro: dict[str, int]) -> tuple[float, list[int]]:
    """The loss summed over ranks and micro-batches, as SkyRL's workers do; micro-batches of each rank."""
    config, total, counts = AlgorithmConfig(), 0.0, []
    for chunk in chunks:
        iterator = (
            TokenBasedBatchIterator(chunk, **micro)
            if "max_tokens_per_microbatch" in micro
            else BatchIterator(chunk, **micro)
        )
        counts.append(len(iterator))
        for one in iterator:
            exp = one if not isinstance(one, TrainingInputBatch) else iterator.batch_to_experience(one)
            new = logprobs_of(exp.sequences, exp.attention_mask, exp.num_actions)
            old = exp.action_log_probs if exp.action_log_probs is not None else new
            value, _ = PolicyLossRegistry.get(loss)(
                new,
                old,
                exp.advantages,
                config=config,
                loss_mask=exp.loss_mask,
                rollout_logprobs=exp.rollout_logprobs,
            )
            total += float(value)
    return total, counts


def rl(seed: int) -> dict[str, Any]:
    """One mini-batch of rollouts, under each reduction."""
    rng = np.random.default_rng(seed)
    rows = random_rows(rng)
    dp_size = int(rng.integers(1, 5))
    plan = [{"micro_batch_size": int(rng.integers(1, 4))}, {"micro_batch_tokens": int(rng.integers(20, 90))}]
    reduction = list(REDUCTIONS)[seed % 4]
    rules = BatchRules(reduction, "prompt_tokens", MAX_SEQ_LEN)
    ours, uneven = our_batches(rows, rng, dp_size, {"layout": "padded_left", **plan[seed % 2]}, rules)
    made = convert_prompts_responses_to_batch_tensors(
        TOKENIZER, [row["prompt"] for row in rows], [row["response"] for row in rows],
        [row["rewards"] for row in rows], [row["mask"] for row in rows],
        [row["rollout_logprobs"] for row in rows], [row["experts"] for row in rows],
    )  # fmt: skip
    names = ("sequences", "attention_mask", "response_mask", "rewards", "loss_mask", "rollout_logprobs")
    whole = TrainingInputBatch(dict(zip(names, made, strict=False)))
    width = whole["response_mask"].shape[1]
    for name in ("action_log_probs", "base_action_log_probs", "advantages", "returns"):
        cells = torch.zeros(len(rows), width)
        for number, row in enumerate(rows):
            cells[number, width - len(row[name]) :] = torch.tensor(row[name])
        whole[name] = cells
    whole.metadata = {"response_length": width}
    scaled = apply_loss_reduction_to_advantages_minibatch(
        whole["advantages"], whole["loss_mask"], reduction, 1, MAX_SEQ_LEN,
        compute_prompt_boundaries([row["uid"] for row in rows]),
    )  # fmt: skip
    whole["advantages"] = scaled
    seen = 0
    for batch in ours:
        assert batch.metadata["response_length"] == width
        assert set(batch) == set(whole), set(batch) ^ set(whole)
        for place, row in enumerate(batch.metadata["row_ids"]):
            if row < 0:
                assert not batch["loss_mask"][place].any()
                continue
            seen += 1
            for name in whole:
                mine, theirs = batch[name][place], whole[name][row]
                assert mine.dtype == theirs.dtype, (name, mine.dtype, theirs.dtype)
                if name == "advantages":
                    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
                else:
                    assert torch.equal(mine, theirs), (name, mine, theirs)
    assert seen == len(rows)
    theirs = staged(whole, dp_size)
    for micro in ({"sample_batch_size": 1 + seed % 3}, {"max_tokens_per_microbatch": 40}):
        (mine, counts), (wanted, _) = (
            total_loss(chunks, "regular", micro) for chunks in ([put(b) for b in ours], theirs)
        )
        assert abs(mine - wanted) <= 1e-5 * max(1.0, abs(wanted)), (mine, wanted)
        if "sample_batch_size" in micro:
            assert len(set(counts)) == 1, counts
    return {"rows": len(rows), "uneven": uneven}


def sft_examples(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as SkyRL's tokenization gives them: a window of actions at the end."""
    out = []
    for row in rows:
        ids = row["prompt"] + row["response"]
        first = row["mask"].index(1) if 1 in row["mask"] else len(row["mask"]) - 1
        out.append({
            "input_ids": ids, "attention_mask": [1] * len(ids), "loss_mask": row["mask"][first:],
            "num_actions": len(row["mask"]) - first,
        })  # fmt: skip
    return out


def only_tokens(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: row[name] for name in ("prompt", "response", "mask")} | {"uid": str(n)}
        for n, row in enumerate(rows)
    ]


def sft(seed: int) -> dict[str, Any]:
    """One mini-batch of rows for SkyRL's SFT trainer, padded."""
    rng = np.random.default_rng(seed)
    rows = only_tokens(random_rows(rng))
    dp_size = int(rng.integers(1, 5))
    plan = [{"micro_batch_size": 2}, {"micro_batch_tokens": int(rng.integers(20, 90))}][seed % 2]
    ours, uneven = our_batches(rows, rng, dp_size, {"layout": "padded_left", **plan})
    whole = DefaultCollator(TOKENIZER, 1)(sft_examples(rows), len(rows))
    width = max(ours[0].metadata["response_length"], whole.metadata["response_length"])
    for batch in ours:
        for place, row in enumerate(batch.metadata["row_ids"]):
            if row >= 0:
                for name in ("sequences", "attention_mask"):
                    assert torch.equal(batch[name][place], whole[name][row])
                mine, theirs = (
                    torch.nn.functional.pad(x, (width - len(x), 0))
                    for x in (batch["loss_mask"][place], whole["loss_mask"][row])
                )
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
    micro = {"sample_batch_size": 1 + seed % 3}
    (mine, counts), (wanted, _) = (
        total_loss(chunks, "cross_entropy", micro)
        for chunks in ([put(b) for b in ours], staged(whole, dp_size))
    )
    assert abs(mine - wanted) <= 1e-5 * max(1.0, abs(wanted)), (mine, wanted)
    assert len(set(counts)) == 1, counts
    return {"rows": len(rows), "uneven": uneven}


def packed(seed: int) -> dict[str, Any]:
    """One mini-batch of rows for SkyRL's SFT trainer, packed."""
    rng = np.random.default_rng(seed)
    rows = only_tokens(random_rows(rng))
    dp_size, tp_size, capacity = (
        int(rng.integers(1, 4)),
        int(rng.choice([1, 2, 4])),
        int(rng.integers(24, 60)),
    )
    plan = {"layout": "packed", "micro_batch_tokens": capacity, "align": tp_size}
    ours, _ = our_batches(rows, rng, dp_size, plan)
    ours = [put(batch) for batch in ours]
    assert len({len(batch["sequences"]) for batch in ours}) == 1, "as many lines on every rank"
    collator = PackedDataCollator(
        TOKENIZER, max_tokens_per_microbatch=capacity, tp_size=tp_size, pp_size=1, cp_size=1, dp_size=dp_size,
        batch_size=len(rows), micro_train_batch_size_per_gpu=1,
    )  # fmt: skip
    try:
        whole = collator(sft_examples(rows), len(rows))
    except ValueError:  # SkyRL cannot always make as many bins as ranks need
        return {"rows": len(rows), "theirs_failed": True}
    mine, theirs = (
        {key: value for batch in batches for key, value in pieces(batch, tp_size)}
        for batches in (ours, [whole])
    )
    mine = {key: value for key, value in mine.items() if set(key) != {PAD}}
    assert mine.keys() == theirs.keys()
    for key, weights in mine.items():
        torch.testing.assert_close(weights, theirs[key], rtol=1e-6, atol=0)
    for batch in [*ours, whole]:
        assert (
            batch.metadata["response_length"]
            == batch["sequences"].shape[1] - 1
            == batch["loss_mask"].shape[1]
        )
        assert {name: value.dtype for name, value in batch.items() if name != "sub_seq_lengths"} == {
            "sequences": torch.int64, "attention_mask": torch.int64, "loss_mask": torch.float32,
        }  # fmt: skip
    return {"rows": len(rows)}


def pieces(batch: TrainingInputBatch, align: int) -> typing.Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """(ids, weights of predicting the next token) of each row, found by `sub_seq_lengths` alone, as SkyRL's worker does."""
    for line, lengths in enumerate(batch["sub_seq_lengths"].tensors):
        start = 0
        for length in lengths.tolist():
            stop = start + length
            assert batch["attention_mask"][line, start:stop].all()
            assert not batch["loss_mask"][line, stop - 1 : stop].any(), "no row predicts the next one"
            yield (
                tuple(batch["sequences"][line, start:stop].tolist()),
                batch["loss_mask"][line, start : stop - 1],
            )
            start += -(-length // align) * align
        assert not batch["attention_mask"][line, start:].any()


def main() -> None:
    case, seeds = {"rl": rl, "sft": sft, "packed": packed}[sys.argv[1]], range(int(sys.argv[2]))
    their_dispatch.ray = SimpleNamespace(put=put)
    facts = [case(seed) for seed in seeds]
    print(
        json.dumps(
            {name: sum(fact.get(name, 0) for fact in facts) for name in ("rows", "uneven", "theirs_failed")}
        )
    )


if __name__ == "__main__":
    main()
