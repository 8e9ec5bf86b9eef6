"""Plans that prove the ledger: the layouts of the parity matrix on models wide enough for every term to tell.

``scripts/prove.py`` and tests/run/test_proof.py dry-run them.
"""

from collections.abc import Iterator

from gloo import BASE, MODELS
from matrix import AUX, ROWS, Row

from shardwright.cluster import Cluster, cluster_of
from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.explain import plan_of
from shardwright.planfile import Plan
from shardwright.units import GiB

WIDER = {"hidden": 256, "ffn": 704, "heads": 8, "kv_heads": 4, "head_size": 32}
LATENT = {"q_rank": 96, "kv_rank": 64, "nope_size": 32, "rope_size": 16, "value_size": 32}


def wide_model(name: str) -> ModelSpec:
    """A model of the parity matrix, wider; the one that is there for its few rows stays as it is."""
    spec = MODELS[name]
    if name == "rows_below_shards":
        return spec
    changes = WIDER | {"vocab": 2047 if spec.vocab < BASE.vocab else 2048}
    if spec.max_positions is not None:
        changes |= {"max_positions": 512}
    if spec.kv_heads == spec.heads:
        changes |= {"kv_heads": WIDER["heads"]}
    if spec.mla is not None:
        sizes = LATENT if spec.mla.q_rank else LATENT | {"q_rank": 0}
        changes |= {"mla": spec.mla.model_copy(update=sizes), "head_size": 48}
    if spec.moe is not None:
        shared = 128 if spec.moe.shared_ffn else 0
        changes |= {"moe": spec.moe.model_copy(update={"ffn": 128, "shared_ffn": shared})}
    return spec.model_copy(update=changes)


def proof_plan(row: Row, precision: str = "bf16") -> Plan:
    """The plan of a row."""
    spec, layout = wide_model(row.model), row.layout
    balance = {"router_aux_weight": AUX, "router_bias_rate": 1e-3} if spec.moe is not None else {}
    job = Job(
        seq=128,
        global_batch=layout.dp * layout.micro_batch * layout.microbatches,
        precision=precision,
        optimizer=row.optimizer,
        packing="documents" if row.packed else "windows",
        **balance,
    )
    return plan_of(spec, job, _with_host_memory(cluster_of("cpu", layout.ranks)), layout)


def _with_host_memory(cluster: Cluster) -> Cluster:
    """CPU ranks have no host beside them to offload to; the rows that do stand for devices that have."""
    return cluster.model_copy(update={"device": cluster.device.model_copy(update={"host_memory": GiB})})


def proof_plans(precision: str = "bf16") -> Iterator[tuple[str, Plan]]:
    """Name and plan of every row that is not another's with a different batch or compiled."""
    for row in ROWS:
        if not row.compiled and not row.empty:
            yield row.label, proof_plan(row, precision)
