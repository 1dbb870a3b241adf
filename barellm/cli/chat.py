"""Talk with a model. RUN is a run or checkpoint, of an imported model for example; its chat template says how a conversation is
written, and its generation_config.json how tokens are chosen.

/help shows what else can be typed. Ctrl-C ends an answer, Ctrl-D the talk. The thinking of a model, between <think> and </think>,
is dim in a terminal. Where messages and an answer no longer fit into the model's positions, the oldest messages are left out."""

import argparse
import contextlib
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from barellm.cli.parsing import options
from barellm.errors import UserError, nearest

if TYPE_CHECKING:
    from barellm.cli.checkpoints import Found
    from barellm.data.tokenizers import Tokenizer
    from barellm.generation.decode import Decoder
    from barellm.generation.samplers import Sampling

COMMANDS = {
    "/help": "show this", "/system TEXT": "another system message, from the next answer on; without TEXT none",
    "/reset": "forget the conversation, all but the system message", "/exit": "leave, as Ctrl-D does",
}  # fmt: skip
THINKING = ("dim", "show", "hide")
DIM, PLAIN = "\033[2m", "\033[0m"


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's options; those that several commands share are in `parsing.options` (context, sampling, opening a model)."""
    parser.add_argument("checkpoint", metavar="RUN")
    options.add(parser, "--system TEXT", "the system message (default: the template's own)", type=options.escaped)
    options.add(parser, "-n --max-new-tokens N", "most tokens of an answer, half the context at most (default: 512)", 512, least=1)
    options.add_context(parser)
    options.add_exact(parser)
    options.add_sampling(parser)
    options.add(parser, "--seed N", "of the first answer (default: 1337)", 1337)
    options.add(parser, "--thinking", "what to do with a model's thinking (default: dim)", "dim", choices=THINKING)
    options.add(parser, "--template NAME", "one of several chat templates that a model has (default: default)")
    options.add(parser, "--no-thinking", "give the template enable_thinking=False, which some obey")
    options.add_opening(parser)


def run(args: argparse.Namespace) -> int:
    """Open the model and answer lines until /exit or the end of the input."""
    from barellm.cli.checkpoints import found
    from barellm.generation.decode import open_decoder

    checkpoint = found(args.checkpoint, device=args.device, dtype=args.dtype, weights=args.weights, adapter=args.adapter)
    sampling = options.sampling_of(args, checkpoint.tokenizer)
    context = options.context_of(args.context, checkpoint.config.model.max_seq)
    talk = Talk(checkpoint.tokenizer, context, min(args.max_new_tokens, context // 2), args)
    talk.ids()  # a template that fails, fails now
    with checkpoint.opened(positions=context, exact=args.exact) as compiled:
        decoder = open_decoder(compiled.session, compiled.config.model, checkpoint.tokenizer, positions=context)
        _say(_banner(checkpoint))
        while (line := _line()) is not None:
            if line.startswith("/"):
                if talk.obey(line):
                    break
            elif line.strip():
                talk.answer(line, decoder, sampling)
    _say("\n" if sys.stdin.isatty() else "")
    return 0


def _banner(checkpoint: "Found") -> str:
    own = checkpoint.tokenizer.conventions.templates
    how = "its chat template" if own else "no chat template: lines `User: ...`, as fine-tuning on messages has them"
    return f"{checkpoint.path}: {how}\nCtrl-C ends an answer, Ctrl-D the talk; /help shows more.\n"


def _line() -> str | None:
    """Read the next line; None at the end of the input. Ctrl-C discards what was typed."""
    while True:
        try:
            if not sys.stdin.isatty():
                line = sys.stdin.readline()
                return line.removesuffix("\n") if line else None
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (arrow keys, and the lines before)
            return input("> ")
        except EOFError:
            return None
        except KeyboardInterrupt:
            _say("\n")


class Talk:
    """A conversation: what was said, and what of it fits into `most` positions with `room` tokens of an answer."""

    def __init__(self, tokenizer: "Tokenizer", most: int, room: int, args: argparse.Namespace) -> None:
        self.tokenizer, self.most, self.room, self.system = tokenizer, most, room, args.system
        self.thinking = args.thinking
        self.variables: dict[str, Any] = {"enable_thinking": False} if args.no_thinking else {}
        self.variables |= {} if args.template is None else {"chat_template": args.template}
        self.messages: list[dict[str, str]] = []
        self.turn = 0

    def obey(self, line: str) -> bool:
        """Execute a /command; returns whether it ends the conversation."""
        name, _, words = line.strip().partition(" ")
        if name == "/exit":
            return True
        if name == "/reset":
            self.messages = []
        elif name == "/system":
            self.system = words.strip() or None
        elif name == "/help":
            width = max(map(len, COMMANDS))
            _say("".join(f"{command:<{width}}  {what}\n" for command, what in COMMANDS.items()))
        else:
            known = [command.split()[0] for command in COMMANDS]
            _say(f"unknown command {name!r}{nearest(name, known)} (known: {', '.join(known)})\n")
        return False

    def ids(self) -> tuple[list[int], bool]:
        """(token ids of the conversation, without the oldest messages if it does not fit; whether its end opened the model's
        thinking). UserError if the last message alone is too long."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        while True:
            messages = [*system, *(self.messages or [{"role": "user", "content": ""}])]
            parts = self.tokenizer.chats([messages], {"add_generation_prompt": True, **self.variables})[0]
            ids = [i for part, _ in parts for i in part.tolist()]
            if len(ids) + self.room <= self.most:
                return ids, parts[-1][1].rstrip().endswith("<think>")
            next_user = next((i for i, m in enumerate(self.messages) if i > 0 and m["role"] == "user"), None)
            if next_user is None:
                raise UserError(f"the message has {len(ids)} tokens with its template, the model {self.most} positions")
            self.messages = self.messages[next_user:]

    def answer(self, line: str, decoder: "Decoder", how: "Sampling") -> None:
        """Generate and print the answer to a message; Ctrl-C ends it early. A message that does not fit is dropped with a line."""
        from barellm.generation.writing import Written, write

        self.messages.append({"role": "user", "content": line})
        try:
            ids, opened = self.ids()
        except UserError as error:
            self.messages.pop()
            _say(f"{error}\n")
            return
        shown = Thinking(self.thinking if sys.stdout.isatty() or self.thinking == "hide" else "show", opened)
        stops, ends = self.tokenizer.turn_stops, self.tokenizer.turn_ends
        text = Written(self.tokenizer, stops=stops, emit=shown.feed, begins=True, ends=ends)
        seeded = replace(how, seed=how.seed + self.turn)
        try:
            for _ in write(decoder, [ids], [text], count=self.room, hows=[seeded]):
                pass
        except KeyboardInterrupt:
            text.finish()
        shown.finish()
        self.messages.append({"role": "assistant", "content": text.text.strip()})
        self.turn += 1


class Thinking:
    """Writes an answer as it comes, with what is between <think> and </think> shown, dim or hidden."""

    def __init__(self, how: str, opened: bool) -> None:
        self.how, self.inside, self._held = how, opened, ""
        _say(DIM if opened and how == "dim" else "")

    def feed(self, piece: str) -> None:
        """Print a piece of the answer; what may be the beginning of a <think> mark is held back."""
        from barellm.generation.stops import begins

        self._held += piece
        while True:
            mark = "</think>" if self.inside else "<think>"
            before, found, after = self._held.partition(mark)
            if not found:
                keep = begins(self._held, mark)
                self._write(self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
                return
            self._held = after
            if self.inside:
                self._write(before + mark)
            else:
                self._write(before)
            self.inside = not self.inside
            if self.how == "dim":
                _say(DIM if self.inside else PLAIN)
            if self.inside:
                self._write(mark)

    def _write(self, text: str) -> None:
        if not (self.inside and self.how == "hide"):
            _say(options.for_terminal(text))

    def finish(self) -> None:
        self._write(self._held)
        _say((PLAIN if self.inside and self.how == "dim" else "") + "\n")


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
