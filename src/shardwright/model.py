"""ModelSpec: the shape of a decoder, all that planning and building it needs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shardwright.description import Description, nearest
from shardwright.errors import ModelError, ShardwrightError
from shardwright.families import FAMILIES, PLAIN, Family
from shardwright.naming import Naming

PRESETS = Path(__file__).parent / "data" / "models"

ModelType = Literal[
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox",
    "olmo2", "granite", "cohere", "cohere2", "starcoder2", "stablelm", "falcon", "opt", "mixtral",
    "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "glm4_moe", "llama4_text",
]  # fmt: skip

BUILT_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "gpt2", "starcoder2"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"),
)
"""Families that the runtime builds, see ``unbuilt_reasons``; the planner models all."""

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


class Llama3Rope(Description):
    """Frequency scaling of rotary embeddings as in Llama 3.1.

    Source: Llama 3 model card; transformers modeling_rope_utils.py, ``llama3``.
    """

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_positions: PositiveInt


class Yarn(Description):
    """Frequencies of rotary embeddings stretched each by its own factor: high ones kept, low ones divided.

    A frequency is kept that turns more than ``beta_fast`` times in the original sequence, and divided by
    ``factor`` if less than ``beta_slow`` times.

    Source: Peng et al. 2023, arXiv:2309.00071; transformers modeling_rope_utils.py, ``yarn``.
    """

    factor: PositiveFloat
    original_positions: PositiveInt
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    truncate: bool = Field(default=True, description="the borders between them to whole numbers")
    attention_factor: PositiveFloat = Field(description="of cosines and sines")
    score_factor: PositiveFloat = Field(default=1.0, description="of the scores of latent attention")


class Moe(Description):
    """Routed experts, which stand in some layers where the others have one feed-forward network.

    Layer i has experts if i >= ``first_dense_layers``, i + 1 is a multiple of ``layer_step``, and i is none
    of ``dense_layers``. An expert's network is of the model's kind, gated or not.
    """

    experts: PositiveInt
    top_k: PositiveInt = Field(description="experts of a token")
    ffn: PositiveInt = Field(description="width of one routed expert")
    shared_ffn: NonNegativeInt = Field(default=0, description="width of all shared experts together")
    shared_gate: bool = Field(default=False, description="a learned gate on the shared experts' output")
    router_bias: bool = Field(default=False, description="trained")
    correction_bias: bool = Field(default=False, description="of the router, moved by the load: a buffer")
    expert_bias: bool = False
    groups: PositiveInt = Field(default=1, description="of experts, for node-limited routing")
    top_groups: PositiveInt = Field(default=1, description="groups that a token's experts may be in")
    score: Literal["softmax", "sigmoid"] = Field(default="softmax", description="of the router's numbers")
    normalise: bool = Field(default=True, description="weights of a token's experts add up to scale")
    scale: PositiveFloat = Field(default=1.0, description="of the weights")
    first_dense_layers: NonNegativeInt = 0
    layer_step: PositiveInt = 1
    dense_layers: tuple[NonNegativeInt, ...] = ()

    @model_validator(mode="after")
    def _counts_agree(self) -> Self:
        faults = []
        if self.top_k > self.experts:
            faults.append(f"top_k={self.top_k} is more than experts={self.experts}")
        if self.experts % self.groups:
            faults.append(f"groups={self.groups} does not divide experts={self.experts}")
        if self.top_groups > self.groups:
            faults.append(f"top_groups={self.top_groups} is more than groups={self.groups}")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def covers(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        late = layer >= self.first_dense_layers and (layer + 1) % self.layer_step == 0
        return late and layer not in self.dense_layers


class Mla(Description):
    """Multi-head latent attention: queries and keys with values go through narrow vectors.

    A head's query and key have ``nope_size`` plain numbers and ``rope_size`` rotated ones; the rotated part
    of the key is one for all heads.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    q_rank: NonNegativeInt = Field(description="0: queries are not narrowed")
    kv_rank: PositiveInt
    nope_size: PositiveInt
    rope_size: PositiveInt
    value_size: PositiveInt
    interleaved: bool = Field(default=True, description="pairs that are rotated are neighbours")


class ModelSpec(Description):
    """Shape of a decoder. The defaults are those of the Llama family: GQA, SwiGLU, RMSNorm, RoPE.

    ``norm_placement``: ``pre`` norms what a branch reads, ``post`` what it adds (OLMo-2), ``sandwich`` both
    (Gemma 2), ``residual`` the sum (the original Transformer). In a ``parallel_block`` attention and
    feed-forward read the same input, through one norm if ``shared_norm``. ``qk_norm_kind``: one weight vector
    for all heads (``head``), one ``per_head``, one norm of the whole ``projection``, or no weights
    (``weightless``). With ``mla`` a head is ``head_size`` = nope_size + rope_size wide, with its own key and
    value.
    """

    error: ClassVar[type[ShardwrightError]] = ModelError
    noun: ClassVar[str] = "model"

    name: str
    model_type: str
    layers: PositiveInt
    hidden: PositiveInt
    ffn: PositiveInt = Field(description="width of the feed-forward network in layers without experts")
    heads: PositiveInt
    kv_heads: PositiveInt
    head_size: PositiveInt
    vocab: PositiveInt
    tied_embeddings: bool = False
    head_bias: bool = False
    embedding_projection: NonNegativeInt = Field(
        default=0, description="width of embedding and head if a matrix leads to hidden; 0: there is none"
    )
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_kind: Literal["head", "per_head", "projection", "weightless"] = "head"
    qk_norm_bias: bool = False
    attention_sinks: bool = Field(default=False, description="one trained score a head that no key has")
    attention_softcap: PositiveFloat | None = None
    logit_softcap: PositiveFloat | None = None
    activation: Activation = "silu"
    gated_mlp: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norm_weight: bool = True
    norm_bias: bool = False
    norm_placement: Literal["pre", "post", "sandwich", "residual"] = "pre"
    norm_eps: PositiveFloat = 1e-6
    final_norm: bool = True
    parallel_block: bool = False
    shared_norm: bool = False
    positions: Literal["rope", "learned", "alibi"] = "rope"
    position_offset: NonNegativeInt = Field(default=0, description="unused rows before learned position 0")
    rope_theta: PositiveFloat = 10000.0
    local_rope_theta: PositiveFloat | None = Field(default=None, description="of windowed layers, if another")
    rotary_share: float = Field(default=1.0, ge=0, le=1, description="of a head that is rotated")
    rope_scaling: Llama3Rope | None = None
    linear_rope: PositiveFloat | None = Field(default=None, description="all frequencies are divided by it")
    yarn: Yarn | None = None
    other_rope: Literal["dynamic", "longrope"] | None = Field(
        default=None, description="a frequency scaling known by name only"
    )
    no_rope_layers: tuple[NonNegativeInt, ...] = ()
    sliding_window: PositiveInt | None = None
    window_kind: Literal["sliding", "chunked"] = "sliding"
    full_attention_layers: tuple[NonNegativeInt, ...] = Field(default=(), description="without the window")
    max_positions: PositiveInt = 2048
    initializer_range: PositiveFloat = 0.02
    moe: Moe | None = None
    mla: Mla | None = None
    mtp_layers: NonNegativeInt = Field(default=0, description="multi-token prediction, counted apart")
    unbuilt: tuple[str, ...] = Field(
        default=(),
        description="settings of its config.json that change what is computed, planned as if unset",
    )
    naming: Naming | None = Field(default=None, description="of a model_type without a reader of its own")
    assumed: tuple[str, ...] = Field(default=(), description="what was not given, and what was taken for it")
    source: str = Field(default="", description="where the numbers are printed")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        faults = [*self._head_faults(), *self._family_faults(), *self._layer_faults()]
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def block_kinds(self) -> tuple[Literal["dense", "experts"], ...]:
        """Kinds of blocks it has, by their feed-forward networks."""
        covered = {self.moe is not None and self.moe.covers(layer) for layer in range(self.layers)}
        if len(covered) == 2:
            return ("dense", "experts")
        return ("experts",) if True in covered else ("dense",)

    def _head_faults(self) -> Iterator[str]:
        if self.heads % self.kv_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            yield f"kv_heads={self.kv_heads} does not divide heads={self.heads}: use kv_heads in {divisors}"
        name, rotated = ("rope_size", self.mla.rope_size) if self.mla else ("head_size", self.head_size)
        if self.positions == "rope" and self.rotary_share == 1 and rotated % 2:
            yield f"{name}={rotated} is odd: rotary embeddings turn pairs, use an even one"
        if self.mla is None:
            return
        size = self.mla.nope_size + self.mla.rope_size
        if self.head_size != size:
            yield f"head_size={self.head_size} is not nope_size + rope_size of mla: use {size}"
        if self.kv_heads != self.heads:
            yield f"kv_heads={self.kv_heads} does not go with mla: use that of heads, {self.heads}"

    def _family_faults(self) -> Iterator[str]:
        """Fields that do not go with ``model_type``; its tensors could not be named."""
        known = FAMILIES.get(self.model_type)
        if (known is None) == (self.naming is None):
            yield (
                f"model_type={self.model_type!r} is not supported{nearest(self.model_type, list(FAMILIES))}: "
                "another one needs the group 'naming'"
                if known is None
                else f"model_type={self.model_type!r} has names of its own: leave out the group 'naming'"
            )
        family = known or Family({}, tuple(PLAIN), moe=self.moe is not None, mla=self.mla is not None)
        expected: dict[str, Any] = {**PLAIN, **family.fixed}
        for name, value in expected.items():
            found = getattr(self, name)
            if name not in family.free and found != value:
                yield f"{name}={found!r} does not go with model_type={self.model_type!r}: use {value!r}"
        for name, needed in (("moe", family.moe), ("mla", family.mla)):
            if (getattr(self, name) is not None) != needed:
                has = "needs the group" if needed else "has no group"
                yield f"model_type={self.model_type!r} {has} {name!r}"
        if self.shared_norm and not self.parallel_block:
            yield "shared_norm=True does not go with parallel_block=False: each branch has its norm"
        if self.norm_bias and not (self.norm == "layer" and self.norm_weight):
            yield "norm_bias=True does not go with a norm that is no LayerNorm with weights"

    def _layer_faults(self) -> Iterator[str]:
        lists = {"no_rope_layers": self.no_rope_layers, "full_attention_layers": self.full_attention_layers}
        if self.moe:
            lists["moe.dense_layers"] = self.moe.dense_layers
            if not any(self.moe.covers(layer) for layer in range(self.layers)):
                yield f"moe covers none of the {self.layers} layers: lower first_dense_layers or layer_step"
        for name, layers in lists.items():
            if any(layer >= self.layers for layer in layers):
                yield f"{name}={list(layers)} names layers beyond the last, {self.layers - 1}"


def unbuilt_reasons(model: ModelSpec) -> list[str]:
    """What of a model the runtime does not build, a reason each; empty if it builds all of it."""
    types = ", ".join(BUILT_TYPES)
    moe = model.moe
    biased = moe is not None and (
        moe.expert_bias or moe.router_bias or (model.mlp_bias and moe.shared_ffn > 0)
    )
    odd = model.mla is None and int(model.head_size * model.rotary_share) % 2 == 1
    rules = {
        f"model_type={model.model_type!r} is only modelled: train one of {types}": (
            model.model_type in BUILT_TYPES
        ),
        f"activation={model.activation!r} with a gate is only modelled: train a model with 'silu'": (
            model.activation == "silu" or not model.gated_mlp
        ),
        f"activation={model.activation!r} is only modelled: train a model with another": (
            model.activation != "relu2"
        ),
        f"other_rope={model.other_rope!r} is only modelled: train a model with linear, llama3 or yarn "
        "scaling": model.other_rope is None,
        f"rotary_share={model.rotary_share:g} rotates an odd part of head_size={model.head_size}: use a "
        "share that makes pairs": model.positions != "rope" or not odd,
        "experts with biases are only modelled: train a model without": not biased,
        f"{', '.join(model.unbuilt)} is only modelled: train a model without": not model.unbuilt,
    }
    return [reason for reason, built in rules.items() if not built]


def preset_names() -> list[str]:
    """Names of the models shipped with the package."""
    return sorted(path.name.removesuffix(".toml") for path in PRESETS.glob("*.toml"))


def preset(name: str) -> ModelSpec:
    """A model shipped with the package, by name.

    Raises: ModelError: no such preset; the message names the nearest.
    """
    if name not in preset_names():
        hint = nearest(name, preset_names())
        raise ModelError(f"model {name!r} is neither preset nor file{hint}: give a preset or a config.json")
    return ModelSpec.from_file(PRESETS / f"{name}.toml")
