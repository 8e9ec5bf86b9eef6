"""Where groups of ranks lie: against walks over the ranks, and the layouts that frameworks print."""

from itertools import chain, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.axes import MESH_ORDER, MESH_ORDERS
from shardwright.cluster import Level, Link, cluster_of
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.plan.collectives import collective_time
from shardwright.plan.placement import AS_THEY_STAND, Placement, groups_of, placements
from shardwright.plan.table import LayoutTable, table_of

AXES = (*MESH_ORDER, "ep", "etp", "expert_shard")
JOINED = ("dp_shard+cp", "dp_replicate+dp_shard", "dp_replicate+dp_shard+cp")


def place(degree, stride=1, blocks=1, jump=1) -> Placement:
    return Placement(*(np.array([part]) for part in (degree, stride, blocks, jump)))


def layout(order=0, pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1, ep=1, etp=1) -> Layout:
    """A layout of those degrees; what else its degrees ask for is filled in."""
    return Layout(
        pp=pp,
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        cp=cp,
        tp=tp,
        ep=ep,
        etp=etp,
        sp=tp > 1,
        order=MESH_ORDERS[order],
        zero_stage=1 if dp_shard * cp > 1 else 0,
        schedule="1F1B" if pp > 1 else "none",
        stage_layers=(1,) * pp if pp > 1 else (),
        cp_kind="ring" if cp > 1 else "none",
    )


LAYOUTS = st.builds(
    lambda order, pp, dp_replicate, dp_shard, cp, tp, experts: layout(
        order, pp, dp_replicate, dp_shard, cp, tp, *experts(dp_shard, cp, tp)
    ),
    st.integers(0, 2),
    *(st.sampled_from(degrees) for degrees in ((1, 2, 3), (1, 2), (1, 2, 3, 4), (1, 2, 3), (1, 2, 4))),
    st.tuples(st.integers(0, 50), st.booleans()).map(
        lambda draw: lambda dp_shard, cp, tp: experts_of(dp_shard, cp, tp, *draw)
    ),
)


def experts_of(dp_shard, cp, tp, which, split) -> tuple[int, int]:
    etp = tp if split else 1
    whole = dp_shard * cp * tp // etp
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    return divisors[which % len(divisors)], etp


@pytest.mark.parametrize(
    ("ranks", "per_node", "degree", "stride", "fewest", "nodes"),
    [
        (8, 8, 8, 1, 8, 1),  # dp_shard on one node
        (64, 8, 64, 1, 8, 8),
        (64, 8, 4, 1, 4, 1),
        (64, 8, 16, 1, 8, 2),
        (64, 8, 8, 8, 1, 8),  # dp_replicate over nodes: dp_shard fills each
        (64, 8, 16, 4, 2, 8),  # two members in a node
        (64, 8, 4, 16, 1, 4),
        (8, 8, 2, 4, 2, 1),
        (4, 2, 2, 2, 1, 2),
        (12, 8, 12, 1, 4, 2),  # the last node is not full
        (24, 8, 3, 1, 1, 2),  # ranks 6, 7 on one node, 8 on the next
        (24, 8, 6, 1, 2, 2),
        (24, 8, 12, 1, 4, 2),
        (24, 8, 8, 3, 2, 3),
        (16, 1, 16, 1, 1, 16),
        (8, 8, 1, 1, 1, 1),
    ],
)
def test_where_groups_lie(ranks, per_node, degree, stride, fewest, nodes):
    found = place(degree, stride).spread(per_node, ranks)
    assert [part.tolist() for part in found] == [[fewest], [nodes]]
    where = cluster_of("h100-sxm", ranks, per_node)
    assert place(degree, stride).link(where) == ["network" if nodes > 1 else "node"]


@settings(deadline=None, max_examples=100)
@given(
    inner=st.integers(1, 8),
    stride=st.integers(1, 8),
    blocks=st.integers(1, 4),
    between=st.integers(1, 3),
    outer=st.integers(1, 3),
    domain=st.integers(1, 64),
)
def test_spread_counts_every_group(inner, stride, blocks, between, outer, domain):
    """Against a walk over the ranks of every group."""
    jump = inner * stride * between
    whole = jump * blocks if blocks > 1 else inner * stride
    ranks = whole * outer
    fewest, most = place(inner * blocks, stride, blocks, jump).spread(domain, ranks)
    own = [block * jump + member * stride for block in range(blocks) for member in range(inner)]
    groups = [
        [start + part * inner * stride + offset + each for each in own]
        for start in range(0, ranks, whole)
        for part in range(between if blocks > 1 else 1)
        for offset in range(stride)
    ]
    assert sorted(chain(*groups)) == list(range(ranks))
    lie = [[rank // domain for rank in group] for group in groups]
    assert fewest[0] == min(group.count(each) for group in lie for each in group)
    assert most[0] == max(len(set(group)) for group in lie)


def test_tp_8_on_two_nodes_stays_inside_each():
    """World 16 on 2 nodes, mesh order pp, dp, tp: pytorch/torchtitan issue 286."""
    found = groups_of("tp", layout(dp_shard=2, tp=8))
    assert found == [tuple(range(8)), tuple(range(8, 16))]
    assert not any(group[0] // 8 != group[-1] // 8 for group in found)


def test_orders_of_megatron():
    """World 16, t=2, p=4: order tp-cp-ep-dp-pp, and --use-tp-pp-dp-mapping (Megatron-LM parallel_state)."""
    default, flag = (layout(order, pp=4, dp_shard=2, tp=2) for order in (0, 2))
    assert groups_of("pp", default)[0] == (0, 4, 8, 12)
    assert groups_of("dp_shard", default)[0] == (0, 2)
    assert groups_of("pp", flag)[0] == (0, 2, 4, 6)
    assert groups_of("dp_shard", flag)[0] == (0, 8)
    assert groups_of("tp", default) == groups_of("tp", flag)


def test_experts_are_cut_out_of_the_innermost_ranks():
    dense = {"dp_shard": 2, "cp": 2, "tp": 2}
    assert groups_of("ep", layout(**dense, ep=4)) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert groups_of("expert_shard", layout(**dense, ep=4))[1] == (1, 5)
    split = layout(**dense, ep=2, etp=2)
    assert groups_of("etp", split) == groups_of("tp", split)
    assert groups_of("ep", split) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups_of("expert_shard", split)[0] == (0, 4)


def test_experts_with_a_pipeline_between_dp_shard_and_cp():
    """tp x cp = 4 ranks follow one another, those of dp_shard are 8 apart."""
    between = layout(2, pp=2, dp_shard=2, cp=2, tp=2, ep=8)
    assert groups_of("ep", between) == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]
    assert groups_of("dp_shard+cp", between)[0] == (0, 2, 8, 10)
    some = between.model_copy(update={"ep": 2})
    assert groups_of("ep", some)[0] == (0, 1)
    assert groups_of("expert_shard", some)[0] == (0, 2, 8, 10)


def test_an_unknown_axis_names_the_nearest():
    with pytest.raises(LayoutError, match=r"axis 'dp_shrad' is unknown \(did you mean 'dp_shard'\?\)"):
        groups_of("dp_shrad", layout(tp=8))


@settings(deadline=None, max_examples=60)
@given(each=LAYOUTS)
def test_groups_of_an_axis_share_out_the_ranks(each):
    degree = {axis: getattr(each, axis) for axis in AXES}
    degree["dp_shard+cp"], degree["dp_replicate+dp_shard"] = each.shard, each.dp
    degree["dp_replicate+dp_shard+cp"] = each.dp * each.cp
    for axis in (*AXES, *JOINED):
        found = groups_of(axis, each)
        assert sorted(chain(*found)) == list(range(each.ranks))
        assert {len(group) for group in found} == {degree[axis]}


@settings(deadline=None, max_examples=60)
@given(each=LAYOUTS)
def test_a_group_has_one_index_on_every_other_axis(each):
    """Ranks by their indices in a mesh of that order: a group varies along its own axes alone. ep, etp and
    expert_shard meet in one rank each, inside the ranks they are cut out of."""
    mesh = np.arange(each.ranks).reshape([getattr(each, axis) for axis in each.order])
    index = {int(mesh[at]): dict(zip(each.order, at, strict=True)) for at in np.ndindex(mesh.shape)}
    for axis in (*MESH_ORDER, *JOINED):
        for group in groups_of(axis, each):
            others = [[index[rank][a] for a in MESH_ORDER if a not in axis.split("+")] for rank in group]
            assert all(other == others[0] for other in others)
    dense = {rank: (index[rank]["pp"], index[rank]["dp_replicate"]) for rank in index}
    ep, etp, shard = (
        {r: set(g) for g in groups_of(a, each) for r in g} for a in ("ep", "etp", "expert_shard")
    )
    for rank in index:
        reached = {third for one in ep[rank] for two in etp[one] for third in shard[two]}
        assert len(reached) == each.ep * each.etp * each.expert_shard
        assert {dense[other] for other in reached} == {dense[rank]}


@settings(deadline=None, max_examples=5)
@given(rows=st.lists(LAYOUTS, min_size=2, max_size=8), per_node=st.sampled_from([1, 2, 3, 4, 8]))
def test_a_column_of_layouts_is_each_alone(rows, per_node):
    """Whether their orders differ or not."""
    where = cluster_of("h100-sxm", 1728, per_node)
    together = placements(table_of([each.model_copy(update={"stage_layers": ()}) for each in rows], 12))
    for row, each in enumerate(rows):
        alone = placements(table_of([each.model_copy(update={"stage_layers": ()})], 12))
        for axis in (*AXES, *JOINED):
            column, single = (
                collective_time("all_reduce", 1e6, 1, places[axis].route(where))
                for places in (together, alone)
            )
            assert np.broadcast_to(column, len(rows))[row] == single[0]


def test_columns_of_a_grid_broadcast_and_stay_small():
    columns = {field: np.ones((1, 1, 1), np.int64) for field in LayoutTable._fields} | {
        "order": np.zeros(1, int)
    }
    columns["tp"], columns["cp"] = np.array([1, 2, 4]).reshape(3, 1, 1), np.array([1, 2]).reshape(2, 1)
    columns["dp_shard"] = np.array([1, 2, 4, 8])
    places = placements(LayoutTable(**columns))
    assert places["tp"].degree.shape == (3, 1, 1)
    assert places["cp"].route(cluster_of("h100-sxm", 64)).degree.shape == (3, 2, 1)
    shard = places["dp_shard+cp"].route(cluster_of("h100-sxm", 64))
    times = collective_time("all_gather", 1e9, 1, shard)
    assert times.shape == (3, 2, 4)
    for (i, tp), (j, cp), (k, dp) in product(
        enumerate([1, 2, 4]), enumerate([1, 2]), enumerate([1, 2, 4, 8])
    ):
        route = place(cp * dp, tp).route(cluster_of("h100-sxm", 64))
        assert times[i, j, k] == collective_time("all_gather", 1e9, 1, route)[0]


def test_long_columns_are_priced_once_for_every_placement():
    rows = AS_THEY_STAND + 1
    degree, stride = np.resize([2, 3, 8], rows), np.resize([1, 8, 1, 1, 5], rows)
    where = cluster_of("h100-sxm", 1024)
    column = Placement(degree, stride).route(where)
    assert column.degree.size < 20
    times = collective_time("all_reduce", 1e9, 1, column)
    assert times.shape == (rows,)
    for row in range(15):
        alone = place(degree[row], stride[row]).route(where)
        assert times[row] == collective_time("all_reduce", 1e9, 1, alone)[0]
    names = Placement(degree, stride).link(where)
    assert names[:3] == [place(d, s).link(where)[0] for d, s in zip(degree[:3], stride[:3], strict=True)]
    assert len(names) == rows


def test_the_name_of_the_outermost_level_that_a_group_needs():
    link = Link(bandwidth=1e9, latency=0)
    names = {"pair": 2, "node": 8, "rack": 32, "spine": 128}
    where = cluster_of("h100-sxm", 128).model_copy(
        update={"levels": tuple(Level(name=name, ranks=ranks, link=link) for name, ranks in names.items())}
    )
    degree, stride = np.array([2, 2, 8, 4, 4, 1]), np.array([1, 2, 1, 8, 32, 1])
    assert Placement(degree, stride).link(where) == ["pair", "node", "node", "rack", "spine", "pair"]
