"""Published runs as the planner's own descriptions: a row of a table becomes model, job, cluster and layout.

What a row does not say is taken from defaults, each named in ``assumed``, so that they can be counted. What
no default can stand for makes the row unpredicted, with a reason.
"""

import re
from collections.abc import Mapping
from functools import cache
from math import gcd
from typing import Any, NamedTuple

from shardwright.check.runs_layout import RECOMPUTE_OPEN, NotPredictedError, layout_of_row
from shardwright.check.runs_memory import memory_of, recomputed_modules
from shardwright.check.runs_model import Row, model_of_row, whole
from shardwright.check.runs_program import options_of_row, program_of_row
from shardwright.cluster import Cluster, Device, Link, device, device_names
from shardwright.errors import ShardwrightError
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.program import KnownProgram

ACCOUNTING = {"fsdp": "fsdp2", "megatron": "megatron", "deepspeed": "zero"}
"""Whose bytes per parameter a family of programs keeps."""

NVLINK_DOMAIN = 64
"""Ranks of an NVL72 domain that a job of whole powers of two uses."""

LIKE_OTHERS = "h100-sxm-80gb"
"""Whose efficiencies a device has that is known by its data sheet alone."""

NVLINK = 450e9
"""Its NVLink, nominal, one direction [B/s]."""

MACHINES = {("simumax-b200", "B200-SXM-180GB"): "b200-simumax"}
"""Sources whose devices are slower than others of the kind by as much in all runs: machines of their own."""

CHEAP_MODULES = ("mla_up_proj", "layernorm", "moe_act")
"""Of Megatron-Core's --recompute-modules those that repeat next to no product."""

OLDER_NICS: Mapping[str, float] = {"a100": 25e9, "v100": 12.5e9}
"""A device's NIC in nodes of chips older than those of 400 Gb/s [B/s]; PCIe 3 of V100 carries no more."""

OMNI_PATH = 100.0
"""Gb/s of a link, where a table names its kind alone."""


class Case(NamedTuple):
    """A published run, ready to be predicted."""

    run_id: str
    row: Row
    model: ModelSpec
    job: Job
    cluster: Cluster
    layout: Layout
    assumed: tuple[str, ...]


def case_of_row(
    row: Row, models: Mapping[str, Row], sheets: Mapping[str, Row] | None = None, *, fitted: bool = True
) -> Case:
    """A row of a table of runs; ``sheets``: rows of gpus.csv, for kinds that the package has no file of.

    Raises: NotPredictedError: its columns do not determine a prediction.
    """
    for column in ("model", "gpu", "n_gpus", "seq_len", "gbs_seqs"):
        if not row[column]:
            raise NotPredictedError(f"{column} is not stated")
    if row["phase"] == "lora" or "lora" in row["note"].lower().split(";")[0]:
        raise NotPredictedError("LoRA: rank and targets are not stated")
    if row["model"] not in models:
        raise NotPredictedError("model is not in models.csv")
    assumed: list[str] = []
    try:
        return _case(row, models[row["model"]], sheets or {}, assumed, fitted)
    except ShardwrightError as fault:
        raise NotPredictedError(f"no layout: {fault}") from None
    except (KeyError, ValueError) as fault:
        raise NotPredictedError(f"a size is missing: {fault}") from None


def _case(row: Row, sizes: Row, sheets: Mapping[str, Row], assumed: list[str], fitted: bool) -> Case:
    layers = whole(row, "layers_override", 0)
    bridged = "Bridge" in row["framework"] and row["model"] == "deepseek-v3"
    if "with MTP" in row["note"] or (bridged and "without MTP" not in row["note"]):
        layers = (layers or int(sizes["layers"])) + 1
        assumed.append("multi-token prediction: one layer more")
    stated = re.search(r"dense_layers=([0-9]+) for the DeepSeek-V3", row["note"])
    stated = stated if row["model"] == "deepseek-v3" else None
    model, guessed = model_of_row(
        sizes,
        layers=layers,
        heads=whole(row, "heads_override", 0),
        seq=whole(row, "seq_len", 1),
        dense=int(stated[1]) if stated else None,
    )
    known, named = program_of_row(row)
    assumed.extend((*guessed, *named))
    cluster = _cluster(row, sheets, assumed, fitted)
    job = _job(row, model, known, assumed, fitted)
    layout = layout_of_row(row, model, known, assumed)
    if RECOMPUTE_OPEN in assumed:
        way = _recompute_that_fits(model, job, cluster, layout, known, row)
        assumed[assumed.index(RECOMPUTE_OPEN)] = f"recompute: {way}"
        if way.startswith("full"):
            layout = layout.model_copy(update={"recompute": "full"})
    return Case(row["run_id"], row, model, job, cluster, layout, tuple(assumed))


# Cluster


def _cluster(row: Row, sheets: Mapping[str, Row], assumed: list[str], fitted: bool) -> Cluster:
    name = MACHINES.get((row["source_id"], row["gpu"]), row["gpu"])
    kind = _device(name, sheets, assumed, fitted)
    ranks = whole(row, "n_gpus", 1)
    per_node = whole(row, "gpus_per_node", 0)
    if not per_node:
        per_node = kind.gpus_per_node
        assumed.append(f"gpus_per_node: the device's {per_node}")
    if per_node > 8 and ranks > per_node and ranks % per_node:
        per_node = NVLINK_DOMAIN if ranks % NVLINK_DOMAIN == 0 else gcd(ranks, NVLINK_DOMAIN)
    per_node = min(per_node, ranks)
    rate = nic_bandwidth(row["interconnect"], per_node)
    if rate:
        kind = _with_nic(kind, rate)
    elif ranks > per_node and (chip := kind.name.split("-")[0]) in OLDER_NICS:
        kind = _with_nic(kind, OLDER_NICS[chip])
        gigabits = OLDER_NICS[chip] * 8 / 1e9
        assumed.append(f"interconnect: {gigabits:.0f} Gb/s a device, as {chip.upper()} nodes have")
    elif ranks > per_node:
        assumed.append("interconnect: the device's")
    return Cluster(ranks=ranks, gpus_per_node=per_node, device=kind)


def _device(name: str, sheets: Mapping[str, Row], assumed: list[str], fitted: bool) -> Device:
    """The device of that name; or what its data sheet says, with the efficiencies of another."""
    if name.lower() in _known():
        return device(name.lower(), fitted=fitted)
    sheet = sheets.get(name, {})
    if not all(sheet.get(column) for column in ("memory_gb", "hbm_gbps", "dense_bf16_tflops")):
        raise NotPredictedError("gpu is not among the devices")
    assumed.append(f"gpu: its data sheet, efficiencies of {LIKE_OTHERS}")
    like = device(LIKE_OTHERS, fitted=False)
    changes: dict[str, Any] = {
        "name": name.lower(),
        "memory": int(float(sheet["memory_gb"]) * 1e9),
        "memory_bandwidth": float(sheet["hbm_gbps"]) * 1e9,
        "bf16": float(sheet["dense_bf16_tflops"]) * 1e12,
        "fp8": float(sheet.get("dense_fp8_tflops") or 0) * 1e12,
    }
    speed = sheet.get("nvlink_gbps_per_dir") or sheet.get("pcie_gbps_per_dir")
    if speed:
        share = float(speed) * 1e9 / NVLINK
        link = like.intra_link
        changes["intra_link"] = link.model_copy(
            update={
                "bandwidth": link.bandwidth * share,
                "switch_bandwidth": link.switch_bandwidth * share * bool(sheet.get("nvlink_gbps_per_dir")),
            }
        )
    return like.model_copy(update=changes)


@cache
def _known() -> frozenset[str]:
    return frozenset(device_names())


def nic_bandwidth(text: str, per_node: int) -> float:
    """What an interconnect as tables describe it gives each device between nodes [B/s]; 0 if it says nothing.

    "8x HDR 200 Gb/s IB per node", "400 Gb/s RDMA per GPU", "1600 Gbps node-node RoCE", "4x Omni-Path links
    per node".
    """
    for part in text.split(";"):
        rate = re.search(r"([0-9.]+)\s*(?:Gb/s|Gbps|G\b)", part)
        if rate is None and "Omni-Path" not in part:
            continue
        each = float(rate[1]) if rate else OMNI_PATH
        count = re.search(r"([0-9]+)\s*x", part)
        of_node = "node" in part and "per GPU" not in part
        total = each * (int(count[1]) if count else 1)
        return total * 1e9 / 8 / (per_node if of_node else 1)
    return 0.0


NOMINAL_NIC = 50e9
"""400 Gb/s, of which the device files say what is usable [B/s]."""


def _with_nic(kind: Device, rate: float) -> Device:
    """The device with another NIC, of which as large a share is usable."""
    link = kind.inter_link
    values = link.model_dump() | {"bandwidth": link.bandwidth * rate / NOMINAL_NIC}
    return kind.model_copy(update={"inter_link": Link.checked(values)})


# Job


def _job(row: Row, model: ModelSpec, known: KnownProgram, assumed: list[str], fitted: bool) -> Job:
    precision = row["precision"].lower()
    if not precision:
        assumed.append("precision: bf16")
    narrow = any(word in precision for word in ("fp8", "fp4"))
    even = {"expert_imbalance": 1.0} if "forced" in row["moe_balance"] else {}
    if whole(row, "ep", 1) > 1 and not row["moe_balance"]:
        assumed.append("expert_imbalance: the planner's")
    return Job.checked(
        {
            "seq": whole(row, "seq_len", 1),
            "global_batch": 1,
            "precision": "fp8" if narrow else "bf16",
            "accounting": _accounting(row, known),
            "expert_capacity": 1.0 if "capacity factor 1" in row["moe_balance"] else 0.0,
            "program": known.program(options_of_row(row, model), fitted=fitted),
            **even,
        }
    )


def _accounting(row: Row, known: KnownProgram) -> str:
    """Whose bytes per parameter a run kept. DeepSpeed's ZeRO keeps gradients in 16 bits, its BF16 optimizer a
    sum of them in fp32 beside; NVIDIA's recipes for NeMo and Megatron-Bridge reduce them in 16 bits
    (grad_reduce_in_fp32 false)."""
    if known.family != "megatron":
        return ACCOUNTING[known.family]
    if "BF16 optimizer" in row["dp_mode"]:
        return "zero_bf16"
    sharded = "zero" in row["dp_mode"] or "fsdp" in row["dp_mode"]
    narrow = any(word in row["framework"] for word in ("NeMo", "Bridge"))
    return "zero" if sharded or narrow else "megatron"


def _recompute_that_fits(
    model: ModelSpec, job: Job, cluster: Cluster, layout: Layout, known: KnownProgram, row: Row
) -> str:
    """The least recomputation whose memory is within the device's: none, of modules that cost next to
    nothing, where the program can, or full."""
    ways: list[tuple[str, tuple[str, ...]]] = [("none", recomputed_modules(row))]
    if known.name == "megatron-core":
        ways.append(("cheap modules, as none does not fit", CHEAP_MODULES))
    for way, modules in ways:
        memory = memory_of(model, job, layout, known, options_of_row(row, model), modules)
        if memory.device <= cluster.device.memory:
            return way
    return "full, as nothing else fits"
