"""Tables of published runs: the rows of a file that can be predicted, and why the others cannot."""

import csv
import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.check.runs_case import Case, case_of_row
from shardwright.check.runs_layout import NotPredictedError
from shardwright.check.runs_model import Row
from shardwright.errors import JobError

EXCLUDED = Path(__file__).parents[1] / "data" / "excluded_runs.toml"

NEEDED = (
    *("run_id", "source_id", "framework", "phase", "model", "layers_override", "heads_override", "gpu"),
    *("gpus_per_node", "n_gpus", "interconnect", "seq_len", "gbs_seqs", "mbs_seqs", "grad_accum", "dp"),
    *("dp_mode", "zero_stage", "dp_shard_size", "tp", "sp", "cp", "cp_kind", "pp", "vpp", "schedule", "ep"),
    *("etp", "moe_balance", "recompute", "precision", "compile_or_attn", "offload", "peak_mem"),
    *("peak_mem_unit", "peak_mem_kind", "outcome", "step_time_s_best", "completeness", "note"),
    *("release_or_date", "config_id"),
)
"""Columns that a table of runs must have."""

GATE = ("A", "B")
"""Completeness of rows that figures count: the whole layout, or all but microbatch or recomputation."""


@dataclass
class Runs:
    """A file's rows: those to predict, and those that are not, counted by reason."""

    cases: list[Case] = field(default_factory=list)
    unpredicted: Counter[str] = field(default_factory=Counter)
    excluded: dict[str, str] = field(default_factory=dict)
    complete: int = 0  # rows of completeness A with a measurement
    complete_predicted: int = 0


def read_table(path: Path, needed: tuple[str, ...]) -> list[Row]:
    """Rows of a CSV file.

    Raises: JobError: it cannot be read, or lacks columns; the message names them.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as fault:
        raise JobError(f"cannot read {path}: {fault}: give a table of runs as CSV") from None
    missing = [column for column in needed if not rows or column not in rows[0]]
    if missing:
        raise JobError(f"{path} has no columns {', '.join(missing)}: give a table of the form of runs.csv")
    return [{key: value or "" for key, value in row.items() if key is not None} for row in rows]


OTHER_TABLE = "heads: those of the source's other runs of the model"


def read_runs(path: Path, models: Path, gpus: Path | None, *, fitted: bool = True) -> Runs:
    """Runs of a table, the sizes of their models beside them; ``gpus`` for kinds the package has no file of.

    Raises: JobError: a table cannot be read.
    """
    sizes = {row["model"]: row for row in read_table(models, ("model", "layers", "hidden"))}
    sheets = {} if gpus is None else {row["gpu"]: row for row in read_table(gpus, ("gpu", "memory_gb"))}
    excluded: Mapping[str, str] = tomllib.loads(EXCLUDED.read_text(encoding="utf-8"))["runs"]
    rows, runs = read_table(path, NEEDED), Runs()
    heads = _stated_heads(rows)
    for row in rows:
        if row["run_id"] in excluded:
            runs.excluded[row["run_id"]] = excluded[row["run_id"]]
            continue
        measured = bool(row["step_time_s_best"] or row["peak_mem"] or row["outcome"] == "OOM")
        complete = row["completeness"] == "A" and measured
        runs.complete += complete
        if not measured:
            runs.unpredicted["nothing was measured"] += 1
            continue
        if row["completeness"] not in GATE:
            reason = {"C": "layout or batch is missing", "X": "the source contradicts itself"}
            runs.unpredicted[reason.get(row["completeness"], "completeness is not A to X")] += 1
            continue
        other = "" if _heads(row, sizes) else heads.get((row["source_id"], row["model"]), "")
        stated = {**row, "heads_override": row["heads_override"] or other}
        try:
            case = case_of_row(stated, sizes, sheets, fitted=fitted)
            runs.cases.append(case._replace(assumed=(*case.assumed, OTHER_TABLE)) if other else case)
            runs.complete_predicted += complete
        except NotPredictedError as fault:
            runs.unpredicted[str(fault)] += 1
    return runs


def _heads(row: Row, sizes: Mapping[str, Row]) -> str:
    """What a run or its model says of heads."""
    return row["heads_override"] or sizes.get(row["model"], {}).get("heads", "")


def _stated_heads(rows: Sequence[Row]) -> Mapping[tuple[str, str], str]:
    """Heads of the models of each source, where all of its runs that state them agree."""
    found = defaultdict(set)
    for row in rows:
        if row["heads_override"]:
            found[row["source_id"], row["model"]].add(row["heads_override"])
    return {key: stated.pop() for key, stated in found.items() if len(stated) == 1}
