"""The flags of every command, by sections of its help. Nothing here imports JAX or numpy: help is there at once."""

from collections.abc import Mapping

from longctx.cli.flag_sets import (
    ApiKeyFlags,
    BenchFlags,
    ChatFlags,
    ClusterFlags,
    DemoFlags,
    DoctorFlags,
    GenerateFlags,
    ModelFlags,
    PlanFlags,
    ProcessFlags,
    ProfileFlags,
    QuantizeFlags,
    ReplayFlags,
    ResultFlags,
    ServeFlags,
    SimulateFlags,
    TransferFlags,
    WorkloadFlags,
)
from longctx.cli.flags import Flags
from longctx.serving.config import AdmissionLimits, EngineConfig
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.scheduler.slo import Slo
from longctx.serving.server.settings import ObserverSettings, ServerSettings

CHANGES = ("policy", "chunking", "max_share", "num_pages", "token_budget", "max_running", "admission", "run_ahead")
"""Settings that `longctx replay` can change."""

_KEPT = "don't keep compiled programs for the next run (in the user's cache folder, or LONGCTX_CACHE)"
_MODEL = Flags(ModelFlags, only=("model", "dtype", "compile_cache"), helps={"compile_cache": _KEPT})
_KV_DTYPE = Flags(EngineConfig, only=("kv_dtype",))
_CHECKPOINT = (_MODEL, _KV_DTYPE)
_SIZES = ("page_size", "num_pages", "max_running", "token_budget", "run_ahead", "buckets", "admission", "prefix_cache")
_ENGINE = Flags(EngineConfig, "engine", _SIZES, helps={"prefix_cache": "share no pages between requests"})
_TOPOLOGY = Flags(ModelFlags, "devices", ("topology",), defaults={"topology": "h100-rdma"})
_DEVICES = (Flags(ParallelPlan, "devices"), Flags(ModelFlags, "devices", ("topology",)))
_SCHEDULING = (
    Flags(ModelFlags, "scheduling", ("preset", "profile")),
    Flags(EngineConfig, "scheduling", ("policy", "chunking", "max_share")),
    Flags(Slo, "scheduling"),
)
_PROCESSES = Flags(ProcessFlags, "processes: start each with the same command; process 0 prints the results")
_WORKLOAD = Flags(WorkloadFlags, "workload")
_BUDGET = "the most rows of a step on a rank; default: of the smallest step that saturates the devices"
_TIERS = "KV cache beyond the devices (docs/kv_cache.md); SIZE as 8GiB or 500MB"
_OTHER_SETTINGS = "the same requests under other settings"


def _sampling(max_tokens: int) -> Flags:
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop")
    return Flags(SamplingParams, "sampling", names, defaults={"max_tokens": max_tokens, "seed": 0})


_ACCESS = ("allow_hosts", "allow_origins", "requests_per_minute", "tokens_per_minute", "audit_log")
_SERVE = (
    Flags(ModelFlags, only=("model",)),
    Flags(ServeFlags, only=("config", "host", "port", "api_key_file")),
    Flags(EngineConfig, only=("max_length",)),
    Flags(ParallelPlan, only=("context", "tensor")),
    Flags(ServeFlags, "model", ("served_model_name", "chat_template")),
    _MODEL._replace(title="model", only=("dtype", "compile_cache")),
    _KV_DTYPE._replace(title="model"),
    Flags(EngineConfig, "model", ("max_logprobs",), defaults={"max_logprobs": 20}),
    Flags(
        AdmissionLimits,
        "server",
        names={"heeds_deadlines": "ignore_deadlines"},
        helps={"heeds_deadlines": "admit requests whose TTFT target can't be kept, too"},
    ),
    Flags(ServerSettings, "server", without=("api_keys", "admin_keys", *_ACCESS)),
    Flags(ServeFlags, "access", ("api_key", "admin_key", "admin_key_file", "allow_anonymous")),
    Flags(ServeFlags, "access", ("tls_cert", "tls_key", "tls_ca")),
    Flags(EngineConfig, "access", ("tenant_weights",)),
    Flags(ServerSettings, "access", _ACCESS),
    Flags(ServeFlags, "recording", ("record", "record_bytes", "record_key_file")),
    Flags(ObserverSettings, "observers", without=("kv_events_secret",)),
    _ENGINE,
    Flags(TierConfig, _TIERS, prefix="kv_", defaults={"host_bytes": None, "disk_bytes": None}),
    Flags(ServeFlags, _TIERS, ("kv_secret_file",)),
    Flags(TransferFlags, "prefill and decode apart (docs/kv_transfer.md); needs --kv-secret-file"),
    Flags(ClusterFlags, "many engines behind one address (docs/cluster.md)"),
    Flags(ParallelPlan, "devices", without=("context", "tensor")),
    _DEVICES[1],
    _PROCESSES,
    *_SCHEDULING,
)
FLAGS: Mapping[str, tuple[Flags, ...]] = {
    "api-key": (Flags(ApiKeyFlags, positional={"name": "NAME"}),),
    "bench": (
        *(*_CHECKPOINT, Flags(BenchFlags), _WORKLOAD, Flags(SimulateFlags, "workload", ("users",))),
        *(_ENGINE, *_DEVICES, _PROCESSES, *_SCHEDULING),
        Flags(ResultFlags, "results", ("json", "plot")),
    ),
    "chat": (*_CHECKPOINT, Flags(ChatFlags), _sampling(512), *_DEVICES),
    "demo": (Flags(DemoFlags), _MODEL._replace(only=("compile_cache",))),
    "doctor": (Flags(DoctorFlags),),
    "generate": (
        *(*_CHECKPOINT, Flags(GenerateFlags), Flags(SamplingParams, only=("n",))),
        *(Flags(EngineConfig, only=("max_running",)), _sampling(256), *_DEVICES, _PROCESSES),
    ),
    "group-secret": (),
    "plan": (
        *(Flags(PlanFlags), Flags(SimulateFlags, only=("model",)), _KV_DTYPE),
        _TOPOLOGY._replace(title="", names={"topology": "hardware"}, aliases={"topology": ("--topology",)}),
        _WORKLOAD._replace(
            title="workload, which the best plans serve in virtual time",
            only=("workload", "limit", "rate", "seed"),
            names={"rate": "qps"},
        ),
        Flags(SimulateFlags, "results", ("jobs",)),
        Flags(ResultFlags, "results", ("json",)),
    ),
    "profile": (
        Flags(ProfileFlags, names={"tables": "import"}, positional={"out": "FILE"}),
        Flags(EngineConfig, only=("max_length",)),
        *_CHECKPOINT,
        _ENGINE,
        *_DEVICES,
    ),
    "quantize": (Flags(QuantizeFlags, positional={"model": "DIR", "out": "OUT"}),),
    "replay": (
        Flags(ReplayFlags, only=("log", "json", "record_key_file", "explain"), positional={"log": "DIR"}),
        Flags(EngineConfig, _OTHER_SETTINGS, CHANGES, are_changes=True),
        Flags(ReplayFlags, _OTHER_SETTINGS, ("slo",)),
    ),
    "serve": _SERVE,
    "simulate": (
        Flags(SimulateFlags, only=("model",)),
        _KV_DTYPE,
        _WORKLOAD._replace(aliases={"rate": ("--qps",)}),
        Flags(SimulateFlags, "workload", ("mix", "users", "jitter", "window")),
        _ENGINE._replace(defaults={"token_budget": None}, helps={**_ENGINE.helps, "token_budget": _BUDGET}),
        _DEVICES[0],
        _TOPOLOGY,
        Flags(SimulateFlags, "devices", ("instances", "baseline", "cluster")),
        *_SCHEDULING,
        Flags(SimulateFlags, "results", ("capacity", "sweep", "jobs")),
        Flags(ResultFlags, "results"),
    ),
}
"""The flags of each command, in the order of its help."""
