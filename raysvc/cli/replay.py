"""`raysvc replay`: the bytes of a step once more, with their checksums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysvc.cli.common import AsJson, Overrides, edge, emit
from raysvc.cli.named_run import job_that_ran, served_run
from raysvc.cli.view import print_rows
from raysvc.progress import how_many

if TYPE_CHECKING:
    from raysvc.actors.rollouts.turn_merger import BrokenTurn

StepNumber = Annotated[int, typer.Option(help="The step, counted from 0.", min=0)]
Rank = Annotated[int | None, typer.Option(help="Only this rank's shards.", min=0)]
Out = Annotated[Path | None, typer.Option(help="Write the arrays to this .safetensors or .npz file.")]
OptionalJob = Annotated[str | None, typer.Option("-c", "--config", help="The job file.", metavar="JOB.YAML")]
Tokenizer = Annotated[
    str | None, typer.Option(help="Of rollouts: a folder or hub name; shows broken turns as text.")
]
DpSize = Annotated[int | None, typer.Option(help="Number of ranks. Default: that of the run.", min=1)]


@edge
def replay(
    step: StepNumber,
    config: OptionalJob = None,
    overrides: Overrides = None,
    rank: Rank = None,
    out: Out = None,
    dp_size: DpSize = None,
    tokenizer: Tokenizer = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild a step byte for byte, and print its checksums.

    The checksums are those of `Shard.digest()` in the trainer. Where rows have media, their digests follow. Of rollouts, every turn
    follows that does not begin with the tokens of the turn before, as if its history had been tokenized again.

    Example: raysvc replay job.yaml --step 812 --rank 0 --out step812.safetensors

    Example: raysvc replay runs/grpo-1 --step 812 --dp-size 4
    """
    from raysvc.inspect.replay_run import replay_job, replay_run, save
    from raysvc.inspect.row_media import media_of_shards

    if (run := served_run(config, overrides)) is not None:
        again = replay_run(run, step, dp_size)
    else:
        again = replay_job(job_that_ran(config or "job.yaml", overrides).job, step, dp_size)
    shards = again.chosen(rank)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        save(shards, out)
    media = media_of_shards(again.spec, shards)
    rows: list[dict[str, Any]] = [
        {"mini": shard.mini, "rank": shard.rank, "rows": len(shard.row_ids),
         "dummies": int((shard.row_ids < 0).sum()), "bytes": shard.nbytes, "sha256": shard.digest(), **({"media": some} if (some := media[place]) else {})}
        for place, shard in enumerate(shards)
    ]  # fmt: skip
    if as_json:
        emit({"step": step, "dp_size": again.dp_size, "recorded": again.recorded, "shards": rows,
              "checksum": again.checksum(rank), "out": str(out) if out else None,
              "broken_turns": broken_json(again.broken)})  # fmt: skip
        return
    for row in rows:
        row["sha256"] = row["sha256"][:16]
        row.pop("media", None)
    print_rows(f"Step {step} of {again.spec.name} on {how_many(again.dp_size, 'rank')}", rows)
    for shard, some in zip(shards, media, strict=True):
        print(
            *(f"mini {shard.mini} rank {shard.rank}: medium {digest}" for digest in some),
            sep="\n",
            end="\n" if some else "",
        )
    print_broken(again.broken, tokenizer)
    print(f"checksum: {again.checksum(rank)}" + (f"\nwritten: {out}" if out else ""))


def broken_json(broken: Sequence[BrokenTurn]) -> list[dict[str, Any]]:
    """Broken turns of rollouts as JSON."""
    return [{"group": f"{uid}#{attempt}", **prefix._asdict()} for (uid, attempt), prefix in broken]


def print_broken(broken: Sequence[BrokenTurn], tokenizer: str | None) -> None:
    """Say of each broken turn where it parts from the turn before, and what stands there."""
    decode = decoder(tokenizer) if broken else repr
    for (uid, attempt), prefix in broken:
        print(
            f"group {uid}#{attempt}: row {prefix.later} continues row {prefix.earlier} up to token {prefix.at}, "
            f"where {decode(prefix.sampled[:1])} became {decode(prefix.found[:1])}: "
            f"sampled {decode(prefix.sampled)}, then found {decode(prefix.found)}"
        )


def decoder(tokenizer: str | None) -> Callable[[Sequence[int]], str]:
    """Shows ids as quoted text, or as they are without a tokenizer."""
    if tokenizer is None:
        return lambda ids: f"ids {list(ids)}"
    from raysvc.chat.tokens.tokenizer import LoadedTokenizer
    from raysvc.job.config import TokenizerConfig

    hf = LoadedTokenizer(TokenizerConfig(name=tokenizer)).hf
    return lambda ids: repr(hf.decode(list(ids)))
