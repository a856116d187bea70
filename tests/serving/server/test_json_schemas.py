"""JSON schemas of requests: what can't be enforced is refused by name, and what is enforced gives only valid texts."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.json_schemas import STOPS, TOKENIZER, Follower, draw, problem_of
from longctx.serving.request.grammar import Grammars, from_json_schema
from longctx.serving.server.chat_schemas import Function
from longctx.serving.server.structured import GrammarFields
from longctx.serving.server.tool_calls import FORMATS, forced_grammar, offered_grammar

GRAMMARS = Grammars(TOKENIZER, TOKENIZER.vocab_size, STOPS)
DRAFT_7, DRAFT_4 = "http://json-schema.org/draft-07/schema#", "http://json-schema.org/draft-04/schema"


def matcher(schema: Any, strict: bool | None = None) -> Any:
    """Return a matcher of a schema, as a server makes it of a request's body."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": strict}}
    named = GrammarFields.model_validate({"response_format": form}).named_grammar()
    assert named is not None
    return GRAMMARS.matcher(named.grammar)


def takes(schema: Any, text: str) -> bool:
    made = matcher(schema)
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    return made.try_consume_tokens(tokens) == len(tokens) and bool(made.is_accepting())


MAP = {"type": "object", "additionalProperties": {"type": "integer"}}
UNENFORCED: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "not": {"not": {"type": "string"}},
    "contains": {"contains": {"type": "integer"}},
    "if": {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 2}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "oneOf": {"oneOf": [{"minimum": 1}, {"multipleOf": 3}]},
    "nonsense": {"type": "string", "format": "nonsense"},  # a format
    # The rest a grammar would pass over.
    "dependentSchemas": {"$schema": DRAFT_7, "type": "object", "dependentSchemas": {"a": False}},
    "prefixItems at #/properties/x": {"$schema": DRAFT_7, "properties": {"x": {"prefixItems": [{}]}}},
    "then at #/anyOf/1": {"$schema": DRAFT_4, "anyOf": [{"type": "null"}, {"then": False}]},
    "contains at #/k/0/a~1b": {"$schema": DRAFT_4, "items": {"$ref": "#/k/0/a~1b"}, "k": [{"a/b": {"contains": {}}}]},
    "divisibleBy at #/items": {"type": "array", "items": {"divisibleBy": 2}},
    "draft 3": {"$schema": "http://json-schema.org/draft-03/schema#", "type": "string"},
    "minProperties 2 at #": MAP | {"minProperties": 2},
    "minProperties 3 at #/items": {"items": MAP | {"minProperties": 3.0}, "type": "array"},
}


@pytest.mark.parametrize("name", UNENFORCED)
def test_what_can_t_be_enforced_is_refused_by_name_unless_strict_is_false(name: str) -> None:
    schema = UNENFORCED[name]
    for strict in (None, True):
        with pytest.raises(ValueError, match=re.escape(name)):
            matcher(schema, strict)
    assert matcher(schema, strict=False)


def forced(tool: Function) -> str:
    return forced_grammar(FORMATS["hermes"], [tool], True, None)


def offered(tool: Function) -> str:
    made = offered_grammar(FORMATS["hermes"], [tool], True, None)
    assert made is not None
    return made


@pytest.mark.parametrize("name", ["uniqueItems", "not", "oneOf", "minProperties 2 at #"])
@pytest.mark.parametrize("make", [forced, offered])
def test_so_it_is_in_arguments_of_tools(name: str, make: Callable[[Function], str]) -> None:
    parameters = {"properties": {"a": UNENFORCED[name]}}
    tool = Function.model_validate({"name": "look", "parameters": parameters, "strict": True})
    with pytest.raises(ValueError, match=f"^tools: look: {name}" if " at " in name else name):
        GRAMMARS.matcher(make(tool))
    assert GRAMMARS.matcher(forced(tool.model_copy(update={"strict": False})))


def test_strict_false_enforces_the_rest() -> None:
    made = matcher({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, strict=False)
    assert not Follower(made).takes(["a"])
    assert Follower(made).takes([1, 1])


ENFORCED: list[dict[str, Any]] = [
    {"properties": {"if": {"type": "string"}, "contains": {"type": "null"}}},  # names of properties
    {"const": {"dependentRequired": 1}, "$schema": DRAFT_7},
    {"default": {"prefixItems": 1}, "type": "object", "$schema": DRAFT_7},
    {"enum": [{"format": "date"}, {"minProperties": 5}]},
    MAP | {"minProperties": 1},
    MAP | {"properties": {"a": {}, "b": {}}, "required": ["a", "b"], "minProperties": 3},
    {"type": ["string", "null"], "minProperties": 3},
    {"type": "array", "maxItems": 2.0, "items": {"maxLength": 3.0, "maxProperties": 0.0}, "uniqueItems": False},
    {"$ref": "#/$defs/none", "$defs": {"none": {"type": "null"}}},
    {"definitions": {"a": {"$ref": "#/definitions/a/x/9"}}, "type": "null"},
]


@pytest.mark.parametrize("schema", ENFORCED, ids=json.dumps)
def test_other_uses_of_these_words_are_no_keywords(schema: dict[str, Any]) -> None:
    before = json.dumps(schema)
    assert matcher(schema)
    assert json.dumps(schema) == before


@pytest.mark.parametrize("schema", [{"x": {1, 2}}, {"x": object()}], ids=["set", "object"])
def test_what_is_no_json_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match="must be JSON"):
        from_json_schema(schema)


def test_a_circle_is_refused() -> None:
    circle: dict[str, Any] = {}
    circle["items"] = circle
    with pytest.raises(ValueError, match="ircular"):
        from_json_schema(circle)


FORMATTED = {
    "date": (["2024-02-29", "2000-02-29", "2023-02-28", "2023-10-31", "2023-12-05"], ["2023-02-29", "1900-02-29"]),
    "date-time": (
        ["2024-02-29T10:00:59Z", "2023-01-01t00:00:00.5+01:00"],
        ["2023-02-29T10:00:00Z", "2023-01-01T00:00:60Z"],
    ),
    "time": (["10:00:59Z"], ["10:00:60Z", "10:00"]),
    "hostname": (["a", "ab.cd", "a-b.abc", "a--b.example-x.org"], ["xn--a", "x.ab--c", "a." * 127 + "a", "a_b"]),
}


@pytest.mark.parametrize("name", FORMATTED)
def test_formats_are_no_wider_than_parsers(name: str) -> None:
    valid, invalid = FORMATTED[name]
    for schema in ({"type": "string", "format": name}, {"format": name, "allOf": [{"minLength": 1}]}):
        assert [text for text in valid if not takes(schema, json.dumps(text))] == []
        assert [text for text in invalid if takes(schema, json.dumps(text))] == []
    assert takes({"format": name}, "5")


TEXTS: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 5},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "pattern": "^[a-c]{2,3}-[0-9]+$", "maxLength": 8},
    {"format": "date", "type": "string"},
    {"format": "date-time", "type": "string"},
    {"format": "uuid", "type": "string"},
    {"format": "ipv4", "type": "string"},
    {"enum": ["a", 1, None, 2.5, {"b": [1]}]},
    {"const": 'x "y"\n'},
]
NUMBERS: list[dict[str, Any]] = [
    {"type": "integer", "minimum": -3, "maximum": 40},
    {"type": "number", "exclusiveMinimum": 0.5, "maximum": 2},
    {"type": "integer", "multipleOf": 7},
    {"type": "number", "multipleOf": 0.25, "minimum": 0},
]


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.dictionaries(st.sampled_from(["a", "bc", "é", 'd"']), values, max_size=3)
    return st.builds(
        lambda given, required, more, reference: {
            "type": "object",
            "properties": given | ({"ref": {"$ref": "#/$defs/leaf"}} if reference else {}),
            "required": [name for name in given if name in required],
            "additionalProperties": more,
        },
        names,
        st.sets(st.sampled_from(["a", "bc", "é"])),
        st.one_of(st.just(False), values),
        st.booleans(),
    )


SCHEMAS = st.recursive(
    st.sampled_from([*TEXTS, *NUMBERS, {"type": "boolean"}, {"type": ["null", "integer"]}]),
    lambda inner: st.one_of(
        objects(inner),
        st.builds(
            lambda items, least: {"type": "array", "items": items, "minItems": least, "maxItems": 3},
            inner,
            st.integers(0, 2),
        ),
        st.builds(lambda *items: {"prefixItems": list(items), "items": False, "type": "array"}, inner, inner),
        st.builds(lambda *ways: {"anyOf": list(ways)}, inner, inner),
        st.builds(lambda first: {"allOf": [first, {"type": ["object", "array", "string", "integer"]}]}, inner),
    ),
    max_leaves=6,
)


@given(SCHEMAS, st.integers(0, 2**31))
@settings(max_examples=80)
def test_texts_of_a_drawn_schema_are_valid(schema: dict[str, Any], seed: int) -> None:
    whole = schema | {"$defs": {"leaf": {"type": "integer", "minimum": 5}}}
    jsonschema.Draft202012Validator.check_schema(whole)
    try:
        made = matcher(whole)
    except ValueError as error:
        if "Unsatisfiable" in str(error):  # `allOf` contradicts what it is of
            return
        raise
    for number in range(3):
        text = draw(made, seed + number, free=random.Random(seed).choice((0, 20, 60)), limit=1500)
        if text is not None:
            assert problem_of(text, whole) is None, text
