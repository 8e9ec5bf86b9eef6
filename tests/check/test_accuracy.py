"""Published runs: read, predicted, and every source's table within its own bound.

The bounds are what the fit reaches with a little room: a change that spoils one table is seen.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from shardwright.check.accuracy import accuracy, errors_of, predictions
from shardwright.check.runs_case import case_of_row, nic_bandwidth
from shardwright.check.runs_file import read_runs, read_table
from shardwright.check.runs_layout import NotPredictedError
from shardwright.check.runs_memory import measured_memory
from shardwright.check.sweeps import Sweep
from shardwright.cli import app
from shardwright.errors import JobError
from shardwright.units import GiB

RUNS = Path(__file__).parent / "published_runs" / "runs.csv"
MODELS = RUNS.parent / "models.csv"


@pytest.fixture(scope="module")
def document():
    return accuracy(RUNS, None, None, ("source", "program"))


@pytest.fixture(scope="module")
def by_source(document):
    return {group["name"]: group for group in document["groups"] if group["by"] == "source"}


@pytest.fixture
def rows():
    return {row["run_id"]: row for row in read_table(RUNS, ("run_id",))}


@pytest.fixture
def sizes():
    return {row["model"]: row for row in read_table(MODELS, ("model",))}


# Tables of the sources, each with its own bound


@pytest.mark.parametrize(
    ("source", "median", "p90"),
    [
        pytest.param("megatron-seqsel", 0.04, 0.10, id="Korthikanti 2022"),
        pytest.param("megatron-sc21", 0.05, 0.14, id="Narayanan 2021"),
        pytest.param("llm-foundry", 0.04, 0.11, id="llm-foundry"),
        pytest.param("torchtitan", 0.05, 0.15, id="torchtitan"),
        pytest.param("bigscience-a100", 0.04, 0.12, id="BigScience"),
        pytest.param("zero-bubble", 0.04, 0.09, id="zero bubble"),
    ],
)
def test_step_times_of_a_source_are_within_its_bound(by_source, source, median, p90):
    found = by_source[source]
    assert found["median"] <= median
    assert found["p90"] <= p90


@pytest.mark.parametrize(
    ("kind", "median", "p90"),
    [
        ("allocated", 0.02, 0.05),
        ("nvidia-smi", 0.04, 0.10),
        ("zero-bubble", 0.05, 0.07),
        ("reserved", 0.06, 0.15),
    ],
)
def test_peak_memory_of_a_kind_is_within_its_bound(document, kind, median, p90):
    assert document["memory"][kind]["median"] <= median
    assert document["memory"][kind]["p90"] <= p90


def test_all_runs_within_the_bound_of_the_whole_table(document):
    assert document["step_time"]["median"] <= 0.05
    assert document["step_time"]["p90"] <= 0.14
    sweeps = document["sweeps"]
    assert sweeps["mean_tau"] >= 0.75
    assert sweeps["mean_regret"] <= 0.02
    assert sweeps["worst_regret"] <= 0.10


def test_rows_with_the_whole_layout_are_predicted(document):
    complete = document["predicted_complete"]
    assert complete["rows"] >= 0.85 * complete["of"]


def test_few_runs_that_ran_are_called_too_large(document):
    fits = document["fits"]
    assert len(fits["called_too_large"]) <= 0.02 * fits["ran"]
    assert len(fits["called_fitting"]) <= 1


def test_choosing_by_prediction_on_runs_never_fitted(document):
    found = accuracy(RUNS.parent / "vtrain_multi.csv", None, None, ())
    errors = np.array([row["predicted"] / row["measured"] - 1 for row in found["rows"]])
    assert len(errors) == 105  # of 109, four are excluded
    assert np.abs(errors).mean() <= 0.09
    assert found["sweeps"]["worst_regret"] < 0.05


def test_every_row_is_predicted_excluded_or_counted_with_a_reason(document):
    rows = read_table(RUNS, ("run_id",))
    predicted = {row["run_id"] for row in document["rows"]}
    counted = sum(document["unpredicted"].values()) + len(document["excluded"])
    assert len(predicted | set(document["excluded"])) <= len(rows)
    assert counted + len(predicted) >= len(rows) - len(document["fits"]["called_fitting"]) - 10


# Reading


@pytest.mark.parametrize(
    ("text", "per_node", "gigabits"),
    [
        ("NVSwitch; 8x HDR 200 Gb/s IB per node", 8, 200),
        ("1600 Gbps node-node RoCE", 8, 200),
        ("NVLink in node; 4x Omni-Path links per node", 8, 50),
        ("NVLink in node; 400 Gb/s RDMA per GPU", 8, 400),
        ("8x100 Gb/s per node (config: inter_node_bandwidth 800)", 8, 100),
        ("GCP a4", 8, 0),
    ],
)
def test_nic_of_each_device_from_words(text, per_node, gigabits):
    assert nic_bandwidth(text, per_node) == gigabits * 1e9 / 8


def test_a_row_becomes_its_layout(rows, sizes):
    case = case_of_row(rows["zero-bubble-003"], sizes)
    assert case.layout.pp == 8
    assert case.layout.schedule == "1F1B"
    assert case.layout.stage_layers == (2, 3, 3, 3, 3, 3, 3, 2)  # the ends have one layer fewer
    assert (case.layout.micro_batch, case.layout.microbatches) == (6, 24)
    assert "vocabulary: 51200" in case.assumed


def test_ends_of_a_pipeline_without_a_layer(rows, sizes):
    """Megatron counts embedding and head as a layer each: 126 layers are 128 chunks of one, 22 are 24."""
    layout = case_of_row(rows["megatron-bridge-022"], sizes).layout
    assert (layout.pp, layout.chunks) == (16, 8)
    assert layout.stage_layers == (0, *[1] * 126, 0)
    assert case_of_row(rows["zero-bubble-004"], sizes).layout.stage_layers == (0, *[1] * 22, 0)


def test_deepspeed_fills_stages_one_after_the_other(rows, sizes):
    """78 layers on 12: "the last stage has 1 block, while the rest have 7" (chronicles-prequel.md); of 82
    with embedding and head, which stand for a layer each, all have 7."""
    assert case_of_row(rows["bigscience-a100-078"], sizes).layout.stage_layers == (*[7] * 11, 1)
    assert case_of_row(rows["bigscience-a100-109"], sizes).layout.stage_layers == (6, *[7] * 10, 6)


def test_nodes_of_older_chips_have_slower_nics(rows, sizes):
    """Where a row does not say: V100 sits on PCIe 3."""
    for run, gigabits in (("bigscience-v100-008", 100), ("mt-nlg-001", 200)):
        case = case_of_row(rows[run], sizes)
        assert any(f"interconnect: {gigabits} Gb/s" in text for text in case.assumed), case.assumed
        assert 0.5 < case.cluster.device.inter_link.bandwidth / (gigabits * 1e9 / 8) < 1


def test_how_tokens_reach_experts_on_several_nodes(rows, sizes):
    """Recipes of Megatron-Bridge: DeepSeek-V3 on B200 by DeepEP under another microbatch, Qwen3-235B on H100
    by all-to-all under another; before release 26 neither."""
    found = {}
    for run in ("megatron-bridge-065", "megatron-bridge-080", "megatron-bridge-237", "megatron-bridge-098"):
        case = case_of_row(rows[run], sizes)
        found[run[-3:]] = case.layout.dispatch, case.job.program.ep_hidden > 0
    assert found == {
        "065": ("by_node", True), "080": ("all_to_all", True), "237": ("all_to_all", False),
        "098": ("all_to_all", False),
    }  # fmt: skip


def test_what_a_row_does_not_say_is_named(rows, sizes):
    case = case_of_row(rows["mt-nlg-001"], sizes)
    assert "mbs_seqs: 1" in case.assumed
    assert "recompute: full, as nothing else fits" in case.assumed


def test_what_a_megatron_does_by_its_year(rows, sizes):
    """arXiv:2205.05198 of 2022 and arXiv:2104.04473 of 2021; BigScience's fork; ZB-2p of arXiv:2401.10241."""
    runs = ("megatron-seqsel-003", "megatron-sc21-007", "bigscience-a100-017", "zero-bubble-001")
    programs = [case_of_row(rows[run], sizes).job.program for run in runs]
    assert [program.tp_exposed < 1 for program in programs] == [True, False, False, True]
    assert [program.hops_split for program in programs] == [True, False, False, True]
    assert [program.fills for program in programs] == [False, False, False, True]


def test_a_clusters_slow_host_goes_by_its_network(rows, sizes):
    """-004 ran with CUDA_LAUNCH_BLOCKING=1, -121 without, on one cluster; V100's rows name no network."""
    runs = ("bigscience-a100-004", "bigscience-a100-121", "megatron-sc21-007", "bigscience-v100-008")
    programs = [case_of_row(rows[run], sizes).job.program for run in runs]
    assert programs[0] == programs[1]
    assert [program.launches > 1 for program in programs] == [True, True, False, False]


def test_heads_that_a_sources_other_tables_state():
    runs = {case.run_id: case for case in read_runs(RUNS, MODELS, None).cases}
    assert runs["bigscience-a100-010"].model.heads == 96  # as -004 and others of the model
    assert "heads: those of the source's other runs of the model" in runs["bigscience-a100-010"].assumed
    assert "heads: of 128" in runs["bigscience-v100-004"].assumed  # nobody states them


def test_a_row_without_its_degrees_is_not_predicted(rows, sizes):
    with pytest.raises(NotPredictedError, match="degrees do not multiply to n_gpus"):
        case_of_row({**rows["zero-bubble-003"], "dp": "3"}, sizes)


def test_a_gpu_known_by_its_data_sheet_alone_is_predicted(rows, sizes):
    sheet = {"memory_gb": "80", "hbm_gbps": "2000", "dense_bf16_tflops": "312", "nvlink_gbps_per_dir": "300"}
    row = {**rows["llm-foundry-088"], "gpu": "New-GPU"}
    with pytest.raises(NotPredictedError, match="gpu is not among the devices"):
        case_of_row(row, sizes)
    case = case_of_row(row, sizes, {"New-GPU": sheet})
    assert case.cluster.device.bf16 == 312e12
    assert any(text.startswith("gpu: its data sheet") for text in case.assumed)


def test_units_of_memory_are_those_of_the_source(rows):
    assert measured_memory(rows["simumax-b200-002"]) == ("allocated", 60.68 * GiB)
    assert measured_memory(rows["zero-bubble-003"]) == ("zero-bubble", 30e9)
    assert measured_memory(rows["bigscience-a100-002"]) == ("nvidia-smi", 44e9)


def test_a_table_without_columns_is_refused(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("run_id,model\na,b\n")
    with pytest.raises(JobError, match="has no columns source_id"):
        read_runs(path, MODELS, None)


def test_repeated_runs_get_one_prediction(rows, sizes):
    case = case_of_row(rows["bigscience-a100-004"], sizes)
    one, other = predictions([case, case])
    assert one.time == other.time
    assert sum(one.terms.values()) == pytest.approx(one.time, rel=0.02)


# Statistics


def test_errors_are_summed_up():
    assert errors_of([-0.1, 0.2, 0.0]) == {
        "rows": 3, "median": 0.1, "p90": pytest.approx(0.18), "bias": pytest.approx(0.1 / 3),
    }  # fmt: skip


def test_regret_and_order_of_a_sweep():
    sweep = Sweep("job", np.array([1.0, 1.1, 2.0]), np.array([3.0, 2.0, 4.0]))
    assert sweep.regret == pytest.approx(0.1)  # chooses the second
    assert sweep.tau == pytest.approx(1 / 3)  # two pairs right, one wrong


def test_command_prints_one_document():
    result = CliRunner().invoke(app, ["accuracy", str(RUNS), "--by", "gpu", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert {"step_time", "memory", "unpredicted", "sweeps", "rows"} <= set(found)
    assert set(found["rows"][0]) == {"run_id", "quantity", "measured", "predicted"}
