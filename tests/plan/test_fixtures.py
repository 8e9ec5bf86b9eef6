"""Published numbers that no other test has, by their number in the collection of formulas' fixtures.

The others: 1 to 11 are in tests/test_model.py and test_families.py, 12 in test_families.py, 13 to 15 in
test_accounting.py, 16 in test_memory.py, 17 to 19 and 36 in test_other_runtimes.py, 20, 25, 27 to 31 in
test_compute.py and test_goodput.py, 21 to 24 in test_simulate.py, the rest of 26 and 33 in
test_collectives.py, the buffers of 37 in test_communicators.py. Nothing here has the buckets of 37, which
are DDP's: the runtime reduces by units.
"""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.cluster import Link, cluster_of
from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import preset
from shardwright.plan.attention import ring_share
from shardwright.plan.collectives import collective_time, ring_time
from shardwright.plan.context_traffic import traded_heads
from shardwright.plan.other_runtimes import zero3_sent_elements
from shardwright.plan.params import parameter_table
from shardwright.plan.placement import Placement
from shardwright.plan.table import table_of
from shardwright.plan.traffic import tp_rounds, traffic
from shardwright.units import GiB


def route_of(cluster, degree):
    return Placement(np.array([degree]), np.array([1])).route(cluster)


# 11: parameters


def test_buffers_make_671_026_419_200_of_deepseek_v3():
    """Fixture 11, DeepSeek-V3 README: 671B. A bias for each expert of 58 layers is no parameter but stored;
    so are they in transformers, on the meta device."""
    model = preset("deepseek-v3")
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3"))
    biases = sum(b.numel() for name, b in theirs.named_buffers() if name.endswith("correction_bias"))
    covered = sum(model.moe.covers(layer) for layer in range(model.layers))
    assert biases == covered * model.moe.experts == 14_848
    assert sum(p.numel() for p in theirs.parameters()) == parameter_table(model).parameters
    assert parameter_table(model).parameters + biases == 671_026_419_200


# 26 and 32: collectives


def test_wire_speed_of_four_nodes_of_eight():
    """Fixture 26 (stas00/ml-engineering network/README.md): 4 GiB reduced by 32 ranks in 22.05 ms are 36.52
    GB/s on each NIC, if phases inside a node cost nothing."""
    cluster = cluster_of("h100-sxm", 32)
    links = {"intra_link": Link(bandwidth=1e15, latency=0), "inter_link": Link(bandwidth=36.52e9, latency=0)}
    cluster = cluster.model_copy(update={"device": cluster.device.model_copy(update=links)})
    time = collective_time("all_reduce", 4 * GiB, 1, route_of(cluster, 32))[0]
    assert time == pytest.approx(22.05e-3, rel=1e-3)


def test_hops_of_nccl_on_eight_h100():
    """Fixture 32, NCCL 2.30.7 src/graph/tuning.cc: a ring all-reduce of Simple takes 56.0 us, 8.4 of them
    for its launch; of LL 15.0 and 6.6."""
    cluster = cluster_of("h100-sxm", 8)
    link, route = cluster.intra_link, route_of(cluster, 8)
    assert ring_time(0, 1, 2, route)[0] - link.start == pytest.approx(56.0e-6 - 8.4e-6)
    quick = cluster.device.model_copy(
        update={"intra_link": link.model_copy(update={"latency": link.small_latency})}
    )
    route = route_of(cluster.model_copy(update={"device": quick}), 8)
    assert ring_time(0, 1, 2, route)[0] - link.start == pytest.approx(15.0e-6 - 6.6e-6)


def test_switches_of_eight_h100_reach_476_gb_a_second():
    """Fixture 32, NVIDIA/nccl-tests issue 290: "476 GB/s ... expected range" of bus bandwidth at 8 GiB; the
    fit to all sizes (test_collectives.py) is 3 % high at its end."""
    time = collective_time("all_reduce", 8 * GiB, 1, route_of(cluster_of("h100-sxm", 8), 8))[0]
    assert 8 * GiB * 2 * 7 / 8 / time == pytest.approx(476e9, rel=0.04)


# 34: ratios of traffic


@pytest.mark.parametrize("degree", [2, 8, 32])
def test_ulysses_sends_4nh_over_p_and_tp_4nh(degree):
    """Fixture 34, DeepSpeed-Ulysses, arXiv:2309.14509: N tokens of h numbers, forward; what a
    rank gives to its all-to-alls, and the rounds of Megatron's sequence parallelism."""
    model = preset("llama-2-7b")
    tokens = 32768
    rows = table_of([Layout(cp=degree, cp_kind="ulysses", zero_stage=3), Layout(tp=degree, sp=True)], 32)
    traded = traded_heads(model, "bf16", rows, tokens / np.array([degree, 1]))[0] / 2
    assert traded == 4 * tokens * model.hidden / degree
    assert tp_rounds(rows).forward[1] == 4


def test_stage_3_sends_half_more_than_stage_2():
    """Fixture 34, arXiv:1910.02054, section 7: 3 of 2, of blocks in a precision that gathers and reduces
    alike."""
    model, job = (
        preset("llama-2-7b").model_copy(update={"vocab": 64}),
        Job(seq=4096, global_batch=8, precision="fp32"),
    )
    sent = [
        sum(float(flow.sent_bytes[0]) for flow in traffic(model, job, table_of([layout], model.layers)))
        for layout in (Layout(dp_shard=8, zero_stage=stage) for stage in (3, 2))
    ]
    assert sent[0] / sent[1] == pytest.approx(1.5, rel=1e-3)


def test_zero_plus_plus_sends_a_quarter():
    """Fixture 34, arXiv:2306.10209: 3 M to 0.75 M between nodes; each of its three parts by itself."""
    assert zero3_sent_elements() == 3
    assert zero3_sent_elements(8) == 2
    assert zero3_sent_elements(secondary_shards=True) == 2
    assert zero3_sent_elements(gradient_bits=4) == 2.25
    assert zero3_sent_elements(8, 4, secondary_shards=True) == 0.75


# 35: causal rings


def test_a_causal_ring_in_a_row_works_half_the_time():
    """Fixture 35, zhuzilin/ring-flash-attention README: 8/15 for 8 ranks, 52.1 and 53.9 % measured; zig-zag,
    which the planner takes, loses nothing."""
    assert ring_share(8, zigzag=False) == pytest.approx(8 / 15)
    for cp in (1, 2, 3, 16):
        assert ring_share(cp, zigzag=False) == pytest.approx(cp / (2 * cp - 1))
        assert ring_share(cp, zigzag=True) == 1
