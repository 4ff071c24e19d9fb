"""Finds the inputs that keep the rows of a layout apart in a model: proved on the model itself, not looked up by its name.

Axes: B lines, L tokens of a line, V numbers of a token.

1. A row is run alone, and together with other text of one row, which says how far it moves when it sees something.
2. Two micro-batches of the layout hold that row. What else they hold differs: the other rows and the ids of padding.
3. `INPUT_SETS` are tried in order, each in eval mode and in the mode that the model is in, under the same random numbers. The
   first one is taken under which the row is what it is alone, and the same in both micro-batches.

Always true:
- a model that is accepted was seen to keep rows apart with the weights, the device and the attention that it has;
- rows of one line of `stream` see each other by design; its lines do not;
- the model's mode, its gradients and the caller's random numbers stay as they were.

This file imports torch; import it inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from raysvc.actors.model.model_inputs import INPUT_SETS, POSITIONS, ModelInputs, Tensors
from raysvc.errors import ConfigError

# inputs of a model -> what it says of each token but the last of a line, or of all [B, L, V]
Outputs = Callable[[dict[str, Any]], torch.Tensor]
# arrays of a micro-batch; line and cells of the row that is looked at
Micro = tuple[dict[str, torch.Tensor], tuple[int, slice]]
# of what a row moves by when it sees another one: float32 rounds by 3e-5 of it at most, rows that leak do by 8e-4 at least
TOLERANCE = 2e-4
ROUNDINGS = (
    12  # steps of a coarser type that layers may add up to, where a row is computed alone and in a line
)
NOT_TAKEN = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    RuntimeError,
)  # of inputs that a model does not know
OURS, BEFORE, OTHER = 12, 13, 6  # tokens of the row that is looked at, and of the rows around it
PADDING = 3  # cells behind or before the rows


@dataclass(frozen=True)
class Proof:
    """Holds what was found.

    Attributes:
        inputs: that keep rows apart; None where none does.
        failures: input set -> how far it moved the row, or what the model said; of those before `inputs`.
        raised: the sets that the model refused to take.
    """

    inputs: ModelInputs | None
    failures: dict[str, str]
    raised: dict[str, str]


def model_inputs(model: Any, layout: str) -> ModelInputs:
    """Returns how to call a model of `transformers` so that the rows of a layout do not see each other: proved on
    this model, as it is.

        inputs_of = raysvc.model_inputs(model, "packed")
        for micro in client.micro_batches():
            logits = model(**inputs_of(micro.tensors)).logits

    Args:
        model: on its device, with the attention implementation and under the autocast that will be used; also inside of DDP, or
            a module of your own that takes `input_ids`, and returns logits or an object that has them.
        layout: `padded_right`, `padded_left`, `packed` or `stream`.

    Raises:
        ConfigError: no inputs that the model takes keep its rows apart.
    """
    proof = prove(logits_of(model), model, layout)
    if proof.inputs is None:
        raise mixes_rows(type(model).__name__, layout, proof)
    return proof.inputs


def rows_are_isolated(
    model: Any, layout: str, inputs_of: Callable[[Tensors], Mapping[str, Any]] | None = None
) -> bool:
    """Returns whether the rows of a layout do not see each other in a model, and padding is not seen.

    Args:
        model: as of `model_inputs`.
        layout: `padded_right`, `padded_left`, `packed` or `stream`.
        inputs_of: what your trainer calls the model with, of the arrays of a micro-batch; None: ids, positions, and the mask of
            padded lines.
    """
    proving = _IsolationTrial.of(logits_of(model), model, layout)
    return not proving.failure(inputs_of or ModelInputs(layout, POSITIONS, config_of(model)))


def prove(outputs_of: Outputs, lm: torch.nn.Module, layout: str) -> Proof:
    """Try the input sets in order.

    Args:
        outputs_of: runs the model as it will be run.
        lm: the model.
    """
    proving = _IsolationTrial.of(outputs_of, lm, layout)
    failures: dict[str, str] = {}
    raised: dict[str, str] = {}
    for name in INPUT_SETS:
        if name != POSITIONS and layout != "packed":
            break  # the mask says all that there is to say
        inputs = ModelInputs(layout, name, config_of(lm))
        try:
            failure = proving.failure(inputs)
        except NOT_TAKEN as error:
            failure = raised[name] = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not failure:
            return Proof(inputs, failures, raised)
        failures[name] = failure
    return Proof(None, failures, raised)


def mixes_rows(model: str, layout: str, proof: Proof, where: str = "plan.layout") -> ConfigError:
    """Returns what to say of a model for which nothing was proved."""
    first = {
        failure: name for name, failure in reversed(proof.failures.items())
    }  # sets that fail alike are one
    tried = "; ".join(f"with {name}: {why}" for why, name in reversed(first.items()))
    what = f"is {layout}, and {model} does not keep the rows of a micro-batch apart ({tried})"
    other = "use padded_right, which any causal model keeps apart"
    return ConfigError(where, what, "give another model" if layout == "padded_right" else other)


@dataclass(frozen=True)
class _IsolationTrial:
    """A row, alone and in two micro-batches of a layout.

    Attributes:
        outputs_of: runs the model.
        lm: whose mode is changed.
        alone: [N, V], what the model says of the row alone.
        leak: how far a number may move between the micro-batches.
        rounding: how far it may be from what it is alone.
        micro_batches: the two.
    """

    outputs_of: Outputs
    lm: torch.nn.Module
    alone: torch.Tensor
    leak: float
    rounding: float
    micro_batches: Sequence[Micro]

    @staticmethod
    def of(outputs_of: Outputs, lm: Any, layout: str) -> _IsolationTrial:
        device, count = next(lm.parameters()).device, _ids_of(lm)
        ids = [_ids(part, count, device) for part in range(6)]
        row, whole = ids[0][:OURS], torch.cat([ids[1][:BEFORE], ids[0][:OURS], ids[2][:OTHER]])
        with _evaluating(lm):
            with _coarsest_step(lm) as steps:
                alone_NV = _of_row(_alone(outputs_of, lm, row), (0, slice(0, OURS)))
            seeing_NV = _of_row(outputs_of({"input_ids": whole[None]}), (0, slice(BEFORE, BEFORE + OURS)))
        moved, step = _distance(alone_NV, seeing_NV), max(steps)
        one_step = step * float(alone_NV.abs().max())
        leak, rounding = TOLERANCE * moved + one_step, max(TOLERANCE, ROUNDINGS * step) * moved + 2 * one_step
        make = {"packed": _packed, "padded_left": _padded_left}.get(layout, _padded_right)
        micro_batches = [make(row, ids[1], ids[2], ids[3]), make(row, ids[4], ids[5], ids[1])]
        return _IsolationTrial(outputs_of, lm, alone_NV, leak, rounding, micro_batches)

    def failure(self, inputs_of: Callable[[Tensors], Mapping[str, Any]]) -> str:
        """Says how the row moves; empty if it does not."""
        with _evaluating(self.lm):
            found = self._found(inputs_of)
        leaks, others = [_distance(*found)], [_distance(self.alone, one) for one in found]
        if self.lm.training:
            with torch.no_grad():
                leaks.append(_distance(*self._found(inputs_of)))
        # a number that is none is in neither
        if all(leak <= self.leak for leak in leaks) and all(other <= self.rounding for other in others):
            return ""
        return f"logits of a row move by up to {max(leaks + others):.2g} with what is beside it"

    def _found(self, inputs_of: Callable[[Tensors], Mapping[str, Any]]) -> list[torch.Tensor]:
        """Returns what the model says of the row in each micro-batch."""
        out = []
        for micro, where in self.micro_batches:
            # the state before comes back: the same dropout in both
            device = self.alone.device
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                out.append(_of_row(self.outputs_of(dict(inputs_of(micro))), where))
        return out


def _alone(outputs_of: Outputs, lm: torch.nn.Module, row: torch.Tensor) -> torch.Tensor:
    try:
        return outputs_of({"input_ids": row[None]})
    except TypeError as error:
        what = (
            f"{type(lm).__name__} does not take input_ids alone ({error}), so no row of it can be looked at"
        )
        raise ConfigError("model", what, "make its other arguments optional") from None


def _packed(row: torch.Tensor, before: torch.Tensor, after: torch.Tensor, pads: torch.Tensor) -> Micro:
    before, after, pads = before[:BEFORE], after[:OTHER], pads[:PADDING]
    counts = [torch.arange(len(one), device=row.device) for one in (before, row, after)]
    positions = torch.cat([*counts, torch.zeros_like(pads)])
    tensors = {"input_ids": torch.cat([before, row, after, pads])[None], "position_ids": positions[None]}
    return tensors, (0, slice(BEFORE, BEFORE + OURS))


def _padded_left(row: torch.Tensor, other: torch.Tensor, _: torch.Tensor, pads: torch.Tensor) -> Micro:
    return _padded(row, other, pads, left=True)


def _padded_right(row: torch.Tensor, other: torch.Tensor, _: torch.Tensor, pads: torch.Tensor) -> Micro:
    return _padded(row, other, pads, left=False)


def _padded(row: torch.Tensor, other: torch.Tensor, pads: torch.Tensor, left: bool) -> Micro:
    """The row and padding on one line, a longer row on the other."""
    pads, other = pads[:PADDING], other[: OURS + PADDING]
    none = torch.zeros_like(pads)
    place = torch.arange(len(other), device=row.device)
    lines = {
        "input_ids": (row, pads, other),
        "position_ids": (place[:OURS], none, place),
        "attention_mask": (torch.ones_like(row), none, torch.ones_like(other)),
    }
    tensors = {
        name: torch.stack([torch.cat([gap, own] if left else [own, gap]), theirs])
        for name, (own, gap, theirs) in lines.items()
    }
    return tensors, (0, slice(PADDING * left, PADDING * left + OURS))


def _ids(part: int, count: int, device: torch.device) -> torch.Tensor:
    """[16] ids, others for each part."""
    return (torch.arange(BEFORE + PADDING, device=device) * (2 * part + 3) + 11 * part + 5) % count


def _of_row(outputs: torch.Tensor, where: tuple[int, slice]) -> torch.Tensor:
    """[N, V] of all tokens of the row but its last one, which predicts nothing of it."""
    line, cells = where
    return outputs[line, cells.start : cells.stop - 1].float()


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def logits_of(model: Any) -> Outputs:
    """A model of `transformers`, as it is called; any other module that returns logits, or an object that has them."""
    more = {} if config_of(model) is None else {"use_cache": False}

    def outputs_of(inputs: dict[str, Any]) -> torch.Tensor:
        outputs = model(**inputs, **more)
        logits: torch.Tensor = getattr(outputs, "logits", outputs)
        return logits

    return outputs_of


def config_of(lm: Any) -> Any:
    """The configuration of a model of `transformers`, also of one inside of a wrapper such as DDP; None of another module."""
    while not hasattr(lm, "config") and isinstance(getattr(lm, "module", None), torch.nn.Module):
        lm = lm.module
    config = getattr(lm, "config", None)
    return config if hasattr(config, "get_text_config") else None


def _ids_of(lm: torch.nn.Module) -> int:
    """Counts the ids that the model has an entry for."""
    config = config_of(lm)
    if config is not None:
        return int(config.get_text_config().vocab_size)
    tables = [each.num_embeddings for each in lm.modules() if isinstance(each, torch.nn.Embedding)]
    if not tables:
        what = f"{type(lm).__name__} has neither a configuration of transformers nor an embedding, so no row can be made for it"
        raise ConfigError("model", what, "give a causal language model")
    least: int = min(tables)
    return max(2, least)


@contextmanager
def _coarsest_step(lm: torch.nn.Module) -> Iterator[list[float]]:
    """Relative steps of the types that modules inside compute in, whatever the type of weights and logits is."""
    steps: list[float] = []

    def note(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            steps.append(torch.finfo(output.dtype).eps)

    hooks = [module.register_forward_hook(note) for module in lm.modules()]
    try:
        yield steps
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _evaluating(lm: torch.nn.Module) -> Iterator[None]:
    """Runs in eval mode and without gradients; every module is left in the mode in which it was."""
    modes = [(module, module.training) for module in lm.modules()]
    lm.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
