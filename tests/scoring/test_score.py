"""Numbers of a model for rows; the oracle is `transformers`' own forward pass, one row at a time, in float64."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysvc.actors.worker.score import RowScorer, ScoreSpec, needed_lengths, targets_of, token_batches
from raysvc.errors import ConfigError
from raysvc.row_batch import RowBatch

VOCAB = 80
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "vocab_size": VOCAB}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=1))


def gemma() -> Any:
    """Its logits are capped, so its head is no plain projection."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(
        Gemma2Config(
            **SIZES, intermediate_size=64, num_key_value_heads=1, head_dim=16, final_logit_softcapping=2.0
        )
    )


def gpt2() -> Any:
    """Learned positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=VOCAB, n_positions=64))


MODELS = {"llama": llama, "gemma": gemma, "gpt2": gpt2}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(MODELS[request.param](), tmp_path_factory.mktemp(request.param))


def saved(model: Any, path: Path, seed: int = 0) -> str:
    """The model with weights large enough for probabilities that differ."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(path)
    return str(path)


def rows_of(num_rows: int = 9, seed: int = 0) -> RowBatch:
    """Rows of several lengths: one is all prompt, one is a single token, one is trained from its first token on."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 40, num_rows)
    lengths[1] = 1
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = rng.integers(0, VOCAB, offsets[-1]).astype(np.int32)
    mask = (rng.random(offsets[-1]) < 0.6).astype(np.uint8)
    mask[offsets[2] : offsets[3]] = 0
    mask[offsets[3]] = 1
    domain = np.array(["math", "code", "code"] * num_rows, object)[:num_rows]
    return RowBatch(
        np.arange(100, 100 + num_rows), offsets, {"input_ids": ids, "loss_mask": mask}, {"domain": domain}
    )


def spec_of(folder: str, **changes: Any) -> ScoreSpec:
    fields: dict[str, Any] = {
        "kind": "ref_logprobs", "models": {"": folder}, "by": None, "revisions": {}, "top_k": 5, "dtype": "float32",
        "vocab_size": VOCAB, "micro_batch_tokens": 90, "seed": 0, "device": "cpu",
    }  # fmt: skip
    return ScoreSpec(**{**fields, **changes})


def dense(folder: str, rows: RowBatch, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places of a row's targets, their ids, and log-probabilities [targets, V] by one forward in float64."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype="float64").eval()
    start, stop = rows.offsets[row], rows.offsets[row + 1]
    ids = torch.from_numpy(rows.tokens["input_ids"][start:stop].astype(np.int64))
    with torch.no_grad():
        logprobs = lm(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1).numpy()
    places = [place for place in range(1, stop - start) if rows.tokens["loss_mask"][start + place]]
    return np.array(places, int) + start, ids.numpy()[places], logprobs[[place - 1 for place in places]]


def test_log_probabilities_are_those_of_one_row_at_a_time(folder: str) -> None:
    rows = rows_of()
    found = RowScorer(spec_of(folder))(rows)
    expected = np.zeros(int(rows.offsets[-1]))
    for row in range(len(rows)):
        cells, ids, logprobs = dense(folder, rows, row)
        expected[cells] = logprobs[np.arange(len(ids)), ids]
    values = found.columns["ref_logprobs"]
    assert values.dtype == np.float32
    assert np.abs(values - expected).max() < 3e-6
    assert (values[expected == 0] == 0).all()
    assert found.facts["targets"] == np.count_nonzero(expected)
    assert found.facts["logprob"] == pytest.approx(expected.sum(), abs=1e-3)


def test_entries_are_the_likeliest_of_the_whole_vocabulary(folder: str) -> None:
    rows = rows_of()
    found = RowScorer(spec_of(folder, kind="teacher"))(rows).columns
    seen = np.zeros(int(rows.offsets[-1]), bool)
    for row in range(len(rows)):
        cells, _, logprobs = dense(folder, rows, row)
        seen[cells] = True
        best = -np.sort(-logprobs, axis=-1)[:, :5]
        assert np.abs(found["teacher_logprobs"][cells] - best).max(initial=0) < 3e-6
        picked = np.take_along_axis(logprobs, found["teacher_ids"][cells].astype(int), -1)
        assert np.abs(picked - best).max(initial=0) < 3e-6
    assert (found["teacher_ids"][~seen] == -1).all()
    assert (found["teacher_logprobs"][~seen] == 0).all()


def test_an_entry_that_the_tokenizer_lacks_is_not_taught(folder: str) -> None:
    """The head has 80 entries, the tokenizer 50; probabilities stay those of all 80."""
    rows = rows_of()
    rows.tokens["input_ids"][:] %= 50
    found = RowScorer(spec_of(folder, kind="teacher", vocab_size=50))(rows).columns
    assert found["teacher_ids"].max() < 50
    cells, _, logprobs = dense(folder, rows, 0)
    assert np.abs(found["teacher_logprobs"][cells] - -np.sort(-logprobs[:, :50], axis=-1)[:, :5]).max() < 3e-6


def test_tokens_that_the_model_does_not_have_are_refused_by_row(folder: str) -> None:
    """The tokenizer has 100 entries, of which rows use those of the head."""
    rows = rows_of()
    same = [
        RowScorer(spec_of(folder, vocab_size=size))(rows).columns["ref_logprobs"] for size in (VOCAB, 100)
    ]
    assert np.array_equal(*same)
    rows.tokens["input_ids"][rows.offsets[3]] = VOCAB + 9
    with pytest.raises(
        ConfigError, match=rf"has {VOCAB} entries, and row 103 the id {VOCAB + 9}; give a model"
    ):
        RowScorer(spec_of(folder, vocab_size=100))(rows)


def test_the_budget_of_a_batch_changes_rounding_alone(folder: str) -> None:
    rows = rows_of()
    results = [
        RowScorer(spec_of(folder, micro_batch_tokens=n))(rows).columns["ref_logprobs"] for n in (1, 64, 10**6)
    ]
    assert max(np.abs(one - results[0]).max() for one in results) < 2e-6


def test_rows_have_the_teacher_that_their_column_names(tmp_path: Path) -> None:
    models = {"math": saved(llama(), tmp_path / "a", 1), "code": saved(llama(), tmp_path / "b", 2)}
    rows = rows_of()
    both = RowScorer(spec_of("", kind="teacher", models=models, by="domain"))(rows).columns[
        "teacher_logprobs"
    ]
    for name, path in models.items():
        alone = RowScorer(spec_of(path, kind="teacher"))(rows).columns["teacher_logprobs"]
        for row in np.flatnonzero(rows.rows["domain"] == name).tolist():
            cells = slice(rows.offsets[row], rows.offsets[row + 1])
            assert np.abs(both[cells] - alone[cells]).max() < 2e-6
    with pytest.raises(ConfigError, match="no model for rows with domain = 'code' \\(it has math\\)"):
        RowScorer(spec_of("", kind="teacher", models={"math": models["math"]}, by="domain"))(rows)


def test_bfloat16_is_near(folder: str) -> None:
    rows = rows_of()
    exact, near = (
        RowScorer(spec_of(folder, dtype=one))(rows).columns["ref_logprobs"] for one in ("float32", "bfloat16")
    )
    assert 0 < np.abs(exact - near).max() < 0.3


@pytest.mark.parametrize("kind", ["ref_logprobs", "teacher"])
def test_a_number_that_is_not_finite_names_its_row(tmp_path: Path, kind: Any) -> None:
    rows = rows_of()
    broken = llama()
    path = saved(broken, tmp_path)
    bad = int(rows.tokens["input_ids"][rows.offsets[5]])  # a token that row 5 begins with
    ids = rows.tokens["input_ids"]
    ids[ids == bad] = (bad + 1) % VOCAB
    ids[rows.offsets[5]] = bad
    rows.tokens["loss_mask"][rows.offsets[5] + 1] = 1
    broken.model.embed_tokens.weight.data[bad] = float("nan")
    broken.save_pretrained(path)
    with pytest.raises(
        ConfigError, match="gives no finite log-probability for token 1 of row 105; check its weights"
    ):
        RowScorer(spec_of(path, kind=kind))(rows)


def test_rows_without_a_target_need_no_forward_pass() -> None:
    rows = rows_of()
    rows.tokens["loss_mask"][:] = 0
    found = RowScorer(spec_of("/nowhere"))(rows)
    assert not found.columns["ref_logprobs"].any()
    assert found.facts["targets"] == 0


def test_a_model_that_is_not_on_the_node_is_named() -> None:
    with pytest.raises(ConfigError, match="there is no folder /nowhere on"):
        RowScorer(spec_of("/nowhere"))(rows_of())


def test_sums_are_those_of_trl(tmp_path: Path) -> None:
    """`compute_ref_log_probs` of TRL's own DPOTrainer, on the model that TRL patches."""
    pytest.importorskip("trl")
    from trl import DPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    path, rows = saved(llama(), tmp_path), rows_of(8, seed=3)
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(path).eval()
    add_fused_lm_head(lm)
    width = int(rows.lengths.max())
    ids, mask = torch.zeros(8, width, dtype=torch.long), torch.zeros(8, width, dtype=torch.long)
    attention = torch.zeros(8, width, dtype=torch.long)
    for row in range(8):
        start, stop = rows.offsets[row], rows.offsets[row + 1]
        ids[row, : stop - start] = torch.from_numpy(rows.tokens["input_ids"][start:stop].astype(np.int64))
        mask[row, : stop - start] = torch.from_numpy(rows.tokens["loss_mask"][start:stop].astype(np.int64))
        attention[row, : stop - start] = 1
    trainer = MagicMock(ld_alpha=None, ref_model=lm, args=SimpleNamespace(gradient_checkpointing_kwargs=None))
    trainer.accelerator.device = "cpu"
    inputs = {"input_ids": ids, "attention_mask": attention, "completion_mask": mask}
    theirs = torch.cat(DPOTrainer.compute_ref_log_probs(trainer, lm, inputs)).numpy()
    values = RowScorer(spec_of(path))(rows).columns["ref_logprobs"]
    ours = np.add.reduceat(np.append(values, 0.0), rows.offsets[:-1])
    assert np.abs(ours - theirs).max() < 2e-4


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 200))
def test_every_row_with_a_target_is_in_one_batch_within_the_budget(lengths: list[int], budget: int) -> None:
    counts = np.array(lengths, np.int64)
    batches = token_batches(counts, budget)
    assert sorted(row for one in batches for row in one.tolist()) == np.flatnonzero(counts).tolist()
    for one in batches:
        assert len(one) == 1 or len(one) * counts[one].max() <= budget


def test_what_stands_behind_the_last_target_is_not_read() -> None:
    rows = rows_of()
    is_target = targets_of(rows)
    need = needed_lengths(rows, is_target)
    for row in range(len(rows)):
        targets = np.flatnonzero(is_target[rows.offsets[row] : rows.offsets[row + 1]])
        assert need[row] == (targets[-1] + 1 if len(targets) else 0)
