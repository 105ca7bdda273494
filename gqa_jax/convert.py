"""Fewer KV heads for a trained model: neighbours are merged into one, and what is lost is made good in W_q and W_o.

Every method is one pair of maps for each layer: `down` makes the shared head out of the old ones, s = sum_m z_m down_m, and
`up` gives each of them back, z_m ~ s up_m. The first goes into W_k and W_v, the second into W_q and W_o, so that the result is
an ordinary model. A rotary embedding turns each pair of lanes as one complex number, and only maps that are complex numbers
themselves commute with it; so the keys of such a layer are lanes of H/2 complex numbers, each mapped on its own, and values,
and keys without a rotary embedding, are one lane of H real ones.

Letters beside the house's: M old heads that become one, P lanes, W width of a lane.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from gqa_jax import decoder
from gqa_jax.calibrate import Batch, Progress, batches, keys_and_values, negative_log_likelihood
from gqa_jax.config import Config, Rope
from gqa_jax.decoder import Params
from gqa_jax.request import Model, Prompt, whole

__all__ = ["METHODS", "Conversion", "Errors", "convert", "negative_log_likelihood"]

Method = Literal["mean", "first", "random", "procrustes", "pca"]
METHODS: tuple[Method, ...] = get_args(Method)
ALIGNED = ("procrustes", "pca")
ROUNDS = 32

Pair = tuple[np.ndarray, np.ndarray]


class Errors(NamedTuple):
    """How much of a layer's keys and values the shared heads do not give back: E|x - x'|^2 / E|x|^2."""

    k: float
    v: float


class Conversion(NamedTuple):
    """A model of fewer KV heads, and what each layer has lost; None without a text to measure it on."""

    model: Model
    errors: tuple[Errors, ...] | None


class Maps(NamedTuple):
    """From M old heads to a shared one, `down` "K P M W W", and back, `up`: what is read comes first. `rope` cuts the lanes."""

    down: np.ndarray
    up: np.ndarray
    rope: Rope | None


def convert(
    model: Model,
    num_kv_heads: int,
    method: Method = "mean",
    *,
    calibration: Prompt | Sequence[Prompt] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Conversion:
    """Returns a model with fewer KV heads, of which head j serves the queries of its M = K / num_kv_heads neighbours.

    Args:
        model: stays as it is. The new one lies where it lies, and has its tokenizer and dtypes.
        num_kv_heads: a divisor of the model's own; as many changes nothing.
        method: what a shared head is made of.
            `mean`: the mean of the old ones (arXiv:2305.13245); `first`: the first of them; `random`: new weights.
            `procrustes`: their mean after each has been turned towards the others (arXiv:2412.20677).
            `pca`: their principal directions, complex ones for each rotary pair of K, real ones for V, where an error weighs
            what the queries make of it, and W_o.
        calibration: a text or its ids, or a list of either, which the last two need. With it, `errors` are measured.
        seed: of `random`.
        progress: is told (what, done, total) while reading the text.

    Raises:
        ValueError: a head count that does not divide, an unknown method, no text or too short a one, or a model that norms its
            keys, which the last two cannot turn.
    """
    old, config = model.config, converted(model.config, num_kv_heads, method, calibrated=calibration is not None)
    rows = None if calibration is None else batches(model, calibration)  # pyright: ignore[reportArgumentType]
    if config == old:
        return Conversion(model, None if rows is None else (Errors(0.0, 0.0),) * old.num_layers)
    maps = _maps(model, config, method, rows, progress)
    params = decoder.gather(model.params, old)
    layers = [_folded(layer, *own) for layer, own in zip(params["layers"], maps, strict=True)]
    if method == "random":
        layers = _with_random_heads(layers, config, seed)
    made = Model(config, _placed(params | {"layers": tuple(layers)}, config, model), model.tokenizer)
    return Conversion(made, None if rows is None else _errors(model, params, layers, maps, rows, progress))


def converted(config: Config, num_kv_heads: int, method: str = "mean", *, calibrated: bool = False) -> Config:
    """Returns the config that `convert` makes of another, with or without a text to calibrate it.

    Raises:
        ValueError: see `convert`.
    """
    most = config.num_kv_heads
    if most % whole("num_kv_heads", num_kv_heads, 1, most):
        fits = ", ".join(str(heads) for heads in range(1, most + 1) if most % heads == 0)
        raise ValueError(f"num_kv_heads is {num_kv_heads}; the model's {most} KV heads can become {fits}.")
    if method not in METHODS:
        raise ValueError(f"The method is {method!r}; it must be one of {', '.join(METHODS)}.")
    if method in ALIGNED and config.qk_norm:
        raise ValueError(
            f"The model norms its keys behind W_k (qk_norm), so {method} cannot turn them; take 'mean' or 'first' and train on."
        )
    if method in ALIGNED and not calibrated:
        raise ValueError(f"{method} reads a text to see how the heads lie to each other; give it as calibration.")
    return dataclasses.replace(config, num_kv_heads=num_kv_heads)


def _placed(params: Params, config: Config, model: Model) -> Params:
    if model.placement is None:
        return jax.tree.map(jnp.asarray, params)
    return decoder.place(params, config, model.placement)


# Maps


def _maps(
    model: Model, config: Config, method: Method, rows: list[Batch] | None, progress: Progress | None
) -> list[tuple[Maps, Maps]]:
    """Returns the maps of the keys and of the values of each layer."""
    merged = model.config.num_kv_heads // config.num_kv_heads
    ropes = [config.layer_attention(layer).rope for layer in range(config.num_layers)]
    if method not in ALIGNED:
        return [(_plain(config, merged, method, rope), _plain(config, merged, method, None)) for rope in ropes]
    assert rows is not None
    needed, have = merged * config.head_dim, sum(int(batch.count.sum()) for batch in rows)
    if have < needed:
        raise ValueError(
            f"The text has {have} tokens; {method} needs at least {needed}, head_dim times the {merged} heads that become one, "
            "and better ten times as many."
        )
    moments = _moments(model, ropes, merged, rows, progress)
    find = _principal if method == "pca" else _aligned
    return [(Maps(*find(*k), rope), Maps(*find(*v), None)) for rope, k, v in zip(ropes, *moments, strict=True)]


def _plain(config: Config, merged: int, method: Method, rope: Rope | None) -> Maps:
    lanes, width = (1, config.head_dim) if rope is None else (config.head_dim // 2, 1)
    share = np.full(merged, 1 / merged) if method == "mean" else np.eye(merged)[0]
    up = np.broadcast_to(np.eye(width), (config.num_kv_heads, lanes, merged, width, width))
    return Maps(share[:, None, None] * up, up, rope)


def _moments(
    model: Model, ropes: list[Rope | None], merged: int, rows: list[Batch], progress: Progress | None
) -> tuple[list[Pair], list[Pair]]:
    """Returns for the keys and the values of each layer the second moments of a group's heads, and how much an error weighs.

    An error of a key weighs what its queries make of it, one of a value what W_o does. Moments are the same before and after
    queries and keys are turned, since at one position all heads turn by the same angle.
    """
    params, heads = decoder.gather(model.params, model.config), model.config.num_kv_heads
    sums: list[Any] = [[0.0, 0.0, 0.0] for _ in ropes]
    asked = [_queries_as_keys(layer) for layer in params["layers"]]
    for keys, values in keys_and_values(_beside(model, params, asked), rows, "calibrating", progress):
        for total, rope, k, v in zip(sums, ropes, keys, values, strict=True):
            total[0] += _moment(_lanes(k[:, :heads], rope), merged)
            total[1] += _moment(_lanes(k[:, heads:], rope), 1)
            total[2] += _moment(_lanes(v[:, :heads], None), merged)
    of_keys = [(k, _by_group(q, heads, merged)) for k, q, _ in sums]
    outputs = [
        np.moveaxis(layer["attention.o"].reshape(-1, *layer["attention.o"].shape[2:]), -1, 0) for layer in params["layers"]
    ]
    weights = [_by_group(_moment(_lanes(o, None), 1), heads, merged) for o in outputs]
    return of_keys, [(v, weight) for (_, _, v), weight in zip(sums, weights, strict=True)]


def _queries_as_keys(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns "D (K G) H" of the queries in the place of keys, and nothing as values."""
    made = {}
    for kind in ("", "_bias"):
        if (name := f"attention.q{kind}") in weights:
            *width, K, G, H = weights[name].shape
            made[f"attention.k{kind}"] = weights[name].reshape(*width, K * G, H)
            made[f"attention.v{kind}"] = np.zeros_like(made[f"attention.k{kind}"])
    return made


def _moment(z: np.ndarray, merged: int) -> np.ndarray:
    """Sums z^H z over the tokens of z "S K P W": for each shared head and lane a square of M * W."""
    tokens, heads, lanes, width = z.shape
    z = z.reshape(tokens, heads // merged, merged, lanes, width).transpose(1, 3, 0, 2, 4)
    z = z.reshape(heads // merged, lanes, tokens, merged * width)
    return z.conj().swapaxes(-1, -2) @ z


def _by_group(moment: np.ndarray, heads: int, merged: int) -> np.ndarray:
    """Returns "K P M W W" from the moments "(K G) P W W" of queries: the sum of those that one old head serves."""
    summed = moment.reshape(heads, -1, *moment.shape[1:]).sum(axis=1)
    return summed.reshape(-1, merged, *summed.shape[1:]).swapaxes(1, 2)


def _principal(moment: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the directions that hold most of what all heads of a group say, as far as it weighs."""
    kv_heads, lanes, merged, width, _ = weight.shape
    sizes, axes = np.linalg.eigh(weight)
    # What nothing reads keeps a little weight, so that the root can be undone.
    roots = np.sqrt(sizes + 1e-6 * sizes.max(axis=(2, 3), keepdims=True) + 1e-30)[..., None, :]
    root, undo = ((axes * by) @ axes.conj().swapaxes(-1, -2) for by in (roots, 1 / roots))
    blocks = moment.reshape(kv_heads, lanes, merged, width, merged, width)
    weighed = np.einsum("kpmab,kpmbnc,kpncd->kpmand", root, blocks, root, optimize=True).reshape(moment.shape)
    found = np.linalg.eigh(weighed)[1][..., -width:].reshape(weight.shape)
    return root @ found, found.conj().swapaxes(-1, -2) @ undo


def _aligned(moment: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns turns of the heads towards their mean (generalised orthogonal Procrustes analysis), beginning at the first."""
    kv_heads, lanes, merged, width, _ = weight.shape
    blocks = moment.reshape(kv_heads, lanes, merged, width, merged, width)
    turns = np.stack([_turn(blocks[:, :, m, :, 0]) for m in range(merged)], axis=2)
    for _ in range(ROUNDS):
        before = turns.copy()
        for m in range(merged):
            turns[:, :, m] = _turn(np.einsum("kpinj,kpnjv->kpiv", blocks[:, :, m], turns))
        if np.abs(turns - before).max() < 1e-6:
            break
    return turns / merged, turns.conj().swapaxes(-1, -2)


def _turn(x: np.ndarray) -> np.ndarray:
    """Returns the unitary matrix nearest to x."""
    left, _, right = np.linalg.svd(x)
    return left @ right


# Weights


def _lanes(x: np.ndarray, rope: Rope | None) -> np.ndarray:
    """Returns the last axis, H, as lanes "P W", in double precision."""
    x = np.asarray(x, np.float64)
    if rope is None:
        return x[..., None, :]
    a, b = (x[..., 0::2], x[..., 1::2]) if rope.interleaved else np.split(x, 2, axis=-1)
    return (a + 1j * b)[..., None]


def _unlaned(z: np.ndarray, rope: Rope | None) -> np.ndarray:
    if rope is None:
        return z[..., 0, :]
    parts = np.real(z[..., 0]), np.imag(z[..., 0])
    if rope.interleaved:
        return np.stack(parts, axis=-1).reshape(*z.shape[:-2], -1)
    return np.concatenate(parts, axis=-1)


def _folded(weights: dict[str, np.ndarray], keys: Maps, values: Maps) -> dict[str, np.ndarray]:
    """Returns the weights of a layer with its heads merged."""
    merge = {f"attention.{x}{kind}": maps for x, maps in (("k", keys), ("v", values)) for kind in ("", "_bias")}
    made = {name: _merged(weights[name], maps) for name, maps in merge.items() if name in weights}
    made |= {name: _regrouped(weights[name], keys) for name in ("attention.q", "attention.q_bias") if name in weights}
    # W_o reads what W_q is asked for: the same axes, with D at the other end.
    made["attention.o"] = np.moveaxis(_regrouped(np.moveaxis(weights["attention.o"], -1, 0), values), 0, -1)
    return weights | {name: x.astype(weights[name].dtype) for name, x in made.items()}


def _merged(x: np.ndarray, maps: Maps) -> np.ndarray:
    """Returns "D K H", or a bias "K H", of the shared heads."""
    *width, _, H = x.shape
    z = _lanes(x.reshape(*width, len(maps.down), -1, H), maps.rope)
    return _unlaned(np.einsum("...kmpw,kpmwv->...kpv", z, maps.down), maps.rope)


def _regrouped(x: np.ndarray, maps: Maps) -> np.ndarray:
    """Returns "D K G H", or a bias "K G H", of the queries of the shared heads, in their old order."""
    *width, _, G, H = x.shape
    z = _lanes(x.reshape(*width, len(maps.up), -1, G, H), maps.rope)
    z = np.einsum("...kmgpw,kpmvw->...kmgpv", z, maps.up.conj())
    return _unlaned(z, maps.rope).reshape(*width, len(maps.up), -1, H)


def _with_random_heads(layers: list[dict[str, Any]], config: Config, seed: int) -> list[dict[str, Any]]:
    """Returns the layers with keys and values as `init_params` makes them."""
    small = dataclasses.replace(config, vocab_size=1, mlp_dim=1)
    fresh = decoder.init_params(small, jax.random.key(seed))["layers"]
    names = [f"attention.{x}{kind}" for x in "kv" for kind in ("", "_bias")]
    return [
        layer | {name: np.asarray(own[name]).astype(layer[name].dtype) for name in names if name in layer}
        for layer, own in zip(layers, fresh, strict=True)
    ]


# Errors


def _errors(
    model: Model, old: Params, new: list[dict[str, Any]], maps: list[tuple[Maps, Maps]], rows: list[Batch], progress: Any
) -> tuple[Errors, ...]:
    """Measures what the shared heads give back of the old ones, both of one model, which reads the old ones only."""
    sums = np.zeros((len(new), 2, 2))
    for kept in keys_and_values(_beside(model, old, new), rows, "comparing heads", progress):
        for layer, own in enumerate(maps):
            for which, (x, how) in enumerate(zip((kept[0][layer], kept[1][layer]), own, strict=True)):
                sums[layer, which] += _lost(x, how, model.config.num_kv_heads)
    return tuple(Errors(*(float(lost / max(size, 1e-300)) for lost, size in layer)) for layer in sums)


def _lost(x: np.ndarray, maps: Maps, heads: int) -> tuple[float, float]:
    """Returns |z - s up|^2 and |z|^2, summed over tokens, of old heads z followed by shared ones s."""
    z = _lanes(x, maps.rope)
    old = z[:, :heads].reshape(len(z), len(maps.up), -1, *z.shape[2:])
    back = np.einsum("skpv,kpmvw->skmpw", z[:, heads:], maps.up)
    return float((np.abs(old - back) ** 2).sum()), float((np.abs(old) ** 2).sum())


def _beside(model: Model, old: Params, new: list[dict[str, Any]]) -> Model:
    """Returns the model with the shared heads behind its own; no query that counts reads them, so nothing else changes."""
    config, more = model.config, new[0]["attention.k"].shape[1]
    heads = config.num_kv_heads + more
    wide = dataclasses.replace(config, num_kv_heads=heads, num_heads=heads * config.group_size)

    def beside(name: str, axes: str, own: dict[str, Any], other: dict[str, Any]) -> np.ndarray:
        x, at = own[name], axes.split().index("K")
        if "G" in axes:
            return np.concatenate([x, np.zeros_like(x, shape=(*x.shape[:at], more, *x.shape[at + 1 :]))], axis=at)
        return np.concatenate([x, other[name]], axis=at)

    named = {name: axes for name, axes in decoder.param_axes(config)["layers"][0].items() if "K" in axes}
    layers = tuple(
        own | {name: beside(name, axes, own, other) for name, axes in named.items()}
        for own, other in zip(old["layers"], new, strict=True)
    )
    return Model(wide, _placed(old | {"layers": layers}, wide, model), model.tokenizer)
