"""Servers that tests of one file share, where what they ask needs none of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import write_entry


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> Iterator[Callable[..., Any]]:
    """Gives the server of a name, of 50 rows by 8 in three epochs, at step 0 and held by nobody; started when it is asked for first."""
    import raysvc
    from raysvc.actors.launch import start_server, stop_server
    from raysvc.actors.server.spec import ServeSpec
    from raysvc.job.config import PlanConfig

    folder, started = tmp_path_factory.mktemp("shared"), dict[str, Any]()
    uri = write_entry(folder / "cache", 50)

    def server(name: str, plan: dict[str, Any] | None = None, **fields: Any) -> Any:
        if name not in started:
            config = PlanConfig(**{"batch_size": 8, "mini_batch_size": 4, "epochs": 3, **(plan or {})})
            fields |= {"journal": str(folder / name), "pad_token_id": 0, "num_cpus": 0}
            spec = ServeSpec(name=name, sources=[uri], plan=config, **fields)
            started[name] = start_server(spec, detached=True)
        with raysvc.attach(name, takeover=True) as client:
            client.rewind(0)
        return started[name]

    yield server
    for name in started:
        stop_server(name)


@pytest.fixture
def plain(shared: Callable[..., Any]) -> Any:
    """The shared server "plain"."""
    return shared("plain")
