"""verl's data set of prompts, chosen and ordered by a raysvc job. No server; verl's own loader reads it.

    data.train_files=[a.parquet, b.parquet]  data.shuffle=False  trainer.total_epochs=1
    data.custom_cls.path=pkg://raysvc.integrations.verl  data.custom_cls.name=PlannedPrompts  +data.raysvc_job=job.yaml

verl renders and tokenizes prompts itself, in its agent loop, so it takes messages; what raysvc gives is which rows, in
which order, and that their ids are those of the entry.
1. The job is built on `data.train_files`; its rows are of `prompt`, its `max_length` drops what is too long.
2. Item i is the i-th prompt of the plan, all epochs through: verl's row of that number, with all its columns.
3. `data.val_files` are verl's own, in their order.

Always true:
- step k of the run has the rows of step k of the plan, whatever `num_workers` is, and after a resume;
- a state that belongs to other rows or another order is refused;
- a prompt that verl would render to other ids than the entry's is refused where it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.utils.dataset.rl_dataset import RLHFDataset

from raysvc.errors import ConfigError, StateMismatch


class PlannedPrompts(RLHFDataset):  # type: ignore[misc]  # verl is not followed
    """See the module; verl makes it from its `data` section.

    Raises:
        ConfigError: verl's options would give other rows, or another order, than the plan.
    """

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        self._planned = _listed(data_files) == _listed(config.get("train_files"))
        if self._planned:
            _refuse(config, max_samples)
        super().__init__(data_files, tokenizer, config, processor, max_samples)
        if self._planned:
            self._order(config)

    def __len__(self) -> int:
        return (
            int(self._schedule.num_steps * self._schedule.batch_size) if self._planned else super().__len__()
        )

    def __getitem__(self, item: int) -> dict[str, Any]:
        if not self._planned:
            row: dict[str, Any] = super().__getitem__(item)
            return row
        if not 0 <= item < len(self):
            raise IndexError(item)
        import numpy as np

        step, place = divmod(item, self._schedule.batch_size)
        number = self._rows_of(step)[place]
        origin = int(self._entry.read(np.array([number])).rows["source_row"][0])
        row = super().__getitem__(origin)
        self._check(number, origin, row)
        return row

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Leave them: rows are found by their number, and the job has dropped what is too long."""
        return dataframe if self._planned else super().maybe_filter_out_long_prompts(dataframe)

    def state_dict(self) -> dict[str, Any]:
        """Returns of which plan the items are; the loader itself knows where it is."""
        return {"plan": self._state().to_json()} if self._planned else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of another plan.

        Raises:
            StateMismatch: names every field that differs.
        """
        from raysvc.plan.state import PlanState

        if self._planned:
            if "plan" not in state:
                raise StateMismatch(
                    "data.pt", "was saved without a plan", "resume with the data set it was saved with"
                )
            PlanState.from_json(state["plan"]).check(self._plan)

    def _state(self) -> Any:
        from raysvc.plan.state import PlanState

        return PlanState.of(self._plan, None)

    def _order(self, config: Any) -> None:
        import raysvc
        from raysvc.builds.job_plan import plan_of
        from raysvc.job.job_file import load_job

        job = load_job(config.raysvc_job, source={"path": list(self.data_files), "format": "prompt"})
        entry = raysvc.tokenize(job)
        self._entry, self._plan = entry.rows, plan_of(job, entry)
        self._schedule = self._plan.schedule
        self._known: tuple[int, list[int]] = (-1, [])  # the rows of one step
        wanted = config.get("gen_batch_size", None) or config.train_batch_size
        if self._schedule.batch_size != wanted:
            what = f"is {self._schedule.batch_size}, and verl takes {wanted} prompts a step"
            raise ConfigError("plan.batch_size", what, f"use {wanted}")
        if self._schedule.groups_at(self._schedule.steps_per_epoch - 1) != wanted:
            raise ConfigError(
                "plan.tail", f"is {self._schedule.tail}, and verl drops the last rows", "use drop"
            )

    def _rows_of(self, step: int) -> list[int]:
        """Rows of the entry, in the order of the plan."""
        if self._known[0] != step:
            minis = self._plan.step(step, 1).mini_batches
            self._known = (step, [row for mini in minis for row in mini.row_ids.tolist()])
        return self._known[1]

    def _check(self, number: int, origin: int, row: dict[str, Any]) -> None:
        import numpy as np
        from verl.utils.tokenizer import normalize_token_ids

        own = self._entry.read(np.array([number])).tokens["input_ids"].tolist()
        options = {**self.apply_chat_template_kwargs, "tools": self.tool_schemas}
        found = self.tokenizer.apply_chat_template(
            row["raw_prompt"], add_generation_prompt=True, tokenize=True, **options
        )
        if normalize_token_ids(found) != own:
            what = f"source row {origin} has other ids than verl would make of it"
            raise ConfigError("data.raysvc_job", what, "use verl's tokenizer, template and tools in the job")


def _listed(files: Any) -> list[str]:
    return [files] if isinstance(files, str) else [str(file) for file in files or ()]


def _refuse(config: Any, max_samples: int) -> None:
    if config.get("raysvc_job") is None:
        raise ConfigError("data.raysvc_job", "is not there", "add +data.raysvc_job=job.yaml")
    if config.get("shuffle", False):
        raise ConfigError(
            "data.shuffle", "is true, and the plan orders prompts", "use False, and plan.shuffle"
        )
    if max_samples > 0:
        what = f"is {max_samples}, and the job chooses rows"
        raise ConfigError("data.train_max_samples", what, "use -1, and fewer files")
