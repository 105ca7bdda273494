"""What the commands share: their common arguments, and how they speak to a person at a terminal."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

DEFAULT_MODEL = "smollm2-135m"
DTYPES = ("float32", "bfloat16", "float16")


def add_model(parser: argparse.ArgumentParser, name: str, **how: Any) -> None:
    """Declares the checkpoint to work on."""
    parser.add_argument(
        name,
        metavar="MODEL",
        help="a GGUF file, a folder in Hugging Face layout, smollm2-135m or gemma3-270m, or org/name of the Hub (%(default)s)",
        **how,
    )


def add_mesh(parser: Any, tp: int | None, said: str) -> None:
    """Declares the devices; `said` is what the help calls the default of --tp."""
    parser.add_argument("--tp", type=count, default=tp, metavar="N", help=f"devices that share the weights ({said})")
    parser.add_argument(
        "--data", type=count, default=1, metavar="N", help="copies of them, for parts of the batch (%(default)s)"
    )
    parser.add_argument(
        "--policy",
        choices=("replicate", "split", "reject"),
        default="replicate",
        help="where devices share a KV head: copy its cache, split its slots, or refuse (%(default)s)",
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Declares --dtype and --json."""
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (as stored; float32 for quantised files)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON and nothing else")


def count(text: str) -> int:
    """Reads a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def look(options: argparse.Namespace) -> tuple[Any, Any, str]:
    """Returns where a model lies, its config, and the dtype that its weights will have; reads no weights."""
    from gqa_jax import checkpoint, families

    with bars(options.json) as progress:
        path = checkpoint.locate(options.model, progress)
        archive = checkpoint.open_archive(path)
    family = families.family_of(archive)
    config = family.config(archive)
    return path, config, options.dtype or checkpoint.stored_dtype(archive, family, config).name


@contextmanager
def bars(quiet: bool) -> Iterator[Any]:
    """Shows a bar for each long piece of work, on a terminal only, and takes them away at the end."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield progress


def in_units(count: int) -> str:
    """Gives bytes exactly and in decimal and binary units."""
    decimal, binary = float(count), float(count)
    for unit, other in (("B", "B"), ("kB", "KiB"), ("MB", "MiB"), ("GB", "GiB"), ("TB", "TiB")):
        if decimal < 1000 or unit == "TB":
            return f"{count} B" if unit == "B" else f"{decimal:.1f} {unit} ({binary:.1f} {other})"
        decimal, binary = decimal / 1000, binary / 1024
    raise AssertionError
