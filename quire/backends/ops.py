"""The op table: everything a model may do, what each op means, and how a backend must do it.

A model combines tensors only through `Ops`, so a run of its `forward` is a program: the reference backend executes it as
it goes, the native backend records it once and replays it, the CUDA backend launches or captures it. Tensors are
two-dimensional, [rows, width]; a vector weight is [width]. There is no data-dependent control flow.

`TABLE` names each op with its shapes and the error it may show; `cases` generates its inputs. The elementwise ops are declared in
elementwise.py, and their rows follow from that. The conformance test
(`tests/unit/backends/test_conformance.py`) is made from the two and runs every case on every backend against the
reference; a new op is not done before its row is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from quire.backends.adapters import Target
from quire.backends.batch import I32, Batch
from quire.backends.elementwise import ELEMENTWISE, ElementwiseOps
from quire.backends.elementwise import Tensor as Tensor
from quire.backends.kv import KV
from quire.backends.outputs import Hidden
from quire.backends.pages import PageBytes, PageCopy, PageIds, PageLayout
from quire.layouts import Dense, Experts, Floats, Layout, Rope, Routing
from quire.observe.errors import Unsupported

QUANTIZE = ("none", "fp8", "fp8-block", "int8", "int4", "keep")
"""What matrices may become as they are loaded; `keep` is four-bit codes of the file as they are."""


class Ops(ElementwiseOps, Protocol):
    """The operations that models are written with; the elementwise ones are in `ElementwiseOps`."""

    def embed(self, ids: Tensor, table: Layout) -> Tensor:
        """Row ids[t] of the table, as float32; where the batch gives a row for token t, that row. [T] -> [T, d]"""
        ...

    def rms_norm(self, x: Tensor, weight: Dense, eps: float, heads: int = 1) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight, over each of a row's `heads` equal parts. weight [width / heads], or [width]
        where every part has its own."""
        ...

    def layer_norm(self, x: Tensor, weight: Dense, bias: Dense | None, eps: float, heads: int = 1) -> Tensor:
        """(x - mean(x)) / sqrt(var(x) + eps) * weight (+ bias); parts and shapes as for rms_norm."""
        ...

    def linear(self, x: Tensor, weight: Layout, bias: Dense | None = None) -> Tensor:
        """x @ weight.T (+ bias). weight [n, k]. A backend may round x per 32 columns: to int8 for Affine weights, and f16 ones to 14 bits with x to 16."""
        ...

    def adapt(self, y: Tensor, x: Tensor, rows: Tensor, target: Target) -> Tensor:
        """y + scale * b (a x) for rows whose slot has a pair for this target; the others are y. x is not rounded to int8.

        `rows` is batch.adapters, or batch.taken_adapters once rows were taken. y [T, n], x [T, k] -> [T, n]
        """
        ...

    def rope(self, x: Tensor, pos: Tensor, rope: Rope, heads: int) -> Tensor:
        """Rotate the first rope.dim columns of each head by float32(pos) * frequency. Where the batch has coords and the rope
        has axes, each frequency is turned by the position along its own axis."""
        ...

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        *,
        layer: int,
        heads: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Dense | None = None,
        group: int = 0,
    ) -> Tensor:
        """Write k and v (rounded to the pool's dtype) at batch.write, then softmax(q k^T * scale) v over each row's past.

        `layer` counts inside `group`, whose pool and page table are used.

        Row t of sequence b sees the cached tokens 0 .. pos[t] of that sequence, with a window only the last `window` of
        them, its own among these: what lies before is never read. heads / kv_heads queries share a key. A score s becomes
        softcap * tanh(s / softcap) before the softmax. sinks [heads]: one more score for each head, which takes its share
        of the softmax and has no value.
        """
        ...

    def latent_attention(
        self, q: Tensor, k: Tensor, batch: Batch, *, layer: int, heads: int, scale: float, group: int = 0
    ) -> Tensor:
        """Attention over a pool that keeps only keys (kv.latent): every head reads the one key of a token, and the first
        `latent` columns of it are the token's value. q [T, H * D], k [T, D] -> [T, H * latent]"""
        ...

    def encode(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, *, heads: int, scale: float) -> Tensor:
        """softmax(q k^T * scale) v, where every row of a sequence sees every row of it that is in this step. Nothing is
        cached. q [T, H * D], k and v [T, Hk * D] with H a multiple of Hk -> [T, H * D]"""
        ...

    def conv(self, x: Tensor, weight: Dense, batch: Batch, *, layer: int, group: int, at: int = 0) -> Tensor:
        """silu of a causal convolution: y[t] = sum over j of weight[j] * x[t - K + 1 + j], each column on its own.

        x [T, n], weight [K * n]: the n factors of the oldest row first. Rows before a sequence's first are zeros.

        The group is one of states (kv.state): in the row of its page table, page i is the state after the last token of
        page i that was computed. A step goes on from the state of the token before its first, and writes the one after
        its last; on the way it writes the one after each page it fills, wherever the table has a page there (-1: it has
        none). This op's part of a layer's state is the K - 1 rows seen last, the oldest first, from number `at` on.
        """
        ...

    def delta_rule(
        self,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        decay: Dense,
        bias: Dense,
        batch: Batch,
        *,
        layer: int,
        group: int,
        key_heads: int,
        heads: int,
        key_dim: int,
        at: int = 0,
    ) -> Tensor:
        """The gated delta rule. A head has a state S [Dk, Dv], zeros at first, and for each row

            S *= exp(decay * softplus(a + bias));  S += k (sigmoid(b) (v - S^T k))^T;  out = S^T q / sqrt(Dk)

        qkv [T, 2 Hk Dk + H Dv] has the queries of all key heads, their keys, and the values of all heads; q and k are
        divided by sqrt(|x|^2 + 1e-6), and H / Hk heads in a row share a key head. a, b [T, H], decay, bias [H] -> [T, H Dv]

        States as in conv; this op's part of them is S of every head, [H, Dk, Dv], from number `at` on.
        """
        ...

    def join(self, a: Tensor, b: Tensor, heads: int) -> Tensor:
        """The columns of each head of a, then those of the same head of b. [T, H * m], [T, H * n] -> [T, H * (m + n)]"""
        ...

    def head_linear(self, x: Tensor, weight: Layout, heads: int) -> Tensor:
        """A linear with a matrix for each head: rows h * n .. h * n + n of weight. x [T, H * k], weight [H * n, k] -> [T, H *
        n]."""
        ...

    def moe(self, x: Tensor, logits: Tensor, experts: Experts, routing: Routing) -> Tensor:
        """A mixture of experts: each row goes through the experts that `routing` chooses for it, and the results are added,
        weighted.

        x [T, d], logits [T, E] -> [T, d]. An expert is down(act(gate(x), up(x))); act is swiglu, or with
        experts.limit L: g = min(gate, L), u = clamp(up, -L, L), g * sigmoid(1.702 g) * (u + 1). The sum runs over the chosen
        experts in order of their numbers, whatever else is in the batch.
        """
        ...

    def take(self, x: Tensor, rows: Tensor) -> Tensor:
        """The rows of x named by `rows`. [T, d], [L] -> [L, d]"""
        ...

    def mark(self, x: Tensor, layer: int) -> None:
        """Say that x is the residual stream after so many layers, or FINAL: see outputs.py. x has a row for every token.

        Computes nothing, and is not in the table: a program that keeps no such rows is the same with it and without.
        """
        ...


@dataclass(frozen=True, slots=True)
class Op:
    """A row of the table. Its cases are `cases.of(name, ...)`."""

    name: str
    shapes: str
    tolerance: str


TABLE: tuple[Op, ...] = (
    Op("embed", "ids [T], table [V, d] -> [T, d]", "exact; f16 to 2^-13 of the largest of 32 columns"),
    Op("rms_norm", "x [T, d], weight [d / heads] or [d] -> [T, d]", "2e-6 relative"),
    Op("layer_norm", "x [T, d], weight and bias [d / heads] or [d] -> [T, d]", "4e-6 of the row's largest"),
    Op(
        "linear",
        "x [T, k], weight [n, k], bias [n] -> [T, n]",
        "float32 sums; for Affine weights also half an int8 step of x per 32 columns, for f16 ones a 16-bit step of x and a 14-bit step of w",
    ),
    Op("adapt", "y [T, n], x [T, k], a pair [r, k] and [n, r] for each row -> [T, n]", "float32 sums"),
    Op("rope", "x [T, heads * D], pos [T] -> same", "4e-6 absolute for unit inputs"),
    Op(
        "attention",
        "q [T, H * D], k and v [T, Hk * D] -> [T, H * D]",
        "2e-5 absolute for unit inputs, KV as it was rounded; beside int16, 1e-3: there queries and weights may be rounded to 16 bits, too",
    ),
    Op(
        "latent_attention",
        "q [T, H * D], k [T, D] -> [T, H * latent]",
        "2e-5 absolute for unit inputs, keys as they were rounded",
    ),
    Op("encode", "q [T, H * D], k and v [T, Hk * D] -> [T, H * D]", "2e-5 absolute for unit inputs"),
    Op("conv", "x [T, n], weight [K * n] -> [T, n]", "2e-6 of the row's largest"),
    Op("delta_rule", "qkv [T, 2 Hk Dk + H Dv], a, b [T, H] -> [T, H Dv]", "1e-5 absolute for unit inputs"),
    Op("join", "a [T, H * m], b [T, H * n] -> [T, H * (m + n)]", "exact"),
    Op("head_linear", "x [T, H * k], weight [H * n, k] -> [T, H * n]", "as linear"),
    Op("moe", "x [T, d], logits [T, E], E experts -> [T, d]", "as three products in a row"),
    Op("take", "x [T, d], rows [L] -> [L, d]", "exact"),
    *(Op(op.name, op.shapes, str(op.within)) for op in ELEMENTWISE.values()),
)


Forward: TypeAlias = Callable[[Ops, Batch, Mapping[str, Tensor]], Tensor]
"""A program: (ops, batch, named inputs) -> one output tensor."""


class Program(Protocol):
    """A compiled forward with its KV pool."""

    def run(self, batch: Batch, inputs: Mapping[str, Floats] = ...) -> Floats:
        """Execute one step. The array returned is valid until the next run."""
        ...

    def hidden(self, which: Hidden) -> Floats:
        """Rows that this program keeps, of the last run. Valid until the next run, like its result."""
        ...

    def page_layout(self, group: int) -> PageLayout:
        """The layout of the bytes of a page of that group, and their number. Programs with equal layouts can take each other's
        pages."""
        ...

    def page_buffer(self, group: int, count: int) -> PageBytes:
        """A zeroed buffer for so many whole pages, in memory that pages are copied from and to fastest. To be reused."""
        ...

    def read_pages(
        self, group: int, pages: PageIds, out: PageBytes | None = None, *, layers: range | None = None
    ) -> PageCopy:
        """Copy pages of a group's pool into rows of `out`, or of a buffer of its own; of all layers, or of some in a row.

        The copy has what every step that was launched before this call wrote. Pages that are not there, named twice, or a
        buffer that does not fit them are a ValueError, and nothing was copied.
        """
        ...

    def write_pages(self, group: int, pages: PageIds, buffer: PageBytes, *, layers: range | None = None) -> PageCopy:
        """Copy rows of a buffer into pages of a group's pool: row i into pages[i].

        The copy comes after every step that was launched before this call. Steps see it that are launched when it is done,
        or after its `fence`. Errors as for read_pages.
        """
        ...


class Backend(Protocol):
    """Compiles forwards into programs and runs them. It keeps packed weights by identity, so programs of one model share them."""

    name: str
    kv_dtypes: tuple[str, ...]  # of KV_DTYPES, those that may be asked for
    kv_dtype: str  # of them, what is best where nobody asks
    kv_states: bool  # whether a further pool may be one of states, for layers that carry one from token to token

    def compile(
        self,
        forward: Forward,
        *,
        kv: KV,
        max_tokens: int,
        max_rows: int,
        inputs: Mapping[str, int] = ...,
        packed: Callable[[Layout, int, int], None] | None = None,
        keep: Sequence[Hidden] = (),
    ) -> Program:
        """Record `forward` and make it ready to run with up to max_tokens tokens and max_rows logit rows a step.

        `inputs` gives the width of each named input. `packed(layout, done_bytes, total_bytes)` is called once a weight
        has been taken over, so that the caller can show progress and give its file pages back. `keep` names rows that
        are to be had beside the result: a ValueError, where the model marks no such rows.
        """
        ...

    def describe(self) -> str:
        """The instruction set and thread count in use, or the device, for people."""
        ...

    def implementations(self) -> dict[str, str]:
        """op -> what runs it here, for `quire doctor --ops`."""
        ...


@runtime_checkable
class Holds(Protocol):
    """A backend whose weights lie somewhere else than in the file, perhaps quantized."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that were loaded, where they are."""
        ...


@runtime_checkable
class Tells(Protocol):
    """A backend that may do something to weights."""

    def told(self) -> list[str]:
        """Sentences for people about what was done to the weights that a user would not expect."""
        ...


@runtime_checkable
class Computes(Protocol):
    """A backend that can say which others compute the same bits."""

    def computes(self) -> str:
        """The backend's arithmetic as text: the same wherever the same model gives the same keys and values, to the bit, and
        another one where it may not."""
        ...


def check_kv(kv: KV, backend: Backend) -> None:
    """Raises Unsupported where the backend does not keep K and V that way."""
    if any(own.state for own in kv.groups) and not backend.kv_states:
        raise Unsupported(
            f"the {backend.name} backend keeps no states: it cannot run layers that carry one from token to token",
            cure="use --backend native, or --backend torch",
        )
    if kv.state:
        raise ValueError("the first group must be one that keeps K and V")
    if kv.dtype != "f16" and kv.dtype not in backend.kv_dtypes:
        raise Unsupported(f"the {backend.name} backend cannot keep K and V as {kv.dtype}", cure="leave --kv-dtype out")


@runtime_checkable
class Measures(Protocol):
    """A backend that can say how much room a KV pool has where its programs run."""

    owns_memory: bool  # whether that memory is nobody else's, so that all of it may be taken

    def measure(
        self,
        forward: Forward,
        kv: KV,
        *,
        max_tokens: int,
        max_rows: int,
        packed: Callable[[Layout, int, int], None] | None = None,
        keep: Sequence[Hidden] = (),
    ) -> int:
        """Bytes free with the weights loaded and the largest step run. `kv` says how a page looks."""
        ...


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a program will take beside its KV pool."""

    weights: int  # as they are kept; the model file's own pages are page cache and not counted
    working: int  # what lies between ops, logits among it, and scratch


class HostSampler(Protocol):
    """Chooses tokens from rows of logits in one call, as quire/runner/rules.py and masses.py define it, bit for bit."""

    def params(self, *params: Any) -> Any:
        """The parameters by which a stream samples, in the order of native/src/sample_module.cpp; made once, and given to
        `choose`."""
        ...

    def choose(
        self,
        logits: Floats,
        params: Sequence[Any],
        positions: Sequence[int],
        drafts: Sequence[Sequence[int]],
        seen: Sequence[tuple[int, Any, Any]],
        masks: Sequence[tuple[int, Any]],
    ) -> list[tuple[list[int], list[Any]]]:
        """The tokens of every stream, the last of them negative where there is none to choose, and their log probabilities."""
        ...

    def logprobs(self, logits: Floats, tokens: Sequence[int], top: int) -> list[Any] | None:
        """The log probability of one token in each row; None where a row is not numbers."""
        ...


@runtime_checkable
class Samples(Protocol):
    """A program that brings a sampler for the host, on the threads that its kernels have."""

    def host_sampler(self, vocab_size: int) -> HostSampler: ...


class SlotArrays(Protocol):
    """The arrays that a runner keeps of its slots, an element or a row for each: see quire/runner/slots.py."""

    last: I32
    length: I32
    position: npt.NDArray[np.int64]
    adapter: I32
    live: npt.NDArray[np.bool_]
    tables: list[I32]


class HostSteps(Protocol):
    """Steps in which each of some slots goes on by the token that it knows: from the slots' arrays, and back into them."""

    def run(self, slot: npt.NDArray[np.intp]) -> Floats | None:
        """Compute the next token of each of these slots: their logits. None: nothing was done, one of them is special."""
        ...

    def choose(self, params: Sequence[Any], seen: Sequence[tuple[int, Any, Any]]) -> list[int] | None:
        """The tokens after it, as HostSampler.choose finds them, with its `seen`. None: nothing was done, there is more to say than a token."""
        ...


@runtime_checkable
class Steps(Protocol):
    """A program that can go on from a runner's slots by itself, `most` of them at a time."""

    def host_steps(
        self, sampler: HostSampler, slots: SlotArrays, page_size: int, max_context: int, most: int
    ) -> HostSteps: ...


@runtime_checkable
class Idles(Protocol):
    """A program that knows what to do while nobody waits for it."""

    def idle(self) -> bool:
        """Do a little (milliseconds) of what a later step would wait for. False: there was nothing to do."""
        ...


@runtime_checkable
class Estimator(Protocol):
    """A backend that can say beforehand what `compile` will take. It allocates nothing to find out."""

    def estimate(
        self,
        forward: Forward,
        *,
        kv: KV,
        max_tokens: int,
        max_rows: int,
        inputs: Mapping[str, int] = ...,
        keep: Sequence[Hidden] = (),
    ) -> Needs:
        """The memory that `compile` would take with these arguments; the number of pages does not matter."""
        ...
