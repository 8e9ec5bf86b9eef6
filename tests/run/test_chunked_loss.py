"""The loss in parts is the loss: same value, same gradients, a fraction of the memory."""

import weakref

import pytest
import torch
from gloo import (
    MODELS,
    RaggedBatches,
    gradient_difference,
    job_of,
    parallel_steps,
    plain_steps,
    relative,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.layout import Layout
from shardwright.run.chunked_loss import ChunkedLoss, Vocabulary, parts
from shardwright.run.launch import run_ranks
from shardwright.run.loss import MASKED, cross_entropy

LAYOUTS = {
    "alone": {},
    "shard 3": {"dp_shard": 3, "zero_stage": 3},
    "stage 2": {"dp_shard": 2, "zero_stage": 2},
    "tp": {"tp": 2},
    "tp 3 x sp": {"tp": 3, "sp": True},
    "tp x sp x shard": {"tp": 2, "sp": True, "dp_shard": 2, "zero_stage": 3},
}


def model_for(name, layout):
    heads = {"heads": 6, "kv_heads": 3, "head_size": 8} if layout.tp == 3 else {}
    return MODELS[name].model_copy(update=heads)


@pytest.mark.parametrize("model", ["base", "tied", "uneven_vocab"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_fp64_equals_one_process(name, model):
    """48 tokens a microbatch in 5 parts: the last is smaller."""
    layout = Layout(loss_chunks=5, micro_batch=2, microbatches=2, **LAYOUTS[name])
    spec = model_for(model, layout)
    job = job_of(layout.dp * layout.micro_batch * layout.microbatches)
    batches = RaggedBatches(spec.vocab, job.seq, empty=(1,))
    found = run_ranks(parallel_steps, layout.ranks, spec, job, layout, batches, timeout_s=60)[0]
    expected = plain_steps(spec, job, batches)
    assert relative(found.losses, expected.losses) < 1e-9
    assert relative(found.norms, expected.norms) < 1e-8
    difference, parameter = gradient_difference(found, expected)
    assert difference < 1e-9, parameter


@pytest.mark.parametrize(("tokens", "chunks"), [(48, 5), (7, 3), (3, 8), (1, 1), (16, 4)])
def test_parts_cover_all_tokens_in_order(tokens, chunks):
    found = parts(tokens, chunks)
    assert len(found) <= chunks
    assert [token for part in found for token in range(part.start, part.stop)] == list(range(tokens))
    assert max(part.stop - part.start for part in found) == -(-tokens // chunks)


class Peak(TorchDispatchMode):
    """Most bytes alive at once of the storages made inside."""

    def __init__(self):
        super().__init__()
        self.held, self.peak, self.alive = 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and id(storage) not in self.alive:
                self.alive[id(storage)] = weakref.ref(storage, self._died(id(storage), storage.nbytes()))
                self.held += storage.nbytes()
                self.peak = max(self.peak, self.held)
        return out

    def _died(self, key, nbytes):
        def died(_):
            del self.alive[key]
            self.held -= nbytes

        return died


def head_inputs(tokens, hidden, vocab, dtype):
    torch.manual_seed(0)
    x_NE = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    weight_VE = torch.randn(vocab, hidden, dtype=dtype).mul_(0.1).requires_grad_()
    target_N = torch.randint(0, vocab, (tokens,)).masked_fill_(torch.rand(tokens) < 0.3, MASKED)
    return x_NE, weight_VE, target_N


def loss_and_gradients(chunks, x_NE, weight_VE, target_N):
    x_NE.grad = weight_VE.grad = None
    with Peak() as peak:
        if chunks == 1:
            loss = cross_entropy(torch.nn.functional.linear(x_NE, weight_VE), target_N, 100.0)
        else:
            loss = ChunkedLoss(chunks, Vocabulary())(x_NE, weight_VE, target_N, 100.0)
        loss.backward()
    return peak.peak, loss.detach(), x_NE.grad, weight_VE.grad


def test_a_tenth_of_the_memory_at_a_vocabulary_of_128k():
    """Gradients included. Plain: 512 x 131072 logits; 32 parts leave 16 rows of them."""
    inputs = head_inputs(512, 16, 131072, torch.float32)
    whole, *expected = loss_and_gradients(1, *inputs)
    chunked, *found = loss_and_gradients(32, *inputs)
    assert whole > 512 * 131072 * 4
    assert chunked < whole / 10
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()


def test_inputs_and_weights_apart():
    """As a zero-bubble schedule asks: two backward passes, each for a part of the gradients."""
    x_NE, weight_VE, target_N = head_inputs(30, 8, 17, torch.float64)
    loss = cross_entropy(torch.nn.functional.linear(x_NE, weight_VE), target_N, 7.0)
    expected = torch.autograd.grad(loss, (x_NE, weight_VE))
    loss = ChunkedLoss(4, Vocabulary())(x_NE, weight_VE, target_N, 7.0)
    (of_x,) = torch.autograd.grad(loss, x_NE, retain_graph=True)
    (of_weight,) = torch.autograd.grad(loss, weight_VE)
    torch.testing.assert_close((of_x, of_weight), expected, rtol=0, atol=1e-14)
