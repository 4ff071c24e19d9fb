"""What stock SkyRL workers get: by hand on small shards, and beside SkyRL's own code in an environment of its own."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysvc
from raysvc.actors.server.make_step import Recipe, make_step, outline
from raysvc.actors.server.spec import Part, Role
from raysvc.collate.collate import CollateSpec, collate_mini_batch
from raysvc.collate.geometry import geometry_of
from raysvc.collate.loss_weights import row_weights
from raysvc.collate.shard import Shard
from raysvc.collate.shard_bytes import ColumnBytes, bytes_by_rank
from raysvc.errors import ConfigError
from raysvc.integrations.skyrl import BatchRules
from raysvc.integrations.skyrl_rules import REDUCTIONS, THEIR_NAMES, WHOLE_ROW
from raysvc.integrations.skyrl_tensors import BatchShard, TrainingInput, training_input
from raysvc.job.column_dtypes import BF16, bf16_of
from raysvc.job.config import PlanConfig
from raysvc.plan.plan import MiniBatchPlan, Plan
from raysvc.plan.rank_plan import RankPlan
from raysvc.row_batch import RowBatch, WideRows

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
PAD = 99
ROW_IDS, LENGTHS, GROUPS = np.array([7, 8, 9]), np.array([5, 6, 4]), np.array([0, 0, 1], np.int32)


def made_of(
    change: dict[str, Any] | None = None,
    rules: BatchRules | None = None,
    layout: Any = "padded_left",
    ranks: Any = ([0, 1, 2, -1],),
    wide: dict[str, np.ndarray] | None = None,
) -> tuple[BatchShard, ...]:
    """Three rows of responses of three tokens, and a dummy; masks 111, 001 and 000. A `change` of a column: None takes it away."""
    mask = np.zeros(15, np.uint8)
    mask[2:5], mask[10] = 1, 1
    columns: dict[str, Any] = {
        "input_ids": np.array([4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 3, 8, 9, 7], np.int32),
        "loss_mask": mask,
        "rewards": np.array([1.0, 2.0, 3.0], np.float32),
        "returns": np.array([1.0, 2.0, 3.0]),
        "old_logprobs": np.full(15, -0.5, np.float32),
        "advantages": np.ones(15, np.float32),
        "prompt_tokens": np.array([2, 3, 1], np.int32),
        **(change or {}),
    }
    columns = {name: values for name, values in columns.items() if values is not None}
    per_row = {name: values for name, values in columns.items() if len(values) == 3}
    rows = RowBatch(
        ROW_IDS,
        np.append(0, np.cumsum(LENGTHS)),
        {n: v for n, v in columns.items() if n not in per_row},
        per_row,
        {
            name: WideRows(values.dtype, values.shape[1:], np.split(values, np.cumsum(LENGTHS)[:-1]))
            for name, values in (wide or {}).items()
        },
    )
    plans = [np.array(rank, np.int32) for rank in ranks]
    mini = MiniBatchPlan(
        ROW_IDS, np.zeros(3, np.int32), LENGTHS.astype(np.int32), GROUPS,
        ranks=tuple(RankPlan(plan, np.arange(len(plan) + 1, dtype=np.int32), ((0, len(plan)),)) for plan in plans),
    )  # fmt: skip
    made = (rules or BatchRules(reduction=None)).collate(
        rows,
        mini,
        CollateSpec(step=0, mini_index=0, layout=layout, pad_token_id=0, columns=(*columns, *(wide or ()))),
    )
    return opened(made)


def opened(made: Any) -> tuple[BatchShard, ...]:
    """The shards as they come out of the object store, where nothing can be written to."""
    buffers: list[Any] = []
    data = pickle.dumps(made, protocol=5, buffer_callback=buffers.append)
    again: tuple[BatchShard, ...] = pickle.loads(data, buffers=[bytes(each.raw()) for each in buffers])
    return again


def test_a_response_begins_where_the_prompt_ends_and_not_at_its_first_target() -> None:
    [shard] = made_of()
    batch = training_input(shard)
    columns = batch.columns
    assert batch.response_length == 3
    assert batch.row_ids == [7, 8, 9, -1]
    assert columns["sequences"].tolist() == [
        [0, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6], [0, 0, 3, 8, 9, 7], [0] * 6,
    ]  # fmt: skip
    assert columns["attention_mask"].sum(1).tolist() == [5, 6, 4, 2]
    assert columns["response_mask"].sum(1).tolist() == [3, 3, 3, 0], "of masks 111, 001, 000 and a dummy"
    assert columns["loss_mask"].tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert columns["rewards"].tolist() == [[0, 0, 1], [0, 0, 2], [0, 0, 3], [0, 0, 0]], "at the last token"
    assert columns["returns"].tolist() == [[1, 1, 1], [2, 2, 2], [3, 3, 3], [0, 0, 0]]
    assert columns["action_log_probs"].tolist() == [[-0.5] * 3] * 3 + [[0.0] * 3]
    assert {"prompt_tokens", "old_logprobs", "row_group"}.isdisjoint(columns)


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
    rules = BatchRules(reduction, max_seq_len=10)
    columns = training_input(made_of(rules=rules)[0]).columns
    assert columns["advantages"][:, -1].tolist() == pytest.approx([*weights, 0])
    assert columns["loss_mask"].max() == 1
    sft = dict.fromkeys(("rewards", "returns", "old_logprobs", "advantages", "prompt_tokens"))
    batch = training_input(made_of(sft, rules)[0])
    assert set(batch.columns) == {"sequences", "attention_mask", "loss_mask"}, (
        "as SkyRL's SFT trainer makes them"
    )
    assert batch.columns["loss_mask"][0].tolist() == pytest.approx([weights[0]] * 3)


def test_ranks_get_equally_many_rows_of_one_shape() -> None:
    whole, small = (training_input(shard).columns for shard in made_of(ranks=([1, 2], [0])))
    for name, values in small.items():
        assert values.shape == whole[name].shape, name
    assert small["sequences"].tolist() == [[0, 4, 5, 6, 7, 8], [0] * 6]
    assert small["attention_mask"].sum(1).tolist() == [5, 2], "what fills up is like a dummy"
    assert small["loss_mask"][1:].sum() == small["advantages"][1:].abs().sum() == 0


def test_columns_of_several_numbers_a_token_are_cut_as_the_others_are() -> None:
    rng = np.random.default_rng(0)
    experts, gate = rng.integers(1, 255, (15, 4, 2), np.uint8), bf16_of(rng.integers(1, 99, (15, 2)))
    [shard] = made_of(wide={"experts": experts, "gate": gate, "rollout_expert_indices": experts})
    columns = training_input(shard).columns
    assert (columns["experts"].dtype, columns["gate"].dtype) == (torch.uint8, torch.bfloat16)
    assert columns["experts"][:3].tolist() == [experts[a:b].tolist() for a, b in ((2, 5), (8, 11), (12, 15))]
    assert not columns["experts"][3].any()
    whole = columns["rollout_expert_indices"]
    assert whole.shape == (4, 6, 4, 2), "SkyRL has these for whole rows"
    assert whole[1].tolist() == experts[5:11].tolist()
    assert not whole[0, 0].any()
    bits = torch.from_numpy(gate["bfloat16"][2:5].copy())
    assert torch.equal(columns["gate"][0].view(torch.uint16), bits)


def by_hand(
    rows: RowBatch, mini: MiniBatchPlan, rules: BatchRules, how: dict[str, Any]
) -> list[TrainingInput]:
    """Padded batches, row by row and cell by cell, from the plain shards of the same rows."""
    shards = collate_mini_batch(rows, mini, CollateSpec(step=0, mini_index=0, layout="padded_left", **how))
    given = "prompt_tokens" in how["columns"]
    prompts, longest = [], 1
    for shard in shards:
        masks, lengths = shard.arrays["loss_mask"], shard.arrays["seq_lengths"].tolist()
        own = []
        for line, length in enumerate(lengths):
            row = masks[line, masks.shape[1] - length :].tolist()
            first = int(shard.arrays["prompt_tokens"][line]) if given else [*row, 1].index(1)
            own.append(first if shard.row_ids[line] >= 0 else length)
            longest = max(longest, length - own[-1])
        prompts.append(own)
    num_rows, width = (max(shard.arrays["input_ids"].shape[axis] for shard in shards) for axis in (0, 1))
    skip = ("input_ids", "loss_mask", "labels", "prompt_tokens", "seq_lengths")
    made = []
    for shard, starts in zip(shards, prompts, strict=True):
        arrays, missing = shard.arrays, num_rows - len(shard.row_ids)
        others = [name for name in arrays if name not in skip and not name.startswith("row_")]
        weights = None
        if rules.reduction is not None:
            ours = REDUCTIONS[rules.reduction]
            weights = row_weights(arrays, shard.denominators, ours, constant=rules.max_seq_len).astype(
                np.float32
            )
        columns = {
            "sequences": np.full((num_rows, width), how["pad_token_id"], np.int64),
            "attention_mask": np.zeros((num_rows, width), np.int64),
            "loss_mask": np.zeros((num_rows, longest), np.float32),
        }
        if given:
            columns["response_mask"] = np.zeros((num_rows, longest), np.int64)
        for line in range(num_rows):
            length = int(arrays["seq_lengths"][line]) if line < len(shard.row_ids) else 2
            columns["attention_mask"][line, -min(length, width) :] = 1
        for line, length in enumerate(arrays["seq_lengths"].tolist()):
            if length:
                columns["sequences"][line, -length:] = arrays["input_ids"][line, -length:]
            cut = arrays["loss_mask"][line, -longest:].astype(np.float32)
            if weights is not None and "advantages" not in others:
                cut = cut * weights[line]
            columns["loss_mask"][line, longest - len(cut) :] = cut
            if given and (count := length - starts[line]):
                columns["response_mask"][line, -count:] = 1
        for name in others:
            values, whole = arrays[name], name in WHOLE_ROW
            dtype = np.dtype(np.float32) if values.dtype in (np.float64, np.float16) else values.dtype
            cells = np.zeros((num_rows, width if whole else longest, *values.shape[2:]), dtype)
            for line, length in enumerate(arrays["seq_lengths"].tolist()):
                if count := length if whole else length - starts[line]:
                    if values.ndim > 1:
                        cells[line, -count:] = values[line, -count:]
                    else:
                        cells[line, (-1 if name == "rewards" else -count) :] = values[line]
            if name == "advantages" and weights is not None:
                cells = cells * np.append(weights, np.zeros(missing, np.float32))[:, None]
            columns[THEIR_NAMES.get(name, name)] = cells
        row_ids = [*shard.row_ids.tolist(), *[-1] * missing]
        made.append(TrainingInput(columns, longest, row_ids))
    return made


TYPES = (np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8, np.int16, np.bool_)


def random_case(rng: np.random.Generator) -> tuple[RowBatch, MiniBatchPlan, dict[str, Any], PlanConfig]:
    """A mini-batch with or without responses; lengths, masks and columns of all kinds."""
    num_rows = int(rng.integers(1, 100 if rng.random() < 0.3 else 20))
    lengths = rng.integers(1, int(rng.choice([1, 2, 4, 30])) + 1, num_rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    mask = (rng.random(total) < rng.choice([0.0, 0.002, 0.1, 0.9])).astype(np.uint8)
    tokens: dict[str, Any] = {"input_ids": rng.integers(0, 2**31, total).astype(np.int32), "loss_mask": mask}
    per_row: dict[str, Any] = {}
    wide: dict[str, Any] = {}
    if rng.random() < 0.7:
        starts = np.array(
            [rng.integers(1, length + 1) for length in lengths], rng.choice([np.int32, np.int64])
        )
        in_row = np.arange(total) - np.repeat(offsets[:-1], lengths)
        mask[in_row < np.repeat(starts, lengths)] = 0
        per_row["prompt_tokens"] = starts
        for name in ("rewards", "old_logprobs", "advantages", "returns", "score"):
            place, size = (tokens, total) if rng.random() < 0.5 else (per_row, num_rows)
            if rng.random() < 0.6:
                place[name] = rng.integers(0, 2, size).astype(rng.choice(TYPES))
                if place[name].dtype.kind == "f":
                    place[name][rng.random(size) < 0.3] = rng.choice([np.nan, -0.0, np.inf, 0.3])
        if rng.random() < 0.3:
            tokens["router_padding_mask"] = rng.integers(0, 2, total).astype(np.uint8)
            tokens["gate"] = bf16_of(rng.normal(size=total))
            for name in ("experts", "rollout_expert_indices"):
                pieces = [rng.integers(0, 255, (length, 2, 3)).astype(np.uint8) for length in lengths]
                wide[name] = WideRows(np.dtype(np.uint8), (2, 3), pieces)
    uids = np.sort(rng.integers(0, max(1, num_rows // 2), num_rows)).astype(str).tolist()
    plan: dict[str, Any] = {"micro_batch_size": int(rng.integers(1, 5))}
    if rng.random() < 0.5:
        plan = {"micro_batch_tokens": int(rng.integers(40, 120))}
    names = (*tokens, *per_row, *wide)
    more = {"layout": "padded_left", "pad_to_multiple": int(rng.choice([1, 1, 4])), "columns": names}
    config = PlanConfig(batch_size=len(set(uids)), shuffle="none", **plan, **more)
    [mini] = Plan(config, lengths.astype(np.int32), uids=uids).step(0, int(rng.integers(1, 6))).mini_batches
    how = {
        "pad_token_id": int(rng.choice([0, 99])),
        "columns": names,
        "pad_to_multiple": config.pad_to_multiple,
    }
    return RowBatch(mini.row_ids, offsets, tokens, per_row, wide), mini, how, config


@pytest.mark.parametrize("seed", range(30))
def test_random_batches_are_bit_by_bit_those_made_by_hand_of_plain_shards(seed: int) -> None:
    """Of any type, also where a response is empty, and ranks have different numbers of rows; no larger than was planned."""
    rng = np.random.default_rng(seed)
    for _ in range(10):
        rows, mini, how, config = random_case(rng)
        rules = BatchRules(rng.choice([None, *REDUCTIONS]), max_seq_len=23)
        made = rules.collate(rows, mini, CollateSpec(step=0, mini_index=0, layout="padded_left", **how))
        for found, wanted in zip(
            map(training_input, opened(made)), by_hand(rows, mini, rules, how), strict=True
        ):
            assert (found.response_length, found.row_ids) == (wanted.response_length, wanted.row_ids)
            assert set(found.columns) == set(wanted.columns)
            for name, values in wanted.columns.items():
                tensor = found.columns[name]
                mine = tensor.view(torch.uint16).numpy().view(BF16) if name == "gate" else tensor.numpy()
                assert (mine.dtype, mine.shape) == (values.dtype, values.shape), name
                assert mine.tobytes() == values.tobytes(), name
                assert mine.flags.writeable
        geometry = geometry_of(mini.ranks, mini.lengths, "padded_left", config.pad_to_multiple)
        planned = bytes_by_rank(geometry, ColumnBytes.of(rows, config), even=True)
        assert (np.array([shard.nbytes for shard in made]) <= planned).all()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"state": np.zeros((3, 6), np.float32)}, r"'state' is .*: no number per row or token; leave it out"),
        ({"domain": np.array(["math", "code", ""])}, r"'domain' is .*: no number per row or token"),
        ({"prompt_tokens": None}, "rewards, .*no column says where those begin; add a per-row column 'prompt_tokens'"),
        ({"prompt_tokens": np.array([0, 3, 1])}, "is 0 for row 7, which has 5 tokens; a response begins after at least one"),
        ({"prompt_tokens": np.array([9, 3, 1])}, "is 9 for row 7, which has 5 tokens"),
        ({"prompt_tokens": np.array([3, 3, 1])}, "row 7 has a target before its response"),
        ({"prompt_tokens": np.array([2, 3, 9])}, "is 9 for row 9, which has 4 tokens"),
        ({"prompt_tokens": np.array([2.0, 3.0, np.nan])}, r"is float64 \[3\]; .* one integer per row"),
        ({"prompt_tokens": np.ones((3, 6), np.int32)}, r"is int32 \[3, 6\]; .* one integer per row"),
        ({"values": np.ones(3), "old_values": np.ones(3)}, "'values' and 'old_values' are both SkyRL's 'values'; leave one out"),
        ({"response_mask": np.ones(15, np.uint8)}, "'response_mask' is what SkyRL's batch has of its own; rename it"),
        ({"sequences": np.ones(15, np.int32)}, "'sequences' is what SkyRL's batch has of its own"),
        ({"missing": None, "loss_weights": np.ones(3)}, "'loss_weights' is what these batches have of their own; rename it"),
    ],
)  # fmt: skip
def test_what_a_training_batch_has_no_place_for_is_named(change: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        made_of(change)


def test_arrays_of_media_are_refused_where_a_batch_is_opened() -> None:
    [shard] = made_of()
    media = {"pixel_values": np.ones((9, 6)), "pixel_values_bounds": np.arange(5)}
    with pytest.raises(ConfigError, match="'pixel_values' belongs to media"):
        training_input(replace(shard, arrays={**shard.arrays, **media}))


def test_only_layouts_and_reductions_of_skyrl_are_taken() -> None:
    with pytest.raises(ConfigError, match=r"plan\.layout=padded_left"):
        made_of(layout="padded_right")
    with pytest.raises(ConfigError, match="token_mean_legacy depends on micro-batches"):
        BatchRules("token_mean_legacy")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"algorithm\.max_seq_len"):
        BatchRules("seq_mean_token_sum_norm")


def test_a_role_gets_batches_and_another_one_shards_of_the_same_rows() -> None:
    lengths = np.array([3, 5, 2, 4, 6])
    offsets = np.append(0, np.cumsum(lengths))
    mask = np.ones(20, np.uint8)
    tokens = {"input_ids": np.arange(20, dtype=np.int32), "loss_mask": mask, "logprobs": np.ones(20)}
    config = PlanConfig(batch_size=5, shuffle="none", layout="padded_left", columns=tuple(tokens))
    plan = Plan(config, lengths)
    only = ("input_ids", "loss_mask")
    roles = [Role(2, only, BatchRules()), Role(3)]
    plans = [plan.step(0, role.dp_size) for role in roles]
    recipes = [Recipe(config, PAD).of(role) for role in roles]
    rows = RowBatch(np.arange(5), offsets, tokens)
    info, shards = make_step(plans, lambda mini: rows, recipes)
    ready = training_input(shards[0]) if isinstance(shards[0], BatchShard) else None
    assert ready is not None
    assert ready.columns["sequences"][0].tolist() == list(range(14, 20))
    assert info.mini_batches[0].rank_bytes == tuple(shard.nbytes for shard in shards[:2])
    assert [type(shard) for shard in shards[1:]] == [BatchShard, Shard, Shard, Shard]
    sizes = ColumnBytes.of(rows, recipes[0].plan)
    [outlined] = outline(plans[0], recipes[0], lambda mini: sizes).mini_batches
    assert all(
        made <= planned
        for made, planned in zip(info.mini_batches[0].rank_bytes, outlined.rank_bytes, strict=True)
    )
    [other] = make_step(plans, lambda mini: rows, recipes, Part(0, 1))[1]
    assert isinstance(other, BatchShard)
    assert other.digest() == shards[1].digest(), "a collator makes what the server would"


def test_batches_that_nothing_makes_are_refused_before_a_server_is_looked_for() -> None:
    with pytest.raises(ConfigError, match=r"attach\(roles\['p'\]\.batches\): 'token_mean' makes no batches"):
        raysvc.attach("none", roles={"p": Role(1, batches="token_mean")})  # type: ignore[arg-type]


def test_a_server_makes_batches_without_torch() -> None:
    code = "import sys, raysvc.integrations.skyrl; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


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
