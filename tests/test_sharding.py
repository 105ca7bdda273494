"""Tensor parallelism on eight devices: every head count on every number of them gives what one device gives.

Weights are random everywhere, so that no bias, norm or padded head can be left out, doubled or misplaced unseen.
"""

import contextlib
import dataclasses
import functools
import math
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, PartitionSpec

import gqa_jax
from gqa_jax import decoder, loop
from gqa_jax.attention import grouped_query_attention
from gqa_jax.cache import init_cache
from gqa_jax.config import Attention, Config, Rope
from gqa_jax.sharding import HeadPlan, Placement, make_mesh, plan_heads
from tests import oracles

HEADS = [(32, 8), (8, 8), (9, 3), (4, 1), (6, 2), (14, 2), (28, 4), (12, 12), (5, 5), (71, 1)]
DEGREES = [1, 2, 3, 4, 6, 8]
CAPACITY = 11

heads = pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "{}-{}".format(*heads))
degrees = pytest.mark.parametrize("tp", DEGREES)

pytestmark = pytest.mark.usefixtures("quick_compilation")


def config_of(heads: tuple[int, int], **more) -> Config:
    """A tiny model whose vocabulary and MLP divide by nothing, with a ring in one layer of two."""
    sizes = {"vocab_size": 13, "num_layers": 2, "model_dim": 10, "mlp_dim": 7, "head_dim": 4, "context_length": 2048}
    attention = (Attention(window=3), Attention())
    return Config(**({"num_heads": heads[0], "num_kv_heads": heads[1], "attention": attention} | sizes | more))


EVERYTHING = {
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "qk_norm": True,
    "post_norms": True,
    "attention": (Attention(Rope(1e4), 3, scale=0.4, softcap=3.0), Attention(Rope(1e6), None, scale=0.4, softcap=3.0)),
    "activation": "gelu_tanh",
    "embedding_scale": 10**0.5,
    "logit_softcap": 2.0,
}


@functools.cache
def weights(config: Config) -> decoder.Params:
    rng = np.random.default_rng(1)

    def make(path, leaf):
        name = path[-1].key
        width = math.prod(leaf.shape[:-1]) if name in ("attention.o", "mlp.down") else config.model_dim
        size = 0.3 if name.endswith(("norm", "bias")) else width**-0.5
        return (float(name.endswith("norm")) + size * rng.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(make, decoder.param_shapes(config))


def ids(rows: int, length: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 13, (rows, length)).astype(np.int32)


def close(got, want, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=tolerance, atol=tolerance)


def host(tree):
    return jax.tree.map(np.asarray, tree)


forward = jax.jit(decoder.forward, static_argnames="config", donate_argnames="cache")


# Which device has which head


def test_no_device_has_a_kv_head_that_its_queries_do_not_read():
    assert [plan_heads(8, 2, 4).kv_heads_on(device) for device in range(4)] == [[0], [0], [1], [1]]
    assert [plan_heads(8, 2, 4).query_heads_on(device) for device in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [plan_heads(6, 2, 4).kv_heads_on(device) for device in range(4)] == [[0], [0], [1], [1]]
    assert [plan_heads(9, 3, 2).query_heads_on(device) for device in range(2)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize(
    ("heads", "tp", "kv", "group", "padded", "on_each"),
    [
        ((8, 8), 8, 8, 1, (8, 1), (1, 1)),
        ((8, 2), 4, 2, 2, (2, 4), (1, 2)),
        ((8, 2), 8, 2, 4, (2, 4), (1, 1)),
        ((9, 3), 2, 2, 1, (4, 3), (2, 6)),
        ((9, 3), 4, 4, 1, (4, 3), (1, 3)),
        ((9, 3), 8, 4, 2, (4, 4), (1, 2)),
        ((4, 1), 4, 1, 4, (1, 4), (1, 1)),
        ((32, 8), 16, 8, 2, (8, 4), (1, 2)),
        ((32, 8), 3, 3, 1, (9, 4), (3, 12)),
        ((40, 8), 16, 8, 2, (8, 6), (1, 3)),
        ((71, 1), 8, 1, 8, (1, 72), (1, 9)),
    ],
)
def test_known_plans(heads, tp, kv, group, padded, on_each):
    plan = plan_heads(*heads, tp)
    assert (plan.kv, plan.group) == (kv, group)
    assert (plan.padded_kv_heads, plan.padded_group_size) == padded
    assert (plan.kv_heads_per_device, plan.query_heads_per_device) == on_each


@settings(deadline=None, derandomize=True, database=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 70))
def test_every_head_is_computed_once_beside_its_kv_head_and_no_device_has_more_than_it_must(kv_heads, group, tp):
    plan = plan_heads(kv_heads * group, kv_heads, tp)
    assert plan.kv * plan.group == tp
    for device in range(tp):
        assert {head // group for head in plan.query_heads_on(device)} <= set(plan.kv_heads_on(device))
        assert len(plan.kv_heads_on(device)) <= plan.kv_heads_per_device
        assert len(plan.query_heads_on(device)) <= plan.query_heads_per_device
    queries = sorted(head for device in range(tp) for head in plan.query_heads_on(device))
    assert queries == list(range(kv_heads * group))
    held = sorted(head for device in range(tp) for head in plan.kv_heads_on(device))
    assert held == sorted([*range(kv_heads)] * plan.group)
    assert plan.kv_heads_per_device == math.ceil(kv_heads / tp)
    others = (HeadPlan(kv_heads * group, kv_heads, kv, tp // kv) for kv in range(1, tp + 1) if tp % kv == 0)
    fewest = [other for other in others if other.kv_heads_per_device == plan.kv_heads_per_device]
    assert plan.query_heads_per_device == min(other.query_heads_per_device for other in fewest)


@settings(deadline=None, derandomize=True, database=None, max_examples=40)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 8))
def test_the_arrays_lie_as_the_plan_says(kv_heads, group, tp):
    config = config_of((kv_heads * group, kv_heads), num_layers=1, qkv_bias=True)
    placement = make_mesh(config, tp=tp)
    plan = placement.plan(config)
    q_heads = 1 + np.arange(kv_heads * group, dtype=np.float32).reshape(kv_heads, group)
    kv_heads_named = 1 + np.arange(kv_heads, dtype=np.float32)
    named = jax.tree.map(np.copy, weights(config))
    layer = named["layers"][0]
    layer["attention.q"][:] = q_heads[None, :, :, None]
    layer["attention.q_bias"][:] = q_heads[:, :, None]
    layer["attention.o"][:] = q_heads[:, :, None, None]
    for name in ("attention.k", "attention.v"):
        layer[name][:] = kv_heads_named[None, :, None]
        layer[f"{name}_bias"][:] = kv_heads_named[:, None]
    placed = decoder.place(named, config, placement)
    close_to_sinks = {"sinks": placement.put(q_heads, "K G"), "gate": placement.put(np.repeat(q_heads[..., None], 3, 2), "K G H")}
    order = placement.mesh.devices.ravel().tolist()
    for name, array in {**placed["layers"][0], **close_to_sinks}.items():
        per_head = name.startswith(("attention.q", "attention.o", "sinks", "gate"))
        if not (per_head or name.startswith(("attention.k", "attention.v"))):
            continue
        for shard in array.addressable_shards:
            device = order.index(shard.device)
            heads = plan.query_heads_on(device) if per_head else plan.kv_heads_on(device)
            assert (np.unique(shard.data)[np.unique(shard.data) > 0] - 1).tolist() == heads, name
            axis = {"attention.q": 1, "attention.k": 1, "attention.v": 1}.get(name, 0)
            assert shard.data.shape[axis] == plan.kv_heads_per_device
            if per_head:
                assert shard.data.shape[axis + 1] == plan.padded_group_size // plan.group
    for mine, theirs in zip(*map(jax.tree.leaves, (decoder.gather(placed, config), named)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_plan_says_in_a_table_what_lies_where():
    table = str(plan_heads(8, 2, 4, "split", bytes_per_kv_head=7680)).splitlines()
    assert table == [
        "8 query heads, 2 KV heads on 4 devices: kv 2 x group 2, split",
        "device | KV heads | query heads",
        "     0 | 0        | 0-1",
        "     1 | 0        | 2-3",
        "     2 | 1        | 4-5",
        "     3 | 1        | 6-7",
        "each KV head on 2 devices, 1/2 of the slots on each; no padding; 3,840 bytes of cache per token on each device",
    ]
    assert "1 of 72 query heads are padding (1 %)" in str(plan_heads(71, 1, 8))
    assert plan_heads(8, 2, 4, bytes_per_kv_head=7680).bytes_per_token == 7680
    assert "on 1 device:" in str(plan_heads(8, 2, 1))


def test_the_kv_head_that_a_device_reads_is_its_queries_own():
    """A26: scores that are all alike, and values that name their head."""
    for tp, want in ((4, [0, 0, 1, 1]), (8, [0, 0, 0, 0, 1, 1, 1, 1])):
        config = config_of((8, 2), num_layers=1, attention=(Attention(None),))
        params = jax.tree.map(np.zeros_like, weights(config))
        placement = make_mesh(config, tp=tp)
        k = placement.put(np.arange(2, dtype=np.float32)[None, :, None, None] * np.ones((1, 2, 3, 4), np.float32), "B K S H")
        assert [int(shard.data[0, 0, 0, 0]) for shard in sorted(k.addressable_shards, key=lambda s: s.device.id)] == want
        layer = params["layers"][0]
        layer["attention.norm"][:], params["norm"][:], params["embedding"][:] = 1, 1, 1
        layer["attention.v"][:] = np.array([2, 3], np.float32)[None, :, None] / 10
        layer["attention.o"][:] = (10.0 ** -np.arange(8)).reshape(2, 4, 1, 1)
        tokens = np.zeros((1, 2), np.int32)
        x, _ = decoder.hidden_states(decoder.place(params, config, placement), tokens, None, config)
        np.testing.assert_allclose(x, 1, rtol=1e-5)
        mixed = 4 * (2 * 1.111 + 3 * 0.0001111)
        before = oracles.forward(params, tokens, config)
        got, _ = decoder.forward(decoder.place(params, config, placement), tokens, None, config)
        close(got, before)
        assert mixed > 0
