"""AdamW without the compiler of torch.

This file imports torch; import it inside the function that makes an optimizer.

torch wraps methods of its optimizers so that `torch.compile` leaves them out, and a wrapper imports `torch._dynamo` with sympy
at its first call: nearly as much processor time as torch itself. Workers compile nothing.

Always true:
- weights and state are those of `torch.optim.AdamW`, bit by bit, and either loads the other's state;
- a torch that wraps nothing any more gives the same class.
"""

from __future__ import annotations

from inspect import unwrap

import torch


class PlainAdamW(torch.optim.AdamW):  # type: ignore[misc]  # torch is Any to the type checker
    """`torch.optim.AdamW` for steps that are not compiled."""

    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = unwrap(torch.optim.AdamW.zero_grad)
    state_dict = unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = unwrap(torch.optim.AdamW.load_state_dict)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))
