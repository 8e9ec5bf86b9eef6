"""Write the tables of docs/accuracy.md anew; the words between them stay.

    python scripts/fit_devices.py tests/check/published_runs/runs.csv --folds > fit.json
    python scripts/accuracy_tables.py fit.json

A table is known by its heading. The errors of other tools stand in the document and are left as they are.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.check.accuracy import accuracy

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "tests" / "check" / "published_runs"
BY = ("gpu", "framework", "axis")

VARIANTS = {
    "a priori": "a priori: nothing fitted, what unknown hardware gets",
    "five folds": "five folds by config_id, refitted in each",
    "leave one source out": "leave one source out, refitted in each",
    "fitted": "the constants as shipped, on the rows they were fitted to",
}

Document = Mapping[str, Any]
Table = tuple[Sequence[str], list[Sequence[object]]]


def main() -> None:
    """Predict all rows, and replace every table that has a new one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fit", type=Path, help="what fit_devices.py --folds prints")
    options = parser.parse_args()
    fit = json.loads(options.fit.read_text(encoding="utf-8"))
    runs = accuracy(RUNS / "runs.csv", None, None, BY)
    vtrain, bare = (
        accuracy(RUNS / "vtrain_multi.csv", None, None, BY, fitted=fitted) for fitted in (True, False)
    )
    path = ROOT / "docs" / "accuracy.md"
    text = path.read_text(encoding="utf-8")
    for head, rows in tables(fit, runs, vtrain):
        text = replaced(text, head, rows)
    for name, document in (("fitted (never to these rows)", vtrain), ("a priori", bare)):
        line = f"| shardwright, {name} | {relative(document)} | {regrets(document)} |"
        text = re.sub(rf"\| shardwright, {re.escape(name)} \|.*", line, text)
    path.write_text(text, encoding="utf-8")


def tables(fit: Document, runs: Document, vtrain: Document) -> Iterator[Table]:
    """Headings and rows."""
    yield ("bar", "figure", ""), list(bars(fit, runs, vtrain))
    yield (
        ("variant", "all", "dense", "MoE", "mean", "sweeps: regret mean, worst, tau"),
        [
            (text, *(both(fit[key][part]) for part in ("all", "dense", "moe")), mean(fit[key]["all"]),
             f"{percent(fit[key]['sweeps']['mean_regret'])}, {percent(fit[key]['sweeps']['worst_regret'])}, "
             f"{fit[key]['sweeps']['mean_tau']:.2f}")
            for key, text in VARIANTS.items()
        ],
    )  # fmt: skip
    left = fit["leave one source out"]["sources"]
    yield (
        ("source", "rows", "a priori", "five folds", "source left out", "mean, left out"),
        [
            (name, errors["rows"], *(both(fit[key]["sources"][name]) for key in ("a priori", "five folds")),
             both(errors), mean(errors))
            for name, errors in sorted(left.items(), key=lambda each: -each[1]["rows"])
        ],
    )  # fmt: skip
    for by in BY:
        rows = [(g["name"], g["rows"], both(g), mean(g)) for g in runs["groups"] if g["by"] == by]
        yield (by, "rows", "median / 90 %", "mean"), rows
    kinds = [(kind, errors["rows"], both(errors), mean(errors)) for kind, errors in runs["memory"].items()]
    yield ("kind", "rows", "median / 90 %", "mean"), kinds
    units = [(unit["source"], unit["unit"], unit["kind"], unit["rows"]) for unit in runs["units"]]
    yield ("source", "unit stated", "kind", "rows"), units
    yield ("assumed", "rows"), list(runs["assumed"].items())
    worst = [
        (row["run_id"], row["layout"], f"{100 * row['error']:+.0f} %", f"{row['term']} {row['share']:.0%}")
        for row in runs["worst"][:12]
    ]
    yield ("run", "layout", "error", "largest term"), worst


def bars(fit: Document, runs: Document, vtrain: Document) -> Iterator[tuple[str, str, str]]:
    """What was asked for, beside what came out."""
    found, memory, fits, sweeps = runs["predicted_complete"], runs["memory"], runs["fits"], runs["sweeps"]
    large, calls = len(fits["called_too_large"]), len(fits["called_fitting"])
    four = [sweep["tau"] for sweep in sweeps["groups"] if sweep["layouts"] >= 4]
    a_priori = fit["a priori"]["sweeps"]["mean_tau"]
    yield (
        "A rows predicted, at least 85 %",
        f"{found['rows']} of {found['of']}",
        met(found["rows"] >= 0.85 * found["of"]),
    )
    for text, errors, median, p90 in (
        ("five folds, 6 / 18", fit["five folds"]["all"], 0.06, 0.18),
        ("leave one source out, 10 / 26", fit["leave one source out"]["all"], 0.10, 0.26),
        ("the same, dense, 8.5 / 22", fit["leave one source out"]["dense"], 0.085, 0.22),
        ("memory allocated, 2 / 5", memory["allocated"], 0.02, 0.05),
        ("memory nvidia-smi, 4 / 10", memory["nvidia-smi"], 0.04, 0.10),
        ("memory of the zero-bubble rows, 5 / 7", memory["zero-bubble"], 0.05, 0.07),
    ):
        yield text, both(errors), met(errors["median"] <= median and errors["p90"] <= p90)
    yield "memory reserved (torchtitan)", both(memory["reserved"]), "band"
    yield (
        "A rows that ran, called too large: at most 2 %",
        f"{large} of {fits['ran']}",
        met(large <= 0.02 * fits["ran"]),
    )
    yield (
        "A rows out of memory, called fitting: at most 1",
        f"{calls} of {fits['out_of_memory']}",
        met(calls <= 1),
    )
    yield (
        "sweeps: regret mean 2 %, worst 10 %",
        f"{percent(sweeps['mean_regret'])}, {percent(sweeps['worst_regret'])}",
        met(sweeps["mean_regret"] <= 0.02 and sweeps["worst_regret"] <= 0.10),
    )
    yield (
        "sweeps: Kendall's tau 0.75",
        f"{sweeps['mean_tau']:.3f} ({sweeps['count']} sweeps; {np.mean(four):.2f} for the {len(four)} of "
        f"four layouts and more; a priori {a_priori:.2f})",
        met(sweeps["mean_tau"] >= 0.75),
    )
    error = relative_errors(vtrain)
    yield "vTrain, mean absolute error 9 %", percent(np.abs(error).mean()), met(np.abs(error).mean() <= 0.09)
    yield (
        "vTrain, regret below 5 % in all four groups",
        regrets(vtrain),
        met(vtrain["sweeps"]["worst_regret"] < 0.05),
    )


def replaced(text: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The document with one table's rows anew.

    Raises: SystemExit: it has no such table.
    """
    first = line(head)
    if first not in text:
        raise SystemExit(f"docs/accuracy.md has no table {first}")
    start = text.index(first)
    end = start + re.match(r"(?:\|.*\n)+", text[start:]).end()  # type: ignore[union-attr]
    table = "\n".join([first, "|" + "---|" * len(head), *map(line, rows)])
    return f"{text[:start]}{table}\n{text[end:]}"


def line(cells: Sequence[object]) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def percent(share: float) -> str:
    """In percent, without the sign."""
    return f"{100 * share:.1f}"


def both(errors: Document) -> str:
    """Median and 90th percentile."""
    return f"{percent(errors['median'])} / {percent(errors['p90'])}"


def mean(errors: Document) -> str:
    """The signed mean."""
    return f"{100 * errors['bias']:+.1f}"


def met(holds: bool) -> str:
    """A verdict."""
    return "met" if holds else "**not met**"


def relative_errors(document: Document) -> np.ndarray:
    """predicted / measured - 1 of all rows."""
    return np.array([row["predicted"] / row["measured"] - 1 for row in document["rows"]])


def relative(document: Document) -> str:
    """Mean absolute and mean error."""
    error = relative_errors(document)
    return f"{percent(np.abs(error).mean())} % | {100 * error.mean():+.1f} %"


def regrets(document: Document) -> str:
    """Of every group."""
    return ", ".join(percent(group["regret"]) for group in document["sweeps"]["groups"])


if __name__ == "__main__":
    main()
