"""How fast attention alone goes in a long prompt, beside what the machine can multiply: billions of multiply-adds per second, and their share.

    python -m benchmarks.attention [--depths 2048 8192 16384] [--head-dims 64 128] [--kv-dtypes f16 int16 int8] [--isa amx ...] [--save]

A chunk of rows at a depth goes through a program of one layer that does nothing but attend; what counts is the time of its attention step on
all threads. A multiply-add is one number of a query times one of a key, or of a weight times a value. Its ceiling is the rate at which the
kernel set's own instruction multiplies from registers, measured in the same run: float32 multiply-adds for f16 and int8 pages (they are
widened), a third of the products of bytes for int16 pages (two numbers of 16 bits take three). Kernel sets without products of bytes multiply
int16 pages as words, of which no peak is measured: they are told beside float32's.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import floors
from benchmarks.record import save

if TYPE_CHECKING:
    from quire.backends.batch import Batch
    from quire.backends.native.backend import NativeProgram

PAGE = 16
# What a kernel set multiplies with: bytes, floats.
USES = {
    "amx": ("amx", "avx512"),
    "avx512": ("avx512vnni", "avx512"),
    "avxvnni": ("avxvnni", "avx2"),
    "avx512bw": (None, "avx512"),
    "avx2": (None, "avx2"),
    "neondot": ("sdot", "neon"),
    "neon": (None, "neon"),
}


def ceiling(peaks: floors.Peaks, isa: str, kv_dtype: str) -> tuple[str, float] | None:
    """The instruction, and the multiply-adds per second that it allows on all threads. A peak counts two operations for each."""
    int8, fp32 = USES.get(isa, (None, None))
    threads = str(peaks.threads)
    if kv_dtype == "int16" and int8 in peaks.int8:
        return f"{int8} / 3", peaks.int8[str(int8)][threads] * 1e9 / 2 / 3
    return (f"{fp32} fp32", peaks.fp32[fp32][threads] * 1e9 / 2) if fp32 in peaks.fp32 else None


def rows_at(start: int, count: int, first_page: int, pages: int) -> Batch:
    """`count` rows of one sequence from position `start` on, whose past lies in the pages from `first_page` on."""
    from quire.backends.batch import Batch

    pos = np.arange(start, start + count, dtype=np.int32)
    return Batch(
        ids=np.zeros(count, np.int32),
        pos=pos,
        q_start=np.array([0, count], np.int32),
        kv_len=np.array([start + count], np.int32),
        pages=np.arange(first_page, first_page + pages, dtype=np.int32)[None],
        write=pos + first_page * PAGE,
        logit_rows=np.zeros(0, np.int32),
    )


class Layer:
    """One layer of attention: its program, and what goes in."""

    def __init__(self, asked: argparse.Namespace, isa: str, kv_dtype: str, head_dim: int) -> None:
        from quire.backends.native.backend import NativeBackend
        from quire.backends.ops import KV

        self.rows, self.heads, self.dim, self.threads = asked.rows, asked.heads, head_dim, asked.threads
        self.pages = -(-(max(asked.depths) + asked.rows) // PAGE)
        widths = {"q": asked.heads * head_dim, "k": asked.kv_heads * head_dim, "v": asked.kv_heads * head_dim}
        rng = np.random.default_rng(0)
        self.inputs = {
            name: rng.standard_normal((asked.rows, width)).astype(np.float32) for name, width in widths.items()
        }
        backend = NativeBackend(threads=asked.threads, isa=isa)
        kv = KV(1, self.pages, PAGE, asked.kv_heads, head_dim, kv_dtype)

        def forward(ops: Any, batch: Any, i: Any) -> Any:
            return ops.attention(i["q"], i["k"], i["v"], batch, layer=0, heads=asked.heads, scale=head_dim**-0.5)

        self.program: NativeProgram = backend.compile(forward, kv=kv, max_tokens=asked.rows, max_rows=0, inputs=widths)
        for first in range(
            0, self.pages - asked.rows // PAGE + 1, asked.rows // PAGE
        ):  # what lies in pages does not depend on where a row is
            self.program.run(rows_at(0, asked.rows, first, asked.rows // PAGE), self.inputs)

    def rate(self, depth: int, rounds: int) -> float:
        """Multiply-adds per second of all threads: the best round, as a peak is."""
        products = sum(range(depth + 1, depth + self.rows + 1)) * self.heads * 2 * self.dim
        batch, best = rows_at(depth, self.rows, 0, self.pages), float("inf")
        for _ in range(rounds):
            self.program.profile()
            self.program.run(batch, self.inputs)
            best = min(best, self.program.profiled()["attend"])
        return products * self.threads / best


def main() -> None:
    from quire.backends.native.backend import extension
    from quire.config import available_cores

    here = [name for name in extension().available() if name in USES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512, help="of a chunk of a prompt; a multiple of 16")
    parser.add_argument("--depths", type=int, nargs="+", default=[2048, 8192, 16384], metavar="TOKENS")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128], metavar="COLUMNS")
    parser.add_argument("--heads", type=int, default=12, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--kv-dtypes", nargs="+", choices=["f16", "int16", "int8"], default=["f16", "int16", "int8"])
    parser.add_argument("--isa", nargs="+", choices=here, default=here, help="kernel sets")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--no-peaks", action="store_true", help="do not measure what the instructions can do: no shares"
    )
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    asked = parser.parse_args()
    if asked.rows < PAGE or asked.rows % PAGE or asked.heads % asked.kv_heads:
        parser.error("--rows must be a multiple of 16, --heads one of --kv-heads")
    peaks = "" if asked.no_peaks else floors.measure(asked.threads)
    if isinstance(peaks, str) and peaks:
        print(peaks)
    found: list[dict[str, Any]] = []
    for isa in asked.isa:
        for kv_dtype in asked.kv_dtypes:
            for dim in asked.head_dims:
                layer = Layer(asked, isa, kv_dtype, dim)
                top = None if isinstance(peaks, str) else ceiling(peaks, isa, kv_dtype)
                for depth in asked.depths:
                    rate = layer.rate(depth, asked.rounds)
                    own = {"isa": isa, "kv_dtype": kv_dtype, "head_dim": dim, "depth": depth, "macs_per_second": rate}
                    text = f"{isa:9} {kv_dtype:5} heads of {dim:3}, {depth:6} deep: {rate / 1e9:7.1f} GMAC/s"
                    if top:
                        own |= {"ceiling": top[0], "ceiling_macs_per_second": top[1]}
                        text += f", {100 * rate / top[1]:4.1f}% of {top[1] / 1e9:.0f} ({top[0]})"
                    found.append(own)
                    print(text, flush=True)
    if asked.save:
        print(f"saved {save('attention', {'settings': vars(asked), 'rates': found})}")


if __name__ == "__main__":
    main()
