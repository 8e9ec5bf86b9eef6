"""Two plans of one model side by side: what differs, term by term, and which is faster or smaller by what."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardwright.cluster import Cluster
from shardwright.description import Description
from shardwright.errors import PlanFileError
from shardwright.plan.batch import batch_change
from shardwright.plan.explain import accounts
from shardwright.planfile import MemoryTerms, Plan
from shardwright.units import format_bytes, format_time

STEP_PARTS = ("compute", "bubble", "exposed", "optimizer")
"""Of a step time, as ``accounts`` has them; they add up."""

SAME = 1e-3
"""Relative difference below which a prediction tells nothing apart."""

TOKENS_OF_RATE = 1e6
"""Tokens that times are stated for when two steps are not of the same tokens."""

MODEL_LABELS = ("name", "source")
"""Fields of a model that change nothing of what is trained."""


class Side(NamedTuple):
    """One of the two plans, and all there is to say about it."""

    name: str
    plan: Plan
    found: Mapping[str, Any]

    @property
    def heaviest(self) -> Mapping[str, Any]:
        """The stage that takes most of its device."""
        stages: list[Mapping[str, Any]] = self.found["stages"]
        return max(stages, key=lambda stage: float(stage["total"]))

    @property
    def tokens_per_s(self) -> float:
        """Throughput of the whole cluster."""
        return float(self.plan.job.tokens_per_step / self.found["step"]["time"])

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Throughput of one device."""
        return float(self.found["step"]["tokens_per_s_per_gpu"])

    def axes(self) -> dict[str, dict[str, float]]:
        """Bytes sent and time exposed by axis, a step and rank."""
        total: dict[str, dict[str, float]] = {}
        for flow in self.found["traffic"]:
            axis = total.setdefault(flow["axis"], {"bytes": 0.0, "exposed_time": 0.0})
            for quantity in axis:
                axis[quantity] += float(flow[quantity])
        return total

    def parts(self) -> dict[str, float]:
        """Parts of a step, exposed time by axis; they add up to the step."""
        step = self.found["step"]
        exposed = {f"exposed {axis}": float(time) for axis, time in step["exposed_by_axis"].items()}
        return {part: float(step[part]) for part in STEP_PARTS if part != "exposed"} | exposed


def compare_plans(a: Plan, b: Plan) -> dict[str, Any]:
    """Two plans as one JSON document: ``difference`` is b - a, ``ratio`` b / a, None where a has nothing.

    Steps of different batches are not of the same work: their times are put side by side without difference
    or ratio, and speed is judged in tokens/s.

    Raises: PlanFileError: the models differ.
    """
    check_same_model(a, b)
    sides = Side("A", a, accounts(a)), Side("B", b, accounts(b))
    batch = batch_change(a.job, b.job)
    return {
        "model": a.model.name,
        "a": _head(sides[0]),
        "b": _head(sides[1]),
        "layout": _differences(a.layout, b.layout),
        "job": _differences(a.job, b.job),
        "cluster": _cluster_differences(a.cluster, b.cluster),
        "memory": _memory(*sides),
        "traffic": _traffic(*sides, same_batch=batch is None),
        "step": _step(*sides, same_batch=batch is None),
        "throughput": _throughput(*sides),
        "same_batch": batch is None,
        "batch": batch,
        "faster": _name_of_more(*sides, sides[0].tokens_per_s, sides[1].tokens_per_s),
        "smaller": _name_of_more(*sides, -sides[0].heaviest["total"], -sides[1].heaviest["total"]),
        "verdict": [_speed_sentence(*sides), _memory_sentence(*sides)],
    }


def check_same_model(a: Plan, b: Plan) -> None:
    """Raises: PlanFileError: the models differ, naming each field."""
    fields = [row for row in _differences(a.model, b.model) if row["field"] not in MODEL_LABELS]
    if fields:
        named = ", ".join(f"{row['field']}={row['a']!r} and {row['b']!r}" for row in fields)
        raise PlanFileError(
            f"plans are of different models, {a.model.name} and {b.model.name} ({named}): "
            "plan the same model twice with 'shardwright plan MODEL ... -o'"
        )


def _head(side: Side) -> dict[str, Any]:
    plan = side.plan
    return {
        "label": plan.layout.label,
        "ranks": plan.cluster.ranks,
        "device": plan.cluster.device.name,
        "device_memory": plan.cluster.device.memory,
        "fits": bool(side.heaviest["total"] <= plan.cluster.device.memory),
        "runnable": side.found["runnable"],
        "peak_moment": side.found["peak_moment"],
        "heaviest_stage": side.heaviest["stage"],
        "assumed": side.found["assumed"],
    }


def _differences(a: Description, b: Description) -> list[dict[str, Any]]:
    """Fields that differ, those of records inside by their dotted names."""
    left, right = _flat(a.model_dump(mode="json")), _flat(b.model_dump(mode="json"))
    names = [*left, *(name for name in right if name not in left)]
    return [
        {"field": name, "a": left.get(name), "b": right.get(name)}
        for name in names
        if left.get(name) != right.get(name)
    ]


def _cluster_differences(a: Cluster, b: Cluster) -> list[dict[str, Any]]:
    """Of devices of two names the name stands for all of their numbers."""
    others = a.device.name != b.device.name
    return [
        row
        for row in _differences(a, b)
        if row["field"] != "assumed"
        and (row["field"] == "device.name" or not (others and row["field"].startswith("device.")))
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        result |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return result


def _row(name: str, value: str, a: float, b: float, *, comparable: bool = True) -> dict[str, Any]:
    return {
        name: value,
        "a": a,
        "b": b,
        "difference": b - a if comparable else None,
        "ratio": b / a if comparable and a else None,
    }


def _memory(a: Side, b: Side) -> list[dict[str, Any]]:
    """The heaviest rank of each, by term."""
    terms = (*MemoryTerms.model_fields, "total")
    return [_row("term", term, a.heaviest[term], b.heaviest[term]) for term in terms]


def _traffic(a: Side, b: Side, *, same_batch: bool) -> list[dict[str, Any]]:
    left, right = a.axes(), b.axes()
    nothing = {"bytes": 0.0, "exposed_time": 0.0}
    return [
        {
            "axis": axis,
            "quantity": quantity,
            **_row(
                "axis",
                axis,
                left.get(axis, nothing)[quantity],
                right.get(axis, nothing)[quantity],
                comparable=same_batch,
            ),
        }
        for axis in [*left, *(axis for axis in right if axis not in left)]
        for quantity in nothing
    ]


def _step(a: Side, b: Side, *, same_batch: bool) -> list[dict[str, Any]]:
    left, right = a.found["step"], b.found["step"]
    return [
        _row("part", part, float(left[part]), float(right[part]), comparable=same_batch)
        for part in (*STEP_PARTS, "time")
    ]


def _throughput(a: Side, b: Side) -> list[dict[str, Any]]:
    return [
        _row("quantity", "tokens_per_s", a.tokens_per_s, b.tokens_per_s),
        _row("quantity", "tokens_per_s_per_gpu", a.tokens_per_s_per_gpu, b.tokens_per_s_per_gpu),
        _row("quantity", "mfu", float(a.found["step"]["mfu"]), float(b.found["step"]["mfu"])),
    ]


def _name_of_more(a: Side, b: Side, of_a: float, of_b: float) -> str | None:
    if abs(of_b - of_a) <= SAME * abs(of_a):
        return None
    return a.name if of_a > of_b else b.name


def _speed_sentence(a: Side, b: Side) -> str:
    """Which is faster in tokens/s, and by which parts mostly, for the same tokens."""
    left, right = a.plan.job.tokens_per_step, b.plan.job.tokens_per_step
    sentence = _speed(a, b)
    if left == right:
        parts, of = _parted(a.parts(), b.parts()), "a step"
    else:
        of_a = {part: time * TOKENS_OF_RATE / left for part, time in a.parts().items()}
        of_b = {part: time * TOKENS_OF_RATE / right for part, time in b.parts().items()}
        parts, of = _parted(of_a, of_b), "a million tokens"
        sentence += "; a step of one is not a step of the other, so their times are not compared"
    if a.found["step"]["time"] == b.found["step"]["time"] and left == right:
        return sentence
    return f"{sentence}: {_mostly(parts, format_time)} {of} from A to B"


def _speed(a: Side, b: Side) -> str:
    whole = a.plan.cluster.ranks != b.plan.cluster.ranks
    unit = "tokens/s" if whole else "tokens/s/GPU"
    rates = [side.tokens_per_s if whole else side.tokens_per_s_per_gpu for side in (a, b)]
    name = _name_of_more(a, b, *rates)
    if name is None:
        return f"A and B are equally fast within {SAME:.1%} ({rates[0]:,.0f} {unit})"
    slow, fast = sorted(rates)
    sentence = f"{name} is {fast / slow - 1:.1%} faster ({fast:,.0f} against {slow:,.0f} {unit}"
    if whole:
        rank = f"{b.tokens_per_s_per_gpu:,.0f} against {a.tokens_per_s_per_gpu:,.0f} of A"
        sentence += (
            f" on {b.plan.cluster.ranks:,} devices of B and {a.plan.cluster.ranks:,} of A; "
            f"a device of B does {rank}"
        )
    return sentence + ")"


def _memory_sentence(a: Side, b: Side) -> str:
    """Which takes less of the heaviest device, and by which terms mostly."""
    totals = [int(side.heaviest["total"]) for side in (a, b)]
    name = _name_of_more(a, b, -totals[0], -totals[1])
    parts = _parted(
        *({term: float(side.heaviest[term]) for term in MemoryTerms.model_fields} for side in (a, b))
    )
    if name is None:
        sentence = f"A and B take the same memory within {SAME:.1%} ({format_bytes(totals[0])})"
        return (
            sentence if totals[0] == totals[1] else f"{sentence}: {_mostly(parts, format_bytes)} from A to B"
        )
    less, more = sorted(totals)
    sentence = f"{name} is smaller by {format_bytes(more - less)}"
    sentence += f" ({format_bytes(less)} against {format_bytes(more)})"
    return f"{sentence}: {_mostly(parts, format_bytes)} from A to B"


def _parted(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: b.get(name, 0.0) - a.get(name, 0.0) for name in [*a, *(n for n in b if n not in a)]}


def _mostly(parts: Mapping[str, float], show: Callable[[float], str]) -> str:
    """The two parts that make most of the sum, and the largest against it, where they are not small."""
    whole = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda item: -abs(item[1]))
    seen = [(name, value) for name, value in ordered if abs(value) >= 0.1 * abs(ordered[0][1])]
    signed = [
        (value * whole > 0, f"{name} {'-' if value < 0 else '+'}{show(abs(value))}") for name, value in seen
    ]
    along = [text for with_it, text in signed if with_it][:2]
    against = [text for with_it, text in signed if not with_it][:1]
    return ", against ".join(", ".join(texts) for texts in (["mostly " + ", ".join(along)], against) if texts)
