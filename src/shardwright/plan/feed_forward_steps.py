"""The steps of a block's feed-forward network: dense, or a router with routed and shared experts."""

from collections.abc import Mapping

from shardwright.model import Moe
from shardwright.plan.block_ops import Matrix, Rank
from shardwright.plan.names import naming
from shardwright.plan.tape import Op, Step

INDEX_BYTES = 8
"""One int64: the expert of a token, as ``torch.topk`` saves it."""

NAMES = {"silu": "SiLU", "gelu": "GELU", "gelu_tanh": "GELU", "relu": "ReLU", "relu2": "squared ReLU"}
GATED_NAMES = {"silu": "SwiGLU", "gelu": "GeGLU", "gelu_tanh": "GeGLU", "relu": "ReGLU", "relu2": "gate"}


def feed_forward_steps(rank: Rank, read: str, out: str, width: float, *, shared: bool = False) -> list[Step]:
    """A network of ``width`` on this rank, from what it reads to ``out``; or the shared experts' one."""
    m = rank.model
    title, prefix = ("shared expert ", "shared_") if shared else ("", "")
    size, columns, bias = rank.e * width, m.hidden, m.mlp_bias
    gate, up = f"{prefix}gate", f"{prefix}up"
    if not m.gated_mlp:
        first = rank.product(Matrix(f"{title}up", ("up",), width, columns, bias), read, {up: size})
    elif any(kind == "gate_up" for kind, _ in naming(m).matrices):
        fused = Matrix(f"{title}gate and up", ("gate", "up"), 2 * width, columns, bias)
        first = rank.product(fused, read, {gate: size, up: size})
    else:
        pair = (("gate", gate), ("up", up))
        products = [
            rank.product(Matrix(f"{title}{name}", (name,), width, columns, bias), read, {tensor: size})
            for name, tensor in pair
        ]
        first = tuple(op for product in products for op in product)
    product = prefix + product_name(rank)
    down = Matrix(f"{title}down", ("down",), m.hidden, width, bias)
    return [
        first,
        (_activation(rank, title, prefix, {product: size}),),
        rank.product(down, product, {out: rank.residual}, stays=False),
    ]


def product_name(rank: Rank) -> str:
    """What the last matrix of a network reads."""
    return "product" if rank.model.gated_mlp else "activation"


def _activation(
    rank: Rank, title: str, prefix: str, makes: Mapping[str, float], weights: tuple[str, ...] = ()
) -> Op:
    """A gated one keeps gate and up, another its input; ReLU its output alone (torch's
    derivatives.yaml). ``weights`` multiply what it makes."""
    kind, gated = rank.model.activation, rank.model.gated_mlp
    reads = (f"{prefix}gate", f"{prefix}up") if gated else (f"{prefix}up",)
    keeps = tuple(makes) if kind == "relu" and not gated else reads
    return Op(title + (GATED_NAMES if gated else NAMES)[kind], (*reads, *weights), makes, (*keeps, *weights))


def expert_steps(rank: Rank, moe: Moe, read: str) -> tuple[list[Step], tuple[str, ...]]:
    """Shared experts, the router, and the routed experts of this rank with what comes to them; and the names
    of the tensors that add up to the layer's output."""
    if not moe.shared_ffn:
        return _routed(rank, moe, read), ("routed",)
    steps = feed_forward_steps(rank, read, "shared", moe.shared_ffn / rank.split.tp, shared=True)
    if not moe.shared_gate:
        return [*steps, *_routed(rank, moe, read)], ("shared", "routed")
    return [*steps, *_shared_gate(rank, read), *_routed(rank, moe, read)], ("shared_gated", "routed")


def _shared_gate(rank: Rank, read: str) -> list[Step]:
    """One number for each token, after its sigmoid, times what the shared experts give."""
    gate, weights = "shared_output_gate", rank.trained(rank.model.hidden)
    keeps = (read, gate) if weights else (gate,)
    made, gated = {gate: rank.e / rank.by_sequence}, {"shared_gated": rank.residual}
    return [
        (Op("shared expert output gate", (read,), made, keeps, gradient=weights),),
        (Op("shared expert gated", ("shared", gate), gated, ("shared", gate)),),
    ]


def expert_copies(rank: Rank, moe: Moe) -> tuple[float, float]:
    """Copies of each token that a rank sends out and that its experts get.

    Whole experts on ranks of tp take a rank's share of the tokens; an expert split over tp takes all. Without
    a capacity the fullest rank of ep has more than the mean; alone it has all in any case.
    """
    sent = moe.top_k / (rank.split.tp if rank.split.etp == 1 else 1)
    uneven = rank.job.expert_imbalance if rank.split.ep > 1 else 1.0
    return sent, sent * (rank.job.expert_capacity or uneven)


def _routed(rank: Rank, moe: Moe, read: str) -> list[Step]:
    """Megatron's way: a copy is weighted inside the activation, so that no expert's output is kept; and that
    makes the gradient of gate and up as one tensor.

    Source: Megatron-LM core/transformer/moe/experts.py, ``weighted_bias_swiglu_impl``.
    """
    m, e, w = rank.model, rank.e, rank.w
    sent, copies = expert_copies(rank, moe)
    width, number = moe.ffn / rank.split.etp, moe.experts / rank.split.ep
    traded = e * m.hidden * (sent + copies) if rank.split.ep > 1 else 0.0  # buffers of the all-to-all
    scores = {
        "router_scores": w * moe.experts / rank.by_sequence,
        "expert_indices": INDEX_BYTES * moe.top_k / rank.by_sequence,
    }
    router = rank.trained(moe.experts * (m.hidden + moe.router_bias))
    vectors, size = e * m.hidden * copies, e * width * copies
    copied = {"expert_input": vectors, "expert_weights": w * copies}
    pair = {"expert_gate": size, "expert_up": size} if m.gated_mlp else {"expert_up": size}
    name, targets = ("expert gate and up", ("gate", "up")) if m.gated_mlp else ("expert up", ("up",))
    first = Matrix(name, targets, len(pair) * width, m.hidden, moe.expert_bias, number, copies)
    down = Matrix("expert down", ("down",), m.hidden, width, moe.expert_bias, number, copies)
    product = f"expert_{product_name(rank)}"

    def exchange(name: str, reads: tuple[str, ...], makes: Mapping[str, float]) -> Op:
        return Op(name, reads, makes, around=traded, around_backward=traded)

    return [
        (Op("router", (read,), scores, (read, *scores) if router else tuple(scores), gradient=router),),
        (exchange("dispatch", (read, "router_scores"), copied),),
        rank.product(first, "expert_input", pair, joins=False),
        (_activation(rank, "expert ", "expert_", {product: size}, ("expert_weights",)),),
        rank.product(down, product, {"expert_output": vectors}, stays=False),
        (exchange("combine", ("expert_output",), {"routed": rank.residual}),),
    ]
