"""Profiler traces: time that communication costs, ranks that come last, traces larger than a piece of
memory."""

import json

import pytest
from evidence_files import found

from shardwright.doctor import trace as trace_module
from shardwright.doctor.trace import read_trace

MS = 1000.0  # in the unit of traces, us


def event(name, start, length, category="kernel", **args):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start * MS,
        "dur": length * MS,
        "pid": 0,
        "tid": 7,
        "args": args,
    }


def write(path, rank, events):
    document = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2},
        "traceEvents": [{"ph": "M", "name": "process_name", "args": {"name": "python"}}, *events],
    }
    path.write_text(json.dumps(document, indent=1))


STEP = [
    event("gemm", 0, 10),
    event(
        "ncclDevKernel_AllGather_RING_LL",
        5,
        10,
        **{"Process Group Description": "dp_shard", "Collective name": "_allgather_base"},
    ),
    event("gemm", 15, 5),
    event(
        "ncclDevKernel_AllReduce_Sum",
        20,
        6,
        **{"Process Group Description": "tp", "Collective name": "allreduce"},
    ),
]


@pytest.mark.parametrize("buffer", [64, 4 << 20])
def test_time_is_divided_by_what_hides_what(tmp_path, monkeypatch, buffer):
    """26 ms: 15 of products, of which 5 hide the first half of a gather; 11 of communication in the open."""
    monkeypatch.setattr(trace_module, "BUFFER", buffer)
    write(tmp_path / "trace.json", 1, STEP)
    with (tmp_path / "trace.json").open("rb") as stream:
        trace = read_trace("trace.json", stream)
    assert (trace.rank, trace.world) == (1, 2)
    assert trace.window == pytest.approx(0.026)
    assert trace.compute == pytest.approx(0.015)
    assert trace.communication == pytest.approx(0.016)
    assert trace.exposed == pytest.approx(0.011)
    assert trace.exposed_by == pytest.approx({"dp_shard _allgather_base": 0.005, "tp allreduce": 0.006})


def test_exposed_communication_is_told_by_axis(tmp_path):
    write(tmp_path / "trace.json", 1, STEP)
    (finding,) = found(tmp_path / "trace.json")
    assert (finding["kind"], finding["cause"]) == ("slow", "exposed_communication")
    assert finding["summary"].startswith("42% of the traced time")
    assert "tp allreduce 6.0 ms, dp_shard _allgather_base 5.0 ms" in finding["summary"]


def test_the_rank_that_waits_least_is_the_straggler(tmp_path):
    for rank in range(4):
        busy = 14 if rank == 2 else 10
        events = [event("gemm", 0, busy), event("ncclDevKernel_AllReduce", busy, 15 - busy)]
        write(tmp_path / f"trace-rank{rank}.json", rank, events)
    stragglers = [f for f in found(tmp_path) if f["cause"] == "straggler"]
    assert [finding["ranks"] for finding in stragglers] == [[2]]


def test_a_data_loader_that_is_waited_for(tmp_path):
    events = [
        event("gemm", 0, 10),
        event("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 3, "user_annotation"),
    ]
    write(tmp_path / "trace.json", 0, events)
    assert [finding["cause"] for finding in found(tmp_path / "trace.json")] == ["input_bound"]


def test_a_trace_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path):
    write(tmp_path / "trace.json", 1, STEP)
    text = (tmp_path / "trace.json").read_text()
    (tmp_path / "trace.json").write_text(text[: text.rindex("AllReduce")])
    with (tmp_path / "trace.json").open("rb") as stream:
        assert read_trace("trace.json", stream).window == pytest.approx(0.020)
