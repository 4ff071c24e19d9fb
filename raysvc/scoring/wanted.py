"""Names the columns that a job wants computed for its rows.

Always true:
- an objective that needs a reference, and whose rows bring none, has that of `trainer.model`;
- columns are added in one order: the reference's, then the teacher's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from raysvc.errors import ConfigError
from raysvc.job.enrich_config import SOURCE, TeacherConfig

if TYPE_CHECKING:
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.job.config import JobConfig

WITH_REFERENCE = ("dpo", "ipo", "kto")
FORMAT = {"dpo": "preference", "ipo": "preference", "simpo": "preference", "orpo": "preference"}
FORMAT |= {
    "reward": "preference",
    "kto": "kto",
    "process": "stepwise",
}  # of the rows that an objective trains
NEEDS = {"dpo": ("ref_logprobs",), "ipo": ("ref_logprobs",), "kto": ("ref_logprobs", "label")}
NEEDS |= {"process": ("step_labels",), "distill": ("teacher_ids", "teacher_logprobs")}


@dataclass(frozen=True)
class WantedColumns:
    """Columns that one forward pass over the rows gives.

    Attributes:
        kind: which.
        models: value of the column `by` -> model; one model without `by`.
        by: a carried column that names the model of each row.
        top_k: entries of a target; 0 where there are none.
        dtype: of weights and forward pass.
    """

    kind: Literal["ref_logprobs", "teacher"]
    models: Mapping[str, str]
    by: str | None
    top_k: int
    dtype: str

    @property
    def columns(self) -> dict[str, dict[str, Any]]:
        """Name -> dtype, shape of a token's value, and the value of cells without one."""
        if self.kind == "ref_logprobs":
            return {"ref_logprobs": {"dtype": "float32", "shape": [], "pad": 0}}
        return {
            "teacher_ids": {"dtype": "int32", "shape": [self.top_k], "pad": -1},
            "teacher_logprobs": {"dtype": "float32", "shape": [self.top_k], "pad": 0},
        }

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the columns for one token."""
        return 4 if self.kind == "ref_logprobs" else 8 * self.top_k


def check_rows(job: JobConfig, entry: CacheEntry) -> None:
    """Refuse rows that an objective cannot train, before a reference is computed for them.

    Raises:
        ConfigError: they are of another format.
    """
    objective = job.trainer.objective
    for found in (str(one.recipe.get("format")) for one in entry.entries):
        if FORMAT.get(objective, found) != found:
            what = f"needs {FORMAT[objective]} rows, and these are {found}"
            raise ConfigError(f"trainer.objective {objective}", what, "choose another objective")


def wanted_columns(job: JobConfig, source: str = "") -> list[WantedColumns]:
    """Returns what is added to the entry of a source, in order.

    Args:
        job: with the source's carried columns in `job.source`.
        source: its name in a mixture.

    Raises:
        ConfigError: a column is carried already, `by` names a column that is not, or no model is given for the source.
    """
    out = []
    reference = job.enrich.ref_logprobs
    carried = job.source.carry.keys()
    if reference is not None or (job.trainer.objective in WITH_REFERENCE and "ref_logprobs" not in carried):
        model = (reference.model if reference else None) or job.trainer.model
        dtype = reference.dtype if reference else "float32"
        out.append(WantedColumns("ref_logprobs", {"": model}, None, 0, dtype))
    if job.enrich.teacher is not None:
        out.append(_teacher(job.enrich.teacher, set(carried), source))
    for each in out:
        if twice := sorted(each.columns.keys() & carried):
            what = f"computes {twice[0]}, which source.carry brings"
            raise ConfigError(f"enrich.{each.kind}", what, "leave one of them out")
    return out


def _teacher(teacher: TeacherConfig, carried: set[str], source: str) -> WantedColumns:
    if teacher.by is None:
        assert teacher.model is not None
        return WantedColumns("teacher", {"": teacher.model}, None, teacher.top_k, teacher.dtype)
    if teacher.by == SOURCE and SOURCE not in carried:
        if not source:
            raise ConfigError("enrich.teacher.by", "source is for a mixture", "give enrich.teacher.model")
        if source not in teacher.models:
            what = f"has no model for the source {source!r} (it has {', '.join(sorted(teacher.models))})"
            raise ConfigError("enrich.teacher.models", what, "name one")
        return WantedColumns("teacher", {"": teacher.models[source]}, None, teacher.top_k, teacher.dtype)
    if teacher.by not in carried:
        remedy = f"carry it: source.carry: [{teacher.by}]"
        raise ConfigError("enrich.teacher.by", f"the rows do not carry {teacher.by!r}", remedy)
    return WantedColumns("teacher", dict(teacher.models), teacher.by, teacher.top_k, teacher.dtype)
