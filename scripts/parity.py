"""Print the parity matrix: how far layouts on real ranks over gloo are from one process in plain PyTorch.

    python scripts/parity.py [part of a name ...] [--json]

Exit status 1 if a row is outside its tolerance. The table is tests/run/matrix.py, the tolerances too.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "run"))

from matrix import GRADIENT, LOSS, NORM, PARAMETER, ROWS, compared

HEADING = f"{'loss':>8} {'norm':>8} {'gradient':>8} {'weights':>8} {'time':>6}  layout, model, optimizer"


def main() -> int:
    """Run the rows whose names have every part given, print a line each and a verdict."""
    wanted = [argument for argument in sys.argv[1:] if argument != "--json"]
    as_json = "--json" in sys.argv[1:]
    rows = [row for row in ROWS if all(part in row.label for part in wanted)]
    if not rows:
        print(f"none of the {len(ROWS)} rows has {' and '.join(wanted)} in its name", file=sys.stderr)
        return 2
    found = []
    if not as_json:
        print(HEADING, flush=True)
    for row in rows:
        start = time.perf_counter()
        differs = compared(row)
        seconds = time.perf_counter() - start
        found.append({"row": row.label, "ranks": row.layout.ranks, **differs._asdict(), "ok": differs.ok})
        if not as_json:
            numbers = (differs.loss, differs.norm, differs.gradient, differs.parameter)
            cells = " ".join(f"{number:8.1e}" for number in numbers)
            print(f"{cells} {seconds:5.1f}s  {row.label}{'' if differs.ok else '  DIFFERS'}", flush=True)
    bad = [line["row"] for line in found if not line["ok"]]
    if as_json:
        print(json.dumps({"ok": not bad, "rows": found}))
    else:
        allowed = f"loss {LOSS:g}, norm {NORM:g}, gradients {GRADIENT:g}, weights {PARAMETER:g}"
        print(f"{len(found) - len(bad)} of {len(found)} rows within {allowed} of one process")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
