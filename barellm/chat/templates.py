"""Chat templates: messages become a text, in which it is known what is the template's own and what somebody said.

The text is what transformers' apply_chat_template gives. Rendering is in another process (worker.py): a template that loops or
grows ends with one line, and with nothing else."""

import atexit
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from barellm.errors import UserError, shown

SECONDS = 10.0  # for one request
SAID = "\u2603"  # what no template writes
PURPOSES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ROLES = ("system", "developer", "user", "assistant", "tool")
MARK = "generation_mark"  # a template's variable: what is written at both ends of each {% generation %}
Piece = tuple[str, bool]  # a part of a text, and whether what looks like a control token in it is letters


class _Worker:
    """The process that renders: begun with the first request, and again after one that it did not survive."""

    def __init__(self) -> None:
        self._forked()
        atexit.register(self.stop)
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """In a forked child the process is its parent's."""
        self._lock, self._process = threading.Lock(), None

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def request(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the worker and return its answer, {"error": ...} if it crashes or takes longer than SECONDS."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                command = [sys.executable, "-P", str(Path(__file__).with_name("worker.py"))]
                # A session of its own: Ctrl-C in a terminal is for its parent.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
                )
            assert self._process.stdin is not None and self._process.stdout is not None
            watchdog = threading.Timer(SECONDS, self._process.kill)
            watchdog.start()
            try:
                self._process.stdin.write(json.dumps(question).encode() + b"\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except BrokenPipeError:
                line = b""
            except BaseException:  # Ctrl-C: an answer that comes later is nobody's
                self.stop()
                raise
            finally:
                watchdog.cancel()
            if not line:
                self.stop()
                return {"error": f"it was not done after {SECONDS:g} seconds, or its process was killed"}
            return json.loads(line)


_worker = _Worker()


def _answer_of(template: str, **request: Any) -> dict[str, Any]:
    found = _worker.request({"template": template, **request})
    if "error" in found:
        raise UserError(f"the chat template failed: {found['error']}")
    return found


@lru_cache(maxsize=1)
def _need_jinja() -> None:
    try:
        version = metadata.version("jinja2")
    except metadata.PackageNotFoundError:
        raise UserError("chat templates need the package jinja2: pip install 'jinja2>=3.1.6'") from None
    if tuple(int(part) for part in version.split(".")[:3] if part.isdigit()) < (3, 1, 6):
        raise UserError(f"jinja2 is {version}, whose sandbox can be left: pip install 'jinja2>=3.1.6'")


def checked(messages: Any) -> list[dict[str, Any]]:
    """Validate a list of chat messages (objects with role, content) and drop None values, in a new list. UserError for others."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise UserError(f"messages is {shown(messages)}, expected a list of messages, each with a role and a content")
    found = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UserError(f"message {i + 1} is {shown(message)}, expected an object with a role and a content")
        role = message.get("role")
        if role not in ROLES:
            raise UserError(f"message {i + 1} has the role {shown(role)}, expected one of {', '.join(ROLES)}")
        found.append({key: value for key, value in message.items() if value is not None})
        if role != "tool" and "content" in found[-1]:  # a tool's may be any JSON
            text_of(message["content"], f"message {i + 1}")
    try:
        return json.loads(json.dumps(found))
    except (TypeError, ValueError) as error:
        raise UserError(f"messages has what is no JSON: {error}") from None


def text_of(content: Any, where: str) -> str:
    """The text of a message's content, a string or text parts, joined. UserError, beginning with `where`, for anything else."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            what = f"in its content {shown(part)}" if parts is content else f"the content {shown(content)}"
            raise UserError(f'{where} has {what}, expected a text, or a list of parts of text, {{"type": "text", "text": "..."}}')
    return "".join(part["text"] for part in parts)


def joined(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, with one text in the place of parts."""
    return [m if m["role"] == "tool" or "content" not in m else {**m, "content": text_of(m["content"], "")} for m in messages]


def has_marks(template: str) -> bool:
    """Whether a template marks by {% generation %} what an assistant says."""
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template) is not None


@lru_cache(maxsize=8)
def takes_parts(template: str, named: tuple[tuple[str, str], ...]) -> bool:
    """Whether a template writes the text of a content that is in parts, and not the list itself. `named`: special tokens."""
    said = [{"role": "user", "content": [{"type": "text", "text": SAID}]}]
    try:
        (text,) = render(template, [said], dict(named))
    except UserError:
        return False
    return SAID in text and not any(quote + SAID in text for quote in "'\"")


def render(template: str, conversations: Sequence[Any], variables: Mapping[str, Any]) -> list[str]:
    _need_jinja()
    given = {"tools": None, "documents": None, **variables}
    return _answer_of(template, variables=[{**given, "messages": each} for each in conversations])["texts"]


@lru_cache(maxsize=8)
def control_tokens(template: str, special: frozenset[str], added: frozenset[str]) -> tuple[str, ...]:
    """Special tokens, and added ones that the template itself writes; the longest first."""
    _need_jinja()
    written = "\0".join(_answer_of(template)["literals"])
    found = special | {name for name in added if name in written}
    return tuple(sorted((name for name in found if name.strip()), key=lambda name: (-len(name), name)))


def pieces(
    template: str, conversations: Sequence[Any], variables: Mapping[str, Any], control: Sequence[str], special: AbstractSet[str]
) -> list[list[Piece]]:
    """Render conversations as pieces (text, letters), so that special tokens spelled in user content stay text (no prompt
    injection).
    Control tokens in user content, and parts of one that surrounding text could complete, are marked at both ends before rendering.
    A control token without marks is the template's own; a marked one becomes a piece of letters. In assistant content only
    `special` tokens are marked: its thinking stands between tokens that are legitimately its own."""
    before, after = unused(json.dumps([conversations, dict(variables)], ensure_ascii=False))

    def marked(value: Any, names: Sequence[str]) -> Any:
        if isinstance(value, str):
            return _marked(value, names, before, after)
        if isinstance(value, list):
            return [marked(one, names) for one in value]
        if isinstance(value, dict):
            allowed = [n for n in control if n in special] if value.get("role") == "assistant" else names
            return {key: one if key == "role" else marked(one, allowed) for key, one in value.items()}
        return value

    given = {key: value if key in PURPOSES else marked(value, control) for key, value in variables.items()}
    texts = render(template, marked(conversations, control), given)
    return [_split(text, control, before, after) for text in texts]


def _marked(said: str, names: Sequence[str], before: str, after: str) -> str:
    """Insert marks around each control token in user text, and around each prefix or suffix of one at its ends (also after
    stripping white space), which the template's text could complete."""
    head, tail = said.lstrip(), said.rstrip()
    firsts, lasts = set(), set()
    for name in names:
        at = said.find(name)
        while at >= 0:
            firsts.add(at)
            lasts.add(at + len(name) - 1)
            at = said.find(name, at + 1)
        for size in range(1, len(name)):
            firsts |= {len(text) - size for text in (said, tail) if text.endswith(name[:size])}
            lasts |= {len(said) - len(text) + size - 1 for text in (said, head) if text.startswith(name[-size:])}
    if not firsts and not lasts:
        return said
    return "".join((before if i in firsts else "") + c + (after if i in lasts else "") for i, c in enumerate(said))


def unused(text: str) -> tuple[str, str]:
    """Two characters of private use that a text does not have."""
    free = (chr(point) for point in range(0xF0000, 0xFFFFE) if chr(point) not in text)
    return next(free), next(free)


def _split(text: str, control: Sequence[str], before: str, after: str) -> list[Piece]:
    """Split rendered text into pieces at control tokens that come from user content, and remove the marks."""
    if before not in text and after not in text:
        return [(text, False)]
    plain, from_user = [], []  # characters, and whether somebody said each
    for at, character in enumerate(text):
        if character in (before, after):
            continue
        plain.append(character)
        from_user.append((at > 0 and text[at - 1] == before) or text[at + 1 : at + 2] == after)
    found, plain_text, at, done = [], "".join(plain), 0, 0
    first_letters = {name[0] for name in control}
    while at < len(plain_text):
        name = next((n for n in control if plain_text.startswith(n, at)), "") if plain_text[at] in first_letters else ""
        if name and (from_user[at] or from_user[at + len(name) - 1]):
            found += [(plain_text[done:at], False), (name, True)]
            done = at + len(name)
        at += len(name) or 1
    return [piece for piece in (*found, (plain_text[done:], False)) if piece[0]]
