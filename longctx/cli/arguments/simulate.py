"""Flags of `longctx simulate`."""

import argparse
from pathlib import Path

from longctx.cli.arguments.engine import (
    add_engine_arguments,
    add_kv_dtype_argument,
    add_plan_arguments,
    add_scheduling_arguments,
)
from longctx.cli.arguments.workload import add_workload_arguments

SUMMARY = "Serve a workload in virtual time, on devices that need not be there."
MODEL, TOPOLOGY = "llama-3-8b", "h100-rdma"
SWEPT = (
    *(
        "model",
        "topology",
        "baseline",
        "instances",
        "stage",
        "context",
        "tensor",
        "rank_tokens",
        "placement",
        "exchange",
    ),
    *("policy", "chunking", "max_share", "token_budget", "max_running", "page_size", "admission"),
    *("ttft_factor", "ttft_least", "tpot", "tpot_factor", "step_seconds", "qps", "users", "requests", "seed"),
)
"""Names that `--sweep` takes: those of flags."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=MODEL,
        metavar="NAME|DIR",
        help=f"llama-3-8b, llama-3-70b, llama-3-405b-fp8 and others, or a folder with config.json; default: {MODEL}",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of random lengths, arrivals and tokens")
    add_workload_arguments(parser)
    more = parser.add_argument_group("more about the workload")
    more.add_argument("--qps", type=float, metavar="R", dest="rate", help="as --rate")
    more.add_argument(
        "--mix", metavar="NAME", help="of the papers: sharegpt4, sharegpt4-5-long or sharegpt4-5-2m; --requests of it"
    )
    more.add_argument("--users", type=int, metavar="N", help="so many users, who wait for an answer before they go on")
    more.add_argument("--jitter", type=float, metavar="X", help="let requests come up to X seconds later, at random")
    more.add_argument("--window", type=float, metavar="X", help="end after X seconds, whatever has not ended")

    add_kv_dtype_argument(parser)
    add_engine_arguments(parser)
    add_plan_arguments(parser, topology=TOPOLOGY)
    more = parser.add_argument_group("more about the devices")
    more.add_argument("--plan", metavar="NAME=N,..", help="as --stage, --context and others: stage=2,tensor=8")
    more.add_argument(
        "--instances", type=int, default=1, metavar="N", help="engines, each on devices of its own; default: 1"
    )
    more.add_argument(
        "--baseline",
        metavar="NAME",
        help="a system on so many devices: medha, medha-fcfs, edf, srpf, lrs, sarathi-512, sarathi-2048, vllm "
        "or striped",
    )
    more.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="TOML of a cluster, as of longctx serve: its conductor, prefill and decode instances; see "
        "docs/simulation_cluster.md",
    )
    add_scheduling_arguments(parser)

    results = parser.add_argument_group("results")
    results.add_argument(
        "--capacity",
        metavar="TARGETS",
        help="search the highest rate that meets ttft_p90=SECONDS, tpot_p99=SECONDS, e2e_p50=SECONDS, in_time=SHARE",
    )
    results.add_argument(
        "--sweep", metavar="NAME=V,V,..", help="simulate each combination of such values: policy=fcfs,ilrs,qps=0.5,1"
    )
    results.add_argument("--jobs", type=int, metavar="N", help="processes of --sweep; default: as many as cores")
    results.add_argument("--json", type=Path, metavar="FILE", help="all figures, every request and step")
    results.add_argument("--plot", type=Path, metavar="FILE", help=".png or .svg: latencies, chunks, stages, pages")
    results.add_argument("--trace", type=Path, metavar="FILE", help=".json for ui.perfetto.dev: stages and requests")
    results.add_argument(
        "--out", type=Path, metavar="DIR", help="report.html, its drawing as SVG and PNG, requests as CSV"
    )
