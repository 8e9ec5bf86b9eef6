"""Reports that torch itself makes of a hang: desync, mismatch, monitored barrier, flight recorder
analyser."""

from collections.abc import Iterator

from shardwright.doctor.evidence import Desync, Evidence, Failure, Mismatch, Operation
from shardwright.doctor.finding import Finding
from shardwright.doctor.fingerprints import fingerprint_findings
from shardwright.doctor.flight import caller
from shardwright.doctor.rank_lists import ranks_text
from shardwright.doctor.sizes import meaning_of


def report_findings(evidence: Evidence) -> Iterator[Finding]:
    """What the reports say, as findings."""
    for mismatch in evidence.of(Mismatch):
        yield _mismatch(mismatch)
    yield from fingerprint_findings(evidence)
    yield from _desync(evidence)
    for report in evidence.of(Desync):
        if report.state == "missing":
            yield _missing(evidence, report)
        elif report.state.startswith("other_"):
            yield _culprit(report)
    for failure in evidence.of(Failure):
        if failure.what == "monitored_barrier" and failure.ranks:
            yield Finding(
                "skipped_collective",
                "certain",
                f"{ranks_text(set(failure.ranks))} did not reach the monitored barrier in time, all "
                "others did",
                failure.ranks,
                (failure.source,),
            )


def _mismatch(mismatch: Mismatch) -> Finding:
    one, other = mismatch.ranks
    sides: tuple[str, ...]
    shapes = [list(shape) if shape is not None else None for shape in mismatch.shapes]
    if mismatch.operations[0] != mismatch.operations[1]:
        cause, sides = "operation_mismatch", mismatch.operations
    elif mismatch.shapes[0] is not None and mismatch.shapes[1] is not None and shapes[0] != shapes[1]:
        cause, sides = (
            "size_mismatch",
            tuple(f"{mismatch.operations[0]} of shape {shape}" for shape in shapes),
        )
    elif mismatch.dtypes[0] != mismatch.dtypes[1] and all(mismatch.dtypes):
        cause, sides = "dtype_mismatch", mismatch.dtypes
    else:
        cause = "order_mismatch"
        sides = tuple(
            f"{operation} number {seq}"
            for operation, seq in zip(mismatch.operations, mismatch.seqs, strict=True)
        )
    return Finding(
        cause,
        "certain",
        f"rank {one} runs {sides[0]} while rank {other} runs {sides[1]}",
        tuple(sorted({one, other})),
        (mismatch.source,),
        numbers={"operations": list(mismatch.operations), "shapes": shapes, "sequences": list(mismatch.seqs)},
    )


def _missing(evidence: Evidence, report: Desync) -> Finding:
    size = len(report.expected)
    inside = sorted(set(report.expected) - set(report.ranks))
    guard = size > 2 and len(inside) == 1
    operation = Operation(report.operation, report.size, report.size)
    meaning = meaning_of(evidence, operation)
    frame = caller(report.frames)
    summary = (
        f"{ranks_text(set(report.ranks))} of {size or 'unknown many'} did not join {operation.text} "
        f"#{report.seq}" + (f" ({meaning.text})" if meaning else "")
    )
    if inside:
        summary += f"; {ranks_text(set(inside))} wait in it"
    return Finding(
        "rank_guard" if guard else "skipped_collective",
        "certain",
        summary + (f", called at {frame}" if frame else ""),
        tuple(inside) if guard else report.ranks,
        (report.source, *(report.source._replace(text=text, line=None) for text in report.frames[-3:])),
        (f"see why {ranks_text(set(report.ranks))} do not come to {frame}",) if frame else (),
        numbers={
            "sequence": report.seq,
            "operation": operation.short,
            "world_size": size or None,
            "python_line": frame,
            "absent_ranks": list(report.ranks),
            "waiting_ranks": inside,
        },
    )


def _culprit(report: Desync) -> Finding:
    cause = {"other_operation": "operation_mismatch", "other_dtype": "dtype_mismatch"}.get(
        report.state, "size_mismatch"
    )
    return Finding(
        cause,
        "likely",
        f"the analyser finds {ranks_text(set(report.ranks))} to differ from the others in call #{report.seq} "
        f"({report.operation})",
        report.expected if len(report.expected) == 2 else report.ranks,  # of two neither is the odd one
        (report.source,),
        numbers={"sequence": report.seq, "python_line": caller(report.frames)},
    )


def _desync(evidence: Evidence) -> Iterator[Finding]:
    """Of lagging ranks those that lag most: not finished what others have; else not joined; else never
    joined."""
    reports = evidence.of(Desync)
    never = [r for r in reports if r.state == "never_joined"]
    unfinished = [r for r in reports if r.state == "not_finished"]
    unjoined = [r for r in reports if r.state == "not_joined"]
    for report in never:
        yield Finding(
            "skipped_collective",
            "certain",
            f"{ranks_text(set(report.ranks))} never joined any collective: they died, or never came that far",
            report.ranks,
            (report.source,),
        )
    behind = [r for r in unjoined if any((r.seq or 0) <= (each.seq or 0) for each in unfinished)]
    if behind:  # others are in the very call that these did not join, or in a later one
        lagging = tuple(sorted({rank for report in behind for rank in report.ranks}))
        waiting = {rank for report in unfinished for rank in report.ranks}
        yield Finding(
            "skipped_collective",
            "certain",
            f"{ranks_text(set(lagging))} finished the collective before #{behind[0].seq} and did not join "
            f"it, while {ranks_text(waiting)} wait in #{unfinished[0].seq}",
            lagging,
            tuple(report.source for report in [*behind, *unfinished]),
            numbers={"sequence": behind[0].seq},
        )
    elif unfinished and unjoined:
        first = unfinished[0]
        others = {rank for report in unjoined for rank in report.ranks}
        yield Finding(
            "lagging_rank",
            "likely",
            f"{ranks_text(set(first.ranks))} joined collective #{first.seq} and did not finish it, while "
            f"{ranks_text(others)} finished it and did not join #{unjoined[0].seq}",
            first.ranks,
            tuple(report.source for report in [*unfinished, *unjoined]),
            numbers={"sequence": first.seq},
        )
    elif unjoined:
        lagging = tuple(sorted({rank for report in unjoined for rank in report.ranks}))
        yield Finding(
            "skipped_collective",
            "certain",
            f"{ranks_text(set(lagging))} finished the collective before #{unjoined[0].seq} and did "
            "not join it",
            lagging,
            tuple(report.source for report in unjoined),
            numbers={"sequence": unjoined[0].seq},
        )
    elif unfinished:
        yield from _unfinished(evidence, unfinished)


def _unfinished(evidence: Evidence, unfinished: list[Desync]) -> Iterator[Finding]:
    report = unfinished[-1]
    worlds = evidence.worlds
    everyone = set(report.ranks) == set(range(len(report.ranks))) and (
        not worlds or max(worlds) == len(report.ranks)
    )
    if everyone and len(report.ranks) > 1:
        operation = f" ({report.operation})" if report.operation else ""
        yield Finding(
            "network_stall",
            "likely",
            f"all {len(report.ranks)} ranks joined collective #{report.seq}{operation} and none "
            "finished it: no rank is "
            "missing, the transport is",
            (),
            tuple(each.source for each in unfinished),
            numbers={"sequence": report.seq},
        )
        return
    yield Finding(
        "lagging_rank",
        "likely",
        f"{ranks_text(set(report.ranks))} joined collective #{report.seq} and did not finish it, others have",
        report.ranks,
        tuple(each.source for each in unfinished),
        numbers={"sequence": report.seq},
    )
