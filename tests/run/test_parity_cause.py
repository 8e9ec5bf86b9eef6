"""Faults planted in the runtime, found by comparing two layouts on real ranks, and told by their cause."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from matrix import ONE_BY_ONE, RING, SHARD, plan_of, row
from test_mutants import MUTANTS

from shardwright.check.gathered import Gathered
from shardwright.check.parity import Wishes, short_run
from shardwright.check.two_runs import Comparison
from shardwright.run import model, step
from shardwright.run.loss import MASKED
from shardwright.run.step import Stepper


def several():
    return dist.get_world_size() > 1


def on_gradients(monkeypatch, wanted, factor):
    """Gradients whose names have ``wanted`` are multiplied behind the backward pass."""
    original = step.sum_tied

    def sum_tied(stages, mesh):
        original(stages, mesh)
        for name, parameter in stages.named_parameters():
            if wanted in name:
                parameter.grad.mul_(factor())

    monkeypatch.setattr(step, "sum_tied", sum_tied)


def tokens_of_the_rank(monkeypatch):
    """Each rank divides by its own tokens."""
    monkeypatch.setattr(
        Stepper, "global_tokens", lambda self, targets: float(sum((t != MASKED).sum() for t in targets))
    )


def sum_of_tokens(monkeypatch):
    """The loss is not divided."""
    counted = Stepper.global_tokens
    monkeypatch.setattr(
        Stepper, "global_tokens", lambda self, targets: 1.0 if several() else counted(self, targets)
    )


def sum_of_microbatches(monkeypatch):
    """The loss of each microbatch is a mean of its own, and they are added up."""
    original = model.cross_entropy
    monkeypatch.setattr(
        model,
        "cross_entropy",
        lambda logits, target, tokens: original(logits, target, tokens) * (3 if several() else 1),
    )


def experts_times_ep(monkeypatch):
    """Experts' gradients are summed over ep as well."""
    backward = Stepper.backward

    def scaled(self, microbatches):
        found = backward(self, microbatches)
        for name, parameter in self.model.named_parameters():
            if ".experts." in name:
                parameter.grad.mul_(self.layout.ep)
        return found

    monkeypatch.setattr(Stepper, "backward", scaled)


def embedding_lost(monkeypatch):
    """What compilation with tp did: the embedding gets no gradient."""
    on_gradients(monkeypatch, "embed_tokens", lambda: 0.0 if several() else 1.0)


def stages_doubled(monkeypatch):
    """Every border of a pipeline doubles the gradient on its way back."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    original = model.Transformer.forward

    def forward(self, x, *args, **kwargs):
        return original(self, x if self.part.first else Twice.apply(x), *args, **kwargs)

    monkeypatch.setattr(model.Transformer, "forward", forward)


def norm_of_the_stage(monkeypatch):
    """The norm is not summed over the pipeline."""
    monkeypatch.setattr(
        Stepper, "norm", lambda self: self.read(step.gradient_norm(self.model.parameters(), []))
    )


def norm_reduced_again(monkeypatch):
    """Squares are summed once more over ranks of data parallelism."""
    original = Stepper.norm
    monkeypatch.setattr(Stepper, "norm", lambda self: original(self) * self.layout.dp**0.5)


def loss_summed_over_cp(monkeypatch):
    """What is reported counts every context rank."""
    original = Stepper.backward

    def backward(self, microbatches):
        loss, tokens = original(self, microbatches)
        return loss * self.layout.cp, tokens

    monkeypatch.setattr(Stepper, "backward", backward)


def last_microbatch_only(monkeypatch):
    """Gradients of earlier microbatches are overwritten."""
    original = Stepper._one_by_one
    monkeypatch.setattr(
        Stepper, "_one_by_one", lambda self, microbatches, tokens: original(self, microbatches[-1:], tokens)
    )


def not_clipped(monkeypatch):
    """Several ranks do not clip."""
    original = step.clip_gradients
    monkeypatch.setattr(step, "clip_gradients", lambda *args: None if several() else original(*args))


def planted(name):
    plant, case, _ = MUTANTS[name]
    return plant, case


EXPERTS, DEEP = row("experts", ep=2, **SHARD), row("deep", pp=2, **ONE_BY_ONE)

FAULTS = {
    "gradients divided by dp": (*planted("gradients divided by dp"), "scaled_by_dp_shard", "likely"),
    "router's partial sum skipped": (
        *planted("router's partial sum skipped"), "not_summed_over_tp", "certain",
    ),
    "log-sum-exp 0 on empty rows": (*planted("log-sum-exp 0 on empty rows"), "forward_differs", "likely"),
    "resharding under zero-bubble": (
        *planted("resharding under zero-bubble"), "gradient_missing", "certain",
    ),
    "tied copies not summed": (*planted("tied copies not summed"), "tied_not_summed", "certain"),
    "norm counted twice": (*planted("norm counted twice"), "norm_counts_tied_twice", "certain"),
    "mean per microbatch": (*planted("mean per microbatch"), "loss_per_microbatch", "certain"),
    "one layer dropped": (*planted("one layer dropped"), "forward_differs", "likely"),
    "tokens of the rank": (tokens_of_the_rank, row(**SHARD), "loss_per_rank", "certain"),
    "sum of tokens": (sum_of_tokens, row(**SHARD), "wrong_token_count", "certain"),
    "sum of microbatches": (
        sum_of_microbatches, row(dp_replicate=2, microbatches=3), "scaled_by_microbatches", "likely",
    ),
    "experts times ep": (experts_times_ep, EXPERTS, "experts_scaled_by_ep", "likely"),
    "embedding lost": (embedding_lost, row(tp=2), "gradient_lost", "certain"),
    "stages doubled": (stages_doubled, row("deep", pp=4, **ONE_BY_ONE), "power_of_each_stage", "certain"),
    "norm of the stage": (norm_of_the_stage, DEEP, "norm_of_one_stage", "certain"),
    "norm reduced again": (norm_reduced_again, row(**SHARD), "norm_scaled_by_dp_shard", "likely"),
    "loss summed over cp": (loss_summed_over_cp, row(**RING), "loss_scaled_by_cp", "likely"),
    "last microbatch only": (last_microbatch_only, row(dp_replicate=2), "microbatch_dropped", "certain"),
    "not clipped": (not_clipped, row(dp_replicate=2), "update_differs", "likely"),
}  # fmt: skip
"""How to plant it, a layout that has it and one rank has not, its cause, and how sure that is."""


def compared(case, left, right, folder, steps=2, precision="fp64", reference=False):
    """The document of two layouts of the batch of ``case``."""
    spec, job, batches = plan_of(case, precision)
    job = job.model_copy(update={"steps": steps})

    def run(name, job, layout, own):
        return short_run(name, spec, job, layout, batches, own, Wishes(timeout=60))

    runs = []
    for name, layout in (("A", left), ("B", right)):
        (folder / name).mkdir()
        runs.append(run(name, job, layout, folder / name))
    with Gathered(runs[0]) as a, Gathered(runs[1]) as b:
        return Comparison(spec, job, batches, a, b, folder, run, lambda text: None).document(
            reference=reference
        )


def one_rank(case):
    """The layout of one process and one microbatch with the batch of ``case``."""
    layout = case.layout
    return row(micro_batch=layout.dp * layout.micro_batch * layout.microbatches, microbatches=1).layout


@pytest.mark.parametrize("fault", FAULTS)
def test_the_cause_of_a_planted_fault_is_told(fault, monkeypatch, tmp_path):
    plant, case, key, certainty = FAULTS[fault]
    plant(monkeypatch)
    layouts = [one_rank(case), case.layout]
    first = list(FAULTS).index(fault) % 2 == 1  # whichever of the two is wrong, it is named
    document = compared(
        case, *(layouts[::-1] if first else layouts), tmp_path, steps=2 if fault == "not clipped" else 1
    )
    assert not document["ok"]
    assert (document["cause"], document["certainty"]) == (key, certainty), document["explanation"]
    assert document["wrong"] == ([] if fault == "not clipped" else ["a" if first else "b"])
    assert document["max_relative_difference"] is None or document["max_relative_difference"] > 1e-7


@pytest.mark.parametrize(
    ("case", "other"),
    [
        (row("shared_experts", ep=2, etp=2, tp=2, sp=True, **SHARD), row(**RING, **SHARD)),
        (
            row("deep_tied", pp=2, schedule="ZBVZeroBubble", chunks=2, tp=2, sp=True),
            row("deep_tied", dp_replicate=2, dp_shard=2, microbatches=1),
        ),
        (row("gpt2", tp=2, **SHARD), row(dp_replicate=2, microbatches=2)),
    ],
    ids=lambda case: case.label,
)
def test_right_layouts_are_equal(case, other, tmp_path):
    document = compared(case, other.layout, case.layout, tmp_path)
    assert document["ok"], document["worst_gradient"]
    assert document["cause"] is None
    assert document["wrong"] == []
    assert document["max_relative_difference"] < 1e-9
    assert document["worst_gradient"]["difference"] < 1e-11
    assert {name for row in document["gradients"] for name in row["axes_b"]} <= {
        *("tp", "dp_shard", "cp", "dp_shard+cp", "ep", "expert_shard")
    }
    assert not multiprocessing.active_children()


def test_two_that_are_wrong_alike_are_seen_beside_a_plain_process(monkeypatch, tmp_path):
    plant, case = planted("gradients divided by dp")
    plant(monkeypatch)
    other = row(**SHARD, micro_batch=4, microbatches=1).layout
    (tmp_path / "alone").mkdir()
    assert compared(case, other, case.layout, tmp_path / "alone", steps=1)["ok"]
    (tmp_path / "judged").mkdir()
    document = compared(case, other, case.layout, tmp_path / "judged", steps=1, reference=True)
    assert (document["ok"], document["wrong"], document["differing_gradients"]) == (False, ["a", "b"], 0)
    assert document["cause"] == "scaled_by_dp_shard"


def test_bf16_has_a_tolerance_that_holds_and_catches(monkeypatch, tmp_path):
    case = row(tp=2, sp=True)
    (tmp_path / "right").mkdir()
    assert compared(case, one_rank(case), case.layout, tmp_path / "right", precision="bf16")["ok"]
    plant, case = planted("gradients divided by dp")
    plant(monkeypatch)
    (tmp_path / "fault").mkdir()
    document = compared(case, one_rank(case), case.layout, tmp_path / "fault", steps=1, precision="bf16")
    assert (document["cause"], document["wrong"]) == ("scaled_by_dp_shard", ["b"])
