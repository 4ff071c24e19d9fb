"""The exam of masks: every template of the tests' zoo, TRL's among them, times every kind of row, in everybody's hands.

    python benchmarks/exam/masks.py [CONTESTANT …] [TEMPLATE …]

Each contestant makes ids and a mask of every row, in a process and an environment of its own (`masks_play.py`). The judge is
that of our tests (`tests/chat/zoo_judge.py`), without our rule and without marks: ids are those of `apply_chat_template`, words of the
assistant are trained, words of others are not, and a control token that ends the last answer is trained. A refusal is right where
the template refuses the row, or does not show it. Blanks at the end of a row may be left out. Tokens are bytes and the template's own; for Qwen's templates, where its tokenizer lies
beside the checkout, those of Qwen2.5.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import types
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import show
from masks_play import CONTESTANTS
from play_env import python_of
from results import keep

ROOT = Path(__file__).resolve().parents[2]
QWEN = ROOT.parent / "shared" / "tokenizers" / "qwen2_5" / "tokenizer.json"
CLASSES = ("right", "refused rightly", "refused needlessly", "ids differ", "answer not trained", "others trained",
           "reasoning not trained", "end not trained", "no truth")  # fmt: skip


def the_zoo() -> tuple[Any, Any]:
    """The tests' templates and rows, and their judge."""
    package = types.ModuleType("zoo_tests")
    package.__path__ = [str(ROOT / "tests" / "chat")]
    sys.modules["zoo_tests"] = package
    return importlib.import_module("zoo_tests.zoo"), importlib.import_module("zoo_tests.zoo_judge")


def main(words: list[str]) -> None:
    zoo, judge = the_zoo()
    names = [word for word in words if word in CONTESTANTS]
    chosen = [one for one in zoo.zoo() if one.name in words] or zoo.zoo()
    plain = zoo._base
    from transformers import AutoTokenizer

    asked, tables = [], {name: Counter[str]() for name in names or CONTESTANTS}
    examples: dict[str, dict[str, str]] = {name: {} for name in tables}
    with tempfile.TemporaryDirectory() as base:
        for template in chosen:
            zoo._base = QWEN.read_text if template.name.startswith("qwen") and QWEN.exists() else plain
            folder = zoo.tokenizer_folder(template, Path(base) / template.name)
            hf = AutoTokenizer.from_pretrained(folder)
            for kind, rows in zoo.ROWS.items():
                asked += [
                    {
                        "template": template.name,
                        "folder": folder,
                        "kind": kind,
                        "row": zoo.as_taken(template, row),
                        "said": row,
                        "as_text": as_text(judge, hf, zoo.as_taken(template, row)),
                    }
                    for row in rows
                ]
        spec = Path(base) / "asked.json"
        spec.write_text(json.dumps(asked))
        answers, about = {}, {}
        for name in tables:
            out = Path(base) / f"{name}.json"
            script = str(Path(__file__).with_name("masks_play.py"))
            subprocess.run(
                [python_of(name, CONTESTANTS[name].needs), script, name, str(spec), str(out)],
                check=True,
                stdout=sys.stderr,
            )
            answers[name] = json.loads(out.read_text())
            about[name] = [answers[name].pop("version"), CONTESTANTS[name].how]
            print(f"{name}: answered", file=sys.stderr, flush=True)
        folder = ""
        for number, one in enumerate(asked):
            if one["folder"] != folder:
                folder, hf = one["folder"], AutoTokenizer.from_pretrained(one["folder"])
            truth = judge.truth(hf, one["row"])
            said = one["said"]
            for name in tables:
                if answers[name][str(number)].get("not_offered"):
                    continue
                verdict, why = judged(
                    judge, hf, said, truth, answers[name][str(number)], CONTESTANTS[name].last_only
                )
                tables[name][verdict] += 1
                examples[name].setdefault(verdict, f"{one['template']}, {one['kind']}: {why}")
    rows = [
        {"contestant": name, "rows": sum(table.values()), **{each: table[each] for each in CLASSES}}
        for name, table in tables.items()
    ]
    keep("masks", rows, about=about, examples=examples, templates=len({one["template"] for one in asked}))
    show("Masks", rows, about=about, examples=examples)


def as_text(judge: Any, hf: Any, row: Any) -> bool:
    """Whether a template renders a row's tool calls with arguments as text alone, as DeepSeek-V3's does."""
    given = judge.clean(row)
    try:
        hf.apply_chat_template(given["messages"], tools=given.get("tools"))
    except Exception:  # noqa: BLE001  a template may raise anything
        return not judge.truth(hf, row).refusal
    return False


def judged(
    judge: Any, hf: Any, row: Any, truth: Any, answer: dict[str, Any], last_only: bool
) -> tuple[str, str]:
    """(class of the answer, what is wrong, with its tokens)."""
    if "refused" in answer:
        is_right = judge.refusal_is_right(row, truth)
        return ("refused rightly" if is_right else "refused needlessly"), answer["refused"]
    if truth.refusal:
        return "no truth", truth.refusal
    ids, mask = up_to_blanks(hf, truth.ids, answer["ids"], answer["mask"])
    places = [n for n, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    found = judge.faults(hf, row, places[-1:] if last_only else places, replace(truth, mask=None), ids, mask)
    kinds = {
        "ids": "ids differ",
        "not": "answer not trained",
        "trained:": "others trained",
        "reasoning": "reasoning not trained",
    }
    if found:
        return kinds[
            found[0].split(" ")[0].removesuffix(":") if not found[0].startswith("trained:") else "trained:"
        ], f"{found[0]} in {tokens(hf, ids, mask)}"
    if end_is_left_out(judge, hf, row, ids, mask):
        return "end not trained", tokens(hf, ids, mask)
    return "right", tokens(hf, ids, mask)


def up_to_blanks(hf: Any, wanted: list[int], ids: list[int], mask: list[int]) -> tuple[list[int], list[int]]:
    """Ids as wanted, where only blanks at the end differ: who ends a row at its last stop token loses nothing."""
    same = min(len(wanted), len(ids))
    if ids[:same] == wanted[:same] and not hf.decode(ids[same:] + wanted[same:]).strip():
        return wanted, [*mask[:same], *[0] * (len(wanted) - same)]
    return ids, mask


def end_is_left_out(judge: Any, hf: Any, row: Any, ids: list[int], mask: list[int]) -> bool:
    """Whether the render has a control token right behind the last answer, and none behind it is trained."""
    last = row["messages"][-1]
    words = judge.own_words(last) if last["role"] == "assistant" else []
    if not words or last.get("tool_calls"):
        return False
    begin = next((n for n in range(len(ids) - 1, -1, -1) if words[0] in hf.decode(ids[n:])), None)
    after = [n for n in range(begin or 0, len(ids)) if ids[n] in hf.added_tokens_decoder]
    return bool(after) and begin is not None and not any(mask[n] for n in after)


def tokens(hf: Any, ids: list[int], mask: list[int], most: int = 400) -> str:
    """The row with what is trained between » and «."""
    parts, at = [], 0
    while at < len(ids):
        stop = next((n for n in range(at, len(ids)) if mask[n] != mask[at]), len(ids))
        text = hf.decode(ids[at:stop])
        parts.append(f"»{text}«" if mask[at] else text)
        at = stop
    return "".join(parts)[:most]


if __name__ == "__main__":
    main(sys.argv[1:])
