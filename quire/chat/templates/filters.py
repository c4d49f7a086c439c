"""The filters and tests that chat templates may use, each with its price known before it works.

What jinja2 has is used where it is safe as it stands. Left out on purpose: `random` (the same request must give the
same prompt), `attr`, `pprint`, `urlize`, `striptags`, `wordwrap`, `xmlattr` (never needed; surface only). There is no markup
here: `safe` and `escape` give plain text.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import Undefined, pass_environment
from jinja2 import filters as stock
from jinja2.tests import TESTS as STOCK_TESTS

from quire.chat.templates.budget import OverBudget, current, depth, measure

MAX_WIDTH = 1000  # of a padded or formatted field, an indent, a row
_WIDE = re.compile(r"\d{4,}")

Functions = dict[str, Callable[..., Any]]


def result_size(text: str, values: Any) -> int:
    """Characters `text % values` may make; OverBudget when a field's width could be anything."""
    if _WIDE.search(text) or "*" in text:
        raise OverBudget("% formatting with a field that may be wide")
    return len(text) + (measure(values, current().value) + 64) * max(1, text.count("%"))


def within(name: str, number: Any, most: int = MAX_WIDTH) -> int:
    """A width or a count, checked."""
    if not isinstance(number, int) or not -most <= number <= most:
        raise OverBudget(f"{name} of {str(number)[:40]}: at most {most} is allowed")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        current().weigh(value)
        value = str(value)
    return value


def _listed(value: Iterable[Any]) -> list[Any]:
    """All items, each a step: the source may be a chain of filters that works as it is read."""
    budget, made = current(), []
    for item in value:
        budget.pay()
        made.append(item)
    return made


def _on_text(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, *args, **kwargs: function(_text(value), *args, **kwargs)


def _weighed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that walks whole values: they are measured first."""

    def weighed(*args: Any, **kwargs: Any) -> Any:
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0
        values = [a if isinstance(a, str) or hasattr(a, "__len__") else None for a in args[skip:]]
        current().weigh(*values)
        return function(*args, **kwargs)

    return marked(weighed, function)


def marked(wrapper: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """jinja2 reads from a mark what a filter wants passed first."""
    if hasattr(function, "jinja_pass_arg"):
        wrapper.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return wrapper


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as `transformers` writes it in templates: no HTML escapes, characters as they are."""
    size = measure(value, current().value)
    if indent is not None:
        step = len(indent) if isinstance(indent, str) else within("indent", indent, 32)
        current().pay(size)
        size *= 1 + within("indent", step, 32) * depth(value)
    if separators is not None and sum(len(_text(s)) for s in separators) > 32:
        raise OverBudget("separators of more than 32 characters")
    current().pay(size)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_environment
def _join(environment: Any, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    items = _listed(value)
    if attribute is not None:
        items = list(map(stock.make_attrgetter(environment, attribute), items))
    texts, between = [_text(item) for item in items], _text(d)
    current().pay(sum(map(len, texts)) + len(between) * len(texts))
    return between.join(texts)


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = _text(value), _text(old), _text(new)
    current().pay(len(text) + (text.count(old) + 1) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = _text(value)
    step = len(width) if isinstance(width, str) else within("indent", width)
    current().pay(len(text) + (text.count("\n") + 1) * step)
    return stock.do_indent(text, width, first, blank)


def _center(value: Any, width: int = 80) -> str:
    return _text(value).center(within("center", width))


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    return stock.do_round(value, within("precision", precision, 50), method)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    text = _text(value)
    current().pay(result_size(text, [list(args), kwargs]))
    return text % (kwargs or args)


def _batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> Any:
    return stock.do_batch(_listed(value), within("batch", linecount), fill_with)


def _slice(value: Iterable[Any], slices: int, fill_with: Any = None) -> Any:
    return stock.do_slice(_listed(value), within("slice", slices), fill_with)  # type: ignore[call-arg]


@pass_environment
def _sum(environment: Any, value: Iterable[Any], attribute: str | int | None = None, start: float = 0) -> float:
    items = _listed(value)
    if attribute is not None:
        items = list(map(stock.make_attrgetter(environment, attribute), items))
    if not all(isinstance(item, int | float) for item in [*items, start]):
        raise TypeError("sum adds numbers")
    return sum(items, start)


def _escape(value: Any) -> str:
    text = _text(value)
    current().pay(6 * len(text))
    return html.escape(text)


def _truncate(value: Any, length: int = 255, killwords: bool = False, end: str = "...", leeway: int = 0) -> str:
    text = _text(value)
    if len(text) <= length + leeway:
        return text
    cut = text[: max(0, length - len(end))]
    return (cut if killwords else cut.rsplit(" ", 1)[0]) + end


def _length(value: Any) -> int:
    return 0 if isinstance(value, Undefined) else len(value)


FILTERS: Functions = {
    **{name: stock.FILTERS[name] for name in ("abs", "default", "d", "first", "last", "items", "reverse")},
    **{name: stock.FILTERS[name] for name in ("map", "select", "reject", "selectattr", "rejectattr")},
    **{name: _on_text(stock.FILTERS[name]) for name in ("upper", "lower", "capitalize", "title", "trim", "wordcount")},
    **{name: _weighed(stock.FILTERS[name]) for name in ("sort", "unique", "groupby", "min", "max", "dictsort")},
    **{name: _weighed(stock.FILTERS[name]) for name in ("int", "float")},
    "length": _length,
    "count": _length,
    "list": _listed,
    "string": _text,
    "safe": _text,
    "escape": _escape,
    "e": _escape,
    "forceescape": _escape,
    "tojson": _tojson,
    "join": _join,
    "replace": _replace,
    "indent": _indent,
    "center": _center,
    "round": _round,
    "format": _format,
    "batch": _batch,
    "slice": _slice,
    "sum": _sum,
    "truncate": _truncate,
}

_WALKING = (
    "eq",
    "equalto",
    "==",
    "ne",
    "!=",
    "lt",
    "lessthan",
    "<",
    "gt",
    "greaterthan",
    ">",
    "le",
    "<=",
    "ge",
    ">=",
    "in",
)
TESTS: Functions = {
    **{name: test for name, test in STOCK_TESTS.items() if name not in ("filter", "test", "escaped")},
    **{name: _weighed(STOCK_TESTS[name]) for name in _WALKING},
}
