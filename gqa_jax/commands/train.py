"""`gqa-jax train`: trains a checkpoint further, or a small model from nothing; killed at any moment, it goes on."""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gqa_jax.commands.terminal import add_model, bars, count

LENGTH = 512  # tokens of a row, where the model's context has them


def add(commands: Any) -> None:
    """Declares the command and its arguments."""
    learn = commands.add_parser("train", help="train on texts", description="Trains a model on texts.")
    learn.set_defaults(command=run)
    add_model(learn, "model", nargs="?")
    learn.add_argument("--from-scratch", metavar="CONFIG", help="a config.json of Hugging Face, for a model of random weights")
    learn.add_argument("--tokenizer", metavar="MODEL", help="whose tokenizer (that of MODEL, or beside CONFIG, or bytes)")
    learn.add_argument(
        "--data", nargs="+", required=True, metavar="FILE", help='texts in UTF-8; of .jsonl, the "text" of each line'
    )
    learn.add_argument("--evaluation", nargs="+", metavar="FILE", help="texts whose loss is taken before and after")
    learn.add_argument("--out", metavar="DIR", help="keeps checkpoints/, log.jsonl and, at the end, model/")
    learn.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint of DIR, if there is one")
    learn.add_argument("--json", action="store_true", help="print one line of JSON and nothing else")
    _add_recipe(learn.add_argument_group("how to train"))
    many = learn.add_argument_group("on many devices")
    many.add_argument("--tp", type=count, default=1, metavar="N", help="devices that share the weights (%(default)s)")
    many.add_argument(
        "--data-parallel", type=count, default=1, metavar="N", help="copies of them, for parts of the batch (%(default)s)"
    )


def _add_recipe(how: Any) -> None:
    how.add_argument("--steps", type=count, default=1000, metavar="N", help="of the whole run (%(default)s)")
    how.add_argument("--batch", type=count, default=8, metavar="N", help="rows of a step, over all devices (%(default)s)")
    how.add_argument("--length", type=count, metavar="N", help=f"tokens of a row ({LENGTH}, or the context if less)")
    how.add_argument("--accumulate", type=count, default=1, metavar="N", help="cut the rows of a step into N parts")
    how.add_argument("--learning-rate", type=float, default=3e-4, metavar="X", help="the highest (%(default)s)")
    how.add_argument("--warmup", type=int, metavar="N", help="steps until then (a tenth of all)")
    how.add_argument("--compute-dtype", choices=("float32", "bfloat16"), default="float32", help="(%(default)s)")
    how.add_argument("--remat", action="store_true", help="compute layers anew for gradients: less memory, more time")
    how.add_argument("--seed", type=int, default=0, help="of the order of texts, and of weights from nothing (%(default)s)")
    how.add_argument("--save-every", type=count, default=100, metavar="N", help="steps between checkpoints (%(default)s)")
    how.add_argument("--keep", type=count, default=3, metavar="N", help="the newest checkpoints that are kept (%(default)s)")


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    import gqa_jax
    from gqa_jax import data, export, train

    _check(options)
    model = _model(options)
    recipe = _recipe(options, model.config.context_length)
    if options.out:
        export.to_archive(model)  # Refuses what could not be written, before anything is trained.
    texts = data.read(options.data, model.tokenizer)
    held = data.read(options.evaluation, model.tokenizer) if options.evaluation else None

    def missed(model: Any) -> float | None:
        how = {"length": recipe.length, "batch": recipe.batch, "compute_dtype": recipe.compute_dtype}
        return None if held is None else train.evaluate(model, held, **how)

    before, done = missed(model), []

    def report(now: Any) -> None:
        done.append(now)
        show(now)

    with _shown(options, model.config, recipe) as (show, share), _advice(options.out):
        trained = train.train(model, texts, recipe, options.out, resume=options.resume, report=report)
    after, saved = missed(trained.model), None
    if options.out:
        saved = Path(options.out, "model")
        if done and saved.is_dir():
            shutil.rmtree(saved)  # That of the same run, as it ended before its last checkpoints were lost.
        if done or not saved.exists():
            with bars(options.json) as progress:
                gqa_jax.save(trained.model, saved, progress)
    _say(options, _summary(recipe, done, share, before, after, saved))


@contextmanager
def _advice(out: str | None) -> Iterator[None]:
    """Says to who interrupts how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if out and any(Path(out, "checkpoints").glob("[0-9]*")):
            print(f"\nThe same command with --resume goes on from the last checkpoint in {out}.", file=sys.stderr)
        raise


def _check(options: argparse.Namespace) -> None:
    if (options.model is None) == (options.from_scratch is None):
        raise ValueError("Give a MODEL to train on, or --from-scratch CONFIG, and not both.")
    if options.resume and not options.out:
        raise ValueError("--resume needs --out DIR, the folder of the run that goes on.")
    if not options.out:
        return
    out = Path(options.out).expanduser()
    options.out = str(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is no folder; choose another name for --out.")
    goes_on = options.resume and any((out / "checkpoints").glob("[0-9]*"))
    if any((out / "model").glob("*")) and not goes_on:
        raise ValueError(f"{out} holds a trained model already, and no run that could go on; choose another folder.")


def _recipe(options: argparse.Namespace, context: int) -> Any:
    from gqa_jax.train import Recipe

    same = ("steps", "batch", "accumulate", "learning_rate", "compute_dtype", "remat", "seed", "save_every", "keep")
    return Recipe(
        length=options.length or min(LENGTH, context),
        warmup=options.steps // 10 if options.warmup is None else options.warmup,
        **{name: getattr(options, name) for name in same},
    )


def _model(options: argparse.Namespace) -> Any:
    import jax

    import gqa_jax

    devices = options.tp * options.data_parallel
    if devices > 1 and "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", devices)  # Counts only where the CPU is all there is.

    def mesh(config: Any) -> Any:
        return gqa_jax.make_mesh(config, tp=options.tp, data=options.data_parallel) if devices > 1 else None

    if options.from_scratch:
        config, tokenizer = _from_nothing(options)
        params = gqa_jax.init_params(config, jax.random.key(options.seed), mesh=mesh(config))
        return gqa_jax.Model(config, params, tokenizer)
    with bars(options.json) as progress:
        model = gqa_jax.load(options.model, mesh=mesh if devices > 1 else None, progress=progress)
    tokenizer = _tokenizer(options.tokenizer) if options.tokenizer else model.tokenizer
    if tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer; say whose to take by --tokenizer.")
    return model._replace(tokenizer=tokenizer)


def _from_nothing(options: argparse.Namespace) -> tuple[Any, Any]:
    from gqa_jax import tokenizer
    from gqa_jax.families import family_of
    from gqa_jax.formats import Archive

    file = Path(options.from_scratch).expanduser()
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{file} is no config.json that can be read: {error}") from error
    if not isinstance(said, dict):
        raise ValueError(f"{file} is no config.json: it holds no object.")
    archive = Archive(str(file), said, {})
    config = family_of(archive).config(archive)
    if options.tokenizer:
        words = _tokenizer(options.tokenizer)
    else:
        words = tokenizer.from_folder(file.parent) if (file.parent / "tokenizer.json").is_file() else tokenizer.of_bytes()
    if words.vocab_size > config.vocab_size:
        raise ValueError(
            f"The tokenizer has {words.vocab_size} tokens and {file} a vocab_size of {config.vocab_size}, which is too few; "
            "bytes need 257."
        )
    return config, words


def _tokenizer(name: str) -> Any:
    from gqa_jax import checkpoint, tokenizer

    path = Path(name).expanduser()
    if path.name == "tokenizer.json" or (path / "tokenizer.json").is_file():
        return tokenizer.from_folder(path.parent if path.name == "tokenizer.json" else path)
    path = checkpoint.locate(name)
    found = checkpoint.tokenizer_of(path, checkpoint.open_archive(path))
    if found is None:
        raise ValueError(f"{name} has no tokenizer.")
    return found


@contextmanager
def _shown(options: argparse.Namespace, config: Any, recipe: Any) -> Iterator[tuple[Callable, Callable]]:
    """Shows a bar on a terminal, and elsewhere ten lines; also gives what a speed is as a share of the peak."""
    from gqa_jax.loss import flops_per_token

    console, peak = Console(stderr=True), _peak()
    needed = flops_per_token(config, recipe.length) / (options.tp * options.data_parallel)

    def share(tokens_per_second: float) -> float | None:
        return None if peak is None else tokens_per_second * needed / peak

    def said(now: Any) -> str:
        part = share(now.tokens_per_second)
        return f"loss {now.loss:.4f}, {now.tokens_per_second:,.0f} tokens/s" + (
            "" if part is None else f", {part:.0%} of the peak"
        )

    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    quiet = options.json or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("compiling", total=recipe.steps)

        def show(now: Any) -> None:
            bar.update(task, completed=now.step, description=said(now))
            if quiet and not options.json and now.step % max(1, recipe.steps // 10) == 0:
                print(f"step {now.step} of {recipe.steps}: {said(now)}", file=sys.stderr, flush=True)

        yield show, share


def _peak() -> float | None:
    """Returns operations in a second that a device can do: by its data sheet, or on a CPU by a product of matrices now."""
    import jax
    import jax.numpy as jnp

    from gqa_jax.devices import peak_of

    if jax.default_backend() != "cpu":
        return peak_of(jax.devices()[0].device_kind)
    size, product = 1024, jax.jit(jnp.matmul)
    square = jnp.ones((size, size))
    product(square, square).block_until_ready()
    taken = []
    for _ in range(5):
        begun = time.perf_counter()
        product(square, square).block_until_ready()
        taken.append(time.perf_counter() - begun)
    # What are many devices to JAX are one CPU.
    return 2 * size**3 / min(taken) / jax.device_count()


def _summary(
    recipe: Any, done: list[Any], share: Callable, before: float | None, after: float | None, saved: Path | None
) -> dict[str, Any]:
    speeds = [now.tokens_per_second for now in done[1:]]  # The first step compiles.
    speed = statistics.median(speeds) if speeds else None
    return {
        "steps": recipe.steps,
        "begun": done[0].step - 1 if done else recipe.steps,
        "first_loss": done[0].loss if done else None,
        "loss": done[-1].loss if done else None,
        "tokens_per_second": speed,
        "model_flop_share": speed and share(speed),
        "evaluation_before": before,
        "evaluation_after": after,
        "model": saved and str(saved),
    }


def _say(options: argparse.Namespace, facts: dict[str, Any]) -> None:
    if options.json:
        print(json.dumps(facts))
        return
    if facts["loss"] is None:
        print(f"all {facts['steps']} steps were done before")
    else:
        print(f"steps       {facts['begun'] + 1} to {facts['steps']}")
        print(f"loss        {facts['first_loss']:.4f} to {facts['loss']:.4f}")
    if facts["tokens_per_second"]:
        part = facts["model_flop_share"]
        said = "the peak of this device is not known" if part is None else f"{part:.0%} of the peak"
        print(f"speed       {facts['tokens_per_second']:,.0f} tokens/s, {said}")
    if facts["evaluation_after"] is not None:
        print(f"evaluation  {facts['evaluation_before']:.4f} before, {facts['evaluation_after']:.4f} after")
    print(f"model       {facts['model'] or 'not kept; --out DIR keeps it'}")
