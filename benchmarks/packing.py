"""How fast a file's weights become packed ones when a model is loaded: bytes of the file per second, beside a copy of the same bytes.

    python -m benchmarks.packing [--formats Q4_0 Q4_K ...] [--megabytes 64] [--rounds 5] [--save]

A matrix of random bytes, 2048 columns wide, is packed with one thread and with every core, and its bytes are copied into memory that is
fresh as well, in turns. Packing reads the file's bytes once and writes about as many, so the copy is its floor (of one thread; numpy copies
with no more). What a load takes beside it is reading the file, and clearing memory.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from benchmarks.figures import spread
from benchmarks.record import save

COLUMNS = 2048
FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32")


def matrix(name: str, megabytes: float) -> tuple[np.ndarray, Any]:
    """So many megabytes in a format, and their layout: small bytes, of which every format makes finite numbers."""
    from quire import formats

    form = formats.load(name)
    width = COLUMNS // form.BLOCK * form.NBYTES
    rows = max(16, int(megabytes * 1e6 / width) // 16 * 16)
    data = np.random.default_rng(0).integers(0, 0x20, (rows, width), np.uint8)
    return data, form.read(data, (rows, COLUMNS))


def seconds_to_pack(layout: Any, threads: int) -> float:
    from quire.backends.native.backend import NativeBackend
    from quire.backends.ops import KV

    backend = NativeBackend(threads=threads)
    kv = KV(1, 1, 16, 1, 8)  # a program must have some
    begun = time.perf_counter()
    backend.compile(
        lambda ops, _, inputs: ops.linear(inputs["x"], layout), kv=kv, max_tokens=1, max_rows=0, inputs={"x": COLUMNS}
    )
    return time.perf_counter() - begun


def seconds_to_copy(data: np.ndarray) -> float:
    begun = time.perf_counter()
    data.copy()
    return time.perf_counter() - begun


def main() -> None:
    from quire.config import available_cores

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=FORMATS, metavar="FORMAT", help=", ".join(FORMATS)
    )
    parser.add_argument("--megabytes", type=float, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="keep a record in benchmarks/results")
    asked = parser.parse_args()
    threads = sorted({1, available_cores()})
    rates: dict[str, dict[str, list[float]]] = {}
    for name in asked.formats:
        data, layout = matrix(name, asked.megabytes)
        found = rates[name] = {**{f"{n} threads" if n > 1 else "1 thread": [] for n in threads}, "copy": []}
        for kept in [False] + [True] * asked.rounds:  # the first round meets memory that nobody had
            seconds = [seconds_to_pack(layout, n) for n in threads] + [seconds_to_copy(data)]
            if kept:
                for values, took in zip(found.values(), seconds, strict=True):
                    values.append(data.nbytes / took / 1e9)
        print(f"{name:5}" + "".join(f"  {side} {spread(values)} GB/s" for side, values in found.items()), flush=True)
    if asked.save:
        print(f"saved {save('packing', {'settings': vars(asked), 'gigabytes_per_second': rates})}")


if __name__ == "__main__":
    main()
