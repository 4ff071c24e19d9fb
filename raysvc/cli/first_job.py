"""A first job.yaml for rows that nobody has described yet: what `raysvc init` writes.

1. The format is found from the columns of the first row, as `format: auto` finds it.
2. The first `SAMPLE_ROWS` rows are tokenized as a build would, with their media, and counted.
3. What was found stands in the comments of the job.

Always true:
- a job that is written loads, and its rows were tokenized at least in part;
- nothing is sent, built or started.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from raysvc.actors.model.load_model import has_weights, num_weights
from raysvc.actors.model.model_layout import layout_proof, scaling_of
from raysvc.actors.model.tiny_vision import NAME as TINY_VISION
from raysvc.builds.build_plan import no_row
from raysvc.chat.row_counts import RowCounts, shown_reasons, warnings_of, what_to_fix
from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.detect import resolve_format, seen
from raysvc.chat.source.json_rows import SourceRow
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.cli.other_templates import line_of, template_that_takes
from raysvc.errors import ConfigError, SourceError, TokenizerError
from raysvc.job.config import JobConfig, SourceConfig, TextSpec, TokenizerConfig
from raysvc.job.job_schema import FILE as SCHEMA
from raysvc.job.objectives.units import UNITS
from raysvc.job.text_config import TrainOn
from raysvc.media.kinds import WORDS, Kind
from raysvc.media.media_job import processor_of, with_template
from raysvc.media.media_processor import MediaProcessor
from raysvc.media.medium import COLUMN, media_of
from raysvc.pipelines.sources.slices import place_of_row
from raysvc.progress import how_many

SAMPLE_ROWS = 512
MAX_QUARANTINE: float = JobConfig.model_fields["max_quarantine"].default
OBJECTIVES = {
    "preference": "orpo   # or simpo, reward; dpo or ipo, for which ref_logprobs are computed first",
    "kto": "kto   # for which ref_logprobs are computed first",
    "stepwise": "process   # a reward for each step",
}
# a model with fewer weights than the first number learns at the second; a larger one at `LARGE_RATE`
RATES = ((1e6, 1e-2), (2e7, 3e-3), (5e8, 1e-4))
LARGE_RATE = 1e-5
PACKED = ("chat", "alpaca", "question_answer", "prompt_completion", "text", "pretokenized")


@dataclass(frozen=True)
class Look:
    """Holds what the rows of a source are.

    Attributes:
        format: name of their format.
        seen: which columns say so, in one line.
        num_rows: of the whole source.
        row_counts: of the sample.
        length: tokens of a row in the sample, the median.
        longest: tokens of the longest.
        media: kind -> how many the sample has.
        left_out: columns, and keys of messages, that nothing reads.
        model: that trains them: what the tokenizer came with, or a tiny one.
        layout: of the plan: packed where one row is one example, and the model keeps rows of a line apart.
        too_long: what is wrong with rows of the sample that are longer than the model's original context, and that context.
        why: reasons why rows of the sample cannot be used, with some of them; "": all can.
        place: where the first of these lies in a file.
        lacks: what is missing of the model that the tokenizer's folder describes; "": nothing, or it describes none.
        takes: the line of a job that names a template at hand which takes the rows, where their own does not; "": none was found, or asked for.
    """

    format: str
    seen: str
    num_rows: int
    row_counts: RowCounts
    length: int
    longest: int
    media: Mapping[Kind, int]
    left_out: tuple[str, ...]
    model: str
    layout: str
    too_long: tuple[str, int] | None
    why: str
    place: str
    lacks: str
    takes: str = ""

    @property
    def unusable(self) -> str:
        """Says why no command would accept these rows, with the remedy; "": they do."""
        counts = self.row_counts
        count = sum(counts.quarantined.values())
        if count <= MAX_QUARANTINE * counts.rows_in:
            return ""
        first = f" (the first is {self.place})" if self.place else ""
        told = f"{count} of the first {how_many(counts.rows_in, 'row')}{first} cannot be used, so every command would end: {self.why}"
        return f"{told}; {_remedy(counts, self.takes)}, or raise max_quarantine to train the rest"

    def lines(self) -> list[str]:
        """The same as sentences."""
        row_counts = self.row_counts
        share = row_counts.tokens_trained / max(1, row_counts.tokens_trained + row_counts.tokens_context)
        out = [
            f"{how_many(self.num_rows, 'row')}; they are {self.seen}.",
            f"Of the first {row_counts.rows_in}, {row_counts.rows_written} give tokens: "
            f"half of them at most {self.length}, the longest {self.longest}; {share:.0%} are trained.",
        ]
        if self.media:
            counts = " and ".join(f"{count} {WORDS[kind].many}" for kind, count in self.media.items())
            out.append(f"They have {counts}.")
        out += [f"{change[0].upper()}{change[1:]}: {rows}." for change, rows in row_counts.normalized.items()]
        if self.lacks:
            out.append(f"{self.lacks}, so the job trains {self.model}.")
        if self.left_out:
            out.append(f"Left out: {', '.join(self.left_out)}.")
        if self.too_long:
            out.append(f"The model {self.too_long[0]}; the job leaves them out.")
        out += [f"{warning[0].upper()}{warning[1:]}." for warning in warnings_of(row_counts.to_json())]
        out += [
            f"Not usable: {rows}, {why}."
            for why, rows in {**row_counts.dropped, **row_counts.quarantined}.items()
        ]
        return out


def _remedy(counts: RowCounts, takes: str) -> str:
    """Says what takes the rows that were left out: other rows, or another template."""
    if takes:
        return f"write {takes} into the job, which takes them"
    if _is_of_template(counts):
        return "name a tokenizer whose chat template takes them, or give tokenizer.chat_template"
    return "fix these rows"


def _instead(tokenizer: TokenizerConfig) -> str:
    """Says how the same command names another template, or another tokenizer."""
    if tokenizer.chat_template is None:
        return f"give --tokenizer {shlex.quote(tokenizer.name)}, whose template takes them"
    return f"add {shlex.quote(f'tokenizer.chat_template={tokenizer.chat_template}')}, which takes them"


def _with_template_at_hand(
    error: TokenizerError, spec: TextSpec, rows: Sequence[SourceRow]
) -> TokenizerError:
    """What to tell of a tokenizer that cannot render rows; of one without a template, which one at hand takes them."""
    if LoadedTokenizer(spec.tokenizer).templates:
        return error
    takes = template_that_takes(spec, rows, MAX_QUARANTINE)
    none = "set tokenizer.chat_template to a file or a text: of the templates at hand none takes the rows with markers that this tokenizer has"
    return TokenizerError(error.where, error.what, _instead(takes) if takes else none)


def _is_of_template(counts: RowCounts) -> bool:
    """Returns whether so many rows are left out that no command would go on, and another template may take them."""
    count = sum(counts.quarantined.values())
    return count > MAX_QUARANTINE * counts.rows_in and "template" in what_to_fix(counts.quarantined)


def look(given: SourceConfig, tokenizer: TokenizerConfig, train_on: TrainOn) -> Look:
    """Look at the first rows of a source.

    Raises:
        SourceError: no file, no rows, no known format, or none of the first rows can be used.
        TokenizerError: it cannot be loaded, or has no template for these rows, or a processor that is not read.
        ConfigError: a package that their media need is missing.
    """
    from raysvc.pipelines.reading.media_files import folder_of
    from raysvc.pipelines.reading.readers import read_rows
    from raysvc.pipelines.sources.look import look_at
    from raysvc.pipelines.tokenize import desk_of

    job, path = JobConfig(source=given, tokenizer=tokenizer, train_on=train_on), _place(given)
    source = look_at(job.source)
    row = source.first_row()
    if row is None:
        raise no_row(path, "holds", source, {})
    processor = processor_of(job, row)
    spec = job.text
    if processor is not None:
        spec = with_template(job, processor).text.model_copy(update={"media": processor.kinds})
    form = resolve_format(spec, row)
    spec = spec.model_copy(update={"format": form.name, "columns": form.columns})
    desk = None
    if processor is not None:
        desk = desk_of(spec, None, {}, processor)
        desk.folder_of = lambda number: folder_of(source.slices[0].path_of(number))
    rows = list(itertools.islice(read_rows(source.slices[0], {}), SAMPLE_ROWS))
    try:
        sample = SliceTokenizer(spec, desk=desk).run(rows)
    except TokenizerError as error:
        raise _with_template_at_hand(error, spec, rows) if desk is None else error from None
    takes = None
    if desk is None and _is_of_template(sample.row_counts):
        takes = template_that_takes(spec, rows, MAX_QUARANTINE)
    if not sample.row_counts.rows_written:
        why = "; ".join(map(str, sample.examples[:1])) or str(sample.row_counts.dropped)
        raise SourceError(
            path,
            f"none of its first {how_many(sample.row_counts.rows_in, 'row')} can be used: {why}",
            _instead(takes) if takes else _remedy(sample.row_counts, ""),
        )
    lengths = pc.list_value_length(sample.table.column("input_ids")).to_numpy()
    num_rows = sum(part.num_rows for part in source.slices)
    media = Counter(
        one.kind
        for text in (sample.table.column(COLUMN).to_pylist() if processor is not None else ())
        for one in media_of(text)
    )
    return Look(
        form.name,
        seen(form, row),
        num_rows,
        sample.row_counts,
        int(np.median(lengths)),
        int(lengths.max()),
        dict(media),
        sample.left_out,
        model := _model(tokenizer.name, processor),
        _layout(form.name, model),
        _too_long(model, lengths),
        shown_reasons(sample.row_counts.quarantined, sample.examples),
        place_of_row(source.slices, sample.examples[0].source_row) if sample.examples else "",
        _lacks(tokenizer.name),
        line_of(takes) if takes else "",
    )


def job_text(source: SourceConfig, tokenizer: TokenizerConfig, found: Look, train_on: TrainOn) -> str:
    """A commented job.yaml."""
    stem = Path(_place(source)).name.split(".")[0]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "sft"
    said = "\n".join(f"# {line}" for line in found.lines())
    return f"""# yaml-language-server: $schema={SCHEMA}
{said}

source:
{_source(source)}  format: {found.format}
{_kinds(found)}{line_of(tokenizer)}   # a folder or a hub name; its chat template renders the rows
{f"# {found.takes}   # takes rows that the template of this one does not{chr(10)}" if found.takes else ""}
train_on: {train_on}   # or {", ".join(one for one in get_args(TrainOn) if one != train_on)}
{_max_length(found)}   # longer rows are dropped, or cut: truncation: keep_start

plan:
  batch_size: {_batch_size(found.num_rows)}   # {UNITS.get(found.format, "rows")} of a step, over all ranks
  # mini_batch_size: {max(1, _batch_size(found.num_rows) // 2)}   # {UNITS.get(found.format, "rows")} of an optimizer step, where a step has several
  epochs: 1
  layout: {found.layout}   # {_of_layout(found)}
  # micro_batch_tokens: {max(4096, _power_of_two(found.longest))}   # tokens of one forward pass on one rank

server:
  name: {json.dumps(name)}   # trainers attach by it
{_collators(found)}
trainer:
  model: {json.dumps(found.model)}   # {"tiny-vision" if found.media else "tiny"} (random, for trying), a folder, or a hub name
{_objective(found.format)}  dp_size: 1   # ranks, one GPU each
  learning_rate: {_rate_line(found.model)}
  precision: {"bf16" if has_gpu() else "fp32"}   # bf16 on GPUs: float32 weights, bfloat16 forward and backward
  checkpoint_every_steps: 50
# evals: {{held: {{share: 0.05}}}}   # held out by prompt, never trained; trainer.keep_best and stop_after act on it
"""


def script_text(trainer: str, job: Path, tokenizer: str, found: Look) -> str:
    """The script that trains a job in another trainer.

    Raises:
        ConfigError: it trains rows of text alone.
    """
    if found.media or found.format in OBJECTIVES:
        what = f"writes a script for rows of text, and these are {found.format}{' with media' * bool(found.media)}"
        remedy = "leave it out, and see docs/integrations.md and examples/ for such rows"
        raise ConfigError("--trainer", what, remedy)
    values = {
        "JOB": str(job),
        "TOKENIZER": tokenizer,
        "MODEL": found.model,
        "LEARNING_RATE": min(3e-3, _rate(found.model)),
    }
    text = files("raysvc.cli.trainers").joinpath(f"train_{trainer}.py").read_text()
    lines = text.splitlines(keepends=True)
    return "".join(
        f"{name} = {values[name]!r}\n" if (name := line.split(" = ")[0]) in values else line for line in lines
    )


def _rate(model: str) -> float:
    """A rate at which a model of this size learns within some twenty steps; that of a large one where its size is not known."""
    size = 0 if model in ("tiny", TINY_VISION) else num_weights(model)
    return LARGE_RATE if size is None else next((rate for most, rate in RATES if size < most), LARGE_RATE)


def _rate_line(model: str) -> str:
    size = None if model in ("tiny", TINY_VISION) else num_weights(model)
    rate = f"{_rate(model):.1e}".replace("e-0", "e-")
    if size is not None:
        return f"{rate}   # for {size / 1e6:.3g} million weights"
    return rate if rate == "1.0e-5" else f"{rate}   # of a tiny model; a trained one wants some 1.0e-5"


def _batch_size(num_rows: int) -> int:
    """Rows of a step, so that an epoch has twenty steps or more where it can."""
    return 1 << (max(1, min(64, num_rows // 20)).bit_length() - 1)


def has_gpu() -> bool:
    """Returns whether this machine shows one; the ranks may run on others."""
    return Path("/dev/nvidiactl").exists()


def _place(source: SourceConfig) -> str:
    return source.path[0] if source.path else str(source.dataset)


def _source(source: SourceConfig) -> str:
    """The lines that say where rows are and how they are named."""
    said = {"path": source.path[0] if source.path else None}
    said |= {name: getattr(source, name) for name in ("dataset", "subset", "revision", "split")}
    said |= {name: getattr(source, name) for name in ("columns", "roles")}
    return "".join(f"  {name}: {json.dumps(value)}\n" for name, value in said.items() if value)


def _layout(format_name: str, model: str) -> str:
    if format_name not in PACKED:
        return "padded_right"
    proof = layout_proof(model, "packed")
    return "packed" if proof is None or proof.inputs is not None else "padded_right"


def _too_long(model: str, lengths: npt.NDArray[np.integer[Any]]) -> tuple[str, int] | None:
    scaling = scaling_of(model)
    beyond = scaling.mixes(lengths) if scaling else 0
    return (scaling.told(f"{beyond} rows are"), scaling.context) if scaling and beyond else None


def _max_length(found: Look) -> str:
    if found.too_long:
        return f"max_length: {found.too_long[1]}"
    return f"# max_length: {_power_of_two(found.longest)}"


def _of_layout(found: Look) -> str:
    if found.format in PACKED and found.layout != "packed":
        return "packed would let this model see several rows as one: see docs/models.md"
    others = [name for name in ("padded_right", "padded_left", "packed", "stream") if name != found.layout]
    return f"or {', '.join(others)}: see docs/concepts.md"


def _objective(format_name: str) -> str:
    """The line that says what is trained, where it is not every row as an example."""
    return f"  objective: {OBJECTIVES[format_name]}\n" if format_name in OBJECTIVES else ""


def _kinds(found: Look) -> str:
    return f"  media: [{', '.join(found.media)}]   # kinds that rows may have\n" if found.media else ""


def _collators(found: Look) -> str:
    return (
        "  # collators: 2   # processes that decode media, one CPU each; 0: the server does\n"
        if found.media
        else ""
    )


def _model(tokenizer: str, processor: MediaProcessor | None) -> str:
    """The model that the tokenizer came with, or a tiny one where only the tokenizer is there."""
    folder = Path(tokenizer).expanduser()
    if not folder.is_dir() or ((folder / "config.json").exists() and has_weights(tokenizer)):
        return tokenizer
    return TINY_VISION if processor is not None else "tiny"


def _lacks(tokenizer: str) -> str:
    there = (Path(tokenizer).expanduser() / "config.json").exists() and not has_weights(tokenizer)
    return f"{tokenizer} has config.json and no weights" if there else ""


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
