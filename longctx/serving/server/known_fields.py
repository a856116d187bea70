"""Fields that other servers take and this one does not: which are refused, and which change no answer.

Those of OpenAI's chats and completions, vLLM, SGLang, llama.cpp and TGI that no body has. docs/serving.md shows them
all (tests/test_serving_docs.py).
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from longctx.serving.server.errors import ApiError


class Refused(NamedTuple):
    """A field that would change the answer.

    Attributes:
      why: it is refused, or what is there instead.
      neutral: values that change nothing, besides null, false and what is empty.
    """

    why: str
    neutral: tuple[Any, ...] = ()


_NO_BEAMS = "there is no beam search"
_TEXT_ALONE = "only text goes in and out"
_NO_ADAPTERS = "there are no adapters: serve a merged checkpoint"
_TOP = "use temperature, top_k, top_p and min_p"
_REPEATS = "use repetition_penalty, presence_penalty and frequency_penalty"

REFUSED: Mapping[str, Refused] = {
    # OpenAI
    "audio": Refused(_TEXT_ALONE),
    "web_search_options": Refused("there is no web search"),
    "functions": Refused("give tools, their newer name"),
    "function_call": Refused("give tool_choice, its newer name", ("none", "auto")),
    "verbosity": Refused("say in a message how long answers should be", ("medium",)),
    "suffix": Refused("models continue a text: there is no suffix"),
    # vLLM
    "use_beam_search": Refused(_NO_BEAMS),
    "length_penalty": Refused(_NO_BEAMS, (1, 1.0)),
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
    "thinking_token_budget": Refused("use max_tokens"),
    # SGLang
    "lora_path": Refused(_NO_ADAPTERS),
    "custom_logit_processor": Refused("use logit_bias, bad_words, allowed_token_ids or a grammar"),
    "return_hidden_states": Refused("/v1/embeddings returns pooled ones"),
    "structural_tag": Refused("give tools, or a grammar"),
    "stop_regex": Refused("use stop"),
    "no_stop_trim": Refused("use include_stop_str_in_output"),
    "image_data": Refused(_TEXT_ALONE),
    "video_data": Refused(_TEXT_ALONE),
    # llama.cpp
    "typical_p": Refused(_TOP, (1, 1.0)),
    "tfs_z": Refused(_TOP, (1, 1.0)),
    "top_n_sigma": Refused(_TOP, (-1, -1.0, 0, 0.0)),
    "mirostat": Refused(_TOP, (0,)),
    "dynatemp_range": Refused(_TOP, (0, 0.0)),
    "xtc_probability": Refused(_TOP, (0, 0.0)),
    "dry_multiplier": Refused(_REPEATS, (0, 0.0)),
    "samplers": Refused("the order of filters is that of docs/serving.md"),
    "n_probs": Refused("use logprobs", (0,)),
    "n_keep": Refused("prompts are not shifted: they fit, or truncate_prompt_tokens cuts them", (0, -1)),
    "n_indent": Refused("use a grammar", (0,)),
    "t_max_predict_ms": Refused("use max_tokens", (0, -1)),
    "lora": Refused(_NO_ADAPTERS),
    "reasoning_format": Refused("the server's --reasoning-parser says it", ("auto",)),
    # TGI
    "typical": Refused(_TOP, (1, 1.0)),
    "adapter_id": Refused(_NO_ADAPTERS),
    "top_n_tokens": Refused("use logprobs", (0,)),
    "watermark": Refused("there is no watermark"),
    "do_sample": Refused("use temperature", (True,)),
    "guideline": Refused("put it into a message"),
    # Transformers' names
    "num_beams": Refused(_NO_BEAMS, (1,)),
    "epsilon_cutoff": Refused(_TOP, (0, 0.0)),
    "eta_cutoff": Refused(_TOP, (0, 0.0)),
    "top_a": Refused(_TOP, (0, 0.0)),
    "no_repeat_ngram_size": Refused(_REPEATS, (0,)),
}
"""Of bodies that have such a field of their own, that one counts."""

HARMLESS = frozenset({
    # OpenAI: billing, storing and hints
    "metadata", "store", "service_tier", "safety_identifier", "prediction", "prompt_cache_retention",
    "prompt_cache_options", "moderation",
    # vLLM
    "request_id", "add_special_tokens", "spaces_between_special_tokens", "detokenize", "include_reasoning",
    "vllm_xargs",
    "return_tokens_as_token_ids", "output_kind", "data_parallel_rank", "skip_reading_prefix_cache", "echo",
    "chat_template_content_format",
    # SGLang
    "rid", "return_logprob", "separate_reasoning", "stream_reasoning", "bootstrap_host", "bootstrap_port",
    "bootstrap_room", "data_parallel_rank_hint", "return_cached_tokens_details",
    # llama.cpp
    "cache_prompt", "id_slot", "timings_per_token", "return_tokens", "post_sampling_probs", "slot_id", "min_keep",
    "repeat_last_n", "penalize_nl", "response_fields", "return_progress", "mirostat_tau", "mirostat_eta",
    "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "parse_tool_calls", "thinking_forced_open", "api_key", "speculative",
    # TGI
    "details", "decoder_input_details", "return_full_text", "best_of_details",
    # of LiteLLM, LangChain and others
    "drop_params", "num_retries", "extra_headers", "timeout",
})  # fmt: skip
"""Fields that change no text: they are passed over without a word."""


def unknown_fields(given: Mapping[str, Any], known: Iterable[str] = ()) -> list[str]:
    """Return the names of the fields that no server is known to have.

    Args:
      given: fields of a body that it does not have by itself.
      known: of other bodies.

    Raises:
      ApiError: one would change the answer, and is not there.
    """
    for name, refused in REFUSED.items():
        if name in given and name not in known and not _is_neutral(given[name], refused.neutral):
            raise ApiError(400, f"{name} is not there: {refused.why}", name)
    return sorted(set(given) - set(REFUSED) - HARMLESS - set(known))


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    if value is None or value is False or value in ("", [], {}):
        return True
    return any(value == each and type(value) in (type(each), int, float) for each in neutral)
