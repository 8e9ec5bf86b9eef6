"""Large layouts of real models, which ``scripts/prove.py`` dry-runs beside the parity matrix.

Every axis at degree 2 and more, eight families, 7B to 671B.
"""

from typing import Any, NamedTuple

from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import KEPT_BY_SELECTIVE, Layout
from shardwright.model import preset
from shardwright.plan.explain import plan_of
from shardwright.plan.splits import stage_layers
from shardwright.planfile import Plan


class Large(NamedTuple):
    """A preset with a sequence length and the fields of a layout; the rest follows."""

    model: str
    seq: int
    fields: dict[str, Any]

    @property
    def layout(self) -> Layout:
        """The layout, its stages as even as they can be."""
        spec, fields = preset(self.model), dict(self.fields)
        pp, chunks = fields.get("pp", 1), fields.get("chunks", 1)
        shard = fields.get("dp_shard", 1) * fields.get("cp", 1)
        fields.setdefault("zero_stage", 0 if shard == 1 else 1 if pp > 1 else 3)
        if pp > 1:
            fields["stage_layers"] = stage_layers(spec.layers, pp * chunks)
        if fields.get("recompute") == "selective":
            fields["kept"] = KEPT_BY_SELECTIVE
        return Layout(**{"micro_batch": 1, "microbatches": 4 * pp} | fields)

    @property
    def plan(self) -> Plan:
        """The plan, on H100s."""
        layout = self.layout
        job = Job(seq=self.seq, global_batch=layout.dp * layout.micro_batch * layout.microbatches)
        return plan_of(preset(self.model), job, cluster_of("h100-sxm", layout.ranks), layout)

    @property
    def label(self) -> str:
        """Model and layout."""
        return f"{self.model} {self.layout.label}"


SP = {"sp": True}
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
RING, GATHER, ULYSSES = ({"cp_kind": kind} for kind in ("ring", "all_gather", "ulysses"))

LARGE = [
    Large("llama-3.1-8b", 8192, {"dp_shard": 64, "microbatches": 4} | FULL),
    Large("llama-3.1-8b", 8192, {"dp_replicate": 8, "dp_shard": 8, "microbatches": 2} | SELECTIVE),
    Large("llama-3.1-8b", 32768, {"dp_shard": 8, "cp": 8, "microbatches": 2} | RING | FULL),
    Large("mistral-7b-v0.3", 8192, {"dp_shard": 32, "tp": 2, "microbatches": 4, "loss_chunks": 8} | SP),
    Large("mistral-7b-v0.3", 8192, {"dp_replicate": 16, "tp": 4, "microbatches": 2} | SP),
    Large("qwen3-8b", 8192, {"dp_shard": 16, "tp": 4, "microbatches": 4} | SP | SELECTIVE),
    Large("qwen3-8b", 65536, {"dp_shard": 4, "cp": 4, "tp": 2, "microbatches": 2} | SP | ULYSSES | FULL),
    Large("qwen2.5-14b", 8192, {"dp_shard": 16, "pp": 4, "schedule": "1F1B"} | FULL),
    Large("qwen2.5-32b", 8192, {"dp_shard": 8, "tp": 8, "pp": 4, "schedule": "GPipe"} | SP | FULL),
    Large("starcoder2-15b", 8192, {"dp_shard": 16, "tp": 4, "microbatches": 4} | SP | FULL),
    Large("gpt2-xl", 1024, {"dp_replicate": 4, "dp_shard": 8, "zero_stage": 2, "microbatches": 4}),
    Large("llama-2-70b", 4096, {"dp_shard": 64, "tp": 8, "microbatches": 4} | SP | FULL),
    Large("llama-3.1-70b", 8192, {"dp_shard": 64, "tp": 8, "microbatches": 16} | SP | FULL),
    Large("llama-3.1-70b", 8192, {"dp_shard": 16, "tp": 8, "pp": 4, "schedule": "1F1B"} | SP | SELECTIVE),
    Large(
        "llama-3.1-70b", 8192,
        {"dp_shard": 8, "tp": 8, "pp": 4, "chunks": 5, "schedule": "Interleaved1F1B"} | SP | FULL,
    ),
    Large(
        "llama-3.1-70b", 8192,
        {"dp_shard": 8, "tp": 8, "pp": 4, "chunks": 2, "schedule": "ZBVZeroBubble"} | SP,
    ),
    Large(
        "llama-3.1-70b", 131072, {"dp_shard": 4, "cp": 8, "tp": 8, "microbatches": 2} | SP | GATHER | FULL
    ),
    Large("qwen2.5-72b", 8192, {"dp_shard": 8, "tp": 8, "pp": 8, "schedule": "1F1B"} | SP | FULL),
    Large(
        "llama-3.1-405b", 8192,
        {"dp_shard": 64, "cp": 2, "tp": 8, "pp": 16, "schedule": "1F1B", "microbatches": 32}
        | SP | RING | FULL,
    ),
    Large(
        "llama-3.1-405b", 8192,
        {"dp_shard": 8, "tp": 8, "pp": 16, "chunks": 2, "schedule": "LoopedBFS"} | SP | FULL,
    ),
    Large(
        "llama-3.1-405b", 8192,
        {"dp_shard": 8, "tp": 8, "pp": 9, "chunks": 2, "schedule": "InterleavedZeroBubble"} | SP,
    ),
    Large("mixtral-8x7b", 8192, {"dp_shard": 64, "ep": 8, "microbatches": 4} | FULL),
    Large("mixtral-8x7b", 8192, {"dp_shard": 16, "tp": 4, "etp": 4, "ep": 4, "microbatches": 2} | SP),
    Large("mixtral-8x22b", 8192, {"dp_shard": 16, "tp": 4, "pp": 4, "ep": 8, "schedule": "1F1B"} | SP | FULL),
    Large("qwen3-30b-a3b", 8192, {"dp_shard": 32, "tp": 2, "ep": 32, "microbatches": 4} | SP | FULL),
    Large("qwen3-235b-a22b", 8192, {"dp_shard": 32, "tp": 4, "ep": 32, "microbatches": 4} | SP | FULL),
    Large(
        "qwen3-235b-a22b", 8192, {"dp_shard": 16, "pp": 8, "ep": 16, "schedule": "1F1B"} | FULL,
    ),
    Large("glm-4.5-air", 8192, {"dp_shard": 64, "ep": 16, "microbatches": 2} | FULL),
    Large("deepseek-v2-lite", 4096, {"dp_shard": 32, "ep": 16, "microbatches": 4} | SELECTIVE),
    Large("deepseek-v3", 4096, {"dp_shard": 64, "pp": 16, "ep": 64, "schedule": "1F1B"} | FULL),
    Large(
        "deepseek-v3", 4096,
        {"dp_shard": 32, "pp": 8, "chunks": 2, "ep": 32, "schedule": "DualPipeV"} | FULL,
    ),
]  # fmt: skip
