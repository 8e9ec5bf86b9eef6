"""Reports for people: nothing is eaten as markup, and the pictures are right at their edges."""

import io
import math

import pytest
from rich.console import Console

from shardwright.cluster import cluster_of
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import preset
from shardwright.plan.finding import find
from shardwright.plan.params import parameter_table
from shardwright.report import loop, terminal
from shardwright.report.check import check_report

MODEL = preset("bytes-5m").model_copy(update={"name": "bytes [bold]5m[/bold]"})
JOB = Job(seq=64, global_batch=8, precision="fp32")
CLUSTER = cluster_of("cpu", 4, gpus_per_node=2)
LAYOUT = Layout(dp_replicate=2, dp_shard=2, zero_stage=3, micro_batch=2)
WIDTHS = (80, 120)


def text_of(report, width=120):
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    console.print(report)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return "\n".join(line.rstrip() for line in lines)


def words_of(text):
    """The words of a report, wherever its lines were broken."""
    return " ".join(text.replace("│", " ").split())


def plan_document(**changes):
    return find(MODEL, JOB, CLUSTER, {"dp_shard": 2}).document | changes


def check_document(ok=True, real=False):
    terms = ["parameters", "gradients", "optimizer", "total"]
    differing = [{"term": "total", "moment": "peak", "predicted": 900, "executed": 1000}]
    return {
        "ok": ok,
        "terms": [
            {
                "stage": 0,
                "difference": row["predicted"] - row["executed"],
                "ok": ok,
                "real": row["executed"] + 7 if real else None,
                **row,
            }
            for row in [
                *(
                    {"term": term, "moment": "rest", "predicted": 10**9, "executed": 10**9}
                    for term in terms[:3]
                ),
                *differing,
            ]
        ],
        "traffic": [
            {
                "axis": "dp_shard",
                "collective": "all_gather",
                "predicted_payload_bytes": 123456789,
                "executed_payload_bytes": 123456789 if ok else 1,
                "predicted_launches": 14,
                "executed_launches": 14,
                "real_payload_bytes": 123456788 if real else None,
                "real_launches": 15 if real else None,
                "ok": ok,
                "stage": 0,
            }
        ],
        "tensors": [
            {
                "stage": 0,
                "kind": "activations",
                "module": "model.layers.N.mlp",
                "source": "run/kernels.py:12",
                "count": 1234,
                "bytes": 56789,
            }
        ]
        * (not ok),
        "peak_moment": "last microbatch: layer 3, SwiGLU backward",
        "tolerance": {"memory": 0.02, "traffic": 0.0},
        "microbatches": 8,
        "microbatches_executed": 4,
        "stages": [
            {"stage": 0, "stands_for": [0], "layers": 32, "layers_executed": 3, "microbatches_executed": 4}
        ],
        "time": 1.25,
        "host_memory": 2**29,
    }


def train_document(**changes):
    return {
        "steps": 3,
        "losses": [5.5, 4.0, 3.25],
        "skipped_steps": [],
        "eval_losses": [{"step": 3, "loss": 3.5}],
        "step_time": 0.2,
        "tokens_per_s": 2560.0,
        "peak_memory": 2**20,
        "predicted": {"step_time": 0.1, "memory": 2**20},
        "run_directory": "runs/a [red]run[/red]",
        "world_size": 2,
        "interrupted": False,
    } | changes


@pytest.mark.parametrize("width", WIDTHS)
def test_params_report_has_the_first_layer_only(width):
    table = parameter_table(MODEL)
    tensors = [{"name": t.name, "shape": list(t.shape), "role": t.role} for t in table.tensors()]
    document = {"model": MODEL.name, "parameters": table.parameters, "tensors": tensors}
    text = text_of(terminal.params_report(document), width)
    assert "bytes [bold]5m[/bold]: 4," in text
    assert "layers.0.self_attn.q_proj" in text.replace("\n", "")
    assert "layers.1." not in text


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("ok", [True, False])
def test_check_report_marks_what_differs(width, ok):
    text = text_of(check_report(check_document(ok)), width)
    assert ("DIFFERS" in text) == (not ok)
    assert ("the ledger is what the program does" if ok else "the ledger and the program differ") in text
    assert "-100" in text
    assert "dry run took 1,250.0 ms, 0.50 GiB of host memory" in words_of(text)
    assert "executed 3 of 32 layers and 4 of 8 microbatches, the others repeat these" in words_of(text)
    assert ("model.layers.N.mlp run/kernels.py:12 1,234 56,789" in words_of(text)) == (not ok)
    assert "real" not in text


def test_check_report_has_a_real_step_as_third_column():
    text = words_of(text_of(check_report(check_document(real=True))))
    assert "executed real difference" in text
    assert "900 1,000 1,007 -100" in text
    assert "123,456,789 B 123,456,789 B 123,456,788 B 14 / 14 / 15" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_train_report_in_one_line_predicted_against_measured(width):
    text = words_of(text_of(terminal.train_report(train_document()), width))
    assert (
        "step time predicted 100.0 ms, measured 200.0 ms (x 2.00); memory predicted 1.00 MiB, measured"
        in text
    )
    assert "run folder: runs/a [red]run[/red]" in text
    assert "stopped" not in text


def test_train_report_without_measurements():
    document = train_document(step_time=None, peak_memory=None, eval_losses=[], interrupted=True)
    text = text_of(terminal.train_report(document))
    assert text.startswith("stopped before its last step\nloss 5.5000 -> 3.2500 in 3 steps")
    assert "measured" not in text


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("measured", [2**20, None])
def test_loop_report_shows_plan_training_and_proof(width, measured):
    document = {
        "plan": plan_document(),
        "train": train_document(peak_memory=measured),
        "check": check_document(),
        "plan_file": "runs/x [1]/plan.toml",
    }
    text = words_of(text_of(loop.loop_report(document), width))
    assert "bytes [bold]5m[/bold] on 2 ranks" in text
    assert "held out: 3.500" in text
    assert "shardwright explain runs/x [1]/plan.toml" in text
    assert ("measured in training" in text) == (measured is not None)


def test_show_writes_for_a_file_without_colours(capsys):
    terminal.show("[bold]as it is[/bold]", "x" * 119)
    assert capsys.readouterr().out == "[bold]as it is[/bold]\n" + "x" * 119 + "\n"


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 60, ""),
        ([1.0], 60, "\u2581"),
        ([2.0, 2.0], 60, "\u2581\u2581"),
        ([0.0, 7.0], 60, "\u2581\u2588"),
        ([7, 6, 5, 4, 3, 2, 1, 0], 60, "".join(chr(code) for code in range(0x2588, 0x2580, -1))),
        ([1.0, None, math.nan, math.inf, 2.0], 60, "\u2581   \u2588"),
        ([None, None], 60, "  "),
        ([0.0, 9.0, 9.0, 9.0, 1.0], 2, "\u2581\u2588"),
        ([5.0, 9.0], 1, "\u2581"),
    ],
)
def test_sparkline(values, width, line):
    assert terminal.sparkline(values, width) == line


def test_a_long_curve_keeps_its_ends():
    line = terminal.sparkline([10.0, *[5.0] * 1000, 0.0], 20)
    assert (len(line), line[0], line[-1]) == (20, "\u2588", "\u2581")


@pytest.mark.parametrize(
    ("share", "picture"),
    [
        (0.0, ""),
        (-1.0, ""),
        (1.0, "\u2588" * 4),
        (7.5, "\u2588" * 4),
        (0.5, "\u2588" * 2),
        (1 / 32, "\u258f"),
        (31 / 32, "\u2588" * 3 + "\u2589"),
        (1e-9, ""),
    ],
)
def test_bar(share, picture):
    assert terminal.bar(share, 4) == picture
