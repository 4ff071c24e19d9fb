"""`raysvc show --source-row`: a row as its file numbers it, whether it is written or left out, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysvc.cli.common import emit
from raysvc.cli.row_text import print_picture, token_counts
from raysvc.cli.view import printable

if TYPE_CHECKING:
    from raysvc.inspect.row_again import RowAgain
    from raysvc.job.config import JobConfig


def show_source_row(job: JobConfig, wanted: str, as_json: bool) -> None:
    """Prints what a build makes of one source row; needs no entry, and starts no Ray.

    Args:
        wanted: number of the row, or `name:number` of a source of the mixture.

    Raises:
        ConfigError: there is no such source, or the number is none.
        SourceError: there is no such row.
    """
    from raysvc.inspect.row_again import tokenized_again

    one, number = _place(job, wanted)
    again = tokenized_again(one, number)
    counts = again.result.row_counts
    left_out = next(iter({**counts.dropped, **counts.quarantined}), "")
    if as_json:
        emit({"source_row": number, "written": not left_out, "reason": left_out,
              "detail": "".join(one.detail for one in again.result.examples), "texts": [one.text for one in again.texts]})  # fmt: skip
    elif left_out:
        _print_left_out(wanted, again, left_out)
    else:
        _print_written(wanted, again)


def _place(job: JobConfig, wanted: str) -> tuple[JobConfig, int]:
    from raysvc.builds.mixed_job import jobs_of
    from raysvc.errors import ConfigError

    jobs = jobs_of(job)
    name, _, number = wanted.rpartition(":")
    if name not in jobs or not number.isascii() or not number.isdecimal():
        known = " or ".join(f"{each}:61" if each else "61" for each in jobs)
        raise ConfigError(
            "--source-row", f"{wanted!r} names no row", f"give the number of a row, such as {known}"
        )
    return jobs[name], int(number)


def _print_left_out(wanted: str, again: RowAgain, reason: str) -> None:
    from raysvc.inspect.source_texts import source_text

    became = "is dropped" if reason in again.result.row_counts.dropped else "is quarantined"
    detail = "".join(f": {one.detail}" for one in again.result.examples if one.detail)
    place = f" ({again.place})" if again.place else ""
    print(printable(f"── source row {wanted}{place} {became}: {reason}{detail}"))
    if again.texts:
        print(
            "What the template writes of it; what is trained, as far as it is known, stands between » and «:"
        )
        for one in again.texts:
            print(printable(_marked(one.text, [(start, end) for start, end, _ in one.spans])))
    else:
        print(printable(source_text(again.row)))


def _print_written(wanted: str, again: RowAgain) -> None:
    from rich.console import Console

    for place, picture in enumerate(again.pictures, start=1):
        which = f", sequence {place} of {len(again.pictures)}" if len(again.pictures) > 1 else ""
        print_picture(Console(), f"source row {wanted}{which}, {token_counts(picture)}", picture)


def _marked(text: str, spans: list[tuple[int, int]]) -> str:
    marked, at = [], 0
    for start, end in spans:
        marked += [text[at:start], "»", text[start:end], "«"]
        at = end
    return "".join([*marked, text[at:]])
