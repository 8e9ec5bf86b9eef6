"""What tests of real ranks share: small models, ragged data, and one step of a plan against plain PyTorch."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.job import Job
from shardwright.layout import KEPT_BY_SELECTIVE, Layout
from shardwright.model import Llama3Rope, Mla, ModelSpec, Moe, Yarn
from shardwright.run.dataset import MASKED, Sample, sample_indices, stack_samples
from shardwright.run.dp import sharded_modules
from shardwright.run.expert_load import apply_balance, expert_load, routers, update_router_bias
from shardwright.run.init import initialise, table_name
from shardwright.run.mesh import build_mesh
from shardwright.run.model import Transformer
from shardwright.run.optim import learning_rate
from shardwright.run.step import Stepper, parallel_model
from shardwright.run.train import to_device

STEPS = 3

# hidden, heads and head_size do not agree on purpose: nothing may assume hidden = heads * head_size
BASE = ModelSpec(
    name="tiny", model_type="llama", layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_size=16, vocab=64
)


TO_ONE = "all tokens to one expert"


def start(model, spec, seed):
    """Initial weights; in one model correction biases that send every token to one expert."""
    initialise(model, seed, torch.device("cpu"))
    for router in routers(model) if spec.name == TO_ONE else ():
        router.bias[1] = 100.0


def with_experts(model_type, layers=2, experts=8, top_k=2, **moe):
    """BASE with routed experts in every layer."""
    changes = {"layers": layers, "model_type": model_type}
    moe = Moe(experts=experts, top_k=top_k, ffn=12, **moe)
    return BASE.model_copy(update={**changes, "moe": moe})


YARN = Yarn(factor=4.0, original_positions=16, attention_factor=1.1, score_factor=1.2)
DEEPSEEK = {"shared_ffn": 24, "score": "sigmoid", "correction_bias": True, "groups": 4, "top_groups": 2}
LATENT = {
    "head_size": 12,
    "kv_heads": 4,
    "mla": Mla(q_rank=20, kv_rank=12, nope_size=8, rope_size=4, value_size=6),
}
GELU_NORMED = {"norm": "layer", "norm_bias": True, "gated_mlp": False, "activation": "gelu_tanh"} | {
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "tied_embeddings": True,
}
GPT2 = GELU_NORMED | {"model_type": "gpt2", "kv_heads": 4, "positions": "learned", "max_positions": 32}
STARCODER2 = GELU_NORMED | {"model_type": "starcoder2", "tied_embeddings": False}

MODELS = {
    "base": BASE,
    "tied": BASE.model_copy(update={"tied_embeddings": True}),
    "qk_norm": BASE.model_copy(update={"qk_norm": True, "model_type": "qwen3"}),
    "bias": BASE.model_copy(update={"qkv_bias": True, "out_bias": True, "mlp_bias": True}),
    "uneven_vocab": BASE.model_copy(update={"vocab": 255}),
    "rows_below_shards": BASE.model_copy(
        update={"layers": 1, "hidden": 3, "ffn": 3, "heads": 1, "kv_heads": 1, "head_size": 2, "vocab": 3}
    ),
    "deep": BASE.model_copy(update={"layers": 4}),
    "deeper": BASE.model_copy(update={"layers": 8}),
    "deep_tied": BASE.model_copy(update={"layers": 4, "tied_embeddings": True}),
    "experts": with_experts("qwen3_moe", top_k=2, normalise=True).model_copy(update={"qk_norm": True}),
    "shared_experts": with_experts("qwen2_moe", top_k=3, shared_ffn=12, shared_gate=True, normalise=False),
    "idle_experts": with_experts("mixtral", experts=32, top_k=1, normalise=False),
    "one_expert": with_experts(
        "glm4_moe", experts=4, top_k=1, score="sigmoid", normalise=False, correction_bias=True
    ).model_copy(update={"name": TO_ONE}),
    "deep_experts": with_experts("qwen3_moe", layers=4),
    "latent": with_experts("deepseek_v3", 4, top_k=3, **DEEPSEEK).model_copy(update=LATENT),
    "latent_dense": with_experts("deepseek_v3", 2, first_dense_layers=1, **DEEPSEEK).model_copy(
        update=LATENT | {"yarn": YARN, "qkv_bias": True, "out_bias": True}
    ),
    "deep_dense_first": with_experts("glm4_moe", 4, first_dense_layers=1, shared_ffn=12),
    "gpt2": BASE.model_copy(update=GPT2),
    "deep_gpt2": BASE.model_copy(update=GPT2 | {"layers": 4}),
    "gpt2_untied": BASE.model_copy(update=GPT2 | {"tied_embeddings": False}),
    "starcoder2": BASE.model_copy(update=STARCODER2),
    "yarn": BASE.model_copy(update={"yarn": YARN}),
    "windowed": BASE.model_copy(update={"model_type": "mistral", "sliding_window": 7}),
    "llama3_rope": BASE.model_copy(
        update={
            "rope_scaling": Llama3Rope(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=16
            )
        }
    ),
}


@dataclass(frozen=True)
class RaggedBatches:
    """Random tokens of which 5 to 100 % count, another share in every sequence.

    ``empty``: indices in the global batch whose sequences have no unmasked token at all. ``packed``: several
    documents stand in a sequence, which attention does not leave.
    """

    vocab: int
    seq: int
    empty: tuple[int, ...] = ()
    packed: bool = False

    def sample(self, step, index):
        generator = np.random.default_rng([step, index])
        span = generator.integers(0, self.vocab, self.seq + 1)
        kept = generator.random(self.seq) < generator.uniform(0.05, 1.0)
        targets = np.where(kept & (index not in self.empty), span[1:], MASKED)
        documents = np.cumsum(generator.random(self.seq) < 0.2) if self.packed else None
        return Sample(span[:-1], targets, documents)

    def microbatches(self, step, layout, data_rank):
        parts = sample_indices(layout, data_rank)
        return [stack_samples(self.sample(step, index) for index in part) for part in parts]

    def held_out_microbatches(self, batch, layout, data_rank):
        return self.microbatches(1000 + batch, layout, data_rank)

    def digest(self):
        return "ragged"


class Found(NamedTuple):
    """What three steps show: gradients of the first before clipping, then losses and norms of all."""

    gradients: dict
    losses: list
    norms: list
    parameters: dict


def layout_of(replicate, shard, stage, microbatches, micro_batch=2, recompute="none"):
    return Layout(
        dp_replicate=replicate,
        dp_shard=shard,
        zero_stage=stage,
        micro_batch=micro_batch,
        microbatches=microbatches,
        recompute=recompute,
        kept=KEPT_BY_SELECTIVE if recompute == "selective" else (),
    )


def job_of(global_batch, precision="fp64", optimizer="adamw", **others):
    values = {"seq": 24, "steps": 10, "learning_rate": 1e-2, "warmup_steps": 2, "clip_norm": 0.5, **others}
    return Job(global_batch=global_batch, precision=precision, optimizer=optimizer, **values)


def whole(tensor):
    """The whole of a tensor that may be sharded, as an array of fp64."""
    assert tensor is not None, "there is no gradient"
    if isinstance(tensor, DTensor):
        tensor = joined_parts(tensor) if any(map(stacked, tensor.placements)) else tensor.full_tensor()
    return tensor.detach().double().numpy().copy()


def stacked(placement):
    """Whether a placement splits each of several stacked matrices: gate and up of an expert, or queries, keys
    and values of GPT-2."""
    return isinstance(placement, _StridedShard) and placement.dim == 1


def joined_parts(tensor):
    """The whole of such a tensor, by hand: torch 2.13 cannot beside FSDP, which split last, on the left."""
    local, mesh = tensor.to_local(), tensor.device_mesh
    split = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    for axis in sorted(split, key=lambda axis: not stacked(tensor.placements[axis])):
        placement = tensor.placements[axis]
        parts = [torch.empty_like(local) for _ in range(mesh.size(axis))]
        torch.distributed.all_gather(parts, local.contiguous(), group=mesh.get_group(axis))
        if stacked(placement):
            each = zip(*(part.chunk(placement.split_factor, dim=1) for part in parts), strict=True)
            local = torch.cat([torch.cat(same, dim=1) for same in each], dim=1)
        else:
            local = torch.cat(parts, placement.dim)
    return local


def torch_batches(batches, step, layout, rank):
    return to_device(batches.microbatches(step, layout, rank), "cpu")


def stepper_of(spec, job, layout, compile_backend=None):
    """The plan's model with its first weights, ready to step, and this rank's place among those of data."""
    mesh = build_mesh(layout, "cpu")
    model = parallel_model(spec, job, layout, mesh, compile_backend=compile_backend)
    start(model, spec, job.seed)
    return Stepper(model, job, layout, mesh), mesh.data.get_local_rank()


def repeated_norms(spec, job, layout, batches):
    """Norms of the gradients of one batch, twice from the same weights; runs under ``run_ranks``."""
    stepper, rank = stepper_of(spec, job, layout)
    norms = []
    for _ in range(2):
        stepper.backward(torch_batches(batches, 0, layout, rank))
        norms.append(stepper.norm())
        stepper.optimizer.zero_grad(set_to_none=True)
    return norms


def parallel_steps(spec, job, layout, batches, divide_factor=1.0, compile_backend=None):
    """``Found`` of the plan, on each rank; runs under ``run_ranks``."""
    stepper, rank = stepper_of(spec, job, layout, compile_backend)
    model = stepper.model
    for module in sharded_modules(model) if divide_factor != 1.0 else ():
        module.set_gradient_divide_factor(divide_factor)
    gradients = {}

    def keep(loss, norm):
        """Before the first update: gradients are summed and not yet clipped."""
        if not gradients:
            named = model.named_parameters()
            gradients.update(by_name(spec, ((name, whole(parameter.grad)) for name, parameter in named)))
        return True

    stepper.admits = keep
    steps = [stepper.step(index, torch_batches(batches, index, layout, rank)) for index in range(STEPS)]
    return Found(
        gradients,
        [step.loss for step in steps],
        [step.gradient_norm for step in steps],
        by_name(spec, ((name, whole(parameter)) for name, parameter in model.named_parameters())),
    )


def by_name(spec, values):
    """Values of parameters by their names in the table; both copies of a tied matrix must be the same."""
    found = {}
    for name, value in values:
        assert (found.setdefault(table_name(name, spec), value) == value).all(), f"ranks differ in {name}"
    return found


@functools.cache
def plain_steps(spec, job, batches):
    """``Found`` of one process in plain PyTorch: nothing of ours but the model and its first weights."""
    model = Transformer(spec).to(torch.float64 if job.precision == "fp64" else torch.float32)
    start(model, spec, job.seed)
    apply_balance(model, job.router_aux_weight, job.global_batch)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": job.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if job.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, betas=(job.beta1, job.beta2), eps=job.epsilon, foreach=False)
    else:
        momentum = job.momentum if job.optimizer == "sgd_momentum" else 0.0
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=momentum, foreach=False)
    one = layout_of(1, 1, 0, 1, micro_batch=job.global_batch)
    gradients, losses, norms = {}, [], []
    for index in range(STEPS):
        ((tokens, targets, documents),) = torch_batches(batches, index, one, 0)
        logits = model(tokens, document_BS=documents)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=MASKED)
        loss.backward()
        if spec.moe is not None:
            update_router_bias(model, expert_load(model).counts, job.router_bias_rate)
        if index == 0:
            gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        if 0 < job.clip_norm < norms[-1]:  # not clip_grad_norm_, which adds 1e-6 to the norm
            for parameter in model.parameters():
                parameter.grad *= job.clip_norm / norms[-1]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job, index)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    parameters = {name: whole(parameter) for name, parameter in model.named_parameters()}
    return Found(gradients, losses, norms, parameters)


def relative(found, expected):
    """Largest difference over the largest expected entry."""
    scale = np.abs(expected).max()
    return float(np.abs(np.asarray(found) - expected).max() / (scale or 1.0))


def gradient_difference(found, expected):
    """Worst parameter of the first step's gradients: difference relative to its largest entry, and name."""
    assert found.gradients.keys() == expected.gradients.keys()
    return max((relative(found.gradients[name], value), name) for name, value in expected.gradients.items())
