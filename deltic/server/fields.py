"""Fields of requests that other servers and their clients know: what is made of them here.

Nothing is ignored in silence: the answer has a header that names what was, and the log a line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

IGNORED_HEADER = "x-deltic-ignored"
"""Names the fields of a request that had no effect."""

Honour = Callable[[Any], Mapping[str, Any]]
"""Fields of ours that say the same as a value of another server's; none if it has none."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer in a way that is not there. neutral: values that ask for nothing."""

    neutral: tuple[Any, ...] = ()


def _as(name: str) -> Honour:
    return lambda value: {name: value}


def _think(value: Any) -> Mapping[str, Any]:
    """Ollama: true, false, or an effort."""
    return {"reasoning_effort": value} if isinstance(value, str) else {"enable_thinking": value}


def _reasoning(value: Any) -> Mapping[str, Any]:
    """OpenRouter: an object."""
    if not isinstance(value, dict):
        return {}
    exclude = value.get("exclude")
    return {"reasoning_effort": value.get("effort"), "thinking_budget": value.get("max_tokens"),
            "enable_thinking": value.get("enabled"), "include_reasoning": None if exclude is None else not exclude}


def _thinking(value: Any) -> Mapping[str, Any]:
    """DeepSeek, Z.ai: an object with a type; litellm's and others' have Anthropic's budget, too."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return {}
    return {"enable_thinking": kind != "disabled", "thinking_budget": value.get("budget_tokens")}


def _format(value: Any) -> Mapping[str, Any]:
    """Ollama: a schema, or `json`."""
    return {"response_format": {"type": "json_object"}} if value == "json" else _schema(value or None)


def _schema(value: Any) -> Mapping[str, Any]:
    """Ollama, llama.cpp: a schema that is kept as far as it can be."""
    return {"response_format": None if value is None else {"type": "json_schema", "schema": value}}


def _grammar(value: Any) -> Mapping[str, Any]:
    """llama.cpp, SGLang: a text; text-generation-inference: an object with a type."""
    return {"response_format": value} if isinstance(value, dict) else {"guided_grammar": value}


def _output_format(value: Any) -> Mapping[str, Any]:
    """Anthropic's former name of a part of `output_config`."""
    return {"output_config": {"format": value}}


def _usage(value: Any) -> Mapping[str, Any]:
    """OpenRouter: an object."""
    return {"stream_options": {"include_usage": True}} if isinstance(value, dict) and value.get("include") else {}


def _do_sample(value: Any) -> Mapping[str, Any]:
    """transformers, text-generation-inference: whether to draw."""
    return {"temperature": 0.0} if value is False else {}


_HONOURED: Mapping[str, Honour] = {
    "n_predict": _as("max_tokens"), "num_predict": _as("max_tokens"), "max_new_tokens": _as("max_tokens"),
    "min_new_tokens": _as("min_tokens"), "repeat_penalty": _as("repetition_penalty"), "think": _think,
    "reasoning": _reasoning, "thinking": _thinking, "usage": _usage, "stop_sequences": _as("stop"),
    "grammar": _grammar, "grammar_string": _grammar, "ebnf": _as("guided_grammar"), "regex": _as("guided_regex"),
    "regex_pattern": _as("guided_regex"), "json_schema": _schema, "format": _format,
    "output_format": _output_format, "do_sample": _do_sample, "thinking_token_budget": _as("thinking_budget"),
    "thinking_budget_tokens": _as("thinking_budget"), "reasoning_budget": _as("thinking_budget"), "n_cmpl": _as("n"),
    "output_dimension": _as("dimensions"), "truncation": _as("truncate"), "return_text": _as("return_documents"),
    "instruct": _as("instruction"), "embedding_type": _as("encoding_format"),
}

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("grammar", "grammar_string", "ebnf", "regex", "regex_pattern", "format"), ("",)),
    "json_schema": ("", {}), "stop_sequences": ([],),
    **dict.fromkeys(("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget"), (-1,)),
    "backend_sampling": (False,), "return_routed_experts": (False,),
    "reasoning_control": (False,), "embedding_type": ("float",), "n_cmpl": (1,), "speculative.n_max": (-1,)}
"""Values of such fields, and of ignored ones, that ask for nothing."""

_REFUSED: Mapping[str, Refused] = {
    "grammar_lazy": Refused((False,)), "best_of": Refused((1,)), "echo": Refused((False,)),
    "stop_regex": Refused(("", [])),
    "custom_params": Refused(({},)), "suffix": Refused(("",)), "adaptive_target": Refused((-1, 0)),
    "repetition_detection": Refused(), "output_dtype": Refused(("float",)), "embedding_types": Refused((["float"],)),
    "late_chunking": Refused((False,)), "raw_scores": Refused((False,)), "truncation_direction": Refused(("Right",)),
    "use_beam_search": Refused((False,)), "logits_processors": Refused(([],)),
    "custom_logit_processor": Refused(("",)), "lora_path": Refused(("",)), "lora": Refused(([],)),
    "allowed_token_ids": Refused(([],)), "bad_words": Refused(([],)), "input_embeds": Refused(([],)),
    "prompt_embeds": Refused(), "session_params": Refused(({},)), "image_data": Refused(([],)),
    "return_hidden_states": Refused((False,)), "include_stop_str_in_output": Refused((False,)),
    "no_stop_trim": Refused((False,)), "mcp_servers": Refused(([],)), "chat_template": Refused(),
    "truncate_prompt_tokens": Refused((-1,)), "watermark": Refused((False,)),
    # other ways to choose tokens, by the values that switch them off
    "mirostat": Refused((0,)), "mirostat_mode": Refused((0,)), "dry_multiplier": Refused((0,)),
    "xtc_probability": Refused((0,)), "dynatemp_range": Refused((0,)), "dynamic_temperature": Refused((False,)),
    "typical_p": Refused((1,)), "typ_p": Refused((1,)), "tfs_z": Refused((1,)), "tfs": Refused((1,)),
    "top_a": Refused((0,)), "top_n_sigma": Refused((-1, 0)), "nsigma": Refused((0,)), "min_keep": Refused((0, 1)),
    "epsilon_cutoff": Refused((0,)), "eta_cutoff": Refused((0,)), "smoothing_factor": Refused((0,)),
    "penalty_alpha": Refused((0,)), "no_repeat_ngram_size": Refused((0,)),
    "encoder_repetition_penalty": Refused((1,)), "guidance_scale": Refused((1,)),
    # other ways to end an answer
    "n_indent": Refused((0,)), "t_max_predict_ms": Refused((0,)),
}

_IGNORED: Mapping[str, str] = {
    "vLLM, SGLang":
        "add_special_tokens skip_special_tokens spaces_between_special_tokens return_tokens_as_token_ids "
        "return_token_ids length_penalty early_stopping priority request_id mm_processor_kwargs "
        "kv_transfer_params vllm_xargs guided_decoding_backend guided_whitespace_pattern "
        "separate_reasoning stream_reasoning rid bootstrap_host bootstrap_port "
        "bootstrap_room data_parallel_rank return_cached_tokens_details return_prompt_text media_io_kwargs extra_key "
        "return_routed_experts images_config use_audio_in_video max_dynamic_patch min_dynamic_patch",
    "llama.cpp":
        "cache_prompt id_slot slot_id n_keep n_discard samplers sampler_seq penalize_nl penalty_prompt repeat_last_n "
        "dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers dynatemp_exponent mirostat_tau "
        "mirostat_eta xtc_threshold n_probs timings_per_token return_progress return_tokens post_sampling_probs "
        "response_fields reasoning_format parse_tool_calls thinking_forced_open backend_sampling "
        "grammar_triggers preserved_tokens chat_format generation_prompt reasoning_in_content reasoning_control "
        "n_cache_reuse adaptive_decay sse_ping_interval speculative.n_max speculative.n_min speculative.p_min",
    "Text generation web UI, KoboldCpp, Aphrodite":
        "dynatemp_low dynatemp_high dynatemp_min dynatemp_max smoothing_curve temperature_last sampler_priority "
        "sampler_order repetition_penalty_range rep_pen_range",
    "Ollama, text-generation-inference":
        "keep_alive options raw num_ctx num_batch num_gpu num_thread num_keep use_mmap details "
        "decoder_input_details",
    "OpenRouter, LibreChat, Open WebUI, litellm":
        "provider models route transforms plugins session_id conversation_id message_id chat_id promptPrefix "
        "modelLabel chatGptLabel resendFiles imageDetail maxContextTokens spec iconURL greeting endpoint "
        "background_tasks features variables tool_ids files model_item drop_params caching litellm_metadata tags "
        "litellm_session_id prediction_id extra_headers custom_llm_provider extra_body",
    "Anthropic, OpenAI":
        "container inference_geo speed diagnostics context_management betas anthropic_beta user_profile_id "
        "workspace_id cache_control client_metadata prompt_cache_options access_programs background_options compaction "
        "billing_policy fallbacks fallback_credit_token",
}
_NAMES = frozenset(name for names in _IGNORED.values() for name in names.split())


def asks_nothing(name: str, value: Any) -> bool:
    """Whether a value of another server's field is the one that switches it off."""
    return value is None or any(value == each and type(value) is type(each) for each in _NEUTRAL.get(name, ()))


def known(name: str, value: Any) -> Mapping[str, Any] | Refused | None:
    """What a field of another server is here: fields of ours, none if it is ignored; None if nobody knows it."""
    if name in _HONOURED:
        return _HONOURED[name](value)
    if name in _REFUSED:
        return _REFUSED[name]
    return {} if name in _NAMES else None
