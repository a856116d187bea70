# %% [markdown]
# # A scheduling policy of one's own
#
# Long prompts and short ones share an engine. Whoever comes first may be a repository of 400,000 tokens, and a question
# of 300 tokens behind it would wait for twenty seconds. The order in which prompts are read is a *policy*: two pure
# functions of plain data. This notebook writes one in 20 lines and compares it with `fcfs` and with Medha's `ilrs`, in
# virtual time, on Llama 3 8B over 16 A100.
#
# The scheduler here is the one that serves: the same code, with predicted seconds in place of devices. No JAX is
# loaded. It takes about half a minute on a laptop.

# %%
import sys

import numpy as np

from longctx.plotting import COLORS, shown
from longctx.serving import EngineConfig, ParallelPlan, Slo
from longctx.simulation import Instance, Simulation
from longctx.simulation.hardware import predictor
from longctx.simulation.models import MODELS
from longctx.simulation.workloads import WorkloadRequest, arrive_at_rate, make_mix

assert "jax" not in sys.modules

# %% [markdown]
# ## The policy
#
# Of all prompts, waiting or half read, the one with the least `urgency` is read next, and this is asked anew in every
# step: so a long prompt gives way between any two of its chunks. `share` is what a prompt may have of the step of a
# longer one that is more urgent. Running decodes are in every step, whatever the policy says.
#
# Ours is *highest response ratio next* (Brinch Hansen, 1971): the most urgent is who has waited longest in units of
# what it still needs. A short prompt becomes urgent within milliseconds; a long one does after minutes, so it can't
# starve. It asks for no deadlines.


# %%
class HighestResponseRatio:
    """Prompts wait in proportion to what they need.

    Of a sequence it reads `arrival` and `prefill_remaining`, the predicted seconds of the rest of its prompt.
    """

    def urgency(self, sequence, now):
        """The least is read next."""
        waited = now - sequence.arrival
        return -waited / max(sequence.prefill_remaining, 1e-3)

    def share(self, sequence, now):
        """Half of the step of a longer prompt: it costs that one little, as short prompts need few steps."""
        return 0.5


POLICIES = {"fcfs": "fcfs", "srpf": "srpf", "ilrs": "ilrs", "our own": HighestResponseRatio()}

# %% [markdown]
# ## The engine
#
# A model, a plan of parallelism (two pipeline stages of eight A100 each) and an `EngineConfig`, in which the policy is
# one argument. Chunks adapt to a TPOT of 50 ms. `Instance` is the engine's core, driven by virtual time.

# %%
MODEL, PLAN, TPOT = MODELS["llama-3-8b"], ParallelPlan(stage=2, tensor=8), 0.05
TIMES = predictor(MODEL, "medha-a100", PLAN, max_rows=4096)  # seconds of a batch, from data sheets and achieved rates


def serve(policy, requests):
    """Serve requests in virtual time; the record has every request and every step."""
    config = EngineConfig(
        policy=POLICIES[policy],
        chunking="adaptive",
        token_budget=4096,
        slo=Slo(tpot=TPOT, step_seconds=TPOT),
        num_pages=30_000,
        page_size=256,
        max_running=128,
        prefix_cache=False,
    )
    return Simulation([Instance(MODEL, config, TIMES, PLAN)]).run(requests)


# %% [markdown]
# ## One long prompt, six short ones
#
# 400,000 tokens come first, then a short prompt every 1.2 seconds. A bar is a run of steps in which a prompt was read,
# as high as its part of their tokens. A circle is when it came, a line is its wait for the first token.

# %%
scene = [WorkloadRequest(0.0, 400_000, 50)]
scene += [WorkloadRequest(0.5 + 1.2 * i, tokens, 50, number=i + 1) for i, tokens in enumerate([2000, 300] * 3)]


def bars(steps, request_id):
    """When a prompt was read: (begin, seconds, part of the step's prompt tokens), of steps that follow each other."""
    found = []
    for step in steps:
        rows = sum(count for name, count, decodes in step.rows if name == request_id and not decodes)
        if rows:
            begin, part = step.finished - step.seconds, round(rows / step.prompt_tokens, 1)
            if found and found[-1][2] == part and begin - sum(found[-1][:2]) < TPOT:
                found[-1][1] = step.finished - found[-1][0]
            else:
                found.append([begin, step.seconds, part])
    return found


with shown(panels=3, width=3.3, height=2.8) as (figure, panels):
    for axes, policy in zip(panels, ("fcfs", "ilrs", "our own"), strict=True):
        record = serve(policy, scene)
        first = {served.number: served.ttft for served in record.served}
        for request in scene:
            row, color = request.number, COLORS[1] if request.number else COLORS[0]
            for begin, seconds, part in bars(record.steps, f"request-{row}"):
                axes.broken_barh(
                    [(begin, max(seconds, 0.08))], (row - 0.45 * part, 0.9 * part), color=color, linewidth=0
                )
            axes.plot([request.arrival, request.arrival + first[row]], [row, row], color="k", linewidth=0.8)
            axes.plot(request.arrival, row, "o", color="k", markersize=3)
        axes.set(title=policy, xlabel="seconds", ylim=(6.7, -0.7))
        axes.set_yticks(range(7), [f"{request.prompt_tokens:,}" for request in scene] if policy == "fcfs" else [])
        mean = np.mean([first[number] for number in range(1, 7)])
        print(f"{policy:8} long {first[0]:5.2f} s, short {mean:5.2f} s to the first token")
        assert (mean > 3) == (policy == "fcfs")
    panels[0].set_ylabel("prompt tokens")

# %% [markdown]
# Six short prompts cost the long one next to nothing, and save themselves seconds.
#
# ## A mix of conversations and repositories
#
# 150 requests with the lengths of Medha's evaluation: conversations, and 5 % prompts of 100,000 to a million tokens,
# 0.6 a second as a Poisson process. `srpf` (shortest remaining prefill first) is there as the best that short prompts
# can have.

# %%
requests = arrive_at_rate(make_mix("sharegpt4-5-long", 150), rate=0.6)
is_long = {request.number: request.prompt_tokens > 8_000 for request in requests}
records = {policy: serve(policy, requests) for policy in POLICIES}


def ttft(record, long):
    return np.array([served.ttft for served in record.served if is_long[served.number] == long])


with shown(panels=2, width=4.4) as (figure, panels):
    for axes, long in zip(panels, (False, True), strict=True):
        for (policy, record), line in zip(records.items(), ("-", "--", "-.", "-"), strict=True):
            axes.ecdf(ttft(record, long), label=policy, linestyle=line)
        axes.set(xscale="log", xlabel="seconds to the first token", ylabel="share of requests")
        axes.set_title("100,000 tokens and more" if long else "Prompts of up to 8,000 tokens")
    panels[0].legend()

print(f"{'':8} {'short p50':>10} {'p99':>8} {'long p50':>10} {'largest':>9} {'in time':>9} {'TPOT p99':>10}")
for policy, record in records.items():
    short, long = ttft(record, False), ttft(record, True)
    kept = np.mean([served.kept_ttft for served in record.served])
    tpot = np.quantile([served.tpot for served in record.served if served.tpot], 0.99)
    print(
        f"{policy:8} {np.median(short):8.2f} s {np.quantile(short, 0.99):6.1f} s {np.median(long):8.1f} s "
        f"{long.max():7.1f} s {kept:9.0%} {1e3 * tpot:7.1f} ms"
    )
    assert tpot < 1.02 * TPOT  # adaptive chunks keep the decodes' target under every policy

# %% [markdown]
# In time: the first token came within five times the prompt's time alone, or a second. `fcfs` makes everybody wait for
# every long prompt. With the other three a short prompt hardly notices that there are long ones.

# %%
medians = {policy: np.median(ttft(record, False)) for policy, record in records.items()}
assert medians["our own"] < medians["fcfs"] / 20
assert medians["our own"] < 1.5 * medians["srpf"]
assert np.quantile(ttft(records["our own"], True), 0.9) < 1.5 * np.quantile(ttft(records["ilrs"], True), 0.9)

# %% [markdown]
# ## Under load
#
# Slowdown: seconds to the first token over those of the prompt alone. Its mean weighs a question like a repository.

# %%
RATES = (0.3, 0.6, 0.9)
alone = {request.number: TIMES.prefill_seconds(0, request.prompt_tokens, 4096) for request in requests}
slowdown = {policy: [] for policy in ("fcfs", "ilrs", "our own")}
for policy, values in slowdown.items():
    for rate in RATES:
        record = records[policy] if rate == 0.6 else serve(policy, arrive_at_rate(requests, rate))
        values.append(np.mean([served.ttft / alone[served.number] for served in record.served]))
with shown(width=5.5, height=3) as (figure, (axes,)):
    for (policy, values), marker, color in zip(slowdown.items(), "o^D", (0, 2, 3), strict=True):
        axes.semilogy(RATES, values, marker + "-", color=COLORS[color], label=policy)
    axes.set(xlabel="requests a second", ylabel="mean slowdown", title="Seconds to the first token, over those alone")
    axes.legend()
assert all(ours < theirs / 10 for ours, theirs in zip(slowdown["our own"], slowdown["fcfs"], strict=True))

# %% [markdown]
# ## In the engine
#
# The same object goes to an engine with devices, `Engine(model, params, EngineConfig(policy=HighestResponseRatio()))`:
# what ran above is what serves. `06_serving` has an engine, `docs/scheduling.md` the built-in policies and what each is
# good at. Things to try here: a `share` that grows with the time waited; a cap on how long anybody waits; priorities
# (`Request.priority` comes before urgency, under every policy).
