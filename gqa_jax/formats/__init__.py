"""Checkpoint files: bytes and metadata to named tensors, each read when it is asked for."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Tensor(NamedTuple):
    """A tensor that is still in its file. `dtype` is what `read` returns; quantised ones come as float32."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


class Archive(NamedTuple):
    """An open checkpoint: where it is, what it says of itself, and its tensors by name."""

    where: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
