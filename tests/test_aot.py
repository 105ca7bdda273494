"""What the compilers of TPU v5e, TPU v6e and H200 make of the sharded decode loop, with no such device at hand.

Needs the extra `aot`. Only shapes go in. For each device: argument and donated bytes are the planner's, nothing as large as one
layer's keys is made, and the devices exchange what the policy states and no more. Bad programs show that the checks can fail.
"""

import dataclasses
import math
import os
import pathlib
import re
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from gqa_jax import cache as kv
from gqa_jax import decoder, loop
from gqa_jax.config import Config
from gqa_jax.devices import DEVICES
from gqa_jax.planner import Plan
from gqa_jax.sampling import sampling
from gqa_jax.sharding import Placement, make_mesh
from tests.test_compiled import SMOLLM2, made

pytest.importorskip("libtpu", reason="the extra aot is not installed")
pytest.importorskip("jax_plugins.xla_cuda13", reason="the extra aot is not installed")

LLAMA3 = Config(
    vocab_size=128_256,
    num_layers=32,
    model_dim=4096,
    mlp_dim=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    context_length=8192,
    tied_head=False,
)
TARGETS = {
    "v5e": {"platform": "tpu", "topology_name": "v5e:2x4"},
    "v6e": {"platform": "tpu", "topology_name": "v6e:2x4"},
    "h200": {
        "platform": "cuda",
        "topology": "1x1x8",
        "target_config": pathlib.Path(__file__).with_name("h200.txtpb").read_text(),
    },
}
BATCH = 8
SLOTS_A_STEP = 128  # A TPU's tile; caches of other capacities are filled up to it.
NUMBER_BYTES = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1}
# The result of an exchange; of one that runs beside other work, that of its end.
SENT = re.compile(
    r" = (.*?) (all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|ragged-all-to-all|reduce-scatter)"
    r"(?:-done)?\("
)
# f32[3,4]{1,0:T(8,128)}: a shape, its axes from the fastest, and the tile that a TPU fills up in the fastest axes.
PLACED = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)(?::T\(([\d,]+)\))?)?")


@pytest.fixture(scope="module", autouse=True)
def no_tpu_is_looked_for():
    quiet = {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # Tests run in several processes.
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_LOG_DIR": "disabled",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in quiet.items():
            patch.setitem(os.environ, name, value)
        yield


@cache
def topology(target: str):
    return topologies.get_topology_desc(**TARGETS[target])


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def device_bytes(tree) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def state_on(placement: Placement, config: Config, batch: int, capacity: int) -> loop.State:
    """The shapes and places of what `generate` hands to its loop, with a bfloat16 cache."""

    def place(letters, shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placement.sharding(letters))

    def layers():
        shape = kv.cache_shape(config, batch, kv.num_slots(capacity, None, placement), placement)
        return tuple(place(kv.AXES, shape, jnp.bfloat16) for _ in range(config.num_layers))

    windows = (None,) * config.num_layers
    return loop.State(
        memory=kv.KVCache(layers(), layers(), place("B", (batch,)), capacity, windows, placement),
        logits=place("B V", (batch, config.vocab_size), jnp.float32),
        tokens=place("B T", (batch, 64)),
        drawn=place("B", (batch,)),
        stopped=place("B", (batch,), jnp.bool_),
        seen=None,
        step=place("", ()),
    )


def compiled_loop(placement: Placement, config: Config, state: loop.State, by_xla: bool = False):
    """`by_xla` leaves it to XLA's own rules what the devices exchange."""
    how = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement.sharding("B")),
        jax.eval_shape(lambda: sampling(state.drawn.shape[0])),
    )
    seed, stop, until = (
        jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((), "uint32"), ((1,), "int32"), ((), "int32"))
    )
    params = decoder.param_shapes(config, jnp.bfloat16, placement)
    if by_xla:
        del params["placement"]
    return loop.decode.lower(params, how, seed, stop, until, state, config=config).compile()


def argument_bytes(program: str) -> list[tuple[int, int]]:
    """Of each argument of a compiled program, the bytes on a device without and with what fills up its tiles."""
    head = program[: program.index("\n")]
    arguments = re.search(r"entry_computation_layout=\{\((.*?)\)->", head)[1]
    found = []
    for dtype, shape, fastest, tile in PLACED.findall(arguments):
        axes, tiles = numbers(shape), numbers(tile)[::-1]
        filled = [axes[axis] for axis in numbers(fastest)] if fastest else axes[::-1]
        filled += [1] * (len(tiles) - len(filled))
        filled = [-(-size // tile) * tile for size, tile in zip(filled, tiles + [1] * len(filled), strict=False)]
        found.append((math.prod(axes) * NUMBER_BYTES[dtype], math.prod(filled) * NUMBER_BYTES[dtype]))
    return found


def sent(program: str) -> Counter:
    """What the devices exchange: kind, dtype and how many numbers each device has then, for each array of each exchange.

    A TPU writes an exchange that it fuses into other work several times, with one chain_id.
    """
    found, chains = Counter(), set()
    for line in program.splitlines():
        if match := SENT.search(line):
            result, kind = match.groups()
            chain = re.search(r'chain_id="(\d+)"', line)
            if chain is None or (kind, chain[1]) not in chains:
                found.update(
                    (kind, dtype, math.prod(numbers(shape))) for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", result)
                )
            chains.add((kind, chain and chain[1]))
    return found


def stated(plan: Plan) -> Counter:
    """What the policy says that the devices exchange for one token a row."""
    config, heads, batch = plan.config, plan.heads, plan.batch // plan.data
    exchanges = Counter(
        {
            # After the embedding, each attention and each MLP.
            ("all-reduce", "bf16", batch * config.model_dim): 1 + 2 * config.num_layers,
            # The likeliest token of each device's part of the vocabulary, and its logit.
            ("all-gather", "s32", batch * plan.tp): 1,
            ("all-gather", "f32", batch * plan.tp): 1,
        }
    )
    if plan.data > 1:
        exchanges["all-reduce", "u32", 1] = 1  # Whether the rows of the others have stopped too.
    if plan.policy == "split" and heads.group > 1:
        # All queries of the group go in; what a device has read for others goes out, with its log-sum-exp.
        queries = batch * heads.kv_heads_per_device * heads.padded_group_size
        exchanges["all-gather", "bf16", queries * config.head_dim] += config.num_layers
        exchanges["all-to-all", "f32", queries * (config.head_dim + 1)] += config.num_layers
    return exchanges


def longest_on_v5e() -> int:
    """The context that the planner gives eight rows of Llama 3 on eight v5e, in whole steps."""
    plan = Plan(LLAMA3, context=1, batch=BATCH, tp=8, device=DEVICES["v5e"])
    return plan.largest_context // SLOTS_A_STEP * SLOTS_A_STEP


# So long or so wide that one layer's keys are larger than every weight, and than the 128 MiB that a TPU core has on the chip.
LLAMA_ON_8 = {"config": LLAMA3, "batch": BATCH, "tp": 8}
SMOLLM2_ON_8 = {"config": SMOLLM2, "batch": 32, "tp": 8, "context": 65_536}


@pytest.mark.parametrize(
    ("target", "plan"),
    [
        ("v5e", LLAMA_ON_8 | {"context": None}),
        ("v5e", SMOLLM2_ON_8 | {"policy": "split"}),
        ("v6e", LLAMA_ON_8 | {"tp": 4, "data": 2, "context": 131_072}),
        ("v6e", SMOLLM2_ON_8),
        ("v6e", SMOLLM2_ON_8 | {"policy": "split"}),
        ("h200", LLAMA_ON_8 | {"context": 131_072}),
        ("h200", SMOLLM2_ON_8 | {"policy": "split"}),
    ],
    ids=lambda x: (
        x if isinstance(x, str) else f"{x['config'].num_heads}-{x['config'].num_kv_heads}-{x.get('policy')}-{x['tp']}"
    ),
)
def test_the_decode_loop_holds_what_is_planned_and_sends_what_the_policy_says(target, plan):
    plan = Plan(**plan | {"context": plan["context"] or longest_on_v5e()}, device=DEVICES[target])
    assert plan.fits
    where = {"tp": plan.tp, "data": plan.data, "policy": plan.policy, "devices": topology(target).devices}
    placement = make_mesh(plan.config, **where)
    state = state_on(placement, plan.config, plan.batch, plan.context)
    compiled = compiled_loop(placement, plan.config, state)
    program, usage = compiled.as_text(), compiled.memory_analysis()

    # Beside weights and cache: the rest of the state, one stop token and the number of steps. Greedy decoding has no use for
    # the rest of the arguments.
    sizes = argument_bytes(program)
    donated = sizes[-len(jax.tree.leaves(state)) :]
    rest = device_bytes(dataclasses.replace(state, memory=state.memory.length))
    beside = sum(size for size, _ in sizes) - plan.device_weight_bytes - plan.device_cache_bytes - rest
    assert beside in (8, 12)  # jax 0.10 keeps the seed.
    assert sum(size for size, _ in donated) == plan.device_cache_bytes + rest
    # What fills up tiles: nothing on a GPU, little on a TPU, and nothing in the cache.
    assert usage.argument_size_in_bytes == pytest.approx(sum(filled for _, filled in sizes), abs=16)
    assert usage.alias_size_in_bytes == pytest.approx(sum(filled for _, filled in donated), abs=16)
    assert usage.argument_size_in_bytes < 1.001 * sum(size for size, _ in sizes)
    assert usage.alias_size_in_bytes - plan.device_cache_bytes - rest < 32 * 2**10

    keys = state.memory.k[0].sharding.shard_shape(state.memory.k[0].shape)
    assert made(program, math.prod(keys)) == []
    # A TPU lays the weights of q out anew, those of k and v too where a device has several KV heads: once a call, not a token.
    layers = decoder.param_shapes(plan.config, jnp.bfloat16, placement)["layers"]
    anew = device_bytes([layer[f"attention.{name}"] for layer in layers for name in "qkv"]) if target != "h200" else 0
    assert usage.temp_size_in_bytes < anew + device_bytes(state.memory.k[0]) // 2
    assert sent(program) == stated(plan)


def test_a_context_one_step_too_long_for_v5e_is_refused_by_planner_and_compiler():
    # One step shorter is in the test above.
    plan = Plan(LLAMA3, context=longest_on_v5e() + SLOTS_A_STEP, batch=BATCH, tp=8, device=DEVICES["v5e"])
    assert not plan.fits
    placement = make_mesh(LLAMA3, tp=8, devices=topology("v5e").devices)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RESOURCE_EXHAUSTED.*exceeds available HBM \(15\.75G\)"):
        compiled_loop(placement, LLAMA3, state_on(placement, LLAMA3, BATCH, plan.context))


def test_the_check_finds_a_cache_that_crosses_the_wire():
    # Slots split over a group of four, and XLA's own rules for what that means: K and V of two layers are brought together.
    config = dataclasses.replace(LLAMA3, num_layers=2, num_kv_heads=2)
    placement = make_mesh(config, tp=8, policy="split", devices=topology("v5e").devices)
    state = state_on(placement, config, BATCH, 2**14)
    state = dataclasses.replace(state, memory=dataclasses.replace(state.memory, placement=None))
    program = compiled_loop(placement, config, state, by_xla=True).as_text()
    assert sent(program)["all-gather", "bf16", BATCH * 2**14 * 128] == 4


def read_before_write(old, new, length, count, first, stride, wraps):
    place = length % old.shape[1]
    kept = jax.lax.dynamic_slice_in_dim(old, place, 1, axis=1)
    return jax.lax.dynamic_update_slice_in_dim(old, jnp.where(count > 0, new, kept), place, axis=1)


def test_the_check_finds_a_cache_that_is_copied_for_each_token(monkeypatch):
    # The cache's layout on a TPU has the slots innermost where heads are 64 wide, and such a read asks for another.
    monkeypatch.setattr(kv, "_put_row", read_before_write)
    config = dataclasses.replace(SMOLLM2, num_layers=2)
    placement = make_mesh(config, tp=8, devices=topology("v5e").devices)
    program = compiled_loop(placement, config, state_on(placement, config, BATCH, 2**18)).as_text()
    assert set(made(program, BATCH * 2**18 * 64)) == {"copy bf16[8,1,262144,64]"}
