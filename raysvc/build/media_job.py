"""Whether the rows of a job have media, and which processor they get.

Always true:
- a source whose first row shows no medium is read as before, unless `source.media` is true: no column, no processor, the same key;
- a source that shows media and has no processor is refused by the rules of its format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysvc.chat.source.media_parts import NAMES, in_column, is_media_part
from raysvc.errors import TokenizerError
from raysvc.job.config import JobConfig
from raysvc.media.media_processor import MediaProcessor, has_processor
from raysvc.media.pixels import check_pillow

MEDIA_VERSION = 1  # of how media become tokens and columns; another number gives other keys


def processor_of(job: JobConfig, first_row: Mapping[str, Any]) -> MediaProcessor | None:
    """The processor of a job's media; None where it has none.

    Raises:
        TokenizerError: `source.media` is true and there is no processor, or one that cannot be used.
        ConfigError: Pillow is missing.
    """
    wanted = job.source.media
    if wanted is False or (wanted is None and not _shows_media(job, first_row)):
        return None
    config = job.tokenizer
    if not has_processor(config.name, config.revision):
        if wanted is None:
            return None
        raise TokenizerError(
            "tokenizer",
            f"source.media is true, and {config.name!r} has no processor (preprocessor_config.json)",
            "save one beside the tokenizer with processor.save_pretrained",
        )
    check_pillow()
    return MediaProcessor.load(config.name, config.revision, config.trust_remote_code)


def with_template(job: JobConfig, processor: MediaProcessor) -> JobConfig:
    """The job with the processor's chat template, where it names none itself."""
    if job.tokenizer.chat_template is not None or not isinstance(processor.chat_template, str):
        return job
    tokenizer = job.tokenizer.model_copy(update={"chat_template": processor.chat_template})
    return job.model_copy(update={"tokenizer": tokenizer})


def _shows_media(job: JobConfig, row: Mapping[str, Any]) -> bool:
    ours = [name for each in NAMES.values() for name in each.columns]
    names = {job.source.columns.get(name, name) for name in ours} | {*ours}
    names -= {*job.source.ignore}
    if any(name in row and in_column(row[name]) for name in names):
        return True
    return any(_holds_part(value) for value in row.values())


def _holds_part(value: Any) -> bool:
    if isinstance(value, str):
        types = [name for each in NAMES.values() for name in each.types]
        return value.lstrip()[:1] == "[" and any(f'"{name}' in value for name in types)
    messages = value if isinstance(value, list) else ()
    contents = (one.get("content") for one in messages if isinstance(one, Mapping))
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(is_media_part(part, kind) for part in parts for kind in NAMES)
