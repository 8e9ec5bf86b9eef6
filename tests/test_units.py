"""Quantities: what is read, what is refused, and that exact text comes back as the same number."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright import units
from shardwright.units import BANDWIDTH, BYTES, RATE, TIME, exact_quantity, parse_count, parse_quantity


@pytest.mark.parametrize(
    ("text", "scale", "value"),
    [
        ("80 GiB", BYTES, 80 * 2**30),
        ("80GB", BYTES, 80 * 10**9),
        (" 1_024 KiB ", BYTES, 2**20),
        ("400 Gb/s", BANDWIDTH, 50e9),
        ("3.35 TB/s", BANDWIDTH, 3.35e12),
        ("2 min", TIME, 120),
        ("989 TFLOP/s", RATE, 989e12),
        (4096, BYTES, 4096),
        (0.5, TIME, 0.5),
    ],
)
def test_reads_what_people_write(text, scale, value):
    assert parse_quantity(text, scale) == value


def test_whole_numbers_of_whole_units_stay_exact():
    value = parse_quantity(f"{2**53 + 1} B", BYTES)
    assert isinstance(value, int)
    assert value == 2**53 + 1


@pytest.mark.parametrize(
    "text", ["80", "GiB", "80 Gib", "80 Gb/s", "eighty GiB", "", "1e5e3 B", "_ B", "1-2 B"]
)
def test_refuses_what_has_no_number_or_unit_and_lists_the_units(text):
    with pytest.raises(ValueError, match=r"is not a finite number with a unit of B, kB, KB, MB"):
        parse_quantity(text, BYTES)


@pytest.mark.parametrize("text", ["1e999 B", "1e300 TiB", float("inf"), float("nan")])
def test_refuses_what_is_not_finite(text):
    with pytest.raises(ValueError, match="is not a finite number"):
        parse_quantity(text, BYTES)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("15T", 15 * 10**12),
        ("300B", 300 * 10**9),
        ("1.5 M", 1_500_000),
        ("64k", 64_000),
        (" 1_000,000 ", 10**6),
        ("2e12", 2 * 10**12),
        ("0.3T", 3 * 10**11),
        ("9.3T", 9_300_000_000_000),
        ("0", 0),
    ],
)
def test_reads_counts_exactly(text, value):
    assert parse_count(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "T", "1.5", "-3B", "15 Tokens", "1e999", "1e400T", "nan", "inf", "0.0000001M", "9e18T", "1 T B"],
)
def test_refuses_what_is_no_count(text):
    with pytest.raises(ValueError, match=r"is not a whole number up to 9.2e\+18, alone or with k, M, B or T"):
        parse_count(text)


@pytest.mark.parametrize("scale", [BYTES, BANDWIDTH, TIME, RATE], ids=["bytes", "bandwidth", "time", "rate"])
@settings(deadline=None)
@given(value=st.floats(min_value=0, allow_infinity=False))
def test_exact_text_returns_the_same_float(scale, value):
    assert parse_quantity(exact_quantity(value, scale), scale) == value


@settings(deadline=None)
@given(value=st.integers(min_value=0, max_value=2**80))
def test_exact_text_returns_the_same_integer(value):
    assert parse_quantity(exact_quantity(value, BYTES), BYTES) == value


@pytest.mark.parametrize(
    ("value", "scale", "text"),
    [
        (80 * 2**30, BYTES, "80 GiB"),
        (141 * 10**9, BYTES, "141 GB"),
        (8e12, BANDWIDTH, "8 TB/s"),
        (0.0, TIME, "0 s"),
    ],
)
def test_exact_text_is_short(value, scale, text):
    assert exact_quantity(value, scale) == text


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        (units.format_bytes(79.1 * units.GiB), "79.10 GiB"),
        (units.format_bytes(300 * units.MiB), "0.29 GiB"),
        (units.format_bytes(3 * units.MiB), "3.00 MiB"),
        (units.format_bytes(12), "12 B"),
        (units.format_bandwidth(363e9), "363.0 GB/s"),
        (units.format_time(12.34), "12.3 s"),
        (units.format_time(0.0123), "12.3 ms"),
        (units.format_time(5e-6), "5.0 us"),
        (units.format_duration(3725), "1:02:05"),
        (units.format_duration(65), "1:05"),
        (units.format_duration(-3), "0:00"),
        (units.format_span(2.5 * units.DAY), "2.5 days"),
        (units.format_span(1e12 * units.DAY), "1.0e+12 days"),
        (units.format_span(3 * units.HOUR), "3.0 h"),
        (units.format_span(600), "10.0 min"),
        (units.format_span(90), "90.0 s"),
        (units.format_span(0.25), "250.0 ms"),
        (units.format_count(8_030_261_248), "8.03 B"),
        (units.format_count(512), "512"),
    ],
)
def test_prints_for_people(text, printed):
    assert text == printed
