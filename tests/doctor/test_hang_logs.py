"""Hangs told from log lines alone: what broke first, who is silent, and when nobody may be named."""

import pytest
from evidence_files import causes, found, watchdog


def all_but(*absent, world=8, seq=10):
    return "".join(watchdog(rank, seq, "ALLREDUCE", 100) for rank in range(world) if rank not in absent)


XID = (
    "Aug 10 02:40:01 node07 kernel: [1.6] NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen "
    "off the bus.\n"
)
OOM = (
    "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 5 has a "
    "total capacity of "
    "79.11 GiB of which 1.07 GiB is free. Of the allocated memory 73.15 GiB is allocated by PyTorch, "
    "and 1.20 GiB is "
    "reserved by PyTorch but unallocated.\n"
)
TRACE = (
    '[rank2]: Traceback (most recent call last):\n[rank2]:   File "data.py", line 9, in load\n[rank2]: {}\n'
)
BUS = "[rank2]: RuntimeError: DataLoader worker (pid 123) is killed by signal: Bus error. It is possible\n"
ELASTIC = (
    "train.py FAILED\nRoot Cause (first observed failure):\n[0]:\n  time      : "
    "2026-08-10_03:05:11\n  host      : a\n"
    "  rank      : 3 (local_rank: 3)\n  exitcode  : {} (pid: 78)\n"
)

LOGS = {
    "a device fault before the first timeout": (XID + all_but(), ("device_fault", "certain", [])),
    "the same fault an hour after it is an echo": (
        all_but() + XID.replace("02:40:01", "04:40:01"),
        ("network_stall", "likely", []),
    ),
    "an exception of one rank": (
        TRACE.format("ValueError: bad record") + all_but(2),
        ("rank_failed", "certain", [2]),
    ),
    "data that ended early": (
        TRACE.format("StopIteration") + all_but(2),
        ("data_ended_early", "certain", [2]),
    ),
    "shared memory too small": (BUS + all_but(2), ("rank_died", "certain", [2])),
    "an echo blames nobody": (
        TRACE.format("RuntimeError: Connection closed by peer [10.0.0.1]:1") + all_but(),
        ("network_stall", "likely", []),
    ),
    "one rank of eight silent": (all_but(3), ("skipped_collective", "likely", [3])),
    "half of the ranks silent": (
        "world_size: 8\n" + all_but(0, 1, 2, 3),
        ("not_enough_ranks", "cannot_tell", []),
    ),
    "one rank behind": (
        "".join(watchdog(rank, 100 if rank == 2 else 101, "ALLREDUCE", 100) for rank in range(8)),
        ("lagging_rank", "likely", [2]),
    ),
    "rank 0 alone in another operation": (
        watchdog(0, 10, "_ALLGATHER_BASE", 100) + all_but(0),
        ("rank_guard", "likely", [0]),
    ),
    "neighbours in a pipeline": (
        "".join(watchdog(rank, 8, "RECV" if rank % 2 else "SEND", 8192) for rank in range(4)),
        ("not_enough_ranks", "cannot_tell", []),
    ),
    "a monitored barrier": (
        "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 30000 ms\n",
        ("skipped_collective", "certain", [1, 2]),
    ),
    "a rendezvous that is not complete": (
        "DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined.\n",
        ("not_all_ranks_started", "certain", []),
    ),
    "the first rank was never there": (
        "[rank1]: DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId "
        "from [0] via "
        "c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer\n",
        ("not_all_ranks_started", "certain", [0]),
    ),
    "killed": (ELASTIC.format(-9), ("rank_died", "certain", [3])),
    "the time limit": (
        "slurmstepd: error: *** JOB 1 ON n01 CANCELLED AT 2026-08-10T03:00:00 DUE TO TIME LIMIT ***\n"
        + all_but(),
        ("ended_by_scheduler", "certain", []),
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_log(tmp_path, name):
    text, expected = LOGS[name]
    path = tmp_path / "train.log"
    path.write_text(text)
    assert causes(path)[0] == expected


def test_out_of_memory_of_one_rank_comes_before_the_wait_of_the_others(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(OOM + all_but(5))
    kinds = {(f["kind"], f["cause"]): f["ranks"] for f in found(path)}
    assert kinds["hang", "rank_failed"] == [5]
    assert kinds["oom", "memory_unknown"] == [5]


def test_the_rank_that_the_launcher_blames_is_excused_if_it_only_waited(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(
        all_but(3)
        + ELASTIC.format(-6).replace("rank      : 3 (local_rank: 3)", "rank      : 7 (local_rank: 7)")
    )
    (finding,) = found(path)
    assert finding["ranks"] == [3]
    assert finding["actions"][0].startswith("leave rank 7 alone")


def test_the_group_rank_is_not_taken_for_the_global_one(tmp_path):
    """Ranks 4 and 5 are 0 and 1 of their group."""
    line = (
        "[rank{}]:[E810 03:04:11.07 ProcessGroupNCCL.cpp:2241] [PG ID 1 PG GUID 9(mesh_tp) Rank "
        "{}]  failure detected "
    )
    line += "by watchdog at work sequence id: 20 PG status: last enqueued work: {}, last completed work: 19\n"
    path = tmp_path / "train.log"
    path.write_text(
        watchdog(4, 20, "_ALLGATHER_BASE", 64)
        + line.format(4, 0, 22)
        + line.format(5, 1, 19).replace("at work sequence id: 20", "")
    )
    assert causes(path) == [("skipped_collective", "certain", [5])]


def test_lines_of_torch_without_rank_prefix_by_the_names_of_files(tmp_path):
    for rank in range(4):
        text = watchdog(rank, 10, "ALLREDUCE").replace(f"[rank{rank}]:", "").replace(f"[Rank {rank}]", "")
        (tmp_path / f"rank{rank}.log").write_text(text if rank != 1 else "nothing\n")
    (tmp_path / "launch.log").write_text("world size: 4\n")
    assert causes(tmp_path) == [("skipped_collective", "likely", [1])]


def test_an_nccl_log_of_all_ranks_names_the_one_that_stopped(tmp_path):
    lines = []
    for rank in range(4):
        head = f"node-a:{600 + rank}:7 [{rank}] NCCL INFO "
        lines.append(
            f"{head}ncclCommInitRank comm 0x{rank}a rank {rank} nranks 4 cudaDev {rank} - Init COMPLETE"
        )
        last = 0x139D if rank == 2 else 0x139E
        lines += [
            f"{head}AllReduce: opCount {count:x} sendbuff 0x1 recvbuff 0x1 count 77 datatype 7 op 0 "
            f"root 0 comm 0x{rank}a "
            "[nranks=4] stream 0x2"
            for count in range(0x1390, last + 1)
        ]
    path = tmp_path / "nccl.log"
    path.write_text("\n".join(lines) + "\n")
    assert causes(path) == [("skipped_collective", "likely", [2])]


def test_numbers_far_apart_in_lines_that_name_no_group_are_not_compared(tmp_path):
    """As in pytorch#118369: several groups of rank 0 and one of rank 7, by torch 2.1."""
    path = tmp_path / "train.log"
    path.write_text(
        "".join(
            watchdog(rank, seq, "ALLREDUCE") for rank, seq in [(0, 96120), (0, 96117), (0, 96125), (7, 64088)]
        )
    )
    ((_, certainty, ranks),) = causes(path)
    assert (certainty, ranks) == ("cannot_tell", [])


def test_tp_groups_by_the_hosts_that_ranks_really_run_on(tmp_path):
    """Ranks dealt out to two hosts in turn."""
    path = tmp_path / "nccl.log"
    path.write_text(
        "".join(
            f"node{rank % 2}:{600 + rank}:7 [{rank // 2}] NCCL INFO ncclCommInitRank comm 0x{rank}a "
            f"rank {rank} nranks 4 "
            f"cudaDev {rank // 2} - Init COMPLETE\n"
            for rank in range(4)
        )
    )
    (finding,) = found(path, given="tp=2 gpus_per_node=2 gpus=4")
    assert (finding["cause"], finding["certainty"]) == ("tp_across_nodes", "certain")
    assert "node0, node1" in finding["summary"]
    assert causes(path, given="tp=1 gpus_per_node=2 gpus=4") == []


REAL_FORMS = {
    "several forms of a group's rank": (
        "[rank4]:[E318 07:39:53.79 ProcessGroupNCCL.cpp:616] [Rank 4] Watchdog caught collective "
        "operation timeout: "
        "WorkNCCL(SeqNum=610, OpType=ALLGATHER, NumelIn=56320, NumelOut=112640, Timeout(ms)=600000) "
        "ran for 600086 "
        "milliseconds before timing out.\n"
        "[rank4]:[E318 07:39:53.79 ProcessGroupNCCL.cpp:1785] [PG ID 2 PG GUID 9 Rank 0] Exception "
        "(either an error or "
        "timeout) detected by watchdog at work: 610, last enqueued NCCL work: 616, last completed "
        "NCCL work: 609.\n"
        "[rank5]:[E318 07:39:53.79 ProcessGroupNCCL.cpp:1785] [PG ID 2 PG GUID 9 Rank 1] Exception "
        "(either an error or "
        "timeout) detected by watchdog at work: 609, last enqueued NCCL work: 609, last completed "
        "NCCL work: 609.\n",
        ("skipped_collective", "certain", [5]),
    ),
    "torch 1.12, shapes and no numbers": (
        "".join(
            f"[Rank {rank}] Caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, "
            f"TensorShape=[{8 if rank else 1}], "
            "Timeout(ms)=1800000) ran for 1801591 milliseconds before timing out.\n"
            for rank in range(4)
        ),
        ("size_mismatch", "likely", [0]),
    ),
    "two ranks on one device": (
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000\n",
        ("one_device_for_two_ranks", "certain", [0, 1]),
    ),
    "an echo and nothing else": (
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by "
        "peer [127.0.0.1]:38000\n",
        ("peer_lost", "cannot_tell", []),
    ),
    "no peer access": (
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'peer "
        "access is not supported "
        "between these two devices'\n",
        ("never_communicated", "likely", []),
    ),
    "the monitor's impatience after a timeout": (
        watchdog(2, 120049, "_ALLGATHER_BASE")
        + "[rank7]:[E626 05:14:36.39 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank "
        "7] ProcessGroupNCCL's "
        "watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.\n",
        ("one_rank_visible", "cannot_tell", []),
    ),
}


@pytest.mark.parametrize("name", REAL_FORMS)
def test_form(tmp_path, name):
    text, expected = REAL_FORMS[name]
    path = tmp_path / "train.log"
    path.write_text(text)
    assert causes(path) == [expected]
