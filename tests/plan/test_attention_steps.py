"""Latent attention of a real block, written with the runtime's kernels: its saved bytes and its peak."""

import pytest
import torch
from test_block_steps import saved_bytes
from test_tape import BATCH, JOB, SEQ, inputs_of, peak_of, predicted_peak
from torch import nn

from shardwright.model import Mla, ModelSpec, preset
from shardwright.plan.activations import Split, block_activations
from shardwright.run.feed_forward import MLP
from shardwright.run.kernels import causal_attention, rotate
from shardwright.run.layer_norm import RMSNorm

MLA = Mla(q_rank=12, kv_rank=16, nope_size=8, rope_size=4, value_size=12)
SPEC = preset("deepseek-v3").model_copy(
    update={"hidden": 32, "ffn": 200, "heads": 4, "kv_heads": 4, "head_size": 12, "mla": MLA}
)
"""Values are as wide as keys, which the CPU's flash kernel needs."""


class Latent(nn.Module):
    """Multi-head latent attention: DeepSeek-V2, arXiv:2405.04434, section 2.1."""

    def __init__(self, spec: ModelSpec, mla: Mla) -> None:
        super().__init__()
        self.mla, self.heads = mla, spec.heads
        self.q_down = nn.Linear(spec.hidden, mla.q_rank, bias=False)
        self.q_norm = RMSNorm(mla.q_rank, spec.norm_eps)
        self.q_up = nn.Linear(mla.q_rank, spec.heads * spec.head_size, bias=False)
        self.kv_down = nn.Linear(spec.hidden, mla.kv_rank + mla.rope_size, bias=False)
        self.kv_norm = RMSNorm(mla.kv_rank, spec.norm_eps)
        self.kv_up = nn.Linear(mla.kv_rank, spec.heads * (mla.nope_size + mla.value_size), bias=False)
        self.out = nn.Linear(spec.heads * mla.value_size, spec.hidden, bias=False)

    def forward(self, x_BSE, cos, sin):
        by_head = (*x_BSE.shape[:2], self.heads, -1)
        q_BSHD = self.q_up(self.q_norm(self.q_down(x_BSE))).view(by_head)
        plain, turned = q_BSHD.split([self.mla.nope_size, self.mla.rope_size], -1)
        q_BSHD = torch.cat([plain, rotate(turned, cos, sin)], -1)
        latent, turned = self.kv_down(x_BSE).split([self.mla.kv_rank, self.mla.rope_size], -1)
        kv_BSHD = self.kv_up(self.kv_norm(latent)).view(by_head)
        plain, v_BSHD = kv_BSHD.split([self.mla.nope_size, self.mla.value_size], -1)
        turned = rotate(turned[:, :, None], cos, sin).expand(-1, -1, self.heads, -1)
        k_BSHD = torch.cat([plain, turned], -1)
        heads = (tensor.transpose(1, 2) for tensor in (q_BSHD, k_BSHD, v_BSHD))
        return self.out(causal_attention(*heads).transpose(1, 2).flatten(2))


class LatentBlock(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention, self.mlp = Latent(spec, MLA), MLP(spec)
        self.norms = nn.ModuleList(RMSNorm(spec.hidden, spec.norm_eps) for _ in range(2))

    def forward(self, x, places):
        x = x + self.attention(self.norms[0](x), places.cos_SD, places.sin_SD)
        return x + self.mlp(self.norms[1](x))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("ffn", [200, 8])
def test_peak_of_latent_attention(ffn, recompute):
    spec = SPEC.model_copy(update={"ffn": ffn})
    block = LatentBlock(spec)
    measured = peak_of(block, *inputs_of(block, spec, MLA.rope_size), recompute)
    predicted, moment = predicted_peak(spec, JOB, recompute)
    assert predicted == measured
    assert moment == ("attention backward" if ffn == 8 else "SwiGLU backward")


def test_saved_tensors_of_latent_attention():
    """Term by term, for each token: narrow vectors before and after their norms, plain keys with the values
    (one storage), queries, keys, the output and a statistic of each norm and head."""
    block = LatentBlock(SPEC)
    places, x = inputs_of(block, SPEC, MLA.rope_size)
    kept = nn.ParameterList([*block.parameters(), places.cos_SD, places.sin_SD])
    measured = saved_bytes(kept, lambda: block(x, places))
    saved = dict(block_activations(SPEC, JOB, "none").saved)
    assert measured == BATCH * SEQ * sum(saved.values())
    feed_forward = {"middle": 32, "norm2": 32, "rstd2": 1, "gate": 200, "up": 200, "product": 200}
    attention = {
        "input": 32, "norm1": 32, "rstd1": 1, "q_latent": 12, "q_latent_rstd": 1, "q_latent_normed": 12,
        "kv_latent": 16 + 4, "kv_latent_rstd": 1, "kv_latent_normed": 16, "k_nope": 4 * 8, "v": 4 * 12,
        "q": 4 * 12, "k": 4 * 12, "attention": 4 * 12, "lse": 4,
    }  # fmt: skip
    assert saved == {name: 4 * numbers for name, numbers in (attention | feed_forward).items()}


def test_tp_splits_heads_and_leaves_latent_vectors_whole():
    one, two = (block_activations(SPEC, JOB, "none", Split(tp)).saved for tp in (1, 2))
    for name in ("q_latent", "q_latent_normed", "kv_latent", "kv_latent_normed", "q_latent_rstd"):
        assert one[name] == two[name]
    for name in ("q", "k", "k_nope", "v", "attention", "lse"):
        assert one[name] == 2 * two[name]
