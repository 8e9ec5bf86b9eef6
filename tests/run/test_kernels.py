"""Every operation of ours against plain PyTorch, forward and backward, and the model against transformers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own custom)

from shardwright.hf_config import model_from_config
from shardwright.run import dataset, kernels, loss
from shardwright.run.kernels import causal_attention, rms_norm, rotate, swiglu
from shardwright.run.loss import MASKED, cross_entropy
from shardwright.run.model import Transformer

ONE_SLICE, MANY_SLICES = 2**22, 100
"""ROWS_BYTES of one slice, and so small that every row or two is a slice of its own."""


@pytest.fixture(autouse=True, params=[ONE_SLICE, MANY_SLICES], ids=["one_slice", "many_slices"])
def _rows_bytes(request, monkeypatch):
    monkeypatch.setattr(kernels, "ROWS_BYTES", request.param)


def leaf(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def plain_rms_norm(x, weight, eps):
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def plain_rotate(x, cos, sin):
    cos, sin = torch.cat([cos, cos], -1)[:, None], torch.cat([sin, sin], -1)[:, None]
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], -1) * sin


def assert_same(ours, plain, inputs, tolerance):
    """Outputs and gradients of both functions agree, relative to the largest entry."""
    found, expected = ours(*inputs), plain(*(x.detach().double().requires_grad_() for x in inputs))
    grad = leaf(*found.shape, seed=9).detach()
    wanted = [x.detach().double().requires_grad_() for x in inputs]
    expected = plain(*wanted)
    expected_grads = torch.autograd.grad(expected, wanted, grad)
    found_grads = torch.autograd.grad(found, inputs, grad.to(found.dtype))
    for one, other in zip([found, *found_grads], [expected, *expected_grads], strict=True):
        assert (one.double() - other).abs().max() <= tolerance * other.abs().max().clamp(min=1e-30)


TOLERANCES = [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=str)
class TestAgainstPlain:
    def test_rms_norm(self, dtype, tolerance):
        inputs = leaf(3, 7, 16, dtype=dtype), leaf(16, dtype=dtype, seed=1)
        assert_same(
            lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: plain_rms_norm(x, w, 1e-5), inputs, tolerance
        )

    def test_rms_norm_of_a_head(self, dtype, tolerance):
        inputs = leaf(2, 5, 3, 8, dtype=dtype), leaf(8, dtype=dtype, seed=1)
        assert_same(
            lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: plain_rms_norm(x, w, 1e-6), inputs, tolerance
        )

    def test_swiglu(self, dtype, tolerance):
        inputs = leaf(3, 7, 16, dtype=dtype), leaf(3, 7, 16, dtype=dtype, seed=1)
        assert_same(swiglu, lambda gate, up: F.silu(gate) * up, inputs, tolerance)

    def test_rotate(self, dtype, tolerance):
        angle = torch.outer(
            torch.arange(7, dtype=torch.float64), torch.tensor([1.0, 0.1, 0.01, 0.001]).double()
        )
        cos, sin = angle.cos(), angle.sin()
        tables = [table.to(kernels.wide(dtype)) for table in (cos, sin)]
        assert_same(
            lambda x: rotate(x, *tables),
            lambda x: plain_rotate(x, cos, sin),
            (leaf(2, 7, 3, 8, dtype=dtype),),
            tolerance,
        )

    def test_causal_attention_with_grouped_heads(self, dtype, tolerance):
        inputs = [leaf(2, heads, 9, 16, dtype=dtype, seed=heads + i) for i, heads in enumerate((4, 2, 2))]

        def plain(q, k, v):
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            score = (q @ k.mT / 4).masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
            return score.softmax(-1) @ v

        assert_same(causal_attention, plain, inputs, tolerance)

    def test_cross_entropy_with_masked_targets(self, dtype, tolerance):
        target = torch.tensor([[3, MASKED, 0, 10], [MASKED, 5, 5, MASKED]])

        def ours(logits):  # the backward pass overwrites what it was given: hand it a copy
            return cross_entropy(logits.clone(), target, 5.0)[0]

        def plain(logits):
            return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / 5

        assert_same(ours, plain, (leaf(2, 4, 11, dtype=dtype),), tolerance)


def test_gradcheck():
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (leaf(4, 6), leaf(6, seed=1)))
    assert torch.autograd.gradcheck(swiglu, (leaf(4, 6), leaf(4, 6, seed=1)))
    tables = leaf(5, 4, seed=1).detach(), leaf(5, 4, seed=2).detach()
    assert torch.autograd.gradcheck(lambda x: rotate(x, *tables), (leaf(1, 5, 2, 8),))


def test_loss_of_masked_tokens_alone_is_zero_and_pulls_nothing():
    logits = leaf(3, 5)
    total = cross_entropy(logits.clone(), torch.full((3,), MASKED), 1.0)
    (grad,) = torch.autograd.grad(total, logits)
    assert total.item() == 0.0
    assert not grad.any()


def test_loss_of_parts_sums_to_the_loss_of_the_whole():
    logits, target = leaf(8, 5), torch.tensor([1, MASKED, 2, MASKED, MASKED, 3, 4, 0])
    parts = [cross_entropy(logits[rows].clone(), target[rows], 5.0) for rows in (slice(0, 3), slice(3, 8))]
    assert sum(parts).item() == pytest.approx(F.cross_entropy(logits, target).item(), rel=1e-14)


def test_large_logits_stay_finite():
    logits = leaf(3, 5, dtype=torch.float32).detach().mul(1e4).requires_grad_()
    total = cross_entropy(logits.clone(), torch.tensor([0, 1, 2]), 3.0)
    assert torch.isfinite(total)
    assert torch.isfinite(torch.autograd.grad(total, logits)[0]).all()


def test_masked_means_the_same_in_data_and_loss():
    assert dataset.MASKED == loss.MASKED == torch.nn.CrossEntropyLoss().ignore_index


SMALL = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "initializer_range": 0.2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
CONFIGS = {
    "llama": {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama_bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_equal_transformers(name):
    transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    config = {**SMALL, **CONFIGS[name]}
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():  # biases and norms start at 0 and 1, where an omission would not show
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    spec = model_from_config(config, name)
    ours = Transformer(spec)
    shared = {key: value for key, value in theirs.state_dict().items() if "rotary" not in key}
    ours.load_state_dict(shared, strict=True)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, spec.vocab, (2, 64)))
    found, expected = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    targets = tokens.roll(-1, 1)
    cross_entropy(found, targets, float(targets.numel())).backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    gradients = dict(theirs.named_parameters())
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for key, parameter in ours.named_parameters():
        difference = (parameter.grad - gradients[key].grad).abs().max() / gradients[key].grad.abs().max()
        assert difference < 1e-3, key
