"""Every rule that a layout breaks: its own, the cluster's, the job's, the model's and its schedule's."""

from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.cluster import Cluster
from shardwright.errors import LayoutError
from shardwright.job import Job
from shardwright.layout import Fault, Layout, empty_stage_fault, faults, model_faults
from shardwright.model import ModelSpec
from shardwright.plan.memory import host_bytes
from shardwright.plan.schedule import why_not
from shardwright.plan.table import table_of
from shardwright.units import format_bytes

BATCH_CODES = ("fewer_samples_than_ranks", "global_batch")
"""Of the rules that another global batch would keep."""


def broken_rules(values: Mapping[str, Any], model: ModelSpec, job: Job, cluster: Cluster) -> Iterator[Fault]:
    """Rules that the layout of these fields breaks; ``values`` are all fields of a Layout, not checked."""
    found = list(_broken(values, model, job, cluster))
    yield from found or _host_fault(Layout(**values), model, job, cluster)


def _broken(values: Mapping[str, Any], model: ModelSpec, job: Job, cluster: Cluster) -> Iterator[Fault]:
    layout = Layout.model_construct(**values)  # not checked: rules are listed, not raised
    stages = layout.pp * layout.chunks
    enough = stages <= model.layers + 2 and min(layout.stage_layers[1:-1], default=1) > 0  # ends may be empty
    if not enough:
        yield Fault(
            "stages",
            f"pp={layout.pp} x chunks={layout.chunks} = {stages} stages, model {model.name} has "
            f"layers={model.layers}: give each stage a layer",
        )
    else:
        try:
            Layout.checked(values)
        except LayoutError as contradiction:
            yield Fault("layout", str(contradiction).removeprefix("layout: "))
    yield from faults(layout, job, cluster)
    yield from (fault for fault in model_faults(layout, model, job) if enough or fault.code != "stage_layers")
    if enough and (fault := empty_stage_fault(layout.stage_layers, layout.schedule, layout.chunks)):
        yield Fault("stages", fault)
    if layout.pp > 1 and layout.schedule != "none":
        fault = why_not(layout.schedule, layout.pp, layout.chunks, layout.microbatches)
        if fault:
            yield Fault("schedule", fault)


def _host_fault(layout: Layout, model: ModelSpec, job: Job, cluster: Cluster) -> Iterator[Fault]:
    """That more is offloaded than the host has room for."""
    if layout.offload == "none":
        return
    needs, room = (
        float(host_bytes(model, job, cluster.device, table_of([layout], model.layers))[0]),
        cluster.device.host_memory,
    )
    if needs > room:
        yield Fault(
            "host_memory",
            f"offload={layout.offload!r} keeps {format_bytes(needs)} on the host, a device's share of its "
            f"memory is {format_bytes(room)}: recompute more, or offload less",
        )
