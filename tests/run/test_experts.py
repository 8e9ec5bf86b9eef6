"""A layer with experts against transformers' own, against plain PyTorch, and what it keeps and counts."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own custom)
from expert_stack import BASE, SPECS, Stack, kept_bytes, planned_bytes, with_moe
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.errors import ModelError
from shardwright.hf_config import model_from_config
from shardwright.plan.activations import Split
from shardwright.run import grouped, kernels
from shardwright.run.expert_load import (
    apply_balance,
    expert_load,
    initialise_bias,
    set_routing,
    update_router_bias,
)
from shardwright.run.experts import MoE
from shardwright.run.grouped import grouped_product, weighted_swiglu
from shardwright.run.routing import BalancedRouting, chosen_experts

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
THREE_OF_8 = {**SMALL, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT = {
    **THREE_OF_8, "n_routed_experts": 8, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": 0, "num_key_value_heads": 4,
}  # fmt: skip
GROUPS = {"n_group": 4, "topk_group": 2}
CONFIGS = {
    "mixtral": ("mixtral", {**SMALL, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2_moe", {**THREE_OF_8, "num_experts": 8, "shared_expert_intermediate_size": 20}),
    "qwen2_moe normalised": ("qwen2_moe", {**THREE_OF_8, "num_experts": 8, "norm_topk_prob": True,
                                           "shared_expert_intermediate_size": 20}),
    "qwen3_moe": ("qwen3_moe", {**THREE_OF_8, "num_experts": 8}),
    "qwen3_moe normalised": ("qwen3_moe", {**THREE_OF_8, "num_experts": 8, "norm_topk_prob": True}),
    "deepseek_v2 greedy": ("deepseek_v2", {**LATENT, **GROUPS}),
    "deepseek_v2 by groups": ("deepseek_v2", {**LATENT, **GROUPS, "topk_method": "group_limited_greedy",
                                              "routed_scaling_factor": 3.0}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, **GROUPS}),
    "deepseek_v3 not normalised": ("deepseek_v3", {**LATENT, **GROUPS, "norm_topk_prob": False}),
    "glm4_moe": ("glm4_moe", {**THREE_OF_8, "n_routed_experts": 8, "first_k_dense_replace": 0}),
}  # fmt: skip


def relative(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


class Operations(TorchDispatchMode):
    """Names of the operators called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def filled(spec, dtype=torch.float64, seed=0):
    """A layer with random weights and biases."""
    moe = MoE(spec).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*moe.parameters(), *moe.buffers()):
        tensor.data.normal_(0, 0.4, generator=generator)
    return moe


def tokens(batch=3, seq=5, dtype=torch.float64, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, seq, BASE.hidden, dtype=torch.float64, generator=generator).to(dtype)


class TestAgainstTransformers:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_names_outputs_and_gradients(self, name):
        family, values = CONFIGS[name]
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values)).model.layers[1].mlp
        generator = torch.Generator().manual_seed(0)
        for tensor in (*theirs.parameters(), *theirs.buffers()):
            tensor.data.normal_(0, 0.3, generator=generator)
        ours = MoE(model_from_config({**values, "model_type": family}, name=name))
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(2, 10, 32, generator=generator)
        found = []
        for layer in (ours, theirs):
            leaf = x.clone().requires_grad_()
            out = layer(leaf)
            out.backward(torch.ones_like(out) + x)
            found.append([out, leaf.grad, *(parameter.grad for parameter in layer.parameters())])
        for one, other in zip(*found, strict=True):
            assert relative(one, other) < 1e-5


def plain(moe, spec, x, aux):
    """Output, and the balancing loss by its definition: all experts on all tokens, in plain PyTorch."""
    kind, tokens_NH = spec.moe, x.flatten(0, 1)
    logits = tokens_NH @ moe.gate.weight.t()
    scores = logits.sigmoid() if kind.score == "sigmoid" else logits.softmax(-1)
    index = chosen_experts(scores, moe.gate.bias, kind)
    chosen = torch.zeros_like(scores).scatter(1, index, 1.0)
    weights = scores * chosen
    if kind.normalise:
        weights = weights / weights.sum(1, keepdim=True)
    gate, up = torch.einsum("nh,efh->nef", tokens_NH, moe.experts.gate_up_proj).chunk(2, dim=-1)
    made = torch.einsum("nef,ehf->neh", F.silu(gate) * up, moe.experts.down_proj)
    out = torch.einsum("neh,ne->nh", made, weights * kind.scale)
    if kind.shared_ffn:
        shared = getattr(moe, moe.shared)
        more = shared.down_proj(F.silu(shared.gate_proj(tokens_NH)) * shared.up_proj(tokens_NH))
        if kind.shared_gate:
            more = torch.sigmoid(tokens_NH @ moe.shared_expert_gate.weight.t()) * more
        out = out + more
    shares = (scores / scores.sum(1, keepdim=True)).view(*x.shape[:2], -1)
    fraction = chosen.view(*x.shape[:2], -1).mean(1) * kind.experts / kind.top_k
    return out.view_as(x), aux * (fraction * shares.mean(1)).sum() / len(x)


class TestAgainstPlain:
    @pytest.mark.parametrize("aux", [0.0, 0.7])
    @pytest.mark.parametrize("name", SPECS)
    def test_outputs_gradients_and_balancing_loss(self, name, aux):
        spec = SPECS[name]
        moe, x = filled(spec), tokens()
        apply_balance(moe, aux, len(x))
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        inputs = list(moe.parameters())
        out = moe(ours)
        found = torch.autograd.grad(out.square().sum(), [ours, *inputs])
        expected_out, balance = plain(moe, spec, theirs, aux)
        expected = torch.autograd.grad(expected_out.square().sum() + balance, [theirs, *inputs])
        assert relative(out, expected_out) < 1e-13
        for one, other in zip(found, expected, strict=True):
            assert relative(one, other) < 1e-12
        assert expert_load(moe).loss.item() == pytest.approx(balance.item(), rel=1e-12, abs=1e-30)

    @pytest.mark.parametrize("slices", [2**22, 100], ids=["one_slice", "many_slices"])
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 2e-2)])
    def test_grouped_products_and_weighted_activation(self, monkeypatch, slices, dtype, tolerance):
        monkeypatch.setattr(kernels, "ROWS_BYTES", slices)
        counts = [3, 0, 5, 1]
        generator = torch.Generator().manual_seed(0)

        def leaf(*shape, kind=dtype):
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(kind).requires_grad_()

        weights = torch.float32 if dtype == torch.bfloat16 else dtype
        inputs = leaf(9, 6), leaf(4, 16, 6), leaf(9, kind=weights)
        wanted = [tensor.detach().double().requires_grad_() for tensor in inputs]
        out = weighted_swiglu(grouped_product(inputs[0], inputs[1], counts), inputs[2])
        each = torch.arange(4).repeat_interleave(torch.tensor(counts))
        gate, up = torch.einsum("ci,coi->co", wanted[0], wanted[1][each]).chunk(2, dim=1)
        expected = F.silu(gate) * up * wanted[2][:, None]
        grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        found = [out, *torch.autograd.grad(out, inputs, grad.to(dtype))]
        for one, other in zip(found, [expected, *torch.autograd.grad(expected, wanted, grad)], strict=True):
            assert relative(one.double(), other) < tolerance

    def test_one_kernel_for_all_groups(self, monkeypatch):
        """CUDA's way, by torch's CPU kernel of the same name."""
        generator = torch.Generator().manual_seed(0)
        x, weight, grad = (
            torch.randn(shape, generator=generator).bfloat16() for shape in [(9, 8), (4, 16, 8), (9, 16)]
        )

        def passes():
            inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
            out = grouped_product(*inputs, [3, 0, 5, 1])
            return out, *torch.autograd.grad(out, inputs, grad)

        expected = passes()
        monkeypatch.setattr(grouped, "_one_kernel", lambda *tensors: True)
        for one, other in zip(passes(), expected, strict=True):
            assert relative(one.float(), other.float()) < 1e-2

    def test_a_pass_for_one_gradient_makes_no_other(self):
        x, weight = torch.randn(9, 6, requires_grad=True), torch.randn(4, 16, 6, requires_grad=True)
        for wanted, made, other in (
            (x, "grouped_product_input", "grouped_product_weight"),
            (weight, "grouped_product_weight", "grouped_product_input"),
        ):
            with Operations() as operations:
                torch.autograd.grad(grouped_product(x, weight, [3, 0, 5, 1]).sum(), [wanted])
            assert made in operations.names
            assert other not in operations.names

    def test_bf16_routes_in_fp32(self):
        spec = SPECS["deepseek_v3"]
        moe = filled(spec, torch.bfloat16)
        moe.gate.e_score_correction_bias = moe.gate.bias.float()
        routed = moe.gate(tokens(dtype=torch.bfloat16))
        assert routed.weights.dtype == torch.float32
        assert routed.weights.view(-1).sum().item() == pytest.approx(15 * spec.moe.scale, rel=1e-5)


class TestWhatIsKept:
    @pytest.mark.parametrize("name", SPECS)
    def test_equals_the_plan(self, name):
        spec, x = SPECS[name], tokens(dtype=torch.float32)
        counts = 8 * spec.moe.experts  # one number an expert, not a token: not in the plan
        planned = planned_bytes(spec, "fp32", Split()) * 15
        assert kept_bytes(filled(spec, torch.float32), x) == planned + counts


class TestCounting:
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_recomputation_does_not_count_twice(self, reentrant):
        moe, x = filled(BASE), tokens().requires_grad_()
        apply_balance(moe, 0.1, 3)
        moe(x).sum().backward()
        once = expert_load(moe)
        checkpoint(moe, x, use_reentrant=reentrant).sum().backward()
        again = expert_load(moe)
        assert torch.equal(once.counts, again.counts)
        assert once.loss == again.loss
        assert once.counts.sum() == 15 * BASE.moe.top_k

    def test_microbatches_add_up_and_evaluation_does_not_count(self):
        moe, x = filled(BASE), tokens(4)
        apply_balance(moe, 0.1, 4)
        moe(x).sum().backward()
        whole = expert_load(moe)
        for part in x.chunk(2):
            moe(part).sum().backward()
            with torch.no_grad():
                moe(part)
        parts = expert_load(moe)
        assert torch.equal(whole.counts, parts.counts)
        assert parts.loss.item() == pytest.approx(whole.loss.item(), rel=1e-13)
        assert whole.fullest >= 1 >= whole.emptiest

    @pytest.mark.parametrize("recompute", [False, True])
    def test_a_zero_bubble_schedule_counts_once(self, recompute):
        """Its two passes, input and weights, make the same gradients and counts as one."""
        stack = Stack(SPECS["deepseek_v3"], recompute, False).double()
        apply_balance(stack, 1e4, 3)
        x, grad = tokens().requires_grad_(), tokens(seed=8)
        stack(x).backward(grad)
        once, expected = expert_load(stack), {n: p.grad.clone() for n, p in stack.named_parameters()}
        dx, x.grad = x.grad, None
        stack.zero_grad()
        (found,), groups = stage_backward_input([stack(x)], [grad], [x], stack.parameters())
        stage_backward_weight(stack.parameters(), groups)
        again = expert_load(stack)
        assert torch.equal(found, dx)
        assert torch.equal(once.counts, again.counts)
        assert once.loss == again.loss
        for name, parameter in stack.named_parameters():
            assert relative(parameter.grad, expected[name]) < 1e-13

    def test_balanced_routing_is_even(self):
        moe = filled(SPECS["deepseek_v3"])
        set_routing(moe, BalancedRouting())
        moe(tokens(4, 8)).sum().backward()
        load = expert_load(moe)
        assert load.counts.tolist() == [[12] * 8]
        assert load.fullest == load.emptiest == 1

    def test_biases_move_against_the_load(self):
        moe = filled(SPECS["deepseek_v3"])
        initialise_bias(moe)
        update_router_bias(moe, torch.tensor([[9, 1, 5, 5, 5, 5, 4, 6]]), 0.25)
        assert moe.gate.bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0.25, -0.25]
        before = moe.gate.weight.clone()
        update_router_bias(filled(BASE), torch.tensor([[1] * 8]), 0.25)  # no bias: nothing to move
        assert torch.equal(before, moe.gate.weight)


def test_other_experts_are_refused():
    with pytest.raises(ModelError, match="activation='gelu', gated_mlp=True and biases=False are not built"):
        MoE(with_moe("mixtral", {"activation": "gelu"}))
