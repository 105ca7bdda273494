"""The KV cache: an immutable pytree that a decode loop takes and returns.

Keys and values are head-major and kept for each layer apart, `"B K S H"`. It is the one form that XLA updates in place
without cache-sized copies on CPU, GPU and TPU alike. Slot s of a row holds the key of position s; `length` says how many are
filled in each row, so rows of different lengths need no padding mask.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from gqa_jax.config import Config

DTYPES = ("float32", "bfloat16", "float16")


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """One `k` and one `v` for each layer, and how many slots of each row are filled."""

    k: tuple[Float[Array, "B K S H"], ...]
    v: tuple[Float[Array, "B K S H"], ...]
    length: Int[Array, " B"]

    @property
    def capacity(self) -> int:
        """How many tokens each row has room for: S."""
        return self.k[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(x.nbytes for x in (*self.k, *self.v))

    @property
    def overflowed(self) -> Bool[Array, " B"]:
        """Marks rows to which more was written inside `jit` than they have room for; what did not fit was dropped."""
        return self.length > self.capacity


def init_cache(config: Config, batch: int, capacity: int, dtype: DTypeLike = jnp.float32) -> KVCache:
    """Returns an empty cache with room for `capacity` tokens in each of `batch` rows.

    Raises:
        ValueError: a size below one, or a dtype other than float32, bfloat16 and float16.
    """
    for name, size in (("batch", batch), ("capacity", capacity)):
        if size < 1:
            raise ValueError(f"The cache's {name} is {size}; it must be at least 1.")
    if jnp.dtype(dtype).name not in DTYPES:
        raise ValueError(f"The cache's dtype is {jnp.dtype(dtype).name}; it must be one of {', '.join(DTYPES)}.")
    shape = (batch, config.num_kv_heads, capacity, config.head_dim)
    # Each array owns its buffer, or donating the cache would donate one buffer many times.
    k, v = (tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)) for _ in range(2))
    return KVCache(k, v, jnp.zeros(batch, jnp.int32))


def check_room(cache: KVCache, new_tokens: int) -> None:
    """Refuses `new_tokens` more tokens in each row where they do not fit; under `jit` it can refuse only the impossible.

    Raises:
        ValueError: the fullest row has no room for them.
    """
    traced = isinstance(cache.length, Tracer)
    fullest = 0 if traced else int(cache.length.max())
    if fullest > cache.capacity:
        raise ValueError(
            f"A row of the cache was given {fullest} tokens for its {cache.capacity} slots inside jit, and what did not fit is "
            "lost. Go back with gqa_jax.rewind to what the row held before, then make room with gqa_jax.grow."
        )
    if fullest + new_tokens > cache.capacity:
        raise ValueError(
            f"{new_tokens} new tokens do not fit: a row of the cache already holds {fullest} of its {cache.capacity} slots. "
            "Make the cache with a larger capacity, or enlarge it with gqa_jax.grow(cache, capacity)."
        )


def write(cache: KVCache, layer: int, k: Float[Array, "B K T H"], v: Float[Array, "B K T H"]) -> KVCache:
    """Puts T new tokens of one layer behind the `length` tokens of each row, rounded to the cache's dtype.

    `length` stays as it is until `advance`, when every layer has been written. Rows that lack the room keep what they hold
    (`lax.dynamic_update_slice` alone would slide back over it), and `overflowed` marks them after `advance`.

    Raises:
        ValueError: shapes that differ from the cache's, or more tokens than there is room for.
        TypeError: numbers that are not floating point.
    """
    if not 0 <= layer < len(cache.k):
        raise ValueError(f"The layer is {layer}; the cache has {len(cache.k)}, from 0 on.")
    batch, kv_heads, _, head_dim = cache.k[layer].shape
    for name, new in (("k", k), ("v", v)):
        if new.ndim != 4 or (new.shape[0], new.shape[1], new.shape[3]) != (batch, kv_heads, head_dim):
            raise ValueError(
                f"{name} has shape {new.shape}; the cache takes ({batch}, {kv_heads}, tokens, {head_dim}): "
                f"{batch} rows, {kv_heads} KV heads of width {head_dim}."
            )
        if not jnp.issubdtype(new.dtype, jnp.floating):
            raise TypeError(f"{name} has dtype {new.dtype}; the cache takes floating point, kept as {cache.k[layer].dtype}.")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"k holds {k.shape[2]} tokens and v {v.shape[2]}; there must be as many of both.")
    check_room(cache, k.shape[2])

    def put(layers, new):
        row = jax.vmap(_put_row)(layers[layer], new.astype(layers[layer].dtype), cache.length)
        return (*layers[:layer], row, *layers[layer + 1 :])

    return dataclasses.replace(cache, k=put(cache.k, k), v=put(cache.v, v))


def _put_row(slots: Float[Array, "K S H"], new: Float[Array, "K T H"], length: Int[Array, ""]) -> Float[Array, "K S H"]:
    fits = length + new.shape[1] <= slots.shape[1]
    start = jnp.minimum(length, slots.shape[1] - new.shape[1])
    kept = lax.dynamic_slice_in_dim(slots, start, new.shape[1], axis=1)
    return lax.dynamic_update_slice_in_dim(slots, jnp.where(fits, new, kept), start, axis=1)


def advance(cache: KVCache, new_tokens: int) -> KVCache:
    """Counts `new_tokens` more tokens in each row."""
    return dataclasses.replace(cache, length=cache.length + jnp.int32(new_tokens))


def rewind(cache: KVCache, length: Int[Array, " B"]) -> KVCache:
    """Forgets all but the first `length` tokens of each row: after right padding, or to go on from a common prefix.

    A row that has `overflowed` lacks what did not fit: go back to what it held before.
    """
    kept = jnp.asarray(length, jnp.int32)
    if kept.shape not in ((), cache.length.shape):
        raise ValueError(
            f"length has shape {kept.shape}; it must be one number, or one for each of {cache.length.shape[0]} rows."
        )
    return dataclasses.replace(cache, length=jnp.clip(kept, 0, cache.length))


def grow(cache: KVCache, capacity: int) -> KVCache:
    """Returns a copy of the cache with room for `capacity` tokens in each row.

    Raises:
        ValueError: a capacity below the present one, which might lose tokens, or a row that has `overflowed`.
    """
    check_room(cache, 0)
    if capacity < cache.capacity:
        raise ValueError(f"The cache has {cache.capacity} slots and cannot grow to {capacity}.")
    more = ((0, 0), (0, 0), (0, capacity - cache.capacity), (0, 0))
    k, v = (tuple(jnp.pad(x, more) for x in layers) for layers in (cache.k, cache.v))
    return dataclasses.replace(cache, k=k, v=v)
