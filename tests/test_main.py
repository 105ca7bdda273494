"""The command line, on the default model: text, JSON, bytes, and exit codes."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

import gqa_jax
from gqa_jax.__main__ import main
from gqa_jax.commands.terminal import in_units

PARIS = ["generate", "The capital of France is", "--max-new-tokens", "8"]


pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def run(monkeypatch, capsys, shallow):
    """Runs the command line on a model that is loaded once, and returns its exit code, output and errors."""

    def run(*arguments, model=shallow):
        monkeypatch.setattr(gqa_jax, "load", lambda name, dtype=None, mesh=None, progress=None: model, raising=False)
        try:
            code = main(list(arguments))
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


def test_text_is_streamed_behind_its_prompt_and_followed_by_one_line_of_costs(run, smollm2):
    code, out, err = run(*PARIS, model=smollm2)
    *text, costs, end = out.split("\n")
    assert (code, err, end) == (0, "", "")
    assert "\n".join(text).startswith("The capital of France is Paris.")
    assert costs.startswith("prompt 5 tokens, ")
    assert "decode 8 tokens, " in costs
    assert "cache 11.8 MB (11.2 MiB)" in costs
    assert "temporary" in costs


def test_json_is_one_line_with_the_same_tokens_and_every_cost(run, smollm2):
    code, out, err = run(*PARIS, "--json", model=smollm2)
    result = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert result["text"][0].startswith(" Paris.")
    assert [len(ids) for ids in result["ids"]] == [8]
    assert result["stop_reason"] == ["length"]
    assert result["cache_bytes"] == 256 * 46080
    assert result["decode_tokens_per_second"] == pytest.approx(8 / result["decode_seconds"])
    assert result["prompt_tokens"] == 5


def test_without_a_cache_the_text_is_the_same_and_the_cache_has_no_bytes(run):
    cached, uncached = (json.loads(run(*PARIS, "--json", *more)[1]) for more in ([], ["--no-cache"]))
    assert uncached["ids"] == cached["ids"]
    assert uncached["cache_bytes"] == 0


def test_several_prompts_are_one_batch(run):
    alone = [run("generate", prompt, "--max-new-tokens", "8")[1].split("\nprompt ")[0] for prompt in ("One", "And two")]
    code, out, _ = run("generate", "One", "And two", "--max-new-tokens", "8")
    assert code == 0
    assert all(text in out for text in alone)


def test_a_chat_goes_through_the_template_of_the_model(run, smollm2):
    chat = ["generate", "Why is the sky blue?", "--chat", "--json", "--max-new-tokens", "8"]
    code, out, _ = run(*chat, model=smollm2)
    result = json.loads(out)
    assert code == 0
    assert result["text"] == ["The answer to this question lies in the"]
    assert result["prompt_tokens"] == 36


def test_drawing_follows_the_seed(run):
    def draw(seed):
        how = ["--temperature", "1", "--top-k", "40", "--top-p", "0.95", "--seed", seed]
        return json.loads(run(*PARIS, "--json", *how)[1])["ids"]

    assert draw("1") == draw("1")
    assert draw("1") != draw("2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["generate"], "the following arguments are required: PROMPT"),
        ([*PARIS, "--temperature", "-1"], "temperature is -1; it must be at least 0"),
        ([*PARIS, "--temperature", "warm"], "invalid float value: 'warm'"),
        ([*PARIS, "--top-p", "1.5"], "top_p is 1.5"),
        ([*PARIS, "--max-new-tokens", "0"], "0 is less than 1"),
        ([*PARIS, "--max-new-tokens", "many"], "'many' is not a whole number"),
        ([*PARIS, "--seed", "99999999999999999999"], "seed is 99999999999999999999; it must be"),
        ([*PARIS, "--capacity", "7"], "the cache has room for 7. Pass capacity=13"),
        ([*PARIS, "--max-new-tokens", "9000"], "the model's context is 8192"),
        (["generate", "no \udcff UTF-8"], "holds bytes that are no UTF-8"),
        ([*PARIS, "--dtype", "int3"], "invalid choice: 'int3'"),
        (["generate", ""], "Prompt 0 is empty"),
        (["info", "no-such-model"], "'no-such-model' is no file or folder here, no known model"),
        (["info", __file__], "a GGUF file begins with"),
    ],
)
def test_misuse_ends_with_two_and_a_sentence(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_what_fails_for_no_fault_of_the_user_ends_with_one(run, monkeypatch):
    from gqa_jax import download

    def offline(name, progress=None):
        raise download.DownloadError("The index cannot be reached.")

    monkeypatch.setattr(download, "fetch", offline)
    assert run("info", "gemma3-270m") == (1, "", "gqa-jax: The index cannot be reached.\n")
    code, out, err = run(*PARIS, "--capacity", "99999999999")
    assert (code, out) == (1, "")
    assert "Out of memory" in err
    assert "Traceback" not in err


def test_info_says_who_reads_which_head_and_what_it_costs(run, smollm2_path):
    code, out, _ = run("info", str(smollm2_path), "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["kind"], facts["query_heads"], facts["kv_heads"]) == ("GQA", 9, 3)
    assert facts["query_heads_by_kv_head"] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert facts["cache_bytes_per_token"] == 46080
    assert facts["window_layers"] == []
    code, out, _ = run("info", str(smollm2_path), "--dtype", "bfloat16")
    assert code == 0
    assert "3-5 read KV head 1" in out
    assert "23040" in out


def test_info_of_gemma_names_its_window_layers(run, gemma3_path):
    facts = json.loads(run("info", str(gemma3_path), "--json")[1])
    assert (facts["kind"], facts["window"]) == ("MQA", 512)
    assert [layer for layer in range(18) if layer not in facts["window_layers"]] == [5, 11, 17]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB (1.0 KiB)"),
        (11796480, "11.8 MB (11.2 MiB)"),
        (3997696000000, "4.0 TB (3.6 TiB)"),
    ],
)
def test_bytes_are_given_in_both_units(count, text):
    assert in_units(count) == text


def test_the_module_runs_and_an_interrupt_ends_it_without_a_traceback(smollm2_path):
    command = [sys.executable, "-m", "gqa_jax", "generate", "Once", "--model", str(smollm2_path), "--max-new-tokens", "8000"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=pathlib.Path(__file__).parents[1],
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )
    assert process.stdout.read(4) == "Once"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
