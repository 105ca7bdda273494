"""The decoder: one pure function for training, prefill, chunks and single tokens.

`param_axes` is the one list of weights. Initialisation, loading, sharding and byte counts read it; nothing repeats a shape.
"""

import math
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from gqa_jax import cache as kv
from gqa_jax.attention import Reading, attend, attend_filled, causal_mask
from gqa_jax.cache import KVCache
from gqa_jax.config import Attention, Config
from gqa_jax.rope import angles, rotate

Params = dict[str, Any]


def param_axes(config: Config) -> Params:
    """Returns the decoder's weights by name, each with the letters of its axes, as a tree of the parameters' shape.

    D model width, V vocabulary, F MLP width, K KV heads, G query heads of each, H head width.

    >>> tiny = Config(vocab_size=7, num_layers=1, model_dim=6, mlp_dim=5, num_heads=4, num_kv_heads=2, head_dim=2,
    ...               context_length=8)
    >>> param_axes(tiny)["layers"][0]["attention.q"]
    'D K G H'
    """
    layer = {
        "attention.norm": "D",
        "attention.q": "D K G H",
        "attention.k": "D K H",
        "attention.v": "D K H",
        "attention.o": "K G H D",
        "mlp.norm": "D",
        "mlp.gate": "D F",
        "mlp.up": "D F",
        "mlp.down": "F D",
    }
    if config.qkv_bias:
        layer |= {"attention.q_bias": "K G H", "attention.k_bias": "K H", "attention.v_bias": "K H"}
    if config.out_bias:
        layer |= {"attention.o_bias": "D"}
    if config.mlp_bias:
        layer |= {"mlp.gate_bias": "F", "mlp.up_bias": "F", "mlp.down_bias": "D"}
    if config.qk_norm:
        layer |= {"attention.q_norm": "H", "attention.k_norm": "H"}
    if config.post_norms:
        layer |= {"attention.post_norm": "D", "mlp.post_norm": "D"}
    top = {"embedding": "V D", "norm": "D"} | ({} if config.tied_head else {"head": "V D"})
    return {**top, "layers": tuple(dict(layer) for _ in range(config.num_layers))}


def axis_sizes(config: Config) -> dict[str, int]:
    """Returns how long each axis of the weights is."""
    return {
        "V": config.vocab_size,
        "D": config.model_dim,
        "F": config.mlp_dim,
        "K": config.num_kv_heads,
        "G": config.group_size,
        "H": config.head_dim,
    }


def param_shapes(config: Config, dtype: DTypeLike = jnp.float32) -> Params:
    """Returns the shape and dtype of every weight; norms are float32 whatever `dtype` the rest has."""
    sizes = axis_sizes(config)

    def shape(path, axes):
        own = jnp.float32 if path[-1].key.endswith("norm") else dtype
        return jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in axes.split()), own)

    return jax.tree_util.tree_map_with_path(shape, param_axes(config))


def init_params(config: Config, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Returns random weights: norms one, biases zero, matrices normal with variance 1 / (width of what they read)."""
    shapes = param_shapes(config, dtype)
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    axes = jax.tree.leaves(param_axes(config))
    keys = jax.random.split(key, len(leaves))

    def make(path, leaf, letters, key):
        name = path[-1].key
        if name.endswith("norm"):
            return jnp.ones(leaf.shape, leaf.dtype)
        if name.endswith("bias"):
            return jnp.zeros(leaf.shape, leaf.dtype)
        read = {"attention.o": config.num_heads * config.head_dim, "mlp.down": config.mlp_dim}
        spread = math.sqrt(1 / read.get(name, config.model_dim))
        return (spread * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)

    return tree.unflatten(make(path, leaf, a, key) for (path, leaf), a, key in zip(leaves, axes, keys, strict=True))


@overload
def forward(params: Params, tokens: Array, cache: KVCache, config: Config) -> tuple[Array, KVCache]: ...
@overload
def forward(params: Params, tokens: Array, cache: None, config: Config) -> tuple[Array, None]: ...
def forward(
    params: Params, tokens: Int[Array, "B T"], cache: KVCache | None, config: Config
) -> tuple[Float[Array, "B T V"], KVCache | None]:
    """Returns the float32 logits that follow each token, and the cache with the tokens in it.

    With a cache the tokens continue what it holds, any number at a time, at a position of its own for each row; without one
    (None) they are whole texts, as in training. Any split of a text into chunks gives the logits of one pass. An id outside
    the vocabulary makes its row NaN.

    Raises:
        ValueError: tokens that do not fit into the cache, or parameters or a cache that are not the config's.
    """
    x, cache = hidden_states(params, tokens, cache, config)
    return logits(params, x, config), cache


def hidden_states(
    params: Params, tokens: Int[Array, "B T"], cache: KVCache | None, config: Config
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    """Returns what the last layer leaves for each token, after the final norm; `logits` turns it into scores."""
    _check(params, tokens, cache, config)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    if cache is None:
        positions = jnp.broadcast_to(positions, tokens.shape)
    else:
        kv.check_room(cache, tokens.shape[1])
        positions = positions + cache.length[:, None]
    x = params["embedding"].at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    if config.embedding_scale is not None:
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
    for layer, weights in enumerate(params["layers"]):
        mixed, cache = _attention(_norm(x, weights["attention.norm"], config), weights, positions, cache, layer, config)
        x = x + (_norm(mixed, weights["attention.post_norm"], config) if config.post_norms else mixed)
        made = _mlp(_norm(x, weights["mlp.norm"], config), weights, config)
        x = x + (_norm(made, weights["mlp.post_norm"], config) if config.post_norms else made)
    if cache is not None:
        cache = kv.advance(cache, tokens.shape[1])
    return _norm(x, params["norm"], config), cache


def _check(params: Params, tokens: Array, cache: KVCache | None, config: Config) -> None:
    """Refuses what would run all the same, or fail far from its cause."""
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens have shape {tokens.shape} and dtype {tokens.dtype}; they must be integers, batch by length.")
    heads = (config.num_kv_heads, config.group_size, config.head_dim)
    have = (len(params["layers"]), *params["layers"][0]["attention.q"].shape[1:])
    if have != (config.num_layers, *heads):
        raise ValueError(f"The parameters have (layers, K, G, H) = {have}, the config {(config.num_layers, *heads)}.")
    if cache is not None and (len(cache.k), cache.k[0].shape[0]) != (config.num_layers, tokens.shape[0]):
        raise ValueError(
            f"The cache has {len(cache.k)} layers and {cache.k[0].shape[0]} rows; "
            f"the config has {config.num_layers} layers and there are {tokens.shape[0]} rows of tokens."
        )


def logits(params: Params, x: Float[Array, "B T D"], config: Config) -> Float[Array, "B T V"]:
    """Returns the float32 score of every token of the vocabulary."""
    head = params["embedding"] if config.tied_head else params["head"]
    scores = jnp.einsum("BTD,VD->BTV", x, head, preferred_element_type=jnp.float32)
    return scores if config.logit_softcap is None else config.logit_softcap * jnp.tanh(scores / config.logit_softcap)


def _norm(x: Float[Array, "*any D"], weight: Float[Array, " D"], config: Config) -> Float[Array, "*any D"]:
    """Root-mean-square norm (arXiv:1910.07467), in float32."""
    wide = x.astype(jnp.float32)
    size = jnp.square(wide).mean(axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(size + config.norm_eps) * weight).astype(x.dtype)


def _attention(
    x: Float[Array, "B T D"],
    weights: dict[str, Array],
    positions: Int[Array, "B T"],
    cache: KVCache | None,
    layer: int,
    config: Config,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    how = config.layer_attention(layer)
    q, k, v = _project(x, weights, positions, how, config)
    reading = Reading(config.head_dim**-0.5 if how.scale is None else how.scale, how.window, how.softcap)
    if cache is None:
        mask = causal_mask(positions[:1], positions[:1], how.window)[:, None, None]
        part = attend(q, k, v, mask, scale=reading.scale, softcap=reading.softcap)
    else:
        cache = kv.write(cache, layer, k, v)
        part = attend_filled(q, cache.k[layer], cache.v[layer], positions, cache.length + jnp.int32(x.shape[1]), reading)
    out = part.out.astype(x.dtype).transpose(0, 3, 1, 2, 4)
    # BTKGH, KGHD -> BTD: an einsum would contract in another order than the weight's own, and transpose it.
    return _add_bias(jnp.tensordot(out, weights["attention.o"], axes=3), weights, "attention.o_bias"), cache


def _project(
    x: Float[Array, "B T D"], weights: dict[str, Array], positions: Int[Array, "B T"], how: Attention, config: Config
) -> tuple[Float[Array, "B K G T H"], Float[Array, "B K T H"], Float[Array, "B K T H"]]:
    # The products keep the order of the weights' axes and only their small results are transposed: asked for head-major
    # results, XLA would transpose the weights.
    q = _add_bias(jnp.einsum("BTD,DKGH->BTKGH", x, weights["attention.q"]), weights, "attention.q_bias")
    k = _add_bias(jnp.einsum("BTD,DKH->BTKH", x, weights["attention.k"]), weights, "attention.k_bias")
    v = _add_bias(jnp.einsum("BTD,DKH->BTKH", x, weights["attention.v"]), weights, "attention.v_bias")
    if config.qk_norm:
        q, k = _norm(q, weights["attention.q_norm"], config), _norm(k, weights["attention.k_norm"], config)
    q, k, v = q.transpose(0, 2, 3, 1, 4), k.swapaxes(1, 2), v.swapaxes(1, 2)
    if how.rope is not None:
        turn = angles(how.rope, config.head_dim, positions)
        q = rotate(q, turn[:, None, None], interleaved=how.rope.interleaved)
        k = rotate(k, turn[:, None], interleaved=how.rope.interleaved)
    return q, k, v


def _add_bias(x: Array, weights: dict[str, Array], name: str) -> Array:
    return x + weights[name] if name in weights else x


def _mlp(x: Float[Array, "B T D"], weights: dict[str, Array], config: Config) -> Float[Array, "B T D"]:
    """A gated linear unit (arXiv:2002.05202)."""
    gate = _add_bias(jnp.einsum("BTD,DF->BTF", x, weights["mlp.gate"]), weights, "mlp.gate_bias")
    up = _add_bias(jnp.einsum("BTD,DF->BTF", x, weights["mlp.up"]), weights, "mlp.up_bias")
    opened = jax.nn.silu(gate) if config.activation == "silu" else jax.nn.gelu(gate, approximate=True)
    return _add_bias(jnp.einsum("BTF,FD->BTD", opened * up, weights["mlp.down"]), weights, "mlp.down_bias")
