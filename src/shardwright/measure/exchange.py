"""What the conductor and the ranks tell each other, through a store and never through the links measured.

hello/R     what rank R is, once it runs
cell/K      the K-th measurement, or null: the end
here/K      how many ranks are ready for it; go/K: all are
done/K/R    what rank R measured
sign/R      a count that grows while the process of rank R runs, and what it is doing
dead/R      how the process of rank R ended, from the process that started it; deaths: how many have
over        there is nothing more to measure; seen/R: the process that started rank R knows
"""

import contextlib
import json
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

PREFIX = "shardwright-map"

CONNECT = timedelta(seconds=60)

POLL_S = 0.004
"""Between two looks: little beside a measurement, and next to no load beside its ranks."""

NEXT = timedelta(days=1)
"""How long a rank waits for the next measurement: the conductor's end breaks the connection."""


def connect(host: str, port: int) -> dist.Store:
    """A connection of one's own: a client that waits holds up all others that share its connection."""
    store = dist.TCPStore(host, port, is_master=False, timeout=CONNECT)
    return dist.PrefixStore(PREFIX, store)


def greet(store: dist.Store, rank: int, about: dict[str, Any]) -> None:
    """Say that this rank runs."""
    store.set(f"hello/{rank}", json.dumps(about))


def next_cell(store: dist.Store, number: int) -> dict[str, Any] | None:
    """The measurement of this number, when it comes; None: there is none, or no conductor any more."""
    try:
        store.wait([f"cell/{number}"], NEXT)
        found: dict[str, Any] | None = json.loads(store.get(f"cell/{number}"))
    except RuntimeError:
        return None
    return found


def ask(store: dist.Store, number: int, cell: dict[str, Any] | None) -> None:
    """Put the measurement of this number to the ranks."""
    store.set(f"cell/{number}", json.dumps(cell))


def meet(store: dist.Store, number: int, ranks: int, patience: timedelta) -> None:
    """Wait for all ``ranks`` of a measurement, so that its groups begin at once; those that are missing when
    patience ends are of a group that has not connected, and the others go on."""
    if store.add(f"here/{number}", 1) == ranks:
        store.set(f"go/{number}", "")
    with contextlib.suppress(dist.DistStoreError):
        store.wait([f"go/{number}"], patience)


def give_answer(store: dist.Store, number: int, rank: int, answer: dict[str, Any]) -> None:
    """Say what this rank measured."""
    store.set(f"done/{number}/{rank}", json.dumps(answer))


def give_sign(store: dist.Store, rank: int, count: int, doing: str) -> None:
    """Say that this process runs."""
    store.set(f"sign/{rank}", json.dumps([count, doing]))


def arrived(store: dist.Store, keys: Iterable[str], patience_s: float) -> bool:
    """Whether all ``keys`` are there within ``patience_s``. Looks again and again: a wait of the store that
    ends without them writes warnings, and is deaf to Ctrl-C."""
    wanted, end = list(keys), time.monotonic() + patience_s
    while not store.check(wanted):
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_S)
    return True


def read(store: dist.Store, key: str) -> Any:
    """What stands there; None: nothing."""
    return json.loads(store.get(key)) if store.check([key]) else None


def read_all(store: dist.Store, keys: Sequence[str]) -> list[Any]:
    """What stands at each of ``keys``; None: nothing."""
    if store.check(list(keys)):
        return [json.loads(said) for said in store.multi_get(list(keys))]
    return [read(store, key) for key in keys]


def give_end(store: dist.Store, rank: int, how: str) -> None:
    """Say how the process of ``rank`` ended."""
    store.set(f"dead/{rank}", json.dumps(how))
    store.add("deaths", 1)


def read_ends(store: dist.Store, ranks: Sequence[int]) -> dict[int, str]:
    """How processes ended, of those that have."""
    if store.add("deaths", 0) == 0:
        return {}
    return {rank: how for rank in ranks if (how := read(store, f"dead/{rank}")) is not None}


def is_over(store: dist.Store, rank: int) -> bool:
    """Whether there is nothing more to measure; who asks for ``rank`` is known to know."""
    if not store.check(["over"]):
        return False
    store.set(f"seen/{rank}", "")
    return True


def farewell(store: dist.Store, world: int, patience_s: float) -> None:
    """Say that it is over, and wait until all that started ranks have seen it: the store may end with us."""
    store.set("over", "")
    arrived(store, [f"seen/{rank}" for rank in range(1, world)], patience_s)
