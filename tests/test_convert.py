"""Head conversion: what must not change, what each method gives back, and formulas in numpy float64 beside it."""

import json
import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import gqa_jax
from gqa_jax import commands, decoder, heads
from gqa_jax.__main__ import main
from gqa_jax.calibrate import batches
from gqa_jax.config import Attention, Config, LinearScaling, Rope
from gqa_jax.convert import METHODS, convert, negative_log_likelihood
from gqa_jax.tokenizer import from_gguf
from tests import oracles
from tests.test_export import changed, made
from tests.test_tokenizer import byte_level

pytestmark = pytest.mark.usefixtures("quick_compilation")

TINY = Config(vocab_size=53, num_layers=2, model_dim=20, mlp_dim=28, num_heads=6, num_kv_heads=6, head_dim=8, context_length=64)
MIXED = (
    Attention(window=5, softcap=20.0),
    Attention(Rope(500.0, interleaved=True), scale=0.3),
    Attention(rope=None, sinks=True),
)
CONFIGS = {
    "one query a head": TINY,
    "two, biases": changed(TINY, num_heads=12, qkv_bias=True, out_bias=True, mlp_bias=True),
    "three, lanes side by side": changed(TINY, num_heads=18, attention=(Attention(Rope(500.0, LinearScaling(2.0), True)),)),
    "no rope": changed(TINY, num_heads=12, attention=(Attention(rope=None),), qkv_bias=True),
    "windows, softcap, all kinds": changed(TINY, num_layers=3, num_heads=12, attention=MIXED, post_norms=True, tied_head=False),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
KEPT = [method for method in METHODS if method != "random"]
TOKENS = np.random.default_rng(5).integers(TINY.vocab_size, size=(2, 11), dtype=np.int32)
TEXT = np.random.default_rng(7).integers(TINY.vocab_size, size=150).tolist()


def logits(model):
    return oracles.forward(gqa_jax.gather(model.params, model.config), TOKENS, model.config)


def edited(model, edit):
    """The model with each layer's weights changed by `edit(weights, attention record, layer)`, on float64 copies."""
    layers = []
    for layer, weights in enumerate(model.params["layers"]):
        wide = {name: np.array(x, np.float64) for name, x in weights.items()}
        edit(wide, model.config.layer_attention(layer), layer)
        layers.append({name: jax.numpy.asarray(x.astype(np.float32)) for name, x in wide.items()})
    return model._replace(params=model.params | {"layers": tuple(layers)})


def copied(merged, turn=None):
    """An edit that makes the heads of each group copies of its first, each turned by `turn(rng, H, rope)` for K and for V."""

    def edit(weights, how, layer):
        rng = np.random.default_rng(layer)
        for name in "kv":
            heads, H = weights[f"attention.{name}"].shape[-2:]
            for head in range(heads):
                by = np.eye(H) if turn is None or head % merged == 0 else turn(rng, H, how.rope if name == "k" else None)
                for own in (f"attention.{name}", f"attention.{name}_bias"):
                    if own in weights:
                        weights[own][..., head, :] = weights[own][..., head - head % merged, :] @ by

    return edit


def a_turn(rng, H, rope):
    """A random orthogonal matrix that commutes with the rotary embedding, for rows on its left."""
    if rope is None:
        return np.linalg.qr(rng.standard_normal((H, H)))[0]
    by = np.zeros((H, H))
    for pair, angle in enumerate(rng.uniform(-3, 3, H // 2)):
        a, b = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + H // 2)
        by[a, a], by[a, b], by[b, a], by[b, b] = math.cos(angle), math.sin(angle), -math.sin(angle), math.cos(angle)
    return by


def turned(weights, how, layer):
    """Turns keys with their queries, and values with W_o: another basis for the same model."""
    rng = np.random.default_rng(layer)
    _, heads, _, H = weights["attention.q"].shape
    for head in range(heads):
        for readers, kind, rope in (("q", "k", how.rope), ("o", "v", None)):
            by = a_turn(rng, H, rope)
            for own in (f"attention.{kind}", f"attention.{kind}_bias"):
                if own in weights:
                    weights[own][..., head, :] = weights[own][..., head, :] @ by
            if readers == "q":
                for own in ("attention.q", "attention.q_bias"):
                    if own in weights:
                        weights[own][..., head, :, :] = weights[own][..., head, :, :] @ by
            else:
                weights["attention.o"][head] = by.T @ weights["attention.o"][head]


def assert_unchanged(found, expected, most=1e-6):
    np.testing.assert_allclose(found, expected, rtol=0, atol=most * max(1.0, np.abs(expected).max()))


# What must not change


@every_config
@pytest.mark.parametrize("method", KEPT)
def test_equal_heads_become_one_and_nothing_changes(config, method):
    model = edited(made(config), copied(3))
    new, errors = convert(model, 2, method, calibration=TEXT)
    assert (new.config.num_kv_heads, new.config.num_heads) == (2, config.num_heads)
    assert_unchanged(logits(new), logits(model))
    assert max(max(layer) for layer in errors) < 1e-10


@every_config
@pytest.mark.parametrize("method", ["procrustes", "pca"])
def test_heads_that_are_turned_copies_of_each_other_become_one_where_the_mean_would_not_do(config, method):
    model = edited(made(config), copied(3, a_turn))
    new, errors = convert(model, 2, method, calibration=TEXT)
    assert_unchanged(logits(new), logits(model), 3e-6)
    assert max(max(layer) for layer in errors) < 1e-10
    mean, lost = convert(model, 2, "mean", calibration=TEXT)
    assert np.abs(logits(mean) - logits(model)).max() > 1e-2
    assert min(min(layer) for layer in lost) > 0.1


def test_heads_that_differ_in_size_alone_are_one_principal_direction():
    model = edited(made(TINY), copied(3, lambda rng, H, rope: rng.uniform(0.5, 2) * np.eye(H)))
    assert_unchanged(logits(convert(model, 2, "pca", calibration=TEXT).model), logits(model), 3e-6)
    assert convert(model, 2, "procrustes", calibration=TEXT).errors[0].v > 1e-3


@every_config
def test_another_basis_of_the_same_model_gives_the_same_conversion(config):
    model = made(config)
    other = edited(model, turned)
    assert_unchanged(logits(other), logits(model), 3e-6)
    one, two = (convert(x, 2, "pca", calibration=TEXT) for x in (model, other))
    assert_unchanged(logits(two.model), logits(one.model), 1e-4)
    np.testing.assert_allclose(two.errors, one.errors, rtol=1e-4)
    first, second = (logits(convert(x, 2, "mean").model) for x in (model, other))
    assert np.abs(first - second).max() > 1e-2


@pytest.mark.parametrize("method", METHODS)
def test_as_many_heads_are_the_same_weights(method):
    model = made(TINY)
    new, errors = convert(model, 6, method, calibration=TEXT)
    assert new.config == model.config
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), new.params, model.params))
    assert errors == ((0.0, 0.0),) * 2


@pytest.mark.parametrize("method", ["random", "pca"])
def test_dtypes_the_tokenizer_and_all_other_weights_stay(method):
    model = made(changed(TINY, qkv_bias=True), jax.numpy.bfloat16)._replace(tokenizer="its own")
    new = convert(model, 2, method, calibration=TEXT if method == "pca" else None).model
    assert new.tokenizer == "its own"
    wanted = decoder.param_shapes(new.config, jax.numpy.bfloat16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new.params) == jax.tree.map(lambda x: (x.shape, x.dtype), wanted)
    assert new.params["embedding"] is model.params["embedding"] or (new.params["embedding"] == model.params["embedding"]).all()
    assert (new.params["layers"][1]["mlp.up"] == model.params["layers"][1]["mlp.up"]).all()


# What each method makes


def test_the_mean_is_of_neighbours_and_keeps_the_lanes_apart():
    # Case A30: four heads of width 2, every row the head's own index.
    config = changed(TINY, model_dim=3, num_heads=4, num_kv_heads=4, head_dim=2, num_layers=1, qkv_bias=True)

    def index(weights, how, layer):
        for name in "kv":
            weights[f"attention.{name}"][:] = np.arange(4)[:, None]
            weights[f"attention.{name}_bias"][:] = np.arange(4)[:, None]

    model = edited(made(config), index)
    weights = convert(model, 2).model.params["layers"][0]
    for name in "kv":
        np.testing.assert_array_equal(weights[f"attention.{name}"].reshape(3, 4), [[0.5, 0.5, 2.5, 2.5]] * 3)
        np.testing.assert_array_equal(weights[f"attention.{name}_bias"].reshape(4), [0.5, 0.5, 2.5, 2.5])
    old = model.params["layers"][0]
    np.testing.assert_array_equal(weights["attention.q"].reshape(3, 4, 2), old["attention.q"].reshape(3, 4, 2))
    np.testing.assert_array_equal(weights["attention.o"].reshape(4, 2, 3), old["attention.o"].reshape(4, 2, 3))
    one = convert(model, 1).model.params["layers"][0]
    np.testing.assert_array_equal(one["attention.k"], np.full((3, 1, 2), 1.5))


def test_the_first_of_each_group_is_kept_bit_by_bit():
    model = made(changed(TINY, qk_norm=True))
    weights, old = convert(model, 2, "first").model.params["layers"][1], model.params["layers"][1]
    np.testing.assert_array_equal(weights["attention.k"], old["attention.k"][:, ::3])
    np.testing.assert_array_equal(weights["attention.v"], old["attention.v"][:, ::3])


def test_random_heads_follow_the_seed():
    model = made(CONFIGS["two, biases"])
    draws = [convert(model, 2, "random", seed=seed).model.params["layers"] for seed in (1, 1, 2**32 - 1)]
    keys = [layers[0]["attention.k"] for layers in draws]
    np.testing.assert_array_equal(keys[0], keys[1])
    assert np.abs(keys[0] - keys[2]).max() > 0.1
    assert np.abs(draws[0][1]["attention.k"] - keys[0]).max() > 0.1
    assert not draws[0][0]["attention.k_bias"].any()
    np.testing.assert_array_equal(
        draws[0][0]["attention.q"].reshape(20, 12, 8), model.params["layers"][0]["attention.q"].reshape(20, 12, 8)
    )


def lost(method, z, width):
    """The share of z "T K P W" that is lost, lane by lane: principal directions as eigenvectors, in groups of three heads."""
    left = 0.0
    for head, lane in np.ndindex(z.shape[1] // 3, z.shape[2]):
        old = z[:, 3 * head : 3 * head + 3, lane]
        if method == "mean":
            back = np.repeat(old.mean(axis=1, keepdims=True), 3, axis=1)
        elif method == "first":
            back = np.repeat(old[:, :1], 3, axis=1)
        else:
            flat = old.reshape(len(z), -1)
            along = np.linalg.eigh(sum(np.outer(row, row.conj()) for row in flat))[1][:, -width:]
            back = np.stack([along @ (along.conj().T @ row) for row in flat]).reshape(old.shape)
        left += (np.abs(old - back) ** 2).sum()
    return left / (np.abs(z) ** 2).sum()


@pytest.mark.parametrize("method", ["mean", "first", "pca"])
def test_what_is_lost_is_what_the_formulas_lose(method):
    # All queries alike and the rows of W_o orthogonal, so that no error weighs more than another.
    config = changed(TINY, num_layers=1, model_dim=48, context_length=len(TEXT))

    def alike(weights, how, layer):
        weights["attention.o"][:] = np.linalg.qr(weights["attention.o"].reshape(48, 48))[0].reshape(6, 1, 8, 48)
        weights["attention.q"][:] = weights["attention.q"][:, :1]

    model = edited(made(config), alike)
    weights = {name: np.asarray(x, np.float64) for name, x in model.params["layers"][0].items()}
    x = np.asarray(model.params["embedding"], np.float64)[TEXT]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * weights["attention.norm"]
    k, v = (np.einsum("TD,DKH->TKH", x, weights[f"attention.{name}"]) for name in "kv")
    expected = [lost(method, (k[..., :4] + 1j * k[..., 4:])[..., None], 1), lost(method, v[:, :, None], 8)]
    np.testing.assert_allclose(convert(model, 2, method, calibration=TEXT).errors[0], expected, rtol=1e-4)


def test_turning_loses_less_than_the_mean_and_principal_directions_lose_least():
    model = made(CONFIGS["two, biases"])
    first, mean, turned, principal = (
        np.mean(convert(model, 2, method, calibration=TEXT).errors, axis=0) for method in KEPT[1::-1] + KEPT[2:]
    )
    assert (principal < turned).all()
    assert (turned < mean).all()
    assert (mean < first).all()


@every_config
def test_principal_directions_spend_nothing_on_what_nothing_reads(config):
    def unread(weights, how, layer):
        for head in (1, 2, 3, 5):  # Of the group 0, 1, 2 the first is read, of 3, 4, 5 the second.
            weights["attention.q"][:, head] = 0
            weights["attention.o"][head] = 0
            if "attention.q_bias" in weights:
                weights["attention.q_bias"][head] = 0

    model = edited(made(config), unread)
    assert_unchanged(logits(convert(model, 2, "pca", calibration=TEXT).model), logits(model), 1e-4)
    assert np.abs(logits(convert(model, 2, "mean").model) - logits(model)).max() > 1e-2


@pytest.mark.parametrize("rope", [Rope(), None])
def test_principal_directions_read_an_orthonormal_part_of_the_old_heads(rope):
    rng = np.random.default_rng(3)
    K, P, M, W = (2, 4, 3, 1) if rope else (2, 1, 3, 8)

    def positive(*shape):
        x = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if rope else 0)
        return x.conj().swapaxes(-1, -2) @ x * 1e-4

    down, up, _ = heads.principal(positive(K, P, M * W, M * W), positive(K, P, M, W, W), rope)
    down, up = down.reshape(K, P, M * W, W), up.swapaxes(-3, -2).reshape(K, P, W, M * W)
    identity = np.broadcast_to(np.eye(W), (K, P, W, W))
    np.testing.assert_allclose(down.conj().swapaxes(-1, -2) @ down, identity, atol=1e-12)
    np.testing.assert_allclose(up @ down, identity, atol=1e-6)


def test_a_model_that_norms_its_keys_is_measured_with_the_norm():
    model = made(changed(TINY, qk_norm=True))
    new, errors = convert(model, 2, "first", calibration=TEXT)
    one = edited(model, copied(3))
    assert_unchanged(logits(new), logits(one))
    assert errors[0].k > 0.5
    assert convert(one, 2, "mean", calibration=TEXT).errors[1].k < 1e-10


# Texts


def surprise(model, rows):
    """The mean over rows of ids, each foreseen from those before it in its row."""
    found = []
    for row in rows:
        scores = oracles.forward(model.params, np.array([row]), model.config)[0, :-1]
        chances = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        found += [-chance[id] for chance, id in zip(chances, row[1:], strict=True)]
    return np.mean(found), len(found)


def test_the_nll_foresees_every_token_but_the_first_once():
    model = made(TINY)
    ids = TEXT[:46]
    rows = [ids[start : start + 7] for start in range(0, 44, 6)]
    assert [row[0] for row in rows[1:]] == [row[-1] for row in rows[:-1]]
    expected, foreseen = surprise(model, rows)
    assert foreseen == 45
    assert negative_log_likelihood(model, ids, length=7) == pytest.approx(expected, rel=1e-5)
    assert negative_log_likelihood(model, [TEXT[:5], TEXT[5:9]]) == pytest.approx(
        surprise(model, [TEXT[:5], TEXT[5:9]])[0], 1e-5
    )


def test_the_nll_of_a_model_that_knows_nothing_is_that_of_the_vocabulary():
    model = made(TINY)
    model.params["embedding"] *= 0
    assert negative_log_likelihood(model, TEXT) == pytest.approx(math.log(53), rel=1e-6)


def test_a_beginning_that_a_tokenizer_puts_comes_before_each_row(monkeypatch):
    tokenizer = from_gguf(byte_level(bos_token_id=256, add_bos_token=True))
    model = made(changed(TINY, vocab_size=tokenizer.vocab_size))._replace(tokenizer=tokenizer)
    rows = [[256, *b"abcdef"], [256, *b"ghij"]]
    assert tokenizer.encode("abc")[0] == 256
    given = [[256, *b"abcdefghij"], list(b"abcdefghij")]
    for ids in given:
        found = [batch.tokens[0, : batch.count[0]].tolist() for batch in batches(model, ids, 7)]
        assert found == rows
    assert negative_log_likelihood(model, given[1], length=7) == pytest.approx(surprise(model, rows)[0], rel=1e-5)


# Meshes


def test_a_model_on_a_mesh_is_converted_where_it_lies():
    model = made(changed(TINY, num_heads=6, num_kv_heads=3, qkv_bias=True))
    texts = [TEXT, TEXT[:70]]
    expected, errors = convert(model, 1, "pca", calibration=texts)
    mesh = gqa_jax.make_mesh(model.config, tp=2)
    placed = model._replace(params=gqa_jax.place(model.params, model.config, mesh))
    new, found = convert(placed, 1, "pca", calibration=texts)
    assert new.placement == mesh
    np.testing.assert_allclose(found, errors, rtol=1e-4)
    assert_unchanged(logits(new), logits(expected), 1e-4)
    assert negative_log_likelihood(new, texts) == pytest.approx(negative_log_likelihood(expected, texts), rel=1e-4)


def test_a_text_is_read_on_a_mesh_that_cuts_rows_and_slots():
    model = made(changed(TINY, num_heads=6, num_kv_heads=3, qkv_bias=True))
    mesh = gqa_jax.make_mesh(model.config, tp=4, data=2, policy="split")
    placed = model._replace(params=gqa_jax.place(model.params, model.config, mesh))
    found, expected = (convert(x, 1, "mean", calibration=TEXT).errors for x in (placed, model))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_mesh_of_explicit_axes_reads_the_same_text():
    model = made(TINY)
    mesh = jax.make_mesh((2, 2), ("data", "kv"), axis_types=(AxisType.Explicit,) * 2)
    placed = model._replace(params=gqa_jax.place(model.params, model.config, gqa_jax.Placement(mesh, group=())))
    assert negative_log_likelihood(placed, TEXT) == pytest.approx(negative_log_likelihood(model, TEXT), rel=1e-5)
    new = convert(placed, 2, "pca", calibration=TEXT)
    np.testing.assert_allclose(new.errors, convert(model, 2, "pca", calibration=TEXT).errors, rtol=1e-4)


# Refusals


@pytest.mark.parametrize(
    ("config", "heads", "method", "text", "message"),
    [
        (TINY, 4, "mean", None, r"num_kv_heads is 4; the model's 6 KV heads can become 1, 2, 3, 6\."),
        (TINY, 0, "mean", None, "num_kv_heads is 0; it must be at least 1 and at most 6"),
        (TINY, 12, "mean", None, "num_kv_heads is 12; it must be at least 1 and at most 6"),
        (TINY, 1.5, "mean", None, "num_kv_heads is 1.5; it must be a whole number"),
        (TINY, 2, "median", None, "The method is 'median'; it must be one of mean, first, random, procrustes, pca"),
        (TINY, 2, "pca", None, "pca reads a text .*; give it as calibration"),
        (TINY, 2, "procrustes", TEXT[:23], "The text has 23 tokens; procrustes needs at least 24"),
        (TINY, 2, "mean", [7], "The text has fewer than 2 tokens"),
        (TINY, 2, "pca", [53], "the id 53"),
        (changed(TINY, qk_norm=True), 2, "pca", TEXT, r"norms its keys .* take 'mean' or 'first'"),
    ],
)
def test_what_cannot_be_converted_is_refused(unchecked, config, heads, method, text, message):
    with pytest.raises(ValueError, match=message):
        convert(made(config), heads, method, calibration=text)


def test_a_seed_beyond_32_bits_is_refused():
    with pytest.raises(ValueError, match="seed is 4294967296; it must be at least 0 and at most 4294967295"):
        convert(made(TINY), 2, "random", seed=2**32)


def test_a_row_of_one_token_is_refused():
    with pytest.raises(ValueError, match="The length is 1; it must be at least 2"):
        negative_log_likelihood(made(TINY), TEXT, length=1)


# Folders and the command


@pytest.fixture
def folder(tmp_path):
    """A model with a tokenizer, and two texts."""
    tokenizer = from_gguf(byte_level(bos_token_id=256, eos_token_id=257))
    gqa_jax.save(made(changed(TINY, vocab_size=tokenizer.vocab_size))._replace(tokenizer=tokenizer), tmp_path / "model")
    (tmp_path / "text").write_text("In the beginning was the word. " * 20, encoding="utf-8")
    (tmp_path / "other").write_text("And the word was of two tokens.", encoding="utf-8")
    return tmp_path


def test_a_converted_model_is_saved_and_loaded(folder):
    new = convert(gqa_jax.load(folder / "model"), 2, "pca", calibration="In the beginning was the word.").model
    gqa_jax.save(new, folder / "new")
    again = gqa_jax.load(folder / "new")
    assert again.config.num_kv_heads == 2
    np.testing.assert_array_equal(logits(again), logits(new))
    assert again.tokenizer.encode("word") == new.tokenizer.encode("word")


@pytest.fixture
def run(capsys):
    def run(*arguments):
        try:
            code = main(["convert", *map(str, arguments)])
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


def test_the_command_converts_measures_and_writes(run, folder):
    how = ["--num-kv-heads", 2, "--calibration", folder / "text", "--calibration-tokens", 300, "--out", folder / "new"]
    code, out, err = run(folder / "model", *how, "--json")
    facts = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert (facts["method"], facts["kv_heads"]) == ("pca", [6, 2])
    assert (facts["calibration_tokens"], facts["evaluation_tokens"]) == (300, 320)
    assert facts["cache_bytes_per_token"] == [2 * 2 * heads * 8 * 4 for heads in (6, 2)]
    assert facts["evaluation"].endswith("text, behind the calibration tokens")
    ids = list(("In the beginning was the word. " * 20).encode())[300:]
    models = [gqa_jax.load(folder / name) for name in ("model", "new")]
    # The alphabet of the tokenizer is sorted, so that a byte is not its own id.
    ids = models[0].tokenizer.encode("In the beginning was the word. " * 20)[300:]
    assert facts["nll"] == pytest.approx([negative_log_likelihood(model, ids) for model in models], rel=1e-5)
    assert len(facts["errors"]) == 2


def test_the_command_says_what_it_did(run, folder):
    code, out, err = run(folder / "model", "--num-kv-heads", 1, "--evaluation", folder / "other", "--out", folder / "new")
    assert (code, err) == (0, "")
    assert "6 KV heads become 1 by mean" in out
    assert "nats per token" in out
    assert "measured on 31 tokens of" in out
    assert "cache 768 B per token before, 128 B after" in out
    code, out, err = run(folder / "model", "--num-kv-heads", 2, "--calibration", folder / "text", "--out", folder / "other new")
    assert code == 0
    assert "share of K and V that is lost, by layer" in out
    assert "calibrated with 465 tokens" in out
    assert gqa_jax.load(folder / "other new").config.num_kv_heads == 2
    code, out, err = run(folder / "model", "--num-kv-heads", 2, "--out", folder / "third")
    assert "NLL was not measured" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--num-kv-heads": 4}, "can become 1, 2, 3, 6."),
        ({"--num-kv-heads": 0}, "0 is less than 1"),
        ({"--method": "pca"}, "pca reads a text"),
        ({"--method": "best"}, "invalid choice: 'best'"),
        ({"--calibration": "no such file"}, "no such file cannot be read as a text in UTF-8"),
        ({"--calibration": "model/model.safetensors"}, "cannot be read as a text in UTF-8"),
        ({"--calibration": "other", "--num-kv-heads": 1}, "The text has 23 tokens; pca needs at least 48"),
        ({"--out": "model"}, "is there already, and is no empty folder"),
    ],
)
def test_misuse_ends_with_two_before_anything_is_written(run, folder, monkeypatch, change, message):
    monkeypatch.chdir(folder)
    how = {"--num-kv-heads": 2, "--out": "new"} | change
    code, out, err = run("model", *(word for pair in how.items() for word in pair))
    assert (code, out) == (2, "")
    assert message in err
    assert not (folder / "new").exists()


def test_the_command_knows_every_method():
    assert commands.convert.METHODS == METHODS
