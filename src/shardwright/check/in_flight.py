"""Tensors in flight: what is sent or received is held until its Work is gone, in a dry run too.

A Work of gloo holds its tensor as long as the program keeps the Work, and one of NCCL until it is waited for;
those of the fake process group hold nothing. It matters to pipelines: torch's schedules of several stages a
rank would keep every send of a step to its end (run/pp.py:Outbox does not), 1F1B keeps the last.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


@contextlib.contextmanager
def held_in_flight() -> Iterator[None]:
    """Have every Work of ``isend`` and ``irecv`` made inside hold its tensor."""
    places = (dist, distributed_c10d)
    originals = {name: getattr(dist, name) for name in ("isend", "irecv")}
    for name, original in originals.items():
        holding = _holding(original)  # one, for torch asks which of the two a function is
        for place in places:
            setattr(place, name, holding)
    try:
        yield
    finally:
        for name, original in originals.items():
            for place in places:
                setattr(place, name, original)


def _holding(original: Callable[..., dist.Work | None]) -> Callable[..., dist.Work | None]:
    def start(tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
        work = original(tensor, *args, **kwargs)
        if work is not None:
            weakref.finalize(work, _let_go, tensor).atexit = False
        return work

    return start


def _let_go(tensor: Tensor) -> None:
    """The last name of a tensor ends here."""
