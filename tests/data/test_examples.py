"""Prompts and answers as rows: what is a target, what is packed beside what, and what is refused."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from barellm.cli.main import main
from barellm.config import DataConfig
from barellm.data.examples import ExampleRows, Examples, ExampleValidation, Packed
from barellm.data.loader import Repeated, document_starts
from barellm.data.sources import prepare
from barellm.errors import UserError
from barellm.training import metrics

CHAT = [
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    {"messages": [{"role": "user", "content": "More"}]},
]
CHAT[0]["messages"] += [{"role": "assistant", "content": "Hello."}, *CHAT[1]["messages"]]
CHAT[0]["messages"] += [{"role": "assistant", "content": "No."}]


def written(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def sums(count: int) -> list[dict]:
    return [{"prompt": f"{i} plus {i}?", "answer": f" {2 * i}"} for i in range(count)]


def test_targets_are_the_answer_and_what_ends_it(tmp_path, small_bpe):
    path = written(tmp_path / "a.jsonl", [{"prompt": "What is it?", "answer": " A naïve façade"}, *sums(2)])
    data = prepare(DataConfig(source=str(path), val_fraction=0.4), tokenizer=small_bpe)
    assert data.examples is not None and [len(part) for part in data.examples] == [2, 1]
    rows = ExampleRows(data.examples[0].slice(0, 1), seq=60, seed=1, fill=7)
    inputs, targets = rows.batch(0, 1, seq=60, document=0)
    counted = targets[0] >= 0
    eot = small_bpe.eot
    assert inputs[0, 0] == eot and small_bpe.decode(inputs[0, 1 : counted.argmax() + 1]) == "What is it?"
    assert small_bpe.decode(targets[0][counted][:-1]) == " A naïve façade" and targets[0][counted][-1] == eot
    assert (inputs[0, counted.argmax() + counted.sum() + 1 :] == 7).all()
    assert rows.counted(0, 1, seq=60) == rows.counted(5, 1, seq=60) == counted.sum()
    assert small_bpe.decode(data.prompt) == data.prompt_text == "1 plus 1?"


def test_a_conversation_is_lines_and_every_answer_counts(tmp_path, small_bpe):
    path = written(tmp_path / "a.jsonl", CHAT[:1] * 2)
    data = prepare(DataConfig(source=str(path), val_fraction=0.5), tokenizer=small_bpe)
    examples, eot = data.examples[1], small_bpe.eot
    assert data.prompt_text == "", "which is what chat is for"
    text = b"".join(b"|" if i == eot else small_bpe.token_bytes(i) for i in examples.tokens.tolist()).decode()
    assert text == "|System: Be brief.\nUser: Hi\nAssistant: Hello.|User: More\nAssistant: No.|"
    answers = b"".join(b"|" if i == eot else small_bpe.token_bytes(i) for i in examples.tokens[examples.answer].tolist())
    assert answers == b" Hello.| No.|"


def test_a_message_without_weight_is_seen_and_has_no_loss(tmp_path, small_bpe):
    """OpenAI's `weight` and the `train` of others; an end-of-text stands behind it all the same."""
    messages = [
        {"role": "user", "content": "Hi", "weight": 0, "train": False},
        {"role": "assistant", "content": "Wrong.", "weight": 0},
        {"role": "assistant", "content": "Bad.", "train": False},
        {"role": "user", "content": "More", "weight": None},
        {"role": "assistant", "content": "Right.", "weight": 1, "train": True},
    ]
    path = written(tmp_path / "a.jsonl", [{"messages": messages, "weight": 1, "tools": [], "train": True}] * 2)
    examples = prepare(DataConfig(source=str(path), val_fraction=0.5), tokenizer=small_bpe).examples[1]

    def text(ids) -> str:
        return b"".join(b"|" if i == small_bpe.eot else small_bpe.token_bytes(i) for i in ids.tolist()).decode()

    lines = "|User: Hi\nAssistant: Wrong.|Assistant: Bad.|User: More\nAssistant: Right.|"
    assert text(examples.tokens) == lines and text(examples.tokens[examples.answer]) == " Right.|"


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.json.gz"])
def test_examples_come_in_every_form_of_records(name, tmp_path):
    rows = sums(6)
    table = "".join(f"{row['prompt']},{row['answer']}\n" for row in [{"prompt": "prompt", "answer": "answer"}, *rows])
    content = (table if name == "a.csv" else json.dumps(rows)).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    written(tmp_path / "a.jsonl", rows)
    found = [prepare(DataConfig(source=str(tmp_path / one), tokenizer="bytes")) for one in (name, "a.jsonl")]
    assert found[0].hash == found[1].hash and found[0].examples is not None


ALPACA = "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
FORMS = [  # a record, and what the model sees of it without a chat template: trained parts in brackets
    ({"prompt": "a", "completion": " b", "source": "x"}, "|a[ b|]"),
    (
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        "|" + ALPACA.format(", paired with an input that provides further context")
        + "### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:[3|]",
    ),
    ({"instruction": "Go.", "input": "", "output": "ok"}, f"|{ALPACA.format('')}### Instruction:\nGo.\n\n### Response:[ok|]"),
    (
        {"system": "S", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]},
        "|System: S\nUser: q\nAssistant:[ r|]",
    ),
    (
        {"prompt": [*CHAT[1]["messages"], {"role": "assistant", "content": "x"}], "completion": CHAT[0]["messages"][1:3]},
        "|User: More\nAssistant: x|User: Hi\nAssistant:[ Hello.|]",
    ),
    (CHAT[0]["messages"][1:3], "|User: Hi\nAssistant:[ Hello.|]"),
    (
        {"messages": [CHAT[1]["messages"][0], {"role": "assistant", "content": [{"type": "text", "text": part} for part in "ab"]}]},
        "|User: More\nAssistant:[ ab|]",
    ),
]  # fmt: skip


def seen(examples: Examples, tokenizer) -> list[str]:
    """Each example as text: | for special tokens, trained tokens in brackets."""
    found = []
    for i in range(len(examples)):
        one, text, inside = examples.slice(i, i + 1), b"", False
        for token, trained in zip(one.tokens.tolist(), one.answer.tolist(), strict=True):
            text += b"" if trained == inside else b"[" if trained else b"]"
            text += b"|" if token == tokenizer.eot else tokenizer.token_bytes(token)
            inside = trained
        found.append((text + b"]" * inside).decode())
    return found


@pytest.mark.parametrize("record, wanted", FORMS)
def test_records_as_people_have_them(record, wanted, tmp_path, small_bpe):
    path = written(tmp_path / "a.jsonl", [record] * 2)
    examples = prepare(DataConfig(source=str(path)), tokenizer=small_bpe, whole=True).examples
    assert examples is not None and seen(examples[1], small_bpe) == [wanted] * 2


def test_folders_tables_and_parquet_hold_the_same_examples(tmp_path, small_bpe):
    """Cells of a table have lists as JSON; columns that a record has not are null in Parquet, and lists are lists there."""
    arrow, table = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": CHAT[0]["messages"], "source": None}, {"messages": CHAT[0]["messages"][1:3], "source": "b"}]
    folders = [tmp_path / name for name in ("lines", "csv", "parquet")]
    for folder in folders:
        folder.mkdir()
    (folders[2] / "README.md").write_text("what it is")
    for i, row in enumerate(rows):
        written(folders[0] / f"{i}.jsonl", [row])
        cell = json.dumps(row["messages"]).replace('"', '""')
        (folders[1] / f"{i}.csv").write_text(f'source,messages\n{row["source"] or ""},"{cell}"\n')
    table.write_table(arrow.Table.from_pylist(rows), folders[2] / "all.parquet")
    found = [prepare(DataConfig(source=str(folder)), tokenizer=small_bpe) for folder in [*folders, f"{folders[0]}/*.jsonl"]]
    assert len({one.hash for one in found}) == 1 and [len(part) for part in found[2].examples or ()] == [1, 1]
    broken = [{"messages": [{"role": "user", "content": "a"}]}, *rows]
    table.write_table(arrow.Table.from_pylist(broken[::-1]), folders[2] / "all.parquet", row_group_size=1)
    with pytest.raises(UserError, match=r"all.parquet, row 3 has no message of the assistant with a loss"):
        prepare(DataConfig(source=str(folders[2])), tokenizer=small_bpe)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    seq=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_each_example_is_whole_in_one_row_unless_it_is_longer(sizes, seq, seed):
    answer = np.concatenate([np.arange(p + a) >= p for p, a in sizes])
    examples = Examples(np.arange(len(answer)), answer, np.cumsum([0, *(p + a for p, a in sizes)]))
    fits = [i for i, (p, _) in enumerate(sizes) if p <= seq]
    if not fits:
        with pytest.raises(UserError, match="no example has a part of its answer in its first"):
            ExampleRows(examples, seq=seq, seed=seed, fill=0)
        return
    rows = ExampleRows(examples, seq=seq, seed=seed, fill=0)
    count = len(rows.packed.rows)
    wanted = [t for i in fits for t in range(examples.begins[i], min(examples.begins[i] + seq + 1, examples.begins[i + 1]))]
    for epoch in range(3):
        inputs, targets = rows.batch(epoch * count, count, seq=seq, document=0)
        assert sorted(targets[targets >= 0].tolist()) == [t for t in wanted if answer[t]]
        assert (inputs + 1 == targets)[targets >= 0].all()  # the token before a target is its own example's
        assert rows.counted(epoch * count, count, seq=seq) == (targets >= 0).sum()
        assert (targets >= 0).any(axis=1).all()
    assert rows.packed.cut == sum(p + a > seq + 1 for p, a in sizes if p <= seq)
    assert rows.packed.dropped == len(sizes) - len(fits)
    room = seq + 1
    if all(p + a <= room for p, a in sizes):
        full = [sum(last - first for first, last in row) for row in rows.packed.rows]
        following = [row[0][1] - row[0][0] for row in rows.packed.rows[1:]]
        assert all(a + b > room for a, b in zip(full, following, strict=False))  # no row is begun too early


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20),
    seq=st.integers(18, 40),
    seed=st.integers(0, 99),
)
def test_masked_rows_say_where_each_example_begins(sizes, seq, seed):
    answer = np.concatenate([np.arange(p + a) >= p for p, a in sizes])
    examples = Examples(np.arange(len(answer)), answer, np.cumsum([0, *(p + a for p, a in sizes)]))
    packed = {masked: ExampleRows(examples, seq=seq, seed=seed, fill=-5, masked=masked) for masked in (True, False)}
    rows, count = packed[True], len(packed[True].packed.rows)
    assert rows.packed.cut == rows.packed.dropped == 0
    free = [seq + 1 - sum(last - first for first, last in row) for row in rows.packed.rows]
    assert sum(room >= (seq + 1) / 2 for room in free) <= 1  # two such rows would have been one
    inputs, targets = rows.batch(3, count, seq=seq, document=0)
    starts = rows.starts(3, count, inputs)
    assert starts is not None and packed[False].starts(0, count, inputs) is None and starts.dtype == np.int32
    begins = set(examples.begins.tolist())
    for row in range(count):
        at = np.arange(seq)
        first = inputs[row, starts[row]]  # of each token the first of its example
        real = inputs[row] >= 0
        assert set(first[real].tolist()) <= begins and (inputs[row] - first == at - starts[row])[real].all()
        assert (starts[row][~real] == at[~real][:1]).all()  # the free rest is none of an example's
        assert (np.isin(targets[row], inputs[row] + 1) | (targets[row] < 0)).all()
    again = Repeated(rows, 2)
    assert np.array_equal(again.starts(3, 3, inputs), np.concatenate([rows.starts(n, 1, inputs) for n in (1, 0, 1)]))


def test_best_fit_decreasing_leaves_less_room():
    lengths = np.random.default_rng(3).integers(2, 40, 400)
    answer = np.ones(lengths.sum(), bool)
    examples = Examples(np.arange(len(answer)), answer, np.cumsum([0, *lengths]))
    rows = {masked: len(ExampleRows(examples, seq=63, seed=1, fill=0, masked=masked).packed.rows) for masked in (True, False)}
    assert rows[True] <= 1.02 * lengths.sum() / 64 < 1.1 * rows[True] < rows[False]


def test_documents_of_a_text_begin_with_their_separator():
    tokens = np.array([[5, 1, 9, 1, 1], [9, 9, 0, 0, 9]])
    assert document_starts(tokens, 9).tolist() == [[0, 0, 2, 2, 2], [0, 1, 1, 1, 4]]


def test_epochs_and_seeds_have_orders_of_their_own():
    examples = Examples(np.arange(300), np.arange(300) % 3 > 0, np.arange(0, 301, 3))
    found = {
        tuple(ExampleRows(examples, seq=5, seed=seed, fill=0).batch(epoch * 50, 50, seq=5, document=0)[0][:, 0].tolist())
        for seed in range(2)
        for epoch in range(2)
    }
    assert len(found) == 4
    drawn = ExampleRows(examples, seq=5, seed=1, fill=0, order="random")
    first = drawn.batch(0, 100, seq=5, document=0)[0][:, 0].tolist()
    assert 30 < len(set(first)) < 50 and first[60:] == drawn.batch(60, 40, seq=5, document=0)[0][:, 0].tolist()


def test_validation_looks_at_answers_alone_spread_over_all(small_bpe):
    examples = Examples(np.arange(300), np.arange(300) % 3 > 0, np.arange(0, 301, 3))
    whole = ExampleValidation(examples, seq=5, fill=0)
    assert (whole.windows, whole.targets) == (50, 200)
    few = ExampleValidation(examples, seq=5, max_tokens=50, fill=0)
    batches = list(few.batches(3))
    assert [len(targets) for _, targets in batches] == [3, 3, 3, 1]
    assert [int(inputs[0]) for part, _ in batches for inputs in part] == list(range(0, 300, 30))
    assert few.targets == 40 and few.text_bytes(np.ones(300, np.int64)) == 40
    assert (
        ExampleValidation(Examples(np.zeros(4, int), np.arange(4) > 1, np.array([0, 4])), seq=5, fill=0).text_bytes(np.ones(1)) == 2
    )
    assert Packed(examples, [3, 1], seq=5, fill=0).rows == [[(9, 12), (3, 6)]]


@pytest.mark.parametrize(
    "record, message",
    [
        ({"prompt": "a"}, r"line 2 has: prompt; expected texts named prompt and answer \(or completion\), messages"),
        ({"prompt": "a", "answer": None}, r"line 2 has: prompt, answer \(nothing\); expected texts"),
        ({"instruction": "a", "input": 3, "output": "b"}, "line 2 has an instruction 'a' and an input 3, expected texts"),
        ({"instruction": "a", "output": ""}, "line 2 has an empty answer"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, r"there is no training on preferences \(DPO\)"),
        ({"conversations": []}, "line 2 has no message of the assistant with a loss"),
        ({"conversations": [{"from": "gpt", "value": 3}]}, "line 2, message 1, has the content 3, expected a text"),
        ({"conversations": [{"from": "observation", "value": "a"}]}, "the role 'observation', expected a role .human, gpt, "),
        ({"messages": "[{"}, "line 2 has messages that are no JSON"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}, "line 2 has: prompt, completion; expected texts"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": []}, "line 2 has no message of the assistant"),
        (
            {"system": "b", "messages": [{"role": "system", "content": "a"}]},
            "has a system and a message of the system, expected one",
        ),
        ({"system": 3, "messages": [{"role": "user", "content": "a"}]}, "line 2 has a system 3, expected a text"),
        ({"prompt": "a", "answer": "b", "chat_template_kwargs": {"a": 1}}, "a record with chat_template_kwargs"),
        ({"prompt": "a", "answer": ""}, "line 2 has an empty answer"),
        ({"prompt": "a", "answer": 3}, "line 2 has: prompt, answer; expected texts"),
        ([1], "line 2 has a message 1, expected a role"),
        (3, "line 2 has: int; expected"),
        ({"messages": [{"role": "user", "content": "a"}]}, "line 2 has no message of the assistant"),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            r"line 2 has a message .*'tool'.* expected a role \(system, developer, user",
        ),
        ({"messages": "hi"}, "line 2 has a message 'hi', expected a role"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "line 2 has a message .* expected a role"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0}]}, "no message of the assistant with a loss"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}, "weight or train 0.5, expected 0, 1"),
        ({"messages": [{"role": "assistant", "content": "a", "train": "no"}]}, "weight or train 'no', expected 0, 1"),
        ({"messages": [{"role": "user", "content": "a", "train": True}]}, "asks for a loss of a message of the user"),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": 1}]}]},
            "line 2 has a message with tool_calls .*, which barellm cannot obey",
        ),
        ({"messages": [{"role": "assistant", "content": "a"}], "tools": [{}]}, "a record with tools .*, which barellm"),
        ({"prompt": "a", "answer": "b", "weight": 0.5}, "line 2 has a record with weight 0.5, which barellm cannot"),
        ({"prompt": "a", "answer": "b", "train": False}, "line 2 has a record with train False, which barellm cannot"),
        ({"prompt": "a", "answer": "b", "system": "Be brief."}, "line 2 has a system 'Be brief.' beside a text"),
        ({"prompt": "a", "answer": "\ud800"}, r"line 2 has \\ud800 alone in its text"),
        ({"prompt": "", "answer": "b"}, "a.jsonl, line 2 has no token in its prompt, and the tokenizer bytes has no end"),
    ],
)
def test_a_record_that_is_no_example_is_named_by_its_line(record, message, tmp_path):
    path = written(tmp_path / "a.jsonl", [*sums(1), record])
    with pytest.raises(UserError, match=message):
        prepare(DataConfig(source=str(path), tokenizer="bytes"))


def test_an_empty_prompt_needs_a_token_before_the_answer(tmp_path, small_bpe):
    path = written(tmp_path / "a.jsonl", [{"prompt": "", "answer": "b"}, *sums(1)])
    examples = prepare(DataConfig(source=str(path)), tokenizer=small_bpe).examples[0]
    assert examples.prompt() == [small_bpe.eot] and examples.answer.tolist() == [False, True, True]


def test_a_record_with_a_text_is_a_text_whatever_else_it_has(tmp_path):
    path = written(tmp_path / "a.jsonl", [{"text": "some words of a text", "answer": "b"}] * 3)
    data = prepare(DataConfig(source=str(path), tokenizer="bytes"))
    assert data.examples is None and len(data.train) + len(data.val) == 60


def test_one_example_and_other_orders_are_refused(tmp_path):
    path = written(tmp_path / "a.jsonl", sums(1))
    with pytest.raises(UserError, match="has 1 example, expected at least 2"):
        prepare(DataConfig(source=str(path), tokenizer="bytes"))
    four = written(tmp_path / "b.jsonl", sums(4))
    with pytest.raises(UserError, match=r"data.val_fraction is 0.9, which takes all 4 examples of .*b.jsonl"):
        prepare(DataConfig(source=str(four), tokenizer="bytes", val_fraction=0.9))
    assert len(prepare(DataConfig(source=str(path), tokenizer="bytes"), whole=True).examples[1]) == 1
    with pytest.raises(UserError, match=r"data.order is 'llmc', and .* has prompts and answers"):
        prepare(DataConfig(source=str(path), tokenizer="bytes", order="llmc"))


def test_what_does_not_go_with_stages_is_refused_at_the_start(tmp_path, refused):
    text = tmp_path / "a.txt"
    text.write_text("some words of a text\n" * 40)
    path = written(tmp_path / "a.jsonl", sums(9))
    run = ("train", "speedrun-small", "--device", "reference", "--out", tmp_path / "run", "--data.tokenizer", "bytes")
    message = refused(*run, "--data", text, "--data.order", "llmc")
    assert message.startswith("data.order is 'llmc', and the runs of speedrun have stages, whose rows change their length")
    message = refused(*run, "--data", path, "--data.order", "epoch")
    assert "a.jsonl has prompts and answers, and the runs of speedrun have stages" in message


@pytest.mark.extended
def test_documents_of_a_text_are_masked_by_option(tmp_path, capsys, refused):
    """The loss of the first step is another, the run resumes as it began, and eval gives the loss that it ended with."""
    text = written(tmp_path / "a.jsonl", [{"text": f"{i} squared is {i * i}\n"} for i in range(60)])
    sizes = ["--model.layers", "1", "--model.d_model", "16", "--model.heads", "2", "--seq", "24", "--batch", "4"]
    usual = ["train", "shakespeare-char", "--data", text, "--data.tokenizer", "bpe", "--data.bpe_vocab", "270", *sizes]
    usual += ["--device", "reference", "--steps", "4", "--optim.schedule", "constant", "--data.order", "epoch"]

    def losses(name: str, *words: str) -> list[float]:
        assert main([*map(str, usual), *words, "--out", str(tmp_path / name)]) == 0
        return [row["loss"] for row in metrics.read(tmp_path / name / "metrics.jsonl") if row["kind"] == "train"]

    plain, masked, cut = (
        losses("a"),
        losses("b", "--data.document_mask", "on"),
        losses("c", "--data.document_mask", "on", "--steps", "2"),
    )
    assert len(masked) == 4 and plain != masked and masked[:2] == cut
    assert main(["train", "--out", str(tmp_path / "c"), "--resume", "--steps", "4", "--device", "reference"]) == 0
    assert [row["loss"] for row in metrics.read(tmp_path / "c" / "metrics.jsonl") if row["kind"] == "train"] == masked
    last = [row["val_nats"] for row in metrics.read(tmp_path / "b" / "metrics.jsonl") if row["kind"] == "eval"][-1]
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "b"), "--device", "reference", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nats"] == pytest.approx(last, rel=1e-6)
    usual[usual.index("bpe")] = "bytes"
    said = refused(*usual, "--data.document_mask", "on", "--out", tmp_path / "d")
    assert said.startswith("data.document_mask is on, and the tokenizer bytes has no token that begins a document: expected off")
    said = refused("train", "sparse-char", "--data", text, "--data.document_mask", "on", "--out", tmp_path / "e", "--device", "cpu")
    assert said.startswith("data.document_mask is on, and the architecture sparse has no such mask")


@pytest.mark.extended
@pytest.mark.parametrize("mask", ["auto", "off"])
def test_a_resumed_fine_tuning_ends_as_one_that_went_through(mask, tmp_path, capsys):
    """From another run's weights; with accumulation, so that the micro-batches of a step have unequal numbers of targets."""
    text = tmp_path / "a.txt"
    text.write_text("some words of a text\n" * 40)
    path = written(tmp_path / "a.jsonl", sums(30))
    sizes = ["--model.layers", "1", "--model.d_model", "16", "--model.heads", "2", "--seq", "24", "--batch", "2"]
    first = ["train", "shakespeare-char", "--data", text, "--data.tokenizer", "bytes", "--steps", "1", *sizes]
    device = ["--device", "reference", "--train.eval_tokens", "48"]
    assert main([*map(str, first), *device, "--out", str(tmp_path / "base")]) == 0
    tune = ["train", "shakespeare-char", "--init-from", str(tmp_path / "base"), "--data", str(path), "--batch", "2"]
    tune += ["--seq", "24", "--train.gradient_accumulation_steps", "3", "--optim.schedule", "constant", *device]
    tune += ["--data.document_mask", mask]
    assert main([*tune, "--steps", "7", "--out", str(tmp_path / "whole")]) == 0
    assert main([*tune, "--steps", "3", "--out", str(tmp_path / "cut")]) == 0
    said = capsys.readouterr().out
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["data"]["document_mask"] == ("off" if mask == "off" else "on")
    assert f"each sees {'those before it' if mask == 'off' else 'itself alone'}" in said
    assert "27 examples in" in said and "the loss is of their answers alone" in said
    assert main(["train", "--out", str(tmp_path / "cut"), "--resume", "--steps", "7", "--device", "reference"]) == 0

    def losses(name: str) -> list[float]:
        return [row["loss"] for row in metrics.read(tmp_path / name / "metrics.jsonl") if row["kind"] == "train"]

    assert losses("cut") == losses("whole") and len(losses("whole")) == 7
    weights = [next((tmp_path / name).glob("checkpoints/step-000007/weights.safetensors")) for name in ("cut", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
