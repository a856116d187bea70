"""Flags that belong to no settings of the library: of models, processes, workloads, results, and of single commands."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from longctx.cli.files import check_drawing, check_folder, check_input, check_output, check_trace
from longctx.cluster.conductor.config import Role
from longctx.cluster.config import Launcher, Messenger
from longctx.models.builtin import TINY
from longctx.models.validation import MAX_INT32
from longctx.serving.validation import AboveZero, Count, Positive, Range

Dtype = Literal["float32", "bfloat16", "float16"]
_AtLeastZero = Annotated[float, Range(0)]
_AtLeastTwo = Annotated[int, Range(2)]
_Input = Annotated[Path, check_input]
_Trace = Annotated[Path, check_trace]
_Output = Annotated[Path, check_output]
_Folder = Annotated[Path, check_folder]
_PrivateFolder = Annotated[Path, partial(check_folder, mode=0o700)]
_Drawing = Annotated[Path, check_output, check_drawing]


def _check_rate(flag: str, value: float) -> None:
    if not value >= 1e-6:  # infinite: all at once
        raise ValueError(f"{flag} must be at least 1e-06, got {value}")


flag_set = dataclass(init=False, repr=False, eq=False)
"""A dataclass that declares flags alone, each with its help. Values stay among the options: it has no instances."""


@flag_set
class ModelFlags:
    """A model, and what an engine predicts from."""

    model: Annotated[
        str | Path, "checkpoint directory, .gguf file, or owner/name[@revision] of the hub; default: the built-in one"
    ] = TINY
    dtype: Annotated[Dtype | None, "of the parameters and the cache. None: the checkpoint's own"] = None
    compile_cache: Annotated[bool, "whether compiled programs are kept for the next run"] = True
    preset: Annotated[
        Literal["medha", "sarathi", "meta"] | None,
        "a paper's scheduling, placement and exchange; other flags override it",
    ] = None
    topology: Annotated[
        str | None,
        "devices and links that costs are predicted from: h100-nvlink, h100-rdma, h100-tcp, a100-800g and others, or a "
        "JSON file. None: found",
    ] = None
    profile: Annotated[_Input | None, "profile of this engine, from `longctx profile`"] = None


@flag_set
class ProcessFlags:
    """Processes that run an engine together."""

    coordinator: Annotated[
        str | None, 'HOST:PORT where process 0 listens; "auto" finds it from Slurm, Open MPI or Kubernetes.'
    ] = None
    num_processes: Annotated[int | None, "processes in all"] = None
    process_id: Annotated[int | None, "id of this process, from 0"] = None
    failure_timeout: Annotated[float, "seconds until a lost process is noticed"] = 30.0
    join_timeout: Annotated[float, "seconds for which processes wait for each other"] = 120.0
    ports: Annotated[str | None, "LOW:HIGH, of which process 0 listens on one beside the coordinator's. None: any"] = (
        None
    )
    group_secret_file: Annotated[
        Path | None, "from `longctx group-secret`; only processes that have it can join. None: LONGCTX_GROUP_SECRET"
    ] = None


@flag_set
class WorkloadFlags:
    """A workload, from a file or synthetic."""

    workload: Annotated[
        _Trace | None, "trace: JSON lines, CSV of lengths, or agents' sessions as .json, also a folder of them"
    ] = None
    limit: Annotated[Positive | None, "only the first N requests of the file"] = None
    scale_lengths: Annotated[AboveZero | None, "all lengths of the file or of agents times X"] = None
    agents: Annotated[
        Annotated[int, Range(1, 10_000)] | None, "draw N sessions of coding agents, like those of public traces"
    ] = None
    requests: Annotated[
        Annotated[int, Range(1, 1_000_000)] | None, "generate N requests instead of reading a file. None: 16"
    ] = None
    prompt_tokens: Annotated[str | None, "N, LOW:HIGH or LOW:HIGH:log. None: 64:512"] = None
    output_tokens: Annotated[str | None, "N, LOW:HIGH or LOW:HIGH:log. None: 16:64"] = None
    shared_prefix: Annotated[
        Annotated[int, Range(0, MAX_INT32)] | None, "further tokens that all prompts begin with"
    ] = None
    rate: Annotated[Annotated[float, _check_rate] | None, "requests a second, Poisson; inf: all at once"] = None
    max_length: Annotated[_AtLeastTwo | None, "skip longer requests (prompt and output)"] = None
    seed: Annotated[Count, "of random lengths, arrivals and tokens"] = 0


@flag_set
class BenchFlags:
    """`longctx bench` of a server."""

    url: Annotated[
        str | None, "http(s)://HOST:PORT of an OpenAI server to send the workload to; --model: its name there"
    ] = None
    api_key: Annotated[str | None, "key of that server"] = None


@flag_set
class ResultFlags:
    """Files that results are written to."""

    json: Annotated[_Output | None, "all figures, every request and step"] = None
    plot: Annotated[_Drawing | None, ".png or .svg: latencies over time, and more of simulations"] = None
    trace: Annotated[_Output | None, ".json for ui.perfetto.dev: stages and requests"] = None
    out: Annotated[_Folder | None, "folder of report.html, its drawing as SVG and PNG, requests as CSV"] = None


@flag_set
class GenerateFlags:
    """`longctx generate`."""

    prompt: Annotated[str | None, "text to continue"] = None
    prompt_file: Annotated[Path | None, "file of the text to continue; -: standard input"] = None
    chat: Annotated[bool, "the prompt is a user's message: apply the chat template"] = False
    chunk_size: Annotated[Positive, "the most prompt tokens of a step"] = 1024


@flag_set
class ChatFlags:
    """`longctx chat`."""

    system: Annotated[str | None, "system message, which every conversation begins with"] = None
    max_length: Annotated[
        _AtLeastTwo | None, "tokens of the longest conversation. None: the model's context, or what fits into memory"
    ] = None
    chunk_size: Annotated[Positive, "the most prompt tokens of a step"] = 512
    no_history: Annotated[bool, "neither read nor keep the messages of earlier runs"] = False


@flag_set
class DemoFlags:
    """`longctx demo`."""

    tokens: Annotated[int, Range(2, 131_000), "length of the document in bytes"] = 32768
    questions: Annotated[int, Range(1, 200), "pass keys to hide"] = 8
    seed: Annotated[Count, "of the document"] = 0
    chunk_size: Annotated[Positive, "the most tokens of a step"] = 512


@flag_set
class DoctorFlags:
    """`longctx doctor`."""

    model: Annotated[str | None, "check a checkpoint: directory, .gguf file, or owner/name[@revision] of the hub"] = (
        None
    )
    json: Annotated[bool, "print JSON, as for a bug report"] = False


@flag_set
class ProfileFlags:
    """`longctx profile`."""

    out: Annotated[_Output, "profile to write, JSON, for bench --profile; with --import a topology, for --topology"]
    max_context: Annotated[Positive | None, "the longest measured context in tokens. None: 16,384"] = None
    repeats: Annotated[Positive, "runs of each batch; their median counts"] = 5
    check: Annotated[Count, "random batches to evaluate the predictor on"] = 20
    tables: Annotated[
        tuple[str, ...],
        "measure nothing: CSV of a GPU's measured products, attention or all-reduces, which --topology is fitted to",
    ] = ()


@flag_set
class QuantizeFlags:
    """`longctx quantize`."""

    model: Annotated[str, "checkpoint directory, or the name of a model of the hub"]
    out: Annotated[Path, "directory to write, which is empty or does not exist"]
    modules: Annotated[
        Literal["ffn", "all"], "ffn: the feed-forward of all layers but the first and the last; all: all projections"
    ] = "ffn"


@flag_set
class SimulateFlags:
    """`longctx simulate`."""

    model: Annotated[str, "llama-3-8b, llama-3-70b, llama-3-405b-fp8 and others, or a folder with config.json"] = (
        "llama-3-8b"
    )
    mix: Annotated[str | None, "of the papers: sharegpt4, sharegpt4-5-long or sharegpt4-5-2m; --requests of it"] = None
    users: Annotated[Positive | None, "users who wait for an answer before they go on"] = None
    jitter: Annotated[_AtLeastZero | None, "let requests come up to X seconds later, at random"] = None
    window: Annotated[AboveZero | None, "end after X seconds; requests that have not ended are open then"] = None
    instances: Annotated[Positive, "engines, each on devices of its own"] = 1
    baseline: Annotated[
        str | None,
        "a system on as many devices: medha, medha-fcfs, edf, srpf, lrs, sarathi-512, sarathi-2048, vllm or striped",
    ] = None
    cluster: Annotated[
        Path | None,
        "TOML of a cluster, as of longctx serve: its conductor and instances; see docs/simulation_cluster.md",
    ] = None
    capacity: Annotated[
        str | None,
        "search the highest rate that meets ttft_p90=SECONDS, tpot_p99=SECONDS, e2e_p50=SECONDS, in_time=SHARE",
    ] = None
    sweep: Annotated[str | None, "simulate each combination of values of flags: policy=fcfs,ilrs,qps=0.5,1"] = None
    jobs: Annotated[Positive | None, "processes that simulate at a time. None: as many as cores"] = None


@flag_set
class PlanFlags:
    """`longctx plan`."""

    gpus: Annotated[Annotated[int, Range(1, 65_536)], "the most GPUs"]
    context: Annotated[str, "tokens of the prompt: 131072, 128K or 10M (decimal)"]
    ttft: Annotated[AboveZero, "seconds to its first token, at most"]
    tpot: Annotated[AboveZero, "seconds a token, of it and beside it, at most"]
    output_tokens: Annotated[int, "tokens of its answer"] = 256
    host_gpus: Annotated[Positive, "GPUs of one host, the most for --tensor"] = 8
    best: Annotated[Positive, "plans to show"] = 10
    price: Annotated[AboveZero | None, "of a GPU for an hour, for the cost of a prompt"] = None
    no_check: Annotated[bool, "don't simulate the winner"] = False
    compare: Annotated[bool, "show what AIConfigurator, which must be installed, estimates of each plan too"] = False


@flag_set
class ReplayFlags:
    """`longctx replay`."""

    log: Annotated[Path, "folder that `longctx serve --record DIR` wrote; its last run"]
    json: Annotated[_Output | None, "all that is found"] = None
    record_key_file: Annotated[Path | None, "secret that encrypts the log, if it is encrypted"] = None
    explain: Annotated[str | None, "what this request waited for, step by step"] = None
    slo: Annotated[
        str | None, "NAME=X[,NAME=X] of ttft_factor, ttft_least, tpot, tpot_factor, step_seconds: default targets"
    ] = None


@flag_set
class ApiKeyFlags:
    """`longctx api-key`."""

    name: Annotated[str, "name of the key, which is the tenant of its requests"]


@flag_set
class ServeFlags:
    """`longctx serve`."""

    config: Annotated[Path | None, "TOML: flags by their names; the command line overrides it"] = None
    host: Annotated[str, "address to listen on; 127.0.0.1 is reached from this host only"] = "127.0.0.1"
    port: Annotated[int, "port to listen on; 0: any"] = 8000
    api_key_file: Annotated[
        Path | None,
        "keys that clients need, one a line: KEY or 'NAME KEY [OPTION=VALUE ...]', the tenant's name, see "
        "docs/serving.md. None: no key is needed",
    ] = None
    api_key: Annotated[tuple[str, ...], "a key that clients need"] = ()
    admin_key: Annotated[tuple[str, ...], "a key of an administrator"] = ()
    admin_key_file: Annotated[Path | None, "keys of administrators, likewise"] = None
    allow_anonymous: Annotated[
        bool, "let other hosts' clients in without keys, where --host is not of this host alone"
    ] = False
    tls_cert: Annotated[Path | None, "certificate in PEM, with those between it and its CA's. None: plain HTTP"] = None
    tls_key: Annotated[Path | None, "its private key in PEM, which its owner alone may read"] = None
    tls_ca: Annotated[
        Path | None,
        "CAs in PEM of a cluster's certificates: a server's clients need one, a router verifies its instances",
    ] = None
    served_model_name: Annotated[tuple[str, ...], "name by which clients call the model"] = ()
    chat_template: Annotated[Path | None, "jinja2 template of chats. None: the tokenizer's own"] = None
    record: Annotated[
        _PrivateFolder | None,
        "folder to which all that decisions follow from is written, for `longctx replay`: no prompt, no answer",
    ] = None
    record_bytes: Annotated[int, "bytes of a run, after which nothing more is recorded"] = 2**30
    record_key_file: Annotated[Path | None, "secret that encrypts what is recorded. None: it is not encrypted"] = None
    kv_secret_file: Annotated[
        Path | None,
        "secret of the keys of pages, the same for engines that share them. None: one in --kv-disk, or random",
    ] = None


@flag_set
class TransferFlags:
    """Prefill and decode apart."""

    role: Annotated[Role | None, "let requests move between this server and others. None: they stay"] = None
    kv_host: Annotated[str, "address where others fetch pages"] = "127.0.0.1"
    kv_port: Annotated[int, "port where others fetch pages; 0: any"] = 0
    kv_advertise: Annotated[str | None, "host by which others reach it. None: --kv-host"] = None
    kv_peer: Annotated[
        tuple[str, ...],
        "HOST[:PORT] whose pages are fetched when a request says so, besides this host's own; of a router, from which "
        "instances may register. Or a network, such as 10.0.0.0/8",
    ] = ()
    kv_plain: Annotated[bool, "do not encrypt pages: faster, for a trusted network"] = False
    kv_messenger: Annotated[Messenger, "what carries the pages"] = "zmq"


@flag_set
class ClusterFlags:
    """Many engines behind one address."""

    cluster: Annotated[Path | None, "TOML of a cluster: serve its instances; flags of engines stand in there"] = None
    launcher: Annotated[Launcher | None, "what starts them. None: as the file says"] = None
    instance_key_file: Annotated[
        Path | None, "keys of instances that run already or join: 'NAME KEY' of each, or one KEY of all others"
    ] = None
    join: Annotated[tuple[str, ...], "HOST:PORT of a cluster's router, whose instance this server becomes"] = ()
    join_key_file: Annotated[Path | None, "the key with which that router lets this instance join"] = None
    join_role: Annotated[Role | None, "role of this instance there at first, with --role both. None: --role"] = None
    join_name: Annotated[str | None, "name of this instance there. None: host and port"] = None
    join_url: Annotated[str | None, "URL by which the router reaches this server. None: its --host and port"] = None
    end_with_stdin: Annotated[bool, "end when standard input closes, as the instances of a cluster do"] = False
