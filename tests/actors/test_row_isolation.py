"""Rows of a layout do not see each other in a model, or it is refused. The oracle is `transformers` on each row alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raysvc
from raysvc.actors.model.model_inputs import BOUNDARIES, INPUT_SETS
from raysvc.actors.model.row_isolation import logits_of, prove
from raysvc.actors.worker.losses import SftLoss
from raysvc.actors.worker.torch_worker import CausalLMWorker
from raysvc.collate.row_values import gather_rows
from raysvc.errors import ConfigError

from .ranks import DoubleWorker, gradients_of, tiny_spec
from .reference import distance, reference_gradient, sft
from .shards import minis_of, random_rows
from .small_models import VOCAB, small_folder, small_model

LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {"layout": "packed", "micro_batch_tokens": 40, "align": 4},
    "padded_left": {"layout": "padded_left", "micro_batch_size": 3},
    "padded_right": {"layout": "padded_right", "micro_batch_size": 3},
}
APART = {  # model -> what keeps the rows of packed lines apart
    **dict.fromkeys(("llama", "mistral", "gemma2", "llama4_text"), "position_ids"),
    **dict.fromkeys(("gpt_oss", "mpt", "falcon", "opt"), "a block-diagonal attention_mask"),
}
MIXED = ("bloom", "qwen3_5_text", "lfm2", "jamba", "mamba", "mamba2", "rwkv", "recurrent_gemma")
MIXED_LEFT = ("rwkv", "recurrent_gemma")
model_of = functools.cache(small_model)


def shard_of(layout: str) -> tuple[Any, Any]:
    """Rows of 3 to 19 tokens, and the shard of them all."""
    rows = random_rows(9, seed=4, high=20, vocab=VOCAB)
    plan = {"batch_size": 9, "shuffle": "none", "oversize": "alone", **LAYOUTS[layout]}
    ((_, (shard,), _),) = minis_of(rows, plan, 1)
    return rows, shard


def micro_of(shard: Any, index: int) -> dict[str, Any]:
    return {name: torch.from_numpy(np.asarray(value)) for name, value in shard.micro(index).items()}


def moves(lm: Any, layout: str, inputs_of: Callable[[dict[str, Any]], dict[str, Any]]) -> float:
    """How far the logits of rows in shards are from those of each row alone, as `transformers` computes them."""
    rows, shard = shard_of(layout)
    sheet = np.zeros((*shard.arrays["input_ids"].shape, VOCAB), np.float32)
    with torch.no_grad():
        for index, micro in enumerate(shard.micro_batches):
            columns = slice(-micro.width, None) if layout == "padded_left" else slice(0, micro.width)
            found = lm(**inputs_of(micro_of(shard, index)), use_cache=False).logits
            sheet[micro.start : micro.stop, columns] = found.float().numpy()
        most, found_rows = 0.0, gather_cells(shard, sheet)
        for number, ids in enumerate(np.split(rows.tokens["input_ids"], rows.offsets[1:-1])):
            alone = lm(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0]
            most = max(most, float(np.abs(found_rows[number] - alone.float().numpy()).max()))
    return most


def gather_cells(shard: Any, sheet: np.ndarray) -> dict[int, np.ndarray]:
    """Row -> [N, V]."""
    flat = sheet.reshape(-1, sheet.shape[-1])
    values = gather_rows(shard, {"cell": np.arange(len(flat))})
    return {int(row): flat[values.row(at, "cell")] for at, row in enumerate(values.row_ids.tolist())}


def positions_alone(tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tensors[name].long()
        for name in ("input_ids", "position_ids", "attention_mask")
        if name in tensors and (name != "attention_mask" or "segment_ids" not in tensors)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", APART)
def test_rows_of_an_accepted_model_are_what_they_are_alone(name: str, layout: str) -> None:
    inputs_of = raysvc.model_inputs(model_of(name), layout)
    assert inputs_of.name == (APART[name] if layout == "packed" else "position_ids")
    assert moves(model_of(name), layout, inputs_of) < 2e-4


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, "packed") for name in MIXED), *((name, "padded_left") for name in MIXED_LEFT)],
)
def test_a_model_whose_rows_mix_is_refused_and_padding_on_the_right_is_not(name: str, layout: str) -> None:
    assert moves(model_of(name), layout, positions_alone) > 1e-2
    assert not raysvc.rows_are_isolated(model_of(name), layout)
    with pytest.raises(
        ConfigError, match=f"plan.layout: is {layout}, and .*move by up to .*; use padded_right"
    ):
        raysvc.model_inputs(model_of(name), layout)
    assert raysvc.rows_are_isolated(model_of(name), "padded_right")
    assert moves(model_of(name), "padded_right", raysvc.model_inputs(model_of(name), "padded_right")) < 2e-4


def test_the_refusal_says_what_the_model_itself_says_of_boundaries() -> None:
    with pytest.raises(ConfigError, match="Install `causal_conv1d` to train on packed sequences"):
        raysvc.model_inputs(model_of("qwen3_5_text"), "packed")


def test_a_mask_that_forgets_the_sliding_window_is_no_proof() -> None:
    lm = model_of("gpt_oss")

    def one_mask(tensors: dict[str, Any]) -> dict[str, Any]:
        row_BL = (tensors["position_ids"] == 0).cumsum(1)
        seen = (row_BL[:, :, None] == row_BL[:, None, :]).tril()
        least = torch.finfo(torch.float32).min
        return {**positions_alone(tensors), "attention_mask": torch.where(seen, 0.0, least)[:, None]}

    assert moves(lm, "packed", one_mask) > 1e-2
    assert not raysvc.rows_are_isolated(lm, "packed", one_mask)
    assert raysvc.rows_are_isolated(lm, "packed", raysvc.model_inputs(lm, "packed"))


def test_boundaries_are_those_that_transformers_gives_to_kernels() -> None:
    from transformers import DataCollatorWithFlattening

    flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    rows = [{"input_ids": list(range(length)), "labels": list(range(length))} for length in (3, 1, 1, 4, 2)]
    theirs = flatten(rows)
    ours = INPUT_SETS[BOUNDARIES](None, theirs)
    assert set(ours) == set(theirs) - {"input_ids", "labels", "position_ids"}
    for name, value in ours.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[name])), name


def test_kernels_that_take_boundaries_are_given_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution as the kernel computes it, in plain torch: tokens of other rows count as 0."""
    from transformers.models.lfm2 import modeling_lfm2

    def kernel(hidden_BDL: Any, weight_DK: Any, bias: Any = None, activation: Any = None, **more: Any) -> Any:
        row_BL, width = more.get("seq_idx"), weight_DK.shape[1]
        out = torch.zeros_like(hidden_BDL)
        for back in range(width):
            moved = torch.nn.functional.pad(hidden_BDL, (back, 0))[..., : hidden_BDL.shape[-1]]
            if row_BL is not None:
                same = torch.nn.functional.pad(row_BL, (back, 0), value=-1)[:, : row_BL.shape[1]] == row_BL
                moved = moved * same[:, None]
            out = out + moved * weight_DK[:, width - 1 - back][:, None]
        return out

    lm = small_model("lfm2")
    plain = lm(input_ids=torch.arange(20)[None]).logits
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", kernel)
    assert torch.allclose(plain, lm(input_ids=torch.arange(20)[None]).logits, atol=1e-4)
    inputs_of = raysvc.model_inputs(lm, "packed")
    assert inputs_of.name == BOUNDARIES
    assert moves(lm, "packed", inputs_of) < 2e-4


class Leaking(torch.nn.Module):
    """Adds to each embedding a share of the one before it, in training alone if so."""

    def __init__(self, inner: Any, share: float, in_training: bool) -> None:
        super().__init__()
        self.inner, self.share, self.in_training = inner, share, in_training

    def forward(self, ids: Any) -> Any:
        out = self.inner(ids)
        before = torch.nn.functional.pad(out, (0, 0, 1, 0))[:, :-1]
        return out + self.share * before * (self.training or not self.in_training)


@pytest.mark.parametrize(
    ("share", "in_training", "dtype"),
    [(0.01, False, "float32"), (0.5, True, "float32"), (0.06, False, "bfloat16")],
)
def test_a_small_leak_and_one_of_training_alone_are_seen(share: float, in_training: bool, dtype: str) -> None:
    lm = small_model("llama", attention_dropout=0.3).to(getattr(torch, dtype)).train(dtype == "float32")
    assert raysvc.rows_are_isolated(lm, "packed"), "dropout is no leak"
    lm.set_input_embeddings(Leaking(lm.get_input_embeddings(), share, in_training))
    assert not raysvc.rows_are_isolated(lm, "packed")
    assert raysvc.rows_are_isolated(lm, "padded_right")


def test_the_proof_leaves_modes_gradients_and_random_numbers_as_they_were() -> None:
    lm = small_model("gpt_oss").train()
    lm.model.norm.eval()
    torch.manual_seed(5)
    raysvc.model_inputs(lm, "packed")
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    assert lm.training
    assert lm.model.layers[0].training
    assert not lm.model.norm.training
    assert all(weight.grad is None for weight in lm.parameters())


@pytest.mark.parametrize(
    ("name", "apart"), [("llama", True), ("gpt_oss", True), ("mamba2", False), ("lfm2", False)]
)
def test_bfloat16_rounds_and_leaks_are_still_told_apart(name: str, apart: bool) -> None:
    lm = small_model(name, initializer_range=0.02 if name == "llama" else 0.2)  # small logits, large steps
    inside = lm.forward

    def forward(**inputs: Any) -> Any:  # as a Trainer's precision wraps a model: its logits do not show it
        with torch.autocast("cpu", torch.bfloat16):
            out = inside(**inputs)
        out.logits = out.logits.float()
        return out

    lm.forward = forward
    if apart:
        assert raysvc.model_inputs(lm, "packed").name == APART[name]
    else:
        assert not raysvc.rows_are_isolated(lm, "packed")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_new_model_whose_logits_are_small_is_no_reason_to_refuse(precision: str, tmp_path: Path) -> None:
    for seed in range(3):
        worker = CausalLMWorker(0, 1, "cpu", tiny_spec(seed=seed, precision=precision).model_dump_json())
        worker.build()
        assert {proof.inputs.name for proof in worker._proofs.values() if proof.inputs} == {"position_ids"}
        lm = small_model("gpt_oss", initializer_range=0.02).to(
            torch.bfloat16 if precision == "bf16" else torch.float32
        )
        assert raysvc.rows_are_isolated(lm, "packed", raysvc.model_inputs(lm, "packed"))


def worker_of(folder: str, *layouts: str, kind: type[CausalLMWorker] = CausalLMWorker) -> CausalLMWorker:
    spec = tiny_spec(model=folder, **({"layouts": layouts} if layouts else {}))
    return kind(0, 1, "cpu", spec.model_dump_json())


@pytest.mark.parametrize(
    ("name", "kind", "rounding"), [("mpt", DoubleWorker, 1e-6), ("gpt_oss", CausalLMWorker, 1e-4)]
)  # grouped matrix products of experts are not there in float64
def test_packed_rows_train_a_model_that_needs_masks_as_rows_one_by_one_do(
    name: str, kind: type[CausalLMWorker], rounding: float, tmp_path: Path
) -> None:
    folder = small_folder(name, tmp_path)
    rows, shard = shard_of("packed")
    worker = worker_of(folder, "packed", kind=kind)
    worker.setup("")
    ((grads, metrics),) = gradients_of(worker, [shard], [SftLoss()])
    lm = worker_of(folder, "packed", kind=kind).load_lm().eval()
    expected, loss = reference_gradient(lm, rows, sft, "logits", list(range(9)), "token_mean")
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert distance(grads, expected) < rounding
    worker._proofs["packed"] = prove(logits_of(model_of("llama")), model_of("llama"), "packed")
    ((grads, _),) = gradients_of(worker, [shard], [SftLoss()])
    assert distance(grads, expected) > 1e-2, "positions alone train something else"


def test_a_worker_refuses_a_layout_when_it_is_built_or_when_its_shard_comes(tmp_path: Path) -> None:
    folder = small_folder("rwkv", tmp_path)
    with pytest.raises(ConfigError, match=f"plan.layout: is packed, and {folder} does not keep"):
        worker_of(folder, "packed").build()
    worker = worker_of(folder)
    worker.build()
    for layout, refused in {"padded_left": True, "packed": True, "padded_right": False}.items():
        _, shard = shard_of(layout)
        inputs = lambda: worker._inputs(micro_of(shard, 0), layout)  # noqa: B023, E731
        if refused:
            with pytest.raises(ConfigError, match=f"is {layout}, and"):
                inputs()
        else:
            assert set(inputs()) == {"input_ids", "position_ids", "attention_mask"}


class _OwnLM(torch.nn.Module):
    """One layer that means over what a token sees, and no configuration."""

    def __init__(self, apart: bool, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ids, self.head, self.apart = torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB), apart

    def forward(self, input_ids: Any, position_ids: Any = None, attention_mask: Any = None) -> torch.Tensor:
        seen = torch.ones(input_ids.shape[1], input_ids.shape[1]).tril().expand(len(input_ids), -1, -1)
        if attention_mask is not None:
            seen = seen * attention_mask[:, None] + torch.eye(input_ids.shape[1])
        elif self.apart and position_ids is not None:
            row = (position_ids == 0).cumsum(1)
            seen = seen * (row[:, :, None] == row[:, None])
        means: torch.Tensor = self.head(seen @ self.ids(input_ids) / seen.sum(-1, keepdim=True))
        return means


def test_a_module_without_a_configuration_is_proved_as_any_other() -> None:
    assert raysvc.model_inputs(_OwnLM(apart=True), "packed").name == "position_ids"
    with pytest.raises(ConfigError, match=r"_OwnLM does not keep the rows of a micro-batch apart"):
        raysvc.model_inputs(_OwnLM(apart=False), "packed")


def test_a_module_for_which_no_row_can_be_made_is_refused_by_name() -> None:
    class NeedsMore(_OwnLM):
        def forward(self, input_ids: Any, of_mine: Any) -> torch.Tensor:  # type: ignore[override]
            return super().forward(input_ids)

    with pytest.raises(ConfigError, match=r"NeedsMore does not take input_ids alone .*'of_mine'"):
        raysvc.model_inputs(NeedsMore(apart=True), "packed")
    with pytest.raises(ConfigError, match="Linear has neither a configuration of transformers nor an embed"):
        raysvc.model_inputs(torch.nn.Linear(2, 2), "packed")


def test_a_model_inside_of_ddp_is_asked_as_the_model_itself() -> None:
    group = torch.distributed
    group.init_process_group("gloo", rank=0, world_size=1, store=group.HashStore())
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(small_model("gpt_oss"))
        assert raysvc.model_inputs(wrapped, "packed").name == APART["gpt_oss"]
        assert not raysvc.rows_are_isolated(wrapped, "packed")
    finally:
        group.destroy_process_group()
