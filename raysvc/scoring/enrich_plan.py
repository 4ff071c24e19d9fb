"""Finds out what is known before a row is computed: the models, whether they fit the rows, and the key of the entry.

Always true:
- the key follows from the base's recipe, the columns, the models' content, dtype and k; from nothing else;
- a model that cannot score the rows as they are is refused here, by name: another tokenizer, a smaller vocabulary, rows
  beyond its positions; and so are rows with media, whose text alone means something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from raysvc.builds.entry_report import Report
from raysvc.cache import names
from raysvc.cache.key import ADDED, cache_key
from raysvc.errors import ConfigError
from raysvc.media.medium import PATCHES
from raysvc.pipelines.sources.scan_memo import Memo
from raysvc.scoring.model_files import ModelFiles, look_at_model
from raysvc.scoring.wanted import WantedColumns

if TYPE_CHECKING:
    from raysvc.cache.entry import Entry
    from raysvc.cache.store.store import Store
    from raysvc.job.config import JobConfig

SCORE_VERSION = 1  # of what a column means; another one is another key
FLOPS_PER_S = 10e9  # of one core, with room to spare


@dataclass(frozen=True)
class EnrichPlan:
    """One forward pass over the rows of an entry, to be.

    Attributes:
        wanted: the columns.
        models: model -> what it is.
        recipe: that of the base, with what is added to it; `key` is its hash.
    """

    wanted: WantedColumns
    models: Mapping[str, ModelFiles]
    recipe: Mapping[str, Any]
    key: str

    def alone_s(self, num_tokens: float) -> float:
        """Returns how long one core computes the columns of so many tokens."""
        parameters = sum(model.num_bytes for model in self.models.values()) / 2
        return 2 * parameters * num_tokens / FLOPS_PER_S


def plan_columns(
    job: JobConfig, wanted: WantedColumns, recipe: Mapping[str, Any], vocab_size: int, store: Store
) -> EnrichPlan:
    """Look at the models and name the entry.

    Args:
        recipe: of the entry that gets the columns.
        vocab_size: of its tokenizer.
        store: where what was found out about files before lies; a job that trusts no cache reads all.

    Raises:
        ConfigError: a model is not there.
    """
    memo = Memo(store) if job.cache.enabled and not job.cache.force else None
    seed = job.trainer.seed
    models = {
        name: look_at_model(key_of(wanted, value), name, vocab_size, seed, memo)
        for value, name in wanted.models.items()
    }
    identities = {value: dict(models[name].identity) for value, name in wanted.models.items()}
    made: dict[str, Any] = {
        "to": cache_key(dict(recipe)),
        "version": SCORE_VERSION,
        "columns": wanted.columns,
        "model": identities[""] if wanted.by is None else {"by": wanted.by, "models": identities},
        "dtype": wanted.dtype,
    }
    mine = {**recipe, ADDED: [*recipe.get(ADDED, ()), made]}
    return EnrichPlan(wanted, models, mine, cache_key(mine))


def key_of(wanted: WantedColumns, value: str) -> str:
    """Returns the key of the job that names a model."""
    return f"enrich.{wanted.kind}.models.{value}" if wanted.by is not None else f"enrich.{wanted.kind}.model"


def vocab_size_of(base: Entry) -> int:
    """Entries of the tokenizer of its rows.

    Raises:
        EntryError: its report does not say it.
    """
    return int(Report(base.report, base.uri)["vocab_size"])


def refuse_media(wanted: WantedColumns, base: Entry) -> None:
    """Refuse rows whose text alone means something else, also where their columns were computed once.

    Raises:
        ConfigError: some have media.
    """
    if PATCHES in base.columns and (seen := np.count_nonzero(base.row_values(PATCHES))):
        raise rows_with_media(wanted, f"{seen} of the {base.num_rows} rows")


def rows_with_media(wanted: WantedColumns, which: str) -> ConfigError:
    """The refusal of rows whose text alone means something else."""
    remedy = "compute the columns with the model's own processor, and carry them: source.carry"
    what = f"{which} have media, and a model would read their text alone"
    return ConfigError(f"enrich.{wanted.kind}", what, remedy)


def check_columns(plan: EnrichPlan, base: Entry) -> None:
    """Refuse models that cannot score rows that are there.

    Raises:
        ConfigError: a model has another tokenizer, too few entries or positions, or rows name a model that is not given.
    """
    check_models(plan, vocab_size_of(base), kept_tokenizer(base))
    check_longest(plan, int(base.lengths().max(initial=0)))
    if (by := plan.wanted.by) is None:
        return
    from raysvc.actors.worker.score import no_model

    values = {str(value) for table in base.part_tables() for value in pc.unique(table.column(by)).to_pylist()}
    if unknown := sorted(values - plan.wanted.models.keys()):
        raise no_model(by, unknown[0], plan.wanted.models)


def check_models(plan: EnrichPlan, vocab_size: int, kept: bytes | None) -> None:
    """Refuse what would compute numbers of other tokens, or none.

    Args:
        vocab_size: of the tokenizer of the rows.
        kept: its `tokenizer.json`; None where nobody has it.

    Raises:
        ConfigError: a model has another tokenizer, or too few entries.
    """
    if plan.wanted.top_k > vocab_size:
        what = f"{plan.wanted.top_k} is above the {vocab_size} entries of the tokenizer"
        raise ConfigError("enrich.teacher.top_k", what, "give fewer")
    for value, name in plan.wanted.models.items():
        where, model = f"{key_of(plan.wanted, value)}: {name}", plan.models[name]
        if model.vocab_size < vocab_size and (kept is None or model.tokenizer is None):
            what = f"has {model.vocab_size} entries, the tokenizer of the rows {vocab_size}"
            raise ConfigError(where, what, "give a model of the same tokenizer")
        if kept is not None and model.tokenizer is not None and kept != model.tokenizer:
            _compare(where, kept, model.tokenizer)


def check_longest(plan: EnrichPlan, num_tokens: int) -> None:
    """Refuse a row of so many tokens.

    Raises:
        ConfigError: a model has too few positions.
    """
    for value, name in plan.wanted.models.items():
        most = plan.models[name].max_tokens
        if most is not None and num_tokens > most:
            what = f"has {most} positions, the longest row {num_tokens} tokens"
            remedy = f"give max_length: {most}, or a model that reads more"
            raise ConfigError(f"{key_of(plan.wanted, value)}: {name}", what, remedy)


def _compare(where: str, kept: bytes, other: bytes) -> None:
    """Every token of the rows' tokenizer has the same id in the model's; the model's may have more."""
    from tokenizers import Tokenizer

    try:
        theirs = Tokenizer.from_str(other.decode()).get_vocab(with_added_tokens=True)
    except Exception as error:  # noqa: BLE001  tokenizers raises plain Exception
        what = f"its tokenizer.json cannot be read ({str(error)[:80]})"
        raise ConfigError(where, what, "save its tokenizer again") from None
    ours = Tokenizer.from_str(kept.decode()).get_vocab(with_added_tokens=True)
    differ = [(number, token) for token, number in ours.items() if theirs.get(token) != number]
    if differ:
        number, token = min(differ)
        what = f"was trained with another tokenizer: {len(differ)} of {len(ours)} tokens differ, first {token!r}, "
        what += f"here {number}, there {theirs.get(token, 'missing')}"
        raise ConfigError(where, what, "give a model of the same tokenizer")


def kept_tokenizer(base: Entry) -> bytes | None:
    """`tokenizer.json` of the rows, as it lies beside them."""
    try:
        return base.store.read(f"{base.folders[-1]}/{names.TOKENIZER}")
    except FileNotFoundError:
        return None
