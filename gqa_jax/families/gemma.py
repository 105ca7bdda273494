"""Gemma 3 (arXiv:2503.19786): norms on Q and K and behind each block, five local layers to a global one."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from gqa_jax.config import Attention, Config, Rope
from gqa_jax.families import Family, Source, gguf_rope, need, num_layers, per_layer, refuse, rope_of, rope_to_hf
from gqa_jax.families.llama import BLOCK, GGUF_TABLE, HF_LAYER, HF_TABLE, gguf_sizes, hf_sizes, layer_type
from gqa_jax.formats import Archive

# What the architecture takes where a file is silent, as most GGUF files are about the last two.
GLOBAL_BASE = 1_000_000.0
LOCAL_BASE = 10_000.0
GLOBAL_EVERY = 6

POST_NORMS = {
    "attention.post_norm": Source(HF_LAYER + "post_attention_layernorm.weight", "D -> D"),
    "mlp.norm": Source(HF_LAYER + "pre_feedforward_layernorm.weight", "D -> D"),
    "mlp.post_norm": Source(HF_LAYER + "post_feedforward_layernorm.weight", "D -> D"),
}
# Hugging Face stores norm weights as what is added to one; GGUF files have the one already in them.
HF_GEMMA_TABLE = {
    name: source._replace(plus=1.0) if name.endswith("norm") else source for name, source in (HF_TABLE | POST_NORMS).items()
}
GGUF_GEMMA_TABLE = GGUF_TABLE | {
    "attention.post_norm": Source(BLOCK + "post_attention_norm.weight", "D -> D"),
    "mlp.post_norm": Source(BLOCK + "post_ffw_norm.weight", "D -> D"),
}


def hf_config(archive: Archive) -> Config:
    """Reads config.json of a Gemma 3 text model."""
    said = archive.metadata
    refuse(said, archive, {"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False, None)})
    heads, width = need(said, "num_attention_heads", archive), need(said, "hidden_size", archive)
    layers, head_dim = num_layers(said, "num_hidden_layers", archive), said.get("head_dim") or width // heads
    config = Config(
        vocab_size=need(said, "vocab_size", archive),
        num_layers=layers,
        model_dim=width,
        mlp_dim=need(said, "intermediate_size", archive),
        num_heads=heads,
        num_kv_heads=said.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        context_length=need(said, "max_position_embeddings", archive),
        norm_eps=said.get("rms_norm_eps", 1e-6),
        qkv_bias=bool(said.get("attention_bias", False)),
        out_bias=bool(said.get("attention_bias", False)),
        tied_head=bool(said.get("tie_word_embeddings", True)),
        logit_softcap=said.get("final_logit_softcapping"),
    )
    everywhere, local = _hf_ropes(said, archive)
    scale = need(said, "query_pre_attn_scalar", archive) ** -0.5
    known = _kinds(everywhere, local, need(said, "sliding_window", archive), scale)
    kinds = said.get("layer_types") or _every(said.get("sliding_window_pattern") or GLOBAL_EVERY, layers)
    return _gemma3(config, per_layer(kinds, known, layers, archive))


def _hf_ropes(said: Mapping[str, Any], archive: Archive) -> tuple[Rope, Rope]:
    """Reads how global and local layers turn: fields at the top level (older), or one record for each (newer)."""
    newer = dict(said.get("rope_parameters") or {})
    everywhere = {"rope_theta": said.get("rope_theta")} | (said.get("rope_scaling") or {})
    everywhere |= newer.pop("full_attention", None) or {}
    local = {"rope_theta": said.get("rope_local_base_freq")} | (newer.pop("sliding_attention", None) or {})
    if newer:
        raise ValueError(f"{archive.where} has rope_parameters for neither kind of layer: {', '.join(sorted(newer))}.")
    return rope_of(everywhere, archive, GLOBAL_BASE), rope_of(local, archive, LOCAL_BASE)


def to_hf(config: Config) -> dict[str, Any]:
    """Says a config as Gemma 3 does; what that cannot say is left out."""
    # Where a kind of layer is missing, nothing reads what stands for it.
    local = next((attention for attention in config.attention if attention.window is not None), Attention(Rope(LOCAL_BASE), 1))
    everywhere = next((attention for attention in config.attention if attention.window is None), Attention(Rope(GLOBAL_BASE)))
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        **hf_sizes(config),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": config.qkv_bias and config.out_bias,
        # transformers takes whole numbers only.
        "query_pre_attn_scalar": round((config.attention[0].scale or config.head_dim**-0.5) ** -2) or 1,
        "sliding_window": local.window,
        "layer_types": [layer_type(attention) for attention in config.attention],
        **rope_to_hf(everywhere.rope),
        "rope_local_base_freq": rope_to_hf(local.rope)["rope_theta"],
        "final_logit_softcapping": None if config.logit_softcap is None else float(config.logit_softcap),
    }


def gguf_config(archive: Archive) -> Config:
    """Reads the metadata of a GGUF file of Gemma 3's architecture."""
    said = archive.metadata
    config = gguf_sizes(archive)
    everywhere = gguf_rope(said, "gemma3", archive, config.head_dim)
    local = Rope(said.get("gemma3.rope.freq_base_swa", LOCAL_BASE))
    # The 27B model, known by its 62 layers, scales by D / N; the others by the head width.
    scale = (config.model_dim // config.num_heads if config.num_layers == 62 else config.head_dim) ** -0.5
    known = _kinds(everywhere, local, need(said, "gemma3.attention.sliding_window", archive), scale)
    kinds = _every(said.get("gemma3.attention.sliding_window_pattern", GLOBAL_EVERY), config.num_layers)
    config = dataclasses.replace(config, logit_softcap=said.get("gemma3.final_logit_softcapping"))
    return _gemma3(config, per_layer(kinds, known, config.num_layers, archive))


def _kinds(everywhere: Rope, local: Rope, window: int, scale: float) -> dict[str, Attention]:
    return {"full_attention": Attention(everywhere, None, scale), "sliding_attention": Attention(local, window, scale)}


def _every(period: int, layers: int) -> list[str]:
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]


def _gemma3(config: Config, attention: tuple[Attention, ...]) -> Config:
    return dataclasses.replace(
        config,
        attention=attention,
        activation="gelu_tanh",
        qk_norm=True,
        post_norms=True,
        embedding_scale=config.model_dim**0.5,
    )


HUGGING_FACE = {"gemma3_text": Family(hf_config, HF_GEMMA_TABLE)}
GGUF = {"gemma3": Family(gguf_config, GGUF_GEMMA_TABLE)}
