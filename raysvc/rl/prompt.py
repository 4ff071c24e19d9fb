"""A prompt that a rollout server hands out, for one producer to sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.errors import SourceError
from raysvc.rl.engine_values import array_of
from raysvc.rl.group import Group


@dataclass(frozen=True, eq=False)
class Prompt:
    """Holds what to sample, and what to call it when it is put.

    Attributes:
        uid: of this prompt in this epoch, `position/row`: its place in the stream, and the row of the source.
        attempt: how often it was handed out before.
        weight_version: of the weights that trained when it was handed out.
        epoch: counted from 0.
        input_ids: int32 [L], the tokens up to the first target of its row; all of them where the row has none.
        columns: the per-row columns that the job carries, by name (an answer, a data set).
    """

    uid: str
    attempt: int
    weight_version: int
    epoch: int
    input_ids: npt.NDArray[np.int32]
    columns: Mapping[str, Any]

    @property
    def row_id(self) -> str:
        """The row of the source, `source:slice:row`."""
        return self.uid.partition("/")[2]

    def group(self, input_ids: Sequence[Any], loss_mask: Sequence[Any] | None = None, **fields: Any) -> Group:
        """The group of its sequences.

        Args:
            input_ids: each begins with the tokens of the prompt, unless there is a `loss_mask`.
            loss_mask: None: everything behind the prompt was sampled.
            fields: as those of `Group`; `weight_version` is that of the prompt unless it is given.

        Raises:
            SourceError: a sequence begins with other tokens, and nothing says what was sampled.
        """
        masks = self._after_prompt(input_ids) if loss_mask is None else loss_mask
        return Group(
            self.uid,
            input_ids,
            masks,
            attempt=self.attempt,
            **{"weight_version": self.weight_version, **fields},
        )

    def _after_prompt(self, input_ids: Sequence[Any]) -> list[npt.NDArray[np.uint8]]:
        length, masks = len(self.input_ids), []
        for number, ids in enumerate(input_ids):
            own = array_of(ids)
            if not np.array_equal(own[:length], self.input_ids):
                what = f"has a sequence {number} that does not begin with its prompt"
                raise SourceError(
                    f"group {self.uid!r}",
                    what,
                    "put prompt and answer, or say what was sampled by a loss_mask",
                )
            masks.append((np.arange(len(own)) >= length).astype(np.uint8))
        return masks
