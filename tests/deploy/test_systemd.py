"""The systemd unit names settings that exist, and gives the server the time to stop."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from convgrad_service.server.settings import Settings

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "convgrad.service"


def test_the_units_settings_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    text = UNIT.read_text()
    for name, value in re.findall(r"(CONVGRAD_\w+)=(\S+)", re.sub(r"(?m)^#.*", "", text)):
        monkeypatch.setenv(name, value)
    settings = Settings()
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    # 10 s more for what follows, as in the chart.
    assert int(stop_s) >= settings.drain_s + settings.shutdown_grace_s + 10
    assert settings.kernel_cache == Path("/var/cache") / re.findall("CacheDirectory=(.*)", text)[0]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/convgrad/bin/convgrad", "/bin/true"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
