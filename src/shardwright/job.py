"""Job: what is trained, in numbers that no layout may change."""

from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shardwright.description import Description
from shardwright.errors import JobError, ShardwrightError
from shardwright.program import Program

Precision = Literal["bf16", "fp8", "fp32", "fp64"]
Optimizer = Literal["adamw", "sgd", "sgd_momentum", "adamw_8bit", "adafactor", "muon"]
Packing = Literal["windows", "documents"]
Accounting = Literal["fsdp2", "zero", "zero_bf16", "megatron", "pure_bf16"]

LORA_TARGETS = ("query", "key", "value", "out", "gate", "up", "down")
"""Kinds of matrices that may have adapters; a fused matrix has those of its parts as one."""


class Adapters(NamedTuple):
    """LoRA: two matrices of ``rank`` beside every matrix of the kinds in ``targets``, none for rank 0."""

    rank: int = 0
    targets: tuple[str, ...] = ()


class Job(Description):
    """A training job: sequence length, global batch, arithmetic, optimizer and its schedule.

    ``precision`` bf16 computes in bf16 over fp32 parameters and reduces gradients in fp32; fp8 does the same
    with the matrix products of the blocks in 8 bits, inputs still saved in bf16; fp32 and fp64 do everything
    in that type. ``accounting`` names the row of ``plan/accounting.py`` by which state is counted;
    the runtime's own is ``fsdp2``. Documents are joined and cut every ``seq`` tokens: ``packing`` windows
    lets attention cross them, documents keeps it inside each.
    """

    error: ClassVar[type[ShardwrightError]] = JobError
    noun: ClassVar[str] = "job"

    seq: PositiveInt
    global_batch: PositiveInt = Field(description="sequences of one optimizer step, over all ranks")
    steps: PositiveInt = 1000
    precision: Precision = "bf16"
    accounting: Accounting = "fsdp2"
    program: Program = Field(default=Program(), description="what trains, if another than this package")
    optimizer: Optimizer = "adamw"
    lora_rank: NonNegativeInt = Field(default=0, description="0 trains all parameters")
    lora_targets: tuple[str, ...] = Field(default=(), description="kinds of matrices that have adapters")
    base_bits: Literal[4, 8, 16] = Field(default=16, description="of a frozen parameter, under LoRA")
    expert_capacity: NonNegativeFloat = Field(
        default=0.0, description="factor that caps an expert's tokens; 0 drops none"
    )
    expert_imbalance: float = Field(
        default=1.2, ge=1, description="tokens of the fullest rank of ep over the mean, where none is dropped"
    )
    router_aux_weight: NonNegativeFloat = Field(
        default=0.0, description="of the loss that evens out the experts' tokens, added up over layers"
    )
    router_bias_rate: NonNegativeFloat = Field(
        default=0.0, description="by which a step moves the correction bias of an expert with too many tokens"
    )
    learning_rate: NonNegativeFloat = 3e-4
    min_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1)
    warmup_steps: NonNegativeInt = 0
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: PositiveFloat = 1e-8
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: NonNegativeFloat = 0.1
    clip_norm: NonNegativeFloat = Field(default=1.0, description="0 does not clip")
    seed: NonNegativeInt = 0
    eval_every: NonNegativeInt = Field(default=0, description="steps between evaluations; 0 never evaluates")
    eval_batches: PositiveInt = Field(default=1, description="global batches of one evaluation")
    packing: Packing = "windows"
    held_out: float = Field(default=0.02, ge=0, lt=1, description="share of the data kept for evaluation")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        faults = []
        if self.warmup_steps >= self.steps and self.warmup_steps > 0:
            faults.append(
                f"warmup_steps={self.warmup_steps} is not less than steps={self.steps}: "
                "shorten it or train longer"
            )
        if bool(self.lora_rank) != bool(self.lora_targets):
            faults.append(
                f"lora_rank={self.lora_rank} does not go with lora_targets={list(self.lora_targets)}: give "
                f"both, targets among {', '.join(LORA_TARGETS)}"
            )
        unknown = [target for target in self.lora_targets if target not in LORA_TARGETS]
        if unknown:
            faults.append(f"lora_targets={unknown} are unknown: use {', '.join(LORA_TARGETS)}")
        if self.base_bits != 16 and not self.lora_rank:
            faults.append(f"base_bits={self.base_bits} needs LoRA: a base in so few bits is not trained")
        if self.accounting != "fsdp2" and self.precision not in ("bf16", "fp8"):
            faults.append(
                f"accounting={self.accounting!r} counts bf16 weights but precision={self.precision!r}: "
                "use accounting='fsdp2' or precision='bf16'"
            )
        if self.eval_every and not self.held_out:
            faults.append("eval_every is set but held_out is 0: keep a share of the data, 0.02 for example")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def adapters(self) -> Adapters:
        """What is trained beside a frozen model."""
        return Adapters(self.lora_rank, self.lora_targets)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.seq * self.global_batch
