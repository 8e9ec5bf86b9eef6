"""The report of ``table``: every cell whole, at both widths."""

import pytest
from test_terminal import WIDTHS, text_of, words_of

from shardwright.report.table import table_report

FITS = {
    "model": "m-1b", "gpus": 8, "global_batch": 4, "fits": True, "label": "dp_shard=8 zero=3 b=1 m=1",
    "step_time": 0.5, "tokens_per_s_per_gpu": 1234.5, "mfu": 0.456, "memory": 1e9, "nearest_miss": None,
    "why_not": None,
}  # fmt: skip
MISS = FITS | {"model": "m-70b", "fits": False, "nearest_miss": {"needs": 100 * 2**30, "label": "tp=8 [sp]"}}
NONE = FITS | {"model": "m-70b", "gpus": 64, "fits": False, "why_not": "no row has pp=2: use 1"}


def document(*rows):
    return {
        "device": "h100-sxm-80gb", "device_memory": 79 * 2**30, "seq": 4096, "global_batch": 4,
        "tokens_per_step": 16384, "precision": "bf16", "framework": "megatron",
        "assumed": ["gpus_per_node=8"],
        "rows": list(rows),
    }  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_a_model_and_a_column_a_number_of_devices(width):
    rows = (FITS, FITS | {"gpus": 64, "cost_per_1e9_tokens": 12.5}, MISS, NONE)
    text = words_of(text_of(table_report(document(*rows)), width))
    assert (
        "h100-sxm-80gb, 79.00 GiB each; 4 sequences of 4,096 = 16,384 tokens a step, bf16, megatron" in text
    )
    assert "model 8 devices 64 devices" in text
    assert text.index("m-1b") < text.index("m-70b")
    assert "assumed: gpus_per_node=8" in text


def test_what_a_cell_says():
    assert "500.0 ms, 1,234 tokens/s/GPU, MFU 45.6%" in words_of(text_of(table_report(document(FITS))))
    priced = words_of(text_of(table_report(document(FITS | {"cost_per_1e9_tokens": 12.5}))))
    assert "MFU 45.6%, 12.5 for 1e9 tokens" in priced
    assert "does not fit, needs 100.00 GiB: tp=8 [sp]" in words_of(text_of(table_report(document(MISS))))
    assert "no layout: no row has pp=2: use 1" in words_of(text_of(table_report(document(NONE))))
