"""tokenizer.json files of the library `tokenizers` in the form of Llama-3's, from the file to uint32 shards."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from barellm.cli.main import main
from barellm.config import DataConfig
from barellm.data import reading
from barellm.data.bpe import printable_bytes
from barellm.data.huggingface import HuggingFace
from barellm.data.kinds import load_tokenizer
from barellm.data.reading import Layout, blocks
from barellm.data.shards import open_shard
from barellm.data.sources import prepare
from barellm.data.tokenizers import StreamDecoder
from barellm.errors import UserError
from tests.chat import families
from tests.data.llama import PATTERN, large_llama_json, llama_json

TEXT = Path(__file__).read_text() + "  naïve façade — 你好，世界 🙂🙃 12345!!\r\n\r\n\t tabs  and   'S spaces \n\n\n" * 3
unicode_text = st.text(st.characters(exclude_categories=["Cs"]))
# Marks, letters, numbers and every kind of white space next to each other.
awkward = st.text(st.sampled_from("ab1,'sé好 \t\r\n\x0b\u00a0\u2003🙂!\u0301"), max_size=60)


@pytest.fixture(scope="module")
def small() -> HuggingFace:
    return HuggingFace(llama_json(TEXT, vocab=500), path=Path("made up"))


@pytest.fixture(scope="module")
def large() -> HuggingFace:
    return HuggingFace(large_llama_json(), path=Path("made up"))


def test_special_ids_stand_behind_the_others(small, large):
    for tokenizer, first in ((small, 500), (large, 128_000)):
        assert tokenizer.vocab_size == first + 8 and tokenizer.eot == first and tokenizer.ends == {first, first + 1}
        assert tokenizer.tokens[first:] == [b""] * 8 and not tokenizer.byte_lengths[first:].any()
        assert all(tokenizer.tokens[:first])


@given(text=st.one_of(unicode_text, awkward))
def test_any_text_comes_back(text, small, large):
    for tokenizer in (small, large):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and tokenizer.decode(ids) == text
        assert int(tokenizer.byte_lengths[ids].sum()) == len(text.encode())


@given(text=st.one_of(unicode_text, awkward))
def test_ids_are_those_of_meta_s_own_code(text, small):
    """Meta's tokenizer is tiktoken's with the same rule and the ids as ranks."""
    assert small.encode(text).tolist() == oracle(small).encode_ordinary(text)


def oracle(small, made=[]):  # noqa: B006 (made once)
    import tiktoken

    if not made:
        ranks = {token: i for i, token in enumerate(small.tokens[:500])}
        made.append(tiktoken.Encoding("oracle", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}))
    return made[0]


def test_a_text_that_spells_a_special_token_is_text(small):
    ids = small.encode("a<|begin_of_text|>b<|end_of_text|>")
    assert max(ids) < 500 and small.decode(ids) == "a<|begin_of_text|>b<|end_of_text|>"


@given(text=awkward, block=st.integers(1, 12))
def test_blocks_change_no_token(text, block, small, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(text, newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "BLOCK", block)
        found = [block.text for block in blocks(path, Layout())]
    assert [i for part in small.encode_many(found) for i in part] == small.encode(text).tolist()


def test_a_text_of_lines_is_cut_between_them(tmp_path, monkeypatch):
    """Without a space or tab only a line's end after a letter or digit may be cut."""
    monkeypatch.setattr(reading, "BLOCK", 10)
    (tmp_path / "a").write_text("line\nmore!\n" * 30)
    found = [block.text for block in blocks(tmp_path / "a", Layout())]
    assert len(found) > 10 and all(text.startswith("\n") for text in found[1:])


def test_the_file_is_kept_as_it_is(small, tmp_path):
    small.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert isinstance(again, HuggingFace) and again.content == small.content and again.hash == small.hash
    assert again.encode(TEXT).tolist() == small.encode(TEXT).tolist()


@pytest.mark.extended
def test_128_thousand_ids_become_uint32_shards_and_train_as_the_text_would(large, tmp_path, capsys):
    large.save(tmp_path)
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT)
    words = ["prepare", text, "--out", out, "--tokenizer", tmp_path, "--shard-tokens", 1000, "--json"]
    assert main([str(word) for word in words]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["tokenizer"], said["vocab_size"]) == ("huggingface", 128_008)
    first = open_shard(out / "out_train_000001.bin")
    header = np.fromfile(out / "out_train_000001.bin", "<i4", 3).tolist()
    assert header == [20240801, 7, 1000] and first.dtype == np.uint32
    assert first[0] == 128_000 and first.max() > 1 << 16  # each document begins with <|begin_of_text|>
    direct = prepare(DataConfig(source=str(text), tokenizer=str(tmp_path)))
    shards = prepare(DataConfig(source=str(out), tokenizer=str(tmp_path)))
    for a, b in ((direct.train, shards.train), (direct.val, shards.val)):
        assert a.array(0, len(a)).tolist() == b.array(0, len(b)).tolist()
    cut = int(len(TEXT) * 0.9)
    assert large.decode(direct.train.array(0, len(direct.train))) == TEXT[:cut]


def test_ids_beyond_the_vocabulary_are_refused_in_uint32_shards(small, tmp_path):
    from barellm.data.shards import write_shard

    small.save(tmp_path)
    write_shard(tmp_path / "a.bin", [np.array([0, 507] * 20)], magic=20240801)
    data = prepare(DataConfig(source=str(tmp_path), tokenizer=str(tmp_path)))
    assert data.train.array(0, 4).tolist() == [0, 507, 0, 507]
    write_shard(tmp_path / "b.bin", [np.array([0, 3_000_000_000] * 20)], magic=20240801)
    with pytest.raises(UserError, match=r"b.bin has token id 3000000000, beyond the vocabulary of tokenizer huggingface"):
        prepare(DataConfig(source=str(tmp_path), tokenizer=str(tmp_path)))


def test_a_vocabulary_of_this_size_is_fast_enough(large):
    """Processor time of all threads, which a busy machine changes little: 0.6 s to load and 0.5 s a megabyte on Zen 4."""
    begin = time.process_time()
    fresh = HuggingFace(large.content, path=Path("made up"))
    fresh.encode("text")
    loaded = time.process_time()
    text = TEXT * (1_000_000 // len(TEXT))
    blocks = [text[i : i + 100_000] for i in range(0, len(text), 100_000)]
    assert fresh.decode(np.concatenate(fresh.encode_many(blocks))) == text
    seconds = time.process_time() - loaded
    print(f"loaded in {loaded - begin:.2f} s, {seconds / len(text) * 1e6:.1f} s a megabyte")
    assert loaded - begin < 6 and seconds < 15


# --- what is refused ---


def harmed(**changes) -> bytes:
    found = json.loads(llama_json(TEXT, vocab=300))
    for key, value in changes.items():
        part, _, name = key.partition("__")
        if name:
            found[part][name] = value
        else:
            found[part] = value
    return json.dumps(found).encode()


WORDS = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
ADDED = {"id": 300, "content": "x", "special": True, "lstrip": True, "rstrip": False}
ALL = {name: i for i, name in enumerate(printable_bytes())}


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"model__type": "WordLevel"}, "its model is of type 'WordLevel'"),
        ({"model__byte_fallback": True}, "it has bytes as <0x..>"),
        ({"model__continuing_subword_prefix": "##"}, "it marks parts of words"),
        ({"model__end_of_word_suffix": "</w>"}, "it marks parts of words"),
        ({"normalizer": {"type": "NFC"}}, "it normalizes the text"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}}, "it normalizes the text"),
        ({"pre_tokenizer": None}, "its words are not cut in bytes"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "its words are not cut in bytes"),
        ({"pre_tokenizer": WORDS | {"add_prefix_space": True}}, "it puts a space before the text"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, WORDS]}}, "it drops what it cuts at"),
        ({"added_tokens": [ADDED]}, "an added token swallows white space"),
        ({"added_tokens": [ADDED | {"lstrip": False, "rstrip": True}]}, "an added token swallows white space"),
        ({"model__vocab": {"a": 0}}, "it lacks some of the 256 bytes"),
    ],
)
def test_a_tokenizer_that_changes_the_text_is_not_exact(changes, reason, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(harmed(**changes))
    found = load_tokenizer(tmp_path)
    assert isinstance(found, HuggingFace) and not found.exact and found.changes == reason


def test_merges_are_never_dropped_at_random(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(harmed(model__dropout=0.5))
    found = load_tokenizer(tmp_path)
    assert found.exact and len({tuple(found.encode(TEXT[:200]).tolist()) for _ in range(20)}) == 1


@pytest.mark.parametrize("wrong", [1 << 27, -1, 1.5, True, "3", None, 10_000])
@pytest.mark.parametrize("where", ["vocab", "added"])
def test_an_id_that_no_file_of_this_size_can_have_is_refused(wrong, where, tmp_path):
    """A few bytes must not ask for a table of 2^27 entries."""
    vocab = {"model__vocab": ALL | {"ab": wrong}} if where == "vocab" else {}
    changes = vocab or {"added_tokens": [ADDED | {"lstrip": False, "id": wrong}]}
    content = harmed(model__merges=[], **changes)
    (tmp_path / "tokenizer.json").write_bytes(content)
    if wrong == 10_000:  # one that has room in the file is only a gap
        (tmp_path / "tokenizer.json").write_bytes(content + b" " * 10_000)
        assert load_tokenizer(tmp_path).vocab_size == 10_001
        return
    name = "ab" if where == "vocab" else "x"
    with pytest.raises(UserError, match=rf"the token '{name}' has the id {wrong!r}, expected a whole number from 0 to \d+$"):
        load_tokenizer(tmp_path)


def test_what_the_library_refuses_is_a_line(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(harmed(model__merges=[["zz", "yy"]]))
    with pytest.raises(UserError, match=r"tokenizer.json is refused by the library tokenizers: "):
        load_tokenizer(tmp_path).encode("text")


def test_a_byte_order_mark_before_the_file_is_no_part_of_it(small, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"\xef\xbb\xbf" + small.content)
    again = load_tokenizer(tmp_path)
    assert again.hash == small.hash and again.encode(TEXT).tolist() == small.encode(TEXT).tolist()


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"model": {}}',
        '{"model": 3}',
        "[" * 100_000,
        '{"model": {"type": "BPE"}, "pre_tokenizer": "a"}',
        '{"format": 1, "kind": "chars", "eot": null, "tokens": [1], "hash": ""}',
    ],
    ids=lambda content: content[:30],
)
def test_half_a_file_is_damaged(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="is damaged: not a tokenizer that barellm or the library tokenizers wrote"):
        load_tokenizer(tmp_path)


def test_what_stands_before_a_text_is_known_by_the_template_or_by_name(tmp_path):
    def found(**changes) -> HuggingFace:
        return HuggingFace(harmed(**changes), path=tmp_path)

    end = {"id": 300, "content": "<|endoftext|>", "special": True}
    other = {"id": 301, "content": "<mine>", "special": True}
    assert found(post_processor=None).eot == 300  # <|begin_of_text|> by its name
    assert found(post_processor=None, added_tokens=[other, end]).eot == 300
    assert found(post_processor=None, added_tokens=[other]).eot is None and not found(added_tokens=[other]).ends
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<mine>"}}, {"Sequence": {"id": "A"}}]}
    assert found(post_processor=template, added_tokens=[other, end]).eot == 301
    behind = template | {"single": template["single"][::-1]}
    assert found(post_processor=behind, added_tokens=[other, end]).eot == 300


def test_an_added_token_that_is_not_special_is_text(tmp_path):
    off = dict.fromkeys(("special", "normalized", "single_word", "lstrip", "rstrip"), False)
    added = [{"id": 300, "content": "<tool>", **off}]
    tokenizer = HuggingFace(harmed(added_tokens=added, post_processor=None), path=tmp_path)
    ids = tokenizer.encode("a<tool>b").tolist()
    assert 300 in ids and tokenizer.decode(ids) == "a<tool>b" and tokenizer.eot is None


def test_an_added_token_of_marked_spaces_is_decoded_as_spaces(tmp_path):
    """Gemma's runs of spaces are added tokens, not special: without the decoder's steps indented code showed U+2581 for spaces."""
    made = families.fast_tokenizer("gemma")
    made.add_tokens([AddedToken("\u2581" * n, normalized=False) for n in (2, 3)])
    tokenizer = HuggingFace(made.to_str().encode(), path=tmp_path)
    two, three = (tokenizer.added["\u2581" * n] for n in (2, 3))
    ids = [*tokenizer.encode("a:\n").tolist(), three, *tokenizer.encode("return").tolist(), two, *tokenizer.encode("x").tolist()]
    assert tokenizer.decode(ids) == made.decode(ids) == "a:\n   return  x"
    stream = StreamDecoder(tokenizer, begins=True)
    assert "".join(map(stream.feed, ids)) + stream.finish() == made.decode(ids)
