"""What a run leaves to others: `raysvc export` on a checkpoint, read back by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from raysvc.actors.worker.torch_worker import CausalLMWorker, ModelSpec
from raysvc.cli.main import app
from raysvc.job.config import TokenizerConfig
from raysvc.training.run_folder import RunFolder

TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"


def trained(vocab_size: int, model: str = "tiny", role: Any = "policy") -> CausalLMWorker:
    """A worker after an optimizer step with random gradients."""
    spec = ModelSpec(
        model=model, vocab_size=vocab_size, learning_rate=1e-2, weight_decay=0.0, max_grad_norm=None,
        loss="token_mean", seed=0, role=role,
    )  # fmt: skip
    worker = CausalLMWorker(0, 1, "cpu", spec.model_dump_json())
    worker.setup("")
    for parameter in worker.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    worker.optim_step()
    return worker


def save(run: RunFolder, worker: CausalLMWorker, step: int) -> None:
    folder = run.new_checkpoint(step)
    worker.save_checkpoint(str(folder))
    run.publish(folder, {})


@pytest.fixture
def job(tmp_path: Path, sample: dict[str, str]) -> Path:
    """A job of which `<tmp_path>/run` is the run folder, with a template of its own."""
    path = tmp_path / "job.yaml"
    sections = {
        "source": {"path": sample["rows"]},
        "tokenizer": {"name": sample["tokenizer"], "chat_template": TEMPLATE},
        "trainer": {"run_dir": str(tmp_path / "run")},
    }
    path.write_text(yaml.safe_dump(sections))
    return path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["export", *arguments])


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def trap(*_: object, **__: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("ray.init", trap)


def test_an_exported_checkpoint_gives_the_logits_and_tokens_of_the_run(
    tmp_path: Path, job: Path, no_ray: None
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids_BL = torch.arange(40).reshape(2, 20)
    logits = []
    worker = trained(512)
    for step in (3, 7):
        worker.model.eval()
        with torch.no_grad():
            logits.append(worker.model.lm(input_ids=ids_BL).logits)
        save(RunFolder(tmp_path / "run"), worker, step)
        for parameter in worker.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        worker.optim_step()
    assert not torch.equal(*logits)
    for options, expected, step in (([], logits[1], 7), (["--step", "3"], logits[0], 3)):
        out = tmp_path / f"model-{step}"
        result = run("-c", str(job), *options, "--out", str(out), "--json")
        assert result.exit_code == 0, result.output
        assert "Writing model shards" not in result.output, "a bar of transformers, where no terminal is"
        assert json.loads(result.stdout.splitlines()[-1]) == {"model": str(out), "step": step}
        lm = AutoModelForCausalLM.from_pretrained(out).eval()
        with torch.no_grad():
            assert torch.equal(lm(input_ids=ids_BL).logits, expected)
        assert lm.lm_head.weight is lm.model.embed_tokens.weight
        tokenizer = AutoTokenizer.from_pretrained(out)
        messages = [{"role": "user", "content": "How far?"}]
        assert tokenizer.apply_chat_template(messages, tokenize=False) == "[user] How far?\n"
        source = AutoTokenizer.from_pretrained(yaml.safe_load(job.read_text())["tokenizer"]["name"])
        assert tokenizer.encode("Grün 12 <|im_end|>") == source.encode("Grün 12 <|im_end|>")


def test_an_exported_checkpoint_of_a_reward_model_gives_its_values(tmp_path: Path, job: Path) -> None:
    from transformers import AutoModelForTokenClassification

    worker, ids_BL = trained(512, role="critic"), torch.arange(40).reshape(2, 20)
    save(RunFolder(tmp_path / "run"), worker, 3)
    result = run("-c", str(job), "--out", str(tmp_path / "model"))
    assert result.exit_code == 0, result.output
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        expected = worker.model.eval().lm(input_ids=ids_BL).logits
        assert torch.equal(critic(input_ids=ids_BL).logits, expected)


def test_a_model_in_bfloat16_stays_in_it(tmp_path: Path, job: Path) -> None:
    from transformers import AutoModelForCausalLM

    worker = trained(64)
    worker.model.to(torch.bfloat16)
    worker.optimizer = None
    save(RunFolder(tmp_path / "run"), worker, 1)
    assert run("-c", str(job), "--out", str(tmp_path / "out")).exit_code == 0
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert lm.dtype == torch.bfloat16
    assert trained(64, model=str(tmp_path / "out")).model.lm.dtype == torch.float32  # what trains is wide
    for name, weight in worker.model.lm.state_dict().items():
        assert torch.equal(lm.state_dict()[name], weight), name


def broken(folder: Path, job: Path, worker: Callable[[], CausalLMWorker]) -> None:
    """A checkpoint whose configuration is of another model."""
    save(RunFolder(folder / "run"), worker(), 2)
    (path,) = folder.glob("run/checkpoints/*/config.json")
    path.write_text(path.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))


def test_mistakes_are_one_line(tmp_path: Path, job: Path) -> None:
    def refused(code: int, *arguments: str) -> str:
        result = run("-c", str(job), *arguments)
        assert result.exit_code == code
        assert result.stderr.count("\n") == 1
        return str(result.stderr)

    out = str(tmp_path / "out")
    assert "has no checkpoint; train first" in refused(2, "--out", out).replace(" (", "; ")
    broken(tmp_path, job, lambda: trained(64))
    assert "no checkpoint 9, but 2" in refused(2, "--out", out, "--step", "9")
    assert "config.json: is damaged; restore it" in refused(2, "--out", out)
    assert not Path(out).exists()
    assert "not empty" in refused(2, "--out", str(tmp_path))
    assert not list(tmp_path.glob(".*"))


def test_an_earlier_checkpoint_is_exported_also_where_the_newest_which_names_the_best_is_damaged(
    tmp_path: Path, job: Path
) -> None:
    sections = yaml.safe_load(job.read_text())
    best = {"keep_best": {"eval": "held"}, "eval_every_steps": 2}
    job.write_text(
        yaml.safe_dump(
            {**sections, "evals": {"held": {"share": 0.1}}, "trainer": {**sections["trainer"], **best}}
        )
    )
    for step in (2, 4):
        save(RunFolder(tmp_path / "run"), trained(64), step)
    (newest,) = tmp_path.glob("run/checkpoints/step-00000004.*/state.json")
    newest.write_bytes(newest.read_bytes()[:-1])
    refused = run("-c", str(job), "--out", str(tmp_path / "out"))
    assert refused.exit_code == 2
    assert "state.json: is not the JSON that was written" in refused.stderr
    assert "restore it, or export the one before: --step 2" in refused.stderr
    taken = run("-c", str(job), "--step", "2", "--out", str(tmp_path / "out"))
    assert (taken.exit_code, taken.stdout) == (0, f"model of step 2: {tmp_path / 'out'}\n")


def test_a_tokenizer_that_is_loaded_beside_the_training_saves_what_one_loaded_at_the_end_does(
    tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from raysvc.training import export

    config = TokenizerConfig(name=sample["tokenizer"], chat_template=TEMPLATE)
    may_load, load = threading.Event(), export.tokenizer_of

    def late(config: TokenizerConfig) -> Callable[[Path], None]:
        assert may_load.wait(60)
        return load(config)

    monkeypatch.setattr(export, "tokenizer_of", late)
    beside = export.tokenizer_beside(config)  # returns while nothing is loaded
    may_load.set()
    for name, save_files in (("beside", beside), ("at-the-end", load(config))):
        (tmp_path / name).mkdir()
        save_files(tmp_path / name)
    files = {
        name: {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("beside", "at-the-end")
    }
    assert files["beside"] == files["at-the-end"]
    assert "chat_template.jinja" in files["beside"]

    def broken(config: TokenizerConfig) -> Callable[[Path], None]:
        raise MemoryError("no room")

    monkeypatch.setattr(export, "tokenizer_of", broken)
    with pytest.raises(MemoryError, match="no room"):
        export.tokenizer_beside(config)(tmp_path)
