"""The HTML page: self-contained, safe, and it renders in a real browser."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import re
import shutil
import subprocess
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import raysvc
from raysvc.cache.key import rows_key
from raysvc.collate.plan_report import plan_report
from raysvc.collate.shard_bytes import ColumnBytes
from raysvc.errors import StateMismatch
from raysvc.feedback.feedback_log import FeedbackLog
from raysvc.feedback.request import RowOutcomes
from raysvc.inspect.row_view import row_picture
from raysvc.job.config import PlanConfig
from raysvc.job.job_file import load_job
from raysvc.plan.plan import Plan
from raysvc.ragged import offsets_of
from raysvc.report.browse import BrowsedRows, browse
from raysvc.report.browsed_rows import _pieces, browsed_rows, held_cells, kept_tokens, seen_rows
from raysvc.report.charts import STRETCHES, Chart, bars, histogram, kept, with_dots
from raysvc.report.facts import Facts, _losses, _steps_of_rows, gather, worst_stalls
from raysvc.report.page import render, write_page
from raysvc.report.rows_page import render_rows
from raysvc.report.run_charts import run_charts
from raysvc.row_ids import source_base
from raysvc.training.run_folder import RunFolder
from raysvc.training.run_identity import KEYS, claim

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
STEPS = [
    {
        "step": i,
        "loss": 5.0 / (i + 1),
        "tokens": 100,
        "step_s": 0.1,
        "stall_s": 0.05 if i == 3 else 0.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "input_tokens": 150,
        "cells": 200,
        "stall_by": {"collate": 0.05} if i == 3 else {},
        "by_source": {"chat": [50.0, 20], "<b>": [30.0, 80]},
        "by_length": {"64": [50.0, 20], "128": [30.0, 80], "32": [0.0, 0]},
    }
    for i in range(8)
]


PIECES = {7: b"<|user|>", 8: b"answer ", 9: b".", 101: b"short", 102: b"long"}


def listed(text: str = "hello", *, of_math: str = "math") -> BrowsedRows:
    """Rows of 9, 4, 70 and 5 tokens, the last two trained; of the third the page has ten tokens, of the last one none."""
    held = {9: 100, 4: 101, 10: 102}
    ids = [[7, word, *[9] * (length - 4), 8, word] for length, word in held.items()]
    return BrowsedRows(
        [9, 4, 70, 5], [9, 4, 70, 5], [2, 2, 2, 5], [0, 1, 0, 1], ["chat", of_math], [*held, 0], np.concatenate(ids).astype(np.int32),
        np.concatenate([[False] * (length - 2) + [True] * 2 for length in held]), {100: text.encode(), **PIECES}, 4, frozenset([7]),
        {4: 1.5, 70: 2.5}, {4: [0, 6]},
    )  # fmt: skip


def unpacked(page: str, name: str) -> bytes:
    return zlib.decompress(base64.b64decode(page.partition(f'id="{name}">')[2].partition("<")[0]))


def table_of(page: str) -> dict[str, Any]:
    """What the page's script gets."""
    return dict(json.loads(unpacked(page, "table")))


def tokens_of(page: str) -> list[tuple[int, bool]]:
    """(id, whether it has loss) of every token in a page."""
    table, stream = table_of(page), unpacked(page, "tokens")
    total = sum(table["kept"])
    hits = np.unpackbits(np.frombuffer(stream, np.uint8), count=total).astype(bool).tolist()
    ids, at = [], (total + 7) // 8
    for _ in range(total):
        number = group = 0
        while True:
            number |= (stream[at] & 127) << 7 * group
            group, at = group + 1, at + 1
            if stream[at - 1] < 128:
                break
        ids.append(table["ids"][number])
    assert at == len(stream)
    return list(zip(ids, hits, strict=True))


def facts(text: str = "hello", *, steps: bool = True) -> Facts:
    plan = Plan(PlanConfig(batch_size=4), np.arange(10, 30, dtype=np.int32))
    row_counts = {"rows_in": 22, "rows_written": 20, "dropped": {"too long": 1}, "quarantined": {text: 1}}
    tokens = {"tokens_rendered": 390, "tokens_trained": 200, "tokens_context": 190, "tokens_truncated": 0}
    return Facts(
        title=f"job {text}",
        overview={"rows": 20},
        lengths={"chat": list(range(10, 25)), text: list(range(25, 30))},
        trained={"chat": [0.5] * 15, text: [0.25] * 5},
        rows=replace(listed(text), num_rows=20),
        row_counts={**row_counts, **tokens},
        set_aside=[{"source_row": 7, "reason": text, "detail": "too odd"}],
        plan=plan_report(plan, 2, ColumnBytes(per_cell=13, per_row=24)),
        dp_size=2,
        steps=STEPS if steps else [],
        summary=None,
        evals=[{"step": 4, "eval": "valid", "loss": 1.25}, {"step": 7, "eval": "valid", "loss": 1.0}],
    )


def test_a_page_asks_for_nothing_and_its_policy_names_its_three_scripts() -> None:
    page = render(facts())
    assert not re.search(r"(src|href)=|@import|url\(", page)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}\"" in page
    assert len(scripts) == 3
    assert len(page) < 100_000, "uPlot is 52 kB"


def test_a_hostile_row_is_only_text() -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    page = render(facts(hostile))
    assert page.count("<script") == render(facts()).count("<script") == 6
    assert "<img" not in page
    assert "&lt;script&gt;" in page


def test_a_page_without_a_run_has_no_run_section() -> None:
    assert "<h2>Run</h2>" not in render(facts(steps=False))
    assert "<h2>Run</h2>" in render(facts())


def test_a_page_of_a_run_begins_with_the_run_and_says_what_its_evals_decided() -> None:
    best = {"eval": "held", "metric": "loss", "value": 2.7951, "steps": 32}
    summary = {
        "steps": 8, "rows": 64, "tokens_trained": 15770, "loss_first": 6.2, "loss_last": 2.858, "loss_best": 2.795, "loss_best_step": 6,
        "tokens_per_s": 1413.4, "stall_fraction": 0.0018, "evals": {"held": {"loss": 2.84514, "rows": 64}}, "best": best,
        "stopped_early": {**best, "without": 3, "patience": 3},
    }  # fmt: skip
    page = render(replace(facts(), summary=summary))
    headings = re.findall(r"<h2>([^<]*)", page)
    assert headings[0] == "Run"
    assert headings.index("Run") < headings.index("Row counts")
    for said in (
        "<strong>2.795</strong>loss best (step 6)", "<strong>1,413</strong>trained tokens/s", "Eval held: loss 2.845 on 64 rows",
        "The best model is that of 32 steps: eval held had loss 2.795.", "Stopped early, after 3 evals of held without progress.",
    ):  # fmt: skip
        assert said in page, said
    assert "num_rows" not in page, "names of fields are no words"
    assert "num rows" in page


COUNTS = {"quarantined": {"<odd>": 900}}


def test_every_row_is_in_the_table_of_the_page_with_what_it_is_found_by() -> None:
    page = browse(listed("<b>one", of_math="m'ath"), COUNTS, [], "raysvc show runs/<a>")
    assert "All rows; 3 of them with their text" in page
    assert "<code>raysvc show runs/&lt;a&gt; --row N</code>" in page
    assert "<b>one" not in page
    table = table_of(page)
    assert (table["id"], table["tokens"]) == (["0:0:9", "0:0:4", "0:0:70", "0:0:5"], [9, 4, 70, 5])
    assert (table["trained"], table["loss"]) == ([2, 2, 2, 5], [None, 1.5, 2.5, None])
    assert ([table["sources"][one] for one in table["source"]], table["steps"][1]) == (
        ["chat", "m'ath"] * 2,
        [0, 6],
    )
    assert (table["kept"], len(tokens_of(page))) == ([9, 4, 10, 0], 23)
    assert tokens_of(page)[9:13] == [(7, False), (101, False), (8, True), (101, True)]
    place = table["ids"].index(100)
    assert (table["pieces"][place], table["special"][place]) == ("<b>one", 0)
    assert table["ids"][0] == 9, "the most frequent one is first"
    assert table["special"][table["ids"].index(7)] == 1
    assert "4 of 50 rows, evenly spread; 3" in browse(replace(listed(), num_rows=50), COUNTS, [], "")


def test_special_tokens_keep_their_colour_in_trained_text_alone() -> None:
    texts = {7: "<end>", 8: "<|", 9: "a<b"}
    tokenizer = SimpleNamespace(
        added_tokens_decoder={7: AddedToken("<end>", special=True), 8: AddedToken("<|", special=True)},
        decode=lambda ids: "".join(texts[one] for one in ids),
    )
    row = row_picture(1, [8, 9, 9, 7, 9, 7, 9], [0, 0, 1, 1, 1, 0, 0], tokenizer)
    page = render_rows("rows", [], [("row", row)])
    assert "<b>a&lt;b</b><b><i>&lt;end&gt;</i></b><b>a&lt;b</b><i>&lt;end&gt;</i>" in page


def test_quarantined_rows_stand_with_their_reasons_and_how_many_there_are() -> None:
    aside = [{"source_row": 3, "reason": "<odd>", "detail": "why", "dataset": "m<"}]
    table = table_of(browse(listed(), COUNTS, aside, ""))
    assert table["aside"] == [{"source": "m<", "why": "<odd>", "detail": "why", "shown": "m<:3"}]
    assert table["quarantined"] == {"<odd>": 900}


@given(st.lists(st.integers(0, 40_000), max_size=60), st.integers(1, 40_000))
def test_tokens_of_a_page_are_those_that_went_in_however_many_kinds_there_are(
    numbers: list[int], kinds: int
) -> None:
    # every kind once, so that places need up to three groups of bits
    ids = np.array([*range(kinds), *(number % kinds for number in numbers)], np.int32)
    hits = ids % 3 == 0
    pieces = dict.fromkeys(range(kinds), b"")
    rows = BrowsedRows([0], [len(ids)], [0], [0], ["rows"], [len(ids)], ids, hits, pieces, 1)
    assert tokens_of(browse(rows, COUNTS, [], "")) == list(zip(ids.tolist(), hits.tolist(), strict=True))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 6))
def test_of_a_long_row_the_ends_are_held(lengths: list[int], end: int) -> None:
    offsets = offsets_of(lengths)
    kept = np.minimum(lengths, 2 * end)
    rows = [list(range(start, stop)) for start, stop in itertools.pairwise(offsets.tolist())]
    expected = [row if len(row) <= 2 * end else row[:end] + row[-end:] for row in rows]
    assert held_cells(offsets, kept).tolist() == [cell for row in expected for cell in row]


SEEN = """<script>addEventListener("load", async () => {
  await browsed;
  const seen = () => [...document.querySelectorAll("#rows > details > summary > span:first-child")].map((one) => one.textContent.split(":").at(-1)).join();
  const set = (id, value) => { const one = document.getElementById(id); one.value = value; one.dispatchEvent(new Event("input")); };
  const count = () => document.getElementById("count").textContent;
  const open = async (row) => { row.open = true; await new Promise((done) => row.addEventListener("toggle", () => setTimeout(done), { once: true })); };
  set("order", "entry");
  const said = [seen()], more = document.getElementById("more");
  TRY
  document.body.append(Object.assign(document.createElement("p"), { id: "seen", textContent: said.join("; ") }));
});</script></body>"""
LOOK = """
  set("source", "math"); set("order", "longest"); said.push(seen()); set("order", "with their text"); said.push(seen()); set("source", "");
  set("order", "longest"); said.push(seen());
  set("find", "SHORT"); said.push(seen(), count());
  set("find", "0:0:5"); said.push(seen());
  set("find", ""); set("source", "chat"); set("order", "most trained"); said.push(seen());
  set("source", ""); set("order", "highest loss"); said.push(seen());
"""
LOOK_IN = """
  const row = document.querySelector("#rows > details"); await open(row);
  said.push(row.querySelector("p").textContent, row.querySelector(".row").innerHTML);
  await open(row.querySelector("details")); said.push(row.querySelector(".ids").innerHTML);
  set("find", "0:0:70"); await open(document.querySelector("#rows > details"));
  said.push(document.querySelector(".row").innerHTML);
  set("find", "0:0:5"); await open(document.querySelector("#rows > details"));
  said.push(document.querySelector("#rows > details > p").textContent);
  set("find", ""); set("state", "hello"); said.push(count());
  await open(document.querySelector("#rows > details")); said.push(document.querySelector("#rows > details").textContent);
"""
LOOK_AT_BEGINNINGS = """
  const begins = () => [...document.querySelectorAll("#rows q")].map((one) => one.textContent).join("|");
  said.push(begins()); set("find", "0:0:4"); said.push(begins()); set("find", "answer"); set("source", "chat"); said.push(begins());
"""
LOOK_ON = """
  said.push(more.hidden); more.click(); said.push(seen(), more.hidden);
  set("order", "longest"); said.push(seen(), more.hidden);
"""


def looked_at(tmp_path: Path, script: str, of: Facts | None = None) -> list[str]:
    """What a browser's script said of the page."""
    page = tmp_path / "report.html"
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", render(of or facts()))
    page.write_text(text.replace("</body>", SEEN.replace("TRY", script)))
    dom, said = browse_page(page, tmp_path, 1280)
    assert "CONSOLE" not in said
    found = re.search(r'id="seen">(.*)</p>', dom, re.DOTALL)
    assert found is not None, said
    return html.unescape(found[1]).split("; ")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_searches_sorts_and_chooses_rows(tmp_path: Path) -> None:
    assert looked_at(tmp_path, LOOK) == [
        "9,4,70,5", "5,4", "4,5", "70,9,5,4", "4", "1 of 20", "5", "9,70", "70,4,9,5",
    ]  # fmt: skip


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_an_opened_row_has_tokens_ids_and_steps_or_says_what_prints_them(tmp_path: Path) -> None:
    assert looked_at(tmp_path, "set('find', '0:0:4');" + LOOK_IN)[1:] == [
        "source math", "trained in step 0, 6. raysvc show --row 0:0:4",
        "<i>&lt;|user|&gt;</i><span>short</span><b>answer short</b>",
        "<span><code>&lt;|user|&gt;</code>7</span><span><code>short</code>101</span><b><code>answer </code>8</b><b><code>short</code>101</b>",
        "<i>&lt;|user|&gt;</i><span>long...</span><i> […60 tokens…] </i><span>...</span><b>answer long</b>",
        "source math. raysvc show --row 0:0:5 prints its text, which is not in this page.",
        "1 of 1", "source row 7quarantinedhelloraysvc show --source-row 7hello\ntoo odd",
    ]  # fmt: skip


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_what_all_rows_of_a_page_begin_with_is_left_out(tmp_path: Path) -> None:
    system = "You are a helpful assistant that counts. "
    pieces = {100: f"{system}hello".encode(), 101: f"{system}short".encode(), 102: f"{system}help".encode()}
    rows = replace(listed(), row_ids=[9, 4, 70], pieces={**PIECES, **pieces})
    one = f"{system}shortanswer {system}short"
    assert looked_at(tmp_path, LOOK_AT_BEGINNINGS, replace(facts(), rows=rows))[1:] == [
        f"…hello.....answer {system}hello|…shortanswer {system}short|…help......answer {system}help", one,
        f"…hello.....answer {system}hello|…help......answer {system}help",
    ]  # fmt: skip


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_draws_some_rows_of_many_and_sorts_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysvc.report.browse.SHOWN", 2)
    assert looked_at(tmp_path, LOOK_ON) == ["9,4", "false", "9,4,70,5", "true", "70,9", "false"]


@pytest.mark.parametrize("most", [1_000_000, 3])
def test_a_page_without_room_for_all_texts_has_the_longest_the_shortest_and_the_worst(
    most: int, tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = {
        "LISTED": most,
        "LEAST_HELD": 2,
        "HELD_TOKENS": 0,
        "ENDS": 2,
        "OF_A_SOURCE": 1,
        "READ_TOKENS": 99,
    }
    for name, value in room.items():
        monkeypatch.setattr(f"raysvc.report.browsed_rows.{name}", value)
    job = {
        "source": {"path": sample["rows"]},
        "tokenizer": sample["tokenizer"],
        "cache": {"root": str(tmp_path)},
    }
    entry = raysvc.tokenize(job)
    rows, lengths = entry.row_ids(), entry.rows.lengths()
    losses = {int(row): float(number % 7) for number, row in enumerate(rows.tolist())} | {int(rows[5]): 99.0}
    found = browsed_rows(entry, seen_rows(entry, rows, lengths, losses), len(rows), losses, {})
    masks = {row: entry.row(row)["loss_mask"] for row in found.row_ids}
    assert list(found.row_ids) == rows.tolist() if most > 3 else 5 <= len(found.row_ids) <= 10 < len(rows)
    assert list(found.trained) == [sum(masks[row]) for row in found.row_ids]
    assert list(found.lengths) == [len(masks[row]) for row in found.row_ids]
    bounds = dict(zip(found.row_ids, itertools.pairwise(offsets_of(found.kept).tolist()), strict=True))
    held = [row for row, (start, stop) in bounds.items() if start < stop]
    told = sorted(len(masks[row]) for row in held)
    assert (told[:2], told[-2:]) == (sorted(lengths.tolist())[:2], sorted(lengths.tolist())[-2:])
    assert int(rows[5]) in held
    assert len(held) <= 10
    for row in held:
        cells = slice(*bounds[row])
        assert found.ids[cells].tolist() == entry.row(row)["input_ids"]
        assert found.hits[cells].tolist() == [bool(hit) for hit in masks[row]]
    assert set(found.pieces) == set(found.ids.tolist())
    assert found.special == {
        token for token in found.pieces if entry.tokenizer.added_tokens_decoder.get(token)
    }


def test_a_small_source_has_rows_with_their_text_beside_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HELD_TOKENS": 0, "LEAST_HELD": 10, "ENDS": 1, "OF_A_SOURCE": 3}.items():
        monkeypatch.setattr(f"raysvc.report.browsed_rows.{name}", value)
    source = np.repeat([0, 1], [1000, 5])
    rows = source_base(source) + np.arange(1005)
    entry: Any = SimpleNamespace(sources=("large", "small"))
    kept = kept_tokens(entry, rows, np.arange(1005, dtype=np.int32) % 50 + 3, {int(rows[7]): 1.0})
    assert kept[7] == 10, "the one of the highest loss, whole"
    assert ((kept[source == 1] > 0).sum(), (kept > 0).sum() < 20) == (3, True)


SAY_TEXTS = """<script>addEventListener("load", async () => {
  await browsed;
  const order = document.getElementById("order"); order.value = "entry"; order.dispatchEvent(new Event("input"));
  for (const row of document.querySelectorAll("#rows > details")) {
    row.open = true; await new Promise((done) => row.addEventListener("toggle", () => setTimeout(done), { once: true }));
  }
  const said = [...document.querySelectorAll("#rows .row")].map((one) => [one.textContent, [...one.querySelectorAll("b")].map((each) => each.textContent).join("")]);
  document.body.append(Object.assign(document.createElement("p"), { id: "seen", textContent: JSON.stringify(said) }));
});</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("end", [2048, 4])
def test_the_text_of_rows_in_a_browser_is_what_their_tokenizer_decodes(
    end: int, tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysvc.report.browsed_rows.END_TOKENS", end)
    texts = [
        "plain",
        "ünïcödé 👩‍👩‍👧 𝄞 <b>&amp;",
        "\ufeffmark",
        "日本語のテキスト" * 30,
        "".join(map(chr, range(33, 600))),
    ]
    chats = [[{"role": "user", "content": one}, {"role": "assistant", "content": f"{one}?"}] for one in texts]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    job = load_job(
        {
            "source": {"path": str(tmp_path / "rows.jsonl")},
            "tokenizer": sample["tokenizer"],
            "cache": {"root": str(tmp_path / "cache")},
            "trainer": {"run_dir": str(tmp_path / "run")},
        }
    )
    entry = raysvc.tokenize(job)
    page = tmp_path / "report.html"
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", render(gather(job, entry)))
    page.write_text(text.replace("</body>", SAY_TEXTS))
    dom, said = browse_page(page, tmp_path, 1280)
    assert "CONSOLE" not in said
    expected = []
    for row_id in entry.row_ids().tolist():
        row = entry.row(row_id)
        ids, mask = row["input_ids"], row["loss_mask"]
        decode = entry.tokenizer.decode
        trained = decode([token for token, hit in zip(ids, mask, strict=True) if hit])
        if len(ids) > 2 * end:
            gap = f" […{len(ids) - 2 * end:,} tokens…] "
            expected.append([decode(ids[:end]) + gap + decode(ids[-end:]), None])
        else:
            expected.append([decode(ids), trained])
    found = re.search(r'id="seen">(.*)</p>', dom, re.DOTALL)
    assert found is not None, said
    shown = json.loads(html.unescape(found[1]))
    assert [one for one, _ in shown] == [one for one, _ in expected]
    assert end == 4 or shown == expected


def test_what_a_run_says_of_rows_is_told_of_those_that_it_trained_alone(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    job = load_job(
        {
            "source": {"path": sample["rows"]},
            "tokenizer": sample["tokenizer"],
            "cache": {"root": str(tmp_path / "cache")},
            "trainer": {"run_dir": str(tmp_path / "run")},
        }
    )
    entry, folder = raysvc.tokenize(job), RunFolder(tmp_path / "run")
    (one,) = entry.entries
    for key, steps in ((rows_key(one.key, one.recipe), {1: [7]}), ("0" * 64, {})):
        claim(folder.path, {KEYS: [key]}, has_checkpoint=False, changed=False)
        folder.rows.write_text('{"step":7,"row_ids":["0:0:1"]}\n')
        found = gather(job, entry)
        assert found.rows.steps == steps
        assert ("rows of the run" in found.overview) == (not steps)


def test_the_loss_of_a_row_is_a_mean_over_its_targets_where_a_run_says_how_many(tmp_path: Path) -> None:
    job: Any = SimpleNamespace(run_dir=str(tmp_path), cache=SimpleNamespace(storage_options={}))
    log, rows = FeedbackLog(f"{tmp_path}/server/feedback", {}), np.array([3, 9, 12])
    losses = {"loss": np.array([12.0, 30.0, 0.0], np.float32), "targets": np.array([4, 20, 0], np.float32)}
    log.report(RowOutcomes(np.zeros(3, np.int64), rows, losses), 0)
    log.report(RowOutcomes(np.ones(1, np.int64), rows[:1] + 1, {"loss": np.array([2.5], np.float32)}), 0)
    assert _losses(job, 2) == {3: 3.0, 9: 1.5, 12: 0.0, 4: 2.5}


def test_a_damaged_row_log_is_named_once_with_one_remedy(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.rows.write_text("{\n")
    with pytest.raises(
        StateMismatch, match=r"^\S*rows\.jsonl: has a damaged line 1; restore the file, [^;]*$"
    ):
        _steps_of_rows(folder)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_a_tokenizer_of_words_has_the_blanks_between_them(decoder: Any) -> None:
    backend = Tokenizer(
        models.WordPiece({"<unk>": 0, "the": 1, "answ": 2, "##er": 3, "?": 4}, unk_token="<unk>")
    )
    backend.decoder = decoder
    tokenizer, ids = PreTrainedTokenizerFast(tokenizer_object=backend), [1, 2, 3, 4, 1]
    pieces = _pieces(tokenizer, sorted(set(ids)))
    assert b"".join(pieces[token] for token in ids).decode() == " " + tokenizer.decode(ids)


def test_a_lone_surrogate_in_what_a_source_says_does_not_keep_a_page_from_being_written(
    tmp_path: Path,
) -> None:
    write_page(tmp_path / "page.html", render(replace(facts(), title="role \ud800")))
    assert "role ?" in (tmp_path / "page.html").read_text()


def test_decisions_of_a_run_are_listed_and_their_names_are_only_text() -> None:
    assert "<h2>Decisions" not in render(facts())
    decisions = [
        {"step": 40, "weights": {"math": 3.0, "<b>bad": 0.5}, "skip_rows": ()},
        {"step": 7, "weights": None, "skip_rows": tuple(range(5000, 6200))},
    ]
    page = render(replace(facts(), decisions=decisions))
    first, second = re.findall(
        r"<tr><td>(.*?)</td></tr>", page.partition("<h2>Decisions")[2].partition("</table>")[0]
    )
    assert first.split("</td><td>") == ["40", "math 3, &lt;b&gt;bad 0.5", ""]
    assert second.split("</td><td>") == [
        "7",
        "",
        f"1,200: {', '.join(f'0:0:{row}' for row in range(5000, 5008))}, …",
    ]


def test_a_page_of_a_source_without_an_end_has_no_plan() -> None:
    assert "<h2>Plan" in render(facts())
    assert "<h2>Plan" not in render(replace(facts(), plan=None))


def test_waits_have_their_verdicts() -> None:
    said = "step 3 waited 50 ms: <collation> 40 ms"
    names = ("steps", "optimizer_steps", "rows", "tokens_trained", "loss_first", "loss_last", "tokens_per_s")
    stalls = {"by_cause": {"collation on the server": 1.234}, "last": [said]}
    summary = {**dict.fromkeys(names, 1), "stall_fraction": 0.1, "stalls": stalls}
    page = render(replace(facts(), summary=summary))
    assert "step 3 waited 50 ms: &lt;collation&gt; 40 ms" in page
    assert "<td>collation on the server</td><td class='n'>1.23 s</td>" in page


def test_the_longest_waits_come_first_and_short_ones_not_at_all() -> None:
    assert [step["step"] for step in worst_stalls(STEPS)] == [3]


def test_a_peak_of_one_step_in_a_million_is_never_thinned_away() -> None:
    rng = np.random.default_rng(0)
    loss = rng.normal(2.0, 0.1, 1_000_000)
    loss[[123_456, 654_321]] = (97.0, -5.0)
    flat = np.zeros(1_000_000)
    flat[777_777] = np.inf
    stay = kept([loss, flat], len(loss))
    assert {0, 123_456, 654_321, 999_999} <= set(stay.tolist())
    assert len(stay) <= 4 * STRETCHES + 2
    # as a screen of 1,000 columns shows it: smallest and largest of every column, by another computation
    columns = loss.reshape(STRETCHES, -1)
    shown = [loss[stay[(stay >= low) & (stay < low + 1000)]] for low in range(0, 1_000_000, 1000)]
    assert [part.min() for part in shown] == columns.min(1).tolist()
    assert [part.max() for part in shown] == columns.max(1).tolist()


def test_a_short_run_keeps_every_point_and_gaps_stay_gaps() -> None:
    chart = Chart("l", "step", [3, 4, 5], {"loss": [1.0, float("nan"), 0.5], "b": [None, 2.0, float("inf")]})
    told = json.loads(json.dumps(chart.to_json(), allow_nan=False))
    assert told["x"] == [3, 4, 5]
    assert [each["values"] for each in told["series"]] == [[1, None, 0.5], [None, 2, None]]


def test_histograms_of_sources_share_their_bins_and_count_every_row() -> None:
    chart = histogram("h", "tokens", {"a": [1, 2, 2, 3, 100], "b": [50], "none": []}, bins=10)
    assert (chart.x[0], chart.x[-1], len(chart.x)) == (1.0, 100.0, 11)
    assert {name: sum(values[:-1]) for name, values in chart.series.items()} == {"a": 5, "b": 1, "none": 0}
    assert histogram("one value", "tokens", {"a": [5, 5]}).series["a"][0] == 2
    assert bars("b", "x", [(0, 1, 4), (1, 2, 0)], "n").series == {"n": [4, 0, 0]}


def test_evals_stand_at_their_own_steps() -> None:
    chart = with_dots(
        Chart("Loss", "step", [0, 1, 2], {"train": [3.0, 2.0, 1.0]}), {"eval v": {1: 2.5, 4: 0.5}}
    )
    assert chart.x == [0, 1, 2, 4]
    assert chart.series == {"train": [3.0, 2.0, 1.0, None], "eval v": [None, 2.5, None, 0.5]}


def test_the_charts_of_a_run_are_the_lines_of_its_log() -> None:
    charts = {chart.title: chart.series for chart in run_charts(STEPS, facts().evals)}
    assert charts["Loss"]["eval valid"] == [None] * 4 + [1.25, None, None, 1.0]
    assert charts["Loss by source"] == {"chat": [2.5] * 8, "<b>": [0.375] * 8}
    assert list(charts["Loss by length of the row"]) == [
        "up to 32 tokens",
        "up to 64 tokens",
        "up to 128 tokens",
    ]
    assert charts["Loss by length of the row"]["up to 32 tokens"] == [None] * 8
    waits = charts["Waited for data, ms, and what for"]
    assert (waits["waited"][3], waits["collation"][3], waits["reading rows"][3]) == (50.0, 50.0, 0.0)
    (padding,) = [series["share"] for title, series in charts.items() if title.startswith("Cells")]
    assert padding == [0.25] * 8


def test_a_run_of_an_older_version_has_the_charts_that_its_lines_say() -> None:
    old = [
        {name: step[name] for name in ("step", "loss", "tokens", "step_s", "stall_s", "grad_norm")}
        for step in STEPS
    ]
    titles = [chart.title for chart in run_charts(old, [])]
    assert "Loss" in titles
    assert not {"Learning rate", "Loss by source"} & set(titles)


def test_a_run_of_pairs_has_charts_of_accuracies_rewards_and_log_probabilities() -> None:
    told = {
        "rewards/accuracies": 0.5,
        "rewards/chosen": 1.0,
        "rewards/rejected": -1.0,
        "rewards/margins": 2.0,
        "logps/chosen": -7.0,
    }
    charts = {chart.title: chart.series for chart in run_charts([{**STEPS[0], **told}, STEPS[1]], [])}
    assert charts["Share of pairs whose chosen reward is higher"] == {"accuracies": [0.5, None]}
    assert charts["Rewards"] == {"chosen": [1.0, None], "rejected": [-1.0, None], "margins": [2.0, None]}
    assert charts["Log-probabilities"] == {"chosen": [-7.0, None]}
    assert "Rewards" not in {chart.title for chart in run_charts(STEPS, [])}


HOVER = """<script>addEventListener("load", () => {
  const say = (name, text) => { const p = document.createElement("p"); p.id = name; p.textContent = text; document.body.append(p); };
  const chart = window.charts.find((each) => each.series[1].label === "train");
  chart.setCursor({ left: chart.valToPos(3, "x"), top: 10 });
  say("hovered", [...document.querySelectorAll("figure")].find((f) => f.textContent.startsWith("Loss")).querySelector(".u-legend").textContent);
  const peak = window.charts.find((each) => each.series[1].label === "waited");
  const at = Math.round(peak.valToPos(3, "x", true)), top = Math.round(peak.valToPos(50, "y", true));
  const cells = peak.ctx.getImageData(at - 3, top - 3, 7, 7).data;
  say("peak", [...cells].some((v) => v > 0) ? "drawn" : "missing");
  say("wide", String(document.documentElement.scrollWidth <= innerWidth));
});</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 500])  # 500: a headless Chromium has no smaller window
def test_a_browser_draws_every_chart_and_says_values_under_the_pointer(tmp_path: Path, width: int) -> None:
    page = tmp_path / "report.html"
    text = render(facts("<b>&"))
    own = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text).replace("</body>", HOVER)
    page.write_text(own)
    dom, said = browse_page(page, tmp_path, width)
    assert dom.count("<canvas") == dom.count("<figure") == 11
    hovered = re.search(r'id="hovered">([^<]*)<', dom)
    assert hovered is not None
    assert hovered[1].replace(" ", "").startswith("step3train1.25")  # 5 / (3 + 1)
    assert 'id="peak">drawn<' in dom
    assert 'id="wide">true<' in dom, "nothing is wider than the window"
    assert "CONSOLE" not in said


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_the_policy_of_the_page_lets_its_own_scripts_run_and_no_other(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render(facts()).replace("</body>", "<script>document.title = 'foreign'</script></body>"))
    dom, said = browse_page(page, tmp_path, 1280)
    assert dom.count("<canvas") == 11
    assert "<title>foreign" not in dom
    assert "Content Security Policy" in said


def browse_page(page: Path, folder: Path, width: int) -> tuple[str, str]:
    """(DOM after the scripts, log) of a headless Chromium."""
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--enable-logging=stderr",
    ]
    flags += [
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--virtual-time-budget=4000",
    ]
    command = [str(BROWSER), *flags, f"--window-size={width},900", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=90, check=True
    )
    return done.stdout, done.stderr
