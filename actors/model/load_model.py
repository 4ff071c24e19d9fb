"""Language models as workers load them: `tiny`, `tiny-vision`, a folder of this node, or a hub name.

This file imports neither torch nor transformers before a model is made.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysvc.actors.model.tiny_vision import TinyVision, tiny_vision_model
from raysvc.cache.local.model_digests import CONFIG, check_digests
from raysvc.chat.garbage import no_collection
from raysvc.errors import ConfigError

if TYPE_CHECKING:
    import torch

LARGE_VOCABULARY = 1 << 16
WEIGHTS = (".safetensors", ".bin", ".pt")  # endings of their files
MEDIA_MODELS = (  # `model_type` of those whose gradient on shards was compared with their own: tests/media/test_vision_gradients.py
    "idefics3",
    "internvl",
    "llava",
    "llava_next",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen2_audio",
    "qwen2_vl",
    "qwen3_vl",
    "smolvlm",
)


def load_lm(
    name: str,
    vocab_size: int,
    *,
    critic: bool = False,
    dtype: str = "float32",
    revision: str | None = None,
    where: str = "trainer.model",
    vision: TinyVision | None = None,
) -> torch.nn.Module:
    """A causal LM, or a token classifier of one label (a critic), in host memory.

    Args:
        name: `tiny`, `tiny-vision`, a folder, or a hub name.
        vocab_size: of the tokenizer; only the tiny ones use it.
        dtype: of the weights, whatever the files hold.
        revision: commit on the hub.
        where: key of the job, for messages.
        vision: of `tiny-vision`.

    Raises:
        ConfigError: the folder of the model is not on this node, or its configuration or weights cannot be read, are not what
            raysvc exported, or are not all there.
    """
    if name == "tiny":
        return tiny_model(vocab_size, critic)
    if vision is not None:
        return tiny_vision_model(tiny_sizes(vocab_size), vision)
    folder = Path(name).expanduser()
    check_folder(folder, name, where)
    check_digests(folder)
    with no_collection():
        from transformers import AutoModelForTokenClassification

        config, kind = read_config(name, where, revision), AutoModelForTokenClassification
        if not critic:
            kind = auto_class(config)
    more = {"num_labels": 1} if critic else {}
    try:
        model, found = kind.from_pretrained(
            str(folder), dtype=dtype, revision=revision, output_loading_info=True, **more
        )
    except Exception as error:
        raise _not_loaded(where, name, error) from error
    _check_all_there(model, found["missing_keys"], critic, where, name)
    return model


def check_folder(folder: Path, name: str, where: str) -> None:
    """Refuse the name of a folder that is not on this node.

    Raises:
        ConfigError: it is not.
    """
    if (folder.is_absolute() or name.startswith(".")) and not folder.is_dir():
        what = f"there is no folder {name} on {platform.node()}"
        raise ConfigError(where, what, "give one that every node sees, a hub name, or tiny")


def _check_all_there(model: Any, missing: Iterable[str], critic: bool, where: str, name: str) -> None:
    """Refuse weights that `transformers` filled with random numbers, but the head of a critic, which every other model lacks."""
    inside = f"{model.base_model_prefix}."
    lost = sorted(weight for weight in missing if not critic or weight.startswith(inside))
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        what = f"the files of {name!r} lack {', '.join(lost[:3])}{more}, which transformers would fill with random numbers"
        raise ConfigError(where, what, "give a folder with all weights that its config.json describes")


def read_config(name: str, where: str = "trainer.model", revision: str | None = None) -> Any:
    """The configuration of a model, as `AutoConfig` reads it.

    Args:
        name: a folder, or a hub name.
        where: key of the job, for messages.
        revision: commit on the hub.

    Raises:
        ConfigError: it is not there, or `transformers` does not take it.
    """
    from transformers import AutoConfig

    check_digests(Path(name).expanduser(), CONFIG)
    try:
        return AutoConfig.from_pretrained(str(Path(name).expanduser()), revision=revision)
    except Exception as error:  # noqa: BLE001  it is about the file, in as many types as there are rules for its fields
        raise _not_loaded(where, name, error) from None


def _not_loaded(where: str, name: str, error: Exception) -> ConfigError:
    said = _bad_file(Path(name).expanduser()) or " ".join(str(error).split())[:300] or type(error).__name__
    remedy = (
        "give tiny, a whole folder with config.json and weights, or a hub name that this machine can reach"
    )
    return ConfigError(where, f"{name!r} cannot be loaded ({said})", remedy)


def _bad_file(folder: Path) -> str:
    """Says which file of weights cannot be opened, and why; empty if all can be, or there are none."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            return f"{path.name}: {error}"
    return ""


def has_weights(name: str) -> bool:
    """Returns whether a folder holds files of weights."""
    return any(path.suffix in WEIGHTS for path in Path(name).expanduser().iterdir())


def num_weights(name: str) -> int | None:
    """Counts the weights in the files of a model by their heads; None where this machine has no safetensors of it, or cannot read them."""
    from safetensors import SafetensorError, safe_open

    count = 0
    for path in Path(name).expanduser().glob("*.safetensors"):
        try:
            with safe_open(path, framework="np") as file:
                count += sum(prod(file.get_slice(weight).get_shape()) for weight in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError):
            return None
    return count or None


def auto_class(config: Any) -> Any:
    """The class of `transformers` that reads a model: of media and text where its config has an encoder of images or audio."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    kinds = {"vision_config": AutoModelForImageTextToText, "audio_config": AutoModelForMultimodalLM}
    for name, kind in kinds.items():
        if hasattr(config, name) and type(config) in kind._model_mapping:
            return kind
    return AutoModelForCausalLM


def check_media_model(model_type: str) -> None:
    """Refuse a model that may need more than ids, positions and the arrays of media: it would train on something else, silently.

    Raises:
        ConfigError: it is not in `MEDIA_MODELS`.
    """
    if model_type not in MEDIA_MODELS:
        what = f"the rows have media, and {model_type} is not among the models that train on them"
        raise ConfigError("trainer.model", what, f"give tiny-vision, or one of {', '.join(MEDIA_MODELS)}")


def tiny_sizes(vocab_size: int) -> dict[str, int]:
    """Returns what `tiny` is made of: its width is 64, and 16 with one attention head under a large vocabulary, whose output
    layer is then most of what a step computes."""
    width = 64 if vocab_size < LARGE_VOCABULARY else 16
    return {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": width // 16,
        "num_key_value_heads": max(1, width // 32),
        "max_position_embeddings": 32768,
    }


def tiny_model(vocab_size: int, critic: bool = False) -> torch.nn.Module:
    """A randomly initialised Llama of two layers: big enough for its loss to fall, small enough to try on a CPU."""
    sizes = tiny_sizes(vocab_size)
    if not critic:
        from raysvc.actors.model.tiny_lm import TinyConfig, TinyLM

        return TinyLM(TinyConfig(**sizes))
    with no_collection():
        from transformers import LlamaConfig, LlamaForTokenClassification

    model: torch.nn.Module = LlamaForTokenClassification(LlamaConfig(**sizes, num_labels=1))
    return model
