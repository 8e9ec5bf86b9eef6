"""How far a predicted step time may be off: residuals of published runs of the nearest kind.

Residuals are of runs that the constants were not fitted to (scripts/fit_devices.py writes them). Errors of
layouts of one job are alike, so that their order is surer than their times: layouts closer than what the
difference of two errors within a sweep is are tied.
"""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from math import exp
from pathlib import Path
from typing import NamedTuple

from shardwright.cluster import Cluster
from shardwright.job import Job

RESIDUALS = Path(__file__).parents[1] / "data" / "residuals.toml"

LEAST_ROWS = 10
"""Runs of a kind, for its residuals to be taken."""

NEAREST = {"shardwright": "torchtitan"}
"""Programs without published runs, and the one that is written most like them."""

SETTLED_BY = {
    "compute": "the rate of this device's matrix products and attention at the two layouts' shapes",
    "bubble": "ten steps of both: their pipelines wait differently",
    "tp": "the links inside a node: an all-gather at the size of a microbatch",
    "cp": "the links inside a node: a send at the size of keys and values",
    "ep": "the links that experts trade over: an all-to-all at the size of a microbatch",
    "host": "copies to and from the host",
    "optimizer": "the bandwidth of device memory",
}
"""By the part in which two layouts differ most: what to measure. Other parts travel between nodes."""

BETWEEN_NODES = "the links between nodes: an all-gather and a reduce-scatter at the size of a block"


class Interval(NamedTuple):
    """Factors on a predicted time between which four of five measured times lie, and of which runs."""

    low: float
    high: float
    rows: int
    kind: str


@cache
def _residuals() -> Mapping[str, object]:
    return tomllib.loads(RESIDUALS.read_text(encoding="utf-8"))


def interval_of(job: Job, cluster: Cluster) -> Interval:
    """The interval of the nearest kind of run: of this program on this device, of the program, or of all."""
    kinds = _residuals()["kinds"]
    assert isinstance(kinds, list)
    program = NEAREST.get(job.program.name, job.program.name)
    wanted = ((program, cluster.device.name), (program, ""), ("", ""))
    rows = {(kind["program"], kind["device"]): kind for kind in kinds}
    for program_name, device_name in wanted:
        found = rows.get((program_name, device_name))
        if found is not None and found["rows"] >= LEAST_ROWS:
            words = " on ".join(part for part in (program_name, device_name) if part) or "all published runs"
            return Interval(exp(-found["high"]), exp(-found["low"]), found["rows"], words)
    raise AssertionError("residuals have a row of all runs")


def within_job() -> float:
    """Difference of two errors of one job that four of five pairs do not exceed."""
    found = _residuals()["within_job"]
    assert isinstance(found, float)
    return found


def tied(times: Sequence[float]) -> int:
    """How many of the fastest, which come first, are closer than errors within a job allow to tell."""
    return sum(time <= times[0] * exp(within_job()) for time in times)


def settled_by(one: Mapping[str, float], other: Mapping[str, float]) -> str:
    """What to measure to tell two layouts apart, from the parts of their steps [s]."""
    names = {*one, *other}
    most = max(names, key=lambda name: abs(one.get(name, 0.0) - other.get(name, 0.0)))
    return SETTLED_BY.get(most, BETWEEN_NODES)
