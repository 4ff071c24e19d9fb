"""Tokenizers that put blanks before a text, and those that normalize it: ids and masks are those of `transformers`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from raysvc.chat.sequence import Batch, Spans
from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.json_rows import SourceRow
from raysvc.chat.tokens import encoder
from raysvc.chat.tokens.added_blanks import Rule
from raysvc.chat.tokens.align import differing_rows
from raysvc.chat.tokens.encoder import EncodedTexts, ReferenceEncoder
from raysvc.chat.tokens.normal_text import NormalText
from raysvc.chat.tokens.normalizing_encoder import makes_any
from raysvc.chat.tokens.probe import encoders_of
from raysvc.chat.tokens.token_rows import UNKNOWN, RowEncoder
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.job.config import TextSpec, TokenizerConfig

from .sentencepiece_like import INST, KINDS, MARKED, SPECIALS, save, small_model

BITS = [
    *(
        "a",
        "hello",
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\t",
        "\u2581",
        " \u2581 ",
        "\u2581\u2581x",
        "The answer",
    ),
    *(
        "e\u0301",
        "\u0301",
        "\u1100\u1161\u11a8",
        "\u212b",
        "\ufb01",
        "\u1e9b\u0323",
        "\u0130",
        "\u0391\u03a3",
    ),
    *(
        "\u4f60\u597d",
        "\U0001f600",
        "\U0001f468\u200d\U0001f469",
        "\x00",
        "\u00a0",
        "\u3000",
        "\ufeff",
        "\x85",
    ),
    *("<0x41>", "<0xE2>", "<s", "/s>", "[INST]", "[/INST]", "ABC", "aBc\u00c5Z", "2 + 2"),
]
TOKENS_AND_NEAR = ("</s>", "<s>", "<unk>", "\uff1cs\uff1e", "\uff1c/s>", "</S>", "<S>", "\u0338", "s>")
text = (
    st.lists(st.sampled_from(BITS), min_size=1, max_size=6)
    .map("".join)
    .filter(lambda made: bool(made.strip()) and "<s>" not in made and "</s>" not in made)
)
chats = st.lists(st.tuples(text, text), min_size=1, max_size=3)
NORMALIZED = ("nfc", "nfkc", "lowercase")  # gigatoken does not take these normalizers
SLOW = settings(max_examples=40, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def marked(kind: str, tmp_path_factory: pytest.TempPathFactory) -> SliceTokenizer:
    folder = save(tmp_path_factory.mktemp(kind), KINDS[kind](small_model()), MARKED)
    return SliceTokenizer(TextSpec(tokenizer=TokenizerConfig(name=folder)))


def messages(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": role, "content": said} for pair in chat for role, said in zip(roles, pair, strict=True)]


@given(chats=st.lists(chats, min_size=1, max_size=4))
@example(chats=[[(" a ", " b ")], [("\u2581", "\u2581")], [("a  b", "\u2581a\u2581\u2581b  ")]])
@example(chats=[[("e\u0301", "e\u0301\u0323 \u1100\u1161\u11a8")], [("\u0301x", "\u0301x \ufb01\u212b")]])
@SLOW
def test_ids_and_masks_are_those_of_transformers(marked: SliceTokenizer, chats: Any) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a row was aligned one by one")

    if "Unigram" in repr(marked.tokenizer.hf.backend_tokenizer.model):  # it reads these six letters as a byte
        assume("<0x" not in str(chats))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowEncoder, "_align_odd", never)
        rows = [SourceRow(number, {"messages": messages(chat)}) for number, chat in enumerate(chats)]
        result = marked.run(rows)
    assert result.row_counts.rows_written == len(chats), result.examples
    for number, chat in enumerate(chats):
        truth = marked.tokenizer.hf.apply_chat_template(
            messages(chat), return_dict=True, return_assistant_tokens_mask=True
        )
        assert result.table["input_ids"][number].as_py() == truth["input_ids"]
        assert result.table["loss_mask"][number].as_py() == truth["assistant_masks"]


def test_rows_that_differ_only_in_the_case_of_ascii_letters_are_not_normalized_again(
    tmp_path: Any, monkeypatch: Any
) -> None:
    folder = save(tmp_path, KINDS["lowercase"](small_model()), MARKED)
    tokenizer = SliceTokenizer(TextSpec(tokenizer=TokenizerConfig(name=folder)))
    normalized: list[int] = []
    real = NormalText.batch
    monkeypatch.setattr(
        NormalText, "batch", lambda self, batch, rows: normalized.extend(rows) or real(self, batch, rows)
    )
    chats = [[("The ABC", "Hello A\n B")], [("Is it", "\u0130 A")], [("a", "b")], [("\u00dc", "\u00c5 A")]]
    result = tokenizer.run([SourceRow(n, {"messages": messages(chat)}) for n, chat in enumerate(chats)])
    assert normalized == [1, 3]
    assert result.row_counts.rows_written == 4


@given(
    tokens=st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3), text=st.text("aAbB<", max_size=12)
)
@example(tokens=["aba"], text="abaBa")  # one that lies over another
@SLOW
def test_a_token_that_lowering_makes_is_found_wherever_it_lies(tokens: list[str], text: str) -> None:
    def places(token: str, within: str) -> list[int]:
        return [at for at in range(len(within)) if within.startswith(token, at)]

    made = any(places(token, text) != places(token, text.lower()) for token in tokens)
    assert makes_any([token.encode() for token in tokens], text.encode(), text.lower().encode()) == made


@given(rows=st.lists(st.tuples(st.binary(max_size=3), st.binary(max_size=3) | st.none()), max_size=6))
@SLOW
def test_rows_differ_where_their_bytes_do(rows: list[tuple[bytes, bytes | None]]) -> None:
    texts, found = [text for text, _ in rows], [text if said is None else said for text, said in rows]
    folded = np.frombuffer(bytes(range(256)).lower(), np.uint8)
    ends, offsets = (np.cumsum([0, *map(len, each)], dtype=np.int64) for each in (found, texts))
    nothing = np.zeros(0, np.int64)
    batch = Batch(
        np.frombuffer(b"".join(texts), np.uint8), offsets, Spans(nothing, nothing, nothing, nothing)
    )
    encoded = EncodedTexts(np.zeros(len(rows), np.int32), np.arange(len(rows) + 1))
    decoded = np.frombuffer(b"".join(found), np.uint8)
    for fold, may_be in ((None, lambda byte: {byte}), (folded, lambda byte: {byte, int(folded[byte])})):
        same = [
            len(text) == len(said) and all(b in may_be(a) for a, b in zip(text, said, strict=True))
            for text, said in zip(texts, found, strict=True)
        ]
        expected = [row for row, equal in enumerate(same) if not equal]
        assert differing_rows(encoded, ends, decoded, batch, fold).tolist() == expected


def test_both_ways_of_alignment_give_the_same_mask(tmp_path: Any, monkeypatch: Any) -> None:
    folder = save(tmp_path, KINDS["llama2"](small_model()), INST)
    seen: list[int] = []
    real = RowEncoder._align_odd
    monkeypatch.setattr(
        RowEncoder,
        "_align_odd",
        lambda self, rows, batch, row: seen.append(row) or real(self, rows, batch, row),
    )
    rows = [SourceRow(0, {"messages": messages([("a b", "c d")])})]
    fast = SliceTokenizer(TextSpec(tokenizer=TokenizerConfig(name=folder))).run(rows)
    assert seen == []
    monkeypatch.setattr("raysvc.chat.tokens.align.rule_of", lambda _: Rule.NONE)
    slow = SliceTokenizer(TextSpec(tokenizer=TokenizerConfig(name=folder))).run(rows)
    assert seen == [0]
    assert fast.table.equals(slow.table)


@given(texts=st.lists(st.lists(st.sampled_from([*BITS, *TOKENS_AND_NEAR, ""]), max_size=8).map("".join)))
@example(texts=["", " </s>", "", "</s> a", "a b", "", "</s>", " ", "\u2581 a", "a\u00a0 b", ""])
@example(texts=["</s>\u0338", "\u00e9 </S>", "\uff1cs\uff1e", "a\uff1c/s\uff1e<s>", "\u212b</s>\u212b"])
@SLOW
def test_ids_of_the_fast_encoder_are_those_of_the_library(marked: SliceTokenizer, texts: list[str]) -> None:
    wanted = ReferenceEncoder(marked.tokenizer).encode(texts)
    found = marked._encoder.encode(texts)
    assert found.ids.tolist() == wanted.ids.tolist()
    assert found.offsets.tolist() == wanted.offsets.tolist()


@pytest.mark.parametrize("limit", ["", "MOST_BYTES", "TEXT_PER_CONTENT"])
@pytest.mark.parametrize(
    "kind", [each for each in KINDS if each not in (*NORMALIZED, "unigram")], indirect=True
)
def test_texts_that_gigatoken_encodes_together_keep_their_ids(
    marked: SliceTokenizer, monkeypatch: Any, limit: str
) -> None:
    pytest.importorskip("gigatoken")
    if limit:
        monkeypatch.setattr(encoder, limit, 0)
    backend = Tokenizer.from_str(marked.tokenizer.hf.backend_tokenizer.to_str())
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("\0\0", "\x01")])
    joined = encoder.JoinedTexts(backend.to_str().encode(), backend.get_vocab_size())
    loaded = joined._inner
    texts = ["a b", "", " a", "\u2581a", "a\0", "\0b", "<s>a", "a </s>", "\0\0", "\x01", "a  \u00e9"]
    for _ in range(2):
        ids, offsets = joined.encode([text.encode() for text in texts])
        wanted = [backend.encode(text, add_special_tokens=False).ids for text in texts]
        assert [ids[a:b].tolist() for a, b in pairwise(offsets)] == wanted
    assert (joined._inner is loaded) == (limit != "TEXT_PER_CONTENT")


def test_texts_are_joined_for_small_sentencepiece_like_tokenizers_alone() -> None:
    model = b'{"model": {"byte_fallback":%s}}'
    small, no_bytes = model % b"true", model % b"false"
    large = small.ljust(encoder.MOST_CONTENT + 1)
    assert [encoder.gains(content) for content in (small, no_bytes, large)] == [True, False, False]


def test_gigatoken_encodes_normalized_texts_where_it_does_not_take_the_normalizer(
    kind: str, marked: SliceTokenizer
) -> None:
    pytest.importorskip("gigatoken")
    names = {**dict.fromkeys(NORMALIZED, "gigatoken of normalized texts"), "unigram": "tokenizers"}
    assert marked.encoder_name == names.get(kind, "gigatoken")
    if kind in NORMALIZED:
        marked._encoder.encode(["".join(map(chr, range(0x80, 0x500)))])
        assert not marked._encoder.different  # type: ignore[attr-defined]


def test_a_token_that_grows_to_its_left_when_its_text_is_normalized_has_the_ids_of_the_library(
    tmp_path: Path,
) -> None:
    pytest.importorskip("gigatoken")
    backend = KINDS["nfkc"](small_model())
    backend.add_tokens([AddedToken("s>", normalized=False)])
    folder = save(tmp_path, backend, MARKED)
    found = encoders_of(LoadedTokenizer(TokenizerConfig(name=folder)))
    assert found.best.name == "gigatoken of normalized texts"
    texts = ["a s> b", "a \uff1cs> b", "a \uff1cs\uff1e b", "\uff1c/s>"]
    assert found.best.encode(texts).ids.tolist() == found.reference.encode(texts).ids.tolist()


def test_a_turn_with_characters_that_a_unigram_model_has_no_piece_for_says_so(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), *((char, -float(n)) for n, char in enumerate("\u2581abINST[]/<s>"))]
    made = Tokenizer(models.Unigram(pieces, 0, False))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    tokenizer = SliceTokenizer(TextSpec(tokenizer=TokenizerConfig(name=save(tmp_path, made, INST))))
    rows = [
        SourceRow(n, {"messages": messages([("\u0416", said)])}) for n, said in enumerate(("a", "b\u0416"))
    ]
    result = tokenizer.run(rows)
    assert result.row_counts.rows_written == 1
    assert dict(result.row_counts.quarantined) == {UNKNOWN: 1}
