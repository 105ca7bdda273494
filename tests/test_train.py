"""Training: the loss against an oracle, and a step that is the same however it is cut, packed, recomputed or spread.

Weights are random everywhere, so that no bias, norm or padded head can be left out, doubled or brought to life unseen.
"""

import functools
import itertools
import json
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import gqa_jax
from gqa_jax import data, decoder, train
from gqa_jax import loss as loss_room
from gqa_jax import step as step_room
from gqa_jax.config import Attention, Config
from gqa_jax.recipe import Recipe, decayed, learning_rates, optimizer
from gqa_jax.sharding import Placement
from gqa_jax.step import layout_of, put, start, step
from tests import oracles

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = Config(
    vocab_size=13,
    num_layers=2,
    model_dim=10,
    mlp_dim=7,
    num_heads=9,
    num_kv_heads=3,
    head_dim=4,
    context_length=64,
    attention=(Attention(window=3), Attention(sinks=True)),
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    qk_norm=True,
    tied_head=False,
)
RECIPE = Recipe(steps=4, batch=4, length=8, learning_rate=0.02, warmup=1, save_every=2)


@functools.cache
def weights() -> decoder.Params:
    rng = np.random.default_rng(1)

    def make(path, leaf):
        one = float(path[-1].key.endswith("norm"))
        return (one + 0.3 * rng.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(make, decoder.param_shapes(CONFIG))


def model(mesh=None) -> gqa_jax.Model:
    params = jax.tree.map(jnp.asarray, weights())
    return gqa_jax.Model(CONFIG, params if mesh is None else gqa_jax.place(params, CONFIG, mesh))


@functools.cache
def texts() -> data.Texts:
    rng = np.random.default_rng(2)
    return data.texts_of([rng.integers(0, 13, rng.integers(2, 20)) for _ in range(9)])


def meshes(name: str) -> Placement:
    """Tensor parallelism that pads KV heads, and queries of a group too, copies of the weights, a mesh of one's own."""
    if name == "explicit":
        grid = np.array(jax.devices()[:4]).reshape(2, 2)
        return Placement(Mesh(grid, ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2), data="dp", kv="tp", group=())
    sizes = {"tp 2": (2, 1), "tp 2, data 2": (2, 2), "tp 8": (8, 1)}
    return gqa_jax.make_mesh(CONFIG, tp=sizes[name][0], data=sizes[name][1])


TRACES = {}


@functools.cache
def trained(recipe: Recipe = RECIPE, mesh: str | None = None) -> train.Trained:
    with mock.patch.object(step_room, "loss", side_effect=loss_room.loss) as traced:
        found = train.train(model(mesh and meshes(mesh)), texts(), recipe)
    TRACES[recipe, mesh] = traced.call_count
    return found


def close(got, want, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=tolerance, atol=tolerance)


def close_weights(got: gqa_jax.Model, want: gqa_jax.Model, tolerance: float) -> None:
    jax.tree.map(lambda a, b: close(a, b, tolerance), *(gqa_jax.gather(one.params, CONFIG) for one in (got, want)))


# The loss


def packed(*rows: list[list[int]], length: int = 8) -> data.Batch:
    tokens, segments = np.zeros((2, len(rows), length), np.int32)
    for row, parts in enumerate(rows):
        ids = np.concatenate(parts)
        tokens[row, : ids.size] = ids
        segments[row, : ids.size] = np.repeat(np.arange(1, len(parts) + 1), [len(part) for part in parts])
    return data.Batch(tokens, segments)


ROWS = ([[5, 7, 11], [2, 3, 3, 1, 9]], [[4], [6, 6, 12, 0]], [[1, 2, 3, 4, 5, 6, 7, 8]])


def missed(text: list[int]) -> float:
    """The summed negative log-likelihood of a text alone, by loops in float64."""
    scores = oracles.forward(weights(), np.array([text]), CONFIG)[0]
    return sum(np.log(np.exp(scores[t]).sum()) - scores[t, text[t + 1]] for t in range(len(text) - 1))


@jax.jit
def loss_and_gradient(params, batch):
    return jax.value_and_grad(lambda params: train.loss(params, *batch, CONFIG), has_aux=True)(params)


def test_the_loss_of_packed_rows_is_that_of_each_text_alone():
    (total, count), _ = loss_and_gradient(weights(), packed(*ROWS))
    assert (total.dtype, count) == (np.float32, 2 + 4 + 0 + 3 + 7)
    close(total, sum(missed(text) for row in ROWS for text in row))


def test_without_segments_each_row_is_one_text():
    row = ROWS[2][0]
    total, count = jax.jit(train.loss, static_argnums=3)(weights(), np.array([row]), None, CONFIG)
    assert count == 7
    close(total, missed(row))


def test_padding_has_no_part_in_loss_or_gradient():
    short, long = packed(*ROWS), packed(*ROWS, length=8)
    long.tokens[long.segments == 0] = 5
    (one, _), gradient = loss_and_gradient(weights(), short)
    (other, _), same = loss_and_gradient(weights(), long)
    assert one == other
    jax.tree.map(np.testing.assert_array_equal, gradient, same)


@pytest.mark.parametrize("most", [1, 3 * 13 * 3])
def test_scores_taken_in_parts_change_nothing(monkeypatch, most):
    want = loss_and_gradient(weights(), packed(*ROWS))
    monkeypatch.setattr(loss_room, "MOST_SCORES", most)
    got = jax.jit(lambda params, batch: loss_and_gradient.__wrapped__(params, batch))(weights(), packed(*ROWS))
    jax.tree.map(close, got, want)


@pytest.mark.parametrize("name", ["tp 2", "tp 2, data 2", "explicit"])
def test_the_gradient_on_a_mesh_is_that_of_one_device_biases_too(name):
    batch = packed(*ROWS, ROWS[0])
    want = loss_and_gradient(weights(), batch)
    params = model(meshes(name)).params
    got = loss_and_gradient(params, batch)
    jax.tree.map(close, got[0], want[0])
    jax.tree.map(close, gqa_jax.gather(got[1], CONFIG), want[1])


@pytest.mark.parametrize("name", [None, "tp 2, data 2"])
def test_the_mean_loss_of_all_texts_is_taken_without_training(name):
    ends = [0, *texts().ends]
    rows = [texts().tokens[a:b].tolist() for a, b in itertools.pairwise(ends)][:5]
    want = sum(map(missed, rows)) / sum(len(row) - 1 for row in rows)
    close(train.evaluate(model(name and meshes(name)), data.texts_of(rows), length=64, batch=2), want)


# A step


def test_parts_of_a_step_add_up_to_the_whole():
    parts = trained(Recipe(**{**vars(RECIPE), "accumulate": 2}))
    close(parts.losses, trained().losses)
    close_weights(parts.model, trained().model, 1e-4)


def test_layers_computed_anew_change_nothing():
    anew = trained(Recipe(**{**vars(RECIPE), "remat": True}))
    close(anew.losses, trained().losses)
    close_weights(anew.model, trained().model, 1e-4)


@pytest.mark.parametrize("name", ["tp 2, data 2", "tp 8", "explicit"])
def test_training_on_a_mesh_is_training_on_one_device(name):
    found = trained(mesh=name)
    close(found.losses, trained().losses, 1e-4)
    close_weights(found.model, trained().model, 1e-3)
    assert found.model.placement == meshes(name)


def test_padded_heads_stay_zero_and_moments_lie_where_their_weights_lie():
    params = model(meshes("tp 8")).params
    state = start(params, RECIPE)
    batch = put(next(data.Rows(texts(), 8, 4)), RECIPE, params["placement"])
    for _ in range(3):
        state, _ = step(state, batch, CONFIG, RECIPE, layout_of(state))
    for tree in (state.params, state.optimizer[1][0].mu, state.optimizer[1][0].nu):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            assert leaf.sharding.is_equivalent_to(dict(jax.tree_util.tree_leaves_with_path(params))[path].sharding, leaf.ndim)
        query = np.asarray(tree["layers"][0]["attention.q"])
        assert query.shape == (10, 4, 4, 4)
        assert not query[:, 3:].any()
        assert not query[:, :, 3:].any()
        assert query[:, :3, :3].all()


def test_bfloat16_computes_and_float32_remembers():
    half = Recipe(**{**vars(RECIPE), "compute_dtype": "bfloat16", "learning_rate": 1e-4})
    state = start(weights(), half)
    batch = put(next(data.Rows(texts(), 8, 4)), half, None)
    text = step.lower(state, batch, CONFIG, half).as_text()
    assert "tensor<4x8x10xbf16>" in text
    before = jax.tree.map(np.asarray, state.params)
    state, found = step(state, batch, CONFIG, half)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((state.params, state.optimizer))} == {"float32", "int32"}
    changed = np.asarray(state.params["embedding"]) - before["embedding"]
    assert 0 < np.abs(changed).max() < 2e-4  # Less than bfloat16 holds beside a number like 0.3.
    close(found.loss, trained().losses[0], 0.02)
    assert float(found.loss) != trained().losses[0]


def test_matrices_decay_and_what_shifts_or_scales_does_not():
    marked = decayed(weights())
    names = {path[-1].key: bool(mark) for path, mark in jax.tree_util.tree_leaves_with_path(marked)}
    assert {name for name, mark in names.items() if mark} == {
        *("embedding", "head", "mlp.gate", "mlp.up", "mlp.down"),
        *(f"attention.{name}" for name in "qkvo"),
    }
    how = optimizer(Recipe(learning_rate=0.5, weight_decay=0.1))

    @jax.jit
    def moved(params):
        with jax.numpy_dtype_promotion("standard"):
            return how.update(jax.tree.map(jnp.zeros_like, params), how.init(params), params)[0]

    jax.tree.map(lambda a, b, mark: close(a, -0.05 * b if mark else 0 * b), moved(weights()), weights(), marked)


def test_the_learning_rate_warms_up_in_equal_parts_and_falls_to_its_end():
    rates = learning_rates(Recipe(steps=9, warmup=3, learning_rate=0.4, final=0.25))
    found = [float(rates(number)) for number in range(10)]
    close(found[:4], [0.1, 0.2, 0.3, 0.4])
    close(found[6], 0.25)
    close(found[9], 0.1)
    assert float(learning_rates(Recipe(steps=9, learning_rate=0.4))(0)) == pytest.approx(0.4)


def test_gradients_are_clipped_by_their_common_norm():
    how = optimizer(Recipe(learning_rate=1.0, weight_decay=0.0, epsilon=1e3, clip=2.0, betas=(0.0, 0.0)))
    params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}

    @jax.jit
    def moved(a, b):
        gradients = {"a": a, "b": b}
        with jax.numpy_dtype_promotion("standard"):
            return how.update(gradients, how.init(params), params)[0]

    update = moved(jnp.array([3.0, 0.0]), jnp.array([4.0]))  # Of norm 5, so 2/5 of it is left.
    close(update["a"], [-1.2 / (1.2 + 1e3), 0], 1e-6)
    close(update["b"], [-1.6 / (1.6 + 1e3)], 1e-6)


def test_all_steps_are_one_trace():
    for mesh in (None, "tp 8"):
        trained(mesh=mesh)
        assert TRACES[RECIPE, mesh] <= 1
    with mock.patch.object(step_room, "loss", side_effect=loss_room.loss) as traced:
        train.train(model(), texts(), RECIPE)
    assert not traced.called


def test_the_model_that_is_given_stays_as_it_is():
    given = model()
    train.train(given, texts(), RECIPE)
    jax.tree.map(np.testing.assert_array_equal, given.params, weights())


# The loop


def test_every_step_is_reported_and_has_one_line(tmp_path):
    heard = []
    found = train.train(model(), texts(), RECIPE, tmp_path, report=heard.append)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [now.step for now in heard] == [1, 2, 3, 4]
    assert [line["loss"] for line in lines] == [now.loss for now in heard] == found.losses.tolist()
    assert lines == [now._asdict() for now in heard]
    assert lines[0]["tokens_per_second"] == pytest.approx(32 / lines[0]["seconds"])
    assert 0 < lines[0]["tokens"] < 32
    assert found.begun == 0
    np.testing.assert_array_equal(found.losses, trained().losses)


def test_a_loss_that_is_not_finite_stops_with_the_step_and_keeps_what_was_good(tmp_path, monkeypatch):
    real = step_room.step

    def spoilt(state, *rest):
        if int(state.step) == 2:
            state = jax.tree.map(lambda leaf: leaf * math.nan if leaf.ndim > 1 else leaf, state)
        return real(state, *rest)

    monkeypatch.setattr(train, "step", spoilt)
    with pytest.raises(train.DivergedError, match=r"Step 3 is not finite: the loss is nan"):
        train.train(model(), texts(), RECIPE, tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
    assert (tmp_path / "log.jsonl").read_text().count("\n") == 2
    monkeypatch.setattr(train, "step", real)
    again = train.train(model(), texts(), RECIPE, tmp_path, resume=True)
    np.testing.assert_array_equal(again.losses, trained().losses[2:])


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    far = Recipe(**{**vars(RECIPE), "learning_rate": 3e38, "warmup": 0, "weight_decay": 1e5, "save_every": 1})
    with pytest.raises(train.DivergedError, match=r"Step 1 is not finite: the loss is 2\."):
        train.train(model(), texts(), far, tmp_path)
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", 0, "steps is 0; it must be a whole number of at least 1"),
        ("batch", 2.0, "batch is 2.0; it must be a whole number"),
        ("length", 1, "length is 1; it must be a whole number of at least 2"),
        ("warmup", 4, "warmup is 4; it must be less than steps, 4"),
        ("accumulate", 3, "batch is 4; it must be a multiple of accumulate, 3"),
        ("learning_rate", 0.0, "learning_rate is 0.0; it must be above 0"),
        ("learning_rate", math.nan, "learning_rate is nan; it must be above 0"),
        ("clip", -1.0, "clip is -1.0; it must be above 0"),
        ("weight_decay", -0.1, "weight_decay is -0.1; it must be at least 0"),
        ("final", 1.5, "final is 1.5; it must be from 0 to 1"),
        ("betas", (0.9, 1.0), r"betas is \(0.9, 1.0\); it must be two numbers"),
        ("compute_dtype", "float16", "compute_dtype is 'float16'; known are float32, bfloat16"),
        ("seed", 2**32, "seed is 4294967296; it must be less than"),
        ("keep", 0, "keep is 0"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_recipe_that_means_nothing_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**{**vars(RECIPE), field: value})


def test_what_does_not_fit_the_model_is_refused():
    with pytest.raises(ValueError, match="length is 65; the model's context is 64"):
        train.train(model(), texts(), Recipe(length=65))
    with pytest.raises(ValueError, match="The texts hold the id 13; the vocabulary has 13"):
        train.train(model(), data.texts_of([[1, 13]]), RECIPE)
    with pytest.raises(ValueError, match="1 rows at a time do not divide over 2 copies of the weights"):
        train.train(model(meshes("tp 2, data 2")), texts(), Recipe(**{**vars(RECIPE), "accumulate": 4}))
