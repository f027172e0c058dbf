"""Prompts are what transformers renders; bad messages and bad templates are named, and harm nobody."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from test_chat_support import QWEN_LIKE, build_prompt
from transformers import PreTrainedTokenizerFast

from deltic.chat.conversation import Conversation, load_template
from deltic.chat.messages import normalise_messages, normalise_tools
from deltic.chat.processor import ChatProcessor
from deltic.chat.template import ChatTemplate
from deltic.chat.tokenizer import Tokenizer
from deltic.errors import RequestError, TemplateError

TINY = Path(__file__).parents[1] / "deltic" / "models" / "tiny"
TOKENIZER = Tokenizer.from_directory(TINY)
THEIRS = PreTrainedTokenizerFast.from_pretrained(TINY)
TINY_TEMPLATE = TOKENIZER.chat_template or ""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für <Ort> & 'mehr'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def user(content: Any = "Hi & <bye>") -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(arguments: Any, **rest: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        ],
        **rest,
    }


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": content}


SYSTEM = {"role": "system", "content": " Be brief. "}
ASSISTANT = tuple(TOKENIZER.encode("<|im_start|>assistant\n"))
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [user()],
    [SYSTEM, user("  trimmed\n")],
    [SYSTEM, user([{"type": "text", "text": "two"}, {"type": "text", "text": " parts"}])],
    [user("1"), {"role": "assistant", "content": "<think>\nx\n</think>\n\nAnswer"}, user("2")],
    [user("1"), {"role": "assistant", "content": "A", "reasoning_content": "R", "refusal": None}, user("2")],
    [user("1"), {"role": "assistant", "content": "A", "reasoning": "R"}],
    [user(), call({"city": "Köln", "days": 3, "deep": {"a": [True, None]}}, content=None), result("sunny")],
    [user(), call({"city": "x"}, content="Let me look."), result("a"), result("b")],
    [
        SYSTEM,
        user(),
        call({}, reasoning_content="why"),
        result("a"),
        call({"n": 1.5, "flag": True}),
        result("b"),
    ],
    [
        user(),
        call({}),
        result("a"),
        {"role": "assistant", "content": "Done"},
        user("<tool_response>x</tool_response>"),
    ],
]


@pytest.mark.parametrize("source", [TINY_TEMPLATE, QWEN_LIKE], ids=["tiny", "qwen"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize(
    "variables", [{}, {"enable_thinking": True}, {"enable_thinking": False, "preserve_thinking": True}]
)
def test_rendered_as_transformers_renders(
    source: str, tools: Any, messages: list[Any], variables: dict[str, Any]
) -> None:
    ours = build_prompt(ChatTemplate(source, TOKENIZER.special_tokens), TOKENIZER, messages, tools, variables)
    options = {"chat_template": source, "tools": tools, "add_generation_prompt": True, **variables}
    assert ours.text == THEIRS.apply_chat_template(messages, tokenize=False, **options)
    assert list(ours.ids) == THEIRS.apply_chat_template(messages, return_dict=False, **options)


@pytest.mark.parametrize(
    "source",
    [
        "{{ bos_token }}|{{ eos_token }}|{{ documents }}|{{ tools }}|{{ unheard_of }}|{{ messages[0].x }}",
        "{%- for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}",
        "{{ messages | map(attribute='content') | list | tojson(indent=2) }}{{ dict(a=1) | tojson }}",
        "{% generation %}a{% set x = 1 %}{% endgeneration %}{{ x }}",
        "{% for i in range(9) %}{% if i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 6 %}{% endfor %}{{ ns.n }}",
        "{{ strftime_now('%Y') }}",
    ],
)
def test_features_of_templates(source: str) -> None:
    messages = CONVERSATIONS[3]
    theirs = THEIRS.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(source, TOKENIZER.special_tokens).render(normalise_messages(messages)) == theirs


def test_enable_thinking_is_passed_only_if_set() -> None:
    template = ChatTemplate("{{ enable_thinking is defined }}")
    assert [template.render([], enable_thinking=value) for value in (None, False, True)] == [
        "False",
        "True",
        "True",
    ]


def test_no_tools_are_none() -> None:
    template = ChatTemplate("{{ tools }}")
    assert [template.render([], tools) for tools in (None, [])] == ["None", "None"]
    assert normalise_tools([]) is None and normalise_tools(TOOLS) == TOOLS


# ---- messages


def test_content_and_contents_are_aliases() -> None:
    for key in ("content", "contents"):
        [message] = normalise_messages([{"role": "user", key: "find me"}])
        assert message["content"] == message["contents"] == "find me"
        for source in (TINY_TEMPLATE, QWEN_LIKE, "{{ messages[0].contents }}"):
            assert (
                "find me"
                in build_prompt(ChatTemplate(source), TOKENIZER, [{"role": "user", key: "find me"}]).text
            )


@pytest.mark.parametrize("content", [None, "", []])
def test_missing_content_is_empty_text(content: Any) -> None:
    assert normalise_messages([user(content)])[0]["content"] == ""
    assert normalise_messages([{"role": "user"}])[0]["contents"] == ""


def test_normalising_twice_changes_nothing_and_leaves_the_original_alone() -> None:
    original = [{"role": "developer", "content": "x"}, call('{"a": 1}', reasoning="r"), result("y")]
    once = normalise_messages(original)
    assert (
        normalise_messages(once) == once
        and original[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    )
    assert once[0]["role"] == "system" and once[1]["reasoning_content"] == "r"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"b": [1]}, {"b": [1]}),
        ("", {}),
        (" ", {}),
        (None, {}),
        ("null", {}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("{'a': True}", {"a": True}),
        ('{"a": 1', {"a": 1}),
        ('{"a": 1, "b": "x', {"a": 1, "b": "x"}),
        ("[1]", {"arguments": "[1]"}),
        ("junk", {"arguments": "junk"}),
    ],
)
def test_arguments_become_mappings_and_bad_ones_stay_renderable(
    arguments: Any, expected: dict[str, Any]
) -> None:
    [message] = normalise_messages([call(arguments)])
    assert message["tool_calls"][0]["function"]["arguments"] == expected
    assert (
        "<function=weather>"
        in build_prompt(ChatTemplate(TINY_TEMPLATE), TOKENIZER, [user(), call(arguments)]).text
    )


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("text", "messages[1]"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "robot"}, "messages[1].role"),
        ({"role": ["user"]}, "messages[1].role"),
        (user(5), "messages[1].content"),
        ({"role": "user", "contents": {}}, "messages[1].contents"),
        (user([IMAGE]), "messages[1].content[0]"),
        (user([{"type": "text", "text": "a"}, {"type": "audio"}]), "messages[1].content[1]"),
        (user([{"type": "text"}]), "messages[1].content[0].text"),
        (user([7]), "messages[1].content[0]"),
        (user("\ud800"), "messages[1].content"),
        ({"role": "user", "name": "\ud800"}, "messages[1].name"),
        ({"role": "user", "extra": {1: 2}}, "messages[1].extra"),
        ({"role": "user", "extra": [object()]}, "messages[1].extra[0]"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [5]}, "messages[1].tool_calls[0].function.name"),
        (call([1]), "messages[1].tool_calls[0].function.arguments"),
        (call(3), "messages[1].tool_calls[0].function.arguments"),
    ],
)
def test_bad_messages_are_named(message: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        normalise_messages([user(), message])
    assert caught.value.field == field and field in str(caught.value)


def test_a_refusal_is_text() -> None:
    [message] = normalise_messages([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}])
    assert message["content"] == "no"
    with pytest.raises(RequestError, match=r"content\[0\].refusal"):
        normalise_messages([{"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}])


def test_unwritable_tool_names_are_refused() -> None:
    for name in ("a b", "a.b", 'a"=/é', "x" * 256):
        assert normalise_tools([{"type": "function", "function": {"name": name}}])
    for name in ("a<b", "a>", "a\nb", "\r", " ", "x" * 257):
        for tool, field in (({"type": "function", "function": {"name": name}}, "tools[0].function.name"),
                            ({"name": name}, "tools[0].name")):
            with pytest.raises(RequestError) as caught:
                normalise_tools([tool])
            assert caught.value.field == field and len(str(caught.value)) < 300


def test_bad_lists_and_tools_are_named() -> None:
    deep: Any = "x"
    for _ in range(2000):
        deep = [deep]
    for function, value, field in (
        (normalise_messages, "text", "messages"),
        (normalise_messages, None, "messages"),
        (normalise_tools, "text", "tools"),
        (normalise_tools, [*TOOLS, 5], "tools[1]"),
        (normalise_tools, [{"type": "function", "function": {}}], "tools[0]"),
    ):
        with pytest.raises(RequestError) as caught:
            function(value)
        assert caught.value.field == field
    with pytest.raises(RequestError, match="nested"):
        normalise_messages([{"role": "user", "deep": deep}])


def seen(part: Any, kind: str, field: str) -> dict[str, Any]:
    return {"type": kind}


def test_images_on_a_model_that_sees() -> None:
    parts = [{"type": "text", "text": "look"}, IMAGE]
    [message] = normalise_messages([user(parts)], see=seen)
    assert message["content"] == [{"type": "text", "text": "look"}, {"type": "image"}]
    prompt = build_prompt(ChatTemplate(QWEN_LIKE), TOKENIZER, [user(parts)], see=seen)
    assert "look<|vision_start|><|image_pad|><|vision_end|>" in prompt.text


# ---- errors of templates


def test_missing_template_error_names_option(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((TINY / "tokenizer.json").read_text())
    with pytest.raises(TemplateError, match="give a file with one"):
        load_template(Tokenizer.from_directory(tmp_path))
    assert load_template(TOKENIZER).source == TINY_TEMPLATE


def test_syntax_error_names_line() -> None:
    with pytest.raises(TemplateError, match="line 3"):
        ChatTemplate("a\nb\n{% if %}")
    with pytest.raises(TemplateError, match="line 1: No filter named 'nope'"):
        ChatTemplate("{{ 1 | nope }}")
    with pytest.raises(TemplateError):
        ChatTemplate("(" * 10 + "{{ " + "(" * 5000)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages"),
        ([SYSTEM], "no user message"),
        ([SYSTEM, SYSTEM], "no user message"),
    ],
)
def test_template_error_reaches_client(messages: list[Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        build_prompt(ChatTemplate(TINY_TEMPLATE), TOKENIZER, messages)
    assert caught.value.field == "messages"


WITHOUT_QUESTION = [[SYSTEM], [SYSTEM, call({}, content=None), result("x")], [call({}, content=None), result("x")]]


@pytest.mark.parametrize("messages", WITHOUT_QUESTION, ids=["system", "system, call, result", "call, result"])
@pytest.mark.parametrize("template", [TINY_TEMPLATE, QWEN_LIKE], ids=["tiny", "qwen"])
def test_conversation_without_user_message_is_refused_by_template(
        template: str, messages: list[Any]) -> None:
    """Qwen3.5's does, also under vLLM: the model has never seen such a prompt. What to do is said."""
    with pytest.raises(RequestError, match=r'user.*: add a message with the role "user"$') as caught:
        ChatProcessor(TOKENIZER, template).chat(messages)
    assert caught.value.field == "messages" and ".:" not in str(caught.value)


@pytest.mark.parametrize("messages", WITHOUT_QUESTION, ids=["system", "system, call, result", "call, result"])
@pytest.mark.parametrize("mode", ["template", "preserve"])
def test_conversation_without_user_message_is_rendered_if_template_allows(
        mode: str, messages: list[Any]) -> None:
    template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{{ m.tool_calls or '' }}"
                "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    processor = ChatProcessor(TOKENIZER, template, history=mode)
    job = processor.chat(messages)
    conversation = Conversation.read(ChatTemplate(template), TOKENIZER, messages)
    assert TOKENIZER.decode(job.request.ids, skip_special=False) == conversation.render(conversation.messages)
    assert job.request.ids[-len(ASSISTANT):] == ASSISTANT


def test_late_system_messages_merge_into_first() -> None:
    late, both = {"role": "developer", "content": "Late."}, {"role": "system", "content": "Be brief.\n\nLate."}
    strict = ChatTemplate(TINY_TEMPLATE)
    open_to_all = ChatTemplate("{% for m in messages %}{{ m.content }}|{% endfor %}")
    first = {"role": "system", "content": "Be brief."}
    folded = build_prompt(strict, TOKENIZER, [both, user("a"), user("b")])
    assert build_prompt(strict, TOKENIZER, [first, user("a"), late, user("b")]) == folded
    assert build_prompt(strict, TOKENIZER, [user("a"), late]) == build_prompt(
        strict, TOKENIZER, [{"role": "system", "content": "Late."}, user("a")])
    kept = Conversation.read(open_to_all, TOKENIZER, [first, user("a"), late])
    assert kept.render(kept.messages) == "Be brief.|a|Late.|"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_reserved_variables(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        build_prompt(ChatTemplate(TINY_TEMPLATE), TOKENIZER, [user()], None, {name: 1})
    assert caught.value.field == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ ''['__class__'].x }}",
        "{{ (messages|attr('__class__')).x }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(**{'__init__': 1}) }}",
        "{{ dict.__globals__.x }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__ }}",
        "{{ lipsum.__globals__.os }}",
        "{{ tojson }}{{ range.__self__.x }}",
        "{{ strftime_now.__code__.co_code }}",
        "{{ 2 ** 9999999 }}",
    ],
)
def test_templates_cannot_escape(source: str) -> None:
    with pytest.raises((TemplateError, RequestError)):
        ChatTemplate(source).render(normalise_messages([user()]))


@pytest.mark.parametrize(
    "name", ["raise_exception.__globals__", "dict.__globals__", "namespace().__class__", "messages.__len__"]
)
def test_private_attributes_render_as_empty(name: str) -> None:
    assert ChatTemplate("{{ " + name + " }}").render([]) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**12) %}{% endfor %}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 100000000000 }}",
        "{{ [1] * 100000000000 }}",
        "{{ 100000000000 * 'a' }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for i in range(9999) %}{{ 'a' * 1000000 }}{% endfor %}",
    ],
)
def test_runaway_templates_are_stopped(source: str) -> None:
    with pytest.raises((TemplateError, RequestError)):
        ChatTemplate(source, seconds=0.5).render([])


@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_available_under_all_names(sent: str, read: str) -> None:
    template = ChatTemplate("{% for m in messages %}" + f"{{{{ m.{read} or '-' }}}}" + "{% endfor %}")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", sent: "Because"}]
    assert build_prompt(template, TOKENIZER, messages).text == "-Because"


# Billing headers


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
