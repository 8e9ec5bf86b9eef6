"""Ranks and microbatches of different numbers of tokens, and Adam's moments: variants, and what is near them
and no fault."""

import json

import pytest
from evidence_files import causes, found


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


RANKS = [{"step": 5, "rank": rank, "num_tokens": 100 * (rank + 1), "loss": 4 - rank} for rank in range(4)]
OF_TOKENS = (4 * 100 + 3 * 200 + 2 * 300 + 400) / 1000
OF_MEANS = (4 + 3 + 2 + 1) / 4


@pytest.mark.parametrize(
    ("whole", "expected"),
    [(OF_MEANS, [("averaged_by_rank", "certain", [])]), (OF_TOKENS, []), (OF_TOKENS + 1e-4, [])],
)
def test_four_ranks_of_other_numbers_of_tokens(tmp_path, whole, expected):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(*RANKS, {"step": 5, "train_loss": whole}))
    assert causes(path) == expected


def test_a_file_for_each_rank_and_one_for_the_run(tmp_path):
    for row in RANKS:
        (tmp_path / f"rank{row['rank']}.log").write_text(
            str({key: value for key, value in row.items() if key != "rank"}) + "\n"
        )
    (tmp_path / "metrics.csv").write_text(f"step,loss\n5,{OF_MEANS}\n")
    (finding,) = [each for each in found(tmp_path) if each["cause"].startswith("averaged")]
    assert finding["cause"] == "averaged_by_rank"
    assert finding["numbers"]["weight_ratio"] == 4
    assert finding["numbers"]["mean_of_tokens"] == pytest.approx(OF_TOKENS)


@pytest.mark.parametrize("change", [{"num_tokens": 100}, {"loss": 2.0}], ids=["equal tokens", "equal losses"])
def test_what_cannot_differ_is_no_finding(tmp_path, change):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(*(row | change for row in RANKS), {"step": 5, "loss": 2.5}))
    assert causes(path) == []


MOMENTS = {
    "json": '{"step": 100, "event": "resumed", "exp_avg_norm": 0.0}\n',
    "a tensor": "[rank3]: after loading: state['exp_avg'].norm() = tensor(0., device='cuda:3')\n",
    "its square": "restored optimizer\nnorm of exp_avg_sq: 0.000e+00\n",
}


@pytest.mark.parametrize("form", MOMENTS)
def test_moments_that_are_zero_after_a_load(tmp_path, form):
    path = tmp_path / "train.log"
    path.write_text(MOMENTS[form])
    ranks = [3] if form == "a tensor" else []
    assert causes(path) == [("optimizer_state_missing", "certain", ranks)]


@pytest.mark.parametrize(
    "text",
    [
        "exp_avg norm before the first step: 0.0\n",
        "step 1: exp_avg norm 0.0\n",
        "loaded checkpoint\nexp_avg norm: 0.0173\n",
        "saving: exp_avg norm 0.01730\nloaded\nexp_avg norm: 0.01729\n",
        "loaded keys exp_avg, exp_avg_sq, step 0\n",
    ],
)
def test_moments_that_are_as_they_should_be(tmp_path, text):
    path = tmp_path / "train.log"
    path.write_text(text)
    assert causes(path) == []


def test_moments_of_another_size_than_they_were_saved(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("before saving: exp_avg norm = 2.5\nafter load: exp_avg norm = 1.25\n")
    assert causes(path) == [("optimizer_state_missing", "likely", [])]


DIST = (
    "Some keys found in the checkpoint are missing in the provided sharded state dict. \n"
    "Missing keys (for all "
)
STEP = (
    '  File "torch/optim/adamw.py", line 700, in step\n    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)\n'
)
SIZES = (
    "RuntimeError: The size of tensor a ({}) must match the size of tensor b ({}) at non-singleton "
    "dimension 0\n"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (DIST + "ranks): {'optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight'}. \n",
         ("optimizer_state_missing", "certain", [])),
        (DIST + "ranks): {'decoder.final_layernorm._extra_state'}. \n", ("keys_differ", "certain", [])),
        ("Unable to load optimizer from checkpoint /c/iter_01. Specify --no-load-optim or --finetune\n",
         ("optimizer_state_missing", "certain", [])),
        ("Traceback (most recent call last):\n" + STEP + SIZES.format(56124554, 14031139),
         ("world_size_changed", "likely", [])),
    ],
    ids=["moments left there", "another key", "Megatron gives up", "flat shards"],
)  # fmt: skip
def test_messages_of_loads(tmp_path, text, expected):
    """The sizes are of Lightning-AI/pytorch-lightning#16815: saved by 6 ranks, read by 24."""
    path = tmp_path / "train.log"
    path.write_text(text)
    assert expected in causes(path)


@pytest.mark.parametrize(
    "text",
    [
        'Traceback (most recent call last):\n  File "model.py", line 7, in forward\n'
        + SIZES.format(8192, 4096),
        "Traceback (most recent call last):\n" + STEP + SIZES.format(5000, 4097),
    ],
    ids=["a model's shapes", "no whole ratio"],
)
def test_other_sizes_that_do_not_match_are_no_matter_of_checkpoints(tmp_path, text):
    path = tmp_path / "train.log"
    path.write_text(text)
    assert "world_size_changed" not in [cause for cause, _, _ in causes(path)]
