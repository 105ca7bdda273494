"""Model families: from what a checkpoint says of itself to a `Config` and the table of its weight names.

A family is two tables over the one decoder. A table maps each of our weights to the tensor of the file that holds it and to
the einops pattern that brings it into our axes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gqa_jax.config import Attention, Config, LinearScaling, Llama3Scaling, Rope
from gqa_jax.formats import Archive

# Far above any model; a damaged number must not make lists until memory ends.
MOST_LAYERS = 10_000


class Source(NamedTuple):
    """Where a weight comes from: the tensor's name, the pattern of its axes, and a number to add to it."""

    name: str
    pattern: str
    plus: float = 0.0


Table = Mapping[str, Source]


class Family(NamedTuple):
    """How checkpoints of one format and family are read: their config, their weights, and tensors that mean nothing."""

    config: Callable[[Archive], Config]
    table: Table
    ignored: tuple[str, ...] = ()


def family_of(archive: Archive) -> Family:
    """Returns how to read this archive.

    Raises:
        ValueError: a family that is not known.
    """
    from gqa_jax.families import gemma, llama

    key = "general.architecture" if "general.architecture" in archive.metadata else "model_type"
    known = {
        "general.architecture": llama.GGUF | gemma.GGUF,
        "model_type": llama.HUGGING_FACE | gemma.HUGGING_FACE,
    }[key]
    kind = archive.metadata.get(key)
    if kind not in known:
        raise ValueError(f"{archive.where} is of the family {kind!r}; known are {', '.join(sorted(known))}.")
    return known[kind]


def need(metadata: Mapping[str, Any], key: str, archive: Archive) -> Any:
    """Returns what the checkpoint must say.

    Raises:
        ValueError: it does not.
    """
    if metadata.get(key) is None:
        raise ValueError(f"{archive.where} does not say {key}, without which it cannot be read.")
    return metadata[key]


def num_layers(metadata: Mapping[str, Any], key: str, archive: Archive) -> int:
    """Returns how many layers the checkpoint says it has.

    Raises:
        ValueError: it does not say, or a number that only a damaged file has.
    """
    count = need(metadata, key, archive)
    if not isinstance(count, int) or count > MOST_LAYERS:
        raise ValueError(f"{archive.where} says {key} = {count!r}; the most that is read is {MOST_LAYERS}. Fetch it again.")
    return count


def refuse(metadata: Mapping[str, Any], archive: Archive, allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses a checkpoint that asks for what the decoder does not do.

    Raises:
        ValueError: a key whose value is none of those allowed.
    """
    for key, values in allowed.items():
        if key in metadata and metadata[key] not in values:
            raise ValueError(f"{archive.where} asks for {key} = {metadata[key]!r}; this decoder knows {values}.")


def rope_of(fields: Mapping[str, Any], archive: Archive, base: float = 10_000.0) -> Rope:
    """Reads rotary parameters in the words of Hugging Face: `rope_theta`, `rope_type` (or `type`) and what belongs to it.

    Raises:
        ValueError: a kind of scaling that is not known, or a field that would be left unread.
    """
    fields = {key: value for key, value in fields.items() if value is not None}
    kind = fields.pop("rope_type", None) or fields.pop("type", None) or "default"
    fields.pop("type", None)
    base = float(fields.pop("rope_theta", base))
    if fields.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{archive.where} turns only a part of each head (partial_rotary_factor), which is not read.")
    try:
        match kind:
            case "default":
                scaling = None
            case "linear":
                scaling = LinearScaling(float(fields.pop("factor")))
            case "llama3":
                scaling = Llama3Scaling(
                    factor=float(fields.pop("factor")),
                    low_freq_factor=float(fields.pop("low_freq_factor")),
                    high_freq_factor=float(fields.pop("high_freq_factor")),
                    original_context=int(fields.pop("original_max_position_embeddings")),
                )
            case _:
                raise ValueError(f"{archive.where} scales rotary frequencies by {kind!r}; known are default, linear, llama3.")
    except KeyError as error:
        raise ValueError(f"{archive.where} scales rotary frequencies by {kind!r} without {error}.") from error
    if fields:
        raise ValueError(f"{archive.where} has rotary fields that {kind!r} does not read: {', '.join(sorted(fields))}.")
    return Rope(base, scaling)


def gguf_rope(metadata: Mapping[str, Any], kind: str, archive: Archive, head_dim: int) -> Rope:
    """Reads the rotary parameters of a GGUF file.

    Raises:
        ValueError: a kind of scaling that is not known, or heads that turn only in part.
    """
    turned = metadata.get(f"{kind}.rope.dimension_count", head_dim)
    if turned != head_dim:
        raise ValueError(f"{archive.where} turns {turned} of the {head_dim} lanes of each head, which is not read.")
    factor = metadata.get(f"{kind}.rope.scaling.factor", metadata.get(f"{kind}.rope.scale_linear"))
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none" if factor is None else "linear")
    fields = {"rope_theta": metadata.get(f"{kind}.rope.freq_base"), "rope_type": "default" if scaling == "none" else scaling}
    if scaling != "none":
        fields["factor"] = factor
    return rope_of(fields, archive)


def per_layer(kinds: Sequence[str], known: Mapping[str, Attention], layers: int, archive: Archive) -> tuple[Attention, ...]:
    """Returns how each layer attends, from the names of the kinds, as `layer_types` lists them.

    Raises:
        ValueError: a kind that is not known, or more or fewer of them than layers.
    """
    if unknown := sorted(set(kinds) - set(known)):
        raise ValueError(f"{archive.where} has layer_types {', '.join(unknown)}; known are {', '.join(known)}.")
    if len(kinds) != layers:
        raise ValueError(f"{archive.where} lists {len(kinds)} layer_types for {layers} layers; there must be one each.")
    return tuple(known[kind] for kind in kinds)
