"""What is right for one row of the zoo, said by Hugging Face's own functions and by the row itself.

Nothing here calls our renderer. The oracles are `apply_chat_template` for the ids, the `{% generation %}` mask of the
template or of its marked twin for the mask, and the words of the row for what must and must not be trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from .zoo import Row


@dataclass(frozen=True)
class Truth:
    """What Hugging Face gives for one row, or why it gives nothing."""

    ids: list[int]
    text: str
    mask: list[int] | None = None
    refusal: str = ""


def clean(row: Row) -> Row:
    """JSON-string arguments as objects, the normal form that Hugging Face documents."""
    return _changed(row, _object)


def texts(row: Row) -> Row:
    """Object arguments as JSON text."""
    return _changed(
        row, lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )


def _changed(row: Row, change: Callable[[Any], Any]) -> Row:
    made = []
    for message in row["messages"]:
        if message.get("tool_calls"):
            calls = [
                {**call, "function": {**call["function"], "arguments": change(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
            message = {**message, "tool_calls": calls}
        made.append(message)
    return {**row, "messages": made}


def _object(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def truth(hf: Any, row: Row, marked: str = "") -> Truth:
    """The render of a row; with `marked`, also the mask by its marks, when that template renders the same text.

    Args:
        hf: the tokenizer.
        row: as its file has it.
        marked: a template with `{% generation %}`.
    """
    refusal = ""
    for given in (clean(row), texts(row)):  # DeepSeek-V3 takes arguments as text only
        try:
            ids = list(hf.apply_chat_template(given["messages"], tools=given.get("tools"), return_dict=False))
        except Exception as error:  # noqa: BLE001  a template may raise anything
            refusal = refusal or f"{type(error).__name__}: {error}".split("\n")[0][:80]
            continue
        return Truth(ids, hf.decode(ids), marked_mask(hf, given, marked, ids) if marked else None)
    return Truth([], "", None, refusal)


def marked_mask(hf: Any, row: Row, marked: str, ids: list[int]) -> list[int] | None:
    """Hugging Face's mask under our written rule; None when the marked template renders another text.

    The rule: what the generation prompt repeats is context, and so are blanks after the last special token of a mark, and a
    token over the beginning of a mark that has only blanks in it (no answer of the zoo begins with `.\\n`).
    """
    messages, tools = row["messages"], row.get("tools")
    try:
        both = hf.apply_chat_template(
            messages, tools=tools, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception:  # noqa: BLE001
        return None
    if list(both["input_ids"][: len(ids)]) != ids:  # GLM-4.5's twin adds the last stop token
        return None
    mask = list(both["assistant_masks"][: len(ids)])
    text, bounds = hf.decode(ids), _bounds(hf, ids)
    prompts = _prompts(hf, row, marked, text)
    special = {*hf.all_special_ids, *(n for n, token in hf.added_tokens_decoder.items() if token.special)}
    for start, end in runs(mask):
        begin = len(text.encode()[: bounds[start]].decode())
        behind = len(text[: begin + max(_repeated(prompt, text, begin) for prompt in prompts)].encode())
        mask[start:end] = [int(bound >= behind) for bound in bounds[start:end]]
        mask[start] &= hf.decode(ids[start : start + 1]) not in (".\n", "?\n")
        last = max((n for n in range(start, end) if ids[n] in special), default=end - 1)
        if not hf.decode(ids[last + 1 : end]).strip():
            mask[last + 1 : end] = [0] * (end - last - 1)
    return _with_result_openers(hf, ids, mask)


def _with_result_openers(hf: Any, ids: list[int], mask: list[int]) -> list[int]:
    """Gemma 4 stops a call by opening its result, and is trained to; TRL's marks leave that token out.

    In a template with marks it is trained only as the end of the row: a control token right after a mark, at the end of its block.
    """
    opener, marked = hf.convert_tokens_to_ids("<|tool_response>"), "endgeneration" in hf.chat_template
    for _, end in runs(mask):
        if end < len(ids) and ids[end] == opener and (end == len(ids) - 1 or not marked):
            mask[end] = 1
    return mask


def _bounds(hf: Any, ids: list[int]) -> list[int]:
    """Bytes before each token."""
    from raysvc.chat.tokens.token_bytes import bytes_of_tokens

    pieces, at, bounds = bytes_of_tokens(hf), 0, []
    for token in ids:
        bounds.append(at)
        at += len(pieces[token])
    return bounds


def _prompts(hf: Any, row: Row, marked: str, text: str) -> list[str]:
    """What the generation prompt writes before each answer."""
    made = [""]
    if "add_generation_prompt" not in marked:
        return made
    given = {"tools": row.get("tools"), "chat_template": marked, "tokenize": False}
    for place, message in enumerate(row["messages"]):
        if message["role"] != "assistant":
            continue
        before = row["messages"][:place]
        try:
            prompted = hf.apply_chat_template(before, add_generation_prompt=True, **given)
            bare = hf.apply_chat_template(before, **given)
        except Exception:  # noqa: BLE001
            continue
        size = _common(bare, text) if not prompted.startswith(bare) else len(bare)
        made += [prompted[size:], prompted[len(prompted.rstrip("\n")) - 24 :] if prompted == bare else ""]
    return made


def _repeated(prompt: str, text: str, begin: int) -> int:
    """Characters from `begin` that the prompt writes too, when what stands before them is the prompt's beginning."""
    for written in range(len(prompt), -1, -1):
        if text[:begin].endswith(prompt[:written]) or not written:
            end = begin
            for piece in re.findall(r"<[^<>\s]{1,40}>|\s|\w+|.", prompt[written:]):
                if not text.startswith(piece, end):
                    break
                end += len(piece)
            return end - begin if text[begin - written : end].strip() else 0
    return 0


def _common(left: str, right: str) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


def runs(mask: list[int]) -> list[tuple[int, int]]:
    """[start, end) of each run of ones."""
    made, at = [], 0
    for bit, run in groupby(mask):
        size = len(list(run))
        if bit:
            made.append((at, at + size))
        at += size
    return made


def own_words(message: Row) -> list[str]:
    """Words of a message that a template must show: its answer, and names and values of its calls."""
    content = message.get("content") or ""
    words = [content.split("</think>")[-1].strip()]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        words.append(function["name"])
        words += [str(value) for value in _object(function["arguments"]).values() if str(value).isalnum()]
    return [word for word in words if word]


def reasoning(message: Row) -> str:
    """Reasoning of a message, however it is given."""
    content = message.get("content") or ""
    inside = content.split("</think>")[0].split("<think>")[-1] if "</think>" in content else ""
    return str(message.get("reasoning_content") or inside).strip()


def refusal_is_right(row: Row, found: Truth) -> str:
    """Why a row may be refused: the template raises, or does not show what the row says; else empty."""
    if found.refusal:
        return found.refusal
    missing = [
        w for m in row["messages"] if m["role"] == "assistant" for w in own_words(m) if w not in found.text
    ]
    return f"the render does not show {missing[0]!r}" if missing else ""


def faults(hf: Any, row: Row, places: list[int], found: Truth, ids: list[int], mask: list[int]) -> list[str]:
    """What is wrong with a written row; empty when nothing is."""
    if ids != found.ids:
        return ["ids differ from apply_chat_template"]
    messages = row["messages"]
    wrong = []
    every = len(places) == sum(m["role"] == "assistant" for m in messages)
    if found.mask is not None and every and mask != found.mask:
        wrong.append("mask differs from the marks")
    said = [hf.decode(ids[a:b]) for a, b in runs(mask)]
    trained = "\n".join(said)
    context = "\n".join(hf.decode(list(run)) for run in _others(ids, mask))
    for place, message in enumerate(messages):
        if message["role"] == "assistant" and place in places:
            wrong += [f"not trained: {word!r}" for word in own_words(message) if word not in trained]
            thought = reasoning(message)
            if thought and thought in context and thought not in trained:
                wrong.append(f"reasoning is context: {thought!r}")
        elif message["role"] != "assistant" and message["content"].strip() in trained:
            wrong.append(f"trained: {message['content']!r} of {message['role']}")
        elif message["role"] == "assistant" and message["content"] and message["content"].strip() in trained:
            wrong.append(f"trained: another message {message['content']!r}")
    return wrong


def _others(ids: list[int], mask: list[int]) -> list[list[int]]:
    return [ids[a:b] for a, b in runs([1 - bit for bit in mask])]
