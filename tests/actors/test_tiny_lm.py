"""`tiny` against the Llama of `transformers`: the same weights, logits and gradients, and files that it reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from raysvc.actors.model.load_model import LARGE_VOCABULARY, tiny_model, tiny_sizes

LENGTH = 33


def llama(vocab_size: int) -> Any:
    """Of the same sizes, its weights drawn from the generator's state."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**tiny_sizes(vocab_size), tie_word_embeddings=True))


def lines(kind: str, vocab_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs of three lines, and which of their tokens are no padding."""
    ids_BL = torch.randint(0, vocab_size, (3, LENGTH))
    real_BL = torch.ones(3, LENGTH, dtype=torch.bool)
    if kind == "packed":
        rows = [torch.cat([torch.arange(n) for n in lengths]) for lengths in ((10, 1, 22), (33,), (1, 31, 1))]
        return {"input_ids": ids_BL, "position_ids": torch.stack(rows)}, real_BL
    if kind != "whole":
        blank = slice(None, 9) if kind == "padded on the left" else slice(-9, None)
        real_BL[0, blank] = False
        real_BL[2, : 20 if kind == "padded on the left" else 0] = False
    mask_BL = real_BL.long()
    positions_BL = (mask_BL.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids_BL, "attention_mask": mask_BL, "position_ids": positions_BL}, real_BL


@pytest.mark.parametrize("vocab_size", [512, LARGE_VOCABULARY])
def test_a_seed_gives_the_weights_of_the_llama_of_transformers(vocab_size: int) -> None:
    torch.manual_seed(3)
    own = tiny_model(vocab_size).state_dict()
    torch.manual_seed(3)
    theirs = llama(vocab_size).state_dict()
    assert list(own) == list(theirs)
    assert [name for name, weight in theirs.items() if not torch.equal(own[name], weight)] == []


@pytest.mark.parametrize("kind", ["whole", "packed", "padded on the left", "padded on the right"])
def test_logits_and_gradients_are_those_of_the_llama_of_transformers(kind: str) -> None:
    torch.manual_seed(3)
    own, theirs = tiny_model(512), llama(512)
    with torch.no_grad():
        for weight in own.parameters():
            weight.mul_(5)  # far from uniform attention
    theirs.load_state_dict(own.state_dict())
    inputs, real_BL = lines(kind, 512)
    found, expected = own(**inputs).logits, theirs(**inputs, use_cache=False).logits
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found[real_BL], expected[real_BL], rtol=1e-5, atol=1e-5)
    for logits in (found, expected):
        logits[real_BL].logsumexp(-1).sum().backward()
    by_name = dict(theirs.named_parameters())
    for name, weight in own.named_parameters():
        expected = by_name[name].grad
        assert float((weight.grad - expected).norm() / expected.norm()) < 1e-4, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_reads_what_it_saves_as_a_llama_of_the_same_configuration(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    own = tiny_model(512).to(dtype)
    own.save_pretrained(tmp_path, own.state_dict())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    assert theirs.dtype == dtype
    for name, weight in own.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], weight), name
    with safe_open(str(tmp_path / "model.safetensors"), "pt") as kept:
        assert "lm_head.weight" not in kept.keys()  # noqa: SIM118  it is no dict; tied: written once
    expected = llama(512).to(dtype).config.to_dict()
    ignored = {"architectures", "transformers_version", "_name_or_path", "dtype"}
    found = theirs.config.to_dict()
    assert {k: found[k] for k in found.keys() - ignored} == {
        k: expected[k] for k in expected.keys() - ignored
    }


def test_a_worker_of_tiny_builds_trains_and_saves_without_transformers(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from raysvc.actors.worker.torch_worker import CausalLMWorker, ModelSpec
spec = ModelSpec(model="tiny", vocab_size=64, learning_rate=1e-2, weight_decay=0.0, max_grad_norm=None,
                 loss="token_mean", seed=0)
worker = CausalLMWorker(0, 1, "cpu", spec.model_dump_json())
worker.setup("")
for name in ("checkpoint", "model"):
    Path(sys.argv[1], name).mkdir()
worker.save_checkpoint(f"{sys.argv[1]}/checkpoint")
worker.save_hf_model(f"{sys.argv[1]}/model")
print("transformers" in sys.modules)
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert (tmp_path / "checkpoint" / "config.json").read_text() == (
        tmp_path / "model" / "config.json"
    ).read_text()
