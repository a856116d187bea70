"""`/v1/completions` with the official client: every option, streaming and not. Letters say which tokens came."""

from typing import Any

import openai
import pytest
from fake_device import EOS, expected_tokens
from letter_tokenizer import LetterTokenizer
from served import NAME, Served

from longctx.models.tokenizer import TokenBytes
from longctx.serving import SamplingParams

TEXT = LetterTokenizer()
PROMPT = "5ABCDEF6"
IDS = TEXT.encode(PROMPT)


def greedy(count: int = 6, prompt: list[int] | None = None) -> list[int]:
    """What the fake devices answer; ends are ignored."""
    return expected_tokens(prompt or IDS, SamplingParams(max_tokens=count, ignore_eos=True))


def ask(letters: Served, prompt: Any = PROMPT, max_tokens: int | None = 6, **options: Any) -> openai.types.Completion:
    extra = {"ignore_eos": True, "return_token_ids": True} | options.pop("extra_body", {})
    options = {"temperature": 0} | options
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    return letters.openai().completions.create(model=NAME, prompt=prompt, extra_body=extra, **options)


def streamed(chunks: Any) -> tuple[dict[int, str], dict[int, str], list[Any]]:
    """The texts and finish reasons of the choices of a stream, and its chunks."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    listed = list(chunks)
    for chunk in listed:
        for choice in chunk.choices:
            assert choice.index not in reasons, "a choice goes on after its end"
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, listed


def test_tokens_are_those_of_the_engine(letters: Served) -> None:
    answer = ask(letters)
    (choice,) = answer.choices
    assert choice.token_ids == greedy()
    assert choice.text == TEXT.decode(greedy())
    assert choice.finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.model == NAME
    assert answer.usage.prompt_tokens == len(IDS)
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == len(IDS) + 6


@pytest.mark.parametrize("prompts", [["ABCD", PROMPT, "11"], [TEXT.encode("ABCD"), IDS, TEXT.encode("11")]])
@pytest.mark.parametrize(("n", "stream"), [(1, False), (2, True)])
def test_lists_of_prompts_have_numbered_choices(letters: Served, prompts: list[Any], n: int, stream: bool) -> None:
    expected = [TEXT.decode(greedy(6, TEXT.encode(text))) for text in ("ABCD", PROMPT, "11") for _ in range(n)]
    answer = ask(letters, prompts, n=n, stream=stream)
    if stream:
        texts, reasons, _ = streamed(answer)
        assert [texts[i] for i in range(3 * n)] == expected
        assert reasons == dict.fromkeys(range(3 * n), "length")
    else:
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == list(range(3 * n))
        assert answer.usage.completion_tokens == 18 * n
        assert answer.usage.prompt_tokens == 4 + len(IDS) + 2


def test_max_tokens_is_16_by_default(letters: Served) -> None:
    assert len(ask(letters, max_tokens=None).choices[0].token_ids) == 16


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_is_no_part_of_it(letters: Served, stream: bool) -> None:
    text = TEXT.decode(greedy(12))
    stop = text[5:7]
    answer = ask(letters, max_tokens=12, stop=stop if stream else [stop, "no such text"], stream=stream)
    if stream:
        texts, reasons, _ = streamed(answer)
        assert (texts[0], reasons[0]) == (text[: text.index(stop)], "stop")
    else:
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[: text.index(stop)], "stop")


def test_the_end_token_stops_unless_it_is_ignored(letters: Served) -> None:
    prompt = next(
        ids
        for ids in ([a, b] for a in range(1, 50) for b in range(1, 50))
        if EOS in expected_tokens(ids, SamplingParams(max_tokens=6))
    )
    ending = ask(letters, prompt, extra_body={"ignore_eos": False}).choices[0]
    assert ending.finish_reason == "stop"
    assert ending.token_ids == expected_tokens(prompt, SamplingParams(max_tokens=6), eos=EOS)
    assert ask(letters, prompt).choices[0].token_ids == greedy(6, prompt)


def test_a_seed_decides(letters: Served) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=5, ignore_eos=True)
    assert ask(letters, temperature=1, seed=5).choices[0].token_ids == expected_tokens(IDS, params)
    assert (
        ask(letters, temperature=1, seed=-3).choices[0].token_ids
        == ask(letters, temperature=1, seed=-3).choices[0].token_ids
    )


def test_n_draws_differ(letters: Served) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=5, n=3, ignore_eos=True)
    choices = ask(letters, temperature=1, seed=5, n=3).choices
    assert [choice.token_ids for choice in choices] == [expected_tokens(IDS, params, i) for i in range(3)]


@pytest.mark.parametrize(
    "options", [{"top_p": 0.5}, {"n": 3, "top_p": 0.0}, {"extra_body": {"top_k": 4, "min_p": 0.1}}]
)
def test_temperature_0_is_greedy_whatever_comes_with_it(letters: Served, options: dict[str, Any]) -> None:
    choices = ask(letters, **options).choices
    assert [choice.token_ids for choice in choices] == [greedy()] * options.get("n", 1)


@pytest.mark.parametrize("top_k", [-1, 0])
def test_options_that_keep_all_tokens_change_nothing(letters: Served, top_k: int) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=5, ignore_eos=True)
    extra = {"top_k": top_k, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 1}
    answer = ask(letters, temperature=1, seed=5, top_p=1, frequency_penalty=0, presence_penalty=0, extra_body=extra)
    assert answer.choices[0].token_ids == expected_tokens(IDS, params)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_the_answer(letters: Served, stream: bool) -> None:
    answer = ask(letters, [IDS, IDS[:3]], echo=True, stream=stream)
    expected = {0: PROMPT + TEXT.decode(greedy()), 1: PROMPT[:3] + TEXT.decode(greedy(6, IDS[:3]))}
    if stream:
        assert streamed(answer)[0] == expected
    else:
        assert {choice.index: choice.text for choice in answer.choices} == expected


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_lists_that_go_together(letters: Served, stream: bool) -> None:
    answer = ask(letters, logprobs=3, stream=stream)
    if stream:
        lists = [chunk.choices[0].logprobs for chunk in streamed(answer)[2]]
        tokens = [token for each in lists for token in each.tokens]
        offsets = [offset for each in lists for offset in each.text_offset]
        numbers = [number for each in lists for number in each.token_logprobs]
    else:
        lists = answer.choices[0].logprobs
        tokens, offsets, numbers = lists.tokens, lists.text_offset, lists.token_logprobs
        assert all(1 <= len(top) <= 4 for top in lists.top_logprobs)
    assert "".join(tokens) == TEXT.decode(greedy())
    assert offsets == list(range(6))
    assert numbers == [0.0] * 6  # of fake devices


def test_echo_with_logprobs_has_those_of_the_prompt(letters: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="echo must come with stream: false, or without logprobs"):
        ask(letters, logprobs=1, echo=True, stream=True)
    choice = ask(letters, logprobs=1, echo=True).choices[0]
    assert choice.text == PROMPT + TEXT.decode(greedy())
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs == [None, *[0.0] * (len(IDS) + 5)]
    assert choice.logprobs.text_offset == list(range(len(IDS) + 6))


def test_offsets_are_those_of_a_text_without_its_first_token(letters: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token such as <bos> has a name among the tokens, and none in the text."""
    of = TokenBytes.of
    monkeypatch.setattr(TokenBytes, "of", lambda self, token: b"<end>" if token == EOS else of(self, token))
    choice = ask(letters, [EOS, *IDS], logprobs=1, echo=True).choices[0]
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs.tokens[0] == "<end>"
    pairs = list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))
    assert pairs[0] == ("<end>", 0)
    assert all(choice.text[offset:].startswith(token) for token, offset in pairs[1:])


def test_a_prompt_may_be_scored_without_an_answer(letters: Served) -> None:
    answer = ask(letters, max_tokens=0, logprobs=0, echo=True)
    assert answer.choices[0].text == PROMPT
    assert len(answer.choices[0].logprobs.tokens) == len(IDS)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0


def test_usage_comes_with_the_last_chunk_alone(letters: Served) -> None:
    _, _, chunks = streamed(ask(letters, stream=True, stream_options={"include_usage": True}))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (len(IDS), 6)


def test_usage_may_come_with_every_chunk(letters: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, _, chunks = streamed(ask(letters, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 6


def test_a_stream_without_options_has_no_usage(letters: Served) -> None:
    with letters.http_client() as client:
        body = {"model": NAME, "prompt": PROMPT, "max_tokens": 3, "stream": True}
        text = client.post("/v1/completions", json=body).text
    assert '"usage"' not in text
    assert text.endswith("data: [DONE]\n\n")


def test_cached_tokens_are_reported(letters: Served) -> None:
    prompt = "cached" * 6
    assert ask(letters, prompt).usage.prompt_tokens_details.cached_tokens == 0
    assert ask(letters, prompt).usage.prompt_tokens_details.cached_tokens >= 32


def test_a_cache_salt_isolates(letters: Served) -> None:
    prompt = "salted" * 6

    def cached(salt: str | None) -> int:
        extra = {} if salt is None else {"cache_salt": salt}
        return ask(letters, prompt, extra_body=extra).usage.prompt_tokens_details.cached_tokens

    assert [cached("a"), cached("b"), cached(None)] == [0, 0, 0]
    assert min(cached("a"), cached("b"), cached(None)) >= 32


def test_a_prompt_cache_key_is_a_conversation_and_hurts_nobody(letters: Served) -> None:
    """Its next turn finds the last, partial page too; what doesn't go on like it is served as well."""
    first = ask(letters, "turns" * 3, extra_body={"prompt_cache_key": "one"})
    tokens = TEXT.encode("turns" * 3) + first.choices[0].token_ids
    turn = ask(letters, [*tokens, 1, 2], extra_body={"prompt_cache_key": "one"})
    assert turn.choices[0].token_ids == greedy(6, [*tokens, 1, 2])
    assert turn.usage.prompt_tokens_details.cached_tokens == len(tokens) - 1
    assert ask(letters, PROMPT, extra_body={"prompt_cache_key": "one"}).choices[0].token_ids == greedy()


ENDS = {"ignore_eos": False}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"extra_body": {"min_tokens": 200}}, "min_tokens"),
        ({"extra_body": {"response_format": {"type": "json"}}}, "response_format"),
        ({"extra_body": {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}}, "response_format"),
        ({"extra_body": {"guided_json": {"type": "nonsense"}, **ENDS}}, "guided_json"),
        ({"extra_body": {"guided_regex": "[a-", **ENDS}}, "guided_regex"),
        ({"extra_body": {"guided_choice": []}}, "guided_choice"),
        ({"extra_body": {"grammar": "root ::= ("}}, "grammar"),
        ({"extra_body": {"structured_outputs": {"structural_tag": "{}"}}}, "structured_outputs"),
        ({"extra_body": {"guided_regex": "a", "regex": "b"}}, "regex"),
        ({"extra_body": {"guided_regex": "a+", "ignore_eos": True}}, "ignore_eos"),
        ({"extra_body": {"typical_p": 0.5}}, "typical_p"),
        ({"extra_body": {"length_penalty": 2.0}}, "length_penalty"),
        ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"extra_body": {"allowed_token_ids": []}}, "allowed_token_ids"),
        ({"extra_body": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens"),
        ({"extra_body": {"repeat_penalty": 1.5, "repetition_penalty": 1.2}}, None),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logprobs": 6}, "logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 33}, "stop"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 7, "temperature": 1}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"stream_options": {"include_usage": True}}, None),
        ({"max_tokens": 0}, None),
        ({"max_tokens": 300}, None),
        ({"prompt": []}, "prompt"),
        ({"prompt": [50]}, "prompt"),
    ],
)
def test_what_is_not_there_is_refused_by_name(letters: Served, options: dict[str, Any], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(letters, **options)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param == param
    assert (param or "") in caught.value.message


def test_a_trivial_best_of_and_other_fields_are_taken(letters: Served) -> None:
    extra = {"best_of": 1, "suffix": "", "no_stop_trim": False, "skip_special_tokens": True, "user": "u", "top_k": -1}
    assert ask(letters, user="somebody", extra_body=extra).choices[0].token_ids == greedy()


def test_load_tools_give_both_names_of_the_most_tokens(letters: Served) -> None:
    with letters.http_client() as client:
        for fields, count in (({"max_completion_tokens": 3}, 3), ({"max_completion_tokens": 4, "max_tokens": 4}, 4)):
            answer = client.post("/v1/completions", json={"prompt": "ABCD", "ignore_eos": True} | fields)
            assert answer.json()["usage"]["completion_tokens"] == count
        wrong = client.post("/v1/completions", json={"prompt": "A", "max_completion_tokens": 4, "max_tokens": 5})
        assert (wrong.status_code, "contradict" in wrong.json()["error"]["message"]) == (400, True)


def test_what_can_never_fit_says_so_with_the_numbers(letters: Served) -> None:
    with pytest.raises(openai.BadRequestError, match=r"8 \+ 400 tokens, more than the 256") as caught:
        ask(letters, max_tokens=400)
    assert caught.value.code == "context_length_exceeded"


def test_other_models_are_not_found(letters: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        letters.openai().completions.create(model="gpt", prompt="1")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_has_the_tokens_of_each_prompt_once(letters: Served, echo: bool) -> None:
    whole = ask(letters, [PROMPT, "11"], echo=echo, n=2)
    texts, _, chunks = streamed(ask(letters, [PROMPT, "11"], echo=echo, n=2, stream=True))
    assert texts == {choice.index: choice.text for choice in whole.choices}
    given = [
        (choice.index, choice.prompt_token_ids)
        for chunk in chunks
        for choice in chunk.choices
        if "prompt_token_ids" in choice.model_extra
    ]
    assert sorted(given) == [(choice.index, choice.prompt_token_ids) for choice in whole.choices]
