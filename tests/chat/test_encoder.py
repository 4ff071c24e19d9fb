"""Ids are the tokenizer's own, by whatever encoder; spans end where tokens end, or the row is quarantined."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from raysvc.chat.reference_check import RenderDiffers
from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.json_rows import SourceRow
from raysvc.chat.tokens.code_points import GuardedEncoder
from raysvc.chat.tokens.encoder import EncodedTexts, GigatokenEncoder, ReferenceEncoder
from raysvc.chat.tokens.probe import choose_encoder, probe_texts
from raysvc.chat.tokens.token_rows import EncoderDiffers
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.job.config import TextSpec, TokenizerConfig

CHATML = "chatml_default_system"
TEXTS = [
    "plain words",
    "caf\u00e9 and cafe\u0301",
    "\u4f60\u597d \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "   many   spaces   ",
    "tab\t\tand\r\nlines\n\n\nend",
    "spelled <|endoftext|> inside",
    "\u212b \ufb01 \u1e9b\u0323 \x00\x1f",
]


def rows(texts: list[str] = TEXTS) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}
        for text in texts
    ]


@pytest.mark.parametrize("kind", ["nfc", "metaspace", "adds_bos"])
@pytest.mark.parametrize("template", [CHATML, "llama3_trimming", "must_alternate"])
def test_other_kinds_of_tokenizers_are_right_too(
    kind: str, template: str, special_folder: Any, slice_tokenizer: Any, tokenize: Any
) -> None:
    tokenizer = slice_tokenizer(template, special_folder(kind, template))
    made, result = tokenize(tokenizer, *rows())
    hf = tokenizer.tokenizer.hf
    kept = result.table["source_row"].to_pylist()
    assert kept[:3] == [0, 1, 2]
    normalize = getattr(hf.backend_tokenizer.normalizer, "normalize_str", str) if kind == "nfc" else str
    if kind == "metaspace":  # its decoder shows the blank that is put behind an added token
        normalize = lambda text: hf.decode(hf(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    for row, number in zip(made, kept, strict=True):
        assert row.ids == hf.apply_chat_template(rows()[number]["messages"], return_dict=False)
        (text,) = row.trained
        eot = {"llama3_trimming": "<|eot_id|>", "must_alternate": "</s>"}.get(template, "<|im_end|>")
        assert text.count(eot) == 1
        assert text.endswith(eot)
        assert text.removesuffix(eot).strip() == normalize(TEXTS[number]).strip()


class Wrong:
    """An encoder that makes one id wrong in texts that hold a word, without changing what they decode to."""

    name = "wrong"

    def __init__(self, inner: Any, word: str) -> None:
        self._inner, self._word = inner, word

    def encode(self, texts: Any) -> EncodedTexts:
        return self._inner.encode(texts)

    def encode_bytes(self, data: Any, offsets: Any) -> EncodedTexts:
        found = self._inner.encode_bytes(data, offsets)
        ids, begin = found.ids.copy(), 0
        if self._word.encode() in data.tobytes():
            begin = 1 if len(ids) else 0
            ids[-3] = ids[-3] + 1
        return EncodedTexts(ids, found.offsets) if begin else found


def test_a_difference_on_a_slice_switches_to_the_reference_and_makes_the_slice_again(
    slice_tokenizer: Any, tokenize: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = slice_tokenizer(CHATML)
    good, _ = tokenize(tokenizer, *rows(["one", "two", "three"]))
    tokenizer._encoder = Wrong(tokenizer._reference, "three")
    with caplog.at_level(logging.WARNING, logger="raysvc.chat"):
        made, result = tokenize(tokenizer, *rows(["one", "two", "three"]))
    assert [row.ids for row in made] == [row.ids for row in good]
    assert result.encoder == tokenizer.encoder_name == "tokenizers"
    assert "wrong differs from the reference" in result.switched
    assert "switched to the reference" in caplog.text
    assert result.sampled >= 2


def test_a_difference_that_stays_with_the_reference_is_an_error_and_no_loop(
    slice_tokenizer: Any, tokenize: Any, monkeypatch: Any
) -> None:
    tokenizer = slice_tokenizer(CHATML)
    wrong = Wrong(ReferenceEncoder(tokenizer.tokenizer), "three")
    monkeypatch.setattr(tokenizer._reference, "encode_bytes", wrong.encode_bytes)
    tokenizer._encoder = tokenizer._reference
    with pytest.raises(EncoderDiffers):
        tokenize(tokenizer, *rows(["three"]))


def test_a_render_that_differs_from_the_reference_twice_is_an_error_and_no_loop(
    slice_tokenizer: Any, tokenize: Any, monkeypatch: Any
) -> None:
    tokenizer = slice_tokenizer(CHATML)
    truth = tokenizer.tokenizer.reference_ids
    monkeypatch.setattr(tokenizer.tokenizer, "reference_ids", lambda *row: [*truth(*row), 1])
    with pytest.raises(RenderDiffers):
        tokenize(tokenizer, *rows(["one"]))


def test_a_fast_encoder_has_to_be_equal_on_the_probes(tokenizer_folder: Any, monkeypatch: Any) -> None:
    from raysvc.chat.tokens import encoder

    tokenizer = LoadedTokenizer(TokenizerConfig(name=tokenizer_folder(CHATML)))
    reference = ReferenceEncoder(tokenizer)
    assert any("<|im_end|>" in text for text in probe_texts(tokenizer))
    chosen, why = choose_encoder(tokenizer, reference)
    assert (chosen.name, why) == ("gigatoken", "")

    class Off(encoder.GigatokenEncoder):
        def encode(self, texts: Any) -> EncodedTexts:
            found = super().encode(texts)
            return EncodedTexts(
                np.where(found.ids == found.ids.max(), 0, found.ids).astype(np.int32), found.offsets
            )

    monkeypatch.setattr(encoder, "GigatokenEncoder", Off)
    chosen, why = choose_encoder(tokenizer, reference)
    assert (chosen.name, why) == ("tokenizers", "gigatoken differs on a probe text")


def test_a_fast_encoder_that_differs_on_ascii_alone_is_not_used(
    tokenizer_folder: Any, monkeypatch: Any
) -> None:
    from raysvc.chat.tokens import encoder

    class Off(encoder.GigatokenEncoder):
        def encode(self, texts: Any) -> EncodedTexts:
            return super().encode([text.replace("Q{", "q{") for text in texts])

    monkeypatch.setattr(encoder, "GigatokenEncoder", Off)
    monkeypatch.setattr("raysvc.chat.tokens.code_points._unit", lambda char: f"{char}{{")
    tokenizer = LoadedTokenizer(TokenizerConfig(name=tokenizer_folder(CHATML)))
    chosen, why = choose_encoder(tokenizer, ReferenceEncoder(tokenizer))
    assert (chosen.name, why) == ("tokenizers", "gigatoken differs on ASCII")


def test_sources_that_share_a_loaded_tokenizer_share_its_encoders(
    tokenizer_folder: Any, monkeypatch: Any
) -> None:
    from raysvc.chat.tokens import encoder

    made: list[Any] = []

    class Counted(encoder.GigatokenEncoder):
        def __init__(self, content: bytes, free_id: int) -> None:
            super().__init__(content, free_id)
            made.append(self)

    monkeypatch.setattr(encoder, "GigatokenEncoder", Counted)
    config = TokenizerConfig(name=tokenizer_folder(CHATML))
    first, other = LoadedTokenizer(config), LoadedTokenizer(config)
    for tokenizer in (first, first, other):
        source = SliceTokenizer(TextSpec(tokenizer=config), tokenizer=tokenizer)
        assert source.encoder_name == "gigatoken"
    assert len(made) == 4  # one with its own vocabulary and one with a vocabulary that shows cuts, for each


def test_a_fast_encoder_is_not_needed(tokenizer_folder: Any, monkeypatch: Any) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gigatoken", None)
    tokenizer = SliceTokenizer(TextSpec(tokenizer=TokenizerConfig(name=tokenizer_folder(CHATML))))
    assert tokenizer.encoder_name == "tokenizers"
    assert (
        tokenizer.run([SourceRow(0, rows(["a"])[0])]).switched
        == "gigatoken is not installed (pip install gigatoken)"
    )


@pytest.mark.parametrize("template", [CHATML, "llama3_trimming", "strips_think", "generation_marks"])
def test_content_that_spells_the_end_of_turn_cannot_be_trained_but_can_be_context(
    template: str, slice_tokenizer: Any, tokenize: Any
) -> None:
    eot = "<|eot_id|>" if template == "llama3_trimming" else "<|im_end|>"
    spelled = f"a {eot} b"
    asked = {"messages": [{"role": "user", "content": spelled}, {"role": "assistant", "content": "c"}]}
    answered = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": spelled}]}
    tokenizer = slice_tokenizer(template)
    made, result = tokenize(tokenizer, asked, answered)
    assert result.table["source_row"].to_pylist() == [0]
    assert made[0].ids == tokenizer.tokenizer.hf.apply_chat_template(asked["messages"], return_dict=False)
    assert made[0].trained == [f"c{eot}"]
    assert result.row_counts.quarantined == {"a trained turn holds a control token": 1}


def test_blanks_that_merge_with_the_header_are_context(slice_tokenizer: Any, tokenize: Any) -> None:
    tokenizer = slice_tokenizer(CHATML)
    hf = tokenizer.tokenizer.hf
    assert len(hf("\n\n")["input_ids"]) == 1
    (row,), _ = tokenize(tokenizer, *rows(["\n\nhello"]))
    assert row.trained == ["\nhello<|im_end|>"]


def test_a_token_over_header_and_message_sets_the_row_aside(
    tokenizer_folder: Any, slice_tokenizer: Any, tokenize: Any
) -> None:
    template = "{% for m in messages %}{{ m.role + ': answ' + m.content + '<|im_end|>' }}{% endfor %}"
    config = TokenizerConfig(name=tokenizer_folder(CHATML), chat_template=template)
    tokenizer = SliceTokenizer(TextSpec(tokenizer=config))
    _, result = tokenize(tokenizer, *rows(["er me", " me"]))
    assert result.table["source_row"].to_pylist() == [1]
    assert result.row_counts.quarantined == {"a token spans a header and its message": 1}


def test_lines_keep_their_numbers_and_one_fault_stays_one_rows(slice_tokenizer: Any) -> None:
    good = json.dumps(rows(["a"])[0])
    lines = [good, "", "{broken", good, "[1, 2]", good + "\r", "  "]
    result = slice_tokenizer(CHATML).run_json_lines("\n".join(lines).encode(), 100)
    assert result.table["source_row"].to_pylist() == [100, 103, 105]
    assert result.row_counts.quarantined == {"broken JSON": 1, "not a JSON object": 1}
    assert [example.source_row for example in result.examples] == [102, 104]
    assert "broken JSON" in str(result.examples[0])


def test_a_byte_order_mark_is_no_fault(slice_tokenizer: Any) -> None:
    data = b"\xef\xbb\xbf" + json.dumps(rows(["a"])[0]).encode()
    assert slice_tokenizer(CHATML).run_json_lines(data, 0).row_counts.rows_written == 1


def test_a_slice_of_many_blocks_gives_what_one_block_gives(slice_tokenizer: Any, monkeypatch: Any) -> None:
    from raysvc.chat import row_sequences
    from raysvc.chat.source import json_rows

    data = "\n".join(json.dumps(row) for row in rows([f"number {n} \u00e9" for n in range(50)])).encode()
    once = slice_tokenizer(CHATML).run_json_lines(data, 7)
    monkeypatch.setattr(json_rows, "BLOCK_BYTES", 300)
    monkeypatch.setattr(row_sequences, "ROWS_PER_CHUNK", 3)
    many = slice_tokenizer(CHATML).run_json_lines(data, 7)
    assert once.table.to_pydict() == many.table.to_pydict()
    assert once.row_counts == many.row_counts
    assert once.table["source_row"].to_pylist() == list(range(7, 57))


def test_an_empty_slice_is_an_empty_table(slice_tokenizer: Any) -> None:
    for result in (slice_tokenizer(CHATML).run_json_lines(b"", 0), slice_tokenizer(CHATML).run([])):
        assert (result.table.num_rows, result.row_counts.rows_in) == (0, 0)
        assert result.table.schema.names == ["input_ids", "loss_mask", "source_row"]


class Newer:
    """A fast encoder with other tables of Unicode: it drops the last id of a text that ends a word with a new digit."""

    name = "newer"

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def encode(self, texts: Any) -> EncodedTexts:
        lists = [self._inner.encode([text]).ids for text in texts]
        ids = [
            found[:-1] if "\U00011de3" in text else found for text, found in zip(texts, lists, strict=True)
        ]
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum([len(found) for found in ids], out=offsets[1:])
        return EncodedTexts(np.concatenate([*ids, np.zeros(0, np.int32)]).astype(np.int32), offsets)

    def encode_bytes(self, data: Any, offsets: Any) -> EncodedTexts:
        whole, bounds = data.tobytes(), offsets.tolist()
        return self.encode([whole[a:b].decode() for a, b in itertools.pairwise(bounds)])


def test_rows_with_a_code_point_that_differs_get_the_ids_of_the_reference(tokenizer_folder: Any) -> None:
    reference = ReferenceEncoder(LoadedTokenizer(TokenizerConfig(name=tokenizer_folder(CHATML))))
    guarded = GuardedEncoder(Newer(reference), reference)
    texts = ["plain", "a \U00011de3", "caf\u00e9", "\U00011de3\U00011de4 b", "", "\U00011de4"]
    whole = "".join(texts).encode()
    offsets = np.cumsum([0, *(len(text.encode()) for text in texts)])
    wanted = reference.encode(texts)
    for found in (guarded.encode(texts), guarded.encode_bytes(np.frombuffer(whole, np.uint8), offsets)):
        assert found.ids.tolist() == wanted.ids.tolist()
        assert found.offsets.tolist() == wanted.offsets.tolist()
    assert guarded.different == set(range(0x11D80, 0x11E00)), "the block, and no other"


def test_a_text_waits_for_its_code_points_that_another_thread_is_trying(tokenizer_folder: Any) -> None:
    reference = ReferenceEncoder(LoadedTokenizer(TokenizerConfig(name=tokenizer_folder(CHATML))))
    trying, go_on = threading.Event(), threading.Event()

    class Slow(Newer):
        def encode(self, texts: Any) -> EncodedTexts:
            if "\U00011de3" in texts[0]:
                trying.set()
                assert go_on.wait(60)
            return super().encode(texts)

    guarded = GuardedEncoder(Slow(reference), reference)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(guarded.encode, ["a \U00011de4"])
        assert trying.wait(60)
        second = pool.submit(guarded.encode, ["b \U00011de3"])
        time.sleep(0.05)  # the second would be in the fast encoder by now
        go_on.set()
    for found, text in ((first, "a \U00011de4"), (second, "b \U00011de3")):
        assert found.result().ids.tolist() == reference.encode([text]).ids.tolist()


def test_gigatoken_gives_the_ids_of_the_reference_for_every_code_point_of_new_scripts() -> None:
    """U+11DE0 to U+11DE9 are digits in Unicode 17, and unassigned in older tables."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    llama = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(llama), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    digits = [chr(point) for point in range(0x11DE0, 0x11DEA)]
    corpus = ["".join(digits[n:] + digits[:n]) + "'s  " + digits[n] * 5 for n in range(10)] * 50
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(corpus, trainer)

    class Loaded:
        hf = PreTrainedTokenizerFast(tokenizer_object=backend)

    reference = ReferenceEncoder(Loaded())  # type: ignore[arg-type]
    fast = GigatokenEncoder(backend.to_str().encode(), len(backend.get_vocab()))
    texts = [f"  {a}{b}{a}{a}'s {b}1" for a in digits for b in digits]
    raw, wanted = fast.encode(texts), reference.encode(texts)
    found = GuardedEncoder(fast, reference).encode(texts)
    assert found.ids.tolist() == wanted.ids.tolist()
    if raw.ids.tolist() == wanted.ids.tolist():
        pytest.skip("this gigatoken and this tokenizers have the same tables")


def test_an_encoder_that_raises_is_one_that_differs(tokenizer_folder: Any, monkeypatch: Any) -> None:
    from raysvc.chat.tokens import encoder

    def broken(self: Any, texts: Any) -> EncodedTexts:
        raise RuntimeError("a native library")

    monkeypatch.setattr(encoder.GigatokenEncoder, "encode", broken)
    tokenizer = LoadedTokenizer(TokenizerConfig(name=tokenizer_folder(CHATML)))
    chosen, why = choose_encoder(tokenizer, ReferenceEncoder(tokenizer))
    assert (chosen.name, why) == ("tokenizers", "gigatoken differs on a probe text")


def test_a_tokenizer_that_splits_its_special_tokens_has_the_reference(tokenizer_folder: Any) -> None:
    tokenizer = LoadedTokenizer(TokenizerConfig(name=tokenizer_folder(CHATML)))
    tokenizer.hf.split_special_tokens = True
    chosen, why = choose_encoder(tokenizer, ReferenceEncoder(tokenizer))
    assert (chosen.name, why) == ("tokenizers", "the tokenizer splits special tokens")


def test_no_text_has_no_ids(tokenizer_folder: Any) -> None:
    tokenizer = LoadedTokenizer(TokenizerConfig(name=tokenizer_folder(CHATML)))
    nothing = np.zeros(0, np.uint8), np.zeros(1, np.int64)
    for each in (GigatokenEncoder(tokenizer.content(), tokenizer.free_id), ReferenceEncoder(tokenizer)):
        for made in (each.encode([]), each.encode_bytes(*nothing)):
            assert (len(made.ids), made.offsets.tolist()) == (0, [0])
