"""What known devices offer, and amounts as people write them: 128k tokens, 80 GB, 8e9 parameters."""

import dataclasses
import re
from collections.abc import Mapping
from decimal import Decimal

GIB, GB = 2**30, 10**9

# What may stand behind a number on the command line.
TOKENS = {"": 1, "k": 2**10, "m": 2**20}
PARAMETERS = {"": 1, "m": 10**6, "b": GB}
BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": GB, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": GIB, "tib": 2**40}


@dataclasses.dataclass(frozen=True)
class Device:
    """What one of `jax.devices()` offers: bytes of memory, those of them that a program can have, bytes read in a second."""

    name: str
    memory: int
    usable: int
    bandwidth: int | None
    source: str
    is_tpu: bool = False


# A GPU's GB are taken as 10^9 bytes: the data sheets do not say, and some report more. What of a TPU's memory is usable is what
# XLA itself says when a program is too large ("exceeds available HBM (15.75G)"), seen with libtpu 0.0.42.1; v4 as megacore.
DEVICES = {
    device.name: device
    for device in (
        Device("a100-80", 80 * GB, 80 * GB, 2039 * GB, "NVIDIA's A100 80GB SXM data sheet"),
        Device("h100", 80 * GB, 80 * GB, 3350 * GB, "https://www.nvidia.com/en-us/data-center/h100/ (SXM)"),
        Device("h200", 141 * GB, 141 * GB, 4800 * GB, "https://www.nvidia.com/en-us/data-center/h200/"),
        Device("b200", 180 * GB, 180 * GB, 8000 * GB, "https://www.nvidia.com/en-us/data-center/dgx-b200/, an eighth of it"),
        Device("mi300x", 192 * GB, 192 * GB, 5300 * GB, "AMD's Instinct MI300X data sheet"),
        Device("v4", 32 * GIB, 123 * GIB // 4, 1200 * GB, "https://cloud.google.com/tpu/docs/v4; usable: XLA", True),
        Device("v5e", 16 * GIB, 63 * GIB // 4, 819 * GB, "https://cloud.google.com/tpu/docs/v5e; usable: XLA", True),
        Device(
            "v5p", 9574 * GIB // 100, 9574 * GIB // 100, 2765 * GB, "https://cloud.google.com/tpu/docs/v5p; usable: XLA", True
        ),
        Device("v6e", 32 * GIB, 125 * GIB // 4, 1638 * GB, "https://cloud.google.com/tpu/docs/v6e; usable: XLA", True),
        # A chip of 192 GiB and 7380 GB/s is two devices to JAX.
        Device(
            "tpu7x", 96 * GIB, 379 * GIB // 4, 3690 * GB, "half of https://cloud.google.com/tpu/docs/tpu7x; usable: XLA", True
        ),
    )
}

# Products of bfloat16 in a second, two operations each, without sparsity, by the beginning of what JAX calls the device's kind.
# From the data sheets above; of a TPU v7 chip, half.
PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "AMD Instinct MI300X": 1307e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 1153e12,
}


def peak_of(kind: str) -> float | None:
    """Returns the peak of bfloat16 operations in a second of a kind of device; None where it is not known.

    >>> peak_of("NVIDIA H200")
    989000000000000.0
    """
    return next((peak for name, peak in PEAKS.items() if kind.startswith(name)), None)


def device_of(name: str | None, memory: str | None) -> Device | None:
    """Returns the known device of this name, or one of that much memory.

    Raises:
        ValueError: both, a name that is not known, or no amount of memory.
    """
    if name is not None and memory is not None:
        raise ValueError(f"--device {name} has its own memory; leave it or --memory {memory} out.")
    if memory is not None:
        size = amount("memory", memory, BYTES, "80GB (10^9 each), 80GiB (2^30 each) or plain bytes")
        return Device("this device", size, size, None, "--memory")
    if name is not None and name not in DEVICES:
        raise ValueError(f"The device is {name!r}; known are {', '.join(DEVICES)}. For any other give --memory 80GB.")
    return None if name is None else DEVICES[name]


def amount(what: str, text: str, suffixes: Mapping[str, int], example: str) -> int:
    """Returns a number with a suffix: tokens such as 128k, bytes such as 80GB or 80GiB, parameters such as 8e9.

    >>> amount("context", "128k", TOKENS, "128k")
    131072

    Raises:
        ValueError: another suffix, a part of one, or nothing.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d\d?)?) ?([a-z]*)", text.strip(), re.IGNORECASE)
    number = Decimal(found[1]) * suffixes.get(found[2].lower(), 0) if found else Decimal(0)
    if not 1 <= number < 10**18 or number % 1:
        raise ValueError(f"The {what} is {text!r}; it must be a whole number of at least 1, such as {example}.")
    return int(number)


def units(count: int) -> tuple[str, str]:
    """Returns bytes in decimal and in binary units.

    >>> units(3997696000000)
    ('4.00 TB', '3.64 TiB')
    """
    return _scaled(count, 1000, ("kB", "MB", "GB", "TB")), _scaled(count, 1024, ("KiB", "MiB", "GiB", "TiB"))


def _scaled(count: int, step: int, names: tuple[str, ...]) -> str:
    power = min(len(names), next(power for power in range(99) if count < step ** (power + 1)))
    return f"{count / step**power:.{2 if power == len(names) else 1}f} {names[power - 1]}" if power else f"{count} B"
