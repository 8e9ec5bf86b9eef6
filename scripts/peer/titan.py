"""One rank of torchtitan 0.3.0 in the throughput comparison; started by scripts/bench_peer.py.

torchtitan knows no CPU. What it asks of a device is answered here, attention is its own module over
``scaled_dot_product_attention`` (those of its language models need a GPU), and gradients are summed without
the pre-multiplied sum that gloo has not. Its trainer's own step is what runs.
"""

import sys
import tempfile
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from serve import (
    LEARNING_RATE,
    SEQ,
    SEQUENCES,
    SHAPE,
    STEPS,
    WARMUP_STEPS,
    global_batch,
    own_output,
    question,
    serve,
)


class Nothing:
    """In place of a part that the comparison does not use: its configuration, and what that builds."""

    def build(self, **_: object) -> None:
        """There is nothing to build."""

    def to_dict(self) -> dict[str, object]:
        """There is nothing to say."""
        return {}


def pretend_device() -> None:
    """Have torch.cpu answer what torchtitan asks of a device. Call before it is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda *_: "cpu"
    torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**30, name="cpu")
    torch.cpu.memory_stats = lambda *_: {}
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None


def trainer_class() -> type:
    """torchtitan's trainer, without the kernels of expert parallelism, which need Triton to be defined."""
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()
    from torchtitan.trainer import Trainer

    return Trainer


def configuration(asked: dict, folder: str):
    """torchtitan's own small model on the layout that was asked for."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.optimizer = default_adamw(lr=LEARNING_RATE)
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.loss = CrossEntropyLoss.Config(global_vocab_size=SHAPE["vocab"])
    config.activation_checkpoint = FullAC.Config() if asked["recompute"] == "full" else None
    training, parallelism = config.training, config.parallelism
    training.seq_len, training.steps, training.disable_cuda_graphs = SEQ, STEPS, True
    training.mixed_precision_param = "float32"
    training.local_batch_size = SEQUENCES // (asked.get("dp_replicate", 1) * asked.get("dp_shard", 1))
    parallelism.data_parallel_replicate_degree = asked.get("dp_replicate", 1)
    parallelism.data_parallel_shard_degree = asked.get("dp_shard", 1)
    parallelism.tensor_parallel_degree = asked.get("tp", 1)
    parallelism.spmd_backend = "partial_dtensor"  # the default needs torch 2.14
    config.lr_scheduler.warmup_steps = WARMUP_STEPS
    config.metrics.log_freq = STEPS
    config.validator.enable = config.checkpoint.enable = False
    config.dump_folder = folder
    config.tokenizer = config.dataloader = Nothing()
    return config


def main() -> None:
    """Build the model as its trainer does, then step on request."""
    answers, asked = own_output(), question()
    pretend_device()
    trainer_type = trainer_class()
    from torch.distributed.fsdp import FSDPModule

    trainer = trainer_type(configuration(asked, tempfile.mkdtemp(prefix="peer-")))
    model = trainer.model_parts[0]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    logged: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *_, **__: logged.append(loss)
    dims = trainer.parallel_dims
    data_rank = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
    share = trainer.config.training.local_batch_size

    def step(report: bool) -> float | None:
        trainer.metrics_processor.should_log = lambda _: report
        batch = global_batch(trainer.step)[data_rank * share : (data_rank + 1) * share]
        trainer.step += 1
        trainer.train_step(iter([({"input": batch[:, :-1].clone()}, batch[:, 1:].clone())]))
        return logged[-1] if report else None

    serve(step, sum(parameter.numel() for parameter in model.parameters()), answers)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
