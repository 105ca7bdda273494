"""Writes README's measured sections from the committed results: `python -m benchmarks.readme`."""

import json
import pathlib
import statistics
import sys
from typing import Any

from benchmarks.quality_study import by, label
from benchmarks.timing import RESULTS, spread

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


def quality() -> str:
    """Returns the figures of `benchmarks.quality` in Markdown, and what they say."""
    result = json.loads((RESULTS / "quality.json").read_text(encoding="utf-8"))
    parts = {"models": _quality_of_models, "conversion": _quality_of_conversion, "attention": _quality_of_attention}
    return "\n\n".join("\n".join(lines(result[part])) for part, lines in parts.items() if part in result)


def _quality_of_models(found: dict[str, Any]) -> list[str]:
    budget, kinds = found["budget"], by(found["runs"], "kv_heads")
    times, sizes = found["decode"], [run["parameters"] for run in found["runs"]]
    lines = [
        f"**The same budget for each**: {budget['layers']} layers of {budget['model_dim']} with {budget['heads']} query heads, "
        f"{statistics.mean(sizes) / 1e6:.1f} M parameters (what W_k and W_v save, the MLP has more), trained from nothing for "
        f"{budget['steps']} steps of {budget['tokens_per_step']} tokens, {len(next(iter(kinds.values())))} seeds; "
        f"text: {budget['text']}. "
        f"Median [least-most] of the seeds; milliseconds a token of {times['rows']} rows with {times['filled']} filled slots, "
        f"on {found['machine']['cores']} CPU cores:",
        "",
        "| | held-out loss | cache bytes per token | decode ms |",
        "|---|---|---|---|",
    ]
    for heads, runs in kinds.items():
        losses, milliseconds = [run["held_out_loss"] for run in runs], times["milliseconds"][str(heads)]
        size = runs[0]["cache_bytes_per_token"]
        lines.append(f"| {label(heads)} | {spread(losses, 3)} | {size:,} | {spread(milliseconds)} |")
    losses = {heads: [run["held_out_loss"] for run in runs] for heads, runs in kinds.items()}
    middles = {heads: statistics.median(own) for heads, own in losses.items()}
    best, worst = (choose(middles, key=middles.__getitem__) for choose in (min, max))
    widest = max(max(own) - min(own) for own in losses.values())
    apart = middles[worst] - middles[best]
    lines += [
        "",
        f"The medians lie {apart:.3f} apart, {label(best)} lowest and {label(worst)} highest; the seeds of one kind differ by "
        f"up to {widest:.3f}" + ("." if apart > widest else ", so that this budget does not tell the kinds apart."),
        "",
        "![Held-out loss against cache bytes](benchmarks/results/quality_models.png)",
    ]
    return lines


def _quality_of_conversion(found: dict[str, Any]) -> list[str]:
    budget, runs = found["budget"], {run["method"]: run for run in found["runs"]}
    steps = max((run["steps"] for run in runs.values()), key=len)
    old, new = budget["kv_heads"]
    lines = [
        f"**SmolLM2-135M from {old} KV heads to {new}**: NLL on {budget['held_tokens']:,} held-out tokens, "
        f"{found['original']:.3f} before; {budget['calibration_tokens']:,} tokens to calibrate, then all weights are trained "
        f"for {steps[-1]} steps of {budget['tokens_per_step']} tokens at a learning rate of {budget['learning_rate']:g}, the "
        f"same for each method; text: {budget['text']}:",
        "",
        f"| steps | {' | '.join(map(str, steps))} |",
        f"|---|{'---|' * len(steps)}",
    ]
    for name, run in runs.items():
        points = [f"{one:.3f}" for one in run["nll"]] + ["not run"] * (len(steps) - len(run["steps"]))
        lines.append(f"| {name} | {' | '.join(points)} |")
    said = []
    for at, when in enumerate(("Before training", f"after {steps[-1]} steps")):
        ends = {name: run["nll"][-at] for name, run in runs.items() if len(run["steps"]) == len(steps) or not at}
        order = sorted(ends, key=ends.__getitem__)
        text = f"{when} the order is {', '.join(order)}"
        if {"mean", "first", "random"} <= set(order):
            paper = [name for name in order if name in ("mean", "first", "random")]
            text += f" ({'as' if paper == ['mean', 'first', 'random'] else 'not as'} in the paper: mean, first, random)"
        if len(order) > 1 and "pca" in order:
            lead = min(value for name, value in ends.items() if name != "pca") - ends["pca"]
            text += f", and pca is {abs(lead):.3f} {'ahead of' if lead > 0 else 'behind'} the best of the others"
        said.append(text)
    return [*lines, "", "; ".join(said) + ".", "", "![NLL while training on](benchmarks/results/quality_conversion.png)"]


def _quality_of_attention(found: dict[str, Any]) -> list[str]:
    apart = {name: one["here"] for name, one in found["difference"].items()}
    shown = ", ".join(f"{value:.2f} with {name.replace(', ', ' by ')}" for name, value in apart.items())
    everywhere = ", ".join(f"{one['all layers']:.2f}" for one in found["difference"].values())
    return [
        f'**Heads of one group read the same keys and still differ**: what the last word of "{found["sentence"]}" attends to '
        f"in layer {found['layer']} of SmolLM2-135M, counted from 0, the one whose heads differ most; a row is a query head, a "
        "gap parts the groups of a KV head. Two heads of a group put, in the mean, this share of their attention in other "
        "places: "
        f"{shown}; over all layers but the first {everywhere}.",
        "",
        "![What the last word attends to](benchmarks/results/quality_attention.png)",
    ]


SECTIONS = {"performance": performance, "sharding": sharding, "quality": quality}

if __name__ == "__main__":
    sys.exit(main())
