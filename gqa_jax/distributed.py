"""Joins the processes of one job, so that `jax.devices()` are those of all of them; JAX does the rest.

Each host (or GPU) runs one process of the same program. SLURM, Open MPI, Kubernetes and TPU pods tell JAX who is who; elsewhere
each process is told.
"""

import os
import sys
import threading
import zlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


def join(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None, timeout: int = 120
) -> None:
    """Joins the job, before anything touches a device; returns when all processes have come.

    Args:
        coordinator: "host:port" of process 0, where every process reaches it; None asks the cluster.
        num_processes: how many there are; None asks the cluster.
        process_id: which one this is, from 0 on; None asks the cluster.
        timeout: after so many seconds without the others the process ends, with a message and exit code 1: XLA itself would
            abort it, and cannot be stopped from that.

    Raises:
        ValueError: some of the three given without the others, out of range, or no cluster that says them.
    """
    given = (coordinator, num_processes, process_id)
    if None in given and given != (None, None, None):
        raise ValueError(
            f"Of coordinator ({coordinator}), number of processes ({num_processes}) and process id ({process_id}) some are "
            "missing; give all three, or none where SLURM, Open MPI, Kubernetes or a TPU pod says them."
        )
    if timeout < 1:
        raise ValueError(f"The timeout is {timeout} s; it must be at least 1.")
    if coordinator is None:
        _check_slurm()
    elif num_processes is not None and process_id is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"The coordinator is {coordinator!r}; it must be host:port, such as 10.0.0.1:1234.")
        if not 0 <= process_id < num_processes:
            raise ValueError(f"The process id is {process_id}; there are {num_processes} processes, from 0 on.")
    who = "the cluster's processes" if coordinator is None else f"{num_processes} processes through {coordinator}"
    late = threading.Timer(timeout, _give_up, (f"after {timeout} s not all of {who} were there{_self(process_id)}.",))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id, initialization_timeout=timeout + 60)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"The processes could not be joined ({error}). Outside SLURM, Open MPI, Kubernetes and TPU pods, say "
            "--coordinator, --num-processes and --process-id."
        ) from error
    finally:
        late.cancel()


def check_same(asked: dict[str, Any]) -> None:
    """Refuses processes that do not all ask for the same: each would compute its part of something else.

    Raises:
        ValueError: it names what differs; every process raises it.
    """
    own = np.array([zlib.crc32(repr(value).encode()) for value in asked.values()], np.uint32)
    differs = (multihost_utils.process_allgather(own).reshape(-1, len(own)) != own).any(axis=0)
    # What differs from this process's need not be what differs from another's: all say the same.
    differs = multihost_utils.process_allgather(differs).reshape(-1, len(own)).any(axis=0)
    if differs.any():
        names = ", ".join(name for name, other in zip(asked, differs, strict=True) if other)
        raise ValueError(f"The processes differ in {names}; each must be given the same, but for its process id.")


def _self(process_id: int | None) -> str:
    return "" if process_id is None else f"; this is process {process_id}"


def _check_slurm() -> None:
    there = [name for name in SLURM if name in os.environ]
    if there and len(there) < len(SLURM):
        lacking = ", ".join(name for name in SLURM if name not in os.environ)
        raise ValueError(
            f"SLURM's variables are set in part: {', '.join(there)} without {lacking}. Start the processes with srun, or say "
            "coordinator, number of processes and process id."
        )


def _give_up(why: str) -> None:
    print(f"gqa-jax: {why} Is each running, and is the coordinator's port open to all?", file=sys.stderr, flush=True)
    os._exit(1)
