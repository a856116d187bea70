"""Forms in which models call tools, by family: what a template can't say, and grammars of calls that have to come."""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from longctx.serving.request.grammar import WHITESPACE, from_lark
from longctx.serving.request.json_schema import enforceable
from longctx.serving.server.chat_schemas import Function

Family = Literal["hermes", "mistral", "llama3_json", "pythonic"]
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolFormat(NamedTuple):
    """Form of a call.

    Attributes:
      begin: text that begins one, or several; empty: the answer does.
      end: text that ends one; empty: the call itself does.
      key: of its arguments.
    """

    family: Family
    begin: str
    end: str = ""
    key: str = "arguments"


FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat("hermes", "<tool_call>", "</tool_call>"),  # Qwen's too
    "mistral": ToolFormat("mistral", "[TOOL_CALLS]"),
    "llama3_json": ToolFormat("llama3_json", "", key="parameters"),
    "pythonic": ToolFormat("pythonic", ""),
}
PARSERS = ("auto", *FORMATS)
PYTHON_TAG = "<|python_tag|>"
"""May stand before calls of the families that have no marker of their own."""


def find_format(parser: str, template: str | None) -> ToolFormat:
    """Return the format of a model's calls: that of a name, or with `auto` the one that its template speaks of."""
    if parser != "auto":
        return FORMATS[parser]
    text = template or ""
    if "[TOOL_CALLS]" in text:
        return FORMATS["mistral"]
    if "<tool_call>" not in text and (PYTHON_TAG in text or '"parameters"' in text):
        return FORMATS["llama3_json"]
    return FORMATS["hermes"]


def describe_tools(tools: Sequence[Function]) -> str:
    """Return a system's text about tools, for a template that does not know any; calls have the form of `hermes`."""
    listed = "\n".join(json.dumps(_described(tool), ensure_ascii=False) for tool in tools)
    return (
        "You may call functions. Their signatures are within <tools></tools>:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, answer with a JSON object of its name and arguments within <tool_call></tool_call>:\n"
        '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>'
    )


def _described(tool: Function) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude_none=True)}


def written_call(name: str, arguments: str) -> str:
    """Return a call in the form of `hermes`."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def forced_grammar(form: ToolFormat, tools: Sequence[Function], is_parallel: bool, marker: int | None) -> str:
    """Make the grammar of answers that call one of the tools, or several.

    Args:
      form: not `pythonic`.
      is_parallel: whether there may be several.
      marker: the special token that the form's beginning is; None: it is a text.
    """
    begin = _begin(form, marker)
    start = f"{begin} body" if form.begin else "body"
    if form.family == "hermes" and is_parallel:
        start += f' ("\\n" {begin} body)*'
    schemas = [_arguments(tool, tool.strict is not False) for tool in tools]
    return _grammar(f"start: {start}", form, tools, schemas, is_parallel)


def offered_grammar(form: ToolFormat, tools: Sequence[Function], is_parallel: bool, marker: int | None) -> str | None:
    """Make the grammar of texts that may call tools, in which strict ones are called by their schemas.

    Args:
      is_parallel: whether there may be several calls.
      marker: the special token that begins a call, or may; None: that is a text.

    Returns:
      None: nothing is asked of calls.

    Raises:
      ValueError: calls of this form can't be held to it.
    """
    strict = [tool.name for tool in tools if tool.strict]
    if not strict and is_parallel:
        return None
    if form.family == "pythonic":
        asked = f"{strict[0]}: strict" if strict else "parallel_tool_calls: false"
        raise ValueError(f"tools: {asked} needs tool_choice required for a model that calls tools in Python's form")
    begin = _begin(form, marker)
    if not form.begin:  # an answer that does not begin as a call does is a text
        lines = [f"start: {begin}? body | OTHER", r"OTHER: /\s*([^{\s<](.|\n)*|<([^|](.|\n)*)?)?/"]
    else:
        trigger = f"trigger: TEXT {begin}" if marker is not None else f"trigger[lazy]: TEXT {begin}"
        is_many = is_parallel and form.family == "hermes"
        lines = ["start: (trigger body)* TEXT" if is_many else r"start: TEXT | trigger body /\s*/"]
        lines += [trigger, r"TEXT: /(.|\n)*/"]
    schemas = [_arguments(tool) if tool.strict else {"type": "object"} | _GUIDANCE for tool in tools]
    return _grammar("\n".join(lines), form, tools, schemas, is_parallel)


def _begin(form: ToolFormat, marker: int | None) -> str:
    return json.dumps(form.begin or PYTHON_TAG) if marker is None else f"<[{marker}]>"


def _grammar(
    start: str, form: ToolFormat, tools: Sequence[Function], schemas: Sequence[Mapping[str, Any]], is_parallel: bool
) -> str:
    """Make a grammar whose `body` is what follows the beginning of a call, or of several in one list."""
    more = {"mistral": ' ("," " "? one)*', "llama3_json": ' (";" " "? one)*'}.get(form.family, "") * is_parallel
    inner = f"one{more}"
    body = {"mistral": f'" "? "[" {inner} "]"', "hermes": f'"\\n" {inner} "\\n" {json.dumps(form.end)}'}
    lines = [start, f"body: {body.get(form.family, inner)}"]
    lines += [f"one: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{form.key}": ')
        lines += [f'call_{number}: {head} arguments_{number} "}}"', f"arguments_{number}: %json {json.dumps(schema)}"]
    return from_lark("\n".join(lines))


_GUIDANCE = {"x-guidance": {"whitespace_pattern": WHITESPACE}}


def _arguments(tool: Function, strict: bool = True) -> dict[str, Any]:
    """Return the schema of a tool's arguments, for a grammar; ValueError: it can't be enforced, and has to be."""
    schema = tool.parameters if tool.parameters is not None else NO_ARGUMENTS
    try:
        made = enforceable({"type": "object"} | dict(schema), strict)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tools: {tool.name}: {error}") from None
    return made | {"x-guidance": _GUIDANCE["x-guidance"] | {"lenient": not strict}}


class Call(NamedTuple):
    """A call; `arguments` are JSON, as a text."""

    name: str
    arguments: str


def parse_json_calls(text: str) -> list[Call]:
    """Return the calls of a text of JSON objects, in a list or one after another.

    Raises:
      ValueError: it is none.
    """
    decoder, found, at = json.JSONDecoder(), list[Call](), 0
    text = text.strip()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except RecursionError:
            raise ValueError("too deep") from None
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, dict) or not isinstance(each.get("name"), str):
                raise ValueError("no call")
            given = each.get("arguments", each.get("parameters", {}))
            found.append(Call(each["name"], given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)))
        at = _after(text, at, ";, \n\t")
    if not found:
        raise ValueError("no call")
    return found


_NAMED = re.compile(r"\s*([\w.-]{1,128})\s*(?:\[ARGS\])?\s*(?=\{)")


def parse_mistral_calls(text: str) -> list[Call]:
    """Return the calls after `[TOOL_CALLS]`: a list of objects, or names and arguments; ValueError: there are none."""
    text = text.removeprefix("[TOOL_CALLS]").strip()
    if text.startswith(("[", "{")):
        return parse_json_calls(text)
    found = []
    for part in text.split("[TOOL_CALLS]"):
        head = _NAMED.match(part)
        if head is None:
            raise ValueError("no call")
        try:
            json.loads(part[head.end() :])
        except RecursionError:
            raise ValueError("too deep") from None
        found.append(Call(head[1], part[head.end() :].strip()))
    return found


def parse_python_calls(text: str) -> list[Call]:
    """Return the calls of a Python list of calls with keyword arguments, which are literals; ValueError: it is none."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise ValueError("no call")
        return list(_python_calls(tree))
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError(f"no call: {type(error).__name__}") from None


def _python_calls(tree: ast.List) -> Iterator[Call]:
    for each in tree.elts:
        if not isinstance(each, ast.Call) or each.args:
            raise ValueError("no call")
        arguments: dict[str, Any] = {}
        for keyword in each.keywords:
            if keyword.arg is None:
                raise ValueError("no call")
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        yield Call(ast.unparse(each.func), json.dumps(arguments, ensure_ascii=False))


PARSE: Mapping[Family, Callable[[str], list[Call]]] = {
    "hermes": parse_json_calls,
    "mistral": parse_mistral_calls,
    "llama3_json": parse_json_calls,
    "pythonic": parse_python_calls,
}


def _after(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at
