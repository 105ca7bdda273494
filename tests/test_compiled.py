"""What XLA makes of the decode loop: the cache is written in place, and nothing as large as one layer's keys is ever made.

Only shapes go in; no array of the model's size exists. The test needs to see that it can fail, so bad loops are checked too.
"""

import dataclasses
import math
import re
import sys
from collections import Counter
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest

from gqa_jax import decoder, layer, loop
from gqa_jax.attention import attend, attend_filled
from gqa_jax.cache import KVCache, init_cache
from gqa_jax.config import Attention, Config
from gqa_jax.sampling import sampling
from gqa_jax.sharding import Placement, make_mesh

SMOLLM2 = Config(
    vocab_size=49_152,
    num_layers=30,
    model_dim=576,
    mlp_dim=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    context_length=8192,
)
SMALL = Config(
    vocab_size=101,
    num_layers=2,
    model_dim=24,
    mlp_dim=37,
    num_heads=10,
    num_kv_heads=5,
    head_dim=16,
    context_length=4096,
)

# An array that is only named, passed on or changed where it lies.
IN_PLACE = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "fusion", "dynamic-update-slice", "scatter"}
MADE = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (\w+)\[([\d,]+)\]\S* ([\w-]+)\(")


def local(leaf) -> tuple[int, ...]:
    """The shape of what one device holds."""
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def bytes_of(tree) -> int:
    return sum(math.prod(local(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def made(program: str, least: int) -> list[str]:
    """The arrays of at least so many elements that a compiled program makes, inside fusions too."""
    found = []
    for line in program.splitlines():
        if match := MADE.match(line):
            dtype, shape, operation = match.groups()
            if operation not in IN_PLACE and math.prod(map(int, shape.split(","))) >= least:
                found.append(f"{operation} {dtype}[{shape}]")
    return found


def faults(compiled, memory: KVCache, carried: int, weights: int) -> list[str]:
    """What is wrong with a decode loop that carries a cache: what it makes, and what it does not write in place."""
    usage = compiled.memory_analysis()
    found = made(compiled.as_text(), min(*(math.prod(local(k)) for k in memory.k), weights))
    if usage.alias_size_in_bytes < bytes_of(memory) or abs(usage.alias_size_in_bytes - carried) > 64:
        found.append(f"{usage.alias_size_in_bytes} of {carried} bytes are written in place")
    if usage.temp_size_in_bytes >= bytes_of(memory.k[0]) * 2:
        found.append(f"{usage.temp_size_in_bytes} bytes of temporary arrays")
    return found


@cache
def decode_loop(batch: int, capacity: int):
    """The loop of `generate`, compiled for SmolLM2 with greedy sampling, and its state."""

    def start():
        none = jnp.zeros(batch, jnp.int32)
        return loop.State(
            memory=init_cache(SMOLLM2, batch, capacity),
            logits=jnp.zeros((batch, SMOLLM2.vocab_size), jnp.float32),
            tokens=jnp.zeros((batch, 64), jnp.int32),
            drawn=none,
            stopped=none.astype(bool),
            seen=None,
            step=jnp.int32(0),
        )

    state = jax.eval_shape(start)
    how = jax.eval_shape(lambda: sampling(batch))
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    stop, until = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    params = decoder.param_shapes(SMOLLM2)
    return loop.decode.lower(params, how, seed, stop, until, state, config=SMOLLM2).compile(), state


@pytest.mark.parametrize(("batch", "capacity"), [(1, 2048), (8, 8192)])
def test_the_decode_loop_makes_nothing_as_large_as_one_layers_keys(batch, capacity):
    compiled, state = decode_loop(batch, capacity)
    smallest_weight = SMOLLM2.model_dim * SMOLLM2.mlp_dim
    assert faults(compiled, state.memory, bytes_of(state), smallest_weight) == []


def test_the_room_that_is_not_used_costs_no_temporary_memory():
    short, long = (decode_loop(1, capacity)[0].memory_analysis().temp_size_in_bytes for capacity in (2048, 8192))
    assert long == pytest.approx(short, rel=0.05)
    assert short < 2_000_000


def sharded_loop(config: Config, placement: Placement, batch: int, capacity: int):
    def shape(dims, dtype, letters):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=placement.sharding(letters))

    cache = init_cache(config, batch, capacity, mesh=placement)
    memory = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), cache)
    state = loop.State(
        memory=memory,
        logits=shape((batch, config.vocab_size), jnp.float32, "B D"),
        tokens=shape((batch, 64), jnp.int32, "B T"),
        drawn=shape((batch,), jnp.int32, "B"),
        stopped=shape((batch,), jnp.bool_, "B"),
        seen=None,
        step=shape((), jnp.int32, ""),
    )
    how = jax.tree.map(lambda x: shape(x.shape, x.dtype, "B"), sampling(batch))
    seed, stop, until = (jax.ShapeDtypeStruct(*kind) for kind in (((), jnp.uint32), ((1,), jnp.int32), ((), jnp.int32)))
    params = decoder.param_shapes(config, mesh=placement)
    return loop.decode.lower(params, how, seed, stop, until, state, config=config).compile(), params, state


EXCHANGE = re.compile(r"= (\(?[^=]*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def exchanges(program: str) -> tuple[Counter, int]:
    """How often a program exchanges what, and the elements of the largest array that is exchanged."""
    found = EXCHANGE.findall(program)
    shapes = [
        math.prod(map(int, filter(None, dims.split(",")))) for made, _ in found for dims in re.findall(r"\[([\d,]*)\]", made)
    ]
    return Counter(kind for _, kind in found), max(shapes)


@pytest.mark.parametrize("policy", ["replicate", "split"])
def test_on_a_mesh_nothing_as_large_as_keys_is_made_or_exchanged(policy):
    layers = {}
    for number in (2, 3):
        config = dataclasses.replace(
            SMALL, num_layers=number, num_heads=6, num_kv_heads=2, attention=(Attention(), Attention(window=1500))
        )
        placement = make_mesh(config, tp=4, data=2, policy=policy)
        compiled, params, state = sharded_loop(config, placement, 4, 2048)
        assert faults(compiled, state.memory, bytes_of(state), sys.maxsize) == []
        usage = compiled.memory_analysis()
        # The rest is what sampling takes, a few numbers a row.
        assert 0 <= usage.argument_size_in_bytes - bytes_of((params, state)) < 256
        layers[number], largest = exchanges(compiled.as_text())
        assert largest < min(math.prod(local(k)) for k in state.memory.k) / 10
    each = layers[3] - layers[2]
    assert each == ({"all-reduce": 2} if policy == "replicate" else {"all-reduce": 2, "all-gather": 1, "all-to-all": 1})


def good(q, k, v, positions, filled, reading):
    return attend_filled(q, k, v, positions, filled, reading)


def all_slots_at_once(q, k, v, positions, filled, reading):
    shown = (jnp.arange(k.shape[2]) < filled[:, None])[:, None, None, None]
    return attend(q, k, v, shown, scale=reading.scale)


def slots_before_heads(q, k, v, positions, filled, reading):
    k, v = (jax.lax.optimization_barrier(x.swapaxes(1, 2)) for x in (k, v))
    return attend_filled(q, k.swapaxes(1, 2), v.swapaxes(1, 2), positions, filled, reading)


def wider_slots(q, k, v, positions, filled, reading):
    k, v = (jax.lax.optimization_barrier(x.astype(jnp.float32)) for x in (k, v))
    return attend_filled(q, k, v, positions, filled, reading)


def repeated_heads(q, k, v, positions, filled, reading):
    rows, heads, group, length, width = q.shape
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    part = attend_filled(q.reshape(rows, heads * group, 1, length, width), k, v, positions, filled, reading)
    return jax.tree.map(lambda x: x.reshape(rows, heads, group, *x.shape[3:]), part)


@pytest.mark.parametrize(
    ("how", "dtype", "donated", "words"),
    [
        (good, "float32", True, None),
        (good, "float32", False, r"copy f32\[3,5,2048,16\].* 0 of 7864332 bytes are written in place"),
        (all_slots_at_once, "float32", True, r"select f32\[3,5,2048,16\]"),
        (slots_before_heads, "float32", True, r"(transpose|copy) f32\[3,(2048,5|5,2048),16\]"),
        (wider_slots, "bfloat16", True, r"convert f32\[3,5,2048,16\]"),
        (repeated_heads, "float32", True, r"broadcast f32\[3,5,2,2048,16\].*bytes of temporary"),
    ],
    ids=["good", "not donated", "all slots at once", "slots before heads", "wider slots", "repeated heads"],
)
def test_the_check_finds_what_is_wrong_with_a_bad_loop(how, dtype, donated, words, monkeypatch):
    monkeypatch.setattr(layer, "attend_filled", how)

    @partial(jax.jit, donate_argnums=2 if donated else ())
    def decode(params, token, memory):
        def step(carry):
            token, memory = carry
            logits, memory = decoder.forward(params, token, memory, SMALL)
            return logits.argmax(-1).astype(jnp.int32), memory

        return jax.lax.while_loop(lambda carry: carry[1].length[0] < 1000, step, (token, memory))

    token = jax.ShapeDtypeStruct((3, 1), jnp.int32)
    memory = jax.eval_shape(lambda: init_cache(SMALL, 3, 2048, dtype))
    compiled = decode.lower(decoder.param_shapes(SMALL), token, memory).compile()
    found = faults(compiled, memory, bytes_of(memory), sys.maxsize)
    assert found == [] if words is None else re.search(words, "; ".join(found)), found
