"""SmolLM2 converted from 3 KV heads to 1 by each method, before and while it is trained on: held-out loss."""

import math
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

import gqa_jax
from benchmarks.quality_study import Study, check, counts, original, parts
from gqa_jax import data, train
from gqa_jax.convert import METHODS, convert, negative_log_likelihood
from gqa_jax.step import put, start, step

FIRST = ("mean", "pca", "first", "random", "procrustes")  # in this order they are trained on


def answer(study: Study) -> dict[str, Any]:
    """Converts a model by each method, measures it, and trains it on, all with the same rows in the same order."""
    model, recipe = original(study), study.budget.uptraining
    calibration, learnt, held = parts(study, model)
    told = {
        "text": study.text.source,
        "steps": recipe.steps,
        "tokens_per_step": recipe.batch * recipe.length,
        "learning_rate": recipe.learning_rate,
        "kv_heads": [model.config.num_kv_heads, 1],
        "calibration_tokens": sum(map(len, calibration)),
        "held_tokens": sum(map(len, held)),
    }
    found = {"budget": told, "original": negative_log_likelihood(model, held), "runs": study.runs("conversion", told)}
    study.console.print(f"the original: NLL {found['original']:.3f}")
    have = {run["method"]: run for run in found["runs"]}
    converted = {}
    for method in METHODS:
        if method in have and have[method]["steps"][-1] == recipe.steps:
            continue
        converted[method] = convert(
            model, 1, method, calibration=calibration if method in ("procrustes", "pca") else None
        ).model
        if method not in have:
            found["runs"].append({"method": method, **counts(converted[method]), "steps": [], "nll": []})
            measure(study, found, found["runs"][-1], converted[method], 0, held)
    for run in sorted(found["runs"], key=lambda run: FIRST.index(run["method"])):
        if (own := converted.pop(run["method"], None)) is not None:
            run["steps"], run["nll"] = run["steps"][:1], run["nll"][:1]
            for done, now in uptrained(own, learnt, recipe, study.budget.points):
                measure(study, found, run, now, done, held)
    return found


def measure(
    study: Study, found: dict[str, Any], run: dict[str, Any], model: gqa_jax.Model, done: int, held: list[list[int]]
) -> None:
    """Adds a point to the curve of a run, and keeps it."""
    run["steps"].append(done)
    run["nll"].append(negative_log_likelihood(model, held))
    study.console.print(f"{run['method']}, {done} steps: NLL {run['nll'][-1]:.3f}")
    check(math.isfinite(run["nll"][-1]), f"the NLL of {run['method']} is finite")
    study.keep("conversion", found)


def uptrained(
    model: gqa_jax.Model, learnt: data.Texts, recipe: train.Recipe, points: int
) -> Iterator[tuple[int, gqa_jax.Model]]:
    """Yields the number of steps and the model as it is then, so many times on the way to the last."""
    rows = data.Rows(learnt, recipe.length, recipe.batch, recipe.seed)
    state = start(model.params, recipe)
    for done in range(1, recipe.steps + 1):
        state, _ = step(state, put(next(rows), recipe, None), model.config, recipe)
        if done % (recipe.steps // points) == 0:
            yield done, model._replace(params=state.params)


def show(console: Console, found: dict[str, Any]) -> None:
    table = Table(title=f"NLL, {found['original']:.3f} before the conversion", title_justify="left")
    table.add_column("steps")
    for steps in max((run["steps"] for run in found["runs"]), key=len):
        table.add_column(str(steps), justify="right")
    for run in found["runs"]:
        table.add_row(run["method"], *(f"{one:.3f}" for one in run["nll"]))
    console.print(table)
