"""The page (barellm/serving/page.html) in a real browser: Debian's chromium, driven by playwright. Chat, runs that grow, the file
from disk; every page of every test may print no error, ask no other server, and be wider than no window."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")
pytest.importorskip("uvicorn")
pytestmark = pytest.mark.oracle

from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402

from barellm.cli.main import main  # noqa: E402
from barellm.serving import live  # noqa: E402
from tests.chat.test_models import source  # noqa: E402
from tests.cli.conftest import TINY  # noqa: E402
from tests.serving.fake import CODE, HTML, FakeChat, served  # noqa: E402
from tests.serving.processes import process  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
expect.set_options(timeout=20_000)  # other tests run beside
GONE = ("net::ERR_",)  # of a server that ends before the page
WIDTHS = ((1400, 900), (800, 900), (420, 800))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    with sync_playwright() as player:
        found = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # root has no sandbox
        yield found
        found.close()


@pytest.fixture
def open_page(browser) -> Iterator[Callable[..., Page]]:
    """Opens an address in a window of its own. At the end no page may have printed an error or asked another server; an error that
    a test wants is in `errors`."""
    contexts, wrong = [], []

    def opened(address: str, *, width: int = 1400, height: int = 900, errors: tuple[str, ...] = (), **how: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **how)
        contexts.append(context)
        page = context.new_page()
        usual = ["status of 404", *errors]  # /v1/models of a page without chat
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" and not any(s in m.text for s in usual) else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith((address.split("#")[0], "data:")) else wrong.append(r.url))
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


def rows_of(steps: range, *, rate: float = 1.0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for step in steps:
        found.append({
            "kind": "train", "step": step, "loss": 2.0 + rate * 30 / (step + 10), "lr": 0.01 * rate, "grad_norm": 1.0 + step % 7,
            "tokens": 64 * step, "tokens_per_s": 1000.0, "seconds": step / 10,
        })  # fmt: skip
        if step % 20 == 0:
            found.append({"kind": "eval", "step": step, "val_nats": 2.1 + rate * 30 / (step + 10), "val_bits_per_byte": 1.0})
        if step % 50 == 0:
            found.append({"kind": "sample", "step": step, "text": f"{HTML} after step {step}"})
    return found


def make_run(folder: Path, steps: range, *, rate: float = 1.0, total: int = 400, finished: bool = False) -> Path:
    folder.mkdir(parents=True)
    config = {"preset": "default", "model": {"layers": 2}, "optim": {"lr": 0.01 * rate}, "train": {"steps": total, "minutes": 0.0}}
    (folder / "config.json").write_text(json.dumps(config))
    append(folder, steps, rate=rate)
    if finished:
        row = {"kind": "result", "step": steps[-1], "val_nats": 2.2, "val_bits_per_byte": 1.1, "gzip_bits_per_byte": 1.3}
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    return folder


def append(folder: Path, steps: range, *, rate: float = 1.0) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows_of(steps, rate=rate))


@pytest.fixture
def runs(tmp_path) -> Path:
    make_run(tmp_path / "runs" / "old run, 1", range(1, 301), total=300, finished=True)
    make_run(tmp_path / "runs" / "growing", range(1, 101), rate=0.8)
    return tmp_path / "runs"


@pytest.fixture
def chat() -> FakeChat:
    return FakeChat()


@pytest.fixture
def address(runs, chat) -> Iterator[str]:
    with served([*live.routes(runs), *chat.routes()]) as found:
        yield found


def say(page: Page, words: str) -> None:
    page.get_by_role("textbox", name="Message", exact=True).fill(words)
    page.keyboard.press("Enter")


def answers(page: Page) -> list[str]:
    return page.locator(".message.assistant .text").all_inner_texts()


# --- chat ---


def test_an_answer_streams_and_html_in_it_is_text(address, open_page, chat):
    page = open_page(address)
    expect(page.get_by_role("textbox", name="Message", exact=True)).to_be_focused()
    say(page, "hello")
    expect(page.locator(".message.assistant .text")).to_have_text("Answer 1: straße 日本 🙂 to hello")
    expect(page.locator(".note")).to_contain_text(re.compile(r"\d+ tokens, [\d.]+ a second"))
    say(page, "html")
    expect(page.locator(".message.assistant .text").last).to_have_text(HTML)
    assert page.title() != "broken" and page.locator("#messages img, #messages script").count() == 0
    say(page, "code")
    expect(page.locator(".message pre")).to_have_text("print('<b>')")
    expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)
    assert chat.asked[0]["stream"] and chat.asked[0]["model"] == "tiny"
    assert [m["role"] for m in chat.asked[2]["messages"]] == ["user", "assistant", "user", "assistant", "user"]
    assert CODE.count("```") == 2


def test_text_comes_while_the_model_writes(address, open_page):
    page = open_page(address)
    say(page, "slow")
    expect(page.locator(".message.assistant .text")).to_contain_text("word3 ")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_hidden()
    first = answers(page)[0]
    expect(page.locator(".message.assistant .text")).to_have_text(re.compile(f".{{{len(first) + 20},}}"))
    assert answers(page)[0].startswith(first.strip())
    page.keyboard.press("Escape")


@pytest.mark.parametrize("way", ["Escape", "Stop"])
def test_stop_ends_an_answer_and_regenerate_asks_again(address, open_page, chat, way):
    page = open_page(address)
    say(page, "slow")
    expect(page.locator(".message.assistant .text")).to_contain_text("word2 ")
    if way == "Escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    expect(page.locator(".note")).to_contain_text("Stopped")
    stopped = answers(page)[0]
    assert "word2" in stopped and "word900" not in stopped
    end = time.monotonic() + 10
    while not chat.gone and time.monotonic() < end:
        page.wait_for_timeout(20)
    assert chat.gone == 1, "the server was not told"
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".message.assistant .text")).to_contain_text("word1 ")
    assert len(answers(page)) == 1 and chat.asked[1] == chat.asked[0]
    page.keyboard.press("Escape")
    say(page, "and more")
    expect(page.locator(".message.assistant .text").last).to_contain_text("to and more")


@pytest.mark.parametrize(
    "words, note",
    [
        ("refuse", "temperature is 9, expected 0 to 2"), ("fail", "the model failed"),
        ("cut", "the server closed the connection"), ("long", "cut at the limit"),
    ],
)  # fmt: skip
def test_what_went_wrong_is_said_and_the_chat_goes_on(address, open_page, chat, words, note):
    page = open_page(address, errors=("status of 400",))
    say(page, words)
    expect(page.locator(".note")).to_contain_text(note)
    say(page, "again")
    expect(page.locator(".message.assistant .text").last).to_contain_text("to again" if words != "refuse" else "again")
    if words == "refuse":  # what got no answer belongs to the next turn
        assert chat.asked[1]["messages"] == [{"role": "user", "content": "refuse\n\nagain"}]


def test_keys_lines_settings_and_a_new_chat(address, open_page, chat):
    page = open_page(address)
    page.get_by_role("textbox", name="Message", exact=True).fill("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Max tokens").fill("7")
    page.get_by_label("Seed").fill("0")
    page.get_by_label("System message").fill("Be short.")
    page.get_by_label("Model").select_option("tiny-adapter")
    page.get_by_role("textbox", name="Message", exact=True).press("Enter")
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    asked = chat.asked[0]
    assert (asked["temperature"], asked["max_tokens"], asked["seed"], asked["model"]) == (0.5, 7, 0, "tiny-adapter")
    assert asked["messages"] == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "one\ntwo"}]
    assert "top_p" not in asked
    page.reload()
    assert len(answers(page)) == 1 and page.get_by_label("Temperature").input_value() == "0.5"
    page.get_by_role("button", name="New chat").click()
    assert answers(page) == []
    expect(page.get_by_role("button", name="Send")).to_be_disabled()


def test_a_key_opens_a_server_that_asks_for_one_and_is_kept_nowhere(open_page, runs):
    chat = FakeChat(key="secret")
    with served([*live.routes(runs), *chat.routes()]) as address:
        page = open_page(address, errors=("status of 401", *GONE))
        say(page, "hello")
        expect(page.locator(".note")).to_contain_text("no valid API key: enter it in the settings.")
        page.get_by_label("API key").fill("secret")
        page.get_by_label("API key").press("Tab")
        expect(page.get_by_label("Model")).to_have_value("tiny")
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".message.assistant .text")).to_contain_text("to hello")
        assert "secret" not in page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")


def test_a_server_that_loads_its_models_is_waited_for(open_page, runs):
    with served([*live.routes(runs), *FakeChat(loading=2).routes()]) as address:
        page = open_page(address, errors=("status of 503", *GONE))
        expect(page.get_by_label("Model")).to_have_value("tiny")
        say(page, "hello")
        expect(page.locator(".message.assistant .text")).to_contain_text("to hello")


# --- runs ---


def fact(page: Page, name: str) -> str:
    return page.locator("#facts div", has=page.get_by_text(name, exact=True)).locator("dd").inner_text().split("\n")[0]


def curve(page: Page, title: str) -> str:
    chart = page.locator("figure", has=page.get_by_role("heading", name=title))
    return chart.locator("svg path").last.get_attribute("d") or ""


def test_a_curve_moves_while_the_run_writes(address, open_page, runs):
    page = open_page(f"{address}#runs=growing")
    expect(page.get_by_role("heading", name="growing")).to_be_visible()
    assert (fact(page, "Step"), fact(page, "Left"), fact(page, "Tokens")) == ("100", "0:30", "6.4k")
    titles = page.locator("figure:visible h2").all_inner_texts()
    assert titles == ["Loss", "Bits per byte", "Learning rate", "Gradient norm", "Throughput"]
    before = {title: curve(page, title) for title in titles}
    append(runs / "growing", range(101, 202), rate=0.8)
    expect(page.locator("#facts")).to_contain_text("201")
    assert fact(page, "Left") == "0:20" and page.title().startswith("50% ")
    assert all(curve(page, title) != before[title] for title in titles)
    expect(page.locator("#samples pre")).to_have_text(f"{HTML} after step 200")
    page.get_by_role("button", name="Earlier").click()
    expect(page.locator("#samples pre")).to_have_text(f"{HTML} after step 150")
    expect(page.locator("#samples")).to_contain_text("3 of 4")
    assert page.locator("#samples img").count() == 0


def test_a_run_that_is_resumed_begins_again_at_its_checkpoint(address, open_page, runs):
    page = open_page(f"{address}#runs=growing")
    expect(page.locator("#facts")).to_contain_text("100")
    file = runs / "growing" / "metrics.jsonl"
    (runs / "new").write_text("".join(json.dumps(row) + "\n" for row in rows_of(range(1, 41))))
    os.replace(runs / "new", file)
    expect(page.locator("#facts dd").first).to_contain_text("40")
    append(runs / "growing", range(41, 44))
    expect(page.locator("#facts dd").first).to_contain_text("43")


def test_runs_are_compared_with_the_keys_that_differ(address, open_page, runs):
    page = open_page(f"{address}#runs")
    page.get_by_role("checkbox", name="Compare old run, 1").check()
    table = page.locator("#compared table")
    expect(table.locator("tbody tr")).to_have_count(2)
    head = table.locator("th").all_inner_texts()
    assert head[-2:] == ["optim.lr", "train.steps"] and "model.layers" not in head
    cells = [row.locator("td").all_inner_texts() for row in table.locator("tbody tr").all()]
    assert [row[0] for row in cells] == ["growing", "old run, 1"] and [row[-1] for row in cells] == ["400", "300"]
    lines = page.locator("figure", has=page.get_by_role("heading", name="Loss")).locator("svg g")
    colours = {group.evaluate("e => getComputedStyle(e).getPropertyValue('--mine')") for group in lines.all()}
    assert len(colours - {""}) == 2
    page.reload()  # the address names them
    expect(table.locator("tbody tr")).to_have_count(2)
    page.get_by_role("button", name="old run, 1").click()
    expect(page.locator("#compared")).to_be_hidden()
    expect(page.get_by_role("heading", name="old run, 1")).to_be_visible()
    expect(page.locator("#state")).to_have_text("default, finished")
    expect(page.locator("figure").first).to_contain_text("gzip -9")


def test_what_is_selected_focused_or_pressed_stays_while_numbers_come(address, open_page, runs):
    page = open_page(f"{address}#runs=growing")
    page.get_by_text("Configuration").click()
    button = page.get_by_role("button", name="old run, 1")
    button.hover()
    page.mouse.down()
    append(runs / "growing", range(101, 104), rate=0.8)
    expect(page.locator("#facts dd").first).to_contain_text("103")
    assert page.evaluate("document.querySelector('#list li:last-child').textContent").startswith("old run, 1")
    page.mouse.up()
    expect(page.get_by_role("heading", name="old run, 1")).to_be_visible()
    page.get_by_role("button", name="growing").click()
    page.get_by_text("optim.lr", exact=True).dblclick(position={"x": 12, "y": 14})
    append(runs / "growing", range(104, 106), rate=0.8)
    expect(page.locator("#facts dd").first).to_contain_text("105")
    assert page.evaluate("getSelection().toString().trim()") in ("optim", "optim.lr")
    page.get_by_role("checkbox", name="Compare growing").focus()
    append(runs / "growing", range(106, 108), rate=0.8)
    expect(page.locator("#facts dd").first).to_contain_text("107")
    expect(page.get_by_role("checkbox", name="Compare growing")).to_be_focused()


def test_axes_and_the_cursor_by_mouse_and_keys(address, open_page):
    page = open_page(f"{address}#runs=growing")
    chart = page.locator("figure", has=page.get_by_role("heading", name="Loss"))
    expect(chart).to_contain_text("training")
    last = chart.locator(".readout").inner_text()
    chart.locator("> svg").focus()
    page.keyboard.press("Home")
    expect(chart.locator(".readout")).to_contain_text("step 0")
    page.keyboard.press("Shift+ArrowRight")
    expect(chart.locator(".readout")).to_contain_text("step 10")
    other = page.locator("figure", has=page.get_by_role("heading", name="Throughput"))
    expect(other.locator(".readout")).to_contain_text("step 10")  # of all charts
    assert "step 10" in (chart.locator("> svg").get_attribute("aria-label") or "")
    page.keyboard.press("Escape")
    expect(chart.locator(".readout")).to_have_text(last.replace("\n", ""))
    steps = curve(page, "Loss")
    page.get_by_label("Over").select_option("tokens")
    chart.locator("> svg").hover()
    expect(chart.locator(".readout")).to_contain_text("tokens")
    page.get_by_label("log x").check()
    page.get_by_label("log y").check()
    assert curve(page, "Loss") not in (steps, "")
    page.get_by_label("Over").select_option("seconds")
    page.get_by_label("whole range").check()
    assert "NaN" not in chart.inner_html() and "Infinity" not in chart.inner_html()


def test_damaged_rows_are_left_out(address, open_page, runs):
    with (runs / "growing" / "metrics.jsonl").open("ab") as file:
        file.write(
            b'\xff\xfe\n[1]\nnull\n{"kind": {}}\n{"kind": "train", "step": "x"}\n{"kind": "eval", "step": 101, "val_nats": NaN, '
        )
        file.write(b'"val_bits_per_byte": 0.5}\n{"kind": "toString", "step": 1}\n{"kind": "train", "step": 102, "loss": 1e999}\n')
        file.write(b'{"kind": "sample", "step": 102, "text": 7}\n{"__proto__": {"kind": "train"}}\n{"kind": "train", "st')
    page = open_page(f"{address}#runs=growing")
    expect(page.locator("#facts dd").first).to_contain_text("102")
    assert fact(page, "Validation") == "2.3182"


def test_many_points_stay_few_and_fast(address, open_page, runs):
    make_run(runs / "long", range(1, 60_001), total=100_000)
    begin = time.monotonic()
    page = open_page(f"{address}#runs=long")
    expect(page.locator("#facts dd").first).to_contain_text("60,000", timeout=30_000)
    assert time.monotonic() - begin < 60
    chart = page.locator("figure", has=page.get_by_role("heading", name="Loss"))
    assert len(chart.inner_html()) < 300_000


def test_a_server_that_goes_away_is_named_and_found_again(open_page, runs):
    with served(live.routes(runs)) as address:
        page = open_page(address, errors=GONE)
        expect(page.locator("#connection")).to_have_text("Live")
        expect(page.get_by_role("link", name="Chat")).to_be_hidden()
        context = page.context
        context.route("**/live/**", lambda route: route.abort())
        expect(page.locator("#connection")).to_have_text("No server; trying again")
        expect(page.get_by_role("heading", name="growing")).to_be_visible()
        context.unroute("**/live/**")
        expect(page.locator("#connection")).to_have_text("Live")


# --- the file, windows, keys ---


def test_a_saved_page_opens_from_disk_without_a_server(open_page, runs, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["plot", str(runs / "old run, 1"), str(runs / "growing"), "--out", str(out)]) == 0
    page = open_page(f"file://{out}")
    expect(page.locator("#connection")).to_have_text("Saved page")
    expect(page.locator("#compared tbody tr")).to_have_count(2)
    assert curve(page, "Loss") and fact(page, "Step") == "300"
    expect(page.get_by_role("link", name="Chat")).to_be_hidden()
    page.locator("#list button").last.click()
    assert fact(page, "Step") == "100"
    expect(page.locator("#state")).to_have_text("default, not finished")
    expect(page.locator("#samples pre")).to_have_text(f"{HTML} after step 100")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width, height", WIDTHS)
def test_no_window_is_too_narrow_and_both_themes_are_there(address, open_page, width, height, scheme):
    page = open_page(address, width=width, height=height, color_scheme=scheme)
    say(page, "code")
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    say(page, "x" * 400)
    expect(page.locator(".message.assistant")).to_have_count(2)
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    for view in ("chat", "runs"):
        page.get_by_role("link", name=view.title()).click()
        if view == "runs":
            for box in page.get_by_role("checkbox", name="Compare").all() if width > 1000 else ():
                box.check()
            page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, view
    assert luminance(page) < 0.2 if scheme == "dark" else luminance(page) > 0.8


def luminance(page: Page) -> float:
    found = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(float, re.findall(r"[\d.]+", found)[:3])) / (3 * 255)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_that_people_need(address, open_page, scheme):
    """WCAG's 4.5 for text, 3 for curves and the frames of what has the focus."""
    page = open_page(address, color_scheme=scheme)

    def channels(name: str) -> list[float]:
        page.evaluate("name => { document.body.style.outlineColor = `var(--${name})`; }", name)
        found = page.evaluate("getComputedStyle(document.body).outlineColor")
        return [float(number) / 255 for number in re.findall(r"[\d.]+", found)[:3]]

    def light(name: str) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(name)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def ratio(one: str, other: str) -> float:
        dark, bright = sorted((light(one), light(other)))
        return (bright + 0.05) / (dark + 0.05)

    for ground in ("ground", "paper", "soft"):
        assert all(ratio(name, ground) >= 4.5 for name in ("ink", "muted", "bad", "good")), ground
    assert ratio("on-accent", "accent") >= 4.5
    assert all(ratio(name, "paper") >= 3 for name in ("accent", *(f"c{i}" for i in range(8))))


def test_the_switch_of_the_theme_is_remembered(address, open_page):
    page = open_page(address, color_scheme="dark")
    switch = page.get_by_role("button", name="Theme")
    assert luminance(page) < 0.2
    switch.click()
    assert luminance(page) > 0.8
    page.reload()
    assert luminance(page) > 0.8
    switch.click()
    assert luminance(page) < 0.2


def test_everything_is_reached_by_tab_in_order_and_shows_that_it_has_the_focus(address, open_page):
    page = open_page(f"{address}#runs=growing")
    expect(page.locator("figure").first).to_contain_text("training")
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            "(({ activeElement: e }) => [e === document.body ? '' : e.id || e.ariaLabel || e.textContent.slice(0, 12),"
            " getComputedStyle(e).outlineStyle])(document)"
        )
        if not name:  # round once
            break
        seen.append(name)
        assert outline != "none", name
    order = ["Skip to the ", "Chat", "Runs", "theme", "Compare growing", "axis", "smoothing", "logx", "logy", "all"]
    assert [name for name in seen if name in order] == order
    assert sum(name.endswith("along the curve.") for name in seen) == 5
    page.keyboard.press("Tab")
    page.locator(".skip").first.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_everything_that_is_used_has_a_name(address, open_page):
    page = open_page(address)
    say(page, "hello")
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    nameless = """[...document.querySelectorAll("button, input, select, textarea, a, svg[tabindex], [role]")].filter((e) =>
        e.checkVisibility() && !e.ariaLabel && !e.textContent.trim() && !(e.labels && e.labels.length) && !e.placeholder
        && e.getAttribute("role") !== "status").map((e) => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(nameless) == []
    page.get_by_role("link", name="Runs").click()
    expect(page.locator("figure").first).to_contain_text("training")
    assert page.evaluate(nameless) == []


# --- the real commands ---


@pytest.fixture
def model(own_cache, tmp_path) -> Path:
    """A tiny chat model, with positions for long answers."""
    source(tmp_path / "tiny", positions=2048)
    return tmp_path / "tiny"


def test_barellm_serve_is_talked_to(model, runs, tmp_path, open_page):
    with process(tmp_path, model, "--port", 0, "--runs", runs) as server:
        page = open_page(f"{server.url}/", errors=GONE)
        expect(page.get_by_label("Model")).to_have_value("tiny")
        page.get_by_label("Seed").fill("3")
        page.get_by_label("Max tokens").fill("24")
        say(page, "Hi")
        expect(page.get_by_role("button", name="Regenerate")).to_be_visible(timeout=30_000)
        asked = {"messages": [{"role": "user", "content": "Hi"}], "seed": 3, "max_tokens": 24}
        expected = server.ask("/v1/chat/completions", asked).json()["choices"][0]["message"]["content"]
        assert expected and page.locator(".message.assistant .text").text_content() == expected.replace("```", "")
        page.get_by_label("Max tokens").fill("1800")
        say(page, "More")
        expect(page.locator(".message.assistant .text").last).to_have_text(re.compile(".{40,}", re.DOTALL), timeout=30_000)
        page.keyboard.press("Escape")
        expect(page.locator(".note").last).to_contain_text("Stopped")
        page.get_by_role("link", name="Runs").click()
        expect(page.get_by_role("heading", name="growing")).to_be_visible()
        assert curve(page, "Loss")


def test_barellm_serve_with_a_key_asks_the_browser_for_it(model, runs, tmp_path, open_page):
    with process(tmp_path, model, "--port", 0, "--runs", runs, "--api-key-env", "KEY", KEY="a long secret") as server:
        page = open_page(
            f"{server.url}/", http_credentials={"username": "me", "password": "a long secret"}, errors=("status of 401", *GONE)
        )
        expect(page.get_by_label("Model")).to_have_value("tiny")
        page.get_by_label("Max tokens").fill("8")
        say(page, "Hi")
        expect(page.locator(".note")).to_contain_text(re.compile(r"\d tokens"), timeout=30_000)
        page.get_by_role("link", name="Runs").click()
        expect(page.get_by_role("heading", name="growing")).to_be_visible()


def test_a_real_run_is_watched_from_its_first_step_to_its_end(open_page, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))
    command = [
        sys.executable,
        "-m",
        "barellm",
        "train",
        "shakespeare-char",
        "--data",
        str(text),
        "--out",
        str(tmp_path / "r" / "run"),
    ]
    own = [*TINY, "--steps", "100000", "--minutes", "0", "--sample-every", "10", "--live", "0"]
    with subprocess.Popen([*command, *own], stdout=subprocess.PIPE, text=True) as trains:
        try:
            address = next(found[1] for line in iter(trains.stdout.readline, "") if (found := re.match(r"live +(\S+)", line)))
            page = open_page(address, errors=GONE)
            expect(page.locator("#state")).to_have_text("shakespeare-char, running", timeout=30_000)
            expect(page.locator("figure").first.locator("path").nth(1)).to_be_attached()
            first = curve(page, "Loss")
            expect(page.locator("#samples pre")).to_be_visible(timeout=20_000)
            page.wait_for_timeout(4500)
            assert curve(page, "Loss") != first and first
            assert page.title().endswith("run · barellm")
        finally:
            trains.terminate()
            trains.stdout.read()
        assert trains.wait() == 143
    expect(page.locator("#connection")).to_have_text("No server; trying again")
