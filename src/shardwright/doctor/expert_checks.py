"""Mixtures of experts in a configuration: units that can hang, traffic that is repeated, gathers of
experts."""

from collections.abc import Iterator

from shardwright.doctor.finding import Finding
from shardwright.doctor.setting import Setting
from shardwright.plan.params import parameter_table
from shardwright.units import format_bytes

PER_MODULE = ("deepspeed", "accelerate", "trainer", "given", "live")
"""Frameworks whose ZeRO 3 gathers every module by itself unless told otherwise."""


def expert_findings(setting: Setting) -> Iterator[Finding]:
    """What concerns routed experts."""
    experts = setting.experts
    if experts is None or experts < 2:
        return
    if setting.zero_stage == 3 and not setting.leaf_modules and _per_expert(setting):
        name = f" of {setting.model.name}" if setting.model else ""
        yield Finding(
            "experts_as_units",
            "likely",
            f"{experts} routed experts{name} under ZeRO 3 without a leaf module: a rank on which an "
            "expert gets no token "
            "does not gather it, and the others wait",
            (),
            (setting.source,),
            numbers={"experts": experts, "zero_stage": 3},
        )
    if (setting.tp or 1) > 1 and setting.sp is False:
        yield Finding(
            "routed_tokens_repeated",
            "certain",
            f"tp={setting.tp} without sequence parallelism: each of the {setting.tp} ranks dispatches "
            "the same tokens to "
            "the experts",
            (),
            (setting.source,),
            numbers={"tp": setting.tp},
        )
    yield from _gathered(setting, experts)


def _per_expert(setting: Setting) -> bool:
    if setting.units == "experts":
        return True
    fsdp = setting.other.get("strategy") is not None  # accelerate's FSDP wraps blocks
    return setting.framework in PER_MODULE and not fsdp and setting.units not in ("blocks", "root")


def _gathered(setting: Setting, experts: int) -> Iterator[Finding]:
    """Experts gathered whole by FSDP, with the bytes of one layer."""
    if (
        setting.zero_stage != 3
        or (setting.ep or 1) > 1
        or (setting.sharding or 2) == 1
        or setting.model is None
    ):
        return
    sizes = [
        sum(tensor.numel for tensor in unit.tensors if tensor.role == "expert")
        for unit in parameter_table(setting.model).blocks
    ]
    numel = max(sizes, default=0)
    if numel == 0:
        return
    times = 3 if setting.recompute == "full" else 2
    yield Finding(
        "experts_gathered",
        "likely",
        f"without expert parallelism every layer's {experts} experts are gathered: "
        f"{format_bytes(2 * numel)} in 16 bits, "
        f"{times} times a microbatch",
        (),
        (setting.source,),
        numbers={"bytes_per_layer": 2 * numel, "gathers": times},
    )
