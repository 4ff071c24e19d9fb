"""A message of the assistant that says it has no loss is never trained, however it says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.loss_flags import SPELLINGS, says_trained

DOCS = Path(__file__).resolve().parents[2] / "docs" / "howto" / "formats.md"
USER = {"role": "user", "content": "hello"}
POLICIES = ("all_assistant_messages", "each_assistant_turn", "all_tokens", "message_weight")
NO_LOSS: list[dict[str, Any]] = [  # as the rows of each project say it
    {"weight": 0},
    {"weight": 0.0},
    {"loss_weight": 0.0},
    {"loss": False},
    {"loss": 0},
    {"loss_scale": 0.0},
    {"loss_mask": 0},
    {"train": False},
    {"training": False},
    {"train_on_turn": False},
    {"trainable": False},
    {"masked": True},
]
UNCLEAR: list[dict[str, Any]] = [
    {"mask": True},
    {"mask": 1},
    {"mask": 0},
    {"train_on": False},
    {"ignore": True},
    {"ignore": "true"},
    {"use_loss": "no"},
    {"masking": "On "},
    {"no_loss": 1},
    {"learn": False},
    {"supervised": 0},
    {"token_weights": [0, 0, 1]},
]


def row(flag: dict[str, Any], other: dict[str, Any] | None = None) -> dict[str, Any]:
    bad = {"role": "assistant", "content": "a bad answer", **flag}
    good = {"role": "assistant", "content": "hi there", **(other or {})}
    return {"messages": [USER, bad, USER, good]}


def texts(made: list[Any]) -> list[str]:
    return [text for one in made for text in one.trained]


@pytest.mark.parametrize("flag", NO_LOSS, ids=str)
def test_a_message_without_loss_is_not_trained_under_any_policy(
    flag: dict[str, Any], slice_tokenizer: Any, tokenize: Any
) -> None:
    for policy in POLICIES:
        made, result = tokenize(slice_tokenizer("merges_tools", train_on=policy), row(flag))
        assert "a bad answer" not in "".join(texts(made)), policy
        if policy == "message_weight":
            assert texts(made) == ["hi there<|im_end|>"]
        else:
            assert [reason.startswith("a message that train_on") for reason in result.row_counts.quarantined]


@pytest.mark.parametrize("flag", NO_LOSS, ids=str)
def test_the_opposite_trains(flag: dict[str, Any], slice_tokenizer: Any, tokenize: Any) -> None:
    ((name, value),) = flag.items()
    opposite = {name: not value if isinstance(value, bool) else 1 - value}
    made, _ = tokenize(slice_tokenizer("merges_tools", train_on="message_weight"), row(opposite, flag))
    assert texts(made) == ["a bad answer<|im_end|>"]


@pytest.mark.parametrize("flag", UNCLEAR, ids=str)
def test_a_key_that_may_say_so_sets_the_row_aside_by_its_name(
    flag: dict[str, Any], slice_tokenizer: Any, tokenize: Any
) -> None:
    (name,) = flag
    for policy in POLICIES:
        made, result = tokenize(slice_tokenizer("merges_tools", train_on=policy), row(flag))
        assert made == []
        (reason,) = result.row_counts.quarantined
        assert repr(name) in reason
        assert f"source.ignore: [messages.{name}]" in str(result.examples[0])
    told = {"ignore": (f"messages.{name}",)}
    made, result = tokenize(slice_tokenizer("merges_tools", **told), row(flag))
    assert texts(made) == ["a bad answer<|im_end|>", "hi there<|im_end|>"]
    assert result.left_out == ()


def test_other_unknown_keys_are_named_as_unused_columns_are(slice_tokenizer: Any, tokenize: Any) -> None:
    wild = {"redacted": False, "toxic": False, "turn_identifier": 3, "loss": 2.31, "language": "en"}
    made, result = tokenize(slice_tokenizer("merges_tools"), {**row(wild), "hash": "a"})
    assert len(texts(made)) == 2
    named = ("hash", "messages.loss", "messages.redacted", "messages.toxic", "messages.turn_identifier")
    assert result.left_out == named


def test_a_key_that_the_template_asks_for_is_not_called_unread(
    tokenizer_folder: Any, slice_tokenizer: Any, tokenize: Any, tmp_path: Path
) -> None:
    from raysvc.chat.slice_tokenizer import SliceTokenizer
    from raysvc.job.config import TextSpec, TokenizerConfig

    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '[voice]' if m.spoken }}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = TokenizerConfig(name=tokenizer_folder("chatml_bare"), chat_template=text)
    made, result = tokenize(SliceTokenizer(TextSpec(tokenizer=config)), row({"spoken": True, "seen": True}))
    assert len(made) == 1
    assert result.left_out == ("messages.seen",)


@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}])
def test_a_part_without_loss_sets_the_row_aside(
    flag: dict[str, Any], slice_tokenizer: Any, tokenize: Any
) -> None:
    parts = [{"type": "text", "text": "let me think", **flag}, {"type": "text", "text": " 4", "train": True}]
    for policy in POLICIES:
        tokenizer = slice_tokenizer("merges_tools", train_on=policy)
        made, result = tokenize(tokenizer, {"messages": [USER, {"role": "assistant", "content": parts}]})
        assert (made, [*result.row_counts.quarantined]) == (
            [],
            ["a part of a message says that it is not trained"],
        )
    asked = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "4"}]}
    assert len(tokenize(slice_tokenizer("merges_tools"), asked)[0]) == 1  # a question is never trained


def test_yes_and_no_together_are_a_fault() -> None:
    with pytest.raises(RowFault, match="contradict each other"):
        says_trained({"role": "assistant", "trainable": True, "masked": True})
    assert says_trained({"role": "assistant", "loss_mask": 0, "masked": True}) is False


def test_the_docs_have_the_table() -> None:
    text = DOCS.read_text()
    for name, (trained, owners) in SPELLINGS.items():
        assert f"| `{name}` | {'trained' if trained else 'not trained'} | {owners} |" in text
