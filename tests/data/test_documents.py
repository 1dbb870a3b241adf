"""Rows of whole documents, beside a plain rule: fill, cut, go on."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.data.loader import Documents
from barellm.data.shards import TokenStream
from barellm.errors import UserError

LENGTHS = (5, 1, 9, 3, 30, 2, 2, 14, 7)


def stream(lengths=LENGTHS, before: int = 0) -> TokenStream:
    """Documents that begin with 0, whose other tokens count up over the whole text; `before`: tokens in front of the first."""
    tokens = np.arange(1, sum(lengths) + before + 1, dtype=np.uint16)
    tokens[before + np.cumsum([0, *lengths[:-1]])] = 0
    return TokenStream(np.array_split(tokens, 3), name="training part of x")


def rows(shapes, count: int, **more) -> list[np.ndarray]:
    documents = Documents(stream(**more), separator=0, shape=lambda i: shapes[min(i, len(shapes) - 1)])
    found = []
    for i in range(count):
        seq, document = shapes[min(i, len(shapes) - 1)]
        inputs, targets = documents.batch(i, 1, seq=seq, document=document)
        assert np.array_equal(inputs[0, 1:], targets[0, :-1])
        found.append(np.append(inputs[0], targets[0, -1]))
    return found


def test_rows_take_the_first_tokens_of_documents_in_their_order():
    first, second, third = rows([(7, 4), (11, 6)], 3)
    assert first.tolist() == [0, 2, 3, 4, 0, 0, 8, 9]  # 4 of 5, 1, then 3 of 9 as the row is full
    assert second.tolist() == [0, 17, 18, 0, 20, 21, 22, 23, 24, 0, 50, 0]  # the rest of the cut one is dropped
    assert third.tolist() == [0, 54, 55, 56, 57, 58, 0, 68, 69, 70, 71, 72]  # six of 14, six of 7


def test_a_row_that_the_text_cannot_fill_begins_again_at_its_first_document():
    found = rows([(40, 0)], 4, before=3)
    assert found[0][:7].tolist() == [0, 5, 6, 7, 8, 0, 0] and np.array_equal(found[0], found[1])
    found = rows([(40, 0), (25, 0)], 2)
    assert found[1][:6].tolist() == [0, 2, 3, 4, 5, 0]  # the documents that are left have 25 tokens, one too few
    with pytest.raises(UserError, match="fills no row: its documents have fewer than 100 tokens, of each at most all"):
        rows([(99, 0)], 1)


def test_a_resumed_run_finds_its_place_by_counting():
    shapes = [(7, 4), (11, 6), (9, 3), (9, 0), (20, 5)]
    wanted = rows(shapes, 12)
    for begin in (11, 3, 0, 7):
        documents = Documents(stream(), separator=0, shape=lambda i: shapes[min(i, 4)])
        for i in (begin, max(0, begin - 2)):  # forward, then back
            seq, document = shapes[min(i, 4)]
            assert np.array_equal(documents.batch(i, 1, seq=seq, document=document)[0][0], wanted[i][:-1])


def test_several_rows_at_once_are_the_same_rows():
    documents = Documents(stream(), separator=0, shape=lambda i: (7, 4))
    both = documents.batch(0, 2, seq=7, document=4)
    singles = rows([(7, 4)], 2)
    assert np.array_equal(both[0], [s[:-1] for s in singles]) and np.array_equal(both[1], [s[1:] for s in singles])


def test_a_text_without_documents_is_refused():
    with pytest.raises(UserError, match="has no token 9, which begins one"):
        Documents(TokenStream([np.ones(50, np.uint16)], name="x"), separator=9, shape=lambda i: (7, 4))
    with pytest.raises(UserError, match="the vocabulary of x has no token between them"):
        Documents(TokenStream([np.ones(50, np.uint16)], name="x"), separator=None, shape=lambda i: (7, 4))


def their_rows(shards: list[np.ndarray], shapes, count: int) -> list[np.ndarray]:
    """The rows of train_gpt.py at commit 20dd1582 on one GPU, by the arithmetic of its lines 1441 to 1463 and 1521 to 1542: a shard
    that ends within a row is left with StopIteration, and the next one begins with a row of its own."""
    found, files = [], iter(shards)
    tokens, i = next(files), 0
    while len(found) < count:
        num_tokens_local, max_seq_len = shapes[min(len(found), len(shapes) - 1)]
        bos_idx, idx, cur_len, spans = np.flatnonzero(tokens == 0), i, 0, []
        while cur_len <= num_tokens_local and idx < len(bos_idx):
            cur = bos_idx[idx]
            end = min(bos_idx[idx + 1] if idx + 1 < len(bos_idx) else tokens.size,
                      cur + max_seq_len, cur + num_tokens_local - cur_len + 1)  # fmt: skip
            spans.append(tokens[cur:end])
            cur_len += end - cur
            idx += 1
        if cur_len <= num_tokens_local:
            tokens, i = next(files), 0
        else:
            i = idx
            found.append(np.concatenate(spans))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_shards_apart_are_those_of_the_record(seed):
    """Shards that begin within a document, of one that fills no row, and of rows that end where a shard does."""
    r = np.random.default_rng(seed)
    shards = [r.integers(1, 1000, n).astype(np.uint16) for n in (90, 7, 61, 200, 33, 400)]
    for tokens in shards:
        tokens[r.random(len(tokens)) < 0.15] = 0
        tokens[r.integers(0, 3)] = 0
    shapes = [(7, 4), (11, 6), (9, 3), (9, 30), (20, 5)]
    theirs = their_rows(shards, shapes, 14)

    def ours(**how) -> list[list[int]]:
        shape = lambda i: shapes[min(i, 4)]  # noqa: E731
        documents = Documents(TokenStream(shards, name="x"), separator=0, shape=shape, **how)
        return [documents.batch(i, 1, seq=shape(i)[0], document=shape(i)[1])[0][0].tolist() for i in range(14)]

    assert ours(span=False) == [row[:-1].tolist() for row in theirs]
    assert ours(span=True) == ours() != ours(span=False)


def test_shards_that_fill_no_row_alone_are_refused_in_a_line():
    with pytest.raises(UserError, match=r"^training part of x fills no row: its documents in a shard have fewer than 31 "):
        Documents(stream(), separator=0, shape=lambda i: (30, 0), span=False).spans(0)
    assert Documents(stream(), separator=0, shape=lambda i: (30, 0)).spans(0)
