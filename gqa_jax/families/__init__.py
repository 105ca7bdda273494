"""Model families: from what a checkpoint says of itself to a `Config` and the table of its weight names, and back.

A family is two tables over the one decoder. A table maps each of our weights to the tensor of the file that holds it and to
the einops pattern that brings it into our axes; saving reads the same table backwards.
"""

import dataclasses
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gqa_jax.config import Attention, Config, DivisorScaling, LinearScaling, Llama3Scaling, Rope
from gqa_jax.formats import Archive
from gqa_jax.rope import frequencies

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


def to_hf(config: Config) -> dict[str, Any]:
    """Returns what config.json says of a config: what `Family.config` reads, the other way round.

    Raises:
        ValueError: no model type of Hugging Face says all of it; the fields that the nearest one leaves out are named.
    """
    from gqa_jax.families import gemma, llama

    config = spelt_out(config)
    said = (gemma if config.post_norms else llama).to_hf(config)
    archive = Archive("config.json", said, {})
    found = spelt_out(family_of(archive).config(archive))
    if lost := list(_differences("", config, found)):
        raise ValueError(
            f"No model type of Hugging Face says all of this config. As the nearest, {said['model_type']}, "
            f"{'; '.join(lost[:3])}{'; ...' if lost[3:] else ''}."
        )
    return said


def spelt_out(config: Config) -> Config:
    """Returns the same model with one attention record for each layer, each with its scale, and Llama 3's own scaling."""

    def spelt(attention: Attention) -> Attention:
        scale = config.head_dim**-0.5 if attention.scale is None else attention.scale
        return dataclasses.replace(attention, rope=_as_llama3(attention.rope, config.head_dim), scale=scale)

    layers = (config.layer_attention(layer) for layer in range(config.num_layers))
    return dataclasses.replace(config, attention=tuple(spelt(attention) for attention in layers))


def _as_llama3(rope: Rope | None, head_dim: int) -> Rope | None:
    """Finds the scaling that GGUF files of Llama 3 write as divisors: all of its models have these numbers, save the factor."""
    if rope is None or not isinstance(rope.scaling, DivisorScaling):
        return rope
    own = Llama3Scaling(max(rope.scaling.divisors), low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    guess = dataclasses.replace(rope, scaling=own)
    same = np.allclose(frequencies(guess, head_dim), frequencies(rope, head_dim), rtol=1e-6, atol=0)
    return guess if same else rope


def _differences(name: str, ours: Any, theirs: Any) -> Iterator[str]:
    if dataclasses.is_dataclass(ours) and type(ours) is type(theirs):
        for field in dataclasses.fields(ours):
            path = f"{name}.{field.name}".removeprefix(".")
            yield from _differences(path, getattr(ours, field.name), getattr(theirs, field.name))
    elif isinstance(ours, tuple) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(f"{name}[{index}]", *pair)
    # The last bit of a root, as in a scale, is the machine's own.
    elif ours != theirs and not (isinstance(ours, float) and theirs is not None and math.isclose(ours, theirs, rel_tol=1e-12)):
        yield f"{name}, {reprlib.repr(ours)}, would become {reprlib.repr(theirs)}"


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


def rope_to_hf(rope: Rope | None) -> dict[str, Any]:
    """Says rotary parameters in the words that transformers 4 and 5 both read."""
    rope = rope or Rope()
    match rope.scaling:
        case LinearScaling(factor):
            scaling = {"rope_type": "linear", "factor": float(factor)}
        case Llama3Scaling():
            scaling = {
                "rope_type": "llama3",
                "factor": float(rope.scaling.factor),
                "low_freq_factor": float(rope.scaling.low_freq_factor),
                "high_freq_factor": float(rope.scaling.high_freq_factor),
                "original_max_position_embeddings": rope.scaling.original_context,
            }
        case _:
            scaling = None
    return {"rope_theta": float(rope.base), "rope_scaling": scaling}


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
