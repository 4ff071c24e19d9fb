"""Defines what is known of a build before a row is tokenized: source, format, tokenizer, and the key that they give.

Always true:
- the key follows from what decides the bytes, and from nothing else;
- a tokenizer or format that cannot be used is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysvc.builds.kept_tokenizer import remember
from raysvc.cache.key import cache_key
from raysvc.cache.store.store import Store
from raysvc.chat.carry import Carrier, resolved
from raysvc.chat.slice_tokenizer import FORMAT_VERSION
from raysvc.chat.source.detect import resolve_format, seen
from raysvc.chat.source.messages import NORMAL_FORM
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.errors import SourceError
from raysvc.job.config import Format, JobConfig, TextSpec
from raysvc.media.media_job import MEDIA_VERSION, processor_of, with_template
from raysvc.media.media_processor import MediaProcessor
from raysvc.media.pixels import MAX_PIXELS
from raysvc.pipelines.sources.scan_memo import Memo
from raysvc.pipelines.sources.slices import place_of_row

if TYPE_CHECKING:
    from raysvc.pipelines.sources.source import Source


@dataclass(frozen=True)
class BuildPlan:
    """Holds what is known before tokenizing.

    Attributes:
        spec: with the format resolved.
        recipe: what decides the bytes; `key` is its hash.
        seen: what format the rows were found to have.
        processor: of the images of rows; None where rows have none.
    """

    source: Source
    spec: TextSpec
    tokenizer: LoadedTokenizer
    recipe: dict[str, Any]
    key: str
    seen: str
    processor: MediaProcessor | None = None


def source_of(job: JobConfig, store: Store) -> Source:
    """Look at the source of a job of one source; what was found out about files before lies in the store.

    Raises:
        SourceError: it cannot be read.
    """
    from raysvc.pipelines.sources.look import look_at

    memo = Memo(store) if job.cache.enabled and not job.cache.force else None
    slice_bytes = None if job.workers.slice_mb is None else int(job.workers.slice_mb * 1e6)
    return look_at(job.source, slice_bytes, memo)


def plan_build(job: JobConfig, store: Store) -> BuildPlan:
    """Look at the source and load the tokenizer.

    Args:
        job: of one source.
        store: where what was found out about files before lies; a job that trusts no cache reads all.

    Raises:
        SourceError: no rows, or not the columns that the format needs.
        TokenizerError: it cannot be used for this format.
    """
    source = source_of(job, store)
    row = _first_row(job, source)
    processor = processor_of(job, row)
    if processor is not None:
        job = with_template(job, processor)
    text = job.text.model_copy(update={"media": processor.kinds if processor else ()})
    form = resolve_format(text, row)
    found = seen(form, row)
    kind = form.name
    carry = resolved(job.source.carry, row)
    Carrier(carry, kind)  # refuse before anything starts
    spec = text.model_copy(update={"format": kind, "columns": dict(form.columns), "carry": carry})
    tokenizer = LoadedTokenizer(job.tokenizer)
    if kind in ("chat", "alpaca", "question_answer", "prompt"):
        tokenizer.template_name(has_tools=False)  # refuse before anything starts
    identity = _identity(tokenizer, kind)
    remember(identity["content_sha256"], tokenizer)
    recipe = {
        "format_version": FORMAT_VERSION,
        "source": source.identity,
        "format": kind,
        "columns": dict(spec.columns),
        "messages": _normal_form(spec, tokenizer),
        "tokenizer": identity,
        "train_on": spec.train_on,
        "max_length": spec.max_length,
        "truncation": spec.truncation if spec.max_length else None,
    }
    if spec.train_end != "template":
        recipe["train_end"] = spec.train_end
    if carry:
        recipe["carry"] = {name: column.model_dump(mode="json") for name, column in carry.items()}
    if processor is not None:
        recipe["media"] = {
            "version": MEDIA_VERSION,
            **({"max_pixels": MAX_PIXELS} if "image" in processor.kinds else {}),
            "processor": processor.identity(),
            **({"allow": sorted(spec.media_allow)} if spec.media_allow else {}),
        }
    return BuildPlan(source, spec, tokenizer, recipe, cache_key(recipe), found, processor)


def _normal_form(spec: TextSpec, tokenizer: LoadedTokenizer) -> dict[str, Any] | None:
    """Says how messages are read, where there are any."""
    if spec.format in ("text", "pretokenized") or tokenizer.chat_template is None:
        return None
    fits = [tokenizer.fit(has_tools) for has_tools in (False, True)]
    return {
        "normal_form": NORMAL_FORM,
        "roles": dict(spec.roles),
        "ignore": sorted(spec.ignore),
        **({"drop_nulls": True} if spec.drop_nulls else {}),
        "arguments": ["text" if fit.text_arguments else "object" for fit in fits],
        "parts": ["kept" if fit.parts else "joined" for fit in fits],
    }


def _first_row(job: JobConfig, source: Source) -> dict[str, Any]:
    row = source.first_row()
    if row is None:
        where = ", ".join(job.source.names)
        raise no_row("source", f"{where} holds", source, job.source.storage_options)
    return row


def no_row(where: str, who: str, source: Source, storage_options: dict[str, Any]) -> SourceError:
    """Returns what to tell of a source without a row that can be read: what is wrong with the first of its rows.

    Args:
        where: for the error.
        who: what it says begins with this.
    """
    from raysvc.pipelines.reading.readers import read_rows

    rows = (row for row in read_rows(source.slices[0], storage_options) if row.error)
    first = next(rows, None)
    if first is None:
        return SourceError(where, f"{who} no row", "give files with at least one row")
    place = place_of_row(source.slices, first.source_row) or f"row {first.source_row}"
    what = f"{who} no row that can be read; {place}: {first.error}"
    lines = "write one JSON object per line; a file that is one list ends in .json"
    remedies = {
        "broken JSON": lines,
        "not a JSON object": lines,
        "fields and header differ": "let the first line name the columns, and fields have commas (.csv) or tabs (.tsv) between them",
    }
    remedy = next((text for reason, text in remedies.items() if str(first.error).startswith(reason)), None)
    return SourceError(where, what, remedy or "let every row be an object of columns")


def _identity(tokenizer: LoadedTokenizer, kind: Format) -> dict[str, Any]:
    """Returns what of the tokenizer decides the bytes; a template does only where conversations are rendered."""
    identity = tokenizer.identity()
    if kind in ("text", "pretokenized"):
        return {name: identity[name] for name in identity if not name.startswith("template")}
    tokenizer.check_repeats()
    return identity
