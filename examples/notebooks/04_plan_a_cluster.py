# %% [markdown]
# # Plan a cluster: 10 million tokens on 128 H100
#
# Which plan of parallelism serves a prompt of 10 million tokens to Llama 3 8B, with at most 30 ms between the tokens of
# everybody else? This notebook goes from a division on paper to a plan that the serving core has run in virtual time:
# what must fit, what the links cost, which plans do, and what one prompt then looks like from inside. It is the Python
# side of `longctx plan`. No GPU is needed, no JAX is loaded, and all seconds are predicted.
#
# It takes about half a minute on a laptop.

# %%
import collections
import math

import numpy as np

from longctx.models.footprint import cache_bytes, weight_bytes
from longctx.parallel.topology import Topology
from longctx.plotting import MARKERS, shown
from longctx.serving import EngineConfig, ParallelPlan, Slo
from longctx.simulation.deployment import Deployment
from longctx.simulation.models import MODELS
from longctx.simulation.planner.prompt import PromptPredictor
from longctx.simulation.planner.search import Goal, layouts, search
from longctx.simulation.utilization import Totals, device_memory, model_flops
from longctx.simulation.workloads import WorkloadRequest

MODEL, TOKENS, GPUS, TPOT = MODELS["llama-3-8b"], 10_000_000, 128, 0.03

# %% [markdown]
# ## On paper
#
# A prompt of T tokens has T (T + 1) / 2 pairs of query and key. At 10M tokens these are nearly all of the work, and
# keys and values nearly all of the memory.

# %%
h100 = Topology.preset("h100-rdma").device
pairs = TOKENS * (TOKENS + 1) // 2
flops = model_flops(MODEL, Totals(rows=TOKENS, samples=1, pairs=pairs))
attention = 4 * MODEL.num_layers * MODEL.num_heads * MODEL.head_dim * pairs
keys = cache_bytes(MODEL, TOKENS)
print(f"keys and values  {keys / 1e12:.2f} TB, {cache_bytes(MODEL, 1) // 1024} KiB a token")
print(f"weights          {weight_bytes(MODEL) / 1e9:.0f} GB")
print(f"prompt           {flops:.2e} FLOP, {attention / flops:.1%} of them attention")
peak, bandwidth = GPUS * h100.flops["bfloat16"], GPUS * h100.memory_bandwidth
print(f"128 H100         {peak:.2e} FLOP/s at most: {flops / peak:.0f} s for the prompt")
once = 1e3 * keys / bandwidth
print(f"                 {bandwidth / 1e12:.0f} TB/s at most: {once:.1f} ms to read all keys for one token")

# %% [markdown]
# ## The cluster
#
# A `Topology` says what a device can do, which share of that is reached, and which link each axis of the mesh has.
# `tensor` stays within a host of 8; `context` and `stage` go over the network, one NIC for each GPU.

# %%
topology = Topology.preset("h100-rdma")
for axis, link in topology.links.items():
    print(f"{axis:8} {link.name:12} {link.bandwidth / 1e9:5.0f} GB/s, {1e6 * link.latency:.0f} us")
print(
    f"attention reaches {topology.device.reached_attention() / 1e12:.0f} of {h100.flops['bfloat16'] / 1e12:.0f} TFLOP/s"
)

# %% [markdown]
# ## What must fit
#
# `tensor` and `stage` divide weights and keys; `context` divides the keys alone, and repeats the weights. One host
# can't hold the request. Sixteen hold it with room to spare, whatever the plan: memory doesn't decide here.

# %%
plans = [
    ParallelPlan(1, 1, 8),
    ParallelPlan(4, 1, 8),
    ParallelPlan(16, 1, 8),
    ParallelPlan(4, 4, 8),
    ParallelPlan(1, 16, 8),
]
memories = [device_memory(MODEL, plan, topology.device, TOKENS) for plan in plans]
with shown(width=7, height=2.8) as (figure, (axes,)):
    labels = [f"{plan.stage} x {plan.context} x {plan.tensor}\n{plan.num_devices} GPUs" for plan in plans]
    bottom = np.zeros(len(plans))
    for name in ("weights", "cache", "activations"):
        heights = np.array([getattr(memory, name) for memory in memories]) / 1e9
        axes.bar(labels, heights, bottom=bottom, width=0.6, label="keys and values" if name == "cache" else name)
        bottom += heights
    axes.axhline(memories[0].usable / 1e9, color="k", ls="--", lw=1, label="usable")
    axes.set(title="Memory of one GPU, by stage x context x tensor", ylabel="GB")
    axes.legend(ncols=2)
assert [memory.fits for memory in memories] == [False, True, True, True, True]

# %% [markdown]
# ## Every layout of 128 GPUs
#
# - `stage` (SPP) cuts the layers. Chunks of one prompt follow each other densely through the stages, so TTFT falls with
#   the stages; a decoded token still passes all of them one after the other, so TPOT doesn't.
# - `context` (KVP) cuts the keys: all ranks read theirs at once for every token, so TPOT falls; each merge costs
#   a collective in every layer.
# - `tensor` cuts the heads, up to the 8 KV heads: both fall; it exchanges twice a layer, which asks for NVLink.
#
# `PromptPredictor` goes through the chunks of one prompt, of the sizes that the scheduler gives them so that decodes
# beside it keep their 30 ms. Each point is a layout of several ranks.


# %%
def deploy(plan, tokens=TOKENS, topology=topology, tpot=TPOT):
    config = EngineConfig(
        page_size=64,
        max_running=64,
        max_length=tokens + 256,
        token_budget=4096,
        chunking="adaptive",
        slo=Slo(tpot=tpot, step_seconds=tpot),
    )
    return Deployment(MODEL, topology, plan, config)


def predict(plan, tokens=TOKENS, topology=topology, tpot=TPOT):
    return PromptPredictor(deploy(plan, tokens, topology, tpot)).predict(tokens, 256)


found = {}  # of each layout, the limit of tokens on a rank that is best for TTFT
for plan in layouts(MODEL, GPUS, TOKENS, 8):
    if plan.num_devices == GPUS and plan.exchange == "kvp" and plan.placement == "grow":
        prompt, sizes = predict(plan), (plan.stage, plan.context, plan.tensor)
        if sizes not in found or prompt.ttft < found[sizes].ttft:
            found[sizes] = prompt

with shown(width=7, height=4) as (figure, (axes,)):
    for marker, tensor in zip(MARKERS, (1, 2, 4, 8), strict=False):
        points = [(1e3 * prompt.tpot, prompt.ttft) for sizes, prompt in found.items() if sizes[2] == tensor]
        axes.loglog(*zip(*points, strict=True), marker, ls="", markersize=6, label=f"tensor {tensor}")
    for (stage, context, tensor), prompt in found.items():
        if tensor == 8:
            label = f"{stage} x {context} x 8"
            point = (1e3 * prompt.tpot, prompt.ttft)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            axes.annotate(label, point, (-6, -3), textcoords="offset points", size=8, ha="right", bbox=box)
    axes.axvline(1e3 * TPOT, color="k", ls="--", lw=1)
    axes.minorticks_off()
    axes.set_xticks((10, 20, 30, 50, 100), (10, 20, 30, 50, 100))
    axes.set_yticks((500, 600, 800, 1000), (500, 600, 800, 1000))
    axes.set(xlabel="TPOT of the long request, ms", ylabel="TTFT, s", title="10M tokens on 128 H100: plans")
    axes.set(xlim=6, ylim=500)
    axes.legend()

# %% [markdown]
# ## The search
#
# `search` looks at all layouts, smaller instances too (there are then several of them), tries other ways to chunk for
# the best, and says why the others fall. Cheapest first, in GPU-seconds of the prompt.

# %%
result = search(MODEL, topology, GPUS, Goal(TOKENS, ttft=900, tpot=TPOT))
print("stage x context x tensor   GPUs    TTFT      TPOT  beside it   MFU  GPU-seconds")
for planned in result.best_of_each[:6]:
    plan, prompt = planned.deployment.plan, planned.prompt
    seconds = f"{prompt.ttft:5.0f} s {1e3 * prompt.tpot:6.1f} ms {1e3 * prompt.beside:7.1f} ms"
    print(
        f"{plan.stage:5} x {plan.context:7} x {plan.tensor:6} {planned.devices:6} {seconds} {planned.mfu:5.0%} "
        f"{planned.gpu_seconds:12,.0f}"
    )
reasons = collections.Counter(each.reason for each in result.rejected)
print("\nfallen:", ", ".join(f"{count} by {reason}" for reason, count in reasons.most_common()))
best = result.plans[0]
assert (best.deployment.plan.stage, best.deployment.plan.context, best.deployment.plan.tensor) == (4, 4, 8)

# %% [markdown]
# The winner has 4 stages, 4 ranks that the request grows over one by one, and 8 GPUs to each: the plan that Mnemosyne
# shows for 10M tokens on 128 H100 (its figure 1).
#
# ## From inside
#
# Predictions are arithmetic. Here the serving core itself reads a prompt in virtual time on this plan, beside a request
# that decodes all the while, page by page and chunk by chunk. It is a prompt of 2M tokens, to be quick; 10M take the
# core 75,000 steps, a minute and a half of a laptop's time (`longctx plan` does that for the best plan).

# %%
READ = 2_000_000


def grown(stage, context, tokens):
    """A plan whose requests are spread evenly over the ranks once they are read."""
    share = -(-tokens // context // 64) * 64
    return ParallelPlan(stage, context, 8, rank_tokens=share if context > 1 else None)


predicted = predict(grown(4, 4, READ), READ)
beside = WorkloadRequest(0.0, 1, predicted.steps // 4)
record = deploy(grown(4, 4, READ), READ).simulation().run([beside, WorkloadRequest(0.0, READ, 256, number=1)])
other, long = sorted(record.served, key=lambda served: served.number)
print(f"TTFT {long.ttft:.2f} s simulated, {predicted.ttft:.2f} s predicted")
print(f"TPOT {1e3 * long.tpot:.2f} ms simulated, {1e3 * predicted.tpot:.2f} ms predicted")
print(f"TPOT {1e3 * other.tpot:.2f} ms of the request beside it, in {len(record.steps):,} steps")
assert math.isclose(long.ttft, predicted.ttft, rel_tol=0.01)
assert other.tpot < 1.01 * TPOT

# %% [markdown]
# Chunks begin large and shrink as the keys before them grow, so that a step takes a fourth of 30 ms in each of the four
# stages. Chunks have a floor, below which they would be inefficient; there a step is longer by up to a sixth. At half a
# million tokens the second rank joins. From then on a rank reads no more keys for a chunk, however long the prompt
# gets, and progress is a straight line.

# %%
chunks = [(start, count, step) for step in record.steps for start, count in step.chunks if count > 1]
every = chunks[:: len(chunks) // 200]
at = np.array([start for start, _, _ in every]) / 1e6
with shown(panels=3, width=3.3, height=2.8) as (figure, (left, middle, right)):
    left.semilogy(at, [count for _, count, _ in every])
    left.set(title="Chunk", xlabel="million tokens read", ylabel="tokens")
    middle.plot(at, [1e3 * max(step.rank_seconds) for _, _, step in every])
    middle.axhline(1e3 * TPOT / 4, color="k", ls="--", lw=1)
    middle.set(title="Step", xlabel="million tokens read", ylabel="ms in one stage", ylim=(0, 10))
    start = record.steps[0].finished - record.steps[0].seconds
    right.plot([step.finished - start for _, _, step in every], at)
    right.set(title="Progress", xlabel="seconds", ylabel="million tokens read")

# %% [markdown]
# ## How it scales
#
# More stages for TTFT, more ranks for TPOT. Left: 4 ranks of 8 GPUs, with 1, 2 and 4 stages. Right: 4 stages of 8 GPUs,
# with 1, 2 and 4 ranks.

# %%
LENGTHS = (1_000_000, 2_000_000, 4_000_000, 10_000_000)

with shown(panels=2, width=4.4, height=3) as (figure, (left, right)):
    for size, marker in zip((1, 2, 4), MARKERS, strict=False):
        prompts = [predict(grown(size, 4, tokens), tokens, tpot=0.1) for tokens in LENGTHS]
        left.loglog(
            LENGTHS, [prompt.ttft for prompt in prompts], marker + "-", label=f"{size} x 4 x 8, {32 * size} GPUs"
        )
        prompts = [predict(grown(4, size, tokens), tokens, tpot=0.1) for tokens in LENGTHS]
        right.semilogx(
            LENGTHS, [1e3 * prompt.tpot for prompt in prompts], marker + "-", label=f"4 x {size} x 8, {32 * size} GPUs"
        )
    left.set(title="Seconds to the first token", xlabel="tokens", ylabel="s")
    right.set(title="Between tokens", xlabel="tokens", ylabel="ms", ylim=0)
    left.legend()
    right.legend()

# %% [markdown]
# ## A slower network
#
# What if the hosts have 100 Gb/s TCP in place of RDMA? A token that is decoded sends little, so TPOT hardly minds. A
# chunk's states, merged over ranks in every layer, are more: TTFT grows, and most plans miss the goal.

# %%
tcp = Topology.preset("h100-tcp")
plan = best.deployment.plan
for name, each in (("RDMA", topology), ("TCP", tcp)):
    prompt = predict(plan, topology=each, tpot=0.1)
    print(f"{name:5} TTFT {prompt.ttft:5.0f} s   TPOT {1e3 * prompt.tpot:5.1f} ms")
with_tcp = search(MODEL, tcp, GPUS, Goal(TOKENS, ttft=900, tpot=TPOT))
print(f"plans that meet the goal: {len(result.plans)} over RDMA, {len(with_tcp.plans)} over TCP")

# %% [markdown]
# The same on the command line, with the command that serves the winner:
#
# ```sh
# longctx plan --model llama-3-8b --gpus 128 --hardware h100-rdma --context 10M --ttft 900 --tpot 0.03
# ```
#
# What predictions can't show: none of this has run on GPUs. The shares that devices reach are fitted to what the papers
# report (`docs/simulation_hardware.md`). Measure with `longctx profile` and predict from the profile.
