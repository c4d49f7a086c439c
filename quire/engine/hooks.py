"""Request hooks: what sees every request before constraints are prepared and before the scheduler has it.

`NoAdapters` is the one of an engine without adapters. `adapters.py` has the one that knows them, and is not even imported where
nobody asked for any; `TextsBeside` stands around either, in an engine that generates. A client's requests to load, list and
unload adapters go to whichever there is.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from quire.engine.types import AdapterInfo, Request
from quire.observe.errors import BadRequest, NotFound, Unsupported
from quire.runner.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)  # a runner that chooses a token for every row then has least to do


class RequestHooks(Protocol):
    """What looks at a request before anything else, and is told when it has ended.

    `fields` are the fields of a request that it is about: a request in which all of these are empty passes it by, and so does its end.
    """

    @property
    def fields(self) -> tuple[str, ...]: ...

    def on_request(self, request: Request) -> Request:
        """The request as it is to be run. Raises QuireError to refuse it."""
        ...

    def on_end(self, request_id: str) -> None:
        """Called when a request has ended, or was refused later on."""
        ...

    def listed(self) -> list[AdapterInfo]:
        """What requests may name."""
        ...

    def load(self, name: str, path: str) -> AdapterInfo:
        """Load an adapter: from now on requests may name it. Raises QuireError, and then nothing has changed."""
        ...

    def unload(self, name: str) -> None:
        """Unload an adapter: from now on no request may name it."""
        ...


class NoAdapters:
    """No adapters: who names one is refused."""

    fields: tuple[str, ...] = ("adapter", "spans")

    def on_request(self, request: Request) -> Request:
        if request.spans:
            raise BadRequest("this engine reads text alone: it cannot take spans", param="spans")
        if request.adapter:
            raise NotFound(
                f"the adapter {request.adapter[:128]!r} is not loaded", param="model", code="model_not_found"
            )
        return request

    def on_end(self, request_id: str) -> None:
        pass

    def listed(self) -> list[AdapterInfo]:
        return []

    def load(self, name: str, path: str) -> AdapterInfo:
        raise Unsupported(
            "this engine was started without room for adapters", cure="start it with --runtime-lora, or with --lora"
        )

    def unload(self, name: str) -> None:
        raise NotFound(f"there is no adapter {name[:128]!r}", param="lora_name", code="adapter_not_found")


class Around:
    """Hooks that hand everything on to `inner`; what is built on them looks at requests that have its `own` field, before or after."""

    def __init__(self, inner: RequestHooks, own: str) -> None:
        self.fields = (own, *(field for field in inner.fields if field != own))
        self._inner = inner

    def on_request(self, request: Request) -> Request:
        return self._inner.on_request(request)

    def on_end(self, request_id: str) -> None:
        self._inner.on_end(request_id)

    def listed(self) -> list[AdapterInfo]:
        return self._inner.listed()

    def load(self, name: str, path: str) -> AdapterInfo:
        return self._inner.load(name, path)

    def unload(self, name: str) -> None:
        self._inner.unload(name)


class TextsBeside(Around):
    """Hooks of an engine that generates, in which some requests want a vector."""

    def __init__(self, inner: RequestHooks, *, context: int, vocab_size: int, whole: bool) -> None:
        """`whole`: a vector is made of every row, so none may come from the prefix cache."""
        super().__init__(inner, "vector")
        self._context = context
        self._vocab_size = vocab_size
        self._whole = whole

    def on_request(self, request: Request) -> Request:
        if request.vector:
            from quire.engine.texts import check

            check(request, self._context, self._vocab_size)
            if request.constraint is not None:
                raise BadRequest("a vector has no tokens to constrain", param="constraint")
            request = msgspec.structs.replace(request, sampling=GREEDY, fresh=self._whole)
        return self._inner.on_request(request)
