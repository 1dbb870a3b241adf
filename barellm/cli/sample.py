"""Generate text from a checkpoint, as it comes. CHECKPOINT is a step folder, or a run's folder (its newest whole one)."""

from __future__ import annotations

import argparse
import json
import sys

from barellm.cli.options import add_device


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what the text begins with (default: nothing)")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="tokens to draw (default: 256)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0: the most likely token (default: 0.8)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw among the K most likely (default: all)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw among the fewest that reach P (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=1337, metavar="N", help="same seed, same text (default: 1337)")
    add_device(parser, "cpu, cuda or reference")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end instead of the stream")


def run(args: argparse.Namespace) -> int:
    import time

    from barellm.cli.checkpoints import opened
    from barellm.data.tokenizers import StreamDecoder
    from barellm.errors import UserError
    from barellm.generation.decode import Decoder
    from barellm.generation.samplers import Sampling

    if args.tokens < 1:
        raise UserError(f"--tokens is {args.tokens}, expected at least 1")
    how = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    with opened(args.checkpoint, device=args.device) as (path, config, tokenizer, session):
        prompt = tokenizer.encode(args.prompt).tolist()
        if tokenizer.eot is not None:
            prompt.insert(0, tokenizer.eot)  # documents begin with it in the training text
        prompt = prompt or [tokenizer.start]
        text = StreamDecoder(tokenizer)
        pieces, ids = [], []
        say = (lambda piece: None) if args.json else _write
        say(args.prompt)
        begin = time.perf_counter()
        for token in Decoder(session, config.model).tokens(prompt, count=args.tokens, how=how):
            if token == tokenizer.eot:
                break
            ids.append(token)
            pieces.append(text.feed(token))
            say(pieces[-1])
        pieces.append(text.finish())
        say(pieces[-1] + "\n")
        seconds = time.perf_counter() - begin
        if args.json:
            found = {"checkpoint": str(path), "prompt": args.prompt, "text": "".join(pieces), "tokens": ids}
            print(json.dumps(found | {"tokens_per_s": round(len(ids) / seconds, 1)}))
    return 0


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()
