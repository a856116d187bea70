"""Fields of bodies that say which form a text has to have, under the names of OpenAI, vLLM, SGLang, llama.cpp, TGI."""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from longctx.models.validation import shown
from longctx.serving.request.grammar import (
    from_choices,
    from_gbnf,
    from_json_schema,
    from_regex,
    json_object,
)

_WHITESPACE = "white space in JSON is a blank, or a new line with up to 16 blanks"
_OPTIONS = {
    "whitespace_pattern": _WHITESPACE,
    "disable_any_whitespace": _WHITESPACE,
    "disable_additional_properties": "give a schema with additionalProperties: false",
}


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)


class JsonSchema(_Part):
    """`json_schema` of `response_format`; with `strict` false, what can't be enforced is passed over."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[Any, Field(validation_alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(_Part):
    """`text`, `json_object` (any, or by `schema`) or `json_schema`."""

    type: str
    json_schema: JsonSchema | None = None
    schema_: Annotated[Any, Field(validation_alias="schema")] = None


class StructuredOutputs(_Part):
    """vLLM's: one of these."""

    json_: Annotated[Any, Field(validation_alias="json")] = None
    regex: Any = None
    choice: Any = None
    grammar: Any = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class NamedGrammar(NamedTuple):
    """A grammar, and the field that asks for it."""

    field: str
    grammar: str


class GrammarFields(BaseModel):
    """Fields of which one may say which form the text has; null is none."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None

    def named_grammar(self) -> NamedGrammar | None:
        """Return the grammar of the text; None: it may be any.

        Raises:
          ValueError: a field is wrong, or there are two; the message names them.
        """
        _check_options(self.structured_outputs)
        asked = self._asked()
        if len(asked) > 1:
            raise ValueError(f"{asked[1][0]} contradicts {asked[0][0]}: the text has one form")
        for field, make, value in asked:
            try:
                return NamedGrammar(field, make(value))
            except ValueError as error:
                raise ValueError(f"{field}: {error}") from None
        return None

    def _asked(self) -> list[tuple[str, Callable[[Any], str], Any]]:
        outputs, form = self.structured_outputs or StructuredOutputs(), self.response_format
        fields: list[tuple[str, Callable[[Any], str], Any]] = [
            ("response_format", _response_grammar, None if form is None or form.type == "text" else form),
            ("structured_outputs.json", from_json_schema, outputs.json_),
            ("structured_outputs.regex", from_regex, outputs.regex),
            ("structured_outputs.choice", from_choices, outputs.choice),
            ("structured_outputs.grammar", from_gbnf, outputs.grammar),
            ("structured_outputs.json_object", lambda _: json_object(), outputs.json_object or None),
            ("structured_outputs.structural_tag", _no_tag, outputs.structural_tag),
            ("guided_json", from_json_schema, self.guided_json),
            ("guided_regex", from_regex, self.guided_regex),
            ("guided_choice", from_choices, self.guided_choice),
            ("guided_grammar", from_gbnf, self.guided_grammar),
            ("json_schema", from_json_schema, self.json_schema),
            ("regex", from_regex, self.regex),
            ("ebnf", from_gbnf, self.ebnf),
            ("grammar", _typed_grammar, self.grammar or None),  # llama.cpp's clients send an empty text for none
        ]
        return [each for each in fields if each[2] is not None]


def _check_options(outputs: StructuredOutputs | None) -> None:
    """Raise ValueError for options of vLLM's that would change a text and are not there."""
    for name, why in _OPTIONS.items():
        if getattr(outputs, name, None):
            raise ValueError(f"structured_outputs.{name}: {why}")


def _response_grammar(form: ResponseFormat) -> str:
    if form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise ValueError("json_schema must be there, with a schema")
        return from_json_schema(form.json_schema.schema_, form.json_schema.strict is not False)
    if form.type == "json_object":
        return json_object() if form.schema_ is None else from_json_schema(form.schema_)
    raise ValueError(f"type must be text, json_object or json_schema, got {form.type[:40]!r}")


def _no_tag(_: Any) -> str:
    raise ValueError("there are no structural tags: give a grammar, or tools")


_TYPES: dict[str, Callable[[Any], str]] = {
    "json": from_json_schema,
    "json_schema": lambda value: from_json_schema(value.get("schema") if isinstance(value, dict) else value),
    "regex": from_regex,
}


def _typed_grammar(value: Any) -> str:
    """Make a grammar of llama.cpp's text, or of TGI's `{"type", "value"}`."""
    if isinstance(value, dict):
        make = _TYPES.get(value.get("type", ""))
        if make is None:
            raise ValueError(f"type must be one of {', '.join(_TYPES)}, got {shown(value.get('type'))}")
        return make(value.get("value"))
    return from_gbnf(value)
