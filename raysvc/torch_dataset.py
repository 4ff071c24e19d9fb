"""A rank's micro-batches as a torch `IterableDataset`.

Always true:
- an item is one ready micro-batch, a dict of tensors: load it with `batch_size=None`;
- `len` is the number of items that are left from the frontier on;
- `state_dict` says which items were given out, in the middle of a step too; loading it gives the next one first;
- only the process that attached can read: `num_workers` is 0, the look-ahead is the server's.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from raysvc.errors import ConfigError

if TYPE_CHECKING:
    from raysvc.rank_client import RankClient


class RankDataset(IterableDataset[dict[str, torch.Tensor]]):  # type: ignore[misc]  # torch is not followed
    """See the module; made by `RankClient.as_torch_dataset`.

    Items hold the arrays of `Shard.micro`, `row_ids`, and the denominators of the whole mini-batch as scalars:
    `num_tokens`, `num_rows`, `num_groups`; `ends_mini` is true where the optimizer steps.
    """

    def __init__(self, client: RankClient, device: str) -> None:
        self._client, self._device = client, device
        self._given = 0  # items given out of the step at the frontier
        self._num_left: int | None = None  # items from the frontier on, when it was counted

    def __len__(self) -> int:
        if self._num_left is None:
            self._num_left = self._client.num_micro_batches()
        return self._num_left - self._given

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if get_worker_info() is not None:
            what = "is above 0, and a worker process has no lease"
            raise ConfigError("DataLoader(num_workers)", what, "use 0: look-ahead is done by the server")
        micros = self._client.micro_batches(self._device)
        for micro in islice(micros, self._given, None) if self._given else micros:
            if micro.step > self._client.frontier:
                self._commit(micro.step - 1)
            self._given += 1
            counts = micro.denominators
            numbers = {"num_tokens": counts.tokens, "num_rows": counts.rows, "num_groups": counts.groups}
            yield {
                **micro.tensors,
                **{name: torch.tensor(number) for name, number in numbers.items()},
                "ends_mini": torch.tensor(micro.ends_mini),
            }
        if self._given:
            self._commit(self._client.frontier)

    def state_dict(self) -> dict[str, Any]:
        """What was given out: the client's state, and `given` items of the step at its frontier."""
        return {"client": self._client.state_dict(), "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the items that were given out when `state` was taken.

        Raises:
            StateMismatch: the state belongs to other rows or another order.
        """
        self._client.load_state_dict(state["client"])
        self._given, self._num_left = int(state["given"]), None

    def _commit(self, step: int) -> None:
        self._client.commit(step)
        if self._num_left is not None:
            self._num_left -= self._given
        self._given = 0
