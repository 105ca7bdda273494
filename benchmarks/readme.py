"""Writes the tables of README's performance section from the committed results: `python -m benchmarks.readme`."""

import json
import pathlib
import statistics
import sys

from benchmarks.timing import RESULTS

README = pathlib.Path(__file__).parents[1] / "README.md"
MARK = "<!-- performance -->"


def main() -> int:
    before, _, after = README.read_text(encoding="utf-8").split(MARK)
    README.write_text(MARK.join((before, f"\n{section()}\n", after)), encoding="utf-8")
    return 0


def section() -> str:
    """Returns the tables in Markdown."""
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


if __name__ == "__main__":
    sys.exit(main())
