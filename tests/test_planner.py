"""The planner: its bytes are those of the formula, of real caches and weights, and of compiled programs; and the command."""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gqa_jax
from gqa_jax import Attention, Config, decoder
from gqa_jax.__main__ import main
from gqa_jax.devices import BYTES, DEVICES, PARAMETERS, TOKENS, Device, amount, units
from gqa_jax.planner import Plan, heads_only, side_by_side

SIZES = {"vocab_size": 103, "num_layers": 3, "model_dim": 22, "mlp_dim": 37, "head_dim": 10, "context_length": 131}
HEADS = [(9, 3), (4, 1), (14, 2), (32, 8), (5, 5)]
SMOLLM2 = heads_only(30, 9, 3, 64)
LOCAL, GLOBAL = Attention(window=512), Attention()
GEMMA3 = dataclasses.replace(heads_only(18, 4, 1, 256), attention=(*(LOCAL,) * 5, GLOBAL))
CACHE_ALONE = {"weight_dtype": None}


def config_of(heads, kv_heads, **more):
    return Config(**SIZES | more, num_heads=heads, num_kv_heads=kv_heads)


def held_by(device, arrays):
    """Bytes of the shards that one device really has."""
    return sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards if shard.device == device)


@pytest.mark.parametrize(
    ("config", "latent", "exactly", "decimal", "binary", "cards"),
    [
        (heads_only(61, 128, 128, 128), None, 3_997_696_000_000, "4.00 TB", "3.64 TiB", 50),
        (heads_only(61, 128, 8, 128), None, 249_856_000_000, "249.9 GB", "232.7 GiB", 4),
        (heads_only(61, 128, 1, 128), None, 31_232_000_000, "31.2 GB", "29.1 GiB", 1),
        (heads_only(61, 128, 128, 128), 512 + 64, 70_272_000_000, "70.3 GB", "65.4 GiB", 1),
    ],
    ids=["MHA", "GQA-8", "MQA", "MLA"],
)
def test_a_million_tokens_take_what_the_formula_says(config, latent, exactly, decimal, binary, cards):
    device = Device("a card", 81 * 10**9, 80 * 10**9, None, "")
    plan = Plan(config, context=10**6, latent=latent, device=device, **CACHE_ALONE)
    assert plan.cache_bytes == plan.device_cache_bytes == plan.device_bytes == exactly
    assert units(plan.cache_bytes) == (decimal, binary)
    assert plan.cards == cards
    assert plan.fits is (exactly <= 80 * 10**9)


def test_case_a31_smollm2_takes_23040_bytes_a_token():
    plan = Plan(SMOLLM2, context=2048, **CACHE_ALONE)
    assert plan.cache_bytes_per_token == plan.cache_bytes_per_late_token == 23040
    assert plan.cache_bytes == gqa_jax.init_cache(SMOLLM2, 1, 2048, jnp.bfloat16).nbytes == 2048 * 23040


def test_case_a31_gemma3_counts_its_windows():
    plan = Plan(GEMMA3, context=2048, **CACHE_ALONE)
    assert plan.cache_bytes == gqa_jax.init_cache(GEMMA3, 1, 2048, jnp.bfloat16).nbytes == 14_155_776
    without = dataclasses.replace(GEMMA3, attention=(GLOBAL,))
    assert Plan(without, context=2048, **CACHE_ALONE).cache_bytes == 37_748_736
    assert (plan.cache_bytes_per_token, plan.cache_bytes_per_late_token) == (18 * 1024, 3 * 1024)
    grown = dataclasses.replace(plan, context=2049)
    assert grown.cache_bytes - plan.cache_bytes == plan.cache_bytes_per_late_token


@pytest.mark.parametrize("windows", [(None,), (7, None), (7, 5)], ids=str)
@pytest.mark.parametrize("policy", ["replicate", "split"])
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_planned_cache_bytes_are_those_of_the_real_cache(heads, kv_heads, data, policy, windows):
    config = config_of(heads, kv_heads, attention=tuple(Attention(window=window) for window in windows))
    for tp in (1, 2, 3, 4, 8):
        if tp * data > 8:
            continue
        plan = Plan(config, context=13, batch=6, tp=tp, data=data, policy=policy)
        mesh = gqa_jax.make_mesh(config, tp=tp, data=data, policy=policy)
        cache = gqa_jax.init_cache(config, 6, 13, jnp.bfloat16, mesh=mesh)
        each = {held_by(device, (*cache.k, *cache.v)) for device in mesh.mesh.devices.flat}
        assert each == {plan.device_cache_bytes}
        assert plan.cache_bytes == gqa_jax.init_cache(config, 6, 13, jnp.bfloat16).nbytes
        assert cache.nbytes == plan.cache_bytes + plan.padding_bytes
        assert sum(each) * tp * data == plan.cache_bytes + plan.padding_bytes + plan.copied_bytes
        assert dict(mesh.mesh.shape) == plan.facts()["mesh"]


@pytest.mark.parametrize("changes", [{}, {"tied_head": False, "qk_norm": True, "qkv_bias": True, "mlp_bias": True}], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_planned_weight_bytes_are_those_of_real_weights(heads, kv_heads, changes):
    config = config_of(heads, kv_heads, **changes)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), decoder.param_shapes(config, jnp.bfloat16))
    for tp in (1, 3, 4, 8):
        plan = Plan(config, context=5, tp=tp)
        mesh = gqa_jax.make_mesh(config, tp=tp)
        leaves = jax.tree.leaves(gqa_jax.place(params, config, mesh))
        assert {held_by(device, leaves) for device in mesh.mesh.devices.flat} == {plan.device_weight_bytes}
        assert plan.weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        assert plan.extra_weight_bytes == tp * plan.device_weight_bytes - plan.weight_bytes
        looked_up = 0 if config.tied_head else -(-103 // tp) * 22 * 2
        assert plan.device_weight_bytes - plan.read_weight_bytes == looked_up


@pytest.mark.parametrize(("tp", "data"), [(1, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize("policy", ["replicate", "split"])
@pytest.mark.slow
def test_planned_bytes_are_the_arguments_of_the_compiled_step(tp, data, policy, quick_compilation):
    config = config_of(6, 2, attention=(Attention(window=7), Attention()))
    mesh = gqa_jax.make_mesh(config, tp=tp, data=data, policy=policy)
    params = gqa_jax.init_params(config, jax.random.key(0), jnp.bfloat16, mesh=mesh)
    cache = gqa_jax.init_cache(config, 4, 13, jnp.bfloat16, mesh=mesh)
    tokens = jax.device_put(jnp.zeros((4, 1), jnp.int32), mesh.sharding("B T"))
    step = jax.jit(lambda params, tokens, cache: gqa_jax.forward(params, tokens, cache, config), donate_argnums=2)
    arguments = step.lower(params, tokens, cache).compile().memory_analysis().argument_size_in_bytes
    plan = Plan(config, context=13, batch=4, tp=tp, data=data, policy=policy)
    ids_and_lengths = 2 * 4 * 4 // data
    assert arguments == plan.device_bytes + ids_and_lengths


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "group", "copies"), [(4, 1, 4, 4, 3), (14, 2, 8, 4, 3), (32, 8, 16, 2, 1), (32, 8, 8, 1, 0)]
)
def test_split_keeps_one_part_of_what_replicate_copies(heads, kv_heads, tp, group, copies):
    plan = Plan(config_of(heads, kv_heads), context=48, batch=5, tp=tp)
    assert plan.heads.group == group
    assert plan.copied_bytes == copies * plan.cache_bytes
    split = dataclasses.replace(plan, policy="split")
    assert split.device_cache_bytes * group == plan.device_cache_bytes
    assert (split.copied_bytes, split.padding_bytes) == (0, 0)


def test_a_latent_is_on_every_device_unless_its_slots_are_split():
    plan = Plan(heads_only(61, 128, 128, 128), context=4096, batch=3, tp=8, latent=576, **CACHE_ALONE)
    assert plan.kind == "MLA"
    assert plan.cache_bytes == plan.device_cache_bytes == 61 * 3 * 4096 * 576 * 2
    assert dataclasses.replace(plan, policy="split").device_cache_bytes * 8 == plan.cache_bytes
    with pytest.raises(ValueError, match="1 KV heads do not divide over 8 devices"):
        dataclasses.replace(plan, policy="reject")


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 32), ("float16", 16), ("fp8", 8), ("int8", 8), ("int4", 4)])
def test_a_cache_takes_the_bits_of_its_dtype(dtype, bits):
    plan = Plan(SMOLLM2, context=101, batch=7, cache_dtype=dtype, **CACHE_ALONE)
    assert plan.cache_bytes * 8 == 2 * 30 * 7 * 3 * 64 * 101 * bits
    assert plan.cache_bytes_per_row * 7 == plan.cache_bytes


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("more", [{}, {"tp": 8}, {"tp": 8, "policy": "split"}, {"tp": 3, "data": 2, "batch": 6}], ids=str)
@pytest.mark.parametrize("config", [heads_only(32, 32, 8, 128), GEMMA3], ids=["llama-8B", "gemma"])
def test_the_largest_context_and_batch_fit_and_one_more_does_not(config, more, name):
    plan = Plan(config, context=9973, parameters=8 * 10**9 // 3, device=DEVICES[name], **more)
    longest, rows = plan.largest_context, plan.largest_batch
    assert longest > 0
    assert rows > 0
    assert rows % plan.data == 0
    for changes, fits in (
        ({"context": longest}, True),
        ({"context": longest + 1}, False),
        ({"batch": rows}, True),
        ({"batch": rows + plan.data}, False),
    ):
        changed = dataclasses.replace(plan, **changes)
        assert changed.fits is fits
        assert fits is (changed.device_weight_bytes + changed.device_cache_bytes + changed.step_bytes <= DEVICES[name].usable)


def test_a_v5e_holds_15_75_gib_to_the_byte():
    # Llama 3 8B's heads at tp 8: each device keeps one KV head of each of 32 layers, 16 KiB a token.
    plan = Plan(heads_only(32, 32, 8, 128), context=1, batch=1, tp=8, device=DEVICES["v5e"], **CACHE_ALONE)
    assert plan.largest_context == 15.75 * 2**30 / 2**14 == 1_032_192
    assert dataclasses.replace(plan, context=1_032_192).fits
    # As XLA compiled it for eight v5e with 1789 MiB of weights on each: 106496 slots of 8 rows do, 131072 do not.
    decoder = dataclasses.replace(plan, batch=8, weight_dtype="bfloat16", parameters=8 * 1789 * 2**19)
    assert decoder.device_weight_bytes == 1789 * 2**20
    assert dataclasses.replace(decoder, context=106_496).device_bytes == 15101 * 2**20
    assert dataclasses.replace(decoder, context=106_496).fits
    assert not dataclasses.replace(decoder, context=131_072).fits


def test_nothing_fits_beside_weights_that_fill_the_device():
    plan = Plan(SMOLLM2, context=11, parameters=10**11, device=DEVICES["v5e"])
    assert (plan.fits, plan.largest_batch, plan.largest_context) == (False, 0, 0)


def test_a_context_has_no_end_where_every_layer_has_a_window():
    config = dataclasses.replace(heads_only(4, 6, 2, 10), attention=(Attention(None, window=7), Attention(None, window=5)))
    assert Plan(config, context=3, device=DEVICES["v5e"], **CACHE_ALONE).largest_context == math.inf
    small = Device("small", 1000, 1000, None, "")
    # Six tokens: 2 layers of 6 slots, 2 of 5, each 2 (K and V) x 2 heads x 10 wide x 2 bytes: 1760; two tokens: 640.
    assert Plan(config, context=3, device=small, **CACHE_ALONE).largest_context == 3
    assert Plan(config, context=3, device=dataclasses.replace(small, usable=1760), **CACHE_ALONE).largest_context == 6


def test_the_ceiling_is_bandwidth_over_what_a_step_reads():
    plan = Plan(SMOLLM2, context=1000, batch=6, tp=3, data=2, parameters=9 * 10**8, device=DEVICES["h200"])
    weights, cache = 3 * 10**8 * 2, 3 * 1000 * 23040 // 3
    assert plan.ceiling() == pytest.approx(6 * 4.8e12 / (weights + cache))
    assert plan.ceiling(filled=False) == pytest.approx(6 * 4.8e12 / weights)
    alone = dataclasses.replace(plan, weight_dtype=None, parameters=None)
    assert alone.ceiling() == pytest.approx(6 * 4.8e12 / cache)
    assert alone.ceiling(filled=False) is None


def test_kinds_stand_side_by_side_with_the_same_layers_and_windows():
    plans = side_by_side(Plan(GEMMA3, context=2048, tp=4, policy="replicate", **CACHE_ALONE))
    assert {name: plan.cache_bytes for name, plan in plans.items()} == {
        "MHA": 4 * 14_155_776,
        "MQA": 14_155_776,
        "MLA": 14_155_776 * 576 // 512,
    }
    assert list(side_by_side(Plan(heads_only(2, 32, 4, 10), context=3))) == ["MHA", "GQA-4", "MQA", "MLA"]
    assert list(side_by_side(Plan(heads_only(2, 32, 32, 10), context=3))) == ["MHA", "GQA-8", "MQA", "MLA"]
    assert list(side_by_side(Plan(heads_only(2, 32, 8, 10), context=3, tp=2, policy="reject"))) == list(
        side_by_side(Plan(heads_only(2, 32, 8, 10), context=3))
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"context": 0}, "context is 0; it must be a whole number of at least 1"),
        ({"batch": 2.0}, "batch is 2.0"),
        ({"batch": 3, "data": 2}, "3 rows do not divide over 2 devices"),
        ({"tp": 4, "policy": "reject"}, "3 KV heads do not divide over 4 devices; tp = 1, 3 would"),
        ({"tp": 4097}, "tp is 4097; plans are made up to 4096"),
        ({"cache_dtype": "int3"}, "cache_dtype is 'int3'; it must be one of float32"),
        ({"weight_dtype": "int4"}, "weight_dtype is 'int4'; it must be one of float32, bfloat16, float16"),
        ({"config": heads_only(10_001, 4, 2, 8)}, "layers is 10001; plans are made up to 10000"),
    ],
)
def test_what_cannot_be_planned_is_refused(unchecked, changes, words):
    with pytest.raises(ValueError, match=words):
        Plan(**{"config": SMOLLM2, "context": 7} | changes)


@pytest.mark.parametrize(
    ("text", "suffixes", "number"),
    [
        ("128k", TOKENS, 131_072),
        ("1M", TOKENS, 1_048_576),
        ("1000000", TOKENS, 10**6),
        ("80GB", BYTES, 80 * 10**9),
        ("80 GiB", BYTES, 80 * 2**30),
        ("15.75gib", BYTES, 16_911_433_728),
        ("0.1GB", BYTES, 10**8),
        ("8e9", PARAMETERS, 8 * 10**9),
    ],
)
def test_amounts_are_read_as_people_write_them(text, suffixes, number):
    assert amount("number", text, suffixes, "") == number


@pytest.mark.parametrize("text", ["", "k", "-3", "0", "1.5", "0.1k", "80Gb/s", "1e99", "nan", "inf", "9" * 5000])
def test_other_amounts_are_refused(text):
    with pytest.raises(ValueError, match=r"it must be a whole number of at least 1, such as 7\."):
        amount("number", text, TOKENS, "7")


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_known_devices_name_their_source(device):
    assert 0 < device.usable <= device.memory
    assert device.source


# The command.

MISSION = ["--layers", "61", "--heads", "128", "--kv-heads", "8", "--head-dim", "128", "--context", "1000000"]
MLA = ["--layers", "61", "--heads", "128", "--kv-lora-rank", "512", "--rope-dim", "64", "--context", "1000000"]


@pytest.fixture
def run(capsys):
    """Runs `gqa-jax plan` and returns its exit code, output and errors."""

    def run(*arguments):
        try:
            code = main(["plan", *map(str, arguments)])
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


def test_the_command_reproduces_the_figures_side_by_side(run):
    code, out, err = run(*MISSION, "--memory", "80GB")
    assert (code, err) == (0, "")
    rows = [line.replace(" ", "").split("|") for line in out.splitlines() if line.startswith(("MHA", "GQA-", "MQA", "MLA"))]
    assert rows == [
        ["MHA", "3,997,696,000,000", "4.00TB", "3.64TiB", "50"],
        ["GQA-8", "249,856,000,000", "249.9GB", "232.7GiB", "4"],
        ["MQA", "31,232,000,000", "31.2GB", "29.1GiB", "1"],
        ["MLA", "70,272,000,000", "70.3GB", "65.4GiB", "1"],
    ]
    assert "DOES NOT FIT on this device: cache (weights are not known) 249.9 GB of 80.0 GB, 169.9 GB too much" in out
    assert f"largest context at this batch    {80 * 10**9 // 249_856:>12,} tokens" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("more", [[], ["--head-dim", "128"], ["--kv-heads", "4", "--head-dim", "128"]])
def test_mla_needs_no_kv_heads(run, more):
    result = json.loads(run(*MLA, *more, "--json")[1])
    assert (result["kind"], result["latent"], result["cache_bytes"]) == ("MLA", 576, 70_272_000_000)
    shared = "GQA-4" if "4" in more else "GQA-8"
    assert list(result["side_by_side"]) == (["MHA", shared, "MQA", "MLA"] if more else ["MLA"])


def test_a_model_is_planned_from_its_header_alone(run, smollm2_path, monkeypatch):
    from gqa_jax import checkpoint

    monkeypatch.setattr(checkpoint, "load_params", None)
    code, out, err = run(smollm2_path, "--device", "v5e", "--tp", 4, "--policy", "split", "--batch", 3, "--json")
    result = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert (result["context"], result["cache_dtype"], result["weight_dtype"]) == (8192, "float32", "float32")
    assert (result["weight_bytes"], result["cache_bytes_per_token"]) == (134_515_008 * 4, 46080)
    assert result["kv_heads_on"] == [[0], [1], [2], []]
    assert result["tokens_per_second_ceiling"] == pytest.approx(3 * 819e9 / result["device_bytes"])
    assert result["fits"] is True


def test_the_report_of_a_model_shows_windows_heads_and_what_is_not_counted(run, gemma3_path):
    code, out, _ = run(
        gemma3_path, "--dtype", "bfloat16", "--cache-dtype", "int8", "--context", "64k", "--tp", 2, "--device", "h200"
    )
    assert code == 0
    assert "MQA: 18 layers (15 of window 512), 4 query heads, 1 KV head of width 256" in out
    assert "fits on h200" in out
    assert "4 query heads, 1 KV heads on 2 devices: kv 1 x group 2, replicate" in out
    assert "Nor the scales that go with int8; gqa_jax itself keeps float32, bfloat16, float16 today." in out
    assert "https://www.nvidia.com/en-us/data-center/h200/" in out
    assert "is made for 32,768 tokens" in out
    assert max(len(line) for line in out.splitlines() if str(gemma3_path) not in line) <= 115


def test_without_a_device_nothing_is_said_to_fit(run):
    code, out, _ = run(*MISSION)
    assert code == 0
    assert "--device or --memory tells whether it fits" in out
    result = json.loads(run(*MISSION, "--json")[1])
    assert [result[name] for name in ("fits", "largest_batch", "largest_context", "cards", "weight_bytes")] == [None] * 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing: --layers, --heads, --kv-heads, --head-dim, --context. Give a MODEL, or"),
        (["--layers", 3, "--heads", 4], "Missing: --kv-heads, --head-dim, --context."),
        ([*MISSION[:4], "--kv-lora-rank", 512], "Missing: --rope-dim, --context."),
        ([*MLA, "--kv-heads", 8], "Missing: --head-dim."),
        (
            ["smollm2-135m", "--kv-heads", 3, "--heads", 9],
            "smollm2-135m has its own numbers; leave it out, or --heads, --kv-heads.",
        ),
        (["smollm2-135m", "--parameters", "8e9"], "smollm2-135m has its own numbers; leave it out, or --parameters."),
        (["no-such-model"], "'no-such-model' is no file or folder here, no known model"),
        ([*MISSION[:-1], "many"], "The context is 'many'; it must be a whole number of at least 1, such as 1000000 or 128k"),
        ([*MISSION, "--heads", 12], "12 query heads do not divide over 8 KV heads"),
        ([*MISSION, "--tp", 16, "--policy", "reject"], "8 KV heads do not divide over 16 devices; tp = 1, 2, 4, 8 would"),
        ([*MISSION, "--batch", 3, "--data", 2], "3 rows do not divide over 2 devices"),
        ([*MISSION, "--batch", 0], "0 is less than 1"),
        ([*MISSION, "--device", "v9"], "The device is 'v9'; known are a100-80, h100, h200"),
        ([*MISSION, "--device", "v5e", "--memory", "80GB"], "--device v5e has its own memory; leave it or --memory 80GB out"),
        (
            [*MISSION, "--memory", "80G"],
            "The memory is '80G'; it must be a whole number of at least 1, such as 80GB (10^9 each)",
        ),
        ([*MISSION, "--parameters", "many"], "The number of parameters is 'many'"),
        ([*MISSION, "--cache-dtype", "int3"], "invalid choice: 'int3'"),
    ],
)
def test_misuse_ends_with_two_and_what_is_missing(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_a_plot_is_drawn_where_matplotlib_is(run, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    code, out, _ = run(*MISSION, "--device", "h200", "--plot", tmp_path / "plan.png")
    assert code == 0
    assert "DOES NOT FIT on h200" in out
    pixels = imread(tmp_path / "plan.png")
    assert pixels.shape == (750, 1200, 4)
    assert 0.005 < (pixels[..., :3].min(axis=-1) < 0.5).mean() < 0.5
    run(*MISSION, "--device", "h200", "--plot", tmp_path / "plan.svg")
    assert "<svg" in (tmp_path / "plan.svg").read_text("utf-8")


def test_a_plot_without_matplotlib_says_how_to_get_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(*MISSION, "--plot", "plan.png") == (2, "", "gqa-jax: --plot needs matplotlib: pip install 'gqa-jax[plot]'.\n")


LOOK = """
import sys
from gqa_jax.__main__ import main
assert main(["plan", *sys.argv[1:], "--tp", "8", "--device", "v5e", "--json"]) == 0
import jax
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend is there
assert jax.device_count() == 3
"""


def test_planning_terabytes_touches_no_device():
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", LOOK, *MISSION, "--parameters", "671B"]
    run = subprocess.run(
        command, cwd=pathlib.Path(__file__).parents[1], env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout)["weight_bytes"] == 2 * 671 * 10**9


def test_every_flag_of_a_shape_is_one_number(run):
    for flag, bad in itertools.product(("--layers", "--heads", "--kv-heads", "--head-dim", "--rope-dim"), ("0", "x")):
        assert run(flag, bad)[0] == 2
