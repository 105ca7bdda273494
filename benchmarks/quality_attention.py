"""What the last word of a sentence attends to, with 3 KV heads and converted to 1."""

import dataclasses
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import gqa_jax
from benchmarks.quality_study import Study, check, original, parts
from gqa_jax.convert import convert
from gqa_jax.decoder import hidden_states
from gqa_jax.rope import angles, rotate

SENTENCE = "The artist painted the portrait of a woman with a brush"


def answer(study: Study) -> dict[str, Any]:
    """Looks at the layer whose heads differ most within their groups; how much, counts half the sum of |a - b| of two rows."""
    model = original(study)
    calibration, _, _ = parts(study, model)
    ids = model.tokenizer.encode(SENTENCE)
    shown = {"3 KV heads": model}
    for method in ("mean", "pca"):
        shown[f"1 KV head, {method}"] = convert(model, 1, method, calibration=calibration).model
    layers = range(1, model.config.num_layers)
    differ = {name: [difference(attended(one, ids, layer)) for layer in layers] for name, one in shown.items()}
    layer = layers[int(np.argmax(differ["3 KV heads"]))]
    weights = {name: attended(one, ids, layer).tolist() for name, one in shown.items()}
    found = {
        "sentence": SENTENCE,
        "tokens": [model.tokenizer.decode([id]) for id in ids],
        "layer": layer,
        "difference": {name: {"here": own[layer - 1], "all layers": statistics.mean(own)} for name, own in differ.items()},
        "weights": weights,
    }
    study.keep("attention", found)
    return found


def attended(model: gqa_jax.Model, ids: list[int], layer: int) -> np.ndarray:
    """Returns what the last token reads of each token in a layer behind the first, for the K G query heads: "K G S"."""
    config, own = model.config, model.params["layers"][layer]
    # A model that ends before this layer, with its norm as the last, gives what its attention is given.
    before = model.params | {"layers": model.params["layers"][:layer], "norm": own["attention.norm"]}
    x, _ = hidden_states(before, jnp.array([ids]), None, dataclasses.replace(config, num_layers=layer))
    q = jnp.einsum("D,DKGH->KGH", x[0, -1], own["attention.q"])
    k = jnp.einsum("SD,DKH->KSH", x[0], own["attention.k"])
    turn = angles(config.layer_attention(layer).rope, config.head_dim, jnp.arange(len(ids)))
    q = rotate(q[:, :, None], turn[-1:])[:, :, 0]
    k = rotate(k, turn)
    weights = np.asarray(jax.nn.softmax(jnp.einsum("KGH,KSH->KGS", q, k) * config.head_dim**-0.5))
    check(np.allclose(weights.sum(axis=-1), 1, atol=1e-5), "attention sums to one")
    return weights


def difference(weights: np.ndarray) -> float:
    """Returns how far apart two query heads of one group are: 0 where they read alike, 1 where nothing is read by both."""
    G = weights.shape[1]
    apart = np.abs(weights[:, :, None] - weights[:, None]).sum(axis=-1) / 2
    return float(apart.sum() / (len(weights) * G * (G - 1)))


def show(console: Console, found: dict[str, Any]) -> None:
    table = Table(title=f"How far apart the heads of one group read, 0 to 1, in layer {found['layer']}", title_justify="left")
    for column in ("", "in this layer", "mean of layers"):
        table.add_column(column, justify="left" if not column else "right")
    for name, one in found["difference"].items():
        table.add_row(name, f"{one['here']:.3f}", f"{one['all layers']:.3f}")
    console.print(table)
