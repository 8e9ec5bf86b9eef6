"""Products and norms on one rank: their sizes and what they keep, trained, frozen or with adapters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.job import Job
from shardwright.layout import ContextKind
from shardwright.model import ModelSpec
from shardwright.plan.tape import Op, Step

ELEMENT_BYTES: Mapping[str, int] = {"bf16": 2, "fp8": 2, "fp32": 4, "fp64": 8}
"""Bytes of one activation or gathered parameter. fp8 products keep their inputs in bf16 (torchao
Float8Linear saves the high-precision input)."""

WIDE_BYTES: Mapping[str, int] = {"bf16": 4, "fp8": 4, "fp32": 4, "fp64": 8}
"""Bytes of one statistic (norm deviation, log-sum-exp), reduced gradient and resting parameter."""


class Split(NamedTuple):
    """How a block's tensors are split: what of the layout its activations depend on."""

    tp: int = 1
    sp: bool = False
    cp: int = 1
    cp_kind: ContextKind = "none"
    ep: int = 1
    etp: int = 1


class Matrix(NamedTuple):
    """A product with a matrix of ``rows`` outputs and ``columns`` inputs, or with ``number`` of them for
    ``copies`` of each token. ``targets``: by what names LoRA calls it; ``bias``: biases of ``rows`` numbers,
    as many as ranks of tp where a rank has the whole one of a split matrix."""

    name: str
    targets: tuple[str, ...]
    rows: float
    columns: float
    bias: int
    number: float = 1.0
    copies: float = 1.0


@dataclass(frozen=True)
class Rank:
    """One rank of a split: the sizes of its tensors, and operations with them."""

    model: ModelSpec
    job: Job
    split: Split

    @property
    def e(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES[self.job.precision]

    @property
    def w(self) -> int:
        """Bytes of a statistic."""
        return WIDE_BYTES[self.job.precision]

    @property
    def by_sequence(self) -> int:
        """Ranks over which the residual stream is split."""
        return self.split.tp if self.split.sp else 1

    @property
    def residual(self) -> float:
        """A vector of the residual stream."""
        return self.e * self.model.hidden / self.by_sequence

    @property
    def whole(self) -> float:
        """What a column-parallel matrix reads: gathered over tp, and kept so, for torch's DTensor gathers
        outside the product and the product saves what it was given."""
        return self.e * self.model.hidden

    def norm(self, number: int, read: str, made: str, size: float) -> Op:
        """A norm of the residual stream keeps its input and a statistic, LayerNorm two."""
        names = {1: "input norm", 2: "second norm", 3: "attention output norm", 4: "feed-forward output norm"}
        each = self.w / self.by_sequence
        stats = {f"rstd{number}": each}
        if self.model.norm == "layer":
            stats[f"mean{number}"] = each
        weights = self.model.hidden * (self.model.norm_weight + self.model.norm_bias)
        return self.norm_of(names[number], read, {made: size}, stats, weights)

    def norm_of(
        self, name: str, read: str, made: Mapping[str, float], stats: Mapping[str, float], weights: float
    ) -> Op:
        """Any norm, with ``weights`` trained elements."""
        return Op(name, (read,), {**made, **stats}, (read, *stats), gradient=self.trained(weights))

    def trained(self, elements: float) -> float:
        """Gradient of what is no matrix: none under LoRA [B]."""
        return 0.0 if self.job.lora_rank else self.e * elements

    def needs_input(self, targets: tuple[str, ...]) -> bool:
        """Whether a matrix of these kinds, or its adapter, is trained."""
        return not self.job.lora_rank or bool(set(targets) & set(self.job.lora_targets))

    def product(
        self,
        matrix: Matrix,
        read: str,
        makes: Mapping[str, float],
        *,
        stays: bool = True,
        joins: bool = True,
    ) -> Step:
        """A matrix product keeps its input for the weight gradient. A frozen matrix needs nothing; its
        adapter goes through ``lora_rank`` numbers, keeps both its inputs, and scales its output's gradient.
        Where it makes several tensors, which are views of one, it ``joins`` their gradients in a copy.

        Source of the adapter's form: peft tuners/lora/layer.py, in the type of the activations.
        """
        name, rank, number = matrix.name, self.job.lora_rank, matrix.number
        size = sum(makes.values())
        joined = size if joins and len(makes) > 1 else 0.0
        whole = Op(name, (read,), makes, stays=tuple(makes) if stays else (), around_backward=joined)
        if not rank:
            weights = self.e * number * matrix.rows * (matrix.columns + matrix.bias)
            return (whole._replace(keeps=(read,), gradient=weights),)
        if not self.needs_input(matrix.targets):
            return (whole,)
        narrow = f"{name.replace(',', '').replace(' ', '_')}_lora"
        down = Op(
            f"{name} adapter", (read,), {narrow: self.e * rank * matrix.copies}, (read,),
            gradient=self.e * number * rank * matrix.columns,
        )  # fmt: skip
        up = whole._replace(
            reads=(read, narrow), keeps=(narrow,), gradient=self.e * number * rank * matrix.rows,
            around=size, around_backward=joined + size,
        )  # fmt: skip
        return down, up
