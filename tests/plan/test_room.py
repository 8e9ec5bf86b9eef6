"""What layouts take at least: never more than they do, or a search would leave out what fits."""

import numpy as np
import pytest
from spaces import EXPERTS, MIXED, SPEC, small_cluster

from shardwright.job import Job
from shardwright.plan.cells import layouts_of_cells, lined_up
from shardwright.plan.evaluate import (
    at_their_pace,
    evaluate,
    least,
    of_microbatches,
    whole_step,
    with_shares,
)
from shardwright.plan.memory import device_memory
from shardwright.plan.room import least_room
from shardwright.plan.space import search_space
from shardwright.program import Program

TIED = SPEC.model_copy(update={"layers": 4, "tied_embeddings": True})
GiB = 2**30


OWN = Program()
LATE = Program(expert_launches=2.0, host_factor=4.0, chunk_wait=2e-5)
SPACES = {
    "plain": (4, SPEC, "bf16", OWN), "tied": (8, TIED, "bf16", OWN), "experts": (4, EXPERTS, "fp32", OWN),
    "mixed": (4, MIXED, "bf16", OWN), "late": (4, MIXED, "bf16", LATE),
}  # fmt: skip


@pytest.fixture(scope="module", params=SPACES)
def grids(request):
    """Model, job, cluster and the grids of a space, timed, with a device that has pools for its streams."""
    ranks, model, precision, program = SPACES[request.param]
    job = Job(seq=64, global_batch=4, precision=precision, program=program)
    cluster = small_cluster(ranks, 6 * GiB)
    timed = [least(model, job, cluster, grid) for grid in search_space(model, job, ranks).grids]
    return model, job, cluster, [with_shares(model, job, cluster, grid) for grid in timed]


def test_no_layout_takes_less_than_the_least(grids):
    model, job, cluster, timed = grids
    tight = 0
    for grid in timed:
        table = grid.grid.table
        real = device_memory(model, job, cluster.device, table)
        room = least_room(model, job, cluster.device, table, grid.ranks)
        real = np.where(grid.grid.layouts, real, np.inf)
        slack = 1 + 1e-12  # sums in another order
        assert (np.where(table.offload & 1, *reversed(room.resting)) <= real * slack).all()
        assert (room.whole <= real * slack).all()
        tight += int((room.whole > 0.5 * real).sum())
    assert tight > 100


def test_no_step_takes_less_than_its_floor(grids):
    """Of the busiest rank and its schedule without hops, which is soon known of all cells; in most pipelines
    it is near what microbatches take."""
    model, job, _, timed = grids
    near = 0
    for grid in timed:
        floor = np.broadcast_to(at_their_pace(model, grid).inside, layouts_of_cells(grid.grid).shape)
        real = of_microbatches(model, job, grid).inside
        assert (floor <= real * (1 + 1e-12)).all()
        near += int((floor > 0.9 * real).sum())
    assert near > 1000


def test_cells_in_a_line_are_what_they_were_in_their_grid(grids):
    model, job, cluster, timed = grids
    for grid in timed[:2]:
        layouts = layouts_of_cells(grid.grid)
        assert layouts.sum() == grid.grid.ordered_rows
        there = (np.arange(layouts.size).reshape(layouts.shape) % 13 == 0) & (layouts > 0)
        (cells,) = lined_up(grid, there, np.zeros((1,) * there.ndim))
        some = of_microbatches(model, job, cells.timed)
        some = cells.with_ranks(whole_step(model, job, cluster, cells.with_data(some)))
        whole = whole_step(model, job, cluster, of_microbatches(model, job, grid))
        expected, found = (
            {
                row: (device, seconds)
                for part in evaluate(model, job, cluster, each)
                for row, device, seconds in zip(
                    zip(*part.grid.table.take(np.flatnonzero(part.grid.layouts)), strict=True),
                    part.device[part.grid.layouts], part.seconds[part.grid.layouts], strict=True,
                )
            }
            for each in (whole, some)
        )  # fmt: skip
        assert len(found) == layouts[there].sum() > 0
        for row, numbers in found.items():
            assert numbers == pytest.approx(expected[row], rel=1e-12)
