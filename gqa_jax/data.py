"""From files of text to rows of tokens: texts are cut to the length of a row, shuffled, and packed without padding.

A row holds several texts, or pieces of them, and says by `segments` which token is of which: 1, 2, ... and 0 for padding.
"""

import dataclasses
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np


class Batch(NamedTuple):
    """Rows of tokens, B T, and which text each token is of; 0 is padding. Of NumPy's arrays, or of JAX's where placed."""

    tokens: Any
    segments: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Texts:
    """The tokens of all texts, one behind the other, and where each text ends."""

    tokens: np.ndarray
    ends: np.ndarray

    @property
    def identity(self) -> dict[str, int]:
        """What tells these texts from others: how many, of how many tokens, and a checksum."""
        checksum = zlib.crc32(self.ends.tobytes(), zlib.crc32(self.tokens.tobytes()))
        return {"texts": len(self.ends), "tokens": len(self.tokens), "crc32": checksum}


def read(files: Iterable[str | Path], tokenizer: Any) -> Texts:
    """Returns the texts of files, tokenised; they stay in memory, at 4 bytes a token.

    A file is one text in UTF-8. Of a file that ends in .jsonl each line is an object, and its "text" is one.

    Args:
        files: which to read, in this order.
        tokenizer: that of the model. Each text ends with its end of text, where it has one.

    Raises:
        ValueError: no text at all, bytes that are no UTF-8, or a line that is no object with a "text".
        OSError: a file that cannot be read.
    """
    end = getattr(tokenizer, "eos_id", None)

    def ids(text: str) -> list[int]:
        found = tokenizer.encode(text)
        return found if end is None or found[-1:] == [end] else [*found, end]

    return texts_of(ids(text) for file in files for text in _texts_in(Path(file).expanduser()) if text)


def texts_of(rows: Iterable[Sequence[int] | np.ndarray]) -> Texts:
    """Returns texts that are ids already.

    >>> texts_of([[5, 7, 11], [2, 3]]).identity["tokens"]
    5

    Raises:
        ValueError: there is none.
    """
    texts = [text for text in (np.asarray(row, np.int32) for row in rows) if text.size]
    if not texts:
        raise ValueError("There are no texts in the data; give files that are not empty.")
    return Texts(np.concatenate(texts), np.cumsum([text.size for text in texts]))


def _texts_in(file: Path) -> Iterator[str]:
    try:
        whole = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} holds bytes that are no UTF-8, at {error.start}; convert it first.") from error
    if file.suffix != ".jsonl":
        yield whole
        return
    for number, line in enumerate(whole.split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f'{file}, line {number}, is no JSON object with a "text": {line[:60]!r}.') from error
        if not isinstance(text, str):
            raise ValueError(f'{file}, line {number}, has a "text" that is no string: {text!r:.60}.')
        yield text


@dataclasses.dataclass(frozen=True, eq=False)
class _Pieces:
    """Texts cut to a length, as grain reads them: by number."""

    texts: Texts
    starts: np.ndarray
    stops: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"tokens": self.texts.tokens[self.starts[index] : self.stops[index]]}


def _pieces(texts: Texts, length: int) -> _Pieces:
    begins = np.concatenate([[0], texts.ends[:-1]])
    starts = np.concatenate([np.arange(begin, end, length) for begin, end in zip(begins, texts.ends, strict=True)])
    ends = texts.ends[np.searchsorted(texts.ends, starts, side="right")]
    return _Pieces(texts, starts, np.minimum(starts + length, ends))


class Rows:
    """Batches without an end: each epoch in its own order, packed; `position` says where it is, and may be set.

    Every process draws the same rows, and places its own part of them.
    """

    def __init__(self, texts: Texts, length: int, batch: int, seed: int = 0):
        pieces = grain.MapDataset.source(_pieces(texts, length)).shuffle(seed=seed).repeat()
        self._iterator = iter(_packed(pieces, length).batch(batch))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return _batch(next(self._iterator))

    @property
    def position(self) -> dict[str, Any]:
        """Where the next batch begins, of what JSON can hold."""
        return self._iterator.get_state()

    @position.setter
    def position(self, position: dict[str, Any]) -> None:
        self._iterator.set_state(_with_tuples(position))


def once(texts: Texts, length: int, batch: int) -> Iterator[Batch]:
    """Yields all texts once, in their order, packed; what is lacking at the end is padding."""
    for found in _packed(grain.MapDataset.source(_pieces(texts, length)), length).batch(batch, drop_remainder=False):
        lacking = [(0, batch - len(found["tokens"])), (0, 0)]
        yield Batch(*(np.pad(array, lacking) for array in _batch(found)))


def _packed(pieces: grain.MapDataset, length: int) -> grain.IterDataset:
    # All is in memory: threads and reading ahead would only cost.
    one_by_one = pieces.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=1))
    return grain.experimental.ConcatThenSplitIterDataset(
        one_by_one, length_struct={"tokens": length}, split_full_length_features=False
    )


def _batch(found: dict[str, np.ndarray]) -> Batch:
    return Batch(found["tokens"], found["tokens_segment_ids"])


def _with_tuples(state: Any) -> Any:
    """Undoes what JSON does to tuples, which grain compares with its own."""
    if isinstance(state, dict):
        return {name: _with_tuples(value) for name, value in state.items()}
    return tuple(state) if isinstance(state, list) else state
