"""One contender of `tokenize.py` in a process of its own: prepare, say "ready", wait for a line, run, print JSON.

Always true:
- what is timed begins with the bytes of the source and ends with an Arrow file, where the contender writes one;
- `passes` are [wall seconds, CPU seconds] of each pass, the first one included: it is the one of a cold process.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKED = """\
{%- set system = messages[0].content if messages[0].role == 'system' else \
'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n\
You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n\
</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}{{ '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif message.role == 'user' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}"""

Run = Callable[[], tuple[int, int]]  # (rows, tokens) of one pass


def lines_of(job: dict[str, Any]) -> bytes:
    """The job's share of the source: at most `rows` rows, of these every `of`-th part."""
    lines = Path(job["data"]).read_bytes().splitlines(keepends=True)[: job["rows"]]
    part, of = job.get("part", 0), job.get("of", 1)
    return b"".join(lines[len(lines) * part // of : len(lines) * (part + 1) // of])


def parsed(data: bytes) -> list[dict[str, Any]]:
    """Rows, with tools that came as JSON text parsed."""
    import orjson

    rows = [orjson.loads(line) for line in data.splitlines()]
    for row in rows:
        if isinstance(row.get("tools"), str):
            row["tools"] = orjson.loads(row["tools"])
    return rows


def write(table: Any) -> None:
    """An Arrow file that is thrown away."""
    import pyarrow as pa

    with tempfile.TemporaryFile() as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def slice_tokenizer(job: dict[str, Any]) -> Any:
    from raysvc.chat.slice_tokenizer import SliceTokenizer
    from raysvc.job.config import TextSpec, TokenizerConfig

    spec = TextSpec(tokenizer=TokenizerConfig(name=job["tokenizer"]), train_on=job["train_on"])
    return SliceTokenizer(spec, job["data"])


def ours(job: dict[str, Any]) -> Run:
    tokenizer, data = slice_tokenizer(job), lines_of(job)

    def run() -> tuple[int, int]:
        result = tokenizer.run_json_lines(data, 0)
        write(result.table)
        assert result.switched == ""
        return result.row_counts.rows_written, result.row_counts.tokens_rendered

    return run


def rendered(job: dict[str, Any], data: bytes) -> list[str]:
    """Texts of all rows, as `apply_chat_template` gives them."""
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(job["tokenizer"])
    return [
        hf.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
        for row in parsed(data)
    ]


def floor(job: dict[str, Any]) -> Run:
    """Parse, encode texts that are already there with the fast encoder, write; no render, no mask, no verification."""
    import numpy as np
    import orjson
    import pyarrow as pa

    from raysvc.chat.slice_tokenizer import no_collection

    data = lines_of(job)
    texts, encoder = rendered(job, data), slice_tokenizer(job)._encoder
    assert encoder.name == "gigatoken"

    def run() -> tuple[int, int]:
        with no_collection():  # as we do: it saves a third of the parsing
            rows = [orjson.loads(line) for line in data.splitlines()]
            found = encoder.encode(texts)
            offsets = pa.array(found.offsets.astype(np.int32))
            write(pa.table({"input_ids": pa.ListArray.from_arrays(offsets, pa.array(found.ids))}))
            return len(rows), len(found.ids)

    return run


def encode_batch(job: dict[str, Any]) -> Run:
    """`tokenizers.encode_batch` alone, on texts that are already there."""
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(job["tokenizer"]).backend_tokenizer
    texts = rendered(job, lines_of(job))

    def run() -> tuple[int, int]:
        found = backend.encode_batch(texts, add_special_tokens=False)
        return len(texts), sum(len(one.ids) for one in found)

    return run


def datasets_map(job: dict[str, Any]) -> Run:
    """What most people do; with a template whose marks give the mask, and whose text is the tokenizer's own."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    datasets.disable_caching()
    hf = AutoTokenizer.from_pretrained(job["tokenizer"])
    data = lines_of(job)
    for row in parsed(data)[:50]:
        marked = hf.apply_chat_template(
            row["messages"], tools=row.get("tools"), tokenize=False, chat_template=MARKED
        )
        assert marked == hf.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)

    def one(row: dict[str, str]) -> dict[str, Any]:
        (parsed_row,) = parsed(row["line"].encode())
        found = hf.apply_chat_template(
            parsed_row["messages"],
            tools=parsed_row.get("tools"),
            chat_template=MARKED,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return {"input_ids": found["input_ids"], "loss_mask": found["assistant_masks"]}

    def run() -> tuple[int, int]:
        source = datasets.Dataset.from_dict({"line": [line.decode() for line in data.splitlines()]})
        made = source.map(
            one, num_proc=job["workers"] if job["workers"] > 1 else None, remove_columns=["line"]
        )
        return len(made), sum(len(ids) for ids in made["input_ids"]) if job["rows"] <= 2000 else 0

    return run


def skyrl(job: dict[str, Any]) -> Run:
    """SkyRL 0.3.0's function for one row, from parsed rows; runs in the peers' environment."""
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # it needs 3.12's
    from skyrl.train.sft_trainer import tokenize_chat_example
    from transformers import AutoTokenizer

    hf, rows = AutoTokenizer.from_pretrained(job["tokenizer"]), parsed(lines_of(job))

    def run() -> tuple[int, int]:
        made = [tokenize_chat_example(row, hf, train_on_what=job["train_on"]) for row in rows]
        return len(made), sum(len(one["input_ids"]) for one in made if one)

    return run


COPIES = 8


def ray_data(job: dict[str, Any]) -> Run:
    """The real thing: source to finished entry through Ray Data; notes when the first slice was done."""
    import ray

    import raysvc

    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for n in range(COPIES):
        (folder / f"{n}.jsonl").symlink_to(job["data"])
    ray.init(num_cpus=job["workers"], include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    def run() -> tuple[int, int]:
        begin = time.perf_counter()

        def notice(tick: Any) -> None:
            if tick.done and "seconds_to_first" not in job:
                job["seconds_to_first"] = round(time.perf_counter() - begin, 2)

        entry = raysvc.tokenize(
            source={"path": str(folder / "*.jsonl")},
            tokenizer=job["tokenizer"],
            train_on=job["train_on"],
            cache={"root": str(folder / "cache")},
            progress=notice,
        )
        return entry.num_rows, entry.num_tokens

    return run


CONTENDERS = {f.__name__: f for f in (ours, floor, encode_batch, datasets_map, skyrl, ray_data)}


def main() -> None:
    job = json.loads(sys.argv[1])
    os.sched_setaffinity(0, job["cpus"])
    logging.disable(logging.WARNING)
    run = CONTENDERS[job["contender"]](job)
    print("ready", flush=True)
    sys.stdin.readline()
    passes, rows, tokens = [], 0, 0
    for _ in range(job["passes"]):
        wall, cpu = time.perf_counter(), time.process_time()
        rows, tokens = run()
        passes.append([time.perf_counter() - wall, time.process_time() - cpu])
    found = {
        "rows": rows,
        "tokens": tokens,
        "passes": passes,
        "seconds_to_first": job.get("seconds_to_first"),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
