"""GGUF files, through the `gguf` package: metadata and tensors in one file, mostly quantised in blocks."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from gqa_jax.formats import Archive, Tensor

PLAIN = {
    gguf.GGMLQuantizationType.F64: np.dtype(np.float64),
    gguf.GGMLQuantizationType.F32: np.dtype(np.float32),
    gguf.GGMLQuantizationType.F16: np.dtype(np.float16),
    gguf.GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}


def open_gguf(path: Path) -> Archive:
    """Opens a GGUF file; tensors are mapped into memory and dequantised one by one.

    Raises:
        ValueError: not a GGUF file, one that is cut off, one for big-endian machines, or one part of several.
    """
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path} begins with {magic!r}; a GGUF file begins with b'GGUF'.")
    try:
        reader = _Reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"{path} is not a GGUF file that can be read, or is cut off ({error}); fetch it again.") from error
    if reader.byte_order != "I":
        raise ValueError(f"{path} has the byte order of other machines; turn it with the gguf package's gguf-convert-endian.")
    if (parts := metadata.get("split.count", 1)) > 1:
        raise ValueError(f"{path} is one of {parts} parts; join them first, with llama.cpp's gguf-split --merge.")
    return Archive(str(path), metadata, {tensor.name: _tensor(tensor) for tensor in reader.tensors})


class _Reader(gguf.GGUFReader):
    """The package's reader, but arrays are read in one go: with views for each entry, Gemma's 262144 pieces take 10 s."""

    def _get_field_parts(self, orig_offs: int, raw_type: Any) -> tuple[int, list[Any], list[int], list[gguf.GGUFValueType]]:
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        (kind,), (count,) = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        kind, start = gguf.GGUFValueType(kind), orig_offs + 12
        if kind == gguf.GGUFValueType.STRING:
            parts = list(_strings(memoryview(self.data), start, int(count)))
            end = start + sum(8 + len(part) for part in parts)
        elif kind in self.gguf_scalar_to_np:
            parts = [self._get(start, self.gguf_scalar_to_np[kind], count)]
            end = start + int(count) * parts[0].itemsize
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return end - orig_offs, parts, list(range(len(parts))), [gguf.GGUFValueType.ARRAY, kind]


def _strings(data: memoryview, at: int, count: int) -> Iterator[memoryview]:
    for _ in range(count):
        start = at + 8
        at = start + int.from_bytes(data[at:start], sys.byteorder)
        if at > len(data):
            raise ValueError("an array of strings goes on past the end")
        yield data[start:at]


def _tensor(tensor: gguf.ReaderTensor) -> Tensor:
    # GGUF counts axes from the fastest on.
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return Tensor(shape, PLAIN.get(tensor.tensor_type, np.dtype(np.float32)), partial(_read, tensor, shape))


def _read(tensor: gguf.ReaderTensor, shape: tuple[int, ...]) -> np.ndarray:
    plain = PLAIN.get(tensor.tensor_type)
    if plain is not None:
        # A copy, since JAX would go on reading the file's own pages, which may change.
        return np.array(tensor.data.view(plain)).reshape(shape)
    try:
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    except NotImplementedError as error:
        raise ValueError(
            f"The tensor {tensor.name} is stored as {tensor.tensor_type.name}, which the gguf package cannot dequantise."
        ) from error
