"""What of a job decides its plan beside its section `plan`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysvc.builds.cache_entry import open_entry
from raysvc.builds.job_plan import plan_config
from raysvc.errors import ConfigError
from raysvc.job.config import JobConfig
from raysvc.plan.cost import CostModel

DECODER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}


def job(model: Path, **plan: Any) -> JobConfig:
    sections = {"source": {"path": "rows.jsonl"}, "tokenizer": "tokenizer", "trainer": {"model": str(model)}}
    return JobConfig.model_validate({**sections, "plan": plan})


@pytest.mark.parametrize("config", [DECODER, {"text_config": DECODER, "vision_config": {"hidden_size": 9}}])
def test_ranks_are_evened_out_by_the_work_of_the_model_that_is_trained(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    derived = CostModel.of_model(DECODER)
    assert plan_config(job(tmp_path)).cost == (derived.linear, derived.quadratic)
    assert derived.linear != CostModel().linear
    assert plan_config(job(tmp_path, cost=[3, 2])).cost == (3, 2)


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", json.dumps({**DECODER, "hidden_size": None})])
def test_a_model_that_does_not_tell_its_sizes_leaves_the_plan_as_it_is(
    tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert plan_config(job(tmp_path)) == job(tmp_path).plan


def test_a_pad_of_a_column_that_nobody_has_is_refused(entry: Callable[..., str], tmp_path: Path) -> None:
    rows = open_entry(entry(4))
    known = job(tmp_path, pad_values={"labels": -1, "ref_logprobs": 0})
    assert plan_config(known, rows).pad_values == {"labels": -1, "ref_logprobs": 0}
    with pytest.raises(ConfigError, match=r"pad_values: 'label' is not a column of this job; known are"):
        plan_config(job(tmp_path, pad_values={"label": -1}), rows)
