"""The server of TensorBoard's Pipeline tab: lists captures, sends ranks' spans, and summarizes. No torch.

Names of runs and schedules are only compared with those that TensorBoard lists, and those of flights with those that
are found; none becomes part of a path.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from typing import Any

from tensorboard import plugin_util
from tensorboard.backend import http_util
from tensorboard.data.provider import RunTagFilter
from tensorboard.errors import NotFoundError
from tensorboard.plugins.base_plugin import FrontendMetadata, TBContext, TBPlugin
from werkzeug.exceptions import BadRequest, HTTPException, NotFound, UnprocessableEntity
from werkzeug.wrappers import Request, Response

from fpipe.errors import ScheduleError
from fpipe.tensorboard.files.captures import PLUGIN, BadCapture, Capture, assemble, left_out, parse_run, parse_tag
from fpipe.tensorboard.files.columns import BadColumns, check
from fpipe.tensorboard.files.plans import Plans
from fpipe.tensorboard.server.flights import Flights
from fpipe.tensorboard.server.imagined import answer, imagined, imagined_rank, unknown
from fpipe.tensorboard.server.listing import listing
from fpipe.tensorboard.server.steps import Outlines
from fpipe.tensorboard.server.streams import Turns
from fpipe.tensorboard.server.summary import summary
from fpipe.timelines.what_if import WhatIf, what_if

MEDIA_TYPES = {".js": "application/javascript", ".css": "text/css"}
MAX_LISTED = 64  # numbers in one parameter
_WHOLE = re.compile(r"[0-9]{1,18}")
MAX_CAPTURES = 4  # assembled captures in the cache, for summaries, comparisons and exports
MAX_IMAGINED = 2  # of each of them, with a part ideal
View = Callable[["PipelinePlugin", "Query"], Response]


class Query:
    """A request and its experiment."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.context = plugin_util.context(request.environ)
        self.experiment = plugin_util.experiment_id(request.environ)

    def text(self, name: str) -> str:
        """Return a parameter of the query.

        Raises:
            BadRequest: the parameter is missing.
        """
        if name not in self.request.args:
            raise BadRequest(f"the query lacks {name}=")
        return str(self.request.args[name])

    def number(self, name: str) -> int:
        """Return a parameter that is a whole number.

        Raises:
            BadRequest: the parameter is missing, or not a whole number.
        """
        text = self.text(name)
        if not _WHOLE.fullmatch(text):
            raise BadRequest(f"{name}= is a whole number")
        return int(text)

    def numbers(self, name: str) -> list[int]:
        """Return a parameter that is a list of at most `MAX_LISTED` whole numbers.

        Raises:
            BadRequest: the parameter is missing, or another list.
        """
        parts = self.text(name).split(",")
        if len(parts) > MAX_LISTED or not all(_WHOLE.fullmatch(part) for part in parts):
            raise BadRequest(f"{name}= is a list of at most {MAX_LISTED} whole numbers, as in 1,2,3")
        return [int(part) for part in parts]

    def answer(self, content: Any, kind: str = "application/json", **more: Any) -> Response:
        response: Response = http_util.Respond(self.request, content, kind, **more)
        return response

    @property
    def takes_gzip(self) -> bool:
        return "gzip" in self.request.headers.get("Accept-Encoding", "")

    def file(self, pieces: Iterable[bytes], kind: str, name: str, lines: int) -> Response:
        """Return a file that is sent while it is made, with about how many lines it will have; 0 if it has none."""
        headers = {
            "Content-Disposition": f'attachment; filename="{name}"',
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-cache, must-revalidate",
            "Fpipe-Lines": str(lines),
        }
        if self.takes_gzip:
            headers["Content-Encoding"] = "gzip"
        return Response(pieces, headers=headers, content_type=kind, direct_passthrough=True)


class PipelinePlugin(TBPlugin):  # type: ignore[misc]
    """The plugin; TensorBoard loads it by the entry point `tensorboard_plugins`."""

    plugin_name = PLUGIN

    def __init__(self, context: TBContext) -> None:
        self._data = context.data_provider
        self._cache: OrderedDict[Any, _Cached] = OrderedDict()
        self._lock = threading.Lock()
        self._plans, self._exports, self._flights = Plans(), Turns(), Flights(getattr(context, "logdir", None) or "")
        self._outlines = Outlines()

    def is_active(self) -> bool:
        """Return whether there are flights; TensorBoard also shows the tab when there are data of `data_plugin_names`.

        A job may hang or crash before it has recorded a step.
        """
        return bool(self._flights.listing())

    def data_plugin_names(self) -> tuple[str, ...]:
        return (PLUGIN,)

    def frontend_metadata(self) -> FrontendMetadata:
        return FrontendMetadata(es_module_path="/index.js", tab_name="Pipeline")

    def get_plugin_apps(self) -> dict[str, Any]:
        views: dict[str, View] = {
            "/index": PipelinePlugin._index,
            "/flight": PipelinePlugin._flight,
            "/rank": PipelinePlugin._rank,
            "/summary": PipelinePlugin._summary,
            "/steps": PipelinePlugin._steps,
            "/compare": PipelinePlugin._compare,
            "/what_if": PipelinePlugin._what_if,
            "/export": PipelinePlugin._export,
        }
        return {path: self._app(view) for path, view in [*views.items(), *_static()]}

    def _app(self, view: View) -> Callable[..., Any]:
        """Return a view's application, which answers its errors as plain text with the status code."""

        @Request.application
        def app(request: Request) -> Response:
            query = Query(request)
            try:
                return view(self, query)
            except HTTPException as error:
                return query.answer(error.description, "text/plain", code=error.code)
            except NotFoundError:
                return query.answer("there is no such experiment", "text/plain", code=404)
            except BadCapture as error:
                return query.answer(str(error), "text/plain", code=422)

        return app

    # Routes

    def _index(self, query: Query) -> Response:
        return query.answer(listing(self._runs(query)) | {"flights": self._flights.listing()})

    def _flight(self, query: Query) -> Response:
        flight = self._flights.flight(query.text("experiment"), query.text("name"))
        if flight is None:
            raise NotFound("there is no such flight any more: the job has ended well, or its files were deleted")
        return query.answer(flight)

    def _rank(self, query: Query) -> Response:
        run, step, rank = query.text("run"), query.number("step"), query.number("rank")
        if "what" in query.request.args:
            content = imagined_rank(self._shown(query).imagined(query.text("what")), rank)
            return query.answer(content, "application/octet-stream", content_encoding="gzip")
        blob = self._blobs(query, run, step, rank)[rank]
        try:
            check(blob, self._plans)  # the page reads what `assemble` reads, and nothing else
        except BadColumns as error:
            raise UnprocessableEntity(" ".join(left_out({rank: error}, _places(run, step, [rank])))) from None
        return query.answer(blob, "application/octet-stream", content_encoding="gzip")

    def _summary(self, query: Query) -> Response:
        shown = self._shown(query)
        what = query.request.args.get("what")
        return query.answer(shown.summary if what is None else summary(shown.imagined(what)))

    def _steps(self, query: Query) -> Response:
        """Answer with the outline of each step; of one that can't be read, with the reason."""
        run, steps = query.text("run"), query.numbers("steps")
        return query.answer([self._outline(query, run, step) for step in steps])

    def _outline(self, query: Query, run: str, step: int) -> dict[str, Any]:
        try:
            key = query.experiment, run, step, self._written(query, run, step)
            known = self._outlines.get(key, lambda: assemble(self._blobs(query, run, step)))
        except (BadCapture, NotFound) as error:
            return {"step": step, "error": str(getattr(error, "description", error))}
        return {"step": step, **known}

    def _compare(self, query: Query) -> Response:
        from fpipe.timelines.comparison import Difference

        one = self._shown(query).capture
        beside = self._cached(query, query.text("other"), query.number("other_step"))
        what = query.request.args.get("other_what")
        other = beside.capture if what is None else beside.imagined(what)
        if one.unit != other.unit:
            raise UnprocessableEntity("one has times in seconds, and the other without a unit: they can't be compared")
        return query.answer(Difference(one.timeline, other.timeline).as_json())

    def _what_if(self, query: Query) -> Response:
        shown = self._shown(query)
        return query.answer(unknown(shown.capture) if shown.capture.unrelated else answer(shown.what_if, shown.capture))

    def _export(self, query: Query) -> Response:
        from fpipe.tensorboard.server.exports import LINED, TYPES, CantExport, sendable, shortened, streamed

        form = query.text("format")
        if form not in TYPES:
            raise BadRequest(f"format= is one of {', '.join(TYPES)}")
        capture = self._shown(query).capture
        title = f"{capture.kind}, step {capture.step}, {shortened(capture.schedule)}"
        try:
            pieces = streamed(capture, form, title)
        except CantExport as error:
            raise UnprocessableEntity(str(error)) from None
        name = f"{capture.kind}_step_{capture.step:08}.{form}"
        lines = len(capture.timeline.spans) if form in LINED else 0
        sent = self._exports.begin(sendable(pieces, gzip=query.takes_gzip))
        return query.file(sent, TYPES[form], name, lines)

    # Data

    def _runs(self, query: Query) -> Mapping[str, Mapping[str, Any]]:
        """Return run -> tag -> TensorBoard's `TensorTimeSeries`."""
        runs: Mapping[str, Mapping[str, Any]] = self._data.list_tensors(
            query.context, experiment_id=query.experiment, plugin_name=PLUGIN
        )
        return runs

    def _tags(self, query: Query, run: str, step: int, rank: int | None) -> dict[int, tuple[str, list[str], float]]:
        """Return rank -> its run, the step's tags in order, and when they were written (seconds since 1970).

        Raises:
            NotFound: no rank has all parts of the step.
        """
        ranks = {}
        for text, tags in self._runs(query).items():
            name = parse_run(text)
            if name is None or name.run != run or rank not in (None, name.rank):
                continue
            parts = sorted((at[1], tag) for tag in tags if (at := parse_tag(tag)) and at[0] == step)
            if [part for part, _ in parts] == list(range(len(parts))) and parts:
                wall = max(tags[tag].max_wall_time for _, tag in parts)
                ranks[name.rank] = text, [tag for _, tag in parts], wall
        if not ranks:
            what = f"step {step}" if rank is None else f"step {step} of rank {rank}"
            raise NotFound(f"there is no capture of {what} in this run")
        return ranks

    def _blobs(self, query: Query, run: str, step: int, rank: int | None = None) -> dict[int, bytes]:
        ranks = self._tags(query, run, step, rank)
        runs, tags = [name for name, _, _ in ranks.values()], {tag for _, tags, _ in ranks.values() for tag in tags}
        data = self._data.read_tensors(
            query.context,
            experiment_id=query.experiment,
            plugin_name=PLUGIN,
            downsample=1,
            run_tag_filter=RunTagFilter(runs=runs, tags=list(tags)),
        )
        blobs = {}
        for each, (name, parts, _) in ranks.items():
            series = [data.get(name, {}).get(tag) for tag in parts]
            if all(series):
                blobs[each] = b"".join(_bytes(points[-1].numpy) for points in series)
        if not blobs:
            raise NotFound("the capture is no longer there")
        return blobs

    def _shown(self, query: Query) -> _Cached:
        """Return the capture that the query names."""
        return self._cached(query, query.text("run"), query.number("step"))

    def _written(self, query: Query, run: str, step: int) -> tuple[tuple[int, float], ...]:
        """Return the ranks of a capture, and when each wrote: another key of it once a rank has written since."""
        return tuple((rank, wall) for rank, (_, _, wall) in sorted(self._tags(query, run, step, None).items()))

    def _cached(self, query: Query, run: str, step: int) -> _Cached:
        """Return the cached capture; a new one if a rank has written since."""
        written = self._written(query, run, step)
        key = query.experiment, run, step, written
        with self._lock:
            places = _places(run, step, [rank for rank, _ in written])
            cached = self._cache.setdefault(key, _Cached(lambda: self._blobs(query, run, step), places))
            self._cache.move_to_end(key)
            while len(self._cache) > MAX_CAPTURES:
                self._cache.popitem(last=False)
        return cached


@dataclass(frozen=True, eq=False)
class _Cached:
    """A capture and its summary, computed at first use: with many ranks this takes seconds."""

    blobs: Callable[[], dict[int, bytes]]
    places: Mapping[int, str]
    lock: threading.RLock = field(default_factory=threading.RLock)  # so that requests at the same time compute it once
    _imagined: OrderedDict[str, Capture] = field(default_factory=OrderedDict)

    @property
    def capture(self) -> Capture:
        with self.lock:
            return self._capture

    @property
    def summary(self) -> dict[str, Any]:
        with self.lock:
            return self._summary

    @property
    def what_if(self) -> WhatIf:
        with self.lock:
            return self._what_if

    def imagined(self, what: str) -> Capture:
        """Return the capture with one part ideal.

        Raises:
            NotFound: nothing that would help has this name.
        """
        with self.lock:  # the page asks for all ranks at once
            if what not in self._imagined:
                if self._capture.unrelated or what not in [row.what for row in self._what_if.rows]:
                    raise NotFound("this is not among what would help")
                self._imagined[what] = imagined(self._capture, self._what_if, what)
            self._imagined.move_to_end(what)
            while len(self._imagined) > MAX_IMAGINED:
                self._imagined.popitem(last=False)
            return self._imagined[what]

    @cached_property
    def _what_if(self) -> WhatIf:
        try:
            return what_if(self._capture.timeline, schedule=self._capture.schedule or None)
        except ScheduleError as error:
            raise UnprocessableEntity(str(error)) from None

    @cached_property
    def _capture(self) -> Capture:
        return assemble(self.blobs(), self.places)

    @cached_property
    def _summary(self) -> dict[str, Any]:
        return summary(self.capture)


def _places(run: str, step: int, ranks: Iterable[int]) -> dict[int, str]:
    """Return rank -> the step and the folder in the log directory, for notices."""
    return {rank: f"step {step} in {run}/rank{rank}" for rank in ranks}


def _bytes(tensor: Any) -> bytes:
    """Return the string of a tensor that has only one; else b""."""
    value = tensor.item() if tensor.size == 1 else b""
    return value if isinstance(value, bytes) else b""


def _static() -> Iterator[tuple[str, View]]:
    """Yield the path and view of each file of the page; no other file is served."""
    for file in files("fpipe.tensorboard.server").joinpath("static").iterdir():
        kind = MEDIA_TYPES.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            yield f"/{file.name}", _file(file.read_bytes(), kind)


def _file(content: bytes, kind: str) -> View:
    return lambda plugin, query: query.answer(content, kind)
