"""The steps of a block's attention: grouped-query or latent, with rotary embedding and query/key norms."""

from collections.abc import Mapping

from shardwright.model import Mla
from shardwright.plan.block_ops import Matrix, Rank
from shardwright.plan.names import attention_matrices, naming
from shardwright.plan.tape import Op, Step


def attention_steps(rank: Rank, read: str) -> list[Step]:
    """From what the projections read to the output ``o``."""
    mla = rank.model.mla
    return _grouped(rank, read) if mla is None else _latent(rank, mla, read)


def _heads(rank: Rank) -> tuple[float, float]:
    """Query and key/value heads of a rank; the latter are repeated where tp exceeds them."""
    return rank.model.heads / rank.split.tp, max(rank.model.kv_heads / rank.split.tp, 1)


def _grouped(rank: Rank, read: str) -> list[Step]:
    """A fused matrix's output stays whole while attention keeps the values, a view of it; Falcon's with fewer
    key/value heads picks them out by index, which copies."""
    m = rank.model
    query, key = (heads * m.head_size for heads in _heads(rank))
    rotated = m.positions == "rope"
    raw = "_raw" if rotated or m.qk_norm else ""
    sizes = {f"q{raw}": rank.e * query, f"k{raw}": rank.e * key, "v": rank.e * key}
    fused = any(kind == "qkv" for kind, _ in attention_matrices(m))
    if fused:
        targets = ("query", "key", "value")
        bias = m.qkv_bias * (rank.split.tp if naming(m).transposed else 1)
        matrix = Matrix("query, key, value", targets, query + 2 * key, m.hidden, bias)
        step = rank.product(matrix, read, sizes)
    else:
        matrices = [
            Matrix(name, (name,), rows, m.hidden, m.qkv_bias)
            for name, rows in (("query", query), ("key", key), ("value", key))
        ]
        products = [
            rank.product(matrix, read, {tensor: size})
            for matrix, (tensor, size) in zip(matrices, sizes.items(), strict=True)
        ]
        step = tuple(op for product in products for op in product)
    steps = [step]
    if m.qk_norm:
        steps.append(_qk_norms(rank, sizes, "_norm" if rotated else ""))
    if rotated:
        came = "_norm" if m.qk_norm else "_raw"
        turned = (("q", sizes["q_raw"]), ("k", sizes["k_raw"]))
        steps.append(tuple(Op("rotary", (f"{name}{came}",), {name: size}) for name, size in turned))
    viewed = fused and raw and not (m.model_type == "falcon" and m.kv_heads < m.heads)
    views = (f"q{raw}", f"k{raw}") if viewed else ()
    return [*steps, (_core(rank, 2 * key, query, views),), _out(rank, query)]


def _qk_norms(rank: Rank, sizes: Mapping[str, float], after: str) -> Step:
    """Norms of queries and keys; without weights they stand behind the rotary embedding (Llama 4), which is
    the same in bytes."""
    m = rank.model
    ops = []
    parts = zip("qk", ("query", "key"), _heads(rank), (m.heads, m.kv_heads), strict=True)
    for letter, name, heads, all_heads in parts:
        each = rank.w * (1 if m.qk_norm_kind == "projection" else heads)
        stats = {f"{letter}_rstd": each} | ({f"{letter}_mean": each} if m.norm == "layer" else {})
        vectors = {"head": 1, "per_head": all_heads, "projection": all_heads, "weightless": 0}
        weights = (
            (1 + m.qk_norm_bias) * vectors[m.qk_norm_kind] * m.head_size
        )  # whole on every rank, as in plan/params.py
        made = {f"{letter}{after}": sizes[f"{letter}_raw"]}
        ops.append(rank.norm_of(f"{name} norm", f"{letter}_raw", made, stats, weights))
    return tuple(ops)


def _core(rank: Rank, keys_and_values: float, out: float, views: tuple[str, ...]) -> Op:
    """Attention proper. In backward the keys and values of other context ranks pass by in a ring with their
    gradients, these in the wider type, one buffer filled while another travels; or lie gathered. Over packed
    documents a block's gradients are summed before they are added. Queries' gradients are summed in the
    wider type. Ulysses keeps the output once more, after the heads have returned, and repeats key/value heads
    fewer than the ranks. ``views``: other tensors in the same storage as the values."""
    e, w, kind = rank.e, rank.w, rank.split.cp_kind
    heads, kv_heads = _heads(rank)
    packed = rank.job.packing == "documents"
    passed = {
        "none": 0.0,
        "ring": e + (3 if packed else 2) * w,
        "all_gather": rank.split.cp * (2 * e + packed * w),
        "ulysses": packed * w,
    }[kind]
    summed = 0.0 if kind == "none" else (w - e) * out
    makes = {"attention": e * out, "lse": w * heads}
    kept = ["q", "k", "v", *views, "attention", "lse"]
    if kind == "ulysses":
        makes["traded"] = e * out
        if rank.split.cp > kv_heads:
            makes["repeated"] = e * keys_and_values * (rank.split.cp / kv_heads - 1)
            kept.append("repeated")
        if rank.needs_input(("out",)):
            kept.append("traded")
    return Op(
        name="attention",
        reads=("q", "k", "v"),
        makes=makes,
        keeps=tuple(kept),
        stays=("attention", "lse"),
        gradient=rank.trained(heads) if rank.model.attention_sinks else 0.0,
        around_backward=passed * keys_and_values + summed,
    )


def _out(rank: Rank, width: float) -> Step:
    matrix = Matrix("attention output", ("out",), rank.model.hidden, width, rank.model.out_bias)
    return rank.product(matrix, "attention", {"o": rank.residual})


def _latent(rank: Rank, mla: Mla, read: str) -> list[Step]:
    """Latent attention. Its narrow vectors are whole on every rank of tp. The values are a view of the
    product that makes plain keys too, so that these stay; keys are copied to join their rotated part.

    Source: transformers modeling_deepseek_v3.py; torchtitan models/deepseek_v3 does the same.
    """
    e, m = rank.e, rank.model
    heads, _ = _heads(rank)
    query, plain, values = heads * m.head_size, heads * mla.nope_size, heads * mla.value_size
    steps: list[Step] = []
    wide = read
    if mla.q_rank:
        down = Matrix("query down", ("query",), mla.q_rank, m.hidden, m.qkv_bias)
        steps += [
            rank.product(down, read, {"q_latent": e * mla.q_rank}, stays=False),
            (_latent_norm(rank, "q_latent", "query latent norm", mla.q_rank),),
        ]
        wide = "q_latent_normed"
    both, narrow = ("key", "value"), mla.kv_rank + mla.rope_size
    return [
        *steps,
        rank.product(
            Matrix("query", ("query",), query, mla.q_rank or m.hidden, False), wide, {"q_raw": e * query}
        ),
        rank.product(
            Matrix("key, value down", both, narrow, m.hidden, m.qkv_bias),
            read,
            {"kv_latent": e * narrow},
            stays=False,
        ),
        (_latent_norm(rank, "kv_latent", "key, value latent norm", mla.kv_rank),),
        rank.product(
            Matrix("key, value", both, plain + values, mla.kv_rank, False),
            "kv_latent_normed",
            {"k_nope": e * plain, "v": e * values},
        ),
        (
            Op("rotary", ("q_raw",), {"q": e * query}),
            Op("rotary", ("kv_latent",), {"k_rope": e * mla.rope_size}),
        ),
        (Op("key parts joined", ("k_nope", "k_rope"), {"k": e * query}),),
        (_core(rank, query + values, values, ("k_nope",)),),
        _out(rank, values),
    ]


def _latent_norm(rank: Rank, tensor: str, name: str, width: float) -> Op:
    """Keeps the whole latent vector, of which the rotated part of the key is a view."""
    made = {f"{tensor}_normed": rank.e * width}
    return rank.norm_of(name, tensor, made, {f"{tensor}_rstd": rank.w}, width)
