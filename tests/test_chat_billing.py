"""Billing headers of coding agents are removed on request, and nothing else is."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from deltic.chat.processor import ChatProcessor
from deltic.chat.tokenizer import Tokenizer
from deltic.errors import RequestError

TOKENIZER = Tokenizer.from_directory(Path(__file__).parents[1] / "deltic" / "models" / "tiny")
HEADER = "x-anthropic-billing-header: cc_version=2.1.15.abc; cc_entrypoint=cli; cch=00000;"


@pytest.mark.parametrize("content", [
    f"{HEADER}\nBe brief.",
    f"{HEADER}\n{HEADER.upper()}\nBe brief.",
    [{"type": "text", "text": HEADER}, {"type": "text", "text": "Be brief."}],
    [{"type": "text", "text": HEADER + "\n"}, {"type": "text", "text": HEADER + "\nBe brief."}],
])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_billing_headers_are_removed(content: Any, role: str) -> None:
    messages = [{"role": role, "content": content}, {"role": "user", "content": "Hi"}]
    given = json.dumps(messages)
    clean = [{"role": "system", "content": "Be brief."}, messages[1]]
    processor = ChatProcessor(TOKENIZER, strip_billing_header=True)
    assert processor.chat(messages).request.prompt == processor.chat(clean).request.prompt
    assert json.dumps(messages) == given


@pytest.mark.parametrize("messages", [
    [{"role": "system", "content": f"Be brief.\n{HEADER}"}, {"role": "user", "content": HEADER}],
    [{"role": "system", "content": f" {HEADER}\nBe brief."}, {"role": "user", "content": "Hi"}],
    [{"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": HEADER}]},
     {"role": "user", "content": [HEADER]}],
])
def test_billing_header_is_removed_only_at_start_of_system_message(messages: Any, caplog: Any) -> None:
    stripped = ChatProcessor(TOKENIZER, strip_billing_header=True).chat(messages).request
    assert stripped.prompt == ChatProcessor(TOKENIZER).chat(messages).request.prompt and not caplog.records


def test_kept_billing_header_warns_once(caplog: Any) -> None:
    processor = ChatProcessor(TOKENIZER)
    with caplog.at_level(logging.WARNING, "deltic"):
        for _ in range(3):
            job = processor.chat([{"role": "system", "content": HEADER + "\nBe brief."},
                                  {"role": "user", "content": "Hi"}])
    assert [("`strip_billing_header`" in record.message) for record in caplog.records] == [True]
    assert "billing" in TOKENIZER.decode(job.request.prompt)


@pytest.mark.parametrize("messages", [None, "Hi", [], [5], [{"role": "system", "content": 5}],
                                      [{"role": ["system"], "content": []}]])
def test_wrong_messages_are_still_refused(messages: Any) -> None:
    with pytest.raises(RequestError):
        ChatProcessor(TOKENIZER, strip_billing_header=True).chat(messages)
