"""What does tensor parallelism cost for head counts that do not divide, under each policy?

For each (query heads, KV heads), degree and policy: bytes of the cache on a device, exchanges per layer, and bytes that a
device puts on the wire for a token, as planned and as found in the arrays and the compiled decode loop on 8 CPU devices.
`python -m benchmarks.sharding [--json] [--save]`
"""

import argparse
import json
import sys
from typing import Any

import jax

from benchmarks import programs, timing

HEADS = ((32, 8), (9, 3), (4, 1), (14, 2), (71, 1))
DEGREES = (2, 3, 4, 8)
BATCH, CAPACITY, LAYERS, WIDTH, HEAD = 1, 1024, 2, 256, 64


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.sharding", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the line of JSON only")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    rows = [row(*heads, tp, policy) for heads in HEADS for tp in DEGREES for policy in ("replicate", "split")]
    result = {
        "machine": timing.machine(),
        "shape": {"batch": BATCH, "capacity": CAPACITY, "layers": LAYERS, "model_width": WIDTH, "head_width": HEAD},
        "rows": rows,
    }
    if not options.json:
        show(rows)
    print(json.dumps(result))
    if options.save:
        timing.save("sharding", result)
    return 0 if all(one["planned"] == one["found"] for one in rows) else 1


def row(heads: int, kv_heads: int, tp: int, policy: Any) -> dict[str, Any]:
    from gqa_jax.cache import init_cache
    from gqa_jax.config import Config
    from gqa_jax.sharding import make_mesh

    config = Config(
        vocab_size=2400,
        num_layers=LAYERS,
        model_dim=WIDTH,
        mlp_dim=480,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD,
        context_length=CAPACITY,
    )
    placement = make_mesh(config, tp=tp, policy=policy)
    program = programs.decode_program(config, BATCH, CAPACITY, placement=placement)
    inside = [one for one in programs.collectives(program.as_text()) if "shard_map" in one.source]
    # One sum is the embedding's.
    embedding = BATCH * WIDTH * 4
    found = {
        "cache_bytes": init_cache(config, BATCH, CAPACITY, mesh=placement).nbytes_per_device,
        "exchanges": programs.counts(inside) | {"all-reduce": programs.counts(inside)["all-reduce"] - 1},
        "wire_bytes": round(
            sum(wire(one.kind, one.nbytes, tp, placement.parts("G")) for one in inside) - wire("all-reduce", embedding, tp, 0)
        ),
    }
    plan = placement.plan(config)
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "tp": tp,
        "policy": policy,
        "kv": plan.kv,
        "group": plan.group,
        "padded_share": 1 - heads / plan.padded_heads,
        "planned": planned(plan),
        "found": found,
        "argument_bytes": program.memory_analysis().argument_size_in_bytes,
    }


def planned(plan: Any) -> dict[str, Any]:
    """Says from the plan alone what there should be."""
    tp, group = plan.tp, plan.group if plan.policy == "split" else 1
    output = BATCH * WIDTH * 4
    exchanges, sent = {"all-reduce": 2 * LAYERS}, 2 * LAYERS * wire("all-reduce", output, tp, 0)
    if group > 1:
        queries = BATCH * plan.kv_heads_per_device * plan.padded_group_size * 4
        exchanges |= {"all-gather": LAYERS, "all-to-all": LAYERS}
        sent += LAYERS * (wire("all-gather", queries * HEAD, tp, group) + wire("all-to-all", queries * (HEAD + 1), tp, group))
    slots = -(-CAPACITY // group)
    return {
        "cache_bytes": 2 * LAYERS * BATCH * plan.kv_heads_per_device * HEAD * 4 * slots,
        "exchanges": exchanges,
        "wire_bytes": round(sent),
    }


def wire(kind: str, nbytes: int, tp: int, group: int) -> float:
    """Returns the bytes that a device sends, of an exchange whose result has so many bytes, by the ring algorithms."""
    if kind == "all-reduce":
        return 2 * nbytes * (tp - 1) / tp
    return nbytes * (group - 1) / group


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"On a device, for {BATCH} row of {CAPACITY} tokens and {LAYERS} layers; planned = found, or both")
    for name in ("heads", "tp", "kv x group", "policy", "padding", "cache bytes", "exchanges per layer", "wire bytes/token"):
        table.add_column(name, justify="left" if name in ("policy", "exchanges per layer") else "right")
    for one in rows:
        plan, found = one["planned"], one["found"]
        per_layer = ", ".join(f"{count / LAYERS:g} {kind}" for kind, count in found["exchanges"].items())
        table.add_row(
            f"{one['heads']}, {one['kv_heads']}",
            str(one["tp"]),
            f"{one['kv']} x {one['group']}",
            one["policy"],
            f"{one['padded_share']:.0%}",
            both(plan["cache_bytes"], found["cache_bytes"]),
            per_layer if plan["exchanges"] == found["exchanges"] else f"{per_layer} (planned {plan['exchanges']})",
            both(plan["wire_bytes"], found["wire_bytes"]),
        )
    Console(width=120).print(table)


def both(planned: int, found: int) -> str:
    return f"{found:,}" if planned == found else f"{found:,} (planned {planned:,})"


if __name__ == "__main__":
    sys.exit(main())
