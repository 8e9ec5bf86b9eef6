"""What ranks leave in the run folder when a run fails: what ``shardwright doctor`` reads.

flight-rank<n>       the collectives a rank has called, as torch's flight recorder dumps them
state-rank<n>.json   its process groups, its Python stack, and its error if it had one
crash-rank<n>.txt    its Python stack where it died in C++ code, which no Python code can tell
failures.json        how ranks ended, in order, as the parent of local ranks saw it
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, MutableMapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

FLIGHT_ENTRIES = 2000
"""Collectives that the flight recorder of a rank keeps: some steps' worth, less than 1 MB."""

FLIGHT_PREFIX, STATE_PREFIX, CRASH_PREFIX = "flight-rank", "state-rank", "crash-rank"
"""Starts of file names in the run folder; the rank follows."""

FAILURES = "failures.json"

MOST_FRAMES = 40


def record_collectives(
    device: torch.device, folder: Path | None, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Turn the flight recorder on, NCCL's with a dump on a timeout; what the user has set stays.

    Torch reads the variables, by these or older names, when the process group is made. Without ``folder``
    NCCL's dumps go where torch puts them, and nothing is recorded of gloo, which dumps only when asked.
    """
    if device.type != "cuda" and folder is None:
        return
    settings = [(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), str(FLIGHT_ENTRIES))]
    if device.type == "cuda":
        settings.append((("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"))
        if folder is not None:
            dump = str(folder / FLIGHT_PREFIX)
            settings.append((("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), dump))
    for names, value in settings:
        if not any(name in environment for name in names):
            environment[names[0]] = value


def keep_crash_stack(folder: Path, rank: int) -> None:
    """Have the interpreter write the stack of a rank that dies of SIGABRT, SIGSEGV, SIGBUS or SIGFPE."""
    if folder.is_dir():
        faulthandler.enable((folder / f"{CRASH_PREFIX}{rank}.txt").open("wb"), all_threads=True)


def drop_crash_stack(folder: Path | None, rank: int) -> None:
    """Remove the file of ``keep_crash_stack`` of a rank that did not die that way."""
    path = None if folder is None else folder / f"{CRASH_PREFIX}{rank}.txt"
    if path is not None and path.is_file() and path.stat().st_size == 0:
        faulthandler.disable()
        path.unlink()


def leave(folder: Path | None, error: BaseException | None = None) -> None:
    """Write this rank's flight recorder and state. Faults are dropped: the run's own error is what counts."""
    if folder is None or not folder.is_dir() or not dist.is_initialized():
        return
    rank = dist.get_rank()
    with contextlib.suppress(OSError, RuntimeError):
        (folder / f"{STATE_PREFIX}{rank}.json").write_text(
            json.dumps(_state(rank, error), indent=1) + "\n", encoding="utf-8"
        )
        if dist.get_backend() == "gloo":  # NCCL's watchdog dumps its own
            dump = _distributed_c10d._dump_fr_trace(True, True, False)
            (folder / f"{FLIGHT_PREFIX}{rank}").write_bytes(dump)


def _state(rank: int, error: BaseException | None) -> dict[str, Any]:
    stack = _frames_of(error) if error is not None else _frames_of_main()
    return {
        "rank": rank,
        "world_size": dist.get_world_size(),
        "time": time.time(),
        "groups": _groups(),
        "in_collective": any("distributed" in frame and "/run/" not in frame for frame in stack[:6]),
        "error": None if error is None else {"kind": type(error).__name__, "message": str(error)[:2000]},
        "stack": stack,
    }


def _groups() -> dict[str, dict[str, Any]]:
    """Process groups of this rank by the names that the flight recorder has, with their global ranks."""
    world = distributed_c10d._world
    return {
        str(name): {
            "ranks": sorted(world.pg_group_ranks.get(group, {})),
            "description": str(getattr(group, "group_desc", "")),
        }
        for group, name in world.pg_names.items()
    }


def _frames_of(error: BaseException) -> list[str]:
    """Frames of an error, innermost first."""
    while error.__cause__ is not None:
        error = error.__cause__
    found = traceback.extract_tb(error.__traceback__)
    return [_frame(each.name, each.filename, each.lineno) for each in reversed(found)][:MOST_FRAMES]


def _frames_of_main() -> list[str]:
    """Frames of the main thread, innermost first."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    found = []
    while frame is not None and len(found) < MOST_FRAMES:
        found.append(_frame(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found


def _frame(name: str, file: str, line: int | None) -> str:
    return f"{name} at {file}:{line}"


def leave_when_asked(control: Connection, folder: Path) -> None:
    """Start a thread that leaves this rank's state when the parent asks, and answers when it has."""

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                control.recv()
                leave(folder)
                control.send(True)

    threading.Thread(target=watch, daemon=True).start()


def ask_all(controls: Sequence[Connection], patience_s: float, wait: Callable[..., list[Any]]) -> None:
    """Ask ranks that still live for their state, and give them ``patience_s`` to write it."""
    asked = []
    for control in controls:
        with contextlib.suppress(OSError, ValueError):
            control.send(True)
            asked.append(control)
    deadline = time.monotonic() + patience_s
    while asked and (left := deadline - time.monotonic()) > 0:
        ready = wait(asked, left)
        for control in ready:
            with contextlib.suppress(EOFError, OSError):
                control.recv()
            asked.remove(control)


def write_failures(folder: Path | None, failures: Sequence[Any], returned: Sequence[int]) -> None:
    """Keep how ranks ended; ``failures``: dictionaries with rank, time, kind, message, detail, echo;
    ``returned``: ranks that were through before the others failed."""
    if folder is None or not folder.is_dir():
        return
    document = {"failures": list(failures), "returned": sorted(returned)}
    with contextlib.suppress(OSError):
        (folder / FAILURES).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
