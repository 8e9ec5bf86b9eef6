"""Setting: what a configuration of any framework says of a run, under one set of names. None is "not
said"."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from shardwright.cluster import Cluster, cluster_of
from shardwright.description import nearest
from shardwright.doctor.finding import Source
from shardwright.errors import EvidenceError, ShardwrightError
from shardwright.model import ModelSpec
from shardwright.planfile import Plan


@dataclass(frozen=True)
class Setting:
    """Degrees, batch, memory choices and sizes of one run.

    ``dp`` are all ranks with different sequences, where it is not said how they are split. ``sharding``: over
    how many ranks state is split, -1 for "all that are left". ``shard_parameters`` is False for optimizer
    state alone. ``microbatches`` of one rank and step.
    """

    source: Source
    framework: str
    model: ModelSpec | None = None
    model_name: str = ""
    device: str = ""
    world: int | None = None
    gpus_per_node: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    zero_stage: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    microbatches: int | None = None
    seq: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    recompute: str | None = None
    sp: bool | None = None
    loss_fused: bool | None = None
    flash: bool | None = None
    offload_optimizer: bool | None = None
    offload_parameters: bool | None = None
    leaf_modules: bool | None = None
    units: str | None = None  # root, blocks, experts: what is wrapped by FSDP
    master_bytes: int | None = None  # of a parameter that the optimizer updates
    order: tuple[str, ...] = ()  # of the mesh, outermost first
    layers: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    vocab: int | None = None
    experts: int | None = None
    parameters: float | None = None
    stage_layers: tuple[int, ...] = ()
    layout_text: str = ""
    checkpoint_every: float | None = None  # s
    mtbf: float | None = None  # s, of the job
    save_time: float | None = None  # s
    plan: Plan | None = None
    other: Mapping[str, Any] = field(default_factory=dict)

    def filled(self, rest: "Setting") -> "Setting":
        """This one, with what it does not say from ``rest``."""
        missing = {
            f.name: getattr(rest, f.name)
            for f in fields(self)
            if f.name not in ("source", "framework")
            and getattr(self, f.name) in (None, "", ())
            and f.name != "other"
        }
        return replace(self, **missing, other={**rest.other, **self.other})

    @property
    def data_ranks(self) -> int | None:
        """Ranks with different sequences: as said, or what the world leaves."""
        if self.dp is not None:
            return self.dp
        if self.dp_replicate is not None and self.dp_shard is not None and self.dp_shard > 0:
            return self.dp_replicate * self.dp_shard
        if self.dp_shard is not None and self.dp_shard > 0 and self.dp_replicate is None:
            return self.dp_shard
        if self.world is None:
            return None
        rest = (self.tp or 1) * (self.pp or 1) * (self.cp or 1)
        return self.world // rest if self.world % rest == 0 else None

    @property
    def sharding(self) -> int | None:
        """Ranks over which state is split: dp_shard with cp, or all data ranks under ZeRO."""
        if self.dp_shard is not None and self.dp_shard > 0:
            return self.dp_shard * (self.cp or 1)
        if self.dp_shard == -1 and self.world is not None:
            rest = (self.tp or 1) * (self.pp or 1) * (self.dp_replicate or 1)
            return max(self.world // rest, 1)
        if self.zero_stage:
            data = self.data_ranks
            return None if data is None else data * (self.cp or 1)
        return 1 if self.zero_stage == 0 else None

    @property
    def tokens(self) -> int | None:
        """Tokens of a microbatch on one rank."""
        if self.seq is None or self.micro_batch is None:
            return None
        return self.seq * self.micro_batch // (self.cp or 1)

    @property
    def count(self) -> float | None:
        """Parameters of the model."""
        if self.parameters is not None:
            return self.parameters
        if self.model is None:
            return None
        from shardwright.plan.params import parameter_table

        return float(parameter_table(self.model).parameters)

    def cluster(self) -> Cluster | None:
        """The devices, where kind and number are known."""
        if self.plan is not None:
            return self.plan.cluster
        if not self.device or not self.world:
            return None
        try:
            return cluster_of(self.device, self.world, self.gpus_per_node)
        except ShardwrightError:
            return None


def setting_of_plan(source: Source, plan: Plan) -> Setting:
    """A plan of ours as a setting."""
    layout, job, cluster = plan.layout, plan.job, plan.cluster
    return Setting(
        source=source,
        framework="shardwright",
        model=plan.model,
        model_name=plan.model.name,
        device=cluster.device.name,
        world=layout.ranks,
        gpus_per_node=cluster.gpus_per_node,
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        ep=layout.ep,
        dp=layout.dp,
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        zero_stage=layout.zero_stage,
        micro_batch=layout.micro_batch,
        global_batch=job.global_batch,
        microbatches=layout.microbatches,
        seq=job.seq,
        schedule=None if layout.schedule == "none" else layout.schedule,
        chunks=layout.chunks,
        recompute=layout.recompute,
        sp=layout.sp,
        flash=True,
        loss_fused=True,  # decision 4: the logits are made once
        units="blocks",
        order=layout.order,
        stage_layers=layout.stage_layers,
        plan=plan,
    )


NUMBERS = (
    *("world", "gpus_per_node", "tp", "pp", "cp", "ep", "dp", "dp_replicate", "dp_shard", "zero_stage"),
    *("micro_batch", "global_batch", "microbatches", "seq", "chunks", "layers", "hidden", "ffn", "heads"),
    *("kv_heads", "vocab", "experts", "parameters", "checkpoint_every", "mtbf", "save_time", "master_bytes"),
)
WORDS = ("schedule", "recompute", "units", "device")
SWITCHES = ("sp", "loss_fused", "flash", "offload_optimizer", "offload_parameters", "leaf_modules")
ALSO = {"gpus": "world", "ranks": "world", "world_size": "world", "batch": "micro_batch", "m": "microbatches"}


def parse_given(text: str) -> Setting:
    """What a person says of the run: ``gpus=64 tp=8 seq=4096 micro_batch=1 sp=yes``.

    Raises: EvidenceError: an unknown name, with the nearest, or a value that is no number.
    """
    values: dict[str, Any] = {}
    for part in text.replace(",", " ").split():
        name, equals, value = part.partition("=")
        name = ALSO.get(name.replace("-", "_"), name.replace("-", "_"))
        if not equals or name not in (*NUMBERS, *WORDS, *SWITCHES):
            raise EvidenceError(
                f"--given {part!r} names nothing that is known: "
                f"{nearest(name, [*NUMBERS, *WORDS, *SWITCHES])}"
            )
        if name in WORDS:
            values[name] = value
        elif name in SWITCHES:
            values[name] = value.lower() in ("yes", "true", "1", "on")
        else:
            try:
                number = float(value)
            except ValueError:
                raise EvidenceError(f"--given {part!r}: {value!r} is no number") from None
            values[name] = int(number) if number.is_integer() else number
    return Setting(Source("--given", None, text), "given", **values)
