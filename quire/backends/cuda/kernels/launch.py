"""Launches a kernel without inspecting its arguments anew, once Triton has compiled it for arguments of their kind.

Triton looks at every argument of every launch to find the compiled kernel that serves it, which takes the host longer than
many kernels take the device: a prompt of 512 tokens is bound by it. What its choice depends on is little: the types and the
alignment of pointers, constants, and those numbers that it specializes on. That is the key here; a launch with a new
one goes through Triton. In Triton's interpreter every launch does. One device in a process.

Compiling is slow and mostly outside Python: under `compile_only` kernels are not launched, and those that are missing are compiled by
many threads at once. What a step computes there means nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import triton
from triton.runtime.jit import JITFunction


@contextmanager
def compile_only() -> Iterator[None]:
    """Steps in here compile what they would launch, and launch nothing; at the end all of it is compiled."""
    with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as threads, triton.AsyncCompileMode(threads):
        Launcher.compile_only = True
        try:
            yield
        finally:
            Launcher.compile_only = False


class Launcher:
    """Decorates a jitted kernel, and is launched as one: kernel[grid](...).

    Constants and options are given by name, the arguments before them in order.
    """

    compile_only: ClassVar[bool] = False

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self._ready: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}
        self._compiling: set[tuple[Any, ...]] = set()  # compiled under compile_only
        self._pointers: list[int] = []
        self._aligned: list[int] = []
        self._numbers: list[int] = []
        self._sorted = False

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        if 0 in grid:  # no rows: a step whose prompts all go on in the next one
            return
        if not self._sorted:
            self._sort(args)
        key = (
            *[args[i].dtype for i in self._pointers],
            *[args[i].data_ptr() & 15 for i in self._aligned],
            *[args[i] for i in self._numbers],
            *named.values(),
        )
        found = self._ready.get(key)
        if Launcher.compile_only:
            if found is None and key not in self._compiling:
                self._compiling.add(key)
                self._kernel.warmup(*args, grid=grid, **named)
            return
        if found is not None:
            compiled, constants = found
            compiled[(*grid, 1, 1)[:3]](*args, *constants)
            return
        compiled = self._kernel[grid](*args, **named)
        if isinstance(self._kernel, JITFunction):
            self._ready[key] = compiled, [named[name] for name in self._kernel.arg_names[len(args) :]]

    def _sort(self, args: tuple[Any, ...]) -> None:
        """The properties of arguments that the choice of a compiled kernel depends on."""
        self._sorted = True
        if not isinstance(self._kernel, JITFunction):
            return
        for i, (param, value) in enumerate(zip(self._kernel.params, args, strict=False)):
            if isinstance(value, torch.Tensor):
                self._pointers.append(i)
                if not (param.do_not_specialize or param.do_not_specialize_on_alignment):
                    self._aligned.append(i)
            elif isinstance(value, int) and not param.do_not_specialize:
                self._numbers.append(i)
