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
    _share_shapes()


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


def _share_shapes() -> None:
    """Every intermediate result has a type, and boxes its shape anew: there are only a few shapes."""
    known: dict[tuple[int, ...], tuple[Any, ...]] = {}
    check = tl.block_type.__init__
    scalar = tl.constexpr(1), tl.tuple([])

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([getattr(size, "value", size) for size in shape])
        if key not in known:
            check(self, element_ty, shape)
            boxed = tl.constexpr(self.numel), tl.tuple([tl.constexpr(size) for size in key])
            known[key] = self.shape, self.numel, str(self.shape), boxed
        self.element_ty = element_ty
        self.shape, self.numel, said, self.boxed = known[key]
        self.name = f"<{said}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.boxed if type.is_block() else scalar

    tl.block_type.__init__ = init_type
    tl.tensor.__init__ = init_tensor
