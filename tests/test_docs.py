"""What the documents say holds: their code runs, their commands parse, their links lead somewhere, the house is as drawn."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shlex
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import barellm
import barellm.cpu.kernels  # (fills the registry, which a page's kernels must not change for other tests)
from barellm.assembly.build import build_programs
from barellm.cli.main import COMMANDS, parsed
from barellm.config.overrides import changed
from barellm.cpu import processor
from barellm.cpu.isa import X86
from barellm.cpu.kernel import REGISTRY
from barellm.cpu.step import lower_and_plan
from barellm.models import preset, presets
from barellm.training.console import in_words
from barellm.training.report import closing
from tests.presets import planned

ROOT = Path(__file__).parents[1]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
BOOK = sorted((ROOT / "docs" / "book").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *BOOK, ROOT / "docs" / "decisions" / "README.md"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)|(?:src|href)=\"([^\"#]+)\"")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TOCTREE = re.compile(r"^```\{toctree\}\n(?::[^\n]*\n)*\n(.*?)^```$", re.MULTILINE | re.DOTALL)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line before the code, code) of each fenced block."""
    text = page.read_text()
    found = [m for m in BLOCK.finditer(text) if m[1] == language]
    return [(text[: m.start(2)].count("\n"), m[2]) for m in found]


@each_page
@pytest.mark.extended
def test_python_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    before = dict(REGISTRY.entries)
    module = ModuleType("page")  # which a model that a page defines is found in
    monkeypatch.setitem(sys.modules, module.__name__, module)
    try:
        for line, code in blocks(page, "python"):
            exec(compile("\n" * line + code, page, "exec"), module.__dict__)  # a traceback names the page's line
    finally:
        REGISTRY.entries.clear()
        REGISTRY.entries.update(before)


@pytest.mark.parametrize(
    "words",
    ["units.py", "units.py --help", "units.py -h", "units.py data", "units.py accuracy gone.jsonl base", "docstrings.py --help"],
)
def test_an_example_with_other_arguments_says_its_usage(words, tmp_path, monkeypatch, capsys):
    """On one line, and nothing is written."""
    name, *arguments = words.split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        raise SystemExit(capsys.readouterr().out)
    assert f"usage: python examples/{name} " in str(ended.value) and str(ended.value).strip().count("\n") == 0
    assert not list(tmp_path.iterdir())


def run_notebook(name: str, change: dict[str, str] | None = None) -> dict[str, object]:
    """The names that its cells leave, run from top to bottom. `change`: texts of the first one that are others here."""
    names: dict[str, object] = {"__name__": "notebook"}
    cells = [cell for cell in json.loads((ROOT / "examples" / name).read_text())["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        code = "".join(cell["source"])
        for old, new in (change or {}).items() if cell is cells[0] else ():
            assert old in code, old
            code = code.replace(old, new)
        exec(compile(code, cell["id"], "exec"), names)
    return names


@pytest.mark.extended
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "agg")
    run = run_notebook("train_and_sample.ipynb")["run"]
    assert isinstance(run, barellm.Run) and run.losses[-1] < 0.75 * run.losses[0]


@pytest.mark.extended
def test_the_notebook_of_an_adapter_runs_from_top_to_bottom(tmp_path, monkeypatch):
    """In a few steps, after which no answer is right yet."""
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.syspath_prepend(ROOT / "examples")
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(900)))
    few = {'"stdlib", 400, 1200, 600': f'"{tmp_path / "text.txt"}", 4, 40, 2'}
    names = run_notebook("finetune_units.ipynb", few)
    tuned, right = names["tuned"], names["right"]
    assert isinstance(tuned, barellm.Run) and tuned.losses[-1] < 0.85 * tuned.losses[0]
    assert right == {None: 0, "units": 0}


@each_page
def test_commands_parse(page, no_own_models, monkeypatch):
    monkeypatch.chdir(ROOT)
    for _, code in blocks(page, "sh"):
        for line in code.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] != ["barellm"] or words[1:] in (["--help"], ["--version"]):
                continue
            assert words[1] in COMMANDS, line
            parsed(words[1:])


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and the site make them."""
    found: set[str] = set()
    for title in HEADING.findall(re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
        found.add(next(name for name in (slug, *(f"{slug}-{i}" for i in range(1, 99))) if name not in found))
    return found


@pytest.mark.parametrize("page", [*PAGES, *DECISIONS], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """To files and headings that are there. The site's own build says the same (`make site`)."""
    for match in LINK.finditer(page.read_text()):
        target = match[1] or match[3] or page.name
        assert "://" in target or (page.parent / target).exists(), match[0]
        if match[2] and target.endswith(".md"):
            assert match[2] in anchors(page.parent / target), match[0]


def test_every_page_has_its_place_in_the_book():
    """Once, in the order that docs/index.md gives the site, and docs/book/index.md its chapters."""
    listed = []
    for index in (ROOT / "docs" / "index.md", ROOT / "docs" / "book" / "index.md"):
        entries = [line for tree in TOCTREE.findall(index.read_text()) for line in tree.split()]
        listed += [(index.parent / f"{entry}.md").resolve() for entry in entries]
    assert sorted(listed) == sorted(page for page in PAGES if page != ROOT / "docs" / "index.md")


DECISION = re.compile(
    r"# (?P<title>[^\n]+)\n\n(?P<date>\d{4}-\d\d-\d\d)\. [^\n]+\n\n## Context\n\n.+\n\n## Tried\n\n.+\n\n## Numbers\n\n.+\n\n"
    r"## Verdict\n\n\*\*(?P<verdict>Accepted|Rejected|Open)\.\*\* .+\n",
    re.DOTALL,
)


def test_each_decision_has_its_parts_and_its_row_in_the_index():
    rows = []
    for page in DECISIONS:
        text = page.read_text()
        match = DECISION.fullmatch(text)
        assert match and re.findall("^##? .*", text, re.MULTILINE)[1:] == [
            f"## {part}" for part in ("Context", "Tried", "Numbers", "Verdict")
        ], page.name
        assert len(text.split()) <= 300, page.name
        rows.append(f"| {page.name[:3]} | [{match['title']}]({page.name}) | {match['verdict'].lower()} | {match['date']} |")
    index = (DECISIONS[0].parent / "README.md").read_text()
    assert [line for line in index.splitlines() if re.match(r"\| \d", line)] == rows
    assert [row[2:5] for row in rows] == [f"{number:03}" for number in range(1, len(rows) + 1)]


def test_the_reference_is_what_the_docstrings_say(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    reference = import_module("reference")
    assert reference.FILE.read_text() == reference.page(), "run: python docs/reference.py"


def test_the_tables_of_few_rows_are_those_of_their_files():
    few_rows = import_module("benchmarks.few_rows")
    assert few_rows.PAGE.read_text() == few_rows.page(), "run: python -m benchmarks.few_rows --write"


@pytest.mark.extended
def test_the_house_is_as_drawn():
    spec = importlib.util.spec_from_file_location("make", ROOT / "docs" / "img" / "make.py")
    assert spec and spec.loader
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    make.check_arrows()


def test_the_lines_about_the_default_run_are_those_of_its_file(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "img")
    run = import_module("run")
    file, text = ROOT / run.RUN, (ROOT / "README.md").read_text()
    between = text.partition(run.BEGIN)[2].partition(run.END)[0].strip()
    assert between == (run.lines(run.rows_of(file)[-1]) if file.exists() else "")


def test_a_run_is_compared_with_that_of_the_readme(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "img")
    run = import_module("run")
    theirs = run.rows_of(ROOT / run.RUN)[-1]
    ours = theirs | {"steps": 700, "dtype": "fp32", "val_bits_per_byte": theirs["val_bits_per_byte"] + 0.1}
    said = run.comparison(ours, theirs)
    assert "+0.100 bits per byte: 700 steps fitted, 1,465 there, fp32 for bf16" in said
    assert max(map(len, said.splitlines())) <= 80


def test_the_picture_of_the_default_run_shows_what_a_prompt_gives(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "img")
    run = import_module("run")
    sample = run.rows_of(ROOT / run.SAMPLE)[0]
    assert sample["prompt"] == "def main(" and f"step-{run.rows_of(ROOT / run.RUN)[-1]['steps']:06d}" in sample["checkpoint"]


def test_the_end_of_a_run_is_as_the_page_for_newcomers_shows_it(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "img")
    run = import_module("run")
    row = run.rows_of(ROOT / run.RUN)[-1] | {"checkpoint": "runs/default/checkpoints/step-001465"}
    lines = closing(row, Path("runs/default"), preset("default"))
    text = (ROOT / "docs" / "first_run.md").read_text()
    shown = text.partition("<!-- closing -->")[2].partition("<!-- /closing -->")[0]
    assert [line.removeprefix("    ") for line in shown.strip("\n").splitlines()] == lines[1:]


PRESET_ROW = re.compile(r"^\| ([\w-]+) \| ([\d.]+) (million|billion) \| (?:[^|]+) \| (\d+ \w+) \|", re.MULTILINE)


def test_the_bounds_of_the_presets_follow_from_their_operations():
    """For the peak that the page names."""
    text = (ROOT / "docs" / "first_run.md").read_text()
    (peak,) = re.findall(r"which reach (\d+) GFLOP/s in bf16", text)
    rows = PRESET_ROW.findall(text)
    assert len(rows) >= 5
    for name, size, unit, time in rows:
        config = changed(preset(name), {"train.dtype": "bf16"})
        count = float(size) * {"million": 1e6, "billion": 1e9}[unit]
        programs = build_programs(config)
        stored = sum(t.size for t in programs["init"].store.of_role("parameter"))
        assert count == pytest.approx(stored, rel=0.04), name
        step = programs["forward_backward"].flops * config.train.gradient_accumulation_steps + programs["optimizer_step"].flops
        assert in_words(config.train.steps * step / (float(peak) * 1e9)) == time, name


TABLE_ROW = re.compile(r"^\| ([\w.-]+) \| (\d+) x (\d+) \| ([\d.,]+) \| ([\d.,]+) \|", re.MULTILINE)


@pytest.mark.extended
def test_the_table_of_arenas_is_what_is_planned(monkeypatch):
    """For the machine that the table names, whatever this one is: its first cache decides some tiles."""
    monkeypatch.setattr(processor, "caches", lambda: {1: 32 << 10, 2: 1 << 20, 3: 32 << 20})
    rows = TABLE_ROW.findall((ROOT / "docs" / "architecture.md").read_text())
    assert [row[0] for row in rows] == planned()
    for name, batch, seq, plain, recompute in rows:
        config = changed(preset(name), {"train.dtype": "bf16"})
        assert (config.train.micro_batch_size, config.train.seq) == (int(batch), int(seq))
        for wanted, again in ((plain, False), (recompute, True)):
            programs = build_programs(changed(config, {"train.recompute": again}))
            arena = lower_and_plan(programs, threads=2, isa=X86["avx512_bf16"]).plan.arena_bytes
            assert f"{arena / 2**20:,.1f}" == wanted, (name, again)


def test_the_page_of_optimizers_names_the_presets_that_use_muon():
    text = (ROOT / "docs" / "optimizers.md").read_text()
    said = re.search(r"The presets ([^.]*?) use Muon", text)
    assert said and set(re.findall(r"`([\w-]+)`", said[1])) == {n for n in presets() if preset(n).optim.name == "muon"}
