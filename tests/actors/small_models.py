"""Small random causal models of `transformers`, from their own configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
WINDOWS = {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
OF: dict[str, dict[str, Any]] = {  # what a model needs beside the sizes
    "llama": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {**WINDOWS, "query_pre_attn_scalar": 16},
    "llama4_text": {"head_dim": 16, "intermediate_size_mlp": 48, "attention_chunk_size": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
    "gpt_oss": {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 2},
    "falcon": {"num_kv_heads": 1},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "bloom": {"n_head": 2, "n_layer": 2},
    "qwen3_5_text": LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"mamba_dt_rank": 4, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba": {"state_size": 4, "time_step_rank": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "rwkv": {"attention_hidden_size": 32},
    "recurrent_gemma": {"head_dim": 16, "lru_width": 32, "num_hidden_layers": 3, "attention_window_size": 5, "w_init_variance_scale": 1.0},
}  # fmt: skip


def small_model(name: str, **changes: Any) -> Any:
    """In eval mode, in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **{**SIZES, **OF[name], **changes})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def small_folder(name: str, folder: Path, **changes: Any) -> str:
    """A folder that holds the model."""
    from raysvc.actors.model.hf_model import _no_bars

    folder.mkdir(parents=True, exist_ok=True)
    with _no_bars():
        small_model(name, **changes).save_pretrained(folder)
    return str(folder)
