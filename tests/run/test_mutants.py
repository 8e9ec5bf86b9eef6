"""Faults planted in the runtime: a row of the parity matrix catches each, most of them by gradients alone."""

import pytest
import torch
from matrix import ONE, ONE_BY_ONE, RING, ROWS, SHARD, ZBV, Differences, compared, row

from shardwright.errors import RunFailedError
from shardwright.run import blocks, dp, model, pp, step
from shardwright.run.loss import MASKED


def divided(monkeypatch):
    """Gradients are means over the shard axis."""
    original = dp.apply_dp

    def apply_dp(model, mesh, **options):
        original(model, mesh, **options)
        for module in dp.sharded_modules(model):
            module.set_gradient_divide_factor(float(mesh.shard.size()))

    monkeypatch.setattr(step, "apply_dp", apply_dp)


def shares_left(monkeypatch):
    """A router under tp keeps this rank's part of its gradient."""
    original = step.sum_shares

    def sum_shares(model):
        model.shares = [
            share._replace(names=tuple(name for name in share.names if ".mlp.gate." not in name))
            for share in model.shares
        ]
        original(model)

    monkeypatch.setattr(step, "sum_shares", sum_shares)


def empty_rows_seen(monkeypatch):
    """Rows that see no key of a block keep the log-sum-exp 0 that the kernel gives them."""

    class Torch:
        def __getattr__(self, name):
            return (lambda mask, found, _: found) if name == "where" else getattr(torch, name)

    monkeypatch.setattr(blocks, "torch", Torch())


def resharded(monkeypatch):
    """Parameters are resharded after the forward pass of a zero-bubble pipeline."""
    original = dp.fully_shard
    monkeypatch.setattr(
        dp, "fully_shard", lambda *args, **kwargs: original(*args, **kwargs | {"reshard_after_forward": True})
    )


def untied(monkeypatch):
    """The two copies of a tied matrix keep their own gradients."""
    monkeypatch.setattr(step, "sum_tied", lambda *_: None)


def counted_twice(monkeypatch):
    """The norm counts both copies of a tied matrix."""
    monkeypatch.setattr(step, "tied_copies", lambda model: (pp.tied_copies(model)[0], None))


def mean_of_microbatches(monkeypatch):
    """Each microbatch is divided by its own unmasked tokens."""
    original = model.cross_entropy

    def cross_entropy(logits, target, tokens):
        return original(logits, target, (target != MASKED).sum().item())

    monkeypatch.setattr(model, "cross_entropy", cross_entropy)


def layer_dropped(monkeypatch):
    """Nothing of a last stage's last layer is added to the residual stream."""
    original = model.Decoder.__init__

    def init(self, spec, part):
        original(self, spec, part)
        if not part.first:
            last = self.layers[max(self.layers, key=int)]
            forward = last.forward
            last.forward = lambda x, places: x + 0 * forward(x, places)

    monkeypatch.setattr(model.Decoder, "__init__", init)


MUTANTS = {  # how to plant it, a row that catches it, and what it is seen by
    "gradients divided by dp": (divided, row(**SHARD), "gradient"),
    "router's partial sum skipped": (shares_left, row("experts", ep=2, tp=2, sp=True), "ranks differ"),
    "log-sum-exp 0 on empty rows": (empty_rows_seen, row(**RING, packed=True), "loss"),
    "resharding under zero-bubble": (resharded, row("deep", pp=2, **ZBV, **ONE), "there is no gradient"),
    "tied copies not summed": (untied, row("deep_tied", pp=2, **ONE_BY_ONE), "ranks differ"),
    "norm counted twice": (counted_twice, row("deep_tied", pp=2, **ONE_BY_ONE), "norm"),
    "mean per microbatch": (mean_of_microbatches, row(dp_replicate=2), "gradient"),
    "one layer dropped": (layer_dropped, row("deep", pp=2, **ONE_BY_ONE), "loss"),
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    plant, case, sign = MUTANTS[fault]
    assert case in ROWS or compared(case).ok  # without the fault; of rows test_parity.py says so
    plant(monkeypatch)
    if sign in Differences._fields:
        found = compared(case)
        assert not found.ok
        assert getattr(found, sign) > 1e-4, found
    else:
        with pytest.raises((AssertionError, RunFailedError), match=sign):
            compared(case)
