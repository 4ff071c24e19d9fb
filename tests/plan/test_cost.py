"""The cost model: exact integers, and coefficients from a model's config."""

import numpy as np
import pytest

from raysvc.plan.cost import CostModel


def test_costs_are_exact_integers_that_grow_with_length():
    costs = CostModel(3, 2).of(np.array([0, 1, 10, 3_000_000], np.int32))
    assert costs.dtype == np.int64
    assert costs.tolist() == [0, 5, 230, 3 * 3_000_000 + 2 * 3_000_000**2]
    assert (np.diff(CostModel().of(np.arange(100))) > 0).all()


@pytest.mark.parametrize("hidden", [1024, 2048, 4096])
def test_a_classic_decoder_costs_twelve_hidden_sizes_per_token(hidden):
    # 4 h^2 for the projections and 8 h^2 for the MLP, beside h * L of causal attention
    config = {"hidden_size": hidden, "num_hidden_layers": 24, "num_attention_heads": 16}
    cost = CostModel.of_model({**config, "intermediate_size": 8 * hidden // 3})
    assert cost.linear == pytest.approx(12 * hidden, rel=0.001)
    assert cost.quadratic == 1


def test_grouped_heads_and_a_large_vocabulary_count():
    qwen = {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151936,
    }  # fmt: skip
    attention = 2 * 896 * 64 * (14 + 2)
    dense = 24 * (attention + 3 * 896 * 4864) + 896 * 151936
    assert CostModel.of_model(qwen).linear == round(dense / (24 * 896))
