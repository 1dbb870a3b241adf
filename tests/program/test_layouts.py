"""Layouts of block-sparse attention against the definitions of their patterns, pair by pair; graphs; tables."""

from __future__ import annotations

import numpy as np
import pytest

from barellm.program import layouts, patterns
from barellm.program.builder import Program, Store
from barellm.program.layouts import barabasi_albert, layout_of, parse, spread, watts_strogatz
from barellm.program.tensor import Dim
from tests.layout_cases import layout_both

GRAPH = {"watts-strogatz:4:0.3:5": watts_strogatz(7, 4, 0.3, 5), "barabasi-albert:2:3": barabasi_albert(7, 2, 3)}
GRAPH["spread:2:9"] = spread(7, 2, 9)
SEEN = {  # of a query and a key, in blocks of 16
    "all": lambda q, k: True,
    "local:21": lambda q, k: -21 < q - k < 21,
    "banded:2": lambda q, k: q // 16 - k // 16 in (-1, 0, 1),
    "strided:7": lambda q, k: q % 7 == k % 7,
    "fixed:20:3": lambda q, k: q // 20 == k // 20 or k % 20 in (17, 18, 19),
    **{text: lambda q, k, linked=linked: bool(linked[q // 16, k // 16]) for text, linked in GRAPH.items()},
}


@pytest.mark.parametrize("causal", [True, False])
def test_every_pair_is_seen_as_its_pattern_says(causal):
    length, texts = 101, list(SEEN)
    heads = [*texts, "local:2+strided:20"]
    layout = parse(", ".join(heads), length=length, block=16, heads=len(heads), causal=causal)
    rules = [*SEEN.values(), lambda q, k: -2 < q - k < 2 or q % 20 == k % 20]
    for head, rule in enumerate(rules):
        want = [[rule(q, k) and (k <= q or not causal) for k in range(length)] for q in range(length)]
        assert np.array_equal(layout.dense(head), want), heads[head]
    assert layout.causal == causal
    assert layout.pairs == sum(int(layout.dense(h).sum()) for h in range(len(heads)))
    listed = sum(len(np.unique(np.argwhere(layout.dense(h)) // 16, axis=0)) for h in range(len(heads)))
    assert len(layout.keys) == listed, "a block that nobody sees is listed"
    dense = length * (length + 1) // 2 if causal else length**2
    assert layout.density == pytest.approx(listed * 256 / (len(heads) * dense))


def entries_of(table, layout):
    """(head, row, block, kind) of each entry of a table."""
    lists, count = layout.heads * layout.rows, len(layout.keys)
    first, blocks, kinds = table[: lists + 1], table[lists + 1 : lists + 1 + count], table[lists + 1 + count :]
    rows = np.repeat(np.arange(lists), np.diff(first))
    return list(zip(rows // layout.rows, rows % layout.rows, blocks, kinds, strict=True))


def test_tables_say_what_the_layout_says():
    layout = parse("local:21+strided:40, fixed:50:3", length=200, block=48, heads=3)
    rows, columns = (entries_of(t, layout) for t in (layout.tables[name] for name in ("rows", "columns")))
    assert rows == sorted(rows) and columns == sorted(columns)
    assert sorted((h, k, q, kind) for h, q, k, kind in rows) == columns
    masks = [np.ones((48, 48), bool), *layout.masks]
    for head, q, k, kind in rows:
        cut = layout.dense(int(head))[48 * q : 48 * (q + 1), 48 * k : 48 * (k + 1)]
        assert np.array_equal(masks[kind][: cut.shape[0], : cut.shape[1]], cut)
    words = layout.mask_words().reshape(len(layout.masks), 48, 2).view(np.uint32)
    for mask, of_keys in zip(layout.masks, words, strict=True):
        bits = [[of_keys[key, query // 32] >> (query % 32) & 1 for key in range(48)] for query in range(48)]
        assert np.array_equal(bits, mask)


@pytest.mark.parametrize("length", [1, 16, 77, 160])
def test_the_first_positions_of_a_layout_see_what_they_saw(length):
    layout = parse("local:21+strided:32, watts-strogatz:4:0.3:2", length=160, block=16, heads=2)
    cut = layout.first(length)
    for head in range(2):
        assert np.array_equal(cut.dense(head), layout.dense(head)[:length, :length])
    assert cut.pairs == sum(int(cut.dense(h).sum()) for h in range(2))


def reached(linked: np.ndarray) -> int:
    """How many nodes are connected with the first."""
    seen = np.zeros(len(linked), bool)
    seen[0] = True
    for _ in linked:
        seen = seen | linked[seen].any(0)
    return int(seen.sum())


def test_a_small_world_keeps_its_links_and_becomes_small():
    ring, world = watts_strogatz(100, 6, 0.0, 1), watts_strogatz(100, 6, 0.2, 1)
    distance = abs(np.subtract.outer(np.arange(100), np.arange(100)))
    assert np.array_equal(ring, np.minimum(distance, 100 - distance) <= 3)
    assert world.sum() == ring.sum() == 100 + 600, "links are moved, not made"
    assert np.array_equal(world, world.T) and world.diagonal().all() and reached(world) == 100
    moved = (ring & ~world).sum() // 2
    assert 30 <= moved <= 90, "a fifth of 300"
    steps = [np.linalg.matrix_power(m.astype(float), 6) > 0 for m in (ring, world)]
    assert steps[0].mean() < 0.4 and steps[1].mean() > 0.95, "within six steps of each other"


def test_a_graph_of_preferred_links_has_hubs():
    linked = barabasi_albert(300, 3, 2)
    degree = linked.sum(0) - 1
    assert np.array_equal(linked, linked.T) and linked.diagonal().all() and reached(linked) == 300
    assert degree.sum() == 2 * 3 * 297 and (degree[3:] >= 3).all()
    assert degree.max() > 6 * np.median(degree), "an even graph's largest degree is twice its median"


def test_spread_rows_have_as_many_blocks_as_asked():
    assert (spread(50, 4, 1).sum(1) == 5).all() and not np.array_equal(spread(50, 4, 1), spread(50, 4, 2))


@pytest.mark.parametrize("text, message", [
    ("locl:3", "unknown pattern 'locl', expected one of all, local, banded"),
    ("local", "pattern 'local' has wrong numbers, expected an integer behind its name"),
    ("fixed:3:x", "pattern 'fixed:3:x' has wrong numbers, expected an integer, an integer"),
    ("local:0", "pattern 'local:0' has wrong numbers"),
    ("watts-strogatz:4:-1:2", "expected an integer, a number, an integer behind its name"),
])  # fmt: skip
def test_what_is_no_pattern_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        patterns.parse(text)


def test_what_is_no_layout_is_refused():
    with pytest.raises(ValueError, match="the block of a layout is 24, expected a multiple of 16 up to 128"):
        parse("all", length=40, block=24, heads=1)
    with pytest.raises(ValueError, match="query 8 of a layout sees no key"):
        layout_of([lambda q, k: (q != 8) & (k == k)], length=40, block=16, causal=True)
    assert patterns.NUMBERS.keys() == layouts.PATTERNS.keys()


def test_equal_masks_are_stored_once():
    layout = parse("local:20", length=160, block=16, heads=2)
    kept = {mask.tobytes() for mask in layout.masks}
    assert len(layout.masks) == len(kept) == 3  # the diagonal's, and two at the far end


def test_a_ring_of_few_nodes_has_each_link_once():
    for nodes in (2, 3, 4, 7):
        links = watts_strogatz(nodes, 2 * nodes, 0.0, seed=1).sum() - nodes
        assert links == 2 * nodes * ((nodes - 1) // 2)


@pytest.mark.parametrize("causal", [True, False])
def test_pairs_are_counted_by_their_distance(causal):
    layout = parse("local:21+strided:40, fixed:50:3", length=77, block=16, heads=2, causal=causal)
    distance = np.subtract.outer(np.arange(77), np.arange(77))
    for least, most in ((0, 8), (-5, 5), (17, 40), (0, -1), (-200, 200)):
        within = (least <= distance) & (distance <= most)
        want = sum(int((layout.dense(h) & within).sum()) for h in range(2))
        assert layout.pairs_within(least, most) == want


def test_relative_terms_cost_a_product_forward_and_two_backward():
    """Of the pairs that have one. What a kernel computes again is not counted."""
    layout = parse("local:21+strided:40", length=77, block=16, heads=2)
    dims, distance = (Dim("batch", 3), Dim("seq", 77)), np.subtract.outer(np.arange(77), np.arange(77))
    near, each = 2 * int((layout.dense(0) & (distance < 9)).sum()), 3 * 2 * 5
    found = []
    for distances in (0, 9):
        p = Program(Store())
        layout_both(p, dims, layout, D=5, dtype="fp32", distances=distances)
        found.append([op.flops() for op in p.ops if op.name.startswith("block_sparse_")])
    assert found == [
        [2 * each * layout.pairs, 4 * each * layout.pairs],
        [each * (2 * layout.pairs + near), each * (4 * layout.pairs + 2 * near)],
    ]
