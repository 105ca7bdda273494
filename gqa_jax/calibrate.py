"""What a model makes of a text: the keys and values of its layers, and how well it foresees the next token."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gqa_jax import cache as kv
from gqa_jax.cache import KVCache
from gqa_jax.config import Config
from gqa_jax.decoder import Params, forward, hidden_states
from gqa_jax.request import Model, Prompt, ids_of, whole
from gqa_jax.sharding import to_host

Progress = Callable[[str, int, int], None]
LENGTH = 512


class Batch(NamedTuple):
    """Rows of tokens, padded on the right, and how many each holds."""

    tokens: Int[np.ndarray, "B T"]
    count: Int[np.ndarray, " B"]


def negative_log_likelihood(
    model: Model, texts: Prompt | list[Prompt], *, length: int = LENGTH, progress: Progress | None = None
) -> float:
    """Returns the mean of -log p over all tokens of a text but its first, in nats.

    The text is read in rows of `length` tokens, or of the model's context where that is less. The last token of a row is the
    first of the next, so that each is foreseen once; a tokenizer that puts BOS before a text puts it before each row instead.

    Args:
        model: what is to be measured.
        texts: a text or its ids, or a list of either.
        length: tokens of a row, 2 or more.
        progress: is told (what, done, total) while reading.

    Raises:
        ValueError: a length below 2, ids that the model does not have, or fewer than two tokens.
    """
    rows = batches(model, texts, length)
    total, read = 0.0, 0
    for done, batch in enumerate(rows, 1):
        surprise = _surprise(model.params, jnp.asarray(batch.tokens), jnp.asarray(batch.count), model.config)
        total += float(to_host(surprise))
        read += int(np.maximum(batch.count - 1, 0).sum())
        if progress is not None:
            progress("measuring", done, len(rows))
    return total / read


@partial(jax.jit, static_argnames="config")
def _surprise(params: Params, tokens: Int[Array, "B T"], count: Int[Array, " B"], config: Config) -> Float[Array, ""]:
    scores, placement = forward(params, tokens, None, config)[0], params.get("placement")
    if placement is not None:
        tokens, count = placement.moved(tokens, "B T"), placement.moved(count, "B")
    chances = jnp.take_along_axis(jax.nn.log_softmax(scores[:, :-1]), tokens[:, 1:, None], axis=2)[..., 0]
    known = jnp.arange(1, tokens.shape[1], dtype=jnp.int32) < count[:, None]
    return -jnp.where(known, chances, jnp.zeros((), chances.dtype)).sum()


def batches(model: Model, texts: Prompt | list[Prompt], length: int = LENGTH) -> list[Batch]:
    """Returns the rows of texts, as `negative_log_likelihood` reads them, as many at a time as the model's mesh asks for."""
    length = min(whole("The length", length, 2), model.config.context_length)
    if len(texts) == 0:
        raise ValueError("The text is empty; give one of two tokens at least.")
    tokenizer = model.tokenizer
    bos = tokenizer.bos_id if getattr(tokenizer, "add_bos", False) else None
    rows = [row for ids in ids_of(model, texts, None) for row in _rows(ids, length, bos)]
    if not rows:
        raise ValueError("The text has fewer than 2 tokens, so that none can be foreseen; give a longer one.")
    together = 1 if model.placement is None else model.placement.parts("B")
    rows += [[]] * (-len(rows) % together)
    padded = np.array([row + [0] * (length - len(row)) for row in rows], np.int32).reshape(-1, together, length)
    count = np.array([len(row) for row in rows], np.int32).reshape(-1, together)
    return [Batch(*batch) for batch in zip(padded, count, strict=True)]


def _rows(ids: list[int], length: int, bos: int | None) -> Iterator[list[int]]:
    if bos is not None and ids[:1] != [bos]:
        ids = [bos, *ids]
    for start in range(0, len(ids) - 1, length - 1):
        row = ids[start : start + length]
        yield row if bos is None else [bos, *row[1:]]


def keys_and_values(
    model: Model, rows: list[Batch], what: str = "reading", progress: Progress | None = None
) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
    """Gives, for each batch, the float32 keys and values of all layers as a cache keeps them: turned, with axes "S K H".

    The tokens of a batch are in any order, and padding is zero. `progress` is told that `what` goes on.
    """
    config, placement = model.config, model.placement
    together, length = rows[0].tokens.shape
    cache = kv.init_cache(config, together, length, jnp.float32, rings=False, mesh=placement)
    for done, batch in enumerate(rows, 1):
        k, v = _kept(model.params, jnp.asarray(batch.tokens), jnp.asarray(batch.count), cache, config)
        yield [_of_tokens(to_host(x), config) for x in k], [_of_tokens(to_host(x), config) for x in v]
        if progress is not None:
            progress(what, done, len(rows))


@partial(jax.jit, static_argnames="config")
def _kept(
    params: Params, tokens: Int[Array, "B T"], count: Int[Array, " B"], cache: KVCache, config: Config
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    kept = hidden_states(params, tokens, cache, config, count)[1]
    assert kept is not None
    return kept.k, kept.v


def _of_tokens(x: Float[np.ndarray, "B K S H"], config: Config) -> Float[np.ndarray, "tokens heads H"]:
    return x[:, : config.num_kv_heads].swapaxes(1, 2).reshape(-1, config.num_kv_heads, config.head_dim)
