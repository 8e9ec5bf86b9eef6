"""Ranks: started here as local processes, or joined to torchrun's; the world ends as one.

Local ranks are forked from a process that has imported torch (0.05 s for 8 ranks, against 15 s of imports by
torchrun) and meet over a file. A rank that fails ends all others, and its own error is what the caller sees.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from shardwright.cluster import usable_cores
from shardwright.errors import LayoutError, RunFailedError, ShardwrightError
from shardwright.run.last_words import (
    ask_all,
    drop_crash_stack,
    keep_crash_stack,
    leave,
    leave_when_asked,
    record_collectives,
    write_failures,
)
from shardwright.run.mesh import init_process_group
from shardwright.run.options import COLLECTIVE_TIMEOUT_S

LATER_ERRORS_S = 0.3
"""How long errors of other ranks are collected after the first, so that its echoes can be told from it."""

INTERRUPT_GRACE_S = 600.0
"""How long ranks may take to finish their step and write their checkpoint and results after Ctrl-C, of which
a second one ends them at once."""

TRACEBACK_LINES = 12
"""Last lines of a failed rank's traceback, or of what it wrote to stderr, that its error quotes."""

ECHOES = ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting", "Application timeout")
"""Parts of gloo's messages that mean "another rank went away or never came"."""

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")

LAST_WORDS_S = 5.0
"""How long ranks that still live may take, after the first failure, to write what they were doing."""


@dataclass(frozen=True)
class Failure:
    """How a rank ended that did not return: plain data, sent from rank to parent."""

    rank: int
    time: float  # seconds since the epoch
    kind: str  # class of the exception, or name of the signal
    message: str
    detail: str  # end of the traceback, or of stderr

    @property
    def echo(self) -> bool:
        """Whether this only reports that another rank went away."""
        return any(part in self.message for part in ECHOES)


def check_world(ranks: int, world: int, nodes: int = 1, option: str = "--nproc-per-node") -> None:
    """Refuse to start ``world`` processes for a layout of ``ranks``; call before any process group exists.

    Raises: LayoutError: naming the right value of ``option``.
    """
    if ranks == world:
        return
    split = f"{option} {ranks // nodes}" if ranks % nodes == 0 else f"1 node with {option} {ranks}"
    raise LayoutError(f"layout has {ranks} ranks but {world} processes were started: use {split}")


def under_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a rank that torchrun started."""
    return all(name in environment for name in TORCHRUN_VARIABLES)


def local_share(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Number of this process among those that torchrun started on the node, and their count; else 0 of 1."""
    if not under_torchrun(environment):
        return 0, 1
    return int(environment["LOCAL_RANK"]), int(environment.get("LOCAL_WORLD_SIZE", "1"))


def torchrun_rank(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    device_type: str = "cpu",
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
    dump_folder: Path | None = None,
) -> Any:
    """Run ``function(*args)`` in this process as one of torchrun's ranks; what it returns.

    An error goes up as it is, and into the file from which torchrun, which ends the other ranks, shows the
    first of all ranks. ``dump_folder``: where a CUDA rank that hangs
    leaves what its flight recorder has.

    Raises: LayoutError: torchrun started another number of processes than the layout's ``ranks``.
    """
    world, local_world = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_world(ranks, world, nodes=max(world // local_world, 1))
    device = _rank_device(device_type, int(os.environ["LOCAL_RANK"]))
    # torchrun itself sets OMP_NUM_THREADS to 1, so it does not tell what the user wants
    torch.set_num_threads(max(1, usable_cores() // local_world))
    record_collectives(device, dump_folder)
    init_process_group(device, "env://", int(os.environ["RANK"]), world, timeout_s)
    try:
        result = record(function)(*args)
    except Exception as error:
        leave(dump_folder, error)
        raise
    dist.destroy_process_group()
    return result


def run_ranks(
    function: Callable[..., Any],
    nproc: int,
    *args: Any,
    device_type: str = "cpu",
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
    dump_folder: Path | None = None,
) -> list[Any]:
    """Run ``function(*args)`` on ``nproc`` local ranks inside a process group; what each returned, by rank.

    Results are pickled: plain data and arrays, no tensors. Ctrl-C and SIGTERM are passed on, and ranks that
    then return in time count as done. No process outlives the call, nor this process. ``dump_folder``: as for
    ``torchrun_rank``.

    Raises: RunFailedError: a rank raised, died or was interrupted; the earliest error comes first. A
    ShardwrightError of a rank is raised as it is.
    """
    # a process that has counted its CUDA devices must not fork, and macOS libraries do not survive it
    fork = (
        device_type == "cpu"
        and sys.platform != "darwin"
        and "fork" in multiprocessing.get_all_start_methods()
    )
    context = multiprocessing.get_context("fork" if fork else "spawn")
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder, termination_as_interrupt():
        processes, connections, controls = [], [], []
        try:
            for rank in range(nproc):
                receiver, sender = context.Pipe(duplex=False)
                control, answer = context.Pipe()
                process = context.Process(
                    target=_rank_main,
                    args=(
                        *(sender, answer, function, args, rank, nproc),
                        *(folder, device_type, timeout_s, dump_folder),
                    ),
                    daemon=False,
                )
                process.start()
                sender.close()
                answer.close()
                processes.append(process)
                connections.append(receiver)
                controls.append(control)
            return _collect(processes, connections, controls, Path(folder), dump_folder)
        finally:
            _end_world(processes)
            for connection in (*connections, *controls):
                connection.close()


def _rank_main(
    sender: Connection,
    control: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    nproc: int,
    folder: str,
    device_type: str,
    timeout_s: float,
    dump_folder: Path | None,
) -> None:
    """Body of one local rank; never returns."""
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has the parent's
        signal.signal(signal.SIGINT, _interrupt_once)
        die_with_parent()
        _keep_stderr(Path(folder, f"stderr-{rank}"), visible=rank == 0)
        device = _rank_device(device_type, rank)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, usable_cores() // nproc))
        record_collectives(device, dump_folder)
        if dump_folder is not None:
            keep_crash_stack(dump_folder, rank)
            leave_when_asked(control, dump_folder)
        init_process_group(device, Path(folder, "store").as_uri(), rank, nproc, timeout_s)
        result = function(*args)
        dist.destroy_process_group()
        sender.send(result)
        status = 0
    except BaseException as error:  # noqa: BLE001  (the process ends here; whatever it was belongs to the parent)
        failure = _failure(rank, error)
        leave(dump_folder, error)
        sender.send(failure)
    finally:
        drop_crash_stack(dump_folder, rank)
        sys.stderr.flush()
        os._exit(status)  # no exit handlers: those of the parent are not this process's to run


def _interrupt_once(number: int, frame: object) -> None:
    """First Ctrl-C: raise. The terminal and the parent both send one, so the next is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextlib.contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """SIGTERM interrupts this process as Ctrl-C does; only a main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _rank_device(device_type: str, local_rank: int) -> torch.device:
    """The device of a rank, made ready."""
    if device_type != "cuda":
        return torch.device(device_type)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def die_with_parent() -> None:
    """End this process when the parent is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _keep_stderr(path: Path, visible: bool) -> None:
    """Send stderr to a file, C++ libraries' too; what Python writes stays visible on rank 0."""
    sys.stderr.flush()
    terminal = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    if not visible:
        os.dup2(2, terminal)
    sys.stderr = os.fdopen(terminal, "w", buffering=1, errors="backslashreplace")


def _failure(rank: int, error: BaseException) -> Failure:
    own = _cause(error)
    lines = "".join(traceback.format_exception(own)).rstrip().splitlines()
    return Failure(rank, time.time(), type(own).__name__, str(own), "\n".join(lines[-TRACEBACK_LINES:]))


def _cause(error: BaseException) -> BaseException:
    """The error that others were raised from: a pipeline's schedule wraps what a stage raised. Ours stay."""
    while error.__cause__ is not None and not isinstance(error, ShardwrightError):
        error = error.__cause__
    return error


def _collect(
    processes: Sequence[BaseProcess],
    connections: Sequence[Connection],
    controls: Sequence[Connection],
    folder: Path,
    dump_folder: Path | None,
) -> list[Any]:
    """Results by rank, once every rank has sent one."""
    results: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    deadline, interrupted = float("inf"), False
    while len(results) + len(failures) < len(processes):
        pending = [rank for rank in range(len(processes)) if rank not in results and rank not in failures]
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            ready = wait([connections[rank] for rank in pending], None if left == float("inf") else left)
        except KeyboardInterrupt:
            if interrupted:
                break
            interrupted, deadline = True, time.monotonic() + INTERRUPT_GRACE_S
            _signal_all(processes, signal.SIGINT)
            continue
        for rank in pending:
            if connections[rank] in ready:
                answer = _receive(rank, processes[rank], connections[rank], folder)
                (failures if isinstance(answer, Failure) else results)[rank] = answer
        if failures:
            deadline = min(deadline, time.monotonic() + LATER_ERRORS_S)
    if len(results) == len(processes):
        return [results[rank] for rank in range(len(processes))]
    if interrupted and all(
        failure.kind == "KeyboardInterrupt" or failure.echo for failure in failures.values()
    ):
        raise RunFailedError("interrupted: all ranks were ended")
    if dump_folder is not None:
        alive = [controls[rank] for rank in range(len(processes)) if rank not in failures]
        ask_all(alive, LAST_WORDS_S, wait)
        ended = sorted(failures.values(), key=lambda failure: failure.time)
        write_failures(dump_folder, [asdict(each) | {"echo": each.echo} for each in ended], list(results))
    raise _earliest_error(list(failures.values()), len(processes))


def _receive(rank: int, process: BaseProcess, connection: Connection, folder: Path) -> Any:
    """What a rank sent; a Failure if it ended without sending."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        now = time.time()
        process.join()
        code = process.exitcode or 0
        kind = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        kept = (
            (folder / f"stderr-{rank}").read_text(errors="replace")
            if (folder / f"stderr-{rank}").exists()
            else ""
        )
        return Failure(rank, now, kind, "the process died", "\n".join(kept.splitlines()[-TRACEBACK_LINES:]))


def _earliest_error(failures: Sequence[Failure], nproc: int) -> ShardwrightError:
    """The error to raise: the first that is not an echo of another rank's end."""
    ordered = sorted(failures, key=lambda failure: (failure.echo, failure.time))
    first = ordered[0]
    ours = {kind.__name__: kind for kind in _subclasses(ShardwrightError)}
    if first.kind in ours:
        error = ours[first.kind].__new__(ours[first.kind])
        error.args = (first.message,)
        return error
    others = [
        f"rank {failure.rank}: {failure.kind}: {failure.message.partition(chr(10))[0]}"
        for failure in ordered[1:]
    ]
    silent = sorted(set(range(nproc)) - {failure.rank for failure in failures})
    if silent:
        others.append(f"ranks {silent} were still running and were ended")
    if first.echo and not silent:
        others.append(
            "no rank gave another reason: one left its peers waiting, or the run's --timeout is too short"
        )
    tail = f"\n{first.detail}" if first.detail else ""
    after = "\nafter it: " + "; ".join(others) if others else ""
    return RunFailedError(f"rank {first.rank} failed: {first.kind}: {first.message}{tail}{after}")


def _subclasses(kind: type[ShardwrightError]) -> list[type[ShardwrightError]]:
    return [kind, *(inner for child in kind.__subclasses__() for inner in _subclasses(child))]


def _signal_all(processes: Sequence[BaseProcess], number: int) -> None:
    for process in processes:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, number)


def _end_world(processes: Sequence[BaseProcess]) -> None:
    """Kill whatever still runs, by process id, and wait for all."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
