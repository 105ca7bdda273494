"""Do any heads on any devices give what one device gives?

Ten head counts on 1 to 8 CPU devices, under both policies, with the batch whole and cut in two: the largest difference of the
logits of ragged rows, read in chunks until the cache is exactly full, and on 3 and 8 devices whether greedy and drawn tokens
are the same. Then the greedy text of the two named models on 2, 4 and 8 devices.
`python -m benchmarks.matrix [--json] [--save] [--tiny]`
"""

import argparse
import json
import sys
from functools import partial
from typing import Any

import jax
import numpy as np

import gqa_jax
from benchmarks import timing

HEADS = ((32, 8), (8, 8), (9, 3), (4, 1), (6, 2), (14, 2), (28, 4), (12, 12), (5, 5), (71, 1))
DEGREES = (1, 2, 3, 4, 6, 8)
GENERATED = (3, 8)
COUNTS = ((4, 2), (3, 4), (1, 1), (2, 3))
PROMPTS, TOKENS = [[1, 2, 3, 4, 5, 6, 7], [8]], 6


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.matrix", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the line of JSON only")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    parser.add_argument("--tiny", action="store_true", help="leave the two named models out")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    rows = []
    for heads in HEADS:
        rows += on_meshes(*heads)
        jax.clear_caches()  # So many programs at once are more pieces of memory than a process may have.
        if not options.json:
            worst = max(row["difference"] for row in rows if row["heads"] == list(heads))
            print(f"{heads[0]:>3} query, {heads[1]:>2} KV heads: largest difference {worst:.1e}", flush=True)
    models = [] if options.tiny else [row for name in ("smollm2-135m", "gemma3-270m") for row in of_model(name)]
    if not options.json:
        for row in models:
            print(f"{row['model']}, tp {row['tp']}, {row['policy']}: {'the same text' if row['same'] else 'ANOTHER TEXT'}")
    right = all(row["difference"] < 1e-5 and row["same"] is not False for row in rows) and all(row["same"] for row in models)
    result = {"machine": timing.machine(), "all_right": right, "rows": rows, "models": models}
    print(
        json.dumps(result) if options.json else f"{len(rows)} meshes and {len(models)} runs of real models, all right: {right}"
    )
    if options.save:
        timing.save("matrix", result)
    return 0 if right else 1


def on_meshes(heads: int, kv_heads: int) -> list[dict[str, Any]]:
    config = gqa_jax.Config(
        vocab_size=13,
        num_layers=2,
        model_dim=10,
        mlp_dim=7,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=4,
        context_length=64,
        attention=(gqa_jax.Attention(window=3), gqa_jax.Attention()),
        qkv_bias=True,
        out_bias=True,
    )
    params = gqa_jax.init_params(config, jax.random.key(0))
    noise = jax.random.normal(jax.random.key(1), (len(jax.tree.leaves(params)),))
    leaves, tree = jax.tree.flatten(params)
    params = tree.unflatten(leaf + 0.3 * amount for leaf, amount in zip(leaves, noise, strict=True))
    alone, said = logits_of(params, config, None), tokens_of(params, config)
    rows = []
    for tp in DEGREES:
        for policy in ("replicate", "split"):
            for data in (1, 2) if 2 * tp <= 8 else (1,):
                mesh = gqa_jax.make_mesh(config, tp=tp, data=data, policy=policy)
                placed = gqa_jax.place(params, config, mesh)
                rows.append(
                    {
                        "heads": [heads, kv_heads],
                        "tp": tp,
                        "data": data,
                        "policy": policy,
                        "difference": float(np.abs(logits_of(placed, config, mesh) - alone).max()),
                        "same": tokens_of(placed, config) == said if tp in GENERATED and data == 1 else None,
                    }
                )
    return rows


def logits_of(params: Any, config: gqa_jax.Config, mesh: Any) -> np.ndarray:
    """Returns the logits of two rows that are read in pieces of different lengths, until the cache is full."""
    texts = np.random.default_rng(2).integers(0, 13, (2, 10)).astype(np.int32)
    cache, start, made = gqa_jax.init_cache(config, 2, 10, mesh=mesh), np.zeros(2, int), [[], []]
    for count in COUNTS:
        piece = np.stack(
            [np.resize(text[begin : begin + some], 4) for text, begin, some in zip(texts, start, count, strict=True)]
        )
        logits, cache = forward(params, piece, cache, config=config, count=np.array(count, np.int32))
        for row, some in enumerate(count):
            made[row].append(np.asarray(logits)[row, :some])
        start += count
    assert cache.length.tolist() == [10, 10]
    return np.stack([np.concatenate(row) for row in made])


forward = jax.jit(gqa_jax.forward, static_argnames="config", donate_argnames="cache")


def tokens_of(params: Any, config: gqa_jax.Config) -> list[list[int]]:
    return gqa_jax.generate(gqa_jax.Model(config, params), PROMPTS, max_new_tokens=TOKENS, temperature=[0.0, 1.3], seed=5).ids


def of_model(name: str) -> list[dict[str, Any]]:
    said = partial(gqa_jax.generate, prompts="The three primary colours are", max_new_tokens=24)
    alone = said(gqa_jax.load(name)).text
    runs = [(tp, policy) for tp in (2, 4, 8) for policy in ("replicate", "split")]
    return [
        {
            "model": name,
            "tp": tp,
            "policy": policy,
            "same": said(gqa_jax.load(name, mesh=partial(gqa_jax.make_mesh, tp=tp, policy=policy))).text == alone,
        }
        for tp, policy in runs
    ]


if __name__ == "__main__":
    sys.exit(main())
