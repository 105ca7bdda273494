"""The numbers that decide which arrays a decoder has, and how each of its layers attends.

Every record is frozen, hashable and checked when it is made, so a `Config` can be a static argument of `jax.jit`.
"""

import dataclasses
from typing import Literal


def _check_positive(name: str, value: int | float | None) -> None:
    if value is not None and value <= 0:
        raise ValueError(f"{name} is {value}; it must be positive.")


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: float

    def __post_init__(self):
        _check_positive("factor", self.factor)


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1 model card).

    A wavelength is long above `original_context / low_freq_factor` tokens, short below `original_context / high_freq_factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self):
        _check_positive("factor", self.factor)
        _check_positive("original_context", self.original_context)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor}; it must lie above low_freq_factor, {self.low_freq_factor}."
            )


@dataclasses.dataclass(frozen=True)
class DivisorScaling:
    """A divisor of its own for each pair of lanes, as GGUF files carry them in `rope_freqs.weight`."""

    divisors: tuple[float, ...]

    def __post_init__(self):
        object.__setattr__(self, "divisors", tuple(self.divisors))
        for divisor in self.divisors:
            _check_positive("A rotary divisor", divisor)


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding (arXiv:2104.09864).

    Lanes turn in pairs: lane i with lane i + H/2, or 2i with 2i + 1 where `interleaved`.
    """

    base: float = 10_000.0
    scaling: LinearScaling | Llama3Scaling | DivisorScaling | None = None
    interleaved: bool = False

    def __post_init__(self):
        _check_positive("The rotary base", self.base)


@dataclasses.dataclass(frozen=True)
class Attention:
    """How the layers of one kind attend.

    `window` counts the token itself: 1 sees nothing else, None sees everything before. `scale` multiplies the logits
    and is `head_dim ** -0.5` where None. `rope` None leaves positions out. With `sinks` each query head has one more logit,
    learnt, which takes weight and brings no value (arXiv:2309.17453).
    """

    rope: Rope | None = Rope()
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"The window is {self.window}; it counts the token itself, so the least is 1.")
        _check_positive("scale", self.scale)
        _check_positive("softcap", self.softcap)


@dataclasses.dataclass(frozen=True)
class Config:
    """A decoder-only language model of grouped-query attention and gated MLPs.

    `attention` is a repeating pattern over the layers: layer i attends as `attention[i % len(attention)]`.
    """

    vocab_size: int
    num_layers: int
    model_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    attention: tuple[Attention, ...] = (Attention(),)
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norm_eps: float = 1e-5
    qk_norm: bool = False
    post_norms: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = True
    embedding_scale: float | None = None
    logit_softcap: float | None = None

    def __post_init__(self):
        sizes = ("vocab_size", "num_layers", "model_dim", "mlp_dim", "num_heads", "num_kv_heads", "head_dim", "context_length")
        for name in sizes:
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a whole number of at least 1.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads do not divide over {self.num_kv_heads} KV heads; "
                "num_heads must be a multiple of num_kv_heads."
            )
        object.__setattr__(self, "attention", tuple(self.attention))
        if not self.attention:
            raise ValueError("attention is empty; it needs at least one record.")
        for record in self.attention:
            if not isinstance(record, Attention):
                raise ValueError(f"attention holds {record!r}; each must be a gqa_jax.Attention.")
        if self.head_dim % 2 and any(attention.rope for attention in self.attention):
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding turns pairs of lanes, so it must be even.")
        if self.activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"activation is {self.activation!r}; known are 'silu' and 'gelu_tanh'.")
        _check_positive("logit_softcap", self.logit_softcap)

    @property
    def group_size(self) -> int:
        """How many query heads each KV head serves: G."""
        return self.num_heads // self.num_kv_heads

    @property
    def kind(self) -> Literal["MHA", "GQA", "MQA"]:
        """Multi-head, grouped-query or multi-query attention."""
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else "GQA"

    def layer_attention(self, layer: int) -> Attention:
        """How layer `layer` attends."""
        return self.attention[layer % len(self.attention)]
