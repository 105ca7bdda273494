import dataclasses
import itertools
import json
import logging
import stat
from functools import partial

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file
from tokenizers import processors

import gqa_jax
from gqa_jax import decoder, export
from gqa_jax.checkpoint import load
from gqa_jax.config import Attention, Config, DivisorScaling, LinearScaling, Llama3Scaling, Rope
from gqa_jax.export import save, to_archive
from gqa_jax.families import family_of, spelt_out, to_hf
from gqa_jax.formats import Archive
from gqa_jax.formats.safetensors import in_files
from gqa_jax.request import Model
from gqa_jax.tokenizer import from_folder, from_gguf
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
    is_norm,
    make_weights,
    through,
    write_folder,
    write_gguf,
)
from tests.test_families import LLAMA3, PLAIN, SEVEN_OF_GEMMA3, llama3_divisors, of_folder, of_gguf
from tests.test_tokenizer import TEXTS, byte_level, letters, sentencepiece

FAMILIES = {"llama": LLAMA, "llama, biases": BIASED, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3, "gemma3": GEMMA3}
every_family = pytest.mark.parametrize("said", FAMILIES.values(), ids=FAMILIES.keys())
SLIDES = {"use_sliding_window": True, "sliding_window": 5}
VARIANTS = {
    "llama, biases of the MLP": BIASED | {"mlp_bias": True},
    "llama, biases of the MLP alone": LLAMA | {"mlp_bias": True},
    "llama, untied": LLAMA | {"tie_word_embeddings": False},
    "llama, as many KV heads": LLAMA | {"num_key_value_heads": 6},
    "llama, linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 4}},
    "llama, llama3": LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3},
    "qwen2, windows": QWEN2 | SLIDES | {"max_window_layers": 2},
    "qwen2, windows in all layers": QWEN2 | SLIDES | {"max_window_layers": 0},
    "qwen3, windows": QWEN3 | SLIDES | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "qwen3, biases": QWEN3 | {"attention_bias": True},
    "gemma3, global": GEMMA3 | {"sliding_window_pattern": 1},
    "gemma3, local": GEMMA3 | {"layer_types": ["sliding_attention"] * 7},
    "gemma3, biases": GEMMA3 | {"attention_bias": True},
    "gemma3, capped": GEMMA3 | {"final_logit_softcapping": 30.0, "tie_word_embeddings": False},
    "gemma3, 27B": GEMMA3 | {"query_pre_attn_scalar": 168, "head_dim": 128, "hidden_size": 5376, "num_attention_heads": 32},
    "gemma3, linear": GEMMA3 | {"rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma3, scaled as llama3": GEMMA3 | {"rope_scaling": {"rope_type": "llama3"} | LLAMA3},
}

pytestmark = pytest.mark.usefixtures("quick_compilation")
TINY = Config(vocab_size=53, num_layers=2, model_dim=24, mlp_dim=40, num_heads=6, num_kv_heads=2, head_dim=8, context_length=64)


def read_back(said):
    archive = Archive("saved", json.loads(json.dumps(said)), {})
    return family_of(archive).config(archive)


def made(config, dtype=np.float32):
    """Returns a model of random weights, made without JAX, which would compile a program for each of them."""
    rng = np.random.default_rng(3)

    def draw(path, axes):
        shape = [decoder.axis_sizes(config)[axis] for axis in axes.split()]
        own = np.float32 if path[-1].key.endswith("norm") else dtype
        return jax.numpy.asarray((0.3 * rng.standard_normal(shape)).astype(own))

    return Model(config, jax.tree_util.tree_map_with_path(draw, decoder.param_axes(config)))


@pytest.fixture
def model():
    return made(TINY)


# Configs


@pytest.mark.parametrize("said", (FAMILIES | VARIANTS).values(), ids=(FAMILIES | VARIANTS).keys())
def test_what_is_said_of_a_config_reads_as_the_same_config(said):
    config = of_folder(said)
    again = to_hf(config)
    assert again["model_type"] == said["model_type"]
    assert read_back(again) == (config if again["model_type"] in ("llama", "gemma3_text") else spelt_out_but_scale(config))
    assert spelt_out(read_back(again)) == spelt_out(config)


def spelt_out_but_scale(config):
    """Qwen and Mistral list how each layer attends only where one has a window."""
    layers = tuple(config.layer_attention(layer) for layer in range(config.num_layers))
    return dataclasses.replace(config, attention=layers if any(layer.window for layer in layers) else layers[:1])


@pytest.mark.parametrize(
    ("said", "tensors"),
    [
        (LLAMA, {"output__weight": [0]}),
        (BIASED, {"blk__0__attn_q__bias": [0], "blk__0__attn_output__bias": [0]}),
        (MISTRAL, {}),
        (QWEN2, {"blk__0__attn_q__bias": [0]}),
        (QWEN3, {"blk__0__attn_q_norm__weight": [0]}),
        (GEMMA3, {}),
    ],
    ids=["llama, untied", "llama, biases", "mistral", "qwen2", "qwen3", "gemma3"],
)
def test_what_is_said_of_the_config_of_a_gguf_file_reads_as_the_same_config(said, tensors):
    config = of_gguf(said, **tensors)
    assert to_hf(config)["model_type"] == said["model_type"]
    assert spelt_out(read_back(to_hf(config))) == spelt_out(config)


def test_the_scaling_of_llama_3_is_found_behind_its_divisors():
    divisors = llama3_divisors(64, 500_000.0, 32.0, 1.0, 4.0, 8192)
    config = of_gguf(LLAMA | {"head_dim": 64, "rope_theta": 500_000.0}, rope_freqs__weight=divisors)
    assert read_back(to_hf(config)).attention == (Attention(Rope(500_000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))),)


LOCAL, GLOBAL = Attention(Rope(10_000.0), 5, 0.25), Attention(Rope(1_000_000.0), None, 0.25)


def changed(config, **changes):
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize(
    ("config", "nearest", "lost"),
    [
        (changed(PLAIN, attention=(Attention(softcap=50.0),)), "llama", r"attention\[0\]\.softcap, 50\.0, would become None"),
        (changed(PLAIN, attention=(Attention(None),)), "llama", r"attention\[0\]\.rope, None, would become Rope"),
        (changed(PLAIN, attention=(Attention(scale=0.3),)), "llama", r"attention\[0\]\.scale, 0\.3, would become 0\.25"),
        (changed(PLAIN, attention=(Attention(Rope(interleaved=True)),)), "llama", r"attention\[0\]\.rope\.interleaved, True"),
        (
            changed(PLAIN, attention=(Attention(Rope(5e5, DivisorScaling((1.0, 2.0) * 4))),)),
            "llama",
            r"attention\[0\]\.rope\.scaling, D",
        ),
        (
            changed(PLAIN, attention=(Attention(window=5), Attention())),
            "mistral",
            r"attention\[1\]\.window, None, would become 5",
        ),
        (
            changed(PLAIN, attention=(Attention(window=5), Attention(window=7))),
            "mistral",
            r"attention\[1\]\.window, 7, would b",
        ),
        (
            changed(PLAIN, attention=(Attention(Rope(5e3)), Attention(Rope(1e4)))),
            "llama",
            r"attention\[1\]\.rope\.base, 10000\.0",
        ),
        (changed(PLAIN, attention=(Attention(window=5),), mlp_bias=True), "mistral", "mlp_bias, True, would become False"),
        (changed(PLAIN, attention=(Attention(window=5),), out_bias=True), "mistral", "out_bias, True, would become False"),
        (changed(PLAIN, activation="gelu_tanh"), "llama", "activation, 'gelu_tanh', would become 'silu'"),
        (changed(PLAIN, embedding_scale=8.0), "llama", r"embedding_scale, 8\.0, would become None"),
        (changed(PLAIN, logit_softcap=30.0), "llama", r"logit_softcap, 30\.0, would become None"),
        (changed(PLAIN, out_bias=True), "llama", "out_bias, True, would become False"),
        (changed(PLAIN, qkv_bias=True, mlp_bias=True), "qwen2", "mlp_bias, True, would become False"),
        (changed(PLAIN, qk_norm=True, qkv_bias=True), "qwen3", "qkv_bias, True, would become False"),
        (
            changed(PLAIN, post_norms=True),
            "gemma3_text",
            r"activation, 'silu', would .*; qk_norm, False, .*; embedding_scale, No",
        ),
        (changed(SEVEN_OF_GEMMA3, qk_norm=False), "gemma3_text", "qk_norm, False, would become True"),
        (changed(SEVEN_OF_GEMMA3, embedding_scale=7.0), "gemma3_text", r"embedding_scale, 7\.0, would become 8\.0"),
        (changed(SEVEN_OF_GEMMA3, mlp_bias=True), "gemma3_text", "mlp_bias, True, would become False"),
        (changed(SEVEN_OF_GEMMA3, attention=(Attention(scale=0.3),)), "gemma3_text", r"attention\[0\]\.scale, 0\.3, would"),
        (
            changed(SEVEN_OF_GEMMA3, attention=(GLOBAL, changed(LOCAL, rope=Rope(1e4, LinearScaling(8.0))))),
            "gemma3_text",
            r"attention\[1\]\.rope\.scaling, LinearScaling\(factor=8\.0\), would become None",
        ),
        (
            changed(SEVEN_OF_GEMMA3, attention=(GLOBAL, LOCAL, changed(LOCAL, scale=0.5))),
            "gemma3_text",
            r"attention\[2\]\.scale, 0\.5, would become 0\.25; attention\[5\]\.scale",
        ),
    ],
)
def test_a_config_that_no_model_type_says_is_refused_by_its_fields(config, nearest, lost):
    with pytest.raises(ValueError, match=rf"^No model type of Hugging Face says all .* As the nearest, {nearest}, .*{lost}"):
        to_hf(config)


# Weights


@every_family
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=lambda dtype: np.dtype(dtype).name)
def test_a_folder_that_is_loaded_and_saved_has_the_same_tensors(said, dtype, tmp_path):
    said, weights = (
        said | {"num_hidden_layers": 2, "tie_word_embeddings": False},
        make_weights(said | {"num_hidden_layers": 2}, head=True),
    )
    model = load(write_folder(tmp_path / "model", said, weights, dtype))
    save(model, tmp_path / "saved")
    found = load_file(tmp_path / "saved" / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        kept = np.dtype(np.float32) if is_norm(name) else np.dtype(dtype)
        assert (found[name].dtype, found[name].shape) == (kept, weight.shape), name
        assert found[name].tobytes() == weight.astype(kept).tobytes(), name
    again = load(tmp_path / "saved")
    assert spelt_out(again.config) == spelt_out(model.config)
    assert_same_bits(again.params, expected_params(said, weights, dtype))


@every_family
@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
def test_a_gguf_file_becomes_a_folder_of_the_same_weights(said, kind, tmp_path):
    weights = make_weights(said)
    model = load(write_gguf(tmp_path / "model.gguf", said, weights, kind))
    save(model, tmp_path / "saved")
    expected = expected_params(said, through(kind, weights), np.float32 if kind == "Q8_0" else BFLOAT16)
    assert_same_bits(load(tmp_path / "saved").params, expected)


@pytest.mark.parametrize("said", [BIASED | {"mlp_bias": True}, QWEN3, GEMMA3], ids=["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize(("tp", "data", "policy"), [(4, 1, "replicate"), (3, 2, "split"), (8, 1, "replicate")])
def test_weights_on_a_mesh_are_saved_without_their_padding(said, tp, data, policy, tmp_path):
    said = said | {"num_hidden_layers": 2}
    weights = make_weights(said)
    mesh = partial(gqa_jax.make_mesh, tp=tp, data=data, policy=policy)
    model = load(write_folder(tmp_path / "model", said, weights, BFLOAT16), mesh=mesh)
    assert decoder.param_shapes(model.config, mesh=model.placement)["embedding"].shape[0] > said["vocab_size"]
    save(model, tmp_path / "saved")
    expected = expected_params(said, weights, BFLOAT16)
    assert_same_bits(load(tmp_path / "saved").params, expected)
    again = load(tmp_path / "saved", mesh=mesh)
    assert_same_bits(gqa_jax.gather(again.params, again.config), expected)


def test_a_model_made_by_hand_writes_the_same_text_when_it_is_loaded(model, tmp_path):
    save(model, tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert (again.config, again.tokenizer) == (model.config, None)
    assert_same_bits(again.params, jax.tree.map(np.asarray, model.params))
    texts = [gqa_jax.generate(either, [[5, 7, 11], [2]], max_new_tokens=9).ids for either in (model, again)]
    assert texts[0] == texts[1]


def test_weights_on_the_host_are_saved_too(model, tmp_path):
    save(model._replace(params=gqa_jax.gather(model.params, TINY)), tmp_path / "saved")
    assert_same_bits(load(tmp_path / "saved").params, jax.tree.map(np.asarray, model.params))


GEMMA = changed(TINY, activation="gelu_tanh", qk_norm=True, post_norms=True, embedding_scale=24**0.5)


def norm_and_its_return(norm, tmp_path):
    config = changed(GEMMA, model_dim=len(norm), embedding_scale=len(norm) ** 0.5)
    model = made(config)
    save(model._replace(params=model.params | {"norm": norm}), tmp_path / "saved")
    return np.asarray(load(tmp_path / "saved").params["norm"])


def test_norms_of_gemma_lose_nothing_where_they_were_loaded_or_lie_about_one(tmp_path):
    rng = np.random.default_rng(2)
    loaded = 1 + (rng.normal(size=20_000) * 10.0 ** rng.integers(-6, 4, 20_000)).astype("f4")
    anew = np.concatenate([rng.uniform(0.5, 2, 9_999), 2 ** rng.uniform(0, 24, 10_001)])
    norm = np.concatenate([loaded, anew]).astype("f4")
    np.testing.assert_array_equal(norm_and_its_return(norm, tmp_path), norm)


def test_norms_of_gemma_that_are_small_are_rounded_as_a_float32_less_one(tmp_path):
    norm = np.random.default_rng(2).uniform(-1, 0.5, 10_000).astype("f4")
    apart = np.abs(norm_and_its_return(norm, tmp_path) - norm)
    assert 0 < apart.max() <= 2.0**-24


# Files


def test_large_models_are_cut_into_files_with_an_index(model, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "in_files", partial(in_files, most=20_000))
    save(model, tmp_path / "saved")
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert [file.name for file in files] == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) == 3
    held = {file.name: load_file(file) for file in files}
    assert index["weight_map"] == {name: file for file, tensors in held.items() for name in tensors}
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in held.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert max(sizes) <= 20_000
    assert_same_bits(load(tmp_path / "saved").params, jax.tree.map(np.asarray, model.params))


def test_a_tensor_that_is_larger_than_a_file_may_be_has_one_of_its_own(model):
    assert [len(held) for held in in_files(to_archive(model).tensors, most=1).values()] == [1] * (2 + 2 * 9)


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_every_tensor_begins_at_a_multiple_of_its_width(dtype, tmp_path):
    config = changed(TINY, vocab_size=51, model_dim=23, mlp_dim=39)
    save(made(config, dtype), tmp_path / "saved")
    data = (tmp_path / "saved" / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert size % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    widths = {"F32": 4, "BF16": 2}
    starts = [(tensor["data_offsets"][0], widths[tensor["dtype"]]) for tensor in header.values()]
    assert all(start % width == 0 for start, width in starts)


def test_one_weight_at_a_time_is_brought_to_the_host(model, tmp_path, monkeypatch):
    events = []
    gather = decoder.gather_one
    monkeypatch.setattr(decoder, "gather_one", lambda *args: events.append("gathered") or gather(*args))
    save(model, tmp_path / "saved", progress=lambda *told: events.append(told))
    count = len(jax.tree.leaves(model.params))
    told = [("saving weights", done, count) for done in range(1, count + 1)]
    assert events == list(itertools.chain.from_iterable(("gathered", each) for each in told))


def test_what_is_not_known_is_null_so_that_transformers_does_not_take_its_own(model):
    said = to_archive(model).metadata
    assert (said["bos_token_id"], said["eos_token_id"], said["torch_dtype"]) == (None, None, "float32")


def test_a_folder_that_is_not_empty_stays_as_it_is(model, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "notes.txt").write_text("mine")
    for taken in ("saved", "saved/notes.txt"):
        with pytest.raises(ValueError, match=r"is there already, and is no empty folder; choose another name, or remove it"):
            save(model, tmp_path / taken)
    assert [path.name for path in tmp_path.rglob("*")] == ["saved", "notes.txt"]


def test_an_empty_folder_and_one_whose_parent_is_missing_are_filled(model, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "usual").mkdir()
    for name in ("empty", "new/and/deep"):
        save(model, str(tmp_path / name))
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["config.json", "model.safetensors"]
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)
        modes = {path.stat().st_mode for path in (tmp_path / name).iterdir()}
        assert len(modes) == 1, "Whoever may read one file may read the other."


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt()])
def test_nothing_is_left_where_saving_fails(model, error, tmp_path):
    def progress(what, done, total):
        if done == 7:
            raise error

    with pytest.raises(type(error)):
        save(model, tmp_path / "saved", progress)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("index", "fails"), [(0, False), (0, True), (1, False), (1, True)])
def test_of_several_processes_all_gather_everything_and_the_first_writes(model, index, fails, tmp_path, monkeypatch):
    def broadcast(failed):
        return np.array(fails) if index else failed

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: index)
    monkeypatch.setattr(export.multihost_utils, "broadcast_one_to_all", broadcast)
    gathered = []
    gather = decoder.gather_one
    monkeypatch.setattr(decoder, "gather_one", lambda leaf, *rest: gathered.append(leaf.shape) or gather(leaf, *rest))
    folder = tmp_path / "saved"
    if fails:
        (tmp_path / "file").touch()
        with pytest.raises(
            (ValueError, OSError), match="The first process could not write the folder" if index else "is there already"
        ):
            save(model, tmp_path / "file")
    else:
        save(model, folder)
    assert gathered == [leaf.shape for leaf in jax.tree.leaves(model.params)]
    assert folder.exists() == (index == 0 and not fails)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"norm": np.ones(23, "f4")}, r"\['norm'\] has the shape \(23,\); the config asks for \(24,\)"),
        ({"head": np.ones((53, 24), "f4")}, r"\['head'\] has the shape \(53, 24\); the config asks for None"),
        ({"layers": ()}, r"\['layers'\]\[\d\]\['.*'\] has the shape None; the config asks for \("),
        ({"norm": np.ones(24, "i4")}, r"\['norm'\] is int32; known are float64, float32, float16, bfloat16"),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_named(model, change, named, tmp_path):
    with pytest.raises(ValueError, match=rf"^The weight {named}"):
        save(model._replace(params=model.params | change), tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


# Tokenizers

TEMPLATE = "{{ bos_token }}{% for message in messages %}\r\n<{{ message.role }}> {{ message.content }}\n{% endfor %}\n"
ENDS = {"bos_token_id": 258, "eos_token_id": 259}
PIECES = [("he", -1.0, 1), *letters("▁he<>s/")]
TOKENIZERS = {
    "bytes": byte_level(merges=["Ġ a", "h e"], **ENDS),
    "bytes, beginning and end": byte_level(merges=["Ġ a", "h e"], add_bos_token=True, add_eos_token=True, **ENDS),
    "bytes, llama 3": byte_level(merges=["Ġ a", "h e"], pre="llama-bpe", **ENDS),
    "bytes, qwen": byte_level(merges=["Ġ a", "h e"], pre="qwen2", add_bos_token=False, user_defined=("<think>",), **ENDS),
    "bytes, no ends": byte_level(merges=["Ġ a", "h e"]),
    "bytes, end of turn": byte_level(control=("<s>", "</s>", "<|im_end|>", "<turn>"), eos_token_id=257, eot_token_id=259),
    "pieces": sentencepiece(*PIECES),
    "pieces, end": sentencepiece(*PIECES, add_bos_token=False, add_eos_token=True),
    "pieces, no prefix": sentencepiece(("  ", 0.0, 4), *PIECES, add_space_prefix=False),
}


@pytest.mark.parametrize("metadata", TOKENIZERS.values(), ids=TOKENIZERS.keys())
def test_a_tokenizer_reads_and_writes_the_same_when_it_is_loaded(metadata, tmp_path, caplog):
    tokenizer = from_gguf(metadata | {"tokenizer.chat_template": TEMPLATE})
    config = changed(TINY, vocab_size=tokenizer.vocab_size)
    save(made(config)._replace(tokenizer=tokenizer), tmp_path / "saved")
    again = load(tmp_path / "saved").tokenizer
    for field in ("vocab_size", "bos_id", "eos_id", "stop_ids", "add_bos", "add_eos", "chat_template"):
        assert getattr(again, field) == getattr(tokenizer, field), field
    for text in [*TEXTS, "<s>he</s> he<s> he", "he </s>", "<think> he  a"]:
        assert again.encode(text) == tokenizer.encode(text)
        assert again.encode(text, add_bos=False) == tokenizer.encode(text, add_bos=False)
        assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))
        plain = tokenizers.Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
        if not text.startswith("<s>") and not text.endswith("</s>"):  # Which `encode` does not put a second time.
            assert plain.encode(text).ids == tokenizer.encode(text)
    assert again.chat([{"role": "user", "content": "he"}]) == tokenizer.chat([{"role": "user", "content": "he"}])
    assert caplog.records == []


def test_a_space_that_a_saved_tokenizer_puts_where_this_one_does_not_is_announced(model, tmp_path, caplog):
    tokenizer = from_gguf(sentencepiece(("  ", 0.0, 4), ("<think>", 0.0, 4), *PIECES))
    with caplog.at_level(logging.WARNING, "gqa_jax"):
        save(model._replace(tokenizer=tokenizer), tmp_path / "saved")
    assert "puts a space behind ['  ', '<think>'], ..., where this one puts none" in caplog.text
    again = from_folder(tmp_path / "saved")
    assert again.encode("he<s>he") == tokenizer.encode("he<s>he")
    assert again.encode("he<think>he") != tokenizer.encode("he<think>he")


def test_what_a_folder_puts_around_a_text_stays(model, tmp_path):
    source = from_gguf(byte_level(merges=["h e"], **{"bos_token_id": 257, "eos_token_id": 258})).backend
    source.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    (tmp_path / "model").mkdir()
    source.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    for name in ("saved", "saved again"):
        save(model._replace(tokenizer=from_folder(tmp_path / "model")), tmp_path / name)
        again = from_folder(tmp_path / name)
        assert (again.encode("he"), again.bos_id, again.stop_ids, again.add_eos) == ([257, 256], 257, (258,), False)
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": false}')
    save(model._replace(tokenizer=from_folder(tmp_path / "model")), tmp_path / "without")
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "without" / "tokenizer.json"))
    assert plain.encode("he").ids == from_folder(tmp_path / "without").encode("he") == [256]


def test_a_tokenizer_of_ones_own_is_refused_with_the_way_out(model, tmp_path):
    with pytest.raises(
        ValueError, match=r"is a function, which is not known .*; leave it out by model\._replace\(tokenizer=None\)"
    ):
        save(model._replace(tokenizer=read_back), tmp_path / "saved")


def test_smollm2_keeps_its_ids_ends_and_chat_when_it_is_saved(smollm2_path, tmp_path):
    from gqa_jax.formats.gguf import open_gguf
    from gqa_jax.tokenizer import to_folder

    tokenizer = from_gguf(open_gguf(smollm2_path).metadata)
    to_folder(tokenizer, tmp_path)
    again = from_folder(tmp_path)
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    for field in ("vocab_size", "bos_id", "eos_id", "stop_ids", "add_bos", "add_eos", "chat_template"):
        assert getattr(again, field) == getattr(tokenizer, field), field
