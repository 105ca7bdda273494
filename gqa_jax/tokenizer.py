"""Text to token ids and back, from the metadata of a GGUF file or a folder with a `tokenizer.json`.

Byte-level BPE (GPT-2) and SentencePiece BPE (arXiv:1808.06226) both run on the `tokenizers` library.
"""

import dataclasses
import datetime
import functools
import json
import logging
import operator
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, SupportsIndex

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_SMALL = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_LARGE = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_TEKKEN = f"{_SMALL}|{_LARGE}" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_GPT4O = f"{_SMALL}{_ENDINGS}?|{_LARGE}{_ENDINGS}?" + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_ASCII_MARK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = _ASCII_MARK + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES

# What `tokenizer.ggml.pre` names: the patterns that cut a text, in turn, into the words that BPE works on.
_PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    "deepseek-v3": (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3),
}
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # words in the vocabulary skip the merges; BOS by default
_COMPOSED = {"qwen2", "deepseek-r1-qwen", "qwen35"}  # text is brought to Unicode's form NFC first

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type; 5 is unused, 6 a byte

_ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>")
_ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")

_log = logging.getLogger("gqa_jax")


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Encodes and decodes text and renders chats; `from_gguf` and `from_folder` make one.

    `stop_ids` end a text or a turn, the file's own end of text first. `add_bos` and `add_eos` are what the file asks
    for. `segment_start` matches where SentencePiece puts a space that the text does not have.
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

        BOS comes first where the file asks for it, or as `add_bos` says, and not again where `text` begins with it.
        """
        if not isinstance(text, str):
            raise TypeError(f"The text is {text!r}; it must be a string.")
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValueError(f"The text {text[:40]!r} holds bytes that are no UTF-8.")
        add_bos = self.add_bos if add_bos is None else add_bos
        if add_bos and self.bos_id is None:
            raise ValueError("add_bos is True, but the tokenizer has no BOS token.")
        if self.segment_start is not None:
            text = self.segment_start.sub(r"\1 ", text)
        ids = self.backend.encode(text, add_special_tokens=False).ids
        bos, eos = self.bos_id if add_bos else None, self.eos_id if self.add_eos else None
        before = [] if bos is None or ids[:1] == [bos] else [bos]
        after = [] if eos is None or ids[-1:] == [eos] else [eos]
        return before + ids + after

    def decode(self, ids: Iterable[SupportsIndex], *, keep_special: bool = False) -> str:
        """Returns the text of `ids`; special tokens are dropped unless `keep_special`, broken UTF-8 shows as U+FFFD."""
        checked = [_checked(token, self.vocab_size) for token in ids]
        return self.backend.decode(checked, skip_special_tokens=not keep_special)

    def stream(self, *, keep_special: bool = False) -> "TextStream":
        """Returns a stream that decodes ids one by one, as they come."""
        return TextStream(self, keep_special=keep_special)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Returns `messages`, each with a `role` and a `content`, as the text the model was trained on.

        Raises:
          ValueError: there is no chat template, it refuses the messages, or it reaches out of its sandbox.
        """
        if self.chat_template is None:
            raise ValueError("The tokenizer has no chat template; give `encode` plain text instead.")
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        variables = {name: self.backend.id_to_token(token) for name, token in ids.items() if token is not None}
        variables |= {"add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        try:
            return _compile(self.chat_template).render(messages=messages, **variables)
        except Exception as error:  # the template is a program out of the file and may raise anything
            raise ValueError(f"The chat template does not render these messages: {error}") from error


class TextStream:
    """Turns ids into text one by one; what `push` returns, and `flush` at the end, joins to `decode` of all ids.

    Text is held back while later ids could change it: a character cut short shows as U+FFFD, and a run of byte pieces
    such as `<0xF0>` is decoded as a whole, so that one wrong byte spoils all of it.
    """

    def __init__(self, tokenizer: Tokenizer, *, keep_special: bool = False):
        self._tokenizer = tokenizer
        self._decode = functools.partial(tokenizer.decode, keep_special=keep_special)
        self._dropped = set() if keep_special else set(_special_ids(tokenizer.backend).values())
        self._ids: list[int] = []  # first those of the last piece, for context, then those held back
        self._context = 0
        self._shown = 0

    def push(self, token: SupportsIndex) -> str:
        """Returns the text that `token` completes, often none."""
        index = _checked(token, self._tokenizer.vocab_size)
        if index in self._dropped:
            return ""
        self._ids.append(index)
        if _BYTE_PIECE.fullmatch(self._tokenizer.backend.id_to_token(index) or ""):
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


def _checked(token: SupportsIndex, vocab_size: int) -> int:
    index = operator.index(token)
    if not 0 <= index < vocab_size:
        raise ValueError(f"Token id {index} is outside the vocabulary of {vocab_size} tokens.")
    return index


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer that the `tokenizer.*` entries of a GGUF file describe.

    Raises:
      ValueError: the kind of tokenizer or its pre-tokenizer is unknown, or an entry is missing or does not fit.
    """
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if ggml.get("model") not in builders:
        raise ValueError(f"tokenizer.ggml.model is {ggml.get('model')!r}; known are {', '.join(builders)}.")
    size = len(_column(ggml, "tokens"))
    bos, eos, eot, eom = (_token_id(ggml, name) for name in ("bos", "eos", "eot", "eom"))
    kinds = _column(ggml, "token_type", size) if "token_type" in ggml else [_NORMAL] * size
    kinds = [_CONTROL if token in (bos, eos, eot, eom) else kind for token, kind in enumerate(kinds)]
    backend = builders[ggml["model"]](ggml, kinds)
    bos_by_default = ggml["model"] == "llama" or ggml.get("pre") in _WHOLE_WORDS
    return Tokenizer(
        backend=backend,
        vocab_size=size,
        bos_id=bos,
        eos_id=eos,
        stop_ids=_stop_ids(backend, [eos, eot, eom]),
        add_bos=bos is not None and ggml.get("add_bos_token", bos_by_default),
        add_eos=eos is not None and ggml.get("add_eos_token", False),
        chat_template=metadata.get("tokenizer.chat_template"),
        segment_start=_segment_start(backend) if ggml["model"] == "llama" and ggml.get("add_space_prefix", True) else None,
    )


def _column(ggml: Mapping[str, Any], name: str, size: int | None = None) -> Sequence[Any]:
    if name not in ggml:
        raise ValueError(f"The metadata has no tokenizer.ggml.{name}, which model {ggml['model']!r} needs.")
    if size is not None and len(ggml[name]) != size:
        raise ValueError(f"tokenizer.ggml.{name} has {len(ggml[name])} entries for {size} tokens; it needs one each.")
    return ggml[name]


def _token_id(ggml: Mapping[str, Any], name: str) -> int | None:
    token = ggml.get(f"{name}_token_id")
    return None if token is None else _checked(token, len(ggml["tokens"]))


def _byte_level(ggml: Mapping[str, Any], kinds: Sequence[int]) -> tokenizers.Tokenizer:
    pre = ggml.get("pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre is {pre!r}; known are {', '.join(_PRE_TOKENIZERS)}.")
    vocab = {token: index for index, token in enumerate(ggml["tokens"])}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _column(ggml, "merges"))]
    backend = _backend(vocab, merges, ignore_merges=pre in _WHOLE_WORDS)
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in _PRE_TOKENIZERS[pre]]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, as_bytes])
    backend.decoder = decoders.ByteLevel()
    return _with_whole_tokens(backend, ggml["tokens"], kinds)


def _sentencepiece(ggml: Mapping[str, Any], kinds: Sequence[int]) -> tokenizers.Tokenizer:
    pieces = zip(ggml["tokens"], kinds, strict=True)
    # User-defined tokens are found in the text as it is written, so their spaces must be spaces.
    tokens = [token.replace("▁", " ") if kind == _USER_DEFINED else token for token, kind in pieces]
    vocab = {token: index for index, token in enumerate(tokens)}
    scored = zip(tokens, _column(ggml, "scores", len(tokens)), kinds, strict=True)
    merges = _merges({token: score for token, score, kind in scored if kind == _NORMAL})
    unknown = tokens[_token_id(ggml, "unknown") or 0]
    backend = _backend(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if ggml.get("add_space_prefix", True):
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return _with_whole_tokens(backend, tokens, kinds)


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    # Every pair of pieces that joins to a piece, the best result first: the order in which SentencePiece merges.
    ranked = sorted(scores, key=scores.__getitem__, reverse=True)
    pairs = ((piece[:cut], piece[cut:]) for piece in ranked for cut in range(1, len(piece)))
    return [(left, right) for left, right in pairs if left in scores and right in scores]


def _backend(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab, merges, **options))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ValueError(f"The merges do not fit the vocabulary: {error}") from error


def _with_whole_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> tokenizers.Tokenizer:
    whole: dict[int, list] = {_UNKNOWN: [], _CONTROL: [], _USER_DEFINED: []}
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in whole:
            whole[kind].append(tokenizers.AddedToken(token, normalized=False))
    backend.add_special_tokens(whole[_UNKNOWN] + whole[_CONTROL])
    backend.add_tokens(whole[_USER_DEFINED])
    return backend


def _segment_start(backend: tokenizers.Tokenizer) -> re.Pattern:
    special = "|".join(map(re.escape, sorted(_special_ids(backend), key=len, reverse=True))) or r"\Z"
    return re.compile(rf"(\A|{special})(?!\Z|{special})")


def _special_ids(backend: tokenizers.Tokenizer) -> dict[str, int]:
    return {token.content: index for index, token in backend.get_added_tokens_decoder().items() if token.special}


def _stop_ids(backend: tokenizers.Tokenizer, from_file: Iterable[int | None]) -> tuple[int, ...]:
    special = _special_ids(backend)
    if "<|return|>" in special:  # gpt-oss, where `<|end|>` ends a message and the turn goes on
        special.pop("<|end|>", None)
    ids = [*from_file, *(special.get(end) for end in _ENDS_OF_TURN + _ENDS_OF_TEXT)]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def from_folder(path: str | os.PathLike[str]) -> Tokenizer:
    """Returns the tokenizer of a folder in Hugging Face's layout.

    Reads `tokenizer.json` and, where they exist, `tokenizer_config.json`, `special_tokens_map.json`, `config.json`,
    `generation_config.json` and `chat_template.jinja`.

    Raises:
      ValueError: there is no `tokenizer.json`, or one of the files is broken.
    """
    folder = pathlib.Path(path)
    backend = _read_backend(folder / "tokenizer.json")
    settings = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    model = _read_json(folder / "config.json") | _read_json(folder / "generation_config.json")
    bos_ids, eos_ids = (_named_ids(backend, name, settings, model) for name in ("bos", "eos"))
    bos, eos = (next(iter(ids), None) for ids in (bos_ids, eos_ids))
    around = backend.encode("", add_special_tokens=True).ids  # what the post-processor puts around a text
    starts = around[:1] == [bos]
    return Tokenizer(
        backend=backend,
        vocab_size=max(backend.get_vocab().values()) + 1,
        bos_id=bos,
        eos_id=eos,
        stop_ids=_stop_ids(backend, eos_ids),
        add_bos=bos is not None and settings.get("add_bos_token", starts),
        add_eos=eos is not None and settings.get("add_eos_token", around[starts:][-1:] == [eos]),
        chat_template=_read_chat_template(folder, settings),
    )


def of_bytes() -> Tokenizer:
    """Returns a tokenizer for models that have none of their own: 256 bytes, and an end of text.

    >>> of_bytes().decode(of_bytes().encode("naïve"))
    'naïve'
    """
    end = _ENDS_OF_TEXT[0]
    vocab = {letter: byte for byte, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(end, normalized=False)])
    return Tokenizer(backend, len(vocab) + 1, eos_id=len(vocab), stop_ids=(len(vocab),))


def _read_backend(file: pathlib.Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise ValueError(f"{file.parent} has no tokenizer.json; that file is needed, a tokenizer.model alone is not read.")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ValueError(f"{file} is not a tokenizer that the tokenizers library can read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    return {name: value for name, value in entries.items() if value is not None}


def _named_ids(backend: tokenizers.Tokenizer, name: str, settings: Mapping[str, Any], model: Mapping[str, Any]) -> list[int]:
    token, listed = settings.get(f"{name}_token"), model.get(f"{name}_token_id")
    text = token["content"] if isinstance(token, Mapping) else token
    named = None if text is None else backend.token_to_id(text)
    if named is not None and text not in _special_ids(backend):
        backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False)])
    ids = [named, *(listed if isinstance(listed, list) else [listed])]
    return [index for index in ids if index is not None]


def _read_chat_template(folder: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template


def to_folder(tokenizer: Tokenizer, path: str | os.PathLike[str]) -> None:
    """Writes what `from_folder` and transformers make the same tokenizer from: `tokenizer.json` and what goes with it.

    The space that `segment_start` puts comes out of `tokenizer.json` then, and there also behind tokens that are whole but
    not special; a warning of the logger "gqa_jax" says so where there are any.
    """
    folder = pathlib.Path(path)
    _portable(tokenizer).save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.add_bos,
        "add_eos_token": tokenizer.add_eos,
        **{name: None if token is None else tokenizer.backend.id_to_token(token) for name, token in tokens.items()},
        "chat_template": tokenizer.chat_template,
    }
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.stop_ids) or None}
    for name, entries in (("tokenizer_config.json", settings), ("generation_config.json", ids)):
        held = {key: value for key, value in entries.items() if value is not None}
        (folder / name).write_text(json.dumps(held, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _portable(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Returns a backend that does by itself what `Tokenizer.encode` does around it."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    if tokenizer.segment_start is not None:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        if whole := [token.content for token in backend.get_added_tokens_decoder().values() if not token.special]:
            _log.warning("The saved tokenizer puts a space behind %s, ..., where this one puts none.", whole[:3])

    def added(token: int | None, wanted: bool) -> list[tuple[str, int]]:
        name = None if token is None else backend.id_to_token(token)
        return [(name, token)] if wanted and token is not None and name is not None else []

    before, after = added(tokenizer.bos_id, tokenizer.add_bos), added(tokenizer.eos_id, tokenizer.add_eos)
    if backend.encode("", add_special_tokens=True).ids != [token for _, token in before + after]:
        single = [*(name for name, _ in before), "$A", *(name for name, _ in after)]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=before + after)
    return backend


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    extensions = [jinja2.ext.loopcontrols, _Generation]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # jinja2's own escapes HTML
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
    return environment.from_string(template)


class _Generation(jinja2.ext.Extension):
    """Renders what stands between the tags `generation` and `endgeneration`, which mark answers for training."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str):
    raise jinja2.TemplateError(message)
