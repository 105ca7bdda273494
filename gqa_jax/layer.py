"""One attention layer: projections, rotary turn, the read of the cache and of the new tokens, and the way out.

The decoder runs it for each of its layers, and the Flax modules wrap it. Weights go by the names of `param_axes`; on a mesh
the code below is what one device does with its own heads, under `jax.shard_map`.
"""

from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from gqa_jax import cache as kv
from gqa_jax.attention import Part, Reading, add_sinks, attend, attend_filled, causal_mask, merge
from gqa_jax.cache import KVCache
from gqa_jax.config import Attention, Config
from gqa_jax.rope import angles, rotate
from gqa_jax.sharding import Placement

Weights = dict[str, Array]


def attention_axes(config: Config, layer: int = 0) -> dict[str, str]:
    """Returns the weights of one attention layer by name, each with the letters of its axes."""
    axes = {"attention.q": "D K G H", "attention.k": "D K H", "attention.v": "D K H", "attention.o": "K G H D"}
    if config.qkv_bias:
        axes |= {"attention.q_bias": "K G H", "attention.k_bias": "K H", "attention.v_bias": "K H"}
    if config.out_bias:
        axes |= {"attention.o_bias": "D"}
    if config.qk_norm:
        axes |= {"attention.q_norm": "H", "attention.k_norm": "H"}
    if config.layer_attention(layer).sinks:
        axes |= {"attention.sinks": "K G"}
    return axes


class Tokens(NamedTuple):
    """What is known of new tokens: where they stand in their text, how many of each row are kept, and which text each is of.

    `texts` is None where each row is one text.
    """

    positions: Int[Array, "B T"]
    count: Int[Array, " B"]
    texts: Int[Array, "B T"] | None = None


class Dropout(NamedTuple):
    """A part `rate` of the attention's weights is left out, as `key` draws (arXiv:1207.0580)."""

    key: Key[Array, ""]
    rate: float


def place_tokens(
    batch: int, length: int, count: Int[Array, " B"], cache: KVCache | None, segments: Int[Array, "B T"] | None
) -> Tokens:
    """Says where new tokens stand: behind what the cache holds, or in the text of their row that their segment is."""
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    if cache is not None:
        return Tokens(index + cache.length[:, None], count)
    if segments is None:
        return Tokens(index, count)
    begins = jnp.concatenate([jnp.ones((batch, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    start = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    return Tokens(index - start, count, jnp.cumsum(begins, axis=1, dtype=jnp.int32))


def attention(
    x: Float[Array, "B T D"],
    weights: Weights,
    tokens: Tokens,
    cache: KVCache | None,
    layer: int,
    config: Config,
    placement: Placement | None = None,
    dropout: Dropout | None = None,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    """Returns what each token learns from those before it, and the cache with the new ones in it, not yet counted."""
    how = config.layer_attention(layer)
    q, k, v = _project(x, weights, tokens.positions, how, config)
    reading = Reading(config.head_dim**-0.5 if how.scale is None else how.scale, how.window, how.softcap)
    if cache is None:
        part = _attend_new(q, k, v, tokens, reading, dropout)
    else:
        part, cache = _attend_cached(q, k, v, tokens, cache, layer, reading)
    if how.sinks:
        part = add_sinks(part, weights["attention.sinks"])
    out = part.out.astype(x.dtype)
    real = None if placement is None else placement.is_real(config, *out.shape[1:3])
    if real is not None:
        # A padded query would still read; nothing may come of it, so that no gradient brings its weights to life.
        out = jnp.where(real[:, :, None, None], out, jnp.zeros((), out.dtype))
    # BTKGH, KGHD -> BTD: an einsum would contract in another order than the weight's own, and transpose it.
    mixed = jnp.tensordot(out.transpose(0, 3, 1, 2, 4), weights["attention.o"], axes=3)
    return add_bias(mixed if placement is None else placement.total(mixed), weights, "attention.o_bias"), cache


def norm(x: Float[Array, "*any D"], weight: Float[Array, " D"], config: Config) -> Float[Array, "*any D"]:
    """Root-mean-square norm (arXiv:1910.07467), in float32 or wider."""
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    size = jnp.square(wide).mean(axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(size + config.norm_eps) * weight.astype(wide.dtype)).astype(x.dtype)


def add_bias(x: Array, weights: Weights, name: str) -> Array:
    """Adds a bias where the model has one."""
    return x + weights[name] if name in weights else x


def _project(
    x: Float[Array, "B T D"], weights: Weights, positions: Int[Array, "B T"], how: Attention, config: Config
) -> tuple[Float[Array, "B K G T H"], Float[Array, "B K T H"], Float[Array, "B K T H"]]:
    # The products keep the order of the weights' axes and only their small results are transposed: asked for head-major
    # results, XLA would transpose the weights.
    q = add_bias(jnp.einsum("BTD,DKGH->BTKGH", x, weights["attention.q"]), weights, "attention.q_bias")
    k = add_bias(jnp.einsum("BTD,DKH->BTKH", x, weights["attention.k"]), weights, "attention.k_bias")
    v = add_bias(jnp.einsum("BTD,DKH->BTKH", x, weights["attention.v"]), weights, "attention.v_bias")
    if config.qk_norm:
        q, k = norm(q, weights["attention.q_norm"], config), norm(k, weights["attention.k_norm"], config)
    q, k, v = q.transpose(0, 2, 3, 1, 4), k.swapaxes(1, 2), v.swapaxes(1, 2)
    if how.rope is not None:
        turn = angles(how.rope, config.head_dim, positions)
        q = rotate(q, turn[:, None, None], interleaved=how.rope.interleaved)
        k = rotate(k, turn[:, None], interleaved=how.rope.interleaved)
    return q, k, v


def _attend_new(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    tokens: Tokens,
    reading: Reading,
    dropout: Dropout | None,
) -> Part:
    """Reads the new tokens alone, each its own text."""
    index = jnp.arange(q.shape[3], dtype=jnp.int32)[None]
    mask = causal_mask(index, index, reading.window)
    if tokens.texts is not None:
        mask = mask & (tokens.texts[:, :, None] == tokens.texts[:, None, :])
    kept = None
    if dropout is not None:
        drawn = jax.random.bernoulli(dropout.key, 1 - dropout.rate, (*q.shape[:4], k.shape[2]))
        kept = drawn / np.float32(1 - dropout.rate)
    return attend(q, k, v, mask[:, None, None], scale=reading.scale, softcap=reading.softcap, kept=kept)


def _attend_cached(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    tokens: Tokens,
    cache: KVCache,
    layer: int,
    reading: Reading,
) -> tuple[Part, KVCache]:
    """Reads what the cache holds and the new tokens, and writes these; what is read is what is kept, as it is rounded."""
    positions, count, _ = tokens
    if k.shape[2] == 1 or not kv.is_ring(cache, layer):
        cache = kv.put(cache, layer, k, v, count)
        return _read(q, positions, cache.length + count, cache, layer, reading), cache
    # The last of many tokens push out what the first still see: read the old ones before they go, and the new ones apart.
    old = _read(q, positions, cache.length, cache, layer, reading)
    k, v = k.astype(cache.k[layer].dtype), v.astype(cache.v[layer].dtype)
    new = attend_filled(q, k, v, positions - cache.length[:, None], count, reading)
    return merge(old, Part(*new)), kv.put(cache, layer, k, v, count)


def _read(
    q: Float[Array, "B K G T H"],
    positions: Int[Array, "B T"],
    filled: Int[Array, " B"],
    cache: KVCache,
    layer: int,
    reading: Reading,
) -> Part:
    first, stride = kv.stripe(cache)
    filled = jnp.minimum(filled, cache.capacity)  # What did not fit is not there.
    if stride == 1:
        return attend_filled(q, cache.k[layer], cache.v[layer], positions, filled, reading)
    # The slots are split over a group: each device reads its own for all queries of the group, and each gets back, for its
    # own queries, what every device has read.
    assert cache.placement is not None
    group = cache.placement.group
    q = jax.lax.all_gather(q, group, axis=2, tiled=True)
    reading = reading._replace(stride=stride)
    out, lse = attend_filled(q, cache.k[layer], cache.v[layer], positions, filled, reading, first)
    found = jnp.concatenate([out, lse[..., None]], axis=-1)
    found = found.reshape(*found.shape[:2], stride, -1, *found.shape[3:])
    found = jax.lax.all_to_all(found, group, split_axis=2, concat_axis=2)
    parts = [Part(found[:, :, i, ..., :-1], found[:, :, i, ..., -1]) for i in range(stride)]
    return reduce(merge, parts)
