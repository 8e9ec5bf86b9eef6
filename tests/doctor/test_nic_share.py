"""Shares of network cards: what a table says of them, and what it leaves open."""

import pytest

from shardwright.doctor.nic_share import nic_findings
from shardwright.measure.nccl_tests import read_tables
from shardwright.measure.table_checks import judge

GDR = "n:1:2 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA\n"
HOST = GDR.replace("/GDRDMA", "")


def said(bus, cards, more=""):
    """Cause and certainty of an all-reduce of two nodes with eight devices each at ``bus`` GB/s."""
    algbw = bus / 1.875
    half = f"{2**32 / algbw / 1e3:.0f} {algbw:.2f} {bus:.2f} 0"
    text = f"# all_reduce_perf, 2 nodes x 8 ranks, {cards}\n{more}"
    header = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n"
    (table,) = read_tables(text + header + f"{2**32} {2**30} float sum -1 {half} {half}\n", "t.txt")
    return [(finding.cause, finding.certainty) for finding in nic_findings(judge(table))]


@pytest.mark.parametrize(
    ("bus", "cards", "more", "expected"),
    [
        (15.6, "one HDR NIC", HOST, [("cpu_attached_nic", "likely")]),
        (15.6, "one HDR NIC", "", [("cpu_attached_nic", "cannot_tell")]),
        (15.6, "one HDR NIC", GDR, []),
        (24.0, "one HDR NIC", GDR, [("links_healthy", "certain")]),
        (31.0, "one NDR NIC", HOST, [("cpu_attached_nic", "likely")]),
        (200.0, "8x400G RoCE", "", [("ecmp_concentration", "cannot_tell")]),
        (200.0, "8x400G InfiniBand", "", []),
        (376.0, "8x400G RoCE", "", [("links_healthy", "certain")]),
        (9.8, "4x200G RoCE", "# NCCL_IB_HCA=mlx5_0\n", []),
        (60.0, "", "", []),
    ],
)
def test_shares_of_cards(bus, cards, more, expected):
    assert said(bus, cards, more) == expected
