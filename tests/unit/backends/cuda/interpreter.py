"""Triton's interpreter without what it does in vain: kernels take half the time in it, and compute the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """For as long as this process lives."""
    _look_for_no_overflow()
    _patch_the_language_once()
    _look_types_up()


def _look_for_no_overflow() -> None:
    """Each sum of integers is done again in 64 bits and compared, and what is found is told only when debugging."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patch_the_language_once() -> None:
    """A launch patches what its kernel's module sees of the language, and each call of a function does it again."""
    patch, patched = interpreter._patch_lang, set()

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            patched.clear()

    def once(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module in patched:
            return Scope()
        patched.add(module)
        return patch(fn)

    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = once


def _look_types_up() -> None:
    """In one table, not in one that is made for each question."""
    table, ask = {}, interpreter._get_np_dtype

    def look_up(kind: Any) -> Any:
        name = (kind.element_ty if isinstance(kind, tl.block_type) else kind).name
        if name not in table:
            table[name] = ask(kind)
        return table[name]

    interpreter._get_np_dtype = look_up
