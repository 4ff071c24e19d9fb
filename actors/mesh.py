"""Places processes in a group: data-parallel ranks and the peers that share their rows.

Always true:
- processes are numbered with tensor-parallel ranks next to each other, then context, pipeline, data:
  index = ((dp * pp_size + pp) * cp_size + cp) * tp_size + tp;
- the peers of a data-parallel rank have adjacent numbers; a mesh of dp alone numbers its ranks, and nobody has peers;
- a dp rank's outputs come from one worker: tp 0, cp 0, the last pipeline stage.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

from raysvc.errors import ConfigError


class MeshRank(NamedTuple):
    """The coordinates of one process in a mesh."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """Sizes of a group's axes.

    Attributes:
        dp: data-parallel ranks: each trains rows of its own.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        cp: context-parallel ranks, those of Ulysses too.

    Raises:
        ConfigError: a size is no positive integer.
    """

    dp: int
    tp: int = 1
    pp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for axis, size in asdict(self).items():
            if type(size) is not int or size < 1:
                raise ConfigError(f"Mesh({axis})", f"{size!r} is no positive integer", "give the axis's size")

    def __str__(self) -> str:
        sizes = asdict(self).items()
        return ", ".join(f"{axis}={size}" for axis, size in sizes if size > 1 or axis == "dp")

    @property
    def size(self) -> int:
        """Processes of the group."""
        return self.dp * self.num_peers

    @property
    def num_peers(self) -> int:
        """Processes that share the rows of one data-parallel rank."""
        return self.pp * self.cp * self.tp

    def rank(self, index: int) -> MeshRank:
        """The coordinates of process `index`."""
        rest, tp = divmod(index, self.tp)
        rest, cp = divmod(rest, self.cp)
        dp, pp = divmod(rest, self.pp)
        return MeshRank(dp, pp, cp, tp)

    def index(self, rank: MeshRank) -> int:
        """The number of the process that stands there."""
        return ((rank.dp * self.pp + rank.pp) * self.cp + rank.cp) * self.tp + rank.tp

    def peers(self, index: int) -> range:
        """Numbers of all processes of the data-parallel rank of process `index`."""
        first = index - index % self.num_peers
        return range(first, first + self.num_peers)

    def name(self, index: int) -> str:
        """Process `index` for display: "rank 3" of a mesh of dp alone, else its coordinates."""
        if self.num_peers == 1:
            return f"rank {index}"
        sizes, own = asdict(self), self.rank(index)._asdict()
        return "rank " + " ".join(f"{axis}={own[axis]}" for axis in own if sizes[axis] > 1 or axis == "dp")

    def collected(self) -> list[int]:
        """The worker of each dp rank whose outputs count, in dp order."""
        return [self.index(MeshRank(dp, self.pp - 1, 0, 0)) for dp in range(self.dp)]


class MeshSeat(NamedTuple):
    """The seat of one process.

    Attributes:
        mesh: of the group.
        number: of the process, as `Mesh.index`.
    """

    mesh: Mesh
    number: int

    @property
    def coords(self) -> MeshRank:
        """The coordinates of the process."""
        return self.mesh.rank(self.number)

    def share(self, cuts: bool) -> tuple[int | None, int]:
        """Says which shard is this process's: the parts of a data-parallel rank's (None: it is not cut), and its number among those
        of all ranks.

        Args:
            cuts: whether context-parallel ranks get parts; else each gets all.
        """
        dp, cp = self.coords.dp, self.coords.cp
        return (self.mesh.cp, dp * self.mesh.cp + cp) if cuts else (None, dp)

    def num_sharers(self, cuts: bool) -> int:
        """Returns how many processes have that shard."""
        return self.mesh.num_peers // (self.mesh.cp if cuts else 1)
