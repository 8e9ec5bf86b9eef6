"""Local ranks: results come back, failures name the rank and its own error, nothing is left running."""

import faulthandler
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo import BASE, RaggedBatches, job_of, torch_batches

from shardwright.errors import DataError, LayoutError, MissingExtraError, RunFailedError
from shardwright.layout import Layout
from shardwright.run.init import initialise
from shardwright.run.last_words import record_collectives
from shardwright.run.launch import check_world, run_ranks, torchrun_rank, under_torchrun
from shardwright.run.mesh import build_mesh
from shardwright.run.step import Stepper, parallel_model


def world_sum(value):
    total = torch.tensor([float(value + dist.get_rank())])
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "sum": total.item(), "array": np.arange(3)}


def raises_on(rank, error):
    if dist.get_rank() == rank:
        raise error
    dist.barrier()


def dies_on(rank):
    if dist.get_rank() == rank:
        os.write(2, b"terminate called after throwing something\n")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hangs_on(rank):
    if dist.get_rank() == rank:
        time.sleep(60)
    dist.barrier()


def waits(seconds):
    time.sleep(seconds)
    return dist.get_rank()


def stops_when_asked():
    asked = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: asked.set())
    asked.wait(30)
    return "stopped"


@pytest.fixture(autouse=True)
def _no_orphans():
    yield
    assert multiprocessing.active_children() == []


@pytest.fixture
def interrupt_soon(ctrl_c):
    timer = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))
    yield timer.start()
    timer.join()


def test_results_come_back_by_rank():
    results = run_ranks(world_sum, 3, 10)
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert all(result["sum"] == 33.0 for result in results)
    np.testing.assert_array_equal(results[2]["array"], [0, 1, 2])


def test_the_rank_that_raised_is_named_not_its_peers():
    with pytest.raises(
        RunFailedError, match=r"(?s)^rank 1 failed: ValueError: bad shard\n.*raises_on"
    ) as caught:
        run_ranks(raises_on, 2, 1, ValueError("bad shard"))
    assert "Traceback" in str(caught.value)


@pytest.mark.parametrize(
    "error", [DataError("no tokens"), LayoutError("dp=3"), MissingExtraError("train", "x")]
)
def test_an_error_of_ours_keeps_its_class_and_status(error):
    with pytest.raises(type(error)) as caught:
        run_ranks(raises_on, 2, 0, error)
    assert str(caught.value) == str(error)
    assert caught.value.exit_status == 2


def test_a_killed_rank_is_named_by_its_signal_with_what_it_wrote():
    with pytest.raises(
        RunFailedError, match=r"(?s)^rank 1 failed: SIGKILL: the process died\nterminate called"
    ):
        run_ranks(dies_on, 3, 1)


def sends_too_much():
    faulthandler.disable()  # pytest's, which a fork inherits
    dist.all_reduce(torch.ones(10 if dist.get_rank() == 1 else 200_000))


def test_a_rank_that_a_library_aborts_is_named_with_the_library_s_words():
    with pytest.raises(
        RunFailedError,
        match=r"(?s)^rank 1 failed: SIGABRT: .*Received data size doesn't match.*after it: rank 0",
    ):
        run_ranks(sends_too_much, 2, timeout_s=20)


def test_a_hang_ends_by_the_timeout_of_the_collective():
    start = time.monotonic()
    with pytest.raises(RunFailedError, match=r"ranks \[1\] were still running and were ended"):
        run_ranks(hangs_on, 2, 1, timeout_s=1.5)
    assert time.monotonic() - start < 10


@pytest.mark.usefixtures("interrupt_soon")
def test_interrupt_ends_ranks_that_do_not_handle_it():
    start = time.monotonic()
    with pytest.raises(RunFailedError, match="interrupted"):
        run_ranks(waits, 2, 30)
    assert time.monotonic() - start < 10


@pytest.mark.usefixtures("interrupt_soon")
def test_interrupt_lets_ranks_finish_that_handle_it():
    assert run_ranks(stops_when_asked, 2) == ["stopped", "stopped"]


def test_ranks_do_not_outlive_a_killed_parent():
    reader, writer = os.pipe()

    def parent():
        run_ranks(holds_pipe, 2, writer)

    process = multiprocessing.get_context("fork").Process(target=parent)
    process.start()
    os.close(writer)
    pids = {int(os.read(reader, 16)) for _ in range(2)}
    process.kill()
    process.join()
    assert os.read(reader, 16) == b""  # every holder of the pipe's other end is gone
    os.close(reader)
    assert len(pids) == 2


def holds_pipe(writer):
    dist.barrier()
    os.write(writer, f"{os.getpid():<16}".encode())
    time.sleep(30)


def test_results_must_be_plain_data():
    with pytest.raises(RunFailedError, match="rank 0 failed"):
        run_ranks(lambda: lambda: None, 1)


@pytest.mark.parametrize(
    ("ranks", "world", "nodes", "way_out"),
    [(4, 2, 1, "use --nproc-per-node 4"), (8, 4, 2, "use --nproc-per-node 4"), (3, 4, 2, "use 1 node with")],
)
def test_world_of_another_size_is_refused(ranks, world, nodes, way_out):
    with pytest.raises(
        LayoutError, match=f"layout has {ranks} ranks but {world} processes were started: {way_out}"
    ):
        check_world(ranks, world, nodes)


def test_torchrun_world_is_checked_before_any_group_exists(monkeypatch):
    assert not under_torchrun({"RANK": "0"})
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert under_torchrun()
    with pytest.raises(LayoutError, match="--nproc-per-node 4"):
        torchrun_rank(waits, 4, 0)
    assert not dist.is_initialized()


def test_torchrun_rank_runs_in_this_process_and_leaves_its_error_for_torchrun(
    monkeypatch, free_port, tmp_path
):
    values = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**values, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert torchrun_rank(waits, 1, 0) == 0
    assert not dist.is_initialized()
    monkeypatch.setenv("MASTER_PORT", str(free_port + 1))
    with pytest.raises(ValueError, match="bad shard"):
        torchrun_rank(raises_on, 1, 0, ValueError("bad shard"))
    dist.destroy_process_group()
    assert "bad shard" in (tmp_path / "error.json").read_text()


def raises_inside(rank):
    if dist.get_rank() == rank:
        try:
            raise ValueError("bad stage")
        except ValueError as inner:
            raise RuntimeError("a wall of text about the stage") from inner
    dist.barrier()


def test_an_error_that_was_wrapped_is_shown_by_its_cause():
    with pytest.raises(RunFailedError, match=r"(?s)^rank 1 failed: ValueError: bad stage\n.*raises_inside"):
        run_ranks(raises_inside, 2, 1)


def fails_in_a_stage():
    layout = Layout(pp=2, schedule="1F1B", stage_layers=(1, 1), microbatches=2)
    job, mesh = job_of(2), build_mesh(layout, "cpu")
    model = parallel_model(BASE, job, layout, mesh)
    initialise(model, 0, torch.device("cpu"))
    stepper = Stepper(model, job, layout, mesh)
    if dist.get_rank() == 1:
        model.stages[0].model.norm.register_forward_pre_hook(spoil)
    stepper.backward(torch_batches(RaggedBatches(BASE.vocab, job.seq), 0, layout, 0))


def spoil(module, inputs):
    raise ZeroDivisionError("norm of nothing")


def test_a_failure_inside_a_pipeline_is_the_stage_s_own():
    start = time.monotonic()
    with pytest.raises(RunFailedError, match=r"^rank 1 failed: ZeroDivisionError: norm of nothing\n"):
        run_ranks(fails_in_a_stage, 2, timeout_s=30)
    assert time.monotonic() - start < 20


def test_termination_reaches_ranks_as_an_interrupt():
    before = signal.getsignal(signal.SIGTERM)
    timer = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    assert run_ranks(stops_when_asked, 2) == ["stopped", "stopped"]
    timer.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_flight_recorder_dumps_into_the_folder_unless_the_user_says_otherwise(tmp_path):
    cuda, environment = torch.device("cuda"), {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}
    record_collectives(cuda, tmp_path, environment)
    assert environment == {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "7",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/flight-rank",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    nameless, untouched = {}, {}
    record_collectives(cuda, None, nameless)
    assert nameless == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    record_collectives(torch.device("cpu"), None, untouched)
    assert untouched == {}
    gloo = {}
    record_collectives(torch.device("cpu"), tmp_path, gloo)
    assert gloo == {"TORCH_FR_BUFFER_SIZE": "2000"}
