"""A prompt and the steps of its solution, each with a label: rows that a process reward model learns from.

Always true:
- there are as many labels as steps, and at least one;
- a label is true, false, or a number from 0 to 1.
"""

from __future__ import annotations

import math
from typing import Any

from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.messages import kind_of, parse_json

STEP_END = "\n"  # behind every step, as TRL's PRMTrainer has it by default
STEP_LABELS = "step_labels"


def read_steps(steps: Any, labels: Any, names: tuple[str, str]) -> list[str]:
    """The texts of the steps of a row.

    Args:
        steps: of the row.
        labels: of the row.
        names: their columns.

    Raises:
        RowFault: they are no lists of texts and of labels of one length.
    """
    steps, labels = (
        parse_json(value, name) if isinstance(value, str) else value
        for value, name in zip((steps, labels), names, strict=True)
    )
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise RowFault(f"{names[0]!r} is not a list of texts", f"it is {kind_of(steps)}")
    if not isinstance(labels, list) or not all(map(_is_label, labels)):
        raise RowFault(
            f"{names[1]!r} is not a list of labels: true, false, or 0 to 1", f"it is {labels!r}"[:80]
        )
    if not steps or len(steps) != len(labels):
        raise RowFault(f"{names[1]!r} are not one for each step", f"{len(labels)} for {len(steps)} steps")
    return steps


def _is_label(value: Any) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value) and 0 <= value <= 1
