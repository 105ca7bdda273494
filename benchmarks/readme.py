"""Writes README's measured sections from the committed results: `python -m benchmarks.readme`."""

import json
import pathlib
import statistics
import sys

from benchmarks.timing import RESULTS

README = pathlib.Path(__file__).parents[1] / "README.md"


def main() -> int:
    text = README.read_text(encoding="utf-8")
    for name, section in SECTIONS.items():
        mark = f"<!-- {name} -->"
        before, _, after = text.split(mark)
        text = mark.join((before, f"\n{section()}\n", after))
    README.write_text(text, encoding="utf-8")
    return 0


def performance() -> str:
    """Returns the figures of `benchmarks.decode` in Markdown."""
    result = json.loads((RESULTS / "decode.json").read_text(encoding="utf-8"))
    medians = {name: statistics.median(seconds) for name, seconds in result["cached"]["seconds"].items()}
    ceiling, new = result["card"]["ceiling_tokens_per_second"], result["cached"]["new_tokens"]
    lines = [
        f"SmolLM2-135M in float32 on {result['machine']['cores']} CPU cores, batch 1, jax {result['machine']['jax']}: "
        f"{result['cached']['prompt_tokens']} prompt and {new} new tokens,",
        "medians of interleaved runs. The ceiling is what reading "
        f"{result['card']['step_bytes'] / 1e6:.0f} MB for each token allows at the "
        f"{result['card']['bandwidth_bytes_per_second'] / 1e9:.1f} GB/s that this machine read in the same run.",
        "",
        "| | seconds | tokens/s | share of the ceiling | gqa_jax is |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in medians.items():
        rate = new / seconds
        faster = seconds / medians["gqa_jax"]
        lines.append(f"| {name} | {seconds:.2f} | {rate:.1f} | {rate / ceiling:.0%} | {faster:.2f}x as fast |")
    times = result["capacity"]["milliseconds_per_token"]
    shown = ", ".join(f"{statistics.median(values):.1f} ms at {name}" for name, values in times.items())
    lines += ["", f"A token around {result['capacity']['filled']} filled slots, by the capacity of the cache: {shown}."]
    return "\n".join(lines)


def sharding() -> str:
    """Returns some rows of `benchmarks.sharding` in Markdown."""
    result = json.loads((RESULTS / "sharding.json").read_text(encoding="utf-8"))
    shape = result["shape"]
    lines = [
        f"Of {shape['layers']} layers of {shape['model_width']} with heads of {shape['head_width']}, one row of "
        f"{shape['capacity']} tokens, float32, on each of 8 CPU devices; planned and found are equal in every row:",
        "",
        "| query, KV heads | kv x group | policy | padding | cache bytes | exchanges of a layer | sent per token |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if row["tp"] == 8 and (row["policy"] == "replicate" or row["group"] > 1):
            exchanges = ", ".join(f"{count // shape['layers']} {kind}" for kind, count in row["found"]["exchanges"].items())
            cells = (
                f"{row['heads']}, {row['kv_heads']}",
                f"{row['kv']} x {row['group']}",
                row["policy"],
                f"{row['padded_share']:.0%}",
                f"{row['found']['cache_bytes']:,}",
                exchanges,
                f"{row['found']['wire_bytes']:,} bytes",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


SECTIONS = {"performance": performance, "sharding": sharding}

if __name__ == "__main__":
    sys.exit(main())
