"""Dynamic context parallelism by a cost model: each micro-batch its own CP size, beside one size for all.

    python benchmarks/dynamic_cp.py [--ranks 8 32 128 512 1024] [--max 32768 131072 524288] [--limit 16384]

No GPU and no Ray; about two minutes of one core. Steps are priced by the model below, which leaves out what it does not name.

- **Work.** Llama 3 8B (32 layers, hidden 4096, 8 of 32 heads for keys) costs what raysvc's own `CostModel` says: 57,300 * L + L^2 for
  a document, attention in tiles of 128, backwards twice the forward, at 420 TFLOP/s (swiss-ai/Megatron-LM#29: 413 to 430 on such models).
- **Communication.** A rank gets the keys and values of all others of its group, and backwards also gradients: 3 times 4 kB a token
  and layer. NVLink gives 360 GB/s, a network card 40 (80 % of what an H100 and a 400 Gbit/s card are sold with), a hop takes 10 us.
  `two levels` (the default): a node of 8 gets each token once, over all of its cards. `ring`: over more than a node the slowest hop,
  one card, sets the pace. What attention takes hides it (the default), nothing does, or all is hidden. It is the same for fixed CP.
- **Memory.** A rank holds `--limit` tokens of a micro-batch, so the longest document that a job allows forces a CP size.
- **Waiting.** Ranks share collectives in every layer (FSDP), so a micro-batch takes what its slowest group takes, and at least the
  0.28 s of two gathers of the weights and one scatter of gradients. `at the end` lets ranks of fixed CP drift for a whole step
  while dynamic ones still wait at every micro-batch: the worst case for dynamic CP.

For fixed CP each step takes the faster of two packings: raysvc's planner, and the planner of dynamic CP (`dynamic_cp_plan.py`) held
to that size. `over fits` compares with the smallest size that holds the longest document, `over best` with the best of all sizes,
both chosen for the whole job. A step has documents for 1.8 micro-batches. Lengths are log-normal by median and sigma, drawn with a
seed, those over the maximum left out. `code`, `web` and `long` stand for GitHub, Common Crawl and a mix with upsampled long documents,
whose shape papers draw without numbers; `light` has no heavy tail. `megatron` has lengths and model of Megatron-LM's
`examples/dynamic_context_parallel`; `rows` are 600 SGD dialogues and 100 tau-bench rollouts.

Geometric means over heavy tails, 8 to 1,024 ranks (2026-11-28; published, measured: Megatron up to 1.48, FlexSP up to 1.98):

| longest | CP that fits | over fits | over best | fixed CP that fits waits |
| --- | --- | --- | --- | --- |
| 32,768 | 2 | 1.17 (1.04 to 1.27) | 1.01 (1.01 to 1.01) | 4 to 22 % |
| 131,072 | 8 | 1.29 (0.99 to 1.95) | 1.06 (0.99 to 1.29) | 0 to 48 % |
| 524,288 | 32 | 1.26 (0.98 to 1.45) | 1.20 (0.98 to 1.45) | 0 to 31 % |

Dynamic CP waits under 1 %, up to 7 % where a step is too small for its longest document. 128 ranks, over best at 131,072 / 524,288:
1.07 / 1.18; steps of half that size 1.05 / 1.27, four times 1.03 / 1.19; a quarter of the attention 1.02 / 1.06; nothing hidden 1.12 /
1.33, all hidden 1.07 / 1.15; ring 1.28 / 1.88; no tiles 1.06 / 1.16; 4,096 tokens a rank 1.31 / 2.76, 65,536 1.02 / 1.10; without a
heavy tail 1.02 / 1.52. `rows`: 1.00 and 1.02. `megatron`: 1.12 and 1.09 with 8 and 64 ranks, where 1.41 and 1.50 were measured, so
the model is kind to fixed CP where micro-batches are small.

So most of what is published comes from the choice of one size and from balance: 1.08 of 1.24 in all is left over the best fixed size,
under the 1.15 at which dynamic CP would have been delivered. It pays where the longest document needs more ranks than a node has,
mostly because the others then need no network, whether or not their tail is heavy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import show
from dynamic_cp_plan import Group, need_of, plan_groups, time_of

from raysvc.plan.cost import CostModel
from raysvc.plan.rank_plan import Rules, deal

LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256}  # fmt: skip
# of Megatron-LM's example; its feed-forward has two matrices of 8,192 where CostModel counts three
SMALL = {"hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 16,
         "head_dim": 128, "intermediate_size": 5461, "vocab_size": 131072}  # fmt: skip
MODELS = {"llama": LLAMA, "small": SMALL}
FLOPS, NVLINK, CARD, HOP_S, NODE = 420e12, 360e9, 40e9, 10e-6, 8
GATHER_S = 3 * 2 * 8.03e9 * (1 / NVLINK + 1 / (NODE * CARD))
LIMIT, FILL, SHARED = 16384, 1.8, Path(__file__).resolve().parents[2] / "shared"
Lengths = np.ndarray[Any, np.dtype[np.int64]]
Draw = Callable[[np.random.Generator, int, int], Lengths]  # how many, the longest


@dataclass(frozen=True)
class Model:
    """What documents cost a group of ranks.

    Attributes:
        shape: of `MODELS`.
        attention: the share of layers with attention over the whole document.
        hidden: what hides communication: "attention", "nothing" or "all".
        ring: every token passes every rank; else two levels.
        tile: rows and columns that a kernel of attention takes at once.
        gather_s: seconds of the weights of a micro-batch; 0: every rank holds them.
    """

    shape: str = "llama"
    attention: float = 1.0
    hidden: str = "attention"
    ring: bool = False
    tile: int = 128
    gather_s: float = GATHER_S

    @cached_property
    def cost(self) -> CostModel:
        """In units of attention's products, as the planner of raysvc balances."""
        return CostModel(round(CostModel.of_model(MODELS[self.shape]).linear / self.attention), 1)

    @cached_property
    def _prices(self) -> tuple[float, float, float, float]:
        """Seconds of a cell, of a pair; bytes of a cell, and seconds of a hop, both of all layers and passes."""
        shape = MODELS[self.shape]
        passes = 3 * shape["num_hidden_layers"] * self.attention
        pair_s = 4 * passes * shape["num_attention_heads"] * shape["head_dim"] / FLOPS
        sent = 4 * passes * shape["num_key_value_heads"] * shape["head_dim"]
        return self.cost.linear * pair_s / 2, pair_s, sent, passes * HOP_S

    def pairs(self, length: int, size: int) -> int:
        """L^2 / 2, and more: in each of C steps two parts of a document on a rank meet one of another's, in whole tiles."""
        if size == 1:
            rows = self._tiles(length)
            return rows * (rows + self.tile) // 2
        part = -(-length // (2 * size))
        return size * size * self._tiles(part) * self._tiles(2 * part)

    def _tiles(self, length: int) -> int:
        return -(-length // self.tile) * self.tile

    def seconds(self, cells: float, pairs: float, size: int) -> float:
        """Seconds of cells and pairs on some ranks."""
        cell_s, pair_s, cell_bytes, hop_s = self._prices
        attended = pairs * pair_s / size
        work = cells * cell_s / size + attended
        if size == 1 or self.hidden == "all":
            return work
        nodes = -(-size // NODE)
        two_levels = (size - 1) / NVLINK + (nodes - 1) / CARD
        byte_s = (size - 1) / CARD if self.ring and nodes > 1 else two_levels
        moved = cells / size * cell_bytes * byte_s + hop_s * (size - 1)
        return work + max(0.0, moved - (attended if self.hidden == "attention" else 0.0))


@dataclass
class Times:
    """Seconds of steps, and of ranks that work in them, by rank.

    Attributes:
        lockstep: ranks wait for one another at every micro-batch.
        at_the_end: ranks wait at the end of a step.
        busy: mean over the ranks.
    """

    lockstep: float = 0.0
    at_the_end: float = 0.0
    busy: float = 0.0

    def add(self, plan: Sequence[Sequence[Group]], ranks: int, model: Model) -> Times:
        """One more step."""
        alone = np.zeros(ranks)
        for groups in plan:
            took = [time_of(group, model) for group in groups]
            own = np.repeat(took, [group.size for group in groups])
            alone[: len(own)] += own
            self.lockstep += max(model.gather_s, max(took))
        self.at_the_end += float(alone.max())
        self.busy += float(alone.mean())
        return self

    def waits(self) -> float:
        """The share of the time in which a rank does nothing."""
        return 1 - self.busy / self.lockstep


def by_raysvc(lengths: Lengths, ranks: int, size: int, limit: int, model: Model) -> list[list[Group]]:
    """The plan of raysvc for one CP size, as groups."""
    rules = Rules("packed", None, size * limit, align=2 * size if size > 1 else 1, cost=model.cost)
    plans = deal(lengths.astype(np.int32), ranks // size, rules)
    found = []
    for number in range(len(plans[0].micro_batches)):
        groups = [Group(size) for _ in plans]
        for group, plan in zip(groups, plans, strict=True):
            start, stop = plan.micro_batches[number]
            for row in plan.rows[plan.lines[start] : plan.lines[stop]].tolist():
                if row >= 0:
                    length = int(lengths[row])
                    group.add(row, need_of(length, size, model))
        found.append(groups)
    return found


def drawn(median: float, sigma: float, shortest: int = 64) -> Draw:
    """Log-normal lengths."""

    def draw(rng: np.random.Generator, count: int, longest: int) -> Lengths:
        lengths = rng.lognormal(np.log(median), sigma, 2 * count)
        return lengths[(lengths >= shortest) & (lengths <= longest)][:count].astype(np.int64)

    return draw


def long_mix(rng: np.random.Generator, count: int, longest: int) -> Lengths:
    """Web documents, and one in fifty of between a sixteenth and all of the maximum, evenly by its logarithm."""
    lengths = drawn(600, 1.35)(rng, count, longest)
    chosen = rng.random(len(lengths)) < 0.02
    lengths[chosen] = (longest * 2 ** -(4 * rng.random(int(chosen.sum())))).astype(np.int64)
    return lengths


def real_rows() -> Draw:
    """Lengths of 600 SGD dialogues and 100 tau-bench rollouts, by Qwen2.5's tokenizer, drawn again and again."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(SHARED / "tokenizers" / "qwen2_5" / "tokenizer.json"))
    texts = []
    for name in ("sgd_train", "tau_airline_rollouts"):
        with (SHARED / "data" / f"{name}.jsonl").open() as lines:
            texts += [
                json.dumps(json.loads(line)["messages"]) for line, _ in zip(lines, range(600), strict=False)
            ]
    found = np.array([len(one.ids) for one in tokenizer.encode_batch_fast(texts)], np.int64)
    return lambda rng, count, longest: rng.choice(found[found <= longest], count)


SHAPES: dict[str, Draw] = {
    "code": drawn(700, 1.8),
    "web": drawn(600, 1.35),
    "long": long_mix,
    "light": drawn(2000, 0.6),
}
HEAVY = ("code", "web", "long")
# name, model, tokens of a rank in a micro-batch, micro-batches of a step that its documents fill
CASES: tuple[tuple[str, Model, int, float], ...] = (
    ("as above", Model(), LIMIT, FILL),
    ("small steps", Model(), LIMIT, 0.9),
    ("large steps", Model(), LIMIT, 7.2),
    ("a quarter of attention", Model(attention=0.25), LIMIT, FILL),
    ("nothing hidden", Model(hidden="nothing"), LIMIT, FILL),
    ("all hidden", Model(hidden="all"), LIMIT, FILL),
    ("ring over nodes", Model(ring=True), LIMIT, FILL),
    ("no tiles", Model(tile=1), LIMIT, FILL),
    ("4,096 tokens a rank", Model(), 4096, FILL),
    ("65,536 tokens a rank", Model(), 65536, FILL),
)


def steps_of(draw: Draw, ranks: int, longest: int, limit: int, fill: float, steps: int) -> list[Lengths]:
    """The documents of each step."""
    rng = np.random.default_rng(0)
    wanted, found = fill * ranks * limit, []
    for _ in range(steps):
        lengths = draw(rng, int(wanted / 100), longest)
        count = max(1, int(np.searchsorted(np.cumsum(lengths), wanted)))
        found.append(lengths[:count])
    return found


def compare(
    batches: list[Lengths], ranks: int, longest: int, limit: int, model: Model
) -> dict[str, Any] | None:
    """Speed-ups of dynamic over fixed CP for some steps; None: the longest document does not fit all ranks."""
    sizes = [2**power for power in range(ranks.bit_length()) if 2**power <= ranks]
    fitting = [size for size in sizes if size * limit >= longest]
    if not fitting:
        return None
    fixed: dict[int, Times] = {}
    for size in fitting:
        fixed[size] = Times()
        for lengths in batches:
            ours = by_raysvc(lengths, ranks, size, limit, model)
            own = plan_groups(lengths.tolist(), ranks, limit, model, [size])
            both = [Times().add(plan, ranks, model) for plan in (ours, own)]
            fixed[size].lockstep += min(times.lockstep for times in both)
            fixed[size].at_the_end += min(times.at_the_end for times in both)
            fixed[size].busy += min(both, key=lambda times: times.lockstep).busy
        if fixed[size].lockstep > 1.3 * min(times.lockstep for times in fixed.values()):
            break  # wider ones are worse
    dynamic, used = Times(), set()
    for lengths in batches:
        plan = plan_groups(lengths.tolist(), ranks, limit, model, sizes)
        check(plan, lengths, ranks, limit)
        used |= {group.size for groups in plan for group in groups}
        dynamic.add(plan, ranks, model)
    fits, best = fitting[0], min(fixed, key=lambda size: fixed[size].lockstep)
    return {
        "cp fits/best": f"{fits}/{best}",
        "dynamic cp": f"{min(used)}-{max(used)}",
        "over fits": fixed[fits].lockstep / dynamic.lockstep,
        "over best": fixed[best].lockstep / dynamic.lockstep,
        "at the end": min(times.at_the_end for times in fixed.values()) / dynamic.lockstep,
        "fits waits": fixed[fits].waits(),
        "dynamic waits": dynamic.waits(),
    }


def check(plan: Sequence[Sequence[Group]], lengths: Lengths, ranks: int, limit: int) -> None:
    """Assert what the planner promises."""
    documents = sorted(number for groups in plan for group in groups for number in group.documents)
    assert documents == list(range(len(lengths)))
    for groups in plan:
        assert sum(group.size for group in groups) == ranks, "a micro-batch for every rank"
        starts = np.cumsum([0] + [group.size for group in groups])
        for start, group in zip(starts, groups, strict=False):
            assert group.size & (group.size - 1) == 0
            assert start % group.size == 0
            assert group.cells <= group.size * limit
            assert group.cells >= sum(int(lengths[number]) for number in group.documents)


def rows_of(cases: Sequence[tuple[str, Draw, int, int, Model, int, float]]) -> list[dict[str, Any]]:
    """A line for each case in which the longest document fits: name, lengths, maximum, ranks, model, limit, micro-batches."""
    table = []
    for name, draw, longest, ranks, model, limit, fill in cases:
        steps = min(8, max(1, round(1024 / ranks / fill)))
        found = compare(steps_of(draw, ranks, longest, limit, fill, steps), ranks, longest, limit, model)
        if found is not None:
            table.append({"lengths": name, "max": longest, "ranks": ranks, **found})
    return table


def means_of(table: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means of the speed-ups over heavy-tailed lengths."""
    rows = [row for row in table if row["lengths"] in HEAVY]
    columns = ("over fits", "over best", "at the end")
    return {column: float(np.exp(np.mean([np.log(row[column]) for row in rows]))) for column in columns}


def main() -> None:
    """Simulate, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128, 512, 1024])
    parser.add_argument(
        "--max", type=int, nargs="+", default=[32768, 131072, 524288], help="longest document"
    )
    parser.add_argument("--limit", type=int, default=LIMIT, help="tokens of a micro-batch on a rank")
    options = parser.parse_args()
    grid = rows_of(
        [
            (name, draw, longest, ranks, Model(), options.limit, FILL)
            for name, draw in SHAPES.items()
            for longest in options.max
            for ranks in options.ranks
        ]
    )
    show("Lengths, maximum and ranks", grid)
    means = [
        {"max": longest, **means_of([row for row in grid if row["max"] == longest])}
        for longest in options.max
        if any(row["max"] == longest for row in grid)
    ]
    show("Means over heavy tails", [*means, {"max": "all", **means_of(grid)}])
    small = Model("small", gather_s=0)
    known = [("megatron", drawn(332, 1.5, 128), 8192, ranks, small, 2048, FILL) for ranks in (8, 64)]
    if SHARED.exists():
        known += [("rows", real_rows(), 16384, ranks, Model(gather_s=0), 4096, FILL) for ranks in (8, 64)]
    others = []
    for case, model, limit, fill in CASES:
        for longest in (131072, 524288):
            own = rows_of([(name, SHAPES[name], longest, 128, model, limit, fill) for name in HEAVY])
            others.append({"case": case, "max": longest, **means_of(own)})
    show("Known lengths", rows_of(known))
    show("128 ranks, heavy tails", others)


if __name__ == "__main__":
    main()
