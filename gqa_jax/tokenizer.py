"""Text to token ids and back, from the metadata of a GGUF file or a folder with a `tokenizer.json`.

Byte-level BPE (GPT-2) and SentencePiece BPE (arXiv:1808.06226) both run on the `tokenizers` library.
"""

import dataclasses
import datetime
import functools
import json
import operator
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)

# What `tokenizer.ggml.pre` names: the regular expressions that cut a text before its pieces are merged, in turn.
_PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    "deepseek-v3": (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3),
}
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # a word in the vocabulary skips the merges; BOS by default
_COMPOSED = {"qwen2", "deepseek-r1-qwen", "qwen35"}  # text is brought to Unicode form NFC first

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # the values of tokenizer.ggml.token_type that matter here

_ENDS_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>"),
    *("<|endoftext|>", "<|end_of_text|>"),
)
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Encodes and decodes text and renders chats; `from_gguf` and `from_folder` make one.

    `stop_ids` are the tokens that end a text or a turn, the file's end of text first. `add_bos` and `add_eos` are what
    the file asks for. `segment_start` matches where SentencePiece would put a space that the text does not have.
    """

    backend: tokenizers.Tokenizer
    vocab_size: int
    bos_id: int | None = None
    eos_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    add_bos: bool = False
    add_eos: bool = False
    chat_template: str | None = None
    segment_start: re.Pattern | None = None

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Returns the ids of `text`; special tokens written out in it become their ids.

        BOS comes first where the file asks for it, or as `add_bos` says, and never twice where `text` begins with it.
        """
        add_bos = self.add_bos if add_bos is None else add_bos
        if add_bos and self.bos_id is None:
            raise ValueError("add_bos is True, but this tokenizer has no BOS token.")
        if self.segment_start is not None:
            text = self.segment_start.sub(r"\1 ", text)
        ids = self.backend.encode(text, add_special_tokens=False).ids
        bos = [self.bos_id] if add_bos and ids[:1] != [self.bos_id] else []
        eos = [self.eos_id] if self.add_eos and ids[-1:] != [self.eos_id] else []
        return bos + ids + eos

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """Returns the text of `ids`, without special tokens unless `keep_special`; cut-off characters become U+FFFD."""
        ids = [operator.index(token) for token in (ids.tolist() if hasattr(ids, "tolist") else ids)]
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"Token id {token} is outside the vocabulary of {self.vocab_size} tokens.")
        return self.backend.decode(ids, skip_special_tokens=not keep_special)

    def decode_stream(self, ids: Iterable[int], *, keep_special: bool = False) -> Iterator[str]:
        """Yields the text of `ids` piece by piece as they come; joined, the pieces are `decode` of all ids."""
        stream = TextStream(self, keep_special=keep_special)
        yield from filter(None, map(stream.push, ids))
        yield from filter(None, [stream.flush()])

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Returns `messages` as the text the model was trained on; each has a `role` and a `content`.

        Raises:
          ValueError: there is no chat template, it refuses these messages, or it tries to leave its sandbox.
        """
        if self.chat_template is None:
            raise ValueError("This tokenizer has no chat template; give `encode` plain text instead.")
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        texts = {name: self.backend.id_to_token(token) for name, token in ids.items() if token is not None}
        variables = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        try:
            return _compile(self.chat_template).render(**variables, **texts)
        except Exception as error:  # the template is a program from the file: it may raise anything
            raise ValueError(f"The chat template does not render these messages: {error}") from error


class TextStream:
    """Turns ids into text one by one; all that `push` returns, then `flush`, joins to `decode` of all ids.

    Text is held back while later ids could change it: a character cut off shows as U+FFFD, and a run of byte pieces
    such as `<0xF0>` decodes as a whole, so that one wrong byte spoils it all.
    """

    def __init__(self, tokenizer: Tokenizer, *, keep_special: bool = False):
        self._tokenizer = tokenizer
        self._decode = functools.partial(tokenizer.decode, keep_special=keep_special)
        self._ids: list[int] = []  # those of the last piece, kept as context, then those still held back
        self._context = 0
        self._shown = 0

    def push(self, token: int) -> str:
        """Returns the text that `token` completes, possibly none."""
        token = operator.index(token)
        self._ids.append(token)
        if _BYTE_PIECE.fullmatch(self._tokenizer.backend.id_to_token(token) or "") if token >= 0 else False:
            return ""
        text = self._decode(self._ids)
        return "" if text.endswith("\ufffd") else self._advance(text)

    def flush(self) -> str:
        """Returns the text still held back."""
        return self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        piece = text[self._shown :]
        if piece:
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._shown = len(self._decode(self._ids))
        return piece


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer that the `tokenizer.*` entries of a GGUF file describe.

    Raises:
      ValueError: the kind of tokenizer or its pre-tokenizer is unknown, or an entry is missing.
    """
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if ggml.get("model") not in builders:
        raise ValueError(f"tokenizer.ggml.model is {ggml.get('model')!r}; known are {', '.join(builders)}.")
    size = len(_column(ggml, "tokens"))
    bos, eos, eot, eom = (_token_id(ggml, f"{name}_token_id", size) for name in ("bos", "eos", "eot", "eom"))
    kinds = _column(ggml, "token_type", size) if "token_type" in ggml else [_NORMAL] * size
    kinds = [_CONTROL if token in (bos, eos, eot, eom) else kind for token, kind in enumerate(kinds)]
    backend = builders[ggml["model"]](ggml, kinds)
    bos_by_default = bos is not None and (ggml["model"] == "llama" or ggml.get("pre") in _WHOLE_WORDS)
    return Tokenizer(
        backend=backend,
        vocab_size=size,
        bos_id=bos,
        eos_id=eos,
        stop_ids=_stop_ids(backend, (eos, eot, eom)),
        add_bos=ggml.get("add_bos_token", bos_by_default),
        add_eos=ggml.get("add_eos_token", False),
        chat_template=metadata.get("tokenizer.chat_template"),
        segment_start=_segment_start(backend) if _has_space_prefix(ggml) else None,
    )


def _column(ggml: Mapping[str, Any], name: str, size: int | None = None) -> list:
    if name not in ggml:
        raise ValueError(f"The metadata has no tokenizer.ggml.{name}; this {ggml['model']!r} tokenizer needs it.")
    if size is not None and len(ggml[name]) != size:
        raise ValueError(f"tokenizer.ggml.{name} has {len(ggml[name])} entries for {size} tokens; there must be one each.")
    return ggml[name]


def _token_id(ggml: Mapping[str, Any], name: str, size: int) -> int | None:
    token = ggml.get(name)
    if token is not None and not 0 <= token < size:
        raise ValueError(f"tokenizer.ggml.{name} is {token}, outside the vocabulary of {size} tokens.")
    return token


def _byte_level(ggml: Mapping[str, Any], kinds: Sequence[int]) -> tokenizers.Tokenizer:
    pre = ggml.get("pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre is {pre!r}; known are {', '.join(_PRE_TOKENIZERS)}.")
    vocab = {token: index for index, token in enumerate(ggml["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in _column(ggml, "merges")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in _PRE_TOKENIZERS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return _add_whole_tokens(backend, ggml["tokens"], kinds)


def _sentencepiece(ggml: Mapping[str, Any], kinds: Sequence[int]) -> tokenizers.Tokenizer:
    # User-defined tokens are matched in the text itself, so their spaces are spelled as spaces.
    tokens = [
        token.replace("▁", " ") if kind == _USER_DEFINED else token
        for token, kind in zip(ggml["tokens"], kinds, strict=True)
    ]
    vocab = {token: index for index, token in enumerate(tokens)}
    scored = zip(tokens, _column(ggml, "scores", len(tokens)), kinds, strict=True)
    merges = _merges({token: score for token, score, kind in scored if kind == _NORMAL})
    unknown = tokens[_token_id(ggml, "unknown_token_id", len(tokens)) or 0]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if _has_space_prefix(ggml) else steps)
    return _add_whole_tokens(backend, tokens, kinds)


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every pair of pieces that joins to a piece, the best-scored result first: the order SentencePiece merges in."""
    ranked = sorted(scores, key=scores.__getitem__, reverse=True)
    pairs = ((piece[:cut], piece[cut:]) for piece in ranked for cut in range(1, len(piece)))
    return [(left, right) for left, right in pairs if left in scores and right in scores]


def _add_whole_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> tokenizers.Tokenizer:
    def of(*wanted: int) -> list[tokenizers.AddedToken]:
        chosen = [token for token, kind in zip(tokens, kinds, strict=True) if kind in wanted]
        return [tokenizers.AddedToken(token, normalized=False) for token in chosen]

    backend.add_special_tokens(of(_UNKNOWN, _CONTROL))
    backend.add_tokens(of(_USER_DEFINED))
    return backend


def _has_space_prefix(ggml: Mapping[str, Any]) -> bool:
    return ggml["model"] == "llama" and ggml.get("add_space_prefix", True)


def _segment_start(backend: tokenizers.Tokenizer) -> re.Pattern:
    special = "|".join(map(re.escape, sorted(_special_ids(backend), key=len, reverse=True))) or r"\Z"
    return re.compile(rf"(\A|{special})(?!\Z|{special})")


def _special_ids(backend: tokenizers.Tokenizer) -> dict[str, int]:
    return {token.content: index for index, token in backend.get_added_tokens_decoder().items() if token.special}


def _stop_ids(backend: tokenizers.Tokenizer, from_file: Iterable[int | None]) -> tuple[int, ...]:
    special = _special_ids(backend)
    if "<|return|>" in special:  # in gpt-oss `<|end|>` ends a message, and the turn goes on
        special.pop("<|end|>", None)
    ids = [*from_file, *(special.get(name) for name in _ENDS_OF_TURN)]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def from_folder(path: str | os.PathLike[str]) -> Tokenizer:
    """Returns the tokenizer of a Hugging Face model folder.

    Reads `tokenizer.json`, and where they exist `tokenizer_config.json`, `special_tokens_map.json`,
    `chat_template.jinja`, `generation_config.json` and `config.json`.

    Raises:
      ValueError: there is no `tokenizer.json`, or one of the files cannot be read.
    """
    folder = pathlib.Path(path)
    backend = _read_backend(folder)
    settings = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    model = {**_read_json(folder / "config.json"), **_read_json(folder / "generation_config.json")}
    bos, eos = (_listed(backend, settings.get(f"{name}_token"), model.get(f"{name}_token_id")) for name in ("bos", "eos"))
    first_bos, first_eos = (next(iter(ids), None) for ids in (bos, eos))
    adds_bos, adds_eos = _post_processor_adds(backend, first_bos, first_eos)
    return Tokenizer(
        backend=backend,
        vocab_size=1 + max(backend.get_vocab().values()),
        bos_id=first_bos,
        eos_id=first_eos,
        stop_ids=_stop_ids(backend, eos),
        add_bos=_first_given(settings.get("add_bos_token"), adds_bos),
        add_eos=_first_given(settings.get("add_eos_token"), adds_eos),
        chat_template=_read_chat_template(folder, settings),
    )


def _compile(template: str) -> jinja2.Template: ...
