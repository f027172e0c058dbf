"""From OpenAI's requests to jobs. A chat request is also what the requests of other wires are translated to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from deltic.errors import RequestError, of_prompt
from deltic.server.content import ContentReader
from deltic.server.openai.schema import ChatRequest, CompletionRequest
from deltic.server.openai.shapes import Echo
from deltic.server.parts import CHAT, check_within
from deltic.server.served_model import ServedModel
from deltic.text.call_grammar import AnswerForm, ToolChoice
from deltic.text.chat_processor import Job
from deltic.types import SamplingParams


def chat_job(served: ServedModel, body: ChatRequest, translated: bool = False) -> Job:
    """The next turn of a conversation. Renders and encodes it: for a thread. translated: the request came in another
    wire's form, whose fields have been looked at. RequestError names the field that is wrong."""
    body.refuse_unsupported()
    processor, tools = served.llm.chat_processor, body.shown_tools()
    reader = ContentReader(processor.sees, served.limits)
    messages = reader.messages(body.checked_messages())
    body.ignored.extend(reader.ignored)
    job = processor.chat(messages, body.sampling(served.limits), tools=tools, history=body.history,
                         variables=_understood(body, partial(processor.knows, tools=tools)),
                         thinking_budget=body.thinking_budget, pictures=served.pictures, answer=AnswerForm(
                             ToolChoice.read(body.tool_choice, body.parallel_tool_calls is not False),
                             body.output_format()))
    _check_scores(served, [job])
    if not translated:
        check_within(body, CHAT, partial(processor.reads, tools=tools))
    return _speculating(job, body.speculate)


def _understood(body: ChatRequest, knows: Callable[[str], bool]) -> dict[str, Any]:
    """The variables for a template. An effort that it does not know is named as ignored, or turns thinking off."""
    variables = body.variables()
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


def text_jobs(served: ServedModel, body: CompletionRequest) -> tuple[list[Job], Echo]:
    """A job for each prompt, and what stands before its answers."""
    body.refuse_unsupported()
    sampling, prompts = body.sampling(served.limits), body.prompts()
    wanted = body.output_format()
    jobs = list[Job]()
    for place, prompt in enumerate(prompts):
        with of_prompt(f"prompt[{place}]") if len(prompts) > 1 else nullcontext():
            jobs.append(_speculating(served.complete(prompt, sampling, wanted), body.speculate))
            if len(prompts) > 1:  # else the engine itself says what is wrong
                served.llm.engine.keys_of(jobs[-1].request)
    _check_scores(served, jobs)
    if not body.echo:
        return jobs, Echo([job.request.ids for job in jobs])
    texts = [served.text(prompt) for prompt in prompts]
    echo = Echo([job.request.ids for job in jobs], texts, body.n or 1, body.echoes_scores)
    if sum(map(len, texts)) * echo.choices > served.limits.max_body_mib << 20:
        raise RequestError(f"echo would repeat more than {served.limits.max_body_mib} MiB (max_body_mib): ask for "
                           "fewer answers, or leave it out", "echo")
    return jobs, echo


def _check_scores(served: ServedModel, jobs: list[Job]) -> None:
    """RequestError if more probabilities of the prompts' tokens are wanted than an answer may hold."""
    values, most = 0, served.limits.max_answer_values
    for request in (job.request for job in jobs):
        wanted = request.output.prompt_logprobs if isinstance(request.output, SamplingParams) else None
        values += 0 if wanted is None else len(request.prompt) * (wanted + 1) * request.choices
    if values > most:
        raise RequestError(f"prompt_logprobs, or echo with logprobs, ask for {values} probabilities, and an answer may "
                           f"have {most} (max_answer_values): ask for less, or shorten the prompt", "prompt_logprobs")


def _speculating(job: Job, wanted: bool | None) -> Job:
    """The job, for which tokens may be drafted unless that is not wanted."""
    return job if wanted is not False else replace(job, request=replace(job.request, speculate=False))
