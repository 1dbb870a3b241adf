"""Show what this machine has and what barellm will use, for bug reports and to see why a run is slower than expected."""

import argparse
import contextlib
import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import wrap
from typing import Any

from barellm import __version__, models
from barellm.cli.parsing.options import add, add_device
from barellm.errors import UserError

PACKAGES = ("numpy", "ml_dtypes", "llvmlite", "tokenizers", "tiktoken", "xxhash", "matplotlib")


def configure(parser: argparse.ArgumentParser) -> None:
    add(parser, "--measure", "measure the rates of this machine again; rooflines and MFU follow from them")
    add_device(parser, "with --measure: cpu or cuda")
    add(parser, "--gpu", "check the GPU's kernels against float64 again, with a table for reports")
    add(parser, "--json", "one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the report, after measuring rates or checking the GPU if asked to."""
    if args.measure:
        measure(args.device)
    if args.gpu:
        return check_gpu()
    found = report()
    if args.json:
        print(json.dumps(found))
        return 0
    from barellm.training.console import show

    for title, values in found.items():
        print(title)
        for name, value in values.items():
            show(f"  {name:<20} {_shown(value)}")
    return 0


def report() -> dict[str, dict[str, Any]]:
    """{section: {fact: value}}; None for what cannot be determined. Never raises because of the machine."""
    return {
        "software": {
            "barellm": __version__, "python": f"{platform.python_version()} ({platform.python_implementation()})",
            "system": platform.platform(), **{name: _version(name) for name in PACKAGES},
        },
        "processor": processor(), "memory": memory(), "gpu": gpu(), "barellm uses": uses(), "measured rates": rates(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("BARELLM_")},
    }  # fmt: skip


def processor() -> dict[str, Any]:
    """The CPU, what of it this process may use, and its caches."""
    from barellm.cpu.processor import known_caches
    from barellm.cpu.threads import allowed_cpus, logical_cpus
    from barellm.runtime.cgroup import cpu_limit

    return {
        "name": _processor_name(), "architecture": platform.machine(), "logical processors": os.cpu_count(),
        "allowed (affinity)": len(logical_cpus()), "allowed cores": len(allowed_cpus()), "cgroup cpu limit": cpu_limit() or "none",
        "caches": ", ".join(f"L{level} {nbytes >> 10}K" for level, nbytes in sorted(known_caches().items())) or None,
    }  # fmt: skip


def memory() -> dict[str, Any]:
    """Memory limit and its source, available bytes, and huge pages."""
    from barellm.runtime.memory import memory_limit

    limit, source = memory_limit()
    available = None
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    return {
        "limit bytes": limit, "limit set by": source, "available bytes": available,
        "huge pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
    }  # fmt: skip


def gpu() -> dict[str, Any]:
    """{title: value} of the GPU for `--device cuda` and of its tools, or why there is none: a missing driver is no error here."""
    from barellm.cuda import compile as cuda_compile
    from barellm.cuda import cublaslt, driver

    try:
        cublaslt_path = cublaslt.find()
    except UserError:
        cublaslt_path = "none (only --gemm-backend cublaslt needs it)"
    cubins = list(cuda_compile.cache_folder().glob("*.cubin"))
    found: dict[str, Any] = {
        "cuda-bindings": _version("cuda-bindings"),
        "triton": f"{_version('triton')} (kernels are compiled by {cuda_compile.TRITON})",
        "cublasLt": cublaslt_path,
        "cubin cache": f"{cuda_compile.cache_folder()}: {len(cubins)} kernels",
    }
    try:
        device = driver.device()
    except UserError as error:
        return {"device cuda": f"no: {error}", **found}
    return {
        "device cuda": device.name, "compute capability": f"{device.arch // 10}.{device.arch % 10}", "multiprocessors": device.sms,
        "memory bytes": device.nbytes, "driver": f"CUDA {device.driver // 1000}.{device.driver % 1000 // 10}", **found,
    }  # fmt: skip


def check_gpu() -> int:
    """Run the GPU self-check of GPT-2's and Llama's kernels and print each error over its bound. Exit status 1 if one fails."""
    from barellm.assembly.build import build_programs, resolved
    from barellm.assembly.self_check import small
    from barellm.runtime.backend import backend

    rows: dict[str, Any] = {}
    for preset in ("gpt2-124m", "llama-124m"):
        rows |= backend("cuda").self_checked(small(resolved(models.preset(preset), "cuda")), rows, build_programs)
    for name, value in [*gpu().items(), ("barellm", __version__)]:
        print(f"{name:<20} {_shown(value)}")
    print(f"\n{'kernel':<62} error/bound")
    for case, entry in rows.items():
        for name, worst in entry["kernels"].items():
            print(f"{f'{case}: {name}'.removesuffix(': '):<62} {worst:.2g}")
        if entry["wrong"]:
            print(f"{case:<62} FAILS", *wrap(entry["wrong"], 76), sep="\n    ")
    return int(any(entry["wrong"] for entry in rows.values()))


def measure(device: str) -> None:
    """Measure the peaks and bandwidths again, and forget what was kept of them."""
    from barellm.tools.plan.roofline import NAMED, kept, open_bench

    with contextlib.closing(open_bench(device)) as bench:
        for what in ("fp32", "bf16", *(["fp16"] * (device == "cuda")), *NAMED.values()):
            kept(bench, what, renew=True)


def rates() -> dict[str, str]:
    """Measured rates of this machine: FLOP/s of matmuls by dtype, memory bandwidth by mix."""
    from barellm.cpu.backend import machine_of
    from barellm.cuda import driver
    from barellm.runtime.rates import kept_rates

    shown = {}
    for device, machine in (("cpu", machine_of), ("cuda", lambda: driver.device().name)):
        with contextlib.suppress(UserError):  # no such device; or a variable of the environment is wrong
            for name, rate in kept_rates(machine()).items():
                unit = "GFLOP/s" if name in ("fp32", "bf16", "fp16") else "GB/s"
                noisy = f" (noisy: measurements differ by {rate.spread:.0%})" * rate.noisy
                shown[f"{device} {name}"] = f"{rate.value / 1e9:,.0f} {unit}{noisy}"
    return shown or {"none": "not measured yet: barellm doctor --measure"}


def uses() -> dict[str, Any]:
    """What barellm chooses on this machine: instruction set, dtype, threads, caches."""
    from barellm.cpu import isa, jit, tuning
    from barellm.cpu.backend import default_dtype
    from barellm.cpu.threads import thread_count
    from barellm.data.cache import cache_folder

    facts: dict[str, Callable[[], Any]] = {
        "instruction set": lambda: isa.host().name, "instruction sets here": lambda: ", ".join(isa.available()),
        "default dtype": default_dtype, "threads": thread_count, "text cache": lambda: cache_folder("tokens").parent,
        "object cache": jit.cache_folder, "tuned GEMMs": lambda: tuning.count(isa.host(), thread_count()),
    }  # fmt: skip
    return {name: _or_problem(fact) for name, fact in facts.items()}


def _or_problem(fact: Callable[[], Any]) -> Any:
    """The fact, or in words what a variable of the environment has that makes it impossible."""
    try:
        found = fact()
    except UserError as error:
        return f"no: {error}"
    return str(found) if isinstance(found, Path) else found


def _processor_name() -> str:
    from llvmlite.binding import get_host_cpu_name

    from barellm.cpu.processor import brand

    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return brand() or get_host_cpu_name()  # Linux names no model of aarch64


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _shown(value: Any) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)
