"""Comma- and tab-separated tables of numbers with a header, as steps: what people paste from a run's
metrics."""

import csv
import io
from collections.abc import Iterator

from shardwright.doctor.evidence import Step
from shardwright.doctor.finding import Source
from shardwright.doctor.lines import rank_of_name
from shardwright.doctor.step_log import NAMES, STEP_NAMES, step_of_mapping

MOST_ROWS = 200_000


def is_table(head: str) -> bool:
    """Whether a text begins with a header of known names."""
    first = head.lstrip("#").strip().partition("\n")[0]
    names = [name.strip().strip('"').lower() for name in first.replace("\t", ",").split(",")]
    known = [name for name in names if name in NAMES or name in STEP_NAMES or name == "rank"]
    return len(names) >= 2 and len(known) >= 2


def read_table(name: str, text: str) -> Iterator[Step]:
    """Its rows."""
    own = rank_of_name(name)
    delimiter = "\t" if "\t" in text.partition("\n")[0] else ","
    rows = csv.DictReader(io.StringIO(text.lstrip("#").lstrip()), delimiter=delimiter)
    for number, row in enumerate(rows, start=2):
        if number > MOST_ROWS:
            return
        values = {str(key).strip(): value for key, value in row.items() if key is not None}
        shown = delimiter.join(str(value) for value in values.values())
        step = step_of_mapping(Source(name, number, shown), values, own)
        if step is not None:
            yield step
