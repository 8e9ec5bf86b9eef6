"""TensorBoard's event files are metrics: of two runs, of a run that was started again, and beside its log."""

import json
import sys

import pytest
from evidence_files import causes, found

from shardwright.doctor.diagnose import diagnose
from shardwright.errors import EvidenceError

tensorboard = pytest.importorskip("tensorboard")

from tensorboard.compat.proto.event_pb2 import Event  # noqa: E402
from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: E402
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # noqa: E402
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # noqa: E402
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: E402

LOSS = {1: 12.0086, 2: 11.9001}
NORM = {1: 1.7043, 2: 1.7243}


def write(folder, rows, *, as_tensor=False):
    """An event file of rows of (tag, step, value), by tensorboard's own writer."""
    writer = EventFileWriter(str(folder), max_queue_size=10, flush_secs=60)
    for tag, step, value in rows:
        if as_tensor:
            tensor = TensorProto(dtype=1, float_val=[value], tensor_shape=TensorShapeProto())
            shown = Summary.Value(tag=tag, tensor=tensor)
        else:
            shown = Summary.Value(tag=tag, simple_value=value)
        writer.add_event(Event(step=step, wall_time=1e9 + step, summary=Summary(value=[shown])))
    writer.close()
    return folder


def scalars(loss, norm, tags=("loss", "grad_norm")):
    return [(tags[0], *row) for row in loss.items()] + [(tags[1], *row) for row in norm.items()]


TAGS = {
    "torchtitan": ("loss_metrics/global_avg_loss", "grad_norm"),
    "transformers": ("train/loss", "train/grad_norm"),
    "Megatron": ("lm loss", "grad-norm"),
}


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("tags", TAGS.values(), ids=TAGS)
def test_the_ratio_of_two_runs(tmp_path, tags, as_tensor):
    for name, factor in (("one", 1), ("other", 1 / 8)):
        rows = scalars(LOSS, {step: factor * value for step, value in NORM.items()}, tags)
        write(tmp_path / name, rows, as_tensor=as_tensor)
        (tmp_path / f"{name}/args.sh").write_text(
            "pretrain_gpt.py --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
            f"--world-size {8 if name == 'other' else 1}"
        )
    (finding,) = [each for each in found(tmp_path) if each["kind"] == "numbers"]
    assert (finding["cause"], finding["certainty"]) == ("scaled_by_ranks", "certain")
    assert finding["numbers"]["ratio"] == pytest.approx(1 / 8, rel=1e-5)


def test_units_of_torchtitan(tmp_path):
    rows = [(tag, step, value) for step in range(1, 5) for tag, value in
            (("mfu(%)", 24.3), ("tflops", 480.9), ("memory/num_alloc_retries", 3.0))]  # fmt: skip
    document = diagnose([str(write(tmp_path / "tb", rows))])
    causes = {each["cause"]: each["numbers"] for each in document["findings"]}
    assert causes["sparse_peak"]["mfu_dense"] == pytest.approx(0.486, rel=1e-3)
    assert "allocator_retries" in causes


def test_a_run_that_was_started_again_is_one_run(tmp_path):
    write(tmp_path / "a", [("loss", step, 3.0) for step in (1, 2, 3)])
    names = {file.name for file in (tmp_path / "a").iterdir()}
    write(tmp_path / "a", [("loss", step, 2.0) for step in (4, 5, 6)])
    assert len({file.name for file in (tmp_path / "a").iterdir()} | names) == 2
    assert causes(tmp_path / "a") == []


def test_beside_its_own_log_an_event_file_is_no_second_run(tmp_path):
    write(tmp_path / "tensorboard", scalars(LOSS, NORM))
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "loss": LOSS[step], "grad_norm": round(NORM[step], 2)}) + "\n"
            for step in LOSS
        )
    )
    assert causes(tmp_path) == []


def test_one_that_is_cut_off_is_read_up_to_there(tmp_path):
    for name, factor in (("one", 1), ("other", 1)):
        write(tmp_path / name, scalars(LOSS, {step: factor * value for step, value in NORM.items()}))
    (file,) = (tmp_path / "other").iterdir()
    file.write_bytes(file.read_bytes()[:-30])
    assert [cause for cause, _, _ in causes(tmp_path)] == ["runs_equal"]


def test_a_shape_that_asks_for_all_memory_is_left_out(tmp_path):
    dims = [TensorShapeProto.Dim(size=1 << 40)]
    tensor = TensorProto(dtype=1, float_val=[1.0], tensor_shape=TensorShapeProto(dim=dims))
    writer = EventFileWriter(str(tmp_path))
    writer.add_event(Event(step=1, summary=Summary(value=[Summary.Value(tag="loss", tensor=tensor)])))
    writer.close()
    assert causes(tmp_path) == []


def test_a_damaged_record_is_named(tmp_path):
    writer = EventFileWriter(str(tmp_path))
    writer._async_writer.write(b"\x09\xff\xff")
    writer.close()
    with pytest.raises(EvidenceError, match="is a damaged event file"):
        diagnose([str(tmp_path)])


def test_without_tensorboard_it_is_refused_with_a_way_out(tmp_path, monkeypatch):
    write(tmp_path, scalars(LOSS, NORM))
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    with pytest.raises(EvidenceError, match=r"needs the extra \[train\]: pip install"):
        diagnose([str(tmp_path)])
