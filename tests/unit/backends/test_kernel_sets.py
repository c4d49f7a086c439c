"""Every op of the table on the native backend's other kernel sets: neither the fastest one of this CPU nor the portable one."""

from __future__ import annotations

import pytest

from quire.backends import cases
from tests.unit.backends.test_conformance import MAIN, NATIVE, VARIANTS, conforms

OTHERS = [variant for variant in VARIANTS if variant not in MAIN]


@pytest.mark.skipif(not OTHERS, reason="needs a CPU with a third kernel set")
@pytest.mark.parametrize("variant", OTHERS, ids=lambda v: f"{v[0]}-{v[1]}-{v[2]}")
@pytest.mark.parametrize("case", NATIVE, ids=lambda c: c.name)
def test_conformance(case: cases.Case, variant: tuple[str, str | None, int]):
    conforms(case, *variant)
