"""One attention layer: projections, rotary turn, the read of the cache and of the new tokens, and the way out.

The decoder runs it for each of its layers, and the Flax modules wrap it. Weights go by the names of `param_axes`; on a mesh
the code below is what one device does with its own heads, under `jax.shard_map`.
"""

import dataclasses
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Integer

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """A part `rate` of the attention's weights is left out, as `key` draws (arXiv:1207.0580)."""

    key: Array
    rate: float = dataclasses.field(metadata={"static": True})


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


def self_attention(
    x: Float[Array, "B T D"],
    weights: Weights,
    cache: KVCache | None,
    config: Config,
    *,
    count: Integer[Array, " B"] | None = None,
    segments: Integer[Array, "B T"] | None = None,
    dropout: Dropout | None = None,
    placement: Placement | None = None,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    """Returns what `attention` does for a layer that stands alone, checked, and the cache with the tokens counted.

    On a mesh the weights come whole; they are padded where their heads do not divide.

    Raises:
        ValueError: what is not of the config's shape, does not fit into the cache, or does not go with one.
    """
    if x.ndim != 3 or x.shape[2] != config.model_dim:
        raise ValueError(f"x has shape {x.shape}; it must be batch by length by in_features, which is {config.model_dim}.")
    if dropout is not None and cache is not None:
        raise ValueError("dropout_key and a cache were given; dropout is for training without a cache.")
    kv.check_batch(x.shape[0], placement)
    if cache is not None:
        check_cache(cache, x.shape[0], config, placement)
    count, segments = check_new(x.shape[0], x.shape[1], cache, count, segments)
    if placement is None:
        return _alone(x, weights, count, segments, cache, dropout, config)
    return _alone_on_mesh(x, weights, count, segments, cache, dropout, config, placement)


def _alone(x, weights, count, segments, cache, dropout, config, placement=None):
    tokens = place_tokens(x.shape[0], x.shape[1], count, cache, segments)
    y, cache = attention(x, weights, tokens, cache, 0, config, placement, dropout)
    return y, None if cache is None else dataclasses.replace(cache, length=cache.length + count)


@partial(jax.jit, static_argnames=("config", "placement"))
def _alone_on_mesh(x, weights, count, segments, cache, dropout, config, placement):
    axes, rows = attention_axes(config), placement.spec("B")

    def run(x, weights, count, segments, cache, key):
        # Each device has heads and rows of its own, and so a key of its own.
        own = None if key is None else Dropout(jax.random.fold_in(key, placement.device()), dropout.rate)
        return _alone(x, weights, count, segments, cache, own, config, placement)

    kept, texts = None if cache is None else kv.cache_specs(cache), None if segments is None else rows
    specs = {name: placement.spec(axes[name]) for name in weights}
    return jax.shard_map(
        run,
        mesh=placement.mesh,
        in_specs=(rows, specs, rows, texts, kept, PartitionSpec()),
        out_specs=(rows, kept),
    )(
        placement.moved(x, "B T D"),
        {name: placement.padded_to_fit(weight, axes[name]) for name, weight in weights.items()},
        placement.moved(count, "B"),
        None if segments is None else placement.moved(segments, "B T"),
        cache,
        None if dropout is None else dropout.key,
    )


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
        kept = drawn.astype(jnp.float32) / np.float32(1 - dropout.rate)
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


def check_new(
    rows: int, length: int, cache: KVCache | None, count: Array | None, segments: Array | None
) -> tuple[Int[Array, " B"], Int[Array, "B T"] | None]:
    """Returns `count` and `segments` of new tokens as int32, once it is sure that they can be.

    Raises:
        ValueError: counts that are not one for each row, from 0 to `length`; more than there is room for; segments that are
            not one for each token, or beside a cache.
    """
    if count is not None:
        count = jnp.asarray(count)
        _check_count(count, rows, length)
    if segments is not None:
        segments = jnp.asarray(segments)
        if cache is not None:
            raise ValueError("segments and a cache were given; a cache holds one text in each row, so leave one of them out.")
        _check_segments(segments, (rows, length))
        segments = jnp.asarray(segments, jnp.int32)
    if cache is not None:
        kv.check_room(cache, length if count is None else count)
    most = jnp.full(rows, length, jnp.int32)
    return most if count is None else jnp.clip(jnp.asarray(count, jnp.int32), 0, most), segments


def check_cache(cache: KVCache, rows: int, config: Config, placement: Placement | None) -> None:
    """Refuses a cache that is not the config's.

    Raises:
        TypeError: no cache.
        ValueError: other layers, heads, rows or windows, or another mesh.
    """
    if not isinstance(cache, KVCache):
        raise TypeError(f"The cache is a {type(cache).__name__}; it must be what init_cache made or an earlier call returned.")
    if cache.placement != placement:
        raise ValueError(
            f"The parameters lie on {placement or 'no mesh'} and the cache on {cache.placement or 'no mesh'}; make the cache "
            "with gqa_jax.init_cache(..., mesh=params['placement'])."
        )
    heads = kv.cache_shape(config, 1, 1, placement)[1::2]
    have = (len(cache.k), *cache.k[0].shape[:2], cache.k[0].shape[3])
    want = (config.num_layers, rows, *heads)
    if have != want:
        raise ValueError(f"The cache has (layers, rows, KV heads, width) = {have}; the config and what is new have {want}.")
    for layer, kept in enumerate(cache.windows):
        own = config.layer_attention(layer).window
        if kept is not None and (own is None or own > kept):
            raise ValueError(
                f"The cache keeps the last {kept} tokens in layer {layer}; the config sees {own or 'all'} of them."
            )


def _check_count(count: Array, rows: int, most: int) -> None:
    if count.shape != (rows,) or not jnp.issubdtype(count.dtype, jnp.integer):
        raise ValueError(
            f"count has shape {count.shape} and dtype {count.dtype}; it must be one integer for each of {rows} rows."
        )
    if not isinstance(count, Tracer) and not (count.min() >= 0 and count.max() <= most):
        raise ValueError(f"count goes from {count.min()} to {count.max()}; of {most} tokens a row keeps from 0 to {most}.")


def _check_segments(segments: Array, shape: tuple[int, int]) -> None:
    if segments.shape != shape or not jnp.issubdtype(segments.dtype, jnp.integer):
        raise ValueError(
            f"segments has shape {segments.shape} and dtype {segments.dtype}; it must be one integer for each of the tokens, "
            f"{shape}."
        )
