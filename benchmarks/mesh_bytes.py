"""What each node of a mesh gets over the network in a step, beside what its ranks need.

    python benchmarks/mesh_bytes.py [--steps 8] [--cases 0 1 2 3]

A cluster of three nodes on this machine: the server's, and two with four ranks each, every one a process. A step has 64 rows of some
2,000 tokens, packed. `node` is what Ray's own counters of the two object stores say (their objects all came from the server's node),
`ranks` what its ranks took together, `needed` every different set of arrays once; all in MB a step. `told` is what the steps say that
came to a node (`RankStep.node_bytes`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import make_entry, show

ROWS, MEAN_TOKENS, LINE = 64, 2000, 16384
COLUMNS = ("input_ids", "position_ids", "labels", "loss_mask")
STAGES = (("input_ids", "position_ids"), ("labels", "loss_mask"))
QUIET = {"health_check_failure_threshold": 20, "health_check_period_ms": 3000}
# axes, plan.cp_split, columns of a stage
CASES: tuple[tuple[dict[str, int], str | None, bool], ...] = (
    ({"dp": 2, "cp": 2, "pp": 2}, None, False),
    ({"dp": 2, "cp": 2, "pp": 2}, "zigzag", True),
    ({"dp": 2, "tp": 4}, None, False),
    ({"dp": 2, "cp": 2, "tp": 2}, "zigzag", False),
)


class Rank:
    """A process of the mesh."""

    def __init__(
        self, name: str, axes: dict[str, int], number: int, columns: Sequence[str] | None, steps: int
    ) -> None:
        import raysvc

        mesh = raysvc.Mesh(**axes)
        coords = mesh.rank(number)._asdict()
        self._client = raysvc.attach_rank(name, mesh=mesh, coords=coords, columns=columns, group="mesh")
        self._steps = self._client.steps(stop=steps)

    def train(self) -> tuple[int, int, str]:
        """One step: bytes that it took, those that the step says came to its node, and a digest of what it took."""
        step = next(self._steps)
        self._client.commit(step.index)
        digests = " ".join(shard.digest() for shard in step.shards)
        return step.nbytes, step.node_bytes, f"{step.index} {digests}"

    def detach(self) -> None:
        """Give the seat back."""
        self._client.detach()


def created_bytes(node: Any) -> int:
    """Bytes of all objects that the store of a node ever held."""
    from ray._private.internal_api import node_stats

    stats = node_stats(node.node_ip_address, node.node_manager_port, include_memory_info=False)
    return int(stats.store_stats.cumulative_created_bytes)


def serve(uri: str, number: int) -> None:
    """Start the server of a case, on the only node that there is."""
    from raysvc.actors.launch import start_server
    from raysvc.actors.server.spec import ServeSpec
    from raysvc.job.config import PlanConfig

    _, cut, _ = CASES[number]
    align = {} if cut else {"align": 4, "pad_to_multiple": 4}
    plan = PlanConfig(
        batch_size=ROWS, layout="packed", micro_batch_tokens=LINE, cp_split=cut, columns=COLUMNS, **align
    )  # type: ignore[arg-type]
    name = f"mesh-{number}"
    spec = ServeSpec(name=name, sources=[uri], plan=plan, pad_token_id=0, journal=None, num_cpus=0)
    start_server(spec, detached=True)


def measured(nodes: Sequence[Any], number: int, steps: int) -> dict[str, Any]:
    """One case."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    import raysvc
    from raysvc.actors.launch import stop_server

    axes, cut, staged = CASES[number]
    mesh, name = raysvc.Mesh(**axes), f"mesh-{number}"
    before = [created_bytes(node) for node in nodes]
    each = mesh.size // len(nodes)
    ranks = []
    for seat in range(mesh.size):
        where = NodeAffinitySchedulingStrategy(nodes[seat // each].node_id, soft=False)
        columns = STAGES[mesh.rank(seat).pp] if staged else None
        cls = ray.remote(num_cpus=0)(Rank).options(scheduling_strategy=where)
        ranks.append(cls.remote(name, axes, seat, columns, steps))
    figures: dict[str, list[int]] = {"ranks": [], "needed": [], "told": []}
    for _ in range(steps):  # together, as a gradient sync would have it
        found = ray.get([rank.train.remote() for rank in ranks])
        for own in (found[first : first + each] for first in range(0, mesh.size, each)):
            figures["ranks"].append(sum(took for took, _, _ in own))
            figures["needed"].append(sum({what: took for took, _, what in own}.values()))
            figures["told"].append(sum(told for _, told, _ in own))
    ray.get([rank.detach.remote() for rank in ranks])
    figures["node"] = [created_bytes(node) - start for node, start in zip(nodes, before, strict=True)]
    stop_server(name)
    shown = {name: round(sum(values) / len(nodes) / steps / 1e6, 3) for name, values in figures.items()}
    ratio = round(sum(figures["node"]) / sum(figures["needed"]), 3)
    return {
        "mesh": str(mesh),
        "cp_split": cut,
        "columns": "of the stage" if staged else "all",
        **shown,
        "node / needed": ratio,
    }


def main() -> None:
    """Measure, print."""
    import ray
    from ray.cluster_utils import Cluster

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), help="by number")
    options = parser.parse_args()
    store = {"object_store_memory": 150 << 20}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": QUIET, **store}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        with tempfile.TemporaryDirectory() as folder:
            uri = make_entry(Path(folder) / "cache", ROWS * options.steps, MEAN_TOKENS)
            for number in options.cases:
                serve(uri, number)
            nodes = [cluster.add_node(num_cpus=1, **store) for _ in range(2)]
            table = [measured(nodes, number, options.steps) for number in options.cases]
    finally:
        ray.shutdown()
        cluster.shutdown()
    show("Bytes of a mesh", table)


if __name__ == "__main__":
    main()
