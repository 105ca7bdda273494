"""How many bytes weights and cache take on each device, what fits, and how fast reading them lets a model decode.

Bytes of a cache = 2 (K and V) x layers x batch x KV heads x head width x context x bytes of a number; a layer with a window
counts its window, and multi-head latent attention (MLA, arXiv:2405.04434) keeps one latent in place of K and V. A plan asks
the functions that shape the real weights and the real cache, on a mesh that has no devices: the two cannot disagree, nothing
is allocated, and no device is touched.

>>> Plan(heads_only(61, 128, 128, 128), context=1_000_000, weight_dtype=None).cache_bytes
3997696000000
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from gqa_jax.cache import AXES, DTYPES, cache_shape, check_batch, num_slots
from gqa_jax.config import Attention, Config
from gqa_jax.decoder import param_shapes
from gqa_jax.devices import GIB, Device, units
from gqa_jax.sharding import HeadPlan, Placement, Policy, plan_heads

BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4}
DEEPSEEK_LATENT = 512 + 64
MOST = {"tp": 2**12, "layers": 10**4}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A model, or its heads alone, with a cache on tp * data devices; every figure is a property.

    `weight_dtype` None leaves the weights out; `parameters` is how many there are where the config has heads only. `latent` is
    how many numbers MLA keeps of a token in place of K and V: rank plus rotary width. Bytes are those of weights, keys and
    values: not the 4 of each row's length or the scales of quantised numbers; `step_bytes` are apart.

    Raises:
        ValueError: a number below one, a dtype that is not known, or what `plan_heads` or a cache refuse.
    """

    config: Config
    context: int
    batch: int = 1
    tp: int = 1
    data: int = 1
    policy: Policy = "replicate"
    cache_dtype: str = "bfloat16"
    weight_dtype: str | None = "bfloat16"
    parameters: int | None = None
    latent: int | None = None
    device: Device | None = None

    def __post_init__(self):
        for name in ("context", "batch", "tp", "data", "parameters", "latent"):
            number = getattr(self, name)
            if number is not None and (not isinstance(number, int | np.integer) or number < 1):
                raise ValueError(f"{name} is {number!r}; it must be a whole number of at least 1.")
        for name, known in (("cache_dtype", BITS), ("weight_dtype", (None, *DTYPES))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(filter(None, known))}.")
        for name, number in (("tp", self.tp), ("layers", self.config.num_layers)):
            if number > MOST[name]:
                raise ValueError(f"{name} is {number}; plans are made up to {MOST[name]}.")
        check_batch(self.batch, self.placement)

    @property
    def kind(self) -> str:
        """MHA, GQA, MQA or MLA."""
        return "MLA" if self.latent else self.config.kind

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return self.tp * self.data

    @cached_property
    def kept(self) -> Config:
        """The config of what is cached: a latent is one head that all queries read."""
        if not self.latent:
            return self.config
        without = tuple(dataclasses.replace(how, rope=None) for how in self.config.attention)
        return dataclasses.replace(self.config, num_kv_heads=1, head_dim=self.latent, attention=without)

    @property
    def arrays(self) -> int:
        """How many arrays a layer keeps: K and V, or one latent."""
        return 1 if self.latent else 2

    @cached_property
    def heads(self) -> HeadPlan:
        """How the heads lie on the devices of one copy of the model."""
        per_head = self.arrays * self.kept.num_layers * self.kept.head_dim * BITS[self.cache_dtype] // 8
        return plan_heads(self.kept.num_heads, self.kept.num_kv_heads, self.tp, self.policy, bytes_per_kv_head=per_head)

    @cached_property
    def placement(self) -> Placement:
        """The mesh that `make_mesh` would make, without its devices."""
        sizes, names = (self.data, self.heads.kv, self.heads.group), ("data", "kv", "group")
        mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * 3)
        return Placement(mesh, split=self.policy == "split")

    @property
    def windows(self) -> Counter[int | None]:
        """How many layers have each window, None for all that there is."""
        return Counter(self.kept.layer_attention(layer).window for layer in range(self.kept.num_layers))

    def _numbers(self, batch: int, context: int, placement: Placement | None = None) -> int:
        """How many numbers a cache of this size has, whole or on each device."""
        total = 0
        for window, layers in self.windows.items():
            shape = cache_shape(self.kept, batch, num_slots(context, window, placement), placement)
            total += layers * math.prod(shape if placement is None else placement.sharding(AXES).shard_shape(shape))
        return self.arrays * total

    def _bytes(self, numbers: int) -> int:
        return -(-numbers * BITS[self.cache_dtype] // 8)

    @cached_property
    def cache_bytes(self) -> int:
        """The whole cache, once and without padding: what `init_cache` makes on one device."""
        return self._bytes(self._numbers(self.batch, self.context))

    @property
    def cache_bytes_per_row(self) -> int:
        """What one row of the batch takes of it."""
        return self._bytes(self._numbers(1, self.context))

    @property
    def cache_bytes_per_token(self) -> int:
        """What a token takes in all layers."""
        return self._bytes(self._numbers(1, 1))

    @property
    def cache_bytes_per_late_token(self) -> int:
        """What one more token takes when every window is full."""
        return self.cache_bytes_per_token * self.windows[None] // self.kept.num_layers

    @cached_property
    def device_cache_bytes(self) -> int:
        """The part of the cache on each device."""
        return self._bytes(self._numbers(self.batch, self.context, self.placement))

    @property
    def copied_bytes(self) -> int:
        """What the caches of all devices hold a second time, because the devices of a group share their KV heads."""
        group = 1 if self.policy == "split" else self.heads.group
        return self.device_cache_bytes * self.devices // group * (group - 1)

    @property
    def padding_bytes(self) -> int:
        """What the caches of all devices hold of padded heads and slots, copies left out."""
        return self.device_cache_bytes * self.devices - self.copied_bytes - self.cache_bytes

    def _weights(self, placement: Placement | None, names: Iterable[str] | None = None) -> int | None:
        """Bytes of the weights of these names, or all, whole or on each device; None where they are not known."""
        if self.weight_dtype is None:
            return None
        if self.parameters is not None:
            count = self.parameters if placement is None else -(-self.parameters // self.tp)
            return count * BITS[self.weight_dtype] // 8
        shapes = param_shapes(self.config, self.weight_dtype, placement)
        return sum(map(_nbytes, jax.tree.leaves([leaf for name, leaf in shapes.items() if names is None or name in names])))

    @cached_property
    def weight_bytes(self) -> int | None:
        """All weights, once and without padding; None where they are not known."""
        return self._weights(None)

    @cached_property
    def device_weight_bytes(self) -> int | None:
        """The weights on each device; a number of `parameters` is taken to divide over tp."""
        return self._weights(self.placement)

    @property
    def extra_weight_bytes(self) -> int | None:
        """What the weights of all devices take beyond once: copies and padding."""
        if self.weight_bytes is None or self.device_weight_bytes is None:
            return None
        return self.device_weight_bytes * self.devices - self.weight_bytes

    @cached_property
    def read_weight_bytes(self) -> int | None:
        """What a step reads of them: an embedding that is not the head too is only looked up."""
        if self.parameters is None and not self.config.tied_head:
            return self._weights(self.placement, ("norm", "head", "layers"))
        return self.device_weight_bytes

    @property
    def device_bytes(self) -> int:
        """Weights, where they are known, and cache on each device."""
        return (self.device_weight_bytes or 0) + self.device_cache_bytes

    @property
    def step_bytes(self) -> int:
        """What a decode step of a whole model takes beside them on a TPU; not known elsewhere, and left out.

        XLA lays the weights of q out anew there, once a call, and those of k and v where a device has several KV heads; all
        the rest stayed under 32 MiB in programs compiled for v5e and v6e.
        """
        if self.device is None or not self.device.is_tpu or self.weight_dtype is None or self.parameters is not None:
            return 0
        names = [f"attention.{letter}" for letter in ("qkv" if self.heads.kv_heads_per_device > 1 else "q")]
        layers = param_shapes(self.config, self.weight_dtype, self.placement)["layers"]
        return sum(_nbytes(layer[name]) for layer in layers for name in names) + 32 * 2**20

    @property
    def room(self) -> int | None:
        """The bytes of a device that are left for the cache, below zero where the weights alone are too many."""
        return None if self.device is None else self.device.usable - (self.device_weight_bytes or 0) - self.step_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the cache is no more than there is room for; None without a device."""
        return None if self.room is None else self.device_cache_bytes <= self.room

    @property
    def largest_batch(self) -> int | None:
        """The most rows of this context that fit, 0 where none does; None without a device."""
        if self.room is None:
            return None
        row = self._numbers(self.data, self.context, self.placement) * BITS[self.cache_dtype]
        return max(0, self.room * 8 // row) * self.data

    @cached_property
    def largest_context(self) -> int | float | None:
        """The longest context that fits at this batch, 0 where none does, infinite if windows end it; None without a device."""
        room = self.room
        if room is None:
            return None

        def fits(context: int) -> bool:
            return self._bytes(self._numbers(self.batch, context, self.placement)) <= room

        if not self.windows[None] and fits(max(filter(None, self.windows))):
            return math.inf
        longest, too_long = 0, 1
        while fits(too_long):
            longest, too_long = too_long, 2 * too_long
        while too_long - longest > 1:
            middle = (longest + too_long) // 2
            longest, too_long = (middle, too_long) if fits(middle) else (longest, middle)
        return longest

    def ceiling(self, filled: bool = True) -> float | None:
        """The most tokens/s of all rows: a step reads its weights once, and the cache of every row once if `filled`.

        Without known weights it is the ceiling of the cache alone. None where nothing is read or the bandwidth is not known.
        """
        read = (self.read_weight_bytes or 0) + (self.device_cache_bytes if filled else 0)
        if self.device is None or self.device.bandwidth is None or not read:
            return None
        return self.batch * self.device.bandwidth / read

    @property
    def cards(self) -> int | None:
        """How many devices the bytes of the whole cache fill; None without a device."""
        return None if self.device is None else -(-self.cache_bytes // self.device.usable)

    def facts(self) -> dict[str, Any]:
        """Returns everything as names and numbers, for JSON."""
        config, device, longest = self.config, self.device, self.largest_context
        given = ("context", "batch", "tp", "data", "policy", "cache_dtype", "weight_dtype")
        figures = ("weight_bytes", "device_weight_bytes", "extra_weight_bytes", "read_weight_bytes", "cache_bytes_per_token")
        figures += ("cache_bytes_per_late_token", "cache_bytes_per_row", "cache_bytes", "device_cache_bytes", "copied_bytes")
        figures += ("padding_bytes", "device_bytes", "step_bytes", "cards", "fits", "largest_batch")
        return {
            "kind": self.kind,
            "layers": config.num_layers,
            "query_heads": config.num_heads,
            **({"latent": self.latent} if self.latent else {"kv_heads": config.num_kv_heads, "head_width": config.head_dim}),
            "windows": [[window, layers] for window, layers in self.windows.items()],
            **{name: getattr(self, name) for name in (*given, *figures)},
            "device_cache_bytes_per_token": self.heads.bytes_per_token,
            "largest_context": None if longest == math.inf else longest,
            "tokens_per_second_ceiling": self.ceiling(),
            "tokens_per_second_ceiling_empty": self.ceiling(filled=False),
            "device": None if device is None else dataclasses.asdict(device),
            "mesh": {"data": self.data, "kv": self.heads.kv, "group": self.heads.group},
            "kv_heads_on": [self.heads.kv_heads_on(i) for i in range(self.tp)],
            "query_heads_on": [self.heads.query_heads_on(i) for i in range(self.tp)],
        }


def _nbytes(leaf: jax.ShapeDtypeStruct) -> int:
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def heads_only(num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Config:
    """Returns a config for planning a cache alone: its heads are real, and its other sizes are one."""
    return Config(
        vocab_size=1,
        num_layers=num_layers,
        model_dim=1,
        mlp_dim=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_length=1,
        attention=(Attention(rope=None),),
    )


def side_by_side(plan: Plan) -> dict[str, Plan]:
    """Returns the same layers, windows and query heads as MHA, GQA, MQA and MLA, for comparing their caches.

    GQA has the plan's own KV heads, or 8; MLA the plan's own latent, or DeepSeek's 512 + 64. Weights are left out.
    """
    given, heads = plan.config.num_kv_heads, plan.config.num_heads
    shared = given if 1 < given < heads else 8
    versions = {"MHA": heads, f"GQA-{shared}": shared, "MQA": 1}
    policy = "replicate" if plan.policy == "reject" else plan.policy
    bare = dataclasses.replace(plan, policy=policy, weight_dtype=None, parameters=None, latent=None)
    plans = {
        name: dataclasses.replace(bare, config=dataclasses.replace(plan.config, num_kv_heads=kv_heads))
        for name, kv_heads in versions.items()
        if heads % kv_heads == 0 and (name in ("MHA", "MQA") or 1 < kv_heads < heads)
    }
    return plans | {"MLA": dataclasses.replace(bare, latent=plan.latent or DEEPSEEK_LATENT)}


def report(plan: Plan, versions: Mapping[str, Plan]) -> str:
    """Returns the plan for people: what fits first, then the bytes, the heads, and the kinds of attention side by side."""
    blocks = [[_title(plan), *_headline(plan)], _byte_table(plan)]
    if plan.tp > 1:
        blocks.append([str(plan.heads)])
    return "\n\n".join("\n".join(block) for block in (*blocks, _versions_table(plan, versions), _notes(plan)))


def _title(plan: Plan) -> str:
    config, over = plan.config, [f"{layers} of window {w}" for w, layers in plan.windows.items() if w is not None]
    what = (
        f"a latent of {plan.latent}"
        if plan.latent
        else f"{config.num_kv_heads} KV head{'s' * (config.num_kv_heads > 1)} of width {config.head_dim}"
    )
    layers = f"{config.num_layers} layers" + (f" ({', '.join(over)})" if over else "")
    where = "1 device" if plan.devices == 1 else f"{plan.devices} devices (tp {plan.tp} x data {plan.data}, {plan.policy})"
    return (
        f"{plan.kind}: {layers}, {config.num_heads} query heads, {what}\n"
        f"context {plan.context:,}, batch {plan.batch:,}, cache in {plan.cache_dtype}, on {where}"
    )


def _headline(plan: Plan) -> list[str]:
    device, what = plan.device, "weights and cache" if plan.weight_bytes else "cache (weights are not known)"
    if device is None:
        return [f"each device holds {units(plan.device_bytes)[0]} of {what}; --device or --memory tells whether it fits"]
    left, longest = device.usable - plan.device_bytes - plan.step_bytes, plan.largest_context
    what += f" and {units(plan.step_bytes)[0]} for a step" if plan.step_bytes else ""
    verdict = "fits on" if plan.fits else "DOES NOT FIT on"
    over = f"{units(abs(left))[0]} {'left' if left >= 0 else 'too much'}"
    lines = [
        f"{verdict} {device.name}: {what} {units(plan.device_bytes + plan.step_bytes)[0]} of {units(device.usable)[0]}, {over}"
    ]
    lines.append(f"largest batch at this context    {plan.largest_batch:>12,}")
    lines.append(f"largest context at this batch    {'no limit' if longest == math.inf else f'{longest:,}':>12} tokens")
    full, empty = plan.ceiling(), plan.ceiling(filled=False)
    if full is None:
        return [*lines, "ceiling of tokens/s              not known: --memory says nothing of the bandwidth"]
    start = f"; {empty:,.1f} with an empty cache" if empty else " from the cache alone"
    return [*lines, f"ceiling of tokens/s, all rows    {full:>12,.1f} with a full cache{start}"]


def _byte_table(plan: Plan) -> list[str]:
    each = "on each device"
    rows: list[tuple[str, int | None]] = [("weights", plan.weight_bytes)]
    if plan.weight_bytes and plan.devices > 1:
        rows += [(f"  {each}", plan.device_weight_bytes), ("  copies, padding, on all", plan.extra_weight_bytes)]
    rows.append(("cache of a token", plan.cache_bytes_per_token))
    if plan.windows[None] < plan.kept.num_layers:
        rows.append(("  when windows are full", plan.cache_bytes_per_late_token))
    rows += [("cache of a row", plan.cache_bytes_per_row), ("cache, whole", plan.cache_bytes)]
    if plan.devices > 1:
        rows += [(f"  {each}", plan.device_cache_bytes), ("  copies, on all", plan.copied_bytes)]
        rows.append(("  padding, on all", plan.padding_bytes))
    rows += [(f"weights and cache {each}", plan.device_bytes)] if plan.weight_bytes else []
    return _table(
        ("", "bytes", "decimal", "binary"),
        [(name, "not known", "", "") if count is None else (name, f"{count:,}", *units(count)) for name, count in rows],
    )


def _versions_table(plan: Plan, versions: Mapping[str, Plan]) -> list[str]:
    names = ["cache, whole", "bytes", "decimal", "binary"]
    names += [f"devices of {units(plan.device.usable)[0]}"] if plan.device else []
    names += ["each device"] if plan.devices > 1 else []
    rows = []
    for name, other in versions.items():
        row = [name, f"{other.cache_bytes:,}", *units(other.cache_bytes)]
        row += [f"{other.cards:,}"] if plan.device else []
        row += [units(other.device_cache_bytes)[0]] if plan.devices > 1 else []
        rows.append(row)
    return _table(names, rows)


def _table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    cells = [tuple(names), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(first: str, *others: str) -> str:
        return " | ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip()

    return [line(*row) for row in cells]


def _notes(plan: Plan) -> list[str]:
    step = "" if plan.step_bytes else "a step or "
    notes = [f"Not counted: what {step}the reading of a prompt needs for the moment, and the runtime's own."]
    if plan.cache_dtype not in DTYPES:
        notes.append(f"Nor the scales that go with {plan.cache_dtype}; gqa_jax itself keeps {', '.join(DTYPES)} today.")
    if plan.device is not None and plan.device.source != "--memory":
        device = plan.device
        speed = units(device.bandwidth)[0] if device.bandwidth else "?"
        usable = f", {device.usable / GIB:.2f} GiB of it usable" if device.usable < device.memory else ""
        notes.append(f"{device.name}: {units(device.memory)[0]}{usable}, {speed}/s ({device.source}).")
    return notes


def plot(plan: Plan, versions: Mapping[str, Plan], path: str) -> None:
    """Draws the bytes of cache on each device against the context, and the memory that there is for it, into a file.

    Raises:
        ValueError: matplotlib is not installed, or does not know the file's format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'gqa-jax[plot]'.") from error
    most = max(2**20, 2 * plan.context)
    contexts = sorted({*np.geomspace(256, most, 60).astype(int).tolist(), plan.context})
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    ends = {}
    for (name, other), style in zip(versions.items(), ("-", "--", "-.", ":"), strict=False):
        sizes = [dataclasses.replace(other, context=context).device_cache_bytes for context in contexts]
        axes.loglog(contexts, sizes, linestyle=style, linewidth=2)
        ends[name] = sizes[-1]
    labels: list[list[str]] = []
    for name in sorted(ends, key=ends.__getitem__, reverse=True):
        if labels and ends[labels[-1][0]] < 1.5 * ends[name]:  # Too close for a line of its own beside it.
            labels[-1].append(name)
        else:
            labels.append([name])
    for names in labels:
        at, how = (contexts[-1], ends[names[0]]), {"textcoords": "offset points", "va": "center", "annotation_clip": False}
        axes.annotate("\n".join(names), at, (4, 0), **how)
    if plan.device is not None and plan.room is not None and plan.room > 0:
        what = f"{plan.device.name}: {units(plan.room)[0]}" + (" beside the weights" if plan.weight_bytes else "")
        axes.axhline(plan.room, color="black", linewidth=0.8)
        axes.annotate(what, (contexts[0], plan.room), (2, 3), textcoords="offset points")
    axes.margins(x=0)
    axes.axvline(plan.context, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("context, tokens in each row")
    axes.set_ylabel("bytes of cache on each device")
    axes.set_title(_title(plan), fontsize="medium", loc="left")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
