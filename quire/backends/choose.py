"""Which backend runs a model. The only file here that knows them all; it imports the one that is asked for."""

from __future__ import annotations

from quire.backends.ops import Backend


def open_backend(name: str, *, threads: int = 1, isa: str | None = None) -> Backend:
    """The backend of that name."""
    if name == "native":
        from quire.backends.native.backend import NativeBackend

        return NativeBackend(threads=threads, isa=isa)
    if name == "reference":
        from quire.backends.reference.backend import ReferenceBackend

        return ReferenceBackend()
    raise ValueError(f"no backend named {name!r}: there are native and reference")
