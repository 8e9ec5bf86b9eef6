"""Processes that measure: children of one that only starts them and sees them end.

Under torchrun each of its ranks has one child; with --nproc this process has them all. A child that is
killed, stopped or aborts in a library's thread is so noticed by a process that goes on.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from shardwright.cluster import usable_cores
from shardwright.measure import link_rank
from shardwright.run.launch import die_with_parent


class Children:
    """Processes for ``ranks`` of ``world``; ``begin`` tells them where the store is."""

    def __init__(self, ranks: Sequence[int], world: int, device_type: str, beat_s: float) -> None:
        # a process that has counted its CUDA devices must not fork, and macOS libraries do not survive it
        fork = device_type == "cpu" and sys.platform != "darwin"
        context: Any = multiprocessing.get_context("fork" if fork else "spawn")
        self.processes: dict[int, BaseProcess] = {}
        self.pipes: dict[int, Connection] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="shardwright-"))
        for place, rank in enumerate(ranks):
            ours, theirs = context.Pipe()
            local = place if len(ranks) > 1 else int(os.environ.get("LOCAL_RANK", "0"))
            args = (theirs, rank, world, local, len(ranks), device_type, beat_s, str(self._stderr(rank)))
            process = context.Process(target=_child, args=args, daemon=False)
            process.start()
            theirs.close()
            self.processes[rank], self.pipes[rank] = process, ours

    def begin(self, host: str, port: int) -> None:
        """Have them connect to the store."""
        for pipe in self.pipes.values():
            with contextlib.suppress(OSError):  # it is dead, which ended() tells
                pipe.send((host, port))

    def ended(self) -> dict[int, str]:
        """How those ended that have."""
        return {
            rank: self._how(rank, process.exitcode)
            for rank, process in self.processes.items()
            if process.exitcode is not None
        }

    def wait(self, seconds: float) -> None:
        """Until one ends, or the time is up."""
        wait([each.sentinel for each in self.processes.values() if each.exitcode is None], seconds)

    def end(self) -> None:
        """None of them remains, stopped ones neither: what they measured is in the store."""
        for process in self.processes.values():
            process.kill()
        for rank, process in self.processes.items():
            process.join()
            self.pipes[rank].close()
            self._stderr(rank).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _stderr(self, rank: int) -> Path:
        return self.folder / f"stderr-{rank}"

    def _how(self, rank: int, code: int) -> str:
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        lines = self._stderr(rank).read_text(errors="replace").splitlines()
        last = f" ({lines[-1][:200]})" if lines else ""
        return f"its process ended with status {code}{last}"


def _child(
    pipe: Connection,
    rank: int,
    world: int,
    local: int,
    here: int,
    device_type: str,
    beat_s: float,
    stderr: str,
) -> None:
    """Body of a child; never returns."""
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has the parent's
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all: the conductor decides
        die_with_parent()
        with open(stderr, "wb") as file:
            os.dup2(file.fileno(), 2)
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
        device = torch.device(device_type)
        if device_type == "cuda":
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(max(1, usable_cores() // max(here, int(_local_world()))))
        host, port = pipe.recv()
        link_rank.serve(host, port, rank, device, beat_s)
        status = 0
    except (EOFError, OSError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}".partition("\n")[0], file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(status)  # no exit handlers: those of the parent are not this process's to run


def _local_world() -> str:
    return os.environ.get("LOCAL_WORLD_SIZE", "1")


@contextlib.contextmanager
def children(ranks: Sequence[int], world: int, device_type: str, beat_s: float) -> Iterator[Children]:
    """Children that are gone afterwards, whatever happened."""
    found = Children(ranks, world, device_type, beat_s)
    try:
        yield found
    finally:
        found.end()
