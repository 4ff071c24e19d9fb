"""benchmarks/gpu.py on a device whose time is a number, and on plain memory: what it would do on a CUDA device."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raysvc.actors.staging.staging import Staging, StagingOptions

from .fake_device import FakeDevice, ForgetsConsumed

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location("gpu", FOLDER / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(FOLDER))


class OneStream(FakeDevice):
    """Copies queue behind compute."""

    def upload(self, source: torch.Tensor, target: torch.Tensor, after: Any) -> float:
        done = super().upload(source, target, [*after, self.compute_free])
        self.compute_free = max(self.compute_free, done)
        return done


class FakeMachine:
    """Staging to a fake device; its kernels look when they end."""

    def __init__(self, device: type[FakeDevice] = FakeDevice) -> None:
        self._kind = device
        self._device = device()

    def staging(self, options: StagingOptions) -> Staging:
        now = self._device.now
        on = options.copy_stream and not (options.timing and options.timing_every_steps == 1)
        self._device = self._kind() if on else OneStream()
        self._device.advance(now)
        self._device.compute_free = now
        return Staging(0, self._device, options)

    def kernel(self, seconds: float, look: Callable[[], None]) -> None:
        begin = max(self._device.now, self._device.compute_free)
        self._device.compute_free = begin + seconds
        self._device._at(self._device.compute_free, look)

    def now(self) -> float:
        self._device.synchronize()
        return self._device.now


def test_copies_hide_where_nothing_is_switched_off_and_no_kernel_sees_wrong_bytes(gpu: Any) -> None:
    rows = {row["what"]: row for row in gpu.measure_copies(FakeMachine(), 1, 8)}
    hidden = {name: row["share of copies hidden"] for name, row in rows.items()}
    assert hidden["1 MB, all on"] > 0.8
    assert hidden["1 MB, no copy stream"] < 0.2
    assert hidden["1 MB, timing"] < 0.2 < hidden["1 MB, timing every 4th step"] < hidden["1 MB, all on"]
    assert len(rows) == len(gpu.TOGGLES) + 1
    assert all(row["kernels that saw wrong bytes"] == 0 for row in rows.values())


def test_kernels_that_see_wrong_bytes_are_counted(gpu: Any) -> None:
    rows = gpu.measure_copies(FakeMachine(ForgetsConsumed), 1, 8)
    assert any(row["kernels that saw wrong bytes"] for row in rows)


def test_steps_and_colocated_workers_are_measured(gpu: Any) -> None:
    steps = gpu.measure_steps("cpu", rows=2, width=8, size=16, steps=2)
    assert [row["what"] for row in steps] == ["step, perfect loader", "step, staging", "step, everything off"]
    both, apart = gpu.measure_colocated("cpu", rows=2, width=8, size=16, steps=1)
    assert min(row["step ms"] for row in (*steps, both, apart)) > 0


def test_without_a_cuda_device_it_says_so_and_ends(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "gpu.json")]) == 2
    assert (
        capsys.readouterr().err == "error: torch finds no CUDA device; run this on a machine that has one\n"
    )
    assert not (tmp_path / "gpu.json").exists()
