"""AdamW without the compiler of torch.

This file imports torch; import it inside the function that makes an optimizer.

torch wraps methods of its optimizers so that `torch.compile` leaves them out, and a wrapper imports `torch._dynamo` with sympy
at its first call: nearly as much processor time as torch itself. Workers compile nothing.

Always true:
- weights and state are those of `torch.optim.AdamW`, bit by bit, and either loads the other's state;
- weight decay is that of HF's Trainer: biases, layer norms and what is named a norm have none;
- a torch that wraps nothing any more gives the same class.
"""

from __future__ import annotations

import re
from inspect import unwrap
from typing import Any

import torch

NEVER_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")  # of HF's Trainer


class PlainAdamW(torch.optim.AdamW):  # type: ignore[misc]  # torch is Any to the type checker
    """`torch.optim.AdamW` for steps that are not compiled."""

    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = unwrap(torch.optim.AdamW.zero_grad)
    state_dict = unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = unwrap(torch.optim.AdamW.load_state_dict)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


def decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: what decays, and what does not."""
    inside = {
        id(weight)
        for part in model.modules()
        if isinstance(part, torch.nn.LayerNorm)
        for weight in part.parameters()
    }
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (weight_decay, 0.0)]
    for name, weight in model.named_parameters():
        never = id(weight) in inside or NEVER_DECAYED.search(name.lower()) is not None
        groups[never]["params"].append(weight)
    return groups
