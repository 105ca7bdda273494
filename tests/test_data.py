"""Texts become rows: every token once in an epoch, each text told from its neighbours, and a place that can be found again."""

import itertools
import json

import numpy as np
import pytest

from gqa_jax import data
from gqa_jax.tokenizer import of_bytes

LENGTH = 7


def texts(sizes=(3, 11, 1, 7, 20, 2)) -> data.Texts:
    """Texts whose every token is another one."""
    starts = np.cumsum([0, *sizes])
    return data.texts_of([np.arange(start, end) for start, end in itertools.pairwise(starts)])


def pieces(batch: data.Batch) -> list[list[int]]:
    found = []
    for tokens, segments in zip(batch.tokens, batch.segments, strict=True):
        for segment in range(1, segments.max() + 1):
            found.append(tokens[segments == segment].tolist())
    return found


def test_once_gives_every_text_in_its_order_and_padding_at_the_end_only():
    batches = list(data.once(texts(), LENGTH, 4))
    assert [batch.tokens.shape for batch in batches] == [(4, LENGTH), (4, LENGTH)]
    tokens, segments = (np.concatenate([getattr(batch, name).ravel() for batch in batches]) for name in data.Batch._fields)
    np.testing.assert_array_equal(tokens[:44], np.arange(44))
    assert (segments[:44] > 0).all()
    assert not segments[44:].any()
    rows = segments.reshape(-1, LENGTH)
    assert rows[:3].tolist() == [[1, 1, 1, 2, 2, 2, 2], [1] * 7, [1, 2, 2, 2, 2, 2, 2]]


def test_a_segment_is_a_part_of_one_text_and_neighbours_differ():
    rows = data.Rows(texts(), LENGTH, 3, seed=5)
    of = np.repeat(np.arange(6), (3, 11, 1, 7, 20, 2))
    for batch in itertools.islice(rows, 9):
        assert (batch.segments > 0).all()
        for piece in pieces(batch):
            assert piece == list(range(piece[0], piece[0] + len(piece)))
            assert len({of[token] for token in piece}) == 1


def test_an_epoch_holds_each_token_once_but_for_less_than_a_row_and_the_next_is_in_another_order():
    rows = data.Rows(texts(), LENGTH, 2, seed=1)
    epochs = [np.concatenate([next(rows).tokens.ravel() for _ in range(3)]) for _ in range(3)]
    for epoch in epochs:
        assert len(set(epoch.tolist())) == 6 * LENGTH
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3
    left = [set(range(44)) - set(epoch.tolist()) for epoch in epochs]
    assert left[0] != left[1] or left[1] != left[2]


def test_the_seed_decides_the_order():
    drawn = [next(data.Rows(texts(), LENGTH, 4, seed=seed)).tokens.tolist() for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("before", [0, 1, 2, 5, 11])
def test_rows_go_on_from_a_position_that_went_through_json(before):
    first, second = (data.Rows(texts(), LENGTH, 4, seed=2) for _ in range(2))
    for _ in range(before):
        next(first)
    second.position = json.loads(json.dumps(first.position))
    for _ in range(5):
        for ours, theirs in zip(next(second), next(first), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_less_than_a_row_of_text_is_padded():
    batch = next(data.Rows(data.texts_of([[5, 7], [11]]), LENGTH, 2))
    assert sorted(batch.tokens[0].tolist()) == [0, 0, 0, 0, 5, 7, 11]
    assert sorted(map(len, pieces(batch))) == [1, 1, 2, 2]


@pytest.mark.parametrize("text", [[5.7, 3.2], [[1, 2], [3, 4]], [2**32 + 3]])
def test_ids_that_are_none_are_refused(text, unchecked):
    with pytest.raises(ValueError, match="it must be a list of ids"):
        data.texts_of([text])


def test_files_are_texts_and_lines_of_jsonl_too_each_with_its_end(tmp_path):
    (tmp_path / "a.txt").write_text("naïve\n\ntext\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "one", "id": 7}\n\n{"text": ""}\n{"text": "two\\n"}\n', encoding="utf-8")
    words = of_bytes()
    found = data.read([tmp_path / "a.txt", str(tmp_path / "b.jsonl")], words)
    ends = [0, *found.ends.tolist()]
    ids = [found.tokens[a:b].tolist() for a, b in itertools.pairwise(ends)]
    assert [words.decode(text) for text in ids] == ["naïve\n\ntext\n", "one", "two\n"]
    assert all(text[-1] == words.eos_id for text in ids)
    assert found.identity == {"texts": 3, "tokens": len(found.tokens), "crc32": found.identity["crc32"]}
    assert data.texts_of([*ids[:2], ids[2][::-1]]).identity["crc32"] != found.identity["crc32"]
    assert data.texts_of([ids[0] + ids[1], ids[2], [1]][:2]).identity["crc32"] != found.identity["crc32"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"caf\xe9", "holds bytes that are no UTF-8, at 3"),
        ("a.txt", b"", "There are no texts"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}', 'line 2, is no JSON object with a "text"'),
        ("a.jsonl", b"[1", 'line 1, is no JSON object with a "text"'),
        ("a.jsonl", b"[1]", 'line 1, is no JSON object with a "text"'),
        ("a.JSONL", b"[1]", 'line 1, is no JSON object with a "text"'),
        ("a.jsonl", b"[" * 100_000, 'line 1, is no JSON object with a "text"'),
        ("a.jsonl", b'{"text": "\\ud800"}', "half a surrogate pair"),
        ("a.jsonl", b'{"text": 5}', 'line 1, has a "text" that is no string: 5'),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        data.read([tmp_path / name], of_bytes())
