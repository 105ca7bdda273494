"""Rotary embedding against turns of complex numbers in float64, far along the text too."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gqa_jax.config import Attention, DivisorScaling, LinearScaling, Llama3Scaling, Rope
from gqa_jax.rope import angles, frequencies, rotate
from tests import oracles

LLAMA3 = Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
LLAMA3_DIVISORS = [1.0] * 15 + [1.6513, 3.2923, 9.6667] + [32.0] * 14

jitted = pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])


def turned(x, positions, rope: Rope):
    """x (B, T, heads, H) at positions (B, T), by way of the head-major order of the decoder."""
    turn = angles(rope, x.shape[-1], positions)[:, None]
    return rotate(x.swapaxes(1, 2), turn, interleaved=rope.interleaved).swapaxes(1, 2)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype(getattr(ml_dtypes, dtype, dtype))


@pytest.mark.parametrize(("base", "head_dim"), [(1e4, 10), (1e5, 64), (1e6, 256), (5e5, 2)])
def test_frequencies_fall_from_one_by_powers_of_the_base(base, head_dim):
    got = frequencies(Rope(base), head_dim)
    assert got.dtype == np.float32
    assert got.shape == (head_dim // 2,)
    np.testing.assert_allclose(got, [base ** (-2 * i / head_dim) for i in range(head_dim // 2)], rtol=1e-6)


@jitted
@pytest.mark.parametrize(
    ("interleaved", "scaling", "divide"),
    [(False, None, 1.0), (True, None, 1.0), (False, LinearScaling(8.0), 8.0), (True, LinearScaling(8.0), 8.0)],
)
def test_it_turns_pairs_as_complex_numbers_turn(interleaved, scaling, divide, jitted):
    rope = Rope(1e5, scaling, interleaved)
    x, positions = normal(2, 7, 3, 10), np.array([[0, 1, 2, 3, 4, 5, 6], [9, 800, 3, 3, 51, 7, 0]], np.int32)
    run = jax.jit(turned, static_argnums=2) if jitted else turned
    got = run(jnp.asarray(x), jnp.asarray(positions), rope)
    want = oracles.rope(x, positions, 1e5, interleaved=interleaved, divide=divide)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("interleaved", "want"), [(False, [0.5403, 0, 0.8415, 0]), (True, [0.5403, 0.8415, 0, 0])])
def test_lanes_pair_across_the_halves_or_side_by_side(interleaved, want):
    turn = angles(Rope(), 4, jnp.array([1]))
    got = rotate(jnp.array([[1.0, 0.0, 0.0, 0.0]]), turn, interleaved=interleaved)
    np.testing.assert_allclose(got, [want], atol=1e-4)


@pytest.mark.parametrize("position", [5, 4095])
def test_the_two_pairings_differ_by_an_order_of_lanes(position):
    x, turn = normal(3, 1, 10), angles(Rope(), 10, jnp.array([position]))
    order = np.arange(10).reshape(5, 2).T.reshape(-1)
    side_by_side = np.asarray(rotate(jnp.asarray(x), turn, interleaved=True))
    np.testing.assert_array_equal(side_by_side[..., order], rotate(jnp.asarray(x[..., order]), turn))
    assert abs(side_by_side - np.asarray(rotate(jnp.asarray(x), turn))).max() > 0.1


@pytest.mark.parametrize("position", [257, 4095, 8191])
@pytest.mark.parametrize("base", [1e4, 1e6])
def test_angles_stay_exact_far_along_the_text(position, base):
    turn = np.asarray(angles(Rope(base), 128, jnp.array([position])), np.float64)
    exact = position * base ** (-np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(np.cos(turn[0]), np.cos(exact), atol=1e-3)
    np.testing.assert_allclose(np.sin(turn[0]), np.sin(exact), atol=1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("float16", 4e-3), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("position", [257, 4095, 8191])
@pytest.mark.parametrize("interleaved", [False, True])
def test_only_the_result_is_rounded_to_the_dtype_of_the_model(dtype, tolerance, position, interleaved):
    x = normal(1, 1, 3, 128, dtype=dtype)
    got = turned(jnp.asarray(x), jnp.array([[position]]), Rope(interleaved=interleaved))
    assert got.dtype == x.dtype
    want = oracles.rope(x.astype(np.float64), [[position]], interleaved=interleaved)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=tolerance)


def test_scores_depend_on_distance_alone():
    q, k = normal(2, 1, 1, 1, 32)
    scores = [
        (turned(jnp.asarray(q), jnp.array([[at + 13]]), Rope()) * turned(jnp.asarray(k), jnp.array([[at]]), Rope())).sum()
        for at in (0, 5, 911)
    ]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-4)
    nearer = (turned(jnp.asarray(q), jnp.array([[12]]), Rope()) * k).sum()
    assert abs(nearer - scores[0]) > 1e-2


def test_turning_back_gives_what_was_there():
    x = normal(2, 7, 3, 10)
    there = turned(jnp.asarray(x), jnp.full((2, 7), 29), Rope())
    np.testing.assert_allclose(turned(there, jnp.full((2, 7), -29), Rope()), x, atol=1e-5)


def test_linear_scaling_reads_position_eight_as_two_of_four():
    x = jnp.asarray(normal(1, 1, 3, 10))
    scaled = turned(x, jnp.array([[8]]), Rope(scaling=LinearScaling(4.0)))
    np.testing.assert_allclose(scaled, turned(x, jnp.array([[2]]), Rope()), atol=1e-6)


def test_llama3_scaling_divides_long_waves_and_keeps_short_ones():
    plain, scaled = (frequencies(Rope(5e5, scaling), 64).astype(np.float64) for scaling in (None, LLAMA3))
    np.testing.assert_allclose(plain / scaled, LLAMA3_DIVISORS, rtol=1e-4)
    np.testing.assert_allclose(scaled[[15, 18]], [1.290548e-03, 1.946164e-05], rtol=1e-6)


def test_divisors_say_the_same_as_the_scaling_that_they_stand_for():
    plain, scaled = (frequencies(Rope(5e5, scaling), 64).astype(np.float64) for scaling in (None, LLAMA3))
    given = frequencies(Rope(5e5, DivisorScaling(tuple(plain / scaled))), 64)
    np.testing.assert_allclose(given, scaled, rtol=1e-6)


@pytest.mark.parametrize("count", [1, 31, 33])
def test_divisors_that_are_not_one_a_pair_are_refused(count):
    with pytest.raises(ValueError, match=f"{count} rotary divisors for 32 pairs"):
        frequencies(Rope(scaling=DivisorScaling((2.0,) * count)), 64)


def test_an_unknown_scaling_is_refused(unchecked):
    with pytest.raises(TypeError, match=r"window=5.* is no known scaling"):
        frequencies(Rope(scaling=Attention(window=5)), 64)
