"""Calls of clients that others have written, unmodified: `client_calls.py URL KIND`, in an environment that has them.

`KIND` is `openai`, `langchain` or `instructor`. Each call has to return what its type says, whatever the model means.
"""

import sys

import openai
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=99)


ASK = "Name a person and say how old they are."
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}


def call_openai(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    messages = [{"role": "user", "content": ASK}]
    parse = getattr(client.chat.completions, "parse", None) or client.beta.chat.completions.parse
    answer = parse(model=model, messages=messages, response_format=Person, max_tokens=60)
    assert isinstance(answer.choices[0].message.parsed, Person)
    response = client.responses.parse(model=model, input=ASK, text_format=Person, max_output_tokens=60)
    assert isinstance(response.output_parsed, Person)
    chunks = client.chat.completions.create(model=model, messages=messages, max_tokens=9, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
    tools = {"tools": [tool], "tool_choice": "required"}
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=60, **tools)
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"
    assert client.embeddings.create(model=model, input="hello").data[0].embedding


def call_langchain(url: str, model: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    chat = ChatOpenAI(base_url=url, api_key="none", model=model, max_tokens=400, temperature=0, max_retries=0)
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Person, method=method).invoke(ASK), Person)
    raw = chat.with_structured_output(dict, method="json_mode").invoke(f"{ASK} Answer in JSON.")
    assert isinstance(raw, dict)  # of whatever keys: this mode has no schema

    class Weather(BaseModel):
        """The weather of a city."""

        city: str = Field(max_length=12)

    calls = chat.bind_tools([Weather], tool_choice="any").invoke("Weather in Paris?").tool_calls
    assert calls[0]["name"] == "Weather"
    assert isinstance(calls[0]["args"]["city"], str)
    assert "".join(chunk.content for chunk in chat.stream(ASK))
    embeddings = OpenAIEmbeddings(base_url=url, api_key="none", model=model, check_embedding_ctx_length=False)
    assert embeddings.embed_query("hello")


def call_instructor(url: str, model: str) -> None:
    import instructor

    class Anything(BaseModel):
        """Of any JSON object, as the mode `JSON` sends no schema that binds the model."""

    messages = [{"role": "user", "content": ASK}]
    modes = {instructor.Mode.TOOLS: Person, instructor.Mode.JSON_SCHEMA: Person, instructor.Mode.JSON: Anything}
    for mode, kind in modes.items():
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=mode)
        answer = client.chat.completions.create(
            model=model, response_model=kind, messages=messages, max_tokens=400, temperature=0, max_retries=0
        )
        assert isinstance(answer, kind)


if __name__ == "__main__":
    address, kind = sys.argv[1:]
    name = openai.OpenAI(base_url=address, api_key="none").models.list().data[0].id
    {"openai": call_openai, "langchain": call_langchain, "instructor": call_instructor}[kind](address, name)
