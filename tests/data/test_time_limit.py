"""The time limit of a chat template: endless loops end, in any thread, and nothing arrives later."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from fulldepth.data import rendering
from fulldepth.data.time_limit import TookTooLong, within
from fulldepth.errors import FulldepthError

ENDLESS = "{% for name in range(99999) %}" * 3 + "{% endfor %}" * 3


def test_an_endless_template_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")), unk_token="a")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    messages = [{"role": "user", "content": "a"}]
    monkeypatch.setattr(rendering, "TEMPLATE_SECONDS", 0.3)
    assert rendering.encode_prompt(tokenizer, messages) == [0]
    tokenizer.chat_template = ENDLESS
    start = time.monotonic()
    with pytest.raises(FulldepthError, match=r"Row 3: .* chat template takes more than 0.3 seconds"):
        rendering.encode_prompt(tokenizer, messages, "Row 3")
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("swallows", [False, True])
def test_any_thread_is_ended(swallows: bool) -> None:
    until = time.monotonic() + 0.5 * swallows

    def spin() -> None:
        while True:
            try:
                while True:
                    pass
            except Exception:  # code that swallows errors is ended by the next one
                if time.monotonic() > until:
                    raise

    ended: list[str] = []

    def run() -> None:
        try:
            within(0.1, spin)
        except TookTooLong:
            ended.append("ended")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert ended == ["ended"]


def test_the_exception_never_arrives_after_the_end() -> None:
    for limit in (0.0, 0.0005, 0.001, 0.002) * 25:  # about as long as the function
        with suppress(TookTooLong):
            within(limit, lambda: sum(range(20_000)))
        sum(range(20_000))


def test_results_and_errors_are_handed_on() -> None:
    assert within(10, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(10, lambda: 1 / 0)
