"""Tensor parallelism on eight devices: every head count on every number of them gives what one device gives.

Weights are random everywhere, so that no bias, norm or padded head can be left out, doubled or misplaced unseen.
"""

import contextlib
import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, PartitionSpec

import gqa_jax
from gqa_jax import decoder
from gqa_jax.cache import init_cache
from gqa_jax.config import Attention, Config, Rope
from gqa_jax.sharding import HeadPlan, Placement, make_mesh, plan_heads
from tests import oracles

HEADS = [(32, 8), (8, 8), (9, 3), (4, 1), (6, 2), (14, 2), (28, 4), (12, 12), (5, 5), (71, 1)]
# All head counts on all numbers of devices are in `benchmarks.matrix`; these are those that pad or share most.
MESHES = [((32, 8), 3), ((9, 3), 2), ((9, 3), 4), ((6, 2), 1), ((5, 5), 3), ((28, 4), 3), ((4, 1), 4), ((14, 2), 6)]
MESHES += [(heads, 8) for heads in HEADS if heads not in ((32, 8), (8, 8), (28, 4))]
CAPACITY = 11

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


@settings(deadline=None, derandomize=True, database=None, max_examples=50)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 24))
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


@settings(deadline=None, derandomize=True, database=None, max_examples=15)
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
    others = {
        "sinks": placement.put(q_heads, "K G"),
        "gate": placement.put(np.repeat(q_heads[..., None], 3, 2), "K G H"),
    }
    order = placement.mesh.devices.ravel().tolist()
    for name, array in {**placed["layers"][0], **others}.items():
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
    assert "on 1 device: kv 1" in str(plan_heads(8, 2, 1))


@pytest.mark.parametrize(("tp", "want"), [(4, [0, 0, 1, 1]), (8, [0, 0, 0, 0, 1, 1, 1, 1])])
def test_a_device_holds_the_slots_of_the_kv_head_that_its_queries_read(tp, want):
    placement = make_mesh(config_of((8, 2)), tp=tp)
    k = placement.put(np.arange(2, dtype=np.float32)[None, :, None, None] * np.ones((1, 2, 3, 4), np.float32), "B K S H")
    assert [int(shard.data.max()) for shard in sorted(k.addressable_shards, key=lambda shard: shard.device.id)] == want


# Nothing but the place changes


def in_steps(params, tokens, counts, cache, config, singly):
    """Reads each row in pieces of its own lengths, and returns the logits of each row's tokens in their order."""
    made, start = [[] for _ in tokens], np.zeros(len(tokens), int)
    for count in counts:
        most = 1 if singly and count == (1, 1) else 4
        piece = np.zeros((len(tokens), most), np.int32)
        for row, (begin, some) in enumerate(zip(start, count, strict=True)):
            piece[row, :some] = tokens[row, begin : begin + some]
        logits, cache = forward(params, piece, cache, config=config, count=np.asarray(count, np.int32))
        for row, some in enumerate(count):
            made[row].append(np.asarray(logits)[row, :some])
        start += count
    return np.stack([np.concatenate(row) for row in made]), cache


COUNTS = ((4, 2), (4, 3), (1, 4), (1, 1), (1, 1))


@functools.cache
def logits_of(config: Config) -> np.ndarray:
    return oracles.forward(weights(config), ids(2, CAPACITY), config)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "tp"), MESHES, ids=str)
def test_any_heads_on_any_devices_give_the_logits_of_one_device(heads, tp):
    group = plan_heads(*heads, tp).group
    # Where a device has a KV head to itself, one layer has seen all there is.
    config = config_of(heads) if group > 1 else config_of(heads, num_layers=1)
    # On a group of one there is nothing to split, so the two policies are one program.
    for policy in ("replicate", "split") if group > 1 else (("split", "replicate")[tp % 2],):
        data = 2 if tp <= 4 and (policy == "split" or tp == 3) else 1
        placement = make_mesh(config, tp=tp, data=data, policy=policy)
        params = decoder.place(weights(config), config, placement)
        cache = init_cache(config, 2, CAPACITY, mesh=placement)
        singly = policy == "split" and group > 1 and tp in (3, 8)
        logits, cache = in_steps(params, ids(2, CAPACITY), COUNTS, cache, config, singly)
        close(logits, logits_of(config))
        assert cache.length.tolist() == [CAPACITY] * 2
        assert_lies_where_it_was_placed(cache, config, placement)


def assert_lies_where_it_was_placed(cache, config, placement):
    plan = placement.plan(config)
    rows = 2 // placement.parts("B")
    parts = plan.group if placement.split else 1
    for layers in (cache.k, cache.v):
        for leaf, slots in zip(layers, (3, cache.capacity), strict=False):
            assert leaf.sharding.is_equivalent_to(placement.sharding("B K S H"), 4)
            shards = {shard.data.shape for shard in leaf.addressable_shards}
            assert shards == {(rows, plan.kv_heads_per_device, -(-slots // parts), 4)}
    slots = sum(-(-slots // parts) for slots in (3, cache.capacity)[: len(cache.k)])
    assert cache.nbytes_per_device == 2 * 4 * rows * plan.kv_heads_per_device * slots * 4
    assert cache.length.sharding.is_equivalent_to(placement.sharding("B"), 1)


PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8]]
HOW = {"max_new_tokens": 9, "temperature": [0.0, 1.3], "seed": 5}


@functools.cache
def made_on_one_device(config: Config) -> list[list[int]]:
    return gqa_jax.generate(gqa_jax.Model(config, weights(config)), PROMPTS, **HOW).ids


@pytest.mark.parametrize(
    ("heads", "tp", "data", "policy"),
    [
        ((9, 3), 4, 2, "replicate"),
        ((9, 3), 8, 1, "split"),
        ((14, 2), 4, 2, "split"),
    ],
)
def test_tokens_are_those_of_one_device_and_the_cache_stays_where_it_is(heads, tp, data, policy):
    config = config_of(heads)
    placement = make_mesh(config, tp=tp, data=data, policy=policy)
    model = gqa_jax.Model(config, decoder.place(weights(config), config, placement))
    assert_lies_where_it_was_placed(init_cache(config, 2, 256, mesh=placement), config, placement)
    made = gqa_jax.generate(model, PROMPTS, **HOW)
    assert made.ids == made_on_one_device(config)
    assert_lies_where_it_was_placed(made.cache, config, placement)
    assert made.stats.cache_bytes_per_device == made.cache.nbytes_per_device
    replicated = init_cache(config, 2, 256, mesh=dataclasses.replace(placement, split=False))
    if policy == "split":
        parts = placement.plan(config).group
        assert made.cache.nbytes_per_device * parts <= replicated.nbytes_per_device * (1 + 4 * parts / 256)
    # The cache goes on as the next call's, which uses it up and leaves everything else.
    old, prompts = made.cache, [jnp.array([3, 2]), jnp.array([1])]
    more = gqa_jax.generate(model, prompts, cache=old, max_new_tokens=2)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(old.k[0])
    assert [prompt.tolist() for prompt in prompts] == [[3, 2], [1]]
    assert_lies_where_it_was_placed(more.cache, config, placement)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(model.params))
    texts = [[*a, *b, *c] for a, b, c in zip(PROMPTS, made.ids, ([3, 2], [1]), strict=True)]
    for row, text in enumerate(texts):
        want = oracles.forward(weights(config), np.array([text]), config)[0, -1].argmax()
        assert more.ids[row][0] == want


def test_without_a_cache_tokens_are_the_same_on_a_mesh():
    config = config_of((9, 3))
    model = gqa_jax.Model(config, decoder.place(weights(config), config, make_mesh(config, tp=4, data=2)))
    assert gqa_jax.generate(model, PROMPTS, use_cache=False, **HOW).ids == made_on_one_device(config)


# Gradients


def loss(params, tokens, config):
    logits, _ = decoder.forward(params, tokens, None, config)
    return (jax.nn.logsumexp(logits, axis=-1) * jnp.arange(1.0, 1 + tokens.shape[1])).mean() + jnp.square(logits).mean()


def step(params, tokens, config):
    """One step of gradient descent; what says where the weights lie passes through all of it."""
    value, gradient = jax.value_and_grad(loss)(params, tokens, config)
    return value, gradient, jax.tree.map(lambda x, g: x - 0.1 * g, params, gradient)


step = jax.jit(step, static_argnames="config")


@functools.cache
def stepped_on_one_device(config):
    return host(step(weights(config), ids(2, 7), config))


def padding(tree, config):
    """Each weight with its numbers and True where they only pad it."""
    sizes = decoder.axis_sizes(config)
    tree = {name: leaf for name, leaf in tree.items() if name != "placement"}

    def mark(axes, leaf):
        marked = np.ones(leaf.shape, bool)
        marked[tuple(slice(sizes[axis]) for axis in axes.split())] = False
        return np.asarray(leaf)[marked]

    return jax.tree.leaves(jax.tree.map(mark, decoder.param_axes(config), tree))


@pytest.mark.parametrize(
    ("heads", "tp", "data", "policy", "tied"),
    [
        ((9, 3), 8, 1, "replicate", False),
        ((4, 1), 3, 2, "split", True),
    ],
)
def test_gradients_are_those_of_one_device_and_padding_stays_dead(heads, tp, data, policy, tied):
    config = config_of(heads, **EVERYTHING, tied_head=tied)
    params = decoder.place(weights(config), config, make_mesh(config, tp=tp, data=data, policy=policy))
    value, gradient, better = step(params, ids(2, 7), config)
    want_value, want_gradient, want_better = stepped_on_one_device(config)
    close(value, want_value)
    for path, want in jax.tree_util.tree_leaves_with_path(want_gradient):
        assert abs(want).max() > 1e-6, path
    close_trees(decoder.gather(gradient, config), want_gradient)
    close_trees(decoder.gather(better, config), want_better)
    assert gradient["placement"] == better["placement"] == params["placement"]
    for old, new in zip(jax.tree.leaves(params), jax.tree.leaves(better), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, old.ndim)
    dead = [numbers for tree in (gradient, better) for numbers in padding(tree, config)]
    assert sum(numbers.size for numbers in dead) > 0
    assert not any(numbers.any() for numbers in dead)


def close_trees(got, want):
    chex.assert_trees_all_equal_structs(host(got), want)
    chex.assert_trees_all_close(host(got), want, rtol=2e-5, atol=2e-6)


def test_gradients_through_a_cache_on_a_mesh_equal_those_without_either():
    config = config_of((6, 2))
    placement = make_mesh(config, tp=4, data=2, policy="split")

    def in_chunks(params, tokens):
        cache, made = init_cache(config, 2, 8, mesh=placement), []
        for start, end in ((0, 5), (5, 6)):
            logits, cache = decoder.forward(params, tokens[:, start:end], cache, config)
            made.append(logits)
        return jnp.square(jnp.concatenate(made, axis=1)).mean()

    def at_once(params, tokens):
        return jnp.square(decoder.forward(params, tokens, None, config)[0]).mean()

    got = jax.jit(jax.grad(in_chunks))(decoder.place(weights(config), config, placement), ids(2, 6))
    close_trees(decoder.gather(got, config), host(jax.jit(jax.grad(at_once))(weights(config), ids(2, 6))))


def test_a_bias_behind_a_sum_over_devices_is_added_once():
    """A27: 8 -> 1 with ones everywhere is 9; a bias on each of four devices would make it 12."""
    placement = make_mesh(config_of((4, 1)), tp=4)

    def project(x, weight, bias):
        def part(x, weight, bias):
            return placement.total(x @ weight) + bias

        specs = (PartitionSpec(placement.model), PartitionSpec(placement.model), PartitionSpec())
        return jax.shard_map(part, mesh=placement.mesh, in_specs=specs, out_specs=PartitionSpec())(x, weight, bias).sum()

    value, slopes = jax.jit(jax.value_and_grad(project, argnums=(0, 1, 2)))(jnp.ones(8), jnp.ones((8, 1)), jnp.ones(1))
    assert value == 9
    assert [slope.tolist() for slope in slopes] == [[1] * 8, [[1]] * 8, [1]]


# Meshes of one's own


def mesh_of(kind: AxisType, **sizes: int) -> Mesh:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


MESHES = {
    "own names": lambda kind: Placement(mesh_of(kind, dp=2, tp=2, rep=2), data="dp", kv="tp", group="rep", split=True),
    "two axes for the KV heads": lambda kind: Placement(mesh_of(kind, x=2, y=2, z=2), data=(), kv=("x", "y"), group="z"),
    "two axes for the queries": lambda kind: Placement(
        mesh_of(kind, x=2, y=2, z=2), data="z", kv=(), group=("x", "y"), split=True
    ),
    "a plain mesh": lambda kind: mesh_of(kind, kv=2, group=2),
    "only data": lambda kind: Placement(mesh_of(kind, x=2), data="x", kv=(), group=()),
}


@pytest.mark.parametrize(
    ("name", "kind", "entered", "generates"),
    [
        ("own names", AxisType.Explicit, False, True),
        ("own names", AxisType.Explicit, True, True),
        ("two axes for the KV heads", AxisType.Auto, True, False),
        ("two axes for the queries", AxisType.Explicit, False, False),
        ("a plain mesh", AxisType.Auto, False, True),
        ("only data", AxisType.Explicit, True, False),
    ],
)
def test_a_mesh_of_ones_own_serves_as_well(name, kind, entered, generates):
    config = config_of((9, 3))
    mesh = MESHES[name](kind)
    params = decoder.place(weights(config), config, mesh)
    with jax.set_mesh(params["placement"].mesh) if entered else contextlib.nullcontext():
        cache = init_cache(config, 2, CAPACITY, mesh=mesh)
        logits, cache = in_steps(params, ids(2, CAPACITY), COUNTS, cache, config, singly=False)
        close(logits, logits_of(config))
        made = decoder.init_params(config, jax.random.key(0), mesh=mesh)
        close_trees(decoder.gather(made, config), host(decoder.init_params(config, jax.random.key(0))))
        if generates:
            made = gqa_jax.generate(gqa_jax.Model(config, params), PROMPTS, **HOW)
            assert made.ids == made_on_one_device(config)
            assert made.cache.placement == params["placement"]
            assert made.cache.k[0].sharding.is_equivalent_to(params["placement"].sharding("B K S H"), 4)


@pytest.mark.parametrize("entered", [False, True], ids=["", "entered"])
def test_without_jit_and_with_gradients_on_an_explicit_mesh(entered):
    config = config_of((9, 3))
    mesh = mesh_of(AxisType.Explicit, data=2, kv=2, group=2)
    params, tokens = decoder.place(weights(config), config, mesh), jnp.asarray(ids(2, CAPACITY))
    with jax.set_mesh(mesh) if entered else contextlib.nullcontext():
        cache = init_cache(config, 2, CAPACITY, mesh=mesh)
        logits, _ = decoder.forward(params, tokens, cache, config)
        close(logits, logits_of(config))
        gradient = jax.jit(jax.grad(plain_loss), static_argnames="config")(params, tokens, config)
    want = jax.jit(jax.grad(plain_loss), static_argnames="config")(weights(config), tokens, config)
    close_trees(decoder.gather(gradient, config), host(want))


def plain_loss(params, tokens, config):
    return jnp.square(decoder.forward(params, tokens, None, config)[0]).mean()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
def test_a_cache_on_a_mesh_is_written_rewound_and_grown_by_hand(kind, jitted):
    config = config_of((9, 3))
    mesh = MESHES["own names"](kind)
    new = np.arange(2 * 4 * 3 * 4, dtype=np.float32).reshape(2, 4, 3, 4)

    def by_hand(new):
        cache = init_cache(config, 2, 5, mesh=mesh, rings=False)
        for layer in range(2):
            cache = gqa_jax.write(cache, layer, new, -new)
        cache = gqa_jax.rewind(gqa_jax.advance(cache, jnp.array([3, 3])), jnp.array([1, 2]))
        cache = cache if jitted else gqa_jax.grow(cache, 9)
        for layer in range(2):
            cache = gqa_jax.write(cache, layer, new[:, :, :2], -new[:, :, :2])
        return gqa_jax.advance(cache, 2)

    cache = (jax.jit(by_hand) if jitted else by_hand)(jnp.asarray(new))
    assert cache.length.tolist() == [3, 4]
    assert cache.k[0].sharding.is_equivalent_to(mesh.sharding("B K S H"), 4)
    # Position p lies on device p % 2 of its group, in its p // 2-th slot.
    parts = np.asarray(cache.k[1]).reshape(2, 4, 2, -1, 4)
    for row, length in enumerate((1, 2)):
        want = np.concatenate([new[row, :, :length], new[row, :, :2]], axis=1)
        got = np.stack([parts[row, :, position % 2, position // 2] for position in range(length + 2)], axis=1)
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(cache.v[1], -np.asarray(cache.k[1]))


# Real models


PROMPT = "The three primary colours are"


def check_real_model(model, path, tp, policy, by_generate):
    """Greedy tokens are those of one device: drawn one by one, or, in half the time, each as what follows all before it."""
    alone = gqa_jax.generate(model, PROMPT, max_new_tokens=16)
    if by_generate:
        sharded = gqa_jax.load(path, mesh=functools.partial(make_mesh, tp=tp, policy=policy))
        made = gqa_jax.generate(sharded, PROMPT, max_new_tokens=16)
        assert (made.text, made.ids) == (alone.text, alone.ids)
        return
    placement = make_mesh(model.config, tp=tp, policy=policy)
    params = decoder.place(model.params, model.config, placement)
    prompt = model.tokenizer.encode(PROMPT)
    text = np.array([prompt + alone.ids[0]], np.int32)
    cache = init_cache(model.config, 1, text.shape[1], mesh=placement) if placement.split else None
    logits, _ = forward(params, text, cache, config=model.config)
    assert np.asarray(logits)[0, len(prompt) - 1 : -1].argmax(-1).tolist() == alone.ids[0]


@pytest.mark.parametrize(("tp", "policy", "by_generate"), [(4, "replicate", False), (8, "split", True)])
@pytest.mark.slow
def test_smollm2_says_the_same_on_more_devices(smollm2, smollm2_path, tp, policy, by_generate):
    check_real_model(smollm2, smollm2_path, tp, policy, by_generate)


@pytest.mark.parametrize(("tp", "policy", "by_generate"), [(2, "replicate", False), (8, "split", False)])
@pytest.mark.slow
def test_gemma3_says_the_same_on_more_devices(gemma3, gemma3_path, tp, policy, by_generate):
    check_real_model(gemma3, gemma3_path, tp, policy, by_generate)


# Refusals


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"tp": 0}, "tp is 0; it must be a whole number of at least 1"),
        ({"tp": 2.0}, r"tp is 2\.0; it must be a whole number"),
        ({"tp": -3}, "tp is -3"),
        ({"tp": "4"}, "tp is '4'"),
        ({"data": 0}, "data is 0; it must be a whole number of at least 1"),
        ({"data": 1.5}, r"data is 1\.5"),
        ({"tp": 5, "data": 2}, "data = 2 times tp = 5 needs 10 devices; there are 8.*jax_num_cpu_devices"),
        ({"tp": 3, "devices": jax.devices()[:2]}, "needs 3 devices; there are 2"),
        ({"tp": 2, "policy": "copy"}, "policy is 'copy'; it must be one of replicate, split, reject"),
        (
            {"tp": 4, "policy": "reject"},
            "6 KV heads do not divide over 4 devices; tp = 1, 2, 3, 6 would.*'split'",
        ),
    ],
)
def test_meshes_that_cannot_be_are_refused(unchecked, how, words):
    with pytest.raises(ValueError, match=words):
        make_mesh(config_of((12, 6)), **how)


def test_rejecting_takes_what_divides():
    assert dict(make_mesh(config_of((12, 6)), tp=3, policy="reject").mesh.shape) == {"data": 1, "kv": 3, "group": 1}


def test_heads_that_are_none_are_refused(unchecked):
    with pytest.raises(ValueError, match="7 query heads do not divide over 2 KV heads"):
        plan_heads(7, 2, 2)
    with pytest.raises(ValueError, match="num_kv_heads is 0"):
        plan_heads(8, 0, 2)


def test_rows_that_the_data_axis_does_not_divide_are_refused(unchecked):
    config = config_of((6, 2))
    placement = make_mesh(config, tp=2, data=2)
    params = decoder.place(weights(config), config, placement)
    words = "3 rows do not divide over 2 devices of the mesh's data axis; give a multiple of 2, or use data=1"
    with pytest.raises(ValueError, match=words):
        init_cache(config, 3, 7, mesh=placement)
    with pytest.raises(ValueError, match=words):
        decoder.forward(params, jnp.zeros((3, 2), jnp.int32), None, config)
    for use_cache in (True, False):
        with pytest.raises(ValueError, match=words):
            gqa_jax.generate(gqa_jax.Model(config, params), [[1], [2], [3]], use_cache=use_cache)


def test_weights_and_a_cache_that_lie_apart_are_refused(unchecked):
    config = config_of((6, 2))
    here, there = make_mesh(config, tp=2), make_mesh(config, tp=2, policy="split")
    params = decoder.place(weights(config), config, here)
    tokens = jnp.zeros((2, 3), jnp.int32)
    where = r"a mesh of data 1 x kv 2 x group 1 \(Auto; data data, kv kv, group group; {}\)"
    for first, second, words in (
        (params, None, f"parameters lie on {where.format('replicate')} and the cache on no mesh; make the cache"),
        (params, there, f"parameters lie on {where.format('replicate')} and the cache on {where.format('split')}"),
        (weights(config), here, f"parameters lie on no mesh and the cache on {where.format('replicate')}"),
    ):
        cache = init_cache(config, 2, 7, mesh=second)
        with pytest.raises(ValueError, match=words):
            decoder.forward(first, tokens, cache, config)
        with pytest.raises(ValueError, match=r"cache lies on .* and the model on .*mesh=model\.placement"):
            gqa_jax.generate(gqa_jax.Model(config, first), [[1], [2]], cache=cache, max_new_tokens=2)


def test_a_mesh_without_the_axes_is_refused():
    config, mesh = config_of((6, 2)), jax.make_mesh((2, 2), ("x", "kv"), axis_types=(AxisType.Auto,) * 2)
    words = r"The mesh has the axes \('x', 'kv'\); data \(\), kv \('kv',\) and group \('group',\) must be among them.*Placement"
    for use in (
        lambda: init_cache(config, 2, 7, mesh=mesh),
        lambda: decoder.place(weights(config), config, mesh),
        lambda: decoder.init_params(config, jax.random.key(0), mesh=mesh),
    ):
        with pytest.raises(ValueError, match=words):
            use()
    with pytest.raises(ValueError, match="each once"):
        Placement(mesh, data=(), kv="x", group="x")


def test_weights_are_placed_once():
    config = config_of((6, 2))
    params = decoder.place(weights(config), config, make_mesh(config, tp=2))
    with pytest.raises(ValueError, match=r"lie on a mesh already; bring them back first with gqa_jax\.gather"):
        decoder.place(params, config, make_mesh(config, tp=4))
    again = decoder.place(decoder.gather(params, config), config, make_mesh(config, tp=4))
    close_trees(decoder.gather(again, config), weights(config))
