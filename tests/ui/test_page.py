"""What people do on the page, in Chromium, against a real server (`make test-ui`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convgrad
from convgrad import check
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.security.keys import hash_of, new_key
from tests.support.oip_server import OipServer, serving_oip

pytestmark = pytest.mark.slow

AXE = Path(__file__).parents[2] / "service" / "ui" / "node_modules" / "axe-core" / "axe.min.js"
LAYER = "mb1ic8ih8oc8oh8kh3ph1"
VIEWS = ("layer", "networks", "server")
Open = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, server: OipServer) -> Iterator[Open]:
    """Opens the page; afterwards, nothing may have been written to the console."""
    contexts, said = [], []

    def open_page(view: str = "layer", url: str = f"http://{server.http}", **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(f"{url}/ui/#{view}")
        page.wait_for_selector("main h2")
        return page

    yield open_page
    for context in contexts:
        context.close()
    # Chromium reports refusals (401, 400) as failed resources, which they are not to us.
    assert [text for text in said if "status of 4" not in text] == []


def choose(page: Any, layer: str = LAYER) -> None:
    page.get_by_label("Layer:").fill(layer)
    page.wait_for_function(
        "title => document.getElementById('layer-found').textContent.includes(title)",
        arg="8 → 8 channels",
    )
    page.get_by_role("heading", name="Plan").wait_for()


def test_sizes_and_plan_follow_what_is_typed(opened: Open) -> None:
    page = opened()
    choose(page, "conv -n 1 -c 8 -H 8 -W 8 -k 8 -y 3 -x 3 -p 1 -q 1 -u 2 -v 2")
    assert "⌊(8 + 1 + 1 − 1·(3 − 1) − 1) / 2⌋ + 1 = 4" in page.inner_text("main")  # noqa: RUF001
    page.get_by_label("channels last").check()
    page.get_by_text("1 × 4 × 4 × 8 float32").wait_for()  # noqa: RUF001
    page.get_by_label("Operation").select_option("grouped_conv_bwd_weight")
    page.get_by_text("grad_weight", exact=True).wait_for()


def test_sizes_are_fields_too(opened: Open) -> None:
    page = opened()
    page.get_by_label("Layer:").fill("ConvTranspose2d(8, 6, 3, stride=2, padding=1) on 2x8x5x5")
    # conv_bwd_data, which stands there at first, does not fit this layer; its sizes are known.
    page.get_by_role("alert").wait_for()
    page.get_by_text("(5 − 1)·2 − 1 − 1 + 1·(3 − 1) + 0 + 1 = 9").first.wait_for()  # noqa: RUF001
    operation = page.get_by_label("Operation")
    assert "conv_transpose_fwd" in operation.locator("optgroup").first.inner_text()
    operation.select_option("conv_transpose_fwd")
    page.get_by_label("kernel H").fill("5")
    page.get_by_label("output padding W").fill("1")
    page.get_by_text("2 × 6 × 11 × 10 float32").wait_for()  # noqa: RUF001
    assert "kernel_size=(5, 3)" in page.get_by_label("Layer:").input_value()
    page.get_by_label("Batch").fill("3")
    page.get_by_text("3 × 6 × 11 × 10 float32").wait_for()  # noqa: RUF001
    assert page.get_by_role("alert").count() == 0


def test_what_is_not_a_layer_is_refused_in_words(opened: Open) -> None:
    page = opened()
    page.get_by_label("Layer:").fill("mb1ic8ih8oc8 and something")
    assert "something" in page.get_by_role("alert").inner_text()
    assert page.get_by_role("heading", name="Plan").count() == 0


def test_timing_a_layer(opened: Open) -> None:
    page = opened()
    choose(page)
    page.get_by_role("button", name="Time it").click()
    page.get_by_role("row", name="convgrad, warm cache").wait_for()
    assert page.get_by_role("img", name="Roofline.").count() == 1
    assert page.get_by_role("img", name="Distribution of").count() == 1
    assert f"convgrad time conv_bwd_data --layer {LAYER}" in page.inner_text("main")


def test_a_timing_can_be_cancelled(opened: Open) -> None:
    page = opened()
    choose(page)
    page.get_by_role("button", name="Time it").click()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Time it").wait_for()
    assert page.get_by_role("button", name="Time it").is_enabled()
    assert page.get_by_role("alert").count() == 0


@pytest.mark.parametrize("planted", [False, True], ids=["right", "one element off"])
def test_verifying_a_result(opened: Open, server: OipServer, tmp_path: Path, planted: bool) -> None:
    grad_output = check.draw("grad_output", (1, 8, 8, 8), "float32", 7, "normal")
    weight = check.draw("weight", (8, 8, 3, 3), "float32", 7, "normal")
    with convgrad.Client(f"http://{server.http}") as client:
        mine = np.array(
            client.conv_bwd_data(
                grad_output=grad_output, weight=weight, input_size=(8, 8), padding=1
            )
        )
    mine[0, 3, 4, 5] += planted
    np.save(tmp_path / "mine.npy", mine)
    page = opened()
    choose(page)
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Your grad_input").set_input_files(tmp_path / "mine.npy")
    page.get_by_role("button", name="Verify it").click()
    if planted:
        page.get_by_text("Failed:").wait_for()
        assert "(0, 3, 4, 5)" in page.inner_text("main")
        assert page.locator("svg.heat .wrong").count() == 1
    else:
        page.get_by_text("Passed: every element is within its bound.").wait_for()
        assert page.locator("svg.heat .wrong").count() == 0


def test_networks(opened: Open) -> None:
    page = opened("networks")
    page.get_by_role("row", name="ResNet-50").first.wait_for()
    page.get_by_label("1", exact=True).check()
    page.get_by_text("Batch 1", exact=True).wait_for()


def test_the_servers_state(opened: Open, server: OipServer) -> None:
    with convgrad.Client(f"http://{server.http}") as client:
        client.put("kept-for-the-page", np.zeros((2, 3), np.float32))
        page = opened("server")
        page.get_by_role("row", name="kept-for-the-page 2 × 3 float32").wait_for()  # noqa: RUF001
        client.drop("kept-for-the-page")
    page.get_by_text("Stored tensors: none").wait_for()  # it asks every two seconds


def test_a_key_is_asked_for_and_forgotten(opened: Open, tmp_path: Path) -> None:
    key = new_key()
    (tmp_path / "keys").write_text(f"ada:{hash_of(key)}")
    with serving_oip(CpuBackend(threads=1), api_keys=tmp_path / "keys") as guarded:
        page = opened(url=f"http://{guarded.http}")
        page.get_by_label("This server requires an API key").fill(key)
        page.get_by_role("button", name="Use this key").click()
        page.get_by_role("heading", name="Plan").wait_for()
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [
            0,
            0,
            "",
        ]
        page.reload()
        page.get_by_label("This server requires an API key").wait_for()
        page.close()  # before the server that it still asks


def test_by_keyboard_alone(opened: Open) -> None:
    page = opened()
    page.get_by_role("heading", name="Plan").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Time it":
            break
    page.keyboard.press("Enter")
    page.get_by_role("row", name="convgrad, warm cache").wait_for()


@pytest.mark.parametrize("view", VIEWS)
def test_skipping_to_the_content_stays_in_the_view(opened: Open, view: str) -> None:
    page = opened(view)
    page.wait_for_selector("table")
    title = page.inner_text("main h2")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.id === 'main'")
    assert page.evaluate("location.hash") == f"#{view}"
    assert page.inner_text("main h2") == title


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1200), ("dark", 1200), ("light", 360)], ids=str
)
def test_readable_by_everybody(opened: Open, view: str, scheme: str, width: int) -> None:
    if not AXE.exists():
        pytest.skip("make test-ui installs axe-core")
    viewport = {"width": width, "height": 900}
    page = opened(view, color_scheme=scheme, viewport=viewport, bypass_csp=True)
    page.wait_for_selector("table")
    page.add_script_tag(path=AXE)
    found = page.evaluate("async () => (await axe.run()).violations")
    assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []


@pytest.mark.parametrize("view", VIEWS)
def test_on_a_phone_nothing_is_cut(opened: Open, view: str) -> None:
    page = opened(view, viewport={"width": 360, "height": 740})
    page.wait_for_selector("table")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
