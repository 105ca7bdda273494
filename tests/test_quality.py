import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gqa_jax
from benchmarks import quality_attention, quality_study, texts
from gqa_jax import decoder
from gqa_jax.layer import self_attention

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def model():
    config = gqa_jax.Config(
        vocab_size=23, num_layers=3, model_dim=20, mlp_dim=11, num_heads=6, num_kv_heads=2, head_dim=4, context_length=64
    )
    return gqa_jax.Model(config, gqa_jax.init_params(config, jax.random.key(0)))


def test_what_the_picture_shows_is_what_the_layer_reads(model):
    ids, layer, config = [3, 1, 4, 1, 5, 9, 2], 2, model.config
    shown = quality_attention.attended(model, ids, layer)
    np.testing.assert_allclose(shown.sum(axis=-1), 1, atol=1e-6)
    # Of the values, these shares make what the layer itself gives the last token.
    own = model.params["layers"][layer]
    before = model.params | {"layers": model.params["layers"][:layer], "norm": own["attention.norm"]}
    x, _ = decoder.hidden_states(before, jnp.array([ids]), None, dataclasses.replace(config, num_layers=layer))
    v = np.einsum("SD,DKH->SKH", x[0], own["attention.v"])
    expected = np.einsum("KGS,SKH,KGHD->D", shown, v, own["attention.o"])
    got, _ = self_attention(x, own, None, config)
    np.testing.assert_allclose(got[0, -1], expected, atol=1e-5)


def test_heads_that_read_alike_do_not_differ():
    alike = np.full((2, 3, 5), 1 / 5)
    assert quality_attention.difference(alike) == 0
    assert quality_attention.difference(np.eye(3)[None]) == 1


def test_the_models_have_as_many_parameters():
    sizes = [quality_study.counts(quality_study.small(quality_study.QUICK, heads, 0))["parameters"] for heads in (8, 2, 1)]
    assert max(sizes) < 1.01 * min(sizes)


def test_documents_are_held_out_whole(tmp_path):
    files = [tmp_path / f"{number}.txt" for number in range(39)]
    for number, file in enumerate(files):
        file.write_text(f"document {number:02}" * 10)
    text = texts.read([str(file) for file in files])
    assert len(text.held) == 2
    assert len({*text.train, *text.held}) == 39
    assert texts.read([str(file) for file in reversed(files)]).held == text.held


def test_finished_runs_of_another_budget_are_not_taken_for_this_one():
    result = {"models": {"budget": {"steps": 3, "heads": [8]}, "runs": [{"seed": 0}]}}
    study = quality_study.Study(
        texts.Text("", [], []), quality_study.QUICK, json.loads(json.dumps(result)), lambda *_: None, None
    )
    assert study.runs("models", {"steps": 3, "heads": (8,)}) == [{"seed": 0}]
    assert study.runs("models", {"steps": 4, "heads": (8,)}) == []
    assert study.runs("conversion", {}) == []
