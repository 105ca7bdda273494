"""Grouped-query attention against a float64 loop that leaves hidden keys out, and the ways in which others got it wrong."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gqa_jax import attention
from gqa_jax.attention import (
    Part,
    Reading,
    add_sinks,
    attend,
    attend_filled,
    causal_mask,
    grouped_query_attention,
    merge,
)
from tests import oracles

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
HEADS = [(5, 5), (5, 1), (15, 3), (9, 3), (71, 1)]
B, T, S, H, HV = 2, 7, 11, 17, 13

dtypes = pytest.mark.parametrize("dtype", TOLERANCE)
jitted = pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
gqa = jax.jit(grouped_query_attention, static_argnames=("scale", "softcap"))
read = jax.jit(attend, static_argnames=("scale", "softcap"))
read_filled = jax.jit(attend_filled, static_argnums=5)
mask_of = jax.jit(causal_mask, static_argnums=2)


pytestmark = pytest.mark.usefixtures("quick_compilation")


def cast(x, dtype: str) -> np.ndarray:
    """The numbers in a dtype that only JAX's own numpy types may know; inputs are numpy, so that nothing else is compiled."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(getattr(ml_dtypes, dtype, dtype))


def normal(seed: int, *shape: int, dtype: str = "float32") -> np.ndarray:
    return cast(np.random.default_rng(seed).normal(size=shape), dtype)


def qkv(N: int, K: int, dtype: str = "float32", slots: int = S) -> list[np.ndarray]:
    shapes = ((B, T, N, H), (B, slots, K, H), (B, slots, K, HV))
    return [normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes, start=1)]


def grouped(K: int = 3, G: int = 5) -> list[np.ndarray]:
    shapes = ((B, K, G, T, H), (B, K, S, H), (B, K, S, HV))
    return [normal(seed, *shape) for seed, shape in enumerate(shapes, start=1)]


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, getattr(ml_dtypes, dtype, dtype))


def causal(queries: int, keys: int) -> np.ndarray:
    """The last queries of a text of so many keys."""
    return np.arange(keys) <= np.arange(keys - queries, keys)[:, None]


def one_hot_values(length: int) -> np.ndarray:
    """Values that name their own position, so that the result lists the weights."""
    return np.eye(length, dtype=np.float32)[None, :, None]


def close(got, want, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=tolerance, atol=tolerance)


def close_parts(got: Part, want: Part, tolerance: float = 2e-6) -> None:
    close(got.out, want.out, tolerance)
    close(got.lse, want.lse, tolerance)


def finite(*arrays) -> bool:
    return all(np.isfinite(np.asarray(x, np.float64)).all() for x in arrays)


def zero(*arrays) -> bool:
    return all((np.asarray(x, np.float64) == 0).all() for x in arrays)


# The public door


@pytest.mark.parametrize(
    ("N", "K", "dtype"),
    [
        *((N, K, "float32") for N, K in HEADS),
        *((N, K, "bfloat16") for N, K in HEADS[2:]),
        (9, 3, "float16"),
    ],
)
def test_it_equals_the_float64_loop(N, K, dtype):
    q, k, v = qkv(N, K, dtype)
    mask = causal(T, S)
    got = gqa(q, k, v, mask)
    assert got.dtype == q.dtype
    assert got.shape == (B, T, N, HV)
    close(got, oracles.attention(q, k, v, mask)[0], TOLERANCE[dtype])


def test_it_is_as_good_without_jit():
    q, k, v = qkv(9, 3)
    mask = causal(T, S)
    got = grouped_query_attention(*map(jnp.asarray, (q, k, v, mask)))
    close(got, oracles.attention(q, k, v, mask)[0])


@pytest.mark.parametrize(("N", "K", "dtype"), [(15, 3, "float32"), (71, 1, "float32"), (9, 3, "bfloat16"), (9, 3, "float16")])
def test_every_option_at_once_equals_the_float64_loop(N, K, dtype):
    q, k, v = qkv(N, K, dtype)
    rng = np.random.default_rng(4)
    mask, bias = rng.random((B, N, T, S)) < 0.6, cast(rng.normal(size=(B, N, T, S)), dtype)
    mask[1, :, 2] = False
    options = {"scale": 0.37, "softcap": 1.9}
    sinks = np.linspace(-1.0, 2.0, N).astype(np.float32)
    got = gqa(q, k, v, mask, sinks=sinks, bias=bias, **options)
    close(got, oracles.attention(q, k, v, mask, sinks=sinks, bias=bias, **options)[0], TOLERANCE[dtype])


@pytest.mark.parametrize(
    "option", [{"scale": 0.9}, {"softcap": 5.0}, {"softcap": 0.5}, {"sinks": zeros(9)}, {"bias": normal(5, T, S)}]
)
def test_no_option_is_dead(option):
    q, k, v = qkv(9, 3)
    got = np.asarray(gqa(q, k, v, **option))
    assert abs(got - gqa(q, k, v)).max() > 1e-2
    close(got, oracles.attention(q, k, v, **option)[0])


@pytest.mark.parametrize(
    "shape", [(T, S), (T, 1), (B, T, S), (B, 1, S), (B, 9, T, S), (1, 9, 1, S), (B, 1, T, 1), (1, 1, 1, 1)]
)
def test_masks_and_biases_of_every_rank_mean_the_same(shape):
    q, k, v = qkv(9, 3)
    mask, bias = normal(6, *shape) > -0.5, normal(7, *shape)
    every_head = (slice(None), None) if len(shape) == 3 else ...
    want, _ = oracles.attention(q, k, v, mask[every_head], bias=bias[every_head])
    close(gqa(q, k, v, mask, bias=bias), want)


@pytest.mark.parametrize(
    ("B", "T", "S", "N", "K"),
    [(1, 1, 1, 1, 1), (1, 7, 11, 5, 1), (3, 1, 11, 1, 1), (3, 7, 1, 10, 2), (1, 1, 11, 10, 2), (3, 1, 1, 5, 5)],
)
def test_axes_of_length_one_are_kept(B, T, S, N, K):
    q, k, v = normal(1, B, T, N, H), normal(2, B, S, K, H), normal(3, B, S, K, HV)
    got = gqa(q, k, v, np.ones((T, S), bool))
    assert got.shape == (B, T, N, HV)
    close(got, oracles.attention(q, k, v)[0])


def test_no_keys_at_all_give_zero():
    got = gqa(*qkv(9, 3, slots=0))
    assert got.shape == (B, T, 9, HV)
    assert zero(got)


@pytest.mark.parametrize(("N", "K", "order"), [(6, 2, [0, 0, 0, 1, 1, 1]), (9, 3, [0, 0, 0, 1, 1, 1, 2, 2, 2])])
def test_neighbouring_query_heads_share_a_kv_head(N, K, order):
    v = np.broadcast_to(10 * np.arange(1.0, K + 1, dtype=np.float32)[:, None], (1, 5, K, 1))
    out = gqa(zeros(1, 1, N, 4), zeros(1, 5, K, 4), v)
    assert out[0, 0, :, 0].tolist() == [10.0 * (1 + k) for k in order]


@pytest.mark.parametrize(("scale", "want"), [(None, 0.944193), (0.25, 0.731059), (2**0.5, 0.996519)])
def test_scale_is_the_given_one_or_that_of_the_head_width(scale, want):
    k, v = (np.array(x, np.float32).reshape(1, 2, 1, -1) for x in ([2, 2, 0, 0], [1, 0]))
    close(gqa(np.ones((1, 1, 1, 2), np.float32), k, v, scale=scale), [[[[want]]]])


# Positions


@pytest.mark.parametrize(
    ("new", "held", "want"),
    [
        ([4], 5, [[0.2] * 5]),
        ([3, 4], 5, [[0.25] * 4 + [0.0], [0.2] * 5]),
        ([0, 1, 2, 3], 8, [[1 / (t + 1)] * (t + 1) + [0.0] * (7 - t) for t in range(4)]),
    ],
    ids=["one token", "a chunk", "a prompt in a larger cache"],
)
def test_causality_follows_positions_not_indices(new, held, want):
    mask = mask_of(np.array(new), np.arange(held))
    out = gqa(zeros(1, len(new), 1, 4), zeros(1, held, 1, 4), one_hot_values(held), mask)
    close(out[0, :, 0], want, 1e-6)


@pytest.mark.parametrize(
    ("window", "counts"),
    [(3, [1, 2, 3, 3, 3, 3]), (1, [1] * 6), (6, [1, 2, 3, 4, 5, 6]), (99, [1, 2, 3, 4, 5, 6]), (None, [1, 2, 3, 4, 5, 6])],
)
def test_a_window_counts_the_token_itself(window, counts):
    positions = np.arange(6)
    out = gqa(zeros(1, 6, 1, 4), zeros(1, 6, 1, 4), one_hot_values(6), mask_of(positions, positions, window))
    weights = np.asarray(out[0, :, 0])
    assert (weights > 0).sum(axis=1).tolist() == counts
    assert (np.diagonal(weights) > 0).all()
    values = np.eye(8, dtype=np.float32)[None, None]
    part = read_filled(zeros(1, 1, 1, 6, 4), zeros(1, 1, 8, 4), values, positions[None], np.array([6]), Reading(0.5, window))
    close(part.out[0, 0, 0], np.pad(weights, ((0, 0), (0, 2))), 1e-7)


def test_a_negative_key_position_is_an_empty_slot():
    mask = causal_mask(jnp.array([[3], [1]]), jnp.array([[0, -1, 3], [2, 1, -7]]))
    assert mask.tolist() == [[[True, False, True]], [[False, True, False]]]


@pytest.mark.parametrize("dtype", ["int8", "int32"])
@pytest.mark.parametrize("window", [None, 4])
def test_key_positions_may_stand_in_any_order(dtype, window):
    q_positions = np.array([[4, 2, 9], [0, 1, 2]], dtype)
    kv_positions = np.array([[5, 0, 9, 2, 7], [1, 6, -1, 3, 2]], dtype)
    got = mask_of(q_positions, kv_positions, window)
    assert (np.asarray(got) == oracles.seen(q_positions, kv_positions, window)).all()


# Rows with nothing to read, and junk that nobody reads


@jitted
@pytest.mark.parametrize("rows", [1, 2], ids=["empty row left out of the loss", "empty row in the loss"])
def test_a_row_with_nothing_to_read_gives_zero_and_finite_gradients(rows, jitted):
    q = jnp.ones((1, 2, 2, 4))
    k = np.arange(12, dtype=np.float32).reshape(1, 3, 1, 4) / 10
    mask = jnp.array([[True, False, False], [False, False, False]])
    attention = gqa if jitted else grouped_query_attention

    def loss(q, k, v):
        out = attention(q, k, v, mask)
        return (out[0, :rows] * np.arange(1.0, 5, dtype=np.float32)).sum(), out

    gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, jnp.asarray(k), jnp.asarray(k + 1))
    assert zero(out[0, 1])
    close(out[0, 0], [[1.0, 1.1, 1.2, 1.3]] * 2, 1e-6)
    assert finite(*gradients)
    close(gradients[2][0, :, 0], [[2.0, 4.0, 6.0, 8.0], [0.0] * 4, [0.0] * 4], 1e-6)


@pytest.mark.parametrize(
    "hidden", [{"mask": np.zeros((1, 1, 1, 1, 1), bool)}, {"bias": np.full((1, 1, 1, 1, 1), -np.inf, np.float32)}]
)
def test_an_empty_part_has_an_lse_of_minus_infinity(hidden):
    part = read(*grouped(), scale=1.0, **hidden)
    assert zero(part.out)
    assert np.isneginf(part.lse).all()


@jax.jit
def squares(q, k, v, mask):
    def loss(q, k, v):
        return (grouped_query_attention(q, k, v, mask).astype(jnp.float32) ** 2).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)


@dtypes
@pytest.mark.parametrize("junk", [np.nan, np.inf, 1e30, -1e30])
def test_junk_in_a_hidden_key_changes_nothing(junk, dtype):
    q, k, v = qkv(9, 3, dtype)
    kept = 8
    want = squares(q, k[:, :kept], v[:, :kept], np.ones((T, kept), bool))
    k[:, kept:] = v[:, kept:] = cast(junk, dtype)
    got, (dq, dk, dv) = squares(q, k, v, np.broadcast_to(np.arange(S) < kept, (T, S)))
    close(got, want[0], TOLERANCE[dtype])
    for a, b in zip((dq, dk[:, :kept], dv[:, :kept]), want[1], strict=True):
        close(a, b, 10 * TOLERANCE[dtype])
    assert zero(dk[:, kept:], dv[:, kept:])


def test_a_hidden_nan_leaves_the_known_answer():
    k = np.arange(12, dtype=np.float32).reshape(1, 3, 1, 4) / 10
    k[:, 2] = np.nan
    out = gqa(np.ones((1, 1, 1, 4), np.float32), k, k + 1, np.array([[True, True, False]]))
    close(out[0, 0, 0], [1.27599, 1.37599, 1.47599, 1.57599])


def test_a_huge_hidden_logit_leaves_the_gradient_alone():
    mask = np.array([[True, True, False]])

    def chance(bias):
        return gqa(zeros(1, 1, 1, 4), zeros(1, 3, 1, 4), one_hot_values(3), mask, bias=bias)[0, 0, 0]

    logits = np.array([[1.0, 1.0, 100.0]], np.float32)
    close(chance(logits), [0.5, 0.5, 0.0], 1e-7)
    close(jax.grad(lambda x: chance(x)[0])(logits), [[0.25, -0.25, 0.0]], 1e-7)


@partial(jax.jit, static_argnames="softcap")
def squares_before_the_last(q, k, v, mask, softcap):
    def loss(q, k, v):
        return (grouped_query_attention(q, k, v, mask, softcap=softcap)[:, : T - 1] ** 2).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)


@pytest.mark.parametrize("size", [1e4, 1e15, 1e30])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_a_huge_key_that_later_queries_read_leaves_earlier_ones_alone(size, softcap):
    q, k, v = qkv(9, 3, slots=T)
    mask = causal(T, T)
    want = squares_before_the_last(q[:, :-1], k[:, :-1], v[:, :-1], mask[:-1, :-1], softcap)
    k[:, -1] *= np.float32(size)
    got, gradients = squares_before_the_last(q, k, v, mask, softcap)
    close(got, want[0])
    for a, b in zip(gradients, want[1], strict=True):
        close(a[:, :-1], b)
        assert zero(a[:, -1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("lowest", ["bfloat16", "float16", "float32"])
def test_two_finite_masks_added_make_no_nan(dtype, lowest):
    length, pad = 4, 2
    q, k, v = (x[:, :length] for x in qkv(9, 3, dtype, slots=length))
    low = cast(ml_dtypes.finfo(getattr(ml_dtypes, lowest, lowest)).min, dtype)
    ahead = np.where(causal(length, length), cast(0.0, dtype), low)
    padding = np.where(np.arange(length) >= pad, cast(0.0, dtype), low)
    with np.errstate(over="ignore"):
        bias = ahead + padding
    out, pull = jax.vjp(lambda *x: gqa(*x, bias=bias), q, k, v)
    assert finite(out, *pull(out))
    want, _ = oracles.attention(q[:, pad:], k[:, pad:], v[:, pad:], causal(length - pad, length - pad))
    close(out[:, pad:], want, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_two_boolean_masks_hide_what_either_hides(dtype):
    length, pad = 4, 2
    q, k, v = (x[:, :length] for x in qkv(9, 3, dtype, slots=length))
    out = gqa(q, k, v, causal(length, length) & (np.arange(length) >= pad))
    assert zero(out[:, :pad])
    want, _ = oracles.attention(q[:, pad:], k[:, pad:], v[:, pad:], causal(length - pad, length - pad))
    close(out[:, pad:], want, TOLERANCE[dtype])


# Numbers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("cached", [False, True])
def test_many_equal_scores_sum_in_float32(dtype, cached):
    slots = 4096
    q, ones = zeros(1, 1, 1, 1, 4, dtype=dtype), zeros(1, 1, slots, 4, dtype=dtype) + cast(1.0, dtype)
    if cached:
        out = read_filled(q, ones, ones, np.array([[slots - 1]]), np.array([slots]), Reading(0.5)).out
    else:
        out = gqa(q[:, 0], ones.swapaxes(1, 2), ones.swapaxes(1, 2))
    close(out, np.ones(out.shape), 2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("cached", [False, True])
def test_logits_are_not_rounded_to_the_dtype_of_the_model(dtype, cached):
    q, k, v = (cast(x, dtype) for x in ([1.0, 1.0], [[88.0, 0.0], [88.0, 0.25]], np.eye(2)))
    if cached:
        args = (q[None, None, None, None], k[None, None], v[None, None], np.array([[1]]), np.array([2]))
        out = read_filled(*args, Reading(1.0)).out[0, 0, 0, 0]
    else:
        out = gqa(q[None, None, None], k[None, :, None], v[None, :, None], scale=1.0)[0, 0, 0]
    close(out, [0.437823, 0.562177], 4e-3)


def test_the_cap_bounds_logits_before_the_mask():
    v = np.array([1.0, 0.0], np.float32).reshape(1, 2, 1, 1)
    out = gqa(zeros(1, 1, 1, 4), zeros(1, 2, 1, 4), v, np.array([[True, False]]), softcap=1.0)
    assert out.item() == 1.0
    q, k = np.full((1, 1, 1, 1, 1), 124.0, np.float32), np.ones((1, 1, 1, 1), np.float32)
    close(read(q, k, k, scale=1.0, softcap=30.0).lse, [[[[29.98459]]]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_keys_may_have_another_dtype_than_queries(dtype):
    q, k, v = grouped()
    k, v = cast(k, dtype), cast(v, dtype)
    mask = causal(T, S)[None, None, None]
    got = read(q, k, v, mask, scale=0.25)
    assert got.out.dtype == got.lse.dtype == jnp.float32
    same = read(q, k.astype("float32"), v.astype("float32"), mask, scale=0.25)
    close(got.lse, same.lse, 1e-6)
    close(got.out, same.out, TOLERANCE[dtype] / 2)


# Parts


NOTHING = Part(zeros(B, 3, 5, T, HV), np.full((B, 3, 5, T), -np.inf, np.float32))
merges = pytest.mark.parametrize(
    "merge", [lambda *x: merge(*jax.tree.map(jnp.asarray, x)), jax.jit(merge)], ids=["eager", "jitted"]
)


def read_apart(*slots: int) -> list[Part]:
    q, k, v = grouped()
    ends = np.cumsum(slots)
    return [read(q, k[:, :, a:b], v[:, :, a:b], scale=0.3) for a, b in zip((0, *ends), ends, strict=False)]


@merges
def test_merged_parts_equal_one_reading(merge):
    a, b, c = read_apart(4, 2, 5)
    (whole,) = read_apart(11)
    for joined in (merge(merge(a, b), c), merge(a, merge(b, c)), merge(merge(c, a), b)):
        close_parts(joined, whole)


@merges
def test_nothing_is_the_identity_of_merge(merge):
    (part,) = read_apart(4)
    close_parts(merge(part, NOTHING), part)
    close_parts(merge(NOTHING, part), part)
    both = merge(NOTHING, NOTHING)
    assert zero(both.out)
    assert np.isneginf(both.lse).all()


@jax.jit
def gradients_apart_and_at_once(q, k, v, mask, weight):
    cut = 4

    def apart(q, k, v):
        halves = (attend(q, k[:, :, s], v[:, :, s], mask[..., s], scale=0.3) for s in (slice(cut), slice(cut, None)))
        return (merge(*halves).out * weight).sum()

    def at_once(*x):
        return (attend(*x, mask, scale=0.3).out * weight).sum()

    return [jax.grad(f, argnums=(0, 1, 2))(q, k, v) for f in (apart, at_once)]


@pytest.mark.parametrize("left", ["empty", "full"])
@pytest.mark.parametrize("right", ["empty", "full"])
def test_gradients_of_merge_are_finite_and_those_of_one_reading(left, right):
    mask = np.repeat([left == "full", right == "full"], [4, S - 4])[None, None, None, None]
    for got, want in zip(*gradients_apart_and_at_once(*grouped(), mask, normal(7, B, 3, 5, T, HV)), strict=True):
        assert finite(got)
        close(got, want)


@pytest.mark.parametrize("wrt", ["lse", "out"])
def test_merging_nothing_with_nothing_has_no_nan_in_its_gradient(wrt):
    def loss(a, b):
        both = merge(a, b)
        return both.out.sum() if wrt == "out" else jnp.where(jnp.isneginf(both.lse), 0.0, both.lse).sum()

    assert finite(*jax.tree.leaves(jax.jit(jax.grad(loss, argnums=(0, 1)))(NOTHING, NOTHING)))


@jitted
def test_sinks_are_one_more_key_without_a_value(jitted):
    q, k, v = grouped()
    sinks = np.linspace(-3.0, 3.0, 15).reshape(3, 5).astype(np.float32)
    got = (jax.jit(add_sinks) if jitted else add_sinks)(read(q, k, v, scale=0.3), jnp.asarray(sinks))
    one_more = ((0, 0), (0, 0), (0, 1), (0, 0))
    bias = np.concatenate([zeros(1, 3, 5, 1, S), sinks[None, :, :, None, None]], axis=-1)
    close_parts(got, read(q, np.pad(k, one_more), np.pad(v, one_more), scale=0.3, bias=bias))


@pytest.mark.parametrize("sink", [-np.inf, 0.5])
def test_sinks_beside_nothing_give_zero_and_finite_gradients(sink):
    mask = jnp.asarray(np.broadcast_to(np.arange(T)[:, None] == 0, (T, S)))

    def loss(q, k, v, sinks):
        out = grouped_query_attention(q, k, v, mask, sinks=sinks)
        return out.sum(), out

    sinks = np.full(9, sink, np.float32)
    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*qkv(9, 3), sinks)
    assert zero(out[:, 1:])
    assert finite(*gradients)


# Reading a cache block by block


def filled_rows(K: int, G: int, capacity: int, new: int, dtype: str = "float32"):
    """Three rows that hold different numbers of tokens, one of them as many as there is room for."""
    filled = np.array([capacity, max(new, capacity * 2 // 3), new], np.int32)
    q = normal(1, 3, K, G, new, H)
    k, v = normal(2, 3, K, capacity, H, dtype=dtype), normal(3, 3, K, capacity, HV, dtype=dtype)
    return q, k, v, filled[:, None] - np.int32(new) + np.arange(new, dtype=np.int32), filled


def junk_behind(x, filled, junk):
    behind = np.arange(x.shape[2]) >= filled[:, None]
    return np.where(behind[:, None, :, None], cast(junk, x.dtype.name), x)


def seen_of_filled(k, positions, filled, window):
    slots = np.arange(k.shape[2])
    return oracles.seen(positions, np.where(slots < filled[:, None], slots, -1), window)


def oracle_of_filled(q, k, v, positions, filled, softcap=None, window=None, gone=0):
    rows, K, G, new, _ = q.shape
    by_head = q.transpose(0, 3, 1, 2, 4).reshape(rows, new, K * G, -1)
    mask = (seen_of_filled(k, positions, filled, window) & (np.arange(k.shape[2]) >= gone))[:, None]
    out, lse = oracles.attention(by_head, k.swapaxes(1, 2), v.swapaxes(1, 2), mask, scale=0.3, softcap=softcap)
    return out.reshape(rows, new, K, G, -1).transpose(0, 2, 3, 1, 4), lse.reshape(rows, new, K, G).transpose(0, 2, 3, 1)


@pytest.mark.parametrize(
    ("capacity", "new", "K", "G"),
    [(1, 1, 5, 2), (11, 5, 2, 7), (512, 5, 1, 7), (513, 1, 5, 1), (515, 7, 5, 2), (700, 1, 1, 71), (1030, 7, 3, 3)],
)
def test_filled_slots_read_in_blocks_equal_the_float64_loop(capacity, new, K, G):
    rows = filled_rows(K, G, capacity, new)
    got = read_filled(*rows, Reading(0.3, softcap=2.0))
    out, lse = oracle_of_filled(*rows, softcap=2.0)
    close(got.out, out)
    close(got.lse, lse)


@pytest.mark.parametrize("junk", [np.nan, 1e30])
@pytest.mark.parametrize(
    ("capacity", "new", "window", "dtype"),
    [
        (11, 5, None, "float32"),
        (11, 5, 3, "float32"),
        (1030, 7, None, "float32"),
        (1030, 7, 1, "float32"),
        (1030, 7, 600, "float32"),
        (700, 1, 3, "bfloat16"),
        (700, 1, 600, "float16"),
    ],
)
def test_filled_slots_equal_a_dense_reading_whatever_lies_behind_them(capacity, new, window, dtype, junk):
    q, k, v, positions, filled = filled_rows(3, 2, capacity, new, dtype)
    want = read(q, k, v, seen_of_filled(k, positions, filled, window)[:, None, None], scale=0.3)
    got = read_filled(q, *(junk_behind(x, filled, junk) for x in (k, v)), positions, filled, Reading(0.3, window))
    close(got.out, want.out, TOLERANCE[dtype] / 2)
    close(got.lse, want.lse, 2e-6)


@pytest.mark.parametrize("window", [1, 600])
def test_junk_that_the_window_has_left_behind_changes_nothing(window):
    q, k, v, positions, filled = filled_rows(3, 2, 1030, 7)
    positions, filled = np.broadcast_to(positions[0], positions.shape), np.full_like(filled, 1030)
    want = read_filled(q, k, v, positions, filled, Reading(0.3, window))
    shown = positions.min() - window + 1
    k[:, :, :shown] = v[:, :, :shown] = np.nan
    close_parts(read_filled(q, k, v, positions, filled, Reading(0.3, window)), want, 0)


@partial(jax.jit, static_argnums=7)
def gradients_in_blocks(q, k, v, positions, filled, out_weight, lse_weight, reading):
    def loss(part):
        return (part.out * out_weight).sum() + (part.lse * lse_weight).sum()

    return jax.grad(lambda *x: loss(attend_filled(*x, positions, filled, reading)), argnums=(0, 1, 2))(q, k, v)


@jax.jit
def gradients_at_once(q, k, v, mask, out_weight, lse_weight):
    def loss(part):
        return (part.out * out_weight).sum() + (part.lse * lse_weight).sum()

    return jax.grad(lambda *x: loss(attend(*x, mask, scale=0.3, softcap=3.0)), argnums=(0, 1, 2))(q, k, v)


@pytest.mark.parametrize(
    ("capacity", "new", "window", "dtype"),
    [(11, 5, 2, "float32"), (515, 3, None, "float32"), (1030, 7, 600, "float32"), (515, 3, 2, "bfloat16")],
)
def test_gradients_through_filled_slots_equal_dense_ones(capacity, new, window, dtype):
    q, k, v, positions, filled = filled_rows(3, 2, capacity, new, dtype)
    weights = normal(7, 3, 3, 2, new, HV), normal(8, 3, 3, 2, new)
    want = gradients_at_once(q, k, v, seen_of_filled(k, positions, filled, window)[:, None, None], *weights)
    for junk in (0.0, np.nan, 1e30):
        dirty = (junk_behind(x, filled, junk) for x in (k, v))
        got = gradients_in_blocks(q, *dirty, positions, filled, *weights, Reading(0.3, window, softcap=3.0))
        for a, b, x in zip(got, want, (q, k, v), strict=True):
            assert a.dtype == x.dtype
            close(a, b, TOLERANCE[dtype])


def test_rows_without_a_filled_slot_give_zero_beside_rows_that_have_some():
    q, k, v, positions, filled = filled_rows(3, 2, 700, 1)
    filled[1] = 0
    k, v = (junk_behind(x, filled, np.nan) for x in (k, v))
    part = read_filled(q, k, v, positions, filled, Reading(0.3, 600))
    assert zero(part.out[1])
    assert np.isneginf(part.lse[1]).all()
    assert not zero(part.out[0])
    weights = np.ones(part.out.shape, np.float32), zeros(*part.lse.shape)
    for gradient in gradients_in_blocks(q, k, v, positions, filled, *weights, Reading(0.3, 600)):
        assert finite(gradient)
        assert zero(gradient[1])
        assert not zero(gradient[0])


@jitted
def test_an_empty_cache_gives_zero_everywhere(jitted):
    q, k, v, positions, _ = map(jnp.asarray, filled_rows(3, 2, 11, 5))
    nothing = np.full_like(k, np.nan), np.full_like(v, np.nan), positions, zeros(3, dtype="int32")
    part = (read_filled if jitted else attend_filled)(q, *map(jnp.asarray, nothing), Reading(0.3))
    assert zero(part.out)
    assert np.isneginf(part.lse).all()


@pytest.mark.parametrize("window", [None, 100])
def test_more_filled_than_there_are_slots_is_a_ring_of_the_last_ones(window):
    q, k, v, positions, filled = filled_rows(3, 2, 515, 3)
    late = (positions + np.int32(40), np.full_like(filled, 555))
    got = read_filled(q, k, v, *late, Reading(0.3, window))
    # Slot s holds position s, or 515 + s where the row has come round to it again; the oracle sees them in a line.
    line = (np.concatenate([np.zeros_like(x[:, :, :40]), x[:, :, 40:], x[:, :, :40]], axis=2) for x in (k, v))
    close(got.out, oracle_of_filled(q, *line, *late, window=window, gone=40)[0])


@pytest.mark.parametrize(
    ("capacity", "filled", "window", "blocks"),
    [
        (2048, 600, None, 2),
        (2048, 512, None, 1),
        (2048, 513, None, 2),
        (1030, 1030, None, 3),
        (2048, 0, None, 0),
        (2048, 2000, 100, 1),
        (2048, 2000, 1000, 3),
        (2048, 1024, 512, 1),
        (2048, 1025, 513, 2),
        (2048, 1025, 514, 3),
    ],
)
def test_the_cost_follows_what_is_filled_and_what_the_window_shows(capacity, filled, window, blocks, monkeypatch):
    calls = []

    def counted(*arguments, **options):
        calls.append(arguments)
        return attend(*arguments, **options)

    monkeypatch.setattr(attention, "attend", counted)
    q, kv, position, filled_rows = map(
        jnp.asarray, (zeros(1, 1, 1, 1, 4), zeros(1, 1, capacity, 4), np.array([[filled - 1]]), np.array([filled]))
    )
    with jax.disable_jit():
        part = attend_filled(q, kv, kv, position, filled_rows, Reading(0.5, window))
    assert len(calls) == blocks
    if filled:
        close(part.lse.item(), np.log(min(filled, window or filled)))


# Errors


@pytest.mark.parametrize(
    ("q", "k", "v", "error", "words"),
    [
        (zeros(2, 3, 7, 4), zeros(2, 5, 2, 4), zeros(2, 5, 2, 4), ValueError, "7 query heads .* 2 KV heads"),
        (zeros(2, 3, 7, 4), zeros(2, 5, 0, 4), zeros(2, 5, 0, 4), ValueError, "7 query heads .* 0 KV heads"),
        (zeros(2, 3, 4), zeros(2, 5, 2, 4), zeros(2, 5, 2, 4), ValueError, r"query has shape \(2, 3, 4\).* four axes"),
        (zeros(2, 3, 6, 4), zeros(2, 5, 4), zeros(2, 5, 2, 4), ValueError, r"key has shape \(2, 5, 4\)"),
        (zeros(2, 3, 6, 4), zeros(2, 5, 2, 4), zeros(1, 2, 5, 2, 4), ValueError, r"value has shape \(1, 2, 5, 2, 4\)"),
        (zeros(2, 3, 6, 4), zeros(2, 5, 2, 4), zeros(2, 6, 2, 4), ValueError, r"\(2, 5, 2, 4\).*\(2, 6, 2, 4\)"),
        (zeros(2, 3, 6, 4), zeros(2, 5, 2, 4), zeros(2, 5, 3, 4), ValueError, r"\(2, 5, 2, 4\).*\(2, 5, 3, 4\)"),
        (zeros(1, 3, 6, 4), zeros(2, 5, 2, 4), zeros(2, 5, 2, 4), ValueError, r"\(1, 3, 6, 4\).*\(2, 5, 2, 4\).*batch"),
        (zeros(2, 3, 6, 8), zeros(2, 5, 2, 4), zeros(2, 5, 2, 4), ValueError, r"\(2, 3, 6, 8\).*\(2, 5, 2, 4\).*width"),
        (zeros(2, 3, 6, 4, dtype="int32"), zeros(2, 5, 2, 4), zeros(2, 5, 2, 4), TypeError, "query has dtype int32"),
        (zeros(2, 3, 6, 4), zeros(2, 5, 2, 4, dtype="int8"), zeros(2, 5, 2, 4), TypeError, "key has dtype int8"),
        (zeros(2, 3, 6, 4), zeros(2, 5, 2, 4), zeros(2, 5, 2, 4, dtype="bool"), TypeError, "value has dtype bool"),
    ],
)
@jitted
def test_tensors_that_do_not_fit_are_refused_with_both_shapes(unchecked, q, k, v, error, words, jitted):
    with pytest.raises(error, match=words):
        (gqa if jitted else grouped_query_attention)(q, k, v)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (5, 3), (2, 6, 3, 5, 1), (3, 3, 5), (2, 2, 3, 5), (2, 6, 3, 4)])
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_masks_and_biases_that_do_not_fit_are_refused_with_both_shapes(unchecked, name, shape):
    given = {name: zeros(*shape, dtype="bool" if name == "mask" else "float32")}
    numbers = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    with pytest.raises(ValueError, match=rf"{name} has shape \({numbers}\).*\(3, 5\), \(2, 3, 5\) or \(2, 6, 3, 5\)"):
        gqa(zeros(2, 3, 6, 4), zeros(2, 5, 2, 4), zeros(2, 5, 2, 4), **given)


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_a_mask_of_numbers_is_refused(unchecked, dtype):
    with pytest.raises(TypeError, match=f"mask has dtype {dtype}.*bias"):
        gqa(zeros(2, 3, 6, 4), zeros(2, 5, 2, 4), zeros(2, 5, 2, 4), zeros(3, 5, dtype=dtype))


@pytest.mark.parametrize("shape", [(2,), (7,), (1,), (6, 1)])
def test_sinks_that_are_not_one_a_query_head_are_refused(unchecked, shape):
    with pytest.raises(ValueError, match=rf"sinks has shape \({shape[0]},.*6 query heads"):
        gqa(zeros(2, 3, 6, 4), zeros(2, 5, 2, 4), zeros(2, 5, 2, 4), sinks=zeros(*shape))


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_that_hides_the_token_itself_is_refused(window):
    with pytest.raises(ValueError, match=f"window is {window}.*the least is 1"):
        causal_mask(jnp.arange(3), jnp.arange(3), window)
