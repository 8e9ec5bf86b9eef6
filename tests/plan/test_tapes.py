"""Blocks that differ in amounts alone, played once: the same as each by itself."""

import pytest

from shardwright.job import Job
from shardwright.layout import RECOMPUTE_KINDS
from shardwright.model import preset
from shardwright.plan.activations import Split, activations_of, block_activations
from shardwright.plan.block_ops import Rank
from shardwright.plan.block_steps import block_steps
from shardwright.plan.tape import Op, played
from shardwright.plan.tapes import played_together

SPLITS = [
    Split(),
    *(Split(tp, sp) for tp in (2, 4, 8) for sp in (False, True)),
    *(Split(2, True, cp, kind) for cp in (2, 4) for kind in ("ring", "all_gather", "ulysses")),
    *(Split(2, True, ep=ep, etp=etp) for ep, etp in ((8, 1), (4, 2), (8, 2))),
]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-2-9b", "gpt2-xl", "mixtral-8x7b", "deepseek-v3"])
def test_splits_played_together_are_those_played_alone(name):
    model = preset(name)
    for precision in ("bf16", "fp32"):
        job = Job(seq=4096, global_batch=8, precision=precision)
        for kind in model.block_kinds:
            ranks = [Rank(model, job, split) for split in SPLITS]
            blocks = [(block_steps(rank, kind), {"input": rank.residual}) for rank in ranks]
            for together, (steps, source) in zip(played_together(blocks), blocks, strict=True):
                for recompute, alone in played(steps, source).items():
                    found = together.ways[recompute]
                    assert (found.saved, found.moments) == (alone.saved, alone.moments)
                    assert found.apart == alone.apart


def columns_of(moments, saved=0.0):
    return [(tokens - saved, made, fresh) for _, tokens, made, fresh in moments]


def repeated(column, moments):
    """Whether a column has these moments, the last of them up to its end."""
    return column.tolist() == [list(each) for each in moments + moments[-1:] * (len(column) - len(moments))]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "gpt-oss-20b"])
def test_columns_of_a_block_are_the_numbers_of_each_way(name):
    """Of splits asked for at once, of some again in another order, and of one by itself."""
    model = preset(name)
    job = Job(seq=4096, global_batch=8)
    for splits in (SPLITS, SPLITS[7:2:-1], SPLITS[4:5]):
        for kind in model.block_kinds:
            ways = activations_of(model, job, tuple(splits), kind)
            assert len(ways.kinds) == 3 * len(splits)
            for place, each in enumerate(ways.kinds):
                recompute = RECOMPUTE_KINDS[place % 3]
                alone = block_activations(model, job, recompute, splits[place // 3], kind)
                assert (each.saved, each.moments, each.apart) == (alone.saved, alone.moments, alone.apart)
                saved, apart = alone.saved_bytes, alone.apart
                assert ways.saved[place] == saved
                assert repeated(ways.moments[place], columns_of(alone.moments))
                assert ways.apart[place].tolist() == [apart.most - saved, apart.waits, apart.left]
                assert repeated(ways.weights[place], columns_of(apart.weights, saved))


def test_what_differs_in_more_than_amounts_is_played_apart():
    """One keeps its output, the other its input; a third makes gradients of weights besides."""
    chains = [
        [(Op("a", ("x",), {"y": 2.0}, keeps=("y",)),)],
        [(Op("a", ("x",), {"y": 2.0}, keeps=("x",)),)],
        [(Op("a", ("x",), {"y": 3.0}, keeps=("x",), gradient=1.0),)],
        [(Op("a", ("x",), {"y": 5.0}, keeps=("x",), gradient=4.0),)],
    ]
    found = played_together([(steps, {"x": 10.0}) for steps in chains])
    assert [dict(each.ways["none"].saved) for each in found] == [{"y": 2}, {"x": 10}, {"x": 10}, {"x": 10}]
    assert [each.ways["none"].moments[-1].gradient_bytes for each in found] == [0, 0, 1, 4]
