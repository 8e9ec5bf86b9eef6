"""Frozen, checked records that go to TOML and come back equal: the base of the five documents.

A field may be written with its unit ("80 GiB"); in memory it is SI. All faults of a record are
reported at once, and an unknown key names the nearest known one.
"""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import tomli_w
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    SerializationInfo,
    ValidationError,
)

from shardwright import units
from shardwright.errors import ShardwrightError

AS_TEXT = {"units": "text"}
"""Serialisation context: quantities as text with a unit (TOML) instead of SI numbers (JSON)."""


def _quantity(scale: Mapping[str, float], whole: bool) -> tuple[BeforeValidator, PlainSerializer]:
    def read(value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(f"a truth value is not a number with a unit of {', '.join(scale)}")
        if not isinstance(value, str | int | float):
            return value
        number = units.parse_quantity(value, scale)
        return round(number) if whole else float(number)

    def write(value: float, info: SerializationInfo) -> float | str:
        return units.exact_quantity(value, scale, whole=whole) if info.context == AS_TEXT else value

    return BeforeValidator(read), PlainSerializer(write, return_type=Any)


Bytes = Annotated[int, *_quantity(units.BYTES, whole=True)]
Bandwidth = Annotated[float, *_quantity(units.BANDWIDTH, whole=False)]
Seconds = Annotated[float, *_quantity(units.TIME, whole=False)]
FlopsPerSecond = Annotated[float, *_quantity(units.RATE, whole=False)]


class Description(BaseModel):
    """A frozen record with strict keys; ``error`` is what a fault of it raises."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
    error: ClassVar[type[ShardwrightError]] = ShardwrightError
    noun: ClassVar[str] = "description"

    @classmethod
    def checked(cls, values: Mapping[str, Any], source: str = "") -> Self:
        """Build from plain values.

        Raises: ``cls.error`` with every fault, one a line, if there is any.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as found:
            lines = [fault_line(cls, fault) for fault in found.errors(include_url=False)]
            where = f" ({source})" if source else ""
            raise cls.error(f"{cls.noun}{where}: " + "; ".join(lines)) from None

    @classmethod
    def from_toml(cls, text: str, source: str = "") -> Self:
        """Read from TOML text."""
        return cls.checked(parse_toml(text, source, cls.error), source)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read from a TOML file."""
        return cls.from_toml(read_text(path, cls.error), str(path))

    def to_toml(self) -> str:
        """Write as TOML; ``from_toml`` of it equals this record."""
        values = self.model_dump(context=AS_TEXT, exclude_none=True)
        return tomli_w.dumps(values, multiline_strings=r"\r" not in repr(values))  # it would be read as \n


def read_text(path: Path, error: type[ShardwrightError]) -> str:
    """Text of a file; absence, a directory or binary content become ``error``."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else "it is not UTF-8 text"
        raise error(f"cannot read {path}: {reason}") from None


def parse_toml(text: str, source: str, error: type[ShardwrightError]) -> dict[str, Any]:
    """Tables of a TOML text; a syntax fault becomes ``error`` with line and column."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise error(f"{source or 'TOML text'} is not valid TOML: {fault}") from None


def nearest(word: str, known: Sequence[str]) -> str:
    """ " (did you mean X?)" for the known word nearest to ``word``, or the list of known ones."""
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {match[0]!r}?)" if match else f" (known: {', '.join(sorted(known))})"


def fault_line(record: type[BaseModel], fault: Any) -> str:
    """One fault of pydantic as "key=value: what is wrong and the way out"."""
    keys = [str(key) for key in fault["loc"]]
    name = ".".join(keys)
    if fault["type"] == "extra_forbidden":
        return f"unknown key {name!r}" + nearest(keys[-1], _keys_at(record, keys[:-1]))
    if fault["type"] == "missing":
        return f"key {name!r} is missing"
    message = str(fault.get("ctx", {}).get("error", fault["msg"]))
    if not keys:
        return message
    value = fault["input"]
    subject = (
        name if isinstance(value, Mapping) else f"{name}={value!r}"
    )  # a whole table is no value to quote
    return f"{subject}: {message[:1].lower()}{message[1:]}"


def _keys_at(record: type[BaseModel], keys: Sequence[str]) -> list[str]:
    for key in keys:
        field = record.model_fields.get(key)
        candidates = [] if field is None else [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not inner:
            break
        record = inner[0]
    return list(record.model_fields)
