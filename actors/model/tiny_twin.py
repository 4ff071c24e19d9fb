"""A tiny model of the architecture that a configuration of `transformers` describes: to ask what the real one would do.

1. Widths and numbers of heads are divided by one number, so that they still fit each other; the size of a head stays.
2. Layers are cut off behind the first ones that hold every kind of layer.
3. Vocabulary, windows and chunks become short, so that a short row is longer than a window.
4. The largest divisor counts whose model can be built and run.

Always true:
- nothing is read but the configuration: the weights are random, and the caller's random numbers stay as they are;
- the class of the model and the kinds of its layers are those of the real one.

This file imports torch; import it inside the function that needs it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from raysvc.actors.model.load_model import auto_class

VOCABULARY, WINDOW = 256, 8
LEAST_WIDTH, MOST_WIDTH, MOST_WEIGHTS = 32, 512, 50_000_000
# standard deviation of weights: at these widths a layer's output is about as large as its input
SPREAD = 0.15
WIDTHS = re.compile(
    r"(hidden_size\w*|intermediate_size\w*|\w+_intermediate_size|\w*(ffn|inner|ff)_\w*(size|dim)|n_inner|n_embd|d_model|d_ff|embedding_dim"
    r"|\w*embed\w*_dim|lru_width|mamba_d_ssm|\w*_?(num|n)(_\w+)?_heads?|n_head|\w*_rank|attention_hidden_size)$"
)
WINDOWS = re.compile(r"(sliding_window|\w*window_size|\w*chunk_size)$")


def tiny_twin(config: Any) -> Any:
    """The model, in training mode on the CPU; None where no tiny one can be made.

    Args:
        config: of a causal LM, as `AutoConfig` gives it.
    """
    text = config.get_text_config()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes that a tiny model has
        for divisor in _divisors(text):
            torch.manual_seed(0)
            try:
                return _running(auto_class(text), tiny_config(text, divisor))
            except Exception:  # noqa: BLE001  # sizes that do not fit each other, in as many words as there are models
                continue
    return None


def _running(kind: Any, config: Any) -> Any:
    with torch.device("meta"):
        count = sum(weight.numel() for weight in kind.from_config(config).parameters())
    if count > MOST_WEIGHTS:
        raise ValueError(f"{count} weights are not few")
    model = kind.from_config(config).float()
    with torch.no_grad():
        model(input_ids=torch.arange(1, 5)[None], use_cache=False)
    return model.train()


def tiny_config(config: Any, divisor: int) -> Any:
    """The configuration of the tiny model, whose widths are divided."""
    facts = config.to_dict()
    kinds, layers = _kinds(config), getattr(config, "num_hidden_layers", 0)
    kept = _enough_layers(kinds) if kinds else min(2, layers)
    return type(config).from_dict(_small(facts, divisor, layers, kept) | {"num_hidden_layers": kept})


def _small(facts: dict[str, Any], divisor: int, layers: int, kept: int) -> dict[str, Any]:
    return {name: _small_value(name, value, divisor, layers, kept) for name, value in facts.items()}


def _small_value(name: str, value: Any, divisor: int, layers: int, kept: int) -> Any:
    if isinstance(value, list):
        return value[:kept] if len(value) == layers else value
    if isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
        return {key: own for key, own in value.items() if int(key) < kept}  # of layers by number
    if name == "initializer_range":
        return SPREAD
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name.startswith("vocab_size"):
        return min(value, VOCABULARY)
    if name.endswith("_token_id"):
        return value if value < VOCABULARY else 0
    if name in ("n_layer", "n_layers", "num_layers"):
        return min(value, kept)
    if WINDOWS.match(name):
        return min(value, WINDOW)
    return max(1, value // divisor) if WIDTHS.match(name) and value > 0 else value


def _kinds(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())


def _enough_layers(kinds: list[str]) -> int:
    """Counts the first layers that together hold every kind."""
    return max(2, *(kinds.index(kind) + 1 for kind in kinds))


def _divisors(config: Any) -> Iterator[int]:
    """Common divisors of width and heads, the largest first."""
    width = getattr(config, "hidden_size", 0) or LEAST_WIDTH
    for divisor in range(width // LEAST_WIDTH, width // MOST_WIDTH, -1):
        if width % divisor == 0:
            yield divisor
