"""Causes from numbers alone: those of public reports, and one pattern of each kind."""

import pytest

from shardwright.check.cause import likely_cause
from shardwright.check.evidence import (
    Apart,
    Evidence,
    ParameterEvidence,
    RunEvidence,
    SequenceWeights,
    tolerance_of,
)

FP64 = tolerance_of("fp64", experts=False)


def run(losses=(2.0,), norms=(1.0,), **fields):
    numbers = {name: fields.pop(name) for name in list(fields) if name in RunEvidence._fields}
    return RunEvidence(fields, losses, norms, **numbers)


def parameter(name="model.layers.0.mlp.up_proj.weight", role="feed_forward", ratio=1.0, **fields):
    values = {"layer": 0, "stage": 0, "axes": (), "residual": 0.0, "difference": abs(ratio - 1)}
    return ParameterEvidence(name=name, role=role, ratio=ratio, **values | fields)


def cause_of(found, expected=None, parameters=(), **fields):
    values = {"tolerance": FP64, "parameters": tuple(parameters)}
    return likely_cause(Evidence(found, expected or run(), **values | fields))


def test_gradients_averaged_twice_over_replicas():
    """pytorch/torchtitan issues 2206, 2318, 2323: 8 times smaller than FSDP's with dp_replicate 8."""
    cause = cause_of(run(dp_replicate=8, norms=(0.125,)))
    assert (cause.key, cause.certainty) == ("scaled_by_dp_replicate", "likely")
    assert "the gradient norm x 0.125: divided by dp_replicate (8)" in cause.text
    between = cause_of(run(dp_replicate=8, norms=(0.125,)), run(dp_shard=8))
    assert (between.key, between.certainty) == ("scaled", "cannot_tell")
    assert between.candidates == ("dp_replicate", "dp_shard")


def test_loss_summed_over_context_ranks():
    """NovaSky-AI/SkyRL issue 1420: -28.43 without, -57.36 with cp 2."""
    cause = cause_of(run((-57.36,), (), cp=2), run((-28.43,), ()), match=0.02)
    assert (cause.key, cause.certainty) == ("loss_scaled_by_cp", "likely")


def test_gradients_of_a_token_sum():
    """verl-project/verl issue 6609: loss equal, norm off by the token count; radixark/miles issue 3231: by 9,
    the tokens over dp 2."""
    assert cause_of(run(cp=2, tokens=512, norms=(512.0,))).key == "scaled_by_tokens"
    cause = cause_of(run(dp_shard=2, tokens=18, norms=(9.0,)))
    assert (cause.key, cause.certainty) == ("scaled_by_tokens", "likely")
    assert "times the step's 18 tokens over dp" in cause.text


def test_accumulation_sums_where_a_mean_belongs():
    """deepspeedai/DeepSpeed issue 7773: 2 x 16 against 8 x 4 sequences, norm times 4."""
    cause = cause_of(run(norms=(4.0,), microbatches=16), run(microbatches=4))
    assert (cause.key, cause.certainty) == ("scaled_by_microbatches", "likely")


def test_a_norm_reduced_again():
    """modelscope/twinkle issue 290: 0.8 became 1.131 on 2 replicas."""
    cause = cause_of(run(norms=(1.131,), dp_replicate=2), run(norms=(0.8,)), match=1e-3)
    assert (cause.key, cause.certainty) == ("norm_scaled_by_dp_replicate", "likely")
    exact = run(norms=(0.8 * 2**0.5,), true_norm=0.8, dp_replicate=2)
    assert cause_of(exact, run(norms=(0.8,)), [parameter()]).key == "norm_scaled_by_dp_replicate"


def test_a_loss_per_microbatch():
    """huggingface/transformers issue 24725: 10 and 100 supervised tokens, a token's weight 10 times apart."""
    weights = SequenceWeights((5.5, 0.55), (10, 100), rank=(0, 0), microbatch=(0, 1))
    off = [parameter(ratio=1.2, residual=0.5)]
    cause = cause_of(run((2.1,), microbatches=2), run(), off, sequences=weights)
    assert (cause.key, cause.certainty) == ("loss_per_sequence", "certain")
    weights = SequenceWeights((5.5, 5.5, 0.55), (4, 6, 100), rank=(0, 0, 0), microbatch=(0, 0, 1))
    cause = cause_of(run((2.1,), microbatches=2), run(), off, sequences=weights)
    assert cause.key == "loss_per_microbatch"
    assert "(4 tokens) counts 10 times one of sequence 2 (100)" in cause.text


def test_a_loss_per_rank_with_ragged_ranks():
    """meta-pytorch/torchtune pull request 2980: a rank's own count is not the global one over the ranks."""
    weights = SequenceWeights((1.5, 1.5, 0.75), (4, 6, 20), rank=(0, 0, 1), microbatch=(0, 1, 0))
    cause = cause_of(
        run(dp_shard=2, microbatches=2), run(), [parameter(ratio=1.1, residual=0.3)], sequences=weights
    )
    assert (cause.key, cause.certainty) == ("loss_per_rank", "certain")
    assert "added up" not in cause.text
    twice = weights._replace(weights=(3.0, 3.0, 1.5))
    cause = cause_of(run(dp_shard=2), run(), [parameter(ratio=2.2, residual=0.3)], sequences=twice)
    assert "all x 2" in cause.text


def test_sequences_that_do_not_count():
    weights = SequenceWeights((0.0, 1.0, 0.0, 1.0), (5, 6, 7, 8), rank=(0, 0, 1, 1), microbatch=(0, 1, 0, 1))
    off = [parameter(ratio=0.6, residual=0.4)]
    assert cause_of(run(), run(), off, sequences=weights).key == "microbatch_dropped"
    weights = weights._replace(weights=(0.0, 0.0, 1.0, 1.0))
    assert cause_of(run(), run(), off, sequences=weights).key == "rank_dropped"


@pytest.mark.parametrize(
    ("ratio", "degrees", "key", "candidates"),
    [
        (0.5, {"dp_shard": 2}, "scaled_by_dp_shard", ("dp_shard",)),
        (0.25, {"dp_replicate": 2}, "scaled_by_dp_replicate", ("dp_replicate",)),
        (0.25, {"dp_shard": 4, "dp_replicate": 2}, "scaled_by_dp_shard", ("dp_shard",)),
        (0.125, {"dp_shard": 4, "dp_replicate": 2}, "scaled_by_dp_replicate+dp_shard", None),
        (4.0, {"tp": 4, "pp": 2}, "scaled_by_tp", ("tp",)),
        (0.5, {"dp_shard": 2, "microbatches": 2}, "scaled", ("dp_shard", "microbatches")),
        (0.37, {"dp_shard": 2}, "scaled", ()),
    ],
)
def test_one_factor_of_all_gradients(ratio, degrees, key, candidates):
    parameters = [parameter(ratio=ratio), parameter("model.norm.weight", "norm", ratio, layer=None)]
    cause = cause_of(run(**degrees), run(norms=(1 / ratio,)), parameters)
    assert cause.key == key
    assert cause.certainty == ("cannot_tell" if key == "scaled" else "likely")
    assert candidates is None or cause.candidates == candidates


def test_experts_alone():
    right = [parameter(), parameter("model.norm.weight", "norm", layer=None)]
    expert = parameter("model.layers.0.mlp.experts.down_proj", "expert", 4.0, axes=("ep",))
    cause = cause_of(run(ep=4, dp_shard=8), run(), [*right, expert])
    assert (cause.key, cause.certainty) == ("experts_scaled_by_ep", "likely")
    odd = expert._replace(residual=0.4)
    assert cause_of(run(ep=4), run(), [*right, odd]).key == "experts_wrong"


def test_powers_of_each_stage():
    parameters = [
        parameter(f"model.layers.{stage}.a", ratio=2.0 ** (3 - stage), stage=stage) for stage in range(4)
    ]
    cause = cause_of(run(pp=4), run(), parameters)
    assert (cause.key, cause.certainty) == ("power_of_each_stage", "certain")
    assert "stage 0 x 8, stage 1 x 4, stage 2 x 2, stage 3 x 1" in cause.text
    assert cause_of(run(pp=4), run(), parameters[2:]).certainty == "likely"
    parameters[1] = parameter("model.layers.1.a", ratio=5.0, stage=1)
    assert cause_of(run(pp=4), run(), parameters).key == "scaled_by_stage"


@pytest.mark.parametrize("role", ["router", "norm"])
def test_shares_that_are_not_added_up(role):
    off = parameter(f"model.layers.0.{role}.weight", role, 0.6, residual=0.5)
    cause = cause_of(run(tp=2), run(), [parameter(axes=("tp",)), off, parameter("h", "head", axes=("tp",))])
    assert (cause.key, cause.certainty) == ("not_summed_over_tp", "likely")
    apart = run(tp=2, apart=(Apart(off.name, 0.3, ("tp",)),))
    assert cause_of(apart, run(), [parameter(axes=("tp",)), off]).certainty == "certain"


def test_backward_that_breaks_at_a_border():
    parameters = [
        parameter(f"model.layers.{layer}.a", ratio=0.9 if layer < 2 else 1.0, layer=layer, stage=layer // 2,
                  residual=0.3 if layer < 2 else 0.0)
        for layer in range(4)
    ]  # fmt: skip
    assert cause_of(run(pp=2), run(), parameters).key == "stages_wrong"
    within = [parameter._replace(stage=0) for parameter in parameters]
    cause = cause_of(run(), run(), within)
    assert (cause.key, cause.certainty) == ("backward_breaks", "likely")
    assert "right behind layer 1" in cause.text
    assert cause_of(run(), run(), [within[1], *within[2:]]).key == "one_layer"


def test_lost_and_missing_gradients():
    """torch.compile with tp: the embedding's gradient is lost."""
    lost = parameter("model.embed_tokens.weight", "embedding", 0.0, layer=None)
    assert cause_of(run(tp=2), run(), [lost, parameter()]).key == "gradient_lost"
    missing = parameter()._replace(ratio=None, residual=None, difference=float("inf"), missing=True)
    assert cause_of(run(pp=2), run(), [missing, parameter("x")]).key == "gradient_missing"


def test_what_is_no_number_hides_the_rest():
    odd = parameter(ratio=float("nan"))._replace(ratio=None, residual=None)
    cause = cause_of(run((float("nan"),), dp_shard=2), run(), [odd, parameter("x")])
    assert (cause.key, cause.certainty) == ("not_a_number", "certain")
    assert cause.text.startswith("the loss of step 1 is nan; gradients of model.layers.0.mlp.up_proj.weight")


def test_input_that_differs_comes_first():
    off = [parameter(ratio=0.5)]
    assert cause_of(run(digest=5), run(digest=6), off).key == "other_data"
    assert cause_of(run(), run(), [off[0]._replace(other_start=True)]).key == "other_weights"


@pytest.mark.parametrize(
    ("norm", "fields", "key"),
    [
        (3.0, {"stage_norms": (3.0, 4.0)}, "norm_of_one_stage"),
        (2.5, {"rank_norm": 2.5}, "norm_of_one_rank"),
        (41**0.5, {"tied_norm": 4.0}, "norm_counts_tied_twice"),
        (3.3, {}, "norm_wrong"),
    ],
)
def test_norms_of_a_part(norm, fields, key):
    cause = cause_of(run(norms=(norm,), true_norm=5.0, pp=2, **fields), run(norms=(5.0,)), [parameter()])
    assert cause.key == key
    assert cause.certainty == ("cannot_tell" if key == "norm_wrong" else "certain")


def test_forward_and_update():
    off = [parameter(ratio=0.9, residual=0.4)]
    assert cause_of(run((2.1,), cp=2), run(), off).certainty == "likely"
    assert cause_of(run((2.1,), cp=2, pp=2), run(), off).certainty == "cannot_tell"
    later = cause_of(run((2.0, 1.8), (1.0, 1.0)), run((2.0, 1.9), (1.0, 1.0)), [parameter()])
    assert (later.key, later.certainty) == ("update_differs", "likely")
    flips = {"tolerance": tolerance_of("bf16", experts=True), "precision": "bf16", "experts": True}
    later = cause_of(run((2.0, 1.2), (1.0, 1.0)), run((2.0, 1.9), (1.0, 1.0)), [parameter()], **flips)
    assert (later.key, later.certainty) == ("rounding", "cannot_tell")


def test_what_fits_nothing_cannot_be_told():
    odd = [parameter(ratio=0.9, residual=0.4), parameter("model.norm.weight", "norm", 0.7, residual=0.4)]
    assert cause_of(run(dp_shard=2), run(), odd) == (
        "unknown",
        "cannot_tell",
        cause_of(run(dp_shard=2), run(), odd).text,
        (),
    )
