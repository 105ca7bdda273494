"""`gqa-jax plan`: says what a context takes on each device, and what fits."""

import argparse
import json
from typing import Any

from gqa_jax.commands.terminal import DTYPES, add_dtype, add_mesh, count, look


def add(commands: Any) -> None:
    """Declares the command and its arguments."""
    what = commands.add_parser("plan", help="say what fits", description="Says what a context takes and what fits.")
    what.set_defaults(command=run)
    what.add_argument("model", nargs="?", metavar="MODEL", help="as for generate; only its header is read")
    shape = what.add_argument_group("instead of MODEL")
    for name, help in {
        "--layers": "layers",
        "--heads": "query heads",
        "--kv-heads": "KV heads",
        "--head-dim": "width of a head",
        "--kv-lora-rank": "of MLA, in place of --kv-heads and --head-dim (with them: for the comparison)",
        "--rope-dim": "the rotary part of MLA's latent",
    }.items():
        shape.add_argument(name, type=count, metavar="N", help=help)
    shape.add_argument("--parameters", metavar="N", help="weights, such as 8e9 or 8B (without: the cache alone)")
    what.add_argument("--context", metavar="N", help="tokens a row, such as 128k (131072) or 1000000 (that of MODEL)")
    what.add_argument("--batch", type=count, default=1, metavar="N", help="rows, of all devices together (%(default)s)")
    add_mesh(what, 1, "1")
    kinds = (*DTYPES, "fp8", "int8", "int4")
    what.add_argument("--cache-dtype", choices=kinds, help="dtype of the cache (that of the weights); scales are not counted")
    what.add_argument("--device", metavar="NAME", help="h200, v5e, ...; a name that is not known lists all")
    what.add_argument("--memory", metavar="SIZE", help="instead: bytes of a device, such as 80GB or 80GiB")
    what.add_argument("--plot", metavar="FILE", help="draw bytes against context (.png, .svg, .pdf)")
    add_dtype(what)


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    from gqa_jax import devices, planner

    device = devices.device_of(options.device, options.memory)
    latent, parameters, context = _check_shape(options), None, None
    if options.parameters is not None:
        parameters = devices.amount("number of parameters", options.parameters, devices.PARAMETERS, "8e9 or 8B")
    if options.context is not None:
        context = devices.amount("context", options.context, devices.TOKENS, "1000000 or 128k (k is 1024, M 1024 k)")
    if options.model is None:
        dtype = options.dtype or "bfloat16"
        kv_heads, width = options.kv_heads or options.heads, options.head_dim or latent or 0
        config = planner.heads_only(options.layers, options.heads, kv_heads, width)
    else:
        _, config, dtype = look(options)
    plan = planner.Plan(
        config,
        context=context or config.context_length,
        cache_dtype=options.cache_dtype or dtype,
        weight_dtype=dtype if options.model or parameters else None,
        parameters=parameters,
        latent=latent,
        device=device,
        **{name: getattr(options, name) for name in ("batch", "tp", "data", "policy")},
    )
    versions = planner.side_by_side(plan) if options.model or options.head_dim else {"MLA": plan}
    if options.plot:
        planner.plot(plan, versions, options.plot)
    if options.json:
        beside = {name: {"cache_bytes": other.cache_bytes, "cards": other.cards} for name, other in versions.items()}
        print(json.dumps({"model": options.model, **plan.facts(), "side_by_side": beside}))
        return
    print(planner.report(plan, versions))
    if options.model and plan.context > config.context_length:
        print(f"{options.model} is made for {config.context_length:,} tokens; generate takes no more.")


def _check_shape(options: argparse.Namespace) -> int | None:
    """Refuses a MODEL with a shape beside it, and a shape that lacks a number; returns the latent of MLA."""
    model, heads, mla = ("layers", "heads"), ("kv_heads", "head_dim"), ("kv_lora_rank", "rope_dim")

    def flags(*names: str) -> str:
        return ", ".join(f"--{name.replace('_', '-')}" for name in names)

    given = {name for name in (*model, *heads, *mla, "parameters") if getattr(options, name) is not None}
    if options.model is not None:
        if given:
            raise ValueError(f"{options.model} has its own numbers; leave it out, or {flags(*sorted(given))}.")
        return None
    needed = (*model, *(mla if given & {*mla} else heads), *(("head_dim",) if "kv_heads" in given else ()), "context")
    missing = [name for name in dict.fromkeys(needed) if getattr(options, name) is None]
    if missing:
        raise ValueError(
            f"Missing: {flags(*missing)}. Give a MODEL, or {flags(*model, *heads)} (MLA: {flags(*model, *mla)}) and --context."
        )
    return options.kv_lora_rank + options.rope_dim if given & {*mla} else None
