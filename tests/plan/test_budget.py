"""The bandwidth budget: bytes by level of links by hand, and sums that are those of the step."""

import pytest
from test_explain import CLUSTER, DENSE, EVERY, JOB, MOE

from shardwright.cluster import Level, Link, cluster_of
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import Moe
from shardwright.plan.explain import accounts, plan_of

SIXTEEN = cluster_of("h100-sxm", 16, 8)


def budget(model, layout, cluster=CLUSTER, job=JOB):
    found = accounts(plan_of(model, job, cluster, layout))
    return found, {(row["link"], row["axis"]): row for row in found["budget"]}


@pytest.mark.parametrize(("model", "layout"), EVERY)
def test_the_budget_adds_up_to_the_step(model, layout):
    found, rows = budget(model, layout)
    assert sum(row["exposed_time"] for row in rows.values()) == pytest.approx(found["step"]["exposed"])
    links = {row["link"] for row in rows.values()} - {"host"}
    sent = sum(row["bytes"] for row in rows.values() if row["link"] in links)
    assert sent == pytest.approx(sum(flow["bytes"] for flow in found["traffic"]))
    for row in rows.values():
        assert row["busy_time"] == pytest.approx(row["hidden_time"] + row["exposed_time"])
        assert row["hidden_time"] >= 0
        assert row["share"] == pytest.approx(row["busy_time"] / found["step"]["time"])


def test_a_ring_over_two_nodes_leaves_each_once():
    """16 hops round, 2 of them between nodes of 8."""
    found, rows = budget(DENSE, Layout(dp_shard=16, zero_stage=3), SIXTEEN)
    sent = sum(flow["bytes"] for flow in found["traffic"])
    assert rows["network", "dp_shard"]["bytes"] == pytest.approx(sent * 2 / 16)
    assert rows["node", "dp_shard"]["bytes"] == pytest.approx(sent * 14 / 16)


def test_a_ring_between_nodes_uses_no_other_link():
    _, rows = budget(DENSE, Layout(dp_replicate=2, dp_shard=8, zero_stage=3), SIXTEEN)
    assert ("network", "dp_replicate") in rows
    assert ("node", "dp_replicate") not in rows
    assert ("network", "dp_shard") not in rows


def test_the_two_sends_of_a_pipeline_over_two_nodes():
    """4 stages on 2 nodes of 4 devices, 2 a node: of 3 hops one leaves the node. 2 sends a microbatch of
    1024 x 512 bf16; beside them two scalars in a closed ring of 4, half of whose hops leave it."""
    cluster = cluster_of("h100-sxm", 4, 2)
    layout = Layout(pp=4, schedule="1F1B", stage_layers=(2, 2, 2, 2), microbatches=16)
    _, rows = budget(DENSE, layout, cluster)
    scalars = 2 * 8 * 2 * 3 / 4
    sends = 2 * 16 * 1024 * 512 * 2
    assert rows["network", "pp"]["bytes"] == pytest.approx(sends / 3 + scalars / 2)
    assert rows["node", "pp"]["bytes"] == pytest.approx(2 * sends / 3 + scalars / 2)


def test_a_pipeline_of_chunks_sends_round_unless_its_stages_lie_in_a_v():
    """The same 4 ranks on 2 nodes: a loop leaves a node with 2 of 4 hops, a V with 1 of 3."""
    cluster = cluster_of("h100-sxm", 4, 2)
    shares = {}
    for schedule in ("Interleaved1F1B", "ZBVZeroBubble"):
        layout = Layout(pp=4, schedule=schedule, chunks=2, stage_layers=(1,) * 8, microbatches=16)
        _, rows = budget(DENSE, layout, cluster)
        sent = [rows[link, "pp"]["bytes"] for link in ("node", "network")]
        shares[schedule] = sent[1] / sum(sent)
    assert shares["Interleaved1F1B"] == pytest.approx(2 / 4)
    assert shares["ZBVZeroBubble"] == pytest.approx(1 / 3, rel=1e-5)


def test_tokens_trade_with_every_rank_as_it_lies():
    """Of 16 partners, itself among them, 7 in the node and 8 in the other: 4 all-to-alls a block of the 2
    copies of 1024 tokens of 512 bf16."""
    moe = MOE.model_copy(update={"moe": Moe(experts=16, top_k=2, ffn=256)})
    _, rows = budget(moe, Layout(dp_shard=16, ep=16, zero_stage=3), SIXTEEN)
    payload = 4 * 8 * 2 * 1024 * 512 * 2
    assert rows["node", "ep"]["bytes"] == pytest.approx(payload * 7 / 16, rel=3e-3)  # and their weights
    assert rows["network", "ep"]["bytes"] == pytest.approx(payload * 8 / 16, rel=3e-3)


def test_by_node_a_token_goes_to_each_node_once():
    """Its 2 experts of 16 lie on the other node, one or both, unless both are of its own 8: 8 x 7 / 240."""
    moe = MOE.model_copy(update={"moe": Moe(experts=16, top_k=2, ffn=256)})
    _, rows = budget(moe, Layout(dp_shard=16, ep=16, dispatch="by_node", zero_stage=3), SIXTEEN)
    tokens = 4 * 8 * 1024 * 512 * 2
    assert rows["network", "ep"]["bytes"] == pytest.approx(tokens * (1 - 8 * 7 / 16 / 15), rel=3e-3)


def test_trades_of_tokens_are_busy_as_long_as_they_are_exposed():
    """Nothing hides them, grouped by node or not, and the fullest rank is waited for."""
    for dispatch in ("all_to_all", "by_node"):
        layout = Layout(dp_shard=16, ep=8, dispatch=dispatch, zero_stage=3)
        found, _ = budget(MOE, layout, SIXTEEN)
        (trade,) = [flow for flow in found["traffic"] if flow["collective"] == "all_to_all"]
        assert trade["busy_time"] == pytest.approx(trade["exposed_time"])


def test_shards_of_experts_have_a_line_and_their_share_of_the_time():
    layout = Layout(dp_shard=8, ep=4, zero_stage=3, microbatches=2)
    found, rows = budget(MOE, layout)
    assert rows["network", "expert_shard"]["busy_time"] > 0
    assert 0 < found["step"]["exposed_by_axis"]["expert_shard"] < found["step"]["exposed"]


def test_levels_that_a_user_gives_have_their_own_lines():
    """8 ranks in pairs: a ring of 8 has 4 hops in pairs, 4 beyond."""
    links = [Link(bandwidth=bandwidth, latency=1e-6) for bandwidth in (100e9, 10e9)]
    levels = (Level(name="pair", ranks=2, link=links[0]), Level(name="switch", ranks=8, link=links[1]))
    cluster = CLUSTER.model_copy(update={"levels": levels, "gpus_per_node": 8})
    found, rows = budget(DENSE, Layout(dp_shard=8, zero_stage=3, microbatches=2), cluster)
    sent = sum(flow["bytes"] for flow in found["traffic"])
    assert rows["pair", "dp_shard"]["bytes"] == pytest.approx(sent / 2)
    assert rows["switch", "dp_shard"]["bytes"] == pytest.approx(sent / 2)
    assert rows["pair", "dp_shard"]["busy_time"] == pytest.approx(sent / 2 / 100e9)
    assert rows["pair", "dp_shard"]["exposed_time"] == 0  # behind the switch, which is slower
    assert rows["switch", "dp_shard"]["exposed_time"] == pytest.approx(found["step"]["exposed"])


def test_the_host_has_a_line_of_what_is_copied():
    """Gradients down and parameters up, 4 B each; saved tensors down and up, of each microbatch."""
    layout = Layout(dp_shard=8, zero_stage=3, microbatches=2, offload="optimizer")
    _, rows = budget(DENSE, layout)
    block = 512 * (512 + 256 + 256 + 512) + 3 * 512 * 1024 + 2 * 512
    assert rows["host", "host"]["bytes"] == (4 + 4) * (8 * block + 512 + 2 * 1000 * 512) / 8
    found, rows = budget(DENSE, layout.model_copy(update={"offload": "activations"}))
    saved = sum(found["activations"]["saved_by_block"].values())
    assert rows["host", "host"]["bytes"] == pytest.approx(2 * 2 * 8 * saved)


def test_one_rank_uses_no_link():
    _, rows = budget(
        DENSE, Layout(microbatches=16), cluster_of("h100-sxm", 1), Job(seq=1024, global_batch=16)
    )
    assert rows == {}
