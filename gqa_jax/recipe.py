"""The numbers of a training run, and the optimiser that they describe.

AdamW (arXiv:1711.05101) behind clipping by the norm of all gradients, with a warm-up and then a cosine (arXiv:1608.03983).
"""

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import numpy as np
import optax

ComputeDtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is trained. A step reads `batch` rows of `length` tokens.

    Args:
        steps: how many steps there are, which is also the length of the cosine.
        batch: rows of a step, over all devices.
        length: tokens of a row.
        accumulate: into how many parts the rows of a step are cut, one after the other; their gradients are summed.
        learning_rate: the highest.
        warmup: steps until then, in equal parts.
        final: what is left of the learning rate at the end, as a part of the highest.
        weight_decay: of matrices; norms, biases and sinks have none.
        clip: the largest norm of all gradients together; what is above is scaled down.
        betas: of the two moments.
        epsilon: beside the root of the second moment.
        compute_dtype: of matrices and activations. Weights, moments and gradients are float32 in either case.
        remat: gradients compute each layer anew instead of keeping what is inside it (arXiv:1604.06174).
        seed: of the order of the texts, and of the run's key.
        save_every: steps from one checkpoint to the next; there is one at the end too.
        keep: how many of the newest checkpoints are kept.

    >>> Recipe(steps=10, warmup=10)
    Traceback (most recent call last):
        ...
    ValueError: warmup is 10; it must be less than steps, 10.
    """

    steps: int = 1000
    batch: int = 8
    length: int = 512
    accumulate: int = 1
    learning_rate: float = 3e-4
    warmup: int = 0
    final: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    compute_dtype: ComputeDtype = "float32"
    remat: bool = False
    seed: int = 0
    save_every: int = 100
    keep: int = 3

    def __post_init__(self):
        object.__setattr__(self, "betas", tuple(self.betas) if isinstance(self.betas, list) else self.betas)
        least = {"steps": 1, "batch": 1, "length": 2, "accumulate": 1, "warmup": 0, "seed": 0, "save_every": 1, "keep": 1}
        for name, minimum in least.items():
            number = getattr(self, name)
            if not isinstance(number, int | np.integer) or isinstance(number, bool) or number < minimum:
                raise ValueError(f"{name} is {number!r}; it must be a whole number of at least {minimum}.")
            object.__setattr__(self, name, int(number))
        if self.seed >= 2**32:
            raise ValueError(f"seed is {self.seed}; it must be less than 2**32.")
        if self.warmup >= self.steps:
            raise ValueError(f"warmup is {self.warmup}; it must be less than steps, {self.steps}.")
        if self.batch % self.accumulate:
            raise ValueError(f"batch is {self.batch}; it must be a multiple of accumulate, {self.accumulate}.")
        if self.compute_dtype not in get_args(ComputeDtype):
            raise ValueError(f"compute_dtype is {self.compute_dtype!r}; known are {', '.join(get_args(ComputeDtype))}.")
        self._check_numbers()

    def _check_numbers(self):
        for name in ("learning_rate", "clip", "epsilon", "weight_decay", "final"):
            if not isinstance(getattr(self, name), int | float | np.number):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a number.")
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("learning_rate", "clip", "epsilon"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0 and finite.")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay is {self.weight_decay}; it must be at least 0 and finite.")
        if not 0 <= self.final <= 1:
            raise ValueError(f"final is {self.final}; it must be from 0 to 1.")
        if not isinstance(self.betas, tuple) or len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas is {self.betas}; it must be two numbers from 0 to below 1.")


def learning_rates(recipe: Recipe) -> optax.Schedule:
    """Returns the learning rate of each step, from 0 on; the first is no zero."""
    return optax.warmup_cosine_decay_schedule(
        init_value=recipe.learning_rate / (recipe.warmup + 1),
        peak_value=recipe.learning_rate,
        warmup_steps=recipe.warmup,
        decay_steps=recipe.steps,
        end_value=recipe.learning_rate * recipe.final,
    )


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Returns the optimiser of a recipe."""
    (first, second), rates = recipe.betas, learning_rates(recipe)
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        optax.adamw(rates, first, second, recipe.epsilon, weight_decay=recipe.weight_decay, mask=decayed),
    )


def decayed(params: Any) -> Any:
    """Marks the weights that decay: the matrices, and not what shifts or scales."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not path[-1].key.endswith(("norm", "bias", "sinks")), params)
