"""`map`: the links between ranks, measured in the time given and never longer.

The store of torchrun, or one of this process, carries what is said (exchange.py); one process conducts
(conductor.py); children measure (link_processes.py, link_rank.py).
"""

import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.bandwidth_map import Unmeasured
from shardwright.cluster import Cluster, device
from shardwright.errors import ClusterError, RunFailedError
from shardwright.measure import exchange
from shardwright.measure.cells import FIRST_SIZE
from shardwright.measure.conductor import LOOK_S, Conductor
from shardwright.measure.device_names import preset_of
from shardwright.measure.link_processes import Children, children
from shardwright.measure.link_record import LinkRecord, write_whole
from shardwright.measure.link_stages import Stages
from shardwright.measure.progress import TimeBar, time_bar
from shardwright.run.launch import termination_as_interrupt, under_torchrun
from shardwright.units import GiB, MiB

FEWEST_RANKS = 2

LARGEST: Mapping[str, int] = {"cpu": 64 * MiB, "cuda": GiB}
"""Payload beyond which bandwidth grows no more."""

MEMORY_SHARE = 1 / 8
"""Of a host's memory that the payloads of all its ranks may take: each has a payload and its like."""

BEAT_S = 0.4
"""A rank gives a sign of life so often, and more rarely among many: RANKS_PER_BEAT in that time."""

RANKS_PER_BEAT = 200

START_SHARE = 0.5
"""Of the time, what ranks may take to start."""

CLOSING_S = 0.5
"""Kept of the time for putting everything together."""

FAREWELL_S = 2.0
"""How long torchrun's first rank, whose store it may be, waits for the others to have seen the end."""


def measure_links(
    nproc: int | None,
    seconds: float,
    max_size: int | None,
    base: Cluster | None,
    output: Path | None,
    say: Callable[[str], None],
) -> Cluster | None:
    """Measure the links between the ranks of torchrun, or between ``nproc`` local ones, in ``seconds``.

    Returns the cluster with its map; None on ranks of torchrun other than the first. What is lost on the way
    (a rank that dies, a pair that hangs) stands in ``map.unmeasured`` as failed. Ctrl-C and SIGTERM end it
    early with what there is. ``max_size``: largest payload [B]; ``base``: its device and price are kept;
    ``output``: what is known so far is written there from time to time.

    Raises: ClusterError: fewer than two ranks. RunFailedError: nothing could be measured.
    """
    end = time.monotonic() + seconds
    joined = nproc is None and under_torchrun()
    world = int(os.environ["WORLD_SIZE"]) if joined else nproc or FEWEST_RANKS
    rank = int(os.environ["RANK"]) if joined else 0
    if world < FEWEST_RANKS:
        raise ClusterError(f"map measures between ranks, and there is {world}: start at least {FEWEST_RANKS}")
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    beat_s = BEAT_S * max(1.0, world / RANKS_PER_BEAT)
    ours = [rank] if joined else list(range(world))
    with termination_as_interrupt(), children(ours, world, device_type, beat_s) as started:
        store, host, port = _meeting_place(joined, rank, world)
        started.begin(host, port)
        shared = dist.PrefixStore(exchange.PREFIX, store)
        if rank != 0:
            _mind(shared, rank, started)
            return None
        conductor = Conductor(shared, world, _ended(shared, world, started), end - CLOSING_S, beat_s)
        record = LinkRecord(world, datetime.now(UTC).strftime("%Y-%m-%d"), base)
        with time_bar(say, seconds) as bar:
            _conduct(conductor, record, max_size, output, bar, joined)
        conductor.dismiss()
        if joined:
            exchange.farewell(shared, world, FAREWELL_S)
        if not record.pairs:
            reasons = [f"{each.what} {each.reason}" for each in record.faults] or ["the time was up"]
            raise RunFailedError(f"no pair of ranks could be measured: {'; '.join(reasons[:4])}")
        return record.cluster()


def _meeting_place(joined: bool, rank: int, world: int) -> tuple[dist.Store, str, int]:
    """The store, and where it is."""
    if not joined:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return store, "127.0.0.1", store.port
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own, which outlives ranks
    master = rank == 0 and not agent
    return (
        dist.TCPStore(host, port, world, master, timeout=exchange.CONNECT, wait_for_workers=False),
        host,
        port,
    )


def _mind(store: dist.Store, rank: int, started: Children) -> None:
    """On a rank of torchrun: say how the child ended if it does, and wait for the end of all."""
    told = False
    while True:
        try:
            if exchange.is_over(store, rank):
                return
            if not told and (how := started.ended().get(rank)):
                exchange.give_end(store, rank, how)
                told = True
            started.wait(LOOK_S) if not told else time.sleep(LOOK_S)
        except KeyboardInterrupt:  # sent to all ranks: the first puts together what there is, and says so
            continue
        except RuntimeError:  # the store is gone, and who conducts with it
            return


def _ended(store: dist.Store, world: int, started: Children) -> Callable[[], dict[int, str]]:
    others = [rank for rank in range(world) if rank not in started.processes]

    def ended() -> dict[int, str]:
        return {**exchange.read_ends(store, others), **started.ended()}

    return ended


def _conduct(
    conductor: Conductor,
    record: LinkRecord,
    max_size: int | None,
    output: Path | None,
    bar: TimeBar,
    joined: bool,
) -> None:
    """All stages, each leaving what it found in ``record`` and ``output``; ends early when interrupted."""

    def write() -> None:
        record.faults = list(conductor.faults)
        if output is not None and record.pairs:
            write_whole(record.cluster(), output)

    try:
        bar.stage(f"starting {conductor.world} ranks")
        conductor.gather_ranks(START_SHARE * conductor.left)
        hint, device_type = _describe(conductor, record)
        largest = _largest(conductor, device_type, max_size)
        stages = Stages(conductor, record, bar, write, device_type, largest)
        stages.measure_pairs(hint)
        stages.measure_collectives()
        stages.measure_late_pairs()
    except KeyboardInterrupt:  # from a person, or from torchrun because a rank is gone: which?
        record.skipped.append(Unmeasured(what="the rest", reason="interrupted"))
        if joined:
            conductor.note_silent("links")
    record.faults = list(conductor.faults)


def _describe(conductor: Conductor, record: LinkRecord) -> tuple[int, str]:
    """Put what ranks say of themselves on record; ranks of a node as they are named, and the kind of device.

    Raises: ClusterError: nothing is known of the device.
    """
    about = conductor.about
    record.hosts = tuple(about[rank]["host"] if rank in about else "" for rank in range(conductor.world))
    found = next(iter(about.values()))
    record.source = f"{found['backend']}, torch {torch.__version__}, {conductor.world} ranks"
    on_cpu = found["device"] == "cpu"
    known = device("cpu") if on_cpu else preset_of(found["device"])
    if known is None and record.base is None:
        raise ClusterError(
            f"device {found['device']!r} is not among those known: describe it in a cluster.toml and give "
            "that as --cluster"
        )
    record.device_name = known.name if known else ""
    return _ranks_of_a_host(record.hosts, found["local_world"]), "cpu" if on_cpu else "cuda"


def _ranks_of_a_host(hosts: tuple[str, ...], local_world: int) -> int:
    """By names of hosts, where these come in equal blocks; all ranks of one host may be several nodes, as
    torchrun was started (``local_world``; 0: it was not)."""
    world = len(hosts)
    size = next((i for i, host in enumerate(hosts) if host != hosts[0]), world)
    if size == world and local_world and world % local_world == 0:
        return local_world
    even = world % size == 0 and all(len(set(hosts[i : i + size])) == 1 for i in range(0, world, size))
    return size if even else world


def _largest(conductor: Conductor, device_type: str, max_size: int | None) -> int:
    """Largest payload [B]: what was asked for, as far as memory holds it."""
    hosts = [each["host"] for each in conductor.about.values()]
    sharers = max((hosts.count(host) for host in hosts), default=1) if device_type == "cpu" else 1
    free = min((each["free"] for each in conductor.about.values()), default=0)
    return max(min(max_size or LARGEST[device_type], int(free * MEMORY_SHARE) // sharers), FIRST_SIZE)
