"""Pickles as data: containers, text, numbers. A pickle that names any class or function is refused by
name."""

import io
import pickle
import pickletools
from typing import Any, BinaryIO, NoReturn

LARGEST = 256 << 20
"""Bytes of a dump that is read: a flight recorder of 20,000 entries with stacks is a tenth of it."""


class RefusedPickleError(ValueError):
    """A pickle that would import something, with what; or one that is no pickle."""


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise RefusedPickleError(
            f"it would import {module}.{name}: a dump holds containers, text and numbers only, so "
            "this one is "
            "not loaded"
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        raise RefusedPickleError(f"it refers to storage outside ({str(pid)[:60]}): it is no dump")


def read_pickle(stream: BinaryIO) -> Any:
    """What a pickle of plain data holds.

    Raises: RefusedPickleError: it imports something, is cut off, too large, or no pickle.
    """
    data = stream.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise RefusedPickleError(f"it is larger than {LARGEST >> 20} MiB")
    try:
        _check(data)
        return _Restricted(io.BytesIO(data)).load()
    except RefusedPickleError:
        raise
    except (
        *(pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError, AttributeError),
        *(OverflowError, MemoryError, RecursionError, UnicodeDecodeError, ImportError),
    ) as fault:
        raise RefusedPickleError(f"it is cut off or no pickle ({type(fault).__name__})") from None


CODE = frozenset(
    {
        "GLOBAL",
        "STACK_GLOBAL",
        "REDUCE",
        "BUILD",
        "INST",
        "OBJ",
        "NEWOBJ",
        "NEWOBJ_EX",
        "EXT1",
        "EXT2",
        "EXT4",
    }
)
"""Instructions that import or call something."""


def _check(data: bytes) -> None:
    """Refuse what imports or calls, before anything is made of the pickle; name what it is."""
    texts: list[str] = []
    for operation, argument, place in pickletools.genops(data):
        if isinstance(argument, str):
            texts = [*texts[-1:], argument]
        if operation.name not in CODE:
            continue
        named = str(argument).replace(" ", ".") if argument is not None else ".".join(texts[-2:])
        raise RefusedPickleError(
            f"it would run code: instruction {operation.name} of {named[:120]} at byte {place}: a dump holds "
            "containers, text and numbers only, so this one is not loaded"
        )
