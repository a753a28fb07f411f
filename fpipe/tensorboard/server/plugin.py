"""The server's side of TensorBoard's Pipeline tab: lists captures, hands out ranks' spans, and sums up. No torch.

Names of runs and schedules are only compared with those that TensorBoard lists; none becomes part of a path.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from importlib.resources import files
from typing import Any

from tensorboard import plugin_util
from tensorboard.backend import http_util
from tensorboard.data.provider import RunTagFilter
from tensorboard.errors import NotFoundError
from tensorboard.plugins.base_plugin import FrontendMetadata, TBContext, TBPlugin
from werkzeug.exceptions import BadRequest, HTTPException, NotFound, UnprocessableEntity
from werkzeug.wrappers import Request, Response

from fpipe.tensorboard.files.captures import PLUGIN, Capture, assemble, parsed, placed
from fpipe.tensorboard.files.columns import BadColumns
from fpipe.tensorboard.server.listing import listing
from fpipe.tensorboard.server.summary import summary

TYPES_OF_FILES = {".js": "application/javascript", ".css": "text/css"}
KEPT = 4  # captures that stay put together, for the summary, comparison and exports of one
View = Callable[["PipelinePlugin", "Asked"], Response]


class Asked:
    """A request, and the experiment that it is for."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.context = plugin_util.context(request.environ)
        self.experiment = plugin_util.experiment_id(request.environ)

    def text(self, name: str) -> str:
        """A parameter of the query.

        Raises:
            BadRequest: it is missing.
        """
        found = self.request.args.get(name)
        if found is None:
            raise BadRequest(f"the query lacks {name}=")
        return str(found)

    def number(self, name: str) -> int:
        """A parameter that is a whole number."""
        text = self.text(name)
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise BadRequest(f"{name}= is a whole number")
        return int(text)

    def answer(self, content: Any, kind: str = "application/json", **more: Any) -> Response:
        response: Response = http_util.Respond(self.request, content, kind, **more)
        return response


def _route(view: View) -> View:
    """The view, where what it refuses is told as text."""

    @wraps(view)
    def answering(plugin: PipelinePlugin, asked: Asked) -> Response:
        try:
            return view(plugin, asked)
        except HTTPException as error:
            return asked.answer(error.description, "text/plain", code=error.code)
        except NotFoundError:
            return asked.answer("there is no such experiment", "text/plain", code=404)
        except BadColumns as error:
            return asked.answer(f"the capture can't be read: {error}", "text/plain", code=422)

    return answering


class PipelinePlugin(TBPlugin):  # type: ignore[misc]
    """What TensorBoard loads by the entry point `tensorboard_plugins`."""

    plugin_name = PLUGIN

    def __init__(self, context: TBContext) -> None:
        self._data = context.data_provider
        self._held: OrderedDict[Any, _Held] = OrderedDict()
        self._lock = threading.Lock()

    def is_active(self) -> bool:
        """False: the tab comes by itself when there are data of `data_plugin_names`, without asking here."""
        return False

    def data_plugin_names(self) -> tuple[str, ...]:
        return (PLUGIN,)

    def frontend_metadata(self) -> FrontendMetadata:
        return FrontendMetadata(es_module_path="/index.js", tab_name="Pipeline")

    def get_plugin_apps(self) -> dict[str, Any]:
        views: dict[str, View] = {
            "/index": PipelinePlugin._index,
            "/rank": PipelinePlugin._rank,
            "/summary": PipelinePlugin._summary,
            "/compare": PipelinePlugin._compare,
            "/export": PipelinePlugin._export,
        }
        return {path: self._app(view) for path, view in [*views.items(), *_static()]}

    def _app(self, view: View) -> Callable[..., Any]:
        answering = _route(view)

        @Request.application
        def app(request: Request) -> Response:
            return answering(self, Asked(request))

        return app

    # Routes

    def _index(self, asked: Asked) -> Response:
        return asked.answer(listing(self._runs(asked)))

    def _rank(self, asked: Asked) -> Response:
        run, step, rank = asked.text("run"), asked.number("step"), asked.number("rank")
        blobs = self._blobs(asked, run, step, rank)
        return asked.answer(blobs[rank], "application/octet-stream", content_encoding="gzip")

    def _summary(self, asked: Asked) -> Response:
        return asked.answer(self._hold(asked, asked.text("run"), asked.number("step")).summary)

    def _compare(self, asked: Asked) -> Response:
        from fpipe.timelines.comparison import Difference

        one = self._capture(asked, asked.text("run"), asked.number("step"))
        other = self._capture(asked, asked.text("other"), asked.number("other_step"))
        if one.unit != other.unit:
            raise UnprocessableEntity("one has times in seconds, and the other without a unit: they can't be compared")
        return asked.answer(Difference(one.timeline, other.timeline).as_json())

    def _export(self, asked: Asked) -> Response:
        from fpipe.tensorboard.server.exports import TYPES, MissingPackage, exported

        form = asked.text("format")
        if form not in TYPES:
            raise BadRequest(f"format= is one of {', '.join(TYPES)}")
        capture = self._capture(asked, asked.text("run"), asked.number("step"))
        try:
            content = exported(capture, form)
        except MissingPackage as error:
            raise UnprocessableEntity(str(error)) from None
        name = f"{capture.kind}_step_{capture.step:08}.{form}"
        return asked.answer(content, TYPES[form], headers=[("Content-Disposition", f'attachment; filename="{name}"')])

    # Data

    def _runs(self, asked: Asked) -> Mapping[str, Mapping[str, Any]]:
        """run -> tag -> what TensorBoard lists of it."""
        found: Mapping[str, Mapping[str, Any]] = self._data.list_tensors(
            asked.context, experiment_id=asked.experiment, plugin_name=PLUGIN
        )
        return found

    def _tags(self, asked: Asked, run: str, step: int, rank: int | None) -> dict[int, tuple[str, list[str], float]]:
        """rank -> its run, the tags that hold the step, in order, and when they were written."""
        found = {}
        for name, tags in self._runs(asked).items():
            place = placed(name)
            if place is None or place.run != run or rank not in (None, place.rank):
                continue
            parts = sorted((at[1], tag) for tag in tags if (at := parsed(tag)) and at[0] == step)
            if [part for part, _ in parts] == list(range(len(parts))) and parts:
                wall = max(tags[tag].max_wall_time for _, tag in parts)
                found[place.rank] = name, [tag for _, tag in parts], wall
        if not found:
            what = f"step {step}" if rank is None else f"step {step} of rank {rank}"
            raise NotFound(f"there is no capture of {what} in this run")
        return found

    def _blobs(self, asked: Asked, run: str, step: int, rank: int | None = None) -> dict[int, bytes]:
        found = self._tags(asked, run, step, rank)
        runs, tags = [name for name, _, _ in found.values()], {tag for _, tags, _ in found.values() for tag in tags}
        data = self._data.read_tensors(
            asked.context,
            experiment_id=asked.experiment,
            plugin_name=PLUGIN,
            downsample=1,
            run_tag_filter=RunTagFilter(runs=runs, tags=list(tags)),
        )
        blobs = {}
        for held, (name, own, _) in found.items():
            series = [data.get(name, {}).get(tag) for tag in own]
            if all(series):
                blobs[held] = b"".join(_bytes(points[-1].numpy) for points in series)
        if not blobs:
            raise NotFound("the capture is no longer there")
        return blobs

    def _capture(self, asked: Asked, run: str, step: int) -> Capture:
        return self._hold(asked, run, step).capture

    def _hold(self, asked: Asked, run: str, step: int) -> _Held:
        """The capture put together, or as it was before, if nothing came to it."""
        written = tuple((rank, wall) for rank, (_, _, wall) in sorted(self._tags(asked, run, step, None).items()))
        key = asked.experiment, run, step, written
        with self._lock:
            held = self._held.setdefault(key, _Held(lambda: self._blobs(asked, run, step)))
            self._held.move_to_end(key)
            while len(self._held) > KEPT:
                self._held.popitem(last=False)
        return held


class _Held:
    """A capture and its summary, made when they are asked for: once, for of many ranks that takes seconds."""

    def __init__(self, blobs: Callable[[], dict[int, bytes]]) -> None:
        self._blobs, self._lock = blobs, threading.RLock()
        self._capture: Capture | None = None
        self._summary: dict[str, Any] | None = None

    @property
    def capture(self) -> Capture:
        with self._lock:
            if self._capture is None:
                self._capture = assemble(self._blobs())
            return self._capture

    @property
    def summary(self) -> dict[str, Any]:
        with self._lock:
            if self._summary is None:
                self._summary = summary(self.capture)
            return self._summary


def _bytes(tensor: Any) -> bytes:
    """The one string of a tensor, or nothing where that is what it isn't."""
    found = tensor.item() if tensor.size == 1 else b""
    return found if isinstance(found, bytes) else b""


def _static() -> Iterator[tuple[str, View]]:
    """The page's files; there are no others."""
    for file in files("fpipe.tensorboard.server").joinpath("static").iterdir():
        kind = TYPES_OF_FILES.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            yield f"/{file.name}", _file(file.read_bytes(), kind)


def _file(content: bytes, kind: str) -> View:
    return lambda plugin, asked: asked.answer(content, kind)
