"""Field reports with known causes against what the doctor says: right, wrong and "cannot tell" by group.

Artefacts are real files, unedited; built cases are made from a report's numbers in the form of the tool's
own messages. Exit status 1 if any is wrong. ``make cases`` runs it.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "doctor"))

from casebook import Case, cases, diagnosis, verdict

VERDICTS = ("right", "cannot tell", "wrong")
GROUPS = {
    "A": "memory",
    "B": "layout and placement",
    "C": "bandwidth and topology",
    "D": "hangs",
    "E": "numbers",
    "F": "checkpoints",
    "G": "pipelines",
    "H": "experts",
    "L": "lines of logs",
    "N": "tables",
    "T": "topologies",
}


def main() -> int:
    """Print the table; how many are wrong, at most 1."""
    counts: Counter[tuple[str, str, str]] = Counter()
    wrong: list[tuple[Case, str]] = []
    for case in cases():
        with tempfile.TemporaryDirectory() as folder:
            found, why = verdict(case, diagnosis(case, Path(folder)))
        counts[case.origin, case.group, found] += 1
        if found == "wrong":
            wrong.append((case, why))
    for origin in ("artefact", "built"):
        print(f"{origin:34}" + "".join(f"{verdict:>13}" for verdict in VERDICTS))
        groups = sorted({group for kind, group, _ in counts if kind == origin})
        for group in groups:
            row = [counts[origin, group, each] for each in VERDICTS]
            print(f"  {group:12}{GROUPS.get(group, '')}".ljust(34) + "".join(f"{n:13}" for n in row))
        total = [sum(counts[origin, group, each] for group in groups) for each in VERDICTS]
        print(f"  {'all':32}" + "".join(f"{n:13}" for n in total))
    for case, why in wrong:
        print(f"wrong: {case.name} ({case.origin}): {why}")
    return min(len(wrong), 1)


if __name__ == "__main__":
    sys.exit(main())
