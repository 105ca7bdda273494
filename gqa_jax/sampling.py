"""From logits to the next token: the likeliest, or one drawn.

Temperature and top-k are old; top-p is arXiv:1904.09751, min-p arXiv:2407.01082, the repetition penalty arXiv:1909.05858.
"""

import dataclasses
import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

PerRow = float | int | Sequence[float | int] | np.ndarray | Array


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How each row draws its tokens, one number a row. Made by `sampling`.

    Only what is static changes the compiled program: whether any row draws at all, whether any filter cuts the vocabulary,
    and whether repetition is penalised.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    repetition_penalty: Float[Array, " B"]
    draws: bool = dataclasses.field(metadata={"static": True})
    filters: bool = dataclasses.field(metadata={"static": True})
    penalises: bool = dataclasses.field(metadata={"static": True})


def sampling(
    batch: int,
    *,
    temperature: PerRow = 0.0,
    top_k: int | None = None,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
    repetition_penalty: PerRow = 1.0,
) -> Sampling:
    """Returns the record for `batch` rows; each number is one for all rows or a sequence with one for each.

    Args:
        batch: how many rows are drawn at once.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: how many of the likeliest tokens stay; None keeps all.
        top_p: a token stays while the tokens likelier than it hold less than this much probability; 1 keeps all.
        min_p: a token stays if it is at least this many times as likely as the likeliest; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens that have occurred (arXiv:1909.05858).

    Raises:
        ValueError: a number outside its range, or not one for each row.
    """
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1, or None to keep every token.")
    rows = {
        "temperature": _per_row(temperature, "temperature", batch, 0.0, math.inf),
        "top_p": _per_row(top_p, "top_p", batch, 0.0, 1.0),
        "min_p": _per_row(min_p, "min_p", batch, 0.0, 1.0),
        "repetition_penalty": _per_row(repetition_penalty, "repetition_penalty", batch, 1e-6, math.inf),
    }
    draws = bool((rows["temperature"] > 0).any())
    return Sampling(
        **{name: jnp.asarray(values) for name, values in rows.items()},
        top_k=jnp.full(batch, np.iinfo(np.int32).max if top_k is None else top_k, jnp.int32),
        draws=draws,
        filters=draws and bool(top_k is not None or (rows["top_p"] < 1).any() or (rows["min_p"] > 0).any()),
        penalises=bool((rows["repetition_penalty"] != 1).any()),
    )


def _per_row(value: PerRow, name: str, batch: int, least: float, most: float) -> np.ndarray:
    values = np.asarray(value, np.float32)
    if values.shape not in ((), (batch,)):
        raise ValueError(f"{name} has shape {values.shape}; it must be one number, or one for each of the {batch} rows.")
    wrong = values[~((values >= least) & (values <= most) & np.isfinite(values))]
    if wrong.size:
        limit = f"at least {least:g}" if math.isinf(most) else f"from {least:g} to {most:g}"
        raise ValueError(f"{name} is {wrong.flat[0]:g}; it must be {limit}.")
    return np.broadcast_to(values, (batch,))


def sample(logits: Float[Array, "B V"], keys: Array, how: Sampling) -> Int[Array, " B"]:
    """Returns one token for each row; each row draws with a key of its own. Everything is float32 here."""
    logits = logits.astype(jnp.float32)
    likeliest = logits.argmax(axis=-1).astype(jnp.int32)
    if not how.draws:
        return likeliest
    # From the highest downwards, so that no temperature is too small to divide by.
    warm = (logits - logits.max(axis=-1, keepdims=True)) / jnp.maximum(how.temperature, 1e-30)[:, None]
    if how.filters:
        order = jnp.argsort(warm, axis=-1, descending=True)
        warm = _cut(jnp.take_along_axis(warm, order, axis=-1), how)
    drawn = jax.vmap(jax.random.categorical)(keys, warm)
    if how.filters:
        drawn = jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0]
    return jnp.where(how.temperature == 0, likeliest, drawn.astype(jnp.int32))


def _cut(falling: Float[Array, "B V"], how: Sampling) -> Float[Array, "B V"]:
    """Hides what top-k, then top-p, then min-p leave out of logits sorted from high to low; the first always stays."""
    rank = jnp.arange(falling.shape[1], dtype=jnp.int32)
    stays = rank < how.top_k[:, None]
    chance = jax.nn.softmax(jnp.where(stays, falling, -jnp.inf), axis=-1)
    likelier = jnp.cumsum(chance, axis=-1) - chance
    top_p, min_p = how.top_p[:, None], how.min_p[:, None]
    stays &= ((likelier < top_p) | (top_p >= 1)) & (chance >= min_p * chance[:, :1])
    return jnp.where(stays | (rank == 0), falling, -jnp.inf)


def penalise(logits: Float[Array, "B V"], seen: Bool[Array, "B V"], how: Sampling) -> Float[Array, "B V"]:
    """Makes tokens that have occurred less likely: positive logits are divided by the penalty, negative ones multiplied."""
    penalty = how.repetition_penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
