"""`gqa-jax info`: says what a checkpoint is, from its header alone."""

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from gqa_jax.commands.terminal import DEFAULT_MODEL, add_dtype, add_model, in_units, look


def add(commands: Any) -> None:
    """Declares the command and its arguments."""
    about = commands.add_parser("info", help="say what a checkpoint is", description="Says what a checkpoint is.")
    about.set_defaults(command=run)
    add_model(about, "model", nargs="?", default=DEFAULT_MODEL)
    add_dtype(about)


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    path, config, dtype = look(options)
    facts = _facts(config, dtype)
    if options.json:
        print(json.dumps({"model": options.model, "path": str(path), **facts}))
        return
    table = Table(title=f"{options.model}  ({path})", show_header=False, title_justify="left")
    for name, value in facts.items():
        show = in_units if name.endswith("_bytes") else _heads if name == "query_heads_by_kv_head" else str
        table.add_row(name.replace("_", " "), show(value))
    Console(soft_wrap=True).print(table)


def _facts(config: Any, dtype: str) -> dict[str, Any]:
    import jax
    import numpy as np

    from gqa_jax import cache, decoder

    weights = jax.tree.leaves(decoder.param_shapes(config, dtype))
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * jax.numpy.dtype(dtype).itemsize
    hows = [config.layer_attention(layer) for layer in range(config.num_layers)]
    slots = sum(cache.num_slots(config.context_length, how.window) for how in hows)
    groups = np.arange(config.num_heads).reshape(config.num_kv_heads, config.group_size)
    return {
        "kind": config.kind,
        "layers": config.num_layers,
        "query_heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_width": config.head_dim,
        "query_heads_by_kv_head": groups.tolist(),
        "model_width": config.model_dim,
        "mlp_width": config.mlp_dim,
        "vocabulary": config.vocab_size,
        "context": config.context_length,
        "window": next((how.window for how in hows if how.window), None),
        "window_layers": [layer for layer, how in enumerate(hows) if how.window],
        "parameters": sum(leaf.size for leaf in weights),
        "dtype": dtype,
        "weight_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in weights),
        "cache_bytes_per_token": per_token,
        "full_context_cache_bytes": per_token * slots // config.num_layers,
    }


def _heads(groups: list[list[int]]) -> str:
    spans = (f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups)
    return ", ".join(f"{span} read KV head {head}" for head, span in enumerate(spans))
