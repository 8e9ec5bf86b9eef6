"""Reports of ``compare`` and ``goodput``: at both widths, nothing eaten as markup, no time misjudged."""

import pytest
from test_terminal import CLUSTER, JOB, LAYOUT, MODEL, WIDTHS, text_of, words_of

from shardwright.layout import Layout
from shardwright.plan.comparison import compare_plans
from shardwright.plan.explain import plan_of
from shardwright.plan.operation import Given, run_goodput
from shardwright.report.comparison import batch_text, comparison_report
from shardwright.report.goodput import goodput_report

PLAN = plan_of(MODEL, JOB, CLUSTER, LAYOUT)


def other_plan(**job):
    changed = JOB.model_copy(update=job)
    layout = Layout(dp_shard=4, zero_stage=1, microbatches=changed.global_batch // 4)
    return plan_of(MODEL, changed, CLUSTER, layout)


@pytest.mark.parametrize("width", WIDTHS)
def test_comparison_at_both_widths(width):
    text = words_of(text_of(comparison_report(compare_plans(PLAN, other_plan())), width))
    for part in (
        "A: bytes [bold]5m[/bold] on 4 x cpu",
        "zero_stage 3 1",
        "equal",
        "tokens/s/GPU",
        " is smaller by ",
    ):
        assert part in text
    assert "global batch differs" not in text


def test_a_difference_of_batch_forbids_differences_of_time():
    text = text_of(comparison_report(compare_plans(PLAN, other_plan(global_batch=16))))
    row = next(line for line in text.splitlines() if line.startswith("compute"))
    assert row.split()[-2:] == ["-", "-"]
    assert "the global batch differs: A 8 sequences" in text


def test_a_rule_that_does_not_hold_is_not_offered():
    batch = compare_plans(PLAN, other_plan(global_batch=256, optimizer="muon"))["batch"]
    text = batch_text(batch | {"rule": None})
    assert "beta2 out of its reach" in text
    assert "for this optimizer neither is shown" in text


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("price", [None, 2.5])
def test_goodput_at_both_widths(width, price):
    found = run_goodput(PLAN, Given(10**9, save_time=5.0, price_per_device_hour=price))
    text = words_of(text_of(goodput_report(found), width))
    assert "bytes [bold]5m[/bold] on 4 x cpu" in text
    assert "5.0 s given" in text
    assert ("not stated" in text) == (price is None)
