"""The tables of docs/speed.md, the lines of docs/results.md and the chart, from benchmarks/results/*.json.

`python benchmarks/table.py` prints them; `--write` puts them between the lines <!-- benchmarks --> and <!-- /benchmarks --> of both
files and draws docs/img/bench.svg; `--check` fails where others stand there, or the chart was drawn from others."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from xml.sax.saxutils import escape

import chart

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SPEED, DETAILS = ROOT / "docs" / "speed.md", ROOT / "docs" / "results.md"
PARTS = {"to_first_step_s": "first step done", "steps_s": "steps", "evaluations_s": "evaluations", "after_last_step_s": "end"}
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"
PROCESSORS = {"": "two cores of Zen 4", "xeon-amx": "two cores of an Intel Xeon with AMX"}  # by folder of RESULTS


def peers_table(results: dict[str, dict]) -> list[str]:
    """One row per measured shape; ratios are the peer's median over ours, so more than 1 means that we are faster."""
    names = list(dict.fromkeys(name for r in results.values() for name in r["ratios"]))
    head = ["step", "ours", "tokens/s", "% of roofline", *names, "samples"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for file, r in results.items():
        ratios = [f"{r['ratios'][name]:.2f}x" if name in r["ratios"] else "" for name in names]
        ratios = [f"**{x}**" if name == r["best_peer"] else x for name, x in zip(names, ratios, strict=True)]
        cells = [
            _what(r),
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
    lines = ["| first step from cold caches, s / peak memory, GB | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 1)]
    for r in results.values():
        by_name = {v["name"]: v for v in r["variants"]}
        cells = [
            f"{by_name[n]['first_step_s']:.1f} / {by_name[n]['peak_rss_bytes'] / 1e9:.2f}" if n in by_name else "" for n in names
        ]
        lines.append(f"| {_what(r)} | " + " | ".join(cells) + " |")
    return lines


def machine_line(results: dict[str, dict]) -> list[str]:
    lines = []
    for r in results.values():
        m, c = r["machine"], r["ceiling"]
        peaks = ", ".join(f"{dtype} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in c["flops"].items())
        rates = ", ".join(f"{kind} {rate / 1e9:.0f} GB/s" for kind, rate in c["bandwidth"].items())
        torch = [f"PyTorch {v['version']}; " for v in r["variants"] if "version" in v][:1]
        lines.append(
            f"{_what(r)}: {m['processor']}, {m['cores']} cores, {m['isa']}; measured {peaks}; {rates}; {''.join(torch)}"
            f"{r['date'][:10]}; median of {r['rounds']} interleaved rounds of {_many(r['steps_per_turn'], 'step')}."
        )
    return lines


MANY = 10**8  # bytes: several times what the caches hold


def facts(files: dict[str, dict]) -> list[str]:
    """A line for each file of `bench step`, `bench ops` and `benchmarks.scaling`, of `bench attention` with `--baselines torch`,
    of the comparisons of losses, and for each whole run."""
    lines = []
    for file, r in files.items():
        if r.get("kind") == "step":
            split = ", ".join(f"{name} {seconds:.2f}" for name, seconds in r["first_step_split"].items())
            first = f"first step {r['first_step_s']:.2f} s after the process's start ({split})"
            memory = f"plan {r['arena_bytes']:,} bytes, memory added {r['rss_added_bytes']:,}, peak {r['peak_rss_bytes']:,}"
            warm = f"a warm step {r['median_s'] * 1e3:.1f} ms, {r['minor_faults']} page faults, {r['python_calls']} Python calls"
            lines.append(f"{_what(r)}: {first}; {warm}; {memory}. {file}")
        if r.get("kind") == "run":
            for run in r["runs"]:
                parts = ", ".join(f"{name} {run[key]:.1f}" for key, name in PARTS.items())
                lines.append(
                    f"{r['preset']}, the whole command, {run['cache']} cache: {run['wall_s']:.1f} s for {run['steps']:,} steps "
                    f"({parts}), validation {run['val_nats']:.4f} nats. {file}"
                )
        if r.get("kind") == "scaling":
            lines.append(f"{_what(r)}: {'; '.join(map(scaling, r['cases']))}. {file}")
        if r.get("kind") == "loss":
            ours, theirs = (sum(run[side]["loss"] for run in r["runs"]) / len(r["runs"]) for side in ("barellm", "pytorch_fp32"))
            lines.append(
                f"{r['preset']}, {r['steps']} steps of nanoGPT's recipe from the same weights and batches, mean of "
                f"{len(r['runs'])} seeds: validation loss {ours:.4f} nats in {r['dtype']}, PyTorch's in fp32 {theirs:.4f}. {file}"
            )
        if r.get("kind") == "moments-loss":
            gaps = " and ".join(f"{gap:+.4f} with moments {name}" for name, gap in r["gap_nats"].items())
            lines.append(
                f"{r['preset']} {r['dtype']}, {r['steps']} steps, mean of {len(r['runs'])} seeds: validation loss {gaps}, against "
                f"fp32; seeds differ by {r['deviation_between_seeds']:.4f}. {file}"
            )
        if r.get("kind") == "moments-update":
            took = ", ".join(
                f"{name} {1e3 * seconds:.1f} ms ({r['percent_of_bound'][name]:.0f} % of the roofline)"
                for name, seconds in r["median_s"].items()
            )
            rate = sorted(r["update_bytes_per_s"])[len(r["update_bytes_per_s"]) // 2] / 1e9
            lines.append(f"{r['preset']}, AdamW alone by moments, at {rate:.0f} GB/s in place: {took}. {file}")
        if r.get("kind") == "attention" and "peer" in r:
            lines.append(f"{attention(r)}. {file}")
        if r.get("kind") == "ops" and "peer" in r:
            ratios = [(row["times_peer"], f"{row['op']} {row['shape']}") for row in r["ops"] if "times_peer" in row]
            most, slowest = max(ratios)
            lines.append(
                f"{_what(r)}, each op alone against {r['peer']}: the slowest of {len(ratios)} kinds takes {most:.2f} of the time "
                f"of PyTorch's own ({slowest}). {file}"
            )
        elif r.get("kind") == "ops":
            moving = [row for row in r["ops"] if row["flops"] < 4 * row["bytes"] and row["bytes"] > row["count"] * MANY]
            parts = ", ".join(f"{row['op']} {row['shape']} {row['percent_of_bound']:.0f}" for row in moving)
            lines.append(f"{_what(r)}, % of the roofline of each op that moves 100 MB or more: {parts}. {file}")
    return lines


def attention(r: dict) -> str:
    """All cases of `bench attention --baselines torch`."""
    words = []
    for what, name in (("forward", "forward"), ("both", "forward and backward")):
        ratios = [case["ratio"] for case in r["cases"] if case["what"] == what]
        words.append(f"{name} {min(ratios):.2f} to {max(ratios):.2f} times as fast")
    lengths, sizes = ({case[key] for case in r["cases"]} for key in ("seq", "D"))
    shared = [case for case in r["cases"] if "kv_heads" in case]
    each = f" ({shared[0]['heads'] // shared[0]['kv_heads']} of queries to one of keys)" if shared else ""
    longest = [case for case in r["cases"] if case["seq"] == max(lengths)]
    share = f"{min(c['percent_of_peak'] for c in longest):.0f} % of the peak or more"
    square = f"{max(c['of_square'] for c in longest):.2f} of the time that the whole square would take at the peak, or less"
    return (
        f"causal attention {r['dtype']}, T {min(lengths)} to {max(lengths)}, heads of {' and '.join(map(str, sorted(sizes)))}"
        f"{each}, against scaled_dot_product_attention of {r['peer']}, tuned environment: {', '.join(words)}; "
        f"at T {max(lengths)} {share}, {square}"
    )


ROLES = {
    "forward": lambda p: p["op"] in ("linear", "linear_residual", "matmul"),
    "with GELU": lambda p: p["op"] == "linear_gelu",
    "input gradient": lambda p: p["op"].startswith("matmul_dx"),
    "weight gradient": lambda p: p["op"].startswith("matmul_dw") and p["mode"] == "store",
    "added to": lambda p: p["op"].startswith("matmul_dw") and p["mode"] == "add",
}


def gemm_table(files: dict[str, dict]) -> list[str]:
    """`bench gemm`: the least and the most of the layers, warm and cold. A character model's classifier is left out: a tile
    does 96 columns for its 65."""
    lines = ["| % of the peak, warm / cold | " + " | ".join(ROLES) + " | samples |", "|---|" + "---|" * (len(ROLES) + 1)]
    for file, r in files.items():
        if r.get("kind") != "gemm":
            continue
        products = [p for p in r["products"] if r["preset"] != "shakespeare-char" or p["layer"] != "head"]
        lengths = sorted({p["tokens"] for p in products if p["layer"] != "head"})
        for tokens in lengths:
            # The classifier takes long runs in chunks, which have fewer tokens.
            here = [p for p in products if p["tokens"] == tokens or (p["layer"] == "head" and len(lengths) == 1)]
            cells = [
                " / ".join(_range([p[f"{state}_percent"] for p in here if chosen(p)]) for state in ("warm", "cold"))
                for chosen in ROLES.values()
            ]
            lines.append(f"| {r['preset']}, {tokens} tokens, {r['dtype']} | {' | '.join(cells)} | {file} |")
    return lines if len(lines) > 2 else []


def optimizers_table(files: dict[str, dict]) -> list[str]:
    """benchmarks/optimizers.py: of each recipe and number of steps the rate that most seeds were run with, the best of them."""
    lines = ["| validation loss, nats | steps | AdamW | Muon | samples |", "|---|---|---|---|---|"]
    for file, r in files.items():
        if r.get("kind") != "optimizers":
            continue
        for steps in sorted({run["steps"] for run in r["runs"]}):
            cells = [best_of([x for x in r["runs"] if (x["steps"], x["recipe"]) == (steps, name)]) for name in ("adamw", "muon")]
            lines.append(f"| {r['preset']}, {r['dtype']} | {steps} | {cells[0]} | {cells[1]} | {file} |")
    return lines if len(lines) > 2 else []


def best_of(runs: list[dict]) -> str:
    """The mean loss of the best options among those with the most seeds."""
    if not runs:
        return ""
    groups: dict[str, list[dict]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run["options"], sort_keys=True), []).append(run)
    most = max(map(len, groups.values()))
    best = min((g for g in groups.values() if len(g) == most), key=lambda g: sum(run["loss"] for run in g))
    options = best[0]["options"]
    rate = f"muon_lr {options['muon_lr']}" if options.get("name") == "muon" else f"lr {options.get('lr', 'as the preset has it')}"
    seeds, tried = _many(most, "seed"), _many(len(groups), "rate")
    return f"{sum(run['loss'] for run in best) / most:.4f} ({rate}, the best of {tried}, {seeds})"


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"


def scaling(case: dict) -> str:
    """One case of `benchmarks.scaling`."""
    took = f"{case['name']} {case['median_s'] * 1e3:.1f} ms"
    if "rival_share" in case:
        share = f"the rival had {100 * case['rival_share']:.0f} % of it, which is {case['slower_by_what_was_taken']:.2f}"
        return f"{took}, {case['slower']:.2f} times as long as without ({share})"
    if "slower_than_one_thread" in case:
        return f"{took}, {case['slower_than_one_thread']:.2f} times as long as one thread"
    return f"{took}, {case['times_one_thread']:.2f}x, {case['percent_of_bound']:.0f} % of the roofline of as many cores"


def _what(r: dict) -> str:
    what = f"{r['preset']} {r['batch']} x {r['seq']} {r['dtype']}" + (" recompute" if r.get("recompute") else "")
    return what if r.get("moments", "fp32") == "fp32" else f"{what}, moments {r['moments']}"


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def measured(folder: str) -> dict[str, dict]:
    """The files of a processor's folder of benchmarks/results, by shape. Those of several shapes have tables of their own."""
    paths = sorted((RESULTS / folder).glob("*.json"))
    files = {f"benchmarks/results/{p.relative_to(RESULTS)}": json.loads(p.read_text()) for p in paths}
    order = ("preset", "dtype", "seq", "batch", "recompute")
    single = {name: r for name, r in files.items() if not any(isinstance(r.get(k), list) for k in order)}
    return dict(sorted(single.items(), key=lambda item: [(item[1].get(k) is not None, item[1].get(k)) for k in order]))


def beside_peers(files: dict[str, dict]) -> dict[str, dict]:
    return {name: r for name, r in files.items() if r.get("kind") == "peers"}


def parts() -> dict[Path, str]:
    """What stands between the marks of each file: steps of every processor, and first steps in SPEED of the first one only."""
    front, details = ["![Steps of every variant relative to ours, and the roofline](img/bench.svg)"], []
    for folder, processor in PROCESSORS.items():
        files = measured(folder)
        if not (results := beside_peers(files)):
            continue
        title = f"**On {processor}:**"
        steps, others = ([f"- {line}" for line in some] for some in (machine_line(results), facts(files)))
        starts = start_table(results)
        front += [title, "\n".join(peers_table(results)), *([] if folder else ["\n".join(starts)])]
        made = [steps, others, starts if folder else [], gemm_table(files), optimizers_table(files)]
        details += [title, *("\n".join(lines) for lines in made if lines)]
    if not details:
        return {SPEED: "Nothing is measured yet: `barellm bench step PRESET --baselines all` fills benchmarks/results/."}
    return {SPEED: "\n\n".join(front), DETAILS: "\n\n".join(details)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    results = list(beside_peers(measured("")).values())
    stale = not chart.FILE.exists() or escape(chart.words(results)) not in chart.FILE.read_text()
    differing = [chart.FILE] if stale else []
    for path, words in parts().items():
        text = path.read_text()
        if BEGIN not in text or END not in text:
            print(f"{path} has no lines {BEGIN} and {END}", file=sys.stderr)
            return 2
        made = text[: text.index(BEGIN) + len(BEGIN)] + "\n\n" + words + "\n\n" + text[text.index(END) :]
        if made != text:
            differing.append(path)
        if args.write:
            path.write_text(made)
        elif not args.check:
            print(words, end="\n\n")
    if args.write:
        chart.write(results)
    elif args.check and differing:
        names = " and ".join(str(path.relative_to(ROOT)) for path in differing)
        print(f"benchmarks/results say other than {names}: run python benchmarks/table.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
