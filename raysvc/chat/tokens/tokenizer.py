"""A tokenizer as a job names it: loaded, checked, and identified by its content.

Always true:
- the identity says what decides the bytes: content hashes, template text, options; never a path or a name;
- two copies of one tokenizer in different folders have equal identities.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, time
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

from raysvc.chat.bounds.budget import OverBudget, within_budget
from raysvc.chat.render.real_render import costly_template
from raysvc.chat.source.media_parts import in_parts
from raysvc.chat.source.template_fit import PROBE_TOOL, TemplateFit, hides_role
from raysvc.chat.tokens.backend_parts import refuse_dropped_text
from raysvc.chat.tokens.load_faults import (
    check_model,
    check_repeats,
    check_templates,
    load_fault,
    slow_fault,
    stop_ids,
)
from raysvc.errors import TokenizerError
from raysvc.job.config import TokenizerConfig

_WHERE = "tokenizer"


class LoadedTokenizer:
    """A tokenizer with the template that the job asks for.

    Attributes:
        hf: the `transformers` tokenizer, or one from the same files that does the same.
        config: what it was loaded from.
        templates: name -> text; one called "default", or what the tokenizer brings.

    Raises:
        TokenizerError: not found, not a fast one, one that drops text, or a template file that is not there.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        self.config = config
        self.hf: Any = _load(config)
        refuse_dropped_text(self.hf.backend_tokenizer)
        check_model(config.name, self.hf.backend_tokenizer)
        self.templates = _templates(self.hf, config)
        self._fits: dict[str, TemplateFit] = {}
        self._hidden: dict[
            tuple[str, str], bool
        ] = {}  # (template, role) -> whether it shows none of its messages

    @property
    def chat_template(self) -> str | None:
        """Template of rows without tools, None when there is none."""
        return self.templates.get("default")

    def template_name(self, has_tools: bool) -> str:
        """Returns which of the templates a row gets, as `get_chat_template` of `transformers` chooses.

        Raises:
            TokenizerError: there is none.
        """
        if has_tools and "tool_use" in self.templates:
            return "tool_use"
        if "default" in self.templates:
            return "default"
        names = ", ".join(sorted(self.templates))
        what = f"has the chat templates {names}, and no default" if names else "has no chat template"
        more = (
            f"one of {names}, a file or a text"
            if names
            else "a file or a text; raysvc init finds one that takes the rows"
        )
        remedy = f"set tokenizer.chat_template to {more}"
        raise TokenizerError(_WHERE, f"{self.config.name!r} {what}", remedy)

    @property
    def template_variables(self) -> dict[str, Any]:
        """Returns what the template sees beside messages and tools."""
        return {**self.hf.special_tokens_map, **self.config.template_kwargs}

    @cached_property
    def stop_tokens(self) -> tuple[str, ...]:
        """Tokens that the model stops at, as its `generation_config.json` says; empty when it has none."""
        path = file_beside(self.config, "generation_config.json")
        if path is None:
            return ()
        ids = stop_ids(path, len(self.hf))
        return tuple(str(token) for token in self.hf.convert_ids_to_tokens(ids) if token is not None)

    @property
    def end_id(self) -> int:
        """The end of sequence of the model: the tokenizer's, unless `generation_config.json` names only others.

        Raises:
            TokenizerError: there is none.
        """
        ends = [end for end in (self.hf.eos_token, *self.stop_tokens) if end]
        stops = [end for end in ends if end in self.stop_tokens] or ends
        if not stops:
            what = f"{self.config.name!r} has no end of sequence"
            raise TokenizerError(
                "train_end", what, "set train_end: template, or give the tokenizer an eos_token"
            )
        found: int = self.hf.backend_tokenizer.token_to_id(stops[0])
        return found

    @property
    def now(self) -> datetime | None:
        """Beginning of the day that templates see; None when none is given."""
        return datetime.combine(self.config.date, time()) if self.config.date else None

    def check_repeats(self) -> None:
        """Refuse to render by a template that draws at random, or asks for a day which is not given.

        Raises:
            TokenizerError: it draws, or `tokenizer.date` is missing.
        """
        check_repeats(self.templates)
        if self._asks_date and self.config.date is None:
            raise TokenizerError(
                "tokenizer.date",
                "the chat template asks for the day (strftime_now), and tokens must not depend on when they are made",
                "set tokenizer.date, for example to 2026-01-31",
            )

    @property
    def _asks_date(self) -> bool:
        return any("strftime_now" in text for text in self.templates.values())

    def reference_ids(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool = False
    ) -> list[int]:
        """Returns what `apply_chat_template` gives: the truth that everything else is compared with.

        Args:
            messages: of one conversation.
            tools: or None.
            prompt: with the generation prompt.
        """
        return list(self._applied(messages, tools, add_generation_prompt=prompt))

    def reference_text(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool = False
    ) -> str:
        """The same as text."""
        return str(self._applied(messages, tools, add_generation_prompt=prompt, tokenize=False))

    def _applied(self, messages: list[dict[str, Any]], tools: list[Any] | None, **options: Any) -> Any:
        name = self.template_name(tools is not None)
        if name in self._fits and self._fits[name].only_parts:
            messages = in_parts(messages)
        return self._apply(name, messages, tools=tools, **options)

    def fit(self, has_tools: bool) -> TemplateFit:
        """Returns what the template of a row takes; asked once."""
        name = self.template_name(has_tools)
        if name not in self._fits:
            self._fits[name] = TemplateFit.of(partial(self._probed, name))
        return self._fits[name]

    def hides_role(self, role: str, has_tools: bool) -> bool:
        """Returns whether the template of a row leaves messages of this role out without a word; asked once."""
        name = self.template_name(has_tools)
        if (name, role) not in self._hidden:
            asked_in = in_parts if self.fit(has_tools).only_parts else list
            self._hidden[name, role] = hides_role(
                lambda some, _=None: self._probed(name, asked_in(some)), role
            )
        return self._hidden[name, role]

    def _probed(self, name: str, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        """A render of messages that ask what a template takes; with a tool, where it refuses to go without.

        Raises:
            TokenizerError: it takes more than a render may, of a few words.
        """
        ask = partial(self._apply, name, messages, tokenize=False)
        try:
            return str(within_budget(partial(ask, tools=tools)))
        except OverBudget as fault:
            raise costly_template(fault) from None
        except Exception:  # noqa: BLE001  a template may raise anything
            return str(within_budget(partial(ask, tools=tools or [PROBE_TOOL])))

    def _apply(self, name: str, messages: list[dict[str, Any]], **options: Any) -> Any:
        options = {"tokenize": True, **options, **self.config.template_kwargs}
        with _clock_at(self.now), _bounded():
            return self.hf.apply_chat_template(
                messages, return_dict=False, chat_template=self.templates[name], **options
            )

    def content(self) -> bytes:
        """`tokenizer.json`: all that decides ids and text, without a line of code."""
        return self._content

    @cached_property
    def _content(self) -> bytes:
        text: str = self.hf.backend_tokenizer.to_str()
        return text.encode()

    @property
    def free_id(self) -> int:
        """An id that no token has."""
        backend = self.hf.backend_tokenizer
        free: int = next(n for n in count(backend.get_vocab_size()) if backend.id_to_token(n) is None)
        return free

    def identity(self) -> dict[str, Any]:
        """Returns what decides the bytes, as JSON."""
        return {
            "content_sha256": hashlib.sha256(self.content()).hexdigest(),
            "special_tokens": {key: str(value) for key, value in sorted(self.hf.special_tokens_map.items())},
            "split_special_tokens": bool(getattr(self.hf, "split_special_tokens", False)),
            "templates": {
                name: {"sha256": hashlib.sha256(text.encode()).hexdigest(), "text": text}
                for name, text in sorted(self.templates.items())
            },
            "template_kwargs": self.config.template_kwargs,
            **({"template_date": str(self.config.date)} if self._asks_date else {}),
            "stop_tokens": sorted(self.stop_tokens),
        }


@contextmanager
def _clock_at(now: datetime | None) -> Iterator[None]:
    """Let `apply_chat_template` show templates a moment, by the clock that its module reads; None leaves the clock."""
    from raysvc.chat.render import chat_environment

    theirs = sys.modules.get("transformers.utils.chat_template_utils")
    places: list[Any] = [place for place in (chat_environment, theirs) if place is not None and now]
    fixed = type("FixedClock", (datetime,), {"now": staticmethod(lambda: now)})
    for place in places:
        place.datetime = fixed
    try:
        yield
    finally:
        for place in places:
            place.datetime = datetime


@contextmanager
def _bounded() -> Iterator[None]:
    """Let `apply_chat_template` compile templates in our sandbox, where no step is too large; all else stays its own."""
    theirs: Any = sys.modules.get("transformers.utils.chat_template_utils")
    if theirs is None:
        yield
        return
    from raysvc.chat.bounds.bounded_environment import BoundedEnvironment

    own, theirs.ImmutableSandboxedEnvironment = theirs.ImmutableSandboxedEnvironment, BoundedEnvironment
    try:
        yield
    finally:
        theirs.ImmutableSandboxedEnvironment = own


def file_beside(config: TokenizerConfig, name: str) -> Path | None:
    """A file of the folder, or of the hub's repository, that the tokenizer is of; None where it has none."""
    if os.path.isdir(config.name):
        path = Path(config.name) / name
        return path if path.is_file() else None
    from transformers.utils import cached_file

    try:
        return Path(cached_file(config.name, name, revision=config.revision))
    except OSError:
        return None


def _load(config: TokenizerConfig) -> Any:
    from raysvc.chat.tokens.file_tokenizer import read_folder_once

    if os.path.isdir(config.name) and not config.trust_remote_code:
        try:
            found = read_folder_once(Path(config.name))
        except UnicodeDecodeError as error:
            raise load_fault(config, error) from error
        if found is not None:
            return found
    return _load_by_transformers(config)


def _load_by_transformers(config: TokenizerConfig) -> Any:
    from transformers import AutoTokenizer

    from raysvc import hub

    try:
        with hub.answering():
            hf = AutoTokenizer.from_pretrained(
                config.name, revision=config.revision, trust_remote_code=config.trust_remote_code
            )
    except Exception as error:
        raise load_fault(config, error) from error
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None:
        raise slow_fault(config, hf)
    # rows may be long, and whether they are too long is the job's decision
    hf.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    backend.no_truncation()
    backend.no_padding()
    return hf


def anchored(config: TokenizerConfig) -> TokenizerConfig:
    """Returns the config with absolute paths where it names a folder or a file that is here: processes of another
    folder read it too.
    """
    paths = {"name": os.path.isdir, "chat_template": os.path.isfile}
    found = {
        name: getattr(config, name) for name, is_here in paths.items() if is_here(getattr(config, name) or "")
    }
    return config.model_copy(update={name: os.path.abspath(path) for name, path in found.items()})


def _templates(hf: Any, config: TokenizerConfig) -> dict[str, str]:
    given = config.chat_template
    own = hf.chat_template
    check_templates(config.name, own)
    if given is not None:
        named = own if isinstance(own, dict) else {}
        return {"default": named[given] if given in named else _template_text(given, sorted(named))}
    if isinstance(own, dict):
        return dict(own)
    return {} if own is None else {"default": own}


def _template_text(given: str, named: list[str]) -> str:
    if "{%" in given or "{{" in given:
        return given
    if not os.path.isfile(given):
        what = f", and the tokenizer's own are {', '.join(named)}" if named else ""
        raise TokenizerError(
            "tokenizer.chat_template",
            f"{given!r} is neither a file nor a template{what}",
            f"give a path to a Jinja file, {'one of these names, ' if named else ''}or the template text",
        )
    with open(given, encoding="utf-8") as file:
        return file.read()
