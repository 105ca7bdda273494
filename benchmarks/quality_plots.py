"""Draws what `benchmarks.quality` has found, from its result file: `python -m benchmarks.quality_plots`."""

import json
import statistics
import sys
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.quality_study import by, label
from benchmarks.timing import RESULTS


def main() -> int:
    draw(json.loads((RESULTS / "quality.json").read_text(encoding="utf-8")))
    return 0


def draw(result: dict[str, Any]) -> None:
    """Writes a picture for each part that has been run."""
    for part, how in (("models", models), ("conversion", conversion), ("attention", attention)):
        if part in result:
            how(result[part]).savefig(RESULTS / f"quality_{part}.png", dpi=120)


def models(found: dict[str, Any]) -> Figure:
    """Draws the held-out loss against the bytes of cache, a dot for each seed and a line through the medians."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    kinds = by(found["runs"], "kv_heads")
    sizes = [runs[0]["cache_bytes_per_token"] for runs in kinds.values()]
    losses = [[run["held_out_loss"] for run in runs] for runs in kinds.values()]
    middles = [statistics.median(own) for own in losses]
    axes.plot(sizes, middles, color="C0", linewidth=1.5)
    for heads, size, own in zip(kinds, sizes, losses, strict=True):
        axes.plot([size] * len(own), own, "o", color="C0", markersize=5, markerfacecolor="white")
        axes.annotate(label(heads), (size, max(own)), (0, 8), textcoords="offset points", ha="center")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.margins(x=0.1, y=0.25)
    axes.set_xlabel("bytes of cache for each token, float32")
    axes.set_ylabel("held-out loss, nats per token")
    steps, tokens = found["budget"]["steps"], found["budget"]["tokens_per_step"]
    title = f"{kinds[max(kinds)][0]['parameters'] / 1e6:.1f} M parameters, {steps} steps of {tokens} tokens; a dot is a seed"
    return _finished(axes, title)


def conversion(found: dict[str, Any]) -> Figure:
    """Draws the NLL of each method against the steps of training."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    runs = sorted(found["runs"], key=lambda run: -run["nll"][-1])
    for run, marker in zip(runs, "ovs^D", strict=False):
        axes.plot(run["steps"], run["nll"], marker=marker, markersize=4, label=run["method"])
    axes.axhline(found["original"], color="black", linewidth=0.8, linestyle=":", label="3 KV heads, untrained on")
    axes.legend(frameon=False)
    axes.set_xticks(max((run["steps"] for run in runs), key=len))
    axes.set_xlabel(f"steps of {found['budget']['tokens_per_step']} tokens after the conversion")
    axes.set_ylabel("held-out NLL, nats per token")
    return _finished(axes, "SmolLM2-135M, from 3 KV heads to 1")


def _finished(axes: Axes, title: str) -> Figure:
    axes.set_title(title, fontsize="medium", loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return axes.figure  # pyright: ignore[reportReturnType]


def attention(found: dict[str, Any]) -> Figure:
    """Draws what the last word reads: a row for each query head, with a gap between the groups of a KV head."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    shown = found["weights"]
    most = max(np.max(weights) for weights in shown.values())
    panels = figure.subplots(1, len(shown))
    for axes, (name, weights) in zip(panels, shown.items(), strict=True):
        picture = _heat(axes, np.array(weights), found["tokens"], most)
        axes.set_title(name, fontsize="medium", loc="left")
    figure.colorbar(picture, ax=panels, label="share of the attention", shrink=0.8)
    last = found["tokens"][-1].strip()
    figure.suptitle(f'What "{last}" attends to in layer {found["layer"]} of SmolLM2-135M', fontsize="medium", x=0.01, ha="left")
    return figure


def _heat(axes: Axes, weights: np.ndarray, tokens: list[str], most: float) -> Any:
    K, G, S = weights.shape
    # An empty row parts the groups.
    rows = np.concatenate([weights, np.full((K, 1, S), np.nan)], axis=1).reshape(K * (G + 1), S)[:-1]
    picture = axes.imshow(rows, cmap="Blues", vmin=0, vmax=most, aspect="auto", interpolation="nearest")
    places = [k * (G + 1) + g for k in range(K) for g in range(G)]
    axes.set_yticks(places, [f"q{n}" for n in range(K * G)], fontsize="small")
    for k in range(K):
        middle = k * (G + 1) + (G - 1) / 2
        axes.text(-0.16, middle, f"KV {k}", rotation=90, va="center", ha="center", transform=axes.get_yaxis_transform())
    axes.set_xticks(range(S), [token.strip() for token in tokens], rotation=60, ha="right", rotation_mode="anchor")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return picture


if __name__ == "__main__":
    sys.exit(main())
