"""Flags that belong to no settings of the library: of models, processes, workloads, results, and of single commands."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from longctx.cli.files import check_drawing, check_folder, check_input, check_output
from longctx.cluster.conductor.config import Role
from longctx.cluster.config import Launcher, Messenger
from longctx.models.builtin import TINY
from longctx.models.validation import MAX_INT32
from longctx.serving.validation import AboveZero, Count, Positive, Range

Dtype = Literal["float32", "bfloat16", "float16"]
_AtLeastZero = Annotated[float, Range(0)]
_AtLeastTwo = Annotated[int, Range(2)]
_Input = Annotated[Path, check_input]
_Output = Annotated[Path, check_output]
_Folder = Annotated[Path, check_folder]
_PrivateFolder = Annotated[Path, partial(check_folder, mode=0o700)]
_Drawing = Annotated[Path, check_output, check_drawing]


def _check_rate(flag: str, value: float) -> None:
    if not value >= 1e-6:  # infinite: all at once
        raise ValueError(f"{flag} must be at least 1e-06, got {value}")


flag_set = dataclass(init=False, repr=False, eq=False)
"""A dataclass that declares flags alone: it has no instances, as their values stay among the options."""


@flag_set
class ModelFlags:
    """A model, and what an engine predicts from.

    Attributes:
      model: checkpoint directory, .gguf file, or owner/name[@revision] of the hub; default: the built-in one.
      dtype: of the parameters and the cache. None: the checkpoint's own.
      compile_cache: whether compiled programs are kept for the next run.
      preset: a paper's scheduling, placement and exchange; other flags override it.
      topology: devices and links that costs are predicted from: h100-nvlink, h100-rdma, h100-tcp, a100-800g and others,
        or a JSON file. None: found.
      profile: profile of this engine, from `longctx profile`.
    """

    model: str | Path = TINY
    dtype: Dtype | None = None
    compile_cache: bool = True
    preset: Literal["medha", "sarathi", "meta"] | None = None
    topology: str | None = None
    profile: _Input | None = None


@flag_set
class ProcessFlags:
    """Processes that run an engine together.

    Attributes:
      coordinator: HOST:PORT where process 0 listens; "auto" finds it from Slurm, Open MPI or Kubernetes.
      num_processes: processes in all.
      process_id: id of this process, from 0.
      failure_timeout: seconds until a lost process is noticed.
      join_timeout: seconds for which processes wait for each other.
      ports: LOW:HIGH, of which process 0 listens on one beside the coordinator's. None: any.
      group_secret_file: from `longctx group-secret`; only processes that have it can join. None: LONGCTX_GROUP_SECRET.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    failure_timeout: float = 30.0
    join_timeout: float = 120.0
    ports: str | None = None
    group_secret_file: Path | None = None


@flag_set
class WorkloadFlags:
    """A workload, from a file or synthetic.

    Attributes:
      workload: trace (JSON lines, or CSV of lengths).
      limit: only the first N requests of the file.
      scale_lengths: all lengths of the file times X.
      requests: generate N requests instead of reading a file. None: 16.
      prompt_tokens: N, LOW:HIGH or LOW:HIGH:log. None: 64:512.
      output_tokens: N, LOW:HIGH or LOW:HIGH:log. None: 16:64.
      shared_prefix: further tokens that all prompts begin with.
      rate: requests a second, Poisson; inf: all at once.
      max_length: skip longer requests (prompt and output).
      seed: of random lengths, arrivals and tokens.
    """

    workload: _Input | None = None
    limit: Positive | None = None
    scale_lengths: AboveZero | None = None
    requests: Annotated[int, Range(1, 1_000_000)] | None = None
    prompt_tokens: str | None = None
    output_tokens: str | None = None
    shared_prefix: Annotated[int, Range(0, MAX_INT32)] | None = None
    rate: Annotated[float, _check_rate] | None = None
    max_length: _AtLeastTwo | None = None
    seed: Count = 0


@flag_set
class ResultFlags:
    """Files that results are written to.

    Attributes:
      json: all figures, every request and step.
      plot: .png or .svg: latencies over time, and more of simulations.
      trace: .json for ui.perfetto.dev: stages and requests.
      out: folder of report.html, its drawing as SVG and PNG, requests as CSV.
    """

    json: _Output | None = None
    plot: _Drawing | None = None
    trace: _Output | None = None
    out: _Folder | None = None


@flag_set
class GenerateFlags:
    """`longctx generate`.

    Attributes:
      prompt: text to continue.
      prompt_file: file of the text to continue.
      chat: the prompt is a user's message: apply the chat template.
      chunk_size: the most prompt tokens of a step.
    """

    prompt: str | None = None
    prompt_file: Path | None = None
    chat: bool = False
    chunk_size: Positive = 1024


@flag_set
class ChatFlags:
    """`longctx chat`.

    Attributes:
      system: system message, which every conversation begins with.
      max_length: tokens of the longest conversation. None: the model's context, or what fits into memory.
      chunk_size: the most prompt tokens of a step.
      no_history: neither read nor keep the messages of earlier runs.
    """

    system: str | None = None
    max_length: _AtLeastTwo | None = None
    chunk_size: Positive = 512
    no_history: bool = False


@flag_set
class DemoFlags:
    """`longctx demo`.

    Attributes:
      tokens: length of the document in bytes.
      questions: pass keys to hide.
      seed: of the document.
      chunk_size: the most tokens of a step.
    """

    tokens: int = 32768
    questions: Positive = 8
    seed: Count = 0
    chunk_size: Positive = 512


@flag_set
class DoctorFlags:
    """`longctx doctor`.

    Attributes:
      model: check a checkpoint: directory, .gguf file, or owner/name[@revision] of the hub.
      json: print JSON, as for a bug report.
    """

    model: str | None = None
    json: bool = False


@flag_set
class ProfileFlags:
    """`longctx profile`.

    Attributes:
      out: profile to write, JSON, for bench --profile.
      max_context: the longest measured context in tokens. None: 16,384.
      repeats: runs of each batch; their median counts.
      check: random batches to evaluate the predictor on.
    """

    out: _Output
    max_context: Positive | None = None
    repeats: Positive = 5
    check: Count = 20


@flag_set
class QuantizeFlags:
    """`longctx quantize`.

    Attributes:
      model: checkpoint directory, or the name of a model of the hub.
      out: directory to write, which is empty or does not exist.
      modules: ffn: the feed-forward of all layers but the first and the last; all: all projections.
    """

    model: str
    out: Path
    modules: Literal["ffn", "all"] = "ffn"


@flag_set
class SimulateFlags:
    """`longctx simulate`.

    Attributes:
      model: llama-3-8b, llama-3-70b, llama-3-405b-fp8 and others, or a folder with config.json.
      mix: of the papers: sharegpt4, sharegpt4-5-long or sharegpt4-5-2m; --requests of it.
      users: users who wait for an answer before they go on.
      jitter: let requests come up to X seconds later, at random.
      window: end after X seconds; requests that have not ended are open then.
      instances: engines, each on devices of its own.
      baseline: a system on as many devices: medha, medha-fcfs, edf, srpf, lrs, sarathi-512, sarathi-2048, vllm or
        striped.
      cluster: TOML of a cluster, as of longctx serve: its conductor and instances; see docs/simulation_cluster.md.
      capacity: search the highest rate that meets ttft_p90=SECONDS, tpot_p99=SECONDS, e2e_p50=SECONDS, in_time=SHARE.
      sweep: simulate each combination of values of flags: policy=fcfs,ilrs,qps=0.5,1.
      jobs: processes that simulate at a time. None: as many as cores.
    """

    model: str = "llama-3-8b"
    mix: str | None = None
    users: Positive | None = None
    jitter: _AtLeastZero | None = None
    window: AboveZero | None = None
    instances: Positive = 1
    baseline: str | None = None
    cluster: Path | None = None
    capacity: str | None = None
    sweep: str | None = None
    jobs: Positive | None = None


@flag_set
class PlanFlags:
    """`longctx plan`.

    Attributes:
      gpus: the most GPUs.
      context: tokens of the prompt: 131072, 128K or 10M (decimal).
      ttft: seconds to its first token, at most.
      tpot: seconds a token, of it and beside it, at most.
      output_tokens: tokens of its answer.
      host_gpus: GPUs of one host, the most for --tensor.
      best: plans to show.
      price: of a GPU for an hour, for the cost of a prompt.
      no_check: don't simulate the winner.
    """

    gpus: Annotated[int, Range(1, 65_536)]
    context: str
    ttft: AboveZero
    tpot: AboveZero
    output_tokens: int = 256
    host_gpus: Positive = 8
    best: Positive = 10
    price: AboveZero | None = None
    no_check: bool = False


@flag_set
class ReplayFlags:
    """`longctx replay`.

    Attributes:
      log: folder that `longctx serve --record DIR` wrote; its last run.
      json: all that is found.
      explain: what this request waited for, step by step.
      slo: NAME=X[,NAME=X] of ttft_factor, ttft_least, tpot, tpot_factor, step_seconds: default targets.
    """

    log: Path
    json: _Output | None = None
    explain: str | None = None
    slo: str | None = None


@flag_set
class ServeFlags:
    """`longctx serve`.

    Attributes:
      config: TOML: flags by their names; the command line overrides it.
      host: address to listen on; 127.0.0.1 is reached from this host only.
      port: port to listen on; 0: any.
      api_key_file: keys that clients need, one a line: KEY or 'NAME KEY', the tenant's name. None: no key is needed.
      api_key: a key that clients need.
      admin_key: a key that loads, aborts and profiles need.
      admin_key_file: keys that loads, aborts and profiles need, one a line.
      served_model_name: name by which clients call the model.
      chat_template: jinja2 template of chats. None: the tokenizer's own.
      record: folder to which all that decisions follow from is written, for `longctx replay`: no prompt, no answer.
      record_bytes: bytes of a run, after which nothing more is recorded.
      kv_secret_file: secret of the keys of pages, the same for engines that share them. None: one in --kv-disk, or
        random.
    """

    config: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    api_key: tuple[str, ...] = ()
    admin_key: tuple[str, ...] = ()
    admin_key_file: Path | None = None
    served_model_name: tuple[str, ...] = ()
    chat_template: Path | None = None
    record: _PrivateFolder | None = None
    record_bytes: int = 2**30
    kv_secret_file: Path | None = None


@flag_set
class TransferFlags:
    """Prefill and decode apart.

    Attributes:
      role: let requests move between this server and others. None: they stay.
      kv_host: address where others fetch pages.
      kv_port: port where others fetch pages; 0: any.
      kv_advertise: host by which others reach it. None: --kv-host.
      kv_peer: HOST[:PORT] whose pages are fetched when a request says so, besides this host's own; or a network, such
        as 10.0.0.0/8.
      kv_plain: do not encrypt pages: faster, for a trusted network.
      kv_messenger: what carries the pages.
    """

    role: Role | None = None
    kv_host: str = "127.0.0.1"
    kv_port: int = 0
    kv_advertise: str | None = None
    kv_peer: tuple[str, ...] = ()
    kv_plain: bool = False
    kv_messenger: Messenger = "zmq"


@flag_set
class ClusterFlags:
    """Many engines behind one address.

    Attributes:
      cluster: TOML of a cluster: serve its instances; flags of engines stand in there.
      launcher: what starts them. None: as the file says.
      instance_key_file: an administrator's key of instances that run already.
      join: HOST:PORT of a cluster's router, whose instance this server becomes.
      join_key_file: an administrator's key of that router.
      join_role: role of this instance there at first, with --role both. None: --role.
      join_name: name of this instance there. None: host and port.
      join_url: URL by which the router reaches this server. None: its --host and port.
      end_with_stdin: end when standard input closes, as the instances of a cluster do.
    """

    cluster: Path | None = None
    launcher: Launcher | None = None
    instance_key_file: Path | None = None
    join: tuple[str, ...] = ()
    join_key_file: Path | None = None
    join_role: Role | None = None
    join_name: str | None = None
    join_url: str | None = None
    end_with_stdin: bool = False
