"""The Jinja environment of chat templates, without `transformers`.

Always true:
- a template renders here what it renders in `apply_chat_template`, and is refused where it is refused there, and where a step
  of it is too large (`bounded_environment`): a template comes with a model, and must not stop a build;
- an environment is shared with nobody: what a caller hangs into one changes no other.
"""

from __future__ import annotations

import json
import json.encoder
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext

from raysvc.chat.bounds.bounded_environment import BoundedEnvironment
from raysvc.chat.bounds.sizes import MAX_SIZE, check_json, fits
from raysvc.chat.source.tools import written_forms


class GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}`: what the model writes. It renders as its body."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own name and form

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """A call of `_generation_support` with the body as caller; who wants to know the spans replaces that method."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_generation_support"), [], [], body).set_lineno(line)

    def _generation_support(self, caller: Any) -> str:
        return str(caller())


class _Dict:
    """The name `dict` in a template: makes dictionaries and shows nothing else of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without names that begin with an underscore: these reach into Python."""

    def __init__(
        *args: Any, **kwargs: Any
    ) -> None:  # self is in args, so that a template may name a field so
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: Any, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def chat_environment(now: datetime | None = None) -> BoundedEnvironment:
    """A new environment with the blocks, filters and globals that chat templates use.

    Args:
        now: what `strftime_now` shows; None reads the clock at every call.
    """
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters.measured(tojson=_tojson)
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: (now or datetime.now()).strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


def json_writer(allow_nan: bool = True) -> Callable[[Any], str]:
    """`json.dumps(value, ensure_ascii=False)` for many values: Python makes an encoder for each call.

    Args:
        allow_nan: write `NaN` and `Infinity`; otherwise they raise ValueError.
    """
    plain = json.JSONEncoder(ensure_ascii=False, allow_nan=allow_nan)
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return plain.encode
    escape: Any = json.encoder.encode_basestring
    chunks = make(None, plain.default, escape, None, ": ", ", ", False, False, allow_nan)
    return lambda value: "".join(chunks(value, 0))


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store {name!r} in a namespace")


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


MANY = 64  # blanks of an indent
_PLAIN_JSON = (False, None, None, False)
_write = json_writer()


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is, where Jinja's own filter escapes what HTML would not like."""
    is_plain = (ensure_ascii, indent, separators, sort_keys) == _PLAIN_JSON
    forms = written_forms(x)
    if forms is None and is_plain:
        text = _write(x)
        if len(text) > MAX_SIZE:
            fits(len(text))
        return text
    form = "" if is_plain else f"{ensure_ascii!r} {indent!r} {separators!r} {sort_keys!r}"
    known = forms.get(form) if forms else None
    if known is not None:
        return known
    if separators is not None or (indent is not None and indent.__class__ is not int) or (indent or 0) > MANY:
        check_json(indent, separators)
    text = json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if len(text) > MAX_SIZE:
        fits(len(text))
    if forms is not None:
        forms[form] = text
    return text
