"""One step of training: the state that it takes and returns, and the jitted program."""

import dataclasses
import typing
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Bool, Float, Int, Int32, Key

from gqa_jax.config import Config
from gqa_jax.data import Batch
from gqa_jax.decoder import Params, param_axes, with_placement
from gqa_jax.loss import cast, loss
from gqa_jax.recipe import Recipe, learning_rates, optimizer
from gqa_jax.sharding import Placement


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """All that changes in training: the float32 weights, what the optimiser remembers, the steps done, and the run's key."""

    params: Params
    optimizer: Any
    step: Int[Array, ""]
    key: Key[Array, ""]


class Found(NamedTuple):
    """What a step finds: mean loss and norm of the gradients before the update, and whether all was finite, then and after."""

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]
    tokens: Int[Array, ""]
    finite: Bool[Array, ""]


def start(params: Params, recipe: Recipe) -> State:
    """Returns the state before the first step; weights are copied, and the optimiser's lie where they lie."""
    params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params)
    state = State(params, optimizer(recipe).init(params), jnp.int32(0), jax.random.key(recipe.seed))
    placement = params.get("placement")
    if placement is None:
        # Bound to its device, as a state that comes from a checkpoint is: both run the same program.
        return jax.tree.map(lambda leaf: jax.device_put(leaf, next(iter(params["norm"].devices()))), state)
    where = NamedSharding(placement.mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: leaf if leaf.ndim else everywhere(leaf, where), state)


def everywhere(number: Any, where: Sharding) -> Array:
    """Brings a number or a key to all devices of a sharding, also to those of other processes, which bring the same."""
    if isinstance(number, jax.Array) and jnp.issubdtype(number.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(everywhere(jax.random.key_data(number), where))
    host = np.asarray(number)
    return jax.make_array_from_callback(host.shape, where, lambda index: host[index])


def state_axes(state: State, config: Config, recipe: Recipe) -> State:
    """Returns the letters of the axes of all that a state holds, as a tree of its shape."""
    letters = with_placement(param_axes(config), state.params.get("placement"))
    moments = optax.tree.map_params(
        optimizer(recipe), lambda _, axes: axes, state.optimizer, letters, transform_non_params=lambda _: ""
    )
    return State(letters, moments, "", "")  # pyright: ignore[reportArgumentType]


def put(batch: Batch, recipe: Recipe, placement: Placement | None) -> Batch:
    """Brings the rows of a step to their devices, in the parts that are read one after the other."""
    parts = [array.reshape(recipe.accumulate, -1, array.shape[1]) for array in batch]
    return Batch(*(jnp.asarray(part) if placement is None else placement.put(part, "A B T") for part in parts))


def layout_of(state: State) -> tuple[Sharding, ...] | None:
    """Returns where a state lies on a mesh; None on one device."""
    return tuple(leaf.sharding for leaf in jax.tree.leaves(state)) if "placement" in state.params else None


@partial(jax.jit, static_argnames=("config", "recipe", "layout"), donate_argnames="state")
def step(
    state: State, batch: Batch, config: Config, recipe: Recipe, layout: tuple[Sharding, ...] | None = None
) -> tuple[State, Found]:
    """Returns the state after one more step, and what was found; the old state is consumed.

    Args:
        state: what `start` or the step before has made.
        batch: what `put` has made.
        config: the model.
        recipe: how it is trained.
        layout: where the new state shall lie; the old one's, from `layout_of`.
    """
    missed, count, gradients = _gradients(state.params, batch, config, recipe)
    mean = 1 / jnp.maximum(count, 1).astype(missed.dtype)
    gradients = jax.tree.map(lambda gradient: gradient * mean, gradients)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its counts with floats.
        rate = jnp.asarray(learning_rates(recipe)(state.step))
        updates, remembered = optimizer(recipe).update(gradients, state.optimizer, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    norm, now = optax.tree.norm(gradients), missed * mean
    finite = [jnp.isfinite(now), jnp.isfinite(norm), *(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params))]
    found = Found(now, norm, rate, count, jnp.stack(finite).all())
    return _lying(State(params, remembered, state.step + 1, state.key), layout), found


def _gradients(params: Params, batch: Batch, config: Config, recipe: Recipe) -> tuple[Array, Array, Params]:
    """Returns the summed loss of all parts, how many tokens were predicted, and the gradients of that sum in float32."""

    def missed(params, part):
        return loss(cast(params, recipe.compute_dtype), part.tokens, part.segments, config, remat=recipe.remat)

    def one(part):
        (total, count), gradients = jax.value_and_grad(missed, has_aux=True)(params, part)
        return total, count, gradients

    if recipe.accumulate == 1:
        return one(jax.tree.map(lambda array: array[0], batch))
    nothing = (jnp.float32(0), jnp.int32(0), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(lambda sums, part: (jax.tree.map(jnp.add, sums, one(part)), None), nothing, batch)[0]


def _lying(state: State, layout: tuple[Sharding, ...] | None) -> State:
    """Keeps everything where it was: a state that moved would be compiled for anew."""
    if layout is None:
        return state
    leaves, tree = jax.tree.flatten(state)
    explicit = AxisType.Explicit in state.params["placement"].mesh.axis_types
    move = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
    return tree.unflatten([move(leaf, where) for leaf, where in zip(leaves, layout, strict=True)])


@partial(jax.jit, static_argnames=("config", "compute_dtype"))
def miss(params: Params, batch: Batch, config: Config, compute_dtype: str) -> tuple[Float[Array, ""], Int32[Array, ""]]:
    """Returns what `loss` does, and learns nothing."""
    return loss(cast(params, compute_dtype), batch.tokens, batch.segments, config)
