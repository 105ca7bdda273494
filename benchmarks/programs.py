"""The compiled decode loop, from shapes alone, and what it sends between devices."""

import math
import re
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from gqa_jax import decoder, loop
from gqa_jax.cache import init_cache
from gqa_jax.config import Config
from gqa_jax.sampling import sampling
from gqa_jax.sharding import Placement

KINDS = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
COLLECTIVE = re.compile(rf"^\s*(?:ROOT )?%?\S+ = (.*?) ({KINDS})(?:-start)?\((.*)$")
ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]")
NUMBERS = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}


class Collective(NamedTuple):
    """One exchange: its kind, the bytes of its result on each device, and where in the program it was asked for."""

    kind: str
    nbytes: int
    source: str


def decode_state(config: Config, batch: int, capacity: int, dtype: DTypeLike, placement: Placement | None) -> loop.State:
    """Returns the shapes that the loop of `generate` carries, as they lie on a mesh."""

    def shape(shape: tuple[int, ...], dtype: DTypeLike, letters: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=None if placement is None else placement.sharding(letters))

    even = placement is None or placement.padded("V", config.vocab_size) == config.vocab_size
    memory = jax.eval_shape(lambda: init_cache(config, batch, capacity, dtype, mesh=placement))
    memory = jax.tree.map(lambda x: shape(x.shape, x.dtype, "B K S H" if x.ndim == 4 else "B"), memory)
    return loop.State(
        memory=memory,
        logits=shape((batch, config.vocab_size), jnp.float32, "B V" if even else "B D"),
        tokens=shape((batch, 64), jnp.int32, "B T"),
        drawn=shape((batch,), jnp.int32, "B"),
        stopped=shape((batch,), jnp.bool_, "B"),
        seen=None,
        step=shape((), jnp.int32, ""),
    )


def decode_program(
    config: Config, batch: int, capacity: int, dtype: DTypeLike = jnp.float32, placement: Placement | None = None
) -> Any:
    """Compiles the greedy loop; no array is made."""
    state = decode_state(config, batch, capacity, dtype, placement)
    params = decoder.param_shapes(config, dtype, placement)
    how = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=state.drawn.sharding), jax.eval_shape(lambda: sampling(batch))
    )
    arguments = (params, how, np.uint32(0), np.zeros(1, np.int32), np.int32(1), state)
    return loop.decode.lower(*arguments, config=config).compile()


def collectives(program: str) -> list[Collective]:
    """Returns every exchange of a compiled program, those of asynchronous pairs once."""
    found = []
    for line in program.splitlines():
        if match := COLLECTIVE.match(line):
            shapes, kind, rest = match.groups()
            sizes = [
                NUMBERS[dtype] * math.prod(map(int, filter(None, shape.split(",")))) for dtype, shape in ARRAY.findall(shapes)
            ]
            source = re.search(r'op_name="([^"]*)"', rest)
            found.append(Collective(kind, sum(sizes), source[1] if source else ""))
    return found


def counts(found: list[Collective]) -> dict[str, int]:
    """Counts exchanges by kind."""
    return dict(Counter(one.kind for one in found))
