"""ModelSpec: the shape of a decoder, all that planning and building it needs."""

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from shardwright.description import Description, nearest
from shardwright.errors import ModelError, ShardwrightError

PRESETS = Path(__file__).parent / "data" / "models"

ModelType = Literal["llama", "mistral", "qwen2", "qwen3"]


class Llama3Rope(Description):
    """Frequency scaling of rotary embeddings as in Llama 3.1.

    Source: Llama 3 model card; transformers modeling_rope_utils.py, ``llama3``.
    """

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_positions: PositiveInt


class ModelSpec(Description):
    """Shape of a decoder of the Llama family: GQA, SwiGLU, RMSNorm, RoPE, embeddings tied or not."""

    error: ClassVar[type[ShardwrightError]] = ModelError
    noun: ClassVar[str] = "model"

    name: str
    model_type: ModelType
    layers: PositiveInt
    hidden: PositiveInt
    ffn: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_size: PositiveInt
    vocab: PositiveInt
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: Llama3Rope | None = None
    sliding_window: PositiveInt | None = None
    max_positions: PositiveInt = 2048
    initializer_range: PositiveFloat = 0.02
    source: str = Field(default="", description="where the numbers are printed")

    @model_validator(mode="after")
    def _heads_agree(self) -> Self:
        faults = []
        if self.heads % self.kv_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            faults.append(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}: use kv_heads in {divisors}"
            )
        if self.head_size % 2:
            faults.append(f"head_size={self.head_size} is odd: rotary embeddings turn pairs, use an even one")
        if faults:
            raise ValueError("; ".join(faults))
        return self


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
