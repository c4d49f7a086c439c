"""A file that a client put into the store by its digest. It is to be had nowhere else: what is deleted cannot be fetched again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.observe.errors import BadRequest, NotFound
from quire.weights.sources import Remote

if TYPE_CHECKING:
    from quire.config import Environment
    from quire.weights.download.web import Http

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class BlobTarget:
    """A digest."""

    digest: str

    def __str__(self) -> str:
        return f"blob:{self.digest}"


def parse(rest: str, part: bool = False) -> BlobTarget:
    """`rest` as a digest."""
    if not _DIGEST.fullmatch(rest):
        raise BadRequest("blob: needs a digest", cure="sha256: and 64 hexadecimal digits", param="model")
    return BlobTarget(rest)


def locate(target: BlobTarget, env: Environment, http: Http) -> Remote:
    """Nowhere: it came from a client."""
    raise NotFound(f"{target} is not on this machine: it was put into the store by hand, and has to be again")
