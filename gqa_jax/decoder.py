"""The decoder: one pure function for training, prefill, chunks and single tokens.

`param_axes` is the one list of weights. Initialisation, loading, sharding and byte counts read it; nothing repeats a shape.

On a mesh every device runs the code below on its own heads, its own part of the MLP and its own rows, under `jax.shard_map`,
and what they find is summed where `Placement.total` says so: after the embedding, after each attention and after each MLP.
"""

import dataclasses
import math
from functools import partial
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer

from gqa_jax import cache as kv
from gqa_jax.cache import KVCache
from gqa_jax.config import Config
from gqa_jax.layer import (
    Tokens,
    add_bias,
    attention,
    attention_axes,
    check_cache,
    check_new,
    norm,
    place_tokens,
)
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
    top = {"embedding": "V D", "norm": "D"} | ({} if config.tied_head else {"head": "V D"})
    return {**top, "layers": tuple(_layer_axes(config, layer) for layer in range(config.num_layers))}


def _layer_axes(config: Config, layer: int) -> dict[str, str]:
    axes = {"attention.norm": "D"} | attention_axes(config, layer)
    axes |= {"mlp.norm": "D", "mlp.gate": "D F", "mlp.up": "D F", "mlp.down": "F D"}
    if config.mlp_bias:
        axes |= {"mlp.gate_bias": "F", "mlp.up_bias": "F", "mlp.down_bias": "D"}
    if config.post_norms:
        axes |= {"attention.post_norm": "D", "mlp.post_norm": "D"}
    return axes


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
    """Returns random weights: norms one, biases and sinks zero, matrices normal with variance 1 / (width of what they read).

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
        if name.endswith(("bias", "sinks")):
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
    params: Params,
    tokens: Array,
    cache: KVCache,
    config: Config,
    count: Array | None = None,
    *,
    segments: None = None,
    remat: bool = False,
) -> tuple[Array, KVCache]: ...
@overload
def forward(
    params: Params,
    tokens: Array,
    cache: None,
    config: Config,
    count: Array | None = None,
    *,
    segments: Array | None = None,
    remat: bool = False,
) -> tuple[Array, None]: ...
def forward(
    params: Params,
    tokens: Integer[Array, "B T"],
    cache: KVCache | None,
    config: Config,
    count: Integer[Array, " B"] | None = None,
    *,
    segments: Integer[Array, "B T"] | None = None,
    remat: bool = False,
) -> tuple[Float[Array, "B T V"], KVCache | None]:
    """Returns the float32 logits that follow each token, and the cache with the tokens in it.

    With a cache the tokens continue what it holds, any number at a time, at a position of its own for each row; without one
    (None) they are whole texts, as in training. Any split of a text into chunks gives the logits of one pass. An id outside the
    vocabulary makes its row NaN, so pad with one of it. Weights and a cache that lie on a mesh are used where they lie.

    Args:
        params: the weights.
        tokens: ids.
        cache: what the rows hold already.
        config: the model.
        count: of rows that are padded on the right, how many tokens the cache keeps, 0 to T; None is all.
        segments: where several texts stand in one row, a number for each token that changes from text to text: a text sees
            nothing of the others, and its positions begin at 0. Without a cache only.
        remat: gradients compute each layer anew instead of keeping what is inside it (arXiv:1604.06174).

    Raises:
        ValueError: tokens that do not fit into the cache, or parameters, a cache or segments that are not the config's.
    """
    x, cache = hidden_states(params, tokens, cache, config, count, segments=segments, remat=remat)
    return logits(params, x, config), cache


def hidden_states(
    params: Params,
    tokens: Integer[Array, "B T"],
    cache: KVCache | None,
    config: Config,
    count: Integer[Array, " B"] | None = None,
    *,
    segments: Integer[Array, "B T"] | None = None,
    remat: bool = False,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    """Returns what the last layer leaves for each token, after the final norm; `logits` turns it into scores.

    Its arguments are those of `forward`.
    """
    _check(params, tokens, cache, config)
    count, segments = check_new(tokens.shape[0], tokens.shape[1], cache, count, segments)
    tokens = jnp.asarray(tokens, jnp.int32)  # A narrower id could not be compared with the size of the vocabulary.
    placement = params.get("placement")
    if placement is None:
        return _layers(params, tokens, count, segments, cache, config, None, remat)
    return _layers_on_mesh(_weights(params), tokens, count, segments, cache, config, placement, remat)


def logits(params: Params, x: Float[Array, "B T D"], config: Config) -> Float[Array, "B T V"]:
    """Returns the float32 score of every token of the vocabulary."""
    head, placement = params["embedding" if config.tied_head else "head"], params.get("placement")
    return _scores(head, x, config) if placement is None else _scores_on_mesh(head, x, config, placement)


def _weights(params: Params) -> Params:
    return {name: leaf for name, leaf in params.items() if name != "placement"}


@partial(jax.jit, static_argnames=("config", "placement", "remat"))
def _layers_on_mesh(params, tokens, count, segments, cache, config, placement, remat):
    specs = jax.tree.map(placement.spec, param_axes(config))
    rows, kept = placement.spec("B"), None if cache is None else kv.cache_specs(cache)
    texts = None if segments is None else placement.moved(segments, "B T")
    return jax.shard_map(
        partial(_layers, config=config, placement=placement, remat=remat),
        mesh=placement.mesh,
        in_specs=(specs, rows, rows, None if segments is None else rows, kept),
        out_specs=(rows, kept),
    )(params, placement.moved(tokens, "B T"), placement.moved(count, "B"), texts, cache)


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
    segments: Int[Array, "B T"] | None,
    cache: KVCache | None,
    config: Config,
    placement: Placement | None,
    remat: bool,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    placed = place_tokens(tokens.shape[0], tokens.shape[1], count, cache, segments)
    x = _embed(params["embedding"], tokens, config, placement)
    if config.embedding_scale is not None:
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
    for layer, weights in enumerate(params["layers"]):
        run = partial(_layer, layer=layer, config=config, placement=placement)
        x, cache = (jax.checkpoint(run) if remat else run)(x, weights, placed, cache)
    return norm(x, params["norm"], config), None if cache is None else dataclasses.replace(cache, length=cache.length + count)


def _layer(
    x: Float[Array, "B T D"],
    weights: dict[str, Array],
    tokens: Tokens,
    cache: KVCache | None,
    layer: int,
    config: Config,
    placement: Placement | None,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    normed = norm(x, weights["attention.norm"], config)
    mixed, cache = attention(normed, weights, tokens, cache, layer, config, placement)
    x = x + (norm(mixed, weights["attention.post_norm"], config) if config.post_norms else mixed)
    made = _mlp(norm(x, weights["mlp.norm"], config), weights, config, placement)
    return x + (norm(made, weights["mlp.post_norm"], config) if config.post_norms else made), cache


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
    if cache is not None:
        check_cache(cache, tokens.shape[0], config, placement)


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
    scores = jnp.einsum("BTD,VD->BTV", x, head, preferred_element_type=np.promote_types(x.dtype, np.float32))
    return scores if config.logit_softcap is None else config.logit_softcap * jnp.tanh(scores / config.logit_softcap)


def _mlp(
    x: Float[Array, "B T D"], weights: dict[str, Array], config: Config, placement: Placement | None
) -> Float[Array, "B T D"]:
    """A gated linear unit (arXiv:2002.05202)."""
    gate = add_bias(jnp.einsum("BTD,DF->BTF", x, weights["mlp.gate"]), weights, "mlp.gate_bias")
    up = add_bias(jnp.einsum("BTD,DF->BTF", x, weights["mlp.up"]), weights, "mlp.up_bias")
    opened = jax.nn.silu(gate) if config.activation == "silu" else jax.nn.gelu(gate, approximate=True)
    made = jnp.einsum("BTF,FD->BTD", opened * up, weights["mlp.down"])
    return add_bias(made if placement is None else placement.total(made), weights, "mlp.down_bias")
