"""Synthetic sample data: chat rows, a small tokenizer with a chat template, and a job on them.

Always true:
- the same arguments give the same bytes;
- rows of every kind are there: single-turn, multi-turn, with a system prompt, with tool calls.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NAMES = ("Ada", "Bo", "Chen", "Dora", "Emil", "Fay", "Goran", "Hana")
THINGS = ("apples", "books", "cups", "drums", "eggs", "forks", "gloves", "hats")
CITIES = ("Lima", "Oslo", "Kyoto", "Accra", "Turin", "Quito", "Porto", "Hanoi")
WEATHER = ("sunny", "rainy", "windy", "foggy", "cloudy")

TEMPLATE_FILE = files("raysvc.cli").joinpath(
    "chatml.jinja"
)  # with tools; the generation marks say what an assistant wrote
TEMPLATE = TEMPLATE_FILE.read_text().removesuffix("\n")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def chat_rows(num_rows: int, seed: int = 0) -> Iterable[Row]:
    """Chat rows with `messages`, and `tools` where a tool is called."""
    rng = random.Random(seed)
    makers = (_sum, _talk, _poet, _weather)
    for number in range(num_rows):
        yield makers[number % len(makers)](rng)


def write_rows(path: Path, num_rows: int, seed: int = 0) -> Path:
    """Write chat rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in chat_rows(num_rows, seed)))
    return path


def write_tokenizer(
    folder: Path,
    texts: Iterable[str],
    vocab_size: int = 1024,
    template: str = TEMPLATE,
    special: tuple[str, ...] = (),
) -> Path:
    """Train a byte-level BPE tokenizer on some texts and save it with a chat template; `special`: further tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *special]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False
        ),
    )
    facts = {
        "backend": "tokenizers",
        "eos_token": "<|im_end|>",
        "model_max_length": 32768,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "TokenizersBackend",
    }
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=2))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def write_job(folder: Path, num_rows: int, **sections: dict[str, Any]) -> Path:
    """Write rows, tokenizer and a `job.yaml`; returns the path of the last.

    Args:
        sections: merged over the job's own, e.g. `plan={"batch_size": 8}`.
    """
    import yaml

    rows = write_rows(folder / "rows.jsonl", num_rows)
    tokenizer = write_tokenizer(folder / "tokenizer", row_texts(chat_rows(400)))
    job: dict[str, Any] = {
        "source": {"path": str(rows), "format": "chat"},
        "tokenizer": str(tokenizer),
        "train_on": "all_assistant_messages",
    }
    for name, section in sections.items():
        job[name] = {**job.get(name, {}), **section}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False))
    return path


def row_texts(rows: Iterable[Row]) -> Iterable[str]:
    """Returns what a row says, for training a tokenizer."""
    for row in rows:
        for message in row["messages"]:
            yield f"{message['role']}\n{message['content']}"
        if "tools" in row:
            yield json.dumps(row["tools"])


def _sum(rng: random.Random) -> Row:
    name, thing, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 60), rng.randint(2, 39)
    question = f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have?"
    return _row(("user", question), ("assistant", f"{a} + {b} = {a + b}. {name} has {a + b} {thing}."))


def _talk(rng: random.Random) -> Row:
    turns: list[tuple[str, str]] = []
    for _ in range(rng.randint(2, 4)):
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        turns += [("user", f"And {a} times {b}?"), ("assistant", f"{a} times {b} is {a * b}.")]
    return _row(*turns)


def _poet(rng: random.Random) -> Row:
    name, thing, city = rng.choice(NAMES), rng.choice(THINGS), rng.choice(CITIES)
    answer = f"{name} went down to {city} town, with {thing} of red and {thing} of brown."
    return _row(
        ("system", "You answer in one rhyme."), ("user", f"{name}, {thing}, {city}!"), ("assistant", answer)
    )


def _weather(rng: random.Random) -> Row:
    city, sky, degrees = rng.choice(CITIES), rng.choice(WEATHER), rng.randint(-5, 35)
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}}
    row = _row(("user", f"How is {city} today?"))
    row["messages"] += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": json.dumps({"sky": sky, "celsius": degrees})},
        {"role": "assistant", "content": f"It is {sky} in {city}, at {degrees} degrees."},
    ]
    return {**row, "tools": TOOLS}


def _row(*turns: tuple[str, str]) -> Row:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}
