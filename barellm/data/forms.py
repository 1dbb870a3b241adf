"""Formats of fine-tuning examples and their conversion to `Example`: prompt and answer or completion (TRL), messages (OpenAI),
conversations (ShareGPT), instruction, input and output (Alpaca)."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from barellm.chat.templates import text_of
from barellm.data import chats, conversations, files, reading, records
from barellm.errors import UserError, shown
from barellm.jsontext import loads

FORMAT = 1  # of the rendering: counts up when the same file would give other tokens
NEUTRAL = (None, True, 1, "", "1", "1.0", "true", "True", [], {})  # values of a key that ask for nothing
OTHERS = {  # keys that other programs obey and barellm does not: of a record, and of a message
    "record": ("weight", "train", "tools", "functions", "history", "loss_mask", "chat_template_kwargs"),
    "message": ("tool_calls", "function_call", "tool_call_id", "train_detail", "reasoning_content", "thinking"),
}
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}  # ShareGPT's -> roles
TALKS = ("messages", "conversations")  # keys of a list of messages
# What Alpaca's own training puts around an instruction without an input, and with one (Taori et al. 2023).
TASK = "Below is an instruction that describes a task"
WITH_INPUT = ", paired with an input that provides further context"
REQUEST = ". Write a response that appropriately completes the request.\n\n### Instruction:\n"
EXPECTED = f"texts named {records.EXAMPLES}"


@dataclass(frozen=True)
class Example:
    """One example. `parts`: its texts, each with True (answer, trained on), False (prompt) or None (answer without loss).
    `conversation`: rendered by the model's chat template if it has one; `parts` are the fallback. `where`: location for errors."""

    parts: list[tuple[str, bool | None]]
    where: str
    conversation: conversations.Conversation | None = None


def example_files(source: str) -> list[Path]:
    """The files that a source names if they hold fine-tuning examples, judged by the first record; [] for plain text or no such
    source. In a folder, hidden files, README and LICENSE are ignored and every other file must hold records."""
    if source in ("", "stdlib"):
        return []
    found = []
    for path in files.named(source):
        inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        inside = [p for p in inside if not p.name.startswith((".", "README", "LICENSE"))] if path.is_dir() else inside
        found += inside
        if any(reading.format_of(p, reading.Layout()) == "text" for p in inside):
            return []
    return found if found and _has_examples(found[0]) else []


def _has_examples(path: Path) -> bool:
    """Whether the first record is a fine-tuning example; one with the pretraining field "text" is plain text."""
    _, first = next(reading.each_record(path), ("", None))
    if isinstance(first, list):
        return bool(first) and isinstance(first[0], dict) and not first[0].keys().isdisjoint(("role", "from"))
    if not isinstance(first, dict) or reading.Layout().field in first:
        return False
    return not first.keys().isdisjoint(("answer", "completion", *TALKS)) or first.keys() >= {"instruction", "output"}


def read_examples(paths: Iterable[Path]) -> tuple[list[Example], str]:
    """All examples of the files, and a hash of their content for cache keys."""
    digest, found = xxhash.xxh3_128(f"{FORMAT}".encode()), []
    for path in paths:
        for where, record in reading.each_record(path):
            found.append(example(record, where))
            for text, _ in found[-1].parts:
                records.need_characters(text, where)
            digest.update(repr(found[-1].parts).encode())
    return found, digest.hexdigest()


def example(record: Any, where: str) -> Example:
    """Convert a record of any supported format to an `Example`; a list is taken for its messages. The first form that fits counts:
    messages (a key of TALKS), a prompt and an answer (texts, or two lists of messages), instruction and output. UserError, which
    begins with `where`, for any other record, and for fields that ask for something that training would not do."""
    record = {"messages": record} if isinstance(record, list) else record
    if not isinstance(record, dict):
        raise UserError(f"{where} has: {type(record).__name__}; expected {EXPECTED}")
    _check_obeyed(record, "record", where)
    for key in TALKS:
        if record.get(key) is not None:
            return _conversation(_messages(record[key], where), record, where)
    prompt, answer = record.get("prompt"), record.get("answer", record.get("completion"))
    if isinstance(prompt, list) and isinstance(answer, list):
        return _conversation([*prompt, *answer], record, where, untrained=len(prompt))
    if prompt is None and record.keys() >= {"instruction", "output"}:
        prompt, answer = _instruction(record, where), record["output"]
    if not isinstance(prompt, str) or not isinstance(answer, str):
        fields = ", ".join(f"{key} (nothing)" if value is None else str(key) for key, value in record.items())
        raise UserError(f"{where} has: {fields}; expected {EXPECTED}{records.preferences(record)}")
    if record.get("system") not in NEUTRAL:
        raise UserError(f"{where} has a system {shown(record['system'])} beside a text: expected it in the prompt, or messages")
    if not answer:
        raise UserError(f"{where} has an empty answer")
    return Example([(prompt, False), (answer, True)], where)


def _instruction(record: dict, where: str) -> str:
    """The prompt of an Alpaca record, in the wording of Alpaca's training script; the answer follows without a separator."""
    instruction, given = record["instruction"], record.get("input") or ""
    if not isinstance(instruction, str) or not isinstance(given, str):
        raise UserError(f"{where} has an instruction {shown(instruction)} and an input {shown(given)}, expected texts")
    if not given:
        return f"{TASK}{REQUEST}{instruction}\n\n### Response:"
    return f"{TASK}{WITH_INPUT}{REQUEST}{instruction}\n\n### Input:\n{given}\n\n### Response:"


def _check_obeyed(found: dict, what: str, where: str) -> None:
    """Raise a UserError for a key that gives the record or message a meaning which barellm would not keep."""
    for key in OTHERS[what]:
        if (value := found.get(key)) not in NEUTRAL:
            raise UserError(f"{where} has a {what} with {key} {value!r:.40}, which barellm cannot obey: expected none")


def _has_loss(message: dict, where: str) -> bool:
    """Whether a message is trained on: assistant messages unless OpenAI's `weight` (0 or 1) or `train` says otherwise."""
    requested = [message[key] for key in ("weight", "train") if message.get(key) is not None]
    if wrong := [value for value in requested if value not in (0, 1)]:
        raise UserError(f"{where} has a message with weight or train {wrong[0]!r:.40}, expected 0, 1, false or true")
    if message["role"] != "assistant" and any(requested):
        raise UserError(f"{where} asks for a loss of a message of the {message['role']}: only the assistant's have one")
    return message["role"] == "assistant" and all(requested)


def _messages(found: Any, where: str) -> list[Any]:
    """The list of messages in a record's field, where a CSV cell has it as JSON text."""
    if isinstance(found, str) and found.lstrip().startswith("["):
        try:
            found = loads(found)
        except ValueError as error:
            raise UserError(f"{where} has messages that are no JSON: {error}") from None
    return found if isinstance(found, list) else [found]


def _conversation(messages: list[Any], record: dict, where: str, *, untrained: int = 0) -> Example:
    """Convert a list of messages: `parts` renders each as a line `User: ...` for models without a chat template. Assistant messages
    are trained on, but for the first `untrained` messages."""
    system = record.get("system") or ""
    if not isinstance(system, str):
        raise UserError(f"{where} has a system {shown(system)}, expected a text")
    parts: list[tuple[str, bool | None]] = []
    plain, losses = [], []
    for number, message in enumerate(messages, 1):
        role, content = _role(message, where)
        if system and number == 1:
            if role in ("system", "developer"):
                raise UserError(f"{where} has a system and a message of the {role}, expected one of them")
            parts.append((f"{chats.LINES['system']}: {system}\n", False))
            plain, losses, untrained = [{"role": "system", "content": system}], [False], untrained + 1
        _check_obeyed(message, "message", where)
        text = text_of(content, f"{where}, message {number},")
        losses.append(_has_loss({**message, "role": role}, where) and len(losses) >= untrained)
        plain.append({"role": role, "content": content})
        if role == "assistant":
            parts += [(f"{chats.LINES[role]}:", False), (f" {text}", losses[-1] or None)]
        else:
            parts.append((f"{chats.LINES[role]}: {text}\n", False))
    if not any(losses):
        raise UserError(f"{where} has no message of the assistant with a loss, whose messages are the answers")
    return Example(parts, where, conversations.Conversation(plain, losses, where))


def _role(message: Any, where: str) -> tuple[str, Any]:
    """The role and the content of a message, or of ShareGPT's from and value."""
    if not isinstance(message, dict):
        raise UserError(f"{where} has a message {shown(message)}, expected a role ({', '.join(chats.LINES)}) and a content")
    theirs = "role" not in message and "from" in message
    role, content = (message.get("from"), message.get("value")) if theirs else (message.get("role"), message.get("content"))
    role = SPEAKERS.get(role, role) if theirs and isinstance(role, str) else role
    if role not in tuple(chats.LINES):  # a list of a role has no hash
        known = ", ".join((*SPEAKERS, *chats.LINES) if theirs else chats.LINES)
        raise UserError(f"{where} has a message with the role {shown(role)}, expected a role ({known}) and a content")
    return str(role), content
