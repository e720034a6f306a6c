"""Browser tests need what not every machine has, so only `make test-browser` collects them, by MINIVLLM_BROWSER=1."""

import os
from collections.abc import Iterator

import pytest

from tests.browser.chromium import MISSING, find_chromium

collect_ignore_glob = [] if os.environ.get("MINIVLLM_BROWSER") else ["test_*.py"]


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """A headless Chromium: this machine's own, as playwright's downloads are not everywhere to be had."""
    from playwright.sync_api import sync_playwright

    path = find_chromium()
    if path is None:
        pytest.fail(MISSING)
    with sync_playwright() as playwright:
        # Without a sandbox: containers, where root runs the tests, have none.
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser) -> Iterator[object]:
    """A page of 1280 by 900 pixels; the test fails if a script on it does."""
    errors = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    context.close()
    assert errors == []
