"""Whether tracing works with the Jinja that is installed: it reads names and lines of the code that Jinja writes.

Always true:
- a template with all kinds of state is traced on some rows, and walked on others, and says what the real render says.
"""

from __future__ import annotations

import logging
from datetime import datetime
from functools import lru_cache
from typing import Any

from raysvc.chat.render.real_render import RealRender
from raysvc.chat.trace.fast_render import FastRender

logger = logging.getLogger(__name__)

TEMPLATE = """\
{%- macro bold(text, mark="*") %}{{ mark + text | trim + mark }}{% endmacro %}
{%- set ns = namespace(last=-1, seen=false) %}{% set kind = "chat" %}
{%- for message in messages[::-1] if message.role == "user" %}{% set ns.last = loop.index0 %}{% break %}{% endfor %}
{%- for message in messages %}
    {%- set kind = "turn" %}{% set text = message.text or "" %}
    {%- if message.role == "user" %}{% set ns.seen = true %}{{ bold(text) }}{% set ns.last = loop.index0 %}
    {%- else %}{% generation %}{{ bold(text, mark="_") }}{% endgeneration %}{{ ns.last }}{% endif %}
    {%- for call in message.calls or [] %}{{ loop.index }}{{ call.name ~ kind }}
        {%- for key, value in call.given | items %}{{ key }}={{ value | tojson }}{% endfor %}
    {%- endfor %}
    {%- if not loop.last and loop.nextitem.role == "user" %}{{ "|" }}{% endif %}
{%- endfor %}{{ kind }}{{ ns.seen }}{{ tools | length if tools else "none" }}"""
SIZES = (1, 2, 3, 5)


def _row(size: int, word: str) -> list[dict[str, Any]]:
    row: list[dict[str, Any]] = []
    for place in range(size):
        row.append({"role": "user", "text": f" {word}{place} "})
        calls = [{"name": word, "given": {"a": place, word: [word]}}] * place
        row.append({"role": "assistant", "text": word * place, "calls": calls})
    return row


@lru_cache(maxsize=1)
def tracing_works() -> bool:
    """Trace and walk, once in a process; a failure is logged, and every row is rendered by its template then."""
    now = datetime(2000, 1, 1)
    real = RealRender(TEMPLATE, {}, now)
    fast = FastRender(TEMPLATE, {}, real.render, now)
    rows = [(_row(size, word), [word] * (size % 2), False) for word in ("yes", "no") for size in SIZES]
    same = all(fast.render(*row) == real.render(*row) for row in rows)
    if not same or fast.reasons or fast.counts["walked"] < len(SIZES):
        logger.warning("templates cannot be traced with this Jinja, each row is rendered: %s", fast.reasons)
        return False
    return True
