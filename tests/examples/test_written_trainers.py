"""`raysvc init --trainer`: each script that is written trains its job, goes on where it stopped, and trains our targets alone."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import raysvc
from raysvc.cli.main import app
from raysvc.cli.sample_data import chat_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of other libraries
    pytest.mark.timeout(600),
]


@pytest.fixture
def folder(tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with 128 rows."""
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYSVC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows(128)))
    return tmp_path


def write(trainer: str, sample: dict[str, str], data: str = "rows.jsonl") -> Any:
    arguments = ["init", data, "--tokenizer", sample["tokenizer"], "--trainer", trainer]
    return CliRunner().invoke(app, arguments)


def run(script: str, **changed: str) -> None:
    """Run a script as a user does, with other text in it."""
    text = Path(script).read_text()
    for old, new in changed.items():
        assert f"{old}=" in text
        text = re.sub(rf"\b{old}=[^,\n]+", f"{old}={new}", text)
    Path("run.py").write_text(text.replace("report_to=", "use_cpu=True, disable_tqdm=True, report_to="))
    runpy.run_path("run.py", run_name="__main__")


def losses(checkpoints: str) -> list[float]:
    newest = max(Path(checkpoints).glob("checkpoint-*"), key=lambda one: int(one.name.split("-")[1]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [line["loss"] for line in history if "loss" in line]


def test_the_loop_that_is_written_trains_all_steps_and_goes_on_after_a_stop(
    folder: Path, sample: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = write("torch", sample)
    assert "then python train_torch.py)" in result.stdout, result.output
    text = Path("train_torch.py").read_text().replace("SAVE_EVERY_STEPS = 50", "SAVE_EVERY_STEPS = 4")
    stopped = text.replace(
        "loader.commit(micro.step)\n", "loader.commit(micro.step)\n            assert micro.step < 6\n"
    )
    Path("stopped.py").write_text(stopped.replace("runs/torch", "runs/stopped"))
    Path("again.py").write_text(text.replace("runs/torch", "runs/stopped"))
    Path("whole.py").write_text(text)
    with pytest.raises(AssertionError):
        runpy.run_path("stopped.py", run_name="__main__")
    capsys.readouterr()
    runpy.run_path("again.py", run_name="__main__")
    again = capsys.readouterr().out.splitlines()
    runpy.run_path("whole.py", run_name="__main__")
    whole = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(whole) == 32
    assert [line for line in again if line.startswith("step ")] == whole[4:], (
        "the newest checkpoint had four steps"
    )
    first, last = (float(whole[at].split()[-1]) for at in (0, -1))
    assert last < 0.8 * first
    assert Path("runs/torch/model/config.json").exists()


def test_the_trainer_that_is_written_resumes_with_the_losses_of_one_that_was_not_stopped(
    folder: Path, sample: dict[str, str]
) -> None:
    assert write("transformers", sample).exit_code == 0
    run("train_transformers.py")
    whole = losses("runs/transformers")
    Path("runs/transformers").rename("whole")
    run("train_transformers.py", save_steps="3", output_dir="OUT, max_steps=3")
    assert losses("runs/transformers") == whole[:3]
    run("train_transformers.py")
    assert losses("runs/transformers") == whole
    assert len(whole) == 32
    assert whole[-1] < 0.8 * whole[0]


def test_the_script_for_trl_trains_on_our_targets_alone_and_keeps_the_best(
    folder: Path, sample: dict[str, str], tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl")
    import torch

    from raysvc.integrations.trl import labelled

    assert write("trl", sample).exit_code == 0
    run("train_trl.py", num_train_epochs="1", eval_steps="8", save_steps="8")
    told = losses("runs/trl")
    assert told[-1] < 0.8 * told[0]
    assert Path("runs/trl/model/config.json").exists()
    entry = raysvc.tokenize("job.yaml")
    rows = labelled(entry.uri)
    collate = trl.trainer.sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0)
    batch = collate([rows[number] for number in range(8)])
    for number in range(8):
        row = entry.row(number)
        expected = [place for place, one in enumerate(row["loss_mask"]) if one and place]
        assert torch.nonzero(batch["labels"][number] != -100).flatten().tolist() == expected
        assert batch["labels"][number][expected].tolist() == [row["input_ids"][at] for at in expected]
    assert_loss_is_of_targets_alone(trl, batch, tmp_path, sample["tokenizer"])


def test_no_script_is_written_for_pairs_nor_over_one_that_is_there(
    folder: Path, sample: dict[str, str]
) -> None:
    Path("pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    refused = write("trl", sample, "pairs.jsonl")
    assert (refused.exit_code, "these are preference" in refused.stderr) == (2, True), refused.output
    assert not Path("job.yaml").exists()
    Path("train_trl.py").write_text("mine")
    assert write("trl", sample).exit_code == 2
    assert (Path("train_trl.py").read_text(), Path("job.yaml").exists()) == ("mine", False)


def assert_loss_is_of_targets_alone(
    trl: Any, batch: dict[str, Any], folder: Path, tokenizer_folder: str
) -> None:
    """What `SFTTrainer` computes is the mean of -log p over the targets."""
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, **size)).eval()
    args = trl.SFTConfig(
        str(folder / "loss"), use_cpu=True, bf16=False, report_to="none",
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": [[1]], "labels": [[1]]})
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    trainer = trl.SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    labels = batch["labels"][:, 1:]
    logprobs = (
        model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].log_softmax(-1)
    )
    at_labels = logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    expected = -at_labels[labels != -100].mean()
    assert trainer.compute_loss(model, batch).item() == pytest.approx(expected.item(), rel=1e-5)
