"""How fast does SmolLM2 decode, what is the cache worth, and does an empty slot cost anything?

Three tables, each from interleaved runs of the same weights in float32:
1. 5 prompt and 100 new tokens, with the KV cache and without, and with `transformers` where it is installed.
2. Milliseconds per token around 64 filled slots, in caches with room for 256, 2048 and 16384 tokens.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import gqa_jax
from benchmarks.timing import interleave, machine, read_bandwidth, save, spread

PROMPT, NEW = "The capital of France is", 100
FILLED, STEPS, CAPACITIES = 64, 48, (256, 2048, 16384)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds, of which medians are quoted (%(default)s)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/decode.json")
    parser.add_argument("--json", action="store_true", help="print one line of JSON and nothing else")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; it must be at least 1")

    console = Console(quiet=options.json)
    model = gqa_jax.load("smollm2-135m", dtype="float32")
    peer = _transformers()
    ids = model.tokenizer.encode(PROMPT)
    card = _card(model, len(ids))
    _print_card(console, card, peer)
    cached = _cached(model, ids, peer, options.rounds)
    _print_cached(console, cached, card)
    capacity = _capacity(model, options.rounds)
    _print_capacity(console, capacity)
    result = {"machine": machine(), "card": card, "cached": cached, "capacity": capacity}
    if options.save:
        save("decode", result)
    print(json.dumps(result))
    return 0


def _card(model: gqa_jax.Model, prompt: int) -> dict[str, Any]:
    """Counts what a step must read: every weight once, and the filled slots."""
    config = model.config
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    slot = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    step = weights + slot * (prompt + NEW // 2)
    bandwidth = read_bandwidth()
    return {
        "weight_bytes": weights,
        "slot_bytes": slot,
        "step_bytes": step,
        "bandwidth_bytes_per_second": bandwidth,
        "ceiling_tokens_per_second": bandwidth / step,
    }


def _print_card(console: Console, card: dict[str, Any], peer: Any) -> None:
    console.print(f"SmolLM2-135M, float32, batch 1: a step reads {card['step_bytes'] / 1e6:.0f} MB", highlight=False)
    console.print(
        f"  weights {card['weight_bytes'] / 1e6:.0f} MB, {card['slot_bytes']} bytes for each filled slot", highlight=False
    )
    console.print(f"  this machine reads {card['bandwidth_bytes_per_second'] / 1e9:.1f} GB/s", highlight=False)
    console.print(f"  so the ceiling is {card['ceiling_tokens_per_second']:.1f} tokens/s", highlight=False)
    if isinstance(peer, str):
        console.print(f"  transformers is missing from the comparison: {peer}", highlight=False)


def _cached(model: gqa_jax.Model, ids: list[int], peer: Any, rounds: int) -> dict[str, Any]:
    """Times whole texts, prompt included, and refuses to compare runs that disagree."""
    outputs: dict[str, list[int]] = {}

    def ours(name: str, use_cache: bool) -> Callable[[], float]:
        def job() -> float:
            made = gqa_jax.generate(model, [ids], max_new_tokens=NEW, stop=(), use_cache=use_cache, capacity=len(ids) + NEW)
            outputs[name] = made.ids[0]
            return made.stats.prompt_seconds + made.stats.decode_seconds

        return job

    jobs = {"gqa_jax": ours("gqa_jax", True), "gqa_jax, no cache": ours("gqa_jax, no cache", False)}
    if not isinstance(peer, str):

        def theirs() -> float:
            start = time.perf_counter()
            outputs["transformers"] = peer(ids)
            return time.perf_counter() - start

        jobs["transformers"] = theirs
    seconds = interleave(jobs, rounds)
    if any(output != outputs["gqa_jax"] for output in outputs.values()):
        raise SystemExit(f"The runs disagree on the tokens: {outputs}")
    return {
        "prompt_tokens": len(ids),
        "new_tokens": NEW,
        "seconds": seconds,
        "transformers": peer if isinstance(peer, str) else "ran",
    }


def _print_cached(console: Console, cached: dict[str, Any], card: dict[str, Any]) -> None:
    table = Table(title=f"{cached['prompt_tokens']} prompt and {NEW} new tokens", title_justify="left")
    for column in ("", "seconds", "tokens/s", "share of ceiling", "gqa_jax is"):
        table.add_column(column, justify="left" if not column else "right")
    ours = statistics.median(cached["seconds"]["gqa_jax"])
    for name, seconds in cached["seconds"].items():
        rate = NEW / statistics.median(seconds)
        share = rate / card["ceiling_tokens_per_second"]
        table.add_row(
            name, spread(seconds, 2), f"{rate:.1f}", f"{share:.0%}", f"{statistics.median(seconds) / ours:.2f}x as fast"
        )
    console.print(table)


def _capacity(model: gqa_jax.Model, rounds: int) -> dict[str, Any]:
    """Times decoding alone, around `FILLED` filled slots."""
    prompt = [list(range(1, 1 + FILLED - STEPS // 2))]

    def job(capacity: int) -> Callable[[], float]:
        return lambda: (
            gqa_jax.generate(model, prompt, max_new_tokens=STEPS, stop=(), capacity=capacity).stats.decode_seconds / STEPS
        )

    seconds = interleave({str(capacity): job(capacity) for capacity in CAPACITIES}, rounds)
    return {"filled": FILLED, "milliseconds_per_token": {name: [1e3 * s for s in values] for name, values in seconds.items()}}


def _print_capacity(console: Console, capacity: dict[str, Any]) -> None:
    table = Table(title=f"Decoding around {FILLED} filled slots", title_justify="left")
    table.add_column("capacity", justify="right")
    table.add_column("ms per token", justify="right")
    for name, values in capacity["milliseconds_per_token"].items():
        table.add_row(name, spread(values))
    console.print(table)


def _transformers() -> Callable[[list[int]], list[int]] | str:
    """Returns greedy generation by `transformers` from the same file with its cache, or why there is none."""
    try:
        import torch
        import transformers
    except ImportError as error:
        return f"{error.name} is not installed (pip install 'gqa-jax[parity]')"
    from gqa_jax import download

    path = download.fetch("smollm2-135m")
    torch.set_num_threads(os.cpu_count() or 1)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # all 100 tokens, here as there

    def generate(ids: list[int]) -> list[int]:
        with torch.inference_mode():
            prompt = torch.tensor([ids])
            out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW)
        return out[0, len(ids) :].tolist()

    return generate


if __name__ == "__main__":
    sys.exit(main())
