"""How launchers say that a process ended: first cause or echo, and which ranks it names."""

import pytest
from evidence_files import causes, watchdog

ELASTIC = (
    "E0813 06:19:49.809000 161210 site-packages/torch/distributed/elastic/multiprocessing/api.py:869] failed "
    "(exitcode: {}) local_rank: 7 (pid: 161617) of binary: /usr/bin/python3.11\n"
)
DEEPSPEED = '[INFO] [launch.py:321:sigkill_handler] ["python", "train.py"] exits with return code = {}\n'

ENDS = {
    "mpirun": (
        "mpirun noticed that process rank 3 with PID 1234 on node n exited on signal 9 (Killed).\n",
        [3],
    ),
    "Horovod": ("Process 0 exit with status code 137.\nProcess 2 exit with status code 134.\n", [0]),
    "DeepSpeed": (DEEPSPEED.format(-9), []),
    "srun": ("srun: error: node017: task 5: Killed\n", []),
    "srun out of memory": ("srun: error: node017: task 5: Out Of Memory\n", []),
    "torchrun": (ELASTIC.format(-9), []),
}


@pytest.mark.parametrize("launcher", ENDS)
def test_a_process_that_was_killed(tmp_path, launcher):
    """A task of srun or a local rank is no rank of the job."""
    text, ranks = ENDS[launcher]
    path = tmp_path / "launch.log"
    path.write_text(text)
    assert causes(path) == [("rank_died", "certain", ranks)]


def test_a_process_that_ended_well(tmp_path):
    path = tmp_path / "launch.log"
    path.write_text(DEEPSPEED.format(0) + "Process 1 exit with status code 0.\n")
    assert causes(path) == []


@pytest.mark.parametrize(
    "end",
    [ELASTIC.format(1), DEEPSPEED.format(1), "srun: error: node017: tasks 0-3: Exited with exit code 1\n"],
    ids=["torchrun", "DeepSpeed", "srun"],
)
def test_exit_codes_after_a_hang_are_its_echo(tmp_path, end):
    """In a file of their own there is nothing that says which came first."""
    (tmp_path / "train.log").write_text(
        "world size: 4\n" + "".join(watchdog(rank, 9, "ALLREDUCE") for rank in (0, 1, 3))
    )
    (tmp_path / "launch.log").write_text(end)
    assert causes(tmp_path / "train.log", tmp_path / "launch.log") == [("skipped_collective", "likely", [2])]


@pytest.mark.parametrize(("named", "expected"), [(True, ("rank_failed", "certain", [2])), (False, None)])
def test_an_exit_code_before_a_hang_counts_if_it_is_somebodys(tmp_path, named, expected):
    ended = "Process 2 exit with status code 1.\n" if named else DEEPSPEED.format(1)
    path = tmp_path / "train.log"
    path.write_text(ended + "world size: 4\n" + "".join(watchdog(rank, 9, "ALLREDUCE") for rank in (0, 1, 3)))
    assert causes(path) == [expected or ("skipped_collective", "likely", [2])]


SHAPE = (
    "size mismatch for {}: copying a param with shape torch.Size([{}]) from checkpoint, the shape in current "
    "model is torch.Size([{}]).\n"
)


@pytest.mark.parametrize(
    ("shapes", "cause"),
    [
        (
            [("norm.weight", "1024", "4096"), ("lm_head.weight", "32000, 1024", "32000, 4096")],
            "shapes_differ",
        ),
        (
            [("lm_head.weight", "32000, 1024", "32000, 4096"), ("norm.weight", "1024", "4096")],
            "shapes_differ",
        ),
        ([("mlp.gate_proj.weight", "11008, 4096", "5504, 4096")], "layout_changed"),
        ([("embed_tokens.weight", "32001, 4096", "32000, 4096")], "shapes_differ"),
    ],
    ids=["another model", "in another order", "another tp", "another vocabulary"],
)
def test_shapes_of_another_model_and_of_another_layout(tmp_path, shapes, cause):
    """The first two are of deepspeedai/DeepSpeed#5570."""
    path = tmp_path / "train.log"
    path.write_text("".join(SHAPE.format(*shape) for shape in shapes))
    assert [each for each, _, _ in causes(path)] == [cause]


def test_a_key_that_an_optimizers_load_does_not_find(tmp_path):
    """NVIDIA/Megatron-LM#3885."""
    path = tmp_path / "train.log"
    frame = '  File "/opt/megatron/core/optimizer/optimizer.py", line 1244, in load_state_dict\n'
    path.write_text(f"Traceback (most recent call last):\n{frame}    s = state['state']\nKeyError: 'state'\n")
    assert causes(path) == [("optimizer_state_missing", "likely", [])]
    path.write_text(
        "Traceback (most recent call last):\n" + frame.replace("optimizer", "data") + "KeyError: 'state'\n"
    )
    assert [each for each, _, _ in causes(path)] == ["rank_failed"]
