"""What do fewer KV heads cost in quality, and what do they save?

Three parts, on the sources of Python's documentation as Debian has them, or on the files of `--text`:
1. `models`: one small decoder trained from nothing with the same budget as MHA, GQA and MQA: held-out loss, bytes, ms.
2. `conversion`: SmolLM2 converted from 3 KV heads to 1 by each method, before and while it is trained on: held-out loss.
3. `attention`: what the last word of a sentence attends to, with 3 KV heads and converted to 1.
`python -m benchmarks.quality [--part PART] [--quick] [--save] [--plot] [--json]`; finished runs of the same budget, which
`--save` has kept, are not run again.
"""

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from rich.console import Console
from rich.table import Table
from tokenizers import decoders, models, pre_tokenizers, trainers

import gqa_jax
from benchmarks import texts
from benchmarks.timing import RESULTS, interleave, machine, save, spread
from gqa_jax import cache as kv
from gqa_jax import data, train
from gqa_jax.convert import METHODS, convert, negative_log_likelihood
from gqa_jax.decoder import hidden_states
from gqa_jax.planner import Plan
from gqa_jax.rope import angles, rotate
from gqa_jax.step import put, start, step
from gqa_jax.tokenizer import Tokenizer

PARTS = ("models", "conversion", "attention")
FIRST = ("mean", "pca", "first", "random", "procrustes")  # in this order they are trained on
SENTENCE = "The artist painted the portrait of a woman with a brush"
HEADS, HEAD_DIM = 8, 32


class Budget(NamedTuple):
    """How much is computed; every run of a part has the same."""

    vocabulary: int = 2048
    layers: int = 4
    model_dim: int = 256
    mlp_dim: int = 768
    kv_heads: tuple[int, ...] = (8, 4, 2, 1)
    seeds: int = 3
    training: train.Recipe = train.Recipe(steps=250, batch=2, length=256, learning_rate=3e-3, warmup=25)
    held_tokens: int = 2048  # of each held-out document
    filled: int = 2048
    rows: int = 8
    new: int = 16
    rounds: int = 5
    uptraining: train.Recipe = train.Recipe(steps=200, batch=1, length=128, learning_rate=1e-4, warmup=30)
    points: int = 4
    calibration_documents: int = 20
    calibration: tuple[int, int] = (8, 512)  # documents, and tokens of each
    evaluation: tuple[int, int] = (8, 256)


QUICK = Budget(
    vocabulary=512,
    layers=2,
    model_dim=64,
    mlp_dim=96,
    seeds=1,
    training=train.Recipe(steps=12, batch=2, length=64, learning_rate=3e-3, warmup=2),
    held_tokens=128,
    filled=64,
    rows=2,
    new=4,
    rounds=1,
    uptraining=train.Recipe(steps=4, batch=1, length=32, learning_rate=1e-4, warmup=1),
    points=2,
    calibration=(4, 128),
    evaluation=(2, 64),
)

Keep = Callable[[str, dict[str, Any]], None]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, action="append", help="which to run; all where none is named")
    parser.add_argument("--text", nargs="+", default=(), metavar="FILE", help="texts in UTF-8 instead of Debian's package")
    parser.add_argument("--quick", action="store_true", help="tiny models and budgets, to see that all of it runs")
    parser.add_argument("--save", action="store_true", help="keep each finished run in benchmarks/results/quality.json")
    parser.add_argument("--plot", action="store_true", help="draw what is kept into benchmarks/results/quality_*.png")
    parser.add_argument("--json", action="store_true", help="print one line of JSON and nothing else")
    options = parser.parse_args()
    if options.quick and (options.save or options.plot):
        parser.error("--quick only shows that all of it runs; leave out --save and --plot")

    console = Console(quiet=options.json, highlight=False)
    result = kept() if options.save or options.plot else {}

    def keep(part: str, found: dict[str, Any]) -> None:
        result[part] = {"machine": machine(), **found}
        if options.save:
            save("quality", result)

    study = Study(texts.read(options.text), QUICK if options.quick else Budget(), result, keep, console)
    for part in options.part or PARTS:
        run, show = {"models": (of_models, show_models), "conversion": (of_conversion, show_conversion)}.get(
            part, (of_attention, show_attention)
        )
        show(console, run(study))
    if options.plot:
        from benchmarks import quality_plots

        quality_plots.draw(result)
    print(json.dumps(result))
    return 0


def kept() -> dict[str, Any]:
    """Returns what has been saved so far."""
    file = RESULTS / "quality.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


@dataclasses.dataclass
class Study:
    """The text, the budget, what is kept already, where results go, and where progress is told."""

    text: texts.Text
    budget: Budget
    result: dict[str, Any]
    keep: Keep
    console: Console

    @property
    def quick(self) -> bool:
        """Whether the models are tiny."""
        return self.budget is QUICK

    def runs(self, part: str, budget: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the kept runs of a part, if they had this budget."""
        found = self.result.get(part, {})
        return found["runs"] if found.get("budget") == json.loads(json.dumps(budget)) else []


# Models


def of_models(study: Study) -> dict[str, Any]:
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


def tokenised(study: Study) -> tuple[Tokenizer, data.Texts, data.Texts]:
    """Returns a tokenizer learnt from the training text, that text, and the beginnings of the documents held out."""
    words = pieces(study.text.train if not study.quick else study.text.train[:20], study.budget.vocabulary)
    some = slice(20 if study.quick else None)
    learnt = data.texts_of([*words.encode(text), words.eos_id] for text in study.text.train[some])
    held = data.texts_of(words.encode(text)[: study.budget.held_tokens] for text in study.text.held[some])
    return words, learnt, held


def pieces(documents: list[str], size: int) -> Tokenizer:
    """Returns a byte-level BPE of so many pieces, the first of which ends a text."""
    end = "<|endoftext|>"
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(documents, trainer)
    return Tokenizer(backend, size, eos_id=0, stop_ids=(0,))


def small(budget: Budget, kv_heads: int, seed: int, words: Tokenizer | None = None, heads: int = HEADS) -> gqa_jax.Model:
    """Returns a new model; what it saves in W_k and W_v its MLP has more, so that all have as many parameters."""
    wider = round(2 * (heads - kv_heads) * HEAD_DIM / 3)
    config = gqa_jax.Config(
        vocab_size=budget.vocabulary,
        num_layers=budget.layers,
        model_dim=budget.model_dim,
        mlp_dim=budget.mlp_dim + wider,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        context_length=2 * budget.filled,
    )
    return gqa_jax.Model(config, gqa_jax.init_params(config, jax.random.key(seed)), words)


def counts(model: gqa_jax.Model) -> dict[str, int]:
    """Counts what a model has and keeps."""
    plan = Plan(model.config, context=1, cache_dtype="float32")
    size = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    return {"parameters": size, "cache_bytes_per_token": plan.cache_bytes}


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


def label(kv_heads: int) -> str:
    """Names a kind of attention."""
    return {1: "MQA", HEADS: "MHA"}.get(kv_heads, f"GQA-{kv_heads}")


def show_models(console: Console, found: dict[str, Any]) -> None:
    table = Table(title="The same budget for each", title_justify="left")
    for column in ("", "held-out loss", "cache bytes per token", "decode ms"):
        table.add_column(column, justify="left" if not column else "right")
    for heads, runs in by(found["runs"], "kv_heads").items():
        losses, times = [run["held_out_loss"] for run in runs], found["decode"]["milliseconds"][str(heads)]
        table.add_row(label(heads), spread(losses, 3), f"{runs[0]['cache_bytes_per_token']:,}", spread(times))
    console.print(table)


def by(runs: list[dict[str, Any]], name: str) -> dict[Any, list[dict[str, Any]]]:
    """Groups runs by what they have in common."""
    return {value: [run for run in runs if run[name] == value] for value in dict.fromkeys(run[name] for run in runs)}


def check(right: bool, what: str) -> None:
    """Ends the study where something is not as it must be."""
    if not right:
        raise SystemExit(f"This should be so and is not: {what}")


# Conversion


def of_conversion(study: Study) -> dict[str, Any]:
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


def original(study: Study) -> gqa_jax.Model:
    """Returns SmolLM2 in float32, or a tiny model that has learnt a little."""
    if not study.quick:
        return gqa_jax.load("smollm2-135m", dtype="float32")
    words, learnt, _ = tokenised(study)
    return train.train(small(study.budget, 3, 0, words, heads=9), learnt, study.budget.training).model


def parts(study: Study, model: gqa_jax.Model) -> tuple[list[list[int]], data.Texts, list[list[int]]]:
    """Returns rows to calibrate with, texts to train on and rows to measure on, each of other documents."""
    apart = study.budget.calibration_documents

    def rows(documents: list[str], count: int, length: int) -> list[list[int]]:
        encoded = (model.tokenizer.encode(text) for text in documents)
        return list(itertools.islice((ids[:length] for ids in encoded if len(ids) >= length), count))

    learnt = data.texts_of(
        [*model.tokenizer.encode(text), model.tokenizer.eos_id] for text in study.text.train[apart : 5 * apart]
    )
    calibration, held = study.budget.calibration, study.budget.evaluation
    return rows(study.text.train[:apart], *calibration), learnt, rows(study.text.held, *held)


def uptrained(model: gqa_jax.Model, learnt: data.Texts, recipe: train.Recipe, points: int) -> Any:
    """Yields the number of steps and the model as it is then, so many times on the way to the last."""
    rows = data.Rows(learnt, recipe.length, recipe.batch, recipe.seed)
    state = start(model.params, recipe)
    for done in range(1, recipe.steps + 1):
        state, _ = step(state, put(next(rows), recipe, None), model.config, recipe)
        if done % (recipe.steps // points) == 0:
            yield done, model._replace(params=state.params)


def show_conversion(console: Console, found: dict[str, Any]) -> None:
    table = Table(title=f"NLL, {found['original']:.3f} before the conversion", title_justify="left")
    table.add_column("steps")
    for steps in max((run["steps"] for run in found["runs"]), key=len):
        table.add_column(str(steps), justify="right")
    for run in found["runs"]:
        table.add_row(run["method"], *(f"{one:.3f}" for one in run["nll"]))
    console.print(table)


# Attention


def of_attention(study: Study) -> dict[str, Any]:
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


def show_attention(console: Console, found: dict[str, Any]) -> None:
    table = Table(title=f"How far apart the heads of one group read, 0 to 1, in layer {found['layer']}", title_justify="left")
    for column in ("", "in this layer", "mean of layers"):
        table.add_column(column, justify="left" if not column else "right")
    for name, one in found["difference"].items():
        table.add_row(name, f"{one['here']:.3f}", f"{one['all layers']:.3f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
