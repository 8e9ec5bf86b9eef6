"""What is best: least step time or cost, fewest devices, largest microbatch, or longest sequence.

Every objective but time narrows the question first, by searches of its own; ``find`` then answers it by time.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from shardwright.cluster import Cluster
from shardwright.errors import JobError
from shardwright.job import Job
from shardwright.model import ModelSpec
from shardwright.plan.finding import Finding, Ranking, Wishes, columns_asked, find, memory_limit
from shardwright.plan.nothing import nearest_miss, resized
from shardwright.plan.search import SearchResult, search
from shardwright.plan.space import search_space

Objective = Literal["time", "cost", "gpus", "micro-batch", "sequence"]


class Question(NamedTuple):
    """What is searched, with the columns fixed."""

    model: ModelSpec
    job: Job
    cluster: Cluster
    fixed: Mapping[str, Sequence[int]]
    max_memory: float | None

    def answer(self) -> SearchResult:
        """Its search."""
        return search(self.model, self.job, self.cluster, self.fixed, self.max_memory)

    def missed(self, result: SearchResult) -> dict[str, Any]:
        """How far a search that found nothing is from fitting, or why there was no layout to evaluate."""
        miss = nearest_miss(self.model, self.job, self.cluster, result)
        return {"nearest_miss": miss, "reasons": dict(result.rejected)}


class Narrowed(NamedTuple):
    """The question that the objective leaves, and what it says in the document."""

    question: Question
    said: dict[str, Any]


def find_best(
    objective: Objective,
    model: ModelSpec,
    job: Job,
    cluster: Cluster,
    fixed: Wishes,
    max_memory: str | None = None,
    top: int = 5,
    ranking: Ranking = "runnable_first",
) -> Finding:
    """What ``find`` says of the question that the objective leaves; under ``objective`` what it found.

    Raises: what ``find`` raises. JobError: a cost is asked for and no price is given.
    """
    if objective == "cost" and not cluster.price_per_device_hour:
        raise JobError(
            "--objective cost needs a price: give --price 2.5, of a device-hour, or "
            "price_per_device_hour in a cluster file"
        )
    columns = columns_asked(model, job, fixed, ranking)
    narrowed = Narrowed(Question(model, job, cluster, columns, memory_limit(max_memory)), {})
    if objective in NARROWED_BY:
        narrowed = NARROWED_BY[objective](narrowed.question)
    asked = narrowed.question
    found = find(model, asked.job, asked.cluster, asked.fixed, max_memory, top, ranking)
    return Finding(found.best, found.document | {"objective": {"name": objective, **narrowed.said}})


def device_counts(cluster: Cluster) -> list[int]:
    """Numbers of devices to try: doubling inside a node, then in whole nodes, and all."""
    inside = [2**n for n in range(cluster.gpus_per_node.bit_length()) if 2**n < cluster.gpus_per_node]
    nodes = [cluster.gpus_per_node * 2**n for n in range(cluster.nodes.bit_length())]
    return [n for n in (*inside, *nodes) if n < cluster.ranks] + [cluster.ranks]


def fewest_devices(question: Question) -> Narrowed:
    """The smallest number of devices on which something fits; all of them if nothing does.

    Says ``gpus`` and ``misses``, by smaller numbers: ``gpus``, ``nearest_miss``, ``reasons``.
    """
    misses: list[dict[str, Any]] = []
    for ranks in device_counts(question.cluster):
        smaller = question._replace(cluster=resized(question.cluster, ranks))
        if ranks == question.cluster.ranks:
            break
        result = smaller.answer()
        if len(result.best):
            break
        misses.append({"gpus": ranks, **smaller.missed(result)})
    return Narrowed(smaller, {"gpus": ranks, "misses": misses})


def largest_micro_batch(question: Question) -> Narrowed:
    """The most tokens of a microbatch on one rank, b s / cp, that fit; of equally many the fastest.

    Says ``micro_batch``, ``cp``, ``tokens``, and the next larger that does not fit under ``next``: the same
    three, ``nearest_miss``, ``reasons``; None if there is none.
    """
    sizes = _micro_batches(question)
    larger: dict[str, Any] | None = None
    for tokens in sorted({b * question.job.seq / cp for b, cp in sizes}, reverse=True):
        fitting: list[tuple[float, int, int]] = []
        for b, cp in (size for size in sizes if size[0] * question.job.seq / size[1] == tokens):
            part = question._replace(fixed={**question.fixed, "micro_batch": [b], "cp": [cp]})
            result = part.answer()
            if len(result.best):
                fitting.append((float(result.time[result.best].min()), b, cp))
            elif len(result.misses.device):
                larger = {"micro_batch": b, "cp": cp, "tokens": tokens, **part.missed(result)}
        if fitting:
            _, b, cp = min(fitting)
            fixed = {**question.fixed, "micro_batch": [b], "cp": [cp]}
            larger = larger if larger and larger["tokens"] > tokens else None
            said = {"micro_batch": b, "cp": cp, "tokens": tokens, "next": larger}
            return Narrowed(question._replace(fixed=fixed), said)
    return Narrowed(question, {})


def _micro_batches(question: Question) -> list[tuple[int, int]]:
    """Microbatches and degrees of cp that layouts have together."""
    space = search_space(question.model, question.job, question.cluster.ranks)
    allowed = [question.fixed.get(column) for column in ("micro_batch", "cp")]
    sizes = {
        (b, cp)
        for grid in space.grids
        for b in np.unique(grid.table.micro_batch).tolist()
        for cp in np.unique(grid.table.cp).tolist()
        if all(known is None or n in known for n, known in zip((b, cp), allowed, strict=True))
    }
    return sorted(sizes)


def longest_sequence(question: Question) -> Narrowed:
    """The longest sequence, a power of two times the job's, that fits with as many tokens in a batch.

    Says ``seq``, ``global_batch`` and ``misses``, by longer ones: these two, ``nearest_miss``, ``reasons``.
    """
    misses: list[dict[str, Any]] = []
    job = question.job
    most = (job.global_batch & -job.global_batch).bit_length() - 1  # halvings of the batch
    for doublings in range(most, -1, -1):
        longer = {"seq": job.seq * 2**doublings, "global_batch": job.global_batch // 2**doublings}
        asked = question._replace(job=job.model_copy(update=longer))
        if not doublings:
            break
        result = asked.answer()
        if len(result.best):
            break
        misses.append({**longer, **asked.missed(result)})
    return Narrowed(asked, {**longer, "misses": misses})


NARROWED_BY: Mapping[str, Callable[[Question], Narrowed]] = {
    "gpus": fewest_devices,
    "micro-batch": largest_micro_batch,
    "sequence": longest_sequence,
}
"""Objectives that narrow the question."""
