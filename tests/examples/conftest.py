"""Runs an example as a user does, but in the session's Ray."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import end_servers

EXAMPLES = Path(__file__).parents[2] / "examples"
Example = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples: their rows are the same, so the first one builds the entry."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def example(
    tmp_path: Path,
    cache: Path,
    ray_session: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Example]:
    """Runs `examples/NAME.py` with arguments, in a folder of its own; returns the JSON it prints last."""
    import torch

    from raysvc.actors.launch import server_names

    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # tiny models: several threads wait for each other, the more so on a busy machine
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYSVC_CACHE_DIR", str(cache))

    def run(name: str, *arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        # as __main__, so that what an example sends to workers travels by value, as it does from a shell
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        facts: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return facts

    before = set(server_names())
    yield run
    torch.set_num_threads(threads)
    end_servers(set(server_names()) - before)
