"""One small decoder trained from nothing with the same budget as MHA, GQA and MQA: held-out loss, bytes, milliseconds."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import gqa_jax
from benchmarks.quality_study import HEADS, Budget, Study, by, check, counts, label, small, tokenised
from benchmarks.timing import interleave, spread
from gqa_jax import cache as kv
from gqa_jax import train


def answer(study: Study) -> dict[str, Any]:
    """Trains each kind from each seed, and times decoding side by side."""
    words, learnt, held = tokenised(study)
    budget, recipe = study.budget, study.budget.training
    told = {
        "text": study.text.source,
        "vocabulary": budget.vocabulary,
        "steps": recipe.steps,
        "tokens_per_step": recipe.batch * recipe.length,
        "learning_rate": recipe.learning_rate,
        "layers": budget.layers,
        "model_dim": budget.model_dim,
        "heads": HEADS,
        "held_tokens": held.identity["tokens"],
    }
    found = {"budget": told, "runs": study.runs("models", told), "decode": None}
    for seed, heads in itertools.product(range(budget.seeds), budget.kv_heads):
        if any((run["seed"], run["kv_heads"]) == (seed, heads) for run in found["runs"]):
            continue
        model = small(budget, heads, seed, words)
        trained = train.train(model, learnt, dataclasses.replace(recipe, seed=seed))
        loss = train.evaluate(trained.model, held, length=recipe.length, batch=recipe.batch)
        check(math.isfinite(loss) and trained.losses[-1] < trained.losses[0], f"the loss falls: {trained.losses}")
        found["runs"].append({"kv_heads": heads, "seed": seed, **counts(model), "held_out_loss": loss})
        study.console.print(f"{label(heads)}, seed {seed}: held-out loss {loss:.3f}")
        study.keep("models", found)
    sizes = [run["parameters"] for run in found["runs"]]
    check(max(sizes) < 1.01 * min(sizes), f"all models have as many parameters: {sizes}")
    found["decode"] = decode_times(budget)
    study.keep("models", found)
    return found


def decode_times(budget: Budget) -> dict[str, Any]:
    """Times the decode loop of each kind on rows that hold so many tokens, in turn."""
    models_of = {str(heads): small(budget, heads, 0) for heads in budget.kv_heads}
    room = budget.filled + budget.new + 1
    caches = {}
    for name, model in models_of.items():
        empty = kv.init_cache(model.config, budget.rows, room)
        caches[name] = dataclasses.replace(empty, length=jnp.full(budget.rows, budget.filled, jnp.int32))

    def job(name: str) -> Callable[[], float]:
        def run() -> float:
            prompts = [[1]] * budget.rows
            made = gqa_jax.generate(models_of[name], prompts, max_new_tokens=budget.new, stop=(), cache=caches[name])
            caches[name] = kv.rewind(made.cache, jnp.int32(budget.filled))
            return made.stats.decode_seconds / budget.new

        return run

    seconds = interleave({name: job(name) for name in models_of}, budget.rounds)
    milliseconds = {name: [1e3 * one for one in values] for name, values in seconds.items()}
    return {"filled": budget.filled, "rows": budget.rows, "milliseconds": milliseconds}


def show(console: Console, found: dict[str, Any]) -> None:
    table = Table(title="The same budget for each", title_justify="left")
    for column in ("", "held-out loss", "cache bytes per token", "decode ms"):
        table.add_column(column, justify="left" if not column else "right")
    for heads, runs in by(found["runs"], "kv_heads").items():
        losses, times = [run["held_out_loss"] for run in runs], found["decode"]["milliseconds"][str(heads)]
        table.add_row(label(heads), spread(losses, 3), f"{runs[0]['cache_bytes_per_token']:,}", spread(times))
    console.print(table)
