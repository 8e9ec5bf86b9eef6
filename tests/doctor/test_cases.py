"""Field reports: the doctor says what is known of each, names no wrong rank, and says where it cannot
tell."""

import pytest
from casebook import cases, diagnosis, expected, verdict

CASES = list(cases())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.book}-{case.name}")
def test_case(case, tmp_path):
    found, why = verdict(case, diagnosis(case, tmp_path))
    assert found == expected(case), why
