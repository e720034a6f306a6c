"""The explorer in a real Chromium: the exported page, and the widget in a real JupyterLab, moved with a real mouse."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import nbformat
import pytest

from minivllm.sampling_params import SamplingParams
from minivllm.viz import export_html, narrate
from tests.fakes import make_engine, run_to_end, sample_trace
from tests.viz.shared import shared_trace

CELL = """from minivllm.trace import Trace
from minivllm.viz import Explorer

Explorer(Trace.load("trace.jsonl"))"""
NO_NEWS = {"@jupyterlab/apputils-extension:announcements": True}


def told(page, scope="#view"):
    """Number of the step that is shown, and its sentences."""
    view = page.locator(scope)
    step = int(re.match(r"Step (\d+)", view.inner_text()).group(1))
    return step, view.locator("li").all_inner_texts()


def expected(trace, k):
    return k, narrate(trace.state(k), trace.header)


def drag(page, x, y, to_x):
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move((x + to_x) / 2, y, steps=5)
    page.mouse.move(to_x, y, steps=5)
    page.mouse.up()


# The exported page. ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace():
    return sample_trace()


@pytest.fixture(scope="module")
def address(trace, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "trace.html"
    export_html(trace, path)
    return path.as_uri()


def opened(page, address):
    page.goto(address)
    page.wait_for_selector("#view li")
    return page


def test_the_page_opens_without_a_network(page, address, trace):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    opened(page, address)
    assert told(page) == expected(trace, 0)
    assert page.inner_text("#where") == f"step 0 (1 of {len(trace)}), {trace.state(0).end_s:.3f} s"
    assert asked == [address]


def test_buttons_and_keys_go_from_step_to_step(page, address, trace):
    opened(page, address)
    assert page.locator("#previous").is_disabled()
    page.click("#next")
    page.click("#next")
    assert told(page) == expected(trace, 2)
    page.click("#previous")
    assert told(page) == expected(trace, 1)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert told(page) == expected(trace, 3)
    page.keyboard.press("End")
    assert told(page) == expected(trace, len(trace) - 1)
    assert page.locator("#next").is_disabled()
    page.keyboard.press("Home")
    assert told(page) == expected(trace, 0)
    page.keyboard.press("ArrowLeft")
    assert told(page) == expected(trace, 0)


def test_the_slider_can_be_dragged(page, address, trace):
    opened(page, address)
    box = page.locator("#slider").bounding_box()
    drag(page, box["x"] + 8, box["y"] + box["height"] / 2, box["x"] + box["width"] * 0.62)
    step, sentences = told(page)
    assert 40 < step < 55 and (step, sentences) == expected(trace, step)
    assert page.evaluate("location.hash") == f"#step={step}"
    page.keyboard.press("ArrowRight")  # the slider has the focus, and a key is one step all the same
    assert told(page) == expected(trace, step + 1)


def test_the_address_names_the_step(page, address, trace):
    opened(page, f"{address}#step=47")
    assert told(page) == expected(trace, 47)
    page.evaluate("location.hash = '#step=5'")
    page.wait_for_function("document.querySelector('#where').textContent.startsWith('step 5 ')")
    assert told(page) == expected(trace, 5)
    page.evaluate("location.hash = '#step=9999'")
    page.wait_for_timeout(100)
    assert told(page) == expected(trace, 5)


def test_it_plays_and_pauses(page, address, trace):
    opened(page, f"{address}#step={len(trace) - 3}")
    page.keyboard.press("Space")
    assert page.inner_text("#play") == "Pause"
    page.wait_for_function(f"document.querySelector('#where').textContent.startsWith('step {len(trace) - 2} ')")
    page.keyboard.press("Space")
    assert page.inner_text("#play") == "Play"
    step = told(page)
    page.wait_for_timeout(800)
    assert told(page) == step
    page.click("#play")
    page.wait_for_function("document.querySelector('#play').textContent === 'Play'", timeout=5000)
    assert told(page) == expected(trace, len(trace) - 1)


def test_a_name_that_looks_like_a_script_is_only_shown(page, tmp_path):
    name = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
    engine = make_engine(num_blocks=16, block_size=8)
    evil = engine.start_recording()
    engine.add_request(name, list(range(1, 13)), SamplingParams(temperature=0, max_tokens=4))
    run_to_end(engine)
    export_html(evil, tmp_path / "evil.html", title=name)
    opened(page, (tmp_path / "evil.html").as_uri())
    page.keyboard.press("End")
    assert told(page) == expected(evil, len(evil) - 1)
    assert page.evaluate("window.hacked") is None
    assert page.title() == name


@pytest.mark.parametrize("width", [1280, 800])
@pytest.mark.parametrize(
    "fields",
    [{}, {"batching": "static"}, {"kv_cache": "contiguous", "reservation": "pow2"}, {"num_blocks": 2000}],
    ids=["paged", "static", "pow2", "large"],
)
def test_nothing_is_wider_than_the_window(page, tmp_path, width, fields):
    busy = sample_trace(**fields)
    export_html(busy, tmp_path / "busy.html")
    page.set_viewport_size({"width": width, "height": 900})
    opened(page, (tmp_path / "busy.html").as_uri())
    for k in range(0, len(busy), 8):
        page.evaluate(f"go({k})")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        hidden = "element => element.scrollWidth > element.clientWidth + 1"
        cells = page.locator("#view [title^=block]")
        assert cells.evaluate_all(f"cells => cells.filter({hidden}).map(cell => cell.title)") == []
    page.screenshot(path=tmp_path / "busy.png", full_page=True)
    assert (tmp_path / "busy.png").stat().st_size > 10_000


def test_shared_cached_found_and_evicted_blocks_fit_their_cells(page, tmp_path):
    shared = shared_trace()
    export_html(shared, tmp_path / "shared.html")
    page.set_viewport_size({"width": 800, "height": 900})
    opened(page, (tmp_path / "shared.html").as_uri())
    cells = page.locator("#view [title^=block]")
    for k in range(len(shared)):
        page.evaluate(f"go({k})")
        hidden = "cells => cells.filter(cell => cell.scrollWidth > cell.clientWidth + 1).map(cell => cell.title)"
        assert cells.evaluate_all(hidden) == []
    page.evaluate("go(3)")
    assert cells.nth(0).inner_text() == "0 ×2 B"
    styles = "cells => cells.map(cell => [getComputedStyle(cell).outlineStyle, getComputedStyle(cell).borderStyle])"
    assert cells.evaluate_all(styles) == [*[["solid", "solid"]] * 4, *[["none", "solid"]] * 3, ["none", "dashed"]]
    assert page.evaluate("document.documentElement.scrollWidth") <= 800


# The widget in JupyterLab. --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab(trace, tmp_path_factory):
    """Address of a JupyterLab whose folder has a trace and a notebook with an explorer of it."""
    home = tmp_path_factory.mktemp("lab")
    work = home / "work"
    work.mkdir()
    trace.save(work / "trace.jsonl")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, work / "explorer.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += [f"--ServerApp.root_dir={work}", "--IdentityProvider.token=", "--ServerApp.port_retries=0"]
    (home / "CONFIG" / "labconfig").mkdir(parents=True)
    (home / "CONFIG" / "labconfig" / "page_config.json").write_text(json.dumps({"disabledExtensions": NO_NEWS}))
    # A home of its own: no settings, workspaces or kernels of whoever runs the tests.
    environment = {**os.environ, "HOME": str(home), "JUPYTER_PREFER_ENV_PATH": "1"}
    environment |= {f"JUPYTER_{name}_DIR": str(home / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    with open(home / "lab.log", "wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for(f"{address}/api", server, home / "lab.log")
            yield f"{address}/lab/tree/explorer.ipynb"
        finally:
            os.killpg(server.pid, signal.SIGTERM)  # its kernels are in its session too
            try:
                server.wait(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def wait_for(address, server, log, seconds=90):
    for _ in range(5 * seconds):
        assert server.poll() is None, f"JupyterLab ended: {log.read_text()}"
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"JupyterLab does not answer: {log.read_text()}")


def test_the_widget_moves_with_its_slider_in_jupyterlab(page, lab, trace, tmp_path):
    page.set_default_timeout(30_000)
    page.goto(lab)
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    # What is run before the kernel has answered is lost. Only the status bar tells when it has.
    page.get_by_text(re.compile(r"\| Idle$")).first.wait_for()
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Run$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()
    view = ".jp-OutputArea .widget-html-content"
    page.wait_for_selector(f"{view} li, .jp-OutputArea-output[data-mime-type*=stderr]")
    assert page.locator(f"{view} li").count(), page.locator(".jp-OutputArea").inner_text()
    assert told(page, view) == expected(trace, 0)

    handle, track = (page.locator(f".jp-OutputArea {name}") for name in (".noUi-handle", ".noUi-target"))
    handle.scroll_into_view_if_needed()
    at, whole = handle.bounding_box(), track.bounding_box()
    drag(page, at["x"] + at["width"] / 2, at["y"] + at["height"] / 2, whole["x"] + whole["width"] * 0.62)
    readout = page.locator(".jp-OutputArea .widget-readout").inner_text()
    shown = f"parseInt(document.querySelector('{view}').innerText.slice('Step '.length))"
    page.wait_for_function(f"{shown} === {readout}")
    step = int(readout)
    assert 40 < step < 55 and told(page, view) == expected(trace, step)
    page.screenshot(path=tmp_path / "lab.png")

    page.locator(".jp-OutputArea .jupyter-widgets.widget-play button").first.click()
    page.wait_for_function(f"{shown} === {step + 2}")
