"""The decode loop: tokens go in for each row, the logits of what follows come out, and one of them goes in again.

Reading a prompt and decoding are the same step, `extend`. What the rows remember is a `KVCache`, or a `Transcript`, which
keeps only the ids and computes everything anew, to show what a cache is worth.
"""

import dataclasses
import typing
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from gqa_jax import decoder
from gqa_jax.cache import KVCache
from gqa_jax.config import Config
from gqa_jax.sampling import Sampling, penalise, sample


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transcript:
    """The memory of rows without a cache: their ids, and how many there are."""

    ids: Int[Array, "B S"]
    length: Int[Array, " B"]

    @property
    def capacity(self) -> int:
        """How many tokens each row has room for."""
        return self.ids.shape[1]


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What the decode loop carries: the rows' memory, the logits of what comes next, and the tokens drawn so far."""

    memory: KVCache | Transcript
    logits: Float[Array, "B V"]
    tokens: Int[Array, "B new"]
    drawn: Int[Array, " B"]
    stopped: Bool[Array, " B"]
    seen: Bool[Array, "B V"] | None
    step: Int[Array, ""]


@partial(jax.jit, static_argnames="config", donate_argnames=("logits", "memory"))
def extend(
    params: decoder.Params,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    logits: Float[Array, "B V"],
    memory: KVCache | Transcript,
    config: Config,
) -> tuple[Float[Array, "B V"], KVCache | Transcript]:
    """Adds the first `count` of T tokens to each row; returns the logits of what follows, and the memory.

    A row that gains nothing keeps its `logits`. Tokens behind `count` are not kept.
    """
    if isinstance(memory, Transcript):
        put = jax.vmap(partial(lax.dynamic_update_slice_in_dim, axis=0))
        longer = Transcript(put(memory.ids, tokens, memory.length), memory.length + count)
        x, _ = decoder.hidden_states(params, longer.ids, None, config)
        last = longer.length - 1
    else:
        x, longer = decoder.hidden_states(params, tokens, memory, config, count)
        assert longer is not None
        last = count - 1
    x = jnp.take_along_axis(x, jnp.maximum(last, 0)[:, None, None], axis=1)
    following = decoder.logits(params, x, config)[:, 0]
    return jnp.where((count > 0)[:, None], following, logits), longer


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def decode(
    params: decoder.Params,
    how: Sampling,
    seed: UInt[Array, ""],
    stop: Int[Array, " stops"],
    until: Int[Array, ""],
    state: State,
    config: Config,
) -> State:
    """Draws and feeds back one token a row and step, until step `until` or every row has stopped."""
    rows = jnp.arange(state.drawn.shape[0], dtype=jnp.uint32)
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(rows)

    def step(state: State) -> State:
        logits = state.logits if state.seen is None else penalise(state.logits, state.seen, how)
        tokens = sample(logits, jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(state.step, keys.shape)), how)
        going = ~state.stopped
        count = going.astype(jnp.int32)
        following, memory = extend(params, tokens[:, None], count, state.logits, state.memory, config)
        return State(
            memory=memory,
            logits=following,
            tokens=state.tokens.at[:, state.step].set(tokens),
            drawn=state.drawn + count,
            stopped=state.stopped | (going & (tokens[:, None] == stop).any(axis=1)),
            seen=None if state.seen is None else state.seen.at[rows, tokens].set(True),
            step=state.step + 1,
        )

    return lax.while_loop(lambda state: (state.step < until) & ~state.stopped.all(), step, state)
