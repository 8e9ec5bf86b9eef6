"""Lines of one step as many programs print them, and what their numbers say of two runs, in SI units."""

import pytest
from evidence_files import causes, found

from shardwright.doctor.evidence import Step
from shardwright.doctor.inputs import gather

FORMS = {
    "compact JSON": ('{"step":3,"loss":2.5,"grad_norm":1.25}\n' * 2, (3, {"loss": 2.5, "grad_norm": 1.25})),
    "torchtune": (
        "Step 5 | loss:0.7912 lr:0.0003 tokens_per_second_per_gpu:1234.5 grad_norm:2.31\n",
        (5, {"loss": 0.7912, "grad_norm": 2.31, "tokens_per_s_per_gpu": 1234.5, "learning_rate": 3e-4}),
    ),
    "DeepSpeed's pipeline": (
        "steps: 10 loss: 2.3123 iter time (s): 1.213 samples/sec: 13.300\n",
        (10, {"loss": 2.3123, "step_time": 1.213, "samples_per_s": 13.3}),
    ),
    "NeMo": (
        "Training epoch 0, iteration 9/99 | lr: 0.001 | global_batch_size: 128 | global_step: 9 | "
        "reduced_train_loss: 11.03 | train_step_timing in s: 9.512 | consumed_samples: 1280\n",
        (9, {"loss": 11.03, "step_time": 9.512, "global_batch": 128, "learning_rate": 1e-3}),
    ),
    "Lightning's bar": (
        "Epoch 0:  10%|#  | 10/100 [00:10<01:30,  1.00it/s, v_num=0, train_loss=2.310]\n",
        (10, {"loss": 2.31}),
    ),
    "nanotron": (
        "01/01/2024 00:00:00 [INFO|DP=0|PP=0|TP=0]: iteration: 10 / 100 | consumed_tokens: 1.31M | "
        "elapsed_time_per_iteration_ms: 1.2K | tokens_per_sec: 109K | tokens_per_sec_per_gpu: 13.7K | "
        "global_batch_size: 1.02K | lm_loss: 9.12 | lr: 0.0003 | "
        "model_tflops_per_gpu: 123 | grad_norm: 3.21\n",
        (10, {"loss": 9.12, "grad_norm": 3.21, "step_time": 1.2, "tokens_per_s": 109e3, "global_batch": 1020,
              "tokens_per_s_per_gpu": 13.7e3, "learning_rate": 3e-4, "flops_per_s": 123e12}),
    ),
    "verl": (
        "step:1 - actor/pg_loss:0.123 - actor/grad_norm:0.512 - timing_s/step:33.1\n",
        (1, {"loss": 0.123, "grad_norm": 0.512, "step_time": 33.1}),
    ),
    "LLaMA-Factory": (
        '{"current_steps": 5, "total_steps": 100, "loss": 1.2345, "lr": 1e-05, "epoch": 0.05}\n' * 2,
        (5, {"loss": 1.2345, "learning_rate": 1e-5}),
    ),
    "fms-fsdp": (
        "step: 100\nloss: 3.1234\nLR: 0.0003\ntokens seen: 1000000\ngradient norm: 0.512\n"
        "reserved memory: 550\nallocated memory: 540\ncurrent step time: 1.23\noverall step time: 1.25\n"
        "current token per gpu per sec: 7500\noverall token per gpu per sec: 7400\n",
        (100, {"loss": 3.1234, "grad_norm": 0.512, "step_time": 1.23, "tokens_per_s_per_gpu": 7500,
               "learning_rate": 3e-4}),
    ),
    "nanoGPT": (
        "iter 100: loss 3.1234, time 120.50ms, mfu 35.10%\n",
        (100, {"loss": 3.1234, "step_time": 0.1205, "mfu": 0.351}),
    ),
    "nanoGPT's evaluation": ("step 250: train loss 2.1000, val loss 2.2000\n", (250, {"loss": 2.1})),
    "NeMo Automodel": (
        "2025-12-01 10:00:00 | INFO | step 1 | epoch 0 | loss 16.94 | grad_norm 12.1 | lr 0.01 | "
        "mem 60.1 GiB | tps 1234.5(154.3/gpu)\n",
        (1, {"loss": 16.94, "grad_norm": 12.1, "tokens_per_s_per_gpu": 1234.5, "learning_rate": 0.01}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_step(tmp_path, form):
    path, (text, (number, values)) = tmp_path / "train.log", FORMS[form]
    path.write_text(text)
    step, *_ = gather([str(path)]).of(Step)
    assert step.step == number
    assert step.values == pytest.approx(values)


@pytest.mark.parametrize(
    "text",
    [
        "the loss: 3 of 4 packets were lost in step\n",
        "Validation: loss: 2.5 after the epoch\n",
        "step 100 | validation loss: 2.5 |\n",
        "iter 100: val loss 2.2, load balancing loss: 0.01\n",
        "[INFO] step_avg:123 train_losses saved to /x/12\n",
    ],
)
def test_what_is_no_step(tmp_path, text):
    path = tmp_path / "train.log"
    path.write_text(text)
    assert gather([str(path)]).of(Step) == []


@pytest.mark.parametrize("form", ["torchtune", "verl", "nanotron", "fms-fsdp"])
def test_two_runs_of_any_program(tmp_path, form):
    """The second's norm is the root of four times as large, and its loss the same."""
    text, (_, values) = FORMS[form]
    for name, gpus, norm in (("a", 1, values["grad_norm"]), ("b", 4, 2 * values["grad_norm"])):
        (tmp_path / name).mkdir()
        own = text.replace(f"{values['grad_norm']}", f"{norm:.4f}")
        (tmp_path / f"{name}/train.log").write_text(own)
        kind = "MULTI_GPU" if gpus > 1 else "'NO'"
        (tmp_path / f"{name}/acc.yaml").write_text(
            f"{{compute_environment: LOCAL_MACHINE, distributed_type: {kind}, num_processes: {gpus}}}"
        )
    assert ("norm_reduced_again", "certain", []) in causes(tmp_path)


def titan(rank, norm, loss=8.1):
    return (
        f"[rank{rank}]:[titan] 2025-01-01 08:19:11,539 - root - INFO - step:  4  loss:  {loss:.4f}  "
        f"grad_norm:  {norm:.4f}  memory: 49.58GiB(52.20%)  tps: 5,966  mfu: 34.94%\n"
    )


@pytest.mark.parametrize(
    ("norms", "losses", "expected"),
    [
        ([1.2, 0.9, 1.6, 0.4], [8.1] * 4, [("partial_norm", "likely", [])]),
        ([1.2] * 4, [8.1] * 4, []),
        ([1.2, 0.9, 1.6, 0.4], [8.1, 8.2, 8.0, 8.3], []),
    ],
    ids=["a norm each", "one norm", "losses of each rank too"],
)
def test_ranks_that_print_norms_of_their_own(tmp_path, norms, losses, expected):
    """pytorch/torchtitan#766: DTensor's norm is one rank's part."""
    path = tmp_path / "train.log"
    path.write_text("".join(titan(rank, *row) for rank, row in enumerate(zip(norms, losses, strict=True))))
    assert [each for each in causes(path) if each[0] == "partial_norm"] == expected
    if expected:
        (finding,) = [each for each in found(path) if each["cause"] == "partial_norm"]
        assert finding["numbers"]["whole"] == pytest.approx((1.44 + 0.81 + 2.56 + 0.16) ** 0.5)


def titan_folder(folder, degrees, norm):
    folder.mkdir()
    lines = "".join(f"{name} = {degree}\n" for name, degree in degrees.items())
    (folder / "train.toml").write_text(
        f'[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\n[parallelism]\n{lines}'
    )
    (folder / "train.log").write_text(titan(0, norm))


@pytest.mark.parametrize(
    ("ratio", "cause"),
    [(0.5, "partial_norm"), (2.0, "norm_reduced_again"), (4.0, "scaled_by_tensor"), (3.3, "scaled_constant")],
)
def test_a_degree_that_one_run_has_before_one_that_both_have(tmp_path, ratio, cause):
    """deepspeedai/DeepSpeed#5411: norms of tp 4 are half of those of tp 1, the root of 4."""
    titan_folder(tmp_path / "a", {"data_parallel_shard_degree": 8}, 1.2)
    other = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 4}
    titan_folder(tmp_path / "b", other, 1.2 * ratio)
    assert [each for each, _, _ in causes(tmp_path)] == [cause]
