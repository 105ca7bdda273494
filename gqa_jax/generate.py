"""Text from a model: prompts are read in chunks, then one jitted loop writes.

>>> import gqa_jax
>>> tiny = gqa_jax.Config(vocab_size=11, num_layers=1, model_dim=8, mlp_dim=12, num_heads=4, num_kv_heads=2, head_dim=4,
...                       context_length=32)
>>> model = gqa_jax.Model(tiny, gqa_jax.init_params(tiny, jax.random.key(0)))
>>> generation = generate(model, [[1, 2, 3], [4]], max_new_tokens=5)
>>> [len(ids) for ids in generation.ids], generation.stop_reason
([5, 5], ['length', 'length'])
"""

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from gqa_jax import cache as kv
from gqa_jax import decoder, loop
from gqa_jax.cache import KVCache
from gqa_jax.loop import State, Transcript
from gqa_jax.request import Model, Prompt, ids_of, memory_for, stop_ids, whole
from gqa_jax.sampling import PerRow, Sampling, sampling
from gqa_jax.sharding import to_host, zeros

PROMPT_CHUNK = 512
PROMPT_TAIL = 32
STREAM_STEPS = 4

# What each step that has been compiled takes, since XLA needs a tenth of a second to say it again.
_temporary_bytes: dict[Any, int] = {}

Reason = Literal["stop", "length"]
Progress = Callable[[str, int, int], None]


class Stats(NamedTuple):
    """What a call to `generate` cost; compilation is apart from the two times of running.

    `cache_bytes` count each KV head once, however many devices hold it. `temporary_bytes` is the most that a compiled step
    takes on a device beside the weights, the cache and its results.
    """

    prompt_tokens: int
    new_tokens: int
    compile_seconds: float
    prompt_seconds: float
    decode_seconds: float
    cache_bytes: int
    cache_bytes_per_device: int
    devices: int
    temporary_bytes: int


class Generation(NamedTuple):
    """What `generate` returns, with one entry for each prompt.

    `ids` are the new tokens with the stop token, where there is one; `text` is what they say without it (empty where the
    model has no tokenizer). `cache` holds prompts and new tokens, all of them, and goes on as the `cache` of the next call;
    it is None where none was used.
    """

    text: list[str]
    ids: list[list[int]]
    stop_reason: list[Reason]
    cache: KVCache | None
    stats: Stats


class Piece(str):
    """Some new text, and the `row` of the prompt that it continues."""

    row: int

    def __new__(cls, text: str, row: int) -> "Piece":
        """Makes a string that knows its row."""
        piece = super().__new__(cls, text)
        piece.row = row
        return piece


class Stream:
    """Yields `Piece`s of text as they come; `generation` is there when they have ended."""

    def __init__(self, run: "_Run"):
        self._run = run
        self._pieces: Generator[Piece] = run.pieces()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def generation(self) -> Generation:
        """What has been generated; it ends the stream, whose cache would otherwise go on without you."""
        self._pieces.close()
        return self._run.generation()


@overload
def generate(model: Model, prompts: Prompt | Sequence[Prompt], *, stream: Literal[False] = False, **how: Any) -> Generation: ...
@overload
def generate(model: Model, prompts: Prompt | Sequence[Prompt], *, stream: Literal[True], **how: Any) -> Stream: ...
def generate(  # pyright: ignore[reportInconsistentOverload]
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    temperature: PerRow = 0.0,
    top_k: int | None = None,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
    repetition_penalty: PerRow = 1.0,
    seed: int = 0,
    stop: int | Iterable[int | np.integer] | Array | None = None,
    stream: bool = False,
    use_cache: bool = True,
    cache: KVCache | None = None,
    capacity: int | None = None,
    cache_dtype: DTypeLike | None = None,
    progress: Progress | None = None,
) -> Generation | Stream:
    """Continues each prompt by up to `max_new_tokens` tokens; each row stops on its own.

    Args:
        model: what `gqa_jax.load` returns.
        prompts: a string, a list of ids, or a list of such; they may differ in length.
        max_new_tokens: how many tokens each row may gain, a stop token included.
        temperature: divides the logits; 0 takes the likeliest token. Like the three probabilities it may differ by row.
        top_k: keeps so many of the likeliest tokens; None keeps all.
        top_p: keeps the likeliest tokens that together hold so much probability.
        min_p: keeps tokens at least so many times as likely as the likeliest.
        repetition_penalty: makes tokens that have occurred, in this call's prompt too, less likely.
        seed: the same seed gives the same text; what a row draws depends on its place, not on the other rows.
        stop: ids that end a row; None takes the model's own, () none.
        stream: returns a `Stream`, which yields the text in pieces as it comes.
        use_cache: False computes everything anew for every token, for comparison.
        cache: goes on from the cache of an earlier `Generation`, which is consumed; prompts hold only what is new.
        capacity: room for so many tokens in each row; None takes what is needed, rounded up.
        cache_dtype: float32, bfloat16 or float16; None takes the dtype of the weights.
        progress: is told (what, done, total) while compiling.

    Raises:
        ValueError: an empty prompt, ids beyond the vocabulary, more tokens than the model's context or the cache has room
            for, or a number outside its range.
    """
    max_new_tokens = whole("max_new_tokens", max_new_tokens, 1)
    seed = whole("seed", seed, 0, 2**32 - 1)
    capacity = None if capacity is None else whole("capacity", capacity, 1)
    top_k = None if top_k is None else whole("top_k", top_k, 1)
    ids = ids_of(model, prompts, cache)
    how = sampling(
        len(ids), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    stops = stop_ids(model, stop)
    if stream and model.tokenizer is None:
        raise ValueError("The model has no tokenizer, so there is no text to stream.")
    memory = memory_for(model, ids, max_new_tokens, use_cache, cache, capacity, cache_dtype)
    run = _Run(model, ids, max_new_tokens, how, stops, seed, progress)
    if stream:
        return Stream(run.read(memory))
    return run.read(memory).write(max_new_tokens).generation()


class _Run:
    """One call to `generate`, from checked arguments to the result."""

    state: State

    def __init__(
        self,
        model: Model,
        ids: list[list[int]],
        max_new_tokens: int,
        how: Sampling,
        stops: tuple[int, ...],
        seed: int,
        progress: Progress | None,
    ):
        self.model, self.prompts, self.max_new_tokens = model, ids, max_new_tokens
        # Plain sharding rules for the loop, whatever the axis types of the user's mesh; no array moves.
        self.placement = None if model.placement is None else model.placement.auto()
        self.params = decoder.with_placement(model.params, self.placement)
        self.how = jax.tree.map(partial(self._put, letters="B"), how)
        self.stops, self.seed = np.asarray(stops, np.int32), np.uint32(seed)
        self.progress = progress or (lambda what, done, total: None)
        self.seconds = {"compile": 0.0, "prompt": 0.0, "decode": 0.0}
        self.temporary_bytes = 0

    def _put(self, array: Any, letters: str) -> Array:
        return jnp.asarray(array) if self.placement is None else self.placement.put(array, letters)

    def read(self, memory: KVCache | Transcript) -> "_Run":
        """Reads the prompts."""
        if isinstance(memory, KVCache):
            memory = kv.with_placement(memory, self.placement)
        batch, vocabulary, where = len(self.prompts), self.model.config.vocab_size, self.placement
        # What is cut unevenly stays whole.
        scores = "B V" if where is None or where.padded("V", vocabulary) == vocabulary else "B D"
        logits = zeros((batch, vocabulary), jnp.float32, scores, where)
        for tokens, count in _chunks(self.prompts, memory):
            logits, memory = self._call("prompt", loop.extend, self._put(tokens, "B T"), self._put(count, "B"), logits, memory)
        # Few different lengths, so that another max_new_tokens seldom compiles anew.
        room = 1 << max(6, (self.max_new_tokens - 1).bit_length())
        self.state = State(
            memory=memory,
            logits=logits,
            tokens=zeros((batch, room), jnp.int32, "B T", where),
            drawn=zeros((batch,), jnp.int32, "B", where),
            stopped=zeros((batch,), jnp.bool_, "B", where),
            seen=self._put(_seen(self.prompts, vocabulary), scores) if self.how.penalises else None,
            step=zeros((), jnp.int32, "", where),
        )
        return self

    def write(self, until: int) -> "_Run":
        """Draws tokens until each row has stopped or gained `until`."""
        arguments = (self.how, self.seed, self.stops, np.int32(until), self.state)
        self.state = self._call("decode", loop.decode, *arguments)
        return self

    def _call(self, what: str, step: Any, *arguments: Any) -> Any:
        """Runs a jitted step, with compilation timed apart from it, whatever mesh the user has set."""
        mesh: Any = None if self.placement is None else self.placement.mesh
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            return self._timed(what, step, *arguments)

    def _timed(self, what: str, step: Any, *arguments: Any) -> Any:
        start = time.perf_counter()
        leaves, tree = jax.tree.flatten((self.params, arguments))
        kinds = ((leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)) for leaf in leaves)
        key = (what, self.model.config, tree, *kinds)
        if key not in _temporary_bytes:
            self.progress(f"compiling {what}", 0, 1)
            memory = step.lower(self.params, *arguments, config=self.model.config).compile().memory_analysis()
            _temporary_bytes[key] = 0 if memory is None else memory.temp_size_in_bytes
            self.progress(f"compiling {what}", 1, 1)
        self.temporary_bytes = max(self.temporary_bytes, _temporary_bytes[key])
        ready = time.perf_counter()
        result = jax.block_until_ready(step(self.params, *arguments, config=self.model.config))
        self.seconds["compile"] += ready - start
        self.seconds[what] += time.perf_counter() - ready
        return result

    def pieces(self) -> Generator[Piece]:
        """Decodes a few steps at a time and yields what each row has gained."""
        rows = [self._voice(row) for row in range(len(self.prompts))]
        told = [0] * len(rows)
        for until in range(STREAM_STEPS, self.max_new_tokens + STREAM_STEPS, STREAM_STEPS):
            self.write(min(until, self.max_new_tokens))
            ids, reasons = self._drawn()
            for row, voice in enumerate(rows):
                said = self._said(ids[row], reasons[row])
                if new := "".join(voice.push(id) for id in said[told[row] :]):
                    yield Piece(new, row)
                told[row] = len(said)
            if all(reason == "stop" for reason in reasons):
                break
        for row, voice in enumerate(rows):
            if rest := voice.flush():
                yield Piece(rest, row)

    def _drawn(self) -> tuple[list[list[int]], list[Reason]]:
        tokens, drawn, stopped = (to_host(x) for x in (self.state.tokens, self.state.drawn, self.state.stopped))
        ids = [row[:count].tolist() for row, count in zip(tokens, drawn, strict=True)]
        return ids, ["stop" if ended else "length" for ended in stopped]

    def _voice(self, row: int) -> Any:
        """Returns what turns the new ids of a row into text: behind its prompt, whose last character they may complete."""
        codec = self.model.tokenizer
        voice = codec.stream()
        tail = [id for id in self.prompts[row][-PROMPT_TAIL:] if id < codec.vocab_size]
        for id in tail:
            voice.push(id)
        if not codec.decode(tail).endswith("\ufffd"):
            voice.flush()  # Held back, but whole: it belongs to the prompt.
        return voice

    def _text(self, row: int, said: list[int]) -> str:
        if self.model.tokenizer is None:
            return ""
        voice = self._voice(row)
        return "".join([*(voice.push(id) for id in said), voice.flush()])

    def _said(self, ids: list[int], reason: Reason) -> list[int]:
        """Leaves out the stop token, and ids that only pad the model's vocabulary and have no text."""
        spoken = ids[:-1] if reason == "stop" else ids
        codec = self.model.tokenizer
        return spoken if codec is None else [id for id in spoken if id < codec.vocab_size]

    def generation(self) -> Generation:
        """Brings the result to the host."""
        ids, reasons = self._drawn()
        memory = self.state.memory
        said = [self._said(row, reason) for row, reason in zip(ids, reasons, strict=True)]
        cache = kv.with_placement(memory, self.model.placement) if isinstance(memory, KVCache) else None
        stats = Stats(
            prompt_tokens=sum(len(prompt) for prompt in self.prompts),
            new_tokens=sum(len(row) for row in ids),
            **{f"{what}_seconds": spent for what, spent in self.seconds.items()},
            cache_bytes=0 if cache is None else cache.nbytes,
            cache_bytes_per_device=0 if cache is None else cache.nbytes_per_device,
            devices=1 if self.placement is None else self.placement.mesh.size,
            temporary_bytes=self.temporary_bytes,
        )
        return Generation([self._text(row, ids) for row, ids in enumerate(said)], ids, reasons, cache, stats)


def _seen(prompts: list[list[int]], vocabulary: int) -> np.ndarray:
    seen = np.zeros((len(prompts), vocabulary), bool)
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = True
    return seen


def _chunks(prompts: list[list[int]], memory: KVCache | Transcript) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields right-padded pieces of the prompts, in few different lengths, and how many tokens of each row are real."""
    lengths = np.array([len(prompt) for prompt in prompts])
    longest = int(lengths.max())
    step = PROMPT_CHUNK if isinstance(memory, KVCache) else longest
    for start in range(0, longest, step):
        size = min(step, longest - start)
        padded = min(1 << max(4, (size - 1).bit_length()), step)
        tokens = np.zeros((len(prompts), padded), np.int32)
        for row, prompt in enumerate(prompts):
            piece = prompt[start : start + padded]
            tokens[row, : len(piece)] = piece
        yield tokens, np.clip(lengths - start, 0, padded).astype(np.int32)
