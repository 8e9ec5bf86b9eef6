"""What the tensors of a layer are for: their kinds (as in plan/params.py) by module, name and shape."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import nn

    from shardwright.plan.params import Tensor

ATTENTION_KINDS: Mapping[str, tuple[str, ...]] = {
    "query": ("q_proj", "q", "query", "query_proj", "q_lin", "wq"),
    "key": ("k_proj", "k", "key", "key_proj", "k_lin", "wk"),
    "value": ("v_proj", "v", "value", "value_proj", "v_lin", "wv"),
    "qkv": ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv", "att_proj", "W_pack"),
    "out": ("o_proj", "out_proj", "dense", "c_proj", "wo", "attn_out", "out_lin", "o"),
    "query_down": ("q_a_proj",),
    "query_norm": ("q_a_layernorm", "q_a_norm"),
    "query_up": ("q_b_proj",),
    "key_down": ("kv_a_proj_with_mqa",),
    "key_norm": ("kv_a_layernorm", "kv_a_norm"),
    "key_up": ("kv_b_proj",),
}
"""Names of the matrices of attention."""

FEED_FORWARD_KINDS: Mapping[str, tuple[str, ...]] = {
    "gate": ("gate_proj", "w1", "wi_0", "c_fc_0", "gate_linear"),
    "up": ("up_proj", "w3", "wi_1", "c_fc_1", "fc_in", "fc1", "c_fc", "dense_h_to_4h", "up_linear"),
    "gate_up": ("gate_up_proj", "input_linear", "Wi"),
    "down": ("down_proj", "w2", "wo", "fc_out", "fc2", "c_proj", "dense_4h_to_h", "output_linear", "Wo"),
}
"""Names of the matrices of a feed-forward network; their shapes are compared afterwards."""

QUERY_NORM = re.compile(r"^(q|query)_?(layer_?)?norm$")
KEY_NORM = re.compile(r"^(k|key)_?(layer_?)?norm$")
NORM_PER_HEAD = re.compile(r"^(.+)\.norms\.\d+$")
SAME = "same"
"""A part that is in the order already: that of the tensor before."""

ROUTER = re.compile(r"router|gate")


class Matrix(NamedTuple):
    """A weight with its bias. ``module`` is relative to the block, ``name`` to its branch."""

    kind: str
    module: str
    name: str
    outputs: int
    inputs: int
    bias: bool


@dataclass
class Layer:
    """The tensors of one layer by what they are for.

    ``experts`` are shapes (experts, rows, columns) by name; ``unknown`` what was not understood, ``order``
    the parts in the order of their first tensors.
    """

    index: int
    attention: list[Matrix] = field(default_factory=list)
    feed_forward: list[Matrix] = field(default_factory=list)
    shared: list[Matrix] = field(default_factory=list)
    attention_path: str = ""
    feed_forward_path: str = ""
    shared_name: str = ""
    shared_gate: bool = False
    router: Matrix | None = None
    experts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    expert_bias: bool = False
    norms: list[str] = field(default_factory=list)
    qk_norms: dict[str, tuple[int, ...]] = field(default_factory=dict)
    norm_module_per_head: bool = False
    norm_biases: set[str] = field(default_factory=set)
    sinks: bool = False
    transposed: set[bool] = field(default_factory=set)
    moe_order: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def of_kind(self, kind: str) -> Matrix | None:
        """The matrix of a kind, of attention or of a feed-forward network that is no expert's."""
        found = [m for m in (*self.attention, *self.feed_forward, *self.shared) if m.kind == kind]
        return found[0] if found else None

    def transposed_experts(self, hidden: int) -> bool:
        """Whether the rows of an expert's matrices are its inputs."""
        return self.experts["gate_up_proj"][2] != hidden or self.experts["down_proj"][1] != hidden


def is_norm(module: "nn.Module") -> bool:
    """Whether a module is a norm and no list of them."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def layer_of(index: int, block: "nn.Module", tensors: Mapping[str, "Tensor"]) -> Layer:
    """Sort the tensors of a layer, whose names are relative to it."""
    reader = _Reader(Layer(index), block, dict(tensors))
    reader.read()
    return reader.found


@dataclass
class _Reader:
    found: Layer
    block: "nn.Module"
    tensors: dict[str, "Tensor"]

    def read(self) -> None:
        """Sort all. The output of latent attention is of a kind of its own: values have their own width."""
        found = self.found
        found.norms = [name for name, module in self.block.named_children() if is_norm(module)]
        stacked = [name for name, tensor in self.tensors.items() if len(tensor.shape) == 3]
        if stacked:
            found.feed_forward_path = re.sub(r"experts\.[^.]+$", "", stacked[0])
        for name, tensor in self.tensors.items():
            part = self._part(name, tensor.shape)
            if not part:
                found.unknown.append(name)
            elif part == SAME:
                continue
            elif part == "norm" or part not in found.order:
                found.order.append(part)
        if any(matrix.kind == "key_down" for matrix in found.attention):
            kinds = {"out": "mla_out"}
            found.attention = [m._replace(kind=kinds.get(m.kind, m.kind)) for m in found.attention]
        weightless = [name for name in found.norms if f"{name}.weight" not in self.tensors]
        found.order += ["norm"] * len(weightless)

    def _part(self, name: str, shape: tuple[int, ...]) -> str:
        """Note a tensor; the part of the block it belongs to, "" if that is not known."""
        module, _, last = name.rpartition(".")
        if last == "bias" and len(shape) == 1:
            return self._bias(module)
        if last == "sinks" and len(shape) == 1:
            self.found.sinks, self.found.attention_path = True, f"{module}."
            return "attention"
        if len(shape) == 3 or ("experts." in name and last.endswith("_bias")):
            return self._expert(name, shape)
        if last != "weight":
            return ""
        owner = self.block.get_submodule(module)
        if len(shape) <= 2 and is_norm(owner):
            return self._norm(module, shape)
        return self._matrix(module, owner, shape) if len(shape) == 2 else ""

    def _bias(self, module: str) -> str:
        """Biases come after their weights, which say what they are."""
        known = [matrix.module for matrix in self._matrices()]
        per_head = NORM_PER_HEAD.match(module)
        name = per_head[1] if per_head else module
        if name in self.found.norms or name in self._paths_of_qk_norms():
            self.found.norm_biases.add(name)
            return SAME
        return SAME if module in known else ""

    def _matrices(self) -> Iterator[Matrix]:
        found = self.found
        yield from (*found.attention, *found.feed_forward, *found.shared)
        if found.router:
            yield found.router

    def _paths_of_qk_norms(self) -> list[str]:
        return [self.found.attention_path + name for name in self.found.qk_norms]

    def _expert(self, name: str, shape: tuple[int, ...]) -> str:
        found = self.found
        path, _, last = name.rpartition(".")
        if f"{path}." != f"{found.feed_forward_path}experts." or not found.feed_forward_path:
            return ""
        if last in ("gate_up_proj", "down_proj") and len(shape) == 3:
            found.experts[last] = shape
        elif last in ("gate_up_proj_bias", "down_proj_bias") and len(shape) == 2:
            found.expert_bias = True
        else:
            return ""
        self._next_of_moe("experts")
        return "feed_forward"

    def _next_of_moe(self, part: str) -> None:
        if part not in self.found.moe_order:
            self.found.moe_order.append(part)

    def _norm(self, module: str, shape: tuple[int, ...]) -> str:
        found = self.found
        if module in found.norms:
            return "norm"
        path, _, name = module.rpartition(".")
        per_head = NORM_PER_HEAD.match(module)
        if per_head:
            path, _, name = per_head[1].rpartition(".")
            found.norm_module_per_head = True
        latent = [kind for kind in ("query_norm", "key_norm") if name in ATTENTION_KINDS[kind]]
        if not re.search("attn|attention", path) or found.attention_path not in ("", f"{path}."):
            return ""
        if latent and len(shape) == 1:
            found.attention.append(Matrix(latent[0], module, name, shape[0], 0, False))
        elif QUERY_NORM.match(name) or KEY_NORM.match(name):
            found.qk_norms[name] = shape
        else:
            return ""
        return "attention"

    def _matrix(self, module: str, owner: "nn.Module", shape: tuple[int, ...]) -> str:
        from torch import nn

        found = self.found
        path, _, name = module.rpartition(".")
        path = f"{path}." if path else ""
        bias = f"{module}.bias" in self.tensors
        if self._routes(module, shape):
            return self._router(module, shape, bias)
        transposed = type(owner).__name__ == "Conv1D"
        if not transposed and not isinstance(owner, nn.Linear):
            return ""
        outputs, inputs = reversed(shape) if transposed else shape
        if re.search("attn|attention", path):
            kind = _kind(ATTENTION_KINDS, name)
            if not kind or found.attention_path not in ("", path):
                return ""
            found.attention_path = path
            found.attention.append(Matrix(kind, module, name, outputs, inputs, bias))
            found.transposed.add(transposed)
            return "attention"
        kind = _kind(FEED_FORWARD_KINDS, name)
        matrix = Matrix(kind, module, name, outputs, inputs, bias)
        rest = module.removeprefix(found.feed_forward_path)
        if self._has_experts and module.startswith(found.feed_forward_path) and "shared" in rest:
            return self._shared(matrix, rest)
        if not kind or self._has_experts or (found.feed_forward and found.feed_forward_path != path):
            return ""
        found.feed_forward_path = path
        found.feed_forward.append(matrix)
        found.transposed.add(transposed)
        return "feed_forward"

    @property
    def _has_experts(self) -> bool:
        return any(len(tensor.shape) == 3 for tensor in self.tensors.values())

    def _routes(self, module: str, shape: tuple[int, ...]) -> bool:
        stacked = [tensor.shape[0] for tensor in self.tensors.values() if len(tensor.shape) == 3]
        return bool(stacked) and shape[0] == stacked[0] and "shared" not in module

    def _router(self, module: str, shape: tuple[int, ...], bias: bool) -> str:
        found = self.found
        name = module.removeprefix(found.feed_forward_path)
        if found.router or not module.startswith(found.feed_forward_path) or not ROUTER.search(name):
            return ""
        found.router = Matrix("router", module, name, shape[0], shape[1], bias)
        self._next_of_moe("router")
        return "feed_forward"

    def _shared(self, matrix: Matrix, rest: str) -> str:
        """A matrix of the shared experts, or the gate of their output."""
        found = self.found
        if rest.endswith("_gate") and matrix.outputs == 1:
            found.shared_gate = True
            self._next_of_moe("shared_gate")
            return "feed_forward"
        name, _, last = rest.rpartition(".")
        if not matrix.kind or "." in name or found.shared_name not in ("", name):
            return ""
        found.shared_name = name
        found.shared.append(matrix._replace(name=last))
        self._next_of_moe("shared")
        return "feed_forward"


def _kind(kinds: Mapping[str, tuple[str, ...]], name: str) -> str:
    return next((kind for kind, names in kinds.items() if name in names), "")
