import dataclasses
import os
import re
import subprocess
import sys
import types
from functools import partial

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from gqa_jax import decoder, download
from gqa_jax.checkpoint import load, load_params, locate, open_archive
from gqa_jax.families import family_of
from gqa_jax.formats.gguf import open_gguf
from tests import oracles
from tests.checkpoints import (
    BFLOAT16,
    BIASED,
    GEMMA3,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    assert_same_bits,
    expected_params,
    make_weights,
    through,
    write_folder,
    write_gguf,
)

FAMILIES = {"llama": LLAMA, "llama, biases": BIASED, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3, "gemma3": GEMMA3}
every_family = pytest.mark.parametrize("said", FAMILIES.values(), ids=FAMILIES.keys())
TOKENS = np.random.default_rng(5).integers(LLAMA["vocab_size"], size=(2, 11), dtype=np.int32)


@partial(jax.jit, static_argnames="config")
def logits_of(params, tokens, config):
    return decoder.forward(params, tokens, None, config)[0]


def logits(model):
    return np.asarray(logits_of(model.params, jnp.asarray(TOKENS), model.config))


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model", LLAMA, make_weights(LLAMA))


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "model.gguf", LLAMA, make_weights(LLAMA))


# The same weights in every format


@every_family
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BFLOAT16], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_of_any_dtype_gives_the_weights_cut_into_heads(said, dtype, shards, tmp_path):
    weights = make_weights(said)
    model = load(write_folder(tmp_path / "model", said, weights, dtype, shards), dtype="float32")
    assert_same_bits(model.params, expected_params(said, weights))


@every_family
@pytest.mark.parametrize("kind", ["F64", "F32", "F16", "BF16"])
def test_a_gguf_file_that_loses_nothing_gives_the_same_bits_as_a_folder(said, kind, tmp_path):
    weights = make_weights(said)
    model = load(write_gguf(tmp_path / "model.gguf", said, weights, kind), dtype="float32")
    assert_same_bits(model.params, expected_params(said, weights))


@every_family
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_a_quantised_gguf_file_gives_what_the_gguf_package_dequantises(said, kind, tmp_path):
    weights = make_weights(said)
    model = load(write_gguf(tmp_path / "model.gguf", said, weights, kind))
    assert_same_bits(model.params, expected_params(said, through(kind, weights)))


@every_family
def test_every_format_gives_the_logits_of_a_reference_that_knows_no_format(said, tmp_path):
    weights = make_weights(said)
    from_folder = load(write_folder(tmp_path / "model", said, weights, BFLOAT16), dtype="float32")
    from_file = load(write_gguf(tmp_path / "model.gguf", said, weights, "F16"), dtype="float32")
    quantised = load(write_gguf(tmp_path / "model-q8_0.gguf", said, weights, "Q8_0"))
    right = oracles.forward(expected_params(said, weights), TOKENS, from_folder.config)
    spread = np.abs(right).max()
    np.testing.assert_allclose(logits(from_folder), right, rtol=0, atol=3e-5 * spread)
    np.testing.assert_array_equal(logits(from_file), logits(from_folder))
    error = np.abs(logits(quantised) - right)
    assert 1e-4 * spread < error.max() < 0.2 * spread


def test_rows_of_k_are_put_back_with_the_number_of_kv_heads(tmp_path):
    said = LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "num_hidden_layers": 1}
    weights = make_weights(said)
    rows = np.repeat(np.arange(8, dtype=np.float32)[:, None], 64, axis=1)
    stored = {"blk.0.attn_k.weight": rows}
    model = load(write_gguf(tmp_path / "model.gguf", said, weights, tensors=stored))
    found = np.asarray(model.params["layers"][0]["attention.k"])[0]
    np.testing.assert_array_equal(found.reshape(-1), [0, 2, 1, 3, 4, 6, 5, 7])


@pytest.mark.parametrize("said", [QWEN2, QWEN3, GEMMA3], ids=["qwen2", "qwen3", "gemma3"])
def test_other_families_keep_the_rows_of_k_as_gguf_has_them(said, tmp_path):
    weights = make_weights(said)
    rows = np.repeat(np.arange(32, dtype=np.float32)[:, None], 64, axis=1)
    model = load(write_gguf(tmp_path / "model.gguf", said, weights, tensors={"blk.0.attn_k.weight": rows}))
    np.testing.assert_array_equal(np.asarray(model.params["layers"][0]["attention.k"])[0].reshape(-1), np.arange(32))


def test_rows_of_k_left_as_llama_cpp_permutes_them_would_show_from_the_second_token_on(tmp_path):
    weights = make_weights(MISTRAL)
    right = load(write_gguf(tmp_path / "right.gguf", MISTRAL, weights))
    as_stored = {
        f"blk.{layer}.attn_k.weight": weights[f"model.layers.{layer}.self_attn.k_proj.weight"]
        for layer in range(MISTRAL["num_hidden_layers"])
    }
    wrong = load(write_gguf(tmp_path / "wrong.gguf", MISTRAL, weights, tensors=as_stored))
    apart = np.abs(logits(right) - logits(wrong)).max(axis=(0, 2))
    assert apart[0] == 0
    assert apart[1:].min() > 0.1


def test_the_scaling_of_llama_3_and_its_divisors_in_gguf_give_the_same_logits(tmp_path):
    # With base 500 the wavelengths of 8 pairs lie below, inside and above the ramp of 8 to 32 tokens.
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    said, weights = LLAMA | {"rope_theta": 500.0}, make_weights(LLAMA)
    wavelengths = 2 * np.pi * 500.0 ** (np.arange(8) / 8)
    smooth = np.clip((32 / wavelengths - 1) / 3, 0, 1)
    divisors = 1 / ((1 - smooth) / 8 + smooth)
    scaled = load(write_folder(tmp_path / "model", said | {"rope_scaling": {"rope_type": "llama3", **scaling}}, weights))
    divided = load(write_gguf(tmp_path / "model.gguf", said, weights, tensors={"rope_freqs.weight": divisors.astype("f4")}))
    plain = load(write_gguf(tmp_path / "plain.gguf", said, weights))
    spread = np.abs(logits(plain)).max()
    np.testing.assert_allclose(logits(divided), logits(scaled), rtol=0, atol=3e-5 * spread)
    assert np.abs(logits(plain) - logits(scaled))[:, 5:].max() > 0.01 * spread


@pytest.mark.parametrize("where", ["folder", "file"])
def test_every_norm_of_gemma3_is_one_more_than_hugging_face_stores_whatever_the_format(where, tmp_path):
    weights = make_weights(GEMMA3)
    stored = 0.25 + 2.0**-9  # bfloat16 holds it, but not one more
    weights = {
        name: np.full_like(weight, stored) if name.endswith("norm.weight") else weight for name, weight in weights.items()
    }
    model = load(
        write_folder(tmp_path / "model", GEMMA3, weights, BFLOAT16)
        if where == "folder"
        else write_gguf(tmp_path / "model.gguf", GEMMA3, weights)
    )
    norms = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model.params) if path[-1].key.endswith("norm")]
    assert len(norms) == 1 + 7 * 6
    assert {float(number) for norm in norms for number in norm} == {1 + stored}


@pytest.mark.parametrize("said", [LLAMA, GEMMA3], ids=["llama", "gemma3"])
def test_biases_of_the_mlp_are_read_where_the_family_has_them(said, tmp_path):
    said = said | {"mlp_bias": True}
    weights = make_weights(said)
    folder = write_folder(tmp_path / "model", said, weights)
    if said["model_type"] == "llama":
        assert_same_bits(load(folder).params, expected_params(said, weights))
    else:
        with pytest.raises(ValueError, match=r"model has 21 tensors that would be left unused: .*mlp\.down_proj\.bias"):
            load(folder)


# Tied and untied output matrices


@pytest.mark.parametrize("said", [LLAMA, GEMMA3], ids=["llama", "gemma3"])
@pytest.mark.parametrize("present", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_output_matrix_is_the_one_that_the_config_means(said, present, tied, tmp_path):
    said = said | {"tie_word_embeddings": tied}
    weights = make_weights(said, head=present)
    folder = write_folder(tmp_path / "model", said, weights)
    if not tied and not present:
        with pytest.raises(ValueError, match=r"model lacks 1 tensors: lm_head\.weight"):
            load(folder)
        return
    model = load(folder)
    assert model.config.tied_head == tied
    assert ("head" in model.params) == (not tied)
    assert_same_bits(model.params, expected_params(said, weights))
    right = oracles.forward(expected_params(said, weights), TOKENS, model.config)
    np.testing.assert_allclose(logits(model), right, rtol=0, atol=3e-5 * np.abs(right).max())


@pytest.mark.parametrize("said", [LLAMA, QWEN2, GEMMA3], ids=["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("present", [False, True])
def test_the_output_matrix_of_a_gguf_file_is_tied_where_the_file_has_none(said, present, tmp_path):
    said = said | {"tie_word_embeddings": not present}
    weights = make_weights(said)
    model = load(write_gguf(tmp_path / "model.gguf", said, weights))
    assert model.config.tied_head == (not present)
    assert_same_bits(model.params, expected_params(said, weights))


# dtypes


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=lambda dtype: np.dtype(dtype).name)
def test_the_dtype_of_a_folder_is_kept_and_norms_are_float32(dtype, tmp_path):
    weights = make_weights(BIASED)
    model = load(write_folder(tmp_path / "model", BIASED, weights, dtype))
    assert_same_bits(model.params, expected_params(BIASED, weights, dtype))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", np.float32), ("F16", np.float16), ("BF16", BFLOAT16), ("Q8_0", np.float32)]
)
def test_the_dtype_of_a_gguf_file_is_kept_and_a_quantised_one_is_float32(kind, dtype, tmp_path):
    weights = make_weights(LLAMA)
    model = load(write_gguf(tmp_path / "model.gguf", LLAMA, weights, kind))
    assert_same_bits(model.params, expected_params(LLAMA, through(kind, weights), dtype))


@pytest.mark.parametrize(
    ("most", "one", "dtype"),
    [
        ("F16", "Q8_0", np.float32),
        ("BF16", "Q4_1", np.float32),
        ("Q8_0", "F16", np.float32),
        ("F16", "F32", np.float32),
        ("F16", "BF16", np.float32),
        ("BF16", "BF16", BFLOAT16),
    ],
)
def test_a_gguf_file_of_several_kinds_has_the_dtype_that_holds_them_all(most, one, dtype, tmp_path):
    weights = make_weights(QWEN3)
    file = write_gguf(tmp_path / "model.gguf", QWEN3, weights, most, kinds={"blk.2.ffn_down.weight": one})
    name = "model.layers.2.mlp.down_proj.weight"
    held = through(most, weights) | {name: through(one, weights)[name]}
    assert_same_bits(load(file).params, expected_params(QWEN3, held, dtype))


def test_a_folder_of_several_dtypes_has_the_one_that_holds_them_all(tmp_path):
    weights = make_weights(LLAMA)
    folder = write_folder(tmp_path / "model", LLAMA, {name: weights[name] for name in weights if "mlp" in name}, np.float16)
    save_file({name: weights[name].astype(BFLOAT16) for name in weights if "mlp" not in name}, folder / "rest.safetensors")
    (folder / "model.safetensors").rename(folder / "mlp.safetensors")
    assert_same_bits(load(folder).params, expected_params(LLAMA, weights, np.float32))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16, np.float16, np.dtype("float32")])
def test_a_dtype_that_is_asked_for_converts_numbers_and_not_bits(kind, dtype, tmp_path):
    weights = make_weights(LLAMA)
    model = load(write_gguf(tmp_path / "model.gguf", LLAMA, weights, kind), dtype=dtype)
    assert_same_bits(model.params, expected_params(LLAMA, through(kind, weights), jnp.dtype(dtype)))


@pytest.mark.parametrize("dtype", ["int8", np.int32, bool, np.uint8, "complex64"])
def test_a_dtype_that_is_not_floating_point_is_an_error(dtype, folder):
    with pytest.raises(ValueError, match=r"dtype is \w+; weights are floating point, such as float32 or bfloat16"):
        load(folder, dtype=dtype)


def test_bfloat16_loads_bit_for_bit_in_a_process_without_torch(tmp_path):
    weights = make_weights(LLAMA)
    folder = write_folder(tmp_path / "model", LLAMA, weights, BFLOAT16)
    program = (
        "import sys, numpy, gqa_jax\n"
        f"model = gqa_jax.load({str(folder)!r})\n"
        "assert not {'torch', 'transformers', 'tensorflow'} & {name.partition('.')[0] for name in sys.modules}\n"
        "print(model.params['embedding'].dtype, numpy.asarray(model.params['embedding']).tobytes().hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"bfloat16 {weights['model.embed_tokens.weight'].astype(BFLOAT16).tobytes().hex()}\n", done.stderr


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_loaded_weights_stay_when_the_file_is_overwritten(kind, tmp_path):
    weights = make_weights(LLAMA)
    file = write_gguf(tmp_path / "model.gguf", LLAMA, weights, kind)
    model = load(file)
    file.write_bytes(bytes(file.stat().st_size))
    dtype = {"F32": np.float32, "F16": np.float16, "BF16": BFLOAT16}[kind]
    assert_same_bits(model.params, expected_params(LLAMA, weights, dtype))


# Tensors that are not as they should be


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.3.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ],
)
def test_a_tensor_that_a_folder_lacks_is_named(name, tmp_path):
    weights = make_weights(LLAMA)
    del weights[name]
    with pytest.raises(ValueError, match=rf"model lacks 1 tensors: {name}\."):
        load(write_folder(tmp_path / "model", LLAMA, weights))


def test_only_some_of_many_missing_tensors_are_named(tmp_path):
    weights = {name: weight for name, weight in make_weights(LLAMA).items() if "mlp" not in name}
    with pytest.raises(ValueError, match=r"model lacks 12 tensors: (model\.layers\.\d\.mlp\.\w+\.weight(, |\.$)){5}"):
        load(write_folder(tmp_path / "model", LLAMA, weights))


@pytest.mark.parametrize("said", [LLAMA, GEMMA3], ids=["llama", "gemma3"])
def test_a_tensor_that_a_gguf_file_lacks_is_named(said, tmp_path):
    weights = make_weights(said)
    del weights["model.layers.2.mlp.down_proj.weight"]
    with pytest.raises(ValueError, match=r"model\.gguf lacks 1 tensors: blk\.2\.ffn_down\.weight\."):
        load(write_gguf(tmp_path / "model.gguf", said, weights))


def test_q_k_and_v_in_one_tensor_are_refused_and_not_cut_in_three(tmp_path):
    weights = make_weights(LLAMA)
    at = "model.layers.0.self_attn."
    fused = np.concatenate([weights.pop(f"{at}{name}_proj.weight") for name in "qkv"])
    with pytest.raises(ValueError, match=rf"model lacks 3 tensors: {at}k_proj\.weight, {at}q_proj\.weight, {at}v_proj\.weight"):
        load(write_folder(tmp_path / "model", LLAMA, weights | {f"{at}qkv_proj.weight": fused}))
    with pytest.raises(ValueError, match=r"model\.gguf lacks 3 tensors: blk\.0\.attn_k\.weight, blk\.0\.attn_q\.weight"):
        load(write_gguf(tmp_path / "model.gguf", LLAMA, weights, tensors={"blk.0.attn_qkv.weight": fused}))


@pytest.mark.parametrize("name", ["model.layers.4.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "score.weight"])
def test_a_tensor_of_a_folder_that_would_be_left_unused_is_named(name, tmp_path):
    weights = make_weights(LLAMA) | {name: np.ones(3, np.float32)}
    with pytest.raises(ValueError, match=rf"model has 1 tensors that would be left unused: {name}\."):
        load(write_folder(tmp_path / "model", LLAMA, weights))


@pytest.mark.parametrize(
    ("said", "name"),
    [(LLAMA, "blk.4.ffn_up.weight"), (LLAMA, "blk.0.ffn_up.bias"), (QWEN2, "rope_freqs.weight"), (GEMMA3, "rope_freqs.weight")],
)
def test_a_tensor_of_a_gguf_file_that_would_be_left_unused_is_named(said, name, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", said, make_weights(said), tensors={name: np.ones(8, np.float32)})
    with pytest.raises(ValueError, match=rf"model\.gguf has 1 tensors that would be left unused: {name}\."):
        load(file)


def test_frequencies_that_older_folders_store_mean_nothing(tmp_path):
    weights = make_weights(LLAMA)
    stale = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32) for layer in range(4)}
    assert_same_bits(load(write_folder(tmp_path / "model", LLAMA, weights | stale)).params, expected_params(LLAMA, weights))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (54, 64)),
        ("model.norm.weight", (63,)),
        ("model.norm.weight", (64, 1)),
        ("model.layers.1.self_attn.q_proj.weight", (64, 96)),
        ("model.layers.1.self_attn.q_proj.weight", (80, 64)),
        ("model.layers.1.self_attn.k_proj.weight", (96, 64)),
        ("model.layers.1.self_attn.o_proj.weight", (96, 64)),
        ("model.layers.1.mlp.gate_proj.weight", (64, 160)),
        ("model.layers.1.mlp.down_proj.weight", (160, 64)),
    ],
)
def test_a_tensor_of_the_wrong_shape_is_named_with_its_shape(name, shape, tmp_path):
    weights = make_weights(LLAMA) | {name: np.ones(shape, np.float32)}
    with pytest.raises(ValueError, match=re.escape(f"model: {name} has shape {shape}, ")):
        load(write_folder(tmp_path / "model", LLAMA, weights))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("blk.1.attn_q.weight", (80, 64)), ("blk.1.attn_k.weight", (96, 64)), ("blk.1.ffn_down.weight", (160, 64))],
)
def test_a_tensor_of_the_wrong_shape_in_a_gguf_file_is_named_with_its_shape(name, shape, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", LLAMA, make_weights(LLAMA), tensors={name: np.ones(shape, np.float32)})
    with pytest.raises(ValueError, match=rf"model\.gguf: {name} has shape \({shape[0]}, {shape[1]}\), which is not .* with"):
        load(file)


def test_fewer_heads_in_the_config_than_in_the_file_are_an_error(tmp_path):
    weights = make_weights(LLAMA)
    with pytest.raises(ValueError, match=r"k_proj\.weight has shape \(32, 64\), which is not \(K H\) D with .*K = 3"):
        load(write_folder(tmp_path / "model", LLAMA | {"num_attention_heads": 3, "num_key_value_heads": 3}, weights))


# Names and paths


def test_paths_are_strings_or_paths(folder, file):
    expected = expected_params(LLAMA, make_weights(LLAMA))
    for path in (folder, str(folder), f"{folder}/", file, str(file)):
        assert_same_bits(load(path).params, expected)


def test_a_tilde_is_the_home_folder(file, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert locate("~/model.gguf") == file
    assert locate("~/model") == folder


def test_a_folder_with_one_gguf_file_is_that_file(file):
    assert_same_bits(load(file.parent).params, expected_params(LLAMA, make_weights(LLAMA)))


def test_a_gguf_file_is_read_though_a_config_lies_beside_it(file):
    (file.parent / "config.json").write_text('{"model_type": "llama"}')
    assert_same_bits(load(file.parent).params, expected_params(LLAMA, make_weights(LLAMA)))


def test_safetensors_come_before_a_gguf_file_in_the_same_folder(folder):
    write_gguf(folder / "other.gguf", QWEN2, make_weights(QWEN2))
    assert open_archive(folder).metadata["model_type"] == "llama"


def test_a_folder_with_several_gguf_files_lists_them(file):
    write_gguf(file.parent / "again.gguf", LLAMA, make_weights(LLAMA))
    with pytest.raises(ValueError, match=r"holds 2 GGUF files; give one: again\.gguf, model\.gguf"):
        load(file.parent)


def test_a_safetensors_file_alone_is_not_a_checkpoint(folder):
    with pytest.raises(ValueError, match=r"model\.safetensors holds weights only; give the folder that has config\.json"):
        load(folder / "model.safetensors")


def test_an_empty_folder_is_not_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json, so it is no checkpoint"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "smollm3-135m",
        "SmolLM2-135M",
        "no/such/file",
        "./org/name",
        "org/name.gguf",
        "~/no-such-model",
        "/no-such/model",
        "a/b.safetensors",
    ],
)
def test_a_name_that_is_nothing_is_an_error_that_lists_the_known_ones(name):
    with pytest.raises(
        ValueError, match=r"is no file or folder here, no known model \(gemma3-270m, smollm2-135m\) and no model"
    ):
        load(name)


def test_a_known_name_is_fetched_and_tells_its_progress(file, monkeypatch, tmp_path):
    asked = []

    def fetch(name, *, progress):
        asked.append((name, progress))
        return file

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(download, "fetch", fetch)
    seen = []
    model = load("smollm2-135m", progress=lambda *told: seen.append(told))
    assert [name for name, _ in asked] == ["smollm2-135m"]
    assert_same_bits(model.params, expected_params(LLAMA, make_weights(LLAMA)))
    asked[0][1]("downloading", 1, 2)
    assert seen[-1] == ("downloading", 1, 2)


def test_a_folder_of_a_known_name_is_read_instead_of_fetched(folder, monkeypatch, tmp_path):
    folder.rename(tmp_path / "smollm2-135m")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(download, "fetch", lambda *_, **__: pytest.fail("fetched"))
    assert load("smollm2-135m").config.vocab_size == LLAMA["vocab_size"]


def test_progress_counts_every_weight_once_and_ends_with_all(folder):
    told = []
    model = load(folder, progress=lambda *said: told.append(said))
    count = len(jax.tree.leaves(model.params))
    assert told == [("loading weights", done, count) for done in range(1, count + 1)]


def hub(**attributes):
    return types.SimpleNamespace(**attributes)


def test_a_model_of_the_hub_needs_the_extra_and_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"'org/name' is no folder here\. To fetch it .*pip install 'gqa-jax\[hub\]'"):
        load("org/name")


def test_a_model_of_the_hub_is_fetched_without_other_kinds_of_weights(folder, monkeypatch):
    asked = []

    def snapshot_download(name, *, allow_patterns, ignore_patterns):
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setitem(sys.modules, "huggingface_hub", hub(snapshot_download=snapshot_download))
    assert_same_bits(load("org/name").params, expected_params(LLAMA, make_weights(LLAMA)))
    assert asked == [("org/name", ["*.json", "*.jinja", "*.safetensors"])]


@pytest.mark.parametrize("error", [OSError("no network"), ValueError("gated"), RuntimeError("404"), KeyError("odd")])
def test_a_model_of_the_hub_that_cannot_be_fetched_is_a_download_error(error, monkeypatch):
    def snapshot_download(name, **_):
        raise error

    monkeypatch.setitem(sys.modules, "huggingface_hub", hub(snapshot_download=snapshot_download))
    with pytest.raises(download.DownloadError, match="'org/name' could not be fetched from the Hugging Face Hub: ") as raised:
        load("org/name")
    assert raised.value.__cause__ is error


# Tokenizers


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(32, 64)), *"▁abcdefghijklmnopqr"[:18]]


def test_a_gguf_file_brings_its_tokenizer(tmp_path):
    tokenizer = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": [-float(rank) for rank in range(len(PIECES))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 32 + [1] * 18,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": False,
    }
    model = load(write_gguf(tmp_path / "model.gguf", LLAMA, make_weights(LLAMA), metadata=tokenizer))
    assert model.tokenizer.vocab_size == len(PIECES) == LLAMA["vocab_size"]
    assert model.tokenizer.encode("abc") == [1, *(PIECES.index(piece) for piece in "abc")]
    assert model.tokenizer.decode([PIECES.index(piece) for piece in "cab"]) == "cab"


def test_a_folder_brings_its_tokenizer(folder):
    vocab = {"[UNK]": 0, "one": 1, "two": 2}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    assert load(folder).tokenizer.encode("two") == [2]


def test_a_checkpoint_without_a_tokenizer_loads_without_one(folder, file):
    assert load(folder).tokenizer is None
    assert load(file).tokenizer is None


# Real files


def first_layer(path):
    """Opens a real GGUF file as a model of its first layer and two tokens."""
    archive = open_gguf(path)
    family = family_of(archive)
    config = dataclasses.replace(family.config(archive), num_layers=1, vocab_size=2)
    tensors = {
        name: tensor for name, tensor in archive.tensors.items() if name.startswith("blk.0.") or name == "output_norm.weight"
    }
    tensors["token_embd.weight"] = tensors["output_norm.weight"]._replace(
        shape=(2, config.model_dim), read=lambda: np.zeros((2, config.model_dim), np.float32)
    )
    return load_params(archive._replace(tensors=tensors), family, config)


def test_q_and_k_of_smollm2_are_put_back_row_by_row(smollm2_path):
    (layer,) = first_layer(smollm2_path)["layers"]
    tensors = {
        tensor.name: gguf.quants.dequantize(np.asarray(tensor.data), tensor.tensor_type)
        for tensor in gguf.GGUFReader(smollm2_path).tensors
        if tensor.name.startswith("blk.0.attn")
    }
    q, k = np.asarray(layer["attention.q"]), np.asarray(layer["attention.k"])
    assert (q.shape, k.shape) == ((576, 3, 3, 64), (576, 3, 64))
    for head in range(9):
        for lane in range(64):
            stored = head * 64 + 2 * (lane % 32) + lane // 32
            np.testing.assert_array_equal(q[:, head // 3, head % 3, lane], tensors["blk.0.attn_q.weight"][stored])
            if head < 3:
                np.testing.assert_array_equal(k[:, head, lane], tensors["blk.0.attn_k.weight"][stored])
    np.testing.assert_array_equal(layer["attention.v"], tensors["blk.0.attn_v.weight"].reshape(3, 64, 576).transpose(2, 0, 1))


def test_the_norms_of_gemma3_are_what_its_file_stores(gemma3_path):
    params, tensors = first_layer(gemma3_path), open_gguf(gemma3_path).tensors
    (layer,) = params["layers"]
    assert np.asarray(params["norm"]).mean() == pytest.approx(26.35, abs=0.01)
    for ours, theirs in (
        ("attention.q_norm", "attn_q_norm"),
        ("attention.post_norm", "post_attention_norm"),
        ("mlp.norm", "ffn_norm"),
    ):
        np.testing.assert_array_equal(layer[ours], tensors[f"blk.0.{theirs}.weight"].read())
    assert layer["attention.q"].shape == (640, 1, 4, 256)
    assert layer["attention.o"].shape == (1, 4, 256, 640)
    assert layer["mlp.down"].shape == (2048, 640)
