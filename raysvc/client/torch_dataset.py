"""A rank's micro-batches as a torch `IterableDataset`.

Always true:
- an item is one ready micro-batch, a dict of tensors: load it with `batch_size=None`;
- `len` is the number of items of the whole run under this split, wherever it resumes: loops count from its beginning;
- `state_dict` says which items were given out, in the middle of a step too; loading it gives the next one first, or is
  refused where the step is split into other items now;
- only the process that attached can read: `num_workers` is 0, the look-ahead is the server's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import IterableDataset, get_worker_info

from raysvc.collate.loss_weights import loss_scale
from raysvc.errors import ConfigError, StateMismatch

if TYPE_CHECKING:
    from raysvc.client.steps import MicroBatch


class RankSteps(Protocol):
    """Declares what a dataset asks of the client or loader that made it."""

    @property
    def next_step(self) -> int:
        """The next step to train."""

    @property
    def loss_ranks(self) -> int:
        """Ranks over which gradients are averaged."""

    def micro_batches(self, device: str) -> Iterator[MicroBatch]:
        """Yields micro-batches from the frontier on."""

    def num_micro_batches(self) -> int:
        """Returns the number of micro-batches of this rank in the whole run."""

    def commit(self, step: int) -> None:
        """Say that a step is trained."""

    def state_dict(self) -> dict[str, Any]:
        """The committed frontier."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""


class RankDataset(IterableDataset[dict[str, torch.Tensor]]):  # type: ignore[misc]  # torch is not followed
    """See the module; made by `as_torch_dataset` of a `RankClient` or `Loader`.

    Items hold the arrays of `Shard.micro`, `row_ids`, and the denominators of the whole mini-batch as scalars:
    `num_tokens`, `num_rows`, `num_groups`; `loss_scale` is the factor of the sum of the item's token losses, for
    gradients that are averaged over ranks (DDP, FSDP); `ends_mini` is true where the optimizer steps.
    """

    def __init__(self, client: RankSteps, device: str, state_at: Callable[[int], dict[str, Any]]) -> None:
        """Makes the dataset of a client.

        Args:
            state_at: returns the client's state once the steps below a number are committed.
        """
        self._client, self._device, self._state_at = client, device, state_at
        self._given: list[list[int]] = []  # row ids of the items given out of the step at the frontier
        self._ends_step = False  # whether the last of them is the step's last
        self._num_items: int | None = None  # of the whole run, once it was counted

    def __len__(self) -> int:
        if self._num_items is None:
            self._num_items = self._client.num_micro_batches()
        return self._num_items

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if get_worker_info() is not None:
            what = "is above 0, and a worker process has no lease"
            raise ConfigError("DataLoader(num_workers)", what, "use 0: look-ahead is done by the server")
        micros = self._client.micro_batches(self._device)
        self._pass(micros)
        for micro in micros:
            if micro.step > self._client.next_step:
                self._commit(micro.step - 1)
            self._given.append(micro.tensors["row_ids"].tolist())
            self._ends_step = micro.ends_step
            counts = micro.denominators
            numbers = {"num_tokens": counts.tokens, "num_rows": counts.rows, "num_groups": counts.groups}
            yield {
                **micro.tensors,
                **{name: torch.tensor(number) for name, number in numbers.items()},
                "loss_scale": torch.tensor(loss_scale(counts, self._client.loss_ranks)),
                "ends_mini": torch.tensor(micro.ends_mini),
            }
        if self._given:
            self._commit(self._client.next_step)

    def state_dict(self) -> dict[str, Any]:
        """Returns what was given out: the client's state, and the rows of each item given of the step at its frontier.

        After the last item of a step that is the state of the next step: any number of ranks can go on from it.
        """
        client = self._client
        if not self._ends_step:
            return {"client": client.state_dict(), "given": list(self._given)}
        return {"client": self._state_at(client.next_step + 1), "given": []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the items that were given out when `state` was taken.

        Raises:
            StateMismatch: the state belongs to other rows or another order; or, by the next item, it was taken in
                the middle of a step that is split into other items here.
        """
        self._client.load_state_dict(state["client"])
        self._given, self._ends_step = list(state["given"]), False

    def _pass(self, micros: Iterator[MicroBatch]) -> None:
        """Take what was given out already."""
        for rows in self._given:
            micro = next(micros, None)
            if micro is None or micro.tensors["row_ids"].tolist() != rows:
                what = f"was taken in the middle of step {self._client.next_step}, whose items have other rows now"
                remedy = "go on with the ranks and micro-batches it was taken with, or from the end of a step"
                raise StateMismatch("state", what, remedy)
            self._ends_step = micro.ends_step

    def _commit(self, step: int) -> None:
        self._client.commit(step)
        self._given, self._ends_step = [], False
