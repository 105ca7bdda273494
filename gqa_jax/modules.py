"""What the modules of Flax NNX and Linen share: their config, parameters and call, and the way to and from Flax's own layers.

A `layer` is either module: it has the options of `gqa_jax.nnx.GroupedQueryAttention` as attributes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from gqa_jax.cache import KVCache
from gqa_jax.config import Config
from gqa_jax.decoder import axis_sizes
from gqa_jax.layer import Dropout, attention_axes, self_attention
from gqa_jax.sharding import placement_of

Initializer = Callable[[Array, Sequence[int], Any], Array]
Parameters = dict[str, Array]

lecun_normal = jax.nn.initializers.lecun_normal()

# What Flax calls each parameter.
THEIRS = {
    "q": "query/kernel",
    "k": "key/kernel",
    "v": "value/kernel",
    "o": "out/kernel",
    "q_bias": "query/bias",
    "k_bias": "key/bias",
    "v_bias": "value/bias",
    "o_bias": "out/bias",
}


def config_of(layer: Any) -> Config:
    """Returns the config of a decoder that is this one layer and nothing else.

    Raises:
        ValueError: head counts that do not divide, or a size or rate out of range.
    """
    width = layer.head_dim
    if width is None:
        if layer.in_features % layer.num_heads:
            raise ValueError(
                f"in_features is {layer.in_features}, which does not divide over {layer.num_heads} heads; give head_dim."
            )
        width = layer.in_features // layer.num_heads
    if not 0 <= layer.dropout_rate < 1:
        raise ValueError(f"dropout_rate is {layer.dropout_rate}; it must be at least 0 and less than 1.")
    return Config(
        vocab_size=1,
        num_layers=1,
        model_dim=layer.in_features,
        mlp_dim=1,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_heads if layer.num_kv_heads is None else layer.num_kv_heads,
        head_dim=width,
        context_length=1,
        attention=(layer.attention,),
        norm_eps=layer.norm_eps,
        qk_norm=layer.qk_norm,
        qkv_bias=layer.use_bias,
        out_bias=layer.use_bias if layer.use_out_bias is None else layer.use_out_bias,
    )


def parameter_axes(config: Config) -> dict[str, str]:
    """Returns the parameters of a layer by name, each with the letters of its axes."""
    return {name.removeprefix("attention."): axes for name, axes in attention_axes(config).items()}


def parameter_shape(config: Config, name: str) -> tuple[int, ...]:
    """Returns the shape of one parameter."""
    sizes = axis_sizes(config)
    return tuple(sizes[axis] for axis in parameter_axes(config)[name].split())


def parameter_dtype(layer: Any, name: str) -> DTypeLike:
    """Returns the dtype of one parameter; norms are float32."""
    return jnp.float32 if name.endswith("norm") else layer.param_dtype


def cache_dtype(layer: Any) -> DTypeLike:
    """Returns the dtype of a layer's cache: that of its computation, or float32 where that is wider."""
    dtype = jnp.dtype(layer.dtype or layer.param_dtype)
    return jnp.float32 if dtype.itemsize > 4 else dtype


def new_parameter(key: Array, name: str, layer: Any, kernel_init: Initializer) -> Array:
    """Returns a new parameter: norms one, biases and sinks zero, matrices as `kernel_init` makes them of (inputs, outputs)."""
    config = config_of(layer)
    shape, dtype = parameter_shape(config, name), parameter_dtype(layer, name)
    if name not in ("q", "k", "v", "o"):
        return (jnp.ones if name.endswith("norm") else jnp.zeros)(shape, dtype)
    size, width = int(np.prod(shape)), config.model_dim
    return kernel_init(key, (size // width, width) if name == "o" else (width, size // width), dtype).reshape(shape)


def run(
    layer: Any,
    parameters: Parameters,
    x: Float[Array, "B T D"],
    cache: KVCache | None,
    count: Integer[Array, " B"] | None,
    segments: Integer[Array, "B T"] | None,
    dropout_key: Array | None,
) -> Any:
    """Returns the output of a layer; with a cache, and the cache."""
    dtype = layer.dtype or np.promote_types(x.dtype, layer.param_dtype)
    weights = {
        f"attention.{name}": weight if name.endswith("norm") else weight.astype(dtype) for name, weight in parameters.items()
    }
    dropout = None if dropout_key is None or not layer.dropout_rate else Dropout(dropout_key, layer.dropout_rate)
    y, cache = self_attention(
        x.astype(dtype),
        weights,
        cache,
        config_of(layer),
        count=count,
        segments=segments,
        dropout=dropout,
        placement=placement_of(layer.mesh),
    )
    return y if cache is None else (y, cache)


def from_theirs(theirs: Mapping[str, Array], config: Config) -> Parameters:
    """Returns our parameters from those of a layer of Flax, such as "query/kernel".

    Raises:
        ValueError: a layer of ours that does what Flax's does not, or a parameter that is missing, left over, as under
            `normalize_qk`, or of another shape.
    """
    _check_plain(config)
    wanted = {THEIRS[name]: name for name in parameter_axes(config)}
    if set(theirs) != set(wanted):
        raise ValueError(
            f"Flax's layer has the parameters {', '.join(sorted(theirs))}; this one takes {', '.join(sorted(wanted))}. Biases "
            "are there by use_bias=True; the norms of normalize_qk have no counterpart here."
        )
    for name, ours in wanted.items():
        if theirs[name].size != int(np.prod(parameter_shape(config, ours))):
            raise ValueError(
                f"{name} has shape {theirs[name].shape}, which is not {parameter_shape(config, ours)}: heads, widths, and what "
                "comes in and goes out must be the same in both layers."
            )
    return {ours: theirs[name].reshape(parameter_shape(config, ours)) for name, ours in wanted.items()}


def to_theirs(parameters: Parameters, config: Config) -> Parameters:
    """Returns the parameters of Flax's own layer; where it has a bias and ours has none, zeros.

    Raises:
        ValueError: what Flax's layer does not have: a rotary embedding, window, scale, softcap, sinks or norm of queries.
    """
    _check_plain(config)
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    biased = config.qkv_bias or config.out_bias
    theirs = {}
    for name, path in THEIRS.items():
        if name.endswith("_bias"):
            shape = (heads[name[0]], config.head_dim) if name[0] in heads else (config.model_dim,)
            if biased:
                theirs[path] = (
                    parameters[name].reshape(shape) if name in parameters else jnp.zeros(shape, parameters["q"].dtype)
                )
        elif name == "o":
            theirs[path] = parameters[name].reshape(config.num_heads, config.head_dim, config.model_dim)
        else:
            theirs[path] = parameters[name].reshape(config.model_dim, heads[name], config.head_dim)
    return theirs


def _check_plain(config: Config) -> None:
    """Refuses what Flax's own layers do not do."""
    how = config.attention[0]
    extra = [name for name in ("rope", "window", "scale", "softcap", "sinks") if getattr(how, name)]
    if extra := extra + (["qk_norm"] if config.qk_norm else []):
        raise ValueError(
            f"The layer has {', '.join(extra)}; Flax's own has no such thing, so its outputs would differ. A layer with "
            "attention=Attention(rope=None) is like Flax's."
        )
