"""Normalizers, pre-tokenizers and models beyond BPE on bytes: ids, masks and decoded turns are those of the libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.json_rows import SourceRow
from raysvc.chat.tokens.token_rows import UNKNOWN, RowEncoder
from raysvc.errors import TokenizerError
from raysvc.job.config import TextSpec, TokenizerConfig

from .conftest import CORPUS, TEMPLATES
from .sentencepiece_like import MARKED, save

SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BITS = ["a", "hello", "The answer", "ABC", "an", " an ", "2 + 2", ",", "isn't", "x", "user"]
BLANKS = [" ", "  ", "\n", "\n\n", "\t", "\u00a0", " \n "]
MARKS = ["e\u0301", "\u0301", "\ufb01", "\u212b", "\u00e9", "\u4f60\u597d", "\U0001f600", "\u0130", "\x00"]


def trained(tokenizer: Tokenizer, trainer: Any, flags: dict[str, bool]) -> Tokenizer:
    tokenizer.train_from_iterator(
        [*CORPUS, *BITS, *MARKS, "assistant : [ INST ] \u00e9\u4f60\u597d e"] * 2, trainer
    )
    state = {**json.loads(tokenizer.to_str()), "added_tokens": []}
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True, **flags) for text in SPECIALS]
    )
    return tokenizer


def on_bytes(normalizer: Any = None, *before: Any, prefix: bool = False, **flags: bool) -> Tokenizer:
    made = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.pre_tokenizer = pre_tokenizers.Sequence([*before, level]) if before else level
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": SPECIALS, "show_progress": False}
    return trained(made, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, **options), flags)


def of_words(model: Any, pre: Any, normalizer: Any = None) -> Tokenizer:
    made = Tokenizer(model)
    made.pre_tokenizer = pre
    if normalizer is not None:
        made.normalizer = normalizer
    if isinstance(model, models.WordPiece):
        made.decoder = decoders.WordPiece()
    kind = trainers.WordPieceTrainer if made.decoder else trainers.WordLevelTrainer
    return trained(made, kind(vocab_size=600, special_tokens=SPECIALS, show_progress=False), {})


N, P = normalizers, pre_tokenizers
EXACT: dict[str, Callable[[], Tokenizer]] = {
    "nothing": lambda: on_bytes(),
    "add_prefix_space": lambda: on_bytes(prefix=True),
    "NFD": lambda: on_bytes(N.NFD()),
    "NFKC": lambda: on_bytes(N.NFKC()),
    "Lowercase": lambda: on_bytes(N.Lowercase()),
    "Strip": lambda: on_bytes(N.Strip()),
    "strips on the left": lambda: on_bytes(N.Sequence([N.NFC(), N.Strip(right=False)])),
    "StripAccents": lambda: on_bytes(N.Sequence([N.NFD(), N.StripAccents()])),
    "Replace": lambda: on_bytes(N.Replace("an", "AN!")),
    "deletes": lambda: on_bytes(N.Replace("e", "")),
    "rstrip": lambda: on_bytes(rstrip=True),
    "lstrip": lambda: on_bytes(lstrip=True),
    "both, NFKC": lambda: on_bytes(N.NFKC(), lstrip=True, rstrip=True),
    "Digits": lambda: on_bytes(None, P.Digits(individual_digits=True)),
    "Punctuation": lambda: on_bytes(N.Lowercase(), P.Punctuation()),
}
WORDS: dict[str, Callable[[], Tokenizer]] = {
    "BERT": lambda: of_words(models.WordPiece(unk_token="<unk>"), P.BertPreTokenizer(), N.BertNormalizer()),
    "WordPiece": lambda: of_words(models.WordPiece(unk_token="<unk>"), P.Whitespace()),
    "WordLevel": lambda: of_words(models.WordLevel(unk_token="<unk>"), P.Whitespace()),
    "WordLevel at blanks": lambda: of_words(models.WordLevel(unk_token="<unk>"), P.WhitespaceSplit()),
    "bytes without blanks": lambda: on_bytes(None, P.WhitespaceSplit()),
}
REFUSED: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "a character": (lambda: on_bytes(None, P.Split(",", "removed")), r"\(Split, ByteLevel\) drops ','"),
    "a word": (lambda: on_bytes(None, P.Split("zz", "removed")), r"drops 'z'"),
    "a delimiter": (lambda: on_bytes(None, P.CharDelimiterSplit("x")), r"CharDelimiterSplit.* drops 'x'"),
    "punctuation": (lambda: on_bytes(None, P.Punctuation("removed")), r"drops '!"),
    "some blanks": (lambda: on_bytes(None, P.CharDelimiterSplit(" ")), r"drops ' '"),
    "numbers": (lambda: on_bytes(None, P.Split(Regex(r"\d+"), "removed")), r"drops '0123456789'"),
}
TEMPLATE = {"chatml": TEMPLATES["generation_marks"], "inst": MARKED}
SLOW = settings(max_examples=12, suppress_health_check=list(HealthCheck))


def contents(bits: list[str]) -> Any:
    text = st.lists(st.sampled_from(bits), min_size=1, max_size=6).map("".join)
    pair = st.tuples(*(text.filter(lambda said: any(map(str.isalnum, said))),) * 2)
    return st.lists(st.lists(pair, min_size=1, max_size=3), min_size=1, max_size=4)


@cache
def tokenizer_of(kind: str, template: str) -> SliceTokenizer:
    from tempfile import mkdtemp

    folder = save(mkdtemp(), {**EXACT, **WORDS}[kind](), TEMPLATE[template])  # type: ignore[arg-type]
    return SliceTokenizer(TextSpec(tokenizer=TokenizerConfig(name=folder)))


def messages(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": role, "content": said} for pair in chat for role, said in zip(roles, pair, strict=True)]


def check(tokenizer: SliceTokenizer, chats: list[list[tuple[str, str]]], same: Callable[[str], str]) -> None:
    """Ids are the library's; each run of trained tokens decodes to its message; what the library trains is trained, blanks aside."""
    hf = tokenizer.tokenizer.hf
    result = tokenizer.run(
        [SourceRow(number, {"messages": messages(chat)}) for number, chat in enumerate(chats)]
    )
    assert result.row_counts.rows_written == len(chats), result.examples
    for number, chat in enumerate(chats):
        truth = hf.apply_chat_template(messages(chat), return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = (result.table[name][number].as_py() for name in ("input_ids", "loss_mask"))
        assert ids == truth["input_ids"]
        left_out = [n for n, bit in enumerate(truth["assistant_masks"]) if bit and not mask[n]]
        assert not hf.decode([ids[n] for n in left_out]).strip(), left_out
        runs = [
            [ids[n] for n in range(start, mask.index(0, start) if 0 in mask[start:] else len(mask))]
            for start in range(len(mask))
            if mask[start] and not (start and mask[start - 1])
        ]
        said = [same(hf.decode(run)) for run in runs]
        assert said == [same(normal(hf, text) + ending(hf)) for _, text in chat], said


def normal(hf: Any, text: str) -> str:
    own = hf.backend_tokenizer.normalizer
    return text if own is None else str(own.normalize_str(text))


def ending(hf: Any) -> str:
    return "</s>" if "[INST]" in hf.chat_template else "<|im_end|>"


def without_blanks(text: str) -> str:
    return "".join(text.split())


def around_the_end(text: str) -> str:
    """The blanks before an end of turn may be swallowed, and those at the start of a turn."""
    for end in ("<|im_end|>", "</s>"):
        text = text.removesuffix(end).strip() + end if text.endswith(end) else text
    return text


@pytest.mark.parametrize("template", list(TEMPLATE))
@pytest.mark.parametrize("kind", list(EXACT))
@given(chats=contents([*BITS, *BLANKS, *MARKS]))
@example(chats=[[(" a\n", "\n b \n"), ("\u00a0", " \u00e9\u00a0"), ("x ", "2  2")]])
@SLOW
def test_a_tokenizer_of_bytes_is_exact_and_no_row_is_aligned_alone(
    kind: str, template: str, chats: Any
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a row was aligned one by one")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowEncoder, "_align_odd", never)
        check(tokenizer_of(kind, template), chats, around_the_end)


@pytest.mark.parametrize("template", list(TEMPLATE))
@pytest.mark.parametrize("kind", list(WORDS))
@given(
    chats=contents([*BITS, *BLANKS]).map(
        lambda made: [[(f"{a} a", f"{b} a") for a, b in chat] for chat in made]
    )
)
@SLOW
def test_a_tokenizer_of_words_trains_the_words_of_its_turns(kind: str, template: str, chats: Any) -> None:
    tokenizer, known = tokenizer_of(kind, template), []
    unknown = tokenizer.tokenizer.hf.backend_tokenizer.token_to_id("<unk>")
    for chat in chats:
        said = " ".join(text for _, text in chat)
        if unknown not in tokenizer.tokenizer.hf(said)["input_ids"]:
            known.append(chat)
    if known:
        check(tokenizer, known, without_blanks)


@pytest.mark.parametrize("kind", ["WordPiece", "WordLevel"])
def test_a_turn_that_the_vocabulary_cannot_say_is_quarantined_with_the_reason(kind: str) -> None:
    rows = [
        SourceRow(n, {"messages": messages([("\u0416", said)])}) for n, said in enumerate(("a", "a \u0416"))
    ]
    result = tokenizer_of(kind, "chatml").run(rows)
    assert result.row_counts.rows_written == 1
    assert dict(result.row_counts.quarantined) == {UNKNOWN: 1}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_a_tokenizer_that_drops_text_is_refused_once_by_name(kind: str, tmp_path: Any) -> None:
    make, words = REFUSED[kind]
    folder = save(tmp_path, make(), TEMPLATE["chatml"])
    with pytest.raises(TokenizerError, match=words):
        SliceTokenizer(TextSpec(tokenizer=TokenizerConfig(name=folder)))
