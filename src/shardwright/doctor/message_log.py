"""Messages in which programs name their own trouble with a layout, a launch or a checkpoint."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from shardwright.doctor.evidence import Message
from shardwright.doctor.lines import Line, Reader

MOST_PREVIOUS = 12


class Pattern(NamedTuple):
    """One message: its key, and named groups that are kept, numbers as numbers."""

    what: str
    regex: re.Pattern[str]


def _pattern(what: str, regex: str) -> Pattern:
    return Pattern(what, re.compile(regex))


_SIZE = r"(?:torch\.Size\()?\[(?P<{}>[\d, ]*)\]\)?"

_LAYERS = _pattern(
    "layers",
    r"(?:num_layers|[Nn]umber of layers)(?: ?[=(] ?(?P<layers>\d+)\)?)? (?:should|must) be divisible by "
    r"(?:the )?(?:config\.)?(?:transformer[_-])?pipeline[-_]model[-_]parallel[-_ ]?size"
    r"(?: ?[=(] ?(?P<pp>\d+))?",
)

PATTERNS: list[tuple[bytes, Pattern]] = [
    # launch
    (
        b"is not divisible by micro",
        _pattern(
            "batch",
            r"global batch size \((?P<global_batch>\d+)\) is not divisible by micro batch size "
            r"\((?P<micro_batch>\d+)\) times data parallel size \((?P<dp>\d+)\)",
        ),
    ),
    (
        b"train_batch_size is not equal",
        _pattern(
            "batch",
            r"train_batch_size is not equal to micro_batch_per_gpu \* gradient_acc_step \* "
            r"world_size\s+(?P<global_batch>\d+) != (?P<micro_batch>\d+) \* (?P<microbatches>\d+) \* "
            r"(?P<dp>\d+)",
        ),
    ),
    (
        b"global batch size",
        _pattern(
            "batch",
            r"global batch size (?:of )?\(?(?P<global_batch>\d+)\)? (?:is not|must be) divisible by "
            r"\(?(?:the )?(?:data[- ]parallel (?:size|degree)|world[ _]size)?\)?\s*\(?(?P<dp>\d+)\)?",
        ),
    ),
    (
        b"contiguous micro-batches",
        _pattern(
            "virtual_microbatches",
            r"number of contiguous micro-batches in a virtual pipeline stage\s*should range in "
            r"\[PP=(?P<pp>\d+)\s*,\s*M=(?P<microbatches>\d+)\s*\]",
        ),
    ),
    (
        b"Number of microbatches (",
        _pattern(
            "few_microbatches",
            r"Number of microbatches \((?P<microbatches>\d+)\) must be greater than\s+or equal to the "
            r"number of stages \((?P<pp>\d+)\)",
        ),
    ),
    (
        b"at least as many microbatches",
        _pattern(
            "few_microbatches",
            r"at least as many microbatches as stages, but got (?P<microbatches>\d+) microbatches and "
            r"(?P<pp>\d+) stages",
        ),
    ),
    (
        b"number of microbatches to be a",
        _pattern(
            "multiple_microbatches",
            r"requires the number of microbatches to be a\s*multiple of the number of rounds "
            r"\(?(?P<rounds>\d+)?\)?,?.*?but got (?P<microbatches>\d+)",
        ),
    ),
    (
        b"number-of-microbatches",
        _pattern(
            "multiple_microbatches",
            r"number of microbatches \((?P<microbatches>\d+)\) is not divisible by "
            r"pipeline-model-parallel-size \((?P<pp>\d+)\)",
        ),
    ),
    (
        b"number of microbatches (",
        _pattern(
            "multiple_microbatches",
            r"number of microbatches \((?P<microbatches>\d+)\) is not divisible by "
            r"pipeline[-_]model[-_]parallel[-_]size \((?P<pp>\d+)\)",
        ),
    ),
    (
        b"only support equal chunk",
        _pattern(
            "equal_chunk",
            r"only support equal chunk\. Got size of DataProto (?P<size>\d+) and chunk "
            r"(?P<chunk>\d+)|only support equal chunk\. Got size (?:of DataProto )?(?P<size2>\d+) and "
            r"chunk (?P<chunk2>\d+)",
        ),
    ),
    (
        b"Invalid parallel dims",
        _pattern("world", r"Invalid parallel dims: (?P<text>.*?) != WORLD_SIZE\((?P<world>\d+)\)"),
    ),
    (
        b"is not divisible by",
        _pattern("world", r"world[ _]size \(?(?P<world>\d+)\)? is not divisible by (?P<text>.*\d+.*)"),
    ),
    (
        b"number of attention heads",
        _pattern(
            "heads",
            r"number of attention heads \(?(?P<heads>\d+)\)? must be divisible by (?:the "
            r")?(?:tensor|sequence|context|ulysses)[ _\w]*?\(?(?P<degree>\d+)\)?",
        ),
    ),
    (b"should be divisible by", _LAYERS),
    (b"must be divisible by", _LAYERS),
    (
        b"be divisible by",
        _pattern(
            "rule",
            r"(?:Error|Exception)\b.{0,40}?(?P<text>(?:[Ss]eq\w*[ _]?len\w*|[Ss]equence length|"
            r"[Nn]umber of (?:routed )?experts|num_experts|hidden_size|ffn_hidden_size|vocab\w*)"
            r"\D{0,20}?\(?\d*\)? ?(?:must|should) be (?:evenly )?divisible by .*)",
        ),
    ),
    (
        b"must be a multiple of",
        _pattern(
            "heads",
            r"(?P<name>num_(?:attention_heads|query_groups|key_value_heads)) \(?(?P<heads>\d+)\)? must be a "
            r"multiple of (?:the )?(?:tensor|context|sequence)[ _\w]*?\(?(?P<degree>\d+)\)?",
        ),
    ),
    (
        b"must be divisible by",
        _pattern(
            "heads",
            r"(?P<name>num(?:ber)?[ _](?:of[ _])?(?:attention[ _]|kv[ "
            r"_]|key_value_|query_)?(?:heads|groups|query_groups))\D{0,20}?\(?(?P<heads>\d+)\)? must "
            r"be (?:evenly )?divisible by \D{0,60}?\(?(?P<degree>\d+)\)?",
        ),
    ),
    (
        b"Building ",
        _pattern(
            "mesh",
            r"Building (?P<dims>\d+)-D device mesh with \[(?P<names>[^\]]*)\], \[(?P<degrees>[\d, ]*)\]",
        ),
    ),
    (
        b"finished reduction in the prior",
        _pattern("unused_parameters", r"Expected to have finished reduction in the prior iteration"),
    ),
    (
        b"memory allocation retries",
        _pattern("alloc_retries", r"(?P<count>\d+) CUDA memory allocation retries"),
    ),
    (
        b"allocator cache flushes",
        _pattern("alloc_retries", r"(?P<count>\d+) pytorch allocator cache flushes"),
    ),
    (
        b"parameters: ",
        _pattern(
            "parameter_count",
            r"(?:[Nn]umber of|[Tt]otal|[Tt]rainable|model)[ \w]*parameters: (?P<count>\d[\d,]*)\b(?! "
            r"?[MBK%])",
        ),
    ),
    (b"Million params", _pattern("parameter_millions", r"\bhas (?P<count>[\d.]+) Million params")),
    (b"ccelerate` version", _pattern("accelerate", r"Accelerate` version: (?P<version>\d+\.\d+)")),
    (b"accelerate==", _pattern("accelerate", r"\baccelerate==(?P<version>\d+\.\d+)")),
    (
        b"a valid checkpoint",
        _pattern(
            "missing_file", r"(?:[Cc]an't find|is not|not) a valid checkpoint (?:at|in)?\s*(?P<name>\S*)"
        ),
    ),
    (b"/.metadata'", _pattern("missing_file", r"No such file or directory: '(?P<name>[^']*\.metadata)'")),
    (b".distcp'", _pattern("missing_file", r"No such file or directory: '(?P<name>[^']*\.distcp)'")),
    (
        b"Duplicate GPU detected",
        _pattern(
            "duplicate",
            r"Duplicate GPU detected : rank (?P<one>\d+) and rank (?P<other>\d+) both on CUDA device "
            r"(?P<name>\w+)",
        ),
    ),
    (b" examples/s]", _pattern("preparing_data", r"(?P<text>[\w (=)]{3,40}):\s+\d+%.*examples/s\]")),
    # checkpoint
    (
        b"used a DP world size",
        _pattern(
            "dp_world",
            r"used a DP world size of (?P<saved>\d+) but the current world size is (?P<current>\d+)",
        ),
    ),
    (
        b"from checkpoint (",
        _pattern(
            "saved_argument",
            r"(?P<name>\w+) value from checkpoint \((?P<saved>[^)]*)\) is not equal to the "
            r"(?:input|currently set) argument value \((?P<current>[^)]*)\)",
        ),
    ),
    (
        b"Expected ",
        _pattern(
            "shard_count",
            r"Expected (?P<expected>\d+) of '(?P<name>[^']*)' under '[^']*' but found (?P<found>\d+) files",
        ),
    ),
    (
        b"number of shards",
        _pattern(
            "shard_count",
            r"(?:[Ee]xpected|needs?) (?P<expected>\d+) (?:number of )?shards?,? "
            r".*?(?:found|got|but|only) (?P<found>\d+)",
        ),
    ),
    (
        b"copying a param with shape",
        _pattern(
            "shape",
            r"size mismatch for (?P<name>\S+): copying a param with shape "
            + _SIZE.format("saved")
            + r" from checkpoint, the shape in current model is "
            + _SIZE.format("current"),
        ),
    ),
    (
        b"Size mismatch between saved",
        _pattern(
            "shape",
            r"Size mismatch between saved "
            + _SIZE.format("saved")
            + r" and current: "
            + _SIZE.format("current")
            + r" for (?P<name>\S+)",
        ),
    ),
    (
        b"Missing key in checkpoint",
        _pattern("missing_key", r"Missing key in checkpoint state_dict: (?P<name>[^\s.]\S*?)\.?$"),
    ),
    (
        b"Missing key(s) in",
        _pattern("missing_key", r"Missing key\(s\) in state_dict: \"?(?P<name>[\w.\[\]]+)"),
    ),
    (
        b"Unexpected key(s) in",
        _pattern("unexpected_key", r"Unexpected key\(s\) in state_dict: \"?(?P<name>[\w.\[\]]+)"),
    ),
    (b"KeyError: ", _pattern("key_error", r"KeyError: ['\"](?P<name>[^'\"]*)['\"]")),
    (b"optim state_dict is empty", _pattern("optimizer_empty", r"optim state_dict is empty")),
    (
        b"optim_states.pt",
        _pattern(
            "missing_file",
            r"(?:No such file|FileNotFoundError|does not exist|[Cc]an't "
            r"find).*?(?P<name>\S*optim_states\.pt)|(?P<name2>\S*optim_states\.pt)['\"]? (?:is "
            r"missing|does not exist|not found)",
        ),
    ),
    (
        b"flattened_range",
        _pattern("form_refused", r"(?P<name>ShardedTensor\.flattened_range) is not supported"),
    ),
    (b"flattened_range", _pattern("flattened_range", r"flattened_range")),
    (b"Missing keys (for all", _pattern("not_loaded", r"Missing keys \(for all ranks\): \{?(?P<name>[^}]*)")),
    (
        b"Unexpected keys (for this",
        _pattern("missing_key", r"Unexpected keys \(for this rank\): \{?['\"]?(?P<name>[^'\"},]*)"),
    ),
    (b"Unable to load optimizer", _pattern("optimizer_empty", r"Unable to load optimizer from checkpoint")),
    (
        b"contains a parameter group that",
        _pattern("groups", r"contains a parameter group that doesn't match the size of optimizer's group"),
    ),
    (
        b"must match the size of tensor",
        _pattern(
            "tensor_sizes",
            r"size of tensor a \((?P<one>\d+)\) must match the size of tensor b \((?P<other>\d+)\)",
        ),
    ),
    (b"PytorchStreamReader failed", _pattern("damaged", r"PytorchStreamReader failed.*")),
    (b"invalid header or archive", _pattern("damaged", r"invalid header or archive is corrupted.*")),
    (b"Error while deserializing", _pattern("damaged", r"Error while deserializing.*")),
    (b"pickle data was truncated", _pattern("damaged", r"pickle data was truncated")),
    (b"Ran out of input", _pattern("damaged", r"EOFError: Ran out of input")),
    (b"unexpected EOF", _pattern("damaged", r"unexpected EOF.*")),
    (
        b"checkpoint version",
        _pattern("version", r"(?:unknown|unsupported|incompatible) checkpoint version.*"),
    ),
    (b"fully_reshardable", _pattern("format", r".*fully_reshardable.*")),
    (b"fully_sharded_model_space", _pattern("format", r".*fully_sharded_model_space.*")),
    (b"dp_zero_gather_scatter", _pattern("format", r".*dp_zero_gather_scatter.*")),
]
"""Messages with the bytes to look for; of several with the same bytes all are tried."""


def _value(text: str) -> Any:
    text = text.replace(",", "") if re.fullmatch(r"\d{1,3}(?:,\d{3})+", text) else text
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text.strip()


def _read(patterns: list[Pattern], line: Line) -> Iterator[Message]:
    for pattern in patterns:
        found = pattern.regex.search(line.text)
        if found is None and pattern.what != "key_error":
            found = pattern.regex.search(line.joined(2, " "))
        if found is not None:
            numbers = {
                name.rstrip("2"): _value(text) for name, text in found.groupdict().items() if text is not None
            }
            yield Message(line.source, line.rank, pattern.what, numbers, _frames(line))
            return


def _frames(line: Line) -> tuple[str, ...]:
    found = []
    for text in reversed(line.before(MOST_PREVIOUS)):
        frame = re.search(r'File "([^"]+)", line (\d+), in (\S+)', text)
        if frame is not None:
            found.append(f"{frame[3]} at {frame[1]}:{frame[2]}")
    return tuple(found)


def _readers() -> dict[bytes, Reader[Any]]:
    grouped: dict[bytes, list[Pattern]] = {}
    for needle, pattern in PATTERNS:
        grouped.setdefault(needle, []).append(pattern)

    def reader(patterns: list[Pattern]) -> Reader[Any]:
        return lambda line: _read(patterns, line)

    return {needle: reader(patterns) for needle, patterns in grouped.items()}


READERS: dict[bytes, Reader[Any]] = _readers()
