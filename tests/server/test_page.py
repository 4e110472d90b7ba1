"""The chat page in headless Chromium, with its real headers, against a server that says what it is told."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from eightfold.errors import InputError
from eightfold.server.page import content_security_policy, page_router
from tests.openai_stub import JSON, Plan, Stub, stub_server
from tests.server.browser import HAS_SELENIUM, chromium, require_browser

if HAS_SELENIUM:
    from selenium.webdriver import Chrome
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.remote.webelement import WebElement
    from selenium.webdriver.support.wait import WebDriverWait

SECONDS = 20
MEGABYTE = 1_000_000
INFO = {
    "quantization": [
        {
            "name": f"model.layers.{layer}.mlp.down_proj.weight",
            "decision": "mxfp8",
            "quantized": True,
            "reason": "a projection",
            "bytes_before": 2 * MEGABYTE,
            "bytes_after": 1_031_250,
        }
        for layer in range(30)
    ]
    + [
        {
            "name": "model.embed_tokens",
            "decision": "bfloat16",
            "quantized": False,
            "reason": "an embedding is read by row",
            "bytes_before": 40 * MEGABYTE,
            "bytes_after": 40 * MEGABYTE,
        }
    ],
    "backends": [
        {"operation": "linear mxfp8", "backend": "cpu", "count": 210, "declined": []},
        {"operation": "attention", "backend": "cpu", "count": 1, "declined": ["cuda: there is no GPU"]},
    ],
}


@pytest.fixture(scope="module")
def page() -> tuple[dict[str, str], str]:
    """The headers and the text that the route answers with."""
    app = FastAPI()
    app.include_router(page_router())
    with TestClient(app) as client:
        response = client.get("/")
    assert response.status_code == 200
    return dict(response.headers), response.text


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    require_browser()
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def stub(page: tuple[dict[str, str], str]) -> Iterator[Stub]:
    headers, text = page
    kept = {name: headers[name] for name in ("content-security-policy", "x-content-type-options", "referrer-policy")}
    with stub_server() as server:
        server.pages["/"] = ("text/html; charset=utf-8", kept, text)
        server.pages["/model_info"] = (JSON, {}, json.dumps(INFO))
        yield server


@pytest.fixture
def tab(browser: Chrome, stub: Stub) -> Iterator[Tab]:
    tab = Tab(browser)
    tab.browser.get_log("browser")  # type: ignore[no-untyped-call]
    tab.browser.get(stub.url)
    tab.wait(lambda: tab.find("#model").get_attribute("data-state") == "ready")
    yield tab
    tab.browser.get("about:blank")


class Tab:
    """The page, as a user has it."""

    def __init__(self, browser: Chrome) -> None:
        self.browser = browser

    def find(self, selector: str) -> WebElement:
        return self.browser.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        return [item.text.strip() for item in self.browser.find_elements("css selector", selector)]

    def wait(self, condition: Callable[[], object]) -> None:
        """Until something holds."""
        WebDriverWait(self.browser, SECONDS, poll_frequency=0.05).until(lambda _: condition())

    def say(self, text: str) -> None:
        self.find("#input").send_keys(text + Keys.ENTER)

    def wait_for_answer(self) -> None:
        self.wait(lambda: self.find("#send").is_displayed())

    def complaints(self) -> list[str]:
        """What the console holds."""
        entries = self.browser.get_log("browser")  # type: ignore[no-untyped-call]
        return [str(entry["message"]) for entry in entries if entry["level"] in ("SEVERE", "WARNING")]


def chats(stub: Stub) -> list[dict[str, Any]]:
    return [dict(request.body) for request in stub.requests if request.path == "/v1/chat/completions"]


def test_the_page_is_one_file_that_loads_nothing_and_runs_only_itself(page: tuple[dict[str, str], str]) -> None:
    headers, text = page
    assert len(text.splitlines()) < 500
    assert "innerHTML" not in text
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", text)
    assert not re.findall(r"\son\w+=", text)
    policy = headers["content-security-policy"]
    assert policy == content_security_policy(text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert text == resources.files("eightfold.server").joinpath("static/index.html").read_text(encoding="utf-8")


def test_a_policy_needs_one_script_and_one_style() -> None:
    with pytest.raises(InputError, match="the chat page: got 2 of <script>; expected one"):
        content_security_policy("<script>1</script><script>2</script><style></style>")


def test_the_page_loads_and_shows_the_model_and_its_weights(tab: Tab) -> None:
    assert tab.find("#model").text.endswith("stub")
    tab.wait(lambda: tab.find("#quantization").is_displayed())
    assert tab.find("#total").text == "70.9 MB in memory, 71 % of 100.0 MB in the checkpoint"
    assert [text.splitlines() for text in tab.texts("#quantization tbody tr")] == [
        ["layers.*.mlp.down_proj \N{MULTIPLICATION SIGN} 30", "a projection", "mxfp8 60.0 MB 30.9 MB"],
        ["embed_tokens", "an embedding is read by row", "bfloat16 40.0 MB 40.0 MB"],
    ]
    assert tab.texts("#backends tbody tr") == [
        "linear mxfp8 \N{MULTIPLICATION SIGN} 210 cpu",
        "attention cpu\ncuda: there is no GPU",
    ]
    assert tab.complaints() == []


def test_an_answer_streams_and_its_figures_are_shown(tab: Tab, stub: Stub) -> None:
    gate = threading.Event()
    stub.plan = lambda request: Plan(tokens=("Once ", "upon ", "a time"), wait=gate)
    tab.say("Tell me a story")
    tab.wait(lambda: tab.texts(".assistant > .text") == ["Once"])
    assert tab.find("#log").get_attribute("aria-busy") == "true"
    gate.set()
    tab.wait_for_answer()
    assert tab.texts(".user") == ["Tell me a story"]
    assert tab.texts(".assistant > .text") == ["Once upon a time"]
    figures = r"3 tokens · [\d.]+ tokens/s · first token after \d+ ms · prompt of \d+ · cut at max tokens"
    assert re.fullmatch(figures, tab.texts(".stats")[0]), tab.texts(".stats")
    tab.say("And then?")
    tab.wait(lambda: len(tab.texts(".stats")) == 2)
    tab.wait_for_answer()
    asked = chats(stub)[1]
    assert [message["content"] for message in asked["messages"]] == ["Tell me a story", "Once upon a time", "And then?"]
    assert (asked["stream"], asked["stream_options"], asked["model"]) == (True, {"include_usage": True}, "stub")
    assert {"temperature", "max_tokens"}.isdisjoint(asked)
    assert tab.complaints() == []


@pytest.mark.parametrize("by", ["button", "Escape"])
def test_stop_ends_the_stream_and_keeps_what_came(tab: Tab, stub: Stub, by: str) -> None:
    stub.plan = lambda request: Plan(tokens=("Once ", "upon"), wait=threading.Event())
    tab.say("Tell me a story")
    tab.wait(lambda: tab.texts(".assistant > .text") == ["Once"])
    if by == "button":
        tab.find("#stop").click()
    else:
        tab.find("#input").send_keys(Keys.ESCAPE)
    tab.wait_for_answer()
    assert stub.dropped.wait(SECONDS)
    assert tab.texts(".assistant > .text") == ["Once"]
    assert tab.texts(".stats")[0].startswith("about 1 token · first token after ")
    assert tab.texts(".stats")[0].endswith(" · stopped")
    stub.plan = lambda request: Plan()
    tab.say("Go on")
    tab.wait(lambda: "one two three" in tab.texts(".assistant > .text"))
    assert chats(stub)[1]["messages"][1] == {"role": "assistant", "content": "Once "}
    assert tab.complaints() == []


def test_settings_and_the_key_are_sent_and_a_new_chat_forgets(tab: Tab, stub: Stub) -> None:
    for name, value in (("system", "Be brief"), ("temperature", "0.5"), ("max_tokens", "7"), ("key", "secret")):
        tab.find(f"#{name}").send_keys(value)
    tab.find("#input").send_keys("one", Keys.SHIFT, Keys.ENTER)
    tab.find("#input").send_keys("two")
    tab.find("#send").click()
    tab.wait(lambda: tab.texts(".stats"))
    tab.wait_for_answer()
    asked = chats(stub)[0]
    assert asked["messages"] == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "one\ntwo"}]
    assert (asked["temperature"], asked["max_tokens"]) == (0.5, 7)
    assert stub.requests[-1].headers["authorization"] == "Bearer secret"
    tab.find("#new").click()
    assert tab.texts(".message") == []
    tab.say("three")
    tab.wait(lambda: tab.texts(".stats"))
    assert [message["content"] for message in chats(stub)[1]["messages"]] == ["Be brief", "three"]


def test_a_new_chat_in_the_middle_of_an_answer_starts_empty(tab: Tab, stub: Stub) -> None:
    stub.plan = lambda request: Plan(wait=threading.Event())
    tab.say("old")
    tab.wait(lambda: tab.texts(".assistant > .text") == ["one"])
    tab.find("#new").click()
    tab.wait_for_answer()
    stub.plan = lambda request: Plan()
    tab.say("new")
    tab.wait(lambda: tab.texts(".assistant > .text") == ["one two three"])
    assert [message["content"] for message in chats(stub)[1]["messages"]] == ["new"]


def test_the_servers_message_is_shown_and_the_question_comes_back(tab: Tab, stub: Stub) -> None:
    stub.plan = lambda request: Plan(status=401, message="Incorrect API key provided.")
    tab.say("hello")
    tab.wait(lambda: tab.texts(".error") == ["Incorrect API key provided."])
    assert tab.find(".error").get_attribute("role") == "alert"
    assert tab.find("#input").get_attribute("value") == "hello"
    assert tab.texts(".message") == []
    stub.plan = lambda request: Plan(message="The engine has died.")
    tab.find("#input").send_keys(Keys.ENTER)
    tab.wait(lambda: "The engine has died." in tab.texts(".error"))
    assert tab.texts(".assistant > .text") == ["one two three"]
    stub.plan = lambda request: Plan(tokens=())
    tab.say("again")
    tab.wait(lambda: "The model answered nothing." in tab.texts(".error"))


def test_a_server_that_asks_for_a_key_gets_it(browser: Chrome, stub: Stub) -> None:
    tab = Tab(browser)
    models = stub.pages.pop("/v1/models", None)
    stub.key = "secret"
    browser.get(stub.url)
    tab.wait(lambda: tab.find("#model").text.endswith("needs an API key"))
    tab.find("#key").send_keys("secret", Keys.TAB)
    tab.wait(lambda: tab.find("#model").text.endswith("stub"))
    assert models is None


def test_a_models_text_is_text(tab: Tab, stub: Stub) -> None:
    code = "<b>bold</b> and `x < 1`\n```python\nprint('<script>')\n```\nafter <img src=x onerror=alert(1)>"
    stub.plan = lambda request: Plan(tokens=tuple(code))
    tab.say("<i>hello</i>")
    tab.wait(lambda: tab.texts(".stats") and tab.find("#send").is_displayed())
    assert tab.texts(".user") == ["<i>hello</i>"]
    assert tab.texts(".assistant .text > code") == ["x < 1"]
    assert tab.texts(".assistant .text pre code") == ["print('<script>')"]
    assert "after <img src=x onerror=alert(1)>" in tab.texts(".assistant > .text")[0]
    assert tab.browser.find_elements("css selector", ".message b, .message i, .message img, .message script") == []
    assert tab.complaints() == []


def test_thoughts_are_folded_away(tab: Tab, stub: Stub) -> None:
    parts = [{"reasoning_content": "Hm. "}, {"reasoning_content": "Yes."}, {"content": "42"}]
    chunks = [json.dumps({"choices": [{"index": 0, "delta": part}]}) for part in parts]
    stub.plan = lambda request: Plan(raw=(*chunks, "[DONE]"))
    tab.say("What is it?")
    tab.wait(lambda: tab.texts(".assistant > .text") == ["42"])
    tab.find(".thinking summary").click()
    assert tab.texts(".thinking .text") == ["Hm. Yes."]


def test_everything_has_a_name_and_can_be_reached_by_keyboard(tab: Tab) -> None:
    names = []
    for _ in range(10):
        active = tab.browser.switch_to.active_element
        names.append(active.accessible_name)
        active.send_keys(Keys.TAB)
    wanted = {"Message", "Send", "New chat", "Details", "System prompt", "Temperature", "Max tokens", "API key"}
    assert wanted <= set(names), names


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_are_readable(tab: Tab, stub: Stub, scheme: str, tmp_path: Path) -> None:
    feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    tab.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
    tab.say("hello")
    tab.wait(lambda: tab.texts(".stats") and tab.find("#send").is_displayed())
    for selector in (".user", ".assistant > .text", ".stats", "#model", "#quantization small", "#send"):
        assert contrast(tab, selector) >= 4.5, selector
    tab.browser.save_screenshot(str(tmp_path / f"{scheme}.png"))
    tab.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def contrast(tab: Tab, selector: str) -> float:
    """WCAG's ratio of the luminances of a text and of what is behind it."""
    script = """
        let node = arguments[0];
        const color = getComputedStyle(node).color;
        while (getComputedStyle(node).backgroundColor === "rgba(0, 0, 0, 0)") node = node.parentElement;
        return [color, getComputedStyle(node).backgroundColor];
    """
    colors = tab.browser.execute_script(script, tab.find(selector))
    front, back = sorted((luminance(color) for color in colors), reverse=True)
    return (front + 0.05) / (back + 0.05)


def luminance(color: str) -> float:
    """Relative luminance of a CSS color, `rgb(r, g, b)`."""
    channels = [int(value) / 255 for value in re.findall(r"\d+", color)[:3]]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
