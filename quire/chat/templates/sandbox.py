"""A jinja2 environment for untrusted templates: they cannot reach Python objects, and every step is paid from a budget.

jinja2's immutable sandbox closes the way to Python objects, but of time and memory it bounds `range` alone; a process for each render would
add a round trip to every request. So, on top of that sandbox, everything that can take time or memory is paid from a Budget:
  - every loop turn, macro call, filter, test and method call is a step, and each looks at the clock;
  - every text or list that is made (`+ * % ~`, slices, filters, methods, output) is paid by size before it is made;
  - only listed filters, tests and methods of text, lists and mappings exist; widths, ranges and powers are capped;
  - nothing that a template is given can be changed; a list of its own may grow and shrink by texts and numbers;
  - comparing or printing nested values is measured first, since a few references can stand for billions of items.
So no single step is long, and the clock is looked at between steps: a render stops wherever it runs, in any thread.
The environment is shared by renders; the budget of one lives in a context variable.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from types import BuiltinMethodType
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from quire.chat.templates.budget import Budget, OverBudget, current, in_force, measure
from quire.chat.templates.filters import FILTERS, TESTS, marked, result_size, within

MAX_RANGE = 100_000
MAX_BITS = 4096  # of an integer
_DIGITS = re.compile(r"\d{4,}")
_LIST_METHODS = frozenset({"index", "count", "copy"})
_CHANGES = frozenset({"append", "pop"})  # of a list that the template has made itself
_DICT_METHODS = frozenset({"get", "items", "keys", "values", "copy"})
_STR_METHODS = frozenset(
    [
        "capitalize",
        "casefold",
        "count",
        "endswith",
        "find",
        "format",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "islower",
        "isnumeric",
        "isspace",
        "istitle",
        "isupper",
        "join",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rindex",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "upper",
        "zfill",
        "ljust",
        "rjust",
        "center",
    ]
)
_PADS = frozenset({"zfill", "ljust", "rjust", "center"})


def _tick(size: int = 0) -> None:
    current().pay(size)


def _concat(*values: Any) -> str:
    """The `~` operator."""
    current().weigh(*values)
    return "".join(map(str, values))


def _weighed(value: Any) -> Any:
    """An operand of a comparison: nested values are measured, because equality walks them in one long step."""
    if isinstance(value, list | tuple | Mapping):
        current().weigh(value)
    return value


def _sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
    """`value[start:stop:step]`, which jinja2 compiles past the sandbox."""
    if isinstance(value, str | list | tuple | range):
        current().pay(len(range(len(value))[slice(start, stop, step)]))
    return value[start:stop:step]


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """The text that `{{ }}` prints. It takes the context, so that jinja2 never folds it at compile time."""
    if isinstance(value, str):
        current().pay(len(value))
    elif isinstance(value, list | tuple | Mapping):
        current().weigh(value)
    return value


_OURS = (_tick, _concat, _weighed, _sliced)  # what compiled templates call by themselves


def _range(*args: int) -> range:
    made = range(*args)
    if len(made) > MAX_RANGE:
        raise OverBudget(f"range of {len(made)}: at most {MAX_RANGE} are allowed")
    return made


class _Namespace(Namespace):
    """jinja2's namespace, which takes no names that Python itself uses."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        for name in dict(*args, **kwargs):
            _refuse_private(name)
        Namespace.__init__(self, *args, **kwargs)  # type: ignore[misc]

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace may not hold {name!r}")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    current().weigh(*args)
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message)[:2000])


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training. Here its body is simply rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Metered(NodeTransformer):
    """Puts a step into every loop and macro, and passes `~`, slices and comparisons through the meter."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._stepped(node, node.body)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._stepped(node, node.body)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._stepped(node, node.body)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._stepped(node, node.body)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concat_values", list(node.nodes), node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _weighing(node.expr)
        for operand in node.ops:
            operand.expr = _weighing(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = [part or nodes.Const(None) for part in (node.arg.start, node.arg.stop, node.arg.step)]
        return _call("sliced", [node.node, *bounds], node.lineno)

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:
        raise TemplateError("autoescape is not supported in a chat template")

    def _stepped(self, node: nodes.Node, body: list[nodes.Node]) -> nodes.Node:
        constant = sum(len(data.data) for part in body for data in part.find_all(nodes.TemplateData))
        self.generic_visit(node)
        body.insert(0, nodes.ExprStmt(_call("tick", [nodes.Const(constant)], node.lineno), lineno=node.lineno))
        return node


def _call(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name, lineno=line), args, [], None, None, lineno=line)


def _weighing(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _call("weighed", [node], node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of chat templates; see the module's first lines."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, globals: Mapping[str, Any]):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # nothing is computed at compile time
            finalize=_finalize,
        )
        self.tick, self.concat_values, self.weighed, self.sliced = _OURS
        self.filters = {name: _metered(function) for name, function in FILTERS.items()}
        self.tests = {name: _metered(function) for name, function in TESTS.items()}
        self.globals = {
            "range": _range,
            "dict": _dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            **globals,
        }

    def template(self, source: str) -> Any:
        """Compile, with the meter built in. Raises jinja2's TemplateError, or SyntaxError from Python's compiler."""
        tree = _Metered().visit(self.parse(source))
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def render(self, template: Any, variables: dict[str, Any], budget: Budget) -> str:
        """Run a compiled template. Raises OverBudget, TemplateError, or whatever the template stumbles over."""
        token = in_force.set(budget)
        try:
            parts, size = [], 0
            for part in template.root_render_func(template.new_context(variables)):
                size += len(part)
                budget.pay()
                if size > budget.value:
                    raise OverBudget(f"more than {budget.value} characters of output")
                parts.append(part)
            return "".join(parts)
        finally:
            in_force.reset(token)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Check and make every call of a template."""
        if __obj in _OURS:
            return __obj(*args)
        budget = current()
        budget.pay()
        if isinstance(__obj, BuiltinMethodType):
            _check_method(__obj, args, kwargs, budget)
        elif isinstance(__obj, type) and __obj is not _Namespace:
            raise SecurityError(f"{__obj.__name__} may not be called")
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str | list):
            budget.pay(len(result))
        return result

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Some public templates queue texts in a list; `_check_method` says of which list."""
        return (type(obj) is list and attr in _CHANGES) or super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic, and what the same signs do to text and lists."""
        current().pay(_result_size(operator, left, right))
        return _OPERATORS[operator](left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`format` on text, with no field wide enough to hurt."""
        inner = super().wrap_str_format(value)
        if inner is None:
            return None
        text = str(value.__self__)

        def bounded(*args: Any, **kwargs: Any) -> str:
            if _DIGITS.search(text) or re.search(r":[^{}]*\{", text):
                raise OverBudget("format with a field that may be wide")
            size = measure([list(args), kwargs], current().value)
            current().pay(len(text) + size * max(1, text.count("{")))
            return inner(*args, **kwargs)

        return bounded


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "**": operator.pow,
    "%": operator.mod,
}


def _result_size(sign: str, left: Any, right: Any) -> int:
    """Characters or items that `left sign right` would make; OverBudget for numbers out of all proportion."""
    if isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple):
        if sign == "*":
            text, times = (left, right) if isinstance(left, str | list | tuple) else (right, left)
            return len(text) * max(0, times) if isinstance(times, int) else 0
        if sign == "%":
            return result_size(left, right) if isinstance(left, str) else 0
        return sum(len(v) for v in (left, right) if isinstance(v, str | list | tuple))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(1, right) if sign == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise OverBudget(f"a number of {bits} bits: at most {MAX_BITS} are allowed")
    return 0


def _check_method(method: BuiltinMethodType, args: tuple[Any, ...], kwargs: dict[str, Any], budget: Budget) -> None:
    """A method of a plain value: only listed ones, paid for by what they read and what they would make."""
    owner, name = method.__self__, method.__name__
    if isinstance(owner, str):
        allowed = _STR_METHODS
    elif type(owner) is list and name in _CHANGES:
        _check_change(owner, name, args, budget)
        allowed = _CHANGES
    elif isinstance(owner, list | tuple):
        allowed = _LIST_METHODS
        budget.weigh(owner)
    elif isinstance(owner, dict):
        allowed = _DICT_METHODS
    else:
        allowed = frozenset()
    if name not in allowed:
        raise SecurityError(f"{type(owner).__name__}.{name} is not available to a chat template")
    if not isinstance(owner, str):
        return
    budget.pay(len(owner))
    if name in _PADS and args:
        within(name, args[0])
    if name == "join" and args:
        budget.pay(measure(args[0], budget.value) + len(owner) * (len(args[0]) if hasattr(args[0], "__len__") else 1))
    if name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        budget.pay(owner.count(args[0]) * len(args[1]))


def _check_change(owner: list[Any], name: str, args: tuple[Any, ...], budget: Budget) -> None:
    """Only flat values go in, so that a list never holds itself, nor more than was paid for."""
    if not budget.owns(owner):
        raise SecurityError(f"list.{name} would change what the template was given")
    if name == "append" and not all(value is None or isinstance(value, str | int | float) for value in args):
        raise SecurityError("list.append takes texts and numbers in a chat template")
    budget.pay(len(owner) if name == "pop" else 1)


def _metered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a test as a step; what it makes is paid for."""

    def metered(*args: Any, **kwargs: Any) -> Any:
        budget = current()
        budget.pay()
        made = function(*args, **kwargs)
        if isinstance(made, str | list | tuple):
            budget.pay(len(made))
        return made

    return marked(metered, function)
