"""Text from a model: rows that stop on their own, caches that go on, chunks, streams, and every refusal."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gqa_jax
from gqa_jax import loop
from gqa_jax.generate import PROMPT_CHUNK, Piece, generate

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = gqa_jax.Config(
    vocab_size=101,
    num_layers=2,
    model_dim=24,
    mlp_dim=40,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    context_length=3000,
    attention=(gqa_jax.Attention(window=5), gqa_jax.Attention()),
)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 20, [3]]


@pytest.fixture(scope="module")
def model():
    params = jax.jit(gqa_jax.init_params, static_argnums=0)(CONFIG, jax.random.key(0))
    return gqa_jax.Model(CONFIG, params)


def scripted(successors, tokenizer=None):
    """Makes a model that follows each token by the one the script names."""
    size = len(successors)
    config = gqa_jax.Config(
        vocab_size=size, num_layers=1, model_dim=size, mlp_dim=2, num_heads=2, num_kv_heads=1, head_dim=2, context_length=64,
        tied_head=False,
    )  # fmt: skip
    params = jax.tree.map(jnp.zeros_like, gqa_jax.init_params(config, jax.random.key(0)))
    params["norm"] = jnp.ones(size)
    params["embedding"] = jnp.eye(size)
    params["head"] = jnp.eye(size)[jnp.asarray(np.argsort(successors))]
    return gqa_jax.Model(config, params, tokenizer)


CYCLE = [1, 2, 3, 4, 5, 7, 0, 9, 6, 8]  # 5 -> 7 -> 9 -> 8 -> 6 -> 0 -> 1 -> 2 -> 3 -> 4 -> 5


class Letters:
    """A tokenizer whose ids are letters."""

    vocab_size = 8
    stop_ids = (7,)

    def encode(self, text, *, add_bos=None):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids):
        return "".join(map(self.push, ids))

    def stream(self):
        return self

    def push(self, token):
        return chr(token + ord("a"))

    def flush(self):
        return ""


@pytest.mark.parametrize("stop", [{2, 9}, [9, 2], (9,), np.array([9]), jnp.array(9), 9])
def test_a_row_ends_with_the_first_of_its_stop_tokens(stop):
    made = generate(scripted(CYCLE), [[4], [0]], stop=stop, max_new_tokens=5)
    assert made.ids[0] == [5, 7, 9]
    assert made.stop_reason[0] == "stop"
    assert made.ids[1] == ([1, 2] if 2 in (stop if isinstance(stop, set | list) else ()) else [1, 2, 3, 4, 5])


def test_a_stop_token_may_come_first_and_the_rest_goes_on():
    made = generate(scripted(CYCLE), [[5], [0]], stop=7, max_new_tokens=4)
    assert made.ids == [[7], [1, 2, 3, 4]]
    assert made.stop_reason == ["stop", "length"]
    np.testing.assert_array_equal(made.cache.length, [2, 5])


@pytest.mark.parametrize("new", [1, 2, 63, 64, 65])
def test_without_stop_there_are_exactly_as_many_tokens_as_asked(model, new):
    made = generate(model, PROMPTS, max_new_tokens=new)
    assert [len(ids) for ids in made.ids] == [new] * 4
    assert made.stop_reason == ["length"] * 4
    np.testing.assert_array_equal(made.cache.length, [len(prompt) + new for prompt in PROMPTS])


def test_a_batch_each_row_alone_and_no_cache_give_the_same_tokens(model):
    batch = generate(model, PROMPTS, max_new_tokens=30)
    assert [generate(model, [prompt], max_new_tokens=30).ids[0] for prompt in PROMPTS] == batch.ids
    uncached = generate(model, PROMPTS, max_new_tokens=30, use_cache=False)
    assert uncached.ids == batch.ids
    assert uncached.cache is None
    assert uncached.stats.cache_bytes == 0


def test_greedy_tokens_are_those_of_the_plain_forward(model):
    made = generate(model, [PROMPTS[1]], max_new_tokens=12).ids[0]
    text = jnp.asarray([PROMPTS[1] + made])
    logits, _ = jax.jit(gqa_jax.forward, static_argnums=3)(model.params, text, None, CONFIG)
    assert logits[0, len(PROMPTS[1]) - 1 : -1].argmax(-1).tolist() == made


@pytest.mark.parametrize("length", [PROMPT_CHUNK - 1, PROMPT_CHUNK, PROMPT_CHUNK + 1, 2 * PROMPT_CHUNK + 17])
def test_long_prompts_are_read_in_chunks_beside_short_ones(model, length):
    prompts = [list(np.random.default_rng(length).integers(101, size=length)), [5, 6, 7]]
    made = generate(model, prompts, max_new_tokens=3)
    assert made.ids == generate(model, prompts, max_new_tokens=3, use_cache=False).ids


def test_a_cache_can_be_exactly_full(model):
    made = generate(model, [[1, 2, 3, 4, 5]], max_new_tokens=8, capacity=13)
    assert made.cache.capacity == 13
    assert made.cache.length[0] == 13
    assert made.ids == generate(model, [[1, 2, 3, 4, 5]], max_new_tokens=8).ids
    assert not made.cache.overflowed.any()


def test_a_returned_cache_continues_the_text(model):
    first = generate(model, PROMPTS, max_new_tokens=10)
    more = [[5], [6, 7], [8] * 17, [9]]
    whole = generate(model, [p + i + m for p, i, m in zip(PROMPTS, first.ids, more, strict=True)], max_new_tokens=7)
    second = generate(model, more, max_new_tokens=7, cache=first.cache)
    assert second.ids == whole.ids
    np.testing.assert_array_equal(second.cache.length, whole.cache.length)


def test_a_full_row_beside_a_long_prompt_keeps_its_tokens(model):
    first = generate(model, [[7] * 20, [2]], max_new_tokens=2, capacity=25)
    more = [[5], list(range(18))]
    whole = generate(model, [[7] * 20 + first.ids[0] + more[0], [2] + first.ids[1] + more[1]], max_new_tokens=2)
    second = generate(model, more, max_new_tokens=2, cache=first.cache)
    assert second.ids == whole.ids
    assert second.cache.capacity == 25


def test_a_cache_is_consumed_and_nothing_else(model):
    prompt = jnp.asarray(PROMPTS[1])
    first = generate(model, prompt, max_new_tokens=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, prompt, max_new_tokens=4, cache=first.cache)
    assert all(leaf.is_deleted() for leaf in (*first.cache.k, *first.cache.v))
    assert not prompt.is_deleted()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(model.params))


def test_capacity_can_be_enlarged_while_going_on(model):
    first = generate(model, [[1, 2]], max_new_tokens=2, capacity=4)
    second = generate(model, [[3]], max_new_tokens=5, cache=first.cache, capacity=12)
    assert second.cache.capacity == 12
    assert second.ids == generate(model, [[1, 2, *first.ids[0], 3]], max_new_tokens=5).ids


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_cache_keeps_the_dtype_it_was_asked_for(model, dtype):
    made = generate(model, PROMPTS, max_new_tokens=5, cache_dtype=dtype)
    assert {str(leaf.dtype) for leaf in (*made.cache.k, *made.cache.v)} == {dtype}
    assert made.stats.cache_bytes == made.cache.nbytes == generate(model, PROMPTS, max_new_tokens=5).cache.nbytes // 2


def test_prompts_of_one_bucket_share_one_trace_of_each_step(model):
    generate(model, [[1, 2, 3]], max_new_tokens=4)
    sizes = loop.extend._cache_size(), loop.decode._cache_size()
    generate(model, [[9, 8, 7, 6, 5]], max_new_tokens=6, seed=3, stop=())
    assert (loop.extend._cache_size(), loop.decode._cache_size()) == sizes


def test_drawing_depends_on_the_seed_and_not_on_other_rows(model):
    how = {"max_new_tokens": 20, "temperature": 1.0}
    batch = generate(model, PROMPTS, seed=5, **how)
    assert generate(model, PROMPTS, seed=5, **how).ids == batch.ids
    assert generate(model, PROMPTS, seed=6, **how).ids != batch.ids
    assert generate(model, PROMPTS[:2], seed=5, **how).ids == batch.ids[:2]
    assert generate(model, [PROMPTS[0]] * 2, seed=5, **how).ids[0] != generate(model, [PROMPTS[0]] * 2, seed=5, **how).ids[1]


def test_every_step_draws_with_a_fresh_key():
    config = gqa_jax.Config(
        vocab_size=1000, num_layers=1, model_dim=4, mlp_dim=2, num_heads=2, num_kv_heads=1, head_dim=2, context_length=64
    )
    flat = gqa_jax.Model(config, jax.tree.map(jnp.zeros_like, gqa_jax.init_params(config, jax.random.key(0))))
    with jax.debug_key_reuse(True):
        made = generate(flat, [[1], [1]], max_new_tokens=32, temperature=1.0)
    assert all(len(set(ids)) >= 25 for ids in made.ids)
    assert made.ids[0] != made.ids[1]


def test_a_repetition_penalty_counts_prompt_and_new_tokens():
    # With a mild head, a large penalty makes any token that has occurred less likely than every other one.
    model = scripted(CYCLE)
    plain = generate(model, [[4, 5, 7]], max_new_tokens=12).ids[0]
    assert plain[8:] == [5, 7, 9, 8]
    made = generate(model, [[4, 5, 7]], max_new_tokens=7, repetition_penalty=50.0).ids[0]
    assert made == [9, 8, 6, 0, 1, 2, 3]


def test_rows_may_have_their_own_temperature(model):
    made = generate(model, [PROMPTS[0]] * 3, max_new_tokens=10, temperature=[0.0, 2.0, 0.0])
    assert made.ids[0] == made.ids[2] == generate(model, [PROMPTS[0]], max_new_tokens=10).ids[0]
    assert made.ids[1] != made.ids[0]


def test_text_leaves_out_the_stop_token_and_ids_without_a_text():
    made = generate(scripted(CYCLE, Letters()), ["e", "a"], max_new_tokens=5)
    assert made.ids == [[5, 7], [1, 2, 3, 4, 5]]
    assert made.text == ["f", "bcdef"]
    assert generate(scripted(CYCLE, Letters()), "h", stop=(), max_new_tokens=4).text == ["ga"]


def test_a_stream_yields_the_text_of_each_row_as_it_comes():
    model = scripted(CYCLE, Letters())
    stream = generate(model, ["e", "a"], max_new_tokens=15, stop=(), stream=True)
    pieces = list(stream)
    assert all(isinstance(piece, Piece) and piece for piece in pieces)
    assert len(pieces) > 4
    whole = generate(model, ["e", "a"], max_new_tokens=15, stop=())
    assert ["".join(piece for piece in pieces if piece.row == row) for row in (0, 1)] == whole.text
    assert stream.generation.ids == whole.ids
    assert stream.generation.stop_reason == whole.stop_reason


def test_a_stream_ends_when_every_row_has_stopped():
    stream = generate(scripted(CYCLE, Letters()), "e", max_new_tokens=60, stream=True)
    assert "".join(stream) == "f"
    assert stream.generation.ids == [[5, 7]]


def test_one_prompt_may_stand_alone(model):
    alone = [
        generate(model, prompt, max_new_tokens=3).ids for prompt in ([1, 2], np.array([1, 2]), jnp.array([1, 2]), [[1, 2]])
    ]
    assert alone == [alone[0]] * 4
    two = [np.array([[1, 2], [3, 4]]), [np.array([1, 2]), np.array([3, 4])], [jnp.array([1, 2]), [3, 4]], ([1, 2], (3, 4))]
    for prompts in two:
        assert generate(model, prompts, max_new_tokens=3).ids[0] == alone[0][0]
    assert generate(model, [np.array([1, 2]), np.array([3])], max_new_tokens=3).ids[0] == alone[0][0]


def test_the_cost_is_told(model):
    told = []
    made = generate(model, [[1, 2, 3]], max_new_tokens=201, capacity=777, progress=lambda *news: told.append(news))
    assert made.stats.prompt_tokens == 3
    assert made.stats.new_tokens == 201
    assert min(made.stats.compile_seconds, made.stats.prompt_seconds, made.stats.decode_seconds) > 0
    # The layer with a window of 5 keeps no more.
    assert made.stats.cache_bytes == made.stats.cache_bytes_per_device == 2 * 2 * (777 + 5) * 10 * 4
    assert made.stats.temporary_bytes > 0
    assert told == [
        ("compiling prompt", 0, 1),
        ("compiling prompt", 1, 1),
        ("compiling decode", 0, 1),
        ("compiling decode", 1, 1),
    ]


@pytest.mark.parametrize(
    ("prompts", "how", "message"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "Prompt 1 is empty"),
        ("text", {}, "no tokenizer"),
        ([[1, 101]], {}, "id 101; the vocabulary has 101"),
        ([[-1, 5]], {}, "id -1"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1]], {"temperature": -1.0}, "temperature is -1"),
        ([[1]], {"stop": 101}, "stop id is 101"),
        ([[1]], {"stop": [3, -2]}, "stop id is -2"),
        ([[1]], {"stop": "end"}, "stop id is 'e'; it must be a whole number"),
        ([[1]], {"max_new_tokens": 2.5}, "max_new_tokens is 2.5; it must be a whole number"),
        ([[1]], {"top_k": 2.5}, "top_k is 2.5; it must be a whole number"),
        ([[1]], {"seed": 2**64}, "seed is 18446744073709551616; it must be at least 0 and at most 4294967295"),
        ([[1]], {"capacity": 0}, "capacity is 0; it must be at least 1"),
        ([[1.5, 2.0]], {}, r"Prompt 0 is \[1\.5, 2\.0\]; it must be a string or a list of ids"),
        ([[{"role": "user", "content": "x"}]], {}, "Prompt 0 is .*model.tokenizer.chat"),
        ([[[1, 2], [3, 4]]], {}, "Prompt 0 is"),
        ([[1] * 3000], {}, "3000 tokens of prompt and 64 new ones are 3064 tokens; the model's context is 3000"),
        ([[1, 2, 3]], {"max_new_tokens": 4, "capacity": 6}, "are 7 tokens; the cache has room for 6. Pass capacity=7"),
        ([[1]], {"cache_dtype": "int8"}, "dtype is int8"),
        ([[1]], {"stream": True}, "no text to stream"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_numbers(unchecked, model, prompts, how, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, **how)


def test_a_cache_that_does_not_fit_is_refused(unchecked, model):
    def cache(batch=1, capacity=9, **sizes):
        return gqa_jax.init_cache(gqa_jax.Config(**vars(CONFIG) | sizes), batch, capacity)

    used = cache()
    generate(model, [[1]], cache=used, max_new_tokens=2)
    with pytest.raises(ValueError, match="consumed by an earlier call"):
        generate(model, [[1]], cache=used, max_new_tokens=2)
    with pytest.raises(ValueError, match="2 rows and there are 1 prompts"):
        generate(model, [[1]], cache=cache(2), max_new_tokens=2)
    with pytest.raises(ValueError, match="2 layers of 3 KV heads of width 10, the model 2 of 2 of width 10"):
        generate(model, [[1]], cache=cache(num_kv_heads=3), max_new_tokens=2)
    with pytest.raises(ValueError, match="1 tokens of prompt and 9 new ones are 10 tokens; the cache has room for 9"):
        generate(model, [[1]], cache=cache(), max_new_tokens=9)
    with pytest.raises(ValueError, match="use_cache=False"):
        generate(model, [[1]], cache=cache(), max_new_tokens=2, use_cache=False)
    with pytest.raises(ValueError, match="cache is float32 and cache_dtype is bfloat16"):
        generate(model, [[1]], cache=cache(), max_new_tokens=2, cache_dtype="bfloat16")


def test_asking_a_stream_for_its_generation_ends_it():
    stream = generate(scripted(CYCLE, Letters()), "a", max_new_tokens=15, stop=(), stream=True)
    first = next(stream)
    assert stream.generation.text == [first]
    assert list(stream) == []
    assert len(stream.generation.cache.length) == 1


def test_a_model_shows_itself_without_its_weights(model):
    assert len(repr(model)) < 1000
    assert "parameters in float32" in repr(model)


class Bytes(Letters):
    """A tokenizer that holds every piece back until the end, as runs of byte pieces are."""

    def stream(self):
        held, shown = [], [0]

        class Voice:
            def push(self, token):
                held.append(token)
                return ""

            def flush(self):
                text = "".join(chr(token + ord("a")) for token in held[shown[0] :])
                shown[0] = len(held)
                return text

        return Voice()


def test_what_a_tokenizer_holds_back_of_the_prompt_is_not_told_again():
    assert generate(scripted(CYCLE, Bytes()), "abc", max_new_tokens=3).text == ["def"]
