"""From a model to a folder in Hugging Face layout: `load` read backwards, and no more than a file of it on the host."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import einops
import jax
import numpy as np
from jax.experimental import multihost_utils

from gqa_jax import decoder
from gqa_jax.checkpoint import Progress, tensor_name
from gqa_jax.config import Config
from gqa_jax.families import Source, family_of, to_hf
from gqa_jax.formats import Archive, Tensor
from gqa_jax.formats.safetensors import NAMES, in_files, new_folder, write_files, write_json
from gqa_jax.request import Model
from gqa_jax.tokenizer import Tokenizer, to_folder

Files = Mapping[str, Mapping[str, Tensor]]


def save(model: Model, folder: str | Path, progress: Progress | None = None) -> None:
    """Writes a model as a folder in Hugging Face layout, which `load` and transformers open.

    Weights keep their dtype, and lose the padding of a mesh. They are brought to the host and written in files of up to 1 GB.
    On several processes each must call it, and the first writes. The folder appears when it is whole.

    Gemma's norms are stored less one, which loses nothing of what was ever loaded; a weight outside [0.5, 2**24] that was
    trained or made otherwise is rounded to a float32 near it less one. transformers 5 itself refuses a Llama or Gemma whose
    width is no multiple of its query heads.

    Args:
        model: its config must be one that a model type of Hugging Face has.
        folder: a new one, or an empty one.
        progress: is told (what, done, total) while saving.

    Raises:
        ValueError: a folder that is not empty, a config that Hugging Face has no words for (the fields are named), weights
            that are not those of the config, or a tokenizer of one's own.
        OSError: what the file system refuses.
    """
    archive, path = to_archive(model), Path(folder).expanduser().resolve()
    files = in_files(archive.tensors)
    pending = [tensor for tensors in files.values() for tensor in tensors.values()][::-1]  # In the order of writing.

    def take() -> np.ndarray:
        array = pending.pop().read()
        if progress is not None:
            progress("saving weights", len(archive.tensors) - len(pending), len(archive.tensors))
        return array

    files = {name: {key: tensor._replace(read=take) for key, tensor in tensors.items()} for name, tensors in files.items()}
    failure = None
    if jax.process_index() == 0:
        try:
            _write(path, archive, files, model.tokenizer)
        except Exception as error:
            failure = error
    if jax.process_count() > 1:
        failure = _after_all(pending, failure)
    if failure is not None:
        raise failure


def _write(path: Path, archive: Archive, files: Files, tokenizer: Tokenizer | None) -> None:
    with new_folder(path) as folder:
        write_json(folder / "config.json", archive.metadata)
        if tokenizer is not None:
            to_folder(tokenizer, folder)
        write_files(folder, files)


def _after_all(pending: list[Tensor], failure: Exception | None) -> Exception | None:
    """Takes part in what is still to be gathered, so that no process waits for ever, and learns how the first one fared."""
    while pending:
        pending.pop().read()
    failed = multihost_utils.broadcast_one_to_all(np.array(failure is not None))
    return failure or (OSError("The first process could not write the folder; its own error says why.") if failed else None)


def to_archive(model: Model) -> Archive:
    """Returns a model as the checkpoint that `save` writes; each tensor is gathered when it is read.

    Raises:
        ValueError: see `save`.
    """
    config, tokenizer = model.config, model.tokenizer
    if not isinstance(tokenizer, Tokenizer | None):
        raise ValueError(
            f"The tokenizer is a {type(tokenizer).__name__}, which is not known how to write; leave it out by "
            "model._replace(tokenizer=None)."
        )
    said = to_hf(config)
    family = family_of(Archive("config.json", said, {}))
    tensors = {
        tensor_name(path, family): _to_their_axes(leaf, axes, config, family.table[path[-1].key])
        for path, leaf, axes in _checked(model)
    }
    # Null where it is not known, lest transformers take its own.
    known = {"bos_token_id": tokenizer and tokenizer.bos_id, "eos_token_id": tokenizer and tokenizer.eos_id}
    return Archive("", said | {"torch_dtype": str(model.params["embedding"].dtype)} | known, tensors)


def _checked(model: Model) -> list[tuple[Any, Any, str]]:
    """Returns the path, the leaf and the axes of every weight."""
    wanted = decoder.param_shapes(model.config, mesh=model.placement)
    want, have = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (wanted, model.params))
    for path in want.keys() | have.keys():
        name = jax.tree_util.keystr(path)
        shapes = [getattr(tree.get(path), "shape", None) for tree in (want, have)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"The weight {name} has the shape {shapes[1]}; the config asks for {shapes[0]}, where None is no such weight."
            )
        if np.dtype(have[path].dtype) not in NAMES:
            raise ValueError(f"The weight {name} is {have[path].dtype}; known are {', '.join(map(str, NAMES))}.")
    letters = jax.tree.leaves(decoder.param_axes(model.config))
    return [(path, have[path], axes) for path, axes in zip(want, letters, strict=True)]


def _to_their_axes(leaf: Any, axes: str, config: Config, source: Source) -> Tensor:
    pattern = " -> ".join(reversed(source.pattern.split(" -> ")))
    dtype = np.dtype(np.float32 if source.plus else leaf.dtype)

    def read() -> np.ndarray:
        array = einops.rearrange(decoder.gather_one(leaf, axes, config), pattern)
        return array.astype(np.float32) - np.float32(source.plus) if source.plus else array

    sizes = decoder.axis_sizes(config)
    nothing = np.broadcast_to(np.zeros((), dtype), [sizes[axis] for axis in axes.split()])
    return Tensor(einops.rearrange(nothing, pattern).shape, dtype, read)
