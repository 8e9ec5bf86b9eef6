"""Body of a rank that measures: it does what the conductor asks, cell by cell, and says what it is doing."""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from shardwright.cluster import host_memory
from shardwright.measure import exchange
from shardwright.measure.link_calls import call_of, pattern, send_or_receive
from shardwright.measure.link_group import LinkGroup
from shardwright.measure.timing import Blocks, block_times

FIRST_BYTES = 8 * 2**10
"""Message by which a pair begins to find out how large a message its time allows: a link that has fallen to
1 MB/s is to be measured too."""

SHARES = (1 / 32, 1 / 16, 9 / 32)
"""Of a pair's time, what each size of message gets in one direction; 1/4 is for latency."""

ROOM = (1 / 16, 9 / 32 / 8)
"""Of the time, what one message of the next size may take by the rate of the one before. The first rate is
mostly latency, and too low: where it is not, the second size takes most of the time."""


MEETING = 0.5
"""Share of a measurement's limit within which its ranks must have connected."""


RETURN_S = 0.1
"""What a call may take to come back after its limit."""


class RankAtWork:
    """This rank's groups, and what it is doing at the moment.

    Measurements run in a thread of their own, because not every wait inside the libraries has a limit: one
    that does not come back is left behind with its thread.
    """

    def __init__(self, store: dist.Store, rank: int, device: torch.device) -> None:
        self.store, self.rank, self.device = store, rank, device
        self.groups: dict[str, LinkGroup] = {}
        self.broken: list[LinkGroup] = []  # kept: to take one apart waits for what hangs in it
        self.doing = "starting"
        self.number = -1
        self.hands = self._hands()

    def answer(self, asked: dict[str, Any], number: int) -> dict[str, Any]:
        """What this rank measured of cell ``number``, or the error it met."""
        self.number = number
        future = self.hands.submit(self._measure, asked, number)
        try:
            return future.result(asked["limit"] + RETURN_S)
        except TimeoutError:
            self.hands = self._hands()
            self._drop(self._own_group(asked)["name"])
            return {"error": "the call does not return", "doing": self.doing}
        finally:
            self.doing = "waiting for the next measurement"

    def _hands(self) -> ThreadPoolExecutor:
        def ready() -> None:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)

        return ThreadPoolExecutor(1, initializer=ready)

    def _own_group(self, asked: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = next(each for each in asked["groups"] if self.rank in each["ranks"])
        return found

    def _measure(self, asked: dict[str, Any], number: int) -> dict[str, Any]:
        mine = self._own_group(asked)
        name, ranks = mine["name"], tuple(mine["ranks"])
        start = monotonic()
        connected, end = start + MEETING * asked["limit"], start + asked["limit"]
        try:
            self._say(number, f"connecting ranks {list(ranks)}")
            group = self.groups.get(name)
            if group is None:
                group = LinkGroup(self.store, name, ranks, self.rank, self.device, connected)
                self.groups[name] = group
            group.end = connected
            group.agree(0.0)
            self._say(number, asked["what"])
            exchange.meet(self.store, number, len(asked["ranks"]), group.left)
            group.end = end
            found = _pair(group, asked) if asked["call"] == "pair" else _collective(group, asked)
        except (RuntimeError, TimeoutError) as error:
            self._drop(name)
            return {"error": str(error).partition("\n")[0][:300], "doing": self.doing}
        if not asked["keep"]:
            del self.groups[name]
        return found

    def _say(self, number: int, doing: str) -> None:
        """What is being done, unless it was left behind."""
        if number == self.number:
            self.doing = doing

    def _drop(self, name: str) -> None:
        if name in self.groups:
            group = self.groups.pop(name)
            self.broken.append(group)
            group.abandon()


def serve(host: str, port: int, rank: int, device: torch.device, beat_s: float) -> None:
    """Answer the conductor until it says stop, or is gone."""
    store = exchange.connect(host, port)
    work = RankAtWork(store, rank, device)
    exchange.greet(store, rank, _about(device))
    with _heart(exchange.connect(host, port), work, beat_s):
        number = 0
        while (asked := exchange.next_cell(store, number)) is not None:
            if rank in asked["ranks"]:
                exchange.give_answer(store, number, rank, work.answer(asked, number))
            number += 1


def _about(device: torch.device) -> dict[str, Any]:
    """What the conductor must know of a rank; ``free``: memory [B]."""
    known = {"host": socket.gethostname(), "local_world": int(os.environ.get("LOCAL_WORLD_SIZE", "0"))}
    if device.type != "cuda":
        return known | {"device": "cpu", "free": host_memory(), "backend": "gloo"}
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return known | {
        "device": torch.cuda.get_device_name(device),
        "free": torch.cuda.mem_get_info(device)[0],
        "backend": f"nccl {version}",
    }


@contextmanager
def _heart(store: dist.Store, work: RankAtWork, beat_s: float) -> Iterator[None]:
    """A thread that says again and again that this process runs, and what it does."""
    stopped = threading.Event()

    def beat() -> None:
        count = 0
        while not stopped.wait(beat_s):
            count += 1
            try:
                exchange.give_sign(store, work.rank, count, work.doing)
            except RuntimeError:  # the conductor is gone, and the main thread will see it too
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(1.0)


def _collective(group: LinkGroup, asked: dict[str, Any]) -> dict[str, Any]:
    """One collective at one size: payload checked once, then timed."""
    call = call_of(asked["call"], group, asked["size"])
    call.filled()
    call.once()
    group.finish()
    wrong = call.wrong()
    finish = group.finish if asked["call"] != "send" else _acknowledged(group)
    blocks = block_times(call.once, finish, group.agree, asked["seconds"])
    return {"means": blocks.means, "wrong": wrong}


def _acknowledged(group: LinkGroup) -> Any:
    """Wait until the receiver says that all has come: a sender is done when its message has left."""
    word = torch.zeros(1, device=group.device)

    def finish() -> None:
        send_or_receive(group, word, sends=group.me == 1)
        group.finish()

    return finish


def _pair(group: LinkGroup, asked: dict[str, Any]) -> dict[str, Any]:
    """Latency of a small message, and bandwidth of large ones, one direction at a time."""
    seconds = asked["seconds"]
    small = torch.zeros(2, device=group.device)

    def there_and_back() -> None:
        send_or_receive(group, small, sends=group.me == 0)
        send_or_receive(group, small, sends=group.me == 1)

    round_trips = block_times(there_and_back, group.finish, group.agree, seconds / 4)
    latencies = [time / 2 for time in round_trips.means]
    latency = group.agree(sorted(latencies)[len(latencies) // 2])
    found: dict[str, Any] = {"latencies": latencies, "wrong": []}
    for sender, direction in ((0, "there"), (1, "back")):
        larger = min(FIRST_BYTES, asked["size"])
        for share, room in zip(SHARES, (*ROOM, 0.0), strict=True):
            size = larger
            blocks, wrong = _stream(group, size, sender, seconds * share)
            times = [max(mean - latency / blocks.repeats, mean / 2) for mean in blocks.means]
            found[direction] = [size / time for time in times]
            rate = size / group.agree(min(times))
            larger = min(max(int(rate * seconds * room), size), asked["size"])
            if wrong and wrong not in found["wrong"]:
                found["wrong"].append(wrong)
    return found


def _stream(group: LinkGroup, size: int, sender: int, seconds: float) -> tuple[Blocks, str]:
    """Messages of ``size`` [B] one way, the receiver's word at the end of each block, and what came wrong."""
    count = max(size // 4, 1)
    sends = group.me == sender
    sent = pattern(count, sender).to(group.device)
    tensor = sent.clone() if sends else torch.zeros(count, device=group.device)
    word = torch.zeros(1, device=group.device)

    def once() -> None:
        send_or_receive(group, tensor, sends)

    def finish() -> None:
        send_or_receive(group, word, sends=not sends)
        group.finish()

    once()
    finish()
    wrong = "" if torch.equal(tensor, sent) else f"what rank {group.ranks[sender]} sent arrived wrong"
    return block_times(once, finish, group.agree, seconds), wrong
