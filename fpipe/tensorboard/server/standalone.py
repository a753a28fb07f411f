"""The page and some captures in one file, which opens without a server and without a network. No torch.

The page is the one that the server serves, module by module, but for `standalone.js` in place of `server.js`, which
answers the page's requests with what the server would send. What comes from captures is packed and in base64, so that
no text of theirs is part of the file's HTML.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import permutations
from types import SimpleNamespace
from typing import Any, NamedTuple

from fpipe.errors import ScheduleError
from fpipe.tensorboard.files.captures import Capture, tag
from fpipe.tensorboard.files.columns import encode
from fpipe.tensorboard.files.writer import outline
from fpipe.tensorboard.server import steps
from fpipe.tensorboard.server.imagined import answer, imagined, unknown
from fpipe.tensorboard.server.listing import listing
from fpipe.tensorboard.server.summary import summary
from fpipe.timelines.comparison import Difference
from fpipe.timelines.what_if import WhatIf, what_if

_MOST_SPANS = 100_000  # of a capture of which the file says what would help
_MOST_IMAGINED = 1 << 20  # bytes of what is imagined
_IMPORT = re.compile(r'(^import |\bfrom )"\./([a-z_]+\.js)";', re.MULTILINE)
_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<script type="importmap">{modules}</script>
<script type="application/json" id="answers">{answers}</script>
<script type="module">import {{ render }} from "fpipe/index.js"; render();</script>
</html>
"""

_POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline' data:; img-src data: blob:"
"""For the browser: nothing comes from elsewhere, nor goes there."""

Answer = tuple[str, Mapping[str, str], str]  # route, query, and the body: a gzip in base64


class Shown(NamedTuple):
    """A capture, and the run that the page names it by, as "mine/measured"."""

    run: str
    capture: Capture

    @property
    def query(self) -> dict[str, str]:
        return {"run": self.run, "step": str(self.capture.step)}


def standalone(shown: Sequence[Shown], title: str) -> str:
    """Return an HTML file with captures; the page shows the first, and the second beside it if that is its prediction.

    Beside each capture it has the comparison with each other one, and what would help the first, with those timelines
    for which there is room.
    """
    answers = [*_answers(shown)]
    embedded = json.dumps({"style": _data("text/css", _static("page.css")), "answers": answers})
    return _PAGE.format(
        title=escape(title),
        policy=_POLICY,
        modules=json.dumps({"imports": _modules()}),
        answers=embedded.replace("<", "\\u003c"),
    )


def _static(name: str) -> bytes:
    return files("fpipe.tensorboard.server").joinpath("static", name).read_bytes()


def _data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _modules() -> dict[str, str]:
    """Return the page's modules by name; a module of a data URL can import others by name only."""
    folder = files("fpipe.tensorboard.server").joinpath("static")
    names = {each.name for each in folder.iterdir() if each.name.endswith(".js")}
    sources = {name: _static("standalone.js" if name == "server.js" else name).decode() for name in names}
    return {
        f"fpipe/{name}": _data("text/javascript", _IMPORT.sub(r'\1"fpipe/\2";', source).encode())
        for name, source in sorted(sources.items())
    }


def _packed(body: bytes) -> str:
    return base64.b64encode(gzip.compress(body, mtime=0)).decode()


def _json(content: Any) -> str:
    return _packed(json.dumps(content).encode())


def _answers(shown: Sequence[Shown]) -> Iterator[Answer]:
    yield "index", {}, _json(listing(_runs(shown)))
    for each in shown:
        yield from _of_capture(each.capture, each.query)
    yield from _steps(shown)
    for one, other in permutations(shown, 2):
        if one.capture.unit == other.capture.unit:
            difference = Difference(one.capture.timeline, other.capture.timeline)
            query = {"other": other.run, "other_step": str(other.capture.step)}
            yield "compare", one.query | query, _json(difference.as_json())
    yield from _what_if(shown[0])


def _runs(shown: Sequence[Shown]) -> dict[str, dict[str, Any]]:
    """Return the captures as TensorBoard lists them."""
    runs = dict[str, dict[str, Any]]()
    for run, capture in shown:
        for rank, header in capture.headers.items():
            series = SimpleNamespace(plugin_content=outline(header), max_wall_time=header.wall)
            runs.setdefault(f"{run}/rank{rank}", {})[tag(capture.step)] = series
    return runs


def _of_capture(capture: Capture, query: Mapping[str, str]) -> Iterator[Answer]:
    for rank, header in capture.headers.items():
        blob = base64.b64encode(encode(header, capture.columns[rank])).decode()
        yield "rank", {**query, "rank": str(rank)}, blob
    yield "summary", query, _json(summary(capture))


def _steps(shown: Sequence[Shown]) -> Iterator[Answer]:
    """Yield the figures of each run's captures, which the page asks for together."""
    for run in {each.run: None for each in shown}:
        captures = {each.capture.step: each.capture for each in shown if each.run == run}
        rows = [{"step": step} | steps.outline(captures[step]) for step in sorted(captures)]
        yield "steps", {"run": run, "steps": ",".join(map(str, sorted(captures)))}, _json(rows)


def _what_if(first: Shown) -> Iterator[Answer]:
    """Yield what would help a capture, and the timelines of its rows, the largest first."""
    capture, query = first.capture, first.query
    if capture.unrelated:
        yield "what_if", query, _json(unknown(capture))
        return
    if len(capture.timeline.spans) > _MOST_SPANS:
        return
    try:
        result = what_if(capture.timeline, schedule=capture.schedule or None)
    except ScheduleError:
        return
    yield "what_if", query, _json(answer(result, capture))
    room = _MOST_IMAGINED
    for row in result.rows:
        answers = list(_imagined(first, result, row.what))
        room -= sum(len(body) for *_, body in answers)
        if room < 0:
            return
        yield from answers


def _imagined(first: Shown, result: WhatIf, what: str) -> Iterator[Answer]:
    other = imagined(first.capture, result, what)
    yield from _of_capture(other, {**first.query, "what": what})
    query = {"other": first.run, "other_step": str(first.capture.step), "other_what": what}
    yield "compare", first.query | query, _json(Difference(first.capture.timeline, other.timeline).as_json())
