"""What we assume of torch, safetensors and the trainer of `transformers`, held against them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}
KINDS = [
    "LlamaConfig",
    "Qwen2Config",
    "Qwen3Config",
    "Gemma3TextConfig",
    "Olmo2Config",
    "CohereConfig",
    "PhiConfig",
]
KINDS += ["GPT2Config", "MambaConfig"]
CRITICS = ["LlamaConfig", "Qwen3Config", "GPT2Config"]
BOTH = [(kind, False) for kind in KINDS] + [(kind, True) for kind in CRITICS]


@pytest.mark.parametrize(("kind", "critic"), BOTH)
def test_weight_decay_leaves_out_what_the_trainer_of_transformers_leaves_out(kind: str, critic: bool) -> None:
    """`Trainer.get_decay_parameter_names` needs no trainer, and leaves out biases, layer norms and names of norms."""
    from raysvc.actors.model.token_model import TokenModel
    from raysvc.actors.worker.adamw import decay_groups

    config = getattr(transformers, kind)(**({} if kind == "GPT2Config" else SMALL))
    if kind == "GPT2Config":
        config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)
    of = transformers.AutoModelForTokenClassification if critic else transformers.AutoModelForCausalLM
    lm = of.from_config(config)
    names = transformers.Trainer.get_decay_parameter_names(None, lm)
    expected = {id(weight) for name, weight in lm.named_parameters() if name in names}
    decayed, never = decay_groups(TokenModel(lm, critic), 0.1)
    assert {id(weight) for weight in decayed["params"]} == expected
    assert {id(weight) for weight in never["params"]} == {id(w) for w in lm.parameters()} - expected
    assert expected, "some weights decay"
    assert never["params"], "and some do not"
    assert (decayed["weight_decay"], never["weight_decay"]) == (0.1, 0.0)
