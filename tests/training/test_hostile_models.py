"""Every file of an exported model, replaced by what would run, or cut: nothing runs, and one line says which model is not whole.

Its format is that of `transformers`, which has no digests: a flipped bit in a weight is not seen.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from raysvc.actors.model.load_model import load_lm
from raysvc.errors import ConfigError

from .test_damaged_checkpoints import harms

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("exported")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("file", [WEIGHTS, "config.json", "generation_config.json"])
def test_no_file_of_a_model_runs_and_one_that_is_not_whole_is_named(
    exported: Path, file: str, tmp_path: Path
) -> None:
    path, marker = exported / file, tmp_path / "it-ran"
    good, refused = path.read_bytes(), dict[str, str]()
    for what, bad in harms(good, marker, 2):
        path.unlink(missing_ok=True)
        if bad is not None:
            path.write_bytes(bad)
        try:
            load_lm(str(exported), 32)
        except ConfigError as error:
            refused[what] = str(error)
        assert not marker.exists(), what
    path.write_bytes(good)
    assert all(str(exported) in text and "\n" not in text for text in refused.values()), refused
    if file != "generation_config.json":  # transformers goes on without it
        assert set(refused) >= {
            "pickle",
            "a file of torch",
            "zip",
            "empty",
            "missing",
            "cut to 1",
            "cut to 9",
        }
    load_lm(str(exported), 32)


def test_weights_that_are_a_pickle_do_not_run(exported: Path, tmp_path: Path) -> None:
    marker, weights = tmp_path / "it-ran", exported / WEIGHTS
    good = weights.read_bytes()
    weights.unlink()
    for _, bad in list(harms(good, marker, 2))[:3]:
        (exported / "pytorch_model.bin").write_bytes(bad or b"")
        with pytest.raises(ConfigError, match="cannot be loaded"):
            load_lm(str(exported), 32)
        assert not marker.exists()
    (exported / "pytorch_model.bin").unlink()
    weights.write_bytes(good)
