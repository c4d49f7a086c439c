"""What families with mixtures of experts share: the weights of a mixture by role, how a block's MLP is computed, and the
decoder that most of them are: grouped-query attention, and in each block an MLP or a mixture.

A file keeps an expert's matrices apart or stacked; both become a layout per expert, and nothing is copied. How experts
are chosen is the family's: it makes the `Routing`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.backends.batch import Batch
from quire.backends.ops import Ops, Tensor
from quire.layouts import Dense, Experts, Layout, Rope, Routing
from quire.models import metadata, parts
from quire.models.decoder import Decoder
from quire.models.parts import Attention, Dims, Mlp, Weights
from quire.observe.errors import BadModelFile, Unsupported

if TYPE_CHECKING:
    from quire.weights.values import Values

MAX_EXPERTS = 4096
SIGMOID = Routing(top=1, sigmoid=True)  # of one expert: it counts sigmoid(its logit)

GGUF_NAMES: dict[str, str] = {
    **parts.GGUF_NAMES,
    "router": "blk.{}.ffn_gate_inp",
    "router_bias": "blk.{}.exp_probs_b",
    "expert_gate": "blk.{}.ffn_gate_exps",
    "expert_up": "blk.{}.ffn_up_exps",
    "expert_gate_up": "blk.{}.ffn_gate_up_exps",  # both in one stack, gate first
    "expert_down": "blk.{}.ffn_down_exps",
    "shared_router": "blk.{}.ffn_gate_inp_shexp",
    "shared_gate": "blk.{}.ffn_gate_shexp",
    "shared_up": "blk.{}.ffn_up_shexp",
    "shared_down": "blk.{}.ffn_down_shexp",
}
HF_NAMES: dict[str, str] = {
    **parts.HF_NAMES,
    "router": "model.layers.{}.mlp.gate",
    "router_bias": "model.layers.{}.mlp.gate",
    "expert_gate": "model.layers.{}.mlp.experts.{}.gate_proj",
    "expert_up": "model.layers.{}.mlp.experts.{}.up_proj",
    "expert_down": "model.layers.{}.mlp.experts.{}.down_proj",
    "shared_router": "model.layers.{}.mlp.shared_expert_gate",
    "shared_gate": "model.layers.{}.mlp.shared_expert.gate_proj",
    "shared_up": "model.layers.{}.mlp.shared_expert.up_proj",
    "shared_down": "model.layers.{}.mlp.shared_expert.down_proj",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The number of experts in a mixture, and their widths."""

    count: int
    top: int  # chosen for each row
    ffn: int  # of one of them
    shared: int = 0  # of the MLP that every row goes through besides; 0: there is none

    def check(self, where: str) -> Sizes:
        """Raises where more are to be chosen than there are."""
        if self.top > self.count:
            raise BadModelFile(f"{where}: {self.top} experts cannot be chosen of {self.count}")
        return self


@dataclass(frozen=True, slots=True)
class Mixture:
    """The weights of one block's mixture."""

    router: Layout
    experts: Experts
    routing: Routing
    router_bias: Dense | None = None  # of the router's logits
    shared: Mlp | None = None  # every row goes through it
    gated: tuple[Layout, Experts] | None = None  # a gate [1, d] and one expert that counts sigmoid(gate) for every row


def sizes_of_hf(config: Values, *, count: tuple[str, ...], ffn: str) -> Sizes:
    """The sizes in a config.json. count: keys that may hold the number of experts; ffn: the one that holds their width."""
    key = next((key for key in count if key in config), count[0])
    top = config.count("num_experts_per_tok", most=MAX_EXPERTS)
    return Sizes(config.count(key, most=MAX_EXPERTS), top, config.count(ffn)).check(config.where)


def sizes_of_gguf(keys: metadata.Keys, *, ffn: str = "expert_feed_forward_length", default: int | None = None) -> Sizes:
    """The sizes in a GGUF. default: the width of an expert where the file does not say."""
    count = keys.count("expert_count", most=MAX_EXPERTS)
    top = keys.count("expert_used_count", most=MAX_EXPERTS)
    width = keys.count(ffn) if default is None else keys.count(ffn, default)
    return Sizes(count, top, width).check(f"metadata {keys.arch}.expert_used_count")


def experts_of(weights: Weights, layer: int, sizes: Sizes, width: int) -> Experts:
    """The experts of a block, whichever way the file keeps them."""
    e, f, names = sizes.count, sizes.ffn, weights.names
    if "expert_gate_up" in names and weights.has("expert_gate_up", layer):
        both = weights.tensors.cut(weights.name("expert_gate_up", layer), (e, 2 * f, width), lambda w: halves(w, f))
        gate, up = both[:e], both[e:]
    else:
        gate, up = (_each(weights, f"expert_{role}", layer, e, f, width) for role in ("gate", "up"))
    return Experts(gate, up, _each(weights, "expert_down", layer, e, width, f))


def routing_of_hf(config: Values, sizes: Sizes) -> Routing:
    """Sigmoid scores, a bias that decides who is chosen, groups by their two best: DeepSeek V3's way, and that of others since."""
    groups = config.count("n_group", 1, most=MAX_EXPERTS)
    routing = Routing(
        top=sizes.top,
        sigmoid=True,
        renormalize=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
        groups=groups,
        top_groups=config.count("topk_group", groups, most=MAX_EXPERTS),
        pair=True,
    )
    return check_groups(config.where, routing, sizes)


def routing_of_gguf(keys: metadata.Keys, sizes: Sizes, sigmoid: bool) -> Routing:
    """Scores and groups as the file says. sigmoid: where it does not say."""
    kind = keys.count("expert_gating_func", 2 if sigmoid else 1)
    if kind not in (1, 2):
        raise Unsupported(
            f"metadata {keys.arch}.expert_gating_func is {kind}", cure="softmax (1) and sigmoid (2) are known"
        )
    groups = keys.count("expert_group_count", 1, most=MAX_EXPERTS)
    routing = Routing(
        top=sizes.top,
        sigmoid=kind == 2,
        renormalize=keys.flag("expert_weights_norm", False),
        scale=keys.number("expert_weights_scale", 1.0),
        groups=groups,
        top_groups=keys.count("expert_group_used_count", groups, most=MAX_EXPERTS),
        pair=kind == 2,
    )
    return check_groups(f"metadata {keys.arch}.expert_group_count", routing, sizes)


def check_groups(where: str, routing: Routing, sizes: Sizes) -> Routing:
    """Raises where the experts do not lie in such groups, or the chosen ones do not fit in them."""
    each = sizes.count // routing.groups
    if sizes.count % routing.groups or routing.top_groups > routing.groups or (routing.pair and each < 2):
        raise BadModelFile(
            f"{where}: {sizes.count} experts do not lie in {routing.groups} groups, {routing.top_groups} taken"
        )
    if routing.top > routing.top_groups * each:
        raise BadModelFile(f"{where}: {routing.top} experts cannot be chosen of {routing.top_groups} groups of {each}")
    return routing


def dense_layers(config: Values, layers: int, default: int) -> int:
    """How many layers at the beginning have a plain MLP."""
    count = config.get("first_k_dense_replace") if "first_k_dense_replace" in config else default
    if type(count) is not int or not 0 <= count <= layers:
        raise BadModelFile(f"{config.where}: first_k_dense_replace is {str(count)[:40]}: it must be 0 to {layers}")
    return count


def beyond(config: Values, layers: int) -> Callable[[str], bool]:
    """Whether a tensor belongs to the layers behind the last one, which predict further tokens and are not used here."""
    extra = config.count("num_nextn_predict_layers", 0, most=64) if config.get("num_nextn_predict_layers") else 0
    names = tuple(f"model.layers.{i}." for i in range(layers, layers + extra))
    return lambda name: name.startswith(names)


def halves(stack: Layout, rows: int) -> tuple[Layout, ...]:
    """Views of the first `rows` rows of every matrix in a stack, then of the others."""
    return tuple(replace(stack, data=part[at]) for at in (slice(rows), slice(rows, None)) for part in stack.data)


def _each(weights: Weights, role: str, layer: int, count: int, n: int, k: int) -> tuple[Layout, ...]:
    name = weights.names[role]
    if name.count("{}") == 1:
        return weights.stack(role, count, n, k, layer)
    return tuple(weights.tensors.matrix(f"{name.format(layer, e)}.weight", n, k) for e in range(count))


def mixture_of(
    weights: Weights, layer: int, sizes: Sizes, width: int, routing: Routing, gated: bool = False
) -> Mixture:
    """A block's mixture. gated: its shared MLP counts as much as a sigmoid says."""
    mixture = Mixture(
        router=weights.matrix("router", sizes.count, width, layer),
        experts=experts_of(weights, layer, sizes, width),
        routing=routing,
    )
    if not sizes.shared:
        return mixture
    gate = weights.matrix("shared_gate", sizes.shared, width, layer)
    up = weights.matrix("shared_up", sizes.shared, width, layer)
    down = weights.matrix("shared_down", width, sizes.shared, layer)
    if not gated:
        return replace(mixture, shared=Mlp(gate, up, down))
    row = weights.tensors.row(weights.name("shared_router", layer), width)
    return replace(mixture, gated=(row, Experts((gate,), (up,), (down,))))


def feed(ops: Ops, h: Tensor, ffn: Mlp | Mixture) -> Tensor:
    """A block's MLP, or its mixture with what every row goes through besides. [T, d] -> [T, d]"""
    if isinstance(ffn, Mlp):
        return _mlp(ops, h, ffn)
    out = ops.moe(h, ops.linear(h, ffn.router, ffn.router_bias), ffn.experts, ffn.routing)
    if ffn.shared is not None:
        out = ops.add(out, _mlp(ops, h, ffn.shared))
    if ffn.gated is not None:
        gate, alone = ffn.gated
        out = ops.add(out, ops.moe(h, ops.linear(h, gate), alone, SIGMOID))
    return out


def _mlp(ops: Ops, h: Tensor, m: Mlp) -> Tensor:
    return ops.linear(
        ops.swiglu(ops.linear(h, m.gate, m.gate_bias), ops.linear(h, m.up, m.up_bias)), m.down, m.down_bias
    )


@dataclass(frozen=True, slots=True)
class Block:
    """The weights of one block, and what it sees."""

    attn_norm: Dense
    attn: Attention
    q_norm: Dense | None  # [D]: of each head; [H * D]: of all of them together
    k_norm: Dense | None
    ffn_norm: Dense
    ffn: Mlp | Mixture
    window: int | None = None
    sinks: Dense | None = None


def block_of(
    weights: Weights,
    layer: int,
    d: Dims,
    ffn: Mlp | Mixture,
    *,
    biased: Collection[str] | None,
    normed: tuple[int, int] | None = None,
    window: int | None = None,
) -> Block:
    """A block. biased: see Weights.bias; normed: the widths of the norms of queries and keys, where there are any."""
    return Block(
        attn_norm=weights.norm("attn_norm", d.width, layer),
        attn=parts.attention_of(weights, layer, d, biased),
        q_norm=weights.norm("q_norm", normed[0], layer) if normed else None,
        k_norm=weights.norm("k_norm", normed[1], layer) if normed else None,
        ffn_norm=weights.norm("ffn_norm", d.width, layer),
        ffn=ffn,
        window=window,
    )


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Constants that some families put between the blocks; 1 changes nothing."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    attention: float | None = None  # of scores; None: 1 / sqrt(head size)


class MixtureDecoder(Decoder):
    """Blocks of grouped-query attention and an MLP or a mixture, between an embedding and a head."""

    def __init__(
        self,
        dims: Dims,
        weights: Weights,
        rope: Rope,
        blocks: list[Block],
        *,
        tied: bool | None,
        times: Multipliers | None = None,
    ):
        super().__init__(dims, weights, windows=tuple(b.window for b in blocks), tied=tied)
        self.rope = rope
        self.layers = blocks
        self.times = times or Multipliers()

    def embedded(self, ops: Ops, batch: Batch) -> Tensor:
        return _scaled(ops, ops.embed(batch.ids, self.embedding), self.times.embedding)

    def block(self, ops: Ops, batch: Batch, x: Tensor, i: int) -> Tensor:
        c, w, times = self.config, self.layers[i], self.times
        h, a = ops.rms_norm(x, w.attn_norm, c.eps), w.attn
        q, k, v = ops.linear(h, a.q, a.q_bias), ops.linear(h, a.k, a.k_bias), ops.linear(h, a.v, a.v_bias)
        if w.q_norm is not None and w.k_norm is not None:
            each = w.q_norm.shape[0] == c.head_dim
            q = ops.rms_norm(q, w.q_norm, c.eps, c.heads if each else 1)
            k = ops.rms_norm(k, w.k_norm, c.eps, c.kv_heads if each else 1)
        q = ops.rope(q, batch.pos, self.rope, c.heads)
        k = ops.rope(k, batch.pos, self.rope, c.kv_heads)
        group, at = self.kv_layout[i]
        scale = c.scale if times.attention is None else times.attention
        h = ops.attention(
            q, k, v, batch, layer=at, group=group, heads=c.heads, scale=scale, window=w.window, sinks=w.sinks
        )
        x = ops.add(x, _scaled(ops, ops.linear(h, a.o, a.o_bias), times.residual))
        return ops.add(x, _scaled(ops, feed(ops, ops.rms_norm(x, w.ffn_norm, c.eps), w.ffn), times.residual))

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits of batch.logit_rows."""
        return _scaled(ops, super().forward(ops, batch, inputs), self.times.logits)


def _scaled(ops: Ops, x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else ops.scale(x, factor)
