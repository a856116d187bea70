"""Grammars and other masks of tokens: every completion follows its own, in any plan, and others are as without them."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from fake_device import EOS, LENGTH, MODEL, VOCAB, FakeExecutor, next_token
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.models import load_checkpoint, load_tokenizer
from longctx.models.builtin import TINY
from longctx.serving import Engine, EngineConfig, ParallelPlan, Request, SamplingParams
from longctx.serving.engine.input_processor import InputProcessor
from longctx.serving.kv_cache.prefix import PageHash
from longctx.serving.request.grammar import (
    MAX_GRAMMAR_BYTES,
    Grammars,
    from_choices,
    from_gbnf,
    from_json_schema,
    from_lark,
    from_regex,
    json_object,
)
from longctx.serving.request.handoff import Handoff
from longctx.serving.request.output import Output
from longctx.serving.request.token_mask import TokenMask, mask_words

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LETTERS = [*"abcdefg", "", *"hijklmnopqrstuvwxyz0123456789 ,.-:;!?()[]{}"][:VOCAB]  # none of `EOS`


class Letters:
    """A tokenizer of the fake devices: a letter is a token, and `EOS` ends a text."""

    vocab_size, bos_id, eos_ids = VOCAB, None, (EOS,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(LETTERS[id] for id in ids if id != EOS)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        raise ValueError("there is no template")


def expected(prompt: list[int], params: SamplingParams, seed: int) -> list[int]:
    """Tokens of one sequence, whose masks are computed one after another from all tokens before."""
    grammars = Grammars(Letters(), VOCAB, (EOS,))
    matcher = None if params.grammar is None else grammars.matcher(params.grammar)
    words = [Letters().encode(form) for word in params.bad_words for form in (word, f" {word}")]
    stops = () if params.ignore_eos else (EOS,)
    mask, tokens, row = (
        TokenMask(params, VOCAB, stops, matcher, words),
        list(prompt),
        np.zeros(mask_words(VOCAB), np.int32),
    )
    while len(tokens) < len(prompt) + params.max_tokens:
        mask.fill(row, len(tokens) - len(prompt))
        token = next_token(np.array(tokens), seed if params.temperature else 0, 0, 0, row)
        tokens.append(token)
        mask.push(token)
        if (token == EOS and not params.ignore_eos) or mask.is_complete:
            break
    return tokens[len(prompt) :]


MASKED: list[dict[str, Any]] = [
    {"grammar": from_regex("[a-f]{4,30}")},
    {"grammar": from_choices(["yes", "no, never", "nothing"])},
    {"grammar": from_lark('start: item ("," item)*\nitem: /[x-z]{2}/ | "(" start ")"')},
    {"allowed_token_ids": (1, 5, 9, 31, 32, VOCAB - 1)},
    {"bad_words": ("a", "be", "cde"), "ignore_eos": True},
    {"min_tokens": 12},
    {"min_tokens": 3, "bad_words": ("q",), "allowed_token_ids": tuple(range(20))},
]
PLANS = [ParallelPlan(), ParallelPlan(stage=2), ParallelPlan(stage=3), ParallelPlan(context=2), ParallelPlan(2, 2)]


def fake_engine(plan: ParallelPlan, **options: Any) -> Engine:
    chosen: dict[str, Any] = {"max_running": 6, "token_budget": 16, "hash_key": bytes(16), "chunking": "static"}
    config = EngineConfig(page_size=4, **{"num_pages": 64} | chosen | options)
    executor = FakeExecutor(config, plan, config.num_pages or 0)
    return Engine(MODEL, None, config, tokenizer=Letters(), plan=plan, executor=executor, clock=executor.clock)


@pytest.mark.parametrize("run_ahead", [1, 2, 4])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_all_follow_their_masks_in_any_plan(plan: ParallelPlan, run_ahead: int) -> None:
    """Masked ones beside others, which get the tokens that they get alone."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, VOCAB, length).tolist() for length in draw.integers(1, 60, 24)]
    sampling = []
    for i in range(len(prompts)):
        more = MASKED[i % len(MASKED)] if i % 3 else {}
        sampling.append(SamplingParams(max_tokens=20 + i, temperature=float(i % 2), seed=i, **more))
    outputs = fake_engine(plan, run_ahead=run_ahead).generate(prompts, sampling)
    for prompt, params, output in zip(prompts, sampling, outputs, strict=True):
        assert output.finish_reason in ("stop", "length"), output.error
        assert output.token_ids == expected(prompt, params, output.seed), params


def test_masks_survive_preemption() -> None:
    engine = fake_engine(ParallelPlan(), admission="optimistic", num_pages=24)
    prompts = [[i + 1] * 20 for i in range(6)]
    sampling = [SamplingParams(max_tokens=40, temperature=1.0, seed=i, **MASKED[i % 3 * 2]) for i in range(6)]
    outputs = engine.generate(prompts, sampling)
    assert engine.stats().preemptions > 0
    for prompt, params, output in zip(prompts, sampling, outputs, strict=True):
        assert output.token_ids == expected(prompt, params, output.seed)


def test_completions_of_one_request_have_masks_of_their_own() -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, n=4, grammar=from_regex("[a-f]{4,30}"))
    outputs = fake_engine(ParallelPlan()).generate([[1, 2, 3]], params)
    assert len({tuple(each.token_ids) for each in outputs}) == 4
    assert all(re.fullmatch("[a-f]{4,30}", each.text) for each in outputs)


def resumed(engine: Engine, request: Request, fields: dict[str, Any]) -> Output:
    """The output of a request that another engine has begun."""
    engine.submit(request, None, Handoff.from_dict(fields))
    while True:
        for event in engine.step():
            if event.output is not None:
                return event.output


@pytest.mark.parametrize("more", MASKED, ids=lambda more: "+".join(more))
def test_another_engine_goes_on_at_any_token(more: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=5, **more)
    [whole] = fake_engine(ParallelPlan()).generate([[3, 1, 4]], params)
    for count in range(len(whole.token_ids)):
        engine = fake_engine(ParallelPlan())
        fields = {"seed": 5, "completions": [{"lease": None, "length": 0, "tokens": whole.token_ids[:count]}]}
        output = resumed(engine, Request([3, 1, 4], params), fields)
        assert (output.token_ids, output.finish_reason) == (whole.token_ids, whole.finish_reason)


def test_tokens_of_a_handoff_that_break_the_grammar_are_an_error() -> None:
    params = SamplingParams(max_tokens=16, grammar=from_regex("[a-f]{4,30}"))
    fields = {"seed": 5, "completions": [{"lease": None, "length": 0, "tokens": [20, 21]}]}
    output = resumed(fake_engine(ParallelPlan()), Request([3, 1, 4], params), fields)
    assert output.finish_reason == "error"
    assert "can't follow its grammar" in (output.error or "")


# Real devices.


@pytest.fixture(scope="module")
def engine() -> Engine:
    model, params = load_checkpoint(TINY)
    config = EngineConfig(num_pages=200, page_size=16, max_running=8, max_length=512, token_budget=64, buckets=(8, 64))
    return Engine(model, params, config, tokenizer=load_tokenizer(TINY))


def test_json_by_schema(engine: Engine) -> None:
    grammar = from_json_schema(PERSON)
    sampling = [
        SamplingParams(max_tokens=90, temperature=t, seed=s, grammar=grammar) for s, t in enumerate((0, 1.0, 2.0))
    ]
    outputs = engine.generate(["Hello", "Who?", "The grass"], sampling)
    for output in outputs:
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), PERSON)


def test_others_are_as_without_masked_ones(engine: Engine) -> None:
    plain = SamplingParams(max_tokens=24, temperature=1.0, seed=7, logprobs=2)
    alone = engine.generate(["The sky is"], plain)[0]
    masked = SamplingParams(max_tokens=24, temperature=1.0, grammar=json_object(), seed=1)
    beside = engine.generate(["The sky is", "x", "y"], [plain, masked, masked])[0]
    assert beside.token_ids == alone.token_ids
    assert beside.logprobs == alone.logprobs


def test_log_probabilities_are_those_before_the_mask(engine: Engine) -> None:
    free = engine.generate(["The sky is"], SamplingParams(max_tokens=1, logprobs=3))[0]
    assert free.logprobs is not None
    likeliest = free.logprobs[0].top[0][0]
    others = tuple(token for token in range(engine.model.config.vocab_size) if token != likeliest)
    masked = engine.generate(["The sky is"], SamplingParams(max_tokens=1, logprobs=3, allowed_token_ids=others))[0]
    assert masked.logprobs is not None
    assert masked.logprobs[0].top == free.logprobs[0].top
    assert masked.token_ids == [free.logprobs[0].top[1][0]]


def test_nothing_is_compiled_after_warm_up(engine: Engine) -> None:
    engine.warm_up()
    before = engine.stats()
    import jax

    with jax.log_compiles():
        seen: list[str] = []

        def note(name: str, *_: Any, **__: Any) -> None:
            seen.append(name)

        jax.monitoring.register_event_duration_secs_listener(note)
        engine.generate(["a", "b"], SamplingParams(max_tokens=12, grammar=json_object(), logprobs=1))
        engine.generate(["a", "b"], SamplingParams(max_tokens=12, grammar=json_object(), temperature=1.0))
    assert not [name for name in seen if "backend_compile" in name]
    assert engine.stats().steps > before.steps


# Grammars themselves.


def an_object(given: dict[str, Any]) -> dict[str, Any]:
    """A schema of objects with these properties, all of them."""
    return {"type": "object", "properties": given, "required": sorted(given), "additionalProperties": False}


LEAVES: list[dict[str, Any]] = [
    {"type": "integer"},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["a", 1, None]},
    {"const": "x y"},
]
schemas = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner, "maxItems": st.integers(0, 2)}),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(an_object),
    ),
    max_leaves=5,
)


@given(schemas, st.integers(0, 2**31 - 1))
@settings(max_examples=60)
def test_random_texts_under_a_mask_are_valid(schema: dict[str, Any], seed: int) -> None:
    tokenizer, draw = load_tokenizer(TINY), np.random.default_rng(seed)
    vocab_size, stops = tokenizer.vocab_size, tuple(tokenizer.eos_ids)
    params = SamplingParams(max_tokens=400, grammar=from_json_schema(schema))
    assert params.grammar is not None
    mask = TokenMask(params, vocab_size, stops, Grammars(tokenizer, vocab_size, stops).matcher(params.grammar))
    tokens, row = list[int](), np.zeros(mask_words(vocab_size), np.int32)
    while not mask.is_complete and len(tokens) < 400:
        mask.fill(row, len(tokens))
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        assert allowed.size
        assert allowed.max() < vocab_size
        ends = [token for token in allowed if token in stops]
        token = int(ends[0] if ends else draw.choice(allowed))
        mask.push(token)
        if token in stops:
            break
        tokens.append(token)
    assert mask.problem is None
    if len(tokens) < 400:
        jsonschema.validate(json.loads(tokenizer.decode(tokens)), schema)


WRONG = {
    "[a-": from_regex,
    "start: missing": from_lark,
    "root ::= (": from_gbnf,
    'root ::= "a" missing': from_gbnf,
    "root ::= root": from_gbnf,
    '{"$ref": "#"}': from_json_schema,
    '{"type": "strin': from_json_schema,
    '{"type": "nonsense"}': from_json_schema,
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_grammar_is_an_early_error(text: str) -> None:
    grammars = Grammars(Letters(), VOCAB, (EOS,))
    with pytest.raises(ValueError, match=r"grammar|schema"):
        grammars.matcher(WRONG[text](text))


@pytest.mark.parametrize("value", [5, [], "", None, "5"], ids=repr)
def test_what_is_no_schema_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="JSON schema must be"):
        from_json_schema(value)


def test_grammars_are_bounded_and_kept() -> None:
    grammars = Grammars(Letters(), VOCAB, (EOS,))
    with pytest.raises(ValueError, match="at most 1,048,576 bytes"):
        grammars.matcher(from_choices(["a" * MAX_GRAMMAR_BYTES]))
    for number in range(80):
        grammars.matcher(from_regex(f"a{{{number}}}b"))
    assert from_regex("a{79}b") in grammars
    assert from_regex("a{2}b") not in grammars
    deep: Any = {"type": "string"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ValueError, match=r"grammar|schema"):
        grammars.matcher(from_json_schema(json.dumps(deep)))


def test_a_processor_travels_without_what_it_has_compiled() -> None:
    import pickle

    config = EngineConfig(page_size=4)
    processor = InputProcessor(MODEL.config, config, LENGTH, Letters(), PageHash(bytes(16), 4))
    request = Request([1, 2], SamplingParams(grammar=from_regex("a+b")))
    processor.prepare(request)
    twin = pickle.loads(pickle.dumps(processor))
    assert from_regex("a+b") not in twin.grammars
    assert twin.prepare(request).prepared_for == processor.fingerprint


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grammar": ""}, "grammar must be a text that is not empty"),
        ({"grammar": "x", "ignore_eos": True}, "ignore_eos contradicts grammar"),
        ({"grammar": "x", "allowed_token_ids": (1,)}, "allowed_token_ids contradicts grammar"),
        ({"allowed_token_ids": ()}, "allowed_token_ids must be token ids in a tuple, not empty"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"bad_words": ("",)}, "bad_words must be texts in a tuple, none of them empty"),
        ({"bad_words": "no"}, "bad_words must be texts in a tuple"),
        ({"min_tokens": 17}, "min_tokens must be at most max_tokens=16, got 17"),
    ],
    ids=str,
)
def test_parameters_that_may_not_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)
