"""What a call to `generate` asks for: everything is checked here, on the host, before anything is compiled."""

import operator
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from gqa_jax import cache as kv
from gqa_jax.cache import KVCache
from gqa_jax.config import Config
from gqa_jax.decoder import Params, param_shapes
from gqa_jax.loop import Transcript
from gqa_jax.sharding import Placement, to_host, zeros

CAPACITY_STEP = 256

Ids = Sequence[int | np.integer] | np.ndarray | Array
Prompt = str | Ids


class Model(NamedTuple):
    """A decoder with its weights, and the tokenizer that goes with them (None: ids only).

    Any tokenizer will do that has what `gqa_jax.tokenizer.Tokenizer` has: `vocab_size`, `stop_ids`, `encode`, `decode`
    and `stream`.
    """

    config: Config
    params: Params
    tokenizer: Any = None

    @property
    def placement(self) -> Placement | None:
        """How the weights lie on a mesh; None on one device."""
        return self.params.get("placement")

    def __repr__(self) -> str:
        """Leaves the weights out."""
        leaves = jax.tree.leaves(self.params)
        dtypes = "/".join(sorted({str(leaf.dtype) for leaf in leaves}))
        where = "" if self.placement is None else f", on {dict(self.placement.mesh.shape)}"
        count = sum(leaf.size for leaf in jax.tree.leaves(param_shapes(self.config)))
        return f"Model({self.config}, {count} parameters in {dtypes}, {type(self.tokenizer).__name__}{where})"


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Returns a whole number.

    Raises:
        ValueError: it is none, or out of range.
    """
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} is {value!r}; it must be a whole number.") from error
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name} is {number}; it must be at least {least}" + (f" and at most {most}." if most else "."))
    return number


def ids_of(model: Model, prompts: Prompt | Sequence[Prompt], cache: KVCache | None) -> list[list[int]]:
    """Turns every form of prompts into lists of ids, and refuses what the model cannot read."""
    one = isinstance(prompts, str) or (len(prompts) > 0 and all(np.ndim(id) == 0 and not isinstance(id, str) for id in prompts))
    rows = [prompts] if one else list(prompts)
    if not rows:
        raise ValueError("There are no prompts; at least one is needed.")
    if cache is not None and cache.length.is_deleted():
        raise ValueError("The cache has been consumed by an earlier call; go on from the one that call returned.")
    if cache is not None:
        kv.check_room(cache, 0)
    held = np.zeros(len(rows), int) if cache is None else to_host(cache.length)
    if len(held) != len(rows):
        raise ValueError(f"The cache has {len(held)} rows and there are {len(rows)} prompts; there must be one for each row.")
    ids = []
    for row, prompt in enumerate(rows):
        if isinstance(prompt, str):
            if model.tokenizer is None:
                raise ValueError("The model has no tokenizer, so prompts must be lists of ids.")
            # In the middle of a text there is no second beginning.
            prompt = model.tokenizer.encode(prompt, add_bos=False if held[row] else None)
        array = np.asarray(prompt)
        if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
            raise ValueError(
                f"Prompt {row} is {reprlib.repr(prompt)}; it must be a string or a list of ids. Messages of a chat become a "
                "string by model.tokenizer.chat(messages)."
            )
        ids.append(array.tolist())
        _check_ids(ids[-1], row, model.config)
    return ids


def _check_ids(ids: list[int], row: int, config: Config) -> None:
    if not ids:
        raise ValueError(f"Prompt {row} is empty, and the model adds no token of its own; give it at least one token.")
    for id in (min(ids), max(ids)):
        if not 0 <= id < config.vocab_size:
            raise ValueError(f"Prompt {row} holds the id {id}; the vocabulary has {config.vocab_size}, from 0 on.")


def stop_ids(model: Model, stop: int | Iterable[int | np.integer] | Array | None) -> tuple[int, ...]:
    """Returns the ids that end a row; the model's own where `stop` is None.

    Raises:
        ValueError: an id that is no whole number, or beyond the vocabulary.
    """
    if stop is None:
        return () if model.tokenizer is None else tuple(model.tokenizer.stop_ids)
    many = list(stop) if isinstance(stop, Iterable) and getattr(stop, "ndim", 1) else [stop]
    ids = tuple(whole("The stop id", id, 0) for id in many)
    for id in ids:
        if id >= model.config.vocab_size:
            raise ValueError(f"The stop id is {id}; the vocabulary has {model.config.vocab_size}, from 0 on.")
    return ids


def memory_for(
    model: Model,
    ids: list[list[int]],
    max_new_tokens: int,
    use_cache: bool,
    cache: KVCache | None,
    capacity: int | None,
    dtype: DTypeLike | None,
) -> KVCache | Transcript:
    """Makes room for what each row holds, its prompt and its new tokens, or says why there is none."""
    batch, context = len(ids), model.config.context_length
    held = [0] * batch if cache is None else to_host(cache.length).tolist()
    read = max(row + len(prompt) for row, prompt in zip(held, ids, strict=True))
    needed = read + max_new_tokens
    tokens = f"{read} tokens of prompt and {max_new_tokens} new ones are {needed} tokens"
    if needed > context:
        raise ValueError(f"{tokens}; the model's context is {context}. Shorten the prompt or lower max_new_tokens.")
    if capacity is None:
        capacity = cache.capacity if cache is not None else -(-needed // CAPACITY_STEP) * CAPACITY_STEP
    if needed > capacity:
        raise ValueError(f"{tokens}; the cache has room for {capacity}. Pass capacity={needed}, or lower max_new_tokens.")
    if not use_cache:
        if cache is not None:
            raise ValueError("use_cache=False cannot go on from a cache; leave one of the two out.")
        where = model.placement
        kv.check_batch(batch, where)
        return Transcript(zeros((batch, capacity), jnp.int32, "B T", where), zeros((batch,), jnp.int32, "B", where))
    if cache is None:
        own = model.params["embedding"].dtype
        return kv.init_cache(model.config, batch, capacity, own if dtype is None else dtype, mesh=model.placement)
    _check_cache(cache, model, dtype)
    return kv.grow(cache, capacity) if capacity > cache.capacity else cache


def _check_cache(cache: KVCache, model: Model, dtype: DTypeLike | None) -> None:
    if cache.placement != model.placement:
        raise ValueError(
            f"The cache lies on {cache.placement or 'no mesh'} and the model on {model.placement or 'no mesh'}; make it with "
            "gqa_jax.init_cache(..., mesh=model.placement)."
        )
    have = (len(cache.k), cache.k[0].shape[1], cache.k[0].shape[3])
    want = (model.config.num_layers, *kv.cache_shape(model.config, 1, 1, model.placement)[1::2])
    if have != want:
        raise ValueError(
            f"The cache has {have[0]} layers of {have[1]} KV heads of width {have[2]}, the model {want[0]} of {want[1]} of "
            f"width {want[2]}; make it with gqa_jax.init_cache(model.config, ...)."
        )
    if dtype is not None and cache.k[0].dtype != jnp.dtype(dtype):
        raise ValueError(f"The cache is {cache.k[0].dtype} and cache_dtype is {jnp.dtype(dtype)}; a cache keeps its dtype.")
