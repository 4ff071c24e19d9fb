"""Rows in a page that one looks through: what lies in the page, and what a browser makes of it."""

from __future__ import annotations

import html
import itertools
import json
import re
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
from raysvc.errors import StateMismatch
from raysvc.feedback.feedback_log import FeedbackLog
from raysvc.feedback.request import RowOutcomes
from raysvc.inspect.left_out import steps_of_rows
from raysvc.inspect.row_view import row_picture
from raysvc.job.job_file import load_job
from raysvc.ragged import offsets_of
from raysvc.report.browse import BrowsedRows, browse
from raysvc.report.browsed_rows import _pieces, browsed_rows, held_cells, kept_tokens, seen_rows
from raysvc.report.facts import Facts, _losses, gather
from raysvc.report.page import render
from raysvc.report.rows_page import render_rows
from raysvc.row_ids import source_base
from raysvc.training.run_folder import RunFolder
from raysvc.training.run_identity import KEYS, claim
from tests.inspect.pages import BROWSER, PIECES, browse_page, facts, listed, table_of, tokens_of

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
    aside = [{"source_row": 3, "reason": "<odd>", "detail": "why", "dataset": "m<", "text": "<b>{"}]
    page = browse(listed(), COUNTS, aside, "")
    assert "<b>{" not in page
    assert table_of(page)["aside"] == [
        {"source": "m<", "why": "<odd>", "detail": "why", "shown": "m<:3", "text": "<b>{"}
    ]
    table = table_of(page)
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
        "<i><code>&lt;|user|&gt;</code>7</i><span><code>short</code>101</span><b><code>answer </code>8</b><b><code>short</code>101</b>",
        "<i>&lt;|user|&gt;</i><span>long...</span><i> […60 tokens…] </i><span>...</span><b>answer long</b>",
        "source math. raysvc show --row 0:0:5 prints its text, which is not in this page.",
        "1 of 1", "source row 7quarantined: hello, too odd{<b>alien}raysvc show --source-row 7{<b>alien}",
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
    found = browsed_rows(entry, seen_rows(entry, rows, lengths, losses), len(rows), losses, {}, {})
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
    entry: Any = SimpleNamespace(sources=("large", "small"), entries=())
    kept = kept_tokens(entry, rows, np.arange(1005, dtype=np.int32) % 50 + 3, {int(rows[7]): 1.0})
    assert kept[7] == 10, "the one of the highest loss, whole"
    assert ((kept[source == 1] > 0).sum(), (kept > 0).sum() < 20) == (3, True)


LOOK_AT_UNTRAINED = """
  const state = document.getElementById("state");
  said.push([...state.options].slice(1).map((one) => one.textContent).join());
  state.selectedIndex = 2; state.dispatchEvent(new Event("input")); said.push(seen(), count());
  const row = document.querySelector("#rows > details"); said.push(row.querySelector("summary").textContent.includes("not trained"));
  await open(row); said.push(row.querySelector("p").textContent);
  state.selectedIndex = 1; state.dispatchEvent(new Event("input")); said.push(seen());
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_rows_that_no_step_trains_are_chosen_by_their_reason(tmp_path: Path) -> None:
    rows = replace(listed(), untrained={9: "too long", 5: "held out", 70: "held out"})
    said = looked_at(tmp_path, LOOK_AT_UNTRAINED, replace(facts(), rows=rows))
    assert said[1:] == [
        "quarantined: hello (1),not trained: too long (1),not trained: held out (2)", "9", "1 of 1", "true",
        "source chat", "not trained: too long. raysvc show --row 0:0:9", "source row 7",
    ]  # fmt: skip


LOOK_AT_PAIRS = """
  const told = () => [...document.querySelectorAll("#rows > details")].map((one) => [one.className, ...[...one.querySelectorAll("summary > span")].slice(1).map((each) => each.textContent)].join(" "));
  said.push(...told()); set("order", "highest loss"); said.push(seen()); set("order", "shortest"); said.push(seen());
  set("find", "short"); said.push(seen());
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_pair_stands_together_with_one_loss_however_rows_are_sorted(tmp_path: Path) -> None:
    rows = replace(listed(), roles=["chosen", "rejected"] * 2, losses={9: 0.5, 70: 2.5})
    assert looked_at(tmp_path, LOOK_AT_PAIRS, replace(facts(), rows=rows))[1:] == [
        "first chosen 9 tokens 22% trained pair's loss 0.500", "second rejected 4 tokens 50% trained",
        "first chosen 70 tokens 3% trained pair's loss 2.500", "second rejected 5 tokens 100% trained",
        "70,5,9,4", "9,4,70,5", "9,4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "roles"),
    [("preference", ["chosen", "rejected"]), ("kto", ["good", "mismatched", "bad", "mismatched"])],
)
def test_a_page_without_room_for_all_lists_and_holds_whole_pairs(
    kind: str, roles: list[str], tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = {"LISTED": 7, "LEAST_HELD": 2, "HELD_TOKENS": 0, "ENDS": 1, "OF_A_SOURCE": 1}
    for name, value in room.items():
        monkeypatch.setattr(f"raysvc.report.browsed_rows.{name}", value)
    told = [
        {"prompt": "what is it", "chosen": "a dog" + " barks" * number, "rejected": "no"} if kind == "preference"
        else {"prompt": "what is it", "completion": "a dog" + " barks" * number, "label": number % 2 == 0}
        for number in range(20)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told))
    entry = raysvc.tokenize(
        {"source": {"path": str(tmp_path / "rows.jsonl"), "format": kind}, "tokenizer": sample["tokenizer"], "cache": {"root": str(tmp_path)}}
    )  # fmt: skip
    ids, lengths = entry.row_ids(), entry.rows.lengths()
    every = seen_rows(entry, ids, lengths, {})
    assert len(ids) == 40
    monkeypatch.setattr("raysvc.report.browsed_rows.LISTED", 100)
    whole = seen_rows(entry, ids, lengths, {})
    assert whole.roles == roles * (40 // len(roles))
    place = np.searchsorted(ids, every.row_ids)
    assert 8 <= len(place) < 40
    assert place[::2].tolist() == (place[1::2] - 1).tolist()
    assert every.roles == [whole.roles[one] for one in place]
    assert ((every.kept > 0)[::2] == (every.kept > 0)[1::2]).all()
    assert ((whole.kept > 0)[::2] == (whole.kept > 0)[1::2]).all()


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


def test_the_job_of_a_report_has_no_credentials(tmp_path: Path, sample: dict[str, str]) -> None:
    job = load_job(
        {
            "source": {"path": sample["rows"], "storage_options": {"key": "k3y"}},
            "tokenizer": sample["tokenizer"],
            "cache": {"root": str(tmp_path / "cache")},
            "trainer": {"run_dir": str(tmp_path / "run")},
        }
    )
    entry = raysvc.tokenize(job)
    signed = job.source.model_copy(update={"path": ("https://me:pw@host/rows.jsonl?sig=s3cret",)})
    told = gather(job.model_copy(update={"source": signed}), entry).job
    assert told["source.path"] == ["https://***@host/rows.jsonl?***"]
    assert not [secret for secret in ("k3y", "pw", "s3cret") if secret in json.dumps(told)]


def test_the_loss_of_a_row_is_a_mean_over_its_targets_and_a_row_without_one_has_none(tmp_path: Path) -> None:
    job: Any = SimpleNamespace(run_dir=str(tmp_path), cache=SimpleNamespace(storage_options={}))
    log, rows = FeedbackLog(f"{tmp_path}/server/feedback", {}), np.array([3, 9, 12])
    losses = {"loss": np.array([12.0, 30.0, 0.0], np.float32), "targets": np.array([4, 20, 0], np.float32)}
    log.report(RowOutcomes(np.zeros(3, np.int64), rows, losses), 0)
    log.report(RowOutcomes(np.ones(1, np.int64), rows[:1] + 1, {"loss": np.array([2.5], np.float32)}), 0)
    assert _losses(job, 2) == {3: 3.0, 9: 1.5, 4: 2.5}


def test_a_damaged_row_log_is_named_once_with_one_remedy(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.rows.write_text("{\n")
    with pytest.raises(
        StateMismatch, match=r"^\S*rows\.jsonl: has a damaged line 1; restore the file, [^;]*$"
    ):
        steps_of_rows(folder)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_a_tokenizer_of_words_has_the_blanks_between_them(decoder: Any) -> None:
    backend = Tokenizer(
        models.WordPiece({"<unk>": 0, "the": 1, "answ": 2, "##er": 3, "?": 4}, unk_token="<unk>")
    )
    backend.decoder = decoder
    tokenizer, ids = PreTrainedTokenizerFast(tokenizer_object=backend), [1, 2, 3, 4, 1]
    pieces = _pieces(tokenizer, sorted(set(ids)))
    assert b"".join(pieces[token] for token in ids).decode() == " " + tokenizer.decode(ids)


def test_the_end_of_a_word_is_a_blank() -> None:
    backend = Tokenizer(
        models.BPE({"th": 0, "e</w>": 1, "cat</w>": 2, "<end>": 3}, [], end_of_word_suffix="</w>")
    )
    backend.decoder = decoders.BPEDecoder()
    tokenizer, ids = PreTrainedTokenizerFast(tokenizer_object=backend), [0, 1, 2, 0, 1]
    pieces = _pieces(tokenizer, [0, 1, 2, 3])
    assert b"".join(pieces[token] for token in ids).decode() == tokenizer.decode(ids) + " "
    assert pieces[3] == b"<end>"
