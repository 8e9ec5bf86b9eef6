"""Tables of nccl-tests and lists of pairs: what contradicts itself, what is slow, and who is.

A table is held against its own definition first (measure/table_checks.py): what rows say that contradict it
is not used. The others are compared with their neighbours in size and with what the devices' links give.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwright.cluster import Device, device
from shardwright.doctor.evidence import Evidence
from shardwright.doctor.finding import Finding, Source
from shardwright.doctor.links import comparison_findings
from shardwright.doctor.nic_share import nic_findings
from shardwright.doctor.pairs import locate
from shardwright.errors import ClusterError
from shardwright.measure.expected import Comparison, against_expected
from shardwright.measure.judgement import Fault, Judgement
from shardwright.measure.nccl_table import Row
from shardwright.measure.pair_speeds import pair_speeds
from shardwright.measure.pair_table import PairList
from shardwright.measure.size_fit import SizeFit, size_fit
from shardwright.measure.table_checks import judge, plateau
from shardwright.measure.table_curves import tables_cluster
from shardwright.measure.table_shape import drop, holes
from shardwright.units import KiB, format_bandwidth, format_bytes, format_time

IMPOSSIBLY_SLOW = 0.1
"""Share of what the hardware gives below which a figure is no slow link but something else."""

NETWORK_IMPOSSIBLY_SLOW = 0.01
"""The same between nodes, which may have one NIC for all devices, and a slow one."""

CHUNK = 128 * KiB
"""What NCCL passes on at a time over the network. Source: NVIDIA/nccl#2409, chunk of 128 KiB a step."""

BRIDGED = 2.0
"""Times the bandwidth of PCIe above which two cards are joined by an NVLink bridge."""

PEERS_SLOWER = 1.2
"""Times that a run through host memory is faster before peer-to-peer is called slower."""

CAUSE_OF_FAULT = {"wrong_results": "wrong_results", "wrong_unit": "table_wrong_unit"}

Figures = tuple[float, float]


def bandwidth_findings(evidence: Evidence) -> list[Finding]:
    """What tables and lists of pairs say."""
    found: list[Finding] = []
    kind = _given_device(evidence)
    judged = [judge(table) for table in evidence.tables]
    for table in judged:
        found += _of_table(table, kind)
    found += _without_peers(judged)
    for pairs in evidence.pair_lists:
        found += _of_pairs(pairs)
    return found


def _given_device(evidence: Evidence) -> Device | None:
    setting = evidence.setting
    if setting is None or not setting.device:
        return None
    try:
        return device(setting.device, fitted=True)
    except ClusterError:
        return None  # a name from a configuration that is none of ours


def _of_table(found: Judgement, kind: Device | None) -> Iterator[Finding]:
    yield from _faults(found)
    yield from _accepted(found)
    if found.ranks == 1 or not found.rows:
        return
    slow = [*_holes(found), *_drops(found)]
    yield from slow
    compared = [] if slow else _compared(found, kind)
    cards = [] if slow else nic_findings(found)
    if cards:  # what the text says of the NICs is nearer than what is usual
        compared = [each for each in compared if each.level == "node"]
    yield from cards
    yield from _against_hardware(found, compared)
    if not found.faults and not slow and not compared and not cards:
        yield _read(found)


def _source(found: Judgement, row: Row) -> Source:
    return Source(found.table.name, row.line, row.text)


def _sources(found: Judgement, lines: Sequence[int]) -> tuple[Source, ...]:
    return tuple(_source(found, row) for row in found.table.rows if row.line in lines)


def _title(found: Judgement) -> str:
    """What was measured: ``all_gather of 32 ranks``."""
    name = found.collective or "a collective"
    return f"{name} of {found.ranks} ranks" if found.ranks else name


# The table itself


def _faults(found: Judgement) -> Iterator[Finding]:
    """Rows that contradict their definition, by what is wrong with them."""
    by_cause: dict[str, list[Fault]] = {}
    for fault in found.faults:
        by_cause.setdefault(CAUSE_OF_FAULT.get(fault.what, "table_contradicts_itself"), []).append(fault)
    for cause, faults in by_cause.items():
        lines = sorted({fault.line for fault in faults})
        more = f"; {len(lines)} rows in all" if len(lines) > 1 else ""
        yield Finding(
            cause,
            "certain",
            f"line {faults[0].line}: {faults[0].text}" + more,
            evidence=_sources(found, lines),
            numbers={"lines": lines, "faults": sorted({fault.what for fault in faults})},
        )


def _accepted(found: Judgement) -> Iterator[Finding]:
    """What looks like a fault and is none."""
    for remark in found.remarks:
        cause = {"old_algbw": "old_algbw", "single_rank": "single_rank_table"}.get(remark.what)
        if cause is not None:
            first = found.table.rows[:1]
            yield Finding(cause, "certain", remark.text, evidence=tuple(_source(found, row) for row in first))


def _read(found: Judgement) -> Finding:
    """What a table without fault says, where nothing is known of its links."""
    best = plateau(found.rows)
    fit = _fit(found)
    shape = ""
    if fit is not None and fit.bandwidth < float("inf"):
        shape = f", half of it from {format_bytes(round(fit.half_size))}, {format_time(fit.launch)} a launch"
    notes = [
        remark.text
        for remark in found.remarks
        if remark.what in ("rounded", "thinned", "not_checked", "ranks")
    ]
    largest = max(row.size for row in found.rows)
    return Finding(
        "table_read",
        "certain",
        f"{_title(found)}: {format_bandwidth(best)} bus bandwidth at up to {format_bytes(largest)}{shape}"
        + "".join(f"; {note}" for note in dict.fromkeys(notes[:3])),
        evidence=tuple(_source(found, row) for row in found.rows[-1:]),
        collect=() if found.table.around.device else ("the kind of the devices: --given device=NAME",),
        numbers={
            "bus_bandwidth": best,
            "ranks": found.ranks,
            "collective": found.collective,
            "factor": found.factor,
        },
    )


def _fit(found: Judgement) -> SizeFit | None:
    points = [(row.size, row.measured.time.value) for row in found.rows if row.measured and row.size]
    return size_fit(*zip(*points, strict=True)) if len(points) > 1 else None


# Against neighbours in size


def _holes(found: Judgement) -> Iterator[Finding]:
    for hole in holes(found.rows):
        worst = hole.worst.measured
        if worst is None:
            continue
        behind = (
            ""
            if hole.after is None or hole.after.measured is None
            else (f", {format_bytes(hole.after.size)} take {format_time(hole.after.measured.time.value)}")
        )
        sizes = [row for row in found.rows if hole.first.size <= row.size <= hole.last.size]
        yield Finding(
            "bandwidth_hole",
            "likely",
            f"{_title(found)}: from {format_bytes(hole.first.size)} to {format_bytes(hole.last.size)} one "
            f"takes {format_time(worst.time.value)}{behind}",
            evidence=tuple(_source(found, row) for row in (*sizes, *filter(None, [hole.after]))),
            numbers={"first": hole.first.size, "last": hole.last.size, "time": worst.time.value},
        )


def _drops(found: Judgement) -> Iterator[Finding]:
    fallen = drop(found.rows)
    if fallen is None or fallen.best.measured is None or fallen.last.measured is None:
        return
    yield Finding(
        "bandwidth_drop",
        "likely",
        f"{_title(found)}: {format_bandwidth(fallen.best.measured.busbw.value)} at "
        f"{format_bytes(fallen.best.size)}, but {format_bandwidth(fallen.last.measured.busbw.value)} at "
        f"{format_bytes(fallen.last.size)}",
        evidence=(_source(found, fallen.best), _source(found, fallen.first), _source(found, fallen.last)),
        numbers={"from": fallen.first.size, "best": fallen.best.measured.busbw.value},
    )


# Against the hardware


def _compared(found: Judgement, kind: Device | None) -> list[Comparison]:
    """The table against what its devices' links give; nothing where the devices are not known."""
    if kind is None and not found.table.around.device:
        return []
    try:
        cluster = tables_cluster([found.table], kind)
    except ClusterError:
        return []  # ranks that are not known
    if any(each.startswith("device=") for each in cluster.assumed):
        return []
    return against_expected(cluster, pair_speeds(cluster))


def _against_hardware(found: Judgement, compared: Sequence[Comparison]) -> Iterator[Finding]:
    sources = tuple(_source(found, row) for row in found.rows[-1:])
    for each in compared:
        if each.ratio < (IMPOSSIBLY_SLOW if each.level == "node" else NETWORK_IMPOSSIBLY_SLOW):
            yield Finding(
                "below_physics",
                "likely",
                f"{_title(found)}: {format_bandwidth(each.measured)}, where these devices give about "
                f"{format_bandwidth(each.expected)}, {1 / each.ratio:.0f} times as much: no such "
                "hardware is that slow",
                evidence=sources,
                numbers={"measured": each.measured, "expected": each.expected, "ratio": each.ratio},
            )
        elif found.ranks == 2 and each.level == "node" and each.ratio > BRIDGED:
            yield Finding(
                "nvlink_bridge",
                "certain",
                f"{_title(found)}: {format_bandwidth(each.measured)} is what an NVLink bridge of two cards "
                f"carries; PCIe gives {format_bandwidth(each.expected)}, SXM boards more than either",
                evidence=sources,
                numbers={"measured": each.measured, "pcie": each.expected},
            )
        else:
            for finding in comparison_findings([each]):
                yield replace(finding, evidence=sources, actions=(*_one_nic(found, each), *_steps(each)))


def _one_nic(found: Judgement, compared: Comparison) -> Iterator[str]:
    """Where the environment names a single NIC."""
    named = found.table.around.settings.get("NCCL_IB_HCA", "")
    if named and "," not in named and not named.startswith("^") and compared.level != "node":
        yield (f"NCCL_IB_HCA={named} lets NCCL use one NIC alone: leave it out, or name all of the job's")


def _steps(compared: Comparison) -> Iterator[str]:
    """Where messages of a fixed size each wait for the one before."""
    if compared.level != "node" and compared.ratio < 0.5:
        yield (
            f"if single RDMA writes (ib_write_bw, perftest) reach the line rate, NCCL waits between its "
            f"steps: {CHUNK // KiB} KiB every {format_time(CHUNK / compared.measured)} give "
            f"{format_bandwidth(compared.measured)}; try NCCL_P2P_NET_CHUNKSIZE and "
            "NCCL_BUFFSIZE four times as large"
        )


def _without_peers(tables: Sequence[Judgement]) -> Iterator[Finding]:
    """Runs of one collective with and without peer-to-peer, where the latter is the faster."""
    off = [found for found in tables if found.table.around.settings.get("NCCL_P2P_DISABLE") == "1"]
    for without in off:
        for found in tables:
            alike = (found.collective, found.ranks) == (without.collective, without.ranks)
            if found in off or not alike or not found.rows or not without.rows:
                continue
            direct, around = plateau(found.rows), plateau(without.rows)
            if around > PEERS_SLOWER * direct:
                yield Finding(
                    "p2p_slower",
                    "cannot_tell",
                    f"{_title(found)}: {format_bandwidth(direct)} with peer-to-peer, "
                    f"{format_bandwidth(around)} with NCCL_P2P_DISABLE=1",
                    evidence=(_source(found, found.rows[-1]), _source(without, without.rows[-1])),
                    numbers={"with": direct, "without": around},
                )


# Lists of pairs


def _of_pairs(pairs: PairList) -> Iterator[Finding]:
    """Who of the named is slow, who is not, and what to measure next."""
    values = pairs.values
    found = locate(values)
    slow = {pair for pair, value in values.items() if value < 0.75 * found.healthy}

    def lines(chosen: set[tuple[str, str]]) -> tuple[Source, ...]:
        return tuple(Source(pairs.name, e.line, e.text) for e in pairs.entries if e.pair in chosen)

    cleared = f"; cleared: {', '.join(found.cleared)}" if found.cleared else ""
    for name in found.suspects:
        mine = {pair for pair in slow if name in pair}
        partners = ", ".join(sorted({one for pair in mine for one in pair} - {name}))
        yield Finding(
            "slow_node",
            "certain" if len(mine) > 1 else "likely",
            f"{name}: {min(values[pair] for pair in mine):g} with {partners}, where others have "
            f"{found.healthy:g}{cleared}",
            evidence=lines(mine),
            numbers={"suspects": [name], "cleared": list(found.cleared), "healthy": found.healthy},
        )
    if found.undecided:
        ends = " or ".join(dict.fromkeys(name for pair in found.undecided for name in pair))
        asked = [f"measure {one} with {two}" for one, two in found.next]
        yield Finding(
            "slow_ends_unknown",
            "cannot_tell",
            f"{ends} is slow: {min(values[pair] for pair in found.undecided):g}, where others have "
            f"{found.healthy:g}; no pair clears either",
            evidence=lines(set(found.undecided)),
            collect=tuple(asked),
            numbers={
                "undecided": [list(pair) for pair in found.undecided],
                "next": [list(pair) for pair in found.next],
            },
        )
    for pair in found.links:
        yield Finding(
            "slow_pair",
            "likely",
            f"{pair[0]} to {pair[1]}: {values[pair]:g}, where others have {found.healthy:g}, "
            "and both are fast with others",
            evidence=lines({pair}),
            numbers={"healthy": found.healthy},
        )
    if not slow:
        yield Finding(
            "table_read",
            "certain",
            f"{len(values)} pairs, all within 25 % of {found.healthy:g}",
            evidence=lines(set(list(values)[:1])),
        )
