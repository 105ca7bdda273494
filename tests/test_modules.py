"""The layers of Flax NNX and Linen: against numpy float64, against Flax's own, and inside the transforms of both."""

import functools
from typing import Any, NamedTuple

import chex
import flax.traverse_util
import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, Mesh

import gqa_jax
from gqa_jax import decoder, modules
from gqa_jax import linen as ours_linen
from gqa_jax import nnx as ours_nnx
from gqa_jax.config import Attention, LinearScaling, Rope
from tests import oracles

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, T, D = 2, 7, 24
OPTIONS = {
    "grouped": {"num_heads": 6, "num_kv_heads": 2},
    "one KV head, window": {"num_heads": 4, "num_kv_heads": 1, "attention": Attention(window=3)},
    "a KV head for each query head, no rope": {"num_heads": 4, "attention": Attention(rope=None)},
    "9 over 3, softcap, sinks": {
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 10,
        "attention": Attention(Rope(1e3, LinearScaling(2.0)), softcap=1.5, sinks=True, scale=0.7),
    },
    "biases, norms, pairs side by side": {
        "num_heads": 6,
        "num_kv_heads": 3,
        "head_dim": 8,
        "use_bias": True,
        "qk_norm": True,
        "norm_eps": 1e-2,
        "attention": Attention(Rope(interleaved=True), window=4),
    },
    "biases on the way in alone": {"num_heads": 6, "num_kv_heads": 2, "use_bias": True, "use_out_bias": False},
}


class Layer(NamedTuple):
    """One layer of either kind: `apply(parameters, x, **how)` runs it with the parameters of this dict; `run` under jit."""

    parameters: dict[str, jax.Array]
    apply: Any
    run: Any
    module: Any


def random_parameters(config, dtype=jnp.float32) -> dict[str, jax.Array]:
    rng, made = np.random.default_rng(5), {}
    for name in modules.parameter_axes(config):
        shape = modules.parameter_shape(config, name)
        size = 0.3 if name.endswith(("bias", "norm", "sinks")) else D**-0.5
        own = np.promote_types(np.float32, dtype) if name.endswith("norm") else dtype
        made[name] = jnp.asarray(float(name.endswith("norm")) + size * rng.normal(size=shape), own)
    return made


def make(kind: str, **options) -> Layer:
    options = {"in_features": D} | options
    if kind == "linen":
        module = ours_linen.GroupedQueryAttention(**options)

        def apply(parameters, x, **how):
            return module.apply({"params": parameters}, x, **how)
    else:
        module = ours_nnx.GroupedQueryAttention(**options, rngs=nnx.Rngs(0))
        graph, state = nnx.split(module)

        def apply(parameters, x, **how):
            given = nnx.State({name: state[name].replace(value) for name, value in parameters.items()})
            return nnx.merge(graph, given)(x, **how)

    return Layer(random_parameters(module.config, module.param_dtype), apply, jax.jit(apply), module)


kinds = pytest.mark.parametrize("kind", ["nnx", "linen"])
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def tokens(length: int = T, dtype=jnp.float32, seed: int = 3) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, length, D)), dtype)


def exact(layer: Layer, x) -> np.ndarray:
    weights = {f"attention.{name}": np.asarray(value).astype(np.float64) for name, value in layer.parameters.items()}
    x, config = np.asarray(x).astype(np.float64), layer.module.config
    positions = np.broadcast_to(np.arange(x.shape[1]), x.shape[:2])
    return oracles.attend(x, weights, positions, config)


def close(got, want, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=tolerance, atol=tolerance)


# Numbers


@kinds
@options
def test_it_gives_what_a_float64_layer_gives(kind, options):
    layer = make(kind, **options)
    close(layer.run(layer.parameters, tokens()), exact(layer, tokens()))


@kinds
@options
def test_any_split_into_chunks_gives_what_one_pass_gives(kind, options):
    layer, x = make(kind, **options), tokens()
    for sizes in ([3, 1, 1, 2], [1] * 7):
        cache, made, start = layer.module.init_cache(B, T), [], 0
        for size in sizes:
            before = cache
            y, cache = layer.run(layer.parameters, x[:, start : start + size], cache=cache)
            assert before.length.tolist() == [start] * B
            made, start = [*made, y], start + size
        close(jnp.concatenate(made, axis=1), exact(layer, x))
        assert cache.length.tolist() == [T] * B


@kinds
def test_rows_of_different_length_and_texts_in_one_row_equal_each_alone(kind):
    layer, x = make(kind, **OPTIONS["grouped"]), tokens()
    _, cache = layer.apply(layer.parameters, x[:, :4], cache=layer.module.init_cache(B, 8), count=jnp.array([4, 2]))
    y, cache = layer.apply(layer.parameters, x[:, 4:], cache=cache)
    assert cache.length.tolist() == [7, 5]
    close(y[1], exact(layer, jnp.concatenate([x[:, :2], x[:, 4:]], axis=1))[1, 2:])
    y = layer.apply(layer.parameters, x, segments=jnp.array([[0, 0, 0, 1, 1, 1, 1]] * B))
    close(y[:, 3:], exact(layer, x[:, 3:]))


@kinds
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_parameters_compute_and_cache_in_their_dtype(kind, dtype):
    layer, x = make(kind, param_dtype=jnp.dtype(dtype), **OPTIONS["grouped"]), tokens(dtype=dtype)
    cache = layer.module.init_cache(B, T)
    assert cache.k[0].dtype == dtype
    for start in range(T):
        y, cache = layer.run(layer.parameters, x[:, start : start + 1], cache=cache)
        assert y.dtype == cache.k[0].dtype == dtype
    close(y[:, 0], exact(layer, x)[:, -1], 2e-2)


@kinds
def test_dtype_is_that_of_the_computation_whatever_the_parameters_are(kind):
    layer = make(kind, **OPTIONS["grouped"], dtype=jnp.bfloat16)
    y = layer.apply(layer.parameters, tokens())
    assert y.dtype == layer.module.init_cache(1, 1).k[0].dtype == jnp.bfloat16
    close(y, exact(layer, tokens()), 3e-2)
    assert make(kind, **OPTIONS["grouped"]).apply(layer.parameters, tokens(dtype=jnp.bfloat16)).dtype == jnp.float32


@kinds
def test_new_parameters_are_ones_zeros_and_normal_by_what_they_read(kind):
    how = {"num_heads": 30, "num_kv_heads": 6, "in_features": 257, "head_dim": 14, "use_bias": True, "qk_norm": True}
    module = make(kind, **how, attention=Attention(sinks=True)).module
    if kind == "nnx":
        made = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    else:
        made = nn.unbox(module.init(jax.random.key(1), jnp.ones((1, 1, 257))))["params"]
    assert set(made) == {"q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm", "sinks"}
    for name, value in made.items():
        assert value.shape == modules.parameter_shape(module.config, name)
        if name in ("q", "k", "v", "o"):
            assert value.std() * (420 if name == "o" else 257) ** 0.5 == pytest.approx(1, abs=0.05)
        else:
            assert (value == float(name.endswith("norm"))).all()


# Gradients


@kinds
@pytest.mark.parametrize(("name", "remat"), [*((name, False) for name in OPTIONS), ("9 over 3, softcap, sinks", True)])
def test_gradients_equal_central_differences_in_float64(kind, name, remat):
    with jax.enable_x64(True):
        layer = make(kind, param_dtype=jnp.float64, **OPTIONS[name])
        x = tokens(5, jnp.float64)

        def run(parameters, x):
            return jnp.tanh(layer.apply(parameters, x))

        run = jax.jit(jax.checkpoint(run) if remat else run)
        jax.test_util.check_grads(run, (layer.parameters, x), 1, ["rev"], 1e-5, 1e-5)


@kinds
def test_gradients_through_the_cache_equal_those_of_one_pass(kind):
    layer, x = make(kind, **OPTIONS["9 over 3, softcap, sinks"]), tokens()

    def in_steps(parameters):
        cache, made = layer.module.init_cache(B, T), []
        for part in (x[:, :4], x[:, 4:5], x[:, 5:]):
            y, cache = jax.checkpoint(lambda p, part, cache: layer.apply(p, part, cache=cache))(parameters, part, cache)
            made.append(y)
        return jnp.square(jnp.concatenate(made, axis=1)).sum()

    got = jax.jit(jax.grad(in_steps))(layer.parameters)
    want = jax.jit(jax.grad(lambda p: jnp.square(layer.apply(p, x)).sum()))(layer.parameters)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


# Dropout


@kinds
def test_dropout_draws_by_its_key_and_keeps_the_mean(kind):
    layer, x = make(kind, **OPTIONS["grouped"], dropout_rate=0.4), tokens()
    plain = layer.apply(layer.parameters, x)
    close(plain, exact(layer, x))
    run = jax.jit(jax.vmap(lambda key: layer.apply(layer.parameters, x, dropout_key=key)))
    drawn = run(jax.random.split(jax.random.key(2), 3000))
    assert not np.allclose(drawn[0], drawn[1])
    chex.assert_trees_all_equal(drawn, run(jax.random.split(jax.random.key(2), 3000)))
    close(drawn.mean(0), plain, 0.1)
    kept = np.abs(np.asarray(drawn)[:, :, 0]).max(axis=-1) > 0  # The first token reads itself alone, with each of 6 heads.
    assert kept.mean() == pytest.approx(1 - 0.4**6, abs=0.01)


@kinds
def test_dropout_with_a_cache_is_refused(kind):
    layer = make(kind, **OPTIONS["grouped"], dropout_rate=0.4)
    with pytest.raises(ValueError, match="without a cache"):
        layer.apply(layer.parameters, tokens(), cache=layer.module.init_cache(B, T), dropout_key=jax.random.key(0))


# Flax's own layers


def their_nnx(kv_heads, bias, dtype=jnp.float32, **how):
    made = nnx.MultiHeadAttention(
        6, D, 36, num_kv_heads=kv_heads, use_bias=bias, dtype=dtype, param_dtype=dtype, decode=False, rngs=nnx.Rngs(4), **how
    )
    for path, leaf in nnx.to_flat_state(nnx.state(made, nnx.Param)):
        if path[-1] == "bias":
            leaf[...] = jnp.asarray(np.random.default_rng(len(path[0])).normal(size=leaf.shape), dtype)
    return made


@pytest.mark.parametrize(("kv_heads", "bias"), [(1, True), (2, False), (2, True), (6, True)])
def test_it_equals_the_nnx_layer_of_flax_both_ways_forward_and_backward(kv_heads, bias):
    theirs, x = their_nnx(kv_heads, bias), tokens()
    mask = nn.make_causal_mask(jnp.ones((B, T)))
    ours = ours_nnx.GroupedQueryAttention.from_flax(theirs)
    close(ours(x), theirs(x, mask=mask))
    back = ours.to_flax()
    chex.assert_trees_all_equal(nnx.state(back, nnx.Param), nnx.state(theirs, nnx.Param))
    gradient = nnx.jit(nnx.grad(lambda layer: jnp.square(layer(x)).sum()))(ours)
    want = nnx.jit(nnx.grad(lambda layer: jnp.square(layer(x, mask=mask)).sum()))(theirs)
    flat = {"/".join(path): leaf[...] for path, leaf in nnx.to_flat_state(want)}
    for name, leaf in modules.from_theirs(flat, ours.config).items():
        close(gradient[name][...], leaf, 1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_it_equals_the_linen_layer_of_flax_both_ways(bias):
    theirs = nn.MultiHeadDotProductAttention(num_heads=6, qkv_features=36, use_bias=bias)
    x, mask = tokens(), nn.make_causal_mask(jnp.ones((B, T)))
    variables = theirs.init(jax.random.key(0), x)
    ours = ours_linen.GroupedQueryAttention(6, D, head_dim=6, use_bias=bias, attention=Attention(rope=None))
    mine = ours_linen.from_flax(variables, ours)
    close(ours.apply(mine, x), theirs.apply(variables, x, mask=mask))
    chex.assert_trees_all_equal(ours_linen.to_flax(mine, ours), variables)
    fresh = ours.init(jax.random.key(1), x)
    close(theirs.apply(ours_linen.to_flax(fresh, ours), x, mask=mask), ours.apply(fresh, x))


def test_decoding_token_by_token_equals_the_nnx_layer_with_its_cache():
    theirs, x = their_nnx(2, True), tokens()
    ours = ours_nnx.GroupedQueryAttention.from_flax(theirs)
    theirs.init_cache((B, T, D))
    cache = ours.init_cache(B, T)
    for start in range(T):
        y, cache = ours(x[:, start : start + 1], cache=cache)
        close(y, theirs(x[:, start : start + 1], decode=True))


def test_the_layer_of_flax_in_bfloat16_is_near():
    theirs, x = their_nnx(2, True, jnp.bfloat16), tokens(dtype=jnp.bfloat16)
    ours = ours_nnx.GroupedQueryAttention.from_flax(theirs)
    y = ours(x)
    assert y.dtype == jnp.bfloat16
    with jax.numpy_dtype_promotion("standard"):
        close(y, theirs(x, mask=nn.make_causal_mask(jnp.ones((B, T)))), 6e-2)


def test_what_the_layers_of_flax_lack_or_have_besides_is_refused():
    made = functools.partial(ours_nnx.GroupedQueryAttention, 6, D, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="rope, window"):
        made(attention=Attention(window=3)).to_flax()
    with pytest.raises(ValueError, match="qk_norm"):
        made(attention=Attention(rope=None), qk_norm=True).to_flax()
    with pytest.raises(ValueError, match="normalize_qk"):
        ours_nnx.GroupedQueryAttention.from_flax(their_nnx(2, False, normalize_qk=True))
    with pytest.raises(ValueError, match="was to come"):
        ours_nnx.GroupedQueryAttention.from_flax(nnx.MultiHeadAttention(6, D, 36, out_features=13, rngs=nnx.Rngs(0)))
    grouped = ours_linen.GroupedQueryAttention(6, D, 2, attention=Attention(rope=None))
    with pytest.raises(ValueError, match="2 KV heads for 6 query heads"):
        ours_linen.to_flax(grouped.init(jax.random.key(0), tokens()), grouped)


# What Flax's own layers let pass


@kinds
def test_a_cache_is_not_written_past_its_end(kind):
    layer, x = make(kind, **OPTIONS["grouped"]), tokens()
    _, cache = layer.apply(layer.parameters, x[:, :2], cache=layer.module.init_cache(B, 2))
    with pytest.raises(ValueError, match="already holds 2 of its 2 slots"):
        layer.apply(layer.parameters, x[:, 2:3], cache=cache)
    _, after = jax.jit(lambda cache: layer.apply(layer.parameters, x[:, 2:3], cache=cache))(cache)
    assert after.overflowed.all()
    chex.assert_trees_all_equal((after.k, after.v), (cache.k, cache.v))


@kinds
def test_a_long_prompt_on_a_cache_sees_nothing_ahead(kind):
    layer, x = make(kind, **OPTIONS["grouped"]), tokens()
    y, _ = layer.apply(layer.parameters, x, cache=layer.module.init_cache(B, 2 * T))
    other, _ = layer.apply(layer.parameters, x.at[:, 4:].set(9.0), cache=layer.module.init_cache(B, 2 * T))
    chex.assert_trees_all_equal(y[:, :4], other[:, :4])
    assert not np.allclose(y[:, 4:], other[:, 4:])


@kinds
def test_twenty_steps_after_prompts_of_two_lengths_compile_once(kind):
    layer = make(kind, **OPTIONS["grouped"])
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(x, cache):
        return layer.apply(layer.parameters, x, cache=cache)

    for length in (3, 5):
        x = tokens(length + 10)
        _, cache = layer.run(layer.parameters, x[:, :length], cache=layer.module.init_cache(B, 16))
        for start in range(length, length + 10):
            y, cache = step(x[:, start : start + 1], cache)
        close(y[:, 0], exact(layer, x)[:, -1])


# Inside transforms


@kinds
def test_it_decodes_inside_a_while_loop_and_under_vmap(kind):
    layer, x = make(kind, **OPTIONS["grouped"]), tokens()

    def decode(x):
        def step(carry):
            at, cache, made = carry
            y, cache = layer.apply(layer.parameters, jax.lax.dynamic_slice_in_dim(x, at, 1, axis=1), cache=cache)
            return at + 1, cache, jax.lax.dynamic_update_slice_in_dim(made, y, at, axis=1)

        carry = (jnp.int32(0), layer.module.init_cache(x.shape[0], T), jnp.zeros_like(x))
        return jax.lax.while_loop(lambda carry: carry[0] < T, step, carry)[2]

    close(jax.jit(decode)(x), exact(layer, x))
    close(jax.vmap(decode)(x[:, None])[:, 0], exact(layer, x))


def in_order(layers, x):
    for layer in layers:
        x = x + exact(layer, x)
    return x


def slices(stacked, count):
    return [{name: value[i] for name, value in stacked.items()} for i in range(count)]


@pytest.mark.parametrize("remat", [False, True])
def test_nnx_layers_go_under_scan_jit_and_remat_with_their_caches(remat):
    how = OPTIONS["grouped"]

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs):
        return ours_nnx.GroupedQueryAttention(in_features=D, **how, rngs=rngs)

    stack = create(nnx.Rngs(0))
    state = nnx.to_pure_dict(nnx.state(stack, nnx.Param))
    layers = [make("nnx", **how)._replace(parameters=one) for one in slices(state, 3)]

    @nnx.jit
    def run(stack, x, caches):
        def body(x, layer, cache):
            y, cache = layer(x, cache=cache)
            return x + y, cache

        body = nnx.remat(body) if remat else body
        return nnx.scan(body, in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0))(x, stack, caches)

    x = tokens()
    caches = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[layers[0].module.init_cache(B, T) for _ in range(3)])
    first, caches = run(stack, x[:, :4], caches)
    rest, caches = run(stack, x[:, 4:], caches)
    close(jnp.concatenate([first, rest], axis=1), in_order(layers, np.asarray(x)), 1e-4)
    assert caches.length.tolist() == [[T] * B] * 3
    gradient = nnx.grad(lambda stack: jnp.square(run(stack, x, jax.tree.map(jnp.zeros_like, caches))[0]).sum())(stack)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(nnx.to_pure_dict(gradient)))


def test_a_cache_may_live_in_a_variable_of_nnx():
    class Talker(nnx.Module):
        def __init__(self, layer):
            self.layer, self.memory = layer, nnx.Cache(layer.init_cache(B, T))

        def __call__(self, x):
            y, cache = nnx.remat(lambda layer, x, cache: layer(x, cache=cache))(self.layer, x, self.memory.get_value())
            self.memory.set_value(cache)
            return y

    talker, x = Talker(make("nnx", **OPTIONS["grouped"]).module), tokens()
    want = talker.layer(x)
    say = nnx.jit(lambda talker, x: talker(x))
    close(jnp.concatenate([say(talker, x[:, :4]), say(talker, x[:, 4:5]), say(talker, x[:, 5:])], axis=1), want)
    assert talker.memory.get_value().length.tolist() == [T] * B


@pytest.mark.parametrize("remat", [False, True])
def test_linen_layers_go_under_scan_and_remat_with_their_caches(remat):
    how = OPTIONS["grouped"]

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, cache):
            kind = nn.remat(ours_linen.GroupedQueryAttention) if remat else ours_linen.GroupedQueryAttention
            y, cache = kind(in_features=D, **how)(x, cache=cache)
            return x + y, cache

    stack = nn.scan(
        Body,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=0,
        out_axes=0,
        metadata_params={"partition_name": "L"},
    )()
    layer, x = make("linen", **how), tokens()
    caches = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[layer.module.init_cache(B, T) for _ in range(3)])
    variables = stack.init(jax.random.key(0), x, caches)
    specs = flax.traverse_util.flatten_dict(nn.get_partition_spec(variables), sep="/")
    assert {path.split("/")[-1]: tuple(spec) for path, spec in specs.items()}["q"] == ("L", "D", "K", "G", "H")
    (stacked,) = nn.unbox(variables)["params"].values()
    layers = [layer._replace(parameters=one) for one in slices(stacked, 3)]
    run = jax.jit(stack.apply)
    first, caches = run(variables, x[:, :4], caches)
    rest, caches = run(variables, x[:, 4:], caches)
    close(jnp.concatenate([first, rest], axis=1), in_order(layers, np.asarray(x)), 1e-4)
    assert caches.length.tolist() == [[T] * B] * 3


# Many devices


def placement(tp: int, heads: dict, data: int = 2, split: bool = False, kind: AxisType = AxisType.Auto) -> gqa_jax.Placement:
    plan = gqa_jax.plan_heads(heads["num_heads"], heads.get("num_kv_heads", heads["num_heads"]), tp)
    grid = np.array(jax.devices()[: data * tp]).reshape(data, plan.kv, plan.group)
    return gqa_jax.Placement(Mesh(grid, ("data", "kv", "group"), axis_types=(kind,) * 3), split=split)


@kinds
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("split", [False, True], ids=["replicate", "split"])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_mesh_changes_nothing_but_place(kind, split, tp, axis_type):
    how = OPTIONS["9 over 3, softcap, sinks"] | {"use_bias": True}
    mesh = placement(tp, how, split=split, kind=axis_type)
    alone, layer, x = make(kind, **how), make(kind, **how, mesh=mesh), tokens()
    cache = layer.module.init_cache(B, T)
    assert cache.placement == mesh
    with jax.set_mesh(mesh.mesh):
        close(layer.apply(layer.parameters, x), exact(alone, x))
        first, cache = layer.apply(layer.parameters, x[:, :4], cache=cache)
        rest, cache = jax.jit(lambda p, x, cache: layer.apply(p, x, cache=cache))(layer.parameters, x[:, 4:], cache)
    close(np.concatenate([first, rest], axis=1), exact(alone, x))
    assert cache.k[0].sharding.is_equivalent_to(mesh.sharding("B K S H"), 4)


@kinds
@pytest.mark.parametrize("tp", [2, 4])
def test_a_mesh_gives_the_same_gradients_and_adds_each_bias_once(kind, tp):
    how = OPTIONS["9 over 3, softcap, sinks"] | {"use_bias": True}
    alone, layer, x = make(kind, **how), make(kind, **how, mesh=placement(tp, how)), tokens()
    got, want = (jax.jit(jax.grad(lambda p: jnp.square(one.apply(p, x)).sum()))(one.parameters) for one in (layer, alone))  # noqa: B023
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-4)


@kinds
def test_one_bias_on_four_devices_is_added_once(kind):
    how = {"num_heads": 8, "in_features": 1, "head_dim": 2, "use_bias": True, "attention": Attention(rope=None)}
    layer = make(kind, **how, mesh=placement(4, {"num_heads": 8}, data=1))
    ones = {name: jnp.ones_like(value) / (2 if name == "o" else 1) for name, value in layer.parameters.items()}
    ones |= {name: jnp.zeros_like(ones[name]) for name in ("v_bias",)}
    x = jnp.ones((1, 1, 1))
    assert layer.apply(ones, x).item() == 9
    assert jax.grad(lambda p: layer.apply(p, x).sum())(ones)["o_bias"].item() == 1


@kinds
@pytest.mark.parametrize(("tp", "cut"), [(2, ("data", None, None)), (3, ("data", ("kv",), None))])
def test_the_rules_place_parameters_by_their_letters(kind, tp, cut):
    how = OPTIONS["9 over 3, softcap, sinks"]
    mesh = placement(tp, how)
    module = make(kind, **how, **({"mesh": mesh} if kind == "nnx" else {})).module
    if kind == "nnx":
        spec = nnx.get_partition_spec(nnx.state(module))["q"].get_raw_value()
        assert module.q.get_metadata()["out_sharding"] == ("D", "K", "G", "H")
    else:
        specs = nn.get_partition_spec(jax.eval_shape(module.init, jax.random.key(0), tokens()))
        assert tuple(specs["params"]["q"]) == ("D", "K", "G", "H")
        spec = nn.logical_to_mesh_sharding(specs, mesh.mesh, mesh.rules(module.config))["params"]["q"].spec
    placed = jax.device_put(random_parameters(module.config)["q"], jax.sharding.NamedSharding(mesh.mesh, spec))
    assert placed.addressable_shards[0].data.shape == (D, 3 if tp == 2 else 1, 3, 10)


# Misuse


@kinds
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_heads": 5}, "24, which does not divide over 5 heads; give head_dim"),
        ({"num_heads": 6, "num_kv_heads": 4}, "6 query heads do not divide over 4 KV heads"),
        ({"num_heads": 6, "dropout_rate": 1.0}, "dropout_rate is 1.0"),
        ({"num_heads": 6, "head_dim": 3}, "must be even"),
    ],
)
def test_options_that_cannot_be_are_refused(kind, options, words):
    with pytest.raises(ValueError, match=words):
        make(kind, **options).apply({}, tokens())


@kinds
def test_what_does_not_belong_together_is_refused(kind, unchecked):
    layer, x = make(kind, **OPTIONS["grouped"]), tokens()
    cache = layer.module.init_cache(B, T)
    for bad in (x[..., :5], x[0]):
        with pytest.raises(ValueError, match="in_features, which is 24"):
            layer.apply(layer.parameters, bad)
    with pytest.raises(ValueError, match=r"\(layers, rows, KV heads, width\) = \(1, 2, 2, 4\)"):
        layer.apply(layer.parameters, x[:1], cache=cache)
    with pytest.raises(ValueError, match="leave one of them out"):
        layer.apply(layer.parameters, x, cache=cache, segments=jnp.zeros((B, T), jnp.int32))
    with pytest.raises(ValueError, match="from 0 to 7"):
        layer.apply(layer.parameters, x, cache=cache, count=jnp.array([3, 8]))
    window = make(kind, **OPTIONS["grouped"], attention=Attention(window=2)).module.init_cache(B, T)
    with pytest.raises(ValueError, match="keeps the last 2 tokens"):
        layer.apply(layer.parameters, x, cache=window)


# The whole decoder


CONFIG = gqa_jax.Config(
    vocab_size=61,
    num_layers=2,
    model_dim=24,
    mlp_dim=37,
    num_heads=9,
    num_kv_heads=3,
    head_dim=10,
    context_length=64,
    attention=(Attention(window=5), Attention(sinks=True)),
    tied_head=False,
)


def ids(length: int = 11) -> jax.Array:
    return jnp.asarray(np.random.default_rng(8).integers(0, 61, (B, length)), jnp.int32)


@pytest.mark.parametrize("tp", [None, 2])
def test_the_decoder_gives_what_forward_gives_and_generate_runs_it(tp):
    mesh = None if tp is None else gqa_jax.make_mesh(CONFIG, tp=tp)
    params = decoder.init_params(CONFIG, jax.random.key(1), mesh=mesh)
    made = ours_nnx.Decoder.from_model(gqa_jax.Model(CONFIG, params))
    want, _ = decoder.forward(params, ids(), None, CONFIG)
    close(nnx.jit(lambda made, tokens: made(tokens))(made, ids()), want)
    first, cache = made(ids()[:, :6], cache=made.init_cache(B, 16))
    rest, cache = nnx.jit(lambda made, tokens, cache: made(tokens, cache=cache))(made, ids()[:, 6:], cache)
    close(np.concatenate([first, rest], axis=1), want)
    assert made.layers[0]["attention.q"].get_metadata()["out_sharding"] == ("D", "K", "G", "H")
    mine, theirs = (
        gqa_jax.generate(model, [[1, 2, 3]], max_new_tokens=5).ids for model in (made.model, gqa_jax.Model(CONFIG, params))
    )
    assert mine == theirs


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("tp", [None, 2])
def test_the_decoder_learns_with_an_optimiser_of_flax(tp, remat):
    mesh = None if tp is None else gqa_jax.make_mesh(CONFIG, tp=tp)
    made = ours_nnx.Decoder(CONFIG, mesh=mesh, remat=remat, rngs=nnx.Rngs(0))
    optimiser = nnx.Optimizer(made, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(made, optimiser, tokens):
        def loss(made):
            scores = jax.nn.log_softmax(made(tokens)[:, :-1])
            return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()

        value, gradient = nnx.value_and_grad(loss)(made)
        optimiser.update(made, gradient)
        return value

    with jax.numpy_dtype_promotion("standard"):  # Adam is not made for a stricter one.
        losses = [float(step(made, optimiser, ids())) for _ in range(12)]
    assert losses[-1] < losses[0] - 1
    if mesh is not None:
        assert made.params["layers"][0]["attention.q"].sharding.is_equivalent_to(mesh.sharding("D K G H"), 4)


def test_a_decoder_of_nothing_is_refused():
    with pytest.raises(ValueError, match="Give rngs"):
        ours_nnx.Decoder(CONFIG)
