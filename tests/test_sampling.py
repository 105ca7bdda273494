"""The draw of a token: edges of every filter, and frequencies against the probabilities they should have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gqa_jax.sampling import penalise, sample, sampling


def draws(logits, count=4000, **how):
    """Draws `count` times from one row of logits and returns how often each token came."""
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
    keys = jax.random.split(jax.random.key(7), count)
    tokens = jax.jit(sample)(rows, keys, sampling(count, **how))
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / count


def kept(probabilities, **how):
    """Returns which tokens ever come."""
    return set(np.flatnonzero(draws(np.log(probabilities), temperature=1.0, **how)).tolist())


def test_temperature_zero_takes_the_likeliest_beside_a_row_that_draws():
    logits = jnp.array([[1.0, 3.0, 2.0]] * 2)
    how = sampling(2, temperature=[0.0, 1.0])
    with jax.debug_nans(True):
        tokens = jax.vmap(lambda key: sample(logits, jax.random.split(key), how))(jax.random.split(jax.random.key(0), 3000))
    assert (tokens[:, 0] == 1).all()
    frequencies = np.bincount(np.asarray(tokens[:, 1]), minlength=3) / 3000
    np.testing.assert_allclose(frequencies, [0.0900, 0.6652, 0.2447], atol=0.03)


@pytest.mark.parametrize("temperature", [1e-9, 1e-30, 1e-38, 0.0])
def test_a_temperature_near_zero_takes_the_likeliest_without_nan(temperature):
    with jax.debug_nans(True):
        assert draws([1.0, 3.0, 2.0], count=50, temperature=temperature)[1] == 1


@pytest.mark.parametrize(
    ("probabilities", "top_p", "expected"),
    [
        ([0.4, 0.3, 0.2, 0.1], 0.8, {0, 1, 2}),
        ([0.5, 0.25, 0.15625, 0.09375], 0.75, {0, 1}),
        ([0.5, 0.25, 0.15625, 0.09375], 0.76, {0, 1, 2}),
        ([0.5, 0.25, 0.15625, 0.09375], 1.0, {0, 1, 2, 3}),
        ([0.5, 0.25, 0.15625, 0.09375], 1e-8, {0}),
        ([0.5, 0.25, 0.15625, 0.09375], 0.0, {0}),
        ([0.1, 0.2, 0.4, 0.3], 0.6, {2, 3}),
    ],
)
def test_top_p_keeps_a_token_while_likelier_ones_hold_less_than_p(probabilities, top_p, expected):
    assert kept(probabilities, top_p=top_p) == expected


def test_top_p_of_one_keeps_the_rarest_of_many_bfloat16_logits():
    logits = jnp.zeros((4096,), jnp.bfloat16)
    tokens = jax.vmap(lambda key: sample(logits[None], key[None], sampling(1, temperature=1.0, top_p=1.0, min_p=1e-9))[0])(
        jax.random.split(jax.random.key(0), 4096)
    )
    assert len(set(np.asarray(tokens).tolist())) > 2300
    assert int(tokens.max()) > 4000


def test_top_k_and_min_p_keep_what_they_say():
    probabilities = [0.1, 0.4, 0.2, 0.3]
    assert kept(probabilities, top_k=2) == {1, 3}
    assert kept(probabilities, top_k=9) == {0, 1, 2, 3}
    assert kept(probabilities, min_p=0.5) == {1, 2, 3}
    assert kept(probabilities, min_p=1.0) == {1}


def test_top_p_counts_only_what_top_k_has_kept():
    # Of the two likeliest, the first holds 4/7 of the mass: more than a half, so it stays alone.
    assert kept([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.5) == {0}


def test_filters_leave_the_proportions_of_what_stays():
    np.testing.assert_allclose(draws(np.log([0.1, 0.4, 0.2, 0.3]), temperature=1.0, top_k=2), [0, 4 / 7, 0, 3 / 7], atol=0.03)


def test_temperature_sharpens_before_the_filters():
    logits = np.log([0.5, 0.3, 0.2])
    sharp = np.array([0.25, 0.09, 0.04]) / 0.38
    np.testing.assert_allclose(draws(logits, temperature=0.5), sharp, atol=0.03)
    assert kept([0.5, 0.3, 0.2], top_p=0.6) == {0, 1}
    assert set(np.flatnonzero(draws(logits, temperature=0.5, top_p=0.6))) == {0}


def test_a_hidden_token_is_never_drawn():
    assert draws([0.0, -np.inf, 0.0], temperature=5.0, top_p=0.99)[1] == 0


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    how = sampling(1, repetition_penalty=1.5)
    logits = jnp.array([[-1.0, 2.0, 2.0, -1.0]])
    seen = jnp.array([[True, True, False, False]])
    np.testing.assert_allclose(penalise(logits, seen, how), [[-1.5, 4 / 3, 2.0, -1.0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temperature": -0.5}, r"temperature is -0\.5; it must be at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": [0.5, 1.0, 1.5]}, r"temperature has shape \(3,\).*each of the 2 rows"),
        ({"top_p": 1.5}, r"top_p is 1\.5; it must be from 0 to 1"),
        ({"top_p": [0.5, -0.1]}, r"top_p is -0\.1"),
        ({"min_p": 2}, "min_p is 2"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
    ],
)
def test_numbers_outside_their_range_are_refused(unchecked, how, message):
    with pytest.raises(ValueError, match=message):
        sampling(2, **how)


def test_only_what_is_needed_is_compiled_in():
    assert not sampling(2).draws
    assert not sampling(2, top_k=3).filters
    assert sampling(2, temperature=1.0).draws
    assert not sampling(2, temperature=1.0).filters
    assert sampling(2, temperature=[0, 1.0], min_p=0.1).filters
    assert sampling(2, repetition_penalty=[1.0, 1.2]).penalises
