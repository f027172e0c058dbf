"""For the other tests of text: a vocabulary of bytes and markers, all ways to cut a text, a template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType
from typing import Any

from deltic.chat.conversation import Conversation, Messages, encode_prompt, stable_prefixes
from deltic.chat.template import ChatTemplate
from deltic.chat.tokenizer import Tokenizer
from deltic.chat.tool_parsers import CallReader
from deltic.chat.tools import QWEN, CallForm

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
EOS = 1000


class Vocabulary:
    """Ids below 256 are bytes, others are made up: markers (if `markers`), chunks of bytes, EOS."""

    def __init__(self, markers: bool = True) -> None:
        self.eos_id = EOS
        self._ids = {marker: 256 + index for index, marker in enumerate(MARKERS)} if markers else {}
        self._chunks: dict[int, bytes] = {}

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def visible_bytes(self, id: int) -> bytes:
        return b"" if id == EOS else self._chunks[id] if id in self._chunks else bytes([id])

    def chunk(self, data: bytes) -> int:
        """A token of these bytes."""
        self._chunks[2000 + len(self._chunks)] = data
        return 1999 + len(self._chunks)

    def encode(self, text: str | bytes, cuts: Sequence[int] | None = None) -> list[int]:
        """One token per byte, or per piece between the cuts; markers with an id are tokens of their own."""
        data = text.encode() if isinstance(text, str) else text
        tokens, position = [], 0
        bounds = sorted({0, len(data), *(range(len(data)) if cuts is None else cuts)})
        while position < len(data):
            marker = next((m for m in self._ids if data.startswith(m.encode(), position)), None)
            if marker:
                tokens.append(self._ids[marker])
                position += len(marker)
                continue
            end = next(bound for bound in bounds if bound > position)
            starts = [at for m in self._ids if (at := data.find(m.encode(), position)) >= 0]
            end = min([end, *starts])
            tokens.append(self.chunk(data[position:end]))
            position = end
        return tokens


def read_calls(text: str, schemas: Mapping[str, Any] = MappingProxyType({}), form: CallForm = QWEN,
               ) -> list[tuple[str, str]]:
    """Names and arguments of the calls in what stands behind the tag that opens a block."""
    reader = CallReader(form, schemas, form.block[0], 16)
    if reader.feed(text) is None:
        reader.finish()
    calls: list[tuple[str, str]] = []
    for name, arguments, _ in reader.take():
        if name is None:
            calls[-1] = calls[-1][0], calls[-1][1] + arguments
        else:
            calls.append((name, arguments))
    return calls


def splits(length: int) -> Iterator[tuple[int, ...]]:
    """All sets of cuts of a text of so many bytes."""
    inner = range(1, length)
    for count in range(length):
        yield from combinations(inner, count)


def test_splits() -> None:
    assert list(splits(3)) == [(), (1,), (2,), (1, 2)]
    assert len(set(splits(9))) == 2**8


def test_vocabulary() -> None:
    vocabulary = Vocabulary()
    tokens = vocabulary.encode("ab<think>cd", (1, 4, 10))
    assert [vocabulary.visible_bytes(token) for token in tokens if token != 256] == [b"a", b"b", b"c", b"d"]
    assert tokens[2] == 256 and 256 not in Vocabulary(markers=False).encode("<think>")


# In the manner of the family's larger models.
QWEN_LIKE = """\
{%- macro body(content) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is not none and content is not undefined %}
        {%- for part in content %}
            {%- if part.type == 'image' or 'image_url' in part %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'video' %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- else %}
                {{- raise_exception('Unexpected part.') }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}
    {{- raise_exception('No messages provided.') }}
{%- endif %}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\\n' }}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>" }}
    {%- if messages[0].role == 'system' %}
        {{- '\\n\\n' + body(messages[0].content)|trim }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + body(messages[0].content)|trim + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" %}
        {%- set text = body(message.content)|trim %}
        {%- if not (text.startswith('<tool_response>') and text.endswith('</tool_response>')) %}
            {%- set ns.searching = false %}
            {%- set ns.last = index %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if ns.searching %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for message in messages %}
    {%- set content = body(message.content)|trim %}
    {%- if message.role == "system" %}
        {%- if not loop.first %}
            {{- raise_exception('System message must be at the beginning.') }}
        {%- endif %}
    {%- elif message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if preserve_thinking or loop.index0 > ns.last %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning|trim + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- generation %}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {{- ('\\n\\n' if content else '') if loop.first else '\\n' }}
            {{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
            {%- for key, value in call.arguments|items %}
                {{- '<parameter=' + key + '>\\n' }}
                {{- value if value is string else value | tojson | safe }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {%- endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if not loop.last and loop.nextitem.role == "tool" %}
            {%- continue %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation, and its stable stable_prefixes."""

    text: str
    ids: tuple[int, ...]
    stable_prefixes: tuple[int, ...]


def build_prompt(template: ChatTemplate, tokenizer: Tokenizer, messages: Any, tools: Any = None,
                 variables: Mapping[str, Any] | None = None, *, see: Any = None) -> Prompt:
    """From a request's messages, tools and template variables to its prompt; nothing needs to be normalised before."""
    conversation = Conversation.read(template, tokenizer, messages, tools, variables, see=see)
    spelled = encode_prompt(tokenizer, conversation.render(conversation.messages))
    return Prompt(spelled.text, spelled.ids, stable_prefixes(conversation, spelled))


def stable_boundaries(template: ChatTemplate, tokenizer: Tokenizer, messages: Messages,
                      tools: Messages | None = None, **variables: Any) -> tuple[int, ...]:
    """The stable_prefixes of the plain prompt for normalised messages and tools."""
    conversation = Conversation(template, tokenizer, messages, tools, variables)
    return stable_prefixes(conversation, encode_prompt(tokenizer, conversation.render(messages)))
