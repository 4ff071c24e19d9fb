"""Templates, tokenizers and rows for the zoo: every template times every kind of row.

Templates are TRL's, as installed (pairs of plain and marked), and families written out here where TRL has none.
A tokenizer is a small byte-level BPE with the special tokens that its template names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from .conftest import byte_level, save
from .zoo_families import FAMILIES

Row = dict[str, Any]
_TOKENS = re.compile(
    r"<\|[^|<>\s]+\|>|<｜[^｜<>]+｜>|<\|[a-z_\"]+>|<[a-z_]+\|>|</?think>|</?tool_call>|<(?:start|end)_of_[a-z]+>|\[/?[A-Z_]{3,}\]|\[gMASK\]|<sop>|</?s>"
)
_ROLES = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "gemma": ("<bos>", "<end_of_turn>"),
    "gemma4": ("<bos>", "<turn|>"),
    "diffusion": ("<bos>", "<turn|>"),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "glm4moe": ("", "<|endoftext|>"),
    "gptoss": ("<|startoftext|>", "<|return|>"),
    "muse": ("<|begin_of_text|>", "<|eot|>"),
    "phi3": ("<s>", "<|endoftext|>"),
    "llava": ("<s>", "</s>"),
    "idefics3": ("<|begin_of_text|>", "<end_of_utterance>"),
    "smolvlm": ("<|im_start|>", "<end_of_utterance>"),
}
FIRST_TIER = {  # one template of each family
    "cohere2_training",
    "command_r7b",
    "deepseek_r1_distill_training",
    "deepseekv3",
    "diffusion_gemma",
    "gemma3",
    "gemma4_v5",
    "glm4moe",
    "gptoss_training",
    "granite3",
    "idefics3",
    "kimi_k2",
    "lfm2_v2_training",
    "llama2",
    "llama3_training",
    "llava_next",
    "mistral_v3",
    "muse_glimmer",
    "nemotron_3_nano_training",
    "olmo2",
    "phi3_5",
    "qwen2_5_vl",
    "qwen3_training",
    "qwen3_8",
    "smollm3",
    "smolvlm_training",
}
ONLY_PARTS = ("idefics3", "llava_next", "smolvlm")  # take contents apart by letters, or refuse texts


@dataclass(frozen=True)
class Template:
    """One template of the zoo; `marked` is the same family with `{% generation %}`, where there is one."""

    name: str
    text: str
    marked: str = ""
    roles: tuple[str, str] = ("<s>", "</s>")
    stops: tuple[str, ...] = field(default=())

    @property
    def tokens(self) -> list[str]:
        """Special tokens of this family."""
        found = dict.fromkeys(_TOKENS.findall(self.text + self.marked))
        return [token for token in dict.fromkeys([*self.roles, *found]) if token]


def in_tiers(names: Iterable[str]) -> list[Any]:
    """Parameters of a test of these templates: one of each family is in the first tier, the others are in the second."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in FIRST_TIER)) for name in names]


def trl_folder() -> Path | None:
    """Where TRL's templates lie, None when it is not installed."""
    spec = find_spec("trl")
    folder = Path(spec.origin).parent / "chat_templates" if spec and spec.origin else None
    return folder if folder is not None and folder.is_dir() else None


def zoo() -> list[Template]:
    """All templates by name: TRL's plain and marked ones, and ours."""
    folder = trl_folder()
    files = {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))} if folder else {}
    made = []
    for name, text in files.items():
        family = name.removesuffix("_training")
        pair = files.get(f"{family}_training", "") if family == name else files.get(family, "")
        made.append(Template(name, text, pair, _roles_of(name)))
    made += [Template(name, text, "", roles) for name, (text, roles) in FAMILIES.items()]
    return made


def _roles_of(name: str) -> tuple[str, str]:
    fitting = [prefix for prefix in _ROLES if name.startswith(prefix)]
    return _ROLES[max(fitting, key=len)] if fitting else ("<|endoftext|>", "<|im_end|>")


@lru_cache(maxsize=1)
def _base() -> str:
    return str(byte_level([]).to_str())


def tokenizer_folder(template: Template, folder: Path, more: Iterable[str] = (), special: bool = True) -> str:
    """A folder with a tokenizer of this template.

    Args:
        more: texts of further added tokens, which are not special.
        special: whether the template's own tokens are; those of `roles` always are.
    """
    from tokenizers import AddedToken, Tokenizer

    backend = Tokenizer.from_str(_base())
    own = [AddedToken(t, normalized=False, special=special) for t in template.tokens]
    backend.add_special_tokens(own) if special else backend.add_tokens(own)
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in more])
    bos, eos = template.roles
    roles = {"eos_token": eos} | ({"bos_token": bos} if bos else {})
    return save(folder, backend, template.text, **roles)


U, A, S, T = "user", "assistant", "system", "tool"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name."},
                "days": {"type": "integer", "description": "How many."},
            },
            "required": ["city"],
        },
    },
}


def say(role: str, content: str, **fields: Any) -> Row:
    """One message."""
    return {"role": role, "content": content, **fields}


def as_taken(template: Template, row: Row) -> Row:
    """The row as Hugging Face must be given it: each text a content part, for a template that takes nothing else."""
    return in_parts(row) if template.name.startswith(ONLY_PARTS) else row


def in_parts(row: Row) -> Row:
    """The same row, each text a content part."""
    messages = [
        {**message, "content": [{"type": "text", "text": message["content"]}]} for message in row["messages"]
    ]
    return {**row, "messages": messages}


def _call(number: int, arguments: Any, name: str = "get_weather") -> Row:
    return {
        "id": f"callid{number:03d}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _tool_row(as_text: bool) -> Row:
    def arguments(value: Row) -> Any:
        return json.dumps(value) if as_text else value

    one = _call(1, arguments({"city": "Oslo", "days": 3}))
    two = _call(2, arguments({"days": 1, "city": 'São "P" <x> & c'}))
    messages = [
        say(U, "weather in Oslo?"),
        say(A, "", tool_calls=[one]),
        say(T, "rain all day", tool_call_id="callid001", name="get_weather"),
        say(A, "Rain it is. And there?"),
        say(U, "Yes please, there too."),
        say(A, "", tool_calls=[two]),
        say(T, "sunny and dry", tool_call_id="callid002", name="get_weather"),
        say(A, "Sun, then."),
    ]
    return {"messages": messages, "tools": [TOOL]}


def _rollout(user: str) -> Row:
    """One question, and several calls before the answer."""
    messages = [say(S, "You book flights."), say(U, user)]
    for number in range(3):
        name = f"callid{number:03d}"
        messages.append(
            say(
                A,
                "",
                reasoning_content=f"step {number} of my plan",
                tool_calls=[_call(number, {"city": f"C{number}", "days": number})],
            )
        )
        messages.append(say(T, f"result {number} is in", tool_call_id=name, name="get_weather"))
    messages.append(say(A, "All three are booked.", reasoning_content="that was the last one"))
    return {"messages": messages, "tools": [TOOL]}


ROWS: dict[str, list[Row]] = {
    "plain": [
        {"messages": [say(U, "hello, what is 2 + 2?"), say(A, "It is 4.")]},
        {"messages": [say(U, "one line\n\nand more"), say(A, "First.\n\n- a\n- b {x} [y]\nlast line")]},
    ],
    "alternating": [
        {"messages": [say(U, "hello"), say(A, "Hi there!"), say(U, "and 3 + 3?"), say(A, "6, of course.")]},
        {"messages": [say((U, A)[n % 2], f"turn number {n} of six") for n in range(6)]},
    ],
    "system": [
        {
            "messages": [
                say(S, "Be brief and kind."),
                say(U, "hello"),
                say(A, "Hi!"),
                say(U, "bye"),
                say(A, "So long."),
            ]
        },
    ],
    "tools, objects": [_tool_row(False)],
    "tools, strings": [_tool_row(True)],
    "reasoning key": [
        {"messages": [say(U, "2 + 2?"), say(A, "It is 4.", reasoning_content="two and two make four")]},
        {
            "messages": [
                say(U, "2 + 2?"),
                say(A, "It is 4.", reasoning_content="two and two make four"),
                say(U, "and 5 + 5?"),
                say(A, "Ten, I think.", reasoning_content="five twice is ten"),
            ]
        },
    ],
    "<think> in content": [
        {
            "messages": [
                say(U, "2 + 2?"),
                say(A, "<think>\ntwo and two make four\n</think>\n\nIt is 4."),
                say(U, "and 5 + 5?"),
                say(A, "<think>\nfive twice is ten\n</think>\n\nTen, I think."),
            ]
        },
    ],
    "rollouts": [_rollout("Book me three flights.")],
}
