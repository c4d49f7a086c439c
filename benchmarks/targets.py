"""What must be true, as data: one row per figure that has a bar, and the verdict on a measured one.

A target bounds the ratio of ours to the peer's (`of` is "ratio") or a value of ours alone (`of` is "value"), from below or
from above. `x86` is the lower bar that holds on x86-64, where the peer's kernels are others than those the bar was set
against. No figure is measured here, and nothing is printed.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

FOUR_BIT = ("q4_0", "q4_1", "q4_k_m")
ANY: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """The bar for the figures of a section that are called one of `what`. An empty tuple is every one."""

    section: str
    what: tuple[str, ...]
    bound: float
    formats: tuple[str, ...] = ANY
    shapes: tuple[str, ...] = ANY
    least: bool = True  # at least the bound; else at most
    of: str = "ratio"
    x86: float | None = None  # for shapes in `x86_shapes`
    x86_shapes: tuple[str, ...] = ("llama-1b",)

    def covers(self, section: str, what: str, shape: str, name: str) -> bool:
        return (
            section == self.section
            and (not self.what or what in self.what)
            and (not self.formats or name in self.formats)
            and (not self.shapes or shape in self.shapes)
        )


TARGETS = (
    # One stream.
    Target("decode", ("depth 0",), 1.7, ("q4_1",)),
    Target("decode", ("depth 0",), 1.4, ("q4_k_m",), x86=1.0),
    Target("decode", ("depth 0",), 1.15, ("q4_0",), x86=1.0),
    Target("decode", ("depth 0",), 1.0, ("q8_0", "f16", "f16_bf16")),
    Target("decode", ("depth 2048",), 1.6, FOUR_BIT),
    Target("prefill", ("512 tokens",), 3.0, ("q4_1",)),
    Target("prefill", ("512 tokens",), 1.6, ("q4_k_m",), x86=1.0),
    Target("prefill", ("512 tokens",), 1.1, ("q4_0", "q8_0"), x86=1.0),
    Target("prefill", ("512 tokens",), 1.05, ("f16", "f16_bf16")),
    Target("prefill", ("2048 tokens",), 1.6, ("q4_0",)),
    Target("ceiling", ("share of the dot-product ceiling",), 0.65, FOUR_BIT, ("llama-1b",), of="value"),
    # Many.
    Target("streams", ("8 streams", "32 streams"), 1.4, ("q4_0",)),
    Target("streams", ("8 streams", "32 streams"), 3.5, ("q4_1",)),
    Target("streams", ("8 streams", "32 streams"), 1.8, ("q4_k_m",)),
    # llama-server with a slot for each request, and as it starts: at 32 that is its better one.
    Target("served", tuple(f"throughput at {c}{s}" for c in (8, 32) for s in ("", ", llama-server as it starts")), 4.0),
    Target("served", tuple(f"first token {p} at {c}" for p in ("p50", "p99") for c in (8, 32)), 1.0, least=False),
    # Around it.
    Target("start", ("to the first token",), 1.2, least=False),
    Target("load", ("to the first token",), 1.5, least=False),
    Target("memory", ("steady resident", "peak resident"), 1.1, least=False),
    # "As the KV bytes say and not faster": the last point may lie at most a tenth above the line through the others.
    Target("context", ("longest against the line",), 1.1, least=False, of="value"),
    Target("threads", ("two threads over one, prefill",), 1.85, of="value"),
    # "The lost share plus 30%": time may grow by what the neighbour takes, and by 30% of that again.
    Target("neighbour", ("decode kept, of a fair share", "prefill kept, of a fair share"), 1 / 1.3, of="value"),
    Target("onnx", ("depth 0", "depth 2048"), 1.0),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    target: str  # for instance "at least 1.15x"
    word: str  # "ok", "short", or "ok on x86" where only the lower bar is met


def find(section: str, what: str, shape: str, name: str) -> Target | None:
    """The bar for a figure, if it has one."""
    return next((t for t in TARGETS if t.covers(section, what, shape, name)), None)


def told(target: Target) -> str:
    """A bar in words."""
    return f"{'at least' if target.least else 'at most'} {target.bound:.2f}{'x' if target.of == 'ratio' else ''}"


def judge(target: Target, value: float, shape: str, machine: str = "") -> Verdict:
    """Whether `value` (a ratio, or a value of ours) meets its bar on this kind of machine."""
    text = told(target)
    met = value >= target.bound if target.least else value <= target.bound
    lower = (
        target.x86 if (machine or platform.machine()) in ("x86_64", "AMD64") and shape in target.x86_shapes else None
    )
    if lower is not None and lower < target.bound:
        text += f" (x86: {lower:.2f}{'x' if target.of == 'ratio' else ''})"
        if not met and value >= lower:
            return Verdict(text, "ok on x86")
    return Verdict(text, "ok" if met else "short")
