"""Files of evidence made by tests: watchdog lines and flight recorder dumps of made-up ranks."""

import json
import pickle

from shardwright.doctor.diagnose import diagnose

WORLD = "0"


def watchdog(rank, seq, operation, numel=1, clock="03:04:11.061727749", waited=600096):
    """torch 2.5's line of a timeout."""
    work = (
        f"WorkNCCL(SeqNum={seq}, OpType={operation}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000)"
    )
    return (
        f"[rank{rank}]:[E810 {clock} ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog caught "
        "collective operation "
        f"timeout: {work} ran for {waited} milliseconds before timing out.\n"
    )


def entry(seq, operation="nccl:all_reduce", state="completed", size=100, group=("0", "default_pg"), **other):
    """One entry of a recorder, as torch 2.5 writes it."""
    return {
        "frames": [
            {"name": "all_reduce", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 1},
            {"name": "train_step", "filename": "train.py", "line": 20},
        ],
        "record_id": seq,
        "pg_id": int(group[0]),
        "process_group": group,
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": operation,
        "time_created_ns": 1786844121207040384 + seq,
        "input_sizes": [[size]],
        "input_dtypes": ["Float"],
        "output_sizes": [[size]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 1 if state == "completed" else None,
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": False,
    } | other


def peer(operation, state="scheduled"):
    """A send or receive."""
    return entry(0, operation, state, is_p2p=True, p2p_seq_id=3)


def write_dump(folder, rank, entries, status, groups=None, *, as_json=False):
    """A rank's dump, by torch's name; ``status``: {group: (enqueued, completed)}; ``groups``: {group:
    (desc, ranks)}."""
    document = {
        "version": "2.5",
        "pg_config": {
            name: {"name": name, "desc": desc, "ranks": str(ranks)}
            for name, (desc, ranks) in (groups or {WORLD: ("default_pg", [0, 1, 2, 3])}).items()
        },
        "pg_status": {
            name: {
                "last_enqueued_collective": enqueued,
                "last_started_collective": -1,
                "last_completed_collective": completed,
            }
            for name, (enqueued, completed) in status.items()
        },
        "entries": entries,
    }
    if as_json:
        (folder / f"dump_rank{rank}.json").write_text(json.dumps(document))
    else:
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(document))


def found(*paths, **options):
    """Findings of files."""
    return diagnose([str(path) for path in paths], **options)["findings"]


def causes(*paths, **options):
    """Their causes with certainty and ranks."""
    return [(f["cause"], f["certainty"], f["ranks"]) for f in found(*paths, **options)]
