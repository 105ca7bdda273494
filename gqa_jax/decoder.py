"""The decoder: one pure function for training, prefill, chunks and single tokens.

`param_axes` is the one list of weights. Initialisation, loading, sharding and byte counts read it; nothing repeats a shape.

On a mesh every device runs the code below on its own heads, its own part of the MLP and its own rows, under `jax.shard_map`,
and what they find is summed where `Placement.total` says so: after the embedding, after each attention and after each MLP.
"""

import dataclasses
import math
from functools import partial, reduce
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer

from gqa_jax import cache as kv
from gqa_jax.attention import Part, Reading, attend, attend_filled, causal_mask, merge
from gqa_jax.cache import KVCache
from gqa_jax.config import Attention, Config
from gqa_jax.rope import angles, rotate
from gqa_jax.sharding import Placement, on_mesh_of, placement_of, to_host

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


def param_shapes(config: Config, dtype: DTypeLike = jnp.float32, mesh: Mesh | Placement | None = None) -> Params:
    """Returns the shape and dtype of every weight, on a mesh padded and with its place; norms are always float32."""
    sizes, placement = axis_sizes(config), placement_of(mesh)

    def shape(path, axes):
        own = jnp.float32 if path[-1].key.endswith("norm") else dtype
        if placement is None:
            return jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in axes.split()), own)
        padded = tuple(placement.padded(axis, sizes[axis]) for axis in axes.split())
        return jax.ShapeDtypeStruct(padded, own, sharding=placement.sharding(axes))

    return with_placement(jax.tree_util.tree_map_with_path(shape, param_axes(config)), placement)


def with_placement(params: Params, placement: Placement | None) -> Params:
    """Returns the weights with what says how they lie, as they lie on this view of their mesh."""
    if placement is None or params.get("placement") == placement:
        return params
    return {**(on_mesh_of(_weights(params), placement) if "placement" in params else params), "placement": placement}


def place(params: Params, config: Config, mesh: Mesh | Placement) -> Params:
    """Returns the weights on a mesh, padded where they do not divide; `params["placement"]` says how they lie.

    Raises:
        ValueError: weights that lie on a mesh already, or a mesh without the axes that are needed.
    """
    if "placement" in params:
        raise ValueError("The weights lie on a mesh already; bring them back first with gqa_jax.gather(params, config).")
    placement = placement_of(mesh)
    assert placement is not None
    return with_placement(jax.tree.map(lambda axes, leaf: placement.put(leaf, axes), param_axes(config), params), placement)


def gather(params: Params, config: Config) -> Params:
    """Returns the weights as host arrays, whole and without padding; on several processes each must call it."""
    return jax.tree.map(lambda axes, leaf: gather_one(leaf, axes, config), param_axes(config), _weights(params))


def gather_one(leaf: Array | np.ndarray, axes: str, config: Config) -> np.ndarray:
    """Returns one weight as `gather` does."""
    sizes = axis_sizes(config)
    whole = leaf if isinstance(leaf, np.ndarray) else to_host(leaf)
    return whole[tuple(slice(sizes[axis]) for axis in axes.split())]


def init_params(config: Config, key: Array, dtype: DTypeLike = jnp.float32, *, mesh: Mesh | Placement | None = None) -> Params:
    """Returns random weights: norms one, biases zero, matrices normal with variance 1 / (width of what they read).

    On a mesh they are the same numbers, placed one by one.
    """
    placement = placement_of(mesh)
    leaves, tree = jax.tree_util.tree_flatten_with_path(param_shapes(config, dtype))
    axes = jax.tree.leaves(param_axes(config))
    keys = jax.random.split(key, len(leaves))

    def make(path, leaf, key):
        name = path[-1].key
        if name.endswith("norm"):
            return jnp.ones(leaf.shape, leaf.dtype)
        if name.endswith("bias"):
            return jnp.zeros(leaf.shape, leaf.dtype)
        read = {"attention.o": config.num_heads * config.head_dim, "mlp.down": config.mlp_dim}
        spread = math.sqrt(1 / read.get(name, config.model_dim))
        return (spread * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)

    def made(path, leaf, letters, key):
        whole = make(path, leaf, key)
        return whole if placement is None else placement.put(whole, letters)

    params = tree.unflatten(made(path, leaf, a, key) for (path, leaf), a, key in zip(leaves, axes, keys, strict=True))
    return with_placement(params, placement)


@overload
def forward(
    params: Params, tokens: Array, cache: KVCache, config: Config, count: Array | None = None
) -> tuple[Array, KVCache]: ...
@overload
def forward(params: Params, tokens: Array, cache: None, config: Config, count: Array | None = None) -> tuple[Array, None]: ...
def forward(
    params: Params,
    tokens: Integer[Array, "B T"],
    cache: KVCache | None,
    config: Config,
    count: Integer[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T V"], KVCache | None]:
    """Returns the float32 logits that follow each token, and the cache with the tokens in it.

    With a cache the tokens continue what it holds, any number at a time, at a position of its own for each row; without one
    (None) they are whole texts, as in training. Any split of a text into chunks gives the logits of one pass. Of rows that are
    padded on the right, `count` says how many tokens the cache keeps, 0 to T; None is all. An id outside the vocabulary makes
    its row NaN, so pad with one of it. Weights and a cache that lie on a mesh are used where they lie.

    Raises:
        ValueError: tokens that do not fit into the cache, or parameters or a cache that are not the config's.
    """
    x, cache = hidden_states(params, tokens, cache, config, count)
    return logits(params, x, config), cache


def hidden_states(
    params: Params,
    tokens: Integer[Array, "B T"],
    cache: KVCache | None,
    config: Config,
    count: Integer[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    """Returns what the last layer leaves for each token, after the final norm; `logits` turns it into scores.

    Of each row the first `count` tokens are kept in the cache, all of them where None.
    """
    _check(params, tokens, cache, config)
    if count is not None:
        _check_count(count, tokens)
    if cache is not None:
        kv.check_room(cache, tokens.shape[1] if count is None else count)
    # A narrower id could not be compared with the size of the vocabulary.
    tokens, most = jnp.asarray(tokens, jnp.int32), jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    count = most if count is None else jnp.clip(jnp.asarray(count, jnp.int32), 0, most)
    placement = params.get("placement")
    if placement is None:
        return _layers(params, tokens, count, cache, config, None)
    return _layers_on_mesh(_weights(params), tokens, count, cache, config, placement)


def logits(params: Params, x: Float[Array, "B T D"], config: Config) -> Float[Array, "B T V"]:
    """Returns the float32 score of every token of the vocabulary."""
    head, placement = params["embedding" if config.tied_head else "head"], params.get("placement")
    return _scores(head, x, config) if placement is None else _scores_on_mesh(head, x, config, placement)


def _weights(params: Params) -> Params:
    return {name: leaf for name, leaf in params.items() if name != "placement"}


@partial(jax.jit, static_argnames=("config", "placement"))
def _layers_on_mesh(params, tokens, count, cache, config, placement):
    specs = jax.tree.map(placement.spec, param_axes(config))
    rows, kept = placement.spec("B"), None if cache is None else kv.cache_specs(cache)
    return jax.shard_map(
        partial(_layers, config=config, placement=placement),
        mesh=placement.mesh,
        in_specs=(specs, rows, rows, kept),
        out_specs=(rows, kept),
    )(params, placement.moved(tokens, "B T"), placement.moved(count, "B"), cache)


@partial(jax.jit, static_argnames=("config", "placement"))
def _scores_on_mesh(head, x, config, placement):
    scores = jax.shard_map(
        partial(_scores, config=config),
        mesh=placement.mesh,
        in_specs=(placement.spec("V D"), placement.spec("B T D")),
        out_specs=placement.spec("B T V"),
    )(head, x)
    # The entries that only pad the vocabulary end here: they have no score, and so no probability.
    if scores.shape[2] == config.vocab_size:
        return scores
    return placement.moved(scores, "B T D")[:, :, : config.vocab_size]


def _layers(
    params: Params,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    cache: KVCache | None,
    config: Config,
    placement: Placement | None,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    if cache is not None:
        positions = positions + cache.length[:, None]
    x = _embed(params["embedding"], tokens, config, placement)
    if config.embedding_scale is not None:
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
    for layer, weights in enumerate(params["layers"]):
        normed = _norm(x, weights["attention.norm"], config)
        mixed, cache = _attention(normed, weights, positions, count, cache, layer, config, placement)
        x = x + (_norm(mixed, weights["attention.post_norm"], config) if config.post_norms else mixed)
        made = _mlp(_norm(x, weights["mlp.norm"], config), weights, config, placement)
        x = x + (_norm(made, weights["mlp.post_norm"], config) if config.post_norms else made)
    return _norm(x, params["norm"], config), None if cache is None else dataclasses.replace(cache, length=cache.length + count)


def _check(params: Params, tokens: Array, cache: KVCache | None, config: Config) -> None:
    """Refuses what would run all the same, or fail far from its cause."""
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens have shape {tokens.shape} and dtype {tokens.dtype}; they must be integers, batch by length.")
    placement, heads = params.get("placement"), (config.num_kv_heads, config.group_size, config.head_dim)
    if placement is not None:
        heads = (placement.padded("K", heads[0]), placement.padded("G", heads[1]), heads[2])
    kv.check_batch(tokens.shape[0], placement)
    have = (len(params["layers"]), *params["layers"][0]["attention.q"].shape[1:])
    if have != (config.num_layers, *heads):
        raise ValueError(f"The parameters have (layers, K, G, H) = {have}, the config {(config.num_layers, *heads)}.")
    if cache is None:
        return
    if (len(cache.k), cache.k[0].shape[0]) != (config.num_layers, tokens.shape[0]):
        raise ValueError(
            f"The cache has {len(cache.k)} layers and {cache.k[0].shape[0]} rows; "
            f"the config has {config.num_layers} layers and there are {tokens.shape[0]} rows of tokens."
        )
    for layer, kept in enumerate(cache.windows):
        own = config.layer_attention(layer).window
        if kept is not None and (own is None or own > kept):
            raise ValueError(
                f"The cache keeps the last {kept} tokens in layer {layer}; the config sees {own or 'all'} of them."
            )
    if cache.placement != placement:
        raise ValueError(
            f"The parameters lie on {placement or 'no mesh'} and the cache on {cache.placement or 'no mesh'}; make the cache "
            "with gqa_jax.init_cache(..., mesh=params['placement'])."
        )


def _check_count(count: Array, tokens: Array) -> None:
    rows, most = tokens.shape
    if count.shape != (rows,) or not jnp.issubdtype(count.dtype, jnp.integer):
        raise ValueError(
            f"count has shape {count.shape} and dtype {count.dtype}; it must be one integer for each of {rows} rows."
        )
    if not isinstance(count, Tracer) and not (count.min() >= 0 and count.max() <= most):
        raise ValueError(f"count goes from {count.min()} to {count.max()}; of {most} tokens a row keeps from 0 to {most}.")


def _embed(
    table: Float[Array, "V D"], tokens: Int[Array, "B T"], config: Config, placement: Placement | None
) -> Float[Array, "B T D"]:
    if placement is None:
        return table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    own = tokens - placement.index("V") * table.shape[0]
    x = placement.total(table.at[own].get(mode="fill", fill_value=0, wrap_negative_indices=False))
    known = (tokens >= 0) & (tokens < config.vocab_size)
    return jnp.where(known[..., None], x, jnp.nan)


def _scores(head: Float[Array, "V D"], x: Float[Array, "B T D"], config: Config) -> Float[Array, "B T V"]:
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
    count: Int[Array, " B"],
    cache: KVCache | None,
    layer: int,
    config: Config,
    placement: Placement | None,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    how = config.layer_attention(layer)
    q, k, v = _project(x, weights, positions, how, config)
    reading = Reading(config.head_dim**-0.5 if how.scale is None else how.scale, how.window, how.softcap)
    if cache is None:
        mask = causal_mask(positions[:1], positions[:1], how.window)[:, None, None]
        part = attend(q, k, v, mask, scale=reading.scale, softcap=reading.softcap)
    else:
        part, cache = _attend_cached(q, k, v, positions, count, cache, layer, reading)
    out = part.out.astype(x.dtype)
    real = None if placement is None else placement.is_real(config, *out.shape[1:3])
    if real is not None:
        # A padded query would still read; nothing may come of it, so that no gradient brings its weights to life.
        out = jnp.where(real[:, :, None, None], out, jnp.zeros((), out.dtype))
    # BTKGH, KGHD -> BTD: an einsum would contract in another order than the weight's own, and transpose it.
    mixed = jnp.tensordot(out.transpose(0, 3, 1, 2, 4), weights["attention.o"], axes=3)
    return _add_bias(_total(mixed, placement), weights, "attention.o_bias"), cache


def _total(x: Array, placement: Placement | None) -> Array:
    return x if placement is None else placement.total(x)


def _attend_cached(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    positions: Int[Array, "B T"],
    count: Int[Array, " B"],
    cache: KVCache,
    layer: int,
    reading: Reading,
) -> tuple[Part, KVCache]:
    """Reads what the cache holds and the new tokens, and writes these; what is read is what is kept, as it is rounded."""
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


def _mlp(
    x: Float[Array, "B T D"], weights: dict[str, Array], config: Config, placement: Placement | None
) -> Float[Array, "B T D"]:
    """A gated linear unit (arXiv:2002.05202)."""
    gate = _add_bias(jnp.einsum("BTD,DF->BTF", x, weights["mlp.gate"]), weights, "mlp.gate_bias")
    up = _add_bias(jnp.einsum("BTD,DF->BTF", x, weights["mlp.up"]), weights, "mlp.up_bias")
    opened = jax.nn.silu(gate) if config.activation == "silu" else jax.nn.gelu(gate, approximate=True)
    made = jnp.einsum("BTF,FD->BTD", opened * up, weights["mlp.down"])
    return _add_bias(_total(made, placement), weights, "mlp.down_bias")
