"""Sequences of operations: played by hand, and against the peak of real blocks with norms elsewhere."""

import pytest
import torch
from test_activations import Births
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan import tape
from shardwright.plan.activations import block_activations
from shardwright.plan.tape import Op, played
from shardwright.run.attention import Attention
from shardwright.run.feed_forward import MLP
from shardwright.run.layer_norm import RMSNorm
from shardwright.run.rotary import Places, rotary_tables

SOURCE = {"x": 10.0}


@pytest.fixture
def moments_of(monkeypatch):
    """Bytes for each token at every moment, also at those that another exceeds; by name, the last of each."""
    monkeypatch.setattr(tape, "worst", tuple)

    def found(steps, recompute="none"):
        return {moment.name: moment.token_bytes for moment in played(steps, SOURCE)[recompute].moments}

    return found


def matrix(name, read, made, size=10.0):
    """Keeps its input; its weight gradient is one byte."""
    return (Op(name, (read,), {made: size}, (read,), gradient=1.0),)


def test_a_chain_frees_as_it_goes(moments_of):
    """Kept x, a and b with the gradient of y; a second one is made, and one of each pair is freed."""
    steps = [matrix("first", "x", "a", 1), matrix("second", "a", "b", 2), matrix("third", "b", "y", 4)]
    activations = played(steps, SOURCE)["none"]
    assert activations.saved == {"x": 10, "a": 1, "b": 2}
    assert moments_of(steps) == {"third backward": 19, "second backward": 14, "first backward": 21}
    assert [moment.gradient_bytes for moment in activations.moments] == [1, 2, 3]


def test_recomputation_ends_at_the_last_tensor_that_is_needed(moments_of):
    """y is not made again; what follows is as if nothing had been recomputed."""
    steps = [matrix("first", "x", "a", 1), matrix("second", "a", "b", 2), matrix("third", "b", "y", 400)]
    activations = played(steps, SOURCE)["full"]
    assert activations.saved == SOURCE
    found = moments_of(steps, "full")
    assert found.pop("recompute") == 413  # x, a, b and the gradient of y
    assert found == moments_of(steps)


def test_a_gradient_that_others_share_is_not_added_to_in_place(moments_of):
    """y = x + a(x) + b(x): while the sum's gradient is still that of a, what comes to x needs a buffer."""
    residual = (Op("sum", ("x", "a", "b"), {"y": 10.0}, adds=True),)
    steps = [matrix("a", "x", "a"), matrix("b", "x", "b"), residual]
    found = moments_of(steps)
    assert found["b backward"] == 40  # x, the sum's gradient, b's of x, and their own sum
    assert found["a backward"] == 40  # now in place: x, two gradients of x, the sum's


def test_what_lives_while_an_operation_works_is_in_its_moment_alone(moments_of):
    trade = (Op("trade", ("a",), {"b": 1.0}, around=7.0, around_backward=5.0),)
    steps = [matrix("first", "x", "a", 1), trade, matrix("last", "b", "y", 1)]
    found = moments_of(steps, "full")
    assert found["recompute"] == 10 + 1 + 1 + 1 + 7  # x, the gradient of y, a, b
    assert found["last backward"] == 13


def test_moments_that_another_exceeds_are_left_out():
    """Of the chain above none but the last, which has most of all; not so if more is freed before."""
    steps = [matrix("first", "x", "a", 1), matrix("second", "a", "b", 2), matrix("third", "b", "y", 40)]
    assert [moment.name for moment in played(steps, SOURCE)["none"].moments] == [
        "third backward",
        "first backward",
    ]


def test_an_output_that_stays_is_kept_by_selective_recomputation_alone():
    (op,) = matrix("first", "x", "a", 1)
    steps = [(op._replace(stays=("a",)),), (Op("scale", ("a",), {"b": 3.0}),), matrix("last", "b", "y")]
    assert played(steps, SOURCE)["selective"].saved == {"x": 10, "a": 1}
    assert played(steps, SOURCE)["none"].saved == {"x": 10, "b": 3}


# Real blocks


BATCH, SEQ = 2, 100
PLACES = {
    **{place: {"norm_placement": place} for place in ("pre", "post", "sandwich", "residual")},
    "parallel": {"parallel_block": True},
    "shared": {"parallel_block": True, "shared_norm": True},
}


class Placed(nn.Module):
    """Branches of the runtime with norms at another place."""

    def __init__(self, spec: ModelSpec, place: str) -> None:
        super().__init__()
        self.attention, self.mlp, self.place = Attention(spec), MLP(spec), place
        self.norms = nn.ModuleList(RMSNorm(spec.hidden, spec.norm_eps) for _ in range(4))

    def forward(self, x, places):
        first, second, third, fourth = self.norms
        match self.place:
            case "pre":
                x = x + self.attention(first(x), places)
                return x + self.mlp(second(x))
            case "post":
                x = x + third(self.attention(x, places))
                return x + fourth(self.mlp(x))
            case "sandwich":
                x = x + third(self.attention(first(x), places))
                return x + fourth(self.mlp(second(x)))
            case "residual":
                x = first(x + self.attention(x, places))
                return second(x + self.mlp(x))
            case "parallel":
                return x + self.attention(first(x), places) + self.mlp(second(x))
        normed = first(x)
        return x + self.attention(normed, places) + self.mlp(normed)


class Peak(Births):
    peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.nbytes)
        return out


def peak_of(block: nn.Module, places, x, recompute: str) -> int:
    """Most bytes alive in a block's backward pass: its input and weight gradients with them, weights not."""
    gradient = torch.randn(x.shape)
    with Peak([*block.parameters(), *places[:2], x, gradient]) as births:
        if recompute == "full":
            out = checkpoint(block, x, places, use_reentrant=False, preserve_rng_state=False)
        else:
            out = block(x, places)
        out = out * 1.0  # so that the gradient that the block gets is autograd's alone
        births.peak = 0
        out.backward(gradient)
    return births.peak + x.nbytes - out.nbytes


def predicted_peak(spec: ModelSpec, job: Job, recompute: str) -> tuple[float, str]:
    """The highest moment, of BATCH x SEQ tokens, and its name."""
    moments = block_activations(spec, job, recompute).moments
    return max((BATCH * SEQ * m.token_bytes + m.gradient_bytes, m.name) for m in moments)


def inputs_of(block: nn.Module, spec: ModelSpec, turned: int):
    """Rotary tables for heads of ``turned`` numbers and a block's input, its weights made."""
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.1)
    frequencies = spec.model_copy(update={"head_size": turned})
    places = Places(*rotary_tables(frequencies, torch.arange(SEQ), torch.float32), None)
    return places, torch.randn(BATCH, SEQ, spec.hidden, requires_grad=True)


JOB = Job(seq=SEQ, global_batch=BATCH, precision="fp32")
TINY = ModelSpec(
    name="tiny", model_type="llama", layers=1, hidden=32, ffn=96, heads=4, kv_heads=2, head_size=16, vocab=64
)


@pytest.mark.parametrize("ffn", [96, 8])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("place", PLACES)
def test_peak_of_a_real_block(place, recompute, ffn):
    """To the byte, whether it is in the feed-forward network or, where that is narrow, in attention."""
    spec = TINY.model_copy(update={"ffn": ffn, **PLACES[place]})
    block = Placed(spec, place)
    measured = peak_of(block, *inputs_of(block, spec, spec.head_size), recompute)
    predicted, moment = predicted_peak(spec, JOB, recompute)
    assert predicted == measured
    assert moment == ("attention backward" if ffn == 8 else "SwiGLU backward")


def test_weights_alone_free_what_they_needed_and_leave_the_rest():
    """x, a and b are kept with the gradients of a, b and y; the gate between keeps its input, which no weight
    needs: that stays to the end. Counted by hand."""
    gate = (Op("gate", ("a",), {"b": 2.0}, ("a",)),)
    steps = [matrix("first", "x", "a", 1), gate, matrix("second", "b", "y", 4)]
    apart = played(steps, SOURCE)["none"].apart
    assert apart.waits == 1 + 4  # gradients of a and y
    assert [moment.token_bytes for moment in apart.weights] == [10 + 1 + 2 + 5, 1 + 2 + 4]
    assert [moment.gradient_bytes for moment in apart.weights] == [1, 2]
    assert apart.left == 1  # a


def test_recomputed_blocks_make_it_again_for_the_weights():
    """All is there again at the first gradient; the block's input stays, as what recomputes needs it."""
    gate = (Op("gate", ("a",), {"b": 2.0}, ("a",)),)
    steps = [matrix("first", "x", "a", 1), gate, matrix("second", "b", "y", 4)]
    apart = played(steps, SOURCE)["full"].apart
    assert apart.weights[0].token_bytes == 10 + 1 + 2 + 5
    assert apart.left == 10 + 1
