"""What we assume of torch, safetensors and the trainer of `transformers`, held against them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}
KINDS = [
    "LlamaConfig",
    "Qwen2Config",
    "Qwen3Config",
    "Gemma3TextConfig",
    "Olmo2Config",
    "CohereConfig",
    "PhiConfig",
]
KINDS += ["GPT2Config", "MambaConfig"]
CRITICS = ["LlamaConfig", "Qwen3Config", "GPT2Config"]
BOTH = [(kind, False) for kind in KINDS] + [(kind, True) for kind in CRITICS]


@pytest.mark.parametrize(("kind", "critic"), BOTH)
def test_weight_decay_leaves_out_what_the_trainer_of_transformers_leaves_out(kind: str, critic: bool) -> None:
    """`Trainer.get_decay_parameter_names` needs no trainer, and leaves out biases, layer norms and names of norms."""
    from raysvc.actors.model.token_model import TokenModel
    from raysvc.actors.worker.adamw import decay_groups

    config = getattr(transformers, kind)(**({} if kind == "GPT2Config" else SMALL))
    if kind == "GPT2Config":
        config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)
    of = transformers.AutoModelForTokenClassification if critic else transformers.AutoModelForCausalLM
    lm = of.from_config(config)
    names = transformers.Trainer.get_decay_parameter_names(None, lm)
    expected = {id(weight) for name, weight in lm.named_parameters() if name in names}
    decayed, never = decay_groups(TokenModel(lm, critic), 0.1)
    assert {id(weight) for weight in decayed["params"]} == expected
    assert {id(weight) for weight in never["params"]} == {id(w) for w in lm.parameters()} - expected
    assert expected, "some weights decay"
    assert never["params"], "and some do not"
    assert (decayed["weight_decay"], never["weight_decay"]) == (0.1, 0.0)


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_safetensors_reads_what_we_write_bit_by_bit_in_every_dtype(tmp_path: Path) -> None:
    """The format is a length, a JSON header and the tensors one after the other, and these are its names of dtypes."""
    from safetensors.torch import load_file

    from raysvc.actors.model.tensor_file import DTYPES, write_tensors

    made: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        for shape in ((3, 5), (), (0, 4), (7,)):
            made[f"{name} {shape}"] = torch.randint(0, 2, shape).to(dtype)
    made["view"] = torch.arange(12.0).reshape(3, 4).t()
    write_tensors(tmp_path / "file", made)
    found = load_file(tmp_path / "file")
    assert found.keys() == made.keys()
    for name, tensor in made.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_safetensors_refuses_a_file_with_holes(tmp_path: Path) -> None:
    """So header and tensors together are the whole file, and a digest of each covers every byte."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    place = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
    header = json.dumps({"a": place, "b": {**place, "data_offsets": [4, 6]}}).encode()
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + bytes(6))
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "file")


def test_the_reader_of_torchs_own_checkpoints_runs_what_lies_in_them(tmp_path: Path) -> None:
    """Why raysvc does not use it; when this fails, torch may do."""
    from torch.distributed.checkpoint import FileSystemReader

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "it-ran")))
    with pytest.raises(Exception):  # noqa: B017  what it says of it is its own
        FileSystemReader(tmp_path).read_metadata()
    assert (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_transformers_runs_nothing_that_lies_in_the_folder_of_a_model(tmp_path: Path, name: str) -> None:
    """It reads `.bin` with `weights_only`, and what is called safetensors as that."""
    config = transformers.LlamaConfig(**SMALL)
    config.save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(pickle.dumps(Runs(tmp_path / "it-ran")))
    torch.save(Runs(tmp_path / "it-ran"), tmp_path / f"zip-{name}")
    for file in (tmp_path / name, tmp_path / f"zip-{name}"):
        file.rename(tmp_path / name)
        with pytest.raises(Exception):  # noqa: B017
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert not (tmp_path / "it-ran").exists()


def test_an_optimizer_takes_state_by_index_and_keeps_its_settings(tmp_path: Path) -> None:
    """`load_state_dict` gives each value the dtype of its weight, but leaves `step` float32; a weight without state has none."""
    weights = [torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights, lr=0.5, weight_decay=0.1)
    of_first = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {0: of_first}, "param_groups": [{**groups[0], "lr": 0.25}]})
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    state = optimizer.state[weights[0]]
    assert (state["exp_avg"].dtype, state["step"].dtype) == (torch.float64, torch.float32)
    assert weights[1] not in optimizer.state
