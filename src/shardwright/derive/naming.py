"""Names of a model's modules, of its ends and of a block, from tensors sorted by what they are for."""

from typing import TYPE_CHECKING, Any, NamedTuple

from shardwright.derive.fields import norms_outside
from shardwright.derive.tensors import KEY_NORM, QUERY_NORM, Layer, Matrix
from shardwright.errors import ModelError
from shardwright.naming import Matrices, Naming
from shardwright.plan.params import BLOCK, ParameterTable

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Ends(NamedTuple):
    """What stands outside the layers: names of modules ("" if there is none), and tensors not understood."""

    embedding: str
    vocab: int
    hidden: int
    head: str
    tied: bool
    head_bias: bool
    position: str
    positions: int | None
    final_norm: str
    unknown: tuple[str, ...]


def ends_of(model: "PreTrainedModel", table: ParameterTable, stem: str) -> Ends:
    """Embedding, trained positions, final norm and head of a model.

    Raises: ModelError: it has no embedding or no head, or several norms beside its layers.
    """
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    first: Any = model.get_input_embeddings()
    last: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if any(getattr(getattr(module, "weight", None), "ndim", 0) != 2 for module in (first, last)):
        raise ModelError("it has no embedding, or no head")
    embedding, head = names[id(first)], names[id(last)]
    vocab, hidden = first.weight.shape
    tied = first.weight is last.weight
    beside = norms_outside(model, stem)
    norms = [name for name in beside if "emb" not in name]
    known = {f"{embedding}.weight", f"{head}.weight", f"{head}.bias"}
    outside = {t.name: t.shape for unit in table.units if unit.kind != BLOCK for t in unit.tensors}
    position = next(
        (
            name
            for name, shape in outside.items()
            if len(shape) == 2 and shape[1] == hidden and name not in known and _is_position(model, name)
        ),
        "",
    )
    known |= {position, *(f"{norms[0]}.{last}" for last in ("weight", "bias") if len(norms) == 1)}
    unknown = tuple(name for name in outside if name not in known)
    if not unknown and (len(norms) > 1 or norms != beside):
        raise ModelError(
            f"it has norms outside its layers: {', '.join(beside)}, only a final one is modelled"
        )
    return Ends(
        embedding,
        vocab,
        hidden,
        head,
        tied,
        f"{head}.bias" in outside,
        position.removesuffix(".weight"),
        outside[position][0] if position else None,
        norms[0] if norms else "",
        unknown,
    )


def _is_position(model: "PreTrainedModel", name: str) -> bool:
    """Whether a tensor is a table of positions: of an embedding that is called so."""
    from torch import nn

    module = name.removesuffix(".weight")
    called = any(part in module.rpartition(".")[2].lower() for part in ("pos", "wpe"))
    return called and name.endswith(".weight") and isinstance(model.get_submodule(module), nn.Embedding)


def naming_of(layers: list[Layer], ends: Ends, stem: str, shared_norm: bool) -> Naming:
    """Names of a model whose layers are of these shapes.

    Raises: ModelError: they name their attention or their norms differently.
    """
    one = layers[0]
    if any((_pairs(x.attention), x.attention_path, x.norms) != _names(one) for x in layers):
        raise ModelError("its layers differ in their attention or their norms")
    dense = next((layer for layer in layers if layer.feed_forward), None)
    sparse = next((layer for layer in layers if layer.experts), None)
    network = dense.feed_forward if dense else sparse.shared if sparse else []
    values = {
        "stem": stem,
        "embedding": ends.embedding,
        "position": ends.position,
        "final_norm": ends.final_norm,
        "head": ends.head,
        "order": tuple(one.order),
        "norms": tuple(one.norms),
        "attention": one.attention_path,
        "attention_matrices": _pairs(one.attention),
        "feed_forward": one.feed_forward_path,
        "norm_module_per_head": one.norm_module_per_head,
        "transposed": True in one.transposed,
    }
    if shared_norm:
        values["shared_norm"] = one.norms[0]
    if one.qk_norms:
        values["qk_norms"] = _query_and_key(one)
    if network:
        values["matrices"] = _pairs(normal(network))
    if sparse and sparse.router and len(sparse.experts) == 2:
        values |= {
            "moe_order": tuple(sparse.moe_order),
            "router": sparse.router.name,
            "transposed_experts": sparse.transposed_experts(ends.hidden),
        }
        values |= {"shared": sparse.shared_name} if sparse.shared_name else {}
    return Naming.checked(values)


def _names(layer: Layer) -> tuple[Matrices, str, list[str]]:
    return _pairs(layer.attention), layer.attention_path, layer.norms


def _pairs(matrices: list[Matrix]) -> Matrices:
    return tuple((matrix.kind, matrix.name) for matrix in matrices)


def _query_and_key(layer: Layer) -> tuple[str, str]:
    found = [[name for name in layer.qk_norms if rule.match(name)] for rule in (QUERY_NORM, KEY_NORM)]
    if [len(names) for names in found] != [1, 1]:
        raise ModelError(f"it has norms {', '.join(layer.qk_norms)}, not one of queries and one of keys")
    return found[0][0], found[1][0]


def normal(matrices: list[Matrix]) -> list[Matrix]:
    """Matrices of a feed-forward network by what their shapes say: one of twice the width is gate and up in
    one, a first one alone is no gate.

    Raises: ModelError: they are not one or two matrices up and one down.
    """
    kinds = [matrix.kind for matrix in matrices]
    down = [matrix for matrix in matrices if matrix.kind == "down"]
    if len(down) != 1 or len(set(kinds)) != len(kinds) or len(kinds) not in (2, 3):
        raise ModelError(f"its feed-forward network has the matrices {', '.join(m.name for m in matrices)}")
    if len(kinds) == 3:
        return matrices
    first = next(matrix for matrix in matrices if matrix.kind != "down")
    kind = {1: "up", 2: "gate_up"}.get(first.outputs // down[0].inputs, first.kind)
    return [matrix if matrix.kind == "down" else matrix._replace(kind=kind) for matrix in matrices]
