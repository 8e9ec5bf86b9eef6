"""Models of published runs: a row of models.csv as a ModelSpec.

Tables of runs state sizes, not config files. What they leave out (biases, norms' kinds) follows from the
kind of network and moves no prediction by a thousandth.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from shardwright.model import ModelSpec, preset, preset_names

Row = Mapping[str, str]

GPT = {
    "qkv_bias": True, "out_bias": True, "mlp_bias": True, "gated_mlp": False, "norm": "layer",
    "norm_bias": True, "norm_eps": 1e-5,
}  # fmt: skip
"""What GPT-2 and its followers share."""

USUAL_HEAD = 128
"""Size of a head where a table names neither heads nor their size."""

UNSTATED_VOCABULARY = 51200
"""GPT-2's, padded as Megatron pads it, where a table names none."""


def whole(row: Row, column: str, default: int) -> int:
    """A count of a row, ``default`` where the cell is empty."""
    text = row.get(column) or ""
    return int(float(text)) if text else default


def model_of_row(
    row: Row, *, layers: int, heads: int, seq: int, dense: int | None = None
) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model of a row of models.csv, with the depth, heads, sequence and dense layers of one run; and what
    was assumed.

    Raises: ModelError: its sizes contradict each other. KeyError, ValueError: a size is missing.
    """
    assumed = []
    vocab = whole(row, "vocab", 0)
    if not vocab:
        vocab = UNSTATED_VOCABULARY
        assumed.append(f"vocabulary: {vocab}")
    layers = layers or int(row["layers"])
    heads = heads or whole(row, "heads", 0)
    if not heads:
        heads = int(row["hidden"]) // USUAL_HEAD
        assumed.append(f"heads: of {USUAL_HEAD}")
    head_size = whole(row, "head_dim", 0) if heads == whole(row, "heads", 0) else 0
    hidden = int(row["hidden"])
    values: dict[str, Any] = {
        "name": row["model"], "layers": layers, "hidden": hidden, "heads": heads,
        "kv_heads": whole(row, "kv_heads", heads), "head_size": head_size or hidden // heads,
        "ffn": whole(row, "ffn", 0) or whole(row, "moe_ffn", 0), "vocab": vocab,
        "tied_embeddings": row["tied_embeddings"] == "True", "max_positions": seq,
        "source": row["source"],
    }  # fmt: skip
    if not row["tied_embeddings"]:
        gpt = "gelu" in row["mlp"]
        values["tied_embeddings"] = gpt
        assumed.append(f"tied embeddings: {'yes' if gpt else 'no'}")
    values |= _network(row, layers, dense)
    return ModelSpec.checked(values, row["model"]), tuple(assumed)


def _network(row: Row, layers: int, dense: int | None) -> dict[str, Any]:
    """Fields that follow from the kinds of feed-forward network, attention and positions."""
    if "gelu" in row["mlp"]:
        return {"model_type": "gpt2", "activation": "gelu_tanh", "positions": "learned", **GPT}
    if "relu" in row["mlp"]:
        plain = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), False)
        return {"model_type": "starcoder2", "activation": "relu2", **GPT, **plain}
    if not whole(row, "n_experts", 0):
        return {"model_type": "llama"}
    dense = whole(row, "n_dense_layers", 0) if dense is None else dense
    moe = {
        "experts": int(row["n_experts"]), "top_k": int(row["topk"]), "ffn": int(row["moe_ffn"]),
        "shared_ffn": whole(row, "shared_expert_ffn", 0), "first_dense_layers": min(dense, layers - 1),
    }  # fmt: skip
    if row["mla"]:
        mla = json.loads(row["mla"])
        sizes = {
            "q_rank": mla["q_lora"], "kv_rank": mla["kv_lora"], "nope_size": mla["nope"],
            "rope_size": mla["rope"], "value_size": mla["v"],
        }  # fmt: skip
        kind = {"model_type": "deepseek_v3", "moe": {**moe, **_groups(row["model"])}, "mla": sizes}
        return kind | {"head_size": mla["nope"] + mla["rope"], "kv_heads": whole(row, "heads", 0)}
    if "window" in row["attn_window"]:
        window = {"sliding_window": 128, "full_attention_layers": list(range(1, layers, 2))}
        moe |= {"router_bias": True, "expert_bias": True}
        biases = {"qkv_bias": True, "out_bias": True, "attention_sinks": True}
        return {"model_type": "gpt_oss", "moe": moe, **window, **biases}
    if moe["shared_ffn"]:
        return {"model_type": "qwen2_moe", "moe": moe | {"shared_gate": True}, "qkv_bias": True}
    if row["model"].startswith("qwen3"):
        return {"model_type": "qwen3_moe", "moe": moe, "qk_norm": True}
    return {"model_type": "mixtral", "moe": moe}


@cache
def _groups(name: str) -> Mapping[str, int]:
    """Groups of experts that a token may use, of which tables say nothing: those of the package's model."""
    moe = preset(name).moe if name in preset_names() else None
    return {"groups": moe.groups, "top_groups": moe.top_groups} if moe else {}
