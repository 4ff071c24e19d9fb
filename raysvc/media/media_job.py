"""Finds out whether the rows of a job have media, and which processor they get.

Always true:
- a source whose first row shows no medium is read as before, unless `source.media` is true: no column, no processor, the same key;
- a source that shows media and has no processor is refused by the rules of its format;
- which kinds of media rows may have follows from the job, the first row and the processor's files alone, never from what is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysvc.chat.source.media_parts import NAMES, in_column, kind_of_part
from raysvc.errors import TokenizerError
from raysvc.job.config import JobConfig
from raysvc.media.kinds import WORDS, Kind
from raysvc.media.media_processor import MediaProcessor, has_processor
from raysvc.media.pixels import check_pillow
from raysvc.media.video import check_av

MEDIA_VERSION = 1  # of how media become tokens and columns; another number gives other keys


def processor_of(job: JobConfig, first_row: Mapping[str, Any]) -> MediaProcessor | None:
    """The processor of a job's media; None where it has none.

    Raises:
        TokenizerError: `source.media` is true and there is no processor, or one that cannot be used in shards.
        ConfigError: Pillow is missing, or PyAV where rows have videos.
    """
    wanted, shown = job.source.media_kinds, _shown(job, first_row)
    if wanted is False or (wanted is None and not shown):
        return None
    config = job.tokenizer
    if not has_processor(config.name, config.revision):
        if wanted is None:
            return None
        raise TokenizerError(
            "tokenizer",
            f"source.media says that rows have media, and {config.name!r} has no processor (preprocessor_config.json)",
            "save one beside the tokenizer with processor.save_pretrained",
        )
    check_pillow()
    kinds = wanted if isinstance(wanted, tuple) else ()
    found = MediaProcessor.load(config.name, config.revision, config.trust_remote_code, kinds, shown)
    if not kinds:
        _refuse_what_it_does_not_take(first_row, found)
    found.check()
    if "video" in found.kinds:
        check_av()
    return found


def _refuse_what_it_does_not_take(row: Mapping[str, Any], found: MediaProcessor) -> None:
    """Such a row would be quarantined, and most likely those like it."""
    lists = (value for value in row.values() if not isinstance(value, str))  # a text may only look like parts
    parts = {kind for value in lists for kind in _kinds_of_parts(value)}
    for kind in (one for one in NAMES if one in parts and one not in found.kinds):
        taken = " and ".join(WORDS[one].many for one in found.kinds)
        what = f"the first row has {WORDS[kind].one}, and of the processor {type(found.hf).__name__} {taken} are used"
        remedy = f"see docs/howto/media.md for processors of {WORDS[kind].many}, or quarantine such rows with source.media: [{', '.join(found.kinds)}]"
        raise TokenizerError("source", what, remedy)


def with_template(job: JobConfig, processor: MediaProcessor) -> JobConfig:
    """The job with the processor's chat template, where it names none itself."""
    if job.tokenizer.chat_template is not None or not isinstance(processor.chat_template, str):
        return job
    tokenizer = job.tokenizer.model_copy(update={"chat_template": processor.chat_template})
    return job.model_copy(update={"tokenizer": tokenizer})


def _shown(job: JobConfig, row: Mapping[str, Any]) -> set[Kind]:
    """The kinds of media that a row shows."""
    parts = {kind for value in row.values() for kind in _kinds_of_parts(value)}
    return parts | {kind for kind in NAMES if any(in_column(row.get(name)) for name in _columns(job, kind))}


def _columns(job: JobConfig, kind: Kind) -> set[str]:
    ours = NAMES[kind].columns
    return {*ours, *(job.source.columns.get(name, name) for name in ours)} - {*job.source.ignore}


def _kinds_of_parts(value: Any) -> set[Kind]:
    if isinstance(value, str):
        is_list = value.lstrip()[:1] == "["
        return {
            kind
            for kind, names in NAMES.items()
            if is_list and any(f'"{name}' in value for name in names.types)
        }
    messages = value if isinstance(value, list) else ()
    contents = (one.get("content") for one in messages if isinstance(one, Mapping))
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return {kind for part in parts if (kind := kind_of_part(part))}
