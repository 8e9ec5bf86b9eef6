"""`shardwright map`: measure the cluster's links or this device, read what others measured, and show it."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shardwright import cli_options as opt
from shardwright.cli_print import need_torch, print_report, say
from shardwright.cluster import Cluster, device
from shardwright.derive.spec import model_of
from shardwright.errors import AnswerIsNo, ClusterError
from shardwright.units import BYTES, parse_quantity

Found = tuple[Cluster, list[dict[str, Any]], list[dict[str, Any]]]
"""A cluster, findings about it, and what was refused: ``{"file", "reason"}``."""

MEASURE = "measure"


class MapGroup(TyperGroup):
    """`map ...` is `map measure ...` unless another command follows."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command's name in front where it is left out."""
        first = args[0] if args else ""
        return super().parse_args(ctx, args if first in self.commands else [MEASURE, *args])


map_app = typer.Typer(cls=MapGroup, help="Measure the cluster's bandwidth map, or read and show one.")

Files = Annotated[list[str] | None, typer.Argument(help="With --from: topologies, tables, XML, maps.")]
From = Annotated[
    bool,
    typer.Option("--from", help="Read FILES: nvidia-smi topo -m, nccl-tests tables, NCCL topology XML."),
]
OnlyDevice = Annotated[
    bool, typer.Option("--device", help="Measure this device: products, attention, memory, optimizer.")
]
Kind = Annotated[str | None, typer.Option(help="Kind of device, see 'presets'.  [what is found]")]
Nodes = Annotated[int | None, typer.Option(help="With --from: nodes like the one that is read.", min=1)]
Nproc = Annotated[int | None, typer.Option(help="Ranks to start here.  [torchrun's, or 2]", min=2)]
Minutes = Annotated[float, typer.Option(help="Time to measure in; what matters most comes first.", min=0.05)]
MaxSize = Annotated[str | None, typer.Option(help="Largest message, 64MiB for example.  [as fits]")]
Model = Annotated[str, typer.Option(help="With --device: the model whose shapes are measured.")]
Seq = Annotated[int, typer.Option(help="With --device: tokens of a sequence.", min=1)]
Base = Annotated[Path | None, typer.Option("--cluster", help="A cluster.toml whose other numbers are kept.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the cluster to this file.")]
Picture = Annotated[Path | None, typer.Option(help="Write the heat map to this file, .svg or .html.")]
MapFile = Annotated[Path, typer.Argument(help="A cluster.toml that 'map' wrote.")]


@map_app.command(MEASURE, hidden=True)
def measure(
    files: Files = None,
    from_files: From = False,
    only_device: OnlyDevice = False,
    kind: Kind = None,
    nodes: Nodes = None,
    nproc: Nproc = None,
    minutes: Minutes = 2.0,
    max_size: MaxSize = None,
    model: Model = "llama-3.1-8b",
    seq: Seq = 4096,
    base: Base = None,
    output: Output = None,
    picture: Picture = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Measure links between ranks, of torchrun or --nproc; --device: this device; --from: read files.

    Exit status 1 if something is at fault.  'shardwright map show FILE' shows a map again.
    """
    _check_picture(picture)
    known = None if base is None else Cluster.from_file(base)
    if from_files:
        found = _read(files or [], kind, nodes, known)
    elif files:
        raise ClusterError(f"map does not know what to do with {files[0]!r}: read files with --from")
    elif only_device:
        need_torch("map --device")
        from shardwright.measure.device_map import measure_device

        found = _judged(measure_device(model_of(model), seq, known, say))
    else:
        need_torch("map")
        from shardwright.measure.links import measure_links

        cluster = measure_links(nproc, 60 * minutes, _bytes(max_size), known, output, say)
        if cluster is None:  # a rank of torchrun that is not the first
            return
        found = _judged(cluster)
    _print(found, output, picture, as_json)


@map_app.command()
def show(file: MapFile, picture: Picture = None, as_json: opt.JsonOption = False) -> None:
    """Show a map: pairs, links by class, tp groups, NICs, slow pairs, measured against expected."""
    _check_picture(picture)
    _print(_judged(Cluster.from_file(file)), None, picture, as_json)


def _read(files: list[str], kind: str | None, nodes: int | None, known: Cluster | None) -> Found:
    """Files as a cluster, with what the doctor says of them."""
    from shardwright.doctor.diagnose import diagnose
    from shardwright.measure.files import read_cluster

    cluster, refused = read_cluster(files, None if kind is None else device(kind, fitted=True), nodes, known)
    said = diagnose(files, given=f"device={kind}" if kind else "")["findings"] if files else []
    return cluster, said, refused


def _judged(cluster: Cluster) -> Found:
    from shardwright.doctor.links import cluster_findings

    return cluster, [finding.document() for finding in cluster_findings(cluster)], []


def _print(found: Found, output: Path | None, picture: Path | None, as_json: bool) -> None:
    from shardwright.measure.document import map_document
    from shardwright.report.map import map_report

    document = map_document(*found)
    if output is not None:
        output.write_text(found[0].to_toml(), encoding="utf-8")
        say(f"wrote {output}")
    if picture is not None:
        from shardwright.report.map_picture import write_map_picture

        write_map_picture(document, picture)
        say(f"wrote {picture}")
    print_report(document, as_json, map_report)
    if document["fault"]:
        raise AnswerIsNo("the links are not as they should be: see the findings")


def _check_picture(path: Path | None) -> None:
    """Before anything is measured: a picture that cannot be written should not cost a map."""
    from shardwright.report.map_picture import SUFFIXES

    if path is not None and path.suffix not in SUFFIXES:
        raise ClusterError(f"--picture {path} is no picture that map draws: name it .svg or .html")
    if path is not None and not path.absolute().parent.is_dir():
        raise ClusterError(f"--picture {path} is in a folder that does not exist: make it first")


def _bytes(text: str | None) -> int | None:
    return None if text is None else round(parse_quantity(text, BYTES))
