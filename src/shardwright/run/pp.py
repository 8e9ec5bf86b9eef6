"""Pipeline parallelism: the layers in stages, a schedule of torch.distributed.pipelining to run them.

Stages, their layers and where they lie come from the layout; orders equal those of plan/schedule.py, which
tests compare action by action. Parameters and gradients of a stage are whole through a step and are reduced
once, at its end. Shapes at the borders are given, so that no stage runs on made-up values to infer them.

B batch of a microbatch, S this rank's part of the sequence, E hidden.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._utils import _make_tensor_from_meta
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.pipelining.stage import InferenceMode, _RecvInfo

from shardwright.job import Job
from shardwright.layout import Layout
from shardwright.model import ModelSpec
from shardwright.plan.schedule import MAX_ACTIVE_STAGES, stage_ranks
from shardwright.run.dp import PRECISION_DTYPE
from shardwright.run.kernels import wide
from shardwright.run.linear import local
from shardwright.run.model import Microbatch, Part, Stages
from shardwright.run.recompute import forget_recomputed, weight_pass

Border = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of what passes between stages."""


@contextmanager
def all_stages_gathered(stages: int) -> Iterator[None]:
    """Schedules made in here keep the parameters of all of a rank's stages for a step. torch's own keep three
    stages and gather the others anew for each of their passes (``_add_unshard_reshard``): of five stages and
    16 microbatches more than four times as often.
    """
    original = schedules._add_unshard_reshard
    schedules._add_unshard_reshard = partial(original, max_active_stages=max(stages, MAX_ACTIVE_STAGES))
    try:
        yield
    finally:
        schedules._add_unshard_reshard = original


def stage_parts(layout: Layout, model: ModelSpec, pp_rank: int) -> list[tuple[int, Part]]:
    """Number and part of the model of each stage that a rank of pp has, in the order of the stages."""
    if layout.pp == 1:
        return [(0, Part(range(model.layers), True, True))]
    lengths = layout.stage_layers
    firsts = [sum(lengths[:stage]) for stage in range(len(lengths))]
    ranks = stage_ranks(layout.schedule, layout.pp, layout.chunks)
    return [
        (
            stage,
            Part(range(first, first + length), stage == 0, stage == len(lengths) - 1),
        )
        for stage, (first, length, rank) in enumerate(zip(firsts, lengths, ranks, strict=True))
        if rank == pp_rank
    ]


def border(layout: Layout, job: Job, model: ModelSpec) -> Border:
    """What one stage sends to the next for a microbatch: B x S x E, S over the ranks of tp with sp."""
    seq = job.seq // layout.cp // (layout.tp if layout.sp else 1)
    return (layout.micro_batch, seq, model.hidden), PRECISION_DTYPE[job.precision]


class Outbox:
    """Sends of a stage under a schedule that would keep them all, with what they send, to the step's end.

    An output has left when its gradient has come. A gradient is waited for before the next one: torch places
    a receive beside its send, so that no rank gets there before it can be received.
    """

    def __init__(self) -> None:
        self.outputs: dict[int, list[dist.Work]] = {}
        self.gradient: list[dist.Work] = []

    def send_output(self, microbatch: int, ops: Sequence[dist.P2POp]) -> None:
        """Start to send what the next stage goes on with."""
        self.outputs[microbatch] = _started(ops)

    def send_gradient(self, ops: Sequence[dist.P2POp]) -> None:
        """Start to send what the stage before goes on with."""
        _wait(self.gradient)
        self.gradient = _started(ops)

    def has_come_back(self, microbatch: int) -> None:
        """Let go of an output whose gradient is there."""
        _wait(self.outputs.pop(microbatch, []))

    def empty(self) -> None:
        """Wait for what is left."""
        for microbatch in list(self.outputs):
            self.has_come_back(microbatch)
        _wait(self.gradient)
        self.gradient = []


def _started(ops: Sequence[dist.P2POp]) -> list[dist.Work]:
    """As a batch, as torch receives them: NCCL has other communicators for single sends."""
    return dist.batch_isend_irecv(list(ops)) if ops else []


def _wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()


class Stage(PipelineStage):
    """A stage that holds what it receives from its neighbours only while a microbatch needs it: torch makes
    buffers for all microbatches in the first step and keeps them. So too what it sends, through ``outbox``
    where it has one.

    Its blocks are recomputed once in each of the two backward passes of a zero-bubble step.
    """

    outbox: Outbox | None = None

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Ops that send the outputs of one microbatch, which are left to do."""
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        if self.outbox is None:
            return ops
        self.outbox.send_output(fwd_chunk_id, ops)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Ops that send the gradients of the inputs of one microbatch, which are left to do."""
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        if self.outbox is None:
            return ops
        self.outbox.send_gradient(ops)
        return []

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        for received in self.args_recv_info.values():
            _release(received)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        for received in self.grad_recv_info.values():
            _release(received)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Ops that receive the inputs of one microbatch."""
        self._make_room(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Ops that receive the gradients of the outputs of one microbatch."""
        self._make_room(self.grad_recv_info.get(bwd_chunk_id, ()))
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Forward pass of one microbatch."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _release(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Backward pass of one microbatch, or the part of it that finds the gradients of the inputs."""
        if self.outbox is not None:
            self.outbox.has_come_back(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        forget_recomputed()
        _release(self.grad_recv_info.get(bwd_chunk_id, ()))

    def _make_room(self, received: Iterable[_RecvInfo]) -> None:
        for info in received:
            if not info.is_root_arg and info.buffer is None and info.tensor_meta is not None:
                info.buffer = _make_tensor_from_meta(info.tensor_meta, self.device)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Gradients of the weights of one microbatch."""
        with weight_pass():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


def _release(received: Iterable[_RecvInfo]) -> None:
    for info in received:
        info.buffer = None


class Pipeline:
    """Runs all microbatches of a step through the stages of this rank and its neighbours."""

    def __init__(
        self, model: Stages, job: Job, layout: Layout, mesh: DeviceMesh, device: torch.device
    ) -> None:
        spec, last = model.spec, layout.pp * layout.chunks - 1
        shape, dtype = border(layout, job, spec)
        numbers = [number for number, _ in stage_parts(layout, spec, mesh.get_local_rank())]
        tokens = torch.empty(layout.micro_batch, job.seq // layout.cp, dtype=torch.int64, device="meta")
        between = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        loss = torch.empty(1, dtype=wide(dtype), device="meta", requires_grad=True)
        self.parts = [
            Stage(
                stage,
                number,
                last + 1,
                device,
                input_args=tokens if number == 0 else between,
                output_args=loss if number == last else between,
                group=mesh.get_group(),
            )
            for number, stage in zip(numbers, model.stages, strict=True)
        ]
        kind = get_schedule_class(layout.schedule)
        single = issubclass(kind, PipelineScheduleSingle)
        if not single:
            for part in self.parts:
                part.outbox = Outbox()
        self.has_first, self.has_last = 0 in numbers, last in numbers
        with all_stages_gathered(len(self.parts)):
            self.schedule = kind(
                self.parts[0] if single else self.parts,
                layout.microbatches,
                loss_fn=lambda loss, _: loss,  # the last stage ends with the loss
                scale_grads=False,
            )

    def trust_shapes(self) -> None:
        """Do not ask other ranks whether they know their shapes: a dry run has none."""

        def trust(stages: Iterable[Stage], *_: bool) -> None:
            for stage in stages:
                stage._inference_mode = InferenceMode.STATIC

        self.schedule._warmup_p2p = trust

    def backward(self, microbatches: Sequence[Microbatch], global_tokens: float) -> Tensor:
        """Leave the step's gradients on the parameters; this rank's sum of the loss, 0 without the last
        stage. fp64."""
        losses = self._run(self.schedule.step, microbatches, global_tokens)
        return self._total([loss.detach() for loss in losses])

    def loss(self, microbatches: Sequence[Microbatch], global_tokens: float) -> Tensor:
        """The same without gradients."""
        return self._total(self._run(self.schedule.eval, microbatches, global_tokens))

    def _run(
        self, run: Callable[..., None], microbatches: Sequence[Microbatch], global_tokens: float
    ) -> list[Tensor]:
        losses: list[Tensor] = []
        tokens, targets, documents = (
            None if parts[0] is None else torch.cat(parts) for parts in zip(*microbatches, strict=True)
        )
        run(
            *((tokens,) if self.has_first else ()),
            target=targets if self.has_last else None,
            losses=losses if self.has_last else None,
            return_outputs=False,
            target_BS=targets,
            document_BS=documents,
            global_tokens=global_tokens,
        )
        for part in self.parts:
            if part.outbox is not None:
                part.outbox.empty()
        return losses

    def _total(self, losses: list[Tensor]) -> Tensor:
        if not losses:
            return torch.zeros((), dtype=torch.float64, device=self.parts[0].device)
        return torch.stack([loss.double() for loss in losses]).sum()


def sum_tied(model: Stages, mesh: DeviceMesh) -> None:
    """Add up the gradients of a tied matrix that the first and the last stage have a copy of each.

    Their ranks trade gradients, and both compute the same sum.
    """
    first, last = (None if copy is None else local(copy.grad) for copy in tied_copies(model))
    if first is not None and last is not None:
        first += last
        last.copy_(first)
        return
    own = last if first is None else first
    if own is None:
        return
    other = torch.empty_like(own)
    peer = mesh.size() - 1 if mesh.get_local_rank() == 0 else 0
    trade = [
        dist.P2POp(kind, tensor, group=mesh.get_group(), group_peer=peer)
        for kind, tensor in ((dist.isend, own), (dist.irecv, other))
    ]
    for work in dist.batch_isend_irecv(trade):
        work.wait()
    own += other


def tied_copies(model: Stages) -> tuple[Tensor | None, Tensor | None]:
    """The embedding's and the head's copy of the tied matrix that this rank has, where stages have one each.

    Both start equal and get equal gradients; the norm counts the embedding's alone.
    """
    found: tuple[Tensor | None, Tensor | None] = (None, None)
    if model.spec.tied_embeddings:
        for stage in model.stages:
            if stage.part.first and not stage.part.last:
                found = (stage.decoder.embed_tokens.weight, found[1])
            elif stage.part.last and not stage.part.first:
                found = (found[0], stage.lm_head.weight)
    return found
