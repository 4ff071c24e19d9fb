"""Losses of rows from HF's Trainer and TRL: the oracle is one forward a row, alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysvc.errors import ConfigError

from .stream_client import arguments, client_of, tiny_lm

pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries


@pytest.mark.parametrize(
    "plan",
    [{"layout": "padded_right", "micro_batch_size": 4}, {"layout": "packed", "micro_batch_tokens": 512}],
    ids=["padded", "packed"],
)
@pytest.mark.parametrize("host", ["Trainer", "SFTTrainer"])
def test_each_row_of_a_step_is_reported_with_what_it_costs_alone(
    host: str, plan: dict[str, Any], tmp_path: Path, sample: dict[str, str]
) -> None:
    torch = pytest.importorskip("torch")
    import transformers

    from raysvc.integrations.transformers import FromServer

    client = client_of(tmp_path, sample, batch_size=16, mini_batch_size=8, **plan)
    told: dict[int, tuple[Any, dict[str, Any]]] = {}
    client.report_rows = lambda step, rows, **columns: told.update({step: (rows, columns)})  # type: ignore[attr-defined]
    bases: Any = (FromServer, transformers.Trainer)
    config, more = transformers.TrainingArguments, {}
    if host == "SFTTrainer":
        trl = pytest.importorskip("trl")
        from raysvc.integrations.trl_server import TrlFromServer

        bases, config = (TrlFromServer, trl.SFTTrainer), trl.SFTConfig
        more = {"processing_class": transformers.AutoTokenizer.from_pretrained(sample["tokenizer"])}
    options = {**arguments(tmp_path / "out"), "learning_rate": 0.0, "max_steps": 4, "bf16": False}
    kind = type("Mine", bases, {"client": client, "row_losses": True})
    kind(model=tiny_lm(), args=config(**options), **more).train()
    assert sorted(told) == [0, 1]
    model = tiny_lm().eval()
    for rows, columns in told.values():
        assert len(set(rows.tolist())) == 16
        for row, loss, targets in zip(rows.tolist(), columns["loss"], columns["targets"], strict=True):
            truth = client.entry.row(row)
            ids = torch.tensor([truth["input_ids"]])
            labels = torch.where(torch.tensor([truth["loss_mask"]]) == 1, ids, -100)
            labels[0, 0] = -100
            with torch.no_grad():
                alone = float(model(ids, labels=labels).loss) * int((labels != -100).sum())
            assert targets == int((labels != -100).sum())
            np.testing.assert_allclose(loss, alone, rtol=2e-4)


def test_a_loader_keeps_no_losses_of_rows(tmp_path: Path, sample: dict[str, str]) -> None:
    transformers = pytest.importorskip("transformers")
    from raysvc.integrations.transformers import FromServer

    loader = client_of(tmp_path, sample, batch_size=16, layout="padded_right", micro_batch_size=4)
    kind: Any = type("Mine", (FromServer, transformers.Trainer), {"client": loader, "row_losses": True})
    trainer = kind(model=tiny_lm(), args=transformers.TrainingArguments(**arguments(tmp_path / "out")))
    with pytest.raises(ConfigError, match="row_losses: are kept by a server, and a loader has none"):
        trainer.train()
