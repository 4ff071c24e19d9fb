"""Looks at every row of a job for what makes training on it go wrong.

1. The evals of the job that have sources of their own are read, then its source, or those of its mixture.
2. Each is tokenized slice by slice as a build does it, with a watch that sees every row beside its tokens; nothing is written.
3. What is seen of one row is checked alone (`message_checks`, `call_checks`), then beside the rows before it
   (`same_rows`), then beside all (`languages`).

Always true:
- a row that is too long is a finding, whatever the job says of it, and ends nothing;
- three rows of each defect are shown, and all are counted;
- what could not be looked for is said.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from raysvc.audit.audited_row import AuditedRow, place_of, rows_of_chunk, shown
from raysvc.audit.call_checks import can_check_arguments, check_calls
from raysvc.audit.defects import defect_of
from raysvc.audit.findings import AuditReport, Findings
from raysvc.audit.languages import Languages
from raysvc.audit.message_checks import check_messages, check_text
from raysvc.audit.same_rows import SameRows
from raysvc.chat.row_sequences import RowWatch
from raysvc.chat.tokens.tokenizer import file_beside
from raysvc.errors import ConfigError, keys_under
from raysvc.job.config import TokenizerConfig
from raysvc.progress import Progress, Tick, silent
from raysvc.row_ids import slice_base, source_base

if TYPE_CHECKING:
    from raysvc.builds.build_plan import BuildPlan
    from raysvc.chat.source.formats import Format
    from raysvc.job.config import JobConfig

LAST_TOKENS = 2  # of a row, among which its end stands


class AuditedSource(NamedTuple):
    """One source of a job.

    Attributes:
        name: of a mixture's source, `evals.NAME` of an eval's; "" where a job has one.
        section: of the job that the section `source` stands in; "" for the job itself.
        number: of a mixture's source; None for an eval's.
        job: that source alone.
    """

    name: str
    section: str
    number: int | None
    job: JobConfig

    @property
    def prefix(self) -> str:
        """Returns what addresses of its rows begin with."""
        return f"{self.name} " if self.name else ""


def audit(job: JobConfig, progress: Progress = silent) -> AuditReport:
    """Look at all rows of a job.

    Raises:
        UserMistake: a source or the tokenizer cannot be used; a source is a Ray Dataset.
    """
    began_s, auditor = time.monotonic(), _Auditor()
    sources = sources_of(job)
    for source in sources:
        auditor.run(source, progress)
    return auditor.report(time.monotonic() - began_s)


def sources_of(job: JobConfig) -> list[AuditedSource]:
    """The sources of a job, those of evals first.

    Raises:
        ConfigError: one is a Ray Dataset.
    """
    from raysvc.builds.mixed_job import jobs_of
    from raysvc.evals.eval_entries import job_of_eval

    evals = [
        AuditedSource(f"evals.{name}", f"evals.{name}", None, job_of_eval(job, name))
        for name, each in job.evals.items()
        if each.source is not None
    ]
    own = [
        AuditedSource(name, f"mixture.sources.{name}" if name else "", number, each)
        for number, (name, each) in enumerate(jobs_of(job).items())
    ]
    for one in (found := [*evals, *own]):
        if one.job.source.ray is not None:
            where = f"{one.section}.source.ray" if one.section else "source.ray"
            remedy = "write it to files, dataset.write_parquet(FOLDER), and name them in source.path"
            raise ConfigError(where, "is a Ray Dataset, which an audit does not read", remedy)
    return found


class _Auditor:
    """Looks at one source after the other."""

    def __init__(self) -> None:
        self._findings, self._same, self._languages = Findings(), SameRows(), Languages.if_there()
        self._has_schemas = can_check_arguments()
        self._rows: Counter[str] = Counter()

    def run(self, source: AuditedSource, progress: Progress) -> None:
        """Look at the rows of a source."""
        from raysvc.api import cache_root
        from raysvc.builds.build_plan import plan_build
        from raysvc.cache.store.open import open_store
        from raysvc.chat.slice_tokenizer import SliceTokenizer
        from raysvc.chat.source.detect import format_of
        from raysvc.pipelines.tokenize import desk_of, tokenize_slice

        job, options = source.job, source.job.source.storage_options
        if job.source.follow:  # the files that are there now
            job = job.model_copy(update={"source": job.source.model_copy(update={"follow": False})})
        with keys_under(source.section) if source.section else nullcontext():
            plan = plan_build(
                job, open_store(cache_root(job), job.cache.storage_options, job.cache.unsafe_store)
            )
        spec = plan.spec
        if spec.truncation == "error":
            spec = spec.model_copy(update={"truncation": "drop"})
        desk = desk_of(spec, None, options, plan.processor) if plan.processor is not None else None
        watch = RowWatch()
        tokenizer = SliceTokenizer(spec, tokenizer=plan.tokenizer, desk=desk, watch=watch)
        checks = _SourceChecks(source, plan, format_of(spec))
        pieces = plan.source.slices
        total = sum(piece.num_rows for piece in pieces)
        for piece in pieces:
            tokenize_slice(tokenizer, piece, options)
            self._slice(checks, watch, piece.index)
            self._rows[source.name] += piece.num_rows
            progress(Tick("audit", self._rows[source.name], total, "rows", final=piece is pieces[-1]))

    def _slice(self, checks: _SourceChecks, watch: RowWatch, index: int) -> None:
        source = checks.source
        for number, why in watch.left_out:
            name, text = defect_of(why)
            self._findings.add(name, None, place_of(source.prefix, number, None), text)
        first = slice_base(index) + source_base(source.number or 0)
        for chunk in watch.chunks:
            for row in rows_of_chunk(chunk, checks.form, source.prefix, first, checks.decode):
                if checks.is_planned(row):
                    self._row(checks, row)
            assert chunk.kept is not None
            first += len(chunk.kept.lengths)

    def _row(self, checks: _SourceChecks, row: AuditedRow) -> None:
        is_eval = checks.source.number is None
        excludable = None if is_eval else row.row_id
        found: dict[str, str] = {}
        for name, text in self._checked(checks, row, is_eval):
            found.setdefault(name, text)
        for name, text in found.items():
            self._findings.add(name, excludable, row.where, text)
        if self._languages is not None and not is_eval:
            self._languages.take(row.said, excludable, row.where)

    def _checked(self, checks: _SourceChecks, row: AuditedRow, is_eval: bool) -> Iterator[tuple[str, str]]:
        yield from checks.tokens(row)
        yield from check_text(row.said, row.answer)
        for example, text in row.conversations:
            yield from check_messages(example, text)
            yield from check_calls(example, self._has_schemas)
        if row.row_id is not None:
            yield from self._same.check(row, is_eval)

    def report(self, seconds: float) -> AuditReport:
        """Returns what was found."""
        skipped = {}
        if self._same.near is None:
            skipped["near_duplicate"] = "rensa is not installed: pip install 'raysvc[audit]'"
        elif self._same.near.is_full:
            skipped["near_duplicate"] = "later rows were compared with the first 200,000 alone"
        if not self._has_schemas:
            skipped["arguments_against_schema"] = "jsonschema is not installed: pip install 'raysvc[audit]'"
        if self._languages is None:
            skipped["odd_language"] = "py3langid is not installed: pip install 'raysvc[audit]'"
        else:
            for row_id, place, text in self._languages.odd():
                self._findings.add("odd_language", row_id, place, text)
        return self._findings.report(dict(self._rows), skipped, round(seconds, 3))


class _SourceChecks:
    """Holds what is known of a source, and checks a row's tokens."""

    def __init__(self, source: AuditedSource, plan: BuildPlan, form: Format) -> None:
        self.source, self.form = source, form
        hf = plan.tokenizer.hf
        self._special = np.array(
            sorted(n for n, token in hf.added_tokens_decoder.items() if token.special), np.int32
        )
        self._limit = model_limit(plan.tokenizer.config)
        self._hf = hf
        rows, skipped = source.job.plan.rows, source.job.plan.skip_rows
        self._excluded = frozenset((*skipped, *(rows.exclude if rows else ())))
        self._included = frozenset(rows.include) if rows and rows.include is not None else None

    def decode(self, ids: Any) -> str:
        """The text of tokens, without special ones."""
        return str(self._hf.decode(ids.tolist(), skip_special_tokens=True))

    def is_planned(self, row: AuditedRow) -> bool:
        """Tells whether the job's plan has the row: one that it leaves out needs no look."""
        if self.source.number is None or row.row_id is None:
            return True
        return row.row_id not in self._excluded and (self._included is None or row.row_id in self._included)

    def tokens(self, row: AuditedRow) -> Iterator[tuple[str, str]]:
        """Defects of a row's tokens."""
        longest = max(len(ids) for ids, _ in row.tokens)
        if self._limit is not None and longest > self._limit and row.row_id is not None and not row.cut:
            yield "over_model_limit", f"{longest:,} tokens, and the limit is {self._limit:,}"
        if row.row_id is None:
            return
        if row.cut:
            trained = sum(int(mask.sum(dtype=np.int64)) for _, mask in row.tokens)
            yield "answer_cut", f"{row.cut:,} of {trained:,} trained tokens: …{shown(row.answer[-60:])}"
        own = row.sequences[: row.own]
        if self._no_end(row):
            yield "no_end_of_turn", f"…{shown(row.answer[-60:])}"
        if removed := sum(one.removed for one in own):
            yield "reasoning_removed", f"of {removed} messages: {shown(row.answer)}"

    def _no_end(self, row: AuditedRow) -> bool:
        own = row.sequences[: row.own]
        if self.form.name != "pretokenized":
            return any(one.endless for one in own) and not any(one.has_end for one in own)
        ids, mask = row.tokens[row.main]
        return not np.isin(ids[mask != 0][-LAST_TOKENS:], self._special).any()


NO_LIMIT = 10**9  # what a tokenizer writes for a limit that it does not know is larger


def model_limit(tokenizer: TokenizerConfig) -> int | None:
    """`max_position_embeddings` of the model, else `model_max_length` of the tokenizer; None: neither is known."""
    model = _read(tokenizer, "config.json")
    inner = model.get("text_config")
    found = (inner if isinstance(inner, dict) else model).get("max_position_embeddings")
    found = found or _read(tokenizer, "tokenizer_config.json").get("model_max_length")
    return int(found) if isinstance(found, int | float) and 0 < found < NO_LIMIT else None


def _read(tokenizer: TokenizerConfig, name: str) -> dict[str, Any]:
    path = file_beside(tokenizer, name)
    try:
        found = json.loads(path.read_text()) if path is not None else {}
    except (OSError, ValueError):
        found = {}
    return found if isinstance(found, dict) else {}
