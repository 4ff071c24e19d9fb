"""Every template that TRL ships beside `apply_chat_template`: rows per second and how many times faster, on one core.

    python benchmarks/templates.py [--only qwen3 gptoss | --part 1/2] [--sets gsm8k_train] [--rows 2048] [--out results.json]
    python benchmarks/templates.py --sentencepiece [--rows 4096] [--model tokenizer.model.v1]

Two measures, with the same rows, in one process:
- text: messages -> text, ours beside `apply_chat_template(tokenize=False)`;
- whole: JSON lines -> tokens in Arrow (parse, render, encode, sample), beside `apply_chat_template(tokenize=True)` of rows
  that are already parsed. All tokens are under loss, as one tokenizer serves all templates and does not have their
  control tokens.

With `--sentencepiece`: tokenizers configured as Llama-2, Mistral, Gemma and normalizing ones are, with Mistral's first template
and 16,000 tokens trained on GSM8K, or with the tokens of a SentencePiece model, such as the package mistral-common holds. `tokens` is the part behind the render: encode, align and verify, beside the library's encoding, row by row.
Contenders have seen 2,048 other rows before, and none of those that are measured: encoders remember words. `apply` gives ids
alone; `apply with the mask` is `return_assistant_tokens_mask=True` with the same template marked: ids and mask, as raysvc makes them.

2,048 rows are one chunk of a slice; what a slice costs once is a larger part of fewer. Templates that take contents in
parts get them so, and a template that needs a `bos_token`, which Qwen2.5's tokenizer has not, is given one.

Rows that a template refuses are left out. The last line of stdout is JSON.

Figures: with `--sentencepiece`, ids and mask are 9.1 to 10.9 times `apply_chat_template` (11-25; the aim of more was given up). Of 16 us a
row there, gigatoken takes 7 to 8, decoding 1.6, texts and spans 1.2, JSON 1.0. With Qwen2.5's template a row of GSM8K takes some 43
us, of which the template takes 12 and finding its turns 5.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from typing import Any

from tokenize_runs import parsed

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("RAYSVC_SHARED", ROOT.parent / "shared"))
SLOW_SHARE = {"gsm8k_train": 8, "sgd_train": 8}  # one in so many rows goes through the slow contender
ONLY_PARTS = ("idefics3", "llava_next", "smolvlm")
GIVEN = {"bos_token": "<|endoftext|>"}  # to templates
SEEN_BEFORE = 2048  # rows of GSM8K that warm a contender with --sentencepiece
Row = tuple[list[Any], list[Any] | None]


class Clock:
    """A function that adds up its seconds of CPU time."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run, self.seconds = run, 0.0

    def __call__(self, *given: Any) -> Any:
        begin = time.process_time()
        try:
            return self._run(*given)
        finally:
            self.seconds += time.process_time() - begin


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


def in_parts(line: bytes) -> bytes:
    """A row whose contents are lists of one part."""
    row = json.loads(line)
    for message in row["messages"]:
        message["content"] = [{"type": "text", "text": message.get("content") or ""}]
    return json.dumps(row).encode() + b"\n"


def measure(name: str, text: str, data: Path, given: argparse.Namespace) -> dict[str, Any] | None:
    """Rates of one template on one data set, None when it refuses the rows."""
    from raysvc.chat.render.template import ChatTemplate
    from raysvc.chat.slice_tokenizer import SliceTokenizer
    from raysvc.job.config import TextSpec, TokenizerConfig

    config = TokenizerConfig(
        name=given.tokenizer, chat_template=text, date=date.today(), template_kwargs=GIVEN
    )
    tokenizer = SliceTokenizer(TextSpec(tokenizer=config, train_on="all_tokens"), name)
    template = ChatTemplate(text, tokenizer.tokenizer.template_variables)
    lines = data.read_bytes().splitlines(keepends=True)[: given.rows]
    if name.startswith(ONLY_PARTS):
        lines = [in_parts(line) for line in lines]
    rows = [(row["messages"], row.get("tools") or None) for row in parsed(b"".join(lines))]
    kept = accepted(template.render, zip(lines, rows, strict=True))
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
            hf.apply_chat_template(messages, tools=tools, chat_template=text, tokenize=tokenize, **GIVEN)

    rates = {
        "text": rate(ours, len(kept), 4),
        "apply_text": rate(lambda: theirs(False), len(few), 4),
        "whole": rate(lambda: tokenizer.run_json_lines(whole, 0), len(kept), 4),
        "apply_whole": rate(lambda: theirs(True), len(few), 4),
    }
    return {
        "template": name,
        "data": data.stem,
        "rows": len(kept),
        **{key: round(value) for key, value in rates.items()},
        "text_ratio": round(rates["text"] / rates["apply_text"], 1),
        "whole_ratio": round(rates["whole"] / rates["apply_whole"], 1),
    }


def sentencepiece(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Rates of every kind of tokenizer on GSM8K."""
    sys.path.insert(0, str(ROOT / "tests" / "chat"))
    import sentencepiece_like as like  # type: ignore[import-not-found]

    lines = (given.data / "gsm8k_train.jsonl").read_bytes().splitlines(keepends=True)
    lines = lines[: SEEN_BEFORE + given.rows]
    if given.model:
        model = of_sentencepiece(given.model)
    else:
        texts = (message["content"] for row in parsed(b"".join(lines)) for message in row["messages"])
        model = like.trained(texts, 16_000)
    print(
        "| tokenizer | encoder | tokens, times the library | whole, times apply | times apply with the mask | whole rows/s |"
    )
    print("|---|---|---|---|---|---|")
    results = []
    for kind, make in like.KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = of_kind(kind, like.save(Path(folder), make(model), like.INST), like.MARKED, lines)
        results.append(found)
        print(
            f"| {kind} | {found['encoder']} | {found['tokens_ratio']} | {found['whole_ratio']} | "
            f"{found['masked_ratio']} | {found['whole']:,} |",
            flush=True,
        )
    return results


def of_sentencepiece(path: Path) -> dict[str, Any]:
    """Tokens and merges of a SentencePiece model of type BPE, as transformers converts it."""
    from transformers.convert_slow_tokenizer import generate_merges, import_protobuf

    proto = import_protobuf().ModelProto()
    proto.ParseFromString(path.read_bytes())
    vocab = {piece.piece: number for number, piece in enumerate(proto.pieces)}
    scores = {piece.piece: piece.score for piece in proto.pieces}
    return {"vocab": vocab, "merges": generate_merges(vocab, scores)}


def of_kind(kind: str, folder: str, marked: str, lines: list[bytes]) -> dict[str, Any]:
    """Rates on rows that nobody saw before: encoders remember words, and a slice brings new ones."""
    from transformers import AutoTokenizer

    from raysvc.chat.slice_tokenizer import SliceTokenizer
    from raysvc.job.config import TextSpec, TokenizerConfig

    known, data = b"".join(lines[:SEEN_BEFORE]), b"".join(lines[SEEN_BEFORE:])
    rows = [row["messages"] for row in parsed(b"".join(lines))]
    seen, few = rows[:SEEN_BEFORE:8], rows[SEEN_BEFORE::8]
    num_rows = len(lines) - SEEN_BEFORE
    rates = dict.fromkeys(("tokens", "library", "whole", "apply", "masked"), 0.0)
    for _ in range(5):
        tokenizer = SliceTokenizer(TextSpec(tokenizer=TokenizerConfig(name=folder)), kind)
        tokenizer.run_json_lines(known, 0)
        spent = Clock(tokenizer._tokens_of)
        tokenizer._tokens_of = spent  # type: ignore[method-assign]
        whole = Clock(tokenizer.run_json_lines)
        whole(data, 0)
        theirs = their_seconds(AutoTokenizer.from_pretrained(folder), marked, seen, few)
        found = {
            "tokens": num_rows / spent.seconds,
            "library": len(few) / theirs[0],
            "whole": num_rows / whole.seconds,
            "apply": len(few) / theirs[1],
            "masked": len(few) / theirs[2],
        }
        rates = {key: max(rates[key], found[key]) for key in rates}
    return {
        "tokenizer": kind,
        "encoder": tokenizer.encoder_name,
        **{key: round(value) for key, value in rates.items()},
        "tokens_ratio": round(rates["tokens"] / rates["library"], 1),
        "whole_ratio": round(rates["whole"] / rates["apply"], 1),
        "masked_ratio": round(rates["whole"] / rates["masked"], 1),
    }


def their_seconds(hf: Any, marked: str, seen: list[Any], new: list[Any]) -> tuple[float, float, float]:
    """(seconds of the library's ids, of `apply_chat_template`, of both with the mask) for new rows, behind rows that were seen before."""
    both = {"chat_template": marked, "return_dict": True, "return_assistant_tokens_mask": True}
    for rows in (seen, new):
        texts = [hf.apply_chat_template(row, tokenize=False) for row in rows]
        ids = Clock(
            lambda texts: [hf.backend_tokenizer.encode(text, add_special_tokens=False) for text in texts]
        )
        ids(texts)
        whole = Clock(lambda rows: [hf.apply_chat_template(row) for row in rows])
        whole(rows)
        masked = Clock(lambda rows: [hf.apply_chat_template(row, **both) for row in rows])
        masked(rows)
    return ids.seconds, whole.seconds, masked.seconds


def _one_encoder(folder: str) -> Callable[..., Any]:
    """In place of `encoders_of`: those of one tokenizer."""
    from raysvc.chat.tokens.probe import encoders_of
    from raysvc.chat.tokens.tokenizer import LoadedTokenizer
    from raysvc.job.config import TokenizerConfig

    found = encoders_of(LoadedTokenizer(TokenizerConfig(name=folder)))
    return lambda _: found


def main() -> None:
    import trl
    from transformers import AutoTokenizer

    from raysvc.chat import slice_tokenizer

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=SHARED / "data", help="folder with the two JSONL files")
    parser.add_argument("--tokenizer", default=str(SHARED / "tokenizers" / "qwen2_5"))
    parser.add_argument("--only", nargs="*", help="names of templates")
    parser.add_argument("--part", default="1/1", help="2/3: the second third of the templates")
    parser.add_argument("--sets", nargs="*", default=["gsm8k_train", "sgd_train"], help="names of data sets")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--sentencepiece", action="store_true", help="tokenizers instead of templates")
    parser.add_argument(
        "--model", type=Path, help="with --sentencepiece: a SentencePiece model with its tokens"
    )
    given = parser.parse_args()
    if given.sentencepiece:
        print(json.dumps({"date": time.strftime("%Y-%m-%d"), "results": sentencepiece(given)}))
        return
    given.hf = AutoTokenizer.from_pretrained(given.tokenizer)
    slice_tokenizer.encoders_of = _one_encoder(given.tokenizer)  # no template changes it
    results = []
    print("| template | data | text, times apply | whole, times apply | whole rows/s |")
    print("|---|---|---|---|---|")
    part, parts = map(int, given.part.split("/"))
    paths = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    for path in paths[len(paths) * (part - 1) // parts : len(paths) * part // parts]:
        if given.only and path.stem not in given.only:
            continue
        for data in given.sets:
            found = measure(path.stem, path.read_text(encoding="utf-8"), given.data / f"{data}.jsonl", given)
            if found is None:
                continue
            results.append(found)
            print(
                f"| {found['template']} | {data.split('_')[0]} | "
                f"{found['text_ratio']} | {found['whole_ratio']} | {found['whole']:,} |",
                flush=True,
            )
    report = {"date": time.strftime("%Y-%m-%d"), "results": results}
    if given.out:
        given.out.write_text(json.dumps(report, indent=1))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
