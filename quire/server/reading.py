"""How the body of one request is read: what happens to a field in it that is not known, or known and not to be honoured.

A `Reading` belongs to a request: it comes with the body (`shared/bodies.py`) and with what answers it (`Served.reading`), and whoever takes a part of a
body apart hands it on. What it decides, and by which header and option, is in `shared/lenient.py`, which only a request with such a field needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from starlette.types import Scope

from quire.observe.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Reading:
    """The request that a body came with; None: it came from elsewhere, and every such field of it is refused."""

    scope: Scope | None = None

    def unknown(self, name: str, known: Iterable[str], where: str = "") -> None:
        """A field that is not known: a BadRequest, or ignored and told. `where` is the object that has it, for what is told."""
        from quire.server.shared import lenient

        lenient.unknown(self.scope, name, known, where)

    def excuse(self, error: BadRequest, where: str = "") -> None:
        """A known field that cannot be honoured: the refusal is raised, unless the request or the server is lenient; then it is told."""
        from quire.server.shared import lenient

        lenient.excuse(self.scope, error, where)


STRICT = Reading()
