"""The reader of huge logs: every needle wherever it stands, lines by their numbers, whatever the encoding."""

import io

import numpy as np
import pytest

from shardwright.doctor.lines import CHUNK, read_lines
from shardwright.doctor.prefilter import OF_A_CHUNK, PLENTY, Prefilter

NEEDLES = (b"WorkNCCL(", b"ast enqueued ", b"out of memory", b"Timeout(ms)")


def read(data, needle=b"WorkNCCL("):
    def reader(line):
        yield line

    return list(read_lines(io.BytesIO(data), "log", {needle: reader}))


def test_every_needle_is_found_at_every_alignment_and_nothing_else():
    generator = np.random.default_rng(0)
    noise = bytes(generator.integers(32, 127, 200_000, dtype=np.uint8))
    for needle in NEEDLES:
        noise = noise.replace(needle, b"." * len(needle))
    planted = {}
    data = bytearray(noise)
    for i in range(400):
        needle, place = NEEDLES[i % 4], 17 + 499 * i + i % 7
        data[place : place + len(needle)] = needle
        planted[place] = needle
    assert dict(Prefilter(NEEDLES).places(bytes(data), len(data))) == planted


def test_a_needle_too_short_to_be_found_is_refused():
    with pytest.raises(ValueError, match="7 bytes or more"):
        Prefilter([b"short"])


@pytest.mark.parametrize("distance", range(-30, 31, 5))
def test_a_line_at_the_border_of_a_chunk_is_read_once_with_its_number_and_neighbours(distance):
    before = b"x" * 99 + b"\n"
    count = (CHUNK + distance) // 100
    data = before * count + b"above\nWorkNCCL(1)\nbelow\n" + before * 3000
    (line,) = read(data)
    assert (line.number, line.text) == (count + 2, "WorkNCCL(1)")
    assert (line.before(1), line.following(1)) == (["above"], ["below"])


def test_of_a_flood_of_lines_some_are_read_and_the_last_of_them():
    flood = b"WorkNCCL(step)\n" * (PLENTY + 200_000)
    lines = read(flood)
    assert PLENTY < len(lines) < PLENTY + 150_000
    assert lines[-1].number == PLENTY + 200_000
    assert OF_A_CHUNK < PLENTY


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig", "latin-1"])
def test_encodings(encoding):
    text = (
        "caf\u00e9 at the start, long enough to be told from others by its zeros alone ......\nWorkNCCL(7)\n"
    )
    (line,) = read(text.encode(encoding))
    assert (line.number, line.text) == (2, "WorkNCCL(7)")


def test_colours_and_carriage_returns_are_taken_out():
    data = b"\x1b[32m10%\r20%\r\x1b[0m done\r\n\x1b[31m[rank3]: Work\x1b[1mNCCL(\x1b[0m9)\r\n"
    (line,) = read(data)
    assert (line.number, line.text, line.rank) == (2, "[rank3]: WorkNCCL(9)", 3)


def test_a_line_without_end_is_read_around_what_is_found():
    data = b"y" * 3_000_000 + b" [rank1]: WorkNCCL(5) " + b"z" * 3_000_000
    (line,) = read(data)
    assert "WorkNCCL(5)" in line.text
    assert len(line.text) < 20_000
