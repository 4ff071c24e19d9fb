"""placeholder"""
from typing import Any


class Rollouts:
    def __init__(self, name: str, server: Any) -> None: ...
    def put_groups(self, groups: Any) -> Any: ...
