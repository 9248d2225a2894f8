"""The demo's progress display and summary.

A terminal shows a progress bar, a plain log one line per epoch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from convgrad.demo.checks import CheckResult
from convgrad.demo.metering import Meter
from convgrad.demo.training import Step

__all__ = ["Display", "Summary"]

_LOSS_MEMORY = 0.9  # weight of earlier steps in the displayed loss

_TENFOLD = 10.0  # larger shares are shown as a factor instead of a percentage


@dataclass(frozen=True, slots=True)
class Summary:
    """The contents of the last table."""

    test_accuracy: float
    test_images: int
    steps: int
    training_requests: int
    training_s: float
    checks: Sequence[CheckResult]
    meter: Meter
    total_s: float


@dataclass(slots=True)
class Display:
    """Writes to a console; ``meter`` counts the requests whose rate is shown."""

    console: Console
    meter: Meter
    _started: float = field(init=False)
    _requests_before: int = field(init=False)

    @property
    def _moves(self) -> bool:
        """Whether output can be overwritten, which is not so in a log, even a coloured one."""
        return self.console.is_interactive and self.console.file.isatty()

    def title(self, text: str) -> None:
        self.console.print(f"\n[bold]{text}[/bold]")

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def training(self, steps: Iterable[Step], total: int) -> list[Step]:
        """Run the steps and show the progress."""
        self._started = time.perf_counter()
        self._requests_before = self.meter.requests
        return self._bar(steps, total) if self._moves else self._lines(steps)

    def _bar(self, steps: Iterable[Step], total: int) -> list[Step]:
        done: list[Step] = []
        columns = (
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, expand=True) as progress:
            task = progress.add_task("", total=total, status="")
            loss, accuracy = None, "..."
            for step in steps:
                done.append(step)
                loss = step.loss if loss is None else _smooth(loss, step.loss)
                if step.test_accuracy is not None:
                    accuracy = f"{step.test_accuracy:.1%}"
                status = f"loss {loss:.3f}  accuracy {accuracy}  {self._rate():.0f} requests/s"
                progress.update(task, completed=step.number, status=status)
        return done

    def _lines(self, steps: Iterable[Step]) -> list[Step]:
        done: list[Step] = []
        losses: list[float] = []
        for step in steps:
            done.append(step)
            losses.append(step.loss)
            if step.test_accuracy is not None:
                self.say(
                    f"epoch {step.epoch:2d} of {step.epochs}   "
                    f"loss {sum(losses) / len(losses):.3f}   "
                    f"test accuracy {step.test_accuracy:6.1%}   {self._rate():.0f} requests/s"
                )
                losses.clear()
        return done

    def _rate(self) -> float:
        elapsed = time.perf_counter() - self._started
        return (self.meter.requests - self._requests_before) / elapsed

    def checks(self, results: Iterable[CheckResult]) -> list[CheckResult]:
        """Run the checks, then show their results."""
        if not self._moves:
            done = list(results)
        else:
            done = []
            with self.console.status("checking") as status:
                for result in results:
                    done.append(result)
                    status.update(f"checked {result.operation}")
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("operation")
        for heading in ("cases", "elements", "worst error / allowed"):
            table.add_column(heading, justify="right")
        table.add_column("")
        for result in done:
            table.add_row(
                result.operation,
                str(result.cases),
                f"{result.elements:,}",
                _share(result.worst_share),
                "[green]ok[/green]" if result.passed else "[bold red]WRONG[/bold red]",
            )
        self.console.print(table, highlight=False)
        # Half a unit in the last place is most of the bound of a 16-bit answer.
        self.say("[dim]16-bit answers come close to 100% by their last rounding alone.[/dim]")
        return done

    def summary(self, summary: Summary) -> None:
        """Show the last table."""
        passed = sum(result.passed for result in summary.checks)
        rows = {
            "test accuracy": f"[bold]{summary.test_accuracy:.2%}[/bold] of "
            f"{summary.test_images} images never trained on",
            "training": f"{summary.steps} steps, {summary.training_requests:,} requests, "
            f"{summary.training_s:.1f} s",
            "operations checked": f"{passed} of {len(summary.checks)} within the error that "
            "their arithmetic allows",
            "requests": f"{summary.meter.requests:,}, "
            f"median {summary.meter.median_s * 1e3:.2f} ms each",
            "bytes": f"{_mib(summary.meter.sent_bytes)} sent, "
            f"{_mib(summary.meter.received_bytes)} received",
            "time": f"{summary.total_s:.1f} s",
        }
        table = Table.grid(padding=(0, 3, 0, 0))
        table.add_column(style="dim")
        table.add_column()
        for name, value in rows.items():
            table.add_row(name, value)
        self.console.print(table, highlight=False)


def _share(share: float) -> str:
    if share == 0:
        return "exact"
    return f"{share:.1%}" if share < _TENFOLD else f"{share:.2g} times"


def _smooth(before: float, now: float) -> float:
    return _LOSS_MEMORY * before + (1 - _LOSS_MEMORY) * now


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
