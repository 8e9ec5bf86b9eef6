"""Prove the ledger: dry-run the parity matrix and large layouts of real models, and hold plans against them.

    python scripts/prove.py [--only matrix|large] [part of a name ...] [--json FILE] [--jobs N]

State and traffic must be equal, the peak within 2 %, with experts 4 %. Exit status 1 if a row is not.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "run"))

from large import LARGE
from proof import proof_plans

from shardwright.check.compare import Comparison, check_plan
from shardwright.cluster import usable_cores
from shardwright.planfile import Plan

HEADING = f"{'state':>5} {'traffic':>7} {'peak':>7} {'time':>7}  model and layout"


def main() -> int:
    """Check the rows whose names have every part given, a line each, and say how many hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", help="only rows with these parts in their names")
    parser.add_argument("--only", choices=("matrix", "large"))
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="rows at once")
    wishes = parser.parse_args()
    found = []
    print(HEADING, flush=True)
    plans = [each for each in _plans(wishes.only) if all(part in each[0] for part in wishes.parts)]
    with ProcessPoolExecutor(wishes.jobs, mp_context=get_context("spawn")) as workers:
        for row in workers.map(_checked, plans):
            found.append(row)
            print(_line(row), flush=True)
            if wishes.json is not None:
                wishes.json.write_text(json.dumps(found, indent=1))
    bad = [row for row in found if not row["ok"]]
    print(f"{len(found) - len(bad)} of {len(found)} rows hold")
    return 1 if bad or not found else 0


def _plans(only: str | None) -> Iterator[tuple[str, Plan]]:
    if only != "large":
        yield from proof_plans()
    if only != "matrix":
        yield from ((large.label, large.plan) for large in LARGE)


def _checked(named: tuple[str, Plan]) -> dict[str, Any]:
    label, plan = named
    return _row(label, check_plan(plan))


def _row(label: str, found: Comparison) -> dict[str, Any]:
    peaks = [term for term in found.terms if term.term == "total"]
    worst = max(peaks, key=lambda term: abs(term.difference) / term.executed)
    state = all(term.ok for term in found.terms if term.moment == "rest")
    return {
        "row": label,
        "ok": state and all(flow.ok for flow in found.traffic) and all(term.ok for term in peaks),
        "state": state,
        "traffic": all(flow.ok for flow in found.traffic),
        "peak_difference": worst.difference / worst.executed,
        "peak": worst.executed,
        "pipeline_rank": worst.stage,
        "terms_that_differ": sorted({term.term for term in found.terms if not term.ok}),
        "ranks_executed": len(found.stages),
        "time": found.time,
    }


def _line(row: dict[str, Any]) -> str:
    state, traffic = ("equal" if row[name] else "DIFFERS" for name in ("state", "traffic"))
    terms = ", ".join(row["terms_that_differ"])
    tail = (
        "" if row["ok"] and not terms else f"  ({terms})" if row["ok"] else f"  DIFFERS: {terms or 'traffic'}"
    )
    return f"{state:>5} {traffic:>7} {row['peak_difference']:+7.2%} {row['time']:6.1f}s  {row['row']}{tail}"


if __name__ == "__main__":
    raise SystemExit(main())
