"""Lists of ranks as messages print them: ``[0, 1, ..., 31]``, ``{3, 4}``, ``0-3, 8``."""

import re

_ITEM = re.compile(r"(\d+)\s*(?:-\s*(\d+))?|(\.\.\.+)")
MOST = 1 << 20


def parse_ranks(text: str) -> tuple[int, ...]:
    """Ranks of a list, in order; spans and dots are filled in."""
    found: list[int] = []
    dots = False
    for first, last, gap in _ITEM.findall(text):
        if gap:
            dots = True
            continue
        start, end = int(first), int(last or first)
        if dots and found:
            start = found[-1] + 1
        dots = False
        if end - start > MOST or len(found) > MOST:
            break
        found += range(start, end + 1)
    return tuple(sorted(set(found)))


def ranks_text(ranks: tuple[int, ...] | list[int] | set[int] | frozenset[int]) -> str:
    """``rank 3``, ``ranks 0-3, 8``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join('-'.join(map(str, span)) for span in spans)}" if spans else "no rank"
