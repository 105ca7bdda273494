"""From a name or a path to a model: the file's format and family give the config, and each tensor is placed one by one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from gqa_jax import decoder, download
from gqa_jax.config import Config
from gqa_jax.families import Family, family_of
from gqa_jax.formats import Archive
from gqa_jax.formats.gguf import open_gguf
from gqa_jax.formats.safetensors import open_folder
from gqa_jax.request import Model
from gqa_jax.sharding import Placement, placement_of
from gqa_jax.tokenizer import Tokenizer, from_folder, from_gguf

Progress = Callable[[str, int, int], None]


def load(
    name_or_path: str | Path,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | Placement | Callable[[Config], Placement] | None = None,
    progress: Progress | None = None,
) -> Model:
    """Returns the model that a name or a path stands for.

    Args:
        name_or_path: a GGUF file, a folder in Hugging Face layout, a known name ("smollm2-135m", "gemma3-270m": fetched at
            first use and kept), or a model of the Hugging Face Hub ("org/name", with the extra `hub`).
        dtype: what the matrices become; None keeps the widest dtype of the file, where quantised ones count as float32.
            Norms are float32 always.
        mesh: where the weights lie: what `gqa_jax.make_mesh` returns, a mesh of one's own, or a function from the config to
            one, such as `functools.partial(gqa_jax.make_mesh, tp=4)`. Each tensor goes straight to its devices.
        progress: is told (what, done, total) while fetching and loading.

    Raises:
        ValueError: not a checkpoint, a family or a field that is not known, or a tensor missing, left over or misshapen.
        gqa_jax.download.DownloadError: a known name that cannot be fetched.
    """
    path = locate(str(name_or_path), progress)
    archive = open_archive(path)
    family = family_of(archive)
    config = family.config(archive)
    placement = placement_of(mesh if mesh is None or isinstance(mesh, Mesh | Placement) else mesh(config))
    params = load_params(archive, family, config, dtype, placement, progress)
    return Model(config, params, tokenizer_of(path, archive))


def locate(name: str, progress: Progress | None = None) -> Path:
    """Returns the file or folder that a name or a path stands for, fetched where need be."""
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if name in download.KNOWN:
        return download.fetch(name, progress=progress)
    if name.count("/") == 1 and not name.startswith((".", "~", "/")) and path.suffix not in (".gguf", ".safetensors"):
        return _from_hub(name)
    raise ValueError(
        f"{name!r} is no file or folder here, no known model ({', '.join(sorted(download.KNOWN))}) and no model of the "
        "Hugging Face Hub (org/name)."
    )


def _from_hub(name: str) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ValueError(
            f"{name!r} is no folder here. To fetch it from the Hugging Face Hub, install the extra: pip install 'gqa-jax[hub]'."
        ) from error
    try:
        wanted = ["*.json", "*.jinja", "*.safetensors"]
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted, ignore_patterns=["consolidated*"]))
    except Exception as error:  # The hub's own errors are of many kinds, from the network's to a gated model's.
        raise download.DownloadError(f"{name!r} could not be fetched from the Hugging Face Hub: {error}") from error


def open_archive(path: Path) -> Archive:
    """Opens a checkpoint of either format.

    Raises:
        ValueError: neither a GGUF file nor a folder in Hugging Face layout.
    """
    if path.is_file():
        if path.suffix == ".safetensors":
            raise ValueError(f"{path} holds weights only; give the folder that has config.json beside it.")
        return open_gguf(path)
    found = sorted(path.glob("*.gguf"))
    if found and not any(path.glob("*.safetensors")):
        if len(found) > 1:
            raise ValueError(f"{path} holds {len(found)} GGUF files; give one: {', '.join(file.name for file in found)}.")
        return open_gguf(found[0])
    return open_folder(path)


def tokenizer_of(path: Path, archive: Archive) -> Tokenizer | None:
    """Returns the tokenizer that goes with a checkpoint; None where there is none."""
    if "tokenizer.ggml.model" in archive.metadata:
        return from_gguf(archive.metadata)
    return from_folder(path) if path.is_dir() and (path / "tokenizer.json").is_file() else None


def load_params(
    archive: Archive,
    family: Family,
    config: Config,
    dtype: DTypeLike | None = None,
    placement: Placement | None = None,
    progress: Progress | None = None,
) -> decoder.Params:
    """Returns the weights, in the decoder's names and axes, one by one brought to where they lie.

    Raises:
        ValueError: a tensor missing, left over or misshapen, or a dtype that is not floating point.
    """
    if dtype is not None and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise ValueError(f"dtype is {jnp.dtype(dtype)}; weights are floating point, such as float32 or bfloat16.")
    kept = stored_dtype(archive, family, config)
    wanted, tree = jax.tree_util.tree_flatten_with_path(decoder.param_shapes(config, kept if dtype is None else dtype))
    leaves = []
    letters = jax.tree.leaves(decoder.param_axes(config))
    for done, ((path, leaf), axes) in enumerate(zip(wanted, letters, strict=True)):
        array = _to_our_axes(archive, family, config, path, leaf.shape)
        leaves.append(
            jnp.asarray(array, leaf.dtype) if placement is None else placement.put(np.asarray(array, leaf.dtype), axes)
        )
        if progress is not None:
            progress("loading weights", done + 1, len(wanted))
    return decoder.with_placement(tree.unflatten(leaves), placement)


def stored_dtype(archive: Archive, family: Family, config: Config) -> jnp.dtype:
    """Returns the widest dtype of the matrices in the file; quantised ones count as float32.

    Raises:
        ValueError: a tensor missing or left over.
    """
    wanted, _ = jax.tree_util.tree_flatten_with_path(decoder.param_shapes(config))
    names = {tensor_name(path, family): path[-1].key for path, _ in wanted}
    _check_names(archive, family, config, list(names))
    matrices = {archive.tensors[name].dtype for name, ours in names.items() if not ours.endswith(("norm", "bias"))}
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*(jax.dtypes.canonicalize_dtype(dtype) for dtype in matrices))


def tensor_name(path: Any, family: Family) -> str:
    """Returns what a family calls the weight at this place in the tree of the parameters."""
    name = family.table[path[-1].key].name
    return name.format(layer=path[1].idx) if len(path) > 1 else name


def _check_names(archive: Archive, family: Family, config: Config, names: list[str]) -> None:
    if missing := [name for name in names if name not in archive.tensors]:
        raise ValueError(f"{archive.where} lacks {len(missing)} tensors: {', '.join(missing[:5])}.")
    meaningless = {*family.ignored} | ({family.table["head"].name} if config.tied_head else set())
    left = sorted(set(archive.tensors) - set(names) - meaningless)
    if left := [name for name in left if not name.endswith("rotary_emb.inv_freq")]:
        raise ValueError(f"{archive.where} has {len(left)} tensors that would be left unused: {', '.join(left[:5])}.")


def _to_our_axes(archive: Archive, family: Family, config: Config, path: Any, shape: tuple[int, ...]) -> np.ndarray:
    source, name = family.table[path[-1].key], tensor_name(path, family)
    tensor = archive.tensors[name]
    sizes = decoder.axis_sizes(config) | {"two": 2, "half": config.head_dim // 2}
    letters = source.pattern.replace("(", " ").replace(")", " ").split()
    read = {letter: size for letter, size in sizes.items() if letter in letters}
    try:
        array = einops.rearrange(tensor.read(), source.pattern, **read)
    except einops.EinopsError as error:
        numbers = ", ".join(f"{letter} = {size}" for letter, size in read.items())
        raise ValueError(
            f"{archive.where}: {name} has shape {tensor.shape}, which is not {source.pattern.split(' -> ')[0]} with {numbers}."
        ) from error
    if array.shape != shape:
        raise ValueError(f"{archive.where}: {name} has shape {tensor.shape}, from which {shape} was to come.")
    return array.astype(np.float32) + np.float32(source.plus) if source.plus else array
