"""What a template does with values of a row, each operation as one Python expression.

The same expression is evaluated when a row is traced and stands in the code that later rows run.

Always true:
- an expression changes nothing, and reads only its arguments and named constants;
- what an expression raises, the template would raise too, or the row is rendered for real.
"""

from __future__ import annotations

BINARY = frozenset({"+", "-", "*", "/", "//", "%", "**", "==", "!=", "<", "<=", ">", ">=", "in"})
PURE_METHODS = frozenset(
    name for kind in (str, dict, list, tuple) for name in dir(kind) if not name.startswith("_")
) - {
    *("format", "format_map", "append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"),
    *("popitem", "setdefault", "update"),
}
_FORMS = {
    "at": "{0}[{1}]",
    "slice": "{0}[{1}:{2}:{3}]",
    "len": "len({0})",
    "list": "{0} if {0}.__class__ is list else list({0})",
    "str": "{0} if {0}.__class__ is str else str({0})",
}
_ARGUMENTS = {"at": 2, "slice": 4}


def expression(op: str, args: list[str], kwargs: dict[str, str]) -> str:
    """Python for one operation.

    Args:
        op: an operator, a word of this module, or "filter NAME", "test NAME", "method NAME", "call CONSTANT",
            "attribute MISSING", "item MISSING" (name of the constant for what a dict does not have).
        args: Python of the arguments.
        kwargs: Python of the named ones.
    """
    kind, _, name = op.partition(" ")
    if op in BINARY:
        return f"{args[0]} {op} {args[1]}"
    if op in _FORMS and not kwargs and len(args) == _ARGUMENTS.get(op, 1):
        return _FORMS[op].format(*args)
    given = ", ".join([*args, *(f"{key}={value}" for key, value in kwargs.items())])
    if kind in ("attribute", "item") and name:
        return f"{args[0]}.get({args[1]}, {name}) if {args[0]}.__class__ is dict else {kind}({given})"
    if kind == "concat":
        return f"''.join(({given},))"
    if kind == "method":
        rest = ", ".join([*args[1:], *(f"{key}={value}" for key, value in kwargs.items())])
        return f"{args[0]}.{name}({rest})"
    if op == "filter tojson" and len(args) == 1 and kwargs.keys() <= {"indent"}:
        return f"tojson({given})"
    if kind in ("filter", "test"):
        return f"{kind}_{name}({given})"
    return f"{name}({given})" if kind == "call" else f"{op}({given})"
