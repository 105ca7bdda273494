"""Llama (arXiv:2302.13971, 2407.21783) and its look-alikes: SmolLM2, Mistral, Qwen2 and Qwen3.

They differ in sliding windows, biases on Q, K and V, and norms on Q and K; all of that is in `Config`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from gqa_jax.config import Attention, Config, DivisorScaling, Rope
from gqa_jax.families import Family, Source, gguf_rope, need, num_layers, per_layer, refuse, rope_of, rope_to_hf
from gqa_jax.formats import Archive

HF_LAYER = "model.layers.{layer}."
HF_TABLE = {
    "embedding": Source("model.embed_tokens.weight", "V D -> V D"),
    "norm": Source("model.norm.weight", "D -> D"),
    "head": Source("lm_head.weight", "V D -> V D"),
    "attention.norm": Source(HF_LAYER + "input_layernorm.weight", "D -> D"),
    "attention.q": Source(HF_LAYER + "self_attn.q_proj.weight", "(K G H) D -> D K G H"),
    "attention.k": Source(HF_LAYER + "self_attn.k_proj.weight", "(K H) D -> D K H"),
    "attention.v": Source(HF_LAYER + "self_attn.v_proj.weight", "(K H) D -> D K H"),
    "attention.o": Source(HF_LAYER + "self_attn.o_proj.weight", "D (K G H) -> K G H D"),
    "attention.q_bias": Source(HF_LAYER + "self_attn.q_proj.bias", "(K G H) -> K G H"),
    "attention.k_bias": Source(HF_LAYER + "self_attn.k_proj.bias", "(K H) -> K H"),
    "attention.v_bias": Source(HF_LAYER + "self_attn.v_proj.bias", "(K H) -> K H"),
    "attention.o_bias": Source(HF_LAYER + "self_attn.o_proj.bias", "D -> D"),
    "attention.q_norm": Source(HF_LAYER + "self_attn.q_norm.weight", "H -> H"),
    "attention.k_norm": Source(HF_LAYER + "self_attn.k_norm.weight", "H -> H"),
    "mlp.norm": Source(HF_LAYER + "post_attention_layernorm.weight", "D -> D"),
    "mlp.gate": Source(HF_LAYER + "mlp.gate_proj.weight", "F D -> D F"),
    "mlp.up": Source(HF_LAYER + "mlp.up_proj.weight", "F D -> D F"),
    "mlp.down": Source(HF_LAYER + "mlp.down_proj.weight", "D F -> F D"),
    "mlp.gate_bias": Source(HF_LAYER + "mlp.gate_proj.bias", "F -> F"),
    "mlp.up_bias": Source(HF_LAYER + "mlp.up_proj.bias", "F -> F"),
    "mlp.down_bias": Source(HF_LAYER + "mlp.down_proj.bias", "D -> D"),
}

BLOCK = "blk.{layer}."
GGUF_TABLE = {
    "embedding": Source("token_embd.weight", "V D -> V D"),
    "norm": Source("output_norm.weight", "D -> D"),
    "head": Source("output.weight", "V D -> V D"),
    "attention.norm": Source(BLOCK + "attn_norm.weight", "D -> D"),
    "attention.q": Source(BLOCK + "attn_q.weight", "(K G H) D -> D K G H"),
    "attention.k": Source(BLOCK + "attn_k.weight", "(K H) D -> D K H"),
    "attention.v": Source(BLOCK + "attn_v.weight", "(K H) D -> D K H"),
    "attention.o": Source(BLOCK + "attn_output.weight", "D (K G H) -> K G H D"),
    "attention.q_bias": Source(BLOCK + "attn_q.bias", "(K G H) -> K G H"),
    "attention.k_bias": Source(BLOCK + "attn_k.bias", "(K H) -> K H"),
    "attention.v_bias": Source(BLOCK + "attn_v.bias", "(K H) -> K H"),
    "attention.o_bias": Source(BLOCK + "attn_output.bias", "D -> D"),
    "attention.q_norm": Source(BLOCK + "attn_q_norm.weight", "H -> H"),
    "attention.k_norm": Source(BLOCK + "attn_k_norm.weight", "H -> H"),
    "mlp.norm": Source(BLOCK + "ffn_norm.weight", "D -> D"),
    "mlp.gate": Source(BLOCK + "ffn_gate.weight", "F D -> D F"),
    "mlp.up": Source(BLOCK + "ffn_up.weight", "F D -> D F"),
    "mlp.down": Source(BLOCK + "ffn_down.weight", "D F -> F D"),
}

# llama.cpp keeps the lanes of a rotary pair side by side in the rows of Q and K; we keep them half a head apart.
INTERLEAVED = {
    "attention.q": Source(BLOCK + "attn_q.weight", "(K G half two) D -> D K G (two half)"),
    "attention.k": Source(BLOCK + "attn_k.weight", "(K half two) D -> D K (two half)"),
    "attention.q_bias": Source(BLOCK + "attn_q.bias", "(K G half two) -> K G (two half)"),
    "attention.k_bias": Source(BLOCK + "attn_k.bias", "(K half two) -> K (two half)"),
}


def hf_config(archive: Archive) -> Config:
    """Reads config.json of a Llama, Mistral, Qwen2 or Qwen3."""
    said, kind = archive.metadata, archive.metadata["model_type"]
    refuse(said, archive, {"hidden_act": ("silu", "swish")})
    heads, width = need(said, "num_attention_heads", archive), need(said, "hidden_size", archive)
    layers = num_layers(said, "num_hidden_layers", archive)
    bias = bool(said.get("attention_bias", False))
    return Config(
        vocab_size=need(said, "vocab_size", archive),
        num_layers=layers,
        model_dim=width,
        mlp_dim=need(said, "intermediate_size", archive),
        num_heads=heads,
        num_kv_heads=said.get("num_key_value_heads") or heads,
        head_dim=said.get("head_dim") or width // heads,
        context_length=need(said, "max_position_embeddings", archive),
        attention=_windows(said, kind, layers, hf_rope(said, archive), archive),
        norm_eps=said.get("rms_norm_eps", 1e-6),
        qk_norm=kind == "qwen3",
        qkv_bias=bias or kind == "qwen2",
        out_bias=bias,
        mlp_bias=bool(said.get("mlp_bias", False)),
        tied_head=bool(said.get("tie_word_embeddings", False)),
    )


def hf_rope(said: Mapping[str, Any], archive: Archive) -> Rope:
    """Reads the rotary fields that stand at the top level, in `rope_scaling` (older) or in `rope_parameters` (newer)."""
    top = {key: said[key] for key in ("rope_theta", "partial_rotary_factor") if key in said}
    return rope_of(top | (said.get("rope_scaling") or {}) | (said.get("rope_parameters") or {}), archive)


def _windows(said: Mapping[str, Any], kind: str, layers: int, rope: Rope, archive: Archive) -> tuple[Attention, ...]:
    """Mistral slides in every layer; Qwen only if told to, then in the layers that it lists or from one layer on."""
    slides = kind == "mistral" or (kind.startswith("qwen") and said.get("use_sliding_window", False))
    # 4096 tokens and 28 layers are what Hugging Face takes where the file is silent.
    window = said.get("sliding_window", 4096) if slides else None
    if window is None:
        return (Attention(rope),)
    full = 0 if kind == "mistral" else min(said.get("max_window_layers", 28), layers)
    kinds = said.get("layer_types") or ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    known = {"full_attention": Attention(rope), "sliding_attention": Attention(rope, window)}
    return per_layer(kinds, known, layers, archive)


def to_hf(config: Config) -> dict[str, Any]:
    """Says a config as the nearest of Llama, Mistral, Qwen2 and Qwen3 does; what that one cannot say is left out."""
    said = hf_sizes(config) | {"hidden_act": "silu"} | rope_to_hf(config.attention[0].rope)
    windows = [attention.window for attention in config.attention]
    window = next(filter(None, windows), None)
    biases = {"attention_bias": config.qkv_bias and config.out_bias}
    if not config.qk_norm and (config.out_bias or not config.qkv_bias):
        if window is not None:
            return {"model_type": "mistral", "architectures": ["MistralForCausalLM"]} | said | {"sliding_window": window}
        biases["mlp_bias"] = config.mlp_bias
        return {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | said | biases
    slides = {"use_sliding_window": window is not None, "sliding_window": window}
    if window is not None:
        slides["layer_types"] = [layer_type(attention) for attention in config.attention]
    if config.qk_norm:
        return {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]} | said | biases | slides
    return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]} | said | slides


def hf_sizes(config: Config) -> dict[str, Any]:
    """Says what all families of Hugging Face say in the same words."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": float(config.norm_eps),
        "tie_word_embeddings": config.tied_head,
    }


def layer_type(attention: Attention) -> str:
    """Returns what `layer_types` calls a layer."""
    return "full_attention" if attention.window is None else "sliding_attention"


def gguf_config(archive: Archive) -> Config:
    """Reads the metadata of a GGUF file of Llama's, Qwen2's or Qwen3's architecture."""
    said, kind, tensors = archive.metadata, archive.metadata["general.architecture"], archive.tensors
    config = gguf_sizes(archive)
    rope = gguf_rope(said, kind, archive, config.head_dim)
    if "rope_freqs.weight" in tensors:
        if rope.scaling is not None:
            raise ValueError(f"{archive.where} scales rotary frequencies twice: {rope.scaling} and rope_freqs.weight.")
        divisors = tuple(tensors["rope_freqs.weight"].read().tolist())
        if len(divisors) != config.head_dim // 2:
            raise ValueError(
                f"{archive.where} has {len(divisors)} rope_freqs.weight for {config.head_dim // 2} pairs of lanes."
            )
        rope = dataclasses.replace(rope, scaling=DivisorScaling(divisors))
    return dataclasses.replace(
        config,
        attention=(Attention(rope, said.get(f"{kind}.attention.sliding_window") or None),),
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
    )


def gguf_sizes(archive: Archive) -> Config:
    """Reads what GGUF files of every family say in the same words; head width falls back to D / N as llama.cpp's does."""
    said, kind = archive.metadata, archive.metadata["general.architecture"]
    heads, width = need(said, f"{kind}.attention.head_count", archive), need(said, f"{kind}.embedding_length", archive)
    if "token_embd.weight" not in archive.tensors:
        raise ValueError(f"{archive.where} has no tensor token_embd.weight.")
    return Config(
        vocab_size=archive.tensors["token_embd.weight"].shape[0],
        num_layers=num_layers(said, f"{kind}.block_count", archive),
        model_dim=width,
        mlp_dim=need(said, f"{kind}.feed_forward_length", archive),
        num_heads=heads,
        num_kv_heads=said.get(f"{kind}.attention.head_count_kv", heads),
        head_dim=said.get(f"{kind}.attention.key_length", width // heads),
        context_length=need(said, f"{kind}.context_length", archive),
        norm_eps=need(said, f"{kind}.attention.layer_norm_rms_epsilon", archive),
        tied_head="output.weight" not in archive.tensors,
    )


_hf = Family(hf_config, HF_TABLE)
_gguf = Family(gguf_config, GGUF_TABLE)
HUGGING_FACE = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _hf)
GGUF = {"llama": Family(gguf_config, GGUF_TABLE | INTERLEAVED, ("rope_freqs.weight",)), "qwen2": _gguf, "qwen3": _gguf}
