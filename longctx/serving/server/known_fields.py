"""Fields that other servers take and this one does not: which are refused, and which change no answer.

Those of OpenAI's chats and completions, vLLM, SGLang, llama.cpp and TGI that no body has. docs/serving.md shows them
all (tests/test_serving_docs.py).
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from longctx.serving.server.errors import ApiError


class Refused(NamedTuple):
    """A field that would change the answer or its form.

    Attributes:
      why: it is refused, or what is there instead.
      neutral: values that change nothing, besides null and what is empty; none are given: false does not.
    """

    why: str
    neutral: tuple[Any, ...] = ()


_NO_BEAMS = "there is no beam search"
_TEXT_ALONE = "only text goes in and out"
_NO_ADAPTERS = "there are no adapters: serve a merged checkpoint"
_TOP = "use temperature, top_k, top_p and min_p"
_REPEATS = "use repetition_penalty, presence_penalty and frequency_penalty"
_ALL_TEXT = "penalties count all tokens of a text"
_BY_THEMSELVES = "give its fields by themselves"
_NAMED = "give prompt or messages"
_LOGPROBS = "use logprobs"
_REASONING = "reasoning is in reasoning_content"
_TOKEN_IDS = "use return_token_ids"
_NOT_REPEATED = "answers do not repeat the prompt: /v1/completions has echo"
_NO_SUFFIX = "models continue a text: there is no suffix"
_NOT_SHIFTED = "prompts are not shifted: they fit, or truncate_prompt_tokens cuts them"
_MAX_TOKENS = "use max_tokens"
_NO_PLUGINS = "there are no plugins of sampling"
_NO_PROGRESS = "use stream_options, and the metrics"

OF_CHATS = (
    *("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools", "tool_choice"),
    *("parallel_tool_calls", "reasoning_effort", "modalities", "top_logprobs"),
)
OF_COMPLETIONS = ("prompt", "echo", "add_special_tokens", "parse_special")

REFUSED: Mapping[str, Refused] = {
    # OpenAI
    "audio": Refused(_TEXT_ALONE),
    "web_search_options": Refused("there is no web search"),
    "functions": Refused("give tools, their newer name"),
    "function_call": Refused("give tool_choice, its newer name", ("none", "auto")),
    "verbosity": Refused("say in a message how long answers should be", ("medium",)),
    "suffix": Refused(_NO_SUFFIX),
    "moderation": Refused("there is no moderation"),
    # of the other kind of body: completions and chats
    **dict.fromkeys(OF_CHATS, Refused("it is a field of chats")),
    **dict.fromkeys(OF_COMPLETIONS, Refused("it is a field of completions")),
    "top_logprobs": Refused("use logprobs, a number", (0,)),
    "echo": Refused(_NOT_REPEATED),
    # vLLM
    "use_beam_search": Refused(_NO_BEAMS),
    "length_penalty": Refused(_NO_BEAMS, (1,)),
    "early_stopping": Refused(_NO_BEAMS),
    "best_of": Refused("ask for n choices, and take the best", (1,)),
    "prompt_logprobs": Refused("/v1/completions with echo and logprobs returns them"),
    "chat_template": Refused("it must not come from clients: --chat-template is the server's"),
    "documents": Refused("put documents into messages"),
    "mm_processor_kwargs": Refused(_TEXT_ALONE),
    "guided_decoding_backend": Refused("grammars are llguidance's", ("auto", "guidance")),
    "guided_whitespace_pattern": Refused("white space in JSON is a blank, or a new line with up to 16 blanks"),
    "logits_processors": Refused("use logit_bias, bad_words, allowed_token_ids or a grammar"),
    "prompt_embeds": Refused(_TEXT_ALONE),
    "repetition_detection": Refused(_REPEATS),
    "thinking_token_budget": Refused(_MAX_TOKENS),
    "truncation_side": Refused("truncate_prompt_tokens keeps the last tokens", ("left",)),
    "media_io_kwargs": Refused(_TEXT_ALONE),
    "vllm_xargs": Refused(_NO_PLUGINS),
    "include_reasoning": Refused(_REASONING, (True,)),
    "return_tokens_as_token_ids": Refused(_TOKEN_IDS),
    "detokenize": Refused(_TOKEN_IDS, (True,)),
    # SGLang
    "lora_path": Refused(_NO_ADAPTERS),
    "custom_logit_processor": Refused("use logit_bias, bad_words, allowed_token_ids or a grammar"),
    "return_hidden_states": Refused("/v1/embeddings returns pooled ones"),
    "structural_tag": Refused("give tools, or a grammar"),
    "stop_regex": Refused("use stop"),
    "no_stop_trim": Refused("use include_stop_str_in_output"),
    "image_data": Refused(_TEXT_ALONE),
    "video_data": Refused(_TEXT_ALONE),
    "text": Refused(_NAMED),
    "input_ids": Refused(_NAMED),
    "sampling_params": Refused(_BY_THEMSELVES),
    "return_logprob": Refused(_LOGPROBS),
    "separate_reasoning": Refused(_REASONING, (True,)),
    "stream_reasoning": Refused(_REASONING, (True,)),
    "return_cached_tokens_details": Refused("usage has prompt_tokens_details"),
    "sampling_seed": Refused("use seed"),
    "session_params": Refused("use prompt_cache_key"),
    "custom_params": Refused(_NO_PLUGINS),
    "return_meta_info": Refused("answers have usage"),
    "return_prompt_token_ids": Refused(_TOKEN_IDS),
    "token_ids_logprob": Refused(_LOGPROBS),
    # llama.cpp
    "typical_p": Refused(_TOP, (1,)),
    "tfs_z": Refused(_TOP, (1,)),
    "top_n_sigma": Refused(_TOP, (-1, 0)),
    "mirostat": Refused(_TOP, (0,)),
    "dynatemp_range": Refused(_TOP, (0,)),
    "xtc_probability": Refused(_TOP, (0,)),
    "dry_multiplier": Refused(_REPEATS, (0,)),
    "samplers": Refused("the order of filters is that of docs/serving.md"),
    "n_probs": Refused("use logprobs", (0,)),
    "n_keep": Refused(_NOT_SHIFTED, (0, -1)),
    "n_indent": Refused("use a grammar", (0,)),
    "t_max_predict_ms": Refused(_MAX_TOKENS, (0, -1)),
    "t_max_prompt_ms": Refused("use ttft_ms", (0, -1)),
    "n_cmpl": Refused("use n", (1,)),
    "n_discard": Refused(_NOT_SHIFTED, (0,)),
    "reasoning_budget": Refused(_MAX_TOKENS, (-1,)),
    "input_prefix": Refused(_NO_SUFFIX),
    "input_suffix": Refused(_NO_SUFFIX),
    "lora": Refused(_NO_ADAPTERS),
    "reasoning_format": Refused("the chat template says how the model thinks", ("auto",)),
    "thinking_forced_open": Refused("the chat template says how the model thinks"),
    "parse_tool_calls": Refused("give tool_choice none", (True,)),
    "repeat_last_n": Refused(_ALL_TEXT, (-1,)),
    "penalize_nl": Refused(_ALL_TEXT, (True,)),
    "min_keep": Refused("filters keep at least one token", (0, 1)),
    "post_sampling_probs": Refused(_LOGPROBS),
    "return_tokens": Refused(_TOKEN_IDS),
    "response_fields": Refused("answers have all their fields"),
    "timings_per_token": Refused(_NO_PROGRESS),
    "return_progress": Refused(_NO_PROGRESS),
    # TGI
    "typical": Refused(_TOP, (1,)),
    "adapter_id": Refused(_NO_ADAPTERS),
    "top_n_tokens": Refused("use logprobs", (0,)),
    "watermark": Refused("there is no watermark"),
    "do_sample": Refused("use temperature, of which 0 is greedy", (True,)),
    "inputs": Refused(_NAMED),
    "parameters": Refused(_BY_THEMSELVES),
    "max_new_tokens": Refused(_MAX_TOKENS),
    "stop_sequences": Refused("use stop"),
    "truncate": Refused("use truncate_prompt_tokens"),
    "return_full_text": Refused(_NOT_REPEATED),
    "details": Refused(_LOGPROBS),
    "decoder_input_details": Refused("/v1/completions with echo and logprobs returns them"),
    "guideline": Refused("put it into a message"),
    "tool_prompt": Refused("the chat template says how tools are described"),
    # Transformers' names
    "max_length": Refused(_MAX_TOKENS),
    "min_new_tokens": Refused("use min_tokens"),
    "num_beams": Refused(_NO_BEAMS, (1,)),
    "epsilon_cutoff": Refused(_TOP, (0,)),
    "eta_cutoff": Refused(_TOP, (0,)),
    "top_a": Refused(_TOP, (0,)),
    "no_repeat_ngram_size": Refused(_REPEATS, (0,)),
}
"""Of bodies that have such a field of their own, that one counts."""

HARMLESS: Mapping[str, tuple[str, ...]] = {
    "billing, and names of requests": (
        *("metadata", "store", "service_tier", "safety_identifier", "request_id", "rid", "api_key"),
    ),
    "who computes it": (
        *("data_parallel_rank", "data_parallel_rank_hint", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
        *("id_slot", "slot_id", "speculative", "prediction"),
    ),
    "what is cached, which no answer depends on": (
        *("prompt_cache_options", "cache_prompt", "skip_reading_prefix_cache"),
    ),
    "special tokens have no spaces between them, where they are in the text": ("spaces_between_special_tokens",),
    "they tune what is refused": (
        *("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length"),
        *("dry_penalty_last_n", "dry_sequence_breakers"),
    ),
    "the client's own, which some send": ("drop_params", "num_retries", "extra_headers", "timeout"),
}
"""Fields that are passed over without a word, by the reason why they change neither text nor form."""

PASSED_OVER = frozenset(name for names in HARMLESS.values() for name in names)


def unknown_fields(given: Mapping[str, Any], refused: Mapping[str, Refused], harmless: Collection[str]) -> list[str]:
    """Return the names of the fields that no server is known to have.

    Args:
      given: fields of a body that it does not have by itself.
      refused, harmless: the others that are known.

    Raises:
      ApiError: one would change the answer, and is not there.
    """
    for name, value in given.items():
        if name in refused and not _is_neutral(value, refused[name].neutral):
            raise ApiError(400, f"{name} is not there: {refused[name].why}", name)
    return sorted(given.keys() - refused.keys() - set(harmless))


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    if value is None or value in ("", [], {}) or (value is False and not neutral):
        return True
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)
