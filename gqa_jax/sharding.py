"""Which device holds what: the two-factor split of the heads, and the rules from letters of axes to axes of a mesh.

Tensor parallelism over `tp` devices is a product, kv * group. KV heads are cut `kv` ways and each group's queries `group` ways,
so `group` is how many devices share a KV head, and no head count has to divide. What does not divide is padded with heads
of zero weight, K before G, which keeps every query head with its KV head.

>>> print(plan_heads(9, 3, 4))
9 query heads, 3 KV heads on 4 devices: kv 4 x group 1, replicate
device | KV heads | query heads
     0 | 0        | 0-2
     1 | 1        | 3-5
     2 | 2        | 6-8
     3 | -        | -
each KV head on 1 device; 3 of 12 query heads are padding (25 %)
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from gqa_jax.config import Config

Policy = Literal["replicate", "split", "reject"]


@dataclasses.dataclass(frozen=True)
class HeadPlan:
    """How the heads of one attention lie on kv * group devices. Device i * group + j has KV part i and query part j.

    Under the policy `replicate` the devices of a group hold the same KV heads; under `split` each holds every `group`-th of
    their slots. `bytes_per_kv_head` is what a token of one KV head takes in the whole cache; 0 where it does not matter.
    """

    num_heads: int
    num_kv_heads: int
    kv: int
    group: int
    policy: Policy = "replicate"
    bytes_per_kv_head: int = 0

    @property
    def tp(self) -> int:
        """How many devices there are."""
        return self.kv * self.group

    @property
    def kv_heads_per_device(self) -> int:
        """How many KV heads each device holds, padding included."""
        return -(-self.num_kv_heads // self.kv)

    @property
    def query_heads_per_device(self) -> int:
        """How many query heads each device computes, padding included."""
        return self.kv_heads_per_device * (self.padded_group_size // self.group)

    @property
    def group_size(self) -> int:
        """How many query heads each KV head serves: G."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_kv_heads(self) -> int:
        """K, rounded up to a multiple of `kv`."""
        return self.kv_heads_per_device * self.kv

    @property
    def padded_group_size(self) -> int:
        """G, rounded up to a multiple of `group`."""
        return _multiple(self.group_size, self.group)

    @property
    def padded_heads(self) -> int:
        """How many query heads there are with padding: padded K times padded G."""
        return self.padded_kv_heads * self.padded_group_size

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the cache that a token takes on each device; under `split`, on average."""
        return self.kv_heads_per_device * self.bytes_per_kv_head / (self.group if self.policy == "split" else 1)

    def kv_heads_on(self, device: int) -> list[int]:
        """Returns the KV heads that a device holds, without padding."""
        first = device // self.group * self.kv_heads_per_device
        return [head for head in range(first, first + self.kv_heads_per_device) if head < self.num_kv_heads]

    def query_heads_on(self, device: int) -> list[int]:
        """Returns the query heads that a device computes, without padding."""
        width = self.padded_group_size // self.group
        first = device % self.group * width
        within = [g for g in range(first, first + width) if g < self.group_size]
        return [head * self.group_size + g for head in self.kv_heads_on(device) for g in within]

    def __str__(self) -> str:
        """Gives the plan as a table."""
        rows = [("device", "KV heads", "query heads")]
        rows += [(str(d), _spans(self.kv_heads_on(d)), _spans(self.query_heads_on(d))) for d in range(self.tp)]
        wide = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{d:>{wide[0]}} | {kv:<{wide[1]}} | {q}" for d, kv, q in rows]
        shared = f"{self.group} device{'s' if self.group > 1 else ''}"
        if self.policy == "split" and self.group > 1:
            shared += f", 1/{self.group} of the slots on each"
        padding = self.padded_heads - self.num_heads
        notes = [
            f"each KV head on {shared}",
            f"{padding} of {self.padded_heads} query heads are padding ({padding / self.padded_heads:.0%})".replace("%", " %")
            if padding
            else "no padding",
        ]
        if self.bytes_per_kv_head:
            notes.append(f"{self.bytes_per_token:,.10g} bytes of cache per token on each device")
        title = (
            f"{self.num_heads} query heads, {self.num_kv_heads} KV heads on {self.tp} device{'s' if self.tp > 1 else ''}: "
            f"kv {self.kv} x group {self.group}, {self.policy}"
        )
        return "\n".join([title, *lines, "; ".join(notes)])


def _spans(heads: list[int]) -> str:
    """Gives 0, 1, 2, 5 as "0-2, 5"."""
    spans: list[list[int]] = []
    for head in heads:
        if spans and spans[-1][1] == head - 1:
            spans[-1][1] = head
        else:
            spans.append([head, head])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in spans) or "-"


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def plan_heads(
    num_heads: int, num_kv_heads: int, tp: int, policy: Policy = "replicate", *, bytes_per_kv_head: int = 0
) -> HeadPlan:
    """Returns the factorisation tp = kv * group with the fewest KV heads per device, then query heads, then padding.

    KV heads per device are always ceil(num_kv_heads / tp), the least possible. Of equals it takes the largest group, which
    splits slots furthest.

    Args:
        num_heads: N, a multiple of `num_kv_heads`.
        num_kv_heads: K.
        tp: how many devices share one copy of the model.
        policy: `replicate` copies the cache of a KV head to every device that has some of its queries; `split` gives each of
            them a part of its slots; `reject` refuses what would need copies or padding.
        bytes_per_kv_head: 2 * layers * head width * bytes per number, for the table.

    Raises:
        ValueError: a number below one, query heads that do not divide over KV heads, an unknown policy, or `reject` where the
            KV heads do not divide over the devices; it names the degrees that do.
    """
    for name, number in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("tp", tp)):
        if not isinstance(number, int | np.integer) or number < 1:
            raise ValueError(f"{name} is {number!r}; it must be a whole number of at least 1.")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not divide over {num_kv_heads} KV heads.")
    if policy not in get_args(Policy):
        raise ValueError(f"The policy is {policy!r}; it must be one of {', '.join(get_args(Policy))}.")
    if policy == "reject" and num_kv_heads % tp:
        exact = ", ".join(str(degree) for degree in range(1, num_kv_heads + 1) if num_kv_heads % degree == 0)
        raise ValueError(
            f"{num_kv_heads} KV heads do not divide over {tp} devices; tp = {exact} would. The policies 'replicate' and "
            "'split' take any tp."
        )
    plans = (
        HeadPlan(num_heads, num_kv_heads, kv, tp // kv, policy, bytes_per_kv_head) for kv in range(1, tp + 1) if tp % kv == 0
    )
    return min(plans, key=lambda plan: (plan.kv_heads_per_device, plan.query_heads_per_device, plan.padded_heads, -plan.group))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh, and which of its axes the batch, the KV heads and the queries of a KV head are cut over.

    A mesh of one's own, of Auto or Explicit axis types, goes in with its own names: `Placement(mesh, data="dp", kv="tp",
    group=())`. It is a static pytree: weights and caches carry it along through `jit` and `grad`.

    Raises:
        ValueError: axes that the mesh does not have, or one that is named twice.
    """

    mesh: Mesh | AbstractMesh
    data: str | tuple[str, ...] = ("data",)
    kv: str | tuple[str, ...] = ("kv",)
    group: str | tuple[str, ...] = ("group",)
    split: bool = False

    def __post_init__(self):
        named = []
        for field in ("data", "kv", "group"):
            axes = getattr(self, field)
            object.__setattr__(self, field, (axes,) if isinstance(axes, str) else tuple(axes or ()))
            named += getattr(self, field)
        unknown = [axis for axis in named if axis not in self.mesh.axis_names]
        if unknown or len(set(named)) < len(named):
            raise ValueError(
                f"The mesh has the axes {self.mesh.axis_names}; data {self.data}, kv {self.kv} and group {self.group} must be "
                "among them, each once. Say which is which by gqa_jax.Placement(mesh, data=..., kv=..., group=...); () is none."
            )

    def __str__(self) -> str:
        """Gives the axes of the mesh and their parts, for messages."""
        kinds = sorted({kind.name for kind in self.mesh.axis_types})
        sizes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
        roles = ", ".join(f"{part} {'/'.join(getattr(self, part)) or 'none'}" for part in ("data", "kv", "group"))
        return f"a mesh of {sizes} ({'/'.join(kinds)}; {roles}; {'split' if self.split else 'replicate'})"

    @property
    def model(self) -> tuple[str, ...]:
        """The axes of tensor parallelism: kv, then group."""
        return (*self.kv, *self.group)

    def axes(self, letter: str) -> tuple[str, ...]:
        """Returns the axes of the mesh that an axis of an array is cut over; none for letters that no rule names."""
        rules = {"B": self.data, "K": self.kv, "G": self.group, "F": self.model, "V": self.model}
        return tuple((rules | ({"S": self.group} if self.split else {})).get(letter, ()))

    def parts(self, letter: str) -> int:
        """Returns into how many parts an axis of an array is cut."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(letter))

    def padded(self, letter: str, size: int) -> int:
        """Returns the length of an axis, rounded up so that it can be cut."""
        return _multiple(size, self.parts(letter))

    def spec(self, letters: str) -> PartitionSpec:
        """Returns how an array with these axes is cut, such as "D K G H"."""
        return PartitionSpec(*(self.axes(letter) or None for letter in letters.split()))

    def sharding(self, letters: str) -> NamedSharding:
        """Returns where an array with these axes lies."""
        return NamedSharding(self.mesh, self.spec(letters))

    def plan(self, config: Config, bytes_per_kv_head: int = 0) -> HeadPlan:
        """Returns how the heads of a model lie on this mesh."""
        policy = "split" if self.split else "replicate"
        return HeadPlan(config.num_heads, config.num_kv_heads, self.parts("K"), self.parts("G"), policy, bytes_per_kv_head)

    def put(self, array: Any, letters: str) -> Array:
        """Pads a host array with zeros where its axes are cut unevenly, and places each part on its own device."""
        host = np.asarray(array)
        shape = tuple(self.padded(letter, size) for letter, size in zip(letters.split(), host.shape, strict=True))

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            index = tuple(slice(None) for _ in shape) if index is None else index
            piece = host[index]
            lacking = [len(range(*cut.indices(size))) - have for cut, size, have in zip(index, shape, piece.shape, strict=True)]
            return np.pad(piece, [(0, lack) for lack in lacking]) if any(lacking) else piece

        return jax.make_array_from_callback(shape, self.sharding(letters), part)

    def auto(self) -> "Placement":
        """Returns the same placement on a mesh whose axes are all of the type Auto."""
        types = (AxisType.Auto,) * len(self.mesh.axis_names)
        return dataclasses.replace(self, mesh=self.mesh.update(axis_types=types))

    def moved(self, array: Array, letters: str) -> Array:
        """Brings an array where its axes belong, inside `jit` or outside, as `jax.shard_map` on an Explicit mesh asks for."""
        if isinstance(array, Tracer) and AxisType.Explicit not in self.mesh.axis_types:
            return array
        move = jax.sharding.reshard if isinstance(array, Tracer) else jax.device_put
        return move(array, self.sharding(letters))

    def padded_to_fit(self, array: Array, letters: str) -> Array:
        """Pads an array inside `jit` with zeros where its axes are cut unevenly, and brings it where its axes belong."""
        wide = [(0, self.padded(letter, size) - size) for letter, size in zip(letters.split(), array.shape, strict=True)]
        if any(more for _, more in wide):
            array = jnp.pad(self.moved(array, " ".join("_" for _ in wide)), wide)
        return self.moved(array, letters)

    def rules(self, config: Config | None = None) -> tuple[tuple[str, tuple[str, ...] | None], ...]:
        """Returns the axes of the mesh for each letter, in the form of Flax's logical rules.

        With a config, letters whose size does not divide have none: an array that is not padded stays whole there.
        """
        sizes = {} if config is None else {"K": config.num_kv_heads, "G": config.group_size, "F": config.mlp_dim}
        whole = {letter for letter, size in sizes.items() if size % self.parts(letter)}
        return tuple((letter, None if letter in whole else self.axes(letter) or None) for letter in "BTDKGHFV")

    # What follows is for one device's part of the work, under `jax.shard_map`.

    def total(self, x: Array) -> Array:
        """Sums what the devices of tensor parallelism have each found: one all-reduce."""
        return jax.lax.psum(x, self.model)

    def index(self, letter: str) -> Int[Array, ""]:
        """Returns which part of an axis this device has."""
        axes = self.axes(letter)
        return jax.lax.axis_index(axes) if axes else jnp.int32(0)

    def device(self) -> Int[Array, ""]:
        """Returns the number of this device in the mesh."""
        return jax.lax.axis_index(self.mesh.axis_names)

    def is_real(self, config: Config, kv_heads: int, group_size: int) -> Bool[Array, "K G"] | None:
        """Marks the query heads of this device that are no padding; None where none is."""
        if not (config.num_kv_heads % self.parts("K") or config.group_size % self.parts("G")):
            return None
        k = self.index("K") * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)
        g = self.index("G") * group_size + jnp.arange(group_size, dtype=jnp.int32)
        return (k < config.num_kv_heads)[:, None] & (g < config.group_size)


def make_mesh(
    config: Config, *, tp: int = 1, data: int = 1, policy: Policy = "replicate", devices: Iterable[Any] | None = None
) -> Placement:
    """Returns a mesh of data * tp devices with the axes ("data", "kv", "group"), and how a model of this config lies on it.

    Args:
        config: the model, for its head counts.
        tp: devices that share one copy of the weights; any number.
        data: copies of the weights, over which the batch is cut.
        policy: see `plan_heads`.
        devices: those of `jax.devices()`, of every process, where None.

    Raises:
        ValueError: more devices than there are, or what `plan_heads` refuses.

    >>> tiny = Config(vocab_size=7, num_layers=1, model_dim=6, mlp_dim=5, num_heads=6, num_kv_heads=3, head_dim=2,
    ...               context_length=8)
    >>> dict(make_mesh(tiny, tp=1).mesh.shape)
    {'data': 1, 'kv': 1, 'group': 1}
    """
    plan = plan_heads(config.num_heads, config.num_kv_heads, tp, policy)
    if not isinstance(data, int | np.integer) or data < 1:
        raise ValueError(f"data is {data!r}; it must be a whole number of at least 1.")
    found = list(jax.devices() if devices is None else devices)
    if len(found) < data * tp:
        raise ValueError(
            f"data = {data} times tp = {tp} needs {data * tp} devices; there are {len(found)}. On a CPU, "
            "jax.config.update('jax_num_cpu_devices', n) makes n of them, if set before anything runs."
        )
    if jax.process_count() > 1 and devices is None and len(found) != data * tp:
        raise ValueError(
            f"data = {data} times tp = {tp} leaves {len(found) - data * tp} of the {len(found)} devices of "
            f"{jax.process_count()} processes without work; the product must be {len(found)}."
        )
    grid = np.array(found[: data * tp]).reshape(data, plan.kv, plan.group)
    return Placement(Mesh(grid, ("data", "kv", "group"), axis_types=(AxisType.Auto,) * 3), split=policy == "split")


def placement_of(mesh: Mesh | Placement | None) -> Placement | None:
    """Takes a mesh with the axes "kv" and "group" (and "data", if it is cut over the batch) for what it is."""
    if mesh is None or isinstance(mesh, Placement):
        return mesh
    return Placement(mesh, data=("data",) if "data" in mesh.axis_names else ())


def zeros(shape: Sequence[int], dtype: DTypeLike, letters: str, placement: Placement | None) -> Array:
    """Makes zeros, on a mesh each part on its own device."""
    if placement is None:
        return jnp.zeros(shape, dtype)
    return placement.moved(jnp.zeros(shape, dtype, device=placement.sharding(letters)), letters)


def to_host(array: Array) -> np.ndarray:
    """Brings an array to the host, whole; where its parts lie on several processes, each of them must ask for it."""
    if not (array.is_fully_addressable or array.is_fully_replicated) and isinstance(array.sharding, NamedSharding):
        array = jax.device_put(array, NamedSharding(array.sharding.mesh, PartitionSpec()))
    return np.asarray(array)


def on_mesh_of(tree: Any, placement: Placement) -> Any:
    """Names another view of the same devices as the mesh of all arrays; none is copied."""
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(placement.mesh, x.sharding.spec)), tree)
