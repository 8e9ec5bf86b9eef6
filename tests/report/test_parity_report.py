"""What ``parity`` prints and draws."""

import pytest
from rich.console import Console

from shardwright.report.curves import overlay
from shardwright.report.parity import parity_report
from shardwright.report.parity_picture import parity_figure


def row(name, difference, **fields):
    values = {
        "ratio": 1.0,
        "role": "norm",
        "layer": None,
        "stage_a": 0,
        "stage_b": 0,
        "axes_a": [],
        "missing": False,
    }
    return values | {"name": name, "difference": difference, "axes_b": ["tp"]} | fields


def document(**fields):
    gradients = [row("model.norm.weight", 1e-15), row("model.layers.1.w", 0.5, layer=1, stage_b=1, ratio=0.5)]
    gradients.append(row("model.layers.0.w", None, ratio=None, missing=True))
    limits = {"gradient": 1e-9, "loss": 1e-9, "norm": 1e-8, "later_loss": 1e-9, "later_norm": 1e-7}
    return {
        "ok": False,
        "model": "tiny",
        "precision": "fp64",
        "steps": 3,
        "tolerance": limits,
        "a": {"label": "dp_shard=2", "ranks": 2},
        "b": {"label": "tp=2", "ranks": 2},
        "losses_a": [3.0, 2.0, 1.0],
        "losses_b": [3.0, 2.0, None],
        "norms_a": [1.0, 1.0, 1.0],
        "norms_b": [0.5, 0.5, 0.5],
        "gradients": gradients,
        "worst_gradient": gradients[1],
        "differing_gradients": 2,
        "ranks_apart": {"a": [], "b": [{"name": "model.norm.weight", "difference": 0.1, "axes": ["tp"]}]},
        "reference": True,
        "wrong": ["b"],
        "cause": "scaled",
        "certainty": "cannot_tell",
        "explanation": "B is wrong: all gradients x 0.5",
        **fields,
    }


def printed(report):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(report)
        return console.export_text()


def test_equal_curves_are_one_line_and_ends_are_in_their_corners():
    lines = overlay([3.0, 2.0, 1.0], [3.0, 2.0, 1.0], width=11, height=5)
    assert lines[0].startswith("3 =")
    assert lines[2][2 + 5] == "="
    assert lines[4] == "1" + " " * 10 + "\u00b7="
    assert "A" not in "".join(lines)


def test_curves_apart_have_their_names():
    lines = overlay([2.0, 2.0], [1.0, 1.0], width=10, height=4)
    assert lines[0] == "2 A" + "\u00b7" * 8 + "A"
    assert lines[3] == "1 B" + "\u00b7" * 8 + "B"


def test_what_is_no_number_is_left_out():
    assert overlay([None], [None]) == ["no finite values"]
    lines = overlay([1.0, None, 3.0], [1.0, 2.0, 3.0], width=9, height=3)
    assert lines[1][2 + 4] == "B"
    assert overlay([5.0], [5.0 + 1e-8], width=4, height=3)[1].endswith("=")


def test_a_difference_is_told_with_its_place_and_cause():
    text = printed(parity_report(document()))
    for part in (
        "A: tiny, dp_shard=2, 2 ranks",
        "A and B differ: 2 of 3 gradients, worst model.layers.1.w, layer 1, stage 0 in A and 1 in B, "
        "split by nothing in A and tp in B",
        "B: ranks along tp hold different gradients of model.norm.weight",
        "cause (cannot tell from this): B is wrong: all gradients x 0.5",
        "largest difference where one is no number",
        "gradient norm of 3 steps, A and B (= both), largest difference 5.0e-01",
    ):
        assert part in " ".join(text.split()), text
    worst = text.index("no gradient")
    assert text.index("gradients of step 1, the worst of 3") < worst < text.index("5.0e-01")
    assert "0 / 1" in text


@pytest.mark.parametrize("reference", [False, True])
def test_equal_layouts_are_told_so(reference):
    right = document(ok=True, worst_gradient=row("model.norm.weight", 1e-15), reference=reference)
    text = printed(parity_report(right))
    assert "A and B train the same model: gradients within 1.0e-15 (model.norm.weight)" in text
    assert ("so does one process in plain PyTorch" in text) is reference


def test_the_figure_has_both_curves_and_every_known_gradient():
    figure = parity_figure(document())
    lines = [trace for trace in figure["data"] if trace["type"] == "scatter"]
    assert [trace["y"] for trace in lines] == [
        [3.0, 2.0, 1.0], [3.0, 2.0, None], [1.0, 1.0, 1.0], [0.5, 0.5, 0.5],
    ]  # fmt: skip
    (bars,) = (trace for trace in figure["data"] if trace["type"] == "bar")
    assert bars["x"] == ["model.norm.weight", "model.layers.1.w"]
    assert bars["marker"]["color"][0] != bars["marker"]["color"][1]
    assert figure["layout"]["shapes"][0]["y0"] == 1e-9
