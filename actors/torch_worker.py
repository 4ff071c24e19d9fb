"""The shipped worker: supervised fine-tuning of a `transformers` causal LM with DDP.

Axes: B rows of a micro-batch, L its width, V vocabulary.

Always true:
- the loss of a position is weighted by the mini-batch's denominators, so the gradient does not depend on
  dp_size, micro-batching, padding or packing;
- all ranks start from the same weights (seeded, then broadcast by DDP).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from raysvc.actors.worker import Worker
from raysvc.collate.loss import Reduction

if TYPE_CHECKING:
    import torch

# float32 logits held at once: on a CPU what malloc keeps and reuses, on a GPU what makes large matrices
LOGIT_BYTES = {"cpu": 16 << 20, "cuda": 512 << 20}


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


def token_loss(model: Any) -> torch.nn.Module:
    """Wraps a causal LM into a module whose forward gives the weighted sum of token losses.

    forward(inputs, labels_BL, weights_BL) -> scalar; labels lie at their own token, -100 has no loss.
    Where the model's head is a plain projection of the last hidden state (checked here on a few
    tokens, not assumed), it is applied to the targets alone, some at a time, and computed again in the
    backward pass: a vocabulary of 150 k then costs megabytes instead of gigabytes.
    """
    import torch

    class TokenLoss(torch.nn.Module):
        def __init__(self, lm: Any) -> None:
            super().__init__()
            self.lm = lm
            self.plain_head = _head_is_plain(lm)
            self.at_once = max(16, LOGIT_BYTES[lm.device.type] // (4 * lm.config.vocab_size))

        def forward(
            self, inputs: dict[str, torch.Tensor], labels_BL: torch.Tensor, weights_BL: torch.Tensor
        ) -> torch.Tensor:
            labels_T, weights_T = labels_BL[:, 1:].flatten(), weights_BL[:, 1:].flatten()
            (targets,) = torch.nonzero(labels_T != -100, as_tuple=True)
            if self.plain_head:
                hidden_BLD = self.lm.base_model(**inputs, use_cache=False).last_hidden_state
                rows_TD = hidden_BLD[:, :-1].flatten(0, 1)
                head = self.lm.get_output_embeddings()
            else:
                rows_TD = self.lm(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
                head = torch.nn.Identity()
            total = (
                rows_TD.sum() * 0.0
            )  # a micro-batch without a target still takes part in the backward pass
            for some in targets.split(self.at_once):
                total = total + torch.utils.checkpoint.checkpoint(
                    _cross_entropy, head, rows_TD[some], labels_T[some], weights_T[some], use_reentrant=False
                )
            return total

    return TokenLoss(model)


def _cross_entropy(
    head: torch.nn.Module, rows_TD: torch.Tensor, labels_T: torch.Tensor, weights_T: torch.Tensor
) -> torch.Tensor:
    import torch.nn.functional as F

    return (F.cross_entropy(head(rows_TD).float(), labels_T, reduction="none") * weights_T).sum()


def _head_is_plain(model: Any) -> bool:
    """Whether logits are just the output embedding of the last hidden state (no soft-capping, no scale)."""
    import torch

    if model.get_output_embeddings() is None or model.base_model is model:
        return False
    ids_BL = torch.arange(8, device=model.device)[None]
    training = model.training
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=ids_BL, use_cache=False).logits
        hidden = model.base_model(input_ids=ids_BL, use_cache=False).last_hidden_state
        same = torch.allclose(expected, model.get_output_embeddings()(hidden), rtol=1e-4, atol=1e-5)
    model.train(training)
    return bool(same)


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
        loss = token_loss(model)
        self.model = torch.nn.parallel.DistributedDataParallel(loss) if self.dp_size > 1 else loss
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.spec.learning_rate, weight_decay=self.spec.weight_decay
        )

    def micro_loss(self, tensors: dict[str, torch.Tensor], layout: str) -> torch.Tensor:
        """Weighted token cross-entropy of one micro-batch; a scalar."""
        names = ["input_ids", "position_ids"]
        if layout.startswith("padded"):
            names.append("attention_mask")  # elsewhere restarting positions make the attention block-diagonal
        inputs = {name: tensors[name].long() for name in names}
        loss: torch.Tensor = self.model(inputs, tensors["labels"].long(), tensors["loss_weights"])
        return loss

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
