"""Chat templates that nobody vouches for: whatever they do ends, in bounded time and memory, by a ValueError."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import ITIMER_REAL, SIGALRM, SIGKILL, setitimer, signal
from types import FrameType
from typing import Any

import pytest

from longctx.models import chat_template
from longctx.models.chat_template import ChatTemplate

# As in meta-llama/Llama-3.1-8B-Instruct, without its built-in tools.
LLAMA_31 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
            + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# As in HuggingFaceTB/SmolLM2-135M-Instruct.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A macro that calls itself and a namespace, as templates that describe tools have them.
MACROS = """{%- macro describe(schema, depth=0) -%}
    {%- for name, value in schema.items() -%}
        {{- '  ' * depth + name + ': ' -}}
        {%- if value is mapping -%}{{- '\\n' + describe(value, depth + 1) -}}
        {%- else -%}{{- value ~ '\\n' -}}{%- endif -%}
    {%- endfor -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1, tools='') -%}
{%- for tool in tools or [] -%}{%- set ns.tools = ns.tools + describe(tool) -%}{%- endfor -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- ns.tools + messages[ns.last].content }}{% call(x) wrap() %}[{{ x }}]{% endcall %}""".replace(
    "{%- set ns = ", "{%- macro wrap() -%}{{ caller('end') }}{%- endmacro -%}{%- set ns = "
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"city": "string"}}}
CALL = {"function": {"name": "weather", "arguments": {"city": "Zürich"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is it warm? 🦙"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "21 degrees"},
]
FILE = Path("somewhere/chat_template.jinja")


def render(template: str, messages: list[dict[str, Any]] = MESSAGES, **variables: Any) -> str:
    return ChatTemplate(FILE, template).render(messages, True, {"bos_token": "<s>"}, **variables)


def test_templates_of_published_models_render() -> None:
    text = render(LLAMA_31, tools=[TOOL])
    assert text.startswith("<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\nBe brief.")
    assert '"name": "weather",\n        "parameters": {\n            "city": "string"' in text
    assert '{"name": "weather", "parameters": {"city": "Zürich"}}<|eot_id|>' in text
    assert '"21 degrees"<|eot_id|><|start_header_id|>assistant' in text
    assert render(SMOLLM2, MESSAGES[1:2]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nIs it warm? 🦙<|im_end|>\n<|im_start|>assistant\n"
    )
    described = "type: function\nfunction: \n  name: weather\n  parameters: \n    city: string\n"
    assert render(MACROS, tools=[TOOL]) == f"{described}Is it warm? 🦙[end]"


ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}" + "{% endfor %}" * 3,
    "{{ 1 | round(10 ** 8, 'ceil') }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% for row in [1] | slice(10 ** 10) %}{% endfor %}",
    "{{ lipsum(n=10 ** 6) }}",
]
LARGE = [
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10000000000, 1) }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ [1] * 10 ** 10 }}",
    "{{ 'a'.ljust(10 ** 10) }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ 'a\n' | indent(10 ** 10, true) }}",
    "{{ messages | tojson(indent=10 ** 10) }}",
    "{{ [1] | batch(10 ** 10, 0) | list }}",
    "{{ '\t'.expandtabs(10 ** 10) }}",
    "{% set ns = namespace(s='ab') %}{% for _ in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='ab') %}{% for _ in range(99) %}{% set ns.s = ns.s.replace('a', ns.s) %}{% endfor %}",
    "{% for a in range(1000) %}{% for b in range(1000) %}{{ 'some text' }}{% endfor %}{% endfor %}",
]
WRONG = [
    "{% for %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "{% if x %}" * 5000,
    "{{ '%s' % () }}",
    "{{ {}.x.y }}",
    "{{ 1 // 0 }}",
    "{{ [] | first | int(base=99) }}",
    "{{ raise_exception('a' * 100000) }}",
    "{{ strftime_now(3) }}",
    "{% include 'x' %}",
    "{{ messages | map('nothing') | list }}",
    "{{ '\ud800' }}{{ nothing() }}",
]


@pytest.mark.parametrize("template", [*ENDLESS, *LARGE, *WRONG])
def test_hostile_templates_end_and_are_named(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a large one is its output, memory or time, whichever comes first."""
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(chat_template, "MAX_MEMORY", 128 * 2**20)
    named = f"{FILE}: the chat template cannot render these messages: " + (
        "it takes more than 0.2 seconds|it needs more than" if template in ENDLESS else ""
    )
    with pytest.raises(ValueError, match=named) as raised:
        render(template)
    assert len(str(raised.value)) < 1000
    assert render("{{ messages[0].content }}") == "Be brief."


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        ("{{ 'a' * 10 ** 10 }}", f"it needs more than {512 * 2**20} bytes"),
        ("{{ 'a' * 10 ** 8 }}", "it gives 100000000 characters, the most is 105"),
    ],
)
def test_memory_and_output_are_limited(template: str, limit: str) -> None:
    with pytest.raises(ValueError, match=limit):
        render(template)


def test_long_messages_render_whole() -> None:
    """The limits of output and memory grow with the input."""
    long = "東京🦙 " * 2**18
    assert render("{{ messages[0].content }}" * 3, [{"content": long}]) == long * 3


def test_threads_get_their_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)

    def work(i: int) -> str:
        if i == 70:
            with pytest.raises(ValueError, match="seconds"):
                render(ENDLESS[0])
            return str(i)
        return render("{{ messages[0].content }}", [{"content": str(i)}])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(200))) == [str(i) for i in range(200)]


def test_an_interrupt_is_raised_and_its_answer_goes_to_nobody() -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    render("")
    previous = signal(SIGALRM, interrupt)
    setitimer(ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            render(ENDLESS[0])
    finally:
        setitimer(ITIMER_REAL, 0)
        signal(SIGALRM, previous)
    assert render("{{ bos_token }}") == "<s>"


def workers() -> list[int]:
    """The processes that render, children of any thread of this one."""
    children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    return [int(pid) for pid in children if b"chat_worker" in Path("/proc", pid, "cmdline").read_bytes()]


def test_the_process_that_renders_has_no_secret_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"HF_TOKEN": "hf_secret", "LONGCTX_GROUP_SECRET": "secret", "AWS_SECRET_ACCESS_KEY": "secret"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TZ", "UTC")
    render("")
    (worker,) = workers()
    os.kill(worker, SIGKILL)
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    assert render("{{ bos_token }}") == "<s>"
    (worker,) = workers()  # that started in this environment
    environment = Path("/proc", str(worker), "environ").read_bytes().split(b"\0")
    assert b"TZ=UTC" in environment
    assert not any(line.partition(b"=")[0].decode() in secrets for line in environment)


def test_a_worker_that_was_killed_is_replaced() -> None:
    render("")
    (worker,) = workers()
    os.kill(worker, SIGKILL)
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    assert render("{{ bos_token }}") == "<s>"


def test_a_forked_process_has_a_worker_of_its_own() -> None:
    program = """
import os
from pathlib import Path
from longctx.models.chat_template import ChatTemplate
template = ChatTemplate(Path("x"), "{{ messages[0].content * 100000 }}")
render = lambda text: template.render([{"content": text}], True, {}) == text * 100000
assert render("a")
child = os.fork()
right = all(render("b" if child else "c") for _ in range(20))
if child == 0:
    os._exit(not right)
assert right and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_messages_must_be_json() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for content in [object(), {1, 2}, b"bytes", deep]:
        with pytest.raises(ValueError, match="JSON"):
            render("", [{"content": content}])
    for messages in [3, None, [3], ["text"]]:
        with pytest.raises(ValueError, match="must be objects of JSON"):
            render("", messages)
