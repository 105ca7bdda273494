"""The decoder against one written in numpy float64, and against itself: in chunks, with ragged rows, in every dtype."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import gqa_jax
from gqa_jax import decoder
from gqa_jax.cache import init_cache, rewind
from gqa_jax.config import Attention, Config, LinearScaling, Rope
from gqa_jax.sharding import make_mesh
from tests import oracles

PLAIN = Config(
    vocab_size=101,
    num_layers=2,
    model_dim=24,
    mlp_dim=37,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    context_length=2048,
    attention=(Attention(window=5), Attention()),
)
NORMED = dataclasses.replace(
    PLAIN,
    num_kv_heads=1,
    attention=tuple(
        Attention(Rope(base), window, scale=0.4, softcap=3.0, sinks=window != 7)
        for base, window in ((1e4, 2), (1e6, None), (1e4, 7), (1e4, 3))
    ),
    activation="gelu_tanh",
    norm_eps=1e-2,
    qk_norm=True,
    post_norms=True,
    embedding_scale=24**0.5,
    logit_softcap=2.0,
)
BIASED = dataclasses.replace(
    PLAIN,
    num_layers=3,
    num_kv_heads=6,
    attention=(Attention(Rope(interleaved=True)), Attention(None, window=4), Attention(Rope(1e5, LinearScaling(4.0)))),
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tied_head=False,
)
CONFIGS = {
    "grouped": PLAIN,
    "a pattern shorter than the layers": dataclasses.replace(PLAIN, num_layers=3),
    "normed, one KV head, a pattern longer than the layers": NORMED,
    "biased, untied, a KV head for each query head": BIASED,
    "9 over 3": dataclasses.replace(PLAIN, num_heads=9, num_kv_heads=3, num_layers=1),
    "71 over 1": dataclasses.replace(PLAIN, num_heads=71, num_kv_heads=1, head_dim=4, num_layers=1),
    "everything": dataclasses.replace(NORMED, num_kv_heads=2, qkv_bias=True, out_bias=True, mlp_bias=True, tied_head=False),
}

configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
forward = jax.jit(decoder.forward, static_argnames="config")


pytestmark = pytest.mark.usefixtures("quick_compilation")


def weights(config: Config, dtype: str = "float32") -> decoder.Params:
    """Random everywhere, norms and biases too, so that none can be left out unseen."""
    rng = np.random.default_rng(1)
    dtype = getattr(ml_dtypes, dtype, dtype)

    def make(path, leaf):
        name = path[-1].key
        size = 0.3 if name.endswith(("norm", "bias", "sinks")) else (leaf.shape[-1] if name.endswith("down") else 24) ** -0.5
        return (float(name.endswith("norm")) + size * rng.normal(size=leaf.shape)).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(make, decoder.param_shapes(config, dtype))


def ids(rows: int, length: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, PLAIN.vocab_size, (rows, length)).astype(np.int32)


def close(got, want, tolerance: float = 5e-5) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=tolerance, atol=tolerance)


def in_chunks(params, tokens, cache, config, sizes):
    made, start = [], 0
    for size in sizes:
        logits, cache = forward(params, tokens[:, start : start + size], cache, config=config)
        made.append(logits)
        start += size
    return np.concatenate(made, axis=1), cache


# The list of weights


@configs
def test_shapes_and_weights_follow_the_list_of_axes(config):
    axes, shapes = decoder.param_axes(config), decoder.param_shapes(config, jnp.bfloat16)
    params = jax.eval_shape(lambda key: decoder.init_params(config, key, jnp.bfloat16), jax.random.key(0))
    sizes = decoder.axis_sizes(config)
    assert jax.tree.structure(axes) == jax.tree.structure(shapes) == jax.tree.structure(params)
    assert len(axes["layers"]) == config.num_layers

    def check(path, letters, shape, made):
        assert shape.shape == made.shape == tuple(sizes[letter] for letter in letters.split())
        assert shape.dtype == made.dtype == (jnp.float32 if path[-1].key.endswith("norm") else jnp.bfloat16)

    jax.tree_util.tree_map_with_path(check, axes, shapes, params)


@pytest.mark.parametrize(
    ("changes", "layer", "top"),
    [
        ({}, set(), set()),
        ({"qk_norm": True}, {"attention.q_norm", "attention.k_norm"}, set()),
        ({"post_norms": True}, {"attention.post_norm", "mlp.post_norm"}, set()),
        ({"qkv_bias": True}, {"attention.q_bias", "attention.k_bias", "attention.v_bias"}, set()),
        ({"out_bias": True}, {"attention.o_bias"}, set()),
        ({"mlp_bias": True}, {"mlp.gate_bias", "mlp.up_bias", "mlp.down_bias"}, set()),
        ({"tied_head": False}, set(), {"head"}),
    ],
)
def test_an_option_brings_its_own_weights_and_no_others(changes, layer, top):
    plain, axes = decoder.param_axes(PLAIN), decoder.param_axes(dataclasses.replace(PLAIN, **changes))
    assert axes.keys() - plain.keys() == top
    for mine, theirs in zip(axes["layers"], plain["layers"], strict=True):
        assert mine.keys() - theirs.keys() == layer
        assert theirs.items() <= mine.items()


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (Config(49152, 30, 576, 1536, 9, 3, 64, 8192), 134_515_008),
        (Config(262_144, 18, 640, 2048, 4, 1, 256, 32_768, qk_norm=True, post_norms=True), 268_098_176),
    ],
    ids=["SmolLM2-135M", "Gemma 3 270M"],
)
def test_known_models_have_as_many_weights_as_they_are_known_for(config, count):
    assert sum(leaf.size for leaf in jax.tree.leaves(decoder.param_shapes(config))) == count


def test_new_weights_are_ones_zeros_and_normal_by_what_they_read():
    config = dataclasses.replace(CONFIGS["everything"], model_dim=257, mlp_dim=509)
    params = decoder.init_params(config, jax.random.key(7))
    reads = {"attention.o": 60, "mlp.down": 509}
    seen = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name, values = path[-1].key, np.asarray(leaf)
        if name.endswith("norm"):
            assert (values == 1).all()
        elif name.endswith(("bias", "sinks")):
            assert (values == 0).all()
        else:
            assert values.std() * reads.get(name, 257) ** 0.5 == pytest.approx(1, abs=0.05)
            seen.add(values.ravel()[:3].tobytes())
    assert len(seen) == 2 + 7 * config.num_layers


# One pass


@configs
def test_logits_equal_those_of_a_float64_decoder(config):
    params, tokens = weights(config), ids(2, 11)
    logits, cache = forward(params, tokens, None, config=config)
    assert cache is None
    assert logits.dtype == jnp.float32
    close(logits, oracles.forward(params, tokens, config))


@pytest.mark.parametrize(("B", "T"), [(1, 1), (1, 5), (3, 1)])
@pytest.mark.parametrize("cached", [False, True])
def test_axes_of_length_one_are_kept(B, T, cached):
    params, tokens = weights(PLAIN), ids(B, T)
    cache = init_cache(PLAIN, B, 7) if cached else None
    logits, cache = forward(params, tokens, cache, config=PLAIN)
    assert logits.shape == (B, T, 101)
    close(logits, oracles.forward(params, tokens, PLAIN))
    if cached:
        assert {x.shape for x in (*cache.k, *cache.v)} == {(B, 2, 7, 10), (B, 2, 5, 10)}
        assert cache.length.shape == (B,)


def test_it_is_the_same_without_jit():
    params, tokens = jax.tree.map(jnp.asarray, weights(PLAIN)), jnp.asarray(ids(2, 3))
    logits, cache = decoder.forward(params, tokens, init_cache(PLAIN, 2, 3), PLAIN)
    close(logits, oracles.forward(params, tokens, PLAIN))
    assert cache.length.tolist() == [3, 3]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("id", [-1, -101, 101, 2**31 - 1])
def test_an_id_outside_the_vocabulary_gives_nan_in_its_own_row_alone(id, cached):
    params, tokens = weights(PLAIN), ids(3, 5)
    clean = oracles.forward(params, tokens, PLAIN)
    tokens[1, 3] = id
    logits, _ = forward(params, tokens, init_cache(PLAIN, 3, 7) if cached else None, config=PLAIN)
    assert np.isnan(logits[1, 3:]).all()
    close(logits[::2], clean[::2])


# Many passes


@pytest.mark.parametrize(
    "sizes",
    [(11,), (1,) * 11, (7, 4), (4, 7), (3, 1, 7), (1, 3, 7), (4, 3, 4), (7, 1, 3), (3, 4, 1, 3), (1, 7, 1, 1, 1)],
    ids=str,
)
@pytest.mark.parametrize("config", [PLAIN, NORMED], ids=["grouped", "normed"])
def test_any_split_into_chunks_gives_the_logits_of_one_pass(config, sizes):
    params, tokens = weights(config), ids(2, 11)
    logits, cache = in_chunks(params, tokens, init_cache(config, 2, 13), config, sizes)
    close(logits, in_one_pass(config))
    assert cache.length.tolist() == [11, 11]


@functools.cache
def in_one_pass(config):
    return oracles.forward(weights(config), ids(2, 11), config)


def test_chunks_longer_than_a_block_of_slots_change_nothing():
    config = dataclasses.replace(PLAIN, num_layers=2, attention=(Attention(window=600), Attention()))
    params, tokens = weights(config), ids(2, 1033)
    want, _ = forward(params, tokens, None, config=config)
    logits, cache = in_chunks(params, tokens, init_cache(config, 2, 1033), config, (515, 515, 1, 1, 1))
    close(logits, want)
    assert not cache.overflowed.any()


@pytest.mark.parametrize("tp", [None, 2])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32"])
def test_ids_of_any_integer_dtype_mean_the_same(dtype, tp):
    config = dataclasses.replace(PLAIN, vocab_size=300)
    params, tokens = weights(config), np.array([[3, 44, 45, 200, 255]])
    want = oracles.forward(params, tokens, config)
    placed = params if tp is None else decoder.place(params, config, make_mesh(config, tp=tp))
    logits, _ = forward(placed, tokens.astype(dtype), None, config=config)
    close(logits, want)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        ([5, 1, 2], "count goes from 1 to 5; of 3 tokens a row keeps from 0 to 3"),
        ([1, -1, 2], "count goes from -1 to 2"),
        ([1, 2], r"count has shape \(2,\).*one integer for each of 3 rows"),
        ([1.0, 2.0, 3.0], "dtype float32"),
    ],
)
def test_counts_that_cannot_be_are_refused(count, words, unchecked):
    with pytest.raises(ValueError, match=words):
        decoder.forward(
            weights(PLAIN),
            ids(3, 3),
            init_cache(PLAIN, 3, 7),
            PLAIN,
            np.array(count, np.int32 if isinstance(count[0], int) else np.float32),
        )


def test_counted_tokens_that_do_not_fit_are_refused_on_the_host():
    params, tokens = jax.tree.map(jnp.asarray, weights(PLAIN)), jnp.asarray(ids(2, 3))
    _, cache = decoder.forward(params, tokens, init_cache(PLAIN, 2, 4), PLAIN)
    with pytest.raises(ValueError, match=r"2 new tokens do not fit.*already holds 3 of its 4 slots"):
        decoder.forward(params, tokens, cache, PLAIN, jnp.array([1, 2]))
    _, cache = decoder.forward(params, tokens, cache, PLAIN, jnp.array([1, 0]))
    assert cache.length.tolist() == [4, 3]


@pytest.mark.parametrize("rings", [False, True])
def test_rows_of_different_length_equal_each_row_alone(rings):
    params, texts = weights(PLAIN), ids(3, 10)
    lengths = np.array([3, 7, 5])
    padded = np.where(np.arange(7) < lengths[:, None], texts[:, :7], 99)
    cache = init_cache(PLAIN, 3, 11, rings=rings)
    if rings:
        logits, cache = forward(params, padded, cache, config=PLAIN, count=lengths)
    else:
        logits, cache = forward(params, padded, cache, config=PLAIN)
        cache = rewind(cache, jnp.asarray(lengths))
    assert cache.length.tolist() == lengths.tolist()
    alone = [oracles.forward(params, text[None, : length + 3], PLAIN)[0] for text, length in zip(texts, lengths, strict=True)]
    for step in range(4):
        last = np.asarray(logits)[np.arange(3), lengths - 1] if step == 0 else np.asarray(logits)[:, 0]
        close(last, [row[length + step - 1] for row, length in zip(alone, lengths, strict=True)])
        if step < 3:
            following = texts[np.arange(3), lengths + step][:, None]
            logits, cache = forward(params, following, cache, config=PLAIN)
    assert cache.length.tolist() == (lengths + 3).tolist()


@pytest.mark.parametrize(("window", "size"), [(1, 4), (3, 4), (5, 1), (7, 17), (2, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rings_give_what_whole_caches_give_whatever_each_row_gains(window, size, dtype):
    config = dataclasses.replace(PLAIN, attention=(Attention(window=window), Attention()))
    params, texts, rng = weights(config), ids(3, 17), np.random.default_rng(window)
    ring, whole = (init_cache(config, 3, 17, dtype, rings=rings) for rings in (True, False))
    ring = dataclasses.replace(ring, k=tuple(x * jnp.nan for x in ring.k), v=tuple(x * jnp.nan for x in ring.v))
    want = oracles.forward(params, texts, config, round_kv=lambda x: oracles.rounded(x, dtype))
    at = np.zeros(3, int)
    while at.min() < 17:
        count = np.minimum(17 - at, rng.integers(0, size + 1, 3)).astype(np.int32)
        piece = np.zeros((3, size), np.int32)
        for row in range(3):
            piece[row, : count[row]] = texts[row, at[row] : at[row] + count[row]]
        (got, ring), (same, whole) = (forward(params, piece, cache, config=config, count=count) for cache in (ring, whole))
        for row in range(3):
            made = np.asarray(got)[row, : count[row]]
            close(made, np.asarray(same)[row, : count[row]])
            close(made, want[row, at[row] : at[row] + count[row]], 5e-5 if dtype == "float32" else 2e-2)
        at += count
    assert ring.k[0].shape == (3, 2, window, 10)
    assert ring.length.tolist() == whole.length.tolist() == [17] * 3
    assert not ring.overflowed.any()


@pytest.mark.parametrize("junk", [np.nan, 1e30])
def test_what_lies_in_empty_slots_changes_no_bit(junk):
    params, tokens = weights(NORMED), ids(2, 11)
    fresh = init_cache(NORMED, 2, 13)
    fill = functools.partial(jax.tree.map, lambda x: jnp.full_like(x, junk))
    dirty = dataclasses.replace(fresh, k=fill(fresh.k), v=fill(fresh.v))
    want, _ = in_chunks(params, tokens, fresh, NORMED, (7, 1, 3))
    got, _ = in_chunks(params, tokens, dirty, NORMED, (7, 1, 3))
    np.testing.assert_array_equal(got, want)


def test_a_cache_used_again_for_a_shorter_text_is_as_good_as_new():
    params = weights(PLAIN)
    _, used = in_chunks(params, ids(2, 11), init_cache(PLAIN, 2, 13, rings=False), PLAIN, (11,))
    shorter = ids(2, 4, seed=3)
    got, _ = in_chunks(params, shorter, rewind(used, jnp.zeros(2, jnp.int32)), PLAIN, (3, 1))
    want, _ = in_chunks(params, shorter, init_cache(PLAIN, 2, 13, rings=False), PLAIN, (3, 1))
    np.testing.assert_array_equal(got, want)


def test_going_on_from_a_common_beginning_equals_reading_it_again():
    params, first, second = weights(PLAIN), ids(2, 11), ids(2, 11, seed=3)
    second[:, :7] = first[:, :7]
    _, cache = in_chunks(params, first, init_cache(PLAIN, 2, 13, rings=False), PLAIN, (7, 4))
    got, _ = in_chunks(params, second[:, 7:], rewind(cache, jnp.array([7, 7])), PLAIN, (4,))
    close(got, oracles.forward(params, second, PLAIN)[:, 7:])


def test_decoding_compiles_once():
    once = jax.jit(chex.assert_max_traces(decoder.forward, n=1), static_argnames="config")
    params, tokens = weights(PLAIN), ids(2, 11)
    for prompt in (3, 7):
        _, cache = forward(params, tokens[:, :prompt], init_cache(PLAIN, 2, 13), config=PLAIN)
        for at in range(prompt, 11):
            logits, cache = once(params, tokens[:, at : at + 1], cache, config=dataclasses.replace(PLAIN))
        close(logits[:, 0], oracles.forward(params, tokens, PLAIN)[:, -1])


# Gradients


def loss(logits, tokens):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
    return -chosen.mean()


@pytest.mark.parametrize("name", ["everything", "grouped"])
def test_every_weight_has_a_finite_gradient_that_is_not_zero(name):
    config = CONFIGS[name]
    tokens = jnp.asarray(ids(2, 11))
    gradient = jax.jit(jax.grad(lambda params: loss(decoder.forward(params, tokens, None, config)[0], tokens)))(weights(config))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.isfinite(leaf).all(), path
        assert abs(np.asarray(leaf)).max() > 1e-7, path


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("config", [PLAIN, NORMED], ids=["grouped, window", "one KV head, window, softcap, sinks, norms"])
def test_gradients_equal_finite_differences_in_float64(config, remat):
    params, tokens = weights(config), jnp.asarray(ids(2, 7))

    def exact(params):
        logits = oracles.forward(params, tokens, config)[:, :-1]
        shifted = logits - logits.max(-1, keepdims=True)
        chances = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        return -np.take_along_axis(chances, tokens[:, 1:, None], axis=-1).mean()

    def ours(params):
        return loss(decoder.forward(params, tokens, None, config, remat=remat)[0], tokens)

    gradient = jax.jit(jax.grad(ours))(params)
    rng, step = np.random.default_rng(4), 1e-4
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape), params)

    def moved(far):
        return jax.tree.map(lambda x, d: x + far * d, params, direction)

    slope = (exact(moved(step)) - exact(moved(-step))) / (2 * step)
    along = sum(
        (np.asarray(g, np.float64) * d).sum() for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True)
    )
    assert along == pytest.approx(slope, rel=1e-3)


@pytest.mark.parametrize("tp", [None, 2])
def test_gradients_are_the_same_with_every_layer_computed_anew(tp):
    tokens, placement = jnp.asarray(ids(2, 9)), None if tp is None else make_mesh(NORMED, tp=tp)
    params = weights(NORMED) if placement is None else decoder.place(weights(NORMED), NORMED, placement)

    def gradient(remat):
        def ours(params):
            return loss(decoder.forward(params, tokens, None, NORMED, remat=remat)[0], tokens)

        return jax.jit(jax.grad(ours))(params)

    chex.assert_trees_all_close(gradient(True), gradient(False), rtol=1e-5, atol=1e-6)


def test_a_cache_written_in_layers_that_are_computed_anew_is_the_same():
    params, tokens = weights(PLAIN), jnp.asarray(ids(2, 9))

    def twice(params, remat):
        logits, cache = decoder.forward(params, tokens[:, :6], init_cache(PLAIN, 2, 11), PLAIN, remat=remat)
        more, cache = decoder.forward(params, tokens[:, 6:], cache, PLAIN, remat=remat)
        return loss(jnp.concatenate([logits, more], axis=1), tokens), cache

    run = jax.jit(jax.value_and_grad(twice, has_aux=True), static_argnums=1)
    chex.assert_trees_all_close(run(params, True), run(params, False), rtol=1e-5, atol=1e-6)


def test_gradients_through_a_cache_equal_those_of_one_pass():
    params, tokens = jax.tree.map(jnp.asarray, weights(PLAIN)), jnp.asarray(ids(2, 9))

    def in_steps(params):
        cache, made = init_cache(PLAIN, 2, 11), []
        for start, end in ((0, 7), (7, 8), (8, 9)):
            logits, cache = decoder.forward(params, tokens[:, start:end], cache, PLAIN)
            made.append(logits)
        return loss(jnp.concatenate(made, axis=1), tokens)

    def at_once(params):
        return loss(decoder.forward(params, tokens, None, PLAIN)[0], tokens)

    got, want = (jax.jit(jax.grad(f))(params) for f in (in_steps, at_once))
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


# Several texts in one row


@pytest.mark.parametrize("tp", [None, 2])
@pytest.mark.parametrize("config", [PLAIN, NORMED], ids=["grouped", "normed"])
def test_texts_that_share_a_row_know_nothing_of_each_other(config, tp):
    params, lengths = weights(config), (5, 1, 4, 3)
    placed = params if tp is None else decoder.place(params, config, make_mesh(config, tp=tp))
    tokens = ids(2, sum(lengths))
    segments = jnp.asarray([np.repeat([7, 0, 7, 3], lengths), np.repeat([1, 2, 3, 4], lengths)], jnp.int32)
    got = jax.jit(decoder.forward, static_argnames="config")(placed, tokens, None, config=config, segments=segments)[0]
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        close(got[:, part], oracles.forward(params, tokens[:, part], config))
        start += length


def test_segments_that_cannot_be_are_refused(unchecked):
    params, tokens = weights(PLAIN), ids(2, 5)
    with pytest.raises(ValueError, match="leave one of them out"):
        decoder.forward(params, tokens, init_cache(PLAIN, 2, 5), PLAIN, segments=jnp.zeros((2, 5), jnp.int32))
    for bad in (jnp.zeros((2, 4), jnp.int32), jnp.zeros((2, 5))):
        with pytest.raises(ValueError, match="one integer for each of the tokens"):
            decoder.forward(params, tokens, None, PLAIN, segments=bad)


# Dtypes


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1e-1), ("float16", 2e-2)])
@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "float16"])
def test_narrow_weights_go_with_every_cache(dtype, tolerance, cache_dtype):
    config = dataclasses.replace(CONFIGS["everything"], num_layers=1)
    params, tokens = weights(config, dtype), ids(2, 8)
    logits, cache = in_chunks(params, tokens, init_cache(config, 2, 11, cache_dtype), config, (4, 4))
    assert logits.dtype == np.float32
    assert {x.dtype.name for x in (*cache.k, *cache.v)} == {cache_dtype}
    close(logits, oracles.forward(params, tokens, config), tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_hidden_states_keep_the_dtype_of_the_weights(dtype):
    shapes = jax.eval_shape(
        lambda params: decoder.hidden_states(params, jnp.zeros((2, 3), jnp.int32), None, NORMED)[0],
        decoder.param_shapes(NORMED, dtype),
    )
    assert (shapes.shape, shapes.dtype.name) == ((2, 3, 24), dtype)


def test_a_cache_that_keeps_less_than_the_config_sees_is_refused():
    cache = init_cache(PLAIN, 2, 11)
    for window, sees in ((None, "all"), (7, "7")):
        config = dataclasses.replace(PLAIN, attention=(Attention(window=window), Attention()))
        with pytest.raises(ValueError, match=f"keeps the last 5 tokens in layer 0; the config sees {sees}"):
            decoder.forward(weights(config), jnp.asarray(ids(2, 3)), cache, config)


def test_what_does_not_belong_together_is_refused(unchecked):
    sizes = {"vocab_size": 11, "model_dim": 12, "mlp_dim": 10, "num_kv_heads": 2, "head_dim": 4, "context_length": 16}
    config = gqa_jax.Config(num_layers=2, num_heads=6, **sizes)
    params = gqa_jax.init_params(config, jax.random.key(0))
    tokens = jnp.ones((3, 4), jnp.int32)
    with pytest.raises(ValueError, match=r"\(layers, K, G, H\) = \(2, 2, 3, 4\), the config \(3, 2, 3, 4\)"):
        gqa_jax.forward(params, tokens, None, gqa_jax.Config(num_layers=3, num_heads=6, **sizes))
    with pytest.raises(ValueError, match=r"= \(2, 2, 3, 4\), the config \(2, 2, 1, 4\)"):
        gqa_jax.forward(params, tokens, None, gqa_jax.Config(num_layers=2, num_heads=2, **sizes))
    with pytest.raises(ValueError, match=r"KV heads, width\) = \(2, 2, 2, 4\); the config and what is new have \(2, 3, 2, 4\)"):
        gqa_jax.forward(params, tokens, gqa_jax.init_cache(config, 2, 8), config)
    with pytest.raises(ValueError, match=r"tokens have shape \(4,\)"):
        gqa_jax.forward(params, tokens[0], None, config)
    with pytest.raises(ValueError, match="dtype float32; they must be integers"):
        gqa_jax.forward(params, tokens.astype(jnp.float32), None, config)
