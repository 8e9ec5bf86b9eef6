"""One block of every family as operations in order, which plan/tape.py plays.

The Llama-like families are written as run/model.py executes them; the others with the same kernels (fused
norms, rotary embedding, gated activations and attention that keeps a log-sum-exp) in the order of
transformers' modeling_*.py. No dropout. Not counted: what Hugging Face's unfused norms and activations keep
besides (plan/other_runtimes.py has that for Llama), fp32 copies of what a router reads, scores of attention
kernels without sinks or softcapping, and frozen weights of few bits widened for one product.
"""

from dataclasses import dataclass
from typing import Literal

from shardwright.plan.attention_steps import attention_steps
from shardwright.plan.block_ops import Rank
from shardwright.plan.feed_forward_steps import expert_steps, feed_forward_steps
from shardwright.plan.tape import Op, Step

Kind = Literal["dense", "experts"]
"""Which feed-forward network a block has."""

Branch = Literal["attention", "feed_forward"]


def block_steps(rank: Rank, kind: Kind) -> list[Step]:
    """All steps, from ``input`` to ``output``."""
    block = _Block(rank, kind)
    return block.parallel() if rank.model.parallel_block else block.sequential()


@dataclass(frozen=True)
class _Block:
    """How the branches of a block stand to the residual stream."""

    rank: Rank
    kind: Kind

    def sequential(self) -> list[Step]:
        rank, place = self.rank, self.rank.model.norm_placement
        steps: list[Step] = []
        stream = "input"
        branches: tuple[tuple[int, Branch, str, str], ...]
        branches = ((1, "attention", "o", "middle"), (2, "feed_forward", "down", "output"))
        for number, branch, out, total in branches:
            if place in ("pre", "sandwich"):
                read = f"norm{number}"
                steps.append((rank.norm(number, stream, read, self._read_by(branch)),))
            else:
                gathering, read = self._gathered(stream)
                steps += gathering
            body, outs = self._branch(branch, read, out)
            steps += body
            if place in ("post", "sandwich"):
                if len(outs) > 1:
                    steps.append((self._add(outs, out),))
                read = out if len(outs) > 1 else outs[0]
                steps.append((rank.norm(number + 2, read, f"{out}_normed", rank.residual),))
                outs = (f"{out}_normed",)
            if place == "residual":
                summed = f"sum{number}"
                steps.append((self._add((stream, *outs), summed),))
                steps.append((rank.norm(number, summed, total, rank.residual),))
            else:
                steps.append((self._add((stream, *outs), total),))
            stream = total
        return steps

    def parallel(self) -> list[Step]:
        rank = self.rank
        attention, o = self._branch("attention", "norm1", "o")
        second = "norm1" if rank.model.shared_norm else "norm2"
        feed_forward, down = self._branch("feed_forward", second, "down")
        steps: list[Step] = [(rank.norm(1, "input", "norm1", rank.whole),), *attention]
        if not rank.model.shared_norm:
            steps.append((rank.norm(2, "input", "norm2", rank.whole),))
        return [*steps, *feed_forward, (self._add(("input", *o, *down), "output"),)]

    def _branch(self, branch: Branch, read: str, out: str) -> tuple[list[Step], tuple[str, ...]]:
        """Steps of a branch, and the tensors that add up to what it gives."""
        rank, moe = self.rank, self.rank.model.moe
        if branch == "attention":
            return attention_steps(rank, read), (out,)
        if self.kind == "experts" and moe:
            return expert_steps(rank, moe, read)
        return feed_forward_steps(rank, read, out, rank.model.ffn / rank.split.tp), (out,)

    def _read_by(self, branch: Branch) -> float:
        """Size of what a branch reads: whole experts alone need no token of another rank of tp."""
        rank, moe = self.rank, self.rank.model.moe
        alone = branch == "feed_forward" and self.kind == "experts" and moe and not moe.shared_ffn
        return rank.residual if alone and rank.split.etp == 1 else rank.whole

    def _add(self, reads: tuple[str, ...], total: str) -> Op:
        return Op("residual", reads, {total: self.rank.residual}, adds=True)

    def _gathered(self, tensor: str) -> tuple[list[Step], str]:
        """The residual stream as a matrix reads it without a norm between."""
        if not self.rank.split.sp:
            return [], tensor
        whole = f"{tensor}_gathered"
        return [(Op("gather", (tensor,), {whole: self.rank.whole}),)], whole
