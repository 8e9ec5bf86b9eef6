"""Tables of nccl-tests read and held against their own definitions."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import EvidenceError
from shardwright.measure.nccl_tests import read_tables
from shardwright.measure.pair_table import is_pair_list, read_pair_list
from shardwright.measure.table_checks import judge
from shardwright.measure.table_curves import curves_of, tables_cluster
from shardwright.plan.collectives import collective_time
from shardwright.plan.placement import Placement

DATA = Path(__file__).parent / "data" / "nccl_tests"

WHAT_IS_IN_THEM = {  # collective, ranks, rows, faults of their lines, remarks
    "n02_32xgcd_allgather_hole_and_allreduce.txt": [
        ("all_gather", 32, 11, {}, {"thinned"}),
        ("all_reduce", 32, 6, {}, set()),
    ],
    "n03_2x8xmi300x_wrong_na.txt": [("all_reduce", 16, 11, {}, {"not_checked"})],
    "n05_2xh100pcie_nvlink_bridge_116.txt": [("all_reduce", 2, 2, {}, set())],
    "n07_2xgb10_allgather_busid_long_form.txt": [("all_gather", 2, 3, {}, set())],
    "n09_2x2080ti_old_no_redop_no_root.txt": [("all_gather", 2, 5, {}, {"old_algbw"})],
    "n10_single_rank_meaningless.txt": [("all_reduce", 1, 3, {}, {"single_rank"})],
}

HEADER = """# all_reduce_perf -b 1M -e 1G -f 2 -g 8
# size count type redop root time algbw busbw #wrong time algbw busbw #wrong
# (B) (elements) (us) (GB/s) (GB/s) (us) (GB/s) (GB/s)
"""


def tables(name):
    return read_tables((DATA / name).read_text(), name)


@pytest.mark.parametrize("name", WHAT_IS_IN_THEM)
def test_every_artefact_is_read_as_a_person_reads_it(name):
    found = [judge(table) for table in tables(name)]
    seen = [
        (
            each.collective,
            each.ranks,
            len(each.table.rows),
            {fault.line: fault.what for fault in each.faults},
            {remark.what for remark in each.remarks},
        )
        for each in found
    ]
    assert seen == WHAT_IS_IN_THEM[name]


def test_made_up_tables_are_told_apart_row_by_row():
    found = [judge(table) for table in tables("n11_bad_tables_must_be_rejected.txt")]
    faults = {fault.line: fault.what for each in found for fault in each.faults}
    assert faults == {3: "impossible_factor", 7: "wrong_unit", 9: "size_time"}
    assert {remark.line for each in found for remark in each.remarks if remark.what == "rounded"} == {5}


def row(size, micros, ranks, busbw=None, algbw=None):
    rate = size / micros / 1e3 if algbw is None else algbw
    bus = rate * 2 * (ranks - 1) / ranks if busbw is None else busbw
    half = f"{micros:8.1f} {rate:7.2f} {bus:7.2f}      0"
    return f"{size:12d} {size // 4:13d}     float     sum      -1 {half} {half}\n"


sizes = st.lists(st.sampled_from([2**n for n in range(20, 31)]), min_size=3, max_size=8, unique=True).map(
    sorted
)


@settings(deadline=None)
@given(sizes, st.sampled_from([2, 4, 8]), st.floats(5, 400))
def test_a_true_table_is_accepted(points, ranks, rate):
    text = HEADER.replace("-g 8", f"-g {ranks}") + "".join(
        row(size, round(20 + size / rate / 1e3, 1), ranks) for size in points
    )
    (found,) = [judge(table) for table in read_tables(text, "t.txt")]
    assert (found.collective, found.ranks, found.faults) == ("all_reduce", ranks, ())
    cluster = tables_cluster([found.table])
    (curve,) = curves_of(found.table, cluster)
    assert curve.sizes == tuple(points)
    assert curve.ranks == ranks


@settings(deadline=None)
@given(sizes, st.data())
def test_a_cell_that_is_wrong_by_more_than_two_percent_is_named_with_its_line(points, data):
    at = data.draw(st.integers(0, len(points) - 1))
    factor = data.draw(st.sampled_from([0.9, 0.97, 1.03, 1.2]))
    column = data.draw(st.sampled_from(["algbw", "busbw"]))
    lines = []
    for number, size in enumerate(points):
        micros = round(20 + size / 200 / 1e3, 1)
        rate = size / micros / 1e3
        changed = {column: factor * rate * (1.75 if column == "busbw" else 1)} if number == at else {}
        lines.append(row(size, micros, 8, **changed))
    (found,) = [judge(table) for table in read_tables(HEADER + "".join(lines), "t.txt")]
    assert {fault.line for fault in found.faults} == {4 + at}


@pytest.mark.parametrize(
    ("line", "column"),
    [
        ("1048576 262144 float sum -1 20.0 52.43 91.75", 47),
        ("1048576 262144 float sum -1 20.0 52.43 91.75 0 20.0 52.43 91.75 0 7", 68),
        ("1048576 262144 float sum -1 2o.0 52.43 91.75 0 20.0 52.43 91.75 0", 29),
        ("1048576 262144 float sum first 20.0 52.43 91.75 0 20.0 52.43 91.75 0", 26),
    ],
)
def test_a_row_that_fits_no_header_is_refused_with_file_line_and_column(line, column):
    with pytest.raises(EvidenceError, match=r"t\.txt line 4, column \d+: "):
        read_tables(HEADER + line + "\n", "t.txt")


def test_prefixes_of_launchers_and_colours_change_nothing():
    plain = HEADER + row(2**20, 20.0, 8) + row(2**24, 160.0, 8)
    tagged = "".join(f"[1,0]<stdout>:\x1b[32m{line}\x1b[0m\r\n" for line in plain.splitlines())
    (one,), (two,) = read_tables(plain, "t.txt"), read_tables(tagged, "t.txt")
    assert [r._replace(text="") for r in one.rows] == [r._replace(text="") for r in two.rows]


def test_a_list_of_pairs_is_read_and_a_line_that_is_none_refused():
    text = (DATA / "n12_pairwise_map_slow_node.txt").read_text()
    assert is_pair_list(text)
    assert read_pair_list(text, "n12").values["n284", "n678"] == 49.28
    with pytest.raises(EvidenceError, match="n12 line 7, column 1: 'n1 n2 fast' is no pair"):
        read_pair_list(text.rstrip("\n") + "\nn1 n2 fast\n", "n12")
    assert not is_pair_list((DATA / "n05_2xh100pcie_nvlink_bridge_116.txt").read_text())


@pytest.mark.parametrize(
    ("lines", "count", "gigabits", "direct"),
    [
        (["# 12 nodes, one HDR NIC"], 1, 200, None),
        (["# 2 nodes x 8 H100, 8x400G RoCE"], 8, 400, None),
        (["# 2 nodes x 8 H100 80GB, 8 x 80 GB of memory"], None, None, None),
        (
            [
                "n0:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0",
                "n1:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0",
                "n0:1:2 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA",
                "  rate:         100 Gb/sec (4X EDR)",
            ],
            2,
            100,
            True,
        ),
        (["n0:1:2 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0"], None, None, False),
    ],
)
def test_what_a_text_says_of_its_network_cards(lines, count, gigabits, direct):
    (table,) = read_tables("\n".join(lines) + "\n" + HEADER + row(2**20, 20.0, 8), "t.txt")
    nics = table.around.nics
    assert (nics.count, nics.direct) == (count, direct)
    assert nics.rate == (None if gigabits is None else gigabits / 8 * 1e9)


CELLS = {"size": 0, "count": 1, "time": 5, "algbw": 6, "busbw": 7}


@settings(deadline=None)
@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv"]),
    st.sampled_from([2, 3, 8, 32]),
    st.sampled_from(list(CELLS)),
    st.sampled_from([0.5, 0.9, 1.03, 1.5]),
    st.integers(0, 4),
)
def test_one_changed_cell_of_any_column_and_collective_is_named_alone(program, ranks, column, by, at):
    split = program in ("all_gather", "reduce_scatter", "alltoall")
    factor = {"all_reduce": 2 * (ranks - 1) / ranks, "sendrecv": 1.0}.get(program, (ranks - 1) / ranks)
    redop = "sum" if "reduce" in program else "none"
    rows = []
    for power in range(22, 27):
        size = 2**power * (ranks if split else 1)
        micros = round(40 + size / 150e3, 1)
        rate = size / micros / 1e3
        cells = [
            size,
            2**power // 4,
            "float",
            redop,
            -1,
            f"{micros:.1f}",
            f"{rate:.2f}",
            f"{rate * factor:.2f}",
        ]
        rows.append([*cells, 0, *cells[5:], 0])
    head = f"# mpirun -np {ranks} {program}_perf -g 1\n" + HEADER.partition("\n")[2]
    clean = head + "".join(" ".join(map(str, cells)) + "\n" for cells in rows)
    assert judge(read_tables(clean, "t.txt")[0]).faults == ()
    place = CELLS[column]
    rows[at][place] = f"{float(rows[at][place]) * by:.{0 if place < 2 else 2}f}"
    changed = head + "".join(" ".join(map(str, cells)) + "\n" for cells in rows)
    assert {fault.line for fault in judge(read_tables(changed, "t.txt")[0]).faults} == {4 + at}


@pytest.mark.parametrize(
    ("name", "printed", "most"),
    [
        ("n03_2x8xmi300x_wrong_na.txt", 341.53 / 8, 50.0),  # eight NICs of 400 Gb/s a node
        ("n02_32xgcd_allgather_hole_and_allreduce.txt", 92.66 / 8, 12.5),  # four of 200 Gb/s for eight ranks
        ("n07_2xgb10_allgather_busid_long_form.txt", 22.14, 25.0),  # one of 200 Gb/s
    ],
)
def test_a_link_between_nodes_carries_no_more_than_its_network_card(name, printed, most):
    link = tables_cluster(tables(name)).domains[-1].link
    assert 0.99 * printed * 1e9 <= link.bandwidth <= most * 1e9


@pytest.mark.parametrize("bus", [60, 200, 480])
def test_formulas_give_the_time_of_the_largest_message_back(bus):
    times = {size: round(30 + 1.75 * size / bus / 1e3, 1) for size in (2**26, 2**28, 2**30)}
    text = HEADER.replace("-g 8", "-g 8   8x H100") + "".join(row(size, t, 8) for size, t in times.items())
    cluster = tables_cluster(read_tables(text, "t.txt")).model_copy(update={"curves": ()})
    route = Placement(np.array([8]), np.array([1])).route(cluster)
    assert collective_time("all_reduce", 2**30, 1, route) == pytest.approx(times[2**30] / 1e6, rel=0.03)
