"""What to change first, with its predicted effect; and layouts whose ledger says that they do not fit."""

from collections.abc import Iterator
from dataclasses import replace

from shardwright.cluster import device
from shardwright.doctor.evidence import Evidence
from shardwright.doctor.finding import Finding
from shardwright.doctor.planned import plan_of_setting
from shardwright.doctor.setting import Setting
from shardwright.plan.explain import accounts
from shardwright.plan.sensitivity import sensitivities
from shardwright.planfile import Plan
from shardwright.units import format_bytes

MOST_CHANGES = 4

COMMON = (
    "h100-sxm-80gb",
    "a100-sxm-40gb",
    "h200-sxm-141gb",
    "b200-sxm-180gb",
    "rtx4090-24gb",
    "l40s-48gb",
    "mi300x-192gb",
)
SAME_CAPACITY = 0.03
"""By how much a message's capacity may miss a device's memory."""


def changes_of(setting: Setting | None, capacity: int | None = None) -> tuple[str, ...]:
    """What to change first, each with its predicted effect, where the layout can be priced.

    Where nobody says what the device is, one of the same ``capacity`` [B] is taken, and named.
    """
    if setting is None:
        return ()
    assumed = ""
    if not setting.device and setting.plan is None and capacity is not None:
        found = device_of_capacity(capacity)
        if found is None:
            return ()
        setting, assumed = replace(setting, device=found), f" (taking the device for {found})"
    plan = plan_of_setting(setting)
    return () if plan is None else tuple(line + assumed for line in change_lines(plan))


def device_of_capacity(capacity: int) -> str | None:
    """A device with so much memory [B], the most common kinds first."""
    known = [device(name) for name in COMMON]
    near = [kind for kind in known if abs(kind.memory / capacity - 1) <= SAME_CAPACITY]
    return near[0].name if near else None


def change_lines(plan: Plan) -> Iterator[str]:
    """Single changes of a layout that save most memory, those that fit first."""
    rows = [
        row
        for row in sensitivities(plan)
        if row["kind"] == "layout" and row["allowed"] and row["memory_change"] < 0
    ]
    rows.sort(key=lambda row: (not row["fits"], row["step_time"] if row["fits"] else row["memory"]))
    for row in rows[:MOST_CHANGES]:
        fits = "fits" if row["fits"] else "does not fit yet"
        yield (
            f"{row['change']}: predicted {format_bytes(row['memory'])} a device "
            f"({format_bytes(row['memory_change'])}), {fits}, "
            f"step {row['step_time_change'] / max(row['step_time'] - row['step_time_change'], 1e-12):+.0%}"
        )


def ledger_findings(evidence: Evidence) -> Iterator[Finding]:
    """Layouts that by their ledger do not fit, without any run."""
    for setting in evidence.stated:
        plan = plan_of_setting(setting)
        if plan is None or plan.cluster.device.kind == "cpu":
            continue
        stages = accounts(plan)["stages"]
        heaviest = max(stages, key=lambda stage: float(stage["total"]))
        total, limit = float(heaviest["total"]), plan.cluster.device.memory
        if total <= limit:
            continue
        terms = sorted(
            (
                (name, float(heaviest[name]))
                for name in ("parameters", "gradients", "optimizer", "activations", "logits", "gathered")
            ),
            key=lambda term: -term[1],
        )
        yield Finding(
            "does_not_fit",
            "likely",
            f"the ledger of [{plan.layout.label}] needs {format_bytes(total)} on the heaviest rank "
            f"(stage {heaviest['stage']}), "
            f"{plan.cluster.device.name} has {format_bytes(limit)}: "
            + ", ".join(f"{name} {format_bytes(size)}" for name, size in terms[:3]),
            (),
            (setting.source,),
            tuple(change_lines(plan)),
            numbers={
                "needs": round(total),
                "capacity": limit,
                "terms": {name: round(size) for name, size in terms},
            },
        )
