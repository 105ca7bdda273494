"""The KV cache: an immutable pytree that a decode loop takes and returns.

Keys and values are head-major and kept for each layer apart, `"B K S H"`. It is the one form that XLA updates in place
without cache-sized copies on CPU, GPU and TPU alike. `length` says how many tokens each row holds, so rows of different
lengths need no padding mask. Slot s holds the key of position s; in a layer with a window that is shorter than the capacity,
the slots are a ring that holds the last of them, position p in slot p modulo the window.

On a mesh that splits the slots over a group of devices, each holds every `group`-th position, so that all of them work
from the first tokens on. In the whole array their parts stand one behind the other.
"""

import dataclasses
import math
import typing
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from gqa_jax.attention import held
from gqa_jax.config import Config
from gqa_jax.sharding import Placement, on_mesh_of, placement_of, zeros

DTYPES = ("float32", "bfloat16", "float16")
AXES = "B K S H"


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """One `k` and one `v` for each layer, and how many tokens each row holds. Made by `init_cache`.

    `capacity` is how many tokens each row has room for, `windows` how many of the last ones each layer keeps (None: all).
    """

    k: tuple[Float[Array, "B K S H"], ...]
    v: tuple[Float[Array, "B K S H"], ...]
    length: Int[Array, " B"]
    capacity: int = dataclasses.field(metadata={"static": True})
    windows: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})
    placement: Placement | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, each part counted once, however many devices hold it."""
        return sum(x.nbytes for x in (*self.k, *self.v))

    @property
    def nbytes_per_device(self) -> int:
        """Bytes of keys and values that each device holds."""
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in (*self.k, *self.v))

    @property
    def overflowed(self) -> Bool[Array, " B"]:
        """Marks rows to which more was written inside `jit` than they have room for; what did not fit was dropped."""
        return self.length > self.capacity


def init_cache(
    config: Config,
    batch: int,
    capacity: int,
    dtype: DTypeLike = jnp.float32,
    *,
    rings: bool = True,
    mesh: Mesh | Placement | None = None,
) -> KVCache:
    """Returns an empty cache with room for `capacity` tokens in each of `batch` rows.

    Args:
        config: the model.
        batch: rows.
        capacity: tokens for which each row has room.
        dtype: float32, bfloat16 or float16.
        rings: layers with a window keep no more than the window; False keeps everything, so that `rewind` can go anywhere.
        mesh: where the cache lies; each device makes its own part.

    Raises:
        ValueError: a size below one, another dtype, or a batch that the mesh cannot cut.
    """
    for name, size in (("batch", batch), ("capacity", capacity)):
        if size < 1:
            raise ValueError(f"The cache's {name} is {size}; it must be at least 1.")
    if jnp.dtype(dtype).name not in DTYPES:
        raise ValueError(f"The cache's dtype is {jnp.dtype(dtype).name}; it must be one of {', '.join(DTYPES)}.")
    placement = placement_of(mesh)
    check_batch(batch, placement)
    windows = tuple(config.layer_attention(layer).window if rings else None for layer in range(config.num_layers))

    # Each array owns its buffer, or donating the cache would donate one buffer many times.
    def layers():
        shapes = (cache_shape(config, batch, num_slots(capacity, window, placement), placement) for window in windows)
        return tuple(zeros(shape, dtype, AXES, placement) for shape in shapes)

    return KVCache(layers(), layers(), zeros((batch,), jnp.int32, "B", placement), capacity, windows, placement)


def check_batch(batch: int, placement: Placement | None) -> None:
    """Refuses a batch that does not divide over the mesh.

    Raises:
        ValueError: it does not.
    """
    if placement is not None and batch % placement.parts("B"):
        raise ValueError(
            f"{batch} rows do not divide over {placement.parts('B')} devices of the mesh's data axis; give a multiple of "
            f"{placement.parts('B')}, or use data=1."
        )


def num_slots(capacity: int, window: int | None, placement: Placement | None = None) -> int:
    """Returns how many slots a layer has for each row."""
    slots = capacity if window is None else min(capacity, window)
    return slots if placement is None else placement.padded("S", slots)


def cache_shape(config: Config, batch: int, slots: int, placement: Placement | None = None) -> tuple[int, int, int, int]:
    """Returns the shape of one layer's keys, with the heads that pad it on a mesh."""
    heads = config.num_kv_heads if placement is None else placement.padded("K", config.num_kv_heads)
    return (batch, heads, slots, config.head_dim)


def cache_specs(cache: KVCache) -> KVCache:
    """Returns how each array of a cache on a mesh is cut, as `jax.shard_map` asks for it."""
    assert cache.placement is not None
    slots, rows = cache.placement.spec(AXES), cache.placement.spec("B")
    return dataclasses.replace(cache, k=(slots,) * len(cache.k), v=(slots,) * len(cache.v), length=rows)


def with_placement(cache: KVCache, placement: Placement | None) -> KVCache:
    """Returns the cache as it lies on another view of its mesh."""
    if cache.placement == placement or placement is None:
        return cache
    return dataclasses.replace(on_mesh_of(cache, placement), placement=placement)


def check_room(cache: KVCache, new_tokens: int | Int[Array, " B"]) -> None:
    """Refuses `new_tokens` more tokens in each row where they do not fit; under `jit` it can refuse only the impossible.

    Raises:
        ValueError: a row has no room for them.
    """
    if isinstance(new_tokens, Tracer):
        new_tokens = 0
    if isinstance(cache.length, Tracer):
        fullest, needed = 0, int(np.max(new_tokens))
    else:
        fullest, needed = int(cache.length.max()), int((cache.length + jnp.asarray(new_tokens, jnp.int32)).max())
    if fullest > cache.capacity:
        again = (
            "Begin again with a larger one."
            if any(is_ring(cache, layer) for layer in range(len(cache.k)))
            else "Go back with gqa_jax.rewind to what the row held before, then make room with gqa_jax.grow."
        )
        raise ValueError(
            f"A row of the cache was given {fullest} tokens for its {cache.capacity} slots inside jit, and what did not fit is "
            f"lost. {again}"
        )
    if needed > cache.capacity:
        raise ValueError(
            f"{np.max(new_tokens)} new tokens do not fit: a row of the cache already holds {fullest} of its {cache.capacity} "
            "slots. Make the cache with a larger capacity, or enlarge it with gqa_jax.grow(cache, capacity)."
        )


def write(cache: KVCache, layer: int, k: Float[Array, "B K T H"], v: Float[Array, "B K T H"]) -> KVCache:
    """Puts T new tokens of one layer behind the `length` tokens of each row, rounded to the cache's dtype.

    `length` stays as it is until `advance`, when every layer has been written. Rows that lack the room keep what they hold
    (`lax.dynamic_update_slice` alone would slide back over it), and `overflowed` marks them after `advance`. In a layer with a
    window the last of many new tokens push out older ones that the first of them still see: read before you write.

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
    count = jnp.full_like(cache.length, k.shape[2])
    if cache.placement is None:
        return put(cache, layer, k, v, count)
    k, v, count = (cache.placement.moved(x, "B K T H"[: 2 * x.ndim - 1]) for x in (k, v, count))
    return _put_on_mesh(cache, k, v, count, layer)


@partial(jax.jit, static_argnames="layer")
def _put_on_mesh(cache, k, v, count, layer):
    specs, new = cache_specs(cache), cache.placement.spec("B K T H")
    return jax.shard_map(
        lambda cache, k, v, count: put(cache, layer, k, v, count),
        mesh=cache.placement.mesh,
        in_specs=(specs, new, new, specs.length),
        out_specs=specs,
    )(cache, k, v, count)


def put(cache: KVCache, layer: int, k: Float[Array, "B K T H"], v: Float[Array, "B K T H"], count: Int[Array, " B"]) -> KVCache:
    """Writes the first `count` of T tokens, unchecked; on a mesh, what one device does under `jax.shard_map`."""
    first, stride = stripe(cache)
    count = jnp.where(cache.length + count <= cache.capacity, count, 0)
    put_row = jax.vmap(partial(_put_row, first=first, stride=stride, wraps=is_ring(cache, layer)))

    def layers(old: tuple[Array, ...], new: Array) -> tuple[Array, ...]:
        row = put_row(old[layer], new.astype(old[layer].dtype), cache.length, count)
        return (*old[:layer], row, *old[layer + 1 :])

    return dataclasses.replace(cache, k=layers(cache.k, k), v=layers(cache.v, v))


def _put_row(
    old: Float[Array, "K S H"],
    new: Float[Array, "K T H"],
    length: Int[Array, ""],
    count: Int[Array, ""],
    first: Int[Array, ""] | int,
    stride: int,
    wraps: bool,
) -> Float[Array, "K S H"]:
    """Writes those of the positions from `length` on that this device keeps: its own `begin`-th up to its `end`-th."""
    size, most = old.shape[1], -(-new.shape[1] // stride)
    begin, end = held(length, first, stride), held(length + count, first, stride)
    if most == 1:
        # One row and slot is written or dropped, and nothing is read back: a read would ask for another layout than attention
        # does, and XLA would copy the whole cache for it on TPU. It is the scatter that a vmapped dynamic_update_slice becomes.
        slot = jnp.where(end > begin, begin % size, size)
        if new.shape[1] > 1:
            new = jnp.take(new, jnp.clip(first + begin * stride - length, 0, new.shape[1] - 1)[None], axis=1)
        return old.at[jnp.arange(old.shape[0], dtype=slot.dtype), slot].set(new[:, 0], mode="drop", unique_indices=True)
    if wraps:
        slots = jnp.arange(size, dtype=begin.dtype)
        index, kept = slots + size * ((end - 1 - slots) // size), old
    else:
        most = min(most, size)
        start = jnp.minimum(begin % size, size - most)
        index = begin - begin % size + start + jnp.arange(most, dtype=begin.dtype)
        kept = lax.dynamic_slice_in_dim(old, start, most, axis=1)
    if new.shape[1] > 1:
        new = jnp.take(new, jnp.clip(first + index * stride - length, 0, new.shape[1] - 1), axis=1)
    fresh = jnp.where(((index >= begin) & (index < end))[:, None], new, kept)
    return fresh if kept is old else lax.dynamic_update_slice_in_dim(old, fresh, start, axis=1)


def stripe(cache: KVCache) -> tuple[Int[Array, ""] | int, int]:
    """Returns the first position that this device keeps, and every how many it keeps one."""
    if cache.placement is None or cache.placement.parts("S") == 1:
        return 0, 1
    return cache.placement.index("S"), cache.placement.parts("S")


def is_ring(cache: KVCache, layer: int) -> bool:
    """Says whether a layer has fewer slots than the cache has room for, and forgets its oldest tokens."""
    window = cache.windows[layer]
    return window is not None and window < cache.capacity


def advance(cache: KVCache, new_tokens: int | Int[Array, " B"]) -> KVCache:
    """Counts `new_tokens` more tokens in each row."""
    return _with_length(cache, cache.length + jnp.asarray(new_tokens, jnp.int32))


def _with_length(cache: KVCache, length: Int[Array, " B"]) -> KVCache:
    where = cache.placement
    return dataclasses.replace(cache, length=length if where is None else where.moved(length, "B"))


def rewind(cache: KVCache, length: Int[Array, " B"]) -> KVCache:
    """Forgets all but the first `length` tokens of each row: after right padding, or to go on from a common prefix.

    A row that has `overflowed` lacks what did not fit: go back to what it held before. A row that a window has pushed tokens
    out of cannot go back; inside `jit` it becomes `overflowed`.

    Raises:
        ValueError: a length for other rows, or tokens that a window has pushed out.
    """
    kept = jnp.asarray(length, jnp.int32)
    if kept.shape not in ((), cache.length.shape):
        raise ValueError(
            f"length has shape {kept.shape}; it must be one number, or one for each of {cache.length.shape[0]} rows."
        )
    kept = jnp.clip(kept, 0, cache.length)
    windows = [window for layer, window in enumerate(cache.windows) if window is not None and is_ring(cache, layer)]
    if windows:
        lost = (cache.length > min(windows)) & (kept < cache.length)
        if not isinstance(lost, Tracer) and lost.any():
            raise ValueError(
                f"A row holds {int(cache.length.max())} tokens and some layers keep only the last {min(windows)}, "
                "so it cannot go back. A cache made with gqa_jax.init_cache(..., rings=False) can."
            )
        kept = jnp.where(lost, cache.capacity + 1, kept)
    return _with_length(cache, kept)


def grow(cache: KVCache, capacity: int) -> KVCache:
    """Returns a copy of the cache with room for `capacity` tokens in each row.

    Raises:
        ValueError: a capacity below the present one, which might lose tokens, or a row that has `overflowed`.
    """
    check_room(cache, 0)
    if capacity < cache.capacity:
        raise ValueError(f"The cache has room for {cache.capacity} tokens and cannot shrink to {capacity}.")
    parts = 1 if cache.placement is None else cache.placement.parts("S")

    def layers(old: tuple[Array, ...]) -> tuple[Array, ...]:
        slots = (num_slots(capacity, window, cache.placement) // parts for window in cache.windows)
        return tuple(jnp.pad(x, ((0, 0), (0, 0), (0, more - x.shape[2]), (0, 0))) for x, more in zip(old, slots, strict=True))

    def grown(cache: KVCache) -> KVCache:
        return dataclasses.replace(cache, k=layers(cache.k), v=layers(cache.v), capacity=capacity)

    if cache.placement is None:
        return grown(cache)
    specs = cache_specs(cache)
    longer = dataclasses.replace(specs, capacity=capacity)
    return jax.jit(jax.shard_map(grown, mesh=cache.placement.mesh, in_specs=(specs,), out_specs=longer))(cache)
