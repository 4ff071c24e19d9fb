"""Every template that TRL ships beside `apply_chat_template`: rows per second and how many times faster, on one core.

    python benchmarks/templates.py [--only qwen3 gptoss] [--rows 1000] [--out results.json]

Two measures, with the same rows, in one process:
- text: messages -> text, ours beside `apply_chat_template(tokenize=False)`;
- whole: JSON lines -> tokens in Arrow (parse, render, encode, sample), beside `apply_chat_template(tokenize=True)` of rows
  that are already parsed. All tokens are under loss, as one tokenizer serves all templates and does not have their
  control tokens.

Rows that a template refuses are left out. `rendered` counts the rows that had to run the template. The last line of
stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tokenize_runs import parsed

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("RAYSVC_SHARED", ROOT.parent / "shared"))
SLOW_SHARE = {"gsm8k_train": 8, "sgd_train": 8}  # one in so many rows goes through the slow contender
Row = tuple[list[Any], list[Any] | None]


def rate(run: Callable[[], Any], rows: int, passes: int) -> float:
    """Rows per second of CPU time, of the best pass."""
    best = float("inf")
    for _ in range(passes):
        begin = time.process_time()
        run()
        best = min(best, time.process_time() - begin)
    return rows / best


def accepted(render: Callable[..., Any], rows: Iterable[tuple[bytes, Row]]) -> list[tuple[bytes, Row]]:
    """Rows that the template does not refuse."""
    kept = []
    for line, (messages, tools) in rows:
        try:
            render(messages, tools)
        except Exception:  # noqa: BLE001  a template may raise anything
            continue
        kept.append((line, (messages, tools)))
    return kept


def measure(name: str, text: str, data: Path, given: argparse.Namespace) -> dict[str, Any] | None:
    """Rates of one template on one data set, None when it refuses the rows."""
    from raysvc.chat.render.template import ChatTemplate
    from raysvc.chat.slice_tokenizer import SliceTokenizer
    from raysvc.config import TextSpec, TokenizerConfig

    config = TokenizerConfig(name=given.tokenizer, chat_template=text)
    tokenizer = SliceTokenizer(TextSpec(tokenizer=config, train_on="all_tokens"), name)
    template = ChatTemplate(text, tokenizer.tokenizer.template_variables)
    lines = data.read_bytes().splitlines(keepends=True)[: given.rows]
    rows = [(row["messages"], row.get("tools") or None) for row in parsed(b"".join(lines))]
    kept = accepted(lambda *row: template.render_really(*row, False), zip(lines, rows, strict=True))
    if len(kept) < given.rows / 10:
        return None
    whole = b"".join(line for line, _ in kept)
    few = [row for _, row in kept[:: SLOW_SHARE[data.stem]]]
    hf = given.hf

    def ours() -> None:
        for _, (messages, tools) in kept:
            template.render(messages, tools)

    def theirs(tokenize: bool) -> None:
        for messages, tools in few:
            hf.apply_chat_template(messages, tools=tools, chat_template=text, tokenize=tokenize)

    rates = {
        "text": rate(ours, len(kept), 4),
        "apply_text": rate(lambda: theirs(False), len(few), 2),
        "whole": rate(lambda: tokenizer.run_json_lines(whole, 0), len(kept), 4),
        "apply_whole": rate(lambda: theirs(True), len(few), 2),
    }
    assert template.fast is not None
    rendered = template.fast.counts["rendered"] / (4 * len(kept))
    return {
        "template": name,
        "data": data.stem,
        "rows": len(kept),
        "rendered_share": round(rendered, 4),
        **{key: round(value) for key, value in rates.items()},
        "text_ratio": round(rates["text"] / rates["apply_text"], 1),
        "whole_ratio": round(rates["whole"] / rates["apply_whole"], 1),
    }


def main() -> None:
    import trl
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=SHARED / "data", help="folder with the two JSONL files")
    parser.add_argument("--tokenizer", default=str(SHARED / "tokenizers" / "qwen2_5"))
    parser.add_argument("--only", nargs="*", help="names of templates")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    given = parser.parse_args()
    given.hf = AutoTokenizer.from_pretrained(given.tokenizer)
    results = []
    print(
        "| template | data | rows run by the template | text, times apply | whole, times apply | whole rows/s |"
    )
    print("|---|---|---|---|---|---|")
    for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        if given.only and path.stem not in given.only:
            continue
        for data in ("gsm8k_train", "sgd_train"):
            found = measure(path.stem, path.read_text(encoding="utf-8"), given.data / f"{data}.jsonl", given)
            if found is None:
                continue
            results.append(found)
            print(
                f"| {found['template']} | {data.split('_')[0]} | {found['rendered_share']:.1%} | "
                f"{found['text_ratio']} | {found['whole_ratio']} | {found['whole']:,} |",
                flush=True,
            )
    report = {"date": time.strftime("%Y-%m-%d"), "results": results}
    if given.out:
        given.out.write_text(json.dumps(report, indent=1))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
