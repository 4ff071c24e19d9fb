"""Ray-native distributed data service for LLM post-training.

Always true:
- importing starts nothing, and pulls in neither ray nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from raysvc import errors

if TYPE_CHECKING:
    from raysvc.actors.mesh import Mesh
    from raysvc.actors.model.row_isolation import model_inputs, rows_are_isolated
    from raysvc.actors.server.spec import Role
    from raysvc.api import ServerHandle, enrich, serve, tokenize
    from raysvc.builds.cache_entry import CacheEntry, open_entry, read_entry
    from raysvc.client.batch_client import BatchClient, attach
    from raysvc.client.rank_client import RankClient, attach_rank
    from raysvc.client.rl.rollout_serving import serve_rollouts
    from raysvc.client.rl.rollouts import rollouts
    from raysvc.collate.loss_weights import loss_scale
    from raysvc.collate.shard import read_shard
    from raysvc.loader import Loader, load
    from raysvc.rl.group import Group
    from raysvc.training.train import train

__version__ = "0.1.0"
__all__ = [
    "BatchClient",
    "CacheEntry",
    "Group",
    "Loader",
    "Mesh",
    "RankClient",
    "Role",
    "ServerHandle",
    "attach",
    "attach_rank",
    "enrich",
    "errors",
    "load",
    "loss_scale",
    "model_inputs",
    "open_entry",
    "read_entry",
    "read_shard",
    "rollouts",
    "rows_are_isolated",
    "serve",
    "serve_rollouts",
    "tokenize",
    "train",
]
_HOMES = {
    "BatchClient": "raysvc.client.batch_client",
    "CacheEntry": "raysvc.builds.cache_entry",
    "Group": "raysvc.rl.group",
    "Loader": "raysvc.loader",
    "Mesh": "raysvc.actors.mesh",
    "RankClient": "raysvc.client.rank_client",
    "Role": "raysvc.actors.server.spec",
    "ServerHandle": "raysvc.api",
    "attach": "raysvc.client.batch_client",
    "attach_rank": "raysvc.client.rank_client",
    "enrich": "raysvc.api",
    "load": "raysvc.loader",
    "loss_scale": "raysvc.collate.loss_weights",
    "model_inputs": "raysvc.actors.model.row_isolation",
    "open_entry": "raysvc.builds.cache_entry",
    "read_entry": "raysvc.builds.cache_entry",
    "read_shard": "raysvc.collate.shard",
    "rollouts": "raysvc.client.rl.rollouts",
    "rows_are_isolated": "raysvc.actors.model.row_isolation",
    "serve": "raysvc.api",
    "serve_rollouts": "raysvc.client.rl.rollout_serving",
    "tokenize": "raysvc.api",
    "train": "raysvc.training.train",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'raysvc' has no attribute {name!r}; public names are {', '.join(__all__)}")


def __dir__() -> list[str]:
    """Lists the public names alone, and what every module has."""
    return sorted([*(name for name in globals() if name.startswith("__")), *__all__])
