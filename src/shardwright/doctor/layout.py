"""Layout and launch: what is wrong with a configuration before a step is made, and what messages say of
it."""

from collections.abc import Iterator
from dataclasses import replace

from shardwright.doctor.batch_checks import batch_findings, pipeline_findings
from shardwright.doctor.evidence import CommInit, Evidence, Message
from shardwright.doctor.expert_checks import expert_findings
from shardwright.doctor.finding import Finding
from shardwright.doctor.messages import layout_messages
from shardwright.doctor.placement_checks import placement_by_hosts, placement_findings
from shardwright.doctor.setting import Setting
from shardwright.units import GiB, format_bytes, format_count

LOGIT_BYTES = 10
"""Bytes of a token and a word of the vocabulary where the loss is not fused: 2 in 16 bits, 4 in fp32, 4 of
its gradient. Source: transformers' own loss, which upcasts the
logits to fp32."""

MANY_LOGITS = 2 * GiB
LARGE_VOCABULARY = 1024

NOT_WIDENED = ("1.13",)
"""Versions of accelerate whose widening to fp32 under FSDP 2 does nothing. Source:
huggingface/accelerate#3979, mended by #3985."""

SCORE_BYTES, REST_BYTES = 5, 34
"""Of a block with unfused attention a token keeps 34 h + 5 a s bytes. Source: arXiv:2205.05198, table 2."""


def layout_findings(evidence: Evidence) -> list[Finding]:
    """What is wrong with every configuration that the files hold, and what messages say of one."""
    found = list(layout_messages(evidence))
    for message in evidence.of(Message):
        if message.what == "bad_plan":
            found.append(Finding("bad_layout", "certain", message.source.text, (), (message.source,)))
    for setting in evidence.stated:
        whole = _with_model(evidence, setting)
        found += batch_findings(whole)
        found += pipeline_findings(whole)
        found += placement_findings(whole)
        found += _real_hosts(evidence, whole)
        found += expert_findings(whole)
        found += _heads(whole)
        found += _sharding(whole)
        found += _units(whole)
        found += _loss(whole)
        found += _recompute(whole)
        found += _vocabulary(whole)
        found += _precision(whole)
    found += _counted(evidence)
    found += _not_widened(evidence)
    kept: dict[tuple[str, str], Finding] = {}
    for finding in found:
        kept.setdefault((finding.cause, finding.summary), finding)
    return list(kept.values())


def _real_hosts(evidence: Evidence, setting: Setting) -> Iterator[Finding]:
    """Ranks on hosts as NCCL says when it makes the communicator of all."""
    made = evidence.of(CommInit)
    world = setting.world or max((init.ranks for init in made), default=0)
    whole = [init for init in made if init.ranks == world]
    hosts = {init.rank: init.process.partition(":")[0] for init in whole}
    if len(hosts) == world > 1:
        yield from placement_by_hosts(setting, hosts, whole[0].source)


def _with_model(evidence: Evidence, setting: Setting) -> Setting:
    model = setting.model or evidence.model
    if model is None:
        return setting
    moe = model.moe
    return replace(
        setting,
        model=model,
        layers=setting.layers or model.layers,
        hidden=setting.hidden or model.hidden,
        heads=setting.heads or model.heads,
        kv_heads=setting.kv_heads or model.kv_heads,
        vocab=setting.vocab or model.vocab,
        experts=setting.experts or (moe.experts if moe else None),
    )


def degrees_of_heads(heads: int, kv_heads: int) -> list[int]:
    """Degrees that share out query heads evenly, and key/value heads or their copies."""
    return [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]


def _heads(setting: Setting) -> Iterator[Finding]:
    if setting.heads is None:
        return
    kv_heads = setting.kv_heads or setting.heads
    good = degrees_of_heads(setting.heads, kv_heads)
    if setting.tp and setting.tp not in good:
        yield Finding(
            "heads_do_not_divide",
            "certain",
            f"tp={setting.tp} does not share out {setting.heads} query and {kv_heads} key/value heads evenly",
            (),
            (setting.source,),
            (f"use a degree in {good}",),
            numbers={"heads": setting.heads, "kv_heads": kv_heads, "degree": setting.tp, "degrees": good},
        )


def _sharding(setting: Setting) -> Iterator[Finding]:
    """Sharding is asked for and its degree is one."""
    ranks = setting.world or 0
    replicas = setting.dp_replicate or 1
    others = setting.data_ranks or replicas
    meant = setting.zero_stage is not None and setting.zero_stage >= 1 and setting.framework != "megatron"
    if not meant or setting.sharding != 1 or max(ranks, others, replicas) <= 1:
        return
    if others <= 1 and (setting.cp or 1) <= 1:
        return  # tp and pp take all ranks: nothing is left to shard over
    yield Finding(
        "sharding_degree_one",
        "likely",
        f"sharding degree 1 with {others} data-parallel ranks: each of them holds all parameters, "
        "gradients and "
        "optimizer state",
        (),
        (setting.source,),
        numbers={"sharding": 1, "data_ranks": others},
    )


def _units(setting: Setting) -> Iterator[Finding]:
    """What is gathered at once."""
    if (
        setting.units == "root"
        and setting.zero_stage == 3
        and setting.framework in ("accelerate", "trainer", "given", "live")
    ):
        count = setting.count
        size = (
            f": {format_bytes(2 * count)} of weights in 16 bits, {format_bytes(4 * count)} of "
            "gradients in fp32"
            if count
            else ""
        )
        yield Finding(
            "root_only_unit",
            "likely",
            "no module but the root is wrapped: one unit holds 100 % of the parameters and is "
            f"gathered whole{size}",
            (),
            (setting.source,),
            numbers={"units": 1, "largest_share": 1.0},
        )
    least = setting.other.get("min_num_params")
    if (
        setting.units == "size"
        and isinstance(least, int | float | str)
        and str(least).isdigit()
        and int(least) < 1_000_000
    ):
        yield Finding(
            "sharding_no_help",
            "likely",
            f"modules from {int(least):,} parameters on are wrapped one by one: a gather and its "
            "buffers for every tiny layer",
            (),
            (setting.source,),
        )


def _loss(setting: Setting) -> Iterator[Finding]:
    """Logits made whole."""
    vocab, tokens = setting.vocab, setting.tokens
    if setting.loss_fused is not False or vocab is None or vocab < LARGE_VOCABULARY:
        return
    size = None if tokens is None else tokens * vocab * LOGIT_BYTES / (setting.tp or 1)
    if size is not None and size < MANY_LOGITS:
        return
    words = "" if size is None else f": {tokens:,} tokens x {vocab:,} x (2 + 4 + 4) B = {format_bytes(size)}"
    yield Finding(
        "loss_not_fused",
        "likely",
        f"the loss is not fused and makes the whole logits{words}",
        (),
        (setting.source,),
        numbers={"logit_bytes": None if size is None else round(size), "tokens": tokens, "vocab": vocab},
    )


def _recompute(setting: Setting) -> Iterator[Finding]:
    """Selective recomputation of scores that are not kept."""
    if setting.recompute != "selective" or setting.framework != "megatron" or setting.heads is None:
        return
    if not setting.hidden or not setting.seq:
        return
    ratio = SCORE_BYTES * setting.heads * setting.seq / setting.hidden
    share = ratio / (REST_BYTES + ratio)
    if setting.flash is not False:
        yield Finding(
            "recompute_saves_little",
            "likely" if setting.flash else "cannot_tell",
            f"selective recomputation drops the attention scores ({share:.0%} of a block without a "
            "fused kernel), and "
            "with flash attention these are not kept anyway: expect next to nothing",
            (),
            (setting.source,),
            numbers={"share_without_flash": share},
        )


def _vocabulary(setting: Setting) -> Iterator[Finding]:
    vocab, tp = setting.vocab, setting.tp or 1
    if vocab is None or tp == 1 or vocab % tp == 0:
        return
    unit = 128 * tp if setting.framework == "megatron" else tp
    padded = -(-vocab // unit) * unit
    yield Finding(
        "padded_vocabulary",
        "certain",
        f"a vocabulary of {vocab:,} does not divide by tp={tp}: {padded:,} rows with padding",
        (),
        (setting.source,),
        numbers={"vocab": vocab, "padded": padded, "tp": tp},
    )


def _precision(setting: Setting) -> Iterator[Finding]:
    if setting.master_bytes == 2:
        count = setting.count
        held = f" ({format_bytes(2 * count)} for all {format_count(count)})" if count else ""
        yield Finding(
            "low_precision_master",
            "certain" if setting.framework == "live" else "likely",
            f"the optimizer updates parameters of 2 B{held}: there is no fp32 master copy",
            (),
            (setting.source,),
            numbers={"bytes_per_parameter": 2},
        )


def _not_widened(evidence: Evidence) -> Iterator[Finding]:
    """accelerate's FSDP 2 with mixed precision, of a version that does not make its fp32 copies."""
    versions = [m for m in evidence.of(Message) if m.what == "accelerate"]
    bad = next((m for m in versions if str(m.numbers["version"]) in NOT_WIDENED), None)
    for setting in evidence.stated if bad is not None else ():
        other = setting.other
        mixed = str(other.get("mixed_precision", "")).lower()
        if bad is not None and other.get("fsdp_version") == 2 and mixed in ("bf16", "fp16"):
            yield Finding(
                "low_precision_master",
                "likely",
                f"accelerate {bad.numbers['version']} leaves weights that were loaded in 16 bits as they are "
                f"under FSDP 2 with mixed_precision {mixed}: there is no fp32 master copy",
                (),
                (bad.source, setting.source),
                ("load the model in fp32 (torch_dtype=torch.float32), or use another version of accelerate",),
                numbers={"bytes_per_parameter": 2},
            )


def _counted(evidence: Evidence) -> Iterator[Finding]:
    """A count of parameters that is one shard's."""
    setting = evidence.setting
    model = evidence.model
    count = setting.count if setting is not None else None
    if count is None and model is not None:
        from shardwright.plan.params import parameter_table

        count = float(parameter_table(model).parameters)
    if count is None:
        return
    for message in evidence.of(Message):
        if message.what not in ("parameter_count", "parameter_millions"):
            continue
        said = float(message.numbers["count"]) * (1e6 if message.what == "parameter_millions" else 1)
        ratio = count / said if said else 0.0
        if ratio > 1.5 and abs(ratio - round(ratio)) < 0.02 * ratio:
            degrees = {setting.sharding, setting.world} if setting is not None else set()
            yield Finding(
                "local_parameter_count",
                "certain" if round(ratio) in degrees else "likely",
                f"{said:,.0f} parameters are counted, the model has {count:,.0f}: {ratio:.2f} times as many",
                (),
                (message.source,),
                (f"multiply by {round(ratio)} what was computed from it, such as MFU",),
                numbers={"counted": said, "parameters": count, "ratio": ratio},
            )
