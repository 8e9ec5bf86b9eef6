"""Adam with state in 8 bits, from torchao: an optional extra."""

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from shardwright.errors import MissingExtraError
from shardwright.plan.accounting import EIGHT_BIT_BLOCK

EXTRA = "quant"


def build_adamw_8bit(
    groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """AdamW whose two moments are one byte an element, with a scale for each block of elements.

    Blocks are cut within a rank's shard, so that layouts round differently: exempt from equality. A shard
    below 4,096 elements, or of a number that blocks do not divide, keeps its moments in its own type, and
    each moment has a table of 256 fp32 values: the plan's row counts neither.

    Raises: MissingExtraError
    """
    if importlib.util.find_spec("torchao") is None:
        raise MissingExtraError(EXTRA, "optimizer='adamw_8bit'")
    with _quiet_import():
        from torchao.optim import AdamW8bit
    return AdamW8bit(groups, lr=lr, betas=betas, eps=eps, block_size=EIGHT_BIT_BLOCK)


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """Without the reports of kernels for other devices that this machine cannot load, and of deprecated calls
    in torch: the optimizer needs none of them. Errors pass."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
