# %% [markdown]
# # An engine, step by step
#
# `longctx.serving.Engine` serves many requests together: prompts are read in chunks beside the tokens of others, in one
# compiled step over a paged cache in which requests share what they begin with. This notebook runs it on the built-in
# model of 657,024 parameters, which finds pass keys in long texts, and looks at what each step computes.
#
# It takes about a minute on a laptop, of which most is compiling.

# %%
import itertools
import time

from longctx.models import load_checkpoint, load_tokenizer, passkey
from longctx.models.builtin import TINY
from longctx.parallel import cpu_devices
from longctx.plotting import COLORS, shown
from longctx.serving import Engine, EngineConfig, Request, SamplingParams

cpu_devices(1)  # the CPU, also where there is a GPU

# %% [markdown]
# ## An engine
#
# A model, its parameters, and an `EngineConfig`. Two of the arguments are for looking at it. `monitor` is called with
# the metrics of every step. `clock` gives the seconds that metrics and policies go by: here it counts steps, so that
# what follows is the same in every run. Leave it out, and times are seconds.

# %%
steps = []
model, params = load_checkpoint(TINY)  # or a directory of Hugging Face safetensors, or a .gguf file
config = EngineConfig(
    page_size=64,
    num_pages=1024,
    max_running=8,
    max_length=8192,
    token_budget=256,  # rows of a step at most: tokens that are decoded, and chunks of prompts in what is left
    buckets=(256,),
    policy="ilrs",
)
engine = Engine(
    model, params, config, tokenizer=load_tokenizer(TINY), clock=lambda: float(len(steps)), monitor=steps.append
)
engine.warm_up()  # compiles its steps, here one of 256 rows


def ask(document, name, **options):
    """A request for a pass key of a document. A token is a byte."""
    prompt = passkey.prompt(document.text, passkey.question(name))
    return Request(prompt, SamplingParams(max_tokens=16), **options)


note = passkey.make_document(500, 2, seed=1)
print(note.text)

# %%
outputs = engine.generate([ask(note, name) for name in note.facts])
for (name, key), output in zip(note.facts.items(), outputs, strict=True):
    print(f"{name:8} {output.text} {output.finish_reason}  {output.metrics.prompt_tokens} tokens in the prompt")
    assert output.text == key

# %% [markdown]
# ## What each step computes
#
# A document of 4,000 bytes is read, 256 rows a step. Meanwhile four short questions come. `submit` and `step` are what
# `generate` and `stream` are made of.

# %%
document = passkey.make_document(4000, 3, seed=2)
names = list(document.facts)
first_step = len(steps)
arrivals = {0: ("document", ask(document, names[0]))}
for i in range(4):
    text = passkey.make_document(350, 1, seed=10 + i)
    arrivals[2 + 3 * i] = f"note {i}", ask(text, next(iter(text.facts)))

labels, answers = {}, {}
for step in itertools.count():
    if step in arrivals:
        label, request = arrivals[step]
        labels[engine.submit(request)] = label
    elif not engine.has_work:
        break
    for event in engine.step():
        if event.output is not None:
            answers[labels[event.request_id]] = event.output
for label, output in answers.items():
    print(f"{label:9} {output.text}  first token {output.metrics.ttft:3.0f} steps after it came")

# %% [markdown]
# A bar is as high as a request's part of the step's 256 rows. Short prompts get a share of the steps of the long one
# and are done while it is read; whoever decodes has one row in every step.

# %%
rows = {request_id: row for row, request_id in enumerate(labels)}
seen = [step for step in steps[first_step:] if any(request_id in rows for request_id, _, _ in step.rows)]
with shown(width=8, height=3) as (figure, (axes,)):
    for number, step in enumerate(seen):
        for request_id, count, decodes in step.rows:
            height = max(0.9 * count / config.token_budget, 0.12)
            color = COLORS[1] if decodes else COLORS[0]
            axes.bar(number, height, bottom=rows[request_id] - height / 2, width=0.8, color=color)
    axes.set_yticks(range(len(labels)), labels.values())
    axes.invert_yaxis()
    axes.set(title="Rows of each step: blue of prompts, orange decoded", xlabel="step")
assert max(sum(count for _, count, _ in step.rows) for step in seen) <= config.token_budget
assert all(answers[f"note {i}"].metrics.finished < answers["document"].metrics.first_token for i in range(4))

# %% [markdown]
# ## Prefixes
#
# The document's pages stay in the cache. The key of a full page is a hash of all tokens up to its end, so whoever asks
# about the same document finds them and reads the question alone.

# %%
(output,) = engine.generate([ask(document, names[1])])
metrics = output.metrics
print(f"{output.text}: {metrics.cached_tokens:,} of {metrics.prompt_tokens:,} tokens were in the cache")
assert output.text == document.facts[names[1]]
assert metrics.cached_tokens == len(document.text) // 64 * 64  # its full pages

# %% [markdown]
# Requests that come together share as well: one computes the common pages, the others wait for them, as that is sooner
# than computing them again. Four questions about a new document of 3,000 bytes:

# %%
other = passkey.make_document(3000, 4, seed=3)
before = engine.stats()
burst = engine.generate([ask(other, name) for name in other.facts])
computed = engine.stats().prompt_tokens - before.prompt_tokens
total = sum(output.metrics.prompt_tokens for output in burst)
print(f"{computed:,} tokens computed for prompts of {total:,}")
assert [output.text for output in burst] == list(other.facts.values())
assert computed < total / 3

# %% [markdown]
# ## Sessions
#
# A conversation goes on with its own output, so the next turn should find all of it, the last, partial page too. That
# is what `session_id` is for. Without one, full pages alone are found.

# %%
found = {}
for session in ("a session", None):
    history, found[session] = passkey.make_document(700, 3, seed=4), []  # another salt: nothing is shared
    prompt = history.text
    for name in history.facts:
        prompt += passkey.prompt("", passkey.question(name))
        request = Request(prompt, SamplingParams(max_tokens=16), session_id=session, cache_salt=str(session))
        (output,) = engine.generate([request])
        found[session].append((output.metrics.prompt_tokens, output.metrics.cached_tokens))
        prompt += output.text

with shown(panels=2, width=4, height=2.6) as (figure, panels):
    for axes, (session, turns) in zip(panels, found.items(), strict=True):
        lengths, cached = zip(*turns, strict=True)
        axes.bar(range(1, 4), lengths, width=0.6, color=COLORS[0], label="computed")
        axes.bar(range(1, 4), cached, width=0.6, color=COLORS[5], label="found in the cache")
        axes.set(title="With a session" if session else "Without", xlabel="turn", xticks=(1, 2, 3), ylim=(0, 1000))
    panels[0].set_ylabel("tokens of the prompt")
    panels[1].legend(loc="upper left", ncols=2)
for turn in (1, 2):
    with_session, without = found["a session"][turn][1], found[None][turn][1]
    assert with_session > without
    assert without % 64 == 0

# %% [markdown]
# ## A stream
#
# `stream` yields an `Event` for each completion that a step brought a token. Closing it cancels what has not ended, and
# the pages are free in the next step.

# %%
held = engine.stats().pages_held
stream = engine.stream([ask(note, name) for name in note.facts])
for event in itertools.islice(stream, 6):
    print(event.request_id, event.token_ids, repr(event.text))
stream.close()
engine.step()
assert not engine.has_work
assert engine.stats().pages_held == held

# %% [markdown]
# ## Figures of the engine
#
# `stats` counts since the engine was made; a server shows the same as Prometheus metrics.

# %%
stats = engine.stats()
print(f"{stats.steps} steps, {stats.prompt_tokens:,} tokens of prompts computed, {stats.output_tokens} generated")
print(f"{stats.cached_tokens / stats.queried_tokens:.0%} of the tokens of prompts were found in the cache")
print(f"{stats.pages_cached} pages cached, {stats.pages_evicted} evicted, {stats.preemptions} preemptions")

# %% [markdown]
# In seconds, on your machine (this cell's output is not stored): the first question about a document of 6,000 bytes,
# and the second.

# %% tags=["varies"]
last = passkey.make_document(6000, 2, seed=5)
for name in last.facts:
    begin = time.perf_counter()
    (output,) = engine.generate([ask(last, name)])
    print(f"{time.perf_counter() - begin:.2f} s, {output.metrics.cached_tokens:,} tokens found")

# %% [markdown]
# The same engine over many devices is one more argument, `plan=ParallelPlan(stage=2, context=2, tensor=2)`, with the
# same tokens; `longctx serve` puts it behind HTTP. `docs/engine.md` says how it works, `03_scheduling` how to give it a
# policy of your own.
