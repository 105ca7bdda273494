"""Logits, likelihood and greedy continuations of two real models, against values recorded from Hugging Face transformers.

`tests/golden/record.py` made the JSON files.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gqa_jax

GOLDEN = pathlib.Path(__file__).parent / "golden"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def golden(name):
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model(name, request):
    return request.getfixturevalue(name)


@pytest.fixture(scope="module")
def logits(golden, model):
    tokens = jnp.asarray([golden["ids"]], jnp.int32)
    return gqa_jax.forward(model.params, tokens, None, model.config)[0][0]


def test_logits_at_the_recorded_positions_are_those_of_transformers(golden, logits):
    rows = logits[jnp.asarray(golden["positions"])]
    top = jnp.take_along_axis(rows, jnp.asarray(golden["top_ids"]), axis=1)
    probes = rows[:, jnp.asarray(golden["probe_ids"])]
    np.testing.assert_allclose(top, golden["top_logits"], rtol=0, atol=2e-3)
    np.testing.assert_allclose(probes, golden["probe_logits"], rtol=0, atol=2e-3)
    np.testing.assert_allclose(jax.nn.logsumexp(rows, axis=1), golden["logsumexp"], rtol=0, atol=2e-3)


def test_no_other_token_outranks_the_recorded_top_eight(golden, logits):
    rows = np.array(logits[jnp.asarray(golden["positions"])])
    np.put_along_axis(rows, np.asarray(golden["top_ids"]), -np.inf, axis=1)
    eighth = np.asarray(golden["top_logits"])[:, -1]
    assert (rows.max(axis=1) < eighth + 4e-3).all()


def test_the_mean_likelihood_of_the_text_is_that_of_transformers(golden, logits):
    following = jnp.asarray(golden["ids"][1:])
    losses = jax.nn.logsumexp(logits[:-1], axis=1) - jnp.take_along_axis(logits[:-1], following[:, None], axis=1)[:, 0]
    assert float(losses.mean()) == pytest.approx(golden["nll"], abs=1e-3)


def test_prompts_of_different_lengths_continue_greedily_as_in_transformers(golden, model):
    runs = golden["greedy"]
    made = gqa_jax.generate(model, [run["prompt_ids"] for run in runs], max_new_tokens=64, stop=())
    assert made.ids == [run["ids"] for run in runs]


def test_text_is_the_same_alone_in_a_batch_in_chunks_and_without_a_cache(smollm2, monkeypatch, quick_compilation):
    prompts = [run["prompt"] for run in json.loads((GOLDEN / "smollm2.json").read_text(encoding="utf-8"))["greedy"]]
    batch = gqa_jax.generate(smollm2, prompts, max_new_tokens=12)
    assert gqa_jax.generate(smollm2, prompts, max_new_tokens=12, use_cache=False).text == batch.text
    monkeypatch.setattr(sys.modules["gqa_jax.generate"], "PROMPT_CHUNK", 7)
    assert gqa_jax.generate(smollm2, prompts, max_new_tokens=12).text == batch.text
    assert [gqa_jax.generate(smollm2, prompt, max_new_tokens=12).text[0] for prompt in prompts] == batch.text


@pytest.mark.parametrize("prompt", ["🙂", "日本の首都は", "Halo 👋🏽", "🙂" * 20])
def test_a_prompt_that_ends_in_the_middle_of_a_piece_leaves_no_trace_in_the_text(smollm2, prompt):
    made = gqa_jax.generate(smollm2, prompt, max_new_tokens=4, stop=())
    assert made.text == [smollm2.tokenizer.decode(made.ids[0])]
    stream = gqa_jax.generate(smollm2, prompt, max_new_tokens=4, stop=(), stream=True)
    assert "".join(stream) == made.text[0]
