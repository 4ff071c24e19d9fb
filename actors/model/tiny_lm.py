"""`tiny`: a randomly initialised Llama of two layers, for trying. A worker needs nothing of `transformers` for it.

This file imports torch; import it inside the function that builds a model.

Axes: B lines, L tokens of a line, D hidden, H attention heads, K their width, V vocabulary.
Always true:
- its weights, their names and its logits are those of `LlamaForCausalLM` of the same sizes after the same seed;
- what it saves is read by `transformers` as a Llama, with the same configuration;
- a token looks at tokens before it, in its own row: where a mask says so, or where positions go on by one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional

HEAD_WIDTH = 16
EPSILON = 1e-6  # of RMS norms
ROPE_THETA = 10000.0
SPREAD = 0.02  # standard deviation of new weights


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of a tiny model, as `LlamaConfig` names them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int

    def get_text_config(self) -> TinyConfig:
        """Itself: there is nothing but text."""
        return self


@dataclass(frozen=True)
class HiddenStates:
    """`last_hidden_state`: [B, L, D] after the last norm."""

    last_hidden_state: torch.Tensor


@dataclass(frozen=True)
class Logits:
    """`logits`: [B, L, V]."""

    logits: torch.Tensor


class TinyLM(torch.nn.Module):  # type: ignore[misc]  # torch is Any to the type checker
    """The model with its head, whose weight is that of the embedding."""

    _no_split_modules = ("TinyLayer",)

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.model = TinyTrunk(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def base_model(self) -> TinyTrunk:
        return self.model

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def get_output_embeddings(self) -> torch.nn.Module:
        """The head."""
        return self.lm_head

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool = False,
    ) -> Logits:
        """[B, L] integers each; `attention_mask` is 0 at padding, `position_ids` begins again with each row of a line."""
        return Logits(self.lm_head(self.model(input_ids, attention_mask, position_ids).last_hidden_state))

    def save_config(self, folder: Path) -> None:
        """Write `config.json` into an existing folder."""
        facts = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": str(self.dtype).removeprefix("torch."),
            "tie_word_embeddings": True,
            "head_dim": HEAD_WIDTH,
            "hidden_act": "silu",
            "initializer_range": SPREAD,
            "rms_norm_eps": EPSILON,
            "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
            **asdict(self.config),
        }
        (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")

    def save_pretrained(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        """Write `config.json` and `model.safetensors`; `weights` by the names of `state_dict`."""
        from safetensors.torch import save_file

        own = {name: weight.contiguous() for name, weight in weights.items() if name != "lm_head.weight"}
        save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
        self.save_config(folder)


class TinyTrunk(torch.nn.Module):  # type: ignore[misc]
    """Embedding, layers and the last norm."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleList(TinyLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size)
        for module in self.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                torch.nn.init.normal_(module.weight, std=SPREAD)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool = False,
    ) -> HiddenStates:
        """Does what `TinyLM.forward` does, without the head."""
        hidden_BLD = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        turns = _turns(position_ids, hidden_BLD.dtype)
        mask = _may_look(attention_mask, position_ids)
        for layer in self.layers:
            hidden_BLD = layer(hidden_BLD, turns, mask)
        return HiddenStates(self.norm(hidden_BLD))


class TinyLayer(torch.nn.Module):  # type: ignore[misc]
    """Attention, then a gated MLP, each behind a norm and added to what came in."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size)

    def forward(
        self,
        hidden_BLD: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        hidden_BLD = hidden_BLD + self.self_attn(self.input_layernorm(hidden_BLD), turns, mask)
        return hidden_BLD + self.mlp(self.post_attention_layernorm(hidden_BLD))


class Attention(torch.nn.Module):  # type: ignore[misc]
    """Causal, with rotated positions; several heads share keys and values."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        width, shared = config.hidden_size, config.num_key_value_heads * HEAD_WIDTH
        own = config.num_attention_heads * HEAD_WIDTH
        self.q_proj = torch.nn.Linear(width, own, bias=False)
        self.k_proj = torch.nn.Linear(width, shared, bias=False)
        self.v_proj = torch.nn.Linear(width, shared, bias=False)
        self.o_proj = torch.nn.Linear(own, width, bias=False)
        self.sharing = config.num_attention_heads // config.num_key_value_heads

    def forward(
        self,
        hidden_BLD: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        heads = (*hidden_BLD.shape[:2], -1, HEAD_WIDTH)
        q_BHLK, k_BHLK, v_BHLK = (
            project(hidden_BLD).view(heads).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_BHLK, k_BHLK = _turned(q_BHLK, turns), _turned(k_BHLK, turns)
        k_BHLK, v_BHLK = (one.repeat_interleave(self.sharing, 1) for one in (k_BHLK, v_BHLK))
        out_BHLK = functional.scaled_dot_product_attention(
            q_BHLK, k_BHLK, v_BHLK, attn_mask=mask, is_causal=mask is None
        )
        return self.o_proj(out_BHLK.transpose(1, 2).flatten(2))


class GatedMLP(torch.nn.Module):  # type: ignore[misc]
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = torch.nn.Linear(width, inner, bias=False)
        self.up_proj = torch.nn.Linear(width, inner, bias=False)
        self.down_proj = torch.nn.Linear(inner, width, bias=False)

    def forward(self, hidden_BLD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden_BLD)) * self.up_proj(hidden_BLD))


class RMSNorm(torch.nn.Module):  # type: ignore[misc]
    """Divided by the root of the mean square, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, hidden_BLD: torch.Tensor) -> torch.Tensor:
        wide = hidden_BLD.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        return self.weight * scaled.to(hidden_BLD.dtype)


def _turns(position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [B, 1, L, K] of how far each pair of a head's numbers is turned (Su et al. 2021)."""
    pairs = torch.arange(0, HEAD_WIDTH, 2, dtype=torch.float32, device=position_ids.device)
    angles_BLP = position_ids[..., None].float() * (1.0 / ROPE_THETA ** (pairs / HEAD_WIDTH))
    angles_B1LK = torch.cat((angles_BLP, angles_BLP), -1)[:, None]
    return angles_B1LK.cos().to(dtype), angles_B1LK.sin().to(dtype)


def _turned(heads_BHLK: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = heads_BHLK.chunk(2, -1)
    return heads_BHLK * turns[0] + torch.cat((-second, first), -1) * turns[1]


def _may_look(attention_mask: torch.Tensor | None, position_ids: torch.Tensor) -> torch.Tensor | None:
    """bool [B, 1, L, L], which tokens (last axis) each one looks at; None: all up to itself."""
    width = position_ids.shape[1]
    before_LL = torch.ones(width, width, dtype=torch.bool, device=position_ids.device).tril()
    if attention_mask is not None:
        if bool(attention_mask.all()):
            return None
        # padding looks at itself: a softmax over nothing is not a number
        itself_LL = torch.eye(width, dtype=torch.bool, device=position_ids.device)
        return ((before_LL & attention_mask.bool()[:, None, :]) | itself_LL)[:, None]
    starts_BL = functional.pad(position_ids.diff(dim=1) != 1, (1, 0))
    if not bool(starts_BL.any()):
        return None
    row_BL = starts_BL.cumsum(1)
    return (before_LL & (row_BL[:, :, None] == row_BL[:, None, :]))[:, None]
