"""Throughput on CPU ranks beside torchtitan 0.3.0: tokens a second of CPU time. ``make bench-peer``.

Both worlds of a layout live at once and take turns of a few steps: whatever else the machine does meets both.
CPU time is user and system time of all threads of all ranks over the timed steps; starting and warming up are
left out. Same shape, batch, precision (fp32), optimizer, clipping and recomputation; no compilation, the loss
in one piece, one thread a rank. torchtitan is installed into a folder of its own.
"""

import argparse
import json
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peer.serve import SHAPE, TOKENS_PER_STEP

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / ".venv-peer"
TORCH, PEER = "torch==2.13.0", "torchtitan==0.3.0"

GOAL = 1.2
"""Least ratio of our rate to theirs."""

WARM_UP, TURN, TURNS = 2, 2, 7
"""Steps before timing, timed steps of a turn, and turns of each side."""

KEEP_FREED_MEMORY = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=2147483647"
"""What peer/host_memory.py sets, as glibc reads it from the environment."""

ERROR_LINES = 15

LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "1 rank": {},
    "DDP 2": {"dp_replicate": 2},
    "FSDP 2": {"dp_shard": 2},
    "TP 2": {"tp": 2},
    "FSDP 2 x TP 2": {"dp_shard": 2, "tp": 2},
}
ALONE: Mapping[str, Mapping[str, int]] = {"PP 2": {"pp": 2}}
"""Layouts that torchtitan runs on newer releases of torch only."""


@dataclass(frozen=True)
class Side:
    """One program in one layout: tokens a second of CPU time (median of turns), and what it trained."""

    tokens_per_cpu_s: float
    parameters: int  # of the whole model
    first_loss: float
    last_loss: float


@dataclass(frozen=True)
class Row:
    """A layout of both; ``ratio`` of ours to theirs is the median of turns, each against its neighbour."""

    layout: str
    ranks: int
    ours: Side
    theirs: Side | None
    ratio: float | None


class World:
    """Ranks of one program, started and asked through pipes; idle between questions."""

    def __init__(
        self, python: Path, program: str, asked: Mapping[str, Any], ranks: int, extra: Mapping[str, str]
    ) -> None:
        self.errors = [tempfile.TemporaryFile("w+") for _ in range(ranks)]  # noqa: SIM115  (as long as a rank)
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        shared |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.processes = [
            subprocess.Popen(
                [python, ROOT / "scripts" / "peer" / program, json.dumps(asked)],
                env=os.environ | shared | extra | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors[rank], text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def ask(self, steps: int) -> list[dict[str, Any]]:
        """What each rank answers."""
        for process in self.processes:
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        """The next line of every rank."""
        lines = [process.stdout.readline() for process in self.processes]
        if not all(lines):
            failed = lines.index("")
            self.errors[failed].seek(0)
            tail = "".join(self.errors[failed].readlines()[-ERROR_LINES:])
            raise SystemExit(f"rank {failed} of {len(lines)} ended:\n{tail}")
        return [json.loads(line) for line in lines]

    def rate(self, steps: int) -> float:
        """Tokens a second of CPU time over ``steps``."""
        return steps * TOKENS_PER_STEP / sum(answer["cpu_time"] for answer in self.ask(steps))

    def parameters(self, stages: int) -> int:
        """Of the whole model, which each of ``stages`` has a part of; the first answer of the ranks."""
        return sum(answer["parameters"] for answer in self.answers()) * stages // len(self.processes)

    def loss(self) -> float:
        """Loss of one more step."""
        return self.ask(0)[0]["loss"]

    def close(self) -> None:
        """End the ranks."""
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait()
        for file in self.errors:
            file.close()


@contextmanager
def world(
    python: Path, program: str, asked: Mapping[str, Any], ranks: int, extra: Mapping[str, str]
) -> Iterator[World]:
    """A world that ends with the block."""
    started = World(python, program, asked, ranks, extra)
    try:
        yield started
    finally:
        started.close()


def compare(name: str, options: argparse.Namespace) -> Row:
    """Run one layout on one side or both, by turns."""
    both, axes = name in LAYOUTS, {**LAYOUTS, **ALONE}[name]
    ranks = math.prod(axes.values())
    asked = {**axes, "recompute": options.recompute}
    theirs = {"GLIBC_TUNABLES": KEEP_FREED_MEMORY} if options.same_allocator else {}
    with ExitStack() as stack:
        programs = [(Path(sys.executable), "ours.py", {})]
        programs += [(ENVIRONMENT / "bin" / "python", "titan.py", theirs)] if both else []
        worlds = [
            stack.enter_context(world(python, file, asked, ranks, extra)) for python, file, extra in programs
        ]
        parameters = [started.parameters(axes.get("pp", 1)) for started in worlds]
        first = [started.loss() for started in worlds]
        for started in worlds:
            started.ask(WARM_UP)
        rates = [[started.rate(TURN) for started in worlds] for _ in range(options.turns)]
        last = [started.loss() for started in worlds]
    columns = [statistics.median(column) for column in zip(*rates, strict=True)]
    sides = [Side(*values) for values in zip(columns, parameters, first, last, strict=True)]
    ratio = statistics.median(ours / theirs for ours, theirs in rates) if both else None
    return Row(name, ranks, sides[0], sides[1] if both else None, ratio)


def make_environment() -> None:
    """torchtitan in a folder of its own, beside the release of torch that we use."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
    found = subprocess.run([python, "-c", "import torchtitan"], capture_output=True, check=False)
    if found.returncode:
        print(f"installing {PEER} into {ENVIRONMENT.name} ...", file=sys.stderr)
        quiet = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*quiet, TORCH, PEER], check=True)


def table(rows: list[Row]) -> str:
    """Rows for people."""
    head = f"{'layout':<15}{'ranks':>6}{'ours':>8}{'theirs':>8}{'ratio':>7}  loss first -> last: ours, theirs"
    lines = [head]
    for row in rows:
        ours, theirs = row.ours, row.theirs
        losses = f"{ours.first_loss:.3f} -> {ours.last_loss:.3f}"
        if theirs is None:
            lines.append(
                f"{row.layout:<15}{row.ranks:>6}{ours.tokens_per_cpu_s:>8.0f}{'-':>8}{'-':>7}  {losses}"
            )
            continue
        losses += f", {theirs.first_loss:.3f} -> {theirs.last_loss:.3f}"
        lines.append(
            f"{row.layout:<15}{row.ranks:>6}{ours.tokens_per_cpu_s:>8.0f}{theirs.tokens_per_cpu_s:>8.0f}"
            f"{row.ratio:>7.2f}  {losses}"
        )
    counts = sorted({side.parameters for row in rows for side in (row.ours, row.theirs) if side})
    return "\n".join([*lines, f"tokens a CPU second; parameters: {', '.join(f'{n:,}' for n in counts)}"])


def main() -> None:
    """Compare every layout; exit status 1 if a ratio misses the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON document in place of the table")
    parser.add_argument("--layouts", nargs="+", choices=[*LAYOUTS, *ALONE], default=[*LAYOUTS, *ALONE])
    parser.add_argument("--recompute", choices=["none", "full"], default="none")
    parser.add_argument(
        "--same-allocator",
        action="store_true",
        help="have theirs keep freed memory, as ours does (peer/host_memory.py)",
    )
    parser.add_argument("--turns", type=int, default=TURNS)
    options = parser.parse_args()
    make_environment()
    rows = [compare(name, options) for name in options.layouts]
    ok = all(row.ratio is None or row.ratio >= GOAL for row in rows)
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "releases": [TORCH, PEER],
        "shape": SHAPE,
        "tokens_per_step": TOKENS_PER_STEP,
        "recompute": options.recompute,
        "same_allocator": options.same_allocator,
        "goal": GOAL,
        "ok": ok,
    }
    if options.json:
        print(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        print(table(rows))
    raise SystemExit(0 if ok else 1)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
