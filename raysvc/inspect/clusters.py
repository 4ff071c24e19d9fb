"""Looks at what runs in one Ray cluster, or in all those that this user's runs have started on this machine.

A process can join one Ray, so the Ray of each run is asked by a process of its own.

Always true:
- a run that starts later is seen too, and one that has ended is not;
- where there are several, a server is named with the address of its Ray: `sft-1 @10.0.0.7:6379`;
- a Ray that does not answer in time is left out, and asked again at the next look.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, TypeAlias

from raysvc.nodes import own_rays
from raysvc.nodes.own_rays import IMPORT_S, MODE, LocalRay, line_of

ANSWER_S = 10.0  # a server is waited for for 5 of them
ASK = """
import json, sys
from raysvc.cluster import connect
from raysvc.inspect.clusters import joined
connect(sys.argv[1])
for _ in sys.stdin:
    print(json.dumps(joined()), flush=True)
"""
Facts: TypeAlias = dict[str, list[dict[str, Any]]]  # "servers" and "builds"
Look: TypeAlias = Callable[[], Facts | None]  # None: nothing is left that could be looked at


@contextmanager
def looking(address: str | None, *, code: int = 0) -> Iterator[Look]:
    """Gives what looks at a cluster, or without an address (argument or RAY_ADDRESS) at all runs of this user, if there are any.

    Args:
        code: exit code of this process if the cluster that it joins ends.

    Raises:
        AddressError: there is none that answers.
    """
    from raysvc.cluster import ending_with, is_joined, join_cluster

    with ExitStack() as stack:
        if not (address or os.environ.get("RAY_ADDRESS") or is_joined()) and own_rays.living():
            yield stack.enter_context(closing(OwnRuns())).look
            return
        join_cluster(address)
        import ray  # not before: it reads how to sign in when it is imported

        stack.enter_context(ending_with(ray.get_runtime_context().gcs_address, code=code))
        yield joined


def joined() -> Facts:
    """Returns the servers and the builds of the cluster that this process has joined, each with the address of its node."""
    import ray

    from raysvc.inspect.servers import list_servers
    from raysvc.pipelines.shared_build import builds_in_progress

    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return {
        name: [{**one, "node": address.get(one.get("node", ""))} for one in found]
        for name, found in (("servers", list_servers()), ("builds", builds_in_progress()))
    }


class OwnRuns:
    """The Rays of this user's runs, each with a process that is asked for it."""

    def __init__(self) -> None:
        self._asked: dict[LocalRay, subprocess.Popen[bytes]] = {}

    def look(self) -> Facts | None:
        """Returns what runs in all of them; None: no run is left."""
        rays = own_rays.living()
        for gone in self._asked.keys() - set(rays):
            _end(self._asked.pop(gone))
        waits = {ray: ANSWER_S if ray in self._asked else IMPORT_S + ANSWER_S for ray in rays}
        for ray in rays:
            if ray not in self._asked:
                self._asked[ray] = _asker(ray)
            _ask(self._asked[ray])
        found: Facts = {"servers": [], "builds": []}
        for ray in rays:
            said = line_of(self._asked[ray], waits[ray])
            if not said:
                _end(self._asked.pop(ray))
                continue
            for name, facts in json.loads(said).items():
                found[name] += [_named(one, ray, alone=len(rays) == 1) for one in facts]
        return found if rays else None

    def close(self) -> None:
        """Ends the processes that ask."""
        while self._asked:
            _end(self._asked.popitem()[1])


def _asker(ray: LocalRay) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", ASK, ray.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env={**os.environ, MODE: ray.mode},
    )


def _ask(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(b"\n")
    except BrokenPipeError:  # it has ended: it gives no line either
        return


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def _named(facts: dict[str, Any], ray: LocalRay, *, alone: bool) -> dict[str, Any]:
    return facts if alone or "name" not in facts else {**facts, "name": f"{facts['name']} @{ray.address}"}
