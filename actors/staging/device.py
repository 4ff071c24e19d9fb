"""Says where a worker's tensors live, as staging sees it: buffers, copies, and events both ways.

Two orders matter on a GPU, and each has an event: the compute stream starts on a buffer when the copy into it is done
(`upload` returns that event), and the next copy into it starts when compute is done with it (`consumed`).

Always true:
- `upload` starts only after every event in `after`, and returns before the copy is done;
- on a CPU the device buffer *is* the host buffer, a copy is nothing, and every event has happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Event = Any  # torch.cuda.Event; None where everything has happened


class CpuDevice:
    """Plain memory."""

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] that the device can read."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8)

    def device_buffer(self, host: torch.Tensor) -> torch.Tensor:
        """uint8 of the same size, that compute reads."""
        return host

    def upload(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event]) -> Event:
        """Start a copy once `after` have happened; the event of its end."""
        return None

    def consumed(self) -> Event:
        """The event that everything asked of compute up to now is done."""
        return None

    def wait_on_compute(self, event: Event) -> None:
        """Lets what is asked of compute from now on start after `event`; the caller does not wait."""

    def wait_on_host(self, event: Event) -> None:
        """The caller waits for `event`."""

    def synchronize(self) -> None:
        """The caller waits for everything."""


class CudaDevice:
    """One GPU; copies run on a stream of their own, from pinned memory.

    Args:
        name: torch device string.
        copy_stream: False: copies queue on the stream that computes.
        pin_memory: False: the driver stages every copy once more, and the caller waits for it.
    """

    def __init__(self, name: str, copy_stream: bool = True, pin_memory: bool = True) -> None:
        import torch

        self._device = (
            torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)
        )
        self._copy_stream = torch.cuda.Stream(self._device) if copy_stream else None
        self._pin_memory = pin_memory

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pin_memory)

    def device_buffer(self, host: torch.Tensor) -> torch.Tensor:
        import torch

        buffer = torch.empty(host.numel(), dtype=torch.uint8, device=self._device)
        # the block may have been freed by compute that still runs: no copy may enter it before
        torch.cuda.current_stream(self._device).synchronize()
        return buffer

    def upload(self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Event]) -> Event:
        import torch

        stream = self._copy_stream or torch.cuda.current_stream(self._device)
        with torch.cuda.stream(stream):
            for event in after:
                stream.wait_event(event)
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        return done

    def consumed(self) -> Event:
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait_on_compute(self, event: Event) -> None:
        import torch

        torch.cuda.current_stream(self._device).wait_event(event)

    def wait_on_host(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)


Device = CpuDevice | CudaDevice


def open_device(name: str, copy_stream: bool = True, pin_memory: bool = True) -> Device:
    """The device of a torch device string."""
    return CudaDevice(name, copy_stream, pin_memory) if name.startswith("cuda") else CpuDevice()
