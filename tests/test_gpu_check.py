"""scripts/gpu_check.py at toy size: the same way as on a GPU, on the CPU."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"


def test_toy_models_go_the_whole_way_and_are_written_down(tmp_path):
    target = tmp_path / "measurements.md"
    target.write_text("# Measurements\n\nbefore\n", encoding="utf-8")
    subprocess.run(
        [sys.executable, SCRIPT, "--toy", "--write", target],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        timeout=300,
    )
    text = target.read_text(encoding="utf-8")
    assert text.startswith("# Measurements\n\nbefore\n\n<!-- gpu_check: begin -->")
    for case in ("FSDP 8", "FSDP 4 x TP 2", "FSDP 8, full recompute", "FSDP 8, loss in chunks"):
        assert f"| toy-large, {case} |" in text
    for row in ("bf16 | no", "bf16 | yes", "fp8 | yes"):
        assert f"| toy-small | {row} |" in text


def test_results_replace_their_own_section_alone():
    replaced = runpy.run_path(str(SCRIPT))["replaced"]
    once = replaced("# Head\n\nkept\n", "first")
    again = replaced(once + "\nafter\n", "second")
    assert again == once.replace("first", "second") + "\nafter\n"


def test_a_device_is_found_by_what_cuda_calls_it():
    peak_of = runpy.run_path(str(SCRIPT))["peak_of"]
    assert peak_of("NVIDIA H200") == peak_of("NVIDIA H100 80GB HBM3") == 989e12
    with pytest.raises(SystemExit, match="--device"):
        peak_of("Voodoo 2")
