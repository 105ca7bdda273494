"""`gqa-jax convert`: gives a checkpoint fewer KV heads, and says what that costs."""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gqa_jax.commands.terminal import add_dtype, bars, count, in_units, look

METHODS = ("mean", "first", "random", "procrustes", "pca")


def add(commands: Any) -> None:
    """Declares the command and its arguments."""
    what = commands.add_parser("convert", help="give a checkpoint fewer KV heads", description="Merges KV heads.")
    what.set_defaults(command=run)
    what.add_argument("model", metavar="MODEL", help="as for generate")
    what.add_argument(
        "--num-kv-heads", type=count, required=True, metavar="G", help="KV heads to keep; a divisor of the model's"
    )
    what.add_argument("--method", choices=METHODS, help="how (pca with --calibration, if the model's keys allow it; else mean)")
    what.add_argument("--calibration", metavar="FILE", help="a text in UTF-8, which procrustes and pca need")
    what.add_argument("--calibration-tokens", type=count, default=4096, metavar="N", help="of it to read (%(default)s)")
    what.add_argument("--evaluation", metavar="FILE", help="a text to measure NLL on (what follows in that of --calibration)")
    what.add_argument("--evaluation-tokens", type=count, default=4096, metavar="N", help="of it to read (%(default)s)")
    what.add_argument("--out", required=True, metavar="DIR", help="the folder to write, in Hugging Face layout")
    what.add_argument("--seed", type=int, default=0, help="of random (%(default)s)")
    add_dtype(what)


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    import gqa_jax
    from gqa_jax.convert import convert, negative_log_likelihood

    _check(options)
    texts = {name: _read(getattr(options, name)) for name in ("calibration", "evaluation")}
    with bars(options.json) as progress:
        model = gqa_jax.load(options.model, dtype=options.dtype, progress=progress)
        calibration, evaluation = _ids(model, texts, options)
        how = {"calibration": calibration or None, "seed": options.seed, "progress": progress}
        made, errors = convert(model, options.num_kv_heads, options.method, **how)
        nll = [negative_log_likelihood(x, evaluation, progress=progress) for x in (model, made) if len(evaluation) > 1]
        gqa_jax.save(made, options.out, progress)
    facts = {
        "model": options.model,
        "out": options.out,
        "method": options.method,
        "kv_heads": [x.config.num_kv_heads for x in (model, made)],
        "cache_bytes_per_token": [_bytes_per_token(x) for x in (model, made)],
        "calibration_tokens": len(calibration),
        "evaluation": options.evaluation or (options.calibration and f"{options.calibration}, behind the calibration tokens"),
        "evaluation_tokens": len(evaluation),
        "nll": nll or None,
        "errors": errors and [layer._asdict() for layer in errors],
    }
    if options.json:
        print(json.dumps(facts))
    else:
        _report(facts)


def _check(options: argparse.Namespace) -> None:
    """Refuses what cannot end well before any weight is read, and settles the method."""
    from gqa_jax import convert, families
    from gqa_jax.formats.safetensors import check_new

    check_new(Path(options.out).expanduser().resolve())
    _, config, _ = look(options)
    if options.method is None:
        options.method = "pca" if options.calibration and not config.qk_norm else "mean"
    families.to_hf(convert.converted(config, options.num_kv_heads, options.method, calibrated=options.calibration is not None))


def _read(file: str | None) -> str:
    if file is None:
        return ""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as a text in UTF-8: {error}") from error


def _ids(model: Any, texts: dict[str, str], options: argparse.Namespace) -> tuple[list[int], list[int]]:
    """Returns the tokens to calibrate with and others to measure on: of one file, at least a quarter of it."""
    if any(texts.values()) and model.tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer, so that no text can be read; leave the texts out.")
    calibration, evaluation = (model.tokenizer.encode(text) if text else [] for text in texts.values())
    most = options.calibration_tokens
    if options.evaluation is None:
        most = min(most, len(calibration) * 3 // 4)
        evaluation = calibration[most:]
    return calibration[:most], evaluation[: options.evaluation_tokens]


def _bytes_per_token(model: Any) -> int:
    config = model.config
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.params["embedding"].dtype.itemsize


def _report(facts: dict[str, Any]) -> None:
    before, after = facts["kv_heads"]
    title = f"{facts['model']}: {before} KV heads become {after} by {facts['method']}"
    if facts["errors"] is None:
        print(title)
    else:
        table = Table(title=f"{title}; share of K and V that is lost, by layer", title_justify="left")
        for name in ("layer", "K", "V"):
            table.add_column(name, justify="right")
        for layer, lost in enumerate(facts["errors"]):
            table.add_row(str(layer), *(f"{lost[which]:.4f}" for which in "kv"))
        table.add_section()
        mean = (sum(lost[which] for lost in facts["errors"]) / len(facts["errors"]) for which in "kv")
        table.add_row("mean", *(f"{lost:.4f}" for lost in mean))
        Console(soft_wrap=True).print(table)
        print(f"calibrated with {facts['calibration_tokens']:,} tokens")
    if facts["nll"] is None:
        print("NLL was not measured: that takes --evaluation FILE, or a text for --calibration.")
    else:
        before, after = facts["nll"]
        print(f"NLL {before:.3f} before, {after:.3f} after, nats per token")
        print(f"measured on {facts['evaluation_tokens']:,} tokens of {facts['evaluation']}")
    print("cache {} per token before, {} after".format(*map(in_units, facts["cache_bytes_per_token"])))
    print(f"written to {facts['out']}")
