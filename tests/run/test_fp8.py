"""fp8 products: near those of bf16, by their own rounding; devices without them are refused."""

import pytest
import torch
from gloo import MODELS, RaggedBatches, gradient_difference, job_of, parallel_steps, plain_steps, relative

from shardwright.errors import LayoutError
from shardwright.layout import KEPT_BY_SELECTIVE, Layout
from shardwright.run.fp8 import ALIGNED, GRADIENT, INPUT, check_fp8, fp8_product, rounded
from shardwright.run.launch import run_ranks

BLOCKS = MODELS["base"].model_copy(update={"ffn": 64})
"""Every dim divides, also by tp=2."""


def product_and_gradients(product, x, weight, bias, grad):
    inputs = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    out = product(*inputs)
    return out, *torch.autograd.grad(out, inputs, grad)


@pytest.mark.parametrize("largest", [1e-20, 1.0, 1e20])
def test_product_and_its_gradients(largest):
    """An element is rounded to 3 bits of mantissa, a gradient's to 2: at most 1/16 and 1/8 of it."""
    torch.manual_seed(0)
    x, weight, bias, grad = (
        torch.randn(size).bfloat16() for size in ((2, 16, 64), (48, 64), 48, (2, 16, 48))
    )
    x = x * largest
    found = product_and_gradients(fp8_product, x, weight, bias, grad)
    exact = product_and_gradients(
        torch.nn.functional.linear, *(tensor.double() for tensor in (x, weight, bias, grad))
    )
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - theirs).norm() < 0.06 * theirs.norm()


def test_dims_that_do_not_divide_are_not_rounded():
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    assert 5 % ALIGNED
    assert torch.equal(fp8_product(x, weight, None), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("dtype", [INPUT, GRADIENT])
@pytest.mark.parametrize("largest", [0.0, 1e-25, 3e38])
def test_rounding_is_finite_and_reaches_the_largest_number(dtype, largest):
    eight, back = rounded(torch.tensor([largest, -largest / 3]).bfloat16(), dtype)
    assert torch.isfinite(eight.float()).all()
    assert torch.isfinite(back)
    assert eight[0].float() == (torch.finfo(dtype).max if largest else 0.0)


@pytest.mark.parametrize(
    "degrees",
    [{}, {"dp_shard": 2, "zero_stage": 3, "recompute": "full"},
     {"tp": 2, "sp": True, "recompute": "selective", "kept": KEPT_BY_SELECTIVE}],
    ids=["alone", "shard x full", "tp x sp x selective"],
)  # fmt: skip
def test_trains_near_fp32(degrees):
    layout = Layout(micro_batch=2, microbatches=2, **degrees)
    job = job_of(layout.dp * 4, "fp8", seq=32)
    batches = RaggedBatches(BLOCKS.vocab, job.seq)
    found = run_ranks(parallel_steps, layout.ranks, BLOCKS, job, layout, batches, timeout_s=60)[0]
    expected = plain_steps(BLOCKS, job.model_copy(update={"precision": "fp32"}), batches)
    assert relative(found.losses, expected.losses) < 2e-2
    assert relative(found.norms, expected.norms) < 1e-1
    assert 1e-2 < gradient_difference(found, expected)[0] < 0.5  # rounded it is


def test_a_gpu_without_fp8_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(
        LayoutError, match=r"capability 8\.9 or more, NVIDIA A100 has 8\.0: use precision='bf16'"
    ):
        check_fp8(torch.device("cuda", 0))
    check_fp8(torch.device("cpu"))
