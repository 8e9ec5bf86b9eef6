"""Options of ``parity``: how two plans are run, and the picture."""

import importlib.util
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shardwright.errors import MissingExtraError, PlanFileError


class PrecisionName(StrEnum):
    """Choices of --precision."""

    fp64 = "fp64"
    fp32 = "fp32"
    bf16 = "bf16"
    job = "job"


class DeviceName(StrEnum):
    """Choices of --device."""

    cpu = "cpu"
    cuda = "cuda"


A = Annotated[Path, typer.Argument(help="A plan.toml, or a folder that holds one.", metavar="A")]
B = Annotated[Path, typer.Argument(help="Another of the same model and job.", metavar="B")]
Steps = Annotated[int, typer.Option(help="Steps of each run. Gradients are those of the first.", min=1)]
Precision = Annotated[
    PrecisionName,
    typer.Option(
        help="Of both runs. fp64 tells a fault (1e-2) from rounding (1e-13); job is the plans' own."
    ),
]
Device = Annotated[DeviceName, typer.Option("--device", help="Of the ranks; cuda needs a GPU for each.")]
MaxRanks = Annotated[int, typer.Option(help="Most processes to start for a plan.", min=1)]
Shrink = Annotated[
    bool,
    typer.Option(
        "--shrink", help="Train a small model of the same kind, short sequences, with the same layouts."
    ),
]
Reference = Annotated[
    bool,
    typer.Option(
        "--reference", help="Compare with one process in plain PyTorch too; without it, only if they differ."
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option("-o", "--picture", help="Write the curves and all gradients as an HTML file."),
]


def check_picture(path: Path | None) -> None:
    """Refuse a picture that could not be written, before anything runs.

    Raises: PlanFileError: another kind of file, or no folder. MissingExtraError: plotly is not installed.
    """
    if path is None:
        return
    if path.suffix.lower() not in (".html", ".htm"):
        raise PlanFileError(f"picture {path} is no HTML file: give a name that ends in .html")
    if not path.parent.is_dir():
        raise PlanFileError(
            f"cannot write {path}: there is no folder {path.parent}: make it, or give another"
        )
    if importlib.util.find_spec("plotly") is None:
        raise MissingExtraError("report", "--picture")
