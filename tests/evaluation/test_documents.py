"""Losses of documents, each by itself."""

from __future__ import annotations

import json
from math import log

import numpy as np
import pytest

from barellm.cli.main import main
from barellm.data.bpe import trained_bpe
from barellm.data.shards import TokenStream
from barellm.evaluation import documents
from barellm.models.gpt2 import Config as ModelConfig
from tests.interop.models import TINY, checkpoint_of, random_arrays

TEXTS = ["To be, or not to be.\n", "x", "", "That is the question: whether 'tis nobler in the mind to suffer\n" * 2]


@pytest.fixture(autouse=True)
def cache(own_cache):
    return own_cache


@pytest.mark.parametrize("ids, cuts", [
    ([9, 1, 2, 9, 3, 9], [[9, 1, 2], [9, 3], [9]]), ([4, 5, 9, 9, 1], [[4, 5], [9], [9, 1]]), ([1, 2], [[1, 2]]),
])  # fmt: skip
def test_each_document_begins_with_the_separator(ids, cuts):
    stream = TokenStream([np.array(ids, np.uint16)], name="test")
    assert [part.tolist() for part in documents.of_stream(stream, 9)] == cuts
    assert [part.tolist() for part in documents.of_stream(stream, None)] == [ids]


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, 11])
def test_every_token_but_the_first_is_a_target_once(length):
    found = documents.windows(np.arange(length), 5)
    assert [i for text in found for i in text.ids[-text.scored :]] == list(range(1, length))
    assert all(text.scored == len(text.ids) - 1 <= 5 for text in found)


def test_documents_do_not_see_each_other(tmp_path, capsys, refused):
    """A document among others has the row that it has alone; the whole is their sum; a row of JSON and a separator say the same."""
    bpe = trained_bpe(lambda: TEXTS, vocab=270)
    model = ModelConfig(layers=2, heads=2, d_model=12, vocab_size=bpe.vocab_size, max_seq=20)
    step = checkpoint_of(tmp_path / "run", model, random_arrays(model), bpe)

    def found(name: str, texts: list[str], *more: str) -> tuple[dict, list[dict]]:
        path, out = tmp_path / f"{name}.jsonl", tmp_path / f"{name}-out{len(more)}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        capsys.readouterr()
        command = ["eval", str(step), "--data", str(path), "--per-document", str(out), "--device", "reference", "--json"]
        assert main([*command, *more]) == 0
        return json.loads(capsys.readouterr().out), [json.loads(line) for line in out.read_text().splitlines()]

    total, rows = found("all", TEXTS, "--split", "all")
    for i, text in enumerate(TEXTS):
        if text:
            (alone,) = found(f"alone{i}", [text], "--split", "all")[1]
            assert alone["nats"] == pytest.approx(rows[i]["nats"], rel=1e-5)
        assert (rows[i]["document"], rows[i]["bytes"]) == (i, len(text))
    assert rows[2] == {"document": 2, "tokens": 0, "bytes": 0, "nats": 0, "nats_per_token": None, "bits_per_byte": None}
    assert total["documents"] == 4 and total["nats"] == pytest.approx(sum(row["nats"] for row in rows))
    assert total["bits_per_byte"] == pytest.approx(total["nats"] / log(2) / sum(map(len, TEXTS)))
    assert total["tokens"] == sum(row["tokens"] for row in rows) == sum(len(bpe.encode(text)) for text in TEXTS)
    (last,) = found("more", [*TEXTS, TEXTS[0], "x"])[1]  # the validation part, as of every other text
    assert (last["document"], last["bytes"]) == (0, 1)
    assert last["nats"] == pytest.approx(rows[1]["nats"], rel=1e-5)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"txt": "b"}\n')
    command = ("eval", step, "--data", bad, "--per-document", tmp_path / "x")
    assert "bad.jsonl, line 2 has no text in a field 'text', it has: txt" in refused(*command)
    assert "leave out --tokens" in refused(*command, "--tokens", "5")
    bad.write_text('{"prompt": "a", "answer": "b"}\n')
    assert "the answers alone: leave out --per-document" in refused(*command)


def test_a_text_without_separators_is_one_document_as_long_as_it_is(tmp_path, capsys):
    """Its loss is that which `eval` finds without --per-document."""
    step = checkpoint_of(tmp_path / "run", TINY, random_arrays(TINY))
    (tmp_path / "text.txt").write_text(TEXTS[3])
    command = ["eval", str(step), "--data", str(tmp_path / "text.txt"), "--split", "all", "--device", "reference", "--json"]
    assert main(command) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main([*command, "--per-document", str(tmp_path / "out.jsonl")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nats_per_token"] == pytest.approx(whole["nats"], rel=1e-6) and found["documents"] == 1
    assert (found["tokens"], found["bytes"]) == (whole["targets"], whole["bytes"])
