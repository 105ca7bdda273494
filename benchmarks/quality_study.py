"""What the parts of `benchmarks.quality` share: the budgets, what is kept, the models and the texts."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import tokenizers
from rich.console import Console
from tokenizers import decoders, models, pre_tokenizers, trainers

import gqa_jax
from benchmarks import texts
from benchmarks.timing import RESULTS
from gqa_jax import data, train
from gqa_jax.planner import Plan
from gqa_jax.tokenizer import Tokenizer

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


def by(runs: list[dict[str, Any]], name: str) -> dict[Any, list[dict[str, Any]]]:
    """Groups runs by what they have in common."""
    return {value: [run for run in runs if run[name] == value] for value in dict.fromkeys(run[name] for run in runs)}


def check(right: bool, what: str) -> None:
    """Ends the study where something is not as it must be."""
    if not right:
        raise SystemExit(f"This should be so and is not: {what}")


def label(kv_heads: int) -> str:
    """Names a kind of attention."""
    return {1: "MQA", HEADS: "MHA"}.get(kv_heads, f"GQA-{kv_heads}")


# Models and texts


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
