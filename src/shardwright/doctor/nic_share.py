"""Tables between nodes against the network cards that the text around them names: what share they carry."""

from shardwright.doctor.finding import Certainty, Finding, Source
from shardwright.measure.judgement import Judgement
from shardwright.measure.table_checks import plateau
from shardwright.units import format_bandwidth

RINGS = ("all_reduce", "all_gather", "reduce_scatter")
"""Collectives whose bus bandwidth is what a node's cards carry together, one direction."""

HEALTHY = 0.8
"""Share of the line rate that cards reach with GPUDirect: 24 of 25 GB/s of HDR, 46 to 49 of 50 of NDR.
Source: NVIDIA/nccl#412, NVIDIA/nccl-tests#267, #290."""

BY_CPU = (0.5, 0.75)
"""Shares that a card on the CPU reaches: 15 to 16 of 25 GB/s. Source: NVIDIA/nccl#412."""

CONCENTRATED = (0.4, 0.65)
"""Shares around one half. Source: NVIDIA/cluster-readiness-engine#287."""


def nic_findings(found: Judgement) -> list[Finding]:
    """What a table's share of its nodes' cards says; nothing unless their number and speed are stated.

    Trees may send less than a ring, so a share is at most what the cards carry; one NIC of several that
    NCCL_IB_HCA names, or fewer ranks in a node than NICs, is left to others.
    """
    nics, ceiling, nodes = found.table.around.nics, found.table.around.nics.ceiling, found.nodes or 1
    ranks, measured = found.ranks or 1, plateau(found.rows)
    if ceiling is None or nodes < 2 or found.collective not in RINGS or not measured:
        return []
    if ranks < nodes * (nics.count or 1) or "NCCL_IB_HCA" in found.table.around.settings:
        return []
    share = measured / ceiling
    cause, certainty = _cause(share, nics.count or 1, nics.direct, nics.ethernet)
    if cause is None:
        return []
    said = {True: ", GDRDMA", False: ", none of them with GDRDMA", None: ""}[nics.direct]
    one = format_bandwidth(ceiling / (nics.count or 1))
    return [
        Finding(
            cause,
            certainty,
            f"{found.collective} of {ranks} ranks on {nodes} nodes: {format_bandwidth(measured)} bus "
            f"bandwidth is {share:.0%} of {format_bandwidth(ceiling)}, {nics.count} x {one} of a node{said}",
            evidence=tuple(Source(found.table.name, row.line, row.text) for row in found.rows[-1:]),
            numbers={"share": share, "nics": nics.count, "measured": measured, "ceiling": ceiling},
        )
    ]


def _cause(share: float, count: int, direct: bool | None, ethernet: bool) -> tuple[str | None, Certainty]:
    """What the share alone can mean; None: nothing in particular."""
    if HEALTHY <= share <= 1.05:
        return "links_healthy", "certain"
    if count == 1 and BY_CPU[0] <= share <= BY_CPU[1] and not direct:
        return "cpu_attached_nic", "likely" if direct is False else "cannot_tell"
    if count > 1 and ethernet and CONCENTRATED[0] <= share <= CONCENTRATED[1]:
        return "ecmp_concentration", "cannot_tell"
    return None, "cannot_tell"
