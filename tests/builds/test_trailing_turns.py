"""Turns after the last answer are context, where SkyRL cuts or drops them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.mark.parametrize("train_on", ["last_assistant_message", "all_assistant_messages"])
@pytest.mark.parametrize("role", ["tool", "user"])
def test_turns_after_the_last_answer_are_rendered_and_not_trained(
    role: str, train_on: str, sample: dict[str, str], tmp_path: Path
) -> None:
    import raysvc

    answered = [{"role": "user", "content": "add 2 and 3"}, {"role": "assistant", "content": "5"}]
    rows = [[*answered, {"role": role, "content": "and more"}], answered, answered[:1]]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    entry = raysvc.tokenize(
        source={"path": str(path), "format": "chat"},
        tokenizer=sample["tokenizer"],
        train_on=train_on,
        cache={"root": str(tmp_path / "cache")},
    )
    assert entry.num_rows == 2, "nothing is trained in the last one"
    assert entry.report["row_counts"]["dropped"] == {"no assistant message": 1}
    longer, plain = entry.row(0), entry.row(1)
    ids, mask = list(plain["input_ids"]), list(plain["loss_mask"])
    assert list(longer["input_ids"][: len(ids)]) == ids
    assert list(longer["loss_mask"]) == mask + [0] * (len(longer["input_ids"]) - len(mask))
    assert len(longer["input_ids"]) > len(ids)
    assert sum(mask) > 0
