"""What logs say of things that break: devices, links, processes, exceptions. Their order is what matters.

``FAILURES`` says of each what it is: hardware and network come before the hang they cause; a death or an
error of one rank leaves the others waiting; an echo only reports that another rank went away.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from shardwright.doctor.clock import time_of
from shardwright.doctor.evidence import Blamed, Failure
from shardwright.doctor.lines import Line, Reader, rank_of_text
from shardwright.doctor.rank_lists import parse_ranks

Weight = Literal["hardware", "network", "death", "error", "data", "start", "scheduler", "barrier", "echo"]

FAILURES: dict[str, Weight] = {
    "xid": "hardware",
    "gpu_lost": "hardware",
    "nvlink": "hardware",
    "ecc": "hardware",
    "machine_check": "hardware",
    "power_or_heat": "hardware",
    "ib_completion": "network",
    "ib_port": "network",
    "nic": "network",
    "nccl_warn": "network",
    "p2p": "network",
    "host_oom": "death",
    "killed": "death",
    "bus_error": "death",
    "segfault": "death",
    "aborted": "echo",
    "terminated": "echo",
    "exited": "error",
    "cuda_error": "error",
    "exception": "error",
    "data_ended": "data",
    "returned": "data",
    "disk": "error",
    "store": "start",
    "rendezvous": "start",
    "scheduler": "scheduler",
    "monitored_barrier": "barrier",
    "gloo_size": "error",
    "echo": "echo",
    "waited": "echo",
}

XIDS = {
    13: "graphics engine exception, mostly a fault of a kernel",
    31: "memory page fault, mostly a fault of a kernel",
    43: "the GPU stopped processing, mostly a fault of a kernel",
    45: "channels were torn down after another error",
    48: "double bit ECC error",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt",
    63: "row remapping or page retirement recorded",
    64: "row remapping or page retirement failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of single bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    109: "context switch timeout",
    119: "GSP processor timeout",
    120: "GSP processor error",
    136: "link training failed",
    140: "unrecovered ECC error",
    145: "NVLink RLW error",
    149: "NVLink NETIR error",
}
"""What the driver's error numbers mean. Source: NVIDIA, XID Errors, docs.nvidia.com/deploy/xid-errors."""

SOFTWARE_XIDS = frozenset({13, 31, 43, 45})

ECHOES = re.compile(
    r"[Cc]onnection closed by|[Cc]onnection reset by peer|Broken pipe|remote process exited|was aborted|"
    r"communicator was aborted|Socket closed|Connection refused|failed to recv, got 0 bytes|"
    r"Application timeout caused pair closure"
)
WAITED = re.compile(
    r"Timed out waiting \d+ ?ms|[Tt]imed out after waiting|Watchdog caught|wait timeout after|Socket Timeout|"
    r"watchdog thread terminated|Timed out after \d+ ?m?s"
)
DATA_ENDED = re.compile(
    r"StopIteration|StopAsyncIteration|DataLoader.*exhaust|ran out of (?:data|input|batches)"
)


class Pattern(NamedTuple):
    """One message: what it is, and the groups ``rank``, ``ranks`` and ``detail`` it may have."""

    what: str
    regex: re.Pattern[str]


def _pattern(what: str, regex: str) -> Pattern:
    return Pattern(what, re.compile(regex))


PATTERNS: dict[bytes, Pattern] = {
    b"NVRM: Xid": _pattern("xid", r"NVRM: Xid \((?P<detail>[^)]*)\): (?P<code>\d+)"),
    b"fallen off the bus": _pattern("gpu_lost", r"fallen off the bus"),
    b"GPU is lost": _pattern("gpu_lost", r"GPU is lost"),
    b"Unable to determine the device handle": _pattern(
        "gpu_lost", r"Unable to determine the device handle.*"
    ),
    b"NVLink error": _pattern("nvlink", r"(?:uncorrectable )?NVLink error.*"),
    b"uncorrectable ECC": _pattern("ecc", r"uncorrectable ECC error.*"),
    b"mce: [Hardware Error]": _pattern("machine_check", r"mce: \[Hardware Error\].*"),
    b"HW Slowdown": _pattern("power_or_heat", r"HW (?:Thermal )?Slowdown.*: Active"),
    b"Got completion ": _pattern(
        "ib_completion",
        r"Got completion (?:from peer (?P<detail>\S+) )?with (?:status=|error )(?P<code>\d+).*",
    ),
    b"Got async event": _pattern("ib_port", r"Got async event ?: (?P<detail>.*)"),
    b"async fatal event": _pattern("ib_port", r"async fatal event on (?P<detail>\S+).*"),
    b"Async event": _pattern("ib_port", r"Async event ?: (?P<detail>.*)"),
    b"Link down": _pattern("ib_port", r"(?P<detail>mlx5_\S+.*Link down)"),
    b"link down": _pattern("ib_port", r"(?P<detail>(?:mlx5|ib|eth|ens|bond)\S*.* link down)"),
    b"NIC Link is Down": _pattern("ib_port", r"NIC Link is Down"),
    b"ibv_modify_qp": _pattern("nic", r"ibv_modify_qp.*"),
    b"ibv_poll_cq": _pattern("nic", r"ibv_poll_cq.*failed.*"),
    b"ibv_reg_mr": _pattern("nic", r"ibv_reg_mr\S* .*failed.*"),
    b"ncclSystemError": _pattern("nic", r"ncclSystemError.*"),
    b"Out of memory: Killed process": _pattern(
        "host_oom", r"Out of memory: Killed process (?P<detail>\d+ \([^)]*\)).*"
    ),
    b"oom-kill:": _pattern("host_oom", r"oom-kill:.*"),
    b"oom_kill event": _pattern("host_oom", r"oom_kill event.*"),
    b"OOM Killed": _pattern("host_oom", r"OOM Killed"),
    b"OOMKilled": _pattern("host_oom", r"OOMKilled"),
    b"CUDA error: ": _pattern("cuda_error", r"CUDA error: (?P<detail>(?!out of memory).*)"),
    b"HIP error: ": _pattern("cuda_error", r"HIP error: (?P<detail>.*)"),
    b"Cuda failure": _pattern("cuda_error", r"Cuda failure (?P<detail>(?:\d+ )?'(?!out of memory).*')"),
    b"Memory access fault by GPU": _pattern("cuda_error", r"Memory access fault by GPU.*"),
    b"No space left on device": _pattern("disk", r"No space left on device.*"),
    b"Segmentation fault": _pattern("segfault", r"Segmentation fault.*"),
    b"Bus error": _pattern("bus_error", r"Bus error.*"),
    b"insufficient shared memory": _pattern("bus_error", r"insufficient shared memory.*"),
    b"is killed by signal": _pattern(
        "host_oom", r"DataLoader worker \(pid\S* [\d, ]+\) is killed by signal: (?P<detail>(?!Bus)\w+.*)"
    ),
    b"exited unexpectedly": _pattern("killed", r"DataLoader worker \(pid\S* [\d, ]+\) exited unexpectedly"),
    b"CANCELLED AT": _pattern("scheduler", r"(?:JOB|STEP) \S+ ON \S+ CANCELLED AT (?P<detail>.*)"),
    b"DUE TO TIME LIMIT": _pattern("scheduler", r"DUE TO TIME LIMIT"),
    b"DUE TO NODE": _pattern("scheduler", r"DUE TO NODE.*"),
    b"retrieving ncclUniqueId": _pattern("store", r"retrieving ncclUniqueId from \[(?P<rank>\d+)\].*"),
    b"clients joined": _pattern("rendezvous", r"(?P<detail>\d+/\d+ clients joined)"),
    b"client socket has timed out": _pattern(
        "rendezvous", r"client socket has timed out after (?P<detail>\d+m?s? .*)"
    ),
    b"wait timeout after": _pattern("store", r"wait timeout after (?P<detail>\d+ ?ms(?:, keys: \S+)?)"),
    b"RendezvousTimeoutError": _pattern("rendezvous", r"RendezvousTimeoutError.*"),
    b"pass monitoredBarrier": _pattern(
        "monitored_barrier", r"Ranks? (?P<ranks>[\d, ]+) failed to pass monitoredBarrier.*"
    ),
    b"preamble.length": _pattern("gloo_size", r"preamble\.length <= op\.nbytes\.? (?P<detail>\d+ vs \d+)?"),
    b"Connection closed by": _pattern("echo", r"Connection closed by.*"),
    b"Connection reset by": _pattern("echo", r"Connection reset by.*"),
    b"remote process exited": _pattern("echo", r"remote process exited.*"),
    b"communicator was aborted": _pattern("echo", r"communicator was aborted.*"),
    b"Timed out waiting": _pattern("waited", r"Timed out waiting (?P<detail>\d+ ?ms).*"),
    b"P2P is disabled": _pattern("p2p", r"P2P is disabled between connected GPUs (?P<detail>.*)"),
}
"""Messages by the bytes to look for."""

SIGNALS = {
    -6: "aborted",
    -7: "bus_error",
    -9: "killed",
    -11: "segfault",
    -15: "terminated",
    137: "killed",
    139: "segfault",
    135: "bus_error",
    134: "aborted",
    143: "terminated",
}

_EXIT = re.compile(r"exitcode\s*:\s*(?P<code>-?\d+)(?:\s*\(pid: \d+\))?")
_FAILED = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\).*?local_rank: (?P<local>\d+)")
_ROOT_RANK = re.compile(r"^\W*rank\s*:\s*(?P<rank>\d+)\s*\(local_rank")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')
_RAISED = re.compile(
    r"^(?P<kind>(?:[A-Za-z_][\w]*\.)*[A-Z_a-z]\w*(?:Error|Exception|Iteration|Interrupt|Exit|Timeout|Failure|OutOfMemory\w*))(?::\s*(?P<text>.*))?$"
)
_PREFIX = re.compile(r"^\s*(?:\[(?:rank|default)\d+\]:|\d{1,5}:\s|\(\w+ pid=\d+[^)]*\))\s?")


def _read(pattern: Pattern, line: Line) -> Iterator[Failure]:
    found = pattern.regex.search(line.text)
    if found is None:
        return
    groups = found.groupdict()
    what, detail = pattern.what, groups.get("detail") or found[0]
    if what == "xid":
        code = int(groups["code"])
        detail = f"Xid {code}: {XIDS.get(code, 'see the list of Xid errors')} ({groups['detail']})"
        what = "cuda_error" if code in SOFTWARE_XIDS else "xid"
    if what == "cuda_error":
        what = _of_cuda(detail)
    named = parse_ranks(groups["ranks"]) if groups.get("ranks") else ()
    if groups.get("rank"):
        named = (int(groups["rank"]),)
    yield Failure(
        line.source, line.rank, what, detail.strip()[:200], time_of(line.text), _host(line.text), named
    )


def _of_cuda(detail: str) -> str:
    """Whether a CUDA error is the device's or the program's."""
    if "NVLink" in detail:
        return "nvlink"
    if "ECC" in detail:
        return "ecc"
    if "peer access" in detail:
        return "p2p"
    return "cuda_error"


def _host(text: str) -> str:
    found = re.search(r"(?:^|\s)([a-zA-Z][\w.\-]*\d[\w.\-]*)(?::\d+:\d+|\s+kernel:)", text)
    return found[1] if found else ""


def read_exit(line: Line) -> Iterator[Failure | Blamed]:
    """torchrun's root cause and its agent's line about a process that ended."""
    around = [*line.before(4), line.text, *line.following(2)]
    rank = next((int(f["rank"]) for text in around if (f := _ROOT_RANK.match(text))), None)
    code = _EXIT.search(line.text)
    if code is not None and rank is not None and "Root Cause" in "\n".join(line.before(8)):
        yield Blamed(line.source, rank, int(code["code"]))
        yield from _exit_failure(line, rank, int(code["code"]))
        return
    failed = _FAILED.search(line.text)
    if failed is not None:
        yield from _exit_failure(line, None, int(failed["code"]), f", local rank {failed['local']}")


_ENDED = re.compile(
    r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on signal (?P<signal>\d+)"
    r"|Process (?P<rank2>\d+) exit with status code (?P<code>\d+)"
    r"|exits with return code = (?P<code2>-?\d+)"
    r"|srun: error: (?P<host2>[\w.\-]+): tasks? (?P<task>[\d,\-]+): "
    r"(?P<word>Killed|Segmentation fault|Bus error|Aborted|Out Of Memory|Exited with exit code \d+)"
)
_WORDS = {"Killed": -9, "Segmentation fault": -11, "Bus error": -7, "Aborted": -6}


def read_ended(line: Line) -> Iterator[Failure]:
    """How mpirun, Horovod, DeepSpeed's launcher and srun say that a process ended. srun's task is a rank or a
    whole node's launcher, so it is told and not named."""
    for found in _ENDED.finditer(line.text):
        host = found["host"] or found["host2"] or ""
        rank = found["rank"] or found["rank2"]
        if found["task"] is not None:
            detail = f"task {found['task']}: {found['word']}"
            what = (
                "host_oom"
                if "Memory" in found["word"]
                else SIGNALS.get(_WORDS.get(found["word"], 1), "exited")
            )
        else:
            code = -int(found["signal"]) if found["signal"] else int(found["code"] or found["code2"])
            if code == 0:
                continue
            what, detail = SIGNALS.get(code, "exited"), f"exit code {code}"
        own = None if rank is None else int(rank)
        yield Failure(line.source, own, what, detail, time_of(line.text), host=host)


def _exit_failure(line: Line, rank: int | None, code: int, more: str = "") -> Iterator[Failure]:
    what = SIGNALS.get(code, "exited")
    yield Failure(line.source, rank, what, f"exit code {code}{more}", time_of(line.text))


def read_traceback(line: Line) -> Iterator[Failure]:
    """A Python traceback: its frames, innermost first, and the exception at its end."""
    own = rank_of_text(line.text)
    frames: list[str] = []
    same = _prefix_like(line.text.partition("Traceback (most")[0])
    for text in line.following(80):
        other = rank_of_text(text)
        if own is not None and other is not None and other != own:
            continue
        bare = _PREFIX.sub("", same.sub("", text, count=1))
        frame = _FRAME.search(bare)
        if frame is not None:
            frames.append(f"{frame['name']} at {frame['file']}:{frame['line']}")
            continue
        raised = _RAISED.match(bare.strip()) if not bare.startswith((" ", "\t")) or own is not None else None
        if raised is not None:
            yield _exception(line, raised, text, tuple(reversed(frames)))
            return


def _prefix_like(prefix: str) -> re.Pattern[str]:
    """Beginnings of lines like that of a traceback: a collector's clock, a process's number, in other
    digits."""
    digits = re.sub(r"\d+", r"\\d+", re.escape(prefix))
    return re.compile(f"^{digits}" if prefix.strip() else r"^(?!)")


def read_crash(line: Line) -> Iterator[Failure]:
    """What Python's faulthandler writes when a process dies in C++ code."""
    frames = []
    for text in line.following(60):
        found = re.search(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)', text)
        if found is not None:
            frames.append(f"{found['name']} at {found['file']}:{found['line']}")
        elif frames and text.startswith("Thread"):
            break
    kind = line.text.partition("Fatal Python error:")[2].strip()
    what = {"Aborted": "aborted", "Segmentation fault": "segfault", "Bus error": "bus_error"}.get(
        kind, "aborted"
    )
    yield Failure(line.source, line.rank, what, f"the interpreter died: {kind}", None, frames=tuple(frames))


def _exception(line: Line, raised: re.Match[str], text: str, frames: tuple[str, ...]) -> Failure:
    kind, words = raised["kind"].rpartition(".")[2], raised["text"] or ""
    what = "exception"
    if ECHOES.search(words):
        what = "echo"
    elif WAITED.search(words):
        what = "waited"
    elif DATA_ENDED.search(f"{kind} {words}"):
        what = "data_ended"
    elif kind in ("KeyboardInterrupt", "SystemExit", "SignalException"):
        what = "terminated"
    elif "ChildFailed" in kind:
        what = "echo"
    elif re.search(r"out of memory", words, re.IGNORECASE) or "OutOfMemory" in kind:
        what = "oom"
    source = line.source._replace(text=_PREFIX.sub("", text))
    return Failure(source, line.rank, what, f"{kind}: {words}"[:300], time_of(line.text), frames=frames)


def _reader(pattern: Pattern) -> Reader[Any]:
    return lambda line: _read(pattern, line)


READERS: dict[bytes, Reader[Any]] = {
    **{needle: _reader(pattern) for needle, pattern in PATTERNS.items()},
    b"exitcode  ": read_exit,
    b"(exitcode: ": read_exit,
    b"Traceback (most": read_traceback,
    b"with PID ": read_ended,
    b"exit with status code": read_ended,
    b"exits with return code": read_ended,
    b"srun: error: ": read_ended,
    b"Fatal Python error": read_crash,
}
