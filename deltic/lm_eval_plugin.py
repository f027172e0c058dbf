"""Registers the model `deltic` for lm-evaluation-harness (`lm_eval`). It runs in the same process.

    python -m deltic.lm_eval_plugin run --model deltic --model_args model=DIR,memory=4GiB --tasks lambada_openai

Importing this module registers the model. It takes the arguments of `deltic.LLM`, `add_bos_token` and `max_gen_toks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import lm_eval.models  # noqa: F401  # registers lm_eval's own models first
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from deltic.chat.tokenizer import Tokenizer
from deltic.llm import LLM
from deltic.params import PARAMETERS, SamplingParams

_SCORE = SamplingParams(max_tokens=0, prompt_logprobs=1)

Pair = tuple[Any, Sequence[int], Sequence[int]]
"""(request, tokens of the context, tokens of the continuation)."""


@register_model("deltic")
class DelticLM(TemplateLM):  # type: ignore[misc]
    """lm_eval's interface to an `LLM`.

    add_bos_token: add the tokenizer's special tokens to each text; None: the same as True.
    max_gen_toks: maximum tokens of an answer if the task sets no limit.
    """

    def __init__(self, model: str | None = None, pretrained: str | None = None, add_bos_token: bool | None = None,
                 max_gen_toks: int = 256, batch_size: Any = None, max_batch_size: Any = None, device: Any = None,
                 **options: Any) -> None:
        super().__init__()
        more = {} if device is None else {"device": device}
        self.llm = LLM(model or pretrained, **more, **options)
        self._add_special, self._max_tokens = add_bos_token is not False, int(max_gen_toks)

    @property
    def eot_token_id(self) -> int:
        ends = self._words.ends
        return ends[0] if ends else 0

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text without context."""
        before = self._words.around[0]
        bos = self._words.bos_id
        return before[0] if before else self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.llm.runtime.name).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._words.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        variables = {"add_generation_prompt": True} if add_generation_prompt else {"continue_final_message": True}
        job = self.llm.chat_processor.chat(chat_history, variables=variables)
        prompt = job.request.prompt
        assert isinstance(prompt, tuple)
        return self._words.decode(prompt, skip_special=False)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        special = self._add_special if add_special_tokens is None else add_special_tokens
        return self._words.encode(string, add_special=special)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        windows, owners = list[Pair](), list[int]()
        for index, request in enumerate(requests):
            text, = request.args
            for window in get_rolling_token_windows(token_list=self.tok_encode(text, add_special_tokens=False),
                                                    prefix_token=self.prefix_token_id,
                                                    max_seq_len=self._room - 1, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(index)
        found = [0.0] * len(requests)
        for index, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            found[index] += logprob
        for request, logprob in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, logprob)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        prompts, sampling = list[list[int]](), list[SamplingParams]()
        for request in requests:
            text, wanted = request.args
            params = self._params(wanted)
            prompts.append(self.tok_encode(text)[-max(1, self._room - (params.max_tokens or 0)):])
            sampling.append(params)
        texts = [output.sound().text for output in self.llm.generate(prompts, sampling)] if prompts else []
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _loglikelihood_tokens(self, requests: Iterable[Pair], **_: Any) -> list[tuple[float, bool]]:
        pairs = [(asked, [*context, *continuation][-self._room:], len(continuation))
                 for asked, context, continuation in requests]
        found = list[tuple[float, bool]]()
        outputs = self.llm.generate([ids for _, ids, _ in pairs], _SCORE) if pairs else []
        for (asked, _ids, length), output in zip(pairs, outputs, strict=True):
            scores = output.sound().choices[0].prompt_logprobs or ()
            last = scores[-length:] if length else ()
            found.append((sum(score.token for score in last), all(score.rank == 1 for score in last)))
            if asked is not None:
                self.cache_hook.add_partial("loglikelihood", asked, found[-1])
        return found

    def _params(self, wanted: dict[str, Any]) -> SamplingParams:
        """Returns the sampling parameters of a task's arguments; greedy unless `do_sample` is set."""
        stops = wanted.get("until") or ()
        most = wanted.get("max_gen_toks", wanted.get("max_tokens", self._max_tokens))
        drawn: dict[str, Any] = {"temperature": 0.0}
        if wanted.get("do_sample"):
            shared = [name for name, parameter in PARAMETERS.items() if parameter.shared]
            drawn |= {name: wanted[name] for name in shared if name in wanted}
        return SamplingParams(**drawn, max_tokens=int(most), stop=tuple([stops] if isinstance(stops, str) else stops))

    @property
    def _words(self) -> Tokenizer:
        return self.llm.chat_processor.tokenizer

    @property
    def _room(self) -> int:
        """Maximum number of tokens in a prompt."""
        return self.llm.engine.max_context - 1


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
