"""One contestant of the exam of masks, in a process of its own: `python masks_play.py CONTESTANT ASKED.json ANSWERS.json`."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

Answer = tuple[list[int], list[int]]  # ids and mask


class Contestant(NamedTuple):
    """Package, how it is used, whether it trains the last answer alone, and what its environment needs."""

    package: str
    how: str
    last_only: bool = False
    needs: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def hf_of(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def parsed(row: dict[str, Any]) -> dict[str, Any]:
    """Arguments as objects, the form that Hugging Face documents; as text where the template takes no other (`as_text`)."""
    row = copy.deepcopy(row)
    for message in row["messages"]:
        for call in message.get("tool_calls") or ():
            given = call["function"]["arguments"]
            if isinstance(given, str) and not row.get("as_text"):
                call["function"]["arguments"] = json.loads(given)
            elif not isinstance(given, str) and row.get("as_text"):
                call["function"]["arguments"] = json.dumps(given, ensure_ascii=False)
    return row


def raysvc(folder: str, template: str, row: dict[str, Any]) -> Answer:
    from raysvc.chat.source.json_rows import SourceRow

    result = _raysvc(folder).run([SourceRow(0, copy.deepcopy(row))])
    if not result.table.num_rows:
        raise ValueError(str(result.examples[0]) if result.examples else "dropped")
    return result.table["input_ids"][0].as_py(), result.table["loss_mask"][0].as_py()


@lru_cache(maxsize=1)
def _raysvc(folder: str) -> Any:
    from datetime import date

    from raysvc.chat.slice_tokenizer import SliceTokenizer
    from raysvc.job.config import TextSpec, TokenizerConfig

    config = TokenizerConfig(name=folder, date=date.today())
    return SliceTokenizer(TextSpec(tokenizer=config, train_on="all_assistant_messages"))


def transformers(folder: str, template: str, row: dict[str, Any], text: str | None = None) -> Answer:
    row = parsed(row)
    both = hf_of(folder).apply_chat_template(
        row["messages"], tools=row.get("tools"), chat_template=text, return_dict=True, return_assistant_tokens_mask=True
    )  # fmt: skip
    if 1 not in both["assistant_masks"]:
        raise ValueError("no token is trained")  # as TRL says; transformers warns
    return list(both["input_ids"]), list(both["assistant_masks"])


def trl(folder: str, template: str, row: dict[str, Any]) -> Answer:
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    hf = hf_of(folder)
    text = None if has_generation_markers(hf.chat_template) else get_training_chat_template(hf)
    return transformers(folder, template, row, text)


def trl_completion(folder: str, template: str, row: dict[str, Any]) -> Answer:
    from trl.data_utils import common_prefix_length

    row, hf = parsed(row), hf_of(folder)
    if row["messages"][-1]["role"] != "assistant":
        raise ValueError("the last message is not the assistant's")
    given = {"tools": row.get("tools"), "return_dict": False}
    prompt = hf.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, **given)
    ids = list(hf.apply_chat_template(row["messages"], **given))
    start = common_prefix_length(prompt, ids)
    return ids, [0] * start + [1] * (len(ids) - start)


def skyrl(folder: str, template: str, row: dict[str, Any]) -> Answer:
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # it needs 3.12's
    from skyrl.train.sft_trainer import tokenize_chat_example

    made = tokenize_chat_example(
        parsed(row), hf_of(folder), train_on_what="all_assistant_messages", max_length=1 << 20
    )
    if not made:
        raise ValueError("it leaves the row out")
    ids, tail = list(made["input_ids"]), list(made["loss_mask"])
    return ids, [0] * (len(ids) - len(tail)) + [int(bit) for bit in tail]


CONTESTANTS = {
    "raysvc": Contestant("raysvc", "train_on: all_assistant_messages"),
    "transformers": Contestant("transformers", "return_assistant_tokens_mask; a mask without a one counts as refused"),
    "trl": Contestant("trl", "assistant_only_loss: get_training_chat_template where the template has no marks"),
    "trl_completion": Contestant("trl", "prompt and completion: what follows the common prefix", last_only=True),
    "skyrl": Contestant("skyrl", "tokenize_chat_example, train_on_what=all_assistant_messages", needs=("skyrl==0.3.0",)),
    "axolotl": Contestant("axolotl", "chat_template strategy, its defaults, eot_tokens: the end of turns", needs=("axolotl",)),
    "tinker": Contestant("tinker-cookbook", "build_supervised_example, LAST_ASSISTANT_MESSAGE, renderers of four models", last_only=True, needs=("tinker-cookbook", "tinker", "tml-renderers")),
    "llama_factory": Contestant("llamafactory", "SupervisedDatasetProcessor, formatting: sharegpt, templates of three models; rows of a reasoning key are not offered", needs=("llamafactory",)),
}  # fmt: skip


def _answer_of(name: str) -> Callable[[str, str, dict[str, Any]], Answer | None]:
    if name in globals():
        return globals()[name]  # type: ignore[no-any-return]
    import masks_peers

    return lambda folder, template, row: getattr(masks_peers, name)(folder, template, parsed(row))


def main(name: str, spec: str, out: str) -> None:
    made: dict[str, Any] = {
        "version": f"{CONTESTANTS[name].package} {importlib.metadata.version(CONTESTANTS[name].package)}"
    }
    answer: Callable[[str, str, dict[str, Any]], Answer | None] = _answer_of(name)
    for number, one in enumerate(json.loads(Path(spec).read_text())):
        try:
            row = one["row"] if name == "raysvc" else {**one["row"], "as_text": one["as_text"]}
            given = answer(one["folder"], one["template"], row)
            made[str(number)] = {"ids": given[0], "mask": given[1]} if given else {"not_offered": True}
        except Exception as error:  # noqa: BLE001 - what a contestant says is what is looked at
            made[str(number)] = {"refused": f"{type(error).__name__}: {error}"[:300]}
    Path(out).write_text(json.dumps(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
