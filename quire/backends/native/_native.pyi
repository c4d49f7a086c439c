"""The compiled module (native/src/module.cpp). Its callers take it as untyped; this only says that it exists."""

from typing import Any

def __getattr__(name: str) -> Any: ...
