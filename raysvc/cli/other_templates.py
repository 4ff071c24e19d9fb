"""Finds a chat template at hand that takes rows which the tokenizer's own one refuses.

1. Templates are those of TRL, where it is installed, and the one of raysvc's sample rows; the nearest to the tokenizer's own come first.
2. One whose markers are no tokens of the tokenizer is left out.
3. After them come the folders beside the tokenizer's own, each with its own tokenizer and template.
4. The first that takes the rows, as a build would, is the one.

Always true:
- nothing is fetched, and no code of a package or a folder runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from importlib.util import find_spec
from pathlib import Path

from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.json_rows import SourceRow
from raysvc.chat.tokens.probe import share_encoders
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.cli.sample_data import TEMPLATE_FILE
from raysvc.errors import RaysvcError
from raysvc.job.config import TextSpec, TokenizerConfig

FIRST_ROWS = 64  # which most of the templates that fail do not take
MOST_FOLDERS = 8
MARKERS = re.compile(r"<\|[^<>|\s]+\|>|<｜[^<>\s]+｜>|<\w+_of_\w+>|\[/?INST\]")


def template_that_takes(
    spec: TextSpec, rows: Sequence[SourceRow], max_share: float
) -> TokenizerConfig | None:
    """Returns the tokenizer with one; None where none at hand takes the rows.

    Args:
        rows: of the source.
        max_share: of them that may be quarantined all the same.
    """
    own = LoadedTokenizer(spec.tokenizer)
    for config in _candidates(own):
        tried = spec.model_copy(update={"tokenizer": config})
        if all(_takes(tried, own, some, max_share) for some in (rows[:FIRST_ROWS], rows)):
            return config
    return None


def line_of(config: TokenizerConfig) -> str:
    """Returns the line of a job that names a tokenizer."""
    given = config.model_dump(mode="json", exclude_unset=True)
    if given.keys() == {"name"}:
        return f"tokenizer: {json.dumps(config.name)}"
    return f"tokenizer: {{{', '.join(f'{key}: {json.dumps(value)}' for key, value in given.items())}}}"


def _takes(spec: TextSpec, own: LoadedTokenizer, rows: Sequence[SourceRow], max_share: float) -> bool:
    try:
        tokenizer = LoadedTokenizer(spec.tokenizer)
        if spec.tokenizer.name == own.config.name:
            share_encoders(own, tokenizer)  # to choose them takes seconds
        counts = SliceTokenizer(spec, tokenizer=tokenizer).run(rows).row_counts
    except RaysvcError:
        return False
    endless = counts.turns_without_end
    return not endless and sum(counts.quarantined.values()) <= max_share * counts.rows_in


def _candidates(tokenizer: LoadedTokenizer) -> Iterator[TokenizerConfig]:
    config = tokenizer.config
    known, own = tokenizer.hf.backend_tokenizer.get_vocab(), tokenizer.chat_template or ""
    fit = {
        path: text
        for path in _template_files()
        if set(MARKERS.findall(text := path.read_text(encoding="utf-8"))) <= known.keys()
    }
    for path in sorted(fit, key=lambda path: -SequenceMatcher(None, own, fit[path]).quick_ratio()):
        yield config.model_copy(update={"chat_template": str(path)})
    for folder in _folders_beside(Path(config.name).expanduser()):
        yield TokenizerConfig(name=str(folder))


def _template_files() -> list[Path]:
    trl = find_spec("trl")
    found = (
        [] if trl is None or trl.origin is None else Path(trl.origin).parent.glob("chat_templates/*.jinja")
    )
    return [*sorted(found), Path(str(TEMPLATE_FILE))]


def _folders_beside(own: Path) -> list[Path]:
    if not own.is_dir():
        return []
    own = own.absolute()
    there = (path.parent for path in own.parent.glob("*/tokenizer.json"))
    return [folder for folder in sorted(there) if folder != own][:MOST_FOLDERS]
