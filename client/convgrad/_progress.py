"""Progress bars for long calls: upload, computation, download."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from convgrad._events import (
    EventHooks,
    FailureEvent,
    ProgressEvent,
    RequestEvent,
    ResponseEvent,
    RetryEvent,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, Task, TaskID

__all__ = ["progress_bars"]


@contextmanager
def progress_bars(*, delay_s: float = 1.0, console: Console | None = None) -> Iterator[EventHooks]:
    """Make event hooks that show a progress bar for each call longer than ``delay_s`` seconds.

    A bar counts the bytes sent, then the seconds of computation, then the bytes received. It is
    drawn on ``console``, by default standard error or the notebook, and disappears when its call
    ends.

    Raises
    ------
    ImportError
        The package rich is not installed: ``pip install 'convgrad[progress]'``.

    Examples
    --------
    >>> with convgrad.progress_bars() as hooks, convgrad.Client(event_hooks=hooks) as client:
    ...     grad_input = client.conv_bwd_data(grad_output, weight)
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.text import Text
    except ImportError as missing:
        raise ImportError(
            "progress bars need the package rich: pip install 'convgrad[progress]'"
        ) from missing

    class Bars(Progress):
        def get_renderables(self) -> Iterator[RenderableType]:
            shown = [task for task in self.tasks if (task.elapsed or 0) >= delay_s]
            yield self.make_tasks_table(shown)

    class Bytes(DownloadColumn):
        def render(self, task: Task) -> Text:
            return Text() if task.total is None else super().render(task)

    columns = TextColumn("{task.description}"), BarColumn(), Bytes(), TimeElapsedColumn()
    with Bars(*columns, console=console or Console(stderr=True), transient=True) as bars:
        yield _Calls(bars).hooks()


class _Calls:
    """Progress bars of the calls in flight, by request id."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._ids: dict[str, TaskID] = {}

    def hooks(self) -> EventHooks:
        return {
            "request": [self._begin],
            "progress": [self._move],
            "retry": [self._wait],
            "response": [self._end],
            "failure": [self._end],
        }

    def _begin(self, event: RequestEvent) -> None:
        if event.request_id not in self._ids:
            self._ids[event.request_id] = self._bars.add_task("")
        self._show(event, "sending", 0, event.body_bytes or None)

    def _move(self, event: ProgressEvent) -> None:
        if event.received_bytes:
            self._show(event, "receiving", event.received_bytes, event.answer_bytes)
        elif event.sent_bytes < event.body_bytes:
            self._show(event, "sending", event.sent_bytes, event.body_bytes)
        else:
            self._show(event, "computing", 0, None)

    def _wait(self, event: RetryEvent) -> None:
        self._show(event, f"trying again in {event.delay_s:.0f} s", 0, None)

    def _end(self, event: ResponseEvent | FailureEvent) -> None:
        if isinstance(event, ResponseEvent) and event.status != 200:
            return  # a retry or a failure follows
        found = self._ids.pop(event.request_id, None)
        if found is not None:
            self._bars.remove_task(found)

    def _show(
        self,
        event: RequestEvent | ProgressEvent | RetryEvent,
        text: str,
        done: int,
        total: int | None,
    ) -> None:
        found = self._ids.get(event.request_id)
        for task in self._bars.tasks:
            if task.id == found:
                # `Progress.update` cannot clear a total; without a total, the bar pulses.
                operation = event.url.rpartition("/")[2]
                task.description = f"{operation}: {text}"
                task.completed, task.total = done, total
