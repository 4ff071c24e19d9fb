"""What we assume of the models of `transformers` when several rows share a micro-batch, held against small random ones."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actors.small_models import small_model

ROW, BEFORE = torch.arange(20, 32), torch.arange(1, 14)
OURS = slice(len(BEFORE), len(BEFORE) + len(ROW))
LINE = torch.cat([BEFORE, ROW])[None]
AGAIN = torch.cat([torch.arange(len(BEFORE)), torch.arange(len(ROW))])[None]  # positions begin again


def logits(lm: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return lm(**inputs, use_cache=False).logits


def moved(lm: Any, where: slice = OURS, **inputs: Any) -> float:
    """How far the row's logits are from those of the row alone."""
    return float((logits(lm, **inputs)[0, where] - logits(lm, input_ids=ROW[None])[0]).abs().max())


def test_positions_that_begin_again_make_the_mask_block_diagonal_where_no_mask_is_given() -> None:
    """One line of several rows needs `position_ids`, and no `attention_mask`: a mask of ones switches that off."""
    lm = small_model("llama")
    assert moved(lm, input_ids=LINE, position_ids=AGAIN) < 1e-4
    assert moved(lm, input_ids=LINE, position_ids=AGAIN, attention_mask=torch.ones_like(LINE)) > 0.1
    assert moved(lm, input_ids=LINE) > 0.1


def test_a_model_may_build_its_mask_without_positions() -> None:
    """That a model takes `position_ids` does not say that it keeps rows apart by them."""
    lm = small_model("gpt_oss")
    assert "position_ids" in inspect.signature(lm.forward).parameters
    assert moved(lm, input_ids=LINE, position_ids=AGAIN) > 0.1


def test_unknown_arguments_are_taken_in_silence() -> None:
    """That a model takes boundaries of rows does not say that it uses them."""
    lm = small_model("mamba")
    bounds = torch.tensor([0, len(BEFORE), LINE.shape[1]], dtype=torch.int32)
    given = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "seq_idx": (AGAIN == 0).cumsum(1) - 1}
    assert moved(lm, input_ids=LINE, position_ids=AGAIN, **given, of_nobody=1) > 0.1


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
def test_boundaries_are_an_error_where_kernels_are_missing(name: str) -> None:
    """A recurrent layer that knows `seq_idx` raises without its kernel; we hand its words on."""
    seq_idx = ((AGAIN == 0).cumsum(1) - 1).int()
    with pytest.raises(
        ValueError, match=r"can't keep packed sequences apart without `causal_conv1d`\. Install"
    ):
        logits(small_model(name), input_ids=LINE, position_ids=AGAIN, seq_idx=seq_idx)


def test_masks_for_each_kind_of_layer_keep_windows_inside_of_a_row() -> None:
    """`create_masks_for_generate` gives a mask by kind, block-diagonal by positions, and the model takes them as they are."""
    from transformers.masking_utils import create_masks_for_generate

    lm = small_model("gpt_oss")
    shape = torch.empty((*LINE.shape, 0))  # of it nothing but size, type and device is read
    masks = create_masks_for_generate(lm.config, shape, None, None, position_ids=AGAIN)
    assert set(masks) == {"full_attention", "sliding_attention"}
    assert moved(lm, input_ids=LINE, position_ids=AGAIN, attention_mask=masks) < 1e-4
    wide = {**masks, "sliding_attention": masks["full_attention"]}
    assert moved(lm, input_ids=LINE, position_ids=AGAIN, attention_mask=wide) > 0.1


def test_chunks_are_counted_from_the_beginning_of_a_row() -> None:
    """A chunk of Llama 4 (5 tokens here) begins with the row, not with the line."""
    assert moved(small_model("llama4_text"), input_ids=LINE, position_ids=AGAIN) < 1e-4


def test_recurrent_gemma_forgets_at_position_0_but_its_convolution_does_not() -> None:
    """Padding on the left leaks through three tokens of a convolution, whatever the mask says."""
    lm, pads = small_model("recurrent_gemma"), torch.tensor([7, 8, 9])
    inputs = {
        "input_ids": torch.cat([pads, ROW])[None],
        "position_ids": torch.cat([torch.zeros_like(pads), torch.arange(len(ROW))])[None],
        "attention_mask": torch.cat([torch.zeros_like(pads), torch.ones_like(ROW)])[None],
    }
    assert moved(lm, slice(3, None), **inputs) > 1e-2
    for layer in lm.modules():
        if isinstance(layer, torch.nn.Conv1d):
            layer.weight.data[..., :-1] = 0  # it looks at its own token alone
    assert moved(lm, slice(3, None), **inputs) < 1e-4


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "bloom", "mamba2", "lfm2", "rwkv", "recurrent_gemma"])
def test_padding_on_the_right_moves_nothing(name: str) -> None:
    """Whatever stands behind a row, on its line and on others: `padded_right` is what a refusal names."""
    pads = torch.tensor([7, 8, 9])
    inputs = {
        "input_ids": torch.stack([torch.cat([ROW, pads]), torch.arange(15) + 30]),
        "position_ids": torch.stack([torch.cat([torch.arange(len(ROW)), torch.zeros_like(pads)]), torch.arange(15)]),
        "attention_mask": torch.stack([torch.cat([torch.ones_like(ROW), torch.zeros_like(pads)]), torch.ones(15, dtype=torch.long)]),
    }  # fmt: skip
    assert moved(small_model(name), slice(0, len(ROW)), **inputs) < 2e-4


def test_dropout_of_one_seed_drops_the_same_cells() -> None:
    """A leak in training mode can be told from dropout."""
    lm = small_model("gpt2", attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3).train()
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(logits(lm, input_ids=LINE, position_ids=AGAIN))
    assert torch.equal(*found)
    assert not torch.equal(found[0], logits(lm, input_ids=LINE, position_ids=AGAIN))


LONG = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(("kind", "more"), [("longrope", LONG), ("dynamic", {})])
def test_some_scalings_of_positions_follow_the_longest_row_of_a_batch(
    kind: str, more: dict[str, Any]
) -> None:
    """No layout keeps rows apart where one of them is longer than the original context: `shared_scaling.py` refuses it."""
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0, **more}
    lm = small_model("llama", rope_parameters=rope, max_position_embeddings=16)
    for width, apart in ((16, True), (20, False)):
        gap = width - len(ROW)
        there = torch.cat([torch.ones_like(ROW), torch.zeros(gap, dtype=torch.long)])
        inputs = {
            "input_ids": torch.stack([torch.cat([ROW, torch.full((gap,), 3)]), torch.arange(width) + 30]),
            "position_ids": torch.stack([torch.arange(width) * there, torch.arange(width)]),
            "attention_mask": torch.stack([there, torch.ones_like(there)]),
        }
        assert (moved(lm, slice(0, len(ROW)), **inputs) < 1e-4) == apart


@pytest.mark.slow
def test_the_table_of_the_docs_is_what_this_version_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """All architectures of docs/models.md."""
    docs = Path(__file__).parents[2] / "docs"
    monkeypatch.syspath_prepend(docs)
    make_models = __import__("make_models")
    sys.modules.pop("make_models")
    assert make_models.table() in (docs / "models.md").read_text(), "run python docs/make_models.py"
