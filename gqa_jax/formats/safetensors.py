"""Hugging Face folders: config.json, and safetensors in one file or in several with an index."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from gqa_jax.formats import Archive, Tensor

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def open_folder(path: Path) -> Archive:
    """Opens a folder as `save_pretrained` writes it.

    Raises:
        ValueError: a file that is missing, cut off, no JSON, or holds what is not floating point.
    """
    config = path / "config.json"
    if not config.is_file():
        raise ValueError(f"{path} has no config.json, so it is no checkpoint in Hugging Face layout.")
    metadata, promised = _read_object(config), _weight_map(path)
    tensors: dict[str, Tensor] = {}
    for file in _files(path, promised):
        tensors |= _tensors(file)
    if missing := sorted(set(promised) - set(tensors)):
        raise ValueError(f"{path} lacks {len(missing)} tensors that its index names: {', '.join(missing[:5])}.")
    return Archive(str(path), metadata, tensors)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds {type(found).__name__}; it must be one JSON object.")
    return found


def _weight_map(path: Path) -> dict[str, str]:
    index = path / "model.safetensors.index.json"
    if not index.is_file() or (path / "model.safetensors").is_file():
        return {}  # One whole file comes first, as for transformers, beside which an index is left from an earlier time.
    names = _read_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index} has no weight_map from the names of tensors to files.")
    return names


def _files(path: Path, promised: dict[str, str]) -> list[Path]:
    if promised:
        files = [path / name for name in sorted(set(promised.values()))]
    elif (whole := path / "model.safetensors").is_file():
        files = [whole]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} has no *.safetensors; other kinds of weights are not read.")
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{path} lacks {', '.join(missing)}, which its index names.")
    return files


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        opened = safetensors.safe_open(file, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error}); fetch it again.") from error
    tensors = {}
    for name in opened.keys():  # noqa: SIM118 (it is no mapping)
        piece = opened.get_slice(name)
        if piece.get_dtype() not in DTYPES:
            raise ValueError(f"{file} holds {name} as {piece.get_dtype()}; known are {', '.join(DTYPES)}.")
        tensors[name] = Tensor(tuple(piece.get_shape()), DTYPES[piece.get_dtype()], partial(opened.get_tensor, name))
    return tensors
