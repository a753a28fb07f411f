"""The Pipeline tab on a page of a real browser; and runs that are large."""

import re
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from fpipe import Placement, Plan
from fpipe.effects import BackwardInput, Forward
from fpipe.tensorboard.columns import Columns, Header
from fpipe.tensorboard.writer import Writer

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [f"--{flag}" for flag in ("headless", "no-sandbox", "disable-gpu", "disable-sync", "no-first-run")]
FLAGS += [f"--disable-{what}" for what in ("background-networking", "component-update")]
PATIENCE = 30_000  # milliseconds


@contextmanager
def browser():
    """Chromium, drawing in software."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield found
        found.close()


class Tab:
    """The tab on a page, and what the console said."""

    def __init__(self, page, board):
        self.page, self.said = page, []
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: self.said.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.goto(f"{board.url}#fpipe_timeline")
        self.find()

    def find(self):
        """The tab's frame, once it has drawn."""
        self.page.wait_for_selector("iframe", state="attached")
        for _ in range(PATIENCE // 50):
            for frame in self.page.frames[1:]:
                with suppress(Exception):  # a frame that is still being loaded
                    if frame.evaluate("Boolean(window.fpipe)"):
                        self.frame = frame
                        self.js("window.fpipe.ready")
                        return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"the tab never came: {self.said}")

    def js(self, text, argument=None):
        return self.frame.evaluate(text, argument)

    def text(self, selector):
        return self.frame.locator(selector).inner_text()

    def until(self, condition):
        self.frame.wait_for_function(condition)

    def show(self, run, step=None, other=None):
        """Choose a run, and wait until its figures are there."""
        self.frame.select_option("#run", run)
        if step is not None:
            self.frame.select_option("#step", str(step))
        if other is not None:
            self.js(
                "value => { const s = document.querySelector('#other'); "
                "s.value = [...s.options].find(o => o.textContent.includes(value)).value; "
                "s.dispatchEvent(new Event('change')) }",
                other,
            )
        self.page.wait_for_timeout(100)
        self.js("window.fpipe.ready")
        self.until("() => window.fpipe.app.capture && window.fpipe.app.capture.summary")

    def table(self, name, tab):
        """A table's rows, as texts."""
        self.frame.click(f"#tab-{tab}")
        self.until(f"() => document.querySelectorAll('#{name} tbody tr').length > 0")
        rows = self.js(
            f"[...document.querySelectorAll('#{name} tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
        )
        return [[re.sub(r"\s+", " ", cell).strip() for cell in row] for row in rows]

    def place(self, rank, row):
        """Where the middle of an effect's box is on the page."""
        return self.js(
            """async ([rank, row]) => {
                const at = file => new URL(file, document.querySelector("link[href*='page.css']").href).href;
                const { boxOf } = await import(at("layout.js")), { AXIS } = await import(at("scene.js"));
                const { sheet } = window.fpipe.app, own = sheet.main.ranks.get(rank);
                const box = boxOf(sheet.layout.groups, sheet.main, { rank, row });
                const canvas = document.querySelector("#canvas").getBoundingClientRect();
                const frame = window.frameElement.getBoundingClientRect();
                const scroll = document.querySelector("#scroll").scrollTop;
                return [frame.x + canvas.x + (sheet.view.x(own.start[row]) + sheet.view.x(own.end[row])) / 2,
                        frame.y + canvas.y + AXIS + box.y + box.height / 2 - scroll];
            }""",
            [rank, row],
        )

    def hover(self, rank, row):
        """What stands beside the pointer on an effect: name -> text."""
        self.page.mouse.move(*self.place(rank, row))
        self.until("() => !document.querySelector('#hover').hidden")
        return self.text("#hover")

    def press(self, key):
        self.frame.focus("#canvas")
        self.page.keyboard.press(key)
        self.page.wait_for_timeout(60)

    def view(self):
        return self.js("[window.fpipe.app.sheet.view.from, window.fpipe.app.sheet.view.to]")


@contextmanager
def opened(chromium, board, **size):
    page = chromium.new_page(viewport={"width": 1400, "height": 900} | size)
    try:
        yield (tab := Tab(page, board))
        assert tab.said == []
    finally:
        page.close()


def large(logdir, count, ranks=16):
    """A run of so many spans in all; every rank is busy nine tenths of the time, in effects of random length."""
    random, plan = np.random.default_rng(0), Plan(Placement.loop(ranks), count // ranks // 2)
    none = np.full(count // ranks, -1, np.int32)
    for rank in range(ranks):
        took = random.exponential(1e-3, count // ranks)
        ends = np.cumsum(took + random.exponential(1e-4, count // ranks))
        effects = [kind(rank, m) for m in range(plan.microbatches) for kind in (Forward, BackwardInput)]
        with Writer(logdir, "measured", rank) as writer:
            header = Header("measured", 1, rank, "large", plan)
            writer.timeline(header, Columns(effects, ends - took, ends, (none, none)))
