"""Load test of text generation for many clients: throughput, time to first token and between tokens, resident memory.

python -m benchmarks.serving --processor NAME --out benchmarks/results/serving.json     # the engine, smollm2-135m of random weights
python -m benchmarks.serving --url http://127.0.0.1:8000 --model NAME --processor NAME --out FILE     # any server of the protocol
python -m benchmarks.serving --resident 2000 --processor NAME --out FILE     # memory over requests of a tiny model

Servers are `barellm serve models/smollm2-135m/hf --slots 16 --context 256`, and `llama-server -m models/smollm2-135m/bf16.gguf
-np 16 -c 4096` with files that benchmarks/random_weights.py makes. A client asks again as soon as it has its answer. Prompts have
random ids, with a beginning that all share where --shared says so.
"""

from __future__ import annotations

import argparse
import http.client
import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from urllib.parse import urlsplit

import numpy as np

from barellm import models
from barellm.api import Model
from barellm.config import Config
from barellm.cpu.threads import thread_count
from barellm.generation.samplers import Sampling
from barellm.serving import engine
from benchmarks.random_weights import random_weights

CLIENTS = (1, 4, 16)
TINY = {"layers": 2, "heads": 4, "kv_heads": 2, "d_model": 64, "d_ff": 128, "vocab_size": 512, "max_seq": 256}
Ask = Callable[[list[int], int, int], Iterator[object]]  # prompt, count, seed -> something for each token, as it comes


def random_model(config: Config) -> Model:
    return Model(random_weights(config.model), config, "cpu", 0, None)


def of_engine(server: engine.Engine) -> Ask:
    """As the server's own threads ask: events go through a queue."""

    def ask(prompt: list[int], count: int, seed: int) -> Iterator[object]:
        events: queue.SimpleQueue[engine.Event] = queue.SimpleQueue()
        server.submit(engine.Request(tuple(prompt), count, Sampling(seed=seed)), events.put)
        while isinstance(event := events.get(), engine.Token):
            yield event
        assert isinstance(event, engine.Ended), event

    return ask


def of_url(url: str, model: str, key: str) -> Ask:
    """Streams of POST /v1/completions, whose prompts are ids."""
    parts = urlsplit(url)

    def ask(prompt: list[int], count: int, seed: int) -> Iterator[object]:
        body = {"model": model, "prompt": prompt, "max_tokens": count, "seed": seed, "temperature": 0.8, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "logit_bias": {"0": -100}}  # 0: random_weights.py's end of a text
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        with closing(http.client.HTTPConnection(parts.hostname or "", parts.port)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            for line in answer:
                chunk = json.loads(line[6:]) if line.startswith(b"data: {") else {}
                if chunk.get("choices") and chunk["choices"][0]["text"]:
                    yield chunk
                elif usage := chunk.get("usage"):
                    assert usage["completion_tokens"] == count, usage

    return ask


def load(ask: Ask, clients: int, args: argparse.Namespace, vocab: int) -> dict[str, object]:
    """`clients` ask `args.requests` times each. Times in milliseconds, of a server's between chunks of text: a token
    that is a part of a character comes with the next one."""
    first: list[float] = []
    between: list[float] = []
    shared = np.random.default_rng(7).integers(0, vocab, args.shared).tolist()

    def client(number: int) -> None:
        r = np.random.default_rng(number)
        for i in range(args.requests):
            prompt = shared + r.integers(0, vocab, args.prompt - len(shared)).tolist()
            last = begin = perf_counter()
            for n, _ in enumerate(ask(prompt, args.count, 1000 * number + i)):
                now = perf_counter()
                (between if n else first).append(1e3 * (now - last))
                last = now
            assert last > begin, "an answer without tokens"

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    begin = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = perf_counter() - begin
    found: dict[str, object] = {"clients": clients, "tokens_per_s": clients * args.requests * args.count / seconds}
    for name, times in (("first_token_ms", first), ("between_tokens_ms", between)):
        found[name] = {f"p{p}": float(np.percentile(times, p)) for p in (50, 99)}
    return found


def resident() -> int:
    """Resident bytes of this process."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def memory_over(requests: int) -> dict[str, object]:
    """Resident memory over so many requests of a tiny model by 8 threads, a fifth of them cancelled in mid-stream."""
    preset = models.preset("llama-15m")
    small = replace(preset, model=replace(preset.model, **TINY), train=replace(preset.train, dtype="fp32"))
    samples: list[int] = []
    with closing(engine.Engine(random_model(small), slots=8)) as server:

        def client(number: int) -> None:
            r = np.random.default_rng(number)
            for i in range(requests // 8):
                events: queue.SimpleQueue[engine.Event] = queue.SimpleQueue()
                prompt = tuple(r.integers(0, 512, int(r.integers(1, 150))).tolist())
                ticket = server.submit(engine.Request(prompt, int(r.integers(1, 60)), Sampling(seed=i)), events.put)
                if r.random() < 0.2:
                    events.get()
                    ticket.cancel()
                    continue
                while isinstance(events.get(), engine.Token):
                    pass
                if number == 0:
                    samples.append(resident())

        threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = server.stats()
    quarter = samples[len(samples) // 4]
    return {"requests": requests, "resident": samples[:: max(1, len(samples) // 20)], "growth": samples[-1] / quarter - 1, **stats}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processor", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--weights", default="", help="a quantization scheme")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--shared", type=int, default=0, help="tokens at its beginning that all prompts share")
    parser.add_argument("--count", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--requests", type=int, default=4, help="of each client")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--url", help="of a server, instead of the engine in this process")
    parser.add_argument("--model", default="", help="its name there")
    parser.add_argument("--key", default="")
    parser.add_argument("--resident", type=int, default=0, metavar="REQUESTS", help="measure memory instead")
    args = parser.parse_args()
    row: dict[str, object] = {"what": "serving", "processor": args.processor, "threads": thread_count()}
    if args.resident:
        row["memory"] = memory_over(args.resident)
    else:
        preset = models.preset(args.preset)
        config, vocab = replace(preset, train=replace(preset.train, dtype=args.dtype)), preset.model.vocab_size
        with ExitStack() as stack:
            if args.url:
                ask = of_url(args.url, args.model, args.key)
            else:
                sizes = {"slots": max(args.clients), "positions": args.prompt + args.count, "queue": 64}
                ask = of_engine(stack.enter_context(closing(engine.Engine(random_model(config), weights=args.weights, **sizes))))
            for _ in ask([1] * args.prompt, 2, 0):  # kernels are loaded
                pass
            keys = ("preset", "dtype", "weights", "prompt", "shared", "count", "requests", "url")
            row |= {key: getattr(args, key) for key in keys} | {"runs": [load(ask, n, args, vocab) for n in args.clients]}
    args.out.write_text(json.dumps(row, indent=1) + "\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
