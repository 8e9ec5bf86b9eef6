"""Compiled blocks train as eager ones do."""

import pytest
import torch
import torch._functorch.config
from gloo import MODELS, RaggedBatches, gradient_difference, job_of, parallel_steps, plain_steps, relative
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from shardwright.errors import LayoutError
from shardwright.layout import KEPT_BY_SELECTIVE, Layout
from shardwright.run.compile import apply_compile, check_compile
from shardwright.run.init import initialise
from shardwright.run.launch import run_ranks
from shardwright.run.model import Part, Transformer

# torch's tracer warns of what it does itself: it makes instances of autograd functions, and looks at their
# inputs' .grad
pytestmark = pytest.mark.filterwarnings("ignore")

LAYOUTS = {
    "shard": {"dp_shard": 2, "zero_stage": 3},
    "tp x full": {"tp": 2, "recompute": "full"},
    "shard x tp x sp": {"tp": 2, "sp": True, "dp_shard": 2, "zero_stage": 3},
}


def compiled_and_plain(backend, **degrees):
    layout = Layout(micro_batch=2, microbatches=2, **degrees)
    spec = MODELS["qk_norm"]
    job = job_of(layout.dp * layout.micro_batch * layout.microbatches)
    batches = RaggedBatches(spec.vocab, job.seq)
    found = run_ranks(parallel_steps, layout.ranks, spec, job, layout, batches, 1.0, backend, timeout_s=120)
    return found[0], plain_steps(spec, job, batches)


@pytest.mark.parametrize("name", LAYOUTS)
def test_fp64_equals_one_eager_process(name):
    """Traced and run as eager operations: what goes wrong with hooks and collectives goes wrong here too."""
    found, expected = compiled_and_plain("aot_eager", **LAYOUTS[name])
    assert relative(found.losses, expected.losses) < 1e-9
    assert relative(found.norms, expected.norms) < 1e-8
    difference, parameter = gradient_difference(found, expected)
    assert difference < 1e-9, parameter


@pytest.mark.slow
def test_inductor_equals_one_eager_process():
    found, expected = compiled_and_plain("inductor")
    assert relative(found.losses, expected.losses) < 1e-9
    assert gradient_difference(found, expected)[0] < 1e-9


def test_two_passes_compiled():
    """As a zero-bubble schedule makes them. Without ``passes`` torch refuses to run the first again."""
    torch.manual_seed(0)
    spec = MODELS["base"]
    x_BSE = torch.randn(2, 24, spec.hidden, dtype=torch.float64, requires_grad=True)
    grad_BSE = torch.randn_like(x_BSE)
    model = Transformer(spec, Part(range(2), first=False, last=False)).double()
    initialise(model, 0, torch.device("cpu"))
    weights = list(model.parameters())
    expected = torch.autograd.grad(model(x_BSE), [x_BSE, *weights], grad_BSE)
    with torch._functorch.config.patch(donated_buffer=True):  # and back to what it was
        apply_compile(model, "aot_eager", passes=2)
        (of_x,), groups = stage_backward_input([model(x_BSE)], [grad_BSE], [x_BSE], iter(weights))
        stage_backward_weight(iter(weights), groups)
    found = [of_x, *(weight.grad for weight in weights)]
    torch.testing.assert_close(found, list(expected), rtol=0, atol=1e-12)


def test_selective_recomputation_is_refused():
    with pytest.raises(
        LayoutError, match=r"--compile does not go with recompute='selective'.*--recompute none"
    ):
        check_compile(Layout(recompute="selective", kept=KEPT_BY_SELECTIVE))
