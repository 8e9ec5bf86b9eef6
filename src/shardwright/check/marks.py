"""Where a step is: labels on a tape, set where the program passes from one piece of work to the next."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.pipelining import schedules

from shardwright.check.order import REDUCE, Action, chunks_of
from shardwright.check.tape import Tape
from shardwright.run.step import Stepper

BATCH, LOSSES, SHARES, LOSS, UPDATE, SETTLED = "batch", "losses", "shares", "loss", "update", "settled"
"""Pieces of a step around its microbatches: taking them, their losses together, sums of gradients, the loss
of all ranks, the norm, the update."""

OF_MICROBATCHES = (BATCH, LOSSES, LOSS)
"""Those that grow with the number of microbatches and not with the layers."""

NAMER = "_get_profiler_function_name"
"""What torch's runtime of several stages a rank calls as it begins an action."""


@contextlib.contextmanager
def marked(tape: Tape, stepper: Stepper) -> Iterator[None]:
    """Have the program say on ``tape`` where it is. Enter before the tape: its first label is BATCH."""
    with contextlib.ExitStack() as undo:

        def before(owner: Any, name: str, label: Callable[..., Any]) -> None:
            original = getattr(owner, name)

            def method(*args: Any, **kwargs: Any) -> Any:
                if (own := label(*args, **kwargs)) != tape.segments[-1].label:
                    tape.begin(own)
                return original(*args, **kwargs)

            setattr(owner, name, method)
            undo.callback(delattr, owner, name)

        def behind(owner: Any, name: str, label: str) -> None:
            original = getattr(owner, name)

            def method(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                tape.begin(label)
                return result

            setattr(owner, name, method)
            undo.callback(delattr, owner, name)

        before(stepper, "sum_over_stages", lambda value: LOSS)
        before(stepper, "norm", lambda: UPDATE)
        if stepper.pipeline is None:
            turn = itertools.count()
            for hook in (
                stepper.model.register_forward_pre_hook(lambda *_: tape.begin(Action("F", 0, next(turn)))),
                stepper.model.register_forward_hook(lambda *_: tape.begin(Action("B", 0, None))),
            ):
                undo.callback(hook.remove)
            behind(stepper, "_one_by_one", SHARES)
        else:
            _mark_pipeline(tape, stepper, before, undo)
            behind(stepper.pipeline.schedule, "step", LOSSES)
            behind(stepper.pipeline, "backward", SHARES)
        yield


def _mark_pipeline(
    tape: Tape, stepper: Stepper, before: Callable[..., None], undo: contextlib.ExitStack
) -> None:
    """Passes of a stage say so themselves; before, schedules that have a name for each action ask for it."""
    layout, pipeline = stepper.layout, stepper.pipeline
    assert pipeline is not None
    rank = stepper.mesh["pp"].get_local_rank()
    chunk_of = chunks_of(layout.schedule, layout.pp, layout.chunks, rank)
    for stage in pipeline.parts:
        chunk = chunk_of[stage.stage_index]
        before(stage, "forward_one_chunk", lambda n, *_, chunk=chunk, **__: Action("F", chunk, n))
        before(
            stage,
            "backward_one_chunk",
            lambda n, *_, chunk=chunk, full_backward=True, **__: Action(
                "B" if full_backward else "I", chunk, n
            ),
        )
        before(stage, "backward_weight_one_chunk", lambda n, *_, chunk=chunk, **__: Action("W", chunk, n))
        before(stage, "perform_reduce_grad", lambda *_, chunk=chunk: Action(REDUCE, chunk, None))
    named = getattr(schedules, NAMER)

    def name(action: Any) -> str:
        own = (action.sub_actions or (action,))[0]
        tape.begin(Action(own.computation_type.value, chunk_of[own.stage_index], own.microbatch_index))
        return str(named(action))

    setattr(schedules, NAMER, name)
    undo.callback(setattr, schedules, NAMER, named)
