"""A model with its conventions, from the folder that comes in through training and talking to the folder that goes out."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from barellm import load
from barellm.chat import conventions
from barellm.cli import chat
from barellm.cli.main import main
from barellm.config import DataConfig
from barellm.data import examples, forms, reading
from barellm.data.kinds import load_tokenizer
from barellm.data.sources import prepare
from barellm.errors import UserError
from barellm.generation.decode import open_decoder
from barellm.generation.samplers import Sampling
from tests.chat import families
from tests.chat.test_templates import CHATML
from tests.interop.models import TINY, hugging_face, random_arrays, their_tensors

ROWS = 448
GENERATION = {"eos_token_id": [394, 396], "temperature": 0.0, "pad_token_id": 394, "unknown": [1]}
REFERENCE = ("--device", "reference")


def source(folder, *, rows: int = ROWS, family: str = "qwen", template: str = CHATML, positions: int = 128):
    model = replace(TINY, vocab_size=rows, padded_vocab=0, max_seq=positions)
    hugging_face(folder, model, their_tensors(random_arrays(model)), bos_token_id=None, eos_token_id=[394, 396])
    families.folder(folder, family, template=template)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    assert main(["import", str(source(folder / "hf")), "--out", str(folder / "run")]) == 0
    return folder / "run"


def test_export_gives_back_what_came_in(run, tmp_path):
    assert main(["export", str(run), "--format", "huggingface", "--out", str(tmp_path / "out")]) == 0
    came = run.parent / "hf"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (came / name).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == ROWS and config["eos_token_id"] == [394, 396] and config["bos_token_id"] is None
    assert not (tmp_path / "out" / conventions.IDS).exists()


def test_sample_chat_and_eval_read_what_another_program_wrote(run, monkeypatch, capsys, refused):
    """As the checkpoint that import makes of it; what cannot says which command helps."""
    folder, found = run.parent / "hf", {}
    (run.parent / "text.txt").write_text("The quick brown fox\n" * 9)
    for path in (run, folder):
        assert main(["sample", str(path), *REFERENCE, "-n", "6", "--json", "--prompt", "The"]) == 0
        row = json.loads(capsys.readouterr().out)
        assert main(["eval", str(path), *REFERENCE, "--data", str(run.parent / "text.txt"), "--split", "all", "--json"]) == 0
        loss = json.loads(capsys.readouterr().out)["nats"]
        found[path] = row["tokens"], loss, talk(path, monkeypatch, capsys, "Hi\n").partition("shows more.")[2]
        assert row["checkpoint"].startswith(str(path))
    assert found[run] == found[folder] and len(found[run][0]) == 6
    assert main(["sample", str(folder), *REFERENCE, "-n", "2", "--weights", "int8"]) == 0
    said = refused("quantize", folder, "--weights", "int8", "--out", run.parent / "few", "--tokens", "0")
    assert f"quantize what barellm import {folder} --out RUN makes" in said


@pytest.mark.parametrize("name, hint", [("qwen3-0.6b", "is a preset"), ("qwen3-0.5b", "did you mean 'qwen3-0.6b'?")])
def test_the_name_of_a_preset_is_no_model(refused, name, hint):
    assert hint in refused("chat", name) and "does not exist, expected a run or checkpoint" in refused("chat", name)


def test_named_templates_come_back_where_they_were(tmp_path, monkeypatch, capsys, refused):
    folder = source(tmp_path / "hf")
    named = folder / conventions.NAMED / "short.jinja"
    named.parent.mkdir()
    named.write_text("{{ messages[0].content }}")
    assert main(["import", str(folder), "--out", str(tmp_path / "run")]) == 0
    assert f"next     barellm chat {tmp_path / 'run'}\n         barellm train gpt2-124m" in capsys.readouterr().out
    plain = talk(tmp_path / "run", monkeypatch, capsys, "Hi\n")
    assert plain != talk(tmp_path / "run", monkeypatch, capsys, "Hi\n", "--template", "short")
    assert "expected one that the model has: default, short" in refused("chat", tmp_path / "run", "--template", "long")
    assert main(["export", str(tmp_path / "run"), "--format", "hf", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / named.relative_to(folder)).read_bytes() == named.read_bytes()


@pytest.mark.parametrize("file", ["tokenizer.model", "tekken.json"])
def test_a_tokenizer_that_is_not_read_is_named(tmp_path, refused, file):
    folder = source(tmp_path / "hf")
    (folder / "tokenizer.json").rename(folder / file)
    said = refused("import", folder, "--out", tmp_path / "run")
    assert f"{folder} has {file}, and what is read is tokenizer.json" in said and "--tokenizer" in said
    assert "pip install 'transformers<5' sentencepiece protobuf" in said
    assert main(["import", str(folder), "--out", str(tmp_path / "run"), "--tokenizer", "bytes"]) == 0


def test_a_row_without_an_id_is_never_drawn(run):
    tokenizer = load_tokenizer(next(run.glob("checkpoints/*")), rows=ROWS)
    assert tokenizer.vocab_size < ROWS
    tokenizer.unused = [3, 5]

    class Session:
        tensors: dict = {}  # noqa: RUF012

        def read(self, name):
            return np.where(np.arange(ROWS) >= tokenizer.vocab_size, 9.0, 0.0).astype(np.float32)

        def write(self, name, values): ...
        def run(self, name, **how): ...

    model: Any = replace(TINY, vocab_size=ROWS, padded_vocab=0)
    session: Any = Session()
    decoder = open_decoder(session, model, tokenizer, positions=20)
    drawn = set(decoder.tokens([ROWS - 1], count=2000, how=Sampling(temperature=5, repetition_penalty=1.1)))
    assert max(drawn) < tokenizer.vocab_size and not drawn & {3, 5} and len(drawn) > 300


def test_an_id_without_a_row_is_refused_where_a_text_has_it(tmp_path, refused):
    folder = source(tmp_path / "hf", rows=400)
    assert main(["import", str(folder), "--out", str(tmp_path / "run")]) == 0
    with load(tmp_path / "run", device="reference") as model:
        assert model.tokenizer.vocab_size == 401 and model.generate("a</think>", max_new_tokens=1) is not None
        with pytest.raises(UserError, match=r"the token '</tool_call>', id 400, and the model has 400 rows"):
            model.generate("a</tool_call>")
    assert "id 400" in refused("sample", tmp_path / "run", "--prompt", "</tool_call>")
    (tmp_path / "text").write_text("words of a text </tool_call> " * 99)
    assert "id 400" in refused("train", "--init-from", folder, "--data", tmp_path / "text", "--out", tmp_path / "x")
    source(tmp_path / "other", rows=380)
    assert "it is of another model" in refused("import", tmp_path / "other", "--out", tmp_path / "y")


def test_special_tokens_in_a_prompt_and_ids_and_the_folder_s_defaults(run, capsys, refused):
    def row(*words: str) -> dict:
        capsys.readouterr()
        assert main(["sample", str(run), *REFERENCE, "-n", "6", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    ids = "395,312,198,396"
    found = row("--prompt-ids", ids)
    assert row("--prompt-ids", ids, "--temperature", "0")["tokens"] == found["tokens"]  # as generation_config.json says
    assert any(row("--prompt-ids", ids, "--temperature", "9", "--seed", str(i))["tokens"] != found["tokens"] for i in range(3))
    assert row("--prompt", "<|im_start|>user\n<|im_end|>", "--special")["tokens"] == found["tokens"]
    assert row("--prompt", "<|im_start|>user\n<|im_end|>")["tokens"] != found["tokens"]
    for wrong in ("", "1,x", "448", "-1"):
        assert "--prompt-ids is" in refused("sample", run, f"--prompt-ids={wrong}")
    with load(run, device="reference") as model:
        messages = [{"role": "user", "content": ""}]
        assert model.tokenizer.chat(messages, add_generation_prompt=False).tolist()[:4] == [395, 312, 198, 396]
        answer = model.chat(messages, max_new_tokens=5)
        assert answer == "".join(model.stream(model.tokenizer.chat(messages), max_new_tokens=5))


def talk(run, monkeypatch, capsys, lines: str, *words: str) -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    capsys.readouterr()
    assert main(["chat", str(run), *REFERENCE, "-n", "4", *words]) == 0
    return capsys.readouterr().out


def test_a_talk(run, monkeypatch, capsys):
    said = talk(run, monkeypatch, capsys, "Hi\n/help\n/sytem\n\n/exit\nnever\n")
    assert "its chat template\nCtrl-C ends an answer, Ctrl-D the talk; /help shows more." in said
    assert "/reset" in said and "unknown command '/sytem', did you mean '/system'?" in said
    with load(run, device="reference") as model:
        assert model.chat([{"role": "user", "content": "Hi"}], max_new_tokens=4) in said
        system = {"role": "system", "content": "Be\nbrief"}
        again = model.chat([system, {"role": "user", "content": "Hi"}], max_new_tokens=4)
    assert again in talk(run, monkeypatch, capsys, "Hi\n", "--system", r"Be\nbrief")
    long = "word " * 200
    assert "the model 128 positions" in talk(run, monkeypatch, capsys, f"{long}\nHi\n")


def test_the_oldest_messages_go_first_and_the_system_message_stays(run):
    tokenizer = load_tokenizer(next(run.glob("checkpoints/*")))
    args = type("Args", (), {"system": "S", "thinking": "dim", "no_thinking": False, "template": None})
    held = chat.Talk(tokenizer, 90, 10, args)  # pyright: ignore[reportArgumentType]
    for i in range(9):
        held.messages += [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]
    held.messages.append({"role": "user", "content": "last"})
    ids, opened = held.ids()
    assert len(ids) <= 80 and not opened and held.messages[0]["role"] == "user" and 2 < len(held.messages) < 19
    assert tokenizer.decode(ids).startswith("system\nS\nuser\nq") and held.messages[-1]["content"] == "last"


def test_ctrl_c_ends_an_answer_and_not_the_talk(run, monkeypatch, capsys):
    from barellm.generation import writing

    real, turns = writing.write, []

    def write(*args, **options):
        turns.append(1)
        for token in real(*args, **options):
            if len(turns) == 1:
                raise KeyboardInterrupt
            yield token

    monkeypatch.setattr(writing, "write", write)
    talk(run, monkeypatch, capsys, "Hi\nHi\n")
    assert len(turns) == 2


def test_a_turn_ends_with_what_the_template_writes_behind_an_answer(tmp_path):
    turn = "{% for m in messages %}<start_of_turn>{{ m.role }} {{ m.content|trim }}<end_of_turn>{% endfor %}"
    made = load_tokenizer(families.folder(tmp_path / "g", "gemma", template=turn))
    assert made.ends == {made.special["<eos>"], made.special["<bos>"]}
    assert made.turn_ends == made.ends | {made.special["<end_of_turn>"]} and made.turn_stops == []
    plain = load_tokenizer(families.folder(tmp_path / "p", "llama2"))
    assert plain.turn_ends == plain.ends and plain.turn_stops == ["\nUser:"]


@pytest.mark.parametrize(
    "how, wanted", [("show", "a<think>b</think>c"), ("hide", "ac"), ("dim", "a\033[2m<think>b</think>\033[0mc")]
)
def test_thinking_is_shown_dim_or_hidden_wherever_it_is_cut(how, wanted, capsys):
    text = "a<think>b</think>c"
    for size in (1, 2, 5, 30):
        shown = chat.Thinking(how, False)
        for at in range(0, len(text), size):
            shown.feed(text[at : at + size])
        shown.finish()
        assert capsys.readouterr().out == wanted + "\n"
    shown = chat.Thinking("hide", True)
    shown.feed("b</think>c <thin")
    shown.finish()
    assert capsys.readouterr().out == "c <thin\n"


def test_examples_are_written_by_the_template_and_end_with_its_token(tmp_path):
    tokenizer = load_tokenizer(families.folder(tmp_path / "f", "qwen", template=CHATML))
    said = [("user", "Hi <|im_end|>"), ("assistant", "Hello"), ("user", "Bye <|im_end|>."), ("assistant", "Good\nbye")]
    record = {"messages": [{"role": role, "content": text} for role, text in said]}
    record["messages"][1]["weight"] = 0
    example = forms.example(record, "here")
    found = examples.encode_examples([example], tokenizer)
    whole = tokenizer.chat([{"role": r, "content": t} for r, t in said], add_generation_prompt=False)
    assert found.tokens.tolist() == whole.tolist()
    trained = found.tokens[found.answer].tolist()
    assert trained == [*tokenizer.encode("Good\nbye").tolist(), tokenizer.special["<|im_end|>"]]
    prompt = tokenizer.chat([{"role": r, "content": t} for r, t in said[:3]]).tolist()
    assert found.tokens[: len(prompt)].tolist() == prompt and not found.answer[: len(prompt)].any()
    backwards = load_tokenizer(families.folder(tmp_path / "g", "qwen", template="{{ messages[::-1] }}"))
    with pytest.raises(UserError, match="here: the chat template does not write message 2 behind those before it"):
        examples.encode_examples([example], backwards)


ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content|trim }}<|im_end|>\n{% endfor %}" + ASKED
MARKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content|trim }}<|im_end|>"
)
MARKS += "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
MARKS += "{% generation %}<|endoftext|>{% endgeneration %}" + ASKED  # which is of the last answer
TALK = [("user", "Hi"), ("assistant", "one"), ("user", "More"), ("assistant", "two")]


def trained(template: str, folder, talk=TALK, **first: Any) -> str:
    """The trained tokens as a text, | between runs of them; `first` goes to the first answer."""
    tokenizer = load_tokenizer(families.folder(folder, "qwen", template=template))
    messages = [{"role": role, "content": text} for role, text in talk]
    next(m for m in messages if m["role"] == "assistant").update(first)
    found = examples.encode_examples([forms.example({"messages": messages}, "file, line 7")], tokenizer)
    assert found.tokens.tolist() == tokenizer.chat(messages, add_generation_prompt=False).tolist()
    names = {i: name for name, i in tokenizer.special.items()}
    said = [names.get(i, tokenizer.token_bytes(i).decode()) for i in found.tokens.tolist()]
    return "".join(word if mark else "|" for word, mark in zip(said, found.answer.tolist(), strict=True)).strip("|")


def test_what_is_trained_is_marked_or_follows_from_prefixes(tmp_path):
    for template, end in ((PLAIN, ""), (MARKS, "<|endoftext|>")):
        both, second = trained(template, tmp_path), trained(template, tmp_path, weight=0)
        assert both.startswith("one<|im_end|>|") and both.endswith(f"|two<|im_end|>{end}") and second == f"two<|im_end|>{end}"
    words = (
        "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    runs = [run for run in trained(words, tmp_path).split("|") if run]
    with pytest.raises(UserError, match="does not write the answer in message 1, or not where it is trained"):
        trained(PLAIN, tmp_path, TALK[1:])  # nobody asks for the first answer
    assert runs == ["one\n", "two\n"]  # no special token ends an answer: all that the template writes of it


THINKS = "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1]|trim }}{% else %}{{ m.content }}{% endif %}"
FIRST = "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}"
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n"


@pytest.mark.parametrize(
    "template, answers",
    [  # the prompt's <think> is in no answer (DeepSeek-R1, QwQ), is closed at once (GLM 4.7), is in the last one alone (Qwen 3.5)
        (TURN + THINKS + "<|im_end|>{% endfor %}" + ASKED.replace("\n{%", "\n<think>\n{%"), ["{}<end>"] * 2),
        (
            "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' %}</think>{% endif %}" + THINKS
            + "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|><think>{% endif %}", ["</think>{}<end>"] * 2,
        ),
        (
            TURN + "{% if m.role == 'assistant' %}" + FIRST + "{% endif %}" + THINKS + "<|im_end|>{% endfor %}"
            + ASKED.replace("\n{%", "\n<think>\n{%"), ["{}<end>", "\n</think>\n\n{}<end>"],
        ),
    ],
)  # fmt: skip
def test_an_answer_begins_where_it_leaves_the_generation_prompt(template, answers, tmp_path):
    for first in ("one", "<b>one</b>", "<think>why</think>\none", "assistant"):
        talk = [TALK[0], ("assistant", first), *TALK[2:]]
        found = trained(template, tmp_path, talk).replace("<|im_end|>", "<end>").split("|")
        said = (first.rpartition("</think>")[2].strip(), "two")
        assert [run for run in found if run] == [end.format(text) for end, text in zip(answers, said, strict=True)]


@pytest.mark.parametrize(
    "template, message",
    [
        ("{% for m in messages if m.role != 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}", "message 2, or not where"),
        ("{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}", "does not write the answer in message 2"),
        ("{% generation %}{{ messages[-1].content }}{% endgeneration %}", "does not write the answer in message 2"),
        ("{{ messages[0].content }}{% generation %}{% endgeneration %}", "does not write the answer in message 2"),
        ("{{ messages[::-1] }}", "does not write message 2 behind those before it"),
        ("{{ raise_exception('no ' ~ messages[1].content) }}", "the chat template failed: TemplateError: no one"),
    ],
)
def test_a_template_that_hides_an_answer_is_refused_with_the_line(template, message, tmp_path):
    with pytest.raises(UserError, match=f"^file, line 7: .*{message}"):
        trained(template, tmp_path)


def test_the_line_is_that_of_the_conversation_that_a_template_refuses(tmp_path):
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    families.folder(tmp_path / "f", "qwen", template=CHATML + no_system)
    lines = [[{"role": role, "content": text} for role, text in TALK] for _ in range(5)]
    lines[3].insert(0, {"role": "system", "content": "Be brief"})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    with pytest.raises(UserError, match=r"a.jsonl, line 4: the chat template failed: TemplateError: System role not supported$"):
        prepare(DataConfig(source=str(tmp_path / "a.jsonl"), tokenizer=str(tmp_path / "f")))


def test_bits_per_byte_are_of_the_bytes_that_were_there(tmp_path, own_cache):
    text = "e\u0301 a\u030a na\u00efve ve word fox " * 400  # NFC joins what is apart
    (tmp_path / "text").write_text(text)
    families.folder(tmp_path / "f", "qwen")
    data = prepare(DataConfig(source=str(tmp_path / "text"), tokenizer=str(tmp_path / "f"), val_fraction=0.25))
    assert not data.tokenizer.exact and data.text_bytes is not None
    held = text[int(len(text) * 0.75) :]
    assert abs(data.text_bytes[1] - len(held.encode())) <= 40 and sum(data.text_bytes) == len(text.encode())
    assert 0 <= data.text_bytes[1] - data.validation(seq=32).text_bytes(data.byte_lengths) <= 3  # its first token is no target
    assert int(data.tokenizer.byte_lengths[data.val.array(0, len(data.val))].sum()) < data.text_bytes[1]
    whole = prepare(DataConfig(source=str(tmp_path / "text"), tokenizer=str(tmp_path / "f")), whole=True)
    assert whole.validation(seq=32).text_bytes(whole.byte_lengths) == len(text.encode())  # its first token is the separator


@pytest.mark.parametrize("family", list(families.SPECIAL))
def test_blocks_change_no_token(family, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(families.folder(tmp_path / family, family))
    text = "The quick brown fox\tjumps over  the lazy dog. It's 12345\nHello there,   how are\n\nyou naïve 🙂 é?\n" * 3
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(reading, "BLOCK", 20)
    found = list(reading.blocks(tmp_path / "a.txt", reading.Layout()))
    ids = [tokenizer.encode(found[0].text), *(tokenizer.encode_continued(block.text) for block in found[1:])]
    assert len(found) > 5 and [i for part in ids for i in part.tolist()] == tokenizer.encode(text).tolist()


def test_overfit_trains_on_the_first_batches_alone(tmp_path, capsys):
    (tmp_path / "text").write_text("".join(f"{i} squared is {i * i}\n" for i in range(400)))
    sizes = ["--model.layers", "1", "--model.d_model", "32", "--model.heads", "2", "--model.max_seq", "32", "--seq", "16"]
    words = ["--data", str(tmp_path / "text"), "--data.tokenizer", "bytes", "--batch", "2", "--steps", "60", "--lr", "1e-2"]
    command = ["train", "shakespeare-char", *words, *sizes, "--optim.warmup", "1", "--overfit", "1"]
    assert main([*command, *REFERENCE, "--out", str(tmp_path / "run")]) == 0
    assert "the first micro-batch again and again" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[-1] < 0.3 < 4 < losses[0] and not math.isnan(losses[-1])
