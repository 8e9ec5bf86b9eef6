"""Calls that are not the same on all ranks of a group, and groups whose calls are made in different
orders."""

from shardwright.doctor.call_words import sources_of
from shardwright.doctor.finding import Finding
from shardwright.doctor.flight import caller
from shardwright.doctor.rank_lists import ranks_text
from shardwright.doctor.waiting import Difference, Wait


def parted_finding(parted: Difference) -> Finding:
    """Calls of the same number that are not the same call, by the recorders."""
    sides: dict[str, list[int]] = {}
    for rank, call in parted.calls.items():
        sides.setdefault(call.text, []).append(rank)
    text = "; ".join(
        f"{ranks_text(ranks)}: {side}" for side, ranks in sorted(sides.items(), key=lambda s: len(s[1]))
    )
    odd = tuple(sorted(parted.odd))
    standings = parted.group.standings
    usual = next((call for rank, call in parted.calls.items() if rank not in parted.odd), None)
    frames = [caller(standings[rank].frames.get(parted.seq, ())) for rank in [*odd, *parted.calls]]
    where = next((frame for frame in frames if frame), None)
    numbers = {
        "process_group": parted.group.name,
        "sequence": parted.seq,
        "operation": usual.short if usual else None,
        "calls": {str(rank): call.text for rank, call in parted.calls.items()},
    }
    sources = tuple(source for rank in [*odd, *parted.calls] for source in standings[rank].sources[:1])
    if parted.skipped and usual is not None:
        skipped = tuple(sorted(parted.skipped))
        return Finding(
            "skipped_collective",
            "certain",
            f"{ranks_text(skipped)} left out call #{parted.seq} of {parted.group.label}, "
            f"{usual.text}, and is one call ahead "
            f"from there on ({text})",
            skipped,
            sources,
            numbers=numbers,
        )
    lonely = len(odd) == 1 and len(parted.calls) > 2
    cause = (
        "rank_guard" if parted.what == "operation" and lonely and odd == (0,) else f"{parted.what}_mismatch"
    )
    return Finding(
        cause,
        "certain",
        f"call #{parted.seq} of {parted.group.label} is not the same on all ranks: {text}"
        + (f", at {where}" if where else ""),
        odd,
        sources,
        numbers=numbers,
    )


def crossed_finding(one: Wait, other: Wait) -> Finding:
    ranks = tuple(sorted({*one.absent, *other.absent}))
    return Finding(
        "order_mismatch",
        "certain",
        f"{ranks_text(set(one.inside))} are in call #{one.seq} of {one.group.label} and wait for "
        f"{ranks_text(set(one.absent))}, who are in call #{other.seq} of {other.group.label} and wait "
        "for the former: "
        "the two groups' collectives are called in different orders",
        ranks,
        (*sources_of(one), *sources_of(other)),
    )
