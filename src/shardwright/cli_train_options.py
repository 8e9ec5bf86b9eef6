"""Options of ``train``: how a run is kept, watched and recorded."""

from enum import StrEnum
from typing import Annotated, NamedTuple

import typer

from shardwright.run.options import COLLECTIVE_TIMEOUT_S, RunOptions


class OnNanName(StrEnum):
    """Choices of --on-nan."""

    stop = "stop"
    skip = "skip"


class OnSpikeName(StrEnum):
    """Choices of --on-spike."""

    ignore = "ignore"
    stop = "stop"
    skip = "skip"


Compile = Annotated[
    bool,
    typer.Option("--compile", help="Compile every block with torch.compile; the first step takes longer."),
]
Tensorboard = Annotated[bool, typer.Option(help="Write TensorBoard events into the run folder.")]
CheckpointEvery = Annotated[
    int,
    typer.Option(
        help="Steps between checkpoints, with one more at the end and on Ctrl-C; 0 writes none.", min=0
    ),
]
Keep = Annotated[int, typer.Option(help="Newest checkpoints that are kept.", min=1)]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on from the newest checkpoint of --run-dir; the layout may be another."
    ),
]
OnNan = Annotated[
    OnNanName, typer.Option(help="At a loss or gradient that is no number: stop, or leave its update out.")
]
OnSpike = Annotated[
    OnSpikeName,
    typer.Option(help="At a loss far above those before: go on, stop, or leave its update out."),
]
Profile = Annotated[
    str | None,
    typer.Option(help="Trace steps A to B of every rank into the run folder.", metavar="A..B"),
]
Timeout = Annotated[
    float, typer.Option(help="Seconds that a collective may wait before the run counts as hung.", min=1)
]


class TrainOptions(NamedTuple):
    """Options of a run besides its plan and data."""

    compile_blocks: Compile = False
    tensorboard: Tensorboard = False
    checkpoint_every: CheckpointEvery = 0
    keep: Keep = 2
    resume: Resume = False
    on_nan: OnNan = OnNanName.stop
    on_spike: OnSpike = OnSpikeName.ignore
    profile: Profile = None
    timeout: Timeout = COLLECTIVE_TIMEOUT_S

    def run_options(self) -> RunOptions:
        """What the runtime takes; ``profile`` is read where the steps of the run are known."""
        return RunOptions(
            tensorboard=self.tensorboard,
            checkpoint_every=self.checkpoint_every,
            keep=self.keep,
            resume=self.resume,
            on_nan=self.on_nan.value,
            on_spike=self.on_spike.value,
            timeout=self.timeout,
        )
