"""Messages of reported runs in the words of their programs: layers over stages, NCCL without room, stacks
below a refusal."""

import pytest
from evidence_files import causes, found

STAGES = ("unequal_schedule", "certain", [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_layers=60 should be divisible by config.pipeline_model_parallel_size=8\n", [STAGES]),
        ("AssertionError: num_layers should be divisible by pipeline_model_parallel_size\n", [STAGES]),
        ("Number of layers should be divisible by the pipeline-model-parallel size\n", [STAGES]),
        ("ValueError: The number of contiguous micro-batches in a virtual pipeline stageshould range in "
         "[PP=6 , M=3]\n", [("too_few_microbatches", "certain", [])]),
        ("note: seq_length should be divisible by 128\n", []),
    ],
    ids=["Megatron-Bridge#5884", "bionemo-recipes#784", "ms-swift#5737", "Speech#14288", "another rule"],
)  # fmt: skip
def test_messages_of_pipelines(tmp_path, text, expected):
    path = tmp_path / "train.log"
    path.write_text(text)
    assert causes(path) == expected


MEGATRON = (
    "pretrain_gpt.py --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 "
    "--global-batch-size 512 --tensor-model-parallel-size 1 --num-layers {} "
    "--pipeline-model-parallel-size {} {}"
)


@pytest.mark.parametrize(
    ("layers", "pp", "more", "dropped"),
    [
        (30, 4, "", 2),
        (80, 16, "--num-virtual-stages-per-pipeline-rank 2", 16),
        (40, 8, "--num-layers-per-virtual-pipeline-stage 2", 8),
        (32, 4, "", None),
        (80, 8, "--num-layers-per-virtual-pipeline-stage 2", None),
        (61, 4, "--decoder-first-pipeline-num-layers 16 --decoder-last-pipeline-num-layers 15", None),
        (30, 4, "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", None),
    ],
)
def test_layers_that_megatron_drops(tmp_path, layers, pp, more, dropped):
    """NVIDIA/Megatron-LM#1304 (28 of 30 layers), #468 (64 of 80), #326 (32 of 40)."""
    path = tmp_path / "pretrain.sh"
    path.write_text(MEGATRON.format(layers, pp, more))
    told = [each for each in found(path) if each["cause"] == "unequal_schedule"]
    assert [f"the last {dropped} are dropped" in each["summary"] for each in told] == [True] * (
        dropped is not None
    )


def test_nccl_without_room(tmp_path):
    """NVIDIA/nccl#1235: 6,291,456 bytes on the fourth device of its host, whose rank is not said."""
    path = tmp_path / "train.log"
    path.write_text(
        "ng30903:3063028:3066152 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n\n"
        "ng30903:3063028:3066152 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes\n"
    )
    (finding,) = found(path)
    assert (finding["cause"], finding["certainty"], finding["ranks"]) == ("non_torch_memory", "likely", [])
    assert "6.00 MiB on device 3" in finding["summary"]


REFUSAL = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.12 GiB (GPU 5; 23.70 GiB total "
    "capacity; 22.00 GiB already allocated; 292.56 MiB free; 22.29 GiB reserved in total by PyTorch)\n"
)


@pytest.mark.parametrize(
    ("inner", "cause"), [("optim.step()", "optimizer_step"), ("self.run()", "memory_unknown")]
)
def test_a_stack_that_stands_below(tmp_path, inner, cause):
    """hpcaitech/ColossalAI#3509: the message first, then the stack, outermost frame first."""
    path = tmp_path / "train.log"
    place = "/x/torch/optim/adamw.py" if "optim" in inner else "/x/run.py"
    path.write_text(
        REFUSAL + "Traceback (most recent call last):\n"
        + "".join(f'  File "outer{number}.py", line 1, in fit\n    self.fit()\n' for number in range(12))
        + f'  File "{place}", line 9, in step\n    {inner}\n'
    )  # fmt: skip
    (finding,) = [each for each in found(path) if each["kind"] == "oom"]
    assert finding["cause"] == cause
    assert f"at step at {place}:9" in finding["summary"]


GRAPH = "node-b:9:10 [0] NCCL INFO GPU/{} :{} CPU/0-0 (2/24.0/PHB)\n"


@pytest.mark.parametrize(
    ("paths", "ways"),
    [
        ("GPU/0-1000 (0/5000.0/LOC) GPU/0-2000 (2/20.0/PIX) GPU/0-3000 (4/12.0/SYS) GPU/0-4000 (4/12.0/SYS)",
         [("PIX", 20e9, 1), ("SYS", 12e9, 2)]),
        ("GPU/1000 (0/5000.0/LOC) GPU/2000 (2/20.0/PHB)", [("PHB", 20e9, 1)]),
        ("GPU/0-1000 (0/5000.0/LOC) GPU/0-2000 (1/80.0/NVL) GPU/0-3000 (4/12.0/SYS)", None),
    ],
    ids=["two classes", "an old form", "NVLink"],
)  # fmt: skip
def test_paths_of_nccls_graph(tmp_path, paths, ways):
    path = tmp_path / "train.log"
    path.write_text(GRAPH.format("1000", paths))
    told = [each["numbers"] for each in found(path)]
    assert [[(way["class"], way["bandwidth"], way["devices"]) for way in each["ways"]] for each in told] == (
        [] if ways is None else [ways]
    )
    assert [each["near"] for each in told] == ([] if ways is None else [2 if len(ways) > 1 else None])


def titan(step, memory, share):
    return (
        f"[rank0]:[titan] 2025-03-20 08:19:11,539 - root - INFO - step: {step}  loss:  7.7158  "
        f"memory: {memory:.2f}GiB({share:.2f}%)  tps: 5,966\n"
    )


def test_memory_grows_from_the_beginning_of_its_own_run(tmp_path):
    """pytorch/torchtitan#1789 behind lines of a run before it."""
    path = tmp_path / "train.log"
    path.write_text(titan(30, 49.58, 52.2) + titan(1, 58.28, 73.66) + titan(10, 73.32, 92.67))
    (finding,) = [each for each in found(path) if each["cause"] == "tight_memory"]
    assert "15.04 GiB more than at step 1)" in finding["summary"]


def test_two_refusals_have_their_own_stacks(tmp_path):
    path = tmp_path / "train.log"
    stack = '  File "adamw.py", line 9, in step\n    optim.step()\n'
    path.write_text(stack.replace("adamw", "torch/optim/adamw") + REFUSAL + REFUSAL.replace("3.12", "2.12"))
    kinds = {each["summary"][:8]: each["cause"] for each in found(path)}
    assert kinds == {"3.12 GiB": "optimizer_step", "2.12 GiB": "memory_unknown"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ValueError: Seq length 8190 must be divisible by 2 * cp degree 8\n", "bad_layout"),
        ("AssertionError: sequence length must be divisible by tensor parallel size\n", "bad_layout"),
        ("ValueError: number of experts (60) must be divisible by ep (8)\n", "bad_layout"),
        ("ValueError: loaded state dict contains a parameter group that doesn't match the size of "
         "optimizer's group\n", "layout_changed"),
        ("ValueError: num_attention_heads (28) must be divisible by tp (8)\n", "heads_do_not_divide"),
        ("the picture's width must be divisible by 16\n", None),
    ],
)  # fmt: skip
def test_other_rules(tmp_path, text, expected):
    path = tmp_path / "train.log"
    path.write_text(text)
    assert [cause for cause, _, _ in causes(path)] == ([] if expected is None else [expected])


WORDS = (
    "RuntimeError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 4 has a total capacity of 79.11 "
    "GiB of which 1.07 GiB is free. Of the allocated memory 73.15 GiB is allocated by PyTorch, and 2.00 "
    "GiB is reserved by PyTorch but unallocated.\n"
)


@pytest.mark.parametrize("place", ["memory.", "Tried to", "allocate", "has", "free."])
def test_a_refusal_that_was_wrapped_anywhere(tmp_path, place):
    path = tmp_path / "train.log"
    path.write_text(WORDS.replace(f"{place} ", f"{place}\n", 1))
    (finding,) = [each for each in found(path) if each["kind"] == "oom"]
    assert finding["numbers"]["requested"] == round(1.96 * 2**30)
    assert finding["numbers"]["free"] == round(1.07 * 2**30)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", ["large_bubble"]),
        ("--num-virtual-stages-per-pipeline-rank 2", ["too_few_microbatches"]),
    ],
    ids=["1F1B", "interleaved"],
)
def test_megatrons_1f1b_takes_fewer_microbatches_than_stages(tmp_path, more, expected):
    """It warms up with as many as there are; torch's hangs (pytorch/torchtitan#775)."""
    path = tmp_path / "pretrain.sh"
    path.write_text(MEGATRON.format(32, 8, more).replace("512", "4") + " --world-size 16")
    assert [cause for cause, _, _ in causes(path)] == expected
