"""Bytes of model state per parameter: the conventions, side by side as rows of two tables.

``ACCOUNTINGS`` says what a runtime keeps for each parameter and which part a ZeRO stage splits;
``OPTIMIZERS`` what an optimizer adds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwright.job import Job
from shardwright.plan.params import Tensor

NEVER = 4
"""A stage no layout has: the part is never split."""


@dataclass(frozen=True)
class AccountingRow:
    """What a runtime keeps resident for each parameter [B], and from which ZeRO stage on it is split."""

    weight: int
    gradient: int
    master: int
    moment: int  # bytes of one element of optimizer state
    weight_split_from: int
    gradient_split_from: int
    optimizer_split_from: int
    source: str


ACCOUNTINGS: Mapping[str, AccountingRow] = {
    "fsdp2": AccountingRow(
        4, 4, 0, 4, 1, 1, 1,
        "torch fully_shard with bf16 or fp32 compute: the fp32 shard is the master copy; a bf16 copy "
        "exists only while gathered. Stages 1 and 2 rest split too: what they hold whole is `gathered`.",
    ),
    "fsdp2_fp64": AccountingRow(8, 8, 0, 8, 1, 1, 1, "the same with everything in fp64, for proofs"),
    "zero": AccountingRow(
        2, 2, 4, 4, 3, 2, 1, "Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1: 2 + 2 + 12 with Adam"
    ),
    "zero_bf16": AccountingRow(
        2, 6, 4, 4, 3, NEVER, 1,
        "DeepSpeed runtime/bf16_optimizer.py: 16-bit gradients and an fp32 sum of them beside, both whole; "
        "master and moments are split",
    ),
    "megatron": AccountingRow(
        2, 4, 4, 4, 3, NEVER, 1,
        "NVIDIA/Megatron-LM docs/user-guide/features/dist_optimizer.md: bf16 weights, fp32 main gradients, "
        "18 B with Adam; the distributed optimizer splits master and moments only: 6 + 12/D",
    ),
    "pure_bf16": AccountingRow(
        2, 2, 0, 2, 3, 2, 1, "torch AdamW on bf16 parameters: state has the parameters' type"
    ),
}  # fmt: skip

EIGHT_BIT_BLOCK = 2048
"""Elements that share one fp32 scale in 8-bit Adam. Source: Dettmers et al. 2021, arXiv:2110.02861."""


def optimizer_elements(optimizer: str, tensor: Tensor, moment: int = 4) -> float:
    """Elements of state that ``optimizer`` keeps for a tensor, in units of one moment of the accounting row.

    Args: ``moment``: bytes of one moment of that row; only 8-bit Adam asks, its bytes being the same in each.

    Source: torch.optim for adamw, sgd, adafactor (no momentum: one row and one column vector for each matrix,
    stacked experts being one each) and muon (one momentum for matrices inside blocks, two moments elsewhere);
    arXiv:2110.02861 for 8-bit Adam (two bytes an element and two fp32 scales a block).
    """
    numel = tensor.numel
    if optimizer == "adamw":
        return 2 * numel
    if optimizer == "sgd":
        return 0
    if optimizer == "sgd_momentum":
        return numel
    if optimizer == "adamw_8bit":
        return 2 * (numel + 4 * -(-numel // EIGHT_BIT_BLOCK)) / moment
    if optimizer == "adafactor":
        return numel // tensor.shape[-1] + numel // tensor.shape[-2] if is_factored(tensor) else numel
    if optimizer == "muon":
        return numel if is_orthogonalised(tensor) else 2 * numel
    raise KeyError(optimizer)


def is_factored(tensor: Tensor) -> bool:
    """Whether Adafactor keeps a value for each row and column of the last two dims, not for each element."""
    return len(tensor.shape) > 1


def is_orthogonalised(tensor: Tensor) -> bool:
    """Whether Muon makes it orthogonal: matrices of attention, feed-forward layers and experts. Embedding,
    head, router, gates of one row, norms and biases are AdamW's.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon.
    """
    dims = {"attention": 2, "feed_forward": 2, "shared_expert": 2, "expert": 3}
    return len(tensor.shape) == dims.get(tensor.role) and min(tensor.shape[-2:]) > 1


def is_decayed(tensor: Tensor) -> bool:
    """Whether weight decay acts on it: on matrices, not on norms and biases."""
    return len(tensor.shape) > 1 and tensor.role != "norm" and not tensor.name.endswith("bias")


FOUR_BIT_BYTES = 0.5 + 0.127 / 8
"""A frozen parameter in 4 bits with its doubly quantised scales. Source: QLoRA, arXiv:2305.14314, 3."""

EIGHT_BIT_BYTES = 1.0
"""A frozen parameter in 8 bits; one scale a row is left out."""


def is_trained(job: Job, tensor: Tensor) -> bool:
    """Whether a tensor has gradients and optimizer state: all do, under LoRA the adapters alone."""
    return job.lora_rank == 0 or tensor.role == "adapter"


def frozen_bytes(job: Job) -> float:
    """Bytes of a frozen parameter at rest and gathered; 8 and 4 bits are widened where they are used."""
    return {16: 2.0, 8: EIGHT_BIT_BYTES, 4: FOUR_BIT_BYTES}[job.base_bits]


def gathered_bytes(job: Job, tensor: Tensor) -> float:
    """Bytes of one element of a tensor in an all-gather."""
    element = {"bf16": 2, "fp8": 2, "fp32": 4, "fp64": 8}[job.precision]
    quantised = not is_trained(job, tensor) and len(tensor.shape) > 1
    return min(frozen_bytes(job), element) if quantised else float(element)


def accounting_row(accounting: str, precision: str) -> AccountingRow:
    """The row of a job: ``fsdp2`` keeps parameters in fp32, or in fp64 if the job computes in it."""
    return ACCOUNTINGS["fsdp2_fp64" if (accounting, precision) == ("fsdp2", "fp64") else accounting]


def state_bytes_per_parameter(
    row: AccountingRow, moments: float, zero_stage: ArrayLike, shard: ArrayLike
) -> NDArray[np.float64]:
    """Resident state of one parameter on one rank [B], padding left out.

    Args: ``moments``: optimizer elements per parameter (2 for Adam). ``zero_stage`` and ``shard`` broadcast.
    Source: arXiv:1910.02054, figure 1.
    """
    stage, degree = np.asarray(zero_stage), np.asarray(shard, dtype=np.float64)

    def held(amount: float, split_from: int) -> NDArray[np.float64]:
        return np.asarray(amount / np.where(stage >= split_from, degree, 1.0))

    return (
        held(row.weight, row.weight_split_from)
        + held(row.gradient, row.gradient_split_from)
        + held(row.master + moments * row.moment, row.optimizer_split_from)
    )
