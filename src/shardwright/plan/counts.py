"""Counts of parameters beside the table's own: active ones, multi-token prediction, a closed form."""

from collections.abc import Iterator

from shardwright.model import ModelSpec
from shardwright.plan.names import naming
from shardwright.plan.params import Tensor, parameter_table


def active_parameters(model: ModelSpec) -> int:
    """Parameters that one token meets: of the routed experts the top k, of everything else all.

    The input embedding counts whole. Without it DeepSeek-V3 has 36.63e9, which its README_WEIGHTS.md rounds.

    Source: shared FORMULAE 1.1.
    """
    table = parameter_table(model)
    if model.moe is None:
        return table.parameters
    routed = sum(t.numel * unit.copies for unit in table.units for t in unit.tensors if t.role == "expert")
    return table.parameters - routed + routed // model.moe.experts * model.moe.top_k


def mtp_tensors(model: ModelSpec) -> Iterator[Tensor]:
    """Tensors of the modules for multi-token prediction, which ``parameter_table`` leaves out.

    Each is a block like the model's last, a matrix that merges hidden state and next embedding, and three
    norms; embedding and head are the model's own. They are named as in the published weights: as layers
    behind the last.

    Source: DeepSeek-V3 README_WEIGHTS.md; transformers modeling_layers.py, MtpLayer.
    """
    table = parameter_table(model)
    for layer in range(model.layers, model.layers + model.mtp_layers):
        prefix = f"{naming(model).stem}.{layer}"
        shapes = {
            "enorm": (model.hidden,),
            "hnorm": (model.hidden,),
            "eh_proj": (model.hidden, 2 * model.hidden),
            "shared_head.norm": (model.hidden,),
        }
        for name, shape in shapes.items():
            yield Tensor(f"{prefix}.{name}.weight", shape, "mtp")
        for tensor in table.block(model.layers - 1).at(layer):
            yield Tensor(tensor.name, tensor.shape, "mtp", tensor.splits)


def mtp_parameters(model: ModelSpec) -> int:
    """Parameters of multi-token prediction, counted apart; 0 if the model has none."""
    return sum(tensor.numel for tensor in mtp_tensors(model))


def gpt_parameters(layers: int, hidden: int, vocab: int, positions: int) -> int:
    """Parameters of a GPT with learned positions, biases, width 4h and a tied head.

    12 L h^2 (1 + 13/(12 h) + (V + s)/(12 L h)); the final norm's 2h are left out, as there.

    Source: Narayanan et al. 2021, arXiv:2104.04473, equation 2.
    """
    return 12 * layers * hidden**2 + 13 * layers * hidden + (vocab + positions) * hidden
