"""Findings from messages in which programs name their own trouble with a layout."""

import re
from collections.abc import Iterator
from typing import Any

from shardwright.doctor.batch_checks import UNEVEN, batch_finding
from shardwright.doctor.evidence import Evidence, Message
from shardwright.doctor.finding import Finding
from shardwright.doctor.placement_checks import placement_findings
from shardwright.doctor.setting import Setting


def layout_messages(evidence: Evidence) -> Iterator[Finding]:
    """What messages say of batches, microbatches, heads, worlds and meshes."""
    seen: set[tuple[str, str]] = set()
    for message in evidence.of(Message):
        key = message.what, str(sorted(message.numbers.items(), key=str))
        if key in seen:
            continue
        seen.add(key)
        yield from _of(message, evidence)


def _of(message: Message, evidence: Evidence) -> Iterator[Finding]:
    numbers, source = message.numbers, (message.source,)
    if message.what == "batch":
        setting = Setting(message.source, "message")
        yield batch_finding(
            setting,
            int(numbers["dp"]),
            int(numbers.get("micro_batch", 1)),
            int(numbers["global_batch"]),
            numbers.get("microbatches"),
        )
    elif message.what in ("few_microbatches", "virtual_microbatches"):
        p, m = int(numbers["pp"]), int(numbers["microbatches"])
        if m < p:
            text = (
                f"{m} microbatch{'es' if m != 1 else ''} for {p} stages: the schedule needs at least as many"
            )
            yield Finding("too_few_microbatches", "certain", text, (), source, numbers=_plain(numbers))
    elif message.what == "multiple_microbatches":
        of = f"{numbers.get('pp') or numbers.get('rounds') or 'the number of stages'}"
        text = f"{numbers['microbatches']} microbatches are no multiple of {of}"
        yield Finding("too_few_microbatches", "certain", text, (), source, numbers=_plain(numbers))
    elif message.what == "equal_chunk":
        size, chunk = int(numbers["size"]), int(numbers["chunk"])
        text = f"a batch of {size} cannot be shared out evenly over {chunk} workers"
        way = f"use a batch that is a multiple of {chunk}: {-(-size // chunk) * chunk}"
        yield Finding("batch_arithmetic", "certain", text, (), source, (way,), numbers=_plain(numbers))
    elif message.what == "world":
        text = f"{numbers['text']} does not make up {numbers['world']} ranks"
        yield Finding("world_does_not_factor", "certain", text, (), source, numbers=_plain(numbers))
    elif message.what == "rule":
        yield Finding("bad_layout", "certain", str(numbers["text"]), (), source)
    elif message.what == "layers":
        yield _layers(message)
    elif message.what == "heads":
        yield _heads(message, evidence)
    elif message.what == "mesh":
        yield from placement_findings(setting_of_mesh(message, evidence))
    elif message.what == "duplicate":
        ranks = tuple(sorted((int(numbers["one"]), int(numbers["other"]))))
        text = f"ranks {ranks[0]} and {ranks[1]} are both on device {numbers['name']}"
        yield Finding("one_device_for_two_ranks", "certain", text, ranks, source)
    elif message.what == "unused_parameters":
        yield Finding(
            "skipped_collective",
            "likely",
            "parameters took no part in the backward pass of some ranks, so their gradients are not "
            "reduced there",
            (),
            source,
            ("use every parameter on every rank, or find_unused_parameters=True",),
        )


def _layers(message: Message) -> Finding:
    """Layers that do not come out even over pipeline ranks."""
    layers, pp = message.numbers.get("layers"), message.numbers.get("pp")
    said = f"{layers} layers" if layers is not None else "the layers"
    over = f"{pp} pipeline ranks" if pp is not None else "the pipeline ranks"
    return Finding(
        "unequal_schedule",
        "certain",
        f"{said} cannot be shared out evenly over {over}",
        (),
        (message.source,),
        (UNEVEN,),
        numbers={"layers": layers, "stages": pp},
    )


def _heads(message: Message, evidence: Evidence) -> Finding:
    heads, degree = int(message.numbers["heads"]), int(message.numbers["degree"])
    model = evidence.model
    kv_heads = model.kv_heads if model is not None and model.heads == heads else None
    good = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0 and (kv_heads is None or kv_heads % n == 0 or n % kv_heads == 0)
    ]
    return Finding(
        "heads_do_not_divide",
        "certain",
        f"{heads} heads cannot be shared out over {degree} ranks",
        (),
        (message.source,),
        (f"use a degree in {good}",),
        numbers={"heads": heads, "degree": degree, "degrees": good},
    )


def setting_of_mesh(message: Message, evidence: Evidence) -> Setting:
    """The mesh that torchtitan says it builds."""
    names = tuple(re.findall(r"[\w]+", str(message.numbers["names"])))
    degrees = [int(n) for n in re.findall(r"\d+", str(message.numbers["degrees"]))]
    values: dict[str, Any] = dict(zip(names, degrees, strict=False))
    if "dp_shard_cp" in values:
        values["dp_shard"] = values.pop("dp_shard_cp")
    given = evidence.setting
    world = 1
    for degree in degrees:
        world *= degree
    known = {
        axis: values[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "dp") if axis in values
    }
    order = tuple("dp_shard" if name == "dp_shard_cp" else name for name in names)
    return Setting(
        message.source,
        "torchtitan",
        world=world,
        gpus_per_node=given.gpus_per_node if given else None,
        order=order if set(order) <= {"pp", "dp_replicate", "dp_shard", "cp", "tp", "dp"} else (),
        **known,
    )


def _plain(numbers: Any) -> dict[str, Any]:
    return dict(numbers)
