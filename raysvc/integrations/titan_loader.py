"""Gives torchtitan's trainer the batches of a server. Needs torchtitan.

    parallelism = ParallelismConfig(context_parallel_degree=2)
    Trainer.Config(parallelism=parallelism, dataloader=ServerLoader.Config(server="sft-1", parallelism=parallelism), ...)

Always true:
- every process of torchtitan's mesh attaches; peers of a data-parallel rank get whole lines, which torchtitan cuts;
- a checkpoint of torchtitan says which items were given out; without one the run begins at the first step;
- a batch has `training.local_batch_size` lines, no longer than `training.seq_len`, or is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config.configs import ParallelismConfig

from raysvc.errors import ConfigError
from raysvc.integrations.torchtitan import titan_batch

if TYPE_CHECKING:
    import torch

    from raysvc.integrations.row_tensors import Tensors


class ServerLoader(ParallelAwareDataloader):  # type: ignore[misc]  # torchtitan is not followed
    """Give its `Config` to torchtitan as `dataloader`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        """Names the server.

        Attributes:
            server: its name.
            parallelism: that of the trainer.
            address: of the Ray cluster, as in `raysvc.attach`.
        """

        server: str
        parallelism: ParallelismConfig
        address: str | None = None

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **others: Any,
    ) -> None:
        """Attach, as torchtitan builds its loader.

        Raises:
            ConfigError: the server cuts lines; `parallelism` is not the trainer's.
        """
        import torch
        from torchtitan.distributed import ParallelDims

        import raysvc

        dims = ParallelDims.from_config(config.parallelism, torch.distributed.get_world_size())
        self.client = raysvc.attach_rank(config.server, mesh=dims, address=config.address)
        try:
            self._refuse(dp_rank, dp_world_size)
        except ConfigError:
            self.client.detach()
            raise
        self._lines, self._longest, self._cp = local_batch_size, seq_len, dims.cp
        self.client.rewind(0)  # whatever an earlier run committed; a checkpoint says more
        dataset = self.client.as_torch_dataset()
        super().__init__(dataset, dp_rank, dp_world_size, batch_size=None, collate_fn=self._batch)

    def _refuse(self, dp_rank: int, dp_size: int) -> None:
        if self.client.lease.cuts:
            what = "is set, and torchtitan cuts lines itself"
            raise ConfigError("plan.cp_split", what, "leave it out: every rank gets whole lines then")
        if (self.client.rank, self.client.dp_size) != (dp_rank, dp_size):
            what = f"means rank {self.client.rank} of {self.client.dp_size}, and the trainer's is {dp_rank} of {dp_size}"
            raise ConfigError("ServerLoader.Config(parallelism)", what, "give what the trainer has")

    def _batch(self, item: Tensors) -> tuple[Tensors, torch.Tensor]:
        lines, width = item["labels"].shape
        if lines != self._lines:
            what = f"makes {lines} lines a micro-batch, and training.local_batch_size is {self._lines}"
            raise ConfigError("plan.micro_batch_size", what, "make them equal, and plan.tail: drop")
        if width > self._longest:
            what = f"makes lines of {width} tokens, and training.seq_len is {self._longest}"
            raise ConfigError("max_length", what, "raise seq_len, or lower max_length")
        return titan_batch(item, self._cp)
