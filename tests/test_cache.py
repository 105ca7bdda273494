"""The cache: what is written stays where it belongs, whatever the rows' lengths, the dtype, the loop and the room left."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gqa_jax import decoder
from gqa_jax.cache import KVCache, advance, check_room, grow, init_cache, put, rewind, write
from gqa_jax.config import Attention, Config
from tests import oracles

CONFIG = Config(
    vocab_size=101,
    num_layers=2,
    model_dim=24,
    mlp_dim=37,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    context_length=131,
    attention=(Attention(window=5), Attention()),
)
K, H = CONFIG.num_kv_heads, CONFIG.head_dim
DTYPES = ["float32", "bfloat16", "float16"]

jitted = pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])


# Every token stays, whatever the windows.
empty_cache = functools.partial(init_cache, rings=False)

pytestmark = pytest.mark.usefixtures("quick_compilation")


def new_tokens(rows: int, count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, K, count, H)).astype(np.float32)


def counting(rows: int, first: int, count: int = 1) -> jax.Array:
    """Tokens whose every number is their own count."""
    return jnp.asarray(np.broadcast_to(np.arange(first, first + count, dtype=np.float32)[:, None], (rows, K, count, H)))


def with_length(cache: KVCache, *length: int) -> KVCache:
    return dataclasses.replace(cache, length=jnp.asarray(length, jnp.int32))


def append(cache: KVCache, new: jax.Array) -> KVCache:
    for layer in range(len(cache.k)):
        cache = write(cache, layer, new, -new)
    return advance(cache, new.shape[2])


def held(cache: KVCache, row: int = 0) -> list[float]:
    """What `counting` left in each slot of a row, when all layers, heads and lanes agree."""
    slots = np.asarray(cache.k[0], np.float32)[row, 0, :, 0]
    for k, v in zip(cache.k, cache.v, strict=True):
        np.testing.assert_array_equal(k[row], np.broadcast_to(slots[:, None], (K, cache.capacity, H)))
        np.testing.assert_array_equal(v[row], -k[row])
    return slots.tolist()


# Making


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_new_cache_is_empty_and_has_a_buffer_for_each_layer(dtype):
    cache = empty_cache(CONFIG, 3, 7, dtype)
    leaves = (*cache.k, *cache.v)
    assert {(x.shape, x.dtype.name) for x in leaves} == {((3, K, 7, H), dtype)}
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == 2 * CONFIG.num_layers
    assert cache.length.tolist() == [0, 0, 0]
    assert cache.length.dtype == jnp.int32
    assert cache.capacity == 7
    assert cache.nbytes == sum(x.nbytes for x in leaves) == 2 * 2 * 3 * K * 7 * H * np.dtype(leaves[0].dtype).itemsize
    assert not cache.overflowed.any()


def test_a_token_of_smollm2_takes_23040_bytes():
    sizes = {"num_layers": 30, "model_dim": 576, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    assert empty_cache(dataclasses.replace(CONFIG, **sizes), 1, 1, jnp.bfloat16).nbytes == 23040


@pytest.mark.parametrize(
    ("batch", "capacity", "dtype", "words"),
    [
        (0, 7, "float32", "batch is 0; it must be at least 1"),
        (3, 0, "float32", "capacity is 0; it must be at least 1"),
        (3, -2, "float32", "capacity is -2"),
        (3, 7, "float64", "dtype is float64; it must be one of float32, bfloat16, float16"),
        (3, 7, "int8", "dtype is int8"),
    ],
)
def test_caches_that_hold_nothing_or_the_wrong_thing_are_refused(batch, capacity, dtype, words):
    with pytest.raises(ValueError, match=words):
        empty_cache(CONFIG, batch, capacity, dtype)


# Writing


@jitted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "capacity"), [(1, 11), (5, 11), (4, 9)])
def test_each_row_is_written_behind_its_own_length(count, capacity, dtype, jitted):
    old, new = new_tokens(3, capacity, seed=2), new_tokens(3, count)
    rounded = [x.astype(getattr(ml_dtypes, dtype, dtype)) for x in (old, new)]
    cache = empty_cache(CONFIG, 3, capacity, dtype)
    cache = dataclasses.replace(cache, k=(jnp.asarray(rounded[0]),) * 2, v=(jnp.asarray(-rounded[0]),) * 2)
    lengths = (0, 2, capacity - count)
    put = jax.jit(write, static_argnums=1) if jitted else write
    got = put(with_length(cache, *lengths), 1, jnp.asarray(new), jnp.asarray(-new))
    want = rounded[0].copy()
    for row, length in enumerate(lengths):
        want[row, :, length : length + count] = rounded[1][row]
    assert got.k[1].dtype == got.v[1].dtype == cache.k[1].dtype
    np.testing.assert_array_equal(got.k[1], want)
    np.testing.assert_array_equal(got.v[1], -want)
    np.testing.assert_array_equal(got.k[0], rounded[0])
    np.testing.assert_array_equal(got.v[0], -rounded[0])
    assert got.length.tolist() == list(lengths)


@jitted
def test_a_cache_of_one_slot_takes_one_token(jitted):
    cache = (jax.jit(append) if jitted else append)(empty_cache(CONFIG, 1, 1), counting(1, 7))
    assert held(cache) == [7.0]
    assert not cache.overflowed.any()


@jitted
@pytest.mark.parametrize("chunks", [(4,), (2, 2), (1, 1, 1, 1), (3, 1)])
def test_exactly_full_is_not_overflowed(chunks, jitted):
    cache, put, first = empty_cache(CONFIG, 2, 4), jax.jit(append) if jitted else append, 1
    for count in chunks:
        cache, first = put(cache, counting(2, first, count)), first + count
    assert held(cache, 0) == held(cache, 1) == [1.0, 2.0, 3.0, 4.0]
    assert cache.length.tolist() == [4, 4]
    assert cache.overflowed.tolist() == [False, False]


@pytest.mark.parametrize(("held", "count"), [(4, 1), (2, 3), (0, 6), (3, 2)])
def test_a_token_too_many_is_refused_with_both_numbers(held, count):
    cache = with_length(empty_cache(CONFIG, 2, 4), held, 0)
    words = rf"{count} new tokens do not fit: .* holds {held} of its 4 slots.*gqa_jax\.grow"
    with pytest.raises(ValueError, match=words):
        write(cache, 0, counting(2, 1, count), counting(2, 1, count))
    with pytest.raises(ValueError, match=words):
        check_room(cache, count)
    with pytest.raises(ValueError, match=words):
        decoder.forward(decoder.init_params(CONFIG, jax.random.key(0)), jnp.zeros((2, count), jnp.int32), cache, CONFIG)
    check_room(cache, 4 - held)


def test_the_sixth_token_in_four_slots_is_dropped_under_jit():
    cache, put = empty_cache(CONFIG, 1, 4), jax.jit(append)
    for token in range(1, 7):
        cache = put(cache, counting(1, token))
        assert cache.overflowed.tolist() == [token > 4]
    assert held(cache) == [1.0, 2.0, 3.0, 4.0]


def test_a_chunk_does_not_slide_back_over_what_a_row_holds_under_jit():
    put = jax.jit(append)
    cache = put(empty_cache(CONFIG, 3, 4), counting(3, 1, 2))
    cache = put(with_length(cache, 2, 1, 0), counting(3, 7, 3))
    assert held(cache, 0)[:2] == [1.0, 2.0]
    assert held(cache, 1) == [1.0, 7.0, 8.0, 9.0]
    assert held(cache, 2) == [7.0, 8.0, 9.0, 0.0]
    assert cache.overflowed.tolist() == [True, False, False]


def test_a_chunk_longer_than_the_cache_is_refused_even_under_jit():
    with pytest.raises(ValueError, match=r"6 new tokens do not fit: .* 4 slots"):
        jax.jit(append)(empty_cache(CONFIG, 1, 4), counting(1, 1, 6))


def test_the_flag_of_an_overflowed_row_survives_a_loop():
    def body(step, cache):
        return append(cache, jnp.broadcast_to((step + 1).astype(jnp.float32), (2, K, 1, H)))

    cache = jax.jit(lambda cache: jax.lax.fori_loop(0, 3, body, cache))(with_length(empty_cache(CONFIG, 2, 4), 2, 0))
    assert held(cache, 0) == [0.0, 0.0, 1.0, 2.0]
    assert held(cache, 1) == [1.0, 2.0, 3.0, 0.0]
    assert cache.overflowed.tolist() == [True, False]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((3, 1, 5, H), rf"\(3, 1, 5, {H}\).* takes \(3, 2, tokens, {H}\): 3 rows, 2 KV heads of width {H}"),
        ((3, 6, 5, H), r"\(3, 6, 5, 10\).*2 KV heads"),
        ((3, 2, 5, 9), r"\(3, 2, 5, 9\).*width 10"),
        ((1, 2, 5, H), r"\(1, 2, 5, 10\).*3 rows"),
    ],
)
@pytest.mark.parametrize("which", ["k", "v"])
def test_keys_and_values_of_another_shape_are_refused(unchecked, shape, words, which):
    good, bad = jnp.zeros((3, K, 5, H)), jnp.zeros(shape)
    with pytest.raises(ValueError, match=f"{which} has shape {words}"):
        write(empty_cache(CONFIG, 3, 7), 1, *((bad, good) if which == "k" else (good, bad)))


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_numbers_that_are_not_floating_point_are_refused(unchecked, dtype):
    good, bad = jnp.zeros((3, K, 5, H)), jnp.zeros((3, K, 5, H), dtype)
    with pytest.raises(TypeError, match=f"v has dtype {dtype}.*kept as bfloat16"):
        write(empty_cache(CONFIG, 3, 7, jnp.bfloat16), 0, good, bad)


# Forgetting and growing


@jitted
@pytest.mark.parametrize(
    ("to", "want"),
    [([3, 1, 0], [3, 1, 0]), ([9, 9, 9], [5, 4, 2]), ([-1, 4, -7], [0, 4, 0])],
    ids=["shorter", "longer changes nothing", "below nothing is nothing"],
)
def test_rewinding_forgets_the_end_of_each_row(to, want, jitted):
    cache = with_length(append(empty_cache(CONFIG, 3, 7), counting(3, 1, 5)), 5, 4, 2)
    got = (jax.jit(rewind) if jitted else rewind)(cache, jnp.array(to))
    assert got.length.tolist() == want
    assert got.length.dtype == jnp.int32
    assert held(got) == held(cache)


def test_what_is_written_after_rewinding_takes_the_place_of_what_was_forgotten():
    cache = append(empty_cache(CONFIG, 2, 7), counting(2, 1, 5))
    cache = append(rewind(cache, jnp.array([2, 4])), counting(2, 8, 2))
    assert held(cache, 0) == [1.0, 2.0, 8.0, 9.0, 5.0, 0.0, 0.0]
    assert held(cache, 1) == [1.0, 2.0, 3.0, 4.0, 8.0, 9.0, 0.0]
    assert cache.length.tolist() == [4, 6]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capacity", [5, 6, 530])
def test_growing_keeps_what_is_held_and_makes_room(capacity, dtype):
    cache = append(empty_cache(CONFIG, 2, 5, dtype), counting(2, 1, 5))
    grown = grow(cache, capacity)
    assert grown.capacity == capacity
    assert {x.dtype.name for x in (*grown.k, *grown.v)} == {dtype}
    assert held(grown) == [1.0, 2.0, 3.0, 4.0, 5.0] + [0.0] * (capacity - 5)
    assert grown.length.tolist() == [5, 5]
    check_room(grown, capacity - 5)


def test_growing_smaller_is_refused():
    with pytest.raises(ValueError, match="room for 5 tokens and cannot shrink to 4"):
        grow(empty_cache(CONFIG, 2, 5), 4)


# Over steps


PARAMS = decoder.init_params(CONFIG, jax.random.key(3))
TOKENS = np.random.default_rng(5).integers(0, CONFIG.vocab_size, (3, 9)).astype(np.int32)
PROMPT = 5


def python_loop(tokens, cache):
    steps = []
    step = jax.jit(lambda token, cache: decoder.forward(PARAMS, token, cache, CONFIG))
    for at in range(PROMPT, tokens.shape[1]):
        logits, cache = step(tokens[:, at : at + 1], cache)
        steps.append(logits)
    return jnp.concatenate(steps, axis=1), cache


def scan_loop(tokens, cache):
    def step(cache, token):
        logits, cache = decoder.forward(PARAMS, token[:, None], cache, CONFIG)
        return cache, logits[:, 0]

    cache, logits = jax.jit(lambda cache, tokens: jax.lax.scan(step, cache, tokens.T))(cache, tokens[:, PROMPT:])
    return logits.swapaxes(0, 1), cache


def while_loop(tokens, cache):
    steps = tokens.shape[1] - PROMPT

    def step(state):
        at, logits, cache = state
        token = jax.lax.dynamic_slice_in_dim(tokens, PROMPT + at, 1, axis=1)
        following, cache = decoder.forward(PARAMS, token, cache, CONFIG)
        return at + 1, logits.at[:, at].set(following[:, 0]), cache

    logits = jnp.zeros((tokens.shape[0], steps, CONFIG.vocab_size), jnp.float32)
    state = (jnp.int32(0), logits, cache)
    return jax.jit(lambda state: jax.lax.while_loop(lambda state: state[0] < steps, step, state))(state)[1:]


@jax.jit
def read_prompt(tokens, cache):
    return decoder.forward(PARAMS, tokens, cache, CONFIG)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "wide"), [("bfloat16", 1e-2, False), ("float16", 2e-3, False), ("bfloat16", 1e-2, True)]
)
@pytest.mark.parametrize("loop", [python_loop, scan_loop, while_loop])
def test_the_cache_keeps_its_dtype_in_every_loop(loop, dtype, tolerance, wide):
    with jax.enable_x64(wide):
        tokens = jnp.asarray(TOKENS, "int64" if wide else "int32")
        _, cache = read_prompt(tokens[:, :PROMPT], empty_cache(CONFIG, 3, 11, dtype))
        logits, cache = loop(tokens, cache)
    assert {x.dtype.name for x in (*cache.k, *cache.v)} == {dtype}
    assert cache.length.dtype == jnp.int32
    assert cache.length.tolist() == [9, 9, 9]
    assert logits.dtype == jnp.float32
    want = oracles.forward(PARAMS, TOKENS, CONFIG, round_kv=lambda x: oracles.rounded(x, dtype))
    np.testing.assert_allclose(logits, want[:, PROMPT:], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_cache_holds_what_a_wide_one_holds_rounded(dtype):
    caches = [read_prompt(jnp.asarray(TOKENS[:, :PROMPT]), empty_cache(CONFIG, 3, 11, kind))[1] for kind in ("float32", dtype)]
    for layers in ("k", "v"):
        wide, narrow = (np.asarray(getattr(cache, layers)[0]) for cache in caches)
        np.testing.assert_array_equal(narrow, wide.astype(getattr(ml_dtypes, dtype, dtype)))
        assert (narrow.astype(np.float32) != wide).any()


@pytest.mark.parametrize(("batch", "dtype"), [(1, "float32"), (3, "float32"), (3, "bfloat16")])
def test_a_donated_cache_is_used_up_and_the_rest_survives(batch, dtype):
    @jax.jit
    def keep(cache):
        return jax.tree.map(jnp.copy, cache)

    step = jax.jit(lambda tokens, cache: decoder.forward(PARAMS, tokens, cache, CONFIG), donate_argnums=1)
    tokens, cache = jnp.asarray(TOKENS[:batch]), empty_cache(CONFIG, batch, 11, dtype)
    pointers = sorted(x.unsafe_buffer_pointer() for x in (*cache.k, *cache.v))
    copy = keep(cache)
    logits, filled = step(tokens, cache)
    assert all(x.is_deleted() for x in jax.tree.leaves(cache))
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(cache.k[0])
    assert sorted(x.unsafe_buffer_pointer() for x in (*filled.k, *filled.v)) == pointers
    np.testing.assert_array_equal(tokens, TOKENS[:batch])
    again, _ = step(tokens, copy)
    np.testing.assert_array_equal(again, logits)


def test_an_overflowed_cache_is_refused_until_it_is_rewound(unchecked):
    cache = empty_cache(CONFIG, 1, 4)

    @jax.jit
    def push(cache):
        k = jnp.ones((1, *cache.k[0].shape[1:2], 3, cache.k[0].shape[3]))
        for layer in range(len(cache.k)):
            cache = write(cache, layer, k, k)
        return advance(cache, 3)

    full = push(push(cache))
    assert full.overflowed.all()
    with pytest.raises(ValueError, match=r"given 6 tokens for its 4 slots.*rewind"):
        grow(full, 8)
    mended = grow(rewind(full, 3), 8)
    assert (mended.capacity, int(mended.length[0]), bool(mended.overflowed[0])) == (8, 3, False)


def test_a_layer_or_a_pair_that_is_not_there_is_refused(unchecked):
    cache = empty_cache(CONFIG, 1, 4)
    k = jnp.ones((1, *cache.k[0].shape[1:2], 2, cache.k[0].shape[3]))
    for layer in (-1, len(cache.k)):
        with pytest.raises(ValueError, match=f"layer is {layer}; the cache has {len(cache.k)}"):
            write(cache, layer, k, k)
    with pytest.raises(ValueError, match="k holds 2 tokens and v 1"):
        write(cache, 0, k, k[:, :, :1])
    with pytest.raises(ValueError, match=r"k has shape \(2, 2, 10\); the cache takes"):
        write(cache, 0, k[0], k[0])
    with pytest.raises(ValueError, match=r"length has shape \(2,\); it must be one number, or one for each of 1 rows"):
        rewind(cache, jnp.array([1, 2]))


# Rings


def numbered(cache: KVCache, first: int, count: int, kept: tuple[int, ...] | None = None) -> KVCache:
    """Writes tokens whose numbers are their positions."""
    new = counting(cache.length.shape[0], first, count)
    kept = jnp.asarray([count] * cache.length.shape[0] if kept is None else kept, jnp.int32)
    for layer in range(len(cache.k)):
        cache = put(cache, layer, new, -new, kept)
    return advance(cache, kept)


def ring_of(window: int, capacity: int, rows: int = 1) -> KVCache:
    return init_cache(dataclasses.replace(CONFIG, attention=(Attention(window=window),)), rows, capacity)


@pytest.mark.parametrize("window", [1, 2, 3, 7, 11, 12])
@pytest.mark.parametrize("chunks", [(1,) * 11, (11,), (4, 7), (2, 1, 8), (10, 1), (3, 3, 3, 2)], ids=str)
def test_a_ring_holds_the_last_of_any_chunks(window, chunks):
    cache, first = ring_of(window, 11), 0
    put = jax.jit(numbered, static_argnums=(1, 2))
    for count in chunks:
        cache, first = put(cache, first, count), first + count
        want = {position % window: position for position in range(max(0, first - window), first)}
        slots = np.asarray(cache.k[0])[0, 0, :, 0]
        assert {slot: slots[slot] for slot in want} == want
        np.testing.assert_array_equal(cache.v[1], -np.asarray(cache.k[1]))
    assert cache.k[0].shape[2] == min(window, 11)
    assert not cache.overflowed.any()


def test_what_does_not_fit_leaves_a_ring_as_it_is():
    put = jax.jit(numbered, static_argnums=(1, 2))
    cache = put(put(ring_of(3, 8, rows=2), 0, 5), 5, 2, (2, 0))
    before = np.asarray(cache.k[0])
    for count in (1, 4):
        more = put(put(cache, 7, 1, (1, 1)), 8, count, (count, 0))
        assert more.overflowed.tolist() == [True, False]
        assert np.asarray(more.k[0])[0, 0, :, 0].tolist() == [6.0, 7.0, 5.0]
        assert np.asarray(more.k[0])[1, 0, :, 0].tolist() == [3.0, 4.0, 7.0]  # its sixth token, numbered as the other's eighth
    np.testing.assert_array_equal(cache.k[0], before)


def test_a_row_goes_back_as_long_as_no_window_has_pushed_anything_out():
    short = numbered(ring_of(5, 9, rows=2), 0, 5)
    assert rewind(short, jnp.array([2, 4])).length.tolist() == [2, 4]
    long = numbered(short, 5, 3, (3, 0))
    with pytest.raises(ValueError, match=r"holds 8 tokens and some layers keep only the last 5.*rings=False"):
        rewind(long, jnp.array([6, 2]))
    assert rewind(long, jnp.array([8, 2])).length.tolist() == [8, 2]
    lost = jax.jit(rewind)(long, jnp.array([6, 2]))
    assert (lost.overflowed.tolist(), lost.length.tolist()) == ([True, False], [10, 2])
    whole = numbered(empty_cache(CONFIG, 1, 9), 0, 8)
    assert [x.shape[2] for x in whole.k] == [9, 9]
    assert rewind(whole, jnp.array([1])).length.tolist() == [1]


@pytest.mark.parametrize("capacity", [4, 5, 8])
def test_a_cache_grows_into_a_ring_and_a_ring_stays_one(capacity):
    cache = grow(numbered(ring_of(5, capacity), 0, 4), 11)
    assert {x.shape[2] for x in (*cache.k, *cache.v)} == {5}
    cache = numbered(cache, 4, 7)
    assert np.asarray(cache.k[0])[0, 0, :, 0].tolist() == [10.0, 6.0, 7.0, 8.0, 9.0]
    assert not cache.overflowed.any()


def test_the_windows_of_gemma_3_270m_take_14155776_bytes():
    """A31; all slots would be 37748736."""
    local, whole = Attention(window=512), Attention()
    sizes = {"num_layers": 18, "model_dim": 640, "num_heads": 4, "num_kv_heads": 1, "head_dim": 256}
    config = dataclasses.replace(CONFIG, **sizes, attention=(local,) * 5 + (whole,))
    assert init_cache(config, 1, 2048, jnp.bfloat16).nbytes == 14_155_776
    assert init_cache(config, 1, 2048, jnp.bfloat16, rings=False).nbytes == 37_748_736
