"""Small models for large layouts: every rule that the large one kept holds, and what is split is there."""

import numpy as np
import pytest

from shardwright.check.shrink import shrunk_model
from shardwright.job import Job
from shardwright.layout import Layout, model_faults
from shardwright.model import preset, preset_names, unbuilt_reasons
from shardwright.plan.params import parameter_table

BUILT = [name for name in preset_names() if not unbuilt_reasons(preset(name))]


def even(layers, stages):
    return tuple(len(part) for part in np.array_split(np.arange(layers), stages))


@pytest.mark.parametrize("name", BUILT)
def test_layouts_that_split_the_model_split_the_small_one(name):
    model = preset(name)
    tried = 0
    for fields in (
        {"tp": 2, "sp": True},
        {"tp": 8, "sp": True},
        {"dp_shard": 8, "ep": 8, "zero_stage": 3},
        {"pp": 4, "schedule": "1F1B"},
    ):
        pp = fields.get("pp", 1)
        if model.moe is not None and "tp" in fields:
            fields["etp"] = fields["tp"]
        layout = Layout(**fields, stage_layers=even(model.layers, pp) if pp > 1 else ())
        if model_faults(layout, model, Job(seq=1024, global_batch=64)):
            continue
        tried += 1
        small = shrunk_model(model, (layout,), keep_vocab=False)
        own = layout.model_copy(update={"stage_layers": even(small.layers, pp) if pp > 1 else ()})
        assert not model_faults(own, small, Job(seq=128, global_batch=64))
        assert parameter_table(small).parameters < 2e7
        assert (small.heads, small.kv_heads, small.model_type) == (
            model.heads,
            model.kv_heads,
            model.model_type,
        )
        assert small.block_kinds == model.block_kinds
        if model.moe is not None:
            assert (small.moe.experts, small.moe.top_k) == (model.moe.experts, model.moe.top_k)
    assert tried


def test_a_small_model_stays_as_it_is_but_for_its_layers():
    model = preset("bytes-5m")
    small = shrunk_model(
        model, (Layout(), Layout(pp=3, schedule="1F1B", stage_layers=(2, 2, 2))), keep_vocab=True
    )
    assert (small.layers, small.vocab) == (3, model.vocab)
