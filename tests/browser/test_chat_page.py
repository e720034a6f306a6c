"""The chat page in a real Chromium, against a real server."""

import pytest

from minivllm import LLM, AsyncLLM
from minivllm.server.serve import ServerThread

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def llm(real_folder):
    return LLM(str(real_folder), dtype="float32", device="cpu", num_kv_blocks=600)


def ask(page, text):
    page.fill("#text", text)
    page.press("#text", "Enter")


def test_an_answer_streams_and_its_numbers_show(page, llm):
    with ServerThread(AsyncLLM.from_llm(llm.reconfigure())) as server:
        page.goto(server.url)
        page.wait_for_function("document.getElementById('model').textContent.includes('smollm2')")
        ask(page, "Say <b>hello</b> to me.")
        assert page.locator(".user").inner_text() == "Say <b>hello</b> to me."
        page.wait_for_selector(".note", timeout=60_000)
        said = page.locator(".assistant").inner_text()
        assert len(said) > 3
        tokens, first, rate = page.locator(".note").inner_text().split(", ")
        assert int(tokens.split()[0]) > 1 and int(first.split()[2]) > 0 and float(rate.split()[1]) > 0
        for name, text in (("running", "0"), ("waiting", "0"), ("usage", "0.0 %")):
            page.wait_for_function(f"document.getElementById('{name}').textContent === '{text}'")
        ask(page, "Count from 1 to 1000 in words, and then tell a very long story.")
        page.wait_for_function("document.getElementById('running').textContent === '1'", timeout=20_000)
        assert page.locator("#send").inner_text() == "Stop"
        page.click("#send")
        page.wait_for_function("document.getElementById('running').textContent === '0'", timeout=20_000)
        assert page.locator("#send").inner_text() == "Send" and page.locator(".assistant").count() == 2


def test_a_key_is_asked_for_and_a_mistake_is_shown(page, llm):
    with ServerThread(AsyncLLM.from_llm(llm.reconfigure(max_model_len=64)), api_keys=("secret",)) as server:
        asked = []
        page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept("secret")))
        page.goto(server.url)
        page.wait_for_function("document.getElementById('model').textContent.includes('smollm2')")
        assert asked == ["This server asks for an API key"]
        ask(page, "word " * 100)
        page.wait_for_selector(".error")
        assert "max_model_len is 64" in page.locator(".error").inner_text()
