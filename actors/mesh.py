"""Which worker is which in a group: data-parallel ranks and the replicas that share their data.

Always true:
- workers are numbered with tensor-parallel ranks next to each other, then context, pipeline, data:
  index = ((dp * pp_size + pp) * cp_size + cp) * tp_size + tp;
- a dp rank's outputs come from one worker: tp 0, cp 0, the last pipeline stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class MeshRank(NamedTuple):
    """The coordinates of one worker in a mesh."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """Sizes of a group's axes."""

    dp: int
    tp: int = 1
    pp: int = 1
    cp: int = 1

    @property
    def size(self) -> int:
        """Workers of the group."""
        return self.dp * self.pp * self.cp * self.tp

    def rank(self, index: int) -> MeshRank:
        """The coordinates of worker `index`."""
        rest, tp = divmod(index, self.tp)
        rest, cp = divmod(rest, self.cp)
        dp, pp = divmod(rest, self.pp)
        return MeshRank(dp, pp, cp, tp)

    def collected(self) -> list[int]:
        """The worker of each dp rank whose outputs count, in dp order."""
        wanted = [MeshRank(dp, self.pp - 1, 0, 0) for dp in range(self.dp)]
        numbers = {self.rank(index): index for index in range(self.size)}
        return [numbers[rank] for rank in wanted]
