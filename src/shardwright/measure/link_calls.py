"""Collectives as they are measured: each with a payload that is known, and a check that it arrived.

n: ranks of the group. S: elements of the payload, counted as plan/collectives.py does.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardwright.bandwidth_map import Collective
from shardwright.measure.link_group import LinkGroup

PERIOD = 4093
"""Of the numbers sent, a prime: no part of a payload equals its neighbour."""

ELEMENT_BYTES = 4


class Call(NamedTuple):
    """``once`` runs the collective; ``filled`` gives it its payload, known to all; ``wrong`` says what of it
    has not arrived, "" if all has."""

    once: Callable[[], None]
    filled: Callable[[], None]
    wrong: Callable[[], str]


def payload_elements(size: int, n: int) -> int:
    """Elements of a payload of at most ``size`` [B], every rank's part alike."""
    return max(size // ELEMENT_BYTES // n, 1) * n


def payload_bytes(size: int, n: int) -> int:
    """The same in bytes [B]."""
    return payload_elements(size, n) * ELEMENT_BYTES


def call_of(collective: Collective, group: LinkGroup, size: int) -> Call:
    """``collective`` over ``group`` with a payload of ``size`` [B]."""
    n = len(group.ranks)
    count = payload_elements(size, n)
    if collective == "send":
        return _send(group, count)
    if collective == "all_reduce":
        return _all_reduce(group, count)
    part = count // n
    given = {"all_gather": part, "reduce_scatter": count, "all_to_all": count}[collective]
    gets = {"all_gather": count, "reduce_scatter": part, "all_to_all": count}[collective]
    source = torch.empty(given, device=group.device)
    target = torch.empty(gets, device=group.device)

    def once() -> None:
        group.wait(_start(collective, group.group, target, source))

    def filled() -> None:
        source.copy_(pattern(given, group.me))
        target.zero_()

    def expected(sender: int) -> torch.Tensor:
        if collective == "all_gather":
            return pattern(part, sender)
        return pattern(count, sender)[group.me * part : (group.me + 1) * part]

    def wrong() -> str:
        if collective == "reduce_scatter":
            total = sum((expected(sender) for sender in range(n)), torch.zeros(part))
            return "" if torch.equal(target.cpu(), total) else _places("its sum", target.cpu(), total)
        parts = target.cpu().view(n, part)
        found = [
            _places(f"what rank {group.ranks[sender]} sent", parts[sender], expected(sender))
            for sender in range(n)
            if not torch.equal(parts[sender], expected(sender))
        ]
        return "; ".join(found)

    return Call(once, filled, wrong)


def pattern(count: int, sender: int) -> torch.Tensor:
    """What the ``sender``-th rank of a group sends: whole numbers whose sums float32 has exactly."""
    period = torch.arange(PERIOD, dtype=torch.float32) % 251 + sender
    return period.repeat(-(-count // PERIOD))[:count]


def _start(collective: str, group: Any, target: torch.Tensor, source: torch.Tensor) -> Any:
    if collective == "all_gather":
        return group._allgather_base(target, source)
    if collective == "reduce_scatter":
        return group._reduce_scatter_base(target, source)
    return group.alltoall_base(target, source, [], [])


def _all_reduce(group: LinkGroup, count: int) -> Call:
    tensor = torch.zeros(count, device=group.device)

    def once() -> None:
        group.wait(group.group.allreduce([tensor]))

    def filled() -> None:
        tensor.copy_(pattern(count, group.me))

    def wrong() -> str:
        n = len(group.ranks)
        total = pattern(count, 0) * n + n * (n - 1) // 2
        found = "" if torch.equal(tensor.cpu(), total) else _places("the sum", tensor.cpu(), total)
        tensor.zero_()  # sums of sums would grow without bound
        return found

    return Call(once, filled, wrong)


def _send(group: LinkGroup, count: int) -> Call:
    """From the first rank of two to the second."""
    tensor = torch.zeros(count, device=group.device)
    first = group.me == 0

    def once() -> None:
        send_or_receive(group, tensor, first)

    def filled() -> None:
        if first:
            tensor.copy_(pattern(count, 0))
        else:
            tensor.zero_()

    def wrong() -> str:
        sent = pattern(count, 0)
        if torch.equal(tensor.cpu(), sent):
            return ""
        return _places(f"what rank {group.ranks[0]} sent", tensor.cpu(), sent)

    return Call(once, filled, wrong)


def send_or_receive(group: LinkGroup, tensor: torch.Tensor, sends: bool) -> None:
    """Give ``tensor`` to the other of two ranks, or fill it with what the other gives."""
    other = 1 - group.me
    do = group.group.send if sends else group.group.recv
    group.wait(do([tensor], other, 0))


def _places(what: str, found: torch.Tensor, expected: torch.Tensor) -> str:
    differ = (found != expected).nonzero().flatten()
    place = int(differ[0])
    return (
        f"{what} arrived wrong in {len(differ)} of {len(expected)} numbers: the first is number {place}, "
        f"{found[place].item():g} instead of {expected[place].item():g}"
    )
