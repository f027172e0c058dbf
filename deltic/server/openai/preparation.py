"""From OpenAI's requests to jobs. A chat request is also what the requests of other wires are translated to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from deltic.chat.infill import Infill
from deltic.chat.processor import PreparedRequest, prompt_bound
from deltic.chat.tool_grammar import AnswerForm, ToolChoice
from deltic.errors import RequestError, of_prompt
from deltic.params import Prompt, SamplingParams
from deltic.server.content import ContentReader
from deltic.server.openai.formatting import PromptEcho
from deltic.server.openai.schema import ChatRequest, CompletionRequest, SamplingFields
from deltic.server.parts import CHAT, check_within
from deltic.server.records import salt_of
from deltic.server.served_model import ServedModel


def chat_job(served: ServedModel, body: ChatRequest, translated: bool = False) -> PreparedRequest:
    """The next turn of a conversation. Renders and encodes it: for a thread. translated: the request came in another
    wire's form, whose fields have been looked at. RequestError names the field that is wrong."""
    body.refuse_unsupported()
    processor = _roomy(served, body).processor.of(salt_of(served.owner, body.salt))
    tools = body.shown_tools()
    reader = ContentReader(processor.sees, processor.fetches, served.text_of)
    messages = reader.messages(body.checked_messages())
    body.ignored.extend(reader.ignored)
    job = processor.chat(messages, body.sampling(served.limits), tools=tools, history=body.history,
                         variables=_understood(body, partial(processor.knows, tools=tools)),
                         thinking_budget=body.thinking_budget, pictures=served.pictures, answer=AnswerForm(
                             ToolChoice.read(body.tool_choice, body.parallel_tool_calls is not False),
                             body.output_format()))
    job = _cut(served, body, job)
    _check_scores(served, [job])
    if not translated:
        check_within(body, CHAT, partial(processor.reads, tools=tools))
    return _told(job, body)


def _understood(body: ChatRequest, knows: Callable[[str], bool]) -> dict[str, Any]:
    """The variables for a template. An effort that it does not know is named as ignored, or turns thinking off; so is a
    verbosity."""
    variables = body.variables()
    if "verbosity" in variables and not knows("verbosity") and variables.pop("verbosity") != "medium":
        body.ignored.append("verbosity")
    effort = variables.get("reasoning_effort")
    if effort is not None and not knows("reasoning_effort"):
        del variables["reasoning_effort"]
        if effort == "none" and knows("enable_thinking"):
            variables.setdefault("enable_thinking", False)
        else:
            body.ignored.append("reasoning_effort")
    if variables.get("documents") and not knows("documents"):
        raise RequestError("the chat template knows no documents: put them into a message", "documents")
    return variables


def text_jobs(served: ServedModel, body: CompletionRequest) -> tuple[list[PreparedRequest], PromptEcho]:
    """A job for each prompt, and what stands before its answers."""
    body.refuse_unsupported()
    sampling, prompts = body.sampling(served.limits), body.prompts()
    wanted, infill = body.output_format(), None
    if body.suffix:
        infill = Infill.of(served.llm.chat_processor.tokenizer.added)
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *infill.ends))
    jobs = list[PreparedRequest]()
    for place, prompt in enumerate(prompts):
        with of_prompt(f"prompt[{place}]") if len(prompts) > 1 else nullcontext():
            job = _roomy(served, body).complete(_infilled(served, prompt, infill, body), sampling, wanted,
                                                body.add_special_tokens)
            jobs.append(_told(_cut(served, body, job), body))
            if len(prompts) > 1:  # else the engine itself says what is wrong
                served.llm.engine.keys_of(jobs[-1].request)
    _check_scores(served, jobs)
    if not body.echo:
        return jobs, PromptEcho([job.request.ids for job in jobs])
    cut = body.truncate_prompt_tokens is not None
    texts = [served.text(job.request.ids if cut else prompt) for job, prompt in zip(jobs, prompts, strict=True)]
    echo = PromptEcho([job.request.ids for job in jobs], texts, body.n or 1, body.echoes_scores)
    if sum(map(len, texts)) * echo.choices > served.limits.max_body_mib << 20:
        raise RequestError(f"echo would repeat more than {served.limits.max_body_mib} MiB (max_body_mib): ask for "
                           "fewer answers, or leave it out", "echo")
    return jobs, echo


def _infilled(served: ServedModel, prompt: str | list[int], infill: Infill | None, body: CompletionRequest
              ) -> str | list[int]:
    """The prompt, or with a suffix the ids that ask for what comes between them, behind what its tokenizer puts before
    a raw prompt."""
    if infill is None or body.suffix is None:
        return prompt
    tokenizer, bound = served.llm.chat_processor.tokenizer, prompt_bound(served.llm.engine.max_context, served.limits)
    behind = tokenizer.encode(body.suffix, bound=bound)
    if not isinstance(prompt, str):
        return infill.ids(prompt, behind)
    before, _ = tokenizer.around if body.add_special_tokens is not False else ([], [])
    ids = tokenizer.encode(prompt, bound=bound)
    return [*before, *infill.ids(ids[len(before):] if ids[:len(before)] == before else ids, behind)]


def _roomy(served: ServedModel, body: ChatRequest | CompletionRequest) -> ServedModel:
    """The model, for prompts of any length where these will be cut."""
    return served if body.truncate_prompt_tokens is None else replace(served, bounded=False)


def _cut(served: ServedModel, body: ChatRequest | CompletionRequest, job: PreparedRequest) -> PreparedRequest:
    """The job with the last tokens of its prompt, as many as are wanted; -1: as leave room for the answer."""
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return job
    room = served.llm.engine.max_context - 1
    answer = job.request.output.max_tokens if isinstance(job.request.output, SamplingParams) else None
    keep = min(wanted, room) if wanted > 0 else max(room + 1 - max(answer or 1, 1), 1)
    if len(job.request.prompt) <= keep:
        return job
    if isinstance(job.request.prompt, Prompt):
        raise RequestError("truncate_prompt_tokens cannot cut a prompt with pictures: leave some out",
                           "truncate_prompt_tokens")
    return replace(
        job, request=replace(job.request, prompt=job.request.prompt[-keep:], stable_prefixes=()), remember=None
    )


def _check_scores(served: ServedModel, jobs: list[PreparedRequest]) -> None:
    """RequestError if more probabilities of the prompts' tokens are wanted than an answer may hold."""
    values, most = 0, served.limits.max_answer_values
    for request in (job.request for job in jobs):
        wanted = request.output.prompt_logprobs if isinstance(request.output, SamplingParams) else None
        values += 0 if wanted is None else len(request.prompt) * (wanted + 1) * request.choices
    if values > most:
        raise RequestError(f"prompt_logprobs, or echo with logprobs, ask for {values} probabilities, and an answer may "
                           f"have {most} (max_answer_values): ask for less, or shorten the prompt", "prompt_logprobs")


def _told(job: PreparedRequest, body: SamplingFields) -> PreparedRequest:
    """The job with the fields that concern the engine only: speculation and cache salt."""
    return replace(job, request=replace(job.request, speculate=body.speculate is not False, cache_salt=body.salt))
