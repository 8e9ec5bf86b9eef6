"""Names and order of a decoder's modules, as Hugging Face's model of it has them."""

from shardwright.description import Description

Matrices = tuple[tuple[str, str], ...]
"""Kind of a matrix (a key of plan/params.py's table of shapes) and its name."""


class Naming(Description):
    """Names and order of modules. A block is ``stem``.<layer>; other names are relative to their parent.

    ``order`` lists the parts of a block, each "norm" being the next of ``norms`` and "norms" all that remain.
    ``parallel_norms`` are the two norms of a parallel block, if it calls them otherwise. ``transposed``: a
    weight's rows are its inputs (Conv1D). The defaults are Llama's names.
    """

    stem: str = "model.layers"
    embedding: str = "model.embed_tokens"
    position: str = ""
    project_in: str = ""
    project_out: str = ""
    final_norm: str = "model.norm"
    head: str = "lm_head"
    order: tuple[str, ...] = ("attention", "feed_forward", "norms")
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    parallel_norms: tuple[str, ...] = ()
    shared_norm: str = "input_layernorm"
    attention: str = "self_attn."
    attention_matrices: Matrices = (
        ("query", "q_proj"),
        ("key", "k_proj"),
        ("value", "v_proj"),
        ("out", "o_proj"),
    )
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    norm_module_per_head: bool = False
    feed_forward: str = "mlp."
    matrices: Matrices = (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj"))
    transposed: bool = False
    moe_order: tuple[str, ...] = ("experts", "router", "shared", "shared_gate")
    router: str = "gate"
    shared: str = "shared_experts"
    transposed_experts: bool = False
