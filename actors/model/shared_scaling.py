"""Models that scale positions by the longest row of a micro-batch, so that a long row changes the short ones beside it.

`transformers` computes the frequencies of a forward pass from its highest position. With `longrope` (Phi-3.5, Phi-4-mini) they are
others as soon as one row is longer than the original context; with `dynamic` they also depend on what the model saw before.

Always true:
- no layout keeps rows apart there, so lengths of rows decide, and no model has to be run;
- rows that all are within the context, and with `longrope` rows that all are beyond it, are what they are alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class SharedScaling(NamedTuple):
    """Describes how a model scales positions.

    Attributes:
        kind: `longrope` or `dynamic`.
        context: tokens of the longest row that is not scaled.
    """

    kind: str
    context: int

    def mixes(self, lengths: npt.NDArray[np.integer[Any]]) -> int:
        """Counts the rows that are so long that rows beside them are computed differently than alone."""
        beyond = int((lengths > self.context).sum())
        return 0 if self.kind == "longrope" and beyond == len(lengths) else beyond

    def told(self, rows: str) -> str:
        """Returns what is wrong, where `rows` says how many are longer."""
        return (
            f"scales positions by the longest row of a micro-batch ({self.kind}, original context {self.context}), and {rows} "
            "longer: the rows beside them would be computed otherwise than alone"
        )

    @property
    def remedy(self) -> str:
        """Returns what to set."""
        alone = ", or plan.layout: padded_right with plan.micro_batch_size: 1"
        return f"set max_length: {self.context}" + (alone if self.kind == "longrope" else "")


def shared_scaling(config: Any) -> SharedScaling | None:
    """Reads the scaling from a configuration of `transformers`; None if a row's positions are scaled by nothing but
    the row.
    """
    text = config.get_text_config()
    found = getattr(text, "rope_parameters", None) or {}
    # of the model, or of each kind of its layers
    each = [found, *(one for one in found.values() if isinstance(one, dict))]
    scalings = [scaling for one in each if (scaling := _scaling(one, text)) is not None]
    return min(scalings, key=lambda one: one.context, default=None)


def _scaling(rope: dict[str, Any], text: Any) -> SharedScaling | None:
    kind = str(rope.get("rope_type") or "")
    most = getattr(text, "max_position_embeddings", None)
    if kind == "longrope":
        context = rope.get("original_max_position_embeddings") or most
    else:
        kind, context = ("dynamic", most) if "dynamic" in kind else ("", None)
    return SharedScaling(kind, context) if isinstance(context, int) else None
