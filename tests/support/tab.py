"""The Pipeline tab on a page of a real browser; and runs that are large."""

import re
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest

from fpipe import Placement, Plan
from fpipe.effects import BackwardInput, Forward
from fpipe.tensorboard.files.columns import Columns, Header
from fpipe.tensorboard.files.writer import Writer

CHROMIUM = Path("/usr/bin/chromium")
BROWSED = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no Chromium at {CHROMIUM}: install Debian's package"),
]  # the marks of tests that need it
FLAGS = [f"--{flag}" for flag in ("headless", "no-sandbox", "disable-gpu", "disable-sync", "no-first-run")]
FLAGS += [f"--disable-{what}" for what in ("background-networking", "component-update")]
PATIENCE = 30_000  # milliseconds
CLOCK = """
Object.defineProperty(window, "fpipe", {
    configurable: true,
    set(value) {
        Object.defineProperty(window, "fpipe", { value });
        window.begun = performance.now();
        value.ready.then(() => (window.done = performance.now()));
    },
});
"""  # from when the page's frame is there until all is drawn
HASTE = """
const { setInterval } = window;
window.setInterval = (call, wait, ...given) => setInterval(call, wait === 5000 ? 500 : wait, ...given);
"""  # the page asks the server for news ten times as often
CHOSEN = """([run, step, beside, its]) => {
    const choose = (id, wanted, is = one => one.value === wanted) => {
        const list = document.querySelector(id), option = wanted === null ? null : [...list.options].find(is);
        if (option) {
            list.value = option.value;
            list.dispatchEvent(new Event("change"));
        }
        return wanted === null || Boolean(option);
    };
    return choose("#run", run) && choose("#step", step)
        && choose("#other", beside, one => one.textContent.includes(beside)) && choose("#other-step", its);
}"""  # true once the lists have what is to be chosen
SETTLED = """([run, step]) => {
    const { capture, answer, sheet } = window.fpipe.app;
    if (!capture?.summary || !document.querySelector("#progress").hidden) return false;
    if (!capture.large && capture.whatIf === undefined) return false; // its headline changes the height of the timeline
    if (capture.entry.run !== run || (step !== null && capture.entry.step !== step)) return false;
    if (!sheet.other) return !answer;
    return sheet.other.unit !== capture.unit || Boolean(answer && sheet.other.summary);
}"""
MODULE = "const module = file => import(new URL(file, document.querySelector(\"link[href*='page.css']\").href).href);"
BOX = f"""async ([rank, row]) => {{
    {MODULE}
    const [{{ boxOf }}, {{ AXIS }}] = await Promise.all(["layout.js", "measures.js"].map(module));
    const {{ sheet }} = window.fpipe.app, own = sheet.main.ranks.get(rank);
    const box = boxOf(sheet.layout.groups, sheet.main, {{ rank, row }});
    const top = AXIS + box.y - document.querySelector("#scroll").scrollTop;
    return [sheet.view.x(own.start[row]), sheet.view.x(own.end[row]), top, top + box.height];
}}"""
LINES = f"""async kind => {{
    {MODULE}
    const {{ AXIS }} = await module("measures.js"), {{ sheet }} = window.fpipe.app;
    const {{ prototype }} = Path2D, {{ moveTo, lineTo }} = prototype, found = [];
    let last = [0, 0];
    prototype.moveTo = function (x, y) {{ last = [x, y]; moveTo.call(this, x, y); }};
    prototype.lineTo = function (x, y) {{ found.push([...last, x, y]); last = [x, y]; lineTo.call(this, x, y); }};
    window.fpipe.redraw();
    Object.assign(prototype, {{ moveTo, lineTo }});
    const lanes = sheet.layout.groups.flatMap(group => group.tracks).filter(track => track.kind === kind);
    const shift = AXIS - document.querySelector("#scroll").scrollTop;
    const within = y => lanes.some(lane => y >= lane.y + shift && y <= lane.y + shift + lane.height);
    return found.filter(([, y0, , y1]) => within(y0) && within(y1));
}}"""


def amount(text):
    """A number with its unit, in seconds or bytes."""
    match = re.match(r"([+\u2212±]?)([\d.]+(?:e[+-]?\d+)?) ?(ns|µs|ms|s|KiB|MiB|GiB|B)?", text)
    units = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    return (-1 if match[1] == "\u2212" else 1) * float(match[2]) * units.get(match[3], 1.0)


@contextmanager
def browser():
    """Chromium, drawing in software."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield found
        found.close()


class Tab:
    """The tab on a page, and what the console said.

    Args:
        state: the part of the address after the tab's name.
    """

    def __init__(self, page, board, state=""):
        self.page, self.said = page, []
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: self.said.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.goto(f"{board.url}#fpipe_timeline{state}")
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

    def until(self, condition, argument=None):
        self.frame.wait_for_function(condition, arg=argument)

    def show(self, run, step=None, other=None):
        """Choose a run, and wait until its figures are there, and those of what stands beside it."""
        beside, _, its = (other or "").partition(", step ")
        self.until(CHOSEN, [run, None if step is None else str(step), beside or None, its or None])
        self.settled(run, step)

    def settled(self, run, step=None):
        """Wait until a run is shown whole."""
        self.until(SETTLED, [run, step])

    def released(self):
        """Let go of the range, the selection and the zoom, with the mouse off the timeline."""
        self.page.mouse.move(0, 0)  # where it is, a line is drawn
        self.until("() => !window.fpipe.app.sheet.pointer.place")
        self.js(
            "keys => { for (const key of keys) document.querySelector('#canvas')"
            ".dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true })) }",
            ["Escape", "Escape", "0"],
        )

    def state(self):
        """What the address says of the tab: name -> text."""
        parts = [part.split("=", 1) for part in urlsplit(self.page.url).fragment.split("&")[1:]]
        return {name.removeprefix("p.fpipe_timeline."): unquote(text) for name, text in parts}

    def linked(self, **texts):
        """Wait until the address says this; None for a name that it lacks."""
        for _ in range(PATIENCE // 50):
            if {name: self.state().get(name) for name in texts} == texts:
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"the address never had {texts}: {self.state()}")

    def again(self):
        """Load the frame anew, and not the page around it."""
        with self.frame.expect_navigation():
            self.js("() => void setTimeout(() => location.reload())")
        self.find()

    @contextmanager
    def answered(self, texts):
        """The frame loaded anew within, with texts instead of what the server has under some names."""
        for name, text in texts.items():
            self.page.route(f"**/{name}", _answer(text))
        self.again()
        try:
            yield
        finally:
            self.page.unroute_all()
            self.again()

    def forgive(self, text):
        """Forget what the console said of what a test did on purpose."""
        self.said[:] = [said for said in self.said if text not in said]

    def table(self, panel, at=0):
        """The rows of a panel's table, as texts."""
        self.frame.click(f"#tab-{panel}")
        table = f"document.querySelectorAll('#panel-{panel} table')[{at}]"
        self.until(f"() => {table}?.tBodies[0].rows.length > 0")
        rows = self.js(f"[...{table}.tBodies[0].rows].map(row => [...row.cells].map(cell => cell.innerText))")
        return [[re.sub(r"\s+", " ", cell).strip() for cell in row] for row in rows]

    def unit(self, panel, head, at=0):
        """The unit that the head of a column of a panel's table names."""
        heads = f"[...document.querySelectorAll('#panel-{panel} table')[{at}].tHead.rows[0].cells]"
        return self.js(f"head => {heads}.find(cell => cell.innerText.startsWith(head)).innerText", head).rpartition(
            " "
        )[2]

    def box(self, rank, row):
        """Left, right, top and bottom of an effect's box on the canvas."""
        return self.js(BOX, [rank, row])

    def on_page(self, x, y):
        """Where a place of the canvas is on the page."""
        return self.js(
            """([x, y]) => {
                const canvas = document.querySelector("#canvas").getBoundingClientRect();
                const frame = window.frameElement.getBoundingClientRect();
                return [frame.x + canvas.x + x, frame.y + canvas.y + y];
            }""",
            [x, y],
        )

    def place(self, rank, row):
        """Where the middle of an effect's box is on the page."""
        left, right, top, bottom = self.box(rank, row)
        return self.on_page((left + right) / 2, (top + bottom) / 2)

    def hover(self, rank, row):
        """What stands beside the pointer on an effect."""
        self.page.mouse.move(0, 0)
        self.page.mouse.move(*self.place(rank, row))
        self.until(
            "([rank, row]) => { const { spot } = window.fpipe.app.sheet.pointer; "
            "return spot?.rank === rank && spot.row === row }",
            [rank, row],
        )
        return self.text("#hover")

    def hover_idle(self, rank, row, when):
        """What stands beside the pointer where the rank of an effect idles."""
        _, _, top, bottom = self.box(rank, row)
        x = self.js("when => window.fpipe.app.sheet.view.x(when)", when)
        self.page.mouse.move(0, 0)
        self.page.mouse.move(*self.on_page(x, (top + bottom) / 2))
        self.until("() => window.fpipe.app.sheet.pointer.gap")
        return self.text("#hover")

    def selected(self):
        """(rank, row) of the selection."""
        return tuple(self.js("(({ rank, row }) => [rank, row])(window.fpipe.app.sheet.selected)"))

    def selected_under_pointer(self):
        """(rank, row) of the effect under the pointer."""
        return tuple(self.js("(({ rank, row }) => [rank, row])(window.fpipe.app.sheet.pointer.spot)"))

    def tracks(self, rank):
        """Which tracks of a rank are shown."""
        return set(
            self.js(
                "rank => window.fpipe.app.sheet.layout.groups.find(g => g.number === rank).tracks.map(t => t.kind)",
                rank,
            )
        )

    def lines(self, kind):
        """The straight lines that are drawn within tracks of a kind: x and y where each begins, and where it ends."""
        return self.js(LINES, kind)

    def colour(self, x, y):
        """Red, green and blue of a pixel of the canvas."""
        return self.js(
            """([x, y]) => {
                window.fpipe.redraw();
                const canvas = document.querySelector("#canvas"), ratio = window.devicePixelRatio;
                return [...canvas.getContext("2d").getImageData(x * ratio, y * ratio, 1, 1).data.slice(0, 3)];
            }""",
            [x, y],
        )

    def pixels(self):
        """All that is drawn, to be compared."""
        return self.js(
            """() => {
                window.fpipe.redraw();
                return ["#canvas", "#over"].map(id => document.querySelector(id).toDataURL()).join();
            }"""
        )

    def press(self, key):
        self.frame.focus("#canvas")
        self.page.keyboard.press(key)

    def view(self):
        return self.js("[window.fpipe.app.sheet.view.from, window.fpipe.app.sheet.view.to]")


@contextmanager
def opened(chromium, board, script="", state="", size=(1400, 900)):
    """The tab on a page of its own, where a script runs before any other; at last, that the console said nothing."""
    page = chromium.new_page(viewport={"width": size[0], "height": size[1]})
    try:
        page.add_init_script(script)
        yield (tab := Tab(page, board, state))
        assert not tab.said, tab.said
    finally:
        page.close()


def _answer(text):
    return lambda route: route.fulfill(body=text, content_type="text/javascript")


def large(logdir, count, ranks=16, step=1):
    """A run of so many spans in all; every rank is busy nine tenths of the time, in effects of random length."""
    random, plan = np.random.default_rng(0), Plan(Placement.loop(ranks), count // ranks // 2)
    none = np.full(count // ranks, -1, np.int32)
    for rank in range(ranks):
        took = random.exponential(1e-3, count // ranks)
        ends = np.cumsum(took + random.exponential(1e-4, count // ranks))
        effects = [kind(rank, m) for m in range(plan.microbatches) for kind in (Forward, BackwardInput)]
        with Writer(logdir, "measured", rank) as writer:
            header = Header("measured", step, rank, "large", plan)
            writer.timeline(header, Columns(effects, ends - took, ends, (none, none)))
