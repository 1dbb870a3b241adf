"""HellaSwag: files of both kinds, what is fed of each ending, and the shares, with a session whose losses are known."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from math import sqrt
from pathlib import Path

import numpy as np
import pytest

from barellm.cli.main import main
from barellm.data.tokenizers import Bytes
from barellm.errors import UserError
from barellm.evaluation import hellaswag
from barellm.evaluation.scoring import Scorer, Text, shape_for
from tests.interop.models import TINY, checkpoint_of, random_arrays

EXAMPLES = [
    {"ind": 24, "ctx": "A man holds a ladder. He", "label": 2,
     "endings": ["climbs up.", "sings to it, loudly.", "sets it down.", "is."]},
    {"ind": 31, "ctx": "Water boils. Then", "label": 0, "endings": ["tea.", "a cat flies over", "nothing", "two"]},
    {"ind": 7, "ctx": "One two", "label": "1", "endings": ["four", "three", "five", "six"]},
]  # fmt: skip


@pytest.fixture(autouse=True)
def cache(own_cache):
    return own_cache


def lines(folder: Path, examples: list[dict] = EXAMPLES) -> Path:
    path = folder / "val.jsonl"
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return path


def words_of(index: int, label: int, parts: list[list[int]]) -> list[int]:
    body = [index, label, len(parts) - 1, *[word for part in parts for word in (len(part), *part)]]
    return [65535, 2 * (len(body) + 2), *body]


def as_bin(path: Path, streams: list[list[int]], head: tuple[int, ...] = (20240522, 1)) -> Path:
    header = np.zeros(256, "<i4")
    header[:4] = [*head, len(streams), 2 * max(map(len, streams))]
    path.write_bytes(header.tobytes() + np.array([w for s in streams for w in s], "<u2").tobytes())
    return path


class Gpt2Bytes(Bytes):
    name = "gpt2"


def test_both_files_hold_the_same_examples(tmp_path):
    found = hellaswag.read(lines(tmp_path), Gpt2Bytes())
    assert [(e.index, e.label) for e in found] == [(24, 2), (31, 0), (7, 1)]
    assert bytes(found[0].context) == b"A man holds a ladder. He" and bytes(found[0].endings[3]) == b" is."
    streams = [words_of(e.index, e.label, [list(e.context), *map(list, e.endings)]) for e in found]
    path = as_bin(tmp_path / "val.bin", streams)
    assert hellaswag.read(path, Gpt2Bytes()) == found
    assert hellaswag.read(path, Gpt2Bytes(), limit=2) == hellaswag.read(lines(tmp_path), Gpt2Bytes(), limit=2) == found[:2]


@pytest.mark.parametrize("change, said", [
    ({"label": 4}, "line 2: label is 4, expected one of its 4 endings"), ({"label": "x"}, "line 2 is no example"),
    ({"endings": [1, 2]}, "line 2 is no example"), ({"ctx": None}, "line 2 is no example"),
    ({"endings": "abcd"}, "line 2 is no example"),
    ({"ind": "x"}, "line 2 is no example"), ({"ind": None}, "line 2 is no example"), ({"label": True}, "line 2 is no example"),
    ({"label": float("inf")}, "line 2 is no example"), ({"label": 1.5}, "line 2 is no example"),
])  # fmt: skip
def test_a_wrong_line_is_named(tmp_path, change, said):
    with pytest.raises(UserError, match=said):
        hellaswag.read(lines(tmp_path, [EXAMPLES[0], EXAMPLES[1] | change]), Bytes())


GOOD = words_of(3, 1, [[1, 2], [3], [4, 5], [6], [7]])


@pytest.mark.parametrize("stream", [
    GOOD[:-1], [1, *GOOD[1:]], [GOOD[0], GOOD[1] + 2, *GOOD[2:]], [GOOD[0], GOOD[1] - 2, *GOOD[2:]], [*GOOD[:3], 4, *GOOD[4:]],
    [*GOOD[:5], 0, *GOOD[6:]], [*GOOD[:5], 3, *GOOD[6:]], [*GOOD[:1], GOOD[1] + 1, *GOOD[2:]], [],
])  # fmt: skip
def test_a_damaged_bin_is_named_by_its_example(tmp_path, stream):
    with pytest.raises(UserError, match="example 1 is damaged"):
        hellaswag.read(as_bin(tmp_path / "val.bin", [GOOD, stream]), Gpt2Bytes())


def test_ids_beyond_the_vocabulary_are_named(tmp_path):
    beyond = words_of(3, 1, [[1, 2], [3], [4, 256], [6], [7]])
    with pytest.raises(UserError, match=r"example 1 has token id 256, beyond the vocabulary of the tokenizer \(256 ids\)"):
        hellaswag.read(as_bin(tmp_path / "val.bin", [GOOD, beyond]), Gpt2Bytes())


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"begins with \[20240520, 1\], expected \[20240522, 1\]"):
        hellaswag.read(as_bin(tmp_path / "val.bin", [GOOD], (20240520, 1)), Gpt2Bytes())
    with pytest.raises(UserError, match="has GPT-2's ids, the model has tokenizer bytes"):
        hellaswag.read(tmp_path / "val.bin", Bytes())
    with pytest.raises(UserError, match="has no example"):
        hellaswag.read(lines(tmp_path, []), Bytes())


class Bigrams:
    """A session whose loss of a target is cost[token, target]; the margin is that above the row's least cost."""

    def __init__(self) -> None:
        self.cost = np.random.default_rng(4).uniform(0.1, 5, (256, 256)).astype(np.float32)
        self.shapes = []

    def write(self, name, array):
        setattr(self, name, array.copy())

    def run(self, entry, *, batch, seq):
        assert entry == "score" and self.tokens.shape == self.targets.shape == (batch, seq)
        self.shapes.append((batch, seq))
        found, valid = self.cost[self.tokens, np.maximum(self.targets, 0)], self.targets >= 0
        self.losses = np.where(valid, found, 0)
        self.margins = np.where(valid, found - self.cost.min(1)[self.tokens], 0)

    def read(self, name):
        return getattr(self, name)

    def of(self, ids, scored):
        return np.array([self.cost[a, b] for a, b in pairwise(ids)][-scored:])


@pytest.mark.parametrize("batch, seq", [(1, 40), (3, 64), (50, 9)])
def test_each_text_has_its_own_losses_whatever_the_batch(batch, seq):
    session, r = Bigrams(), np.random.default_rng(0)
    texts = [Text(r.integers(0, 256, n).tolist(), int(r.integers(1, n))) for n in (2, 7, 30, 3, 7, 12)]
    session.cost[texts[0].ids[0], texts[0].ids[1]] = 0.05  # the most likely id after it
    done = []
    scores = Scorer(session, batch=batch, seq=seq).run(texts, report=done.append)
    for text, score in zip(texts, scores, strict=True):
        np.testing.assert_array_equal(score.losses, session.of(text.ids[-(seq + 1) :], min(text.scored, seq)))
    assert scores[0].greedy.tolist() == [True] and not scores[2].greedy.all()
    assert done[-1] == len(texts) and session.shapes[0][1] == min(seq, 29) and session.shapes[-1][1] <= session.shapes[0][1]


def test_a_plan_has_about_as_many_tokens_as_asked():
    texts = [Text([1] * n, 1) for n in (5, 11, 21)]
    assert shape_for(texts, tokens=60, most_seq=64) == (3, 20) and shape_for(texts, tokens=41, most_seq=64) == (2, 20)
    assert shape_for(texts, tokens=7, most_seq=8) == (1, 8)


def test_the_least_loss_and_the_least_mean_choose(tmp_path):
    session = Bigrams()
    task = hellaswag.HellaSwag(hellaswag.read(lines(tmp_path), Bytes()))
    found = task.run(Scorer(session, batch=5, seq=200))
    right, right_norm = 0, 0
    for example, losses in zip(EXAMPLES, found.losses, strict=True):
        each = [session.of(list(f"{example['ctx']} {e}".encode()), len(e) + 1) for e in example["endings"]]
        np.testing.assert_allclose(losses, [x.sum(dtype=np.float64) for x in each])
        right += int(np.argmin([x.sum() for x in each])) == int(example["label"])
        right_norm += int(np.argmin([x.mean() for x in each])) == int(example["label"])
    assert (found.acc, found.acc_norm, found.total) == (right / 3, right_norm / 3, 3)
    assert found.summary()["acc_stderr"] == pytest.approx(sqrt(found.acc * (1 - found.acc) / 2))
    assert (hellaswag.standard_error(0.5, 2), hellaswag.standard_error(1.0, 1)) == (0.5, None)
    assert task.run(Scorer(session, batch=5, seq=200), stop=lambda: True) is None


def test_a_run_tries_its_model(tmp_path, monkeypatch):
    """At its interval and at the end, and the same again after a resume; the model's losses decide."""
    text, choices = tmp_path / "text.txt", tmp_path / "val.jsonl"
    text.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))
    rows = [{"ctx": f"{i} squared is", "endings": [f"{i * i}.", f"{i}", "are."], "label": i % 3} for i in range(5)]
    choices.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny = ["--model.layers", "1", "--model.heads", "2", "--model.d_model", "8", "--model.max_seq", "16", "--seq", "8"]
    command = ["train", "shakespeare-char", "--data", str(text), "--out", str(tmp_path / "run"), *tiny, "--batch", "2"]
    command += ["--device", "reference", "--train.hellaswag", str(choices), "--train.hellaswag_every", "2"]
    command += ["--train.eval_every", "0", "--train.eval_tokens", "64"]
    assert main([*command, "--steps", "3"]) == 0

    def found() -> list[tuple]:
        rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        return [(r["step"], r["acc"], r["acc_norm"], r["total"]) for r in rows if r["kind"] == "hellaswag"]

    before = found()
    assert [row[0] for row in before] == [2, 3] and all(row[3] == 5 for row in before)
    assert main([*command, "--steps", "5", "--resume"]) == 0
    assert [row[0] for row in found() if row not in before] == [4, 5]


def test_the_command_prints_the_shares_and_writes_each_example(tmp_path, capsys, refused):
    step = checkpoint_of(tmp_path / "run", TINY, random_arrays(TINY))
    command = ["eval", str(step), "--hellaswag", str(lines(tmp_path)), "--device", "reference"]
    assert main([*command, "--json", "--per-document", str(tmp_path / "rows.jsonl")]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert found["total"] == 3 and [row["index"] for row in rows] == [24, 31, 7]
    labels = [int(example["label"]) for example in EXAMPLES]
    for name in ("acc", "acc_norm"):
        assert found[name] == sum(row[name] == label for row, label in zip(rows, labels, strict=True)) / 3
    assert rows[1]["tokens"] == [5, 17, 8, 4]  # bytes, the space before counted
    assert main([*command, "--limit", "1"]) == 0 and "(1 examples of" in capsys.readouterr().out
    assert "exists, expected a new file" in refused(*command, "--per-document", tmp_path / "rows.jsonl")
    assert "leave out --data" in refused(*command, "--split", "all")
    assert "--limit is about examples" in refused("eval", step, "--limit", "3")


def test_records_come_in_every_form(tmp_path):
    wanted = hellaswag.read(lines(tmp_path), Bytes())
    (tmp_path / "val.json").write_text(json.dumps(EXAMPLES), encoding="utf-8-sig")
    (tmp_path / "val.jsonl.gz").write_bytes(gzip.compress((tmp_path / "val.jsonl").read_bytes()))
    (tmp_path / "val").write_bytes((tmp_path / "val.jsonl").read_bytes())  # whose name says nothing
    for name in ("val.json", "val.jsonl.gz", "val"):
        assert hellaswag.read(tmp_path / name, Bytes()) == wanted
    (tmp_path / "val").write_text("[" * 100_000)
    with pytest.raises(UserError, match="line 1 is no JSON: it has lists or objects too deep"):
        hellaswag.read(tmp_path / "val", Bytes())


def test_the_norm_is_the_mean_over_an_ending_s_tokens():
    """By the sum the short ending wins, by the mean the long one."""
    found = hellaswag.Result([hellaswag.Example(0, 1, [1], [[2], [3] * 4])], [[3.0, 4.0]], [[1, 4]])
    assert (found.acc, found.acc_norm) == (0.0, 1.0)


def test_a_bin_that_is_cut_between_bytes_is_damaged(tmp_path):
    path = as_bin(tmp_path / "val.bin", [GOOD, GOOD])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="example 1 is damaged, or the file ends in it"):
        hellaswag.read(path, Gpt2Bytes())
    path.write_bytes(b"\x08")
    with pytest.raises(UserError, match=r"begins with \[8, 0\], expected"):
        hellaswag.read(path, Gpt2Bytes())


@pytest.mark.parametrize("label, parts", [(5, [[1]] * 6), (65535, [[1]] * 6), (1, [[1], [2], [], [3]]), (1, [[], [2], [3]])])
def test_a_bin_with_another_label_or_without_tokens_is_damaged(label, parts, tmp_path):
    with pytest.raises(UserError, match="example 0 is damaged"):
        hellaswag.read(as_bin(tmp_path / "val.bin", [words_of(3, label, parts)]), Gpt2Bytes())
