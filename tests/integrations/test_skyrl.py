"""What stock SkyRL workers get: by hand on small shards, and beside SkyRL's own code in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysvc.collate.shard import Denominators, MicroBatch, Shard
from raysvc.errors import ConfigError

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]


def shard(layout: Any = "padded_left", **more: Any) -> Shard:
    """Three rows of responses of three tokens, and a dummy, on lines of six; masks 111, 001 and 000."""
    ids = np.array([[0, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6], [0, 0, 3, 8, 9, 7], [0, 0, 0, 0, 0, 0]], np.int32)
    mask = np.zeros((4, 6), np.uint8)
    mask[0, 3:], mask[1, 5] = 1, 1
    arrays = {
        "input_ids": ids,
        "loss_mask": mask,
        "rewards": np.array([1.0, 2.0, 3.0, 0.0], np.float32),
        "returns": np.array([1.0, 2.0, 3.0, 0.0]),
        "old_logprobs": np.full((4, 6), -0.5, np.float32),
        "advantages": np.ones((4, 6), np.float32),
        "prompt_tokens": np.array([2, 3, 1, 0], np.int32),
        "seq_lengths": np.array([5, 6, 4, 2], np.int32),
        "row_tokens": np.array([3, 1, 0, 0], np.int32),
        "row_group": np.array([0, 0, 1, -1], np.int32),
        "row_group_rows": np.array([2, 2, 1, 0], np.int32),
        "row_group_tokens": np.array([4, 4, 0, 0], np.int32),
        **more,
    }
    arrays = {name: values for name, values in arrays.items() if values is not None}
    row_ids = np.array([7, 8, 9, -1])
    return Shard(0, 0, 0, layout, arrays, row_ids, Denominators(4, 3, 2), (MicroBatch(0, 4, 6, 17),))


def test_a_response_begins_where_the_prompt_ends_and_not_at_its_first_target() -> None:
    from raysvc.integrations.skyrl import BatchRules, training_input

    batch = training_input(shard(), rules=BatchRules(reduction=None))
    columns = batch.columns
    assert batch.response_length == 3
    assert batch.row_ids == [7, 8, 9, -1]
    assert columns["sequences"].shape == columns["attention_mask"].shape == (4, 6)
    assert columns["response_mask"].sum(1).tolist() == [3, 3, 3, 0], "of masks 111, 001, 000 and a dummy"
    assert columns["loss_mask"].tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert columns["rewards"].tolist() == [[0, 0, 1], [0, 0, 2], [0, 0, 3], [0, 0, 0]], "at the last token"
    assert columns["returns"].tolist() == [[1, 1, 1], [2, 2, 2], [3, 3, 3], [0, 0, 0]]
    assert columns["action_log_probs"].tolist() == [[-0.5] * 3] * 3 + [[0.0] * 3]
    assert {"prompt_tokens", "old_logprobs", "row_group"}.isdisjoint(columns)


def test_a_column_is_cut_where_its_row_begins_to_answer() -> None:
    from raysvc.integrations.skyrl import BatchRules, training_input

    untrained = {"loss_mask": np.zeros((4, 6), np.uint8), "row_tokens": np.zeros(4, np.int32)}
    shorter = shard(prompt_tokens=np.array([3, 3, 2, 0], np.int32), **untrained)
    columns = training_input(shorter, rules=BatchRules(reduction=None)).columns
    assert columns["action_log_probs"].tolist() == [[0, -0.5, -0.5], [-0.5] * 3, [0, -0.5, -0.5], [0] * 3]


@pytest.mark.parametrize(
    ("reduction", "weights"),
    [
        ("token_mean", [1 / 4, 1 / 4, 1 / 4]),
        ("sequence_mean", [1 / 9, 1 / 3, 1 / 3]),
        ("seq_mean_token_sum_norm", [1 / 30, 1 / 30, 1 / 30]),
        ("prompt_mean", [1 / 8, 1 / 8, 1 / 2]),
    ],
)
def test_a_reduction_is_in_the_advantages_so_that_a_sum_is_the_mean(
    reduction: Any, weights: list[float]
) -> None:
    from raysvc.integrations.skyrl import BatchRules, training_input

    columns = training_input(shard(), rules=BatchRules(reduction, max_seq_len=10)).columns
    assert columns["advantages"][:, -1].tolist() == pytest.approx([*weights, 0])
    assert columns["loss_mask"].max() == 1
    sft = shard(**dict.fromkeys(("rewards", "returns", "old_logprobs", "advantages", "prompt_tokens")))
    batch = training_input(sft, rules=BatchRules(reduction, max_seq_len=10))
    assert set(batch.columns) == {"sequences", "attention_mask", "loss_mask"}, (
        "as SkyRL's SFT trainer makes them"
    )
    assert batch.columns["loss_mask"][0].tolist() == pytest.approx([weights[0]] * 3)


def test_ranks_get_equally_many_rows_of_one_shape() -> None:
    from raysvc.integrations.skyrl import common_shape, training_input

    small = shard()
    arrays = {
        name: values[:1, -5:] if values.ndim > 1 else values[:1] for name, values in small.arrays.items()
    }
    small = replace(small, arrays=arrays, row_ids=small.row_ids[:1], pad_token_id=99)
    common = common_shape([shard(), small])
    whole, made = (training_input(each, common).columns for each in (shard(), small))
    for name, values in made.items():
        assert values.shape == whole[name].shape, name
        assert torch.equal(values[0], whole[name][0]) or name == "sequences"
    assert made["sequences"].tolist() == [[99, 4, 5, 6, 7, 8], *[[99] * 6] * 3]
    assert made["attention_mask"].sum(1).tolist() == [5, 2, 2, 2], "what fills up is like a dummy"
    assert made["loss_mask"][1:].sum() == made["advantages"][1:].abs().sum() == 0


def test_columns_of_several_numbers_a_token_are_cut_as_the_others_are() -> None:
    from raysvc.integrations.skyrl import training_input
    from raysvc.job.carried import bf16_of

    rng = np.random.default_rng(0)
    experts, gate = rng.integers(1, 255, (4, 6, 4, 2), np.uint8), bf16_of(rng.integers(1, 99, (4, 6, 2)))
    wide = shard(experts=experts, gate=gate, rollout_expert_indices=experts)
    columns = training_input(wide).columns
    assert (columns["experts"].dtype, columns["gate"].dtype) == (torch.uint8, torch.bfloat16)
    assert columns["experts"][:3].tolist() == experts[:3, -3:].tolist()
    assert not columns["experts"][3].any()
    assert columns["rollout_expert_indices"].tolist() == experts.tolist(), "SkyRL has these for whole rows"
    bits = torch.from_numpy(gate["bfloat16"][:3, -3:].copy())
    assert torch.equal(columns["gate"][:3].view(torch.uint16), bits)
    experts[:] = 0
    assert columns["experts"].any(), "it is the batch's own memory"


def by_hand(given: Shard, common: Any, name: str, dtype: Any) -> np.ndarray:
    """[B, A, ...], a column of responses, row by row."""
    values = given.arrays[name]
    out = np.zeros((common.rows, common.response, *values.shape[2:]), dtype)
    for row, (row_id, length, start) in enumerate(
        zip(given.row_ids, given.arrays["seq_lengths"], given.arrays["prompt_tokens"], strict=True)
    ):
        count = int(length - start) if row_id >= 0 else 0
        if not count:
            continue
        if values.ndim > 1:
            out[row, -count:] = values[row, -count:]
        elif name == "rewards":
            out[row, -1] = values[row]
        else:
            out[row, -count:] = values[row]
    return out


@pytest.mark.parametrize("seed", range(40))
def test_random_responses_are_cut_as_by_hand(seed: int) -> None:
    """Of any type, also where a response is empty, a rank has one row, and the others are wider and have more."""
    from raysvc.integrations.skyrl import BatchRules, Common, training_input
    from raysvc.job.carried import BF16, bf16_of

    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(1, 6)), int(rng.integers(3, 12))
    lengths = rng.integers(2, width + 1, rows).astype(np.int32)
    starts = np.array([rng.integers(1, length + 1) for length in lengths], np.int32)
    row_ids = np.where(rng.random(rows) < 0.2, -1, np.arange(rows))
    types = {"a": np.float32, "b": np.float64, "c": np.int32, "d": np.int64, "e": np.uint8, "f": np.float16}
    of_tokens = {name: rng.integers(0, 99, (rows, width)).astype(dtype) for name, dtype in types.items()}
    of_rows = {name + "_row": rng.integers(0, 99, rows).astype(dtype) for name, dtype in types.items()}
    of_tokens["a"][rng.random((rows, width)) < 0.3] = np.nan
    more = {
        **of_tokens,
        **of_rows,
        "h": bf16_of(rng.normal(size=(rows, width))),
        "rewards": of_rows["b_row"] + 1,
    }
    zeros = np.zeros(rows, np.int32)
    made = shard(
        input_ids=np.ones((rows, width), np.int32), loss_mask=np.zeros((rows, width), np.uint8), seq_lengths=lengths,
        prompt_tokens=starts, row_tokens=zeros, row_group=zeros, row_group_rows=zeros, row_group_tokens=zeros,
        returns=None, old_logprobs=None, advantages=None, **more,
    )  # fmt: skip
    made = replace(made, row_ids=row_ids)
    for values in made.arrays.values():
        values.flags.writeable = False  # as from the object store
    common = Common(
        rows + int(rng.integers(3)), width + int(rng.integers(3)), int(rng.integers(width, width + 3))
    )
    columns = training_input(made, common, BatchRules(reduction=None)).columns
    for name, values in more.items():
        found, wanted = columns[name], values.dtype
        if wanted in (np.float64, np.float16):
            wanted = np.dtype(np.float32)
        bits = found.view(torch.uint16).numpy().view(BF16) if values.dtype == BF16 else found.numpy()
        assert bits.dtype == wanted
        assert bits.tobytes() == by_hand(made, common, name, wanted).tobytes(), name


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"state": np.zeros((4, 6), np.float32)}, r"'state' is .*: no number per row or token; leave it out"),
        ({"domain": np.array(["math", "code", "", ""])}, r"'domain' is .*: no number per row or token"),
        ({"prompt_tokens": None}, "rewards, .*no column says where those begin; add a per-row column 'prompt_tokens'"),
        ({"prompt_tokens": np.array([0, 3, 1, 0])}, "is 0 for row 7, which has 5 tokens; a response begins after at least one"),
        ({"prompt_tokens": np.array([9, 3, 1, 0])}, "is 9 for row 7, which has 5 tokens"),
        ({"prompt_tokens": np.array([3, 3, 1, 0])}, "row 7 has a target before its response"),
        ({"prompt_tokens": np.array([2, 3, 9, 0])}, "is 9 for row 9, which has 4 tokens"),
        ({"prompt_tokens": np.array([2.0, 3.0, np.nan, 0.0])}, r"is float64 \[4\]; .* one integer per row"),
        ({"prompt_tokens": np.ones((4, 6), np.int32)}, r"is int32 \[4, 6\]; .* one integer per row"),
        ({"values": np.ones(4), "old_values": np.ones(4)}, "'values' and 'old_values' are both SkyRL's 'values'; leave one out"),
        ({"response_mask": np.ones((4, 6), np.uint8)}, "'response_mask' is what SkyRL's batch has of its own; rename it"),
        ({"pixel_values": np.ones((9, 6)), "pixel_values_bounds": np.arange(5)}, "'pixel_values' belongs to media"),
        ({"sequences": np.ones((4, 6), np.int32)}, "'sequences' is what SkyRL's batch has of its own"),
    ],
)  # fmt: skip
def test_what_a_training_batch_has_no_place_for_is_named(change: dict[str, Any], what: str) -> None:
    from raysvc.integrations.skyrl import training_input

    changed = shard(**change)
    with pytest.raises(ConfigError, match=what):
        training_input(replace(changed, row_vectors=("state",) if "state" in change else ()))


def test_only_layouts_and_reductions_of_skyrl_are_taken() -> None:
    from raysvc.integrations.skyrl import BatchRules, training_input

    with pytest.raises(ConfigError, match=r"plan\.layout=padded_left"):
        training_input(shard("padded_right"))
    with pytest.raises(ConfigError, match="token_mean_legacy depends on micro-batches"):
        BatchRules("token_mean_legacy")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"algorithm\.max_seq_len"):
        BatchRules("seq_mean_token_sum_norm")


# -- beside SkyRL ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def python_with_skyrl() -> str:
    """Python of an environment with SkyRL 0.3.0 from PyPI, made by the script of the benchmarks when it is not there."""
    made = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "peers.py")], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"SkyRL cannot be installed from PyPI here: {made.stderr.strip().splitlines()[-1:]}")
    return made.stdout.split()[-1]


def run(python: str, script: str, *arguments: str) -> Any:
    import os

    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [python, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["rl", "sft", "packed"])
def test_random_batches_are_those_of_skyrl_through_its_dispatch_iterators_and_losses(
    python_with_skyrl: str, case: str
) -> None:
    facts = run(python_with_skyrl, "skyrl_peer.py", case, "300")
    assert facts["rows"] > 2000
    assert facts["theirs_failed"] <= 10
    if case != "packed":
        assert facts["uneven"] > 50, (
            "rows by tokens: ranks with different numbers of them are among the cases"
        )


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_skyrls_controller_and_worker_train_from_refs_as_from_their_own_batches(
    python_with_skyrl: str, tmp_path: Path
) -> None:
    facts = run(python_with_skyrl, "skyrl_run.py", str(tmp_path), "200")
    ours, theirs = facts["ours"], facts["theirs"]
    assert len(ours["losses"]) == len(theirs["losses"]) == 200
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-5)
    assert np.mean(ours["losses"][-10:]) < np.mean(ours["losses"][:10]) - 0.5, "the model learns"
    assert ours["driver_bytes"] == 0 < theirs["driver_bytes"]
