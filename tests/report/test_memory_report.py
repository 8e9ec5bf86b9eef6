"""Reports of ``memory``: the chart and the picture show the peak, to scale, at both widths."""

import xml.etree.ElementTree as ElementTree

import pytest
from test_terminal import WIDTHS, text_of, words_of

from shardwright.report.memory import KINDS, columns, memory_report
from shardwright.report.memory_picture import COLOURS, HEIGHT, WIDTH, picture, save_picture

MiB = 2**20
SVG = "{http://www.w3.org/2000/svg}"


def held(**kinds):
    return dict.fromkeys(KINDS, 0) | kinds


def sample(event, phase, **kinds):
    return {"event": event, "phase": phase, "held": held(parameters=100 * MiB, **kinds)}


def document(moments=200, peak_at=150):
    """A ramp of activations up to the peak, nothing after it, an update at the end."""
    timeline = [
        sample(i, "forward" if i < 100 else "backward", activations=i * MiB if i <= peak_at else 0)
        for i in range(moments - 1)
    ]
    stage = {
        "stage": 1,
        "rank": 4,
        "microbatches_executed": 3,
        "events": moments,
        "peak": (100 + peak_at) * MiB,
        "peak_event": peak_at,
        "peak_moment": "backward of layers.0 [bold] (run/kernels.py:7)",
        "peak_held": held(parameters=100 * MiB, activations=peak_at * MiB),
        "tensors": [
            {"kind": "parameters", "module": f"m{i}", "source": "run/linear.py:1", "count": 2, "bytes": 10}
            for i in range(20)
        ],
        "timeline": [*timeline, sample(moments - 1, "optimizer")],
    }
    return {"model": "[bold]tiny[/bold]", "layout": "pp=2", "microbatches": 8, "stages": [stage]}


@pytest.mark.parametrize("width", WIDTHS)
def test_chart_at_both_widths(width):
    text = text_of(memory_report(document()), width)
    lines = text.splitlines()
    rows = [line.split("|", 1)[1] for line in lines if " |" in line]
    strip = next(line for line in lines if line.strip() and set(line.strip()) <= set("FBO"))
    peak = next(line for line in lines if line.strip() == "^").index("^")
    assert {row[:1] for row in rows[-6:]} == {KINDS["parameters"][0]}  # 100 of 250 MiB: 6.4 of 16 rows
    tops = [len([row for row in rows if row[column : column + 1].strip()]) for column in range(len(rows[-1]))]
    assert tops.index(max(tops)) <= peak - 13 < len(tops)
    assert max(tops) == len(rows) == 16
    assert tops[-1] == 6
    assert strip[peak] == "B"
    assert strip.strip().endswith("O")


@pytest.mark.parametrize("width", WIDTHS)
def test_what_the_peak_is(width):
    text = words_of(text_of(memory_report(document()), width))
    assert "[bold]tiny[/bold], pp=2: memory of one step" in text
    assert "stage 1, rank 4: peak 0.24 GiB (262,144,000 B) in backward of layers.0 [bold]" in text
    assert "activations 0.15 GiB" in text
    assert "others 4 lines 8 40" in text
    assert "5 microbatches more repeat the second" in text


@pytest.mark.parametrize("most", [1, 7, 96, 500])
def test_columns_keep_the_peak(most):
    timeline = document()["stages"][0]["timeline"]
    found = columns(timeline, most)
    assert len(found) == min(most, len(timeline))
    assert max(found, key=lambda each: sum(each["held"].values()))["event"] == 150
    assert found[-1]["phase"] == "optimizer"


def test_the_picture_is_to_scale():
    tree = ElementTree.fromstring(picture(document()))
    areas = {area.get("fill"): area.get("points").split() for area in tree.iter(f"{SVG}polygon")}
    assert areas.keys() == {COLOURS["parameters"], COLOURS["activations"]}
    points = [tuple(map(float, point.split(","))) for point in areas[COLOURS["activations"]]]
    peak = [x for x, y in points if y == 0]
    assert peak == pytest.approx([150 / 200 * WIDTH, 151 / 200 * WIDTH])
    assert max(y for _, y in points) == pytest.approx(HEIGHT * (1 - 100 / 250), abs=0.01)
    titles = [title.text for title in tree.iter(f"{SVG}title")]
    assert titles[150].startswith("backward, event 150: 0.24 GiB; parameters 100.00 MiB, ")
    texts = [text.text for text in tree.iter(f"{SVG}text")]
    assert "[bold]tiny[/bold], pp=2: memory of one step" in texts


def test_picture_files(tmp_path):
    for name, start in (("a.svg", "<svg "), ("b.html", "<!doctype html>")):
        path = save_picture(document() | {"model": "<a & b>"}, tmp_path / name)
        text = path.read_text(encoding="utf-8")
        assert text.startswith(start)
        assert "&lt;a &amp; b&gt;" in text
        assert "<a & b>" not in text
