"""The command line `gqa-jax`: it reads the arguments, runs one of the commands and says how it ended."""

import argparse
import importlib.metadata
import io
import os
import sys
from collections.abc import Sequence

from gqa_jax.commands import convert, generate, info, plan, train


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0 when it was done, 1 when it failed, 2 for misuse, 130 when interrupted."""
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")  # A terminal without some letters must not lose the text.
    options = _parser().parse_args(arguments)
    from gqa_jax.download import DownloadError

    try:
        options.command(options)
    except (ValueError, TypeError) as error:
        print(f"gqa-jax: {error}", file=sys.stderr)
        return 2
    except (DownloadError, OSError, MemoryError, RuntimeError) as error:  # RuntimeError is XLA's: no device, no memory
        if isinstance(error, BrokenPipeError):
            # Whoever read our output has had enough; the interpreter must not try to flush it once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        print(f"gqa-jax: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ngqa-jax: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gqa-jax", description="Grouped-query attention on real checkpoints.")
    parser.add_argument("--version", action="version", version=f"gqa-jax {importlib.metadata.version('gqa-jax')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (generate, info, plan, convert, train):
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
