"""Reports of ``map``: faults are marked where they are, at both widths, and a picture shows them too."""

import io
import re
import sys
import time
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from test_terminal import text_of, words_of
from typer.testing import CliRunner

from shardwright.bandwidth_map import Curve, Nic, Unmeasured
from shardwright.cli import app
from shardwright.cluster import cluster_of
from shardwright.doctor.links import cluster_findings
from shardwright.measure.document import map_document
from shardwright.report.heat_cells import cells_of
from shardwright.report.heat_colours import colour_at
from shardwright.report.map import curve_line, map_report
from shardwright.report.map_picture import MARK, map_picture, write_map_picture

sys.path.append(str(Path(__file__).parents[1] / "doctor"))
from made_maps import between, made

SVG = "{http://www.w3.org/2000/svg}"
MiB = 2**20

PCIE = tuple(
    tuple(
        "X" if a == b else "NV12" if a // 2 == b // 2 else "NODE" if a // 4 == b // 4 else "SYS"
        for b in range(8)
    )
    for a in range(8)
)
"""8 A100 on PCIe with 4 NVLink pairs, as NVIDIA/nccl-tests issue 178."""


def document(cluster, refused=()):
    return map_document(cluster, [finding.document() for finding in cluster_findings(cluster)], refused)


def rows_of(text):
    """Cells of the heat map by row."""
    lines = [line for line in text.splitlines() if re.match(r" {0,3}\d+ +[-\d]", line)]
    return {int(line.split()[0]): re.findall(r"[-?]|[\d.]+!?", line)[1:] for line in lines}


def curve(collective, ranks, rate):
    sizes = tuple(MiB * 4**power for power in range(6))
    times = tuple(size / rate for size in sizes)
    return Curve(
        collective=collective, members=(ranks,), sizes=sizes, times=times, spread=(0.05,) * 5 + (0.12,)
    )


def pcie_box():
    cluster = made(1, device="a100-pcie", fault=lambda a, b: 1.0 if a // 2 == b // 2 else 0.05)
    nics = (
        Nic(name="NIC0", device="mlx5_0", classes=("PIX", "NODE", "PIX", "NODE", "SYS", "SYS", "SYS", "SYS")),
        Nic(name="NIC1", device="mlx5_1", classes=("SYS", "SYS", "SYS", "SYS", "PXB", "NODE", "PXB", "NODE")),
    )
    missed = (
        Unmeasured(what="all_to_all of 8 ranks", reason="the time was up"),
        Unmeasured(what="rank 5", ranks=(5,), reason="stopped answering", failed=True),
    )
    record = cluster.map.model_copy(
        update={"classes": PCIE, "nics": nics, "numa": ("0",) * 4 + ("1",) * 4, "unmeasured": missed}
    )
    return cluster.model_copy(update={"map": record})


@pytest.mark.parametrize("width", [80, 118])
def test_a_slow_pair_is_marked_and_no_other(width):
    made_map = made(2, fault=lambda a, b: 0.5 if {a, b} == {2, 5} else 1)
    text = text_of(map_report(document(made_map)), width)
    rows = rows_of(text)
    assert list(rows) == list(range(16))
    assert {
        row: [i for i, cell in enumerate(cells) if "!" in cell]
        for row, cells in rows.items()
        if any("!" in c for c in cells)
    } == {2: [5], 5: [2]}
    assert all(rows[rank][rank] == "-" for rank in rows)
    figures = width == 118
    assert (int(rows[0][1]) > 300) == figures  # GB/s, or tenths
    assert "rank 2 to rank 5 inside node 0" in words_of(text)


@pytest.mark.parametrize("width", [80, 118])
def test_many_ranks_are_shown_as_nodes(width):
    made_map = made(8, fault=between(3), rails_only=True)
    text = text_of(map_report(document(made_map)), width)
    rows = rows_of(text)
    assert list(rows) == list(range(8))
    assert [i for i, cell in enumerate(rows[0]) if "!" in cell] == [3]
    assert [i for i, cell in enumerate(rows[3]) if "!" in cell] == [0, 1, 2, 4, 5, 6, 7]
    assert "node 3 to other nodes" in words_of(text)


def test_512_ranks_are_reported_in_a_second_and_fit():
    said = document(made(64, rails_only=True, fault=between(40)))
    start = time.perf_counter()
    text = text_of(map_report(said), 80)
    assert time.perf_counter() - start < 1
    assert "each block of 3 nodes" in text
    assert "40" not in rows_of(text)  # rows begin with every third node: 39 holds 40
    assert all("!" in cell for i, cell in enumerate(rows_of(text)[39]) if i != 13)


def test_everything_that_is_known_of_a_box_is_said():
    box = pcie_box()
    curves = (curve("all_reduce", 8, 20e9), curve("send", 2, 200e9))
    said = words_of(text_of(map_report(document(box.model_copy(update={"curves": curves}))), 118))
    assert "8 ranks, 1 x 8 a100-pcie-80gb made, 2026-11-30" in said
    assert "1 NV12 X NODE NODE SYS SYS SYS SYS" in said
    assert "2 0,1 2,3 4,5 6,7" in said
    assert "at full speed tp is at most 2" in said
    assert "0 PIX mlx5_0 - 0" in said
    assert "4 PXB mlx5_1 - 1" in said
    assert "devices 1,3,5,7 have no NIC behind their own PCIe switch" in said
    assert "PXN" in said
    assert "measured: all_reduce, send" in said
    assert "256 MiB 1 GiB spread" in said
    assert re.search(r"all_reduce 8 node \S+ 35\.0 35\.0 35\.0 35\.0 35\.0 12%", said)  # 20 x 2 x 7/8
    assert "FAILED rank 5: stopped answering all_to_all of 8 ranks: the time was up" in said
    assert "hang: rank gone (certain)" in said


def test_a_device_whose_nics_are_not_known_is_not_said_to_have_none():
    box = pcie_box()
    nics = tuple(nic.model_copy(update={"classes": (*nic.classes[:7], "-")}) for nic in box.map.nics)
    unknown = box.model_copy(update={"map": box.map.model_copy(update={"nics": nics})})
    said = words_of(text_of(map_report(document(unknown)), 118))
    assert "7 not known - 1" in said
    assert "devices 1,3,5 have no NIC" in said


def test_verdicts_and_their_absence():
    slow = text_of(map_report(document(made(1, fault=lambda a, b: 0.45))), 118)
    assert re.search(r"pairs \(node\) +large +1\d\d\.\d GB/s +367\.0 GB/s +4\d% +below half", slow)
    healthy = text_of(map_report(document(made(1))), 118)
    assert "slow: links healthy (certain)" in healthy
    assert "of CPU ranks (gloo) nothing is expected" in text_of(map_report(document(made(1, 4, "cpu"))), 118)


def test_what_is_neither_measured_nor_read_is_called_a_specification():
    said = text_of(
        map_report(document(cluster_of("h100", 16), [{"file": "a.txt", "reason": "is empty"}])), 80
    )
    assert "nothing was measured or read" in said
    assert said.count("specification") == 2
    assert "not read: a.txt: is empty" in said
    assert "bandwidth from" not in said


def test_colours_are_there_on_a_colour_terminal_only():
    said = map_report(document(made(1, 4, "cpu")))
    file = io.StringIO()
    Console(file=file, width=80, force_terminal=True, color_system="truecolor").print(said)
    assert "\x1b[38;2;0;0;0;48;2;253;231;37m" in file.getvalue()  # black on the light end of the scale
    assert "\x1b" not in text_of(said, 80)


def test_the_scale_grows_in_lightness():
    def lightness(place):
        red, green, blue = (int(colour_at(place)[i : i + 2], 16) for i in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    steps = [lightness(step / 20) for step in range(21)]
    assert steps == sorted(steps)
    assert steps[-1] > 4 * steps[0]


def test_a_curve_begins_at_nothing():
    assert curve_line([1.0, 4.5, 8.0]) == "".join(chr(0x2581 + i) for i in (1, 4, 7))
    assert len(curve_line([1.0] * 100)) == 20


def test_cells_of_nodes_hold_the_median_and_the_worst():
    said = document(made(8, fault=lambda a, b: 0.5 if (a, b) == (0, 9) else 1, noise=0))
    cells = cells_of(said)
    cell = cells.cells[0, 1]
    assert (cells.noun, cells.size, cell.pairs) == ("node", 8, 64)
    assert cell.bandwidth == pytest.approx(47e9)
    assert cell.slowest == pytest.approx(23.5e9)
    assert cell.share == pytest.approx(0.5)


@pytest.mark.parametrize(("nodes", "rows", "gap"), [(2, 16, True), (64, 64, False)])
def test_the_picture_has_every_cell_marks_and_titles(nodes, rows, gap):
    cluster = made(nodes, fault=between(1), rails_only=nodes > 2)
    root = ElementTree.fromstring(map_picture(document(cluster)))
    titled = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert len(titled) == rows * rows
    marks = [rect for rect in root.iter(f"{SVG}rect") if rect.get("stroke") == MARK]
    if nodes == 64:
        assert len(marks) == 2 * 63 + 1  # a row, a column and the legend's
    names = {text.text for text in root.iter(f"{SVG}text")}
    assert ("node 1" in names) == gap
    x = sorted({float(rect.get("x")) for rect in titled})
    steps = {round(b - a) for a, b in pairwise(x)}
    assert len(steps) == (2 if gap else 1)


def test_pictures_are_files_that_need_nothing_else(tmp_path):
    said = document(made(1, 4, "cpu", hosts=("<a&b>",) * 4))
    for name in ("map.svg", "map.html"):
        write_map_picture(said, tmp_path / name)
        text = (tmp_path / name).read_text()
        assert "<svg" in text
        assert "src=" not in text
        assert "href" not in text
    assert (tmp_path / "map.html").read_text().startswith("<!doctype html>")


def test_the_command_shows_a_file_draws_it_and_refuses_other_pictures(tmp_path):
    path, picture = tmp_path / "cluster.toml", tmp_path / "map.svg"
    path.write_text(made(4, fault=between(2)).to_toml())
    shown = CliRunner().invoke(app, ["map", "show", str(path), "--picture", str(picture)])
    assert shown.exit_code == 1  # there is a fault
    assert "slow: slow node (certain)" in shown.output
    assert picture.exists()
    for name, words in (("map.png", "name it .svg or .html"), ("no/map.svg", "folder that does not exist")):
        refused = CliRunner().invoke(app, ["map", "show", str(path), "--picture", str(tmp_path / name)])
        assert refused.exit_code != 0
        assert words in str(refused.exception)
