import dataclasses

import numpy as np
import pytest

from gqa_jax.config import Attention, Config, DivisorScaling, LinearScaling, Llama3Scaling, Rope
from gqa_jax.families import family_of
from gqa_jax.formats import Archive, Tensor
from gqa_jax.formats.gguf import open_gguf
from gqa_jax.rope import frequencies
from tests.checkpoints import BIASED, GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3, gguf_metadata

PLAIN = Config(
    vocab_size=53,
    num_layers=4,
    model_dim=64,
    mlp_dim=160,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    context_length=97,
    attention=(Attention(Rope(5000.0)),),
    norm_eps=2.0**-17,
)
LOCAL, GLOBAL = Attention(Rope(10_000.0), 5, 0.25), Attention(Rope(1_000_000.0), None, 0.25)
SEVEN_OF_GEMMA3 = dataclasses.replace(
    PLAIN,
    num_layers=7,
    attention=(LOCAL, LOCAL, LOCAL, LOCAL, LOCAL, GLOBAL, LOCAL),
    activation="gelu_tanh",
    qk_norm=True,
    post_norms=True,
    embedding_scale=8.0,
)


def without(said, *names):
    return {name: value for name, value in said.items() if name not in names}


def of_folder(said):
    archive = Archive("folder/of-it", said, {})
    return family_of(archive).config(archive)


def of_gguf(said, changes=None, **tensors):
    """Reads GGUF metadata with `changes`, where None leaves a key out, beside tensors of one row."""
    metadata = {key: value for key, value in (gguf_metadata(said) | (changes or {})).items() if value is not None}
    tensors = {name.replace("__", "."): np.asarray(array, np.float32) for name, array in tensors.items()}
    tensors = {"token_embd.weight": np.zeros((said["vocab_size"], said["hidden_size"]), np.float32)} | tensors
    held = {name: Tensor(array.shape, array.dtype, lambda array=array: array) for name, array in tensors.items()}
    archive = Archive("file/of-it.gguf", metadata, held)
    return family_of(archive).config(archive)


def windows(config):
    return [config.layer_attention(layer).window for layer in range(config.num_layers)]


def rope_of(config):
    (rope,) = {attention.rope for attention in config.attention}
    return rope


# Configs, spelt out


@pytest.mark.parametrize(
    ("said", "config"),
    [
        (LLAMA, PLAIN),
        (BIASED, dataclasses.replace(PLAIN, qkv_bias=True, out_bias=True)),
        (LLAMA | {"mlp_bias": True}, dataclasses.replace(PLAIN, mlp_bias=True)),
        (MISTRAL, dataclasses.replace(PLAIN, attention=(Attention(Rope(5000.0), 5),) * 4)),
        (QWEN2, dataclasses.replace(PLAIN, qkv_bias=True)),
        (QWEN3, dataclasses.replace(PLAIN, qk_norm=True)),
        (QWEN3 | {"attention_bias": True}, dataclasses.replace(PLAIN, qk_norm=True, qkv_bias=True, out_bias=True)),
        (GEMMA3, SEVEN_OF_GEMMA3),
    ],
    ids=["llama", "llama, biases", "llama, MLP biases", "mistral", "qwen2", "qwen3", "qwen3, biases", "gemma3"],
)
def test_a_config_of_hugging_face_is_read_field_by_field(said, config):
    assert of_folder(said) == config


@pytest.mark.parametrize(
    ("said", "tensors", "config"),
    [
        (LLAMA, {}, PLAIN),
        (LLAMA, {"output__weight": [0]}, dataclasses.replace(PLAIN, tied_head=False)),
        (BIASED, {"blk__0__attn_q__bias": [0], "blk__0__attn_output__bias": [0]}, of_folder(BIASED)),
        (QWEN2, {"blk__0__attn_q__bias": [0]}, of_folder(QWEN2)),
        (QWEN3, {"blk__0__attn_q_norm__weight": [0]}, of_folder(QWEN3)),
        (MISTRAL, {}, dataclasses.replace(PLAIN, attention=(Attention(Rope(5000.0), 5),))),
        (MISTRAL | {"sliding_window": 0}, {}, PLAIN),
        (GEMMA3, {}, SEVEN_OF_GEMMA3),
    ],
    ids=["llama", "llama, untied", "llama, biases", "qwen2", "qwen3", "mistral", "a window of 0", "gemma3"],
)
def test_the_metadata_of_a_gguf_file_is_read_field_by_field(said, tensors, config):
    assert of_gguf(said, **tensors) == config


def test_the_config_of_smollm2_is_what_its_file_says(smollm2_path):
    archive = open_gguf(smollm2_path)
    assert family_of(archive).config(archive) == Config(
        vocab_size=49152,
        num_layers=30,
        model_dim=576,
        mlp_dim=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        context_length=8192,
        attention=(Attention(Rope(100_000.0)),),
        norm_eps=float(np.float32(1e-5)),
        tied_head=True,
    )


def test_the_config_of_gemma3_adds_what_its_file_leaves_out(gemma3_path):
    archive = open_gguf(gemma3_path)
    local, everywhere = Attention(Rope(10_000.0), 512, 0.0625), Attention(Rope(1_000_000.0), None, 0.0625)
    assert family_of(archive).config(archive) == Config(
        vocab_size=262144,
        num_layers=18,
        model_dim=640,
        mlp_dim=2048,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        context_length=32768,
        attention=(local, local, local, local, local, everywhere) * 3,
        activation="gelu_tanh",
        norm_eps=float(np.float32(1e-6)),
        qk_norm=True,
        post_norms=True,
        tied_head=True,
        embedding_scale=640**0.5,
    )


# What a file must say, and what it may leave out


SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "max_position_embeddings"),
)


@pytest.mark.parametrize(
    ("said", "name"),
    [(said, name) for said in (LLAMA, GEMMA3) for name in SIZES]
    + [(GEMMA3, name) for name in ("query_pre_attn_scalar", "sliding_window")],
)
def test_a_field_that_config_json_lacks_is_named(said, name):
    for changed in (without(said, name), said | {name: None}):
        with pytest.raises(ValueError, match=rf"^folder/of-it does not say {name}, without which it cannot be read"):
            of_folder(changed)


@pytest.mark.parametrize(
    ("said", "key"),
    [
        (said, f"{kind}.{key}")
        for said, kind in ((LLAMA, "llama"), (GEMMA3, "gemma3"))
        for key in ("block_count", "context_length", "embedding_length", "feed_forward_length")
    ]
    + [
        (LLAMA, "llama.attention.head_count"),
        (LLAMA, "llama.attention.layer_norm_rms_epsilon"),
        (GEMMA3, "gemma3.attention.sliding_window"),
    ],
)
def test_a_key_that_gguf_metadata_lacks_is_named(said, key):
    with pytest.raises(ValueError, match=rf"^file/of-it\.gguf does not say {key}, without which it cannot be read"):
        of_gguf(said, {key: None})


@pytest.mark.parametrize("said", [LLAMA, GEMMA3])
def test_a_gguf_file_without_embeddings_says_so(said):
    archive = Archive("file/of-it.gguf", gguf_metadata(said), {})
    with pytest.raises(ValueError, match=r"^file/of-it\.gguf has no tensor token_embd\.weight"):
        family_of(archive).config(archive)


@pytest.mark.parametrize("kind", ["mixtral", "gemma3", "gemma3n", "deepseek_v3", None])
def test_a_family_that_config_json_names_and_nobody_knows_is_named_beside_those_known(kind):
    with pytest.raises(ValueError, match=rf"^folder/of-it is of the family {kind!r}; known are gemma3_text, llama, mistral"):
        of_folder(LLAMA | {"model_type": kind})


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "mistral", "phi3"])
def test_a_family_that_a_gguf_file_names_and_nobody_knows_is_named_beside_those_known(kind):
    with pytest.raises(
        ValueError, match=rf"^file/of-it\.gguf is of the family {kind!r}; known are gemma3, llama, qwen2, qwen3"
    ):
        of_gguf(LLAMA, {"general.architecture": kind})


@pytest.mark.parametrize("absent", [without(LLAMA, "num_key_value_heads"), LLAMA | {"num_key_value_heads": None}])
def test_as_many_kv_heads_as_query_heads_where_the_file_says_nothing_else(absent):
    assert of_folder(absent).kind == "MHA"
    assert of_gguf(LLAMA, {"llama.attention.head_count_kv": None}).kind == "MHA"


def test_what_a_config_may_leave_out_has_hugging_faces_defaults():
    sparse = of_folder(without(LLAMA, "rms_norm_eps", "rope_theta", "tie_word_embeddings", "head_dim"))
    assert (sparse.norm_eps, rope_of(sparse), sparse.tied_head, sparse.activation) == (1e-6, Rope(10_000.0), False, "silu")
    sparse = of_folder(without(GEMMA3, "rms_norm_eps", "rope_theta", "tie_word_embeddings"))
    assert (sparse.norm_eps, sparse.tied_head) == (1e-6, True)
    assert sparse.attention == SEVEN_OF_GEMMA3.attention


@pytest.mark.parametrize(
    ("said", "field", "value"),
    [
        (LLAMA, "hidden_act", "gelu"),
        (QWEN3, "hidden_act", "relu"),
        (GEMMA3, "hidden_activation", "gelu"),
        (GEMMA3, "use_bidirectional_attention", True),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_its_name(said, field, value):
    with pytest.raises(ValueError, match=rf"^folder/of-it asks for {field} = {value!r}; this decoder knows"):
        of_folder(said | {field: value})


@pytest.mark.parametrize("field", [{"hidden_act": "silu"}, {"hidden_act": "swish"}])
def test_both_names_of_silu_are_read(field):
    assert of_folder(LLAMA | field) == PLAIN


# Head width and scale


@pytest.mark.parametrize("absent", [{}, {"head_dim": None}])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_head_width_is_model_width_over_heads_where_the_file_says_nothing_else(kind, absent):
    said = without(LLAMA, "head_dim") | absent | {"model_type": kind, "hidden_size": 96}
    assert of_folder(said).head_dim == 16


@pytest.mark.parametrize(("width", "heads", "head_dim"), [(640, 4, 256), (1792, 24, 128), (1024, 16, 128)])
@pytest.mark.parametrize("said", [LLAMA, QWEN3, GEMMA3], ids=["llama", "qwen3", "gemma3"])
def test_a_head_width_that_the_file_states_is_never_derived(said, width, heads, head_dim):
    stated = said | {"hidden_size": width, "num_attention_heads": heads, "head_dim": head_dim}
    assert of_folder(stated).head_dim == of_gguf(stated).head_dim == head_dim


def test_head_width_is_model_width_over_heads_where_a_gguf_file_has_no_key_length():
    said = LLAMA | {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    lengths = {"llama.attention.key_length": None, "llama.attention.value_length": None}
    assert of_gguf(said, lengths).head_dim == 64


def test_the_scale_is_of_query_pre_attn_scalar_and_not_of_the_head_width():
    wide = of_folder(GEMMA3 | {"query_pre_attn_scalar": 168, "head_dim": 128})
    assert [attention.scale for attention in wide.attention] == pytest.approx([0.0771517] * 7, rel=1e-6)


@pytest.mark.parametrize(("layers", "scale"), [(18, 0.0883883), (34, 0.0883883), (48, 0.0883883), (62, 0.0771517)])
def test_only_the_gemma_of_62_layers_scales_by_model_width_over_heads_in_gguf(layers, scale):
    said = GEMMA3 | {"hidden_size": 5376, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128}
    config = of_gguf(said | {"num_hidden_layers": layers})
    assert [attention.scale for attention in config.attention] == pytest.approx([scale] * layers, rel=1e-6)


def test_other_families_leave_the_scale_to_the_head_width():
    assert {attention.scale for said in (LLAMA, MISTRAL, QWEN2, QWEN3) for attention in of_folder(said).attention} == {None}


# Rotary scaling

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3_ROPE = Rope(500_000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))


def spellings(kind, fields, base):
    """Every way in which a config.json says the same of its rotary embedding."""
    return [
        {"rope_theta": base, "rope_scaling": {"type": kind} | fields},
        {"rope_theta": base, "rope_scaling": {"rope_type": kind} | fields},
        {"rope_theta": base, "rope_scaling": {"rope_type": kind, "type": kind} | fields},
        {"rope_parameters": {"rope_theta": base, "rope_type": kind} | fields},
        {"rope_theta": base, "rope_scaling": None, "rope_parameters": {"rope_theta": base, "rope_type": kind} | fields},
        {"rope_theta": base, "rope_parameters": {"rope_type": kind} | fields, "partial_rotary_factor": 1.0},
        {"rope_parameters": {"rope_theta": base, "rope_type": kind, "partial_rotary_factor": None} | fields},
    ]


@pytest.mark.parametrize("spelling", spellings("llama3", LLAMA3, 500_000.0))
@pytest.mark.parametrize("said", [LLAMA, MISTRAL, QWEN2, QWEN3], ids=["llama", "mistral", "qwen2", "qwen3"])
def test_the_scaling_of_llama_3_is_read_in_every_spelling(said, spelling):
    assert rope_of(of_folder(without(said, "rope_theta") | spelling)) == LLAMA3_ROPE


@pytest.mark.parametrize("spelling", spellings("linear", {"factor": 4}, 2e6))
def test_linear_scaling_is_read_in_every_spelling(spelling):
    assert rope_of(of_folder(without(LLAMA, "rope_theta") | spelling)) == Rope(2e6, LinearScaling(4.0))


@pytest.mark.parametrize("spelling", spellings("default", {}, 2e6))
def test_no_scaling_is_read_in_every_spelling(spelling):
    assert rope_of(of_folder(without(LLAMA, "rope_theta") | spelling)) == Rope(2e6)


def test_the_frequencies_of_llama_3_are_what_its_divisors_say():
    found = frequencies(LLAMA3_ROPE, 64)
    np.testing.assert_allclose(found[[15, 18]], [1.290548e-03, 1.946164e-05], rtol=1e-6)
    divisors = 500_000.0 ** (-np.arange(0, 64, 2) / 64) / found
    np.testing.assert_allclose(divisors, [1.0] * 15 + [1.6513, 3.2923, 9.6667] + [32.0] * 14, rtol=2e-5)


def llama3_divisors(head_dim, base, factor, low, high, context):
    """The divisors that llama.cpp's converter writes, pair by pair."""
    divisors = []
    for lane in range(0, head_dim, 2):
        wavelength = 2 * np.pi * base ** (lane / head_dim)
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_a_gguf_file_says_the_same_scaling_by_divisors():
    divisors = llama3_divisors(64, 500_000.0, 32.0, 1.0, 4.0, 8192)
    rope = rope_of(of_gguf(LLAMA | {"head_dim": 64, "rope_theta": 500_000.0}, rope_freqs__weight=divisors))
    assert rope == Rope(500_000.0, DivisorScaling(tuple(divisors.tolist())))
    np.testing.assert_allclose(frequencies(rope, 64), frequencies(LLAMA3_ROPE, 64), rtol=1e-6)


@pytest.mark.parametrize(
    "keys",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ],
)
def test_linear_scaling_is_read_from_gguf_in_every_spelling_llama_cpp_reads(keys):
    assert rope_of(of_gguf(LLAMA, keys)) == Rope(5000.0, LinearScaling(4.0))


@pytest.mark.parametrize("keys", [{}, {"llama.rope.scaling.type": "none"}, {"llama.rope.dimension_count": None}])
def test_a_gguf_file_without_scaling_has_none(keys):
    assert rope_of(of_gguf(LLAMA, keys)) == Rope(5000.0)


def test_a_gguf_file_without_a_base_has_llama_cpps():
    assert rope_of(of_gguf(LLAMA, {"llama.rope.freq_base": None})) == Rope(10_000.0)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "su", "mrope", "Linear"])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_kind_of_scaling_that_is_not_known_is_named(name, kind):
    for field in ("type", "rope_type"):
        with pytest.raises(
            ValueError, match=rf"^folder/of-it scales rotary frequencies by '{kind}'; known are default, linear"
        ):
            of_folder(LLAMA | {name: {field: kind, "factor": 4.0}})


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
@pytest.mark.parametrize(("said", "arch"), [(LLAMA, "llama"), (QWEN2, "qwen2"), (GEMMA3, "gemma3")])
def test_a_kind_of_scaling_that_a_gguf_file_names_and_is_not_known_is_named(said, arch, kind):
    scaling = {f"{arch}.rope.scaling.type": kind, f"{arch}.rope.scaling.factor": 4.0}
    with pytest.raises(ValueError, match=rf"^file/of-it\.gguf scales rotary frequencies by '{kind}'; known are"):
        of_gguf(said, scaling)


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({"rope_type": "linear", "factor": 4.0, "attention_factor": 1.2}, "attention_factor"),
        ({"rope_type": "default", "factor": 4.0}, "factor"),
        ({"factor": 4.0}, "factor"),
        ({"rope_type": "llama3", "beta_fast": 32, **LLAMA3}, "beta_fast"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_rotary_field_that_would_be_left_unread_is_named(name, scaling, field):
    with pytest.raises(ValueError, match=rf"^folder/of-it has rotary fields that .* does not read: {field}"):
        of_folder(LLAMA | {name: scaling})


@pytest.mark.parametrize(
    ("kind", "field"), [("linear", "factor"), *(("llama3", field) for field in LLAMA3)], ids=lambda name: name
)
def test_a_rotary_field_that_is_missing_is_named(kind, field):
    for held in (without(LLAMA3, field), LLAMA3 | {field: None}):
        fields = held if kind == "llama3" else {}
        with pytest.raises(ValueError, match=rf"^folder/of-it scales rotary frequencies by '{kind}' without '{field}'"):
            of_folder(LLAMA | {"rope_scaling": {"rope_type": kind} | fields})


def test_a_gguf_file_that_scales_without_a_factor_is_named():
    with pytest.raises(ValueError, match=r"^file/of-it\.gguf scales rotary frequencies by 'linear' without 'factor'"):
        of_gguf(LLAMA, {"llama.rope.scaling.type": "linear"})


@pytest.mark.parametrize("field", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}])
def test_heads_that_turn_only_in_part_are_refused(field):
    with pytest.raises(ValueError, match=r"^folder/of-it turns only a part of each head \(partial_rotary_factor\)"):
        of_folder(LLAMA | field)


def test_heads_of_a_gguf_file_that_turn_only_in_part_are_refused():
    with pytest.raises(ValueError, match=r"^file/of-it\.gguf turns 8 of the 16 lanes of each head"):
        of_gguf(LLAMA, {"llama.rope.dimension_count": 8})


# Windows


def test_mistral_slides_in_every_layer_or_in_none():
    assert windows(of_folder(MISTRAL)) == [5, 5, 5, 5]
    assert windows(of_folder(MISTRAL | {"sliding_window": None})) == [None] * 4
    assert windows(of_folder(without(MISTRAL, "sliding_window"))) == [4096] * 4


def test_llama_never_slides():
    assert windows(of_folder(LLAMA | {"sliding_window": 5, "use_sliding_window": True})) == [None] * 4


@pytest.mark.parametrize("said", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"sliding_window": 5}, [None] * 4),
        ({"sliding_window": 5, "max_window_layers": 1, "use_sliding_window": False}, [None] * 4),
        ({"sliding_window": 5, "max_window_layers": 0, "use_sliding_window": True}, [5] * 4),
        ({"sliding_window": 5, "max_window_layers": 1, "use_sliding_window": True}, [None, 5, 5, 5]),
        ({"sliding_window": 5, "max_window_layers": 4, "use_sliding_window": True}, [None] * 4),
        ({"sliding_window": 5, "max_window_layers": 28, "use_sliding_window": True}, [None] * 4),
        ({"sliding_window": 5, "use_sliding_window": True}, [None] * 4),
        ({"sliding_window": None, "max_window_layers": 1, "use_sliding_window": True}, [None] * 4),
        ({"max_window_layers": 3, "use_sliding_window": True}, [None, None, None, 4096]),
    ],
)
def test_qwen_slides_only_where_told_to_and_only_from_a_layer_on(said, fields, expected):
    assert windows(of_folder(said | fields)) == expected


@pytest.mark.parametrize("said", [MISTRAL, QWEN2 | {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}])
def test_layer_types_say_which_layers_slide(said):
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert windows(of_folder(said | {"layer_types": kinds})) == [5, None, None, 5]


@pytest.mark.parametrize("said", [MISTRAL, GEMMA3], ids=["mistral", "gemma3"])
def test_layer_types_of_an_unknown_kind_are_named(said):
    kinds = ["full_attention", "chunked_attention"] * 2
    with pytest.raises(ValueError, match=r"^folder/of-it has layer_types chunked_attention; known are full_attention, sliding"):
        of_folder(said | {"layer_types": kinds})


@pytest.mark.parametrize(("said", "layers"), [(MISTRAL, 4), (GEMMA3, 7)], ids=["mistral", "gemma3"])
@pytest.mark.parametrize("more", [-1, 1])
def test_layer_types_for_more_or_fewer_layers_give_both_numbers(said, layers, more):
    kinds = ["full_attention"] * (layers + more)
    with pytest.raises(ValueError, match=rf"^folder/of-it lists {layers + more} layer_types for {layers} layers"):
        of_folder(said | {"layer_types": kinds})


# Gemma 3


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [5, 5, 5, 5, 5, None, 5]),
        ({"sliding_window_pattern": 3}, [5, 5, None, 5, 5, None, 5]),
        ({"sliding_window_pattern": 1}, [None] * 7),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 5}, [None, None, 5, 5, 5, 5, 5]),
        ({"layer_types": ["sliding_attention"] * 7, "sliding_window_pattern": 3}, [5] * 7),
    ],
)
def test_gemma3_says_which_layers_are_global_by_a_period_or_one_by_one(fields, expected):
    config = of_folder(GEMMA3 | fields)
    assert windows(config) == expected
    bases = [attention.rope.base for attention in config.attention]
    assert bases == [1_000_000.0 if window is None else 10_000.0 for window in expected]


LOCAL_20, GLOBAL_BY_8 = Rope(20_000.0), Rope(3e6, LinearScaling(8.0))


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_local_base_freq": 20_000.0, "rope_theta": 3e6, "rope_scaling": {"type": "linear", "factor": 8.0}},
        {"rope_local_base_freq": 20_000.0, "rope_theta": 3e6, "rope_scaling": {"rope_type": "linear", "factor": 8}},
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 3e6, "factor": 8.0},
            }
        },
        {
            "rope_theta": 3e6,
            "rope_local_base_freq": 20_000.0,
            "rope_parameters": {"sliding_attention": None, "full_attention": {"rope_type": "linear", "factor": 8.0}},
        },
    ],
)
def test_gemma3_turns_local_and_global_layers_apart_and_scales_only_global_ones(spelling):
    config = of_folder(without(GEMMA3, "rope_theta") | spelling)
    assert [attention.rope for attention in config.attention] == [LOCAL_20] * 5 + [GLOBAL_BY_8, LOCAL_20]


@pytest.mark.parametrize("held", ["full_attention", "sliding_attention"])
def test_gemma3_has_its_own_bases_where_rope_parameters_have_none(held):
    config = of_folder(without(GEMMA3, "rope_theta") | {"rope_parameters": {held: {"rope_type": "default"}}})
    assert config.attention == SEVEN_OF_GEMMA3.attention


def test_rope_parameters_of_gemma3_that_belong_to_neither_kind_of_layer_are_named():
    with pytest.raises(ValueError, match=r"^folder/of-it has rope_parameters for neither kind of layer: rope_theta, rope_type"):
        of_folder(GEMMA3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_a_kind_of_scaling_that_gemma3_does_not_know_is_named(kind):
    scaling = {kind: {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}
    with pytest.raises(ValueError, match=r"^folder/of-it scales rotary frequencies by 'yarn'"):
        of_folder(GEMMA3 | {"rope_parameters": scaling})


def test_gemma3_caps_final_logits_and_never_attention():
    config = of_folder(GEMMA3 | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0})
    assert config == dataclasses.replace(SEVEN_OF_GEMMA3, logit_softcap=30.0)


def test_what_newer_gguf_files_of_gemma3_say_comes_before_what_the_architecture_says():
    config = of_gguf(
        GEMMA3,
        {
            "gemma3.rope.freq_base_swa": 20_000.0,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
            "gemma3.attention.sliding_window_pattern": 3,
            "gemma3.final_logit_softcapping": 30.0,
        },
    )
    local = Attention(Rope(20_000.0), 5, 0.25)
    everywhere = Attention(Rope(1_000_000.0, LinearScaling(8.0)), None, 0.25)
    pattern = (local, local, everywhere, local, local, everywhere, local)
    assert config == dataclasses.replace(SEVEN_OF_GEMMA3, attention=pattern, logit_softcap=30.0)


def test_a_damaged_number_of_layers_is_refused_before_anything_is_made():
    with pytest.raises(ValueError, match=r"llama\.block_count = 2147483647; the most that is read is 10000"):
        of_gguf(LLAMA, {"llama.block_count": 2**31 - 1})
    with pytest.raises(ValueError, match="num_hidden_layers = 4000000000"):
        of_folder(GEMMA3 | {"num_hidden_layers": 4_000_000_000})
