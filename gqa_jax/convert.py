"""Fewer KV heads for a trained model: neighbours are merged into one, and what is lost is made good in W_q and W_o.

Each method is a pair of linear maps for the keys and one for the values of each layer (`heads`), from the old heads to a shared
one and back. The first goes into W_k and W_v, the second into W_q and W_o, so that the result is an ordinary model.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from gqa_jax import decoder, heads
from gqa_jax.calibrate import Batch, Progress, batches, keys_and_values, negative_log_likelihood
from gqa_jax.config import Config, Rope
from gqa_jax.decoder import Params
from gqa_jax.heads import Maps
from gqa_jax.request import Model, Prompt, whole

__all__ = ["METHODS", "Conversion", "Errors", "convert", "negative_log_likelihood"]

Method = Literal["mean", "first", "random", "procrustes", "pca"]
METHODS: tuple[Method, ...] = get_args(Method)
ALIGNED = ("procrustes", "pca")


class Errors(NamedTuple):
    """How much of a layer's keys and values the shared heads do not give back: E|x - x'|^2 / E|x|^2."""

    k: float
    v: float


class Conversion(NamedTuple):
    """A model of fewer KV heads, and what each layer has lost; None without a text to measure it on."""

    model: Model
    errors: tuple[Errors, ...] | None


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
    seed = whole("seed", seed, 0, 2**32 - 1)
    rows = None if calibration is None else batches(model, calibration)  # pyright: ignore[reportArgumentType]
    if config == old:
        return Conversion(model, None if rows is None else (Errors(0.0, 0.0),) * old.num_layers)
    params = decoder.gather(model.params, old)
    maps = _maps(model, params, config, method, rows, progress)
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
        raise ValueError(f"{method} reads a text to see how the heads lie; give it as calibration (--calibration FILE).")
    return dataclasses.replace(config, num_kv_heads=num_kv_heads)


def _placed(params: Params, config: Config, model: Model) -> Params:
    if model.placement is None:
        return jax.tree.map(jnp.asarray, params)
    return decoder.place(params, config, model.placement)


# Maps


def _maps(
    model: Model, params: Params, config: Config, method: Method, rows: list[Batch] | None, progress: Progress | None
) -> list[tuple[Maps, Maps]]:
    """Returns the maps of the keys and of the values of each layer."""
    merged = model.config.num_kv_heads // config.num_kv_heads
    ropes = [config.layer_attention(layer).rope for layer in range(config.num_layers)]
    if method not in ALIGNED:
        share = np.full(merged, 1 / merged) if method == "mean" else np.eye(merged)[0]
        kept = [heads.plain(share, config.num_kv_heads, config.head_dim, rope) for rope in (*ropes, None)]
        return [(keys, kept[-1]) for keys in kept[:-1]]
    assert rows is not None
    needed, have = merged * config.head_dim, sum(int(batch.count.sum()) for batch in rows)
    if have < needed:
        raise ValueError(
            f"The text has {have} tokens; {method} needs at least {needed}, head_dim times the {merged} heads that become one, "
            "and better ten times as many."
        )
    if method == "procrustes":
        found = _moments(model, model.config, merged, rows, progress)
        return [
            (heads.aligned(k, merged, rope), heads.aligned(v, merged, None))
            for rope, (k, _, v) in zip(ropes, found, strict=True)
        ]
    asked = _beside(model, params, [_queries_as_keys(layer) for layer in params["layers"]])
    found = _moments(asked, model.config, merged, rows, progress)
    return [_principal(layer, rope, *sums) for layer, rope, sums in zip(params["layers"], ropes, found, strict=True)]


def _principal(
    weights: dict[str, np.ndarray], rope: Rope | None, k: np.ndarray, q: np.ndarray, v: np.ndarray
) -> tuple[Maps, Maps]:
    """Returns principal directions: an error of a key weighs what its queries make of it, one of a value what W_o does."""
    K, G, H, D = weights["attention.o"].shape
    outputs = heads.lanes(np.moveaxis(weights["attention.o"].reshape(K * G, H, D), -1, 0), None)
    of_keys, of_values = (heads.by_group(x, K, K // len(k)) for x in (q, heads.moment(outputs, 1)))
    return heads.principal(k, of_keys, rope), heads.principal(v, of_values, None)


def _moments(model: Model, own: Config, merged: int, rows: list[Batch], progress: Progress | None) -> list[list[np.ndarray]]:
    """Returns the second moments of each layer: of the model's own keys, of what stands behind them, and of its own values.

    They are the same before and after queries and keys are turned, since at one position all heads turn by the same angle.
    """
    sums: list[Any] = [[0.0, 0.0, 0.0] for _ in range(own.num_layers)]
    K = own.num_kv_heads
    for keys, values in keys_and_values(model, rows, "calibrating", progress):
        for layer, (total, k, v) in enumerate(zip(sums, keys, values, strict=True)):
            k, v = heads.lanes(k, own.layer_attention(layer).rope), heads.lanes(v, None)
            for which, (z, together) in enumerate(((k[:, :K], merged), (k[:, K:], 1), (v[:, :K], merged))):
                total[which] += heads.moment(z, together)
    return sums


def _queries_as_keys(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns "D (K G) H" of the queries in the place of keys, and nothing as values."""
    made = {}
    for kind in ("", "_bias"):
        if (name := f"attention.q{kind}") in weights:
            *width, K, G, H = weights[name].shape
            made[f"attention.k{kind}"] = weights[name].reshape(*width, K * G, H)
            made[f"attention.v{kind}"] = np.zeros_like(made[f"attention.k{kind}"])
    return made


def _folded(weights: dict[str, np.ndarray], keys: Maps, values: Maps) -> dict[str, np.ndarray]:
    """Returns the weights of a layer with its heads merged."""
    merge = {f"attention.{x}{kind}": maps for x, maps in (("k", keys), ("v", values)) for kind in ("", "_bias")}
    made = {name: heads.merged(weights[name], maps) for name, maps in merge.items() if name in weights}
    made |= {name: heads.regrouped(weights[name], keys) for name in ("attention.q", "attention.q_bias") if name in weights}
    # W_o reads what W_q is asked for: the same axes, with D at the other end.
    made["attention.o"] = np.moveaxis(heads.regrouped(np.moveaxis(weights["attention.o"], -1, 0), values), 0, -1)
    if "attention.sinks" in weights:
        made["attention.sinks"] = weights["attention.sinks"].reshape(len(keys.up), -1)
    return weights | {name: x.astype(weights[name].dtype) for name, x in made.items()}


def _with_random_heads(layers: list[dict[str, Any]], config: Config, seed: int) -> list[dict[str, Any]]:
    """Returns the layers with keys and values as `init_params` makes them."""
    small = dataclasses.replace(config, vocab_size=1, mlp_dim=1)
    fresh = decoder.init_params(small, jax.random.key(np.uint32(seed)))["layers"]
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


def _lost(x: np.ndarray, maps: Maps, K: int) -> tuple[float, float]:
    """Returns |z - s up|^2 and |z|^2, summed over tokens, of K old heads z and the shared ones s behind them."""
    z = heads.lanes(x, maps.rope)
    old = z[:, :K].reshape(len(z), len(maps.up), -1, *z.shape[2:])
    back = np.einsum("skpv,kpmvw->skmpw", z[:, K:], maps.up)
    return float((np.abs(old - back) ** 2).sum()), float((np.abs(old) ** 2).sum())


def _beside(model: Model, old: Params, new: list[dict[str, Any]]) -> Model:
    """Returns the model with other keys and values behind its own, in KV heads whose queries and outputs are zero."""
    config, more = model.config, new[0]["attention.k"].shape[1]
    count = config.num_kv_heads + more
    wide = dataclasses.replace(config, num_kv_heads=count, num_heads=count * config.group_size)

    def beside(name: str, axes: str, own: dict[str, Any], other: dict[str, Any]) -> np.ndarray:
        x, at = own[name], axes.split().index("K")
        if "G" in axes:
            return np.concatenate([x, np.zeros_like(x, shape=(*x.shape[:at], more, *x.shape[at + 1 :]))], axis=at)
        return np.concatenate([x, other[name]], axis=at)

    layers = tuple(
        own | {name: beside(name, letters, own, other) for name, letters in axes.items() if "K" in letters}
        for axes, own, other in zip(decoder.param_axes(config)["layers"], old["layers"], new, strict=True)
    )
    return Model(wide, _placed(old | {"layers": layers}, wide, model), model.tokenizer)
