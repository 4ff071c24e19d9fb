"""raysvc by a batch server, which outlives the ranks that are killed, on a Ray that outlives all of them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ray_alone import prepare as prepare
from raysvc_load import NOT_OFFERED as NOT_OFFERED
from raysvc_load import PROMISE as PROMISE
from raysvc_load import VERSION as VERSION
from raysvc_load import Loader
from raysvc_rollouts import Learner
from words import parts_of

import raysvc

OFFERS = ("pairs", "rollouts")
SETTINGS = "serve() again by rank 0 of each launch, attach_rank(rank=, group=, takeover=True), steps(), commit() after each"
IMPORTS = ("torch", "transformers", "raysvc.api")


class Served(Loader):
    def open(self, job: dict[str, Any], o: dict[str, Any]) -> Any:
        if o["rank"] == 0:
            _end_others(o["run"])
            raysvc.serve({**job, "server": {"name": o["run"]}})
        return _attach(o)


def _attach(o: dict[str, Any], limit_s: float = 120.0) -> Any:
    begin = time.monotonic()
    while True:
        try:
            return raysvc.attach_rank(
                o["run"], o["world_size"], rank=o["rank"], group=os.environ["MASTER_PORT"], takeover=True
            )
        except raysvc.errors.ServerError:  # rank 0 has not served it yet
            if o["rank"] == 0 or time.monotonic() - begin > limit_s:
                raise
            time.sleep(0.2)


def _end_others(name: str) -> None:
    """Servers of runs before are not needed any more."""
    from raysvc.actors.launch import server_names, stop_server
    from raysvc.cluster import connect

    connect()
    for other in server_names():
        if other != name:
            stop_server(other)


def open_loader(rows: Path, **options: Any) -> Served | Learner:
    if options.get("rollouts"):
        return Learner(rows, options)
    if options.get("long"):  # two sources, that are no versions of one
        options["run"] += Path(parts_of(rows)[0]).parent.name
    return Served(rows, options)
