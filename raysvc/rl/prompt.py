"""A prompt that a rollout server hands out, for one producer to sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.rl.group import Group


@dataclass(frozen=True, eq=False)
class Prompt:
    """What to sample, and what to call it when it is put.

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

    def group(self, input_ids: Sequence[Any], loss_mask: Sequence[Any], **fields: Any) -> Group:
        """The group of its sequences; `fields` as those of `Group`, of which `weight_version` is that of the prompt unless it is given."""
        return Group(
            self.uid,
            input_ids,
            loss_mask,
            attempt=self.attempt,
            **{"weight_version": self.weight_version, **fields},
        )
