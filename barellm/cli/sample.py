"""Write text from a checkpoint, token by token. CHECKPOINT is a checkpoint's folder, or a run's, whose newest whole one is taken.
It may also be a preset with a vocabulary of its own, as gpt2-774m: its weights are random then, and only its speed says anything.

Sample i uses the seed --seed + i - 1, so you can draw any one of them again by passing its own seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from barellm.cli.options import add_device, add_dtype, add_weights

if TYPE_CHECKING:
    from barellm.bench.decoding import Pace
    from barellm.data.tokenizers import Tokenizer
    from barellm.generation.decode import Decoder
    from barellm.generation.samplers import Sampling


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what the text begins with (default: nothing)")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="how many texts to write (default: 1)")
    parser.add_argument(
        "--tokens", type=int, default=256, metavar="N", help="how many tokens each text has at most (default: 256)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="how bold the choice of tokens is; 0 always takes the most likely one (default: 0.8)",
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="choose among the K most likely tokens only (default: all)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="choose among the fewest tokens whose probabilities reach P together (default: 1)",
    )
    parser.add_argument(
        "--seed", type=int, default=1337, metavar="N", help="the same seed gives the same text (default: 1337)"
    )
    add_device(parser, "cpu, cuda or reference")
    add_dtype(parser)
    add_weights(parser)
    parser.add_argument(
        "--measure", action="store_true", help="say on stderr how fast it was, beside what this machine's memory allows"
    )
    parser.add_argument("--json", action="store_true", help="print one line with a JSON object for each text")


def run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from barellm.bench.decoding import Pace, weight_bytes
    from barellm.cli.checkpoints import found_or_fresh
    from barellm.errors import UserError
    from barellm.generation.decode import cache_positions, open_decoder
    from barellm.generation.samplers import Sampling

    for name in ("tokens", "samples"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}, expected at least 1")
    first = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    checkpoint = found_or_fresh(args.checkpoint, device=args.device, dtype=args.dtype, weights=args.weights)
    model, tokenizer = checkpoint.config.model, checkpoint.tokenizer
    fed = _fed(tokenizer, args.prompt, model.max_seq)
    positions = cache_positions(len(fed) + args.tokens, model.max_seq)
    with checkpoint.opened(positions=positions) as machine:
        decoder = open_decoder(machine.session, model, positions=positions)
        for i in range(args.samples):
            how = replace(first, seed=args.seed + i)
            if args.samples > 1 and not args.json:
                _write(f"--- sample {i + 1} of {args.samples}, seed {how.seed}\n")
            pace = Pace(len(fed))
            say = _nothing if args.json else _write
            say(args.prompt)
            text, ids = _sample(decoder, tokenizer, how, fed=fed, count=args.tokens, say=say, pace=pace)
            seconds = pace.times[-1] - pace.times[0]
            if args.json:
                row = {"checkpoint": str(checkpoint.path or args.checkpoint), "prompt": args.prompt, "seed": how.seed}
                print(json.dumps(row | {"text": text, "tokens": ids, "tokens_per_s": round(len(ids) / seconds, 1)}))
            if args.measure:
                from barellm.plans.roofline import measured_ceiling

                rates = measured_ceiling(device=args.device).bandwidth
                print(pace.line(weight_bytes(machine.programs["decode"]), rates[8, 0, 0]), file=sys.stderr)
    return 0


def _fed(tokenizer: Tokenizer, prompt: str, positions: int) -> list[int]:
    """The ids that the model begins with. Says on stderr where it cannot see them all."""
    from barellm.generation.decode import kept

    fed = tokenizer.encode(prompt).tolist()
    if tokenizer.eot is not None:
        fed.insert(0, tokenizer.eot)  # documents begin with it in the training text
    if len(fed) > positions:
        seen = f"the model has {positions} positions and sees the last {len(kept(fed, positions))}"
        print(f"barellm: warning: the prompt has {len(fed)} tokens: {seen}", file=sys.stderr)
    return fed or [tokenizer.start]


def _sample(
    decoder: Decoder,
    tokenizer: Tokenizer,
    how: Sampling,
    *,
    fed: list[int],
    count: int,
    say: Callable[[str], None],
    pace: Pace,
) -> tuple[str, list[int]]:
    """(text after the prompt, its ids) up to the end of the document; `say` gets the text as it comes."""
    from barellm.data.tokenizers import StreamDecoder

    text = StreamDecoder(tokenizer)
    pieces, ids = [], []
    for token in decoder.tokens(fed, count=count, how=how):
        pace.token()
        if token in tokenizer.ends:
            break
        ids.append(token)
        pieces.append(text.feed(token))
        say(pieces[-1])
    pieces.append(text.finish())
    say(pieces[-1] + "\n")
    return "".join(pieces), ids


def _nothing(piece: str) -> None:
    """Write nothing: a JSON object will have the text."""


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()
