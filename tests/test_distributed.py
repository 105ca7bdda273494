"""Several processes: each holds its part, all find the same text, one prints, and nobody waits for ever."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import pytest
import tokenizers

import gqa_jax
from gqa_jax.distributed import join
from tests import checkpoints

ROOT = pathlib.Path(__file__).parents[1]
CHILD = """
import json, sys
import jax, numpy as np
import gqa_jax
from gqa_jax.distributed import join
from tests.test_distributed import model, texts

address, processes, process, devices, tp, data, policy = json.loads(sys.argv[1])
jax.config.update("jax_num_cpu_devices", devices)
join(address, processes, process, 90)
config, params, _ = model()
params = jax.tree.map(np.asarray, params)
placed = gqa_jax.place(params, config, gqa_jax.make_mesh(config, tp=tp, data=data, policy=policy))
ids, cache = texts(gqa_jax.Model(config, placed))
back = gqa_jax.gather(placed, config)
print(json.dumps({
    "devices": jax.device_count(),
    "ids": ids,
    "back": all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), params, back))),
    "shards": [len(x.addressable_shards) for x in cache.k],
    "shard": cache.k[1].addressable_shards[0].data.shape,
}))
"""


def model() -> gqa_jax.Model:
    config = gqa_jax.Config(
        vocab_size=101,
        num_layers=2,
        model_dim=24,
        mlp_dim=37,
        num_heads=9,
        num_kv_heads=3,
        head_dim=10,
        context_length=64,
        attention=(gqa_jax.Attention(window=5), gqa_jax.Attention()),
    )
    return gqa_jax.Model(config, gqa_jax.init_params(config, jax.random.key(0)))


def texts(model: gqa_jax.Model) -> tuple[list[list[list[int]]], gqa_jax.KVCache]:
    """What a model says of two prompts, and then of two more in a larger cache."""
    first = gqa_jax.generate(model, [[1, 2, 3, 5, 7, 11, 13], [4]], max_new_tokens=7, temperature=0.7)
    second = gqa_jax.generate(model, [[8], [9]], cache=first.cache, capacity=300, max_new_tokens=3)
    return [first.ids, second.ids], second.cache


@pytest.fixture(scope="module")
def said(quick_compilation):
    """What one process on one device says."""
    return texts(model())[0]


def free_address() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def start(*arguments: str) -> subprocess.Popen:
    environment = {"PATH": os.environ["PATH"], "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], env=environment, cwd=ROOT, **pipes)


def end(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """The exit code, output and errors of each; none outlives the test."""
    try:
        outputs = [process.communicate(timeout=180) for process in processes]
        return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize(
    ("processes", "devices", "tp", "data", "policy", "shard"),
    [(2, 4, 8, 1, "split", [2, 1, 150, 10]), (4, 1, 2, 2, "replicate", [1, 2, 300, 10])],
)
@pytest.mark.slow
def test_every_process_holds_its_part_and_finds_what_one_finds_alone(processes, devices, tp, data, policy, shard, said):
    address = free_address()
    jobs = [json.dumps([address, processes, process, devices, tp, data, policy]) for process in range(processes)]
    for code, out, err in end([start("-W", "error", "-c", CHILD, job) for job in jobs]):
        assert code == 0, err
        found = json.loads(out.splitlines()[-1])
        want = {"devices": processes * devices, "ids": said, "back": True, "shards": [devices] * 2, "shard": shard}
        assert found == want


@pytest.fixture
def tiny(tmp_path):
    """A folder with a model and a tokenizer of single bytes."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    codec = tokenizers.Tokenizer(tokenizers.models.BPE({letter: id for id, letter in enumerate(letters)}, []))
    codec.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    codec.decoder = tokenizers.decoders.ByteLevel()
    said = checkpoints.LLAMA | {"vocab_size": len(letters), "num_attention_heads": 9, "num_key_value_heads": 3}
    checkpoints.write_folder(tmp_path, said, checkpoints.make_weights(said))
    codec.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


@pytest.mark.slow
def test_of_a_distributed_command_only_process_0_prints(tiny):
    command = ("-m", "gqa_jax", "generate", "Dear diary", "Once", "--model", tiny, "--max-new-tokens", "5", "--json")
    [(code, alone, err)] = end([start(*command)])
    assert code == 0, err
    address = free_address()
    joined = ("--distributed", "--coordinator", address, "--num-processes", "2")
    (code, out, err), (other, nothing, errors) = end([start(*command, *joined, "--process-id", str(i)) for i in (0, 1)])
    assert (code, other) == (0, 0), err + errors
    assert nothing == ""
    assert out.count("\n") == 1
    assert json.loads(out)["ids"] == json.loads(alone)["ids"]
    assert json.loads(out)["devices"] == 2


@pytest.mark.slow
def test_processes_that_are_asked_for_different_things_all_refuse(tiny):
    command = ("-m", "gqa_jax", "generate", "--model", tiny, "--distributed", "--coordinator", free_address())
    command += ("--num-processes", "2", "--process-id")
    for code, out, err in end([start(*command, "0", "Dear diary"), start(*command, "1", "Once", "--seed", "7")]):
        assert (code, out) == (2, "")
        assert "gqa-jax: The processes differ in prompts, seed; each must be given the same" in err


@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_stays_alone_says_so_and_ends(process):
    address = free_address()
    command = ("-m", "gqa_jax", "generate", "x", "--distributed", "--coordinator", address, "--num-processes", "2")
    [(code, out, err)] = end([start(*command, "--process-id", str(process), "--timeout", "2")])
    assert (code, out) == (1, "")
    assert err.startswith(f"gqa-jax: after 2 s not all of 2 processes through {address} were there; this is process {process}.")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("10.0.0.1:99", 2, None), r"coordinator \(10.0.0.1:99\).*process id \(None\).*give all three"),
        ((None, 2, 0), r"coordinator \(None\)"),
        (("10.0.0.1", 2, 0), r"coordinator is '10.0.0.1'; it must be host:port"),
        (("10.0.0.1:99", 2, 2), "process id is 2; there are 2 processes, from 0 on"),
        (("10.0.0.1:99", 2, -1), "process id is -1"),
        (("10.0.0.1:99", 2, 0, 0), "timeout is 0 s"),
    ],
)
def test_what_does_not_say_who_is_who_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        join(*arguments)


def test_half_set_variables_of_slurm_are_named(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_PROCID", "0")
    with pytest.raises(ValueError, match="SLURM_JOB_ID, SLURM_PROCID without SLURM_STEP_NODELIST, SLURM_NTASKS"):
        join()
