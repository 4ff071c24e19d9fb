"""Ray-native distributed data service for LLM post-training.

Always true:
- importing starts nothing, and pulls in neither ray nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from raysvc import errors

if TYPE_CHECKING:
    from raysvc.actors.serving import Role
    from raysvc.api import ServerHandle, serve, tokenize
    from raysvc.client import BatchClient, attach
    from raysvc.groups import Group
    from raysvc.opened import CacheEntry, open_cache
    from raysvc.producers import rollouts, serve_rollouts
    from raysvc.rank_client import RankClient
    from raysvc.trainer import train

__version__ = "0.1.0"
__all__ = [
    "BatchClient",
    "CacheEntry",
    "Group",
    "RankClient",
    "Role",
    "ServerHandle",
    "attach",
    "errors",
    "open_cache",
    "rollouts",
    "serve",
    "serve_rollouts",
    "tokenize",
    "train",
]
_HOMES = {
    "BatchClient": "raysvc.client",
    "CacheEntry": "raysvc.opened",
    "Group": "raysvc.groups",
    "RankClient": "raysvc.rank_client",
    "Role": "raysvc.actors.serving",
    "ServerHandle": "raysvc.api",
    "attach": "raysvc.client",
    "open_cache": "raysvc.opened",
    "rollouts": "raysvc.producers",
    "serve": "raysvc.api",
    "serve_rollouts": "raysvc.producers",
    "tokenize": "raysvc.api",
    "train": "raysvc.trainer",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'raysvc' has no attribute {name!r}; public names are {', '.join(__all__)}")
