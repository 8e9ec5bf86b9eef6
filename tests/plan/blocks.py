"""What the tests of computation share: a model of every family, devices, and work of one rank."""

import numpy as np

from shardwright.cluster import device
from shardwright.job import Job
from shardwright.layout import CONTEXT_KINDS
from shardwright.model import preset
from shardwright.plan.compute import Work
from shardwright.plan.params import parameter_table

LLAMA = preset("llama-3-8b")
H100, A100, CPU = device("h100-sxm"), device("a100-sxm"), device("cpu")
JOB = Job(seq=8192, global_batch=8)
IDEAL = {
    "matmul_efficiency": 1.0, "attention_efficiency": 1.0, "memory_efficiency": 1.0, "launch": 0.0,
    "memory_bandwidth": 1e30, "sms": 0,
}  # fmt: skip
"""Memory and launches take no time, and products of any shape run at the peak."""

NAMES = (
    "llama-3-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "gemma-7b", "gemma-2-9b", "gemma-3-12b",
    "phi-3-mini", "gpt2-xl", "gpt-neox-20b", "olmo-2-7b", "granite-3.3-8b", "command-r", "starcoder2-15b",
    "stablelm-3b", "falcon-7b", "opt-350m", "mixtral-8x7b", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b",
    "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b", "glm-4.5-air", "llama-4-maverick",
)  # fmt: skip
COHERE2 = preset("aya-expanse-8b").model_copy(
    update={
        "model_type": "cohere2", "sliding_window": 1024, "full_attention_layers": (3, 7, 11),
        "no_rope_layers": (3, 7, 11),
    }
)  # fmt: skip
MODELS = {name: preset(name) for name in NAMES} | {"cohere2": COHERE2}


def work(tokens=8192.0, tp=1, by_sequence=1, cp=1, kind="none", ep=1, etp=1):
    columns = (tokens, tp, by_sequence, cp, CONTEXT_KINDS.index(kind), ep, etp)
    return Work(*(np.asarray(column) for column in columns))


def on(chosen, **changes):
    return chosen.model_copy(update=changes)


def kinds(model):
    """Blocks of each kind: copies."""
    found = {}
    for unit in parameter_table(model).blocks:
        covered = model.moe is not None and model.moe.covers(unit.layers[0])
        found["experts" if covered else "dense"] = unit.copies
    return found


def rate(times, share):
    """FLOP of ``share`` of a block's work over its time, up to a constant."""
    return share / (times.forward + times.backward)
