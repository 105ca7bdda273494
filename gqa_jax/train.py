"""Trains a decoder on packed texts, on one device or a mesh; killed at any moment, it goes on where it was.

>>> import jax, gqa_jax
>>> from gqa_jax import data, train
>>> config = gqa_jax.Config(vocab_size=13, num_layers=1, model_dim=8, mlp_dim=12, num_heads=2, num_kv_heads=1, head_dim=4,
...                         context_length=8)
>>> model = gqa_jax.Model(config, gqa_jax.init_params(config, jax.random.key(0)))
>>> texts = data.texts_of([[1, 2, 3, 4, 5], [2, 3, 4, 5, 6, 7]])
>>> trained = train.train(model, texts, train.Recipe(steps=20, batch=2, length=8, learning_rate=0.01))
>>> bool(trained.losses[-1] < trained.losses[0])
True
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import jax
import numpy as np

from gqa_jax import data
from gqa_jax.config import Config
from gqa_jax.data import Batch, Texts
from gqa_jax.loss import flops_per_token, loss
from gqa_jax.recipe import ComputeDtype, Recipe
from gqa_jax.request import Model
from gqa_jax.resume import Checkpoints, DamagedError, Log
from gqa_jax.sharding import Placement
from gqa_jax.step import State, layout_of, miss, put, start, state_axes, step

__all__ = [
    "DamagedError",
    "DivergedError",
    "Progress",
    "Recipe",
    "Trained",
    "evaluate",
    "flops_per_token",
    "loss",
    "train",
]

# What may differ between a run and the one that it goes on from.
_FREE = ("save_every", "keep")


class DivergedError(RuntimeError):
    """A loss, a gradient or a weight is no longer finite."""


class Progress(NamedTuple):
    """What is known after a step.

    `loss` is the mean over `tokens`, those that were predicted, and like `gradient_norm` it is from before the update.
    `tokens_per_second` counts all tokens of the rows; of the first step, `seconds` hold the time to compile.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    tokens_per_second: float


class Trained(NamedTuple):
    """A trained model, its weights in float32 where they lay; the loss of each step; and the step before the first of them."""

    model: Model
    losses: np.ndarray
    begun: int


def train(
    model: Model,
    texts: Texts,
    recipe: Recipe,
    folder: str | Path | None = None,
    *,
    resume: bool = False,
    report: Callable[[Progress], None] | None = None,
) -> Trained:
    """Trains a model and returns it; the one that is given stays as it is.

    The same recipe, texts and mesh give the same losses, bit for bit, however often the run is stopped and goes on; on
    another mesh they are equal to rounding.

    Args:
        model: its weights may be of any dtype, and lie on a mesh.
        texts: what `gqa_jax.data.read` returns.
        recipe: how to train.
        folder: keeps `checkpoints/` and `log.jsonl`; nothing is kept where None.
        resume: goes on from the newest checkpoint of the folder that is whole, or from the beginning where there is none.
        report: is told what is known after each step.

    Raises:
        ValueError: texts or a mesh that do not fit the model or the recipe, a folder that holds checkpoints when not resuming,
            or one whose checkpoints were made otherwise.
        DivergedError: a loss, gradient or weight that is not finite; the last good checkpoint stays.
        DamagedError: there are checkpoints, and none is whole.
    """
    _check(model, texts, recipe)
    rows, state = data.Rows(texts, recipe.length, recipe.batch, recipe.seed), start(model.params, recipe)
    with _Folder(folder, model.config, recipe, texts) if folder is not None else contextlib.nullcontext() as kept:
        if kept is not None:
            state = kept.begin(state, rows, resume)
        losses, begun = [], int(state.step)
        for after, progress, position in _steps(state, rows, model.config, recipe):
            state = after
            losses.append(progress.loss)
            if kept is not None:
                kept.keep(state, progress, position)
            if report is not None:
                report(progress)
    return Trained(model._replace(params=state.params), np.array(losses), begun)


def evaluate(
    model: Model, texts: Texts, *, length: int = 512, batch: int = 8, compute_dtype: ComputeDtype = "float32"
) -> float:
    """Returns the mean loss of a model over all texts, packed in rows of `length` tokens.

    Raises:
        ValueError: texts or a mesh that do not fit the model or these numbers.
    """
    recipe = Recipe(batch=batch, length=length, compute_dtype=compute_dtype)
    _check(model, texts, recipe)
    found = []
    for rows in data.once(texts, length, batch):
        placed = Batch(*(array[0] for array in put(rows, recipe, model.placement)))
        found.append(miss(model.params, placed, model.config, compute_dtype))
    missed, count = np.sum([[float(one) for one in pair] for pair in found], axis=0)
    return float(missed / max(count, 1))


def _check(model: Model, texts: Texts, recipe: Recipe) -> None:
    if recipe.length > model.config.context_length:
        raise ValueError(f"length is {recipe.length}; the model's context is {model.config.context_length}.")
    for id in (int(texts.tokens.min()), int(texts.tokens.max())):
        if not 0 <= id < model.config.vocab_size:
            raise ValueError(f"The texts hold the id {id}; the vocabulary has {model.config.vocab_size}, from 0 on.")
    if int(np.diff(texts.ends, prepend=0).max()) < 2:
        raise ValueError("Every text is a single token, so that none can be predicted; give longer ones.")
    parts, rows = 1 if model.placement is None else model.placement.parts("B"), recipe.batch // recipe.accumulate
    if rows % parts:
        raise ValueError(
            f"{rows} rows at a time do not divide over {parts} copies of the weights; batch / accumulate must be a multiple "
            f"of {parts}."
        )


class _Folder:
    """What a run leaves behind: its checkpoints, and a log of its steps."""

    def __init__(self, folder: str | Path, config: Config, recipe: Recipe, texts: Texts):
        self._path, self._config, self._recipe = Path(folder).expanduser(), config, recipe
        same = {name: value for name, value in dataclasses.asdict(recipe).items() if name not in _FREE}
        self._run = {"recipe": same, "config": dataclasses.asdict(config), "data": texts.identity}
        self._checkpoints = Checkpoints(self._path / "checkpoints", recipe.keep)
        self._log: Log | None = None
        self._lock: filelock.FileLock | None = None

    def __enter__(self) -> "_Folder":
        if jax.process_index() == 0:
            self._path.mkdir(parents=True, exist_ok=True)
            self._lock = filelock.FileLock(self._path / ".lock", timeout=0)
            try:
                self._lock.acquire()
            except filelock.Timeout:
                raise ValueError(f"Another run is at work in {self._path}; wait for its end, or take another folder.") from None
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._checkpoints.close()
        finally:
            for opened in (self._log, self._lock):
                if opened is not None:
                    opened.close() if isinstance(opened, Log) else opened.release()

    def begin(self, state: State, rows: data.Rows, resume: bool) -> State:
        """Returns the state to begin with, and brings the rows to where they were then."""
        steps, found = self._checkpoints.steps(), None
        if resume:
            found = self._checkpoints.restore(state, state_axes(state, self._config, self._recipe), self._config, self._run)
        elif steps:
            raise ValueError(f"{self._path} holds a run up to step {steps[0]}; resume it, or begin in another folder.")
        if found is not None:
            state, rows.position = found.state, found.run["position"]
        if jax.process_index() == 0:
            self._log = Log(self._path / "log.jsonl", int(state.step))
        return state

    def keep(self, state: State, progress: Progress, position: dict[str, Any]) -> None:
        """Keeps a step: a line of the log, and a checkpoint where there shall be one."""
        if self._log is not None:
            self._log.write(progress._asdict())
        if progress.step % self._recipe.save_every == 0 or progress.step == self._recipe.steps:
            self._checkpoints.save(state, {**self._run, "position": position})


def _steps(state: State, rows: data.Rows, config: Config, recipe: Recipe) -> Iterator[tuple[State, Progress, dict[str, Any]]]:
    """Yields the state after each step, what is known, and where the rows of the next one begin."""
    placement: Placement | None = state.params.get("placement")
    layout, begun = layout_of(state), int(state.step)
    batch = put(next(rows), recipe, placement)
    for number in range(begun + 1, recipe.steps + 1):
        clock = time.perf_counter()
        state, found = step(state, batch, config, recipe, layout)
        position = rows.position
        batch = put(next(rows), recipe, placement)  # While the devices are at work.
        now, norm, rate, finite = (
            np.asarray(x).item() for x in (found.loss, found.gradient_norm, found.learning_rate, found.finite)
        )
        seconds = time.perf_counter() - clock
        if not finite:
            raise DivergedError(
                f"Step {number} is not finite: the loss is {now}, the norm of the gradients {norm}. What was saved before "
                "it stays; lower the learning rate, or look at the texts."
            )
        counted = int(found.tokens)
        yield state, Progress(number, now, norm, rate, counted, seconds, recipe.batch * recipe.length / seconds), position
