"""How a verb declares what it takes: `Annotated[type, Option(...)]` or `Annotated[type, Argument(...)]` on its parameters.

The declaration has two readers. `parse` understands a plain, well-formed command line and nothing else; `for_typer` gives
the same declaration to typer, which owns help, error messages and every less usual spelling. typer (with the pydantic it
brings) takes longer to import than a model's weights take to load, and someone who has typed a correct command should
not wait for it. So `parse` never guesses and never complains: what it is not sure of it leaves to typer, and what it
returns is what typer would have returned (tests/unit/cli/test_options.py holds the two together).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True, init=False)
class Option:
    """A parameter that is named on the command line. Without names it is `--` and the parameter's own; a flag has one."""

    names: tuple[str, ...]
    help: str

    def __init__(self, *names: str, help: str):
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "help", help)


@dataclass(frozen=True, slots=True)
class Argument:
    """A parameter that is given by its place."""

    help: str
    metavar: str | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a verb, read from its annotation."""

    name: str
    kind: type  # str, int, float or bool: of one value
    many: bool  # takes all arguments that are left
    default: Any  # inspect.Parameter.empty: it must be given
    declared: Option | Argument

    @property
    def flags(self) -> tuple[str, ...]:
        """What it is called on the command line."""
        if isinstance(self.declared, Argument):
            return ()
        return self.declared.names or (f"--{self.name.replace('_', '-')}",)


def parameters(command: Callable[..., None]) -> list[Parameter] | None:
    """The parameters of a verb; None where one is declared in another way, or with a type that is not known here."""
    if not inspect.isfunction(command):  # a typer app: a verb with verbs of its own
        return None
    hints = get_type_hints(command, include_extras=True)
    found = []
    for p in inspect.signature(command).parameters.values():
        made = _parameter(p.name, hints.get(p.name), p.default)
        if made is None:
            return None
        found.append(made)
    return found


def _parameter(name: str, hint: Any, default: Any) -> Parameter | None:
    if get_origin(hint) is not Annotated:
        return None
    inner, declared, *_ = get_args(hint)
    if not isinstance(declared, Option | Argument):
        return None
    if get_origin(inner) in (Union, UnionType):
        inner = next((a for a in get_args(inner) if a is not NoneType), None)
    many = get_origin(inner) is list
    kind = get_args(inner)[0] if many else inner
    if kind not in (str, int, float, bool) or (many and isinstance(declared, Option)):
        return None
    if kind is bool and not (isinstance(declared, Option) and declared.names):
        return None
    return Parameter(name, kind, many, default, declared)


def parse(command: Callable[..., None], words: Sequence[str]) -> dict[str, Any] | None:
    """What `words` give `command`, every parameter included; None when it takes typer to tell."""
    known = parameters(command)
    if known is None:
        return None
    named = {flag: p for p in known for flag in p.flags}
    given: dict[str, Any] = {}
    places: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            places.append(word)
            continue
        flag, equals, value = word.partition("=")
        p = named.get(flag)
        if p is None or p.name in given:
            return None
        if p.kind is bool:
            if equals:
                return None
            given[p.name] = True
            continue
        text = value if equals else next(rest, None)
        if text is None or (text.startswith("-") and not equals):
            return None  # perhaps a negative number, perhaps a forgotten value
        try:
            given[p.name] = p.kind(text)
        except ValueError:
            return None
    for p in known:
        if isinstance(p.declared, Argument) and places:
            given[p.name], places = (places, []) if p.many else (places[0], places[1:])
        elif p.name not in given:
            if p.default is inspect.Parameter.empty:
                return None
            given[p.name] = p.default
    return None if places else given


def for_typer(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with its declarations in typer's words."""
    import functools

    import typer

    known = parameters(command)
    if known is None:
        return command

    def annotation(p: Parameter, hint: Any) -> Any:
        if isinstance(p.declared, Argument):
            words: Any = typer.Argument(help=p.declared.help, metavar=p.declared.metavar)
        else:
            words = typer.Option(*p.declared.names, help=p.declared.help)
        return Annotated[get_args(hint)[0], words]

    hints = get_type_hints(command, include_extras=True)
    typed = {p.name: annotation(p, hints[p.name]) for p in known}

    @functools.wraps(command)
    def same(**given: Any) -> None:
        command(**given)

    own = inspect.signature(command)
    shown = [p.replace(annotation=typed[p.name]) for p in own.parameters.values()]
    vars(same)["__signature__"] = own.replace(parameters=shown)
    same.__annotations__ = typed
    return same
