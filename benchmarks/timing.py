"""What every benchmark needs: the memory bandwidth of this machine, interleaved rounds, and where results go."""

import datetime
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

RESULTS = pathlib.Path(__file__).parent / "results"


def read_bandwidth(size: int = 400_000_000, rounds: int = 5) -> float:
    """Returns bytes per second of the fastest of two read loops over `size` bytes: a sum, and a matrix times a vector.

    Neither alone is a ceiling: which of the two XLA streams faster differs from machine to machine.
    """
    width = 1024
    matrix = jnp.ones((width, size // (4 * width)), jnp.float32)
    vector = jnp.ones((1, width), jnp.float32)
    loops = (jax.jit(lambda m, v: m.sum()), jax.jit(lambda m, v: v @ m))
    times = []
    for loop in loops:
        jax.block_until_ready(loop(matrix, vector))
    for _ in range(rounds):
        for loop in loops:
            start = time.perf_counter()
            jax.block_until_ready(loop(matrix, vector))
            times.append(time.perf_counter() - start)
    return matrix.nbytes / min(times)


def interleave(jobs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Runs the jobs in turn, `rounds` times over after one turn of warming up, and returns the seconds that each reports."""
    for job in jobs.values():
        job()
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            seconds[name].append(job())
    return seconds


def spread(values: list[float], digits: int = 1) -> str:
    """Gives the median and, in brackets, the least and the most."""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}-{max(values):.{digits}f}]"


def machine() -> dict[str, Any]:
    """Says where and with what a result was measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
    }


def save(name: str, result: Mapping[str, Any]) -> None:
    """Writes a result to `benchmarks/results/NAME.json`."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
