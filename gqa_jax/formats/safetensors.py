"""Hugging Face folders: config.json, and safetensors in one file or in several with an index."""

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import save_file

from gqa_jax.formats import Archive, Tensor

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_BYTES = 10**9  # in one file, whose tensors are on the host together while it is written


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


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Gives a folder to write into, beside `path`, that takes its place at the end; after an error nothing is left.

    Raises:
        ValueError: there is something already.
    """
    check_new(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".save-", dir=path.parent, ignore_cleanup_errors=True) as temp:
        inside = Path(temp, path.name)  # Made here, so that it has the rights of any new folder, and not of a secret one.
        inside.mkdir()
        yield inside
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()
        os.replace(inside, path)


def check_new(path: Path) -> None:
    """Refuses a path where there is something already.

    Raises:
        ValueError: there is.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is there already, and is no empty folder; choose another name, or remove it first.")


def in_files(tensors: Mapping[str, Tensor], most: int = MOST_BYTES) -> dict[str, dict[str, Tensor]]:
    """Returns which file each tensor goes to, in the order in which they are written."""
    files, room = [{}], most
    for name, tensor in tensors.items():
        if _size(tensor) > room and files[-1]:
            files.append({})
            room = most
        files[-1][name] = tensor
        room -= _size(tensor)
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": held for i, held in enumerate(files, 1)}


def write_files(folder: Path, files: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Writes the files, and their index where they are several."""
    for file, tensors in files.items():
        arrays = {name: np.ascontiguousarray(tensor.read()) for name, tensor in tensors.items()}
        save_file(arrays, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # It makes them for their owner alone.
    if len(files) > 1:
        size = sum(_size(tensor) for tensors in files.values() for tensor in tensors.values())
        places = {name: file for file, tensors in files.items() for name in tensors}
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": places})


def _size(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes an object as transformers does."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
