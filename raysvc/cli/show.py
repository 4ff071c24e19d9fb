"""`raysvc show`: rows as a person wants to see them: one of the entry, or those of a step as its trainer got them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysvc.cli.common import Address, AsJson, Job, Overrides, edge, emit
from raysvc.cli.named_entry import named_entry
from raysvc.cli.named_run import NamedJob, job_as_it_is, job_that_ran, served_run
from raysvc.cli.replay import Tokenizer
from raysvc.cli.row_text import print_picture, token_counts
from raysvc.cli.show_rollouts import show_rollouts
from raysvc.cli.show_source_row import show_source_row
from raysvc.cli.view import View, print_rows, printable
from raysvc.progress import how_many

if TYPE_CHECKING:
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.inspect.row_media import ShownMedium
    from raysvc.inspect.row_view import RowPicture
    from raysvc.job.config import JobConfig

RowNumber = Annotated[str, typer.Option(help="Row of the entry, counted from 0, or an id such as 2:17:451.")]
SourceRowNumber = Annotated[
    str | None,
    typer.Option(
        help="Row of the source, by its number in messages and logs (in a mixture NAME:NUMBER): also one that is left out, and why.",
        metavar="NUMBER",
    ),
]
StepNumber = Annotated[
    int | None, typer.Option(help="Show this step instead of a row. Needs no server.", min=0)
]
Rank = Annotated[int | None, typer.Option(help="Only this rank's shards.", min=0)]
Rows = Annotated[bool, typer.Option("--rows", help="List source and position of each row, without its text.")]
Html = Annotated[Path | None, typer.Option("--out", help="Write an HTML page here instead.")]


@dataclass(frozen=True)
class _Shown:
    """Holds what is shown: a title, facts about the whole, and each row with its headline."""

    title: str
    facts: Sequence[str]
    rows: Sequence[tuple[str, RowPicture]]
    media: Mapping[int, tuple[ShownMedium, ...]] = field(default_factory=dict)  # of the rows that have some


@edge
def show(
    config: Job = "job.yaml",
    overrides: Overrides = None,
    row: RowNumber = "0",
    source_row: SourceRowNumber = None,
    step: StepNumber = None,
    rank: Rank = None,
    rows: Rows = False,
    html: Html = None,
    tokenizer: Tokenizer = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Print rows or steps, with trained tokens marked.

    Trained tokens are green and stand between » and «; special tokens are blue. Below a row stand its media; an HTML page shows them.

    Example: raysvc show job.yaml --row 17

    Example: raysvc show job.yaml --source-row 61

    Example: raysvc show job.yaml --step 812 --rank 1

    Example: raysvc show job.yaml --step 812 --rows

    Of a run of rollouts, the groups of a step and what became of their turns.

    Example: raysvc show runs/grpo-1 --step 812 --tokenizer Qwen/Qwen3-8B
    """
    from raysvc.errors import ConfigError

    if (run := served_run(config, overrides)) is not None:
        if row != "0" or source_row or rows or rank is not None or html is not None:
            raise ConfigError(
                "--row, --source-row, --rows, --rank, --out", "are for runs of a job", "leave them out"
            )
        show_rollouts(run, step, tokenizer, as_json)
        return
    if tokenizer is not None:
        raise ConfigError("--tokenizer", "is for runs of rollouts, and a job names its own", "leave it out")
    named = (job_as_it_is if step is None else job_that_ran)(config, overrides)
    if source_row is not None:
        if row != "0" or step is not None or rows or rank is not None or html is not None:
            raise ConfigError("--source-row", "is shown alone, as text", "leave out the other options")
        show_source_row(named.job, source_row, as_json)
        return
    if step is None and (rows or rank is not None):
        raise ConfigError("--rows, --rank", "apply to a step", "add --step")
    if step is not None:
        found, result = _step(named.job, step, rank, rows)
    else:
        found, result = _row(named, _id_of(row), address)
    if as_json:
        emit(result)
    elif html is not None:
        from raysvc.report.rows_page import render_rows

        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(render_rows(found.title, found.facts, found.rows, found.media))
        print(f"page: {html}")
    elif rows:
        print(*found.facts, sep="\n", file=sys.stderr)
        print_rows(found.title, [_cells(line) for line in result["rows"]])
    else:
        _print(found)


def _id_of(row: str) -> int:
    from raysvc.errors import ConfigError
    from raysvc.row_ids import parse

    try:
        return parse(row)
    except ValueError as error:
        raise ConfigError("row", str(error), "give a number from 0 on, or source:slice:row") from None


def _row(named: NamedJob, row: int, address: str | None) -> tuple[_Shown, dict[str, Any]]:
    from raysvc.errors import PlanError
    from raysvc.inspect.row_media import media_of_rows
    from raysvc.inspect.row_view import columns_of_row, row_picture
    from raysvc.row_ids import written

    with View() as view:
        entry = named_entry(named, address, view)
    try:
        values = entry.row(row)
    except PlanError as error:
        raise PlanError(
            error.where, f"{error.what}; the entry has {entry.num_rows:,}", error.remedy
        ) from None
    picture = row_picture(row, values["input_ids"], values["loss_mask"], entry.tokenizer)
    carried = columns_of_row(values)
    number, (turn,) = values["source_row"], entry.turns([row])
    head = f"row {written(row)} of {entry.num_rows}, {_origin(number, turn)}, {token_counts(picture)}{_carried(carried)}"
    spans = [list(span) for span in entry.row(row).spans]
    removed = _removed(named.job, entry, number)
    notes = [f"note: {_removed_note(removed, entry)}"] if removed else []
    facts = [f"source: {entry.source}", *notes, *_notes(entry)]
    media = media_of_rows(entry, [row])
    result = {"row": written(row), "source_row": number, "turn": turn, "reasoning_removed": removed,
              "spans": spans, "columns": carried, "media": _json(media, row)}  # fmt: skip
    return _Shown(f"Row {written(row)}", facts, [(head, picture)], media), result


def _step(job: JobConfig, step: int, rank: int | None, only_rows: bool) -> tuple[_Shown, dict[str, Any]]:
    from raysvc.builds.cache_entry import open_served
    from raysvc.builds.mixed_job import paths_of
    from raysvc.inspect.lineage import lineage
    from raysvc.inspect.replay_run import replay_job
    from raysvc.inspect.row_media import media_of_rows
    from raysvc.inspect.row_view import padding_cells, shard_pictures

    again = replay_job(job, step)
    spec = again.spec.model_copy(update={"storage_options": job.cache.storage_options})
    entry = replace(open_served(spec), paths=paths_of(job))
    shards = again.chosen(rank)
    tokenizer = None if only_rows else _tokenizer(entry)
    pictures = [picture for shard in shards for picture in shard_pictures(shard, tokenizer)]
    lines = lineage(pictures, step, again.schedule, entry)
    padding, cells = (sum(both) for both in zip(*(padding_cells(shard) for shard in shards), strict=True))
    plan = again.spec.plan
    facts = [
        f"source: {entry.source}",
        f"epoch {again.info.epoch}, {len(again.shards)} {'mini-batch' if len(again.shards) == 1 else 'mini-batches'} on {how_many(again.dp_size, 'rank')}, layout {plan.layout}; "
        f"made as {'the run was served' if again.recorded else 'the job file says'}",
        f"{how_many(len(pictures), 'row')}, {sum(p.is_dummy for p in pictures)} of them dummies; "
        f"padding: {padding} of {cells} cells",
        *_notes(entry),
    ]
    real = sorted({picture.row_id for picture in pictures if not picture.is_dummy})
    turns = dict(zip(real, entry.turns(real), strict=True))
    origins = [
        _origin(line.source_row, turns.get(picture.row_id))
        for picture, line in zip(pictures, lines, strict=True)
    ]
    heads = [_head(picture, origin) for picture, origin in zip(pictures, origins, strict=True)]
    media = media_of_rows(entry, real)
    shown = _Shown(
        f"Step {step}" + ("" if rank is None else f", rank {rank}"),
        facts,
        list(zip(heads, pictures, strict=True)),
        media,
    )
    rows = [
        {
            **asdict(line),
            **({"columns": picture.columns} if picture.columns else {}),
            **({"media": _json(media, picture.row_id)} if picture.row_id in media else {}),
        }
        for line, picture in zip(lines, pictures, strict=True)
    ]
    return shown, {"step": step, "epoch": again.info.epoch, "dp_size": again.dp_size, "rows": rows}


def _json(media: Mapping[int, tuple[ShownMedium, ...]], row_id: int) -> list[dict[str, Any]]:
    return [one.to_json() for one in media.get(row_id, ())]


def _removed(job: JobConfig, entry: CacheEntry, source_row: int) -> int | None:
    """Trained messages of a source row that are written without their reasoning; None where that cannot be found out."""
    from raysvc.errors import RaysvcError
    from raysvc.inspect.row_again import tokenized_again

    if not entry.report["row_counts"].get("reasoning_removed", 0):
        return 0
    if job.mixture is not None:
        return None
    try:
        return tokenized_again(job, source_row).result.row_counts.reasoning_removed
    except RaysvcError:
        return None  # the source is gone, or is another by now


def _removed_note(count: int, entry: CacheEntry) -> str:
    from raysvc.chat.row_counts import reasoning_remedy

    remedy = reasoning_remedy(entry.report["row_counts"])
    messages = "one trained message" if count == 1 else f"{count} trained messages"
    return f"the chat template removed the reasoning of {messages} of this row; {remedy}"


def _notes(entry: CacheEntry) -> list[str]:
    """Returns what holds for the entry as a whole."""
    from raysvc.chat.row_counts import warnings_of

    counts = entry.report.get("row_counts")  # of an entry that grows, where it is not counted to its end
    return [f"note: in this entry {warning}" for warning in warnings_of(counts or {})]


def _tokenizer(entry: CacheEntry) -> Any:
    from raysvc.errors import TokenizerError

    try:
        return entry.tokenizer
    except TokenizerError as error:
        print(f"showing ids: {error}", flush=True)
        return None


def _origin(source_row: int | None, turn: tuple[int, int] | None) -> str:
    return (
        f"source row {source_row}"
        if turn is None
        else f"turn {turn[0]} of {turn[1]} of source row {source_row}"
    )


def _head(picture: RowPicture, origin: str) -> str:
    from raysvc.row_ids import written

    place = picture.place
    assert place is not None
    where = f"mini {place.mini} rank {place.rank} micro {place.micro} line {place.line}"
    where += f" columns {place.column}–{place.column + picture.length - 1}"
    if picture.is_dummy:
        return f"{where} | dummy: {how_many(picture.length, 'token')} without loss, so that all ranks do the same work"
    row = f"row {written(picture.row_id)} ({origin})"
    positions = f"positions {picture.first}–{picture.last}"
    return f"{where} | {row}, {token_counts(picture)}, {positions}{_carried(picture.columns)}"


def _carried(columns: Mapping[str, Any]) -> str:
    there = {name: value for name, value in columns.items() if value is not None and value != ""}
    return "".join(f" | {name}: {str(value)[:60]}" for name, value in there.items())


def _cells(line: dict[str, Any]) -> dict[str, Any]:
    """Returns what fits a line of a terminal; the source is said once, above."""
    dummy = line["row_id"] is None
    return {name: ("dummy" if name == "row_id" else "") if dummy and value is None else value
            for name, value in line.items() if name not in ("source", "columns", "media")}  # fmt: skip


def _print(shown: _Shown) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    if len(shown.rows) != 1:
        console.rule(shown.title, align="left", characters="─")
        print(*map(printable, shown.facts), sep="\n")
    else:
        for note in (fact for fact in shown.facts if fact.startswith("note: ")):
            print(printable(note))
    for head, picture in shown.rows:
        print_picture(console, head, picture)
        for number, one in enumerate(shown.media.get(picture.row_id, ()), start=1):
            console.print(Text(f"[{number}] {one}"), soft_wrap=True)
