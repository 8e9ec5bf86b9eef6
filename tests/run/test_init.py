"""Initial weights are the same numbers in every layout, made without the whole tensor."""

import math

import pytest
import torch
from gloo import BASE, MODELS, job_of, layout_of, whole

from shardwright.run import init
from shardwright.run.init import fill, initialise
from shardwright.run.launch import run_ranks
from shardwright.run.mesh import build_mesh
from shardwright.run.model import Transformer, build_model
from shardwright.run.step import parallel_model

CPU = torch.device("cpu")
NAME = "model.layers.0.mlp.up_proj.weight"


def whole_model(spec, seed=5, dtype=torch.float32):
    model = build_model(spec, dtype)
    initialise(model, seed, CPU)
    return model


def rows_of(shape, first, last, monkeypatch, name=NAME):
    """Rows ``first`` to ``last`` of a parameter as a rank that holds only them fills them."""
    part = torch.empty(last - first, *shape[1:])
    parameter = torch.empty(shape, device="meta")
    monkeypatch.setattr(init, "local_part", lambda _: (part, [range(first, last), range(shape[1])]))
    fill(parameter, name, BASE, seed=5)
    return part


@pytest.mark.parametrize("block_numel", [1, 40, 2**22], ids=["row", "blocks", "one_block"])
@pytest.mark.parametrize("shards", [1, 2, 3, 5, 11, 16])
def test_shards_make_up_the_whole(shards, block_numel, monkeypatch):
    monkeypatch.setattr(
        init, "BLOCK_NUMEL", block_numel
    )  # 40: blocks of 5 rows, which no shard of 2 or 3 meets
    shape = (11, 8)
    expected = torch.empty(shape)
    fill(expected, NAME, BASE, seed=5)
    chunk = math.ceil(11 / shards)
    bounds = [(min(rank * chunk, 11), min((rank + 1) * chunk, 11)) for rank in range(shards)]
    parts = [rows_of(shape, first, last, monkeypatch) for first, last in bounds]
    assert torch.equal(torch.cat(parts), expected)
    assert len(expected.unique()) == expected.numel()  # no block repeats another


def test_a_rank_makes_no_more_than_its_rows_and_the_blocks_they_touch(monkeypatch):
    made = []
    empty = torch.empty

    def counted(shape, *args, **kwargs):
        made.append(math.prod(shape))
        return empty(shape, *args, **kwargs)

    part, parameter = torch.empty(10, 8), torch.empty(1000, 8, device="meta")
    monkeypatch.setattr(init, "BLOCK_NUMEL", 40)
    monkeypatch.setattr(init, "local_part", lambda _: (part, [range(503, 513), range(8)]))
    monkeypatch.setattr(torch, "empty", counted)
    fill(parameter, NAME, BASE, seed=0)
    assert made == [40, 40, 40]


def sharded_weights(spec, layout, precision):
    model = parallel_model(spec, job_of(8, precision), layout, build_mesh(layout, "cpu"))
    initialise(model, 5, CPU)
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("model", ["base", "tied", "uneven_vocab", "rows_below_shards"])
@pytest.mark.parametrize("path", [(1, 4, 3), (2, 2, 1), (2, 1, 0)], ids=str)
def test_real_shards_equal_the_whole_to_the_bit(model, path):
    spec = MODELS[model]
    expected = {name: whole(parameter) for name, parameter in whole_model(spec).named_parameters()}
    for found in run_ranks(sharded_weights, path[0] * path[1], spec, layout_of(*path, 1), "fp32"):
        assert found.keys() == expected.keys()
        assert all((found[name] == value).all() for name, value in expected.items())


def test_weights_of_fp64_are_those_of_fp32():
    narrow, broad = whole_model(BASE), whole_model(BASE, dtype=torch.float64)
    for one, other in zip(narrow.parameters(), broad.parameters(), strict=True):
        assert torch.equal(one.double(), other)


def test_every_parameter_has_its_distribution():
    spec = BASE.model_copy(
        update={"hidden": 256, "ffn": 512, "vocab": 1000, "qkv_bias": True, "qk_norm": True}
    )
    model = whole_model(spec)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all()
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = spec.initializer_range / (math.sqrt(2 * spec.layers) if residual else 1)
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
            assert parameter.mean().item() == pytest.approx(0, abs=std / 50), name


def test_seed_and_name_change_the_weights_and_tied_tensors_stay_one():
    one, other = whole_model(BASE), whole_model(BASE, seed=6)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    layers = one.model.layers
    assert not torch.equal(layers["0"].mlp.up_proj.weight, layers["1"].mlp.up_proj.weight)
    tied = whole_model(MODELS["tied"])
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert isinstance(tied, Transformer)
