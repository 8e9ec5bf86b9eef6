"""Units that a pipeline rank has: how many of each kind."""

from collections.abc import Mapping

import numpy as np

from shardwright.model import ModelSpec
from shardwright.plan.params import BLOCK, EMBEDDING, HEAD
from shardwright.plan.shards import EXPERT_BLOCK, EXPERTS, TIED
from shardwright.plan.stages import Stage, most_expert_blocks, slowest_blocks
from shardwright.plan.table import Floats, LayoutTable


def held_units(table: LayoutTable, stage: Stage) -> Mapping[str, Floats]:
    """Units of each kind on one rank."""
    with_experts = stage.expert_blocks
    return {
        EMBEDDING: stage.embedding,
        TIED: np.where(table.pp > 1, stage.embedding, 0.0),
        BLOCK: stage.blocks - with_experts,
        EXPERT_BLOCK: with_experts,
        EXPERTS: with_experts,
        HEAD: stage.head,
    }


def busiest_units(model: ModelSpec, table: LayoutTable) -> Mapping[str, Floats]:
    """Units of each kind on the rank with most layers; of a pipeline's ends it is taken to be the last."""
    alone = np.where(table.pp > 1, 0.0, 1.0)
    with_experts = most_expert_blocks(table, model)
    return {
        EMBEDDING: alone,
        TIED: np.zeros_like(alone),
        BLOCK: np.maximum(slowest_blocks(table, model) - with_experts, 0),
        EXPERT_BLOCK: with_experts,
        EXPERTS: with_experts,
        HEAD: np.ones_like(alone),
    }
