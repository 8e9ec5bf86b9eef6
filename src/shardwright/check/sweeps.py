"""Sweeps: layouts measured of one job, and how well choosing by prediction would have done."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardwright.check.runs_case import Case

LEAST_ROWS = 4
"""Rows of a job that make a sweep."""

JOB = ("source_id", "model", "layers_override", "gpu", "n_gpus", "seq_len", "gbs_seqs", "precision")
"""Columns in which rows of one sweep are equal."""


class Sweep(NamedTuple):
    """Layouts of one job, repeated ones as one: step times measured (their median) and predicted [s]."""

    name: str
    measured: np.ndarray
    predicted: np.ndarray

    @property
    def regret(self) -> float:
        """Measured time of the layout chosen by prediction over the best measured, less 1."""
        return float(self.measured[np.argmin(self.predicted)] / self.measured.min() - 1)

    @property
    def tau(self) -> float:
        """Kendall's tau-b of the two orders; 0 where one of them has no order."""
        rows = np.triu_indices(len(self.measured), 1)
        a, b = (np.sign(x[rows[0]] - x[rows[1]]) for x in (self.measured, self.predicted))
        scale = np.sqrt((a != 0).sum() * (b != 0).sum())
        return float((a * b).sum() / scale) if scale else 0.0


def sweeps_of(
    cases: Sequence[Case],
    measured: Sequence[float],
    predicted: Sequence[float],
    columns: Sequence[str] = JOB,
) -> list[Sweep]:
    """Sweeps among runs: at least four rows equal in ``columns``, with two layouts and more."""
    rows = defaultdict(list)
    for number, case in enumerate(cases):
        rows[tuple(case.row[column] for column in columns)].append(number)
    found = []
    for job, numbers in rows.items():
        if len(numbers) < LEAST_ROWS:
            continue
        layouts = defaultdict(list)
        for number in numbers:
            layouts[cases[number].model, cases[number].layout, cases[number].job].append(number)
        if len(layouts) < 2:
            continue
        times = [float(np.median([measured[n] for n in same])) for same in layouts.values()]
        guesses = [float(predicted[same[0]]) for same in layouts.values()]
        name = " ".join(part for part in job if part)
        found.append(Sweep(name, np.array(times), np.array(guesses)))
    return found
