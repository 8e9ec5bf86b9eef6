"""A process group of some ranks, made by them alone and independent of all others: if it breaks, they live.

Torch's default group is not used: it joins all ranks, and one that does not answer ends it for all.
"""

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SHORTEST_WAIT_S = 0.01

LONGEST_OPERATION = timedelta(minutes=30)
"""What torch itself would allow; each wait here has a limit of its own, which comes first."""

POLL_S = 2e-5


class LinkGroup:
    """Ranks ``ranks`` (of the world), this one being ``ranks[me]``; gloo on CPU, NCCL on CUDA.

    ``end`` (time.monotonic) limits whatever is waited for; set it anew for each measurement.

    Raises: RuntimeError: the others did not come before ``end``.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        device: torch.device,
        end: float,
    ) -> None:
        self.ranks, self.me, self.device, self.end = ranks, ranks.index(rank), device, end
        own = dist.PrefixStore(name, store)
        if device.type == "cuda":
            from torch.distributed import ProcessGroupNCCL  # absent from torch's CPU builds

            options = ProcessGroupNCCL.Options()
            options._timeout = LONGEST_OPERATION
            self.group: Any = ProcessGroupNCCL(own, self.me, len(ranks), options)
        else:
            self.group = dist.ProcessGroupGloo(own, self.me, len(ranks), self.left)
            self.group._set_default_timeout(LONGEST_OPERATION)

    @property
    def left(self) -> timedelta:
        """Time left to this measurement."""
        return timedelta(seconds=max(self.end - time.monotonic(), SHORTEST_WAIT_S))

    def wait(self, work: Any) -> None:
        """Until ``work`` is done on CPU; on CUDA what follows on the stream waits, and this returns.

        Raises: RuntimeError: another rank is gone, or the time is up.
        """
        if self.device.type == "cuda":
            work.wait()
        else:
            work.wait(self.left)

    def finish(self) -> None:
        """Until the device has done what was launched; never for ever.

        Raises: TimeoutError: the time is up.
        """
        if self.device.type != "cuda":
            return
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        while not event.query():
            if time.monotonic() > self.end:
                raise TimeoutError("the device did not finish in time")
            time.sleep(POLL_S)

    def agree(self, value: float) -> float:
        """The largest of all ranks' ``value``."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self.wait(self.group.allreduce([tensor], options))
        self.finish()
        return float(tensor.item())

    def abandon(self) -> None:
        """End what hangs in it, as far as the backend can."""
        if self.device.type == "cuda":
            self.group.abort()
