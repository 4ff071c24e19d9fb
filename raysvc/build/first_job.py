"""A first job.yaml for rows that nobody has described yet: what `raysvc init` writes.

1. The format is found from the columns of the first row, as `format: auto` finds it.
2. The first `SAMPLE_ROWS` rows are tokenized as a build would, and counted.
3. What was found stands in the comments of the job.

Always true:
- a job that is written loads, and its rows were tokenized at least in part;
- nothing is sent, built or started.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from raysvc.chat.row_counts import RowCounts
from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.detect import resolve_format, seen
from raysvc.errors import SourceError
from raysvc.job.config import SourceConfig, TextSpec, TokenizerConfig
from raysvc.job.job_schema import FILE as SCHEMA

SAMPLE_ROWS = 512
OBJECTIVES = {
    "preference": "orpo   # or simpo, reward; dpo and ipo need a column ref_logprobs",
    "kto": "kto   # needs a column ref_logprobs",
    "stepwise": "process   # a reward for each step",
}
PACKED = ("chat", "alpaca", "question_answer", "prompt_completion", "text", "pretokenized")


@dataclass(frozen=True)
class Look:
    """What the rows of a source are.

    Attributes:
        format: name of their format.
        seen: which columns say so, in one line.
        num_rows: of the whole source.
        row_counts: of the sample.
        length: tokens of a row in the sample, the median.
        longest: tokens of the longest.
    """

    format: str
    seen: str
    num_rows: int
    row_counts: RowCounts
    length: int
    longest: int

    def lines(self) -> list[str]:
        """The same as sentences."""
        row_counts = self.row_counts
        share = row_counts.tokens_trained / max(1, row_counts.tokens_trained + row_counts.tokens_context)
        out = [
            f"{self.num_rows} rows; they are {self.seen}.",
            f"Of the first {row_counts.rows_in}, {row_counts.rows_written} give tokens: "
            f"half of them at most {self.length}, the longest {self.longest}; {share:.0%} are trained.",
        ]
        out += [
            f"Not usable: {rows}, {why}."
            for why, rows in {**row_counts.dropped, **row_counts.quarantined}.items()
        ]
        return out


def look(path: str, tokenizer: str) -> Look:
    """Look at the first rows of files.

    Raises:
        SourceError: no file, no rows, no known format, or none of the first rows can be used.
        TokenizerError: it cannot be loaded, or has no template for these rows.
    """
    from raysvc.pipelines.reading.readers import read_rows
    from raysvc.pipelines.sources.look import look_at

    source = look_at(SourceConfig(path=(path,)))
    row = source.first_row()
    if row is None:
        raise SourceError(path, "holds no row that can be read", "give files with one JSON object per line")
    spec = TextSpec(tokenizer=TokenizerConfig(name=tokenizer))
    form = resolve_format(spec, row)
    rows = itertools.islice(read_rows(source.slices[0], {}), SAMPLE_ROWS)
    sample = SliceTokenizer(spec.model_copy(update={"format": form.name, "columns": form.columns})).run(rows)
    if not sample.row_counts.rows_written:
        why = "; ".join(map(str, sample.examples[:2])) or str(sample.row_counts.dropped)
        raise SourceError(
            path,
            f"none of its first {sample.row_counts.rows_in} rows can be used: {why}",
            "look at these rows",
        )
    lengths = pc.list_value_length(sample.table.column("input_ids")).to_numpy()
    num_rows = sum(part.num_rows for part in source.slices)
    return Look(
        form.name, seen(form, row), num_rows, sample.row_counts, int(np.median(lengths)), int(lengths.max())
    )


def job_text(path: str, tokenizer: str, found: Look) -> str:
    """A commented job.yaml."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).name.split(".")[0]).strip("-._") or "sft"
    layout = "packed" if found.format in PACKED else "padded_right"
    said = "\n".join(f"# {line}" for line in found.lines())
    return f"""# yaml-language-server: $schema={SCHEMA}
{said}

source:
  path: {json.dumps(path)}
  format: {found.format}
tokenizer: {json.dumps(tokenizer)}   # a folder or a hub name; its chat template renders the rows

train_on: all_assistant_messages   # or last_assistant_message, each_assistant_turn, completion, all_tokens, message_weight
# max_length: {_power_of_two(found.longest)}   # longer rows are dropped, or cut: truncation: keep_start

plan:
  batch_size: {min(64, found.num_rows)}   # rows of a step, over all ranks
  # mini_batch_size: 32   # rows of an optimizer step, where a step has several
  epochs: 1
  layout: {layout}   # or padded_right, padded_left, stream: see docs/concepts.md
  # micro_batch_tokens: {max(4096, _power_of_two(found.longest))}   # tokens of one forward pass on one rank

server:
  name: {json.dumps(name)}   # trainers attach by it

trainer:
  model: {json.dumps(_model(tokenizer))}   # tiny (random, for trying), a folder, or a hub name
{_objective(found.format)}  dp_size: 1   # ranks, one GPU each
  learning_rate: 1.0e-5
  precision: bf16   # float32 weights, bfloat16 forward and backward
  checkpoint_every_steps: 50
"""


def _objective(format_name: str) -> str:
    """The line that says what is trained, where it is not every row as an example."""
    return f"  objective: {OBJECTIVES[format_name]}\n" if format_name in OBJECTIVES else ""


def _model(tokenizer: str) -> str:
    """The model that the tokenizer came with."""
    folder = Path(tokenizer).expanduser()
    return "tiny" if folder.is_dir() and not (folder / "config.json").exists() else tokenizer


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
