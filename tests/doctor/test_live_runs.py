"""Real runs of 4 gloo ranks of which one misbehaves: the doctor names it and the operation from the run
folder."""

import os
import signal
import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from evidence_files import found  # noqa: E402

from shardwright.cluster import cluster_of  # noqa: E402
from shardwright.errors import RunFailedError  # noqa: E402
from shardwright.job import Job  # noqa: E402
from shardwright.launcher import _train_rank  # noqa: E402
from shardwright.layout import Layout  # noqa: E402
from shardwright.model import ModelSpec  # noqa: E402
from shardwright.plan.explain import plan_of  # noqa: E402
from shardwright.run import train as train_module  # noqa: E402
from shardwright.run.dataset import build_dataset  # noqa: E402
from shardwright.run.launch import run_ranks  # noqa: E402
from shardwright.run.options import RunOptions  # noqa: E402
from shardwright.run.record import prepare_run_folder  # noqa: E402

CULPRIT = 2
TIMEOUT_S = 5.0
SPEC = ModelSpec(
    name="tiny", model_type="llama", layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, head_size=16, vocab=257
)


def on_call(name, number, instead):
    """Have the ``number``th call of a function of the training loop do something else on this rank."""
    own, calls = getattr(train_module, name), [0]

    def replaced(*args):
        calls[0] += 1
        return instead(*args) if calls[0] == number else own(*args)

    setattr(train_module, name, replaced)


def other_shape(value, device):
    dist.all_reduce(torch.zeros(3, dtype=torch.int64), op=dist.ReduceOp.MAX)
    return value


def no_more_data(*_):
    raise StopIteration("no more batches")


FAULTS = {
    "skips a collective": lambda: on_call("_largest", 5, lambda value, device: value),
    "dies": lambda: on_call("_one_step", 3, lambda *_: os.kill(os.getpid(), signal.SIGKILL)),
    "sleeps": lambda: on_call("_one_step", 3, lambda *_: time.sleep(600)),
    "has another shape": lambda: on_call("_largest", 5, other_shape),
    "runs out of data": lambda: on_call("to_device", 3, no_more_data),
}

EXPECTED = {
    "skips a collective": ("skipped_collective", "ALLREDUCE"),
    "dies": ("rank_died", "ALLREDUCE"),
    "sleeps": ("skipped_collective", "ALLREDUCE"),
    "has another shape": ("size_mismatch", "ALLREDUCE of 3 elements"),
    "runs out of data": ("data_ended_early", "ALLREDUCE"),
}


def faulty_rank(fault, *args):
    if dist.get_rank() == CULPRIT:
        FAULTS[fault]()
    return _train_rank(*args)


@pytest.fixture
def plan():
    job = Job(seq=32, global_batch=4, steps=6, precision="fp32")
    return plan_of(SPEC, job, cluster_of("cpu", 4), Layout(dp_shard=4, zero_stage=3))


@pytest.mark.parametrize("fault", FAULTS)
def test_one_rank(fault, plan, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    prepare_run_folder(folder)
    dataset = build_dataset(None, SPEC.vocab, plan.job)
    options = RunOptions(timeout=TIMEOUT_S)
    with pytest.raises(RunFailedError):
        run_ranks(
            faulty_rank,
            4,
            *(fault, plan, dataset, folder, "cpu", None, options),
            timeout_s=TIMEOUT_S,
            dump_folder=folder,
        )
    cause, operation = EXPECTED[fault]
    (finding,) = [finding for finding in found(folder) if finding["kind"] == "hang"]
    assert (finding["cause"], finding["ranks"]) == (cause, [CULPRIT])
    assert operation in finding["summary"]
