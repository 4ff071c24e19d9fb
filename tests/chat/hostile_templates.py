"""Templates that want to take a worker, by what they try; `t` is a text of 2,400 characters.

As a program it renders one of them in a process of its own, and prints how that ended, its seconds and its memory as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from datetime import datetime
from typing import Any

TEXT = "hello world " * 200
GROW = "{% for _ in range(200) %}STEP{% endfor %}"
NEST = "{% for a in t %}{% for b in t %}{% for c in t %}{% for d in t %}BODY{% endfor %}{% endfor %}{% endfor %}{% endfor %}"
DOUBLE = "{% set ns = namespace(s=[t]) %}" + GROW.replace("STEP", "{% set ns.s = WITH %}")
PAD = "{% set s = 'a' * 8000000 %}"
TIME = {
    "loops in loops": NEST.replace("BODY", ""),
    "loops that write": NEST.replace("BODY", "{{ '' }}"),
    "loops in a macro": "{% macro m() %}" + NEST.replace("BODY", "") + "{% endmacro %}{{ m() }}",
    "ranges in ranges": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "loops over generators": "{% for a in t|map('upper') %}{% for b in t|map('upper') %}{% for c in t|map('upper') %}{% endfor %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for a in t recursive %}{{ loop(t[:20]) if loop.depth < 12 }}{% endfor %}",
    "lipsum": "{% for _ in range(9999) %}{% set x = lipsum(n=1000, max=1000) %}{% endfor %}",
}
MEMORY = {
    "texts that calls keep": "{% set s = 'x' * 8000000 %}{% macro m(s, n) %}{{ m(s[1:], n - 1) if n }}{% endmacro %}{{ m(s, 250) }}",
    "texts that variables keep": "{% set s = 'x' * 8000000 %}"
    + "".join(f"{{% set s{n} = s[{n}:] %}}" for n in range(1, 400)),
}
SIZE = {
    "doubling": "{% set ns = namespace(s='x') %}" + GROW.replace("STEP", "{% set ns.s = ns.s + ns.s %}") + "{{ ns.s }}",
    "doubling by ~": "{% set ns = namespace(s='x') %}" + GROW.replace("STEP", "{% set ns.s = ns.s ~ ns.s %}"),
    "doubling by a block": "{% set ns = namespace(s='x') %}" + GROW.replace("STEP", "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}"),
    "doubling by a macro": "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='x') %}" + GROW.replace("STEP", "{% set ns.s = m(ns.s) %}"),
    "doubling by arguments": "{% macro m(s, n) %}{{ m(s + s, n - 1) if n }}{% endmacro %}{{ m('x', 90) }}",
    "doubling by replace": "{% set ns = namespace(s='xx') %}" + GROW.replace("STEP", "{% set ns.s = ns.s.replace('x', 'xx') %}"),
    "doubling by join": "{% set ns = namespace(s='xx') %}" + GROW.replace("STEP", "{% set ns.s = ns.s|join(ns.s) %}"),
    "doubling by safe": "{% set ns = namespace(s='x'|safe) %}" + GROW.replace("STEP", "{% set ns.s = ns.s + ns.s %}"),
    "doubling by with": "{% set ns = namespace(s='x') %}" + GROW.replace("STEP", "{% with s = ns.s + ns.s %}{% set ns.s = s %}{% endwith %}"),
    "doubling by tojson": "{% set ns = namespace(s='\"') %}" + GROW.replace("STEP", "{% set ns.s = ns.s|tojson %}"),
    "doubling in a line": "{{ " + "('x'" * 1 + "|replace('x', 'xxxxxxxxxxxxxxxx')" * 12 + ")|length }}",
    "doubling by names": "".join("{% set a = a ~ a ~ 'x' %}" for _ in range(40)),
    "many joined": "{% set s = 'x' * 8000000 %}{{ (" + " ~ ".join(["s"] * 2000) + ")|length }}",
    "many in a macro": "{% set s = 'x' * 8000000 %}{% macro m() %}{% for a in range(90000) %}{{ s }}{% endfor %}{% endmacro %}{{ m()|length }}",
    "a text of a row": "{{ '0' * 5000000 }}",
    "many written": "{% set s = 'x' * 8000000 %}{% for a in range(90000) %}{{ s }}{% endfor %}",
    "many added": "{% set s = 'x' * 8000000 %}{{ (" + " + ".join(["s"] * 2000) + ")|length }}",
    "lists of lists": DOUBLE.replace("WITH", "[ns.s, ns.s]") + "{{ ns.s }}",
    "tuples of tuples": DOUBLE.replace("WITH", "(ns.s, ns.s)") + "{{ ns.s == ns.s[0] }}",
    "dicts of dicts": DOUBLE.replace("WITH", "{'a': ns.s, 'b': ns.s}") + "{{ ns.s|tojson }}",
    "dict() of dicts": DOUBLE.replace("WITH", "dict(a=ns.s, b=ns.s)") + "{{ ns.s }}",
    "fromkeys": DOUBLE.replace("WITH", "dict.fromkeys('ab', ns.s)") + "{{ ns.s }}",
    "fromkeys of a display": DOUBLE.replace("WITH", "{}.fromkeys('ab', ns.s)") + "{{ ns.s }}",
    "lists added": DOUBLE.replace("WITH", "ns.s + ns.s"),
    "lists summed": DOUBLE.replace("WITH", "[ns.s, ns.s]|sum(start=[])") + "{{ ns.s }}",
    "a long text": "{{ '0' * 10**10 }}",
    "a long text of a variable": "{% set n = 10000000000 %}{{ t * n }}",
    "a long text that nobody sees": "{% if t == 1 %}{{ '0' * 10**10 }}{% endif %}",
    "a long list": "{% set n = 10000000000 %}{{ ([1] * n)|length }}",
    "a large power": "{{ 10 ** (10 ** 8) }}",
    "a large power of variables": "{% set n = 100000000 %}{{ n ** n }}",
    "powers of powers": "{% set ns = namespace(n=3) %}" + GROW.replace("STEP", "{% set ns.n = ns.n * ns.n %}"),
    "a large number divided": "{% set n = ('9' * 4000000)|int(base=16) %}{{ (n // 7) % 5 }}",
    "a wide format": "{{ '%2000000000d' % 1 }}",
    "a wide format by a filter": "{{ '%2000000000d'|format(1) }}",
    "a computed width": "{{ '%*d' % (2000000000, 1) }}",
    "a format method": "{{ '{:2000000000d}'.format(1) }}",
    "a format method of a computed width": "{{ '{:{}d}'.format(1, 2000000000) }}",
    "format_map": "{{ '{a:2000000000}'.format_map({'a': 1}) }}",
    "format by attr": "{{ ('{:2000000000}'|attr('format'))(1) }}",
    "many fields": "{% set f = '{0}' * 100000 %}{{ f.format(t) }}",
    "center": "{{ t|center(2000000000) }}",
    "center by map": "{{ [t]|map('center', 2000000000)|list }}",
    "a center method": "{{ t.center(2000000000) }}",
    "a center method of safe": "{{ (t|safe).center(2000000000) }}",
    "a method by its name": "{{ t['cen' ~ 'ter'](2000000000) }}",
    "ljust": "{{ t.ljust(2000000000) }}",
    "zfill": "{{ t.zfill(2000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000) }}",
    "indent": "{{ t|indent(2000000000, true) }}",
    "wordwrap": "{{ t|wordwrap(1, wrapstring=t * 1000) }}",
    "slice": "{{ t|slice(2000000000)|list }}",
    "batch": "{{ t|batch(2000000000, t)|list }}",
    "tojson": "{{ [[1]]|tojson(indent=1000000000) }}",
    "tojson by a text": "{{ [[[[[1]]]]]|tojson(indent=t * 600) }}",
    "round": "{{ 7|round(-1000000000) }}",
    "strip": "{% set s = 'ab' * 4000000 %}{{ s.strip(s) }}",
    "trim": "{% set s = 'ab' * 4000000 %}{{ s|trim(s) }}",
    "rfind": PAD + "{% set b = 'b' ~ s[:4000000] %}{{ s.rfind(b) }}",
    "to_bytes": "{{ (1).to_bytes(2000000000, 'big') }}",
    "translate": "{{ (t * 1000).translate({104: t * 100}) }}",
}  # fmt: skip
HOSTILE = TIME | MEMORY | SIZE


def outcome(name: str) -> dict[str, Any]:
    """How the render of one ends."""
    from raysvc.chat.bounds import budget
    from raysvc.chat.render.template import ChatTemplate
    from raysvc.chat.row_errors import RowFault
    from raysvc.errors import TokenizerError

    budget.MAX_SECONDS, budget.MAX_GROWTH, budget.PERIOD_S = 0.2, 200 << 20, 0.01  # of a build: 10 s, 1 GiB
    variables = {"t": TEXT, "a": "x"}
    before, begin_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        template = ChatTemplate(HOSTILE[name], variables, datetime(2000, 1, 1))
        text = template.render([{"role": "user", "content": TEXT}], None).text
        said = f"rendered {len(text)}"
    except (RowFault, TokenizerError) as fault:
        said = str(fault)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"name": name, "said": said, "seconds": time.process_time() - begin_s, "mib": grown // 1024}


if __name__ == "__main__":
    for each in sys.argv[1:] or HOSTILE:
        print(json.dumps(outcome(each)), flush=True)
