"""What has this many elements: tensors and units of a model, shards of them, activations of a layout."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from shardwright.doctor.evidence import Evidence, Operation
from shardwright.model import ModelSpec, preset, preset_names
from shardwright.plan.params import BLOCK, Tensor, parameter_table

GATHERING = ("ALLGATHER",)
SCATTERING = ("REDUCESCATTER",)

MOST_DEGREE = 1 << 14

LEAST_EMBEDDING = 10_000_000
"""Elements below which a size says nothing of a model that is not known."""

KNOWN_WIDTHS = (1024, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 12288, 16384)
ADDED_TOKENS = 512
"""Tokens that people add to a vocabulary, or that padding does, at most."""


class Meaning(NamedTuple):
    """What a number of elements may be. ``exact`` if no other reading of the model has that size."""

    text: str
    module: str
    model: str
    degree: int | None = None


def degree_of(operation: Operation) -> int | None:
    """Ranks of a group, from what goes into a gather or scatter and what comes out."""
    small, large = operation.numel_in, operation.numel_out
    if operation.short in SCATTERING:
        small, large = large, small
    elif operation.short not in GATHERING:
        return None
    if not small or not large or large % small or not 1 < large // small <= MOST_DEGREE:
        return None
    return large // small


def whole_size(operation: Operation) -> int | None:
    """Elements of the whole tensor that a collective gathers, reduces or sends."""
    sizes = [size for size in (operation.numel_in, operation.numel_out) if size is not None]
    return max(sizes, default=None)


def meaning_of(evidence: Evidence, operation: Operation) -> Meaning | None:
    """What a collective moves, by the model if one is known, else by the models that are."""
    size, degree = whole_size(operation), degree_of(operation)
    if size is None or size < 4096:
        return None
    model = evidence.model
    if model is not None:
        setting = evidence.setting
        tp, ep = (setting.tp or 1, setting.ep or 1) if setting is not None else (1, 1)
        return next(_of_model(model, size, degree, tp, ep), None) or _of_layout(evidence, model, size)
    return _of_presets(size, degree) or _of_vocabulary(size, degree)


def _of_model(model: ModelSpec, size: int, degree: int | None, tp: int, ep: int) -> Iterator[Meaning]:
    """Tensors and units with this many elements, padded to whole shards or not."""
    for numel, name in [*_sizes(model), *(_sizes(model, tp, ep) if max(tp, ep) > 1 else ())]:
        for shards in (degree or 1, 1):
            padded = -(-numel // shards) * shards
            if size in (numel, padded):
                yield Meaning(f"{name} of {model.name} ({numel:,} elements)", name, model.name, degree)
    width = model.hidden
    if size % width == 0 and 0 < size // width - model.vocab <= ADDED_TOKENS:
        rows = size // width
        yield Meaning(
            f"embedding or head of {model.name} with {rows:,} rows, {rows - model.vocab} more than its "
            f"vocabulary of {model.vocab:,}",
            "embedding or head",
            model.name,
            degree,
        )


@cache
def _sizes(model: ModelSpec, tp: int = 1, ep: int = 1) -> tuple[tuple[int, str], ...]:
    """Elements of every unit and tensor, on one rank of tp and ep, with what it is called, larger ones
    first."""
    table = parameter_table(model)
    found: dict[int, list[str]] = {}
    split = " and ".join(f"{axis} {degree}" for axis, degree in (("tp", tp), ("ep", ep)) if degree > 1)
    of = f" on a rank of {split}" if split else ""

    def held(tensor: Tensor) -> int:
        parts = (ep if "ep" in tensor.splits else 1) * (tp if "tp" in tensor.splits else 1)
        return tensor.numel // parts

    for unit in table.units:
        name = "a block" if unit.kind == BLOCK else f"the unit of the {unit.kind}"
        found.setdefault(sum(map(held, unit.tensors)), []).append(name + of)
    for tensor in table.tensors():
        if held(tensor) < 4096:
            continue
        role = {"embedding": "embedding", "head": "head"}.get(tensor.role, tensor.name.split(".")[-2])
        if tensor.role == "expert":
            role = tensor.name.rpartition(".")[2] + (" of its experts" if ep > 1 else " of all experts")
        found.setdefault(held(tensor), []).append(role + of)
    if not split:
        found.setdefault(table.parameters, []).append("the whole model")
    return tuple(
        (numel, " or ".join(dict.fromkeys(names))) for numel, names in sorted(found.items(), reverse=True)
    )


def _of_layout(evidence: Evidence, model: ModelSpec, size: int) -> Meaning | None:
    """Activations of a plan's layout with this many elements."""
    for _, plan in evidence.plans:
        tokens = plan.layout.micro_batch * plan.job.seq // plan.layout.cp
        for name, numel in {
            "the residual stream of a microbatch": tokens * model.hidden,
            "its part on a rank of tp": tokens * model.hidden // plan.layout.tp,
            "the logits of a microbatch": tokens * model.vocab,
        }.items():
            if size == numel:
                return Meaning(f"{name} ({numel:,} elements)", name, model.name)
    return None


@cache
def _preset_ends() -> tuple[tuple[int, str, int, int], ...]:
    """Elements of the embedding of every model shipped, with its name, vocabulary and width."""
    specs = [preset(name) for name in preset_names()]
    return tuple((s.vocab * s.hidden, s.name, s.vocab, s.hidden) for s in specs)


def _of_presets(size: int, degree: int | None) -> Meaning | None:
    if size < LEAST_EMBEDDING:
        return None
    alike = [(name, vocab, width) for numel, name, vocab, width in _preset_ends() if numel == size]
    if not alike:
        return None
    names = ", ".join(dict.fromkeys(name for name, _, _ in alike))
    _, vocab, width = alike[0]
    return Meaning(
        f"{vocab:,} x {width:,}: the embedding or the head of {names}", "embedding or head", names, degree
    )


def _of_vocabulary(size: int, degree: int | None) -> Meaning | None:
    """A known vocabulary with some tokens added, times a known width."""
    vocabularies = sorted({vocab for _, _, vocab, _ in _preset_ends()})
    for width in KNOWN_WIDTHS:
        rows = size // width
        if size % width:
            continue
        base = [v for v in vocabularies if 0 <= rows - v <= ADDED_TOKENS and v > 10_000]
        if base:
            extra = f", that is {rows - base[-1]} tokens more than {base[-1]:,}" if rows > base[-1] else ""
            return Meaning(
                f"{rows:,} x {width:,}: an embedding or head with a vocabulary of {rows:,}{extra}",
                "embedding or head",
                "",
                degree,
            )
    return None
