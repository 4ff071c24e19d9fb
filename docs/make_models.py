"""Write the table of docs/models.md: run it after a new version of `transformers`, or a change of what models are called with.

python docs/make_models.py
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

from raysvc.actors.model.model_inputs import BOUNDARIES, POSITIONS
from raysvc.actors.model.row_isolation import Proof, logits_of, prove
from raysvc.actors.model.tiny_twin import tiny_twin

PAGE = Path(__file__).with_name("models.md")
BEGIN, END = "<!-- table begins -->", "<!-- table ends -->"
LAYOUTS = ("packed", "padded_left", "padded_right")
CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4}
MODELS: dict[
    str, tuple[str, dict[str, Any]]
] = {  # name -> `model_type`, and what released models have set otherwise
    "Llama": ("llama", {}),
    "Llama 4": ("llama4_text", {}),
    "Mistral": ("mistral", {}),
    "Ministral 3": ("ministral3", {}),
    "Mixtral": ("mixtral", {}),
    "Qwen2, Qwen2.5": ("qwen2", {}),
    "Qwen3": ("qwen3", {}),
    "Qwen3 MoE": ("qwen3_moe", {}),
    "Qwen3-Next": ("qwen3_next", {}),
    "Qwen3.5": ("qwen3_5_text", {}),
    "Qwen3.5 MoE": ("qwen3_5_moe_text", {}),
    "Gemma": ("gemma", {}),
    "Gemma 2": ("gemma2", {}),
    "Gemma 3": ("gemma3_text", {}),
    "Gemma 4": ("gemma4_text", {}),
    "RecurrentGemma": ("recurrent_gemma", {}),
    "gpt-oss": ("gpt_oss", {}),
    "DeepSeek-V3": ("deepseek_v3", {}),
    "GLM-4.5": ("glm4_moe", {}),
    "MiniMax-M1": ("minimax", {}),
    "MiniMax-M2": ("minimax_m2", {}),
    "Kimi Linear": ("kimi_linear", {}),
    "Phi-2": ("phi", {}),
    "Phi-3, Phi-4": ("phi3", {}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", {}),
    "OLMo Hybrid": ("olmo_hybrid", {}),
    "SmolLM3": ("smollm3", {}),
    "Command R": ("cohere", {}),
    "Command R7B, Command A": ("cohere2", {}),
    "Granite": ("granite", {}),
    "Granite 4": ("granitemoehybrid", {}),
    "Apertus": ("apertus", {}),
    "LFM2": ("lfm2", CONVOLUTIONS),
    "Nemotron-H": ("nemotron_h", {}),
    "Jamba": ("jamba", {}),
    "Bamba": ("bamba", {}),
    "Zamba2": ("zamba2", {}),
    "Falcon": ("falcon", {}),
    "Falcon with ALiBi": ("falcon", {"alibi": True}),
    "Falcon-H1": ("falcon_h1", {}),
    "Mamba": ("mamba", {}),
    "Mamba 2": ("mamba2", {}),
    "RWKV": ("rwkv", {}),
    "xLSTM": ("xlstm", {}),
    "Bloom": ("bloom", {}),
    "MPT": ("mpt", {}),
    "OPT": ("opt", {}),
    "GPT-2": ("gpt2", {}),
    "GPT-J": ("gptj", {}),
    "GPT-NeoX, Pythia": ("gpt_neox", {}),
    "StarCoder2": ("starcoder2", {}),
}


def cells_of(name: str) -> str:
    """The cells of a model."""
    from transformers import AutoConfig

    kind, facts = MODELS[name]
    twin = tiny_twin(AutoConfig.for_model(kind, **facts))
    assert twin is not None, name
    return " | ".join(cell_of(prove(logits_of(twin), twin, layout)) for layout in LAYOUTS)


def cell_of(proof: Proof) -> str:
    """Says how rows are kept apart, or what is missing."""
    if proof.inputs is not None:
        return "yes" if proof.inputs.name == POSITIONS else f"yes, by {proof.inputs.name}"
    missing = re.search(r"Install (`\w+`)", proof.raised.get(BOUNDARIES, ""))
    return f"no without {missing[1]}" if missing else "no"


def table() -> str:
    """A line for all models that have the same cells."""
    alike: dict[str, list[str]] = {}
    for name in MODELS:
        alike.setdefault(cells_of(name), []).append(f"{name} (`{MODELS[name][0]}`)")
    lines = ["| " + " | ".join(f"`{one}`" for one in LAYOUTS) + " | models |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {cells} | {'; '.join(names)} |" for cells, names in alike.items())])


def main() -> int:
    """Write the table."""
    logging.disable(logging.WARNING)  # what transformers says of kernels that are not installed
    before, after = PAGE.read_text().split(BEGIN)[0], PAGE.read_text().split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")
    sys.stdout.write(f"{len(MODELS)} models\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
