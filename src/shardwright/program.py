"""Program: how what trains departs from this package's own runtime, where that costs time.

A plan is priced for the program that will run it. Each field is a difference that the program's code or
documentation states; numbers that no document gives are fitted to published runs (``fitted`` of the files in
data/programs, which also keep what they were before).
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from shardwright.description import Bytes, Description, Seconds, nearest
from shardwright.errors import JobError, ShardwrightError

RETIRED = ("hops_block",)
"""Fields of earlier plans that are read over."""

PROGRAMS = Path(__file__).parent / "data" / "programs"


class Program(Description):
    """What a training program does otherwise. The defaults are this package's own runtime, eager.

    ``selective`` says what its selective recomputation repeats: what is memory-bound (``light``), the core of
    attention (``attention``), or every second matrix product with what is memory-bound (``products``).
    """

    error: ClassVar[type[ShardwrightError]] = JobError
    noun: ClassVar[str] = "program"

    name: str = "shardwright"
    attention: Literal["fused", "scores"] = Field(
        default="fused", description="kernel; scores: products and a softmax over all scores, in memory"
    )
    attention_rate: PositiveFloat = Field(
        default=1.0, description="of its fused kernel, over the device's attention_efficiency"
    )
    newer_rate: PositiveFloat = Field(
        default=1.0, description="of that kernel on devices with 8-bit units, which it was not written for"
    )
    light_traffic: PositiveFloat = Field(
        default=1.0, description="of memory-bound operations, over that of one fused kernel each"
    )
    narrow_rate: PositiveFloat = Field(
        default=1.0, description="of products in 8 bits and fewer, over the device's; by scaling recipe"
    )
    score_traffic: PositiveFloat = Field(
        default=1.0, description="of scores that caches do not hold, where they go through memory"
    )
    waits: bool = Field(
        default=True,
        description="ranks of a pipeline for one another between steps, as a common norm has them",
    )
    fills: bool = Field(
        default=False, description="weight gradients of a split backward put wherever a rank would be idle"
    )
    launches: NonNegativeFloat = Field(
        default=1.0, description="time of launches that shows, over that of the device"
    )
    casts: NonNegativeFloat = Field(
        default=1.0, description="to 8 bits and fewer: time that shows, over that of kernels of their own"
    )
    expert_launches: NonNegativeFloat = Field(
        default=0.0, description="for each expert of a rank in a forward pass, where no kernel does them all"
    )
    host_factor: float = Field(
        default=1.0,
        ge=1,
        description="the host's time for a launch, over the device's: a block with experts takes as long",
    )
    trades_own: bool = Field(
        default=False, description="where tp splits experts: ranks trade their own tokens, and gather then"
    )
    data_bandwidth: float = Field(
        default=1.0, gt=0, le=1, description="share of the bandwidth between nodes that data axes reach"
    )
    selective: Literal["light", "attention", "products"] = "light"
    tp_exposed: float = Field(default=1.0, ge=0, le=1, description="share of tp that no product hides")
    ep_exposed: float = Field(default=1.0, ge=0, le=1, description="share of experts' trades not hidden")
    ep_hidden: float = Field(
        default=0.0, ge=0, le=1, description="of what computation covers of them, under another microbatch"
    )
    data_hidden: float = Field(
        default=1.0, ge=0, le=1, description="share of data traffic that may hide, of what the device lets"
    )
    stage_hidden: float = Field(
        default=0.0, ge=0, le=1, description="the same of a pipeline's gradients, under its last microbatch"
    )
    chunk_wait: Seconds = Field(
        default=0.0,
        ge=0,
        description="of a microbatch in each chunk of a pipeline's rank: what was exchanged is waited for, "
        "and the host starts anew",
    )
    hops_split: bool = Field(
        default=False, description="ranks of tp each pass on a part of what all have, and gather it then"
    )
    copies: bool = Field(
        default=True, description="of parameters and gradients in and out of buffers of collectives"
    )

    @model_validator(mode="before")
    @classmethod
    def _known_today(cls, values: Any) -> Any:
        """Without what earlier plans say of hops, which block by ``chunk_wait`` now."""
        if isinstance(values, Mapping):
            return {name: value for name, value in values.items() if name not in RETIRED}
        return values


class KnownProgram(Description):
    """A program shipped with the package: ``words`` by which tables of runs call it, its ``values`` before
    anything was fitted, ``variants`` by the words of its options, and what the fit changed of both."""

    error: ClassVar[type[ShardwrightError]] = JobError
    noun: ClassVar[str] = "program"

    name: str
    words: tuple[str, ...]
    family: Literal["fsdp", "megatron", "deepspeed"] = Field(description="by which memory is counted")
    margin: float = Field(ge=1, description="reserved by the caching allocator, over allocated")
    margins: dict[str, float] = Field(default={}, description="the same by words of options")
    logit_bytes: float = Field(default=10.0, description="of each logit, at the loss's worst moment")
    beside: Bytes = Field(ge=0, description="of the device, beside what the allocator reserves")
    besides: dict[str, Bytes] = Field(default={}, description="the same by words of options")
    values: dict[str, Any] = Field(default={})
    variants: dict[str, dict[str, Any]] = Field(default={})
    fitted: dict[str, Any] = Field(default={})
    fitted_variants: dict[str, dict[str, Any]] = Field(default={})
    source: str

    def program(self, options: str = "", *, fitted: bool = True) -> Program:
        """The program as its ``options``, in the words of a table, have it run."""
        values = {"name": self.name, **self.values, **(self.fitted if fitted else {})}
        for word, change in self.variants.items():
            if word in options:
                values |= change | (self.fitted_variants.get(word, {}) if fitted else {})
        return Program.checked(values)

    def memory_margin(self, options: str = "") -> float:
        """Reserved over allocated, with the ``options`` of a table."""
        return next((margin for word, margin in self.margins.items() if word in options), self.margin)

    def beside_allocator(self, options: str = "") -> int:
        """What the device holds besides [B], with the ``options`` of a table."""
        return next((held for word, held in self.besides.items() if word in options), self.beside)


@cache
def known_programs() -> tuple[KnownProgram, ...]:
    """Programs shipped with the package."""
    return tuple(KnownProgram.from_file(path) for path in sorted(PROGRAMS.glob("*.toml")))


def known_program(name: str) -> KnownProgram:
    """Raises: JobError: no such program; the message names the nearest."""
    for each in known_programs():
        if each.name == name:
            return each
    raise JobError(f"program {name!r} is unknown{nearest(name, [each.name for each in known_programs()])}")
