"""Attention of one rank against a dense softmax, whichever way its blocks are computed; what it keeps."""

import numpy as np
import pytest
import torch
from attention import CASES, SEQ, cases_of_rank, tensors, worst_difference

from shardwright.run import blocks, pieces
from shardwright.run.attend import CausalAttention
from shardwright.run.launch import run_ranks


@pytest.fixture(params=["whole_masks", "sliced_masks", "no_kernel"])
def _way(request, monkeypatch):
    """Masks of all rows and of few at once; scores written out, few rows at once."""
    if request.param != "whole_masks":
        monkeypatch.setattr(pieces, "MASK_ROWS", 5)
    if request.param == "no_kernel":
        monkeypatch.setattr(blocks, "_fused", lambda *_: False)
        monkeypatch.setattr(blocks, "SCORE_BYTES", 5000)


def whole_attention(case):
    (q, k, v, grad), document = tensors(case)
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    out = CausalAttention()(q, k, v, document, scale=case.scale, window=case.window)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    return np.arange(SEQ), [tensor.detach().double().numpy() for tensor in (out, *grads)]


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", CASES)
def test_one_rank_equals_a_dense_softmax(name):
    assert worst_difference([whole_attention(CASES[name])], CASES[name]) < 1e-13


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("kind", ["ring", "all_gather"])
def test_ranks_agree_whichever_way_a_block_is_computed(kind):
    chosen = [CASES[name] for name in ("gqa", "documents", "narrow_values", "window_in_documents")]
    ranks = run_ranks(cases_of_rank, 2, kind, chosen)
    for case, parts in zip(chosen, zip(*ranks, strict=True), strict=True):
        assert worst_difference(parts, case) < 1e-13


def test_a_query_without_keys_weighs_nothing():
    """A flash kernel says 0 for the log-sum-exp of such a row, as if it had found one key of score 0."""
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    allowed = torch.ones(1, 4, 4, dtype=torch.bool)
    allowed[:, 2] = False
    out, lse = blocks.block_forward(q, k, v, 1.0, False, allowed)
    assert lse[:, :, 2].eq(-torch.inf).all()
    assert not out[:, :, 2].any()
    assert torch.isfinite(lse[:, :, [0, 1, 3]]).all()


@pytest.mark.parametrize("name", ["gqa", "narrow_values", "documents"])
def test_saved_for_backward(name):
    """q, k, v, the output and a log-sum-exp a row, at their own sizes: no mask, no padding."""
    case = CASES[name]
    (q, k, v, _), document = tensors(case)
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda _: None):
        out = CausalAttention()(q, k, v, document)
    rows = case.batch * case.heads * SEQ
    expected = sum(tensor.nbytes for tensor in (q, k, v)) + rows * (case.value_size + 1) * 8
    expected += 0 if document is None else document.nbytes
    assert sum({tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in saved}.values()) == expected
    assert out.shape[-1] == case.value_size
