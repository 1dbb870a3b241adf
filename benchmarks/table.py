"""The README's tables from benchmarks/results/*.json. `python benchmarks/table.py` prints them; `--write README.md` puts them
between the lines <!-- benchmarks --> and <!-- /benchmarks -->; `--check README.md` fails where others stand there."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"


def peers_table(results: dict[str, dict]) -> list[str]:
    """One row per measured shape; ratios are the peer's median over ours, so more than 1 means that we are faster."""
    names = list(dict.fromkeys(name for r in results.values() for name in r["ratios"]))
    head = ["step", "ours", "tokens/s", "% of bound", *names, "samples"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for file, r in results.items():
        what = f"{r['preset']} {r['batch']} x {r['seq']} {r['dtype']}"
        ratios = [f"{r['ratios'][name]:.2f}x" if name in r["ratios"] else "" for name in names]
        ratios = [f"**{x}**" if name == r["best_peer"] else x for name, x in zip(names, ratios, strict=True)]
        cells = [
            what,
            f"{r['ours_s'] * 1e3:.1f} ms",
            f"{r['tokens_per_s']:,.0f}",
            f"{r['percent_of_bound']:.0f}",
            *ratios,
            file,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def start_table(results: dict[str, dict]) -> list[str]:
    """Process start to the end of the first step, and peak memory, of ours and of each peer, in the same runs."""
    names = list(dict.fromkeys(v["name"] for r in results.values() for v in r["variants"]))
    lines = [
        "| first step from cold caches, s / peak memory, GB | " + " | ".join(names) + " |",
        "|" + "---|" * (len(names) + 1),
    ]
    for r in results.values():
        by_name = {v["name"]: v for v in r["variants"]}
        cells = [
            f"{by_name[n]['first_step_s']:.1f} / {by_name[n]['peak_rss_bytes'] / 1e9:.2f}"
            for n in names
            if n in by_name
        ]
        lines.append(f"| {r['preset']} {r['batch']} x {r['seq']} {r['dtype']} | " + " | ".join(cells) + " |")
    return lines


def machine_line(results: dict[str, dict]) -> list[str]:
    lines = []
    for r in results.values():
        m, c = r["machine"], r["ceiling"]
        peaks = ", ".join(f"{dtype} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in c["flops"].items())
        rates = ", ".join(f"{kind} {rate / 1e9:.0f} GB/s" for kind, rate in c["bandwidth"].items())
        torch = next(v["version"] for v in r["variants"] if "version" in v)
        lines.append(
            f"{r['preset']} {r['batch']} x {r['seq']} {r['dtype']}: {m['processor']}, {m['cores']} cores, {m['isa']}; "
            f"measured {peaks}; {rates}; PyTorch {torch}; {r['date'][:10]}; median of {r['rounds']} interleaved turns of "
            f"{r['steps_per_turn']} steps."
        )
    return lines


def tables() -> str:
    results = {}
    for path in sorted(RESULTS.glob("*.json")):
        r = json.loads(path.read_text())
        if r.get("kind") == "peers":
            results[f"benchmarks/results/{path.name}"] = r
    if not results:
        return "Nothing is measured yet: `barellm bench peers PRESET` fills benchmarks/results/."
    parts = [peers_table(results), start_table(results), [f"- {line}" for line in machine_line(results)]]
    return "\n\n".join("\n".join(part) for part in parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE.md")
    parser.add_argument("--check", type=Path, metavar="FILE.md")
    args = parser.parse_args()
    path = args.write or args.check
    if path is None:
        print(tables())
        return 0
    text = path.read_text()
    if BEGIN not in text or END not in text:
        print(f"{path} has no lines {BEGIN} and {END}", file=sys.stderr)
        return 2
    made = text[: text.index(BEGIN) + len(BEGIN)] + "\n" + tables() + "\n" + text[text.index(END) :]
    if args.write:
        path.write_text(made)
        return 0
    if made != text:
        print(f"{path} differs from benchmarks/results: run python benchmarks/table.py --write {path}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
