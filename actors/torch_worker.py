"""The shipped worker: supervised fine-tuning of a `transformers` causal LM with DDP.

Axes: B rows of a micro-batch, L its width, V vocabulary.

Always true:
- the loss of a position is weighted by the mini-batch's denominators, so the gradient does not depend on
  dp_size, micro-batching, padding or packing;
- all ranks start from the same weights (seeded, then broadcast by DDP).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from raysvc.actors.worker import Worker
from raysvc.collate.loss import Reduction

if TYPE_CHECKING:
    import torch


class ModelSpec(BaseModel):
    """What a `CausalLMWorker` trains, and how.

    Attributes:
        model: `tiny`, a folder, or a hub name.
        vocab_size: of the tokenizer; only `tiny` uses it.
    """

    model_config = ConfigDict(frozen=True, protected_namespaces=())
    model: str
    vocab_size: int
    learning_rate: float
    weight_decay: float
    max_grad_norm: float | None
    loss: Reduction
    seed: int


def tiny_model(vocab_size: int) -> torch.nn.Module:
    """A randomly initialised Llama of two layers and width 64: big enough for its loss to fall."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    model: torch.nn.Module = LlamaForCausalLM(config)
    return model


class CausalLMWorker(Worker):
    """Trains a causal LM on token cross-entropy."""

    def __init__(self, rank: int, dp_size: int, device: str, spec_json: str) -> None:
        self.spec = ModelSpec.model_validate_json(spec_json)
        super().__init__(rank, dp_size, device, self.spec.loss)
        self.max_grad_norm = self.spec.max_grad_norm

    def build(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(self.spec.seed)
        if self.spec.model == "tiny":
            model = tiny_model(self.spec.vocab_size)
        else:
            model = AutoModelForCausalLM.from_pretrained(self.spec.model)
        model.to(self.device).train()
        self._module = model
        self.model = torch.nn.parallel.DistributedDataParallel(model) if self.dp_size > 1 else model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.spec.learning_rate, weight_decay=self.spec.weight_decay
        )

    def micro_loss(self, tensors: dict[str, torch.Tensor], layout: str) -> torch.Tensor:
        """Weighted token cross-entropy of one micro-batch; a scalar."""
        import torch.nn.functional as F

        names = ["input_ids", "position_ids"]
        if layout.startswith("padded"):
            names.append("attention_mask")  # elsewhere restarting positions make the attention block-diagonal
        inputs = {name: tensors[name].long() for name in names}
        logits_BLV = self.model(**inputs, use_cache=False).logits[:, :-1].float()
        labels_BL = tensors["labels"][:, 1:].long()
        loss_T = F.cross_entropy(
            logits_BLV.flatten(0, 1), labels_BL.flatten(), ignore_index=-100, reduction="none"
        )
        return (loss_T * tensors["loss_weights"][:, 1:].flatten()).sum()

    def save_checkpoint(self, folder: str) -> None:
        """Write this rank's part of a checkpoint into an existing folder (weights by rank 0)."""
        import torch

        torch.save({"torch_rng": torch.get_rng_state()}, Path(folder) / f"rng-{self.rank:05d}.pt")
        if self.rank == 0:
            state = {"model": self._module.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, Path(folder) / "weights.pt")

    def load_checkpoint(self, folder: str) -> None:
        """Read what `save_checkpoint` wrote; dp_size may differ. Only tensors are unpickled."""
        import torch

        state = torch.load(Path(folder) / "weights.pt", map_location=self.device, weights_only=True)
        self._module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        rng = Path(folder) / f"rng-{self.rank:05d}.pt"
        if rng.exists():
            torch.set_rng_state(torch.load(rng, weights_only=True)["torch_rng"])
