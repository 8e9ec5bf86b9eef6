"""Checkpoints: what messages say of a load that fails, shards on disk, resumed losses, and how often to
save."""

import re
from collections.abc import Iterator

from shardwright.doctor.evidence import Evidence, Failure, Message, Stack
from shardwright.doctor.finding import Finding, Source
from shardwright.doctor.moments import moment_findings
from shardwright.doctor.series import is_resumed, series_of
from shardwright.doctor.setting import Setting
from shardwright.plan.goodput import daly_interval
from shardwright.plan.params import parameter_table
from shardwright.units import format_bytes, format_span

OPTIMIZER_KEY = re.compile(r"optim|exp_avg|param_groups|adam|master|momentum")
LOADS_OPTIMIZER = re.compile(r"load\w*state\w* at \S*optim|load_optim|optimizer\S*load")
PARALLEL_ARGUMENTS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "tp_size", "pp_size")
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "model.", "_checkpoint_wrapped_module.")

_SHARD = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)|(?:^|/)__(\d+)_\d+\.distcp$")

TOO_FAR = 2.0
"""Ratio of an interval to the best one from which it costs noticeably more: goodput is flat around the
best."""

LEAST_SHARD = 4096
"""Elements from which two sizes of flat tensors that divide each other are shards, not shapes."""

HOST_BYTES = 12
"""Of a parameter gathered with Adam's state in fp32: 4 + 4 + 4."""


def checkpoint_findings(evidence: Evidence) -> list[Finding]:
    """What is wrong with checkpoints."""
    found = list(_messages(evidence))
    found += _listing(evidence)
    found += _gathering(evidence)
    found += moment_findings(evidence)
    found += _resumed(evidence)
    for setting in evidence.stated:
        found += interval_findings(setting)
    kept: dict[tuple[str, str], Finding] = {}
    for finding in found:
        kept.setdefault((finding.cause, finding.summary), finding)
    return list(kept.values())


def _messages(evidence: Evidence) -> Iterator[Finding]:
    shapes: list[Message] = []
    for message in evidence.of(Message):
        numbers, ranks = dict(message.numbers), () if message.rank is None else (message.rank,)
        if message.what == "dp_world":
            x, y = int(numbers["saved"]), int(numbers["current"])
            text = f"the checkpoint was written by {x} data-parallel ranks and is read by {y}"
            way = f"resume with {x} data-parallel ranks, or convert the checkpoint"
            yield Finding(
                "world_size_changed", "certain", text, (), (message.source,), (way,), numbers=numbers
            )
        elif message.what == "saved_argument" and numbers["name"] in PARALLEL_ARGUMENTS:
            text = f"{numbers['name']} was {numbers['saved']} in the checkpoint and is {numbers['current']}"
            yield Finding("layout_changed", "certain", text, (), (message.source,), numbers=numbers)
        elif message.what == "shard_count":
            text = f"{numbers['found']} shards are there, {numbers['expected']} are needed"
            yield Finding("shards_missing", "certain", text, (), (message.source,), numbers=numbers)
        elif message.what == "missing_file":
            yield Finding(
                "shards_missing",
                "certain",
                f"{str(numbers['name']).strip(chr(39))} is not there",
                ranks,
                (message.source,),
            )
        elif message.what in ("missing_key", "unexpected_key", "key_error"):
            yield from _key(message)
        elif message.what == "shape":
            shapes.append(message)
        else:
            yield from _of_file(message)
    if shapes:
        yield _shapes(evidence, shapes)


def _of_file(message: Message) -> Iterator[Finding]:
    """Files that are damaged, empty, or of a form that is tied to a layout or a version."""
    ranks = () if message.rank is None else (message.rank,)
    source, line = (message.source,), message.source.text.strip()[:200]
    if message.what == "damaged":
        yield Finding("file_damaged", "likely", line, ranks, source)
    elif message.what == "optimizer_empty":
        empty = "is empty" in message.source.text
        text = "the state dict of the optimizer is empty" if empty else "the optimizer could not be loaded"
        yield Finding("optimizer_state_missing", "certain", text, ranks, source)
    elif message.what == "form_refused":
        text = (
            "the optimizer's state is written as flattened ranges (fully_sharded_model_space), which "
            "megatron-core refuses from 0.14 on, for saving and for loading"
        )
        yield Finding("format_refused", "certain", text, ranks, source)
    elif message.what == "not_loaded":
        yield from _not_loaded(message)
    elif message.what == "groups":
        text = (
            "the optimizer's parameter groups have other sizes in the checkpoint: it is of another layout, "
            "or other parameters were trained"
        )
        yield Finding("layout_changed", "likely", text, ranks, source)
    elif message.what == "tensor_sizes":
        yield from _other_shards(message)
    elif message.what == "flattened_range":
        text = (
            "the optimizer's tensors are flattened ranges, a form that only the layout that wrote it can read"
        )
        way = (
            "save in Megatron's fully reshardable format (--dist-ckpt-optim-fully-reshardable), and "
            "check the norm of "
            "exp_avg after loading"
        )
        yield Finding("layout_changed", "likely", text, ranks, source, (way,))
    elif message.what == "format":
        yield from _format(message)
    elif message.what == "version":
        yield Finding("version_refused", "certain", line, ranks, source)


def _not_loaded(message: Message) -> Iterator[Finding]:
    """Keys that a checkpoint has and a load leaves there."""
    names = re.findall(r"[\w.]+", str(message.numbers["name"]))
    own = [name for name in names if OPTIMIZER_KEY.search(name.lower())]
    if own:
        text = f"{len(own)} entries of the optimizer's state are in the checkpoint and not loaded: {own[0]}"
        yield Finding(
            "optimizer_state_missing", "certain", text, (), (message.source,), numbers={"entries": len(own)}
        )
    elif names:
        text = f"{len(names)} keys of the checkpoint are not loaded: {names[0]}"
        yield Finding("keys_differ", "certain", text, (), (message.source,), numbers={"key": names[0]})


def _other_shards(message: Message) -> Iterator[Finding]:
    """An optimizer whose flat shards are some times as long as those of the parameters."""
    one, other = int(message.numbers["one"]), int(message.numbers["other"])
    large, small = max(one, other), max(min(one, other), 1)
    ratio = round(large / small)
    stepping = re.search(r"optim|adam|exp_avg", " ".join(message.frames), re.IGNORECASE)
    if (
        stepping
        and small >= LEAST_SHARD
        and ratio > 1
        and -(-large // ratio) in (small, small - 1, small + 1)
    ):
        yield Finding(
            "world_size_changed",
            "likely",
            f"the optimizer's state has shards of {one:,} and {other:,} elements, {ratio} times: it was "
            f"saved by {ratio} times as many or as few ranks",
            (),
            (message.source,),
            numbers={"ratio": ratio},
        )


def _format(message: Message) -> Iterator[Finding]:
    text = message.source.text
    if not re.search(r"error|cannot|not supported|fail|mismatch|only", text, re.IGNORECASE):
        return
    yield Finding(
        "layout_changed",
        "likely",
        "of Megatron's optimizer formats only fully_reshardable survives another layout; dp_reshardable "
        "(dp_zero_gather_scatter) survives another number of data-parallel ranks",
        (),
        (message.source,),
    )


def _key(message: Message) -> Iterator[Finding]:
    name = str(message.numbers["name"])
    source = (message.source,)
    loading = any(LOADS_OPTIMIZER.search(frame) for frame in message.frames)
    if message.what == "key_error" and loading and not OPTIMIZER_KEY.search(name.lower()):
        text = f"the optimizer's load finds no {name!r} in the checkpoint, at {message.frames[0]}"
        yield Finding("optimizer_state_missing", "likely", text, (), source, numbers={"key": name})
    elif OPTIMIZER_KEY.search(name.lower()):
        text = f"{name!r} is not in the checkpoint: it has no optimizer state for it, or in another layout"
        yield Finding("optimizer_state_missing", "likely", text, (), source, numbers={"key": name})
    elif message.what != "key_error":
        wrapper = next((prefix for prefix in WRAPPERS if prefix in name), None)
        hint = f"; {wrapper!r} is a wrapper's prefix" if wrapper and wrapper != "model." else ""
        what = "is missing from" if message.what == "missing_key" else "is in"
        text = (
            f"{name!r} {what} the "
            f"checkpoint{'' if message.what == 'missing_key' else ' and not in the model'}{hint}"
        )
        yield Finding("keys_differ", "certain", text, (), source, numbers={"key": name})


def _shapes(evidence: Evidence, messages: list[Message]) -> Finding:
    first = messages[0]
    saved, current = str(first.numbers["saved"]), str(first.numbers["current"])
    a = [int(n) for n in re.findall(r"\d+", saved)]
    b = [int(n) for n in re.findall(r"\d+", current)]
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if x != y]
    hint, cause = "", "shapes_differ"
    width = next((m for m in messages if "norm" in str(m.numbers["name"])), None)
    if width is not None:  # tensor parallelism cuts no norm
        hint = (
            f": norms differ too ({width.numbers['saved']} and {width.numbers['current']}), so the model does"
        )
    elif len(a) == len(b) and len(pairs) == 1 and min(pairs[0]) > 0:
        x, y = pairs[0]
        if max(x, y) % min(x, y) == 0:
            ratio = max(x, y) // min(x, y)
            hint, cause = (
                f": {ratio} times in one dimension, as with another tensor-parallel degree",
                "layout_changed",
            )
        elif re.search(r"embed|lm_head|output|wte|word", str(first.numbers["name"])):
            hint = f": {abs(x - y):,} rows of the vocabulary more or less"
    return Finding(
        cause,
        "certain" if cause == "shapes_differ" else "likely",
        f"{first.numbers['name']} is [{saved}] in the checkpoint and [{current}] in the model{hint}"
        + (f"; {len(messages)} tensors differ" if len(messages) > 1 else ""),
        (),
        tuple(message.source for message in messages),
        numbers={"tensors": len(messages)},
    )


def _listing(evidence: Evidence) -> Iterator[Finding]:
    """Shards in a folder whose numbers have gaps."""
    shards: dict[tuple[str, str], set[int]] = {}
    for name in evidence.listing:
        found = _SHARD.search(name)
        if found is not None:
            folder = name.rpartition("/")[0]
            key = folder, found[2] or ""
            shards.setdefault(key, set()).add(int(found[1] or found[3] or 0))
    for (folder, _), numbers in shards.items():
        missing = sorted(set(range(max(numbers) + 1)) - numbers)
        worlds = evidence.worlds
        expected = max(worlds) if worlds else None
        if missing:
            text = f"{folder}: shards of ranks {missing[:16]} are not there, {len(numbers)} are"
            yield Finding(
                "shards_missing",
                "certain",
                text,
                tuple(missing[:64]),
                (Source(folder, None, f"{len(numbers)} shards"),),
                numbers={"missing": missing[:64], "found": len(numbers)},
            )
        elif expected is not None and len(numbers) < expected:
            text = f"{folder}: {len(numbers)} shards are there, {expected} ranks are configured"
            yield Finding(
                "shards_missing",
                "likely",
                text,
                (),
                (Source(folder, None, f"{len(numbers)} shards"),),
                numbers={"found": len(numbers), "expected": expected},
            )


def _gathering(evidence: Evidence) -> Iterator[Finding]:
    """A whole state dict gathered on one rank, by the frames of a rank that waits or fails."""
    words = re.compile(
        r"full_optim_state_dict|full_state_dict|FULL_STATE_DICT|_full_optim|rank0_only|consolidat"
    )
    seen = [(failure.source, failure.frames) for failure in evidence.of(Failure)]
    seen += [(stack.source, stack.frames) for stack in evidence.of(Stack)]
    for source, frames in seen:
        if not words.search(" ".join([source.text, *frames])):
            continue
        model = evidence.model
        need = ""
        numbers: dict[str, object] = {}
        if model is not None:
            size = HOST_BYTES * parameter_table(model).parameters
            need = f": {format_bytes(size)} of host memory ({HOST_BYTES} B a parameter)"
            numbers["host_bytes"] = size
        yield Finding(
            "save_hangs",
            "likely",
            f"a full state dict is gathered on one rank{need} while the others wait",
            (),
            (source,),
            numbers=numbers,
        )
        return


def _resumed(evidence: Evidence) -> Iterator[Finding]:
    """A run that begins at a later step against one that went through it."""
    runs = [series for series in series_of(evidence) if len(series.values("loss")) > 0]
    if len(runs) != 2 or not is_resumed(*runs):
        return
    one, other = sorted(runs, key=lambda series: min(series.values("loss")))
    a, b = one.values("loss"), other.values("loss")
    common = sorted(set(a) & set(b))
    differing = [step for step in common if a[step] != b[step]]
    sources = (one.source(common[0]), other.source(common[0]))
    if not differing:
        text = (
            f"steps {common[0]} to {common[-1]} have the same losses to the last printed digit in both runs"
        )
        yield Finding("resume_equal", "certain", text, (), sources, numbers={"steps": len(common)})
        return
    first = differing[0]
    what = (
        "from its first step on"
        if first == common[0]
        else f"from step {first} on, {common.index(first)} steps after the start"
    )
    cause = (
        "data position or random state"
        if first == common[0]
        else "the optimizer's state, or the order of sums"
    )
    yield Finding(
        "resume_differs",
        "certain",
        f"the resumed run differs {what}: loss {b[first]:.8g} where the other has {a[first]:.8g}; "
        f"suspect {cause}",
        (),
        (one.source(first), other.source(first)),
        numbers={"step": first, "difference": b[first] - a[first]},
    )


def interval_findings(setting: Setting) -> Iterator[Finding]:
    """The time between checkpoints against the best."""
    every, mtbf, save = setting.checkpoint_every, setting.mtbf, setting.save_time
    if not every or not mtbf:
        return
    save = save or 60.0
    best = float(daly_interval(save, mtbf))
    lost = every / 2 / mtbf + save / every
    least = best / 2 / mtbf + save / best
    numbers = {"interval": every, "best": best, "lost_share": lost, "least_share": least}
    text = (
        f"a checkpoint every {format_span(every)} with a failure every {format_span(mtbf)} and "
        f"{format_span(save)} to save "
        f"loses {lost:.1%} of the time; every {format_span(best)} would lose {least:.1%}"
    )
    if every > TOO_FAR * best:
        yield Finding("interval_too_long", "certain", text, (), (setting.source,), numbers=numbers)
    elif every < best / TOO_FAR:
        yield Finding("interval_too_short", "certain", text, (), (setting.source,), numbers=numbers)
