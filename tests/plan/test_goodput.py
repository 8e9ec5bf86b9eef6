"""Goodput: published figures, a simulation of failures, and that the interval chosen really is the best."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwright.job import Job
from shardwright.model import ModelSpec, preset
from shardwright.plan.goodput import (
    best_interval,
    best_interval_steps,
    checkpoint_bytes,
    daly_interval,
    device_time_per_token,
    job_mtbf,
    measured_device_mtbf,
    recomputed_training_time,
    run_time,
    training_flops,
    young_interval,
)
from shardwright.plan.params import parameter_table
from shardwright.units import DAY, HOUR

SPEC = ModelSpec(
    name="tiny", model_type="llama", layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, head_size=16, vocab=257
)
LLAMA3_MTBF = measured_device_mtbf(466 - 47, 54 * DAY, 16_384)

SAVES = st.floats(0.01, 1e3)
MTBFS = st.floats(100, 1e8)
RESTARTS = st.floats(0, 1e3)


# Published


@pytest.mark.parametrize(
    ("parameters", "tokens", "devices", "rate", "days", "printed"),
    [(175e9, 300e9, 1024, 140e12, 33.9, 34), (1e12, 450e9, 3072, 163e12, 83.2, 84)],
    ids=["GPT-3 175B", "1T"],
)
def test_training_time_of_narayanan(parameters, tokens, devices, rate, days, printed):
    """FORMULAE fixture 29; the paper, arXiv:2104.04473, section 5.1, rounds up to "34 days" and "84 days"."""
    found = recomputed_training_time(parameters, tokens, devices, rate) / DAY
    assert round(float(found), 1) == days
    assert math.ceil(found) == printed


def test_device_hours_of_deepseek_v3():
    """FORMULAE fixture 30: 2.664e6 H800-hours for 14.8e12 tokens are 180e3 hours a 1e12, arXiv:2412.19437."""
    assert device_time_per_token(2.664e6 * HOUR, 14.8e12) * 1e12 / HOUR == pytest.approx(180e3, rel=1e-12)


def test_flops_of_llama_3():
    """FORMULAE fixture 31: "3.8e25", arXiv:2407.21783."""
    parameters = parameter_table(preset("llama-3.1-405b")).parameters
    assert (
        f"{training_flops(405.85e9, 15.6e12):.2e}"
        == f"{training_flops(parameters, 15.6e12):.2e}"
        == "3.80e+25"
    )


def test_failures_of_llama_3():
    """arXiv:2407.21783, section 3.3.4: 419 unexpected of 466 interruptions in 54 days of 16,384 H100."""
    assert job_mtbf(LLAMA3_MTBF, 16_384) / HOUR == pytest.approx(3.093, abs=5e-4)
    assert float(LLAMA3_MTBF) / HOUR == pytest.approx(50_677, abs=1)  # 5.8 years of a device


@pytest.mark.parametrize(
    ("save", "restart", "reached"),
    [
        (None, 600, 0.928),  # over the 2 TB/s of section 3.3.1; MegaScale's ten minutes
        (10, 600, 0.908),
        (30, 300, 0.904),
        (60, 600, 0.853),  # a slow save does not reach what they did
    ],
)
def test_effective_time_of_llama_3(save, restart, reached):
    """ "Higher than 90 %" follows from save and restart times that are assumed here, not published."""
    if save is None:
        save = checkpoint_bytes(preset("llama-3.1-405b"), Job(seq=8192, global_batch=2048)) / 2e12
        assert save == pytest.approx(2.435, abs=1e-3)
    mtbf = job_mtbf(LLAMA3_MTBF, 16_384)
    found = run_time(54 * DAY, best_interval(save, mtbf), save, restart, mtbf)
    assert float(found.goodput) == pytest.approx(reached, abs=5e-4)
    assert float(found.total) / float(mtbf) == pytest.approx(54 * DAY / reached / mtbf, rel=1e-3)


@pytest.mark.parametrize(
    ("precision", "accounting", "optimizer", "each"),
    [
        ("bf16", "fsdp2", "adamw", 12),
        ("fp64", "fsdp2", "adamw", 24),
        ("bf16", "fsdp2", "sgd", 4),
        ("bf16", "zero", "adamw", 14),
        ("bf16", "megatron", "adamw", 14),
        ("bf16", "pure_bf16", "adamw", 6),
    ],
)
def test_a_checkpoint_has_each_parameter_once(precision, accounting, optimizer, each):
    job = Job(seq=8, global_batch=1, precision=precision, accounting=accounting, optimizer=optimizer)
    assert checkpoint_bytes(SPEC, job) == each * parameter_table(SPEC).parameters


# The law of failures


def simulated(intervals, interval, save, restart, mtbf, seed=0):
    """Seconds that so many intervals take when failures come at random, drawn one by one."""
    random, total = np.random.default_rng(seed), 0.0
    for _ in range(intervals):
        while (failure := random.exponential(mtbf)) < interval + save:
            total += failure
            while (failure := random.exponential(mtbf)) < restart:
                total += failure
            total += restart
        total += interval + save
    return total


@pytest.mark.parametrize(
    ("interval", "save", "restart", "mtbf"), [(100, 10, 30, 500), (300, 5, 200, 250), (50, 50, 0, 100)]
)
def test_expected_time_is_what_a_simulation_takes(interval, save, restart, mtbf):
    number = 20_000
    expected = run_time(number * interval, interval, save, restart, mtbf).total
    assert simulated(number, interval, save, restart, mtbf) == pytest.approx(float(expected), rel=0.03)


@settings(deadline=None)
@given(interval=st.floats(1, 1e4), save=SAVES, restart=RESTARTS, mtbf=MTBFS)
def test_parts_add_up_to_the_closed_form(interval, save, restart, mtbf):
    """Daly 2006: M exp(R/M) (exp((T + C)/M) - 1) W/T."""
    work = 1e6
    found = run_time(work, interval, save, restart, mtbf)
    closed = mtbf * np.exp(restart / mtbf) * np.expm1((interval + save) / mtbf) * work / interval
    assert float(found.total) == pytest.approx(float(closed), rel=1e-9)
    assert all(float(part) >= 0 for part in found)
    assert 0 <= float(found.goodput) <= 1


@settings(deadline=None)
@given(interval=st.floats(1, 1e4), save=SAVES, restart=RESTARTS, mtbf=MTBFS, more=st.floats(1, 10))
@example(interval=6024.0, save=1000.0, restart=5e-324, mtbf=100.0, more=10.0)
@example(interval=6012.0, save=978.0, restart=34.0, mtbf=100.0, more=10.0)
def test_worse_is_never_faster(interval, save, restart, mtbf, more):
    base = run_time(1e6, interval, save, restart, mtbf).total
    limit = base * (1 - 1e-12)
    assert run_time(1e6, interval, save * more, restart, mtbf).total >= limit
    assert run_time(1e6, interval, save, restart * more, mtbf).total >= limit
    assert run_time(1e6, interval, save, restart, mtbf / more).total >= limit
    assert run_time(1e6 * more, interval, save, restart, mtbf).total >= limit


def test_without_failures_only_the_saves_cost():
    found = run_time(1e6, 100.0, 7.0, 60.0, 1e30)
    assert float(found.total) == pytest.approx(1e6 + 1e4 * 7.0, rel=1e-12)
    assert float(found.rework) == pytest.approx(0, abs=1e-15)


def test_a_row_alone_is_the_row_of_the_table():
    saves, mtbfs = np.array([1.0, 10.0, 100.0]), np.array([[1e3], [1e5]])
    together = run_time(1e6, best_interval(saves, mtbfs), saves, 60.0, mtbfs)
    for part in together:
        assert part.shape == (2, 3)
    alone = run_time(1e6, best_interval(10.0, 1e5), 10.0, 60.0, 1e5)
    assert float(together.total[1, 1]) == float(alone.total)


def test_what_never_ends_is_infinite():
    assert np.isinf(run_time(1e6, 1e3, 10.0, 60.0, 1.0).total)


# The interval


@settings(deadline=None)
@given(save=SAVES, restart=RESTARTS, mtbf=MTBFS, factor=st.floats(0.2, 5))
def test_no_interval_beats_the_best(save, restart, mtbf, factor):
    best = float(best_interval(save, mtbf))
    least = run_time(1e6, best, save, restart, mtbf).total
    assert least <= run_time(1e6, best * factor, save, restart, mtbf).total * (1 + 1e-12)


@settings(deadline=None)
@given(
    steps=st.integers(1, 300), step=st.floats(0.1, 50), save=SAVES, restart=RESTARTS, mtbf=st.floats(1e3, 1e6)
)
def test_the_best_whole_number_of_steps_is_that_of_brute_force(steps, step, save, restart, mtbf):
    every = np.arange(1, steps + 1)
    total = run_time(steps * step, every * step, save, restart, mtbf).total
    best = best_interval_steps(steps, step, save, restart, mtbf)
    assert total[best - 1] == pytest.approx(float(total.min()), rel=1e-12)
    for neighbour in (best - 1, best + 1):
        if 1 <= neighbour <= steps:
            assert total[best - 1] <= total[neighbour - 1] * (1 + 1e-12)


@settings(deadline=None)
@given(save=SAVES, mtbf=MTBFS, more=st.floats(1, 100))
def test_the_interval_grows_with_save_time_and_mtbf(save, mtbf, more):
    """As far as an interval shorter than the mean time between failures can."""
    base = float(best_interval(save, mtbf))
    assert float(best_interval(save * more, mtbf)) >= base * (1 - 1e-9)
    assert float(best_interval(save, mtbf * more)) >= base * (1 - 1e-9)
    assert base <= mtbf


@settings(deadline=None)
@given(save=SAVES, ratio=st.floats(20, 1e6))
def test_daly_is_nearer_than_young_and_both_are_near(save, ratio):
    mtbf = save * ratio
    best, young, daly = (float(f(save, mtbf)) for f in (best_interval, young_interval, daly_interval))
    assert abs(daly - best) <= abs(young - best)
    assert daly == pytest.approx(best, rel=1e-3)
    least, by_daly, by_young = (run_time(1e6, t, save, 0.0, mtbf).total for t in (best, daly, young))
    assert least <= by_daly * (1 + 1e-12)
    assert float(by_daly) == pytest.approx(float(least), rel=1e-6)
    assert float(by_young) == pytest.approx(float(least), rel=5e-3)


def test_intervals_by_hand():
    assert float(young_interval(60, 11_135)) == pytest.approx(math.sqrt(2 * 60 * 11_135))
    x = math.sqrt(60 / (2 * 11_135))
    by_hand = math.sqrt(2 * 60 * 11_135) * (1 + x / 3 + x * x / 9) - 60
    assert float(daly_interval(60, 11_135)) == pytest.approx(by_hand)
    assert float(daly_interval(500, 200)) == 200
    assert float(best_interval(0.0, 1e4)) == pytest.approx(0, abs=1e-6)
    assert best_interval_steps(100, 1.0, 0.0, 60.0, 1e4) == 1
