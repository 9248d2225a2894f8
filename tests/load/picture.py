"""Draws the dashboard under a real load, with a server, Locust and a real Prometheus.

    python -m tests.load.picture --locust build/load-tools/bin/locust --prometheus prometheus

Prometheus (from Debian's package of that name) scrapes the server while clients with three API keys
load it, one of them beyond its limit; half way through, the worker is killed. Then the queries of
every panel of deploy/helm/convgrad/dashboard.json are sent to this Prometheus, as Grafana would,
and the panels are drawn at their positions: docs/dashboard.svg.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

from convgrad_service.security.keys import hash_of, new_key
from tests.load.run import locust
from tests.load.served import ROOT, Served, server

DASHBOARD = ROOT / "deploy" / "helm" / "convgrad" / "dashboard.json"
OUT = ROOT / "docs" / "dashboard.svg"
SCRAPE_S = 2
# Variables that Grafana substitutes: an interval for rates, and all instances.
VARIABLES = {"$__rate_interval": f"{5 * SCRAPE_S}s", "$instance": ".*"}
# By key: its mix, number of users, and limits in the key file.
CALLERS: Mapping[str, tuple[str, int, str]] = {
    "training": ("resnet50", 3, "max_inflight_bytes=2GiB"),
    "phones": ("mobilenet", 3, "max_inflight=4"),
    "batch": ("small", 4, "max_requests_per_s=40"),
}
_UNITS: Mapping[str, tuple[float, str]] = {
    "bytes": (2**20, "MiB"),
    "Bps": (1e6, "MB/s"),
    "flops": (1e9, "GFLOP/s"),
    "reqps": (1, "1/s"),
    "s": (1e-3, "ms"),
    "short": (1, ""),
}


@contextmanager
def scraping(program: str, served: Served, key: str, folder: Path) -> Iterator[str]:
    """Run a Prometheus that scrapes the server; yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {
        "job_name": "convgrad",
        "authorization": {"credentials": key},
        "static_configs": [{"targets": [served.url.partition("://")[2]]}],
    }
    rules = str(ROOT / "deploy" / "helm" / "convgrad" / "alerts.yaml")
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s"},
        "rule_files": [rules],
        "scrape_configs": [job],
    }
    file = folder / "prometheus.yaml"
    file.write_text(json.dumps(config))  # which is YAML too
    command = [program, f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _ready(url):
            if process.poll() is not None:
                raise SystemExit("Prometheus did not start")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready").is_success
    except httpx.TransportError:
        return False


def kill_worker(process: int) -> None:
    """Kill the worker process; the server starts another."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,comm=", "--ppid", str(process)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for line in listed.splitlines():
        pid, name = line.split()
        if name == "convgrad-worker":
            os.kill(int(pid), signal.SIGKILL)


def load(program: Path, served: Served, keys: Mapping[str, str], seconds: float) -> int:
    """Run all callers concurrently; return the number of failed requests."""
    found: dict[str, dict[str, Any]] = {}

    def send(name: str, mix: str, users: int) -> None:
        more = ["--mix", mix, "-u", str(users), "-r", "2", "-t", f"{seconds:.0f}s"]
        more += ["--pause", "0.05", "--api-key", keys[name]]
        found[name] = locust(program, served, f"picture_{name}", *more)

    threads = [
        threading.Thread(target=send, args=(name, mix, users))
        for name, (mix, users, _) in CALLERS.items()
    ]
    for thread in threads:
        thread.start()
    time.sleep(seconds / 2)
    kill_worker(served.process)
    for thread in threads:
        thread.join()
    return sum(one["failed"] for wires in found.values() for one in wires.values())


def answers(url: str, panel: Mapping[str, Any], begin: float, end: float) -> list[Any]:
    """Yield the legend, times and values of every line of a panel."""
    lines = []
    for target in panel["targets"]:
        query = target["expr"]
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        asked = {"query": query, "start": begin, "end": end, "step": SCRAPE_S}
        answer = httpx.get(f"{url}/api/v1/query_range", params=asked).json()
        if answer["status"] != "success":
            raise SystemExit(f"{panel['title']}: {answer['error']}")
        for series in answer["data"]["result"]:
            labels = series["metric"]
            legend = re.sub(
                r"\{\{(\w+)\}\}",
                lambda found, labels=labels: labels.get(found[1], ""),  # type: ignore[misc]
                target["legendFormat"],
            )
            moments = [float(at) - begin for at, _ in series["values"]]
            lines.append((legend.strip(), moments, [float(value) for _, value in series["values"]]))
    return lines


def draw(url: str, begin: float, end: float) -> list[str]:
    """Draw the dashboard; return the titles of panels without data."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    plt.rcParams.update({"font.size": 7, "svg.fonttype": "none"})
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = plt.figure(figsize=(14, height * 0.27))
    empty = []
    for panel in panels:
        at = panel["gridPos"]
        left, width = at["x"] / 24, at["w"] / 24
        bottom = 1 - (at["y"] + at["h"]) / height
        if panel["type"] == "row":
            figure.text(0.01, bottom + 0.2 / height, panel["title"], fontsize=10, weight="bold")
            continue
        box = (
            left + 0.12 * width,
            bottom + 2.6 / height,
            0.85 * width,
            (at["h"] - 4.0) / height,
        )
        axes = figure.add_axes(box)
        lines = answers(url, panel, begin, end)
        if not lines:
            empty.append(panel["title"])
        scale, unit = _UNITS[panel["fieldConfig"]["defaults"]["unit"]]
        for legend, moments, values in lines:
            shown = [value / scale for value in values]
            axes.plot(moments, shown, label=legend.replace("127.0.0.1:", ":"), linewidth=1)
        axes.set_title(panel["title"] + (f", {unit}" if unit else ""), fontsize=8, loc="left")
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, end - begin)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f} s"))
        axes.grid(alpha=0.3)
        if lines:
            columns = 2 if len(lines) > 3 else 1
            axes.legend(
                loc="upper left", bbox_to_anchor=(-0.02, -0.17), ncols=columns, frameon=False,
                fontsize=5.5, labelspacing=0.2, borderpad=0,
            )  # fmt: skip
    OUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUT, metadata={"Date": None})
    return empty


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--locust", type=Path, required=True, help="the program")
    parser.add_argument("--prometheus", default="prometheus", help="the program")
    parser.add_argument("--seconds", type=float, default=90.0)
    options = parser.parse_args()
    keys = {name: new_key() for name in (*CALLERS, "prometheus")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [
            f"{who}:{hash_of(key)} {CALLERS[who][2] if who in CALLERS else ''}"
            for who, key in keys.items()
        ]
        (folder / "keys").write_text("\n".join(lines))
        with (
            server(CONVGRAD_API_KEYS=str(folder / "keys")) as served,
            scraping(options.prometheus, served, keys["prometheus"], folder) as url,
        ):
            begin = time.time()
            failed = load(options.locust, served, keys, options.seconds)
            time.sleep(2 * SCRAPE_S)
            empty = draw(url, begin, time.time())
    print(f"{OUT.relative_to(ROOT)}: {failed} requests failed; empty panels: {empty or 'none'}")
    return 1 if failed or empty else 0


if __name__ == "__main__":
    sys.exit(main())
