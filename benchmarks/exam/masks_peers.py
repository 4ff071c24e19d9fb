"""Contestants of the exam of masks that find turns or write templates themselves: axolotl, tinker-cookbook and LLaMA-Factory.

Each is given a tokenizer's folder, the template's name and a row, and returns ids and a mask, or None where it has no template for that model, or no place for a row's reasoning.
"""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from transformers import AutoTokenizer

Answer = tuple[list[int], list[int]]  # ids and mask
MANY = 1 << 20  # tokens that a row may have
# who encodes a row in pieces needs the model's own tokenizer, which only Qwen's templates have here
TINKER = {
    "qwen3": "qwen3",
    "qwen3_instruct_2507": "qwen3_instruct",
    "qwen3_5_think": "qwen3_5",
    "qwen3_5_nothink": "qwen3_5_disable_thinking",
}
LLAMA_FACTORY = {
    "qwen2_5": "qwen",
    "qwen3": "qwen3",
    "qwen3_instruct_2507": "qwen3_nothink",
}
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def axolotl(folder: str, template: str, row: dict[str, Any]) -> Answer:
    made = _axolotl(folder).tokenize_prompt(row)
    return list(made["input_ids"]), [int(label >= 0) for label in made["labels"]]


@lru_cache(maxsize=1)
def _axolotl(folder: str) -> Any:
    """Its strategy with its defaults, and the end of turns as `eot_tokens`, as its documentation asks."""
    from axolotl.prompt_strategies.chat_template import load
    from axolotl.utils.dict import DictDefault

    hf = AutoTokenizer.from_pretrained(folder)
    config = {"sequence_len": MANY, "train_on_inputs": False, "chat_template": "tokenizer_default"}
    return load(hf, DictDefault({**config, "eot_tokens": _ends(hf)}), {})


def _ends(hf: Any) -> list[str] | None:
    """The control token right behind the last answer, where there is one."""
    said = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "answered"}]
    tail = hf.apply_chat_template(said, tokenize=False).rpartition("answered")[2].lstrip()
    ends = [str(token) for token in hf.added_tokens_decoder.values() if tail.startswith(str(token))]
    return [max(ends, key=len)] if ends else None


def tinker(folder: str, template: str, row: dict[str, Any]) -> Answer | None:
    from tinker_cookbook.renderers import TrainOnWhat, get_renderer
    from tinker_cookbook.third_party.openai_compat import openai_messages_to_tinker

    if template not in TINKER:
        return None
    renderer = get_renderer(TINKER[template], _as_qwen(folder))
    given = openai_messages_to_tinker([_with_texts(message) for message in row["messages"]])
    if row.get("tools"):
        tools = [tool.get("function", tool) for tool in row["tools"]]
        system = given.pop(0)["content"] if given[0]["role"] == "system" else ""
        given = [*renderer.create_conversation_prefix_with_tools(tools, system), *given]
    example, weights = renderer.build_supervised_example(given, TrainOnWhat.LAST_ASSISTANT_MESSAGE)
    return list(example.to_ints()), [int(weight > 0) for weight in weights.tolist()]


@lru_cache(maxsize=1)
def _as_qwen(folder: str) -> Any:
    """The tokenizer with the tokens of thoughts and tools as no special ones, which Qwen's own has, and its renderers count on."""
    path = Path(folder) / "tokenizer.json"
    before = path.read_text()
    told = json.loads(before)
    for token in told["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in PLAIN
    path.write_text(json.dumps(told))
    try:
        return AutoTokenizer.from_pretrained(folder)
    finally:
        path.write_text(before)


def _with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments as text, the form of OpenAI's API, which is what is converted."""
    calls = [
        {"type": "function", **call,
         "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
        for call in message.get("tool_calls") or ()
    ]  # fmt: skip
    return {**message, "tool_calls": calls} if calls else message


def llama_factory(folder: str, template: str, row: dict[str, Any]) -> Answer | None:
    if template not in LLAMA_FACTORY or any(one.get("reasoning_content") for one in row["messages"]):
        return None
    convert, encode = _llama_factory(folder, LLAMA_FACTORY[template])
    one = convert(
        {
            "messages": [*map(_tagged, row["messages"])],
            "tools": json.dumps(row["tools"], ensure_ascii=False) if row.get("tools") else "",
        }
    )
    if not one["_prompt"]:
        raise ValueError("it leaves the row out")
    ids, labels = encode(one["_prompt"], one["_response"], one["_system"], one["_tools"], [], [], [])
    return ids, [int(label >= 0) for label in labels]


def _tagged(message: dict[str, Any]) -> dict[str, Any]:
    """A message in the roles that its description of a data set names."""
    if calls := message.get("tool_calls"):
        return {
            "role": "function_call",
            "content": json.dumps([call["function"] for call in calls], ensure_ascii=False),
        }
    return {"role": message["role"].replace("tool", "observation"), "content": message.get("content") or ""}


@lru_cache(maxsize=1)
def _llama_factory(folder: str, template: str) -> tuple[Any, Any]:
    """Its converter of messages, and its encoder of a row."""
    for name in (
        "torchaudio",
        "llamafactory.data",
    ):  # sound is not tried; the rest of the room asks for an older TRL
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    place = find_spec("llamafactory").submodule_search_locations[0]  # type: ignore[union-attr,index]
    sys.modules["llamafactory.data"].__path__ = [f"{place}/data"]
    from llamafactory.data.converter import SharegptDatasetConverter
    from llamafactory.data.parser import DatasetAttr
    from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
    from llamafactory.data.template import get_template_and_fix_tokenizer

    hf = AutoTokenizer.from_pretrained(folder)
    data = SimpleNamespace(template=template, train_on_prompt=False, mask_history=False, cutoff_len=MANY, tool_format=None,
                           default_system=None, enable_thinking=True, preserve_thinking=False, media_dir=".")  # fmt: skip
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
            "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system"}  # fmt: skip
    about = DatasetAttr(
        load_from="file",
        dataset_name="rows",
        formatting="sharegpt",
        messages="messages",
        tools="tools",
        **tags,
    )
    fixed = get_template_and_fix_tokenizer(hf, data)
    encoder = SupervisedDatasetProcessor(template=fixed, tokenizer=hf, processor=None, data_args=data)
    return SharegptDatasetConverter(about, data), encoder._encode_data_example
