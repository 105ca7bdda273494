"""`gqa-jax train`: a small model from nothing, its folder, and how it goes on; what it prints and how it ends."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

import gqa_jax
from gqa_jax.__main__ import main

pytestmark = pytest.mark.usefixtures("quick_compilation")

SAID = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 12,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the command in a folder with a config and texts, and returns its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")  # Those that there are.
    (tmp_path / "config.json").write_text(json.dumps(SAID))
    (tmp_path / "a.txt").write_text("one two three four five " * 40)

    def run(*arguments, data=("a.txt",)):
        try:
            code = main(["train", *arguments, "--data", *data])
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


NOTHING = ["--from-scratch", "config.json", "--steps", "12", "--batch", "4", "--learning-rate", "0.02", "--save-every", "5"]


def test_a_model_from_nothing_learns_is_kept_and_opens_again(run):
    code, out, err = run(*NOTHING, "--out", "out", "--evaluation", "a.txt")
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["steps"] == "1 to 12"
    first, last = (float(number) for number in lines["loss"].split(" to "))
    assert last < first
    assert "tokens/s, " in lines["speed"]
    assert "% of the peak" in lines["speed"]
    assert lines["evaluation"].endswith(" after")
    assert lines["model"] == "out/model"
    assert "step 12 of 12: loss " in err
    assert sorted(path.name for path in pathlib.Path("out").glob("[!.]*")) == ["checkpoints", "log.jsonl", "model"]
    assert sorted(os.listdir("out/checkpoints")) == ["10", "12", "5"]
    model = gqa_jax.load("out/model")
    assert model.tokenizer.decode(model.tokenizer.encode("naïve")) == "naïve"
    assert len(gqa_jax.generate(model, "one", max_new_tokens=3, stop=()).ids[0]) == 3


def test_json_is_one_line_and_a_second_run_with_resume_only_goes_on(run):
    code, out, err = run(*NOTHING, "--out", "out", "--json")
    facts = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert (facts["steps"], facts["begun"], facts["model"]) == (12, 0, "out/model")
    assert facts["loss"] < facts["first_loss"]
    assert facts["tokens_per_second"] > 0
    code, out, _ = run(*NOTHING, "--out", "out", "--resume")
    assert code == 0
    assert out.startswith("all 12 steps were done before\n")


def test_a_model_of_another_run_is_not_taken_for_that_of_this_one(run):
    assert run(*NOTHING, "--out", "out")[0] == 0
    kept = pathlib.Path("out/model/model.safetensors").read_bytes()
    shutil.rmtree("out/checkpoints/12")
    pathlib.Path("out/model/model.safetensors").write_bytes(b"")
    assert run(*NOTHING, "--out", "out", "--resume")[0] == 0
    assert pathlib.Path("out/model/model.safetensors").read_bytes() == kept
    shutil.rmtree("out/checkpoints")
    code, _, err = run(*NOTHING, "--out", "out", "--resume")
    assert code == 2
    assert "out holds a trained model already, and no run that could go on" in err


def test_a_mesh_parts_bfloat16_and_layers_anew_are_options(run):
    options = ["--tp", "2", "--data-parallel", "2", "--accumulate", "2", "--compute-dtype", "bfloat16", "--remat"]
    code, out, _ = run(*NOTHING, *options, "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["loss"] < facts["first_loss"]
    assert facts["model"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give a MODEL to train on, or --from-scratch CONFIG, and not both"),
        (["smollm2-135m", *NOTHING], "Give a MODEL to train on, or --from-scratch CONFIG, and not both"),
        ([*NOTHING, "--resume"], "--resume needs --out DIR"),
        ([*NOTHING, "--length", "33"], "length is 33; the model's context is 32"),
        ([*NOTHING, "--warmup", "12"], "warmup is 12; it must be less than steps, 12"),
        ([*NOTHING, "--accumulate", "3"], "batch is 4; it must be a multiple of accumulate, 3"),
        (["--from-scratch", "a.txt"], "a.txt is no config.json that can be read"),
        (["--from-scratch", "few.json"], "a vocab_size of 256, which is too few; bytes need 257"),
        (["--from-scratch", "config.json", "--tokenizer", "no-such"], "'no-such' is no file or folder here"),
        (["--from-scratch", "list.json"], "list.json is no config.json: it holds no object"),
        ([*NOTHING, "--out", "a.txt"], "a.txt is no folder"),
        (["no-such-model"], "'no-such-model' is no file or folder here, no known model"),
    ],
)
def test_misuse_ends_with_two_and_a_sentence(run, arguments, message):
    pathlib.Path("list.json").write_text("[1]")
    pathlib.Path("few.json").write_text(json.dumps(SAID | {"vocab_size": 256}))
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_texts_that_are_not_there_are_misuse_and_a_loss_that_is_not_finite_a_failure(run):
    code, _, err = run(*NOTHING, data=("none.txt",))
    assert code == 2
    assert "none.txt cannot be read: No such file or directory" in err
    code, _, err = run("--from-scratch", "config.json", "--steps", "4", "--learning-rate", "1e38", "--warmup", "0")
    assert code == 1
    assert "is not finite" in err
    assert "Traceback" not in err


def test_an_interrupt_says_how_to_go_on(run, tmp_path):
    command = [sys.executable, "-m", "gqa_jax", "train", "--from-scratch", "config.json", "--data", "a.txt"]
    process = subprocess.Popen(
        [*command, "--steps", "100000", "--out", "out", "--save-every", "50"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(pathlib.Path(__file__).parents[1])},
    )
    log = tmp_path / "out" / "log.jsonl"
    while process.poll() is None and not (log.is_file() and log.read_text().count("\n") > 60):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "The same command with --resume goes on from the last checkpoint in out." in err
    assert "Traceback" not in err
    assert not list((tmp_path / "out" / "checkpoints").glob("*tmp*"))
