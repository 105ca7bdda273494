"""The records: what they know, that they can be static arguments of a jitted function, and what they refuse."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from gqa_jax.config import Attention, Config, DivisorScaling, LinearScaling, Llama3Scaling, Rope

SIZES = {
    "vocab_size": 101,
    "num_layers": 3,
    "model_dim": 24,
    "mlp_dim": 37,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 10,
    "context_length": 131,
}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kind", "group_size"),
    [(6, 2, "GQA", 3), (9, 3, "GQA", 3), (71, 1, "MQA", 71), (5, 5, "MHA", 1), (1, 1, "MHA", 1)],
)
def test_heads_name_the_kind_of_attention(heads, kv_heads, kind, group_size):
    config = Config(**SIZES | {"num_heads": heads, "num_kv_heads": kv_heads})
    assert (config.kind, config.group_size) == (kind, group_size)


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        ((5, None), [5, None, 5, None, 5, None, 5]),
        ((5, 7, None), [5, 7, None, 5, 7, None, 5]),
        ((None,), [None] * 7),
        (tuple(range(1, 12)), [1, 2, 3, 4, 5, 6, 7]),
    ],
    ids=["even", "odd", "one", "longer than the layers"],
)
def test_the_pattern_of_attention_repeats_over_the_layers(pattern, windows):
    config = Config(**SIZES | {"num_layers": 7}, attention=tuple(Attention(window=window) for window in pattern))
    assert [config.layer_attention(layer).window for layer in range(7)] == windows


def test_head_width_is_free_of_model_width():
    assert Config(**SIZES | {"model_dim": 1792, "num_heads": 24, "head_dim": 128}).head_dim == 128


@pytest.mark.parametrize(
    "rope",
    [
        None,
        Rope(),
        Rope(5e5, LinearScaling(8.0)),
        Rope(scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192)),
        Rope(scaling=DivisorScaling((1.0, 2.0, 3.0, 4.0, 5.0)), interleaved=True),
    ],
)
def test_equal_records_share_one_compiled_program(rope):
    traces = []

    @partial(jax.jit, static_argnames="config")
    def double(x, config):
        traces.append(config)
        return x * config.num_heads

    for _ in range(2):
        config = Config(**SIZES, attention=(Attention(rope, window=5), Attention()))
        assert double(jnp.float32(2), config=config) == 12
    assert len(traces) == 1
    assert double(jnp.float32(2), config=dataclasses.replace(config, num_heads=4)) == 8
    assert len(traces) == 2


@pytest.mark.parametrize("record", [Config(**SIZES), Attention(), Rope(), LinearScaling(2.0), DivisorScaling((1.0,))])
def test_records_cannot_be_changed(record):
    field = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, field, 1)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [0, -3, 2.0])
def test_sizes_that_are_no_whole_number_of_at_least_one_are_refused(unchecked, name, size):
    with pytest.raises(ValueError, match=f"{name} is {size}; it must be a whole number of at least 1"):
        Config(**SIZES | {name: size})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 7}, "7 query heads .* 2 KV heads.*multiple"),
        ({"num_heads": 2, "num_kv_heads": 6}, "2 query heads .* 6 KV heads"),
        ({"attention": ()}, "attention is empty"),
        ({"head_dim": 11}, "head_dim is 11.*even"),
        ({"head_dim": 11, "attention": (Attention(None), Attention())}, "head_dim is 11.*even"),
        ({"logit_softcap": 0.0}, "logit_softcap is 0.0.*positive"),
        ({"logit_softcap": -30.0}, "logit_softcap is -30.0.*positive"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        Config(**SIZES | changes)


def test_an_odd_head_width_is_fine_without_rotary_embedding():
    assert Config(**SIZES | {"head_dim": 11}, attention=(Attention(None),)).head_dim == 11


def test_an_unknown_activation_is_refused(unchecked):
    with pytest.raises(ValueError, match="activation is 'relu'; known are 'silu' and 'gelu_tanh'"):
        Config(**SIZES, activation="relu")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Attention(window=0), "window is 0.*least is 1"),
        (lambda: Attention(window=-4), "window is -4.*least is 1"),
        (lambda: Attention(scale=0.0), "scale is 0.0.*positive"),
        (lambda: Attention(scale=-0.5), "scale is -0.5.*positive"),
        (lambda: Attention(softcap=0.0), "softcap is 0.0.*positive"),
        (lambda: Attention(softcap=-50.0), "softcap is -50.0.*positive"),
        (lambda: Rope(base=0.0), "base is 0.0.*positive"),
        (lambda: Rope(base=-1e4), "base is -10000.0.*positive"),
        (lambda: LinearScaling(0.0), "factor is 0.0.*positive"),
        (lambda: LinearScaling(-2.0), "factor is -2.0.*positive"),
        (lambda: Llama3Scaling(0.0, 1.0, 4.0, 8192), "factor is 0.0.*positive"),
        (lambda: Llama3Scaling(32.0, 1.0, 4.0, 0), "original_context is 0.*positive"),
        (lambda: Llama3Scaling(32.0, 4.0, 4.0, 8192), "high_freq_factor is 4.0.*above low_freq_factor, 4.0"),
        (lambda: Llama3Scaling(32.0, 4.0, 1.0, 8192), "high_freq_factor is 1.0.*above low_freq_factor, 4.0"),
        (lambda: DivisorScaling((1.0, 0.0)), "divisor is 0.0.*positive"),
        (lambda: DivisorScaling((1.0, -3.0, 2.0)), "divisor is -3.0.*positive"),
    ],
)
def test_numbers_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
